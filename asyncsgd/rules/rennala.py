"""Rennala SGD: collect B gradients at the current point from anyone, then step. Also known as K-batch-sync.

    x_{t+1} = x_t - eta * sum_{j=1}^{B} w_j grad f(x_t; batch_j) / sum w_j

A fast worker may contribute several of the B. Time-optimal for smooth nonconvex objectives on homogeneous data with
B = max(1, ceil(sigma^2 / eps)). Every delay is 0.

Tyurin, Richtarik: Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed Computation
Model, NeurIPS 2023, algorithm 1 (workers finish, stale results are ignored). K-batch-sync of Dutta et al., AISTATS
2018, and the published experiments stop all workers at each update (`interrupt`).
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Held, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class Rennala(Rule):
    """Step along the mean of the first `batch` gradients computed at the current version, whoever brings them.

    Args:
        batch: B, gradients per update.
        interrupt: stop and restart everybody at each update, instead of dropping what was computed at an older version.
    """

    batch: int = parameter(4, at_least=1)
    interrupt: bool = True

    def init(self, like: Tensor) -> Held:
        return Held(like)

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        again = (Start(arrival.worker),)
        if arrival.read_version < view.version:
            return Reply(drops=(arrival.dispatch,), start=again)
        state.add(arrival)
        if len(state) < self.batch:
            return Reply(start=again)
        direction, uses = state.take()
        if not self.interrupt:
            return Reply(direction, uses=uses, start=again)
        abandon = tuple([flight.dispatch for flight in view.in_flight.values()])
        return Reply(direction, uses=uses, abandon=abandon, start=view.everyone)
