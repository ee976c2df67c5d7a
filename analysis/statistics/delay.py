"""At which delay an asynchronous advantage is lost.

A delay is the count of updates between the read and the application of a gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from analysis.statistics.intervals import check_level, finite_table, finite_values

ON_THE_EDGE = 1e-12
"""Of the squares that are compared: a mean exactly at the end of its interval belongs to it, whatever the rounding."""


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
    values at x contains 0, that is mean(x)^2 <= t^2 var(x) / S, a quadratic inequality between neighbouring delays,
    solved exactly. It needs no approximation of a ratio and it may be unbounded, as Fieller's may. Its `level` holds at
    every delay taken by itself, and for the crossing point where the mean crosses once and is linear between delays.

    Args:
        positions: two or more delays (K), all different, 0 or more, in any order.
        table: log(treatment time / reference time) of every seed (S x K); below 0 the treatment is faster.
    Returns:
        The crossing point; without ends for one seed.
    Raises:
        ValueError: for values that are not finite (restrict times to the budget first), negative or repeated delays.

    >>> found = crossing_point([0, 1, 3], [[-1.1, -0.5, 0.5], [-0.9, -0.5, 0.5], [-1.0, -0.5, 0.5]])
    >>> round(found.at, 6), found.low == found.at
    (1.828427, True)
    """
    delays = finite_values(positions, "positions")
    values = finite_table(table, "table", "seeds", "delays")
    check_level(level, "level")
    if values.shape[1] != len(delays):
        raise ValueError(f"the table has {values.shape[1]} columns for {len(delays)} delays")
    if len(delays) < 2 or (delays < 0).any() or len(numpy.unique(delays)) < len(delays):
        raise ValueError(f"a crossing needs two or more delays, all different and 0 or more, got {delays.tolist()}")
    order = numpy.argsort(delays)
    delays, values = delays[order], values[:, order]
    means = numpy.array([math.fsum(column) / len(column) for column in values.T])
    ups, downs = _changes(means)
    at = _zero(delays, means, ups[0]) if ups else None
    crossings = tuple(_zero(delays, means, k) for k in sorted(ups + downs))
    notes = [_about_the_mean(delays, means, ups, downs, at)]
    low = high = None
    if len(values) < 2:
        notes.append("one seed gives no interval")
    else:
        pieces = _not_excluded(values, level)
        low, high, note = _ends(delays, pieces, level)
        notes.append(note)
    return CrossingPoint(at, low, high, "; ".join(note for note in notes if note), crossings)


def _changes(means: NDArray[numpy.float64]) -> tuple[list[int], list[int]]:
    """Indices k such that the mean goes from below 0 to at least 0 between k and k + 1; and the other way round."""
    below = means < 0
    ups = [int(k) for k in numpy.flatnonzero(below[:-1] & ~below[1:])]
    downs = [int(k) for k in numpy.flatnonzero(~below[:-1] & below[1:])]
    return ups, downs


def _zero(delays: NDArray[numpy.float64], means: NDArray[numpy.float64], k: int) -> float:
    if means[k + 1] == 0:
        return float(delays[k + 1])
    return _delay(delays, k, float(means[k] / (means[k] - means[k + 1])))


def _delay(delays: NDArray[numpy.float64], k: int, share: float) -> float:
    """The delay at `share` of the way from the k-th to the next, in log2(delay + 1)."""
    if share <= 0 or share >= 1:
        return float(delays[k] if share <= 0 else delays[k + 1])
    begin, end = math.log2(delays[k] + 1), math.log2(delays[k + 1] + 1)
    return 2.0 ** (begin + share * (end - begin)) - 1


def _about_the_mean(
    delays: NDArray[numpy.float64], means: NDArray[numpy.float64], ups: list[int], downs: list[int], at: float | None
) -> str:
    first, last = f"{delays[0]:g}", f"{delays[-1]:g}"
    if at is None:
        if (means < 0).all():
            return f"the mean shows an advantage at every measured delay, up to {last}"
        if (means >= 0).all():
            return f"the mean shows no advantage at any measured delay, from {first} on"
        return f"the mean shows no advantage at delay {first} and gains one by {last}, which it does not lose again"
    if len(ups) + len(downs) > 1:
        times = len(ups) + len(downs)
        return f"the mean crosses 0 {times} times, {len(ups)} of them from below; this is the first of those"
    return ""


