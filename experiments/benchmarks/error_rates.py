"""How often the tests of `analysis` find something where there is nothing: false-positive rates of S1, S2 and S3.

    python experiments/benchmarks/error_rates.py --studies 2000

Every study has n pairs of runs of which neither mode is better. A pair shares its seed's level, and the two runs add
noise of one distribution, so they are exchangeable:

    normal    normal noise, for which the t tests are exact
    heavy     Student's t with 3 degrees of freedom
    skewed    exponential noise: single losses are skewed, their paired differences are symmetric

S1 tests the mean difference of the losses, by sign flips and by the paired t test. S2 adds the margin itself (one
standard deviation of the differences) to the treatment: whoever then says "equivalent" is wrong. S3 tests times to a
target, restricted to a budget within which a fifth to a third do not get there. All at alpha = 0.05; the exact test
cannot reject more often than that, and less often where few sign patterns (or equal times) leave no p just below it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import numpy
from numpy.typing import NDArray

from analysis.paired_tests import paired_difference, tost_paired
from analysis.time_to_target import restricted_times
from asyncsgd.errors import UsageError

ALPHA = 0.05
PAIRS = (6, 8, 10)
BUDGET_SECONDS = 90.0

Noise = Callable[[numpy.random.Generator, tuple[int, ...]], NDArray[numpy.float64]]

NOISES: dict[str, tuple[Noise, float]] = {  # and the standard deviation of the noise
    "normal": (lambda generator, shape: generator.normal(size=shape), 1.0),
    "heavy": (lambda generator, shape: generator.standard_t(3, size=shape), math.sqrt(3)),
    "skewed": (lambda generator, shape: generator.exponential(size=shape), 1.0),
}
"""Noise of a run by name; both runs of a pair get it."""

COLUMNS = ("S1 sign-flip", "S1 t", "S2 TOST at margin", "S3 sign-flip")


def false_positives(name: str, n: int, num_studies: int, seed: int) -> list[float]:
    """The share of `num_studies` null studies of `n` pairs in which each of `COLUMNS` finds something."""
    noise, sd = NOISES[name]
    generator = numpy.random.default_rng([seed, n, list(NOISES).index(name)])
    levels = generator.normal(size=(num_studies, n))
    treatment = levels + noise(generator, (num_studies, n))
    reference = levels + noise(generator, (num_studies, n))
    margin = math.sqrt(2) * sd
    hits = numpy.zeros(len(COLUMNS))
    for ours, theirs in zip(treatment, reference, strict=True):
        difference = paired_difference(ours, theirs, generator)
        equivalence = tost_paired(ours + margin, theirs, margin)
        times = restricted_times(seconds(ours, generator), seconds(theirs, generator), BUDGET_SECONDS, generator)
        hits += [
            difference.p is not None and difference.p <= ALPHA,
            difference.t_p is not None and difference.t_p <= ALPHA,
            equivalence.equivalent,
            times.p is not None and times.p <= ALPHA,
        ]
    return [float(share) for share in hits / num_studies]


def seconds(losses: NDArray[numpy.float64], generator: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Times that grow with what the losses lack; one run in ten diverges and never gets there."""
    times = 40.0 * numpy.exp(0.5 * losses)
    times[generator.random(len(times)) < 0.1] = math.inf
    return times


def percent(share: float, num_studies: int) -> str:
    """A share in percent with its Monte Carlo standard error.

    >>> percent(0.05, 2000)
    '5.00 ± 0.49 %'
    """
    return f"{100 * share:.2f} ± {100 * math.sqrt(share * (1 - share) / num_studies):.2f} %"


def run(arguments: argparse.Namespace) -> None:
    if arguments.studies < 1:
        raise UsageError(f"--studies must be 1 or more, got {arguments.studies}; type --studies 2000")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {arguments.seed}; type --seed 0")
    print(
        f"false positives at alpha = {ALPHA:g}, {arguments.studies} null studies per row ± Monte Carlo standard error"
    )
    print(f"{'noise':<8}{'n':>3}" + "".join(f"{column:>20}" for column in COLUMNS))
    for name in NOISES:
        for n in PAIRS:
            shares = false_positives(name, n, arguments.studies, arguments.seed)
            cells = "".join(f"{percent(share, arguments.studies):>20}" for share in shares)
            print(f"{name:<8}{n:>3}{cells}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=2_000, help="null studies per row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default %(default)s)")
    try:
        run(parser.parse_args())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
