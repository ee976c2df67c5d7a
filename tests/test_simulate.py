"""experiments/simulate.py: what a run says and leaves, what it takes, and what it refuses."""

import os
import signal
import subprocess
import sys
import time

import pytest
from doors import ALL, PROBLEMS, ROOT, SPEEDS, Finished, asyncsgd, cli
from marks import slow
from refusals import assert_words


def simulate(line, folder):
    return cli(["simulate.py", *line.split(), "--runs-dir", folder])


def only_run(folder):
    return Finished(*folder.iterdir())


@pytest.mark.parametrize(
    ("rule", "altered", "said"),
    [
        ("koloskova", 0, "altered 0 of 200 arrivals: koloskova never acted, so this run is asynchronous SGD"),
        ("synchronous", 200, "altered 200 of 200 arrivals"),
        ("asynchronous", 0, None),
    ],
)
def test_a_run_says_how_often_its_rule_did_something_else_than_asynchronous_sgd(rule, altered, said, tmp_path):
    ended = simulate(f"--rule {rule} --nproc 4 --samples 200 --learning-rate 5e-4", tmp_path)
    assert ended.code == 0
    assert only_run(tmp_path).summary["rule_acted"] == {"arrivals": 200, "altered": altered}
    lines = [line.removeprefix("rule   ") for line in ended.out.splitlines() if " arrivals" in line]
    assert lines == ([] if said is None else [said])


@pytest.mark.parametrize("method", ["ad_psgd:topology=ring", "sgp:delay=1", "streaming_diloco:num_local_steps=4"])
def test_a_run_without_a_server_is_replayed(method, tmp_path):
    assert simulate(f"--rule {method} --nproc 4 --samples 400", tmp_path).code == 0
    run = only_run(tmp_path)
    assert run.summary["final_eval_loss"] < run.summary["first_eval_loss"]
    assert run.records("header")[0]["loss_unit"] == "", "f(x) - f* is no cross entropy in nats"
    assert cli(["asyncsgd", "replay", run.path]).out.endswith("identical\n")


def test_runs_of_two_rules_are_comparable(tmp_path):
    for seed in range(2):
        for rule in ("synchronous", "asynchronous"):
            assert simulate(f"--rule {rule} --nproc 4 --seconds 60 --seed {seed}", tmp_path).code == 0
    assert "not comparable" not in set(asyncsgd.load(tmp_path).tests["word"])


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_every_model_of_speeds_runs(speeds, tmp_path):
    # 2 seconds are enough for somebody to arrive; where gradients may take for ever only seconds end a run
    assert simulate(f"--speeds {speeds} --seconds 60", tmp_path).code == 0
    assert only_run(tmp_path).summary["train_seconds"] == 60.0


def test_equal_settings_give_equal_bits_and_a_folder_each(tmp_path):
    for _ in range(2):
        assert simulate("--samples 100 --network bytes=1,worker=2,server=8", tmp_path).code == 0
    first, second = sorted(tmp_path.iterdir())
    assert second.name == f"{first.name}-2"
    assert Finished(first).records() == Finished(second).records()


def test_a_diverged_run_replays_too(tmp_path):
    assert simulate("--samples 300 --learning-rate 1e200", tmp_path).code == 1
    run = only_run(tmp_path)
    assert run.summary["status"] == "DIVERGED"
    assert cli(["asyncsgd", "replay", run.path]).code == 0


@pytest.mark.parametrize("seconds", [0.1, 0.7])
def test_the_last_evaluation_is_at_the_end_of_the_budget_to_the_bit(seconds, tmp_path):
    assert simulate(f"--rule rennala:batch=100 --evaluations 3 --seconds {seconds}", tmp_path).code == 0
    times = [record["train_seconds"] for record in only_run(tmp_path).records("evaluate")]
    assert len(times) == 4
    assert times[-1] == seconds


