"""How often the tests of `analysis` find a difference where there is none, and how often one that is there.

    python experiments/benchmarks/error_rates.py --studies 2000

Every study has n pairs of runs. A pair shares its seed's level, and the two runs add noise of one distribution.

**False positives** at alpha = 0.05 where neither mode is better. S1 tests the mean difference of the losses. S2 adds
the margin (one standard deviation of the differences) to the treatment: whoever then says "equivalent" is wrong. S3
tests times to a target, restricted to a budget within which a fifth to a third do not get there.
**One arm**: the same where the noise is in the treatment alone, so that differences are not symmetric about their mean,
0 and then the margin above or below it. A sign-flip test is one of symmetry, and a t test takes differences as normal.
**Families** of three comparisons without a difference, and then with the margin as their difference: how often any of
them is a difference, or equivalent. Holm's method corrects both; the last column is without a correction.
**Looks**: how often one of two modes with one true curve, whose plateau is just below the target, is sooner there or
later, where one is evaluated 1 to 8 times as often. The last column takes each curve's own looks, not common ones.
**Stops**: the same where every run stops at the first look at or below the target.
**Power**: how often the difference that reports call the smallest detectable one is found (to be 80 %, if normal), and
how often the guard passes at its tolerance (at most 5 %) and without a difference.
**Coverage**: how often an interval, and all three of a family at Holm's level, hold the truth; one of three is far
from 0. The interval of a probability of improvement over three tasks resamples seeds, of a statistic that compares all
runs of one mode with all of the other: it depends on the correlation r of the modes over seeds."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy
import pandas
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import stats

from analysis.curves import Curve, on_common_looks, reached, until_shared
from analysis.over_tasks import mean_improvement, stratified_bootstrap
from analysis.stats import detectable_effect, equivalence, holm, sign_flip
from analysis.trust import guarded
from asyncsgd.scripts.base import run_script

Array = NDArray[numpy.float64]
Noise = Callable[[Generator, tuple[int, ...]], NDArray[numpy.floating]]
Studies: TypeAlias = Iterator[dict[str, bool]]
Columns: TypeAlias = dict[str, list[bool]]
"""Whether a study came out so, by column of the table: study by study, or column by column."""

ALPHA = 0.05
PAIRS = (6, 8, 10)
BUDGET_SECONDS = 90.0
TOLERANCE = 2.0
FAR = (0.0, 0.0, 4.0)
"""The true differences of a family in standard deviations: the last is surely found."""

PLATEAU, FALL, TARGET, FLUCTUATION = 4.98, 1.02, 5.0, 0.02
"""Of the true curve, PLATEAU + FALL exp(-t / FALL_SECONDS); the standard deviation of an evaluation from it."""
FALL_SECONDS, LOOK_SECONDS, FEW_LOOKS = 25.0, 100.0, 11

NOISES: dict[str, tuple[Noise, float]] = {  # of both runs of a pair; and its standard deviation
    "normal": (lambda generator, shape: generator.normal(size=shape), 1.0),
    "heavy": (lambda generator, shape: generator.standard_t(3, size=shape), math.sqrt(3)),
    "skewed": (lambda generator, shape: generator.exponential(size=shape), 1.0),
}
LOGNORMAL_SD = math.sqrt((math.e - 1) * math.e)
ONE_ARM: dict[str, Noise] = {  # of the treatment alone: of mean 0 and standard deviation 1, and outliers at 30 of these
    "heavy": lambda generator, shape: generator.standard_t(3, size=shape) / math.sqrt(3),
    "skewed": lambda generator, shape: generator.exponential(size=shape) - 1,
    "rare": lambda generator, shape: numpy.where(generator.random(shape) < 0.1, 3.0, -1 / 3),
    "lognormal": lambda generator, shape: (generator.lognormal(size=shape) - math.exp(0.5)) / LOGNORMAL_SD,
    "outliers": lambda generator, shape: 30.0 * (generator.random(shape) < 0.05) - 1.5,
}
QUIET = 0.02
"""The standard deviation of the normal noise that every such difference has besides."""


def differences_of(name: str, shape: tuple[int, ...], generator: Generator) -> Array:
    """Paired differences of runs that are alike, with a standard deviation of 1."""
    noise, sd = NOISES[name]
    return (noise(generator, shape) - noise(generator, shape)) / (math.sqrt(2) * sd)


def found(differences: Array) -> bool:
    return sign_flip(differences, numpy.zeros(len(differences)))[0] < ALPHA


def equivalent(differences: Array, margin: float = 1.0) -> float:
    return equivalence(differences, numpy.zeros(len(differences)), margin, 1 - 2 * ALPHA)[0]


def false_positives(name: str, n: int, studies: int, generator: Generator) -> Studies:
    noise, sd = NOISES[name]
    levels = generator.normal(size=(studies, n))
    treatment, reference = (levels + noise(generator, (studies, n)) for _ in range(2))
    for ours, theirs in zip(treatment, reference, strict=True):
        # Times grow with what the losses lack; one run in ten diverges and never gets there.
        times = (numpy.where(generator.random(n) < 0.1, math.inf, 40 * numpy.exp(side / 2)) for side in (ours, theirs))
        first, second = (numpy.minimum(own, BUDGET_SECONDS) for own in times)
        yield {
            "S1 sign-flip": sign_flip(ours, theirs)[0] < ALPHA,
            "S1 t": stats.ttest_rel(ours, theirs).pvalue < ALPHA,
            "S2 TOST at margin": equivalent(ours - theirs + math.sqrt(2) * sd, math.sqrt(2) * sd) < ALPHA,
            "S3 sign-flip": numpy.ptp(first - second) > 0 and sign_flip(first, second)[0] < ALPHA,
        }


def one_arm(name: str, n: int, studies: int, generator: Generator) -> Studies:
    noise = ONE_ARM[name](generator, (studies, n))
    for differences in noise + QUIET * generator.normal(size=noise.shape):
        better, different = differences.mean() < 0, found(differences)
        yield {
            "better, mean 0": different and better,
            "worse, mean 0": different and not better,
            "TOST, worse": equivalent(differences + 1.0) < ALPHA,
            "TOST, better": equivalent(differences - 1.0) < ALPHA,
        }


def families(name: str, n: int, studies: int, generator: Generator) -> Studies:
    for rows in differences_of(name, (studies, len(FAR), n), generator):
        p = [equivalent(row + 1.0) for row in rows]
        yield {
            "any different": min(holm([sign_flip(row, numpy.zeros(n))[0] for row in rows])) < ALPHA,
            "any equivalent": min(holm(p)) < ALPHA,
            "without correction": min(p) < ALPHA,
        }


def looks(name: str, n: int, studies: int, generator: Generator, *, stopped: bool = False) -> Columns:
    """Where a mode is sooner or later only because it, or the other, was evaluated more often."""

    def looked_at(number: int) -> Curve:
        x = numpy.linspace(0, LOOK_SECONDS, number)
        y = PLATEAU + FALL * numpy.exp(-x / FALL_SECONDS) + FLUCTUATION * differences_of(name, (number,), generator)
        end = int((y <= TARGET).argmax()) + 1 if stopped and (y <= TARGET).any() else number
        return x[:end], y[:end]

    def sooner(often: int, own: bool) -> bool:
        pairs = [(looked_at(often), looked_at(FEW_LOOKS)) for _ in range(n)]
        if stopped and not own:
            pairs = [(until_shared(first, second), until_shared(second, first)) for first, second in pairs]
        times = [[reached(curve, TARGET) for curve in (pair if own else on_common_looks(pair))] for pair in pairs]
        ends = numpy.array([[curve[0][-1] for curve in pair] for pair in pairs])
        ours, theirs = numpy.minimum(times, ends[numpy.isinf(times)].min(initial=LOOK_SECONDS)).T
        return bool(numpy.ptp(ours - theirs)) and sign_flip(ours, theirs)[0] < ALPHA

    return {
        f"{more:g} times{', own' * own}": [sooner(round((FEW_LOOKS - 1) * more) + 1, own) for _ in range(studies)]
        for more, own in [*((more, False) for more in (1, 1.5, 2, 3, 4, 8)), (8, True)]
    }


def stops(name: str, n: int, studies: int, generator: Generator) -> Columns:
    return looks(name, n, studies, generator, stopped=True)


def power_and_guard(name: str, n: int, studies: int, generator: Generator) -> Studies:
    effect, nothing = detectable_effect(n, ALPHA), numpy.zeros(n)
    for differences in differences_of(name, (studies, n), generator):
        yield {
            "power, nominal 80 %": found(differences + effect),
            "guard at tolerance": guarded(differences + TOLERANCE, nothing, TOLERANCE)[0] == "passed",
            "guard at 0": guarded(differences, nothing, TOLERANCE)[0] == "passed",
        }


def coverage(name: str, n: int, studies: int, generator: Generator) -> Studies:
    def holds(differences: Array, truth: float, level: float) -> bool:  # an interval without ends leaves nothing out
        interval = sign_flip(differences + truth, numpy.zeros(n), level)[1]
        return not (truth < interval.low or truth > interval.high)

    for rows in differences_of(name, (studies, len(FAR), n), generator):
        every = [holds(row, truth, 1 - ALPHA / len(FAR)) for row, truth in zip(rows, FAR, strict=True)]
        yield {"interval, 95 %": holds(rows[0], 0.0, 1 - ALPHA), "all 3 of a family": all(every)}


def improvement_coverage(name: str, n: int, studies: int, generator: Generator) -> Columns:
    columns: Columns = {}
    for shift, correlation in ((0.0, 0.0), (0.0, 0.8), (1.0, 0.8)):
        truth = float(stats.norm.cdf(shift / math.sqrt(2)))  # of two runs of different seeds
        columns[f"P = {truth:.2f}, r = {correlation:g}"] = hits = list[bool]()
        for _ in range(studies):
            levels, ours, theirs = generator.normal(size=(3, n, 3))
            shared, own = math.sqrt(correlation) * levels, math.sqrt(1 - correlation)
            tables = [shared + own * ours + shift, shared + own * theirs]
            interval = stratified_bootstrap(tables, mean_improvement, generator, 199)  # a tenth of those in reports
            hits.append(interval.low <= truth <= interval.high)
    return columns


Table = tuple[str, Callable[[str, int, int, Generator], Studies | Columns], Sequence[int], Mapping[str, object]]
TABLES: tuple[Table, ...] = (  # title, test, streams of random numbers and rows
    (f"false positives at alpha = {ALPHA:g}", false_positives, (), NOISES),
    ("noise in one arm alone", one_arm, (5,), ONE_ARM),
    (f"families of {len(FAR)}", families, (6,), NOISES),
    ("sooner or later by looks alone", looks, (4,), NOISES),
    ("the same of runs that stop there", stops, (4,), NOISES),
    ("power and guard", power_and_guard, (1,), NOISES),
    ("coverage of paired differences", coverage, (2,), NOISES),
    ("coverage of P(improvement) over 3 tasks", improvement_coverage, (7,), {}),
)


def rates(title: str, name: str, n: int, studies: int, seed: int) -> pandas.Series:
    """The share of studies with each outcome, in a row of the table with this title."""
    ((_, test, stream, noises),) = (table for table in TABLES if table[0] == title)
    row = [list(noises).index(name)] if name else []
    return pandas.DataFrame(test(name, n, studies, numpy.random.default_rng([seed, *stream, n, *row]))).mean()


def run(argv: list[str], stop: object) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--studies", type=int, default=2_000, help="studies per row (default %(default)s)")
    parser.add_argument("--task-studies", type=int, default=400, help="over tasks, per row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.studies, arguments.task_studies) < 1:
        parser.error("--studies and --task-studies must be 1 or more")
    for title, _, _, noises in TABLES:
        studies = arguments.studies if noises else arguments.task_studies
        print(f"{title}, {studies} studies per row ± Monte Carlo standard error")
        rows = [(name, n) for name in noises for n in PAIRS] or [("", 6), ("", 10)]
        for name, n in rows:
            shares = rates(title, name, n, studies, arguments.seed)
            if (name, n) == rows[0]:
                print(
                    (f"{'noise':<10}{'n':>3}" if name else f"{'seeds':>11}")
                    + "".join(f"{one:>21}" for one in shares.index)
                )
            errors = numpy.sqrt(shares * (1 - shares) / studies)
            cells = [f"{100 * share:.2f} ± {100 * error:.2f} %" for share, error in zip(shares, errors, strict=True)]
            print((f"{name:<10}{n:>3}" if name else f"{n:>11}") + "".join(f"{cell:>21}" for cell in cells), flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run))
