"""Differences between training modes over few paired seeds: exact tests, intervals, equivalence, power, the verdict.

Treatment and reference are paired by seed (the block that fixes initial weights, data order and masks); a difference
is treatment - reference. Nothing here replaces a diverged run: non-finite losses are refused, and whoever calls gives
such a run the worst finite loss first and says how many there were. Estimates are exact sums (`math.fsum`), so the
order of the seeds changes no digit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, optimize, stats

EXACT_PAIRS = 30
"""Up to so many pairs all 2^n sign patterns are counted: Noether's 29 are among them."""

RANDOM_PATTERNS = 9_999
"""Patterns drawn where there are too many to count; the observed one is added to them."""

SAME_SUM = 1e-12
"""Two sums closer than this share of the sum of magnitudes are one: equal in mathematics, apart by rounding."""

MINIMUM_PAIRS = 6
"""With fewer pairs the exact two-sided test cannot reach 0.05: 2 / 2^5 = 0.0625."""

WIDEST_MARGIN = 0.5
"""A margin above this share of all that the reference improved by would call equal what lost half of it."""

CONVINCING_SHARE = 0.75
"""Bouthillier et al. (2021): the share of wins below which an improvement is not called one."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """An analysis that was not made, with the reason in words."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate from `n` values with its two-sided confidence interval; the ends are None where there is none."""

    estimate: float
    low: float | None
    high: float | None
    level: float
    n: int

    def __str__(self) -> str:
        """
        >>> str(Interval(1.4212, 1.209, 1.66, 0.95, 8)), str(Interval(12345.6, None, None, 0.95, 1))
        ('1.42 [1.21, 1.66]', '12346')
        """
        if self.low is None or self.high is None:
            return short(self.estimate)
        return f"{short(self.estimate)} [{short(self.low)}, {short(self.high)}]"


