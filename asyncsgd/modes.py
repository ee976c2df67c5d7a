"""The table of modes: how a training can run, what each way needs, and what the user types for it.

An object of one of these classes says how; `asyncsgd.execute` does it. Nothing below this table asks for a mode by its
name."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from asyncsgd.errors import UsageError
from asyncsgd.settings import training as settings
from asyncsgd.simulation.churn import Change, in_order, parse_churn
from asyncsgd.simulation.speeds import Constant, Infinite, Network, Speeds, parse_network, parse_speeds

_KEEP_ORDER_OF_STORES = ("x86_64", "AMD64", "i386", "i686")
"""Processors on which the sequence lock of shared memory is right; see `asyncsgd.runtime.segment`."""


_AS_CONSTANT = Constant()
_SETTINGS = {"num_workers": "nproc", "threads": "threads", "accumulate": "accumulate"}
"""Fields of runtimes that are settings, and what these are called."""


class Runtime:
    """How a training runs. Subclasses are frozen dataclasses."""

    mode: ClassVar[str]
    """What the user types after ``--mode``."""
    clock: ClassVar[settings.Clock] = "measured"
    follows_rule: ClassVar[bool] = False
    """Whether the user may choose the rule; if not, the mode itself defines it."""
    in_one_process: ClassVar[bool] = False
    has_server: ClassVar[bool] = False
    """Whether one process more than the workers keeps the parameters."""
    several_hosts: ClassVar[bool] = False
    not_replayed: ClassVar[str] = ""
    """Why a run of it cannot be replayed; empty where it can."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that its processes import, beside those that all do."""

    num_workers: int
    threads: int
    """CPU threads of each worker."""
    speeds: Speeds | None
    """How long gradients are made to take, or take on the virtual clock. None: as long as the computation takes."""

    def __post_init__(self) -> None:
        """Refuse what no run can follow; flags and Python both come here."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if (name := _SETTINGS.get(field.name)) is not None:
                value = settings.COMMON.argument(name, getattr(self, field.name), field.name)
                object.__setattr__(self, field.name, value)
        if not self.in_one_process:
            for problem in settings.contradictions_of_processes(self.num_workers):
                raise UsageError(problem)

    def check_speeds(self, seed: int) -> None:
        """Refuse speeds that the workers cannot have.

        Raises:
            UsageError: e.g. for a straggler that is not there.
        """
        if self.speeds is None:
            return
        self.speeds.on(self.num_workers, seed)  # refuses
        if isinstance(self.speeds, Infinite) and self.clock != "virtual":
            raise UsageError(
                "--speeds infinite is for --clock virtual: a run whose real worker never answers would never end"
            )

    @property
    def transport(self) -> str | None:
        """What carries gradients to the server; None where there is no server."""
        return None

    @property
    def oversubscription(self) -> float | None:
        """Busy threads per core; None on the virtual clock."""
        from asyncsgd.records.machine import available_cores

        return self.num_workers * self.threads / available_cores() if self.clock == "measured" else None


@dataclasses.dataclass(frozen=True)
class InProcess(Runtime):
    """One worker in this process, the reference; `accumulate` batches make one update."""

    mode: ClassVar[str] = "single"
    in_one_process: ClassVar[bool] = True
    speeds: ClassVar[Speeds | None] = None  # type: ignore[misc]
    num_workers: ClassVar[int] = 1  # type: ignore[misc]

    accumulate: int = 1
    threads: int = 1
    all_gpus: bool = False
    """Whether a batch is computed on all GPUs of this process, as `torch.nn.DataParallel` does; on a CPU it does
    nothing.
    """


@dataclasses.dataclass(frozen=True)
class AllReduce(Runtime):
    """Synchronous data parallelism with DistributedDataParallel on `num_workers` processes."""

    mode: ClassVar[str] = "sync"
    several_hosts: ClassVar[bool] = True
    not_replayed: ClassVar[str] = (
        "its ranks exchanged gradients among themselves, in no recorded order; run its settings again"
    )

    num_workers: int
    threads: int = 1
    speeds: Speeds | None = None


@dataclasses.dataclass(frozen=True)
class Pipeline(Runtime):
    """The model cut into `stages`, each on a process of its own; `num_workers` processes hold ``num_workers / stages``
    replicas of it, which exchange their gradients.

    A batch is cut into micro-batches (`micro_batches` of `asyncsgd.train`, at least as many as stages). ``1f1b`` and
    ``gpipe`` are synchronous; ``2bw`` never stops between updates, and each of its gradients is one update old; see
    `asyncsgd.runtime.pipeline`, `asyncsgd.runtime.two_buffered`.
    """

    mode: ClassVar[str] = "pipeline"
    speeds: ClassVar[Speeds | None] = None  # type: ignore[misc]
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.runtime.two_buffered",)
    not_replayed: ClassVar[str] = "its stages computed with each other's hidden states; run its settings again"

    num_workers: int
    stages: int
    schedule: settings.PipelineSchedule = "1f1b"
    threads: int = 1
    deepspeed_config: str | None = None
    """A file as ``experiments/configs/ds_config.json``, for the schedule ``deepspeed``; None: what that one holds."""

    def check(self, *, micro_batches: int, clip_norm: float, half_precision: bool, num_gpus: int | None) -> None:
        """Refuse what does not go together.

        Args:
            half_precision: whether the passes are in float16.
            num_gpus: None on the CPU.

        Raises:
            UsageError: with what to type.
        """
        if self.num_workers < 2:
            raise UsageError("--mode pipeline needs a process for each stage, got --nproc 1; type --nproc 2")
        if self.stages < 2 or self.num_workers % self.stages:
            raise UsageError(
                f"--nproc {self.num_workers} processes cannot hold --stages {self.stages} each of the same number of "
                f"replicas; type --stages 2 or more, and an --nproc that it divides"
            )
        if micro_batches < self.stages:
            raise UsageError(
                f"--micro-batches {micro_batches} is fewer than the {self.stages} stages, so some would never have "
                f"anything to compute; type --micro-batches {4 * self.stages}"
            )
        if half_precision:
            raise UsageError("a pipeline has no loss scale for --precision fp16; type --precision bf16, or --mode sync")
        if num_gpus is not None and num_gpus < self.num_workers:
            raise UsageError(
                f"every stage needs a GPU of its own: {self.num_workers} processes, {num_gpus} GPUs; type --nproc "
                f"{num_gpus}, or --device cpu"
            )
        if self.schedule == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            raise UsageError(
                "--pipeline-schedule deepspeed needs the package deepspeed; type python -m pip install -c "
                "constraints.txt -e '.[deepspeed]', or --pipeline-schedule 1f1b, which is the same order"
            )
        if self.schedule in ("2bw", "deepspeed") and self.num_workers != self.stages:
            raise UsageError(
                f"--pipeline-schedule {self.schedule} has one replica here; type --nproc {self.stages}, or "
                f"--pipeline-schedule 1f1b"
            )
        if self.schedule == "2bw" and clip_norm > 0:
            raise UsageError(
                "--pipeline-schedule 2bw cannot clip: the norm over all stages would make each wait for the others; "
                "type --clip-norm 0"
            )


@dataclasses.dataclass(frozen=True)
class Processes(Runtime):
    """A parameter server in this process and `num_workers` worker processes on this host, under any rule.

    `via` names what carries the vectors; ``auto`` is shared memory where its lock is right.
    """

    mode: ClassVar[str] = "async"
    follows_rule: ClassVar[bool] = True
    has_server: ClassVar[bool] = True

    num_workers: int
    via: Literal["auto", "shared_memory", "process_group"] = "auto"
    threads: int = 1
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_transport(self.mode, settings.COMMON.argument("transport", self.via, "via"), platform.machine())

    @property
    def transport(self) -> str:
        if self.via == "auto":
            return "shared_memory" if platform.machine() in _KEEP_ORDER_OF_STORES else "process_group"
        return self.via


@dataclasses.dataclass(frozen=True)
class Hogwild(Runtime):
    """`num_workers` processes that step one shared vector themselves, without locks, on this host."""

    mode: ClassVar[str] = "hogwild"
    has_server: ClassVar[bool] = True
    not_replayed: ClassVar[str] = (
        "its workers read and wrote one vector without locks, and no record says what they read"
    )

    num_workers: int
    share_state: bool = False
    """Whether all workers share one optimizer state, or have one each."""
    threads: int = 1
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_transport(self.mode, "auto", platform.machine())

    @property
    def transport(self) -> str:
        return "shared_memory"


@dataclasses.dataclass(frozen=True)
class Virtual(Runtime):
    """Any number of workers in this process, on a virtual clock: real gradients, drawn times."""

    mode: ClassVar[str] = "async"
    clock: ClassVar[settings.Clock] = "virtual"
    follows_rule: ClassVar[bool] = True
    in_one_process: ClassVar[bool] = True

    num_workers: int
    speeds: Speeds = _AS_CONSTANT
    network: Network | None = None
    churn: Sequence[Change] = ()
    """In any order."""
    threads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "churn", in_order(self.churn, self.num_workers))


def runtime_of(job: settings.Job, threads: int) -> Runtime:
    """The runtime that the settings ask for.

    Raises:
        UsageError: for a name or value in them that is wrong, or that the runtime cannot follow.
    """
    speeds = _speeds_of(job)
    if job.clock == "virtual":
        assert speeds is not None
        network = None if job.network is None else parse_network(job.network)
        churn = () if job.churn is None else parse_churn(job.churn)
        return Virtual(job.nproc, speeds, network, churn, threads)
    if job.mode == "single":
        return InProcess(job.accumulate, threads, job.data_parallel)
    if job.mode == "sync":
        return AllReduce(job.nproc, threads, speeds)
    if job.mode == "pipeline":
        stages = job.stages or job.nproc
        return Pipeline(job.nproc, stages, job.pipeline_schedule, threads, job.deepspeed_config)
    if job.mode == "hogwild":
        return Hogwild(job.nproc, job.hogwild_state == "shared", threads, speeds)
    return Processes(job.nproc, job.transport, threads, speeds)


def job_of(runtime: Runtime) -> dict[str, Any]:
    """The settings that ask for a runtime, by name; the inverse of `runtime_of`, without threads.

    >>> job_of(Pipeline(4, 2))["stages"]
    2
    """
    job = dataclasses.asdict(settings.Job())
    del job["rule"], job["seed"]  # which are no part of a runtime
    job |= {"mode": runtime.mode, "clock": runtime.clock, "nproc": runtime.num_workers}
    job["speeds"] = None if runtime.speeds is None else str(runtime.speeds)
    if isinstance(runtime, InProcess):
        job |= {"accumulate": runtime.accumulate, "data_parallel": runtime.all_gpus}
    elif isinstance(runtime, Pipeline):
        job |= {"stages": runtime.stages, "pipeline_schedule": runtime.schedule}
        job["deepspeed_config"] = runtime.deepspeed_config
    elif isinstance(runtime, Processes):
        job["transport"] = runtime.via
    elif isinstance(runtime, Hogwild):
        job["hogwild_state"] = "shared" if runtime.share_state else "worker"
    elif isinstance(runtime, Virtual):
        job["network"] = None if runtime.network is None else str(runtime.network)
        job["churn"] = ";".join(map(str, runtime.churn)) or None
    return job


def kind_of(mode: str, clock: str) -> type[Runtime]:
    """The class behind what the user typed.

    >>> kind_of("async", "virtual").__name__, kind_of("sync", "measured").__name__
    ('Virtual', 'AllReduce')
    """
    return next(kind for kind in KINDS if (kind.mode, kind.clock) == (mode, clock))


KINDS: tuple[type[Runtime], ...] = (InProcess, AllReduce, Pipeline, Processes, Hogwild, Virtual)


def _speeds_of(job: settings.Job) -> Speeds | None:
    if job.speeds is None:
        return Constant() if job.clock == "virtual" else None
    return parse_speeds(job.speeds)


def check_transport(mode: str, transport: str, processor: str) -> None:
    """Refuse shared memory on processors where a reader could accept a vector that is only half written.

    Args:
        processor: as `platform.machine` names it.

    Raises:
        UsageError: on processors that may reorder stores.
    """
    if processor in _KEEP_ORDER_OF_STORES or (mode != "hogwild" and transport != "shared_memory"):
        return
    asked, instead = "--transport shared_memory", "--transport process_group"
    if mode == "hogwild":
        asked, instead = "--mode hogwild", "--mode async --transport process_group"
    raise UsageError(
        f"{asked} needs an x86 processor, which keeps the order of stores; this one is {processor or 'unknown'}; "
        f"type {instead}"
    )
