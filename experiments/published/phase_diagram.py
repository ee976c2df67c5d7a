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
from typing import NamedTuple

import numpy
from matplotlib.patheffects import withStroke

from analysis.statistics.intervals import Interval
from asyncsgd.rules import Asynchronous, KSync, Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.instance import Array
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.sampler import BLOCK, Sampler
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential, Power
from reproduction import each, interval, picture, progress, run_script, script_parser, write_table

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


class Arm(NamedTuple):
    """The tuned asynchronous or m-synchronous arm of a cell, on the test seeds."""

    rule: str
    learning_rate: float
    at_edge: bool
    """The tuned learning rate is the smallest or the largest of its grid."""
    seconds: list[float]
    """The cap where the target was not reached."""
    num_reached: int


class Measured(NamedTuple):
    cell: Cell
    asynchronous: Arm
    synchronous: Arm

    @property
    def log2_ratio(self) -> Interval:
        """Of asynchronous over m-synchronous seconds, seed by seed; below 0, asynchrony is faster."""
        pairs = zip(self.asynchronous.seconds, self.synchronous.seconds, strict=True)
        return interval([math.log2(one / other) for one, other in pairs])

    @property
    def undecided(self) -> bool:
        """The interval holds ratio 1, or there is none."""
        ratio = self.log2_ratio
        return ratio.low is None or ratio.high is None or ratio.low <= 0 <= ratio.high

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
    places = numpy.arange(BLOCK)
    return Sampler(
        num_workers,
        lambda worker, block: means[worker] * unit.draw(numpy.full(BLOCK, worker), block * BLOCK + places),
    )


