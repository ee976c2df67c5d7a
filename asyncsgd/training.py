"""Train: put data, model, rule, server, workers, runtime and record together. Reads top to bottom.

`lead` is the process that prepares the run, keeps the record and speaks to the user; `follow` is every other rank that
torchrun made. The four `_train_...` functions differ in what moves gradients, and in nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from asyncsgd import modes
from asyncsgd.batches import Batches
from asyncsgd.checkpoints import Checkpoints, Found, Policy, RunSaver
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError, reason
from asyncsgd.evaluation import evaluating
from asyncsgd.experiment import Course, Experiment, Setup, device_of_worker, facts_of, model_at, save_model
from asyncsgd.fitting import find_micro_batches
from asyncsgd.flat import FlatModel, Layout, parameters_sha256
from asyncsgd.hardware import Hardware, by_ranks
from asyncsgd.optimizers import Optimizer, StepTakenByWorker
from asyncsgd.profiling import TRACE, Profile
from asyncsgd.records.console import Recorder, shown_metrics, teller
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Parts, Record, Resumed
from asyncsgd.records.locks import one_writer
from asyncsgd.records.machine import MachineLoad, Usage, available_cores, describe_environment
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, RunFolder
from asyncsgd.records.trackers import Tracking
from asyncsgd.rules import Asynchronous
from asyncsgd.runtime.all_ranks import TIMEOUT
from asyncsgd.runtime.base import POLL_SECONDS, Interrupted, NeverSaves, Result, TrainingClock
from asyncsgd.runtime.collective import Collective
from asyncsgd.runtime.computation import ModelGradients, whole_evaluation
from asyncsgd.runtime.dispatcher import Dispatcher
from asyncsgd.runtime.fit import Backend, Fit, Sink
from asyncsgd.runtime.memory import forget_peaks, peak_bytes
from asyncsgd.runtime.processes import Processes, fork_server
from asyncsgd.runtime.rank_process import (
    LOST_CONTACT,
    Meeting,
    Stages,
    Training,
    backend_of,
    is_lost_contact,
    serve_rank,
)
from asyncsgd.runtime.ranks import Launch, Noticeboard, end_with_launcher
from asyncsgd.runtime.single import Single
from asyncsgd.runtime.transport.codec import Codec, ProtocolError, decode_found, encode_found
from asyncsgd.runtime.transport.messages import ServerEnd
from asyncsgd.runtime.transport.process_group import ProcessGroupAddress, ProcessGroupServer
from asyncsgd.runtime.transport.shared_memory import SharedMemoryAddress, SharedMemoryServer
from asyncsgd.runtime.virtual import Virtual
from asyncsgd.runtime.worker_process import Assignment, StepHere, serve_gradients, serve_hogwild, set_up_process
from asyncsgd.runtime.workers import Dead, Workers
from asyncsgd.server import Server
from asyncsgd.settings.flags import flag_of
from asyncsgd.signals import StopRequest, held
from asyncsgd.stages import anatomy
from asyncsgd.tasks import is_built_in
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.checking import check
from asyncsgd.throughput import throughput
from asyncsgd.worker import check_compiler, checkpoint_activations, is_out_of_memory

EXIT_CODES = {DONE: 0, INTERRUPTED: 130}
"""Every other status exits with 1."""

TWICE = Result(INTERRUPTED, "interrupted by the user, twice: only the records are saved", has_parameters=False)

BEFORE_TRAINING = Result(INTERRUPTED, "interrupted by the user before training")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run in its leading process."""

    experiment: Experiment
    task: Task
    """Prepared."""
    course: Course
    unused: tuple[str, ...]
    """Parameters that the task's loss does not depend on; not looked for in the library's own tasks."""
    flat: FlatModel
    """The model bound to a flat vector: the initial parameters before training, the final ones after it."""
    init_sha256: str
    """Hash of the parameters that training starts from."""
    record: Recorder
    context: ForkServerContext | None
    stop_requested: StopRequest
    tell: Callable[[str], None]
    """Says a line to the user."""
    policy: Policy
    """When checkpoints are taken."""
    checkpoints: Checkpoints | None
    """None where nothing is written."""
    saver: RunSaver | None
    """Takes the states of a runtime in this process."""
    tracking: Tracking
    usage: Usage
    machine_load: MachineLoad

    @property
    def resume(self) -> Found | None:
        """The checkpoint that the run goes on from."""
        return None if self.record.folder is None else self.record.folder.resume

    def go_on(self, runtime: Fit) -> None:
        """Give a new runtime the state that the run goes on from, if there is one."""
        if self.resume is not None:
            runtime.load_state_dict(self.resume.load(self.flat.parameters.device))

    @property
    def setup(self) -> Setup:
        return self.experiment.setup

    @property
    def num_workers(self) -> int:
        return self.setup.runtime.num_workers

    def assignment(self, worker: int | None = None) -> Assignment:
        """What a process computes; see `Setup.assignment`."""
        assignment = _assignment(self.setup, self.course, self.task, worker)
        return (
            assignment if worker else dataclasses.replace(assignment, profile=self.profile, tells=not self.record.quiet)
        )

    @property
    def profile(self) -> Profile | None:
        """Of worker 0, if it is traced."""
        folder, number = self.record.folder, self.experiment.profile
        return None if folder is None or number is None else Profile(number, folder.path.absolute() / TRACE)


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
                result, summary = _finish(run, _advised(run, result))
            else:
                summary = experiment.summary() | {"status": result.status, "message": result.message}
                summary |= tracking.finish(result.status)
                _write_last(folder, summary, run)
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


