"""Error against runtime for K-sync, K-async and K-batch-async: the trade-off of Dutta et al.

Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD, AISTATS 2018 (times per update) and 2021 (error floors). P = 8 workers whose gradients take Exp(1) or
1 + Exp(1) virtual seconds, K = 1, 2, 4, 8, learning rate 0.12 as in the paper's CIFAR experiment.

Deviation: in place of the network a quadratic with 100 modes of curvature 0.1 to 1 and independent normal noise in each
coordinate, because there the floors are exact. `sync` and `async` equal K-sync with K = 8 and K-async with K = 1.

Virtual seconds per update stand beside the paper's closed forms, and the mean excess error over the last half of the
run beside the exact floor: of K-sync the sum over modes of eta sigma^2 / (2 K (2 - a)), a = eta * curvature; of the
others, under exponential times, from the stationary second moments of server and workers. "-": none is known.

``--quick``: 300 virtual seconds instead of 3000, 3 seeds; the floors are then not reached by every method.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas

from asyncsgd.core.limits import Limits
from asyncsgd.rules import Asynchronous, KAsync, KBatchAsync, KSync, Rule, Synchronous
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.speeds import Exponential, ShiftedExponential
from reproduction import Arm, Flags, interval, main, of, picture, run, write

NUM_WORKERS = 8
QUORUMS = (1, 2, 4, 8)
LEARNING_RATE = 0.12
SPEEDS = {"exponential": Exponential(mean=1.0), "shifted_exponential": ShiftedExponential(shift=1.0, mean=1.0)}
SECONDS = 3000
QUICK_SECONDS = 300
EVALUATIONS = 600
FAMILIES: dict[str, type[KSync | KAsync | KBatchAsync]]
FAMILIES = {"K-sync": KSync, "K-async": KAsync, "K-batch-async": KBatchAsync}


class Method(NamedTuple):
    family: str
    quorum: int
    rule: Rule


METHODS = [Method(family, quorum, rule(quorum)) for family, rule in FAMILIES.items() for quorum in QUORUMS]
METHODS.append(Method("sync", NUM_WORKERS, Synchronous()))
METHODS.append(Method("async", 1, Asynchronous()))


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
    if family in ("K-batch-async", "async"):
        return quorum * (shift + 1.0) / NUM_WORKERS
    if family == "K-async" and quorum == 1:
        return (shift + 1.0) / NUM_WORKERS
    if family == "K-async" and shift > 0.0 and quorum < NUM_WORKERS:
        return None
    return shift + order_statistic(NUM_WORKERS, quorum)


def synchronous_floor(spectrum: np.ndarray, eta: float, noise: float, quorum: int) -> float:
    """Stationary excess of SGD with the mean of `quorum` gradients at the current point.

    >>> round(synchronous_floor(np.ones(1), 1.0, 2.0, quorum=2), 12)
    1.0
    """
    by_mode = eta * noise**2 / (2.0 * quorum * (2.0 - eta * spectrum))
    return float(np.sum(by_mode))


def stationary(phases: Sequence[np.ndarray]) -> np.ndarray:
    """E x^2, `(modes,)`, of the first coordinate of a vector that goes through `phases`, in turn and for ever.

    Each phase, `(choices, modes, n, n + 1)`, multiplies the vector by one of its matrices, all equally likely; their
    last column takes unit noise.
    """
    choices, modes, n, _ = phases[0].shape
    total = np.eye(n**2)
    added = np.zeros((modes, n**2, 1))
    for phase in phases:
        matrices = phase[..., :-1]
        noise = phase[..., -1]
        products = np.einsum("cmij,cmkl->mikjl", matrices, matrices, optimize=True)
        moved = products.reshape(modes, n**2, n**2) / choices
        squares = np.einsum("cmi,cmk->mik", noise, noise)
        added = moved @ added + squares.reshape(added.shape) / choices
        total = moved @ total
    moments = np.linalg.solve(np.eye(n**2) - total, added)
    return moments[:, 0, 0]


def k_async(a: np.ndarray, num_workers: int, quorum: int) -> list[np.ndarray]:
    """Of (x, X_1, ..., X_P), x the server's coordinate, X_i the workers': each update is by K of them, drawn anew.

    x <- x - (a / K) sum of their X_i + noise, and their X_i <- x.
    """
    choices = list(itertools.combinations(range(1, num_workers + 1), quorum))
    unchanged = np.eye(num_workers + 1, num_workers + 2)
    phase = np.tile(unchanged, (len(choices), len(a), 1, 1))
    for matrices, chosen in zip(phase, choices, strict=True):
        server = matrices[:, 0]
        server[:, chosen] = -a[:, None] / quorum
        server[:, -1] = quorum**-0.5
        matrices[:, chosen] = matrices[:, :1]
    return [phase]


def k_batch_async(a: np.ndarray, num_workers: int, batch: int) -> list[np.ndarray]:
    """Of (x, X_1, ..., X_P, S): each of K gradients is of a worker drawn anew, S <- S + X_i, and then X_i <- x.

    The last one comes with x <- x - (a / K) S + noise and S <- 0 in between.
    """
    unchanged = np.eye(num_workers + 2, num_workers + 3)
    phases = np.tile(unchanged, (batch, num_workers, len(a), 1, 1))
    for worker in range(1, num_workers + 1):
        by_phase = phases[:, worker - 1]
        by_phase[:, :, -1, worker] = 1.0
        last = by_phase[-1]
        server = last[:, 0]
        collected = last[:, -1]
        server -= a[:, None] / batch * collected
        collected[:] = 0.0
        server[:, -1] = batch**-0.5
        by_phase[:, :, worker] = by_phase[:, :, 0]
    return list(phases)


def floor(family: str, quorum: int, times: str) -> float | None:
    """The exact stationary excess error, or None where it is not known."""
    waits_for_all = family == "K-async" and quorum == NUM_WORKERS
    if waits_for_all or family in ("K-sync", "sync"):
        return synchronous_floor(SPECTRUM, LEARNING_RATE, NOISE, quorum)
    if times != "exponential":
        return None
    phases_of = k_batch_async if family == "K-batch-async" else k_async
    phases = phases_of(LEARNING_RATE * SPECTRUM, NUM_WORKERS, quorum)
    squares = stationary(phases)
    return float(SPECTRUM @ squares) * (LEARNING_RATE * NOISE) ** 2 / 2


def arms(seconds: float) -> dict[tuple[str, str, int], Arm]:
    """By times, family and K."""
    problem = quadratic(NOISE).on
    budget = Limits(seconds=seconds)
    by_key = {}
    for times, speeds in SPEEDS.items():
        for family, quorum, rule in METHODS:
            name = f"K = {quorum}"
            panel = f"{family}, {times}"
            arm = Arm(name, rule, LEARNING_RATE, problem, speeds.on, NUM_WORKERS, budget, EVALUATIONS, panel)
            by_key[times, family, quorum] = arm
    return by_key


def number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def row_of(key: tuple[str, str, int], curves: pandas.DataFrame, seconds: float) -> dict[str, object]:
    """The row of one arm, from its curves, beside the closed forms."""
    times, family, quorum = key
    by_seed = curves.groupby("seed")
    late_losses = [losses[EVALUATIONS // 2 :] for _, losses in by_seed.loss]
    error = interval([float(np.mean(losses)) for losses in late_losses])
    shift = getattr(SPEEDS[times], "shift", 0.0)
    lowest = synchronous_floor(SPECTRUM, LEARNING_RATE, NOISE, quorum)
    return {
        "times": times,
        "method": family,
        "K": quorum,
        "seconds per update": interval(seconds / by_seed.updates.max()),
        "closed form": number_or_dash(seconds_per_update(family, quorum, shift)),
        "error, last half": error,
        "exact floor": number_or_dash(floor(family, quorum, times)),
        "error / K-sync's floor": f"{error.estimate / lowest:.3f}",
    }


def make(flags: Flags) -> None:
    seconds = QUICK_SECONDS if flags.quick else SECONDS
    seeds = flags.seeds or (3 if flags.quick else 10)
    arm_of = arms(seconds)
    curves = run([*arm_of.values()], range(seeds), flags.jobs)
    note = (
        f"P = {NUM_WORKERS}; mean over {seeds} seeds [95 % interval]; virtual seconds. Error: f - f*, mean over the"
        f" last half of {seconds} virtual seconds; the last column divides it by eta sigma^2 / (2 K (2 - a)), summed"
        " over the modes."
    )
    rows = [row_of(key, of(curves, arm), seconds) for key, arm in arm_of.items()]
    write(flags.out, "error_runtime", rows, note)

    looks = {round(look) for look in np.geomspace(1, EVALUATIONS, 80)}  # evenly spaced on the logarithmic axis
    panels = [f"{family}, {times}" for times in SPEEDS for family in FAMILIES]
    axes = {"": {"xscale": "log", "yscale": "log", "xlabel": "virtual seconds", "ylabel": "excess error f(x) - f*"}}
    is_shown = curves["look"].isin(looks) & curves.panel.isin(panels)
    shown = curves[is_shown]
    path = flags.out / "error_runtime.png"
    picture(path, shown, note, axes, x="seconds", y="loss", style="arm", col_wrap=len(FAMILIES))


if __name__ == "__main__":
    main(make, "error_runtime", __doc__)
