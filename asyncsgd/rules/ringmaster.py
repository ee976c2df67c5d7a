"""Ringmaster ASGD: asynchronous SGD that ignores gradients whose delay has reached a threshold.

    x_{t+1} = x_t - eta * grad f(x_{t - tau}; batch)   if tau < R,   otherwise the gradient is dropped

Maranjyan, Tyurin, Richtarik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity, ICML 2025
(the variant without stops). R interpolates between the fastest worker alone (R = 1) and plain asynchronous SGD (R
infinite)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from asyncsgd.rules.base import Arrival, Reply, Rule, View


@dataclasses.dataclass(frozen=True)
class Ringmaster(Rule):
    """Apply a gradient if its delay is below `threshold`, drop it otherwise; start its worker again either way.

    Args:
        threshold: R of the paper, 1 or more; the largest applied delay is R - 1.
    """

    name: ClassVar[str] = "ringmaster"
    summary: ClassVar[str] = "asynchronous, gradients with delay >= threshold are dropped (Maranjyan et al. 2025)"

    threshold: int = 8

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ValueError(f"threshold must be 1 or more, got {self.threshold}")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        if view.version - arrival.read_version >= self.threshold:
            return Reply(drops=(arrival.dispatch,), start=(arrival.worker,))
        return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), start=(arrival.worker,))
