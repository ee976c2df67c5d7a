"""How many times as fast: ratios of rates that were measured in turns, and the product of several of them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from analysis.statistics.intervals import Interval, finite_values, t_interval


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """Ratios of two rates, one from each turn."""

    median: float
    lowest: float
    highest: float
    interval: Interval
    """The geometric mean with its 95 % t interval on logs; without ends if there is one ratio only."""

    @property
    def n(self) -> int:
        """Turns."""
        return self.interval.n

    @property
    def pays(self) -> bool:
        """Whether the whole interval lies above 1, so that the gain is more than the noise of these turns."""
        return self.interval.low is not None and self.interval.low > 1.0


def speed_up(before: Sequence[float], after: Sequence[float]) -> SpeedUp:
    """The ratios ``after / before`` of rates that were measured in turns, turn by turn.

    Machines drift, so a ratio is taken within a turn and never between two.

    Args:
        before, after: rates above 0, one for each turn, in the order of the turns.
    Raises:
        ValueError: for different numbers of rates, none, or one that is not a number above 0.

    >>> found = speed_up([10.0, 20.0, 40.0], [20.0, 40.0, 160.0])
    >>> found.median, found.lowest, found.highest, f"{found.interval:.2f}"
    (2.0, 2.0, 4.0, '2.52 [0.93, 6.81]')
    """
    slow, fast = finite_values(before, "before"), finite_values(after, "after")
    if min(slow.min(), fast.min()) <= 0:
        raise ValueError(f"rates must lie above 0, got {min(slow.min(), fast.min())}")
    ratios = [float(one / other) for one, other in zip(fast, slow, strict=True)]
    interval = t_interval([math.log(ratio) for ratio in ratios]).mapped(math.exp)
    return SpeedUp(statistics.median(ratios), min(ratios), max(ratios), interval)


def product(found: Iterable[SpeedUp]) -> float:
    """What several gains come to if none of them changes another: the product of their medians; 1 for none.

    >>> product([speed_up([1.0], [2.0]), speed_up([1.0], [3.0])]), product([])
    (6.0, 1.0)
    """
    return math.prod((each.median for each in found), start=1.0)
