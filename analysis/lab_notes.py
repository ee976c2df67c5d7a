"""``python -m analysis lab_notes RUNS_DIR``: our runs in the terms of the reference lab notes, beside their rows.

One row per mode, number of workers and batch size: devices, processes x batch, perplexity, seconds. The notes gave one
perplexity per process, measured on its own share of the evaluation data and with its own random masks. Here all
processes evaluate one frozen model on the whole set with the same masks, so there is one exact number; beside it stands
what the processes measured, each on its share, at the last evaluation of a run (``worker_losses`` in events.jsonl; runs
on the virtual clock and older ones have none).
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.commands import begun
from analysis.compare import counted, left_out, notes

if TYPE_CHECKING:  # pandas takes a second to import, which --help and a typing error should not
    from pandas import DataFrame, Series

    from analysis.load import Study
    from analysis.page import Addition
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
    "The lab notes have one perplexity per process, each on its own share and with masks of its "
    "own, from a model and GPUs of their own. So the numbers themselves are not comparable; their ratios are."
)
AGREES = (
    "Async / sync: what asynchronous processes took and reached, as shares of what as many synchronous ones did. Ours: "
    "geometric mean over the seeds that both have, and the range over them. The notes: one run each, the mean over its "
    "processes. A line agrees where both ratios lie on the same side "
    "of 1 as in the notes; a verdict with an interval is in python -m analysis report."
)


class Reference(NamedTuple):
    """A row of the lab notes: masked language models on hate-speech posts."""

    mode: str
    """``single``, ``DataParallel``, ``sync`` or ``async``."""
    devices: int
    """GPUs."""
    processes: int
    batch_size: int
    """Of a process; "64 in all" of two synchronous processes is 32."""
    perplexities: tuple[float, ...]
    """At the end; one figure per process where the notes have them."""
    seconds: float

    @property
    def key(self) -> tuple[str, int, int]:
        return self.mode, self.processes, self.batch_size


REFERENCE = (
    Reference("async", 1, 2, 32, (356.05,), 1442.69),
    Reference("async", 1, 4, 16, (364.44,), 1530.95),
    Reference("async", 2, 2, 32, (252.46, 256.68), 670.78),
    Reference("async", 3, 3, 32, (263.60, 274.92, 265.68), 448.63),
    Reference("async", 4, 4, 32, (271.13, 276.38, 282.15, 277.05), 340.29),
    Reference("single", 1, 1, 32, (274.37,), 1294.01),
    Reference("single", 1, 1, 64, (258.66,), 1259.63),
    Reference("DataParallel", 2, 1, 64, (248.02,), 1126.58),
    Reference("sync", 2, 2, 32, (239.79, 256.04), 819.22),
    Reference("sync", 3, 3, 32, (248.08, 246.70, 251.14), 581.81),
    Reference("sync", 4, 4, 32, (254.05, 254.65, 263.18, 248.94), 453.15),
)


def row_beside(mode: str, processes: int | None, batch_size: int | None, devices: int | None) -> Reference | None:
    """The row of the notes with the same mode, processes and batch; of several, the one on as many devices.

    >>> row_beside("async", 2, 32, devices=1).seconds, row_beside("async", 2, 32, devices=2).seconds
    (1442.69, 670.78)
    >>> row_beside("async", 5, 32, devices=5) is None
    True
    """
    rows = [row for row in REFERENCE if row.key == (mode, processes, batch_size)]
    return min(rows, key=lambda row: abs(row.devices - (devices or row.devices)), default=None)


def _async_and_sync(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The asynchronous rows, each with the synchronous ones on as many processes (and GPUs) and the same batch (and
    clock).
    """
    pairs = itertools.product(rows, rows)
    return [(a, s) for a, s in pairs if (a.mode, s.mode) == ("async", "sync") and a[1:4] == s[1:4]]


