"""IA2SGD: the last gradient of every worker in a table, one step along the mean of the table per arrival.

    G_i <- g,    x_{t+1} = x_t - eta (1/n) sum_j G_j,    empty slots count as 0

The stochastic form of incremental aggregated gradients (Gurbuzbalaban, Ozdaglar, Parrilo: On the Convergence Rate of
Incremental Aggregated Gradient Algorithms, SIAM J. Optim. 2017), as compared with in Maranjyan, Richtarik: Ringleader
ASGD, ICLR 2026. Every worker's objective has weight 1/n whatever its speed. A worker that leaves takes its slot along:
kept, it would bias the result.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Table:
    """Each worker's last gradient and its dispatch, their sum, and where the direction is built."""

    slots: dict[int, tuple[Tensor, int]]
    total: Tensor
    direction: Tensor


@dataclasses.dataclass(frozen=True)
class IA2SGD(Rule):
    """Replace the arriving worker's slot and step along the mean of all slots."""

    def init(self, like: Tensor) -> Table:
        return Table({}, like.new_zeros(like.shape), like.new_zeros(like.shape))

    def leave(self, state: Table, worker: int, view: View) -> Reply:
        if worker in state.slots:
            gradient, _ = state.slots.pop(worker)
            state.total.sub_(gradient)
        if not state.slots:
            state.total.zero_()  # no rounding left over
        return Reply()

    def arrive(self, state: Table, arrival: Arrival, view: View) -> Reply:
        if arrival.worker in state.slots:
            slot, _ = state.slots[arrival.worker]
            state.total.sub_(slot)
            slot.copy_(arrival.gradient)
        else:
            slot = arrival.gradient.clone()
        state.slots[arrival.worker] = (slot, arrival.dispatch)
        state.total.add_(slot)
        state.direction.copy_(state.total).div_(len(view.workers))
        uses = tuple([dispatch for _, dispatch in state.slots.values()])
        return Reply(state.direction, uses=uses, start=(Start(arrival.worker),))
