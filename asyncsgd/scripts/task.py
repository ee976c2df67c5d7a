"""What every training script does: flags, launcher, first lines, fork server, run folder, training.

Nothing heavy is imported before the flags are understood and the fork server imports side by side with this process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd import __version__
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.scripts.base import Typed, go_offline
from asyncsgd.settings.flags import Flags, Parsed
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks import class_named

if TYPE_CHECKING:
    from asyncsgd.backends.launch import Launch
    from asyncsgd.run.run import Run
    from asyncsgd.settings.groups import Output
    from asyncsgd.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class TaskScript:
    """A script that trains a task whose fields are its flags."""

    kind: type[Task]
    """A frozen dataclass."""
    name: str
    """What its runs call the experiment."""
    description: str = ""
    """Empty: the first line of the task's docstring."""
    examples: str = ""
    typed: Typed | None = None
    """None: as a script under experiments/ that is called after its runs."""

    @property
    def flags(self) -> Flags:
        return task_flags(self.kind)

    def run(self, argv: list[str], stop: StopRequest) -> int:
        if told_names(argv, self.flags):
            return 0
        typed = self.typed or Typed.of_script(f"{self.name}.py")
        description = self.description or (self.kind.__doc__ or "").partition("\n")[0]
        is_led = os.environ.get("GROUP_RANK", "0") != "0"  # torchrun's number of this host
        parsed = self.flags.parse(argv, prog=typed.prog, description=description, examples=self.examples, is_led=is_led)
        settings, launch = adapt(parsed, self.flags)
        mode = settings.job.mode
        rules = values_of(argv, "--rule")
        if rules and mode in ("sync", "pipeline"):
            # In a file of settings it may be the default that a synchronous run has written down.
            raise UsageError(f"--rule {rules[-1]} is for --mode async, got --mode {mode}; drop one of them")
        from asyncsgd.backends.launch import fork_server
        from asyncsgd.records.best_effort import say
        from asyncsgd.run.runtimes import kind_of

        kind = kind_of(mode, settings.job.clock)
        if not launch.is_needed(has_server=kind.has_server):
            return 0
        model = getattr(settings.task, "model_name", None)

        def goes_on(folder: Path) -> str:
            return f"{typed.line} --resume {shlex.quote(str(folder))}"

        context = None
        if kind.has_server and (launch.is_elastic or launch.leads_other_host):
            from asyncsgd.run.run import run_of

            context = fork_server(model, *kind.preload, *self.kind.preload)
            go_offline_of(settings)
            here = run_of(self.name, settings)
            if launch.is_elastic:
                from asyncsgd.run.elastic import agreed_launch

                launch = agreed_launch(here, launch, folder_of_elastic(settings.output), stop.check)
            if launch.leads_other_host:
                from asyncsgd.run.other_host import follow_as_host

                follow_as_host(here, launch, context, goes_on=goes_on, typed=parsed.given)
        if not launch.leads:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # rank 0 hears it and stops the others in good order
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

            from asyncsgd.run.other_host import follow_as_rank
            from asyncsgd.run.run import run_of

            follow_as_rank(run_of(self.name, settings), launch, goes_on=goes_on, typed=parsed.given)
        announce(settings, launch)
        if context is None and not kind.in_one_process and launch.starts_workers(has_server=kind.has_server):
            context = fork_server(model, *kind.preload, *self.kind.preload)  # its imports and ours go on side by side
        go_offline_of(settings)
        asked = self.run_of(settings)
        stop.check()
        if settings.output.find_batch_size:
            from asyncsgd.run.memory import find_batch_size

            find_batch_size(asked, context or fork_server(model, *self.kind.preload), say)
            return 0
        from asyncsgd.records.events import FINISHED
        from asyncsgd.records.trackers import Identity, names_in
        from asyncsgd.records.tracking import Tracking
        from asyncsgd.run.choose_folder import has_checkpoint, open_run_folder, read_summary
        from asyncsgd.run.lifecycle import lead

        folder = open_run_folder(asked, f"{typed.line} {shlex.join(argv)}")
        print(f"run    {folder.path}", flush=True)
        tracking = Tracking(names_in(settings.output.track), Identity.of(folder.path))
        exit_code = lead(asked, launch, folder, context, stop, tracking)
        if read_summary(folder.path).get("status") in FINISHED:
            say(f"next   {typed.analysis} compare {shlex.quote(str(folder.path.parent))}")
        elif has_checkpoint(folder.path) and launch.rank is None:  # torchrun's own flags are not known
            say(f"next   {typed.resume(shlex.quote(str(folder.path)))}")
        return exit_code

    def run_of(self, settings: Any) -> Run:
        """Make the run; refuse what can be seen to be wrong before anything is done."""
        from asyncsgd.run.found import RECEIVED
        from asyncsgd.run.run import run_of

        folder = settings.output.resume or settings.output.run_dir
        if folder is None or not (Path(folder) / RECEIVED).is_file():  # else the folder says where the data are
            settings.task.check_names()
        return run_of(self.name, settings)


