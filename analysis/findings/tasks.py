"""Studies as tasks: what the algorithms of their registered primary conditions score, and what that shows together."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
from numpy.typing import NDArray

from analysis.findings.comparable_runs import scope_of
from analysis.findings.groups import groups_of
from analysis.findings.workers import loss_of
from analysis.statistics.across_tasks import (
    MINIMUM_TASKS,
    iqm,
    mean_improvement,
    performance_profile,
    performance_score,
    stratified_bootstrap,
)
from analysis.statistics.intervals import Interval, Refused
from analysis.study.curves import crossings_of, curve_of, end_of
from analysis.study.read import load_study
from asyncsgd.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Task:
    """The registered primary condition of one study."""

    name: str
    clock: str
    reference: str
    """Its algorithm."""
    scores: Mapping[str, tuple[float, ...]]
    """Algorithm -> share of the reference's mean improvement, one per seed; the same seeds for all. A run that diverged
    has made none of it."""
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
    common = min(end_of(run, "total_samples") for run in finished)
    losses = {arm: [loss_of(of_arm[seed], "total_samples", common) for seed in seeds] for arm, of_arm in runs.items()}
    first = statistics.fmean(
        float(curve_of(run.run, "total_samples")[1][0])
        for seed in seeds
        if (run := runs[group.reference][seed]).run is not None
    )
    reached = [loss for loss in losses[group.reference] if math.isfinite(loss)]
    gained = first - statistics.fmean(reached) if reached else 0.0
    if not gained > 0:
        raise UsageError(f"{folder}: the reference {group.reference} learned nothing, so that no score has a scale")
    algorithms = {arm: study.arm(arm).algorithm for arm in runs}
    times = {}
    if group.target is not None:
        found = [crossings_of([of_arm[seed] for of_arm in runs.values()], group.target) for seed in seeds]
        for arm, of_arm in zip(runs, zip(*found, strict=True), strict=True):
            times[algorithms[arm]] = statistics.median(crossing.at for crossing in of_arm)
    return Task(
        folder.name,
        group.clock,
        algorithms[group.reference],
        {algorithms[arm]: tuple(_share(first - loss, gained) for loss in of_arm) for arm, of_arm in losses.items()},
        times,
    )


def _share(improvement: float, gained: float) -> float:
    return improvement / gained if math.isfinite(improvement) else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class AlgorithmScores:
    """What the runs of one algorithm score over all tasks."""

    algorithm: str
    scores: NDArray[numpy.float64]
    """Seeds x tasks (S x T)."""
    middle: Interval | Refused
    """Interquartile mean."""
    better: Interval | Refused | None
    """Probability that a run scores more than one of the reference; None for the reference."""
    profile: tuple[tuple[float, Interval], ...]
    """Score -> share of the runs that score more."""


@dataclasses.dataclass(frozen=True, eq=False)
class AcrossTasks:
    """Several studies together; whatever holds for the algorithms that all of them have."""

    tasks: tuple[str, ...]
    clock: str
    reference: str
    num_seeds: int
    """Of every task: the fewest that one has."""
    some_have_more: bool
    """Whether a task has more seeds, of which the first are taken."""
    algorithms: tuple[AlgorithmScores, ...]
    refused: str
    """Why there is no interval; empty where there are."""
    time_scores: Mapping[str, float]
    """Algorithm -> AlgoPerf's score of its median times to the target; empty where not every study has a target."""


def across(tasks: Sequence[Task], generator: numpy.random.Generator) -> AcrossTasks:
    """S6 and S7: compare the algorithms over all tasks.

    Raises:
        UsageError: below 3 tasks, or where their clocks or references do not go together.
    """
    if len(tasks) < MINIMUM_TASKS:
        raise UsageError(f"{len(tasks)} tasks; a statement over tasks needs {MINIMUM_TASKS} studies or more")
    if len({task.clock for task in tasks}) > 1 or len({task.reference for task in tasks}) > 1:
        got = ", ".join(f"{task.name} ({task.reference}, {task.clock} clock)" for task in tasks)
        raise UsageError(f"studies of one clock and one reference go together, got {got}")
    reference = tasks[0].reference
    shared = [algorithm for algorithm in tasks[0].scores if all(algorithm in task.scores for task in tasks)]
    counts = [len(task.scores[reference]) for task in tasks]
    tables = {name: numpy.array([task.scores[name][: min(counts)] for task in tasks]).T for name in shared}
    algorithms = tuple(
        AlgorithmScores(
            name,
            table,
            stratified_bootstrap([table], iqm, generator),
            None
            if name == reference
            else stratified_bootstrap([table, tables[reference]], mean_improvement, generator),
            performance_profile(table, generator),
        )
        for name, table in tables.items()
    )
    times: Mapping[str, float] = {}
    if all(name in task.median_times for task in tasks for name in shared):
        found = performance_score([[task.median_times[name] for name in shared] for task in tasks])
        assert not isinstance(found, Refused)  # there are enough tasks
        times = dict(zip(shared, found, strict=True))
    refusals = [row.middle.reason for row in algorithms if isinstance(row.middle, Refused)]
    return AcrossTasks(
        tuple(task.name for task in tasks),
        tasks[0].clock,
        reference,
        min(counts),
        max(counts) > min(counts),
        algorithms,
        refusals[0] if refusals else "",
        times,
    )
