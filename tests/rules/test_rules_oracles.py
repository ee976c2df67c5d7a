"""Every rule against its plain loop in `reference`, and what follows when workers leave and join in mid-run."""

import inspect
import math

import numpy as np
import pytest
import reference
import torch
from doors import (
    ALL,
    DANA,
    DCASGD,
    EASGD,
    IA2SGD,
    SGD,
    SSP,
    AdamW,
    Arrived,
    Asynchronous,
    AsyncLocalSGD,
    DelayAdaptive,
    DiLoCo,
    Downpour,
    FedBuff,
    FixedDelay,
    GapAware,
    Gradient,
    Hinge,
    KAsync,
    KBatchAsync,
    Koloskova,
    KSync,
    LocalSGD,
    OrMo,
    Polynomial,
    Rennala,
    Rescaled,
    Ringleader,
    Ringmaster,
    StalenessAware,
    Synchronous,
    Taken,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rules_contract import (
    LEARNING_RATE,
    Driver,
    assert_same_run,
    comings_and_goings,
    gradient,
    initial,
    num_workers_,
    seconds,
    weight,
)

LOOPS = [
    Asynchronous(),
    StalenessAware(),
    DelayAdaptive(concurrency=2),
    Koloskova(smoothness=3.0),
    Koloskova(smoothness=0.4),  # eta is the smaller one until tau = 5
    Polynomial(exponent=0.5),
    Hinge(slope=0.5, allowed=1),
    *(SSP(slack) for slack in (0, 1, 3)),
    DCASGD(compensation=0.5),
    DCASGD(compensation=0.5, adaptive=True, decay=0.8),
    DANA(momentum=0.5),
    GapAware(decay=0.999),
    OrMo(momentum=0.5, group=1),
    OrMo(momentum=0.9, group=3),
    Rescaled(),
    IA2SGD(),
    *(Ringmaster(threshold, stops) for threshold in (1, 3) for stops in (False, True)),
    *(KSync(quorum, interrupt) for quorum in (1, 2, 4) for interrupt in (True, False)),
    *(Rennala(batch, interrupt) for batch in (1, 3) for interrupt in (True, False)),
    KAsync(quorum=2),
    KAsync(quorum=4),
    KBatchAsync(batch=2),
    KBatchAsync(batch=5),
    *(FixedDelay(delay) for delay in (0, 1, 4)),
    Ringleader(),
    FedBuff(buffer=3, num_local_steps=2, server_learning_rate=0.7, exponent=1.0),
    FedBuff(buffer=1, num_local_steps=1),
    Downpour(n_push=1, n_fetch=3),
    Downpour(n_push=2, n_fetch=4),
    Downpour(n_push=2, n_fetch=2),
    EASGD(alpha=0.3, num_local_steps=2),
    LocalSGD(num_local_steps=3, post=2),
    DiLoCo(num_local_steps=2, outer_learning_rate=0.7, outer_momentum=0.5),
    AsyncLocalSGD(num_local_steps=2, period=3),
    AsyncLocalSGD(num_local_steps=2, outer_learning_rate=0.3, outer_momentum=0.6, period=3, spread=0.25),
    AsyncLocalSGD(num_local_steps=4, period=2, dynamic=True),
]

orders = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=40)))


def assert_same_points(driver, points, rtol=1e-10):
    assert len(driver.points) == len(points)
    np.testing.assert_allclose(torch.stack(driver.points).numpy(), np.stack(points), rtol=rtol, atol=rtol)


def loop(rule, num_workers, arrivals, **more):
    """The points of the plain loop that has the rule's name, with the rule's parameters."""
    plain, known = getattr(reference, rule.name), {**vars(rule), "weight": weight, "seconds": seconds, **more}
    parameters = {name: known[name] for name in list(inspect.signature(plain).parameters)[5:] if name in known}
    return plain(gradient, initial(), LEARNING_RATE, num_workers, arrivals, **parameters)


