"""Asynchronous SGD whose step depends on the gradient's delay tau, a count of updates, 0 for a fresh gradient:

    x_{t+1} = x_t - eta * s(tau) * grad f(x_{t - tau}; batch)

    staleness_aware  1 / max(1, tau)                      Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for
                                                          Distributed Deep Learning, IJCAI 2016
    delay_adaptive   M / max(M, tau)                      Mishchenko, Bach, Even, Woodworth: Asynchronous SGD Beats
                                                          Minibatch SGD Under Arbitrary Delays, NeurIPS 2022, as in its
                                                          published code
    koloskova        1 up to tau = N, then                Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for
                     min(1, 1 / (4 L tau eta))            Asynchronous SGD, NeurIPS 2022
    polynomial       (1 + tau)^-a                         Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019
    hinge            1 up to tau = b, then                the same
                     1 / (a (tau - b) + 1)

Every s is 1 for a fresh gradient. It acts on the learning rate, not on the gradient: under AdamW a factor on the
gradient would cancel. Deviations: FedAsync mixes models, x <- (1 - alpha s) x + alpha s x_new, where x_new after one
local step is x_{t - tau} - eta g; here its weights scale the step. Koloskova's factor 4 was not compared with the
paper; `smoothness` scales it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


def polynomial(delay: int, exponent: float) -> float:
    """Return (1 + delay)^-exponent.

    >>> [polynomial(delay, 0.5) for delay in (0, 3)]
    [1.0, 0.5]
    """
    return float((1 + delay) ** -exponent)


class DelayScaled(Rule):
    """Base: apply every gradient at once, with learning rate eta * `factor`."""

    def factor(self, delay: int, view: View) -> float:
        """s(delay), at most 1."""
        raise TypeError(f"{type(self).__name__} does not define factor()")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        factor = self.factor(view.version - arrival.read_version, view)
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=(Start(arrival.worker),))


@dataclasses.dataclass(frozen=True)
class StalenessAware(DelayScaled):
    """Apply every gradient at once with learning rate eta / max(1, delay)."""

    def factor(self, delay: int, view: View) -> float:
        return 1.0 / max(1, delay)


@dataclasses.dataclass(frozen=True)
class DelayAdaptive(DelayScaled):
    """Apply every gradient at once with learning rate eta M / max(M, delay).

    Args:
        concurrency: M; 0 means the workers present at each arrival.
    """

    concurrency: int = parameter(0, at_least=0)

    def factor(self, delay: int, view: View) -> float:
        concurrency = self.concurrency or len(view.workers)
        return concurrency / max(concurrency, delay)


@dataclasses.dataclass(frozen=True)
class Koloskova(DelayScaled):
    """Apply every gradient at once; beyond N workers of delay its learning rate is at most 1 / (4 L delay).

    Args:
        smoothness: L, the largest curvature of the objective.
    """

    smoothness: float = parameter(1.0, above=0)

    def factor(self, delay: int, view: View) -> float:
        if delay <= len(view.workers) or view.learning_rate <= 0:
            return 1.0
        return min(1.0, 1.0 / (4.0 * self.smoothness * delay * view.learning_rate))


@dataclasses.dataclass(frozen=True)
class Polynomial(DelayScaled):
    """Apply every gradient at once with learning rate eta (1 + delay)^-exponent."""

    exponent: float = parameter(0.5, at_least=0)

    def factor(self, delay: int, view: View) -> float:
        return polynomial(delay, self.exponent)


@dataclasses.dataclass(frozen=True)
class Hinge(DelayScaled):
    """Apply every gradient at once with its full learning rate up to delay `allowed`, then falling with `slope`."""

    slope: float = parameter(10.0, at_least=0)
    allowed: int = parameter(4, at_least=0)

    def factor(self, delay: int, view: View) -> float:
        return 1.0 if delay <= self.allowed else 1.0 / (self.slope * (delay - self.allowed) + 1.0)
