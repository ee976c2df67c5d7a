"""Exact tests hold their level whatever the data, mathematics survives rounding, and the verdict follows its rules."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics.equivalence import tost_independent, tost_paired
from analysis.statistics.intervals import Interval, finite_table, t_interval
from analysis.statistics.paired import EXACT_PAIRS, paired_difference, ratio_interval, shift_interval, sign_flip
from analysis.statistics.power import (
    detectable_effect,
    holm,
    minimum_pairs,
    smallest_p,
)
from analysis.statistics.verdict import verdict
from analysis.statistics.wins import probability_of_improvement

examples = settings(derandomize=True, deadline=None, max_examples=60)
quick = settings(derandomize=True, deadline=None, max_examples=25)

# numbers whose sums are exact in binary, so that "equal" can mean equal
dyadic = st.integers(-4096, 4096).map(lambda k: k / 64)
integers = st.lists(st.integers(-50, 50), min_size=1, max_size=10)


def generator():
    return np.random.default_rng(7)


def exact_p(differences):
    """The definition, in rational numbers."""
    observed = abs(sum(differences))
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    hits = sum(abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed for signs in patterns)
    return Fraction(hits, len(patterns))


@given(integers)
@examples
def test_sign_flip_is_the_count_of_all_patterns(differences):
    assert Fraction(sign_flip(differences, generator())) == exact_p([Fraction(d) for d in differences])


@given(integers, st.sampled_from([0.1, 1 / 3, 1e-9, 7e200, 1e-300]))
@examples
def test_sign_flip_counts_sums_as_equal_that_only_rounding_tells_apart(differences, unit):
    assert sign_flip([unit * d for d in differences], generator()) == sign_flip(differences, generator())


def test_sums_that_are_equal_in_mathematics_are_equal():
    assert 0.1 + 0.2 != 0.3
    assert sign_flip([0.1, 0.2, -0.3], generator()) == 1.0
    assert sign_flip([0.1, 0.2, 0.3, -0.6, 0.0], generator()) == 1.0
    # of the 8 patterns of .1, .2, .3 those with sums ±.6 alone are as far as .1 + .2 + .3
    assert sign_flip([0.1, 0.2, 0.3], generator()) == 2 / 8
    assert sign_flip([-0.1, 0.2, 0.3], generator()) == 4 / 8
    assert sign_flip([0.1, 0.2, -0.3, 0.4], generator()) == float(exact_p([Fraction(d) for d in (1, 2, -3, 4)]))


@given(st.lists(dyadic, min_size=1, max_size=EXACT_PAIRS), st.randoms(use_true_random=False))
@quick
def test_sign_flip_does_not_see_the_order_nor_the_direction(differences, random):
    p = sign_flip(differences, generator())
    shuffled = list(differences)
    random.shuffle(shuffled)
    assert sign_flip(shuffled, generator()) == p
    assert sign_flip([-d for d in differences], generator()) == p
    assert smallest_p(len(differences)) <= p <= 1


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
@quick
def test_sign_flip_rejects_at_most_alpha_of_the_patterns_of_any_magnitudes(magnitudes):
    patterns = itertools.product((-1, 1), repeat=len(magnitudes))
    p_values = [sign_flip(np.multiply(signs, magnitudes), generator()) for signs in patterns]
    # the share of patterns with p <= alpha is at most alpha, at every alpha that occurs
    for alpha in set(p_values):
        assert sum(p <= alpha for p in p_values) / len(p_values) <= alpha


def test_sums_that_differ_by_a_billionth_are_not_equal():
    assert sign_flip([1.0, 1e-9], generator()) == 2 / 4
    assert sign_flip([1.0, -1e-9], generator()) == 4 / 4


def test_zero_differences_take_part():
    assert sign_flip([0.0] * 8, generator()) == 1.0
    assert sign_flip([-0.0, 0.0], generator()) == 1.0
    # 2 of the 2^6 patterns of the others are as far; each zero doubles both
    assert sign_flip([1, 2, 3, 4, 5, 6, 0, 0], generator()) == 2 / 64


def test_sign_flip_agrees_with_scipy():
    differences = generator().normal(0.4, 1, 11)
    theirs = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip(differences, generator()) == pytest.approx(theirs.pvalue, rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.4, 0.7])
def test_many_pairs_are_sampled_and_agree_with_the_normal_limit(shift):
    differences = generator().normal(shift, 1, 60)
    p = sign_flip(differences, generator())
    z = abs(differences.sum()) / math.sqrt((differences**2).sum())
    assert p == pytest.approx(2 * stats.norm.sf(z), abs=0.012)
    assert p * 10_000 == pytest.approx(round(p * 10_000))
    assert p >= 1 / 10_000
    assert sign_flip(differences[::-1], generator()) == p  # the same draws, whatever the order of the seeds


def test_the_largest_exact_count_and_the_sampled_one_agree():
    differences = generator().normal(0.3, 1, EXACT_PAIRS)
    exact = sign_flip(differences, generator())
    sampled = sign_flip([*differences, 0.0], generator())  # a zero changes no share, but 31 pairs are sampled
    assert exact != sampled
    assert sampled == pytest.approx(exact, abs=5 * math.sqrt(exact / 10_000))


@given(st.lists(st.tuples(dyadic, dyadic), min_size=2, max_size=12), dyadic, st.randoms(use_true_random=False))
@examples
def test_a_paired_difference_turns_shifts_and_forgets_the_order(pairs, constant, random):
    treatment, reference = (list(side) for side in zip(*pairs, strict=True))
    result = paired_difference(treatment, reference, generator())
    assume(not result.nothing_varied)
    swapped = paired_difference(reference, treatment, generator())
    assert swapped.difference.estimate == -result.difference.estimate
    assert (swapped.difference.low, swapped.difference.high) == (-result.difference.high, -result.difference.low)
    assert swapped.effect == (None if result.effect is None else -result.effect)
    assert (swapped.p, swapped.t_p) == (result.p, result.t_p)

    shifted = paired_difference([value + constant for value in treatment], reference, generator())
    assert shifted.difference.estimate == pytest.approx(result.difference.estimate + constant, abs=1e-9)
    width = result.difference.high - result.difference.low
    assert shifted.difference.high - shifted.difference.low == pytest.approx(width, abs=1e-9)
    both = paired_difference([a + constant for a in treatment], [b + constant for b in reference], generator())
    assert (both.difference, both.effect, both.p) == (result.difference, result.effect, result.p)

    random.shuffle(pairs)
    assert paired_difference(*zip(*pairs, strict=True), generator()) == result  # bit for bit, the interval included


def test_the_order_of_seeds_changes_no_bit_of_ordinary_losses_either():
    ours, theirs = generator().normal(6, 0.1, (2, 9))
    order = generator().permutation(9)
    assert paired_difference(ours[order], theirs[order], generator()) == paired_difference(ours, theirs, generator())


def test_the_t_test_is_scipys():
    ours, theirs = generator().normal(6, 0.1, (2, 9))
    result = paired_difference(ours, theirs, generator())
    scipys = stats.ttest_rel(ours, theirs)
    interval = scipys.confidence_interval(0.95)
    assert result.t_p == pytest.approx(scipys.pvalue)
    assert [result.difference.low, result.difference.high] == pytest.approx([interval.low, interval.high])
    ninety = scipys.confidence_interval(0.9)
    assert [result.interval90.low, result.interval90.high] == pytest.approx([ninety.low, ninety.high])
    assert (result.difference.level, result.interval90.level) == (0.95, 0.9)
    assert result.effect == pytest.approx(scipys.statistic / 3)


def test_one_pair_and_equal_differences_leave_out_what_is_not_defined():
    one = paired_difference([1.0], [2.0], generator())
    assert (one.difference, one.effect, one.t_p, one.p) == (Interval(-1.0, None, None, 0.95, 1), None, None, 1.0)
    assert not one.nothing_varied
    same = paired_difference([3.0, 4.0], [1.0, 2.0], generator())
    assert (same.difference, same.effect, same.t_p) == (Interval(2.0, None, None, 0.95, 2), None, None)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_differences_that_do_not_vary_measure_nothing(shift):
    reference = [6.1, 6.2, 6.3, 5.9, 6.7, 6.4, 6.6, 5.3]
    treatment = [value + shift for value in reference]  # with 0.1 they are equal but for rounding
    result = paired_difference(treatment, reference, generator())
    assert result.nothing_varied
    assert (result.p, result.t_p, result.effect) == (None, None, None)
    assert (result.difference.low, result.interval90.high) == (None, None)
    equivalence = tost_paired(treatment, reference, margin=0.5)
    assert (equivalence.p, equivalence.equivalent) == (None, False)
    assert (equivalence.interval.low, equivalence.interval.high) == (None, None)


NOT_NUMBERS = [
    (lambda: sign_flip([1.0, math.nan], generator()), r"differences\[1\] is nan"),
    (lambda: sign_flip([], generator()), "must be a list of numbers"),
    (lambda: t_interval([[1.0]]), r"shape \(1, 1\)"),
    (lambda: t_interval([1.0, None]), r"values\[1\] is nan"),
    (lambda: t_interval([1.0], level=95), "level must lie between 0 and 1, got 95"),
    (lambda: paired_difference([1.0, math.inf], [1.0, 2.0], generator()), r"treatment\[1\] is inf; compare runs"),
    (lambda: paired_difference([1.0], [1.0, 2.0], generator()), "1 treatment and 2 reference values are no pairs"),
    (lambda: tost_paired([1.0, 2.0], [1.0, 2.0], margin=0.0), "margin must be a number above 0"),
    (lambda: tost_paired([1.0, 2.0], [1.0, 2.0], margin=math.nan), "margin must be a number above 0"),
    (lambda: tost_independent([1.0, 2.0], [1.0, -math.inf], margin=1.0), r"reference\[1\] is -inf"),
    (lambda: probability_of_improvement([math.nan], [1.0]), r"x\[0\] is nan"),
    (lambda: holm([0.5, math.nan]), "between 0 and 1, got nan"),
    (lambda: holm([1.5]), "between 0 and 1, got 1.5"),
    (lambda: smallest_p(0), "n must be 1 or more"),
    (lambda: minimum_pairs(0), "num_comparisons must be 1 or more"),
    (lambda: detectable_effect(1), "n must be 2 or more"),
    (lambda: finite_table([1.0], "table", "seeds", "tasks"), "a table of seeds x tasks"),
    (lambda: finite_table([[1.0, math.nan]], "table", "seeds", "tasks"), r"table\[0, 1\] is nan"),
    (lambda: verdict(8, math.nan, 0.5, None), "finite number, got nan"),
    (lambda: verdict(8, 0.1, math.nan, None), "p_holm lies between 0 and 1"),
    (lambda: verdict(8, 0.1, 0.5, None, math.nan), "p_equivalence lies between 0 and 1"),
]


@pytest.mark.parametrize(("call", "message"), NOT_NUMBERS, ids=[message for _, message in NOT_NUMBERS])
def test_what_cannot_be_used_is_refused_with_a_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()


SIZES = (6, 8, 10)
STUDIES = 2_000


def null_pairs(n, seed):
    """Losses of `STUDIES` studies: a seed's own level and exchangeable noise, so that differences are normal."""
    draws = np.random.default_rng(seed)
    level = draws.normal(6, 0.2, (STUDIES, n))
    return level + draws.normal(0, 0.1, (STUDIES, n)), level + draws.normal(0, 0.1, (STUDIES, n))


