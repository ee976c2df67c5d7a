"""Synchronous minibatch SGD as a rule: one step per round of all workers.

    x_{t+1} = x_t - eta * sum_i w_i grad f(x_t; batch_i) / sum_i w_i,     i over the workers present, w_i = loss terms

This is the gradient of the mean loss per loss term over all the round's batches. So the rule equals data-parallel
training with DistributedDataParallel, and one process with accumulated batches. Every delay is 0.

The weighted sum runs over workers in order, whatever the order of arrival, so the result does not depend on it.
Reference: Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016, section 2.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import ClassVar

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, View, WeightedMean


@dataclasses.dataclass
class Round:
    """The sum of a round's gradients, and the gradients that wait until a worker with a lower number has arrived."""

    mean: WeightedMean
    uses: list[int]
    gradients: dict[int, tuple[Tensor, float]]
    """dispatch -> (copy of the gradient, weight), of those that wait."""
    waiting: list[tuple[int, int]]
    """Their (worker, dispatch), a heap; a worker that left and came back may have two."""
    computing: list[int]
    """The workers in flight at the latest start, from the last worker to the first, without those found to be gone."""
    num_in_flight: int
    """After the latest event; -1: `computing` has to be made anew."""


@dataclasses.dataclass(frozen=True)
class Synchronous(Rule):
    """Hold gradients until nobody is in flight, then step along their weighted mean and start everybody.

    A gradient is added to the sum as soon as no worker before it is still in flight. Until then a copy of it is kept.
    So workers that arrive in order cost one vector, not N. Finding that out costs O(log N) per arrival.

    >>> str(Synchronous())
    'synchronous'
    """

    in_rounds: ClassVar[bool] = True

    def init(self, like: Tensor) -> Round:
        return Round(WeightedMean(like), [], {}, [], [], -1)

    def arrive(self, state: Round, arrival: Arrival, view: View) -> Reply:
        if len(view.in_flight) != state.num_in_flight - 1:  # somebody has started since the latest event
            state.num_in_flight = -1
        first = self._first_in_flight(state, view)
        worker, dispatch = arrival.worker, arrival.dispatch
        if (first is None or worker < first) and (not state.waiting or worker < state.waiting[0][0]):
            state.mean.add(arrival.gradient, arrival.weight)
            state.uses.append(dispatch)
        else:
            heapq.heappush(state.waiting, (worker, dispatch))
            state.gradients[dispatch] = (arrival.gradient.clone(), arrival.weight)
        return self._fire_when_all_are_in(state, view, first)

    def leave(self, state: Round, worker: int, view: View) -> Reply:
        state.num_in_flight = -1
        return self._fire_when_all_are_in(state, view, self._first_in_flight(state, view))

    def _first_in_flight(self, state: Round, view: View) -> int | None:
        """The lowest worker that is computing. Between two starts that only grows, so a round takes one sort."""
        if state.num_in_flight < 0:
            state.computing = sorted(view.in_flight, reverse=True)
        state.num_in_flight = len(view.in_flight)
        while state.computing and state.computing[-1] not in view.in_flight:
            state.computing.pop()
        return state.computing[-1] if state.computing else None

    def _fire_when_all_are_in(self, state: Round, view: View, first: int | None) -> Reply:
        while state.waiting and (first is None or state.waiting[0][0] <= first):
            _, dispatch = heapq.heappop(state.waiting)
            state.mean.add(*state.gradients.pop(dispatch))
            state.uses.append(dispatch)
        if view.in_flight or not state.uses:
            return Reply()
        reply = Reply(direction=state.mean.value(), uses=tuple(state.uses), start=view.everyone)
        state.mean.clear()
        state.uses.clear()
        return reply