def seconds_to_target(cell: Cell, rule: Rule, learning_rate: float, seed: int, cap: float, step: float) -> float | None:
    """The first multiple of `step` at which f - f* <= TARGET; None if there is none up to `cap`."""
    problem = Quadratic(dimension=DIMENSION, noise=math.sqrt(cell.noise * TARGET / DIMENSION))
    sampler: Sampler
    if cell.jitter:
        sampler = scaled_exponential(cell.exponent, cell.num_workers, seed)
    else:
        sampler = Power(exponent=cell.exponent).on(cell.num_workers, seed)
    evaluations = math.floor(cap / step + 1e-9)
    if evaluations < 1:
        return None
    done = simulate(
        rule,
        problem.on(cell.num_workers, seed),
        sampler,
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
        arms.append(Arm(str(rule), rate, at_edge, [cap if value is None else value for value in seconds], len(reached)))
    return Measured(cell, *arms)


def run(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    noises = [1.0, 10.0, 100.0] if quick else [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]
    exponents = [0.0, 0.5, 1.0] if quick else [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    num_seeds = arguments.seeds or (2 if quick else 5)
    num_workers = 16 if quick else 32
    cells = [
        Cell(noise, exponent, num_workers, arguments.jitter, 7 if quick else 13, num_seeds)
        for noise in noises
        for exponent in exponents
    ]
    results: dict[Cell, Measured] = {}
    order = sorted(
        cells, key=lambda cell: -cell.noise
    )  # the long ones first, so that no process is left alone with one
    for done in each(measure, order, arguments.jobs):
        results[done.cell] = done
        ratio = 2.0**done.log2_ratio.estimate
        progress(f"s = {done.cell.noise:g}, p = {done.cell.exponent:g}: ratio {done.mark}{ratio:.3g}")
    name = "phase_diagram_jitter" if arguments.jitter else "phase_diagram"
    measured = [results[cell] for cell in cells]
    times = "exponential times of mean i^p s" if arguments.jitter else "i^p s per gradient"
    setting = (
        f"n = {num_workers} workers, {times}; quadratic in R^{DIMENSION}, condition 10, target: f - f* down to a "
        f"hundredth; {num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    print(
        write_table(
            arguments.out, name, HEADINGS, [row_of(each_of) for each_of in measured], note_of(measured, setting)
        )
    )
    print(statement(measured))
    draw(arguments, name, noises, exponents, measured, setting + (" (--quick)" if quick else ""))
    for ending in ("png", "md", "csv"):
        print(arguments.out / f"{name}.{ending}")


HEADINGS = (
    "s = sigma^2/eps",
    "p",
    "async s",
    "async learning rate",
    "m-sync s",
    "m",
    "m-sync learning rate",
    "ratio async / m-sync [95 %]",
    "theory's ratio",
    "theory's m",
    "reached",
)


def row_of(done: Measured) -> list[str]:
    cell, ratio = done.cell, done.log2_ratio.mapped(lambda log: 2.0**log)
    best = theory_synchronous(mean_seconds(cell.exponent, cell.num_workers), cell.noise)[1]
    one, other = done.asynchronous, done.synchronous
    return [
        f"{cell.noise:g}",
        f"{cell.exponent:g}",
        f"{interval(one.seconds).estimate:.4g}",
        f"{one.learning_rate:.3g}" + ("*" if one.at_edge else ""),
        f"{interval(other.seconds).estimate:.4g}",
        other.rule.split("quorum=")[1].split(",")[0],
        f"{other.learning_rate:.3g}" + ("*" if other.at_edge else ""),
        f"{done.mark}{ratio:.3g}",
        f"{theory_ratio(cell):.3g}",
        str(best),
        f"{one.num_reached}/{cell.num_seeds}, {other.num_reached}/{cell.num_seeds}",
    ]


def note_of(measured: list[Measured], setting: str) -> str:
    censored = sum(done.mark != "" for done in measured)
    edges = sum(arm.at_edge for done in measured for arm in (done.asynchronous, done.synchronous))
    return (
        f"{setting}. Virtual seconds; geometric mean over seeds of the ratio, 95 % interval by Student's t on its "
        f"logarithm. Below 1 asynchronous SGD is faster. {censored} of {len(measured)} cells censored (> or < before "
        "the ratio: one arm missed the target within the cap, which then stands for its time). "
        f"* {edges} tuned learning rates at the edge of their grid. "
        "The theory's ratio is of upper bounds without constants."
    )


def statement(measured: list[Measured]) -> str:
    """Where asynchrony pays, in words, from cells whose interval leaves out ratio 1."""
    faster, slower, open_ = [], [], 0
    for done in measured:
        mean = done.log2_ratio.estimate
        if not done.undecided and mean < 0 and done.mark in ("", "<"):
            faster.append(done)
        elif not done.undecided and mean > 0 and done.mark in ("", ">"):
            slower.append(done)
        else:
            open_ += 1
    agree = sum((done.log2_ratio.estimate < 0) == (theory_ratio(done.cell) < 1) for done in measured)
    lines = [
        f"Asynchronous SGD is faster in {len(faster)}, slower in {len(slower)} and undecided in {open_} of "
        f"{len(measured)} cells (95 % intervals); the theory's side of 1 is the measured one in {agree}."
    ]
    for word, found, pick in (("fastest", faster, min), ("slowest", slower, max)):
        if found:
            extreme = pick(found, key=lambda done: done.log2_ratio.estimate)
            lines.append(
                f"At its {word}: ratio {2.0**extreme.log2_ratio.estimate:.3g} at s = {extreme.cell.noise:g}, "
                f"p = {extreme.cell.exponent:g} (theory {theory_ratio(extreme.cell):.3g})."
            )
    return "\n".join(lines)


def draw(
    arguments: argparse.Namespace,
    name: str,
    noises: list[float],
    exponents: list[float],
    measured: list[Measured],
    setting: str,
) -> None:
    shape = len(noises), len(exponents)
    panels = {
        "measured": (
            numpy.array([done.log2_ratio.estimate for done in measured]).reshape(shape),
            numpy.array([done.mark or "~" * done.undecided for done in measured]).reshape(shape),
        ),
        "theory (bounds without constants)": (
            numpy.array([math.log2(theory_ratio(done.cell)) for done in measured]).reshape(shape),
            numpy.full(shape, ""),
        ),
    }
    limit = 3.0
    small_print = (
        setting + ", geometric mean, either arm tuned on another seed.\n"
        "Purple, below 1: asynchronous SGD reaches the target sooner; orange, above 1: the best m-sync does; black "
        "line: ratio 1.\n~: the 95 % interval over seeds (in the table) holds 1; > or <: an arm missed the target."
    )
    with picture(arguments.out / f"{name}.png", 2, title=TITLE, small_print=small_print) as axes:
        for axis, (title, (values, marks)) in zip(axes, panels.items(), strict=True):
            image = axis.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
            if values.min() < 0 < values.max():
                axis.contour(values, levels=[0.0], colors="black", linewidths=1.8)
            for row in range(shape[0]):
                for column in range(shape[1]):
                    text = f"{marks[row, column]}{2.0 ** values[row, column]:.2g}"
                    colour = "white" if abs(values[row, column]) > 0.7 * limit else "black"
                    halo = [withStroke(linewidth=2.0, foreground="black" if colour == "white" else "white")]
                    axis.text(
                        column,
                        row,
                        text,
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=colour,
                        path_effects=halo,
                        zorder=4,
                    )
            axis.grid(visible=False)
            axis.set(
                title=title,
                xlabel="heterogeneity p (worker i takes i$^p$ seconds)",
                ylabel="noise s = $\\sigma^2$ / eps",
                xticks=range(shape[1]),
                xticklabels=[f"{exponent:g}" for exponent in exponents],
                yticks=range(shape[0]),
                yticklabels=[f"{noise:g}" for noise in noises],
            )
        bar = axes[1].figure.colorbar(image, ax=axes, extend="both", ticks=range(-3, 4), shrink=0.9)
        bar.ax.set_yticklabels([f"{2.0**tick:.3g}" for tick in range(-3, 4)])
        bar.set_label("virtual seconds, async / m-sync")


TITLE = "Where asynchrony pays: asynchronous SGD against the best m-synchronous SGD"


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__, "phase_diagram")
    parser.add_argument("--jitter", action="store_true", help="exponential times of mean i^p instead of constant ones")
    return run_script(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
