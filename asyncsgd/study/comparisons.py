"""Comparisons of trainings: arms against a reference on the same seeds, and a grid, made from a config.

Runs are made one at a time, since their seconds are compared. What is finished, DONE or DIVERGED, is skipped, so the
same command goes on where it was stopped. The configs of ``experiments/language_model.py`` and
``experiments/parallelism.py`` say in their comments what one may hold."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import RunError, UsageError, nearest
from asyncsgd.records.events import FINISHED
from asyncsgd.records.run_folder import write_text
from asyncsgd.runtime.launch import fork_server
from asyncsgd.runtimes import kind_of
from asyncsgd.scripts.base import go_offline
from asyncsgd.signals import StopRequest
from asyncsgd.study.config import Comparisons, Settings, read_config, typed
from asyncsgd.study.runner import PRELOAD, Job, Runner, status_of
from asyncsgd.tasks import task_class

TASKS = ("causal_lm", "masked_lm", "question_answering")


def jobs_of(given: Mapping[str, Any], name: str = "the config") -> list[Job]:
    """Every run of what the file `name` holds, in the order in which they are made: seed by seed, the arms of a seed in
    a random order.
    """
    config: Comparisons = typed(given, Comparisons, name)
    jobs = []
    for seed in config.seeds:
        block = [
            _job(f"{comparison}/{model}/{arm}/s{seed}", described, config.base | settings | {"seed": seed})
            for comparison, compared in config.comparisons.items()
            for model, described in config.models.items()
            for arm, settings in compared.arms.items()
        ]
        random.Random(f"language_model {seed}").shuffle(block)
        jobs += block
    for seed in () if (grid := config.grid) is None else grid.seeds:
        assert grid is not None
        points = list(itertools.product(config.models, grid.learning_rate, grid.batch_size, grid.seq_len))
        random.Random(f"grid {seed}").shuffle(points)
        for model, rate, batch, length in points:
            point = {"learning_rate": rate, "batch_size": batch, "seq_len": length, "seed": seed}
            folder = f"grid/{model}/lr{float(rate):g}-b{batch}-l{length}/s{seed}"
            jobs.append(_job(folder, config.models[model], config.base | grid.base | point))
    return jobs


def _job(folder: str, model: Settings, settings: Settings) -> Job:
    if (task := model.get("task")) not in TASKS:
        raise UsageError(f"models: task must be one of {', '.join(TASKS)}, got {task!r}")
    return Job(folder, task, {"mode": "single", **{key: model[key] for key in model if key != "task"}, **settings})


def is_finished(path: Path) -> bool:
    """Whether the run in `path` is not to be made again: it would end so again."""
    return status_of(path) in FINISHED


def planned(config_file: Path, out: Path | None) -> tuple[Path, list[Job]]:
    """The folder of all runs (None: runs/ and the config's name), which is now that of this config, and the runs.

    Raises:
        UsageError: for a config that is wrong, models or data that are not there, or a folder of another config.
    """
    config = read_config(config_file)
    jobs = jobs_of(config, str(config_file))
    out = out or Path("runs") / config["name"]
    kept, text = out / "config.yaml", config_file.read_text(encoding="utf-8")
    if kept.is_file() and kept.read_text(encoding="utf-8") != text:
        raise UsageError(f"{out} holds runs of another config; name another folder with --out, or delete it")
    tasks = {repr(job.settings.task): job for job in jobs if not is_finished(out / job.folder)}
    if missing := dict.fromkeys(reason for job in tasks.values() for reason in _missing(job)):
        listed = "".join(f"\n  {reason}" for reason in missing)
        raise UsageError(
            f"{config_file} cannot be run here, and no run was started:{listed}\n"
            f"the first lines of {config_file} say where its models and data come from"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_text(kept, text)
    return out, jobs


def _missing(job: Job) -> Iterator[str]:
    """What is wrong with the data and the model of a run; the Hub is asked for a model that is no folder."""
    from asyncsgd.data.tokenizer import pretrained_tokenizer

    task = job.settings.task
    try:
        task.check_names()
    except UsageError as error:
        yield str(error)
    try:
        if task.model_name not in task.shapes:
            pretrained_tokenizer(task.origin().model)
    except UsageError as error:
        hint = f"--model {task.model_name}: here is no such folder, and the Hub does not give a model of that name"
        yield str(error) if os.path.isdir(task.model_name) else hint + nearest(task.model_name, task.shapes)


def make_all(out: Path, jobs: Sequence[Job], stop: StopRequest, lacks: Callable[[Job], str] = lambda job: "") -> None:
    """Make every run that is not finished, but for those of which `lacks` says why they cannot be made here.

    Raises:
        RunError: if runs ended badly.
        KeyboardInterrupt: when the user has asked to stop, after the run has saved what it had.
    """
    todo = []
    for job in jobs:
        if reason := lacks(job):
            print(f"{job.folder:44} left out: {reason}", flush=True)
        elif not is_finished(out / job.folder):
            todo.append(job.below(out))
    if not todo:
        return
    modules = {name for job in todo for name in task_class(job.task).preload}
    modules |= {name for job in todo for name in kind_of(job.settings.job.mode, "measured").preload}
    for job in todo:
        go_offline(job.settings.task.model_name, f"{job.values.get('data')} {job.values.get('eval_data')}")
    context = fork_server(todo[0].settings.task.model_name, *PRELOAD, *sorted(modules))
    runner = Runner(out, out.name, context, stop)
    runner.run(todo)
    if runner.failed:
        raise RunError(f"{len(runner.failed)} runs ended badly, see {out / 'logs'}. The same command goes on")