def _write_last(folder: RunFolder | None, summary: Mapping[str, Any], run: Run | None) -> None:
    """Write the summary and close the folder; signals wait meanwhile. A resume that was refused leaves the old one."""
    if folder is None:
        return
    with held():
        if run is not None or folder.resume is None:
            folder.write_summary(summary)
        folder.close()


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
        board = None if launch.rank is None else Noticeboard()
        opened = _open(experiment, launch, board, folder, context, stop, quiet, receivers, tracking)
        stop.check()
        closing.enter_context(stop.during_a_run())
        run = opened
        run.usage.start()
        result = _TRAIN[type(experiment.setup.runtime)](run, board)
        if run.saver is not None:
            run.saver.finish()  # here, where it can be left
        return run, result, None
    except UsageError as error:
        summary = experiment.summary() | {"status": FAILED, "message": str(error)} | tracking.finish(FAILED)
        if run is not None:
            run.usage.finish()
        _write_last(folder, summary, run)
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
    board: Noticeboard | None,
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
        _check_deepspeed(setup.runtime, experiment.cache, setup.device)
    lines = [*experiment.describe(task, flat), *_describe(setup, course), *_stages(task, setup, flat)]
    policy = experiment.checkpoints(task)
    if resume is not None and policy == Policy():
        policy = Policy(**resume.checkpoint.policy)
    environment = _environment(setup, launch, board)
    init_sha256 = parameters_sha256(flat.layout, flat.parameters)
    if folder is not None:
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
    checkpoints = saver = None
    if folder is not None:
        checkpoints = Checkpoints(folder.path, policy, tell, began_from)
        saver = RunSaver(folder, policy, checkpoints, record)
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
        checkpoints,
        saver,
        tracking,
        usage,
        machine_load,
    )


def _check_deepspeed(runtime: modes.Pipeline, cache: Path, device: str) -> None:
    """Here and not in every rank: what is wrong is said once, and compiling takes a minute or two."""
    from asyncsgd.runtime.deepspeed_engine import load_helper, read_config

    if runtime.deepspeed_config is not None:
        read_config(Path(runtime.deepspeed_config))
    load_helper(cache / "extensions", torch.device(device))


def _environment(setup: Setup, launch: Launch, board: Noticeboard | None) -> dict[str, Any]:
    """What a run is made with; on several hosts also the hardware of every rank."""
    here = Hardware.here(setup.device)
    described = describe_environment(setup.runtime.threads, launch.num_workers)
    described |= {"device": setup.device, "num_devices": setup.num_devices, **dataclasses.asdict(here)}
    if board is not None and board.several_hosts:
        try:
            others = [_HARDWARE.decode(notice) for notice in board.heard()]
        except ProtocolError as error:
            raise RunError(f"the notice of a rank is not one: {error}; start the run again") from error
        described["hardware_of_ranks"] = by_ranks([here, *others])
    return described


