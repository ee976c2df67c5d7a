"""Rules in which workers take H steps of an inner optimizer and return d_i = start - end, the pseudo-gradient.

    y_i <- H inner steps from where worker i starts,    d_i = start - y_i

d_i is minus the displacement, so a step subtracts it as it would a gradient. The inner optimizer is the one that
``--optimizer`` names; its state stays with its worker.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from asyncsgd.rules.contract import Arrival, Collecting, Held, Reply, Rule, Start, View
from asyncsgd.settings.choices import parameter


@dataclasses.dataclass(frozen=True)
class LocalSGD(Collecting):
    """Rounds of local steps by everybody, then the weighted mean of where they ended.

        x_{t+1} = x_t - sum_i w_i d_i / sum w_i

    With H = 1 and inner plain SGD it is synchronous SGD.

    Args:
        num_local_steps: H, in a round.
        post: in rounds before this version workers take one step (post-local SGD); 0: H steps from the beginning.

    Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019. Post-local SGD: Lin, Stich, Patel, Jaggi: Don't
    Use Large Mini-Batches, Use Local SGD, ICLR 2020. Deviation: w_i is the number of worker i's loss terms; the
    papers take w_i = 1. The two agree where all workers have as many.
    """

    local_steps: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = parameter(4, at_least=1)
    post: int = parameter(0, at_least=0)

    def join(self, state: Held, worker: int, view: View) -> Reply:
        return Reply(start=(Start(worker, self._steps(view.version)),))

    def who_starts(self, view: View) -> tuple[Start, ...]:
        return tuple([Start(worker, self._steps(view.version + 1)) for worker in view.workers])

    def _steps(self, version: int) -> int:
        return 1 if version < self.post else self.num_local_steps


class Round(Held):
    """The pseudo-gradients of the round, and the outer momentum m, `(P,)`."""

    def __init__(self, momentum: Tensor) -> None:
        super().__init__()
        self.momentum = momentum


@dataclasses.dataclass(frozen=True)
class DiLoCo(Collecting):
    """Rounds of local steps by everybody, then one outer Nesterov step along the mean pseudo-gradient.

        D = sum_i w_i d_i / sum w_i,    m <- beta m + D,    x_{t+1} = x_t - eta_outer (D + beta m)

    eta_outer = 1 and beta = 0 is local SGD.

    Args:
        num_local_steps: H, in a round.
        outer_learning_rate: eta_outer.
        outer_momentum: beta, in [0, 1).

    Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed Low-Communication
    Training of Language Models, 2023, algorithm 1 (inner AdamW, eta_outer 0.7, beta 0.9, H 500). Deviation: w_i as in
    `LocalSGD`.
    """

    name: ClassVar[str] = "diloco"
    local_steps: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = parameter(10, at_least=1)
    outer_learning_rate: float = parameter(0.7, above=0)
    outer_momentum: float = parameter(0.9, at_least=0, below=1)

    def init(self, like: Tensor) -> Round:
        return Round(torch.zeros_like(like))

    def direction(self, state: Round, mean: Tensor) -> Tensor:
        """Update m by the mean, and return eta_outer (D + beta m), in the memory of the mean."""
        beta = self.outer_momentum
        state.momentum.mul_(beta).add_(mean)
        return mean.add_(state.momentum, alpha=beta).mul_(self.outer_learning_rate)

    def who_starts(self, view: View) -> tuple[Start, ...]:
        return tuple([Start(worker, self.num_local_steps) for worker in view.workers])


@dataclasses.dataclass
class Block:
    """What `AsyncLocalSGD` keeps between arrivals."""

    momentum: Tensor
    """`(P,)`, m."""
    total: Tensor
    """`(P,)`, D, the sum of the pseudo-gradients of the current block."""
    arrivals: int
    """In the current block."""
    speeds: dict[int, float]
    """Worker -> v_i, its local steps per second at its last arrival."""


@dataclasses.dataclass(frozen=True)
class AsyncLocalSGD(Rule):
    """Apply every worker's pseudo-gradient at once, with momentum every `period` arrivals only.

        D <- D + d
        every N-th arrival:   m <- beta m + D / N,   x <- x - eta ((1 - c N + c) beta m + d / N),   D <- 0
        the others:           x <- x - eta (c beta m + d / N)

        dynamic local updates (DyLU):
        H_i = max(1, floor(H v_i / max_j v_j)),   v_i = local steps per second of worker i's last arrival

    So the momentum is that of whole blocks of N arrivals (Delayed Nesterov), and workers of unequal speeds return at
    about the same time. N = 1 is an outer Nesterov optimizer on every arrival. With c = 0 and N > 1 a block's
    pseudo-gradients are one Nesterov step on their mean.

    Args:
        num_local_steps: H, of the fastest worker.
        outer_learning_rate: eta.
        outer_momentum: beta, in [0, 1); 0 is asynchronous local SGD without momentum.
        period: N, arrivals in a block; of the order of the number of workers.
        spread: c, in [0, 1/N]: how much of the momentum acts between block ends.
        dynamic: DyLU, local steps in proportion to a worker's speed.

    Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato: Asynchronous Local-SGD Training for Language Modeling,
    2024, algorithms 2 and 3. 1/N is over time, not over loss terms. Deviation: before a worker's first arrival its
    speed is taken for the fastest.
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
        return Block(torch.zeros_like(like), torch.zeros_like(like), 0, {})

    def leave(self, state: Block, worker: int, view: View) -> Reply:
        state.speeds.pop(worker, None)
        return Reply()

    def arrive(self, state: Block, arrival: Arrival, view: View) -> Reply:
        n = self.period
        c = self.spread
        beta = self.outer_momentum
        if arrival.seconds > 0:  # a gradient may take no time on the virtual clock
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
        direction = (arrival.gradient * (eta / n)).add_(state.momentum, alpha=eta * share * beta)
        start = Start(arrival.worker, self._steps(state, arrival.worker))
        return Reply(direction, uses=(arrival.dispatch,), start=(start,))

    def _steps(self, state: Block, worker: int) -> int:
        if not self.dynamic or worker not in state.speeds:
            return self.num_local_steps
        return max(1, math.floor(self.num_local_steps * (state.speeds[worker] / max(state.speeds.values()))))


