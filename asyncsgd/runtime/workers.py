"""Workers that are processes, as a backend of the one loop, whatever carries the vectors between them and the server.

The clock is the real one. A gradient that arrives during an evaluation waits until the clock has advanced by the time
that its worker still needed, so an evaluation changes neither the clock nor the order of arrivals. A worker that is
lost has left, with its reason; what follows from that is not said here.

Workers may also step the shared vector themselves, without locks (Hogwild). Then this process hands out batches and
counts the steps that it hears of, and the server's optimizer does nothing. Before an evaluation and a checkpoint they
are frozen: a worker with a gradient ready holds it, one that is stepping finishes its step.

    each worker, again and again:  x <- x - eta * grad f(x; batch),  x read and written in place while others do the
    same

Niu, Recht, Re, Wright: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, NeurIPS 2011.
Deviation: the gradients are dense, so updates may overwrite each other in part. The recorded delays are differences of
the counts heard here. Such a run cannot be replayed, because nothing records what a read saw."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

from asyncsgd.evaluation import Measured, measured_in_shards
from asyncsgd.flights import Arrived, Happened, Left, State, Work
from asyncsgd.runtime.base import POLL_SECONDS, Interrupted, TrainingClock
from asyncsgd.runtime.fit import Nobody
from asyncsgd.runtime.transport.messages import (
    Compute,
    Computed,
    Evaluate,
    Evaluated,
    Holding,
    Lost,
    Message,
    Proceed,
    Ready,
    ServerEnd,
    Stop,
)
from asyncsgd.runtime.transport.shared_memory import FROZEN, SAMPLES, SharedMemoryServer
from asyncsgd.tasks.base import Sums, Task, decode_sums

Dead = Callable[[int, float], str | None]
"""Given a worker and the seconds to look: how its process ended. None while it lives, or if nobody knows."""

STOP_SECONDS = 30.0
"""How long a worker that steps may take over its last gradient when a run ends before its budget is spent."""


class Workers:
    """The worker processes of a run.

    Args:
        transport: carries the server's parameters; its workers must come up by themselves; the caller closes it.
        task: what they learn.
        num_workers: N, workers 0 to N - 1.
        clock: the training clock.
        stepping: the transport again, where the workers step the parameters themselves; None: the server does.
        dead: tells how a worker's process ended, for messages and for workers that die before they connect.
        stop_requested: looked at while this waits for workers; `Interrupted` is raised then.
    """

    settled, anew = True, True

    def __init__(
        self,
        transport: ServerEnd,
        task: Task,
        num_workers: int,
        clock: TrainingClock,
        *,
        stepping: SharedMemoryServer | None = None,
        dead: Dead = lambda worker, seconds: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport, self._task, self._num_workers = transport, task, num_workers
        self._clock, self._stepping, self._dead, self._stop_requested = clock, stepping, dead, stop_requested
        self._alive: set[int] = set()
        self._left: collections.deque[Left] = collections.deque()
        """Lost workers of which the method has not heard."""
        self._reasons: list[str] = []
        self._working: dict[int, Work] = {}
        self._unsent: list[Work] = []
        self._abandoned: set[int] = set()  # workers that still compute what nobody waits for
        self._num_samples = 0  # that have arrived
        self._inbox: collections.deque[tuple[int, Message]] = collections.deque()
        self._held_back: list[tuple[float, int, Computed]] = []
        """Arrivals in an evaluation, with the seconds of the clock at which they count, ascending."""
        self._paused = False  # by an evaluation
        self._holding: set[int] = set()  # workers with a gradient ready, which do not step before they are told
        self._peak_bytes: dict[int, tuple[int, int]] = {}

    def meet(self, layout: str) -> None:
        """Wait until every worker is ready or lost.

        Args:
            layout: `Layout.fingerprint` that every worker must have.
        """
        while len(self._alive) + len(self._left) < self._num_workers:
            for worker, message in self._wait():
                if isinstance(message, Lost):
                    self._lose(worker, message.reason)
                elif isinstance(message, Ready):
                    if message.layout != layout:
                        raise RuntimeError(
                            f"worker {worker} has built another model: layout {message.layout}, not {layout}"
                        )
                    self._alive.add(worker)
            for worker in set(range(self._num_workers)) - self._alive - {left.worker for left in self._left}:
                if (reason := self._dead(worker, 0.0)) is not None:
                    self._lose(worker, reason)

    @property
    def present(self) -> Sequence[int]:
        return sorted(self._alive)

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
        for work in works:
            if self._working.pop(work.worker, None) is not None and work not in self._unsent:
                self._abandoned.add(work.worker)
        self._unsent = [work for work in self._unsent if work not in works]

    def start(self, works: Sequence[Work]) -> None:
        """The workers hear of it when the next thing is asked for: after an evaluation, if one is due."""
        for work in works:
            self._working[work.worker] = work
            if work.point is not None:
                if work.worker in self._abandoned:  # which may write its slot still
                    raise RuntimeError("a rule that abandons cannot start at exact points on real workers")
                self._transport.gradient(work.worker).copy_(work.point)
        self._unsent += works
        if self._stepping is not None:
            self._stepping.segment.control[SAMPLES] = self._num_samples

    def next(self, until: float) -> Happened | None:
        """None also after half a second, so that somebody looks at signals."""
        if self._left:
            return self._left.popleft()
        if not self._alive:
            raise self._nobody()
        if self.now >= until:
            return None  # whoever stands still since an evaluation goes on doing so
        self._go_on()
        release = self._held_back[0][0] if self._held_back else math.inf
        if release <= self.now:
            return self._arrived(*self._held_back.pop(0)[1:])
        for worker, message in self._wait(min(release, until) - self.now):
            if isinstance(message, Lost):
                self._lose(worker, message.reason)
            elif isinstance(message, Computed):
                return self._arrived(worker, message)
        return None

    def settle(self) -> Iterator[Arrived]:
        """Where workers step, let them stand still until `next`, and tell the steps that they took before they did."""
        if self._stepping is None:
            return
        self._stepping.segment.control[FROZEN] = 1
        asked = {work.worker for work in self._unsent}
        while self._alive.intersection(self._working) - asked - self._holding:
            for worker, message in self._messages():
                if isinstance(message, Holding):
                    self._holding.add(worker)
                elif isinstance(message, Lost):
                    self._lose(worker, message.reason)
                elif isinstance(message, Computed) and (arrived := self._arrived(worker, message)) is not None:
                    yield arrived
                    asked = {work.worker for work in self._unsent}

    def evaluate(self, parameters: object) -> Measured:
        """A shard each; the shards of a worker that is lost meanwhile go to another.

        Raises:
            Interrupted: if the user asks to stop.
            Nobody: if no worker is left.
        """
        self._paused |= self._clock.running
        self._clock.pause()
        began, owners, sums = time.perf_counter(), dict(enumerate(self.present)), dict[int, Sums]()
        number = len(owners)
        for shard, worker in owners.items():
            self._transport.send(worker, Evaluate(shard, number))
        while self._alive and len(sums) < number:
            for worker, message in self._wait():
                if isinstance(message, Evaluated):
                    sums[message.shard] = decode_sums(message.sums)
                    if len(message.peak_bytes) == 2:
                        self._peak_bytes[worker] = (message.peak_bytes[0], message.peak_bytes[1])
                elif isinstance(message, Computed):
                    self._held_back.append((self.now + time.perf_counter() - began, worker, message))
                elif isinstance(message, Lost):
                    self._lose(worker, message.reason)
                    for shard in [shard for shard, owner in owners.items() if owner == worker and shard not in sums]:
                        if self._alive:
                            owners[shard] = min(self._alive)
                            self._transport.send(owners[shard], Evaluate(shard, number))
        if not self._alive:
            raise self._nobody()
        self._held_back.sort(key=lambda item: item[0])
        peaks = tuple((worker, *peak) for worker, peak in sorted(self._peak_bytes.items()))
        shards = [sums[shard] for shard in sorted(sums)]
        return measured_in_shards(self._task, shards, time.perf_counter() - began, peaks)

    def close(self) -> list[Left]:
        """Tell all workers to stop, and wait for those that step; who was lost of whom the method has not heard."""
        if self._stepping is not None:
            self._stepping.segment.control[FROZEN] = 1  # no step that nobody hears of
        for worker in range(self._num_workers):
            self._transport.send(worker, Stop())
        left, deadline = list(self._left), time.monotonic() + STOP_SECONDS
        stepping = set() if self._stepping is None else set(self._alive)
        stepping -= {worker for worker, message in self._inbox if isinstance(message, Lost)}
        while stepping and time.monotonic() < deadline:
            messages = self._transport.wait(POLL_SECONDS)
            stepping -= {worker for worker, message in messages if isinstance(message, Lost)}
        return left

    def state_dict(self) -> State:
        """The clock, and the optimizer state that workers share. Workers of their own have no part in it."""
        state: State = {"clock": self._clock.state_dict()}
        return state if self._stepping is None else state | {"shared": self._stepping.extra}

    def load_state_dict(self, state: State) -> None:
        self._clock.load_state_dict(state["clock"])
        if self._stepping is not None:
            self._stepping.extra.copy_(state["shared"])
            self._stepping.segment.control[SAMPLES] = self._num_samples = state["server"]["num_samples"]

    def _go_on(self) -> None:
        """Undo what an evaluation did, and tell workers what they are to compute."""
        if self._paused:
            self._paused = False
            self._clock.resume()
        if self._stepping is not None and self._stepping.segment.control[FROZEN]:
            self._stepping.segment.control[FROZEN] = 0
            for worker in self._holding:
                self._transport.send(worker, Proceed())
            self._holding.clear()
        for work in self._unsent:
            exact = None if work.point is None else work.version
            self._transport.send(work.worker, Compute(work.dispatch, work.batches, work.rate, exact, work.draw))
        self._unsent.clear()

    def _wait(self, seconds: float = POLL_SECONDS) -> Sequence[tuple[int, Message]]:
        """See `_messages`; raises `Interrupted` where the user has asked to stop."""
        if self._stop_requested():
            raise Interrupted
        return self._messages(seconds)

    def _messages(self, seconds: float = POLL_SECONDS) -> Sequence[tuple[int, Message]]:
        """The next message, or none within `seconds`. One at a time: handling it may wait for others."""
        if not self._inbox:
            self._inbox.extend(self._transport.wait(max(0.0, min(seconds, POLL_SECONDS))))
        return [self._inbox.popleft()] if self._inbox else []

    def _arrived(self, worker: int, message: Computed) -> Arrived | None:
        """None if nobody waits for it any more: its batch went to another worker, and it counts in no budget."""
        work = self._working.get(worker)
        self._abandoned.discard(worker)
        if worker not in self._alive or work is None or work.dispatch != message.dispatch:
            return None
        del self._working[worker]
        self._num_samples += message.gradient.num_samples
        seconds, vector = self.now - work.began, self._transport.gradient(worker)
        return Arrived(work, message.read_version, vector, message.gradient, seconds, message.taken)

    def _lose(self, worker: int, reason: str) -> None:
        reason = self._dead(worker, 2.0) or reason  # its connection closes a moment before the process has ended
        self._reasons.append(f"worker {worker}: {reason}")
        self._alive.discard(worker)
        self._holding.discard(worker)
        self._held_back = [item for item in self._held_back if item[1] != worker]
        self._left.append(Left(worker, reason))

    def _nobody(self) -> Nobody:
        return Nobody(f"no worker is left ({'; '.join(self._reasons)})")
