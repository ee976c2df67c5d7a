"""Seconds in which this process could run: not those of Ctrl-Z, of a SIGSTOP, or of a laptop that slept.

A thread looks at the clock four times a second. If it could not look for more than a second, and the process used
almost no CPU time meanwhile, the process was suspended. A gradient of many seconds uses CPU time, so it is not mistaken
for that.
"""

from __future__ import annotations

import os
import threading
import time

LOOK_SECONDS = 0.25
"""The time between two looks at the clock."""
SUSPENDED_AFTER_SECONDS = 1.0
"""If more time lies between two looks, the process may have been suspended."""
SUSPENDED_CPU_SHARE = 0.01
"""It was suspended if it used less than this share of that time on a CPU."""


class _Watch:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.looked = 0.0
        self.still = 0.0
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.looked = time.perf_counter()
        self.thread = threading.Thread(target=self._look, name="awake", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        used = time.process_time()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.perf_counter()
            used_before = used
            used = time.process_time()
            passed = now - self.looked
            if passed > SUSPENDED_AFTER_SECONDS and used - used_before < SUSPENDED_CPU_SHARE * passed:
                self.still += passed - SUSPENDED_AFTER_SECONDS
            self.looked = now


_watch = _Watch()
# A fork has no copy of the thread, so the child starts anew, with a thread of its own at its first call.
os.register_at_fork(after_in_child=_watch.reset)


def awake() -> float:
    """Seconds on a clock that never goes back. It stops at most a second after the process was suspended."""
    if _watch.thread is None:
        _watch.start()
    return min(time.perf_counter(), _watch.looked + SUSPENDED_AFTER_SECONDS) - _watch.still