@dataclasses.dataclass
class Buffer:
    """The sum of the scaled pseudo-gradients since the last step."""

    total: Tensor
    uses: list[int]


@dataclasses.dataclass(frozen=True)
class FedBuff(Rule):
    """Step along the mean of K pseudo-gradients, each scaled by (1 + delay)^-exponent; workers start again at once.

        x_{t+1} = x_t - eta_server * (1/K) sum_{j=1}^{K} s(tau_j) d_j,     s(tau) = (1 + tau)^-exponent

    Args:
        buffer: K, pseudo-gradients in a step.
        num_local_steps: H, steps of the inner optimizer.
        server_learning_rate: eta_server.
        exponent: of the staleness weight; 0 for none. The delay is that at arrival.

    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation,
    AISTATS 2022, algorithm 1. The mean is 1/K, over clients, not over loss terms.
    """

    name: ClassVar[str] = "fedbuff"
    local_steps: ClassVar[bool] = True

    buffer: int = parameter(4, at_least=1)
    num_local_steps: int = parameter(4, at_least=1)
    server_learning_rate: float = parameter(1.0, above=0)
    exponent: float = parameter(0.5, at_least=0)

    def init(self, like: Tensor) -> Buffer:
        return Buffer(torch.zeros_like(like), [])

    def arrive(self, state: Buffer, arrival: Arrival, view: View) -> Reply:
        delay = view.version - arrival.read_version
        factor = self.server_learning_rate * float((1 + delay) ** -self.exponent)
        if not state.uses:  # zeroed here and not right after a step, whose direction is this very tensor
            state.total.zero_()
        state.total.add_(arrival.gradient, alpha=factor / self.buffer)
        state.uses.append(arrival.dispatch)
        start = (Start(arrival.worker, self.num_local_steps),)
        if len(state.uses) < self.buffer:
            return Reply(start=start)
        uses = tuple(state.uses)
        state.uses = []
        return Reply(state.total, uses=uses, start=start)


SinceFetch = dict[int, int]
"""Minibatches since each worker's last fetch."""


@dataclasses.dataclass(frozen=True)
class Downpour(Rule):
    """Apply what a worker pushes; it goes on from its own parameters until its next fetch.

        worker:  y <- y - eta g(y) for n_push minibatches, then push the sum of the steps;
                 y <- x after every n_fetch minibatches
        server:  x <- x - (sum of the steps)

    n_push = n_fetch = 1 with plain SGD is asynchronous SGD.

    Args:
        n_push: minibatches between two pushes.
        n_fetch: minibatches between two fetches, a multiple of `n_push`.

    Dean, Corrado, Monga, Chen, Devin, Le, Mao, Ranzato, Senior, Tucker, Yang, Ng: Large Scale Distributed Deep
    Networks, NeurIPS 2012, section 4.1 and algorithm 7.1 of its appendix. Deviations: the server takes the workers'
    steps as they are, not Adagrad on the accrued gradients; pushes and fetches do not overlap computation.
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

    def arrive(self, state: SinceFetch, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        worker = arrival.worker
        offset = None
        state[worker] = (state[worker] + self.n_push) % self.n_fetch
        if state[worker]:
            # The worker goes on at its own parameters y = start - d. The server's after this step are x - d, so the
            # offset is start - x.
            offset = arrival.start_point - view.parameters
        return Reply(arrival.gradient, uses=(arrival.dispatch,), start=(Start(worker, self.n_push, offset),))


@dataclasses.dataclass(frozen=True)
class EASGD(Rule):
    """Pull the centre and the arriving worker's replica towards each other; the worker goes on from its replica.

        y_i <- H local steps from y_i;   d = alpha (y_i - x);   y_i <- y_i - d,   x <- x + d

    x, the server's parameters, is the centre; d is computed once, from the values before both moves, so the exchange
    conserves y_i + x. alpha = 0 is N independent runs.

    Args:
        alpha: elastic rate, in [0, 1].
        num_local_steps: H between two exchanges.

    Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD, NeurIPS 2015, algorithm 1 (asynchronous; alpha
    = 0.9 / N, H = 10); EAMSGD is the same with a momentum in the inner optimizer. Deviation: the exchange comes after a
    worker's local steps, so the first local step after it takes its gradient at the replica after the pull. The paper's
    algorithm takes that gradient before the pull and applies it after. The published map of stable learning rates and
    alphas is that of the paper's order and does not apply to this rule.
    """

    local_steps: ClassVar[bool] = True
    needs_points: ClassVar[bool] = True

    alpha: float = parameter(0.225, at_least=0, at_most=1)
    num_local_steps: int = parameter(10, at_least=1)

    @property
    def elastic_rate(self) -> float:
        return self.alpha

    def arrive(self, state: None, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        apart = arrival.start_point - arrival.gradient - view.parameters  # y_i - x
        offset = apart * (1.0 - 2.0 * self.alpha)  # (y_i - d) - (x + d)
        start = Start(arrival.worker, self.num_local_steps, offset)
        return Reply(apart.mul_(-self.alpha), uses=(arrival.dispatch,), start=(start,))
