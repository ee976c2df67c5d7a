"""A function of many items, in several processes: results in the order of the items, in bounded memory."""

from __future__ import annotations

import collections
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from asyncsgd.errors import RunError
from asyncsgd.runtime.launch import end_with_parent, fork_server_of

Item = TypeVar("Item")
Result = TypeVar("Result")


def _nothing(number: int) -> None:
    pass


class Pool:
    """Processes from a fork server, so none inherits this process's threads or its CUDA context. A context manager.

    Args:
        processes: how many; 1: everything is done in this process.
        begin: called once in each process, with its number in [0, processes); pickled.
        modules: imported once, by the fork server; none may run a tensor operation.
    """

    def __init__(self, processes: int, begin: Callable[[int], None] = _nothing, modules: Iterable[str] = ()) -> None:
        self._processes = processes
        self._executor: ProcessPoolExecutor | None = None
        if processes == 1:
            begin(0)
            return
        context = fork_server_of(*modules)
        numbers = context.SimpleQueue()
        for number in range(processes):
            numbers.put(number)
        self._executor = ProcessPoolExecutor(processes, context, _begin, (numbers, begin))

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``function(item)`` of each item, in order; at most two items a process are read ahead.

        Raises:
            RunError: if a process was killed. An exception of `function` comes out as it is.
        """
        if self._executor is None:
            yield from map(function, items)
            return
        pending: collections.deque[Future[Result]] = collections.deque()
        try:
            for item in items:
                pending.append(self._executor.submit(function, item))
                if len(pending) == 2 * self._processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                "a process was killed, perhaps for want of memory; run the same command again, with fewer --processes"
            ) from error

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._executor is None:
            return
        if kind is not None:  # nobody waits for results any more
            for process in list((self._executor._processes or {}).values()):
                process.kill()
        self._executor.shutdown(cancel_futures=True)


def _begin(numbers: Any, begin: Callable[[int], None]) -> None:
    if multiprocessing.parent_process() is not None:
        end_with_parent()
    begin(numbers.get())
