"""What a study may fine-tune its models for: script, settings and score of each task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.finetuning import FINETUNE_FLAGS
from asyncsgd.settings.flags import Flags
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks import task_class

SCORES: Mapping[str, str] = MappingProxyType({"macro_f1": "macro-F1", "span_f1": "span F1"})
"""Metrics that models are judged by after fine-tuning, in words; each is higher for a better model."""

TASKS = ("classification", "token_classification")


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """A task that models are fine-tuned for."""

    script: str
    """Its file in ``experiments/``, without .py."""
    flags: Flags[Any]
    score: str
    """Of `SCORES`."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where a study has other defaults than the script."""

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the script among those of the study, which also name the task."""
        known = {name: value for name, value in values.items() if name != "task" or "task" in self.flags.specs}
        return {**self.defaults, **known}

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Valid settings of the script.

        Raises:
            UsageError: for a value that is wrong.
        """
        return self.flags.make(self.own(values))


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
    return _finetuning(name)


@functools.cache
def _finetuning(task: str) -> Finetuning:
    if task == "classification":
        return Finetuning("stilt_finetune", FINETUNE_FLAGS, "macro_f1")
    return Finetuning("train_tagger", task_flags(task_class(task)), "span_f1", {"mode": "single"})
