"""Whether a study can be run here: its rules and speeds are read, and its models, texts and scores are looked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.groups import BUILT_IN
from asyncsgd.studies.arms import resolve
from asyncsgd.studies.config import Analysis, Finetune
from asyncsgd.studies.plan import StudyPlan
from asyncsgd.studies.runner import PlannedJob
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.labelled_task import LabelledTask


def check(plan: StudyPlan, left: Collection[str] = ()) -> None:
    """Read every rule and every speed that the plan names as text. Look for the models and the texts that runs need,
    and for the folders that the setting `candidates` names.

    Args:
        left: the arms that still have runs to make. Nothing is looked for on behalf of the others.

    Raises:
        UsageError: for a rule or speeds, or with all that is missing.
    """
    from asyncsgd.run.runtimes import kind_of

    tasks: dict[str, Any] = {}
    for arm in plan.arms:
        for trial in arm.trials or ({},):
            values = resolve({**plan.base, **arm.settings, **trial})
            task = _task_of(PlannedJob(arm.name, arm.task, values), f"arm {arm.name}")
        if arm.name in left:
            tasks[repr(task)] = task  # of the last trial: no trial changes what is looked for
    for name, stage in plan.stages_without_arms.items():
        of_stage = PlannedJob(name, stage.task, stage.settings)
        job = of_stage.settings.job
        if not kind_of(job.mode, job.clock).in_one_process:
            raise UsageError(
                f"{name}: mode: {job.mode} needs processes of its own, and a study trains several "
                f"models side by side where there are no arms; write mode: single, or clock: virtual"
            )
        task = _task_of(of_stage, name)
        tasks[repr(task)] = task
    if plan.finetune is not None and plan.analysis is not None:
        _check_score(plan.finetune, plan.analysis)
    reasons: dict[str, None] = {}
    for task in tasks.values():
        reasons.update(dict.fromkeys(_reasons_not_runnable(task)))
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise UsageError(
            f"{plan.name} cannot be run here, and no run was started:{listed}\n"
            f"the first lines of the config say where its models and data come from"
        )


def _task_of(job: PlannedJob, where: str) -> Any:
    """The task of a run, whose rule and speeds are read."""
    from asyncsgd.run.run import run_of

    try:
        if job.why_not_runnable:  # `run_of` would import a package that is not there
            return job.settings.task
        return run_of(job.experiment, job.settings).task
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _reasons_not_runnable(task: Any) -> Iterator[str]:
    """Why runs of a task cannot be made here: its data, its model. The Hub is asked for a model that is no folder."""
    from asyncsgd.data.tokenizer import pretrained_tokenizer

    try:
        task.check_names()
    except UsageError as error:
        yield str(error)
    if not is_built_in(task):
        return
    name = task.model_name
    if name in task.shapes:  # a small model with random weights, which is always there
        return
    try:
        pretrained_tokenizer(task.origin().model)  # the path of a saved model, or a name on the Hub
    except UsageError as error:
        if os.path.isdir(name):
            yield str(error)
        else:
            hint = nearest(name, task.shapes)
            yield f"--model {name}: here is no such folder, and the Hub does not give a model of that name{hint}"


def _check_score(finetune: Finetune, analysis: Analysis) -> None:
    """Refuse to compare by a score that the evaluation labels leave undefined. The data are read for that."""
    from asyncsgd.run.run import run_of

    if analysis.primary.endpoint != finetune.score:
        return
    job = PlannedJob("finetune", finetune.task, finetune.settings)
    task = job.settings.task
    if task.data_name in BUILT_IN or not isinstance(task, LabelledTask):
        return
    cache = run_of(job.experiment, job.settings).cache
    undefined = task.undefined_scores(task.read(cache))
    if finetune.score in undefined:
        # f1 is not offered: it needs the setting `positive` too
        known = ", ".join(name for name in task.scored.better if name not in (*undefined, "f1"))
        raise UsageError(
            f"the runs of this study would be compared by {finetune.score}, which is not defined: "
            f"{undefined[finetune.score]} in {task.data_name}; name other data, or write score: with one of {known}"
        )
