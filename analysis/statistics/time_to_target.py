"""Which of two modes reaches a target sooner when some runs never do: restricted means, and the speed-up.

A time of ``inf`` is a run that did not reach the target (or diverged). It is never dropped: up to a common budget such
a run counts as having taken the whole budget.
"""

from __future__ import annotations

import dataclasses
import math

import numpy
from numpy.typing import ArrayLike, NDArray

from analysis.statistics.intervals import Interval, check_paired, t_interval, without_nan
from analysis.statistics.paired import paired_difference


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
    return numpy.minimum(checked_times(times, name), budget)


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
    than any run lasted.

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
    ours, theirs = checked_times(treatment, "treatment"), checked_times(reference, "reference")
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


def checked_times(values: ArrayLike, name: str) -> NDArray[numpy.float64]:
    times = without_nan(values, name)
    if (times < 0).any():
        raise ValueError(f"{name} holds a time below 0, {times.min()}")
    return times


def speed_up(treatment: ArrayLike, reference: ArrayLike) -> Interval | None:
    """The geometric mean of T_reference / T_treatment over seeds, with its 95 % t interval on logs; above 1: sooner.

    It describes only pairs in which both reached the target, and not at 0 s; `restricted_times` tests all of them.

    Args:
        treatment, reference: seconds to the target, one per seed (S), paired; inf where it was not reached.
    Returns:
        The interval, its `n` being the pairs that have a ratio; None where no pair has one.

    >>> found = speed_up([1.0, 2.0, 8.0], [2.0, 4.0, math.inf])
    >>> round(found.estimate, 12), found.n
    (2.0, 2)
    """
    ours, theirs = checked_times(treatment, "treatment"), checked_times(reference, "reference")
    check_paired(len(ours), len(theirs))
    usable = numpy.isfinite(ours) & numpy.isfinite(theirs) & (ours > 0) & (theirs > 0)
    if not usable.any():
        return None
    return t_interval(numpy.log(theirs[usable]) - numpy.log(ours[usable])).mapped(math.exp)