def test_null_studies_are_rejected_at_the_nominal_level():
    all_by_t = 0
    for n in SIZES:
        results = [paired_difference(a, b, generator()) for a, b in zip(*null_pairs(n, seed=n), strict=True)]
        by_signs = sum(result.p <= 0.05 for result in results)
        by_t = sum(result.t_p <= 0.05 for result in results)
        missed = sum(not result.difference.low <= 0 <= result.difference.high for result in results)
        # p takes the values 2 k / 2^n, so the level is the largest of them that is not above 0.05
        level = math.floor(0.05 * 2 ** (n - 1)) / 2 ** (n - 1)
        assert level <= 0.05
        assert abs(by_signs / STUDIES - level) <= 3 * math.sqrt(level * (1 - level) / STUDIES)
        assert abs(by_t / STUDIES - 0.05) <= 3 * math.sqrt(0.05 * 0.95 / STUDIES)
        assert missed == by_t
        all_by_t += by_t
    assert 0.04 <= all_by_t / (len(SIZES) * STUDIES) <= 0.06


@pytest.mark.parametrize("n", SIZES)
def test_equivalence_at_the_margin_itself_is_found_in_at_most_alpha_of_the_studies(n):
    margin = 0.2
    found = inside = 0
    for a, b in zip(*null_pairs(n, seed=100 + n), strict=True):
        result = tost_paired(a + margin, b, margin)
        found += result.equivalent
        inside += -margin < result.interval.low and result.interval.high < margin
    assert found == inside
    assert found / STUDIES <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def test_equivalence_is_two_one_sided_t_tests():
    ours, theirs = generator().normal(6, 0.1, (2, 8))
    result = tost_paired(ours, theirs, 0.1)
    above = stats.ttest_1samp(ours - theirs, 0.1, alternative="less").pvalue
    below = stats.ttest_1samp(ours - theirs, -0.1, alternative="greater").pvalue
    assert result.p == pytest.approx(max(above, below))
    unpaired = tost_independent(ours, theirs[:6], 0.1)
    sides = [
        stats.ttest_ind(ours + by, theirs[:6], alternative=way).pvalue for by, way in ((-0.1, "less"), (0.1, "greater"))
    ]
    assert unpaired.p == pytest.approx(max(sides))
    interval = stats.ttest_ind(ours, theirs[:6]).confidence_interval(0.9)
    assert [unpaired.interval.low, unpaired.interval.high] == pytest.approx([interval.low, interval.high])


