"""Ctrl-C, SIGTERM and SIGHUP: the first asks a run to stop and save, the second to leave at once.

SIGHUP comes when a terminal is closed. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_REQUEST_SECONDS = 1.0
"""torchrun passes on a signal that its ranks may have had already, and a shell passes on the SIGHUP of its terminal:
within this time both are one request."""


class StopRequest:
    """Whether the user has asked to stop; a call gives the answer. A context manager: it listens within the context.

    A signal raises KeyboardInterrupt. Within `during_a_run` the first one is only noted, so that the run can save, and
    the second raises, once. The previous listener hears the first signal too, e.g. a sweep that makes this run among
    others. A SIGHUP that is ignored (``nohup``) stays ignored. Entering an instance that listens already changes
    nothing.

    Args:
        ends_with_process: signals that come after the context do nothing, since nothing is left to stop. Otherwise the
            previous listener listens again.

    >>> with StopRequest() as stop, stop.during_a_run():
    ...     asked_before = stop()
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     asked_before, stop()
    (False, True)
    """

    def __init__(self, *, ends_with_process: bool = False) -> None:
        self._num_requests = 0
        self._asked_at = -math.inf
        self._ends_with_process = ends_with_process
        self._in_a_run = False
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __call__(self) -> bool:
        return self._num_requests > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked to stop. An import from C, as numpy's, discards one."""
        if self():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def during_a_run(self) -> Iterator[None]:
        """Within it the first signal is noted and the second raises; for what saves what it has, or looks itself."""
        before, self._in_a_run = self._in_a_run, True
        try:
            yield
        finally:
            self._in_a_run = before

    def __enter__(self) -> StopRequest:
        self._depth += 1
        # Python lets the main thread alone hear signals; a run in another one goes on until its budget is spent.
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [number for number in NUMBERS if not (nohup and number == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._ask) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_IGN if self._ends_with_process else handler)

    def _ask(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        passed_on = number == signal.SIGHUP or "TORCHELASTIC_RUN_ID" in os.environ
        if passed_on and now - self._asked_at <= _SAME_REQUEST_SECONDS:
            return
        self._num_requests += 1
        if self._num_requests == 1:
            self._asked_at = now
            previous = self._before[number]
            if callable(previous) and previous is not signal.default_int_handler:
                with contextlib.suppress(KeyboardInterrupt):  # whether one is raised is for this listener to say
                    previous(number, frame)
        if not self._in_a_run or self._num_requests == 2:
            raise KeyboardInterrupt
        if self._num_requests == 1:
            with contextlib.suppress(OSError):  # the terminal may be closed
                # Not print: the signal may have come in the middle of one.
                os.write(2, b"stopping after the current step; a second Ctrl-C leaves at once\n")


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it signals wait: they are delivered at its end. For what is short and must be whole.

    A process that is started within it never hears them, nor do those that it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
