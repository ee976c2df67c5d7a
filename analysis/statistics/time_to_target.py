"""When a loss reaches a target, and which of two modes reaches it sooner when some runs never do.

A time of ``inf`` is a run that did not reach the target (or diverged). It is never dropped: up to a common budget such
a run counts as having taken the whole budget. Positions are training seconds or samples, as the caller wishes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.statistics.intervals import Interval, check_paired, t_interval, without_nan
from analysis.statistics.paired import RANDOM_PATTERNS, SAME_SUM, paired_difference, sign_flip

EXACT_RELABELLINGS = 20_000
"""Up to so many ways to label a pooled sample all are counted: 8 and 8 runs have 12,870."""


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where a curve first is at or below a target."""

    at: float
    """Position; inf where it never is."""
    spacing: float | None
    """Gap between the two evaluations around it, the resolution of `at`; 0 at the first evaluation, None for never."""


def crossing(positions: ArrayLike, losses: ArrayLike, target: float) -> Crossing:
    """The first evaluation at or below `target`, interpolated linearly from the evaluation before it.

    Args:
        positions: of the evaluations (E), in order, finite.
        losses: at them (E). A loss that is not finite never crosses; an evaluation after one crosses where it stands.
        target: finite.
    Raises:
        ValueError: for unequal lengths, positions that go back or are not finite, or a target that is not finite.

    >>> crossing([0, 10, 20], [6.0, 5.0, 4.0], 4.5)
    Crossing(at=15.0, spacing=10.0)
    """
    x, y = _curve(positions, losses)
    if not math.isfinite(target):
        raise ValueError(f"the target must be a finite loss, got {target}")
    reached = numpy.flatnonzero(numpy.isfinite(y) & (y <= target))
    if not reached.size:
        return Crossing(math.inf, None)
    index = int(reached[0])
    if index == 0:
        return Crossing(float(x[0]), 0.0)
    spacing = float(x[index] - x[index - 1])
    if not math.isfinite(y[index - 1]):
        return Crossing(float(x[index]), spacing)
    share = (float(y[index - 1]) - target) / (float(y[index - 1]) - float(y[index]))
    return Crossing(min(float(x[index - 1]) + share * spacing, float(x[index])), spacing)


def loss_at(positions: ArrayLike, losses: ArrayLike, position: float) -> float:
    """The loss at `position`, linear between the evaluations around it; nan beyond the curve and beside a loss that is
    not finite.

    >>> loss_at([0, 10], [6.0, 5.0], 2.5), loss_at([0, 10], [6.0, 5.0], 11)
    (5.75, nan)
    """
    x, y = _curve(positions, losses)
    if not math.isfinite(position):
        raise ValueError(f"the position must be finite, got {position}")
    if not x[0] <= position <= x[-1]:
        return math.nan
    right = int(numpy.searchsorted(x, position, side="left"))
    if x[right] == position:  # of several evaluations at one position the last
        right = int(numpy.searchsorted(x, position, side="right")) - 1
        return float(y[right]) if math.isfinite(y[right]) else math.nan
    before, after = float(y[right - 1]), float(y[right])
    if not (math.isfinite(before) and math.isfinite(after)):
        return math.nan
    return before + (after - before) * (position - float(x[right - 1])) / float(x[right] - x[right - 1])


def _curve(positions: ArrayLike, losses: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    x, y = numpy.asarray(positions, dtype=numpy.float64), numpy.asarray(losses, dtype=numpy.float64)
    if x.ndim != 1 or x.shape != y.shape or not x.size:
        raise ValueError(f"a curve needs as many losses as positions, at least one; got {y.shape} and {x.shape}")
    if not numpy.isfinite(x).all() or (numpy.diff(x) < 0).any():
        raise ValueError("the positions of a curve must be finite and must not go back")
    return x, y


def target_grid(
    first_loss: float, best_loss: float, shares: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.98)
) -> dict[float, float]:
    """Targets at `shares` of an improvement, first - share (first - best), by share.

    Args:
        first_loss: the reference's at step 0.
        best_loss: the best that its pilot runs reached.
    Raises:
        ValueError: if there was no improvement, or a share is not in (0, 1].

    >>> target_grid(6.0, 4.0, shares=(0.5, 0.75))
    {0.5: 5.0, 0.75: 4.5}
    """
    if not (math.isfinite(first_loss) and math.isfinite(best_loss) and best_loss < first_loss):
        raise ValueError(f"targets need an improvement from first_loss to best_loss; got {first_loss} and {best_loss}")
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"a share of the improvement lies in (0, 1], got {share}")
    return {share: first_loss - share * (first_loss - best_loss) for share in shares}


# ---------------------------------------------------------------------------------------------------------------------
# S3: restricted mean times


def restricted(times: ArrayLike, budget: float, name: str = "times") -> NDArray[numpy.float64]:
    """min(T, budget) of every time (S): whoever needs longer, or never gets there, counts as the whole budget.

    Args:
        times: seconds to the target, inf where it was not reached.
        budget: seconds, the same for all.
    Raises:
        ValueError: for a budget that is not finite and above 0, nan, or times below 0.

    >>> restricted([3.0, 12.0, math.inf], 10.0).tolist()
    [3.0, 10.0, 10.0]
    """
    if not 0 < budget < math.inf:
        raise ValueError(f"the budget must be a finite number of seconds above 0, got {budget}")
    return numpy.minimum(_times(times, name), budget)