def _began_from(task: Task, setup: Setup, init_sha256: str) -> dict[str, Any]:
    """Hashes of the data and the initial parameters; see `Checkpoints`."""
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


def _train_single(run: Run, board: Noticeboard | None) -> Result:
    """One process; ``--accumulate`` batches per update as that many pretend workers under the rule `Synchronous`."""
    runtime = run.setup.runtime
    assert isinstance(runtime, modes.InProcess)
    server = Server(run.flat.parameters, run.setup.rule, _optimizer(run), run.course.schedule)
    run.record.rule_acted, clock = server.rule_acted, TrainingClock()
    dispatcher = _dispatcher(run, server, clock, runtime.accumulate)
    worker = run.assignment().worker(run.flat)
    return _fit(run, dispatcher, Single(dispatcher, worker, clock, runtime.accumulate)).run()


def _dispatcher(
    run: Run, server: Server, clock: TrainingClock, num_workers: int, *, all_of_budget: bool = False
) -> Dispatcher:
    """The method of a run under the measured clock.

    Args:
        all_of_budget: whether workers are given no more than the budget, also by rules that are not in rounds.
    """
    budget, batch_size = run.course.budget, run.task.batch_size
    return Dispatcher(
        server,
        Batches(budget.samples if all_of_budget else budget.to_hand_out(server.rule), batch_size),
        num_workers=num_workers,
        batch_size=batch_size,
        clock=lambda: clock.seconds,
        spent=budget.spent_by,
    )


def _fit(run: Run, method: Dispatcher, backend: Backend, parameters: Callable[[], Tensor] | None = None) -> Fit:
    """The loop, where the run goes on from."""
    sink = Sink(run.record, run.saver or NeverSaves(), run.stop_requested)
    fit = Fit(method, backend, run.course.budget, run.course.evaluations, sink, parameters)
    run.go_on(fit)
    return fit


def _optimizer(run: Run) -> Optimizer:
    """The server's, on the run's own vector."""
    return run.setup.server_recipe.on(run.flat.parameters, run.flat.layout)


def _train_virtual(run: Run, board: Noticeboard | None) -> Result:
    """One process computes every worker's gradients, for real; their times are drawn from ``--speeds``."""
    assignment, runtime, setup, course = run.assignment(), run.setup.runtime, run.setup, run.course
    assert isinstance(runtime, modes.Virtual)
    worker = assignment.worker(FlatModel(run.task.model(setup.seed).to(run.flat.parameters.device)))
    server = Server(run.flat.parameters, setup.rule, _optimizer(run), course.schedule)
    run.record.rule_acted = server.rule_acted
    virtual = Virtual(
        server,
        ModelGradients(worker, assignment.inner),
        runtime.speeds.on(runtime.num_workers, setup.seed),
        Batches(course.budget.to_hand_out(setup.rule), run.task.batch_size),
        whole_evaluation(worker),
        num_workers=runtime.num_workers,
        budget=course.budget,
        evaluations=course.evaluations,
        batch_size=run.task.batch_size,
        report=run.record,
        network=runtime.network,
        churn=runtime.churn,
        saver=run.saver,
        stop_requested=run.stop_requested,
    )
    run.go_on(virtual)
    return virtual.run()


def _train_async(run: Run, board: Noticeboard | None) -> Result:
    """This process is the server; workers come from the fork server, or are torchrun's other ranks."""
    if run.setup.runtime.transport == "process_group":
        transport: ProcessGroupServer | SharedMemoryServer = ProcessGroupServer(run.num_workers, run.flat.layout.size)
    else:
        transport = SharedMemoryServer(run.num_workers, run.flat.layout.size)
    return _serve_workers(
        run,
        transport,
        board,
        serve_gradients,
        lambda vector: run.setup.server_recipe.on(*vector),
    )


