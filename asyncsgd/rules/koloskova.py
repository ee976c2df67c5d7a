"""Asynchronous SGD with a step bounded by 1 / (4 L tau) for gradients older than the concurrency.

    eta_t = eta                          if tau <= tau_C,   tau_C = the number of workers
          = min(eta, 1 / (4 L tau))      otherwise

Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for Asynchronous SGD for Distributed and Federated Learning,
NeurIPS 2022, its delay-adaptive learning rates. The factor 4 was not compared with the paper; `smoothness` scales it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from asyncsgd.delay_factors import bounded
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class Koloskova(Rule):
    """Apply every gradient at once; beyond N workers of delay its learning rate is at most 1 / (4 L delay).

    Args:
        smoothness: L, the largest curvature of the objective.
    """

    name: ClassVar[str] = "koloskova"
    summary: ClassVar[str] = "asynchronous, learning rate at most 1 / (4 L delay) beyond N (Koloskova et al. 2022)"

    smoothness: float = 1.0

    def __post_init__(self) -> None:
        if not self.smoothness > 0:
            raise ValueError(f"smoothness must be positive, got {self.smoothness}")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        delay, rate = view.version - arrival.read_version, view.learning_rate
        factor = bounded(delay, len(view.workers), rate, self.smoothness)
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
