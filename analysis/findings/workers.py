"""Throughput against the number of workers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.findings.comparable_runs import Scope
from analysis.statistics.crossings import loss_at
from analysis.statistics.intervals import Interval, t_interval
from analysis.study.curves import Column, curve_of
from analysis.study.types import MEASURED, Arm, Study, StudyRun


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    arm: str
    num_workers: int
    throughput: Interval
    """Samples per second, mean over seeds."""
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


def scalings(study: Study, scope: Scope) -> tuple[Scaling, ...]:
    """Throughput over workers."""
    found = []
    for (algorithm, clock, speeds, batch, _), arms in _lines(study, scope):
        rates = {
            arm.name: [rate for run in scope.usable[arm.name] if not run.diverged and (rate := _rate(run)) is not None]
            for arm in arms
        }
        arms = [arm for arm in arms if rates[arm.name]]
        if not arms:
            continue
        points = tuple(
            ScalingPoint(
                arm=arm.name,
                num_workers=arm.num_workers or 0,
                throughput=t_interval(rates[arm.name]),
                oversubscribed=any(run.run is not None and run.run.oversubscribed for run in scope.usable[arm.name]),
            )
            for arm in arms
        )
        unit = "samples/s" if clock == MEASURED else "samples/virtual s"
        found.append(Scaling(algorithm, clock, speeds, batch, unit, points))
    return tuple(found)


def _rate(run: StudyRun) -> float | None:
    rate = None if run.run is None else run.run.summary.get("samples_per_second")
    return rate if rate else None


def loss_of(run: StudyRun, column: Column, position: float) -> float:
    """The loss of a run at a position; nan for a run that diverged."""
    if run.diverged or run.run is None:
        return math.nan
    return loss_at(*curve_of(run.run, column), position)
