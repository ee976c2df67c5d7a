"""What every training script does: flags, launcher, first lines, fork server, run folder, training.

Nothing heavy is imported before the flags are understood and the fork server imports side by side with this process."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from asyncsgd import __version__
from asyncsgd.errors import UsageError
from asyncsgd.records.console import say
from asyncsgd.records.environment import available_cores
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.trackers import names_in
from asyncsgd.records.trackers.tracking import Tracking
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.run_folder import open_folder
from asyncsgd.settings.flags import Flags, Parsed
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.training import Job, Output
from asyncsgd.signals import StopRequest

if TYPE_CHECKING:
    from asyncsgd.experiment import Experiment
    from asyncsgd.tasks.base import Task


class Trains(Protocol):
    """Settings of a training."""

    @property
    def job(self) -> Job: ...

    @property
    def machine(self) -> Any: ...

    @property
    def output(self) -> Output: ...


S = TypeVar("S", bound=Trains)


@dataclasses.dataclass(frozen=True)
class TaskScript(Generic[S]):
    """A script that trains a task."""

    name: str
    """Its file, without .py."""
    flags: Flags[S]
    description: str
    examples: str
    experiment: Callable[[S], Experiment]
    """Makes the experiment; raises UsageError for what can be seen to be wrong before there is a run."""
    folder: Callable[[S, str], RunFolder]
    """Opens the run's folder, given the command."""
    model: Callable[[S], str | None] = lambda settings: None
    """The transformers model whose code workers need."""
    modules: tuple[str, ...] = ()
    """What else they need; see `Task.preload`."""
    before: Callable[[S], None] = lambda settings: None
    """Called before anything heavy is imported."""

    def run(self, argv: list[str], stop: StopRequest) -> int:
        """Do what the command line says; return the exit code."""
        if told_names(argv):
            return 0
        prog = f"{self.name}.py"
        parsed = self.flags.parse(argv, prog=prog, description=self.description, examples=self.examples)
        settings, launch = adapt(parsed, self.flags)
        if not launch.leads:
            return follow_leader(lambda: self.experiment(settings))
        announce(settings)
        # Its imports and ours go on side by side.
        context = start_fork_server(settings, launch, self.model(settings), self.modules)
        self.before(settings)
        experiment = self.experiment(settings)
        stop.check()
        if settings.output.find_batch_size:
            return told_batch_size(experiment, context or fork_server(self.model(settings), *self.modules))
        from asyncsgd.training import lead

        folder = self.folder(settings, f"python experiments/{prog} " + " ".join(argv))
        print(f"run    {folder.path}", flush=True)
        tracking = Tracking(names_in(settings.output.track), folder.path)
        exit_code = lead(experiment, launch, folder, context, stop, tracking)
        say(f"next   python -m analysis.compare {shlex.quote(str(folder.path.parent))}")
        return exit_code


def told_names(argv: list[str]) -> bool:
    """Print what ``--rule help`` or ``--speeds help`` asks for, if either is there."""
    if "help" in _values_of(argv, "--speeds"):
        from asyncsgd.simulation.speeds import describe_speeds

        print(describe_speeds())
        return True
    if "help" in _values_of(argv, "--rule"):
        from asyncsgd.rules import describe_rules

        print(describe_rules())
        return True
    return False


def adapt(parsed: Parsed[S], flags: Flags[S]) -> tuple[S, Launch]:
    """The settings with the launcher's number of workers in them, which may decide the mode.

    Raises:
        UsageError: if the launcher started what the mode has no use for.
    """
    from asyncsgd.modes import InProcess, Virtual, kind_of

    settings = parsed.settings
    launch = Launch.read(os.environ, settings.job.nproc, nproc_given="nproc" in parsed.given)
    mode: Any = settings.job.mode if "mode" in parsed.given else None  # None: it is decided anew
    job = dataclasses.replace(settings.job, nproc=launch.num_workers, mode=mode)
    if job.mode != settings.job.mode:
        flags.validate(dataclasses.replace(settings, job=job))  # type: ignore[type-var]
    settings = dataclasses.replace(settings, job=job)  # type: ignore[type-var]
    kind = kind_of(settings.job.mode, settings.job.clock)
    if kind is InProcess and launch.num_workers > 1:
        raise UsageError(
            f"--mode single is one process, and the launcher started {launch.num_workers}; type python, not torchrun"
        )
    if kind is Virtual and launch.rank is not None:
        raise UsageError(
            "--clock virtual is one process, and the launcher started several; type python, or torchrun without "
            "--nproc-per-node, and --nproc for the number of virtual workers"
        )
    if settings.output.find_batch_size and launch.rank is not None:
        raise UsageError("--find-batch-size starts the processes that it needs; type python, not torchrun")
    if launch.several_hosts and not kind.several_hosts:
        raise UsageError(
            f"--mode {settings.job.mode} runs on one host, and torchrun started ranks on several; type --mode sync"
        )
    return settings, launch


