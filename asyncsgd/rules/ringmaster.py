"""Ringmaster ASGD: asynchronous SGD without gradients whose delay has reached a threshold.

    x_{t+1} = x_t - eta * grad f(x_{t - tau}; batch)   if tau < R,   otherwise the gradient is dropped

With `stops`, a worker whose delay reaches R is stopped at once and starts again at the current point. R interpolates
between the fastest worker alone (R = 1) and plain asynchronous SGD (R infinite); R = max(1, ceil(sigma^2 / eps)) is
time-optimal without knowing the workers' speeds.

Maranjyan, Tyurin, Richtarik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity, ICML 2025,
algorithms 4 (without stops) and 5 (with stops). Deviation: with stops, a worker in flight is judged by the version when
it was dispatched. On real processes it may have read a newer one when it got to it, and is then stopped although its
delay is still below R. On the virtual clock the two versions are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class Ringmaster(Rule):
    """Apply a gradient if its delay is below `threshold`, drop it otherwise; start its worker again either way.

    Args:
        threshold: R of the paper, 1 or more; the largest applied delay is R - 1.
        stops: after each update, stop every worker whose delay has reached R and start it again.
    """

    threshold: int = parameter(8, at_least=1)
    stops: bool = False

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        if view.version - arrival.read_version >= self.threshold:
            return Reply(drops=(arrival.dispatch,), start=(Start(arrival.worker),))
        if not self.stops:
            return Reply(arrival.gradient, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
        last_late = view.version + 1 - self.threshold  # read at this version or before: too late after this update
        late = list(itertools.takewhile(lambda item: item[1].version <= last_late, view.in_flight.items()))
        start = (arrival.worker, *[worker for worker, _ in late])
        abandon = tuple([flight.dispatch for _, flight in late])
        return Reply(arrival.gradient, uses=(arrival.dispatch,), abandon=abandon, start=tuple(map(Start, start)))
