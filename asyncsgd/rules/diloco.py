"""DiLoCo: local SGD whose mean displacement is fed to an outer Nesterov optimizer.

    y_i <- H inner steps from x_t,    D = sum_i w_i (x_t - y_i) / sum w_i
    m <- beta m + D,    x_{t+1} = x_t - eta_outer (D + beta m)

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed Low-Communication Training
of Language Models, 2023, algorithm 1 (inner AdamW, eta_outer 0.7, beta 0.9, H 500). The inner optimizer is the one that
``--optimizer`` names; its state stays with its worker. eta_outer = 1 and beta = 0 is local SGD. Deviation: w_i is the
number of worker i's loss terms, as in every mean of this library; the paper takes w_i = 1. The two agree where all
workers have as many.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Collecting, Held, Reply, Start, View


class Round(Held):
    """The round's pseudo-gradients, m, and where the direction is built."""

    def __init__(self, like: Tensor) -> None:
        super().__init__(like)
        self.momentum, self.direction = like.new_zeros(like.shape), like.new_zeros(like.shape)


@dataclasses.dataclass(frozen=True)
class DiLoCo(Collecting):
    """Rounds of local steps by everybody, then one outer Nesterov step along the mean displacement.

    Args:
        num_local_steps: H.
        outer_learning_rate: eta_outer.
        outer_momentum: beta, in [0, 1).
    """

    name: ClassVar[str] = "diloco"
    local_steps: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = parameter(10, at_least=1)
    outer_learning_rate: float = parameter(0.7, above=0)
    outer_momentum: float = parameter(0.9, at_least=0, below=1)

    def init(self, like: Tensor) -> Round:
        return Round(like)

    def fire(self, state: Round, view: View) -> Reply:
        if view.in_flight or not len(state):
            return Reply()
        (mean, uses), beta = state.take(), self.outer_momentum
        state.momentum.mul_(beta).add_(mean)
        state.direction.copy_(mean).add_(state.momentum, alpha=beta).mul_(self.outer_learning_rate)
        start = tuple([Start(worker, self.num_local_steps) for worker in view.workers])
        return Reply(state.direction, uses=uses, start=start)
