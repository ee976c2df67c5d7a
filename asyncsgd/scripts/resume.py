"""Go on with a run that was stopped, from its last checkpoint; its folder says what it is.

    python -m asyncsgd resume runs/stilt_mlm-async-w4-s0-3f9a1c
    python -m asyncsgd resume runs/stilt_mlm-async-w4-s0-3f9a1c --samples 20000

A run that is DONE goes on to more samples or epochs. Under torchrun, type what began the run, with ``--resume RUN``."""

from __future__ import annotations

import argparse
import sys

from asyncsgd.core.signals import StopRequest
from asyncsgd.records.events import DONE, EVENTS, INTERRUPTED, read_header
from asyncsgd.records.run_folder import find_run
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.run.recorded import not_believed
from asyncsgd.scripts.base import add_task_flag
from asyncsgd.settings.flags import specs_of
from asyncsgd.settings.groups import Budget
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.tasks import TASKS, task_class


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncsgd resume", description="Go on with a run that was stopped.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run folder with a checkpoint, how its name begins, or last")
    parser.add_argument("--samples", metavar="N", help="go on to so many samples in all")
    parser.add_argument("--epochs", metavar="N", help="go on to so many passes in all")
    add_task_flag(parser)
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    folder = find_run(given.run)
    texts = {"samples": given.samples, "epochs": given.epochs}
    longer = {name: specs_of(Budget)[name].checked(text) for name, text in texts.items() if text is not None}
    from asyncsgd.scripts.task import TaskScript, class_given

    task = class_given(given.task)
    if "task_class" not in read_of_run(folder, "settings.yaml"):
        named = str(read_header(folder / EVENTS).get("task"))
        if task is None and named not in TASKS:
            raise not_believed(named)
        kind = task or task_class(named)
        name = str(read_summary(folder).get("experiment", kind.name))
        flags = [f"--{name}={value}" for name, value in longer.items()]
        flags += [] if given.cache_dir is None else [f"--cache-dir={given.cache_dir}"]
        with StopRequest() as stop:
            return TaskScript(kind, name).run([f"--resume={folder}", *flags], stop)
    from asyncsgd.api import start
    from asyncsgd.run.again import run_of_folder
    from asyncsgd.run.of_train import Given

    ended = start(run_of_folder(folder, Given(task, cache=given.cache_dir), longer), folder, resume=True)
    if ended.status != DONE:
        print(f"{ended.status}: {ended.summary.get('message')}", file=sys.stderr)
    return {DONE: 0, INTERRUPTED: 130}.get(ended.status, 1)
