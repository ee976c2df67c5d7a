"""``python -m analysis lab_notes RUNS_DIR``: our runs in the terms of the lab notes, each next to the notes' own row.

One row per mode, number of workers and batch size: devices, processes x batch, perplexity, seconds. The notes gave one
perplexity per process, measured on its own share of the evaluation data and with its own random masks. Here all
processes evaluate one frozen model on the whole set with the same masks, so there is one exact number; beside it stands
what the processes measured, each on its share, at the last evaluation of a run (``worker_losses`` in events.jsonl; runs
on the virtual clock and older ones have none).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.commands import run_command
from analysis.compare import counted, left_out
from analysis.compare import notes as comparability_notes
from analysis.lab_notes_rows import NOTES_ROWS, NotesRow, async_and_sync, notes_ratios, row_beside

if TYPE_CHECKING:  # pandas takes a second to import, which --help and a typing error should not
    from pandas import DataFrame, Series

    from analysis.load import Study
    from analysis.page import Addition
    from analysis.questions import Plan

EMPTY_CELL = "-"

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
    "The lab notes have one perplexity per process, each on its own share and with masks of its "
    "own, from a model and GPUs of their own. So the numbers themselves are not comparable; their ratios are."
)
AGREES = (
    "Async / sync: what asynchronous processes took and reached, as shares of what as many synchronous ones did. Ours: "
    "geometric mean over the seeds that both have, and the range over them. The notes: one run each, the mean over its "
    "processes. A line agrees where both ratios lie on the same side "
    "of 1 as in the notes; a verdict with an interval is in python -m analysis report."
)


class Row(NamedTuple):
    """One row of the table: an arm, and the row of the notes that it is shown with."""

    mode: str
    workers: int | None
    batch_size: int | None
    clock: str
    settings: Mapping[str, str]
    """The arm's other settings; those in which no rows of one clock differ are not shown."""
    device: str
    """What the processes computed on: ``2 cores``, ``4 GPUs``; ``virtual`` where one process computes for all."""
    notes_row: NotesRow | None
    """The row of the notes with the same processes and batch."""
    runs: DataFrame
    done: DataFrame
    """The runs that are in the means."""
    share_losses: list[float]
    """The loss of each process on its own share of the data, the mean over runs; empty where no run recorded any."""

    @property
    def arm(self) -> str:
        return str(self.runs["arm"].iloc[0])

    @property
    def condition(self) -> tuple[int | None, int | None, str]:
        """An asynchronous and a synchronous row are compared if this is equal."""
        return self.workers, self.batch_size, self.clock


def table_rows(runs: DataFrame, plan: Plan) -> list[Row]:
    """A row for every arm of a study: its test runs, or all pretraining runs of a plain folder.

    Only runs with status DONE are in a mean; first replicates only, so that every seed counts once.
    """
    is_test = (runs["stage"] == "test") & (runs["replicate"] == 0) & (runs["status"] != "UNREADABLE")
    tests = runs[is_test & (runs["task"] == "masked_lm")]
    order = list(plan.arms) or sorted(tests["arm"].unique(), key=_order)
    arms = dict(iter(tests.groupby("arm", sort=False)))
    return [_row(arms[arm]) for arm in order if arm in arms]


def _order(arm: str) -> tuple[int, str]:
    modes = ("single", "sync", "pipeline", "async")
    for position, mode in enumerate(modes):
        if arm.startswith(mode):
            return position, arm
    return len(modes), arm


def _row(runs: DataFrame) -> Row:
    from analysis.places import NOT_OF_AN_ARM
    from analysis.runs import rows_with

    first = runs.iloc[0]
    done = rows_with(runs, status="DONE", diverged=False)
    recorded = []
    for details in done["details"]:
        losses = details.get("worker_losses")
        if losses and None not in losses:
            recorded.append(losses)
    settings = dict(first["settings"])
    is_data_parallel = settings.pop("data_parallel", False)
    if done["learning_rate"].nunique() != 1:
        settings.pop("learning_rate", None)
    shown = {}
    for key, value in sorted(settings.items()):
        if key not in NOT_OF_AN_ARM:
            shown[key] = f"{value:g}" if isinstance(value, float) else str(value)
    device, num_devices = _devices(runs)
    mode = first["algorithm"]
    if is_data_parallel and device.endswith("GPUs"):
        mode = "DataParallel"
    workers = _whole(first["workers"])
    batch_size = _whole(first["batch_size"])
    return Row(
        mode=mode,
        workers=workers,
        batch_size=batch_size,
        clock=first["clock"],
        settings=shown,
        device=device,
        notes_row=row_beside(mode, workers, batch_size, num_devices),
        runs=runs,
        done=done,
        share_losses=[statistics.fmean(losses) for losses in zip(*recorded, strict=False)],
    )


def _whole(value: float) -> int | None:
    """A number of a table as an integer; None for nan."""
    return None if math.isnan(value) else int(value)