def test_help_lists_every_rule_method_speed_and_problem_and_shows_a_command(tmp_path):
    shown = simulate("--rule help", tmp_path).out
    for name in (*(rule.name for rule in ALL), "ad_psgd", "sgp", "streaming_diloco"):
        assert name in shown
    for flag, choices in (("--speeds", SPEEDS), ("--problem", PROBLEMS)):
        shown = simulate(f"{flag} help", tmp_path).out
        for choice in choices:
            assert choice.name in shown
            assert choice.summary in shown
    assert "--problem tridiagonal" in simulate("--help", tmp_path).out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--samples --seconds"),
        ("--samples 0", "--samples more 0"),
        ("--rule sgp --network bytes=1,worker=1,server=1", "sgp drop it"),
        ("--rule ad_psgd:topology=rings", "topology complete ring 'rings'"),
        ("--rule streaming_diloco:fragments=11", "fragments num_local_steps=10 11"),
        ("--speeds exponental", "'exponental' 'exponential'"),
        ("--speeds trace:run=nowhere", "nowhere/events.jsonl"),
        ("--speeds power:2000", "exponent at most 50"),
        ("--speeds two_groups:0.01", "share=0.0625"),
        ("--speeds slow:worker=9", "worker=0 to worker=7"),
        ("--network bytes=1,server=1", "worker --network"),
        ("--network bytes=0,worker=1,server=1", "bytes=0 more than 0"),
        ("--network bytes=1,worker=1/x,server=1", "worker=1/x 'x'"),
        ("--problem tridiagnal", "'tridiagnal' 'tridiagonal'"),
        ("--problem tridiagonal:noise_kind=ful", "noise_kind add or full, 'ful'"),
        ("--problem logistic:classes=5,rows=4", "rows 5 4"),
        ("--problem logistic:rows=10 --nproc 11", "10 rows 11 workers"),
        ("--churn leave:worker=8,seconds=1", "there is no worker 8; the workers are 0 to 7"),
        ("--churn leave:worker=1,seconds=1;leave:worker=1,seconds=3", "seconds=1.0 then seconds=3.0 turns"),
        ("--nproc 1 --churn join:worker=0,seconds=1", "nobody is there at the beginning"),
    ],
)
def test_wrong_input_gets_one_line_that_says_what_to_type(line, words, tmp_path):
    budget = "" if line in ("", "--samples 0") else "--samples 9 "
    ended = simulate(budget + line, tmp_path / "runs")
    assert ended.code == 2
    assert_words(ended.err, words)
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rule sgp:delay=1 --nproc 1", "delay=1 sgp:delay=0"),
        ("--rule streaming_diloco --problem mode", "2 fragments 1 parameters fragments=1"),
    ],
)
def test_a_method_that_does_not_fit_its_workers_or_its_problem_says_what_to_type(line, words, tmp_path):
    ended = simulate(f"--samples 9 {line}", tmp_path)
    assert ended.code == 2
    assert_words(ended.err, words)
    assert only_run(tmp_path).summary["status"] == "FAILED"


def test_workers_that_take_for_ever_end_the_run_with_a_reason(tmp_path):
    ended = simulate("--speeds infinite:probability=0.9 --samples 500", tmp_path)
    assert ended.code == 1
    assert "every worker in flight takes for ever" in ended.err
    assert only_run(tmp_path).summary["status"] == "FAILED"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM)])
def test_ctrl_c_and_sigterm_save_what_there_is_and_exit_with_130(number, tmp_path):
    script = str(ROOT / "experiments" / "simulate.py")
    command = [sys.executable, script, "--samples", "100000000", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True)
    began = any("samples" in line for line in iter(process.stdout.readline, ""))  # the headings; "" if it has ended
    assert began, process.wait(60)
    time.sleep(0.5)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    summary = only_run(tmp_path).summary
    assert summary["status"] == "INTERRUPTED"
    assert summary["num_samples"] > 0
    assert summary["parameters_sha256"] is not None
