"""How a training can run, what each way needs, and what it refuses.

An object of one of these classes says how; `asyncsgd.run.execute` does it. Their fields are settings of
`asyncsgd.settings.groups.Job`, as objects where those are text."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from asyncsgd.errors import UsageError
from asyncsgd.settings import groups
from asyncsgd.settings.specs import flag_of, specs_of
from asyncsgd.simulation.churn import Change, in_order, parse_churn
from asyncsgd.simulation.speeds import Constant, Infinite, Network, Speeds, parse_network, parse_speeds

_KEEP_ORDER_OF_STORES = ("x86_64", "AMD64", "i386", "i686")
"""Processors on which the sequence lock of shared memory is right; see `asyncsgd.backends.segment`."""
_AS_CONSTANT = Constant()
_OPTIMIZER = "torch._dynamo"
"""The module that torch imports at a process's first optimizer, which takes about a second."""
_CALLED: Mapping[str, str] = {
    "num_workers": "nproc",
    "via": "transport",
    "schedule": "pipeline_schedule",
    "all_gpus": "data_parallel",
    "share_state": "hogwild_state",
}
"""Fields that are called otherwise than their settings."""
_READ: Mapping[str, Callable[[str], Any]] = {
    "speeds": parse_speeds,
    "network": parse_network,
    "churn": parse_churn,
    "hogwild_state": "shared".__eq__,
}
_WRITTEN: Mapping[str, Callable[[Any], str | None]] = {
    "speeds": str,
    "network": str,
    "churn": lambda changes: ";".join(map(str, changes)) or None,
    "hogwild_state": lambda share: "shared" if share else "worker",
}
"""Setting -> the function that makes its text of the object in Python. `_READ` has those that read the text."""


def processes_on_this_host(number: int) -> int:
    """How many of a run's `number` processes are on this host: all, unless torchrun has started them on several."""
    if os.environ.get("WORLD_SIZE") != str(number):
        return number
    return int(os.environ.get("LOCAL_WORLD_SIZE", number))


class Runtime:
    """How a training runs. Subclasses are frozen dataclasses."""

    mode: ClassVar[str]
    """What the user types after ``--mode``."""
    clock: ClassVar[groups.Clock] = "measured"
    follows_rule: ClassVar[bool] = False
    """Whether the user may choose the rule; if not, the mode itself defines it."""
    in_one_process: ClassVar[bool] = False
    has_server: ClassVar[bool] = False
    """Whether one process more than the workers keeps the parameters."""
    steps_in_workers: ClassVar[bool] = False
    """Whether workers step the parameters themselves, in memory of one host, so that no step can be taken back."""
    cuts_model: ClassVar[bool] = False
    """Whether each process has a part of the model, and none has all of it."""
    keeps_statistics: ClassVar[bool] = True
    """Whether a model may have running statistics."""
    not_replayed: ClassVar[str] = ""
    """Why a run with this runtime cannot be replayed; empty where it can."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that its processes import, beside those that all do."""

    num_workers: int
    threads: int
    """The number of CPU threads of each worker."""
    speeds: Speeds | None
    """How long gradients are made to take, or take on the virtual clock. None: as long as the computation takes."""
    accumulate: int = 1
    """The number of batches of an update, which are computed one after the other."""
    all_gpus: bool = False
    """Whether one process computes a batch on all its GPUs."""
    share_state: bool = False
    """Whether all workers share one optimizer state, or have one each; only where they step themselves."""

    def __post_init__(self) -> None:
        """Refuse what no run can follow; flags and Python both come here."""
        specs = {**specs_of(groups.Job), **specs_of(groups.Machine)}
        for field, name in _settings_of(type(self)):
            if name not in _READ:
                object.__setattr__(self, field, specs[name].checked(getattr(self, field)))
        if not self.in_one_process:
            groups.check_processes(self.num_workers)

    def describe(self, micro_batches: int, num_gpus: int) -> str | None:
        """Say in half a line how gradients become steps; None: as the rule says."""
        return None

    @property
    def has_two_versions(self) -> bool:
        """Whether a gradient is computed while the step of the one before it is taken, so it is one update old."""
        return False

    @property
    def hogwild_state(self) -> str | None:
        """``shared`` or ``worker``: whose the optimizer state is; None where workers do not step."""
        return None

    def check(self, seed: int, device: str, machine: groups.Machine, clip_norm: float) -> None:
        """Refuse what does not go together with this runtime.

        Args:
            device: ``cpu`` or ``cuda``.
            clip_norm: the largest norm of a direction; 0: no clipping.

        Raises:
            UsageError: with what to type, e.g. for a straggler that is not there.
        """
        if self.speeds is None:
            return
        self.speeds.on(self.num_workers, seed)  # refuses
        if isinstance(self.speeds, Infinite) and self.clock != "virtual":
            raise UsageError(
                "--times infinite is for --clock virtual: a run whose real worker never answers would never end"
            )

    @classmethod
    def check_launch(cls, rank: int | None, several_hosts: bool) -> None:
        """Refuse ranks of torchrun for which this runtime has no use.

        Args:
            rank: the rank of this process; None: this process starts its workers.
            several_hosts: see `asyncsgd.backends.launch.Launch`.

        Raises:
            UsageError: with what to type.
        """
        typed = "--clock virtual" if cls.clock == "virtual" else f"--mode {cls.mode}"
        if cls.in_one_process and rank is not None:
            raise UsageError(
                f"{typed} is one process, and the launcher started several; type python, not torchrun, or leave "
                f"--nproc-per-node out"
            )
        if several_hosts and cls.steps_in_workers:
            raise UsageError(
                f"{typed} runs on one host, and torchrun started ranks on several; type --mode async or --mode sync"
            )

    @property
    def transport(self) -> str | None:
        """The name of what carries gradients to the server; None where there is no server."""
        return None

    @property
    def oversubscription(self) -> float | None:
        """The number of busy threads per core; None on the virtual clock."""
        from asyncsgd.records.machine import available_cores

        return self.num_workers * self.threads / available_cores() if self.clock == "measured" else None


