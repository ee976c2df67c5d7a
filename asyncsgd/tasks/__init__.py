"""What is learned, apart from how: one task per file; `asyncsgd.tasks.base` is the contract.

`TASKS` has for each, by what records call it and its module is called, the class."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
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


def class_named(name: str) -> type[Task]:
    """The class of a task: one of the library's, or ``MODULE:CLASS``, which may lie in the working folder.

    Raises:
        UsageError: if there is none.
    """
    module, colon, class_name = name.partition(":")
    if not colon:
        if name not in TASKS:
            raise UsageError(
                f"name a task first: {', '.join(TASKS)} or MODULE:CLASS; got {name!r}{nearest(name, TASKS)}"
            )
        return task_class(name)
    from asyncsgd.tasks.base import Task

    file = Path(module.removesuffix(".py")).name
    if module.endswith(".py") or not all(map(str.isidentifier, [*module.split("."), class_name])):
        module_name = re.sub(r"\W", "_", file) or "my_task"
        raise UsageError(
            f"{name} names no class in a module; put the task into {module_name}.py in this folder, since Python "
            f"imports only what letters, digits and _ spell, and type {module_name}:{class_name or 'CLASS'}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        kind = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        if module == "__main__":
            raise UsageError(
                f"{name} is of a script or a notebook, which no command can import; go on where it was begun, with "
                f"asyncsgd.study(..., resume=True)"
            ) from error
        raise UsageError(f"there is no task {name}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task) and dataclasses.is_dataclass(kind)):
        raise UsageError(f"{name} is no task: it must be a dataclass that is a subclass of asyncsgd.Task")
    return kind
