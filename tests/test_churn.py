"""Workers that leave and join under virtual time."""

import pytest
from doors import (
    ALL,
    Asynchronous,
    Constant,
    Exponential,
    Finished,
    Join,
    Leave,
    Limits,
    Membership,
    Network,
    Quadratic,
    Synchronous,
    cli,
    parse_speeds,
    simulated,
)
from hypothesis import given
from hypothesis import strategies as st

CHURN = "leave:worker=1,seconds=2;join:worker=3,seconds=3;join:worker=1,seconds=5;leave:worker=0,seconds=6"


def run(rule, churn, speeds, num_workers=4, **more):
    sampler = speeds.on(num_workers, 0)
    problem = Quadratic(dimension=3).on(num_workers, 0)
    return simulated(rule, sampler, problem, learning_rate=0.05, evaluations=4, churn=churn, **more)


def membership(records):
    return [record for record in records if isinstance(record, Membership)]


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_under_every_rule_only_who_is_there_takes_part_and_the_run_is_replayed(rule, tmp_path):
    words = ["--nproc", 4, "--seconds", 12, "--churn", CHURN, "--runs-dir", tmp_path]
    assert cli(["simulate.py", "--rule", rule, *words]).code == 0
    run = Finished(*tmp_path.iterdir())
    assert run.summary["status"] == "DONE"
    assert run.summary["rule"] == str(rule)
    assert run.summary["clock"] == "virtual"
    assert run.summary["final_eval_loss"] < run.summary["first_eval_loss"]
    changes = []
    for r in run.records("join", "leave"):
        changes.append((r["kind"], r["worker"], r["train_seconds"]))
    assert changes[:3] == [("join", 0, 0.0), ("join", 1, 0.0), ("join", 2, 0.0)]
    assert changes[3:] == [("leave", 1, 2.0), ("join", 3, 3.0), ("join", 1, 5.0), ("leave", 0, 6.0)]
    there = set()
    lost = set()
    arrived = {}
    used = set()
    for record in run.records("join", "leave", "arrival"):
        used.update(dispatch for dispatch, _ in record["uses"])
        if record["kind"] == "arrival":
            assert record["worker"] in there
            assert record["dispatch"] not in lost
            arrived[record["dispatch"]] = record["num_samples"]
            continue
        lost.update(record["lost"])
        if record["kind"] == "join":
            there.add(record["worker"])
        else:
            there.discard(record["worker"])
    assert run.summary["num_samples_applied"] == sum(arrived[dispatch] for dispatch in used)  # each of them once
    replayed = cli(["asyncsgd", "replay", run.path])
    assert replayed.code == 0
    assert replayed.out.count(run.summary["parameters_sha256"]) == 2


def test_a_worker_that_leaves_loses_what_it_computes_and_its_sample_is_its_next_one():
    churn = (Leave(1, 2.5), Join(1, 4.5))
    result = run(Asynchronous(), churn, Constant(), num_workers=2, seconds=6.0)
    events = [event for event in result.events if event.worker == 1]
    assert [event.train_seconds for event in events] == [1.0, 2.0, 5.5]
    for index, event in enumerate(events):
        assert event.batches == ((1, index, index + 1),)
    assert events[2].wait_seconds == 0.0
    assert [record.lost for record in membership(result.records) if record.kind == "leave"] == [(5,)]


def test_a_synchronous_round_ends_when_the_one_it_waits_for_leaves(tmp_path):
    slow = "slow:worker=3,factor=10"
    result = run(Synchronous(), (Leave(3, 1.5),), parse_speeds(slow), seconds=1.75)
    (left,) = [record for record in membership(result.records) if record.kind == "leave"]
    assert [dispatch for dispatch, _ in left.uses] == [0, 1, 2]
    assert [worker for worker, *_ in left.started] == [0, 1, 2]
    assert result.done.version == 1
    # The step has no arrival of its own, and is counted.
    words = ["--rule", "synchronous", "--nproc", 4, "--seconds", 1.75, "--speeds", slow]
    words += ["--churn", "leave:worker=3,seconds=1.5", "--runs-dir", tmp_path]
    assert cli(["simulate.py", *words]).code == 0
    summary = Finished(*tmp_path.iterdir()).summary
    assert summary["num_updates"] == 1
    assert summary["num_samples"] == 3
    assert summary["num_samples_applied"] == 3
    assert summary["train_seconds"] == 1.75


@given(
    times=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6, unique=True).map(sorted),
    rule=st.sampled_from([rule for rule in ALL if not rule.local_steps]),
    network=st.sampled_from([None, Network(1.0, (2.0,), 4.0)]),
)
def test_workers_may_come_and_go_as_often_as_they_like(times, rule, network):
    changes = []
    for number, seconds in enumerate(times):
        change = Join if number % 2 else Leave
        changes.append(change(1, seconds))
    result = run(rule, tuple(changes), Exponential(), seconds=21.0, network=network)
    assert result.done.result.status == "DONE"
    assert result.done.virtual_seconds == 21.0
    assert [record.train_seconds for record in membership(result.records)][4:] == times
    seconds = [record.train_seconds for record in result.records]
    assert seconds == sorted(seconds)


def test_a_run_that_everybody_has_left_fails_and_one_that_waits_for_a_worker_goes_on():
    everybody = tuple(Leave(worker, 2.5) for worker in range(4))
    done = run(Asynchronous(), everybody, Constant(), budget=Limits(samples=100)).done
    assert done.result.status == "FAILED"
    assert done.num_arrivals == 8
    assert done.result.message.startswith("no worker is left")
    done = run(Asynchronous(), (*everybody, Join(2, 50.0)), Constant(), budget=Limits(samples=10)).done
    assert done.result.status == "DONE"
    assert done.virtual_seconds == 52.0
