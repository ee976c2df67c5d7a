"""Asynchrony begets momentum: what M asynchronous workers with exponential times do to the mean iterate.

Source: Mitliagkas, Zhang, Hadjis, Re: Asynchrony Begets Momentum, with an Application to Deep Learning, 2016. With
exponential times the mean iterate moves like SGD with momentum mu = 1 - 1/M and learning rate eta / M. The staleness of
a gradient is geometric, P(tau = k) = (1/M) (1 - 1/M)^k. Here on one mode without noise, f(x) = x^2 / 2 from x = 1, so
that all randomness is that of the times; a = eta * curvature = 0.2; M = 1, 2, 4, 8, 16.

1. The mean over many seeds of x_t, for t = 0 to 3 M + 10 updates, is fitted by least squares with
   x_{t+1} - x_t = mu (x_t - x_{t-1}) - c x_t, t >= 1, for both mu and c (expected 1 - 1/M and a/M), and for mu alone
   with c = a/M. The noise of the mean biases both towards 0; a jackknife over ten groups of seeds removes that.
2. The staleness of every applied gradient after the first 20 M updates of a long run, against the geometric law.

``--seeds`` is the number of seeds of part 1. ``--quick``: 1000 seeds instead of 20000, and 4000 updates instead of
40000 for part 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas
from scipy import stats

from asyncsgd.core.limits import Limits
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Event, Record
from asyncsgd.rules import Asynchronous
from asyncsgd.simulation.problems import Mode
from asyncsgd.simulation.speeds import Exponential
from reproduction import Arm, Flags, Position, each, interval, main, picture, tidy, write

WORKERS = (1, 2, 4, 8, 16)
RATE = 0.2
GROUPS = 10
LONG_RUNS = 10
LONGEST = 400
"""Delays that are told apart: with 16 workers one in 10^11 gradients is later."""


class Point(Position, Mode):
    """x^2 / 2."""


def asynchronous(num_workers: int, budget: Limits) -> Arm:
    return Arm("", Asynchronous(), RATE, Point().on, Exponential().on, num_workers, budget)


def mean_iterate(num_workers: int, seeds: range) -> list[float]:
    """The mean over seeds of x_t, t = 0 to 3 M + 10: some more than the 2 M in which it falls by a factor of e."""
    arm = asynchronous(num_workers, Limits(3 * num_workers + 10, evaluate_every=1))
    iterates = []
    for seed in seeds:
        looks = arm.simulated(seed).evaluations
        iterates.append([look.loss for look in looks])
    return np.mean(iterates, axis=0).tolist()


def staleness(num_workers: int, seed: int, updates: int) -> np.ndarray:
    """The share of each delay 0, 1, ... among the gradients of a number of updates, after the first 20 M.

    The last M gradients are left out: no other is started then, and their mean staleness is no longer M - 1.
    """
    delays = list[int]()
    first = 20 * num_workers

    def watch(record: Record) -> None:
        if isinstance(record, Event) and first < record.version <= first + updates:
            delays.extend(delay for _, delay in record.uses)

    budget = Limits(first + updates + num_workers)
    asynchronous(num_workers, budget).simulated(seed, report=watch)
    return np.bincount(delays, minlength=LONGEST) / len(delays)


class Fit(NamedTuple):
    momentum: float
    rate: float


def fit(x: Sequence[float], rate: float | None = None) -> Fit:
    """Least squares for (mu, c) in x_{t+1} - x_t = mu (x_t - x_{t-1}) - c x_t, t >= 1; for mu alone if c is known.

    >>> [round(value, 9) for value in fit(expected_iterate(4, 20))]
    [0.75, 0.05]
    """
    steps = np.diff(x)
    before = steps[:-1]
    after = steps[1:]
    here = np.asarray(x[1:-1])
    if rate is not None:
        momentum = before @ (after + rate * here) / (before @ before)
        return Fit(float(momentum), rate)
    columns = np.stack([before, -here], axis=1)
    solution, *_ = np.linalg.lstsq(columns, after)
    return Fit(*solution.tolist())


def expected_iterate(num_workers: int, updates: int) -> list[float]:
    """E x_t, t = 0 to `updates`, from x_0 = 1 with all workers there.

    With m the mean of the points the workers compute at: x <- x - a m, then m <- (1 - 1/M) m + x / M.

    >>> expected_iterate(1, 2)
    [1.0, 0.8, 0.64]
    """
    x = 1.0
    m = 1.0
    values = [x]
    for _ in range(updates):
        x -= RATE * m
        m += (x - m) / num_workers
        values.append(x)
    return values


def pseudo_values(function: Callable[[list[float]], float], groups: Sequence[Sequence[float]]) -> list[float]:
    """The jackknife: the values' mean is `function` of the mean over `groups`, its bias of first order removed.

    >>> f"{interval(pseudo_values(lambda mean: mean[0], [[1.0], [2.0], [3.0]])):.3g}"
    '2 [-0.484, 4.48]'
    """
    total = np.sum(groups, axis=0)
    number = len(groups)
    whole = function((total / number).tolist())
    values = []
    for group in groups:
        mean = (total - group) / (number - 1)
        without = function(mean.tolist())
        values.append(number * whole - (number - 1) * without)
    return values


def momentum_row(num_workers: int, groups: Sequence[Sequence[float]]) -> dict[str, object]:
    """A row of the first table: the coefficients fitted to the mean iterate.

    One worker is plain SGD, whose x_t - x_{t-1} is proportional to x_t: then only mu alone can be told.
    """
    rate = RATE / num_workers
    pooled = np.mean(groups, axis=0).tolist()
    expected = expected_iterate(num_workers, len(pooled) - 1)
    deviation = np.abs(np.subtract(pooled, expected)).max()

    momentum: object = "-"
    momentum_alone: object = f"{abs(fit(pooled, rate).momentum):.4f}"
    rate_fitted: object = "-"
    if num_workers > 1:
        momentum = interval(pseudo_values(lambda x: fit(x).momentum, groups))
        momentum_alone = interval(pseudo_values(lambda x: fit(x, rate).momentum, groups))
        rate_fitted = interval(pseudo_values(lambda x: fit(x).rate, groups))
    return {
        "M": num_workers,
        "1 - 1/M": f"{1.0 - 1.0 / num_workers:.4f}",
        "mu fitted": momentum,
        "mu fitted, c known": momentum_alone,
        "a/M": f"{rate:.4f}",
        "c fitted": rate_fitted,
        "mean iterate off by": f"{deviation:.1e}",
    }


def delay_row(num_workers: int, shares: np.ndarray) -> dict[str, object]:
    """A row of the second table: each run's share of every delay, `(runs, delays)`, beside the geometric law."""
    delays = np.arange(shares.shape[1])
    geometric = stats.geom(1 / num_workers, loc=-1).pmf
    law = geometric(delays)
    row: dict[str, object] = {"M": num_workers, "M - 1": num_workers - 1, "mean staleness": interval(shares @ delays)}
    for name, delay in {"0": 0, "M": num_workers, "3M": 3 * num_workers}.items():
        row[f"P(tau = {name})"] = f"{law[delay]:.5f}"
        row[f"measured, {name}"] = interval(shares[:, delay])
    differences = np.abs(shares.mean(axis=0) - law)
    beyond = 1.0 - sum(law)
    distance = 0.5 * (differences.sum() + beyond)
    row["total variation distance"] = f"{distance:.5f}"
    return row


