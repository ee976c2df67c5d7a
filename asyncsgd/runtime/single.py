"""One process as a backend: the single process that every mode is compared with.

Gradients are computed first in, first out, straight on the server's parameters; so nothing is copied, and every delay
is 0. Several pretend workers under the rule `Synchronous` accumulate that many batches per update."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from asyncsgd.evaluation import Measured, measured_in_shards
from asyncsgd.packing import Plain, pack, unpack
from asyncsgd.records.events import Taken
from asyncsgd.runtime.base import TrainingClock
from asyncsgd.runtime.dispatcher import Dispatcher
from asyncsgd.runtime.fit import Arrived, Launched
from asyncsgd.runtime.memory import peak_bytes
from asyncsgd.worker import Worker


class InOrder:
    """What a backend has whose gradients arrive in the order of their starts, on the measured clock."""

    settled, anew = True, False

    def __init__(self, flights: Dispatcher, clock: TrainingClock, num_workers: int) -> None:
        self.present = range(num_workers)
        self._flights, self._clock = flights, clock
        self._started: collections.deque[tuple[int, int]] = collections.deque()

    @property
    def now(self) -> float:
        return self._clock.seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._clock.pause()

    def follow(self, launched: Launched, abandoned: tuple[int, ...] = (), lost: tuple[int, ...] = ()) -> None:
        self._started.extend(zip(launched.workers, launched.dispatches, strict=True))

    def settle(self) -> tuple[()]:
        return ()


class Single(InOrder):
    """Computes every gradient in this process.

    Args:
        flights: knows what is in flight.
        worker: computes; its flat parameters are the server's.
        clock: runs while gradients are computed.
        num_workers: how many pretend workers.
    """

    def __init__(self, flights: Dispatcher, worker: Worker, clock: TrainingClock, num_workers: int) -> None:
        super().__init__(flights, clock, num_workers)
        self._worker = worker

    def next(self, until: float) -> Arrived | None:
        if not self._clock.running:
            self._clock.resume()
        if self.now >= until:
            return None
        worker, dispatch = self._started.popleft()
        began = time.perf_counter()
        gradient = self._worker.gradient(self._flights.batches_of(worker)[0][1])
        if self._worker.flat.parameters.device.type == "cuda":
            torch.cuda.synchronize()
        taken = Taken(compute=time.perf_counter() - began)
        launch = self._flights.launch_of(worker)
        vector = self._worker.flat.gradients
        return Arrived(worker, dispatch, launch.version, vector, gradient, self.now - launch.seconds, taken)

    def evaluate(self, parameters: Tensor) -> Measured:
        self._clock.pause()
        began, number = time.perf_counter(), len(self.present)
        shards = [self._worker.evaluate(shard, number) for shard in range(number)]
        peaks = ((0, *peak_bytes(parameters.device)),)
        return measured_in_shards(self._worker.task, shards, time.perf_counter() - began, peaks)

    def state_dict(self) -> Plain:
        return {
            "worker": self._worker.state_dict(),
            "clock": self._clock.state_dict(),
            "started": pack(list(self._started)),
        }

    def load_state_dict(self, state: Plain) -> None:
        self._worker.load_state_dict(state["worker"])
        self._clock.load_state_dict(state["clock"])
        self._started.extend(unpack(state["started"], {}))
