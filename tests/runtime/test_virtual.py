"""The virtual clock: exact event lists, what is computed and what never is, budgets, evaluations, records, the network.

Every run is of the real server and the real rules."""

import math
from collections import Counter, defaultdict

import pytest
import torch
from doors import (
    ALL,
    SSP,
    AdamW,
    Asynchronous,
    AsyncLocalSGD,
    Constant,
    Exponential,
    Join,
    KSync,
    Leave,
    Limits,
    LocalSGD,
    Mode,
    Network,
    Quadratic,
    Rennala,
    Ringmaster,
    Synchronous,
    Virtual,
    asyncsgd,
    drawn,
    simulated,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import Plane
from torch import nn

INF = math.inf
every_rule = pytest.mark.parametrize("rule", ALL, ids=str)


def interrupts(rule):
    """Whether it abandons gradients that are being computed."""
    return getattr(rule, "interrupt", False) or getattr(rule, "stops", False)


PATIENT = [rule for rule in ALL if not interrupts(rule)]
without_interrupts = pytest.mark.parametrize("rule", PATIENT, ids=str)


def taking(*seconds):
    """Worker w's gradients take the seconds of its list in turn; the last one is repeated."""

    def seconds_of(worker, draw):
        own = seconds[worker]
        last = len(own) - 1
        return own[min(draw, last)]

    return drawn(len(seconds), seconds_of)


def run(rule, sampler, *, instance=None, learning_rate=0.05, evaluations=4, seed=0, **more):
    if instance is None:
        instance = Quadratic(dimension=3).on(sampler.num_workers, seed)
    return simulated(rule, sampler, instance, learning_rate=learning_rate, evaluations=evaluations, **more)


def bits(result):
    """All that can differ between two runs, bit for bit."""
    done = result.done
    return done.parameters.numpy().tobytes(), done.evaluations, done.num_arrivals, done.version


def arrivals(events):
    return [(event.train_seconds, event.worker, event.dispatch) for event in events]


def test_workers_of_one_constant_speed_arrive_in_their_order_at_every_whole_second():
    sampler = Constant().on(3, 0)
    events = run(Asynchronous(), sampler, budget=Limits(samples=8)).events
    assert len(events) == 8
    for number, event in enumerate(events):
        worker = number % 3
        index = number // 3
        assert event.train_seconds == index + 1
        assert event.worker == worker
        assert event.dispatch == number
        assert event.batches == ((worker, index, index + 1),)
        assert event.read_version == max(0, number - 2)
        assert event.arrival_delay == min(2, number)
        assert event.version == number + 1


def test_at_one_time_the_lower_worker_comes_first_even_if_it_was_started_later():
    sampler = taking([0.5], [1.0], [0.25, 0.75])
    events = run(Asynchronous(), sampler, budget=Limits(samples=8)).events
    assert arrivals(events) == [
        (0.25, 2, 2),
        (0.5, 0, 0),
        (1.0, 0, 4),  # started after worker 1's, whose number is lower
        (1.0, 1, 1),
        (1.0, 2, 3),
        (1.5, 0, 5),
        (1.75, 2, 7),
        (2.0, 0, 8),  # before worker 1's, which the end of the budget discards
    ]


def test_of_two_gradients_of_one_worker_at_one_time_only_the_one_that_was_not_abandoned_arrives():
    # Worker 1's first gradient would be there at 3; it is stopped at 1 and the second one is there at 3.
    sampler = taking([1.0, 5.0], [3.0, 2.0])
    result = run(KSync(quorum=1), sampler, budget=Limits(seconds=3.0))
    assert arrivals(result.events) == [(1.0, 0, 0), (3.0, 1, 3)]
    assert [event.abandoned for event in result.events] == [(1,), (2,)]
    assert [event.read_version for event in result.events] == [0, 1]
    assert [event.uses for event in result.events] == [((0, 0),), ((3, 0),)]


def test_a_synchronous_round_ends_with_its_slowest_worker_and_everybody_starts_then():
    sampler = taking([1.0], [2.0], [0.5])
    events = run(Synchronous(), sampler, budget=Limits(samples=6)).events
    assert arrivals(events) == [(0.5, 2, 2), (1.0, 0, 0), (2.0, 1, 1), (2.5, 2, 5), (3.0, 0, 3), (4.0, 1, 4)]
    assert [event.outcome for event in events] == ["held", "held", "applied"] * 2
    last = events[2]
    assert last.uses == ((0, 0), (1, 0), (2, 0))
    assert [started[:2] for started in last.started] == [(0, 3), (1, 4), (2, 5)]
    assert [event.wait_seconds for event in events] == [0.0, 0.0, 0.0, 1.5, 1.0, 0.0]


INTERRUPTING = [KSync(quorum=2), Rennala(batch=3), Ringmaster(threshold=2, stops=True), Ringmaster(1, stops=True)]


@pytest.mark.parametrize("rule", INTERRUPTING, ids=str)
@given(num_workers=st.integers(3, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_an_abandoned_gradient_is_never_computed_and_its_sample_is_the_workers_next_one(rule, num_workers, seed):
    instance = Quadratic(dimension=2).on(num_workers, seed)
    sampler = Exponential().on(num_workers, seed)
    result = run(rule, sampler, instance=instance, budget=Limits(samples=80))
    started = result.started()
    abandoned = result.abandoned
    assert result.done.num_arrivals == 80
    assert len(result.computed) == 80
    num_in_flight = len(started) - 80 - len(abandoned)
    assert 0 <= num_in_flight < num_workers
    assert abandoned.isdisjoint(event.dispatch for event in result.events)
    computed = Counter(worker for worker, *_ in result.computed)
    for worker, count in computed.items():  # none left out, none twice
        indices = [index for who, index, *_ in result.computed if who == worker]
        assert indices == list(range(count))
    following = dict.fromkeys(range(num_workers), 0)
    for dispatch, (worker, _, _, (batches,)) in sorted(started.items()):
        index = following[worker]
        assert batches == (worker, index, index + 1)
        if dispatch not in abandoned:
            following[worker] = index + 1


def test_events_are_the_same_whenever_abandoned_works_are_taken_out_of_the_heap(monkeypatch):
    """Slow workers are stopped again and again, long before they would have been done."""
    found = []
    seconds = [1.0], [1.1], [1.2], *[[1000.0]] * 3
    for number in (0, 10**9):
        monkeypatch.setattr("asyncsgd.backends.virtual.REBUILD_ABOVE", number)
        rule = Ringmaster(threshold=6, stops=True)
        found.append(run(rule, taking(*seconds), budget=Limits(samples=60)).events)
    assert found[0] == found[1]


@every_rule
def test_a_budget_in_samples_ends_with_the_arrival_that_reaches_it(rule):
    sampler = Exponential().on(5, 3)
    result = run(rule, sampler, budget=Limits(samples=300))
    done = result.done
    assert done.result.status == "DONE"
    last = result.events[-1]
    assert last.total_samples == sum(event.num_samples for event in result.events)
    assert 300 <= last.total_samples < 300 + last.num_local_steps
    evaluation = done.evaluations[-1]
    assert evaluation.version == done.version
    assert evaluation.total_samples == last.total_samples
    assert done.num_arrivals == len(result.events)


@every_rule
@pytest.mark.parametrize("seed", [0, 1])
def test_a_budget_in_samples_ends_where_a_longer_run_passes_by(rule, seed):
    """No last gradients that nobody follows: every version up to the end is that of a run that goes on."""
    sampler = Exponential().on(4, seed)
    samples = 104  # whole rounds of every rule that has rounds
    short = run(rule, sampler, budget=Limits(samples=samples), evaluations=samples)
    long = run(rule, sampler, budget=Limits(samples=4 * samples), evaluations=4 * samples)
    assert arrivals(short.events) == arrivals(long.events[: len(short.events)])
    losses = {evaluation.version: evaluation.loss for evaluation in long.done.evaluations}
    for evaluation in short.done.evaluations:
        assert losses[evaluation.version] == evaluation.loss


@pytest.mark.parametrize(
    ("num_workers", "budget", "ends"),
    [
        (3, Limits(seconds=4.0), (12, 4.0)),  # with what arrives at its last moment
        (3, Limits(seconds=math.nextafter(4.0, 0)), (9, math.nextafter(4.0, 0))),
        (2, Limits(samples=100, seconds=3.5), (6, 3.5)),  # the first one spent ends the run
        (2, Limits(samples=5, seconds=100.0), (5, 3.0)),
        (2, Limits(samples=0), (0, 0.0)),
        (2, Limits(samples=8, target_loss=1e9), (0, 0.0)),  # that the start has reached
    ],
    ids=str,
)
def test_a_run_ends_where_its_budget_is_spent(num_workers, budget, ends):
    sampler = Constant().on(num_workers, 0)
    done = run(Asynchronous(), sampler, budget=budget).done
    assert (done.num_arrivals, done.virtual_seconds) == ends
    assert done.result.status == "DONE"
    assert done.num_arrivals or len(done.evaluations) == 1


@pytest.mark.parametrize("budget", [Limits(samples=8, target_loss=0.01), Limits(seconds=8.0, target_loss=0.01)])
def test_a_target_loss_ends_the_run_at_the_first_evaluation_that_reaches_it(budget):
    # x halves every second: losses 1/2, 1/8, 1/32, 1/128.
    sampler = Constant().on(1, 0)
    instance = Mode().on(1, 0)
    done = run(Asynchronous(), sampler, instance=instance, budget=budget, learning_rate=0.5, evaluations=8).done
    assert [evaluation.train_seconds for evaluation in done.evaluations] == [0, 1, 2, 3]
    assert [evaluation.loss for evaluation in done.evaluations] == [1 / 2, 1 / 8, 1 / 32, 1 / 128]
    assert done.result.status == "DONE"


@pytest.mark.parametrize(
    ("seconds", "losses", "is_stopped"),
    [(2.5, [1 / 2, 8.0], False), (3.5, [1 / 2, 32.0], True)],
    ids=["by the budget", "by patience"],
)
def test_an_evaluation_at_the_end_of_the_budget_does_not_stop_a_run_early(seconds, losses, is_stopped):
    """x goes to -2 x every second: losses 1/2, 2, 8, 32, of which none is a new lowest one after the first.

    An evaluation comes after three samples, and one at the end.
    """
    budget = Limits(seconds=seconds, evaluate_every=3, patience=1)
    done = run(Asynchronous(), Constant().on(1, 0), instance=Mode().on(1, 0), budget=budget, learning_rate=3.0).done
    assert [evaluation.loss for evaluation in done.evaluations] == losses
    assert done.result.status == "DONE"
    assert (done.result.stopped_early is not None) == is_stopped
    assert bool(done.result.message) == is_stopped


def test_evaluations_at_points_of_time_include_all_that_arrived_up_to_then_and_nothing_later():
    # Arrivals at 1, 1 and 1; 2, 2 and 2; ...; evaluations at 0.75, 1.5, 2.25, 3.
    sampler = Constant().on(3, 0)
    done = run(Asynchronous(), sampler, budget=Limits(seconds=3.0), evaluations=4).done
    found = [(e.train_seconds, e.version, e.total_samples) for e in done.evaluations]
    assert found == [(0.0, 0, 0), (0.75, 0, 0), (1.5, 3, 3), (2.25, 6, 6), (3.0, 9, 9)]


@every_rule
def test_how_often_a_run_in_seconds_is_evaluated_changes_no_bit_of_it(rule):
    sampler = Exponential().on(4, 2)
    budget = Limits(seconds=12.0)
    few = run(rule, sampler, budget=budget, evaluations=2).done
    many = run(rule, sampler, budget=budget, evaluations=24).done
    assert torch.equal(few.parameters, many.parameters)
    assert few.evaluations == many.evaluations[::12]


def test_evaluations_in_samples_come_with_the_first_update_at_or_after_even_parts_of_the_budget():
    sampler = Constant().on(3, 0)
    done = run(Synchronous(), sampler, budget=Limits(samples=20), evaluations=4).done
    # Points 5, 10, 15, 20; updates at 3, 6, 9, ..., 18, and at 20 with the last two.
    assert [(e.total_samples, e.version) for e in done.evaluations] == [(0, 0), (6, 2), (12, 4), (15, 5), (20, 7)]


@every_rule
def test_the_kth_gradient_a_worker_starts_takes_the_seconds_of_its_kth_draw_and_brings_its_next_samples(rule):
    speeds = Exponential().on(4, 7)
    draws = defaultdict(int)
    samples = defaultdict(int)
    result = run(rule, speeds, budget=Limits(samples=120))
    due = {}
    abandoned = result.abandoned
    exact = not rule.local_steps
    for dispatch, (worker, _, seconds, ((stream, first, end),)) in sorted(result.started().items()):
        assert stream == worker
        assert first == samples[worker]
        taken = 0.0
        for _ in range(end - first):
            taken += speeds.draw_one(worker, draws[worker])
            draws[worker] += 1
        due[dispatch] = seconds + taken
        if dispatch not in abandoned:
            samples[worker] = end
    assert len(result.events) > 20
    for event in result.events:
        expected = due[event.dispatch]
        if not exact:  # a sum of draws may round either way
            expected = pytest.approx(expected, rel=1e-14)
        assert event.train_seconds == expected


def test_another_seed_is_another_run_and_the_same_seed_the_same_one():
    def bits_with(seed):
        sampler = Exponential().on(4, seed)
        return bits(run(Asynchronous(), sampler, seed=seed, budget=Limits(samples=50)))

    first = bits_with(1)
    assert bits_with(1) == first
    assert bits_with(2) != first


def test_a_worker_that_waits_for_the_slowest_has_its_wait_in_its_next_record():
    # SSP with slack 0: worker 0 arrives at 1 and waits for worker 1, until 3.
    sampler = taking([1.0], [3.0])
    events = run(SSP(slack=0), sampler, budget=Limits(seconds=7.0)).events
    assert arrivals(events) == [(1.0, 0, 0), (3.0, 1, 1), (4.0, 0, 2), (6.0, 1, 3), (7.0, 0, 4)]
    assert [event.wait_seconds for event in events] == [0.0, 0.0, 2.0, 0.0, 2.0]
    assert [[started[0] for started in event.started] for event in events] == [[], [0, 1], [], [0, 1], []]
    assert [event.uses for event in events] == [((0, 0),), ((1, 1),), ((2, 0),), ((3, 1),), ((4, 0),)]
    assert [event.flight_seconds for event in events] == [1.0, 3.0, 1.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("rule", "seconds", "budget", "ends"),
    [
        (Synchronous(), [1.0, INF], Limits(samples=100), ("FAILED", 3, 2.0)),
        (Synchronous(), [1.0, INF], Limits(samples=100, seconds=50.0), ("DONE", 3, 50.0)),
        (Asynchronous(), [1.0, INF], Limits(seconds=50.0), ("DONE", 51, 50.0)),
        (KSync(quorum=1), [INF], Limits(samples=20), ("DONE", 20, 20.0)),  # it stops the others
    ],
    ids=str,
)
def test_who_never_answers_ends_a_run_that_waits_for_him_and_no_other(rule, seconds, budget, ends):
    sampler = taking([1.0], seconds)
    done = run(rule, sampler, budget=budget).done
    result = done.result
    assert (result.status, done.num_arrivals, done.virtual_seconds) == ends
    has_failed = result.status == "FAILED"
    assert ("takes for ever; give --seconds, or other --times" in result.message) == has_failed


def test_a_user_who_stops_the_run_gets_what_there_is():
    calls = iter([False] * 7 + [True])
    sampler = Constant().on(2, 0)
    budget = Limits(samples=100)
    done = run(Asynchronous(), sampler, budget=budget, stop_requested=lambda: next(calls)).done
    assert done.result.status == "INTERRUPTED"
    assert done.result.message == "interrupted by the user"
    assert done.num_arrivals == 7
    assert done.version == 7


def test_two_workers_on_one_link_queue_for_it_first_come_first_served():
    # Every transfer takes 1 s. Worker 0 computes 1 s, worker 1 takes 2.
    network = Network(bytes_per_vector=1.0, worker_bandwidth=(INF,), server_bandwidth=1.0)
    sampler = taking([1.0], [2.0])
    events = run(Asynchronous(), sampler, budget=Limits(samples=5), network=network).events
    # Down: 0-1 (worker 0), 1-2 (worker 1); up: 2-3 (0); down: 3-4 (0); up: 4-5 (1); at 5 both want it: worker 0's
    # gradient is ready and the lower worker goes first: up 5-6 (0); down: 6-7 (1), 7-8 (0); both ready at 9: 9-10 (0),
    # 10-11 (1).
    assert arrivals(events) == [(3.0, 0, 0), (5.0, 1, 1), (6.0, 0, 2), (10.0, 0, 4), (11.0, 1, 3)]
    times = [(event.pull_seconds, event.compute_seconds, event.push_seconds) for event in events]
    assert times == [(1, 1, 1), (2, 2, 1), (1, 1, 1), (2, 1, 1), (2, 2, 2)]


@given(
    num_workers=st.integers(1, 6),
    seed=st.integers(0, 99),
    worker_bandwidth=st.lists(st.sampled_from([0.5, 1.0, 3.0, INF]), min_size=1, max_size=3),
    server_bandwidth=st.sampled_from([1.0, 4.0]),
)
@settings(deadline=None, max_examples=12)
@without_interrupts
def test_the_link_carries_one_vector_at_a_time_in_the_order_of_requests(
    rule, num_workers, seed, worker_bandwidth, server_bandwidth
):
    network = Network(1.0, tuple(worker_bandwidth), server_bandwidth)
    sampler = Exponential().on(num_workers, seed)
    result = run(rule, sampler, budget=Limits(samples=40), network=network)
    started = result.started()
    # Requests in order; those whose end is None are in flight at the end of the run, and hold up others until then.
    downloads = {}
    for dispatch, (worker, _, begun, _) in started.items():
        downloads[dispatch] = (begun, dispatch, None, worker)
    uploads = []
    for event in result.events:
        dispatch = event.dispatch
        begun = started[dispatch][2]
        downloads[dispatch] = (begun, dispatch, begun + event.pull_seconds, event.worker)
        ready = event.train_seconds - event.push_seconds
        uploads.append((ready, dispatch, event.train_seconds, event.worker))
    transfers = [*downloads.values(), *uploads]
    transfers.sort(key=lambda transfer: transfer[:2])
    free = 0.0
    for request, _, end, worker in transfers:
        free = max(free, request) + network.transfer_seconds(worker)  # first come, first served: Lindley's recursion
        assert end is None or end == pytest.approx(free, abs=1e-9)


@pytest.mark.parametrize("num_workers", [1, 4, 16])
def test_fast_workers_fill_the_link_and_no_more_than_half_its_vectors_are_gradients(num_workers):
    network = Network(bytes_per_vector=4.0, worker_bandwidth=(INF,), server_bandwidth=8.0)  # 0.5 s a vector
    sampler = Constant(1e-6).on(num_workers, 0)
    done = run(Asynchronous(), sampler, budget=Limits(seconds=1000.0), network=network).done
    limit = 8.0 / (2 * 4.0) * 1000.0
    assert limit - num_workers - 1 <= done.num_arrivals <= limit


def test_a_warmup_does_not_waste_the_first_round_of_local_steps():
    def warming(num_samples):
        return min(1.0, num_samples / 40)

    sampler = Constant().on(2, 0)
    result = run(LocalSGD(num_local_steps=10), sampler, learning_rate=warming, samples=80)
    rates = []
    for record in result.records:
        if hasattr(record, "started"):
            rates += [rate for *_, rate in record.started]
    # Two workers, ten samples each: 10 of 40, then 20 have arrived and 10 are its own, then the warmup is over.
    assert rates[:6] == [0.25, 0.25, 0.75, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("churn", [(), (Leave(1, 7.0), Join(1, 7.5))])
def test_virtual_workers_have_inner_optimizers_of_their_own_from_when_they_join(churn):
    rule = AsyncLocalSGD(num_local_steps=2, outer_learning_rate=1.0, outer_momentum=0.0, period=1)
    events = []
    start = next(Plane().model(0).parameters()).detach()
    more = {"samples": 120, "evaluations": 1, "learning_rate": 0.05, "weight_decay": 0, "clip_norm": 0, "quiet": True}
    runtime = Virtual(2, speeds=Exponential(), churn=churn)
    ours = asyncsgd.train(Plane(), rule=rule, runtime=runtime, optimizer=AdamW(), report=events.append, **more)
    data = Plane().data(0)
    replicas = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = {}
    versions = [start]
    for event in events:
        if event.kind not in ("join", "arrival"):
            continue
        replica = replicas[event.worker]
        if event.kind == "join":
            optimizers[event.worker] = torch.optim.AdamW([replica], lr=0.05, weight_decay=0, fused=True)
            continue
        replica.data.copy_(versions[event.read_version])
        for index in range(*event.batches[0][1:]):
            x, y = data.batch(0, index)
            optimizer = optimizers[event.worker]
            optimizer.zero_grad()
            errors = nn.functional.linear(x, replica) - y
            loss = errors.square().mean()
            loss.backward()
            optimizer.step()
        moved = versions[event.read_version] - replica.detach()
        versions.append(versions[-1] - moved)
    found = next(ours.model().parameters()).detach()
    torch.testing.assert_close(found, versions[-1], rtol=1e-6, atol=1e-7)
