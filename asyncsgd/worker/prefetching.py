"""Batches that a thread makes ahead of the worker that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetching(Generic[T]):
    """Makes things by their index in one thread, `ahead` of them before they are asked for.

    Which are next is a guess: indices go on in the steps in which they came last. A wrong guess is thrown away. It has
    cost its making, and changes nothing. There is one thread only, so what it calls needs no lock. The processes of
    torch's DataLoader need to know the order of the batches beforehand; here the server decides it.

    Args:
        make: a pure function of the index.

    >>> squares = Prefetching(lambda index: index**2, ahead=2)
    >>> squares.take(3), squares.take(4), squares.take(9)
    (9, 16, 81)
    """

    def __init__(self, make: Callable[[int], T], ahead: int) -> None:
        self._make = make
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._futures: dict[int, Future[T]] = {}
        self._last: int | None = None

    def _begin(self, index: int) -> None:
        if index not in self._futures:
            self._futures[index] = self._thread.submit(self._make, index)

    def has(self, index: int) -> bool:
        """Whether thing `index` can be made; waits until it is."""
        self._begin(index)
        return self._futures[index].exception() is None

    def take(self, index: int) -> T:
        """Return thing `index`, and wait until it is made. What making it raises is raised here."""
        step = 1 if self._last is None or index <= self._last else index - self._last
        self._last = index
        wanted = range(index, index + step * self._ahead + 1, step)
        self.forget(keep=wanted)
        for guess in wanted:
            self._begin(guess)
        return self._futures.pop(index).result()

    def forget(self, keep: Iterable[int] = ()) -> None:
        """Throw away what was made ahead, but for `keep`."""
        for guess in self._futures.keys() - set(keep):
            self._futures.pop(guess).cancel()
