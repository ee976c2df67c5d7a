"""A run that a folder holds, to be run again: replayed, predicted, exported. Scripts and `asyncsgd.train` wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.console import say
from asyncsgd.records.events import EVENTS, read_header
from asyncsgd.run.of_train import Given, run_of_settings
from asyncsgd.run.recorded import fields_of, not_believed, task_of_train, tell_other_fields
from asyncsgd.run.run import Run, run_of
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.tasks import TASKS, task_class
from asyncsgd.tasks.base import Task


def is_of_train(folder: Path) -> bool:
    """Whether `asyncsgd.train` wrote a folder, and no script."""
    return "task_class" in read_of_run(folder, "settings.yaml")


def run_of_folder(folder: Path, given: Given, changes: Mapping[str, Any] = MappingProxyType({})) -> Run:
    """The run of a folder. It is not prepared, and says nothing of where it is written.

    Args:
        changes: settings that take the place of the recorded ones, by name.

    Raises:
        UsageError: if the settings cannot be read, or what they do not hold is not given.
    """
    settings = read_of_run(folder, "settings.yaml")
    if "simulate" in settings:
        raise UsageError(f"{folder} holds a simulation, which has no task; python -m asyncsgd replay runs it again")
    if "task_class" in settings:
        return run_of_settings({**settings, **changes}, given)
    read = settings_of_script(folder, {"cache_dir": given.cache, **changes}, given.task)
    return run_of(read.task.name, read)


TO_REPLAY: Mapping[str, Any] = MappingProxyType({"speeds": None, "transport": "auto", "prefetch": 0})
"""Changes for a run whose log has the times and the order of the batches."""


def task_of_folder(folder: Path, task: Task | type[Task] | None) -> tuple[Task, int]:
    """The task of a folder's run, not prepared, and its seed; whatever else of it may not be at hand."""
    settings = read_of_run(folder, "settings.yaml")
    if "task_class" in settings:
        return task_of_train(settings, task), settings["seed"]
    read = settings_of_script(folder, {}, task)
    return read.task, read.job.seed


def settings_of_script(folder: Path, changes: Mapping[str, Any], task: Task | type[Task] | None = None) -> Any:
    """The settings of a script's run with changes, but none that says where something is written."""
    named = str(read_header(folder / EVENTS).get("task"))
    if task is None and named not in TASKS:
        raise not_believed(named)
    kind: Any = task or task_class(named)
    if not isinstance(kind, type):
        kind = type(kind)
    if kind.name != named:
        say(f"note   the run's task was {named}, and {kind.name} was given")
    flags = task_flags(kind)
    written = {*flags.places, *kind.output_folders}
    recorded = {name: value for name, value in flags.load_yaml(folder / "settings.yaml").items() if name not in written}
    settings = flags.make({**recorded, **changes})
    if task is not None and not isinstance(task, type):
        tell_other_fields(task, fields_of(settings.task))
        settings = dataclasses.replace(settings, task=task)
    return settings
