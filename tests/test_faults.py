"""Workers, ranks, the main process and the user all leave in the middle; nothing hangs, nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from tasks import Classes

import stilt_mlm
from asyncsgd.models import saved_parameters_sha256
from asyncsgd.optimizers import SGD, Optimizer, StepTakenByWorker
from asyncsgd.records.events import DONE, Evaluation, Event, Gradient, Membership, Taken, read_events
from asyncsgd.replaying import PreparedReplay, experiment_of_run
from asyncsgd.rules import Asynchronous, Synchronous
from asyncsgd.runtime.base import Budget, Result
from asyncsgd.runtime.hogwild import Hogwild
from asyncsgd.runtime.log import read_log
from asyncsgd.runtime.parameter_server import ParameterServer
from asyncsgd.runtime.processes import Processes, fork_server
from asyncsgd.runtime.rank_process import Finished
from asyncsgd.runtime.transport.messages import Compute, Computed, Evaluate, Evaluated, Holding, Ready, Stop
from asyncsgd.runtime.transport.shared_memory import FROZEN, Segment, SharedMemoryServer
from asyncsgd.server import Server
from asyncsgd.signals import StopRequest
from asyncsgd.tasks.base import encode_sums
from asyncsgd.training import follow_records

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "stilt_mlm.py"
DEADLINE = 60.0
WORDS = ("alpha", "beta", "gamma", "worker", "server", "gradient", "update", "reads", "writes", "stale", "fresh")

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    text = folder / "text.txt"
    text.write_text("".join(" ".join(draw.choices(WORDS, k=12)) + f" {line}\n" for line in range(300)))
    return (
        f"--data {text} --cache-dir {folder / 'cache'} --seq-len 32 --batch-size 4 --vocab-size 512 --eval-samples 8"
    ).split()


def until(seen, what, seconds=DEADLINE):
    """Look again and again until something is seen, and return it; an error after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := seen()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return found


def num_evaluations(run):
    with contextlib.suppress(OSError):
        return (run / "events.jsonl").read_bytes().count(b'"kind":"evaluate"')
    return 0


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def records_of(run, kind):
    return [record for record in read_events(run / "events.jsonl") if record["kind"] == kind]


def stat_of(pid):
    """The fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def workers():
    """Living children of this process's fork server, in the order they were started: worker 0 first."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = stat_of(int(folder.name))
        if fields and fields[0] != "Z" and int(fields[1]) == server:
            found.append((int(fields[19]), int(folder.name)))  # start time
    return [pid for _, pid in sorted(found)]


@dataclasses.dataclass
class Ended:
    run: Path
    exit_code: int
    summary: dict[str, Any]
    seconds: float


Train = Callable[..., Ended]


