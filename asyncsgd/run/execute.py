"""Train a prepared run: server, workers, backend and loop of each runtime.

`execute` runs in the leading process. The other synchronous ranks that torchrun made run
`asyncsgd.run.other_host.follow_as_rank`. Each `_train_...` function builds the method and the backend of one runtime;
the loop is the same for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from asyncsgd.backends.hosts import Hosts
from asyncsgd.backends.launch import RAISED, REASONS, ChildProcesses, World
from asyncsgd.backends.link import Inherited, Link
from asyncsgd.backends.pair import LinkSource, Pair, Rendezvous
from asyncsgd.backends.processes import HowItEnded, ProcessBackend
from asyncsgd.backends.rank_main import make_rank, run_rank
from asyncsgd.backends.ranks import (
    LOST_CONTACT,
    RanksBackend,
    group_size_function,
    is_lost_contact,
)
from asyncsgd.backends.segment import Segment
from asyncsgd.backends.single import SingleBackend
from asyncsgd.backends.virtual import VirtualBackend
from asyncsgd.backends.worker_main import run_worker
from asyncsgd.core.batches import BatchStream, indices_of
from asyncsgd.core.checkpoints import Found, Saver
from asyncsgd.core.flat import FlatModel, Layout
from asyncsgd.core.limits import POLL_SECONDS, Interrupted, Result, TrainingClock
from asyncsgd.core.loop import Hooks, Loop
from asyncsgd.core.optimizers import Optimizer, StepTakenByWorker
from asyncsgd.core.peers import peers_of
from asyncsgd.core.peers.models import Peers
from asyncsgd.core.protocol import Backend, Method, Work
from asyncsgd.core.server import Server
from asyncsgd.core.signals import StopRequest
from asyncsgd.core.state import restore
from asyncsgd.errors import RunError
from asyncsgd.records.console import Recorder
from asyncsgd.records.events import FAILED, INTERRUPTED
from asyncsgd.records.machine import MachineWatch
from asyncsgd.records.tracking import Tracking
from asyncsgd.rules import Asynchronous
from asyncsgd.rules.contract import PeerRule, Rule
from asyncsgd.run import runtimes
from asyncsgd.run.callbacks import Callbacks
from asyncsgd.run.found import found_by
from asyncsgd.run.run import Run
from asyncsgd.tasks.base import Task, tensors_in
from asyncsgd.worker.computation import ModelGradients, whole_evaluation
from asyncsgd.worker.profile import TRACE, Profile
from asyncsgd.worker.worker import Worker


@dataclasses.dataclass(frozen=True)
class Live:
    """A run that is going on, in its leading process."""

    run: Run
    """The run, prepared."""
    flat: FlatModel
    """The model bound to a flat vector: the initial parameters before training, the final ones after it."""
    facts: Mapping[str, Any]
    """Facts on the task, the data and the initial model, as they are written to summary.json."""
    record: Recorder
    """Receives every record of the run."""
    context: ForkServerContext | None
    """A fork server that starts workers; None: there are none to start."""
    stop_requested: StopRequest
    """Says whether the user has asked to stop."""
    tell: Callable[[str], None]
    """Says a line to the user."""
    saver: Saver | None
    """Takes the states for checkpoints; None if nothing is written."""
    tracking: Tracking
    """Shows the run in trackers."""
    machine: MachineWatch
    """Notes how the machine is used while the run goes on."""
    callbacks: Callbacks | None = None
    hosts: Hosts | None = None
    """The other hosts of an asynchronous run; None if it is on one host."""

    @property
    def resume(self) -> Found | None:
        """The checkpoint from which the run goes on; None if it is new."""
        return None if self.record.folder is None else self.record.folder.resume

    @property
    def num_workers(self) -> int:
        return self.run.runtime.num_workers

    def worker(self, flat: FlatModel) -> Worker:
        """Make worker 0, which computes in this process, on `flat`; `as_sent_to` chooses its device."""
        return self.run.as_sent_to(0).worker(flat, self.profile, tells_compile_seconds=not self.record.quiet)

    @property
    def profile(self) -> Profile | None:
        folder = self.record.folder
        num_gradients = self.run.output.profile
        return (
            None if folder is None or num_gradients is None else Profile(num_gradients, folder.path.absolute() / TRACE)
        )


def method_of(
    run: Run,
    parameters: Tensor,
    layout: Layout,
    batches: BatchStream,
    *,
    rule: Rule | None = None,
    optimizer: Optimizer | StepTakenByWorker | None = None,
    **named: Any,
) -> Server | Peers[Any]:
    """Make the server of a run, or its peers.

    Args:
        rule: None: the run's.
        optimizer: the optimizer of the server; None: the run's, on `parameters`. That is `Run.server_recipe`, plain SGD
            in rules with local steps, where `Run.recipe` is what the workers step.
        named: further arguments of `Server` and `Peers`, but for the batch size and the seed, which are the run's.
    """
    rule = rule or run.rule
    named = named | {"batch_size": run.task.batch_size}
    if isinstance(rule, PeerRule):

        def optimizer_on(vector: Tensor) -> Optimizer:
            return run.recipe.on(vector, layout)

        return peers_of(rule, parameters, optimizer_on, run.schedule, batches, seed=run.seed, **named)
    optimizer = optimizer or run.server_recipe.on(parameters, layout)
    return Server(parameters, rule, optimizer, run.schedule, batches, **named)


def _method(
    live: Live,
    parameters: Tensor,
    clock: Callable[[], float],
    *,
    rule: Rule | None = None,
    num_workers: int | None = None,
    ranks_step: bool = False,
    **named: Any,
) -> Server | Peers[Any]:
    """`method_of` with the budget, the statistics and, by default, the workers of a run that is going on.

    Args:
        ranks_step: whether synchronous ranks hold the parameters and step them. The server then only counts.
        named: further arguments of `method_of`.
    """
    run = live.run
    rule = rule or run.rule
    samples_to_hand_out = run.limits.to_hand_out(rule)  # None, no end, for rules without rounds
    if run.runtime.steps_in_workers:  # a step that a Hogwild worker took cannot be discarded
        samples_to_hand_out = run.limits.samples
    batches = BatchStream(samples_to_hand_out, run.task.batch_size)
    method = method_of(
        run,
        parameters,
        live.flat.layout,
        batches,
        rule=rule,
        num_workers=num_workers or live.num_workers,
        samples=run.limits.samples,
        clock=clock,
        statistics=None if ranks_step else live.flat.statistics,
        **named,
    )
    # Where ranks take the steps, the server only counts, and its rule does not act.
    if isinstance(method, Server) and not ranks_step:
        live.record.rule_acted = method.rule_acted
    return method


def _loop(live: Live, method: Method, backend: Backend, parameters: Callable[[], Tensor] | None = None) -> Loop:
    """Make the loop, with the state of the checkpoint if the run is resumed."""
    live.stop_requested.begin_step()  # a turn of the loop begins, with the first evaluation
    hooks = Hooks(
        live.record,
        live.saver,
        live.stop_requested.begin_step,  # answers whether to stop, and times each turn: Ctrl-C waits for its end
        lambda work: _ignored_targets(live.run, work),
        live.callbacks,
    )
    limits = live.run.limits
    statistics = live.flat.statistics
    loop = Loop(method, backend, limits, live.run.budget.evaluations, hooks, parameters, statistics)
    if live.resume is not None:
        restore(loop, live.resume.load(live.flat.parameters.device, live.run.rule))
    return loop


IGNORED = -100
"""A target that does not count, for torch's losses."""