def test_one_pair_is_not_equivalent():
    one = tost_paired([6.0], [6.0], margin=1.0)
    assert (one.p, one.equivalent) == (None, False)
    assert tost_independent([6.0], [6.0, 6.0], margin=1.0).p is None
    assert tost_independent([6.0, 6.0], [6.0, 6.0], margin=1.0).p is None


@given(st.lists(st.tuples(dyadic, dyadic), min_size=2, max_size=9))
@examples
def test_equivalence_does_not_see_which_is_which(pairs):
    ours, theirs = zip(*pairs, strict=True)
    result, swapped = tost_paired(ours, theirs, 1.0), tost_paired(theirs, ours, 1.0)
    assert (result.p, result.equivalent) == (swapped.p, swapped.equivalent)


@given(integers, integers)
@examples
def test_the_probability_of_improvement_is_mann_whitneys_and_swaps(x, y):
    u = stats.mannwhitneyu(x, y, method="asymptotic").statistic
    assert probability_of_improvement(x, y) == pytest.approx(u / (len(x) * len(y)))
    assert probability_of_improvement(y, x) == pytest.approx(1 - probability_of_improvement(x, y))


def subset_means(values):
    subsets = itertools.chain.from_iterable(itertools.combinations(values, size) for size in range(1, len(values) + 1))
    return sorted(math.fsum(subset) / len(subset) for subset in subsets)


