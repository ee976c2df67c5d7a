"""How many runs have reached the target after how many seconds, and the speed-up at other targets."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import numpy

from analysis.findings.comparable_runs import Scope
from analysis.findings.comparisons import Comparison
from analysis.findings.groups import Group
from analysis.statistics.crossings import target_grid
from analysis.statistics.intervals import Interval, t_interval
from analysis.statistics.survival import kaplan_meier, log_rank
from analysis.statistics.time_to_target import restricted, restricted_times, speed_up
from analysis.study.curves import budget_of, crossings_of, end_of, improvement_of
from analysis.study.machines import timing_notes
from analysis.study.types import Study, StudyRun


@dataclasses.dataclass(frozen=True)
class ReachedCurve:
    """Share of runs of one arm that have reached the target, as a step function of seconds."""

    arm: str
    n: int
    reached: int
    seconds: tuple[float, ...]
    """Where the steps are; starts at 0."""
    share: tuple[float, ...]
    """After each step; starts at 0."""
    at_risk: tuple[int, ...]
    """Runs neither through nor stopped just before each of `seconds`."""
    censored: tuple[float, ...]
    """Seconds at which runs that had not reached it ended; a diverged run never ends and is not here."""
    median: float | None
    """Seconds; None where fewer than half reached it."""
    restricted_mean: Interval | None
    """Of min(T, budget) over seeds."""


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
    log_rank_p: tuple[tuple[str, float], ...]
    """(treatment arm, permutation p against the reference): S3b."""
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
    """S13: the speed-up at every target of the grid, for one comparison."""

    comparison: str
    treatment: str
    reference: str
    group: str
    points: tuple[SensitivityPoint, ...]
    after_the_fact: bool
    """Whether the targets are shares of the test runs' own improvement, since no pilot runs were registered."""


def reached_panels(scope: Scope, generator: numpy.random.Generator) -> tuple[ReachedPanel, ...]:
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
            own = [place for place, run in enumerate(runs) if run.arm == arm]
            if own:
                curves.append(_reached_curve(arm, [runs[k] for k in own], [found[k].at for k in own], budget))
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
                log_rank_p=tuple(_log_ranks(scope, group, generator)),
                notes=tuple(timing_notes(run.run for run in runs if run.run is not None)),
            )
        )
    return tuple(panels)


def _observed(runs: Sequence[StudyRun], to_target: Sequence[float]) -> tuple[list[float], list[bool]]:
    """Time of every run, and whether it is the target's: else it is its end, and inf for a run that diverged."""
    times, observed = [], []
    for run, at in zip(runs, to_target, strict=True):
        assert run.run is not None
        observed.append(math.isfinite(at))
        times.append(at if math.isfinite(at) or run.diverged else end_of(run.run, "train_seconds"))
    return times, observed


def _reached_curve(
    arm: str, runs: Sequence[StudyRun], to_target: Sequence[float], budget: float | None
) -> ReachedCurve:
    times, observed = _observed(runs, to_target)
    reached = sum(observed)
    curve = kaplan_meier(times, observed)
    median = float(numpy.median(to_target))
    return ReachedCurve(
        arm=arm,
        n=len(runs),
        reached=reached,
        seconds=(0.0, *curve.times),
        share=(0.0, *(1 - probability for probability in curve.probability)),
        at_risk=(len(runs), *curve.at_risk),
        censored=tuple(sorted(t for t, seen in zip(times, observed, strict=True) if not seen and math.isfinite(t))),
        median=median if math.isfinite(median) else None,
        restricted_mean=None if budget is None else t_interval(restricted(to_target, budget)),
    )


def _log_ranks(scope: Scope, group: Group, generator: numpy.random.Generator) -> Iterator[tuple[str, float]]:
    if group.reference is None or group.target is None:
        return
    theirs = {run.seed: run for run in scope.usable[group.reference]}
    for arm in group.arms[1:]:
        ours = {run.seed: run for run in scope.usable[arm]}
        seeds = sorted(seed for seed in set(ours) & set(theirs) if seed is not None)
        if not seeds:
            continue
        pairs = [(ours[seed], theirs[seed]) for seed in seeds]
        times = [[found.at for found in crossings_of(pair, group.target)] for pair in pairs]
        sides = [
            _observed(runs, to_target)
            for runs, to_target in zip(zip(*pairs, strict=True), zip(*times, strict=True), strict=True)
        ]
        found = log_rank(*sides[0], *sides[1], generator, paired=True)
        yield arm, found.p


def sensitivities(
    study: Study, comparisons: Sequence[Comparison], generator: numpy.random.Generator
) -> tuple[Sensitivity, ...]:
    """S13: the speed-up of every comparison at the whole grid of targets.

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
                    speed_up=speed_up(ours, theirs, generator).ratio,
                    restricted_ratio=ratio,
                    reached_treatment=sum(map(math.isfinite, ours)),
                    reached_reference=sum(map(math.isfinite, theirs)),
                    n=len(ours),
                )
            )
        found.append(
            Sensitivity(
                comparison.name,
                comparison.treatment.name,
                comparison.reference.name,
                comparison.group.name,
                tuple(points),
                after_the_fact=pilots is None,
            )
        )
    return tuple(found)
