"""The server: parameters, version and optimizer, and the only code in the library that changes parameters.

`Server.arrive` hands an arriving gradient to the rule and executes its reply: at most one optimizer step per reply,
version plus one. It knows no clock, no process and no batch: the runtime moves messages and measures time.

Shapes: P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from asyncsgd.optimizers import Optimizer, PlainSGD, StepTakenByWorker
from asyncsgd.packing import Plain, classes_in, pack, unpack
from asyncsgd.records.events import APPLIED, DROPPED, HELD, RuleActed
from asyncsgd.rules.base import Arrival, InFlight, Reply, Rule, Start, View
from asyncsgd.schedules import Schedule

SAME = 1e-6
"""A direction that differs from the arriving gradient by less than this, relative to its norm, counts as that gradient:
no loss shows it."""
CHUNK = 1 << 20
"""Elements of two vectors that are compared at once, so that a comparison needs no third vector."""


class Starting(NamedTuple):
    """A worker that the runtime is to start at an exact point."""

    worker: int
    num_local_steps: int
    """The most steps it may take; fewer if the budget has fewer batches left."""
    version: int
    point: Tensor
    """`(P,)`, where it starts, at `version`; to be read, not changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What the server did at one arrival, join or leave."""

    outcome: str
    uses: tuple[tuple[int, int], ...]
    drops: tuple[int, ...]
    abandoned: tuple[int, ...]
    start: tuple[Starting | Start, ...]
    """What the runtime is to start, in order: each through `Server.start`, as long as batches are left. A `Start` means
    that the worker begins at the parameters that it then finds.
    """
    stepped: bool


class Server:
    """Owns `parameters` and applies what its rule replies.

    Args:
        parameters: float32 `(P,)`; borrowed, changed in place by this object alone.
        rule: decides what becomes of each gradient.
        optimizer: takes the steps.
        schedule: learning rate as a function of the samples that arrived; in a rule with `local_steps` it is the
            workers' learning rate, fixed when they start, and the server's own is 1.
        writing: ``writing(version)`` gives a context within which the parameters are inconsistent, on their way from
            `version` to the next; for a transport whose readers share this memory.

    >>> import torch
    >>> from asyncsgd.optimizers import SGD
    >>> from asyncsgd.rules import Asynchronous
    >>> x = torch.tensor([1.0, 2.0])
    >>> server = Server(x, Asynchronous(), Optimizer(x, 2, SGD()), lambda num_samples: 0.5)
    >>> dispatch = server.start(server.join(0).start[0])
    >>> outcome = server.arrive(0, dispatch, 0, torch.tensor([1.0, 1.0]), weight=1.0, num_samples=1, seconds=0.1)
    >>> outcome.uses, server.version, x.tolist()
    (((0, 0),), 1, [0.5, 1.5])
    """

    def __init__(
        self,
        parameters: Tensor,
        rule: Rule,
        optimizer: Optimizer | PlainSGD | StepTakenByWorker,
        schedule: Schedule,
        writing: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        if (rule.needs_plain_sgd or rule.local_steps) and not optimizer.plain:
            raise ValueError(f"rule {rule.name} moves the parameters itself: its server's optimizer is plain SGD")
        self.parameters = parameters
        self.rule = rule
        self.version = 0
        self.num_samples = 0
        """Samples that arrived, used or not: what budgets and the learning rate count."""
        self.num_samples_applied = 0
        """Samples whose gradient has been in a step."""
        self.rule_acted = RuleActed()
        self._optimizer = optimizer
        self._schedule = schedule
        self._writing = writing
        self._state = rule.init(parameters)
        self._workers: list[int] = []
        self._present: set[int] = set()  # the same, for looking up
        self._in_flight: dict[int, InFlight] = {}
        points = parameters if rule.needs_points else None
        self._view = View(lambda: (self.version, self.learning_rate), self._workers, self._in_flight, points)
        self._exact = rule.exact_start or rule.needs_points
        self._snapshot: tuple[int, Tensor] | None = None
        self._points: dict[int, Tensor] = {}  # by dispatch, in rules that need them
        # One entry per dispatch: eight bytes each, so a table method may use a dispatch as often as it likes.
        self._read_versions = array.array("q")
        self._samples_of = array.array("q")
        self._worker_of = array.array("q")

    @property
    def learning_rate(self) -> float:
        """Of the server: the schedule's value for the samples that have arrived, or 1 in rules with `local_steps`."""
        return 1.0 if self.rule.local_steps else self._schedule(self.num_samples)

    @property
    def gradient_norm(self) -> float | None:
        """Of the last step's direction; see `asyncsgd.optimizers.Optimizer.norm`."""
        return self._optimizer.norm

    def inner_learning_rate(self, num_samples: int) -> float | None:
        """Of a worker that starts now on `num_samples` samples, in rules with `local_steps`; None in others.

        Its own samples count as having arrived, as they do for a server's step; so a warmup does not begin at 0.
        """
        return self._schedule(self.num_samples + num_samples) if self.rule.local_steps else None

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self._workers)

    @property
    def in_flight(self) -> dict[int, InFlight]:
        """worker -> what it is computing; a copy."""
        return dict(self._in_flight)

    @property
    def in_flight_dispatches(self) -> set[int]:
        return {flight.dispatch for flight in self._in_flight.values()}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def worker_of(self, dispatch: int) -> int:
        """Who was given `dispatch`."""
        return self._worker_of[dispatch]

    def snapshot(self) -> Tensor:
        """The parameters of the current version, `(P,)`: one copy per version, shared; not to be changed."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            self._snapshot = (self.version, self.parameters.clone())
        return self._snapshot[1]

    def start(self, starting: Starting | Start, num_local_steps: int | None = None) -> int:
        """Put a gradient in flight and return its dispatch number.

        Args:
            starting: from an `Outcome`.
            num_local_steps: how many it takes, if there are fewer batches than `starting` asks for.

        Raises:
            RuntimeError: if the worker is not present or is busy, which is a bug in the rule.
        """
        worker = starting.worker
        if worker in self._in_flight:
            raise RuntimeError(f"rule {self.rule.name} started worker {worker}, which is busy")
        if worker not in self._present:
            raise RuntimeError(f"rule {self.rule.name} started worker {worker}, which is not present")
        dispatch = len(self._read_versions)
        self._read_versions.append(-1)
        self._samples_of.append(0)
        self._worker_of.append(worker)
        version = starting.version if isinstance(starting, Starting) else self.version
        self._in_flight[worker] = InFlight(dispatch, version, num_local_steps or starting.num_local_steps)
        if isinstance(starting, Starting) and self.rule.needs_points:
            self._points[dispatch] = starting.point
        return dispatch

    def start_all(self, workers: Sequence[int]) -> range:
        """`start` for many at once, without exact points and local steps; return their dispatch numbers, in order."""
        first, number = len(self._read_versions), len(workers)
        if not self._in_flight.keys().isdisjoint(workers) or not self._present.issuperset(workers):
            raise RuntimeError(f"rule {self.rule.name} started workers that are busy or not present")
        self._read_versions.extend([-1] * number)
        self._samples_of.extend([0] * number)
        self._worker_of.extend(workers)
        dispatches = range(first, first + number)
        self._in_flight.update(zip(workers, map(InFlight, dispatches, itertools.repeat(self.version)), strict=True))
        return dispatches

    def join(self, worker: int) -> Outcome:
        """Add `worker` to those present and ask the rule what follows."""
        if worker in self._present:
            raise RuntimeError(f"worker {worker} has joined already")
        self._present.add(worker)
        bisect.insort(self._workers, worker)
        return self._execute(self.rule.join(self._state, worker, self._view), None)

    def leave(self, worker: int) -> tuple[Outcome, int | None]:
        """Remove `worker`; return what follows and the dispatch that was in flight with it, if any."""
        self._workers.remove(worker)
        self._present.remove(worker)
        lost = self._in_flight.pop(worker, None)
        if lost is not None:
            self._points.pop(lost.dispatch, None)
        outcome = self._execute(self.rule.leave(self._state, worker, self._view), None)
        return outcome, None if lost is None else lost.dispatch

    def is_in_flight(self, worker: int, dispatch: int) -> bool:
        """Say whether `dispatch` is what `worker` is computing; False for one that was abandoned."""
        flight = self._in_flight.get(worker)
        return flight is not None and flight.dispatch == dispatch

    def arrive(
        self,
        worker: int,
        dispatch: int,
        read_version: int,
        gradient: Tensor,
        *,
        weight: float,
        num_samples: int,
        seconds: float,
    ) -> Outcome:
        """Hand an arriving gradient to the rule and execute its reply: at most one optimizer step, version plus one.

        The gradient must be in flight. The samples count as arrived before the rule decides, so the rule sees the
        learning rate that a step taken now would have.

        Args:
            worker: who brings the gradient; idle from here on, unless the reply starts it again.
            dispatch: its number, as `start` gave it.
            read_version: the version that the gradient was computed at.
            gradient: `(P,)`, the mean over the batch's loss terms, or start minus end of local steps. Borrowed for the
                call and not changed.
            weight: loss terms behind the gradient (masked tokens).
            num_samples: samples behind it.
            seconds: from dispatch to arrival.

        Returns:
            What the server did, and what the caller is now to start, in order, through `start`.

        Raises:
            RuntimeError: if the dispatch is not in flight, e.g. because it was abandoned; see `is_in_flight`.
        """
        if not self.is_in_flight(worker, dispatch):
            raise RuntimeError(f"dispatch {dispatch} of worker {worker} is not in flight")
        num_local_steps = self._in_flight.pop(worker).num_local_steps
        self.num_samples += num_samples
        self._read_versions[dispatch] = read_version
        self._samples_of[dispatch] = num_samples
        point = self._points.pop(dispatch, None) if self._points else None
        arrival = Arrival(
            worker, dispatch, read_version, gradient, weight, num_samples, seconds, num_local_steps, point
        )
        reply = self.rule.arrive(self._state, arrival, self._view)
        self.rule_acted.arrivals += 1
        if not is_asynchronous(reply, arrival):
            self.rule_acted.altered += 1
        return self._execute(reply, dispatch)

    def state_dict(self) -> Plain:
        """All that decides what follows: parameters, counts, rule, optimizer and flights; see `asyncsgd.packing`."""
        return {
            "rule": str(self.rule),
            "parameters": self.parameters,
            "version": self.version,
            "num_samples": self.num_samples,
            "num_samples_applied": self.num_samples_applied,
            "rule_acted": [self.rule_acted.arrivals, self.rule_acted.altered],
            "rule_state": pack(self._state),
            "optimizer": self._optimizer.state_dict(),
            "workers": list(self._workers),
            "in_flight": [[worker, *flight] for worker, flight in self._in_flight.items()],
            "points": dict(self._points),
            "dispatches": pack([self._read_versions, self._samples_of, self._worker_of]),
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, of a server with an equal rule and optimizer and as many parameters.

        Raises:
            ValueError: if the rule is another one.
        """
        if state["rule"] != str(self.rule):
            raise ValueError(f"the state is of rule {state['rule']}, this server's is {self.rule}")
        writing = contextlib.nullcontext() if self._writing is None else self._writing(state["version"] - 1)
        with torch.no_grad(), writing:
            self.parameters.copy_(state["parameters"])
        self.version, self.num_samples = state["version"], state["num_samples"]
        self.num_samples_applied = state["num_samples_applied"]
        self.rule_acted.arrivals, self.rule_acted.altered = state["rule_acted"]
        classes = classes_in("asyncsgd.rules.", type(self.rule).__module__)
        self._state = unpack(state["rule_state"], classes)
        self._optimizer.load_state_dict(state["optimizer"])
        self._workers[:] = state["workers"]
        self._present = set(self._workers)
        self._in_flight.clear()  # what rules look at through their view, so it stays the same object
        self._in_flight.update({worker: InFlight(*flight) for worker, *flight in state["in_flight"]})
        self._points = dict(state["points"])
        self._read_versions, self._samples_of, self._worker_of = unpack(state["dispatches"], {})
        self._snapshot = None

    def _execute(self, reply: Reply, arriving: int | None) -> Outcome:
        uses: tuple[tuple[int, int], ...] = ()
        drops: tuple[int, ...] = ()
        abandoned: tuple[int, ...] = ()
        start: tuple[Starting | Start, ...] = ()
        stepped = False
        while True:
            if reply.direction is not None:
                version, read_versions = self.version, self._read_versions
                uses += tuple([(dispatch, version - read_versions[dispatch]) for dispatch in reply.uses])
                self._count_applied(reply.uses)
                self._step(reply.direction, reply.learning_rate_factor)
                stepped = True
            drops += reply.drops
            if reply.abandon:
                self._abandon(reply.abandon)
                abandoned += reply.abandon
            if reply.start:
                start += self._starting(reply.start)
            if not reply.again:
                break
            reply = self.rule.resume(self._state, self._view)
        if arriving in drops:
            outcome = DROPPED
        else:
            outcome = APPLIED if any(dispatch == arriving for dispatch, _ in uses) else HELD
        return Outcome(outcome, uses, drops, abandoned, start, stepped)

    def _starting(self, starts: tuple[Start, ...]) -> tuple[Starting | Start, ...]:
        if not self._exact and all(start.offset is None for start in starts):
            return starts
        return tuple([self._starting_at(start) for start in starts])

    def _starting_at(self, start: Start) -> Starting | Start:
        worker, num_local_steps, offset = start
        if offset is not None:
            return Starting(worker, num_local_steps, self.version, self.parameters + offset)
        return Starting(worker, num_local_steps, self.version, self.snapshot()) if self._exact else start

    def _step(self, direction: Tensor, factor: float) -> None:
        if self._writing is None:
            self._optimizer.step(direction, self.learning_rate * factor)
            self.version += 1
            return
        with self._writing(self.version):
            self._optimizer.step(direction, self.learning_rate * factor)
            self.version += 1

    def _count_applied(self, dispatches: tuple[int, ...]) -> None:
        for dispatch in dispatches:
            self.num_samples_applied += self._samples_of[dispatch]
            self._samples_of[dispatch] = 0  # a later use of the same gradient applies no new samples

    def _abandon(self, dispatches: tuple[int, ...]) -> None:
        if self.rule.local_steps:
            raise RuntimeError(f"rule {self.rule.name} abandoned local steps, whose inner optimizer has moved on")
        if len(dispatches) == len(self._in_flight) and self.in_flight_dispatches.issuperset(dispatches):
            self._in_flight.clear()
            self._points.clear()
            return
        for dispatch in dispatches:
            worker = self._worker_of[dispatch]
            if not self.is_in_flight(worker, dispatch):
                raise RuntimeError(f"rule {self.rule.name} abandoned dispatch {dispatch}, which is not in flight")
            del self._in_flight[worker]
            self._points.pop(dispatch, None)


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
    if start[0] != arrival.worker or start[1] != 1 or start[2] is not None or len(reply.uses) != 1:
        return False
    if reply.uses[0] != arrival.dispatch or reply.again or reply.abandon or reply.drops:
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
