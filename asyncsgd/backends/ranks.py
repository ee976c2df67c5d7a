"""Ranks in step as a backend of the one loop: what synchronous training and pipelines share.

Rank 0 leads: it runs the loop, and before each thing that all ranks do together it tells the others what that is. They
only obey, and know no budget, no point of evaluation and no clock. The ranks step by themselves, each its own
parameters, so the server of such a run counts on an empty vector: rounds, batches and records are its rule's.

Counts, losses and evaluation sums always go through gloo. A dead rank fails the others' next collective at once, a
silent one after `TIMEOUT`."""

from __future__ import annotations

import abc
import collections
import json
import math
import time
import zlib
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.backends.launch import TIMEOUT
from asyncsgd.backends.process_setup import Straggling
from asyncsgd.backends.single import InOrder
from asyncsgd.core.checkpoints import KeptState
from asyncsgd.core.limits import EvaluationPoints, Limits, TrainingClock
from asyncsgd.core.optimizers import StepTakenByWorker
from asyncsgd.core.protocol import Arrived, Measured
from asyncsgd.core.state import State, restore, state_of
from asyncsgd.errors import RunError
from asyncsgd.records.events import Gradient, Taken
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import Sums, decode_sums, encode_sums
from asyncsgd.worker.evaluation import measured_in_shards
from asyncsgd.worker.profile import peak_bytes
from asyncsgd.worker.worker import Replicated, Worker

LOST_CONTACT = 3
"""Exit code of a rank that failed because another one is gone."""


class AllRanks:
    """All ranks of the initialised process group, over gloo. Every rank constructs it, and calls its methods in the
    same order.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.number = dist.get_world_size()
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
        return [content.decode() for content in self.gather_bytes(text.encode())]


Computed = tuple[Gradient, Taken]
"""A batch whose gradient is in the parameters of all ranks, and how long its parts took."""

LONGEST_GROUP = 8
"""Batches of ``2bw``: a bubble of (p - 1) / (8 m + p - 1), and buffers for the hidden states of all of them."""


class Replica(abc.ABC):
    """A model that is trained, as one of its ranks sees it: every replica steps along the mean of all gradients.

        x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of its batch

    Replica r takes batch t N + r at step t. A replica is one rank (`DataParallel`) or a row of them
    (`asyncsgd.pipeline.replica`). All ranks of a run construct it and call its methods together, on the initialised
    process group. Gradients take as long as the run's speeds say, before they are exchanged. What a gradient
    would have taken is known from the step before, so the first is not stretched by a factor.

    Args:
        stages: ranks of a replica, of which the last knows its losses and the sums of its evaluations.
    """

    norm: float | None = None
    """Of the last direction; see `asyncsgd.core.optimizers.Optimizer.norm`."""

    def __init__(self, run: Run, stages: int = 1) -> None:
        self.task = run.task
        self.device = torch.device(run.device)
        self.ranks = AllRanks()
        self.number, self.speakers = self.ranks.rank // stages, [*range(stages - 1, self.ranks.number, stages)]
        self._rate, self._straggling = run.schedule, Straggling.of(run, self.number)
        self._own_seconds = 0.0

    @abc.abstractmethod
    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        """Compute the gradient of batch `index` and exchange it: every replica then has the sum of all. `weigh` tells
        the share of the batch's loss terms in those of all replicas.
        """

    @abc.abstractmethod
    def step(self, learning_rate: float, frozen: tuple[str, ...]) -> None:
        """Step along the gradient all but the parameters `frozen`."""

    def follow_statistics(self, weights: Tensor) -> None:
        """Let running statistics follow those of the first of the batches with these loss terms that has some; where
        the model has none, as in pipelines, nothing moves.
        """
        return

    @abc.abstractmethod
    def sums(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets; where this rank is no speaker, sums over nothing.
        Asserts that every parameter lies where it should.
        """

    @abc.abstractmethod
    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

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
            total = float(weights.sum())
            return float(row[0]) / total if total else 0.0

        gradient = self.gradient(first + (self.number if self.number < count else 0), weigh)
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        if bool(weights.any()):
            self.step(self._rate((first + count) * self.task.batch_size), gradient.frozen)
        self.follow_statistics(weights[:count])
        frozen = json.dumps(gradient.frozen)
        digest = zlib.crc32(frozen.encode())
        row = [gradient.loss, computed - began - waited, waited, time.perf_counter() - computed, digest]
        rows = self.ranks.gather(torch.tensor(row, dtype=torch.float64))[self.speakers].tolist()
        if len({row.pop() for row in rows}) > 1:
            raise RunError(
                f"ranks have frozen (requires_grad) different parameters in one update: "
                f"{', '.join(self.ranks.gather_texts(frozen))}; freeze the same ones on all of them at the same step"
            )
        return [
            (Gradient(loss, weight, self.task.batch_size), Taken(compute=compute, wait=wait, apply=apply))
            for weight, (loss, compute, wait, apply) in zip(weights.tolist()[:count], rows, strict=False)
        ]

    def evaluate(self) -> Measured:
        """Evaluate the parameters exactly, a shard per replica."""
        began = time.perf_counter()
        texts = self.ranks.gather_texts(encode_sums(self.sums()))
        rows = self.ranks.gather(torch.tensor(peak_bytes(self.device))).tolist()
        peaks = tuple((rank, resident, cuda) for rank, (resident, cuda) in enumerate(rows))
        seconds = time.perf_counter() - began
        stages = self.used()
        shards = [decode_sums(texts[rank]) for rank in self.speakers]
        return measured_in_shards(self.task, shards, seconds, peaks, stages)


