"""At which delay an asynchronous advantage is lost.

A delay is the count of updates between the read and the application of a gradient.
"""

from __future__ import annotations

import dataclasses
import math

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

STEPS = 400
"""Points between two measured delays at which the interval is looked at; its ends are then found exactly."""
ON_THE_EDGE = 1e-24
"""Of the largest square: a mean exactly at the end of its interval belongs to it, whatever the rounding."""


@dataclasses.dataclass(frozen=True)
class CrossingPoint:
    """The delay at which an advantage is lost, with its confidence interval."""

    at: float | None
    """First delay at which the mean rises to 0 from below; None where it does not."""
    low: float | None
    """Smallest delay whose 95 % interval contains 0; None where that lies before the first one measured, or nowhere."""
    high: float | None
    """Largest such delay; None where it lies beyond the last one measured, or nowhere."""
    reason: str
    """In words: what is None and why, and whether the mean crosses more than once."""
    crossings: tuple[float, ...]
    """Every delay at which the mean crosses 0, in either direction: with more than one, `at` is only the first rise."""


def crossing_point(positions: ArrayLike, table: ArrayLike, level: float = 0.95) -> CrossingPoint:
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
    >>> round(found.at, 6), found.low == found.at
    (1.828427, True)
    """
    delays, values = numpy.asarray(positions, float), numpy.asarray(table, float)
    order = numpy.argsort(delays)
    delays, values = delays[order], values[:, order]
    means = numpy.array([math.fsum(column) / len(column) for column in values.T])
    below = means < 0
    changes = numpy.flatnonzero(below[:-1] != below[1:])
    x = numpy.log2(delays + 1)
    zeros = [float(x[k] + means[k] / (means[k] - means[k + 1]) * (x[k + 1] - x[k])) for k in changes]
    crossings = tuple(float(2.0**zero - 1) for zero in zeros)
    rises = [crossing for k, crossing in zip(changes, crossings, strict=True) if below[k]]
    first, last = f"{delays[0]:g}", f"{delays[-1]:g}"
    if below.all():
        told = f"the mean shows an advantage at every measured delay, up to {last}"
    elif not below.any():
        told = f"the mean shows no advantage at any measured delay, from {first} on"
    elif not rises:
        told = f"the mean shows no advantage at delay {first} and gains one by {last}, which it does not lose again"
    else:
        counts = f"the mean crosses 0 {len(crossings)} times, {len(rises)} of them from below"
        told = f"{counts}; this is the first of those" * (len(crossings) > 1)
    low = high = None
    note = "one seed gives no interval"
    if len(values) > 1:
        low, high, note = _not_excluded(x, values, zeros, level)
    return CrossingPoint(rises[0] if rises else None, low, high, "; ".join(filter(None, (told, note))), crossings)


def _not_excluded(
    x: NDArray[numpy.float64], values: NDArray[numpy.float64], zeros: list[float], level: float
) -> tuple[float | None, float | None, str]:
    """The smallest and the largest delay whose t interval contains 0, and what limits them in words."""
    freedom = len(values) - 1
    factor = float(stats.t.ppf((1 + level) / 2, freedom)) ** 2 / len(values)
    edge = ON_THE_EDGE * float((values**2).max())

    def excess(at: float | NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        """Above 0 where the interval leaves 0 out: mean^2 - t^2 var / S."""
        there = numpy.array([numpy.interp(at, x, row) for row in values])
        return there.mean(axis=0) ** 2 - factor * there.var(axis=0, ddof=1) - edge

    grid = numpy.unique([*x, *zeros, *numpy.interp(numpy.linspace(0, len(x) - 1, STEPS * len(x)), range(len(x)), x)])
    inside = excess(grid) <= 0
    kept = numpy.flatnonzero(inside)
    percent = f"{100 * level:g} %"
    if not len(kept):
        return None, None, f"no measured or interpolated delay has a {percent} interval that contains 0"
    parts = 1 + int((numpy.diff(kept) > 1).sum())
    notes = [f"the {percent} set has {parts} parts; the interval spans them"] * (parts > 1)
    ends: list[float | None] = []
    beside = [False, *inside, False]
    for end, outwards, where in ((kept[0], -1, "begins at or before"), (kept[-1], 1, "ends at or beyond")):
        if not 0 <= (beyond := end + outwards) < len(grid):
            ends.append(None)
            which = "first" if outwards < 0 else "last"
            notes.append(f"the {percent} interval {where} delay {2.0 ** grid[end] - 1:g}, the {which} measured")
            continue
        alone = not beside[end + 1 - outwards]
        edge_at = grid[end] if alone else optimize.brentq(excess, grid[end], grid[beyond], xtol=1e-14)
        ends.append(float(2.0**edge_at - 1))
    return ends[0], ends[1], "; ".join(notes)
