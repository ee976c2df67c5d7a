"""Workers, ranks, the main process and the user all leave in the middle; nothing hangs, nothing is left behind."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing import forkserver

import msgspec
import psutil
import pytest
from commands import DEADLINE, Command, until
from doors import (
    ROOT,
    SGD,
    AllReduce,
    Asynchronous,
    Finished,
    FlatModel,
    Processes,
    Synchronous,
    asyncsgd,
    cli,
    parameters_sha256,
)
from marks import slow
from safetensors.torch import load_file
from tasks import Plane
from torch import nn


def num_evaluations(run):
    with contextlib.suppress(OSError):
        return (run / "events.jsonl").read_bytes().count(b'"kind":"evaluate"')
    return 0


def workers():
    """Living children of this process's fork server, in the order they were started: worker 0 first."""
    living = [process.info for process in psutil.process_iter(["pid", "ppid", "status", "create_time"])]
    server = forkserver._forkserver._forkserver_pid
    children = [one for one in living if one["ppid"] == server and one["status"] != psutil.STATUS_ZOMBIE]
    return [one["pid"] for one in sorted(children, key=lambda one: one["create_time"])]


@pytest.fixture
def train(small, tmp_path, tmp_path_factory, monkeypatch):
    """Run the script in this process; a thread kills some of its workers once three evaluations are recorded."""
    temporary = tmp_path_factory.mktemp("t")  # short: the path of a socket has 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(flags, *killed, num_workers=0):
        folder = tmp_path / "run"
        pids = []

        def kill():
            try:
                until(lambda: num_evaluations(folder) >= 3, "three evaluations")
                pids.extend(workers())
                gone = [pids[worker] for worker in killed]
            except BaseException:
                gone = workers()
                raise
            finally:
                for pid in gone:
                    os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill if killed else None)
        thread.start()
        ended = cli(["stilt_mlm.py", *small, "--run-dir", folder, *flags.split()])
        thread.join()
        assert len(pids) == num_workers
        assert workers() == []
        assert list(temporary.glob("asyncsgd-*")) == []
        return Finished(folder), ended

    return run


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", *slow("hogwild", "async --transport process_group --rule synchronous")])
def test_a_killed_worker_leaves_its_batch_to_another_and_the_run_is_done(mode, train):
    run, ended = train(f"--mode {mode} --nproc 2 --samples 800 --evaluations 20", 1, num_workers=2)
    assert ended.code == 0
    assert run.summary["status"] == "DONE"
    assert run.summary["num_samples"] == 800
    (left,) = run.records("leave")
    assert left["worker"] == 1
    assert left["reason"] == "its process was killed by SIGKILL"
    assert "worker 1 is lost: its process was killed by SIGKILL; the others go on\n" in ended.out
    arrivals = run.records("arrival")
    assert Counter(event["batches"][0][1] for event in arrivals) == Counter(range(200))
    assert {event["worker"] for event in arrivals} == {0, 1}
    arrived = {event["dispatch"] for event in arrivals}
    assert arrived.isdisjoint(left["lost"])
    if "synchronous" not in mode:  # there a worker may be idle, waiting for the others
        (lost,) = left["lost"]
        assert max(arrived) == 200  # as many dispatches as batches, and one more for the lost one
        assert arrived | {lost} == set(range(201))


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", "hogwild"])
def test_a_run_without_any_worker_left_has_failed_and_says_how_each_ended(mode, train):
    run, ended = train(f"--mode {mode} --nproc 2 --samples 4000 --evaluations 100", 0, 1, num_workers=2)
    assert ended.code == 1
    assert run.summary["status"] == "FAILED"
    said = run.summary["message"]
    assert said.startswith("no worker is left (worker ")
    for worker in (0, 1):
        assert f"worker {worker}: its process was killed by SIGKILL" in said
    assert ended.err == f"FAILED: {said}\n"
    assert (run.path / "model" / "model.safetensors").is_file()


@pytest.mark.processes
@pytest.mark.parametrize("rule", slow("fixed_delay:delay=2", "diloco"))
def test_a_run_with_a_killed_worker_replays_bit_for_bit(rule, train, small):
    run, _ = train(f"--mode async --nproc 3 --rule {rule} --samples 800 --evaluations 20", 1, num_workers=3)
    (left,) = run.records("leave")
    assert left["worker"] == 1
    cache = small[small.index("--cache-dir") + 1]
    assert cli(["asyncsgd", "replay", run.path, "--cache-dir", cache]).out.endswith("identical\n")


