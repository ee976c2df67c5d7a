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
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from analysis.statistics.intervals import Interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Event, Record
from asyncsgd.rules.asynchronous import Asynchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Mode
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential
from reproduction import COLOURS, each, interval, picture, progress, run_script, script_parser, write_table
from watched import Watched

Array = npt.NDArray[np.float64]

WORKERS = (1, 2, 4, 8, 16)
RATE = 0.2
GROUPS = 10
LONG_RUNS = 10


@dataclasses.dataclass(frozen=True)
class MeanArm:
    num_workers: int
    seeds: range


@dataclasses.dataclass(frozen=True)
class StalenessArm:
    num_workers: int
    seed: int
    updates: int


def num_updates(num_workers: int) -> int:
    """Updates that the mean iterate is followed for: some more than the 2 M in which it falls by a factor of e."""
    return 3 * num_workers + 10


def mean_iterate(arm: MeanArm) -> list[float]:
    """The mean over the arm's seeds of x_t, t = 0, 1, ...

    Version t is read by the worker whose gradient made it, so every version but the last ones in flight is seen.
    """
    last = num_updates(arm.num_workers)
    total = np.zeros(last + 1)
    for seed in arm.seeds:
        instance = Watched(Mode().on(arm.num_workers, seed))

        def watch(record: Record, instance: Watched = instance) -> None:
            if isinstance(record, Event) and 0 < record.read_version <= last:
                total[record.read_version] += instance.point

        simulate(
            Asynchronous(),
            instance,
            Exponential().on(arm.num_workers, seed),
            num_workers=arm.num_workers,
            learning_rate=RATE,
            budget=Budget(samples=last + arm.num_workers),
            evaluations=1,
            report=watch,
        )
        total[0] += 1.0  # read by all workers
    return (total / len(arm.seeds)).tolist()


def staleness(arm: StalenessArm) -> list[int]:
    """How often each delay 0, 1, ... occurred, after the first 20 M updates.

    The last M gradients are left out: no other is started then, and their mean staleness is no longer M - 1.
    """
    counts: dict[int, int] = {}
    first = 20 * arm.num_workers

    def watch(record: Record) -> None:
        if isinstance(record, Event) and first < record.version <= first + arm.updates:
            for _, delay in record.uses:
                counts[delay] = counts.get(delay, 0) + 1

    simulate(
        Asynchronous(),
        Mode().on(arm.num_workers, arm.seed),
        Exponential().on(arm.num_workers, arm.seed),
        num_workers=arm.num_workers,
        learning_rate=RATE,
        budget=Budget(samples=first + arm.updates + arm.num_workers),
        evaluations=1,
        report=watch,
    )
    return [counts.get(delay, 0) for delay in range(max(counts) + 1)]


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


def fit_momentum(x: Sequence[float] | Array, rate: float) -> float:
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

    >>> str(jackknife(lambda mean: mean[0], [[1.0], [2.0], [3.0]]))
    '2.00 [-0.484, 4.48]'
    """
    total, number = np.sum(groups, axis=0), len(groups)
    whole = function((total / number).tolist())
    without = [function(((total - group) / (number - 1)).tolist()) for group in groups]
    return interval([number * whole - (number - 1) * one for one in without])


def run(arguments: argparse.Namespace) -> None:
    seeds = arguments.seeds or (1_000 if arguments.quick else 20_000)
    if seeds % GROUPS:
        raise UsageError(f"--seeds must be a multiple of {GROUPS}, the number of groups, got {seeds}")
    updates = 4_000 if arguments.quick else 40_000
    share = seeds // GROUPS
    means: dict[int, list[list[float]]] = {num_workers: [] for num_workers in WORKERS}
    mean_arms = [
        MeanArm(num_workers, range(group * share, (group + 1) * share))
        for num_workers in WORKERS
        for group in range(GROUPS)
    ]
    for mean_arm, mean in zip(mean_arms, each(mean_iterate, mean_arms, arguments.jobs), strict=True):
        means[mean_arm.num_workers].append(mean)
        if len(means[mean_arm.num_workers]) == GROUPS:
            progress(f"mean iterate, M = {mean_arm.num_workers}: {seeds} seeds")
    counts: dict[int, list[list[int]]] = {num_workers: [] for num_workers in WORKERS}
    staleness_arms = [StalenessArm(num_workers, seed, updates) for num_workers in WORKERS for seed in range(LONG_RUNS)]
    for arm, count in zip(staleness_arms, each(staleness, staleness_arms, arguments.jobs), strict=True):
        counts[arm.num_workers].append(count)
        if len(counts[arm.num_workers]) == LONG_RUNS:
            progress(f"staleness, M = {arm.num_workers}: {LONG_RUNS} runs")

    rows: list[list[object]] = []
    for num_workers in WORKERS:
        groups, rate = means[num_workers], RATE / num_workers
        pooled = np.mean(groups, axis=0)
        deviation = np.abs(pooled - expected_iterate(num_workers, len(pooled) - 1)).max()
        alone = functools.partial(fit_momentum, rate=rate)
        both = num_workers > 1
        rows.append(
            [
                num_workers,
                f"{1.0 - 1.0 / num_workers:.4f}",
                jackknife(lambda mean: fit(mean)[0], groups) if both else "-",
                jackknife(alone, groups) if both else f"{abs(alone(pooled)):.4f}",
                f"{rate:.4f}",
                jackknife(lambda mean: fit(mean)[1], groups) if both else "-",
                f"{deviation:.1e}",
            ]
        )
    headings = ["M", "1 - 1/M", "mu fitted", "mu fitted, c known", "a/M", "c fitted", "mean iterate off by"]
    note = (
        f"Mean over {seeds} seeds [95 % interval, jackknife over {GROUPS} groups of them]. Last column: largest"
        " deviation of the mean iterate from its closed recursion. M = 1 has no randomness, and its two coefficients"
        " cannot be told apart."
    )
    print(write_table(arguments.out, "implicit_momentum", headings, rows, note))

    rows = []
    for num_workers in WORKERS:
        shares = shares_of(counts[num_workers])
        mean_delays = [float(own @ np.arange(len(own))) for own in shares]
        law = [geometric(num_workers, delay) for delay in range(shares.shape[1])]
        distance = 0.5 * (np.abs(shares.mean(axis=0) - law).sum() + 1.0 - sum(law))
        row: list[object] = [num_workers, num_workers - 1, interval(mean_delays)]
        for delay in (0, num_workers, 3 * num_workers):
            measured = interval([float(own[delay]) if delay < len(own) else 0.0 for own in shares])
            row += [f"{geometric(num_workers, delay):.5f}", measured]
        rows.append([*row, f"{distance:.5f}"])
    headings = ["M", "M - 1", "mean staleness"]
    for name in ("0", "M", "3M"):
        headings += [f"P(tau = {name})", "measured"]
    headings.append("total variation distance")
    note = f"{LONG_RUNS} runs of {updates} updates each, after the first 20 M; mean over the runs [95 % interval]."
    print(write_table(arguments.out, "implicit_momentum_staleness", headings, rows, note))

    path = arguments.out / "implicit_momentum.png"
    draw(path, means, counts, seeds, updates, quick=arguments.quick)
    print(path)
    for name in ("implicit_momentum", "implicit_momentum_staleness"):
        print(arguments.out / f"{name}.md")


def shares_of(counts: Sequence[Sequence[int]]) -> Array:
    """Each run's share of every delay, `(runs, delays)`.

    >>> shares_of([[1, 1], [3]]).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    longest = max(map(len, counts))
    return np.array([[*one, *[0] * (longest - len(one))] for one in counts]) / np.array([[sum(one)] for one in counts])


