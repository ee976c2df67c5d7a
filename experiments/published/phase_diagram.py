"""Where asynchrony pays: seconds to the target of asynchronous SGD over those of the best m-synchronous SGD.

Source: the time complexities of Tyurin, Richtarik (NeurIPS 2023), Mishchenko et al. and Koloskova et al. (NeurIPS
2022), and the question of Begunov, Tyurin: Do We Need Asynchronous SGD? On the Near-Optimality of Synchronous Methods,
2026. For fixed times tau_1 <= ... <= tau_n per gradient and s = sigma^2 / eps, up to one common factor,

    asynchronous SGD (upper bound)   (mean_i 1 / tau_i)^-1 (1 + s / n)
    m-synchronous SGD                min_m tau_m (1 + s / m)

Worker i of n = 32 takes i^p seconds per gradient, p from 0 to 1.5; with ``--jitter`` an exponential time of that mean.
A diagonal quadratic in R^200, condition 10, normal noise of total variance s eps; eps is a hundredth of f - f* at the
start. The dimension keeps luck out: in R^10 a rate whose stationary f - f* is 4 eps touches eps now and then. Both arms
are tuned with 78 trials, on a seed that serves nothing else: m in {1, 2, 4, 8, 16, 32} times 13 learning rates, or 78
learning rates over as wide a range. A trial stops when it is slower than the best so far.

``--quick``: n = 16, 3 x 3 cells, 2 seeds instead of 5, 35 trials with learning rates a factor 2 apart.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import pandas
import seaborn
from matplotlib import pyplot

from analysis.stats import Interval
from asyncsgd.core.limits import Limits
from asyncsgd.rules import Asynchronous, KSync, Rule
from asyncsgd.simulation.instance import Array
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.speeds import Power
from reproduction import Arm, Flags, each, in_words, interval, main, starred, write

DIMENSION = 200
TARGET = 0.01 * Quadratic(dimension=DIMENSION).on(1, 0).loss(numpy.ones(DIMENSION))
"""eps: a hundredth of f - f* at the start."""
TUNING_SEED = 1000
CAP_FACTOR = 60.0
"""Cap in seconds, over the smaller of the theory's two expressions. Their common factor is about 10 here, so the cap is
about six times what the faster arm is expected to take."""
RESOLUTION = 6000
"""Evaluations until the cap."""
RANGE = 8.0
"""Learning rates are tuned from centre / RANGE to centre * RANGE."""
NOISE = "noise s = $\\sigma^2$ / eps"
EXPONENT = "heterogeneity p (worker i takes i$^p$ seconds)"


class Cell(NamedTuple):
    """A cell of the diagram, and how it is measured."""

    noise: float
    """s"""
    exponent: float
    """p"""
    num_workers: int
    jitter: bool
    num_rates: int
    """Learning rates that are tried for each m."""
    num_seeds: int


@dataclasses.dataclass(frozen=True)
class Jitter(Power):
    """Exponential times, those of `Power` their means."""

    def draw(self, generator: numpy.random.Generator, n: int, worker: int) -> Array:  # type: ignore[override]
        return super().draw(generator, n, worker) * generator.standard_exponential(n)


def mean_seconds(exponent: float, num_workers: int) -> Array:
    """tau_1 <= ... <= tau_n."""
    return numpy.arange(1, num_workers + 1, dtype=numpy.float64) ** exponent


def theory_asynchronous(taus: Array, noise: float) -> float:
    """(mean 1/tau)^-1 (1 + s/n).

    >>> theory_asynchronous(numpy.ones(4), 8.0)
    3.0
    """
    rate = numpy.mean(1.0 / taus)
    return float((1.0 + noise / len(taus)) / rate)


def theory_synchronous(taus: Array, noise: float) -> tuple[float, int]:
    """min_m tau_m (1 + s/m), and the m.

    >>> theory_synchronous(numpy.array([1.0, 2.0, 10.0]), 4.0)
    (5.0, 1)
    """
    quorums = numpy.arange(1, len(taus) + 1)
    times = taus * (1.0 + noise / quorums)
    best = int(times.argmin())
    return float(times[best]), best + 1


def seconds_to_target(cell: Cell, rule: Rule, learning_rate: float, seed: int, cap: float, step: float) -> float:
    """The first multiple of `step` at which f - f* <= TARGET; infinite if there is none up to `cap`."""
    evaluations = math.floor(cap / step + 1e-9)
    if evaluations < 1:
        return math.inf
    variance = cell.noise * TARGET / DIMENSION
    problem = Quadratic(dimension=DIMENSION, noise=math.sqrt(variance))
    times = Jitter(cell.exponent) if cell.jitter else Power(cell.exponent)
    budget = Limits(seconds=evaluations * step, target_loss=TARGET)
    arm = Arm("", rule, learning_rate, problem.on, times.on, cell.num_workers, budget, evaluations)
    last = arm.simulated(seed).evaluations[-1]
    return last.train_seconds if last.loss <= TARGET else math.inf


class Trial(NamedTuple):
    rule: Rule
    learning_rate: float
    rates: list[float]
    """The grid that `learning_rate` is of."""


def grid(rule: Rule, centre: float, number: int) -> list[Trial]:
    """Learning rates from centre / RANGE to centre * RANGE in equal ratios, those near the centre first."""
    factors = numpy.geomspace(1.0 / RANGE, RANGE, number)
    rates = (centre * factors).tolist()
    outwards = sorted(rates, key=lambda rate: abs(math.log(rate / centre)))
    return [Trial(rule, rate, rates) for rate in outwards]


def tune(cell: Cell, trials: list[Trial], cap: float, step: float) -> Trial:
    """The one that is first at the target on the tuning seed; the first one, if nobody reaches it."""
    best = trials[0]
    for trial in trials:
        seconds = seconds_to_target(cell, trial.rule, trial.learning_rate, TUNING_SEED, cap, step)
        if math.isfinite(seconds):
            best = trial
            cap = seconds - step
    return best


def ratio(asynchronous: Sequence[float], synchronous: Sequence[float], cap: float) -> tuple[Interval, str]:
    """log2 of asynchronous over m-synchronous seconds, seed by seed, where the cap stands for a missed target; and
    ``>`` where an asynchronous run missed it (the ratio is larger), ``<`` for m-sync, ``?`` for both.

    >>> ratio([math.inf, 60.0], [30.0, 30.0], 60.0)[1]
    '>'
    """
    ratios = numpy.minimum(asynchronous, cap) / numpy.minimum(synchronous, cap)
    mark = ""
    if math.inf in asynchronous:
        mark = ">"
    if math.inf in synchronous:
        mark = "?" if mark else "<"
    return interval(numpy.log2(ratios)), mark


class Tuned(NamedTuple):
    """An arm at its best learning rate."""

    trial: Trial
    seconds: list[float]
    """To the target, for each test seed."""


def tune_and_run(cell: Cell, trials: list[Trial], cap: float) -> Tuned:
    step = cap / RESOLUTION
    best = tune(cell, trials, cap, step)
    seeds = range(cell.num_seeds)
    seconds = [seconds_to_target(cell, best.rule, best.learning_rate, seed, cap, step) for seed in seeds]
    return Tuned(best, seconds)


def measure(cell: Cell) -> tuple[dict[str, object], dict[str, object]]:
    """Tune both arms of `cell` and run them on the test seeds: a row of the table, and one of the picture."""
    noise = cell.noise
    n = cell.num_workers
    taus = mean_seconds(cell.exponent, n)
    theory, theory_quorum = theory_synchronous(taus, noise)
    cap = CAP_FACTOR * min(theory, theory_asynchronous(taus, noise))
    # Good first trials make the others short. Stability at the mean delay n - 1 limits the rate of asynchronous SGD to
    # about pi / (4 n), a stationary f - f* of eps / 2 to 2 / s.
    powers = [2**k for k in range(n.bit_length())]
    quorums = sorted(powers, key=lambda m: abs(math.log(m / theory_quorum)))
    centre = min(math.pi / (4 * n), 2.0 / noise)
    trials = grid(Asynchronous(), centre, cell.num_rates * len(quorums))
    asynchronous = tune_and_run(cell, trials, cap)
    trials = []
    for m in quorums:
        centre = min(1.0, 2.0 * m / noise)
        trials += grid(KSync(m), centre, cell.num_rates)
    synchronous = tune_and_run(cell, trials, cap)
    logs, mark = ratio(asynchronous.seconds, synchronous.seconds, cap)
    expected = theory_asynchronous(taus, noise) / theory
    rule = synchronous.trial.rule
    assert isinstance(rule, KSync)

    def reached(arm: Tuned) -> str:
        return f"{numpy.isfinite(arm.seconds).sum()}/{cell.num_seeds}"

    row = {
        "s = sigma^2/eps": f"{noise:g}",
        "p": f"{cell.exponent:g}",
        "async s": f"{numpy.minimum(asynchronous.seconds, cap).mean():.4g}",
        "async learning rate": starred(asynchronous.trial.learning_rate, asynchronous.trial.rates),
        "m-sync s": f"{numpy.minimum(synchronous.seconds, cap).mean():.4g}",
        "m": rule.quorum,
        "m-sync learning rate": starred(synchronous.trial.learning_rate, synchronous.trial.rates),
        "ratio async / m-sync [95 %]": f"{mark}{logs.mapped(lambda log: 2.0**log):.3g}",
        "theory's ratio": f"{expected:.3g}",
        "theory's m": theory_quorum,
        "reached": f"{reached(asynchronous)}, {reached(synchronous)}",
    }
    is_clear = logs.low > 0 or logs.high < 0
    shown = {
        NOISE: noise,
        EXPONENT: cell.exponent,
        "measured": logs.estimate,
        "theory": math.log2(expected),
        "mark": mark if mark or is_clear else "~",
        "censored": bool(mark),
    }
    return row, shown


class Setup(NamedTuple):
    noises: list[float]
    exponents: list[float]
    num_workers: int
    num_rates: int
    num_seeds: int


FULL = Setup([0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0], [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5], 32, 13, 5)
QUICK = Setup([1.0, 10.0, 100.0], [0.0, 0.5, 1.0], 16, 7, 2)


def make(flags: Flags) -> None:
    setup = QUICK if flags.quick else FULL
    num_workers = setup.num_workers
    num_seeds = flags.seeds or setup.num_seeds
    cells = []
    for noise in setup.noises:
        for exponent in setup.exponents:
            cells.append(Cell(noise, exponent, num_workers, flags.jitter, setup.num_rates, num_seeds))
    # The long ones first, so that no process is left alone with one.
    tasks = [(cell,) for cell in reversed(cells)]
    measured = list(each(measure, tasks, flags.jobs))
    rows = [row for row, _ in reversed(measured)]
    shown = pandas.DataFrame([look for _, look in reversed(measured)])
    times = "exponential times of mean i^p s" if flags.jitter else "i^p s per gradient"
    rates = [row[f"{arm} learning rate"] for row in rows for arm in ("async", "m-sync")]
    edges = sum(str(rate).endswith("*") for rate in rates)
    note = (
        f"n = {num_workers} workers, {times}; quadratic in R^{DIMENSION}, condition 10, target: f - f* down to a "
        f"hundredth; {in_words(num_seeds, 'seed')}. Virtual seconds; geometric mean over seeds of the "
        "ratio, 95 % interval by Student's t on its logarithm. Below 1 asynchronous SGD is faster. "
        f"{shown.censored.sum()} of {len(cells)} cells censored (> or < before the ratio: one arm missed the target "
        f"within the cap, which then stands for its time). * {edges} tuned learning rates at the edge of their grid. "
        "The theory's ratio is of upper bounds without constants."
    )
    name = "phase_diagram_jitter" if flags.jitter else "phase_diagram"
    write(flags.out, name, rows, note)

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    by_cell = shown.pivot(index=NOISE, columns=EXPONENT)
    look = {"cmap": "PuOr_r", "vmin": -3.0, "vmax": 3.0, "cbar": False, "annot_kws": {"fontsize": 8}}
    for axes, panel in zip(both, ("measured", "theory"), strict=True):
        logs = by_cell[panel]
        text = (2.0**logs).map("{:.2g}".format)
        if panel == "measured":
            text = by_cell["mark"] + text
        seaborn.heatmap(logs, annot=text, fmt="", ax=axes, **look)
        axes.invert_yaxis()
        axes.set_title(panel)
    figure.suptitle("Seconds to the target, asynchronous / best m-synchronous; ~: the interval holds 1")
    figure.supxlabel(textwrap.fill(note, 180), fontsize=8, color="0.35")
    figure.savefig(flags.out / f"{name}.png", dpi=140)
    pyplot.close(figure)
    print(flags.out / f"{name}.png")


if __name__ == "__main__":
    jitter = {"action": "store_true", "help": "exponential times of mean i^p instead of constant ones"}
    main(make, "phase_diagram", __doc__, flags={"--jitter": jitter})
