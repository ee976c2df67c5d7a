"""``python -m analysis compare RUNS_DIR [RUNS_DIR ...]``: a table by mode, rule and workers, and pictures of loss.

``asyncsgd compare`` is the same command.
Runs share a row where they are alike but for their seed and for how often they were evaluated. A number of a row is a
mean over its DONE runs that did not diverge; delay_max (in CSV delay_max_mean) is the largest of all of them. The ± of
the loss is the standard deviation over runs (n - 1). Losses of different tasks, data, masks or numbers of evaluated
terms stand in different tables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import run_command
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FINISHED

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, which --help and a mistyped option should not
    from pandas import DataFrame, Series

EXAMPLE = """\
example:
  asyncsgd train masked_lm --mode sync --nproc 4
  asyncsgd train masked_lm --mode async --nproc 4
  asyncsgd compare runs

Only runs with status DONE enter the means; the others are counted and listed below the table."""
EVALUATED_ON = ["task", "data", "evaluation", "terms"]
"""Columns of `runs` that losses have to share to be compared."""
CONDITION = ["mode", "rule", "workers", "batch_size", "clock"]
"""Columns in which the runs of a row of the table are equal."""
DIGITS = {
    "loss": 4,
    "metric": 4,
    "seconds": 1,
    "samples_per_second": 1,
    "delay_mean": 2,
    "delay_p95": 1,
    "delay_max": 0,
}
"""Columns whose means are shown, with their decimals."""
OF_THE_EVALUATION = ("data", "eval_data", "text_column", "eval_mask", "eval_mask_prob")
"""Settings of the evaluation set, which `EVALUATED_ON` compares by what was recorded."""


def read_all(folders: Sequence[Path]) -> tuple[DataFrame, DataFrame]:
    """The runs and curves of one folder, or of several under the names of their folders."""
    import pandas as pd

    from analysis.read import read

    all_runs = []
    all_curves = []
    for folder in folders:
        runs, curves, _ = read(folder)
        if len(folders) > 1:
            runs["run"] = f"{folder}/" + runs["run"]
            curves["run"] = f"{folder}/" + curves["run"]
        all_runs.append(runs)
        all_curves.append(curves)
    if len(folders) == 1:
        return all_runs[0], all_curves[0]
    paths = pd.concat(all_runs)["path"].map(Path.resolve)
    if paths.duplicated().any():
        raise UsageError(f"{paths[paths.duplicated()].iloc[0]} lies in two of the folders; name each run once")
    return pd.concat(all_runs).set_index("run", drop=False), pd.concat(all_curves)


def pretrainings(runs: DataFrame) -> DataFrame:
    """The runs that have a readable summary and an evaluation, and are no fine-tunings."""
    has_summary = ~runs["status"].isin(("UNFINISHED", "UNREADABLE", "MISSING"))
    has_evaluation = runs["status"].isin(FINISHED) | runs["first_loss"].notna()
    return runs[has_summary & has_evaluation & ~_is_finetuning(runs)].sort_index()


def _is_finetuning(runs: DataFrame) -> Series:
    """Of each run, whether it is scored for the arm that it began from, or as the baseline."""
    return (runs["task"] == "finetuning") & runs["stage"].isin(("finetune", ""))


def grouped(runs: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Split runs into tables: the runs of each, below a heading that names in what it differs from the other tables."""
    differing = [name for name in EVALUATED_ON if runs[name].nunique(dropna=False) > 1]
    for _, of_table in runs.groupby(EVALUATED_ON, dropna=False):
        first = of_table.iloc[0]
        words = []
        for name in differing or ["data"]:
            value = first[name] or "unknown"
            if name == "terms":
                value = f"{first[name]:g}"
            words.append(f"{name} {value}")
        yield ", ".join(words), of_table


