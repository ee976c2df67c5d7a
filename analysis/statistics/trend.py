"""Whether the loss changes with the number of workers or the delay: slopes of seeds, and Page's trend test."""

from __future__ import annotations

import dataclasses
import math

import numpy
from numpy.typing import ArrayLike
from scipy import stats

from analysis.statistics.intervals import Interval, finite_table, finite_values, t_interval

MINIMUM_POSITIONS = 4
MINIMUM_SEEDS = 6


@dataclasses.dataclass(frozen=True)
class Slope:
    """S8: the change of a value per unit of position, over seeds, and Page's test for an increase."""

    mean: Interval
    """Mean of the slopes of the seeds with its 95 % t interval."""
    per_seed: tuple[float, ...]
    page_statistic: float | None
    """L; None with fewer than 3 positions or 2 seeds."""
    page_p: float | None
    """One-sided: of no trend against an increase with the position."""
    too_few: str
    """Why this supports no verdict; empty from 4 positions and 6 seeds on."""


def slopes(positions: ArrayLike, table: ArrayLike) -> Slope:
    """S8: the least-squares slope of every seed, their mean, and Page's trend test.

    With the same positions in every seed the mean of the slopes is the fixed effect of the model with random intercepts
    and slopes, and the t interval over seeds is its interval. Page's test asks whether values increase with position.

    Args:
        positions: K numbers, all different, e.g. log2 of the workers or the bound on the delay; in any order.
        table: values (S x K), e.g. final losses.
    Raises:
        ValueError: for values that are not finite, a table of another width, or fewer than two positions.

    >>> trend = slopes([0, 1, 2], [[1.0, 2.0, 3.0], [1.0, 3.0, 5.0]])
    >>> trend.per_seed, trend.mean.estimate, trend.page_statistic
    ((1.0, 2.0), 1.5, 28.0)

    References:
        E. B. Page, Ordered hypotheses for multiple treatments, JASA 1963.
    """
    x = finite_values(positions, "positions")
    y = finite_table(table, "table", "seeds", "positions")
    if y.shape[1] != len(x):
        raise ValueError(f"the table has {y.shape[1]} columns for {len(x)} positions")
    if len(x) < 2 or len(numpy.unique(x)) < len(x):
        raise ValueError(f"a slope needs two or more different positions, got {x.tolist()}")
    order = numpy.argsort(x)
    x, y = x[order], y[:, order]
    centred = x - math.fsum(x) / len(x)
    weights = centred / math.fsum(centred**2)
    per_seed = tuple(math.fsum(row * weights) for row in y)
    statistic = p = None
    if len(x) >= 3 and len(y) >= 2:
        page = stats.page_trend_test(y)
        statistic, p = float(page.statistic), float(page.pvalue)
    too_few = ""
    if len(x) < MINIMUM_POSITIONS or len(y) < MINIMUM_SEEDS:
        too_few = (
            f"{len(x)} positions and {len(y)} seeds; a verdict on a trend needs {MINIMUM_POSITIONS} and {MINIMUM_SEEDS}"
        )
    return Slope(t_interval(per_seed), per_seed, statistic, p, too_few)