def reference_ratios() -> dict[tuple[int, int], tuple[float, float]]:
    """(processes, batch) -> seconds and perplexity of asynchronous processes over those of as many synchronous ones, of
    the rows with one process on each GPU.

    >>> {key[0]: (round(seconds, 2), round(perplexity, 3)) for key, (seconds, perplexity) in reference_ratios().items()}
    {2: (0.82, 1.027), 3: (0.77, 1.078), 4: (0.75, 1.084)}
    """
    means = [row._replace(perplexities=(statistics.fmean(row.perplexities),)) for row in REFERENCE]
    return {
        (ours.processes, ours.batch_size): (ours.seconds / other.seconds, ours.perplexities[0] / other.perplexities[0])
        for ours, other in _async_and_sync(means)
    }


class Row(NamedTuple):
    """One row of the table."""

    mode: str
    workers: int | None
    batch_size: int | None
    clock: str
    settings: Mapping[str, str]
    """The arm's other settings; those in which no rows of one clock differ are not shown."""
    device: str
    """What the processes computed on: ``2 cores``, ``4 GPUs``; ``virtual`` where one process computes for all."""
    beside: Reference | None
    """The row of the notes with the same processes and batch."""
    runs: DataFrame
    done: DataFrame
    """Those that are in the means."""
    shares: list[float]
    """Of each process the mean loss over runs, each on its own share; empty where no run recorded any."""

    @property
    def arm(self) -> str:
        return str(self.runs["arm"].iloc[0])


def rows_of(runs: DataFrame, plan: Plan) -> list[Row]:
    """A row for every arm of a study: its test runs, or all pretraining runs of a plain folder.

    Only runs with status DONE are in a mean; first replicates only, so that every seed counts once.
    """
    tests = runs[(runs["stage"] == "test") & (runs["replicate"] == 0) & (runs["status"] != "UNREADABLE")]
    order = list(plan.arms) or sorted(tests["arm"].unique(), key=_order)
    arms = dict(iter(tests.groupby("arm", sort=False)))
    return [_row(arms[arm]) for arm in order if arm in arms]


def _order(arm: str) -> tuple[int, str]:
    modes = ("single", "sync", "pipeline", "async")
    return next((place for place, mode in enumerate(modes) if arm.startswith(mode)), len(modes)), arm


def _row(runs: DataFrame) -> Row:
    from analysis.places import NOT_OF_AN_ARM
    from analysis.runs import where

    first = runs.iloc[0]
    done = where(runs, status="DONE", diverged=False)
    recorded = [losses for one in done["details"] if None not in (losses := one.get("worker_losses") or [None])]
    settings = {key: value for key, value in first["settings"].items() if key not in NOT_OF_AN_ARM}
    if done["learning_rate"].nunique() != 1:
        settings.pop("learning_rate", None)
    device, number = _devices(runs)
    several = settings.pop("data_parallel", False) and device.endswith("GPUs")
    mode = "DataParallel" if several else first["algorithm"]
    workers, batch = (None if value != value else int(value) for value in (first["workers"], first["batch_size"]))
    return Row(
        mode,
        workers,
        batch,
        first["clock"],
        {key: f"{one:g}" if isinstance(one, float) else str(one) for key, one in sorted(settings.items())},
        device,
        row_beside(mode, workers, batch, number),
        runs,
        done,
        list(map(statistics.fmean, zip(*recorded, strict=False))),
    )


def _devices(runs: DataFrame) -> tuple[str, int | None]:
    """In words, and how many; of the first run that says so."""
    if runs["clock"].iloc[0] == "virtual":
        return "virtual", None
    for run in runs.itertuples():
        if run.device and run.num_devices == run.num_devices:
            number = int(run.num_devices)
            kind = "core" if run.device == "cpu" else "GPU"
            return f"{number} {kind}{'s' * (number != 1)}", number
    return MISSING, None


