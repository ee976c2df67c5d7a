"""Prepare a run, up to its first step: what `asyncsgd.run.lifecycle` does before it trains."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

from asyncsgd.backends.hosts import Hosts
from asyncsgd.backends.launch import Launch, World, fork_server
from asyncsgd.backends.mirror import Sender
from asyncsgd.core.checkpoints import Found, Policy, Saver
from asyncsgd.core.flat import FlatModel
from asyncsgd.core.signals import StopRequest, signals_held
from asyncsgd.errors import UsageError, is_out_of_memory
from asyncsgd.pipeline.cut import anatomy
from asyncsgd.records.console import Recorder, teller
from asyncsgd.records.events import Parts, Record, Resumed
from asyncsgd.records.hardware import environments_of
from asyncsgd.records.machine import MachineWatch, describe_environment
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.tracking import Tracking
from asyncsgd.run import runtimes
from asyncsgd.run.callbacks import Callback, Callbacks
from asyncsgd.run.dry_run import check_state
from asyncsgd.run.execute import Live
from asyncsgd.run.finish import (
    comparable,
    facts_at_start,
    hashes_at_start,
)
from asyncsgd.run.found import received_by
from asyncsgd.run.memory import find_micro_batches
from asyncsgd.run.other_host import begin_of
from asyncsgd.run.run import Run, device_of_worker
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.check import check, normalising_over_batch
from asyncsgd.tasks.map_style import DatasetData
from asyncsgd.worker.profile import by_ranks, forget_peaks, hardware
from asyncsgd.worker.worker import check_compiler, checkpoint_activations


@dataclasses.dataclass(frozen=True)
class Asked:
    """A run as it was asked for, and who hears of it."""

    run: Run
    """The run, not prepared; with as many workers as `launch` says."""
    launch: Launch
    folder: RunFolder | None
    """A new folder, or that of a run that goes on; None: nothing is written."""
    context: ForkServerContext | None
    """A fork server that starts workers; None: there are none to start."""
    quiet: bool
    """Whether the user is told nothing."""
    receivers: Sequence[Callable[[Record], None]]
    """The functions that are called with each record, in order."""
    callbacks: Sequence[Callback]
    """The user's callbacks, which are called at each evaluation, in order."""
    tracking: Tracking
    """Shows the run in trackers; not started."""


def prepare(asked: Asked, torchrun_world: World | None, hosts: Hosts | None, stop_request: StopRequest) -> Live:
    """Prepare a run, up to its first step.

    The order matters: first everything that may refuse the run, also on other hosts; then the folder is written, the
    user is told, and the records of a run that is resumed are taken up. So a run that is refused changes nothing in its
    folder but console.log.

    Args:
        torchrun_world: where the ranks that torchrun made meet; None if this process starts all others.
        hosts: the other hosts of an asynchronous run; None if there are none.

    Raises:
        UsageError: if the run, its task or the folder to go on from must be changed.
    """
    run = asked.run
    launch = asked.launch
    folder = asked.folder
    context = asked.context
    torch.set_num_threads(run.runtime.threads)
    tell: Callable[[str], None] = silent if asked.quiet else teller(folder)
    if folder is not None and folder.resume is not None:
        # A mirror has data and model of the run from the host that led it, and prepares nothing.
        run = dataclasses.replace(run, received=received_by(folder.path))
    if run.received is None:
        what_takes_long = run.task.before_preparing(run.cache)
        if what_takes_long:
            tell(what_takes_long)
    run = run.prepared()
    task = run.task
    limits = run.limits
    if run.micro_batches > 1:
        if run.runtime.cuts_model and task.batch_size % run.micro_batches:
            raise UsageError(
                f"--micro-batches {run.micro_batches} of a pipeline have one size; type a divisor of {task.batch_size}"
            )
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
    facts = facts_at_start(run, flat)
    began = hashes_at_start(run, facts)
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
    asked.tracking.start(tell, None if folder is None else folder.settings_yaml)
    forget_peaks(flat.parameters.device)
    # All processes of the run descend from this one, or from the launcher that has made all ranks.
    first_process = os.getpid() if torchrun_world is None else os.getppid()
    machine = MachineWatch(None if folder is None else folder.path, first_process)
    receivers: tuple[Callable[[Record], None], ...] = (*asked.receivers, asked.tracking, machine)
    record = Recorder(folder, limits.samples, quiet=asked.quiet, receivers=receivers)
    record.totals.micro_batches = micro_batches_before
    if folder is not None and resume is not None:
        _take_up(folder, environment, record, tell)
    if micro_batches != micro_batches_before:
        now = record.totals
        record(Parts(now.num_updates, now.num_samples, now.train_seconds, micro_batches_before, micro_batches))
    saver = None
    if folder is not None:
        copy_to_mirror = None
        if hosts is not None and run.output.mirror is not None and _has_mirror(run.output.mirror, hosts, tell):
            copy_to_mirror = Sender(hosts.mirror(run.output.mirror), run.output.mirror, folder.path, tell).send
            if resume is not None:
                copy_to_mirror(resume.checkpoint)  # the mirror has set aside the copy that it had before
        saver = Saver(folder, policy, record, began, tell, copy_to_mirror)
    return Live(
        run=run,
        flat=flat,
        facts=facts,
        record=record,
        context=context,
        stop_requested=stop_request,
        tell=tell,
        saver=saver,
        tracking=asked.tracking,
        machine=machine,
        callbacks=Callbacks(run, asked.callbacks) if asked.callbacks else None,
        hosts=hosts,
    )


def _has_mirror(mirror: int, hosts: Hosts, tell: Callable[[str], None]) -> bool:
    """Whether the host that is to keep copies is here; where hosts come and go it need not be."""
    if mirror in hosts.greetings:
        return True
    tell(f"note   host {mirror} is not here now, so no copies of checkpoints are made")
    return False


def silent(line: str) -> None:
    """Say nothing."""


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
        now: what -> its hash now; see `asyncsgd.run.finish.hashes_at_start`.

    Raises:
        UsageError: if one of the hashes differs from that in the checkpoint.
    """
    for what, here in now.items():
        recorded = found.checkpoint.began_from.get(what, here)  # old checkpoints lack some, which are not compared
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
    with signals_held():
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
    """Return the line that says how the model of a pipeline is cut; nothing of other runs.

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
