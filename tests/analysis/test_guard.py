"""The convergence guard raises its alarm on both sides, and not much more often than it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.guard import olympic, paired_convergence, reference_convergence
from analysis.intervals import Refused


def test_the_best_and_the_worst_are_left_out() -> None:
    assert olympic([5.0, 1.0, 9.0, 6.0]) == 5.5
    assert olympic([1.0, 1.0, 1.0]) == 1.0


def test_the_guard_is_a_pooled_t_test_of_what_is_left() -> None:
    draws = np.random.default_rng(0)
    new, reference = draws.normal(100, 5, 6), draws.normal(102, 5, 14)
    guard = reference_convergence(new, reference)
    kept, kept_reference = np.sort(new)[1:-1], np.sort(reference)[1:-1]
    assert guard.p_faster == pytest.approx(stats.ttest_ind(kept, kept_reference, alternative="less").pvalue)
    assert guard.p_slower == pytest.approx(stats.ttest_ind(kept, kept_reference, alternative="greater").pvalue)
    assert (guard.new_mean, guard.reference_mean) == (olympic(new), olympic(reference))
    assert guard.passed == (min(guard.p_faster, guard.p_slower) > 0.05)
    assert reference_convergence(new[::-1], reference[::-1]) == guard


def test_faster_and_slower_both_fail_and_say_which() -> None:
    reference = [100, 101, 102, 103, 104, 105, 106, 107]
    faster, slower = ([value + shift for value in reference[2:6]] for shift in (-30, 30))
    assert reference_convergence(reference[2:6], reference).passed
    too_fast, too_slow = reference_convergence(faster, reference), reference_convergence(slower, reference)
    assert (too_fast.passed, too_slow.passed) == (False, False)
    assert too_fast.reason.startswith("faster than the reference: 73.5 against 103.5, p = ")
    assert too_slow.reason.startswith("slower than the reference: 133.5 against 103.5, p = ")
    assert (too_fast.p_faster, too_slow.p_slower) == pytest.approx((too_slow.p_slower, too_fast.p_faster))
    assert reference_convergence(faster, reference, alpha=1e-12).passed


def test_equal_runs_pass_and_different_constants_fail() -> None:
    same = reference_convergence([7.0] * 3, [7.0] * 6)
    assert (same.passed, same.p_faster, same.p_slower) == (True, 1.0, 1.0)
    other = reference_convergence([6.0] * 3, [7.0] * 6)
    assert (other.passed, other.p_faster, other.p_slower) == (False, 0.0, 1.0)


def test_too_few_runs_are_refused_with_the_reason() -> None:
    assert reference_convergence([1.0, 2.0], [1.0] * 9) == Refused("2 new runs; the guard needs 3")
    few = reference_convergence([1.0, 2.0, 3.0], [1.0] * 5)
    assert few == Refused("5 reference runs for 3 new ones; the guard needs 6")
    with pytest.raises(ValueError, match="nothing is left of 2 times"):
        olympic([1.0, 2.0])
    with pytest.raises(ValueError, match=r"new\[0\] is inf"):
        reference_convergence([math.inf, 1.0, 2.0], [1.0] * 6)


def test_runs_of_the_same_seeds_are_compared_as_pairs() -> None:
    draws = np.random.default_rng(2)
    reference = draws.normal(1000, 100, 8)
    noise = draws.normal(0, 1, 8)
    slower = paired_convergence(reference + 20 + noise, reference, tolerance=10)
    assert not slower.passed
    expected = stats.ttest_rel(reference + 20 + noise, reference, alternative="greater").pvalue
    assert (slower.p_slower, slower.p_faster) == pytest.approx((expected, 1 - expected))
    assert slower.reason.startswith("slower than the reference: ")
    assert not paired_convergence(reference - 20 + noise, reference, tolerance=10).passed
    # unpaired the spread of the seeds hides it
    assert reference_convergence((reference + 20 + noise)[:4], reference).passed


def test_a_difference_below_one_update_is_rounding_however_regular_it_is() -> None:
    reference = [1000.0, 1100.0, 900.0]
    assert paired_convergence([value + 1 for value in reference], reference, tolerance=16).passed
    assert not paired_convergence([value + 17 for value in reference], reference, tolerance=16).passed
    assert paired_convergence(reference, reference, tolerance=0).passed


def test_pairs_need_three_seeds_and_one_of_each() -> None:
    assert paired_convergence([1.0, 2.0], [1.0, 2.0], 1) == Refused("2 common seeds; the guard needs 3")
    with pytest.raises(ValueError, match="2 new and 3 reference runs"):
        paired_convergence([1.0, 2.0], [1.0, 2.0, 3.0], 1)


def test_false_alarms_are_as_frequent_as_the_docstring_says() -> None:
    draws = np.random.default_rng(1)
    studies, faster, slower = 1_500, 0, 0
    for _ in range(studies):
        guard = reference_convergence(draws.normal(size=5), draws.normal(size=10))
        faster += guard.p_faster <= 0.05
        slower += guard.p_slower <= 0.05
    assert 0.06 <= (faster + slower) / (2 * studies) <= 0.10
