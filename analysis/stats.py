"""The tests of paired seeds, and their intervals. All that a verdict rests on is here; the rest is `scipy.stats`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Array: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | Array

EXACT_PAIRS = 16
"""Up to this number of pairs `sign_flip` uses all subsets of the pairs."""
SUBSETS = 50_000
"""With more pairs it uses this number of random subsets, which are always the same."""
POWER = 0.8
"""Share of studies in which a detectable difference is found."""
STUDIES = 4_000
"""The number of studies that are simulated at most."""
MINIMUM_PAIRS = 6
"""Below it the two-sided sign-flip test cannot reach 0.05."""
ROUNDING = 1e-12


class Interval(NamedTuple):
    """An estimate from `n` values with its two-sided interval; nan where there is none."""

    estimate: float
    low: float
    high: float
    level: float
    n: int

    def mapped(self, function: Callable[[float], float]) -> Interval:
        """Estimate and ends through a function that rises: with `math.exp`, a ratio from a mean of logs."""
        return self._replace(estimate=function(self.estimate), low=function(self.low), high=function(self.high))

    def __format__(self, form: str) -> str:
        """
        >>> f"{Interval(1.4212, 1.209, 1.66, 0.95, 8):.1f}", f"{Interval(2.0, math.nan, math.nan, 0.95, 1):.1f}"
        ('1.4 [1.2, 1.7]', '2.0')
        """
        if math.isnan(self.low):
            return format(self.estimate, form)
        return f"{self.estimate:{form}} [{self.low:{form}}, {self.high:{form}}]"


def t_interval(values: Numbers, level: float = 0.95) -> Interval:
    """The mean with Student's interval, over the finite ones of `values`."""
    x = np.asarray(values, float)
    x = x[np.isfinite(x)]
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or np.ptp(x) == 0:
        return Interval(mean, math.nan, math.nan, level, len(x))
    low, high = stats.ttest_1samp(x, 0).confidence_interval(level)
    return Interval(mean, float(low), float(high), level, len(x))


@functools.cache
def _subsets(n: int) -> NDArray[np.int8]:
    """Non-empty subsets of n pairs as rows of 0 and 1: all, or a fixed random sample with each one's complement."""
    if n <= EXACT_PAIRS:
        numbers = np.arange(1, 2**n)[:, None]
        digits = (numbers >> np.arange(n)) & 1
        return digits.astype(np.int8)
    drawn = np.random.default_rng(n).integers(0, 2, size=(SUBSETS // 2, n), dtype=np.int8)
    both = np.concatenate((drawn, 1 - drawn))
    not_empty = both[both.any(axis=1)]
    whole = np.ones((1, n), np.int8)
    return np.concatenate((not_empty, whole))


def _canonical_order(ours: Array, theirs: Array) -> NDArray[np.intp]:
    """An order of pairs that depends neither on the one in which they come nor on which arm is the treatment.

    Random subsets are drawn by position, so that their p value would depend on both.
    """
    differences = ours - theirs
    if np.sort(-differences).tolist() < np.sort(differences).tolist():
        differences = -differences
    return np.lexsort((ours + theirs, differences))


def sign_flip(
    treatment: Numbers, reference: Numbers, level: float = 0.95, *, ratio: bool = False
) -> tuple[float, Interval]:
    """The exact sign-flip test of paired values and the interval of what it does not reject.

    To flip the signs of a subset S of the differences changes their sum by -2 sum(S). For an observed sum above 0 the
    new sum is at least as far from 0 if sum(S) <= 0, or if that holds for the complement of S. So the p value and the
    interval (Hartigan 1969) are read from one list: the means of all subsets. With `ratio` it is the list of
    sum(reference) / sum(treatment).
    """
    ours = np.asarray(treatment, float)
    theirs = np.asarray(reference, float)
    order = _canonical_order(ours, theirs)
    ours = ours[order]
    theirs = theirs[order]
    n = len(ours)
    chosen = _subsets(n)
    if ratio:
        values = (chosen @ theirs) / (chosen @ ours)
        estimate = theirs.sum() / ours.sum()
        null = 1.0
        tolerance = ROUNDING
    else:
        differences = ours - theirs
        values = (chosen @ differences) / chosen.sum(axis=1)
        estimate = differences.mean()
        null = 0.0
        tolerance = ROUNDING * float(np.abs(differences).max())
    values = np.sort(values)
    patterns = len(values) + 1
    at_most = (values <= null + tolerance).sum()
    at_least = (values >= null - tolerance).sum()
    # 1 is for the empty subset, where no sign is flipped
    p = min(1.0, 2 * (1 + min(at_most, at_least)) / patterns)
    low = math.nan
    high = math.nan
    rank = math.ceil((1 - level) * patterns / 2) - 1  # the largest k with 2 k / patterns below 1 - level
    if rank > 0:
        low = float(values[rank - 1])
        high = float(values[-rank])
    return float(p), Interval(float(estimate), low, high, level, n)


def signed_ranks(treatment: Numbers, reference: Numbers) -> Array:
    """Signed ranks of paired values, of which some may be infinite: `sign_flip` of them is Wilcoxon's exact test."""
    ours = np.asarray(treatment, float)
    theirs = np.asarray(reference, float)
    unequal = ours != theirs
    differences = ours[unequal] - theirs[unequal]
    ranks = np.zeros(len(ours))
    ranks[unequal] = np.sign(differences) * stats.rankdata(np.abs(differences))
    return ranks


def mcnemar(treatment: Numbers, reference: Numbers, level: float = 0.95) -> tuple[float, Interval]:
    """McNemar's exact test of yes (1) and no (0), and the interval of the difference of their shares."""
    ours = np.asarray(treatment, float)
    theirs = np.asarray(reference, float)
    n = len(ours)
    num_unequal = int((ours != theirs).sum())
    if not num_unequal:
        return math.nan, Interval(0.0, math.nan, math.nan, level, n)
    test = stats.binomtest(int((ours > theirs).sum()), num_unequal)
    low, high = ((2 * end - 1) * num_unequal / n for end in test.proportion_ci(level))
    difference = float((ours - theirs).mean())
    return float(test.pvalue), Interval(difference, float(low), float(high), level, n)


def equivalence(treatment: Numbers, reference: Numbers, margin: float, level: float) -> tuple[float, Interval]:
    """Two one-sided paired t tests (Schuirmann 1987): the larger p, and the interval of `level` of the difference."""
    differences = np.asarray(treatment, float) - np.asarray(reference, float)
    interval = t_interval(differences, level)
    if len(differences) < 2 or np.ptp(differences) == 0:
        return math.nan, interval
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below)), interval


