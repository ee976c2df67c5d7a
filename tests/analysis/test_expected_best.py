"""The expected best of k trials is the mean over all k-tuples of the trials."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.statistics.expected_best import expected_best


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_it_is_the_mean_of_the_best_over_all_draws(values: list[int], k: int, lower: bool) -> None:
    best = [(min if lower else max)(draw) for draw in itertools.product(values, repeat=k)]
    found = expected_best(values, k, lower_is_better=lower)
    assert found == pytest.approx(sum(best) / len(best))
    assert expected_best(values[::-1], k, lower_is_better=lower) == found


def test_more_trials_are_never_worse_and_end_at_the_best() -> None:
    losses = [6.2, 6.0, 7.5, 6.1]
    found = [expected_best(losses, k) for k in range(1, 60)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(6.45)
    assert found[-1] == pytest.approx(6.0, abs=1e-6)


def test_what_cannot_be_used_is_refused_with_a_message() -> None:
    with pytest.raises(ValueError, match="k must be 1 or more trials, got 0"):
        expected_best([1.0], 0)
    with pytest.raises(ValueError, match=r"values\[1\] is inf"):
        expected_best([1.0, math.inf], 1)
