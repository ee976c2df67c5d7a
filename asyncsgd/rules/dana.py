"""DANA: a momentum vector per worker at the server; workers start at the parameters that the server predicts.

    v_i <- beta v_i + g_i,    x <- x - eta v_i,    worker i starts again at  x - eta beta sum_j v_j

Hakimi, Barkai, Gabel, Schuster: Taming Momentum in a Distributed Asynchronous Environment, 2019 (DANA-Zero).
With one worker this is Nesterov's method in its classic form (x and the look-ahead point apart).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Momenta:
    """v_i of the workers present, and their sum."""

    of: dict[int, Tensor]
    total: Tensor


@dataclasses.dataclass(frozen=True)
class DANA(Rule):
    """Step along the arriving worker's own momentum and start it at the predicted parameters.

    Args:
        momentum: beta, in [0, 1).
    """

    needs_plain_sgd: ClassVar[bool] = True

    momentum: float = parameter(0.9, at_least=0, below=1)

    def init(self, like: Tensor) -> Momenta:
        return Momenta({}, like.new_zeros(like.shape))

    def join(self, state: Momenta, worker: int, view: View) -> Reply:
        state.of[worker] = state.total.new_zeros(state.total.shape)
        return Reply(start=(self._ahead(state, worker, view),))

    def leave(self, state: Momenta, worker: int, view: View) -> Reply:
        state.total.sub_(state.of.pop(worker))
        if not state.of:
            state.total.zero_()  # no rounding left over
        return Reply()

    def arrive(self, state: Momenta, arrival: Arrival, view: View) -> Reply:
        momentum = state.of[arrival.worker]
        state.total.add_(momentum, alpha=self.momentum - 1.0).add_(arrival.gradient)
        momentum.mul_(self.momentum).add_(arrival.gradient)
        return Reply(momentum, uses=(arrival.dispatch,), start=(self._ahead(state, arrival.worker, view),))

    def _ahead(self, state: Momenta, worker: int, view: View) -> Start:
        if self.momentum == 0:
            return Start(worker)
        return Start(worker, offset=state.total * (-view.learning_rate * self.momentum))
