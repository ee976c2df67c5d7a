"""``python -m analysis.tasks STUDY STUDY STUDY ...``: several tasks or workloads at once.

Tables are runs x tasks (S x T), scores of each task on a common scale.

    python -m analysis.tasks runs/study_a runs/study_b runs/study_c

takes every folder of a sweep for a task and compares the algorithms of their registered primary conditions. A score is
the share of the reference's mean improvement that a run has made at equal samples: 1 is the reference, 0 no learning.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy
from numpy.typing import ArrayLike, NDArray

from analysis.commands import carried_out
from analysis.findings.comparable_runs import scope_of
from analysis.findings.comparisons import groups_of
from analysis.findings.workers import loss_or_worst
from analysis.statistics.intervals import Interval, Refused, check_level, finite_table
from analysis.statistics.paired import probability_of_improvement
from analysis.study.curves import curve_of, end_of, time_to, worst_loss
from analysis.study.read import load_study
from asyncsgd.errors import UsageError

MINIMUM_TASKS = 3
MINIMUM_RUNS = 15
"""Over all tasks, per method."""

THRESHOLDS = (0.5, 0.8, 0.9, 1.0, 1.1)
"""Scores above which the share of runs is printed."""

WORST_RATIO = 4.0
"""Of AlgoPerf: a method that takes four times as long as the fastest one scores nothing on a workload."""

# ---------------------------------------------------------------------------------------------------------------------
# S6: scores


def iqm(scores: ArrayLike) -> float:
    """S6: the interquartile mean, the mean of the middle half of all scores of all tasks together.

    floor(n / 4) scores are left out at each end. More robust than the mean, and less wasteful than the median.

    Args:
        scores: any shape, e.g. runs x tasks (S x T).
    Raises:
        ValueError: if there are none, or one is not finite.

    >>> iqm([[1, 2], [2, 2], [1, 1], [2, 1]]), iqm([[1, 1], [2, 2], [3, 3]])
    (1.5, 2.0)

    References:
        Agarwal et al., NeurIPS 2021 (rliable).
    """
    values = numpy.sort(numpy.asarray(scores, dtype=numpy.float64), axis=None)
    if not values.size or not numpy.isfinite(values).all():
        raise ValueError("the interquartile mean needs scores, and all of them finite")
    cut = len(values) // 4
    kept = values[cut : len(values) - cut]
    return math.fsum(kept) / len(kept)


def score_distribution(scores: ArrayLike, thresholds: ArrayLike) -> NDArray[numpy.float64]:
    """S6: the share of runs, of all tasks together, with a score above each threshold; a performance profile.

    >>> score_distribution([[0.2, 0.4], [0.6, 0.8]], [0.0, 0.4, 0.9]).tolist()
    [1.0, 0.5, 0.0]
    """
    values = finite_table(scores, "scores", "runs", "tasks").ravel()
    return (values[:, None] > numpy.asarray(thresholds, dtype=numpy.float64)).mean(axis=0)


def mean_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """S6: P(X > Y) of a run of each, averaged over tasks, ties one half; the numbers of runs may differ.

    >>> round(mean_improvement([[1, 2], [2, 2], [1, 1], [2, 1]], [[1, 1], [2, 2], [3, 3]]), 6)
    0.333333
    """
    ours, theirs = finite_table(x, "x", "runs", "tasks"), finite_table(y, "y", "runs", "tasks")
    if ours.shape[1] != theirs.shape[1]:
        raise ValueError(f"x has {ours.shape[1]} tasks and y {theirs.shape[1]}; give the same tasks in the same order")
    shares = [probability_of_improvement(a, b) for a, b in zip(ours.T, theirs.T, strict=True)]
    return math.fsum(shares) / len(shares)


def stratified_bootstrap(
    tables: Sequence[ArrayLike],
    statistic: Callable[..., float],
    generator: numpy.random.Generator,
    resamples: int = 2_000,
    level: float = 0.95,
) -> Interval | Refused:
    """S6: a percentile interval of ``statistic(*tables)``, by resampling seeds within each task.

    The tables (one per method, S x T) are paired: a resample takes the same seeds from all of them, drawn for each task
    anew. The order of the seeds does not matter. Many runs are needed; with few, percentiles are too narrow.

    Args:
        tables: scores of one or more methods (S x T each), the same seeds and tasks in the same order.
        statistic: from as many tables to a number, e.g. ``iqm``, or ``lambda a, b: iqm(a) - iqm(b)``.
        generator: draws the seeds.
    Returns:
        The interval, `n` being the number of runs of one method; `Refused` below 3 tasks or 15 runs of each method.
    Raises:
        ValueError: for tables of different shapes, or scores that are not finite.

    >>> scores = numpy.arange(15.0).reshape(5, 3)
    >>> stratified_bootstrap([scores], iqm, numpy.random.default_rng(0)).estimate
    7.0
    """
    check_level(level, "level")
    if not tables:
        raise ValueError("give one table of scores per method")
    scores = numpy.stack([finite_table(table, "scores", "seeds", "tasks") for table in _same_shape(tables)])
    _, num_seeds, num_tasks = scores.shape
    if num_tasks < MINIMUM_TASKS or num_seeds * num_tasks < MINIMUM_RUNS:
        return Refused(
            f"{num_tasks} tasks and {num_seeds * num_tasks} runs; an interval over tasks needs {MINIMUM_TASKS} and "
            f"{MINIMUM_RUNS}"
        )
    estimate = float(statistic(*scores))
    for task in range(num_tasks):
        scores[:, :, task] = scores[:, numpy.lexsort(scores[::-1, :, task]), task]
    columns = numpy.arange(num_tasks)
    draws = [
        float(statistic(*scores[:, chosen, columns]))
        for chosen in generator.integers(0, num_seeds, size=(resamples, num_seeds, num_tasks))
    ]
    low, high = numpy.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), level, num_seeds * num_tasks)


def _same_shape(tables: Sequence[ArrayLike]) -> list[NDArray[numpy.float64]]:
    arrays = [numpy.asarray(table, dtype=numpy.float64) for table in tables]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"tables of one shape are needed, seeds x tasks; got {[array.shape for array in arrays]}")
    return arrays


# ---------------------------------------------------------------------------------------------------------------------
# S7: times


def performance_score(times: ArrayLike) -> tuple[float, ...] | Refused:
    """S7: AlgoPerf's score of each mode over workloads, mean of max(0, (4 - r) / 3), r its time over the fastest one's.

    It is the area under the performance profile, the share of workloads with r <= tau, for tau from 1 to 4, over 3.
    1: fastest on every workload. It depends on which modes are compared.

    Args:
        times: to the target (workloads x modes), above 0, inf where it was not reached.
    Returns:
        One score per mode; `Refused` below 3 workloads.
    Raises:
        ValueError: for nan or a time that is not above 0.

    >>> [round(score, 6) for score in performance_score([[100, 200], [50, 40], [30, math.inf]])]
    [0.972222, 0.555556]

    References:
        Dahl et al., Benchmarking Neural Network Training Algorithms, 2023, section 4.
    """
    table = numpy.asarray(times, dtype=numpy.float64)
    if table.ndim != 2 or not table.size or not (table > 0).all():
        raise ValueError(f"times must be a table of workloads x modes, all above 0; got shape {table.shape}")
    if len(table) < MINIMUM_TASKS:
        return Refused(f"{len(table)} workloads; one number over workloads needs {MINIMUM_TASKS}")
    fastest = table.min(axis=1, keepdims=True)
    # a workload that nobody finished has ratio inf / inf and gives nobody anything
    ratios = numpy.divide(table, fastest, out=numpy.full_like(table, math.inf), where=numpy.isfinite(fastest))
    shares = numpy.maximum(0.0, (WORST_RATIO - ratios) / (WORST_RATIO - 1))
    return tuple(math.fsum(column) / len(column) for column in shares.T)


# ---------------------------------------------------------------------------------------------------------------------
# Studies as tasks


@dataclasses.dataclass(frozen=True)
class Task:
    """The registered primary condition of one study."""

    name: str
    clock: str
    reference: str
    """Its algorithm."""
    scores: Mapping[str, tuple[float, ...]]
    """Algorithm -> share of the reference's mean improvement, one per seed; the same seeds for all."""
    median_times: Mapping[str, float]
    """Algorithm -> median over seeds of the seconds to the target, inf where most never reach it; empty without one."""


