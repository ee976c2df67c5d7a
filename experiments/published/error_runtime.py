"""Error against runtime for K-sync, K-async and K-batch-async: the trade-off of Dutta et al.

Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD, AISTATS 2018 (times per update) and 2021 (error floors). P = 8 workers whose gradients take Exp(1) or
1 + Exp(1) virtual seconds, K = 1, 2, 4, 8, learning rate 0.12 as in the paper's CIFAR experiment.

Deviation: in place of the network a quadratic with 100 modes of curvature 0.1 to 1 and independent normal noise in each
coordinate, because there the floors are exact. `sync` and `async` equal K-sync with K = 8 and K-async with K = 1.

Measured: virtual seconds per update, beside the paper's closed forms; the mean excess error over the last half of
the run, beside the exact floor ("-" where none is known),

    K-sync                 sum over modes of  eta sigma^2 / (2 K (2 - a)),       a = eta * curvature
    K-async, exponential   the stationary second moments of server and workers, a system of two linear equations
    async, exponential     its case K = 1:    eta sigma^2 (1 + P a) / (2 (2 + a - P a^2))
    K-batch-async, exp.    the same moments carried from arrival to arrival until they stand still

``--quick``: 300 virtual seconds instead of 3000, 3 seeds; the floors are then not reached by every method.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import pandas

from asyncsgd.rules import Asynchronous, KAsync, KBatchAsync, KSync, Rule, Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.speeds import Exponential, ShiftedExponential
from reproduction import Arm, interval, main, of, picture, run, write

NUM_WORKERS = 8
QUORUMS = (1, 2, 4, 8)
LEARNING_RATE = 0.12
SPEEDS = {"exponential": Exponential(mean=1.0), "shifted_exponential": ShiftedExponential(shift=1.0, mean=1.0)}
SECONDS, QUICK_SECONDS, EVALUATIONS = 3000, 300, 600
FAMILIES: dict[str, type[KSync | KAsync | KBatchAsync]]
FAMILIES = {"K-sync": KSync, "K-async": KAsync, "K-batch-async": KBatchAsync}
METHODS: dict[tuple[str, int], Rule] = {
    **{(family, quorum): rule(quorum) for family, rule in FAMILIES.items() for quorum in QUORUMS},
    ("sync", NUM_WORKERS): Synchronous(),
    ("async", 1): Asynchronous(),
}


def quadratic(noise: float) -> Quadratic:
    return Quadratic(dimension=100, curvature=1.0, condition=10.0, noise=noise)


NOISE = 0.1
SPECTRUM = np.geomspace(0.1, 1.0, 100)
"""Curvatures of `quadratic`."""


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
    if family in ("K-batch-async", "async") or (family == "K-async" and quorum == 1):
        return quorum * (shift + 1.0) / NUM_WORKERS
    if family == "K-async" and shift > 0.0 and quorum < NUM_WORKERS:
        return None
    return shift + order_statistic(NUM_WORKERS, quorum)


def synchronous_floor(spectrum: np.ndarray, eta: float, noise: float, quorum: int) -> float:
    """Stationary excess of SGD with the mean of `quorum` gradients at the current point.

    >>> round(synchronous_floor(np.ones(1), 1.0, 2.0, quorum=2), 12)
    1.0
    """
    return float(np.sum(eta * noise**2 / (2.0 * quorum * (2.0 - eta * spectrum))))


def k_async_floor(spectrum: np.ndarray, eta: float, noise: float, num_workers: int, quorum: int) -> float:
    """Stationary excess of K-async with exponential times: at each update K of P workers, drawn without replacement.

    With x the server's coordinate, X_i the workers' and s = eta^2 sigma^2, the stationary second moments
    A = E x^2 = E X_i^2, B = E x X_i and D = E X_i X_j obey

        A = A - 2 a B + (a^2 / K) (A + (K - 1) D) + s / K
        B = q A + (1 - q) (B - a D)                                                     q = K / P
        D = p_2 A + p_1 (B - a D) + p_0 D       p_2, p_1, p_0: both, one, none of two workers among the K

    >>> round(k_async_floor(np.array([0.5]), 0.2, 1.0, 2, 2) / synchronous_floor(np.array([0.5]), 0.2, 1.0, 2), 12)
    1.0
    """
    pairs, share = num_workers * (num_workers - 1), quorum / num_workers
    both, one = quorum * (quorum - 1) / pairs, 2 * quorum * (num_workers - quorum) / pairs
    total = 0.0
    for curvature in spectrum:
        a = eta * curvature
        moments = [
            [-(a**2) / quorum, 2.0 * a, -(a**2) * (quorum - 1) / quorum],
            [-share, share, (1.0 - share) * a],
            [-both, -one, one * a + both + one],
        ]
        total += curvature / 2.0 * np.linalg.solve(moments, [(eta * noise) ** 2 / quorum, 0.0, 0.0])[0]
    return float(total)


def k_batch_async_floor(spectrum: np.ndarray, eta: float, noise: float, num_workers: int, batch: int) -> float:
    """Excess of K-batch-async with exponential times after 3000 updates: each gradient is of a worker drawn anew.

    S is the sum of the X_i that arrived since the last update. The second moments of x, of the workers' X_i and of S
    are carried from arrival to arrival, for all modes at once. With `batch` 1 this is asynchronous SGD.

    >>> one = k_async_floor(np.array([0.5]), 0.2, 1.0, 8, 1)
    >>> abs(k_batch_async_floor(np.array([0.5]), 0.2, 1.0, 8, 1) / one - 1) < 1e-12
    True
    """
    step, source = eta * spectrum / batch, (eta * noise) ** 2 / batch
    own, others = 1.0 / num_workers, 1.0 - 1.0 / num_workers
    xx, x_worker, worker_worker, pair = np.zeros((4, len(spectrum)))
    for _ in range(3000):
        sum_x, sum_worker, sum_sum = np.zeros((3, len(spectrum)))
        for arrived in range(1, batch + 1):
            sum_sum += 2.0 * sum_worker + worker_worker
            sum_x += x_worker
            sum_other = sum_worker + pair  # S with this gradient, times a worker that did not bring it
            if arrived < batch:
                start, start_worker, sum_start = xx, x_worker, sum_x  # it starts again at x
            else:
                start = xx - 2.0 * step * sum_x + step**2 * sum_sum + source  # or at the new x
                start_worker, sum_start = x_worker - step * sum_other, np.zeros(len(spectrum))
            pair = 2.0 * own * start_worker + (1.0 - 2.0 * own) * pair
            worker_worker = own * start + others * worker_worker
            x_worker = own * start + others * start_worker
            sum_worker = own * sum_start + others * sum_other
            xx = start
    return float(spectrum @ xx) / 2.0


def floor(family: str, quorum: int, times: str) -> float | None:
    """The exact stationary excess error, or None where it is not known."""
    if family in ("K-sync", "sync") or (family == "K-async" and quorum == NUM_WORKERS):
        return synchronous_floor(SPECTRUM, LEARNING_RATE, NOISE, quorum)
    exact = k_batch_async_floor if family == "K-batch-async" else k_async_floor
    return exact(SPECTRUM, LEARNING_RATE, NOISE, NUM_WORKERS, quorum) if times == "exponential" else None


def arms(seconds: float) -> dict[tuple[str, str, int], Arm]:
    """By times, family and K."""
    problem, end = quadratic(NOISE).on, (Budget(seconds=seconds), EVALUATIONS)
    return {
        (times, *method): Arm(
            f"K = {method[1]}", rule, LEARNING_RATE, problem, speeds.on, NUM_WORKERS, *end, f"{method[0]}, {times}"
        )
        for times, speeds in SPEEDS.items()
        for method, rule in METHODS.items()
    }


def row_of(key: tuple[str, str, int], curves: pandas.DataFrame, seconds: float) -> dict[str, object]:
    """Of the curves of one arm, beside the closed forms."""
    times, family, quorum = key
    own = curves.groupby("seed")
    error = interval([float(np.mean(losses[EVALUATIONS // 2 :])) for _, losses in own.loss])
    expected = seconds_per_update(family, quorum, getattr(SPEEDS[times], "shift", 0.0)), floor(family, quorum, times)
    expected_seconds, expected_error = ("-" if value is None else f"{value:.4g}" for value in expected)
    return {
        "times": times,
        "method": family,
        "K": quorum,
        "seconds per update": interval(seconds / own.updates.max()),
        "closed form": expected_seconds,
        "error, last half": error,
        "exact floor": expected_error,
        "error / K-sync's floor": f"{error.estimate / synchronous_floor(SPECTRUM, LEARNING_RATE, NOISE, quorum):.3f}",
    }


def make(flags: argparse.Namespace) -> None:
    seconds, seeds = (QUICK_SECONDS, flags.seeds or 3) if flags.quick else (SECONDS, flags.seeds or 10)
    curves = run([*arms(seconds).values()], range(seeds), flags.jobs)
    note = (
        f"P = {NUM_WORKERS}; mean over {seeds} seeds [95 % interval]; virtual seconds. Error: f - f*, mean over the"
        f" last half of {seconds} virtual seconds; the last column divides it by eta sigma^2 / (2 K (2 - a)), summed"
        " over the modes."
    )
    rows = [row_of(key, of(curves, arm), seconds) for key, arm in arms(seconds).items()]
    write(flags.out, "error_runtime", rows, note)

    looks = {round(look) for look in np.geomspace(1, EVALUATIONS, 80)}  # evenly spaced on the logarithmic axis
    panels = [f"{family}, {times}" for times in SPEEDS for family in FAMILIES]
    axes = {"": {"xscale": "log", "yscale": "log", "xlabel": "virtual seconds", "ylabel": "excess error f(x) - f*"}}
    shown = curves[curves["look"].isin(looks) & curves.panel.isin(panels)]
    path = flags.out / "error_runtime.png"
    picture(path, shown, note, axes, x="seconds", y="loss", style="arm", col_wrap=len(FAMILIES))


if __name__ == "__main__":
    sys.exit(main(make, "error_runtime", __doc__))