def table_rows(runs: DataFrame) -> DataFrame:
    """A row for runs that are alike: counts, and means and standard deviations over those that are DONE."""
    from pandas import Series

    table = runs.assign(done=(runs["status"] == "DONE") & ~runs["diverged"])
    by = [runs[column] for column in CONDITION]
    for key in _settings_with_columns(runs):
        values = [settings.get(key) for settings in runs["settings"]]
        texts = ["-" if value is None else str(value) for value in values]
        by.append(Series(texts, index=runs.index, name=key))
    rows = table.groupby(by, dropna=False)
    of_done = table[[*DIGITS]].where(table["done"]).groupby(by, dropna=False)
    means = of_done.agg(["mean", "std", "count"]).rename(columns={"std": "sd", "count": "n"})
    means.columns = ["_".join(name) for name in means]
    means["delay_max_mean"] = of_done["delay_max"].max()  # no mean: the largest delay of all runs, under this name
    counts = rows.agg(runs=("run", "size"), done=("done", "sum"), diverged=("diverged", "sum"), names=("run", list))
    return counts.join(means).reset_index()


SHOWN_WHERE_ROWS_DIFFER = {"model", "learning_rate", "samples", "epochs", "seconds", "speeds"}
"""Settings that have a column where any two rows of the table differ in them."""


def _settings_with_columns(runs: DataFrame) -> list[str]:
    """Settings in which runs of one condition differ; those of `SHOWN_WHERE_ROWS_DIFFER` also where rows do."""
    from analysis.places import NEVER_NAMED
    from asyncsgd.studies.arms import differing

    # by default `differing` passes over `NOT_A_VARIANT`, where speeds and batch_size are
    found = SHOWN_WHERE_ROWS_DIFFER.intersection(differing(runs["settings"], ignored=frozenset()))
    for _, alike in runs.groupby(CONDITION, dropna=False):
        found |= {*differing(alike["settings"], {*NEVER_NAMED, *OF_THE_EVALUATION})}
    return sorted(found)


def shown(rows: DataFrame) -> DataFrame:
    """The table as text."""
    from pandas import DataFrame

    kept: dict[str, Any] = {}
    columns_before_counts = rows.columns[: list(rows).index("runs")]
    for name in columns_before_counts:  # they say which runs a row has
        if name in ("mode", "rule", "workers") or rows[name].nunique(dropna=False) > 1:
            heading = f"budget {name}" if name in DIGITS else name  # beside the seconds that were measured
            kept[heading] = [f"{value:g}" if isinstance(value, float) else str(value) for value in rows[name]]
    kept["runs"] = [counted(row.done, row.runs, row.diverged) for row in rows.itertuples()]
    for name, digits in DIGITS.items():
        if rows[f"{name}_mean"].notna().any():
            kept[name] = [_mean(row, name, digits) for _, row in rows.iterrows()]
    return DataFrame(kept).rename(columns={"samples_per_second": "samples/s"})


def _mean(row: Any, name: str, digits: int) -> str:
    """A cell: the mean, of a loss with its deviation, and over how many runs where that is not all of them."""
    mean = row[f"{name}_mean"]
    if math.isnan(mean):
        return "-"
    text = f"{mean:.{digits}f}"
    if name == "loss":
        deviation = row["loss_sd"]
        shown_deviation = "-" if math.isnan(deviation) else f"{deviation:.{digits}f}"
        text += f" ± {shown_deviation}"
    number = row[f"{name}_n"]
    if number < row["done"]:
        text += f" (n={number})"
    return text


def counted(done: int, runs: int, diverged: int) -> str:
    """
    >>> counted(3, 3, 0), counted(2, 3, 1)
    ('3/3', '2/3 (diverged 1/3)')
    """
    if not diverged:
        return f"{done}/{runs}"
    return f"{done}/{runs} (diverged {diverged}/{runs})"


