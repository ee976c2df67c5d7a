"""The known answers: published data and closed forms with the figures that the statistics must give on them."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics.across_tasks import iqm, mean_improvement, performance_score
from analysis.statistics.equivalence import tost_independent, tost_paired
from analysis.statistics.paired import paired_difference, sign_flip, signed_ranks
from analysis.statistics.power import (
    detectable_effect,
    holm,
    minimum_pairs,
    smallest_p,
)
from analysis.statistics.time_to_target import restricted_times
from analysis.statistics.wins import mcnemar, mcnemar_interval, most_of, probability_of_improvement

INF = math.inf

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed minus self-fertilised maize, eighths of an inch (Darwin 1876, in Fisher 1935)."""


def untouched():
    """A generator whose state `test_small_samples_draw_nothing` checks."""
    return np.random.default_rng(0)


def test_darwins_maize_gives_fishers_1726_of_32768_sign_patterns():
    assert sum(DARWIN) == 314
    assert Fraction(sign_flip(DARWIN, untouched())) == Fraction(1726, 32768)
    assert sign_flip(DARWIN, untouched()) == 0.05267333984375


def test_sign_flips_of_signed_ranks_are_wilcoxons_exact_test():
    ranks = signed_ranks(DARWIN, [0] * 15)
    assert -ranks[ranks < 0].sum() == 24
    assert sign_flip(ranks, untouched()) == 0.041259765625
    draws = np.random.default_rng(4)
    for n in (6, 8, 13, 20):
        ours, theirs = draws.normal(0.4, 1, n), draws.normal(0, 1, n)
        expected = stats.wilcoxon(ours, theirs, method="exact")
        ranks = signed_ranks(ours, theirs)
        assert sign_flip(ranks, untouched()) == pytest.approx(expected.pvalue, rel=1e-12)
        assert min(ranks[ranks > 0].sum(), -ranks[ranks < 0].sum()) == expected.statistic


def test_infinite_values_have_the_ranks_of_the_largest_differences():
    ours, theirs = (
        np.array([INF, INF, 1.0, 5.0, 3.0, 4.0, 1.0, 9.0]),
        np.array([1.0, INF, INF, 3.0, 4.0, 0.5, 1.0, 2.0]),
    )
    assert signed_ranks(ours, theirs).tolist() == [5.5, 0.0, -5.5, 2.0, -1.0, 3.0, 0.0, 4.0]
    far = np.where(np.isinf(ours), 100.0, ours), np.where(np.isinf(theirs), 100.0, theirs)
    sized = stats.wilcoxon(*far, zero_method="wilcox", method=stats.PermutationMethod(n_resamples=10_000))
    assert sign_flip(signed_ranks(ours, theirs), untouched()) == pytest.approx(sized.pvalue)
    assert signed_ranks([INF, -INF], [INF, -INF]).tolist() == [0.0, 0.0]


def test_darwins_maize_by_student():
    result = paired_difference(DARWIN, [0] * 15, untouched())
    assert result.n == 15
    assert result.effect is not None
    assert result.effect * math.sqrt(15) == pytest.approx(2.147987, abs=5e-7)
    assert result.t_p == pytest.approx(0.049703, abs=5e-7)
    assert result.difference.estimate == 314 / 15
    assert [result.difference.low, result.difference.high] == pytest.approx([0.0312, 41.8355], abs=5e-5)
    wilcoxon = stats.wilcoxon(DARWIN, method="exact")  # that the data are the published ones
    assert (wilcoxon.statistic, wilcoxon.pvalue) == (24, pytest.approx(0.04126, abs=5e-6))


def test_tost_of_pingouins_example():
    a, b = [4, 7, 8, 6, 3, 2], [6, 8, 7, 10, 11, 9]
    independent = tost_independent(a, b, margin=1)
    paired = tost_paired(a, b, margin=0.5)
    assert independent.p == pytest.approx(0.965097, abs=5e-7)
    assert paired.p == pytest.approx(0.954854, abs=5e-7)
    assert not independent.equivalent
    assert not paired.equivalent


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-15)
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06], rel=1e-15)


