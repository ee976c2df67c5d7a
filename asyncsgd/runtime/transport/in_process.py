"""Workers in the server's own process, one after another: the single process that every mode is compared with.

Gradients are computed when the server waits for them, oldest command first, straight on the server's parameters; so
nothing is copied, and every delay is 0. Several pretend workers under the rule `Synchronous` accumulate that many
batches per update."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from asyncsgd.packing import Plain
from asyncsgd.records.events import Taken
from asyncsgd.runtime.memory import peak_bytes
from asyncsgd.runtime.transport.messages import Command, Compute, Computed, Evaluate, Evaluated, Message, Ready
from asyncsgd.tasks.base import encode_sums
from asyncsgd.worker import Worker


class InProcess:
    """The server's end; there is no other.

    Args:
        worker: computes all gradients; its flat vectors are the server's parameters and everybody's slot.
        num_workers: how many pretend workers.
    """

    def __init__(self, worker: Worker, num_workers: int) -> None:
        self._worker = worker
        ready: Message = Ready(worker.flat.layout.fingerprint)
        self._messages: collections.deque[tuple[int, Message]] = collections.deque(
            (w, ready) for w in range(num_workers)
        )
        self._commands: collections.deque[tuple[int, Command]] = collections.deque()
        self._version = 0

    @property
    def parameters(self) -> Tensor:
        return self._worker.flat.parameters

    def gradient(self, worker: int) -> Tensor:
        return self._worker.flat.gradients

    def writing(self, version: int) -> AbstractContextManager[None]:
        self._version = version + 1
        return contextlib.nullcontext()

    def send(self, worker: int, command: Command) -> None:
        self._commands.append((worker, command))

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Message]]:
        if self._messages:
            return [self._messages.popleft()]
        if not self._commands:
            return []
        worker, command = self._commands.popleft()
        if isinstance(command, Compute):
            return [(worker, self._compute(command))]
        if isinstance(command, Evaluate):
            sums = encode_sums(self._worker.evaluate(command.shard, command.num_shards))
            own = peak_bytes(self.parameters.device) if worker == 0 else ()  # the others are this process too
            return [(worker, Evaluated(command.shard, sums, own))]
        return []

    def _compute(self, command: Compute) -> Computed:
        began = time.perf_counter()
        gradient = self._worker.gradient(command.batches[0][1])
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize()
        return Computed(command.dispatch, self._version, gradient, Taken(compute=time.perf_counter() - began))

    def state_dict(self) -> Plain:
        return self._worker.state_dict()

    def load_state_dict(self, state: Plain) -> None:
        self._worker.load_state_dict(state)

    def close(self) -> None:
        self._commands.clear()