@pytest.fixture
def train(small, tmp_path, tmp_path_factory, monkeypatch):
    """Run the script in this process; a thread does `fault` to the workers once `after` evaluations are recorded."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    temporary = tmp_path_factory.mktemp("t")  # short: the path of a socket has 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(flags, fault=None, num_workers=0):
        folder = tmp_path / "run"
        failed = []

        def do():
            try:
                until(lambda: num_evaluations(folder) >= 3, "three evaluations")
                pids = workers()
                assert len(pids) == num_workers
                assert fault is not None
                fault(pids)
            except BaseException as error:
                failed.append(error)
                for pid in workers():
                    os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=do)
        if fault is not None:
            thread.start()
        began = time.monotonic()
        code = stilt_mlm.run([*small, "--run-dir", str(folder), *flags.split()], StopRequest())
        seconds = time.monotonic() - began
        if fault is not None:
            thread.join()
        assert failed == []
        assert workers() == []
        assert list(Path("/dev/shm").glob(f"asyncsgd-{os.getpid()}-*")) == []
        assert list(temporary.glob("asyncsgd-*")) == []
        return Ended(folder, code, summary_of(folder), seconds)

    return run


def kill(*which):
    def fault(pids):
        for worker in which:
            os.kill(pids[worker], signal.SIGKILL)

    return fault


@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize(
    "mode", ["async", *slow("hogwild", "async --transport process_group", "async --rule synchronous")]
)
def test_a_killed_worker_leaves_its_batch_to_another_and_the_run_is_done(mode, train):
    ended = train(f"--mode {mode} --nproc 2 --samples 1600 --evaluations 40", kill(1), num_workers=2)
    assert ended.exit_code == 0
    assert ended.summary["status"] == "DONE"
    assert ended.summary["num_samples"] == 1600
    (left,) = records_of(ended.run, "leave")
    assert left["worker"] == 1
    assert left["reason"] == "its process was killed by SIGKILL"
    arrivals = records_of(ended.run, "arrival")
    assert Counter(batches[0][1] for batches in (event["batches"] for event in arrivals)) == Counter(range(400))
    assert {event["worker"] for event in arrivals} == {0, 1}
    arrived = {event["dispatch"] for event in arrivals}
    assert arrived.isdisjoint(left["lost"])
    if mode != "async --rule synchronous":  # there a worker may be idle, waiting for the others
        (lost,) = left["lost"]
        assert max(arrived) == 400  # as many dispatches as batches, and one more for the lost one
        assert arrived | {lost} == set(range(401))


@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", "hogwild"])
def test_a_run_without_any_worker_left_has_failed_and_says_how_each_ended(mode, train, capsys):
    ended = train(f"--mode {mode} --nproc 2 --samples 4000 --evaluations 100", kill(0, 1), num_workers=2)
    assert ended.exit_code == 1
    assert ended.summary["status"] == "FAILED"
    said = ended.summary["message"]
    assert said.startswith("no worker is left (worker ")
    for worker in (0, 1):
        assert f"worker {worker}: its process was killed by SIGKILL" in said
    captured = capsys.readouterr()
    assert captured.err == f"FAILED: {said}\n"
    assert (ended.run / "model" / "model.safetensors").is_file()


@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("rule", slow("fixed_delay:delay=2", "ringmaster:threshold=2,stops=true", "diloco"))
def test_a_run_with_a_killed_worker_replays_bit_for_bit(rule, train, small):
    ended = train(f"--mode async --nproc 3 --rule {rule} --samples 1600 --evaluations 40", kill(1), num_workers=3)
    (left,) = records_of(ended.run, "leave")
    assert left["worker"] == 1
    assert left["lost"] or not rule.startswith("ringmaster")  # under the others a worker may be idle when it is killed
    experiment = experiment_of_run(ended.run, small[small.index("--cache-dir") + 1])
    replay = PreparedReplay(experiment, read_log(ended.run / "events.jsonl"))
    assert replay.run() is None
    assert replay.parameters_sha256 == ended.summary["parameters_sha256"]


@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_synchronous_run_at_once_and_is_named(rank, train):
    ended = train("--mode sync --nproc 2 --samples 8000 --evaluations 200", kill(rank), num_workers=2)
    assert ended.exit_code == 1
    assert ended.seconds < DEADLINE
    assert ended.summary["status"] == "FAILED"
    assert ended.summary["message"].startswith(
        f"rank {rank} is lost (its process was killed by SIGKILL) and synchronous training cannot go on without it"
    )
    # The rank had the parameters; the leader has the initial ones, which are nobody's result.
    assert not (ended.run / "model").exists()
    assert ended.summary["num_updates"] > 0
    assert [ended.summary[key] for key in ("parameters_sha256", "final_eval_loss", "metrics")] == [None] * 3


def hand_over(records):
    """Rank 0, whose handing over takes longer than the others' way out."""
    time.sleep(1.0)
    records.send(Finished(Result(DONE), 7, 28, 0.5))
    records.recv()
    os._exit(0)


