"""Vectors that the processes of one host share: parameters, a gradient slot per worker, and a few control words.

The memory is a file without a name, handed to a child as a descriptor. So nothing has to be removed, whatever dies, and
the size of /dev/shm (docker's --shm-size) does not matter.

A pull is one consistent version without any lock. The version word is 2 v while version v is current, and 2 v + 1 while
the server writes version v + 1 (a sequence lock). A reader copies the parameters. If the word was odd before the copy,
or is another one after it, the server has made progress, and the reader copies again. The order of the stores and loads
around the copy is that of x86; on other processors `asyncsgd.run.runtimes._check_processor` refuses shared memory."""

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
"""The control word that says whether workers that step the parameters have to stand still."""


class Segment:
    """Memory that processes share: a page of int64 control words; in float32 P parameters, `num_slots` slots of P, and
    `extra` elements; in float64 S running statistics, and `(3, S)` for each slot. Can be handed to a child.

    Args:
        size: P.
        num_slots: the number of gradients that it has room for; 0 if workers step the parameters themselves.
        extra: the number of further elements, for an optimizer state that workers share.
        num_statistics: S, the number of running statistics of the model, in float64.
        descriptor: the descriptor of an existing segment, which this object owns from now on and closes. None: make a
            new one of zeros.

    >>> segment = Segment(4, num_slots=1)
    >>> with segment.writing(0):
    ...     _ = segment.parameters.fill_(2.0)
    >>> mine = torch.zeros(4)
    >>> segment.pull(mine), mine.tolist()
    (1, [2.0, 2.0, 2.0, 2.0])
    """

    def __init__(
        self, size: int, num_slots: int, extra: int = 0, num_statistics: int = 0, descriptor: int | None = None
    ) -> None:
        num_float32 = size * (1 + num_slots) + extra
        num_float64 = num_statistics * (1 + NUM_ROWS * num_slots)
        # Numbers of float64 begin at multiples of 8 bytes.
        first_float64 = math.ceil((_PAGE + 4 * num_float32) / 8) * 8
        length = first_float64 + 8 * num_float64
        if descriptor is None:
            descriptor = _nameless(length)
        self._shape = (size, num_slots, extra, num_statistics)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        memory = torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
        self.control = memory[:_PAGE].view(torch.int64)
        parts = memory[_PAGE : _PAGE + 4 * num_float32].view(torch.float32).split([size] * (1 + num_slots) + [extra])
        self.parameters = parts[0]
        self.slots = parts[1:-1]
        """`(P,)` for each worker, its gradient; before a gradient from a given point, that point."""
        self.extra = parts[-1]
        of_statistics = memory[first_float64:].view(torch.float64)
        self.statistics = of_statistics[:num_statistics]
        """`(S,)`, the running statistics of the current version."""
        self.moved = of_statistics[num_statistics:].view(num_slots, NUM_ROWS, num_statistics)
        """`(N, 3, S)`, the effect of each worker's gradient on the running statistics, as `core.protocol` has it.
        Before a gradient from a given point, the first row holds the statistics at that point."""

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        return _inherited, (*self._shape, DupFd(self._descriptor))

    @property
    def version(self) -> int:
        """The version that is current, or that the server is replacing now. The parameters may be of a later one."""
        return int(self.control[_VERSION]) // 2

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """A context in which the server changes the parameters from `version` to the next one."""
        self.control[_VERSION] = 2 * version + 1
        yield
        self.control[_VERSION] = 2 * version + 2

    def pull(self, into: Tensor, alive: Callable[[], object] = lambda: None, statistics: Tensor | None = None) -> int:
        """Copy one consistent version into `into`, `(P,)`, and return its number.

        Args:
            statistics: where the running statistics of this version are copied, `(S,)`.
            alive: called while the server writes. It raises if the server is gone, which may have died while it wrote.
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


def _nameless(length: int) -> int:
    """Make a file without a name that holds `length` bytes of zeros, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asyncsgd")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    if hasattr(os, "posix_fallocate"):
        # Reserved now. If memory were full at the first touch of a page, SIGBUS would end the process.
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.ftruncate(descriptor, length)
    return descriptor


def _inherited(size: int, num_slots: int, extra: int, num_statistics: int, descriptor: Any) -> Segment:
    return Segment(size, num_slots, extra, num_statistics, descriptor.detach())
