"""The contract of every rule, driven through the real server by arrival orders that hypothesis makes up."""

import collections
import dataclasses
import threading

import numpy as np
import pytest
import torch
from doors import ALL, SGD, AdamW, Arrival, Asynchronous, Held, UsageError, asyncsgd, parse_rule
from driver import NUM_DECAYED, SAMPLES, Driver, assert_same_run, comings_and_goings, gradient, initial, num_workers_
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

every_rule = pytest.mark.parametrize("rule", ALL, ids=str)
# Found once by hypothesis at several hundred examples, or thought up: kept, since few are tried for each rule.
everybody_leaves_and_comes_back = [("arrive", 2), ("arrive", 1), *[("leave", 0)] * 4, *[("join", 0)] * 3]
turn_by_turn = [("arrive", 0), ("arrive", 1), ("arrive", 2)] * 5


@every_rule
@given(before=comings_and_goings, after=comings_and_goings, num_workers=num_workers_)
@example(before=[], after=everybody_leaves_and_comes_back + turn_by_turn, num_workers=4)
@example(before=turn_by_turn, after=everybody_leaves_and_comes_back + turn_by_turn, num_workers=4)
@example(before=turn_by_turn[:7], after=turn_by_turn, num_workers=3)
@example(before=turn_by_turn[:8], after=everybody_leaves_and_comes_back + turn_by_turn, num_workers=4)
@settings(max_examples=20)
def test_a_rule_keeps_its_contract(rule, before, after, num_workers):
    """Every gradient is in one place and somebody is always computing (`Driver` looks after each event); the same
    arrivals give the same replies and bits; and the state comes back from a file in mid-run, with nothing shared."""
    straight = Driver(rule, num_workers=num_workers, dtype=torch.float32)
    again = Driver(rule, num_workers=num_workers, dtype=torch.float32)
    straight.drive(before).drive(after).settle()
    again.drive(before).through_a_file()
    again.drive(after)
    assert_same_run(straight, again)
    if rule.name in ("synchronous", "k_sync", "rennala", "local_sgd", "diloco"):
        assert set(straight.delays) <= {0}
    if getattr(rule, "stops", False):
        assert not straight.dropped
    if bound := getattr(rule, "threshold", getattr(rule, "delay", 0) + 1 if rule.name == "fixed_delay" else 0):
        assert max(straight.delays, default=0) < bound


@every_rule
def test_a_dry_run_of_a_rule_gives_its_state_as_a_checkpoint_gives_it_back(rule):
    assert type(asyncsgd.check(rule)) is type(rule.init(torch.zeros(1)))


@dataclasses.dataclass
class Seen:
    what: object
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Keeping(Asynchronous):
    """Asynchronous, and its state holds something."""

    name = "keeping"
    make: object = list

    def init(self, like):
        return Seen(self.make())

    def arrive(self, state, arrival, view):
        state.count += 1
        return super().arrive(state, arrival, view)


def a_frozenset():
    return frozenset([1])


def test_a_dry_run_names_the_field_of_a_rules_state_that_would_not_come_back():
    assert asyncsgd.check(Keeping(dict)) == Seen({}, 20)
    reasons = {collections.deque: "it holds a collections.deque", threading.Lock: "cannot pickle"}
    reasons[a_frozenset] = "it holds a frozenset"
    for make, why in reasons.items():
        words = rf"rule keeping: Seen\.what would not come back from a checkpoint \({why}"
        with pytest.raises(UsageError, match=words):
            asyncsgd.check(Keeping(make))


@dataclasses.dataclass(frozen=True)
class Forgetful(Asynchronous):
    """It starts no worker again."""

    name = "forgetful"

    def arrive(self, state, arrival, view):
        return asyncsgd.Reply(uses=(arrival.dispatch,))


def test_a_dry_run_refuses_a_rule_that_leaves_nobody_at_work():
    with pytest.raises(UsageError, match="rule forgetful left nobody in flight"):
        asyncsgd.check(Forgetful())


def plain_loop(build, weight_decay, learning_rate, steps):
    """torch's own optimizer on a weight and a bias, one gradient after the other."""
    start = torch.from_numpy(initial()).float()
    parts = [nn.Parameter(start[:NUM_DECAYED].clone()), nn.Parameter(start[NUM_DECAYED:].clone())]
    groups = []
    for part, decay in zip(parts, (weight_decay, 0.0), strict=True):
        groups.append({"params": [part], "weight_decay": decay})
    optimizer = build(groups)
    for step in range(steps):
        point = torch.cat([part.detach() for part in parts])
        direction = torch.from_numpy(gradient(point.double().numpy(), step)).float()
        parts[0].grad = direction[:NUM_DECAYED].clone()
        parts[1].grad = direction[NUM_DECAYED:].clone()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SAMPLES * (step + 1))
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


def falling(num_samples):
    return 0.1 / (1 + num_samples)


def alone(rule, ours=SGD(), weight_decay=0.0):  # noqa: B008 - frozen
    """The parameters after 40 gradients of the only worker, each fresh."""
    more = {"dtype": torch.float32, "build": ours, "weight_decay": weight_decay, "learning_rate": falling}
    driver = Driver(parse_rule(rule), num_workers=1, **more)
    driver.drive([("arrive", 0)] * 40)
    assert driver.delays == [0] * 40
    return driver.parameters


