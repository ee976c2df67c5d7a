"""Rules for data that differ between workers: a table of their gradients gives every worker's objective weight 1/n."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from asyncsgd.rules.contract import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Table:
    """Each worker's last gradient and its dispatch, and their sum."""

    slots: dict[int, tuple[Tensor, int]]
    total: Tensor


@dataclasses.dataclass(frozen=True)
class IA2SGD(Rule):
    """Replace the arriving worker's slot and step along the mean of all slots.

        G_i <- g,    x_{t+1} = x_t - eta (1/n) sum_j G_j,    empty slots count as 0

    The stochastic form of incremental aggregated gradients (Gurbuzbalaban, Ozdaglar, Parrilo: On the Convergence Rate
    of Incremental Aggregated Gradient Algorithms, SIAM J. Optim. 2017), the baseline of Maranjyan, Richtarik:
    Ringleader ASGD, ICLR 2026. A worker that leaves takes its slot along: kept, it would bias the result.
    """

    def init(self, like: Tensor) -> Table:
        return Table({}, torch.zeros_like(like))

    def leave(self, state: Table, worker: int, view: View) -> Reply:
        if worker in state.slots:
            gradient, _ = state.slots.pop(worker)
            state.total.sub_(gradient)
        if not state.slots:
            state.total.zero_()  # no rounding left over
        return Reply()

    def arrive(self, state: Table, arrival: Arrival, view: View) -> Reply:
        if arrival.worker in state.slots:
            slot, _ = state.slots[arrival.worker]
            state.total.sub_(slot)
            slot.copy_(arrival.gradient)
        else:
            slot = arrival.gradient.clone()
        state.slots[arrival.worker] = (slot, arrival.dispatch)
        state.total.add_(slot)
        uses = tuple([dispatch for _, dispatch in state.slots.values()])
        return Reply(state.total / len(view.workers), uses=uses, start=(Start(arrival.worker),))


@dataclasses.dataclass
class Mean:
    """The mean of one worker's gradients, as their sum and their number."""

    total: Tensor
    """`(P,)`, the sum."""
    dispatches: list[int]
    """The dispatch numbers of the gradients, as many as there are."""


@dataclasses.dataclass
class Tables:
    """What has been collected of every worker."""

    now: dict[int, Mean]
    """Worker -> its mean in this round."""
    following: dict[int, Mean]
    """Worker -> its mean in the next round."""
    to_update: set[int]
    """The workers whose update of this round is still to come; empty while gradients are collected."""


@dataclasses.dataclass(frozen=True)
class Ringleader(Rule):
    """Collect a gradient of everybody, then take one step per worker along the mean over workers.

    A table holds per worker the mean of the gradients it has brought. In the first phase gradients are collected,
    without an update, until every worker has brought one. Fast workers refine their own mean. In the second phase there
    is one update per worker,

        x <- x - eta (1/n) sum_i mean_i,

    The first update is taken when the last worker has brought its gradient. Each further one is taken when a worker
    without an update in this round brings a gradient, which is first added to its mean. A worker that has updated
    starts at the new point; what it brings from there goes to the next round's table.

    Maranjyan, Richtarik: Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
    Heterogeneity, ICLR 2026. All delays are at most 2 n - 2. The mean is 1/n over workers, not over loss terms. A
    worker that leaves is forgotten in the first phase and keeps its part in the second. Deviation: a worker always
    starts again at the newest parameters, in the first phase too and after an arrival that is held for the next round.
    """

    def init(self, like: Tensor) -> Tables:
        return Tables({}, {}, set())

    def leave(self, state: Tables, worker: int, view: View) -> Reply:
        drops = _forget(state.following, worker)
        if not state.to_update:
            return Reply(drops=drops + _forget(state.now, worker))
        self._updated(state, worker)
        return Reply(drops=drops)

    def arrive(self, state: Tables, arrival: Arrival, view: View) -> Reply:
        worker = arrival.worker
        start = (Start(worker),)
        if state.to_update and worker not in state.to_update:
            _add(state.following, arrival)
            return Reply(start=start)
        means = state.now
        _add(means, arrival)
        if not state.to_update:
            if any(other not in means for other in view.workers):
                return Reply(start=start)
            state.to_update = set(view.workers)
        direction = torch.zeros_like(arrival.gradient)
        uses: list[int] = []
        for mean in means.values():
            direction.add_(mean.total, alpha=1.0 / (len(mean.dispatches) * len(means)))
            uses += mean.dispatches
        self._updated(state, worker)
        return Reply(direction, uses=tuple(uses), start=start)

    def _updated(self, state: Tables, worker: int) -> None:
        """Take in that `worker` has made its update of this round, or has left. After the last update of a round, the
        next round's table becomes this round's."""
        state.to_update.discard(worker)
        if not state.to_update:
            state.now = state.following
            state.following = {}


def _add(table: dict[int, Mean], arrival: Arrival) -> None:
    mean = table.setdefault(arrival.worker, Mean(torch.zeros_like(arrival.gradient), []))
    mean.total.add_(arrival.gradient)
    mean.dispatches.append(arrival.dispatch)


def _forget(table: dict[int, Mean], worker: int) -> tuple[int, ...]:
    return tuple(table.pop(worker).dispatches) if worker in table else ()
