"""The documented command, typed literally: torchrun starts the script, and the script knows who starts the workers."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from commands import Command, until
from doors import ROOT, Asynchronous, Synchronous, UsageError, asyncsgd, cli, marked
from gallery import sentences
from tasks import Plane

TIMEOUT = 90
needs_entry_point = pytest.mark.skipif(
    all(point.module != "asyncsgd.torchrun" for point in importlib.metadata.entry_points(group="torch.backends")),
    reason="asyncsgd is not installed (pip install -e .), so torchrun does not know its entry point for --nproc",
)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TRAIN = [str(ROOT / "experiments" / "train.py"), "tasks:Plane", "--batch-size", "4"]
"""Its model needs no transformers, which each process would import."""
FEW = ["--runs-dir", "runs", "--evaluations", "1", "--samples", "48"]


@pytest.fixture
def command(tmp_path):
    """Run a command line in `tmp_path`; whatever it started is gone afterwards (torchrun's ranks have own sessions)."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"ASYNCSGD_TEST": mark, "PYTHONPATH": str(ROOT / "tests")}

    def run(*words):
        more = {"capture_output": True, "text": True, "timeout": TIMEOUT, "start_new_session": True}
        return subprocess.run(words, cwd=tmp_path, env=environment, **more)

    yield run
    left = marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def the_only_run(folder):
    (run,) = (folder / "runs").iterdir()
    return run, json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_another_number_than_torchruns_exits_with_2_and_rank_0_says_what_to_type(rank, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    launched = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    ended = cli("stilt_mlm.py --mode sync --nproc 4")
    assert ended.code == 2
    said = (
        "error: the launcher started 2 processes but --nproc is 4; drop --nproc, or type torchrun --nproc-per-node 4\n"
    )
    assert ended.out == ""
    assert ended.err == (said if rank == "0" else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "environment", "said"),
    [
        ("single", {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "type python, not torchrun"),
        ("async", {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "need a token, by which hosts know"),
        ("hogwild", {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "type --mode async or --mode sync"),
    ],
)
def test_a_mode_that_cannot_use_torchruns_ranks_says_so(mode, environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = cli(f"stilt_mlm.py --mode {mode}")
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize("mode", ["async", "hogwild"])
def test_a_second_rank_has_no_part_in_a_run_whose_leader_starts_the_workers(mode, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    began = psutil.Process().children()
    ended = cli(f"stilt_mlm.py --mode {mode}")
    assert ended.code == 0
    assert ended.out == ""
    assert ended.err == ""
    assert psutil.Process().children() == began
    assert list(tmp_path.iterdir()) == []


def test_a_study_is_begun_by_no_rank_of_torchruns(monkeypatch, tmp_path):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = cli(["asyncsgd", "study", "quick", "--out", tmp_path / "study"])
    assert ended.code == 2
    assert "a study starts those of its runs itself; type python, not torchrun" in ended.err
    with pytest.raises(UsageError, match="type python, not torchrun"):
        asyncsgd.study(
            Plane(), {"a": Synchronous(), "b": Asynchronous()}, range(6), samples=80, folder=tmp_path / "study"
        )
    assert list(tmp_path.iterdir()) == []


@needs_entry_point
@pytest.mark.processes
def test_torchrun_takes_the_number_of_workers_from_the_script_s_own_flag(command, tmp_path):
    done = command(TORCHRUN, *TRAIN, "--mode", "async", "--nproc", "4", *FEW)
    assert done.returncode == 0, done.stderr
    run, summary = the_only_run(tmp_path)
    told = [summary[key] for key in ("status", "mode", "num_workers", "num_samples", "num_updates")]
    assert told == ["DONE", "async", 4, 48, 12]
    assert 0 < summary["machine_load"]["own_share"] <= 1
    assert "-async-w4-" in run.name
    assert f"done   runs/{run.name}" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "more", "mode", "num_updates"),
    [
        (f"{TORCHRUN} --nproc-per-node 2", [], "async", 12),
        (f"{sys.executable} -m torch.distributed.run --nproc=2", ["--mode", "sync"], "sync", 6),
        # The name of its flag does not mean that it looks for GPUs: it calls torchrun, whose ranks choose a device.
        pytest.param(
            f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2",
            *(["--mode", "sync"], "sync", 6),
            marks=pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
        ),
    ],
    ids=range(3),
)
def test_ranks_made_by_torchrun_train_together(start, more, mode, num_updates, command, tmp_path):
    done = command(*start.split(), *TRAIN, *more, *FEW)
    assert done.returncode == 0, done.stderr
    run, summary = the_only_run(tmp_path)
    told = [summary[key] for key in ("status", "mode", "num_workers", "num_samples", "num_updates")]
    assert told == ["DONE", mode, 2, 48, num_updates]
    assert (run / "model" / "model.safetensors").is_file()
    assert done.stdout.count("rule   ") == 1  # rank 0 alone speaks


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_worker_takes_none_of_torchruns_ranks_along(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    flags = "--mode async --speeds constant:0.02 --run-dir run --samples 1600 --evaluations 40"
    started = Command([TORCHRUN, "--nproc-per-node", "2", *TRAIN, *flags.split()], tmp_path)
    try:
        events = tmp_path / "run" / "events.jsonl"
        until(lambda: events.exists() and events.read_bytes().count(b'"kind":"evaluate"') >= 3, "three evaluations")
        processes = map(psutil.Process, started.pids())
        of_fork_server = [one.pid for one in processes if "multiprocessing.forkserver" in " ".join(one.cmdline())]
        workers = [pid for pid in of_fork_server if psutil.Process(pid).ppid() in of_fork_server]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert started.process.wait(TIMEOUT) == 0, started.err
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["status"] == "DONE"
        assert summary["num_samples"] == 1600
        until(lambda: not started.pids(), "that every process has ended")
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.processes
def test_a_pipeline_of_torchrun_that_loses_a_rank_leaves_no_model(tmp_path, monkeypatch):
    """No rank has all of its parameters."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text(sentences(200, seed=0))
    script = str(ROOT / "experiments" / "stilt_mlm.py")
    flags = "--mode pipeline --micro-batches 2 --data text.txt --run-dir run --samples 64000 --evaluations 400"
    started = Command([TORCHRUN, "--nproc-per-node", "2", script, *flags.split()], tmp_path)
    try:
        events = tmp_path / "run" / "events.jsonl"
        until(lambda: events.exists() and events.read_bytes().count(b'"kind":"evaluate"') >= 3, "three evaluations")
        (last,) = (pid for pid in started.pids() if psutil.Process(pid).environ().get("RANK") == "1")
        os.kill(last, signal.SIGKILL)
        assert started.process.wait(TIMEOUT) != 0
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        told = [summary[key] for key in ("status", "parameters_sha256", "final_eval_loss")]
        assert told == ["FAILED", None, None]
        assert not (tmp_path / "run" / "model").exists()
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_several_hosts_names_the_hardware_of_every_rank(command, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = f"{TORCHRUN} --nnodes 2 --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 1"
    script = " ".join([*TRAIN, "--mode", "sync", *FEW])
    hosts = " & ".join(f"{start} --node-rank {number} {script}" for number in (1, 0))
    done = command("bash", "-c", f"export GLOO_SOCKET_IFNAME=lo; {hosts}; wait")
    run, summary = the_only_run(tmp_path)
    assert summary["status"] == "DONE", done.stderr
    environment = json.loads((run / "environment.json").read_text())
    (hardware,) = environment["hardware_of_ranks"]
    assert hardware.pop("ranks") == [0, 1]
    assert hardware == {key: environment[key] for key in hardware}
    names = {"cpu", "cores", "gpus", "torch_build", "cpu_capability"}
    assert names | {"processor", "instruction_limits", "gpu_libraries"} == set(hardware)
