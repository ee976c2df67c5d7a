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
from contextlib import AbstractContextManager

import numpy as np
from torch import Tensor

from asyncsgd.batches import Source
from asyncsgd.evaluation import Measured
from asyncsgd.packing import Plain, pack, unpack
from asyncsgd.records.events import Taken
from asyncsgd.runtime.base import Budget, NeverSaves, Report, Saver
from asyncsgd.runtime.computation import Computation
from asyncsgd.runtime.dispatcher import MANY, Dispatcher
from asyncsgd.runtime.fit import Arrived, Fit, Happened, Joined, Launched, Left, Nobody, Sink
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


class Heap:
    """The virtual clock as a backend: a heap of (seconds, worker, dispatch), and who leaves and joins when.

    Args:
        flights: knows what is in flight.
        computation: computes every gradient.
        sampler: seconds that a worker takes for its k-th gradient.
        measure: evaluates parameters exactly; costs no virtual time.
        num_workers: N, workers 0 to N - 1, all present from the beginning but for those whom `churn` lets join first.
        network: links to the server; None: transfers take no time.
        churn: who leaves and joins when, in the order of time.
    """

    settled, anew = True, False

    def __init__(
        self,
        flights: Dispatcher,
        computation: Computation,
        sampler: Sampler,
        measure: Measure,
        *,
        num_workers: int,
        network: Network | None = None,
        churn: Sequence[Change] = (),
    ) -> None:
        self.now = 0.0
        self._flights, self._server = flights, flights.server
        self._computation, self._sampler, self._measure, self._network = computation, sampler, measure, network
        self.present = [worker for worker in range(num_workers) if not absent_at_first(churn, worker)]
        self._heap: list[tuple[float, int, int]] = []
        self._uploads: list[tuple[float, int, int]] = []  # computed, and waiting for the server's link
        self._link_free = 0.0
        self._changes = list(churn)  # that are still to come
        self._dead = 0  # entries of the heap and of the uploads whose gradient was abandoned
        # Of each worker's gradient in flight:
        self._idle_since = [0.0] * num_workers
        self._pulled_at: dict[int, float] = {}  # with a network, as the next
        self._computed_at: dict[int, float] = {}

    def running(self) -> AbstractContextManager[None]:
        return _rare_collections()

    def settle(self) -> tuple[()]:
        return ()

    def evaluate(self, parameters: Tensor) -> Measured:
        return self._measure(parameters)

    def state_dict(self) -> Plain:
        return {
            "computation": self._computation.state_dict(),
            "train_seconds": self.now,
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
        self._computation.load_state_dict(state["computation"])
        self.now = state["train_seconds"]
        self._heap, self._uploads = unpack(state["heap"], {}), unpack(state["uploads"], {})
        self._link_free, self._dead = state["link_free"], state["dead"]
        self._changes = self._changes[len(self._changes) - state["changes_left"] :]
        self._idle_since = list(state["idle_since"])
        self._pulled_at, self._computed_at = dict(state["pulled_at"]), dict(state["computed_at"])

    def next(self, until: float) -> Happened | None:
        change = self._changes[0] if self._changes else None
        if not self._server.num_in_flight and change is None:
            if not self._server.workers:
                raise Nobody("no worker is left; let one of them join again, or stay")
            raise RuntimeError(f"rule {self._server.rule.name} left nobody in flight")
        entry = self._pop(math.inf if change is None else change.seconds)
        if entry is not None:
            seconds, worker, dispatch = entry
        else:
            assert change is not None
            seconds = change.seconds
        if seconds > until:
            self.now = until
            if entry is not None:
                heapq.heappush(self._heap, entry)  # it is in flight still
            return None
        if seconds == math.inf:
            raise Nobody("every worker in flight takes for ever; give --seconds, or other --speeds")
        self.now = seconds
        return self._change() if entry is None else self._arrived(worker, dispatch)

    def _change(self) -> Joined | Left:
        """The next one of the churn."""
        change = self._changes.pop(0)
        if isinstance(change, Join):
            self._idle_since[change.worker] = self.now
            return Joined(change.worker)
        self._computation.forget(change.worker)
        return Left(change.worker)

    def _arrived(self, worker: int, dispatch: int) -> Arrived:
        launch, now = self._flights.launch_of(worker), self.now
        assert launch.point is not None
        batches = self._flights.batches_of(worker)
        gradient = self._computation.compute(worker, batches, launch.point, launch.learning_rate)
        pulled, computed = self._pulled_at.get(worker, launch.seconds), self._computed_at.get(worker, now)
        waited = launch.seconds - self._idle_since[worker]
        self._idle_since[worker] = now
        return Arrived(
            worker,
            dispatch,
            launch.version,
            self._computation.gradient,
            gradient,
            now - launch.seconds,
            Taken(pulled - launch.seconds, computed - pulled, now - computed, waited),
        )

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

    def follow(self, launched: Launched, abandoned: tuple[int, ...] = (), lost: tuple[int, ...] = ()) -> None:
        """Draw how long everybody takes who starts now, and forget what nobody waits for."""
        self._dead += len(abandoned) + len(lost)
        for dispatch in abandoned:
            self._idle_since[self._server.worker_of(dispatch)] = self.now
        if self._dead > MANY:
            self._tidy()
        if len(launched.workers) >= MANY and self._network is None and not self._server.rule.local_steps:
            self._schedule_together(launched)
            return
        for worker, dispatch in zip(launched.workers, launched.dispatches, strict=True):
            self._schedule(worker, dispatch)

    def _schedule(self, worker: int, dispatch: int) -> None:
        """Draw how long a worker that starts now takes."""
        draws = range(self._flights.first_draw(worker), int(self._flights.next_draw[worker]))
        seconds = math.fsum(self._sampler.draw_one(worker, draw) for draw in draws)
        if self._network is None:
            heapq.heappush(self._heap, (self.now + seconds, worker, dispatch))
            return
        self._pulled_at[worker] = self._transfer(self.now, worker, self._network)
        heapq.heappush(self._uploads, (self._pulled_at[worker] + seconds, worker, dispatch))

    def _schedule_together(self, launched: Launched) -> None:
        """The same for many: their times are drawn as one array, and the heap is built anew where that is quicker."""
        index = np.array(launched.workers, dtype=np.int64)
        seconds = self._sampler.draw(index, self._flights.next_draw[index] - 1)
        new = list(zip((self.now + seconds).tolist(), launched.workers, launched.dispatches, strict=True))
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


class Virtual(Fit):
    """Runs one training under virtual time.

    Args:
        server: owns the parameters.
        computation, sampler, measure, num_workers, network, churn: see `Heap`.
        batches: hands out `Budget.to_hand_out`.
        budget, evaluations: see `Fit`.
        batch_size: samples of one gradient.
        report, saver, stop_requested: see `Sink`.
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
        def clock() -> float:
            return heap.now

        dispatcher = Dispatcher(
            server,
            batches,
            num_workers=num_workers,
            batch_size=batch_size,
            clock=clock,
            spent=budget.spent_by,
            exact=True,
        )
        heap = Heap(dispatcher, computation, sampler, measure, num_workers=num_workers, network=network, churn=churn)
        sink = Sink(report, saver or NeverSaves(), stop_requested)
        super().__init__(dispatcher, heap, budget, evaluations, sink)
