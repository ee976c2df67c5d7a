"""``python -m analysis.lab_notes RUNS_DIR``: our runs in the terms of the reference lab notes, beside their rows.

One row per mode, number of workers and batch size: devices, processes x batch, perplexity, seconds. The notes gave one
perplexity per process, measured on its own share of the evaluation data and with its own random masks. Here all
processes evaluate one frozen model on the whole set with the same masks, so there is one exact number; beside it stands
what the processes measured, each on its share, at the last evaluation of a run (``worker_losses`` in events.jsonl; runs
on the virtual clock and older ones have none).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import carried_out
from analysis.compare import Statistic, counted, drawn
from analysis.findings.lab_notes import REFERENCE, SOURCE, Ratios, ReferenceRow, reference_ratios, row_beside
from analysis.report.tables.text import MISSING
from asyncsgd.records.events import read_json

if TYPE_CHECKING:  # pandas takes a second to import, which --help and a typing error should not
    from analysis.study.run import Run
    from analysis.study.types import Arm, Study, StudyRun

EXAMPLE = """\
examples:
  python -m analysis.lab_notes runs
  python -m analysis.lab_notes runs/lab_notes --format md"""

PERPLEXITY = (
    "Perplexity: e to the evaluation loss, which is exact: one frozen model on the whole evaluation set, the same "
    "masks for every run. Over seeds it is e to the mean loss, the geometric mean of the perplexities."
)
EXACT_ONLY = "No run here recorded what each process measured on its own share, so there is no range over processes."
PER_PROCESS = "Per process: the lowest and the highest of e to the mean loss that a process measured on its own share."
THE_NOTES = (
    f"{SOURCE[0].upper()}{SOURCE[1:]} have one perplexity per process, each on its own share and with masks of its "
    "own, from a model and GPUs of their own. So the numbers themselves are not comparable; their ratios are."
)
AGREES = (
    "Async / sync: what asynchronous processes took and reached, as shares of what as many synchronous ones did. Ours: "
    "geometric mean over the seeds that both have, and the range over them. The notes: one run each, the mean over its "
    "processes. A line agrees where both ratios lie on the same side "
    "of 1 as in the notes; a verdict with an interval is in python -m analysis.report."
)


@dataclasses.dataclass(frozen=True)
class NotesRow:
    """One row of the table."""

    mode: str
    num_workers: int | None
    batch_size: int | None
    clock: str
    settings: tuple[tuple[str, str], ...]
    """(key, value) of the arm's other settings; those in which no rows of one clock differ are not shown."""
    num_done: int
    num_all: int
    num_diverged: int
    device: str
    """What the processes computed on: ``2 cores``, ``4 GPUs``; ``virtual`` where one process computes for all."""
    num_devices: int | None
    exact_loss: Statistic
    worker_losses: tuple[float, ...]
    """Of each process the mean over runs, each on its own share; empty where no run recorded any."""
    seconds: Statistic
    timing_notes: tuple[str, ...]
    by_seed: Mapping[int, tuple[float, float]]
    """Loss and seconds of the runs with both."""

    @property
    def reference(self) -> ReferenceRow | None:
        return row_beside(self.mode, self.num_workers, self.batch_size, self.num_devices)


@dataclasses.dataclass(frozen=True)
class Notes:
    """The table and the lines under it."""

    rows: tuple[NotesRow, ...]
    lines: tuple[str, ...]

    @property
    def missing(self) -> tuple[ReferenceRow, ...]:
        """The rows of the notes that no run here stands beside."""
        beside = [row.reference for row in self.rows]
        return tuple(row for row in REFERENCE if row not in beside)


def lab_notes(study: Study) -> Notes:
    """Make the table of a study: the test runs of a sweep, or all pretraining runs of a plain folder.

    Only runs with status DONE are in a mean; first replicates only, so that every seed counts once.
    """
    rows = tuple(
        row for arm in study.arms if (runs := study.of("test", arm.name)) and (row := _row(arm, runs)) is not None
    )
    lines = [PERPLEXITY, PER_PROCESS if any(row.worker_losses for row in rows) else EXACT_ONLY, THE_NOTES]
    lines += _warnings(study, rows)
    return Notes(rows, tuple(lines))


