"""What a study may fine-tune its models for: settings and score of each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.flags import Flags
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks import task_class

SCORES: Mapping[str, str] = MappingProxyType({"macro_f1": "macro-F1", "span_f1": "span F1"})
"""Metrics that models are judged by after fine-tuning, in words; each is higher for a better model."""

TASKS: Mapping[str, str] = MappingProxyType({"classification": "macro_f1", "token_classification": "span_f1"})
"""Tasks that models are fine-tuned for, each with its score."""


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """A task that models are fine-tuned for."""

    task: str
    flags: Flags
    score: str
    """Of `SCORES`."""

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Valid settings; the values of the study also name the task.

        Raises:
            UsageError: for a value that is wrong.
        """
        return self.flags.make(own(values))


def own(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the task among those of the study, which also name it."""
    return {name: value for name, value in values.items() if name != "task"}


def finetuning_in(values: Mapping[str, Any]) -> Finetuning:
    """The task that the settings of fine-tuning name with ``task``, classification without it.

    Raises:
        UsageError: for an unknown name.

    >>> finetuning_in({"task": "token_classification", "data": "FOLDER"}).score
    'span_f1'
    """
    name = values.get("task", "classification")
    if name not in TASKS:
        raise UsageError(f"task must be one of {', '.join(TASKS)}, got {name!r}{nearest(str(name), TASKS)}")
    return Finetuning(name, task_flags(task_class(name)), TASKS[name])
