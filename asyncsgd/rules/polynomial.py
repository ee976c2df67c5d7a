"""Staleness weights of FedAsync on gradients: the polynomial and the hinge family.

    x_{t+1} = x_t - eta * s(tau) * grad f(x_{t - tau}; batch)
    polynomial: s(tau) = (1 + tau)^-a        hinge: s(tau) = 1 if tau <= b, otherwise 1 / (a (tau - b) + 1)

Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019. Deviation: FedAsync mixes models, x <- (1 - alpha s) x +
alpha s x_new, where x_new after one local step is x_{t - tau} - eta g. Here the same weights scale the step of
asynchronous SGD.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from asyncsgd.delay_factors import hinge, polynomial
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class Polynomial(Rule):
    """Apply every gradient at once with learning rate eta (1 + delay)^-exponent."""

    name: ClassVar[str] = "polynomial"
    summary: ClassVar[str] = "asynchronous with learning rate times (1 + delay)^-a (weights of FedAsync, 2019)"

    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise ValueError(f"exponent must be 0 or more, got {self.exponent}")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        factor = polynomial(view.version - arrival.read_version, self.exponent)
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=(Start(arrival.worker),))


@dataclasses.dataclass(frozen=True)
class Hinge(Rule):
    """Apply every gradient at once with its full learning rate up to delay `allowed`, then falling with `slope`."""

    name: ClassVar[str] = "hinge"
    summary: ClassVar[str] = "asynchronous, full learning rate up to delay b, then 1 / (a (delay - b) + 1) (FedAsync)"

    slope: float = 10.0
    allowed: int = 4

    def __post_init__(self) -> None:
        if not self.slope >= 0 or self.allowed < 0:
            raise ValueError(f"slope and allowed must be 0 or more, got {self.slope} and {self.allowed}")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        factor = hinge(view.version - arrival.read_version, self.slope, self.allowed)
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
