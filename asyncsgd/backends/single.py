"""One process as a backend: the single process that every mode is compared with.

Gradients are computed in the order of their starts, at the server's parameters themselves. So nothing is copied, and
every delay is 0. Several simulated workers under the rule `Synchronous` accumulate as many batches per update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asyncsgd.core.limits import TrainingClock
from asyncsgd.core.protocol import Arrived, Measured, Work
from asyncsgd.records.events import Taken
from asyncsgd.worker.evaluation import measured_in_shards
from asyncsgd.worker.profile import peak_bytes
from asyncsgd.worker.worker import Worker


class InOrder:
    """The common part of backends whose gradients arrive in the order of their starts, on the measured clock."""

    may_stop = True  # this and the next as in `asyncsgd.core.protocol.Backend`, `KEPT` as in `asyncsgd.core.state`
    loses_flights = False
    KEPT: tuple[str, ...] = ("_clock", "_started")

    def __init__(self, clock: TrainingClock, num_workers: int) -> None:
        self.present = range(num_workers)
        self._clock = clock
        self._started: list[Work] = []

    @property
    def now(self) -> float:
        return self._clock.seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._clock.pause()

    def stop(self, works: Sequence[Work]) -> None:
        """Do nothing: every rule of these modes waits for whole rounds, and abandons nothing."""

    def start(self, works: Sequence[Work]) -> None:
        self._started.extend(works)

    def freeze(self) -> tuple[()]:
        return ()


class SingleBackend(InOrder):
    """Computes every gradient in this process.

    Args:
        worker: computes the gradients. Its flat parameters are the server's.
        clock: the training clock, which runs while gradients are computed.
        num_workers: the number of simulated workers.
    """

    KEPT = ("_worker", "_clock", "_started")

    def __init__(self, worker: Worker, clock: TrainingClock, num_workers: int) -> None:
        super().__init__(clock, num_workers)
        self._worker = worker

    def next(self, until: float) -> Arrived | None:
        if not self._clock.running:
            self._clock.resume()
        if self.now >= until:
            return None
        work = self._started.pop(0)
        began = time.perf_counter()
        gradient = self._worker.gradient(work.batches[0].first)
        flat = self._worker.flat
        if flat.parameters.device.type == "cuda":
            torch.cuda.synchronize()
        taken = Taken(compute=time.perf_counter() - began)
        seconds = self.now - work.began
        moved = None if flat.statistics is None else flat.statistics.moved
        return Arrived(work, work.version, flat.gradients, gradient, seconds, taken, moved)

    def evaluate(self, parameters: Tensor) -> Measured:
        self._clock.pause()
        began = time.perf_counter()
        num_shards = len(self.present)
        # All shards are evaluated with the same statistics, so they are estimated again once.
        shards = [self._worker.evaluate(shard, num_shards, estimates=shard == 0) for shard in range(num_shards)]
        peaks = ((0, *peak_bytes(parameters.device)),)
        return measured_in_shards(self._worker.task, shards, time.perf_counter() - began, peaks)