@pytest.mark.processes
def test_a_killed_rank_ends_the_synchronous_run_at_once_and_is_named(train):
    rank = 2  # 0 is the process of the script itself
    began = time.monotonic()
    run, ended = train("--mode sync --nproc 3 --samples 8000 --evaluations 200", rank - 1, num_workers=2)
    assert ended.code == 1
    assert time.monotonic() - began < DEADLINE
    assert run.summary["status"] == "FAILED"
    assert run.summary["message"].startswith(
        f"rank {rank} is lost (its process was killed by SIGKILL) and synchronous training cannot go on without it"
    )
    assert not (run.path / "model").exists()
    assert run.summary["num_updates"] > 0
    assert run.summary["parameters_sha256"] is None
    assert run.summary["final_eval_loss"] is None


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["single", "sync --nproc 2", "async --nproc 2", "hogwild --nproc 2"])
def test_a_loss_that_is_no_number_ends_the_run_as_diverged_with_worker_and_version(mode, train):
    run, ended = train(
        f"--mode {mode} --samples 400 --evaluations 1 --optimizer sgd --learning-rate 1e30 --warmup 0 --clip-norm 0"
    )
    assert ended.code == 1
    assert run.summary["status"] == "DIVERGED"
    (fault,) = run.records("fault")
    assert fault["message"].startswith(f"the loss of worker {fault['worker']} at version ")
    assert fault["message"].endswith((" is nan", " is inf"))
    assert run.summary["message"].startswith(fault["message"] + "; try a smaller --learning-rate")
    assert fault["worker"] in (0, 1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a script in a process of its own, and end it after the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    started = []

    def run(flags, script=("train.py", "tasks:Plane")):
        name, *words = script
        command = [sys.executable, str(ROOT / "experiments" / name), *words, "--run-dir", "run", *flags.split()]
        started.append(Command(command, tmp_path))
        return started[-1]

    yield run
    for command in started:
        command.end()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("async --nproc 2", signal.SIGINT),
        ("single", signal.SIGINT),
        ("sync --nproc 2", signal.SIGINT),
        ("hogwild --nproc 2", signal.SIGTERM),  # as a batch system sends at the end of a job's time
    ],
)
def test_ctrl_c_saves_the_model_and_leaves_nothing_behind(mode, number, start, tmp_path):
    command = start(f"--mode {mode} --samples 2000000 --evaluations 20000")
    until(lambda: num_evaluations(tmp_path / "run") >= 3, "three evaluations")
    os.killpg(command.process.pid, number)  # what a terminal does: to everybody in the foreground
    assert command.process.wait(DEADLINE) == 130, command.err
    run = Finished(tmp_path / "run")
    assert run.summary["status"] == "INTERRUPTED"
    assert run.summary["message"] == "interrupted by the user"
    assert run.summary["num_updates"] > 0
    assert run.records("leave") == []
    said, end = command.err.splitlines()
    assert said.startswith("stopping after this step; press Ctrl-C again to stop at once; in ")
    assert end == "INTERRUPTED: interrupted by the user"
    until(lambda: not command.pids(), "all processes to be gone", 30)
    assert command.left() == []
    model = Plane().model(0)
    model.load_state_dict(load_file(run.path / "model" / "model.safetensors"))
    flat = FlatModel(model)
    assert parameters_sha256(flat.layout, flat.parameters) == run.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "numbers", "seconds"),
    [
        ("sync --nproc 2 --stuck-on worker1", [signal.SIGTERM], 30),
        ("sync --nproc 2", [signal.SIGINT] * 2, 1),
        ("single", [signal.SIGINT] * 2, 1),
    ],
)
def test_a_step_that_does_not_end_is_left_after_half_a_minute_or_at_the_second_signal(
    mode, numbers, seconds, start, tmp_path
):
    flags = f"--mode {mode} --samples 200000 --evaluations 2 --checkpoint-every 80"
    command = start(flags, ("train.py", "tasks:Stuck"))
    until((tmp_path / "stuck").exists, "a gradient that does not end")
    began = time.monotonic()
    for number in numbers:
        os.killpg(command.process.pid, number)
        until(lambda: "stopping after this step" in command.err, "an answer", 5)
    assert command.process.wait(seconds + 40) == 130, command.err
    assert time.monotonic() - began > seconds
    run = Finished(tmp_path / "run")
    assert run.summary["status"] == "INTERRUPTED"
    assert run.summary["message"] == "interrupted by the user, at once: only the records are saved"
    assert run.summary["num_updates"] == len(run.records("arrival")) / (1 + ("sync" in mode))
    assert list((tmp_path / "run" / "checkpoints").glob("*.json"))
    assert not (tmp_path / "run" / "model").exists()
    until(lambda: not command.pids(), "all processes to be gone", 30)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("line", ["run    ", "step   "], ids=["during the imports", "while workers start"])
def test_ctrl_c_before_training_ends_everything_soon_and_leaves_a_summary(line, start, small, tmp_path):
    command = start("--mode async --nproc 2 --samples 200000 --evaluations 2000", ("stilt_mlm.py", *small))
    until(lambda: f"\n{line}" in (tmp_path / "out.txt").read_text(), f"the line {line!r}")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(DEADLINE) == 130, command.err
    assert Finished(tmp_path / "run").summary["status"] == "INTERRUPTED"
    until(lambda: not command.pids(), "all processes to be gone", 30)
    assert "Traceback" not in command.err
    assert command.left() == []


