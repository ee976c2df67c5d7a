"""The server: parameters, version, optimizer and batches. It alone changes the parameters, except in Hogwild, where
workers step them, and among synchronous ranks and peers, which have copies of their own.

`Server.react` hands what happened to the rule and carries out its reply: at most one optimizer step a reply, version
plus one. It starts workers as the rule asks (`asyncsgd.core.starts`), takes back the batches of what was abandoned or
lost, and writes the record. It knows no process and no message: a backend carries gradients, and says what happens
next.

Shapes: P parameters (gaps of the flat vector included), S running statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor

from asyncsgd.core.batches import BatchSource
from asyncsgd.core.flat import cannot_freeze
from asyncsgd.core.optimizers import Optimizer, PlainSGD, StepTakenByWorker
from asyncsgd.core.protocol import Arrived, Happened, Joined, Left, Moved, Pinned, Step, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.core.schedules import Schedule
from asyncsgd.core.starts import Starter
from asyncsgd.records.events import (
    APPLIED,
    DROPPED,
    HELD,
    STOPPED,
    Event,
    Extended,
    Membership,
    RuleActed,
    Started,
    Uses,
)
from asyncsgd.rules.contract import Arrival, Reply, Rule, Start

SAME_DIRECTION = 1e-6
"""A direction that differs from the arriving gradient by no more than this, relative to the gradient's norm, counts as
that gradient. So small a difference changes no loss in the digits that are shown."""
CHUNK = 1 << 20
"""How many elements of two vectors are compared at once, so that a comparison needs no third vector."""
_NO_CONTEXT = contextlib.nullcontext()


class Server(Starter):
    """Owns `parameters` and applies what its rule replies.

    It is the `Method` of every run but those of peers, whose rules know no server.

    Args:
        parameters, rule, schedule, batches, num_workers, batch_size, samples, clock, starts_by_itself, statistics: see
            `asyncsgd.core.starts.Starter`.
        optimizer: takes the steps; `StepTakenByWorker`, which does nothing, where workers or ranks take them.
        writing: ``writing(version)`` gives a context within which the parameters are inconsistent, on their way from
            `version` to the next; for workers that share this memory. None: nobody else reads them.
        records: whether anybody reads `Step.record`.

    >>> import torch
    >>> from asyncsgd.core.batches import OwnStreams
    >>> from asyncsgd.records.events import Gradient, Taken
    >>> from asyncsgd.rules import Asynchronous
    >>> x = torch.tensor([1.0, 2.0])
    >>> server = Server(x, Asynchronous(), PlainSGD(x), lambda num_samples: 0.5, OwnStreams(1, None), num_workers=1)
    >>> work = server.react(Joined(0)).start[0]
    >>> arrived = Arrived(work, 0, torch.tensor([1.0, 1.0]), Gradient(0.7, 1.0, 1), 0.1, Taken())
    >>> server.react(arrived).record.uses, server.version, x.tolist()
    (((0, 0),), 1, [0.5, 1.5])
    """

    # The attributes that are not set here are those of `Starter`.
    KEPT = (
        "parameters",
        "num_samples",
        "view",
        "rule_acted",
        "rule_state",
        "_optimizer",
        "_batches",
        "_waiting",
        "_draws",
        "_budget_cuts",
        "_read_versions",
        "_worker_of",
        "_without_terms",
        "_frozen",
        "statistics",
        "_moved",
    )

    def __init__(
        self,
        parameters: Tensor,
        rule: Rule,
        optimizer: Optimizer | PlainSGD | StepTakenByWorker,
        schedule: Schedule,
        batches: BatchSource,
        *,
        num_workers: int,
        batch_size: int = 1,
        samples: float | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        starts_by_itself: bool = True,
        writing: Callable[[int], AbstractContextManager[None]] | None = None,
        records: bool = True,
        statistics: RunningStatistics | None = None,
    ) -> None:
        if (rule.needs_plain_sgd or rule.local_steps) and not optimizer.plain:
            raise ValueError(f"rule {rule.name} moves the parameters itself: its server's optimizer is plain SGD")
        super().__init__(
            parameters,
            rule,
            schedule,
            batches,
            num_workers=num_workers,
            batch_size=batch_size,
            samples=samples,
            clock=clock,
            starts_by_itself=starts_by_itself,
            statistics=statistics,
        )
        self.rule_acted = RuleActed()
        """How often the rule did something else than asynchronous SGD does. A run tells the user if it never did."""
        self.rule_state = rule.init(parameters)
        self._optimizer = optimizer
        self._writing = writing or (lambda version: _NO_CONTEXT)
        self._records = records
        self._moved: dict[int, Moved] = {}
        """Dispatch -> the gradient's effect on the running statistics, for gradients that have arrived and may still be
        used."""
        self._without_terms: set[int] = set()
        """The dispatch numbers of gradients whose batches had no loss term."""
        self._frozen: dict[int, tuple[str, ...]] = {}
        """Dispatch -> the names of the parameters that were frozen, for gradients that arrived and were not used."""

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers present, in order."""
        return tuple(self.view.workers)

    @property
    def in_flight(self) -> dict[int, Work]:
        """worker -> the gradient that it computes, oldest dispatch first. It is live, and to be read only."""
        return self.view.in_flight

    @property
    def present(self) -> Sequence[int]:
        """The workers present, idle ones first; see `Method.present`."""
        busy = self.in_flight
        return sorted(self.workers, key=lambda worker: (worker in busy, worker))

    @property
    def cut_short(self) -> str | None:
        """See `Method.cut_short`. With a larger budget the last round would have had more batches, or the workers of
        Hogwild would have had more."""
        if not self._budget_cuts:
            return None
        if self.rule.in_rounds:
            return f"rule {self.rule.name} works in rounds, and the budget cuts one short"
        # Only rounds and Hogwild have sources of batches that end at the budget.
        return "the workers of Hogwild are given no more than the budget"

    def react(self, happened: Happened) -> Step:
        """Tell the rule what happened, carry out its reply, and return what starts and stops, with the record."""
        if isinstance(happened, Arrived):
            return self._arrive(happened)
        if isinstance(happened, Joined):
            return self._join(happened.worker)
        return self._leave(happened)

    def _arrive(self, arrived: Arrived) -> Step:
        """Handle a gradient that has arrived.

        Its samples are counted first, so that `view.learning_rate` is the one that a step taken now would have.
        """
        work = arrived.work
        view = self.view
        began = self._clock()
        report = arrived.gradient
        read_version = arrived.read_version
        worker = work.worker
        dispatch = work.dispatch
        if view.in_flight.pop(worker, None) is not work:
            raise RuntimeError(f"dispatch {dispatch} of worker {worker} is not in flight")
        self.num_samples += report.num_samples
        self._read_versions[dispatch] = read_version
        if not self._local_steps:
            view.learning_rate = self._schedule(self.num_samples)
        delay = view.version - read_version
        if not report.weight:
            self._without_terms.add(dispatch)
        if report.frozen:
            if self.rule.needs_plain_sgd:  # its own momentum would move them
                raise cannot_freeze(report.frozen[0])
            self._frozen[dispatch] = report.frozen
        if arrived.moved is not None:
            self._moved[dispatch] = Moved(worker, work.batches, arrived.moved.clone(), report.weight)
            self._arriving_statistics = (worker, arrived.moved[0].clone())
        arrival = Arrival(
            worker,
            dispatch,
            read_version,
            arrived.vector,
            report.weight,
            report.num_samples,
            arrived.seconds,
            work.num_local_steps,
            work.point if self._needs_points else None,
        )
        repeated: Sequence[Start | Pinned] = ()
        if report.weight or self.rule.hears_of_empty:
            reply = self.rule.arrive(self.rule_state, arrival, view)
        else:
            reply = Reply(drops=(dispatch,))
            repeated = [self._started_again(work)]
        self.rule_acted.arrivals += 1
        if report.weight and not is_asynchronous(reply, arrival):
            self.rule_acted.altered += 1
        uses, drops, stop, start, stepped = self._carry_out(reply, repeated)
        self._arriving_statistics = None
        if not self._records:
            return Step(start, stop, stepped)
        outcome = HELD
        if dispatch in drops:
            outcome = DROPPED
        elif any(used == dispatch for used, _ in uses):
            outcome = APPLIED
        now = self._clock()
        taken = arrived.taken
        # By position, in the order of its fields: by name it would take a microsecond more.
        event = Event(
            dispatch, worker, work.batches, read_version,
            view.version, delay,  # version, arrival_delay
            outcome, uses, drops,
            _dispatches(stop) if stop else (), _started(start),  # abandoned, started
            report.loss, report.weight, report.num_samples,
            view.learning_rate, now, self.num_samples,  # learning_rate (the schedule's), train_seconds, total_samples
            work.num_local_steps, arrived.seconds,  # num_local_steps, flight_seconds
            taken.pull, taken.compute, taken.push, taken.wait,  # pull_seconds, compute_, push_, wait_seconds
            taken.apply + now - began,  # apply_seconds: what the worker took to apply it, and what this method took
            report.loss_scales,
            self._optimizer.norm if stepped else None,  # gradient_norm
        )  # fmt: skip
        return Step(start, stop, stepped, event)

    def _join(self, worker: int) -> Step:
        """Handle that a worker takes part from now on."""
        if worker in self._present:
            raise RuntimeError(f"worker {worker} has joined already")
        self._present.add(worker)
        self.view.come(worker)
        return self._membership("join", worker, self.rule.join(self.rule_state, worker, self.view))

    def _leave(self, left: Left) -> Step:
        """Handle that a worker is gone. The batches of its gradient in flight are handed out again."""
        worker = left.worker
        self._waiting.pop(worker, None)
        if worker not in self._present:  # lost before training began
            return self._membership("leave", worker, Reply(), left.reason)
        self._present.remove(worker)
        lost = self.view.go(worker)
        if lost is not None:
            self._batches.give_back(lost.batches)
            if left.reason == STOPPED:
                # The run goes on where it was stopped: the worker computes this gradient again and takes the time that
                # was drawn for it. A worker that was really lost has spent that time, and takes the next one.
                self._draws[worker] -= lost.num_local_steps
        return self._membership("leave", worker, self.rule.leave(self.rule_state, worker, self.view), left.reason, lost)

    def _membership(self, kind: str, worker: int, reply: Reply, reason: str = "", lost: Work | None = None) -> Step:
        """Carry out the rule's reply to a worker that has joined or left.

        Args:
            kind: ``join`` or ``leave``.
            lost: the gradient that the worker had in flight.
        """
        uses, drops, stop, start, stepped = self._carry_out(reply)
        gone = [] if lost is None else [lost]
        record = Membership(
            self.version,
            self.num_samples,
            self._clock(),
            kind,
            worker,
            reason=reason,
            lost=_dispatches(gone),
            uses=uses,
            started=_started(start),
            drops=drops,
            abandoned=_dispatches(stop),
        )
        return Step(start, [*stop, *gone], stepped, record)

    def late_leave(self, worker: int, reason: str) -> Membership:
        """Return the record of a worker that is gone after the last evaluation.

        Nothing may change any more, so the rule does not hear of it and no state is changed.
        """
        return Membership(self.version, self.num_samples, self._clock(), "leave", worker, reason)

    def extend(self) -> Step | None:
        """See `Method.extend`. In a state that was loaded, workers may wait because the old budget was spent."""
        start = self._start_all_possible(())
        if not start:
            return None
        return Step(start, record=Extended(self.version, self.num_samples, self._clock(), _started(start)))

    def _carry_out(
        self, reply: Reply, starts: Sequence[Start | Pinned] = ()
    ) -> tuple[Uses, tuple[int, ...], Sequence[Work], Sequence[Work], bool]:
        """Do what a reply asks for: step, abandon and start. With `Reply.again` ask the rule for the next reply.

        Workers get their batches after the last step, those in `starts` first. Where a rule asks for exact parameters,
        a worker starts at those after the step of the reply that names it, not at those after the last step.

        Returns:
            uses, drops, the works that stop, the works that start, and whether a step was taken.
        """
        view = self.view
        read_versions = self._read_versions
        uses: Uses = ()
        drops: tuple[int, ...] = ()
        stop: list[Work] = []
        stepped = False
        while True:
            if reply.direction is not None and reply.uses and self._without_terms.issuperset(reply.uses):
                drops += reply.uses  # no batch of this update has a loss term, so there is nothing to step along
            elif reply.direction is not None:
                version = view.version
                uses += tuple([(dispatch, version - read_versions[dispatch]) for dispatch in reply.uses])
                frozen = self._frozen_in_all(reply.uses) if self._frozen and reply.uses else ()
                self._step(reply.direction, view.learning_rate * reply.learning_rate_factor, frozen, reply.uses)
                stepped = True
            drops += reply.drops
            if reply.abandon:
                stop += self._abandoned(reply.abandon)
            if reply.start:
                requested = self._pinned_if_exact(reply.start)
                starts = [*starts, *requested] if starts else requested
            if not reply.again:
                break
            reply = self.rule.resume(self.rule_state, view)
        for dispatch in drops:
            self._moved.pop(dispatch, None)
            self._frozen.pop(dispatch, None)
        for work in stop:
            self._batches.give_back(work.batches)
        start = self._start_all_possible(starts)
        if self._is_stuck():
            raise RuntimeError(f"rule {self.rule.name} left nobody in flight")
        return uses, drops, stop, start, stepped

    def _frozen_in_all(self, uses: Sequence[int]) -> Collection[str]:
        """The names of the parameters that got no gradient in this update, since they were frozen in all of its
        gradients. Gradients of batches without a loss term do not count; at least one gradient here has loss terms.

        What was frozen in a gradient is forgotten with its first use. If a rule uses it again, from a table, it counts
        as a gradient of all parameters, and so nothing is frozen in all gradients of that update.
        """
        with_terms = [dispatch for dispatch in uses if dispatch not in self._without_terms]
        return set.intersection(*[set(self._frozen.pop(dispatch, ())) for dispatch in with_terms])

    def _step(self, direction: Tensor, learning_rate: float, frozen: Collection[str], uses: Sequence[int]) -> None:
        """Take one step of the parameters and the running statistics."""
        with self._writing(self.view.version):
            if self._moved:
                self._move_statistics(uses)
            optimizer = self._optimizer
            if frozen:
                # Of the three kinds of optimizer only `Optimizer` meets frozen parameters: those of a simulated problem
                # (`PlainSGD`) are never frozen, and workers or ranks that take the steps report none.
                assert isinstance(optimizer, Optimizer)
                optimizer.step(direction, learning_rate, frozen=frozen)
            else:
                optimizer.step(direction, learning_rate)
            self.view.version += 1

    def _move_statistics(self, uses: Sequence[int]) -> None:
        """Let the running statistics follow the gradients of a step. Each gradient moves them once, also where a table
        of gradients uses it again.
        """
        statistics = self.statistics
        assert statistics is not None
        moved = [self._moved.pop(dispatch) for dispatch in uses if dispatch in self._moved]
        if self.rule.moves_by_first_batch:
            moved = sorted(moved, key=lambda each: each.batches)[:1]
        vectors = [each.vectors for each in moved]
        rate = self.rule.elastic_rate
        if rate is not None:
            for each in moved:  # one gradient or none, since an elastic step uses no others
                # The server's statistics and the worker's are pulled towards each other. The worker goes on from its
                # own, thus pulled.
                self._arriving_statistics = (each.worker, statistics.pull(each.vectors, rate))
            return
        if self._local_steps and len(moved) > 1:
            # The displacements of several workers are averaged in a step, so their statistics are too.
            statistics.move_by_mean(vectors, [each.weight for each in moved])
            return
        for of_gradient in vectors:
            statistics.move(of_gradient)

    def _abandoned(self, dispatches: Sequence[int]) -> list[Work]:
        """Take gradients that the rule abandons out of those in flight, and return them."""
        if self._local_steps:
            raise RuntimeError(f"rule {self.rule.name} abandoned local steps, whose inner optimizer has moved on")
        in_flight = self.view.in_flight
        worker_of = self._worker_of
        works = []
        for dispatch in dispatches:
            work = in_flight.pop(worker_of[dispatch], None)
            if work is None or work.dispatch != dispatch:
                raise RuntimeError(f"rule {self.rule.name} abandoned dispatch {dispatch}, which is not in flight")
            works.append(work)
        return works

    def restored(self) -> None:
        """Called after a state was loaded. The budget, and so the learning rate, may differ from those at its
        saving."""
        self._present = set(self.view.workers)
        self._snapshot = None
        # `_arriving_statistics` is None: a state is saved and loaded only between two arrivals.
        for dispatch, moved in self._moved.items():  # a state is read to the device of the parameters
            self._moved[dispatch] = msgspec.structs.replace(moved, vectors=moved.vectors.cpu())
        self.view.learning_rate = 1.0 if self._local_steps else self._schedule(self.num_samples)
        # The end of `writing(v)` tells the workers that share the parameters that v + 1 is their version.
        with self._writing(self.version - 1):
            pass