def _devices(runs: DataFrame) -> tuple[str, int | None]:
    """The devices in words, and how many there are, from the first run that records them."""
    if runs["clock"].iloc[0] == "virtual":
        return "virtual", None
    for run in runs.itertuples():
        if run.device and not math.isnan(run.num_devices):
            number = int(run.num_devices)
            unit = "core" if run.device == "cpu" else "GPU"
            if number != 1:
                unit += "s"
            return f"{number} {unit}", number
    return EMPTY_CELL, None


def _warnings(runs: DataFrame, plan: Plan) -> list[str]:
    from analysis.runs import rows_with

    tests = runs[runs["stage"] == "test"]
    first = rows_with(tests, replicate=0)
    done = rows_with(first, status="DONE", diverged=False)
    lines = []
    if first["clock"].nunique() > 1:
        lines.append("WARNING: measured and virtual seconds are both here; they must not be compared")
    lines += comparability_notes(first)
    if tests["from_scratch"].any():
        lines.append("NOTE: from scratch: not STILT")
    known = tests[tests["data"] != ""]
    evaluations = set(zip(known["data"], known["evaluation"], strict=True))
    if len(evaluations) > 1:
        lines.append(
            f"WARNING: the runs were evaluated on {len(evaluations)} different data sets, or with different masks; "
            f"their losses must not be compared"
        )
    if done["samples"].nunique() > 1:
        lines.append(f"NOTE: budgets differ, from {done['samples'].min():g} to {done['samples'].max():g} samples")
    lines += left_out(tests)
    if plan.problems:
        lines.append("problems:")
        lines += [f"  {problem}" for problem in plan.problems]
    return lines


def addition(study: Study) -> Addition:
    """The part of a study's page on the lab notes: our rows with theirs, and where both agree."""
    from analysis.page import Addition, Section, table

    rows = table_rows(study.runs, study.plan)
    agreement, reasons = _agreement(rows, study.plan)
    notes = [PERPLEXITY, about_processes(rows), THE_NOTES, *_warnings(study.runs, study.plan), *reasons]
    tables = [table(agreement, "Async / sync, beside the notes", (AGREES,))]
    if rows:
        tables.insert(0, table(_cells(rows), "Our rows beside those of the notes", notes))
    return Addition((Section("lab-notes", "The rows of the lab notes", tables=tuple(tables)),))


def about_processes(rows: Sequence[Row]) -> str:
    return PER_PROCESS if any(row.share_losses for row in rows) else EXACT_ONLY


def render(rows: Sequence[Row], lines: Sequence[str], form: str, plan: Plan) -> str:
    """The tables and their lines; `form` is ``text`` or ``md``."""
    agreement, reasons = _agreement(rows, plan)
    lines_below = [PERPLEXITY, about_processes(rows), THE_NOTES, *lines, *reasons]
    if not rows:
        return "\n".join(["no pretraining run has been found", "", *lines_below]) + "\n"
    line_end = "\n\n" if form == "md" else "\n"  # Markdown joins lines with no empty one between them
    parts = [_drawn(_cells(rows), form), line_end.join(lines_below), _drawn(agreement, form), AGREES]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _drawn(table: DataFrame, form: str) -> str:
    from analysis import tables

    return tables.markdown(table) if form == "md" else table.to_string(index=False)


def _agreement(rows: Sequence[Row], plan: Plan) -> tuple[DataFrame, list[str]]:
    """The ratios of asynchronous to synchronous rows, beside those of the notes; and why some are not compared."""
    from pandas import DataFrame

    lines = []
    reasons = []
    for (workers, batch_size), notes_ratio in notes_ratios().items():
        name = f"{workers} x {batch_size}"
        line = {
            "processes": name,
            "clock": EMPTY_CELL,
            "seconds, async / sync": EMPTY_CELL,
            "notes: seconds": f"{notes_ratio[0]:.2f}",
            "perplexity, async / sync": EMPTY_CELL,
            "notes: perplexity": f"{notes_ratio[1]:.3f}",
            "agrees": EMPTY_CELL,
        }
        is_measured = False
        for ours, other in async_and_sync(rows):
            if ours.workers != workers or ours.batch_size != batch_size:
                continue
            is_measured = True
            cells, why = _compared(ours, other, notes_ratio, plan)
            lines.append(line | cells)
            if why:
                reasons.append(f"WARNING: async and sync, {name}, {ours.clock} clock: {why}")
        if not is_measured:
            lines.append(line)
    return DataFrame(lines), reasons


def _compared(ours: Row, other: Row, notes_ratio: tuple[float, float], plan: Plan) -> tuple[dict[str, str], str]:
    """The cells of an asynchronous row beside a synchronous one, and what is not compared, with its reason."""
    import pandas as pd

    from analysis.gate import compare_arms, differences_by_design

    gated = compare_arms(ours.done, other.done, differences_by_design(ours.arm, other.arm, plan))
    cells = {"clock": ours.clock}
    if gated.why_not_comparable:
        cells["agrees"] = "not comparable"
        return cells, f"not comparable: {gated.why_not_comparable}"
    known = [row.done.set_index("seed")[["loss", "seconds"]].dropna() for row in (ours, other)]
    both = pd.concat(known, axis=1, join="inner", keys=("async", "sync"))
    log_perplexity = both["async"]["loss"] - both["sync"]["loss"]
    log_seconds = (both["async"]["seconds"] / both["sync"]["seconds"]).map(math.log)
    why = ""
    if gated.why_untimed:
        why = f"their seconds are not comparable: {gated.why_untimed}"
        log_seconds = log_seconds.iloc[:0]
    cells["seconds, async / sync"] = _ratio(log_seconds, ".2f")
    cells["perplexity, async / sync"] = _ratio(log_perplexity, ".3f")
    cells["agrees"] = _agrees(notes_ratio, log_seconds, log_perplexity)
    return cells, why