def make(flags: Flags) -> None:
    seeds = flags.seeds or (1_000 if flags.quick else 20_000)
    if seeds % GROUPS:
        raise UsageError(f"--seeds must be a multiple of {GROUPS}, the number of groups, got {seeds}")
    updates = 4_000 if flags.quick else 40_000
    share = seeds // GROUPS
    groups = [range(group * share, (group + 1) * share) for group in range(GROUPS)]
    short_runs = itertools.product(WORKERS, groups)
    iterates = each(mean_iterate, list(short_runs), flags.jobs)
    means = {num_workers: list(itertools.islice(iterates, GROUPS)) for num_workers in WORKERS}
    long_runs = itertools.product(WORKERS, range(LONG_RUNS), [updates])
    counted = each(staleness, list(long_runs), flags.jobs)
    shares = {num_workers: np.array(list(itertools.islice(counted, LONG_RUNS))) for num_workers in WORKERS}
    note = (
        f"Mean over {seeds} seeds [95 % interval, jackknife over {GROUPS} groups of them]. Last column: largest"
        " deviation of the mean iterate from its closed recursion. M = 1 has no randomness, and its two coefficients"
        " cannot be told apart."
    )
    rows = [momentum_row(*item) for item in means.items()]
    write(flags.out, "implicit_momentum", rows, note)
    note = f"{LONG_RUNS} runs of {updates} updates each, after the first 20 M; mean over the runs [95 % interval]."
    rows = [delay_row(*item) for item in shares.items()]
    write(flags.out, "implicit_momentum_staleness", rows, note)

    drawn = []
    for M in WORKERS:
        arm = f"M = {M}"
        expected = expected_iterate(M, 3 * M + 10)
        drawn.append(tidy("mean iterate", arm, "law", [expected]))
        drawn.append(tidy("mean iterate", arm, "measured", means[M]))
        delays = range(6 * M)  # beyond, a share is of a few gradients
        law = stats.geom(1 / M, loc=-1).pmf(delays)
        drawn.append(tidy("staleness", arm, "law", [law]))
        drawn.append(tidy("staleness", arm, "measured", shares[M][:, delays]))
        drawn.append(tidy("momentum", "fitted", "law", [{M: 1 - 1 / M}]))
        momenta = pseudo_values(lambda x: fit(x).momentum, means[M]) if M > 1 else []
        drawn.append(tidy("momentum", "fitted", "measured", [{M: momentum} for momentum in momenta]))
    axes = {
        "mean iterate": {"xlabel": "updates", "ylabel": "mean of x"},
        "staleness": {"xlabel": "staleness, updates", "ylabel": "share of the gradients", "yscale": "log"},
        "momentum": {"xlabel": "M, workers", "ylabel": "momentum of the mean iterate"},
    }
    picture(flags.out / "implicit_momentum.png", pandas.concat(drawn), note, axes, x="x", y="y", style="kind")


if __name__ == "__main__":
    main(make, "implicit_momentum", __doc__)
