"""Workers that are processes, as a backend of `asyncsgd.core.loop.Loop`, whatever carries vectors between them and the
server.

The clock is the real one, and an evaluation stops it. A gradient that arrives t seconds into an evaluation is held
back, and counts when the clock has run for t seconds after it. So an evaluation changes neither the clock nor the order
of arrivals. A worker evaluates its share when it has finished its gradient, so none is still computed when the
evaluation ends. A worker that is lost becomes a `Left` with the reason, and the server decides what follows from that.

Workers may also step the shared vector themselves, without locks (Hogwild). Then this process hands out batches and
counts the steps that it hears of, and the server's optimizer does nothing. Before an evaluation and a checkpoint they
are frozen: a worker with a gradient ready waits, and one that is stepping finishes its step.

    each worker, again and again:  x <- x - eta * grad f(x; batch),  x read and written in place while others do the
    same

Niu, Recht, Re, Wright: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, NeurIPS 2011.
Deviation: the gradients are dense, so updates may overwrite each other in part. A recorded delay is
how many steps the server had heard of at the arrival, less how many at the read. Such a run cannot be replayed, because
nothing records what a read saw."""

from __future__ import annotations

import collections
import contextlib
import math
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from asyncsgd.backends.link import (
    Compute,
    Computed,
    Evaluate,
    EvaluatedAgain,
    Gone,
    Holding,
    Link,
    Message,
    Proceed,
    Ready,
    Refused,
    ShardEvaluated,
    Stop,
    Wake,
)
from asyncsgd.backends.pair import Pair
from asyncsgd.backends.segment import FROZEN, SAMPLES, Segment
from asyncsgd.core.limits import POLL_SECONDS, Interrupted, TrainingClock
from asyncsgd.core.protocol import Arrived, Happened, Left, Measured, NoWorkerLeft, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.errors import RunError
from asyncsgd.tasks.base import Sums, Task, decode_sums
from asyncsgd.worker.evaluation import measured_in_shards

HowItEnded = Callable[[int, float], str | None]
"""Given a worker and how many seconds to wait for its end: how its process ended, in words. None: it lives, or nobody
knows."""

STOP_SECONDS = 30.0
"""How many seconds `close` waits for Hogwild's workers to end after `Stop`. `asyncsgd.run.lifecycle` has all such times
in their order."""


