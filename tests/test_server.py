"""The optimizer on a flat vector, the learning-rate schedules, and what the server refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asyncsgd.flat import FlatModel, Layout
from asyncsgd.optimizers import SGD, AdamW, Optimizer, OptimizerRecipe, PlainSGD, StepTakenByWorker
from asyncsgd.rules import (
    DANA,
    DCASGD,
    IA2SGD,
    SSP,
    Asynchronous,
    DelayAdaptive,
    DiLoCo,
    Downpour,
    GapAware,
    Koloskova,
    LocalSGD,
    Ringmaster,
    StalenessAware,
    Synchronous,
)
from asyncsgd.rules.base import Arrival, Reply, Rule, Start
from asyncsgd.schedules import WarmupSchedule, constant, cosine, linear
from asyncsgd.server import CHUNK, Server, Starting, is_asynchronous


def starting(worker):
    return Starting(worker, 1, 0, None)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def acted(rule, order, num_workers=3):
    """(altered, arrivals) after workers have arrived in this order."""
    x = randn(8)
    server = Server(x, rule, Optimizer(x, 8, SGD()), lambda num_samples: 5e-4)
    ready = [start for worker in range(num_workers) for start in server.join(worker).start]
    flights = {}
    for worker in order:
        for start in ready:
            flights[start.worker] = server.start(start), server.version
        dispatch, version = flights.pop(worker)
        slot = randn(8, seed=dispatch)
        ready = list(
            server.arrive(worker, dispatch, version, slot, weight=1.0, num_samples=1, seconds=1.0 + worker).start
        )
    return server.rule_acted.altered, server.rule_acted.arrivals


@pytest.mark.parametrize(
    ("rule", "altered"),
    [
        (Asynchronous(), 0),
        (Koloskova(), 0),  # binds from delay 500 on at this learning rate
        (Koloskova(smoothness=1e6), 0),  # no delay above the number of workers
        (DelayAdaptive(concurrency=1), 10),  # delays 0, 1, 2, 2, ...
        (StalenessAware(), 10),
        (Ringmaster(threshold=3), 0),
        (Ringmaster(threshold=2), 4),  # one of three is dropped
        (SSP(slack=9), 0),
        (SSP(slack=0), 12),  # workers wait, and start together
        (Synchronous(), 12),
        (DCASGD(compensation=1.0), 11),  # nothing to compensate at delay 0
        (DCASGD(compensation=1e-7), 0),
        (GapAware(), 11),
        (DANA(), 12),
        (LocalSGD(num_local_steps=1), 12),
        (Downpour(n_push=1, n_fetch=1), 0),
        (Downpour(n_push=2, n_fetch=2), 12),
        (IA2SGD(), 12),
    ],
    ids=str,
)
def test_a_rule_has_acted_where_an_arrival_is_not_simply_applied_and_its_worker_started_again(rule, altered):
    assert acted(rule, [0, 1, 2] * 4) == (altered, 12)


def test_with_one_worker_synchronous_acts_on_nothing_though_it_hands_out_a_copy():
    assert acted(Synchronous(), [0] * 5, num_workers=1) == (0, 5)


def test_a_direction_that_differs_in_its_last_element_only_is_seen_too():
    gradient = randn(CHUNK + 5)
    arrival = Arrival(0, 0, 0, gradient, weight=1.0, num_samples=1, seconds=1.0)
    direction = gradient.clone()
    assert is_asynchronous(Reply(direction, uses=(0,), start=(Start(0),)), arrival)
    direction[-1] += 1.0
    assert not is_asynchronous(Reply(direction, uses=(0,), start=(Start(0),)), arrival)


def network(*sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


BUILDERS = [
    (SGD(), lambda groups: torch.optim.SGD(groups, lr=1.0, fused=True)),
    (SGD(0.9), lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, fused=True)),
    (AdamW((0.7, 0.9)), lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.7, 0.9), fused=True)),
]
every_optimizer = pytest.mark.parametrize(("ours", "theirs"), BUILDERS, ids=["sgd", "momentum", "adamw"])


@every_optimizer
def test_one_call_on_the_flat_vector_is_torch_optim_on_every_tensor_bit_for_bit(ours, theirs):
    flat, plain = FlatModel(network(32, 48, 16)), network(32, 48, 16)
    optimizer = OptimizerRecipe(ours, weight_decay=0.1).on(flat.parameters, flat.layout)
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    expected = theirs([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    for step in range(10):
        rate = 0.1 / (1 + step)
        direction = randn(flat.layout.size, seed=step)
        for name, view in flat.layout.views(direction).items():
            plain.get_parameter(name).grad = view.clone()
        for group in expected.param_groups:
            group["lr"] = rate
        before = direction.clone()
        optimizer.step(direction, rate)
        expected.step()
        assert torch.equal(direction, before)
        for name, parameter in plain.named_parameters():
            assert torch.equal(flat.model.get_parameter(name), parameter), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_sgd_without_torchs_bookkeeping_is_torch_optim_bit_for_bit(dtype):
    ours, theirs = randn(100).to(dtype), nn.Parameter(randn(100).to(dtype))
    optimizer, plain = torch.optim.SGD([theirs], lr=1.0), PlainSGD(ours)
    for step in range(20):
        theirs.grad = randn(100, seed=step).to(dtype)
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
        plain.step(theirs.grad, 0.3 / (1 + step))
        optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("recipe", "plain"),
    [
        (OptimizerRecipe(SGD()), True),
        (OptimizerRecipe(SGD(0.9)), False),
        (OptimizerRecipe(SGD(), weight_decay=0.1), False),
        (OptimizerRecipe(SGD(), clip_norm=1.0), False),
        (OptimizerRecipe(AdamW()), False),
    ],
    ids=str,
)
def test_rules_that_move_the_parameters_themselves_refuse_all_but_plain_sgd(recipe, plain):
    x = torch.zeros(32)
    for rule in (DANA(), DiLoCo()):
        if plain:
            Server(x, rule, recipe.on(x, Layout.of_vector(32)), lambda num_samples: 1.0)
        else:
            with pytest.raises(ValueError, match="its server's optimizer is plain SGD"):
                Server(x, rule, recipe.on(x, Layout.of_vector(32)), lambda num_samples: 1.0)


def test_local_steps_cannot_be_abandoned_and_are_stepped_at_rate_one():
    @dataclasses.dataclass(frozen=True)
    class Abandoning(LocalSGD):
        def arrive(self, state, arrival, view):
            return Reply(arrival.gradient, uses=(arrival.dispatch,), abandon=(0,))

    x = torch.zeros(16)
    s = Server(x, Abandoning(), PlainSGD(x), lambda num_samples: 0.25)
    started = [s.start(s.join(worker).start[0]) for worker in range(2)]
    assert (s.learning_rate, s.inner_learning_rate(0)) == (1.0, 0.25)
    with pytest.raises(RuntimeError, match="abandoned local steps, whose inner optimizer has moved on"):
        hand_over(s, 1, started[1])
    assert x.tolist() == [-1.0] * 16


@given(norm=st.floats(0.01, 100.0), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_direction_is_shortened_as_clip_grad_norm_does_and_stays_as_it_was(norm, seed):
    direction = randn(64, seed=seed)  # norm about 8
    expected = nn.Parameter(torch.zeros(64))
    expected.grad = direction.clone()
    torch.nn.utils.clip_grad_norm_([expected], norm)
    parameters, before = torch.zeros(64), direction.clone()
    Optimizer(parameters, 32, SGD(), clip_norm=norm).step(direction, 1.0)
    torch.testing.assert_close(parameters, -expected.grad, rtol=1e-6, atol=1e-7)
    assert torch.equal(direction, before)
    if norm > 2 * float(before.norm()):
        assert torch.equal(parameters, -direction)


def test_clipping_looks_at_the_norm_of_all_parameters_together_decayed_or_not():
    parameters, direction = torch.zeros(32), torch.zeros(32)
    direction[0], direction[16] = 3.0, 4.0
    Optimizer(parameters, 16, SGD(), clip_norm=1.0).step(direction, 1.0)
    assert parameters[[0, 16]].tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)


def test_weight_decay_acts_on_the_first_elements_only():
    parameters = torch.ones(48)
    Optimizer(parameters, 32, AdamW(), weight_decay=0.5).step(torch.zeros(48), 0.25)
    assert parameters.tolist() == [0.875] * 32 + [1.0] * 16


@pytest.mark.parametrize("num_decayed", [0, 32])
def test_a_model_may_have_only_decayed_or_only_undecayed_parameters(num_decayed):
    parameters = torch.ones(32)
    Optimizer(parameters, num_decayed, SGD(), weight_decay=0.5).step(torch.ones(32), 0.5)
    assert parameters.tolist() == [1.0 - 0.5 * (1.0 + 0.5 * (num_decayed > 0))] * 32


@every_optimizer
def test_an_optimizer_whose_state_lies_in_a_shared_vector_takes_the_same_steps(ours, theirs):
    own, shared = randn(48), randn(48)
    first, second = (Optimizer(vector, 32, ours, weight_decay=0.1) for vector in (own, shared))
    trial = Optimizer(torch.zeros(48), 32, ours)
    trial.create_state()
    state = torch.zeros(trial.state_size)
    second.share_state(state)
    for step in range(5):
        first.step(randn(48, seed=step), 0.1)
        second.step(randn(48, seed=step), 0.1)
    assert torch.equal(own, shared)
    stateless = isinstance(ours, SGD) and ours.momentum == 0.0
    assert bool(state.any()) != stateless


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (constant, [0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        (linear, [0.0, 1.0, 2.0, 1.55, 1.1, 0.2, 0.2]),
        (cosine, [0.0, 1.0, 2.0, 0.2 + 0.9 * (1 + math.sqrt(0.5)), 1.1, 0.2, 0.2]),
    ],
)
def test_the_rate_rises_over_the_warmup_falls_to_a_tenth_and_stays_there(shape, expected):
    schedule = WarmupSchedule(peak=2.0, warmup=100, samples=500, shape=shape)
    assert [schedule(n) for n in (0, 50, 100, 200, 300, 500, 9000)] == pytest.approx(expected, rel=1e-12)


def test_without_a_number_of_samples_or_with_one_within_the_warmup_the_rate_stays_at_its_peak():
    assert [WarmupSchedule(1.0, 10, None, linear)(n) for n in (5, 10, 10**9)] == [0.5, 1.0, 1.0]
    assert [WarmupSchedule(1.0, 10, 10, linear)(n) for n in (9, 10, 11)] == [0.9, 1.0, 1.0]
    assert WarmupSchedule(1.0, 0, 100, linear)(0) == 1.0


def server(rule=None, **more):
    x = torch.zeros(16)
    return Server(x, rule or Asynchronous(), Optimizer(x, 16, SGD()), lambda num_samples: float(num_samples), **more)


def hand_over(to, worker, dispatch, read_version=0):
    return to.arrive(worker, dispatch, read_version, torch.ones(16), weight=1.0, num_samples=2, seconds=0.5)


@dataclasses.dataclass(frozen=True)
class Replying(Rule):
    """A rule that replies what the test wants."""

    name = "replying"
    summary = "for tests"
    arrivals: list[Arrival] = dataclasses.field(default_factory=list)
    replies: list[Reply] = dataclasses.field(default_factory=list)

    def arrive(self, state, arrival, view):
        self.arrivals.append(arrival)
        return self.replies.pop(0)

    def resume(self, state, view):
        return self.replies.pop(0)


def test_starting_a_worker_that_is_busy_or_absent_is_a_bug_of_the_rule_that_is_named():
    s = server()
    s.join(0)
    s.start(starting(0))
    with pytest.raises(RuntimeError, match="rule asynchronous started worker 0, which is busy"):
        s.start(starting(0))
    with pytest.raises(RuntimeError, match="rule asynchronous started worker 1, which is not present"):
        s.start(starting(1))


def test_abandoning_what_is_not_in_flight_is_a_bug_of_the_rule_that_is_named():
    s = server(Replying(replies=[Reply(abandon=(0,))]))
    s.join(0)
    with pytest.raises(RuntimeError, match="rule replying abandoned dispatch 0, which is not in flight"):
        hand_over(s, 0, s.start(starting(0)))


def test_a_worker_cannot_join_twice():
    s = server()
    s.join(0)
    with pytest.raises(RuntimeError, match="worker 0 has joined already"):
        s.join(0)


def test_a_gradient_that_is_not_in_flight_cannot_arrive_and_changes_nothing():
    s = server()
    s.join(0)
    dispatch = s.start(starting(0))
    hand_over(s, 0, dispatch)
    with pytest.raises(RuntimeError, match="dispatch 0 of worker 0 is not in flight"):
        hand_over(s, 0, dispatch)
    with pytest.raises(RuntimeError, match="dispatch 7 of worker 3 is not in flight"):
        hand_over(s, 3, 7)
    assert (s.version, s.num_samples) == (1, 2)


def test_an_abandoned_gradient_is_out_of_flight_and_its_worker_can_start_again():
    s = server(Replying(replies=[Reply(abandon=(0,), start=(Start(0), Start(1)))]))
    s.join(0)
    s.join(1)
    first, second = s.start(starting(0)), s.start(starting(1))
    outcome = hand_over(s, 1, second)
    assert (outcome.abandoned, [each.worker for each in outcome.start], outcome.stepped) == ((0,), [0, 1], False)
    assert not s.is_in_flight(0, first)
    assert [s.start(each) for each in outcome.start] == [2, 3]
    assert s.is_in_flight(0, 2)


def test_a_reply_with_again_takes_several_steps_in_one_outcome_each_with_its_own_rate():
    ones = torch.ones(16)
    steps = [
        Reply(direction=ones, uses=(0,), again=True),
        Reply(direction=ones, uses=(0,), learning_rate_factor=0.5, start=(Start(0),)),
    ]
    s = server(Replying(replies=steps))
    s.join(0)
    outcome = hand_over(s, 0, s.start(starting(0)))
    assert (outcome.uses, [each.worker for each in outcome.start], s.version) == (((0, 0), (0, 1)), [0], 2)
    assert s.parameters.tolist() == [-(2.0 + 1.0)] * 16  # the rate is 2, the samples that arrived
    assert (s.num_samples, s.num_samples_applied) == (2, 2)  # a second use applies no new samples


def test_the_rule_sees_the_learning_rate_with_this_arrivals_samples_counted_and_the_arrival_as_it_came():
    rule = Replying(replies=[Reply(drops=(0,), start=(Start(0),))])
    s = server(rule)
    s.join(0)
    outcome = hand_over(s, 0, s.start(starting(0)))
    (arrival,) = rule.arrivals
    assert (arrival.worker, arrival.dispatch, arrival.read_version, arrival.weight) == (0, 0, 0, 1.0)
    assert (arrival.num_samples, arrival.seconds) == (2, 0.5)
    assert (outcome.outcome, outcome.drops, s.version, s.learning_rate) == ("dropped", (0,), 0, 2.0)
    assert (s.num_samples, s.num_samples_applied) == (2, 0)


def test_leaving_tells_which_gradient_is_lost():
    s = server()
    s.join(1)
    s.join(0)
    assert s.workers == (0, 1)
    dispatch = s.start(starting(1))
    assert s.leave(1)[1] == dispatch
    assert s.leave(0)[1] is None
    assert (s.workers, s.in_flight) == ((), {})


def test_parameters_change_only_within_the_transports_context_of_their_version():
    seen = []

    @contextmanager
    def writing(version):
        before = s.parameters.clone()
        yield
        seen.append((version, not torch.equal(before, s.parameters)))

    s = server(writing=writing)
    s.join(0)
    for version in range(3):
        hand_over(s, 0, s.start(starting(0)), version)
    assert seen == [(0, True), (1, True), (2, True)]


def test_where_workers_step_themselves_the_server_counts_and_changes_nothing():
    x = torch.ones(16)
    s = Server(x, Asynchronous(), StepTakenByWorker(), lambda num_samples: 1.0)
    s.join(0)
    outcome = hand_over(s, 0, s.start(starting(0)))
    assert (s.version, outcome.stepped, x.tolist()) == (1, True, [1.0] * 16)
