"""K-sync SGD: of every round, the first K gradients count. Backup workers and m-synchronous SGD are the same method.

    x_{t+1} = x_t - eta * sum_{i in S_t} w_i grad f(x_t; batch_i) / sum w_i,    S_t = the first K to arrive at x_t

Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race, AISTATS 2018 (K-sync, times in section
3); Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016, algorithms 3 and 4 (N + b
workers, b of them backups: K = N); Begunov, Tyurin: Do We Need Asynchronous SGD?, 2026 (m-synchronous SGD: K = m).

Every delay is 0. Dropping is unbiased only if the time a gradient takes does not depend on its batch. An interrupted
batch is handed out again: no data are lost, but slow batches come later.
"""

from __future__ import annotations

import dataclasses

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Collecting, Held, Reply, Start, View


@dataclasses.dataclass(frozen=True)
class KSync(Collecting):
    """Step along the mean of the first `quorum` gradients of a round and start everybody again.

    Args:
        quorum: K; at most as many as are present are waited for.
        interrupt: stop the others (their batches are handed out again) instead of letting them finish and dropping
            what they bring; a late worker then joins the round in which it arrives.
    """

    quorum: int = parameter(2, at_least=1)
    interrupt: bool = True

    def arrive(self, state: Held, arrival: Arrival, view: View) -> Reply:
        if arrival.read_version < view.version:
            return Reply(drops=(arrival.dispatch,), start=(Start(arrival.worker),))
        return super().arrive(state, arrival, view)

    def fire(self, state: Held, view: View) -> Reply:
        # Nobody is in flight short of the quorum only where no batches are left.
        if not len(state) or (view.in_flight and len(state) < min(self.quorum, len(view.workers))):
            return Reply()
        abandon = tuple([flight.dispatch for flight in view.in_flight.values()]) if self.interrupt else ()
        start = view.everyone
        if not self.interrupt:
            start = tuple([each for each in start if each.worker not in view.in_flight])
        mean, uses = state.take()
        return Reply(mean, uses=uses, abandon=abandon, start=start)
