"""The settings of a script that trains one task, made from the fields of the task's class."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from asyncsgd.settings.flags import Flags, group, setting
from asyncsgd.settings.training import (
    SGD_LEARNING_RATE,
    Common,
    Defaults,
    Output,
    Steps,
    common_contradictions,
)


@dataclasses.dataclass(frozen=True)
class TaskOutput(Output):
    """Where the run is written and prepared data are kept; nothing here changes a result."""

    cache_dir: str | None = setting(None, "folder for prepared data", unset="the user's cache folder")


def steps_of(defaults: Defaults) -> type[Steps]:
    """`Steps` with these defaults."""
    schedule = "constant"
    if defaults.schedule != schedule:
        schedule = f"{defaults.schedule}, or constant when --samples sets no limit"
    unset = {
        "learning_rate": f"{defaults.learning_rate:g} for adamw, {SGD_LEARNING_RATE:g} for sgd",
        "schedule": schedule,
    }
    hints, fields = typing.get_type_hints(Steps), []
    for field in dataclasses.fields(Steps):
        metadata, default = dict(field.metadata), field.default
        if field.name in unset:
            metadata["unset"] = unset[field.name]  # `Common` fills it in
        elif hasattr(defaults, field.name):
            default = getattr(defaults, field.name)
        fields.append((field.name, hints[field.name], dataclasses.field(default=default, metadata=metadata)))
    return dataclasses.make_dataclass("StepsOfTask", fields, bases=(Steps,), frozen=True)


def task_flags(kind: type[Any]) -> Flags[Any]:
    """Flags of every training and of the fields of a task, which is a frozen dataclass.

    Raises:
        UsageError: if a field has the name of a setting that every training has.
    """
    fields: list[Any] = [
        ("task", kind, group(kind, f"task: {kind.name}")),
        ("optimization", steps := steps_of(kind.defaults), group(steps, "optimizer")),
        ("output", TaskOutput, group(TaskOutput, "output")),
    ]
    made = dataclasses.make_dataclass(
        f"{kind.__name__}Settings", fields, bases=(Common,), namespace={"defaults": kind.defaults}, frozen=True
    )
    flags: Flags[Any] = Flags(
        made, lambda settings: common_contradictions(settings, settings.task.batch_size), example=("mode", "async")
    )
    _ = flags.specs  # refuses
    return flags
