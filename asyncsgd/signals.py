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

    A signal never raises while modules are imported: numpy's import from C discards the exception, and the request
    would be lost. The signal is noted, and `check` raises. Entering an instance that listens already changes nothing.
    The previous listener hears the first signal too, e.g. a sweep that makes this run among others. A SIGHUP that is
    ignored (``nohup``) stays ignored.

    The second signal raises KeyboardInterrupt wherever the process is, until `ends_in_order` is called. From then on
    one raises within `leaving` alone, and once, so that what saves and writes the summary is never left.

    Args:
        ends_with_process: signals that come after the context do nothing, since nothing is left to stop. Otherwise the
            previous listener listens again.

    >>> with StopRequest() as stop:
    ...     asked_before = stop()
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     asked_before, stop()
    (False, True)
    """

    def __init__(self, *, ends_with_process: bool = False) -> None:
        self._num_requests = 0
        self._asked_at = -math.inf
        self._ends_with_process = ends_with_process
        self._raises_at: int | None = 2
        """The number of the request that raises; None: none does."""
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __call__(self) -> bool:
        return self._num_requests > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked to stop."""
        if self():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it the first signal raises KeyboardInterrupt; for what takes long and has nothing to save."""
        with self._raising_at(1):
            self.check()
            yield
        self.check()  # if something within has swallowed the exception

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Within it the second signal raises KeyboardInterrupt; for what may be left, where `ends_in_order`."""
        with self._raising_at(2):
            yield

    @contextlib.contextmanager
    def during_a_run(self) -> Iterator[None]:
        """Within `at_once`, for a campaign: within it one of its runs listens, and saves what it has. The campaign
        stops after it, also where the signal came too late to be heard by the run.
        """
        with self.leaving():
            yield
        self.check()

    def ends_in_order(self) -> None:
        """From here on no signal raises but within `at_once` and `leaving`."""
        self._raises_at = None

    @contextlib.contextmanager
    def _raising_at(self, number: int) -> Iterator[None]:
        before, self._raises_at = self._raises_at, number
        try:
            yield
        finally:
            self._raises_at = before

    def __enter__(self) -> StopRequest:
        self._depth += 1
        if self._depth == 1:
            # Python lets the main thread alone hear signals; a run in another one goes on until its budget is spent.
            numbers: tuple[signal.Signals, ...] = (
                NUMBERS if threading.current_thread() is threading.main_thread() else ()
            )
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                numbers = tuple(number for number in numbers if number != signal.SIGHUP)
            self._before = {number: signal.signal(number, self._ask) for number in numbers}
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
            handler = self._before[number]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, frame)
        if self._raises_at is not None and self._num_requests >= self._raises_at:
            self._raises_at = None  # once: what handles the exception is not left
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