def _row(arm: Arm, runs: Sequence[StudyRun]) -> NotesRow | None:
    from analysis.study.machines import timing_notes

    first = [run for run in runs if run.replicate == 0]
    done = [run.run for run in first if run.run is not None and run.run.done and not run.diverged]
    recorded = [losses for run in done if (losses := _worker_losses(run))]
    keys = {key: value for key, value in arm.settings.items() if key not in _IN_OTHER_COLUMNS}
    rates = sorted({run.learning_rate for run in done if run.learning_rate is not None})
    if len(rates) == 1:
        keys["learning_rate"] = rates[0]
    device, num_devices = _devices(arm, done)
    several_gpus = keys.pop("data_parallel", False) and device.endswith("GPUs")
    return NotesRow(
        mode="DataParallel" if several_gpus else arm.algorithm,
        num_workers=arm.num_workers,
        batch_size=arm.batch_size,
        clock=arm.clock,
        settings=tuple(
            (key, f"{value:g}" if isinstance(value, float) else str(value)) for key, value in sorted(keys.items())
        ),
        num_done=len(done),
        num_all=len(first),
        num_diverged=sum(run.diverged for run in first),
        device=device,
        num_devices=num_devices,
        exact_loss=Statistic.of(run.summary.get("final_eval_loss") for run in done),
        worker_losses=tuple(map(statistics.fmean, zip(*recorded, strict=False))),
        seconds=Statistic.of(run.summary.get("train_seconds") for run in done),
        timing_notes=tuple(timing_notes(done)),
        by_seed={run.summary.get("seed", 0): values for run in done if None not in (values := _loss_and_seconds(run))},
    )


def _loss_and_seconds(run: Run) -> tuple[Any, Any]:
    return run.summary.get("final_eval_loss"), run.summary.get("train_seconds")


def _devices(arm: Arm, runs: Sequence[Run]) -> tuple[str, int | None]:
    """In words, and how many; of the first run that says so."""
    if arm.virtual:
        return "virtual", None
    for run in runs:
        try:
            environment = read_json(run.path / "environment.json")
            number, kind = int(environment["num_devices"]), "core" if environment["device"] == "cpu" else "GPU"
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an older run, or a damaged file
        return f"{number} {kind}{'s' * (number != 1)}", number
    return MISSING, None


_IN_OTHER_COLUMNS = frozenset(("mode", "rule", "nproc", "workers", "batch_size", "clock"))


def _worker_losses(run: Run) -> list[float]:
    from asyncsgd.records.events import read_events

    last: dict[str, Any] = {}
    try:
        for record in read_events(run.path / "events.jsonl"):
            if record.get("kind") == "evaluate":
                last = record
    except (OSError, ValueError):
        pass  # told by loading already
    losses = last.get("worker_losses")
    if not isinstance(losses, list) or not all(isinstance(loss, int | float) for loss in losses):
        return []  # e.g. null of a process whose share is empty
    return [float(loss) for loss in losses]


def _warnings(study: Study, rows: Sequence[NotesRow]) -> list[str]:
    lines = []
    if len({row.clock for row in rows}) > 1:
        lines.append("WARNING: measured and virtual seconds are both here; they must not be compared")
    for note in dict.fromkeys(note for row in rows for note in row.timing_notes):
        names = [f"{row.mode} {row.num_workers} x {row.batch_size}" for row in rows if note in row.timing_notes]
        lines.append(f"NOTE: {note} ({'; '.join(names)})")
    runs = [run.run for run in study.of("test") if run.run is not None]
    if any(run.summary.get("from_scratch") is True for run in runs):
        lines.append("NOTE: from scratch: not STILT")
    told = {run.evaluation_set for run in runs if run.evaluation_set is not None}
    if len(told) > 1:
        lines.append(
            f"WARNING: the runs were evaluated on {len(told)} different data sets, or with different masks; their "
            f"losses must not be compared"
        )
    budgets = sorted({run.summary["num_samples"] for run in runs if run.done and run.summary.get("num_samples")})
    if len(budgets) > 1 and budgets[0] != budgets[-1]:
        lines.append(f"NOTE: budgets differ, from {budgets[0]} to {budgets[-1]} samples")
    lost = [run for run in study.of("test") if run.run is None or not run.run.done]
    if lost:
        lines += ["not in the means:", *(f"  {run.name}: {run.unusable_because or run.status}" for run in lost)]
    if study.set_aside:
        lines += ["set aside:", *(f"  {item.name}: {item.reason}" for item in study.set_aside)]
    if study.problems:
        lines += ["problems:", *(f"  {problem}" for problem in study.problems)]
    return lines


def render(notes: Notes, form: str) -> str:
    """The tables and their lines; `form` is ``text`` or ``md``."""
    if not notes.rows:
        return "\n".join(["no pretraining run has been found", "", *notes.lines]) + "\n"
    line_end = "\n\n" if form == "md" else "\n"  # Markdown joins lines with no empty one between them
    lines = line_end.join(notes.lines)
    parts = ["\n".join(drawn(_cells(notes), form)), lines, "\n".join(drawn(_agreement(notes.rows), form)), AGREES]
    return "\n\n".join(parts) + "\n"


