"""The contract of every rule, driven through the real server by arrival orders that hypothesis makes up."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asyncsgd.errors import UsageError
from asyncsgd.record import APPLIED, DROPPED, HELD
from asyncsgd.rules import ALL, Asynchronous, Ringmaster, StalenessAware, Synchronous, describe_rules, parse_rule
from asyncsgd.rules.base import Rule, WeightedMean
from asyncsgd.server import SGD, AdamW, Optimizer, Outcome, Server

SIZE, NUM_DECAYED = 48, 32  # multiples of 16, as in a flat vector
LEARNING_RATE = 0.125
every_rule = pytest.mark.parametrize("rule", ALL, ids=str)


def gradient(point: np.ndarray, dispatch: int) -> np.ndarray:
    """Of the quadratic that belongs to `dispatch`; never zero in practice."""
    draw = np.random.default_rng(dispatch)
    curvature, minimum = draw.uniform(0.5, 1.5, len(point)), draw.normal(size=len(point))
    return curvature * (point - minimum)


def weight(dispatch: int) -> float:
    return 1.0 + dispatch * 7 % 5


def initial() -> np.ndarray:
    return np.random.default_rng(99).normal(size=SIZE)


@dataclasses.dataclass
class Pending:
    dispatch: int
    read_version: int
    slot: Tensor


class Driver:
    """Workers without processes: gradients in flight, each computed at the version it read, arrive in any order.

    It keeps books of its own on every dispatch and compares them with what the server says after each event.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        num_workers: int,
        dtype: torch.dtype = torch.float64,
        build: Any = SGD(),  # noqa: B008 - frozen
        weight_decay: float = 0.0,
        learning_rate: Callable[[int], float] = lambda num_samples: LEARNING_RATE,
    ) -> None:
        self.parameters = torch.from_numpy(initial()).to(dtype)
        optimizer = Optimizer(self.parameters, NUM_DECAYED, build, weight_decay=weight_decay)
        self.server = Server(self.parameters, rule, optimizer, learning_rate)
        self.pending: dict[int, Pending] = {}
        self.points = [self.parameters.clone()]
        self.log: list[Outcome] = []
        self.delays: list[int] = []
        self.started: list[int] = []
        self.held: set[int] = set()
        self.used: set[int] = set()
        self.dropped: set[int] = set()
        self.lost: set[int] = set()
        self._read: dict[int, int] = {}
        self.final_ages = 0
        self.outstanding_at_updates = 0
        for worker in range(num_workers):
            self.join(worker)

    def join(self, worker: int) -> Outcome:
        return self._book(lambda: self.server.join(worker), None)

    def leave(self, worker: int) -> Outcome:
        gone = self.pending.pop(worker, None)

        def leave() -> Outcome:
            outcome, dispatch = self.server.leave(worker)
            assert dispatch == (None if gone is None else gone.dispatch)
            return outcome

        if gone is not None:
            self.lost.add(gone.dispatch)
            self.final_ages += self.server.version - gone.read_version
        return self._book(leave, None)

    def arrive(self, worker: int) -> Outcome:
        arriving = self.pending.pop(worker)
        outcome = self._book(lambda: self._hand_over(worker, arriving), arriving.dispatch)
        arriving.slot.fill_(torch.nan)  # the slot is valid during the call only
        return outcome

    def _hand_over(self, worker: int, arriving: Pending) -> Outcome:
        return self.server.arrive(
            worker,
            arriving.dispatch,
            arriving.read_version,
            arriving.slot,
            weight=weight(arriving.dispatch),
            num_samples=2,
            seconds=0.0,
        )

    def _book(self, act: Callable[[], Outcome], arriving: int | None) -> Outcome:
        server, version = self.server, self.server.version
        if arriving is not None:
            self.held.add(arriving)
        outstanding = len(self.pending) + len(self.held)
        outcome = act()
        changed = not torch.equal(self.parameters, self.points[-1])
        assert server.version - version == int(changed) == int(outcome.stepped)
        if changed:
            self.points.append(self.parameters.clone())
            self.outstanding_at_updates += outstanding - len(outcome.uses)
        for dispatch, delay in outcome.uses:
            self.held.remove(dispatch)  # used once, after its arrival
            self.used.add(dispatch)
            assert delay == version - self._read[dispatch]
            self.delays.append(delay)
            self.final_ages += delay
        for dispatch in outcome.drops:
            self.held.remove(dispatch)
            self.dropped.add(dispatch)
            self.final_ages += server.version - self._read[dispatch]
        if arriving is not None:
            whereabouts = {APPLIED: self.used, HELD: self.held, DROPPED: self.dropped}
            assert arriving in whereabouts[outcome.outcome]
        self.log.append(outcome)
        for worker in outcome.start:
            assert worker not in self.pending
            self._start(worker)
        flights = server.in_flight
        assert {worker: flight.dispatch for worker, flight in flights.items()} == {
            worker: pending.dispatch for worker, pending in self.pending.items()
        }
        assert set(flights) <= set(server.workers)
        assert bool(flights) == bool(server.workers)  # always one in flight while somebody is present
        return outcome

    def _start(self, worker: int) -> None:
        dispatch = self.server.start(worker)
        assert dispatch == len(self.started)
        self.started.append(dispatch)
        self._read[dispatch] = self.server.version
        slot = torch.from_numpy(gradient(self.parameters.double().numpy(), dispatch)).to(self.parameters.dtype)
        self.pending[worker] = Pending(dispatch, self.server.version, slot)

    def settle(self) -> None:
        """Check that every gradient ever started is in exactly one place, and the general law of their ages."""
        in_flight = {pending.dispatch for pending in self.pending.values()}
        places = (self.used, self.dropped, self.lost, self.held, in_flight)
        assert sorted(dispatch for place in places for dispatch in place) == self.started
        waiting = in_flight | self.held
        ages = self.final_ages + sum(self.server.version - self._read[dispatch] for dispatch in waiting)
        assert ages == self.outstanding_at_updates
        arrived = len(self.used) + len(self.dropped) + len(self.held)
        assert (self.server.num_samples, self.server.num_samples_applied) == (2 * arrived, 2 * len(self.used))

    def drive(self, plan: Sequence[tuple[str, int]]) -> Driver:
        for what, number in plan:
            if what == "arrive" and self.pending:
                self.arrive(sorted(self.pending)[number % len(self.pending)])
            elif what == "leave" and self.server.workers:
                self.leave(self.server.workers[number % len(self.server.workers)])
            elif what == "join":
                absent = [worker for worker in range(6) if worker not in self.server.workers]
                if absent:
                    self.join(absent[number % len(absent)])
        return self


