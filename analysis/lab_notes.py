"""``python -m analysis lab_notes RUNS_DIR``: our runs in the terms of the reference lab notes, beside their rows.

One row per mode, number of workers and batch size: devices, processes x batch, perplexity, seconds. The notes gave one
perplexity per process, measured on its own share of the evaluation data and with its own random masks. Here all
processes evaluate one frozen model on the whole set with the same masks, so there is one exact number; beside it stands
what the processes measured, each on its share, at the last evaluation of a run (``worker_losses`` in events.jsonl; runs
on the virtual clock and older ones have none).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.commands import carried_out
from analysis.compare import counted
from analysis.reference_notes import REFERENCE, SOURCE, Ratios, ReferenceRow, reference_ratios, row_beside

if TYPE_CHECKING:  # pandas takes a second to import, which --help and a typing error should not
    import pandas as pd

    from analysis.questions import Plan

MISSING = "-"

EXAMPLE = """\
examples:
  python -m analysis lab_notes runs
  python -m analysis lab_notes runs/lab_notes --format md"""

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
    "of 1 as in the notes; a verdict with an interval is in python -m analysis report."
)


class NotesRow(NamedTuple):
    """One row of the table."""

    mode: str
    num_workers: int | None
    batch_size: int | None
    clock: str
    settings: Mapping[str, str]
    """The arm's other settings; those in which no rows of one clock differ are not shown."""
    num_done: int
    num_all: int
    num_diverged: int
    device: str
    """What the processes computed on: ``2 cores``, ``4 GPUs``; ``virtual`` where one process computes for all."""
    num_devices: int | None
    losses: Sequence[float]
    worker_losses: Sequence[float]
    """Of each process the mean over runs, each on its own share; empty where no run recorded any."""
    seconds: Sequence[float]
    timing_notes: Sequence[str]
    by_seed: Mapping[float, tuple[float, float]]
    """Loss and seconds of the runs with both."""

    @property
    def reference(self) -> ReferenceRow | None:
        return row_beside(self.mode, self.num_workers, self.batch_size, self.num_devices)


class Notes(NamedTuple):
    """The table and the lines under it."""

    rows: tuple[NotesRow, ...]
    lines: tuple[str, ...]

    @property
    def missing(self) -> tuple[ReferenceRow, ...]:
        """The rows of the notes that no run here stands beside."""
        beside = [row.reference for row in self.rows]
        return tuple(row for row in REFERENCE if row not in beside)


def lab_notes(runs: pd.DataFrame, plan: Plan) -> Notes:
    """Make the table of a study: the test runs of a sweep, or all pretraining runs of a plain folder.

    Only runs with status DONE are in a mean; first replicates only, so that every seed counts once.
    """
    tests = runs[(runs["stage"] == "test") & (runs["replicate"] == 0) & (runs["status"] != "UNREADABLE")]
    order = list(plan.arms) or sorted(tests["arm"].unique(), key=_order)
    arms = dict(iter(tests.groupby("arm", sort=False)))
    rows = tuple(_row(arms[arm]) for arm in order if arm in arms)
    lines = [PERPLEXITY, PER_PROCESS if any(row.worker_losses for row in rows) else EXACT_ONLY, THE_NOTES]
    return Notes(rows, (*lines, *_warnings(runs, plan, rows)))


def _order(arm: str) -> tuple[int, str]:
    modes = ("single", "sync", "pipeline", "async")
    return next((place for place, mode in enumerate(modes) if arm.startswith(mode)), len(modes)), arm


def _row(runs: pd.DataFrame) -> NotesRow:
    from analysis.pairs import timing_caveats
    from analysis.places import NOT_OF_AN_ARM

    first, done = runs.iloc[0], runs[(runs["status"] == "DONE") & ~runs["diverged"]]
    recorded = [told for one in done["details"] if _known(told := one.get("worker_losses"))]
    settings = {key: value for key, value in first["settings"].items() if key not in NOT_OF_AN_ARM}
    if done["learning_rate"].nunique() != 1:
        settings.pop("learning_rate", None)
    device, number = _devices(runs)
    several = settings.pop("data_parallel", False) and device.endswith("GPUs")
    known = done.dropna(subset=["loss", "seconds"])
    return NotesRow(
        mode="DataParallel" if several else first["algorithm"],
        num_workers=_whole(first["workers"]),
        batch_size=_whole(first["batch_size"]),
        clock=first["clock"],
        settings={key: f"{one:g}" if isinstance(one, float) else str(one) for key, one in sorted(settings.items())},
        num_done=len(done),
        num_all=len(runs),
        num_diverged=int(runs["diverged"].sum()),
        device=device,
        num_devices=number,
        losses=done["loss"].dropna().tolist(),
        worker_losses=tuple(map(statistics.fmean, zip(*recorded, strict=False))),
        seconds=done["seconds"].dropna().tolist(),
        timing_notes=timing_caveats(done) if first["clock"] == "measured" else (),
        by_seed={row.seed: (row.loss, row.seconds) for row in known.itertuples()},
    )


