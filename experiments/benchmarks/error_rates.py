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
**Between looks**: from curves to the word, of arms that are evaluated 5 to 81 times. Where they do not differ, how
often there is one: on the time to a fixed target or to the reference's own, and on the loss where the shorter run ends,
with runs of equal length and of 2.5 times that. Where the treatment is later by half an SD of the paired differences,
and so has the higher loss, how often the word reverses that. And how often what known crossings find is found at both
ends.
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
from typing import NamedTuple, TypeAlias

import numpy
import pandas
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import stats

from analysis.answers import answer_family, question_of_numbers
from analysis.curves import Curve, bracket, losses_around, shared_position, thinned_to_sparsest
from analysis.judge import TARGET_SHARE_IF_UNDECLARED
from analysis.over_tasks import mean_improvement, stratified_bootstrap
from analysis.stats import detectable_effect, equivalence, holm, sign_flip
from analysis.trust import compare_samples
from asyncsgd.scripts.base import run_script

Array = NDArray[numpy.float64]
Shape = tuple[int, ...]
Drawn = NDArray[numpy.floating]
Noise = Callable[[Generator, Shape], Drawn]
Studies: TypeAlias = Iterator[dict[str, bool]]
Columns: TypeAlias = dict[str, list[bool]]
"""Whether a study came out so, by column of the table: study by study, or column by column."""

ALPHA = 0.05
PAIRS = (6, 8, 10)
BUDGET_SECONDS = 90.0
TOLERANCE = 2.0
FAR = (0.0, 0.0, 4.0)
"""The true differences of a family in standard deviations: the last is surely found."""

PLATEAU = 4.0
FALL = 2.0
TARGET = 4.4
FLUCTUATION = 0.005
"""Of a curve, PLATEAU + FALL exp(-t / its own seconds); the standard deviation of an evaluation from it."""
CROSSING = 45.0
LEVEL = 5.0
SPREAD = 14.0
EARLIEST = 5.0
LOOK_END = 100.0
UPDATE = 0.1
"""When runs are at the target in the mean, and the standard deviations over seeds and of each run; the soonest; when
they end; an update. The standard deviation of the paired differences is 16 of 80 looks."""
LOOKS: dict[str, tuple[int, int]] = {
    "9/9": (9, 9),
    "81/81": (81, 81),
    "5/17": (5, 17),
    "9/81": (9, 81),
    "81/9": (81, 9),
}
"""Evaluations of a run of the treatment and of the reference, with those at the start."""
LOOK_PAIRS = (8,)


def normal(generator: Generator, shape: Shape) -> Drawn:
    return generator.normal(size=shape)


def heavy(generator: Generator, shape: Shape) -> Drawn:
    return generator.standard_t(3, size=shape)


def skewed(generator: Generator, shape: Shape) -> Drawn:
    return generator.exponential(size=shape)


NOISES: dict[str, tuple[Noise, float]] = {  # of both runs of a pair; and its standard deviation
    "normal": (normal, 1.0),
    "heavy": (heavy, math.sqrt(3)),
    "skewed": (skewed, 1.0),
}


def centred_heavy(generator: Generator, shape: Shape) -> Drawn:
    return heavy(generator, shape) / math.sqrt(3)


def centred_skewed(generator: Generator, shape: Shape) -> Drawn:
    return skewed(generator, shape) - 1


def rare(generator: Generator, shape: Shape) -> Drawn:
    is_rare = generator.random(shape) < 0.1
    return numpy.where(is_rare, 3.0, -1 / 3)


def lognormal(generator: Generator, shape: Shape) -> Drawn:
    mean = math.exp(0.5)
    sd = math.sqrt((math.e - 1) * math.e)
    drawn = generator.lognormal(size=shape)
    return (drawn - mean) / sd


def outliers(generator: Generator, shape: Shape) -> Drawn:
    is_outlier = generator.random(shape) < 0.05
    return numpy.where(is_outlier, 28.5, -1.5)


ONE_ARM: dict[str, Noise] = {  # of the treatment alone: of mean 0 and standard deviation 1, and outliers at 30 of these
    "heavy": centred_heavy,
    "skewed": centred_skewed,
    "rare": rare,
    "lognormal": lognormal,
    "outliers": outliers,
}
QUIET = 0.02
"""The standard deviation of the normal noise that every such difference has besides."""


