"""Is synchronous training itself right? The guard that runs before any comparison: convergence like a reference."""

from __future__ import annotations

import dataclasses
import math

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.intervals import Refused, check_level, finite_values, mean_and_sd


def olympic(times: ArrayLike) -> float:
    """The mean without the best and the worst.

    Raises:
        ValueError: for fewer than 3 values, or one that is not finite.

    >>> olympic([3.0, 100.0, 5.0, 4.0])
    4.5
    """
    kept = _kept(times, "times")
    return math.fsum(kept) / len(kept)


def _kept(times: ArrayLike, name: str) -> NDArray[numpy.float64]:
    sample = numpy.sort(finite_values(times, name))
    if len(sample) < 3:
        raise ValueError(f"without the best and the worst nothing is left of {len(sample)} {name}; give 3 or more")
    return sample[1:-1]


@dataclasses.dataclass(frozen=True)
class Guard:
    """S12: whether new runs converge neither faster nor slower than the reference."""

    passed: bool
    new_mean: float
    """Olympic."""
    reference_mean: float
    p_faster: float
    """One-sided: of "not faster than the reference"."""
    p_slower: float
    reason: str


def reference_convergence(new: ArrayLike, reference: ArrayLike, alpha: float = 0.05) -> Guard | Refused:
    """S12: compare the samples (or updates) to a target of `new` runs with those of twice as many `reference` runs.

    MLPerf's reference convergence points, both ways: a one-sided pooled t test on means, and standard deviations,
    without the best and the worst; passed when neither side has p <= alpha. Faster than the reference is as suspect as
    slower: a synchronous run is the same computation as one process with the same global batch.

    Leaving out the extremes makes the standard deviations too small, so that false alarms are more frequent than alpha:
    about 8 % on each side at alpha = 0.05, for 3, 5 or 10 new runs (4,000 simulations of normal times).

    Args:
        new: samples to the target of the runs to be checked (N).
        reference: the same of the reference (M).
    Returns:
        The guard; `Refused` with fewer than 3 new runs, or fewer than 2 N reference runs.
    Raises:
        ValueError: for values that are not finite.

    >>> reference_convergence([10, 11, 12], [10, 11, 12, 10, 11, 12]).passed
    True

    References:
        mlcommons/logging, rcp_checker.py; the standard deviations there divide by n, here by n - 1.
    """
    check_level(alpha)
    ours, theirs = finite_values(new, "new"), finite_values(reference, "reference")
    if len(ours) < 3:
        return Refused(f"{len(ours)} new runs; the guard needs 3")
    if len(theirs) < 2 * len(ours):
        return Refused(f"{len(theirs)} reference runs for {len(ours)} new ones; the guard needs {2 * len(ours)}")
    kept, kept_reference = _kept(ours, "new"), _kept(theirs, "reference")
    (mean, sd), (reference_mean, reference_sd) = mean_and_sd(kept), mean_and_sd(kept_reference)
    n, m = len(kept), len(kept_reference)
    squares = (m - 1) * reference_sd**2 + ((n - 1) * sd**2 if n > 1 else 0.0)
    error = math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    if error > 0:
        p_slower = float(stats.t.sf((mean - reference_mean) / error, n + m - 2))
        p_faster = float(stats.t.cdf((mean - reference_mean) / error, n + m - 2))
    else:
        p_slower = 0.0 if mean > reference_mean else 1.0
        p_faster = 0.0 if mean < reference_mean else 1.0
    word = "faster" if p_faster <= alpha else "slower" if p_slower <= alpha else ""
    if word:
        reason = (
            f"{word} than the reference: {mean:.6g} against {reference_mean:.6g}, p = {min(p_faster, p_slower):.3g}"
        )
    else:
        reason = f"{mean:.6g} against {reference_mean:.6g}, neither faster nor slower at {alpha:g}"
    return Guard(not word, mean, reference_mean, p_faster, p_slower, reason)
