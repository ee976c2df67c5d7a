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
SAME_LOOKS = 1.1
"""How many times as often one of two runs may be looked at that stop where they see a loss."""


MOST_POINTS = 200
"""Of a mean curve."""


def unit_of(details: Mapping[str, Any]) -> str:
    """The unit of the losses of a run: nats of a cross entropy, empty where its task states none."""
    return str(details.get("loss_unit", "nats"))


def curve(frame: DataFrame, x: str, y: str = "loss") -> Curve:
    """A run's evaluations with a finite loss; of several at one position the last."""
    is_finite = np.isfinite(frame[x]) & np.isfinite(frame[y])
    known = frame[is_finite].drop_duplicates(x, keep="last").sort_values(x)
    return known[x].to_numpy(float), known[y].to_numpy(float)


def loss_at(curve: Curve, position: float) -> float:
    """Linear between evaluations; nan beyond them."""
    x, y = curve
    if not len(x):
        return math.nan
    return float(np.interp(position, x, y, left=math.nan, right=math.nan))


def first_held(curve: Curve, target: float) -> int | None:
    """The first evaluation at or below `target` whose next one is too, or that is the last; None: there is none."""
    is_below = curve[1] <= target
    stays_below = np.append(is_below[1:], True)[: len(is_below)]
    held = np.flatnonzero(is_below & stays_below)
    return int(held[0]) if len(held) else None


def bracket(curve: Curve, target: float) -> tuple[float, float]:
    """The last evaluation above `target` and the first one that holds it, between which it was reached; inf: never."""
    k = first_held(curve, target)
    if k is None:
        return math.inf, math.inf
    x = curve[0]
    before = max(k - 1, 0)
    return float(x[before]), float(x[k])


def reached(curve: Curve, target: float) -> float:
    """Where the chord of `bracket` is at `target`: a reading between two looks, on which no verdict rests."""
    x, y = curve
    k = first_held(curve, target)
    if k is None:
        return math.inf
    if k == 0:
        return float(x[0])
    fall = y[k - 1] - y[k]
    share = (y[k - 1] - target) / fall
    position = x[k - 1] + share * (x[k] - x[k - 1])
    return float(min(position, x[k]))


def shared_look(curves: Sequence[Curve], end: float, near: float) -> float | None:
    """The last position in the second half up to `end` to which every curve has a look that is `near`; None: none."""
    first, *others = curves
    for at in first[0][::-1].tolist():
        if not end / 2 <= at <= end + near:
            continue
        if all(np.abs(x - at).min() <= near for x, _ in others):
            return float(at)
    return None


def losses_around(curve: Curve, position: float, near: float) -> tuple[float, float]:
    """The loss at a look `near` a position, twice; else those of the looks after and before it, nan where they rise."""
    x, y = curve
    k = int(np.searchsorted(x, position))
    beside = [place for place in (k - 1, k) if 0 <= place < len(x)]
    nearest = min(beside, key=lambda place: abs(x[place] - position))
    if abs(x[nearest] - position) <= near:
        loss = float(y[nearest])
        return loss, loss
    if len(beside) < 2 or y[k] > y[k - 1]:
        return math.nan, math.nan
    return float(y[k]), float(y[k - 1])


def lowest_held(curve: Curve) -> float:
    """The lowest target that `reached` finds on a curve."""
    y = curve[1]
    of_two = np.maximum(y[:-1], y[1:])
    return float(np.minimum(y[-1], of_two.min(initial=math.inf)))


def on_common_looks(curves: Sequence[Curve]) -> list[Curve]:
    """Curves that are compared, none looked at more often than another: more looks would see a low loss sooner."""
    if not curves:
        return []
    end = min(x[-1] for x, _ in curves)
    counts = [int((x <= end).sum()) for x, _ in curves]
    fewest = min(counts)
    sparsest, _ = curves[counts.index(fewest)]
    shared = []
    for (x, y), count in zip(curves, counts, strict=True):
        if count > fewest:
            kept = _nearest(x, sparsest)
            shared.append((x[kept], y[kept]))
        else:
            shared.append((x, y))
    return shared


def until_shared(curve: Curve, other: Curve) -> Curve:
    """A curve that ends where a loss was first seen, up to the last look that the other has too, or would have had.

    Who is looked at more often sees a loss sooner, so looks of its own must not end its wait.
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
    if max(step, step_of_others) <= SAME_LOOKS * shorter:
        return curve
    beside = shorter / 2 * (1 - 1e-9)
    shared = others[others < x[-1] + beside]
    kept = x < shared.max(initial=x[0]) + beside
    return x[kept], y[kept]


def _going_on(looks: Array, end: float) -> Array:
    """Looks that go on to `end` in their mean spacing."""
    if len(looks) < 2:
        return looks
    last = looks[-1]
    step = (last - looks[0]) / (len(looks) - 1)
    number = round(max(0.0, end - last) / step)
    return np.append(looks, last + step * np.arange(1, number + 1))


def _nearest(x: Array, sparse: Array) -> list[int] | slice:
    """The looks of `x` nearest to those of the sparsest curve, whose mean spacing goes on beyond its end."""
    sparse = _going_on(sparse, x[-1])
    wanted = np.unique(np.minimum(sparse, x[-1]))
    wanted[-1] = x[-1]
    spare = len(x) - len(wanted)
    if spare <= 0:
        return slice(None)
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    left = right - 1
    is_left = wanted - x[left] <= x[right] - wanted
    kept: list[int] = []
    for number, index in enumerate(np.where(is_left, left, right)):
        first_free = kept[-1] + 1 if kept else 0
        kept.append(min(max(int(index), first_free), spare + number))
    return kept


def band(curves: Sequence[Curve]) -> tuple[Array, ...]:
    """(x, mean, low, high) with 95 % t intervals, over the part that all curves cover; empty where there is none."""
    known = [(x, y) for x, y in curves if len(x)]
    if not known:
        return (np.array([]),) * 4
    first = max(x[0] for x, _ in known)
    last = min(x[-1] for x, _ in known)
    looks = np.unique(np.concatenate([x for x, _ in known]))
    grid = looks[(first <= looks) & (looks <= last)]
    if len(grid) > MOST_POINTS:
        grid = np.linspace(first, last, MOST_POINTS)
    intervals = []
    for position in grid:
        losses = [float(np.interp(position, x, y)) for x, y in known]
        intervals.append(t_interval(losses))
    mean = np.array([interval.estimate for interval in intervals])
    low = np.array([interval.low for interval in intervals])
    high = np.array([interval.high for interval in intervals])
    return grid, mean, low, high
