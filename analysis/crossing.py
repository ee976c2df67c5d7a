"""At which delay an asynchronous advantage is lost.

A delay is the count of updates between the read and the application of a gradient.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from analysis.stats import Array

SAME_POINT = 1e-6
"""Doublings of delay + 1: roots that are nearer than this are one, up to rounding."""


class Crossing(NamedTuple):
    """The delay at which an advantage is lost, with its confidence interval."""

    at: float
    """First delay at which the mean rises to 0 from below; nan where it does not."""
    low: float
    """Smallest delay whose interval contains 0; -inf where that lies before the first one measured, nan: nowhere."""
    high: float
    """Largest such delay; inf where it lies beyond the last one measured."""
    reason: str
    """In words: what is not known and why, and whether the mean crosses more than once."""
    all: tuple[float, ...]
    """Every delay at which the mean crosses 0, in either direction: with more than one, `at` is only the first rise."""


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
    """
    delays = np.asarray(positions, float)
    values = np.asarray(table, float)
    order = np.argsort(delays)
    delays = delays[order]
    values = values[:, order]
    means = np.array([math.fsum(column) / len(column) for column in values.T])
    below = means < 0
    changes = np.flatnonzero(below[:-1] != below[1:])
    x = np.log2(delays + 1)
    zeros = [float(x[k] + means[k] / (means[k] - means[k + 1]) * (x[k + 1] - x[k])) for k in changes]
    crossings = tuple(2.0**zero - 1 for zero in zeros)
    rises = [crossing for k, crossing in zip(changes, crossings, strict=True) if below[k]]
    first = f"{delays[0]:g}"
    last = f"{delays[-1]:g}"
    if below.all():
        told = f"the mean shows an advantage at every measured delay, up to {last}"
    elif not below.any():
        told = f"the mean shows no advantage at any measured delay, from {first} on"
    elif not rises:
        told = f"the mean shows no advantage at delay {first} and gains one by {last}, which it does not lose again"
    else:
        counts = f"the mean crosses 0 {len(crossings)} times, {len(rises)} of them from below"
        told = f"{counts}; this is the first of those" if len(crossings) > 1 else ""
    low = math.nan
    high = math.nan
    note = "one seed gives no interval"
    if len(values) > 1:
        low, high, note = _not_excluded(x, values, zeros, level)
    return Crossing(rises[0] if rises else math.nan, low, high, "; ".join(filter(None, (told, note))), crossings)


def _not_excluded(x: Array, values: Array, zeros: list[float], level: float) -> tuple[float, float, str]:
    """The smallest and the largest delay whose t interval contains 0, and what limits them in words.

    It contains 0 where mean^2 - t^2 var / S is not above 0, which is a parabola between two measured delays.
    """
    factor = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) ** 2 / len(values)
    rounding = 1e-24 * float((values**2).max())
    ends = list(zeros)
    for k, (left, right) in enumerate(itertools.pairwise(values.T)):
        a = left.mean()
        b = (right - left).mean()
        rise = right - left
        (var, both), (_, var_rise) = factor * np.cov(left, rise)
        roots = np.roots([b * b - var_rise, 2 * (a * b - both), a * a - var])
        ends += [x[k] + root.real * (x[k + 1] - x[k]) for root in roots if not root.imag and 0 <= root.real <= 1]

    def excess(at: float) -> float:
        there = np.array([np.interp(at, x, row) for row in values])
        return float(there.mean() ** 2 - factor * there.var(ddof=1))

    kept = sorted([*ends, *(at for at in x if excess(at) <= rounding)])
    percent = f"{100 * level:g} %"
    if not kept:
        return math.nan, math.nan, f"no measured or interpolated delay has a {percent} interval that contains 0"
    gaps = [(a, b) for a, b in itertools.pairwise(kept) if b - a > SAME_POINT and excess((a + b) / 2) > rounding]
    notes = [f"the {percent} set has {1 + len(gaps)} parts; the interval spans them"] if gaps else []
    low = 2.0 ** kept[0] - 1
    high = 2.0 ** kept[-1] - 1
    if kept[0] == x[0]:
        notes.append(f"the {percent} interval begins at or before delay {low:g}, the first measured")
        low = -math.inf
    if kept[-1] == x[-1]:
        notes.append(f"the {percent} interval ends at or beyond delay {high:g}, the last measured")
        high = math.inf
    return low, high, "; ".join(notes)
