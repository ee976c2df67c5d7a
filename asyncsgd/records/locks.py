"""Locks on open files, which the kernel takes back with the process: a killed one leaves nothing locked.

Where the file system has no locks, every file is free. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
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


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file at `path`.

    For a moment the file is locked by this call, and who locks it in that moment is told that it is taken. So ask
    seldom, and only of a file that has not changed for a while.
    """
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # no locks here
        return False


def wait_for_lock(file: TextIO) -> None:
    """Lock a file for as long as it stays open, as soon as no other process has it locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
