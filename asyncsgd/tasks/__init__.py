"""What is learned, apart from how: one task per file; `asyncsgd.tasks.base` is the contract.

`TASKS` has a line for each: what records call it, and where it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:
    from asyncsgd.tasks.base import Task

TASKS = {
    "masked_lm": ("masked_lm", "MaskedLM"),
    "classification": ("classification", "Classification"),
    "causal_lm": ("causal_lm", "CausalLM"),
    "token_classification": ("token_classification", "TokenClassification"),
    "question_answering": ("question_answering", "QuestionAnswering"),
}


def is_built_in(task: Task) -> bool:
    """Whether `task` is one of the library's own, and not of a class derived from one.

    >>> is_built_in(task_class("causal_lm")())
    True
    """
    kind = type(task)
    return (kind.__module__, kind.__name__) in {(f"asyncsgd.tasks.{module}", name) for module, name in TASKS.values()}


def task_class(name: str) -> type[Task]:
    """The class of the task that records call `name`.

    Raises:
        UsageError: if it is none of the library's own.

    >>> task_class("causal_lm").__name__
    'CausalLM'
    """
    if name not in TASKS:
        raise UsageError(
            f"{name!r} is no task of this library{nearest(name, TASKS)}; give the task itself, as in "
            f"asyncsgd.replay(folder, task=MyTask())"
        )
    module, class_name = TASKS[name]
    kind: type[Task] = getattr(importlib.import_module(f"asyncsgd.tasks.{module}"), class_name)
    return kind
