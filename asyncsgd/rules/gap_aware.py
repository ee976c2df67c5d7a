"""Gap-Aware: every element of a stale gradient is divided by how far that parameter has moved since the read.

    x_{t+1} = x_t - eta * g / (1 + |x_t - x_r| / C),     C = eta * sqrt(mean square of gradients),    element by element

C is what one average step moves an element, so the penalty is about 1 + the number of average steps since the read. The
mean square is an exponential one (0.999 by default) without its bias towards the start.

Barkai, Hakimi, Schuster: Gap-Aware Mitigation of Gradient Staleness, ICLR 2020, equations 6 and 7 (numbers recalled).
Deviations: the mean square is that of gradients, the paper takes the momentum buffer where there is one (ours belongs
to the server's optimizer); eta is the current learning rate.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View

TINY = 1e-20
"""Keeps 0 / 0 out where an element has had no gradient yet: it has not moved either."""


@dataclasses.dataclass
class MeanSquare:
    """The running mean square, how much of it there is, and where the scaled gradient is built."""

    value: Tensor
    scaled: Tensor
    share: list[float]
    """One number: 1 - decay^arrivals."""

    def clear(self) -> None:
        self.value.fill_(float("nan"))
        self.share.clear()


@dataclasses.dataclass(frozen=True)
class GapAware(Rule):
    """Apply every gradient at once, divided element by element by one plus its gap in average steps.

    Args:
        decay: of the mean square, in [0, 1).
    """

    name: ClassVar[str] = "gap_aware"
    summary: ClassVar[str] = "asynchronous, gradients divided by how far each parameter has moved (Barkai et al. 2020)"
    needs_points: ClassVar[bool] = True

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")

    def init(self, like: Tensor) -> MeanSquare:
        return MeanSquare(like.new_zeros(like.shape), like.new_zeros(like.shape), [0.0])

    def arrive(self, state: MeanSquare, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        state.value.mul_(self.decay).addcmul_(arrival.gradient, arrival.gradient, value=1.0 - self.decay)
        state.share[0] = self.decay * state.share[0] + (1.0 - self.decay)
        step = (state.value / state.share[0]).sqrt_().mul_(view.learning_rate).add_(TINY)
        penalty = (view.parameters - arrival.start_point).abs_().div_(step).add_(1.0)
        torch.div(arrival.gradient, penalty, out=state.scaled)
        return Reply(state.scaled, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
