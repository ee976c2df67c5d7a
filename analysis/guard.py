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
    """Olympic; of runs on the same seeds the plain one."""
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
    told = _told(word, mean, reference_mean, min(p_faster, p_slower), alpha)
    return Guard(not word, mean, reference_mean, p_faster, p_slower, told)


def paired_convergence(new: ArrayLike, reference: ArrayLike, tolerance: float, alpha: float = 0.05) -> Guard | Refused:
    """S12 on the same seeds: paired one-sided t tests of the samples (or updates) to one loss, both ways.

    A synchronous run and one process with its global batch start from the same weights and see the same texts, so that
    runs of one seed are no independent samples, as `reference_convergence` wants them. Where the process accumulates
    the workers' batches they differ by rounding only, which may be significant and is still nothing: below `tolerance`
    no difference counts.

    Args:
        new, reference: one of each per seed (S), in the same order.
        tolerance: in their unit, e.g. the samples of one update.
    Returns:
        The guard, with plain means; `Refused` for fewer than 3 seeds.
    Raises:
        ValueError: for values that are not finite, or lengths that differ.

    >>> paired_convergence([100, 203, 298], [101, 200, 300], tolerance=16).reason
    '200.333 against 200.333 on 3 common seeds, neither faster nor slower at 0.05'
    >>> paired_convergence([140, 243, 338], [101, 200, 300], tolerance=16).passed
    False
    """
    check_level(alpha)
    ours, theirs = finite_values(new, "new"), finite_values(reference, "reference")
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} new and {len(theirs)} reference runs; give one of each per seed")
    if len(ours) < 3:
        return Refused(f"{len(ours)} common seeds; the guard needs 3")
    n = len(ours)
    mean, sd = mean_and_sd(ours - theirs)
    if sd > 0:
        p_slower = float(stats.t.sf(mean / sd * math.sqrt(n), n - 1))
    else:
        p_slower = 0.0 if mean > 0 else 1.0 if mean < 0 else 0.5
    p_faster = 1.0 - p_slower
    word = "" if abs(mean) <= tolerance else "faster" if p_faster <= alpha else "slower" if p_slower <= alpha else ""
    our_mean, their_mean = math.fsum(ours) / n, math.fsum(theirs) / n
    told = _told(word, our_mean, their_mean, min(p_faster, p_slower), alpha, f" on {n} common seeds")
    return Guard(not word, our_mean, their_mean, p_faster, p_slower, told)


def _told(word: str, mean: float, reference_mean: float, p: float, alpha: float, on: str = "") -> str:
    if word:
        return f"{word} than the reference: {mean:.6g} against {reference_mean:.6g}{on}, p = {p:.3g}"
    return f"{mean:.6g} against {reference_mean:.6g}{on}, neither faster nor slower at {alpha:g}"
