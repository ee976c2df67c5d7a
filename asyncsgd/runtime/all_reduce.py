"""Synchronous training of ranks in lockstep: every replica of the model steps along the mean of all gradients.

    x_{t+1} = x_t - eta * sum_r w_r grad f(x_t; batch_{t N + r}) / sum_r w_r,    w_r = loss terms of replica r's batch

Replica r takes batch t N + r at step t. A replica is one rank (`data_parallel`) or a row of them (`pipeline`); it
exchanges gradients with the others and takes its part of the step. This file says when.

Counts, losses and evaluation sums always go through gloo. All ranks call the same collectives in the same order; a dead
rank fails the others' next collective at once, a silent one after `TIMEOUT`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncsgd.packing import Plain
from asyncsgd.records.events import APPLIED, DONE, HELD, INTERRUPTED, Event, Fault, Membership, MemoryUsed
from asyncsgd.runtime.all_ranks import AllRanks
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
from asyncsgd.tasks.base import Sums, Task, decode_sums, encode_sums
from asyncsgd.worker import Gradient

_GOES_ON, _TIME_IS_UP, _STOP_REQUESTED, _SAVE = 0, 1, 2, 3


class Replica(Protocol):
    """A model that is trained, as one of its ranks sees it. All ranks of a run call its methods together."""

    task: Task
    device: torch.device
    number: int
    """Which of the replicas this rank belongs to, from 0."""
    speakers: Sequence[int]
    """The rank of each replica that knows its losses and the sums of its evaluations."""

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

    def evaluate(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets; where this rank is no speaker, sums over nothing."""

    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

    def check(self) -> None:
        """Assert that every parameter lies where it should."""

    def state_dict(self) -> Plain:
        """Its part of a checkpoint, the same on every rank; of the parameters before the last gradient."""

    def load_state_dict(self, state: Plain) -> None:
        """Go on from the state of a whole run; see `AllReduce.load_state_dict`."""


class AllReduce:
    """One rank of a synchronous run. All ranks construct it and call `run` together, on an initialised process group.

    Args:
        replica: this rank's.
        ranks: of the run.
        schedule: learning rate as a function of the samples that arrived at all replicas.
        batch_size, budget, evaluations: as for `ParameterServer`.
        report: receives the records; called on rank 0 only.
        saver: takes states for checkpoints, and one when the run is asked to stop; asked on rank 0 only.
        straggling: makes this rank's gradients take longer, before they are exchanged. What a gradient would have taken
            is known from the step before, so the first is not stretched by a factor.
        stop_requested: looked at on rank 0, for all.
    """

    def __init__(
        self,
        replica: Replica,
        ranks: AllRanks,
        schedule: Schedule,
        *,
        batch_size: int,
        budget: Budget,
        evaluations: int,
        report: Report,
        straggling: Straggling,
        saver: Saver | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._replica, self._ranks, self._schedule = replica, ranks, schedule
        self._batch_size, self._budget = batch_size, budget
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self._rank, self._speakers = ranks.rank, list(replica.speakers)
        self._num_workers = len(self._speakers)
        self._report = report if self._rank == 0 else lambda record: None
        self._saver = saver or NeverSaves()
        self._straggling = straggling
        self._own_seconds = 0.0
        self._stop_requested = stop_requested
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
            for number in range(self._num_workers):
                self._report(Membership("join", number, 0, 0, 0.0))
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
        return {
            **self._replica.state_dict(),
            "version": self.version,
            "num_samples": self.num_samples,
            "points": self._points.state_dict(),
            "judge": self._judge.state_dict(),
            "clock": self._clock.state_dict(),
            "evaluated_version": self._evaluated_version,
            "agreed_seconds": self._agreed_seconds,
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state` at the next `run`; called by all ranks together."""
        self._replica.load_state_dict(state)
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
        """One update from batches `first` on; replicas from `busy` on have none left and add nothing."""
        began = time.perf_counter()
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
            number = self._replica.number
            row = torch.tensor([weight if number < busy else 0.0, control, self._clock.seconds], dtype=torch.float64)
            table = self._ranks.gather(row)
            waited = time.perf_counter() - asked
            weights, control, self._agreed_seconds = table[self._speakers, 0], int(table[0, 1]), float(table[0, 2])
            return float(row[0] / weights.sum())

        gradient = self._replica.gradient(first + (self._replica.number if self._replica.number < busy else 0), weigh)
        if control == _TIME_IS_UP:
            return Result(DONE)
        if control != _GOES_ON:
            self._save()  # of the version before this step
        if control == _STOP_REQUESTED:
            return Result(INTERRUPTED, "interrupted by the user")
        computed = time.perf_counter()
        self._own_seconds = computed - began - waited - stretched
        self.num_samples += busy * self._batch_size
        self._replica.step(self._schedule(self.num_samples))
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
        table = self._ranks.gather(torch.tensor([gradient.loss, *seconds], dtype=torch.float64))[self._speakers]
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
                    gradient_norm=self._replica.norm if last else None,
                )
            )
        for rank in range(busy):
            if not math.isfinite(float(table[rank, 0])):
                what = f"the loss of rank {rank} at version {version} is {float(table[rank, 0])}"
                self._report(Fault(what, rank, self.version, self._clock.seconds))
                return diverged(what)
        return None

    def _evaluate(self, *, last: bool = False) -> Result | None:
        """Evaluate the current version, a shard per replica, with the clock stopped; all ranks get one number."""
        running = self._clock.running
        self._clock.pause()
        began = time.perf_counter()
        texts = self._ranks.gather_texts(encode_sums(self._replica.evaluate()))
        peaks = self._ranks.gather(torch.tensor(peak_bytes(self._replica.device)))
        evaluation = evaluation_record(
            self._replica.task,
            [decode_sums(texts[rank]) for rank in self._speakers],
            version=self.version,
            num_samples=self.num_samples,
            train_seconds=self._clock.seconds,
            eval_seconds=time.perf_counter() - began,
        )
        self._evaluated_version = self.version
        self._replica.check()
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

    _agreed_seconds = 0.0
    """Rank 0's training clock at the last step, so that all ranks pass evaluation points together."""
    _evaluated_version = -1
