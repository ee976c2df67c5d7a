"""Synchronous training: every replica of the model steps along the mean of all gradients.

    x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of replica r's batch

Replica r takes batch t N + r at step t. A replica is one rank (`data_parallel`) or a row of them (`pipeline`); it
exchanges gradients with the others and takes its part of the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from asyncsgd.records.events import APPLIED, DONE, HELD, INTERRUPTED, Fault, Gradient, Taken, arrival
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.base import Result, diverged
from asyncsgd.runtime.lockstep import GOES_ON, STOP_REQUESTED, TIME_IS_UP, Conditions, Lockstep, Replica
from asyncsgd.runtime.worker_process import Straggling
from asyncsgd.schedules import Schedule


class SynchronousReplica(Replica, Protocol):
    """A replica whose gradient is computed, exchanged and applied before the next one."""

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        """Compute the gradient of batch `index` and exchange it: every replica then has the sum of all.

        Args:
            weigh: given the batch's loss terms, returns its share of those of all replicas.
        """

    def step(self, learning_rate: float) -> None:
        """Step along the gradient."""

    @property
    def norm(self) -> float | None:
        """See `asyncsgd.optimizers.Optimizer.norm`."""


class AllReduce(Lockstep):
    """One rank of a synchronous run; see `Lockstep` for what it takes.

    Args:
        straggling: makes this rank's gradients take longer, before they are exchanged. What a gradient would have taken
            is known from the step before, so the first is not stretched by a factor.
    """

    def __init__(
        self,
        replica: SynchronousReplica,
        ranks: AllRanks,
        schedule: Schedule,
        conditions: Conditions,
        straggling: Straggling,
    ) -> None:
        super().__init__(replica, ranks, schedule, conditions)
        self._synchronous = replica
        self._straggling = straggling
        self._own_seconds = 0.0

    def _advance(self, first: int, num_batches: int | None) -> Result | None:
        """One update; replicas that have no batch left add nothing."""
        busy = self._num_workers if num_batches is None else min(self._num_workers, num_batches - first)
        began = time.perf_counter()
        waited = stretched = 0.0
        weights = torch.zeros(self._num_workers, dtype=torch.float64)
        control = self._control()

        def weigh(weight: float) -> float:
            nonlocal weights, waited, control, stretched
            stretched = self._straggling.wait_seconds(self._own_seconds, self.version)
            time.sleep(stretched)  # before the exchange, in which the others wait for this rank
            asked = time.perf_counter()
            number = self._replica.number
            row = torch.tensor([weight if number < busy else 0.0, control, self._clock.seconds], dtype=torch.float64)
            table = self._ranks.gather(row)
            waited = time.perf_counter() - asked
            weights, control, self._agreed_seconds = table[self._speakers, 0], int(table[0, 1]), float(table[0, 2])
            return float(row[0] / weights.sum())

        own = self._replica.number if self._replica.number < busy else 0
        gradient = self._synchronous.gradient(first + own, weigh)
        if control == TIME_IS_UP:
            return Result(DONE)
        if control != GOES_ON:
            self._save()  # of the version before this step
        if control == STOP_REQUESTED:
            return Result(INTERRUPTED, "interrupted by the user")
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        self.num_samples += busy * self._batch_size
        self._synchronous.step(self._schedule(self.num_samples))
        self.version += 1
        applied = time.perf_counter()
        seconds = (computed - began - waited, waited, applied - computed)
        return self._record(first, busy, weights, gradient, seconds)

    def _record(
        self,
        first: int,
        busy: int,
        weights: Tensor,
        gradient: Gradient,
        seconds: tuple[float, ...],
    ) -> Result | None:
        """Report one Event per replica, the last one taking the step, as the rule `Synchronous` would; look for NaN."""
        row = torch.tensor([gradient.loss, *seconds], dtype=torch.float64)
        table = self._ranks.gather(row)[self._speakers]
        version = self.version - 1
        for rank in range(busy):
            last = rank == busy - 1
            compute, wait, apply = table[rank, 1:].tolist()
            arrived = self.num_samples - (busy - 1 - rank) * self._batch_size
            self._report(
                arrival(
                    Gradient(float(table[rank, 0]), float(weights[rank]), self._batch_size),
                    Taken(compute=compute, wait=wait, apply=apply),
                    dispatch=first + rank,
                    worker=rank,
                    batches=((0, first + rank, first + rank + 1),),
                    read_version=version,
                    delay=0,
                    version=version + last,
                    outcome=APPLIED if last else HELD,
                    uses=tuple((first + r, 0) for r in range(busy)) if last else (),
                    learning_rate=self._schedule(arrived),
                    train_seconds=self._clock.seconds,
                    total_samples=arrived,
                    gradient_norm=self._synchronous.norm if last else None,
                )
            )
        for rank in range(busy):
            if not math.isfinite(float(table[rank, 0])):
                what = f"the loss of rank {rank} at version {version} is {float(table[rank, 0])}"
                self._report(Fault(what, rank, self.version, self._clock.seconds))
                return diverged(what)
        return None