@dataclasses.dataclass(frozen=True)
class InProcess(Runtime):
    """One worker in this process, the reference; `accumulate` batches make one update.

    Args:
        accumulate: batches of an update, computed one after the other.
        threads: CPU threads.
    """

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

    def describe(self, micro_batches: int, num_gpus: int) -> str:
        batches = "1 batch" if self.accumulate == 1 else f"{self.accumulate} batches"
        how = f"one process, {batches} per update"
        if not self.all_gpus:
            return how
        if num_gpus > 1:
            return f"{how}, a share of each on each of {num_gpus} GPUs"
        return f"{how}, the bare model, since there are no GPUs to share it"


@dataclasses.dataclass(frozen=True)
class AllReduce(Runtime):
    """Synchronous data parallelism with DistributedDataParallel on `num_workers` processes.

    All step along the mean of their gradients, weighted by loss terms.

    Args:
        num_workers: processes, one a worker; this one is worker 0.
        threads: CPU threads of each worker.
        speeds: how long gradients are made to take; None: as long as the computation takes.
    """

    mode: ClassVar[str] = "sync"
    preload = (_OPTIMIZER,)
    not_replayed: ClassVar[str] = (
        "its ranks exchanged gradients among themselves, in no recorded order; run its settings again"
    )

    num_workers: int
    threads: int = 1
    speeds: Speeds | None = None

    def describe(self, micro_batches: int, num_gpus: int) -> str:
        return "all ranks step along the weighted mean of their gradients (DistributedDataParallel)"


