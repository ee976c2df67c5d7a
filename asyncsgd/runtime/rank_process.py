"""A rank of a run whose ranks step by themselves: what it is told, how it is put together, and its process."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from asyncsgd.checkpoints import load_state
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.runtime.all_ranks import AllRanks
from asyncsgd.runtime.collective import InStep, Rounds
from asyncsgd.runtime.data_parallel import DataParallel
from asyncsgd.runtime.launch import World
from asyncsgd.runtime.worker_process import Assignment, Straggling, fail, set_up_process
from asyncsgd.schedules import Schedule

LOST_CONTACT = 3
"""Exit code of a rank that failed because another one is gone."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """How a model is cut, and in which order its stages compute; can be pickled."""

    number: int
    schedule: str
    """``2bw``, ``deepspeed``, or of `asyncsgd.runtime.pipeline_engine.SCHEDULES`."""
    config: Path | None = None
    """Of DeepSpeed."""

    def in_step(
        self, assignment: Assignment, model: FlatModel, ranks: AllRanks, recipe: OptimizerRecipe, schedule: Schedule
    ) -> InStep:
        """This rank's part of a pipeline, on the initialised process group; called by all ranks."""
        # The rest of torch.distributed.pipelining is slow to import, and most runs have no pipeline.
        from asyncsgd.runtime.pipeline import HeldStage, Pipeline
        from asyncsgd.runtime.pipeline_engine import Grid, TorchEngine
        from asyncsgd.runtime.two_buffered import TwoVersions

        device, grid = torch.device(assignment.device), Grid(ranks, self.number)
        data = assignment.task.data(assignment.seed)
        first = HeldStage(assignment, grid, data, model)
        if self.schedule == "2bw":
            second = HeldStage(assignment, grid, data, model)
            row = TwoVersions((first, second), grid, assignment, data, recipe, ranks, schedule)
            return InStep(row, ranks, row.update)
        if self.schedule == "deepspeed":
            from asyncsgd.runtime.deepspeed_engine import DeepSpeedEngine

            engine: TorchEngine | DeepSpeedEngine = DeepSpeedEngine(first.module, device, self.config)
        else:
            engine = TorchEngine(grid, device, self.schedule)
        replica = Pipeline(first, grid, engine, assignment, data, recipe, ranks)
        return InStep(replica, ranks, Rounds(replica, ranks, schedule, Straggling(None, 0)).update)


@dataclasses.dataclass(frozen=True)
class Training:
    """What a rank needs beside an `Assignment`; can be pickled."""

    recipe: OptimizerRecipe
    schedule: Schedule
    find_unused: bool = False
    """Whether some parameters have no gradient; what rank 0 has here holds for all ranks."""
    resume: tuple[Path, str] | None = None
    """The run folder and the name of the checkpoint that the run goes on from. Every rank reads it."""
    stages: Stages | None = None
    """How the model is cut; None: every rank has all of it."""

    def in_step(self, assignment: Assignment, flat: FlatModel) -> InStep:
        """This rank's part of the run, on the initialised process group; called by all ranks together.

        Args:
            flat: the whole model at the parameters to begin with. Where it is cut, this rank only reads it.
        """
        ranks = AllRanks()
        if self.stages is None:
            optimizer = self.recipe.on(flat.parameters, flat.layout)
            replica = DataParallel(assignment.worker(flat), optimizer, ranks, find_unused=self.find_unused)
            straggling = Straggling.of(assignment, replica.number)
            in_step = InStep(replica, ranks, Rounds(replica, ranks, self.schedule, straggling).update)
        else:
            in_step = self.stages.in_step(assignment, flat, ranks, self.recipe, self.schedule)
        if self.resume is not None:
            in_step.replica.load_state_dict(load_state(*self.resume, torch.device(assignment.device)))
        return in_step

    def model(self, assignment: Assignment) -> FlatModel:
        """The whole model, on the rank's device unless it is to be cut."""
        device = assignment.device if self.stages is None else "cpu"
        return FlatModel(assignment.task.model(assignment.seed).to(device))


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("gloo", "nccl", "connection", "socket"))


def serve_rank(assignment: Assignment, training: Training, world: World) -> NoReturn:
    """Entry point of a rank other than 0; blocks, and ends the process."""
    try:
        set_up_process(assignment.threads)
        flat = training.model(assignment)
        world.arrive()
        with world.group(assignment.device):
            training.in_step(assignment, flat).follow()
            sys.stdout.flush()
            os._exit(0)  # skips the teardown of a group whose other members may be gone
    except Exception as error:
        if is_lost_contact(error):
            os._exit(LOST_CONTACT)  # rank 0 names the rank that is gone
        fail(f"rank {world.rank}", error)
