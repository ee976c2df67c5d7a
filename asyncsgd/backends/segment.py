"""Vectors that the processes of one host share: parameters, a gradient slot per worker, and a few control words.

The memory is a file without a name, handed to a child as a descriptor. So nothing has to be removed, whatever dies, and
the size of /dev/shm (docker's --shm-size) does not matter.

A pull is one consistent version without any lock: the version word is 2 v while version v stands, and 2 v + 1 while the
server writes version v + 1 (a sequence lock). A reader copies between two equal, even words and reads again otherwise;
if it has to, the server has made progress. The order of the stores and loads around the copy is that of x86; on other
processors `asyncsgd.run.runtimes.check_transport` refuses it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from asyncsgd.core.running_statistics import NUM_ROWS

_PAGE = 4096
_VERSION = 0
"""The control word of the sequence lock."""
SAMPLES = 1
"""The control word with the number of samples that have arrived."""
FROZEN = 2
"""The control word that says whether workers that step the parameters are to hold."""


class Segment:
    """A page of int64 control words, P parameters, slots of P and some more float32; can be handed to a child.

    Args:
        size: P.
        slots: gradients that it has room for; none where workers step the parameters themselves.
        extra: elements behind them, for an optimizer state that workers share.
        statistics: S, of a model with running statistics: float64, S behind the parameters and 3 S behind every slot.
        descriptor: of a segment that is there already, by this one's alone from now on; None: a new one of zeros.

    >>> segment = Segment(4, slots=1)
    >>> with segment.writing(0):
    ...     _ = segment.parameters.fill_(2.0)
    >>> mine = torch.zeros(4)
    >>> segment.pull(mine), mine.tolist()
    (1, [2.0, 2.0, 2.0, 2.0])
    """

    def __init__(
        self, size: int, slots: int, extra: int = 0, statistics: int = 0, descriptor: int | None = None
    ) -> None:
        length = _length(size, slots, extra, statistics)
        if descriptor is None:
            descriptor = _nameless(length)
        self._shape = (size, slots, extra, statistics)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        memory = torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
        self.control = memory[:_PAGE].view(torch.int64)
        num_float32 = size * (1 + slots) + extra
        parts = memory[_PAGE : _PAGE + 4 * num_float32].view(torch.float32).split([size] * (1 + slots) + [extra])
        self.parameters = parts[0]
        self.slots = parts[1:-1]
        self.extra = parts[-1]
        behind = memory[length - 8 * _num_statistics(slots, statistics) : length].view(torch.float64)
        self.statistics = behind[:statistics]
        """`(S,)`, of the version that stands."""
        self.moved = behind[statistics:].view(slots, NUM_ROWS, statistics)
        """`(N, 3, S)`, what each worker's gradient has made of them; the first row is where it starts at a point."""

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        return _inherited, (*self._shape, DupFd(self._descriptor))

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

    def pull(self, into: Tensor, alive: Callable[[], object] = lambda: None, statistics: Tensor | None = None) -> int:
        """Copy one consistent version into `into`, `(P,)`, and return its number.

        Args:
            statistics: where its running statistics are copied, `(S,)`.
            alive: called while the server writes; raises if there is no server any more, which may have died at it.
        """
        while True:
            before = int(self.control[_VERSION])
            if before % 2 == 0:
                into.copy_(self.parameters)
                if statistics is not None:
                    statistics.copy_(self.statistics)
                if int(self.control[_VERSION]) == before:
                    return before // 2
            time.sleep(0)  # let the server have the core
            alive()


def _length(size: int, slots: int, extra: int, statistics: int) -> int:
    """Bytes of a segment."""
    length = _PAGE + 4 * (size * (1 + slots) + extra)
    return math.ceil(length / 8) * 8 + 8 * _num_statistics(slots, statistics)  # float64 begins at multiples of 8


def _num_statistics(slots: int, statistics: int) -> int:
    return statistics * (1 + NUM_ROWS * slots)


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


def _inherited(size: int, slots: int, extra: int, statistics: int, descriptor: Any) -> Segment:
    return Segment(size, slots, extra, statistics, descriptor.detach())
