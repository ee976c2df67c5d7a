"""A folder that only this user can enter, for sockets, stores and tokens of one process. Standard library only.

It is removed when the process ends. If the process was killed, the next process of this user removes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from multiprocessing import util
from pathlib import Path

from asyncsgd.errors import RunError

_PREFIX = "asyncsgd-"
_LOCK = "lock"
"""Locked by the kernel as long as the owner lives, so that it can be told whether a folder belongs to anybody."""

_made: dict[int, Path] = {}
"""Process id -> its folder. A forked child has another id and makes one of its own."""


def private_folder() -> Path:
    """This process's folder, mode 0700, below the folder for temporary files; made at the first call.

    The first call also removes what killed processes of this user have left there."""
    folder = _made.get(os.getpid())
    if folder is None or not folder.is_dir():
        remove_abandoned()
        folder = _made[os.getpid()] = _make()
        util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)  # after multiprocessing's own, -100
    return folder


def new_folder(prefix: str) -> Path:
    """A new folder in this process's own; whoever made it removes it when it is not needed any more."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=private_folder()))


def give_multiprocessing_a_home() -> None:
    """Let multiprocessing put its sockets below `private_folder`, which is cleaned up after a kill, as its own place
    is not.
    """
    before, tempfile.tempdir = tempfile.tempdir, str(private_folder())
    try:
        util.get_temp_dir()  # made once and then kept by multiprocessing
    finally:
        tempfile.tempdir = before


def remove_abandoned() -> None:
    """Remove the folders of this user's processes that were killed before they could do so."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if not _is_private(folder):
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                _lock(descriptor)  # fails while the owner lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def check_private(folder: Path) -> Path:
    """Return `folder` if nobody but this user can have made it and can enter it.

    Raises:
        RunError: otherwise; its name may have come from a stranger.
    """
    try:
        if folder.is_absolute() and folder.parent.name.startswith(_PREFIX) and _is_private(folder.parent):
            return folder
    except OSError:
        pass
    raise RunError(f"{str(folder)[:200]!r} is no private folder of this user; start the run again")


def _make() -> Path:
    hidden = Path(tempfile.mkdtemp(prefix="." + _PREFIX))
    # Open as long as the process lives, which holds the lock. Not inherited by the processes that it starts.
    descriptor = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody takes the folder for abandoned
        _lock(descriptor)
    # Under its real name only once it is locked: others take an unlocked one for abandoned.
    return hidden.rename(hidden.with_name(hidden.name[1:]))


def _lock(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_private(folder: Path) -> bool:
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