def _dispatches(works: Iterable[Work]) -> tuple[int, ...]:
    return tuple([work.dispatch for work in works])


def _started(works: Iterable[Work]) -> tuple[Started, ...]:
    return tuple([(work.worker, work.dispatch, work.batches, work.rate) for work in works])


def is_asynchronous(reply: Reply, arrival: Arrival) -> bool:
    """Whether `reply` does what asynchronous SGD does: apply the arriving gradient as it is, at the full learning rate,
    and start its worker again for one gradient at the current parameters.

    A direction that differs by a relative norm of 1e-6 or less is the gradient as it is.

    >>> gradient = torch.tensor([3.0, 4.0])
    >>> arrival = Arrival(0, 7, 0, gradient, weight=1.0, num_samples=1, seconds=1.0)
    >>> start = (Start(0),)
    >>> is_asynchronous(Reply(gradient, uses=(7,), start=start), arrival)
    True
    >>> is_asynchronous(Reply(gradient, 0.5, uses=(7,), start=start), arrival)
    False
    >>> [is_asynchronous(Reply(gradient * x, uses=(7,), start=start), arrival) for x in (1.0 + 1e-7, 1.0 + 1e-5)]
    [True, False]
    """
    if reply.direction is None or reply.learning_rate_factor != 1.0 or len(reply.start) != 1:
        return False
    start = reply.start[0]
    if start.worker != arrival.worker or start.num_local_steps != 1 or start.offset is not None:
        return False
    if reply.uses != (arrival.dispatch,) or reply.again or reply.abandon or reply.drops:
        return False
    return reply.direction is arrival.gradient or _is_same(reply.direction, arrival.gradient)


def _is_same(direction: Tensor, gradient: Tensor) -> bool:
    """Whether the two differ by no more than `SAME_DIRECTION`.

    They are compared chunk by chunk. A larger difference mostly shows in the first chunk, and the rest is then not
    read.
    """
    limit = (SAME_DIRECTION * float(torch.linalg.vector_norm(gradient))) ** 2
    difference = 0.0
    for one, other in zip(direction.split(CHUNK), gradient.split(CHUNK), strict=True):
        difference += float(torch.dist(one, other)) ** 2
        if not difference <= limit:  # also if it is NaN
            return False
    return True
