"""Go on with a run that was stopped, from its last checkpoint; its folder says what it is.

    python -m asyncsgd resume runs/stilt_mlm-async-w4-s0-3f9a1c
    python -m asyncsgd resume runs/stilt_mlm-async-w4-s0-3f9a1c --samples 20000

A run that is DONE goes on to more samples or epochs. Under torchrun, type what began the run, with ``--resume RUN``."""

from __future__ import annotations

import argparse
import sys

from asyncsgd.records.events import DONE, INTERRUPTED
from asyncsgd.records.run_folder import find_run
from asyncsgd.scripts.base import add_task_flag
from asyncsgd.settings.groups import Budget, Machine
from asyncsgd.settings.specs import specs_of


def run(argv: list[str], prog: str) -> int:
    parser = argparse.ArgumentParser(prog=prog, description="Go on with a run that was stopped.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run folder with a checkpoint, how its name begins, or last")
    parser.add_argument("--samples", metavar="N", help="go on to so many samples in all")
    parser.add_argument("--epochs", metavar="N", help="go on to so many passes in all")
    parser.add_argument("--micro-batches", metavar="N", help="compute a batch in so many parts, where memory ran out")
    add_task_flag(parser)
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    folder = find_run(given.run)
    specs = {**specs_of(Budget), **specs_of(Machine)}
    changes = {}
    for name in ("samples", "epochs", "micro_batches"):
        text = getattr(given, name)
        if text is not None:
            changes[name] = specs[name].checked(text)
    from asyncsgd.run.from_python import start
    from asyncsgd.run.written import Given, run_of_folder
    from asyncsgd.scripts.task import class_given

    run = run_of_folder(folder, Given(class_given(given.task), cache=given.cache_dir), changes)
    ended = start(run, folder, resume=True)
    if ended.status != DONE:
        print(f"{ended.status}: {ended.summary.get('message')}", file=sys.stderr)
    elif ended.summary.get("score_error") is not None:
        return 1
    return {DONE: 0, INTERRUPTED: 130}.get(ended.status, 1)
