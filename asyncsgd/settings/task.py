"""The settings of a script that trains one task, made from the fields of the task's class."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncsgd.settings.flags import Flags, group, setting
from asyncsgd.settings.training import Common, Output, common_contradictions


@dataclasses.dataclass(frozen=True)
class TaskOutput(Output):
    """Where the run is written and prepared data are kept; nothing here changes a result."""

    cache_dir: str | None = setting(None, "folder for prepared data", unset="the user's cache folder")


def task_flags(kind: type[Any]) -> Flags[Any]:
    """Flags of every training and of the fields of a task, which is a frozen dataclass.

    Raises:
        UsageError: if a field has the name of a setting that every training has.
    """
    fields: list[Any] = [
        ("task", kind, group(kind, f"task: {kind.name}")),
        ("output", TaskOutput, group(TaskOutput, "output")),
    ]
    made = dataclasses.make_dataclass(f"{kind.__name__}Settings", fields, bases=(Common,), frozen=True)
    flags: Flags[Any] = Flags(
        made, lambda settings: common_contradictions(settings, settings.task.batch_size), example=("mode", "async")
    )
    _ = flags.specs  # refuses
    return flags
