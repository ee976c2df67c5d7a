"""Variance components of a balanced table against the analysis of variance, simulation, and exact cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics.noise import components


def test_the_components_are_the_mean_squares_of_the_analysis_of_variance() -> None:
    draws = np.random.default_rng(0)
    table = draws.normal(6, 0.3, (7, 1)) + draws.normal(0, 0.1, (7, 3))
    found = components(table)
    anova = stats.f_oneway(*table)
    assert found.p == pytest.approx(anova.pvalue)
    within = table.var(axis=1, ddof=1).mean()
    between = 3 * table.mean(axis=1).var(ddof=1)
    assert found.schedule_variance.estimate == pytest.approx(within)
    assert found.seed_variance == pytest.approx((between - within) / 3)
    assert found.schedule_share.estimate == pytest.approx(within / (within + (between - within) / 3))
    low, high = (14 * within / stats.chi2.ppf(tail, 14) for tail in (0.975, 0.025))
    assert [found.schedule_variance.low, found.schedule_variance.high] == pytest.approx([low, high])
    assert found.too_few == ""


def test_units_shift_scale_and_order() -> None:
    table = np.random.default_rng(1).normal(6, 0.3, (6, 2))
    found, other = components(table), components(table[::-1, ::-1])
    assert (other.schedule_variance, other.schedule_share, other.p) == (
        found.schedule_variance,
        found.schedule_share,
        found.p,
    )
    scaled = components(4 * table + 1)
    assert scaled.schedule_variance.estimate == pytest.approx(16 * found.schedule_variance.estimate)
    assert scaled.schedule_share.estimate == pytest.approx(found.schedule_share.estimate)


def test_replicates_that_agree_exactly_leave_all_to_the_seed() -> None:
    found = components([[float(seed)] * 2 for seed in range(6)])
    assert (found.schedule_variance.estimate, found.p) == (0.0, 0.0)
    assert found.seed_variance == pytest.approx(3.5)
    assert (found.schedule_share.estimate, found.schedule_share.low, found.schedule_share.high) == (0.0, 0.0, 0.0)


def test_seeds_that_agree_leave_all_to_the_schedule() -> None:
    found = components([[0.0, 1.0]] * 6)
    assert (found.seed_variance, found.schedule_share.estimate, found.p) == (0.0, 1.0, 1.0)
    assert found.schedule_share.high == 1.0


def test_a_table_without_any_variation_has_no_share() -> None:
    found = components([[2.0, 2.0]] * 6)
    assert (found.schedule_share, found.p, found.seed_variance) == (None, None, 0.0)


def test_intervals_cover_the_truth_in_95_of_100_studies() -> None:
    draws = np.random.default_rng(2)
    studies, truth = 600, 1 / (1 + 4)  # schedule variance 1, seed variance 4
    hits = np.zeros(2)
    for _ in range(studies):
        found = components(draws.normal(0, 2, (6, 1)) + draws.normal(0, 1, (6, 2)))
        hits += [
            found.schedule_share.low <= truth <= found.schedule_share.high,
            found.schedule_variance.low <= 1 <= found.schedule_variance.high,
        ]
    assert np.abs(hits / studies - 0.95).max() <= 3 * math.sqrt(0.95 * 0.05 / studies)


def test_the_f_test_holds_its_level_when_seeds_do_not_matter() -> None:
    draws = np.random.default_rng(3)
    rejected = sum(components(draws.normal(0, 1, (6, 2))).p <= 0.05 for _ in range(600))
    assert abs(rejected / 600 - 0.05) <= 3 * math.sqrt(0.05 * 0.95 / 600)


def test_few_seeds_support_no_verdict_and_one_replicate_is_refused() -> None:
    assert components(np.eye(5)[:, :2]).too_few == "5 seeds; a verdict needs 6"
    with pytest.raises(ValueError, match="2 or more seeds and replicates, got 6 x 1"):
        components(np.ones((6, 1)))
    with pytest.raises(ValueError, match="got 1 x 6"):
        components(np.ones((1, 6)))
    with pytest.raises(ValueError, match=r"table\[0, 1\] is nan"):
        components([[1.0, math.nan], [1.0, 2.0]])
