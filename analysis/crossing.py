"""At which delay an asynchronous advantage is lost.

A delay is the count of updates between the read and the application of a gradient.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.stats import Array

SAME_POINT = 1e-6
"""Roots that are nearer than this, in log2(delay + 1), are one up to rounding."""


class Crossing(NamedTuple):
    """The delay at which an advantage is lost, with its confidence interval."""

    at: float
    """First delay at which the mean rises to 0 from below; nan where it does not."""
    low: float
    """Smallest delay whose interval contains 0; -inf where that lies before the first one measured, nan: nowhere."""
    high: float
    """Largest such delay; inf where it lies beyond the last one measured."""
    reason: str
    """What is not known and why, and whether the mean crosses more than once, in words."""
    crossings: tuple[float, ...]
    """Every delay at which the mean crosses 0, in either direction; if there are several, `at` is the first rise."""


def crossing_point(positions: ArrayLike, table: ArrayLike, level: float = 0.95) -> Crossing:
    """The delay at which the mean log ratio of times crosses 0 from below, and the delays that the data do not exclude.

    Between measured delays every seed's value is linear in log2(delay + 1). `at` is where their mean first goes from
    below 0 to 0 or above. The interval inverts the t test: delay x belongs to it when the t interval of the seeds'
    values at x contains 0. It needs no approximation of a ratio and it may be unbounded, as Fieller's may. Its `level`
    holds at every delay taken by itself, and for the crossing point where the mean crosses once and is linear between
    delays.

    Args:
        positions: two or more delays (K), all different, 0 or more, in any order.
        table: log(treatment time / reference time) of every seed (S x K); below 0 the treatment is faster.

    Returns:
        The crossing point; without ends for one seed.

    >>> found = crossing_point([0, 1, 3], [[-1.1, -0.5, 0.5], [-0.9, -0.5, 0.5], [-1.0, -0.5, 0.5]])
    >>> round(found.at, 6), round(found.low, 6)
    (1.828427, 1.828427)

    Without noise the interval is the point: on a delay, on the last one, where the mean only touches 0. A mean that
    begins at 0 loses nothing, and one seed has no interval:

    >>> def without_noise(*means, seeds=8):
    ...     at, low, high, reason, _ = crossing_point([0, 1, 3, 7], [means] * seeds)
    ...     return float(at), float(low), float(high), reason
    >>> without_noise(-1.0, -0.5, 0.0, 1.0)
    (3.0, 3.0, 3.0, '')
    >>> without_noise(-1.0, -0.5, -0.5, 0.0)
    (7.0, 7.0, inf, 'the 95 % interval ends at or beyond delay 7, the last measured')
    >>> without_noise(-1.0, 0.0, -1.0, -1.0)
    (1.0, 1.0, 1.0, 'the mean crosses 0 2 times, 1 of them from below; this is the first of those')
    >>> without_noise(0.0, 0.2, 0.4, 0.6)[0]
    nan
    >>> without_noise(-1.0, -0.5, 0.0, 1.0, seeds=1)
    (3.0, nan, nan, 'one seed gives no interval')
    """
    delays = np.asarray(positions, float)
    values = np.asarray(table, float)
    order = np.argsort(delays)
    delays = delays[order]
    values = values[:, order]
    means = np.array([math.fsum(column) / len(column) for column in values.T])
    is_below = means < 0
    x = np.log2(delays + 1)
    zeros = []
    rises = []
    for k in np.flatnonzero(is_below[:-1] != is_below[1:]):
        share = means[k] / (means[k] - means[k + 1])
        zero = float(x[k] + share * (x[k + 1] - x[k]))
        zeros.append(zero)
        if is_below[k]:
            rises.append(2.0**zero - 1)
    at = rises[0] if rises else math.nan
    reasons = [_about_mean(delays, is_below, len(zeros), len(rises))]
    low = math.nan
    high = math.nan
    if len(values) == 1:
        reasons.append("one seed gives no interval")
    else:
        low, high, about_interval = _not_excluded(x, values, zeros, level)
        reasons.append(about_interval)
    crossings = tuple(2.0**zero - 1 for zero in zeros)
    return Crossing(at, low, high, "; ".join(filter(None, reasons)), crossings)


def _about_mean(delays: Array, is_below: NDArray[np.bool], num_crossings: int, num_rises: int) -> str:
    """Where the mean shows an advantage, in words; empty where it is lost once and never gained."""
    first = f"{delays[0]:g}"
    last = f"{delays[-1]:g}"
    if is_below.all():
        return f"the mean shows an advantage at every measured delay, up to {last}"
    if not is_below.any():
        return f"the mean shows no advantage at any measured delay, from {first} on"
    if not num_rises:
        return f"the mean shows no advantage at delay {first} and gains one by {last}, which it does not lose again"
    if num_crossings == 1:
        return ""
    return f"the mean crosses 0 {num_crossings} times, {num_rises} of them from below; this is the first of those"


def _not_excluded(x: Array, values: Array, zeros: list[float], level: float) -> tuple[float, float, str]:
    """The smallest and the largest delay whose t interval contains 0, and what limits them in words.

    It contains 0 where mean^2 - t^2 var / S is not above 0. Between two measured delays, at the share s of the way, a
    seed has left + s rise, so that this is the parabola (a + b s)^2 - (var + 2 cov s + var_rise s^2), where a and b are
    the means of left and rise, and the variances have the factor t^2 / S.
    """
    factor = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) ** 2 / len(values)
    rounding = 1e-24 * float((values**2).max())
    ends = list(zeros)  # where the mean is 0 the interval contains it
    for k, (left, right) in enumerate(itertools.pairwise(values.T)):
        rise = right - left
        a = left.mean()
        b = rise.mean()
        (var, cov), (_, var_rise) = factor * np.cov(left, rise)
        for root in np.roots([b * b - var_rise, 2 * (a * b - cov), a * a - var]):
            if root.imag == 0 and 0 <= root.real <= 1:
                ends.append(x[k] + root.real * (x[k + 1] - x[k]))

    def excess(at: float) -> float:
        """mean^2 - t^2 var / S at a position."""
        interpolated = np.array([np.interp(at, x, row) for row in values])
        return float(interpolated.mean() ** 2 - factor * interpolated.var(ddof=1))

    ends += [at for at in x if excess(at) <= rounding]
    ends.sort()
    percent = f"{100 * level:g} %"
    if not ends:
        return math.nan, math.nan, f"no measured or interpolated delay has a {percent} interval that contains 0"
    num_parts = 1
    for end, next_end in itertools.pairwise(ends):
        if next_end - end > SAME_POINT and excess((end + next_end) / 2) > rounding:
            num_parts += 1
    notes = []
    if num_parts > 1:
        notes.append(f"the {percent} set has {num_parts} parts; the interval spans them")
    low = 2.0 ** ends[0] - 1
    high = 2.0 ** ends[-1] - 1
    if ends[0] == x[0]:
        notes.append(f"the {percent} interval begins at or before delay {low:g}, the first measured")
        low = -math.inf
    if ends[-1] == x[-1]:
        notes.append(f"the {percent} interval ends at or beyond delay {high:g}, the last measured")
        high = math.inf
    return low, high, "; ".join(notes)
