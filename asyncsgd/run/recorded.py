"""A finished run, read to be run again: its task, its summary, and whether a replay ends as it did.

A run folder is data. It may come from somebody else, so it runs no code that it names: a task that is none of the
library's own is given by the user."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.console import say
from asyncsgd.run import runtimes
from asyncsgd.settings import kinds
from asyncsgd.settings.flags import ADDED_SINCE
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.tasks import TASKS, task_class
from asyncsgd.tasks.base import Task


def fields_of(task: Task) -> dict[str, Any]:
    """The settings of a task as a run folder holds them: plain values by name, without what the task has found out."""
    fields: Sequence[Any] = dataclasses.fields(task)  # type: ignore[arg-type]
    values = {field.name: getattr(task, field.name) for field in fields if not field.metadata.get("found")}
    written: dict[str, Any] = json.loads(json.dumps(kinds.plain(values)))
    return written


def read_fields(kind: type[Task], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `fields_of` has written, each as the type of its field; lists are tuples where that is not known."""
    values = with_tuples(fields)
    with contextlib.suppress(NameError):  # of a class within a function
        for name, of_field in typing.get_type_hints(kind).items():
            if name in fields and kinds.is_known(of_field):
                with contextlib.suppress(ValueError):
                    values[name] = kinds.read(of_field, fields[name])
    return values


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they were before YAML made lists of tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def task_of_train(settings: Mapping[str, Any], given: Task | type[Task] | None) -> Task:
    """The task of a run of `asyncsgd.train`.

    Args:
        settings: of the run folder.
        given: the task, or its class, whose fields are then the folder's. None: it is one of the library's own.

    Raises:
        UsageError: if the task is none of the library's own and not given, or its class does not take the fields.
    """
    named = str(settings["task_class"])
    fields = settings.get("task_fields")
    if not isinstance(fields, dict):
        raise UsageError("settings.yaml is damaged: its task_fields are no keys and values; name another run")
    task = given
    if task is None:
        built_in = {f"asyncsgd.tasks.{name}:{class_name}": name for name, class_name in TASKS.items()}
        if named not in built_in:
            raise not_believed(named)
        task = task_class(built_in[named])
    kind = task if isinstance(task, type) else type(task)
    fields = of_recorded(kind, fields)
    if isinstance(task, type):
        try:
            task = task(**read_fields(kind, fields))
        except TypeError as error:
            raise UsageError(f"the run's task was {named}, and {kind.__name__} has other fields: {error}") from error
    module, _, class_name = named.partition(":")
    # A class of a script that was run is called __main__ there, and by its module elsewhere.
    same_module = module == kind.__module__ or "__main__" in (module, kind.__module__)
    if class_name != kind.__qualname__ or not same_module:
        say(f"note   the run's task was {named}, and {kind.__module__}:{kind.__qualname__} was given")
    tell_other_fields(task, fields)
    return task


def tell_other_fields(task: Task, recorded: Mapping[str, Any]) -> None:
    """Say in which fields a task that the user gave is not the run's."""
    given = fields_of(task)
    for name in sorted(given.keys() | recorded.keys()):
        if given.get(name) != recorded.get(name):
            say(f"note   the run's task had {name}={recorded.get(name)!r}, and {name}={given.get(name)!r} was given")


def not_believed(named: str) -> UsageError:
    """Refuse to import what a run folder says that its task is."""
    module, colon, class_name = named.partition(":")
    if not colon:  # a script's run names the task, not its class
        module = "MODULE"
        class_name = "CLASS"
    if module == "__main__":
        module = "FILE"
    return UsageError(
        f"the run's task is {named}, and a folder is not believed about code; type --task {module}:{class_name}, "
        f"or give task={class_name}()"
    )


def of_recorded(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task of class `kind` that a run folder holds, with those that it lacks since it is older."""
    return {name: was for name, was in ADDED_SINCE.items() if name in kind.__dataclass_fields__} | dict(fields)


def summary_to_replay(folder: Path) -> dict[str, Any]:
    """The summary of a run that can be replayed.

    Raises:
        UsageError: for a run that cannot, by name and with the reason.
    """
    summary = read_of_run(folder, "summary.json")
    mode = summary.get("mode")
    if refused := next((kind.not_replayed for kind in runtimes.KINDS if kind.mode == mode), ""):
        raise UsageError(f"a run of mode {mode} cannot be replayed: {refused}")
    if not isinstance(summary.get("parameters_sha256"), str):
        raise UsageError(f"the run in {folder} is {summary.get('status')} and has no parameters_sha256 to compare with")
    return summary


def shorter_than_run(summary: Mapping[str, Any], num_samples: int) -> str:
    """How the end of a replayed log differs from the run's summary; empty if it does not differ."""
    recorded = summary.get("num_samples")
    if recorded is not None and num_samples != recorded:
        return f"the log ends after {num_samples} samples, the run had {recorded}"
    return ""
