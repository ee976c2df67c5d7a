"""``python -m analysis.compare RUNS_DIR``: a table by mode, rule and workers, and the pictures of loss.

Runs share a row where they are alike but for their seed; see `analysis.study.alike`. Every number of a row is a mean
over its DONE runs: a perplexity is the mean of the runs' perplexities (not the exponential of the mean loss, which is
smaller), the delays are the means of the runs' means and 95th percentiles and the largest of their maxima. The ± of the
loss is the standard deviation over runs (n - 1), given from two runs on.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import carried_out
from analysis.report.tables.text import MISSING, aligned, as_csv, markdown, or_missing
from asyncsgd.records.events import DIVERGED

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, which --help and a typing error should not
    from analysis.study.alike import Kind
    from analysis.study.run import Run

EXAMPLE = """\
example:
  python experiments/stilt_mlm.py --mode sync --nproc 4
  python experiments/stilt_mlm.py --mode async --nproc 4
  python -m analysis.compare runs

Only runs with status DONE enter the means; the others are counted and listed below the table."""


IN_COLUMNS = ("model", "learning_rate", "samples", "epochs", "seconds", "speeds")
"""Settings with a column where rows differ in them, also rows of different modes, rules, workers or batch sizes."""


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Mean and standard deviation (n - 1) of the `n` values there are; None where there are too few."""

    mean: float | None
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic:
        """
        >>> Statistic.of([1.0, 3.0, None])
        Statistic(mean=2.0, sd=1.4142135623730951, n=2)
        >>> Statistic.of([None])
        Statistic(mean=None, sd=None, n=0)
        """
        present = [float(value) for value in values if value is not None]
        # both sum exactly, so the order of the runs cannot change a digit
        return cls(
            statistics.fmean(present) if present else None,
            statistics.stdev(present) if len(present) > 1 else None,
            len(present),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """Runs that are alike: how many of them are DONE, and what these reached."""

    kind: Kind
    settings: Mapping[str, Any]
    """Those of `IN_COLUMNS`, and those in which any runs of the table that would be alike without them differ."""
    num_done: int
    num_all: int
    num_diverged: int
    loss: Statistic
    metrics: Mapping[str, Statistic]
    """Of the last evaluations, by name."""
    train_seconds: Statistic
    samples_per_second: Statistic
    delay_mean: Statistic
    delay_p95: Statistic
    delay_max: float | None


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of all runs whose losses may be compared."""

    task: str | None
    evaluation_set: str | None
    """None: they do not say on which data."""
    loss_terms: float | None
    told_apart: Mapping[str, str]
    """What tells it from the other tables."""
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is printed: tables, warnings about all of them, and every run that is not in a mean or had a problem."""

    tables: tuple[Table, ...]
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]
    finetuning: tuple[str, ...] = ()
    """Fine-tuning runs: another task, in no table here."""


def compare(runs: Sequence[Run]) -> Comparison:
    """A table for each task and evaluation set, with a row for `runs` that are alike; their order does not matter."""
    from analysis.study.alike import by_evaluation, told_apart, unlike
    from analysis.study.run import UNFINISHED, UNREADABLE

    by_name = sorted(runs, key=lambda run: run.name)
    ordered = [run for run in by_name if not run.finetuning]
    # without a readable summary nothing says which condition a run belongs to: it is listed, not guessed into a row
    grouped = [run for run in ordered if run.status not in (UNFINISHED, UNREADABLE)]
    evaluations = by_evaluation(grouped)
    apart = told_apart(evaluations)
    tables = [
        Table(on.task, on.data, on.loss_terms, apart[on], *_rows_and_warnings(group))
        for on, group in evaluations.items()
    ]
    warnings = []
    if kept_apart := unlike(grouped):
        warnings.append(f"not pooled: rows differ in {', '.join(kept_apart)}")
    if len(tables) > 1:
        differing = ", ".join(dict.fromkeys(name for parts in apart.values() for name in parts))
        warnings.append(
            f"WARNING: these tables differ in {differing}; losses and metrics of different tables must not be compared"
        )
    return Comparison(
        tuple(tables),
        tuple(warnings),
        tuple(
            f"{run.name}: {run.status}{''.join(f'; {problem}' for problem in run.problems)}"
            for run in ordered
            if not run.done
        ),
        tuple(f"{run.name}: {problem}" for run in ordered if run.done for problem in run.problems),
        tuple(
            f"{run.name}: {run.status}{''.join(f'; {problem}' for problem in run.problems)}"
            for run in by_name
            if run.finetuning
        ),
    )


