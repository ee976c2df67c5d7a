"""A server with a rule as the method of a run: turns its outcomes into gradients in flight, and arrivals into records.

The server says what a rule's reply asks for. The dispatcher gives the workers named there their next batches. It takes
back the batches of gradients that were abandoned or lost. It remembers where and when each gradient in flight started.
It writes the record of an arrival, a join and a leave. A runtime decides only when something arrives, and what carries
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncsgd.batches import OwnStreams, Source, count_batches
from asyncsgd.packing import Plain, classes_in, pack, unpack
from asyncsgd.records.events import Event, Extended, Membership, Range, Started, arrival
from asyncsgd.rules.base import Start
from asyncsgd.runtime.base import STOPPED
from asyncsgd.runtime.fit import Arrived, Happened, Joined, Launched, Step
from asyncsgd.server import Outcome, Server, Starting

MANY = 32
"""From this many workers on that start at once they are started together, which gives the same run sooner."""

NOTHING = Outcome("", (), (), (), (), False)
"""What follows when somebody leaves who had never joined."""


class Launch(NamedTuple):
    """How gradients in flight have started; shared by all that started together."""

    seconds: float
    version: int
    """The server's version at the start."""
    point: Tensor | None
    """`(P,)`, the exact parameters of `version` at which they start. None: a worker begins at the parameters that it
    then finds.
    """
    learning_rate: float | None
    """The learning rate of local steps; None without them."""


NOBODY = Launched((), ())


