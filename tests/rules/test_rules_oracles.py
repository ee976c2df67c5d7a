"""Every rule against its plain loop in `reference`, and what follows when workers leave and join in mid-run."""

import inspect

import numpy as np
import pytest
import reference
import torch
from doors import ALL, SGD, AdamW, Arrived, Gradient, Taken, parse_rule
from driver import (
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
from hypothesis import example, given, settings
from hypothesis import strategies as st

# koloskova: with smoothness 0.4, eta is the smaller one until tau = 5.
LOOPS = """asynchronous staleness_aware delay_adaptive:concurrency=2 koloskova:smoothness=3 koloskova:smoothness=0.4
polynomial:exponent=0.5 hinge:slope=0.5,allowed=1 ssp:slack=0 ssp:slack=1 ssp:slack=3 dc_asgd:compensation=0.5
dc_asgd:compensation=0.5,adaptive=true,decay=0.8 dana:momentum=0.5 gap_aware ormo:momentum=0.5,group=1
ormo:momentum=0.9,group=3 rescaled ia2sgd ringmaster:threshold=1 ringmaster:threshold=1,stops=true
ringmaster:threshold=3 ringmaster:threshold=3,stops=true synchronous k_sync:quorum=1 k_sync:quorum=1,interrupt=false
k_sync:quorum=2 k_sync:quorum=2,interrupt=false k_sync:quorum=4 k_sync:quorum=4,interrupt=false rennala:batch=1
rennala:batch=1,interrupt=false rennala:batch=3 rennala:batch=3,interrupt=false k_async:quorum=2 k_async:quorum=4
k_batch_async:batch=2 k_batch_async:batch=5 fixed_delay:delay=0 fixed_delay:delay=1 fixed_delay:delay=4 ringleader
fedbuff:buffer=3,num_local_steps=2,server_learning_rate=0.7,exponent=1 fedbuff:buffer=1,num_local_steps=1
downpour:n_push=1,n_fetch=3 downpour:n_push=2,n_fetch=4 downpour:n_push=2,n_fetch=2 easgd:alpha=0.3,num_local_steps=2
local_sgd:num_local_steps=3,post=2 diloco:num_local_steps=2,outer_learning_rate=0.7,outer_momentum=0.5
async_local_sgd:num_local_steps=2,period=3 async_local_sgd:num_local_steps=4,period=2,dynamic=true
async_local_sgd:num_local_steps=2,outer_learning_rate=0.3,outer_momentum=0.6,period=3,spread=0.25"""
LOOPS = [parse_rule(text) for text in LOOPS.split()]


def orders_of(num_workers):
    arrivals = st.lists(st.integers(0, num_workers - 1), max_size=40)
    return st.tuples(st.just(num_workers), arrivals)


orders = st.integers(1, 6).flatmap(orders_of)


def arriving(numbers):
    return [("arrive", number) for number in numbers]


def assert_same_points(driver, points, rtol=1e-10):
    assert len(driver.points) == len(points)
    found = torch.stack(driver.points).numpy()
    expected = np.stack(points)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def loop(rule, num_workers, arrivals, **more):
    """The points of the plain loop that has the rule's name, with the rule's parameters."""
    plain = getattr(reference, rule.name)
    known = {**vars(rule), "weight": weight, "seconds": seconds, **more}
    names = list(inspect.signature(plain).parameters)
    parameters = {}
    for name in names[5:]:
        if name in known:
            parameters[name] = known[name]
    return plain(gradient, initial(), LEARNING_RATE, num_workers, arrivals, **parameters)


def test_every_rule_has_a_plain_loop():
    assert {type(rule) for rule in LOOPS} == {type(rule) for rule in ALL}


@pytest.mark.parametrize("rule", LOOPS, ids=str)
@given(order=orders)
@example(order=(3, [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2] * 3))
@example(order=(5, [0, 0, 0, 1, 4, 4, 1, 2, 3, 0] * 4))
@settings(deadline=None, max_examples=25)
def test_every_version_is_that_of_the_plain_loop(rule, order):
    num_workers, arrivals = order
    driver = Driver(rule, num_workers=num_workers)
    driver.drive(arriving(arrivals))
    driver.settle()
    expected = loop(rule, num_workers, arrivals)
    assert_same_points(driver, expected)


@pytest.mark.parametrize(
    ("rule", "meant"), [("ormo:momentum=0.5", {"group": 3}), ("delay_adaptive", {"concurrency": 3})]
)
def test_a_parameter_left_at_zero_is_the_number_of_workers(rule, meant):
    rule = parse_rule(rule)
    arrivals = [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 0, 1, 2] * 3
    driver = Driver(rule, num_workers=3)
    driver.drive(arriving(arrivals))
    expected = loop(rule, 3, arrivals, **meant)
    assert_same_points(driver, expected)


@pytest.mark.parametrize(
    ("build", "step"),
    [
        (SGD(0.9), lambda: reference.sgd(LEARNING_RATE, momentum=0.9)),
        (AdamW((0.8, 0.95)), lambda: reference.adamw(LEARNING_RATE, (0.8, 0.95))),
    ],
    ids=["momentum", "adamw"],
)
@given(order=orders)
@example(order=(3, [0, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2] * 3))
@settings(deadline=None, max_examples=25)
def test_gap_aware_measures_gaps_in_the_steps_that_its_optimizer_really_takes(build, step, order):
    num_workers, arrivals = order
    rule = parse_rule("gap_aware:decay=0.9")
    driver = Driver(rule, num_workers=num_workers, build=build)
    driver.drive(arriving(arrivals))
    expected = loop(rule, num_workers, arrivals, step=step())
    assert_same_points(driver, expected, rtol=1e-7)


@pytest.mark.parametrize("rule", ["ringmaster:threshold=41", "ringmaster:threshold=41,stops=true", "ssp:slack=41"])
@given(order=orders)
@settings(deadline=None, max_examples=30)
def test_a_bound_never_reached_is_asynchronous_bit_for_bit(rule, order):
    num_workers, arrivals = order
    bounded = Driver(parse_rule(rule), num_workers=num_workers, dtype=torch.float32)
    asynchronous = Driver(parse_rule("asynchronous"), num_workers=num_workers, dtype=torch.float32)
    bounded.drive(arriving(arrivals))
    asynchronous.drive(arriving(arrivals))
    assert_same_run(bounded, asynchronous)


@given(plan=comings_and_goings, num_workers=num_workers_, slack=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_ssp_starts_nobody_more_than_its_slack_ahead_of_the_slowest_present(plan, num_workers, slack):
    driver = Driver(parse_rule(f"ssp:slack={slack}"), num_workers=num_workers)
    clocks = dict.fromkeys(range(num_workers), 0)
    for command in plan:
        before = set(driver.server.workers)
        computing = dict(driver.pending)
        driver.drive([command])
        present = set(driver.server.workers)
        for worker in before - present:
            del clocks[worker]
        for worker in present - before:  # with the clock of the slowest
            clocks[worker] = min(clocks.values(), default=0)
        arrived = driver.used | driver.held
        for worker, pending in computing.items():
            if worker in present and pending.dispatch in arrived:
                clocks[worker] += 1
        slowest = min(clocks.values(), default=0)
        for worker in driver.pending:
            assert clocks[worker] - slowest <= slack
        for clock in clocks.values():
            assert clock - slowest <= slack + 1


def test_dylu_gives_the_fastest_worker_all_its_local_steps_whatever_its_seconds():
    # Fails: floor(H v_i / max_j v_j) is H - 1 for v_i = max_j v_j where H v_i is rounded down. H (v_i / max_j v_j)
    # would be right.
    rule = parse_rule("async_local_sgd:num_local_steps=3,dynamic=true")
    for own_seconds in np.random.default_rng(0).uniform(0.1, 5.0, 100):
        driver = Driver(rule, num_workers=1)
        pending = driver.pending[0]
        gradient_of_work = Gradient(0.5, 1.0, 1)
        arrived = Arrived(pending.work, 0, pending.slot, gradient_of_work, float(own_seconds), Taken())
        step = driver.server.react(arrived)
        assert [work.num_local_steps for work in step.start] == [3]


@pytest.mark.parametrize("rule", ["synchronous", "k_sync:quorum=9", "k_async:quorum=9", "local_sgd", "diloco"])
@given(rounds=st.integers(1, 5).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=8)))
@settings(deadline=None, max_examples=20)
def test_a_round_of_everybody_does_not_depend_on_the_order_of_arrival_in_a_single_bit(rule, rounds):
    num_workers = len(rounds[0])
    in_order = Driver(parse_rule(rule), num_workers=num_workers, dtype=torch.float32)
    shuffled = Driver(parse_rule(rule), num_workers=num_workers, dtype=torch.float32)
    for order in rounds:
        outcomes = [shuffled.arrive(worker).outcome for worker in order]
        assert outcomes.pop() == "applied"
        assert set(outcomes) <= {"held"}
        for worker in sorted(order):
            in_order.arrive(worker)
    assert torch.equal(in_order.parameters, shuffled.parameters)
    expected = [record.uses for record in in_order.log if record.uses]
    found = [record.uses for record in shuffled.log if record.uses]
    assert found == expected


