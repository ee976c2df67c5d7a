"""Is synchronous training itself right? The guard that runs before any comparison: convergence like a reference."""

from __future__ import annotations

import dataclasses
from typing import Literal

from numpy.typing import ArrayLike

from analysis.statistics.equivalence import tost_independent, tost_paired
from analysis.statistics.intervals import Interval, Refused, check_paired, finite_values, short

MINIMUM_RUNS = 3


@dataclasses.dataclass(frozen=True)
class Guard:
    """S12: whether new runs were shown to converge as the reference does."""

    word: Literal["passed", "not shown", "failed"]
    """passed: the difference was shown to be within the tolerance. failed: it was shown to be outside of it. not shown:
    neither, which is no pass."""
    difference: Interval
    """new - reference, with the 1 - 2 alpha interval; without ends where no difference varies."""
    p: float | None
    """Of the equivalence test; None where no difference varies."""
    reason: str


def convergence(
    new: ArrayLike, reference: ArrayLike, tolerance: float, alpha: float = 0.05, *, paired: bool
) -> Guard | Refused:
    """S12: do `new` runs need as many samples (or updates) to one loss as `reference` runs, to within `tolerance`?

    Two one-sided t tests (TOST): the guard passes when the 1 - 2 alpha interval of the difference lies inside
    ±`tolerance`. Few or noisy runs therefore do not pass it, where a test of the difference would find nothing and let
    them through. Faster than the reference is as suspect as slower: a synchronous run is the same computation as one
    process that accumulates the workers' batches. On the same seeds the two differ by rounding only. Where they do not
    differ at all, or by the same on every seed, there is no noise to test against, and the difference itself decides.

    Args:
        new, reference: samples to the loss, one per run; with `paired` one of each per seed, in the same order.
        tolerance: above 0, in their unit, e.g. the samples of one update.
        paired: whether the runs are pairs by seed.
    Returns:
        The guard; `Refused` for fewer than 3 runs on one side.
    Raises:
        ValueError: for values that are not finite, lengths of pairs that differ, or a tolerance that is not above 0.

    >>> convergence([100, 203, 298], [101, 200, 300], tolerance=16, paired=True).reason
    '200.333 against 200.333 on 3 common seeds; the 90 % interval of the difference [-4.46, 4.46] lies inside ±16.0'
    >>> convergence([140, 243, 338], [101, 200, 300], tolerance=16, paired=True).word
    'failed'
    >>> convergence([150, 203, 248], [101, 200, 300], tolerance=16, paired=True).word
    'not shown'

    References:
        Schuirmann, J. Pharmacokinetics and Biopharmaceutics, 1987. MLPerf's rcp_checker instead passes what a t test
        does not reject.
    """
    ours, theirs = finite_values(new, "new"), finite_values(reference, "reference")
    if paired:
        check_paired(len(ours), len(theirs))
    fewest = min(len(ours), len(theirs))
    if fewest < MINIMUM_RUNS:
        return Refused(f"{fewest} {'common seeds' if paired else 'runs'}; the guard needs {MINIMUM_RUNS}")
    found = (tost_paired if paired else tost_independent)(ours, theirs, tolerance, alpha)
    difference = found.interval
    low, high = difference.ends
    seeds = f"on {len(ours)} common seeds" if paired else f"in {len(ours)} and {len(theirs)} runs"
    told = f"{ours.mean():.6g} against {theirs.mean():.6g} {seeds}; "
    if difference.low is None:
        told += f"the difference, {short(difference.estimate)} in all of them,"
    else:
        told += f"the {100 * difference.level:g} % interval of the difference [{short(low)}, {short(high)}]"
    if -tolerance < low and high < tolerance:
        return Guard("passed", difference, found.p, f"{told} lies inside ±{short(tolerance)}")
    if low > tolerance or high < -tolerance:
        side = "slower" if low > tolerance else "faster"
        return Guard(
            "failed", difference, found.p, f"{side} than the reference: {told} lies outside ±{short(tolerance)}"
        )
    return Guard("not shown", difference, found.p, f"{told} does not lie inside ±{short(tolerance)}")
