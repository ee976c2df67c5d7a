"""``python -m analysis tasks STUDY STUDY STUDY ...``: several tasks or workloads at once.

    python -m analysis tasks runs/study_a runs/study_b runs/study_c --figures pictures

This treats every study as a task and compares the algorithms of their registered primary conditions. A score is
the share of the reference's mean improvement that a run has made at equal samples: 1 is the reference, 0 no learning.
"""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from analysis.commands import run_command
from analysis.load import Study, load
from analysis.over_tasks import (
    MINIMUM_TASKS,
    iqm,
    mean_improvement,
    performance_profile,
    performance_score,
    share_above,
    stratified_bootstrap,
    too_few,
)
from analysis.questions import is_primary
from analysis.runs import rows_with
from analysis.stats import Array, Interval
from asyncsgd.errors import UsageError

THRESHOLDS = (0.5, 0.8, 0.9, 1.0, 1.1)
"""Scores above which the share of runs is printed."""
UNPAIRED = "all runs of one against all of the other, unpaired; interval: paired bootstrap of whole seeds"


class PrimaryCondition(NamedTuple):
    """The registered primary condition of one study."""

    name: str
    clock: str
    reference: str
    """The algorithm of the reference."""
    scores: DataFrame
    """Share of the reference's mean improvement (seeds x algorithms). A run that diverged has made none of it."""
    median_times: Mapping[str, float]
    """Algorithm -> median over seeds of the seconds to the target, inf where most never reach it; empty without one."""
    why_untimed: str
    """Why there are no such seconds; empty where there are."""
    models: frozenset[str]
    """The hashes of the parameters with which its runs ended."""


class Across(NamedTuple):
    """The results over several tasks; the keys are the algorithms that every task has."""

    num_tasks: int
    num_seeds: int
    """The seeds of each task: as many as the task with the fewest has."""
    clock: str
    names: str
    """The names of the tasks."""
    reference: str
    some_have_more: bool
    """Whether a task has more seeds than `num_seeds`, of which the first are taken."""
    scores: dict[str, Array]
    """Seeds x tasks (S x T)."""
    middle: dict[str, Interval]
    """The interquartile mean."""
    better: dict[str, Interval]
    """The probability that a run scores more than one of the reference; the reference has no entry."""
    profile: dict[str, DataFrame]
    """The share of the runs that score more than each score."""
    why_no_interval: str
    """Why there is no interval; empty where there are."""
    time_scores: dict[str, float]
    """AlgoPerf's score of its median times to the target; empty where not every study has such times."""
    why_untimed: str
    """Why there is no such score."""


def read_task(folder: Path) -> PrimaryCondition:
    """Read one study; its scores come from rows that were judged.

    Raises:
        UsageError: if it registered no primary condition, its rows are exploratory or not comparable, its arms share no
            seed, or its reference learned nothing.
    """
    study = load(folder)
    rows = _primary_rows(study)
    if rows.empty:
        raise UsageError(f"{folder}: it registered no primary condition with a reference; its analysis.yaml says which")
    why = _unconfirmed(study, rows)
    if why:
        raise UsageError(f"{folder}: nothing of it is confirmed, so it is no task: {why}")
    algorithm = study.arms["algorithm"]
    compared = algorithm[[*rows["reference"].unique(), *rows["treatment"]]]
    if compared.duplicated().any():
        groups = " and ".join(rows["group"].unique())
        raise UsageError(f"{folder}: it registered several primary conditions ({groups}), and a task has one")
    first = next(rows.itertuples())  # all rows have one reference and one `gained`
    losses = {algorithm[first.reference]: Series(first.reference_values, first.seeds)}
    for row in rows.itertuples():
        losses[algorithm[row.treatment]] = Series(row.treatment_values, row.seeds)
    table = DataFrame(losses).dropna().sort_index()
    if table.empty:
        raise UsageError(f"{folder}: there is no seed on which every algorithm has a result")
    if not first.gained > 0:
        raise UsageError(f"{folder}: the reference {first.reference} learned nothing, so that no score has a scale")
    finite = first.reference_values[np.isfinite(first.reference_values)]
    first_loss = first.gained + finite.mean()  # `gained` is the first loss of the reference - its mean final loss
    scores = (first_loss - table) / first.gained
    why_untimed = _why_untimed(study, rows, table.index)
    times = {}
    if not why_untimed:
        times = _times(study, [first.reference, *rows["treatment"]], table.index)
    return PrimaryCondition(
        name=folder.name,
        clock=str(study.arms.loc[first.reference, "clock"]),
        reference=algorithm[first.reference],
        scores=scores.where(np.isfinite(table), 0.0),
        median_times=times,
        why_untimed=why_untimed,
        models=frozenset(study.runs["parameters_sha256"]) - {""},
    )


