"""From the settings of ``experiments/stilt_finetune.py`` to its experiment: the second stage of STILT.

Linear warmup and linear decay, mean cross-entropy, no early stopping, unless the user asks for another schedule or for
patience. Without ``--patience`` nothing is chosen by looking at the texts that are scored, so scoring them during
training costs only time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.experiment import Course, Experiment, cache_folder, course_over, policy_of, samples_in, setup_of
from asyncsgd.flat import FlatModel
from asyncsgd.init_from import Origin, read_origin
from asyncsgd.settings.finetuning import FinetuneSettings, Tuning
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.classification import Classification


def finetuning(settings: FinetuneSettings) -> Experiment:
    """What the settings ask for; no text is read yet.

    Raises:
        UsageError: if the settings alone show a mistake; the message says what to change.
    """
    tuning = settings.tuning
    origin: Origin | None = None
    with contextlib.suppress(UsageError, OSError):  # said when the task is prepared
        origin = read_origin(settings.start.init_from)
    return Experiment(
        name="stilt_finetune",
        task=task_of(settings),
        setup=setup_of(settings.job, settings.machine, tuning),
        course=lambda task: course_of(tuning, task),
        cache=cache_folder(settings.data.cache_dir),
        identity={
            "model": settings.start.init_from,
            "from_scratch": None if origin is None else origin.from_scratch,
            "parent": None if origin is None else origin.parent,
            "class_weights": tuning.class_weights,
            "speeds": settings.job.speeds or ("constant:1" if settings.job.clock == "virtual" else None),
        },
        describe=lambda task, flat: _describe(settings, origin, task, flat),
        saves_model=settings.output.save_model,
        checkpoints=lambda task: policy_of(settings.output, task),
        profile=settings.output.profile,
    )


def task_of(settings: FinetuneSettings) -> Classification:
    """The task, not prepared."""
    data: dict[str, Any] = dataclasses.asdict(settings.data)
    del data["cache_dir"]
    return Classification(
        init_from=settings.start.init_from,
        data_name=data.pop("data"),
        eval_split=data.pop("split"),
        batch_size=settings.tuning.batch_size,
        dropout=settings.tuning.dropout,
        class_weights=settings.tuning.class_weights,
        hatecheck=settings.functional.hatecheck,
        hatecheck_positive=settings.functional.hatecheck_positive,
        **data,
    )


def course_of(tuning: Tuning, task: Task) -> Course:
    """Whole batches of the budget in samples or epochs, and a share of them for the warmup.

    >>> task = Classification(batch_size=16, num_train_samples=100)
    >>> [course_of(Tuning(**length), task).budget.samples for length in ({"epochs": 2.0}, {"samples": 33})]
    [208, 48]
    """
    wanted = samples_in(tuning.samples, tuning.epochs, task)
    assert wanted is not None
    samples = math.ceil(wanted / task.batch_size) * task.batch_size
    return course_over(samples, tuning, tuning, task)


def _describe(settings: FinetuneSettings, origin: Origin | None, task: Task, flat: FlatModel) -> list[str]:
    assert isinstance(task, Classification)
    assert origin is not None
    kind = "from scratch" if origin.from_scratch else "pretrained"
    if origin.parent is not None:
        workers = origin.parent["num_workers"]
        several = "" if workers == 1 else "s"
        kind = f"{kind}, {origin.parent['mode']}, {workers} worker{several}, seed {origin.parent['seed']}"
    samples = f"{task.num_train_samples} training, {task.num_eval_samples} {task.scored_on} texts"
    new = ", ".join(task.new_parameters or ())
    weighted = ", each weighted by its inverse frequency" if task.class_weights else ""
    counts = "  ".join(f"{label} {count}" for label, count in zip(task.labels or (), task.counts or (), strict=True))
    lines = [
        f"model  {settings.start.init_from} ({kind}, {flat.layout.num_parameters / 1e6:.2f} M parameters)   "
        f"data  {task.corpus} ({samples})   seed {settings.job.seed}",
        f"head   {len(task.new_parameters or ())} of {len(flat.layout.names)} tensors drawn from the seed: {new}",
        f"labels {counts}{weighted}",
    ]
    lines += [f"note   {note}" for note in task.notes or ()]
    if task.num_cut:
        lines.append(f"note   {task.num_cut} texts fill --seq-len {task.seq_len}; what is longer is cut")
    return lines