def _train_hogwild(run: Run, board: Noticeboard | None) -> Result:
    """This process hands out batches and counts; the workers step the shared vector."""
    step = _step_here(run.setup, run.course)
    extra = 0
    if step.share_state:
        trial = step.recipe.on(torch.zeros(run.flat.layout.size), run.flat.layout)
        trial.create_state()
        extra = trial.state_size
    transport = SharedMemoryServer(run.num_workers, run.flat.layout.size, extra=extra, slots=False)
    return _serve_workers(run, transport, board, serve_hogwild, lambda vector: StepTakenByWorker(), step)


def _step_here(setup: Setup, course: Course) -> StepHere:
    assert isinstance(setup.runtime, modes.Hogwild)
    return StepHere(setup.recipe, course.schedule, setup.runtime.share_state)


def _serve_workers(
    run: Run,
    transport: SharedMemoryServer | ProcessGroupServer,
    board: Noticeboard | None,
    target: Callable[..., None],
    optimizer_on: Callable[[tuple[Tensor, Layout]], Optimizer | StepTakenByWorker],
    *arguments: object,
) -> Result:
    """Start the workers (all of them, or worker 0 where torchrun made the others) and serve them."""
    assert run.context is not None
    started_here = range(run.num_workers) if board is None else range(1)
    address = transport.address
    if board is not None:
        board.put(_notice(run, address))
    try:
        with Processes(run.context) as processes:
            for worker in started_here:
                processes.start(worker, target, run.assignment(worker), address, worker, *arguments)
                run.usage.follow(f"worker {worker}", processes.pid(worker))
            optimizer = optimizer_on(_vector(run, transport))
            result = _serve(run, transport, run.num_workers, optimizer, processes.how_it_ended)
            if result.status == INTERRUPTED:
                processes.stop_seconds = 1.0  # some may still be starting, and cannot hear that they should not
            return result
    finally:
        transport.close()


def _vector(run: Run, transport: ServerEnd) -> tuple[Tensor, Layout]:
    """The server's vector, with the initial parameters in it, and where the tensors lie in it."""
    if transport.parameters.data_ptr() != run.flat.parameters.data_ptr():
        with torch.no_grad():
            transport.parameters.copy_(run.flat.parameters)
    return transport.parameters, run.flat.layout


def _serve(
    run: Run,
    transport: ServerEnd,
    num_workers: int,
    optimizer: Optimizer | StepTakenByWorker,
    dead: Dead = lambda worker, seconds: None,
) -> Result:
    stepping = transport if isinstance(optimizer, StepTakenByWorker) else None
    assert stepping is None or isinstance(stepping, SharedMemoryServer)
    server = Server(transport.parameters, run.setup.rule, optimizer, run.course.schedule, transport.writing)
    run.record.rule_acted, clock = server.rule_acted, TrainingClock()
    # A step that was taken cannot be discarded.
    dispatcher = _dispatcher(run, server, clock, num_workers, all_of_budget=stepping is not None)
    workers = Workers(
        dispatcher,
        transport,
        run.task,
        num_workers,
        clock,
        stepping=stepping,
        dead=dead,
        stop_requested=run.stop_requested,
    )
    fit = _fit(run, dispatcher, workers)
    try:
        workers.meet(run.flat.layout.fingerprint)
        result = fit.run()
    except Interrupted:  # while workers came up
        result = Result(INTERRUPTED, "interrupted by the user")
    finally:
        for left in workers.close():  # nothing may change any more, so the rule does not hear of them
            run.record(dispatcher.drop(left.worker, left.reason))
    if transport.parameters.data_ptr() != run.flat.parameters.data_ptr():
        with torch.no_grad():
            run.flat.parameters.copy_(transport.parameters)
    return result