def _ignored_targets(run: Run, work: Work) -> str:
    """Return what is wrong if a batch of `work` has no target that counts and its task does not say so; else an empty
    text.
    """
    task = run.task
    if type(task).weight is not Task.weight:  # the task counts its targets itself
        return ""
    data = task.data(run.seed)
    for index in indices_of(work.batches):
        for tensor in tensors_in(data.batch(0, index)):  # of stream 0, which all workers share
            if tensor.dtype == torch.int64 and tensor.numel() and bool((tensor == IGNORED).all()):
                return (
                    f"no target of batch {index} counts (all are {IGNORED}), and {type(task).__name__} does not say "
                    f"so; give it weight(batch), the number of targets that count, and such a batch is left out"
                )
    return ""


def _train_single(live: Live, torchrun_world: World | None) -> Result:
    """One process; ``--accumulate`` batches per update as that many simulated workers under the rule `Synchronous`."""
    runtime = live.run.runtime
    assert isinstance(runtime, runtimes.InProcess)
    clock = TrainingClock()
    worker = live.worker(live.flat)
    method = _method(live, live.flat.parameters, lambda: clock.seconds, num_workers=runtime.accumulate)
    return _loop(live, method, SingleBackend(worker, clock, runtime.accumulate)).run()


def _train_virtual(live: Live, torchrun_world: World | None) -> Result:
    """One process computes every worker's gradients, for real; their times are drawn from ``--times``."""
    run = live.run
    runtime = run.runtime
    assert isinstance(runtime, runtimes.Virtual)
    parameters = live.flat.parameters
    statistics = live.flat.statistics
    # Gradients are computed at the parameters of several versions, so on a model beside the one that has the newest.
    worker = live.worker(run.flat(device=parameters.device))
    backend = VirtualBackend(
        parameters,
        ModelGradients(worker, run.recipe),
        runtime.speeds.on(runtime.num_workers, run.seed),
        whole_evaluation(worker, statistics),
        num_workers=runtime.num_workers,
        network=runtime.network,
        churn=runtime.churn,
        lock_step=isinstance(run.rule, PeerRule) and run.rule.lock_step,
        statistics=statistics,
    )
    method = _method(live, parameters, lambda: backend.now)
    result = _loop(live, method, backend).run()
    # To read this property lets peers write the mean of their models into `live.flat.parameters`.
    _ = method.parameters
    return result