def read_task(folder: Path) -> Task:
    """Read one study.

    Raises:
        UsageError: if it registered no primary condition, its arms share no seed, or its reference learned nothing.
    """
    study = load_study(folder)
    groups, _ = groups_of(study)
    group = next((group for group in groups if group.primary and group.reference is not None), None)
    if group is None or group.reference is None:
        raise UsageError(f"{folder}: it registered no primary condition with a reference; its analysis.yaml says which")
    usable = scope_of(study, groups).usable
    runs = {arm: {run.seed: run for run in usable[arm]} for arm in group.arms if usable[arm]}
    everybody = [run for of_arm in runs.values() for run in of_arm.values()]
    finished = [run.run for run in everybody if run.run is not None and not run.diverged]
    seeds = sorted(seed for seed in set.intersection(*map(set, runs.values())) if seed is not None) if runs else []
    if group.reference not in runs or not finished or not seeds:
        raise UsageError(f"{folder}: there is no seed on which every algorithm has a result in {group.name}")
    common, worst = min(end_of(run, "total_samples") for run in finished), worst_loss(everybody)
    losses = {
        arm: [loss_or_worst(of_arm[seed], "total_samples", common, worst) for seed in seeds]
        for arm, of_arm in runs.items()
    }
    first = statistics.fmean(
        float(curve_of(run.run, "total_samples")[1][0])
        for seed in seeds
        if (run := runs[group.reference][seed]).run is not None
    )
    gained = first - statistics.fmean(losses[group.reference])
    if not gained > 0:
        raise UsageError(f"{folder}: the reference {group.reference} learned nothing, so that no score has a scale")
    algorithms = {arm: study.arm(arm).algorithm for arm in runs}
    times = {}
    if group.target is not None:
        for arm, of_arm in runs.items():
            times[algorithms[arm]] = statistics.median(time_to(of_arm[seed], group.target)[0] for seed in seeds)
    return Task(
        folder.name,
        group.clock,
        algorithms[group.reference],
        {algorithms[arm]: tuple((first - loss) / gained for loss in of_arm) for arm, of_arm in losses.items()},
        times,
    )


