"""Differences between training modes over few paired seeds: exact tests, equivalence, and how often one is better.

Treatment and reference are paired by seed (the block that fixes initial weights, data order and masks); a difference
is treatment - reference. `analysis.statistics.intervals` says what is accepted, and what becomes of diverged runs.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.statistics.intervals import (
    Interval,
    check_level,
    check_paired,
    finite_values,
    mean_and_sd,
    t_interval,
    without_nan,
)
from analysis.statistics.power import smallest_p

EXACT_PAIRS = 30
"""Up to so many pairs all 2^n sign patterns are counted: the 29 of Bouthillier et al. (2021) are among them."""

RANDOM_PATTERNS = 9_999
"""Patterns drawn where there are too many to count; the observed one is added to them."""

SAME_SUM = 1e-12
"""Two sums closer than this share of the sum of magnitudes are one: equal in mathematics, apart by rounding."""

SAME_DIFFERENCE = 1e-12
"""Differences that spread by no more than this share of the largest value are one: apart by rounding."""

END_ACCURACY = 1e-9
"""Of the end of an interval, as a share of the stretch that it is looked for in."""

CONVINCING_SHARE = 0.75
"""Bouthillier et al. (2021): the share of wins below which an improvement is not called one."""


def _pairs(treatment: ArrayLike, reference: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    ours, theirs = finite_values(treatment, "treatment"), finite_values(reference, "reference")
    check_paired(len(ours), len(theirs))
    return ours, theirs


def _vary(differences: NDArray[numpy.float64], *sides: NDArray[numpy.float64]) -> bool:
    """Whether the differences of `sides` differ from one another by more than rounding; one alone cannot."""
    largest = max(float(numpy.abs(side).max()) for side in sides)
    return float(numpy.ptp(differences)) > SAME_DIFFERENCE * largest


# ---------------------------------------------------------------------------------------------------------------------
# S1: a paired difference


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
    """Mean of treatment - reference with its 1 - alpha t interval (95 %); without ends where they do not vary."""
    interval90: Interval
    """The same mean with the 1 - 2 alpha interval (90 %) that an equivalence test at alpha looks at."""
    effect: float | None
    """d_z, mean over standard deviation of the differences; None where they do not vary."""
    p: float | None
    """Of the exact sign-flip test; None where two or more differences do not vary."""
    t_p: float | None
    """Of the paired t test; None where the differences do not vary."""
    correlation: float | None
    """Of treatment and reference over the seeds: what pairing is worth; None where one of them does not vary."""

    @property
    def nothing_varied(self) -> bool:
        """Whether all of two or more differences are the same: no noise was seen, so nothing can be said about it."""
        return self.p is None


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
    if n > 1 and not (sd > 0 and _vary(differences, ours, theirs)):  # squares of tiny differences are 0
        wide, narrow = (Interval(mean, None, None, level, n) for level in (1 - alpha, 1 - 2 * alpha))
        return PairedResult(n, wide, narrow, None, None, None, _correlation(ours, theirs))
    effect = t_p = None
    if n > 1:
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


def shift_interval(
    treatment: ArrayLike,
    reference: ArrayLike,
    p: float,
    generator: numpy.random.Generator,
    alpha: float = 0.05,
    divisor: int = 1,
) -> Interval:
    """The mean paired difference with the differences that `sign_flip` does not reject at alpha / `divisor`.

    It leaves out 0 exactly where ``divisor * p < alpha``, so the interval and the test never disagree. With
    `analysis.statistics.power.holm_divisors` that is where the adjusted p is below alpha.

    Args:
        treatment, reference: one finite value per seed (S), in the same order of seeds.
        p: of the sign-flip test of their differences.
        generator: for `sign_flip`, used beyond 30 pairs only; its state is left as it is.
    Returns:
        An interval of level 1 - alpha / divisor; without ends where so few pairs can reject nothing.

    >>> ours, theirs = [2.0, 4.0, 6.0, 8.0, 9.0, 4.0], [1.0, 3.0, 5.0, 6.0, 4.0, 1.0]
    >>> found = shift_interval(ours, theirs, 0.03125, numpy.random.default_rng(0))
    >>> round(found.estimate, 3), round(found.low, 3), round(found.high, 3)
    (2.167, 1.0, 5.0)

    References:
        Hartigan, Using subsample values as typical values, JASA 1969: the ends are means of subsets of the differences.
    """
    ours, theirs = _pairs(treatment, reference)
    differences = ours - theirs
    mean, _ = mean_and_sd(differences)
    span = float(numpy.ptp(differences)) + abs(mean)
    far = float(differences.min()) - span, float(differences.max()) + span
    return _not_rejected(lambda shift: differences - shift, mean, 0.0, far, p, generator, alpha, divisor)


def ratio_interval(
    treatment: ArrayLike,
    reference: ArrayLike,
    p: float,
    generator: numpy.random.Generator,
    alpha: float = 0.05,
    divisor: int = 1,
) -> Interval:
    """The ratio of the means, reference / treatment, with the ratios r that the same test does not reject.

    A ratio r is rejected where `sign_flip` rejects that reference - r treatment is symmetric about 0. At r = 1 that is
    the test of the differences, so the interval leaves out 1 exactly where ``divisor * p < alpha``.

    Args and Returns as `shift_interval`; all values of the treatment above 0, none of the reference below 0.

    >>> found = ratio_interval([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [2.0, 4.0, 6.0, 2.0, 4.0, 9.0], 1 / 32,
    ...                        numpy.random.default_rng(0))
    >>> round(found.estimate, 2), round(found.low, 2), round(found.high, 2)
    (2.25, 2.0, 3.0)
    """
    ours, theirs = _pairs(treatment, reference)
    if not (ours > 0).all() or (theirs < 0).any():
        raise ValueError("a ratio needs treatment values above 0 and reference values of 0 or more")
    estimate = math.fsum(theirs) / math.fsum(ours)
    far = -1.0, 2 * float((theirs / ours).max()) + 1  # below 0 and above the largest ratio all signs are the same
    return _not_rejected(lambda ratio: theirs - ratio * ours, estimate, 1.0, far, p, generator, alpha, divisor)


def _not_rejected(
    differences: Callable[[float], NDArray[numpy.float64]],
    estimate: float,
    null: float,
    far: tuple[float, float],
    p: float,
    generator: numpy.random.Generator,
    alpha: float,
    divisor: int,
) -> Interval:
    """`estimate` with the values at which `sign_flip` of the differences is not below alpha / `divisor`.

    Args:
        differences: of the pairs, at a value.
        null: the value at which the test has given `p`.
        far: values below and above all that are not rejected.
    """
    level, n = 1 - alpha / divisor, len(differences(null))
    if divisor * smallest_p(n) >= alpha:
        return Interval(estimate, None, None, level, n)

    def rejects(value: float) -> bool:
        return divisor * (p if value == null else sign_flip(differences(value), copy.deepcopy(generator))) < alpha

    low, high = (_end(rejects, rejected, estimate, null) for rejected in far)
    return Interval(estimate, low, high, level, n)


def _end(rejects: Callable[[float], bool], rejected: float, accepted: float, null: float) -> float:
    """The last value that is not rejected on the way from `accepted` to `rejected`, by bisection.

    `null` is tried first where it lies between them, so that the end is on the same side of it as the test says.
    """
    span = abs(accepted - rejected)
    if min(rejected, accepted) < null < max(rejected, accepted):
        if rejects(null):
            rejected = null
        else:
            accepted = null
    while abs(accepted - rejected) > END_ACCURACY * span:
        middle = (accepted + rejected) / 2
        if middle in (accepted, rejected):
            break
        if rejects(middle):
            rejected = middle
        else:
            accepted = middle
    return accepted


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
    """The larger of the two one-sided p values; None with fewer than two values, and where they do not vary."""
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
    differences = ours - theirs
    mean, sd = mean_and_sd(differences)
    if not _vary(differences, ours, theirs):
        sd = 0.0
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
    if freedom < 1 or not error > 0:  # without noise there is nothing that the distance to the margin is measured in
        return Equivalence(None, Interval(mean, None, None, level, n), margin, False, False, None)
    half = float(stats.t.isf(alpha, freedom)) * error
    interval = Interval(mean, mean - half, mean + half, level, n)
    p_above = float(stats.t.sf((margin - mean) / error, freedom))  # of "the difference is at least the margin"
    p_below = float(stats.t.sf((margin + mean) / error, freedom))
    p_non_inferior = p_above if lower_is_better else p_below
    p = max(p_above, p_below)
    return Equivalence(p, interval, margin, p < alpha, p_non_inferior < alpha, p_non_inferior)


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


def mcnemar(treatment: ArrayLike, reference: ArrayLike) -> float | None:
    """McNemar's exact test of yes (1) and no (0): are pairs with a yes on one side alone as often of either?

    Only the discordant pairs count, each as a fair coin. Up to 30 pairs it is `sign_flip` of the differences. It counts
    pairs and measures no spread, so that pairs of which all differ the same way show something.

    Returns:
        p; None where no pair is discordant.

    >>> mcnemar([0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1])
    0.03125

    References:
        McNemar, Note on the sampling error of the difference between correlated proportions, Psychometrika 1947.
    """
    wins, discordant, _ = _discordant(treatment, reference)
    return float(stats.binomtest(wins, discordant).pvalue) if discordant else None


def mcnemar_interval(treatment: ArrayLike, reference: ArrayLike, alpha: float = 0.05, divisor: int = 1) -> Interval:
    """The difference of the shares of yes, with the exact interval of `mcnemar` at alpha / `divisor`.

    With w the treatment's share of the d discordant of n pairs it is (2 w - 1) d / n; w has the interval of Clopper and
    Pearson, d is taken as given. It leaves out 0 exactly where ``divisor * p < alpha``.

    Returns:
        An interval of level 1 - alpha / divisor; without ends where no pair is discordant.

    >>> found = mcnemar_interval([0] * 8, [1] * 8)
    >>> found.estimate, found.low, round(found.high or 0.0, 3)
    (-1.0, -1.0, -0.261)
    """
    wins, discordant, n = _discordant(treatment, reference)
    level = 1 - alpha / divisor
    if not discordant:
        return Interval(0.0, None, None, level, n)
    share = stats.binomtest(wins, discordant).proportion_ci(level)
    low, high = ((2 * float(end) - 1) * discordant / n for end in (share.low, share.high))
    return Interval((2 * wins - discordant) / n, low, high, level, n)


def _discordant(treatment: ArrayLike, reference: ArrayLike) -> tuple[int, int, int]:
    """Pairs with a yes of the treatment alone, pairs with a yes on one side alone, and all pairs."""
    ours, theirs = _pairs(treatment, reference)
    if not numpy.isin([ours, theirs], (0.0, 1.0)).all():
        raise ValueError("McNemar's test is of yes (1) and no (0)")
    return int((ours > theirs).sum()), int((ours != theirs).sum()), len(ours)


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
