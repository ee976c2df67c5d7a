"""A replica of the model that lies on a row of ranks, a stage on each: pipeline parallelism.

A batch is cut into m micro-batches, which follow one another through the p stages. Stages compute at the same time, on
different micro-batches. A stage waits for the share (p - 1) / (m + p - 1) of the time, the bubble, if all passes cost
the same (Huang et al. 2019, "GPipe", section 2.3). The gradient is that of the whole batch, up to rounding: a
micro-batch counts with its share of the loss terms. The orders are those of `torch.distributed.pipelining`:

    gpipe   all forward passes, then all backward passes (Huang et al. 2019, "GPipe", section 2.3 and figure 2)
    1f1b    a backward pass as soon as there is one, so at most p micro-batches are in memory (Narayanan et al. 2019,
            "PipeDream", section 3.2; with a flush after each batch as in Narayanan et al. 2021, "Efficient Large-Scale
            Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1)
    2bw     1f1b without a pause between batches, see `TwoVersions`

Every stage holds its own parameters and its own part of the optimizer's state. A parameter that several stages hold
has the sum of their gradients on each of them. Gradients are clipped by the norm over all stages.

Hidden states go between stages in float32. Nothing that comes over the network is unpickled: every stage knows the
shapes of what it receives."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from asyncsgd import runtimes
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import RunError
from asyncsgd.evaluation import evaluate_sets
from asyncsgd.flat import FlatModel, Layout
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.records.events import Taken
from asyncsgd.runtime.base import Budget, EvaluationPoints
from asyncsgd.runtime.collective import AllRanks, Computed, Replica
from asyncsgd.runtime.worker_process import Assignment, Straggling
from asyncsgd.schedules import Schedule
from asyncsgd.stages import Stage, anatomy
from asyncsgd.state import State, restore, state_of
from asyncsgd.tasks.base import Batch, Data, Sums, to_device
from asyncsgd.worker import Gradient

LONGEST_GROUP = 8
"""Batches of ``2bw``. The bubble of a group is (p - 1) / (8 m + p - 1), and hidden states of all of them have buffers.
"""


@dataclasses.dataclass
class Part:
    """A micro-batch of a step, on the device."""

    batch: Batch
    share: float
    """Of its batch's loss terms."""
    scale: float
    """What its loss is multiplied with before the backward pass."""
    seed: int
    """Of its dropout on this stage."""
    loss: Tensor | None = None
    """Not scaled; the last stage puts it here."""


def mean_loss(parts: Sequence[Part]) -> float:
    """Of a batch, over all its loss terms; nan where its losses are not known."""
    return sum(part.share * (math.nan if part.loss is None else float(part.loss)) for part in parts)


class HeldStage(nn.Module):
    """A stage with its parameters and gradients as flat vectors, as engines see it: from the number of a micro-batch
    and hidden states to hidden states, or to the scaled loss, `(1,)`.

    Its `parts` are set before each step, on every rank.
    """

    def __init__(self, assignment: Assignment, data: Data, *, num_stages: int, number: int) -> None:
        super().__init__()
        task, model = assignment.task, assignment.task.model(assignment.seed)
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self.layout = Layout.of(model)
        """Of the whole model."""
        parts = anatomy(task, model, task.split(data.batch(0, 0), assignment.micro_batches)[0])
        self.stage = Stage(task, model, parts, num_stages=num_stages, number=number).to(assignment.device)
        self.flat = FlatModel(self.stage)
        own = dict(self.stage.named_parameters())
        self.names = tuple(named[id(own[name])] for name in self.flat.layout.names)
        """Of its parameters in the whole model, in the order of the flat vector."""
        self.parts: Sequence[Part] = ()
        self._precision = assignment.precision

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Name in the whole model -> view of `vector`, which has the stage's layout."""
        return dict(zip(self.names, self.flat.layout.views(vector).values(), strict=True))

    def put(self, whole: Tensor) -> None:
        """Copy the stage's part of the whole model's parameters, `(P,)`, into the stage."""
        views = self.layout.views(whole)
        with torch.no_grad():
            for name, view in self.views(self.flat.parameters).items():
                view.copy_(views[name])

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        part, lower = self.parts[int(index)], self._precision != torch.float32
        # The one allowed use of torch's default generator: dropout draws from nothing else.
        torch.manual_seed(part.seed)
        with torch.autocast(self.flat.parameters.device.type, dtype=self._precision if lower else None, enabled=lower):
            said = self.stage(part.batch, hidden)
            if not self.stage.is_last:
                # Where all before is frozen, nothing needs a gradient, and torch's stage would fail.
                return said if said.requires_grad else said.requires_grad_()
            if part.share:
                loss = self.stage.task.loss(said, part.batch)
            else:  # the mean over no loss term at all may not be a number
                assert hidden is not None
                loss = hidden.sum() * 0.0
        part.loss = loss.detach()
        return (loss.float() * part.scale).reshape(1)


