"""The process of one rank of a synchronous run, when this library starts the ranks itself."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.checkpoints import Policy, StateWriter, load_state
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import OptimizerRecipe
from asyncsgd.packing import Plain
from asyncsgd.runtime.all_ranks import TIMEOUT, AllRanks
from asyncsgd.runtime.all_reduce import AllReduce
from asyncsgd.runtime.base import Budget, NeverSaves, Report, Result, Saver
from asyncsgd.runtime.data_parallel import DataParallel
from asyncsgd.runtime.lockstep import Conditions, Lockstep
from asyncsgd.runtime.transport.shared_memory import Segment
from asyncsgd.runtime.worker_process import Assignment, Straggling, fail, set_up_process
from asyncsgd.schedules import Schedule

LOST_CONTACT = 3
"""Exit code of a rank that failed because another one is gone."""

STOP_REQUESTED = 3
"""The control word by which the parent asks rank 0 to stop."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """How a model is cut, and in which order its stages compute; can be pickled."""

    number: int
    schedule: str
    """``2bw``, ``deepspeed``, or of `asyncsgd.runtime.pipeline_engine.SCHEDULES`."""
    extensions: Path
    """Where DeepSpeed's helper is compiled."""
    config: Path | None = None
    """Of DeepSpeed."""

    def runtime(
        self,
        assignment: Assignment,
        whole: Callable[[], FlatModel],
        ranks: AllRanks,
        recipe: OptimizerRecipe,
        schedule: Schedule,
        conditions: Conditions,
    ) -> Lockstep:
        """This rank's part of a pipeline, on the initialised process group; called by all ranks."""
        # The rest of torch.distributed.pipelining is slow to import, and most runs have no pipeline.
        from asyncsgd.runtime.pipeline import HeldStage, Pipeline
        from asyncsgd.runtime.pipeline_engine import Engine, Grid, TorchEngine
        from asyncsgd.runtime.two_buffered import TwoBuffered, TwoVersions

        device, grid = torch.device(assignment.device), Grid(ranks, self.number)
        data, model = assignment.task.data(assignment.seed), whole()
        first = HeldStage(assignment, grid, data, model)
        if self.schedule == "2bw":
            second = HeldStage(assignment, grid, data, model)
            row = TwoVersions((first, second), grid, assignment, data, recipe, ranks)
            return TwoBuffered(row, ranks, schedule, conditions)
        engine: Engine
        if self.schedule == "deepspeed":
            from asyncsgd.runtime.deepspeed_engine import FIXED, DeepSpeedEngine, read_config

            config = FIXED if self.config is None else read_config(self.config)
            engine = DeepSpeedEngine(first.module, device=device, config=config, extensions=self.extensions)
        else:
            engine = TorchEngine(grid, device, self.schedule)
        replica = Pipeline(first, grid, engine, assignment, data, recipe, ranks)
        return AllReduce(replica, ranks, schedule, conditions, Straggling(None, 0))


@dataclasses.dataclass(frozen=True)
class Training:
    """What a synchronous run needs beside an `Assignment`; can be pickled."""

    recipe: OptimizerRecipe
    schedule: Schedule
    budget: Budget
    evaluations: int
    find_unused: bool = False
    """Whether some parameters have no gradient; what rank 0 has here holds for all ranks."""
    resume: tuple[Path, str] | None = None
    """The run folder and the name of the checkpoint that the run goes on from. Every rank reads it."""
    stages: Stages | None = None
    """How the model is cut; None: every rank has all of it."""

    def run(
        self,
        assignment: Assignment,
        whole: Callable[[], FlatModel],
        report: Report,
        stop_requested: Callable[[], bool] = lambda: False,
        saver: Saver | None = None,
    ) -> tuple[Result, Lockstep]:
        """Train this rank's replica on the initialised process group; blocks, called by all ranks.

        Args:
            whole: gives the whole model at the parameters to begin with. Where it is cut, this rank only reads it.
        """
        conditions = Conditions(
            assignment.task.batch_size, self.budget, self.evaluations, report, saver or NeverSaves(), stop_requested
        )
        ranks = AllRanks()
        if self.stages is None:
            flat = whole()
            optimizer = self.recipe.on(flat.parameters, flat.layout)
            replica = DataParallel(assignment.worker(flat), optimizer, ranks, find_unused=self.find_unused)
            straggling = Straggling.of(assignment, replica.number)
            runtime: Lockstep = AllReduce(replica, ranks, self.schedule, conditions, straggling)
        else:
            runtime = self.stages.runtime(assignment, whole, ranks, self.recipe, self.schedule, conditions)
        if self.resume is not None:
            folder, name = self.resume
            runtime.load_state_dict(load_state(folder, name, torch.device(assignment.device)))
        return runtime.run(), runtime


