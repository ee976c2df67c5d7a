"""``python -m analysis watch RUN_DIR [--once]``: a live view of a run in the terminal.

It reads the run folder and nothing else, so it changes nothing and works wherever the folder can be read. It ends when
the run ends, however it ends, and with Ctrl-C."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import carried_out
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_json, record_in
from asyncsgd.records.locks import is_locked
from asyncsgd.records.machine import USAGE
from asyncsgd.records.run_folder import find_run
from asyncsgd.records.totals import Delays, Totals
from asyncsgd.settings.yaml_reader import read_yaml

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""A run that has written this long ago may be dead. A live one writes twice a second, but not while it prepares data or
evaluates."""

RECENT_ARRIVALS = 200
EVALUATIONS_SHOWN = 5
WORKERS_SHOWN = 16
LONGEST_LOOK = 1 << 16
"""Bytes of a line of the file about the machine."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 48

RUNNING, DEAD = "running", "ended without a summary"


@dataclasses.dataclass
class Worker:
    """What the records say of one worker."""

    num_arrivals: int = 0
    num_samples: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    state: str = ""

    @property
    def wait_share(self) -> float | None:
        """Of its seconds, those that it was idle; None where its records have no seconds."""
        total = self.wait_seconds + self.busy_seconds
        return self.wait_seconds / total if total > 0 else None


class Watched:
    """A run folder, read as it grows.

    Args:
        path: the run's folder.

    Raises:
        UsageError: if there is no run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events = path / EVENTS
        if not self._events.is_file():
            raise UsageError(f"{path} holds no {EVENTS}; name a run's folder, e.g. runs/NAME")
        self._restart()

    def _restart(self) -> None:
        self.settings = _settings(self.path)
        self._num_lines, self._offset, self._rest = 0, 0, b""
        self._inode = self._events.stat().st_ino
        self.progress = Totals()
        self.evaluations: list[Mapping[str, Any]] = []
        self.workers: dict[int, Worker] = {}
        self.faults: list[str] = []
        self.usage: Mapping[str, Any] = {}
        """The last look at the machine; empty where nobody looks."""
        self._recent: collections.deque[tuple[float, int]] = collections.deque([(0.0, 0)], RECENT_ARRIVALS)
        self.summary: Mapping[str, Any] | None = None
        self.status = RUNNING

    def read(self) -> None:
        """Read what is new.

        Raises:
            UsageError: if the log is damaged.
        """
        try:
            found = self._events.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:  # another run, or the same one again
                self._restart()
            summary = self._summary()  # before the records, so that a run that has ended is read to its end
            self._read_records()
            self._read_usage()
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is gone or was renamed while it was watched") from error
        except (ValueError, OSError) as error:
            raise UsageError(f"{self.path}: {error}") from error
        if summary is None and time.time() - found.st_mtime > QUIET_SECONDS and not is_locked(self._events):
            summary = self._summary()
            self.status = RUNNING if summary is not None else DEAD
        else:
            self.status = RUNNING
        if summary is not None:
            self.summary, self.status = summary, str(summary.get("status"))

    def _read_records(self) -> None:
        with open(self._events, "rb") as file:
            file.seek(self._offset)
            *lines, self._rest = (self._rest + file.read()).split(b"\n")
            self._offset = file.tell()
        for line in lines:
            self._num_lines += 1
            where = f"{EVENTS}: line {self._num_lines}"
            if (record := record_in(line, where)) is not None:
                try:
                    self._take(record)
                except (KeyError, TypeError, AttributeError, ValueError) as error:
                    raise ValueError(f"{where} is damaged: {error!r}") from error

    def _read_usage(self) -> None:
        """The last whole line of the file; what is torn or of another kind is left out."""
        with contextlib.suppress(OSError, ValueError, RecursionError), open(self.path / USAGE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LOOK))
            look = json.loads(file.read().split(b"\n")[-2])
            if isinstance(look, dict) and isinstance(look.get("processes"), dict):
                self.usage = look

    def _summary(self) -> dict[str, Any] | None:
        try:
            summary = read_json(self.path / "summary.json")
        except FileNotFoundError:
            return None
        if not isinstance(summary, dict):
            raise ValueError("summary.json is damaged: not an object")
        return summary

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        if kind in ("arrival", "evaluate", "join", "leave"):
            self.progress.advance(
                int(record["version"]),
                int(record["total_samples"]),
                float(record["train_seconds"]),
                [(dispatch, int(delay)) for dispatch, delay in record.get("uses", ())],
            )
        if kind == "arrival":
            self._recent.append((float(record["train_seconds"]), int(record["total_samples"])))
            worker = self._worker(record)
            worker.num_arrivals += 1
            worker.num_samples += record["num_samples"]
            worker.wait_seconds += record.get("wait_seconds", 0.0)
            worker.busy_seconds += sum(record.get(f"{part}_seconds", 0.0) for part in ("pull", "compute", "push"))
        elif kind == "evaluate":
            for value in (record["loss"], *(record.get("metrics") or {}).values()):
                _ = value is None or math.isfinite(value)  # refuses what is no number
            self.evaluations.append(record)
        elif kind == "join":
            self._worker(record).state = ""
        elif kind == "leave":
            reason = record.get("reason")
            self._worker(record).state = f"lost: {reason}" if reason else "left"
        elif kind == "fault":
            self.faults.append(str(record["message"]))

    def _worker(self, record: Mapping[str, Any]) -> Worker:
        return self.workers.setdefault(int(record["worker"]), Worker())

    @property
    def samples_per_second(self) -> float | None:
        """Over the last arrivals, on the training clock."""
        (first_seconds, first_samples), (last_seconds, last_samples) = self._recent[0], self._recent[-1]
        seconds = last_seconds - first_seconds
        return (last_samples - first_samples) / seconds if seconds > 0 else None

    @property
    def budget_share(self) -> float | None:
        """How much of the budget is spent; None where the settings do not name it, as with epochs."""
        spent = [
            done / self.settings[name]
            for name, done in (
                ("samples", self.progress.num_samples),
                ("seconds", self.progress.train_seconds),
                ("budget_seconds", self.progress.train_seconds),
            )
            if isinstance(self.settings.get(name), int | float) and self.settings[name] > 0
        ]
        return min(1.0, max(spent)) if spent else None

    @property
    def is_over(self) -> bool:
        return self.status != RUNNING