@dataclasses.dataclass(frozen=True)
class Pipeline(Runtime):
    """The model cut into `stages`, each on a process of its own; `num_workers` processes hold ``num_workers / stages``
    replicas of it, which exchange their gradients.

    A batch is cut into micro-batches (`micro_batches` of `asyncsgd.train`, at least as many as stages). ``1f1b`` and
    ``gpipe`` are synchronous; ``2bw`` never stops between updates, and each of its gradients is one update old; see
    `asyncsgd.pipeline.replica`.

    Args:
        num_workers: processes in all, a multiple of `stages`.
        stages: parts of the model.
        schedule: in which order a stage computes forward and backward passes of micro-batches.
        threads: CPU threads of each worker.
    """

    mode: ClassVar[str] = "pipeline"
    cuts_model: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = False
    speeds: ClassVar[Speeds | None] = None  # type: ignore[misc]
    preload = (_OPTIMIZER, "asyncsgd.pipeline.replica")
    not_replayed: ClassVar[str] = "its stages computed with each other's hidden states; run its settings again"

    num_workers: int
    stages: int
    schedule: groups.PipelineSchedule = "1f1b"
    threads: int = 1
    deepspeed_config: str | None = None
    """A file as ``asyncsgd/configs/ds_config.json``, for the schedule ``deepspeed``; None: what that one holds."""

    def __post_init__(self) -> None:
        if self.num_workers == 1:
            raise UsageError("--mode pipeline needs a process for each stage, got --nproc 1; type --nproc 2")
        super().__post_init__()

    def describe(self, micro_batches: int, num_gpus: int) -> str:
        replicas = self.num_workers // self.stages
        return f"{replicas} x {self.stages} stages, schedule {self.schedule}, {micro_batches} micro-batches"

    @property
    def has_two_versions(self) -> bool:
        return self.schedule == "2bw"

    def check(self, seed: int, device: str, machine: groups.Machine, clip_norm: float) -> None:
        import torch

        number = self.num_workers
        stages = self.stages
        schedule = self.schedule
        cuts = machine.micro_batches
        of_whole = ("gradient_checkpointing", "compile", "prefetch", "auto_batch")
        given = " and ".join(flag_of(name) for name in of_whole if getattr(machine, name))
        gpus = torch.cuda.device_count()
        here = processes_on_this_host(number)
        of_schedule = f"--pipeline-schedule {schedule}"
        for refused, why in (
            (given, f"{given} is for models that are not cut into stages; type --mode sync"),
            (number % stages, f"--nproc {number} must be a multiple of --stages {stages}"),
            (cuts < stages, f"--micro-batches {cuts} is fewer than the stages; type --micro-batches {4 * stages}"),
            (machine.precision == "fp16", "a pipeline has no loss scale for --precision fp16; type --precision bf16"),
            (device == "cuda" and gpus < here, f"{here} stages need a GPU each, got {gpus}; type --device cpu"),
            (
                schedule == "deepspeed" and importlib.util.find_spec("deepspeed") is None,
                f"{of_schedule} needs the package; type python -m pip install -c constraints.txt -e '.[deepspeed]', or "
                f"--pipeline-schedule 1f1b, which is the same order",
            ),
            (
                schedule == "deepspeed" and here < number,
                f"{of_schedule} runs on one host; type --pipeline-schedule 1f1b, which is the same order",
            ),
            (
                schedule in ("2bw", "deepspeed") and number != stages,
                f"{of_schedule} has one replica here; type --nproc {stages}, or --pipeline-schedule 1f1b",
            ),
            (
                self.has_two_versions and clip_norm > 0,
                f"{of_schedule} cannot clip, for the norm each stage would wait for all; type --clip-norm 0",
            ),
        ):
            if refused:
                raise UsageError(why)


