"""The virtual clock: any number of workers in one process, their times drawn, their gradients real.

A heap of (seconds, worker, dispatch) says whose gradient arrives next; ties go to the lower worker. The server and
the rule are the ones that real processes use, so an algorithm is the same object on either clock. Cost per event: one
heap operation, O(log N), and one gradient.

Gradients are computed when they arrive, at the parameters that were kept when they started ("keep versions"). There is
one vector for every version that a gradient in flight has read: N at most, and 1 if all workers start together. An
abandoned gradient is therefore never computed: its worker is truly interrupted. A rule that does not abandon lets its
workers finish, and drops or uses what arrives. A parameter of the rule says whether it abandons (`interrupt`).

With a `Network` every gradient waits twice for the server's link: when the parameters go down, and when the gradient
goes up. The link carries one vector at a time, in the order of requests.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from asyncsgd.batches import Source
from asyncsgd.dispatcher import MANY, Dispatcher, Launched
from asyncsgd.evaluation import Measured
from asyncsgd.packing import Plain, classes_in, pack, unpack
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Evaluation, Fault, Taken
from asyncsgd.runtime.base import (
    Budget,
    EvaluationPoints,
    Judge,
    NeverSaves,
    Report,
    Result,
    Saver,
    diverged,
)
from asyncsgd.runtime.computation import Computation
from asyncsgd.server import Server
from asyncsgd.simulation.churn import Change, Join, absent_at_first
from asyncsgd.simulation.speeds import Network, Sampler

Measure = Callable[[Tensor], Measured]
"""From parameters to what an exact evaluation says of them."""


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles of garbage less often.

    The loop makes many small objects and no cycles. With thousands of workers these searches take half of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Virtual:
    """Runs one training under virtual time.

    Args:
        server: owns the parameters.
        computation: computes every gradient.
        sampler: seconds that a worker takes for its k-th gradient.
        batches: hands out `Budget.to_hand_out`.
        measure: evaluates parameters exactly; costs no virtual time.
        num_workers: N, workers 0 to N - 1, all present from the beginning but for those whom `churn` lets join first.
        budget, evaluations: as for `ParameterServer`; in seconds, evaluations are at exact points of time.
        batch_size: samples of one gradient.
        report: receives the records; None where nobody wants an Event per arrival, only evaluations in `evaluations`.
        network: links to the server; None: transfers take no time.
        churn: who leaves and joins when, in the order of time.
        saver: takes states for checkpoints, and one when the run is asked to stop.
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
        churn: Sequence[Change] = (),
        saver: Saver | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server, self._computation, self._sampler = server, computation, sampler
        self._measure, self._network = measure, network
        self._num_workers, self._budget = num_workers, budget
        self.train_seconds = 0.0
        """The virtual clock."""
        self._dispatcher = Dispatcher(
            server,
            batches,
            num_workers=num_workers,
            batch_size=batch_size,
            clock=lambda: self.train_seconds,
            spent=budget.spent_by,
            exact=True,
        )
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self._report = report
        self._saver = saver or NeverSaves()
        self._stop_requested = stop_requested
        self.evaluations: list[Evaluation] = []
        self.num_arrivals = 0
        self._heap: list[tuple[float, int, int]] = []
        self._uploads: list[tuple[float, int, int]] = []  # computed, and waiting for the server's link
        self._link_free = 0.0
        self._changes = list(churn)  # that are still to come
        self._dead = 0  # entries of the heap and of the uploads whose gradient was abandoned
        # Of each worker's gradient in flight:
        self._idle_since = [0.0] * num_workers
        self._pulled_at: dict[int, float] = {}  # with a network, as the next
        self._computed_at: dict[int, float] = {}

    def run(self) -> Result:
        """Train until the budget is spent; called once, on a new object or on one that has loaded a state.

        Returns:
            DONE; DIVERGED when a loss is not finite; FAILED when everybody in flight takes for ever or nobody is left;
            INTERRUPTED.
        """
        goes_on = bool(self.evaluations)
        result = self._go_on() if goes_on else self._evaluate()
        if result is None and self._budget.samples != 0:
            with _rare_collections():
                for worker in () if goes_on else range(self._num_workers):
                    if not absent_at_first(self._changes, worker):
                        self._join(worker)
                while result is None:
                    result = self._advance()
                    if result is None and self._saver.due(self._server.num_samples):
                        self._save()
            if result.status == INTERRUPTED:
                self._save()
        if (result is None or result.status == DONE) and self.evaluations[-1].version != self._server.version:
            result = self._evaluate(last=True) or Result(DONE)
        result = result or Result(DONE)
        if result.status == DONE and self.num_arrivals and self._saver.due(self._server.num_samples, at_end=True):
            self._save()
        return self._judge.with_best(result)

    def _go_on(self) -> Result | None:
        """Start what the smaller budget of the state had kept from starting; the result, if the run had ended."""
        result = self._judge.verdict()
        if result is None:
            launched, record = self._dispatcher.extend()
            self._follow(launched, ())
            if record is not None and self._report is not None:
                self._report(record)
        return result

    def _save(self) -> None:
        self._saver.save(
            self.state_dict(),
            version=self._server.version,
            num_samples=self._server.num_samples,
            train_seconds=self.train_seconds,
            cut_short=self._dispatcher.cut_short,
        )

    def state_dict(self) -> Plain:
        """All that decides the rest of a run that was stopped; see `asyncsgd.packing`.

        Of the server, the computation and the batches too. A run that has loaded it goes on as if it had never stopped.
        """
        return {
            "server": self._server.state_dict(),
            "dispatcher": self._dispatcher.state_dict(),
            "computation": self._computation.state_dict(),
            "points": self._points.state_dict(),
            "judge": self._judge.state_dict(),
            "evaluations": pack(self.evaluations),
            "train_seconds": self.train_seconds,
            "num_arrivals": self.num_arrivals,
            "heap": pack(self._heap),
            "uploads": pack(self._uploads),
            "link_free": self._link_free,
            "dead": self._dead,
            "changes_left": len(self._changes),
            "idle_since": list(self._idle_since),
            "pulled_at": dict(self._pulled_at),
            "computed_at": dict(self._computed_at),
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state` at the next `run`."""
        self._server.load_state_dict(state["server"])
        self._dispatcher.load_state_dict(state["dispatcher"])
        self._computation.load_state_dict(state["computation"])
        self._points.load_state_dict(state["points"])
        self._judge.load_state_dict(state["judge"])
        self.evaluations = unpack(state["evaluations"], classes_in("asyncsgd.records.events"))
        self.train_seconds, self.num_arrivals = state["train_seconds"], state["num_arrivals"]
        self._heap, self._uploads = unpack(state["heap"], {}), unpack(state["uploads"], {})
        self._link_free, self._dead = state["link_free"], state["dead"]
        self._changes = self._changes[len(self._changes) - state["changes_left"] :]
        self._idle_since = list(state["idle_since"])
        self._pulled_at, self._computed_at = dict(state["pulled_at"]), dict(state["computed_at"])

    def _advance(self) -> Result | None:
        if self._stop_requested():
            return Result(INTERRUPTED, "interrupted by the user")
        if self._budget.spent_by(self._server.num_samples):
            return Result(DONE)
        change = self._changes[0] if self._changes else None
        if not self._server.num_in_flight and change is None:
            if not self._server.workers:
                return Result(FAILED, "no worker is left; let one of them join again, or stay")
            raise RuntimeError(f"rule {self._server.rule.name} left nobody in flight")
        entry = self._pop(math.inf if change is None else change.seconds)
        if entry is not None:
            seconds, worker, dispatch = entry
        else:
            assert change is not None
            seconds = change.seconds
        limit = self._budget.seconds
        over = limit is not None and seconds > limit
        if seconds == math.inf and not over:
            return Result(FAILED, "every worker in flight takes for ever; give --budget-seconds, or other --speeds")
        if not self._points.by_samples:
            # At a point of time all that arrived up to then has been applied.
            result = self._evaluate_up_to(limit if over and limit is not None else math.nextafter(seconds, -math.inf))
            if result is not None:
                return result
        if over and limit is not None:
            self.train_seconds = limit
            if entry is not None:
                heapq.heappush(self._heap, entry)  # it is in flight still
            return Result(DONE)
        self.train_seconds = seconds
        return self._change() if entry is None else self._arrived(worker, dispatch)

    def _change(self) -> Result | None:
        """Let the next one of the churn leave or join."""
        change = self._changes.pop(0)
        if isinstance(change, Join):
            self._idle_since[change.worker] = self.train_seconds
            self._join(change.worker)
            return None
        launched, record = self._dispatcher.leave(change.worker)
        self._computation.forget(change.worker)
        self._dead += len(record.lost)
        self._follow(launched, record.abandoned)
        if self._report is not None:
            self._report(record)
        if self._points.by_samples and record.uses:
            return self._evaluate() if self._points.passed(self._server.num_samples, self.train_seconds) else None
        return None

    def _pop(self, until: float) -> tuple[float, int, int] | None:
        """The next arrival. None if it comes at the time `until` or later, where `until` is finite, or if it never
        comes.

        Abandoned gradients are skipped, uploads wait for the link on the way.
        """
        server = self._server
        while True:
            if until < math.inf and all(heap[0][0] >= until for heap in (self._heap, self._uploads) if heap):
                return None
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

    def _arrived(self, worker: int, dispatch: int) -> Result | None:
        server, dispatcher, now = self._server, self._dispatcher, self.train_seconds
        launch = dispatcher.launch_of(worker)
        assert launch.point is not None
        gradient = self._computation.compute(worker, dispatcher.batches_of(worker), launch.point, launch.learning_rate)
        self.num_arrivals += 1
        waited = launch.seconds - self._idle_since[worker]
        pulled, computed = self._pulled_at.get(worker, launch.seconds), self._computed_at.get(worker, now)
        arrived = dispatcher.arrive(
            worker, dispatch, launch.version, self._computation.gradient, gradient, now - launch.seconds
        )
        self._idle_since[worker] = now
        self._follow(arrived.launched, arrived.outcome.abandoned)
        if self._report is not None:
            taken = Taken(pulled - launch.seconds, computed - pulled, now - computed, waited)
            self._report(dispatcher.event(arrived, now, taken))
        if not math.isfinite(gradient.loss):
            what = f"the loss of worker {worker} at version {launch.version} is {gradient.loss}"
            if self._report is not None:
                self._report(Fault(what, worker, server.version, now))
            return diverged(what)
        passed = self._points.by_samples and arrived.outcome.stepped and self._points.passed(server.num_samples, now)
        if self._budget.spent_by(server.num_samples):
            return self._evaluate() or Result(DONE)
        return self._evaluate() if passed else None

    def _follow(self, launched: Launched, abandoned: tuple[int, ...]) -> None:
        """Draw how long everybody takes who starts now, and forget what was abandoned."""
        self._dead += len(abandoned)
        for dispatch in abandoned:
            self._idle_since[self._server.worker_of(dispatch)] = self.train_seconds
        if self._dead > MANY:
            self._tidy()
        if len(launched.workers) >= MANY and self._network is None and not self._server.rule.local_steps:
            self._schedule_together(launched)
            return
        for worker, dispatch in zip(launched.workers, launched.dispatches, strict=True):
            self._schedule(worker, dispatch)

    def _schedule(self, worker: int, dispatch: int) -> None:
        """Draw how long a worker that starts now takes."""
        draws = range(self._dispatcher.first_draw(worker), int(self._dispatcher.next_draw[worker]))
        seconds = math.fsum(self._sampler.draw_one(worker, draw) for draw in draws)
        if self._network is None:
            heapq.heappush(self._heap, (self.train_seconds + seconds, worker, dispatch))
            return
        self._pulled_at[worker] = self._transfer(self.train_seconds, worker, self._network)
        heapq.heappush(self._uploads, (self._pulled_at[worker] + seconds, worker, dispatch))

    def _schedule_together(self, launched: Launched) -> None:
        """The same for many: their times are drawn as one array, and the heap is built anew where that is quicker."""
        index = np.array(launched.workers, dtype=np.int64)
        seconds = self._sampler.draw(index, self._dispatcher.next_draw[index] - 1)
        new = list(zip((self.train_seconds + seconds).tolist(), launched.workers, launched.dispatches, strict=True))
        if len(new) > len(self._heap) // 8:
            self._heap += new
            heapq.heapify(self._heap)
        else:
            for entry in new:
                heapq.heappush(self._heap, entry)

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
        launched, record = self._dispatcher.join(worker)
        self._follow(launched, ())
        if self._report is not None:
            self._report(record)

    def _evaluate_up_to(self, seconds: float) -> Result | None:
        """Evaluate at every point of time up to `seconds`: the parameters have not changed since the last event."""
        for point in self._points.due(seconds):
            self.train_seconds = point
            result = self._evaluate(last=point == self._budget.seconds)
            if result is not None:
                return result
        return None

    def _evaluate(self, *, last: bool = False) -> Result | None:
        server = self._server
        evaluation = self._measure(server.parameters).record(
            version=server.version, num_samples=server.num_samples, train_seconds=self.train_seconds
        )
        self.evaluations.append(evaluation)
        if self._report is not None:
            self._report(evaluation)
        return self._judge.of(evaluation, lambda: server.parameters, last=last)