def _settings(path: Path) -> Mapping[str, Any]:
    """The settings, without groups; empty where they are not written yet, or cannot be read."""
    try:
        settings = read_yaml((path / "settings.yaml").read_text(encoding="utf-8"), "settings.yaml")
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        return {}
    simulated = settings.get("simulate")
    return simulated if isinstance(simulated, dict) else settings


def sparkline(values: Sequence[float | None], width: int = SPARKLINE_WIDTH) -> str:
    """Values as a line of blocks; the lowest is the lowest block. What is not finite is left out.

    >>> sparkline([4.0, 3.0, None, 2.0, 0.0])
    '█▆▅▁'
    >>> len(sparkline(range(1000)))
    48
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) > width:
        finite = [finite[round(place * (len(finite) - 1) / (width - 1))] for place in range(width)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in finite)


def frame(run: Watched) -> Group:
    """The picture of a run as it is known now."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    settings, seconds = run.settings, "virtual s" if run.settings.get("clock") == "virtual" else "s"
    what = [settings.get("mode"), settings.get("rule"), settings.get("problem")]
    workers = settings.get("nproc", settings.get("workers"))
    described = ", ".join(str(part) for part in (*what, workers and f"{workers} workers") if part)
    share = "" if run.budget_share is None else f"   {100 * run.budget_share:.0f} % of the budget"
    done = run.progress
    facts = [
        ("run", f"{run.path}   {described}"),
        ("status", _status(run)),
        (
            "samples",
            f"{done.num_samples}{share}   {done.num_updates} updates   {done.train_seconds:.1f} {seconds}",
        ),
        ("speed", "-" if run.samples_per_second is None else f"{run.samples_per_second:.0f} samples/s"),
        ("delay", _delay(done.delays)),
        ("loss", sparkline([evaluation["loss"] for evaluation in run.evaluations]) or "-"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(value))
    parts: list[Any] = [grid]
    if run.evaluations:
        parts.append(_evaluations(run, seconds))
    if run.workers:
        parts.append(_workers(run))
    if run.usage:
        parts.append(_machine(run.usage))
    parts += [Text(f"fault: {fault}", style="red") for fault in run.faults[-EVALUATIONS_SHOWN:]]
    return Group(*parts)


def _status(run: Watched) -> str:
    message = (run.summary or {}).get("message")
    if run.status == RUNNING and not run.evaluations:
        return f"{RUNNING}: it prepares"
    return f"{run.status}: {message}" if message else run.status


def _delay(delays: Delays) -> str:
    said = delays.summary()
    return f"p50 {said['p50']}   p95 {said['p95']}   max {said['max']} updates" if delays else "-"


def _evaluations(run: Watched, seconds: str) -> Any:
    from rich.table import Table

    metrics = list(run.evaluations[-1].get("metrics") or {})
    table = Table(box=None, title=f"the last {EVALUATIONS_SHOWN} evaluations", title_justify="left")
    for heading in ("samples", seconds, "loss", *metrics):
        table.add_column(heading, justify="right")
    for record in run.evaluations[-EVALUATIONS_SHOWN:]:
        values = [record["loss"], *(record.get("metrics", {}).get(name) for name in metrics)]
        shown = ["-" if value is None else f"{value:.4g}" for value in values]
        table.add_row(str(record["total_samples"]), f"{record['train_seconds']:.1f}", *shown)
    return table


def _workers(run: Watched) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title="workers", title_justify="left")
    for heading in ("worker", "gradients", "samples", "waits"):
        table.add_column(heading, justify="right")
    table.add_column("")
    numbers = sorted(run.workers)
    # Those that were lost come first where not all can be shown.
    shown = sorted(numbers, key=lambda number: not run.workers[number].state)[:WORKERS_SHOWN]
    for number in sorted(shown):
        worker = run.workers[number]
        share = "-" if worker.wait_share is None else f"{100 * worker.wait_share:.0f} %"
        table.add_row(str(number), str(worker.num_arrivals), str(worker.num_samples), share, Text(worker.state))
    if len(numbers) > len(shown):
        table.caption = f"and {len(numbers) - len(shown)} more"
    return table


