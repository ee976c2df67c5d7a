"""Locks on open files, which the kernel takes back with the process: a killed one leaves nothing locked.

Where the file system has no locks, every file is free."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from asyncsgd.errors import UsageError


def lock(file: IO[str] | IO[bytes] | int, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Lock a file, or the file or folder of a descriptor, for as long as it stays open; return False, at once, where
    it is locked, also by another open of this process, or wait for it (LOCK_EX)."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here, e.g. on some network file systems
    return True


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file at `path`. Ask seldom: who locks it in this moment is refused."""
    with open(path, "rb") as file:
        return not lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def one_writer(folder: Path, flag: str) -> Iterator[None]:
    """Make `folder`, which `flag` names, if it is not there, and let no other run write into it meanwhile.

    Raises:
        UsageError: if another run writes into it.
        OSError: if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise UsageError(f"another run writes into {folder}; wait for it, or name another folder with {flag}")
        yield
    finally:
        os.close(descriptor)
