"""Ctrl-C, SIGTERM and SIGHUP: the first asks a run to stop and save, the second to leave at once.

SIGHUP comes when a terminal is closed. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_REQUEST_SECONDS = 1.0
"""torchrun passes on a signal that its ranks may have had already, and a shell passes on the SIGHUP of its terminal:
within this time both are one request."""
_PATIENCE = 30.0
"""How many seconds a step may still take after the first signal, at least."""
_PATIENCE_BY_TORCHRUN = 25.0
"""The same under torchrun, which kills its ranks 30 seconds after it has passed a signal on."""
_NUM_STEPS = 3
"""A step may also take so many times the longest step so far."""
_NOTE_SECONDS = 5.0
"""So long after the first signal the folder is told that the run is interrupted, in case somebody kills the run."""
_LEAVE_SECONDS = 5.0
"""So long after the second signal the main thread may still leave in good order."""


def seconds_to_end(longest_step: float) -> float:
    """How many seconds after the first signal a run is ended in the middle of its step, if that step is not over.

    Args:
        longest_step: the longest step so far, in seconds.

    >>> seconds_to_end(0.5), seconds_to_end(40.0)
    (30.0, 120.0)
    """
    patience = _PATIENCE_BY_TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else _PATIENCE
    return max(patience, _NUM_STEPS * longest_step)


class StopRequest:
    """Whether the user has asked to stop; a call gives the answer. A context manager: it listens within the context.

    A signal raises KeyboardInterrupt. Within `during_a_run` the first one is only noted, so that the run can save, and
    the second raises, once. The previous listener hears the first signal too, e.g. a study that makes this run among
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
        self._num_handled = 0
        """How many of the requests the main thread has heard of."""
        self._asked_at = -math.inf
        self._ends_with_process = ends_with_process
        self._in_a_run = False
        self._before: dict[int, Any] = {}
        self._depth = 0
        self._step_began = math.inf
        self._longest_step = 0.0
        self._pipe: tuple[int, int] | None = None
        """Within `watched`: the system writes the number of each signal into it, whatever the main thread does."""
        self._lock = threading.RLock()
        """Guards the pipe and the counts."""

    def __call__(self) -> bool:
        return self._num_requests > 0

    def begin_step(self) -> bool:
        """Note that a step begins and the one before it has ended, and return whether the user has asked to stop.

        The longest step decides how long a run may go on after the first signal. An evaluation is a part of its step.
        """
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._step_began)
        self._step_began = now
        return self()

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked to stop.

        It is called after imports: that of a C extension, such as numpy's, may swallow the one that the signal raised.
        """
        if self():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def during_a_run(self) -> Iterator[None]:
        """A context in which the first signal is only noted and the second raises KeyboardInterrupt.

        It is for code that asks this object itself, and saves what it has.
        """
        before = self._in_a_run
        self._in_a_run = True
        self._step_began = math.inf
        self._longest_step = 0.0
        try:
            yield
        finally:
            self._in_a_run = before

    @contextlib.contextmanager
    def watched(
        self, when_slow_to_stop: Callable[[], None], when_forced: Callable[[], None], when_stuck: Callable[[], None]
    ) -> Iterator[None]:
        """A context in which a thread hears signals too, since the main one hears none while it waits or computes in C.

        What has not ended `seconds_to_end` after the first signal is ended as by a second one.

        Args:
            when_slow_to_stop: called a few seconds after the first signal, if the context has not ended:
                others may kill this process.
            when_forced: called at the second signal, to end what the main thread may wait for.
            when_stuck: called a few seconds after the second signal, if the context has not ended; it ends the process.
                It is not called at a prompt, whose process is the user's.

        Raises:
            KeyboardInterrupt: at the end, after a second signal.
        """
        if not self._before:  # not in the main thread, which alone hears signals
            yield
            return
        over = threading.Event()

        def watch() -> None:
            self._wait(over, 1, math.inf)  # for the first signal
            if not self._wait(over, 2, self._asked_at + _NOTE_SECONDS):
                when_slow_to_stop()
            if not self._wait(over, 2, self._asked_at + seconds_to_end(self._longest_step)):
                signal.raise_signal(signal.SIGINT)  # it takes too long: send ourselves the second signal
                self._hear()
            if not over.is_set():
                when_forced()
            if not over.wait(_LEAVE_SECONDS) and not hasattr(sys, "ps1"):
                when_stuck()

        pipe = os.pipe()
        for end in pipe:
            os.set_blocking(end, False)
        wakeup_before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        self._pipe = pipe
        _WATCHED.append(self)
        thread = threading.Thread(target=watch, name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            os.write(pipe[1], b"\0")
            thread.join()
            self._hear()
            self._pipe = None
            signal.set_wakeup_fd(wakeup_before)
            _WATCHED.remove(self)
            for end in pipe:
                os.close(end)
            if self._num_requests > 1:
                raise KeyboardInterrupt

    def _wait(self, over: threading.Event, num_requests: int, until: float) -> bool:
        """Wait for so many requests, or until the context is over. False: neither has come at the time `until`."""
        assert self._pipe is not None
        poll = select.poll()
        poll.register(self._pipe[0], select.POLLIN)
        while self._num_requests < num_requests and not over.is_set():
            left = until - time.monotonic()
            if left <= 0:
                return False
            poll.poll(1000 * min(left, 1.0))  # not longer: the main thread may take what comes
            self._hear()
        return True

    def _hear(self) -> None:
        """Count what lies in the pipe: each signal once, whichever thread comes first."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._pipe is not None:
                for number in os.read(self._pipe[0], 64):
                    if number in self._before:
                        self._count(number)

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
        """What the main thread does at a signal, between two bytecodes."""
        if self._pipe is not None:
            self._hear()
        else:
            self._count(number)
        handled = self._num_handled
        self._num_handled = self._num_requests
        if handled == self._num_requests:  # the signal was part of a request that is handled already
            return
        previous = self._before[number]
        if handled == 0 and callable(previous) and previous is not signal.default_int_handler:
            with contextlib.suppress(KeyboardInterrupt):  # whether one is raised is for this listener to say
                previous(number, frame)
        # In a run the first request raises nothing, the second raises, and those after it raise nothing again.
        second_is_new = handled < 2 and self._num_requests >= 2
        if second_is_new or not self._in_a_run:
            raise KeyboardInterrupt

    def _count(self, number: int) -> None:
        """Count a signal as a request, unless it was passed on from one that was counted, and tell the user."""
        now = time.monotonic()
        passed_on = number == signal.SIGHUP or "TORCHELASTIC_RUN_ID" in os.environ
        if passed_on and now - self._asked_at <= _SAME_REQUEST_SECONDS:
            return
        self._num_requests += 1
        if self._num_requests > 1:
            return
        self._asked_at = now
        if self._in_a_run:
            line = "stopping after this step; press Ctrl-C again to stop at once"
            if self._pipe is not None:
                line += f"; in {seconds_to_end(self._longest_step):.0f} s it stops anyhow"
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, f"{line}\n".encode())  # not print: the signal may have come in the middle of one


_WATCHED: list[StopRequest] = []
"""The requests whose pipe is open. A process that is forked meanwhile must write none of its own signals there."""


def _hear_nothing_of_parent() -> None:
    if _WATCHED:
        signal.set_wakeup_fd(-1)
    for each in _WATCHED:
        each._pipe = None
    _WATCHED.clear()


os.register_at_fork(after_in_child=_hear_nothing_of_parent)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Return a context in which signals wait. They are delivered at its end. It is for work that is short and must not
    be interrupted.

    A process that is started within it never hears them, nor do those that it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
