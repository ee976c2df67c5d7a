"""How micro-batches go through the stages of a pipeline: orders of `torch.distributed.pipelining`, timed.

    gpipe   all forward passes, then all backward passes (Huang et al. 2019, "GPipe", section 2.3 and figure 2)
    1f1b    a backward pass as soon as there is one, so at most p micro-batches are in memory (Narayanan et al. 2019,
            "PipeDream", section 3.2; with a flush after each batch as in Narayanan et al. 2021, "Efficient Large-Scale
            Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1)

Hidden states go between stages in float32. Nothing that comes over the network is unpickled: every stage knows the
shapes of what it receives."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.stages import Stage
from asyncsgd.tasks.base import Batch

SCHEDULES: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Grid:
    """Which stage of which replica each rank is: rank = replica * num_stages + stage. All ranks construct it."""

    def __init__(self, ranks: AllRanks, num_stages: int) -> None:
        self.num_stages, self.num_replicas = num_stages, ranks.number // num_stages
        self.replica, self.stage = divmod(ranks.rank, num_stages)
        self._rank = ranks.rank
        self.row = self.of_stages(range(num_stages))
        """The stages of this rank's replica."""
        self.column = self._group(range(stage, ranks.number, num_stages) for stage in range(num_stages))
        """This rank's stage in all replicas."""
        self.speakers: Sequence[int] = range(num_stages - 1, ranks.number, num_stages)
        """The last stage of every replica, which alone knows the loss."""

    def _group(self, groups: Iterator[Sequence[int]]) -> dist.ProcessGroup | None:
        """The one of several disjoint groups of ranks that this rank is in; all ranks call it."""
        made = [(members, dist.new_group(list(members))) for members in groups]
        return next((group for members, group in made if self._rank in members), None)

    def of_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of some stages of this rank's replica; None for a rank that is in none. All ranks call it."""
        return self._group([r * self.num_stages + s for s in stages] for r in range(self.num_replicas))

    def rank_of(self, stage: int) -> int:
        """The rank of a stage of this rank's replica."""
        return self.replica * self.num_stages + stage


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


class MicroBatches(nn.Module):
    """A stage as engines see it: from the number of a micro-batch and hidden states to hidden states, or to the loss.

    Its `parts` are set before each step, on every rank. The last stage gives the scaled loss, `(1,)`.
    """

    def __init__(self, stage: Stage, precision: torch.dtype) -> None:
        super().__init__()
        self.stage = stage
        self.parts: Sequence[Part] = ()
        self._precision = precision

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        part = self.parts[int(index)]
        # The one allowed use of torch's default generator: dropout draws from nothing else.
        torch.manual_seed(part.seed)
        device, lower = next(self.parameters()).device.type, self._precision != torch.float32
        with torch.autocast(device, dtype=self._precision if lower else None, enabled=lower):
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
    finished: Callable[[int], None] | None

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.watch():
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        with self.watch():
            super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        if self.finished is not None:
            self.finished(bwd_chunk_id)


class TorchEngine:
    """Moves the micro-batches of a step through this rank's stage, and adds up the parameters' gradients.

    Args:
        kind: of `SCHEDULES`.
        finished: called with the number of each micro-batch whose backward pass is done.
    """

    in_place = False
    """Whether every ``.grad`` has to be there and is added to. Here it may be None."""

    def __init__(
        self, grid: Grid, device: torch.device, kind: str, finished: Callable[[int], None] | None = None
    ) -> None:
        self.watch: Stopwatch | None = Stopwatch(device)
        """Of what this rank has computed; None where an engine does not say."""
        self._grid, self._device, self._kind, self._finished = grid, device, SCHEDULES[kind], finished
        self._built: tuple[torch.Size, int] | None = None

    def run(self, module: nn.Module, shape: torch.Size, number: int) -> None:
        """Compute all passes of a step of `number` micro-batches, each with hidden states of `shape`."""
        grid = self._grid
        is_last = grid.stage == grid.num_stages - 1
        if self._built != (shape, number):
            # A stage has buffers for all that it receives. With shapes given, nobody sends them as pickles.
            hidden = torch.empty(shape, device="meta", requires_grad=True)
            stage = TimedStage(
                module,
                grid.stage,
                grid.num_stages,
                self._device,
                input_args=() if grid.stage == 0 else (hidden,),
                output_args=(torch.empty(1, device="meta", requires_grad=True) if is_last else hidden,),
                group=grid.row,
            )
            assert self.watch is not None
            stage.watch, stage.finished = self.watch, self._finished
            # Losses come scaled: scale_grads would divide whatever is in .grad, once a step.
            self._schedule = self._kind(stage, number, loss_fn=lambda loss, index: loss.squeeze(0), scale_grads=False)
            self._built = shape, number
        index = torch.arange(number)
        self._schedule.step(index=index, target=index if is_last else None)
