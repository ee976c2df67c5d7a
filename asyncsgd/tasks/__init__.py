"""What is learned, apart from how: one task per file; `asyncsgd.tasks.base` is the contract.

`TASKS` has for each, by what records call it and its module is called, the class. `NAMED` has the classes of installed
packages too."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncsgd.errors import UsageError, nearest
from asyncsgd.extensions import TASKS as GROUP
from asyncsgd.extensions import Registry

if TYPE_CHECKING:
    from asyncsgd.tasks.base import Task

TASKS = {
    "masked_lm": "MaskedLM",
    "classification": "Classification",
    "causal_lm": "CausalLM",
    "token_classification": "TokenClassification",
    "question_answering": "QuestionAnswering",
}
_OWN = {name: f"asyncsgd.tasks.{name}:{class_name}" for name, class_name in TASKS.items()}
NAMED: Registry[type[Task]] = Registry("task", GROUP, _OWN, "asyncsgd.tasks.base:Task")
"""Every task that has a name, by it: those of `TASKS`, and those of installed packages."""


def is_built_in(task: Task) -> bool:
    """Whether `task` is one of the library's own, and not of a class derived from one.

    >>> is_built_in(task_class("causal_lm")())
    True
    """
    return task.name in TASKS and type(task) is task_class(task.name)


def has_name(task: Task) -> bool:
    """Whether the name of `task` says of which class it is: one of the library's own, or of an installed package."""
    if is_built_in(task):
        return True
    try:
        return NAMED.get(task.name) is type(task)
    except UsageError:  # the name is that of a package which is broken
        return False


def task_class(name: str) -> type[Task]:
    """The class of the task that records call `name`.

    Raises:
        UsageError: if it is none of the library's own and of no installed package.

    >>> task_class("causal_lm").__name__
    'CausalLM'
    """
    if name not in NAMED:
        raise UsageError(
            f"{name!r} is no task of this library or of an installed package{nearest(name, NAMED)}; name one of "
            f"{', '.join(NAMED)}, or install the package that {name} came with"
        )
    return NAMED[name]


def class_named(name: str) -> type[Task]:
    """The class of a task: one of `NAMED`, or ``MODULE:CLASS``, which may lie in the working folder.

    Raises:
        UsageError: if there is none.
    """
    module, colon, class_name = name.partition(":")
    if not colon:
        if name not in NAMED:
            raise UsageError(
                f"name a task first: {', '.join(NAMED)} or MODULE:CLASS; got {name!r}{nearest(name, NAMED)}; if it "
                f"came with a package, install that package"
            )
        return NAMED[name]
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