class DataParallel(Replica):
    """A replica of one rank, whose gradients torch's DistributedDataParallel exchanges (gloo on CPU, NCCL on CUDA).

    DDP averages gradients over ranks, so each rank's loss is scaled by N times its share of all loss terms before its
    backward pass; without that the result would be a mean of means. The replicas take identical steps.
    """

    def __init__(self, run: Run, worker: Worker) -> None:
        super().__init__(run)
        self._worker = worker
        self._flat = worker.flat
        self._flat.may_freeze = True
        self._optimizer = run.recipe.on(self._flat.parameters, self._flat.layout)
        worker.loss = Replicated(worker.loss)
        self._flat.check()

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        return self._worker.gradient(index, lambda weight: self.ranks.number * weigh(weight))

    def step(self, learning_rate: float, frozen: tuple[str, ...]) -> None:
        self._optimizer.step(self._flat.gradients, learning_rate, frozen=frozen)
        self.norm = self._optimizer.norm

    def follow_statistics(self, weights: Tensor) -> None:
        """As DistributedDataParallel does, which sends rank 0's buffers to the others."""
        statistics = self._flat.statistics
        if statistics is None or not bool(weights.any()):
            return
        first = int(weights.nonzero()[0])
        if self.ranks.rank == first:
            statistics.values.copy_(statistics.moved[0])
        self.ranks.take(statistics.values, first)
        statistics.reestimated = None

    def sums(self) -> Sums:
        self._flat.check()
        return self._worker.evaluate(self.number, self.ranks.number)

    def parameters(self) -> Tensor:
        return self._flat.parameters

    def state_dict(self) -> State:
        return {
            "parameters": self._flat.parameters,
            "optimizer": state_of(self._optimizer),
            "statistics": state_of(self._flat.statistics),
            "workers": self.ranks.gather_texts(json.dumps(state_of(self._worker))),
        }

    def load_state_dict(self, state: State) -> None:
        """DDP orders its buckets anew after the first backward pass, and the order decides how sums are rounded. So a
        gradient that nobody uses is computed first, where the run before had computed one.
        """
        kept = KeptState(state)
        assert kept.of_ranks is not None
        if kept.version > 0:
            self._worker.gradient(0, lambda weight: 1.0)
        own = kept.of_ranks
        with torch.no_grad():
            self._flat.parameters.copy_(own["parameters"])
        if self._flat.statistics is not None:
            restore(self._flat.statistics, own["statistics"])
        restore(self._optimizer, own["optimizer"])
        restore(self._worker, json.loads(own["workers"][self.number]))


STOP, UPDATE, EVALUATE, PARAMETERS, STATE = range(5)


class InStep:
    """What the ranks of a run do together, see `Replica`: rank 0 by the other methods, the others by `follow`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def follow(self) -> None:
        """Obey rank 0 until it says that the run has ended."""
        while (told := self.replica.ranks.told(STOP, 0, 0))[0] != STOP:
            self._do(*told)

    def _lead(self, what: int, first: int = 0, count: int = 0) -> Any:
        return self._do(*self.replica.ranks.told(what, first, count))

    def _do(self, what: int, first: int, count: int) -> Any:
        if what == UPDATE:
            return self.replica.update(first, count)
        if what == EVALUATE:
            return self.replica.evaluate()
        return self.replica.parameters() if what == PARAMETERS else self.replica.state_dict()

    update = partialmethod(_lead, UPDATE)
    evaluate = partialmethod(_lead, EVALUATE)
    parameters = partialmethod(_lead, PARAMETERS)
    state_dict = partialmethod(_lead, STATE)

    def load_state_dict(self, state: State) -> None:
        """The ranks have loaded it, all of them together."""

    def stop(self) -> None:
        """Let the others go."""
        self.replica.ranks.told(STOP, 0, 0)


class RanksBackend(InOrder):
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
        self.ranks = ranks
        self._optimizer = optimizer
        self._ahead = ahead
        self._computed: collections.deque[Computed] = collections.deque()

    def next(self, until: float) -> Arrived | None:
        if not self._clock.running:
            self._clock.resume()
        if not self._computed:
            if self.now >= until:
                return None
            first = self._started[0].batches[0].first
            count = len(self._started) if self._ahead is None else self._ahead(first)
            self._computed.extend(self.ranks.update(first, count))
            self._optimizer.norm = self.ranks.replica.norm
        work = self._started.pop(0)
        gradient, taken = self._computed.popleft()
        return Arrived(work, work.version, torch.empty(0), gradient, self.now - work.began, taken)

    @property
    def may_stop(self) -> bool:  # type: ignore[override]  # what is a constant there
        return not self._computed

    def evaluate(self, parameters: Tensor) -> Measured:
        self._clock.pause()
        return self.ranks.evaluate()


def groups(budget: Limits, evaluations: int, batch_size: int) -> Callable[[int], int]:
    """How many batches from the next one on ``2bw`` computes in one group: up to the next point of evaluation."""
    points = EvaluationPoints(budget, evaluations).in_samples

    def ahead(first: int) -> int:
        if points.next == math.inf:
            return LONGEST_GROUP
        points.take_up_to(first * batch_size)
        return math.ceil(max(1, min(LONGEST_GROUP, points.next / batch_size - first)))

    return ahead


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("gloo", "nccl", "connection", "socket"))