def follow_leader(experiment: Callable[[], Experiment]) -> int:
    """Do the part of a rank of torchrun's other than 0; return the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 hears it and stops the others in good order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    from asyncsgd.training import follow

    return follow(experiment())


def announce(settings: Trains, what: str = "", num_runs: int = 1) -> None:
    """The first line, before anything heavy is imported: perhaps `what` is trained, and in how many runs."""
    from asyncsgd.modes import Virtual, kind_of

    kind = kind_of(settings.job.mode, settings.job.clock)
    runs = f"{num_runs} runs, one after another" if num_runs > 1 else ""
    first = "".join(f"{part}  " for part in (what, runs) if part)
    if kind is Virtual:
        print(
            f"asyncsgd {__version__}  {first}{settings.job.nproc} virtual workers in one process; seconds are drawn "
            f"from {settings.job.speeds or 'constant:1'}, not measured",
            flush=True,
        )
        return
    workers, threads, cores = settings.job.nproc, settings.machine.threads, available_cores()
    load = f"{cores} core{'s' if cores > 1 else ''}"
    if workers * threads > cores:
        load += f", oversubscribed {workers * threads / cores:.1f}x: not a measurement of speed"
    server = " and a server" if kind.has_server else ""
    print(
        f"asyncsgd {__version__}  {first}mode {settings.job.mode}  {workers} worker{'s' if workers > 1 else ''} with "
        f"{threads} thread{'s' if threads > 1 else ''} each{server} on {load}",
        flush=True,
    )


def start_fork_server(
    settings: Trains, launch: Launch, model: str | None, modules: Iterable[str] = ()
) -> ForkServerContext | None:
    """Where workers come from, started early; None where there are none to start."""
    from asyncsgd.modes import kind_of

    kind = kind_of(settings.job.mode, settings.job.clock)
    if kind.in_one_process or (launch.rank is not None and not kind.has_server):
        return None
    return fork_server(model, *kind.preload, *modules)


def told_batch_size(experiment: Experiment, context: ForkServerContext) -> int:
    """Print what ``--find-batch-size`` asks for; return the exit code."""
    from asyncsgd.fitting import find_batch_size

    find_batch_size(experiment, context, say)
    return 0


def _values_of(argv: list[str], flag: str) -> list[str]:
    return [argv[i + 1] for i in range(len(argv) - 1) if argv[i] == flag] + [
        a[len(flag) + 1 :] for a in argv if a.startswith(flag + "=")
    ]


def task_script(
    kind: type[Task],
    name: str,
    *,
    description: str,
    examples: str,
    model: str | None = None,
    before: Callable[[Any], None] = lambda settings: None,
) -> TaskScript[Any]:
    """The script of a task class whose fields are its flags.

    Args:
        kind: the class.
        name: of the script's file, without .py.
        model: the field that names a transformers model, where there is one.
        before: called with the settings before anything heavy is imported.
    """
    flags = task_flags(kind)

    def experiment(settings: Any) -> Experiment:
        from asyncsgd.experiment import experiment_of

        settings.task.check_names()
        return experiment_of(name, settings)

    def folder(settings: Any, command: str) -> RunFolder:
        job = settings.job
        new = f"{name}-{job.mode}-w{job.nproc}-s{job.seed}-{flags.settings_hash(settings)}"
        return open_folder(new, flags, settings, command, task=kind.name, better=kind.better)

    return TaskScript(
        name,
        flags,
        description,
        examples,
        experiment,
        folder,
        model=lambda settings: None if model is None else str(getattr(settings.task, model)),
        modules=kind.preload,
        before=before,
    )