class Stopwatch:
    """Adds up seconds of computing: of the process on a CPU, of the device's queue on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds, self._events = 0.0, list[tuple[Any, Any]]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """What was added up since the call before."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds


class TimedStage(PipelineStage):
    """torch's stage, with a stopwatch, and a call after each micro-batch's backward pass."""

    watch: Stopwatch
    finished: Callable[[int], None]

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.watch():
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        with self.watch():
            super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        self.finished(bwd_chunk_id)


class Pipeline(Replica):
    """A replica as the rank of one of its stages sees it: rank = replica * stages + stage. All ranks construct it
    together, on the initialised process group.

    Args:
        recipe: of the optimizer that steps this rank's parameters.
        rate: learning rate as a function of the samples that arrived.
    """

    num_copies = 1
    """Of its stage, which a rank holds."""

    def __init__(
        self,
        assignment: Assignment,
        ranks: AllRanks,
        recipe: OptimizerRecipe,
        rate: Schedule,
        runtime: runtimes.Pipeline,
    ) -> None:
        stages, device = runtime.stages, torch.device(assignment.device)
        number, self._stage = divmod(ranks.rank, stages)
        speakers = range(stages - 1, ranks.number, stages)  # the last stage of a replica alone knows its loss
        super().__init__(assignment.task, device, ranks, number, speakers, rate, Straggling(None, 0))
        self._stages, self._replicas = stages, ranks.number // stages
        self._rows = torch.arange(ranks.number).view(-1, stages)
        self._row = self._group(range(stages))
        self._column, _ = dist.new_subgroups_by_enumeration(self._rows.T.tolist())
        self._data = assignment.task.data(assignment.seed)
        self._copies = [
            HeldStage(assignment, self._data, num_stages=stages, number=self._stage) for _ in range(self.num_copies)
        ]
        self._module: nn.Module = self._held
        self._optimizer = recipe.on(self._held.flat.parameters, self._held.flat.layout)
        self._clips, self._seed, self._micro_batches = recipe.clip_norm > 0, assignment.seed, assignment.micro_batches
        self._share_gradients()
        self._schedule_seconds = self._exchange_seconds = 0.0
        self._sent = 0
        self._kind = ScheduleGPipe if runtime.schedule == "gpipe" else Schedule1F1B
        self._built: tuple[torch.Size, int] | None = None
        self._watch: Stopwatch | None = Stopwatch(device)
        self._deepspeed = None
        if runtime.schedule == "deepspeed":
            from asyncsgd.runtime.deepspeed_engine import DeepSpeedEngine

            self._watch = None  # DeepSpeed does not say how long it computes
            config = None if runtime.deepspeed_config is None else Path(runtime.deepspeed_config)
            self._deepspeed = DeepSpeedEngine(self._held, device, config)

    @property
    def _held(self) -> HeldStage:
        """The copy with the parameters of the current version."""
        return self._copies[0]

    def _group(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """Of these stages of this rank's replica; None for a rank that is in none. All ranks call it."""
        group, _ = dist.new_subgroups_by_enumeration(self._rows[:, list(stages)].tolist())
        return group

    def _share_gradients(self) -> None:
        """Find the parameters that several stages hold."""
        held = self._held
        names = [json.loads(text) for text in self.ranks.gather_texts(json.dumps(held.names))][: self._stages]
        self._names: list[list[str]] = names
        """Of the parameters of each stage, in the order of its flat vector."""
        holders = {
            name: tuple(stage for stage in range(self._stages) if name in names[stage]) for name in held.layout.names
        }
        groups = {stages: self._group(stages) for stages in sorted(set(holders.values())) if len(stages) > 1}
        self._shared = {name: groups[holders[name]] for name in held.names if len(holders[name]) > 1}
        self._again = [name for name in held.names if holders[name][0] != self._stage]
        """What an earlier stage holds too."""

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        held = self._held
        held.parts, weight, shape = self.parts(index, weigh)
        held.flat.gradients.zero_()
        self.run(shape, len(held.parts))
        began = time.perf_counter()
        if self._replicas > 1:
            dist.all_reduce(held.flat.gradients, group=self._column)
            # What a ring sends: each number twice, less a share.
            self._sent += 2 * held.flat.gradients.nbytes * (self._replicas - 1) // self._replicas
        for exchange in self.add_up(held):
            exchange.wait()
        self._exchange_seconds += time.perf_counter() - began
        return Gradient(mean_loss(held.parts), weight, self.task.batch_size)

    def parts(self, index: int, weigh: Callable[[float], float]) -> tuple[list[Part], float, torch.Size]:
        """The micro-batches of batch `index` on the device, its loss terms, and the shape of its hidden states.

        Args:
            weigh: given the batch's loss terms, returns its share of those of all replicas.

        Raises:
            RunError: if the hidden states of the first and the last micro-batch have different shapes.
        """
        split = self.task.split(self._data.batch(0, index), self._micro_batches)
        weights = [self.task.weight(part) for part in split]
        whole, moved = sum(weights), [to_device(part, self.device) for part in split]
        shape, last = (self._held.stage.shape(part) for part in (moved[0], moved[-1]))
        if shape != last:
            raise RunError(
                f"micro-batches have hidden states of {tuple(shape)} and {tuple(last)}, and a pipeline needs one "
                f"shape; type a --batch-size that --micro-batches divides"
            )
        factor, own = weigh(whole), range(self._stage, len(split) * self._stages, self._stages)
        seeds = [dropout_seed(self._seed, 0, index, number) for number in own]
        parts = [
            Part(part, weight / whole, factor * weight / whole, seed)
            for part, weight, seed in zip(moved, weights, seeds, strict=True)
        ]
        return parts, whole, shape

    def run(self, shape: torch.Size, number: int) -> float:
        """All passes of `number` micro-batches, which add to the gradients; the seconds."""
        began = time.perf_counter()
        if self._deepspeed is not None:
            self._deepspeed.run(number)
        else:
            self._build(shape, number)
            index = torch.arange(number)
            self._schedule.step(index=index, target=index if self._held.stage.is_last else None)
        neighbours = (not self._held.stage.is_first) + (not self._held.stage.is_last)
        self._sent += neighbours * number * 4 * shape.numel()  # hidden states, or their gradients
        seconds = time.perf_counter() - began
        self._schedule_seconds += seconds
        return seconds

    def _build(self, shape: torch.Size, number: int) -> None:
        """torch's schedule for `number` micro-batches, each with hidden states of `shape`."""
        if self._built == (shape, number):
            return
        self._built, held = (shape, number), self._held.stage
        # A stage has buffers for all that it receives. With shapes given, nobody sends them as pickles.
        hidden, loss = (torch.empty(size, device="meta", requires_grad=True) for size in (shape, (1,)))
        given, gives = () if held.is_first else (hidden,), (loss if held.is_last else hidden,)
        stage = TimedStage(
            self._module, self._stage, self._stages, self.device, input_args=given, output_args=gives, group=self._row
        )
        assert self._watch is not None
        stage.watch, stage.finished = self._watch, self._went_back
        # Losses come scaled: scale_grads would divide whatever is in .grad, once a step.
        self._schedule = self._kind(stage, number, loss_fn=lambda loss, index: loss.squeeze(0), scale_grads=False)

    def _went_back(self, micro_batch: int) -> None:
        """Called after the backward pass of each."""

    def add_up(self, held: HeldStage) -> list[Any]:
        """Begin to add up the gradients of shared parameters over their stages; what to wait for."""
        gradients = held.views(held.flat.gradients)
        self._sent += sum(gradients[name].nbytes for name in self._shared)
        return [dist.all_reduce(gradients[name], group=group, async_op=True) for name, group in self._shared.items()]

    def step(self, learning_rate: float) -> None:
        if self._clips:
            self.norm = self._norm()
        self._optimizer.step(self._held.flat.gradients, learning_rate, norm=self.norm)

    def _norm(self) -> float:
        """Of the gradient of all stages."""
        gradients = self._held.flat.gradients
        views = self._held.views(gradients)
        square = torch.linalg.vector_norm(gradients) ** 2
        for name in self._again:
            square -= torch.linalg.vector_norm(views[name]) ** 2
        dist.all_reduce(square, group=self._row)
        return math.sqrt(max(float(square), 0.0))

    def sums(self) -> Sums:
        """This replica's shard of the evaluation sets. Batches go through the stages one after the other."""
        stage, rank = self._held.stage, self.ranks.rank

        def outputs(batch: Batch) -> object:
            hidden = None
            if not stage.is_first:
                hidden = torch.empty(stage.shape(batch), device=self.device)
                dist.recv(hidden, rank - 1, group=self._row)
            said = stage(batch, hidden)
            if stage.is_last:
                return said
            dist.send(said.contiguous(), rank + 1, group=self._row)
            return None

        return evaluate_sets(self.task, stage, self._data.evaluation, self.number, self._replicas, self.device, outputs)

    def parameters(self) -> Tensor:
        return self._whole(self._held)

    def _whole(self, held: HeldStage) -> Tensor:
        """The parameters of all stages of the first replica, `(P,)`, on the CPU of every rank."""
        whole = torch.zeros(held.layout.size)
        views = held.layout.views(whole)
        for name, view in held.views(held.flat.parameters).items():
            views[name].copy_(view)
        for stage, names in enumerate(self._names):
            for name in names:
                self.ranks.take(views[name], stage)
        return whole

    def check(self) -> None:
        for copy in self._copies:
            copy.flat.check()

    def used(self) -> tuple[tuple[int, int, float | None, float, float, float], ...]:
        computed = math.nan if self._watch is None else self._watch.seconds()
        row = [computed, self._schedule_seconds, self._exchange_seconds, self._sent]
        self._schedule_seconds = self._exchange_seconds = 0.0
        self._sent = 0
        table = self.ranks.gather(torch.tensor(row, dtype=torch.float64)).tolist()
        return tuple(
            (*divmod(rank, self._stages), None if math.isnan(computed) else computed, passed, exchanged, sent)
            for rank, (computed, passed, exchanged, sent) in enumerate(table)
        )

    def state_dict(self) -> State:
        """The optimizers of the stages of the first replica, which are those of all, as bytes of `torch.save`."""
        file = io.BytesIO()
        if self.number == 0:
            torch.save(state_of(self._optimizer), file)
        saved = self.ranks.gather_bytes(file.getvalue())[: self._stages]
        optimizers = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in saved]
        return {"parameters": self.parameters(), "optimizers": optimizers}

    def load_state_dict(self, state: State) -> None:
        own = state["backend"]["ranks"]
        self._held.put(own["parameters"])
        content = io.BytesIO(own["optimizers"][self._stage].cpu().numpy().tobytes())
        restore(self._optimizer, torch.load(content, map_location=self.device, weights_only=True))


