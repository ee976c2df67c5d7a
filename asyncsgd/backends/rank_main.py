"""How a rank begins: its part of a run, and what the process of a rank other than 0 does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from asyncsgd.backends.launch import World
from asyncsgd.backends.mirror import Keeper
from asyncsgd.backends.process_setup import fail, set_up_process
from asyncsgd.backends.ranks import LOST_CONTACT, DataParallel, InStep, Replica, is_lost_contact
from asyncsgd.core.checkpoints import load_state
from asyncsgd.run.run import Run
from asyncsgd.worker.worker import Worker


def make_rank(run: Run, worker: Worker | None, resume: tuple[Path, str] | None) -> InStep:
    """This rank's part of a run, on the initialised process group. All ranks call this function together.

    Args:
        run: the run as `Run.as_sent_to` gives it to this rank.
        worker: has the whole model at the initial parameters. Pipelines, which cut the model, do not use it.
        resume: the run folder and the name of the checkpoint that it goes on from. Every rank reads it.
    """
    if run.runtime.cuts_model:
        # torch.distributed.pipelining is slow to import, and most runs have no pipeline.
        from asyncsgd.pipeline.replica import Pipeline, TwoVersions

        replica: Replica = TwoVersions(run) if run.runtime.has_two_versions else Pipeline(run)
    else:
        assert worker is not None
        replica = DataParallel(run, worker)
    if resume is not None:
        replica.resume_from(load_state(*resume, replica.device))
    return InStep(replica)


def run_rank(
    run: Run,
    resume: tuple[Path, str] | None,
    world: World,
    *,
    keeper: Keeper | None = None,
    left: Callable[[], str] | None = None,
) -> NoReturn:
    """Entry point of a rank other than 0. It blocks until the run ends, and ends the process.

    Args:
        resume: see `make_rank`.
        keeper: keeps copies of checkpoints in this process; None: this host is no mirror.
        left: says what is left of the run if contact is lost; None: others say so.
    """
    try:
        set_up_process(run.runtime.threads)
        worker = None if run.runtime.cuts_model else run.worker(run.flat(device=run.device))
        world.arrive()
        with world.group(run.device, run.output.interface):
            make_rank(run, worker, resume).follow()
            if keeper is not None:
                keeper.wait()
            sys.stdout.flush()
            os._exit(0)  # skips the teardown of a group whose other members may be gone
    except Exception as error:
        if is_lost_contact(error):
            if left is not None:
                print(left(), file=sys.stderr, flush=True)
            os._exit(LOST_CONTACT)  # rank 0 names the rank that is gone
        fail(f"rank {world.rank}", error)