@dataclasses.dataclass(frozen=True)
class Processes(Runtime):
    """A parameter server in this process and `num_workers` worker processes, under any rule, on this host or on
    several that torchrun has started ranks on.

    Args:
        num_workers: worker processes, beside the server.
        via: what carries the vectors; ``auto`` is shared memory where its lock is right, which is on x86 processors.
        threads: CPU threads of each worker.
        speeds: how long gradients are made to take; None: as long as the computation takes.
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
        if self.via == "shared_memory":
            _check_processor("--transport shared_memory", "--transport process_group")

    @property
    def transport(self) -> str:
        if self.via == "auto":
            return "shared_memory" if platform.machine() in _KEEP_ORDER_OF_STORES else "process_group"
        return self.via


@dataclasses.dataclass(frozen=True)
class Hogwild(Runtime):
    """`num_workers` processes that step one shared vector themselves, without locks, on this host.

    Args:
        num_workers: processes.
        threads: CPU threads of each worker.
        speeds: how long gradients are made to take; None: as long as the computation takes.
    """

    mode: ClassVar[str] = "hogwild"
    preload = (_OPTIMIZER,)
    has_server: ClassVar[bool] = True
    steps_in_workers: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = False
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
        _check_processor("--mode hogwild", "--mode async --transport process_group")

    def describe(self, micro_batches: int, num_gpus: int) -> str:
        states = "one optimizer state shared by all" if self.share_state else "an optimizer state each"
        return f"workers step the shared vector themselves, without locks, {states}"

    @property
    def hogwild_state(self) -> str:
        return "shared" if self.share_state else "worker"

    def check(self, seed: int, device: str, machine: groups.Machine, clip_norm: float) -> None:
        super().check(seed, device, machine, clip_norm)
        if device != "cpu":
            raise UsageError(
                "--mode hogwild needs --device cpu: updates of several processes to one GPU buffer have no defined "
                "order"
            )

    @property
    def transport(self) -> str:
        return "shared_memory"


@dataclasses.dataclass(frozen=True)
class Virtual(Runtime):
    """Any number of workers in this process, on a virtual clock: real gradients, drawn times.

    Args:
        num_workers: simulated workers.
        speeds: how long a gradient takes, in virtual seconds, such as `Slow` or `Exponential`.
        network: links on which parameters and gradients wait; None: they take no time.
        threads: CPU threads of this process.
    """

    mode: ClassVar[str] = "async"
    clock: ClassVar[groups.Clock] = "virtual"
    follows_rule: ClassVar[bool] = True
    in_one_process: ClassVar[bool] = True

    num_workers: int
    speeds: Speeds = _AS_CONSTANT
    network: Network | None = None
    churn: Sequence[Change] = ()
    """Workers that leave and join, `Leave` and `Join`, in any order."""
    threads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "churn", in_order(self.churn, self.num_workers))


def runtime_of(job: groups.Job, threads: int) -> Runtime:
    """The runtime that the settings ask for.

    Raises:
        UsageError: for a name or value in them that is wrong, or that the runtime cannot follow.
    """
    kind = kind_of(job.mode, job.clock)
    given = vars(job) | {"stages": job.stages or job.nproc, "threads": threads}
    return kind(
        **{
            field: _READ[name](given[name]) if name in _READ else given[name]
            for field, name in _settings_of(kind)
            if given[name] is not None
        }
    )


def job_of(runtime: Runtime) -> dict[str, Any]:
    """The settings that ask for a runtime, by name; the inverse of `runtime_of`, without threads.

    >>> job_of(Pipeline(4, 2))["stages"]
    2
    """
    job = vars(groups.Job()) | {"mode": runtime.mode, "clock": runtime.clock}
    del job["rule"], job["seed"]  # which are no part of a runtime
    for field, name in _settings_of(type(runtime)):
        value = getattr(runtime, field)
        if name != "threads":
            job[name] = _WRITTEN[name](value) if name in _WRITTEN and value is not None else value
    return job


def _settings_of(kind: type[Runtime]) -> list[tuple[str, str]]:
    """A runtime's fields, and what their settings are called."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # every subclass is a dataclass
    return [(field.name, _CALLED.get(field.name, field.name)) for field in fields]


def kind_of(mode: str, clock: str) -> type[Runtime]:
    """The class behind what the user typed.

    >>> kind_of("async", "virtual").__name__, kind_of("sync", "measured").__name__
    ('Virtual', 'AllReduce')
    """
    return next(kind for kind in KINDS if (kind.mode, kind.clock) == (mode, clock))


KINDS: tuple[type[Runtime], ...] = (InProcess, AllReduce, Pipeline, Processes, Hogwild, Virtual)


def _check_processor(asked: str, instead: str) -> None:
    """Refuse shared memory on processors where a reader could accept a vector that is only half written."""
    if (processor := platform.machine()) not in _KEEP_ORDER_OF_STORES:
        raise UsageError(
            f"{asked} needs an x86 processor, which keeps the order of stores; this one is {processor or 'unknown'}; "
            f"type {instead}"
        )
