"""The documented command, typed literally: torchrun starts the script, and the script knows who starts the workers."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from doors import ROOT, cli

TIMEOUT = 90
needs_entry_point = pytest.mark.skipif(
    all(point.module != "asyncsgd.torchrun" for point in importlib.metadata.entry_points(group="torch.backends")),
    reason="asyncsgd is not installed (pip install -e .), so torchrun does not know its entry point for --nproc",
)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WORDS = ("alpha", "beta", "gamma", "worker", "server", "gradient", "update", "reads", "writes", "stale", "fresh")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Flags of a run that takes a second once everything is imported."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    text = folder / "text.txt"
    text.write_text("".join(" ".join(draw.choices(WORDS, k=12)) + f" {line}\n" for line in range(300)))
    return (
        f"--data {text} --cache-dir {folder / 'cache'} --runs-dir runs --seq-len 32 --batch-size 4 --vocab-size 512 "
        "--eval-samples 8 --evaluations 1 --samples 48"
    ).split()


@pytest.fixture
def command(tmp_path):
    """Run a command line in `tmp_path`; whatever it started is gone afterwards (torchrun's ranks have own sessions)."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}

    def run(*words):
        return subprocess.run(
            words,
            cwd=tmp_path,
            env={**environment, "ASYNCSGD_TEST": mark},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            start_new_session=True,
        )

    yield run
    left = marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def marked(mark):
    """The living processes whose environment carries `mark`; none where there is no /proc."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not dead and f"ASYNCSGD_TEST={mark}".encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


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
    assert (ended.out, ended.err) == ("", said if rank == "0" else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "environment", "said"),
    [
        ("single", {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "type python, not torchrun"),
        ("async", {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "type --mode sync"),
        ("hogwild", {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "type --mode sync"),
    ],
)
def test_a_mode_that_cannot_use_torchruns_ranks_says_so(mode, environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = cli(f"stilt_mlm.py --mode {mode}")
    assert ended.code == 2
    assert said in ended.err


@needs_entry_point
@pytest.mark.processes
def test_the_documented_command_trains_with_four_workers(command, small, tmp_path):
    done = command(TORCHRUN, str(ROOT / "experiments/stilt_mlm.py"), "--mode", "async", "--nproc", "4", *small)
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
    ("start", "mode", "num_updates"),
    [
        (f"{TORCHRUN} --nproc-per-node 2", "async", 12),
        (f"{sys.executable} -m torch.distributed.run --nproc=2", "sync", 6),
        # The name of its flag does not mean that it looks for GPUs: it calls torchrun, whose ranks choose a device.
        pytest.param(
            f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2",
            *("sync", 6),
            marks=pytest.mark.skipif(
                importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
            ),
        ),
    ],
    ids=["console script, async", "module, sync", "accelerate, sync"],
)
def test_ranks_made_by_torchrun_train_together(start, mode, num_updates, command, small, tmp_path):
    done = command(*start.split(), str(ROOT / "experiments/stilt_mlm.py"), "--mode", mode, *small)
    assert done.returncode == 0, done.stderr
    _, summary = the_only_run(tmp_path)
    told = [summary[key] for key in ("status", "mode", "num_workers", "num_samples", "num_updates")]
    assert told == ["DONE", mode, 2, 48, num_updates]
    assert done.stdout.count("task   masked_lm") == 1  # rank 0 alone speaks


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_several_hosts_names_the_hardware_of_every_rank(command, small, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = f"{TORCHRUN} --nnodes 2 --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 1"
    script = f"{ROOT / 'experiments/stilt_mlm.py'} --mode sync {' '.join(small)}"
    hosts = " & ".join(f"{start} --node-rank {number} {script}" for number in (1, 0))
    done = command("bash", "-c", f"export GLOO_SOCKET_IFNAME=lo; {hosts}; wait")
    run, summary = the_only_run(tmp_path)
    assert summary["status"] == "DONE", done.stderr
    environment = json.loads((run / "environment.json").read_text())
    (hardware,) = environment["hardware_of_ranks"]
    assert hardware.pop("ranks") == [0, 1]
    assert hardware == {key: environment[key] for key in hardware}
    assert {"cpu", "cores", "gpus", "torch_build", "cpu_capability"} == set(hardware)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "flags", "mode", "num_updates"),
    [
        ("causal_lm", "--data text.txt --vocab-size 300 --learning-rate 3e-3 --warmup 0", "sync", 6),
        ("token_classification", "--data table --vocab-size 64 --learning-rate 3e-3 --warmup 0", "async", 12),
        ("classification", "--data table", "async", 12),
    ],
)
def test_ranks_train_any_task(task, flags, mode, num_updates, command, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{' '.join(WORDS)} {line}\n" for line in range(100)))
    (tmp_path / "table").mkdir()
    for side, numbers in (("train", range(40)), ("test", range(40, 52))):
        rows = [
            {"text": f"one {n}", "label": "aaab"[n % 4], "tokens": ["one", str(n)], "ner_tags": ["B-A", "O"]}
            for n in numbers
        ]
        (tmp_path / "table" / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = f"--mode {mode} --cache-dir cache --seq-len 32 --batch-size 4 --evaluations 1 --samples 48"
    start = f"{TORCHRUN} --nproc-per-node 2 {ROOT / 'experiments/train.py'} {task} {common} {flags}"
    done = command(*start.split())
    assert done.returncode == 0, done.stderr
    run, summary = the_only_run(tmp_path)
    told = [summary[key] for key in ("status", "mode", "num_workers", "num_samples", "num_updates")]
    assert told == ["DONE", mode, 2, 48, num_updates]
    assert summary["final_eval_loss"] < summary["first_eval_loss"]
    assert (run / "model" / "config.json").is_file()
    assert done.stdout.count("rule   ") == 1  # rank 0 alone speaks
