"""Equivalence: is a difference smaller than a margin that was declared before the data?"""

from __future__ import annotations

import dataclasses
import math

from numpy.typing import ArrayLike
from scipy import stats

from analysis.statistics.intervals import (
    Interval,
    check_level,
    finite_values,
    mean_and_sd,
)
from analysis.statistics.paired import paired_values, vary


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """S2: two one-sided t tests (TOST) against a margin."""

    p: float | None
    """The larger of the two one-sided p values; None with fewer than two values, and where they do not vary."""
    interval: Interval
    """The 1 - 2 alpha interval of the mean difference (90 %); it lies inside the margin exactly when p < alpha."""
    margin: float
    equivalent: bool


def tost_paired(treatment: ArrayLike, reference: ArrayLike, margin: float, alpha: float = 0.05) -> Equivalence:
    """S2: is the mean paired difference within ±`margin`?

    Rejects "the difference is at least the margin" when both (d + margin) / se and (margin - d) / se exceed
    t(1 - alpha; n - 1). A large p of a difference test is no evidence of equality; this is. The margin must have been
    fixed before the data.

    Args:
        treatment, reference: one finite value per seed (S), paired.
        margin: above 0, in the unit of the values.
    Raises:
        ValueError: for a margin that is not above 0, unequal lengths, or values that are not finite.

    >>> result = tost_paired([4, 7, 8, 6, 3, 2], [6, 8, 7, 10, 11, 9], margin=0.5)
    >>> round(result.p, 6), result.equivalent
    (0.954854, False)

    References:
        Schuirmann, J. Pharmacokinetics and Biopharmaceutics, 1987; the example is pingouin's.
    """
    ours, theirs = paired_values(treatment, reference)
    differences = ours - theirs
    mean, sd = mean_and_sd(differences)
    if not vary(differences, ours, theirs):
        sd = 0.0
    return _tost(mean, sd / math.sqrt(len(ours)), len(ours) - 1, len(ours), margin, alpha)


def tost_independent(treatment: ArrayLike, reference: ArrayLike, margin: float, alpha: float = 0.05) -> Equivalence:
    """As `tost_paired` for samples that are not paired, with the pooled variance; `interval.n` counts both samples.

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
    return _tost(mean - reference_mean, error, n + m - 2, n + m, margin, alpha)


def _tost(mean: float, error: float, freedom: int, n: int, margin: float, alpha: float) -> Equivalence:
    if not 0 < margin < math.inf:
        raise ValueError(f"the margin must be a number above 0 (declared in analysis.yaml), got {margin}")
    check_level(alpha)
    level = 1 - 2 * alpha
    if freedom < 1 or not error > 0:  # without noise there is nothing that the distance to the margin is measured in
        return Equivalence(None, Interval(mean, None, None, level, n), margin, False)
    half = float(stats.t.isf(alpha, freedom)) * error
    interval = Interval(mean, mean - half, mean + half, level, n)
    p_above = float(stats.t.sf((margin - mean) / error, freedom))  # of "the difference is at least the margin"
    p_below = float(stats.t.sf((margin + mean) / error, freedom))
    p = max(p_above, p_below)
    return Equivalence(p, interval, margin, p < alpha)