arrivals_only = st.lists(st.tuples(st.just("arrive"), st.integers(0, 11)), max_size=60)
comings_and_goings = st.lists(
    st.tuples(st.sampled_from(["arrive"] * 3 + ["leave", "join"]), st.integers(0, 5)), max_size=60
)
num_workers_ = st.integers(1, 5)


# ---- every rule ---------------------------------------------------------------------------------------------


@every_rule
@given(plan=comings_and_goings, num_workers=num_workers_)
@settings(deadline=None, max_examples=60)
def test_every_gradient_is_in_one_place_and_somebody_is_always_computing_while_workers_come_and_go(
    rule, plan, num_workers
):
    Driver(rule, num_workers=num_workers).drive(plan).settle()  # `Driver` checks after each event


@every_rule
@given(plan=comings_and_goings, num_workers=num_workers_)
@settings(deadline=None, max_examples=30)
def test_the_same_arrivals_give_the_same_replies_and_the_same_bits(rule, plan, num_workers):
    first, second = (Driver(rule, num_workers=num_workers, dtype=torch.float32).drive(plan) for _ in range(2))
    assert first.log == second.log
    assert torch.equal(first.parameters, second.parameters)


@every_rule
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@given(before=comings_and_goings, after=comings_and_goings, num_workers=num_workers_)
@settings(deadline=None, max_examples=30)
def test_a_rule_and_its_state_continue_from_a_copy_made_in_mid_run(rule, copied, before, after, num_workers):
    straight = Driver(rule, num_workers=num_workers, dtype=torch.float32).drive(before)
    resumed = Driver(rule, num_workers=num_workers, dtype=torch.float32).drive(before)
    server = resumed.server
    original = server._state
    server.rule, server._state = copied((server.rule, original))
    if original is not None:
        assert server._state is not original
        for field in vars(original).values():  # whoever still looked at the original would now see rubbish
            field.clear()
    assert server.rule == rule
    straight.drive(after)
    resumed.drive(after)
    assert straight.log == resumed.log
    assert torch.equal(straight.parameters, resumed.parameters)


