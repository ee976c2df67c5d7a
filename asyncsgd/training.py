"""Train: prepare a run, carry it out and finish it. Reads top to bottom.

`carry_out` is the process that prepares the run, keeps the record and speaks to the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncsgd import modes
from asyncsgd.checking import check_state
from asyncsgd.checkpoints import Found, Policy, Saver
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError, reason
from asyncsgd.execute import Run, execute
from asyncsgd.experiment import Course, Experiment, Setup, device_of_worker, facts_of
from asyncsgd.finishing import TWICE, finish, write_last
from asyncsgd.fitting import find_micro_batches
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.measure import Hardware, by_ranks, forget_peaks
from asyncsgd.records.console import Recorder, teller
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Parts, Record, Resumed
from asyncsgd.records.locks import one_writer
from asyncsgd.records.machine import MachineLoad, Usage, describe_environment
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.trackers import Tracking
from asyncsgd.runtime.base import Result
from asyncsgd.runtime.launch import Launch, World, end_with_launcher, fork_server
from asyncsgd.settings.flags import flag_of
from asyncsgd.signals import StopRequest, held
from asyncsgd.stages import anatomy
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.checking import check
from asyncsgd.worker import check_compiler, checkpoint_activations, is_out_of_memory

EXIT_CODES = {DONE: 0, INTERRUPTED: 130}
"""Every other status exits with 1."""
BEFORE_TRAINING = Result(INTERRUPTED, "interrupted by the user before training")


def lead(
    experiment: Experiment,
    launch: Launch,
    folder: RunFolder,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    tracking: Tracking | None = None,
) -> int:
    """`carry_out` for a script: what goes wrong is said on stderr; return the exit code."""
    ended = carry_out(experiment, launch, folder, context, stop, tracking=tracking)
    if ended.unexpected is not None:
        traceback.print_exception(ended.unexpected)
    if ended.result.message and ended.result.status != DONE:
        print(f"{ended.result.status}: {ended.result.message}", file=sys.stderr, flush=True)
    return EXIT_CODES.get(ended.result.status, 1)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    result: Result
    summary: Mapping[str, Any]
    run: Run | None
    """None where it ended before it had a model."""
    unexpected: Exception | None
    """An exception that is neither a `UsageError` nor a `RunError`."""


def carry_out(
    experiment: Experiment,
    launch: Launch,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    *,
    quiet: bool = False,
    receivers: Sequence[Callable[[Record], None]] = (),
    tracking: Tracking | None = None,
) -> Ended:
    """Prepare, train, evaluate, save. The run folder says how it ended, in every case.

    Args:
        experiment: as many workers as `launch` says.
        folder: new; owned by this call. None: nothing is written.
        context: a fork server that starts workers, None where there are none.
        stop: the listener for signals, if there is one already.
        quiet: whether the user is told nothing.
        receivers: called with each record, in order.
        tracking: not started; None: the run is shown in no tracker.

    Raises:
        UsageError: where the user has to change something. A new run's folder then holds a FAILED summary; that of a
            run that would have gone on is as it was.
    """
    tracking = tracking or Tracking()
    with contextlib.ExitStack() as closing:
        if folder is not None:
            closing.callback(folder.close)
        listening = closing.enter_context(stop or StopRequest())
        run, result, unexpected = _attempt(
            experiment, launch, folder, context, listening, quiet, receivers, tracking, closing
        )
        try:
            if run is not None:
                result, summary = finish(run, _advised(run, result))
            else:
                summary = experiment.summary() | {"status": result.status, "message": result.message}
                summary |= tracking.finish(result.status)
                write_last(folder, summary, run)
        except OSError as error:
            where = None if folder is None else folder.path
            message = f"{where} cannot be written ({reason(error)})"
            result = Result(FAILED, message)
            summary = experiment.summary() | {"status": result.status, "message": result.message}
    return Ended(result, summary, run, unexpected)


def _advised(run: Run, result: Result) -> Result:
    """Where memory was out after a checkpoint, what to type to go on from there."""
    folder = run.record.folder
    if OUT_OF_MEMORY not in result.message or folder is None or not any(folder.path.glob("checkpoints/*.json")):
        return result
    parts = min(2 * run.setup.micro_batches, run.task.batch_size)
    how = f"to go on from the last checkpoint, type --resume {folder.path} --micro-batches {parts}"
    return dataclasses.replace(result, message=f"{result.message}; {how}")


def _attempt(
    experiment: Experiment,
    launch: Launch,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    stop: StopRequest,
    quiet: bool,
    receivers: Sequence[Callable[[Record], None]],
    tracking: Tracking,
    closing: contextlib.ExitStack,
) -> tuple[Run | None, Result, Exception | None]:
    """Prepare and train. Return the run as far as it came, how it ended, and an unexpected exception.

    Args:
        closing: left when the run has written all that it writes.
    """
    run, task = None, experiment.task
    try:
        for name in task.output_folders:
            if (output := getattr(task, name)) is not None:
                closing.enter_context(one_writer(Path(output), flag_of(name)))
        stop.check()
        end_with_launcher(leads=True)
        board = None if launch.rank is None else World.of_torchrun()
        opened = _open(experiment, launch, board, folder, context, stop, quiet, receivers, tracking)
        stop.check()
        closing.enter_context(stop.during_a_run())
        run = opened
        run.usage.start()
        result = execute(run, board)
        if run.saver is not None:
            run.saver.finish()  # here, where it can be left
        return run, result, None
    except UsageError as error:
        summary = experiment.summary() | {"status": FAILED, "message": str(error)} | tracking.finish(FAILED)
        if run is not None:
            run.usage.finish()
        write_last(folder, summary, run)
        raise
    except KeyboardInterrupt:
        if run is None:
            return None, BEFORE_TRAINING, None
        return run, TWICE, None
    except RunError as error:
        return run, Result(FAILED, str(error), has_parameters=False), None
    except OSError as error:
        where = error.filename or (None if folder is None else folder.path)
        return run, Result(FAILED, f"{where}: {reason(error)}", has_parameters=False), None
    except Exception as error:
        if is_out_of_memory(error):
            return run, Result(FAILED, OUT_OF_MEMORY, has_parameters=False), None
        return run, Result(FAILED, f"{type(error).__name__}: {error}", has_parameters=False), error
    finally:
        if run is not None:
            if run.saver is not None:
                run.saver.finish()
            run.record.close()


def _open(
    experiment: Experiment,
    launch: Launch,
    board: World | None,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    stop: StopRequest,
    quiet: bool,
    receivers: Sequence[Callable[[Record], None]],
    tracking: Tracking,
) -> Run:
    setup = experiment.setup
    torch.set_num_threads(setup.runtime.threads)
    task = experiment.task.prepare(setup.seed, experiment.cache)
    course = experiment.course(task)
    if setup.micro_batches > 1:
        task.split(task.data(setup.seed).batch(0, 0), setup.micro_batches)  # refused here, and not in every worker
    unused = () if is_built_in(task) else _check(task, setup, processes=context is not None)
    on_device = not setup.runtime.has_server and not isinstance(setup.runtime, modes.Pipeline)
    flat = FlatModel(task.model(setup.seed).to(device_of_worker(setup.device, 0) if on_device else "cpu"))
    setup.check_optimizer(flat.layout)
    if setup.savings.gradient_checkpointing:
        checkpoint_activations(flat.model)  # refused here, and not in every worker
    if setup.savings.compile:
        check_compiler(setup.device)
    resume = None if folder is None else folder.resume
    before = (resume.checkpoint.totals if resume else {}).get("micro_batches", setup.micro_batches)
    parts = max(before, setup.micro_batches)
    if setup.savings.auto_batch and resume is None:
        parts = find_micro_batches(setup, task, context or fork_server(None, *task.preload))
    setup = dataclasses.replace(setup, micro_batches=parts)
    experiment = dataclasses.replace(experiment, setup=setup)
    if isinstance(setup.runtime, modes.Pipeline) and setup.runtime.schedule == "deepspeed":
        from asyncsgd.runtime.deepspeed_engine import prepare

        # Here and not in every rank: what is wrong is said once, and compiling takes a minute or two.
        config = setup.runtime.deepspeed_config
        prepare(torch.device(setup.device), None if config is None else Path(config))
    lines = [*experiment.describe(task, flat), *_describe(setup, course), *_stages(task, setup, flat)]
    policy = experiment.checkpoints(task)
    if resume is not None and policy == Policy():
        policy = Policy(**resume.checkpoint.policy)
    environment = _environment(setup, launch, board)
    init_sha256 = parameters_sha256(flat.layout, flat.parameters)
    if folder is not None:
        if not type(setup.rule).__module__.startswith("asyncsgd."):
            check_state(setup.rule, setup.rule.init(torch.zeros(1)))
        began_from = _began_from(task, setup, init_sha256)
        if folder.resume is not None:
            _check_began_from(folder.resume, began_from)
        else:
            folder.write_environment(environment)
    tell: Callable[[str], None] = (lambda line: None) if quiet else teller(folder)
    for line in lines:
        tell(line)
    tracking.start(tell, None if folder is None else folder.settings_yaml)
    forget_peaks(flat.parameters.device)
    usage = Usage(None if folder is None else folder.path)
    machine_load = MachineLoad(os.getpid() if launch.rank is None else os.getppid())  # a launcher has made all ranks
    record = Recorder(
        folder,
        course.budget.samples,
        quiet=quiet,
        receivers=(*receivers, tracking, usage, machine_load),
        micro_batches=before,
    )
    if folder is not None and folder.resume is not None:
        _go_on(folder, environment, record, tell)
    if parts != before:
        now = record.totals
        record(Parts(before, parts, now.num_updates, now.num_samples, now.train_seconds))
    saver = None if folder is None else Saver(folder, policy, record, began_from, tell)
    return Run(
        experiment,
        task,
        course,
        unused,
        flat,
        init_sha256,
        record,
        context,
        stop,
        tell,
        policy,
        saver,
        tracking,
        usage,
        machine_load,
    )


def _environment(setup: Setup, launch: Launch, board: World | None) -> dict[str, Any]:
    """What a run is made with; on several hosts also the hardware of every rank."""
    here = Hardware.here(setup.device)
    described = describe_environment(setup.runtime.threads, launch.num_workers)
    described |= {"device": setup.device, "num_devices": setup.num_devices, **dataclasses.asdict(here)}
    if board is not None and board.several_hosts:
        try:
            notices = [board.get(f"rank{rank}") for rank in range(1, board.number)]
            others = [msgspec.json.decode(notice, type=Hardware) for notice in notices]
        except ValueError as error:
            raise RunError(f"the notice of a rank is not one: {error}; start the run again") from error
        described["hardware_of_ranks"] = by_ranks([here, *others])
    return described


def _began_from(task: Task, setup: Setup, init_sha256: str) -> dict[str, Any]:
    """Hashes of the data and the initial parameters; see `Saver`."""
    facts = facts_of(task, setup.seed)
    began_from = {"data": facts["data_fingerprint"], "initial parameters": init_sha256}
    if "candidates_sha256" in facts:
        began_from["candidates"] = facts["candidates_sha256"]
    return began_from


def _check_began_from(found: Found, now: Mapping[str, Any]) -> None:
    """The settings name a model and data by where they lie, and others may lie there now.

    Raises:
        UsageError: if the run did not begin from those of `now`.
    """
    for what, here in now.items():
        recorded = found.checkpoint.began_from.get(what, here)
        if recorded != here:
            raise UsageError(
                f"{found.folder} began with other {what} than there are now ({str(recorded)[:12]} -> "
                f"{str(here)[:12]}); put the old ones back, or begin a new run"
            )


def _go_on(folder: RunFolder, environment: Mapping[str, Any], record: Recorder, tell: Callable[[str], None]) -> None:
    """Take the folder up, say where the run goes on, and add up its records from there. Nothing is refused any more."""
    found: Found = folder.resume
    with held():
        folder.write_environment(environment)
        discarded = folder.go_on()
    checkpoint = found.checkpoint
    record.totals.load_state(checkpoint.totals)
    for note in found.notes:
        tell(f"note   {note}")
    lost = f"; {discarded} arrivals after it are computed again" if discarded else ""
    tell(f"resume at {checkpoint.total_samples} samples and {checkpoint.version} updates{lost}")
    record(Resumed(checkpoint.name, checkpoint.version, checkpoint.total_samples, checkpoint.train_seconds, discarded))


def _check(task: Task, setup: Setup, processes: bool) -> tuple[str, ...]:
    """Look for mistakes of a user's own task; its unused parameters. Whole batches are looked at, so where batches are
    cut into parts, a task that does not fit is not looked at any further.
    """
    device = device_of_worker(setup.device, 0)
    try:
        checked = check(task, seed=setup.seed, device=device, processes=processes)
    except (MemoryError, RuntimeError) as error:
        if not ((setup.savings.auto_batch or setup.micro_batches > 1) and is_out_of_memory(error)):
            raise
        return ()
    if device != "cpu":
        torch.cuda.empty_cache()  # give back the memory that the check took, for the workers
    return checked.unused


def _describe(setup: Setup, course: Course) -> list[str]:
    runtime = setup.runtime
    how = setup.rule.summary
    if isinstance(runtime, modes.InProcess):
        how = f"one process, {runtime.accumulate} batch{'es' if runtime.accumulate > 1 else ''} per update"
        if runtime.all_gpus:
            number = torch.cuda.device_count() if setup.device == "cuda" else 0
            shared = f"a share of each on each of {number} GPUs"
            how += f", {shared if number > 1 else 'the bare model, since there are no GPUs to share it'}"
    elif isinstance(runtime, modes.AllReduce):
        how = "all ranks step along the weighted mean of their gradients (DistributedDataParallel)"
    elif isinstance(runtime, modes.Pipeline):
        replicas = runtime.num_workers // runtime.stages
        how = f"{replicas} x {runtime.stages} stages, schedule {runtime.schedule}, {setup.micro_batches} micro-batches"
    elif isinstance(runtime, modes.Hogwild):
        states = "one optimizer state shared by all" if runtime.share_state else "an optimizer state each"
        how = f"workers step the shared vector themselves, without locks, {states}"
    clip = f", directions clipped at norm {setup.recipe.clip_norm:g}" if setup.recipe.clip_norm else ""
    return [
        f"rule   {setup.rule}: {how}",
        f"step   {setup.recipe}, {course.schedule}, the same for any number of workers{clip}",
    ]


def _stages(task: Task, setup: Setup, flat: FlatModel) -> list[str]:
    """How the model of a pipeline is cut.

    Raises:
        UsageError: if it cannot be.
    """
    if not isinstance(setup.runtime, modes.Pipeline):
        return []
    batch = task.split(task.data(setup.seed).batch(0, 0), setup.micro_batches)[0]
    return [f"cut    {anatomy(task, flat.model, batch).describe(setup.runtime.stages)}"]
