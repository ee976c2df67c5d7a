"""The folder of a run that `asyncsgd.train` asked for: its settings, and the run that they ask for.

A rule and an optimizer of the user's own cannot be written down. Null stands for that rule, and whoever replays the run
gives both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncsgd.core.optimizers import SGD, AdamW, BuildOptimizer, OptimizerRecipe
from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import RunFolder, write_text
from asyncsgd.rules import parse_rule
from asyncsgd.rules.contract import Rule
from asyncsgd.run import runtimes
from asyncsgd.run.choose_folder import has_trained, open_again, set_aside
from asyncsgd.run.recorded import fields_of, of_recorded, task_of_train, with_tuples
from asyncsgd.run.run import Run
from asyncsgd.settings.groups import Budget, Job, Machine, Output, Steps
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.tasks.base import Task

OPTIMIZERS: Mapping[str, Callable[..., BuildOptimizer]] = {"sgd": SGD, "adamw": AdamW}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a folder does not hold, or is not believed about, and its reader gives."""

    task: Task | type[Task] | None = None
    """The task, or its class, whose fields are then the folder's. None: it is one of the library's own."""
    rule: Rule | None = None
    optimizer: BuildOptimizer | None = None
    cache: str | None = None
    """Folder of prepared data; None: the user's cache folder."""


def settings_of(run: Run) -> dict[str, Any]:
    """The settings without groups, as scripts write them."""
    try:
        rule: str | None = str(run.rule) if parse_rule(str(run.rule)) == run.rule else None
    except UsageError:
        rule = None  # the user's own
    task = run.task
    recipe = run.recipe
    steps = run.steps
    every = run.budget.evaluate_every
    return {
        "task_class": f"{type(task).__module__}:{type(task).__qualname__}",
        "task_fields": fields_of(task),
        **runtimes.job_of(run.runtime),
        "rule": rule,
        "seed": run.seed,
        "optimizer": str(recipe),
        "optimizer_options": json.loads(json.dumps(recipe.options, default=str)),
        **{name: getattr(steps, name) for name in ("learning_rate", "schedule", "warmup", "weight_decay", "clip_norm")},
        **vars(run.budget),
        "evaluate_every": int(every) if every is not None and every.isdigit() else every,
        **vars(run.machine),
    }


def run_of_settings(settings: Mapping[str, Any], given: Given) -> Run:
    """The run that `settings_of` has written down.

    Raises:
        UsageError: for a part of the user's own that is not given, and for a value that cannot be read.
    """
    rule = given.rule
    optimizer = given.optimizer
    if rule is None and settings["rule"] is None:
        raise UsageError(
            "the run's rule is not one of the library's, and asyncsgd.replay alone can be given it; give it, as in "
            "replay(folder, rule=MyRule())"
        )
    if optimizer is None and settings["optimizer"] not in OPTIMIZERS:
        raise UsageError(
            "the run's optimizer is the user's own; give it, as in replay(folder, optimizer=...), which alone takes it"
        )
    if optimizer is None:
        optimizer = OPTIMIZERS[settings["optimizer"]](**with_tuples(settings["optimizer_options"]))
    budget = _group_of(Budget, settings)
    if budget["evaluate_every"] is not None:
        budget["evaluate_every"] = str(budget["evaluate_every"])
    return Run(
        "train",
        task_of_train(settings, given.task),
        runtimes.runtime_of(Job(**_group_of(Job, {**settings, "rule": "asynchronous"})), settings["threads"]),
        rule or parse_rule(settings["rule"]),
        OptimizerRecipe(optimizer, settings["weight_decay"], settings["clip_norm"]),
        settings["seed"],
        Budget(**budget),
        Steps(**_group_of(Steps, {**settings, "optimizer": "adamw"})),
        Machine(**_group_of(Machine, settings)),
        Output(cache_dir=given.cache),
    )


def _group_of(kind: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group of settings, without those that the folder lacks since it is older."""
    return {field.name: settings[field.name] for field in dataclasses.fields(kind) if field.name in settings}


def open_folder(path: Path, run: Run, *, resume: bool) -> RunFolder:
    """Make the folder of a new run and write its settings, or open that of a run that goes on.

    Raises:
        UsageError: if something else lies there, the run there has other settings, or the folder cannot be written.
    """
    if resume and (path / "settings.yaml").is_file() and has_trained(path):
        before = read_of_run(path, "settings.yaml")
        now = settings_of(run)
        if "task_fields" in before:
            before["task_fields"] = of_recorded(type(run.task), before["task_fields"])
        # Earlier versions did not write down all of the runtime.
        different = [(key, before[key], now[key]) for key in now if key in before and before[key] != now[key]]
        return open_again(path, different, yaml.safe_dump(now, sort_keys=False))
    if (path / "settings.yaml").is_file() and not has_trained(path):
        set_aside(path)  # a run that was refused has left nothing worth keeping
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} holds something already; name a new folder, or remove it")
    try:
        task = run.task
        better = run.task.scored_by()
        folder = RunFolder(
            path, task=task.name, better=better, loss_unit=task.loss_unit(), sample_order=task.sample_order
        )
        write_text(path / "settings.yaml", yaml.safe_dump(settings_of(run), sort_keys=False))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); name another folder") from error
    return folder