def differences_of(name: str, shape: Shape, generator: Generator) -> Array:
    """Paired differences of runs that are alike, with a standard deviation of 1."""
    noise, sd = NOISES[name]
    treatment = noise(generator, shape)
    reference = noise(generator, shape)
    return (treatment - reference) / (math.sqrt(2) * sd)


def found(differences: Array) -> bool:
    nothing = numpy.zeros(len(differences))
    p, _ = sign_flip(differences, nothing)
    return p < ALPHA


def equivalent(differences: Array, margin: float = 1.0) -> float:
    nothing = numpy.zeros(len(differences))
    level = 1 - 2 * ALPHA
    p, _ = equivalence(differences, nothing, margin, level)
    return p


def seconds_to_target(losses: Array, generator: Generator) -> Array:
    """Times that grow with what the losses lack; one run in ten diverges and never gets there."""
    diverged = generator.random(len(losses)) < 0.1
    seconds = numpy.where(diverged, math.inf, 40 * numpy.exp(losses / 2))
    return numpy.minimum(seconds, BUDGET_SECONDS)


def false_positives(name: str, n: int, studies: int, generator: Generator) -> Studies:
    noise, sd = NOISES[name]
    levels = generator.normal(size=(studies, n))
    treatment = levels + noise(generator, (studies, n))
    reference = levels + noise(generator, (studies, n))
    margin = math.sqrt(2) * sd
    for ours, theirs in zip(treatment, reference, strict=True):
        first = seconds_to_target(ours, generator)
        second = seconds_to_target(theirs, generator)
        worse = ours - theirs + margin
        p, _ = sign_flip(ours, theirs)
        p_of_times = 1.0
        if numpy.ptp(first - second) > 0:
            p_of_times, _ = sign_flip(first, second)
        yield {
            "S1 sign-flip": p < ALPHA,
            "S1 t": stats.ttest_rel(ours, theirs).pvalue < ALPHA,
            "S2 TOST at margin": equivalent(worse, margin) < ALPHA,
            "S3 sign-flip": p_of_times < ALPHA,
        }


def one_arm(name: str, n: int, studies: int, generator: Generator) -> Studies:
    noise = ONE_ARM[name](generator, (studies, n))
    quiet = QUIET * generator.normal(size=noise.shape)
    for differences in noise + quiet:
        better = differences.mean() < 0
        different = found(differences)
        yield {
            "better, mean 0": different and better,
            "worse, mean 0": different and not better,
            "TOST, worse": equivalent(differences + 1.0) < ALPHA,
            "TOST, better": equivalent(differences - 1.0) < ALPHA,
        }


def families(name: str, n: int, studies: int, generator: Generator) -> Studies:
    nothing = numpy.zeros(n)
    for rows in differences_of(name, (studies, len(FAR), n), generator):
        p_different = []
        p = []
        for row in rows:
            p_of_row, _ = sign_flip(row, nothing)
            p_different.append(p_of_row)
            p.append(equivalent(row + 1.0))
        yield {
            "any different": min(holm(p_different)) < ALPHA,
            "any equivalent": min(holm(p)) < ALPHA,
            "without correction": min(p) < ALPHA,
        }


class Arms(NamedTuple):
    """The runs of one study: a curve for each arm and pair, and when each was truly at `TARGET`."""

    curves: list[tuple[Curve, Curve]]
    known: Array


def arms_of(name: str, n: int, longer: float, effect: float, generator: Generator) -> Arms:
    """Exponential curves in the question's own coordinate; `effect` in SD of the paired differences of the times."""
    share = math.log(FALL / (TARGET - PLATEAU))
    of_seeds = LEVEL * generator.normal(size=(n, 1))
    of_runs = SPREAD * generator.normal(size=(n, 2))
    crossings = CROSSING + of_seeds + of_runs
    crossings[:, 0] += effect * SPREAD * math.sqrt(2)
    crossings = numpy.maximum(crossings, EARLIEST)
    ends = (LOOK_END * longer, LOOK_END)
    curves = []
    for of_pair in crossings:
        pair = []
        for number, at, end in zip(LOOKS[name], of_pair, ends, strict=True):
            x = numpy.linspace(0, end, number)
            noise = FLUCTUATION * generator.normal(size=number)
            noise[0] = 0.0  # all runs begin at one loss
            losses = PLATEAU + FALL * numpy.exp(-share * x / at)
            pair.append((x, losses + noise))
        treatment, reference = pair
        curves.append((treatment, reference))
    return Arms(curves, crossings)