def lines(tasks: Sequence[Task], generator: numpy.random.Generator) -> list[str]:
    """S6 and S7 as text.

    Raises:
        UsageError: below 3 tasks, or where their clocks, references or algorithms do not go together.
    """
    if len(tasks) < MINIMUM_TASKS:
        raise UsageError(f"{len(tasks)} tasks; a statement over tasks needs {MINIMUM_TASKS} studies or more")
    if len({task.clock for task in tasks}) > 1 or len({task.reference for task in tasks}) > 1:
        got = ", ".join(f"{task.name} ({task.reference}, {task.clock} clock)" for task in tasks)
        raise UsageError(f"studies of one clock and one reference go together, got {got}")
    reference = tasks[0].reference
    modes = [mode for mode in tasks[0].scores if all(mode in task.scores for task in tasks)]
    num_seeds = min(len(task.scores[reference]) for task in tasks)
    tables = {mode: numpy.array([task.scores[mode][:num_seeds] for task in tasks]).T for mode in modes}
    told = [
        f"{len(tasks)} tasks ({', '.join(task.name for task in tasks)}), {num_seeds} seeds each, {tasks[0].clock} clock"
    ]
    if any(len(task.scores[reference]) > num_seeds for task in tasks):
        told.append(f"of tasks with more seeds the first {num_seeds} are taken")
    told.append(f"score: share of the improvement of {reference} at equal samples")
    above = " ".join(f"{f'> {threshold:g}':>6}" for threshold in THRESHOLDS)
    told.append(f"{'':14} {'interquartile mean':26} {f'P(better than {reference})':26} share of runs {above}")
    for mode, table in tables.items():
        middle = stratified_bootstrap([table], iqm, generator)
        better = stratified_bootstrap([table, tables[reference]], mean_improvement, generator)
        shares = " ".join(f"{100 * share:>4.0f} %" for share in score_distribution(table, THRESHOLDS))
        own = "-" if mode == reference else _text(better)
        told.append(f"{mode:14} {_text(middle):26} {own:26} {'':13} {shares}")
    refused = stratified_bootstrap([tables[reference]], iqm, generator)
    if isinstance(refused, Refused):
        told.append(f"no interval: {refused.reason}")
    if all(mode in task.median_times for task in tasks for mode in modes):
        scores = performance_score([[task.median_times[mode] for mode in modes] for task in tasks])
        if isinstance(scores, tuple):
            shown = ", ".join(f"{mode} {score:.3f}" for mode, score in zip(modes, scores, strict=True))
            told.append(f"AlgoPerf score of median times to the target (1: fastest everywhere): {shown}")
    else:
        told.append("no AlgoPerf score: not every study has a target")
    return told


def _text(found: Interval | Refused) -> str:
    if isinstance(found, Refused):
        return "-"
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _check_different(folders: Sequence[Path]) -> None:
    """Refuse a folder that is given twice, also by another path: one study would count as several tasks."""
    different: dict[Path, Path] = {}
    firsts = [different.setdefault(folder.resolve(), folder) for folder in folders]
    twice = [(folder, first) for folder, first in zip(folders, firsts, strict=True) if folder is not first]
    if twice:
        folder, first = twice[0]
        names = [*map(str, different.values()), *["ANOTHER_STUDY"] * (MINIMUM_TASKS - len(different))]
        raise UsageError(
            f"{folder} is the same study as {first} and counts once; type: python -m analysis.tasks {' '.join(names)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code (2 for what the user has to change)."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tasks",
        description="Compare algorithms over several studies, each taken for a task.",
        allow_abbrev=False,
    )
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="folders of sweeps, 3 or more")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    flags = parser.parse_args(arguments)

    def command() -> None:
        _check_different(flags.studies)
        for line in lines([read_task(folder) for folder in flags.studies], numpy.random.default_rng(flags.seed)):
            print(line)

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