class Dispatcher:
    """Hands out batches and keeps what is in flight.

    Args:
        server: told of every join, leave and arrival, by this object alone.
        batches: hands out the run's batches.
        num_workers: N, workers 0 to N - 1.
        batch_size: samples of one gradient.
        clock: the training clock, in seconds.
        spent: given the samples that have arrived, whether the run is over; then nobody is started.
        starts: whether workers are started as soon as the rule and the batches allow. If not, a replay of a log starts
            them with `start`.
        exact: every gradient starts at exactly the version of its start, which is kept for it (virtual time). If not,
            this holds only where the rule asks for it.
    """

    def __init__(
        self,
        server: Server,
        batches: Source,
        *,
        num_workers: int,
        batch_size: int,
        clock: Callable[[], float] = lambda: 0.0,
        spent: Callable[[int], bool] = lambda num_samples: False,
        starts: bool = True,
        exact: bool = False,
    ) -> None:
        self.server = server
        self._source, self._batch_size = batches, batch_size
        self._clock, self._spent, self._starts, self._exact = clock, spent, starts, exact
        # Of each worker's gradient in flight:
        self._batches: list[tuple[Range, ...]] = [()] * num_workers
        self._launches: list[Launch | None] = [None] * num_workers
        self._waiting: dict[int, Starting | Start] = {}
        """Workers that the rule has started and that got no batch, because the budget cuts the last round short or is
        spent."""
        self.next_draw = np.zeros(num_workers, dtype=np.int64)
        """The gradients that each worker was given: the number of the next time that is drawn for it."""
        self.round_is_cut = False
        """Whether a worker got fewer batches than the rule asked for."""

    def launch_of(self, worker: int) -> Launch:
        """How `worker`'s gradient in flight has started."""
        launch = self._launches[worker]
        assert launch is not None
        return launch

    def batches_of(self, worker: int) -> tuple[Range, ...]:
        """The batches of `worker`'s gradient in flight."""
        return self._batches[worker]

    @property
    def version(self) -> int:
        return self.server.version

    @property
    def num_samples(self) -> int:
        return self.server.num_samples

    @property
    def parameters(self) -> Tensor:
        return self.server.parameters

    @property
    def present(self) -> Sequence[int]:
        busy = self.server.in_flight
        return sorted(self.server.workers, key=lambda worker: (worker in busy, worker))

    def react(self, happened: Happened) -> Step:
        if isinstance(happened, Arrived):
            return self._arrive(happened)
        if isinstance(happened, Joined):
            outcome = self.server.join(happened.worker)
            launched = self._reply(outcome)
            record = self._membership("join", happened.worker, outcome, launched)
        else:
            launched, record = self._leave(happened.worker, happened.reason)
        return Step(launched, record.abandoned, record.lost, bool(record.uses), lambda: record)

    def _arrive(self, arrived: Arrived) -> Step:
        worker, dispatch, read_version, vector, gradient, seconds, taken = arrived
        server, batches, began = self.server, self._batches[worker], self._clock()
        delay = server.version - read_version
        self._launches[worker] = None
        outcome = server.arrive(
            worker,
            dispatch,
            read_version,
            vector,
            weight=gradient.weight,
            num_samples=gradient.num_samples,
            seconds=seconds,
        )
        launched, now = self._reply(outcome), self._clock()

        def event() -> Event:
            return arrival(
                gradient,
                taken._replace(apply=taken.apply + now - began),
                dispatch=dispatch,
                worker=worker,
                batches=batches,
                read_version=read_version,
                delay=delay,
                version=server.version,
                outcome=outcome.outcome,
                uses=outcome.uses,
                drops=outcome.drops,
                abandoned=outcome.abandoned,
                started=self._started(launched),
                learning_rate=server.learning_rate,
                train_seconds=now,
                total_samples=server.num_samples,
                num_local_steps=count_batches(batches) if server.rule.local_steps else 1,
                flight_seconds=seconds,
                gradient_norm=server.gradient_norm if outcome.stepped else None,
            )

        return Step(launched, outcome.abandoned, (), outcome.stepped, event)

    def _leave(self, worker: int, reason: str) -> tuple[Launched, Membership]:
        """`worker` is gone; its batches are handed out again."""
        self._waiting.pop(worker, None)
        if worker not in self.server.workers:  # lost before training began
            return NOBODY, self.drop(worker, reason)
        if reason == STOPPED and worker in self.server.in_flight:
            self.next_draw[worker] -= count_batches(self._batches[worker])  # the next gradient takes the time of this
        outcome, dispatch = self.server.leave(worker)
        lost = () if dispatch is None else (dispatch,)
        if dispatch is not None:
            self._take_back(worker)
        launched = self._reply(outcome)
        return launched, self._membership("leave", worker, outcome, launched, reason=reason, lost=lost)

    def drop(self, worker: int, reason: str) -> Membership:
        """`worker` is gone after the last evaluation: nothing may change any more, so the rule is not asked."""
        return self._membership("leave", worker, NOTHING, NOBODY, reason=reason)

    def _reply(self, outcome: Outcome) -> Launched:
        """Take back abandoned batches and start the workers of a reply, as far as there are batches."""
        if self._can_restart_together(outcome):
            return self._restart(outcome)
        for dispatch in outcome.abandoned:
            self._take_back(self.server.worker_of(dispatch))
        for starting in outcome.start:
            self._waiting.pop(starting.worker, None)  # one that waits may be started again: the last counts
            self._waiting[starting.worker] = starting
        return self._start_waiting() if self._starts else NOBODY

    def _start_waiting(self) -> Launched:
        """Start who waits, as far as there are batches; nobody once the budget is spent."""
        if self._spent(self.server.num_samples):
            return NOBODY
        workers: list[int] = []
        dispatches: list[int] = []
        while self._waiting:
            waiting = next(iter(self._waiting))
            number = self.start(waiting)
            if number is None:
                break
            workers.append(waiting)
            dispatches.append(number)
        return Launched(workers, dispatches)

    def _take_back(self, worker: int) -> None:
        self._source.give_back(self._batches[worker])
        self._launches[worker] = None

    def start(self, worker: int, most: int | None = None) -> int | None:
        """Start `worker`, whom a rule has started, on its next batches, `most` at most; None where none is left."""
        starting, server = self._waiting[worker], self.server
        count = starting.num_local_steps if most is None else min(most, starting.num_local_steps)
        batches = self._source.take(worker, count)
        number = count_batches(batches)
        if number < count:
            self.round_is_cut = True
        if not batches:
            return None
        del self._waiting[worker]
        self.next_draw[worker] += number
        rate = server.inner_learning_rate(number * self._batch_size)
        dispatch = server.start(starting, number)
        if isinstance(starting, Starting):
            launch = Launch(self._clock(), starting.version, starting.point, rate)
        else:
            launch = Launch(self._clock(), server.version, server.snapshot() if self._exact else None, rate)
        self._launches[worker], self._batches[worker] = launch, batches
        return dispatch

    def extend(self) -> tuple[Launched, Extended | None]:
        """Go on with a larger budget than that of the state that was loaded: start who was to start when that was
        spent. None: there is nobody.
        """
        launched, server = self._start_waiting(), self.server
        if not launched.workers:
            return NOBODY, None
        started = self._started(launched)
        return launched, Extended(started, server.version, server.num_samples, self._clock())

    @property
    def cut_short(self) -> str | None:
        """Why a run with a larger budget would have gone on otherwise from here; None: it would not."""
        if not self.round_is_cut:
            return None
        rule = self.server.rule
        if rule.in_rounds:
            return f"rule {rule.name} works in rounds, and the budget cuts one short"
        return "the workers of Hogwild are given no more than the budget"

    def first_draw(self, worker: int) -> int:
        """The number of the first time that is drawn for `worker`'s gradient in flight; each local step has one."""
        return int(self.next_draw[worker]) - count_batches(self._batches[worker])

    def waits(self, worker: int) -> bool:
        """Whether a rule has started `worker`, which has no batch yet."""
        return worker in self._waiting

    def state_dict(self) -> Plain:
        """The server's, what is in flight and who waits, and the state of the batches; see `asyncsgd.packing`."""
        own = {
            "batches": pack(self._batches),
            "launches": pack(self._launches),
            "waiting": pack(list(self._waiting.values())),
            "source": self._source.state_dict(),
            "next_draw": torch.from_numpy(self.next_draw),
            "round_is_cut": self.round_is_cut,
        }
        return {"server": self.server.state_dict(), "dispatcher": own}

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, of a dispatcher with as many workers."""
        self.server.load_state_dict(state["server"])
        own, classes = state["dispatcher"], classes_in(__name__, "asyncsgd.server", "asyncsgd.rules.base")
        self._batches, self._launches = unpack(own["batches"], classes), unpack(own["launches"], classes)
        self._waiting = {starting.worker: starting for starting in unpack(own["waiting"], classes)}
        self._source.load_state_dict(own["source"])
        self.next_draw = own["next_draw"].cpu().numpy().copy()
        self.round_is_cut = own["round_is_cut"]

    def _can_restart_together(self, outcome: Outcome) -> bool:
        """Whether `_restart` does what one after another would: nothing but one gradient each, of its own stream."""
        number = len(outcome.start)
        return (
            number >= MANY
            and self._starts
            and self._exact
            and isinstance(self._source, OwnStreams)
            and self._source.left >= number
            and not self._waiting
            and not self.server.rule.local_steps
            and not self._spent(self.server.num_samples)
            and all(type(starting) is Start for starting in outcome.start)
        )

    def _restart(self, outcome: Outcome) -> Launched:
        """Start many workers together.

        A worker that was abandoned and starts again has the same batch again, as its own stream would give it.
        """
        server, source = self.server, self._source
        workers = [starting.worker for starting in outcome.start]
        abandoned = [server.worker_of(dispatch) for dispatch in outcome.abandoned]
        again = set(abandoned).intersection(workers)
        for worker in abandoned:
            if worker not in again:
                self._take_back(worker)
        dispatches = server.start_all(workers)
        self.next_draw[np.array(workers, dtype=np.int64)] += 1
        launch = Launch(self._clock(), server.version, server.snapshot(), None)
        for worker in workers:
            self._launches[worker] = launch
            if worker not in again:
                self._batches[worker] = source.take(worker)
        return Launched(workers, dispatches)

    def _membership(
        self,
        kind: str,
        worker: int,
        outcome: Outcome,
        launched: Launched,
        *,
        reason: str = "",
        lost: tuple[int, ...] = (),
    ) -> Membership:
        return Membership(
            kind,
            worker,
            self.server.version,
            self.server.num_samples,
            self._clock(),
            reason=reason,
            lost=lost,
            uses=outcome.uses,
            started=self._started(launched),
            drops=outcome.drops,
            abandoned=outcome.abandoned,
        )

    def _started(self, launched: Launched) -> tuple[Started, ...]:
        return tuple(
            [
                (worker, dispatch, self._batches[worker], self.launch_of(worker).learning_rate)
                for worker, dispatch in zip(launched.workers, launched.dispatches, strict=True)
            ]
        )
