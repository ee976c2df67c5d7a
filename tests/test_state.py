"""A run that was stopped anywhere and goes on from its state is the run that was never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsgd.batches import OwnStreams
from asyncsgd.optimizers import SGD, AdamW, Optimizer, OptimizerRecipe, PlainSGD
from asyncsgd.packing import classes_in, pack, unpack
from asyncsgd.records.events import DONE, INTERRUPTED, Event, Extended
from asyncsgd.rules import ALL, Asynchronous, DiLoCo, parse_rule
from asyncsgd.runtime.base import Budget, EvaluationPoints, TrainingClock
from asyncsgd.runtime.computation import ProblemGradients
from asyncsgd.runtime.virtual import Virtual
from asyncsgd.server import Server
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.speeds import Exponential, Network

WORKERS, SAMPLES = 4, 60
WHOLE = Budget(samples=SAMPLES)


def through_a_file(state):
    """As a checkpoint keeps it: readable without running code that it names."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Simulated:
    """A new simulation, stopped after some arrivals if so asked."""

    def __init__(self, rule, *, budget=WHOLE, network=None, stop_after=None, adamw=False, num_workers=WORKERS):
        inner = OptimizerRecipe(SGD(momentum=0.9)) if rule.local_steps else None
        self.computation = ProblemGradients(Quadratic(dimension=5).on(num_workers, 0), inner)
        self.parameters = self.computation.initial()
        optimizer = Optimizer(self.parameters, 5, AdamW()) if adamw else PlainSGD(self.parameters)
        self.records = []
        self.saved = []
        """States and why they cannot become longer, as a checkpoint at the end keeps them."""
        self.server = Server(self.parameters, rule, optimizer, lambda num_samples: 0.05 / (1 + 0.01 * num_samples))
        self.runtime = Virtual(
            self.server,
            self.computation,
            Exponential().on(num_workers, 0),
            OwnStreams(num_workers, budget.to_hand_out(rule)),
            self.computation.measure,
            num_workers=num_workers,
            budget=budget,
            evaluations=5,
            report=self.records.append,
            network=network,
            saver=self,
            stop_requested=lambda: stop_after is not None and self.runtime.num_arrivals >= stop_after,
        )

    def due(self, num_samples, *, at_end=False):
        return at_end

    def save(self, state, *, cut_short=None, **where):
        self.saved.append((through_a_file(state), cut_short))


def resumed(stop_after, rule, **settings):
    """All records of a run that was stopped and went on in a new object, and that object at its end."""
    stopped = Simulated(rule, stop_after=stop_after, **settings)
    assert stopped.runtime.run().status in (INTERRUPTED, DONE)
    following = Simulated(rule, **settings)
    following.runtime.load_state_dict(stopped.saved[-1][0])
    assert following.runtime.run().status == DONE
    return stopped.records + following.records, following


def same(one, other):
    return (
        one.parameters.numpy().tobytes() == other.parameters.numpy().tobytes()
        and one.runtime.evaluations == other.runtime.evaluations
        and one.runtime.train_seconds == other.runtime.train_seconds
        and one.runtime.num_arrivals == other.runtime.num_arrivals
        and one.server.num_samples_applied == other.server.num_samples_applied
        and one.server.rule_acted == other.server.rule_acted
    )


@pytest.mark.parametrize("rule", ALL, ids=str)
@given(stop_after=st.integers(0, SAMPLES))
@settings(deadline=None, max_examples=6)
def test_stopped_anywhere_and_resumed_is_never_stopped_under_every_rule(rule, stop_after):
    whole = Simulated(rule)
    whole.runtime.run()
    records, last = resumed(stop_after, rule)
    assert records == whole.records
    assert same(last, whole)


def merged(records):
    """What was started when the run went on stands in the arrival before it, as in a run of the larger budget."""
    found = []
    for record in records:
        if isinstance(record, Extended):
            (number,) = [place for place, before in enumerate(found) if is_last_arrival(before, record)]
            found[number] = dataclasses.replace(found[number], started=record.started)  # type: ignore[call-arg]
        else:
            found.append(record)
    return found


def is_last_arrival(record, extended):
    at_end = isinstance(record, Event) and record.total_samples == extended.total_samples
    return at_end and record.started == () and record.version == extended.version