def notes(runs: DataFrame) -> list[str]:
    """What makes the numbers of one table less comparable than they look."""
    from analysis.gate import disturbance_of
    from analysis.pairs import caveats_on_timing
    from analysis.runs import each, rows_with

    lines = []
    done = rows_with(runs, status="DONE", diverged=False)
    for row in table_rows(runs).itertuples():
        seeds = done.loc[done.index.intersection(row.names), "seed"].dropna()
        repeated = seeds[seeds.duplicated(keep=False)]
        for seed, count in repeated.value_counts().sort_index().items():
            name = f"{row.rule or row.mode}, {row.workers:g} workers"
            lines.append(f"WARNING: {name}: {count} runs have seed {seed:g}; its ± is not over different seeds only")
    measured = done[done["clock"] == "measured"]
    counts = measured["machine"].value_counts()
    is_unknown = (measured["machine"] == "").any()
    if len(counts) > 1 or (len(measured) > 1 and is_unknown):
        machines = sorted(f"{name or 'not known'} ({number} runs)" for name, number in counts.items())
        lines.append(f"WARNING: seconds of different machines must not be compared: {'; '.join(machines)}")
    for caveat in caveats_on_timing(measured):
        lines.append(f"NOTE: {caveat}")
    for disturbance in filter(None, map(disturbance_of, each(measured))):
        lines.append(f"NOTE: {disturbance}, so its seconds are no speed comparison")
    sentences = _unequal_batches(done)
    if sentences:
        lines.append(f"NOTE: Unequal batches: {'; '.join(sentences)}")
    return lines


def _unequal_batches(runs: DataFrame) -> list[str]:
    """How many more updates of the same samples each row makes than the one with the largest updates."""
    from analysis.pairs import notes_on_batches, samples_per_update

    known, _, names = _with_arms(runs[runs["samples_per_update"] > 0])
    by_size = sorted(known.groupby("arm"), key=lambda row: samples_per_update(row[1]))
    sentences: list[str] = []
    for arm, own in by_size[:-1]:
        largest, theirs = by_size[-1]
        for note in notes_on_batches(own, theirs, names[arm], names[largest]):
            sentences += note.about
    return sentences


def left_out(runs: DataFrame) -> list[str]:
    """Every run that is in no mean or had a problem, and the fine-tunings, each with the reason."""
    is_finetuning = _is_finetuning(runs)
    is_done = runs["status"] == "DONE"
    lines = []
    lost = runs[~is_finetuning & (~is_done | runs["diverged"])]
    if len(lost):
        lines.append("not in the means:")
    for run in lost.itertuples():
        why = run.left_out or run.status
        lines.append(f"  {run.run}: {why}; {run.notes}" if run.notes else f"  {run.run}: {why}")
    noted = runs[~is_finetuning & is_done & (runs["notes"] != "")]
    if len(noted):
        lines.append("in the means, but:")
    for run in noted.itertuples():
        lines.append(f"  {run.run}: {run.notes}")
    if is_finetuning.any():
        lines.append("fine-tuning runs (in analysis.report):")
    for run in runs[is_finetuning].itertuples():
        lines.append(f"  {run.run}: {run.left_out or run.status}")
    return lines