def _machine(look: Mapping[str, Any]) -> Any:
    """Busy cores and memory of every process, and of every GPU."""
    from rich.table import Table

    table = Table(box=None, title=f"machine, {look.get('machine', 0.0):.1f} cores busy", title_justify="left")
    for heading in ("", "busy", "memory"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for name, (cores, resident) in list(look["processes"].items())[:WORKERS_SHOWN]:
        table.add_row(name, f"{cores:.2f} cores", f"{resident / 2**30:.2f} GiB")
    for number, gpu in enumerate(look.get("gpus", ())):
        table.add_row(f"GPU {number}", f"{100 * gpu['utilisation']:.0f} %", f"{gpu['bytes'] / 2**30:.2f} GiB")
    return table


def watch(path: Path, once: bool, stop: threading.Event) -> None:
    """Draw the run until it ends, or `stop` is set; with `once` as it is now."""
    from rich.console import Console
    from rich.live import Live

    console, run = Console(), Watched(path)
    run.read()
    if once or run.is_over:
        console.print(frame(run))
        return
    with Live(frame(run), console=console, auto_refresh=False) as live:
        while not run.is_over and not stop.wait(REFRESH_SECONDS):
            run.read()
            live.update(frame(run), refresh=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis watch", description=__doc__.splitlines()[2])
    parser.add_argument("run", metavar="RUN", help="a run folder, the beginning of its name in runs/, or last")
    parser.add_argument("--once", action="store_true", help="print one picture and stop, e.g. for a pipe")
    given = parser.parse_args(argv)
    # An exception would be lost where the signal comes amid an import from C.
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, interrupted: stop.set())
    try:
        return carried_out(lambda: watch(find_run(given.run), given.once, stop))
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