def plain_loop(build: Any, weight_decay: float, learning_rate: Callable[[int], float], steps: int) -> Tensor:
    """torch's own optimizer on a weight and a bias, one gradient after the other."""
    start = torch.from_numpy(initial()).float()
    parts = [nn.Parameter(start[:NUM_DECAYED].clone()), nn.Parameter(start[NUM_DECAYED:].clone())]
    groups = [{"params": [part], "weight_decay": decay} for part, decay in zip(parts, (weight_decay, 0.0), strict=True)]
    optimizer = build(groups)
    for step in range(steps):
        point = torch.cat([part.detach() for part in parts])
        direction = torch.from_numpy(gradient(point.double().numpy(), step)).float()
        parts[0].grad, parts[1].grad = direction[:NUM_DECAYED].clone(), direction[NUM_DECAYED:].clone()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(2 * (step + 1))
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@every_rule
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), lambda groups: torch.optim.SGD(groups, lr=1.0, fused=True)),
        (SGD(0.9), lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, fused=True)),
        (AdamW((0.8, 0.95)), lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), fused=True)),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_with_one_worker_every_rule_is_torch_optim_bit_for_bit(rule, ours, theirs):
    def rate(num_samples: int) -> float:
        return 0.1 / (1 + num_samples)

    driver = Driver(rule, num_workers=1, dtype=torch.float32, build=ours, weight_decay=0.1, learning_rate=rate).drive(
        [("arrive", 0)] * 40
    )
    assert torch.equal(driver.parameters, plain_loop(theirs, 0.1, rate, 40))
    assert driver.delays == [0] * 40


# ---- the law of delays --------------------------------------------------------------------------------------

one_update_per_arrival = pytest.mark.parametrize("rule", [Asynchronous(), StalenessAware()], ids=str)


@one_update_per_arrival
@given(plan=arrivals_only, num_workers=st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_delays_and_those_still_pending_sum_to_n_minus_one_per_update(rule, plan, num_workers):
    driver = Driver(rule, num_workers=num_workers).drive(plan)
    updates = driver.server.version
    assert updates == len(plan)
    pending = sum(updates - pending.read_version for pending in driver.pending.values())
    assert sum(driver.delays) + pending == (num_workers - 1) * updates


@one_update_per_arrival
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_of_one_constant_speed_have_delays_0_1_up_to_n_minus_one_and_then_always_n_minus_one(rule, num_workers):
    driver = Driver(rule, num_workers=num_workers)
    for step in range(4 * num_workers):
        driver.arrive(step % num_workers)
    assert driver.delays == [*range(num_workers), *[num_workers - 1] * (3 * num_workers)]


def test_a_worker_twice_as_fast_as_the_other_has_half_an_update_of_delay_and_the_other_two():
    # Speeds 2:1, so shares p = 2/3 and 1/3, and mean delays (1 - p) / p.
    driver = Driver(Asynchronous(), num_workers=2)
    delays = {0: [], 1: []}
    for _ in range(30):
        for worker in (0, 0, 1):
            delays[worker].append(driver.arrive(worker).uses[0][1])
    assert delays == {0: [0] + [0, 1] * 29 + [0], 1: [2] * 30}


# ---- against the plain loops --------------------------------------------------------------------------------


def assert_same_points(driver: Driver, points: Sequence[np.ndarray]) -> None:
    assert len(driver.points) == len(points)
    np.testing.assert_allclose(torch.stack(driver.points).numpy(), np.stack(points), rtol=1e-12, atol=1e-12)


orders = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=40)))


@pytest.mark.parametrize(
    ("rule", "oracle"),
    [(Asynchronous(), reference.asynchronous), (StalenessAware(), reference.staleness_aware)],
    ids=["asynchronous", "staleness_aware"],
)
@given(order=orders)
@settings(deadline=None, max_examples=40)
def test_every_version_is_that_of_the_plain_loop(rule, oracle, order):
    num_workers, arrivals = order
    driver = Driver(rule, num_workers=num_workers).drive([("arrive", worker) for worker in arrivals])
    assert_same_points(driver, oracle(gradient, initial(), LEARNING_RATE, num_workers, arrivals))