def _train_sync(run: Run, board: Noticeboard | None) -> Result:
    """DistributedDataParallel or a pipeline. This process is rank 0, and starts the others unless torchrun has."""
    resume = None if run.resume is None else (run.resume.folder.resolve(), run.resume.checkpoint.name)
    training, number = _training(run.setup, run.course, run.experiment.cache, bool(run.unused), resume), run.num_workers
    if board is not None:
        board.put(_notice(run, _Resume(*map(str, resume or ("", "")))))
        _init_process_group(board, run.setup.device)
        try:
            return _lead_ranks(run, training)
        except RuntimeError as error:
            if is_lost_contact(error):  # this rank has the parameters of the last step that all have taken
                return Result(FAILED, f"a rank is gone: {str(error).splitlines()[0]}")
            raise
    assert run.context is not None
    with (
        tempfile.TemporaryDirectory(prefix="asyncsgd-", ignore_cleanup_errors=True) as folder,
        Processes(run.context) as processes,
    ):
        meeting = Meeting(Path(folder), number)
        for rank in range(1, number):
            processes.start(rank, serve_rank, run.assignment(rank), training, meeting, rank)
            run.usage.follow(f"worker {rank}", processes.pid(rank))
        while not meeting.complete(POLL_SECONDS):
            if run.stop_requested():
                processes.stop_seconds = 1.0
                return Result(INTERRUPTED, "interrupted by the user")
            if any(processes.exit_code(rank) is not None for rank in range(1, number)):
                raise _rank_is_lost(processes, number)
        try:
            with meeting.group(0, run.assignment().device):
                return _lead_ranks(run, training)
        except RuntimeError as error:
            if is_lost_contact(error):
                raise _rank_is_lost(processes, number) from error
            raise


def _lead_ranks(run: Run, training: Training) -> Result:
    """Be rank 0, on the initialised process group: run the loop, and let the others go at its end."""
    course, task, runtime = run.course, run.task, run.setup.runtime
    ranks, clock = training.in_step(run.assignment(), run.flat), TrainingClock()
    optimizer, ahead, num_workers = StepTakenByWorker(), None, len(ranks.replica.speakers)
    rule = run.setup.rule
    if isinstance(runtime, modes.Pipeline) and runtime.schedule == "2bw":
        from asyncsgd.runtime.two_buffered import Ahead

        rule, num_workers = Asynchronous(), 2
        ahead = Ahead(course.budget, course.evaluations, task.batch_size)
    dispatcher = _dispatcher(run, Server(torch.empty(0), rule, optimizer, course.schedule), clock, num_workers)
    fit = _fit(run, dispatcher, Collective(dispatcher, ranks, optimizer, clock, num_workers, ahead), ranks.parameters)
    result, parameters = fit.run(), ranks.parameters()
    if parameters is not run.flat.parameters:
        with torch.no_grad():
            run.flat.parameters.copy_(parameters)
    ranks.stop()
    return result


def _assignment(setup: Setup, course: Course, task: Task, worker: int | None) -> Assignment:
    num_batches = course.budget.num_batches(task.batch_size)
    return dataclasses.replace(setup.assignment(task, worker), num_batches=num_batches)


def _training(
    setup: Setup, course: Course, cache: Path, find_unused: bool = False, resume: tuple[Path, str] | None = None
) -> Training:
    runtime = setup.runtime
    stages = None
    if isinstance(runtime, modes.Pipeline):
        config = None if runtime.deepspeed_config is None else Path(runtime.deepspeed_config).absolute()
        stages = Stages(runtime.stages, runtime.schedule, cache / "extensions", config)
    return Training(setup.recipe, course.schedule, find_unused, resume, stages)


def _join_ranks(board: Noticeboard, assignment: Assignment, device: str, training: Training) -> NoReturn:
    """A rank of torchrun's other than 0; ends the process."""
    set_up_process(assignment.threads)
    _init_process_group(board, device)
    training.in_step(assignment, training.model(assignment)).follow()
    sys.stdout.flush()
    sys.stderr.flush()
    # A teardown may find threads of the group still at work, and end with SIGABRT after all was well.
    os._exit(0)


def _init_process_group(board: Noticeboard, device: str) -> None:
    backend = backend_of(device, board.world_size)
    dist.init_process_group(backend, store=board.store, rank=board.rank, world_size=board.world_size, timeout=TIMEOUT)


def _rank_is_lost(processes: Processes, num_workers: int) -> RunError:
    rank, reason = _first_lost(processes, num_workers)
    return RunError(
        f"rank {rank} is lost ({reason}) and synchronous training cannot go on without it; the other ranks "
        f"were stopped. --mode async goes on when a worker is lost"
    )


