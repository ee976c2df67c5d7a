"""How many runs of a study are done and how long the others will take, on one line while it goes on."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

PLAIN_SECONDS = 30.0
"""Where standard output is no terminal, at least so many seconds lie between two lines."""
CLEAR = "\r\033[K"
"""What empties the line of a terminal."""


class RunKind(NamedTuple):
    """What tells how long a run takes: runs of one kind take about as long as each other."""

    stage: str
    arm: str
    measures: bool = False
    """Whether such a run has the machine to itself."""


class Progress:
    """Shows how far a study is: a line that is rewritten on a terminal, elsewhere a plain line now and then.

    Args:
        left: the kind of every run that is still to be made.
        total: how many runs the study has.
        side_by_side: how many runs that measure no time go on at once.
        clock: returns the seconds of a clock that never goes back; tests have one of their own.
    """

    def __init__(
        self,
        left: Iterable[RunKind],
        total: int,
        side_by_side: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = list(left)
        self._total = total
        self._done = total - len(self._left)
        self._side_by_side = side_by_side
        self._clock = clock
        self._ended: list[tuple[RunKind, float]] = []
        self._shown_at = clock()

    def ended(self, kind: RunKind, seconds: float, *, has_result: bool) -> None:
        """Take in that a run has ended after so many seconds, and show how far the study is now."""
        if kind in self._left:
            self._left.remove(kind)
        if has_result:
            self._done += 1
            self._ended.append((kind, seconds))
        self._show()

    def seconds_left(self) -> float | None:
        """The seconds that the runs which are left will take; None while no run has ended.

        A run is expected to take the mean of the ended runs of its kind. If there are none, it is the mean of its
        stage, and if there are none of it either, the mean of all runs.
        """
        if not self._ended:
            return None
        seconds = 0.0
        for kind in self._left:
            expected = statistics.fmean(self._seconds_of_similar(kind))
            seconds += expected if kind.measures else expected / self._side_by_side
        return seconds

    def clear(self) -> None:
        """Empty the line on a terminal, so that another one can be printed."""
        if self._left and sys.stdout.isatty():
            sys.stdout.write(CLEAR)

    def _seconds_of_similar(self, kind: RunKind) -> Sequence[float]:
        """The seconds of the ended runs that are most like those of a kind."""
        of_kind = [seconds for ended, seconds in self._ended if ended == kind]
        of_stage = [seconds for ended, seconds in self._ended if ended.stage == kind.stage]
        return of_kind or of_stage or [seconds for _, seconds in self._ended]

    def _show(self) -> None:
        seconds = self.seconds_left()
        if not self._left or seconds is None:
            return
        line = f"{self._done} of {self._total} runs are done, about {duration(seconds)} left"
        if sys.stdout.isatty():
            sys.stdout.write(CLEAR + line)
            sys.stdout.flush()
        elif self._clock() - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = self._clock()
            print(line, flush=True)


def duration(seconds: float) -> str:
    """Some seconds as a text, in seconds, minutes or hours.

    >>> duration(12.3), duration(89.0), duration(754.0), duration(5000.0)
    ('12 s', '89 s', '13 min', '1 h 23 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
