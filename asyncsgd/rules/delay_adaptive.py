"""Asynchronous SGD whose step shrinks once a gradient is older than the concurrency: a constant step until then.

    x_{t+1} = x_t - eta * min(1, M / max(1, tau)) * grad f(x_{t - tau}; batch),     M = `concurrency`

Mishchenko, Bach, Even, Woodworth: Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays, NeurIPS 2022, in the
form M / max(M, tau) of its published code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from asyncsgd.delay_factors import threshold
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class DelayAdaptive(Rule):
    """Apply every gradient at once with learning rate eta M / max(M, delay).

    Args:
        concurrency: M; 0 means the workers present at each arrival.
    """

    name: ClassVar[str] = "delay_adaptive"
    summary: ClassVar[str] = "asynchronous with learning rate times M / max(M, delay) (Mishchenko et al. 2022)"

    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 0:
            raise ValueError(f"concurrency must be 0 (the workers present) or more, got {self.concurrency}")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        factor = threshold(view.version - arrival.read_version, self.concurrency or len(view.workers))
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
