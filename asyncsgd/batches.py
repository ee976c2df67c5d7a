"""Batches handed out: which indices of which stream a gradient is computed on."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from asyncsgd.packing import Plain
from asyncsgd.records.events import Range


class Source(Protocol):
    """Where batches come from; see `Batches` and `OwnStreams`."""

    def take(self, worker: int, count: int = 1) -> tuple[Range, ...]: ...

    def give_back(self, ranges: tuple[Range, ...]) -> None: ...

    def state_dict(self) -> Plain: ...

    def load_state_dict(self, state: Plain) -> None: ...


class Batches:
    """Hands out the batches of one stream: first those that were returned, lowest index first, then the next ones.

    >>> batches = Batches(samples=64, batch_size=16)
    >>> batches.take(0), batches.take(1, 2)
    (((0, 0, 1),), ((0, 1, 3),))
    >>> batches.give_back(((0, 0, 1),))
    >>> batches.take(0, 2), batches.take(1)
    (((0, 0, 1), (0, 3, 4)), ())
    """

    def __init__(self, samples: int | None, batch_size: int) -> None:
        self._limit = None if samples is None else math.ceil(samples / batch_size)
        self._next = 0
        self._returned: list[int] = []

    def take(self, worker: int, count: int = 1) -> tuple[Range, ...]:
        """The next `count` batches, or as many as the budget has left; none where it is handed out."""
        ranges: list[Range] = []
        for _ in range(count):
            index = self._take_one()
            if index is None:
                break
            if ranges and ranges[-1][2] == index:
                ranges[-1] = (0, ranges[-1][1], index + 1)
            else:
                ranges.append((0, index, index + 1))
        return tuple(ranges)

    def _take_one(self) -> int | None:
        if self._returned:
            return heapq.heappop(self._returned)
        if self._limit is not None and self._next >= self._limit:
            return None
        self._next += 1
        return self._next - 1

    def give_back(self, ranges: tuple[Range, ...]) -> None:
        """Return the batches of a lost or abandoned gradient."""
        for _, first, end in ranges:
            for index in range(first, end):
                heapq.heappush(self._returned, index)

    def state_dict(self) -> Plain:
        """What has been handed out and returned; see `asyncsgd.packing`."""
        return {"next": self._next, "returned": list(self._returned)}

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, whose budget may have been another one."""
        self._next, self._returned = state["next"], list(state["returned"])


class OwnStreams:
    """A stream per worker: its k-th batch depends neither on the rule nor on the other workers.

    >>> streams = OwnStreams(num_workers=2, samples=5)
    >>> streams.take(1), streams.take(1, 2), streams.take(0, 9)
    (((1, 0, 1),), ((1, 1, 3),), ((0, 0, 2),))
    >>> streams.give_back(((1, 1, 3),))
    >>> streams.take(1)
    ((1, 1, 2),)
    """

    def __init__(self, num_workers: int, samples: int | None) -> None:
        self._next = [0] * num_workers
        self._budget: float = math.inf if samples is None else samples
        self.left = self._budget
        """Batches that the budget still has."""

    def take(self, worker: int, count: int = 1) -> tuple[Range, ...]:
        """The worker's next `count` batches, or as many as the budget has left."""
        if self.left < count:
            count = int(self.left)
            if count == 0:
                return ()
        first = self._next[worker]
        self._next[worker] = first + count
        self.left -= count
        return ((worker, first, first + count),)

    def give_back(self, ranges: tuple[Range, ...]) -> None:
        """Return what `take` gave last to a worker."""
        for stream, first, end in ranges:
            self._next[stream] = first
            self.left += end - first

    def state_dict(self) -> Plain:
        """What has been handed out; see `asyncsgd.packing`."""
        return {"next": list(self._next)}

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, whose budget may have been another one."""
        self._next = list(state["next"])
        self.left = self._budget - sum(self._next)


def count_batches(ranges: tuple[Range, ...]) -> int:
    """How many batches `ranges` hold.

    >>> count_batches(((0, 3, 5), (0, 9, 10)))
    3
    """
    return sum(end - first for _, first, end in ranges)


def indices_of(batches: tuple[Range, ...]) -> list[int]:
    """The batch indices of ranges of one stream, in order.

    >>> indices_of(((0, 3, 5), (0, 9, 10)))
    [3, 4, 9]
    """
    return [index for _, first, end in batches for index in range(first, end)]
