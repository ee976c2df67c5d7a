"""Gap-Aware: every element of a stale gradient is divided by how far that parameter has moved since the read.

    x_{t+1} = step(x_t, g / (1 + |x_t - x_r| / C)),    C = sqrt(mean of (x_{s+1} - x_s)^2 over the steps so far)

all element by element. C is what one step really moves an element, whatever the optimizer, so the penalty is 1 + the
number of average steps since the read. The mean is an exponential one (0.999 by default) without its bias towards the
start.

Barkai, Hakimi, Schuster: Gap-Aware Mitigation of Gradient Staleness, ICLR 2020, in the form that a public port gives it
for AdamW. The rule has no momentum of its own: the server's optimizer takes the step, with the one that it has.
Deviations: C is measured in the same way under every optimizer; under SGD the paper derives it from the
learning rate and the momentum buffer. The mean is corrected for its bias. Weight decay counts as part of a step and is
not divided itself; the port divides it too. The first gradient has no gap, because no step was measured before it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View

TINY = 1e-20
"""Keeps 0 / 0 out where no step has moved an element: there is no gap either."""


@dataclasses.dataclass
class Steps:
    """The running mean square of the steps, and where the latest one began."""

    mean_square: Tensor
    share: float = 0.0
    """1 - decay^steps: how much of a mean `mean_square` is so far."""
    before: Tensor | None = None
    """The parameters at the latest arrival, so before its step; None before the first."""


@dataclasses.dataclass(frozen=True)
class GapAware(Rule):
    """Apply every gradient at once, divided element by element by one plus its gap in average steps.

    Args:
        decay: of the mean square, in [0, 1).
    """

    needs_points: ClassVar[bool] = True

    decay: float = parameter(0.999, at_least=0, below=1)

    def init(self, like: Tensor) -> Steps:
        return Steps(like.new_zeros(like.shape))

    def arrive(self, state: Steps, arrival: Arrival, view: View) -> Reply:
        uses, start = (arrival.dispatch,), (Start(arrival.worker),)
        if state.before is None:
            state.before = view.parameters.clone()
            return Reply(arrival.gradient, uses=uses, start=start)
        assert arrival.start_point is not None
        step = torch.sub(view.parameters, state.before, out=state.before)
        state.mean_square.mul_(self.decay).addcmul_(step, step, value=1.0 - self.decay)
        state.share = self.decay * state.share + (1.0 - self.decay)
        state.before.copy_(view.parameters)
        average = (state.mean_square / state.share).sqrt_().add_(TINY)
        penalty = (view.parameters - arrival.start_point).abs_().div_(average).add_(1.0)
        return Reply(torch.div(arrival.gradient, penalty, out=penalty), uses=uses, start=start)