def _first_lost(processes: Processes, num_workers: int) -> tuple[int, str]:
    """The rank that failed first, and how it ended. The others fail after it, because their collectives do."""
    ends = {rank: processes.how_it_ended(rank, 2.0) for rank in range(num_workers)}
    known = {rank: end for rank, end in ends.items() if end is not None and processes.exit_code(rank) != 0}
    to_blame = {rank: end for rank, end in known.items() if not end.endswith(f"code {LOST_CONTACT}")} or known
    return min(to_blame.items(), default=(0, "its connection was closed"))


_TRAIN: dict[type[modes.Runtime], Callable[[Run, Noticeboard | None], Result]] = {
    modes.InProcess: _train_single,
    modes.AllReduce: _train_sync,
    modes.Pipeline: _train_sync,
    modes.Processes: _train_async,
    modes.Hogwild: _train_hogwild,
    modes.Virtual: _train_virtual,
}


@dataclasses.dataclass(frozen=True)
class _Resume:
    """What the ranks of a synchronous run go on from; empty: nothing."""

    folder: str
    """Of the run; every rank can read it."""
    checkpoint: str


_ADDRESSES = Codec(SharedMemoryAddress, ProcessGroupAddress, _Resume)
"""What rank 0 tells the others, beside what its task has found out. Every rank knows from its own settings what to do
with it. So a stranger who writes in rank 0's place can name no code.
"""


_HARDWARE = Codec(Hardware)
"""What the others tell rank 0 where they are on several hosts."""


def _notice(run: Run, address: SharedMemoryAddress | ProcessGroupAddress | _Resume) -> bytes:
    """What the other ranks of torchrun are told: what the task has found out, the parts of a batch, the address."""
    return b"\n".join((encode_found(run.task), b"%d" % run.setup.micro_batches, _ADDRESSES.encode(address)))


def follow(experiment: Experiment) -> int:
    """A rank other than 0: wait for what rank 0 has prepared and do its part; return the exit code."""
    end_with_launcher(leads=False)
    board, setup = Noticeboard(), experiment.setup
    if board.several_hosts:
        board.say(_HARDWARE.encode(Hardware.here(setup.device)))
    try:
        found, parts, address_line = board.get().split(b"\n")
        task, address = decode_found(experiment.task, found), _ADDRESSES.decode(address_line)
        setup = dataclasses.replace(setup, micro_batches=int(parts))
    except (ProtocolError, ValueError) as error:
        raise RunError(f"the notice of rank 0 is not one: {error}; start the run again") from error
    course = experiment.course(task)
    assignment = _assignment(setup, course, task, board.rank)
    if not setup.runtime.has_server:
        assert isinstance(address, _Resume)
        resume = (Path(address.folder), address.checkpoint) if address.folder else None
        _join_ranks(board, assignment, setup.device, _training(setup, course, experiment.cache, resume=resume))
    if isinstance(setup.runtime, modes.Hogwild):
        serve_hogwild(assignment, address, board.rank, _step_here(setup, course))
    serve_gradients(assignment, address, board.rank)
    return 0  # not reached: each ends the process


