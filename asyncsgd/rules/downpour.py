"""Downpour SGD: workers take local steps, push what they have accrued now and then, and fetch now and then.

    worker:  y <- y - eta g(y) for n_push minibatches, then push the sum of the steps; every n_fetch minibatches y <- x
    server:  x <- x - (sum of the steps)

Dean, Corrado, Monga, Chen, Devin, Le, Mao, Ranzato, Senior, Tucker, Yang, Ng: Large Scale Distributed Deep Networks,
NeurIPS 2012, section 4.1 and algorithm 7.1 of its appendix. Deviations: the server takes the workers' steps as they
are, not Adagrad on the accrued gradients; pushes and fetches do not overlap computation. n_push = n_fetch = 1 with
plain SGD is asynchronous SGD.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View

SinceFetch = dict[int, int]
"""Minibatches since each worker's last fetch."""


@dataclasses.dataclass(frozen=True)
class Downpour(Rule):
    """Apply what a worker pushes; it goes on from its own parameters until its next fetch.

    Args:
        n_push: minibatches between two pushes.
        n_fetch: minibatches between two fetches, a multiple of `n_push`.
    """

    local_steps: ClassVar[bool] = True
    needs_points: ClassVar[bool] = True

    n_push: int = parameter(1, at_least=1)
    n_fetch: int = parameter(1, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_fetch % self.n_push:
            raise ValueError(f"n_fetch must be a multiple of n_push, got {self.n_fetch} and {self.n_push}")

    def init(self, like: Tensor) -> SinceFetch:
        return {}

    def join(self, state: SinceFetch, worker: int, view: View) -> Reply:
        state[worker] = 0
        return Reply(start=(Start(worker, self.n_push),))

    def leave(self, state: SinceFetch, worker: int, view: View) -> Reply:
        del state[worker]
        return Reply()

    def arrive(self, state: SinceFetch, arrival: Arrival, view: View) -> Reply:
        worker, offset = arrival.worker, None
        state[worker] += self.n_push
        if state[worker] >= self.n_fetch:
            state[worker] = 0
        else:
            assert arrival.start_point is not None
            # Its own parameters, start minus gradient, seen from the server's after this step, x minus gradient.
            offset = arrival.start_point - view.parameters
        start = (Start(worker, self.n_push, offset),)
        return Reply(arrival.gradient, uses=(arrival.dispatch,), start=start)