def render(runs: DataFrame, form: str) -> str:
    """The tables as ``text`` or ``md``, warnings below each, then the runs that are not in them."""
    from analysis import tables

    known = pretrainings(runs)
    groups = list(grouped(known))
    blocks = []
    if len(groups) > 1:
        blocks.append("WARNING: losses and metrics of different tables must not be compared")
    for heading, own in groups:
        primary = next(iter(own["details"].iloc[0].get("better", ())), "")  # a task names its primary metric first
        table = shown(table_rows(own)).rename(columns={"metric": f"metric {primary}".rstrip()})
        written = tables.markdown(table) if form == "md" else table.to_string(index=False)
        blocks.append(f"{heading}\n\n{written}".rstrip())
        blocks.append("\n".join(notes(own)))
    if not groups:
        blocks.append("no pretraining run has a summary and an evaluation yet")
    blocks.append("\n".join(left_out(runs)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_csv(runs: DataFrame) -> str:
    """All rows in one table, unrounded; a missing value is empty."""
    import pandas as pd

    parts = []
    for _, own in grouped(pretrainings(runs)):
        rows = table_rows(own).drop(columns="names")
        for position, name in enumerate(EVALUATED_ON):
            rows.insert(position, name, own[name].iloc[0])
        parts.append(rows)
    return pd.concat(parts).to_csv(index=False) if parts else ""


def save_figures(runs: DataFrame, curves: DataFrame, folder: Path) -> list[Path]:
    """Loss against seconds and samples of every table as PNG, PDF and SVG; measured and virtual seconds apart."""
    from analysis import plots

    folder.mkdir(parents=True, exist_ok=True)
    known, arms, arm_labels = _with_arms(pretrainings(runs))
    styles = plots.arm_styles(arms.assign(group=""))  # arms of all groups share a picture
    tables = list(grouped(known))
    paths = []
    for number, (heading, own) in enumerate(tables):
        evaluated = own[own["run"].isin(curves["run"])]
        for name, x, drawn in _pictures(evaluated):
            figure, (axes,) = plots.figure(6.0, 3.8)
            plots.loss(axes, drawn, curves, styles, arm_labels, x)
            axes.legend(frameon=False, fontsize=8)
            axes.set_title(heading if len(tables) > 1 else "", fontsize=8)
            if len(tables) > 1:
                name += f"_{number}"
            paths += plots.save(figure, folder / name, ("png", "pdf", "svg"))
    return paths


def _pictures(runs: DataFrame) -> Iterator[tuple[str, str, DataFrame]]:
    """Name, x axis and runs of the pictures of one table."""
    for clock, own in runs.groupby("clock"):
        name = "loss_vs_virtual_seconds" if clock == "virtual" else "loss_vs_seconds"
        yield name, "seconds", own
    if len(runs):
        yield "loss_vs_samples", "samples", runs


def _with_arms(runs: DataFrame) -> tuple[DataFrame, DataFrame, dict[str, str]]:
    """The runs with their rows as arms, these arms, and what each is called."""
    from analysis.questions import NO_PLAN, groups, labels

    known = runs.assign(stage="test", arm=_arms(runs))  # `groups` takes test runs that have an arm
    arms = groups(known, NO_PLAN)
    return known, arms, labels(arms)


def _arms(runs: DataFrame) -> list[str]:
    """The name of every run's row."""
    keys = _settings_with_columns(runs)
    names = []
    for row in runs.itertuples():
        parts = [str(row.rule or row.mode), f"w{row.workers:g}", row.clock, f"batch {row.batch_size:g}"]
        parts += [f"{key} {row.settings.get(key)}" for key in keys]
        names.append("-".join(parts))
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and save its pictures; returns the exit code (2 for what the user has to change)."""
    return run_command(
        _run,
        __doc__,
        arguments,
        {
            "folders": {"type": Path, "nargs": "+", "metavar": "RUNS_DIR", "help": "folder with runs at any depth"},
            "--out": {"type": Path, "metavar": "DIR", "help": "folder for the pictures (default: RUNS_DIR/figures)"},
            "--format": {"dest": "form", "choices": ("text", "md", "csv"), "default": "text", "help": "of the table"},
        },
        EXAMPLE,
    )


def _run(folders: Sequence[Path], out: Path | None, form: str) -> None:
    runs, curves = read_all(folders)
    progress = sys.stdout
    if form == "csv":
        # only the table goes to standard output, so that it can be piped into a file
        progress = sys.stderr
        print(render_csv(runs), end="")
        lines = []
        for _, own in grouped(pretrainings(runs)):
            lines += notes(own)
        print(*lines, *left_out(runs), sep="\n", file=progress)
    else:
        print(render(runs, form), flush=True)
    print(*save_figures(runs, curves, out or folders[0] / "figures"), sep="\n", file=progress)


if __name__ == "__main__":
    sys.exit(main())
