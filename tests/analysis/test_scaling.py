"""Pareto fronts against direct computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.statistics.fronts import hypervolume, pareto, pareto_share

INF, NAN = math.inf, math.nan
examples = settings(derandomize=True, deadline=None, max_examples=60)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


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
