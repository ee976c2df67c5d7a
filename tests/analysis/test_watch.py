"""The live view of a run: what it shows, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from doors import arrival
from hypothesis import given
from hypothesis import strategies as st

from analysis.watch import BLOCK, DEAD, QUIET_SECONDS, RUNNING, Watched, main
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, Evaluation, Fault, Membership
from asyncsgd.records.run_folder import RunFolder


def evaluation(number, loss):
    return Evaluation(number, 4 * number, 0.5 * number, loss, 7.0, {"accuracy": 0.25}, 0.1)


LOOK = {"machine": 1.5, "processes": {"leader": [0.25, 2**30]}, "gpus": [{"utilisation": 0.5, "bytes": 2**31}]}

RECORDS = (
    evaluation(0, 4.0),
    Membership(0, 0, 0.0, "join", 0),
    Membership(0, 0, 0.0, "join", 1),
    *(arrival(number, worker=number % 2, compute_seconds=3.0, wait_seconds=float(number % 2)) for number in range(10)),
    evaluation(10, 2.0),
    Membership(10, 40, 5.0, "leave", 1, "killed by signal 9"),
    Fault("the loss is not finite", 0, 10, 5.0),
)


def begin(path, settings="mode: async\nnproc: 2\nrule: ringmaster\nsamples: 80\n"):
    """A live run of this process with these records."""
    folder = RunFolder(path, task="line", better={"accuracy": "higher"})
    (path / "settings.yaml").write_text(settings)
    for record in RECORDS:
        folder.append(record)
    folder._events.flush()
    return folder


def finished(path, **summary):
    folder = begin(path)
    folder.write_summary({"status": DONE, "message": "", **summary})
    folder.close()
    return path


def age(path):
    """Let the log look as if nothing had been written for a while."""
    past = time.time() - 2 * QUIET_SECONDS
    os.utime(path / "events.jsonl", (past, past))


def read(path):
    run = Watched(path)
    run.read()
    return run


def shown(path, capsys):
    """The lines of one picture, without the space between columns."""
    assert main([str(path), "--once"]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_one_picture_has_status_budget_speed_delays_losses_and_workers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = shown(finished(tmp_path / "a"), capsys)
    assert lines[0].endswith("async, ringmaster, 2 workers")
    assert lines[1:6] == [
        "status DONE",
        "samples 40 50 % of the budget 10 updates 5.0 s",
        "speed 8 samples/s",
        "delay p50 4 p95 9 max 9 updates",
        "loss █▁",
    ]
    assert [line for line in lines[6:] if line[0].isdigit() and not line.startswith("0 0.0")] == [
        "40 5.0 2 0.25",
        "0 5 20 0 %",
        "1 5 20 25 % lost: killed by signal 9",
    ]
    assert lines[-1] == "fault: the loss is not finite"


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ("samples: 80\nseconds: 50.0\n", 0.5),
        ("samples: 800\nseconds: 20.0\n", 0.25),
        ("samples: 8\n", 1.0),
        ("samples: null\nseconds: 10\n", 0.5),
        ("epochs: 2.0\nsamples: null\n", None),
    ],
)
def test_the_share_of_the_budget_is_that_of_the_limit_which_ends_the_run(tmp_path, settings, share):
    begin(tmp_path / "a", settings).close()
    assert read(tmp_path / "a").budget_share == share


def test_a_log_that_grows_is_read_once_wherever_it_is_cut(tmp_path_factory):
    whole = finished(tmp_path_factory.mktemp("whole") / "a")
    content = (whole / "events.jsonl").read_bytes()
    wanted = read(whole)

    @given(st.lists(st.integers(0, len(content)), max_size=6))
    def check(cuts):
        path = tmp_path_factory.mktemp("cut")
        (path / "settings.yaml").write_bytes((whole / "settings.yaml").read_bytes())
        (path / "events.jsonl").touch()
        run = Watched(path)
        for begun, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(content)], strict=True):
            with open(path / "events.jsonl", "ab") as file:
                file.write(content[begun:end])
            run.read()
        assert run.workers == wanted.workers
        assert run.evaluations == wanted.evaluations
        assert run.progress.delays == wanted.progress.delays
        assert run.progress.num_samples == wanted.progress.num_samples
        assert run.faults == wanted.faults

    check()


def test_a_run_is_running_while_its_owner_has_the_lock_however_long_it_is_silent(tmp_path, capsys):
    RunFolder(tmp_path / "new")
    assert "status running: no evaluation yet" in shown(tmp_path / "new", capsys)
    folder = begin(tmp_path / "a")
    age(tmp_path / "a")
    assert read(tmp_path / "a").status == RUNNING
    folder.close()
    age(tmp_path / "a")
    assert read(tmp_path / "a").status == DEAD
    assert main([str(tmp_path / "a")]) == 0  # without --once: it ends by itself
    assert "ended without a summary" in capsys.readouterr().out


def test_another_run_in_the_folder_is_watched_from_its_beginning(tmp_path):
    path = tmp_path / "a"
    first = begin(path)
    first.append(evaluation(20, 1.0))
    first.close()
    run = read(path)
    path.rename(tmp_path / "a.before-1")
    second = begin(path)
    second.append(evaluation(20, 3.5))
    second.append(evaluation(30, 3.0))
    second.close()
    run.read()
    assert [record.loss for record in run.evaluations] == [4.0, 2.0, 3.5, 3.0]
    assert [run.workers[number].num_arrivals for number in (0, 1)] == [5, 5]


def test_records_that_a_resume_has_taken_back_are_not_shown(tmp_path):
    begin(tmp_path / "a").close()
    run = read(tmp_path / "a")
    lines = (tmp_path / "a" / "events.jsonl").read_bytes().splitlines(keepends=True)
    os.truncate(tmp_path / "a" / "events.jsonl", len(lines[0] + lines[1]))  # the header and the first evaluation
    run.read()
    assert [record.loss for record in run.evaluations] == [4.0]
    assert run.progress.num_samples == 0
    assert run.workers == {}
    assert run.faults == []


def test_it_ends_when_the_run_is_done(tmp_path, capsys):
    folder = begin(tmp_path / "a")

    def end():
        time.sleep(0.3)
        folder.append(arrival(10))
        folder.write_summary({"status": DONE, "message": ""})
        folder.close()

    ending = threading.Thread(target=end)
    ending.start()
    assert main([str(tmp_path / "a")]) == 0
    ending.join()
    out = capsys.readouterr().out
    assert "DONE" in out
    assert "44   55 % of the budget" in out  # with what was written last


@pytest.mark.processes
def test_ctrl_c_ends_it_with_exit_code_0(tmp_path):
    folder = begin(tmp_path / "a")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    watching = subprocess.Popen(
        [sys.executable, "-m", "analysis.watch", str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert watching.stdout is not None
        assert watching.stdout.read(1)  # it draws
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=30)
    finally:
        watching.kill()
        folder.close()
    assert watching.returncode == 0
    assert err == b""


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no events.jsonl; name a run's folder" in capsys.readouterr().err
    with pytest.raises(UsageError):
        Watched(tmp_path / "nowhere")


def test_the_last_look_at_the_machine_is_shown(tmp_path, capsys):
    begin(tmp_path).close()
    lines = [json.dumps(LOOK | {"machine": 0.5}), json.dumps(LOOK), '{"machine": 9']
    (tmp_path / "usage.jsonl").write_text("\n".join(lines))
    assert main([str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "1.5 cores busy" in shown
    assert "0.25 cores  1.00 GiB" in shown
    assert "50 %  2.00 GiB" in shown


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "evaluate"}',
        '{"kind": "evaluate", "version": 1, "total_samples": 4, "train_seconds": 1.0, "loss": "low"}',
        '{"kind": "evaluate", "version": 1, "total_samples": 4, "train_seconds": 1.0, "loss": 1.0, "metrics": [2]}',
        '{"kind": "evaluate", "version": "1", "total_samples": 4, "train_seconds": 1.0, "loss": 1.0}',
        '{"kind": "arrival", "version": 1, "total_samples": 4, "train_seconds": 1.0, "worker": {}, "num_samples": 4}',
        '{"kind": "leave", "version": 1, "total_samples": 4, "train_seconds": 1.0, "worker": 0, "reason": 9}',
        '{"kind": "fault", "message": null}',
        "[]",
        "\0\0\0\0",
    ],
)
def test_a_damaged_line_is_named_in_one_sentence(tmp_path, capsys, line):
    finished(tmp_path / "a")
    with open(tmp_path / "a" / "events.jsonl", "a") as file:
        file.write(line + "\n")
    assert main([str(tmp_path / "a"), "--once"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"is damaged at line {len(RECORDS) + 2} of events.jsonl: " in said


@pytest.mark.parametrize("look", ["9", '{"machine": "all"}', '{"machine": 1.0, "processes": {"leader": 7}}', "\0"])
def test_a_damaged_look_at_the_machine_is_not_shown(tmp_path, capsys, look):
    begin(tmp_path).close()
    (tmp_path / "usage.jsonl").write_text(look + "\n")
    assert main([str(tmp_path), "--once"]) == 0
    assert "cores busy" not in capsys.readouterr().out


def test_a_long_log_is_never_in_memory_as_a_whole(tmp_path):
    begin(tmp_path).close()
    with open(tmp_path / "events.jsonl", "ab") as file:
        lines = (tmp_path / "events.jsonl").read_bytes().split(b"\n")
        arrivals = [line for line in lines if b'"arrival"' in line]
        file.write(b"\n".join(arrivals * (16 * BLOCK // len(b"".join(arrivals)))) + b"\n")
    run = Watched(tmp_path)
    tracemalloc.start()
    run.read()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert run.workers[0].num_arrivals > 10_000
    assert most < 8 * BLOCK
