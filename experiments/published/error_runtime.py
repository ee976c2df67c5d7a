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
import dataclasses
import sys
from collections.abc import Sequence

import numpy as np

from asyncsgd.rules.asynchronous import Asynchronous
from asyncsgd.rules.base import Rule
from asyncsgd.rules.k_async import KAsync, KBatchAsync
from asyncsgd.rules.k_sync import KSync
from asyncsgd.rules.synchronous import Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential, ShiftedExponential, Speeds
from reproduction import COLOURS, draw_curve, each, interval, picture, progress, run_script, script_parser, write_table

NUM_WORKERS = 8
QUORUMS = (1, 2, 4, 8)
LEARNING_RATE = 0.12
PROBLEM = Quadratic(dimension=100, curvature=1.0, condition=10.0, noise=0.1)
SPEEDS: tuple[Speeds, ...] = (Exponential(mean=1.0), ShiftedExponential(shift=1.0, mean=1.0))
SECONDS, QUICK_SECONDS = 3000, 300
EVALUATIONS = 600


@dataclasses.dataclass(frozen=True)
class Method:
    family: str
    """``K-sync``, ``K-async``, ``K-batch-async``, ``sync`` or ``async``."""
    quorum: int
    rule: Rule


METHODS = (
    *(Method("K-sync", quorum, KSync(quorum)) for quorum in QUORUMS),
    *(Method("K-async", quorum, KAsync(quorum)) for quorum in QUORUMS),
    *(Method("K-batch-async", quorum, KBatchAsync(quorum)) for quorum in QUORUMS),
    Method("sync", NUM_WORKERS, Synchronous()),
    Method("async", 1, Asynchronous()),
)


@dataclasses.dataclass(frozen=True)
class Arm:
    speeds: Speeds
    method: Method
    seed: int
    seconds: int


@dataclasses.dataclass(frozen=True)
class Curve:
    """Excess error at evenly spaced points of virtual time, from 0 on."""

    losses: list[float]
    seconds_per_update: float


def run_arm(arm: Arm) -> Curve:
    """Simulate one method on one seed."""
    done = simulate(
        arm.method.rule,
        PROBLEM.on(NUM_WORKERS, arm.seed),
        arm.speeds.on(NUM_WORKERS, arm.seed),
        num_workers=NUM_WORKERS,
        learning_rate=LEARNING_RATE,
        budget=Budget(seconds=arm.seconds),
        evaluations=EVALUATIONS,
    )
    return Curve([evaluation.loss for evaluation in done.evaluations], arm.seconds / done.version)


def order_statistic(number: int, rank: int) -> float:
    """Expected value of the `rank`-th smallest of `number` exponential times of mean 1.

    >>> order_statistic(2, 1), order_statistic(2, 2)
    (0.5, 1.5)
    """
    return sum(1.0 / left for left in range(number - rank + 1, number + 1))


def seconds_per_update(method: Method, speeds: Speeds) -> float | None:
    """The expected time of an update; None where there is only a bound.

    For K-async the waiting times of a renewal, exact for exponential times by their want of memory; for shifted ones
    an upper bound only, attained at K = P.
    """
    shift = speeds.shift if isinstance(speeds, ShiftedExponential) else 0.0
    quorum = method.quorum
    if method.family in ("K-batch-async", "async"):
        return quorum * (shift + 1.0) / NUM_WORKERS
    if method.family == "K-async" and shift > 0.0 and 1 < quorum < NUM_WORKERS:
        return None
    if method.family == "K-async" and quorum == 1:
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

    Raises:
        ValueError: unless there are at least 2 workers and 1 <= quorum <= num_workers.
    """
    if not 1 <= quorum <= num_workers or num_workers < 2:
        raise ValueError(f"quorum must be 1 to num_workers, and those at least 2, got {quorum} and {num_workers}")
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

    Raises:
        ValueError: for fewer than 2 workers.
    """
    if num_workers < 2:
        raise ValueError(f"num_workers must be 2 or more, got {num_workers}")
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


def floor(method: Method, speeds: Speeds) -> float | None:
    """The exact stationary excess error, or None where it is not known."""
    spectrum = np.geomspace(PROBLEM.curvature / PROBLEM.condition, PROBLEM.curvature, PROBLEM.dimension).tolist()
    if method.family in ("K-sync", "sync") or (method.family == "K-async" and method.quorum == NUM_WORKERS):
        return synchronous_floor(spectrum, LEARNING_RATE, PROBLEM.noise, method.quorum)
    if not isinstance(speeds, Exponential):
        return None
    exact = k_batch_async_floor if method.family == "K-batch-async" else k_async_floor
    return exact(spectrum, LEARNING_RATE, PROBLEM.noise, NUM_WORKERS, method.quorum)


