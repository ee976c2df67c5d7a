"""What a loss curve says: the loss at a position, when it reaches a target, the mean of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from pandas import DataFrame

from analysis.stats import Array, t_interval

Curve: TypeAlias = tuple[Array, Array]
"""Positions, strictly increasing, and losses there."""
SAME_FREQUENCY = 1.1
"""Two runs that stop at a target loss count as equally often evaluated up to this ratio."""
MAX_MEAN_POINTS = 200
"""The number of points that a mean curve has at most."""


def unit_of(details: Mapping[str, Any]) -> str:
    """The unit of the losses of a run: nats of a cross entropy, empty where its task states none."""
    return str(details.get("loss_unit", "nats"))


def curve(frame: DataFrame, x: str, y: str = "loss") -> Curve:
    """A run's evaluations with a finite loss; of several at one position the last one."""
    is_finite = np.isfinite(frame[x]) & np.isfinite(frame[y])
    known = frame[is_finite].drop_duplicates(x, keep="last").sort_values(x)
    return known[x].to_numpy(float), known[y].to_numpy(float)


def loss_at(curve: Curve, position: float) -> float:
    """The loss at a position, by linear interpolation between evaluations; nan before the first and after the last.

    >>> curve = np.array([0.0, 10.0, 20.0]), np.array([6.0, 4.0, 5.0])
    >>> loss_at(curve, 2.5), loss_at(curve, 21)
    (5.5, nan)
    """
    x, y = curve
    if not len(x):
        return math.nan
    return float(np.interp(position, x, y, left=math.nan, right=math.nan))


def first_held(curve: Curve, target: float) -> int | None:
    """The first evaluation at or below `target` whose next one is too, or that is the last; None: there is none."""
    is_below = curve[1] <= target
    stays_below = np.append(is_below[1:], True)[: len(is_below)]  # none for an empty curve
    held = np.flatnonzero(is_below & stays_below)
    return int(held[0]) if len(held) else None


def bracket(curve: Curve, target: float) -> tuple[float, float]:
    """The positions of the last evaluation above `target` and of the first one that holds it; inf: never.

    Between the two the target was reached.

    >>> curve = np.array([0.0, 10.0, 20.0, 30.0]), np.array([6.0, 4.0, 5.0, 4.5])
    >>> bracket(curve, 5.0), bracket(curve, 4.5)  # 10 is at 4.0, and 20 above 4.5 again
    ((0.0, 10.0), (20.0, 30.0))
    >>> bracket(curve, 6.0), bracket(curve, 4.2), bracket((np.array([]), np.array([])), 4.2)
    ((0.0, 0.0), (inf, inf), (inf, inf))
    """
    k = first_held(curve, target)
    if k is None:
        return math.inf, math.inf
    x = curve[0]
    before = max(k - 1, 0)
    return float(x[before]), float(x[k])


def crossing_at(curve: Curve, target: float) -> float:
    """Where the line between the two evaluations of `bracket` is at `target`. No verdict rests on it.

    >>> curve = np.array([0.0, 10.0, 20.0, 30.0]), np.array([6.0, 4.0, 5.0, 4.5])
    >>> crossing_at(curve, 5.0), crossing_at(curve, 4.5), crossing_at(curve, 4.2)
    (5.0, 30.0, inf)
    """
    x, y = curve
    k = first_held(curve, target)
    if k is None:
        return math.inf
    if k == 0:
        return float(x[0])
    share = (y[k - 1] - target) / (y[k - 1] - y[k])
    position = x[k - 1] + share * (x[k] - x[k - 1])
    return float(min(position, x[k]))


def shared_position(curves: Sequence[Curve], end: float, tolerance: float) -> float | None:
    """The last position in [end / 2, end + tolerance] at which every curve has an evaluation; None: there is none.

    A curve has an evaluation there if one lies within `tolerance`.

    >>> often, seldom = ((x, x) for x in (np.arange(0.0, 101.0, 20.0), np.arange(0.0, 101.0, 70.0)))
    >>> shared_position([often, often], 100.0, 0.0), shared_position([often, seldom], 100.0, 10.0)
    (100.0, 80.0)
    >>> shared_position([often, seldom], 100.0, 9.0)
    """
    first, *others = curves
    for position in first[0][::-1].tolist():
        if not end / 2 <= position <= end + tolerance:
            continue
        if all(np.abs(x - position).min() <= tolerance for x, _ in others):
            return float(position)
    return None


def losses_around(curve: Curve, position: float, tolerance: float) -> tuple[float, float]:
    """The lowest and the highest possible loss at a position.

    Both are the loss of an evaluation within `tolerance`. Without one they are the losses of the evaluations after and
    before the position, and nan if the loss rises between these.
    """
    x, y = curve
    k = int(np.searchsorted(x, position))
    neighbours = [index for index in (k - 1, k) if 0 <= index < len(x)]
    nearest = min(neighbours, key=lambda index: abs(x[index] - position))
    if abs(x[nearest] - position) <= tolerance:
        loss = float(y[nearest])
        return loss, loss
    if len(neighbours) < 2 or y[k] > y[k - 1]:
        return math.nan, math.nan
    return float(y[k]), float(y[k - 1])


