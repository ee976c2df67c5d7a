"""OrMo: asynchronous SGD with the momentum that gradients would make if they were applied in the order of their starts.

Gradients are grouped by the version k at which they started, K to a group (K the number of workers): group ceil(k / K).
When the current group c = ceil(t / K) advances,

    x <- x - eta beta u,    u <- beta u

and a gradient that arrives D = c - ceil(k / K) groups late is put where it would have been by now:

    u <- u + beta^D g,    x <- x - eta (1 - beta^(D+1)) / (1 - beta) g

Shi, Yang, Li: Ordered Momentum for Asynchronous SGD, NeurIPS 2024 (reconstructed; the identity below is what the tests
check). Once every gradient in flight has arrived, (x, u) is what momentum SGD on the sums of the groups, in order,
would have. Deviation: u does not contain the learning rate, as in torch.optim.SGD; at a constant one it makes no
difference.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Ordered:
    """u, where the direction is built, and [K, the current group]; K is 0 until the first arrival."""

    momentum: Tensor
    direction: Tensor
    group: list[int]


@dataclasses.dataclass(frozen=True)
class OrMo(Rule):
    """Apply every gradient at once, with the momentum it would have had in the order of starts.

    Args:
        momentum: beta, in [0, 1).
        group: K; 0 means the number of workers present at the first arrival.
    """

    name: ClassVar[str] = "ormo"
    summary: ClassVar[str] = (
        "asynchronous, with the momentum of gradients in the order of their starts (Shi et al. 2024)"
    )
    needs_plain_sgd: ClassVar[bool] = True
    exact_start: ClassVar[bool] = True

    momentum: float = 0.9
    group: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or self.group < 0:
            raise ValueError(f"momentum must be in [0, 1) and group 0 or more, got {self.momentum} and {self.group}")

    def init(self, like: Tensor) -> Ordered:
        return Ordered(like.new_zeros(like.shape), like.new_zeros(like.shape), [self.group, 0])

    def arrive(self, state: Ordered, arrival: Arrival, view: View) -> Reply:
        beta, u = self.momentum, state.momentum
        size = state.group[0] = state.group[0] or len(view.workers)
        current = math.ceil(view.version / size)
        state.direction.zero_()
        if current > state.group[1]:
            state.group[1] = current
            u.mul_(beta)
            state.direction.copy_(u)
        late = current - math.ceil(arrival.read_version / size)
        u.add_(arrival.gradient, alpha=beta**late)
        state.direction.add_(arrival.gradient, alpha=(1.0 - beta ** (late + 1)) / (1.0 - beta))
        return Reply(state.direction, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