def _not_excluded(values: NDArray[numpy.float64], level: float) -> list[tuple[int, float, float]]:
    """Where the t interval of the interpolated values contains 0: (k, from, to) in shares of the way from k to k + 1.

    Pieces of neighbouring segments touch and are not joined.
    """
    num_seeds, num_delays = values.shape
    factor = float(stats.t.ppf((1 + level) / 2, num_seeds - 1)) ** 2 / num_seeds
    pieces = []
    for k in range(num_delays - 1):
        begin, change = values[:, k], values[:, k + 1] - values[:, k]
        m, dm = math.fsum(begin) / num_seeds, math.fsum(change) / num_seeds
        freedom = num_seeds - 1
        variance = math.fsum((begin - m) ** 2) / freedom
        covariance = math.fsum((begin - m) * (change - dm)) / freedom
        change_variance = math.fsum((change - dm) ** 2) / freedom
        # mean(u)^2 - factor var(u) = a u^2 + 2 b u + c, u in [0, 1]
        a, b, c = dm * dm - factor * change_variance, m * dm - factor * covariance, m * m - factor * variance
        size = m * m + dm * dm + factor * (variance + change_variance)
        pieces += [(k, low, high) for low, high in _at_most_zero(a, b, c, ON_THE_EDGE * size)]
    return pieces


def _at_most_zero(a: float, b: float, c: float, tolerance: float) -> list[tuple[float, float]]:
    """The parts of [0, 1] where a u^2 + 2 b u + c is at most 0, up to `tolerance`."""

    def inside(u: float) -> bool:
        return a * u * u + 2 * b * u + c <= tolerance

    roots: list[float] = []
    if abs(a) > tolerance:
        discriminant = b * b - a * c
        if abs(discriminant) <= tolerance * (abs(a) + abs(b) + abs(c)):
            roots = [-b / a]
        elif discriminant > 0:
            # the sum that does not cancel, and the product of the roots for the other
            q = -(b + math.copysign(math.sqrt(discriminant), b))
            roots = [q / a, c / q]
    elif abs(b) > tolerance:
        roots = [-c / (2 * b)]
    marks = [0.0, *sorted(root for root in roots if 0 < root < 1), 1.0]
    found = [(u, v) for u, v in itertools.pairwise(marks) if inside((u + v) / 2)]
    # points that touch without a stretch beside them: a double root, or an end
    found += [(u, u) for u in marks if inside(u) and not any(v <= u <= w for v, w in found)]
    return sorted(found)


def _ends(
    delays: NDArray[numpy.float64], pieces: list[tuple[int, float, float]], level: float
) -> tuple[float | None, float | None, str]:
    percent = f"{100 * level:g} %"
    if not pieces:
        return None, None, f"no measured or interpolated delay has a {percent} interval that contains 0"
    begins = [_delay(delays, k, low) for k, low, _ in pieces]
    finishes = [_delay(delays, k, high) for k, _, high in pieces]
    low, high = min(begins), max(finishes)
    notes = []
    joined = sum(
        begin > finish * (1 + 1e-9) + 1e-9
        for finish, begin in zip(numpy.maximum.accumulate(finishes), begins[1:], strict=False)
    )
    if joined:
        notes.append(f"the {percent} set has {joined + 1} parts; the interval spans them")
    lowest: float | None = low
    highest: float | None = high
    if low <= delays[0]:
        lowest = None
        notes.append(f"the {percent} interval begins at or before delay {delays[0]:g}, the first measured")
    if high >= delays[-1]:
        highest = None
        notes.append(f"the {percent} interval ends at or beyond delay {delays[-1]:g}, the last measured")
    return lowest, highest, "; ".join(notes)
