"""How long runs will take on this machine, from a few gradients timed here and now."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncsgd.errors import UsageError
from asyncsgd.modes import AllReduce, Virtual, kind_of
from asyncsgd.records.machine import available_cores
from asyncsgd.rules import parse_rule
from asyncsgd.simulation.speeds import Constant, parse_speeds
from asyncsgd.study.arms import FLAGS
from asyncsgd.study.finetuning import finetuning_in
from asyncsgd.study.sweep import Job

if TYPE_CHECKING:
    from asyncsgd.experiment import Course, Experiment
    from asyncsgd.tasks.base import Task

GRADIENTS = 5
DRAWS = 50
"""From declared speeds, for their mean."""
START_SECONDS = 2.0
"""Reading the data, building the model and saving it, once the fork server has imported everything."""


class Estimator:
    """Times the gradient of every kind of run once; good to about a factor of two on a machine that does other work."""

    def __init__(self) -> None:
        self._timed: dict[str, tuple[Task, float, float]] = {}
        self._finetuning: dict[str, float] = {}

    def seconds(self, jobs: Sequence[Job], side_by_side: int) -> float:
        """Those that measure time one after another, the others `side_by_side` at a time."""
        alone = sum(self.of(job) for job in jobs if job.measures)
        return alone + sum(self.of(job) for job in jobs if not job.measures) / min(side_by_side, available_cores())

    def of(self, job: Job) -> float:
        """Seconds of one run by itself."""
        from asyncsgd.experiment import course_of

        if job.run.stage == "finetune":
            return self._of_finetune(job.values)
        settings = FLAGS.make(job.values)
        task, gradient, evaluation = self._time(settings)
        training = self.training_seconds(settings)
        if kind_of(settings.job.mode, settings.job.clock) is Virtual:
            # one process computes all gradients, one after another
            training *= _gradients_per_second(settings) * gradient
        course = course_of(settings.budget, settings.optimization, task)
        return START_SECONDS + training + _num_evaluations(course) * evaluation

    def training_seconds(self, settings: Any) -> float:
        """Seconds of training on the run's own clock, measured or virtual."""
        if settings.budget.samples is None:
            assert settings.budget.seconds is not None
            return settings.budget.seconds
        number = settings.budget.samples / settings.task.batch_size
        if kind_of(settings.job.mode, settings.job.clock) is Virtual:
            rate = _gradients_per_second(settings)
            return number / rate if rate > 0 else math.inf
        _, gradient, _ = self._time(settings)
        return number * gradient / min(settings.job.nproc, available_cores()) * _stretch(settings)

    def _of_finetune(self, values: Mapping[str, Any]) -> float:
        """Runs that differ in where they start, or their seed, are timed once."""
        kind = finetuning_in(values)
        settings = kind.settings(values)
        without_effect = ("model", "seed", *kind.flags.places)
        flat = kind.flags.flatten(settings)
        key = json.dumps({name: value for name, value in flat.items() if name not in without_effect})
        if key not in self._finetuning:
            from asyncsgd.experiment import experiment_of

            experiment = experiment_of(kind.task, settings)
            task, gradient, evaluation = _measure(experiment)
            course = experiment.course(task)
            assert course.budget.samples is not None
            num_gradients = course.budget.samples / task.batch_size
            self._finetuning[key] = num_gradients * gradient + _num_evaluations(course) * evaluation
        return START_SECONDS + self._finetuning[key]

    def _time(self, settings: Any) -> tuple[Task, float, float]:
        """See `_measure`."""
        keys = (settings.task, settings.machine)
        key = json.dumps([str(part) for part in keys])
        if key not in self._timed:
            from asyncsgd.experiment import experiment_of

            self._timed[key] = _measure(experiment_of("stilt_mlm", settings))
        return self._timed[key]


def _num_evaluations(course: Course) -> int:
    """The first one too; where only seconds limit the run, as many as there are without ``--evaluate-every``."""
    every, samples = course.budget.evaluate_every, course.budget.samples
    return 1 + (course.evaluations if every is None or samples is None else -(-samples // every))


def _measure(experiment: Experiment) -> tuple[Task, float, float]:
    """The prepared task, and seconds of one gradient and of one evaluation."""
    import torch

    from asyncsgd.flat import FlatModel

    setup = experiment.setup
    torch.set_num_threads(setup.runtime.threads)
    task = experiment.task.prepare(setup.seed, experiment.cache)
    assignment = setup.assignment(task, worker=0)
    worker = assignment.worker(FlatModel(task.model(setup.seed).to(assignment.device)))
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
    return task, gradient, (time.perf_counter() - began) / share


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
    try:
        sampler = parse_speeds(job.speeds).on(job.nproc, job.seed)
    except UsageError:
        return 1.0
    factors = [
        sum(sampler.stretched(worker, draw, 1.0) for draw in range(DRAWS)) / DRAWS for worker in range(job.nproc)
    ]
    if kind_of(job.mode, job.clock) is AllReduce:
        return max(factors)
    return job.nproc / sum(1.0 / factor for factor in factors)
