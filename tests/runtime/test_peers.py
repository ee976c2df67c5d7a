"""AD-PSGD, SGP and streaming DiLoCo: against plain loops, what averaging conserves, and the clock."""

import numpy as np
import pytest
from doors import (
    ADPSGD,
    SGD,
    SGP,
    AdamW,
    Asynchronous,
    Constant,
    DiLoCo,
    Event,
    Exponential,
    Finished,
    Heterogeneous,
    Instance,
    Leave,
    Limits,
    Network,
    OptimizerRecipe,
    Power,
    Processes,
    StreamingDiLoCo,
    Tridiagonal,
    UsageError,
    Virtual,
    asyncsgd,
    partners,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import Plane

NOISY = Tridiagonal(dimension=11, noise=0.3)
every_rule = pytest.mark.parametrize(
    "rule", [ADPSGD(), ADPSGD("ring"), SGP(), SGP(delay=2), StreamingDiLoCo(4, 2, 1)], ids=str
)


class Slopes(Instance):
    """f_i(x) = c_i . x with whole numbers c_i: gradients that do not depend on x, so means are exact sums."""

    def __init__(self, num_workers, num_parameters=3):
        self.num_parameters = num_parameters

    def slope(self, worker, index):
        places = np.arange(self.num_parameters)
        return (7 * worker + 3 * index + 5 * places) % 11 - 5.0

    def initial(self):
        return np.arange(self.num_parameters, dtype=np.float64)

    def gradient(self, x, worker, index, out):
        out[:] = self.slope(worker, index)
        return float(out @ x)

    def loss(self, x):
        return float(x.sum())


def run(rule, num_workers=4, *, problem=NOISY, speeds=None, **changes):
    """How it ended, and its arrivals."""
    if isinstance(problem, Slopes):
        instance = problem
    else:
        instance = problem.on(num_workers, 1)
    arguments = {"learning_rate": 0.125, "budget": Limits(samples=24), "evaluations": 4, "seed": 5, **changes}
    records = []
    if speeds is None:
        speeds = Exponential()
    times = speeds.on(num_workers, seed=2)
    done = asyncsgd.simulate(rule, instance, times, num_workers=num_workers, report=records.append, **arguments)
    return done, [record for record in records if isinstance(record, Event)]


def models(done):
    return done.method.models.numpy()


@pytest.mark.parametrize("rule", [ADPSGD(), ADPSGD("ring"), SGP(), StreamingDiLoCo(30, 1)], ids=str)
def test_one_worker_is_sequential_sgd_to_the_last_bit(rule):
    alone, _ = run(Asynchronous(), 1)
    done, _ = run(rule, 1)
    assert done.parameters.numpy().tobytes() == alone.parameters.numpy().tobytes()
    assert done.virtual_seconds == alone.virtual_seconds


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_sgp_is_its_plain_loop(delay):
    num_workers = 5
    rounds = 9
    problem = Heterogeneous(noise=0.3)
    instance = problem.on(num_workers, seed=1)
    x = [instance.initial() for _ in range(num_workers)]
    w = [1.0] * num_workers
    inbox = {}
    gradient = np.empty(instance.num_parameters)
    for k in range(rounds):
        for i in range(num_workers):
            instance.gradient(x[i] / w[i], i, k, gradient)
            x[i] = x[i] - 0.125 * gradient
        for i in range(num_workers):
            x[i] = x[i] / 2
            w[i] = w[i] / 2
            receiver = (i + 2 ** (k % 3)) % num_workers
            inbox[k + delay, receiver] = (x[i].copy(), w[i])
        for i in range(num_workers):
            if (k, i) in inbox:
                numerator, weight = inbox.pop((k, i))
                x[i] = x[i] + numerator
                w[i] = w[i] + weight
    budget = Limits(samples=rounds * num_workers)
    done, _ = run(SGP(delay), num_workers, problem=problem, budget=budget)
    expected = [x[i] / w[i] for i in range(num_workers)]
    assert np.allclose(models(done), expected, rtol=0, atol=1e-12)
    assert done.method.weights.tolist() == w
    total = sum(x)
    for numerator, _ in inbox.values():
        total = total + numerator
    assert done.parameters.numpy() == pytest.approx(total / num_workers, abs=1e-12)


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_ad_psgd_is_its_plain_loop(topology):
    num_workers = 5
    problem = Heterogeneous(noise=0.3)
    done, events = run(ADPSGD(topology), num_workers, problem=problem, budget=Limits(samples=60))
    instance = problem.on(num_workers, seed=1)
    sampler = Exponential().on(num_workers, seed=2)
    partner = partners(topology, num_workers, seed=5)
    x = [instance.initial() for _ in range(num_workers)]
    taken = [x[i].copy() for i in range(num_workers)]
    finish = [sampler.draw_one(i, 0) for i in range(num_workers)]
    count = [0] * num_workers
    delay = [0] * num_workers
    gradient = np.empty(instance.num_parameters)
    expected = []
    for _ in range(60):
        i = finish.index(min(finish))
        now = finish[i]
        k = count[i]
        expected.append((now, i, k, delay[i]))
        instance.gradient(taken[i], i, k, gradient)
        j = partner(i, k)
        mean = (x[i] + x[j]) * 0.5
        x[j] = mean
        delay[j] += 1
        x[i] = mean - 0.125 * gradient
        taken[i] = x[i].copy()
        delay[i] = 0
        count[i] = k + 1
        finish[i] = now + sampler.draw_one(i, k + 1)
    assert np.allclose(models(done), x, rtol=0, atol=1e-12)
    found = []
    for event in events:
        _, index, _ = event.batches[0]
        _, arrival_delay = event.uses[0]
        found.append((event.train_seconds, event.worker, index, arrival_delay))
    assert found == expected


any_speeds = st.sampled_from([Constant(), Power(1.0), Exponential()])


@settings(max_examples=40, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    samples=st.integers(1, 15),
    topology=st.sampled_from(["complete", "ring"]),
    speeds=any_speeds,
    seed=st.integers(0, 2**70),
)
def test_the_mean_of_ad_psgd_moves_by_gradients_alone(num_workers, samples, topology, speeds, seed):
    problem = Slopes(num_workers)
    budget = Limits(samples=samples)
    done, events = run(ADPSGD(topology), num_workers, problem=problem, speeds=speeds, seed=seed, budget=budget)
    # Small multiples of powers of two: every average is exact, and so is the sum of the models.
    gradients = []
    for event in events:
        gradients.append(problem.slope(event.worker, event.batches[0][1]))
    assert len(gradients) == done.num_arrivals
    assert samples == done.num_arrivals
    total = num_workers * problem.initial() - 0.125 * np.sum(gradients, axis=0)
    assert np.array_equal(models(done).sum(axis=0), total)
    # Every exchange adds one to the delay of one gradient, arrived or in flight.
    num_exchanges = len(events) if num_workers > 1 else 0
    sum_of_delays = 0
    last = dict.fromkeys(range(num_workers), 0)
    for event in events:
        last[event.worker] = event.version
        sum_of_delays += sum(delay for _, delay in event.uses)
    for worker, version in enumerate(done.method.versions):
        sum_of_delays += version - last[worker]
    assert sum_of_delays == num_exchanges


@settings(max_examples=40, deadline=None)
@given(num_workers=st.integers(2, 7), rounds=st.integers(1, 12), delay=st.integers(0, 4), speeds=any_speeds)
def test_push_sum_conserves_the_sums_of_numerators_and_weights(num_workers, rounds, delay, speeds):
    problem = Slopes(num_workers)
    budget = Limits(samples=rounds * num_workers)
    done, _ = run(SGP(delay), num_workers, problem=problem, speeds=speeds, budget=budget)
    # Powers of two throughout, so the weights add up to N exactly.
    in_transit = sum(weights.sum() for _, weights, _ in done.method.in_transit)
    assert done.method.weights.sum() + in_transit == num_workers
    total = np.zeros(3)
    for worker in range(num_workers):
        for index in range(rounds):
            total += problem.slope(worker, index)
    mean = problem.initial() - 0.125 / num_workers * total
    assert done.parameters.numpy() == pytest.approx(mean, abs=1e-12)
    assert done.method.versions == [rounds] * num_workers


@pytest.mark.parametrize("inner", [None, OptimizerRecipe(SGD(momentum=0.9)), OptimizerRecipe(AdamW(), 0.1)], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_one_fragment_without_overlap_and_mix_is_diloco_to_the_last_bit(num_workers, inner):
    more = {"inner": inner, "budget": Limits(samples=24 * num_workers), "evaluations": 6}
    done, _ = run(StreamingDiLoCo(4, fragments=1, overlap=0, mix=0.0), num_workers, **more)
    rule, _ = run(DiLoCo(num_local_steps=4), num_workers, **more)
    assert done.method.outer.numpy().tobytes() == rule.parameters.numpy().tobytes()
    for model in models(done):
        assert model.tobytes() == rule.parameters.numpy().tobytes()
    assert done.version == rule.version
    assert done.virtual_seconds == rule.virtual_seconds
    assert [e.total_samples for e in done.evaluations] == [e.total_samples for e in rule.evaluations]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_workers=st.integers(1, 4), steps=st.integers(1, 17), period=st.integers(1, 6))
def test_streaming_diloco_is_its_plain_loop(data, num_workers, steps, period):
    rule = StreamingDiLoCo(
        num_local_steps=period,
        fragments=data.draw(st.integers(1, period)),
        overlap=data.draw(st.integers(0, period - 1)),
        mix=data.draw(st.floats(0.0, 0.9)),
    )
    # As many gradients from each worker: with equal speeds all are at the same inner step.
    done, _ = run(rule, num_workers, speeds=Constant(), budget=Limits(samples=num_workers * steps))
    instance = NOISY.on(num_workers, seed=1)
    y = [instance.initial() for _ in range(num_workers)]
    gradient = np.empty(11)
    outer = instance.initial()
    momentum = np.zeros(11)
    for step in range(1, steps + 1):
        for worker in range(num_workers):
            instance.gradient(y[worker], worker, step - 1, gradient)
            y[worker] -= 0.125 * gradient
        for fragment in range(rule.fragments):
            part = np.arange(11) % rule.fragments == fragment
            if step % period == fragment * period // rule.fragments:
                mean = outer[part] - np.mean(y, axis=0)[part]
                momentum[part] = 0.9 * momentum[part] + mean
                outer[part] -= 0.7 * (mean + 0.9 * momentum[part])
            sent = step - rule.overlap
            if sent > 0 and sent % period == fragment * period // rule.fragments:
                for model in y:
                    model[part] = rule.mix * model[part] + (1 - rule.mix) * outer[part]
    assert np.allclose(done.method.outer, outer, rtol=0, atol=1e-12)
    assert np.allclose(models(done), y, rtol=0, atol=1e-12)
    assert np.allclose(done.parameters, np.mean(y, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("overlap", "transfer", "round_seconds"),
    [(0, 0.0, 6.0), (0, 1.5, 7.5), (1, 1.5, 6.5), (2, 1.5, 6.0), (4, 1.5, 6.0), (2, 4.25, 8.25)],
)
def test_a_transfer_costs_what_is_longer_than_the_overlap(overlap, transfer, round_seconds):
    rule = StreamingDiLoCo(6, fragments=1, overlap=overlap, mix=0.0, transfer_seconds=transfer)
    done, events = run(rule, 3, speeds=Constant(), budget=Limits(samples=3 * (6 * 5 + 1 + overlap)))
    assert done.version == 5
    # Five rounds, and what comes first after the last sending: the overlap's steps and one more, or the transfer.
    assert done.virtual_seconds == 4 * round_seconds + 6 + max(overlap, transfer) + 1
    waited = [0.0] * 3
    for event in events:
        waited[event.worker] += event.wait_seconds
    assert waited == [5 * max(0.0, transfer - overlap)] * 3


@settings(max_examples=25, deadline=None)
@given(
    overlap=st.integers(0, 3),
    fragments=st.integers(1, 4),
    speeds=st.sampled_from([Power(0.3), Power(2.0), Exponential()]),
    transfer=st.sampled_from([0.0, 2.5]),
)
def test_what_streaming_diloco_computes_does_not_depend_on_the_speeds(overlap, fragments, speeds, transfer):
    def falling(num_samples):
        return 0.25 / (1 + num_samples)

    def losses(speeds, transfer):
        rule = StreamingDiLoCo(4, fragments, overlap, 0.25, transfer_seconds=transfer)
        budget = Limits(samples=72)
        _, events = run(rule, 3, speeds=speeds, learning_rate=falling, budget=budget)
        found = {}
        for event in events:
            _, index, _ = event.batches[0]
            found[event.worker, index] = event.loss
        return found

    first = losses(Constant(), 0.0)
    other = losses(speeds, transfer)
    common = first.keys() & other.keys()
    assert len(common) >= 0.7 * len(first) == 0.7 * 72
    for key in common:
        assert first[key] == other[key]


def test_a_budget_in_samples_is_rounded_up_to_whole_rounds_of_sgp():
    for samples, rounded in ((0, 0), (1, 4), (8, 8), (9, 12)):
        done, _ = run(SGP(), 4, budget=Limits(samples=samples))
        assert done.num_arrivals == rounded


@every_rule
def test_a_run_that_its_seconds_end_is_evaluated_at_its_end(rule):
    done, events = run(rule, 3, speeds=Constant(), budget=Limits(samples=400, seconds=1.5), evaluations=2)
    assert done.evaluations[-1].train_seconds == 1.5
    assert done.evaluations[-1].total_samples == len(events)
    assert len(events) == 3


@every_rule
def test_a_link_to_the_server_and_who_leaves_are_refused_where_there_is_no_server(rule):
    for more in ({"network": Network(1.0, (1.0,), 1.0)}, {"churn": [Leave(1, 2.0)]}):
        with pytest.raises(UsageError, match=f"{rule.name} has none"):
            run(rule, 3, **more)


@every_rule
def test_a_model_is_trained_without_a_server_and_its_replay_is_the_run(rule, tmp_path):
    runtime = Virtual(3, speeds=Exponential())
    more = {"samples": 240, "learning_rate": 0.1, "quiet": True, "folder": tmp_path / "run"}
    run = asyncsgd.train(Plane(), rule=rule, runtime=runtime, **more)
    assert run.evaluations[-1].loss < 0.7 * run.evaluations[0].loss
    assert asyncsgd.replay(tmp_path / "run", Plane()).identical
    assert Finished(tmp_path / "run").summary["rule_acted"] is None


@every_rule
def test_real_processes_have_a_server_and_refuse_a_rule_without_one(rule):
    with pytest.raises(UsageError, match=f"rule {rule.name} has no server"):
        asyncsgd.train(Plane(), rule=rule, runtime=Processes(2), samples=8, learning_rate=0.1)