def go(driver, script):
    """What the last event of a script brings: worker 2 arrives in ``2``, leaves in ``-2`` and joins in ``+2``."""
    for word in script.split():
        worker = int(word.lstrip("+-"))
        if word.startswith("-"):
            outcome = driver.leave(worker)
        elif word.startswith("+"):
            outcome = driver.join(worker)
        else:
            outcome = driver.arrive(worker)
    return outcome


def mean_of(*dispatches):
    total = sum(map(weight, dispatches))
    return {dispatch: weight(dispatch) / total for dispatch in dispatches}


QUORUM_OF_3 = "k_sync:quorum=3 k_sync:quorum=3,interrupt=false k_async:quorum=3"
QUORUM_OF_2 = "k_sync:quorum=2 k_sync:quorum=2,interrupt=false k_async:quorum=2"
EVERYBODY = "local_sgd:num_local_steps=2 diloco:num_local_steps=2 synchronous"
SUMS = "rennala:batch=3 rennala:batch=3,interrupt=false k_batch_async:batch=3 fedbuff:buffer=3"
# Rules, workers, script, dispatches that its last event uses (in any order) and drops, who starts then, and where it
# matters what the step is along: the factor of each gradient. Workers 0 to N - 1 start dispatches 0 to N - 1.
COMING_AND_GOING = [
    # A quorum is at most those present, and is looked at again when somebody leaves or joins.
    (QUORUM_OF_3, 4, "0 2 -1", (), (), (), None),  # three are present: two of three
    (QUORUM_OF_3, 4, "0 2 -1 -3", (0, 2), (), (0, 2), mean_of(0, 2)),
    (QUORUM_OF_3, 4, "0 2 -1 -3 0 +5 2", (), (), (), None),  # a quorum of two would have done before
    (QUORUM_OF_3, 4, "0 2 -1 -3 0 +5 2 5", (4, 5, 6), (), (0, 2, 5), mean_of(4, 5, 6)),
    # A gradient that is held counts though its worker has left.
    (QUORUM_OF_2, 3, "1 -1", (), (), (), None),
    (QUORUM_OF_2, 3, "1 -1 0", (0, 1), (), None, mean_of(0, 1)),
    (QUORUM_OF_3, 4, "0 -0 1 -2", (0, 1), (), None, mean_of(0, 1)),  # two are present, one of them computing
    (SUMS, 2, "1 1 -1 0", (0, 1, 2), (), None, None),
    # A round of everybody ends when the last one computing leaves, and waits for those who join.
    (EVERYBODY, 3, "2 +4 0 -1", (), (), (), None),  # worker 4 is computing
    (EVERYBODY, 3, "2 +4 0 -1 -4", (0, 2), (), (0, 2), None),
    # Who waits for a worker that leaves is released, in the order in which they came to wait.
    ("ssp:slack=0", 3, "1 0 -2", (), (), (1, 0), None),
    # A worker joins with the clock of the slowest: 2, the others having 3 and 2, and then 4, two ahead, and 3.
    ("ssp:slack=1", 2, "0 1 0 1 0 +2 -2 +2 0", (6,), (), (), None),
    ("ssp:slack=1", 2, "0 1 0 1 0 +2 -2 +2 0 1", (5,), (), (1,), None),
    ("ssp:slack=1", 2, "0 1 0 1 0 +2 -2 +2 0 1 2", (8,), (), (0, 2), None),
    # A worker that comes back has no momentum any more.
    ("dana:momentum=0.5", 2, "0 1 -0 +0 0", (4,), (), (0,), {4: 1.0}),
    # Nor a slot; an empty one counts as 0.
    ("ia2sgd", 3, "0 1 2 -1 0", (3, 2), (), (0,), {3: 1 / 2, 2: 1 / 2}),
    ("ia2sgd", 3, "0 1 2 -1 0 +1 2", (3, 5), (), (2,), {3: 1 / 3, 5: 1 / 3}),
    # It is forgotten in the first phase. In the second its part stays, and it has none in the next.
    ("ringleader", 3, "0 0 1 -0", (), (0, 3), (), None),
    ("ringleader", 3, "0 0 1 -0 2", (1, 2), (), (2,), {1: 1 / 2, 2: 1 / 2}),
    ("ringleader", 3, "0 1 2 2 -2", (), (5,), (), None),
    ("ringleader", 3, "0 1 2 2 -2 0", (0, 3, 1, 2), (), (0,), {0: 1 / 6, 3: 1 / 6, 1: 1 / 3, 2: 1 / 3}),
    ("ringleader", 3, "0 1 2 2 -2 0 -1", (), (), (), None),  # it was the last to update: the next round begins
    ("ringleader", 3, "0 1 2 2 -2 0 -1 0", (7,), (), (0,), {7: 1.0}),
    # A lost gradient leaves the queue: 3 starts with worker 1, so three are outstanding again and 1 is due; then 4, 2.
    ("fixed_delay:delay=2", 3, "1 2", (), (), (), None),
    ("fixed_delay:delay=2", 3, "1 2 -0", (1, 2), (), (1, 2), None),
    ("fixed_delay:delay=2", 3, "1 2 -0 1", (3,), (), (1,), None),
    # What is held stays when everybody has left; the second one is applied once worker 4 has started again.
    ("fixed_delay:delay=2", 3, "2 1 -1 -2 -0", (), (), (), None),
    ("fixed_delay:delay=2", 3, "2 1 -1 -2 -0 +4 4", (1, 2), (), None, None),
    # Its seconds are forgotten: alone in the mean, the factor is 1; then 2 seconds of its own and 3 of worker 2.
    ("rescaled", 3, "0 -0 2", (2,), (), (2,), {2: 1.0}),
    ("rescaled", 3, "0 -0 2 1", (1,), (), (1,), {1: 2.0 * (1 / 2 + 1 / 3) / 2}),
]


