"""The convergence guard passes what was shown to be the same, and nothing else."""

import math

import numpy as np
import pytest

from analysis.statistics.convergence_guard import Guard, convergence
from analysis.statistics.equivalence import tost_independent, tost_paired
from analysis.statistics.intervals import Refused


def found(new, reference, tolerance, paired=True):
    guard = convergence(new, reference, tolerance, paired=paired)
    assert isinstance(guard, Guard)
    return guard


@pytest.mark.parametrize("paired", [True, False])
def test_the_guard_is_the_equivalence_test_against_its_tolerance(paired):
    draws = np.random.default_rng(0)
    reference = draws.normal(1000, 3, 8)
    new = reference + draws.normal(1, 3, 8)
    for tolerance in (0.5, 2.0, 4.0, 8.0, 20.0):
        test = (tost_paired if paired else tost_independent)(new, reference, tolerance)
        guard = found(new, reference, tolerance, paired)
        assert (guard.word == "passed", guard.p, guard.difference) == (test.equivalent, test.p, test.interval)
        assert found(new[::-1], reference[::-1], tolerance, paired) == guard


def test_noise_and_few_runs_do_not_pass():
    reference = [1000.0, 1100.0, 900.0]
    noisy = found([1060.0, 1030.0, 915.0], reference, tolerance=16)  # a t test of the difference has p = 0.97
    assert noisy.word == "not shown"
    assert noisy.reason.endswith("does not lie inside ±16.0")


def test_faster_and_slower_both_fail_and_say_which():
    draws = np.random.default_rng(2)
    reference, noise = draws.normal(1000, 100, 8), draws.normal(0, 1, 8)
    slower, faster = (found(reference + shift + noise, reference, tolerance=10) for shift in (20, -20))
    assert (slower.word, faster.word) == ("failed", "failed")
    assert slower.reason.startswith("slower than the reference: ")
    assert faster.reason.startswith("faster than the reference: ")
    # unpaired the spread of the seeds hides it, and is no pass either
    assert found(reference + 20 + noise, reference, tolerance=10, paired=False).word == "not shown"


@pytest.mark.parametrize(("shift", "word"), [(0.0, "passed"), (-15.0, "passed"), (16.0, "not shown"), (17.0, "failed")])
def test_a_difference_without_noise_decides_itself(shift, word):
    reference = [1000.0, 1100.0, 900.0]
    guard = found([value + shift for value in reference], reference, tolerance=16)
    assert (guard.word, guard.p, guard.difference.low) == (word, None, None)


def test_too_few_runs_are_refused_with_the_reason():
    assert convergence([1.0, 2.0], [1.0, 2.0], 1, paired=True) == Refused("2 common seeds; the guard needs 3")
    assert convergence([1.0] * 3, [1.0, 2.0], 1, paired=False) == Refused("2 runs; the guard needs 3")
    with pytest.raises(ValueError, match="2 treatment and 3 reference values are no pairs"):
        convergence([1.0, 2.0], [1.0, 2.0, 3.0], 1, paired=True)
    with pytest.raises(ValueError, match=r"new\[0\] is inf"):
        convergence([math.inf, 1.0, 2.0], [1.0] * 3, 1, paired=True)


def test_at_the_tolerance_the_guard_passes_no_more_often_than_its_level():
    draws = np.random.default_rng(1)
    passed = [found(draws.normal(3.0, 1.0, 8), np.zeros(8), tolerance=3.0).word == "passed" for _ in range(1_000)]
    assert 0.02 <= np.mean(passed) <= 0.075
