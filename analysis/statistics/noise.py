"""How much of the noise between runs is the schedule (replicates of one seed) and how much the seed."""

from __future__ import annotations

import dataclasses
import math

import numpy
from numpy.typing import ArrayLike
from scipy import stats

from analysis.statistics.intervals import Interval, check_level, finite_table

MINIMUM_SEEDS = 6


@dataclasses.dataclass(frozen=True)
class Components:
    """S9: the one-way random-effects model y_sr = mean + seed_s + schedule_sr."""

    schedule_variance: Interval
    """Mean square within seeds, by chi-squared."""
    seed_variance: float
    """(MSB - MSW) / replicates, 0 where that is negative."""
    schedule_share: Interval | None
    """schedule / (schedule + seed), by F; None where nothing varies."""
    p: float | None
    """Of the F test that seeds do not matter beyond the schedule; None where nothing varies."""
    too_few: str
    """Why this supports no verdict; empty from 6 seeds on."""


def components(table: ArrayLike, level: float = 0.95) -> Components:
    """S9: variance of the schedule and of the seed from a balanced table.

    sigma^2_schedule = MSW and sigma^2_seed = (MSB - MSW) / k, which in balanced designs are the REML estimates (where
    the latter is not negative). MSB and MSW are independent under normality, which gives the intervals.

    Args:
        table: one value per seed and replicate (S x k), e.g. final losses.
    Raises:
        ValueError: for fewer than 2 seeds or 2 replicates, or values that are not finite.

    >>> found = components([[1.0, 3.0], [5.0, 7.0]])
    >>> found.schedule_variance.estimate, found.seed_variance, found.schedule_share.estimate
    (2.0, 7.0, 0.2222222222222222)

    References:
        Searle, Casella and McCulloch, Variance Components, 1992, chapter 3.
    """
    y = finite_table(table, "table", "seeds", "replicates")
    check_level(level, "level")
    num_seeds, k = y.shape
    if num_seeds < 2 or k < 2:
        raise ValueError(f"variance components need 2 or more seeds and replicates, got {num_seeds} x {k}")
    n = num_seeds * k
    means = numpy.array([math.fsum(row) / k for row in y])
    mean = math.fsum(y.ravel()) / n
    between_freedom, within_freedom = num_seeds - 1, n - num_seeds
    between = k * math.fsum((means - mean) ** 2) / between_freedom
    within = math.fsum(((y - means[:, None]) ** 2).ravel()) / within_freedom
    seed = max(0.0, (between - within) / k)
    tails = ((1 - level) / 2, (1 + level) / 2)
    squares = within * within_freedom
    schedule = Interval(
        within,
        squares / float(stats.chi2.ppf(tails[1], within_freedom)),
        squares / float(stats.chi2.ppf(tails[0], within_freedom)),
        level,
        num_seeds,
    )
    p = share = None
    if between > 0 or within > 0:
        f = between / within if within > 0 else math.inf
        p = float(stats.f.sf(f, between_freedom, within_freedom))
        low, high = (
            1 / (1 + max(0.0, (f / float(stats.f.ppf(tail, between_freedom, within_freedom)) - 1) / k))
            for tail in tails
        )
        share = Interval(within / (within + seed), low, high, level, num_seeds)
    too_few = "" if num_seeds >= MINIMUM_SEEDS else f"{num_seeds} seeds; a verdict needs {MINIMUM_SEEDS}"
    return Components(schedule, seed, share, p, too_few)