def _train_async(live: Live, torchrun_world: World | None) -> Result:
    """This process is the server, and starts the workers."""
    statistics = live.flat.statistics
    num_statistics = 0 if statistics is None else statistics.size
    segment = Segment(live.flat.layout.size, live.num_workers, num_statistics=num_statistics)
    segment.parameters.copy_(live.flat.parameters)  # before the optimizer is made, which may look at them
    if statistics is not None:
        statistics.use_memory(segment.statistics)
    return _start_workers_and_serve(live, segment, live.run.server_recipe.on(segment.parameters, live.flat.layout))


def _train_hogwild(live: Live, torchrun_world: World | None) -> Result:
    """This process hands out batches and counts; the workers step the shared vector."""
    run = live.run
    size = live.flat.layout.size
    shared_state_size = 0
    assert isinstance(run.runtime, runtimes.Hogwild)
    if run.runtime.share_state:
        # An optimizer knows how large its state is after a step, so one is made and thrown away.
        trial = run.recipe.on(torch.zeros(size, dtype=torch.float32), live.flat.layout)
        trial.create_state()
        shared_state_size = trial.state_size
    # There are no running statistics: models that have some are refused.
    segment = Segment(size, num_slots=0, extra=shared_state_size)
    segment.parameters.copy_(live.flat.parameters)
    return _start_workers_and_serve(live, segment, StepTakenByWorker())


def _start_workers_and_serve(live: Live, segment: Segment, optimizer: Optimizer | StepTakenByWorker) -> Result:
    """Start the workers and serve them."""
    assert live.context is not None
    shares = live.run.runtime.transport == "shared_memory"
    links: dict[int, Link] = {}
    with contextlib.ExitStack() as closing:
        # Workers that do not share memory have a `Pair` each, whose two ends find each other in a private folder.
        rendezvous = Rendezvous() if shares else Rendezvous(closing.enter_context(_private_folder()))
        processes = closing.enter_context(ChildProcesses(live.context))
        here = range(live.num_workers) if live.hosts is None else live.hosts.this_host.workers
        for worker in here:
            pipe = None
            if shares:
                ours, pipe = live.context.Pipe()
                links[worker] = Link(ours)
                link_source: LinkSource = Inherited(pipe, segment)
            else:
                slot = [segment.slots[worker]]
                if len(segment.statistics):
                    slot.append(segment.moved[worker])
                links[worker] = Pair(rendezvous, f"worker{worker}", serves=True, slot=slot)
                link_source = rendezvous
            profile = None if worker else live.profile
            tells_compile_seconds = worker == 0 and not live.record.quiet
            processes.start(
                worker, run_worker, live.run.as_sent_to(worker), link_source, worker, profile, tells_compile_seconds
            )
            live.machine.follow(f"worker {worker}", processes.pid(worker))
            if pipe is not None:
                pipe.close()  # the worker has the only other end now, so its death is the end of the file
        if live.hosts is not None:
            links |= live.hosts.connect_workers(segment)
        result = _run_server(live, links, segment, optimizer, processes.how_it_ended)
        if result.status == INTERRUPTED:
            processes.stop_seconds = 1.0  # some may still be starting, and do not hear `Stop` yet
        with torch.no_grad():
            live.flat.parameters.copy_(segment.parameters)
        return result


