"""``python -m analysis.lab_notes RUNS_DIR``: the table of the reference lab notes.

One row per mode, number of workers and batch size: the evaluation loss and the seconds, as mean ± standard deviation
over seeds. The notes gave the evaluation loss as each worker had computed it, on its own share of the evaluation data
and with its own random masks. Here all workers evaluate one frozen model on the whole set with the same masks, so there
is one exact number; beside it stands what the workers measured, each on its share, at the last evaluation of a run
(``worker_losses`` in events.jsonl; runs on the virtual clock and older ones have none).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import carried_out
from analysis.compare import Statistic, counted, drawn
from analysis.report.tables.text import MISSING

if TYPE_CHECKING:  # pandas takes a second to import, which --help and a typing error should not
    from analysis.study.run import Run
    from analysis.study.types import Arm, Study, StudyRun

EXAMPLE = """\
examples:
  python -m analysis.lab_notes runs
  python -m analysis.lab_notes runs/lab_notes --format md"""

EXACT_ONLY = (
    "Eval loss is exact: one frozen model on the whole evaluation set, the same masks for every run. No run here "
    "recorded what each worker measured on its own share (on the virtual clock one process evaluates the whole set)."
)
PER_WORKER = (
    "Exact: one frozen model on the whole evaluation set, the same masks for every run. Per worker: the lowest and the "
    "highest that a worker measured on its own share."
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
    exact_loss: Statistic
    worker_losses: tuple[float, float] | None
    """Lowest and highest over workers and runs; None where no run recorded any."""
    seconds: Statistic
    timing_notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Notes:
    """The table and the lines under it."""

    rows: tuple[NotesRow, ...]
    lines: tuple[str, ...]


def lab_notes(study: Study) -> Notes:
    """Make the table of a study: the test runs of a sweep, or all pretraining runs of a plain folder.

    Only runs with status DONE are in a mean; first replicates only, so that every seed counts once.
    """
    rows = tuple(
        row for arm in study.arms if (runs := study.of("test", arm.name)) and (row := _row(arm, runs)) is not None
    )
    lines = [PER_WORKER if any(row.worker_losses is not None for row in rows) else EXACT_ONLY]
    lines += _warnings(study, rows)
    return Notes(rows, tuple(lines))


def _row(arm: Arm, runs: Sequence[StudyRun]) -> NotesRow | None:
    from analysis.study.run import timing_notes

    first = [run for run in runs if run.replicate == 0]
    done = [run.run for run in first if run.run is not None and run.run.done and not run.diverged]
    recorded = [loss for run in done for loss in _worker_losses(run)]
    keys = {key: value for key, value in arm.settings.items() if key not in _IN_OTHER_COLUMNS}
    rates = sorted({run.learning_rate for run in done if run.learning_rate is not None})
    if len(rates) == 1:
        keys["learning_rate"] = rates[0]
    return NotesRow(
        mode=arm.algorithm,
        num_workers=arm.num_workers,
        batch_size=arm.batch_size,
        clock=arm.clock,
        settings=tuple(
            (key, f"{value:g}" if isinstance(value, float) else str(value)) for key, value in sorted(keys.items())
        ),
        num_done=len(done),
        num_all=len(first),
        num_diverged=sum(run.diverged for run in first),
        exact_loss=Statistic.of(run.summary.get("final_eval_loss") for run in done),
        worker_losses=(min(recorded), max(recorded)) if recorded else None,
        seconds=Statistic.of(run.summary.get("train_seconds") for run in done),
        timing_notes=tuple(timing_notes(done)),
    )


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
    return [float(loss) for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []


def _warnings(study: Study, rows: Sequence[NotesRow]) -> list[str]:
    lines = []
    if len({row.clock for row in rows}) > 1:
        lines.append("WARNING: measured and virtual seconds are both here; they must not be compared")
    for note in dict.fromkeys(note for row in rows for note in row.timing_notes):
        names = [f"{row.mode}, {row.num_workers} workers" for row in rows if note in row.timing_notes]
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
    """The table and its lines; `form` is ``text`` or ``md``."""
    table = drawn(_cells(notes.rows), form) if notes.rows else ["no pretraining run has been found"]
    return "\n".join([*table, "", *notes.lines]) + "\n"


def _cells(rows: Sequence[NotesRow]) -> list[list[str]]:
    shown = _differing(rows)
    with_settings = any(key in shown for row in rows for key, _ in row.settings)
    with_workers = any(row.worker_losses is not None for row in rows)
    header = ["mode", *["settings"] * with_settings, "workers", "batch"]
    header += [*["eval loss per worker"] * with_workers, "eval loss (exact)", "seconds", "runs"]
    lines = [header]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row.settings if key in shown)
        workers = MISSING if row.worker_losses is None else f"{row.worker_losses[0]:.4f} to {row.worker_losses[1]:.4f}"
        lines.append(
            [
                row.mode,
                *[settings or MISSING] * with_settings,
                MISSING if row.num_workers is None else str(row.num_workers),
                MISSING if row.batch_size is None else str(row.batch_size),
                *[workers] * with_workers,
                _mean(row.exact_loss, ".4f"),
                _mean(row.seconds, ".1f") + " virtual" * (row.clock == "virtual" and row.seconds.mean is not None),
                counted(row.num_done, row.num_all, row.num_diverged),
            ]
        )
    return lines


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
        description="The lab notes' table: mode, workers, batch, evaluation loss and seconds, mean ± sd over seeds.",
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
