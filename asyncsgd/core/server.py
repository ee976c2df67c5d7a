"""The server: parameters, version, optimizer and batches, and the only code in the library that changes parameters.

`Server.react` hands what happened to the rule and carries out its reply: at most one optimizer step a reply, version
plus one. It gives batches to whom the rule starts, takes back those of what was abandoned or lost, and writes the
record. It knows no process and no message: a backend carries gradients, and says what happens next.

Shapes: P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

import math
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
)
from asyncsgd.rules.contract import Arrival, Reply, Rule, Start, View

SAME = 1e-6
"""A direction that differs from the arriving gradient by less than this, relative to its norm, counts as that gradient:
no loss shows it."""
CHUNK = 1 << 20
"""Elements of two vectors that are compared at once, so that a comparison needs no third vector."""


class Server:
    """Owns `parameters` and applies what its rule replies.

    It is the `Method` of every run but those of peers, whose rules know no server.

    Args:
        parameters: float32 `(P,)`; borrowed, changed in place by this object alone.
        rule: decides what becomes of each gradient.
        optimizer: takes the steps.
        schedule: learning rate as a function of the samples that arrived; in a rule with `local_steps` it is the
            workers' learning rate, fixed when they start, and the server's own is 1.
        batches: hands out the run's batches.
        num_workers: N, workers 0 to N - 1.
        batch_size: samples of one gradient.
        samples: nobody starts once so many have arrived.
        clock: the training clock, in seconds.
        starts: whether workers are started as soon as the rule and the batches allow. If not, a replay of a log starts
            them with `start`.
        writing: ``writing(version)`` gives a context within which the parameters are inconsistent, on their way from
            `version` to the next; for workers that share this memory.
        records: whether anybody reads `Step.record`.
        statistics: the model's running statistics, which move with a step: those of the gradients that it uses, each
            once. None: the model has none.

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
        starts: bool = True,
        writing: Callable[[int], AbstractContextManager[None]] | None = None,
        records: bool = True,
        statistics: RunningStatistics | None = None,
    ) -> None:
        if (rule.needs_plain_sgd or rule.local_steps) and not optimizer.plain:
            raise ValueError(f"rule {rule.name} moves the parameters itself: its server's optimizer is plain SGD")
        self.parameters = parameters
        self.rule = rule
        self.rule_acted = RuleActed()
        self.num_samples = 0
        """Samples that arrived, used or not: what budgets and the learning rate count."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._batches = batches
        self._batch_size = batch_size
        self._samples = math.inf if samples is None else samples
        self._clock = clock
        self._starts = starts
        self._writing = writing
        self._records = records
        self._local_steps = rule.local_steps
        self._needs_points = rule.needs_points
        self._exact = rule.exact_start or rule.needs_points
        self.rule_state = rule.init(parameters)
        self.view = View(parameters=parameters if rule.needs_points else None)
        self.view.learning_rate = 1.0 if self._local_steps else schedule(0)
        self._present: set[int] = set()  # the view's workers, for looking up
        self._snapshot: tuple[int, Tensor, Tensor | None] | None = None
        self.statistics = statistics
        self._moved: dict[int, Moved] = {}
        """By dispatch, of the gradients that have arrived and may still be used."""
        self._replica: tuple[int, Tensor] | None = None
        """The worker whose gradient has just arrived, and the running statistics of its copy of the model, `(S,)`."""
        self._waiting: dict[int, Start | Pinned] = {}
        """Workers that the rule has started and that got no batch, because the budget cuts the last round short or is
        spent."""
        self._draws = [0] * num_workers
        self._budget_cuts = False
        # One entry per dispatch, for good: a rule with a table of gradients uses a dispatch as often as it likes.
        self._read_versions = list[int]()
        self._worker_of = list[int]()
        self._without_terms: set[int] = set()
        """Dispatches whose batches had no loss term."""
        self._frozen: dict[int, tuple[str, ...]] = {}
        """Of dispatches that are to be used: the parameters that were frozen, by name."""

    @property
    def version(self) -> int:
        """Updates that the parameters have taken."""
        return self.view.version

    @property
    def workers(self) -> tuple[int, ...]:
        """Those present, in order."""
        return tuple(self.view.workers)

    @property
    def in_flight(self) -> dict[int, Work]:
        """worker -> what it is computing, oldest dispatch first; live, to be read only."""
        return self.view.in_flight

    @property
    def present(self) -> Sequence[int]:
        """Those present, idle ones first."""
        busy = self.in_flight
        return sorted(self.workers, key=lambda worker: (worker in busy, worker))

    @property
    def cut_short(self) -> str | None:
        """Why a run cannot become longer from here: with a larger budget it would not have come to this state. None
        where it would."""
        if not self._budget_cuts:
            return None
        if self.rule.in_rounds:
            return f"rule {self.rule.name} works in rounds, and the budget cuts one short"
        return "the workers of Hogwild are given no more than the budget"

    def snapshot(self) -> tuple[Tensor, Tensor | None]:
        """Parameters and running statistics of the current version: one copy a version, shared; not to be changed."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            statistics = None if self.statistics is None else self.statistics.values.clone()
            self._snapshot = (self.version, self.parameters.clone(), statistics)
        return self._snapshot[1:]

    def react(self, happened: Happened) -> Step:
        """Ask the rule what follows, do it, and write it down."""
        if isinstance(happened, Arrived):
            return self._arrive(happened)
        return self._join(happened.worker) if isinstance(happened, Joined) else self._leave(happened)

    def _arrive(self, arrived: Arrived) -> Step:
        """The samples count as arrived before the rule decides, so it sees the rate of a step that is taken now."""
        work = arrived.work
        view = self.view
        began = self._clock()
        gradient = arrived.gradient
        vector = arrived.vector
        read_version = arrived.read_version
        worker = work.worker
        dispatch = work.dispatch
        if view.in_flight.pop(worker, None) is not work:
            raise RuntimeError(f"dispatch {dispatch} of worker {worker} is not in flight")
        self.num_samples += gradient.num_samples
        self._read_versions[dispatch] = read_version
        if not self._local_steps:
            view.learning_rate = self._schedule(self.num_samples)
        delay = view.version - read_version
        if not gradient.weight:
            self._without_terms.add(dispatch)
        if gradient.frozen:
            if self.rule.needs_plain_sgd:
                raise cannot_freeze(gradient.frozen[0])
            self._frozen[dispatch] = gradient.frozen
        if arrived.moved is not None:
            self._moved[dispatch] = Moved(worker, work.batches, arrived.moved.clone(), gradient.weight)
            self._replica = (worker, arrived.moved[0].clone())
        arrival = Arrival(
            worker,
            dispatch,
            read_version,
            vector,
            gradient.weight,
            gradient.num_samples,
            arrived.seconds,
            work.num_local_steps,
            work.point if self._needs_points else None,
        )
        repeated: Sequence[Start | Pinned] = ()
        if gradient.weight or self.rule.hears_of_empty:
            reply = self.rule.arrive(self.rule_state, arrival, view)
        else:
            reply = Reply(drops=(dispatch,))
            repeated = [self._repeat(work)]
        self.rule_acted.arrivals += 1
        if gradient.weight and not is_asynchronous(reply, arrival):
            self.rule_acted.altered += 1
        uses, drops, stop, start, stepped = self._carry_out(reply, repeated)
        self._replica = None
        if not self._records:
            return Step(start, stop, stepped)
        if dispatch in drops:
            outcome = DROPPED
        else:
            outcome = APPLIED if any(used == dispatch for used, _ in uses) else HELD
        now = self._clock()
        taken = arrived.taken
        # By position, in the order of its fields: by name it would take a microsecond more.
        event = Event(
            dispatch, worker, work.batches, read_version, view.version, delay, outcome, uses, drops,
            _dispatches(stop) if stop else (), _started(start),  # abandoned, started
            gradient.loss, gradient.weight, gradient.num_samples,
            view.learning_rate, now, self.num_samples,  # learning_rate, train_seconds, total_samples
            work.num_local_steps if self._local_steps else 1, arrived.seconds,
            taken.pull, taken.compute, taken.push, taken.wait, taken.apply + now - began,
            gradient.loss_scales, self._optimizer.norm if stepped else None,  # loss_scales, direction's norm
        )  # fmt: skip
        return Step(start, stop, stepped, event)

    def _repeat(self, work: Work) -> Start | Pinned:
        """The same start again: at its old point if the rule asks for exact starts, or if the worker has parameters of
        its own, as in elastic averaging; else at the current parameters.
        """
        has_own_parameters = self._local_steps and self._needs_points
        if work.point is not None and (self.rule.exact_start or has_own_parameters):
            return Pinned(work.worker, work.num_local_steps, work.version, work.point, work.statistics)
        return self._at_points([Start(work.worker, work.num_local_steps)])[0]

    def _join(self, worker: int) -> Step:
        if worker in self._present:
            raise RuntimeError(f"worker {worker} has joined already")
        self._present.add(worker)
        self.view.come(worker)
        return self._membership("join", worker, self.rule.join(self.rule_state, worker, self.view))

    def _leave(self, left: Left) -> Step:
        """Its batches are handed out again."""
        worker = left.worker
        self._waiting.pop(worker, None)
        if worker not in self._present:  # lost before training began
            return self._membership("leave", worker, Reply(), left.reason)
        self._present.remove(worker)
        lost = self.view.go(worker)
        if lost is not None:
            self._batches.give_back(lost.batches)
            if left.reason == STOPPED:
                # The run goes on where it was stopped: the next gradient takes the time that was drawn for this one.
                # A worker that was lost has spent that time.
                self._draws[worker] -= lost.num_local_steps
        return self._membership("leave", worker, self.rule.leave(self.rule_state, worker, self.view), left.reason, lost)

    def _membership(self, kind: str, worker: int, reply: Reply, reason: str = "", lost: Work | None = None) -> Step:
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

    def drop(self, worker: int, reason: str) -> Membership:
        """`worker` is gone after the last evaluation: nothing may change any more, so the rule is not asked."""
        return Membership(self.version, self.num_samples, self._clock(), "leave", worker, reason)

    def extend(self) -> Step | None:
        """Go on with a larger budget than that of the state that was loaded: start who was to start when that was
        spent. None: there is nobody.
        """
        start = self._start(()) if self._starts else ()
        if not start:
            return None
        return Step(start, record=Extended(self.version, self.num_samples, self._clock(), _started(start)))

    def start(self, worker: int, most: int) -> Work | None:
        """Start `worker`, whom the rule has started, on `most` batches at most; None where the rule has not."""
        waiting = self._waiting.pop(worker, None)
        if waiting is None:
            return None
        count = min(most, waiting.num_local_steps)
        started = self._give([msgspec.structs.replace(waiting, num_local_steps=count)])
        return started[0] if started else None

    def _carry_out(
        self, reply: Reply, starts: Sequence[Start | Pinned] = ()
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], Sequence[Work], Sequence[Work], bool]:
        """Step, abandon and start what the rule asks for, as often as it wants to go on. All start after the last step,
        those in `starts` first.

        Returns:
            uses, drops, what stops, what starts, and whether a step was taken.
        """
        view = self.view
        read_versions = self._read_versions
        uses: tuple[tuple[int, int], ...] = ()
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
                asked = self._at_points(reply.start)
                starts = [*starts, *asked] if starts else asked
            if not reply.again:
                break
            reply = self.rule.resume(self.rule_state, view)
        if self._moved:
            for dispatch in drops:
                self._moved.pop(dispatch, None)
        for work in stop:
            self._batches.give_back(work.batches)
        start = self._start(starts)
        if not view.in_flight and self._forgot_everybody():
            raise RuntimeError(f"rule {self.rule.name} left nobody in flight")
        return uses, drops, stop, start, stepped

    def _forgot_everybody(self) -> bool:
        return bool(self._present and self._starts and not self._waiting and self.num_samples < self._samples)

    def _frozen_in_all(self, uses: Sequence[int]) -> Collection[str]:
        """The parameters that were frozen in all gradients of an update that have a loss term. What was frozen in a
        gradient is forgotten with its first use: where a rule uses it again, from a table, nothing counts as frozen.
        """
        with_terms = [dispatch for dispatch in uses if dispatch not in self._without_terms]
        return set.intersection(*[set(self._frozen.pop(dispatch, ())) for dispatch in with_terms])

    def _step(self, direction: Tensor, learning_rate: float, frozen: Collection[str], uses: Sequence[int]) -> None:
        if self._writing is None:
            self._move(direction, learning_rate, frozen, uses)
            return
        with self._writing(self.view.version):
            self._move(direction, learning_rate, frozen, uses)

    def _move(self, direction: Tensor, learning_rate: float, frozen: Collection[str], uses: Sequence[int]) -> None:
        if self._moved:
            self._move_statistics(uses)
        optimizer = self._optimizer
        if frozen:
            assert isinstance(optimizer, Optimizer)  # nothing else steps a model's parameters
            optimizer.step(direction, learning_rate, frozen=frozen)
        else:
            optimizer.step(direction, learning_rate)
        self.view.version += 1

    def _move_statistics(self, uses: Sequence[int]) -> None:
        """Each gradient moves them once, also where a table of gradients uses it again."""
        statistics = self.statistics
        assert statistics is not None
        moved = [self._moved.pop(dispatch) for dispatch in uses if dispatch in self._moved]
        if self.rule.moves_by_first_batch:
            moved = sorted(moved, key=lambda each: each.batches)[:1]
        vectors = [each.vectors for each in moved]
        rate = self.rule.elastic_rate
        if rate is not None:
            for each in moved:
                self._replica = (each.worker, statistics.pull(each.vectors, rate))
            return
        if self._local_steps and len(moved) > 1:
            statistics.move_by_mean(vectors, [each.weight for each in moved])
            return
        for of_gradient in vectors:
            statistics.move(of_gradient)

    def _abandoned(self, dispatches: Sequence[int]) -> list[Work]:
        if self._local_steps:
            raise RuntimeError(f"rule {self.rule.name} abandoned local steps, whose inner optimizer has moved on")
        in_flight = self.view.in_flight
        worker_of = self._worker_of
        works = [in_flight.pop(worker_of[dispatch], None) for dispatch in dispatches]
        if any(work is None or work.dispatch != number for work, number in zip(works, dispatches, strict=True)):
            raise RuntimeError(f"rule {self.rule.name} abandoned one of {dispatches}, which is not in flight")
        return works

    def _at_points(self, starts: Sequence[Start]) -> Sequence[Start | Pinned]:
        """Pin those that are to start at exactly the parameters of now."""
        if not self._exact and all(start.offset is None for start in starts):
            return starts
        return [self._at_point(start) for start in starts]

    def _at_point(self, start: Start) -> Start | Pinned:
        if start.offset is None and not self._exact:
            return start
        if start.offset is not None:
            point = self.parameters + start.offset
            statistics = self._statistics_of(start.worker)
        else:
            point, statistics = self.snapshot()
        return Pinned(start.worker, start.num_local_steps, self.version, point, statistics)

    def _statistics_of(self, worker: int) -> Tensor | None:
        """Those that a worker begins with that is not at the server's parameters: its own after local steps, from which
        it goes on.
        """
        if self._local_steps and self._replica is not None and self._replica[0] == worker:
            return self._replica[1]
        return None if self.statistics is None else self.statistics.values.clone()

    def _start(self, starts: Sequence[Start | Pinned]) -> Sequence[Work]:
        """Start who waits and these, as far as there are batches; nobody once the budget is spent."""
        waiting = self._waiting
        may_start = self._starts and self.num_samples < self._samples
        if may_start and not waiting:
            return self._give(starts)
        for start in starts:
            waiting.pop(start.worker, None)  # one that waits may be started again: the last counts
            waiting[start.worker] = start
        if not may_start:
            return ()
        starts = list(waiting.values())
        waiting.clear()
        return self._give(starts)

    def _give(self, starts: Sequence[Start | Pinned]) -> list[Work]:
        """Give batches to those that start; where none are left, the rest waits."""
        view = self.view
        draws = self._draws
        now = self._clock()
        rate = None
        works: list[Work] = []
        for start in starts:
            worker = start.worker
            count = start.num_local_steps
            if worker in view.in_flight or worker not in self._present:
                state = "busy" if worker in view.in_flight else "not present"
                raise RuntimeError(f"rule {self.rule.name} started worker {worker}, which is {state}")
            batches, number = self._batches.take(worker, count)
            if number < count:
                self._budget_cuts = True
                if not number:
                    self._waiting.update([(waiting.worker, waiting) for waiting in starts[len(works) :]])
                    break
            if self._local_steps:  # its own samples count as having arrived, as they do for a server's step
                rate = self._schedule(self.num_samples + number * self._batch_size)
            version = view.version
            point = None
            statistics = None
            if isinstance(start, Pinned):
                version = start.version
                point = start.point
                statistics = start.statistics
            dispatch = len(self._worker_of)
            work = Work(
                worker, dispatch, version, number, batches, point, rate, now, draws[worker], statistics=statistics
            )
            self._worker_of.append(worker)
            self._read_versions.append(-1)
            draws[worker] += number
            view.in_flight[worker] = work
            works.append(work)
        return works

    def restored(self) -> None:
        """Called after a state was loaded. The budget, and so the learning rate, may differ from then."""
        self._present = set(self.view.workers)
        self._snapshot = None
        self.view.learning_rate = 1.0 if self._local_steps else self._schedule(self.num_samples)
        if self._writing is not None:
            # Who shares the parameters is to learn their version, which leaving this context publishes.
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
    """Whether the two differ by no more than `SAME`; most that do show it in their first elements."""
    limit = (SAME * float(torch.linalg.vector_norm(gradient))) ** 2
    difference = 0.0
    for one, other in zip(direction.split(CHUNK), gradient.split(CHUNK), strict=True):
        difference += float(torch.dist(one, other)) ** 2
        if not difference <= limit:
            return False
    return True
