"""The process of one worker: build the model, connect, obey commands until the server says stop or is gone."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from typing import NoReturn, Protocol

import torch

from asyncsgd.batches import indices_of
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import Optimizer, OptimizerRecipe
from asyncsgd.profiling import Profile, ProfiledWorker
from asyncsgd.records.events import Taken
from asyncsgd.runtime.memory import peak_bytes
from asyncsgd.runtime.processes import NO_BATCH_LEFT, OUT_OF_MEMORY, REASONS
from asyncsgd.runtime.transport.messages import (
    Compute,
    Computed,
    Evaluate,
    Evaluated,
    Holding,
    Ready,
    Stop,
    WorkerEnd,
)
from asyncsgd.runtime.transport.shared_memory import FROZEN, SAMPLES, SharedMemoryAddress, SharedMemoryWorker
from asyncsgd.schedules import Schedule
from asyncsgd.signals import NUMBERS
from asyncsgd.simulation.sampler import Sampler
from asyncsgd.simulation.speeds import Speeds
from asyncsgd.tasks.base import Task, encode_sums
from asyncsgd.worker import Savings, Worker, is_out_of_memory


class Address(Protocol):
    """Where a server is; see `SharedMemoryAddress` and `ProcessGroupAddress`."""

    def connect(self, worker: int) -> WorkerEnd: ...


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
    savings: Savings
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


def serve_gradients(assignment: Assignment, address: Address, worker: int) -> None:
    """Entry point of a worker of the parameter server; blocks until it is told to stop."""
    _run(worker, lambda: _obey(assignment, address.connect(worker), Straggling.of(assignment, worker)))


def serve_hogwild(assignment: Assignment, address: SharedMemoryAddress, worker: int, step: StepHere) -> None:
    """Entry point of a Hogwild worker; blocks until it is told to stop."""
    _run(worker, lambda: _obey_in_place(assignment, address.connect(worker), step, Straggling.of(assignment, worker)))


def _run(worker: int, obey: Callable[[], None]) -> None:
    try:
        obey()
    except EOFError:
        os._exit(1)  # the server is gone and has said why; there is nobody to report to
    except Exception as error:
        fail(f"worker {worker}", error)
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of threads that torch may still have waiting


def fail(who: str, error: Exception) -> NoReturn:
    """End this process because of `error`. A leader that has started it knows by the exit code that memory was out."""
    code = OUT_OF_MEMORY if is_out_of_memory(error) else 1
    if code == 1:
        print(f"{who} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    elif parent_process() is None:
        print(f"{who}: {REASONS[code]}", file=sys.stderr, flush=True)
    os._exit(code)


def _obey(assignment: Assignment, end: WorkerEnd, straggling: Straggling) -> None:
    set_up_process(assignment.threads)
    device = torch.device(assignment.device)
    model = assignment.task.model(assignment.seed).to(device)
    on_host = device.type == "cpu"
    flat = FlatModel(model, gradients=end.slot if on_host else None)
    worker = assignment.worker(flat)
    end.answer(Ready(flat.layout.fingerprint))
    inner: Optimizer | None = None
    last_index = 0
    finished = time.perf_counter()
    while not isinstance(command := end.receive(), Stop):
        began = time.perf_counter()
        if isinstance(command, Evaluate):
            end.pull(flat.parameters)
            end.answer(_evaluate(command, worker))
        elif isinstance(command, Compute):
            version = end.pull(flat.parameters, command.exact_version)
            pulled = time.perf_counter()
            indices = indices_of(command.batches)
            if indices[-1] >= assignment.num_batches and not worker.has_batch(indices[-1]):
                # Others compute what is left of the budget. Torchrun would end them all because of an exit code.
                os._exit(0 if parent_process() is None else NO_BATCH_LEFT)
            if command.learning_rate is None:
                gradient = worker.gradient(indices[0])
            else:
                if inner is None:
                    inner = assignment.inner.on(flat.parameters, flat.layout)
                gradient = worker.pseudo_gradient(indices, inner, command.learning_rate)
            if not on_host:
                torch.cuda.synchronize(device)
            wait_seconds = straggling.wait_seconds(time.perf_counter() - pulled, command.first_draw, len(indices))
            if wait_seconds > 0:
                end.told_to_compute(wait_seconds)  # an abandoned gradient need not be waited for
            computed = time.perf_counter()
            end.push(flat.gradients)
            pushed = time.perf_counter()
            taken = Taken(pulled - began, computed - pulled, pushed - computed, began - finished)
            end.answer(Computed(command.dispatch, version, gradient, taken))
            finished = time.perf_counter()
            # This is done while the server applies. Workers at equal speeds take every N-th batch, so the same stride
            # is likely.
            worker.prepare(max(0, 2 * indices[0] - last_index))
            last_index = indices[0]
            continue
        finished = time.perf_counter()
    flat.check()


def _obey_in_place(assignment: Assignment, end: SharedMemoryWorker, step: StepHere, straggling: Straggling) -> None:
    set_up_process(assignment.threads)
    model = assignment.task.model(assignment.seed)
    flat = FlatModel(model, parameters=end.parameters, keep_parameters=True)
    optimizer = step.recipe.on(flat.parameters, flat.layout)
    if step.share_state:
        optimizer.share_state(end.extra)
    worker = assignment.worker(flat)
    end.answer(Ready(flat.layout.fingerprint))
    control = end.segment.control
    finished = time.perf_counter()
    while not isinstance(command := end.receive(), Stop):
        began = time.perf_counter()
        if isinstance(command, Evaluate):
            end.answer(_evaluate(command, worker))
        elif isinstance(command, Compute):
            version = end.version
            gradient = worker.gradient(command.batches[0][1])
            wait_seconds = straggling.wait_seconds(time.perf_counter() - began, command.first_draw)
            if not _wait(end, wait_seconds, lambda: _hold(end, worker)):
                return
            computed = time.perf_counter()
            if int(control[FROZEN]) and not _hold(end, worker):
                return
            optimizer.step(flat.gradients, step.schedule(int(control[SAMPLES]) + gradient.num_samples))
            taken = Taken(compute=computed - began, wait=began - finished)
            end.answer(Computed(command.dispatch, version, gradient, taken))
        finished = time.perf_counter()
    flat.check()


def _wait(end: SharedMemoryWorker, seconds: float, hold: Callable[[], bool]) -> bool:
    """Wait, but stop at once if the run is frozen for an evaluation. Return False if the run ends meanwhile."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        if end.told_to_compute(min(left, 0.02)):
            return False  # a busy worker is told nothing but to stop
        if int(end.segment.control[FROZEN]):
            held = time.perf_counter()
            if not hold():
                return False
            until += time.perf_counter() - held
    return True


def _hold(end: SharedMemoryWorker, worker: Worker) -> bool:
    """Keep a gradient unapplied while an evaluation goes on; False if the run ends meanwhile."""
    end.answer(Holding())
    while isinstance(command := end.receive(), Evaluate):
        end.answer(_evaluate(command, worker))
    return not isinstance(command, Stop)


def _evaluate(command: Evaluate, worker: Worker) -> Evaluated:
    sums = encode_sums(worker.evaluate(command.shard, command.num_shards))
    return Evaluated(command.shard, sums, peak_bytes(worker.flat.parameters.device))
