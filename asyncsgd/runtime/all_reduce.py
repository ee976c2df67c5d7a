"""Synchronous data parallelism with torch's DistributedDataParallel: every rank steps its own replica.

    x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of rank r's batch

Rank r takes batch t N + r at step t. DDP averages gradients over ranks, so each rank's loss is scaled by N w_r /
sum w before its backward pass; without that the result would be a mean of means. The replicas take identical steps
and stay identical.

Gradients go through gloo on CPU and NCCL on CUDA; counts, losses and evaluation sums always through gloo. All ranks
call the same collectives in the same order; a dead rank fails the others' next collective at once, a silent one
after `TIMEOUT`."""

from __future__ import annotations

import datetime
import json
import math
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from asyncsgd.optimizers import Optimizer
from asyncsgd.packing import Plain
from asyncsgd.records.events import APPLIED, DONE, HELD, INTERRUPTED, Event, Fault, Membership, MemoryUsed
from asyncsgd.runtime.base import (
    Budget,
    EvaluationPoints,
    Judge,
    NeverSaves,
    Report,
    Result,
    Saver,
    TrainingClock,
    diverged,
    evaluation_record,
)
from asyncsgd.runtime.memory import peak_bytes
from asyncsgd.runtime.worker_process import Straggling
from asyncsgd.schedules import Schedule
from asyncsgd.tasks.base import decode_sums, encode_sums
from asyncsgd.worker import Gradient, Worker

TIMEOUT = datetime.timedelta(seconds=60)
"""Longest wait in a collective; the slowest rank's gradient or evaluation shard must not lag further behind."""

_GOES_ON, _TIME_IS_UP, _STOP_REQUESTED, _SAVE = 0, 1, 2, 3


