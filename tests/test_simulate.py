"""experiments/simulate.py: every rule and method runs, leaves a run folder, and its log replays to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marks import slow

from asyncsgd.records.events import read_events
from asyncsgd.rules import ALL, describe_rules
from asyncsgd.simulation.speeds import ALL as ALL_SPEEDS
from replay import main as replay
from simulate import main as simulate

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def only_run(folder):
    (run,) = folder.iterdir()
    return run


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_every_rule_runs_and_its_log_replays_to_the_same_bits(rule, tmp_path, capsys):
    arguments = ["--rule", str(rule), "--workers", "5", "--samples", "150", "--runs-dir", str(tmp_path)]
    assert simulate(arguments) == 0
    run = only_run(tmp_path)
    summary = summary_of(run)
    assert (summary["status"], summary["rule"], summary["clock"]) == ("DONE", str(rule), "virtual")
    assert summary["experiment"] == "simulate"
    assert 150 <= summary["num_samples"] < 150 + 3  # rounded up to whole arrivals, of 3 local steps at most
    assert summary["final_eval_loss"] < summary["first_eval_loss"]
    capsys.readouterr()
    assert replay([str(run)]) == 0
    assert capsys.readouterr().out.count(summary["parameters_sha256"]) == 2


@pytest.mark.parametrize(
    ("rule", "altered", "said"),
    [
        ("koloskova", 0, "altered 0 of 200 arrivals: koloskova never acted, so this run is asynchronous SGD"),
        ("synchronous", 200, "altered 200 of 200 arrivals"),
        ("asynchronous", 0, None),
    ],
)
def test_a_run_says_how_often_its_rule_did_something_else_than_asynchronous_sgd(rule, altered, said, tmp_path, capsys):
    arguments = ["--rule", rule, "--workers", "4", "--samples", "200", "--learning-rate", "5e-4"]
    assert simulate([*arguments, "--runs-dir", str(tmp_path)]) == 0
    assert summary_of(only_run(tmp_path))["rule_acted"] == {"arrivals": 200, "altered": altered}
    lines = [line.removeprefix("rule   ") for line in capsys.readouterr().out.splitlines() if " arrivals" in line]
    assert lines == ([] if said is None else [said])


@pytest.mark.parametrize("method", ["ad_psgd:topology=ring", "sgp:delay=1", "streaming_diloco:num_local_steps=4"])
def test_methods_with_a_runtime_of_their_own_run_and_their_replay_is_refused(method, tmp_path, capsys):
    assert simulate(["--rule", method, "--workers", "4", "--samples", "400", "--runs-dir", str(tmp_path)]) == 0
    run = only_run(tmp_path)
    assert summary_of(run)["final_eval_loss"] < summary_of(run)["first_eval_loss"]
    assert replay([str(run)]) == 2
    assert "has no server whose log could be replayed" in capsys.readouterr().err


@pytest.mark.parametrize("speeds", ALL_SPEEDS, ids=str)
def test_every_model_of_speeds_runs(speeds, tmp_path):
    # 2 seconds are enough for somebody to arrive; where gradients may take for ever only seconds end a run
    arguments = ["--speeds", str(speeds), "--budget-seconds", "60", "--runs-dir", str(tmp_path)]
    assert simulate(arguments) == 0
    assert summary_of(only_run(tmp_path))["train_seconds"] == 60.0


def test_equal_settings_give_equal_bits_and_a_folder_each(tmp_path):
    for _ in range(2):
        network = ["--network", "bytes=1,worker=2,server=8"]
        assert simulate(["--samples", "100", *network, "--runs-dir", str(tmp_path)]) == 0
    first, second = sorted(tmp_path.iterdir())
    assert second.name == f"{first.name}-2"
    assert list(read_events(first / "events.jsonl")) == list(read_events(second / "events.jsonl"))


def test_a_changed_log_is_found_out_at_its_change(tmp_path, capsys):
    assert simulate(["--samples", "60", "--runs-dir", str(tmp_path)]) == 0
    events = only_run(tmp_path) / "events.jsonl"
    lines = events.read_text().splitlines()
    place, record = next((i, r) for i, r in enumerate(map(json.loads, lines)) if r.get("version") == 30)
    lines[place] = json.dumps(record | {"loss": record["loss"] + 1e-9})
    events.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert replay([str(events.parent)]) == 1
    assert f"dispatch {record['dispatch']} at version {record['read_version']}" in capsys.readouterr().out


def test_a_diverged_run_replays_too(tmp_path, capsys):
    assert simulate(["--samples", "300", "--learning-rate", "1e200", "--runs-dir", str(tmp_path)]) == 1
    assert summary_of(only_run(tmp_path))["status"] == "DIVERGED"
    capsys.readouterr()
    assert replay([str(only_run(tmp_path))]) == 0


def test_the_last_evaluation_is_at_the_end_of_the_budget_to_the_bit(tmp_path):
    arguments = ["--rule", "rennala:batch=100", "--evaluations", "3", "--runs-dir", str(tmp_path)]
    for seconds in ("0.1", "0.7"):
        assert simulate([*arguments, "--budget-seconds", seconds]) == 0
    for run in tmp_path.iterdir():
        times = [r["train_seconds"] for r in read_events(run / "events.jsonl") if r["kind"] == "evaluate"]
        assert len(times) == 4
        assert times[-1] in (0.1, 0.7)


def test_help_shows_a_command_that_can_be_pasted_whole(capsys):
    with pytest.raises(SystemExit):
        simulate(["--help"])
    lines = capsys.readouterr().out.splitlines()
    first, second = (line for line in lines if "half_normal" in line or "tridiagonal" in line)
    assert first.endswith(" \\")
    assert second.strip().startswith("--problem tridiagonal")


def test_help_lists_every_rule_method_speed_and_problem(capsys):
    assert simulate(["--rule", "help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(describe_rules())
    assert all(name in shown for name in ("ad_psgd", "sgp", "streaming_diloco"))
    assert simulate(["--speeds", "help"]) == simulate(["--problem", "help"]) == 0
    assert "half_normal" in (shown := capsys.readouterr().out)
    assert "tridiagonal" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--samples --budget-seconds"),
        ("--samples 0", "--samples more 0"),
        ("--samples 9 --learning-rate nan", "--learning-rate 'nan' number"),
        ("--samples 9 --speeds slow:worker=9", "no worker 9"),
        ("--samples 9 --rule sgp --network bytes=1,worker=1,server=1", "sgp drop it"),
        ("--sample 9", "--sample --help"),
    ],
)
def test_wrong_input_gets_one_line_that_says_what_to_type(line, words, tmp_path, capsys):
    assert simulate([*line.split(), "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words.split())
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_workers_that_take_for_ever_end_the_run_with_a_reason(tmp_path, capsys):
    arguments = ["--speeds", "infinite:probability=0.9", "--samples", "500", "--runs-dir", str(tmp_path)]
    assert simulate(arguments) == 1
    assert "every worker in flight takes for ever" in capsys.readouterr().err
    assert summary_of(only_run(tmp_path))["status"] == "FAILED"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM)])
def test_ctrl_c_and_sigterm_save_what_there_is_and_exit_with_130(number, tmp_path):
    command = [sys.executable, str(EXPERIMENTS / "simulate.py"), "--samples", "100000000", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True)
    assert process.stdout is not None
    began = any("samples" in line for line in iter(process.stdout.readline, ""))  # the headings; "" if it has ended
    assert began, process.wait(60)
    time.sleep(0.5)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    summary = summary_of(only_run(tmp_path))
    assert summary["status"] == "INTERRUPTED"
    assert summary["num_samples"] > 0
    assert summary["parameters_sha256"] is not None
