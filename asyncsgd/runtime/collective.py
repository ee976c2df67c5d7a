"""Ranks in step as a backend of the one loop: what synchronous training and pipelines share.

Rank 0 leads: it runs the loop, and before each thing that all ranks do together it tells the others what that is. They
only obey, and know no budget, no point of evaluation and no clock. The ranks step by themselves, each its own
parameters, so the server of such a run counts on an empty vector: rounds, batches and records are its rule's.

Counts, losses and evaluation sums always go through gloo. A dead rank fails the others' next collective at once, a
silent one after `TIMEOUT`."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncsgd.evaluation import Measured, measured_in_shards
from asyncsgd.flights import Arrived
from asyncsgd.measure import peak_bytes
from asyncsgd.optimizers import StepTakenByWorker
from asyncsgd.records.events import Gradient, Taken
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.base import TrainingClock
from asyncsgd.runtime.single import InOrder
from asyncsgd.runtime.worker_process import Straggling
from asyncsgd.schedules import Schedule
from asyncsgd.state import State
from asyncsgd.tasks.base import Sums, Task, decode_sums, encode_sums


class Replica(Protocol):
    """A model that is trained, as one of its ranks sees it. All ranks of a run call its methods together."""

    task: Task
    device: torch.device
    number: int
    """Which of the replicas this rank belongs to, from 0."""
    speakers: Sequence[int]
    """The rank of each replica that knows its losses and the sums of its evaluations."""

    @property
    def norm(self) -> float | None:
        """Of the last direction; see `asyncsgd.optimizers.Optimizer.norm`."""

    def evaluate(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets; where this rank is no speaker, sums over nothing."""

    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

    def check(self) -> None:
        """Assert that every parameter lies where it should."""

    def used(self) -> tuple[tuple[int, int, float | None, float, float, float], ...]:
        """See `StagesUsed`; empty where the model is not cut."""

    def state_dict(self) -> State:
        """Its part of a checkpoint, the same on every rank."""

    def load_state_dict(self, state: State) -> None:
        """Go on from the state of a whole run."""


class SynchronousReplica(Replica, Protocol):
    """A replica whose gradient is computed, exchanged and applied before the next one."""

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        """Compute the gradient of batch `index` and exchange it: every replica then has the sum of all.

        Args:
            weigh: given the batch's loss terms, returns its share of those of all replicas.
        """

    def step(self, learning_rate: float) -> None:
        """Step along the gradient."""


class Computed(NamedTuple):
    """A batch whose gradient is in the parameters of all ranks."""

    gradient: Gradient
    taken: Taken


Update = Callable[[int, int], Sequence[Computed]]
"""``update(first, count)`` takes the steps of batches `first` to ``first + count - 1``, or of fewer of them, and says
what became of each; called by all ranks together."""


