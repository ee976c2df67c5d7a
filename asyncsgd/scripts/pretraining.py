"""From the settings of ``experiments/stilt_mlm.py`` to its experiment: masked-language-model training on a text."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncsgd import models
from asyncsgd.experiment import Experiment, cache_folder, course_of, policy_of, setup_of
from asyncsgd.flat import FlatModel
from asyncsgd.settings.training import Settings
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.masked_lm import MaskedLM


def pretraining(settings: Settings) -> Experiment:
    """What the settings ask for; nothing is read yet.

    Raises:
        UsageError: if the settings alone show a mistake; the message says what to change.
    """
    task = task_of(settings)
    return Experiment(
        name="stilt_mlm",
        task=task,
        setup=setup_of(settings.job, settings.machine, settings.optimization),
        course=lambda task: course_of(settings.budget, settings.optimization, task),
        cache=cache_folder(settings.data.cache_dir),
        identity={
            "from_scratch": _from_scratch(task),
            "eval_masking": f"{task.eval_mask}:{task.eval_mask_prob}",
            "speeds": settings.job.speeds or ("constant:1" if settings.job.clock == "virtual" else None),
        },
        describe=_describe,
        checkpoints=lambda task: policy_of(settings.output, task),
        profile=settings.output.profile,
    )


def task_of(settings: Settings) -> MaskedLM:
    """The task, not prepared."""
    data: dict[str, Any] = dataclasses.asdict(settings.data)
    del data["cache_dir"]
    return MaskedLM(
        model_name=settings.model.model,
        data_name=data.pop("data"),
        dropout=settings.model.dropout,
        **data,
    )


def _from_scratch(task: MaskedLM) -> bool:
    return task.model_name in models.SHAPES


def _describe(task: Task, flat: FlatModel) -> list[str]:
    assert isinstance(task, MaskedLM)
    origin = "random weights" if _from_scratch(task) else "continued"
    model = f"model  {task.model_name} ({origin}, {flat.layout.num_parameters / 1e6:.2f} M parameters)"
    lines = [
        f"{model}   data  {task.corpus} ({task.num_train_samples} training, {task.num_eval_samples} evaluation samples)"
    ]
    if task.num_without_candidates:
        kept = "are left out" if task.tech else "are masked as if there were no candidates"
        lines.append(f"note   {task.num_without_candidates} training sequences without a candidate {kept}")
    if (new := task.new_parameters) and not _from_scratch(task):
        number = f"{len(new)} of {len(flat.layout.names)} tensors are"
        lines.append(f"note   {number} not in the checkpoint, so they are drawn from the seed: {', '.join(new)}")
    return lines