@dataclasses.dataclass(frozen=True)
class TimeResult:
    """S3: times to a target, each counted up to the same budget."""

    treatment_mean: float
    """Mean of min(T, budget)."""
    reference_mean: float
    difference: Interval
    """Mean of the paired differences, with its 95 % t interval; without ends where they do not vary."""
    ratio: float | None
    """`treatment_mean` / `reference_mean`; below 1: the treatment is sooner. None where the reference's is 0."""
    p: float | None
    """Exact sign-flip p of the paired differences; None where they do not vary."""


def restricted_times(
    treatment: ArrayLike, reference: ArrayLike, budget: float, generator: numpy.random.Generator
) -> TimeResult:
    """S3: which reaches the target sooner, up to a budget that all runs had.

    Compares mean(min(T, budget)), which is defined however many runs never get there. The budget must not be larger
    than any run lasted (else use `log_rank`, which knows runs that stopped early).

    Args:
        treatment, reference: seconds to the target, one per seed (S), paired; inf where it was not reached.
        budget: seconds, the same for all.
        generator: for `sign_flip`, used beyond 30 pairs only.
    Raises:
        ValueError: for a budget that is not finite and above 0, nan, times below 0, or unequal lengths.

    >>> result = restricted_times([3, 5, 7], [4, 8, math.inf], 10.0, numpy.random.default_rng(0))
    >>> result.treatment_mean, result.difference.estimate
    (5.0, -2.3333333333333335)
    """
    ours, theirs = _times(treatment, "treatment"), _times(reference, "reference")
    check_paired(len(ours), len(theirs))
    mine, yours = restricted(ours, budget), restricted(theirs, budget)
    treatment_mean, reference_mean = math.fsum(mine) / len(mine), math.fsum(yours) / len(yours)
    compared = paired_difference(mine, yours, generator)
    return TimeResult(
        treatment_mean,
        reference_mean,
        compared.difference,
        treatment_mean / reference_mean if reference_mean > 0 else None,
        compared.p,
    )


def _times(values: ArrayLike, name: str) -> NDArray[numpy.float64]:
    times = without_nan(values, name)
    if (times < 0).any():
        raise ValueError(f"{name} holds a time below 0, {times.min()}")
    return times


# ---------------------------------------------------------------------------------------------------------------------
# S4: speed-up


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """S4: how many times sooner the treatment reached the target."""

    ratio: Interval | None
    """Geometric mean of T_reference / T_treatment over the pairs that have a ratio, with its 95 % t interval on logs;
    `ratio.n` counts these pairs. None where no pair has one."""
    p: float | None
    """Exact sign-flip p of the log ratios."""
    n: int
    """All pairs."""
    left_out: tuple[int, ...]
    """Indices of the pairs without a ratio: one of the two did not reach the target, or reached it at 0 s."""


def speed_up(
    treatment: ArrayLike, reference: ArrayLike, generator: numpy.random.Generator, level: float = 0.95
) -> SpeedUp:
    """S4: the geometric mean of T_reference / T_treatment over seeds; above 1 the treatment is sooner.

    It describes only pairs in which both reached the target; `restricted_times` tests all of them, and in how many the
    treatment was sooner is `win_share` of the same times up to the budget.

    Args:
        treatment, reference: seconds to the target, one per seed (S), paired; inf where it was not reached.
        generator: for `sign_flip`, used beyond 30 pairs only.
        level: coverage of the interval of the ratio.

    >>> result = speed_up([1.0, 2.0, 8.0], [2.0, 4.0, math.inf], numpy.random.default_rng(0))
    >>> round(result.ratio.estimate, 12), result.n, result.left_out
    (2.0, 3, (2,))
    """
    ours, theirs = _times(treatment, "treatment"), _times(reference, "reference")
    check_paired(len(ours), len(theirs))
    usable = numpy.isfinite(ours) & numpy.isfinite(theirs) & (ours > 0) & (theirs > 0)
    left_out = tuple(int(index) for index in numpy.flatnonzero(~usable))
    if not usable.any():
        return SpeedUp(None, None, len(ours), left_out)
    logs = numpy.log(theirs[usable]) - numpy.log(ours[usable])
    ratio = t_interval(logs, level).mapped(math.exp)
    return SpeedUp(ratio, sign_flip(logs, generator), len(ours), left_out)


# ---------------------------------------------------------------------------------------------------------------------
# S3b: runs that stopped at different times


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
    t, event = _times(times, name), numpy.asarray(observed)
    if event.dtype != numpy.bool_ or event.shape != t.shape:
        raise ValueError(f"{name} needs one True or False per time that says whether the target was reached")
    if (event & numpy.isinf(t)).any():
        raise ValueError(f"{name} holds a target reached at inf; a run that never reaches it is not observed")
    return t, event