@pytest.mark.parametrize("rule", ALL, ids=str)
@given(
    num_workers=st.integers(1, 8),
    end=st.integers(1, SAMPLES - 1),
    stop_after=st.none() | st.integers(0, SAMPLES),
    network=st.sampled_from([None, Network(1.0, (2.0,), 4.0)]),
)
@settings(deadline=None, max_examples=12)
def test_a_run_that_is_extended_is_a_run_of_the_larger_budget_unless_a_round_was_cut_short(
    rule, num_workers, end, stop_after, network
):
    budget = dataclasses.replace(WHOLE, evaluate_every=12)
    whole, extended = [Simulated(rule, budget=budget, num_workers=num_workers, network=network) for _ in range(2)]
    before = Simulated(
        rule,
        budget=dataclasses.replace(budget, samples=end),
        num_workers=num_workers,
        network=network,
        stop_after=stop_after,
    )
    whole.runtime.run()
    before.runtime.run()
    state, cut_short = before.saved[-1]
    ends_of_rounds = {event.total_samples for event in whole.records if isinstance(event, Event) and event.uses}
    is_cut = rule.in_rounds and end not in ends_of_rounds
    if cut_short is not None or (is_cut and before.server.num_samples == end):
        assert is_cut
        assert cut_short == f"rule {rule.name} works in rounds, and the budget cuts one short"
        return  # and is refused: see `test_a_round_that_the_budget_has_cut_short_cannot_become_longer`
    extended.runtime.load_state_dict(state)
    extended.runtime.run()
    records = before.records + extended.records
    for evaluation in list(extended.runtime.evaluations):
        if evaluation.total_samples == before.server.num_samples and evaluation not in whole.records:
            records.remove(evaluation)
            extended.runtime.evaluations.remove(evaluation)
    assert merged(records) == whole.records
    assert same(extended, whole)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("asynchronous", {"adamw": True}),
        ("asynchronous", {"budget": Budget(seconds=9.0)}),
        ("asynchronous", {"network": Network(1.0, (2.0,), 4.0)}),
        ("k_sync:quorum=2", {"network": Network(1.0, (2.0,), 4.0)}),
        ("k_sync:quorum=6", {"num_workers": 40, "budget": Budget(samples=240)}),
        ("synchronous", {"num_workers": 40, "budget": Budget(samples=250)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stop_after", [1, 7, 23, 59])
def test_optimizers_networks_seconds_and_many_workers_are_resumed_too(rule, settings, stop_after):
    whole = Simulated(parse_rule(rule), **settings)
    whole.runtime.run()
    records, last = resumed(stop_after, parse_rule(rule), **settings)
    assert records == whole.records
    assert same(last, whole)


def test_a_state_of_another_rule_is_refused_by_name():
    state = Simulated(Asynchronous()).runtime.state_dict()
    with pytest.raises(ValueError, match=r"^the state is of rule asynchronous, this server's is diloco"):
        Simulated(DiLoCo()).runtime.load_state_dict(state)


def test_clock_and_evaluation_points_go_on_where_they_were():
    clock, later = TrainingClock(), TrainingClock()
    clock.resume()
    clock.pause()
    later.load_state_dict(through_a_file(clock.state_dict()))
    assert later.seconds == clock.seconds
    assert not later.running
    points, rest = EvaluationPoints(Budget(samples=100), 4), EvaluationPoints(Budget(samples=100), 4)
    assert points.passed(60, 0.0)
    rest.load_state_dict(through_a_file(points.state_dict()))
    assert [rest.passed(samples, 0.0) for samples in (60, 80)] == [False, True]


@dataclasses.dataclass
class Mine:
    """A state of a user's own rule."""

    sums: dict[int, tuple[torch.Tensor, float]]
    who: set[int]


def test_what_a_users_own_rule_keeps_is_packed_and_only_known_classes_come_back():
    mine = Mine({3: (torch.ones(2), 0.1), 1: (torch.zeros(2), -1.0)}, {5, 2})
    packed = through_a_file(pack(mine))
    back = unpack(packed, classes_in(__name__))
    assert list(back.sums) == [3, 1]
    assert torch.equal(back.sums[3][0], torch.ones(2))
    assert (back.sums[3][1], back.who) == (0.1, {2, 5})
    with pytest.raises(ValueError, match=r"a state holds object .*Mine, which is not known here"):
        unpack(packed, classes_in("asyncsgd.rules."))
    with pytest.raises(ValueError, match="a state holds"):
        unpack(["object", "subprocess:Popen", []], classes_in("asyncsgd.rules.", "asyncsgd.records.events"))
    with pytest.raises(TypeError, match="has no state that could be kept"):
        pack(lambda: 0)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3) | st.tuples(st.integers(0, 9)), inner, max_size=3)
        | st.sets(st.integers(0, 99), max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
@settings(max_examples=60)
def test_packing_through_a_file_changes_nothing(value):
    assert unpack(through_a_file(pack(value)), {}) == value


def test_arrays_come_back_with_their_type():
    floats = np.array([[0.5, -1.0]])
    back = unpack(through_a_file(pack(floats)), {})
    assert back.dtype == floats.dtype
    assert np.array_equal(back, floats)