class SaverOfRank:
    """Writes the states of rank 0 to the run folder and tells the parent, which owns it.

    Args:
        records: the pipe to the parent.
        folder: of the run.
        resume: the name of the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(self, records: Connection, folder: Path, policy: Policy, resume: str | None) -> None:
        self._records, self._lock = records, threading.Lock()
        self._writer = StateWriter(folder, policy, self.send, None if resume is None else int(resume))
        self.due = self._writer.due
        self.finish = self._writer.finish

    def send(self, message: object) -> None:
        """Send the parent a message; the thread that writes a state does so too."""
        with self._lock:
            self._records.send(message)

    def save(
        self, state: Plain, *, version: int, num_samples: int, train_seconds: float, cut_short: str | None = None
    ) -> None:
        """See `Saver`."""
        if num_samples == self._writer.resumes_at:
            return
        self.send(self._writer.take(state, version, num_samples, train_seconds, cut_short))
        self._writer.start()


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where self-started ranks meet; can be pickled."""

    store: Path
    """A file in a private folder."""
    num_workers: int
    segment: Path
    """Shared: the initial parameters at first, rank 0's final ones at last, and behind them the best ones."""
    size: int
    """Of one vector."""
    folder: Path | None
    """Of the run; None: nothing is written."""
    policy: Policy
    """Of its checkpoints."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """Rank 0's last message to its parent."""

    result: Result
    version: int
    num_samples: int
    train_seconds: float


def vectors_of(budget: Budget) -> int:
    """How many vectors of parameters the ranks hand to their parent: the last ones, and the best ones if kept."""
    return 1 + budget.keep_best


def whole_model(assignment: Assignment, stages: Stages | None, parameters: Tensor | None = None) -> FlatModel:
    """The whole model, on the rank's device unless it is to be cut.

    Args:
        parameters: to begin with, `(P,)`; None: the model's own.
    """
    flat = FlatModel(assignment.task.model(assignment.seed).to(assignment.device if stages is None else "cpu"))
    if parameters is not None:
        with torch.no_grad():
            flat.parameters.copy_(parameters)
    return flat


def backend_of(device: str, num_workers: int) -> str:
    """NCCL where every rank has a GPU of its own (it refuses two on one), gloo elsewhere."""
    return "nccl" if device.startswith("cuda") and torch.cuda.device_count() >= num_workers else "gloo"


def is_lost_contact(error: Exception) -> bool:
    """Whether a collective failed because its peers did, as far as gloo and NCCL let one tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("gloo", "nccl", "connection", "socket"))


def serve_rank(
    assignment: Assignment, training: Training, meeting: Meeting, rank: int, records: Connection | None
) -> None:
    """Entry point of a rank; blocks. `records` is rank 0's pipe to the parent, which owns the run folder."""
    try:
        set_up_process(assignment.threads)
        if sys.platform == "linux":
            # All ranks are on this host. Gloo would resolve the host's name, which may have no address, and an
            # interface that the user has named is for hosts.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        segment = Segment(meeting.segment, vectors_of(training.budget) * meeting.size)
        store = dist.FileStore(str(meeting.store), meeting.num_workers)
        store.set_timeout(datetime.timedelta(minutes=5))
        dist.init_process_group(
            backend_of(assignment.device, meeting.num_workers),
            store=store,
            rank=rank,
            world_size=meeting.num_workers,
            timeout=TIMEOUT,
        )
        segment.unlink()  # the group exists, so every rank has the segment open, and nothing can leave its name behind

        def whole() -> FlatModel:
            return whole_model(assignment, training.stages, segment.floats[: meeting.size])

        saver = None
        report: Report = (lambda record: None) if records is None else records.send
        if records is not None and meeting.folder is not None:
            resume = None if training.resume is None else training.resume[1]
            saver = SaverOfRank(records, meeting.folder, meeting.policy, resume)
            report = saver.send
        result, runtime = training.run(assignment, whole, report, lambda: bool(segment.control[STOP_REQUESTED]), saver)
        if saver is not None:
            saver.finish()
        parameters = runtime.parameters()
        if records is not None:
            segment.floats[: meeting.size].copy_(parameters)
            if result.best_parameters is not None:
                segment.floats[meeting.size :].copy_(result.best_parameters)
                result = dataclasses.replace(result, best_parameters=None)
            records.send(Finished(result, runtime.version, runtime.num_samples, runtime.train_seconds))
            records.recv()  # the parent has read everything
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the parent is gone
    except Exception as error:
        if is_lost_contact(error):
            os._exit(LOST_CONTACT)  # the parent names the rank that is gone
        fail(f"rank {rank}", error)
    os._exit(0)  # skips the teardown of a group whose other members may be gone
