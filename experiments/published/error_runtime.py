"""Error against runtime for K-sync, K-async and K-batch-async: the trade-off of Dutta et al.

    python experiments/published/error_runtime.py

Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD, AISTATS 2018 (times per update) and 2021 (error floors).

Set-up: P = 8 workers whose gradients take Exp(1) or 1 + Exp(1) virtual seconds. K = 1, 2, 4, 8. One learning rate for
all, 0.12 as in the paper's CIFAR experiment. In place of the network there is a strongly convex quadratic, because
there the floors are exact. It has 100 modes of curvature 0.1 to 1, with independent normal noise in each coordinate of
a gradient. `sync` and `async` are the rules of their own; they equal K-sync with K = 8 and K-async with K = 1.

Measured: virtual seconds per update, beside the paper's closed forms; the mean excess error over the last half of
the run, beside the exact floor,

    K-sync                 sum over modes of  eta sigma^2 / (2 K (2 - a)),       a = eta * curvature
    K-async, exponential   the stationary second moments of server and workers, a system of two linear equations
    async, exponential     its case K = 1:    eta sigma^2 (1 + P a) / (2 (2 + a - P a^2))
    K-batch-async, exp.    the same moments carried from arrival to arrival until they stand still

and the picture of error against virtual seconds: which K is lowest when. Where there is no closed form, "-".

``--quick``: 300 virtual seconds instead of 3000, 3 seeds; the floors are then not reached by every method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import pandas

from asyncsgd.rules import Asynchronous, KAsync, KBatchAsync, KSync, Rule, Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.speeds import Exponential, ShiftedExponential
from reproduction import Arm, draw, interval, picture, run, run_script, write

NUM_WORKERS = 8
QUORUMS = (1, 2, 4, 8)
LEARNING_RATE = 0.12
PROBLEM = Quadratic(dimension=100, curvature=1.0, condition=10.0, noise=0.1)
SPEEDS = {"exponential": Exponential(mean=1.0), "shifted_exponential": ShiftedExponential(shift=1.0, mean=1.0)}
SECONDS, QUICK_SECONDS = 3000, 300
EVALUATIONS = 600

METHODS: dict[tuple[str, int], Rule] = {
    **{("K-sync", quorum): KSync(quorum) for quorum in QUORUMS},
    **{("K-async", quorum): KAsync(quorum) for quorum in QUORUMS},
    **{("K-batch-async", quorum): KBatchAsync(quorum) for quorum in QUORUMS},
    ("sync", NUM_WORKERS): Synchronous(),
    ("async", 1): Asynchronous(),
}


def order_statistic(number: int, rank: int) -> float:
    """Expected value of the `rank`-th smallest of `number` exponential times of mean 1.

    >>> order_statistic(2, 1), order_statistic(2, 2)
    (0.5, 1.5)
    """
    return sum(1.0 / left for left in range(number - rank + 1, number + 1))


def seconds_per_update(family: str, quorum: int, shift: float) -> float | None:
    """The expected time of an update; None where there is only a bound.

    For K-async the waiting times of a renewal, exact for exponential times by their want of memory; for shifted ones
    an upper bound only, attained at K = P.
    """
    if family in ("K-batch-async", "async"):
        return quorum * (shift + 1.0) / NUM_WORKERS
    if family == "K-async" and shift > 0.0 and 1 < quorum < NUM_WORKERS:
        return None
    if family == "K-async" and quorum == 1:
        return (shift + 1.0) / NUM_WORKERS
    return shift + order_statistic(NUM_WORKERS, quorum)


def synchronous_floor(spectrum: Sequence[float], eta: float, noise: float, quorum: int) -> float:
    """Stationary excess of SGD with the mean of `quorum` gradients at the current point.

    >>> round(synchronous_floor([1.0], 1.0, 2.0, quorum=2), 12)
    1.0
    """
    return sum(eta * noise**2 / (2.0 * quorum * (2.0 - eta * curvature)) for curvature in spectrum)


def k_async_floor(spectrum: Sequence[float], eta: float, noise: float, num_workers: int, quorum: int) -> float:
    """Stationary excess of K-async with exponential times: at each update K of P workers, drawn without replacement.

    With x the server's coordinate, X_i the workers' and s = eta^2 sigma^2, the stationary second moments
    A = E x^2 = E X_i^2, B = E x X_i and D = E X_i X_j obey

        A = A - 2 a B + (a^2 / K) (A + (K - 1) D) + s / K
        B = q A + (1 - q) (B - a D)                                                     q = K / P
        D = p_2 A + p_1 (B - a D) + p_0 D       p_2, p_1, p_0: both, one, none of two workers among the K

    >>> round(k_async_floor([0.5], 0.2, 1.0, 2, 2) / synchronous_floor([0.5], 0.2, 1.0, 2), 12)
    1.0
    """
    total = 0.0
    pairs = num_workers * (num_workers - 1)
    share = quorum / num_workers
    both = quorum * (quorum - 1) / pairs
    one = 2 * quorum * (num_workers - quorum) / pairs
    for curvature in spectrum:
        a, source = eta * curvature, (eta * noise) ** 2 / quorum
        matrix = np.array(
            [
                [-(a**2) / quorum, 2.0 * a, -(a**2) * (quorum - 1) / quorum],
                [-share, share, (1.0 - share) * a],
                [-both, -one, one * a + both + one],
            ]
        )
        total += curvature / 2.0 * float(np.linalg.solve(matrix, [source, 0.0, 0.0])[0])
    return total


def k_batch_async_floor(
    spectrum: Sequence[float], eta: float, noise: float, num_workers: int, batch: int, updates: int = 3000
) -> float:
    """Excess of K-batch-async with exponential times after `updates`: each gradient is of a worker drawn anew.

    S is the sum of the X_i that arrived since the last update. The second moments of x, of the workers' X_i and of S
    are carried from arrival to arrival, for all modes at once. With `batch` 1 this is asynchronous SGD.

    >>> one = k_async_floor([0.5], 0.2, 1.0, 8, 1)
    >>> abs(k_batch_async_floor([0.5], 0.2, 1.0, 8, 1) / one - 1) < 1e-12
    True
    """
    curvature = np.array(spectrum)
    step, source = eta * curvature / batch, (eta * noise) ** 2 / batch
    own, others = 1.0 / num_workers, 1.0 - 1.0 / num_workers
    xx, x_worker, worker_worker, pair = np.zeros((4, len(curvature)))
    for _ in range(updates):
        sum_x, sum_worker, sum_sum = np.zeros((3, len(curvature)))
        for arrived in range(1, batch + 1):
            sum_sum += 2.0 * sum_worker + worker_worker
            sum_x += x_worker
            sum_other = sum_worker + pair  # S with this gradient, times a worker that did not bring it
            if arrived < batch:
                start, start_worker, sum_start = xx, x_worker, sum_x  # it starts again at x
            else:
                start = xx - 2.0 * step * sum_x + step**2 * sum_sum + source  # or at the new x
                start_worker, sum_start = x_worker - step * sum_other, np.zeros(len(curvature))
            pair = 2.0 * own * start_worker + (1.0 - 2.0 * own) * pair
            worker_worker = own * start + others * worker_worker
            x_worker = own * start + others * start_worker
            sum_worker = own * sum_start + others * sum_other
            xx = start
    return float(curvature @ xx) / 2.0


def floor(family: str, quorum: int, times: str) -> float | None:
    """The exact stationary excess error, or None where it is not known."""
    spectrum = np.geomspace(PROBLEM.curvature / PROBLEM.condition, PROBLEM.curvature, PROBLEM.dimension).tolist()
    if family in ("K-sync", "sync") or (family == "K-async" and quorum == NUM_WORKERS):
        return synchronous_floor(spectrum, LEARNING_RATE, PROBLEM.noise, quorum)
    if times != "exponential":
        return None
    exact = k_batch_async_floor if family == "K-batch-async" else k_async_floor
    return exact(spectrum, LEARNING_RATE, PROBLEM.noise, NUM_WORKERS, quorum)


def arms(times: str, seconds: float) -> list[Arm]:
    return [
        Arm(
            f"K = {quorum}",
            rule,
            LEARNING_RATE,
            PROBLEM.on,
            SPEEDS[times].on,
            NUM_WORKERS,
            Budget(seconds=seconds),
            EVALUATIONS,
            family,
        )
        for (family, quorum), rule in METHODS.items()
    ]


def table(times: str, curves: pandas.DataFrame, seconds: float) -> list[dict[str, object]]:
    """A row for each method under these times, beside the closed forms."""

    def known(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows: list[dict[str, object]] = []
    for family, quorum in METHODS:
        own = curves[(curves.panel == family) & (curves.arm == f"K = {quorum}")].groupby("seed")
        error = interval([float(np.mean(losses[EVALUATIONS // 2 :])) for _, losses in own.loss])
        synchronous = floor("K-sync", quorum, times)
        assert synchronous is not None
        row = {
            "times": times,
            "method": family,
            "K": quorum,
            "seconds per update": interval((seconds / own.updates.max()).tolist()),
            "closed form": known(seconds_per_update(family, quorum, getattr(SPEEDS[times], "shift", 0.0))),
            "error, last half": error,
            "exact floor": known(floor(family, quorum, times)),
            "error / K-sync's floor": f"{error.estimate / synchronous:.3f}",
        }
        rows.append(row)
    return rows


def make(flags: argparse.Namespace) -> None:
    seconds, seeds = (QUICK_SECONDS, flags.seeds or 3) if flags.quick else (SECONDS, flags.seeds or 10)
    rows: list[dict[str, object]] = []
    small_print = (
        f"P = {NUM_WORKERS} workers, quadratic with {PROBLEM.dimension} modes, learning rate {LEARNING_RATE}; mean of"
        f" {seeds} seeds, {seconds} s; band: 95 % interval, from 3 seeds on. K-sync with K = 8 is sync, K-async with"
        " K = 1 async."
    )
    shown = {round(look) for look in np.geomspace(1, EVALUATIONS, 80)}  # evenly spaced on the logarithmic axis
    for times in SPEEDS:
        curves = run(arms(times, seconds), range(seeds), flags.jobs)
        rows += table(times, curves, seconds)
        kept = curves[curves["look"].isin(shown)]
        path = flags.out / f"error_runtime_{times}.png"
        with picture(path, 3, f"Error against virtual time, {SPEEDS[times]}", small_print) as panels:
            for axes, family in zip(panels, ("K-sync", "K-async", "K-batch-async"), strict=True):
                labels = {"xlabel": "virtual seconds", "ylabel": "excess error f(x) - f*", "title": family}
                bottom = kept.loss.min() / 2
                draw(axes, kept[kept.panel == family], "seconds", xscale="log", yscale="log", **labels)
                axes.set_ylim(bottom=bottom)
    note = (
        f"P = {NUM_WORKERS}; mean over {seeds} seeds [95 % interval]; virtual seconds. Error: f - f*, mean over the"
        f" last half of {seconds} virtual seconds; the last column divides it by eta sigma^2 / (2 K (2 - a)), summed"
        " over the modes."
    )
    write(flags.out, "error_runtime", rows, note)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, "error_runtime", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
