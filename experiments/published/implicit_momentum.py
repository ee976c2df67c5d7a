"""Asynchrony begets momentum: what M asynchronous workers with exponential times do to the mean iterate.

    python experiments/published/implicit_momentum.py

Source: Mitliagkas, Zhang, Hadjis, Re: Asynchrony Begets Momentum, with an Application to Deep Learning, 2016. With
exponential times the mean iterate moves like SGD with momentum mu = 1 - 1/M and learning rate eta / M. The staleness of
a gradient is geometric, P(tau = k) = (1/M) (1 - 1/M)^k.

Set-up: asynchronous SGD on one mode, f(x) = x^2 / 2 from x = 1, without noise, so that all randomness is that of the
times; a = eta * curvature = 0.2; M = 1, 2, 4, 8, 16 workers, times exponential.

1. The mean over many seeds of x_t, for t = 0 to 3 M + 10 updates, is fitted with
       x_{t+1} - x_t = mu (x_t - x_{t-1}) - c x_t,     t >= 1
   by least squares, for both mu and c (expected 1 - 1/M and a/M), and for mu alone with c = a/M. One worker is plain
   SGD, whose x_t - x_{t-1} is proportional to x_t: then only mu alone can be told. The noise of the mean biases both
   towards 0, like 1 / seeds; a jackknife over ten groups of seeds removes that and gives the intervals.
2. The staleness of every applied gradient after the first 20 M updates of a long run, against the geometric law.

``--seeds`` is the number of seeds of part 1. ``--quick``: 1000 seeds instead of 20000, and 4000 updates instead of
40000 for part 2.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from analysis.stats import Interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Event, Record
from asyncsgd.rules import Asynchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Mode
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential
from reproduction import COLOURS, each, interval, picture, run_script, write

WORKERS = (1, 2, 4, 8, 16)
RATE = 0.2
GROUPS = 10
LONG_RUNS = 10


def asynchronous(
    num_workers: int,
    seed: int,
    samples: int,
    report: Callable[[Record], None] | None = None,
    each_version: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Asynchronous SGD from x = 1, watched."""
    simulate(
        Asynchronous(),
        Mode().on(num_workers, seed),
        Exponential().on(num_workers, seed),
        num_workers=num_workers,
        learning_rate=RATE,
        budget=Budget(samples=samples),
        evaluations=1,
        report=report,
        each_version=each_version,
    )


def mean_iterate(task: tuple[int, range]) -> list[float]:
    """The mean over seeds of x_t, t = 0 to 3 M + 10: some more than the 2 M in which it falls by a factor of e."""
    num_workers, seeds = task
    last = 3 * num_workers + 10
    total = np.zeros(last + 1)

    def add(version: int, x: Tensor) -> None:
        if version <= last:
            total[version] += x.item()

    for seed in seeds:
        total[0] += 1.0
        asynchronous(num_workers, seed, last, each_version=add)
    return (total / len(seeds)).tolist()


def staleness(task: tuple[int, int, int]) -> list[int]:
    """How often each delay 0, 1, ... occurred in a number of updates, after the first 20 M.

    The last M gradients are left out: no other is started then, and their mean staleness is no longer M - 1.
    """
    num_workers, seed, updates = task
    counts: collections.Counter[int] = collections.Counter()
    first = 20 * num_workers

    def watch(record: Record) -> None:
        if isinstance(record, Event) and first < record.version <= first + updates:
            counts.update(delay for _, delay in record.uses)

    asynchronous(num_workers, seed, first + updates + num_workers, report=watch)
    return [counts[delay] for delay in range(max(counts) + 1)]


def geometric(num_workers: int, delay: int) -> float:
    """P(tau = delay).

    >>> geometric(1, 0), geometric(2, 1)
    (1.0, 0.25)
    """
    return (1.0 - 1.0 / num_workers) ** delay / num_workers