@pytest.mark.parametrize(("rules", "num_workers", "script", "uses", "drops", "starts", "factors"), COMING_AND_GOING)
def test_what_follows_when_workers_leave_and_join(rules, num_workers, script, uses, drops, starts, factors):
    for rule in map(parse_rule, rules.split()):
        driver = Driver(rule, num_workers=num_workers)
        outcome = go(driver, script)
        assert outcome.stepped == bool(uses)
        used = [dispatch for dispatch, _ in outcome.uses]
        assert sorted(used) == sorted(uses)
        assert outcome.drops == drops
        if starts is not None:
            started = tuple(work.worker for work in outcome.start)
            assert started == starts
        if factors is not None:
            change = driver.points[-2] - driver.points[-1]
            step = change.numpy() / LEARNING_RATE
            along = sum(factor * driver.gradients[dispatch] for dispatch, factor in factors.items())
            np.testing.assert_allclose(step, along, rtol=1e-10, atol=1e-12)


def test_a_worker_comes_back_to_downpour_with_a_fetch_and_a_full_period_before_the_next():
    driver = Driver(parse_rule("downpour:n_push=1,n_fetch=2"), num_workers=2)
    go(driver, "0 1 -0 +0")
    pending = driver.pending[0]
    assert torch.equal(pending.start, driver.parameters)
    go(driver, "1")
    assert torch.equal(driver.pending[1].start, driver.parameters)  # its second push: a fetch
    start = pending.start
    slot = pending.slot.clone()
    go(driver, "0")
    torch.testing.assert_close(driver.pending[0].start, start - slot)  # its first: it goes on from its own


