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
import itertools
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
from reproduction import Arm, Flags, each, interval, main, write

DIMENSION = 200
TARGET = 0.01 * Quadratic(dimension=DIMENSION).on(1, 0).loss(numpy.ones(DIMENSION))
"""eps: a hundredth of f - f* at the start."""
TUNING_SEED = 1000
CAP_FACTOR = 60.0
"""Cap in seconds, over the smaller of the theory's two expressions, whose common factor is about 10 here."""
RESOLUTION = 6000
"""Evaluations until the cap."""
RANGE = 8.0
"""Learning rates are tuned from centre / RANGE to centre * RANGE."""
NOISE = "noise s = $\\sigma^2$ / eps"
EXPONENT = "heterogeneity p (worker i takes i$^p$ seconds)"


class Cell(NamedTuple):
    """Of the diagram: s, p, and how it is measured, with so many learning rates per m."""

    noise: float
    exponent: float
    num_workers: int
    jitter: bool
    num_rates: int
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
    return float((1.0 + noise / len(taus)) / numpy.mean(1.0 / taus))


def theory_synchronous(taus: Array, noise: float) -> tuple[float, int]:
    """min_m tau_m (1 + s/m), and the m.

    >>> theory_synchronous(numpy.array([1.0, 2.0, 10.0]), 4.0)
    (5.0, 1)
    """
    times = taus * (1.0 + noise / numpy.arange(1, len(taus) + 1))
    return float(times.min()), int(times.argmin()) + 1


def seconds_to_target(cell: Cell, rule: Rule, learning_rate: float, seed: int, cap: float, step: float) -> float:
    """The first multiple of `step` at which f - f* <= TARGET; infinite if there is none up to `cap`."""
    evaluations = math.floor(cap / step + 1e-9)
    if evaluations < 1:
        return math.inf
    problem = Quadratic(dimension=DIMENSION, noise=math.sqrt(cell.noise * TARGET / DIMENSION))
    times = (Jitter if cell.jitter else Power)(exponent=cell.exponent)
    end = Limits(seconds=evaluations * step, target_loss=TARGET), evaluations
    last = Arm("", rule, learning_rate, problem.on, times.on, cell.num_workers, *end).simulated(seed).evaluations[-1]
    return last.train_seconds if last.loss <= TARGET else math.inf


Trial = tuple[Rule, float, bool]
"""A rule, a learning rate, and whether it is at an edge of its grid."""


def grid(rule: Rule, centre: float, number: int) -> list[Trial]:
    """Learning rates from centre / RANGE to centre * RANGE in equal ratios, those near the centre first."""
    rates = (centre * numpy.geomspace(1.0 / RANGE, RANGE, number)).tolist()
    outwards = sorted(rates, key=lambda rate: abs(math.log(rate / centre)))
    return [(rule, rate, rate in (rates[0], rates[-1])) for rate in outwards]


def tune(cell: Cell, trials: list[Trial], cap: float, step: float) -> Trial:
    """The one that is first at the target on the tuning seed; the first one, if nobody reaches it."""
    best = trials[0]
    for trial in trials:
        seconds = seconds_to_target(cell, *trial[:2], TUNING_SEED, cap, step)
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
    logs = numpy.log2(numpy.minimum(asynchronous, cap) / numpy.minimum(synchronous, cap))
    missed = max(asynchronous) == math.inf, max(synchronous) == math.inf
    return interval(logs), "?" if all(missed) else ">" * missed[0] + "<" * missed[1]


