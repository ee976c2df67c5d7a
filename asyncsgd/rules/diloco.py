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

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View
from asyncsgd.rules.parts.held_gradients import Held
from asyncsgd.rules.parts.nesterov import Nesterov


@dataclasses.dataclass
class Round:
    """The round's pseudo-gradients, and the outer optimizer."""

    held: Held
    outer: Nesterov


@dataclasses.dataclass(frozen=True)
class DiLoCo(Rule):
    """Rounds of local steps by everybody, then one outer Nesterov step along the mean displacement.

    Args:
        num_local_steps: H.
        outer_learning_rate: eta_outer.
        outer_momentum: beta, in [0, 1).
    """

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "H local steps by everybody, then an outer Nesterov step (Douillard et al. 2023)"
    local_steps: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = 10
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.num_local_steps < 1 or not 0 <= self.outer_momentum < 1 or not self.outer_learning_rate > 0:
            raise ValueError(
                f"num_local_steps must be 1 or more, outer_learning_rate positive and outer_momentum in [0, 1), got "
                f"{self.num_local_steps}, {self.outer_learning_rate} and {self.outer_momentum}"
            )

    def init(self, like: Tensor) -> Round:
        return Round(Held(like), Nesterov(like))

    def join(self, state: Round, worker: int, view: View) -> Reply:
        return Reply(start=(Start(worker, self.num_local_steps),))

    def arrive(self, state: Round, arrival: Arrival, view: View) -> Reply:
        state.held.add(arrival)
        return self._fire_when_all_are_in(state, view)

    def leave(self, state: Round, worker: int, view: View) -> Reply:
        return self._fire_when_all_are_in(state, view)

    def _fire_when_all_are_in(self, state: Round, view: View) -> Reply:
        if view.in_flight or not len(state.held):
            return Reply()
        direction = state.outer.step(state.held.mean(), self.outer_momentum, self.outer_learning_rate)
        start = tuple([Start(worker, self.num_local_steps) for worker in view.workers])
        reply = Reply(direction, uses=state.held.dispatches, start=start)
        state.held.clear()
        return reply
