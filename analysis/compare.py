"""``python -m analysis.compare RUNS_DIR``: a table by mode, rule and workers, and the pictures of loss.

Every number of a row is a mean over its DONE runs: a perplexity is the mean of the runs' perplexities (not the
exponential of the mean loss, which is smaller), the delays are the means of the runs' means and 95th percentiles and
the largest of their maxima. The ± of the loss is the standard deviation over runs (n - 1), given from two runs on.
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
    from analysis.study.run import Condition, Run

EXAMPLE = """\
example:
  python experiments/stilt_mlm.py --mode sync --nproc 4
  python experiments/stilt_mlm.py --mode async --nproc 4
  python -m analysis.compare runs

Only runs with status DONE enter the means; the others are counted and listed below the table."""


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
    """One condition: how many of its runs are DONE, and what these reached."""

    condition: Condition
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
    """The rows of all runs that took the same test; None stands for runs that do not say on which data."""

    evaluation_set: str | None
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
    """Group `runs` by evaluation set, mode, rule, workers and batch size; the order of `runs` does not matter."""
    from analysis.study.run import UNFINISHED, UNREADABLE

    by_name = sorted(runs, key=lambda run: run.name)
    ordered = [run for run in by_name if not run.finetuning]
    # without a readable summary nothing says which condition a run belongs to: it is listed, not guessed into a row
    grouped = [run for run in ordered if run.status not in (UNFINISHED, UNREADABLE)]
    by_data: dict[str | None, list[Run]] = {}
    for run in grouped:
        by_data.setdefault(run.evaluation_set, []).append(run)
    tables = [
        _table(evaluation_set, by_data[evaluation_set])
        for evaluation_set in sorted(by_data, key=lambda evaluation_set: (evaluation_set is None, evaluation_set or ""))
    ]
    warnings = []
    if len(tables) > 1:
        warnings.append(
            f"WARNING: these runs were evaluated on {len(tables)} different data sets, or with different masks "
            "(data_fingerprint, eval_masking); numbers of different tables must not be compared"
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


def _table(evaluation_set: str | None, runs: list[Run]) -> Table:
    from analysis.study.run import labels

    groups: dict[Condition, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.condition, []).append(run)
    names = labels(groups)
    rows = tuple(_row(condition, groups[condition]) for condition in names)
    done = {name: [run for run in groups[condition] if run.done] for condition, name in names.items()}
    return Table(evaluation_set, rows, tuple(_warnings({name: group for name, group in done.items() if group})))


def _row(condition: Condition, runs: list[Run]) -> Row:
    ended = [run.metrics for run in runs if run.done]
    done = [run.summary for run in runs if run.done]
    maxima = [summary["delay"]["max"] for summary in done if summary["delay"]["max"] is not None]
    return Row(
        condition=condition,
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

    for field in ("num_samples", "from_scratch", "threads", "clock", "eval_weight"):
        mixed = False
        for name, group in groups.items():
            values = _distinct(group, field)
            if len(values) > 1:
                mixed = True
                yield f"WARNING: {name}: the mean is over runs with different {field} ({', '.join(values)})"
        values = _distinct([run for group in groups.values() for run in group], field)
        # threads differ between conditions on purpose (cores / workers)
        if not mixed and len(values) > 1 and field != "threads" and not _is_one_step_apart(groups, field):
            yield f"WARNING: rows differ in {field} ({', '.join(values)})"
    for name, group in groups.items():
        rates = sorted({run.learning_rate for run in group if run.learning_rate is not None})
        if len(rates) > 1:
            shown = ", ".join(f"{rate:g}" for rate in rates)
            yield f"WARNING: {name}: the mean is over runs with different learning_rate ({shown})"
        for seed, count in sorted(Counter(run.summary["seed"] for run in group).items(), key=lambda item: str(item[0])):
            if count > 1 and seed is not None:
                yield f"WARNING: {name}: {count} runs have seed {seed}; its ± is not over different seeds only"
    notes = {name: timing_notes(group) for name, group in groups.items()}
    for note in dict.fromkeys(note for of_group in notes.values() for note in of_group):
        yield f"NOTE: {note} ({'; '.join(name for name in notes if note in notes[name])})"


def _distinct(runs: Iterable[Run], field: str) -> list[str]:
    values = {run.summary.get(field) for run in runs}
    return [
        f"{value:.15g}" if isinstance(value, float) else str(value)
        for value in sorted(values, key=lambda value: (isinstance(value, str), value is None, value or 0))
    ]


def _is_one_step_apart(groups: dict[str, list[Run]], field: str) -> bool:
    """Whether budgets differ by no more than the last step of the largest synchronous one, which is not cut in two."""
    if field != "num_samples":
        return False
    summaries = [run.summary for group in groups.values() for run in group]
    if any(summary[key] is None for summary in summaries for key in ("num_samples", "num_workers", "batch_size")):
        return False
    budgets = [summary["num_samples"] for summary in summaries]
    return max(budgets) - min(budgets) < max(summary["num_workers"] * summary["batch_size"] for summary in summaries)


def render_csv(comparison: Comparison) -> str:
    """All rows in one table, unrounded, missing values empty; warnings and the list of runs go elsewhere (`notes`)."""
    statistic_fields = [
        field.name for field in dataclasses.fields(Row) if field.type == "Statistic"
    ]  # strings, by the annotations import
    lines: list[list[Any]] = [
        [
            *("evaluation_set", "mode", "rule", "num_workers", "batch_size", "virtual"),
            *("num_done", "num_all", "num_diverged"),
            *(f"{name}_{part}" for name in statistic_fields for part in ("mean", "sd", "n")),
            "delay_max",
        ]
    ]
    for table in comparison.tables:
        for row in table.rows:
            cells: list[Any] = [table.evaluation_set, *dataclasses.astuple(row.condition)]
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
        heading = f"data {table.evaluation_set or 'unknown (no data_fingerprint)'}"
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
    with_batch_size = len({row.condition.batch_size for row in table.rows}) > 1
    header = ["mode", "rule", "workers", *["batch"] * with_batch_size, "runs", "final loss"]
    forms = _metric_forms(table)
    header += [*forms, "train s", "samples/s", "delay mean", "delay p95", "delay max"]
    lines = [header]
    for row in table.rows:
        condition, done = row.condition, row.num_done
        loss = _mean(row.loss, ".4f", done)
        if row.loss.mean is not None:
            loss += f" ± {MISSING if row.loss.sd is None else format(row.loss.sd, '.4f')}"
        lines.append(
            [
                f"{condition.mode or MISSING}{' (virtual)' * condition.virtual}",
                condition.rule or MISSING,
                or_missing(condition.num_workers),
                *[or_missing(condition.batch_size)] * with_batch_size,
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