def _whole(value: float) -> int | None:
    return None if value != value else int(value)


def _known(losses: Any) -> bool:
    return isinstance(losses, list) and all(isinstance(loss, int | float) for loss in losses)


def _devices(runs: pd.DataFrame) -> tuple[str, int | None]:
    """In words, and how many; of the first run that says so."""
    if runs["clock"].iloc[0] == "virtual":
        return "virtual", None
    for run in runs.itertuples():
        if run.device and run.num_devices == run.num_devices:
            number, kind = int(run.num_devices), "core" if run.device == "cpu" else "GPU"
            return f"{number} {kind}{'s' * (number != 1)}", number
    return MISSING, None


def _warnings(runs: pd.DataFrame, plan: Plan, rows: Sequence[NotesRow]) -> list[str]:
    lines = []
    if len({row.clock for row in rows}) > 1:
        lines.append("WARNING: measured and virtual seconds are both here; they must not be compared")
    for note in dict.fromkeys(note for row in rows for note in row.timing_notes):
        names = [f"{row.mode} {row.num_workers} x {row.batch_size}" for row in rows if note in row.timing_notes]
        lines.append(f"NOTE: {note} ({'; '.join(names)})")
    tests = runs[runs["stage"] == "test"]
    done = tests[(tests["status"] == "DONE") & ~tests["diverged"]]
    machines = done.loc[done["clock"] == "measured", "machine"]
    if machines.nunique() > 1:
        lines.append(f"WARNING: seconds of {machines.nunique()} machines are here; they must not be compared")
    if (tests["from_scratch"] == True).any():  # noqa: E712
        lines.append("NOTE: from scratch: not STILT")
    told = set(zip(tests.loc[tests["data"] != "", "data"], tests.loc[tests["data"] != "", "evaluation"], strict=True))
    if len(told) > 1:
        lines.append(
            f"WARNING: the runs were evaluated on {len(told)} different data sets, or with different masks; their "
            f"losses must not be compared"
        )
    budgets = sorted(done["samples"].dropna())
    if budgets and budgets[0] != budgets[-1]:
        lines.append(f"NOTE: budgets differ, from {budgets[0]:g} to {budgets[-1]:g} samples")
    lost = tests[(tests["status"] != "DONE") | tests["diverged"]]
    if len(lost):
        lines += ["not in the means:", *(f"  {row.run}: {row.left_out or row.status}" for row in lost.itertuples())]
    return lines + ["problems:"] * bool(plan.problems) + [f"  {problem}" for problem in plan.problems]


def render(notes: Notes, form: str) -> str:
    """The tables and their lines; `form` is ``text`` or ``md``."""
    if not notes.rows:
        return "\n".join(["no pretraining run has been found", "", *notes.lines]) + "\n"
    line_end = "\n\n" if form == "md" else "\n"  # Markdown joins lines with no empty one between them
    parts = [_drawn(_cells(notes), form), line_end.join(notes.lines), _drawn(_agreement(notes.rows), form), AGREES]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _drawn(lines: list[list[str]], form: str) -> str:
    import pandas as pd

    from analysis import tables

    header, *rows = lines
    table = pd.DataFrame(rows, columns=pd.Index(header))
    return tables.markdown(table) if form == "md" else table.to_string(index=False)


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
    with_settings = any(key in shown for row in rows for key in row.settings)
    header = ["mode", *["settings"] * with_settings, "devices", "processes x batch", "perplexity", "per process"]
    header += ["eval loss (exact)", "seconds", "runs", "notes: GPUs", "notes: perplexity", "notes: seconds"]
    lines = [header]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row.settings.items() if key in shown)
        several = len(row.worker_losses) > 1
        lines.append(
            [
                row.mode,
                *[settings or MISSING] * with_settings,
                row.device,
                f"{row.num_workers or MISSING} x {row.batch_size or MISSING}",
                f"{math.exp(statistics.fmean(row.losses)):.2f}" if row.losses else MISSING,
                " to ".join(f"{math.exp(end(row.worker_losses)):.2f}" for end in (min, max)) if several else MISSING,
                _mean(row.losses, ".4f"),
                _mean(row.seconds, ".1f") + " virtual" * (row.clock == "virtual" and len(row.seconds) > 0),
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
        same = [row.settings for row in rows if row.clock == clock]
        differing |= {key for row in same for key in row if len({other.get(key) for other in same}) > 1}
    return frozenset(differing)


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return MISSING
    told = format(statistics.fmean(values), form)
    return told if len(values) == 1 else f"{told} ± {statistics.stdev(values):{form}}"


def parser() -> argparse.ArgumentParser:
    """The flags; building them imports nothing heavy."""
    flags = argparse.ArgumentParser(
        prog="python -m analysis lab_notes",
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
        from analysis.read import read

        runs, _, plan = read(flags.runs_dir)
        print(render(lab_notes(runs, plan), flags.format), end="")

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