def fit(x: Sequence[float]) -> tuple[float, float]:
    """Least squares for (mu, c) in x_{t+1} - x_t = mu (x_t - x_{t-1}) - c x_t, t >= 1.

    >>> x = expected_iterate(4, 20)
    >>> [round(value, 9) for value in fit(x)]
    [0.75, 0.05]
    """
    steps = np.diff(x)
    matrix = np.stack([steps[:-1], -np.asarray(x[1:-1])], axis=1)
    momentum, rate = np.linalg.lstsq(matrix, steps[1:])[0]
    return float(momentum), float(rate)


def fit_momentum(x: Sequence[float], rate: float) -> float:
    """Least squares for mu alone, c being known.

    >>> round(fit_momentum(expected_iterate(4, 20), RATE / 4), 9)
    0.75
    """
    steps = np.diff(x)
    return float(steps[:-1] @ (steps[1:] + rate * np.asarray(x[1:-1])) / (steps[:-1] @ steps[:-1]))


def expected_iterate(num_workers: int, updates: int) -> list[float]:
    """E x_t, t = 0 to `updates`, from x_0 = 1 with all workers there.

    With m the mean of the points the workers compute at: x <- x - a m, then m <- (1 - 1/M) m + x / M.

    >>> expected_iterate(1, 2)
    [1.0, 0.8, 0.64]
    """
    x = m = 1.0
    values = [x]
    for _ in range(updates):
        x -= RATE * m
        m += (x - m) / num_workers
        values.append(x)
    return values


def jackknife(function: Callable[[list[float]], float], groups: Sequence[Sequence[float]]) -> Interval:
    """`function` of the mean over `groups`, its bias of first order removed, with the interval of its pseudo-values.

    >>> f"{jackknife(lambda mean: mean[0], [[1.0], [2.0], [3.0]]):.3g}"
    '2 [-0.484, 4.48]'
    """
    total, number = np.sum(groups, axis=0), len(groups)
    whole = function((total / number).tolist())
    without = [function(((total - group) / (number - 1)).tolist()) for group in groups]
    return interval([number * whole - (number - 1) * one for one in without])


