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
    known = frame[np.isfinite(frame[x]) & np.isfinite(frame[y])].drop_duplicates(x, keep="last").sort_values(x)
    return known[x].to_numpy(float), known[y].to_numpy(float)


def loss_at(curve: Curve, position: float) -> float:
    """Linear between evaluations; nan beyond them."""
    x, y = curve
    return float(np.interp(position, x, y, left=math.nan, right=math.nan)) if len(x) else math.nan


def first_held(curve: Curve, target: float) -> int | None:
    """The first evaluation at or below `target` whose next one is too, or that is the last; None: there is none."""
    below = curve[1] <= target
    held = np.flatnonzero(below & np.append(below[1:], True)[: len(below)])
    return int(held[0]) if len(held) else None


def bracket(curve: Curve, target: float) -> tuple[float, float]:
    """The last evaluation above `target` and the first one that holds it, between which it was reached; inf: never."""
    k = first_held(curve, target)
    if k is None:
        return math.inf, math.inf
    return float(curve[0][max(k - 1, 0)]), float(curve[0][k])


def reached(curve: Curve, target: float) -> float:
    """Where the chord of `bracket` is at `target`: a reading between two looks, on which no verdict rests."""
    x, y = curve
    k = first_held(curve, target)
    if k is None:
        return math.inf
    if k == 0:
        return float(x[0])
    share = (y[k - 1] - target) / (y[k - 1] - y[k])
    return float(min(x[k - 1] + share * (x[k] - x[k - 1]), x[k]))


def shared_look(curves: Sequence[Curve], end: float, near: float) -> float | None:
    """The last position in the second half up to `end` to which every curve has a look that is `near`; None: none."""
    first, *others = curves
    for at in first[0][::-1].tolist():
        if end / 2 <= at <= end + near and all(np.abs(x - at).min() <= near for x, _ in others):
            return float(at)
    return None


def losses_around(curve: Curve, position: float, near: float) -> tuple[float, float]:
    """The loss at a look `near` a position, twice; else those of the looks after and before it, nan where they rise."""
    x, y = curve
    k = int(np.searchsorted(x, position))
    beside = [place for place in (k - 1, k) if 0 <= place < len(x)]
    nearest = min(beside, key=lambda place: abs(x[place] - position))
    if abs(x[nearest] - position) <= near:
        return float(y[nearest]), float(y[nearest])
    if len(beside) < 2 or y[k] > y[k - 1]:
        return math.nan, math.nan
    return float(y[k]), float(y[k - 1])


def lowest_held(curve: Curve) -> float:
    """The lowest target that `reached` finds on a curve."""
    y = curve[1]
    return float(np.minimum(y[-1], np.maximum(y[:-1], y[1:]).min(initial=math.inf)))


def on_common_looks(curves: Sequence[Curve]) -> list[Curve]:
    """Curves that are compared, none looked at more often than another: more looks would see a low loss sooner."""
    if not curves:
        return []
    end = min(x[-1] for x, _ in curves)
    counts = [int((x <= end).sum()) for x, _ in curves]
    sparsest = curves[counts.index(min(counts))][0]
    kept = [_nearest(x, sparsest) if n > min(counts) else slice(None) for (x, _), n in zip(curves, counts, strict=True)]
    return [(x[k], y[k]) for (x, y), k in zip(curves, kept, strict=True)]


def until_shared(curve: Curve, other: Curve) -> Curve:
    """A curve that ends where a loss was first seen, up to the last look that the other has too, or would have had.

    Who is looked at more often sees a loss sooner, so looks of its own must not end its wait.
    """
    x, y = curve
    if len(x) < 2:
        return curve
    own = float(np.median(np.diff(x)))
    shared = _going_on(other[0], x[-1] + own)
    steps = (own, float(np.diff(shared).mean()) if len(shared) > 1 else math.inf)
    if max(steps) <= SAME_LOOKS * min(steps):
        return curve
    beside = min(steps) / 2 * (1 - 1e-9)
    kept = x < shared[shared < x[-1] + beside].max(initial=x[0]) + beside
    return x[kept], y[kept]


def _going_on(looks: Array, end: float) -> Array:
    """Looks that go on to `end` in their mean spacing."""
    if len(looks) < 2:
        return looks
    step = (looks[-1] - looks[0]) / (len(looks) - 1)
    return np.append(looks, looks[-1] + step * np.arange(1, round(max(0.0, end - looks[-1]) / step) + 1))


def _nearest(x: Array, sparse: Array) -> list[int] | slice:
    """The looks of `x` nearest to those of the sparsest curve, whose mean spacing goes on beyond its end."""
    sparse = _going_on(sparse, x[-1])
    wanted = np.unique(np.minimum(sparse, x[-1]))
    wanted[-1] = x[-1]
    spare = len(x) - len(wanted)
    if spare <= 0:
        return slice(None)
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    nearest = right - (wanted - x[right - 1] <= x[right] - wanted)
    kept: list[int] = []
    for number, index in enumerate(nearest):
        kept.append(min(max(int(index), kept[-1] + 1 if kept else 0), spare + number))
    return kept


def band(curves: Sequence[Curve]) -> tuple[Array, ...]:
    """(x, mean, low, high) with 95 % t intervals, over the part that all curves cover; empty where there is none."""
    known = [one for one in curves if len(one[0])]
    if not known:
        return (np.array([]),) * 4
    first = max(x[0] for x, _ in known)
    last = min(x[-1] for x, _ in known)
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(first <= grid) & (grid <= last)]
    grid = grid if len(grid) <= MOST_POINTS else np.linspace(first, last, MOST_POINTS)
    found = [t_interval([float(np.interp(at, x, y)) for x, y in known]) for at in grid]
    return grid, *(np.array([getattr(one, name) for one in found]) for name in ("estimate", "low", "high"))