def short(value: float) -> str:
    """Three significant digits and no exponent where that can be read; all digits before the point are kept.

    >>> short(0.0290), short(-1234.5), short(0.0), short(3.2e-9), short(float("inf"))
    ('0.0290', '-1234', '0', '3.2e-09', 'inf')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -5 < exponent < 9:
        return f"{value:.3g}"
    return f"{value:.{max(0, 2 - exponent)}f}"


# ---------------------------------------------------------------------------------------------------------------------
# What is accepted


def finite_values(values: ArrayLike, name: str = "values") -> NDArray[numpy.float64]:
    """Return `values` as a vector of float64 (a view where they are one), or say which of them cannot be used.

    Raises:
        ValueError: if there are none, if they are no vector, or if one is not finite.
    """
    vector = numpy.asarray(values, dtype=numpy.float64)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"{name} must be a list of numbers, one per seed; got an array of shape {vector.shape}")
    bad = numpy.flatnonzero(~numpy.isfinite(vector))
    if bad.size:
        raise ValueError(
            f"{name}[{bad[0]}] is {vector[bad[0]]}; replace the value of a diverged run (worst finite loss) or leave "
            "its pair out before the test, and say so"
        )
    return vector


def finite_table(table: ArrayLike, name: str, rows: str, columns: str) -> NDArray[numpy.float64]:
    """Return `table` as a float64 matrix of finite numbers; `rows` and `columns` say in the message what they are."""
    matrix = numpy.asarray(table, dtype=numpy.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"{name} must be a table of {rows} x {columns}; got an array of shape {matrix.shape}")
    bad = numpy.argwhere(~numpy.isfinite(matrix))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise ValueError(f"{name}[{row}, {column}] is {matrix[row, column]}; only finite numbers can be used")
    return matrix


def _pairs(treatment: ArrayLike, reference: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    ours, theirs = finite_values(treatment, "treatment"), finite_values(reference, "reference")
    check_paired(len(ours), len(theirs))
    return ours, theirs


def check_paired(num_treatment: int, num_reference: int) -> None:
    if num_treatment != num_reference:
        raise ValueError(
            f"{num_treatment} treatment and {num_reference} reference values are no pairs; give the seeds both have"
        )


def check_level(alpha: float, name: str = "alpha") -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {alpha}")


# ---------------------------------------------------------------------------------------------------------------------
# S1: a paired difference


def mean_and_sd(values: NDArray[numpy.float64]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; nan for one value), the same bits in any order of `values`."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((values - mean) ** 2) / (len(values) - 1))


def t_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """The mean of `values` with Student's interval, mean ± t(level; n - 1) sd / sqrt(n).

    Not a percentile bootstrap, whose nominal 95 % interval misses the mean in 16 % of samples of five.

    Args:
        values: one finite number per seed (S).
        level: coverage, 0.95 for 95 %.
    Returns:
        The interval; without ends if there is one value only.
    Raises:
        ValueError: if there are no values, or one is not finite.

    >>> str(t_interval([1.0, 2.0, 3.0]))
    '2.00 [-0.484, 4.48]'
    """
    sample = finite_values(values)
    check_level(level, "level")
    n = len(sample)
    mean, sd = mean_and_sd(sample)
    if n < 2:
        return Interval(mean, None, None, level, n)
    error = float(stats.t.ppf((1 + level) / 2, n - 1)) * sd / math.sqrt(n)
    return Interval(mean, mean - error, mean + error, level, n)


def sign_flip(differences: ArrayLike, generator: numpy.random.Generator) -> float:
    """The exact two-sided p of paired `differences`: how often random signs give a sum at least as far from 0.

    p = #{s in {-1, 1}^n : |sum s_i d_i| >= |sum d_i|} / 2^n. Under the hypothesis that treatment and reference are
    exchangeable within a pair it rejects at most alpha of the time, for any distribution and any n. Zero differences
    take part (both their signs give the same sum). Sums equal in mathematics count as equal.

    Args:
        differences: treatment - reference, one finite number per pair.
        generator: draws 9,999 patterns (and p = (1 + hits) / 10,000) beyond `EXACT_PAIRS`; not touched up to there.
    Raises:
        ValueError: if there are no differences, or one is not finite.

    >>> sign_flip([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], numpy.random.default_rng(0))  # 2 / 2^6
    0.03125

    References:
        R. A. Fisher, The Design of Experiments, 1935, section 21. The count is exact beyond the 14 pairs of the design:
        the patterns of two halves are combined by sorting (Horowitz and Sahni, JACM 1974), 2^(n/2) steps and not 2^n.
    """
    sample = finite_values(differences, "differences")
    largest = float(numpy.abs(sample).max())
    if largest == 0.0:
        return 1.0
    magnitudes = numpy.sort(numpy.abs(sample)) / largest
    threshold = abs(math.fsum(sample / largest)) - SAME_SUM * math.fsum(magnitudes)
    if threshold <= 0.0:  # an observed sum of 0: every pattern is at least as far away
        return 1.0
    n = len(magnitudes)
    if n <= EXACT_PAIRS:
        first, second = _signed_sums(magnitudes[: n // 2]), numpy.sort(_signed_sums(magnitudes[n // 2 :]))
        above = len(first) * len(second) - int(numpy.searchsorted(second, threshold - first, side="left").sum())
        return 2 * above / 2**n  # as many below -threshold
    signs = generator.integers(0, 2, size=(RANDOM_PATTERNS, n), dtype=numpy.int8) * 2.0 - 1.0
    hits = int((numpy.abs(signs @ magnitudes) >= threshold).sum())
    return (hits + 1) / (RANDOM_PATTERNS + 1)


def _signed_sums(magnitudes: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """The sums of all 2^n sign patterns."""
    sums = numpy.zeros(1)
    for magnitude in magnitudes:
        sums = numpy.concatenate((sums - magnitude, sums + magnitude))
    return sums


@dataclasses.dataclass(frozen=True)
class PairedResult:
    """S1: a paired difference, its interval, its exact test, and the paired t test beside it."""

    n: int
    """Pairs."""
    difference: Interval
    """Mean of treatment - reference with its 1 - alpha t interval (95 %)."""
    interval90: Interval
    """The same mean with the 1 - 2 alpha interval (90 %) that an equivalence test at alpha looks at."""
    effect: float | None
    """d_z, mean over standard deviation of the differences; None where they do not vary."""
    p: float
    """Of the exact sign-flip test."""
    t_p: float | None
    """Of the paired t test; None where the differences do not vary."""
    correlation: float | None
    """Of treatment and reference over the seeds: what pairing is worth; None where one of them does not vary."""


def paired_difference(
    treatment: ArrayLike, reference: ArrayLike, generator: numpy.random.Generator, alpha: float = 0.05
) -> PairedResult:
    """S1: is the mean of treatment - reference different from 0?

    Args:
        treatment, reference: one finite value per seed (S), in the same order of seeds.
        generator: for `sign_flip`, used beyond 30 pairs only.
        alpha: level of the tests that the two intervals belong to.
    Raises:
        ValueError: if the lengths differ, are 0, or a value is not finite.

    >>> result = paired_difference([2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0, 6.0], numpy.random.default_rng(0))
    >>> str(result.difference), result.p, round(result.effect, 2)
    ('1.25 [0.454, 2.05]', 0.125, 2.5)
    """
    ours, theirs = _pairs(treatment, reference)
    check_level(alpha)
    differences = ours - theirs
    n = len(differences)
    mean, sd = mean_and_sd(differences)
    effect = t_p = None
    if n > 1 and sd > 0:
        effect = mean / sd
        t_p = float(2 * stats.t.sf(abs(effect) * math.sqrt(n), n - 1))
    return PairedResult(
        n,
        t_interval(differences, 1 - alpha),
        t_interval(differences, 1 - 2 * alpha),
        effect,
        sign_flip(differences, generator),
        t_p,
        _correlation(ours, theirs),
    )


def _correlation(x: NDArray[numpy.float64], y: NDArray[numpy.float64]) -> float | None:
    if len(x) < 2:
        return None
    (x_mean, x_sd), (y_mean, y_sd) = mean_and_sd(x), mean_and_sd(y)
    if x_sd == 0 or y_sd == 0:
        return None
    covariance = math.fsum((x - x_mean) * (y - y_mean)) / (len(x) - 1)
    return max(-1.0, min(1.0, covariance / (x_sd * y_sd)))


# ---------------------------------------------------------------------------------------------------------------------
# S2: equivalence


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """S2: two one-sided t tests (TOST) against a margin, and the one side that is non-inferiority."""

    p: float | None
    """The larger of the two one-sided p values; None with fewer than two values."""
    interval90: Interval
    """The 1 - 2 alpha interval of the mean difference (90 %); it lies inside the margin exactly when p < alpha."""
    margin: float
    equivalent: bool
    non_inferior: bool
    """Whether the treatment was shown to be worse by less than the margin."""
    p_non_inferior: float | None


def tost_paired(
    treatment: ArrayLike, reference: ArrayLike, margin: float, alpha: float = 0.05, *, lower_is_better: bool = True
) -> Equivalence:
    """S2: is the mean paired difference within ±`margin`?

    Rejects "the difference is at least the margin" when both (d + margin) / se and (margin - d) / se exceed
    t(1 - alpha; n - 1). A large p of a difference test is no evidence of equality; this is. The margin must have been
    fixed before the data.

    Args:
        treatment, reference: one finite value per seed (S), paired.
        margin: above 0, in the unit of the values.
        lower_is_better: says which side is non-inferiority.
    Raises:
        ValueError: for a margin that is not above 0, unequal lengths, or values that are not finite.

    >>> result = tost_paired([4, 7, 8, 6, 3, 2], [6, 8, 7, 10, 11, 9], margin=0.5)
    >>> round(result.p, 6), result.equivalent
    (0.954854, False)

    References:
        Schuirmann, J. Pharmacokinetics and Biopharmaceutics, 1987; the example is pingouin's.
    """
    ours, theirs = _pairs(treatment, reference)
    mean, sd = mean_and_sd(ours - theirs)
    return _tost(mean, sd / math.sqrt(len(ours)), len(ours) - 1, len(ours), margin, alpha, lower_is_better)


def tost_independent(
    treatment: ArrayLike, reference: ArrayLike, margin: float, alpha: float = 0.05, *, lower_is_better: bool = True
) -> Equivalence:
    """As `tost_paired` for samples that are not paired, with the pooled variance; `interval90.n` counts both samples.

    >>> round(tost_independent([4, 7, 8, 6, 3, 2], [6, 8, 7, 10, 11, 9], margin=1).p, 6)
    0.965097
    """
    ours, theirs = finite_values(treatment, "treatment"), finite_values(reference, "reference")
    (mean, sd), (reference_mean, reference_sd) = mean_and_sd(ours), mean_and_sd(theirs)
    n, m = len(ours), len(theirs)
    if min(n, m) < 2:
        error = math.nan
    else:
        pooled = ((n - 1) * sd**2 + (m - 1) * reference_sd**2) / (n + m - 2)
        error = math.sqrt(pooled * (1 / n + 1 / m))
    return _tost(mean - reference_mean, error, n + m - 2, n + m, margin, alpha, lower_is_better)


def _tost(
    mean: float, error: float, freedom: int, n: int, margin: float, alpha: float, lower_is_better: bool
) -> Equivalence:
    if not 0 < margin < math.inf:
        raise ValueError(f"the margin must be a number above 0 (declared in analysis.yaml), got {margin}")
    check_level(alpha)
    level = 1 - 2 * alpha
    if math.isnan(error):
        return Equivalence(None, Interval(mean, None, None, level, n), margin, False, False, None)
    half = float(stats.t.isf(alpha, freedom)) * error
    interval = Interval(mean, mean - half, mean + half, level, n)
    p_above = _one_sided(margin - mean, error, freedom)  # of "the difference is at least the margin"
    p_below = _one_sided(margin + mean, error, freedom)
    p_non_inferior = p_above if lower_is_better else p_below
    p = max(p_above, p_below)
    return Equivalence(p, interval, margin, p < alpha, p_non_inferior < alpha, p_non_inferior)


def _one_sided(distance: float, error: float, freedom: int) -> float:
    """P(t >= distance / error); without any spread it is certain on which side the mean lies."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, freedom))


