"""A replica of the model that lies on a row of ranks, a stage on each: pipeline parallelism.

A batch is cut into m micro-batches, which follow one another through the p stages. Stages compute at the same time, on
different micro-batches. A stage waits for the share (p - 1) / (m + p - 1) of the time, the bubble, if all passes cost
the same (Huang et al. 2019, "GPipe", section 2.3). The gradient is that of the whole batch, up to rounding: a
micro-batch counts with its share of the loss terms.

Every stage holds its own parameters and its own part of the optimizer's state. A parameter that several stages hold
has the sum of their gradients on each of them. Gradients are clipped by the norm over all stages."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import RunError
from asyncsgd.evaluation import evaluate_sets
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.pipeline_engine import Grid, MicroBatches, Part, TorchEngine, mean_loss
from asyncsgd.runtime.worker_process import Assignment
from asyncsgd.stages import Stage, anatomy
from asyncsgd.state import State, restore, state_of
from asyncsgd.tasks.base import Batch, Data, Sums, to_device
from asyncsgd.worker import Gradient

if TYPE_CHECKING:
    from asyncsgd.runtime.deepspeed_engine import DeepSpeedEngine


class HeldStage:
    """A stage with its parameters and gradients as flat vectors.

    Args:
        whole: the whole model at the parameters to begin with, on the CPU. Read only.
    """

    def __init__(self, assignment: Assignment, grid: Grid, data: Data, whole: FlatModel) -> None:
        task, model = assignment.task, assignment.task.model(assignment.seed)
        parts = anatomy(task, model, task.split(data.batch(0, 0), assignment.micro_batches)[0])
        stage = Stage(task, model, parts, num_stages=grid.num_stages, number=grid.stage).to(assignment.device)
        self.module = MicroBatches(stage, assignment.precision)
        self.flat = FlatModel(stage)
        self.layout = whole.layout
        """Of the whole model."""
        names = stage.names_in_model()
        self.names = tuple(names[name] for name in self.flat.layout.names)
        """Of its parameters in the whole model, in the order of the flat vector."""
        self.put(whole.parameters)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Name in the whole model -> view of `vector`, which has the stage's layout."""
        return dict(zip(self.names, self.flat.layout.views(vector).values(), strict=True))

    def put(self, whole: Tensor) -> None:
        """Copy the stage's part of the whole model's parameters, `(P,)`, into the stage."""
        views = self.layout.views(whole)
        with torch.no_grad():
            for name, view in self.views(self.flat.parameters).items():
                view.copy_(views[name])


