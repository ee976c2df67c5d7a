"""What is learned, apart from how: one task per file; `asyncsgd.tasks.base` is the contract.

`TASKS` has for each, by what records call it and its module is called, the class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:
    from asyncsgd.tasks.base import Task

TASKS = {
    "masked_lm": "MaskedLM",
    "classification": "Classification",
    "causal_lm": "CausalLM",
    "token_classification": "TokenClassification",
    "question_answering": "QuestionAnswering",
}


def is_built_in(task: Task) -> bool:
    """Whether `task` is one of the library's own, and not of a class derived from one.

    >>> is_built_in(task_class("causal_lm")())
    True
    """
    return task.name in TASKS and type(task) is task_class(task.name)


def task_class(name: str) -> type[Task]:
    """The class of the task that records call `name`.

    Raises:
        UsageError: if it is none of the library's own.

    >>> task_class("causal_lm").__name__
    'CausalLM'
    """
    if name not in TASKS:
        raise UsageError(f"{name!r} is no task of this library{nearest(name, TASKS)}; name one of {', '.join(TASKS)}")
    kind: type[Task] = getattr(importlib.import_module(f"asyncsgd.tasks.{name}"), TASKS[name])
    return kind
