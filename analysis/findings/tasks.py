"""Studies as tasks: what the algorithms of their registered primary conditions score, and what that shows together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from analysis.load import load
from analysis.pairs import Measure
from analysis.questions import is_primary
from analysis.statistics.across_tasks import (
    MINIMUM_TASKS,
    iqm,
    mean_improvement,
    performance_profile,
    performance_score,
    stratified_bootstrap,
)
from analysis.statistics.intervals import Interval, Refused
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
    """Read one study; its scores come from rows that were judged.

    Raises:
        UsageError: if it registered no primary condition, its rows are exploratory or not comparable, its arms share no
            seed, or its reference learned nothing.
    """
    study = load(folder)
    if not study.plan.registered:
        raise UsageError(f"{folder}: it registered no primary condition with a reference; its analysis.yaml says which")
    arms, asked = study.arms, study.tests[study.tests["endpoint"] == "loss_at_equal_samples"]
    places = [is_primary(study.plan, *arms.loc[arm, ["workers", "clock"]]) for arm in asked["treatment"]]
    rows = asked[
        numpy.array(places, bool) & (arms.loc[asked["reference"], "algorithm"] == study.plan.reference).to_numpy()
    ]
    if rows.empty:
        raise UsageError(f"{folder}: it registered no primary condition with a reference; its analysis.yaml says which")
    told = study.exploratory or next((" ".join(row.caveats) for row in rows.itertuples() if row.caveats), "")
    told = told or next((row.reason for row in rows.itertuples() if row.word == "not comparable"), "")
    if told:
        raise UsageError(f"{folder}: nothing of it is confirmed, so it is no task: {told}")
    seeds = sorted(set.intersection(*(set(row.seeds) for row in rows.itertuples())))
    if not seeds:
        raise UsageError(f"{folder}: there is no seed on which every algorithm has a result")
    first, *_ = rows.itertuples()
    algorithm = arms["algorithm"].to_dict()
    gained, reference = first.gained, algorithm[first.reference]
    if not gained > 0:
        raise UsageError(f"{folder}: the reference {first.reference} learned nothing, so that no score has a scale")
    finite = first.reference_values[numpy.isfinite(first.reference_values)]
    start = gained + finite.mean()

    def scores(row: Any, values: Any) -> tuple[float, ...]:
        losses = dict(zip(row.seeds, values, strict=True))
        return tuple(_share(start - losses[seed], gained) for seed in seeds)

    found = {reference: scores(first, first.reference_values)}
    found |= {algorithm[row.treatment]: scores(row, row.treatment_values) for row in rows.itertuples()}
    names = [first.reference, *rows["treatment"]]
    target = study.plan.targets.get(first.reference)
    times: dict[str, float] = {}
    if target is not None:
        measure, used = Measure(study.curves), study.runs[study.runs["replicate"] == 0]
        runs = [[used[(used["arm"] == arm) & (used["seed"] == seed)].iloc[0] for arm in names] for seed in seeds]
        crossed = numpy.array([measure.crossings(of_seed, target) for of_seed in runs])
        times = {algorithm[arm]: float(numpy.median(at)) for arm, at in zip(names, crossed.T, strict=True)}
    return Task(folder.name, str(arms.loc[first.reference, "clock"]), reference, found, times)


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