def measure(cell: Cell) -> tuple[dict[str, object], dict[str, object]]:
    """Tune both arms of `cell` and run them on the test seeds: a row of the table, and one of the picture."""
    noise = cell.noise
    n = cell.num_workers
    taus = mean_seconds(cell.exponent, n)
    theory, theory_quorum = theory_synchronous(taus, noise)
    cap = CAP_FACTOR * min(theory, theory_asynchronous(taus, noise))
    # Good first trials make the others short. Stability at the mean delay n - 1 limits the rate of asynchronous SGD to
    # about pi / (4 n), a stationary f - f* of eps / 2 to 2 / s.
    quorums = sorted([2**k for k in range(n.bit_length())], key=lambda m: abs(math.log(m / theory_quorum)))
    trials = grid(Asynchronous(), min(math.pi / (4 * n), 2.0 / noise), cell.num_rates * len(quorums))
    grids = [grid(KSync(m), min(1.0, 2.0 * m / noise), cell.num_rates) for m in quorums]
    one, other = (tune(cell, tried, cap, cap / RESOLUTION) for tried in (trials, [*itertools.chain(*grids)]))
    first, second = (
        [seconds_to_target(cell, *arm[:2], seed, cap, cap / RESOLUTION) for seed in range(cell.num_seeds)]
        for arm in (one, other)
    )
    logs, mark = ratio(first, second, cap)
    expected = theory_asynchronous(taus, noise) / theory
    assert isinstance(other[0], KSync)
    row = {
        "s = sigma^2/eps": f"{noise:g}",
        "p": f"{cell.exponent:g}",
        "async s": f"{numpy.minimum(first, cap).mean():.4g}",
        "async learning rate": f"{one[1]:.3g}" + "*" * one[2],
        "m-sync s": f"{numpy.minimum(second, cap).mean():.4g}",
        "m": other[0].quorum,
        "m-sync learning rate": f"{other[1]:.3g}" + "*" * other[2],
        "ratio async / m-sync [95 %]": f"{mark}{logs.mapped(lambda log: 2.0**log):.3g}",
        "theory's ratio": f"{expected:.3g}",
        "theory's m": theory_quorum,
        "reached": ", ".join(f"{numpy.isfinite(seconds).sum()}/{cell.num_seeds}" for seconds in (first, second)),
    }
    shown = {NOISE: noise, EXPONENT: cell.exponent, "measured": logs.estimate, "theory": math.log2(expected)}
    return row, shown | {"mark": mark or "~" * (not (logs.low > 0 or logs.high < 0)), "censored": bool(mark)}


def make(flags: Flags) -> None:
    quick = flags.quick
    noises = [1.0, 10.0, 100.0] if quick else [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]
    exponents = [0.0, 0.5, 1.0] if quick else [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    num_workers, num_rates, num_seeds = (16, 7, flags.seeds or 2) if quick else (32, 13, flags.seeds or 5)
    how = num_workers, flags.jitter, num_rates, num_seeds
    # The long ones first, so that no process is left alone with one.
    cells = [Cell(noise, exponent, *how) for noise in reversed(noises) for exponent in reversed(exponents)]
    rows, looks = zip(*reversed(list(each(measure, [(cell,) for cell in cells], flags.jobs))), strict=True)
    shown = pandas.DataFrame(looks)
    times = "exponential times of mean i^p s" if flags.jitter else "i^p s per gradient"
    edges = sum(str(row[f"{arm} learning rate"]).endswith("*") for row in rows for arm in ("async", "m-sync"))
    note = (
        f"n = {num_workers} workers, {times}; quadratic in R^{DIMENSION}, condition 10, target: f - f* down to a "
        f"hundredth; {num_seeds} seed{'s' if num_seeds > 1 else ''}. Virtual seconds; geometric mean over seeds of the "
        "ratio, 95 % interval by Student's t on its logarithm. Below 1 asynchronous SGD is faster. "
        f"{shown.censored.sum()} of {len(cells)} cells censored (> or < before the ratio: one arm missed the target "
        f"within the cap, which then stands for its time). * {edges} tuned learning rates at the edge of their grid. "
        "The theory's ratio is of upper bounds without constants."
    )
    name = "phase_diagram" + "_jitter" * flags.jitter
    write(flags.out, name, rows, note)

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axes, panel in zip(both, ("measured", "theory"), strict=True):
        logs, marks = (shown.pivot(index=NOISE, columns=EXPONENT, values=values) for values in (panel, "mark"))
        text = (marks if panel == "measured" else "") + (2.0**logs).map("{:.2g}".format)
        look = {"cmap": "PuOr_r", "vmin": -3.0, "vmax": 3.0, "cbar": False, "annot_kws": {"fontsize": 8}}
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
