"""What loss costs in seconds: the Pareto front, its area, and how often a place is on it."""

from __future__ import annotations

import math

import numpy
from numpy.typing import ArrayLike, NDArray

from analysis.statistics.intervals import without_nan


def pareto(seconds: ArrayLike, losses: ArrayLike) -> NDArray[numpy.bool_]:
    """S11: which points no other point dominates; lower is better in both.

    A point dominates another that is at least as large in both and larger in one, so equal points stay together on the
    front. A point with an infinite coordinate (it never got there) is not on it.

    Args:
        seconds, losses: one of each per point (K).
    Returns:
        A new mask (K).

    >>> pareto([1.0, 2.0, 3.0], [5.0, 4.0, 4.5]).tolist()
    [True, True, False]
    """
    x, y = _points(seconds, losses)
    return _on_front(x[None], y[None])[0]


def _points(seconds: ArrayLike, losses: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    x, y = without_nan(seconds, "seconds"), without_nan(losses, "losses")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} seconds and {len(y)} losses; give one of each per point")
    return x, y


def _on_front(x: NDArray[numpy.float64], y: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    """The front of each of R sets of K points (R x K)."""
    x_other, y_other = x[:, :, None], y[:, :, None]
    x_own, y_own = x[:, None, :], y[:, None, :]
    dominated = (x_other <= x_own) & (y_other <= y_own) & ((x_other < x_own) | (y_other < y_own))
    return ~dominated.any(axis=1) & numpy.isfinite(x) & numpy.isfinite(y)


def hypervolume(seconds: ArrayLike, losses: ArrayLike, reference_point: tuple[float, float]) -> float:
    """S11: the area (seconds x loss) that the points dominate, up to a declared reference point.

    Points beyond the reference point in either coordinate add nothing. Larger is better; two studies can be compared
    only at the same reference point.

    Raises:
        ValueError: for nan, or a reference point that is not finite.

    >>> hypervolume([1.0, 2.0], [2.0, 1.0], reference_point=(3.0, 3.0))
    3.0
    """
    x, y = _points(seconds, losses)
    if not (math.isfinite(reference_point[0]) and math.isfinite(reference_point[1])):
        raise ValueError(f"the reference point must be finite, got {reference_point}")
    front = sorted({(float(a), float(b)) for a, b, on in zip(x, y, _on_front(x[None], y[None])[0], strict=True) if on})
    area, height = 0.0, float(reference_point[1])
    for position, loss in front:
        if position < reference_point[0] and loss < height:
            area += (reference_point[0] - position) * (height - loss)
            height = loss
    return area


def pareto_share(
    seconds: ArrayLike, losses: ArrayLike, generator: numpy.random.Generator, resamples: int = 2_000
) -> NDArray[numpy.float64]:
    """S11: in what share of resamples of the seeds the mean of each condition is on the Pareto front.

    A resample takes the same seeds for every condition. The order of the seeds does not matter.

    Args:
        seconds, losses: one of each per seed and condition (S x K); inf is allowed, nan is not.
        generator: draws the seeds.
    Returns:
        A share per condition (K).

    >>> pareto_share([[1.0, 2.0], [1.1, 2.1]], [[5.0, 6.0], [5.1, 6.1]], numpy.random.default_rng(0)).tolist()
    [1.0, 0.0]
    """
    x, y = numpy.asarray(seconds, dtype=numpy.float64), numpy.asarray(losses, dtype=numpy.float64)
    if x.ndim != 2 or x.shape != y.shape or not x.size or numpy.isnan(x).any() or numpy.isnan(y).any():
        raise ValueError(
            f"seconds and losses must be tables of the same seeds x conditions without nan, got {x.shape}, {y.shape}"
        )
    order = numpy.lexsort(numpy.concatenate((x, y), axis=1).T[::-1])
    x, y = x[order], y[order]
    chosen = generator.integers(0, len(x), size=(resamples, len(x)))
    return _on_front(x[chosen].mean(axis=1), y[chosen].mean(axis=1)).mean(axis=0)
