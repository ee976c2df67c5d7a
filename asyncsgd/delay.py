"""Functions from a gradient's delay (a count of updates, 0 for a fresh one) to the factor of its step."""

from __future__ import annotations


def inverse(delay: int) -> float:
    """Return 1 / max(1, delay), the factor of Zhang et al. (Staleness-aware Async-SGD, IJCAI 2016).

    >>> [inverse(delay) for delay in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return 1.0 / max(1, delay)
