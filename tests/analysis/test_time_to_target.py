"""Times to a target: crossings between evaluations, and runs that never arrive."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics.crossings import NEVER, Crossing, crossing, loss_at, lowest_held, on_common_looks, target_grid
from analysis.statistics.paired import paired_difference
from analysis.statistics.time_to_target import restricted, restricted_times, speed_up

INF, NAN = math.inf, math.nan
examples = settings(derandomize=True, deadline=None, max_examples=60)
times = st.one_of(st.integers(0, 40).map(float), st.just(INF))


def generator():
    return np.random.default_rng(3)


CROSSINGS = [
    ([0, 10, 20], [6, 5, 4], 4.5, Crossing(15.0, 10.0)),
    ([0, 10, 20], [6, 5, 4], 5.0, Crossing(10.0, 10.0)),  # at the target is there
    ([0, 10, 20], [6, 5, 4], 6.0, Crossing(0.0, 0.0)),
    ([3, 10], [2, 1], 6.0, Crossing(3.0, 0.0)),  # there from the first evaluation on
    ([0, 10, 20], [6, 5, 4], 3.9, Crossing(INF, None)),
    ([0, 10, 20, 30], [6, 4, 4, 6], 4.0, Crossing(10.0, 10.0)),  # the first time, though it goes up again
    ([0, 10, 20, 30], [6, 4, 7, 3], 4.0, Crossing(27.5, 10.0)),  # a dip for one evaluation is no crossing
    ([0, 10, 20], [4, 6, 5], 4.0, Crossing(INF, None)),
    ([0, 10, 20], [6, 4, NAN], 4.0, Crossing(INF, None)),  # nor is one before a loss that is no number
    ([0, 10, 30], [6, NAN, 4], 5.0, Crossing(30.0, 20.0)),  # nothing to interpolate from
    ([0, 10, 30], [6, INF, 4], 5.0, Crossing(30.0, 20.0)),
    ([0, 10, 20], [6, NAN, -INF], 5.0, Crossing(INF, None)),
    ([0, 10, 10], [6, 5, 4], 4.5, Crossing(10.0, 0.0)),  # two evaluations at one time
    ([7], [4], 5.0, Crossing(7.0, 0.0)),
]


@pytest.mark.parametrize(("positions", "losses", "target", "expected"), CROSSINGS)
def test_the_first_evaluation_at_the_target_is_interpolated_to_the_one_before(positions, losses, target, expected):
    assert crossing(positions, losses, target) == expected


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8), st.integers(0, 60))
@examples
def test_a_crossing_lies_on_the_line_between_two_evaluations(losses, target):
    positions = np.cumsum([1.0] * len(losses))
    found = crossing(positions, losses, target)
    held = [index for index in range(len(losses)) if max(losses[index : index + 2]) <= target]
    assert bool(held) == (lowest_held(losses) <= target)
    if not held:
        assert found == NEVER
    elif held[0] == 0:
        assert found == Crossing(1.0, 0.0)
    else:
        first = held[0]
        assert positions[first - 1] < found.at <= positions[first]
        assert loss_at(positions, losses, found.at) == pytest.approx(target)
        shifted = crossing(positions + 100, [loss - 5 for loss in losses], target - 5)
        assert shifted.at == pytest.approx(found.at + 100)


def curve(positions, losses=None):
    x = np.array(positions, dtype=float)
    return x, x if losses is None else np.array(losses, dtype=float)


@pytest.mark.parametrize(
    ("sparse", "dense", "kept"),
    [
        ([0, 10, 20], [0, 4, 8, 12, 16, 20], [0, 8, 20]),
        ([0, 10, 20], [0, 9, 10, 11, 20], [0, 10, 20]),
        ([0, 100], [0, 5, 50, 95], [0, 95]),  # looked at at its ends only, and longer than the other
        ([0, 10, 20], [0, 5, 10, 15, 20, 25, 30, 35, 40, 45], [0, 10, 20, 30, 45]),  # goes on with its spacing
        ([0, 10, 11], [0, 9, 20, 30], [0, 9, 20, 30]),  # as many up to 11 as the other, though elsewhere
        ([0, 10, 12], [0, 9, 10, 11, 12], [0, 10, 12]),
        ([0, 1, 2, 9], [0, 4, 5, 6, 9], [0, 4, 5, 9]),  # each once, in order
    ],
)
def test_the_curve_that_is_looked_at_more_often_keeps_the_looks_next_to_the_others(sparse, dense, kept):
    (one, _), (other, losses) = on_common_looks([curve(sparse), curve(dense, np.negative(dense))])
    assert (one.tolist(), other.tolist(), losses.tolist()) == (sparse, kept, np.negative(kept).tolist())
    assert [x.tolist() for x, _ in on_common_looks([curve(dense), curve(sparse)])] == [kept, sparse]


@given(st.lists(st.sets(st.integers(0, 50), max_size=20).map({0}.union), min_size=1, max_size=3))
@examples
def test_no_curve_keeps_more_looks_than_the_sparsest_has_up_to_where_the_first_ends(sets):
    given_curves = [curve(sorted(positions)) for positions in sets]
    found = [x for x, _ in on_common_looks(given_curves)]
    shortest = min(map(max, sets))
    fewest = min(sum(position <= shortest for position in positions) for positions in sets)
    for positions, kept in zip(sets, found, strict=True):
        assert set(kept) <= positions
        assert (np.diff(kept) > 0).all()
        assert kept[-1] == max(positions)
        assert (kept <= shortest).sum() <= fewest + 1  # its last look is kept, wherever the others are
    again = [x.tolist() for x, _ in on_common_looks(given_curves[:1])]
    assert again == [sorted(sets[0])]


@given(st.integers(3, 40), st.integers(3, 40), st.floats(0.5, 3))
@examples
def test_arms_that_truly_differ_keep_their_ratio_up_to_the_spacing_of_the_looks(n, m, speed):
    ours, theirs = np.linspace(0, 100, n), np.linspace(0, 100, m)
    curves = [(ours, np.exp(-speed * ours / 50)), (theirs, np.exp(-theirs / 50))]
    found, reference = (crossing(*each, 0.4) for each in on_common_looks(curves))
    sparse = 100 / (min(n, m) - 1)
    assert abs(reference.at + 50 * math.log(0.4)) <= 1.5 * sparse
    assert (found.at == INF) == (math.exp(-2 * speed) > 0.4)
    if found.at < INF:
        assert abs(found.at + 50 * math.log(0.4) / speed) <= 1.5 * sparse


def test_the_loss_at_a_position_is_linear_and_not_known_beyond_or_beside_a_hole():
    x, y = [0.0, 10.0, 20.0, 30.0], [6.0, 5.0, NAN, 3.0]
    assert [loss_at(x, y, at) for at in (0, 2.5, 10, 30)] == [6.0, 5.75, 5.0, 3.0]
    assert all(math.isnan(loss_at(x, y, at)) for at in (-1, 15, 20, 25, 30.001))
    assert math.isnan(loss_at([0, 1], [5.0, INF], 1))
    assert loss_at([0, 10, 10, 20], [6, 5, 4, 3], 10) == 4.0  # the last of two evaluations at one position
    assert loss_at([4], [5.5], 4) == 5.5


def test_the_grid_of_targets():
    shares = {0.25: 8.75, 0.5: 7.5, 0.8: 6.0, 0.9: 5.5, 0.95: 5.25, 0.98: pytest.approx(5.1)}
    assert target_grid(10.0, 5.0) == shares
    assert target_grid(10.0, 5.0, shares=[1.0]) == {1.0: 5.0}


@given(st.lists(st.tuples(times, times), min_size=1, max_size=9), st.randoms(use_true_random=False))
@examples
def test_restricted_times_are_paired_differences_of_times_up_to_the_budget(pairs, random):
    ours, theirs = zip(*pairs, strict=True)
    budget = 25.0
    result = restricted_times(ours, theirs, budget, generator())
    plain = paired_difference(np.minimum(ours, budget), np.minimum(theirs, budget), generator())
    assert (result.difference, result.p) == (plain.difference, plain.p)
    assert result.treatment_mean == pytest.approx(np.minimum(ours, budget).mean())
    if result.reference_mean > 0:
        assert result.ratio == pytest.approx(result.treatment_mean / result.reference_mean)
    else:
        assert result.ratio is None

    swapped = restricted_times(theirs, ours, budget, generator())
    assert (swapped.p, swapped.difference.estimate) == (result.p, -result.difference.estimate)
    assert (swapped.treatment_mean, swapped.reference_mean) == (result.reference_mean, result.treatment_mean)
    random.shuffle(pairs)
    assert restricted_times(*zip(*pairs, strict=True), budget, generator()) == result


def test_when_nobody_arrives_nothing_differs():
    result = restricted_times([INF] * 6, [INF] * 6, 10.0, generator())
    assert (result.p, result.ratio, result.difference.estimate) == (None, 1.0, 0.0)


def test_when_only_one_of_the_modes_arrives_it_is_sooner():
    result = restricted_times([1, 2, 3, 4, 5, 6], [INF] * 6, 10.0, generator())
    assert (result.p, result.reference_mean) == (2 / 64, 10.0)
    assert result.difference.high < 0


@given(st.lists(st.tuples(times, times), min_size=1, max_size=9), st.randoms(use_true_random=False))
@examples
def test_a_speed_up_is_the_geometric_mean_over_pairs_that_both_arrived(pairs, random):
    ours, theirs = zip(*pairs, strict=True)
    result, swapped = speed_up(ours, theirs), speed_up(theirs, ours)
    kept = [(a, b) for a, b in pairs if 0 < a < INF and 0 < b < INF]
    if not kept:
        assert (result, swapped) == (None, None)
        return
    assert result.n == len(kept)
    assert result.estimate == pytest.approx(stats.gmean([b / a for a, b in kept]))
    assert swapped.estimate == pytest.approx(1 / result.estimate)
    if len(kept) > 1:
        logs = np.log([b / a for a, b in kept])
        error = stats.t.ppf(0.975, len(kept) - 1) * logs.std(ddof=1) / math.sqrt(len(kept))
        assert [result.low, result.high] == pytest.approx(
            [math.exp(logs.mean() - error), math.exp(logs.mean() + error)]
        )
        assert swapped.low == pytest.approx(1 / result.high)
    random.shuffle(pairs)
    assert speed_up(*zip(*pairs, strict=True)) == result


REFUSED = [
    (lambda: crossing([0, 1], [1.0], 0.5), "as many losses as positions"),
    (lambda: crossing([], [], 0.5), "at least one"),
    (lambda: crossing([0, 2, 1], [3, 2, 1], 0.5), "must not go back"),
    (lambda: crossing([0, NAN], [3, 2], 0.5), "must be finite"),
    (lambda: crossing([0, 1], [3, 2], NAN), "target must be a finite loss, got nan"),
    (lambda: loss_at([0, 1], [3, 2], INF), "position must be finite, got inf"),
    (lambda: target_grid(4.0, 6.0), "need an improvement"),
    (lambda: target_grid(6.0, NAN), "need an improvement"),
    (lambda: target_grid(6.0, 4.0, shares=[95]), "got 95"),
    (lambda: restricted_times([1.0], [1.0], INF, generator()), "budget must be a finite number of seconds above 0"),
    (lambda: restricted_times([1.0], [1.0], NAN, generator()), "budget must be a finite number of seconds above 0"),
    (lambda: restricted_times([1.0], [1.0], 0.0, generator()), "budget must be a finite number of seconds above 0"),
    (lambda: restricted_times([NAN], [1.0], 5.0, generator()), r"treatment\[0\] is nan; give inf"),
    (lambda: restricted_times([1.0], [-1.0], 5.0, generator()), "reference holds a time below 0"),
    (lambda: restricted_times([1.0, 2.0], [1.0], 5.0, generator()), "no pairs"),
    (lambda: speed_up([1.0], [NAN]), r"reference\[0\] is nan"),
    (lambda: speed_up([1.0], [1.0, 2.0]), "no pairs"),
    (lambda: restricted([1.0], INF), "budget must be a finite number"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[f"{i}-{message}" for i, (_, message) in enumerate(REFUSED)])
def test_what_cannot_be_used_is_refused_with_a_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()
