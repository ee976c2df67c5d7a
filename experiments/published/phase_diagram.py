"""Where asynchrony pays: seconds to the target of asynchronous SGD over those of the best m-synchronous SGD.

    python experiments/published/phase_diagram.py --quick

Source: the time complexities of Tyurin, Richtarik (NeurIPS 2023), Mishchenko et al. and Koloskova et al. (NeurIPS
2022), and the question of Begunov, Tyurin: Do We Need Asynchronous SGD? On the Near-Optimality of Synchronous Methods,
2026. For fixed times tau_1 <= ... <= tau_n per gradient and s = sigma^2 / eps, up to one common factor,

    asynchronous SGD (upper bound)   (mean_i 1 / tau_i)^-1 (1 + s / n)
    m-synchronous SGD                min_m tau_m (1 + s / m)

Set-up: worker i of n = 32 takes i^p seconds per gradient, p from 0 (equal workers) to 1.5; with ``--jitter`` an
exponential time of that mean. Problem: a diagonal quadratic in R^200, largest eigenvalue 1, condition 10, with
independent normal noise of total variance sigma^2 = s eps. The target is f - f* <= eps, a hundredth of the value at the
start. It is checked on a grid of time that is the same for both arms. The dimension keeps luck out: f - f* fluctuates
by a tenth, while in R^10 a learning rate whose stationary f - f* is 4 eps touches eps now and then and looks fast.

Tuning uses a seed that serves nothing else, with 78 trials for either arm and cell. m-sync has m in {1, 2, 4, 8, 16,
32} times 13 learning rates a factor 1.41 apart. Asynchronous SGD has 78 learning rates over as wide a range. A trial is
stopped when it is slower than the best so far, which changes nothing about which is best. Then fresh seeds, both arms
on the same noise and times. A run that does not reach the target within the cap (a multiple of the theory's time)
counts as having taken the cap, and its cell is marked.

``--quick``: n = 16, 3 x 3 cells, 2 seeds instead of 5, 35 trials with learning rates a factor 2 apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable

import numpy
import pandas
import seaborn

from analysis.stats import Interval
from asyncsgd.rules import Asynchronous, KSync, Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.instance import Array
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.sampler import BLOCK, Sampler
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential, Power
from reproduction import each, interval, picture, run_script, write

DIMENSION = 200
TARGET = 0.01 * Quadratic(dimension=DIMENSION).on(1, 0).loss(numpy.ones(DIMENSION))
"""eps: a hundredth of f - f* at the start."""
TUNING_SEED, FIRST_SEED = 1000, 0
CAP_FACTOR = 60.0
"""Cap in seconds, over the smaller of the theory's two expressions, whose common factor is about 10 here."""
RESOLUTION = 6000
"""Evaluations until the cap."""
RANGE = 8.0
"""Learning rates are tuned from centre / RANGE to centre * RANGE."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the diagram, and how it is measured."""

    noise: float
    """s = sigma^2 / eps."""
    exponent: float
    """p: worker i takes i^p seconds."""
    num_workers: int
    jitter: bool
    num_rates: int
    """Learning rates per m."""
    num_seeds: int


@dataclasses.dataclass(frozen=True)
class Arm:
    """The tuned asynchronous or m-synchronous arm of a cell, on the test seeds."""

    rule: Rule
    learning_rate: float
    at_edge: bool
    """The tuned learning rate is the smallest or the largest of its grid."""
    seconds: list[float]
    """The cap where the target was not reached."""
    num_reached: int


@dataclasses.dataclass(frozen=True)
class Measured:
    cell: Cell
    asynchronous: Arm
    synchronous: Arm

    @property
    def log2_ratio(self) -> Interval:
        """Of asynchronous over m-synchronous seconds, seed by seed; below 0, asynchrony is faster."""
        pairs = zip(self.asynchronous.seconds, self.synchronous.seconds, strict=True)
        return interval([math.log2(one / other) for one, other in pairs])

    @property
    def mark(self) -> str:
        """``>`` where an asynchronous run missed the target (the ratio is larger), ``<`` for m-sync, ``?`` for both."""
        seeds = self.cell.num_seeds
        missed = self.asynchronous.num_reached < seeds, self.synchronous.num_reached < seeds
        return {(False, False): "", (True, False): ">", (False, True): "<", (True, True): "?"}[missed]


def mean_seconds(exponent: float, num_workers: int) -> Array:
    """tau_1 <= ... <= tau_n."""
    return numpy.arange(1, num_workers + 1, dtype=numpy.float64) ** exponent


def theory_asynchronous(taus: Array, noise: float) -> float:
    """(mean 1/tau)^-1 (1 + s/n).

    >>> theory_asynchronous(numpy.ones(4), 8.0)
    3.0
    """
    return float((1.0 + noise / len(taus)) / numpy.mean(1.0 / taus))


