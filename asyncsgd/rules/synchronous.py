"""Synchronous minibatch SGD as a rule: one step per round of all workers.

    x_{t+1} = x_t - eta * sum_i w_i grad f(x_t; batch_i) / sum_i w_i,     i over the workers present, w_i = loss terms

which is the gradient of the mean loss per loss term over all the round's batches, so it equals data-parallel
training with DistributedDataParallel and one process with accumulated batches. Every delay is 0.

The weighted sum runs over workers in order, whatever the order of arrival, so the result does not depend on it.
Reference: Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016, section 2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, View, WeightedMean


@dataclasses.dataclass
class Round:
    """A round's sum so far, and the gradients that wait for a worker before them in order."""

    mean: WeightedMean
    uses: list[int]
    waiting: dict[tuple[int, int], tuple[Tensor, float]]
    """(worker, dispatch) -> (copy of the gradient, weight); a worker that left and came back may have two."""


@dataclasses.dataclass(frozen=True)
class Synchronous(Rule):
    """Hold gradients until nobody is in flight, then step along their weighted mean and start everybody.

    A gradient is added to the sum as soon as no worker before it is still in flight and copied until then, so
    workers that arrive in order cost one vector, not N.

    >>> str(Synchronous())
    'synchronous'
    """

    name: ClassVar[str] = "synchronous"
    summary: ClassVar[str] = "wait for all workers, step along their weighted mean (DDP on the parameter server)"

    def init(self, like: Tensor) -> Round:
        return Round(WeightedMean(like), [], {})

    def arrive(self, state: Round, arrival: Arrival, view: View) -> Reply:
        ahead = (*view.in_flight, *(worker for worker, _ in state.waiting))
        if all(worker > arrival.worker for worker in ahead):
            state.mean.add(arrival.gradient, arrival.weight)
            state.uses.append(arrival.dispatch)
        else:
            state.waiting[arrival.worker, arrival.dispatch] = (arrival.gradient.clone(), arrival.weight)
        return self._fire_when_all_are_in(state, view)

    def leave(self, state: Round, worker: int, view: View) -> Reply:
        return self._fire_when_all_are_in(state, view)

    def _fire_when_all_are_in(self, state: Round, view: View) -> Reply:
        for worker, dispatch in sorted(state.waiting):
            if any(other < worker for other in view.in_flight):
                break
            gradient, weight = state.waiting.pop((worker, dispatch))
            state.mean.add(gradient, weight)
            state.uses.append(dispatch)
        if view.in_flight or not state.uses:
            return Reply()
        reply = Reply(direction=state.mean.value(), uses=tuple(state.uses), start=view.everyone)
        state.mean.clear()
        state.uses.clear()
        return reply
