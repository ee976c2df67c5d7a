"""Rules that correct a stale gradient, or keep a momentum that survives delays; every gradient is applied at once."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from asyncsgd.rules.contract import Arrival, Reply, Rule, Start, View
from asyncsgd.settings.choices import parameter

EPSILON = 1e-7
"""Added to the mean square in the adaptive form of `DCASGD`, so that its root is not 0."""
TINY = 1e-20
"""Added to the mean step in `GapAware`, so that an element which no step has moved has the gap 0 and not 0 / 0."""


@dataclasses.dataclass(frozen=True)
class DCASGD(Rule):
    """Apply every gradient at once, compensated for how far the parameters have moved since its read.

    A first-order Taylor correction with g * g in place of the Hessian; all products element by element:

        x_{t+1} = x_t - eta * (g + lambda g * g * (x_t - x_r)),     g = grad f(x_r; batch)

        constant:  lambda = lambda_0
        adaptive:  lambda = lambda_0 / sqrt(MS + 1e-7),   MS <- m MS + (1 - m) g * g

    With the exact Hessian in place of lambda g * g the correction undoes the delay on any quadratic.

    Args:
        compensation: lambda_0; 0 is asynchronous SGD. The default is for the constant form; with `adaptive` type
            compensation=2.
        adaptive: divide by the root of the running mean square.
        decay: m of the mean square.

    Zheng, Meng, Wang, Chen, Yu, Ma, Liu: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017,
    with the constants of a public port: lambda_0 = 0.04 constant, 2 adaptive, m = 0.95.
    """

    name: ClassVar[str] = "dc_asgd"
    needs_points: ClassVar[bool] = True

    compensation: float = parameter(0.04, at_least=0)
    adaptive: bool = False
    decay: float = parameter(0.95, at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.adaptive and self.decay != DCASGD.decay:
            raise ValueError("decay is that of the adaptive form; add adaptive=true, or leave it out")

    def init(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)  # MS

    def arrive(self, state: Tensor, arrival: Arrival, view: View) -> Reply:
        assert arrival.start_point is not None
        gradient = arrival.gradient
        moved = view.parameters - arrival.start_point
        square = gradient * gradient
        curvature = square * self.compensation
        if self.adaptive:
            state.mul_(self.decay).add_(square, alpha=1.0 - self.decay)
            curvature.div_((state + EPSILON).sqrt_())
        corrected = torch.addcmul(gradient, curvature, moved)
        return Reply(corrected, uses=(arrival.dispatch,), start=(Start(arrival.worker),))


@dataclasses.dataclass
class StepSizes:
    """The running mean square of the steps, and where the latest one began."""

    mean_square: Tensor
    """`(P,)`, of each element."""
    share: float = 0.0
    """1 - decay^steps: how much of a mean `mean_square` is so far."""
    before: Tensor | None = None
    """The parameters at the latest arrival, so before its step; None before the first."""


@dataclasses.dataclass(frozen=True)
class GapAware(Rule):
    """Apply every gradient at once, divided element by element by one plus its gap in average steps.

        x_{t+1} = step(x_t, g / (1 + |x_t - x_r| / C)),    C = sqrt(mean of (x_{s+1} - x_s)^2 over the steps so far)

    all element by element. C is what one step really moves an element, whatever the optimizer, so the penalty is 1 +
    the number of average steps since the read. The mean is an exponential one without its bias towards the start.

    Args:
        decay: of the mean square, in [0, 1).

    Barkai, Hakimi, Schuster: Gap-Aware Mitigation of Gradient Staleness, ICLR 2020, in the form that a public port
    (github.com/saareliad/FTPipe) gives it for AdamW. The rule has no momentum of its own: the server's optimizer takes
    the step, with its own momentum if it has one. Deviations: C is measured in the same way under every optimizer;
    under SGD the paper derives it from the learning rate and the momentum buffer. The mean is corrected for its bias.
    Weight decay counts as part of a step and is not divided itself; the port divides it too. The first gradient has no
    gap: no step was measured before it.
    """

    needs_points: ClassVar[bool] = True

    decay: float = parameter(0.999, at_least=0, below=1)

    def init(self, like: Tensor) -> StepSizes:
        return StepSizes(torch.zeros_like(like))

    def arrive(self, state: StepSizes, arrival: Arrival, view: View) -> Reply:
        direction = arrival.gradient
        before = state.before
        if before is None:
            state.before = view.parameters.clone()
        else:
            assert arrival.start_point is not None
            step = view.parameters - before
            state.mean_square.mul_(self.decay).addcmul_(step, step, value=1.0 - self.decay)
            state.share = self.decay * state.share + (1.0 - self.decay)
            before.copy_(view.parameters)
            average = (state.mean_square / state.share).sqrt_().add_(TINY)
            gap = (view.parameters - arrival.start_point).abs_().div_(average)  # in average steps
            direction = direction / gap.add_(1.0)
        return Reply(direction, uses=(arrival.dispatch,), start=(Start(arrival.worker),))


@dataclasses.dataclass
class Momenta:
    """The momenta v_i of the workers present, and their sum."""

    of: dict[int, Tensor]
    total: Tensor


@dataclasses.dataclass(frozen=True)
class DANA(Rule):
    """Step along the arriving worker's own momentum and start it at the predicted parameters.

        v_i <- beta v_i + g_i,    x <- x - eta v_i,    worker i starts again at  x - eta beta sum_j v_j

    With one worker this is Nesterov's method in its classic form (x and the look-ahead point apart).

    Args:
        momentum: beta, in [0, 1).

    Hakimi, Barkai, Gabel, Schuster: Taming Momentum in a Distributed Asynchronous Environment, 2019 (DANA-Zero).
    """

    needs_plain_sgd: ClassVar[bool] = True
    hears_of_empty: ClassVar[bool] = True

    momentum: float = parameter(0.9, at_least=0, below=1)

    def init(self, like: Tensor) -> Momenta:
        return Momenta({}, torch.zeros_like(like))

    def join(self, state: Momenta, worker: int, view: View) -> Reply:
        state.of[worker] = torch.zeros_like(state.total)
        return Reply(start=(self._ahead(state, worker, view),))

    def leave(self, state: Momenta, worker: int, view: View) -> Reply:
        state.total.sub_(state.of.pop(worker))
        if not state.of:
            state.total.zero_()  # no rounding left over
        return Reply()

    def arrive(self, state: Momenta, arrival: Arrival, view: View) -> Reply:
        if not arrival.weight:  # the server itself would start the worker again without the look-ahead
            return Reply(drops=(arrival.dispatch,), start=(self._ahead(state, arrival.worker, view),))
        beta = self.momentum
        momentum = state.of[arrival.worker]
        # The sum grows by what v_i grows by, which is (beta - 1) v_i + g_i.
        state.total.add_(momentum, alpha=beta - 1.0).add_(arrival.gradient)
        momentum.mul_(beta).add_(arrival.gradient)
        return Reply(momentum, uses=(arrival.dispatch,), start=(self._ahead(state, arrival.worker, view),))

    def _ahead(self, state: Momenta, worker: int, view: View) -> Start:
        """Start `worker` at the predicted parameters, x - eta beta sum_j v_j."""
        if self.momentum == 0:
            return Start(worker)
        return Start(worker, offset=state.total * (-view.learning_rate * self.momentum))


@dataclasses.dataclass
class Ordered:
    """u, K, and the current group."""

    momentum: Tensor
    """u, `(P,)`."""
    size: int
    """K, the size of a group; 0 until the first arrival if it is the number of workers."""
    group: int = 0
    """c, the number of the current group."""


@dataclasses.dataclass(frozen=True)
class OrMo(Rule):
    """Apply every gradient at once, with the momentum it would have had in the order of starts.

    Gradients are grouped by the version k at which they started: group 0 has version 0, group 1 the versions 1 to K,
    group 2 the next K, so version k is in group ceil(k / K). When the current group c = ceil(t / K) advances, x <- x -
    eta beta u, u <- beta u. A gradient that arrives D = c - ceil(k / K) groups late gets the weight that it would have
    by now, had it been in u since its own group:

        u <- u + beta^D g,    x <- x - eta (1 - beta^(D+1)) / (1 - beta) g

    Once every gradient in flight has arrived, (x, u) is what momentum SGD on the sums of the groups, in order, would
    have.

    Args:
        momentum: beta, in [0, 1).
        group: K; 0 means the number of workers present at the first arrival.

    Shi, Yang, Li: Ordered Momentum for Asynchronous SGD, NeurIPS 2024 (reconstructed; the identity above is what the
    tests check). Deviation: u does not contain the learning rate, as in torch.optim.SGD; at a constant one it makes no
    difference.
    """

    name: ClassVar[str] = "ormo"
    needs_plain_sgd: ClassVar[bool] = True
    exact_start: ClassVar[bool] = True

    momentum: float = parameter(0.9, at_least=0, below=1)
    group: int = parameter(0, at_least=0)

    def init(self, like: Tensor) -> Ordered:
        return Ordered(torch.zeros_like(like), self.group)

    def arrive(self, state: Ordered, arrival: Arrival, view: View) -> Reply:
        beta = self.momentum
        u = state.momentum
        if not state.size:
            state.size = len(view.workers)
        size = state.size
        current = math.ceil(view.version / size)
        direction = torch.zeros_like(u)
        if current > state.group:
            state.group = current
            u.mul_(beta)
            direction.copy_(u)
        late = current - math.ceil(arrival.read_version / size)
        u.add_(arrival.gradient, alpha=beta**late)
        direction.add_(arrival.gradient, alpha=(1.0 - beta ** (late + 1)) / (1.0 - beta))
        return Reply(direction, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
