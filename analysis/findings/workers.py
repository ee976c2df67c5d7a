"""Throughput and loss against the number of workers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy

from analysis.findings.comparable_runs import Scope
from analysis.findings.curves import (
    floats,
)
from analysis.statistics.crossings import loss_at
from analysis.statistics.intervals import Interval, Refused, t_interval
from analysis.statistics.scaling import Fit, aicc_difference, amdahl_interval, fit_amdahl, fit_usl, usl_interval
from analysis.statistics.trend import slopes
from analysis.study.curves import Column, curve_of, end_of
from analysis.study.types import MEASURED, Arm, Study, StudyRun

Model = Literal["amdahl", "usl"]


MODELS: tuple[Model, Model] = ("amdahl", "usl")


FIT_RESAMPLES = 199


@dataclasses.dataclass(frozen=True)
class FitResult:
    """S10: Amdahl's law or the universal scalability law, or why there is none."""

    model: Literal["amdahl", "usl"]
    refused: str
    """Why there is no fit; empty where there is one."""
    parameters: tuple[tuple[str, float], ...]
    intervals: tuple[tuple[str, Interval], ...]
    """By resampling seed blocks."""
    peak: float | None
    """Workers at which the throughput is largest; None where it has no peak."""
    aicc: float | None
    x: tuple[float, ...]
    y: tuple[float, ...]
    """The fitted line, for the picture."""


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    arm: str
    num_workers: int
    throughput: Interval
    """Samples per second, mean over seeds."""
    per_seed: tuple[tuple[int, float], ...]
    oversubscribed: bool


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Throughput over workers of one algorithm under one clock."""

    algorithm: str
    clock: str
    speeds: str | None
    batch_size: int | None
    unit: str
    """``samples/s`` or ``samples/virtual s``."""
    points: tuple[ScalingPoint, ...]
    fits: tuple[FitResult, ...]
    aicc_difference: float | None
    """AICc of the universal scalability law minus that of Amdahl's law; None without both. Below 0 the former."""


@dataclasses.dataclass(frozen=True)
class Trend:
    """S8: loss at equal samples over workers (on log2 P); or why there is none."""

    algorithm: str
    clock: str
    speeds: str | None
    refused: str
    workers: tuple[int, ...]
    slope: Interval | None
    """Nats per doubling of the workers."""
    page_statistic: float | None
    page_p: float | None