def word_on_times(arms: Arms, *, own: bool) -> str:
    """From curves to the word on time to the target; `own`: that of the reference's runs and not a fixed one."""
    target = TARGET
    if own:
        target = own_target(arms)
    brackets = []
    last_looks = []
    for pair in arms.curves:
        brackets.append([bracket(curve, target) for curve in thinned_to_sparsest(pair)])
        last_looks.append([x[-1] for x, _ in pair])
    between = numpy.array(brackets)
    ends = numpy.array(last_looks)
    is_missed = numpy.isinf(between[:, :, 1])
    cap = ends.max()
    if is_missed.any():
        cap = ends[is_missed].min()
    return word_of(numpy.minimum(between, cap))


def own_target(arms: Arms) -> float:
    """The target that the reference's own losses give."""
    losses = [y for _, (_, y) in arms.curves]
    first = float(numpy.mean([y[0] for y in losses]))
    best = float(numpy.mean([y.min() for y in losses]))
    return first - TARGET_SHARE_IF_UNDECLARED * (first - best)


def word_on_losses(arms: Arms) -> str:
    """From curves to the word on the loss where the first run ended."""
    curves = [curve for pair in arms.curves for curve in pair]
    end = min(float(x[-1]) for x, _ in curves)
    look = shared_position(curves, end, UPDATE)
    if look is None:
        look = end
    ends = numpy.array([[losses_around(curve, look, UPDATE) for curve in pair] for pair in arms.curves])
    if numpy.isnan(ends).any():
        return "undecided"
    return word_of(ends)


def word_of(ends: Array) -> str:
    measured = question_of_numbers(ends[:, 0], ends[:, 1], between="two looks")
    answers = answer_family([measured])
    return answers[0].word


def between_looks(name: str, n: int, studies: int, generator: Generator, *, effect: float = 0.0) -> Columns:
    """Words on arms without a difference; with one, words that reverse it."""
    wrong = ("better",) if effect else ("better", "worse")
    columns: Columns = {}
    for longer in (1.0, 2.5):
        drawn = [arms_of(name, n, longer, effect, generator) for _ in range(studies)]
        fixed = [word_on_times(arms, own=False) for arms in drawn]
        own = [word_on_times(arms, own=True) for arms in drawn]
        on_losses = [word_on_losses(arms) for arms in drawn]
        columns[f"time, fixed, x{longer:g}"] = [word in wrong for word in fixed]
        columns[f"time, own, x{longer:g}"] = [word in wrong for word in own]
        columns[f"loss, x{longer:g}"] = [word in wrong for word in on_losses]
    return columns


def reversed_between_looks(name: str, n: int, studies: int, generator: Generator) -> Columns:
    return between_looks(name, n, studies, generator, effect=0.5)


def power_between_looks(name: str, n: int, studies: int, generator: Generator) -> Columns:
    effect = detectable_effect(n, ALPHA)
    drawn = [arms_of(name, n, 1.0, effect, generator) for _ in range(studies)]
    known = []
    both = []
    for arms in drawn:
        seconds = numpy.minimum(arms.known, LOOK_END)
        known.append(found(seconds @ (1.0, -1.0)))
        word = word_on_times(arms, own=False)
        both.append(word == "worse")
    return {"known crossings": known, "both ends": both}


def power_and_guard(name: str, n: int, studies: int, generator: Generator) -> Studies:
    effect = detectable_effect(n, ALPHA)
    nothing = numpy.zeros(n)
    for differences in differences_of(name, (studies, n), generator):
        at_tolerance, _ = compare_samples(differences + TOLERANCE, nothing, TOLERANCE)
        at_zero, _ = compare_samples(differences, nothing, TOLERANCE)
        yield {
            "power, nominal 80 %": found(differences + effect),
            "guard at tolerance": at_tolerance == "passed",
            "guard at 0": at_zero == "passed",
        }