@given(order=orders, threshold=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_ringmaster_drops_what_the_plain_loop_drops_and_applies_no_delay_of_its_threshold_or_more(order, threshold):
    num_workers, arrivals = order
    driver = Driver(Ringmaster(threshold), num_workers=num_workers)
    for worker in arrivals:
        version, pending = driver.server.version, driver.pending[worker]
        outcome = driver.arrive(worker)
        late = version - pending.read_version >= threshold
        assert outcome.outcome == (DROPPED if late else APPLIED)
        assert outcome.drops == ((pending.dispatch,) if late else ())
        assert outcome.start == (worker,)
    assert max(driver.delays, default=0) <= threshold - 1
    assert len(driver.delays) + len(driver.dropped) == len(arrivals)
    assert_same_points(
        driver, reference.ringmaster(gradient, initial(), LEARNING_RATE, num_workers, arrivals, threshold)
    )


def test_ringmaster_with_three_workers_of_one_speed_and_threshold_two_drops_every_third_gradient():
    driver = Driver(Ringmaster(2), num_workers=3)
    outcomes = [driver.arrive(step % 3).outcome for step in range(9)]
    # In each round worker 2 is two updates behind, is dropped and starts again at the version worker 1 has read.
    assert outcomes == [APPLIED, APPLIED, DROPPED] * 3
    assert driver.delays == [0, 1, 1, 1, 1, 1]
    assert driver.dropped == {2, 5, 8}


@given(order=orders)
@settings(deadline=None, max_examples=30)
def test_ringmaster_with_a_threshold_never_reached_is_asynchronous_bit_for_bit(order):
    num_workers, arrivals = order
    plan = [("arrive", worker) for worker in arrivals]
    first, second = (
        Driver(rule, num_workers=num_workers, dtype=torch.float32).drive(plan)
        for rule in (Ringmaster(41), Asynchronous())
    )
    assert first.log == second.log
    assert torch.equal(first.parameters, second.parameters)


# ---- synchronous --------------------------------------------------------------------------------------------

rounds = st.integers(1, 5).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=8))


@given(rounds=rounds)
@settings(deadline=None, max_examples=60)
def test_synchronous_is_the_plain_loop_with_delay_zero_whatever_the_order_of_arrival(rounds):
    num_workers = len(rounds[0])
    driver = Driver(Synchronous(), num_workers=num_workers)
    for order in rounds:
        outcomes = [driver.arrive(worker) for worker in order]
        assert [outcome.outcome for outcome in outcomes] == [HELD] * (num_workers - 1) + [APPLIED]
        assert outcomes[-1].start == tuple(range(num_workers))
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
    assert [outcome.uses for outcome in in_order.log if outcome.stepped] == [
        outcome.uses for outcome in shuffled.log if outcome.stepped
    ]


def test_synchronous_steps_along_the_weighted_mean_when_the_last_one_computing_leaves():
    driver = Driver(Synchronous(), num_workers=3)
    driver.arrive(2)
    driver.arrive(0)
    outcome = driver.leave(1)
    point = initial()
    mean = (weight(0) * gradient(point, 0) + weight(2) * gradient(point, 2)) / (weight(0) + weight(2))
    np.testing.assert_allclose(driver.parameters.numpy(), point - LEARNING_RATE * mean, rtol=1e-12)
    assert outcome.uses == ((0, 0), (2, 0))
    assert outcome.start == (0, 2)


@given(plan=comings_and_goings, num_workers=num_workers_)
@settings(deadline=None, max_examples=60)
def test_synchronous_leaves_no_gradient_behind_and_none_old_while_workers_come_and_go(plan, num_workers):
    driver = Driver(Synchronous(), num_workers=num_workers)
    for command in plan:
        driver.drive([command])
        if driver.log[-1].stepped:
            assert driver.held == set()
    for worker in driver.server.workers:
        driver.leave(worker)
    assert driver.held == set()
    assert set(driver.delays) <= {0}


