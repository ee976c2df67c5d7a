"""Rules in which workers wait, so that delays have the values that are asked for."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.rules.contract import Arrival, Reply, Rule, Start, View
from asyncsgd.settings.choices import parameter


@dataclasses.dataclass
class Clocks:
    """How many gradients each worker has brought, its clock in the paper, and who waits for the slowest worker."""

    clocks: dict[int, int]
    """Worker -> c_i, how many of its gradients have arrived."""
    waiting: list[int]
    """The workers that are ahead and idle."""


@dataclasses.dataclass(frozen=True)
class SSP(Rule):
    """Apply every gradient as it comes; a worker more than `slack` arrivals ahead of the slowest waits.

    A worker with c_i arrivals starts iff c_i - min_j c_j <= s. s = 0 is bulk-synchronous: n updates a round, all
    computed at the round's first version; delays are 0 to n - 1. With fixed unequal speeds every finite s has the
    throughput of the slowest worker, n / max_i tau_i. So a larger s pays only where speeds vary in time.

    Args:
        slack: s of the paper, 0 or more.

    Ho, Cipar, Cui, Lee, Kim, Gibbons, Gibson, Ganger, Xing: More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server, NeurIPS 2013. Deviation: a read sees every update that has been applied (the paper's
    caches may hold older ones). The gap is looked at when work starts, so it is s + 1 at most when work ends.
    """

    slack: int = parameter(2, at_least=0)

    def init(self, like: Tensor) -> Clocks:
        return Clocks({}, [])

    def join(self, state: Clocks, worker: int, view: View) -> Reply:
        state.clocks[worker] = min(state.clocks.values(), default=0)
        return Reply(start=(Start(worker),))

    def leave(self, state: Clocks, worker: int, view: View) -> Reply:
        del state.clocks[worker]
        if worker in state.waiting:
            state.waiting.remove(worker)
        return Reply(start=self._release(state))

    def arrive(self, state: Clocks, arrival: Arrival, view: View) -> Reply:
        state.clocks[arrival.worker] += 1
        state.waiting.append(arrival.worker)
        return Reply(arrival.gradient, uses=(arrival.dispatch,), start=self._release(state))

    def _release(self, state: Clocks) -> tuple[Start, ...]:
        slowest = min(state.clocks.values(), default=0)
        free = [worker for worker in state.waiting if state.clocks[worker] - slowest <= self.slack]
        state.waiting = [worker for worker in state.waiting if worker not in free]
        return tuple(map(Start, free))


@dataclasses.dataclass
class Outstanding:
    """A gradient that was started and not applied."""

    worker: int
    dispatch: int = -1
    gradient: Tensor | None = None
    """None while it is in flight."""


@dataclasses.dataclass
class Queue:
    """What is outstanding, oldest start first, and who is idle."""

    outstanding: list[Outstanding]
    idle: list[int]


@dataclasses.dataclass(frozen=True)
class FixedDelay(Rule):
    """Apply gradients in the order of their starts, each at a delay of exactly `delay` (fewer in the first updates).

        x_{t+1} = x_t - eta * grad f(x_{max(0, t - tau)}; batch_t)

    It measures the effect of a given delay, as in a dose-response curve. On a quadratic delayed SGD has closed forms:
    it is stable iff 0 < eta lambda < 2 sin(pi / (2 (2 tau + 1))). With tau = 1 it is the weight version rule of
    PipeDream-2BW (Narayanan, Phanishayee, Shi, Chen, Zaharia: Memory-Efficient Pipeline-Parallel DNN Training, ICML
    2021).

    tau + 1 gradients are outstanding (in flight or held) once the first tau + 1 have been started at x_0. So with a
    constant learning rate no version depends on speeds or on the number of workers. With a schedule the versions do
    depend on them: it counts the samples that have arrived, and the gradients of fast workers arrive long before they
    are applied. At equal speeds tau + 1 workers are never idle, and additional workers would be.

    Args:
        delay: tau, in updates. The first gradients have delays 0, 1, ..., tau: all were computed at the initial
            parameters.
    """

    exact_start: ClassVar[bool] = True

    delay: int = parameter(1, at_least=0)

    def init(self, like: Tensor) -> Queue:
        return Queue([], [])

    def join(self, state: Queue, worker: int, view: View) -> Reply:
        state.idle.append(worker)
        return Reply(start=self._fill(state))

    def leave(self, state: Queue, worker: int, view: View) -> Reply:
        if worker in state.idle:
            state.idle.remove(worker)
        state.outstanding = [
            entry for entry in state.outstanding if entry.worker != worker or entry.gradient is not None
        ]
        if not view.workers:  # nobody is left, so the run ends, and what is held is not applied
            return Reply()
        return self._next(state)

    def arrive(self, state: Queue, arrival: Arrival, view: View) -> Reply:
        for entry in state.outstanding:
            if entry.worker == arrival.worker and entry.gradient is None:
                entry.gradient = arrival.gradient.clone()
                entry.dispatch = arrival.dispatch
        state.idle.append(arrival.worker)
        return self._next(state)

    def resume(self, state: Queue, view: View) -> Reply:
        return self._next(state)

    def _next(self, state: Queue) -> Reply:
        """Apply the oldest gradient if it is due, and let the next start see exactly that version.

        The step frees one place. The worker that takes it must start before the next gradient is applied, so one
        gradient is applied a reply, and `again` asks for the next one.
        """
        if not self._is_due(state):
            start = self._fill(state)
            # Where the worker of a gradient in flight has left, a start may make the queue so long that the oldest
            # gradient is due.
            return Reply(start=start, again=self._is_due(state))
        oldest = state.outstanding.pop(0)
        start = self._fill(state)
        return Reply(oldest.gradient, uses=(oldest.dispatch,), start=start, again=self._is_due(state))

    def _is_due(self, state: Queue) -> bool:
        """Whether the oldest gradient is to be applied: it has arrived, and more than tau are outstanding."""
        queue = state.outstanding
        return len(queue) > self.delay and queue[0].gradient is not None

    def _fill(self, state: Queue) -> tuple[Start, ...]:
        """Start idle workers while fewer than tau + 1 gradients are outstanding."""
        free = self.delay + 1 - len(state.outstanding)
        started = state.idle[:free]
        state.idle = state.idle[free:]
        state.outstanding += map(Outstanding, started)
        return tuple(map(Start, started))
