"""The public functions: what they compute is what a plain loop computes, and what cannot be meant is refused."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from doors import (
    ADPSGD,
    DANA,
    SGD,
    Asynchronous,
    Exponential,
    InProcess,
    Processes,
    Ringmaster,
    SeveralHosts,
    Task,
    UsageError,
    Virtual,
    load_run,
    replay,
    seeded,
    train,
)
from tasks import Plane, points
from torch_alone import train_alone

BATCH = 8


def plain_loop(steps):
    task = Plane()
    model = task.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    train_alone(task, model, optimizer, steps)
    return next(model.parameters()).detach()


STEPS = {"learning_rate": 0.01, "weight_decay": 0.1, "quiet": True, "evaluations": 2}


def test_what_a_run_says_is_what_a_plain_loop_gives():
    run = train(Plane(), samples=20 * BATCH, **STEPS)
    assert torch.equal(next(run.model().parameters()), plain_loop(20))
    assert run.status == "DONE"
    assert run.folder is None
    assert run.summary["num_updates"] == 20
    assert [evaluation.version for evaluation in run.evaluations] == [0, 10, 20]
    x, y = points(30, 2)
    error = (plain_loop(20) @ x.T - y.T).abs().mean()
    assert run.summary["metrics"]["error"] == pytest.approx(float(error), rel=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("via", ["shared_memory", "process_group"])
def test_one_worker_process_is_the_same_and_its_folder_tells_all(tmp_path, via):
    runtime = Processes(1, via=via)
    run = train(Plane(), runtime=runtime, samples=20 * BATCH, folder=tmp_path / "run", **STEPS)
    assert torch.equal(next(run.model().parameters()), plain_loop(20))
    replayed = replay(tmp_path / "run", Plane())
    assert replayed.identical is True
    assert replayed.num_updates == 20
    assert replayed.num_checked == 20
    assert len(run.summary["train_fingerprint"]) == 16
    loaded = load_run(tmp_path / "run", Plane())
    assert torch.equal(next(loaded.model().parameters()), plain_loop(20))
    assert loaded.evaluations == run.evaluations
    assert loaded.summary["metrics"] == run.summary["metrics"]


@dataclasses.dataclass(frozen=True)
class Normalised(Plane):
    """A plane whose inputs are normalised over the batch."""

    name: ClassVar[str] = "normalised"

    def model(self, seed):
        with seeded(seed):
            return torch.nn.Sequential(torch.nn.BatchNorm1d(16, track_running_stats=False), torch.nn.Linear(16, 1))


def test_every_run_of_a_task_of_one_s_own_says_what_it_began_from(tmp_path):
    kept = {"folder": tmp_path / "single", "checkpoint_every": 4 * BATCH}
    runs = [
        train(Plane(), samples=8 * BATCH, **kept, **STEPS),
        train(Plane(), runtime=Virtual(2), samples=4 * BATCH, **STEPS),
        train(Plane(), rule=ADPSGD(), runtime=Virtual(2), samples=4 * BATCH, **STEPS),
        train(Plane(), samples=12 * BATCH, resume=True, **kept, **STEPS),
        train(Normalised(), samples=BATCH, **STEPS),
    ]
    x, y = points(100, 1)
    of_data = hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
    weight = Plane().model(0).weight.detach()
    of_model = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    for run in runs:
        assert run.summary["train_fingerprint"] == of_data[:16]
    for run in runs[:4]:
        assert run.summary["initial_model_sha256"] == of_model
    assert [run.summary["normalises_over_batch"] for run in runs] == [False] * 4 + [True]


class Plain(Task):
    """Is no dataclass, and says no name."""

    batch_size = 8

    def model(self, seed):
        return Plane().model(seed)

    def data(self, seed):
        return Plane().data(seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return Plane().loss(outputs, batch)


@dataclasses.dataclass(frozen=True)
class TwoLines(Plain):
    """A dataclass that says none either."""


def test_two_epochs_are_twice_the_samples_that_the_data_have(tmp_path):
    """100 points in batches of 8, so 25 of them."""
    run = train(Plane(), runtime=Virtual(2), epochs=2, folder=tmp_path / "run", quiet=True)
    same = train(Plane(), runtime=Virtual(2), samples=200, quiet=True)
    assert run.summary["num_samples"] == 200
    assert run.summary["parameters_sha256"] == same.summary["parameters_sha256"]
    assert replay(tmp_path / "run", Plane()).identical


def test_a_task_that_says_no_name_is_called_after_its_class(tmp_path):
    """And one that inherits a name keeps it."""
    run = train(TwoLines(), samples=16, folder=tmp_path / "run", quiet=True)
    assert run.summary["data"] == "two_lines"
    header = (tmp_path / "run" / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(header)["task"] == "two_lines"
    assert type("Further", (Plane,), {}).name == "plane"


def test_a_task_that_is_no_dataclass_gets_no_folder(tmp_path):
    with pytest.raises(UsageError, match=r"Plain is no dataclass, .* write @dataclasses.dataclass\(frozen=True\)"):
        train(Plain(), samples=16, folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    assert train(Plain(), samples=16, quiet=True).status == "DONE"


def test_a_virtual_run_replays_with_the_rule_it_had(tmp_path):
    rule = Ringmaster(threshold=2)
    runtime = Virtual(4, speeds=Exponential(1.0))
    optimizer = SGD(momentum=0.5)
    ours = STEPS | {"learning_rate": 1e-3}
    train(Plane(), rule=rule, runtime=runtime, optimizer=optimizer, samples=200, folder=tmp_path / "a", **ours)
    assert replay(tmp_path / "a", Plane).identical
    other = replay(tmp_path / "a", Plane, rule=Asynchronous())
    assert not other.identical
    assert other.difference


def test_an_optimizer_of_one_s_own_is_given_to_the_replay(tmp_path):
    train(Plane(), samples=80, optimizer=torch.optim.RMSprop, folder=tmp_path / "a", **STEPS)
    with pytest.raises(UsageError, match=r"the run's optimizer is the user's own; give it"):
        replay(tmp_path / "a", Plane)
    assert replay(tmp_path / "a", Plane, optimizer=torch.optim.RMSprop).identical


class JustEnough:
    """The batches of a budget, and none after them."""

    evaluation: ClassVar = {"main": [points(30, 2)]}

    def batch(self, stream, index):
        if index >= 10:
            raise IndexError(f"there are 10 batches, not {index}")
        return points(BATCH, index)


@dataclasses.dataclass(frozen=True)
class Short(Plane):
    def data(self, seed):
        return JustEnough()


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_worker_that_looks_ahead_of_the_last_batch_lives_on(prefetch):
    run = train(Short(), runtime=Processes(1), samples=10 * BATCH, prefetch=prefetch, **STEPS)
    in_process = train(Short(), samples=10 * BATCH, **STEPS)
    assert run.status == "DONE"
    assert run.summary["num_updates"] == 10
    assert run.summary["parameters_sha256"] == in_process.summary["parameters_sha256"]


def test_records_go_to_whoever_asks_and_quiet_prints_nothing(capsys):
    kinds = []
    before = torch.get_num_threads()
    train(
        Plane(),
        runtime=InProcess(threads=2),
        samples=80,
        report=lambda record: kinds.append(record.kind),
        **STEPS,
    )
    assert [kinds.count(kind) for kind in ("join", "arrival", "evaluate")] == [1, 10, 3]
    assert capsys.readouterr() == ("", "")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a run needs an end; give samples=10_000 or seconds=60"),
        ({"seconds": 1.0, "schedule": "linear"}, "--schedule linear needs a number of samples to stretch over"),
        ({"samples": 8, "rule": Ringmaster()}, "InProcess is synchronous by definition, and rule=ringmaster"),
        ({"samples": 8, "rule": DANA(), "runtime": Virtual(2)}, "rule 'dana' has a momentum or"),
        ({"samples": 80, "evaluate_at": 80}, "--evaluate-at 80 must lie before the end, at 80 samples"),
        ({"samples": 8, "rule": "ringmaster"}, "rule must be an object such as asyncsgd.Ringmaster(threshold=4), got"),
        ({"samples": 8, "rule": Ringmaster}, "rule must be an object such as"),
        ({"samples": 8, "runtime": "async"}, "runtime must be an object such as asyncsgd.Processes(4), got 'async'"),
        ({"samples": 8, "runtime": Virtual}, "runtime must be an object such as"),
        ({"samples": 8, "hosts": 2}, "hosts must be an object such as asyncsgd.SeveralHosts(mirror=1), got 2"),
        ({"samples": 8, "hosts": SeveralHosts(mirror=0)}, "--mirror must be 1 or more, got 0"),
        ({"samples": 8, "hosts": SeveralHosts("token", trust_network=True)}, "--token-file token does nothing with"),
        ({"samples": 8, "task": Plane}, "task must be an object such as MyTask(), got <class"),
        ({"samples": 8, "task": "masked_lm"}, "task must be an object such as MyTask(), got 'masked_lm'"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(UsageError) as error:
        train(**{"task": Plane()} | arguments)
    assert str(error.value).startswith(message)


@dataclasses.dataclass(frozen=True)
class Broken(Plane):
    def loss(self, outputs, batch):
        raise ZeroDivisionError("mine")


def test_what_a_task_raises_comes_through_and_its_folder_may_be_used_again(tmp_path):
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(Broken(), samples=8, quiet=True, folder=tmp_path / "a")
    train(Plane(), samples=8, quiet=True, folder=tmp_path / "a")
    with pytest.raises(UsageError, match="holds something already"):
        train(Plane(), samples=8, quiet=True, folder=tmp_path / "a")


def test_own_models_and_simulations_import_no_transformers():
    code = """
