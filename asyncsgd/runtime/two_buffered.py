"""An asynchronous pipeline: batches follow one another without a pause, and every gradient is one update old.

    x_{t+1} = x_t - eta grad f(x_{max(0, t - 1)}; batch_t)

This is PipeDream-2BW (Narayanan, Phanishayee, Shi, Chen, Zaharia: "Memory-Efficient Pipeline-Parallel DNN Training",
ICML 2021, section 3.1): a stage keeps two versions of its parameters, and the forward and the backward pass of a batch
use the same one. It is the rule ``fixed_delay:delay=1`` by another way.

A stage begins batch t as soon as it has taken update t - 2, while batch t - 1 is still in the pipeline. With m
micro-batches to a batch and p <= m stages, 1F1B never asks for more. Batches run in groups, between which the ranks
agree on whether to go on. After a group the pipeline runs empty: that costs time and changes no number. A group ends
before a point of evaluation, and where the shape of the hidden states changes.

A direction is not clipped: its norm would make every stage wait for all others."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.packing import Plain
from asyncsgd.records.events import APPLIED, DONE, INTERRUPTED, Fault, Gradient, Taken, arrival
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.base import Result, diverged
from asyncsgd.runtime.lockstep import GOES_ON, STOP_REQUESTED, TIME_IS_UP, Conditions, Lockstep
from asyncsgd.runtime.pipeline import HeldStage, RowOfStages
from asyncsgd.runtime.pipeline_engine import Grid, Part, TorchEngine, mean_loss
from asyncsgd.runtime.worker_process import Assignment
from asyncsgd.schedules import Schedule
from asyncsgd.tasks.base import Data, Sums

LONGEST_GROUP = 8
"""Batches. The bubble of a group is (p - 1) / (8 m + p - 1), and hidden states of all of them have buffers."""


@dataclasses.dataclass(frozen=True)
class Coming:
    """A batch of a group."""

    index: int
    learning_rate: float
    parts: list[Part]
    weight: float


class TwoVersions(RowOfStages):
    """A stage with two versions of its parameters. Batch t uses copy t mod 2, which holds x_{max(0, t - 1)} then.

    Update t takes x_t from the other copy and leaves x_{t+1} in copy t mod 2, which batch t + 2 is the next to use.
    Every rank of the run is in one row. All construct it together.

    Args:
        copies: two of this rank's stage, with the same values. The rest is as for `RowOfStages`.
    """

    def __init__(
        self,
        copies: tuple[HeldStage, HeldStage],
        grid: Grid,
        assignment: Assignment,
        data: Data,
        recipe: OptimizerRecipe,
        ranks: AllRanks,
    ) -> None:
        engine = TorchEngine(grid, copies[0].flat.parameters.device, "1f1b", self._went_back)
        super().__init__(copies[0], grid, engine, assignment, data, recipe, ranks)
        self._copies = copies
        self._group: tuple[Coming, ...] = ()
        self._taken = 0
        """Updates since the beginning of the run."""
        self._exchanging: dict[int, Callable[[], None]] = {}
        """By batch: waits for what its gradient lacks."""
        self._switch = _Switch(self._before, copies)

    def coming(self, index: int, learning_rate: float) -> tuple[Coming, torch.Size]:
        """Batch `index`, and the shape of its hidden states."""
        split, weights = self.split(index)
        shape = self.shape_of(self._copies[0], split)
        return Coming(index, learning_rate, self.parts_of(split, weights, index, 1.0), sum(weights)), shape

    def update(self, group: tuple[Coming, ...], shape: torch.Size) -> list[float]:
        """Take an update with each batch of a group, the first of which follows the last update; return their losses;
        nan on all stages but the last.
        """
        self._group = group
        for copy in self._copies:
            copy.module.parts = [part for coming in group for part in coming.parts]
        began = time.perf_counter()
        self._engine.run(self._switch, shape, len(group) * self._micro_batches)
        self._schedule_seconds += time.perf_counter() - began
        while self._exchanging:
            self._take(min(self._exchanging))
        return [mean_loss(coming.parts) for coming in group]

    def _before(self, micro_batch: int) -> int:
        """Which copy computes a micro-batch of the group; it is ready then."""
        number, part = divmod(micro_batch, self._micro_batches)
        batch = self._group[number].index
        if part == 0:
            if batch - 2 in self._exchanging:
                self._take(batch - 2)
            self._copies[batch % 2].flat.release_gradients()
        return batch % 2

    def _went_back(self, micro_batch: int) -> None:
        number, part = divmod(micro_batch, self._micro_batches)
        if part == self._micro_batches - 1:
            batch = self._group[number].index
            copy = self._copies[batch % 2]
            copy.flat.gather_gradients()
            self._exchanging[batch] = self._shared.add_up(copy.views(copy.flat.gradients))

    def _take(self, batch: int) -> None:
        """Update `batch`. What other stages add to its gradient is waited for here, when a later batch needs it: to
        wait for it at once would stop the pipeline.
        """
        began = time.perf_counter()
        self._exchanging.pop(batch)()
        self._exchange_seconds += time.perf_counter() - began
        own, other = self._copies[batch % 2], self._copies[(batch - 1) % 2]
        with torch.no_grad():
            own.flat.parameters.copy_(other.flat.parameters)
        self._optimizer.move(own.flat.parameters)
        (learning_rate,) = [coming.learning_rate for coming in self._group if coming.index == batch]
        self._optimizer.step(own.flat.gradients, learning_rate)
        self._taken = batch + 1

    @property
    def _newest(self) -> HeldStage:
        """The copy with the parameters of the current version."""
        return self._copies[(self._taken - 1) % 2]

    @property
    def _older(self) -> HeldStage:
        """The copy with the parameters of the version before, from which the next batch is computed."""
        return self._copies[self._taken % 2]

    def evaluate(self) -> Sums:
        return self.evaluate_at(self._newest)

    def parameters(self) -> Tensor:
        return self.whole(self._newest.flat.parameters)

    def check(self) -> None:
        for copy in self._copies:
            copy.flat.check()

    def state_dict(self) -> Plain:
        return {
            "parameters": self.parameters(),
            "before": self.whole(self._older.flat.parameters),
            "optimizers": self.gather_states(self._optimizer.state_dict()),
        }

    def load_state_dict(self, state: Plain) -> None:
        self._taken = state["version"]
        self._newest.put(state["parameters"])
        self._older.put(state["before"])
        self._optimizer.load_state_dict(self.own_state(state["optimizers"]))


class _Switch(nn.Module):
    """Gives each micro-batch to the copy of the stage that computes it.

    Args:
        before: makes the copy of a micro-batch ready and says which it is.
    """

    def __init__(self, before: Callable[[int], int], copies: Sequence[HeldStage]) -> None:
        super().__init__()
        self._before = before
        self.copies = nn.ModuleList(copy.module for copy in copies)

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self.copies[self._before(int(index))](hidden, index=index)


class TwoBuffered(Lockstep):
    """One rank of an asynchronous pipeline; see `Lockstep` for what it takes."""

    def __init__(self, row: TwoVersions, ranks: AllRanks, schedule: Schedule, conditions: Conditions) -> None:
        super().__init__(row, ranks, schedule, conditions)
        self._row = row

    def _advance(self, first: int, num_batches: int | None) -> Result | None:
        """One group of updates."""
        asked = time.perf_counter()
        row = torch.tensor([self._control(), self._clock.seconds], dtype=torch.float64)
        control, self._agreed_seconds = self._ranks.gather(row)[0].tolist()
        if control == TIME_IS_UP:
            return Result(DONE)
        if control != GOES_ON:
            self._save()
        if control == STOP_REQUESTED:
            return Result(INTERRUPTED, "interrupted by the user")
        began = time.perf_counter()
        group, shape = self._next_group(first, num_batches)
        losses = self._row.update(group, shape)
        seconds = time.perf_counter() - began
        self.version += len(group)
        self.num_samples += len(group) * self._batch_size
        table = self._ranks.gather(torch.tensor(losses, dtype=torch.float64))[self._speakers[0]].tolist()
        for number, (coming, loss) in enumerate(zip(group, table, strict=True)):
            result = self._record(coming, loss, number, len(group), (seconds / len(group), began - asked))
            if result is not None:
                return result
        return None

    def _next_group(self, first: int, num_batches: int | None) -> tuple[tuple[Coming, ...], torch.Size]:
        """The batches from `first` on whose hidden states have one shape, up to the next point of evaluation."""
        end = first + LONGEST_GROUP
        if num_batches is not None:
            end = min(end, num_batches)
        if self._points.by_samples and math.isfinite(self._points.next):
            end = min(end, max(first + 1, math.ceil(self._points.next / self._batch_size)))
        group: list[Coming] = []
        shape = None
        for index in range(first, end):
            coming, its_shape = self._row.coming(index, self._schedule((index + 1) * self._batch_size))
            if shape not in (None, its_shape):
                break
            group.append(coming)
            shape = its_shape
        assert shape is not None
        return tuple(group), shape

    def _record(self, coming: Coming, loss: float, number: int, of: int, seconds: tuple[float, float]) -> Result | None:
        """Report what the rule `FixedDelay` would with one worker; look for NaN."""
        index, read_version = coming.index, max(coming.index - 1, 0)
        arrived = (index + 1) * self._batch_size
        compute, wait = seconds
        self._report(
            arrival(
                Gradient(loss, coming.weight, self._batch_size),
                Taken(compute=compute, wait=0.0 if number else wait),  # to apply is a part of the pipeline's own time
                dispatch=index,
                worker=0,
                batches=((0, index, index + 1),),
                read_version=read_version,
                delay=index - read_version,
                version=index + 1,
                outcome=APPLIED,
                uses=((index, index - read_version),),
                learning_rate=coming.learning_rate,
                train_seconds=self._clock.seconds - (of - 1 - number) * compute,
                total_samples=arrived,
            )
        )
        if math.isfinite(loss):
            return None
        what = f"the loss of batch {index} at version {read_version} is {loss}"
        self._report(Fault(what, 0, self.version, self._clock.seconds))
        return diverged(what)
