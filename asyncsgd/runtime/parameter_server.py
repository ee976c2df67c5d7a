"""The parameter server: workers compute, one server applies, whatever carries the vectors between them.

The loop is the same for an asynchronous and a synchronous rule. The rule decides, and the transport moves the vectors.
This file keeps the budget, the batches, the clock and the record."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from asyncsgd.batches import Batches
from asyncsgd.dispatcher import Dispatcher, Launched
from asyncsgd.evaluation import measured_in_shards
from asyncsgd.packing import Plain
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Event, Fault, MemoryUsed
from asyncsgd.runtime.base import (
    POLL_SECONDS,
    STOPPED,
    Budget,
    EvaluationPoints,
    Interrupted,
    Judge,
    NeverSaves,
    Report,
    Result,
    Saver,
    TrainingClock,
    diverged,
)
from asyncsgd.runtime.transport.messages import (
    Compute,
    Computed,
    Evaluate,
    Evaluated,
    Lost,
    Message,
    Ready,
    ServerEnd,
    Stop,
)
from asyncsgd.server import Outcome, Server
from asyncsgd.tasks.base import Sums, Task, decode_sums

Dead = Callable[[int, float], str | None]
"""Given a worker and the seconds to look: how its process ended. None while it lives, or if nobody knows."""


class ParameterServer:
    """Runs one training.

    Args:
        server: owns the parameters that `transport` carries.
        transport: its workers must come up by themselves; the caller closes it.
        task: what its workers learn.
        num_workers: N, workers 0 to N - 1.
        batch_size: samples of one gradient.
        budget: when to stop; ``samples=0`` evaluates once and stops.
        evaluations: how many evaluations after the first.
        layout: `Layout.fingerprint` that every worker must have.
        report: receives the records.
        saver: takes states for checkpoints, and one when the run is asked to stop.
        dead: tells how a worker's process ended, for messages and for workers that die before they connect.
        stop_requested: looked at between messages; once it is true the run ends as INTERRUPTED.

    A worker that is lost leaves the rule, its batch goes to the others, and the run goes on while anybody is left.
    A gradient that arrives during an evaluation waits. It is applied when the training clock has advanced by the time
    that its worker still needed, so an evaluation changes neither the clock nor the order of arrivals.
    """

    _steps_at_workers: ClassVar[bool] = False
    """Whether workers take the steps themselves. Then no gradient in flight can be discarded at the end of a budget."""

    def __init__(
        self,
        server: Server,
        transport: ServerEnd,
        task: Task,
        *,
        num_workers: int,
        batch_size: int,
        budget: Budget,
        evaluations: int,
        layout: str,
        report: Report,
        saver: Saver | None = None,
        dead: Dead = lambda worker, seconds: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server = server
        self._transport, self._task = transport, task
        self._num_workers = num_workers
        self._budget = budget
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self._layout = layout
        self._report = report
        self._saver = saver or NeverSaves()
        self._dead = dead
        self._stop_requested = stop_requested
        self._clock = TrainingClock()
        self._dispatcher = Dispatcher(
            server,
            Batches(budget.samples if self._steps_at_workers else budget.to_hand_out(server.rule), batch_size),
            num_workers=num_workers,
            batch_size=batch_size,
            clock=lambda: self._clock.seconds,
            spent=budget.spent_by,
        )
        self._present: set[int] = set()
        self._outbox: list[tuple[int, Compute]] = []
        self._inbox: collections.deque[tuple[int, Message]] = collections.deque()
        self._held_back: list[
            tuple[float, int, Computed]
        ] = []  # (training seconds of release, worker, message), ascending
        self._lost_meanwhile: list[tuple[int, str]] = []  # in an evaluation, which must not change anything
        self._evaluated_version: int | None = None
        self._peak_bytes: dict[int, tuple[int, int]] = {}
        self._reasons: list[str] = []
        self._has_begun = False  # whether workers have joined, here or in the run that is resumed
        self._is_evaluating = False
        self._evaluation_due = False  # the run was stopped amid one

    @property
    def train_seconds(self) -> float:
        """The training clock."""
        return self._clock.seconds

    def run(self) -> Result:
        """Train until the budget is spent and stop the workers; blocks. Called once, on a new object or on one that
        has loaded a state.

        Returns:
            DONE; DIVERGED when a loss is not finite; FAILED when no worker is left; INTERRUPTED when asked to stop.
        """
        try:
            return self._judge.with_best(self._run())
        except Interrupted:
            self._stop_requested = lambda: False  # what comes now has to be waited for
            self._clock.pause()
            if self._has_begun:
                self._save()
            return self._judge.with_best(Result(INTERRUPTED, "interrupted by the user"))
        finally:
            for worker in range(self._num_workers):
                self._transport.send(worker, Stop())

    def _run(self) -> Result:
        self._await_workers()
        result = self._go_on() if self._has_begun else self._evaluate()
        if result is None and self._budget.samples != 0:
            self._clock.resume()
            if not self._has_begun:
                self._join_all()
            self._has_begun = True
            self._flush()
            while result is None:
                result = self._advance()
                if result is None and self._saver.due(self._server.num_samples):
                    self._save()
        self._clock.pause()
        if (result is None or result.status == DONE) and self._evaluated_version != self._server.version:
            result = self._evaluate(last=True)
        result = result or Result(DONE)
        if result.status == DONE and self._has_begun and self._saver.due(self._server.num_samples, at_end=True):
            self._save()
        return result

    def state_dict(self) -> Plain:
        """All that decides the rest of a run that was stopped; see `asyncsgd.packing`.

        Workers that are processes have no part in it: see `_go_on`.
        """
        return {
            "server": self._server.state_dict(),
            "dispatcher": self._dispatcher.state_dict(),
            "points": self._points.state_dict(),
            "judge": self._judge.state_dict(),
            "clock": self._clock.state_dict(),
            "evaluated_version": self._evaluated_version,
            "evaluation_due": self._is_evaluating,
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state` at the next `run`."""
        self._server.load_state_dict(state["server"])
        self._dispatcher.load_state_dict(state["dispatcher"])
        self._points.load_state_dict(state["points"])
        self._judge.load_state_dict(state["judge"])
        self._clock.load_state_dict(state["clock"])
        self._evaluated_version = state["evaluated_version"]
        self._evaluation_due = state["evaluation_due"]
        self._has_begun = True

    def _save(self) -> None:
        self._saver.save(
            self.state_dict(),
            version=self._server.version,
            num_samples=self._server.num_samples,
            train_seconds=self._clock.seconds,
            cut_short=self._cut_short,
        )

    @property
    def _cut_short(self) -> str | None:
        """See `Saver.save`."""
        return self._dispatcher.cut_short

    def _go_on(self) -> Result | None:
        """Bring the workers to where the state left them; the result, if the run has ended, or ends with an evaluation
        that was due.

        The processes are new: what was in flight is lost, its batches are handed out again, and the rule sees everybody
        leave and join.
        """
        if not self._evaluation_due:
            ended = self._judge.verdict() or (Result(DONE) if self._budget.spent_by(self._server.num_samples) else None)
            if ended is not None:
                return ended
        busy = self._server.in_flight
        for worker in sorted(self._server.workers, key=lambda worker: (worker in busy, worker)):
            if worker in busy:
                self._dispatcher.draw_again(worker)
            launched, record = self._dispatcher.leave(worker, STOPPED)
            self._prepare(launched, record.abandoned)
            self._outbox = [(other, command) for other, command in self._outbox if other != worker]
            self._report(record)
        # The run may have been stopped amid an evaluation.
        result = self._evaluate(last=self._budget.spent_by(self._server.num_samples)) if self._evaluation_due else None
        if result is None:
            self._join_all()
        return result

    def _join_all(self) -> None:
        for worker in sorted(self._present):
            self._join(worker)

    def _advance(self) -> Result | None:
        """Handle what comes next; the result, once the run is over."""
        if self._budget.spent_by(self._server.num_samples):  # while all came to stand still for an evaluation
            return Result(DONE)
        if not self._present:
            return Result(FAILED, f"no worker is left ({'; '.join(self._reasons)})")
        if self._budget.seconds is not None and self._clock.seconds >= self._budget.seconds:
            return Result(DONE)
        if not self._server.in_flight:
            raise RuntimeError(f"rule {self._server.rule.name} left nobody in flight")
        for worker, message in self._next_messages():
            if isinstance(message, Lost):
                self._lose(worker, message.reason)
                self._flush()
            elif isinstance(message, Computed):
                result = self._arrived(worker, message)
                if result is not None:
                    return result
        return None

    def _next_messages(self) -> Iterable[tuple[int, Message]]:
        """Messages to handle now. A gradient that waits for an evaluation comes when the clock has reached its time."""
        timeout = None
        if self._budget.seconds is not None:
            timeout = max(0.0, self._budget.seconds - self._clock.seconds)
        if self._held_back:
            release = self._held_back[0][0] - self._clock.seconds
            if release <= 0:
                _, worker, message = self._held_back.pop(0)
                return [(worker, message)]
            timeout = release if timeout is None else min(timeout, release)
        return self._wait(timeout)

    def _wait(self, timeout: float | None = None) -> Sequence[tuple[int, Message]]:
        """The next message, or none within `timeout` seconds. One at a time: handling it may wait for others."""
        if self._stop_requested():
            raise Interrupted
        if not self._inbox:
            self._inbox.extend(self._transport.wait(POLL_SECONDS if timeout is None else min(timeout, POLL_SECONDS)))
        return [self._inbox.popleft()] if self._inbox else []

    def _arrived(self, worker: int, message: Computed) -> Result | None:
        if not self._server.is_in_flight(worker, message.dispatch):
            return None  # abandoned: its batch went to another worker, and it counts in no budget
        outcome, event = self._apply(worker, message)
        finite = math.isfinite(message.gradient.loss)
        spent = self._budget.spent_by(self._server.num_samples)
        due = (outcome.stepped and self._points.passed(self._server.num_samples, self._clock.seconds)) or spent
        if finite and not due:
            self._flush()  # the worker goes on while this is written down
        self._report(event)
        if not finite:
            what = f"the loss of worker {worker} at version {message.read_version} is {message.gradient.loss}"
            self._report(Fault(what, worker, self._server.version, self._clock.seconds))
            return diverged(what)
        if due:
            result = self._evaluate(last=spent) or (Result(DONE) if spent else None)
            if result is not None:
                return result
            self._flush()
        return None

    def _apply(self, worker: int, message: Computed) -> tuple[Outcome, Event]:
        """Hand the gradient over and prepare what its reply starts; what happened, still to be reported."""
        arrived_at = self._clock.seconds
        arrived = self._dispatcher.arrive(
            worker,
            message.dispatch,
            message.read_version,
            self._transport.gradient(worker),
            message.gradient,
            arrived_at - self._dispatcher.launch_of(worker).seconds,
        )
        now = self._clock.seconds
        taken = message.taken._replace(apply=now - arrived_at)
        self._prepare(arrived.launched, arrived.outcome.abandoned)
        return arrived.outcome, self._dispatcher.event(arrived, now, taken)

    def _prepare(self, launched: Launched, abandoned: tuple[int, ...] = ()) -> None:
        """Take back commands that were abandoned and prepare those for gradients that start; `_flush` sends them."""
        self._outbox = [(worker, command) for worker, command in self._outbox if command.dispatch not in abandoned]
        for worker, dispatch in zip(launched.workers, launched.dispatches, strict=True):
            launch = self._dispatcher.launch_of(worker)
            if launch.point is not None:
                if abandoned:
                    # The slot that would hold the point may still be written by the gradient that was abandoned.
                    name = self._server.rule.name
                    raise RuntimeError(f"rule {name} abandons and starts at exact points, which real workers cannot do")
                self._transport.gradient(worker).copy_(launch.point)
            self._outbox.append((worker, self._command(worker, dispatch)))

    def _command(self, worker: int, dispatch: int) -> Compute:
        """What `worker` is told to compute."""
        launch = self._dispatcher.launch_of(worker)
        exact_version = None if launch.point is None else launch.version
        return Compute(
            dispatch,
            self._dispatcher.batches_of(worker),
            launch.learning_rate,
            exact_version,
            self._dispatcher.first_draw(worker),
        )

    def _flush(self) -> None:
        for worker, command in self._outbox:
            self._transport.send(worker, command)
        self._outbox.clear()

    def _await_workers(self) -> None:
        """Wait until every worker is ready or known to be dead."""
        gone: set[int] = set()
        while len(self._present) + len(gone) < self._num_workers:
            for worker, message in self._wait():
                if isinstance(message, Lost):
                    gone.add(worker)
                    self._drop(worker, message.reason)
                elif isinstance(message, Ready):
                    if message.layout != self._layout:
                        raise RuntimeError(
                            f"worker {worker} has built another model: layout {message.layout}, not {self._layout}"
                        )
                    self._present.add(worker)
            for worker in set(range(self._num_workers)) - self._present - gone:
                reason = self._dead(worker, 0.0)
                if reason is not None:
                    gone.add(worker)
                    self._drop(worker, reason)

    def _join(self, worker: int) -> None:
        """Bring a worker into the rule; `_flush` sends what follows."""
        launched, record = self._dispatcher.join(worker)
        self._prepare(launched, record.abandoned)
        self._report(record)

    def _lose(self, worker: int, reason: str) -> None:
        """Take a lost worker out of the rule and hand its batch to the others; `_flush` sends what follows."""
        if worker not in self._present:
            return
        self._present.discard(worker)
        self._outbox = [(other, command) for other, command in self._outbox if other != worker]
        self._held_back = [item for item in self._held_back if item[1] != worker]
        launched, record = self._dispatcher.leave(worker, self._why(worker, reason))
        self._prepare(launched, record.abandoned)
        self._report(record)

    def _why(self, worker: int, reason: str) -> str:
        reason = self._dead(worker, 2.0) or reason  # its connection closes a moment before the process has ended
        self._reasons.append(f"worker {worker}: {reason}")
        return reason

    def _drop(self, worker: int, reason: str) -> None:
        """Note that a worker is gone of which the rule has not heard, or is not to hear any more."""
        self._report(self._dispatcher.drop(worker, self._why(worker, reason)))

    def _evaluate(self, *, last: bool = False) -> Result | None:
        """Evaluate the current version exactly; the result, if that ends the run. After the last nothing goes on."""
        running = self._clock.running
        self._is_evaluating = True
        self._quiesce()
        if running:
            self._clock.pause()
        began = time.perf_counter()
        shards = self._collect_shards(began)
        if not shards:
            self._lose_those_lost_meanwhile()
            return Result(FAILED, f"no worker is left ({'; '.join(self._reasons)})")
        evaluation = measured_in_shards(self._task, shards, time.perf_counter() - began).record(
            version=self._server.version,
            num_samples=self._server.num_samples,
            train_seconds=self._clock.seconds,
        )
        self._evaluated_version = evaluation.version
        self._is_evaluating = False
        self._report(evaluation)
        self._report(
            MemoryUsed(
                tuple((worker, *peak) for worker, peak in sorted(self._peak_bytes.items())),
                evaluation.version,
                evaluation.total_samples,
                evaluation.train_seconds,
            )
        )
        result = self._judge.of(evaluation, lambda: self._server.parameters, last=last)
        if result is None and not last:
            self._lose_those_lost_meanwhile()
            self._resume()
            if running:
                self._clock.resume()
        for worker, reason in self._lost_meanwhile:  # at the end nothing may change what was evaluated
            self._present.discard(worker)
            self._drop(worker, reason)
        self._lost_meanwhile.clear()
        return result

    def _lose_those_lost_meanwhile(self) -> None:
        """Only now may the rule reply to their leaving, perhaps with a step."""
        for worker, reason in self._lost_meanwhile:
            self._lose(worker, reason)
        self._lost_meanwhile.clear()

    def _quiesce(self) -> None:
        """Make sure that nothing changes the parameters from here on; here only this process does."""

    def _resume(self) -> None:
        """Undo `_quiesce`."""

    def _collect_shards(self, began: float) -> list[Sums]:
        """Have every worker evaluate a shard; the sums of all shards in order, none if nobody is left to do it.

        The shard of a worker that is lost meanwhile goes to another.
        """
        alive = set(self._present)
        num_shards = len(alive)
        missing = dict(enumerate(sorted(alive)))  # shard -> who evaluates it
        for shard, worker in missing.items():
            self._transport.send(worker, Evaluate(shard, num_shards))
        sums: dict[int, Sums] = {}
        while missing:
            for worker, message in self._wait():
                if isinstance(message, Evaluated):
                    del missing[message.shard]
                    if len(message.peak_bytes) == 2:
                        self._peak_bytes[worker] = (message.peak_bytes[0], message.peak_bytes[1])
                    sums[message.shard] = decode_sums(message.sums)
                elif isinstance(message, Computed):
                    self._held_back.append((self._clock.seconds + (time.perf_counter() - began), worker, message))
                elif isinstance(message, Lost):
                    alive.discard(worker)
                    self._lost_meanwhile.append((worker, message.reason))
                    if not alive:
                        return []
                    for shard in [shard for shard, owner in missing.items() if owner == worker]:
                        missing[shard] = min(alive)
                        self._transport.send(missing[shard], Evaluate(shard, num_shards))
        self._held_back.sort(key=lambda item: item[0])
        return [sums[shard] for shard in sorted(sums)]