@pytest.mark.processes
def test_a_rank_that_has_ended_well_is_not_lost_while_rank_0_hands_over():
    context = fork_server("tiny")
    segment = Segment.create(4)
    records, far_end = context.Pipe()
    with Processes(context) as processes:
        processes.start(0, hand_over, far_end)
        processes.start(1, os._exit, 0)
        far_end.close()
        run = types.SimpleNamespace(stop_requested=lambda: False, num_workers=2, resume=None)
        assert follow_records(run, records, processes, segment).version == 7  # type: ignore[arg-type]
        records.send("read")
    segment.unlink()


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["single", "sync --nproc 2", "async --nproc 2", "hogwild --nproc 2"])
def test_a_loss_that_is_no_number_ends_the_run_as_diverged_with_worker_and_version(mode, train):
    ended = train(
        f"--mode {mode} --samples 400 --evaluations 1 --optimizer sgd --learning-rate 1e30 --warmup 0 --clip-norm 0"
    )
    assert ended.exit_code == 1
    assert ended.summary["status"] == "DIVERGED"
    (fault,) = records_of(ended.run, "fault")
    who = "rank" if mode.startswith("sync") else "worker"
    assert fault["message"].startswith(f"the loss of {who} {fault['worker']} at version ")
    assert fault["message"].endswith((" is nan", " is inf"))
    assert ended.summary["message"].startswith(fault["message"] + "; try a smaller --learning-rate")
    assert fault["worker"] in (0, 1)