def draw(
    path: Path,
    means: dict[int, list[list[float]]],
    counts: dict[int, list[list[int]]],
    seeds: int,
    updates: int,
    *,
    quick: bool,
) -> None:
    """The mean iterate, the momentum in it, and the staleness, each with its law as a line."""
    small_print = (
        f"One mode, a = {RATE}, exponential times. Lines: the laws. Left: mean of {seeds} seeds. Middle: fit to that"
        f" mean, bars: 95 % interval, jackknife over {GROUPS} groups. Right: {LONG_RUNS} runs of {updates} updates."
        + (" Quick: fewer seeds and updates." if quick else "")
    )
    title = "Asynchronous SGD with M exponential workers"
    with picture(path, 3, title=title, small_print=small_print) as (left, middle, right):
        for colour, num_workers in enumerate(WORKERS):
            label, shade = f"M = {num_workers}", COLOURS[colour]
            pooled = np.mean(means[num_workers], axis=0)
            left.plot(expected_iterate(num_workers, len(pooled) - 1), color=shade, linewidth=1)
            every = max(1, len(pooled) // 30)
            left.plot(range(0, len(pooled), every), pooled[::every], "o", color=shade, markersize=3.5, label=label)
            shares = shares_of(counts[num_workers]).mean(axis=0)
            kept = np.flatnonzero(shares * updates * LONG_RUNS >= 10)
            right.plot(kept, shares[kept], "o", color=shade, markersize=3.5, label=label)
            right.plot(kept, [geometric(num_workers, int(delay)) for delay in kept], color=shade, linewidth=1)
        left.axhline(0.0, color="0.7", linewidth=0.8)
        left.set(xlabel="updates", ylabel="mean of x", title="mean iterate")
        left.legend(frameon=False)
        fine = np.linspace(1.0, WORKERS[-1], 200)
        middle.plot(fine, 1.0 - 1.0 / fine, color=COLOURS[7], label="1 - 1/M")
        for place, num_workers in enumerate(WORKERS[1:]):
            fitted = jackknife(lambda mean: fit(mean)[0], means[num_workers])
            middle.errorbar(
                [num_workers],
                [fitted.estimate],
                yerr=[fitted.ends[1] - fitted.estimate],
                fmt="o",
                color=COLOURS[0],
                label="fitted, two coefficients" if place == 0 else None,
            )
        alone = [fit_momentum(np.mean(means[m], axis=0).tolist(), RATE / m) for m in WORKERS]
        middle.plot(WORKERS, alone, "x", color=COLOURS[3], markersize=8, label="fitted, c = a/M known")
        middle.set(xlabel="M, workers", ylabel="momentum of the mean iterate", title="implicit momentum")
        middle.legend(frameon=False, loc="lower right")
        right.set(yscale="log", xlabel="staleness, updates", ylabel="share of the gradients", title="staleness")
        right.legend(frameon=False)


def main(argv: list[str] | None = None) -> int:
    return run_script(run, script_parser(__doc__, "implicit_momentum"), argv)


if __name__ == "__main__":
    sys.exit(main())
