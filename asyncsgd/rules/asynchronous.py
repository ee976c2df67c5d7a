"""Rules that look at a gradient once, when it arrives: it is applied at once, or dropped.

    x_{t+1} = x_t - eta * s * grad f(x_{t - tau}; batch),     tau = `delay`, the updates applied since the read

s is the rule's factor: 1 for `Asynchronous` and `Ringmaster`, and a number of its own for every other rule here. It
acts on the learning rate, not on the gradient: under AdamW a factor on the gradient would cancel. With one worker every
delay is 0. If every gradient is applied, N always-busy workers have a mean delay of N - 1, whatever their speeds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from asyncsgd.rules.contract import Arrival, Reply, Rule, Start, View
from asyncsgd.settings.choices import parameter


@dataclasses.dataclass(frozen=True)
class Asynchronous(Rule):
    """Apply every gradient as it comes and start its worker again.

    s = 1, the asynchronous parameter server of Downpour SGD with n_push = n_fetch = 1 (Dean, Corrado, Monga, Chen,
    Devin, Le, Mao, Ranzato, Senior, Tucker, Yang, Ng: Large Scale Distributed Deep Networks, NeurIPS 2012, section
    4.1). Agarwal and Duchi (NeurIPS 2011) analysed it as delayed SGD. Deviation: the server's optimizer takes the step,
    whichever it is, in place of Adagrad. With one worker the rule *is* the server's optimizer.

    >>> str(Asynchronous())
    'asynchronous'
    """

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), start=(Start(arrival.worker),))


@dataclasses.dataclass(frozen=True)
class Ringmaster(Rule):
    """Apply a gradient if its delay is below `threshold`, drop it otherwise; start its worker again either way.

    `threshold`, R in the paper, interpolates between the fastest worker alone (R = 1) and plain asynchronous SGD (R
    infinite). R = max(1, ceil(sigma^2 / eps)) is time-optimal without knowing the workers' speeds.

    Args:
        threshold: R, 1 or more; the largest applied delay is R - 1.
        stops: after each update, stop every worker whose delay has reached R and start it again. It is the paper's
            word for what k-sync and Rennala call `interrupt`.

    Maranjyan, Tyurin, Richtarik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity, ICML 2025,
    algorithms 4 (without stops) and 5 (with stops). Deviation: with stops, a worker in flight is judged by the version
    when it was dispatched. On real processes it may have read a newer one when it got to it, and is then stopped
    although its delay is still below R. On the virtual clock the two versions are the same.
    """

    threshold: int = parameter(8, at_least=1)
    stops: bool = False

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        if view.version - arrival.read_version >= self.threshold:
            return Reply(drops=(arrival.dispatch,), start=(Start(arrival.worker),))
        if not self.stops:
            return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
        version_after = view.version + 1  # this update counted
        # Workers in flight stand in the order of their dispatches, and so of their versions, the oldest first.
        start = [Start(arrival.worker)]
        abandon = []
        for work in view.in_flight.values():
            if version_after - work.version < self.threshold:
                break
            start.append(Start(work.worker))
            abandon.append(work.dispatch)
        return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), abandon=tuple(abandon), start=tuple(start))


class DelayScaled(Rule):
    """Base: apply every gradient at once, with learning rate eta * `factor`, which is 1 for a fresh gradient."""

    def factor(self, delay: int, view: View) -> float:
        """s(delay), at most 1."""
        raise TypeError(f"{type(self).__name__} does not define factor()")

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        factor = self.factor(view.version - arrival.read_version, view)
        start = (Start(arrival.worker),)
        return Reply(arrival.gradient, learning_rate_factor=factor, uses=(arrival.dispatch,), start=start)


@dataclasses.dataclass(frozen=True)
class StalenessAware(DelayScaled):
    """Apply every gradient at once with learning rate eta / max(1, delay).

    Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016.
    """

    def factor(self, delay: int, view: View) -> float:
        return 1.0 / max(1, delay)


@dataclasses.dataclass(frozen=True)
class DelayAdaptive(DelayScaled):
    """Apply every gradient at once with learning rate eta M / max(M, delay).

    Args:
        concurrency: M; 0 means the workers present at each arrival.

    Mishchenko, Bach, Even, Woodworth: Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays, NeurIPS 2022, as in
    its published code.
    """

    concurrency: int = parameter(0, at_least=0)

    def factor(self, delay: int, view: View) -> float:
        concurrency = self.concurrency or len(view.workers)
        return concurrency / max(concurrency, delay)


@dataclasses.dataclass(frozen=True)
class Koloskova(DelayScaled):
    """Apply every gradient at once; one whose delay exceeds N has a learning rate of at most 1 / (4 L delay).

    N is the number of workers present.

    Args:
        smoothness: L, the largest curvature of the objective.

    Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for Asynchronous SGD, NeurIPS 2022. The factor 4 was not
    compared with the paper; `smoothness` scales it.
    """

    smoothness: float = parameter(1.0, above=0)

    def factor(self, delay: int, view: View) -> float:
        if delay <= len(view.workers) or view.learning_rate <= 0:
            return 1.0
        return min(1.0, 1.0 / (4.0 * self.smoothness * delay * view.learning_rate))


@dataclasses.dataclass(frozen=True)
class Polynomial(DelayScaled):
    """Apply every gradient at once with learning rate eta (1 + delay)^-exponent.

    Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019. Deviation: FedAsync mixes models, x <- (1 - alpha s)
    x + alpha s x_new, where x_new after one local step is x_{t - tau} - eta g. Here no models are mixed: the step along
    g has the learning rate s eta. There is no alpha, whose place the learning rate takes.
    """

    exponent: float = parameter(0.5, at_least=0)
    """0 or more; 0 is asynchronous SGD."""

    def factor(self, delay: int, view: View) -> float:
        return float((1 + delay) ** -self.exponent)


@dataclasses.dataclass(frozen=True)
class Hinge(DelayScaled):
    """Apply every gradient at once with its full learning rate up to delay `allowed`, then falling with `slope`.

    s = 1 / (slope (delay - allowed) + 1); source and deviation are those of `Polynomial`.
    """

    slope: float = parameter(10.0, at_least=0)
    """Per update of delay; 0 or more."""
    allowed: int = parameter(4, at_least=0)
    """The largest delay at the full learning rate, in updates."""

    def factor(self, delay: int, view: View) -> float:
        return 1.0 if delay <= self.allowed else 1.0 / (self.slope * (delay - self.allowed) + 1.0)


MeanSeconds = dict[int, tuple[int, float]]
"""Worker -> (how many gradients have arrived, T_i: the mean of their seconds)."""


@dataclasses.dataclass(frozen=True)
class Rescaled(Rule):
    """Apply every gradient at once with a learning rate in proportion to its worker's mean seconds.

    s = T_i mean_j(1 / T_j), T_i = mean seconds of worker i's gradients. A worker that is twice as slow arrives half as
    often and steps twice as far, so every worker's objective has the same weight per second. Worker i has a share of
    the arrivals in proportion to 1 / T_i, so the mean of the factors over arrivals is 1. Mahran et al., 2026 (arXiv
    2605.13434); the normalisation is ours. Seconds are those recorded in the arrivals, so a replay computes the same
    factors.
    """

    def init(self, like: Tensor) -> MeanSeconds:
        return {}

    def leave(self, state: MeanSeconds, worker: int, view: View) -> Reply:
        state.pop(worker, None)
        return Reply()

    def arrive(self, state: MeanSeconds, arrival: Arrival, view: View) -> Reply:
        factor = 1.0  # it stays so while all gradients of this worker have taken no time
        worker = arrival.worker
        if arrival.seconds > 0:  # a gradient may take no time on the virtual clock, and 1 / 0 is undefined
            number, mean = state.get(worker, (0, 0.0))
            number += 1
            state[worker] = (number, mean + (arrival.seconds - mean) / number)
        if worker in state:
            rates = [1.0 / mean for _, mean in state.values()]
            factor = state[worker][1] * sum(rates) / len(rates)
        start = (Start(worker),)
        return Reply(arrival.gradient, learning_rate_factor=factor, uses=(arrival.dispatch,), start=start)
