"""Scores over several tasks against direct computations, and the resampling of paired tables."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.over_tasks import (
    iqm,
    performance_profile,
    performance_score,
    share_above,
    stratified_bootstrap,
    too_few,
)


def generator():
    return np.random.default_rng(4)


def test_the_band_of_a_profile_is_that_of_a_binomial_count_where_tasks_are_alike():
    above = np.array([[1.0], [1.0], [0.0], [0.0], [0.0]]).repeat(3, axis=1)
    profile = performance_profile(above, generator(), resamples=4_000)
    low, high = stats.binom.ppf([0.025, 0.975], 15, 0.4) / 15
    above_0, above_1 = profile.to_numpy().tolist()
    assert above_0 == [0.0, 0.4, low, high]
    assert above_1 == [1.0, 0.0, 0.0, 0.0]


def test_a_profile_resamples_no_task_and_does_not_see_the_order_of_the_seeds():
    apart = np.tile([1.0, 0.0, 0.0], (5, 1))
    ends = performance_profile(apart, generator())[["low", "high"]]
    assert ends.to_numpy().tolist() == [[1 / 3, 1 / 3], [0, 0]]
    scores = generator().normal(0, 1, (6, 3))
    profile = performance_profile(scores, generator(), resamples=200)
    assert performance_profile(scores[[3, 1, 5, 0, 2, 4]], generator(), resamples=200).equals(profile)
    assert [*profile["score"]] == sorted(scores.ravel())
    assert profile["share"].tolist() == share_above(scores, profile["score"]).tolist()
    assert (profile["low"] <= profile["share"]).all()
    assert (profile["share"] <= profile["high"]).all()


def test_a_bootstrap_takes_the_same_seeds_of_all_tables_within_a_task():
    a = generator().normal(0, 1, (5, 3))
    b = a - [0.1, 0.2, 0.3]  # the same seeds, apart by a constant per task
    found = stratified_bootstrap([a, b], lambda x, y: float(np.mean(x - y)), generator(), resamples=200)
    assert found.estimate == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2)
    assert found.high == pytest.approx(0.2)
    assert found.n == 15
    assert found.level == 0.95
    # never a score of another task
    far_apart = np.arange(5)[:, None] + [0.0, 100.0, 10_000.0]
    seen = []

    def look(scores):
        seen.append(scores)
        return 0.0

    stratified_bootstrap([far_apart], look, generator(), resamples=20)
    num_unlike = 0
    for resample in seen:
        assert (resample // 100 == [[0, 1, 100]] * 5).all()
        num_unlike += (resample[:, 0] != resample[:, 1] - 100).any()
    assert num_unlike > 0  # seeds are drawn per task


def test_a_bootstrap_does_not_see_the_order_of_the_seeds():
    a, b = generator().normal(0, 1, (2, 6, 3))
    order = [3, 1, 5, 0, 2, 4]

    def difference(x, y):
        return iqm(x) - iqm(y)

    found = stratified_bootstrap([a, b], difference, generator(), resamples=300)
    shuffled = stratified_bootstrap([a[order], b[order]], difference, generator(), resamples=300)
    assert shuffled == found
    assert found.low < found.estimate < found.high


def test_few_tasks_or_runs_have_no_interval_and_the_reason():
    assert too_few(np.ones((20, 2))) == "2 tasks and 40 runs; an interval over tasks needs 3 and 15"
    assert too_few(np.ones((4, 3))) == "3 tasks and 12 runs; an interval over tasks needs 3 and 15"
    for table in (np.ones((20, 2)), np.ones((4, 3))):
        found = stratified_bootstrap([table], iqm, generator())
        profile = performance_profile(table, generator())
        assert math.isnan(found.low)
        assert profile[["low", "high"]].isna().all(axis=None)


def test_the_performance_score_is_the_area_under_the_profile():
    times = generator().uniform(10, 60, (5, 3))
    times[1, 2] = math.inf
    ratios = times / times.min(axis=1, keepdims=True)
    scores = performance_score(times)
    for ratio, score in zip(ratios.T, scores, strict=True):
        taus = 1 + 3 * (np.arange(30_000) + 0.5) / 30_000
        assert score == pytest.approx((ratio[:, None] <= taus).mean(), abs=1e-4)
    assert performance_score(7 * times) == pytest.approx(scores)
    assert performance_score(times[:, ::-1]) == pytest.approx(scores[::-1])
