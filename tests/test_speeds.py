"""Service times: pure functions of (seed, worker, draw) with the distributions that they claim.

Monte-Carlo bounds: means of n draws within 5 standard errors (a false alarm has probability 6e-7, and the seeds are
fixed), distribution functions within the Dvoretzky-Kiefer-Wolfowitz bound sup|F_n - F| <= sqrt(log(2e9) / (2 n)),
which fails with probability at most 1e-9.
"""

import dataclasses
import json
import math
import re
from statistics import NormalDist

import numpy as np
import pytest
from doors import (
    ALL,
    PROBLEMS,
    SPEEDS,
    Constant,
    Exponential,
    HalfNormal,
    Infinite,
    Leave,
    LogNormal,
    Network,
    Outages,
    Pareto,
    Polynomial,
    Power,
    ShiftedExponential,
    Slow,
    Trace,
    TwoGroups,
    UsageError,
    asyncsgd,
    parse_problem,
    parse_rule,
    parse_speeds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

RANDOM = (Exponential(), ShiftedExponential(), HalfNormal(), LogNormal(), Pareto(), Outages(), Infinite(0.3))
FIXED = (Constant(2.0), Power(), TwoGroups(), Slow())
RECORDED = {5: [1.5, 0.25, 3.0], 2: [7.0]}
random_models = pytest.mark.parametrize("speeds", RANDOM, ids=str)


def write_trace(folder, arrivals):
    records = [{"kind": "header", "schema": 2}, {"kind": "join", "worker": 2}, *arrivals]
    lines = [json.dumps(record) + "\n" for record in records]
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    return str(folder)


def arrival(worker, seconds):
    """Seconds that are sums of powers of two, so that the three parts add up exactly."""
    parts = {"pull_seconds": seconds / 4, "compute_seconds": seconds / 2, "push_seconds": seconds / 4}
    return {"kind": "arrival", "dispatch": 7, "worker": worker, **parts}


@pytest.fixture
def trace(tmp_path):
    pending = {worker: iter(seconds) for worker, seconds in RECORDED.items()}
    arrivals = []
    for worker in (5, 2, 5, 5):  # interleaved, as a server sees them
        arrivals.append(arrival(worker, next(pending[worker])))
    run = write_trace(tmp_path / "run", arrivals)
    return Trace(run)


def many(speeds, worker, num_draws=4096, seed=20):
    """The first draws of one worker."""
    sampler = speeds.on(worker + 1, seed)
    return np.array([sampler.draw_one(worker, draw) for draw in range(num_draws)])


@given(
    speeds=st.sampled_from(SPEEDS),
    seed=st.integers(0, 2**64 - 1),
    questions=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 100)), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_a_draw_depends_on_seed_worker_and_draw_and_not_on_who_asked_what_before(speeds, seed, questions, order):
    shuffled = list(questions)
    order.shuffle(shuffled)
    used = speeds.on(7, seed)
    answers = {question: used.draw_one(*question) for question in shuffled}
    for question, answer in answers.items():
        assert isinstance(answer, float)
        assert answer > 0
        unused = speeds.on(7, seed)
        assert unused.draw_one(*question) == answer


@pytest.mark.parametrize("speeds", [Constant(2.0), Power(), Slow(), *RANDOM], ids=str)
def test_a_workers_seconds_do_not_depend_on_how_many_workers_there_are(speeds):
    few = speeds.on(4, 3)
    more = speeds.on(50, 3)
    assert more.draw_one(49, 9) > 0  # another one has been asked before
    for worker in range(4):
        for draw in range(80):
            assert few.draw_one(worker, draw) == more.draw_one(worker, draw)


def test_the_stream_is_philox_at_counter_block_worker_under_the_purpose_of_service_times():
    """The definition, with a new generator for each block; recorded runs depend on it."""
    sampler = Exponential(mean=2.0).on(3, seed=-5)
    for worker in range(3):
        for block in range(3):
            key = np.array([-5 % 2**64, 11 << 32], dtype=np.uint64)
            fresh = np.random.Generator(np.random.Philox(key=key, counter=[0, block, worker, 0]))
            expected = 2.0 * fresh.standard_exponential(32)
            draws = range(block * 32, (block + 1) * 32)
            assert [sampler.draw_one(worker, draw) for draw in draws] == expected.tolist()


