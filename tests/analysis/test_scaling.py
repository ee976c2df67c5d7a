"""Trends, scaling laws and Pareto fronts against direct computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from analysis.statistics.fronts import hypervolume, pareto, pareto_share
from analysis.statistics.intervals import Interval, Refused, t_interval
from analysis.statistics.scaling import Fit, aicc_difference, amdahl_interval, fit_amdahl, fit_usl, usl_interval
from analysis.statistics.trend import slopes

INF, NAN = math.inf, math.nan
examples = settings(derandomize=True, deadline=None, max_examples=60)
WORKERS = np.array([1, 2, 4, 8, 16, 32])


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def usl(workers, gamma: float, alpha: float, beta: float):
    return gamma * workers / (1 + alpha * (workers - 1) + beta * workers * (workers - 1))


def test_slopes_are_least_squares_of_every_seed() -> None:
    x, y = np.log2([1, 2, 4, 8, 16]), generator().normal(6, 0.1, (7, 5)) + 0.03 * np.arange(5)
    trend = slopes(x, y)
    assert trend.per_seed == pytest.approx([stats.linregress(x, row).slope for row in y])
    assert trend.mean == t_interval(trend.per_seed)
    page = stats.page_trend_test(y)
    assert (trend.page_statistic, trend.page_p) == (page.statistic, page.pvalue)
    assert trend.too_few == ""


def test_columns_in_another_order_are_the_same_trend_and_a_negated_table_the_opposite_one() -> None:
    x, y = [0, 1, 2, 3], generator().normal(6, 0.1, (6, 4))
    trend = slopes(x, y)
    assert slopes([2, 0, 3, 1], y[:, [2, 0, 3, 1]]) == trend
    assert slopes(x, y[::-1]).mean == trend.mean
    assert slopes(x, -y).mean.estimate == pytest.approx(-trend.mean.estimate)
    assert slopes(x, y + 3).mean.estimate == pytest.approx(trend.mean.estimate)
    opposite = slopes([-position for position in x], y)
    assert opposite.mean.estimate == pytest.approx(-trend.mean.estimate)
    assert opposite.page_statistic + trend.page_statistic == 6 * 4 * 5**2 / 2  # ranks r and 5 - r


def test_few_positions_or_seeds_have_a_slope_and_support_no_verdict() -> None:
    assert slopes([0, 1, 2], np.zeros((6, 3))).too_few == "3 positions and 6 seeds; a verdict on a trend needs 4 and 6"
    assert slopes([0, 1, 2, 3], np.zeros((5, 4))).too_few.startswith("4 positions and 5 seeds")
    two = slopes([0, 1], [[1.0, 3.0]])
    assert (two.per_seed, two.page_statistic, two.page_p) == ((2.0,), None, None)
    assert two.mean == Interval(2.0, None, None, 0.95, 1)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.04, 0.002), (0.5, 0.1)])
def test_the_laws_are_recovered_from_points_on_them(alpha: float, beta: float) -> None:
    fit = fit_usl(WORKERS, usl(WORKERS, 123.0, alpha, beta))
    assert (fit.gamma, fit.alpha, fit.beta) == pytest.approx((123.0, alpha, beta), abs=1e-5)
    assert fit.throughput([1, 5]) == pytest.approx(usl(np.array([1, 5]), 123.0, alpha, beta), rel=1e-5)
    if beta == 0:
        assert fit.peak is None or fit.peak > 1e3
        plain = fit_amdahl(WORKERS[:4], usl(WORKERS[:4], 123.0, alpha, 0.0))
        assert (plain.gamma, plain.alpha, plain.beta, plain.peak) == (
            pytest.approx(123.0),
            pytest.approx(alpha, abs=1e-6),
            0.0,
            None,
        )
    else:
        assert fit.peak == pytest.approx(math.sqrt((1 - alpha) / beta), rel=1e-3)
        near = np.linspace(0.5, 1.5, 401) * fit.peak
        assert near[np.argmax(fit.throughput(near))] == pytest.approx(fit.peak, rel=5e-3)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_parameters_are_closer_to_noisy_measurements(seed: int) -> None:
    draws = generator(seed)
    x = np.tile(WORKERS, 4)
    y = usl(x, 100.0, 0.08, 0.004) * draws.normal(1, 0.05, len(x))

    def squares(parameters) -> float:
        gamma, alpha, beta = np.abs(parameters)
        return float(((y - usl(x, gamma, alpha, beta)) ** 2).sum())

    fit = fit_usl(x, y)
    ours = squares([fit.gamma, fit.alpha, fit.beta])
    starts = [(100, 0.1, 0.01), (50, 0.0, 0.0), (200, 0.5, 0.001)]
    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-10, "fatol": 1e-10}
    best = min(optimize.minimize(squares, start, method="Nelder-Mead", options=options).fun for start in starts)
    assert ours <= best * (1 + 1e-6)

    simple = fit_amdahl(x, y)
    n = len(x)
    expected = n * math.log(ours / n) + 2 * 4 + 2 * 4 * 5 / (n - 5)
    assert fit.aicc == pytest.approx(expected)
    simple_squares = squares([simple.gamma, simple.alpha, 0.0])
    assert simple.aicc == pytest.approx(n * math.log(simple_squares / n) + 2 * 3 + 2 * 3 * 4 / (n - 4))
    assert aicc_difference(simple, fit) == fit.aicc - simple.aicc
    assert ours <= simple_squares * (1 + 1e-9)


def test_the_criterion_prefers_the_law_that_made_the_points() -> None:
    x = np.tile(WORKERS, 5)
    noise = generator().normal(1, 0.02, len(x))
    contention, coherency = usl(x, 100.0, 0.1, 0.0) * noise, usl(x, 100.0, 0.1, 0.005) * noise
    assert aicc_difference(fit_amdahl(x, contention), fit_usl(x, contention)) > 0
    assert aicc_difference(fit_amdahl(x, coherency), fit_usl(x, coherency)) < -20


def test_a_throughput_that_falls_from_the_first_worker_on_is_fitted_all_the_same() -> None:
    falling = np.array([100.0, 60.0, 35.0, 19.0, 10.0, 5.0])
    fit = fit_usl(WORKERS, falling)
    assert fit.throughput(WORKERS) == pytest.approx(falling, rel=0.35)
    assert 0 <= fit.alpha <= 1
    flat = fit_amdahl(WORKERS, falling)
    assert flat.alpha == pytest.approx(1.0)


def test_too_few_different_workers_are_refused_with_the_reason() -> None:
    amdahl = fit_amdahl([1, 2, 4, 4, 4], [1.0, 2.0, 3.0, 3.1, 3.2])
    assert amdahl == Refused("3 different numbers of workers; Amdahl's law needs 4")
    assert isinstance(fit_amdahl([1, 2, 4, 8], [1.0, 2.0, 3.0, 4.0]), Fit)
    few = fit_usl([1, 2, 4, 8, 16], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert few == Refused("5 different numbers of workers; the universal scalability law needs 6")
    assert usl_interval([1, 2, 4, 8, 16], np.ones((8, 5)), generator()) == few
    assert usl_interval(WORKERS, np.ones((1, 6)), generator()) == Refused(
        "one seed; an interval by resampling seeds needs two"
    )


def test_four_points_have_no_corrected_criterion() -> None:
    four = fit_amdahl([1, 2, 4, 8], [1.0, 1.9, 3.2, 4.7])
    assert four.aicc is None
    assert aicc_difference(four, four) is None


def test_intervals_of_the_law_resample_whole_seeds() -> None:
    machine = generator(1).normal(1, 0.1, (8, 1))  # a seed's machine is fast or slow at every number of workers
    table = usl(WORKERS, 100.0, 0.08, 0.004) * machine * generator(2).normal(1, 1e-5, (8, 6))
    found = usl_interval(WORKERS, table, generator(), resamples=200)
    assert list(found) == ["gamma", "alpha", "beta", "peak"]
    assert found["gamma"].low < 100 * machine.mean() < found["gamma"].high
    # gamma is linear in the machines here, so that its interval is that of their mean
    theirs = stats.bootstrap((100 * machine.ravel(),), np.mean, method="BCa", rng=generator(), n_resamples=9_999)
    assert (found["gamma"].low, found["gamma"].high) == pytest.approx(tuple(theirs.confidence_interval), abs=2.0)
    for name, truth in (("alpha", 0.08), ("beta", 0.004), ("peak", math.sqrt(0.92 / 0.004))):
        assert [found[name].low, found[name].high] == pytest.approx([truth, truth], rel=1e-3)
        assert (found[name].n, found[name].level) == (8, 0.95)
    again = usl_interval(WORKERS, table[::-1], generator(), resamples=200)
    assert again == found  # the order of the seeds does not matter
    assert list(amdahl_interval(WORKERS, table, generator(), resamples=20)) == ["gamma", "alpha"]


def test_a_law_on_which_nothing_varies_has_no_interval() -> None:
    found = usl_interval(WORKERS, [usl(WORKERS, 100.0, 0.08, 0.0)] * 3, generator(), resamples=20)
    assert {(one.low, one.high) for one in found.values()} == {(None, None)}


def test_a_peak_that_may_be_infinite_has_an_infinite_end() -> None:
    table = usl(WORKERS, 100.0, 0.1, 0.0) * generator(2).normal(1, 0.02, (6, 6))
    peak = usl_interval(WORKERS, table, generator(), resamples=60)["peak"]
    assert peak.high == INF
    assert peak.low > 5


points = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=9)


@given(points)
@examples
def test_the_front_is_what_nobody_dominates(points) -> None:
    mask = pareto(*zip(*points, strict=True))

    def dominates(one, other) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    assert mask.tolist() == [not any(dominates(one, other) for one in points) for other in points]
    assert mask.any()
    assert pareto(*zip(*[(loss, seconds) for seconds, loss in points], strict=True)).tolist() == mask.tolist()


@given(points, st.integers(0, 10), st.integers(0, 10))
@examples
def test_the_hypervolume_is_the_area_of_the_cells_that_someone_dominates(points, x_end: int, y_end: int) -> None:
    cells = sum(any(x <= i and y <= j for x, y in points) for i in range(x_end) for j in range(y_end))
    assert hypervolume(*zip(*points, strict=True), reference_point=(x_end, y_end)) == cells


def test_equal_points_stay_together_and_infinite_ones_are_not_on_the_front() -> None:
    assert pareto([1, 1, 2], [3, 3, 4]).tolist() == [True, True, False]
    assert pareto([1, INF, 0.5], [3, 0.1, INF]).tolist() == [True, False, False]
    assert pareto([INF], [INF]).tolist() == [False]
    assert hypervolume([INF, 1.0], [0.0, 1.0], (2.0, 2.0)) == 1.0


def test_the_share_of_resamples_on_the_front() -> None:
    # two seeds; the second condition is on the front only in resamples without the first seed, one in four
    seconds, losses = [[1.0, 2.0], [1.0, 2.0]], [[0.0, 9.0], [2.0, 1.0]]
    share = pareto_share(seconds, losses, generator(), resamples=4_000)
    assert share[0] == 1.0
    assert share[1] == pytest.approx(0.25, abs=0.03)
    assert pareto_share(seconds[::-1], losses[::-1], generator(), resamples=4_000).tolist() == share.tolist()
    never = pareto_share([[1.0, INF]], [[5.0, 1.0]], generator())
    assert never.tolist() == [1.0, 0.0]


REFUSED = [
    (lambda: slopes([0, 0], [[1.0, 2.0]]), "two or more different positions"),
    (lambda: slopes([0, 1, 2], [[1.0, 2.0]]), "2 columns for 3 positions"),
    (lambda: slopes([0, 1], [[1.0, NAN]]), r"table\[0, 1\] is nan"),
    (lambda: fit_amdahl([1, 2], [1.0]), "2 numbers of workers and 1 throughputs"),
    (lambda: fit_amdahl([0, 1, 2, 4], [1.0, 2.0, 3.0, 4.0]), "workers must be 1 or more"),
    (lambda: fit_usl([1, 2], [1.0, NAN]), r"throughput\[1\] is nan"),
    (lambda: usl_interval([1, 2], [[1.0]], generator()), "1 columns for 2 numbers of workers"),
    (lambda: pareto([1.0, NAN], [1.0, 1.0]), r"seconds\[1\] is nan"),
    (lambda: pareto([1.0], [1.0, 2.0]), "1 seconds and 2 losses"),
    (lambda: hypervolume([1.0], [1.0], (INF, 2.0)), "reference point must be finite"),
    (lambda: pareto_share([[1.0]], [[NAN]], generator()), "without nan"),
    (lambda: pareto_share([1.0], [1.0], generator()), "seeds x conditions"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_used_is_refused_with_a_message(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
