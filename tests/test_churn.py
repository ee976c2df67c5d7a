"""Workers that leave and join under virtual time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.watch import Watched
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, FAILED, Event, Membership
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.totals import Totals
from asyncsgd.rules import ALL, Asynchronous, Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.log import read_log
from asyncsgd.simulation.churn import Join, Leave, in_order, parse_churn
from asyncsgd.simulation.problems import Quadratic
from asyncsgd.simulation.simulate import SimulationSettings, simulate, vector_sha256
from asyncsgd.simulation.speeds import Constant, Exponential, Network, parse_speeds

CHURN = "leave:worker=1,seconds=2;join:worker=3,seconds=3;join:worker=1,seconds=5;leave:worker=0,seconds=6"


def run(rule, churn, speeds, **more):
    records = []
    done = simulate(
        rule,
        Quadratic(dimension=3).on(4, 0),
        speeds.on(4, 0),
        num_workers=4,
        learning_rate=0.05,
        evaluations=4,
        report=records.append,
        churn=churn,
        **more,
    )
    return done, records


def present_at(records, seconds):
    there = set()
    for record in records:
        if isinstance(record, Membership) and record.train_seconds <= seconds:
            (there.add if record.kind == "join" else there.discard)(record.worker)
    return there


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_only_who_is_there_takes_part_under_every_rule(rule):
    done, records = run(rule, parse_churn(CHURN), Exponential(), budget=Budget(seconds=12.0))
    assert done.result.status == DONE
    changes = [(r.kind, r.worker, r.train_seconds) for r in records if isinstance(r, Membership)]
    assert changes == [
        *(("join", worker, 0.0) for worker in (0, 1, 2)),
        *(("leave", 1, 2.0), ("join", 3, 3.0), ("join", 1, 5.0), ("leave", 0, 6.0)),
    ]
    lost = {dispatch for record in records if isinstance(record, Membership) for dispatch in record.lost}
    events = [record for record in records if isinstance(record, Event)]
    assert not lost & {event.dispatch for event in events}
    assert all(event.worker in present_at(records, event.train_seconds - 1e-9) for event in events)
    assert {event.worker for event in events if event.train_seconds > 6} <= {1, 2, 3}


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_a_run_with_churn_is_replayed_bit_for_bit(rule, tmp_path):
    given = SimulationSettings(rule=str(rule), workers=4, samples=80, churn=CHURN)
    given.check()
    folder = RunFolder(tmp_path / "run")
    done = given.run(folder.append)
    folder.close()
    replay, server = given.replay(read_log(tmp_path / "run" / "events.jsonl"))
    assert replay.run() is None
    assert vector_sha256(server.parameters) == vector_sha256(done.parameters)


def test_a_worker_that_leaves_loses_what_it_computes_and_its_sample_is_its_next_one():
    churn = parse_churn("leave:worker=1,seconds=2.5;join:worker=1,seconds=4.5")
    records = []
    simulate(
        Asynchronous(),
        Quadratic(dimension=3).on(2, 0),
        Constant().on(2, 0),
        num_workers=2,
        learning_rate=0.05,
        budget=Budget(seconds=6.0),
        evaluations=1,
        report=records.append,
        churn=churn,
    )
    mine = [r for r in records if isinstance(r, Event) and r.worker == 1]
    assert [(event.train_seconds, event.batches) for event in mine] == [
        (1.0, ((1, 0, 1),)),
        (2.0, ((1, 1, 2),)),
        (5.5, ((1, 2, 3),)),
    ]
    assert mine[2].wait_seconds == 0.0
    assert [r.lost for r in records if isinstance(r, Membership) and r.kind == "leave"] == [(5,)]


def test_a_synchronous_round_ends_when_the_one_it_waits_for_leaves():
    churn = (Leave(3, 1.5),)
    done, records = run(Synchronous(), churn, SlowLast(), budget=Budget(seconds=1.75), network=None)
    (left,) = [r for r in records if isinstance(r, Membership) and r.kind == "leave"]
    assert [dispatch for dispatch, _ in left.uses] == [0, 1, 2]
    assert [worker for worker, *_ in left.started] == [0, 1, 2]
    assert done.version == 1


def test_a_step_that_a_leave_causes_is_counted_in_the_totals_and_where_a_run_is_watched(tmp_path):
    _, records = run(Synchronous(), (Leave(3, 1.5),), SlowLast(), budget=Budget(seconds=1.75), network=None)
    totals, folder = Totals(), RunFolder(tmp_path / "run")
    for record in records:
        totals(record)
        folder.append(record)
    folder.close()
    (tmp_path / "run" / "settings.yaml").write_text("samples: 80\n")
    watched = Watched(tmp_path / "run")
    watched.read()
    for progress in (totals, watched.progress):
        assert (progress.num_updates, progress.num_samples, progress.train_seconds) == (1, 3, 1.75)
        assert progress.delays.counts() == {0: 3}


@dataclasses.dataclass(frozen=True)
class SlowLast(Exponential):
    """Worker 3 takes ten seconds, the others one."""

    def on(self, num_workers, seed):
        return parse_speeds(f"slow:worker={num_workers - 1},factor=10").on(num_workers, seed)


@settings(deadline=None, max_examples=25)
@given(
    times=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6, unique=True),
    rule=st.sampled_from([rule for rule in ALL if not rule.local_steps]),
    network=st.sampled_from([None, Network(1.0, (2.0,), 4.0)]),
)
def test_workers_may_come_and_go_as_often_as_they_like(times, rule, network):
    changes = tuple((Leave if k % 2 == 0 else Join)(1, seconds) for k, seconds in enumerate(sorted(times)))
    done, records = run(rule, changes, Exponential(), budget=Budget(seconds=21.0), network=network)
    assert done.result.status == DONE
    assert done.virtual_seconds == 21.0
    assert [r.train_seconds for r in records if isinstance(r, Membership)][4:] == sorted(times)
    seconds = [record.train_seconds for record in records]
    assert seconds == sorted(seconds)


def test_a_run_that_everybody_has_left_fails_and_one_that_waits_for_a_worker_goes_on():
    everybody = tuple(Leave(worker, 2.5) for worker in range(4))
    done, _ = run(Asynchronous(), everybody, Constant(), budget=Budget(samples=100))
    assert (done.result.status, done.num_arrivals) == (FAILED, 8)
    assert done.result.message.startswith("no worker is left")
    done, _ = run(Asynchronous(), (*everybody, Join(2, 50.0)), Constant(), budget=Budget(samples=10))
    assert (done.result.status, done.virtual_seconds) == (DONE, 52.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave:worker=4,seconds=1", "there is no worker 4; the workers are 0 to 3"),
        ("leave:worker=1,seconds=1;leave:worker=1,seconds=3", "worker 1 has left at 1 already"),
        ("leave:worker=1,seconds=0", "seconds must be above 0, got 0"),
        (f"leave:worker=1,seconds={math.inf}", "seconds must be above 0, got inf"),
        ("leave:worker=1", "change 'leave' needs seconds; type --churn leave:seconds=VALUE"),
        ("quit:worker=1,seconds=3", "unknown change 'quit'"),
        (";".join(f"join:worker={worker},seconds=1" for worker in range(4)), "nobody is there at the beginning"),
    ],
)
def test_a_churn_that_cannot_be_is_refused_with_the_reason(text, message):
    with pytest.raises(UsageError) as error:
        in_order(parse_churn(text), 4)
    assert message in str(error.value)
