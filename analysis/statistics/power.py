"""What so many pairs can show: the smallest p, Holm's correction in a family, power, and the pairs that it takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy
from numpy.typing import NDArray
from scipy import integrate, stats

from analysis.statistics.intervals import check_level

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


def holm_divisors(p_values: Sequence[float], alpha: float = 0.05) -> list[int]:
    """By what Holm's method divides `alpha` where it judges each of `p_values`, in the given order.

    The smallest is judged at alpha / m, the next at alpha / (m - 1), and so on up to the first that is not rejected; it
    and all above it are judged at its level. So ``divisor * p < alpha`` exactly where the adjusted p is below alpha.

    >>> holm_divisors([0.001, 0.2, 0.03, 0.012])
    [4, 2, 2, 3]
    """
    divisors, retained = [0] * len(p_values), 0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if not retained and (len(p_values) - rank) * p_values[index] >= alpha:
            retained = len(p_values) - rank
        divisors[index] = retained or len(p_values) - rank
    return divisors


def smallest_p(n: int) -> float:
    """The smallest two-sided p that the exact sign-flip test of `n` pairs can give, 2 / 2^n.

    >>> smallest_p(5), smallest_p(6)
    (0.0625, 0.03125)
    """
    _check_count(n, 1, "n")
    return 2 / 2**n


def minimum_pairs(num_comparisons: int, alpha: float = 0.05) -> int:
    """The smallest number of pairs with which Holm over m = `num_comparisons` tests can reject: 2 / 2^n <= alpha / m.

    >>> [minimum_pairs(m) for m in (1, 2, 3, 4, 6, 8, 10, 12)]
    [6, 7, 7, 8, 8, 9, 9, 9]
    """
    _check_count(num_comparisons, 1, "num_comparisons")
    check_level(alpha)
    n = 1
    while smallest_p(n) > alpha / num_comparisons:
        n += 1
    return n


def power_paired(n: int, effect: float, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t test of `n` pairs at a true d_z of `effect` (noncentral t).

    >>> round(power_paired(10, 1.0), 4)
    0.8031
    """
    _check_count(n, 2, "n")
    return _power(n - 1, abs(effect) * math.sqrt(n), alpha)


def _power(freedom: float, noncentrality: float, alpha: float) -> float:
    check_level(alpha)
    critical = float(stats.t.isf(alpha / 2, freedom))
    upper = float(stats.nct.sf(critical, freedom, noncentrality))
    lower = float(stats.nct.cdf(-critical, freedom, noncentrality))
    return upper + (0.0 if math.isnan(lower) else lower)  # nan where it underflows


def pairs_needed(effect: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """The smallest number of pairs with which the two-sided paired t test finds d_z = `effect` with `power`.

    >>> [pairs_needed(effect) for effect in (0.5, 0.8, 1.0, 1.5, 2.0)]
    [34, 15, 10, 6, 5]
    """
    _check_effect(effect)
    return _smallest(lambda n: power_paired(n, effect, alpha), power)


def samples_needed_two_sample(effect: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """The same for two independent samples of equal size and d = `effect`: how many in *each*.

    >>> [samples_needed_two_sample(effect) for effect in (0.2, 0.5, 0.8)]
    [394, 64, 26]
    """
    _check_effect(effect)
    return _smallest(lambda n: _power(2 * n - 2, abs(effect) * math.sqrt(n / 2), alpha), power)


def detectable_effect(n: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """The smallest d_z (mean difference in standard deviations of the differences) that `n` pairs find with `power`.

    Of the two-sided sign-flip test, which decides here and finds less than a t test where pairs are few. By simulation
    of normal differences, the same numbers at every call: 4,000 studies, so that 0.01 to 0.02 of it is chance.

    Returns:
        d_z; inf where not even a difference of any size is rejected at `alpha`.

    >>> round(detectable_effect(6), 1), detectable_effect(5)  # six of six on one side: Phi(1.79)^6 = 0.8
    (1.8, inf)
    """
    _check_count(n, 2, "n")
    check_level(alpha)
    check_level(power, "power")
    if power <= alpha:
        raise ValueError(f"power must be above alpha = {alpha}, got {power}")
    return math.inf if smallest_p(n) >= alpha else float(numpy.quantile(_needed_shifts(n, alpha), power))


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


def equivalence_pairs_needed(margin_in_sd: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """The smallest number of pairs with which `tost_paired` shows equivalence with `power` when the difference is 0.

    The margin is in standard deviations of the differences. Exact: the power is the mean over the distribution of the
    estimated standard deviation, not the normal approximation.

    >>> [equivalence_pairs_needed(margin) for margin in (0.5, 1.0, 1.5, 2.0)]
    [36, 11, 6, 4]
    """
    _check_effect(margin_in_sd)
    return _smallest(lambda n: power_equivalence(n, margin_in_sd, alpha), power)


def power_equivalence(n: int, margin_in_sd: float, alpha: float = 0.05) -> float:
    """Power of `tost_paired` with `n` pairs at a true difference of 0.

    With s the estimated over the true standard deviation: E[max(0, 2 Phi(margin sqrt(n) - t(1 - alpha; n - 1) s) - 1)].

    >>> round(power_equivalence(11, 1.0), 3)
    0.849
    """
    _check_count(n, 2, "n")
    check_level(alpha)
    freedom = n - 1
    critical, distance = float(stats.t.isf(alpha, freedom)), margin_in_sd * math.sqrt(n)
    scale = math.sqrt(freedom)

    def integrand(s: float) -> float:
        return (2 * float(stats.norm.cdf(distance - critical * s)) - 1) * float(stats.chi.pdf(s * scale, freedom))

    # s has mean about 1 and standard deviation 1 / sqrt(2 freedom): beyond ten of them nothing is left
    end = min(distance / critical, 1 + 10 / math.sqrt(2 * freedom))
    value, _ = integrate.quad(integrand, 0.0, end, limit=200)
    return scale * float(value)


def noether(gamma: float, alpha: float, beta: float) -> int:
    """Pairs needed to show P(treatment better) > 1/2, one-sided at `alpha`, with power 1 - `beta` when it is `gamma`.

    n = ((z(1 - alpha) + z(1 - beta)) / (sqrt(6) (gamma - 1/2)))^2, rounded up.

    >>> noether(gamma=0.75, alpha=0.05, beta=0.05)
    29

    References:
        Noether, Sample size determination for some common nonparametric tests, JASA 1987; Bouthillier et al. 2021.
    """
    if not 0.5 < gamma < 1:
        raise ValueError(f"gamma must lie between 1/2 and 1, got {gamma}")
    check_level(alpha)
    check_level(beta, "beta")
    z = float(stats.norm.isf(alpha)) + float(stats.norm.isf(beta))
    return math.ceil((z / (gamma - 0.5)) ** 2 / 6)


def _smallest(power_of: Callable[[int], float], power: float) -> int:
    """The smallest n >= 2 with ``power_of(n) >= power``, for a power that grows with n."""
    check_level(power, "power")
    high = 2
    while power_of(high) < power:
        high *= 2
        if high > 10**7:
            raise ValueError("more than ten million would be needed; ask for a larger effect")
    low = high // 2  # not enough, or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= power else (middle, high)
    return high


def _check_count(value: int, least: int, name: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")


def _check_effect(value: float) -> None:
    if not 0 < abs(value) < math.inf:
        raise ValueError(f"the effect must be a finite number other than 0, got {value}")