def lowest_held(curve: Curve) -> float:
    """The lowest target that a curve holds, as `first_held` says it."""
    y = curve[1]
    of_two = np.maximum(y[:-1], y[1:])
    return float(np.minimum(y[-1], of_two.min(initial=math.inf)))


def thinned_to_sparsest(curves: Sequence[Curve]) -> list[Curve]:
    """Curves that are compared, none with more evaluations than another: more of them would see a low loss sooner."""
    if not curves:
        return []
    end = min(x[-1] for x, _ in curves)
    counts = [int((x <= end).sum()) for x, _ in curves]
    fewest = min(counts)
    sparsest, _ = curves[counts.index(fewest)]
    thinned = []
    for (x, y), count in zip(curves, counts, strict=True):
        if count > fewest:
            kept = _nearest(x, sparsest)
            thinned.append((x[kept], y[kept]))
        else:
            thinned.append((x, y))
    return thinned


def until_shared(curve: Curve, other: Curve) -> Curve:
    """The curve of a run that stopped at its target loss, cut at the last evaluation that the other run has too.

    The other run's evaluations are taken to go on beyond its end in their spacing. A run that was evaluated more often
    would otherwise see its target sooner. Where both were evaluated as often (`SAME_FREQUENCY`), nothing is cut.
    """
    x, y = curve
    if len(x) < 2:
        return curve
    step = float(np.median(np.diff(x)))
    others = _going_on(other[0], x[-1] + step)
    step_of_others = math.inf
    if len(others) > 1:
        step_of_others = float(np.diff(others).mean())
    shorter = min(step, step_of_others)
    if max(step, step_of_others) <= SAME_FREQUENCY * shorter:
        return curve
    tolerance = shorter / 2 * (1 - 1e-9)
    shared = others[others < x[-1] + tolerance]
    kept = x < shared.max(initial=x[0]) + tolerance
    return x[kept], y[kept]


def _going_on(positions: Array, end: float) -> Array:
    """Positions that go on to `end` in their mean spacing."""
    if len(positions) < 2:
        return positions
    last = positions[-1]
    step = (last - positions[0]) / (len(positions) - 1)
    number = round(max(0.0, end - last) / step)
    return np.append(positions, last + step * np.arange(1, number + 1))


def _nearest(x: Array, sparse: Array) -> list[int] | slice:
    """The evaluations of `x` nearest to those of the sparsest curve, whose mean spacing goes on beyond its end."""
    sparse = _going_on(sparse, x[-1])
    wanted = np.unique(np.minimum(sparse, x[-1]))
    wanted[-1] = x[-1]
    num_spare = len(x) - len(wanted)
    if num_spare <= 0:
        return slice(None)
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    left = right - 1
    is_left = wanted - x[left] <= x[right] - wanted
    kept: list[int] = []
    # each wanted position takes the nearest evaluation that is not taken and leaves one for each position to come
    for number, index in enumerate(np.where(is_left, left, right)):
        first_free = kept[-1] + 1 if kept else 0
        last_free = num_spare + number
        kept.append(min(max(int(index), first_free), last_free))
    return kept


def band(curves: Sequence[Curve]) -> tuple[Array, ...]:
    """(x, mean, low, high) with 95 % t intervals, over the part that all curves cover; empty where there is none.

    At 8 the two values are 1 and 7, whose standard error is 3; with one degree of freedom t is 12.706:

    >>> early = np.array([0.0, 4.0, 8.0]), np.array([9.0, 5.0, 1.0])
    >>> late = np.array([2.0, 6.0, 10.0]), np.array([7.0, 7.0, 7.0])
    >>> grid, mean, low, high = band([early, late])
    >>> grid.tolist(), mean.tolist(), round(float(low[-1]), 2), round(float(high[-1]), 2)
    ([2.0, 4.0, 6.0, 8.0], [7.0, 6.0, 5.0, 4.0], -34.12, 42.12)
    >>> [len(part) for part in band([])]
    [0, 0, 0, 0]
    """
    known = [(x, y) for x, y in curves if len(x)]
    if not known:
        return (np.array([]),) * 4
    first = max(x[0] for x, _ in known)
    last = min(x[-1] for x, _ in known)
    looks = np.unique(np.concatenate([x for x, _ in known]))
    grid = looks[(first <= looks) & (looks <= last)]
    if len(grid) > MAX_MEAN_POINTS:
        grid = np.linspace(first, last, MAX_MEAN_POINTS)
    intervals = []
    for position in grid:
        losses = [float(np.interp(position, x, y)) for x, y in known]
        intervals.append(t_interval(losses)[:3])
    mean, low, high = np.reshape(intervals, (-1, 3)).T
    return grid, mean, low, high