def _finish(run: Run, result: Result) -> tuple[Result, dict[str, Any]]:
    """Save the model, write the summary and tell the user the results. Return how the run ended, and the summary."""
    totals, delays, acted = run.record.totals, run.record.totals.delays, run.record.rule_acted
    folder = run.record.folder
    sha256, facts = None, facts_of(run.task, run.setup.seed)
    try:
        if result.has_parameters:
            sha256 = parameters_sha256(run.flat.layout, run.flat.parameters)
            if result.status == DONE:
                with evaluating(run.flat.model):
                    facts |= run.task.final(run.flat.model)
            if run.experiment.saves_model and folder is not None:
                summary = _summary(run, result, sha256, facts)
                save_model(run.experiment, run.task, run.flat.model, folder.path / LAST_MODEL, summary, folder.path)
                _save_best(run, result, summary)
        else:
            totals.last = None  # the loss of another version than the run's last one
    except KeyboardInterrupt:
        sha256, result = None, TWICE
    except (OSError, SafetensorError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        result = Result(FAILED, f"the model could not be saved ({what}); mend that and run again")
    cost: dict[str, Any] = {}
    # The run has ended; only what it cost is not known then.
    with contextlib.suppress(KeyboardInterrupt):
        cost = _cost(run, result, totals.as_summary())
    summary = _summary(run, result, sha256, facts) | cost | run.tracking.finish(result.status)
    _write_last(folder, summary, run)
    if result.status == DONE and result.message:
        run.tell(result.message)
    if totals.last is not None:
        rate = (
            f"{totals.num_samples / totals.train_seconds:.0f} samples/s" if totals.train_seconds > 0 else "no training"
        )
        metrics = shown_metrics(totals.last.metrics)
        run.tell("   ".join(filter(None, (f"final  eval loss {totals.last.loss:.4f}", metrics, rate))))
        for name, numbers in totals.last.details.get("evaluations", {}).items():
            run.tell(f"       {name} loss {numbers['loss']:.4f}   {shown_metrics(numbers['metrics'])}".rstrip())
    delay = delays.summary()
    if delays:
        run.tell(
            f"delay  p50 {delay['p50']}   p95 {delay['p95']}   max {delay['max']}   mean {delay['mean']:.2f} updates"
        )
    if acted is not None and (sentence := acted.describe(run.setup.rule.name, run.num_workers)):
        run.tell(sentence)
    if run.profile is not None:
        run.tell(run.profile.describe())
    run.tell(f"{result.status.lower():6} {'' if folder is None else folder.path}".rstrip())
    return result, summary


@contextlib.contextmanager
def _holding(flat: FlatModel, parameters: Tensor) -> Iterator[None]:
    """Let the model of `flat` have other parameters meanwhile."""
    before = flat.parameters.clone()
    with torch.no_grad():
        flat.parameters.copy_(parameters)
    try:
        yield
    finally:
        with torch.no_grad():
            flat.parameters.copy_(before)


def _save_best(run: Run, result: Result, summary: Mapping[str, Any]) -> None:
    """Write the model with the lowest evaluation loss beside the last one."""
    folder, best = run.record.folder, result.best
    if best is None or result.best_parameters is None or folder is None:
        return
    known = {key: value for key, value in summary.items() if key not in ("status", "message", "delay")}
    known |= model_at(**vars(best)) | {"parameters_sha256": summary["best"]["parameters_sha256"]}
    with _holding(run.flat, result.best_parameters):
        save_model(run.experiment, run.task, run.flat.model, folder.path / BEST_MODEL, known, folder.path)


def _best_of(run: Run, result: Result) -> dict[str, Any] | None:
    """What the summary says of the version with the lowest evaluation loss; None where it was not kept."""
    if result.best is None or result.best_parameters is None:
        return None
    sha256 = parameters_sha256(run.flat.layout, result.best_parameters)
    return dataclasses.asdict(result.best) | {"parameters_sha256": sha256}


def _summary(run: Run, result: Result, sha256: str | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    acted = run.record.rule_acted
    return (
        {"status": result.status, "message": result.message, "stopped_early": result.stopped_early}
        | run.experiment.summary()
        | run.record.totals.as_summary()
        | {
            "micro_batches": run.record.totals.micro_batches,
            "rule_acted": None if acted is None else dataclasses.asdict(acted),
            "num_parameters": run.flat.layout.num_parameters,
            "init_sha256": run.init_sha256,
            "parameters_sha256": sha256,
            "best": _best_of(run, result),
            **facts,
        }
    )


def _cost(run: Run, result: Result, totals: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary says of memory, of the machine's use and of rates; None where it is not known."""
    runtime, setup = run.setup.runtime, run.setup
    resident, cuda = peak_bytes(run.flat.parameters.device)
    cost: dict[str, Any] = {
        "memory": {"leader": [resident, cuda], "workers": sorted(run.record.totals.peak_bytes.items())},
        "usage": run.usage.finish(),
        "throughput": None,
    }
    if runtime.clock == "measured":
        cost["machine_load"] = run.machine_load.summary()
    if result.status == DONE and runtime.clock == "measured":
        device = device_of_worker(setup.device, 0)
        devices = available_cores() // runtime.threads if device == "cpu" else torch.cuda.device_count()
        cost["throughput"] = throughput(
            run.task,
            run.flat.model,
            totals,
            seed=setup.seed,
            device=device,
            num_devices=max(1, min(run.num_workers, devices)),
            precision=setup.precision,
        )
    return cost
