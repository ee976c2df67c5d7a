"""How often one side is better: McNemar's test of yes and no, the probability of improvement."""

from __future__ import annotations

import numpy
from numpy.typing import ArrayLike
from scipy import stats

from analysis.statistics.intervals import (
    Interval,
    check_level,
    without_nan,
)
from analysis.statistics.paired import paired_values


def most_of(count: int, n: int, level: float = 0.95) -> float:
    """The largest share of all seeds that may do what `count` of `n` did: the one-sided bound of Clopper and Pearson.

    The share at which `count` or fewer of n have a chance of 1 - level. What happens in a few seeds of a hundred is not
    seen in eight, whatever a test of their mean says.

    >>> round(most_of(0, 8), 3), abs(most_of(0, 8) - (1 - 0.05 ** (1 / 8))) < 1e-12, most_of(8, 8)
    (0.312, True, 1.0)

    References:
        Clopper and Pearson, The use of confidence or fiducial limits illustrated in the case of the binomial, 1934.
    """
    check_level(level, "level")
    if not 0 <= count <= n or n < 1:
        raise ValueError(f"the count must lie between 0 and the number of seeds, got {count} of {n}")
    return 1.0 if count == n else float(stats.beta.ppf(level, count + 1, n - count))


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
    ours, theirs = paired_values(treatment, reference)
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
