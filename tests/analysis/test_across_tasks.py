"""Scores over several tasks against direct computations, and the resampling of paired tables."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics.across_tasks import (
    iqm,
    mean_improvement,
    performance_profile,
    performance_score,
    score_distribution,
    stratified_bootstrap,
)
from analysis.statistics.intervals import Refused

INF, NAN = math.inf, math.nan
examples = settings(derandomize=True, deadline=None, max_examples=50)


def generator():
    return np.random.default_rng(4)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=40))
@examples
def test_the_interquartile_mean_is_the_trimmed_mean(scores):
    assert iqm(scores) == pytest.approx(stats.trim_mean(scores, 0.25))
    assert iqm(scores[::-1]) == iqm(scores)


def test_the_score_distribution_falls_from_one_to_zero():
    scores = generator().random((5, 3))
    shares = score_distribution(scores, np.linspace(-0.1, 1.1, 50))
    assert (shares[0], shares[-1]) == (1.0, 0.0)
    assert (np.diff(shares) <= 0).all()
    assert score_distribution([[0.5, 0.5]], [0.5]).tolist() == [0.0]  # above, not at


def test_the_band_of_a_profile_is_that_of_a_binomial_count_where_tasks_are_alike():
    above = np.array([[1.0], [1.0], [0.0], [0.0], [0.0]]).repeat(3, axis=1)
    (zero, share), (one, none) = performance_profile(above, generator(), resamples=4_000)
    low, high = stats.binom.ppf([0.025, 0.975], 15, 0.4) / 15
    assert (zero, share.estimate, share.low, share.high) == (0.0, 0.4, low, high)
    assert (one, none.estimate, none.low, none.high) == (1.0, 0.0, 0.0, 0.0)
    assert (share.level, share.n) == (0.95, 15)


def test_a_profile_resamples_no_task_and_does_not_see_the_order_of_the_seeds():
    apart = np.tile([1.0, 0.0, 0.0], (5, 1))
    assert [(share.low, share.high) for _, share in performance_profile(apart, generator())] == [(1 / 3, 1 / 3), (0, 0)]
    scores = generator().normal(0, 1, (6, 3))
    profile = performance_profile(scores, generator(), resamples=200)
    assert performance_profile(scores[[3, 1, 5, 0, 2, 4]], generator(), resamples=200) == profile
    thresholds = [threshold for threshold, _ in profile]
    assert thresholds == sorted(scores.ravel())
    assert [share.estimate for _, share in profile] == score_distribution(scores, thresholds).tolist()
    assert all(share.low <= share.estimate <= share.high for _, share in profile)


def test_mean_improvement_is_the_mean_of_the_tasks():
    # task 1: x always larger; task 2: always equal
    assert mean_improvement([[2, 1], [3, 1]], [[1, 1], [0, 1], [1, 1]]) == 0.75


def test_a_bootstrap_takes_the_same_seeds_of_all_tables_within_a_task():
    a = generator().normal(0, 1, (5, 3))
    b = a - [0.1, 0.2, 0.3]  # the same seeds, apart by a constant per task
    found = stratified_bootstrap([a, b], lambda x, y: float(np.mean(x - y)), generator(), resamples=200)
    assert (found.estimate, found.low, found.high) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.2))
    assert (found.n, found.level) == (15, 0.95)
    # never a score of another task
    far_apart = np.arange(5)[:, None] + [0.0, 100.0, 10_000.0]
    seen = []
    stratified_bootstrap([far_apart], lambda x: float(seen.append(x) or 0.0), generator(), resamples=20)
    for resample in seen:
        assert (resample // 100 == [[0, 1, 100]] * 5).all()
    assert any(resample[:, 0].tolist() != (resample[:, 1] - 100).tolist() for resample in seen[1:])  # drawn per task


def test_a_bootstrap_does_not_see_the_order_of_the_seeds():
    a, b = generator().normal(0, 1, (2, 6, 3))
    order = [3, 1, 5, 0, 2, 4]
    found = stratified_bootstrap([a, b], lambda x, y: iqm(x) - iqm(y), generator(), resamples=300)
    assert stratified_bootstrap([a[order], b[order]], lambda x, y: iqm(x) - iqm(y), generator(), resamples=300) == found
    assert found.low < found.estimate < found.high


def test_a_bootstrap_of_many_seeds_covers_the_mean():
    draws = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        found = stratified_bootstrap([draws.normal(0, 1, (30, 3))], lambda x: float(x.mean()), draws, resamples=200)
        hits += found.low <= 0 <= found.high
    assert 0.89 <= hits / 200 <= 0.99


def test_few_tasks_or_runs_are_refused_with_the_reason():
    reason = "2 tasks and 40 runs; an interval over tasks needs 3 and 15"
    assert stratified_bootstrap([np.ones((20, 2))], iqm, generator()) == Refused(reason)
    few = stratified_bootstrap([np.ones((4, 3))], iqm, generator())
    assert few == Refused("3 tasks and 12 runs; an interval over tasks needs 3 and 15")
    for table in (np.ones((20, 2)), np.ones((4, 3))):
        ((_, share),) = performance_profile(table, generator())
        assert (share.estimate, share.low, share.high) == (0.0, None, None)
    assert performance_score([[1.0, 2.0], [1.0, 2.0]]) == Refused("2 workloads; one number over workloads needs 3")


def test_the_performance_score_is_the_area_under_the_profile():
    times = generator().uniform(10, 60, (5, 3))
    times[1, 2] = INF
    ratios = times / times.min(axis=1, keepdims=True)
    scores = performance_score(times)
    for ratio, score in zip(ratios.T, scores, strict=True):
        taus = 1 + 3 * (np.arange(30_000) + 0.5) / 30_000
        assert score == pytest.approx((ratio[:, None] <= taus).mean(), abs=1e-4)
    assert performance_score(7 * times) == pytest.approx(scores)
    assert performance_score(times[:, ::-1]) == pytest.approx(scores[::-1])


def test_a_workload_that_nobody_finished_gives_nobody_anything():
    assert performance_score([[1, 1], [1, 5], [INF, INF]]) == pytest.approx([2 / 3, 1 / 3])


REFUSED = [
    (lambda: iqm([]), "all of them finite"),
    (lambda: iqm([1.0, NAN]), "all of them finite"),
    (lambda: mean_improvement([[1.0]], [[1.0, 2.0]]), "is longer than argument 1"),
    (lambda: stratified_bootstrap([np.ones((5, 3)), np.ones((6, 3))], iqm, generator()), "must have the same shape"),
    (lambda: stratified_bootstrap([np.full((5, 3), NAN)], iqm, generator()), "all of them finite"),
    (lambda: performance_score([[1.0, NAN]] * 3), "all above 0"),
    (lambda: performance_score([[1.0, 0.0]] * 3), "all above 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[f"{i}-{message}" for i, (_, message) in enumerate(REFUSED)])
def test_what_cannot_be_used_is_refused_with_a_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()