def _warnings(runs: DataFrame, plan: Plan) -> list[str]:
    from analysis.runs import where

    tests = runs[runs["stage"] == "test"]
    first = where(tests, replicate=0)
    done = where(first, status="DONE", diverged=False)
    lines = []
    if first["clock"].nunique() > 1:
        lines.append("WARNING: measured and virtual seconds are both here; they must not be compared")
    lines += notes(first)
    if tests["from_scratch"].any():
        lines.append("NOTE: from scratch: not STILT")
    told = set(zip(tests.loc[tests["data"] != "", "data"], tests.loc[tests["data"] != "", "evaluation"], strict=True))
    if len(told) > 1:
        lines.append(
            f"WARNING: the runs were evaluated on {len(told)} different data sets, or with different masks; their "
            f"losses must not be compared"
        )
    if done["samples"].nunique() > 1:
        lines.append(f"NOTE: budgets differ, from {done['samples'].min():g} to {done['samples'].max():g} samples")
    lines += left_out(tests)
    if plan.problems:
        lines += ["problems:", *(f"  {one}" for one in plan.problems)]
    return lines


def addition(study: Study) -> Addition:
    """What a study of the lab notes has on its page: our rows beside theirs, and where both agree."""
    from analysis.page import Addition, Section, table

    rows = rows_of(study.runs, study.plan)
    agreement, reasons = _agreement(rows, study.plan)
    notes = [PERPLEXITY, about_processes(rows), THE_NOTES, *_warnings(study.runs, study.plan), *reasons]
    tables = [table(agreement, "Async / sync, beside the notes", (AGREES,))]
    if rows:
        tables.insert(0, table(_cells(rows), "Our rows beside those of the notes", notes))
    return Addition((Section("lab-notes", "The rows of the lab notes", tables=tuple(tables)),))


def about_processes(rows: Sequence[Row]) -> str:
    return PER_PROCESS if any(row.shares for row in rows) else EXACT_ONLY


def render(rows: Sequence[Row], lines: Sequence[str], form: str, plan: Plan) -> str:
    """The tables and their lines; `form` is ``text`` or ``md``."""
    agreement, reasons = _agreement(rows, plan)
    told = [PERPLEXITY, about_processes(rows), THE_NOTES, *lines, *reasons]
    if not rows:
        return "\n".join(["no pretraining run has been found", "", *told]) + "\n"
    line_end = "\n\n" if form == "md" else "\n"  # Markdown joins lines with no empty one between them
    parts = [_drawn(_cells(rows), form), line_end.join(told), _drawn(agreement, form), AGREES]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _drawn(table: DataFrame, form: str) -> str:
    from analysis import tables

    return tables.markdown(table) if form == "md" else table.to_string(index=False)


def _agreement(rows: Sequence[Row], plan: Plan) -> tuple[DataFrame, list[str]]:
    """The ratios of asynchronous to synchronous rows, beside those of the notes; and why some are not compared."""
    import pandas as pd
    from pandas import DataFrame

    from analysis.gate import between, told_apart

    lines = []
    reasons = []
    for (workers, batch), there in reference_ratios().items():
        pairs = [pair for pair in _async_and_sync(rows) if pair[0][1:3] == (workers, batch)]
        name = f"{workers} x {batch}"
        theirs = (f"{there[0]:.2f}", f"{there[1]:.3f}")
        if not pairs:
            lines.append([name, MISSING, MISSING, theirs[0], MISSING, theirs[1], MISSING])
        for ours, other in pairs:
            gated = between(ours.done, other.done, told_apart(ours.arm, other.arm, plan))
            if why := gated.unlike or gated.untimed:
                what = "not comparable" if gated.unlike else "their seconds are not comparable"
                reasons.append(f"WARNING: async and sync, {name}, {ours.clock} clock: {what}: {why}")
            if gated.unlike:
                lines.append([name, ours.clock, MISSING, theirs[0], MISSING, theirs[1], "not comparable"])
                continue
            known = [one.done.set_index("seed")[["loss", "seconds"]].dropna() for one in (ours, other)]
            both = pd.concat(known, axis=1, join="inner", keys=(0, 1))
            # logarithms of ratios; a loss is the logarithm of a perplexity already
            logs = (both[0]["seconds"] / both[1]["seconds"]).map(math.log), both[0]["loss"] - both[1]["loss"]
            if gated.untimed:
                logs = (logs[0].iloc[:0], logs[1])
            seconds, perplexity = map(_ratio, logs, (".2f", ".3f"))
            lines.append([name, ours.clock, seconds, theirs[0], perplexity, theirs[1], _agrees(there, logs)])
    header = ["processes", "clock", "seconds, async / sync", "notes: seconds", "perplexity, async / sync"]
    header += ["notes: perplexity", "agrees"]
    return DataFrame(lines, columns=header), reasons


