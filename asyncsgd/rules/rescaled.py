"""Rescaled ASGD: heterogeneous data, each worker's step in proportion to the time its gradients take.

    x_{t+1} = x_t - eta * (tau_i mean_j(1 / tau_j)) * grad f_i(x_{t - delay}; batch)
    tau_i = mean seconds of worker i's gradients

A worker that is twice as slow arrives half as often and steps twice as far. So every objective has the same weight per
second. The mean of the factors over arrivals is 1. Mahran et al., 2026 (arXiv 2605.13434); the normalisation is ours.
Seconds are those recorded in the arrivals, so a replay computes the same factors.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View

Seconds = dict[int, tuple[int, float]]
"""Worker -> number of arrivals, mean seconds."""


@dataclasses.dataclass(frozen=True)
class Rescaled(Rule):
    """Apply every gradient at once with a learning rate in proportion to its worker's mean seconds."""

    def init(self, like: Tensor) -> Seconds:
        return {}

    def leave(self, state: Seconds, worker: int, view: View) -> Reply:
        state.pop(worker, None)
        return Reply()

    def arrive(self, state: Seconds, arrival: Arrival, view: View) -> Reply:
        start = (Start(arrival.worker),)
        if arrival.seconds > 0:
            number, mean = state.get(arrival.worker, (0, 0.0))
            state[arrival.worker] = (number + 1, mean + (arrival.seconds - mean) / (number + 1))
        if arrival.worker not in state:
            return Reply(arrival.gradient, uses=(arrival.dispatch,), start=start)
        rates = [1.0 / mean for _, mean in state.values()]
        factor = state[arrival.worker][1] * sum(rates) / len(rates)
        return Reply(arrival.gradient, factor, uses=(arrival.dispatch,), start=start)
