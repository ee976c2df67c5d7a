"""Times to a target of runs that stopped at different times: Kaplan-Meier curves and the log-rank test."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.statistics.intervals import check_paired
from analysis.statistics.paired import RANDOM_PATTERNS, SAME_SUM, sign_flip
from analysis.statistics.time_to_target import checked_times

EXACT_RELABELLINGS = 20_000
"""Up to so many ways to label a pooled sample all are counted: 8 and 8 runs have 12,870."""


@dataclasses.dataclass(frozen=True)
class Survival:
    """The Kaplan-Meier curve: the share of runs that have not yet reached the target, a step down at each event."""

    times: tuple[float, ...]
    """Distinct times of events, ascending."""
    at_risk: tuple[int, ...]
    """Runs that had neither reached the target nor stopped just before each."""
    probability: tuple[float, ...]
    """P(T > time) from that time on; it is 1 before the first."""


def kaplan_meier(times: ArrayLike, observed: Sequence[bool] | NDArray[numpy.bool_]) -> Survival:
    """The Kaplan-Meier estimate of P(T > t), the product over event times t_j <= t of 1 - d_j / n_j.

    A run that stopped at the time of an event was still at risk for it. Without censoring before the last event it is
    one minus the empirical distribution.

    Args:
        times: seconds (S), of reaching the target where `observed`, else of the end of the run; inf only where not.
        observed: whether the target was reached (S).
    Raises:
        ValueError: for unequal lengths, nan, times below 0, or an event at inf.

    >>> kaplan_meier([3, 5, 7, 10], [True, False, True, False])
    Survival(times=(3.0, 7.0), at_risk=(4, 2), probability=(0.75, 0.375))

    References:
        Kaplan and Meier, Nonparametric estimation from incomplete observations, JASA 1958.
    """
    t, event = _censored(times, observed, "times")
    steps = numpy.unique(t[event])
    curve = stats.ecdf(_for_scipy(t, event, steps.max(initial=0.0))).sf.evaluate(steps)
    at_risk = (t >= steps[:, None]).sum(axis=1)
    return Survival(tuple(steps.tolist()), tuple(at_risk.tolist()), tuple(curve.tolist()))


@dataclasses.dataclass(frozen=True)
class LogRank:
    """S3b: the log-rank comparison of two samples of times, some of which stopped early."""

    statistic: float
    """z = (O - E) / sd of events in the first sample; negative: fewer events than expected, so it is later."""
    p: float
    """Two-sided, by permutation; the one to report."""
    chi2_p: float
    """By the chi-squared approximation, which rejects too often in small samples (9.7 % at n = 3, 6.8 % at n = 8)."""


def log_rank(
    treatment_times: ArrayLike,
    treatment_observed: Sequence[bool] | NDArray[numpy.bool_],
    reference_times: ArrayLike,
    reference_observed: Sequence[bool] | NDArray[numpy.bool_],
    generator: numpy.random.Generator,
    paired: bool,
) -> LogRank:
    """S3b: do two modes reach the target at the same rate, when runs ended at different times for other reasons?

    O - E of the first sample is the sum of its scores, observed - H(t) with the cumulative hazard H of the pooled
    sample, which does not depend on the labels. Its distribution over relabellings gives p: within each pair when
    `paired` (a sign-flip test of the score differences), else over the pooled sample, all of them up to 20,000 and
    otherwise 9,999 random ones and the observed one.

    Args:
        treatment_times, reference_times: as in `kaplan_meier`; with `paired` one per seed in the same order.
        generator: used only where the relabellings are too many to count.
        paired: whether the runs are pairs by seed. Not a default: swapping within pairs is right only for pairs.
    Raises:
        ValueError: as in `kaplan_meier`, and for unequal lengths when `paired`.

    >>> log_rank([1, 2, 3], [True] * 3, [4, 5, 6], [True] * 3, numpy.random.default_rng(0), paired=False).p
    0.1

    References:
        Mantel, Cancer Chemotherapy Reports, 1966; Bland and Altman, The logrank test, BMJ 2004. Permuting O - E and not
        z leaves out that the hypergeometric variance changes a little with the labels, as is usual.
    """
    ours, our_events = _censored(treatment_times, treatment_observed, "treatment_times")
    theirs, their_events = _censored(reference_times, reference_observed, "reference_times")
    if paired:
        check_paired(len(ours), len(theirs))
    pooled, events = numpy.concatenate((ours, theirs)), numpy.concatenate((our_events, their_events))
    if not events.any():
        return LogRank(0.0, 1.0, 1.0)
    n, last = len(ours), pooled[events].max()
    approximate = _chi_squared(_for_scipy(ours, our_events, last), _for_scipy(theirs, their_events, last))
    scores = _scores(pooled, events)
    if paired:
        p = sign_flip(scores[:n] - scores[n:], generator)
    else:
        p = _relabelled(scores, n, generator)
    return LogRank(approximate[0], p, approximate[1])


def _chi_squared(first: stats.CensoredData, second: stats.CensoredData) -> tuple[float, float]:
    with numpy.errstate(divide="ignore", invalid="ignore"):
        result = stats.logrank(first, second)
    if not math.isfinite(result.statistic):  # no event at which both samples were at risk
        return 0.0, 1.0
    return float(result.statistic), float(result.pvalue)


def _for_scipy(times: NDArray[numpy.float64], observed: NDArray[numpy.bool_], last: float) -> stats.CensoredData:
    """Its times must be finite: a run watched for ever is at risk at the `last` event, as one that stopped then."""
    return stats.CensoredData(uncensored=times[observed], right=numpy.minimum(times[~observed], last))


def _scores(times: NDArray[numpy.float64], events: NDArray[numpy.bool_]) -> NDArray[numpy.float64]:
    """Observed minus expected events of every run, by the hazard of all of them; they sum to 0."""
    hazard = numpy.zeros(len(times))
    for step in numpy.unique(times[events]):
        hazard[times >= step] += (events & (times == step)).sum() / (times >= step).sum()
    return events - hazard


def _relabelled(scores: NDArray[numpy.float64], n: int, generator: numpy.random.Generator) -> float:
    threshold = abs(math.fsum(scores[:n])) - SAME_SUM * math.fsum(numpy.abs(scores))
    ordered = numpy.sort(scores)  # so that the order of the runs does not matter to the draws either
    if math.comb(len(scores), n) <= EXACT_RELABELLINGS:
        chosen = numpy.array(list(itertools.combinations(range(len(scores)), n)))
        return float((numpy.abs(ordered[chosen].sum(axis=1)) >= threshold).mean())
    shuffled = generator.permuted(numpy.tile(ordered, (RANDOM_PATTERNS, 1)), axis=1)
    hits = int((numpy.abs(shuffled[:, :n].sum(axis=1)) >= threshold).sum())
    return (hits + 1) / (RANDOM_PATTERNS + 1)


def _censored(
    times: ArrayLike, observed: Sequence[bool] | NDArray[numpy.bool_], name: str
) -> tuple[NDArray[numpy.float64], NDArray[numpy.bool_]]:
    t, event = checked_times(times, name), numpy.asarray(observed)
    if event.dtype != numpy.bool_ or event.shape != t.shape:
        raise ValueError(f"{name} needs one True or False per time that says whether the target was reached")
    if (event & numpy.isinf(t)).any():
        raise ValueError(f"{name} holds a target reached at inf; a run that never reaches it is not observed")
    return t, event
