"""Differences between training modes over few paired seeds: the exact test, and the intervals that belong to it.

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


def paired_values(treatment: ArrayLike, reference: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    ours, theirs = finite_values(treatment, "treatment"), finite_values(reference, "reference")
    check_paired(len(ours), len(theirs))
    return ours, theirs


def vary(differences: NDArray[numpy.float64], *sides: NDArray[numpy.float64]) -> bool:
    """Whether the differences of `sides` differ from one another by more than rounding; one alone cannot."""
    largest = max(float(numpy.abs(side).max()) for side in sides)
    return float(numpy.ptp(differences)) > SAME_DIFFERENCE * largest


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


def signed_ranks(treatment: ArrayLike, reference: ArrayLike) -> NDArray[numpy.float64]:
    """The ranks of the sizes of treatment - reference, with the signs of the differences.

    `sign_flip` of them is Wilcoxon's exact signed-rank test. It needs only the order of the differences, so a value may
    be infinite: that of a run which diverged. Its difference from a finite value is larger than any other, and two that
    are infinite alike are a tie. A tie has rank 0 and is not counted; differences of one size share their mean rank.

    Args:
        treatment, reference: one value per seed (S), in the same order of seeds; nan is not allowed.
    Returns:
        The signed ranks (S), a new array.

    >>> signed_ranks([math.inf, 3.0, 2.0, 1.0], [1.0, 1.0, 2.0, 2.0]).tolist()
    [3.0, 2.0, 0.0, -1.0]

    References:
        F. Wilcoxon, Individual comparisons by ranking methods, Biometrics Bulletin 1945.
    """
    ours, theirs = without_nan(treatment, "treatment"), without_nan(reference, "reference")
    check_paired(len(ours), len(theirs))
    apart = ours != theirs
    differences = ours[apart] - theirs[apart]
    ranks = numpy.zeros(len(ours))
    ranks[apart] = numpy.sign(differences) * stats.rankdata(numpy.abs(differences))
    return ranks


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
    ours, theirs = paired_values(treatment, reference)
    check_level(alpha)
    differences = ours - theirs
    n = len(differences)
    mean, sd = mean_and_sd(differences)
    if n > 1 and not (sd > 0 and vary(differences, ours, theirs)):  # squares of tiny differences are 0
        wide, narrow = (Interval(mean, None, None, level, n) for level in (1 - alpha, 1 - 2 * alpha))
        return PairedResult(n, wide, narrow, None, None, None)
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

    It leaves out 0 exactly where ``divisor * p < alpha``. With the size of a family as `divisor` all its intervals hold
    together in 1 - alpha of studies (Bonferroni).

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
    ours, theirs = paired_values(treatment, reference)
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
    ours, theirs = paired_values(treatment, reference)
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
