"""Batches handed out: which indices of which stream a gradient is computed on."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from asyncsgd.records.events import Range, Ranges


class BatchSource(Protocol):
    """Where batches come from; see `BatchStream` and `OwnStreams`."""

    def take(self, worker: int, count: int) -> tuple[Ranges, int]:
        """Return the next `count` batches for `worker`, or as many as the budget has left, and how many they are."""

    def give_back(self, ranges: Ranges) -> None:
        """Take back the batches of a lost or abandoned gradient. They are handed out again."""


class BatchStream:
    """Hands out the batches of one stream: first those that were returned, lowest index first, then the next ones.

    >>> batches = BatchStream(samples=64, batch_size=16)
    >>> batches.take(worker=0, count=3)
    ((Range(stream=0, first=0, end=3),), 3)
    >>> batches.give_back((Range(0, 0, 1),))
    >>> batches.take(worker=1, count=2)
    ((Range(stream=0, first=0, end=1), Range(stream=0, first=3, end=4)), 2)
    >>> batches.take(worker=1, count=1)
    ((), 0)
    """

    KEPT = ("_next", "_returned")

    def __init__(self, samples: int | None, batch_size: int) -> None:
        self._limit = math.inf if samples is None else math.ceil(samples / batch_size)
        self._next = 0
        self._returned: list[int] = []

    def take(self, worker: int, count: int) -> tuple[Ranges, int]:
        ranges: list[Range] = []
        number = 0
        while number < count and (self._returned or self._next < self._limit):
            if self._returned:
                index = heapq.heappop(self._returned)
            else:
                index = self._next
                self._next += 1
            if ranges and ranges[-1].end == index:
                ranges[-1] = Range(0, ranges[-1].first, index + 1)
            else:
                ranges.append(Range(0, index, index + 1))
            number += 1
        return tuple(ranges), number

    def give_back(self, ranges: Ranges) -> None:
        for index in indices_of(ranges):
            heapq.heappush(self._returned, index)


class OwnStreams:
    """A stream per worker: its k-th batch depends neither on the rule nor on the other workers.

    It is for the simulated problems, in which a batch is one sample.

    Args:
        num_workers: N, streams 0 to N - 1.
        samples: the budget of all streams together, which is also that in batches; None: no limit.

    >>> streams = OwnStreams(num_workers=2, samples=5)
    >>> streams.take(worker=1, count=3)
    ((Range(stream=1, first=0, end=3),), 3)
    >>> streams.take(worker=0, count=9)
    ((Range(stream=0, first=0, end=2),), 2)
    >>> streams.give_back((Range(1, 0, 3),))
    >>> streams.take(worker=1, count=1)
    ((Range(stream=1, first=0, end=1),), 1)
    """

    KEPT = ("_next",)

    def __init__(self, num_workers: int, samples: int | None) -> None:
        self._next = [0] * num_workers
        self._left = self._budget = math.inf if samples is None else samples

    def take(self, worker: int, count: int) -> tuple[Ranges, int]:
        if self._left < count:
            count = int(self._left)
            if not count:
                return (), 0
        self._left -= count
        first = self._next[worker]
        self._next[worker] = end = first + count
        return (Range(worker, first, end),), count

    def give_back(self, ranges: Ranges) -> None:
        """Take back the newest batches of a worker: its stream goes on at the first of them. Earlier ones cannot be
        taken back. A worker has one gradient in flight, so a lost gradient always has the newest.
        """
        for stream, first, end in ranges:
            self._next[stream] = first
            self._left += end - first

    def restored(self) -> None:
        """The budget may be another one."""
        self._left = self._budget - sum(self._next)


def indices_of(batches: Ranges) -> list[int]:
    """The batch indices of ranges of one stream, in order.

    >>> indices_of((Range(0, 3, 5), Range(0, 9, 10)))
    [3, 4, 9]
    """
    return [index for _, first, end in batches for index in range(first, end)]
