"""How long runs will take on this machine, from a few gradients timed here and now."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.record import available_cores
from asyncsgd.settings import Settings, make_settings
from asyncsgd.sweep import Job

GRADIENTS = 5
START_SECONDS = 2.0
"""Reading the data, building the model and saving it, once the fork server has imported everything."""


class Estimator:
    """Times the gradient of every kind of run once; good to about a factor of two on a machine that does other work."""

    def __init__(self) -> None:
        self._timed: dict[str, tuple[float, float]] = {}

    def seconds(self, jobs: Sequence[Job], side_by_side: int) -> float:
        """Those that measure time one after another, the others `side_by_side` at a time."""
        alone = sum(self.of(job) for job in jobs if job.measures)
        return alone + sum(self.of(job) for job in jobs if not job.measures) / min(side_by_side, available_cores())

    def of(self, job: Job) -> float:
        """Seconds of one run by itself."""
        if job.run.stage == "finetune":
            return self._of_finetune(job.values)
        settings = make_settings(job.values)
        gradient, evaluation = self._time(settings)
        budget, data = settings.budget, settings.data
        if budget.samples is None:
            assert budget.seconds is not None
            training = budget.seconds
        else:
            workers = settings.job.nproc if job.measures else 1
            training = budget.samples / data.batch_size * gradient / min(workers, available_cores())
            training *= _stretch(settings) if job.measures else 1.0
        return START_SECONDS + training + (budget.evaluations + 1) * evaluation

    def _of_finetune(self, values: Mapping[str, Any]) -> float:
        from asyncsgd import finetune

        return START_SECONDS + finetune.estimate_seconds(values)

    def _time(self, settings: Settings) -> tuple[float, float]:
        """Seconds of one gradient and of one evaluation."""
        keys = (settings.data, settings.model, settings.machine, settings.budget.eval_samples)
        key = json.dumps([str(part) for part in keys])
        if key not in self._timed:
            self._timed[key] = _measure(settings)
        return self._timed[key]


def _measure(settings: Settings) -> tuple[float, float]:
    import torch

    from asyncsgd.evaluation import evaluate_shard
    from asyncsgd.flat import FlatModel
    from asyncsgd.prepare import device_of_worker, prepare

    torch.set_num_threads(settings.machine.threads)
    prepared = prepare(
        settings.data,
        settings.model,
        settings.machine,
        settings.optimization,
        settings.job,
        eval_samples=settings.budget.eval_samples,
    )
    device = device_of_worker(prepared.assignment.device, 0)
    model = prepared.model.to(device)
    worker, objective, evaluation = prepared.assignment.build(model, FlatModel(model))
    worker.gradient(0)  # the first one allocates
    began = time.perf_counter()
    for index in range(1, GRADIENTS + 1):
        worker.gradient(8 * index)  # eight in a row are of one length
    gradient = (time.perf_counter() - began) / GRADIENTS
    parts = max(1, len(evaluation) // 4)
    began = time.perf_counter()
    evaluate_shard(objective, evaluation, 0, parts, torch.device(device))
    share = len(range(0, len(evaluation), parts)) / len(evaluation)
    return gradient, (time.perf_counter() - began) / share


def _stretch(settings: Settings) -> float:
    """By how much declared speeds lengthen training on real workers: the slowest one's factor where all wait."""
    from asyncsgd.speeds import parse_speeds

    job = settings.job
    if job.speeds is None:
        return 1.0
    try:
        sampler = parse_speeds(job.speeds).on(job.nproc, job.seed)
    except UsageError:
        return 1.0
    factors = [sum(sampler.stretched(worker, draw, 1.0) for draw in range(50)) / 50 for worker in range(job.nproc)]
    if job.mode == "sync":
        return max(factors)
    return job.nproc / sum(1.0 / factor for factor in factors)
