"""Every kind of rule on real processes: it runs on both transports, and its log replays to the same bits."""

import statistics

import pytest
from doors import asyncsgd, cli, parse_rule
from marks import slow
from tasks import Plane

pytestmark = pytest.mark.processes

PLAIN_SGD = {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0}


def assert_replays(run):
    replayed = cli(["asyncsgd", "replay", run.path, "--cache-dir", run.cache])
    assert replayed.out.endswith("identical\n"), replayed
    first, second, *_ = replayed.out.splitlines()
    assert first == f"run        {run.path}"
    assert second.startswith(f"updates    {run.summary['num_updates']} replayed, ")


QUICK = [
    ("k_sync:quorum=2", {}),
    ("fixed_delay:delay=4", {}),
    ("ringmaster:threshold=1,stops=true", {}),
    ("dana", PLAIN_SGD),
    ("diloco:num_local_steps=3", {"dropout": 0.1}),
    ("ringleader", {}),
]
"""One of each kind: abandons, starts at exact points, drops, has another optimizer, local steps, a state per worker."""
REST = [
    ("ssp:slack=0", {}),
    ("rennala:batch=3", {}),
    ("k_async:quorum=2", {}),
    ("k_batch_async:batch=3", {}),
    ("fedbuff:buffer=2,num_local_steps=2", {}),
    ("downpour:n_push=2,n_fetch=4", PLAIN_SGD),
    ("dc_asgd:compensation=0.5,adaptive=true", {}),
    ("gap_aware", {}),
    ("ormo", PLAIN_SGD),
    ("async_local_sgd:num_local_steps=3,dynamic=true", {}),
    ("easgd:num_local_steps=2", {}),
    ("ia2sgd", {}),
    ("rescaled", {}),
    ("delay_adaptive:concurrency=1", {}),
    ("local_sgd:num_local_steps=3,post=2", {}),
]


@pytest.mark.parametrize(("rule", "more"), [*QUICK, *slow(*REST)], ids=[rule for rule, _ in QUICK + REST])
def test_a_run_of_two_workers_replays_bit_for_bit(train, rule, more):
    run = train(mode="async", nproc=2, rule=rule, **more)
    assert_replays(run)
    counts = run.summary["rule_acted"]
    assert len(run.records("arrival")) == counts["arrivals"]
    assert counts["arrivals"] >= counts["altered"]


def test_a_run_whose_rule_took_no_update_says_so(capsys):
    for rule in ("rennala:batch=99", "fixed_delay:delay=99", "rennala:batch=2"):
        asyncsgd.train(Plane(), rule=parse_rule(rule), runtime=asyncsgd.Virtual(2), samples=80)
        assert ("took no update in the whole run" in capsys.readouterr().out) == ("99" in rule)


@pytest.mark.parametrize("rule", ["fixed_delay:delay=3", *slow("rennala:batch=2", "diloco:num_local_steps=2", "easgd")])
def test_so_does_one_over_process_groups(train, rule):
    assert_replays(train(mode="async", nproc=2, rule=rule, transport="process_group"))


@pytest.mark.parametrize("mode", slow("sync", "async", "hogwild"))
def test_an_injected_straggler_is_as_slow_as_declared(train, mode):
    run = train(mode=mode, nproc=2, speeds="two_groups:share=0.5,factor=8,seconds=0.05")
    assert (run.summary["rule_acted"] is None) == (mode == "sync")  # where there is no server
    seconds = {worker: [] for worker in range(2)}
    for event in run.records("arrival"):
        seconds[event["worker"]].append(event["compute_seconds"])
    if mode == "sync":
        # A rank waits for what its previous gradient left of the declared time, so single steps may be short of it.
        assert statistics.median(seconds[1]) >= 0.3
    else:
        assert min(seconds[0]) >= 0.05
        assert min(seconds[1]) >= 0.4
        assert len(seconds[0]) > len(seconds[1])


def test_on_the_virtual_clock_real_gradients_replay_too_and_two_runs_are_the_same_bits(train):
    values = {"mode": "async", "nproc": 5, "clock": "virtual", "rule": "rennala:batch=3"}
    run = train(**values, speeds="exponential:1")
    assert_replays(run)
    again = train(**values, speeds="exponential:mean=1")
    assert again.path != run.path
    assert again.summary["parameters_sha256"] == run.summary["parameters_sha256"]
    assert run.summary["clock"] == "virtual"
    assert run.summary["train_seconds"] == again.summary["train_seconds"]


def test_every_version_at_a_fixed_delay_is_the_same_bits_on_either_clock_and_for_any_number_of_workers(train):
    # At a constant learning rate: the k-th gradient is computed at version k - 2, so equal losses are equal versions.
    losses = set()
    for nproc, clock in ((2, "measured"), (2, "virtual"), (3, "virtual"), (1, "virtual")):
        run = train(mode="async", nproc=nproc, rule="fixed_delay:delay=2", clock=clock, schedule="constant")
        assert run.summary["delay"]["max"] == 2
        events = {event["dispatch"]: event for event in run.records("arrival")}
        for k, event in events.items():
            assert event["read_version"] == max(0, k - 2)
        # The 20th arrival ends the run: it may be gradient 20, held behind gradient 19 that is still in flight.
        of_run = [events[k]["loss"] for k in range(18)]
        losses.add(tuple(of_run))
    assert len(losses) == 1
