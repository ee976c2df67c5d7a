"""The crossing point against a scan of t tests, in all the ways a mean can cross, touch or never reach 0."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.crossing import crossing_point

DELAYS = [0, 1, 2, 4, 8, 16]
examples = settings(derandomize=True, deadline=None, max_examples=60)


def table(means, spread=0.1, seeds=8):
    """Values of `seeds` seeds with exactly these means; their noise differs from delay to delay."""
    noise = np.random.default_rng(1).normal(size=(seeds, len(means)))
    return np.array(means) + np.array(spread) * (noise - noise.mean(axis=0))


def scan(delays, values, level=0.95, points=4_001):
    """Independently: where the mean first reaches 0, and where a t test does not exclude 0, on a fine grid."""
    x = np.log2(np.asarray(delays, dtype=float) + 1)
    grid = np.unique(np.concatenate([np.linspace(x[0], x[-1], points), x]))
    at_grid = np.array([np.interp(grid, x, row) for row in values])
    mean = at_grid.mean(axis=0)
    crossings = []
    for i in range(1, len(grid)):
        if mean[i - 1] < 0 <= mean[i]:
            crossings.append(i)
    p = stats.ttest_1samp(at_grid, 0, axis=0).pvalue
    kept = 2 ** grid[p > 1 - level] - 1
    if not crossings:
        return math.nan, kept.tolist()
    return 2 ** grid[crossings[0]] - 1, kept.tolist()


def assert_agrees_with_the_scan(found, delays, values, level=0.95):
    at, kept = scan(delays, values, level)
    near = {"rel": 6e-3, "abs": 6e-3, "nan_ok": True}
    assert found.at == pytest.approx(at, **near)
    if not kept:
        assert math.isnan(found.low) or found.high - found.low < 0.05 * (1 + found.low)
        return
    low = kept[0]
    if low == delays[0]:
        low = -math.inf
    high = kept[-1]
    if high == pytest.approx(delays[-1]):
        high = math.inf
    assert found.low == pytest.approx(low, **near)
    assert found.high == pytest.approx(high, **near)


def test_one_log_ratio_per_doubling_is_a_line_on_the_scale_of_the_delays():
    # mean = log2(delay + 1) - 2 with the same noise at all delays: the interval of delay + 1 is 4 times 2^(±error)
    noise = np.array([-0.3, -0.1, 0.0, 0.1, 0.3])
    delays = [0, 1, 3, 7, 15]
    found = crossing_point(delays, noise[:, None] + np.arange(5) - 2)
    error = stats.t.ppf(0.975, 4) * noise.std(ddof=1) / math.sqrt(5)
    assert found.at == pytest.approx(3.0)
    assert found.reason == ""
    assert (found.low, found.high) == pytest.approx((4 * 2**-error - 1, 4 * 2**error - 1))


@pytest.mark.parametrize(
    ("means", "told"),
    [
        ([-0.5, -0.4, -0.3, -0.1, 0.2, 0.5], []),
        (
            [-0.9, -0.8, -0.8, -0.7, -0.6, -0.5],
            ["an advantage at every measured delay, up to 16", "no measured or interpolated delay"],
        ),
        ([-0.9, -0.8, -0.6, -0.4, -0.2, -0.02], ["ends at or beyond delay 16"]),
        ([0.5, 0.6, 0.6, 0.7, 0.8, 0.9], ["no advantage at any measured delay, from 0 on"]),
        ([0.02, 0.2, 0.4, 0.6, 0.8, 1.0], ["begins at or before delay 0"]),
        ([0.5, 0.3, -0.3, -0.5, -0.5, -0.5], ["no advantage at delay 0 and gains one by 16"]),
        (
            [-0.5, 0.5, -0.5, -0.5, 0.5, 0.5],
            ["crosses 0 3 times, 2 of them from below", "the 95 % set has 3 parts; the interval spans them"],
        ),
        ([0.5, -0.5, -0.5, 0.5, 0.5, 0.5], ["crosses 0 2 times, 1 of them from below"]),
    ],
)
def test_what_is_odd_about_a_crossing_is_told(means, told):
    found = crossing_point(DELAYS, table(means))
    if not told:
        assert found.reason == ""
    for part in told:
        assert part in found.reason
    if told != ["no advantage at delay 0 and gains one by 16"]:
        assert_agrees_with_the_scan(found, DELAYS, table(means))


means = st.lists(st.integers(-20, 20).map(lambda k: k / 10), min_size=2, max_size=6)


@given(means, st.integers(0, 1_000), st.sampled_from([0.02, 0.2, 1.0]), st.integers(2, 9), st.sampled_from([0.9, 0.95]))
@examples
def test_the_crossing_point_is_where_a_fine_scan_finds_it(means, seed, spread, seeds, level):
    delays = DELAYS[: len(means)]
    noise = np.random.default_rng(seed).normal(size=(seeds, len(means)))
    values = np.array(means) + spread * noise
    assert_agrees_with_the_scan(crossing_point(delays, values, level), delays, values, level)


@given(means, st.integers(0, 1_000), st.randoms(use_true_random=False))
@examples
def test_neither_the_order_of_seeds_nor_of_delays_nor_the_unit_of_the_logarithm_matters(means, seed, random):
    delays = DELAYS[: len(means)]
    noise = np.random.default_rng(seed).normal(size=(6, len(means)))
    values = np.array(means) + 0.3 * noise
    found = crossing_point(delays, values)
    rows = list(range(6))
    columns = list(range(len(means)))
    random.shuffle(rows)
    random.shuffle(columns)
    shuffled_delays = [delays[column] for column in columns]
    again = crossing_point(shuffled_delays, values[rows][:, columns])
    in_bits = crossing_point(delays, values / math.log(2))
    for other in (again, in_bits):
        assert other.reason == found.reason
        numbers = [other.at, other.low, other.high]
        expected = [found.at, found.low, found.high]
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
