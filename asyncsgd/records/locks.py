"""Locks on open files, which the kernel takes back with the process: a killed one leaves nothing locked.

Where the file system has no locks, every file is free. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
from typing import TextIO


def lock(file: TextIO) -> bool:
    """Lock a file for as long as it stays open; return False, at once, where another process has locked it.

    A second open of the same file in this process counts as another one. Processes that are started afterwards do not
    inherit the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here, e.g. on some network file systems
    return True


def wait_for_lock(file: TextIO) -> None:
    """Lock a file for as long as it stays open, as soon as no other process has it locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