def _rows_and_warnings(runs: list[Run]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    from analysis.study.alike import ALIKE_IN_SPITE_OF, by_kind, kind_labels

    kinds = by_kind(runs, ALIKE_IN_SPITE_OF)
    names = kind_labels(kinds)
    keys = dict.fromkeys((*IN_COLUMNS, *sorted({key for kind in kinds for key, _ in kind.settings})))
    rows = tuple(_row(kind, kinds[kind], keys) for kind in names)
    done = {name: [run for run in kinds[kind] if run.done] for kind, name in names.items()}
    return rows, tuple(_warnings({name: group for name, group in done.items() if group}))


def _row(kind: Kind, runs: list[Run], keys: Iterable[str]) -> Row:
    from analysis.study.alike import setting

    ended = [run.metrics for run in runs if run.done]
    done = [run.summary for run in runs if run.done]
    maxima = [summary["delay"]["max"] for summary in done if summary["delay"]["max"] is not None]
    return Row(
        kind=kind,
        settings={key: setting(runs[0], key) for key in keys},
        num_done=len(done),
        num_all=len(runs),
        num_diverged=sum(run.status == DIVERGED for run in runs),
        loss=Statistic.of(summary["final_eval_loss"] for summary in done),
        metrics={
            name: Statistic.of(metrics.get(name) for metrics in ended)
            for name in dict.fromkeys(name for metrics in ended for name in metrics)
        },
        train_seconds=Statistic.of(summary["train_seconds"] for summary in done),
        samples_per_second=Statistic.of(summary["samples_per_second"] for summary in done),
        delay_mean=Statistic.of(summary["delay"]["mean"] for summary in done),
        delay_p95=Statistic.of(summary["delay"]["p95"] for summary in done),
        delay_max=max(maxima, default=None),
    )


def _warnings(groups: dict[str, list[Run]]) -> Iterable[str]:
    """What makes the numbers of one table less comparable than they look; `groups` holds the DONE runs by label."""
    from analysis.study.machines import timing_notes

    for name, group in groups.items():
        for seed, count in sorted(Counter(run.summary["seed"] for run in group).items(), key=lambda item: str(item[0])):
            if count > 1 and seed is not None:
                yield f"WARNING: {name}: {count} runs have seed {seed}; its ± is not over different seeds only"
    notes = {name: timing_notes(group) for name, group in groups.items()}
    for note in dict.fromkeys(note for of_group in notes.values() for note in of_group):
        yield f"NOTE: {note} ({'; '.join(name for name in notes if note in notes[name])})"


def render_csv(comparison: Comparison) -> str:
    """All rows in one table, unrounded, missing values empty; warnings and the list of runs go elsewhere (`notes`)."""
    statistic_fields = [
        field.name for field in dataclasses.fields(Row) if field.type == "Statistic"
    ]  # strings, by the annotations import
    keys = list(dict.fromkeys(key for table in comparison.tables for row in table.rows for key in row.settings))
    lines: list[list[Any]] = [
        [
            *("task", "evaluation_set", "loss_terms", "mode", "rule", "num_workers", "batch_size", "virtual", *keys),
            *("num_done", "num_all", "num_diverged"),
            *(f"{name}_{part}" for name in statistic_fields for part in ("mean", "sd", "n")),
            "delay_max",
        ]
    ]
    for table in comparison.tables:
        for row in table.rows:
            cells: list[Any] = [table.task, table.evaluation_set, table.loss_terms]
            cells += [*dataclasses.astuple(row.kind.condition), *(row.settings.get(key) for key in keys)]
            cells += [row.num_done, row.num_all, row.num_diverged]
            for name in statistic_fields:
                cells += dataclasses.astuple(getattr(row, name))
            lines.append([*cells, row.delay_max])
    return as_csv(lines)


def notes(comparison: Comparison) -> list[str]:
    """The lines that belong to a comparison beside its tables' rows."""
    lines = list(comparison.warnings)
    for table in comparison.tables:
        lines += table.warnings
    return lines + _listing(comparison)


def _listing(comparison: Comparison) -> list[str]:
    lines: list[str] = []
    if comparison.left_out:
        lines += ["not in the means:", *(f"  {line}" for line in comparison.left_out)]
    if comparison.problems:
        lines += ["in the means, but:", *(f"  {line}" for line in comparison.problems)]
    if comparison.finetuning:
        lines += ["fine-tuning runs (in analysis.report):", *(f"  {line}" for line in comparison.finetuning)]
    return lines


def render(comparison: Comparison, form: str) -> str:
    """The tables as ``text`` or ``md``, warnings below each, then the runs that are not in them."""
    blocks: list[list[str]] = []
    if comparison.warnings:
        blocks.append(list(comparison.warnings))
    for table in comparison.tables:
        parts = {"data": table.evaluation_set or "unknown (no data_fingerprint)"} | dict(table.told_apart)
        heading = ", ".join(f"{name} {value}" for name, value in parts.items())
        blocks.append([heading, "", *drawn(_cells(table), form)])
        if table.warnings:
            blocks.append(list(table.warnings))
    if not comparison.tables:
        blocks.append(["no pretraining run has a summary yet" if comparison.finetuning else "no run has a summary yet"])
    listing = _listing(comparison)
    if listing:
        blocks.append(listing)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _cells(table: Table) -> list[list[str]]:
    """The table as text, its header first."""
    with_batch_size = len({row.kind.condition.batch_size for row in table.rows}) > 1
    keys = [key for key in table.rows[0].settings if len({str(row.settings[key]) for row in table.rows}) > 1]
    header = ["mode", "rule", "workers", *["batch"] * with_batch_size, *keys, "runs", "final loss"]
    forms = _metric_forms(table)
    header += [*forms, "train s", "samples/s", "delay mean", "delay p95", "delay max"]
    lines = [header]
    for row in table.rows:
        condition, done = row.kind.condition, row.num_done
        loss = _mean(row.loss, ".4f", done)
        if row.loss.mean is not None:
            loss += f" ± {MISSING if row.loss.sd is None else format(row.loss.sd, '.4f')}"
        lines.append(
            [
                f"{condition.mode or MISSING}{' (virtual)' * condition.virtual}",
                condition.rule or MISSING,
                or_missing(condition.num_workers),
                *[or_missing(condition.batch_size)] * with_batch_size,
                *[_shown(row.settings[key]) for key in keys],
                counted(done, row.num_all, row.num_diverged),
                loss,
                *[_mean(row.metrics.get(name, Statistic.of([])), form, done) for name, form in forms.items()],
                _mean(row.train_seconds, ".1f", done),
                _mean(row.samples_per_second, ".1f", done),
                _mean(row.delay_mean, ".2f", done),
                _mean(row.delay_p95, ".1f", done),
                or_missing(row.delay_max),
            ]
        )
    return lines


def _shown(setting: Any) -> str:
    if setting is None:
        return MISSING
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def _metric_forms(table: Table) -> dict[str, str]:
    """How the mean of each metric of a table is shown: in four digits where no mean is above 1."""
    means: dict[str, list[float]] = {}
    for row in table.rows:
        for name, statistic in row.metrics.items():
            means.setdefault(name, []).extend([] if statistic.mean is None else [statistic.mean])
    return {name: ".4f" if all(abs(mean) <= 1 for mean in found) else ".2f" for name, found in means.items()}


def _mean(statistic: Statistic, form: str, num_done: int) -> str:
    """The mean, with its n where some of the DONE runs have no value."""
    if statistic.mean is None:
        return MISSING
    return format(statistic.mean, form) + (f" (n={statistic.n})" if statistic.n < num_done else "")


def counted(num_done: int, num_all: int, num_diverged: int) -> str:
    """
    >>> counted(3, 3, 0), counted(2, 3, 1)
    ('3/3', '2/3 (diverged 1/3)')
    """
    return f"{num_done}/{num_all}" + (f" (diverged {num_diverged}/{num_all})" if num_diverged else "")


def drawn(lines: list[list[str]], form: str) -> list[str]:
    """A table as ``text`` or ``md``; from the third column on it holds numbers."""
    numeric = [place >= 2 for place in range(len(lines[0]))]
    if form == "text":
        return aligned(lines, numeric)
    return markdown([[cell.replace("|", r"\|") for cell in line] for line in lines], numeric)


def parser() -> argparse.ArgumentParser:
    """The flags; building them imports nothing heavy."""
    flags = argparse.ArgumentParser(
        prog="python -m analysis.compare",
        description="Compare runs: a table by mode, rule and workers, and loss against seconds and against samples.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("runs_dir", type=Path, metavar="RUNS_DIR", help="folder with run folders at any depth")
    flags.add_argument("--out", type=Path, metavar="DIR", help="folder for the pictures (default: RUNS_DIR/figures)")
    flags.add_argument("--format", choices=("text", "md", "csv"), default="text", help="of the table (default: text)")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and save its pictures; returns the exit code (2 for what the user has to change)."""
    flags = parser().parse_args(arguments)
    return carried_out(lambda: _run(flags.runs_dir, flags.out, flags.format))


def _run(runs_dir: Path, out: Path | None, form: str) -> None:
    from analysis.study.run import load_runs

    loaded, _ = load_runs(runs_dir)
    from analysis.report.figures.compare import (  # after the folder has been checked: it imports matplotlib
        save_figures,
        undrawn,
    )

    comparison = compare(loaded)
    runs = [run for run in loaded if not run.finetuning]
    # in CSV only the table goes to standard output, so that it can be piped into a file
    aside = sys.stderr if form == "csv" else sys.stdout
    if form == "csv":
        print(render_csv(comparison), end="")
        for line in notes(comparison):
            print(line, file=aside)
    else:
        print(render(comparison, form), flush=True)
    folder = runs_dir / "figures" if out is None else out
    paths = save_figures(runs, folder)
    missing = undrawn(runs)
    if missing:
        names = ", ".join(run.name for run in missing)
        print(f"not in the pictures (no data_fingerprint or no evaluation with a loss): {names}", file=aside)
    for path in paths:
        print(path, file=aside)


if __name__ == "__main__":
    sys.exit(main())