def test_every_rule_has_a_plain_loop():
    others = {Synchronous}  # below
    assert {type(rule) for rule in LOOPS} | others == {type(rule) for rule in ALL}


@pytest.mark.parametrize("rule", LOOPS, ids=str)
@given(order=orders)
@example(order=(3, [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2] * 3))
@example(order=(5, [0, 0, 0, 1, 4, 4, 1, 2, 3, 0] * 4))
@settings(deadline=None, max_examples=25)
def test_every_version_is_that_of_the_plain_loop(rule, order):
    num_workers, arrivals = order
    driver = Driver(rule, num_workers=num_workers).drive([("arrive", number) for number in arrivals])
    driver.settle()
    assert_same_points(driver, loop(rule, num_workers, arrivals))


@pytest.mark.parametrize(("rule", "meant"), [(OrMo(0.5), {"group": 3}), (DelayAdaptive(), {"concurrency": 3})], ids=str)
def test_a_parameter_left_at_zero_is_the_number_of_workers(rule, meant):
    arrivals = [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 0, 1, 2] * 3
    driver = Driver(rule, num_workers=3).drive([("arrive", worker) for worker in arrivals])
    assert_same_points(driver, loop(rule, 3, arrivals, **meant))


@pytest.mark.parametrize(
    ("build", "step"),
    [
        (SGD(), lambda: reference.sgd(LEARNING_RATE)),
        (SGD(0.9), lambda: reference.sgd(LEARNING_RATE, momentum=0.9)),
        (AdamW((0.8, 0.95)), lambda: reference.adamw(LEARNING_RATE, (0.8, 0.95))),
    ],
    ids=["sgd", "momentum", "adamw"],
)
@given(order=orders)
@example(order=(3, [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2] * 3))
@settings(deadline=None, max_examples=25)
def test_gap_aware_measures_gaps_in_the_steps_that_its_optimizer_really_takes(build, step, order):
    num_workers, arrivals = order
    driver = Driver(GapAware(decay=0.9), num_workers=num_workers, build=build)
    driver.drive([("arrive", number) for number in arrivals])
    assert_same_points(driver, loop(GapAware(decay=0.9), num_workers, arrivals, step=step()), rtol=1e-7)


def test_ringmaster_with_three_workers_of_one_speed_and_threshold_two_drops_every_third_gradient():
    driver = Driver(Ringmaster(2), num_workers=3)
    outcomes = [driver.arrive(step % 3).outcome for step in range(9)]
    # In each round worker 2 is two updates behind, is dropped and starts again at the version worker 1 has read.
    assert outcomes == ["applied", "applied", "dropped"] * 3
    assert driver.delays == [0, 1, 1, 1, 1, 1]
    assert driver.dropped == {2, 5, 8}


