"""Asynchronous local SGD with Delayed Nesterov, and dynamic numbers of local steps (DyLU).

A worker returns d = start - end of its H_i local steps, and the server applies it at once:

    D <- D + d
    every N-th arrival:   m <- beta m + D / N,   x <- x - eta ((1 - c N + c) beta m + d / N),   D <- 0
    the others:           x <- x - eta (c beta m + d / N)

    DyLU:   H_i = max(1, floor(H v_i / max_j v_j)),   v_i = local steps per second of worker i's last arrival

So the momentum is that of whole blocks of N arrivals, and workers of unequal speeds return at about the same time. N =
1 is an outer Nesterov optimizer on every arrival. With c = 0 and N > 1 a block's displacement is one Nesterov step on
its mean.

Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato: Asynchronous Local-SGD Training for Language Modeling,
2024, algorithms 2 and 3. 1/N is over time, not over loss terms. Deviation: before a worker's first arrival its speed is
taken for the fastest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass
class Block:
    """m, D, the tensor in which the direction is built, arrivals in the current block, and local steps per second of
    each worker.
    """

    momentum: Tensor
    total: Tensor
    direction: Tensor
    arrivals: int
    speeds: dict[int, float]


@dataclasses.dataclass(frozen=True)
class AsyncLocalSGD(Rule):
    """Apply every worker's displacement at once, with momentum every `period` arrivals only.

    Args:
        num_local_steps: H, of the fastest worker.
        outer_learning_rate: eta.
        outer_momentum: beta, in [0, 1); 0 is asynchronous local SGD without momentum.
        period: N, arrivals in a block; of the order of the number of workers.
        spread: c, in [0, 1/N]: how much of the momentum acts between block ends.
        dynamic: DyLU, local steps in proportion to a worker's speed.
    """

    local_steps: ClassVar[bool] = True

    num_local_steps: int = parameter(10, at_least=1)
    outer_learning_rate: float = parameter(0.7, above=0)
    outer_momentum: float = parameter(0.9, at_least=0, below=1)
    period: int = parameter(4, at_least=1)
    spread: float = parameter(0.0, at_least=0)
    dynamic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread > 1 / self.period:
            raise ValueError(f"spread must be in [0, 1/period], got {self.spread}")

    def init(self, like: Tensor) -> Block:
        return Block(like.new_zeros(like.shape), like.new_zeros(like.shape), like.new_zeros(like.shape), 0, {})

    def leave(self, state: Block, worker: int, view: View) -> Reply:
        state.speeds.pop(worker, None)
        return Reply()

    def arrive(self, state: Block, arrival: Arrival, view: View) -> Reply:
        n, c, beta = self.period, self.spread, self.outer_momentum
        if arrival.seconds > 0:
            state.speeds[arrival.worker] = arrival.num_local_steps / arrival.seconds
        state.total.add_(arrival.gradient)
        state.arrivals += 1
        share = c
        if state.arrivals == n:
            state.momentum.mul_(beta).add_(state.total, alpha=1.0 / n)
            state.total.zero_()
            state.arrivals = 0
            share = 1.0 - c * n + c
        eta = self.outer_learning_rate
        state.direction.copy_(arrival.gradient).mul_(eta / n).add_(state.momentum, alpha=eta * share * beta)
        start = Start(arrival.worker, self._steps(state, arrival.worker))
        return Reply(state.direction, uses=(arrival.dispatch,), start=(start,))

    def _steps(self, state: Block, worker: int) -> int:
        if not self.dynamic or worker not in state.speeds:
            return self.num_local_steps
        return max(1, math.floor(self.num_local_steps * (state.speeds[worker] / max(state.speeds.values()))))
