"""Ringleader ASGD: heterogeneous data, every worker's objective with the same weight, whatever the speeds.

A table holds per worker the mean of the gradients it has brought. In the first phase gradients are collected, without
an update, until every worker has brought one. Fast workers refine their own mean. In the second phase there is one
update per worker,

    x <- x - eta (1/n) sum_i mean_i,

the first by the last finisher of the first phase, each following one when a worker that has not updated yet brings a
gradient (into its mean). A worker that has updated starts at the new point; what it brings from there goes to the next
round's table.

Maranjyan, Richtarik: Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data Heterogeneity,
ICLR 2026. All delays are at most 2 n - 2. The mean is 1/n over workers, not over loss terms. A worker that leaves is
forgotten in the first phase and keeps its part in the second. Deviation: a worker always starts again at the newest
parameters, in the first phase too and after an arrival that is held for the next round.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Mean:
    """Of the gradients of one worker."""

    total: Tensor
    dispatches: list[int]


@dataclasses.dataclass
class Tables:
    """This round's means, the next round's, and who has still to update; nobody has in the first phase."""

    now: dict[int, Mean]
    following: dict[int, Mean]
    to_update: set[int]
    direction: Tensor


@dataclasses.dataclass(frozen=True)
class Ringleader(Rule):
    """Collect a gradient of everybody, then take one step per worker along the mean over workers."""

    def init(self, like: Tensor) -> Tables:
        return Tables({}, {}, set(), like.new_zeros(like.shape))

    def leave(self, state: Tables, worker: int, view: View) -> Reply:
        drops = _forget(state.following, worker)
        if not state.to_update:
            return Reply(drops=drops + _forget(state.now, worker))
        self._updated(state, worker)
        return Reply(drops=drops)

    def arrive(self, state: Tables, arrival: Arrival, view: View) -> Reply:
        worker, start = arrival.worker, (Start(arrival.worker),)
        if state.to_update and worker not in state.to_update:
            _add(state.following, arrival)
            return Reply(start=start)
        _add(state.now, arrival)
        if not state.to_update:
            if any(other not in state.now for other in view.workers):
                return Reply(start=start)
            state.to_update = set(view.workers)
        state.direction.zero_()
        for mean in state.now.values():
            state.direction.add_(mean.total, alpha=1.0 / (len(mean.dispatches) * len(state.now)))
        uses = tuple([dispatch for mean in state.now.values() for dispatch in mean.dispatches])
        self._updated(state, worker)
        return Reply(state.direction, uses=uses, start=start)

    def _updated(self, state: Tables, worker: int) -> None:
        """`worker` has no update left; after the last one the next round's table is this round's."""
        state.to_update.discard(worker)
        if not state.to_update:
            state.now, state.following = state.following, {}


def _add(table: dict[int, Mean], arrival: Arrival) -> None:
    if arrival.worker in table:
        table[arrival.worker].total.add_(arrival.gradient)
        table[arrival.worker].dispatches.append(arrival.dispatch)
    else:
        table[arrival.worker] = Mean(arrival.gradient.clone(), [arrival.dispatch])


def _forget(table: dict[int, Mean], worker: int) -> tuple[int, ...]:
    mean = table.pop(worker, None)
    return () if mean is None else tuple(mean.dispatches)
