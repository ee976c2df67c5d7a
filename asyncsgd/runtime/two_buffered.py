"""An asynchronous pipeline: batches follow one another without a pause, and every gradient is one update old.

    x_{t+1} = x_t - eta grad f(x_{max(0, t - 1)}; batch_t)

This is PipeDream-2BW (Narayanan, Phanishayee, Shi, Chen, Zaharia: "Memory-Efficient Pipeline-Parallel DNN Training",
ICML 2021, section 3.1): a stage keeps two versions of its parameters, and the forward and the backward pass of a batch
use the same one. It is the rule ``fixed_delay:delay=1`` by another way.

A stage begins batch t as soon as it has taken update t - 2, while batch t - 1 is still in the pipeline. With m
micro-batches to a batch and p <= m stages, 1F1B never asks for more. Batches run in groups, between which rank 0 says
whether to go on. After a group the pipeline runs empty: that costs time and changes no number. A group ends before a
point of evaluation, and where the shape of the hidden states changes. The server counts two workers that take turns.

A direction is not clipped: its norm would make every stage wait for all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.records.events import Gradient, Taken
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.base import Budget, EvaluationPoints
from asyncsgd.runtime.collective import Computed
from asyncsgd.runtime.pipeline import HeldStage, RowOfStages
from asyncsgd.runtime.pipeline_engine import Grid, Part, TorchEngine, mean_loss
from asyncsgd.runtime.worker_process import Assignment
from asyncsgd.schedules import Schedule
from asyncsgd.state import State, restore, state_of
from asyncsgd.tasks.base import Data, Sums

LONGEST_GROUP = 8
"""Batches. The bubble of a group is (p - 1) / (8 m + p - 1), and hidden states of all of them have buffers."""


class Coming(NamedTuple):
    """A batch of a group."""

    number: int
    learning_rate: float
    parts: list[Part]
    weight: float


class TwoVersions(RowOfStages):
    """A stage with two versions of its parameters. Batch t uses copy t mod 2, which holds x_{max(0, t - 1)} then.

    Update t takes x_t from the other copy and leaves x_{t+1} in copy t mod 2, which batch t + 2 is the next to use.
    Every rank of the run is in one row. All construct it together.

    Args:
        copies: two of this rank's stage, with the same values.
        schedule: learning rate as a function of the samples that arrived. The rest is as for `RowOfStages`.
    """

    def __init__(
        self,
        copies: tuple[HeldStage, HeldStage],
        grid: Grid,
        assignment: Assignment,
        data: Data,
        recipe: OptimizerRecipe,
        ranks: AllRanks,
        schedule: Schedule,
    ) -> None:
        engine = TorchEngine(grid, copies[0].flat.parameters.device, "1f1b", self._went_back)
        super().__init__(copies[0], grid, engine, assignment, data, recipe, ranks)
        self._copies, self._rate = copies, schedule
        self._group: tuple[Coming, ...] = ()
        self._taken = 0
        """Updates since the beginning of the run."""
        self._exchanging: dict[int, Callable[[], None]] = {}
        """By batch: waits for what its gradient lacks."""
        self._switch = _Switch(self._before, copies)

    def update(self, first: int, count: int) -> list[Computed]:
        """Take an update with each batch of a group: those from `first` on whose hidden states have one shape, `count`
        of them at most.
        """
        group, shape = self._next_group(first, count)
        self._group = group
        for copy in self._copies:
            copy.module.parts = [part for coming in group for part in coming.parts]
        seconds = self.run(self._switch, shape, len(group) * self._micro_batches)
        while self._exchanging:
            self._take(min(self._exchanging))
        losses = torch.tensor([mean_loss(coming.parts) for coming in group], dtype=torch.float64)
        taken = Taken(compute=seconds / len(group))  # to apply is a part of the pipeline's own time
        return [
            Computed(Gradient(loss, coming.weight, self.task.batch_size), taken)
            for coming, loss in zip(group, self._ranks.gather(losses)[self.speakers[0]].tolist(), strict=True)
        ]

    def _next_group(self, first: int, count: int) -> tuple[tuple[Coming, ...], torch.Size]:
        group: list[Coming] = []
        shape: torch.Size | None = None
        for index in range(first, first + count):
            split, weights = self.split(index)
            its_shape = self.shape_of(self._copies[0], split)
            if shape not in (None, its_shape):
                break
            shape, parts = its_shape, self.parts_of(split, weights, index, 1.0)
            group.append(Coming(index, self._rate((index + 1) * self.task.batch_size), parts, sum(weights)))
        assert shape is not None
        return tuple(group), shape

    def _before(self, micro_batch: int) -> int:
        """Which copy computes a micro-batch of the group; it is ready then."""
        number, part = divmod(micro_batch, self._micro_batches)
        batch = self._group[number].number
        if part == 0:
            if batch - 2 in self._exchanging:
                self._take(batch - 2)
            self._copies[batch % 2].flat.release_gradients()
        return batch % 2

    def _went_back(self, micro_batch: int) -> None:
        number, part = divmod(micro_batch, self._micro_batches)
        if part == self._micro_batches - 1:
            batch = self._group[number].number
            copy = self._copies[batch % 2]
            copy.flat.gather_gradients()
            self._exchanging[batch] = self.add_up(copy)

    def _take(self, batch: int) -> None:
        """Update `batch`. What other stages add to its gradient is waited for here, when a later batch needs it: to
        wait for it at once would stop the pipeline.
        """
        began = perf_counter()
        self._exchanging.pop(batch)()
        self._exchange_seconds += perf_counter() - began
        own, other = self._copies[batch % 2], self._copies[(batch - 1) % 2]
        with torch.no_grad():
            own.flat.parameters.copy_(other.flat.parameters)
        self._optimizer.move(own.flat.parameters)
        self._optimizer.step(own.flat.gradients, self._group[batch - self._group[0].number].learning_rate)
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

    def state_dict(self) -> State:
        return {
            "parameters": self.parameters(),
            "before": self.whole(self._older.flat.parameters),
            "optimizers": self.gather_states(state_of(self._optimizer)),
        }

    def load_state_dict(self, state: State) -> None:
        own, self._taken = state["backend"]["ranks"], state["method"]["view"]["version"]
        self._newest.put(own["parameters"])
        self._older.put(own["before"])
        restore(self._optimizer, self.own_state(own["optimizers"]))


class Ahead:
    """How many batches from the next one on are computed in one group: up to the next point of evaluation.

    >>> ahead = Ahead(Budget(samples=100), evaluations=4, batch_size=4)
    >>> [ahead(first) for first in (0, 6, 7, 23, 24)]
    [7, 1, 6, 2, 1]
    """

    def __init__(self, budget: Budget, evaluations: int, batch_size: int) -> None:
        self._points, self._batch_size = EvaluationPoints(budget, evaluations), batch_size

    def __call__(self, first: int) -> int:
        points = self._points
        if not points.by_samples:
            return LONGEST_GROUP
        points.due(first * self._batch_size)
        left = points.next / self._batch_size - first
        return LONGEST_GROUP if left > LONGEST_GROUP else max(1, math.ceil(left))


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