def _ratio(logs: Series, form: str) -> str:
    """The geometric mean of ratios whose logarithms are given, and their range."""
    if not len(logs):
        return EMPTY_CELL
    mean = f"{math.exp(logs.mean()):{form}}"
    if len(logs) == 1:
        return mean
    return f"{mean} ({math.exp(min(logs)):{form}} to {math.exp(max(logs)):{form}})"


def _agrees(notes_ratio: tuple[float, float], log_seconds: Series, log_perplexity: Series) -> str:
    """In which of the two our mean lies on the same side of 1 as the ratio of the notes."""
    if not (len(log_seconds) and len(log_perplexity)):
        return EMPTY_CELL
    notes_seconds, notes_perplexity = notes_ratio
    seconds_agree = math.log(notes_seconds) * log_seconds.mean() > 0
    perplexity_agrees = math.log(notes_perplexity) * log_perplexity.mean() > 0
    if seconds_agree and perplexity_agrees:
        return "yes"
    if seconds_agree:
        return "seconds only"
    if perplexity_agrees:
        return "perplexity only"
    return "no"


def _cells(rows: Sequence[Row]) -> DataFrame:
    from pandas import DataFrame

    shown = _differing(rows)
    lines = [_cells_of(row, shown) | _cells_of_notes(row.notes_row) for row in rows]
    shown_notes = [row.notes_row for row in rows]
    for row in NOTES_ROWS:
        if row not in shown_notes:
            name = {"mode": row.mode, "processes x batch": f"{row.processes} x {row.batch_size}"}
            lines.append(name | _cells_of_notes(row))
    table = DataFrame(lines).fillna(EMPTY_CELL)
    return table if shown else table.drop(columns="settings")


def _cells_of(row: Row, shown: set[str]) -> dict[str, str]:
    """The cells of one of our rows, with the settings that are shown."""
    losses = row.done["loss"].dropna().tolist()
    seconds_of_runs = row.done["seconds"].dropna().tolist()
    seconds = _mean(seconds_of_runs, ".1f")
    if row.clock == "virtual" and seconds_of_runs:
        seconds += " virtual"
    settings = [f"{key} {value}" for key, value in row.settings.items() if key in shown]
    perplexity = EMPTY_CELL
    if losses:
        perplexity = f"{math.exp(statistics.fmean(losses)):.2f}"
    per_process = EMPTY_CELL
    if len(row.share_losses) > 1:
        per_process = f"{math.exp(min(row.share_losses)):.2f} to {math.exp(max(row.share_losses)):.2f}"
    return {
        "mode": row.mode,
        "settings": ", ".join(settings) or EMPTY_CELL,
        "devices": row.device,
        "processes x batch": f"{row.workers or EMPTY_CELL} x {row.batch_size or EMPTY_CELL}",
        "perplexity": perplexity,
        "per process": per_process,
        "eval loss (exact)": _mean(losses, ".4f"),
        "seconds": seconds,
        "runs": counted(len(row.done), len(row.runs), int(row.runs["diverged"].sum())),
    }


def _cells_of_notes(row: NotesRow | None) -> dict[str, str]:
    if row is None:
        return {}
    perplexities = ", ".join(f"{value:.2f}" for value in row.perplexities)
    return {"notes: GPUs": str(row.devices), "notes: perplexity": perplexities, "notes: seconds": f"{row.seconds:.2f}"}


def _differing(rows: Sequence[Row]) -> set[str]:
    """The settings in which rows of one clock differ."""
    from asyncsgd.studies.arms import differing

    found: set[str] = set()
    for clock in {row.clock for row in rows}:
        settings = [row.settings for row in rows if row.clock == clock]
        found.update(differing(settings, frozenset()))
    return found


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return EMPTY_CELL
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form}}"


def _run(runs_dir: Path, form: str) -> None:
    from analysis.read import read

    runs, _, plan = read(runs_dir)
    rows = table_rows(runs, plan)
    print(render(rows, _warnings(runs, plan), form, plan), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code (2 for what the user has to change)."""
    flags: dict[str, dict[str, Any]] = {
        "runs_dir": {"type": Path, "metavar": "RUNS_DIR", "help": "a study's folder, or one with run folders"},
        "--format": {"dest": "form", "choices": ("text", "md"), "default": "text", "help": "of the table"},
    }
    return run_command(_run, __doc__, arguments, flags, EXAMPLE)


if __name__ == "__main__":
    sys.exit(main())