def coverage(name: str, n: int, studies: int, generator: Generator) -> Studies:
    of_family = 1 - ALPHA / len(FAR)

    def holds(differences: Array, truth: float, level: float) -> bool:  # an interval without ends leaves nothing out
        _, interval = sign_flip(differences + truth, numpy.zeros(n), level)
        is_outside = truth < interval.low or truth > interval.high
        return not is_outside

    for rows in differences_of(name, (studies, len(FAR), n), generator):
        every = [holds(row, truth, of_family) for row, truth in zip(rows, FAR, strict=True)]
        one = holds(rows[0], 0.0, 1 - ALPHA)
        yield {"interval, 95 %": one, "all 3 of a family": all(every)}


def improvement_coverage(name: str, n: int, studies: int, generator: Generator) -> Columns:
    columns: Columns = {}
    for shift, correlation in ((0.0, 0.0), (0.0, 0.8), (1.0, 0.8)):
        truth = float(stats.norm.cdf(shift / math.sqrt(2)))  # of two runs of different seeds
        hits = list[bool]()
        for _ in range(studies):
            levels, ours, theirs = generator.normal(size=(3, n, 3))
            shared = math.sqrt(correlation) * levels
            own = math.sqrt(1 - correlation)
            treatment = shared + own * ours + shift
            reference = shared + own * theirs
            tables = [treatment, reference]
            interval = stratified_bootstrap(tables, mean_improvement, generator, 199)  # a tenth of those in reports
            is_hit = interval.low <= truth <= interval.high
            hits.append(is_hit)
        columns[f"P = {truth:.2f}, r = {correlation:g}"] = hits
    return columns


class Table(NamedTuple):
    title: str
    test: Callable[[str, int, int, Generator], Studies | Columns]
    stream: Sequence[int]
    """Of random numbers."""
    rows: Mapping[str, object]


TABLES = (
    Table(f"false positives at alpha = {ALPHA:g}", false_positives, (), NOISES),
    Table("noise in one arm alone", one_arm, (5,), ONE_ARM),
    Table(f"families of {len(FAR)}", families, (6,), NOISES),
    Table("words between looks, no difference", between_looks, (4,), LOOKS),
    Table("words between looks that reverse half an SD", reversed_between_looks, (8,), LOOKS),
    Table("words between looks, power", power_between_looks, (9,), LOOKS),
    Table("power and guard", power_and_guard, (1,), NOISES),
    Table("coverage of paired differences", coverage, (2,), NOISES),
    Table("coverage of P(improvement) over 3 tasks", improvement_coverage, (7,), {}),
)


def rates(title: str, name: str, n: int, studies: int, seed: int) -> pandas.Series:
    """The share of studies with each outcome, in a row of the table with this title."""
    (table,) = (table for table in TABLES if table.title == title)
    row = []
    if name:
        names = list(table.rows)
        row = [names.index(name)]
    generator = numpy.random.default_rng([seed, *table.stream, n, *row])
    outcomes = table.test(name, n, studies, generator)
    return pandas.DataFrame(outcomes).mean()


def run(argv: list[str], stop: object) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--studies", type=int, default=2_000, help="studies per row (default %(default)s)")
    parser.add_argument("--task-studies", type=int, default=400, help="over tasks, per row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.studies, arguments.task_studies) < 1:
        parser.error("--studies and --task-studies must be 1 or more")
    for table in TABLES:
        studies = arguments.studies if table.rows else arguments.task_studies
        print(f"{table.title}, {studies} studies per row ± Monte Carlo standard error")
        show(table, studies, arguments.seed)
        print()
    return 0


def show(table: Table, studies: int, seed: int) -> None:
    """Print a row for each noise and number of pairs; a table over tasks has one for each number of seeds."""
    counts = LOOK_PAIRS if table.rows is LOOKS else PAIRS
    rows = [(name, n) for name in table.rows for n in counts]
    if not rows:
        rows = [("", 6), ("", 10)]
    for name, n in rows:
        shares = rates(table.title, name, n, studies, seed)
        if (name, n) == rows[0]:
            over_first = f"{'noise':<10}{'n':>3}" if name else f"{'seeds':>11}"
            headings = "".join(f"{heading:>21}" for heading in shares.index)
            print(over_first + headings)
        first = f"{name:<10}{n:>3}" if name else f"{n:>11}"
        errors = numpy.sqrt(shares * (1 - shares) / studies)
        cells = [f"{100 * share:.2f} ± {100 * error:.2f} %" for share, error in zip(shares, errors, strict=True)]
        shown = "".join(f"{cell:>21}" for cell in cells)
        print(first + shown, flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run))