def theory_synchronous(taus: Array, noise: float) -> tuple[float, int]:
    """min_m tau_m (1 + s/m), and the m.

    >>> theory_synchronous(numpy.array([1.0, 2.0, 10.0]), 4.0)
    (5.0, 1)
    """
    times = taus * (1.0 + noise / numpy.arange(1, len(taus) + 1))
    best = int(times.argmin())
    return float(times[best]), best + 1


def theory_ratio(cell: Cell) -> float:
    taus = mean_seconds(cell.exponent, cell.num_workers)
    return theory_asynchronous(taus, cell.noise) / theory_synchronous(taus, cell.noise)[0]


def scaled_exponential(exponent: float, num_workers: int, seed: int) -> Sampler:
    """Exponential times, worker i's with mean i^p (i from 1)."""
    means, unit = mean_seconds(exponent, num_workers), Exponential(mean=1.0).on(num_workers, seed)
    return Sampler(
        num_workers,
        lambda worker, block: [means[worker] * unit.draw_one(worker, BLOCK * block + place) for place in range(BLOCK)],
    )


def seconds_to_target(cell: Cell, rule: Rule, learning_rate: float, seed: int, cap: float, step: float) -> float | None:
    """The first multiple of `step` at which f - f* <= TARGET; None if there is none up to `cap`."""
    problem = Quadratic(dimension=DIMENSION, noise=math.sqrt(cell.noise * TARGET / DIMENSION))
    times = scaled_exponential if cell.jitter else lambda exponent, *on: Power(exponent=exponent).on(*on)
    evaluations = math.floor(cap / step + 1e-9)
    if evaluations < 1:
        return None
    done = simulate(
        rule,
        problem.on(cell.num_workers, seed),
        times(cell.exponent, cell.num_workers, seed),
        num_workers=cell.num_workers,
        learning_rate=learning_rate,
        budget=Budget(seconds=evaluations * step, target_loss=TARGET),
        evaluations=evaluations,
    )
    last = done.evaluations[-1]
    return last.train_seconds if last.loss <= TARGET else None


def around(centre: float, number: int, factor: float) -> list[float]:
    """`number` values from centre / factor to centre * factor in equal ratios, those near the centre first."""
    values = centre * numpy.geomspace(1.0 / factor, factor, number)
    return sorted(values.tolist(), key=lambda value: abs(math.log(value / centre)))


def tune(
    cell: Cell, candidates: Iterable[tuple[Rule, list[float]]], cap: float, step: float
) -> tuple[Rule, float, bool]:
    """The rule and learning rate that are first at the target on the tuning seed, and whether the rate is at an edge.

    Where nobody reaches it: the first candidate, whose test runs will then be censored.
    """
    best: tuple[Rule, float, bool] | None = None
    fallback: tuple[Rule, float, bool] | None = None
    for rule, rates in candidates:
        for rate in rates:
            fallback = fallback or (rule, rate, False)
            seconds = seconds_to_target(cell, rule, rate, TUNING_SEED, cap, step)
            if seconds is not None:
                best = rule, rate, rate in (min(rates), max(rates))
                cap = seconds - step
    chosen = best or fallback
    assert chosen is not None
    return chosen


def measure(cell: Cell) -> Measured:
    """Tune both arms of `cell` and run them on the test seeds."""
    taus = mean_seconds(cell.exponent, cell.num_workers)
    theory, best_quorum = theory_synchronous(taus, cell.noise)
    cap = CAP_FACTOR * min(theory, theory_asynchronous(taus, cell.noise))
    step = cap / RESOLUTION
    quorums = [2**k for k in range(cell.num_workers.bit_length())]
    quorums.sort(key=lambda quorum: abs(math.log(quorum / best_quorum)))  # a good first trial makes the others short
    synchronous = [
        (KSync(quorum=quorum), around(min(1.0, 2.0 * quorum / cell.noise), cell.num_rates, RANGE)) for quorum in quorums
    ]
    # Stability at the mean delay n - 1 limits the rate to about pi / (4 n), a stationary f - f* of eps / 2 to 2 / s.
    centre = min(math.pi / (4 * cell.num_workers), 2.0 / cell.noise)
    asynchronous = [(Asynchronous(), around(centre, cell.num_rates * len(quorums), RANGE))]
    arms = []
    for candidates in (asynchronous, synchronous):
        rule, rate, at_edge = tune(cell, candidates, cap, step)
        seeds = range(FIRST_SEED, FIRST_SEED + cell.num_seeds)
        seconds = [seconds_to_target(cell, rule, rate, seed, cap, step) for seed in seeds]
        reached = [value for value in seconds if value is not None]
        arms.append(Arm(rule, rate, at_edge, [cap if value is None else value for value in seconds], len(reached)))
    return Measured(cell, *arms)


