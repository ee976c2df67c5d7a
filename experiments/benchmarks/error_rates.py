"""How often the tests of `analysis` find a difference where there is none, and how often one that is there.

    python experiments/benchmarks/error_rates.py --studies 2000

Every study has n pairs of runs. A pair shares its seed's level, and the two runs add noise of one distribution:

    normal    normal noise, for which the t tests are exact
    heavy     Student's t with 3 degrees of freedom
    skewed    exponential noise: single losses are skewed, their paired differences are symmetric

**False positives** at alpha = 0.05, in studies in which neither mode is better. S1 tests the mean difference of the
losses, by sign flips and by the paired t test. S2 adds the margin itself (one standard deviation of the differences) to
the treatment: whoever then says "equivalent" is wrong. S3 tests times to a target, restricted to a budget within which
a fifth to a third do not get there. The exact test cannot reject more often than alpha, and less often where few sign
patterns (or equal times) leave no p just below it.

**One arm**: the same where the noise is in the treatment alone, so that differences are not symmetric about their mean:

    heavy     Student's t with 3 degrees of freedom
    skewed    exponential noise
    rare      nine runs of ten gain a third of a standard deviation, one loses three
    lognormal noise whose logarithm is normal
    outliers  one run of twenty is 30 standard deviations worse

The true mean difference is 0, and then the margin above 0 (the treatment is worse) or below it. A sign-flip test is a
test of symmetry, and a t test takes differences as normal: neither keeps its level here for the mean.

**Families** of three comparisons without a difference, and then with the margin as their difference: how often any of
them is a difference, or equivalent. Holm's method corrects both; the last column is without a correction.

**Looks**: how often one of two modes is sooner at a target or later, where both have one true curve whose plateau is
just below it. One of them is evaluated 1 to 8 times as often as the other. Times are taken on common looks; the last
column shows what each curve's own looks would give.

**Stops**: the same where every run stops at the first look at or below the target. Then the time ends at the last look
that both runs of a pair share.

**Power**: the share of studies in which the sign-flip test finds the difference that reports call the smallest
detectable one. It is made for normal differences, where it is to be 80 %.

**Guard**: how often the synchronous guard passes when the true difference is its tolerance (at most 5 %), and when
there is none. The tolerance is two standard deviations of the differences.

**Coverage**: how often an interval holds the true difference. The first is the interval of 95 %. Then come all the
intervals of a family of three comparisons, one of which is far from 0. Each has the level 1 - alpha / 3, so that all
three hold in 95 % or more. The interval of a probability of improvement over three tasks (of --task-studies studies)
is a paired bootstrap, which resamples seeds, of an unpaired statistic, which compares all runs of one mode with all of
the other. Its coverage depends on the correlation of the two modes over the seeds (r). It is too low where one is
better."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable

import numpy
from numpy.typing import NDArray
from scipy import stats

from analysis.curves import Curve, on_common_looks, reached, until_shared
from analysis.over_tasks import mean_improvement, stratified_bootstrap
from analysis.stats import detectable_effect, equivalence, holm, sign_flip
from analysis.trust import guarded
from asyncsgd.errors import UsageError
from asyncsgd.scripts.base import run_script
from asyncsgd.signals import StopRequest

ALPHA = 0.05
PAIRS = (6, 8, 10)
BUDGET_SECONDS = 90.0
TOLERANCE = 2.0
FAMILY = 3
FAR = 4.0
"""Standard deviations of a comparison that is surely found."""

PLATEAU, FALL, TARGET, FLUCTUATION = 4.98, 1.02, 5.0, 0.02
"""Of the true curve, PLATEAU + FALL exp(-t / FALL_SECONDS); the standard deviation of an evaluation from it."""
FALL_SECONDS, LOOK_SECONDS = 25.0, 100.0
FEW_LOOKS = 11
TIMES_AS_MANY = (1, 1.5, 2, 3, 4, 8)

Noise = Callable[[numpy.random.Generator, tuple[int, ...]], NDArray[numpy.floating]]

NOISES: dict[str, tuple[Noise, float]] = {  # and the standard deviation of the noise
    "normal": (lambda generator, shape: generator.normal(size=shape), 1.0),
    "heavy": (lambda generator, shape: generator.standard_t(3, size=shape), math.sqrt(3)),
    "skewed": (lambda generator, shape: generator.exponential(size=shape), 1.0),
}
"""Noise of a run by name; both runs of a pair get it."""

LOGNORMAL_SD = math.sqrt((math.e - 1) * math.e)
ONE_ARM: dict[str, Noise] = {
    "heavy": lambda generator, shape: generator.standard_t(3, size=shape) / math.sqrt(3),
    "skewed": lambda generator, shape: generator.exponential(size=shape) - 1,
    "rare": lambda generator, shape: numpy.where(generator.random(shape) < 0.1, 3.0, -1 / 3),
    "lognormal": lambda generator, shape: (generator.lognormal(size=shape) - math.exp(0.5)) / LOGNORMAL_SD,
    "outliers": lambda generator, shape: 30.0 * (generator.random(shape) < 0.05) - 1.5,
}
"""Noise of the treatment alone by name, with a mean of 0: of standard deviation 1, and outliers at 30 of these."""
QUIET = 0.02
"""The standard deviation of the normal noise that every difference has besides."""

TASKS = 3
IMPROVEMENTS = ((0.0, 0.0), (0.0, 0.8), (1.0, 0.8))
"""(how many standard deviations one mode is better, correlation of the modes over the seeds)"""

TASK_SEEDS = (6, 10)
RESAMPLES = 199
"""A tenth of those in reports."""


def differences_of(name: str, shape: tuple[int, ...], generator: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Paired differences of runs that are alike, with a standard deviation of 1."""
    noise, sd = NOISES[name]
    return (noise(generator, shape) - noise(generator, shape)) / (math.sqrt(2) * sd)