@pytest.mark.parametrize(("n", "alpha", "divisor"), [(6, 0.05, 1), (7, 0.05, 2), (8, 0.05, 1), (9, 0.1, 3)])
def test_the_interval_of_the_sign_flip_test_ends_at_means_of_subsets(n, alpha, divisor):
    reference = generator().normal(6, 1, n)
    treatment = reference + generator().normal(0.4, 1, n)
    p = sign_flip(treatment - reference, generator())
    found = shift_interval(treatment, reference, p, generator(), alpha, divisor)
    means = subset_means(list(treatment - reference))
    rank = max(k for k in range(1, 2**n) if divisor * 2 * k / 2**n < alpha)
    assert (found.low, found.high) == pytest.approx((means[rank - 1], means[-rank]), abs=1e-7)
    assert found.level == pytest.approx(1 - alpha / divisor)


def test_an_interval_that_ends_at_0_holds_it():
    values = [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    p = sign_flip(values, generator())
    assert p >= 0.05
    found = shift_interval(values, [0.0] * 6, p, generator())
    assert found.low == 0.0


def test_so_few_pairs_have_no_interval_where_nothing_can_be_rejected():
    assert shift_interval([1.0] * 5, [0.0, 1.0, 2.0, 0.0, 1.0], 0.0625, generator()).low is None
    assert ratio_interval([1.0] * 6, [2.0] * 6, 0.03125, generator(), 0.05, 2).high is None


def test_the_interval_of_many_pairs_agrees_with_the_p_that_it_is_given():
    ours, theirs = generator().normal(0.35, 1, 40), [0.0] * 40
    for p in (0.049, 0.051):  # whatever patterns were drawn
        found = shift_interval(ours, theirs, p, generator())
        assert (found.low <= 0 <= found.high) == (p >= 0.05)


def test_the_ratio_is_rejected_with_the_difference():
    ours, theirs = generator().uniform(5, 9, (2, 8))
    p = sign_flip(ours - theirs, generator())
    for alpha in (p * 0.99, p * 1.01):
        found = ratio_interval(ours, theirs, p, generator(), alpha)
        if found.low is not None:
            assert (found.low <= 1 <= found.high) == (p >= alpha)
    with pytest.raises(ValueError, match="above 0"):
        ratio_interval([0.0, 1.0], [1.0, 1.0], 1.0, generator())
