"""``python -m analysis watch RUN_DIR [--once]``: a live view of a run in the terminal.

It reads the run folder and nothing else, so it changes nothing and works wherever the folder can be read. It ends when
the run ends, however it ends, and with Ctrl-C. Where the folder shows no lock, as in a copy, a run that writes nothing
for 5 s counts as ended."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from analysis.commands import run_command
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, Moment, read_json, record_in
from asyncsgd.records.locks import is_locked
from asyncsgd.records.machine import USAGE
from asyncsgd.records.run_folder import find_run
from asyncsgd.records.totals import Totals
from asyncsgd.settings.yaml_reader import read_yaml

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""A run that has not written for this long may be dead. A live one writes twice a second, but not while it prepares
data or evaluates."""
RECENT_ARRIVALS = 200
EVALUATIONS_SHOWN = 5
WORKERS_SHOWN = 16
SPARKLINE_WIDTH = 48
MAX_USAGE_LINE = 1 << 16
"""The most bytes that a line of the file on the use of the machine has."""
BLOCK = 1 << 20
"""Bytes of the log that are read at a time."""
SPARKS = "▁▂▃▄▅▆▇█"
RUNNING = "running"
DEAD = "ended without a summary"


class ProgressRecord(Moment, frozen=True):
    """A record that says how far the run has come."""

    uses: tuple[tuple[int, int], ...] = ()


class WatchedArrival(ProgressRecord, frozen=True, kw_only=True):
    worker: int
    num_samples: int
    wait_seconds: float = 0.0
    pull_seconds: float = 0.0
    compute_seconds: float = 0.0
    push_seconds: float = 0.0


class WatchedEvaluation(ProgressRecord, frozen=True, kw_only=True):
    loss: float | None
    metrics: Mapping[str, float | None] = {}


class WorkerChange(ProgressRecord, frozen=True, kw_only=True):
    """A worker joined or left."""

    worker: int
    reason: str = ""


class FaultRecord(Struct):
    message: str


KINDS: Mapping[str, type[Struct]] = {
    "arrival": WatchedArrival,
    "evaluate": WatchedEvaluation,
    "join": WorkerChange,
    "leave": WorkerChange,
    "fault": FaultRecord,
}


class Usage(Struct):
    """The latest reading of the machine: the busy cores, and of every process its busy cores and bytes of memory."""

    machine: float
    processes: dict[str, tuple[float, float]]
    gpus: tuple[dict[str, float], ...] = ()


