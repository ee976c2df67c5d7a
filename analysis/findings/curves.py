"""Loss curves: of every run, and the mean of an arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy

from analysis.findings.scope import Scope
from analysis.statistics.intervals import t_interval
from analysis.study.curves import Column, curve_of

GRID_POINTS = 200
"""A mean curve has at most so many points: more are not seen."""


@dataclasses.dataclass(frozen=True)
class SeedCurve:
    """The evaluations of one run."""

    run: str
    seed: int | None
    replicate: int
    status: str
    x: tuple[float, ...]
    loss: tuple[float, ...]
    """Finite losses only."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Mean over seeds with its t interval, on a common grid over the part of x that all finished runs cover."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Empty (like `high`) below two runs."""
    high: tuple[float, ...]
    level: float
    n: int


@dataclasses.dataclass(frozen=True)
class Curve:
    arm: str
    seeds: tuple[SeedCurve, ...]
    band: Band | None
    """None without a finished run."""


@dataclasses.dataclass(frozen=True)
class CurvePanel:
    """Loss versus one axis for the arms of one group; one pair of axes."""

    group: str
    axis: Literal["seconds", "samples"]
    x_label: str
    y_label: str
    target: float | None
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]


def curve_panels(scope: Scope) -> tuple[CurvePanel, ...]:
    """Loss versus seconds and versus samples, per group."""
    panels = []
    axes: tuple[tuple[Literal["seconds", "samples"], Column], ...] = (
        ("seconds", "train_seconds"),
        ("samples", "total_samples"),
    )
    for group in scope.groups:
        for axis, column in axes:
            curves = [_curve(scope, arm, column) for arm in group.arms]
            curves = [curve for curve in curves if curve.seeds]
            if not curves:
                continue
            runs = [run for arm in group.arms for run in scope.shown[arm]]
            notes = []
            if axis == "seconds" and any(run.run is not None and run.run.oversubscribed for run in runs):
                notes.append("timings from an oversubscribed machine: not a speed comparison")
            ended = sum(run.diverged for run in runs)
            notes += [f"the curves of runs that diverged ({ended}) end where they did"] * (ended > 0)
            panels.append(
                CurvePanel(
                    group=group.name,
                    axis=axis,
                    x_label=group.seconds_label if axis == "seconds" else "samples",
                    y_label=group.loss_label,
                    target=group.target,
                    curves=tuple(curves),
                    notes=tuple(notes),
                )
            )
    return tuple(panels)


def _curve(scope: Scope, arm: str, column: Column) -> Curve:
    seeds = []
    for run in scope.shown[arm]:
        assert run.run is not None
        x, y = curve_of(run.run, column)
        if len(x):
            seeds.append(SeedCurve(run.name, run.seed, run.replicate, run.status, floats(x), floats(y)))
    finished = [run.run for run in scope.usable[arm] if run.run is not None and not run.diverged]
    return Curve(arm, tuple(seeds), band_of([curve_of(run, column) for run in finished]))


def band_of(curves: Sequence[tuple[Any, Any]]) -> Band | None:
    """Mean and 95 % t interval of curves (x, y), over the part of x that all of them cover.

    >>> one, two = numpy.array([0.0, 2.0]), numpy.array([0.0, 4.0])
    >>> band = band_of([(one, numpy.array([4.0, 0.0])), (two, numpy.array([4.0, 0.0]))])
    >>> band.x, band.mean, band.n
    ((0.0, 2.0), (4.0, 1.0), 2)
    """
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:
        return None
    grid = numpy.unique(numpy.concatenate([x for x, _ in curves]))
    grid = grid[(first <= grid) & (grid <= last)]
    if len(grid) > GRID_POINTS:
        grid = numpy.linspace(first, last, GRID_POINTS)
    values = numpy.array([numpy.interp(grid, x, y) for x, y in curves])
    intervals = [t_interval(column) for column in values.T]
    enough = len(curves) > 1
    return Band(
        x=floats(grid),
        mean=tuple(interval.estimate for interval in intervals),
        low=tuple(interval.low for interval in intervals if interval.low is not None) if enough else (),
        high=tuple(interval.high for interval in intervals if interval.high is not None) if enough else (),
        level=0.95,
        n=len(curves),
    )


def floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
