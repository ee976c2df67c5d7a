"""Stale synchronous parallel: workers run ahead of the slowest by at most s clocks.

    x_{t+1} = x_t - eta * grad f(x_{t - tau}; batch);    a worker with c_i arrivals starts iff c_i - min_j c_j <= s

Ho, Cipar, Cui, Lee, Kim, Gibbons, Gibson, Ganger, Xing: More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server, NeurIPS 2013. Deviation: a read sees every update that has been applied (the paper's caches may hold
older ones). The gap is looked at when work starts, so it is s + 1 at most when work ends.

s = 0 is bulk-synchronous: n updates a round, all computed at the round's first version; delays are 0 to n - 1. With
fixed unequal speeds every finite s has the throughput of the slowest worker, n / max_i tau_i: only jitter is recovered.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Clocks:
    """Arrivals of each worker, and who waits for the slowest."""

    clocks: dict[int, int]
    waiting: list[int]


@dataclasses.dataclass(frozen=True)
class SSP(Rule):
    """Apply every gradient as it comes; a worker more than `slack` clocks ahead of the slowest waits.

    Args:
        slack: s of the paper, 0 or more.
    """

    slack: int = parameter(2, at_least=0)

    def init(self, like: Tensor) -> Clocks:
        return Clocks({}, [])

    def join(self, state: Clocks, worker: int, view: View) -> Reply:
        state.clocks[worker] = min(state.clocks.values(), default=0)
        return Reply(start=(Start(worker),))

    def leave(self, state: Clocks, worker: int, view: View) -> Reply:
        del state.clocks[worker]
        if worker in state.waiting:
            state.waiting.remove(worker)
        return Reply(start=self._release(state))

    def arrive(self, state: Clocks, arrival: Arrival, view: View) -> Reply:
        state.clocks[arrival.worker] += 1
        state.waiting.append(arrival.worker)
        return Reply(arrival.gradient, uses=(arrival.dispatch,), start=self._release(state))

    def _release(self, state: Clocks) -> tuple[Start, ...]:
        slowest = min(state.clocks.values(), default=0)
        free = [worker for worker in state.waiting if state.clocks[worker] - slowest <= self.slack]
        state.waiting = [worker for worker in state.waiting if worker not in free]
        return tuple(map(Start, free))
