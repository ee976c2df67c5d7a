"""How many runs have reached the target after how many seconds, and the speed-up at other targets."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy

from analysis.findings.comparable_runs import Scope
from analysis.findings.comparisons import Comparison
from analysis.statistics.crossings import target_grid
from analysis.statistics.intervals import Interval, t_interval
from analysis.statistics.time_to_target import restricted, restricted_times, speed_up
from analysis.study.curves import budget_of, crossings_of, improvement_of
from analysis.study.machines import timing_notes
from analysis.study.types import Study


@dataclasses.dataclass(frozen=True)
class ReachedCurve:
    """When the runs of one arm reached the target."""

    arm: str
    n: int
    """Runs."""
    seconds: tuple[float, ...]
    """Of those that reached it, ascending; one that diverged afterwards is not among them."""
    median: float | None
    """Seconds; None where fewer than half reached it."""
    restricted_mean: Interval | None
    """Of min(T, budget) over seeds."""

    @property
    def reached(self) -> int:
        """Runs that reached it."""
        return len(self.seconds)


@dataclasses.dataclass(frozen=True)
class ReachedPanel:
    """Time to target of the arms of one group."""

    group: str
    target: float
    target_from: str
    budget: float | None
    budget_reason: str
    spacing: float | None
    """Median gap in seconds between the evaluations around a crossing: the resolution of the times."""
    curves: tuple[ReachedCurve, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SensitivityPoint:
    share: float
    """Of the reference's improvement over the first evaluation; 0.9 = 90 %."""
    target: float
    speed_up: Interval | None
    """None where no pair reached it."""
    restricted_ratio: float | None
    """RMST treatment / reference; below 1: the treatment is sooner."""
    reached_treatment: int
    reached_reference: int
    n: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The speed-up at every target of the grid, for one comparison."""

    treatment: str
    reference: str
    group: str
    points: tuple[SensitivityPoint, ...]


def reached_panels(scope: Scope) -> tuple[ReachedPanel, ...]:
    """Who reached the declared target when, per group."""
    panels = []
    for group in scope.groups:
        runs = [run for arm in group.arms for run in scope.usable[arm]]
        if group.target is None or not runs:
            continue
        found = [crossings_of([run], group.target)[0] for run in runs]  # each by its own looks
        budget, reason = budget_of(runs, [crossing.at for crossing in found])
        curves = []
        for arm in group.arms:
            own = [crossing.at for run, crossing in zip(runs, found, strict=True) if run.arm == arm]
            if own:
                median = float(numpy.median(own))
                curves.append(
                    ReachedCurve(
                        arm=arm,
                        n=len(own),
                        seconds=tuple(sorted(filter(math.isfinite, own))),
                        median=median if math.isfinite(median) else None,
                        restricted_mean=None if budget is None else t_interval(restricted(own, budget)),
                    )
                )
        spacings = [crossing.spacing for crossing in found if crossing.spacing]
        panels.append(
            ReachedPanel(
                group=group.name,
                target=group.target,
                target_from=group.target_from,
                budget=budget,
                budget_reason=reason,
                spacing=statistics.median(spacings) if spacings else None,
                curves=tuple(curves),
                notes=tuple(timing_notes(run.run for run in runs if run.run is not None)),
            )
        )
    return tuple(panels)


def sensitivities(
    study: Study, comparisons: Sequence[Comparison], generator: numpy.random.Generator
) -> tuple[Sensitivity, ...]:
    """The speed-up of every comparison at the whole grid of targets.

    They are shares of what the registered pilot runs improved; else of what the compared runs themselves did, which was
    not known before.
    """
    pilots_of = {} if study.registration is None else study.registration.pilots
    found = []
    for whole in comparisons:
        comparison = whole.in_seconds
        if comparison.control:
            continue
        pilots = pilots_of.get(comparison.reference.name)
        improvement = improvement_of([pair.reference for pair in comparison.pairs])
        if pilots is not None:
            improvement = (pilots.first_loss, pilots.best_loss)
        if improvement is None:
            continue
        points = []
        for share, target in target_grid(*improvement).items():
            times = comparison.times_to(target)
            ours, theirs = times[::2], times[1::2]
            budget, _ = budget_of(comparison.runs, times)
            ratio = None
            if budget is not None:
                ratio = restricted_times(ours, theirs, budget, generator).ratio
            points.append(
                SensitivityPoint(
                    share=share,
                    target=target,
                    speed_up=speed_up(ours, theirs),
                    restricted_ratio=ratio,
                    reached_treatment=sum(map(math.isfinite, ours)),
                    reached_reference=sum(map(math.isfinite, theirs)),
                    n=len(ours),
                )
            )
        found.append(
            Sensitivity(
                comparison.treatment.name,
                comparison.reference.name,
                comparison.group.name,
                tuple(points),
            )
        )
    return tuple(found)
