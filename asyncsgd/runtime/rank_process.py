"""A rank of a run whose ranks step by themselves: what it is told, how it is put together, and its process."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from asyncsgd import runtimes
from asyncsgd.checkpoints import load_state
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.runtime.collective import AllRanks, InStep, Replica
from asyncsgd.runtime.data_parallel import DataParallel
from asyncsgd.runtime.launch import World
from asyncsgd.runtime.worker_process import Assignment, Straggling, fail, set_up_process
from asyncsgd.schedules import Schedule

LOST_CONTACT = 3
"""Exit code of a rank that failed because another one is gone."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What a rank needs beside an `Assignment`; can be pickled."""

    recipe: OptimizerRecipe
    schedule: Schedule
    find_unused: bool = False
    """Whether some parameters have no gradient; what rank 0 has here holds for all ranks."""
    resume: tuple[Path, str] | None = None
    """The run folder and the name of the checkpoint that the run goes on from. Every rank reads it."""
    pipeline: runtimes.Pipeline | None = None
    """How the model is cut; None: every rank has all of it."""

    def in_step(self, assignment: Assignment, flat: FlatModel | None) -> InStep:
        """This rank's part of the run, on the initialised process group; called by all ranks together.

        Args:
            flat: the whole model at the parameters to begin with. Not used where it is cut.
        """
        ranks = AllRanks()
        if self.pipeline is not None:
            # torch.distributed.pipelining is slow to import, and most runs have no pipeline.
            from asyncsgd.runtime.pipeline import Pipeline, TwoVersions

            kind = TwoVersions if self.pipeline.schedule == "2bw" else Pipeline
            replica: Replica = kind(assignment, ranks, self.recipe, self.schedule, self.pipeline)
        else:
            assert flat is not None
            worker, straggling = assignment.worker(flat), Straggling.of(assignment, ranks.rank)
            optimizer = self.recipe.on(flat.parameters, flat.layout)
            replica = DataParallel(worker, optimizer, ranks, self.schedule, straggling, find_unused=self.find_unused)
        if self.resume is not None:
            replica.load_state_dict(load_state(*self.resume, torch.device(assignment.device)))
        return InStep(replica)


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("gloo", "nccl", "connection", "socket"))


def serve_rank(assignment: Assignment, training: Training, world: World) -> NoReturn:
    """Entry point of a rank other than 0; blocks, and ends the process."""
    try:
        set_up_process(assignment.threads)
        flat = None
        if training.pipeline is None:
            flat = FlatModel(assignment.task.model(assignment.seed).to(assignment.device))
        world.arrive()
        with world.group(assignment.device):
            training.in_step(assignment, flat).follow()
            sys.stdout.flush()
            os._exit(0)  # skips the teardown of a group whose other members may be gone
    except Exception as error:
        if is_lost_contact(error):
            os._exit(LOST_CONTACT)  # rank 0 names the rank that is gone
        fail(f"rank {world.rank}", error)