class ProcessBackend:
    """The worker processes of a run.

    Args:
        links: the link of each worker, by its number: a pipe where memory is shared, a `Pair` (a gloo group of two)
            where it is not.
        segment: the memory that server and workers share: the parameters, and for each worker a slot for its gradient
            or its starting point. Without slots the workers step the parameters themselves (Hogwild).
        task: what they learn.
        clock: the training clock.
        how_it_ended: tells how a worker's process ended, for messages and for workers that die before they connect.
        stop_requested: asked while this object waits for workers. `Interrupted` is raised if it says yes.
        statistics: the server's running statistics; those that an evaluation has estimated again, from training
            batches, are put there. None: the model has none.
    """

    may_stop = True  # this and the next as in `asyncsgd.core.protocol.Backend`, `KEPT` as in `asyncsgd.core.state`
    loses_flights = True
    KEPT = ("_clock", "_num_samples", "_shared")

    def __init__(
        self,
        links: Mapping[int, Link],
        segment: Segment,
        task: Task,
        clock: TrainingClock,
        *,
        how_it_ended: HowItEnded = lambda worker, seconds: None,
        stop_requested: Callable[[], bool] = lambda: False,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self._statistics = statistics
        self._links = dict(links)
        self._segment = segment
        self._task = task
        self._clock = clock
        self._how_it_ended = how_it_ended
        self._stop_requested = stop_requested
        self._workers_step = not segment.slots
        self._selector = selectors.DefaultSelector()
        for worker, link in links.items():
            self._selector.register(link, selectors.EVENT_READ, worker)
        self._readable: collections.deque[int] = collections.deque()
        """The workers that have sent something that was not read yet."""
        self._connected: set[int] = set()
        """The workers that have said that they are ready, and are not lost."""
        self._left: collections.deque[Left] = collections.deque()
        """The losses of workers that `next` has not returned yet."""
        self._reasons: list[str] = []
        """Why workers were lost, for the message when none is left."""
        self._works: dict[int, Work] = {}
        """Worker -> the work that it has until its gradient arrives."""
        self._unsent: dict[int, Work] = {}
        """Worker -> its work, for those of `_works` that were not sent yet."""
        self._computing: set[int] = set()
        """The workers that were told to compute and have not answered. They may still be at an abandoned gradient."""
        self._num_samples = 0
        """How many samples have arrived."""
        self._shared = segment.extra  # under this name in checkpoints
        """The optimizer state that Hogwild workers share, for checkpoints."""
        self._late_arrivals: list[tuple[float, int, Computed]] = []
        """Arrivals during an evaluation: (seconds of the clock at which it counts, worker, message), ascending."""
        self._paused = False
        """Whether an evaluation has stopped the clock."""
        self._waiting_to_step: set[int] = set()
        """The Hogwild workers that have a gradient ready, and wait to be told to step."""
        self._peak_bytes: dict[int, tuple[int, int, int]] = {}
        """Worker -> its peak memory; see `peak_bytes` of `records.events.MemoryUsed`."""

    def wait_until_ready(self, fingerprint: str) -> None:
        """Wait until every worker is ready or lost.

        Args:
            fingerprint: `FlatModel.fingerprint` of the server's model, which every worker's must equal.
        """
        while coming := self._links.keys() - self._connected:
            for worker, message in self._wait():
                if isinstance(message, Ready):
                    if message.layout != fingerprint:
                        raise RuntimeError(
                            f"worker {worker} has built another model: layout {message.layout}, not {fingerprint}"
                        )
                    self._connected.add(worker)
            for worker in coming & self._links.keys():  # `_wait` may have lost one of them
                reason = self._how_it_ended(worker, 0.0)
                if reason is not None:
                    self._lose(worker, reason)

    @property
    def present(self) -> Sequence[int]:
        return sorted(self._connected)

    @property
    def now(self) -> float:
        return self._clock.seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._clock.resume()
        self._paused = False
        try:
            yield
        finally:
            self._clock.pause()

    def stop(self, works: Sequence[Work]) -> None:
        """Give up gradients. A real worker cannot be interrupted in one: it finishes it, and the gradient is ignored.

        Only the wait of a worker that was slowed down (`asyncsgd.backends.process_setup.Straggling`) is cut short.
        """
        for work in works:
            worker = work.worker
            if self._works.get(worker) is work:
                del self._works[worker]
                was_sent = worker not in self._unsent
                self._unsent.pop(worker, None)
                if was_sent and worker in self._computing:
                    self._send(worker, Wake())

    def start(self, works: Sequence[Work]) -> None:
        """Note what is to start. `next` sends it, and only to workers that are idle. So an evaluation that is due now
        comes first."""
        for work in works:
            self._works[work.worker] = work
            self._unsent[work.worker] = work
        # The count is published here for Hogwild's workers, whose learning rate follows the samples that have arrived.
        if self._workers_step:
            self._segment.control[SAMPLES] = self._num_samples

    def next(self, until: float) -> Happened | None:
        """See `Backend.next`. It returns None after half a second without a message, so that the loop can look at
        signals."""
        if self._left:
            return self._left.popleft()
        if not self._connected:
            raise self._nobody()
        if self.now >= until:
            return None  # workers that an evaluation has frozen stay frozen
        self._end_pause_and_send()
        release = self._late_arrivals[0][0] if self._late_arrivals else math.inf
        if release <= self.now:
            _, worker, held_back = self._late_arrivals.pop(0)
            return self._arrived(worker, held_back)
        for worker, message in self._wait(min(release, until) - self.now):
            if isinstance(message, Computed):
                return self._arrived(worker, message)
        return None

    def freeze(self) -> Iterable[Arrived]:
        """Freeze Hogwild workers until the next call of `next`, and yield the steps that they took before they froze.

        Other workers go on, since they do not change the parameters.
        """
        if not self._workers_step:
            return
        self._ask_to_stand_still()
        while self._computing - self._waiting_to_step:
            # Not `_wait`: the checkpoint that Ctrl-C asks for is taken after this call.
            for worker, message in self._wait_uninterrupted():
                if isinstance(message, Computed):
                    arrived = self._arrived(worker, message)
                    if arrived is not None:
                        yield arrived

    def evaluate(self, parameters: Tensor) -> Measured:
        """Let each worker evaluate a shard. The shards of a worker that is lost meanwhile go to another.

        Raises:
            Interrupted: if the user asks to stop.
            NoWorkerLeft: if no worker is left.
        """
        if self._clock.running:
            self._paused = True  # `next` lets the clock run again
        self._clock.pause()
        began = time.perf_counter()
        worker_of_shard = dict(enumerate(self.present))
        sums: dict[int, Sums] = {}
        num_shards = len(worker_of_shard)
        vectors = self._vectors(parameters, self._segment.statistics)
        for shard, worker in worker_of_shard.items():
            self._send(worker, Evaluate(shard, num_shards), vectors)
        while self._connected and len(sums) < num_shards:
            for worker, message in self._wait():
                if isinstance(message, ShardEvaluated):
                    sums[message.shard] = decode_sums(message.sums)
                    if isinstance(message, EvaluatedAgain) and self._statistics is not None:
                        self._statistics.reestimated = torch.frombuffer(
                            bytearray(message.statistics), dtype=torch.float64
                        )
                    resident, on_device = message.peak_bytes
                    self._peak_bytes[worker] = (worker, resident, on_device)
                elif isinstance(message, Computed):
                    self._late_arrivals.append((self.now + time.perf_counter() - began, worker, message))
                elif message is None and self._connected:  # the worker is lost, and another one takes its shards
                    other = min(self._connected)
                    for shard, owner in worker_of_shard.items():
                        if owner == worker and shard not in sums:
                            worker_of_shard[shard] = other
                            self._send(other, Evaluate(shard, num_shards), vectors)
        if not self._connected:
            raise self._nobody()
        self._late_arrivals.sort(key=lambda item: item[0])
        peaks = tuple(sorted(self._peak_bytes.values()))
        shards = [sums[shard] for shard in sorted(sums)]
        return measured_in_shards(self._task, shards, time.perf_counter() - began, peaks)

    def close(self) -> list[Left]:
        """Tell all workers to stop, and wait for those that step the parameters.

        Returns:
            The losses of workers that `next` has not returned.
        """
        if self._workers_step:
            self._segment.control[FROZEN] = 1  # so that no worker takes a step of which nobody hears
        for worker in list(self._links):
            self._send(worker, Stop())
        left = list(self._left)  # a worker that ends during the wait below was told to end, and is not lost
        deadline = time.monotonic() + STOP_SECONDS
        while self._workers_step and self._connected and time.monotonic() < deadline:
            self._messages()
        return left

    def restored(self) -> None:
        self._segment.control[SAMPLES] = self._num_samples

    def _ask_to_stand_still(self) -> None:
        if not int(self._segment.control[FROZEN]):
            self._segment.control[FROZEN] = 1
            for worker in self._computing:
                self._send(worker, Wake())

    def _end_pause_and_send(self) -> None:
        """Undo what an evaluation did, and send idle workers what they are to compute."""
        if self._paused:
            self._paused = False
            self._clock.resume()
        if self._workers_step and int(self._segment.control[FROZEN]):
            self._segment.control[FROZEN] = 0
            for worker in self._waiting_to_step:
                self._send(worker, Proceed())
            self._waiting_to_step.clear()
        # On the clock of the training, a worker whose gradient is held back still computes it.
        busy = self._computing.union(worker for _, worker, _ in self._late_arrivals)
        for worker in [worker for worker in self._unsent if worker not in busy]:
            self._send_work(self._unsent.pop(worker))

    def _send_work(self, work: Work) -> None:
        """Tell an idle worker to compute. If it is to start at a given point, the point is put into its slot, which is
        free since the server has used its last gradient or given it up.
        """
        worker = work.worker
        point = work.point
        version_in_slot = None if point is None else work.version
        segment = self._segment
        statistics = work.statistics
        if point is None and isinstance(self._links[worker], Pair):
            # A worker with a pair does not see the segment, so it cannot read the newest parameters when it begins. It
            # is sent those of now, and their version is the one that it has read.
            point = segment.parameters
            version_in_slot = segment.version
            statistics = segment.statistics
        if point is not None:
            segment.slots[worker].copy_(point)
            if statistics is not None:
                segment.moved[worker, 0].copy_(
                    statistics
                )  # where the worker will put the statistics after its gradient
        self._computing.add(worker)
        command = Compute(work.dispatch, work.batches, work.rate, version_in_slot, work.draw)
        vectors = self._vectors(segment.slots[worker], segment.moved[worker, 0]) if segment.slots else ()
        self._send(worker, command, vectors)

    def _vectors(self, parameters: Tensor, statistics: Tensor) -> Sequence[Tensor]:
        """The vectors that a worker is sent if it does not see the segment; without statistics if the model has
        none."""
        return (parameters, statistics) if len(statistics) else (parameters,)

    def _send(self, worker: int, message: Message, vectors: Sequence[Tensor] = ()) -> None:
        """Send a message, and the vectors if the worker does not see the segment.

        That a worker is gone is noticed when it is next read from, and not here.
        """
        link = self._links[worker]
        with contextlib.suppress(Gone):
            link.send(message)
            if isinstance(link, Pair):
                for vector in vectors:
                    link.send_vector(vector)

    def _wait(self, seconds: float = POLL_SECONDS) -> Sequence[tuple[int, Message | None]]:
        """Return the next message, as `_wait_uninterrupted` does.

        Raises:
            Interrupted: if the user has asked to stop.
        """
        if self._stop_requested():
            raise Interrupted
        return self._wait_uninterrupted(seconds)

    def _wait_uninterrupted(self, seconds: float = POLL_SECONDS) -> Sequence[tuple[int, Message | None]]:
        """Return the next message, as `_messages` does.

        Raises:
            RunError: if a worker refuses to train, with its reason.
        """
        messages = self._messages(seconds)
        for worker, message in messages:
            if isinstance(message, Refused):
                raise RunError(f"worker {worker}: {message.reason}")
        return messages

    def _messages(self, seconds: float = POLL_SECONDS) -> Sequence[tuple[int, Message | None]]:
        """Wait up to `seconds` for a message, and return (worker, message) of one, or nothing.

        The message is None if the worker is lost. There is never more than one, since the caller may wait for other
        messages while it handles one.
        """
        if not self._readable:
            keys = self._selector.select(max(0.0, min(seconds, POLL_SECONDS)))
            self._readable.extend(key.data for key, _ in keys)
        if not self._readable:
            return []
        worker = self._readable.popleft()
        try:
            message = self._links[worker].receive()
        except Gone as gone:
            # The pipe closes shortly before the process ends, so wait up to 2 seconds for how it ended.
            self._lose(worker, self._how_it_ended(worker, 2.0) or str(gone))
            return [(worker, None)]
        if isinstance(message, Holding):
            self._waiting_to_step.add(worker)
        elif isinstance(message, Computed):
            self._computing.discard(worker)
        return [(worker, message)]

    def _arrived(self, worker: int, message: Computed) -> Arrived | None:
        """The arrival of a gradient. None: the gradient was abandoned. Then another worker has its batches, and it
        counts in no budget.
        """
        work = self._works.get(worker)
        if worker not in self._connected or work is None or work.dispatch != message.dispatch:
            return None
        del self._works[worker]
        self._num_samples += message.gradient.num_samples
        vector = torch.empty(0) if self._workers_step else self._segment.slots[worker]
        seconds = self.now - work.began
        moved = self._segment.moved[worker] if len(self._segment.statistics) else None
        return Arrived(work, message.read_version, vector, message.gradient, seconds, message.taken, moved)

    def _lose(self, worker: int, reason: str) -> None:
        """Forget a worker that is lost. `next` returns its loss. `_works` has its work until the server gives that up,
        with `stop`."""
        self._selector.unregister(self._links[worker])
        self._links.pop(worker).close()
        self._reasons.append(f"worker {worker}: {reason}")
        for numbers in (self._connected, self._waiting_to_step, self._computing):
            numbers.discard(worker)
        self._unsent.pop(worker, None)
        self._late_arrivals = [item for item in self._late_arrivals if item[1] != worker]
        self._readable = collections.deque(reader for reader in self._readable if reader != worker)
        self._left.append(Left(worker, reason))

    def _nobody(self) -> NoWorkerLeft:
        return NoWorkerLeft(f"no worker is left ({'; '.join(self._reasons)})")
