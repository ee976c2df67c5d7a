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

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Collecting, Held, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class KAsync(Collecting):
    """Step along the mean of K distinct workers' gradients and start those K again; the others compute on.

    Args:
        quorum: K; at most as many as are present are waited for.
    """

    quorum: int = parameter(2, at_least=1)

    def fire(self, state: Held, view: View) -> Reply:
        # Nobody is in flight short of the quorum only where no batches are left.
        if not len(state) or (view.in_flight and len(state) < min(self.quorum, len(view.workers))):
            return Reply()
        idle = [worker for worker in view.workers if worker not in view.in_flight]
        mean, uses = state.take()
        return Reply(mean, uses=uses, start=tuple(map(Start, idle)))


@dataclasses.dataclass(frozen=True)
class KBatchAsync(Rule):
    """Step along the mean of any K gradients; everybody starts again at once.

    Args:
        batch: K, gradients per update.
    """

    batch: int = parameter(4, at_least=1)

    def init(self, like: Tensor) -> Held:
        return Held(like)

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        start = (Start(arrival.worker),)
        if len(state) < self.batch:
            return Reply(start=start)
        mean, uses = state.take()
        return Reply(mean, uses=uses, start=start)