EXACT = """asynchronous synchronous k_sync k_sync:interrupt=false fixed_delay:delay=0 ssp:slack=0 ssp:slack=2
staleness_aware delay_adaptive delay_adaptive:concurrency=2 koloskova polynomial hinge:slope=1,allowed=0 rennala:batch=1
rennala:batch=1,interrupt=false ringmaster:threshold=1 ringmaster:threshold=1,stops=true k_async k_batch_async:batch=1
dc_asgd:compensation=0.5 dc_asgd:compensation=0.5,adaptive=true gap_aware ringleader ia2sgd"""


@pytest.mark.parametrize("rule", EXACT.split())
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), lambda groups: torch.optim.SGD(groups, lr=1.0, fused=True)),
        (SGD(0.9), lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, fused=True)),
        (AdamW((0.8, 0.95)), lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), fused=True)),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_with_one_worker_a_rule_without_a_force_of_its_own_is_torch_optim_bit_for_bit(rule, ours, theirs):
    expected = plain_loop(theirs, 0.1, falling, 40)
    assert torch.equal(alone(rule, ours, 0.1), expected)


@pytest.mark.parametrize(
    ("rule", "momentum", "factor"),
    [
        ("rescaled", 0.0, 1.0),  # its factor tau (1 / tau) is 1 up to its last bit
        ("ormo:momentum=0", 0.0, 1.0),
        ("ormo:momentum=0.9", 0.9, 1.0),
        ("dana:momentum=0", 0.0, 1.0),
        # x - (x - y) is y up to rounding. A worker's rate counts its own samples as having arrived, as a server's does.
        ("fedbuff:buffer=1,num_local_steps=1", 0.0, 1.0),
        ("fedbuff:buffer=1,num_local_steps=1,server_learning_rate=0.5", 0.0, 0.5),
        ("downpour:n_push=1,n_fetch=3", 0.0, 1.0),
        ("local_sgd:num_local_steps=1", 0.0, 1.0),
        ("diloco:num_local_steps=1,outer_learning_rate=0.5,outer_momentum=0", 0.0, 0.5),
        ("async_local_sgd:num_local_steps=1,outer_learning_rate=0.5,outer_momentum=0,period=1", 0.0, 0.5),
        ("easgd:alpha=0.5,num_local_steps=1", 0.0, 0.5),  # replica and centre meet half-way
    ],
)
def test_with_one_worker_a_rule_with_a_force_of_its_own_is_torch_sgd_up_to_rounding(rule, momentum, factor):
    def sgd(groups):
        return torch.optim.SGD(groups, lr=1.0, momentum=momentum)

    def rate(num_samples):
        return factor * falling(num_samples)

    theirs = plain_loop(sgd, 0.0, rate, 40)
    torch.testing.assert_close(alone(rule), theirs, rtol=1e-6, atol=1e-6)


EVERY_ARRIVAL = """asynchronous staleness_aware delay_adaptive koloskova polynomial hinge downpour:n_push=1,n_fetch=2
dc_asgd dana gap_aware ormo async_local_sgd:num_local_steps=2,dynamic=true easgd:num_local_steps=2 ia2sgd rescaled"""


@pytest.mark.parametrize("rule", EVERY_ARRIVAL.split())
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_of_one_constant_speed_have_delays_0_1_up_to_n_minus_one_and_then_always_n_minus_one(rule, num_workers):
    driver = Driver(parse_rule(rule), num_workers=num_workers)
    for step in range(4 * num_workers):
        driver.arrive(step % num_workers)
    most = num_workers - 1
    expected = [min(step, most) for step in range(4 * num_workers)]
    assert driver.delays == expected


@given(weights=st.lists(st.integers(1, 1000), min_size=1, max_size=8), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_what_is_held_is_taken_out_as_the_weighted_mean_of_float64_and_leaves_nothing(weights, seed):
    gradients = torch.randn(len(weights), 64, generator=torch.Generator().manual_seed(seed))
    held = Held()
    for _ in range(2):
        for dispatch, (row, row_weight) in enumerate(zip(gradients, weights, strict=True)):
            held.add(Arrival(0, dispatch, 0, row, float(row_weight), 1, 1.0))
        mean, dispatches = held.take()
        assert dispatches == tuple(range(len(weights)))
        assert len(held) == 0
        expected = np.average(gradients.double().numpy(), axis=0, weights=weights)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=2e-6)


def test_true_and_false_are_read_in_both_spellings():
    for true, false in (("true", "false"), ("True", "False")):
        assert parse_rule(f"ringmaster:stops={true},threshold=2").stops
        assert not parse_rule(f"k_sync:interrupt={false}").interrupt


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("asynchronos", "'asynchronos' 'asynchronous'"),
        ("", "'' asynchronous, synchronous,"),
        ("asynchronous:threshold=3", "'asynchronous' 'threshold' none"),
        ("ringmaster:threshold", "'threshold' ringmaster:threshold=VALUE"),
        ("ringmaster:threshold=2.5", "threshold='2.5' whole"),
        ("polynomial:exponent=half", "exponent='half' number"),
        ("k_sync:interrupt=no", "interrupt='no' true false"),
        ("downpour:n_push=2,n_fetch=3", "n_fetch multiple n_push"),
        ("async_local_sgd:period=4,spread=0.5", "spread [0, 1/period] 0.5"),
        ("ringmaster:threshold=2,threshold=3", "threshold twice"),
        ("k_sync:quorum=-1", "k_sync:quorum=-1 quorum must be 1 or more, -1"),
    ],
)
def test_a_rule_that_cannot_be_read_says_what_is_wrong_and_what_to_type(text, words):
    with refused(words):
        parse_rule(text)