class Command:
    """A command in a session of its own, its output in files; everything it starts carries a mark."""

    def __init__(self, words, folder):
        self.words = words
        self.mark = uuid.uuid4().hex
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        temporary = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.temporary = temporary
        with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env={**environment, "ASYNCSGD_TEST": self.mark, "TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def left(self):
        """Names in the folder of temporary files, but for the cache that torch makes when transformers is imported."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def pids(self):
        """Everything living that came from the command."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                alive = stat_of(int(folder.name))[:1] not in ([], ["Z"])
                if alive and f"ASYNCSGD_TEST={self.mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return pids

    @property
    def err(self):
        return (self.folder / "err.txt").read_text()

    def shared(self):
        return list(Path("/dev/shm").glob(f"asyncsgd-{self.process.pid}-*"))

    def end(self):
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        for path in self.shared():
            path.unlink()
        subprocess.run(["rm", "-rf", str(self.temporary)], check=True)


@pytest.fixture
def start(small, tmp_path):
    started = []

    def run(flags):
        words = [sys.executable, str(SCRIPT), *small, "--run-dir", "run", *flags.split()]
        started.append(Command(words, tmp_path))
        return started[-1]

    yield run
    for command in started:
        command.end()


@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("mode", slow("async --nproc 2", "single", "sync --nproc 2", "hogwild --nproc 2"))
def test_ctrl_c_saves_the_model_and_leaves_nothing_behind(mode, start, tmp_path):
    command = start(f"--mode {mode} --samples 200000 --evaluations 2000")
    until(lambda: num_evaluations(tmp_path / "run") >= 3, "three evaluations")
    os.killpg(command.process.pid, signal.SIGINT)  # what a terminal does: to everybody in the foreground
    assert command.process.wait(DEADLINE) == 130, command.err
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["message"]) == ("INTERRUPTED", "interrupted by the user")
    assert summary["num_updates"] > 0
    assert command.err == (
        "stopping after the current step; a second Ctrl-C leaves at once\nINTERRUPTED: interrupted by the user\n"
    )
    until(lambda: not command.pids(), "all processes to be gone", 30)
    assert command.shared() == []
    assert command.left() == []

    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_the_first_signal_is_also_heard_by_whoever_listened_before():
    """A sweep that makes the run: it must not begin another one."""
    with StopRequest() as sweep_is_asked, StopRequest() as run_is_asked, run_is_asked.during_a_run():
        os.kill(os.getpid(), signal.SIGTERM)
        assert run_is_asked()
        assert sweep_is_asked()


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["sync --nproc 2", "async --nproc 2", "hogwild --nproc 2"])
def test_sigterm_to_every_process_of_a_job_is_heard_by_the_leader_alone(mode, start, tmp_path):
    """What a batch system does at the end of a job's time, some seconds before it kills."""
    command = start(f"--mode {mode} --samples 200000 --evaluations 2000")
    until(lambda: num_evaluations(tmp_path / "run") >= 3, "three evaluations")
    for pid in command.pids():
        os.kill(pid, signal.SIGTERM)
    assert command.process.wait(DEADLINE) == 130, command.err
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["message"]) == ("INTERRUPTED", "interrupted by the user")
    assert summary["parameters_sha256"] == saved_parameters_sha256(tmp_path / "run" / "model")
    assert summary["num_updates"] > 0
    assert not records_of(tmp_path / "run", "leave")
    until(lambda: not command.pids(), "all processes to be gone", 30)
    assert command.shared() == []


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_when_the_main_process_is_killed_while_workers_start_nothing_is_left_in_memory(mode, start, tmp_path):
    command = start(f"--mode {mode} --nproc 2 --samples 200000 --evaluations 2000")
    until(lambda: "\nstep   " in (tmp_path / "out.txt").read_text(), "the workers to be started")
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    until(lambda: not command.pids(), "workers to go by themselves", 30)
    assert command.shared() == []


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", ["run    ", "step   "], ids=["during the imports", "while workers start"])
def test_a_signal_before_training_ends_everything_soon_and_leaves_a_summary(line, number, start, tmp_path):
    command = start("--mode async --nproc 2 --samples 200000 --evaluations 2000")
    until(lambda: f"\n{line}" in (tmp_path / "out.txt").read_text(), f"the line {line!r}")
    os.killpg(command.process.pid, number)
    assert command.process.wait(DEADLINE) == 130, command.err
    assert summary_of(tmp_path / "run")["status"] == "INTERRUPTED"
    until(lambda: not command.pids(), "all processes to be gone", 30)
    assert "Traceback" not in command.err
    assert command.shared() == []
    assert command.left() == []


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
def test_two_signals_while_the_model_is_saved_leave_all_of_it_or_nothing(start, tmp_path):
    command = start("--mode single --model small --samples 16 --evaluations 1")
    run = tmp_path / "run"
    until((run / "model.partial").is_dir, "the saving to begin")
    for _ in range(2):
        os.kill(command.process.pid, signal.SIGINT)
        time.sleep(0.01)
    code = command.process.wait(DEADLINE)
    status = summary_of(run)["status"]
    assert (code, status) in ((130, "INTERRUPTED"), (0, "DONE")), command.err
    assert not (run / "model.partial").exists()
    assert (run / "model").exists() == (status == "DONE")
    if status == "DONE":
        assert saved_parameters_sha256(run / "model") == summary_of(run)["parameters_sha256"]


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_when_the_main_process_is_killed_its_workers_go_and_shared_memory_is_free(mode, start, tmp_path):
    command = start(f"--mode {mode} --nproc 2 --samples 200000 --evaluations 2000")
    until(lambda: num_evaluations(tmp_path / "run") >= 3, "three evaluations")
    assert len(command.pids()) >= 4  # itself, its fork server and two workers
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    until(lambda: not command.pids(), "workers to go by themselves", 30)
    assert command.shared() == []
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert sum(record["kind"] == "evaluate" for record in events) >= 3


SIZE = 4


def sums_of(loss, weight):
    return encode_sums({"loss": loss, "correct": 0, "weight": float(weight)})


