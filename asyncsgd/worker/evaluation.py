"""Exact evaluation of one frozen version: the whole evaluation set, each batch once, sums before means.

The set's batches are fixed, so a worker's shard is every N-th of them and any number of workers computes the same
numbers. Losses are summed over loss terms and divided once, so no mean of means appears and no padding is counted."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncsgd.core.flat import FlatModel
from asyncsgd.core.protocol import Measured
from asyncsgd.data.random import dropout_seed, noise_seed
from asyncsgd.errors import UsageError
from asyncsgd.records.events import StageUse
from asyncsgd.tasks.base import Batch, Batches, Data, Sums, Task, add_sums, plain_sums, to_device

MAIN = "main"
"""The evaluation set whose loss is that of the run."""

_SET = "set:"
"""The beginning of the name of a sum of another set. After it stand, as JSON, the name of the set, which may be any
text, and the name of the sum."""


def measured(task: Task, sums: Sums) -> Measured:
    """Return the evaluation to which the sums over the whole evaluation sets add up: mean loss, metrics and details.

    The sets beside the main one are in the details, as ``evaluations``, by name.
    """
    main = {name: value for name, value in sums.items() if not name.startswith(_SET)}
    others: dict[str, Sums] = {}
    for name in sums.keys() - main.keys():
        of, what = json.loads(name.removeprefix(_SET))
        others.setdefault(of, {})[what] = sums[name]
    errors: list[str] = []
    details = scored("details", lambda: task.details(main), errors)
    if others:
        evaluations = {}
        for name in sorted(others):
            evaluations[name] = _numbers(task, name, others[name], errors)
        details["evaluations"] = evaluations
    loss, weight, metrics = _numbers(task, MAIN, main, errors).values()
    return Measured(loss, weight, metrics, details, score_error=next(iter(errors), None))


def scored(name: str, score: Callable[[], Mapping[str, Any]], errors: list[str]) -> dict[str, Any]:
    """Call a method of the task that computes scores, and return them as JSON has them. They are empty where the method
    raises, or returns something else.

    Args:
        name: the name of the method.
        errors: gets a sentence on what is wrong.
    """
    try:
        said = score()
        if not isinstance(said, Mapping):
            raise TypeError(f"it gave a {type(said).__name__}, which is no dict of scores by name")
        return {str(key): as_json(value) for key, value in said.items()}
    except Exception as error:  # whatever a user's scorer raises; the run goes on without its scores
        errors.append(f"the task's {name}() gave no score ({type(error).__name__}: {error}); its code has to be mended")
        return {}


def as_json(value: Any) -> Any:
    """A number, a text, or a list or dict of them, of Python, numpy or torch, as JSON has it; NaN and infinity as None.

    Raises:
        TypeError: for anything else.

    >>> as_json({"f1": np.float32(0.5), "confusion": torch.eye(2, dtype=torch.int64), "undefined": float("nan")})
    {'f1': 0.5, 'confusion': [[1, 0], [0, 1]], 'undefined': None}
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{value!r} is no number, text, list or dict of them")


def measured_in_shards(
    task: Task,
    shards: Sequence[Sums],
    seconds: float,
    peak_bytes: tuple[tuple[int, int, int], ...] = (),
    stages: tuple[StageUse, ...] = (),
) -> Measured:
    """Return the evaluation to which the sums over the workers' shards, in order, add up; see `measured`.

    Args:
        seconds: the time that the evaluation took.
        peak_bytes: the peak memory of the workers; see `records.events.MemoryUsed`.
        stages: see `records.events.StagesUsed`.
    """
    losses = tuple(shard["loss"] / shard["weight"] if shard["weight"] else None for shard in shards)
    whole = measured(task, add_sums(shards))
    return dataclasses.replace(whole, eval_seconds=seconds, worker_losses=losses, peak_bytes=peak_bytes, stages=stages)


def _numbers(task: Task, name: str, sums: Sums, errors: list[str]) -> dict[str, Any]:
    """Loss, weight and metrics of the evaluation set `name`; metrics that could not be computed are NaN."""
    if not sums["weight"]:
        raise UsageError(f"no batch of the evaluation set {name!r} has a loss term; give it targets that count")
    said = scored("metrics", lambda: _plain_metrics(task, task.metrics(sums)), errors)
    metrics = said or dict.fromkeys(task.scored_by(), math.nan)
    return {"loss": sums["loss"] / sums["weight"], "weight": float(sums["weight"]), "metrics": metrics}


def _plain_metrics(task: Task, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of Python; None for a score that is undefined.

    Raises:
        ValueError: if a score that the task names is not among them.
    """
    missing = [name for name in task.scored_by() if name not in metrics]
    if missing:
        raise ValueError(
            f"it gives {', '.join(metrics) or 'nothing'} and not {', '.join(missing)}, which `better` names"
        )
    return {name: None if value is None else float(value) for name, value in metrics.items()}


def evaluate_sets(
    task: Task,
    model: nn.Module,
    sets: Mapping[str, Batches],
    shard: int,
    num_shards: int,
    device: torch.device,
    outputs: Callable[[Batch], Any] | None = None,
) -> Sums:
    """Return the sums over batches `shard`, `shard` + `num_shards`, ... of every set; no collective, so nobody waits.

    They are computed without dropout and gradients. The sums of the main set have their own names. In a shard without
    batches ``loss`` and ``weight`` are 0.

    Args:
        outputs: the forward pass of `model` on a batch; None: the task's. Batches for which it gives None add nothing,
            because another process knows what they come to.
    """
    forward = outputs or functools.partial(task.outputs, model)

    def of_batches(name: str, batches: Batches) -> Iterator[Sums]:
        for index in range(shard, len(batches), num_shards):
            batch = batches[index]
            weight = task.weight(batch)
            if not weight:
                continue
            on_device = to_device(batch, device)
            seed_noise(noise_seed(name, index), device)  # for a task that draws in evaluations too
            said = forward(on_device)
            if said is None:
                continue
            sums = task.sums(said, on_device)
            if "loss" not in sums:
                sums["loss"] = task.loss(said, on_device).double() * weight
            sums["weight"] = weight
            yield sums

    with evaluating(model):
        nothing = {"loss": 0.0, "weight": 0.0}
        of_set = {name: add_sums(of_batches(name, batches)) or nothing for name, batches in sets.items()}
    sums = plain_sums(of_set.pop(MAIN))
    for name, others in of_set.items():
        for what, other in plain_sums(others).items():
            sums[_SET + json.dumps((name, what))] = other
    return sums


def seed_noise(seed: int, device: torch.device) -> None:
    """Seed torch's default generators, from which dropout draws on `device`.

    torch.manual_seed also notes for GPUs that are not used who has called it, which takes a millisecond.
    """
    if device.type == "cpu":
        torch.random.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@torch.no_grad()
def reestimate(flat: FlatModel, task: Task, data: Data, seed: int, num_batches: int) -> None:
    """Estimate the running statistics of `flat` again at its parameters, into ``flat.statistics.reestimated``.

    They are the means over whole batches 0 to `num_batches` - 1 of stream 0, without autocast. Dropout is a function of
    `seed` and the batch, so every process computes the same ones.
    """
    assert flat.statistics is not None
    with flat.statistics.estimating():
        for index in range(num_batches):
            seed_noise(dropout_seed(seed, 0, index), flat.parameters.device)
            task.outputs(flat.model, to_device(data.batch(0, index), flat.parameters.device))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in evaluation mode without gradients. Afterwards every module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