def _run_server(
    live: Live,
    links: Mapping[int, Link],
    segment: Segment,
    optimizer: Optimizer | StepTakenByWorker,
    how_it_ended: HowItEnded,
) -> Result:
    """Run the loop of the server in this process, and tell the workers to stop at its end."""
    clock = TrainingClock()
    server = _method(live, segment.parameters, lambda: clock.seconds, optimizer=optimizer, writing=segment.writing)
    assert isinstance(server, Server)  # peers are on the virtual clock alone
    workers = ProcessBackend(
        links,
        segment,
        live.run.task,
        clock,
        how_it_ended=how_it_ended,
        stop_requested=live.stop_requested,
        statistics=live.flat.statistics,
    )
    try:
        workers.wait_until_ready(live.flat.fingerprint)
        return _loop(live, server, workers).run()
    except Interrupted:  # while workers came up
        return _interrupted_before(live)
    finally:
        for left in workers.close():  # nothing may change any more, so the rule does not hear of them
            live.record(server.late_leave(left.worker, left.reason))


def _interrupted_before(live: Live) -> Result:
    """The result of a run whose processes have not come up. This process has the initial parameters, which are those of
    the run unless it was to go on from a checkpoint.
    """
    return Result(INTERRUPTED, "interrupted by the user", has_parameters=live.resume is None)


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in which processes find each other. This user alone can enter it."""
    return tempfile.TemporaryDirectory(prefix="asyncsgd-", ignore_cleanup_errors=True)


def _train_sync(live: Live, torchrun_world: World | None) -> Result:
    """DistributedDataParallel or a pipeline. This process is rank 0, and starts the others unless torchrun has."""
    resume = None if live.resume is None else (live.resume.folder.resolve(), live.resume.checkpoint.name)
    number = live.num_workers
    worker = None
    if not live.run.runtime.cuts_model:
        worker = live.worker(live.flat)
    with contextlib.ExitStack() as closing:
        world = torchrun_world
        processes = None
        if world is not None:
            world.put("run", _notice(live, resume))
        else:
            world = World(0, number, closing.enter_context(_private_folder()))
            assert live.context is not None
            processes = closing.enter_context(ChildProcesses(live.context))
            for rank in range(1, number):
                there = World(rank, number, world.folder)
                processes.start(rank, run_rank, live.run.as_sent_to(rank), resume, there)
                live.machine.follow(f"worker {rank}", processes.pid(rank))
        while not world.wait_for_all(POLL_SECONDS):
            if live.stop_requested():
                if processes is not None:
                    processes.stop_seconds = 1.0
                return _interrupted_before(live)
            if processes is not None and any(processes.exit_code(rank) is not None for rank in range(1, number)):
                raise _rank_is_lost(processes, number, None)
        try:
            with world.group(live.run.as_sent_to(0).device, live.run.output.interface):
                return _run_rank_zero(live, worker, resume)
        except RuntimeError as error:
            if not is_lost_contact(error):
                raise
            if processes is not None:
                raise _rank_is_lost(processes, number, error) from error
            # This rank has the parameters of the last step that all have taken, unless they lie on several ranks.
            is_whole = not live.run.runtime.cuts_model
            why = f"a rank is gone, torchrun says which: {str(error).splitlines()[0]}"
            return Result(FAILED, why, has_parameters=is_whole)


def _run_rank_zero(live: Live, worker: Worker | None, resume: tuple[Path, str] | None) -> Result:
    """Be rank 0, on the initialised process group: run the loop, and let the others go at its end."""
    run = live.run
    runtime = run.runtime
    ranks = make_rank(run.as_sent_to(0), worker, resume)
    clock = TrainingClock()
    optimizer = StepTakenByWorker()
    group_size = None
    num_workers = len(ranks.replica.last_ranks)  # the last rank of each replica computes its loss
    rule: Rule | None = None
    if runtime.has_two_versions:
        # PipeDream-2BW keeps two versions of the weights: two groups of micro-batches are under way, as gradients of
        # two asynchronous workers would be. This server only counts; the delay of 1, which is the run's rule, comes
        # about in the ranks.
        rule = Asynchronous()
        num_workers = 2
        # Batches are computed in groups, which end at the next evaluation.
        group_size = group_size_function(run.limits, run.budget.evaluations, run.task.batch_size)
    server = _method(
        live,
        torch.empty(0),
        lambda: clock.seconds,
        rule=rule,
        num_workers=num_workers,
        ranks_step=True,
        optimizer=optimizer,
    )
    # Through the optimizer the ranks tell the norm of their step.
    backend = RanksBackend(ranks, optimizer, clock, num_workers, group_size)
    loop = _loop(live, server, backend, ranks.parameters)
    result = loop.run()
    parameters = ranks.parameters()
    if parameters is not live.flat.parameters:
        with torch.no_grad():
            live.flat.parameters.copy_(parameters)
    ranks.stop()
    return result


def _rank_is_lost(processes: ChildProcesses, num_workers: int, error: RuntimeError | None) -> RunError:
    rank, reason = _first_lost(processes, num_workers, error)
    lost = (
        f"rank {rank} is lost ({reason}) and synchronous training cannot go on without it; the other ranks were stopped"
    )
    if reason == REASONS[RAISED]:  # each worker of an asynchronous run would raise it too
        return RunError(lost)
    return RunError(f"{lost}. --mode async goes on when a worker is lost")


def _first_lost(processes: ChildProcesses, num_workers: int, error: RuntimeError | None) -> tuple[int, str]:
    """The rank to blame, and how it ended: the first by number of those that did not merely lose contact to another
    one. If all have lost contact, it is the first of them, and what this process has met is told too.

    Args:
        error: what this process has met; None: it has not been in contact with the others.

    >>> from types import SimpleNamespace
    >>> all_live = SimpleNamespace(how_it_ended=lambda rank, seconds: None)
    >>> _first_lost(all_live, 2, RuntimeError("Timed out"))
    (0, 'its connection was closed; rank 0 met: Timed out')
    """
    failed = {}
    failed_by_itself = {}
    for rank in range(num_workers):
        how_it_ended = processes.how_it_ended(rank, 2.0)
        if how_it_ended is None:  # it lives, or it is this process
            continue
        exit_code = processes.exit_code(rank)
        if exit_code == 0:
            continue
        failed[rank] = how_it_ended
        if exit_code != LOST_CONTACT:
            failed_by_itself[rank] = how_it_ended
    to_blame = failed_by_itself or failed
    rank, how = min(to_blame.items(), default=(0, "its connection was closed"))
    if error is not None and not failed_by_itself:
        how += f"; rank 0 met: {str(error).splitlines()[0]}"
    return rank, how


_TRAIN: dict[type[runtimes.Runtime], Callable[[Live, World | None], Result]] = {
    runtimes.InProcess: _train_single,
    runtimes.AllReduce: _train_sync,
    runtimes.Pipeline: _train_sync,
    runtimes.Processes: _train_async,
    runtimes.Hogwild: _train_hogwild,
    runtimes.Virtual: _train_virtual,
}


def execute(live: Live, torchrun_world: World | None) -> Result:
    """Train.

    Args:
        torchrun_world: where the ranks that torchrun made meet; None if this process starts all others.
    """
    return _TRAIN[type(live.run.runtime)](live, torchrun_world)


class Notice(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What rank 0 tells the others. It holds data, and no names of code: each rank knows from its own settings what to
    do with it. So a stranger who writes in rank 0's place cannot make a rank run anything.
    """

    found: dict[str, Any]
    """Field -> value, of the fields of the task that its `prepare` has found out."""
    micro_batches: int
    """The number of parts in which a batch is computed."""
    resume: tuple[str, str] | None = None
    """(the folder of the run that is resumed, as rank 0's host has it; the name of its checkpoint). None: it is new."""
    changing_buffers: tuple[str, ...] | None = None
    """The buffers that forward passes change beside running statistics that the library knows."""


def _notice(live: Live, resume: tuple[Path, str] | None) -> bytes:
    found = found_by(live.run.task)
    checkpoint = None if resume is None else (str(resume[0]), resume[1])
    return msgspec.json.encode(Notice(found, live.run.micro_batches, checkpoint, live.run.changing_buffers))
