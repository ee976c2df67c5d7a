"""Staleness-aware asynchronous SGD: the older the gradient, the smaller its step.

    x_{t+1} = x_t - (eta / max(1, tau)) * grad f(x_{t - tau}; batch)

Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016, with one gradient
per step. A fresh gradient (tau = 0) keeps the full rate. The factor acts on the learning rate, not on the gradient:
under AdamW a factor on the gradient would cancel.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from asyncsgd.delay_factors import inverse
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class StalenessAware(Rule):
    """Apply every gradient at once with learning rate eta / max(1, delay)."""

    name: ClassVar[str] = "staleness_aware"
    summary: ClassVar[str] = "asynchronous with learning rate divided by max(1, delay) (Zhang et al. 2016)"

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        return Reply(
            direction=arrival.gradient,
            learning_rate_factor=inverse(view.version - arrival.read_version),
            uses=(arrival.dispatch,),
            start=(Start(arrival.worker),),
        )
