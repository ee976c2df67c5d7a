"""The process of one worker: build the model, connect, obey commands until the server says stop or is gone."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from asyncsgd.data.batching import EvaluationBatches, Frame, TrainingBatches
from asyncsgd.data.masking import Masking
from asyncsgd.data.tokenization import Tokens
from asyncsgd.evaluation import evaluate_shard
from asyncsgd.flat import FlatModel
from asyncsgd.models import skeleton
from asyncsgd.objectives.masked_lm import MaskedLM
from asyncsgd.runtime.transport.base import (
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
from asyncsgd.server import OptimizerRecipe, Schedule
from asyncsgd.worker import Worker


class Address(Protocol):
    """Where a server is; see `SharedMemoryAddress` and `ProcessGroupAddress`."""

    def connect(self, worker: int) -> WorkerEnd: ...


@dataclasses.dataclass(frozen=True)
class Task:
    """What any process needs to compute gradients and evaluations: names and numbers, no tensors; can be pickled."""

    config: str
    """The model's configuration, as `asyncsgd.models.skeleton` reads it."""
    train: Path
    """Folder of the training tokens."""
    evaluation: Path
    """Folder of the evaluation tokens."""
    frame: Frame
    masking: Masking
    batch_size: int
    eval_samples: int
    seed: int
    threads: int
    device: str
    precision: torch.dtype

    def build(self, model: torch.nn.Module, flat: FlatModel) -> tuple[Worker, MaskedLM, EvaluationBatches]:
        """Put a worker together around `model`, bound to `flat`."""
        objective = MaskedLM(model)
        worker = Worker(flat, objective, self.training_batches(), seed=self.seed, precision=self.precision)
        return worker, objective, self.evaluation_batches()

    def training_batches(self) -> TrainingBatches:
        return TrainingBatches(Tokens.load(self.train), self.frame, self.masking, self.batch_size, self.seed)

    def evaluation_batches(self) -> EvaluationBatches:
        return EvaluationBatches(Tokens.load(self.evaluation), self.frame, self.masking, self.eval_samples)


@dataclasses.dataclass(frozen=True)
class StepHere:
    """How a Hogwild worker takes its steps."""

    recipe: OptimizerRecipe
    schedule: Schedule
    share_state: bool
    """Whether all workers step with one optimizer state, in the segment's extra part, or each with its own."""


def set_up_process(threads: int) -> None:
    """Threads of this process; Ctrl-C is the server's business, which tells the workers to stop."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve_gradients(task: Task, address: Address, worker: int) -> None:
    """Entry point of a worker of the parameter server; blocks until it is told to stop."""
    _run(worker, lambda: _obey(task, address.connect(worker)))


def serve_hogwild(task: Task, address: SharedMemoryAddress, worker: int, step: StepHere) -> None:
    """Entry point of a Hogwild worker; blocks until it is told to stop."""
    _run(worker, lambda: _obey_in_place(task, address.connect(worker), step))


def _run(worker: int, obey: Callable[[], None]) -> None:
    try:
        obey()
    except EOFError:
        os._exit(1)  # the server is gone and has said why; there is nobody to report to
    except Exception:
        print(f"worker {worker} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of threads that torch may still have waiting


def _obey(task: Task, end: WorkerEnd) -> None:
    set_up_process(task.threads)
    device = torch.device(task.device)
    model = skeleton(task.config).to(device)
    on_host = device.type == "cpu"
    flat = FlatModel(model, gradients=end.slot if on_host else None)
    worker, objective, evaluation = task.build(model, flat)
    end.answer(Ready(flat.layout.fingerprint))
    last_index = 0
    finished = time.perf_counter()
    while not isinstance(command := end.receive(), Stop):
        began = time.perf_counter()
        if isinstance(command, Evaluate):
            end.pull(flat.parameters)
            end.answer(_evaluate(command, objective, evaluation, device))
        elif isinstance(command, Compute):
            version = end.pull(flat.parameters)
            pulled = time.perf_counter()
            gradient = worker.gradient(command.index)
            if not on_host:
                torch.cuda.synchronize(device)
            computed = time.perf_counter()
            end.push(flat.gradients)
            pushed = time.perf_counter()
            seconds = (pulled - began, computed - pulled, pushed - computed, began - finished)
            answer = Computed(command.dispatch, version, gradient.loss, gradient.weight, gradient.num_samples, *seconds)
            end.answer(answer)
            finished = time.perf_counter()
            # While the server applies: workers at equal speeds take every N-th batch, so the same stride is likely.
            worker.prepare(max(0, 2 * command.index - last_index))
            last_index = command.index
            continue
        finished = time.perf_counter()
    flat.check()


def _obey_in_place(task: Task, end: SharedMemoryWorker, step: StepHere) -> None:
    set_up_process(task.threads)
    device = torch.device(task.device)
    model = skeleton(task.config)
    flat = FlatModel(model, parameters=end.parameters, keep_parameters=True)
    optimizer = step.recipe.on(flat.parameters, flat.layout.num_decayed)
    if step.share_state:
        optimizer.share_state(end.extra)
    worker, objective, evaluation = task.build(model, flat)
    end.answer(Ready(flat.layout.fingerprint))
    control = end.segment.control
    finished = time.perf_counter()
    while not isinstance(command := end.receive(), Stop):
        began = time.perf_counter()
        if isinstance(command, Evaluate):
            end.answer(_evaluate(command, objective, evaluation, device))
        elif isinstance(command, Compute):
            version = end.version
            gradient = worker.gradient(command.index)
            computed = time.perf_counter()
            if int(control[FROZEN]) and not _hold(end, objective, evaluation, device):
                return
            optimizer.step(flat.gradients, step.schedule(int(control[SAMPLES]) + gradient.num_samples))
            seconds = (0.0, computed - began, 0.0, began - finished)
            answer = Computed(command.dispatch, version, gradient.loss, gradient.weight, gradient.num_samples, *seconds)
            end.answer(answer)
        finished = time.perf_counter()
    flat.check()


def _hold(end: SharedMemoryWorker, objective: MaskedLM, evaluation: EvaluationBatches, device: torch.device) -> bool:
    """Keep a gradient unapplied while an evaluation goes on; False if the run ends meanwhile."""
    end.answer(Holding())
    while isinstance(command := end.receive(), Evaluate):
        end.answer(_evaluate(command, objective, evaluation, device))
    return not isinstance(command, Stop)


def _evaluate(command: Evaluate, objective: MaskedLM, evaluation: EvaluationBatches, device: torch.device) -> Evaluated:
    sums = evaluate_shard(objective, evaluation, command.shard, command.num_shards, device)
    return Evaluated(command.shard, sums.loss, sums.correct, sums.masked_tokens)
