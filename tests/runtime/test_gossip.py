"""Gossip: what averaging conserves, how fast it contracts, and against plain loops.

Monte-Carlo bounds are 5 standard errors wide, with fixed seeds.
"""

import math
from collections import Counter

import numpy as np
import pytest
from doors import (
    ADPSGD,
    SGP,
    Asynchronous,
    Budget,
    Constant,
    Evaluation,
    Event,
    Exponential,
    Heterogeneous,
    Infinite,
    Instance,
    Membership,
    Mode,
    Partners,
    Power,
    Quadratic,
    StreamingDiLoCo,
    Synchronous,
    Tridiagonal,
    gossip,
    simulated,
    stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st

every_method = pytest.mark.parametrize("method", [ADPSGD(), ADPSGD("ring"), SGP(), SGP(delay=2)], ids=str)


class Slopes(Instance):
    """f_i(x) = c_i . x with whole numbers c_i: gradients that do not depend on x, so means are exact sums."""

    def __init__(self, num_workers, num_parameters=3):
        self.num_workers, self.num_parameters = num_workers, num_parameters

    def slope(self, worker, index):
        return np.array([(7 * worker + 3 * index + 5 * place) % 11 - 5.0 for place in range(self.num_parameters)])

    def initial(self):
        return np.arange(self.num_parameters, dtype=np.float64)

    def gradient(self, x, worker, index, out):
        out[:] = self.slope(worker, index)
        return float(out @ x)

    def exact_gradient(self, x):
        raise AssertionError("not needed")

    def loss(self, x):
        return float(x.sum())

    def optimum(self):
        return None


def run(method, num_workers=4, *, speeds=None, problem=None, **changes):
    speeds = speeds or Exponential()
    instance = problem if isinstance(problem, Instance) else (problem or Heterogeneous()).on(num_workers, seed=1)
    arguments = {"learning_rate": 0.125, "budget": Budget(samples=24), "evaluations": 4, "seed": 5, **changes}
    return gossip(method, instance, speeds.on(num_workers, seed=2), num_workers=num_workers, **arguments)


def pure_gossip(method, num_workers, rounds, start, **changes):
    """Gossip alone, the learning rate being 0; as many evaluations as samples."""
    problem = Quadratic(dimension=start.shape[1])
    samples = rounds * num_workers if isinstance(method, SGP) else rounds
    return run(
        method,
        num_workers,
        problem=problem,
        learning_rate=0.0,
        start=start,
        budget=Budget(samples=samples),
        **{"evaluations": samples, **changes},
    )


def spread(num_workers, num_parameters=3, seed=0):
    return np.random.default_rng(seed).standard_normal((num_workers, num_parameters))


def events_of(records):
    return [record for record in records if isinstance(record, Event)]


def same(first, second):
    return (
        first.models.tobytes() == second.models.tobytes()
        and first.weights.tobytes() == second.weights.tobytes()
        and (first.result, first.evaluations, first.consensus, first.versions)
        == (second.result, second.evaluations, second.consensus, second.versions)
    )


@every_method
def test_one_worker_is_sequential_sgd_to_the_last_bit(method):
    if method == SGP(delay=2):
        method = SGP()  # one worker has no messages to delay
    problem = Tridiagonal(dimension=7, noise=0.3)
    done = run(method, 1, problem=problem)
    instance = problem.on(1, seed=1)
    x, gradient = instance.initial(), np.empty(7)
    for index in range(24):
        instance.gradient(x, 0, index, gradient)
        x = x - 0.125 * gradient
    assert done.models.tobytes() == done.parameters.tobytes() == x.tobytes()
    alone = simulated(Asynchronous(), Exponential().on(1, 2), instance, learning_rate=0.125, samples=24).done
    assert done.virtual_seconds == alone.virtual_seconds
    assert np.allclose(x, alone.parameters.numpy(), rtol=0, atol=1e-12)


def test_sgp_of_two_workers_is_synchronous_sgd():
    problem = Tridiagonal(dimension=5, noise=0.2)
    done = run(SGP(), 2, problem=problem, evaluations=12)
    speeds, instance = Exponential().on(2, seed=2), problem.on(2, seed=1)
    synchronous = simulated(Synchronous(), speeds, instance, learning_rate=0.125, samples=24, evaluations=12).done
    assert np.allclose(done.models, synchronous.parameters.numpy(), rtol=0, atol=1e-12)
    assert done.virtual_seconds == synchronous.virtual_seconds
    assert [(e.train_seconds, e.total_samples) for e in done.evaluations] == [
        (e.train_seconds, e.total_samples) for e in synchronous.evaluations
    ]
    assert [e.loss for e in done.evaluations] == pytest.approx([e.loss for e in synchronous.evaluations], abs=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_sgp_is_its_plain_loop(delay):
    num_workers, rounds, rate = 5, 9, 0.125
    problem = Heterogeneous(noise=0.3)
    instance = problem.on(num_workers, seed=1)
    x = [instance.initial() for _ in range(num_workers)]
    w = [1.0] * num_workers
    inbox = {}
    gradient = np.empty(instance.num_parameters)
    for k in range(rounds):
        for i in range(num_workers):
            instance.gradient(x[i] / w[i], i, k, gradient)
            x[i] = x[i] - rate * gradient
        for i in range(num_workers):
            x[i], w[i] = x[i] / 2, w[i] / 2
            inbox[k + delay, (i + 2 ** (k % 3)) % num_workers] = x[i].copy(), w[i]
        for i in range(num_workers):
            numerator, weight = inbox.pop((k, i), (np.zeros_like(x[i]), 0.0))
            x[i], w[i] = x[i] + numerator, w[i] + weight
    done = run(SGP(delay), num_workers, problem=problem, budget=Budget(samples=rounds * num_workers))
    assert np.array_equal(done.models, np.array([x[i] / w[i] for i in range(num_workers)]))
    assert np.array_equal(done.weights, w)
    total = sum(x) + sum((numerator for numerator, _ in inbox.values()), np.zeros_like(x[0]))
    assert done.parameters == pytest.approx(total / num_workers, abs=1e-12)


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_ad_psgd_is_its_plain_loop(topology):
    num_workers, rate = 5, 0.125
    problem = Heterogeneous(noise=0.3)
    records = []
    done = run(ADPSGD(topology), num_workers, problem=problem, budget=Budget(samples=60), report=records.append)
    instance, sampler = problem.on(num_workers, seed=1), Exponential().on(num_workers, seed=2)
    partners = Partners(topology, num_workers, seed=5)
    x = [instance.initial() for _ in range(num_workers)]
    taken = [x[i].copy() for i in range(num_workers)]
    finish = [sampler.draw_one(i, 0) for i in range(num_workers)]
    count, delay = [0] * num_workers, [0] * num_workers
    gradient = np.empty(instance.num_parameters)
    expected = []
    for _ in range(60):
        i = finish.index(min(finish))
        now, k = finish[i], count[i]
        expected.append((now, i, k, delay[i]))
        instance.gradient(taken[i], i, k, gradient)
        j = partners.of(i, k)
        x[i], x[j] = (x[i] + x[j]) * 0.5, (x[i] + x[j]) * 0.5
        delay[j] += 1
        x[i] = x[i] - rate * gradient
        taken[i], delay[i], count[i] = x[i].copy(), 0, k + 1
        finish[i] = now + sampler.draw_one(i, k + 1)
    assert np.array_equal(done.models, np.array(x))
    assert expected == [(e.train_seconds, e.worker, e.batches[0][1], e.uses[0][1]) for e in events_of(records)]


@settings(max_examples=40, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    samples=st.integers(1, 15),
    topology=st.sampled_from(["complete", "ring"]),
    speeds=st.sampled_from([Constant(), Power(1.0), Exponential()]),
    seed=st.integers(0, 2**70),
)
def test_the_mean_of_ad_psgd_moves_by_gradients_alone(num_workers, samples, topology, speeds, seed):
    problem = Slopes(num_workers)
    records = []
    done = run(
        ADPSGD(topology),
        num_workers,
        problem=problem,
        speeds=speeds,
        seed=seed,
        budget=Budget(samples=samples),
        report=records.append,
    )
    # Small multiples of powers of two: every average is exact, and so is the sum of the models.
    gradients = [problem.slope(event.worker, event.batches[0][1]) for event in events_of(records)]
    total = num_workers * problem.initial() - 0.125 * np.sum(gradients, axis=0)
    assert len(gradients) == samples == done.num_arrivals
    assert np.array_equal(done.models.sum(axis=0), total)
    assert np.array_equal(done.parameters, done.models.mean(axis=0))


@settings(max_examples=40, deadline=None)
@given(
    num_workers=st.integers(2, 7),
    rounds=st.integers(1, 12),
    delay=st.integers(0, 4),
    speeds=st.sampled_from([Constant(), Power(1.0), Exponential()]),
)
def test_push_sum_conserves_the_sums_of_numerators_and_weights(num_workers, rounds, delay, speeds):
    problem = Slopes(num_workers)
    done = run(SGP(delay), num_workers, problem=problem, speeds=speeds, budget=Budget(samples=rounds * num_workers))
    # Powers of two throughout, so the weights add up to N exactly.
    assert done.weights.sum() + done.weights_in_transit.sum() == num_workers
    assert (done.weights_in_transit > 0).any() == (delay > 0)
    gradients = [problem.slope(worker, index) for worker in range(num_workers) for index in range(rounds)]
    mean = problem.initial() - 0.125 / num_workers * np.sum(gradients, axis=0)
    assert done.parameters == pytest.approx(mean, abs=1e-12)
    assert done.versions == (rounds,) * num_workers


@pytest.mark.parametrize(("num_workers", "rounds"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_a_power_of_two_of_workers_agrees_exactly_after_one_sweep_of_the_exponential_graph(num_workers, rounds):
    start = np.arange(2.0 * num_workers).reshape(num_workers, 2) ** 2
    done = pure_gossip(SGP(), num_workers, rounds, start)
    assert np.array_equal(done.models, np.tile(start.mean(axis=0), (num_workers, 1)))
    assert done.consensus[-1] == 0.0 < done.consensus[-2]


@pytest.mark.parametrize("delay", [1, 2, 6])
def test_without_the_weight_the_limit_of_late_push_sum_is_biased(delay):
    start = 1.0 + spread(6)
    done = pure_gossip(SGP(delay), 6, 1500, start, evaluations=1)
    mean = start.mean(axis=0)
    assert np.allclose(done.models, mean, rtol=0, atol=1e-12)
    # Of the mass N, the share delay / (delay + 2) is on its way: sent are halves, and each stays `delay` rounds.
    share = 2 / (2 + delay)
    assert done.weights == pytest.approx(np.full(6, share), abs=1e-12)
    numerators = done.models * done.weights[:, None]
    assert numerators == pytest.approx(np.tile(share * mean, (6, 1)), abs=1e-12)
    assert np.abs(numerators - mean).max() > 0.05


@pytest.mark.parametrize("num_workers", [3, 10])
def test_a_random_pair_average_contracts_the_consensus_distance_by_one_in_n_minus_1(num_workers):
    # With exponential times whoever finishes next is uniform, whatever went before: uniform random pairs.
    ratios = []
    for seed in range(40):
        instance = Quadratic(dimension=4).on(num_workers, seed=0)
        done = gossip(
            ADPSGD(),
            instance,
            Exponential().on(num_workers, seed),
            num_workers=num_workers,
            learning_rate=0.0,
            budget=Budget(samples=100),
            evaluations=100,
            seed=seed,
            start=spread(num_workers, 4, seed),
        )
        # The last N exchanges are left out: once the budget is handed out, workers stop one by one.
        distances = np.array(done.consensus[:-num_workers])
        large = np.flatnonzero(distances[:-1] > 1e-20)  # well above rounding
        ratios.append(distances[large + 1] / distances[large])
    ratio = np.concatenate(ratios)
    error = float(ratio.std() / math.sqrt(len(ratio)))
    assert error < 0.01
    assert abs(float(ratio.mean()) - (1 - 1 / (num_workers - 1))) < 5 * error


def test_the_consensus_distance_is_the_mean_squared_distance_from_the_mean():
    start = np.array([[0.0, 0.0], [2.0, 4.0]])
    done = pure_gossip(ADPSGD(), 2, 1, start)
    assert done.consensus == [5.0, 0.0]  # the mean is (1, 2), either distance 1 + 4
    assert run(SGP(), 4, problem=Slopes(4), budget=Budget(samples=0)).consensus == [0.0]


@pytest.mark.parametrize("topology", ["complete", "ring"])
@pytest.mark.parametrize("speeds", [Constant(), Power(1.0), Exponential()], ids=str)
def test_delays_and_delays_in_flight_add_up_to_the_number_of_exchanges(topology, speeds):
    records = []
    budget = Budget(seconds=40.0)
    done = run(ADPSGD(topology), 5, speeds=speeds, budget=budget, report=records.append)
    events = events_of(records)
    last = {event.worker: event.version for event in events}
    in_flight = sum(version - last.get(worker, 0) for worker, version in enumerate(done.versions))
    assert sum(delay for event in events for _, delay in event.uses) + in_flight == len(events) == done.num_arrivals


def test_two_equally_fast_workers_alternate_with_delays_0_1_1_1():
    records = []
    run(ADPSGD(), 2, speeds=Constant(), budget=Budget(samples=6), report=records.append)
    events = events_of(records)
    assert [(e.worker, e.train_seconds, e.read_version, e.version, e.arrival_delay) for e in events] == [
        (0, 1.0, 0, 1, 0),
        (1, 1.0, 0, 2, 1),
        (0, 2.0, 1, 3, 1),
        (1, 2.0, 2, 4, 1),
        (0, 3.0, 3, 5, 1),
        (1, 3.0, 4, 6, 1),
    ]
    assert [e.dispatch for e in events] == [0, 1, 2, 3, 4, 5]
    assert [e.started for e in events] == [
        ((0, 2, ((0, 1, 2),), None),),
        ((1, 3, ((1, 1, 2),), None),),
        ((0, 4, ((0, 2, 3),), None),),
        ((1, 5, ((1, 2, 3),), None),),
        ((0, 6, ((0, 3, 4),), None),),
        (),
    ]
    joins = [record for record in records if isinstance(record, Membership)]
    assert [join.started for join in joins] == [((0, 0, ((0, 0, 1),), None),), ((1, 1, ((1, 0, 1),), None),)]


@settings(max_examples=30, deadline=None)
@given(
    topology=st.sampled_from(["complete", "ring"]),
    num_workers=st.integers(2, 9),
    seed=st.integers(-(2**70), 2**70),
    data=st.data(),
)
def test_a_partner_is_a_neighbour_and_does_not_depend_on_the_order_of_questions(topology, num_workers, seed, data):
    questions = st.tuples(st.integers(0, num_workers - 1), st.integers(0, 200))
    asked = data.draw(st.lists(questions, max_size=20))
    partners = Partners(topology, num_workers, seed)
    for worker, exchange in asked:
        partner = partners.of(worker, exchange)
        assert partner == Partners(topology, num_workers, seed).of(worker, exchange)
        assert 0 <= partner < num_workers
        assert partner != worker
        assert topology == "complete" or (partner - worker) % num_workers in (1, num_workers - 1)


@pytest.mark.parametrize(("topology", "neighbours"), [("complete", 5), ("ring", 2)])
def test_partners_are_uniform_over_the_neighbours(topology, neighbours):
    partners, draws = Partners(topology, 6, seed=3), 4000
    counts = Counter(partners.of(2, exchange) for exchange in range(draws))
    assert len(counts) == neighbours
    share = 1 / neighbours
    for count in counts.values():
        assert abs(count / draws - share) < 5 * math.sqrt(share * (1 - share) / draws)


@every_method
@settings(max_examples=10, deadline=None)
@given(num_workers=st.integers(2, 5), speeds=st.sampled_from([Constant(), Power(2.0), Exponential(3.0)]))
def test_two_runs_are_bitwise_equal_and_reporting_changes_nothing(method, num_workers, speeds):
    first = run(method, num_workers, speeds=speeds)
    records = []
    assert same(first, run(method, num_workers, speeds=speeds, report=records.append))
    assert [record for record in records if isinstance(record, Evaluation)] == first.evaluations
    seconds = [event.train_seconds for event in events_of(records)]
    assert seconds == sorted(seconds)
    assert [event.total_samples for event in events_of(records)] == list(range(1, len(seconds) + 1))
    started = [entry for record in records if isinstance(record, Event | Membership) for entry in record.started]
    assert [dispatch for _, dispatch, _, _ in started] == list(range(len(started)))
    assert {(e.worker, e.dispatch, e.batches) for e in events_of(records)} <= {entry[:3] for entry in started}
    assert 0 <= len(started) - first.num_arrivals < num_workers  # in flight when the budget is spent


def test_a_budget_in_samples_is_rounded_up_to_whole_rounds_of_sgp():
    assert run(SGP(), 4, budget=Budget(samples=9)).num_arrivals == 12
    assert run(ADPSGD(), 4, budget=Budget(samples=9)).num_arrivals == 9


@every_method
def test_the_learning_rate_may_depend_on_the_samples_that_arrived(method):
    def stops_after_8(num_samples):
        return 0.125 if num_samples <= 8 else 0.0

    records = []
    run(method, learning_rate=stops_after_8, report=records.append)
    assert [event.learning_rate for event in events_of(records)] == [0.125] * 8 + [0.0] * 16
    before, *after = [e.loss for e in run(method, learning_rate=stops_after_8, evaluations=3).evaluations][1:]
    assert after == pytest.approx([before] * 2, rel=1e-12)


@pytest.mark.parametrize(
    "method", [ADPSGD(), SGP(delay=2), StreamingDiLoCo(num_local_steps=4, fragments=1, overlap=0)], ids=str
)
@pytest.mark.parametrize(
    ("status", "end", "more"),
    [
        ("DONE", (3.5, 12), {"seconds": 3.5, "evaluations": 7}),
        ("DONE", (3.5, 12), {"seconds": 3.5, "samples": 40}),
        ("DONE", (0.0, 0), {"samples": 0}),
        ("DONE", None, {"samples": 400, "target_loss": 0.06, "evaluations": 100}),
        ("DIVERGED", None, {"samples": 400, "learning_rate": 1e200, "evaluations": 1}),
        ("INTERRUPTED", (0.0, 0), {"samples": 40, "stop_requested": lambda: True}),
        ("FAILED", (0.0, 0), {"samples": 40, "speeds": Infinite(probability=0.999999)}),
    ],
)
def test_without_a_server_too_a_run_ends_by_its_budget_its_loss_or_its_user(method, status, end, more):
    budget = Budget(**{name: more[name] for name in ("samples", "seconds", "target_loss") if name in more})
    arguments = {"learning_rate": 0.125, "evaluations": 4, **{k: v for k, v in more.items() if not hasattr(budget, k)}}
    speeds = arguments.pop("speeds", Constant())
    begin = stream if isinstance(method, StreamingDiLoCo) else gossip
    with np.errstate(all="ignore"):
        done = begin(method, Mode().on(4, 1), speeds.on(4, 2), num_workers=4, budget=budget, **arguments)
    assert done.result.status == status
    if end is None:
        assert 0 < done.num_arrivals < 400
    else:
        assert (done.virtual_seconds, done.num_arrivals) == end
    if "target_loss" in more:
        assert done.evaluations[-1].loss <= 0.06 < done.evaluations[-2].loss
    if more.get("evaluations") == 7:
        assert [e.train_seconds for e in done.evaluations] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
        assert [e.total_samples for e in done.evaluations] == [0, 0, 4, 4, 8, 8, 12, 12]
