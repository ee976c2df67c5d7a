"""Vectors that the processes of one host share: parameters, a gradient slot per worker, and a few control words.

The memory is a file without a name, handed to a child as a descriptor. So nothing has to be removed, whatever dies, and
the size of /dev/shm (docker's --shm-size) does not matter.

A pull is one consistent version without any lock: the version word is 2 v while version v stands, and 2 v + 1 while the
server writes version v + 1 (a sequence lock). A reader copies between two equal, even words and reads again otherwise;
if it has to, the server has made progress. The order of the stores and loads around the copy is that of x86; on other
processors `asyncsgd.runtimes.check_transport` refuses it."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from typing import Any

import psutil
import torch
from torch import Tensor

_PAGE = 4096
_VERSION, SAMPLES, FROZEN = 0, 1, 2
"""Control words: of the sequence lock; samples that have arrived; whether workers that step are to hold."""


class Segment:
    """A page of int64 control words, P parameters, slots of P and some more float32; can be handed to a child.

    Args:
        size: P.
        slots: gradients that it has room for; none where workers step the parameters themselves.
        extra: elements behind them, for an optimizer state that workers share.
        descriptor: of a segment that is there already, by this one's alone from now on; None: a new one of zeros.

    >>> segment = Segment(4, slots=1)
    >>> with segment.writing(0):
    ...     _ = segment.parameters.fill_(2.0)
    >>> mine = torch.zeros(4)
    >>> segment.pull(mine), mine.tolist()
    (1, [2.0, 2.0, 2.0, 2.0])
    """

    def __init__(self, size: int, slots: int, extra: int = 0, descriptor: int | None = None) -> None:
        length = _length(size, slots, extra)
        if descriptor is None:
            descriptor = _nameless(length)
        self._shape, self._descriptor = (size, slots, extra), descriptor
        weakref.finalize(self, os.close, descriptor)
        memory = torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
        self.control = memory[:_PAGE].view(torch.int64)
        parts = memory[_PAGE:].view(torch.float32).split([size] * (1 + slots) + [extra])
        self.parameters, self.slots, self.extra = parts[0], parts[1:-1], parts[-1]

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        return _inherited, (*self._shape, DupFd(self._descriptor))

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """What `opened` takes in a process that is no child, as long as this process lives: this process, the
        descriptor, and the shape.
        """
        return (os.getpid(), self._descriptor, *self._shape)

    @classmethod
    def opened(cls, process: int, descriptor: int, size: int, slots: int, extra: int) -> Segment:
        """The segment of another process of this user; on Linux.

        The numbers may come from a stranger. So nothing is opened for writing but a file without a name, of this user
        and of the right length, of a process that has the parent of this one, as the ranks of a torchrun have.

        Raises:
            ValueError: if they are of anything else.
            OSError: if there is no such process or descriptor.
        """
        looked_at = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH)  # opened, and not for reading or writing
        try:
            file = os.fstat(looked_at)
            is_nameless = stat.S_ISREG(file.st_mode) and file.st_nlink == 0
            is_ours = file.st_uid == os.getuid() and psutil.Process(process).ppid() == os.getppid()
            fits = min(size, slots, extra) >= 0 and file.st_size == _length(size, slots, extra)
            if not (is_nameless and is_ours and fits):
                raise ValueError(f"descriptor {descriptor} of process {process} is no segment of this run")
            return cls(size, slots, extra, os.open(f"/proc/self/fd/{looked_at}", os.O_RDWR))
        finally:
            os.close(looked_at)

    @property
    def version(self) -> int:
        """The version that stands or is being left, without any promise about the parameters."""
        return int(self.control[_VERSION]) // 2

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Within it the parameters are on their way from `version` to the next."""
        self.control[_VERSION] = 2 * version + 1
        yield
        self.control[_VERSION] = 2 * version + 2

    def pull(self, into: Tensor, alive: Callable[[], object] = lambda: None) -> int:
        """Copy one consistent version into `into`, `(P,)`, and return its number.

        Args:
            alive: called while the server writes; raises if there is no server any more, which may have died at it.
        """
        while True:
            before = int(self.control[_VERSION])
            if before % 2 == 0:
                into.copy_(self.parameters)
                if int(self.control[_VERSION]) == before:
                    return before // 2
            time.sleep(0)  # let the server have the core
            alive()


def _length(size: int, slots: int, extra: int) -> int:
    """Bytes of a segment."""
    return _PAGE + 4 * (size * (1 + slots) + extra)


def _nameless(length: int) -> int:
    """The descriptor of so many bytes of zeros."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asyncsgd")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)  # reserved now: a full memory would kill with SIGBUS later
    else:
        os.ftruncate(descriptor, length)
    return descriptor


def _inherited(size: int, slots: int, extra: int, descriptor: Any) -> Segment:
    return Segment(size, slots, extra, descriptor.detach())