def test_minimum_number_of_pairs_of_a_family():
    assert [minimum_pairs(m) for m in (1, 2, 3, 4, 6, 8, 10, 12)] == [6, 7, 7, 8, 8, 9, 9, 9]
    assert [smallest_p(n) for n in (1, 5, 6)] == [1.0, 0.0625, 0.03125]


def test_smallest_difference_that_six_pairs_find():
    # six pairs are rejected where all differences have one sign: Phi(d)^6 = 0.8 (a t test would find 1.43)
    assert detectable_effect(6) == pytest.approx(stats.norm.ppf(0.8 ** (1 / 6)), abs=0.03)


def test_restricted_mean_with_a_common_budget():
    with_inf = restricted_times([3, 5, 7, 9, INF, INF], [10] * 6, 10, untouched())
    assert with_inf.treatment_mean == 44 / 6


def test_iqm_and_probability_of_improvement_of_rliables_fixture():
    x, y = [[1, 2], [2, 2], [1, 1], [2, 1]], [[1, 1], [2, 2], [3, 3]]
    assert (iqm(x), iqm(y)) == (1.5, 2.0)
    assert (np.mean(x), np.mean(y)) == (1.5, 2.0)
    assert mean_improvement(x, y) == pytest.approx(1 / 3, rel=1e-15)
    assert mean_improvement(y, x) == pytest.approx(2 / 3, rel=1e-15)


def test_probability_of_improvement_of_one_task():
    assert probability_of_improvement([1, 2, 3, 4], [2, 3, 5, 6]) == 0.25


def test_algoperf_score():
    modes = np.array([[100, 50, 30], [200, 40, INF]])
    assert performance_score(modes.T) == pytest.approx([0.972222, 0.555556], abs=5e-7)


def test_small_samples_draw_nothing():
    generator = untouched()
    before = generator.bit_generator.state
    sign_flip(DARWIN * 2, generator)
    assert generator.bit_generator.state == before


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_sign_flip_test_of_yes_and_no_is_mcnemars_exact_test(pairs):
    found = sign_flip([float(ours) - float(theirs) for ours, theirs in pairs], np.random.default_rng(0))
    discordant = [ours for ours, theirs in pairs if ours != theirs]
    expected = stats.binomtest(sum(discordant), len(discordant)).pvalue if discordant else 1.0
    assert found == pytest.approx(expected)
    assert mcnemar(*zip(*pairs, strict=True)) == (pytest.approx(expected) if discordant else None)


@pytest.mark.parametrize(
    ("count", "n", "share"),
    [(0, 8, 1 - 0.05 ** (1 / 8)), (0, 6, 0.393038), (1, 8, 0.470679), (2, 10, 0.506901), (8, 8, 1)],
)
def test_what_no_seed_or_few_did_may_be_done_by_a_share_of_all_seeds(count, n, share):
    assert most_of(count, n) == pytest.approx(share, abs=1e-6)
    exact = stats.binomtest(count, n, alternative="less").proportion_ci(0.95, method="exact")
    assert most_of(count, n) == pytest.approx(exact.high)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.integers(1, 4))
def test_the_interval_of_yes_and_no_leaves_out_0_where_mcnemars_test_says_so(pairs, divisor):
    ours, theirs = zip(*pairs, strict=True)
    found, p = mcnemar_interval(ours, theirs, 0.05, divisor), mcnemar(ours, theirs)
    assert found.estimate == pytest.approx(np.mean(ours) - np.mean(theirs))
    if p is None:
        assert (found.low, found.high) == (None, None)
        return
    assert found.low is not None
    assert found.high is not None
    assert -1 <= found.low <= found.estimate <= found.high <= 1
    assert (not found.low <= 0 <= found.high) == (divisor * p < 0.05)


def test_mcnemars_test_refuses_what_is_neither_yes_nor_no():
    with pytest.raises(ValueError, match="yes"):
        mcnemar([0.5], [1.0])
