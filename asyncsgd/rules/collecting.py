"""Rules that step along the mean of several gradients, weighted by their loss terms w_i.

    x_{t+1} = x_t - eta * sum_i w_i g_i / sum_i w_i

That is the gradient of the mean loss per loss term over all their batches.

References: Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016. Dutta, Joshi, Ghosh,
Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race, AISTATS 2018.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import msgspec
from torch import Tensor

from asyncsgd.rules.contract import Arrival, Collecting, Held, Reply, Rule, Start, View
from asyncsgd.settings.choices import parameter


@dataclasses.dataclass(frozen=True)
class Synchronous(Collecting):
    """Hold gradients until nobody is in flight, then step along their weighted mean and start everybody.

    So the rule equals data-parallel training with DistributedDataParallel, and one process with accumulated batches.
    Every delay is 0. Chen et al., section 2.

    >>> str(Synchronous())
    'synchronous'
    """

    in_rounds: ClassVar[bool] = True
    moves_by_first_batch: ClassVar[bool] = True  # as DistributedDataParallel, which this rule equals


def _stopping_everybody(reply: Reply, view: View) -> Reply:
    """If the reply takes a step, stop the workers that are still in flight. They start again with the others."""
    if reply.direction is None:
        return reply
    abandon = tuple([flight.dispatch for flight in view.in_flight.values()])
    return msgspec.structs.replace(reply, abandon=abandon, start=view.everyone)


@dataclasses.dataclass(frozen=True)
class KSync(Collecting):
    """Step along the mean of the first `quorum` gradients of a round and start everybody again.

    Every delay is 0. Dropping is unbiased only if the time a gradient takes does not depend on its batch. An
    interrupted batch is handed out again: no data are lost, but slow batches come later.

    Args:
        quorum: K, or the number of workers present where that is smaller.
        interrupt: stop the others (their batches are handed out again) instead of letting them finish and dropping
            what they bring; a late worker then joins the round in which it arrives.

    Dutta et al. (K-sync; its run time is analysed in section 3); Chen et al., algorithms 3 and 4 (N + b workers, b of
    them backups: K = N); Begunov, Tyurin: Do We Need Asynchronous SGD?, 2026 (m-synchronous SGD: K = m).
    """

    quorum: int = parameter(2, at_least=1)
    interrupt: bool = True

    def num_required(self, view: View) -> int:
        return min(self.quorum, len(view.workers))

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        if arrival.read_version < view.version:
            return Reply(drops=(arrival.dispatch,), start=(Start(arrival.worker),))
        return super().arrive(state, arrival, view)

    def step_if_enough(self, state: Held, view: View) -> Reply:
        reply = super().step_if_enough(state, view)
        return _stopping_everybody(reply, view) if self.interrupt else reply


@dataclasses.dataclass(frozen=True)
class KAsync(Collecting):
    """Step along the mean of K distinct workers' gradients and start those K again; the others compute on.

    A worker that has delivered waits until the update. K-async of Dutta et al.

    Args:
        quorum: K, or the number of workers present where that is smaller.
    """

    quorum: int = parameter(2, at_least=1)

    def num_required(self, view: View) -> int:
        return min(self.quorum, len(view.workers))


@dataclasses.dataclass(frozen=True)
class KBatchAsync(Rule):
    """Step along the mean of any K gradients; each worker starts again as soon as its gradient arrives.

    So K = N is not synchronous SGD even at equal speeds. K-batch-async of Dutta et al.; n-softsync of Gupta, Zhang,
    Wang: Model Accuracy and Runtime Tradeoff in Distributed Deep Learning, ICDM 2016.

    Args:
        batch: K, gradients per update. One without loss terms counts as one of them.
    """

    hears_of_empty: ClassVar[bool] = True

    batch: int = parameter(4, at_least=1)

    def init(self, like: Tensor) -> Held:
        return Held()

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        start = (Start(arrival.worker),)
        if len(state) < self.batch:
            return Reply(start=start)
        mean, uses = state.take()
        return Reply(mean, uses=uses, start=start)


@dataclasses.dataclass(frozen=True)
class Rennala(KBatchAsync):
    """Step along the mean of the first `batch` gradients computed at the current version, whoever brings them.

    A fast worker may contribute several of the B. Time-optimal for smooth nonconvex objectives on homogeneous data with
    B = max(1, ceil(sigma^2 / eps)). Every delay is 0.

    Args:
        batch: B, gradients per update. One without loss terms counts as one of them.
        interrupt: stop and restart everybody at each update, instead of dropping what was computed at an older version.

    Tyurin, Richtarik: Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed Computation
    Model, NeurIPS 2023, algorithm 1 (workers finish, stale results are ignored). K-batch-sync of Dutta et al. and the
    published experiments stop all workers at each update (`interrupt`).
    """

    interrupt: bool = True

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        if arrival.read_version < view.version:
            return Reply(drops=(arrival.dispatch,), start=(Start(arrival.worker),))
        reply = super().arrive(state, arrival, view)
        return _stopping_everybody(reply, view) if self.interrupt else reply
