"""FedBuff: asynchronous local steps, one server step per K of them.

    x_{t+1} = x_t - eta_server * (1/K) sum_{j=1}^{K} s(tau_j) (x_{t - tau_j} - y_j),     s(tau) = (1 + tau)^(-1/2)

y_j is where H local steps from x_{t - tau_j} ended. Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated
Learning with Buffered Asynchronous Aggregation, AISTATS 2022, algorithm 1. The mean is 1/K, over clients, not over loss
terms.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View
from asyncsgd.rules.delay_scaled import polynomial


@dataclasses.dataclass
class Buffer:
    """The sum of the scaled pseudo-gradients since the last step."""

    total: Tensor
    uses: list[int]


@dataclasses.dataclass(frozen=True)
class FedBuff(Rule):
    """Step along the mean of K pseudo-gradients, each scaled by (1 + delay)^-exponent; workers start again at once.

    Args:
        buffer: K.
        num_local_steps: H, steps of the inner optimizer.
        server_learning_rate: eta_server.
        exponent: of the staleness weight; 0 for none. The delay is that at arrival.
    """

    name: ClassVar[str] = "fedbuff"
    local_steps: ClassVar[bool] = True

    buffer: int = parameter(4, at_least=1)
    num_local_steps: int = parameter(4, at_least=1)
    server_learning_rate: float = parameter(1.0, above=0)
    exponent: float = parameter(0.5, at_least=0)

    def init(self, like: Tensor) -> Buffer:
        return Buffer(like.new_zeros(like.shape), [])

    def arrive(self, state: Buffer, arrival: Arrival, view: View) -> Reply:
        factor = self.server_learning_rate * polynomial(view.version - arrival.read_version, self.exponent)
        if not state.uses:
            state.total.zero_()
        state.total.add_(arrival.gradient, alpha=factor / self.buffer)
        state.uses.append(arrival.dispatch)
        start = (Start(arrival.worker, self.num_local_steps),)
        if len(state.uses) < self.buffer:
            return Reply(start=start)
        uses = tuple(state.uses)
        state.uses.clear()
        return Reply(state.total, uses=uses, start=start)
