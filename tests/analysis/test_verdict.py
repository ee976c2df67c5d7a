"""Families, sizes of studies and the words of a verdict follow their rules."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analysis.statistics.equivalence import Equivalence, tost_paired
from analysis.statistics.intervals import Interval
from analysis.statistics.paired import paired_difference, sign_flip
from analysis.statistics.power import (
    detectable_effect,
    holm,
    least_p_holm,
    minimum_pairs,
    smallest_p,
)
from analysis.statistics.verdict import margin_too_wide, nothing_to_find, verdict

examples = settings(derandomize=True, deadline=None, max_examples=60)

# numbers whose sums are exact in binary, so that "equal" can mean equal
dyadic = st.integers(-4096, 4096).map(lambda k: k / 64)
integers = st.lists(st.integers(-50, 50), min_size=1, max_size=10)
probabilities = st.lists(st.floats(0, 1), min_size=0, max_size=9)


@given(probabilities)
@examples
def test_holm_is_monotone_and_never_below_p(p_values):
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    by_p = [q for _, q in sorted(zip(p_values, adjusted, strict=True))]
    assert by_p == sorted(by_p)


@given(probabilities, st.randoms(use_true_random=False))
@examples
def test_holm_rejects_what_its_step_down_procedure_rejects_in_any_order(p_values, random):
    adjusted = holm(p_values)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
            if (len(p_values) - rank) * p_values[index] > alpha:
                break
            rejected.add(index)
        assert {index for index, q in enumerate(adjusted) if q <= alpha} == rejected
    order = list(range(len(p_values)))
    random.shuffle(order)
    assert holm([p_values[index] for index in order]) == [adjusted[index] for index in order]


@pytest.mark.parametrize(("n", "alpha"), [(6, 0.05), (8, 0.05 / 3), (14, 0.05)])
def test_the_sign_flip_test_finds_the_detectable_effect_in_80_percent_of_studies(n, alpha):
    draws = np.random.default_rng(11).normal(detectable_effect(n, alpha=alpha), 1.0, (1_500, n))
    found = np.mean([sign_flip(differences, np.random.default_rng(7)) < alpha for differences in draws])
    assert found == pytest.approx(0.8, abs=0.045)  # three standard errors of these studies and of those in it


def test_no_effect_is_detectable_where_nothing_can_be_rejected():
    assert detectable_effect(5) == math.inf
    assert detectable_effect(6, alpha=0.05 / 2) == math.inf


@pytest.mark.parametrize(("comparisons", "alpha"), list(itertools.product((1, 3, 12), (0.01, 2 / 2**6, 0.05, 0.1))))
def test_the_minimum_number_of_pairs_can_reject_and_one_less_cannot(comparisons, alpha):
    n = minimum_pairs(comparisons, alpha)
    family = [smallest_p(n)] + [1.0] * (comparisons - 1)
    assert min(holm(family)) < alpha
    assert min(holm([smallest_p(n - 1)] + [1.0] * (comparisons - 1))) >= alpha


def within(low, high, margin=0.1, level=0.9, alpha=0.05):
    """An equivalence test with that interval."""
    inside = -margin < low and high < margin
    p = alpha / 2 if inside else 2 * alpha
    return Equivalence(p, Interval((low + high) / 2, low, high, level, 8), margin, inside)


VERDICTS = [
    # n, estimate, p_Holm, equivalence test, its p_Holm, lower is better -> word
    (5, -1.0, 0.0, within(-1.1, -0.9, 2.0), 0.01, True, "too few seeds"),
    (0, math.nan, math.nan, None, 1.0, True, "too few seeds"),
    (6, 0.0, 0.9, within(-0.1, 0.1, 0.2), 0.01, True, "equivalent"),
    (8, 0.05, 0.008, within(0.03, 0.07), 0.01, True, "different but negligible"),
    (8, -0.05, 0.008, within(-0.07, -0.03, 0.05), 0.5, True, "better"),
    (8, 0.05, 0.008, within(0.03, 0.07, 0.05), 0.5, True, "worse"),
    (8, 0.05, 0.008, within(0.03, 0.07, 0.05), 0.5, False, "better"),
    (8, -0.05, 0.008, None, 1.0, False, "worse"),
    (8, -0.05, 0.008, None, 1.0, True, "better"),
    (8, 0.05, 0.2, within(-0.2, 0.3), 0.9, True, "undecided"),
    (8, 0.0, 1.0, None, 0.01, True, "undecided"),  # without a margin nothing is equivalent
    (8, 0.05, 0.05, None, 1.0, True, "undecided"),  # p = alpha is not below it
    (8, 0.0, 0.9, within(-0.05, 0.05), 0.05, True, "undecided"),  # nor is the equivalence test's
    (8, 0.0, 0.9, within(-0.2, 0.05), 0.04, True, "equivalent"),  # found after others of its family
]


@pytest.mark.parametrize(("n", "estimate", "p", "equivalence", "p_equivalence", "lower", "word"), VERDICTS)
def test_the_verdict_follows_its_rules(n, estimate, p, equivalence, p_equivalence, lower, word):
    assert verdict(n, estimate, p, equivalence, p_equivalence, lower_is_better=lower).word == word


def test_a_verdict_says_why():
    few = verdict(5, 0.0, 0.5, within(-1, 1, 1.0))
    assert few.reason == "5 of the 6 pairs that a verdict needs; the smallest p of 5 pairs is 0.0625"
    assert verdict(7, 0.0, 0.5, None, minimum=8).word == "too few seeds"
    open_question = verdict(8, 0.1, 0.3, within(-0.1, 0.3, 0.05))
    found = "with 8 pairs this test at 0.05 finds a difference of 1.18 SD of the differences in 80 % of studies"
    assert open_question.reason == f"p_Holm = 0.300; {found}"
    same = verdict(8, 0.01, 0.3, within(-0.01, 0.02, 0.05), 0.01)
    assert same.reason == "the 90 % interval [-0.0100, 0.0200] lies inside ±0.0500; p_Holm = 0.300"
    of_three = verdict(8, 0.01, 0.3, within(-0.01, 0.02, 0.05, 1 - 0.1 / 3), 0.01)
    assert of_three.reason.startswith("the 96.7 % interval")
    after_others = verdict(8, 0.01, 0.3, within(-0.01, 0.07, 0.05), 0.04)
    assert after_others.reason == "p_Holm of equivalence within ±0.0500 = 0.0400 < 0.05; p_Holm = 0.300"


def test_what_could_have_been_found_is_said_for_the_level_that_holm_tests_at():
    of_three = verdict(8, 0.1, 0.3, None, num_comparisons=3)
    effect = detectable_effect(8, alpha=0.05 / 3)
    assert effect > 1.4 > detectable_effect(8)
    assert f"this test at 0.05 / 3 finds a difference of {effect:.2f} SD" in of_three.reason
    none = verdict(6, 0.1, 0.0625, None, num_comparisons=2, least=0.0625)
    told = "no difference of any size can be found with 6 pairs and 2 comparisons (no p_Holm is below 0.0625)"
    assert (none.word, none.reason) == ("undecided", f"p_Holm = 0.0625; {told}")


@given(st.integers(6, 12), st.integers(1, 40), st.sampled_from([0.1, 0.05, 0.01, 2 / 2**7]))
@examples
def test_nothing_can_be_found_below_the_minimum_of_pairs_and_something_from_there_on(n, comparisons, alpha):
    least = least_p_holm([n] * comparisons)[0]
    assert (nothing_to_find(n, comparisons, least, alpha) == "") == (n >= minimum_pairs(comparisons, alpha))


def test_a_test_with_more_pairs_leaves_the_others_of_its_family_a_larger_share():
    assert least_p_holm([6, 7]) == [2 / 64, 2 / 64]  # 6 pairs alone could not: 2 x 2 / 64
    assert least_p_holm([6, 0]) == [4 / 64, 1.0]


def test_a_margin_wider_than_half_of_the_improvement_is_refused():
    assert margin_too_wide(0.5, 1.0) == ""
    assert margin_too_wide(0.05, None) == ""
    assert "is 51 % of the reference's improvement" in margin_too_wide(0.51, 1.0)
    assert "did not improve" in margin_too_wide(0.05, 0.0)
    assert "did not improve" in margin_too_wide(0.05, -1.0)


@given(st.lists(st.tuples(dyadic, dyadic), min_size=6, max_size=9), st.sampled_from([None, 0.5, 10.0]))
@examples
def test_swapped_labels_and_another_direction_swap_better_and_worse(pairs, margin):
    turn = {"better": "worse", "worse": "better"}
    ours, theirs = zip(*pairs, strict=True)
    words = []
    for a, b, lower in ((ours, theirs, True), (theirs, ours, True), (theirs, ours, False)):
        result = paired_difference(a, b, np.random.default_rng(7))
        assume(result.p is not None)
        estimate = result.difference.estimate
        tested = None if margin is None else tost_paired(a, b, margin)
        p = 1.0 if tested is None else tested.p
        words.append(verdict(result.n, estimate, result.p, tested, p, lower_is_better=lower).word)
    assert words[1] == turn.get(words[0], words[0])
    assert words[2] == words[0]
