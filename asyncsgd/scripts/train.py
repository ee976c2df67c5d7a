"""Train one of the library's tasks, or one of your own: ``asyncsgd train TASK``."""

from __future__ import annotations

from asyncsgd.core.signals import StopRequest
from asyncsgd.scripts.base import Typed
from asyncsgd.tasks import NAMED, class_named


def run(argv: list[str], stop: StopRequest, typed: Typed) -> int:
    """Train the task that the first argument names; return the exit code."""
    name, *flags = argv or [""]
    if name in ("", "-h", "--help"):
        tasks = f"{', '.join(NAMED)}, or MODULE:CLASS for your own"
        print(
            f"usage: {typed.prog} TASK [--FLAG VALUE ...]\n\ntasks: {tasks}\n{typed.prog} TASK --help lists every flag."
        )
        return 2 if not name else 0
    from asyncsgd.scripts.task import TaskScript

    kind = class_named(name)
    return TaskScript(kind, kind.name, typed=typed.with_word(name)).run(flags, stop)


def run_task(argv: list[str], stop: StopRequest) -> int:
    """The same, typed as ``experiments/train.py``."""
    return run(argv, stop, Typed.of_script("train.py"))
