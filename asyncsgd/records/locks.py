"""Locks on open files, which the kernel takes back with the process: a killed one leaves nothing locked.

Where the file system has no locks, every file is free. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from asyncsgd.errors import UsageError


def lock(file: TextIO | int) -> bool:
    """Lock a file, or the file or folder of a descriptor, for as long as it stays open; return False, at once, where
    another process has locked it.

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


@contextlib.contextmanager
def one_writer(folder: Path, flag: str) -> Iterator[None]:
    """Make `folder` if it is not there, and let no other run write into it meanwhile.

    Args:
        flag: that names the folder.

    Raises:
        UsageError: if another run writes into it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be made ({error.strerror}); name another folder") from error
    try:
        if not lock(descriptor):
            raise UsageError(f"another run writes into {folder}; wait for it, or name another folder with {flag}")
        yield
    finally:
        os.close(descriptor)
