"""Buffered asynchrony: K-async and K-batch-async. One update per K gradients, stale ones included.

    x_{t+1} = x_t - eta * sum_{j=1}^{K} w_j grad f(x_{t - tau_j}; batch_j) / sum w_j

K-async takes the gradients of K distinct workers. A worker that has delivered waits until the update, then those K
start together. K-batch-async (n-softsync) takes any K gradients. Every worker starts again at once, so K = N is not
synchronous SGD even at equal speeds.

Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race, AISTATS 2018; Gupta, Zhang, Wang: Model
Accuracy and Runtime Tradeoff in Distributed Deep Learning, ICDM 2016 (n-softsync).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View
from asyncsgd.rules.parts.held_gradients import Held


@dataclasses.dataclass(frozen=True)
class KAsync(Rule):
    """Step along the mean of K distinct workers' gradients and start those K again; the others compute on.

    Args:
        quorum: K; at most as many as are present are waited for.
    """

    name: ClassVar[str] = "k_async"
    summary: ClassVar[str] = "one update per K distinct workers, who then start together (Dutta et al. 2018)"

    quorum: int = 2

    def __post_init__(self) -> None:
        if self.quorum < 1:
            raise ValueError(f"quorum must be 1 or more, got {self.quorum}")

    def init(self, like: Tensor) -> Held:
        return Held(like)

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        return self._fire_at_quorum(state, view)

    def leave(self, state: Held, worker: int, view: View) -> Reply:
        return self._fire_at_quorum(state, view)

    def _fire_at_quorum(self, state: Held, view: View) -> Reply:
        # Nobody is in flight short of the quorum only where no batches are left.
        if not len(state) or (view.in_flight and len(state) < min(self.quorum, len(view.workers))):
            return Reply()
        idle = [worker for worker in view.workers if worker not in view.in_flight]
        reply = Reply(state.mean(), uses=state.dispatches, start=tuple(map(Start, idle)))
        state.clear()
        return reply


@dataclasses.dataclass(frozen=True)
class KBatchAsync(Rule):
    """Step along the mean of any K gradients; everybody starts again at once.

    Args:
        batch: K, gradients per update.
    """

    name: ClassVar[str] = "k_batch_async"
    summary: ClassVar[str] = "one update per K gradients from anyone, stale ones included (Dutta et al., n-softsync)"

    batch: int = 4

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be 1 or more, got {self.batch}")

    def init(self, like: Tensor) -> Held:
        return Held(like)

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        start = (Start(arrival.worker),)
        if len(state) < self.batch:
            return Reply(start=start)
        reply = Reply(state.mean(), uses=state.dispatches, start=start)
        state.clear()
        return reply
