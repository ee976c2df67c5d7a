"""A rank of a run whose ranks step by themselves: what it is told, how it is put together, and its process."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from asyncsgd.checkpoints import load_state
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.runtime.all_ranks import TIMEOUT, AllRanks
from asyncsgd.runtime.collective import InStep, Rounds
from asyncsgd.runtime.data_parallel import DataParallel
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


def backend_of(device: str, num_workers: int) -> str:
    """NCCL where every rank has a GPU of its own (it refuses two on one), gloo elsewhere."""
    return "nccl" if device.startswith("cuda") and torch.cuda.device_count() >= num_workers else "gloo"


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("gloo", "nccl", "connection", "socket"))


@dataclasses.dataclass(frozen=True)
class RankMeeting:
    """Where the ranks of one host meet; can be pickled."""

    folder: Path
    """Private to the user."""
    number: int
    """Of ranks."""

    def join(self, rank: int) -> None:
        """Say that a rank is ready to enter the group."""
        (self.folder / str(rank)).touch()

    def complete(self, seconds: float) -> bool:
        """Wait so long at most for all ranks from 1 on; whether they are ready."""
        until = time.monotonic() + seconds
        while not all((self.folder / str(rank)).exists() for rank in range(1, self.number)):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    @contextmanager
    def group(self, rank: int, device: str) -> Iterator[None]:
        """Within it, this process is a rank of the process group."""
        before = os.environ.get("GLOO_SOCKET_IFNAME")
        if sys.platform == "linux":
            # Gloo would resolve the host's name, which may have no address, and an interface that the user has named
            # is for hosts.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            store = dist.FileStore(str(self.folder / "store"), self.number)
            store.set_timeout(datetime.timedelta(minutes=5))
            kind = backend_of(device, self.number)
            dist.init_process_group(kind, store=store, rank=rank, world_size=self.number, timeout=TIMEOUT)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
            if before is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = before


def serve_rank(assignment: Assignment, training: Training, meeting: RankMeeting, rank: int) -> None:
    """Entry point of a rank other than 0 that rank 0 has started; blocks."""
    try:
        set_up_process(assignment.threads)
        flat = training.model(assignment)
        meeting.join(rank)
        with meeting.group(rank, assignment.device):
            training.in_step(assignment, flat).follow()
            os._exit(0)  # skips the teardown of a group whose other members may be gone
    except Exception as error:
        if is_lost_contact(error):
            os._exit(LOST_CONTACT)  # rank 0 names the rank that is gone
        fail(f"rank {rank}", error)