def false_positives(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """The share of `num_studies` null studies of `n` pairs in which each test finds something."""
    noise, sd = NOISES[name]
    generator = numpy.random.default_rng([seed, n, list(NOISES).index(name)])
    levels = generator.normal(size=(num_studies, n))
    treatment = levels + noise(generator, (num_studies, n))
    reference = levels + noise(generator, (num_studies, n))
    margin = math.sqrt(2) * sd
    hits = numpy.zeros(4)
    for ours, theirs in zip(treatment, reference, strict=True):
        first, second = (numpy.minimum(seconds(side, generator), BUDGET_SECONDS) for side in (ours, theirs))
        hits += [
            sign_flip(ours, theirs)[0] < ALPHA,
            stats.ttest_rel(ours, theirs).pvalue < ALPHA,
            equivalence(ours + margin, theirs, margin, 1 - 2 * ALPHA)[0] < ALPHA,
            numpy.ptp(first - second) > 0 and sign_flip(first, second)[0] < ALPHA,
        ]
    columns = ("S1 sign-flip", "S1 t", "S2 TOST at margin", "S3 sign-flip")
    return dict(zip(columns, map(float, hits / num_studies), strict=True))


def one_arm(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """How often a difference is found, or none, where the noise of one mode is not symmetric."""
    generator = numpy.random.default_rng([seed, 5, n, list(ONE_ARM).index(name)])
    noise = ONE_ARM[name](generator, (num_studies, n)) + QUIET * generator.normal(size=(num_studies, n))
    hits, nothing = numpy.zeros(4), numpy.zeros(n)
    for differences in noise:
        found = sign_flip(differences, nothing)[0] < ALPHA
        better = differences.mean() < 0
        ends = (equivalence(differences + margin, nothing, 1.0, 1 - 2 * ALPHA)[0] < ALPHA for margin in (1.0, -1.0))
        hits += [found and better, found and not better, *ends]
    columns = ("better, mean 0", "worse, mean 0", "TOST, worse", "TOST, better")
    return dict(zip(columns, map(float, hits / num_studies), strict=True))


def families(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """How often any comparison of a family is called different, or equivalent, and is not."""
    generator = numpy.random.default_rng([seed, 6, n, list(NOISES).index(name)])
    hits, nothing = numpy.zeros(3), numpy.zeros(n)
    for rows in differences_of(name, (num_studies, FAMILY, n), generator):
        equivalent = [equivalence(row + 1.0, nothing, 1.0, 1 - 2 * ALPHA)[0] for row in rows]
        different = holm([sign_flip(row, nothing)[0] for row in rows])
        hits += [min(different) < ALPHA, min(holm(equivalent)) < ALPHA, min(equivalent) < ALPHA]
    columns = ("any different", "any equivalent", "without correction")
    return dict(zip(columns, map(float, hits / num_studies), strict=True))


def seconds(losses: NDArray[numpy.float64], generator: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Times that grow with what the losses lack; one run in ten diverges and never gets there."""
    times = 40.0 * numpy.exp(0.5 * losses)
    times[generator.random(len(times)) < 0.1] = math.inf
    return times


def looks(name: str, n: int, num_studies: int, seed: int, *, stopped: bool = False) -> dict[str, float]:
    """How often a mode is sooner or later only because it, or the other, was evaluated more often."""
    generator = numpy.random.default_rng([seed, 4, n, list(NOISES).index(name)])
    found = {}
    for more, own in [(more, False) for more in TIMES_AS_MANY] + [(TIMES_AS_MANY[-1], True)]:
        often = round((FEW_LOOKS - 1) * more) + 1
        hits = 0
        for _ in range(num_studies):
            pairs = [(_looked_at(often, name, generator), _looked_at(FEW_LOOKS, name, generator)) for _ in range(n)]
            if stopped:
                pairs = [(_until(TARGET, first), _until(TARGET, second)) for first, second in pairs]
            if stopped and not own:
                pairs = [(until_shared(first, second), until_shared(second, first)) for first, second in pairs]
            times = [[reached(curve, TARGET) for curve in (pair if own else on_common_looks(pair))] for pair in pairs]
            ends = numpy.array([[curve[0][-1] for curve in pair] for pair in pairs])
            missed = ends[numpy.isinf(times)].min(initial=LOOK_SECONDS)
            ours, theirs = numpy.minimum(times, missed).T
            hits += bool(numpy.ptp(ours - theirs)) and sign_flip(ours, theirs)[0] < ALPHA
        found[f"{more:g} times{', own' * own}"] = hits / num_studies
    return found


def stops(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """As `looks`, of runs that stop where they are seen at the target."""
    return looks(name, n, num_studies, seed, stopped=True)


def _until(target: float, curve: Curve) -> Curve:
    x, y = curve
    end = int((y <= target).argmax()) + 1 if (y <= target).any() else len(y)
    return x[:end], y[:end]


def _looked_at(number: int, name: str, generator: numpy.random.Generator) -> Curve:
    x = numpy.linspace(0, LOOK_SECONDS, number)
    return x, PLATEAU + FALL * numpy.exp(-x / FALL_SECONDS) + FLUCTUATION * differences_of(name, (number,), generator)


def power_and_guard(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """How often the smallest detectable difference is found, and how often the guard passes."""
    generator = numpy.random.default_rng([seed, 1, n, list(NOISES).index(name)])
    effect, nothing = detectable_effect(n, ALPHA), numpy.zeros(n)
    detected = at_tolerance = at_zero = 0
    for differences in differences_of(name, (num_studies, n), generator):
        detected += sign_flip(differences + effect, nothing)[0] < ALPHA
        at_tolerance += guarded(differences + TOLERANCE, nothing, TOLERANCE)[0] == "passed"
        at_zero += guarded(differences, nothing, TOLERANCE)[0] == "passed"
    counts = {"power, nominal 80 %": detected, "guard at tolerance": at_tolerance, "guard at 0": at_zero}
    return {column: count / num_studies for column, count in counts.items()}


def coverage(name: str, n: int, num_studies: int, seed: int) -> dict[str, float]:
    """How often intervals of paired differences hold the truth."""
    generator = numpy.random.default_rng([seed, 2, n, list(NOISES).index(name)])
    truths = numpy.array([0.0] * (FAMILY - 1) + [FAR])
    alone = all_hold = 0
    for differences in differences_of(name, (num_studies, FAMILY, n), generator):
        shifted = differences + truths[:, None]
        alone += _holds(shifted[0], 0.0, 1 - ALPHA)
        all_hold += all(_holds(row, truth, 1 - ALPHA / FAMILY) for row, truth in zip(shifted, truths, strict=True))
    return {"interval, 95 %": alone / num_studies, "all 3 of a family": all_hold / num_studies}


def _holds(differences: NDArray[numpy.float64], truth: float, level: float) -> bool:
    """Whether the interval of the sign-flip test holds the truth; one without ends leaves nothing out."""
    found = sign_flip(differences, numpy.zeros(len(differences)), level)[1]
    return not (truth < found.low or truth > found.high)


def improvement_coverage(num_seeds: int, num_studies: int, seed: int) -> dict[str, float]:
    """How often the interval of a probability of improvement holds the true one."""
    generator = numpy.random.default_rng([seed, 7, num_seeds])
    found = {}
    for shift, correlation in IMPROVEMENTS:
        truth = float(stats.norm.cdf(shift / math.sqrt(2)))  # of two runs of different seeds
        hits = 0
        for _ in range(num_studies):
            levels, ours, theirs = generator.normal(size=(3, num_seeds, TASKS))
            shared, own = math.sqrt(correlation) * levels, math.sqrt(1 - correlation)
            tables = [shared + own * ours + shift, shared + own * theirs]
            interval = stratified_bootstrap(tables, mean_improvement, generator, RESAMPLES)
            hits += interval.low <= truth <= interval.high
        found[f"P = {truth:.2f}, r = {correlation:g}"] = hits / num_studies
    return found


def percent(share: float, num_studies: int) -> str:
    """A share in percent with its Monte Carlo standard error.

    >>> percent(0.05, 2000)
    '5.00 ± 0.49 %'
    """
    return f"{100 * share:.2f} ± {100 * math.sqrt(share * (1 - share) / num_studies):.2f} %"


def print_table(
    title: str,
    rates: Callable[[str, int, int, int], dict[str, float]],
    num_studies: int,
    seed: int,
    noises: Iterable[str] = NOISES,
) -> None:
    print(f"{title}, {num_studies} studies per row ± Monte Carlo standard error")
    for place, (name, n) in enumerate((name, n) for name in noises for n in PAIRS):
        shares = rates(name, n, num_studies, seed)
        if place == 0:
            print(f"{'noise':<10}{'n':>3}" + "".join(f"{column:>21}" for column in shares))
        cells = "".join(f"{percent(share, num_studies):>21}" for share in shares.values())
        print(f"{name:<10}{n:>3}{cells}", flush=True)
    print()


def print_by_seeds(
    title: str,
    rates: Callable[[int, int, int], dict[str, float]],
    seeds: Iterable[int],
    num_studies: int,
    seed: int,
) -> None:
    print(f"{title}, {num_studies} studies per row ± Monte Carlo standard error")
    for place, num_seeds in enumerate(seeds):
        shares = rates(num_seeds, num_studies, seed)
        if place == 0:
            print(f"{'seeds':>11}" + "".join(f"{column:>21}" for column in shares))
        cells = "".join(f"{percent(share, num_studies):>21}" for share in shares.values())
        print(f"{num_seeds:>11}{cells}", flush=True)
    print()


def run(argv: list[str], stop: StopRequest) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=2_000, help="studies per row (default %(default)s)")
    parser.add_argument("--task-studies", type=int, default=400, help="over tasks, per row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default %(default)s)")
    arguments = parser.parse_args(argv)
    for flag, value, usual in (("studies", arguments.studies, 2_000), ("task-studies", arguments.task_studies, 400)):
        if value < 1:
            raise UsageError(f"--{flag} must be 1 or more, got {value}; type --{flag} {usual}")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {arguments.seed}; type --seed 0")
    print_table(f"false positives at alpha = {ALPHA:g}", false_positives, arguments.studies, arguments.seed)
    print_table("noise in one arm alone", one_arm, arguments.studies, arguments.seed, ONE_ARM)
    print_table(f"families of {FAMILY}", families, arguments.studies, arguments.seed)
    print_table("sooner or later by looks alone", looks, arguments.studies, arguments.seed)
    print_table("the same of runs that stop there", stops, arguments.studies, arguments.seed)
    print_table("power and guard", power_and_guard, arguments.studies, arguments.seed)
    print_table("coverage of paired differences", coverage, arguments.studies, arguments.seed)
    title = f"coverage of P(improvement) over {TASKS} tasks"
    print_by_seeds(title, improvement_coverage, TASK_SEEDS, arguments.task_studies, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run))
