"""Comparisons of trainings: arms against a reference on the same seeds, and a grid, made from a config.

Runs are made one at a time, since their seconds are compared. What is finished, DONE or DIVERGED, is skipped, so the
same command goes on where it was stopped. The configs of ``experiments/language_model.py`` and
``experiments/parallelism.py`` say in their comments what one may hold."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import RunError, UsageError, nearest
from asyncsgd.records.events import FINISHED
from asyncsgd.records.run_folder import write_text
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.run_folder import read_summary
from asyncsgd.scripts.task import TaskScript
from asyncsgd.settings.flags import flag_of
from asyncsgd.signals import StopRequest
from asyncsgd.study.config import check_keys, list_in, mapping_in, number_in, read_config, seeds_in, text_in
from asyncsgd.study.runner import output_to
from asyncsgd.tasks import task_class

TASKS = ("causal_lm", "masked_lm", "question_answering")
KEYS = ("name", "base", "models", "seeds", "comparisons", "grid")
GRID_KEYS = ("base", "seeds", "learning_rate", "batch_size", "seq_len", "threshold")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: its folder below that of all runs, its task and its flags."""

    folder: str
    task: str
    flags: tuple[str, ...]

    @property
    def script(self) -> TaskScript:
        return script_of(self.task)


@functools.cache
def script_of(task: str) -> TaskScript:
    """What trains a task; its flags are those of every training and the task's fields."""
    return TaskScript(task_class(task), "comparisons", description="")


def jobs_of(config: Mapping[str, Any]) -> list[Job]:
    """Every run in the order in which they are made: seed by seed, the arms of a seed in a random order.

    Raises:
        UsageError: for a key or value that is wrong, also of a run's own settings.
    """
    check_keys(config, KEYS, "the config")
    models = mapping_in(config.get("models"), "models")
    base = dict(mapping_in(config.get("base"), "base"))
    jobs = []
    for seed in seeds_in(config.get("seeds", [0]), "seeds"):
        block = [
            _job(f"{comparison}/{model}/{arm}/s{seed}", models[model], base | dict(settings) | {"seed": seed})
            for comparison, found in mapping_in(config.get("comparisons"), "comparisons").items()
            for model in models
            for arm, settings in _arms(comparison, found).items()
        ]
        random.Random(f"language_model {seed}").shuffle(block)
        jobs += block
    for folder, model, settings in _grid(mapping_in(config.get("grid"), "grid"), models):
        jobs.append(_job(folder, models[model], base | settings))
    if not jobs:
        raise UsageError("the config names no models, or neither comparisons nor a grid; see experiments/configs/")
    return jobs


def _arms(name: str, given: Any) -> Mapping[str, Any]:
    where = f"comparisons.{name}"
    found = mapping_in(given, where)
    check_keys(found, ("reference", "margin", "arms"), where)
    arms = mapping_in(found.get("arms"), f"{where}.arms")
    if text_in(found.get("reference"), f"{where}.reference") not in arms or len(arms) < 2:
        raise UsageError(f"{where}.arms must name the reference {found.get('reference')!r} and one more at least")
    number_in(found.get("margin"), f"{where}.margin", 0, None)
    return arms


def _grid(given: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if not given:
        return
    check_keys(given, GRID_KEYS, "grid")
    thresholds = mapping_in(given.get("threshold"), "grid.threshold")
    if set(thresholds) != set(models):
        raise UsageError(f"grid.threshold must give a loss for each model: {', '.join(models)}")
    values = [list_in(given.get(key), f"grid.{key}") for key in ("learning_rate", "batch_size", "seq_len")]
    for seed in seeds_in(given.get("seeds", [0]), "grid.seeds"):
        block = [(model, *point) for model in models for point in itertools.product(*values)]
        random.Random(f"grid {seed}").shuffle(block)
        for model, rate, batch, length in block:
            point = {"learning_rate": rate, "batch_size": batch, "seq_len": length, "seed": seed}
            settings = {**mapping_in(given.get("base"), "grid.base"), **point}
            yield f"grid/{model}/lr{float(rate):g}-b{batch}-l{length}/s{seed}", model, settings


def _job(folder: str, model: Any, settings: Mapping[str, Any]) -> Job:
    described = dict(mapping_in(model, "models"))
    task = described.pop("task", None)
    if task not in TASKS:
        raise UsageError(f"models: task must be one of {', '.join(TASKS)}, got {task!r}")
    flags = tuple(
        part
        for key, value in ({"mode": "single"} | described | dict(settings)).items()
        for part in ((flag_of(key),) if value is True else (flag_of(key), str(value)))
    )
    return Job(folder, task, flags)


def check(job: Job) -> Any:
    """Read the flags of a run as its script will; its settings.

    Raises:
        UsageError: if they are not valid.
    """
    try:
        return job.script.flags.parse(job.flags, prog=job.script.name, description="", examples="").settings
    except UsageError as error:
        raise UsageError(f"{job.folder}: {error}") from error


def check_inputs(config_file: Path, jobs: Sequence[Job]) -> None:
    """Look for the models and the data of all runs.

    Raises:
        UsageError: with everything that is missing.
    """
    missing: dict[str, None] = {}
    seen = set()
    for job in jobs:
        task = check(job).task
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
    return read_summary(path).get("status") in FINISHED


def make(job: Job, out: Path) -> int:
    """Make one run; its exit code. What it prints is kept in the folder of logs."""
    path = out / job.folder
    if path.is_dir():
        shutil.rmtree(path)  # not finished, and its clock was cut
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_to(out / "logs" / (job.folder.replace("/", "-") + ".txt")):
        return run_script(job.script.run, [*job.flags, "--run-dir", str(path)])


def planned(config_file: Path, out: Path | None) -> tuple[Path, list[Job]]:
    """The folder of all runs, which is now that of this config, and the runs. Nothing has been run yet.

    Args:
        out: the folder; None: runs/ and the config's name.

    Raises:
        UsageError: for a config that is wrong, models or data that are not there, or a folder that holds runs of
            another config.
    """
    config = read_config(config_file)
    jobs = jobs_of(config)
    for job in jobs:
        check(job)
    out = out or Path("runs") / text_in(config.get("name"), "name")
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
        stop: of the campaign.
        lacks: says why a run cannot be made here; it is left out then. Empty: it can.

    Raises:
        RunError: for a run that ended badly.
        KeyboardInterrupt: when the user has asked to stop, after the run has saved what it had.
    """
    for number, job in enumerate(jobs, start=1):
        if is_finished(out / job.folder):
            continue
        if reason := lacks(job):
            print(f"[{number:3}/{len(jobs)}] {job.folder:44} left out: {reason}", flush=True)
            continue
        began = time.monotonic()
        with stop.during_a_run():
            code = make(job, out)
        stop.check()
        diverged = code != 0 and is_finished(out / job.folder)
        word = "   it diverged" if diverged else ""
        print(f"[{number:3}/{len(jobs)}] {job.folder:44} {time.monotonic() - began:6.1f} s{word}", flush=True)
        if code != 0 and not diverged:
            log = out / "logs" / (job.folder.replace("/", "-") + ".txt")
            raise RunError(f"{job.folder} ended with exit code {code}; see {log}. The same command goes on")