# ---------------------------------------------------------------------------------------------------------------------
# S5: how often


@dataclasses.dataclass(frozen=True)
class Share:
    """S5: in how many pairs the treatment is better, and the share with its exact (Clopper-Pearson) interval."""

    wins: int
    ties: int
    n: int
    estimate: float
    """(wins + ties / 2) / n."""
    low: float
    high: float
    convincing: bool
    """`low` above 1/2 and `estimate` above 3/4."""


def win_share(
    treatment: ArrayLike, reference: ArrayLike, *, lower_is_better: bool = True, level: float = 0.95
) -> Share:
    """S5: the share of seeds in which the treatment is better, ties one half.

    Where ties make the count of wins end in one half, the lower end is computed from the count rounded down and the
    upper from the count rounded up.

    Args:
        treatment, reference: one value per seed (S), paired. Times to a target that some runs ended without reaching
            have to be cut to their common budget first: whether such a run would have been the later one is not known.
            Infinite ones, of runs that can never get there, may be compared.
    Raises:
        ValueError: for unequal lengths, no values, or nan.

    >>> win_share([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7])
    Share(wins=6, ties=0, n=6, estimate=1.0, low=0.5407418735600996, high=1.0, convincing=True)

    References:
        Bouthillier et al., Accounting for Variance in Machine Learning Benchmarks, MLSys 2021, section 4 (the rule).
    """
    ours, theirs = without_nan(treatment, "treatment"), without_nan(reference, "reference")
    check_paired(len(ours), len(theirs))
    check_level(level, "level")
    n, ties = len(ours), int((ours == theirs).sum())
    wins = int(((ours < theirs) if lower_is_better else (ours > theirs)).sum())
    halves = 2 * wins + ties
    down, up, tail = halves // 2, (halves + 1) // 2, (1 - level) / 2
    low = float(stats.beta.ppf(tail, down, n - down + 1)) if down > 0 else 0.0
    high = float(stats.beta.isf(tail, up + 1, n - up)) if up < n else 1.0
    estimate = halves / (2 * n)
    return Share(wins, ties, n, estimate, low, high, low > 0.5 and estimate > CONVINCING_SHARE)