class AllReduce:
    """One rank of a synchronous run. All ranks construct it and call `run` together, on an initialised process group.

    Args:
        worker: computes this rank's gradients, through DDP from here on, and evaluates a shard.
        optimizer: on the worker's flat parameters; the same on every rank.
        schedule: learning rate as a function of the samples that arrived at all ranks.
        batch_size, budget, evaluations: as for `ParameterServer`.
        report: receives the records; called on rank 0 only.
        find_unused: whether DDP looks for parameters without a gradient at every step; rank 0 decides for all.
        saver: takes states for checkpoints, and one when the run is asked to stop; asked on rank 0 only.
        straggling: makes this rank's gradients take longer, before they are exchanged. What a gradient would have taken
            is known from the step before, so the first is not stretched by a factor.
        stop_requested: looked at on rank 0, for all.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        batch_size: int,
        budget: Budget,
        evaluations: int,
        find_unused: bool = False,
        report: Report,
        straggling: Straggling,
        saver: Saver | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker = worker
        self._optimizer, self._schedule = optimizer, schedule
        self._batch_size, self._budget = batch_size, budget
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self._rank, self._num_workers = dist.get_rank(), dist.get_world_size()
        self._report = report if self._rank == 0 else lambda record: None
        self._saver = saver or NeverSaves()
        self._straggling = straggling
        self._own_seconds = 0.0
        self._stop_requested = stop_requested
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._flat = worker.flat
        self._worker_before = worker.state_dict()  # as it was before this step's gradient
        find_unused = bool(self._gather(torch.tensor([find_unused]))[0, 0])
        with warnings.catch_warnings():
            # torch 2.13 has another name for it that older versions do not know; buffers stay as each rank built them.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # Copies rank 0's parameters to all ranks, in place.
            worker.loss = DistributedDataParallel(
                worker.loss, broadcast_buffers=False, find_unused_parameters=find_unused
            )
        self._flat.check()
        self._clock = TrainingClock()
        self.version = 0
        self.num_samples = 0

    @property
    def train_seconds(self) -> float:
        """The training clock."""
        return self._clock.seconds

    def run(self) -> Result:
        """Train until the budget is spent; blocks. Called once, on new objects or on ones that have all loaded one
        state. Every rank returns the same result.
        """
        samples = self._budget.samples
        num_batches = None if samples is None else math.ceil(samples / self._batch_size)
        result = None
        if self._evaluated_version < 0:
            result = self._evaluate()
            if samples == 0:
                return result or Result(DONE)
            for rank in range(self._num_workers):
                self._report(Membership("join", rank, 0, 0, 0.0))
        self._clock.resume()
        while result is None:
            first = self.version * self._num_workers
            if num_batches is not None and first >= num_batches:
                break
            busy = self._num_workers if num_batches is None else min(self._num_workers, num_batches - first)
            result = self._step(first, busy)
            if result is None and self._points.passed(self.num_samples, self._agreed_seconds):
                result = self._evaluate()
        self._clock.pause()
        if (result is None or result.status == DONE) and self._evaluated_version != self.version:
            result = self._evaluate(last=True)
        return result or Result(DONE)

    def state_dict(self) -> Plain:
        """All that decides the rest of a run that was stopped, the same on every rank; called by all together."""
        workers = self._gather_texts(json.dumps(self._worker_before))
        return {
            "parameters": self._flat.parameters,
            "optimizer": self._optimizer.state_dict(),
            "workers": workers,
            "version": self.version,
            "num_samples": self.num_samples,
            "points": self._points.state_dict(),
            "judge": self._judge.state_dict(),
            "clock": self._clock.state_dict(),
            "evaluated_version": self._evaluated_version,
            "agreed_seconds": self._agreed_seconds,
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state` at the next `run`; called by all ranks together.

        DDP orders its buckets anew after the first backward pass, and the order decides how sums are rounded. So a
        gradient that nobody uses is computed first, where the run before had computed one.
        """
        if state["version"] > 0:
            self._worker.gradient(0, lambda weight: 1.0)
        with torch.no_grad():
            self._flat.parameters.copy_(state["parameters"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._worker.load_state_dict(json.loads(state["workers"][self._rank]))
        self.version, self.num_samples = state["version"], state["num_samples"]
        self._points.load_state_dict(state["points"])
        self._judge.load_state_dict(state.get("judge"))
        self._clock.load_state_dict(state["clock"])
        self._evaluated_version, self._agreed_seconds = state["evaluated_version"], state["agreed_seconds"]
        self._straggling.skip(self.version)

    def _save(self) -> None:
        state = self.state_dict()
        if self._rank == 0:
            self._saver.save(
                state, version=self.version, num_samples=self.num_samples, train_seconds=self._clock.seconds
            )

    def _step(self, first: int, busy: int) -> Result | None:
        """One update of all ranks from batches `first` on; ranks from `busy` on have none left and add nothing."""
        began = time.perf_counter()
        self._worker_before = self._worker.state_dict()
        waited = stretched = 0.0
        weights = torch.zeros(self._num_workers, dtype=torch.float64)
        control = _GOES_ON
        if self._rank == 0:
            if self._stop_requested():
                control = _STOP_REQUESTED
            elif self._budget.seconds is not None and self._clock.seconds >= self._budget.seconds:
                control = _TIME_IS_UP
            elif self._saver.due(self.num_samples):
                control = _SAVE

        def weigh(weight: float) -> float:
            nonlocal weights, waited, control, stretched
            stretched = self._straggling.wait_seconds(self._own_seconds)
            time.sleep(stretched)  # before the exchange, in which the others wait for this rank
            asked = time.perf_counter()
            row = torch.tensor(
                [weight if self._rank < busy else 0.0, control, self._clock.seconds], dtype=torch.float64
            )
            table = self._gather(row)
            waited = time.perf_counter() - asked
            weights, control, self._agreed_seconds = table[:, 0], int(table[0, 1]), float(table[0, 2])
            return self._num_workers * float(row[0] / weights.sum())

        index = first + self._rank if self._rank < busy else first
        gradient = self._worker.gradient(index, weigh)
        if control == _TIME_IS_UP:
            return Result(DONE)
        if control != _GOES_ON:
            self._save()  # of the version before this step
        if control == _STOP_REQUESTED:
            return Result(INTERRUPTED, "interrupted by the user")
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        self.num_samples += busy * self._batch_size
        self._optimizer.step(self._flat.gradients, self._schedule(self.num_samples))
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
        """Report one Event per rank, the last one taking the step, as the rule `Synchronous` would; look for NaN."""
        table = self._gather(torch.tensor([gradient.loss, *seconds], dtype=torch.float64))
        version = self.version - 1
        for rank in range(busy):
            last = rank == busy - 1
            compute, wait, apply = table[rank, 1:].tolist()
            arrived = self.num_samples - (busy - 1 - rank) * self._batch_size
            self._report(
                Event(
                    dispatch=first + rank,
                    worker=rank,
                    batches=((0, first + rank, first + rank + 1),),
                    read_version=version,
                    version=version + last,
                    arrival_delay=0,
                    outcome=APPLIED if last else HELD,
                    uses=tuple((first + r, 0) for r in range(busy)) if last else (),
                    drops=(),
                    abandoned=(),
                    started=(),
                    loss=float(table[rank, 0]),
                    weight=float(weights[rank]),
                    num_samples=self._batch_size,
                    learning_rate=self._schedule(arrived),
                    train_seconds=self._clock.seconds,
                    total_samples=arrived,
                    compute_seconds=compute,
                    wait_seconds=wait,
                    apply_seconds=apply,
                    gradient_norm=self._optimizer.norm if last else None,
                )
            )
        for rank in range(busy):
            if not math.isfinite(float(table[rank, 0])):
                what = f"the loss of rank {rank} at version {version} is {float(table[rank, 0])}"
                self._report(Fault(what, rank, self.version, self._clock.seconds))
                return diverged(what)
        return None

    def _evaluate(self, *, last: bool = False) -> Result | None:
        """Evaluate the current version, a shard per rank, with the training clock stopped; all ranks get one number."""
        running = self._clock.running
        self._clock.pause()
        began = time.perf_counter()
        shard_sums = encode_sums(self._worker.evaluate(self._rank, self._num_workers))
        peaks = self._gather(torch.tensor(peak_bytes(self._flat.parameters.device)))
        evaluation = evaluation_record(
            self._worker.task,
            [decode_sums(text) for text in self._gather_texts(shard_sums)],
            version=self.version,
            num_samples=self.num_samples,
            train_seconds=self._clock.seconds,
            eval_seconds=time.perf_counter() - began,
        )
        self._evaluated_version = self.version
        self._flat.check()
        self._report(evaluation)
        self._report(
            MemoryUsed(
                tuple((rank, int(resident), int(cuda)) for rank, (resident, cuda) in enumerate(peaks.tolist())),
                self.version,
                self.num_samples,
                evaluation.train_seconds,
            )
        )
        if running:
            self._clock.resume()
        return self._judge.of(evaluation, last=last)

    def _gather(self, row: Tensor) -> Tensor:
        """Every rank's row, `(N, len(row))`, on every rank."""
        rows = [torch.empty_like(row) for _ in range(self._num_workers)]
        dist.all_gather(rows, row, group=self._gloo)
        return torch.stack(rows)

    def _gather_texts(self, text: str) -> list[str]:
        """Every rank's text on every rank: as bytes, since nothing that comes over a network is unpickled."""
        encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(encoded)], dtype=torch.int64))[:, 0].tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(encoded)] = encoded
        rows = self._gather(row)
        return [bytes(rows[rank, :length].tolist()).decode() for rank, length in enumerate(lengths)]

    _agreed_seconds = 0.0
    """Rank 0's training clock at the last step, so that all ranks pass evaluation points together."""
    _evaluated_version = -1
