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

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Ordered:
    """u, where the direction is built, K (0 until the first arrival), and the current group."""

    momentum: Tensor
    direction: Tensor
    size: int
    group: int = 0


@dataclasses.dataclass(frozen=True)
class OrMo(Rule):
    """Apply every gradient at once, with the momentum it would have had in the order of starts.

    Args:
        momentum: beta, in [0, 1).
        group: K; 0 means the number of workers present at the first arrival.
    """

    name: ClassVar[str] = "ormo"
    needs_plain_sgd: ClassVar[bool] = True
    exact_start: ClassVar[bool] = True

    momentum: float = parameter(0.9, at_least=0, below=1)
    group: int = parameter(0, at_least=0)

    def init(self, like: Tensor) -> Ordered:
        return Ordered(like.new_zeros(like.shape), like.new_zeros(like.shape), self.group)

    def arrive(self, state: Ordered, arrival: Arrival, view: View) -> Reply:
        beta, u = self.momentum, state.momentum
        size = state.size = state.size or len(view.workers)
        current = math.ceil(view.version / size)
        state.direction.zero_()
        if current > state.group:
            state.group = current
            u.mul_(beta)
            state.direction.copy_(u)
        late = current - math.ceil(arrival.read_version / size)
        u.add_(arrival.gradient, alpha=beta**late)
        state.direction.add_(arrival.gradient, alpha=(1.0 - beta ** (late + 1)) / (1.0 - beta))
        return Reply(state.direction, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
