"""What a process that computes gradients is told, how it makes them take their time, and how it fails."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import traceback
from multiprocessing import parent_process
from typing import NoReturn

import torch

from asyncsgd.flat import FlatModel
from asyncsgd.measure import Profile, ProfiledWorker
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.runtime.launch import OUT_OF_MEMORY, REASONS
from asyncsgd.schedules import Schedule
from asyncsgd.settings.training import Machine
from asyncsgd.signals import NUMBERS
from asyncsgd.simulation.sampler import Sampler
from asyncsgd.simulation.speeds import Speeds
from asyncsgd.tasks.base import Task
from asyncsgd.worker import Worker, is_out_of_memory


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What any process needs to compute gradients and evaluations: names and numbers, no tensors; can be pickled."""

    task: Task
    seed: int
    threads: int
    device: str
    precision: torch.dtype
    micro_batches: int
    """Parts of a batch; see `Worker`."""
    savings: Machine
    inner: OptimizerRecipe
    """The optimizer of local steps, in rules that have them."""
    num_workers: int
    speeds: Speeds | None
    """How long gradients are made to take; None: as long as they do."""
    profile: Profile | None = None
    all_gpus: bool = False
    """See `asyncsgd.worker.OnAllGPUs`."""
    tells: bool = False
    """Whether this process tells the user what compiling took."""
    num_batches: float = math.inf
    """Of the budget. A worker that is never idle may be given one behind them, which the data need not have."""

    def worker(self, flat: FlatModel) -> Worker:
        """Put a worker together around a model that is bound to `flat`."""
        kind = Worker if self.profile is None else ProfiledWorker
        worker = kind(
            flat,
            self.task,
            self.task.data(self.seed),
            seed=self.seed,
            precision=self.precision,
            micro_batches=self.micro_batches,
            all_gpus=self.all_gpus,
            savings=self.savings,
        )
        if isinstance(worker, ProfiledWorker) and self.profile is not None:
            worker.profile = self.profile
        if self.tells and worker.compile_seconds:
            print(f"compile the first gradient took {worker.compile_seconds:.0f} s, once", flush=True)
        return worker


class Straggling:
    """Makes a worker's gradients take as long as the assignment's speeds say, by waiting for the rest of the time.

    >>> Straggling(None, 0).wait_seconds(0.5, first_draw=7)
    0.0
    """

    def __init__(self, sampler: Sampler | None, worker: int) -> None:
        self._sampler, self._worker = sampler, worker

    @classmethod
    def of(cls, assignment: Assignment, worker: int) -> Straggling:
        """Of one of the assignment's workers."""
        return cls(
            None if assignment.speeds is None else assignment.speeds.on(assignment.num_workers, assignment.seed), worker
        )

    def wait_seconds(self, computed_seconds: float, first_draw: int, num_gradients: int = 1) -> float:
        """How long to wait after `num_gradients` that have taken `computed_seconds` together.

        Args:
            first_draw: how many gradients the worker was given before these. So a run that goes on draws on.
        """
        if self._sampler is None:
            return 0.0
        each = computed_seconds / num_gradients
        draws = range(first_draw, first_draw + num_gradients)
        total = sum(self._sampler.stretched(self._worker, draw, each) for draw in draws)
        return max(0.0, total - computed_seconds)


@dataclasses.dataclass(frozen=True)
class StepHere:
    """How a Hogwild worker takes its steps."""

    recipe: OptimizerRecipe
    schedule: Schedule
    share_state: bool
    """Whether all workers step with one optimizer state, in the segment's extra part, or each with its own."""


def set_up_process(threads: int) -> None:
    """Threads of this process; signals are the server's business, which tells the workers to stop."""
    torch.set_num_threads(threads)
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def fail(who: str, error: Exception) -> NoReturn:
    """End this process because of `error`. A leader that has started it knows by the exit code that memory was out."""
    code = OUT_OF_MEMORY if is_out_of_memory(error) else 1
    if code == 1:
        print(f"{who} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    elif parent_process() is None:
        print(f"{who}: {REASONS[code]}", file=sys.stderr, flush=True)
    os._exit(code)