def holm(p_values: Numbers) -> Array:
    """Holm's adjusted p values of one family; nan counts as 1, as leaving it out makes the others easier."""
    p = np.nan_to_num(np.asarray(p_values, float), nan=1.0)
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    rising = np.maximum.accumulate(factors * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, rising)
    return adjusted


def smallest_p(n: int) -> float:
    """The smallest p value that `sign_flip` can give for n pairs."""
    return 2 / 2**n if n else 1.0


def minimum_pairs(comparisons: int = 1, alpha: float = 0.05) -> int:
    """The fewest pairs with which a family of so many comparisons can show anything at `alpha`."""
    exact = math.log2(2 * comparisons / alpha)
    return max(MINIMUM_PAIRS, math.ceil(exact + ROUNDING))


def most_of(count: int, n: int, level: float = 0.95) -> float:
    """The largest share of all seeds that may do what `count` of `n` did (Clopper and Pearson 1934, one-sided)."""
    test = stats.binomtest(count, n, alternative="less")
    return float(test.proportion_ci(level).high)


@functools.cache
def detectable_effect(n: int, alpha: float = 0.05) -> float:
    """The difference that `sign_flip` finds in 80 % of normal studies, in SD of the differences; inf where none.

    The difference that a t test finds is computed exactly. Above `EXACT_PAIRS` pairs the sign-flip test is taken to
    find the same one. With fewer pairs it needs a larger one, by an amount that is estimated from simulated studies:
    each is judged by both tests.
    """
    if n < minimum_pairs(1, alpha):
        return math.inf
    critical = stats.t.ppf(1 - alpha / 2, n - 1)

    def power_beyond(effect: float) -> float:
        return float(stats.nct.sf(critical, n - 1, effect * math.sqrt(n)) - POWER)

    by_t = optimize.brentq(power_beyond, 0, 50)
    if n > EXACT_PAIRS:
        return float(by_t)
    subsets = _subsets(n)
    means_of = subsets / subsets.sum(axis=1, keepdims=True)
    rank = math.ceil(alpha * (len(subsets) + 1) / 2) - 1
    num_studies = min(STUDIES, 2**26 >> n)
    draws = np.random.default_rng(n).normal(size=(num_studies, n))
    needed = []
    for draw in draws:
        means = np.partition(means_of @ draw, rank - 1)
        needed.append(-means[rank - 1])
    standard_errors = draws.std(axis=1, ddof=1) / math.sqrt(n)
    needed_by_t = critical * standard_errors - draws.mean(axis=1)
    return float(by_t + np.quantile(needed, POWER) - np.quantile(needed_by_t, POWER))