def shares_of(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Each run's share of every delay, `(runs, delays)`.

    >>> shares_of([[1, 1], [3]]).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    longest = max(map(len, counts))
    return np.array([[*one, *[0] * (longest - len(one))] for one in counts]) / np.array([[sum(one)] for one in counts])


def momentum(means: dict[int, list[list[float]]], seeds: int, flags: argparse.Namespace) -> None:
    """The first table: the coefficients fitted to the mean iterate."""
    rows = []
    for num_workers, groups in means.items():
        rate, pooled = RATE / num_workers, np.mean(groups, axis=0).tolist()
        deviation = np.abs(np.subtract(pooled, expected_iterate(num_workers, len(pooled) - 1))).max()
        alone = functools.partial(fit_momentum, rate=rate)
        both = num_workers > 1
        row = {
            "M": num_workers,
            "1 - 1/M": f"{1.0 - 1.0 / num_workers:.4f}",
            "mu fitted": jackknife(lambda mean: fit(mean)[0], groups) if both else "-",
            "mu fitted, c known": jackknife(alone, groups) if both else f"{abs(alone(pooled)):.4f}",
            "a/M": f"{rate:.4f}",
            "c fitted": jackknife(lambda mean: fit(mean)[1], groups) if both else "-",
            "mean iterate off by": f"{deviation:.1e}",
        }
        rows.append(row)
    note = (
        f"Mean over {seeds} seeds [95 % interval, jackknife over {GROUPS} groups of them]. Last column: largest"
        " deviation of the mean iterate from its closed recursion. M = 1 has no randomness, and its two coefficients"
        " cannot be told apart."
    )
    write(flags.out, "implicit_momentum", rows, note)


def delays(counts: dict[int, list[list[int]]], updates: int, flags: argparse.Namespace) -> None:
    """The second table: the staleness beside the geometric law."""
    rows = []
    for num_workers, runs in counts.items():
        shares = shares_of(runs)
        law = [geometric(num_workers, delay) for delay in range(shares.shape[1])]
        distance = 0.5 * (np.abs(shares.mean(axis=0) - law).sum() + 1.0 - sum(law))
        row: dict[str, object] = {"M": num_workers, "M - 1": num_workers - 1}
        row["mean staleness"] = interval([float(own @ np.arange(len(own))) for own in shares])
        for name, delay in (("0", 0), ("M", num_workers), ("3M", 3 * num_workers)):
            row[f"P(tau = {name})"] = f"{geometric(num_workers, delay):.5f}"
            row[f"measured, {name}"] = interval([float(own[delay]) if delay < len(own) else 0.0 for own in shares])
        rows.append(row | {"total variation distance": f"{distance:.5f}"})
    note = f"{LONG_RUNS} runs of {updates} updates each, after the first 20 M; mean over the runs [95 % interval]."
    write(flags.out, "implicit_momentum_staleness", rows, note)


def make(flags: argparse.Namespace) -> None:
    seeds = flags.seeds or (1_000 if flags.quick else 20_000)
    if seeds % GROUPS:
        raise UsageError(f"--seeds must be a multiple of {GROUPS}, the number of groups, got {seeds}")
    updates = 4_000 if flags.quick else 40_000
    share = seeds // GROUPS
    groups = [range(group * share, (group + 1) * share) for group in range(GROUPS)]
    found = each(mean_iterate, [(num_workers, group) for num_workers in WORKERS for group in groups], flags.jobs)
    means = {num_workers: [next(found) for _ in groups] for num_workers in WORKERS}
    long_runs = [(num_workers, seed, updates) for num_workers in WORKERS for seed in range(LONG_RUNS)]
    counted = each(staleness, long_runs, flags.jobs)
    counts = {num_workers: [next(counted) for _ in range(LONG_RUNS)] for num_workers in WORKERS}
    momentum(means, seeds, flags)
    delays(counts, updates, flags)

    small_print = (
        f"One mode, a = {RATE}, exponential times. Lines: the laws. Left: mean of {seeds} seeds. Middle: fit to that"
        f" mean, bars: 95 % interval, jackknife over {GROUPS} groups. Right: {LONG_RUNS} runs of {updates} updates."
    )
    title = "Asynchronous SGD with M exponential workers"
    with picture(flags.out / "implicit_momentum.png", 3, title, small_print) as (left, middle, right):
        for colour, num_workers in zip(COLOURS, WORKERS, strict=False):
            dots = {"color": colour, "markersize": 3.5, "label": f"M = {num_workers}"}
            pooled = np.mean(means[num_workers], axis=0).tolist()
            left.plot(expected_iterate(num_workers, len(pooled) - 1), color=colour, linewidth=1)
            left.plot(pooled, "o", markevery=max(1, len(pooled) // 30), **dots)
            shares = shares_of(counts[num_workers]).mean(axis=0)
            kept = np.flatnonzero(shares * updates * LONG_RUNS >= 10)
            right.plot(kept, shares[kept], "o", **dots)
            right.plot(kept, [geometric(num_workers, int(delay)) for delay in kept], color=colour, linewidth=1)
            middle.plot(num_workers, fit_momentum(pooled, RATE / num_workers), "kx", markersize=8)
        fitted = [jackknife(lambda mean: fit(mean)[0], means[num_workers]) for num_workers in WORKERS[1:]]
        errors = [np.nan_to_num(one.high - one.estimate) for one in fitted]
        middle.errorbar(
            WORKERS[1:], [one.estimate for one in fitted], errors, fmt="o", label="fitted, two coefficients"
        )
        fine = np.linspace(1.0, WORKERS[-1], 200)
        middle.plot(fine, 1.0 - 1.0 / fine, color="0.5", label="1 - 1/M")
        middle.plot([], [], "kx", label="fitted, c = a/M known")
        left.set(xlabel="updates", ylabel="mean of x", title="mean iterate")
        middle.set(xlabel="M, workers", ylabel="momentum of the mean iterate", title="implicit momentum")
        right.set(yscale="log", xlabel="staleness, updates", ylabel="share of the gradients", title="staleness")
        for axes in (left, middle, right):
            axes.legend(frameon=False)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, "implicit_momentum", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