@dataclasses.dataclass(frozen=True)
class InterruptedAtStart(Plane):
    """Its workers interrupt the leader while they come up, as long as there is the file `marker`."""

    marker: str = ""

    def model(self, seed):
        leader = multiprocessing.parent_process()
        if leader is not None and os.path.exists(self.marker):
            os.kill(leader.pid, signal.SIGINT)
            time.sleep(3)
        return Plane.model(self, seed)


@pytest.mark.processes
@pytest.mark.parametrize("runtime", [Processes(1), *slow(AllReduce(2))], ids=lambda one: one.mode)
def test_a_run_that_is_interrupted_before_it_goes_on_has_no_parameters_and_loses_nothing(runtime, tmp_path):
    marker = tmp_path / "marker"
    task = InterruptedAtStart(marker=str(marker))
    given = {"runtime": runtime, "learning_rate": 0.01, "checkpoint_every": 40, "quiet": True}
    whole = asyncsgd.train(task, samples=160, folder=tmp_path / "whole", **given)
    given |= {"folder": tmp_path / "run", "resume": True}
    asyncsgd.train(task, samples=80, **given)
    saved = tmp_path / "run" / "model" / "model.safetensors"
    before = saved.read_bytes()
    marker.touch()
    stopped = asyncsgd.train(task, samples=160, **given)
    assert stopped.status == "INTERRUPTED"
    assert stopped.summary["parameters_sha256"] is None
    assert saved.read_bytes() == before
    marker.unlink()
    again = asyncsgd.train(task, samples=160, **given)
    assert again.status == "DONE"
    assert again.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trains"), [("async", False), ("async", True), ("sync", True)])
def test_when_the_main_process_is_killed_its_workers_go_and_shared_memory_is_free(mode, trains, start, tmp_path):
    command = start(f"--mode {mode} --nproc 2 --samples 2000000 --evaluations 20000")
    until(lambda: "\nstep   " in (tmp_path / "out.txt").read_text(), "the workers to be started")
    if trains:
        until(lambda: num_evaluations(tmp_path / "run") >= 3, "three evaluations")
        assert len(command.pids()) >= 4  # itself, its fork server and two workers
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    until(lambda: not command.pids(), "workers to go by themselves", 30)
    assert not trains or num_evaluations(tmp_path / "run") >= 3


@dataclasses.dataclass(frozen=True)
class Counting(Plane):
    """Every step adds 1 to the weights, and the loss is minus their sum; worker 1 is killed in an evaluation."""

    name = "counting"
    batch_size: int = 5  # 6 evaluation batches, so each of three workers has two
    killed_at: int = 1

    def model(self, seed):
        model = super().model(seed)
        nn.init.zeros_(model.weight)
        return model

    def outputs(self, model, batch):
        if not model.training and multiprocessing.current_process().name == "worker1":
            LOOKS.append(True)
            if len(LOOKS) == 2 * self.killed_at - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return -model.weight

    def loss(self, outputs, batch):
        return outputs.sum()


LOOKS = []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rule", "killed_at"), [(Asynchronous(), 2), *slow((Synchronous(), 1), (Synchronous(), 2), (Asynchronous(), 4))]
)
def test_a_worker_that_is_killed_in_an_evaluation_leaves_its_shard_to_another(rule, killed_at):
    records = []
    steps = {"samples": 24 * 5, "learning_rate": 1.0, "optimizer": SGD(), "evaluations": 8}
    task = Counting(killed_at=killed_at)
    asyncsgd.train(task, rule=rule, runtime=Processes(3), quiet=True, report=records.append, **steps)
    (left,) = (record for record in records if record.kind == "leave")
    assert left.worker == 1
    assert left.reason == "its process was killed by SIGKILL"
    evaluations = [record for record in records if record.kind == "evaluate"]
    assert len(evaluations) == 9
    for evaluation in evaluations:  # all shards, each of them once and at one version
        assert evaluation.weight == 30
        assert evaluation.loss == -16 * evaluation.version
    indices = [record.batches[0][1] for record in records if record.kind == "arrival"]
    assert len(set(indices)) == 24
    assert len(indices) == 24


@dataclasses.dataclass(frozen=True)
class Idle(Asynchronous):
    """It forgets to start anybody again."""

    name = "idle"

    def arrive(self, state, arrival, view):
        return msgspec.structs.replace(super().arrive(state, arrival, view), start=())


@pytest.mark.processes
@pytest.mark.parametrize("runtime", [asyncsgd.Virtual(2), Processes(2)])
def test_a_rule_that_starts_nobody_ends_the_run_and_is_named(runtime):
    with pytest.raises(RuntimeError, match="rule idle left nobody in flight"):
        asyncsgd.train(Counting(), rule=Idle(), runtime=runtime, quiet=True, samples=80, learning_rate=0.1)
