"""Fixed delay: every gradient is exactly tau updates old. The dose of staleness, set by hand.

    x_{t+1} = x_t - eta * grad f(x_{max(0, t - tau)}; batch_t)

This is the instrument for dose-response curves. It is also delayed SGD with closed forms on a quadratic: stable iff 0 <
eta lambda < 2 sin(pi / (2 (2 tau + 1))). With tau = 1 it is the weight version rule of PipeDream-2BW (Narayanan,
Phanishayee, Shi, Chen, Zaharia: Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021).

Gradients are applied in the order in which they were started, and tau + 1 are outstanding (in flight or held) once the
first tau + 1 have been started at x_0. So at a constant learning rate no version depends on speeds or on the number of
workers. At equal speeds tau + 1 workers are never idle, and additional workers would be.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


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
        in_flight = [entry for entry in state.outstanding if entry.worker == worker and entry.gradient is None]
        for entry in in_flight:
            state.outstanding.remove(entry)
        if not view.workers:  # nobody brings the missing gradients any more, so those held get no older
            return Reply()
        return self.resume(state, view)

    def arrive(self, state: Queue, arrival: Arrival, view: View) -> Reply:
        for entry in state.outstanding:
            if entry.worker == arrival.worker and entry.gradient is None:
                entry.gradient, entry.dispatch = arrival.gradient.clone(), arrival.dispatch
        state.idle.append(arrival.worker)
        return self.resume(state, view)

    def resume(self, state: Queue, view: View) -> Reply:
        """Apply the oldest if it is due, and let the next start see exactly that version."""
        if not self._due(state):
            start = self._fill(state)
            return Reply(start=start, again=self._due(state))
        oldest = state.outstanding.pop(0)
        start = self._fill(state)
        return Reply(oldest.gradient, uses=(oldest.dispatch,), start=start, again=self._due(state))

    def _due(self, state: Queue) -> bool:
        queue = state.outstanding
        return len(queue) > self.delay and queue[0].gradient is not None

    def _fill(self, state: Queue) -> tuple[Start, ...]:
        """Start idle workers while fewer than tau + 1 gradients are outstanding."""
        start = []
        while state.idle and len(state.outstanding) <= self.delay:
            worker = state.idle.pop(0)
            state.outstanding.append(Outstanding(worker))
            start.append(Start(worker))
        return tuple(start)