@dataclasses.dataclass
class WatchedWorker:
    """What the records say of one worker."""

    num_arrivals: int = 0
    num_samples: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    state: str = ""


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
        self._begin()

    def _begin(self) -> None:
        self.settings = _settings(self.path / "settings.yaml")
        self._num_lines = 0
        self._offset = 0
        self._rest = b""
        self._inode = self._events.stat().st_ino
        self.progress = Totals()
        self.evaluations: list[WatchedEvaluation] = []
        self.workers: dict[int, WatchedWorker] = collections.defaultdict(WatchedWorker)
        self.faults: list[str] = []
        self.usage: Usage | None = None
        """None if the run does not record the use of the machine."""
        self._recent: collections.deque[tuple[float, int]] = collections.deque([(0.0, 0)], RECENT_ARRIVALS)
        self.status = RUNNING
        self.message = ""

    def read(self) -> None:
        """Read what is new.

        Raises:
            UsageError: if the log is damaged.
        """
        try:
            found = self._events.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:  # another run, or the same one again
                self._begin()
            ended = self._has_summary()  # before the records, so that a run that has ended is read to its end
            self._read_records()
            self._read_usage()
            quiet = time.time() - found.st_mtime > QUIET_SECONDS
            if not ended and quiet and not is_locked(self._events) and not self._has_summary():
                self.status = DEAD
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is gone or was renamed while it was watched") from error
        except (ValueError, AttributeError, OSError) as error:
            raise UsageError(f"{self.path} is damaged at line {self._num_lines} of {EVENTS}: {error}") from error

    def _has_summary(self) -> bool:
        if not (self.path / "summary.json").exists():
            return False
        summary = read_json(self.path / "summary.json")
        self.status = str(summary.get("status"))
        self.message = summary.get("message") or ""
        return True

    def _read_records(self) -> None:
        with open(self._events, "rb") as file:
            file.seek(self._offset)
            while block := file.read(BLOCK):
                *lines, self._rest = (self._rest + block).split(b"\n")
                self._offset = file.tell()
                for line in lines:
                    self._num_lines += 1
                    if (record := record_in(line, EVENTS)) is not None:
                        self._take(record)

    def _read_usage(self) -> None:
        """The last whole line of the file; what is torn or of another kind is left out."""
        with contextlib.suppress(OSError, ValueError, IndexError), open(self.path / USAGE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_USAGE_LINE))
            self.usage = msgspec.json.decode(file.read().split(b"\n")[-2], type=Usage)

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        record_type = KINDS.get(str(kind))
        if record_type is None:
            return
        known = msgspec.convert(record, record_type)
        if isinstance(known, ProgressRecord):
            self.progress.advance(known.version, known.total_samples, known.train_seconds, known.uses)
        if isinstance(known, WatchedArrival):
            self._recent.append((known.train_seconds, known.total_samples))
            worker = self.workers[known.worker]
            worker.num_arrivals += 1
            worker.num_samples += known.num_samples
            worker.wait_seconds += known.wait_seconds
            worker.busy_seconds += known.pull_seconds + known.compute_seconds + known.push_seconds
        elif isinstance(known, WatchedEvaluation):
            self.evaluations.append(known)
        elif isinstance(known, WorkerChange):
            state = "left"
            if kind == "join":
                state = ""
            elif known.reason:
                state = f"lost: {known.reason}"
            self.workers[known.worker].state = state
        elif isinstance(known, FaultRecord):
            self.faults.append(known.message)

    @property
    def samples_per_second(self) -> float | None:
        """Over the last arrivals, on the training clock."""
        first_seconds, first_samples = self._recent[0]
        last_seconds, last_samples = self._recent[-1]
        seconds = last_seconds - first_seconds
        return (last_samples - first_samples) / seconds if seconds > 0 else None

    @property
    def budget_share(self) -> float | None:
        """How much of the budget is spent; None where the settings do not name it, as with epochs."""
        seconds = self.progress.train_seconds
        done = {"samples": self.progress.num_samples, "seconds": seconds, "budget_seconds": seconds}
        spent = [value / self.settings[name] for name, value in done.items() if self.settings.get(name)]
        return min(1.0, max(spent)) if spent else None


