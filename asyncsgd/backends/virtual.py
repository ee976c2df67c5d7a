"""The virtual clock: any number of workers in one process, their times drawn, their gradients real.

A heap of (seconds, worker, dispatch) says whose gradient arrives next; ties go to the lower worker. The server and
the rule are the ones that real processes use, so an algorithm is the same object on either clock. Cost per event: one
heap operation, O(log N), and one gradient.

Gradients are computed when they arrive, at the parameters that were kept when they started. An abandoned gradient is
therefore never computed: its worker is truly interrupted. There is one vector of parameters for every version that a
gradient in flight has read: N at most, and 1 if all workers start together. A rule that does not abandon lets its
workers finish, and drops or uses what arrives. A parameter of the rule says whether it abandons: `interrupt`, in
Ringmaster `stops`.

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

from torch import Tensor

from asyncsgd.core.protocol import Arrived, Happened, Joined, Left, Measured, NoWorkerLeft, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.records.events import Taken
from asyncsgd.simulation.churn import Change, Join, absent_at_first
from asyncsgd.simulation.speeds import Network, Sampler
from asyncsgd.worker.computation import Computation

Measure = Callable[[Tensor], Measured]
"""Evaluates parameters, `(P,)`, exactly."""
Entry = tuple[float, int, int, Work]
"""An entry of a heap: (seconds, worker, dispatch, what is computed)."""
REBUILD_ABOVE = 32
"""Abandoned gradients stay in the heap until they come first. If more than these, and more than half of all entries,
are abandoned, the heap is made anew without them, so that it does not grow without end."""
BULK_START_ABOVE = 32
"""If more gradients than these, and more than an eighth of the heap, start at once, they are appended and the whole
heap is ordered once, O(N), and not once for each."""


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


class VirtualBackend:
    """The virtual clock as a backend: a heap of (seconds, worker, dispatch), and who leaves and joins when.

    Args:
        parameters: `(P,)`, the server's, at which a gradient starts that has no point of its own.
        computation: computes every gradient.
        sampler: draws the seconds that a worker takes for its k-th batch; see `Work.draw`.
        measure: evaluates parameters on the whole evaluation set. It costs no virtual time.
        num_workers: N, workers 0 to N - 1. All are present from the beginning, except those whose first event of
            `churn` is a join.
        network: links to the server; None: transfers take no time.
        churn: who leaves and joins when, in the order of time.
        lock_step: gradients that start together arrive together, when the slowest is done; see `PeerRule.lock_step`.
        statistics: the server's running statistics; None: the model has none.
    """

    may_stop = True  # this and the next as in `asyncsgd.core.protocol.Backend`, `KEPT` as in `asyncsgd.core.state`
    loses_flights = False
    KEPT = (
        "now",
        "computation",
        "_heap",
        "_root_is_free",
        "_uploads",
        "_link_free",
        "_changes",
        "_dead",
        "_working",
        "_idle_since",
        "_pulled_at",
        "_computed_at",
    )

    def __init__(
        self,
        parameters: Tensor,
        computation: Computation,
        sampler: Sampler,
        measure: Measure,
        *,
        num_workers: int,
        network: Network | None = None,
        churn: Sequence[Change] = (),
        lock_step: bool = False,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self.now = 0.0
        self._parameters = parameters
        self.computation = computation
        self._measure = measure
        self._sampler = sampler
        self._network = network
        self._lock_step = lock_step
        self.present = [worker for worker in range(num_workers) if not absent_at_first(churn, worker)]
        self._heap: list[Entry] = []
        """The gradients that arrive, by the seconds at which they do."""
        self._root_is_free = False
        """Whether the first entry of the heap has arrived. It is left there for the next start to replace it with one
        `heapreplace`, which orders the heap once; a pop and a push would order it twice."""
        self._uploads: list[Entry] = []
        """The gradients that are being computed and then go through the server's link, by the seconds at which they are
        done."""
        self._link_free = 0.0
        """When the server's link has carried all that was asked for, in seconds."""
        self._changes = list(churn)
        """The events of churn that are still to come."""
        self._dead = 0
        """How many entries of the heap and of the uploads were abandoned."""
        self._statistics = statistics
        self._start_copy: tuple[int, Tensor, Tensor | None] = (-1, parameters, None)
        """Version, parameters and running statistics, copied for the latest start. All that start at one version share
        the copy."""
        self._working: list[Work | None] = [None] * num_workers
        """What each worker computes. An entry of the heap whose work is not this very object was abandoned. That holds
        after a resume too: the state is saved as a whole, so what was one object is one object again."""
        self._idle_since = [0.0] * num_workers
        self._pulled_at: dict[int, float] = {}
        """With a network, worker -> when it had the parameters of its gradient, in seconds of the clock."""
        self._computed_at: dict[int, float] = {}
        """With a network, worker -> when its gradient was computed, in seconds of the clock."""

    def running(self) -> AbstractContextManager[None]:
        return _rare_collections()

    def freeze(self) -> tuple[()]:
        return ()

    def evaluate(self, parameters: Tensor) -> Measured:
        return self._measure(parameters)

    def next(self, until: float) -> Happened | None:
        change_at = self._changes[0].seconds if self._changes else math.inf
        first = self._next_arrival(change_at)
        if first is None and not (self._changes or self._heap or self._uploads):  # nothing can happen any more
            raise NoWorkerLeft("no worker is left; let one of them join again, or stay")
        # Without a first arrival the next change of the churn comes before any arrival. If there is no change either,
        # its time is infinite, and so are those of all that is in flight.
        seconds = change_at if first is None else first[0]
        if seconds > until:
            self.now = until
            return None
        if seconds == math.inf:
            raise NoWorkerLeft("every worker in flight takes for ever; give --seconds, or other --times")
        self.now = seconds
        if first is None:
            return self._leave_or_join()
        self._root_is_free = True
        return self._arrived(first[3])

    def _next_arrival(self, before: float) -> Entry | None:
        """Return the next arrival, which stays in the heap. None: it comes at the time `before` or later, or never.

        The earliest entry need not be an arrival yet. An abandoned gradient is taken out, and a gradient that was just
        computed goes through the server's link first, until the earliest entry is an arrival.
        """
        self._free_root()
        heap = self._heap
        uploads = self._uploads
        working = self._working
        while heap or uploads:
            # No two entries have the same dispatch, so their works are never compared.
            upload_is_first = uploads and (not heap or uploads[0] < heap[0])
            source = uploads if upload_is_first else heap
            seconds, worker, dispatch, work = first = source[0]
            if seconds >= before:
                return None
            if working[worker] is not work:  # it was abandoned
                heapq.heappop(source)
                self._dead -= 1
            elif source is heap:  # its gradient is with the server
                return first
            else:  # its gradient is computed, and goes through the server's link before it arrives
                heapq.heappop(uploads)
                self._computed_at[worker] = seconds
                heapq.heappush(heap, (self._transfer(seconds, worker), worker, dispatch, work))
        return None

    def _free_root(self) -> None:
        """Take the entry that has arrived out of the heap, if no start has replaced it."""
        if self._root_is_free:
            heapq.heappop(self._heap)
            self._root_is_free = False

    def _leave_or_join(self) -> Joined | Left:
        """Carry out the next change of the churn. The method answers with a step whose `stop` has the
        gradient that the worker had in flight."""
        change = self._changes.pop(0)
        if isinstance(change, Join):
            self._idle_since[change.worker] = self.now
            return Joined(change.worker)
        self.computation.forget(change.worker)
        return Left(change.worker)

    def _arrived(self, work: Work) -> Arrived:
        worker = work.worker
        began = work.began
        now = self.now
        assert work.point is not None
        computation = self.computation
        report = computation.compute(worker, work.batches, work.point, work.rate, statistics=work.statistics)
        pull = 0.0
        pull_and_compute = now - began
        if self._network is not None:
            pull = self._pulled_at[worker] - began
            pull_and_compute = self._computed_at[worker] - began
        taken = Taken(
            pull=pull,
            compute=pull_and_compute - pull,
            push=now - began - pull_and_compute,
            wait=began - self._idle_since[worker],
        )
        self._working[worker] = None
        self._idle_since[worker] = now
        return Arrived(work, work.version, computation.gradient, report, now - began, taken, computation.moved)

    def _transfer(self, seconds: float, worker: int) -> float:
        """Send a vector that is ready at `seconds` through the server's link; return when it is through, in seconds."""
        assert self._network is not None
        self._link_free = max(self._link_free, seconds) + self._network.transfer_seconds(worker)
        return self._link_free

    def stop(self, works: Sequence[Work]) -> None:
        self._dead += len(works)
        for work in works:
            self._working[work.worker] = None
            self._idle_since[work.worker] = self.now
        if self._dead > max(REBUILD_ABOVE, (len(self._heap) + len(self._uploads)) // 2):
            for heap in (self._heap, self._uploads):
                heap[:] = [entry for entry in heap if self._working[entry[1]] is entry[3]]
                heapq.heapify(heap)
            self._dead = 0
            self._root_is_free = False  # the entry that has arrived is gone too, since its worker works at nothing

    def start(self, works: Sequence[Work]) -> None:
        """Keep the parameters at which gradients start, draw how long they take, and enter them into the heap."""
        heap = self._heap
        draw = self._sampler.draw_one
        network = self._network
        bulk = network is None and len(works) > max(BULK_START_ABOVE, len(heap) // 8)
        slowest = 0.0
        if self._lock_step:  # peers that wait for the slowest, with one computing time a gradient
            slowest = max([draw(work.worker, work.draw) for work in works])
        for work in works:
            worker = work.worker
            number = work.num_local_steps
            first = work.draw
            if work.point is None:
                if self._start_copy[0] != work.version:
                    statistics = None if self._statistics is None else self._statistics.values.clone()
                    self._start_copy = (work.version, self._parameters.clone(), statistics)
                _, work.point, work.statistics = self._start_copy
            self._working[worker] = work
            if number == 1:
                seconds = work.drawn = draw(worker, first)
            else:
                drawn = [draw(worker, k) for k in range(first, first + number)]
                seconds = math.fsum(drawn)
                work.drawn = drawn[-1]
            if network is not None:
                self._pulled_at[worker] = pulled = self._transfer(self.now, worker)
                heapq.heappush(self._uploads, (pulled + seconds, worker, work.dispatch, work))
                continue
            if self._lock_step:
                seconds = slowest
            # `began` is now; of peers it is the start of the group, whose times so far are all in `seconds`.
            entry = (work.began + seconds, worker, work.dispatch, work)
            if self._root_is_free:
                self._root_is_free = False
                heapq.heapreplace(heap, entry)
            elif bulk:
                heap.append(entry)
            else:
                heapq.heappush(heap, entry)
        if bulk:
            heapq.heapify(heap)