def without_nan(values: ArrayLike, name: str) -> NDArray[numpy.float64]:
    """Return `values` as a vector of float64 that may hold infinities; nan, which compares with nothing, is refused."""
    vector = numpy.asarray(values, dtype=numpy.float64)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"{name} must be a list of numbers; got an array of shape {vector.shape}")
    bad = numpy.flatnonzero(numpy.isnan(vector))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is nan; give inf for a run that never got there, or leave its pair out")
    return vector


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """P(X > Y) for unpaired samples, U / (n m): the share of all pairs (x_i, y_j) with x_i > y_j, ties one half.

    Which of the two is better is the caller's: for losses, P(treatment better) is ``f(reference, treatment)``.

    >>> probability_of_improvement([1, 2, 3, 4], [2, 3, 5, 6])
    0.25

    References:
        Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS 2021.
    """
    one, other = without_nan(x, "x"), without_nan(y, "y")
    halves = 2 * int((one[:, None] > other).sum()) + int((one[:, None] == other).sum())
    return halves / (2 * len(one) * len(other))


# ---------------------------------------------------------------------------------------------------------------------
# Multiplicity, power, sizes


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

    >>> [round(detectable_effect(n), 2) for n in (3, 4, 5, 6, 8, 10, 12, 16, 20)]
    [3.26, 2.13, 1.68, 1.43, 1.16, 1.0, 0.89, 0.75, 0.66]
    """
    _check_count(n, 2, "n")
    check_level(power, "power")
    if power <= alpha:
        raise ValueError(f"power must be above alpha = {alpha}, got {power}")
    high = 1.0
    while power_paired(n, high, alpha) < power:
        high *= 2
    return float(optimize.brentq(lambda effect: power_paired(n, effect, alpha) - power, 0.0, high))


def margin_too_wide(margin: float, improvement: float | None) -> str:
    """Why ±`margin` says nothing beside what the reference `improvement` was in all; empty where it may be used.

    Args:
        margin: above 0, in the unit of the values.
        improvement: how much better the reference became (0 or below: not at all); None where that is not known.

    >>> margin_too_wide(0.05, 0.02), margin_too_wide(0.05, 1.0)
    ("the margin of ±0.0500 is 250 % of the reference's improvement, too wide to mean anything", '')
    """
    if improvement is None or margin <= WIDEST_MARGIN * improvement:
        return ""
    if improvement <= 0:
        return f"the reference did not improve, so no margin means anything, ±{short(margin)} neither"
    share = 100 * margin / improvement
    return f"the margin of ±{short(margin)} is {share:.0f} % of the reference's improvement, too wide to mean anything"


def nothing_to_find(n: int, num_comparisons: int, least_p_holm: float, alpha: float = 0.05) -> str:
    """Why `n` pairs cannot show a difference of any size within their family; empty where they can.

    Args:
        least_p_holm: by `least_p_holm`.

    >>> nothing_to_find(6, 2, 0.0625)
    'no difference of any size can be found with 6 pairs and 2 comparisons (no p_Holm is below 0.0625)'
    >>> nothing_to_find(7, 2, 0.03125)
    ''
    """
    if least_p_holm < alpha:
        return ""
    family = f" and {num_comparisons} comparisons" if num_comparisons > 1 else ""
    return f"no difference of any size can be found with {n} pairs{family} (no p_Holm is below {short(least_p_holm)})"


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


# ---------------------------------------------------------------------------------------------------------------------
# The verdict

Word = Literal["too few seeds", "equivalent", "different but negligible", "better", "worse", "undecided"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One word on a comparison, and the reason in a clause."""

    word: Word
    reason: str