class Scripted(threading.Thread):
    """Worker `number`, whose steps add 1 to every parameter at rate 1.

    It leaves instead of evaluating for the `leaves_at`-th time, or instead of computing anything.
    """

    def __init__(self, address, number, *, leaves_at=None, computes=True):
        super().__init__(daemon=True)
        self.end, self.number, self.leaves_at, self.computes = address.connect(number), number, leaves_at, computes
        self.shards = []
        self.has_answered = threading.Event()
        """A first `Compute`, if only by leaving."""

    def run(self):
        with contextlib.suppress(EOFError):  # the server is gone
            self.obey()
        self.end._connection.close()  # as the end of a process does

    def obey(self):
        end = self.end
        parameters = torch.zeros(SIZE)
        end.answer(Ready("four numbers"))
        while not isinstance(command := end.receive(), Stop):
            version = end.pull(parameters)
            if isinstance(command, Evaluate):
                self.shards.append((command.shard, command.num_shards))
                if len(self.shards) == self.leaves_at:
                    return
                # As loss, what the parameters are: all shards must have seen one version.
                loss = float(parameters[0]) * (command.shard + 1)
                end.answer(Evaluated(command.shard, sums_of(loss, command.shard + 1)))
            elif isinstance(command, Compute):
                if not self.computes:
                    end._connection.close()
                    self.has_answered.set()
                    return
                if end.slot is not None:  # there is none in Hogwild mode, where nobody steps here
                    end.slot.fill_(-1.0)
                end.answer(Computed(command.dispatch, version, Gradient(1.0, 1.0, 2), Taken()))
                self.has_answered.set()


@pytest.mark.parametrize("rule", [Asynchronous(), Synchronous()])
@pytest.mark.parametrize("leaves_at", [1, 2, 3])
def test_the_shard_of_a_worker_lost_in_an_evaluation_goes_to_another(leaves_at, rule):
    transport = SharedMemoryServer(3, SIZE)
    records = []
    try:
        scripted = [
            Scripted(transport.address, number, leaves_at=leaves_at if number == 1 else None)  # the other two stay
            for number in range(3)
        ]
        for thread in scripted:
            thread.start()
        optimizer = Optimizer(transport.parameters, SIZE, SGD())
        server = Server(transport.parameters, rule, optimizer, lambda num_samples: 1.0, transport.writing)
        result = ParameterServer(
            server,
            transport,
            Classes(),
            num_workers=3,
            batch_size=2,
            budget=Budget(samples=48),
            evaluations=4,
            layout="four numbers",
            report=records.append,
        ).run()
        for thread in scripted:
            thread.join(10)
        assert not any(thread.is_alive() for thread in scripted)
    finally:
        transport.close()
    assert result == Result(DONE)
    (left,) = [record for record in records if isinstance(record, Membership) and record.kind == "leave"]
    assert (left.worker, left.reason) == (1, "its process ended")
    evaluations = [record for record in records if isinstance(record, Evaluation)]
    assert len(evaluations) == 5
    for number, evaluation in enumerate(evaluations, 1):
        shards = 3 if number <= leaves_at else 2
        assert evaluation.weight == shards * (shards + 1) // 2  # every shard once
        assert evaluation.loss == float(evaluation.version)
    lost_shard, num_shards = scripted[1].shards[-1]
    assert (lost_shard, num_shards) in scripted[0].shards  # the lowest number left takes it
    arrivals = [record for record in records if isinstance(record, Event)]
    indices = {event.batches[0][1] for event in arrivals}
    assert len(indices) == len(arrivals) == 24
    assert max(indices) < 24 + 2  # what others compute when the last sample arrives is discarded
    assert math.isclose(server.num_samples, 48)


@pytest.mark.parametrize("hogwild", [False, True])
@pytest.mark.parametrize("second", ["answers", "leaves"])
def test_messages_that_come_together_with_one_that_starts_an_evaluation_are_not_lost(second, hogwild):
    transport = SharedMemoryServer(2, SIZE, slots=not hogwild)
    records = []
    try:
        scripted = [Scripted(transport.address, 0), Scripted(transport.address, 1, computes=second == "answers")]
        for thread in scripted:
            thread.start()
        optimizer = StepTakenByWorker() if hogwild else Optimizer(transport.parameters, SIZE, SGD())
        server = Server(transport.parameters, Asynchronous(), optimizer, lambda num_samples: 1.0, transport.writing)
        deadline = time.monotonic() + 60

        def asked_to_stop():
            """Before the server looks for the first gradients: until both are there. Yes where it hangs."""
            for thread in scripted if server.in_flight else []:
                thread.has_answered.wait(60)
            return time.monotonic() > deadline

        result = (Hogwild if hogwild else ParameterServer)(
            server,
            transport,
            Classes(),
            num_workers=2,
            batch_size=2,
            budget=Budget(samples=16),
            evaluations=8,
            layout="four numbers",
            report=records.append,
            stop_requested=asked_to_stop,
        ).run()
    finally:
        transport.close()
    assert result == Result(DONE)
    arrivals = [record for record in records if isinstance(record, Event)]
    indices = {event.batches[0][1] for event in arrivals}
    assert len(indices) == len(arrivals)
    assert len(arrivals) == 8
    assert max(indices) < (8 if hogwild else 8 + 1)  # a step that a Hogwild worker has taken cannot be discarded
    evaluations = [record for record in records if isinstance(record, Evaluation)]
    assert evaluations[-1].version == server.version
    assert len(evaluations) == 9 or hogwild  # there, what is finished when all are to stand still is applied first