class Coming(nn.Module):
    """The micro-batches of several batches, each for the copy of the stage that `choose` says."""

    def __init__(self, choose: Callable[[int], HeldStage]) -> None:
        super().__init__()
        self._choose = choose

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._choose(int(index))(hidden, index=index)


class TwoVersions(Pipeline):
    """An asynchronous pipeline: batches follow one another without a pause, and every gradient is one update old.

        x_{t+1} = x_t - eta grad f(x_{max(0, t - 1)}; batch_t)

    This is PipeDream-2BW (Narayanan, Phanishayee, Shi, Chen, Zaharia: "Memory-Efficient Pipeline-Parallel DNN
    Training", ICML 2021, section 3.1): a stage keeps two versions of its parameters, and the forward and the backward
    pass of a batch use the same one. It is the rule ``fixed_delay:delay=1`` by another way. Batch t uses copy t mod 2,
    which holds x_{max(0, t - 1)} then. Update t takes x_t from the other copy and leaves x_{t+1} in copy t mod 2, which
    batch t + 2 is the next to use.

    A stage begins batch t as soon as it has taken update t - 2, while batch t - 1 is still in the pipeline. With m
    micro-batches to a batch and p <= m stages, 1F1B never asks for more. Batches run in groups, between which rank 0
    says whether to go on. After a group the pipeline runs empty: that costs time and changes no number. A group ends
    before a point of evaluation, and where the shape of the hidden states changes. The server counts two workers that
    take turns, and every rank of the run is in one row.

    A direction is not clipped: its norm would make every stage wait for all others.
    """

    num_copies = 2
    _taken = 0
    """Updates since the beginning of the run."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._module = Coming(self._copy_of)
        self._first = 0
        """Batch of the group."""
        self._exchanging: dict[int, list[Any]] = {}
        """By batch: what its gradient lacks."""

    @property
    def _held(self) -> HeldStage:
        return self._copies[(self._taken - 1) % 2]

    @property
    def _older(self) -> HeldStage:
        """The copy with the parameters of the version before, from which the next batch is computed."""
        return self._copies[self._taken % 2]

    def update(self, first: int, count: int) -> list[Computed]:
        """Take an update with each batch of a group: those from `first` on whose hidden states have one shape, `count`
        of them at most.
        """
        group: list[tuple[list[Part], float]] = []
        parts, weight, shape = self.parts(first, lambda weight: 1.0)
        its_shape = shape
        while its_shape == shape:
            group.append((parts, weight))
            if len(group) == count:
                break
            parts, weight, its_shape = self.parts(first + len(group), lambda weight: 1.0)
        self._first = first
        for copy in self._copies:
            copy.parts = [part for parts, _ in group for part in parts]
        seconds = self.run(shape, len(group) * self._micro_batches)
        while self._exchanging:
            self._take(min(self._exchanging))
        losses = torch.tensor([mean_loss(parts) for parts, _ in group], dtype=torch.float64)
        taken = Taken(compute=seconds / len(group))  # to apply is a part of the pipeline's own time
        return [
            Computed(Gradient(loss, weight, self.task.batch_size), taken)
            for loss, (_, weight) in zip(self.ranks.gather(losses)[self.speakers[0]].tolist(), group, strict=True)
        ]

    def _copy_of(self, micro_batch: int) -> HeldStage:
        """Which copy computes a micro-batch of the group; it is ready then."""
        number, part = divmod(micro_batch, self._micro_batches)
        batch = self._first + number
        copy = self._copies[batch % 2]
        if part == 0:
            if batch - 2 in self._exchanging:
                self._take(batch - 2)
            copy.flat.gradients.zero_()
        return copy

    def _went_back(self, micro_batch: int) -> None:
        number, part = divmod(micro_batch, self._micro_batches)
        if part == self._micro_batches - 1:
            batch = self._first + number
            self._exchanging[batch] = self.add_up(self._copies[batch % 2])

    def _take(self, batch: int) -> None:
        """Update `batch`. What other stages add to its gradient is waited for here, when a later batch needs it: to
        wait for it at once would stop the pipeline.
        """
        began = time.perf_counter()
        for exchange in self._exchanging.pop(batch):
            exchange.wait()
        self._exchange_seconds += time.perf_counter() - began
        own, other = self._copies[batch % 2].flat, self._copies[(batch - 1) % 2].flat
        with torch.no_grad():
            own.parameters.copy_(other.parameters)
        self._optimizer.move(own.parameters)
        self._optimizer.step(own.gradients, self._rate((batch + 1) * self.task.batch_size))
        self._taken = batch + 1

    def state_dict(self) -> State:
        return super().state_dict() | {"before": self._whole(self._older)}

    def load_state_dict(self, state: State) -> None:
        self._taken = state["method"]["view"]["version"]
        super().load_state_dict(state)
        self._older.put(state["backend"]["ranks"]["before"])


def groups(budget: Budget, evaluations: int, batch_size: int) -> Callable[[int], int]:
    """How many batches from the next one on `TwoVersions` computes in one group: up to the next point of evaluation.

    >>> ahead = groups(Budget(samples=100), evaluations=4, batch_size=4)
    >>> [ahead(first) for first in (0, 6, 7, 23, 24)]
    [7, 1, 6, 2, 1]
    """
    points = EvaluationPoints(budget, evaluations)

    def ahead(first: int) -> int:
        if not points.by_samples:
            return LONGEST_GROUP
        points.due(first * batch_size)
        return math.ceil(max(1, min(LONGEST_GROUP, points.next / batch_size - first)))

    return ahead
