"""The known answers: published data and closed forms with the figures that the statistics must give on them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from scipy import stats as scipy_stats

from analysis import stats
from analysis.curves import (
    crossing_at,
    losses_around,
    lowest_held,
    thinned_to_sparsest,
)

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed minus self-fertilised maize, eighths of an inch (Darwin 1876, in Fisher 1935)."""


def test_sign_flips_of_signed_ranks_are_wilcoxons_exact_test():
    ranks = stats.signed_ranks(DARWIN, [0] * 15)
    assert -ranks[ranks < 0].sum() == 24
    assert stats.sign_flip(ranks, 0 * ranks)[0] == 0.041259765625
    draws = np.random.default_rng(4)
    for n in (6, 8, 13):
        ours = draws.normal(0.4, 1, n)
        theirs = draws.normal(0, 1, n)
        ranks = stats.signed_ranks(ours, theirs)
        expected = scipy_stats.wilcoxon(ours, theirs, method="exact").pvalue
        assert stats.sign_flip(ranks, 0 * ranks)[0] == pytest.approx(expected, rel=1e-12)


def test_many_pairs_agree_with_scipy():
    draws = np.random.default_rng(4)
    for n in (17, 29, 60):
        ours = draws.normal(0.4, 1, n)
        theirs = draws.normal(0, 1, n)
        p, found = stats.sign_flip(ours, theirs)
        assert p == pytest.approx(scipy_stats.ttest_rel(ours, theirs).pvalue, abs=0.02)
        assert found.low < found.estimate < found.high


@pytest.mark.parametrize("n", [9, 20, 40])
def test_p_depends_neither_on_the_order_of_the_pairs_nor_on_the_arm_that_is_named_first(n):
    draws = np.random.default_rng(n)
    continuous = draws.normal(0.4, 1, (2, n))
    with_ties = draws.integers(0, 4, (2, n)).astype(float)
    for ours, theirs in (continuous, with_ties):
        p, found = stats.sign_flip(ours, theirs)
        for order in (np.arange(n)[::-1], draws.permutation(n)):
            shuffled_p, _ = stats.sign_flip(ours[order], theirs[order])
            other_p, mirrored = stats.sign_flip(theirs[order], ours[order])
            assert shuffled_p == p
            assert other_p == p
            assert mirrored.low == -found.high
        _, ratio = stats.sign_flip(ours + 9, theirs + 9, ratio=True)
        _, inverse = stats.sign_flip(theirs + 9, ours + 9, ratio=True)
        assert inverse.low == pytest.approx(1 / ratio.high, rel=1e-12)


def test_students_interval_of_darwins_maize():
    found = stats.t_interval(DARWIN)
    assert found.estimate == 314 / 15
    assert found.n == 15
    assert [found.low, found.high] == pytest.approx([0.0312, 41.8355], abs=5e-5)
    assert math.isnan(stats.t_interval([1.0]).low)
    assert math.isnan(stats.t_interval([]).estimate)


def test_holm():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-15)
    assert stats.holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06], rel=1e-15)
    assert stats.holm([0.01, math.nan]) == pytest.approx([0.02, 1.0])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_holm_rejects_what_its_step_down_procedure_rejects(p_values):
    order = np.argsort(p_values, kind="stable")
    rejected = np.zeros(len(p_values), bool)
    for rank, place in enumerate(order):
        if not p_values[place] * (len(p_values) - rank) <= 0.05:
            break
        rejected[place] = True
    assert ((stats.holm(p_values) <= 0.05) == rejected).all()


def test_minimum_number_of_pairs_of_a_family():
    for number_of_tests, pairs in ((1, 6), (2, 7), (3, 7), (4, 8), (6, 8), (8, 9), (10, 9), (12, 9)):
        assert stats.minimum_pairs(number_of_tests) == pairs
    for pairs, p in ((1, 1.0), (5, 0.0625), (6, 0.03125)):
        assert stats.smallest_p(pairs) == p


def test_smallest_difference_that_six_pairs_find():
    # six pairs are rejected where all differences have one sign: Phi(d)^6 = 0.8 (a t test would find 1.43)
    assert stats.detectable_effect(6) == pytest.approx(scipy_stats.norm.ppf(0.8 ** (1 / 6)), abs=0.03)
    assert stats.detectable_effect(5) == math.inf


def test_the_smallest_difference_is_that_of_published_tables_of_the_t_test():
    # 34 pairs find half a standard deviation in 80 % of studies, and 33 do not (Cohen 1988; G*Power)
    assert stats.detectable_effect(34) < 0.5 < stats.detectable_effect(33)


