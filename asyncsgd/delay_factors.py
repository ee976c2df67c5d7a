"""Functions from a gradient's delay (a count of updates, 0 for a fresh one) to the factor of its step.

Every one is 1 for a fresh gradient."""

from __future__ import annotations


def inverse(delay: int) -> float:
    """Return 1 / max(1, delay), the factor of Zhang et al. (Staleness-aware Async-SGD, IJCAI 2016).

    >>> [inverse(delay) for delay in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return 1.0 / max(1, delay)


def threshold(delay: int, concurrency: int) -> float:
    """Return M / max(M, delay) with M = `concurrency`, the factor of Mishchenko et al. (NeurIPS 2022).

    >>> [threshold(delay, 4) for delay in (0, 4, 8)]
    [1.0, 1.0, 0.5]
    """
    return concurrency / max(concurrency, delay)


def bounded(delay: int, concurrency: int, learning_rate: float, smoothness: float) -> float:
    """Return the factor that takes `learning_rate` to min(eta, 1 / (4 L delay)) beyond `concurrency`.

    Koloskova et al. (NeurIPS 2022); L = `smoothness`, the largest curvature.

    >>> [bounded(delay, 4, learning_rate=0.5, smoothness=1.0) for delay in (0, 4, 5)]
    [1.0, 1.0, 0.1]
    """
    if delay <= concurrency or learning_rate <= 0:
        return 1.0
    return min(1.0, 1.0 / (4.0 * smoothness * delay * learning_rate))


def polynomial(delay: int, exponent: float) -> float:
    """Return (1 + delay)^-exponent, a weight of FedAsync (Xie et al. 2019).

    >>> [polynomial(delay, 0.5) for delay in (0, 3)]
    [1.0, 0.5]
    """
    return float((1 + delay) ** -exponent)


def hinge(delay: int, slope: float, allowed: int) -> float:
    """Return 1 up to `allowed`, then 1 / (slope (delay - allowed) + 1), a weight of FedAsync (Xie et al. 2019).

    >>> [hinge(delay, 10.0, 4) for delay in (0, 4, 5)]
    [1.0, 1.0, 0.09090909090909091]
    """
    return 1.0 if delay <= allowed else 1.0 / (slope * (delay - allowed) + 1.0)
