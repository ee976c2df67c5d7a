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
has the sum of their gradients on each of them. Gradients are clipped by the norm over all stages, but with
`2bw`, which refuses clipping.

Hidden states go between stages in float32. Nothing that comes over the network is unpickled: every stage knows the
shapes of what it receives."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from asyncsgd.backends.ranks import GradientAndTimes, Replica
from asyncsgd.core.checkpoints import KeptState
from asyncsgd.core.state import State, restore, state_of
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import RunError
from asyncsgd.pipeline.held_stage import HeldStage, Part, mean_loss
from asyncsgd.records.events import StageUse, Taken
from asyncsgd.run import runtimes
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import Batch, Sums, to_device
from asyncsgd.worker.evaluation import evaluate_sets
from asyncsgd.worker.worker import Gradient

COMPUTING, PASSING, EXCHANGING, SENT = range(4)
"""The places of what a stage uses, as in `asyncsgd.records.events.StageUse` after the two numbers."""


class TimedStage(PipelineStage):
    """torch's stage, which notes when a pass begins and ends: in this process, or in the queue of a GPU."""

    passes: list[tuple[Any, Any]]
    """The beginning and the end of each pass."""
    finished: Callable[[int], None]
    """Called after each micro-batch's backward pass."""

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        began = self._moment()
        try:
            result = super().forward_one_chunk(*arguments, **named)
        except RuntimeError as error:
            if isinstance(error.__cause__, RunError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        self.passes.append((began, self._moment()))
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        began = self._moment()
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        self.passes.append((began, self._moment()))
        self.finished(bwd_chunk_id)

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """The seconds of all passes since the last call."""
        passes = self.passes
        self.passes = []
        if self.device.type != "cuda":
            return sum(end - began for began, end in passes)
        torch.cuda.synchronize()
        return sum(began.elapsed_time(end) for began, end in passes) / 1e3


class Pipeline(Replica):
    """A replica as the rank of one of its stages sees it: rank = replica * stages + stage."""

    num_copies = 1
    """How many copies of its stage a rank holds."""

    def __init__(self, run: Run) -> None:
        runtime = run.runtime
        assert isinstance(runtime, runtimes.Pipeline)
        super().__init__(run, runtime.stages)
        self._stages = runtime.stages
        self._replicas = len(self.last_ranks)
        self._stage = self.ranks.rank % self._stages
        self._data = self.task.data(run.seed)
        self._row = self._group(range(self._stages))
        self._column = self._group()
        self._copies = [
            HeldStage(run, self._data, self.ranks, self._stages, self._stage) for _ in range(self.num_copies)
        ]
        held = self._held
        self._module: nn.Module = held
        layout = dataclasses.replace(held.flat.layout, names=held.names)
        self._optimizer = run.recipe.on(held.flat.parameters, layout)
        self._clips = run.recipe.clip_norm > 0
        self._seed = run.seed
        self._micro_batches = run.micro_batches
        self._share_gradients()
        self._used = torch.zeros(4, dtype=torch.float64)
        self._kind = ScheduleGPipe if runtime.schedule == "gpipe" else Schedule1F1B
        self._built: tuple[torch.Size, int] | None = None
        """The shape of the hidden states and the number of micro-batches that the schedule was built for."""
        self._deepspeed = None
        if runtime.schedule == "deepspeed":
            from asyncsgd.pipeline.deepspeed_engine import DeepSpeedEngine, configuration

            config = configuration(runtime.deepspeed_config)
            self._deepspeed = DeepSpeedEngine(held, self.device, config)

    @property
    def _held(self) -> HeldStage:
        """The copy with the parameters of the current version."""
        return self._copies[0]

    def _group(self, stages: Sequence[int] = ()) -> dist.ProcessGroup | None:
        """The group of these stages of this rank's replica; without stages, of this rank's stage in all replicas.

        It is None for a rank that is in no such group. All ranks call it.
        """
        rows = torch.arange(self.ranks.num_ranks).view(-1, self._stages)
        members = rows[:, [*stages]] if stages else rows.T
        group, _ = dist.new_subgroups_by_enumeration(members.tolist())
        return group

    def _share_gradients(self) -> None:
        """Find the parameters that several stages hold."""
        held = self._held
        texts = self.ranks.gather_texts(json.dumps(self._held.names))
        self._names: list[list[str]] = [json.loads(text) for text in texts[: self._stages]]
        """The names of the parameters of each stage."""
        self._shared: dict[str, dist.ProcessGroup | None] = {}
        """The group of the stages that hold a parameter of this stage too, by its name."""
        self._held_earlier: list[str] = []
        """The parameters that an earlier stage holds too."""
        for name in held.layout.names:
            holders = [stage for stage, names in enumerate(self._names) if name in names]
            if len(holders) < 2:
                continue
            group = self._group(holders)  # all ranks call it, for every shared parameter
            if name in held.names:
                self._shared[name] = group
                if holders[0] != self._stage:
                    self._held_earlier.append(name)

    def gradient(self, index: int, weigh: Callable[[float], float]) -> Gradient:
        held = self._held
        held.parts, weight, shape = self.parts(index, weigh)
        gradients = held.flat.gradients
        gradients.zero_()
        self.run(shape, len(held.parts))
        began = time.perf_counter()
        if self._replicas > 1:
            dist.all_reduce(gradients, group=self._column)
            # A ring sends each number twice, less a share.
            num_bytes = 2 * gradients.nbytes
            self._used[SENT] += num_bytes * (self._replicas - 1) // self._replicas
        for exchange in self.add_up(held):
            exchange.wait()
        self._used[EXCHANGING] += time.perf_counter() - began
        return Gradient(mean_loss(held.parts), weight, self.task.batch_size)

    def parts(self, index: int, weigh: Callable[[float], float]) -> tuple[list[Part], float, torch.Size]:
        """The micro-batches of batch `index` on the device, its loss terms, and the shape of its hidden states.

        Raises:
            RunError: if the hidden states of the first and the last micro-batch have different shapes.
        """
        micro_batches = self.task.split(self._data.batch(0, index), self._micro_batches)
        weights = [self.task.weight(micro_batch) for micro_batch in micro_batches]
        total = sum(weights)
        batch_share = weigh(total)
        if not total:
            raise RunError(
                f"batch {index} has no loss term, and the stages of a pipeline cannot leave a batch out; train in "
                f"another mode, or leave such samples out of the data"
            )
        parts = []
        for number, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
            seed = dropout_seed(self._seed, 0, index, number * self._stages + self._stage)
            batch = to_device(micro_batch, self.device)
            parts.append(Part(batch, share=weight / total, scale=batch_share * weight / total, seed=seed))
        shape = self._held.stage.shape(parts[0].batch)
        last_shape = self._held.stage.shape(parts[-1].batch)
        if shape != last_shape:
            raise RunError(
                f"micro-batches have hidden states of {tuple(shape)} and {tuple(last_shape)}, and a pipeline needs one "
                f"shape; type a --batch-size that --micro-batches divides"
            )
        return parts, total, shape

    def run(self, shape: torch.Size, number: int) -> float:
        """Compute all passes of `number` micro-batches, which add to the gradients; return the seconds."""
        began = time.perf_counter()
        if self._deepspeed is not None:
            self._deepspeed.run(number)
            self._used[COMPUTING] = math.nan  # it does not say
        else:
            if self._built != (shape, number):
                self._build(shape, number)
                self._built = shape, number
            index = torch.arange(number)
            self._schedule.step(index=index, target=index if self._held.stage.is_last else None)
            self._used[COMPUTING] += self._timed.seconds()
        bytes_sent = number * 4 * shape.numel()  # hidden states, or their gradients
        if not self._held.stage.is_first:
            self._used[SENT] += bytes_sent
        if not self._held.stage.is_last:
            self._used[SENT] += bytes_sent
        seconds = time.perf_counter() - began
        self._used[PASSING] += seconds
        return seconds

    def _build(self, shape: torch.Size, number: int) -> None:
        """Build torch's schedule for `number` micro-batches, each with hidden states of `shape`."""
        held = self._held.stage
        # A stage has buffers for all that it receives. With shapes given, nobody sends them as pickles.
        hidden = torch.empty(shape, device="meta", dtype=torch.float32, requires_grad=True)
        loss = torch.empty(1, device="meta", dtype=torch.float32, requires_grad=True)
        stage = TimedStage(
            self._module,
            self._stage,
            self._stages,
            self.device,
            input_args=() if held.is_first else (hidden,),
            output_args=(loss if held.is_last else hidden,),
            group=self._row,
        )
        stage.passes = []
        stage.finished = self._went_back
        self._timed = stage
        # Losses come scaled: scale_grads would divide whatever is in .grad, once a step.
        self._schedule = self._kind(stage, number, loss_fn=lambda loss, index: loss.squeeze(0), scale_grads=False)

    def _went_back(self, micro_batch: int) -> None:
        """Called after the backward pass of each micro-batch."""

    def add_up(self, held: HeldStage) -> list[Any]:
        """Begin to add up the gradients of shared parameters over their stages; return the exchanges to wait for."""
        gradients = held.views(held.flat.gradients)
        exchanges = []
        for name, group in self._shared.items():
            self._used[SENT] += gradients[name].nbytes
            exchanges.append(dist.all_reduce(gradients[name], group=group, async_op=True))
        return exchanges

    def step(self, learning_rate: float, frozen: tuple[str, ...]) -> None:
        gradients = self._held.flat.gradients
        if self._clips:  # by the norm of the gradient of all stages
            views = self._held.views(gradients)
            square = torch.linalg.vector_norm(gradients) ** 2
            for name in self._held_earlier:
                square -= torch.linalg.vector_norm(views[name]) ** 2
            dist.all_reduce(square, group=self._row)
            self.norm = math.sqrt(max(float(square), 0.0))
        self._optimizer.step(gradients, learning_rate, norm=self.norm)

    def sums(self) -> Sums:
        """This replica's shard of the evaluation sets. Batches go through the stages one after the other."""
        for copy in self._copies:
            copy.flat.check()
        stage = self._held.stage
        rank = self.ranks.rank

        def outputs(batch: Batch) -> object:
            hidden = None
            if not stage.is_first:
                hidden = torch.empty(stage.shape(batch), device=self.device, dtype=torch.float32)
                dist.recv(hidden, rank - 1, group=self._row)
            output = stage(batch, hidden)
            if stage.is_last:
                return output
            dist.send(output.contiguous(), rank + 1, group=self._row)
            return None

        return evaluate_sets(
            self.task, stage, self._data.evaluation, self.replica_number, self._replicas, self.device, outputs
        )

    def parameters(self, held: HeldStage | None = None) -> Tensor:
        """The parameters of all stages of the first replica, `(P,)`, on the CPU of every rank.

        Args:
            held: which copy; None: the current one.
        """
        held = held or self._held
        whole = torch.zeros(held.layout.size, dtype=torch.float32)
        views = held.layout.views(whole)
        for name, view in held.views(held.flat.parameters).items():
            views[name].copy_(view)
        for stage, names in enumerate(self._names):
            for name in names:
                self.ranks.broadcast(views[name], stage)
        return whole

    def used(self) -> tuple[StageUse, ...]:
        table = self.ranks.gather(self._used).tolist()
        self._used.zero_()
        rows = []
        for rank, (computed, passed, exchanged, sent) in enumerate(table):
            replica, stage = divmod(rank, self._stages)
            known = None if math.isnan(computed) else computed
            rows.append((replica, stage, known, passed, exchanged, sent))
        return tuple(rows)

    def state_dict(self) -> State:
        """The optimizers of the stages of the first replica, which are those of all, as bytes of `torch.save`."""
        file = io.BytesIO()
        if self.replica_number == 0:
            torch.save(state_of(self._optimizer), file)
        contents = self.ranks.gather_bytes(file.getvalue())
        optimizers = []
        for content in contents[: self._stages]:
            optimizers.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return {"parameters": self.parameters(), "optimizers": optimizers}

    def resume_from(self, state: State) -> None:
        kept = KeptState(state).of_ranks
        assert kept is not None
        self._held.put(kept["parameters"])
        content = kept["optimizers"][self._stage].cpu().numpy()
        file = io.BytesIO(content.tobytes())
        restore(self._optimizer, torch.load(file, map_location=self.device, weights_only=True))


class Chosen(nn.Module):
    """Gives each micro-batch to the copy of a stage that `choose` says."""

    def __init__(self, choose: Callable[[int], HeldStage]) -> None:
        super().__init__()
        self._choose = choose

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._choose(int(index))(hidden, index=index)


class TwoVersions(Pipeline):
    """An asynchronous pipeline: batches follow one another without a pause, and every gradient is one update old.

        x_{t+1} = x_t - eta grad f(x_{max(0, t - 1)}; batch_t)

    This is PipeDream-2BW (Narayanan, Phanishayee, Shi, Chen, Zaharia: "Memory-Efficient Pipeline-Parallel DNN
    Training", ICML 2021, section 3.1), the rule ``fixed_delay:delay=1`` by another way. Batch t uses copy t mod 2,
    which holds x_{max(0, t - 1)} then. Update t takes x_t from the other copy and leaves x_{t+1} in copy t mod 2.

    A stage begins batch t as soon as it has taken update t - 2, while batch t - 1 is still in the pipeline. With m
    micro-batches to a batch and p <= m stages, 1F1B never asks for more. Batches run in groups, after which the
    pipeline runs empty: that costs time and changes no number. A group ends before a point of evaluation, and where the
    shape of the hidden states changes. A direction is not clipped: its norm would make every stage wait for all others.
    """

    num_copies = 2
    _taken = 0
    """The version: how many updates were taken since the beginning of the run."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._module = Chosen(self._copy_of)
        self._first = 0
        """The first batch of the group."""
        self._exchanging: dict[int, list[Any]] = {}
        """The exchanges that the gradient of a batch waits for, by the batch."""

    @property
    def _held(self) -> HeldStage:
        return self._copies[(self._taken - 1) % 2]

    def update(self, first: int, count: int) -> list[GradientAndTimes]:
        """Take an update with each batch from `first` on whose hidden states have one shape, `count` at most."""
        parts, weight, shape = self.parts(first, lambda weight: 1.0)
        group = [parts]
        weights = [weight]
        for index in range(first + 1, first + count):
            parts, weight, next_shape = self.parts(index, lambda weight: 1.0)
            if next_shape != shape:
                break
            group.append(parts)
            weights.append(weight)
        self._first = first
        for copy in self._copies:
            copy.parts = list(itertools.chain(*group))
        seconds = self.run(shape, len(group) * self._micro_batches)
        while self._exchanging:
            self._take(min(self._exchanging))
        own_losses = torch.tensor([mean_loss(parts) for parts in group], dtype=torch.float64)
        losses = self.ranks.gather(own_losses)[self.last_ranks[0]]
        taken = Taken(compute=seconds / len(group))  # to apply is a part of the pipeline's own time
        computed = []
        for loss, weight in zip(losses.tolist(), weights, strict=True):
            computed.append((Gradient(loss, weight, self.task.batch_size), taken))
        return computed

    def _copy_of(self, micro_batch: int) -> HeldStage:
        """The copy that computes a micro-batch of the group, ready to compute it."""
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
        """Take the update of a batch. It waits for what other stages add to the gradient. This is done when a later
        batch needs the update, since to wait at once would stop the pipeline.
        """
        began = time.perf_counter()
        for exchange in self._exchanging.pop(batch):
            exchange.wait()
        self._used[EXCHANGING] += time.perf_counter() - began
        own = self._copies[batch % 2].flat
        other = self._copies[(batch - 1) % 2].flat
        with torch.no_grad():
            own.parameters.copy_(other.parameters)
        self._optimizer.rebind(own.parameters)
        self._optimizer.step(own.gradients, self._learning_rate_at((batch + 1) * self.task.batch_size))
        self._taken = batch + 1

    def state_dict(self) -> State:
        before = self._copies[self._taken % 2]
        return super().state_dict() | {"before": self.parameters(before)}

    def resume_from(self, state: State) -> None:
        kept = KeptState(state)
        assert kept.of_ranks is not None
        self._taken = kept.version
        super().resume_from(state)
        self._copies[self._taken % 2].put(kept.of_ranks["before"])
