"""Loss against seconds: which arms no other beats in both, and how sure that is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy

from analysis.findings.comparable_runs import Scope
from analysis.statistics.fronts import hypervolume, pareto, pareto_share
from analysis.study.curves import curve_of
from analysis.study.types import Arm, Study, StudyRun


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """The test runs of one arm, or one of its tuning trials.

    Trials ran on the tuning seeds, so that they are compared with one another and not with the test runs: there is a
    front of either.
    """

    arm: str
    seconds: float
    """Mean over the runs, as `loss`; both are infinite where a run diverged, which puts its arm on no front."""
    loss: float
    on_front: bool
    share: float | None
    """Of the bootstrap samples of the seeds in which no other point of its front is better in both."""
    n: int
    num_diverged: int
    trial: tuple[tuple[str, str], ...] = ()
    """(key, value) of the settings that the trial tried; empty for the test runs."""


@dataclasses.dataclass(frozen=True)
class ParetoPanel:
    """S11: final loss against seconds, all arms under one clock on one data set."""

    clock: str
    speeds: str | None
    evaluation_set: str
    x_label: str
    y_label: str
    points: tuple[ParetoPoint, ...]
    """Sorted by seconds."""
    hypervolume: float | None
    """Area that the test runs dominate, in seconds x nats, against `reference_point`."""
    reference_point: tuple[float, float] | None
    """Mean seconds of the whole runs of one arm, and its mean loss at its first evaluation: other arms do not move it.
    None where no arm of the panel is a reference."""
    reference_arm: str | None = None


def pareto_panels(study: Study, scope: Scope, generator: numpy.random.Generator) -> tuple[ParetoPanel, ...]:
    """S11: final loss against seconds of all arms and tuning trials under one clock, the same speeds, on the same data.

    The area (hypervolume) ends at the budget and the first loss of one reference arm, that of the first group that has
    one (the primary group comes first), so that another arm beside it changes nothing but what it adds.
    """
    panels: dict[tuple[str, str | None, str], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        group = scope.group_of(arm.name)
        if group is not None and scope.usable[arm.name]:
            told = [run.run.evaluation_set for run in scope.usable[arm.name] if run.run and run.run.evaluation_set]
            panels[arm.clock, arm.speeds, told[0] if told else ""].append(arm)
    found = []
    for (clock, speeds, evaluation_set), arms in panels.items():
        tests = _front({(arm.name, ()): scope.usable[arm.name] for arm in arms}, generator)
        if not tests:
            continue
        trials = _front(_trial_runs(study, arms, evaluation_set), generator)
        group = scope.group_of(arms[0].name)
        assert group is not None
        references = [other.reference for other in scope.groups if other.reference in {arm.name for arm in arms}]
        reference = references[0] if references else None
        corner = None if reference is None else _corner(scope.usable[reference])
        found.append(
            ParetoPanel(
                clock=clock,
                speeds=speeds,
                evaluation_set=evaluation_set,
                x_label=group.seconds_label,
                y_label=group.loss_label,
                points=(*tests, *trials),
                hypervolume=None
                if corner is None
                else hypervolume([point.seconds for point in tests], [point.loss for point in tests], corner),
                reference_point=corner,
                reference_arm=None if corner is None else reference,
            )
        )
    return tuple(found)


Tried = tuple[tuple[str, str], ...]
"""(key, value) of the settings of a tuning trial; empty for test runs."""


def _front(
    runs: Mapping[tuple[str, Tried], Sequence[StudyRun]], generator: numpy.random.Generator
) -> tuple[ParetoPoint, ...]:
    """One point for each (arm, trial), those that nobody is better than in both marked; sorted by seconds."""
    places = {key: _places(of_point) for key, of_point in runs.items()}
    places = {key: of_point for key, of_point in places.items() if of_point}
    if not places:
        return ()
    seconds = [statistics.fmean(place[0] for place in of_point.values()) for of_point in places.values()]
    losses = [statistics.fmean(place[1] for place in of_point.values()) for of_point in places.values()]
    front = pareto(seconds, losses)
    shares = _front_shares(list(places.values()), generator)
    points = [
        ParetoPoint(
            arm=arm,
            seconds=seconds[place],
            loss=losses[place],
            on_front=bool(front[place]),
            share=None if shares is None else shares[place],
            n=len(places[arm, trial]),
            num_diverged=sum(math.isinf(loss) for _, loss in places[arm, trial].values()),
            trial=trial,
        )
        for place, (arm, trial) in enumerate(places)
    ]
    return tuple(sorted(points, key=lambda point: (point.seconds, point.loss, point.arm, point.trial)))


def _trial_runs(study: Study, arms: Sequence[Arm], evaluation_set: str) -> dict[tuple[str, Tried], list[StudyRun]]:
    """The tuning runs on the same data, by arm and by what they tried."""
    found: dict[tuple[str, Tried], list[StudyRun]] = defaultdict(list)
    for arm in arms:
        for run in study.of("tuning", arm.name):
            if run.run is None or not run.usable or run.trial is None:
                continue
            if (run.run.evaluation_set or "") == evaluation_set and run.trial < len(arm.trials):
                tried = tuple(sorted((key, str(value)) for key, value in arm.trials[run.trial].settings.items()))
                found[arm.name, tried].append(run)
    return found


def _corner(runs: Sequence[StudyRun]) -> tuple[float, float] | None:
    """Where an area of hypervolume ends: mean seconds of the whole runs, and mean loss of their first evaluations."""
    curves = [curve_of(run.run, "train_seconds") for run in runs if run.run is not None and not run.diverged]
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    return statistics.fmean(float(x[-1]) for x, _ in curves), statistics.fmean(float(y[0]) for _, y in curves)


def _places(runs: Sequence[StudyRun]) -> dict[int, tuple[float, float]]:
    """(seconds, final loss) by seed; a diverged run never has a loss, so that both are infinite."""
    places = {}
    for run in runs:
        if run.run is None or run.seed is None:
            continue
        x, y = curve_of(run.run, "train_seconds")
        if run.diverged:
            places[run.seed] = (math.inf, math.inf)
        elif len(x):
            places[run.seed] = (float(x[-1]), float(y[-1]))
    return places


def _front_shares(
    places: Sequence[Mapping[int, tuple[float, float]]], generator: numpy.random.Generator
) -> list[float] | None:
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in places)))
    if len(seeds) < 2:
        return None
    seconds = [[of_arm[seed][0] for of_arm in places] for seed in seeds]
    losses = [[of_arm[seed][1] for of_arm in places] for seed in seeds]
    return [float(share) for share in pareto_share(seconds, losses, generator)]