def _primary_rows(study: Study) -> DataFrame:
    """The rows on losses at equal samples, of the primary condition against its reference."""
    rows = study.tests[study.tests["endpoint"] == "loss_at_equal_samples"]
    kept = []
    for row in rows.itertuples():
        condition = study.arms.loc[row.treatment, ["workers", "clock"]]
        is_reference = study.arms.loc[row.reference, "algorithm"] == study.plan.reference
        kept.append(is_reference and is_primary(study.plan, *condition))
    return rows[np.array(kept, bool)]


def _unconfirmed(study: Study, rows: DataFrame) -> str:
    """Why nothing of a study is confirmed; empty where something is."""
    if study.exploratory:
        return study.exploratory
    for row in rows.itertuples():
        if row.caveats:
            return " ".join(row.caveats)
    for row in rows.itertuples():
        if row.word == "not comparable":
            return str(row.reason)
    return ""


def _why_untimed(study: Study, rows: DataFrame, seeds: pd.Index) -> str:
    """Why the seconds to the target are not compared: what limits the rows of the tests on them."""
    if study.plan.targets.get(rows["reference"].iloc[0]) is None:
        return "it has no target"
    timed = study.tests[study.tests["endpoint"] == "time_to_target"].set_index(["treatment", "reference"])
    for row in rows.itertuples():
        test = timed.loc[(row.treatment, row.reference)]
        if test["word"] == "not comparable":
            return str(test["reason"])
        if test["caveats"] or not set(seeds) <= set(test["seeds"]):
            return " ".join(test["caveats"]) or "the seconds of some pairs are not comparable"
    return ""


def _times(study: Study, names: Sequence[str], seeds: Any) -> dict[str, float]:
    """Algorithm -> the median over seeds of the seconds to the target."""
    target = study.plan.targets[names[0]]
    times = []
    for seed in seeds:
        runs = [rows_with(study.runs, arm=arm, seed=seed, replicate=0).iloc[0] for arm in names]
        times.append([seen_at for _, seen_at in study.measure.crossings(runs, target)])
    medians = np.median(times, axis=0).tolist()
    return dict(zip(study.arms.loc[[*names], "algorithm"], medians, strict=True))


def across(tasks: Sequence[PrimaryCondition], generator: np.random.Generator) -> Across:
    """Compare the algorithms over all tasks.

    Raises:
        UsageError: below 3 tasks, or where their clocks or references do not go together.
    """
    _check_comparable(tasks)
    first = tasks[0]
    shared = [name for name in first.scores if all(name in task.scores for task in tasks)]
    counts = [len(task.scores) for task in tasks]
    fewest = min(counts)
    scores = {}
    for name in shared:
        scores[name] = np.array([task.scores[name].head(fewest) for task in tasks]).T
    middle = {}
    better = {}
    profile = {}
    for name, table in scores.items():
        middle[name] = stratified_bootstrap([table], iqm, generator)
        if name != first.reference:
            better[name] = stratified_bootstrap([table, scores[first.reference]], mean_improvement, generator)
        profile[name] = performance_profile(table, generator)
    time_scores = {}
    if all(name in task.median_times for task in tasks for name in shared):
        times = [[task.median_times[name] for name in shared] for task in tasks]
        time_scores = dict(zip(shared, performance_score(times), strict=True))
    return Across(
        num_tasks=len(tasks),
        num_seeds=fewest,
        clock=first.clock,
        names=", ".join(task.name for task in tasks),
        reference=first.reference,
        some_have_more=max(counts) > fewest,
        scores=scores,
        middle=middle,
        better=better,
        profile=profile,
        why_no_interval=too_few(scores[first.reference]),
        time_scores=time_scores,
        why_untimed="; ".join(f"{task.name}: {task.why_untimed}" for task in tasks if task.why_untimed),
    )


def _check_comparable(tasks: Sequence[PrimaryCondition]) -> None:
    """Refuse tasks over which nothing can be said."""
    if len(tasks) < MINIMUM_TASKS:
        raise UsageError(f"{len(tasks)} tasks; a statement over tasks needs {MINIMUM_TASKS} studies or more")
    if len({(task.clock, task.reference) for task in tasks}) > 1:
        got = ", ".join(f"{task.name} ({task.reference}, {task.clock} clock)" for task in tasks)
        raise UsageError(f"studies of one clock and one reference go together, got {got}")
    for task, other in itertools.combinations(tasks, 2):
        if task.models & other.models:
            raise UsageError(f"{task.name} and {other.name} hold runs of the same parameters: a study counts once")


