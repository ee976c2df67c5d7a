"""Comparisons of trainings: arms against a reference on the same seeds, and a grid, made from a config.

Runs are made one at a time, since their seconds are compared. What is finished, DONE or DIVERGED, is skipped, so the
same command goes on where it was stopped. The configs of ``experiments/language_model.py`` and
``experiments/parallelism.py`` say in their comments what one may hold."""

from __future__ import annotations

import functools
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
from asyncsgd.study.config import Comparisons, Points, Settings, read_config, typed
from asyncsgd.study.runner import PRELOAD, Job, Runner, status_of
from asyncsgd.tasks import task_class

TASKS = ("causal_lm", "masked_lm", "question_answering")


def jobs_of(given: Mapping[str, Any], name: str = "the config") -> list[Job]:
    """Every run in the order in which they are made: seed by seed, the arms of a seed in a random order.

    Args:
        given: what the file holds.
        name: of the file, for messages.

    Raises:
        UsageError: for a key or value that is wrong.
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
    if config.grid is not None:
        jobs += [
            _job(folder, config.models[model], config.base | settings)
            for folder, model, settings in _points(config.grid, config.models)
        ]
    return jobs


def _points(grid: Points, models: Mapping[str, Any]) -> Iterator[tuple[str, str, Settings]]:
    for seed in grid.seeds:
        block = list(itertools.product(models, grid.learning_rate, grid.batch_size, grid.seq_len))
        random.Random(f"grid {seed}").shuffle(block)
        for model, rate, batch, length in block:
            point = {"learning_rate": rate, "batch_size": batch, "seq_len": length, "seed": seed}
            yield f"grid/{model}/lr{float(rate):g}-b{batch}-l{length}/s{seed}", model, {**grid.base, **point}


def _job(folder: str, model: Mapping[str, Any], settings: Settings) -> Job:
    if (task := model.get("task")) not in TASKS:
        raise UsageError(f"models: task must be one of {', '.join(TASKS)}, got {task!r}")
    return Job(folder, task, {"mode": "single", **{key: model[key] for key in model if key != "task"}, **settings})


def check_inputs(config_file: Path, jobs: Sequence[Job]) -> None:
    """Look for the models and the data of all runs.

    Raises:
        UsageError: with everything that is missing.
    """
    missing: dict[str, None] = {}
    seen = set()
    for job in jobs:
        task = job.settings.task
        if repr(task) in seen:
            continue
        seen.add(repr(task))
        for look in (task.check_names, functools.partial(_find_model, job.task, task.model_name)):
            try:
                look()
            except UsageError as error:
                missing[str(error)] = None
    if missing:
        listed = "".join(f"\n  {reason}" for reason in missing)
        raise UsageError(
            f"{config_file} cannot be run here, and no run was started:{listed}\n"
            f"the first lines of {config_file} say where its models and data come from"
        )


@functools.cache
def _find_model(task: str, name: str) -> None:
    """Load the tokenizer of a model that is no built-in shape; the Hub is asked where there is no such folder."""
    from asyncsgd import models
    from asyncsgd.data.tokenizer import pretrained_tokenizer
    from asyncsgd.origin import read_origin
    from asyncsgd.tasks import causal_lm

    built_in = *models.SHAPES, *causal_lm.SHAPES
    if name in built_in:
        return
    path = read_origin(name, "causal_lm" if task == "causal_lm" else "masked_lm").model
    try:
        pretrained_tokenizer(path)
    except UsageError as error:
        if os.path.isdir(path):
            raise
        raise UsageError(
            f"--model {name}: here is no such folder, and the Hub does not give a model of that name"
            f"{nearest(name, built_in)}"
        ) from error


def is_finished(path: Path) -> bool:
    """Whether the run in `path` is not to be made again: it would end so again."""
    return status_of(path) in FINISHED


def planned(config_file: Path, out: Path | None) -> tuple[Path, list[Job]]:
    """The folder of all runs, which is now that of this config, and the runs. Nothing has been run yet.

    Args:
        out: the folder; None: runs/ and the config's name.

    Raises:
        UsageError: for a config that is wrong, models or data that are not there, or a folder that holds runs of
            another config.
    """
    config = read_config(config_file)
    jobs = jobs_of(config, str(config_file))
    for job in jobs:
        _ = job.settings  # refuses
    out = out or Path("runs") / config["name"]
    kept, text = out / "config.yaml", config_file.read_text(encoding="utf-8")
    if kept.is_file() and kept.read_text(encoding="utf-8") != text:
        raise UsageError(f"{out} holds runs of another config; name another folder with --out, or delete it")
    check_inputs(config_file, [job for job in jobs if not is_finished(out / job.folder)])
    out.mkdir(parents=True, exist_ok=True)
    write_text(kept, text)
    return out, jobs


def make_all(out: Path, jobs: Sequence[Job], stop: StopRequest, lacks: Callable[[Job], str] = lambda job: "") -> None:
    """Make every run that is not finished.

    Args:
        out: the folder of all runs.
        stop: of the script.
        lacks: says why a run cannot be made here; it is left out then. Empty: it can.

    Raises:
        RunError: if runs ended badly.
        KeyboardInterrupt: when the user has asked to stop, after the run has saved what it had.
    """
    left = [job for job in jobs if not is_finished(out / job.folder)]
    for job in left:
        if reason := lacks(job):
            print(f"{job.folder:44} left out: {reason}", flush=True)
    if left := [job.below(out) for job in left if not lacks(job)]:
        named = [str(job.settings.task.model_name) for job in left]
        for job, model in zip(left, named, strict=True):
            go_offline(model, f"{job.values.get('data')} {job.values.get('eval_data')}")
        modules = {name for job in left for name in task_class(job.task).preload}
        modules |= {name for job in left for name in kind_of(job.settings.job.mode, "measured").preload}
        runner = Runner(out, out.name, fork_server(named[0], *PRELOAD, *sorted(modules)), stop)
        runner.run(left)
        if runner.failed:
            raise RunError(f"{len(runner.failed)} runs ended badly, see {out / 'logs'}. The same command goes on")