def verdict(
    n: int,
    difference_estimate: float,
    p_holm: float,
    interval90: Interval,
    margin: float | None,
    lower_is_better: bool = True,
    alpha: float = 0.05,
    minimum: int = MINIMUM_PAIRS,
    num_comparisons: int = 1,
    least: float = 0.0,
) -> Verdict:
    """Say in one word what `n` pairs have shown about treatment - reference.

    Fewer than `minimum` pairs: *too few seeds*. The 1 - 2 alpha interval inside ±margin: *equivalent*, or *different
    but negligible* if also p_Holm < alpha. Otherwise p_Holm < alpha: *better* or *worse*. Else *undecided*, which is
    no statement of equality; its reason names the difference that so many pairs could have found.

    Args:
        p_holm: exact p, adjusted for the family.
        interval90: of `PairedResult` or `Equivalence`, made with the same alpha; not looked at without a margin.
        margin: declared beforehand; None where there is none, and then nothing is called equivalent.
        num_comparisons: size of the family, for the difference that could have been found: Holm's method has to reject
            the first of m at alpha / m.
        least: of `least_p_holm`; 0 where nothing is known about the family.
    Raises:
        ValueError: for nan, a margin that is not above 0, or an interval of another level.

    >>> verdict(8, -0.02, 0.0078, Interval(-0.02, -0.03, -0.01, 0.9, 8), margin=0.005).word
    'better'
    """
    if n < minimum:
        possible = f"; the smallest p of {n} pairs is {short(smallest_p(n))}" if n > 0 else ""
        return Verdict("too few seeds", f"{n} of the {minimum} pairs that a verdict needs{possible}")
    check_level(alpha)
    if not 0 <= p_holm <= 1:
        raise ValueError(f"p_holm lies between 0 and 1, got {p_holm}")
    if not math.isfinite(difference_estimate):
        raise ValueError(f"the difference must be a finite number, got {difference_estimate}")
    differs = p_holm < alpha
    p_text = f"p_Holm = {short(p_holm)}"
    if margin is not None and _is_inside(interval90, margin, alpha):
        ends = f"[{short(interval90.low or 0.0)}, {short(interval90.high or 0.0)}]"
        inside = f"the {100 * (1 - 2 * alpha):g} % interval {ends} lies inside ±{short(margin)}"
        if differs:
            return Verdict("different but negligible", f"{p_text}, but {inside}")
        return Verdict("equivalent", f"{inside}; {p_text}")
    if differs:
        better = (difference_estimate < 0) == lower_is_better
        rule = "lower" if lower_is_better else "higher"
        return Verdict("better" if better else "worse", f"{p_text} < {alpha:g}, {rule} is better")
    found = nothing_to_find(n, num_comparisons, least, alpha)
    if not found:
        effect = detectable_effect(n, alpha=alpha / num_comparisons)
        found = (
            f"with {n} pairs a paired t test at {_level_text(alpha, num_comparisons)} finds differences below "
            f"{effect:.2f} SD of the differences in less than 80 % of cases"
        )
    return Verdict("undecided", f"{p_text}; {found}")


def _level_text(alpha: float, num_comparisons: int) -> str:
    return f"{alpha:g}" if num_comparisons == 1 else f"{alpha:g} / {num_comparisons}"


def _is_inside(interval: Interval, margin: float, alpha: float) -> bool:
    if not 0 < margin < math.inf:
        raise ValueError(f"the margin must be a number above 0, got {margin}")
    if not math.isclose(interval.level, 1 - 2 * alpha):
        raise ValueError(
            f"equivalence at alpha = {alpha:g} looks at the {1 - 2 * alpha:g} interval, got one of level "
            f"{interval.level:g}; give alpha to paired_difference or tost_paired too"
        )
    return interval.low is not None and interval.high is not None and -margin < interval.low and interval.high < margin