class Shared:
    """The parameters that several stages hold: the sum of their gradients, and what counts once in a norm.

    All ranks construct it together.
    """

    def __init__(self, grid: Grid, held: HeldStage, ranks: AllRanks) -> None:
        self.names: list[list[str]] = [json.loads(text) for text in ranks.gather_texts(json.dumps(held.names))]
        """Of the parameters of each stage, in the order of its flat vector."""
        holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self.names[: grid.num_stages]):
            for name in names:
                holders.setdefault(name, []).append(stage)
        views = held.layout.views(torch.empty(held.layout.size, device="meta"))
        self._sizes = {name: views[name].numel() for name, stages in sorted(holders.items()) if len(stages) > 1}
        several = sorted({stage for name in self._sizes for stage in holders[name]})
        self._group = grid.of_stages(several) if several else None
        self.again = tuple(name for name in held.names if holders[name][0] != grid.stage)
        """What an earlier stage holds too."""
        self.num_bytes = 0 if self._group is None else 4 * sum(self._sizes.values())
        """That this rank sends for one gradient."""

    def add_up(self, gradients: dict[str, Tensor]) -> Callable[[], None]:
        """Begin to add up the gradients of shared parameters over their stages.

        Args:
            gradients: this stage's, by their names in the whole model. Borrowed until the end.

        Returns:
            A function that waits and puts the sums into `gradients`.
        """
        if self._group is None:
            return lambda: None
        device = next(iter(gradients.values())).device
        parts = [
            gradients[name].flatten() if name in gradients else torch.zeros(size, device=device)
            for name, size in self._sizes.items()
        ]
        row = torch.cat(parts)
        work = dist.all_reduce(row, group=self._group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            for name, summed in zip(self._sizes, row.split(list(self._sizes.values())), strict=True):
                if name in gradients:
                    gradients[name].copy_(summed.view_as(gradients[name]))

        return finish


class RowOfStages:
    """A replica as the rank of one of its stages sees it. All ranks construct it together.

    Args:
        held: this rank's stage.
        engine: moves micro-batches through it.
        data: the task's, with the same seed. Every stage reads every batch of its replica.
    """

    norm: float | None = None

    def __init__(
        self,
        held: HeldStage,
        grid: Grid,
        engine: TorchEngine | DeepSpeedEngine,
        assignment: Assignment,
        data: Data,
        recipe: OptimizerRecipe,
        ranks: AllRanks,
    ) -> None:
        self.task, self.device = assignment.task, held.flat.parameters.device
        self.number, self.speakers = grid.replica, grid.speakers
        self._held, self._grid, self._engine, self._data, self._ranks = held, grid, engine, data, ranks
        self._optimizer = recipe.on(held.flat.parameters, held.flat.layout)
        self._recipe, self._seed, self._micro_batches = recipe, assignment.seed, assignment.micro_batches
        self._shared = Shared(grid, held, ranks)
        self._schedule_seconds = self._exchange_seconds = 0.0
        self._sent = 0

    def split(self, index: int) -> tuple[Sequence[Batch], list[float]]:
        """The micro-batches of batch `index`, on the CPU, and their loss terms."""
        split = self.task.split(self._data.batch(0, index), self._micro_batches)
        return split, [self.task.weight(part) for part in split]

    def parts_of(self, split: Sequence[Batch], weights: Sequence[float], index: int, factor: float) -> list[Part]:
        """The micro-batches on the device; `factor` is the batch's share of all replicas' loss terms."""
        whole, stages, stage = sum(weights), self._grid.num_stages, self._grid.stage
        return [
            Part(
                to_device(part, self.device),
                weight / whole,
                factor * weight / whole,
                dropout_seed(self._seed, 0, index, number * stages + stage),
            )
            for number, (part, weight) in enumerate(zip(split, weights, strict=True))
        ]

    def shape_of(self, held: HeldStage, split: Sequence[Batch]) -> torch.Size:
        """The shape of the hidden states of every micro-batch.

        Raises:
            RunError: if the first and the last differ.
        """
        first, last = (held.module.stage.shape(to_device(part, self.device)) for part in (split[0], split[-1]))
        if first != last:
            raise RunError(
                f"micro-batches have hidden states of {tuple(first)} and {tuple(last)}, and a pipeline needs one "
                f"shape; type a --batch-size that --micro-batches divides"
            )
        return first

    def run(self, module: nn.Module, shape: torch.Size, number: int) -> float:
        """All passes of `number` micro-batches; the seconds."""
        began = time.perf_counter()
        self._engine.run(module, shape, number)
        neighbours = (self._grid.stage > 0) + (self._grid.stage < self._grid.num_stages - 1)
        self._sent += neighbours * number * 4 * shape.numel()  # hidden states, or their gradients
        seconds = time.perf_counter() - began
        self._schedule_seconds += seconds
        return seconds

    def add_up(self, held: HeldStage) -> Callable[[], None]:
        """See `Shared`."""
        self._sent += self._shared.num_bytes
        return self._shared.add_up(held.views(held.flat.gradients))

    def evaluate_at(self, held: HeldStage) -> Sums:
        """This replica's shard of the evaluation sets. Batches go through the stages one after the other."""
        grid, stage = self._grid, held.module.stage

        def outputs(batch: Batch) -> object:
            hidden = None
            if not stage.is_first:
                hidden = torch.empty(stage.shape(batch), device=self.device)
                dist.recv(hidden, grid.rank_of(grid.stage - 1), group=grid.row)
            said = stage(batch, hidden)
            if stage.is_last:
                return said
            dist.send(said.contiguous(), grid.rank_of(grid.stage + 1), group=grid.row)
            return None

        sets = self._data.evaluation
        return evaluate_sets(self.task, stage, sets, grid.replica, grid.num_replicas, self.device, outputs)

    def whole(self, vector: Tensor) -> Tensor:
        """The vectors of all stages, each in its own layout, as one of the whole model; on the CPU of every rank."""
        whole = torch.zeros(self._held.layout.size)
        views = self._held.layout.views(whole)
        for stage in range(self._grid.num_stages):
            if not (names := self._shared.names[stage]):
                continue  # all of the stage is frozen
            sizes = [views[name].numel() for name in names]
            row = torch.empty(sum(sizes), device=self.device)
            if stage == self._grid.stage:
                torch.cat([view.flatten() for view in self._held.views(vector).values()], out=row)
            dist.broadcast(row, self._grid.rank_of(stage), group=self._grid.row)
            for name, part in zip(names, row.cpu().split(sizes), strict=True):
                views[name].copy_(part.view_as(views[name]))
        return whole

    def used(self) -> tuple[tuple[int, int, float | None, float, float, float], ...]:
        """What each rank has done since the call before; see `asyncsgd.records.events.StagesUsed`."""
        watch = self._engine.watch
        row = [math.nan if watch is None else watch.seconds(), self._schedule_seconds, self._exchange_seconds]
        table = self._ranks.gather(torch.tensor([*row, float(self._sent)], dtype=torch.float64)).tolist()
        self._schedule_seconds = self._exchange_seconds = 0.0
        self._sent = 0
        return tuple(
            (*divmod(rank, self._grid.num_stages), None if math.isnan(computed) else computed, passed, exchanged, sent)
            for rank, (computed, passed, exchanged, sent) in enumerate(table)
        )

    def gather_states(self, state: State) -> list[Tensor]:
        """The states of the stages of the first replica, which are those of all, as bytes of `torch.save`."""
        file = io.BytesIO()
        if self._grid.replica == 0:
            torch.save(state, file)
        saved = self._ranks.gather_bytes(file.getvalue())[: self._grid.num_stages]
        return [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in saved]

    def own_state(self, states: list[Tensor]) -> State:
        """This stage's of what `gather_states` gave."""
        content = states[self._grid.stage].cpu().numpy().tobytes()
        return torch.load(io.BytesIO(content), map_location=self.device, weights_only=True)


class Pipeline(RowOfStages):
    """A synchronous pipeline; see `asyncsgd.runtime.collective.SynchronousReplica`."""

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        held, grid = self._held, self._grid
        split, weights = self.split(index)
        share = weigh(sum(weights))
        held.module.parts = self.parts_of(split, weights, index, share)
        held.flat.release_gradients()
        if self._engine.in_place:
            held.flat.gather_gradients()  # zeros
        self.run(held.module, self.shape_of(held, split), len(split))
        computed = time.perf_counter()
        held.flat.gather_gradients()
        if grid.num_replicas > 1:
            dist.all_reduce(held.flat.gradients, group=grid.column)
            # What a ring sends: each number twice, less a share.
            self._sent += 2 * held.flat.gradients.nbytes * (grid.num_replicas - 1) // grid.num_replicas
        self.add_up(held)()
        self._exchange_seconds += time.perf_counter() - computed
        return Gradient(mean_loss(held.module.parts), sum(weights), self.task.batch_size)

    def step(self, learning_rate: float) -> None:
        if self._recipe.clip_norm > 0:
            self.norm = self._norm()
        self._optimizer.step(self._held.flat.gradients, learning_rate, norm=self.norm)

    def _norm(self) -> float:
        """Of the gradient of all stages."""
        gradients = self._held.flat.gradients
        views = self._held.views(gradients)
        square = torch.linalg.vector_norm(gradients) ** 2
        for name in self._shared.again:
            square -= torch.linalg.vector_norm(views[name]) ** 2
        dist.all_reduce(square, group=self._grid.row)
        return math.sqrt(max(float(square), 0.0))

    def evaluate(self) -> Sums:
        return self.evaluate_at(self._held)

    def parameters(self) -> Tensor:
        return self.whole(self._held.flat.parameters)

    def check(self) -> None:
        self._held.flat.check()

    def state_dict(self) -> State:
        return {"parameters": self.parameters(), "optimizers": self.gather_states(state_of(self._optimizer))}

    def load_state_dict(self, state: State) -> None:
        own = state["backend"]["ranks"]
        self._held.put(own["parameters"])
        restore(self._optimizer, self.own_state(own["optimizers"]))