import sys, torch, asyncsgd
sys.path.insert(0, sys.argv[1])
from tasks import Plane
asyncsgd.train(Plane(), runtime=asyncsgd.Virtual(2), samples=80, learning_rate=1e-3, quiet=True)
asyncsgd.simulate(asyncsgd.Asynchronous(), asyncsgd.Mode().on(1, 0), asyncsgd.Constant().on(1, 0),
                  num_workers=1, learning_rate=0.5, budget=asyncsgd.Limits(seconds=3.0))
print(sorted({"transformers", "datasets", "tokenizers"} & set(sys.modules)))
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_numbers_of_numpy_are_numbers(tmp_path):
    """As in `for seed in np.arange(8)`; a float32 is the number that it holds."""
    numpys = {
        "seed": np.int64(3),
        "samples": np.int32(40),
        "learning_rate": np.float32(0.1),
        "evaluations": np.uint8(2),
    }
    plain = {"seed": 3, "samples": 40, "learning_rate": float(np.float32(0.1)), "evaluations": 2}
    hashes = []
    settings = []
    for name, two, given in (("a", np.int64(2), numpys), ("b", 2, plain)):
        folder = tmp_path / name
        run = train(Plane(), rule=Ringmaster(two), runtime=Virtual(two), folder=folder, quiet=True, **given)
        hashes.append(run.summary["parameters_sha256"])
        written = (folder / "settings.yaml").read_text()
        settings.append(written.replace(f"/{name}", ""))
    assert settings[0] == settings[1]
    assert hashes[0] == hashes[1]
    with pytest.raises(UsageError, match=r"--samples must be a whole number, got np.float64\(2.5\)"):
        train(Plane(), samples=np.float64(2.5), quiet=True)


@pytest.mark.parametrize("target", ["low", float("nan"), True])
def test_a_target_that_is_no_number_is_refused_before_training(target):
    with pytest.raises(UsageError, match="--target-loss must be a number, got"):
        train(Plane(), samples=8, target_loss=target, quiet=True)


def test_a_file_where_a_folder_is_meant_is_said_to_be_one(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match="run is a file; name a folder"):
        train(Plane(), samples=8, folder=tmp_path / "run", quiet=True)
