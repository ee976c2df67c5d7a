"""Loss curves: of every run, and the mean of an arm. Learning rates and gradient norms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy

from analysis.findings.comparable_runs import Scope
from analysis.findings.delays import events_of
from analysis.statistics.intervals import t_interval
from analysis.study.curves import Column, curve_of
from analysis.study.machines import timing_notes
from analysis.study.types import StudyRun

Quantity = Literal["learning rate", "gradient norm"]

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
    axis: str
    """``seconds`` or ``samples``."""
    x_label: str
    y_label: str
    target: float | None
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepCurve:
    """What the steps of one run had, over the samples that had arrived."""

    arm: str
    run: str
    samples: tuple[float, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class StepPanel:
    """One quantity over the samples, in one run of every arm of a group and of its control arm."""

    quantity: Quantity
    group: str
    curves: tuple[StepCurve, ...]


def step_panels(scope: Scope) -> tuple[StepPanel, ...]:
    """A panel for each group and quantity; none where no run recorded it.

    One run of an arm shows them: the schedule of the learning rate is the same for all seeds. The norm of the gradient
    is that of the direction before it was clipped, as means over at most `GRID_POINTS` parts of the run.
    """
    elsewhere = {arm for controls in scope.controls.values() for arm in controls}
    panels = []
    for group in scope.groups:
        arms = () if elsewhere.issuperset(group.arms) else (*group.arms, *scope.controls[group.name])
        curves = [_step_curves(arm, run) for arm in arms for run in scope.usable[arm][:1]]
        for quantity in get_args(Quantity):
            drawn = tuple(of_run[quantity] for of_run in curves if of_run[quantity].values)
            panels += [StepPanel(quantity, group.name, drawn)] * bool(drawn)
    return tuple(panels)


def _step_curves(arm: str, run: StudyRun) -> dict[Quantity, StepCurve]:
    rates: dict[float, float] = {}
    norms: dict[float, float] = {}
    for record in () if run.run is None else events_of(run.run):
        samples = record.get("total_samples")
        if record.get("kind") != "arrival" or not isinstance(samples, int | float):
            continue
        for values, key in ((rates, "learning_rate"), (norms, "gradient_norm")):
            if isinstance(value := record.get(key), int | float) and math.isfinite(value):
                values[float(samples)] = float(value)
    parts = numpy.array_split(numpy.array(list(norms.items())).reshape(-1, 2), max(1, min(GRID_POINTS, len(norms))))
    means = [(part[-1, 0], part[:, 1].mean()) for part in parts if len(part)]
    return {
        "learning rate": StepCurve(arm, run.name, tuple(rates), tuple(rates.values())),
        "gradient norm": StepCurve(arm, run.name, floats(end for end, _ in means), floats(mean for _, mean in means)),
    }


def curve_panels(scope: Scope) -> tuple[CurvePanel, ...]:
    """Loss versus seconds and versus samples, per group; control arms beside what they are compared with."""
    panels = []
    elsewhere = {arm for controls in scope.controls.values() for arm in controls}
    for group in scope.groups:
        if elsewhere.issuperset(group.arms):
            continue
        controls = scope.controls[group.name]
        arms = (*group.arms, *controls)
        shown = {arm: scope.shown[arm] for arm in arms}
        finished = {arm: [run for run in scope.usable[arm] if not run.diverged] for arm in arms}
        notes = tuple(f"{arm} is the control arm, with batches of another size" for arm in controls)
        for axis, x_label in (("seconds", group.seconds_label), ("samples", "samples")):
            panel = curve_panel(group.name, axis, x_label, group.loss_label, shown, finished, group.target)
            if panel is not None:
                panels.append(dataclasses.replace(panel, notes=panel.notes + notes))
    return tuple(panels)


def curve_panel(
    group: str,
    axis: str,
    x_label: str,
    y_label: str,
    shown: Mapping[str, Sequence[StudyRun]],
    finished: Mapping[str, Sequence[StudyRun]],
    target: float | None = None,
) -> CurvePanel | None:
    """Loss versus one axis, ``seconds`` or ``samples``; None where no run has a loss.

    Args:
        shown: arm -> the runs that are drawn.
        finished: arm -> those of them that are in its mean.
    """
    column: Column = "train_seconds" if axis == "seconds" else "total_samples"
    curves = [_curve(arm, shown[arm], finished[arm], column) for arm in shown]
    curves = [curve for curve in curves if curve.seeds]
    if not curves:
        return None
    runs = [run for of_arm in shown.values() for run in of_arm]
    notes = timing_notes(run.run for run in runs if run.run is not None) if axis == "seconds" else []
    ended = sum(run.diverged for run in runs)
    notes += [f"the curves of runs that diverged ({ended}) end where they did"] * (ended > 0)
    return CurvePanel(group, axis, x_label, y_label, target, tuple(curves), tuple(notes))


def _curve(arm: str, shown: Sequence[StudyRun], finished: Sequence[StudyRun], column: Column) -> Curve:
    seeds = []
    for run in shown:
        assert run.run is not None
        x, y = curve_of(run.run, column)
        if len(x):
            seeds.append(SeedCurve(run.name, run.seed, run.replicate, run.status, floats(x), floats(y)))
    return Curve(arm, tuple(seeds), band_of([curve_of(run.run, column) for run in finished if run.run is not None]))


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
