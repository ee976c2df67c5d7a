"""Train: prepare a run, train it and finish it. Reads top to bottom.

`carry_out` does all three, in the process that keeps the record and speaks to the user. Its middle is
`asyncsgd.run.execute.execute`. `lead` calls it for scripts, `asyncsgd.api.start` for Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from asyncsgd.backends.host import SignsOfLife, ThisHost
from asyncsgd.backends.hosts import Hosts
from asyncsgd.backends.launch import Launch, World, end_with_launcher, fork_server, wait_for_new_start
from asyncsgd.backends.mirror import Sender
from asyncsgd.backends.token import TRUSTED, token_of
from asyncsgd.core.checkpoints import Found, Policy, Saver
from asyncsgd.core.flat import FlatModel
from asyncsgd.core.limits import Result
from asyncsgd.core.signals import StopRequest, held
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError, is_out_of_memory, reason
from asyncsgd.pipeline.cut import anatomy
from asyncsgd.records.best_effort import say
from asyncsgd.records.console import Recorder, teller
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Parts, Record, Resumed
from asyncsgd.records.hardware import environments_of
from asyncsgd.records.locks import one_writer
from asyncsgd.records.machine import MachineWatch, describe_environment
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.tracking import Tracking
from asyncsgd.run import runtimes
from asyncsgd.run.callbacks import Callback, Callbacks
from asyncsgd.run.dry_run import check_state
from asyncsgd.run.execute import Live, execute
from asyncsgd.run.finish import (
    AT_ONCE,
    SAMPLE_ORDER,
    began_from,
    began_with,
    comparable,
    finish,
    note_interrupted,
    write_last,
)
from asyncsgd.run.found import received_by
from asyncsgd.run.memory import find_micro_batches
from asyncsgd.run.other_host import begin_of
from asyncsgd.run.run import Run, device_of_worker
from asyncsgd.settings.flags import flag_of
from asyncsgd.settings.groups import FIRST
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.check import check, normalising_over_batch
from asyncsgd.tasks.map_style import DatasetData
from asyncsgd.worker.profile import by_ranks, forget_peaks, hardware
from asyncsgd.worker.worker import check_compiler, checkpoint_activations

EXIT_CODES = {DONE: 0, INTERRUPTED: 130}
"""Every other status exits with 1."""
_EXIT_GRACE_SECONDS = 20.0
"""How long a process that must end may still write a checkpoint and the summary, while its main thread stands still."""
Train = Callable[[Live, World | None], Result]
"""What trains a run that is prepared, as `asyncsgd.run.execute.execute` does."""
BEFORE_TRAINING = Result(INTERRUPTED, "interrupted by the user before training")


def lead(
    run: Run,
    launch: Launch,
    folder: RunFolder,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    tracking: Tracking | None = None,
    train: Train = execute,
) -> int:
    """`carry_out` for a script: print what goes wrong to stderr, and return the exit code."""
    ended = carry_out(run, launch, folder, context, stop, tracking=tracking, train=train)
    if ended.unexpected is not None:
        traceback.print_exception(ended.unexpected)
    if ended.result.message and ended.result.status != DONE:
        print(f"{ended.result.status}: {ended.result.message}", file=sys.stderr, flush=True)
    code = EXIT_CODES.get(ended.result.status, 1)
    if code == 0 and ended.summary["score_error"] is not None:
        print(f"without score: {ended.summary['score_error']}", file=sys.stderr, flush=True)
        return 1
    return code


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    result: Result
    summary: Mapping[str, Any]
    live: Live | None
    """The run; None if it ended before it had a model."""
    unexpected: Exception | None
    """An exception that is neither a `UsageError` nor a `RunError`."""


def carry_out(
    run: Run,
    launch: Launch,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    stop: StopRequest | None = None,
    *,
    quiet: bool = False,
    receivers: Sequence[Callable[[Record], None]] = (),
    callbacks: Sequence[Callback] = (),
    tracking: Tracking | None = None,
    train: Train = execute,
) -> Ended:
    """Prepare, train, evaluate, save. The run folder says how it ended, in every case.

    Args:
        run: not prepared; as many workers as `launch` says.
        folder: new; owned by this call. None: nothing is written.
        context: a fork server that starts workers, None where there are none.
        stop: the listener for signals, if there is one already.
        quiet: whether the user is told nothing.
        receivers: called with each record, in order.
        callbacks: called at each evaluation, in order.
        tracking: not started; None: the run is shown in no tracker.
        train: the training itself, between its preparation and its end.

    Raises:
        UsageError: if the user has to change something. A new run's folder then holds a FAILED summary; that of a run
            that was to be resumed is as it was.
    """
    tracker = tracking or Tracking()
    where = None if folder is None else folder.path
    live: Live | None = None

    def attempt(stop_request: StopRequest, closing: contextlib.ExitStack) -> tuple[Result, Exception | None]:
        """Prepare the run, put it into `live`, and train.

        A UsageError writes its own summary here and is raised. The summary of every other end is written below.

        Returns:
            How the run ended, and an exception that is neither a UsageError nor a RunError.
        """
        nonlocal live
        try:
            for name in run.task.output_folders:
                if (output := getattr(run.task, name)) is not None:
                    closing.enter_context(one_writer(Path(output), flag_of(name)))
            stop_request.check()
            end_with_launcher(leads=True)
            starts_workers = launch.starts_workers(has_server=run.runtime.has_server)
            board = None if starts_workers else World.of_torchrun()
            hosts = None
            if launch.several_hosts:
                # torch.distributed, which synchronous ranks use, knows no token: their network is trusted.
                this_host = ThisHost.of_torchrun(launch)
                if not launch.is_elastic:
                    _check_mirror(run.output.mirror, this_host)
                token = token_of(run.output) if run.runtime.has_server else TRUSTED
                signs = SignsOfLife.of(run.output.worker_deadline)
                tell = _silent if quiet else say
                others = Hosts(this_host, token, run.output.interface, signs, stop_request.check, tell)
                hosts = closing.enter_context(others)
            # `opened` and `live` are one object; `opened` is never None, which the lambdas below need.
            opened = _open(
                run,
                launch,
                folder,
                context,
                board=board,
                hosts=hosts,
                stop_request=stop_request,
                quiet=quiet,
                receivers=receivers,
                callbacks=callbacks,
                tracking=tracker,
            )
            stop_request.check()
            closing.enter_context(stop_request.during_a_run())
            live = opened
            live.machine.start()
            with stop_request.watched(
                on_first=lambda: note_interrupted(opened),
                on_second=opened.machine.kill_others,
                at_last=lambda: _leave(opened),
            ):
                result = train(opened, board)
            if live.saver is not None:
                live.saver.finish()  # within the listener, so that a second signal can end this wait too
            return result, None
        except UsageError as error:
            summary = run.summary() | {"status": FAILED, "message": str(error)} | tracker.finish(FAILED)
            if live is not None:
                live.machine.finish()
            write_last(folder, summary, live)
            raise
        except KeyboardInterrupt:
            return BEFORE_TRAINING if live is None else AT_ONCE, None
        except RunError as error:
            return Result(FAILED, str(error), has_parameters=False), None
        except OSError as error:
            return Result(FAILED, f"{error.filename or where}: {reason(error)}", has_parameters=False), None
        except Exception as error:
            if is_out_of_memory(error):
                return Result(FAILED, OUT_OF_MEMORY, has_parameters=False), None
            return Result(FAILED, f"{type(error).__name__}: {error}", has_parameters=False), error
        finally:
            if live is not None:
                if live.saver is not None:
                    live.saver.finish()
                live.record.close()

    with contextlib.ExitStack() as closing:
        if folder is not None:
            closing.callback(folder.close)
        result, unexpected = attempt(closing.enter_context(stop or StopRequest()), closing)
        try:
            if live is not None:
                result, summary = finish(live, _with_memory_advice(live, result))
            else:
                summary = run.summary() | {"status": result.status, "message": result.message}
                summary |= tracker.finish(result.status)
                write_last(folder, summary, live)
        except OSError as error:
            result = Result(FAILED, f"{where} cannot be written ({reason(error)})")
            summary = run.summary() | {"status": result.status, "message": result.message}
        if live is not None and live.hosts is not None:
            live.hosts.is_unfinished = result.status == INTERRUPTED
    if result.status == FAILED:
        wait_for_new_start(launch)
    return Ended(result, summary, live, unexpected)


def _check_mirror(mirror: int | None, this_host: ThisHost) -> None:
    """Refuse a mirror that is no other host.

    Raises:
        UsageError: with the numbers that there are.
    """
    if mirror is not None and mirror >= this_host.num_hosts:
        raise UsageError(f"--mirror {mirror}: the other hosts are 1 to {this_host.num_hosts - 1}; type one of them")


def _has_mirror(mirror: int, hosts: Hosts, tell: Callable[[str], None]) -> bool:
    """Whether the host that is to keep copies is here; where hosts come and go it need not be."""
    if mirror in hosts.greetings:
        return True
    tell(f"note   host {mirror} is not here now, so no copies of checkpoints are made")
    return False


def _silent(line: str) -> None:
    """Say nothing."""


def _leave(live: Live) -> None:
    """Write checkpoint and summary from a thread, since the main one stands still in C, and end this process."""
    last = threading.Timer(_EXIT_GRACE_SECONDS, os._exit, (EXIT_CODES[INTERRUPTED],))
    last.daemon = True
    last.start()
    try:
        if live.saver is not None:
            live.saver.finish()
        finish(live, AT_ONCE)
        print(f"{INTERRUPTED}: {AT_ONCE.message}", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_CODES[INTERRUPTED])


def _with_memory_advice(live: Live, result: Result) -> Result:
    """If a run ended without memory and has a checkpoint, add to its message how to resume with smaller
    micro-batches."""
    folder = live.record.folder
    if live.facts["normalises_over_batch"]:
        return result  # such a model goes on with the same number of micro-batches only
    if OUT_OF_MEMORY not in result.message or folder is None or not any(folder.path.glob("checkpoints/*.json")):
        return result
    parts = min(2 * live.run.micro_batches, live.run.task.batch_size)
    how = f"to go on from the last checkpoint, type --resume {folder.path} --micro-batches {parts}"
    return dataclasses.replace(result, message=f"{result.message}; {how}")


def _open(
    run: Run,
    launch: Launch,
    folder: RunFolder | None,
    context: ForkServerContext | None,
    *,
    board: World | None,
    hosts: Hosts | None,
    stop_request: StopRequest,
    quiet: bool,
    receivers: Sequence[Callable[[Record], None]],
    callbacks: Sequence[Callback],
    tracking: Tracking,
) -> Live:
    """Prepare a run, up to its first step.

    The order matters: first everything that may refuse the run, also on other hosts; then the folder is written, the
    user is told, and the records of a run that is resumed are taken up. So a run that is refused changes no folder.

    Args:
        board: where the ranks that torchrun made meet; None if this process starts all others.
        hosts: the other hosts of an asynchronous run; None if there are none.

    Raises:
        UsageError: if the run, its task or the folder to go on from must be changed.
    """
    torch.set_num_threads(run.runtime.threads)
    tell: Callable[[str], None] = _silent if quiet else teller(folder)
    if folder is not None and folder.resume is not None:
        run = dataclasses.replace(run, received=received_by(folder.path))
    waits_for = ""
    if run.received is None:
        waits_for = run.task.before_preparing(run.cache)
    if waits_for:
        tell(waits_for)
    run = run.prepared()
    task = run.task
    limits = run.limits
    if run.micro_batches > 1:
        task.split(task.data(run.seed).batch(0, 0), run.micro_batches)  # refused here, and not in every worker
    if run.machine.prefetch and isinstance(task.data(run.seed), DatasetData):
        raise UsageError(
            "--prefetch makes batches in a thread, and an item of a dataset may draw from torch's default generator, "
            "which dropout uses meanwhile; drop --prefetch"
        )
    if not is_built_in(task):
        changing_buffers = _check_task(run, processes=context is not None)
        run = dataclasses.replace(run, changing_buffers=changing_buffers)
    on_device = not run.runtime.has_server and not run.runtime.cuts_model
    flat = run.flat(device=device_of_worker(run.device, 0) if on_device else "cpu")
    run.check_optimizer(flat.layout)
    _check_statistics(run, flat)
    if run.machine.gradient_checkpointing:
        checkpoint_activations(flat.model)  # refused here, and not in every worker
    if run.machine.compile:
        check_compiler(run.device)
    resume = None if folder is None else folder.resume
    micro_batches_before = (resume.checkpoint.totals if resume else {}).get("micro_batches", run.micro_batches)
    micro_batches = max(micro_batches_before, run.micro_batches)
    _check_micro_batches(run, flat, micro_batches_before, micro_batches)
    if run.machine.auto_batch and resume is None:
        micro_batches = find_micro_batches(run, context or fork_server(None, *task.preload))
    run = run.with_parts(micro_batches)
    if isinstance(run.runtime, runtimes.Pipeline) and run.runtime.schedule == "deepspeed":
        from asyncsgd.pipeline.deepspeed_engine import configuration

        configuration(run.runtime.deepspeed_config)  # what is wrong is said once, and not by every rank
    lines = [*_describe_task(task, flat), *_describe(run), *_stages(run, flat)]
    if flat.statistics is not None:
        lines.append(f"state  {flat.statistics.describe()}")
    if run.budget.statistics_batches:
        lines.append(f"eval   batch statistics estimated again from {run.budget.statistics_batches} training batches")
    policy = run.policy
    if resume is not None and policy == Policy():
        policy = resume.checkpoint.policy
    environment = _environment(run, launch, hosts)
    facts = began_with(run, flat)
    began = began_from(run, facts)
    if folder is not None:
        if not type(run.rule).__module__.startswith("asyncsgd."):
            check_state(run.rule, run.rule.init(torch.zeros(1)))
        if resume is not None:
            _check_began_from(resume, comparable(began, environments_of(folder.path), environment))
    if hosts is not None:
        hosts.begin(begin_of(run, facts, resume), stop_request.check)
    if folder is not None and resume is None:
        folder.write_environment(environment)
    for line in lines:
        tell(line)
    tracking.start(tell, None if folder is None else folder.settings_yaml)
    forget_peaks(flat.parameters.device)
    root = os.getpid() if board is None else os.getppid()  # a launcher has made all ranks
    machine = MachineWatch(None if folder is None else folder.path, root)
    receivers = (*receivers, tracking, machine)
    record = Recorder(folder, limits.samples, quiet=quiet, receivers=receivers)
    record.totals.micro_batches = micro_batches_before
    if folder is not None and resume is not None:
        _take_up(folder, environment, record, tell)
    if micro_batches != micro_batches_before:
        now = record.totals
        record(Parts(now.num_updates, now.num_samples, now.train_seconds, micro_batches_before, micro_batches))
    saver = None
    if folder is not None:
        durable = None
        if hosts is not None and run.output.mirror is not None and _has_mirror(run.output.mirror, hosts, tell):
            durable = Sender(hosts.mirror(run.output.mirror), run.output.mirror, folder.path, tell).send
            if resume is not None:
                durable(resume.checkpoint)  # an earlier copy has been set aside there
        saver = Saver(folder, policy, record, began, tell, durable)
    return Live(
        run=run,
        flat=flat,
        facts=facts,
        record=record,
        context=context,
        stop_requested=stop_request,
        tell=tell,
        saver=saver,
        tracking=tracking,
        machine=machine,
        callbacks=Callbacks(run, callbacks) if callbacks else None,
        hosts=hosts,
    )


def _environment(run: Run, launch: Launch, hosts: Hosts | None) -> dict[str, Any]:
    """The programs and the hardware that a run is made with; on several hosts also the hardware of every rank."""
    here = hardware(run.device)
    described = describe_environment(run.runtime.threads, launch.num_workers)
    described |= {"device": run.device, "num_devices": run.num_devices, **here}
    if hosts is not None:
        described["hardware_of_ranks"] = by_ranks(hosts.hardware_of_ranks(here))
    return described


def _check_began_from(found: Found, now: Mapping[str, Any]) -> None:
    """Refuse to resume a run if its model or data have changed. The settings name the places in which they lie, and
    other ones may lie there now.

    Args:
        now: what -> its hash now; see `asyncsgd.run.finish.began_from`.

    Raises:
        UsageError: if one of the hashes differs from that in the checkpoint.
    """
    for what, here in now.items():
        # Old checkpoints lack some: their order of samples was FIRST, and the others are not compared.
        default = FIRST if what == SAMPLE_ORDER else here
        recorded = found.checkpoint.began_from.get(what, default)
        if recorded != here:
            raise UsageError(
                f"{found.folder} began with other {what} than there are now ({str(recorded)[:12]} -> "
                f"{str(here)[:12]}); put the old ones back, or begin a new run"
            )


def _take_up(folder: RunFolder, environment: Mapping[str, Any], record: Recorder, tell: Callable[[str], None]) -> None:
    """Take up the folder of a run that is resumed, tell the user where it goes on, and load the totals of its records.

    All checks must have passed, since this changes the folder.
    """
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
    record(Resumed(checkpoint.version, checkpoint.total_samples, checkpoint.train_seconds, checkpoint.name, discarded))


def _check_task(run: Run, processes: bool) -> tuple[str, ...] | None:
    """Check a user's own task, and return the names of the buffers that its forward pass changes.

    The check computes a whole batch. If that does not fit in memory and the run uses micro-batches, the task stays
    unchecked: None.

    Raises:
        UsageError: for a mistake in the task.
    """
    device = device_of_worker(run.device, 0)
    try:
        checked = check(run.task, seed=run.seed, device=device, processes=processes)
    except (MemoryError, RuntimeError) as error:
        if not ((run.machine.auto_batch or run.micro_batches > 1) and is_out_of_memory(error)):
            raise
        return None
    if device != "cpu":
        torch.cuda.empty_cache()  # give back the memory that the check took, for the workers
    return checked.statistics


def _check_statistics(run: Run, flat: FlatModel) -> None:
    """Refuse running statistics where the run cannot keep them.

    Raises:
        UsageError: with what works.
    """
    if run.budget.batch_statistics and not (flat.statistics and flat.statistics.are_of_batches):
        raise UsageError(
            "--batch-statistics reestimated is for models with layers that track statistics of their batches, such as "
            "BatchNorm, and this one has none; drop it"
        )
    if number := run.budget.statistics_batches:
        try:
            run.task.data(run.seed).batch(0, number - 1)
        except Exception as error:  # whatever data raise at their end
            raise UsageError(
                f"--statistics-batches {number}: the data have no training batch {number - 1} "
                f"({type(error).__name__}: {error}); type fewer"
            ) from error
    if flat.statistics is None:
        return
    if not run.runtime.keeps_statistics:
        raise UsageError(
            f"the model has running statistics ({flat.statistics.names[0]!r}), which mode {run.runtime.mode} does not "
            f"keep; train it with --mode single, sync or async, or use GroupNorm, LayerNorm or "
            f"track_running_stats=False"
        )


def _check_micro_batches(run: Run, flat: FlatModel, before: int, now: int) -> None:
    """Refuse to resume with another number of micro-batches if the model has a layer that normalises over a
    micro-batch, such as BatchNorm.

    Raises:
        UsageError: with what to type.
    """
    layer = normalising_over_batch(flat.model)
    if layer is None:
        return
    why = f"the module {layer!r} normalises over the parts of a batch, so their number is part of what is trained"
    if run.machine.auto_batch:
        raise UsageError(f"{why}; type --micro-batches K in place of --auto-batch")
    if now != before:
        raise UsageError(f"{why}; go on with --micro-batches {before}, or begin a new run")


def _describe(run: Run) -> list[str]:
    num_gpus = torch.cuda.device_count() if run.device == "cuda" else 0
    how = run.runtime.describe(run.micro_batches, num_gpus) or run.rule.summary
    clip = f", directions clipped at norm {run.recipe.clip_norm:g}" if run.recipe.clip_norm else ""
    return [
        f"rule   {run.rule}: {how}",
        f"step   {run.recipe}, {run.schedule}, the same for any number of workers{clip}",
    ]


def _stages(run: Run, flat: FlatModel) -> list[str]:
    """How the model of a pipeline is cut.

    Raises:
        UsageError: if it cannot be.
    """
    if not isinstance(run.runtime, runtimes.Pipeline):
        return []
    task = run.task
    batch = task.split(task.data(run.seed).batch(0, 0), run.micro_batches)[0]
    return [f"cut    {anatomy(task, flat.model, batch).describe(run.runtime.stages)}"]


def _describe_task(task: Task, flat: FlatModel) -> list[str]:
    """Lines about any task."""
    facts = task.facts()
    size = f"{flat.layout.num_parameters:,} parameters"
    model = getattr(task, "model_name", None)
    if model is not None:
        size = f"model {model}, {size}"
    counts = [
        f"{facts[key]} {what} samples"
        for key, what in (("num_train_samples", "training"), ("num_eval_samples", "evaluation"))
        if facts.get(key) is not None
    ]
    data = f"   data  {facts['data']}" if facts.get("data") else ""
    named = f" ({', '.join(counts)})" if counts else ""
    return [
        f"task   {task.name} ({size}){data}{named}",
        *(f"note   {note}" for note in facts.get("notes") or ()),
    ]