@random_models
def test_draws_of_other_seeds_workers_and_blocks_are_uncorrelated(speeds):
    first = many(speeds, 0, seed=20)
    pairs = [(first, many(speeds, 1, seed=20)), (first, many(speeds, 0, seed=21))]
    for lag in (1, 32, 64):  # 32 draws make a block
        pairs.append((first[:-lag], first[lag:]))
    for left, right in pairs:
        # Some models have times that repeat.
        left_above = left > np.median(left)
        right_above = right > np.median(right)
        correlation = np.corrcoef(left_above, right_above)[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(left))


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (Constant(2.5), [2.5, 2.5, 2.5, 2.5]),
        (Power(exponent=1), [1.0, 2.0, 3.0, 4.0]),
        (Power(exponent=0.5, seconds=3), [3.0, 3 * math.sqrt(2), 3 * math.sqrt(3), 6.0]),
        (Power(exponent=2), [1.0, 4.0, 9.0, 16.0]),
        (Power(exponent=-1, seconds=4), [4.0, 2.0, 4 / 3, 1.0]),
        (TwoGroups(), [1.0, 1.0, 10.0, 10.0]),
        (TwoGroups(share=0.125, factor=3, seconds=2), [2.0, 2.0, 2.0, 6.0]),  # half a worker is rounded up
        (TwoGroups(share=1.0), [10.0] * 4),
        (Slow(worker=2, factor=4, seconds=0.5), [0.5, 0.5, 2.0, 0.5]),
    ],
    ids=str,
)
def test_models_without_randomness_give_these_seconds(speeds, expected):
    sampler = speeds.on(4, seed=1)
    for draw in (0, 1, 1000):
        assert [sampler.draw_one(worker, draw) for worker in range(4)] == pytest.approx(expected, rel=1e-15)


def test_a_trace_repeats_each_recorded_worker_and_hands_the_recorded_workers_out_in_turn(trace):
    sampler = trace.on(5, seed=0)
    for worker in range(5):
        recorded = RECORDED[2] if worker % 2 == 0 else RECORDED[5]
        for draw in range(8):
            assert sampler.draw_one(worker, draw) == recorded[draw % len(recorded)]
    assert sampler.stretched(0, 0, 6.0) == 7.0


def half_normal_cdf(x):
    worker = 3
    least = 1 + math.sqrt(worker)
    scale = math.sqrt(worker + 1)
    return max(0.0, math.erf((x - least) / (scale * math.sqrt(2))))


def log_normal_cdf(x):
    of_logarithm = NormalDist(math.log(2) - 0.125, 0.5)
    return of_logarithm.cdf(math.log(x))


CLOSED_FORMS = [
    # model, P(X <= x), mean, variance; all for worker 3
    (Exponential(mean=2), lambda x: 1 - math.exp(-x / 2), 2, 4),
    (ShiftedExponential(shift=3, mean=0.5), lambda x: 1 - math.exp(-2 * max(0, x - 3)), 3.5, 0.25),
    (HalfNormal(), half_normal_cdf, 1 + math.sqrt(3) + math.sqrt(8 / math.pi), 4 * (1 - 2 / math.pi)),
    (LogNormal(sigma=0.5, mean=2), log_normal_cdf, 2, 4 * math.expm1(0.25)),
    # type I with least value 2 * 4/5; its variance is mean^2 / (shape (shape - 2))
    (Pareto(shape=5, mean=2), lambda x: 1 - (1.6 / max(x, 1.6)) ** 5, 2, 4 / 15),
]


@pytest.mark.parametrize(("speeds", "cdf", "mean", "variance"), CLOSED_FORMS, ids=lambda value: str(value)[:20])
def test_draws_have_the_distribution_of_the_closed_form(speeds, cdf, mean, variance):
    num_draws = 20_000
    sample = np.sort(many(speeds, 3, num_draws))
    assert abs(sample.mean() - mean) < 5 * math.sqrt(variance / num_draws)
    probabilities = np.array([cdf(x) for x in sample.tolist()])
    steps = np.arange(num_draws + 1) / num_draws
    above = steps[1:] - probabilities
    below = probabilities - steps[:-1]
    bound = math.sqrt(math.log(2e9) / (2 * num_draws))
    assert above.max() < bound
    assert below.max() < bound


@pytest.mark.parametrize("speeds", [Outages(), Outages(seconds=3, up=2, down=0.5)], ids=str)
def test_outages_are_a_poisson_number_of_exponential_pauses(speeds):
    sample = many(speeds, 3, 40_000)
    rate = speeds.seconds / speeds.up
    # Compound Poisson: mean rate E D, variance rate E D^2 = 2 rate down^2.
    expected = speeds.seconds * (1 + speeds.down / speeds.up)
    error = math.sqrt(2 * rate * speeds.down**2 / 40_000)
    assert abs(sample.mean() - expected) < 5 * error
    undisturbed = math.exp(-rate)
    error = math.sqrt(undisturbed * (1 - undisturbed) / 40_000)
    assert sample.min() == speeds.seconds
    assert abs((sample == speeds.seconds).mean() - undisturbed) < 5 * error


