"""How long runs will take on this machine, from a few gradients timed here and now."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncsgd.records.machine import available_cores
from asyncsgd.run.runtimes import AllReduce, Virtual, kind_of
from asyncsgd.settings.task import task_flags
from asyncsgd.simulation.speeds import Constant
from asyncsgd.studies.runner import PlannedJob
from asyncsgd.tasks import class_named

if TYPE_CHECKING:
    from asyncsgd.run.run import Run

TIMED_GRADIENTS = 5
DRAWS_PER_WORKER = 50
"""How many computing times are drawn for each worker, to find how many gradients arrive a second."""
START_SECONDS = 2.0
"""What a run takes for reading the data, building the model and saving it, once the fork server has imported all."""


class Estimator:
    """Times the gradient of every kind of run once. An estimate is right to about a factor of two on a machine that
    does other work.
    """

    def __init__(self) -> None:
        self._timed: dict[str, tuple[Run, float, float]] = {}

    def seconds(self, jobs: Sequence[PlannedJob], side_by_side: int) -> float:
        """Seconds of all jobs: those that measure time one after another, the others `side_by_side` at a time."""
        alone = sum(self._of(job) for job in jobs if job.measures)
        others = sum(self._of(job) for job in jobs if not job.measures)
        return alone + others / min(side_by_side, available_cores())

    def _of(self, job: PlannedJob) -> float:
        """Seconds of one job on this machine."""
        run, gradient, evaluation = self._time(job)
        training = self.training_seconds(job)
        virtual, rate = _rate_of(job.settings.job)
        if virtual:
            num_gradients = training * rate
            training = num_gradients * gradient  # one process computes all of them, one after another
        limits = run.limits
        num_evaluations = 1 + run.budget.evaluations
        if limits.evaluate_every is not None and limits.samples is not None:
            num_evaluations = 1 + math.ceil(limits.samples / limits.evaluate_every)
        if limits.evaluate_at is not None:
            num_evaluations += 1
        return START_SECONDS + training + num_evaluations * evaluation

    def training_seconds(self, job: PlannedJob) -> float:
        """Seconds of training on the run's own clock, measured or virtual."""
        run, gradient, _ = self._time(job)
        if run.limits.samples is None:
            return run.limits.seconds or 0.0
        virtual, rate = _rate_of(job.settings.job)
        seconds = run.limits.samples / run.task.batch_size / rate
        if virtual:
            return seconds
        num_workers = job.settings.job.nproc
        workers_per_core = num_workers / min(num_workers, available_cores())
        return seconds * gradient * workers_per_core

    def _time(self, job: PlannedJob) -> tuple[Run, float, float]:
        """The run of a job, prepared, and the seconds of a gradient and of an evaluation; see `_measure`.

        Runs whose settings of task and machine are equal are timed once. Outside masked_lm their models may differ,
        since most such runs fine-tune models of one size.
        """
        from asyncsgd.run.run import run_of

        settings = job.settings
        specs = task_flags(class_named(job.task)).specs.items()
        key = {name: spec.of(settings) for name, spec in specs if spec.group in ("task", "machine")}
        key |= {"model": key.get("model") if job.task == "masked_lm" else job.task}
        text = json.dumps(key, default=str)
        if text not in self._timed:
            self._timed[text] = _measure(run_of(job.experiment, settings))
        run, gradient, evaluation = self._timed[text]
        return dataclasses.replace(run, budget=settings.budget), gradient, evaluation


def _measure(run: Run) -> tuple[Run, float, float]:
    """The run, prepared, and seconds of one gradient and of one evaluation."""
    import torch

    from asyncsgd.data.order import RUN

    torch.set_num_threads(run.runtime.threads)
    run = run.prepared()
    sent = run.as_sent_to(0)  # the run as a worker gets it, which computes on the worker's device
    worker = sent.worker(run.flat(device=sent.device))
    worker.gradient(0)  # the first one allocates
    began = time.perf_counter()
    for index in range(1, TIMED_GRADIENTS + 1):
        worker.gradient(RUN * index)  # one batch of each RUN, whose batches are of about one length
    gradient = (time.perf_counter() - began) / TIMED_GRADIENTS
    num_batches = len(worker.data.evaluation["main"])
    num_parts = max(1, num_batches // 4)
    began = time.perf_counter()
    worker.evaluate(0, num_parts)
    share_of_first_part = len(range(0, num_batches, num_parts)) / num_batches  # it has every num_parts-th batch
    evaluation = (time.perf_counter() - began) / share_of_first_part
    return run, gradient, evaluation


def _rate_of(job: Any) -> tuple[bool, float]:
    """Whether a job's clock is virtual, and how many gradients arrive from all workers in the mean computing time of a
    gradient, which is one second on the virtual clock unless `speeds` say otherwise.
    """
    kind = kind_of(job.mode, job.clock)
    rule = "synchronous" if kind is AllReduce else job.rule
    return kind is Virtual, _rate(job.speeds or str(Constant()), rule, job.nproc)


@functools.lru_cache
def _rate(speeds: str, rule: str, num_workers: int) -> float:
    """How many gradients arrive a second of the virtual clock."""
    from asyncsgd.simulation.simulate import arrival_seconds

    number = DRAWS_PER_WORKER * num_workers
    return number / arrival_seconds(speeds, rule, num_workers, 0, number)[-1]