def test_synchronous_keeps_both_gradients_of_a_worker_that_left_and_came_back_within_a_round():
    driver = Driver(Synchronous(), num_workers=2)
    driver.arrive(1)
    driver.leave(1)
    driver.join(1)
    driver.arrive(1)
    outcome = driver.arrive(0)
    assert outcome.uses == ((0, 0), (1, 0), (2, 0))
    point = initial()
    weights = np.array([weight(dispatch) for dispatch in range(3)])
    mean = weights @ np.stack([gradient(point, dispatch) for dispatch in range(3)]) / weights.sum()
    np.testing.assert_allclose(driver.parameters.numpy(), point - LEARNING_RATE * mean, rtol=1e-12)


# ---- the weighted mean --------------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 1000), min_size=2, max_size=8), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_a_weighted_mean_is_that_of_float64_and_is_as_good_after_clear(weights, seed):
    gradients = torch.randn(len(weights), 64, generator=torch.Generator().manual_seed(seed))
    mean = WeightedMean(torch.empty(64))
    for _ in range(2):
        for row, row_weight in zip(gradients, weights, strict=True):
            mean.add(row, float(row_weight))
        assert (mean.count, mean.total_weight) == (len(weights), sum(weights))
        expected = np.average(gradients.double().numpy(), axis=0, weights=weights)
        np.testing.assert_allclose(mean.value().numpy(), expected, rtol=0, atol=2e-6)
        mean.clear()


def test_the_mean_of_one_gradient_is_that_gradient_bit_for_bit_and_a_copy_of_it():
    row = torch.randn(64, generator=torch.Generator().manual_seed(0))
    mean = WeightedMean(row)
    given_row = row.clone()
    mean.add(given_row, 3.7)
    given_row.zero_()
    assert torch.equal(mean.value(), row)


def test_the_mean_of_no_gradients_is_refused():
    mean = WeightedMean(torch.zeros(4))
    with pytest.raises(ValueError, match="mean of no gradients"):
        mean.value()
    mean.add(torch.ones(4), 1.0)
    mean.clear()
    with pytest.raises(ValueError, match="mean of no gradients"):
        mean.value()


# ---- names --------------------------------------------------------------------------------------------------


@every_rule
def test_a_rule_written_as_text_is_read_back_as_the_same_rule(rule):
    assert parse_rule(str(rule)) == rule


def test_rules_are_read_with_and_without_parameters():
    assert parse_rule("ringmaster") == Ringmaster(threshold=8)
    assert parse_rule("ringmaster:threshold=3") == Ringmaster(threshold=3)
    assert str(Ringmaster(threshold=3)) == "ringmaster:threshold=3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "asynchronos",
            r"unknown rule 'asynchronos'; did you mean 'asynchronous'\?; rules: asynchronous, synchronous,",
        ),
        ("zzz", r"unknown rule 'zzz'; rules: "),
        ("", r"unknown rule ''; rules: "),
        ("ringmaster:treshold=3", r"no parameter 'treshold'; did you mean 'threshold'\?; it takes threshold"),
        ("asynchronous:threshold=3", r"rule 'asynchronous' has no parameter 'threshold'; it takes none"),
        ("ringmaster:threshold", r"'threshold' has no value; type --rule ringmaster:threshold=VALUE"),
        ("ringmaster:threshold=many", r"threshold='many' is not a int"),
        ("ringmaster:threshold=2.5", r"threshold='2.5' is not a int"),
        ("ringmaster:threshold=0", r"--rule ringmaster:threshold=0: threshold must be 1 or more, got 0"),
        ("ringmaster:threshold=2,threshold=3", r"threshold.*twice"),
    ],
)
def test_a_rule_that_cannot_be_read_says_what_is_wrong_and_what_to_type(text, message):
    with pytest.raises(UsageError, match=message):
        parse_rule(text)


def test_the_help_on_rules_has_a_line_for_each_with_its_summary_and_parameters():
    lines = describe_rules().splitlines()[1:]
    assert [line.split()[0] for line in lines] == [rule.name for rule in ALL]
    for line, rule in zip(lines, ALL, strict=True):
        assert rule.summary in line
        for field in dataclasses.fields(rule):
            assert f"{field.name}={field.default}" in line
