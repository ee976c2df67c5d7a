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
from asyncsgd.rules import parse_rule
from asyncsgd.runtimes import AllReduce, Virtual, kind_of
from asyncsgd.settings.task import task_flags
from asyncsgd.simulation.speeds import Constant, parse_speeds
from asyncsgd.study.runner import Job
from asyncsgd.tasks import task_class

if TYPE_CHECKING:
    from asyncsgd.settings.run import Run

GRADIENTS = 5
DRAWS = 50
"""From declared speeds, for their mean."""
START_SECONDS = 2.0
"""Reading the data, building the model and saving it, once the fork server has imported everything."""


class Estimator:
    """Times the gradient of every kind of run once; good to about a factor of two on a machine that does other work."""

    def __init__(self) -> None:
        self._timed: dict[str, tuple[Run, float, float]] = {}

    def seconds(self, jobs: Sequence[Job], side_by_side: int) -> float:
        """Those that measure time one after another, the others `side_by_side` at a time."""
        alone = sum(self.of(job) for job in jobs if job.measures)
        return alone + sum(self.of(job) for job in jobs if not job.measures) / min(side_by_side, available_cores())

    def of(self, job: Job) -> float:
        """Seconds of one run by itself."""
        settings = job.settings
        run, gradient, evaluation = self._time(job, settings)
        training = self.training_seconds(job)
        if kind_of(settings.job.mode, settings.job.clock) is Virtual:
            # one process computes all gradients, one after another
            training *= _gradients_per_second(settings) * gradient
        return START_SECONDS + training + _num_evaluations(run) * evaluation

    def training_seconds(self, job: Job) -> float:
        """Seconds of training on the run's own clock, measured or virtual."""
        settings = job.settings
        run, gradient, _ = self._time(job, settings)
        if run.limits.samples is None:
            return run.limits.seconds or 0.0
        number = run.limits.samples / run.task.batch_size
        if kind_of(settings.job.mode, settings.job.clock) is Virtual:
            rate = _gradients_per_second(settings)
            return number / rate if rate > 0 else math.inf
        return number * gradient / min(settings.job.nproc, available_cores()) * _stretch(settings)

    def _time(self, job: Job, settings: Any) -> tuple[Run, float, float]:
        """See `_measure`. Fine-tunings that differ in the model that they start from are timed once."""
        from asyncsgd.settings.run import run_of

        specs = task_flags(task_class(job.task)).specs.items()
        key = {name: spec.of(settings) for name, spec in specs if spec.group in ("task", "machine")}
        key |= {"model": key.get("model") if job.task == "masked_lm" else job.task}
        text = json.dumps(key)
        if text not in self._timed:
            self._timed[text] = _measure(run_of(job.experiment, settings))
        run, gradient, evaluation = self._timed[text]
        return dataclasses.replace(run, budget=settings.budget), gradient, evaluation


def _num_evaluations(run: Run) -> int:
    """The first one too; where only seconds limit the run, as many as there are without ``--evaluate-every``."""
    every, samples = run.limits.evaluate_every, run.limits.samples
    return 1 + (run.budget.evaluations if every is None or samples is None else -(-samples // every))


def _measure(run: Run) -> tuple[Run, float, float]:
    """The run, prepared, and seconds of one gradient and of one evaluation."""
    import torch

    from asyncsgd.flat import FlatModel

    torch.set_num_threads(run.runtime.threads)
    run = run.prepared()
    assignment = run.assignment(worker=0)
    worker = assignment.worker(FlatModel(run.task.model(run.seed).to(assignment.device)))
    worker.gradient(0)  # the first one allocates
    began = time.perf_counter()
    for index in range(1, GRADIENTS + 1):
        worker.gradient(8 * index)  # eight in a row are of one length
    gradient = (time.perf_counter() - began) / GRADIENTS
    number = len(worker.data.evaluation["main"])
    parts = max(1, number // 4)
    began = time.perf_counter()
    worker.evaluate(0, parts)
    share = len(range(0, number, parts)) / number
    return run, gradient, (time.perf_counter() - began) / share


def _gradients_per_second(settings: Any) -> float:
    """Of all workers together on the virtual clock."""
    job = settings.job
    return _drawn_rate(job.speeds or str(Constant()), job.nproc, parse_rule(job.rule).in_rounds)


@functools.lru_cache
def _drawn_rate(speeds: str, num_workers: int, in_rounds: bool) -> float:
    """Everybody works all the time, or in rounds that wait for the slowest worker."""
    sampler = parse_speeds(speeds).on(num_workers, seed=0)
    draws = [[sampler.draw_one(worker, draw) for draw in range(DRAWS)] for worker in range(num_workers)]
    if in_rounds:
        return num_workers * DRAWS / sum(map(max, zip(*draws, strict=True)))
    return sum(DRAWS / sum(of_worker) for of_worker in draws)


def _stretch(settings: Any) -> float:
    """By how much declared speeds lengthen training on real workers: the slowest one's factor where all wait."""
    job = settings.job
    if job.speeds is None:
        return 1.0
    sampler = parse_speeds(job.speeds).on(job.nproc, job.seed)
    factors = [
        sum(sampler.stretched(worker, draw, 1.0) for draw in range(DRAWS)) / DRAWS for worker in range(job.nproc)
    ]
    if kind_of(job.mode, job.clock) is AllReduce:
        return max(factors)
    return job.nproc / sum(1.0 / factor for factor in factors)
