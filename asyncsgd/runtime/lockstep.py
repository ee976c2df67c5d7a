"""What all synchronous training and pipelines share: ranks that stop, evaluate and go on together.

Counts, losses and evaluation sums always go through gloo. All ranks call the same collectives in the same order; a dead
rank fails the others' next collective at once, a silent one after `TIMEOUT`."""

from __future__ import annotations

import abc
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncsgd.evaluation import measured_in_shards
from asyncsgd.packing import Plain
from asyncsgd.records.events import DONE, Membership, MemoryUsed, StagesUsed
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
)
from asyncsgd.runtime.memory import peak_bytes
from asyncsgd.schedules import Schedule
from asyncsgd.tasks.base import Sums, Task, decode_sums, encode_sums

GOES_ON, TIME_IS_UP, STOP_REQUESTED, SAVE = 0, 1, 2, 3


class Replica(Protocol):
    """A model that is trained, as one of its ranks sees it. All ranks of a run call its methods together."""

    task: Task
    device: torch.device
    number: int
    """Which of the replicas this rank belongs to, from 0."""
    speakers: Sequence[int]
    """The rank of each replica that knows its losses and the sums of its evaluations."""

    def evaluate(self) -> Sums:
        """The sums of this replica's shard of the evaluation sets; where this rank is no speaker, sums over nothing."""

    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`."""

    def check(self) -> None:
        """Assert that every parameter lies where it should."""

    def used(self) -> tuple[tuple[int, int, float | None, float, float, float], ...]:
        """See `StagesUsed`; empty where the model is not cut."""

    def state_dict(self) -> Plain:
        """Its part of a checkpoint, the same on every rank; of the parameters before the last gradient."""

    def load_state_dict(self, state: Plain) -> None:
        """Go on from the state of a whole run; see `Lockstep.load_state_dict`."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """When a run is evaluated and ends, and who hears of it."""

    batch_size: int
    budget: Budget
    evaluations: int
    report: Report
    """Receives the records; called on rank 0 only."""
    saver: Saver = NeverSaves()  # noqa: RUF009 - it has no state
    """Takes states for checkpoints, and one when the run is asked to stop; asked on rank 0 only."""
    stop_requested: Callable[[], bool] = lambda: False
    """Looked at on rank 0, for all."""


class Lockstep(abc.ABC):
    """One rank of a run. All ranks construct it and call `run` together, on an initialised process group.

    Args:
        replica: this rank's.
        ranks: of the run.
        schedule: learning rate as a function of the samples that arrived at all replicas.
    """

    def __init__(self, replica: Replica, ranks: AllRanks, schedule: Schedule, conditions: Conditions) -> None:
        self._replica, self._ranks, self._schedule = replica, ranks, schedule
        self._batch_size, self._budget = conditions.batch_size, conditions.budget
        self._points = EvaluationPoints(conditions.budget, conditions.evaluations)
        self._judge = Judge(conditions.budget)
        self._rank, self._speakers = ranks.rank, list(replica.speakers)
        self._num_workers = len(self._speakers)
        self._report: Report = conditions.report if self._rank == 0 else lambda record: None
        self._saver, self._stop_requested = conditions.saver, conditions.stop_requested
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
        result = self._judge.verdict()
        if self._evaluated_version < 0:
            result = self._evaluate()
            if samples == 0:
                return self._judge.with_best(result or Result(DONE))
            for number in range(self._num_workers):
                self._report(Membership("join", number, 0, 0, 0.0))
        self._clock.resume()
        while result is None:
            first = self.version * self._num_workers
            if num_batches is not None and first >= num_batches:
                break
            result = self._advance(first, num_batches)
            if result is None and self._points.passed(self.num_samples, self._agreed_seconds):
                result = self._evaluate()
        self._clock.pause()
        if (result is None or result.status == DONE) and self._evaluated_version != self.version:
            result = self._evaluate(last=True)
        result = result or Result(DONE)
        if result.status == DONE and self._wants_last_state():
            self._save()
        return self._judge.with_best(result)

    def _wants_last_state(self) -> bool:
        """Whether a checkpoint is taken at the end; all ranks know it of rank 0."""
        wants = self._rank == 0 and self._saver.due(self.num_samples, at_end=True)
        return bool(self._ranks.gather(torch.tensor([wants], dtype=torch.float64))[0, 0])

    def parameters(self) -> Tensor:
        """All parameters of the model, `(P,)`; called by all ranks together."""
        return self._replica.parameters()

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
        self._judge.load_state_dict(state["judge"])
        self._clock.load_state_dict(state["clock"])
        self._evaluated_version, self._agreed_seconds = state["evaluated_version"], state["agreed_seconds"]

    def _save(self) -> None:
        state = self.state_dict()
        if self._rank == 0:
            self._saver.save(
                state,
                version=self.version,
                num_samples=self.num_samples,
                train_seconds=self._clock.seconds,
                cut_short=self._cut_short,
            )

    @property
    def _cut_short(self) -> str | None:
        """See `Saver.save`."""
        if self.num_samples == self.version * self._num_workers * self._batch_size:
            return None
        return "all ranks take part in an update, and the budget leaves some without a batch in the last one"

    @abc.abstractmethod
    def _advance(self, first: int, num_batches: int | None) -> Result | None:
        """Take one or more updates from batch `first` on. Return how the run ends with them; None: it goes on.

        Args:
            num_batches: of the whole run, more than `first`; None: no end.
        """

    def _control(self) -> int:
        """What rank 0 wants of all; GOES_ON on the others."""
        if self._rank == 0:
            if self._stop_requested():
                return STOP_REQUESTED
            if self._budget.seconds is not None and self._clock.seconds >= self._budget.seconds:
                return TIME_IS_UP
            if self._saver.due(self.num_samples):
                return SAVE
        return GOES_ON

    def _evaluate(self, *, last: bool = False) -> Result | None:
        """Evaluate the current version, a shard per replica, with the clock stopped; all ranks get one number."""
        running = self._clock.running
        self._clock.pause()
        began = time.perf_counter()
        texts = self._ranks.gather_texts(encode_sums(self._replica.evaluate()))
        peaks = self._ranks.gather(torch.tensor(peak_bytes(self._replica.device)))
        shards = [decode_sums(texts[rank]) for rank in self._speakers]
        measured = measured_in_shards(self._replica.task, shards, time.perf_counter() - began)
        evaluation = measured.record(
            version=self.version, num_samples=self.num_samples, train_seconds=self._clock.seconds
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
        if stages := self._replica.used():
            self._report(StagesUsed(stages, self.version, self.num_samples, evaluation.train_seconds))
        if running:
            self._clock.resume()
        return self._judge.of(evaluation, self.parameters, last=last)

    _agreed_seconds = 0.0
    """Rank 0's training clock at the last step, so that all ranks pass evaluation points together."""
    _evaluated_version = -1