@given(plan=comings_and_goings, num_workers=num_workers_, threshold=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_ringmaster_that_stops_never_drops_and_leaves_nobody_with_a_delay_of_its_threshold(
    plan, num_workers, threshold
):
    driver = Driver(Ringmaster(threshold, stops=True), num_workers=num_workers)
    for command in plan:
        driver.drive([command])
        ages = [driver.server.version - pending.read_version for pending in driver.pending.values()]
        assert max(ages, default=0) < threshold
    assert driver.dropped == set()


@pytest.mark.parametrize("rule", [Ringmaster(41), Ringmaster(41, stops=True), SSP(41)], ids=str)
@given(order=orders)
@settings(deadline=None, max_examples=30)
def test_a_bound_never_reached_is_asynchronous_bit_for_bit(rule, order):
    num_workers, arrivals = order
    plan = [("arrive", worker) for worker in arrivals]
    assert_same_run(
        *(Driver(own, num_workers=num_workers, dtype=torch.float32).drive(plan) for own in (rule, Asynchronous()))
    )


@pytest.mark.parametrize(
    "rule", [Synchronous(), KSync(2), KSync(2, False), Rennala(3), Rennala(3, False), LocalSGD(2), DiLoCo(2)], ids=str
)
@given(plan=comings_and_goings, num_workers=num_workers_)
@settings(deadline=None, max_examples=20)
def test_rules_of_rounds_apply_delay_zero_only_whoever_comes_and_goes(rule, plan, num_workers):
    assert set(Driver(rule, num_workers=num_workers).drive(plan).delays) <= {0}


@given(plan=comings_and_goings, num_workers=num_workers_, slack=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_ssp_starts_nobody_more_than_its_slack_ahead_of_the_slowest_present(plan, num_workers, slack):
    driver, clocks = Driver(SSP(slack), num_workers=num_workers), dict.fromkeys(range(num_workers), 0)
    for command in plan:
        present, arrived = set(driver.server.workers), dict(driver.pending)
        driver.drive([command])
        for worker in present - set(driver.server.workers):
            del clocks[worker]
        for worker in set(driver.server.workers) - present:  # with the clock of the slowest
            clocks[worker] = min(clocks.values(), default=0)
        for worker, pending in arrived.items():
            clocks[worker] = clocks.get(worker, 0) + (pending.dispatch in driver.used | driver.held)
        clocks = {worker: clocks[worker] for worker in driver.server.workers}
        for worker in driver.pending:
            assert clocks[worker] - min(clocks.values()) <= slack
        assert all(clock - min(clocks.values()) <= slack + 1 for clock in clocks.values())


@pytest.mark.parametrize("num_workers", [1, 3, 7])
def test_fixed_delays_are_0_1_up_to_tau_and_then_always_tau_whatever_the_number_of_workers(num_workers):
    driver = Driver(FixedDelay(delay=3), num_workers=num_workers).drive([("arrive", 7 * n) for n in range(40)])
    assert driver.delays == [min(update, 3) for update in range(len(driver.delays))]
    assert len(driver.delays) > 30


@given(order=orders)
@settings(deadline=None, max_examples=20)
def test_dylu_gives_local_steps_in_proportion_to_the_speed_of_the_last_arrival(order):
    num_workers, arrivals = order
    driver = Driver(AsyncLocalSGD(num_local_steps=4, dynamic=True), num_workers=num_workers)
    speeds = {}
    for worker in arrivals:
        arriving = driver.pending[worker]
        driver.arrive(worker)
        speeds[worker] = arriving.num_local_steps / seconds(arriving.dispatch)
        assert driver.pending[worker].num_local_steps == max(1, math.floor(4 * (speeds[worker] / max(speeds.values()))))


def test_dylu_gives_the_fastest_worker_all_its_local_steps_whatever_its_seconds():
    # Fails: floor(H v_i / max_j v_j) is H - 1 for v_i = max_j v_j where H v_i is rounded down. H (v_i / max_j v_j)
    # would be right.
    rule = AsyncLocalSGD(num_local_steps=3, dynamic=True)
    for own_seconds in np.random.default_rng(0).uniform(0.1, 5.0, 100):
        driver = Driver(rule, num_workers=1)
        work, slot = driver.pending[0].work, driver.pending[0].slot
        step = driver.server.react(Arrived(work, 0, slot, Gradient(0.5, 1.0, 1), float(own_seconds), Taken()))
        assert [work.num_local_steps for work in step.start] == [3]


rounds = st.integers(1, 5).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=8))


@given(rounds=rounds)
@settings(deadline=None, max_examples=60)
def test_synchronous_is_the_plain_loop_with_delay_zero_whatever_the_order_of_arrival(rounds):
    num_workers = len(rounds[0])
    driver = Driver(Synchronous(), num_workers=num_workers)
    for order in rounds:
        outcomes = [driver.arrive(worker) for worker in order]
        assert [outcome.outcome for outcome in outcomes] == ["held"] * (num_workers - 1) + ["applied"]
        assert [starting.worker for starting in outcomes[-1].start] == list(range(num_workers))
    assert driver.delays == [0] * (num_workers * len(rounds))
    oracle = reference.synchronous(gradient, weight, initial(), LEARNING_RATE, num_workers, len(rounds))
    assert_same_points(driver, oracle)