def folder_of_elastic(output: Output) -> Path:
    """The folder of a run in which hosts come and go.

    Raises:
        UsageError: if it has no name of its own, or would not go on there.
    """
    if output.resume is not None:
        raise UsageError(f"with --nnodes MIN:MAX a run goes on by itself; type --run-dir {output.resume}, not --resume")
    if output.run_dir is None:
        raise UsageError("with --nnodes MIN:MAX a run goes on in its folder; type --run-dir FOLDER on every host")
    if output.overwrite:
        raise UsageError("with --nnodes MIN:MAX a run goes on in its folder; drop --overwrite")
    return Path(output.run_dir)


def class_given(name: str | None) -> type[Task] | None:
    """The class that ``--task`` names; None where it was not typed."""
    return None if name is None else class_named(name)


def told_names(argv: list[str], flags: Flags) -> bool:
    """Print what ``--rule help``, ``--times help`` or ``--track help`` asks for, if one is there."""
    for spec in flags.specs.values():
        if spec.metadata["named"] is not None and "help" in values_of(argv, spec.flag):
            print(spec.metadata["named"].help())
            return True
    if "help" in values_of(argv, "--times") + values_of(argv, "--speeds"):
        from asyncsgd.simulation.speeds import describe_speeds as describe
    elif "help" in values_of(argv, "--rule"):
        from asyncsgd.rules import describe_rules as describe
    else:
        return False
    print(describe())
    return True


def go_offline_of(settings: Any) -> None:
    """`go_offline` for the names of a task on a transformer."""
    model = getattr(settings.task, "model_name", None)
    if model is not None:
        names = (str(getattr(settings.task, field, None)) for field in ("data_name", "eval_data"))
        go_offline((model, " ".join(names)))


def adapt(parsed: Parsed, flags: Flags) -> tuple[Any, Launch]:
    """The settings with the launcher's number of workers in them, which may decide the mode.

    Raises:
        UsageError: if the launcher started what the mode has no use for.
    """
    from asyncsgd.backends.launch import Launch
    from asyncsgd.backends.token import check_hosts
    from asyncsgd.run.runtimes import kind_of

    settings = parsed.settings
    asked = settings.job
    launch = Launch.read(os.environ, asked.nproc, nproc_given="nproc" in parsed.given)
    mode: Any = asked.mode if "mode" in parsed.given else None  # None: it is decided anew
    job = dataclasses.replace(asked, nproc=launch.num_workers, mode=mode)
    settings = dataclasses.replace(settings, job=job)
    if job.mode != asked.mode:
        flags.validate(settings)
    kind = kind_of(job.mode, job.clock)
    kind.check_launch(launch.rank, launch.several_hosts)
    check_hosts(settings.output, launch, has_server=kind.has_server)
    if settings.output.find_batch_size and launch.rank is not None:
        raise UsageError("--find-batch-size starts the processes that it needs; type python, not torchrun")
    return settings, launch


def announce(settings: Any, launch: Launch) -> None:
    """The first line, before anything heavy is imported."""
    from asyncsgd.records.machine import available_cores
    from asyncsgd.run.runtimes import Virtual, kind_of

    job = settings.job
    cores = available_cores()
    kind = kind_of(job.mode, job.clock)
    here = launch.ranks_here if launch.several_hosts else job.nproc
    busy = here * settings.machine.threads
    if kind is Virtual:
        clock = f"seconds are drawn from {job.speeds or 'constant:1'}, not measured"
        told = f"{job.nproc} virtual workers in one process; {clock}"
    else:
        workers = _counted(job.nproc, "worker")
        threads = _counted(settings.machine.threads, "thread")
        told = f"mode {job.mode}  {workers} with {threads} each{' and a server' * kind.has_server} on {cores} core"
        told += "s" * (cores > 1)
        if launch.several_hosts:
            told += f" of this host, which has {here} of the workers"
        if busy > cores:
            told += f", oversubscribed {busy / cores:.1f}x: not a measurement of speed"
    print(f"asyncsgd {__version__}  {told}", flush=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def values_of(argv: list[str], flag: str) -> list[str]:
    """What a command line gives a flag, before it is understood."""
    values = [value for name, value in itertools.pairwise(argv) if name == flag]
    joined = f"{flag}="
    for argument in argv:
        if argument.startswith(joined):
            values.append(argument.removeprefix(joined))
    return values
