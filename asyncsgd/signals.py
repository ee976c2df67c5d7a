"""Ctrl-C and SIGTERM: the first asks a run to stop and save, the second to leave at once. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)

_SAME_REQUEST_SECONDS = 1.0
"""torchrun passes on a signal that its ranks may have had already: within this time both are one request."""


class StopRequest:
    """Whether the user has asked to stop; a call gives the answer. A context manager: it listens within the context.

    A signal never raises while modules are imported: numpy's import from C discards the exception, and the request
    would be lost. The signal is noted, and `check` raises. Entering an instance that listens already changes nothing.
    The previous listener hears the first signal too, e.g. a sweep that makes this run among others.

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
        self._asked_at: float | None = None
        self._ends_with_process = ends_with_process
        self._first_raises = False
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __call__(self) -> bool:
        return self._asked_at is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked to stop."""
        if self():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it the first signal raises KeyboardInterrupt; for what takes long and has nothing to save."""
        self._first_raises = True
        try:
            self.check()
            yield
        finally:
            self._first_raises = False
        self.check()  # if something within has swallowed the exception

    def __enter__(self) -> StopRequest:
        self._depth += 1
        if self._depth == 1:
            # Python lets the main thread alone hear signals; a run in another one goes on until its budget is spent.
            numbers = NUMBERS if threading.current_thread() is threading.main_thread() else ()
            self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_IGN if self._ends_with_process else handler)

    def _ask(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._asked_at is not None:
            if "TORCHELASTIC_RUN_ID" not in os.environ or now - self._asked_at > _SAME_REQUEST_SECONDS:
                raise KeyboardInterrupt
            return
        self._asked_at = now
        handler = self._before[number]
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)
        if self._first_raises:
            raise KeyboardInterrupt
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