@pytest.mark.parametrize("seconds", [1.0, None])
def test_a_hogwild_worker_that_holds_a_gradient_in_the_last_evaluation_does_not_step_after_it(seconds):
    """What is saved is what was evaluated last: with --seconds and with --target-loss gradients are in flight then."""
    transport = SharedMemoryServer(2, SIZE, slots=False)
    answers = []

    def work(number):
        end = transport.address.connect(number)
        end.answer(Ready("four numbers"))
        holds = number == 1
        while not isinstance(command := end.receive(), Stop):
            if isinstance(command, Evaluate):
                # The loss is 9 before the first step and 1 after it, so that a second evaluation reaches the target.
                end.answer(Evaluated(command.shard, sums_of(9.0 if end.version == 0 else 1.0, 1)))
            elif isinstance(command, Compute):
                if holds:  # is frozen before it is done
                    until(lambda: int(end.segment.control[FROZEN]), "an evaluation")
                    end.answer(Holding())
                    while isinstance(next_command := end.receive(), Evaluate):
                        end.answer(Evaluated(next_command.shard, sums_of(1.0, 1)))
                    answers.append(type(next_command))
                    if isinstance(next_command, Stop):
                        return
                holds = number == 1 or seconds is not None
                end.answer(Computed(command.dispatch, end.version, Gradient(1.0, 1.0, 2), Taken()))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        server = Server(
            transport.parameters, Asynchronous(), StepTakenByWorker(), lambda num_samples: 1.0, transport.writing
        )
        deadline = time.monotonic() + 60
        result = Hogwild(
            server,
            transport,
            Classes(),
            num_workers=2,
            batch_size=2,
            budget=Budget(seconds=seconds) if seconds is not None else Budget(samples=16, target_loss=2.0),
            evaluations=1 if seconds is not None else 8,
            layout="four numbers",
            report=lambda record: None,
            stop_requested=lambda: time.monotonic() > deadline,
        ).run()
        for thread in threads:
            thread.join(10)
    finally:
        transport.close()
    assert result == Result(DONE)
    assert answers == ([Stop, Stop] if seconds is not None else [Stop])


def test_somebody_who_hangs_up_without_a_word_does_not_end_the_run():
    """A worker that is killed between its connection and its first message."""
    transport = SharedMemoryServer(2, SIZE)
    records = []
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(transport.address.socket_path)
        worker = Scripted(transport.address, 0)
        worker.start()
        optimizer = Optimizer(transport.parameters, SIZE, SGD())
        server = Server(transport.parameters, Asynchronous(), optimizer, lambda num_samples: 1.0, transport.writing)
        result = ParameterServer(
            server,
            transport,
            Classes(),
            num_workers=2,
            batch_size=2,
            budget=Budget(samples=8),
            evaluations=1,
            layout="four numbers",
            report=records.append,
            dead=lambda number, seconds: "its process was killed by SIGKILL" if number == 1 else None,
        ).run()
    finally:
        transport.close()
    assert result == Result(DONE)
    assert server.version == 4
    leaves = [record for record in records if isinstance(record, Membership) and record.kind == "leave"]
    assert [(left.worker, left.reason) for left in leaves] == [(1, "its process was killed by SIGKILL")]