def test_infinite_never_answers_with_its_probability_and_takes_its_seconds_otherwise():
    num_draws = 20_000
    sample = many(Infinite(probability=0.1, seconds=3), 3, num_draws)
    assert set(sample.tolist()) == {3.0, math.inf}
    assert abs(np.isinf(sample).mean() - 0.1) < 5 * math.sqrt(0.09 / num_draws)


@pytest.mark.parametrize("speeds", [s for s in SPEEDS if not isinstance(s, Slow)], ids=str)
def test_a_real_gradient_takes_the_drawn_time_or_its_own_if_that_is_longer(speeds):
    sampler = speeds.on(3, 0)
    drawn = sampler.draw_one(2, 4)
    assert sampler.stretched(2, 4, 0.0) == drawn
    assert sampler.stretched(2, 4, 0.5 * drawn) == drawn
    assert sampler.stretched(2, 4, 2 * drawn) == 2 * drawn
    slow = Slow(worker=1, factor=5, seconds=100).on(3, 0)  # it multiplies what its worker has computed
    assert [slow.stretched(worker, 4, 0.25) for worker in range(3)] == [0.25, 1.25, 0.25]


NAMED = [*SPEEDS, *PROBLEMS, *ALL, *asyncsgd.rules.PEERS]
READ = [
    (parse_speeds, [*SPEEDS, Trace("runs/a=b"), Exponential(0.1 + 0.2)]),
    (parse_problem, PROBLEMS),
    (parse_rule, [*ALL, Polynomial(1e-7)]),
]


@pytest.mark.parametrize(("read", "several"), READ, ids=["speeds", "problems", "rules"])
def test_the_text_of_what_has_a_name_is_read_back_to_an_equal_one(read, several):
    for named in several:
        assert read(str(named)) == named


def test_the_name_of_a_problem_alone_is_that_problem_by_default():
    for named in PROBLEMS:
        assert parse_problem(named.name) == type(named)()


@pytest.mark.parametrize("named", [*NAMED, Leave(0, 1.0)], ids=str)
def test_a_number_that_is_none_or_is_below_all_bounds_is_refused_by_its_name(named):
    for field in dataclasses.fields(named):
        if type(getattr(named, field.name)) not in (int, float):
            continue
        for value in (math.nan, math.inf, -1e9):
            with pytest.raises(ValueError, match=f"^{field.name} must be .*, got {value}$"):
                dataclasses.replace(named, **{field.name: value})


@pytest.mark.parametrize(
    ("text", "speeds"),
    [
        ("exponential:1.5", Exponential(mean=1.5)),
        ("power:", Power()),
        ("power:2,seconds=3", Power(exponent=2.0, seconds=3.0)),
        ("trace:runs/first", Trace("runs/first")),
    ],
)
def test_models_are_read_from_short_texts(text, speeds):
    assert parse_speeds(text) == speeds


def test_the_share_that_a_refusal_of_two_groups_names_makes_a_worker_slow():
    for num_workers in range(1, 60):
        with pytest.raises(UsageError) as refused:
            TwoGroups(share=0.001).on(num_workers, 0)
        share = float(re.search(r"type share=(\S+) or more", str(refused.value))[1])
        assert TwoGroups(share=share, factor=3).on(num_workers, 0).draw_one(num_workers - 1, 0) == 3


def test_a_transfer_takes_bytes_over_the_narrower_of_the_two_links():
    network = Network(4e6, (1e8, 5e7, 4e9), 1e9)
    assert str(network) == "bytes=4000000.0,worker=100000000.0/50000000.0/4000000000.0,server=1000000000.0"
    assert [network.transfer_seconds(worker) for worker in range(4)] == [0.04, 0.08, 0.004, 0.04]
    assert Network(8.0, (2.0,), math.inf).transfer_seconds(5) == 4.0


def test_a_folder_without_a_usable_trace_is_refused(tmp_path):
    without = arrival(0, 1.0)
    del without["push_seconds"]
    empty = write_trace(tmp_path / "empty", [])
    with pytest.raises(UsageError, match="no arrivals"):
        Trace(empty).on(2, 0)
    incomplete = write_trace(tmp_path / "incomplete", [arrival(1, 1.0), without])
    with pytest.raises(UsageError, match="dispatch 7"):
        Trace(incomplete).on(2, 0)


def test_a_turnaround_is_the_flight_and_the_servers_part_and_local_steps_share_it(tmp_path):
    whole = arrival(0, 1.0) | {"flight_seconds": 1.5, "apply_seconds": 0.5, "num_local_steps": 4}
    run = write_trace(tmp_path / "run", [whole])
    computing = Trace(run).on(1, seed=0)
    turnaround = parse_speeds(f"trace:{run},turnaround=true").on(1, seed=0)
    for draw in range(5):
        assert computing.draw_one(0, draw) == 0.25
        assert turnaround.draw_one(0, draw) == 0.5