def run(arguments: argparse.Namespace) -> None:
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    seeds = arguments.seeds or (3 if arguments.quick else 10)
    arms = [Arm(speeds, method, seed, seconds) for speeds in SPEEDS for method in METHODS for seed in range(seeds)]
    curves: list[Curve] = []
    for arm, curve in zip(arms, each(run_arm, arms, arguments.jobs), strict=True):
        curves.append(curve)
        if arm.seed == seeds - 1:
            progress(
                f"{len(curves)}/{len(arms)} {arm.speeds.name} {arm.method.family} K={arm.method.quorum}: {seeds} seeds"
            )

    rows: list[list[object]] = []
    of: dict[tuple[str, str, int], list[Curve]] = {}
    for first in range(0, len(arms), seeds):
        group, speeds, method = curves[first : first + seeds], arms[first].speeds, arms[first].method
        of[speeds.name, method.family, method.quorum] = group
        measured = interval([float(np.mean(curve.losses[EVALUATIONS // 2 :])) for curve in group])
        predicted_floor, predicted_seconds = floor(method, speeds), seconds_per_update(method, speeds)
        synchronous = floor(Method("K-sync", method.quorum, method.rule), speeds)
        assert synchronous is not None
        rows.append(
            [
                speeds.name,
                method.family,
                method.quorum,
                interval([curve.seconds_per_update for curve in group]),
                "-" if predicted_seconds is None else f"{predicted_seconds:.4g}",
                measured,
                "-" if predicted_floor is None else f"{predicted_floor:.4g}",
                f"{measured.estimate / synchronous:.3f}",
            ]
        )
    headings = [
        "times",
        "method",
        "K",
        "seconds per update",
        "closed form",
        "error, last half",
        "exact floor",
        "error / K-sync's floor",
    ]
    note = (
        f"P = {NUM_WORKERS}; mean over {seeds} seeds [95 % interval]; virtual seconds. Error: f - f*, mean over the"
        f" last half of {seconds} virtual seconds; the last column divides it by eta sigma^2 / (2 K (2 - a)), summed"
        " over the modes."
    )
    print(write_table(arguments.out, "error_runtime", headings, rows, note))

    paths = [draw(arguments, speeds, of, seconds, seeds) for speeds in SPEEDS]
    for path in (*paths, arguments.out / "error_runtime.md"):
        print(path)


def draw(
    arguments: argparse.Namespace,
    speeds: Speeds,
    of: dict[tuple[str, str, int], list[Curve]],
    seconds: int,
    seeds: int,
) -> str:
    """One picture for each distribution of times, one panel for each family."""
    path = arguments.out / f"error_runtime_{speeds.name}.png"
    band = ", band: 95 % interval (Student's t)" if seeds > 2 else ""
    small_print = (
        f"P = {NUM_WORKERS} workers, quadratic with {PROBLEM.dimension} modes, learning rate {LEARNING_RATE}, {speeds};"
        f" mean of {seeds} seeds{band}."
        + (f" Quick: {QUICK_SECONDS} s instead of {SECONDS} s." if arguments.quick else "")
    )
    # Points evenly spaced on the logarithmic axis of time.
    points = sorted({round(point) for point in np.geomspace(1, EVALUATIONS, 80)})
    times = [seconds * point / EVALUATIONS for point in points]
    with picture(path, 3, title=f"Error against virtual time, {speeds.name}", small_print=small_print) as panels:
        for axes, family in zip(panels, ("K-sync", "K-async", "K-batch-async"), strict=True):
            for colour, quorum in enumerate(QUORUMS):
                losses = [[curve.losses[point] for point in points] for curve in of[speeds.name, family, quorum]]
                name = "" if family == "K-batch-async" and quorum > 1 else {1: " (async)", 8: " (sync)"}.get(quorum, "")
                if family == "K-sync" and quorum == 1:
                    name = ""
                draw_curve(axes, times, losses, f"K = {quorum}{name}", COLOURS[colour], ("-", "--", "-.", ":")[colour])
            axes.set(xscale="log", yscale="log", xlabel="virtual seconds", title=family)
            axes.legend(frameon=False)
        lows = [float(np.min(line.get_ydata())) for axes in panels for line in axes.get_lines()]
        for axes in panels:
            axes.set_ylim(bottom=min(lows) / 2)
        panels[0].set_ylabel("excess error f(x) - f*")
    return str(path)


def main(argv: list[str] | None = None) -> int:
    return run_script(run, script_parser(__doc__, "error_runtime"), argv)


if __name__ == "__main__":
    sys.exit(main())
