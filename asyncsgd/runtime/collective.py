"""Ranks in step as a backend of the one loop: what synchronous training and pipelines share.

Rank 0 leads: it runs the loop, and before each thing that all ranks do together it tells the others what that is. They
only obey, and know no budget, no point of evaluation and no clock. The ranks step by themselves, each its own
parameters, so the server of such a run counts on an empty vector: rounds, batches and records are its rule's.

Counts, losses and evaluation sums always go through gloo. A dead rank fails the others' next collective at once, a
silent one after `TIMEOUT`."""

from __future__ import annotations

import abc
import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.evaluation import Measured, measured_in_shards
from asyncsgd.flights import Arrived
from asyncsgd.measure import peak_bytes
from asyncsgd.optimizers import StepTakenByWorker
from asyncsgd.records.events import Gradient, Taken
from asyncsgd.runtime.base import TrainingClock
from asyncsgd.runtime.launch import TIMEOUT
from asyncsgd.runtime.single import InOrder
from asyncsgd.runtime.worker_process import Straggling
from asyncsgd.schedules import Schedule
from asyncsgd.state import State
from asyncsgd.tasks.base import Sums, Task, decode_sums, encode_sums


class AllRanks:
    """All ranks of the initialised process group, over gloo. Every rank constructs it, and calls its methods in the
    same order.
    """

    def __init__(self) -> None:
        self.rank, self.number = dist.get_rank(), dist.get_world_size()
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def take(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor`, on the CPU, with what it holds on the rank `source`."""
        dist.broadcast(tensor, source, group=self._gloo)

    def told(self, *numbers: int) -> tuple[int, ...]:
        """Rank 0's numbers, on every rank."""
        row = torch.tensor(numbers)
        self.take(row, 0)
        return tuple(row.tolist())

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, `(N, len(row))`, on every rank; `row` lies on the CPU."""
        rows = [torch.empty_like(row) for _ in range(self.number)]
        dist.all_gather(rows, row, group=self._gloo)
        return torch.stack(rows)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes on every rank. Nothing that comes over a network is unpickled."""
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(encoded)]))[:, 0].tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(encoded)] = encoded
        return [each[:length].numpy().tobytes() for each, length in zip(self.gather(row), lengths, strict=True)]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text on every rank."""
        return [content.decode() for content in self.gather_bytes(text.encode())]


class Computed(NamedTuple):
    """A batch whose gradient is in the parameters of all ranks."""

    gradient: Gradient
    taken: Taken


class Replica(abc.ABC):
    """A model that is trained, as one of its ranks sees it: every replica steps along the mean of all gradients.

        x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of its batch

    Replica r takes batch t N + r at step t. A replica is one rank (`asyncsgd.runtime.data_parallel`) or a row of them
    (`asyncsgd.runtime.pipeline`). All ranks of a run call its methods together.

    Args:
        number: which of the replicas this rank belongs to, from 0.
        speakers: the rank of each replica that knows its losses and the sums of its evaluations.
        rate: learning rate as a function of the samples that arrived at all replicas.
        straggling: makes this rank's gradients take longer, before they are exchanged. What a gradient would have taken
            is known from the step before, so the first is not stretched by a factor.
    """

    norm: float | None = None
    """Of the last direction; see `asyncsgd.optimizers.Optimizer.norm`."""

    def __init__(
        self,
        task: Task,
        device: torch.device,
        ranks: AllRanks,
        number: int,
        speakers: Sequence[int],
        rate: Schedule,
        straggling: Straggling,
    ) -> None:
        self.task, self.device, self.ranks = task, device, ranks
        self.number, self.speakers = number, list(speakers)
        self._rate, self._straggling = rate, straggling
        self._own_seconds = 0.0

    @abc.abstractmethod
    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        """Compute the gradient of batch `index` and exchange it: every replica then has the sum of all.

        Args:
            weigh: given the batch's loss terms, returns its share of those of all replicas.
        """

    @abc.abstractmethod
    def step(self, learning_rate: float) -> None:
        """Step along the gradient."""

    @abc.abstractmethod
    def sums(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets; where this rank is no speaker, sums over nothing."""

    @abc.abstractmethod
    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

    @abc.abstractmethod
    def check(self) -> None:
        """Assert that every parameter lies where it should."""

    @abc.abstractmethod
    def state_dict(self) -> State:
        """Its part of a checkpoint, the same on every rank."""

    @abc.abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Go on from the state of a whole run."""

    def used(self) -> tuple[tuple[int, int, float | None, float, float, float], ...]:
        """What stages have done since the call before; see `asyncsgd.records.events.StagesUsed`."""
        return ()

    def update(self, first: int, count: int) -> list[Computed]:
        """Take the step of batches `first` to ``first + count - 1``, or the steps of some of them, and say what became
        of each. Replicas from `count` on have no batch left and add nothing.
        """
        began = time.perf_counter()
        waited = stretched = 0.0
        weights = torch.empty(0)

        def weigh(weight: float) -> float:
            nonlocal weights, waited, stretched
            stretched = self._straggling.wait_seconds(self._own_seconds, first // len(self.speakers))
            time.sleep(stretched)  # before the exchange, in which the others wait for this rank
            asked = time.perf_counter()
            row = torch.tensor([weight if self.number < count else 0.0], dtype=torch.float64)
            weights = self.ranks.gather(row)[self.speakers, 0]
            waited = time.perf_counter() - asked
            return float(row[0] / weights.sum())

        gradient = self.gradient(first + (self.number if self.number < count else 0), weigh)
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        self.step(self._rate((first + count) * self.task.batch_size))
        seconds = (computed - began - waited, waited, time.perf_counter() - computed)
        rows = self.ranks.gather(torch.tensor([gradient.loss, *seconds], dtype=torch.float64))[self.speakers].tolist()
        return [
            Computed(Gradient(loss, weight, self.task.batch_size), Taken(compute=compute, wait=wait, apply=apply))
            for weight, (loss, compute, wait, apply) in zip(weights.tolist()[:count], rows, strict=False)
        ]

    def evaluate(self) -> Measured:
        """Evaluate the parameters exactly, a shard per replica."""
        began = time.perf_counter()
        texts = self.ranks.gather_texts(encode_sums(self.sums()))
        peaks = self.ranks.gather(torch.tensor(peak_bytes(self.device))).tolist()
        seconds, stages = time.perf_counter() - began, self.used()
        self.check()
        shards = [decode_sums(texts[rank]) for rank in self.speakers]
        by_rank = tuple((rank, int(resident), int(cuda)) for rank, (resident, cuda) in enumerate(peaks))
        return measured_in_shards(self.task, shards, seconds, by_rank, stages)


STOP, UPDATE, EVALUATE, PARAMETERS, STATE = range(5)


class InStep:
    """What the ranks of a run do together: rank 0 by the methods, the others by `follow`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def follow(self) -> None:
        """Obey rank 0 until it says that the run has ended."""
        while (told := self.replica.ranks.told(STOP, 0, 0))[0] != STOP:
            self._do(*told)

    def update(self, first: int, count: int) -> Sequence[Computed]:
        """See `Replica.update`."""
        return self._lead(UPDATE, first, count)

    def evaluate(self) -> Measured:
        """See `Replica.evaluate`."""
        return self._lead(EVALUATE)

    def parameters(self) -> Tensor:
        """See `Replica.parameters`."""
        return self._lead(PARAMETERS)

    def state_dict(self) -> State:
        """See `Replica.state_dict`."""
        return self._lead(STATE)

    def load_state_dict(self, state: State) -> None:
        """The ranks have loaded it, all of them together."""

    def stop(self) -> None:
        """Let the others go."""
        self.replica.ranks.told(STOP, 0, 0)

    def _lead(self, what: int, first: int = 0, count: int = 0) -> Any:
        return self._do(*self.replica.ranks.told(what, first, count))

    def _do(self, what: int, first: int, count: int) -> Any:
        replica = self.replica
        if what == UPDATE:
            return replica.update(first, count)
        return {EVALUATE: replica.evaluate, PARAMETERS: replica.parameters, STATE: replica.state_dict}[what]()


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
