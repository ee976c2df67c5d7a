"""DC-ASGD: a first-order Taylor correction of the stale gradient, with g * g in place of the Hessian.

    x_{t+1} = x_t - eta * (g + lambda g * g * (x_t - x_r)),     g = grad f(x_r; batch), all products element by element

    constant:  lambda = lambda_0
    adaptive:  lambda = lambda_0 / sqrt(MS + 1e-7),   MS <- m MS + (1 - m) g * g

Zheng, Meng, Wang, Chen, Yu, Ma, Liu: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017,
with the constants of a public port: lambda_0 = 0.04 constant, 2 adaptive, m = 0.95.

With the exact Hessian in place of lambda g * g the correction undoes the delay on any quadratic.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View

EPSILON = 1e-7


@dataclasses.dataclass
class MeanSquare:
    """MS, and where the corrected gradient is built."""

    value: Tensor
    corrected: Tensor


@dataclasses.dataclass(frozen=True)
class DCASGD(Rule):
    """Apply every gradient at once, compensated for how far the parameters have moved since its read.

    Args:
        compensation: lambda_0; 0 is asynchronous SGD.
        adaptive: divide by the root of the running mean square.
        decay: m of the mean square.
    """

    name: ClassVar[str] = "dc_asgd"
    needs_points: ClassVar[bool] = True

    compensation: float = parameter(0.04, at_least=0)
    adaptive: bool = False
    decay: float = parameter(0.95, at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.adaptive and self.decay != DCASGD.decay:
            raise ValueError("decay is that of the adaptive form; add adaptive=true, or leave it out")

    def init(self, like: Tensor) -> MeanSquare:
        return MeanSquare(like.new_zeros(like.shape), like.new_zeros(like.shape))

    def arrive(self, state: MeanSquare, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        gradient, moved = arrival.gradient, view.parameters - arrival.start_point
        square = gradient * gradient
        curvature = square * self.compensation
        if self.adaptive:
            state.value.mul_(self.decay).add_(square, alpha=1.0 - self.decay)
            curvature.div_((state.value + EPSILON).sqrt_())
        torch.addcmul(gradient, curvature, moved, out=state.corrected)
        return Reply(state.corrected, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