@pytest.mark.parametrize(
    ("n", "alpha"), [(9, 0.05), (11, 0.05 / 20), *slow((14, 0.05 / 3), (16, 0.05 / 20), (20, 0.05 / 20))]
)
def test_the_smallest_difference_is_found_in_80_percent_of_studies(n, alpha):
    effect = stats.detectable_effect(n, alpha)
    draws = np.random.default_rng([n, 1]).normal(effect, 1, size=(1_200, n))
    num_found = 0
    for differences in draws:
        p, _ = stats.sign_flip(differences, np.zeros(n))
        num_found += p < alpha
    assert num_found / 1_200 == pytest.approx(0.8, abs=0.04)  # three standard errors


def test_no_difference_is_the_smallest_where_no_word_is_possible():
    assert stats.detectable_effect(5, 0.2) == math.inf  # a verdict needs six pairs
    assert stats.detectable_effect(9, 0.05 / 20) == math.inf  # 2 / 2^9 is above it
    assert math.isfinite(stats.detectable_effect(10, 0.05 / 20))


@pytest.mark.parametrize(
    ("count", "n", "share"),
    [(0, 8, 1 - 0.05 ** (1 / 8)), (0, 6, 0.393038), (1, 8, 0.470679), (2, 10, 0.506901), (8, 8, 1)],
)
def test_what_no_seed_or_few_did_may_be_done_by_a_share_of_all_seeds(count, n, share):
    assert stats.most_of(count, n) == pytest.approx(share, abs=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_sign_flip_test_of_yes_and_no_is_mcnemars_exact_test(pairs):
    ours, theirs = np.array(pairs, float).T
    p, found = stats.mcnemar(ours, theirs)
    assert found.estimate == pytest.approx(ours.mean() - theirs.mean())
    if p == p:
        assert p == pytest.approx(stats.sign_flip(ours, theirs)[0])
        assert -1 <= found.low <= found.estimate <= found.high <= 1
        assert (not found.low <= 0 <= found.high) == (p < 0.05)


@pytest.mark.parametrize("n", [6, 8, 10])
def test_the_level_of_the_tests_holds_in_null_studies(n):
    draws = np.random.default_rng(n).normal(size=(1_000, n))
    zeros = np.zeros(n)
    num_different = 0
    num_equivalent = 0
    for differences in draws:
        p, _ = stats.sign_flip(differences, zeros)
        num_different += p < 0.05
        p, *_ = stats.equivalence(differences + 1.0, zeros, 1.0, 0.9)
        num_equivalent += p < 0.05
    assert num_different <= 65
    assert num_equivalent <= 65


CURVE = np.array([0.0, 10.0, 20.0, 30.0]), np.array([6.0, 4.0, 5.0, 4.5])


def test_a_loss_is_that_of_a_look_within_an_update_or_lies_between_those_of_the_looks_around_it():
    assert losses_around(CURVE, 11.0, 1.0) == (4.0, 4.0)
    assert losses_around(CURVE, 7.0, 1.0) == (4.0, 6.0)
    assert losses_around(CURVE, 25.0, 1.0) == (4.5, 5.0)
    for position in (15.0, 40.0):  # it rises from 4 to 5; and nothing is known after the last look
        assert np.isnan(losses_around(CURVE, position, 1.0)).all()


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=8), st.floats(0.0, 9.0))
def test_the_lowest_held_loss_is_the_lowest_target_that_is_reached(losses, target):
    curve = np.arange(len(losses), dtype=float), np.array(losses)
    assert math.isfinite(crossing_at(curve, target)) == (target >= lowest_held(curve))


@given(st.lists(st.integers(2, 40), min_size=2, max_size=3), st.lists(st.floats(5.0, 50.0), min_size=3, max_size=3))
def test_no_curve_keeps_more_looks_than_the_sparsest(numbers, ends):
    looks = []
    for number, end in zip(numbers, ends, strict=False):
        looks.append(np.linspace(0.0, end, number))
    common_end = min(x[-1] for x in looks)
    fewest = min((x <= common_end).sum() for x in looks)
    kept_curves = thinned_to_sparsest([(x, x) for x in looks])
    for x, (kept, values) in zip(looks, kept_curves, strict=True):
        assert set(kept) <= set(x)
        assert (kept == values).all()
        assert kept[-1] == x[-1]
        assert (kept <= common_end).sum() <= fewest + 1