@given(rounds=rounds)
@settings(deadline=None, max_examples=40)
def test_synchronous_does_not_depend_on_the_order_of_arrival_in_a_single_bit(rounds):
    in_order, shuffled = (Driver(Synchronous(), num_workers=len(rounds[0]), dtype=torch.float32) for _ in range(2))
    for order in rounds:
        for worker in sorted(order):
            in_order.arrive(worker)
        for worker in order:
            shuffled.arrive(worker)
    assert torch.equal(in_order.parameters, shuffled.parameters)
    assert [record.uses for record in in_order.log if record.uses] == [
        record.uses for record in shuffled.log if record.uses
    ]


def last_step(driver):
    """The latest update, in units of the learning rate: minus the direction of plain SGD."""
    return (driver.points[-2] - driver.points[-1]).numpy() / LEARNING_RATE


def assert_steps_along(driver, direction):
    np.testing.assert_allclose(last_step(driver), direction, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", [KSync(3), KSync(3, interrupt=False), KAsync(3)], ids=str)
def test_a_quorum_is_at_most_those_present_and_is_looked_at_again_when_somebody_leaves_or_joins(rule):
    driver = Driver(rule, num_workers=4)
    driver.arrive(0)
    driver.arrive(2)
    assert not driver.leave(1).stepped  # three present: two of three
    outcome = driver.leave(3)
    assert outcome.uses == ((0, 0), (2, 0))
    assert [starting.worker for starting in outcome.start] == [0, 2]
    start = initial()
    assert_steps_along(
        driver, reference.weighted_mean([gradient(start, 0), gradient(start, 2)], [weight(0), weight(2)])
    )
    assert not driver.arrive(0).stepped
    driver.join(5)
    assert not driver.arrive(2).stepped  # a quorum of two would have done before
    assert driver.arrive(5).stepped


@pytest.mark.parametrize("rule", [KSync(2), KSync(2, interrupt=False), KAsync(2)], ids=str)
def test_a_gradient_held_for_a_quorum_counts_though_its_worker_has_left(rule):
    driver = Driver(rule, num_workers=3)
    driver.arrive(1)
    assert not driver.leave(1).stepped
    assert driver.arrive(0).uses == ((0, 0), (1, 0))


@pytest.mark.parametrize("rule", [LocalSGD(2), DiLoCo(2), Synchronous()], ids=str)
def test_a_round_of_everybody_ends_when_the_last_one_computing_leaves_and_waits_for_those_who_join(rule):
    driver = Driver(rule, num_workers=3)
    driver.arrive(2)
    driver.join(4)
    driver.arrive(0)
    assert not driver.leave(1).stepped  # worker 4 is computing
    outcome = driver.leave(4)
    assert outcome.uses == ((0, 0), (2, 0))
    assert [starting.worker for starting in outcome.start] == [0, 2]


def test_ssp_releases_those_who_wait_for_a_worker_that_leaves():
    driver = Driver(SSP(slack=0), num_workers=3)
    assert driver.arrive(1).start == ()
    assert driver.arrive(0).start == ()
    outcome = driver.leave(2)
    assert not outcome.stepped
    assert [starting.worker for starting in outcome.start] == [1, 0]  # in the order in which they came to wait


def test_a_worker_joins_ssp_with_the_clock_of_the_slowest():
    driver = Driver(SSP(slack=1), num_workers=2)
    for worker in (0, 1, 0, 1, 0):
        driver.arrive(worker)  # clocks 3 and 2
    for _ in range(2):
        driver.join(2)
        assert driver.pending[2].dispatch  # it is started: its clock is 2, as worker 1's
        driver.leave(2)
    driver.join(2)
    assert driver.arrive(0).start == ()  # clock 4, two ahead
    assert driver.arrive(1).start[0].worker == 1  # clock 3, and worker 2 is the slowest, with 2
    assert [starting.worker for starting in driver.arrive(2).start] == [0, 2]


def test_dana_deletes_the_momentum_of_a_worker_that_leaves():
    driver = Driver(DANA(momentum=0.5), num_workers=2)
    driver.arrive(0)
    driver.arrive(1)
    driver.leave(0)
    driver.join(0)
    own = driver.pending[0]
    velocity = gradient(initial(), 1)  # worker 1's; worker 0 has none any more
    ahead = driver.points[-1].numpy() - LEARNING_RATE * 0.5 * velocity
    np.testing.assert_allclose(own.slot.numpy(), gradient(ahead, own.dispatch), rtol=1e-10, atol=1e-12)
    direction = own.slot.numpy().copy()
    driver.arrive(0)
    assert_steps_along(driver, direction)


def test_ia2sgd_deletes_the_slot_of_a_worker_that_leaves_and_gives_an_empty_one_to_one_that_joins():
    driver = Driver(IA2SGD(), num_workers=3)
    for worker in (0, 1, 2):
        driver.arrive(worker)
    driver.leave(1)
    first = driver.pending[0].slot.numpy().copy()
    assert [dispatch for dispatch, _ in driver.arrive(0).uses] == [3, 2]
    assert_steps_along(driver, (first + gradient(initial(), 2)) / 2)
    driver.join(1)
    second = driver.pending[2].slot.numpy().copy()
    assert [dispatch for dispatch, _ in driver.arrive(2).uses] == [3, 5]
    assert_steps_along(driver, (first + second + 0) / 3)


def test_a_worker_that_leaves_ringleaders_first_phase_is_forgotten():
    driver = Driver(Ringleader(), num_workers=3)
    driver.arrive(0)
    driver.arrive(0)
    driver.arrive(1)
    outcome = driver.leave(0)
    assert (outcome.stepped, outcome.drops) == (False, (0, 3))
    assert driver.arrive(2).uses == ((1, 0), (2, 0))
    assert_steps_along(driver, (gradient(initial(), 1) + gradient(initial(), 2)) / 2)


def test_a_worker_that_leaves_ringleaders_second_phase_keeps_its_part_in_it_and_has_none_in_the_next():
    driver = Driver(Ringleader(), num_workers=3)
    for worker in (0, 1, 2):
        driver.arrive(worker)  # the first update, by worker 2, to which 0 and 1 have still to add theirs
    assert driver.arrive(2).outcome == "held"  # for the next round
    outcome = driver.leave(2)
    assert outcome.drops == (5,)
    start, own = initial(), driver.pending[0].slot.numpy().copy()
    assert [dispatch for dispatch, _ in driver.arrive(0).uses] == [0, 3, 1, 2]
    mean = (gradient(start, 0) + own) / 2
    assert_steps_along(driver, (mean + gradient(start, 1) + gradient(start, 2)) / 3)
    outcome = driver.leave(1)  # it was the last to update: the next round begins
    assert not outcome.stepped
    assert outcome.drops == ()
    assert [dispatch for dispatch, _ in driver.arrive(0).uses] == [7]


def test_fixed_delay_takes_a_lost_gradient_out_of_its_queue_and_goes_on():
    driver = Driver(FixedDelay(delay=2), num_workers=3)
    driver.arrive(1)
    driver.arrive(2)
    assert driver.server.version == 0  # dispatch 0, the oldest, has not arrived
    outcome = driver.leave(0)
    # Dispatch 3 starts with worker 1, so three are outstanding again and 1 is due; then 4 with worker 2, and 2 is due.
    assert [starting.worker for starting in outcome.start] == [1, 2]
    assert outcome.uses == ((1, 0), (2, 1))
    assert driver.arrive(1).uses == ((3, 2),)
    for _ in range(20):
        driver.arrive(min(driver.pending))
    assert set(driver.delays[3:]) == {2}
    assert driver.delays[3:]


def test_fixed_delay_goes_on_with_what_it_holds_when_everybody_has_left_and_one_comes_back():
    driver = Driver(FixedDelay(delay=2), num_workers=3)
    driver.arrive(2)
    driver.arrive(1)
    for worker in (1, 2, 0):
        driver.leave(worker)
    assert (driver.held, driver.server.version) == ({1, 2}, 0)
    driver.join(4)
    assert driver.arrive(4).uses == ((1, 0), (2, 1))  # the second once worker 4 has started again
    for _ in range(10):
        driver.arrive(4)
    assert driver.delays == [0, 1, *[2] * (len(driver.delays) - 2)]
    assert len(driver.delays) > 8


def test_a_worker_comes_back_to_downpour_with_a_fetch_and_a_full_period_before_the_next():
    driver = Driver(Downpour(n_push=1, n_fetch=2), num_workers=2)
    driver.arrive(0)
    driver.arrive(1)
    driver.leave(0)
    driver.join(0)
    assert torch.equal(driver.pending[0].start, driver.parameters)
    driver.arrive(1)
    assert torch.equal(driver.pending[1].start, driver.parameters)  # its second push: a fetch
    start, slot = driver.pending[0].start, driver.pending[0].slot.clone()
    driver.arrive(0)
    torch.testing.assert_close(driver.pending[0].start, start - slot)  # its first: it goes on from its own


def test_dylu_forgets_the_speed_of_a_worker_that_leaves():
    driver = Driver(AsyncLocalSGD(num_local_steps=4, dynamic=True), num_workers=3)
    driver.arrive(0)  # 4 steps in 1 second
    assert driver.arrive(2).start[0].num_local_steps == 1  # in 3 seconds: a third of the speed, 4/3 steps
    driver.leave(0)
    assert driver.arrive(2).start[0].num_local_steps == 4  # the only speed known


def test_rescaled_forgets_the_seconds_of_a_worker_that_leaves():
    driver = Driver(Rescaled(), num_workers=3)
    driver.arrive(0)
    driver.leave(0)
    own = driver.pending[2].slot.numpy().copy()
    driver.arrive(2)
    assert_steps_along(driver, own)  # alone in the mean: factor 1
    own = driver.pending[1].slot.numpy().copy()
    driver.arrive(1)
    assert_steps_along(driver, own * 2.0 * (1 / 2 + 1 / 3) / 2)  # seconds 2 of its own, 3 of worker 2


@pytest.mark.parametrize(
    "rule",
    [
        Asynchronous(),
        Rennala(3),
        Rennala(3, False),
        KBatchAsync(3),
        FedBuff(3),
        Ringmaster(2),
        DCASGD(),
        OrMo(),
        EASGD(),
    ],
    ids=str,
)
def test_nothing_follows_when_a_worker_leaves_a_rule_in_which_nobody_waits_and_it_can_come_back(rule):
    driver = Driver(rule, num_workers=3)
    for worker in (0, 1, 1, 2):
        driver.arrive(worker)
    held, version = set(driver.held), driver.server.version
    outcome = driver.leave(1)
    assert (outcome.stepped, outcome.uses, outcome.drops, outcome.abandoned, outcome.start) == (False, (), (), (), ())
    assert (driver.held, driver.server.version) == (held, version)
    assert [starting.worker for starting in driver.join(1).start] == [1]
    assert torch.equal(driver.pending[1].start, driver.parameters)


@pytest.mark.parametrize("rule", [Rennala(3), Rennala(3, False), KBatchAsync(3), FedBuff(3)], ids=str)
def test_gradients_held_in_a_sum_stay_there_when_their_worker_leaves(rule):
    driver = Driver(rule, num_workers=2)
    driver.arrive(1)
    driver.arrive(1)
    driver.leave(1)
    assert {dispatch for dispatch, _ in driver.arrive(0).uses} == {0, 1, 2}
