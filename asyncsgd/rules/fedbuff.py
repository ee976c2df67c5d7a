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

from asyncsgd.delay_factors import polynomial
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


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
    summary: ClassVar[str] = "local steps, one server step per K pseudo-gradients (Nguyen et al. 2022)"
    local_steps: ClassVar[bool] = True

    buffer: int = 4
    num_local_steps: int = 4
    server_learning_rate: float = 1.0
    exponent: float = 0.5

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.num_local_steps < 1:
            raise ValueError(f"buffer and num_local_steps must be 1 or more, got {self.buffer}, {self.num_local_steps}")
        if not self.server_learning_rate > 0 or not self.exponent >= 0:
            raise ValueError(
                f"server_learning_rate must be positive and exponent 0 or more, got {self.server_learning_rate} and "
                f"{self.exponent}"
            )

    def init(self, like: Tensor) -> Buffer:
        return Buffer(like.new_zeros(like.shape), [])

    def join(self, state: Buffer, worker: int, view: View) -> Reply:
        return Reply(start=(Start(worker, self.num_local_steps),))

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
