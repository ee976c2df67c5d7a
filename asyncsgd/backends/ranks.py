"""Synchronous ranks as a backend of `asyncsgd.core.loop.Loop`: what synchronous training and pipelines share.

Rank 0 leads. It runs the loop, and before all ranks do something together it tells the others what that is. These only
obey, and know no budget, no point of evaluation and no clock. Every rank steps its own parameters. So the server of
such a run has an empty parameter vector: its rule counts rounds and batches, and it writes the records.

Counts, losses and evaluation sums always go through gloo. A dead rank makes the others' next collective fail at once, a
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

import numpy as np
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
from asyncsgd.errors import RunError, is_out_of_memory
from asyncsgd.records.events import Gradient, StageUse, Taken
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import Sums, decode_sums, encode_sums
from asyncsgd.worker.evaluation import measured_in_shards
from asyncsgd.worker.profile import peak_bytes
from asyncsgd.worker.worker import Replicated, Worker

LOST_CONTACT = 3
"""The exit code of a rank that failed because another one is gone."""


class AllRanks:
    """All ranks of the initialised process group, over gloo. Every rank constructs it, and calls its methods in the
    same order.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor`, on the CPU, with what it holds on the rank `source`."""
        dist.broadcast(tensor, source, group=self._gloo)

    def from_rank_0(self, *numbers: int) -> tuple[int, ...]:
        """Return the numbers of rank 0 on every rank. Those of other ranks only say how many they are."""
        row = torch.tensor(numbers)
        self.broadcast(row, 0)
        return tuple(row.tolist())

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, `(N, len(row))`, on every rank; `row` lies on the CPU."""
        rows = [torch.empty_like(row) for _ in range(self.num_ranks)]
        dist.all_gather(rows, row, group=self._gloo)
        return torch.stack(rows)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes on every rank. Nothing that comes over a network is unpickled."""
        encoded = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))  # torch.frombuffer refuses no bytes
        lengths = self.gather(torch.tensor([len(encoded)]))[:, 0].tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(encoded)] = encoded
        contents = []
        for padded, length in zip(self.gather(row), lengths, strict=True):
            contents.append(padded[:length].numpy().tobytes())
        return contents

    def gather_texts(self, text: str) -> list[str]:
        return [content.decode() for content in self.gather_bytes(text.encode())]


GradientAndTimes = tuple[Gradient, Taken]
"""A gradient along which all ranks have stepped, and how long its parts took."""

LONGEST_GROUP = 8
"""``2bw`` computes at most so many batches in one group. With g batches of m micro-batches on p stages the bubble is
(p - 1) / (g m + p - 1), so a longer group would have a smaller one, and would need more buffers for hidden states."""


class Replica(abc.ABC):
    """A replica of the model, as one of its ranks sees it. Every replica steps along the mean of all gradients.

        x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of its batch

    Replica r takes batch t N + r at step t. A replica is one rank (`DataParallel`) or a row of them
    (`asyncsgd.pipeline.replica`). All ranks of a run construct it and call its methods together, on the initialised
    process group. Each rank waits before the exchange until its gradient has taken as long as the run's speeds say. A
    speed that is a factor multiplies the seconds of the gradient before, so it does not slow the first step.

    Args:
        stages: the number of ranks of a replica. Its last rank knows its losses and the sums of its evaluations.
    """

    norm: float | None = None
    """The norm of the last direction; see `asyncsgd.core.optimizers.Optimizer.norm`."""

    def __init__(self, run: Run, stages: int = 1) -> None:
        self.task = run.task
        self.device = torch.device(run.device)
        self.ranks = AllRanks()
        self.replica_number = self.ranks.rank // stages
        self.last_ranks = [*range(stages - 1, self.ranks.num_ranks, stages)]
        """The last rank of each replica."""
        self._learning_rate_at = run.schedule
        self._straggling = Straggling.of(run, self.replica_number)
        self._own_seconds = 0.0
        """The seconds that this rank's last gradient took, without waiting."""

    @abc.abstractmethod
    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        """Compute the gradient of batch `index` and exchange it, weighted by its share: every replica then has the mean
        of the equation above.

        Args:
            weigh: given the number of the batch's loss terms, returns their share in those of all replicas. Every rank
                must call it once. It blocks until all ranks have called it.
        """

    @abc.abstractmethod
    def step(self, learning_rate: float, frozen: tuple[str, ...]) -> None:
        """Step all parameters but those that are `frozen` along the gradient."""

    def follow_statistics(self, weights: Tensor) -> None:
        """Set the running statistics to those of the first replica whose batch has loss terms. Nothing happens where
        the model has none, as in pipelines.

        Args:
            weights: the number of loss terms of each replica's batch.
        """
        return

    @abc.abstractmethod
    def sums(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets, on its last rank; on its other ranks sums over
        nothing. Asserts that every parameter lies where it should.
        """

    @abc.abstractmethod
    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

    @abc.abstractmethod
    def state_dict(self) -> State:
        """The part of a checkpoint that the ranks keep. Every rank returns the same."""

    @abc.abstractmethod
    def resume_from(self, state: State) -> None:
        """Continue from `state`, which is that of the whole run, as a checkpoint has it. What `state_dict` returned is
        the part of it that `KeptState.of_ranks` finds.
        """

    def used(self) -> tuple[StageUse, ...]:
        """Return what each stage of each replica has done since the last call; nothing without stages."""
        return ()

    def update(self, first: int, count: int) -> list[GradientAndTimes]:
        """Take one step along the mean of batches `first` to ``first + count - 1``. Replicas from `count` on have no
        batch left and add nothing. With two versions there is a step for each batch whose gradient is ready.

        Returns:
            What became of each batch of which a step was taken, in order.
        """
        has_batch = self.replica_number < count
        # A replica without a batch computes the first one too, with weight 0: the exchange needs all ranks.
        index = first + self.replica_number if has_batch else first
        began = time.perf_counter()
        straggling_seconds = self._straggling.wait_seconds(self._own_seconds, first // len(self.last_ranks))
        weighing = _Weighing(self, has_batch, straggling_seconds)
        gradient = self.gradient(index, weighing.weigh)
        computed = time.perf_counter()
        compute_seconds = computed - began - weighing.waited_seconds
        self._own_seconds = compute_seconds - straggling_seconds
        if bool(weighing.weights.any()):
            self.step(self._learning_rate_at((first + count) * self.task.batch_size), gradient.frozen)
        weights = weighing.weights[:count]
        self.follow_statistics(weights)
        frozen = json.dumps(gradient.frozen)
        digest = zlib.crc32(frozen.encode())
        apply_seconds = time.perf_counter() - computed
        row = [gradient.loss, compute_seconds, weighing.waited_seconds, apply_seconds, digest]
        rows = self.ranks.gather(torch.tensor(row, dtype=torch.float64))[self.last_ranks].tolist()
        if len({digest for *_, digest in rows}) > 1:
            raise RunError(
                f"ranks have frozen (requires_grad) different parameters in one update: "
                f"{', '.join(self.ranks.gather_texts(frozen))}; freeze the same ones on all of them at the same step"
            )
        updates = []
        for weight, (loss, compute, wait, apply, _) in zip(weights.tolist(), rows, strict=False):
            taken = Taken(compute=compute, wait=wait, apply=apply)
            updates.append((Gradient(loss, weight, self.task.batch_size), taken))
        return updates

    def evaluate(self) -> Measured:
        """Evaluate the parameters exactly, a shard per replica."""
        began = time.perf_counter()
        texts = self.ranks.gather_texts(encode_sums(self.sums()))
        rows = self.ranks.gather(torch.tensor(peak_bytes(self.device))).tolist()
        peaks = tuple((rank, resident, cuda) for rank, (resident, cuda) in enumerate(rows))
        seconds = time.perf_counter() - began
        stages = self.used()
        shards = [decode_sums(texts[rank]) for rank in self.last_ranks]
        return measured_in_shards(self.task, shards, seconds, peaks, stages)


class _Weighing:
    """The exchange of the numbers of loss terms in one update.

    Args:
        replica: the replica of this rank.
        has_batch: whether its loss terms count.
        straggling_seconds: the rank sleeps so long before the exchange, in which the others wait for it.
    """

    def __init__(self, replica: Replica, has_batch: bool, straggling_seconds: float) -> None:
        self._replica = replica
        self._has_batch = has_batch
        self._straggling_seconds = straggling_seconds
        self.waited_seconds = 0.0
        """The seconds of the exchange, in which this rank waits for the others."""
        self.weights = torch.empty(0)
        """The number of loss terms of each replica's batch."""

    def weigh(self, weight: float) -> float:
        """Exchange the number of loss terms, and return this replica's share of all; see `Replica.gradient`."""
        if not self._has_batch:
            weight = 0.0
        time.sleep(self._straggling_seconds)
        began = time.perf_counter()
        row = torch.tensor([weight], dtype=torch.float64)
        self.weights = self._replica.ranks.gather(row)[self._replica.last_ranks, 0]
        self.waited_seconds = time.perf_counter() - began
        total = float(self.weights.sum())
        return weight / total if total else 0.0


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
        return self._worker.gradient(index, lambda weight: self.ranks.num_ranks * weigh(weight))

    def step(self, learning_rate: float, frozen: tuple[str, ...]) -> None:
        self._optimizer.step(self._flat.gradients, learning_rate, frozen=frozen)
        self.norm = self._optimizer.norm

    def follow_statistics(self, weights: Tensor) -> None:
        """Broadcast the running statistics of the first replica whose batch has loss terms, as DistributedDataParallel
        broadcasts the buffers of rank 0."""
        statistics = self._flat.statistics
        if statistics is None or not bool(weights.any()):
            return
        first = int(weights.nonzero()[0])
        if self.ranks.rank == first:
            statistics.values.copy_(statistics.moved[0])
        self.ranks.broadcast(statistics.values, first)
        statistics.reestimated = None

    def sums(self) -> Sums:
        self._flat.check()
        return self._worker.evaluate(self.replica_number, self.ranks.num_ranks)

    def parameters(self) -> Tensor:
        return self._flat.parameters

    def state_dict(self) -> State:
        return {
            "parameters": self._flat.parameters,
            "optimizer": state_of(self._optimizer),
            "statistics": state_of(self._flat.statistics),
            "workers": self.ranks.gather_texts(json.dumps(state_of(self._worker))),
        }

    def resume_from(self, state: State) -> None:
        """Continue from `state`. DDP orders its buckets anew after the first backward pass, and the order decides how
        sums are rounded. So a gradient that nobody uses is computed first, if the run had computed one before.
        """
        kept = KeptState(state)
        assert kept.of_ranks is not None
        if kept.version > 0:
            self._worker.gradient(0, lambda weight: 1.0)
        of_ranks = kept.of_ranks
        with torch.no_grad():
            self._flat.parameters.copy_(of_ranks["parameters"])
        if self._flat.statistics is not None:
            restore(self._flat.statistics, of_ranks["statistics"])
        restore(self._optimizer, of_ranks["optimizer"])
        restore(self._worker, json.loads(of_ranks["workers"][self.replica_number]))


STOP, UPDATE, EVALUATE, PARAMETERS, STATE = range(5)


class InStep:
    """What the ranks of a run do together, see `Replica`. Rank 0 calls the methods. The other ranks call `follow`, and
    so carry out each of these methods too."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def follow(self) -> None:
        """Obey rank 0 until it says that the run has ended."""
        while True:
            command, first, count = self.replica.ranks.from_rank_0(STOP, 0, 0)
            if command == STOP:
                return
            self._carry_out(command, first, count)

    def _lead(self, command: int, first: int = 0, count: int = 0) -> Any:
        """Tell the other ranks a command, and carry it out like them."""
        self.replica.ranks.from_rank_0(command, first, count)
        return self._carry_out(command, first, count)

    def _carry_out(self, command: int, first: int, count: int) -> Any:
        if command == UPDATE:
            return self.replica.update(first, count)
        if command == EVALUATE:
            return self.replica.evaluate()
        if command == PARAMETERS:
            return self.replica.parameters()
        return self.replica.state_dict()

    update = partialmethod(_lead, UPDATE)
    evaluate = partialmethod(_lead, EVALUATE)
    parameters = partialmethod(_lead, PARAMETERS)
    state_dict = partialmethod(_lead, STATE)

    def load_state_dict(self, state: State) -> None:
        """Do nothing: every rank has called `Replica.resume_from` in `asyncsgd.backends.rank_main.make_rank`."""

    def stop(self) -> None:
        """Let the other ranks end."""
        self.replica.ranks.from_rank_0(STOP, 0, 0)


class RanksBackend(InOrder):
    """The backend, in rank 0, of a run whose ranks step by themselves.

    Args:
        ranks: all ranks.
        optimizer: the server's optimizer, which reports the norm of the ranks' step.
        num_workers: how many workers the server counts: the replicas, or two versions with ``2bw``.
        group_size: returns how many batches the ranks compute at once, given the next batch; None: as many as are in
            flight.
    """

    KEPT = ("_clock", "_started", "ranks")

    def __init__(
        self,
        ranks: InStep,
        optimizer: StepTakenByWorker,
        clock: TrainingClock,
        num_workers: int,
        group_size: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(clock, num_workers)
        self.ranks = ranks
        self._optimizer = optimizer
        self._group_size = group_size
        self._computed: collections.deque[GradientAndTimes] = collections.deque()

    def next(self, until: float) -> Arrived | None:
        if not self._clock.running:
            self._clock.resume()
        if not self._computed:
            if self.now >= until:
                return None
            first = self._started[0].batches[0].first
            count = len(self._started) if self._group_size is None else self._group_size(first)
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


def group_size_function(budget: Limits, evaluations: int, batch_size: int) -> Callable[[int], int]:
    """Make the function that returns how many batches ``2bw`` computes in one group, given the first of them. A group
    ends at the next point of evaluation."""
    points = EvaluationPoints(budget, evaluations).in_samples

    def group_size(first: int) -> int:
        if points.next == math.inf:
            return LONGEST_GROUP
        points.take_up_to(first * batch_size)
        return math.ceil(max(1, min(LONGEST_GROUP, points.next / batch_size - first)))

    return group_size


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell.

    >>> is_lost_contact(RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    >>> is_lost_contact(dist.DistBackendError("NCCL error: remote process exited"))
    True
    >>> is_lost_contact(dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"))
    False
    >>> is_lost_contact(RunError("the forward pass changes the parameter 'skip_connection.weight'"))
    False
    """
    # Gloo has no class of its own: its errors begin with the place in its source.
    has_failed = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    return has_failed and not is_out_of_memory(error)
