"""EASGD: every worker explores with parameters of its own, tied to a centre by an elastic force.

    worker i: y_i <- H local steps from y_i;   d = alpha (y_i - x);   y_i <- y_i - d,   x <- x + d

x, the server's parameters, is the centre; d is computed once, from the values before both moves, so the exchange
conserves y_i + x. Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD, NeurIPS 2015, algorithm 1
(asynchronous; alpha = 0.9 / N, H = 10); EAMSGD is the same with a momentum in the inner optimizer. alpha = 0 is N
independent runs. Deviation: the exchange comes after a worker's local steps, so the first local step after it takes its
gradient at the replica after the pull. The paper's algorithm takes that gradient before the pull and applies it after.
The published map of stable learning rates and alphas is that of the paper's order and does not apply to this rule.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class EASGD(Rule):
    """Pull the centre and the arriving worker's replica towards each other; the worker goes on from its replica.

    Args:
        alpha: elastic rate, in [0, 1].
        num_local_steps: H between two exchanges.
    """

    local_steps: ClassVar[bool] = True
    needs_points: ClassVar[bool] = True

    alpha: float = parameter(0.225, at_least=0, at_most=1)
    num_local_steps: int = parameter(10, at_least=1)

    def init(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape)  # where minus d is built

    def arrive(self, state: Tensor, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        apart = arrival.start_point - arrival.gradient - view.parameters  # y_i - x
        state.copy_(apart).mul_(-self.alpha)
        offset = apart.mul_(1.0 - 2.0 * self.alpha)  # (y_i - d) - (x + d)
        start = Start(arrival.worker, self.num_local_steps, offset)
        return Reply(state, uses=(arrival.dispatch,), start=(start,))
