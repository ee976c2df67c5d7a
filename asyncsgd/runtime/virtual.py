"""The virtual clock: any number of workers in one process, their times drawn, their gradients real.

A heap of (seconds, worker, dispatch) says whose gradient arrives next; ties go to the lower worker. The server and
the rule are the ones that real processes use, so an algorithm is the same object on either clock. Cost per event: one
heap operation, O(log N), and one gradient.

Gradients are computed when they arrive, at the parameters that were kept when they started ("keep versions"): one
vector per version that somebody in flight has read, N at most and 1 where everybody starts together. An abandoned
gradient is therefore never computed: its worker is truly interrupted. A rule that does not abandon lets its workers
finish, and drops or uses what arrives; whether it abandons is a parameter of the rule (`interrupt`).

With a `Network` every gradient waits twice for the server's link, which carries one vector at a time, first come
first served: the parameters on their way down, the gradient on its way up.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asyncsgd.record import DONE, FAILED, INTERRUPTED, Evaluation, Event, Fault, Membership, Range, Started
from asyncsgd.rules.base import Start
from asyncsgd.runtime.base import Budget, EvaluationPoints, Report, Result, diverged, verdict_of_evaluation
from asyncsgd.runtime.computation import Computation
from asyncsgd.server import Outcome, Server, Starting
from asyncsgd.speeds import Network, Sampler
from asyncsgd.streams import OwnStreams, Source, count_batches

Measure = Callable[[Tensor], tuple[float, float | None, int | None]]
"""From parameters to (loss, accuracy, loss terms) of an exact evaluation; None where there is no such thing."""

MANY = 32
"""From this many workers on that start at once they are started together, which gives the same run sooner."""


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles of garbage less often: the loop makes many small objects and no cycles.

    With thousands of workers those searches are half of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Flight(NamedTuple):
    """How a gradient started; shared by all that started together."""

    seconds: float
    version: int
    point: Tensor
    learning_rate: float | None


class Virtual:
    """Runs one training under virtual time.

    Args:
        server: owns the parameters.
        computation: computes every gradient.
        sampler: seconds that a worker takes for its k-th gradient.
        batches: hands out `Budget.to_hand_out`.
        measure: evaluates parameters exactly; costs no virtual time.
        num_workers: N, workers 0 to N - 1, all present from the beginning.
        budget, evaluations: as for `ParameterServer`; in seconds, evaluations are at exact points of time.
        batch_size: samples of one gradient.
        report: receives the records; None where nobody wants an Event per arrival, only evaluations in `evaluations`.
        network: links to the server; None: transfers take no time.
        stop_requested: looked at between events.
    """

    def __init__(
        self,
        server: Server,
        computation: Computation,
        sampler: Sampler,
        batches: Source,
        measure: Measure,
        *,
        num_workers: int,
        budget: Budget,
        evaluations: int,
        batch_size: int = 1,
        report: Report | None = None,
        network: Network | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server, self._computation, self._sampler = server, computation, sampler
        self._batches, self._measure, self._network = batches, measure, network
        self._num_workers, self._budget, self._batch_size = num_workers, budget, batch_size
        self._points = EvaluationPoints(budget, evaluations)
        self._report = report
        self._stop_requested = stop_requested
        self.train_seconds = 0.0
        """The virtual clock."""
        self.evaluations: list[Evaluation] = []
        self.num_arrivals = 0
        self._heap: list[tuple[float, int, int]] = []
        self._uploads: list[tuple[float, int, int]] = []  # computed, and waiting for the server's link
        self._link_free = 0.0
        self._dead = 0  # entries of the heap and of the uploads whose gradient was abandoned
        self._draws = np.zeros(num_workers, dtype=np.int64)
        # Of each worker's gradient in flight:
        self._batches_of: list[tuple[Range, ...]] = [()] * num_workers
        self._flight_of: list[_Flight | None] = [None] * num_workers
        self._idle_since = [0.0] * num_workers
        self._pulled_at: dict[int, float] = {}  # with a network, as the next
        self._computed_at: dict[int, float] = {}
        self._waiting_for_batch: dict[int, Starting | Start] = {}

    def run(self) -> Result:
        """Train until the budget is spent; called once.

        Returns:
            DONE; DIVERGED when a loss is not finite; FAILED when everybody in flight takes for ever; INTERRUPTED.
        """
        result = self._evaluate()
        if result is None and self._budget.samples != 0:
            with _rare_collections():
                for worker in range(self._num_workers):
                    self._join(worker)
                while result is None:
                    result = self._advance()
        if (result is None or result.status == DONE) and self.evaluations[-1].version != self._server.version:
            result = self._evaluate() or Result(DONE)
        return result or Result(DONE)

    def _advance(self) -> Result | None:
        if self._stop_requested():
            return Result(INTERRUPTED, "interrupted by the user")
        if self._budget.spent_by(self._server.num_samples):
            return Result(DONE)
        if not self._server.num_in_flight:
            raise RuntimeError(f"rule {self._server.rule.name} left nobody in flight")
        seconds, worker, dispatch = self._pop()
        limit = self._budget.seconds
        over = limit is not None and seconds > limit
        if seconds == math.inf and not over:
            return Result(FAILED, "every worker in flight takes for ever; give --budget-seconds, or other --speeds")
        if self._budget.samples is None:
            # At a point of time all that arrived up to then has been applied.
            result = self._evaluate_up_to(limit if over and limit is not None else math.nextafter(seconds, -math.inf))
            if result is not None:
                return result
        if over and limit is not None:
            self.train_seconds = limit
            return Result(DONE)
        self.train_seconds = seconds
        return self._arrived(worker, dispatch)

    def _pop(self) -> tuple[float, int, int]:
        """The next arrival; abandoned gradients are skipped, uploads wait for the link on the way."""
        server = self._server
        while True:
            if self._uploads and (not self._heap or self._uploads[0] <= self._heap[0]):
                seconds, worker, dispatch = heapq.heappop(self._uploads)
                if server.is_in_flight(worker, dispatch):
                    assert self._network is not None
                    self._computed_at[worker] = seconds
                    arrived = self._transfer(seconds, worker, self._network)
                    heapq.heappush(self._heap, (arrived, worker, dispatch))
                else:
                    self._dead -= 1
                continue
            entry = heapq.heappop(self._heap)
            if server.is_in_flight(entry[1], entry[2]):
                return entry
            self._dead -= 1

    def _transfer(self, seconds: float, worker: int, network: Network) -> float:
        """When a vector that is ready at `seconds` is through the server's link."""
        self._link_free = max(self._link_free, seconds) + network.transfer_seconds(worker)
        return self._link_free

    # ---- arrivals ------------------------------------------------------------------------------------------

    def _arrived(self, worker: int, dispatch: int) -> Result | None:
        server, now = self._server, self.train_seconds
        flight, batches = self._flight_of[worker], self._batches_of[worker]
        assert flight is not None
        gradient = self._computation.compute(worker, batches, flight.point, flight.learning_rate)
        self.num_arrivals += 1
        self._flight_of[worker] = None
        waited, version = flight.seconds - self._idle_since[worker], server.version
        pulled, computed = self._pulled_at.get(worker, flight.seconds), self._computed_at.get(worker, now)
        outcome = server.arrive(
            worker,
            dispatch,
            flight.version,
            self._computation.gradient,
            weight=gradient.weight,
            num_samples=gradient.num_samples,
            seconds=now - flight.seconds,
        )
        self._idle_since[worker] = now
        started = self._execute(outcome)
        if self._report is not None:
            self._report(
                Event(
                    dispatch=dispatch,
                    worker=worker,
                    batches=batches,
                    read_version=flight.version,
                    version=server.version,
                    arrival_delay=version - flight.version,
                    outcome=outcome.outcome,
                    uses=outcome.uses,
                    drops=outcome.drops,
                    abandoned=outcome.abandoned,
                    started=started,
                    loss=gradient.loss,
                    weight=gradient.weight,
                    num_samples=gradient.num_samples,
                    learning_rate=server.learning_rate,
                    train_seconds=now,
                    total_samples=server.num_samples,
                    num_local_steps=1 if flight.learning_rate is None else count_batches(batches),
                    flight_seconds=now - flight.seconds,
                    pull_seconds=pulled - flight.seconds,
                    compute_seconds=computed - pulled,
                    push_seconds=now - computed,
                    wait_seconds=waited,
                    loss_scales=gradient.loss_scales,
                )
            )
        if not math.isfinite(gradient.loss):
            what = f"the loss of worker {worker} at version {flight.version} is {gradient.loss}"
            if self._report is not None:
                self._report(Fault(what, worker, server.version, now))
            return diverged(what)
        if self._budget.samples is not None and (outcome.stepped or self._budget.spent_by(server.num_samples)):
            return self._evaluate() if self._points.passed(server.num_samples, now) else None
        return None

    def _execute(self, outcome: Outcome) -> tuple[Started, ...]:
        """Take back abandoned batches and start the workers of a reply, as far as there are batches."""
        self._dead += len(outcome.abandoned)
        if self._can_restart_together(outcome):
            return self._restart(outcome)
        for dispatch in outcome.abandoned:
            worker = self._server.worker_of(dispatch)
            self._batches.give_back(self._batches_of[worker])
            self._flight_of[worker] = None
            self._idle_since[worker] = self.train_seconds
        for starting in outcome.start:
            self._waiting_for_batch.pop(starting.worker, None)  # one that waits may be started again: the last counts
            self._waiting_for_batch[starting.worker] = starting
        if self._dead > MANY:
            self._tidy()
        return self._start_waiting()

    def _start_waiting(self) -> tuple[Started, ...]:
        server = self._server
        if self._budget.spent_by(server.num_samples):
            return ()
        started: list[Started] = []
        while self._waiting_for_batch:
            worker, starting = next(iter(self._waiting_for_batch.items()))
            batches = self._batches.take(worker, starting.num_local_steps)
            if not batches:
                break
            del self._waiting_for_batch[worker]
            rate = server.inner_learning_rate(count_batches(batches) * self._batch_size)
            dispatch = server.start(starting, 1 if rate is None else count_batches(batches))
            if isinstance(starting, Starting):
                flight = _Flight(self.train_seconds, starting.version, starting.point, rate)
            else:
                flight = _Flight(self.train_seconds, server.version, server.snapshot(), rate)
            self._flight_of[worker], self._batches_of[worker] = flight, batches
            started.append((worker, dispatch, batches, rate))
            self._schedule(worker, dispatch, count_batches(batches))
        return tuple(started)

    def _schedule(self, worker: int, dispatch: int, num_gradients: int) -> None:
        """Draw how long a worker that starts now takes."""
        first = int(self._draws[worker])
        self._draws[worker] += num_gradients
        seconds = math.fsum(self._sampler.draw_one(worker, first + k) for k in range(num_gradients))
        if self._network is None:
            heapq.heappush(self._heap, (self.train_seconds + seconds, worker, dispatch))
            return
        self._pulled_at[worker] = self._transfer(self.train_seconds, worker, self._network)
        heapq.heappush(self._uploads, (self._pulled_at[worker] + seconds, worker, dispatch))

    # ---- many at once --------------------------------------------------------------------------------------

    def _can_restart_together(self, outcome: Outcome) -> bool:
        """Whether `_restart` does what `_start_waiting` would: nothing but one gradient each, of its own stream."""
        number = len(outcome.start)
        return (
            number >= MANY
            and not self._budget.spent_by(self._server.num_samples)
            and isinstance(self._batches, OwnStreams)
            and self._batches.left >= number
            and self._network is None
            and not self._waiting_for_batch
            and not self._server.rule.local_steps
            and all(type(starting) is Start for starting in outcome.start)
        )

    def _restart(self, outcome: Outcome) -> tuple[Started, ...]:
        """Start many workers together: their times are drawn as one array, and the heap is built anew.

        A worker that was abandoned and starts again has the same batch again, as its own stream would give it.
        """
        server, now = self._server, self.train_seconds
        workers = [starting.worker for starting in outcome.start]
        abandoned = [server.worker_of(dispatch) for dispatch in outcome.abandoned]
        again = set(abandoned).intersection(workers)
        for worker in abandoned:
            self._idle_since[worker] = now
            if worker not in again:
                self._batches.give_back(self._batches_of[worker])
        dispatches = server.start_all(workers)
        flight = _Flight(now, server.version, server.snapshot(), None)
        for worker in workers:
            self._flight_of[worker] = flight
            if worker not in again:
                self._batches_of[worker] = self._batches.take(worker)
        index = np.array(workers, dtype=np.int64)
        seconds = self._sampler.draw(index, self._draws[index])
        self._draws[index] += 1
        self._tidy()
        new = list(zip((now + seconds).tolist(), workers, dispatches, strict=True))
        if len(new) > len(self._heap) // 8:
            self._heap += new
            heapq.heapify(self._heap)
        else:
            for entry in new:
                heapq.heappush(self._heap, entry)
        if self._report is None:
            return ()
        return tuple((worker, dispatch, self._batches_of[worker], None) for _, worker, dispatch in new)

    def _tidy(self) -> None:
        """Remove abandoned gradients from the heaps once they are half of them."""
        number = len(self._heap) + len(self._uploads)
        if self._dead == number:
            self._heap.clear()
            self._uploads.clear()
        elif self._dead > number // 2:
            flights = self._server.in_flight_dispatches
            for heap in (self._heap, self._uploads):
                heap[:] = [entry for entry in heap if entry[2] in flights]
                heapq.heapify(heap)
        else:
            return
        self._dead = 0

    def _join(self, worker: int) -> None:
        server = self._server
        outcome = server.join(worker)
        started = self._execute(outcome)
        if self._report is not None:
            self._report(
                Membership(
                    "join",
                    worker,
                    server.version,
                    server.num_samples,
                    self.train_seconds,
                    uses=outcome.uses,
                    started=started,
                )
            )

    # ---- exact evaluation ----------------------------------------------------------------------------------

    def _evaluate_up_to(self, seconds: float) -> Result | None:
        """Evaluate at every point of time up to `seconds`: the parameters have not changed since the last event."""
        for point in self._points.due(seconds):
            self.train_seconds = point
            result = self._evaluate()
            if result is not None:
                return result
        return None

    def _evaluate(self) -> Result | None:
        server = self._server
        loss, accuracy, terms = self._measure(server.parameters)
        evaluation = Evaluation(
            version=server.version,
            total_samples=server.num_samples,
            train_seconds=self.train_seconds,
            loss=loss,
            accuracy=accuracy,
            masked_tokens=terms,
            eval_seconds=0.0,
        )
        self.evaluations.append(evaluation)
        if self._report is not None:
            self._report(evaluation)
        return verdict_of_evaluation(evaluation, self._budget)
