"""What a tuning budget buys: the expected best of k trials."""

from __future__ import annotations

import math

import numpy
from numpy.typing import ArrayLike

from analysis.statistics.intervals import finite_values


def expected_best(values: ArrayLike, k: int, *, lower_is_better: bool = True) -> float:
    """S13: the expected best of `k` trials drawn with replacement from the n that were made.

    With the values from worst to best, v_(1) .. v_(n), it is sum_i v_(i) ((i / n)^k - ((i - 1) / n)^k), the mean of the
    best under the empirical distribution. For k = 1 it is the mean.

    Args:
        values: the score of every trial (n), e.g. its loss. A diverged trial has no finite one: give it the worst.
        k: number of trials, 1 or more.
    Raises:
        ValueError: for values that are not finite, or k below 1.

    >>> [round(expected_best([0.5, 0.6, 0.7, 0.9], k, lower_is_better=False), 6) for k in (1, 2, 4)]
    [0.675, 0.75625, 0.830078]

    References:
        Dodge et al., Show Your Work, EMNLP 2019.
    """
    sample = numpy.sort(finite_values(values))
    if k < 1:
        raise ValueError(f"k must be 1 or more trials, got {k}")
    n = len(sample)
    worst_first = sample[::-1] if lower_is_better else sample
    return math.fsum(float(value) * ((i / n) ** k - ((i - 1) / n) ** k) for i, value in enumerate(worst_first, start=1))