def row_of(done: Measured) -> dict[str, object]:
    cell, one, other = done.cell, done.asynchronous, done.synchronous
    assert isinstance(other.rule, KSync)
    ratio = done.log2_ratio.mapped(lambda log: 2.0**log)
    return {
        "s = sigma^2/eps": f"{cell.noise:g}",
        "p": f"{cell.exponent:g}",
        "async s": f"{interval(one.seconds).estimate:.4g}",
        "async learning rate": f"{one.learning_rate:.3g}" + "*" * one.at_edge,
        "m-sync s": f"{interval(other.seconds).estimate:.4g}",
        "m": other.rule.quorum,
        "m-sync learning rate": f"{other.learning_rate:.3g}" + "*" * other.at_edge,
        "ratio async / m-sync [95 %]": f"{done.mark}{ratio:.3g}",
        "theory's ratio": f"{theory_ratio(cell):.3g}",
        "theory's m": theory_synchronous(mean_seconds(cell.exponent, cell.num_workers), cell.noise)[1],
        "reached": f"{one.num_reached}/{cell.num_seeds}, {other.num_reached}/{cell.num_seeds}",
    }


def make(flags: argparse.Namespace) -> None:
    quick = flags.quick
    noises = [1.0, 10.0, 100.0] if quick else [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]
    exponents = [0.0, 0.5, 1.0] if quick else [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    num_workers, num_rates, num_seeds = (16, 7, flags.seeds or 2) if quick else (32, 13, flags.seeds or 5)
    cells = [
        Cell(noise, exponent, num_workers, flags.jitter, num_rates, num_seeds)
        for noise in reversed(noises)  # the long ones first, so that no process is left alone with one
        for exponent in exponents
    ]
    measured = sorted(each(measure, cells, flags.jobs), key=lambda done: (done.cell.noise, done.cell.exponent))
    times = "exponential times of mean i^p s" if flags.jitter else "i^p s per gradient"
    setting = (
        f"n = {num_workers} workers, {times}; quadratic in R^{DIMENSION}, condition 10, target: f - f* down to a "
        f"hundredth; {num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    censored = sum(done.mark != "" for done in measured)
    edges = sum(arm.at_edge for done in measured for arm in (done.asynchronous, done.synchronous))
    note = (
        f"{setting}. Virtual seconds; geometric mean over seeds of the ratio, 95 % interval by Student's t on its "
        f"logarithm. Below 1 asynchronous SGD is faster. {censored} of {len(measured)} cells censored (> or < before "
        "the ratio: one arm missed the target within the cap, which then stands for its time). "
        f"* {edges} tuned learning rates at the edge of their grid. "
        "The theory's ratio is of upper bounds without constants."
    )
    name = "phase_diagram" + "_jitter" * flags.jitter
    write(flags.out, name, [row_of(done) for done in measured], note)

    shown = pandas.DataFrame(
        {
            "noise s = $\\sigma^2$ / eps": [done.cell.noise for done in measured],
            "heterogeneity p (worker i takes i$^p$ seconds)": [done.cell.exponent for done in measured],
            "measured": [done.log2_ratio.estimate for done in measured],
            "theory (bounds without constants)": [math.log2(theory_ratio(done.cell)) for done in measured],
            "mark": [
                done.mark or "~" * (not (done.log2_ratio.low > 0 or done.log2_ratio.high < 0)) for done in measured
            ],
        }
    )
    rows, columns, *panels, mark = shown
    small_print = (
        setting + ", geometric mean, either arm tuned on another seed.\n"
        "Virtual seconds, async / m-sync. Purple, below 1: asynchronous SGD is at the target sooner; orange: the best "
        "m-sync is.\n~: the 95 % interval over seeds (in the table) holds 1; > or <: an arm missed the target."
    )
    title = "Where asynchrony pays: asynchronous SGD against the best m-synchronous SGD"
    with picture(flags.out / f"{name}.png", 2, title, small_print) as both:
        for axes, panel in zip(both, panels, strict=True):
            logs = shown.pivot(index=rows, columns=columns, values=panel)
            text = (2.0**logs).map("{:.2g}".format)
            if panel == "measured":
                text = shown.pivot(index=rows, columns=columns, values=mark) + text
            look = {"cmap": "PuOr_r", "vmin": -3.0, "vmax": 3.0, "cbar": False, "annot_kws": {"fontsize": 8}}
            seaborn.heatmap(logs, annot=text, fmt="", ax=axes, **look)
            axes.invert_yaxis()
            axes.grid(visible=False)
            axes.set_title(panel)


def main(argv: list[str] | None = None) -> int:
    jitter = {"action": "store_true", "help": "exponential times of mean i^p instead of constant ones"}
    return run_script(make, "phase_diagram", __doc__, argv, {"--jitter": jitter})


if __name__ == "__main__":
    sys.exit(main())
