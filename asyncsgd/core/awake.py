"""Seconds in which this process could run: not those of Ctrl-Z, of a SIGSTOP, or of a laptop that slept.

A thread looks at the clock four times a second. Where it did not come to that for a second, and the process used next
to no CPU time meanwhile, the process stood still. A gradient of many seconds uses CPU time, and so does a busy machine.
"""

from __future__ import annotations

import os
import threading
import time

BETWEEN = 0.25
LONGEST = 1.0
"""Seconds between two looks: usual, and from where on the process may have stood still."""
USED = 0.01
"""CPU seconds a second below which it did."""


class _Watch:
    def __init__(self) -> None:
        self.looked = self.still = 0.0
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.looked = time.perf_counter()
        self.thread = threading.Thread(target=self._look, name="awake", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        used = time.process_time()
        while True:
            time.sleep(BETWEEN)
            now = time.perf_counter()
            used_before = used
            used = time.process_time()
            if now - self.looked > LONGEST and used - used_before < USED * (now - self.looked):
                self.still += now - self.looked - LONGEST
            self.looked = now


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # the thread is not in the child


def awake() -> float:
    """Seconds on a clock that never goes back, and that stands still while this process does, but for a second."""
    if _watch.thread is None:
        _watch.start()
    return min(time.perf_counter(), _watch.looked + LONGEST) - _watch.still