def _ratio(logs: Series, form: str) -> str:
    if not len(logs):
        return MISSING
    mean = f"{math.exp(logs.mean()):{form}}"
    return mean if len(logs) == 1 else f"{mean} ({math.exp(min(logs)):{form}} to {math.exp(max(logs)):{form}})"


def _agrees(there: tuple[float, float], logs: tuple[Series, Series]) -> str:
    """In which of the two our mean lies on the same side of 1."""
    if not (len(logs[0]) and len(logs[1])):
        return MISSING
    both = zip(("seconds", "perplexity"), there, logs, strict=True)
    same = [name for name, ratio, own in both if math.log(ratio) * own.mean() > 0]
    return "yes" if len(same) == 2 else f"{same[0]} only" if same else "no"


def _cells(rows: Sequence[Row]) -> DataFrame:
    from pandas import DataFrame

    shown = _differing(rows)
    lines = []
    for row in rows:
        losses, seconds = (row.done[name].dropna().tolist() for name in ("loss", "seconds"))
        several = row.shares[1:]
        virtual = row.clock == "virtual" and len(seconds) > 0
        line = {
            "mode": row.mode,
            "settings": ", ".join(f"{key} {value}" for key, value in row.settings.items() if key in shown) or MISSING,
            "devices": row.device,
            "processes x batch": f"{row.workers or MISSING} x {row.batch_size or MISSING}",
            "perplexity": f"{math.exp(statistics.fmean(losses)):.2f}" if losses else MISSING,
            "per process": " to ".join(f"{math.exp(end(row.shares)):.2f}" for end in (min, max))
            if several
            else MISSING,
            "eval loss (exact)": _mean(losses, ".4f"),
            "seconds": f"{_mean(seconds, '.1f')} virtual" if virtual else _mean(seconds, ".1f"),
            "runs": counted(len(row.done), len(row.runs), int(row.runs["diverged"].sum())),
        }
        lines.append(line | _of_the_notes(row.beside))
    beside = [row.beside for row in rows]
    for there in REFERENCE:
        if there not in beside:
            place = {"mode": there.mode, "processes x batch": f"{there.processes} x {there.batch_size}"}
            lines.append(place | _of_the_notes(there))
    table = DataFrame(lines).fillna(MISSING)
    return table if shown else table.drop(columns="settings")


def _of_the_notes(row: Reference | None) -> dict[str, str]:
    if row is None:
        return {}
    told = ", ".join(f"{value:.2f}" for value in row.perplexities)
    return {"notes: GPUs": str(row.devices), "notes: perplexity": told, "notes: seconds": f"{row.seconds:.2f}"}


def _differing(rows: Sequence[Row]) -> set[str]:
    """The settings in which rows of one clock differ."""
    from asyncsgd.studies.arms import differing

    clocks = {row.clock for row in rows}
    alike = [[row.settings for row in rows if row.clock == clock] for clock in clocks]
    return {key for settings in alike for key in differing(settings, frozenset())}


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return MISSING
    told = format(statistics.fmean(values), form)
    return told if len(values) == 1 else f"{told} ± {statistics.stdev(values):{form}}"


def _run(runs_dir: Path, form: str) -> None:
    from analysis.read import read

    runs, _, plan = read(runs_dir)
    print(render(rows_of(runs, plan), _warnings(runs, plan), form, plan), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code (2 for what the user has to change)."""
    return begun(
        _run,
        __doc__,
        arguments,
        {
            "runs_dir": {"type": Path, "metavar": "RUNS_DIR", "help": "a sweep's folder, or one with run folders"},
            "--format": {"dest": "form", "choices": ("text", "md"), "default": "text", "help": "of the table"},
        },
        EXAMPLE,
    )


if __name__ == "__main__":
    sys.exit(main())