def _settings(file: Path) -> Mapping[str, Any]:
    """The settings, without groups; empty where they are not written yet, or cannot be read."""
    try:
        settings = read_yaml(file.read_text(encoding="utf-8"), file.name)
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def sparkline(values: Sequence[float | None], width: int = SPARKLINE_WIDTH) -> str:
    """Values as a line of blocks; the lowest is the lowest block. What is not finite is left out.

    >>> sparkline([4.0, 3.0, None, 2.0, 0.0])
    '█▆▅▁'
    >>> len(sparkline(range(1000)))
    48
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) > width:
        finite = [finite[round(position * (len(finite) - 1) / (width - 1))] for position in range(width)]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in finite)


def frame(run: Watched) -> Group:
    """The view of a run as far as it has been read."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    settings = run.settings
    done = run.progress
    speed = run.samples_per_second
    workers = settings.get("nproc", settings.get("workers"))
    training = [*map(settings.get, ("mode", "rule", "problem")), workers and f"{workers} workers"]
    seconds = "virtual s" if settings.get("clock") == "virtual" else "s"
    share = "" if run.budget_share is None else f"   {100 * run.budget_share:.0f} % of the budget"
    delays = done.delays.summary()
    status = run.status
    if status == RUNNING and not run.evaluations:
        status += ": no evaluation yet"
    if run.message:
        status += f": {run.message}"
    facts = {
        "run": f"{run.path}   {', '.join(str(part) for part in training if part)}",
        "status": status,
        "samples": f"{done.num_samples}{share}   {done.num_updates} updates   {done.train_seconds:.1f} {seconds}",
        "speed": "-" if speed is None else f"{speed:.0f} samples/s",
        "delay": f"p50 {delays['p50']}   p95 {delays['p95']}   max {delays['max']} updates" if done.delays else "-",
        "loss": sparkline([evaluation.loss for evaluation in run.evaluations]) or "-",
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold"), Text(value))
    parts: list[Any] = [grid]
    if run.evaluations:
        metrics = list(run.evaluations[-1].metrics)
        rows = [_evaluation(record, metrics) for record in run.evaluations[-EVALUATIONS_SHOWN:]]
        headings = "samples", seconds, "loss", *metrics
        parts.append(_table(f"the last {EVALUATIONS_SHOWN} evaluations", headings, rows))
    if run.workers:
        # those that were lost come first where not all can be shown
        shown = sorted(sorted(run.workers), key=lambda number: not run.workers[number].state)[:WORKERS_SHOWN]
        rows = [_worker(number, run.workers[number]) for number in sorted(shown)]
        parts.append(_table("workers", ("worker", "gradients", "samples", "waits", ""), rows))
        if len(run.workers) > len(shown):
            parts.append(Text(f"and {len(run.workers) - len(shown)} more"))
    if run.usage is not None:
        parts.append(_table(f"machine, {run.usage.machine:.1f} cores busy", ("", "busy", "memory"), _used(run.usage)))
    return Group(*parts, *(Text(f"fault: {fault}", style="red") for fault in run.faults[-EVALUATIONS_SHOWN:]))


def _table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _evaluation(record: WatchedEvaluation, metrics: Iterable[str]) -> list[str]:
    values = [record.loss, *(record.metrics.get(name) for name in metrics)]
    shown = ["-" if value is None else f"{value:.4g}" for value in values]
    return [str(record.total_samples), f"{record.train_seconds:.1f}", *shown]


def _worker(number: int, worker: WatchedWorker) -> list[str]:
    total = worker.wait_seconds + worker.busy_seconds
    waits = f"{100 * worker.wait_seconds / total:.0f} %" if total > 0 else "-"
    return [str(number), str(worker.num_arrivals), str(worker.num_samples), waits, worker.state]


def _used(usage: Usage) -> list[list[str]]:
    """Busy cores and memory of every process, and of every GPU."""
    used = [(name, f"{cores:.2f} cores", resident) for name, (cores, resident) in usage.processes.items()]
    used = used[:WORKERS_SHOWN]
    for number, gpu in enumerate(usage.gpus):
        share = gpu.get("utilisation", math.nan)
        used.append((f"GPU {number}", f"{100 * share:.0f} %", gpu.get("bytes", math.nan)))
    return [[name, busy, f"{size / 2**30:.2f} GiB"] for name, busy, size in used]


def watch(run: str | Path, once: bool, stop: threading.Event) -> None:
    """Draw the run until it ends, or `stop` is set; with `once` as it is now."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    watched = Watched(find_run(run))
    watched.read()
    if once or watched.status != RUNNING:
        console.print(frame(watched))
        return
    with Live(frame(watched), console=console, auto_refresh=False) as live:
        while watched.status == RUNNING and not stop.wait(REFRESH_SECONDS):
            watched.read()
            live.update(frame(watched), refresh=True)


def main(argv: Sequence[str] | None = None) -> int:
    # An exception would be lost where the signal comes amid an import from C.
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, interrupted: stop.set())
    try:
        return run_command(
            functools.partial(watch, stop=stop),
            __doc__,
            argv,
            {
                "run": {"metavar": "RUN", "help": "a run folder, the beginning of its name in runs/, or last"},
                "--once": {"action": "store_true", "help": "print one picture and stop, e.g. for a pipe"},
            },
        )
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