class Rounds:
    """Synchronous training: every replica steps along the mean of all gradients.

        x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of its batch

    Replica r takes batch t N + r at step t. A replica is one rank (`asyncsgd.runtime.data_parallel`) or a row of them
    (`asyncsgd.runtime.pipeline`).

    Args:
        replica: this rank's.
        schedule: learning rate as a function of the samples that arrived at all replicas.
        straggling: makes this rank's gradients take longer, before they are exchanged. What a gradient would have taken
            is known from the step before, so the first is not stretched by a factor.
    """

    def __init__(
        self, replica: SynchronousReplica, ranks: AllRanks, schedule: Schedule, straggling: Straggling
    ) -> None:
        self._replica, self._ranks, self._schedule, self._straggling = replica, ranks, schedule, straggling
        self._own_seconds = 0.0

    def update(self, first: int, count: int) -> list[Computed]:
        """One step. Replicas from `count` on have no batch left and add nothing."""
        replica, speakers = self._replica, list(self._replica.speakers)
        began = time.perf_counter()
        waited = stretched = 0.0
        weights = torch.zeros(len(speakers), dtype=torch.float64)

        def weigh(weight: float) -> float:
            nonlocal weights, waited, stretched
            stretched = self._straggling.wait_seconds(self._own_seconds, first // len(speakers))
            time.sleep(stretched)  # before the exchange, in which the others wait for this rank
            asked = time.perf_counter()
            row = torch.tensor([weight if replica.number < count else 0.0], dtype=torch.float64)
            weights = self._ranks.gather(row)[speakers, 0]
            waited = time.perf_counter() - asked
            return float(row[0] / weights.sum())

        own = replica.number if replica.number < count else 0
        gradient = replica.gradient(first + own, weigh)
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        replica.step(self._schedule((first + count) * replica.task.batch_size))
        seconds = (computed - began - waited, waited, time.perf_counter() - computed)
        row = torch.tensor([gradient.loss, *seconds], dtype=torch.float64)
        rows = self._ranks.gather(row)[speakers].tolist()
        return [
            Computed(
                Gradient(loss, float(weights[number]), replica.task.batch_size),
                Taken(compute=compute, wait=wait, apply=apply),
            )
            for number, (loss, compute, wait, apply) in enumerate(rows[:count])
        ]


UPDATE, EVALUATE, PARAMETERS, STATE, STOP = range(5)


class InStep:
    """What the ranks of a run do together: rank 0 by the methods, the others by `follow`."""

    def __init__(self, replica: Replica, ranks: AllRanks, update: Update) -> None:
        self.replica, self._ranks, self._update = replica, ranks, update

    def follow(self) -> None:
        """Obey rank 0 until it says that the run has ended."""
        while (told := self._ranks.told(0, 0, 0))[0] != STOP:
            self._do(*told)

    def update(self, first: int, count: int) -> Sequence[Computed]:
        """See `Update`."""
        return self._lead(UPDATE, first, count)

    def evaluate(self) -> Measured:
        """Evaluate the parameters exactly, a shard per replica."""
        return self._lead(EVALUATE)

    def parameters(self) -> Tensor:
        """All parameters, `(P,)`."""
        return self._lead(PARAMETERS)

    def state_dict(self) -> State:
        """See `Replica.state_dict`."""
        return self._lead(STATE)

    def load_state_dict(self, state: State) -> None:
        """The ranks have loaded it, all of them together."""

    def stop(self) -> None:
        """Let the others go."""
        self._ranks.told(STOP, 0, 0)

    def _lead(self, what: int, first: int = 0, count: int = 0) -> Any:
        return self._do(*self._ranks.told(what, first, count))

    def _do(self, what: int, first: int, count: int) -> Any:
        if what == UPDATE:
            return self._update(first, count)
        if what == EVALUATE:
            return self._evaluated()
        return self.replica.parameters() if what == PARAMETERS else self.replica.state_dict()

    def _evaluated(self) -> Measured:
        replica, began = self.replica, time.perf_counter()
        texts = self._ranks.gather_texts(encode_sums(replica.evaluate()))
        peaks = self._ranks.gather(torch.tensor(peak_bytes(replica.device))).tolist()
        seconds, stages = time.perf_counter() - began, replica.used()
        replica.check()
        shards = [decode_sums(texts[rank]) for rank in replica.speakers]
        by_rank = tuple((rank, int(resident), int(cuda)) for rank, (resident, cuda) in enumerate(peaks))
        return measured_in_shards(replica.task, shards, seconds, by_rank, stages)


class Collective(InOrder):
    """The backend of a run whose ranks step by themselves, in rank 0.

    Args:
        ranks: all of them.
        optimizer: of the server, which tells the norm of the ranks' step.
        num_workers: of the server.
        ahead: given the next batch, how many the ranks compute at once; None: as many as are in flight.
    """

    KEPT = ("_clock", "_started", "ranks")

    def __init__(
        self,
        ranks: InStep,
        optimizer: StepTakenByWorker,
        clock: TrainingClock,
        num_workers: int,
        ahead: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(clock, num_workers)
        self.ranks, self._optimizer, self._ahead = ranks, optimizer, ahead
        self._computed: collections.deque[Computed] = collections.deque()

    def next(self, until: float) -> Arrived | None:
        if not self._clock.running:
            self._clock.resume()
        if not self._computed:
            if self.now >= until:
                return None
            first = self._started[0].batches[0][1]
            count = len(self._started) if self._ahead is None else self._ahead(first)
            self._computed.extend(self.ranks.update(first, count))
            self._optimizer.norm = self.ranks.replica.norm
        work = self._started.pop(0)
        gradient, taken = self._computed.popleft()
        return Arrived(work, work.version, torch.empty(0), gradient, self.now - work.began, taken)

    @property
    def settled(self) -> bool:  # type: ignore[override]  # what is a constant there
        return not self._computed

    def evaluate(self, parameters: Tensor) -> Measured:
        self._clock.pause()
        return self.ranks.evaluate()