def test_dylu_forgets_the_speed_of_a_worker_that_leaves():
    driver = Driver(parse_rule("async_local_sgd:num_local_steps=4,dynamic=true"), num_workers=3)
    # Worker 0: 4 steps in 1 second; worker 2: in 3 seconds, a third of the speed, so 4/3 steps.
    assert go(driver, "0 2").start[0].num_local_steps == 1
    assert go(driver, "-0 2").start[0].num_local_steps == 4  # the only speed known


NOBODY_WAITS = f"asynchronous ringmaster:threshold=2 dc_asgd ormo easgd {SUMS}"


@pytest.mark.parametrize("rule", NOBODY_WAITS.split())
def test_nothing_follows_when_a_worker_leaves_a_rule_in_which_nobody_waits_and_it_can_come_back(rule):
    driver = Driver(parse_rule(rule), num_workers=3)
    go(driver, "0 1 1 2")
    held = set(driver.held)
    version = driver.server.version
    outcome = go(driver, "-1")
    assert outcome.stepped is False
    assert outcome.uses == ()
    assert outcome.drops == ()
    assert outcome.abandoned == ()
    assert outcome.start == ()
    assert driver.held == held
    assert driver.server.version == version
    joined = go(driver, "+1")
    assert [work.worker for work in joined.start] == [1]
    assert torch.equal(driver.pending[1].start, driver.parameters)
