"""Calls of one function for many items, in several processes: the results come in the order of the items, in bounded
memory."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from asyncsgd.backends.launch import end_with_parent, fork_server_importing
from asyncsgd.errors import RunError


def _nothing(number: int) -> None:
    pass


@contextlib.contextmanager
def process_pool(
    processes: int, begin: Callable[[int], None] = _nothing, modules: Iterable[str] = ()
) -> Iterator[Callable[..., Iterator[Any]]]:
    """A context that gives ``mapped(function, items)``, an iterator over the result of each item, in order. At most two
    items a process are read ahead.

    The processes come from a fork server, so none inherits this process's threads or its CUDA context.

    Args:
        processes: how many; 1: everything is done in this process.
        begin: called once in each process, with its number in [0, processes). It is pickled.
        modules: imported once, by the fork server. None may run a tensor operation.

    Raises:
        RunError: if a process was killed. An exception that `function` raises is raised here.
    """
    if processes == 1:
        begin(0)
        yield map
        return
    context = fork_server_importing(*modules)
    numbers = context.SimpleQueue()
    for number in range(processes):
        numbers.put(number)
    with ProcessPoolExecutor(processes, context, _begin, (numbers, begin)) as executor:
        try:
            yield functools.partial(_mapped, executor, 2 * processes)
        except BrokenProcessPool as error:
            raise RunError(
                "a process was killed, perhaps for want of memory; run the same command again, with fewer --processes"
            ) from error
        except BaseException:  # nobody waits for results any more
            for process in list(executor._processes.values()):
                process.kill()
            executor.shutdown(cancel_futures=True)
            raise


def _mapped(
    executor: ProcessPoolExecutor, ahead: int, function: Callable[..., Any], items: Iterable[Any]
) -> Iterator[Any]:
    pending: collections.deque[Future[Any]] = collections.deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) == ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _begin(numbers: Any, begin: Callable[[int], None]) -> None:
    end_with_parent()
    begin(numbers.get())
