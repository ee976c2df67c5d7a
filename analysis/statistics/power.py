"""What so many pairs can show: the smallest p, Holm's correction in a family, and the difference that is found."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from analysis.statistics.intervals import check_level

POWER = 0.8
"""Share of the studies that find the smallest detectable difference."""
SIMULATED_STUDIES = 4_000
ALL_SUBSETS = 12
"""Up to so many pairs all sign patterns are simulated, beyond a sample of them."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust `p_values` of one family so that the chance of any false rejection stays at alpha, in the given order.

    The i-th smallest (i = 0..m-1) becomes the largest of (m - j) p_(j) over j <= i, at most 1.

    Raises:
        ValueError: if one does not lie in [0, 1].

    >>> holm([0.01, 0.04, 0.03, 0.005])
    [0.03, 0.06, 0.06, 0.02]

    References:
        Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics, 1979.
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"a p value lies between 0 and 1, got {p}")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def smallest_p(n: int) -> float:
    """The smallest two-sided p that the exact sign-flip test of `n` pairs can give, 2 / 2^n.

    >>> smallest_p(5), smallest_p(6)
    (0.0625, 0.03125)
    """
    _check_count(n, 1, "n")
    return 2 / 2**n


def minimum_pairs(num_comparisons: int, alpha: float = 0.05) -> int:
    """The smallest number of pairs with which Holm over m = `num_comparisons` tests can reject: 2 / 2^n < alpha / m.

    >>> [minimum_pairs(m) for m in (1, 2, 3, 4, 6, 8, 10, 12)]
    [6, 7, 7, 8, 8, 9, 9, 9]
    """
    _check_count(num_comparisons, 1, "num_comparisons")
    check_level(alpha)
    n = 1
    while smallest_p(n) >= alpha / num_comparisons:
        n += 1
    return n


def detectable_effect(n: int, alpha: float = 0.05) -> float:
    """The smallest d_z that `n` pairs find in 80 % of studies.

    d_z is the mean difference in standard deviations of the differences. The test is the two-sided sign-flip test,
    which decides here and finds less than a t test where pairs are few. By simulation of normal differences, the same
    numbers at every call: 4,000 studies, so that 0.01 to 0.02 of it is chance.

    Returns:
        d_z; inf where not even a difference of any size is rejected at `alpha`.

    >>> round(detectable_effect(6), 1), detectable_effect(5)  # six of six on one side: Phi(1.79)^6 = 0.8
    (1.8, inf)
    """
    _check_count(n, 2, "n")
    check_level(alpha)
    return math.inf if smallest_p(n) >= alpha else float(numpy.quantile(_needed_shifts(n, alpha), POWER))


@functools.cache
def _needed_shifts(n: int, alpha: float) -> NDArray[numpy.float64]:
    """By how much each of many simulated standard normal studies has to be moved up to be rejected.

    The sign patterns whose sum is as far from 0 as the observed one are those that turn a subset of the differences
    with a mean of 0 or less, and the one that turns none. So a study is rejected when the K-th smallest mean of its
    subsets is above 0, K being the largest number of patterns with 2 K / 2^n < alpha.
    """
    generator = numpy.random.default_rng(n)
    draws = generator.normal(size=(SIMULATED_STUDIES, n))
    if n <= ALL_SUBSETS:
        subsets = (numpy.arange(1, 2**n)[:, None] >> numpy.arange(n)) & 1
    else:  # as many patterns as sign_flip draws where it does not count all of them
        subsets = generator.integers(0, 2, size=(9_999, n))
        subsets = subsets[subsets.any(axis=1)]
    weights = (subsets / subsets.sum(axis=1, keepdims=True)).T
    rank = math.ceil(alpha * (len(subsets) + 1) / 2) - 1
    parts = [numpy.partition(part @ weights, rank - 1, axis=1)[:, rank - 1] for part in numpy.array_split(draws, 10)]
    return -numpy.concatenate(parts)


def least_p_holm(pairs: Sequence[int]) -> list[float]:
    """The smallest adjusted p that each test of a family can give, when all of them give their smallest.

    Args:
        pairs: of every test of the family; 0 for one that was not made.

    >>> least_p_holm([6, 6]), least_p_holm([6, 7]), least_p_holm([7, 0, 0])
    ([0.0625, 0.0625], [0.03125, 0.03125], [0.046875, 1.0, 1.0])
    """
    return holm([smallest_p(n) if n else 1.0 for n in pairs])


def _check_count(value: int, least: int, name: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
