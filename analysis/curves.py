"""What a loss curve says: the loss at a position, when it reaches a target, the mean of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.stats import t_interval

Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Positions, strictly increasing, and losses there."""
SAME_LOOKS = 1.1
"""How many times as often one of two runs may be looked at that stop where they see a loss."""


def curve(frame: pd.DataFrame, x: str, y: str = "loss") -> Curve:
    """A run's evaluations with a finite loss; of several at one position the last."""
    known = frame[np.isfinite(frame[x]) & np.isfinite(frame[y])].drop_duplicates(x, keep="last").sort_values(x)
    return known[x].to_numpy(float), known[y].to_numpy(float)


def loss_at(curve: Curve, position: float) -> float:
    """Linear between evaluations; nan beyond them."""
    x, y = curve
    return float(np.interp(position, x, y, left=math.nan, right=math.nan)) if len(x) else math.nan


def reached(curve: Curve, target: float) -> float:
    """Where a curve is at or below `target` and stays there for another evaluation; inf where it never is."""
    x, y = curve
    if not len(y):
        return math.inf
    below = y <= target
    held = np.flatnonzero(below & np.append(below[1:], True))
    if not len(held):
        return math.inf
    k = int(held[0])
    if k == 0:
        return float(x[0])
    share = (y[k - 1] - target) / (y[k - 1] - y[k])
    return float(min(x[k - 1] + share * (x[k] - x[k - 1]), x[k]))


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


def _going_on(looks: NDArray[np.float64], end: float) -> NDArray[np.float64]:
    """Looks that go on to `end` in their mean spacing."""
    if len(looks) < 2:
        return looks
    step = (looks[-1] - looks[0]) / (len(looks) - 1)
    return np.append(looks, looks[-1] + step * np.arange(1, round(max(0.0, end - looks[-1]) / step) + 1))


def _nearest(x: NDArray[np.float64], sparse: NDArray[np.float64]) -> list[int] | slice:
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


def band(curves: Sequence[Curve], points: int = 200) -> tuple[NDArray[np.float64], ...]:
    """(x, mean, low, high) with 95 % t intervals, over the part that all curves cover; empty where there is none."""
    known = [one for one in curves if len(one[0])]
    if not known:
        return (np.array([]),) * 4
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(first <= grid) & (grid <= last)]
    grid = grid if len(grid) <= points else np.linspace(first, last, points)
    found = [t_interval([float(np.interp(at, x, y)) for x, y in known]) for at in grid]
    return grid, *(np.array([getattr(one, name) for one in found]) for name in ("estimate", "low", "high"))