def _lines(study: Study, scope: Scope) -> Iterator[tuple[tuple[str, str, str | None, int | None, Any], list[Arm]]]:
    """Arms that differ in their number of workers only, by what they share; sorted by workers."""
    lines: dict[tuple[str, str, str | None, int | None, Any], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        group = scope.group_of(arm.name)
        if group is not None and arm.num_workers is not None and scope.usable[arm.name]:
            lines[arm.algorithm, arm.clock, arm.speeds, arm.batch_size, group.variant].append(arm)
    for key, arms in lines.items():
        arms.sort(key=lambda arm: (arm.num_workers or 0, arm.name))
        for copies in itertools.zip_longest(*_by_workers(arms)):
            yield key, [arm for arm in copies if arm is not None]


def _by_workers(arms: Sequence[Arm]) -> list[list[Arm]]:
    """One list per number of workers; more than one arm in it means that settings differ that no key holds."""
    return [list(same) for _, same in itertools.groupby(arms, key=lambda arm: arm.num_workers)]


def scalings(study: Study, scope: Scope, generator: numpy.random.Generator) -> tuple[Scaling, ...]:
    """S10: throughput over workers, with the two laws where there are enough numbers of workers."""
    found = []
    for (algorithm, clock, speeds, batch, _), arms in _lines(study, scope):
        rates: dict[str, dict[int, float]] = {}
        for arm in arms:
            own = {run.seed: _rate(run) for run in scope.usable[arm.name] if not run.diverged}
            rates[arm.name] = {
                seed: rate for seed, rate in sorted(own.items(), key=str) if seed is not None and rate is not None
            }
        arms = [arm for arm in arms if rates[arm.name]]
        if not arms:
            continue
        points = tuple(
            ScalingPoint(
                arm=arm.name,
                num_workers=arm.num_workers or 0,
                throughput=t_interval(list(rates[arm.name].values())),
                per_seed=tuple(sorted(rates[arm.name].items())),
                oversubscribed=any(run.run is not None and run.run.oversubscribed for run in scope.usable[arm.name]),
            )
            for arm in arms
        )
        laws = tuple(_law(model, points) for model in MODELS)
        fits = tuple(_fit(model, law, points, generator) for model, law in zip(MODELS, laws, strict=True))
        amdahl, usl = laws
        difference = aicc_difference(amdahl, usl) if isinstance(amdahl, Fit) and isinstance(usl, Fit) else None
        unit = "samples/s" if clock == MEASURED else "samples/virtual s"
        found.append(Scaling(algorithm, clock, speeds, batch, unit, points, fits, difference))
    return tuple(found)


def _rate(run: StudyRun) -> float | None:
    rate = None if run.run is None else run.run.summary.get("samples_per_second")
    return rate if rate else None


def _law(model: Model, points: Sequence[ScalingPoint]) -> Fit | Refused:
    workers = [point.num_workers for point in points for _ in point.per_seed]
    rates = [rate for point in points for _, rate in point.per_seed]
    return (fit_amdahl if model == "amdahl" else fit_usl)(workers, rates)


def _fit(
    model: Model, fit: Fit | Refused, points: Sequence[ScalingPoint], generator: numpy.random.Generator
) -> FitResult:
    if isinstance(fit, Refused):
        return FitResult(model, fit.reason, (), (), None, None, (), ())
    common = sorted(set.intersection(*({seed for seed, _ in point.per_seed} for point in points)))
    intervals: tuple[tuple[str, Interval], ...] = ()
    if len(common) > 1:
        table = [[dict(point.per_seed)[seed] for point in points] for seed in common]
        distinct = [point.num_workers for point in points]
        of_model = amdahl_interval if model == "amdahl" else usl_interval
        resampled = of_model(distinct, table, generator, FIT_RESAMPLES)
        if not isinstance(resampled, Refused):
            intervals = tuple(resampled.items())
    parameters = [("gamma", fit.gamma), ("alpha", fit.alpha)]
    parameters += [("beta", fit.beta)] * (model == "usl")
    workers = [point.num_workers for point in points]
    grid = numpy.linspace(min(workers), max(workers), 60)
    return FitResult(
        model=model,
        refused="",
        parameters=tuple(parameters),
        intervals=intervals,
        peak=fit.peak,
        aicc=fit.aicc,
        x=floats(grid),
        y=floats(fit.throughput(grid)),
    )


def trends(study: Study, scope: Scope) -> tuple[Trend, ...]:
    """S8: does the loss at equal samples grow with the workers?"""
    found = []
    for (algorithm, clock, speeds, _, _), arms in _lines(study, scope):
        workers = tuple(arm.num_workers or 0 for arm in arms)
        if len(workers) < 2:
            continue
        refused, table = _trend_table(scope, arms)
        if not refused:
            slope = slopes([math.log2(count) for count in workers], table)
            refused = slope.too_few
        if refused:
            found.append(Trend(algorithm, clock, speeds, refused, workers, None, None, None))
        else:
            found.append(Trend(algorithm, clock, speeds, "", workers, slope.mean, slope.page_statistic, slope.page_p))
    return tuple(found)


def _trend_table(scope: Scope, arms: Sequence[Arm]) -> tuple[str, list[list[float]]]:
    """Losses at equal samples (seeds x workers); or why there are none."""
    runs = {arm.name: {run.seed: run for run in scope.usable[arm.name]} for arm in arms}
    everything = [run for of_arm in runs.values() for run in of_arm.values()]
    told = {run.run.evaluation_set for run in everything if run.run is not None}
    if len(told) > 1:
        return "its runs were evaluated on different data", []
    seeds = sorted(seed for seed in set.intersection(*(set(of_arm) for of_arm in runs.values())) if seed is not None)
    finished = [run.run for run in everything if run.run is not None and not run.diverged]
    if not seeds or not finished:
        return "no seed has a result at every number of workers", []
    if diverged := [run.name for arm in arms for seed in seeds if (run := runs[arm.name][seed]).diverged]:
        return f"a slope needs a loss of every run, and {', '.join(diverged)} diverged", []
    common = min(end_of(run, "total_samples") for run in finished)
    table = [[loss_of(runs[arm.name][seed], "total_samples", common) for arm in arms] for seed in seeds]
    return "", [row for row in table if all(map(math.isfinite, row))]


def loss_of(run: StudyRun, column: Column, position: float) -> float:
    """The loss of a run at a position; nan for a run that diverged."""
    if run.diverged or run.run is None:
        return math.nan
    return loss_at(*curve_of(run.run, column), position)