def lines(found: Across) -> list[str]:
    """All results as text."""
    shown = [f"{found.num_tasks} tasks ({found.names}), {_seeds_and_clock(found)}"]
    if found.some_have_more:
        shown.append(f"of tasks with more seeds the first {found.num_seeds} are taken")
    shown.append(f"score: share of the improvement of {found.reference} at equal samples")
    above = " ".join(f"{f'> {threshold:g}':>6}" for threshold in THRESHOLDS)
    shown.append(f"{'':14} {'interquartile mean':26} {f'P(better than {found.reference})':26} share of runs {above}")
    for name, scores in found.scores.items():
        shares = " ".join(f"{100 * share:>4.0f} %" for share in share_above(scores, THRESHOLDS))
        middle = _cell(found.middle[name])
        better = _cell(found.better.get(name))
        shown.append(f"{name:14} {middle:26} {better:26} {'':13} {shares}")
    if found.why_no_interval:
        shown.append(f"no interval: {found.why_no_interval}")
    else:
        shown.append(f"P: {UNPAIRED}")
    if found.time_scores:
        scores_in_words = ", ".join(f"{algorithm} {score:.3f}" for algorithm, score in found.time_scores.items())
        shown.append(f"AlgoPerf score of median times to the target (1: fastest everywhere): {scores_in_words}")
    else:
        shown.append(f"no AlgoPerf score: {found.why_untimed}")
    return shown


def _seeds_and_clock(found: Across) -> str:
    return f"{found.num_seeds} seeds each, {found.clock} clock"


def _cell(found: Interval | None) -> str:
    """A cell of the table; a bar where there is no interval."""
    if found is None or math.isnan(found.low):
        return "-"
    return f"{found:.3f}"


def save_pictures(found: Across, folder: Path) -> list[Path]:
    """Performance profile, interquartile mean and probability of improvement as PNG and SVG, as rliable draws them.

    Where runs are too few for intervals there are no bars, and the profile has no band and says why.
    """
    from analysis import plots

    names = [*found.scores]
    styles = plots.arm_styles(DataFrame({"algorithm": names, "group": ""}, index=names))
    score = f"Score: share of the improvement of {found.reference} at equal samples."
    bands = "Bands: 95 % at each score alone."
    if found.why_no_interval:
        bands = f"No bands: {found.why_no_interval}."
    folder.mkdir(parents=True, exist_ok=True)

    def save(title: str, caption: str, height: float, draw: Any, *arguments: Any) -> list[Path]:
        figure, (axes,) = plots.figure(5.6, height)
        draw(axes, *arguments, styles)
        words = f"{title}: {found.num_tasks} tasks, {_seeds_and_clock(found)}. {caption}"
        axes.set_title(textwrap.fill(words, 88), loc="left", fontsize=7.5)
        return plots.save(figure, folder / title.lower().replace(" ", "-"), ("png", "svg"))

    paths = save("Performance profile", f"{score} {bands}", 3.4, plots.profiles, found.profile)
    if found.why_no_interval:
        return paths
    bars = f"Line: estimate. Bar: its 95 % interval. Dashed: as good as {found.reference}."
    height = 1.7 + 0.34 * len(found.middle)
    paths += save("Interquartile mean", f"{score} {bars}", height, plots.bars, found.middle, 1.0, "score")
    height = 1.7 + 0.34 * len(found.better)
    label = f"P(better than {found.reference})"
    caption = f"P: {UNPAIRED}. {bars}"
    paths += save("Probability of improvement", caption, height, plots.bars, found.better, 0.5, label)
    return paths


def _run(studies: Sequence[Path], figures: Path | None, seed: int) -> None:
    if len({folder.resolve() for folder in studies}) < len(studies):  # it would count as several tasks
        raise UsageError("a study is given twice; name each once")
    found = across([read_task(folder) for folder in studies], np.random.default_rng(seed))
    print("\n".join(lines(found)), flush=True)
    if figures is not None:
        print(*save_pictures(found, figures), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code (2 for what the user has to change)."""
    return run_command(
        _run,
        __doc__,
        arguments,
        {
            "studies": {"nargs": "+", "type": Path, "metavar": "STUDY", "help": "folders of studies, 3 or more"},
            "--figures": {"type": Path, "metavar": "DIR", "help": "also write the pictures there as PNG and SVG"},
            "--seed": {"type": int, "default": 0, "help": "of the resampling"},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