def _agreement(rows: Sequence[NotesRow]) -> list[list[str]]:
    """The ratios of asynchronous to synchronous rows, beside those of the notes."""
    lines = [["processes", "clock", "seconds, async / sync", "notes", "perplexity, async / sync", "notes", "agrees"]]
    for there in reference_ratios():
        pairs = [
            (ours, other)
            for ours in rows
            for other in rows
            if (ours.mode, other.mode, ours.clock) == ("async", "sync", other.clock)
            and (ours.num_workers, ours.batch_size) == (other.num_workers, other.batch_size)
            and (ours.num_workers, ours.batch_size) == (there.processes, there.batch_size)
        ]
        name = f"{there.processes} x {there.batch_size}"
        notes = f"{there.seconds:.2f}", f"{there.perplexity:.3f}"
        if not pairs:
            lines.append([name, MISSING, MISSING, notes[0], MISSING, notes[1], MISSING])
        for ours, other in pairs:
            both = [(ours.by_seed[seed], other.by_seed[seed]) for seed in sorted(ours.by_seed.keys() & other.by_seed)]
            # Logarithms of ratios; a loss is the logarithm of a perplexity already.
            perplexity = [async_[0] - sync[0] for async_, sync in both]
            seconds = [math.log(async_[1] / sync[1]) for async_, sync in both]
            ratios = _ratio(seconds, ".2f"), notes[0], _ratio(perplexity, ".3f"), notes[1]
            lines.append([name, ours.clock, *ratios, _agrees(there, seconds, perplexity)])
    return lines


def _ratio(logs: Sequence[float], form: str) -> str:
    if not logs:
        return MISSING
    mean = f"{math.exp(statistics.fmean(logs)):{form}}"
    return mean if len(logs) == 1 else f"{mean} ({math.exp(min(logs)):{form}} to {math.exp(max(logs)):{form}})"


def _agrees(there: Ratios, seconds: Sequence[float], perplexity: Sequence[float]) -> str:
    """In which of the two our mean lies on the same side of 1."""
    if not seconds:
        return MISSING
    both = ("seconds", there.seconds, seconds), ("perplexity", there.perplexity, perplexity)
    same = [name for name, ratio, logs in both if math.log(ratio) * statistics.fmean(logs) > 0]
    return "yes" if len(same) == 2 else f"{same[0]} only" if same else "no"


def _cells(notes: Notes) -> list[list[str]]:
    rows = notes.rows
    shown = _differing(rows)
    with_settings = any(key in shown for row in rows for key, _ in row.settings)
    header = ["mode", *["settings"] * with_settings, "devices", "processes x batch", "perplexity", "per process"]
    header += ["eval loss (exact)", "seconds", "runs", "notes: GPUs", "notes: perplexity", "notes: seconds"]
    lines = [header]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row.settings if key in shown)
        several = len(row.worker_losses) > 1
        lines.append(
            [
                row.mode,
                *[settings or MISSING] * with_settings,
                row.device,
                f"{row.num_workers or MISSING} x {row.batch_size or MISSING}",
                MISSING if row.exact_loss.mean is None else f"{math.exp(row.exact_loss.mean):.2f}",
                " to ".join(f"{math.exp(end(row.worker_losses)):.2f}" for end in (min, max)) if several else MISSING,
                _mean(row.exact_loss, ".4f"),
                _mean(row.seconds, ".1f") + " virtual" * (row.clock == "virtual" and row.seconds.mean is not None),
                counted(row.num_done, row.num_all, row.num_diverged),
                *_of_the_notes(row.reference),
            ]
        )
    for there in notes.missing:
        ours = [there.mode, *[MISSING] * with_settings, MISSING, f"{there.processes} x {there.batch_size}"]
        lines.append([*ours, *[MISSING] * 5, *_of_the_notes(there)])
    return lines


def _of_the_notes(row: ReferenceRow | None) -> list[str]:
    if row is None:
        return [MISSING] * 3
    return [str(row.devices), ", ".join(f"{value:.2f}" for value in row.perplexities), f"{row.seconds:.2f}"]


def _differing(rows: Sequence[NotesRow]) -> frozenset[str]:
    """The settings in which rows of one clock differ."""
    differing = set()
    for clock in {row.clock for row in rows}:
        same = [dict(row.settings) for row in rows if row.clock == clock]
        differing |= {key for row in same for key in row if len({other.get(key) for other in same}) > 1}
    return frozenset(differing)


def _mean(statistic: Statistic, form: str) -> str:
    if statistic.mean is None:
        return MISSING
    return format(statistic.mean, form) + ("" if statistic.sd is None else f" ± {statistic.sd:{form}}")


def parser() -> argparse.ArgumentParser:
    """The flags; building them imports nothing heavy."""
    flags = argparse.ArgumentParser(
        prog="python -m analysis.lab_notes",
        description="Our runs beside the rows of the lab notes: devices, processes x batch, perplexity, seconds.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("runs_dir", type=Path, metavar="RUNS_DIR", help="a sweep's folder, or one with run folders")
    flags.add_argument("--format", choices=("text", "md"), default="text", help="of the table (default: text)")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code (2 for what the user has to change)."""
    flags = parser().parse_args(arguments)

    def command() -> None:
        from analysis.study.read import load_study

        print(render(lab_notes(load_study(flags.runs_dir)), flags.format), end="")

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
