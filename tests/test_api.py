"""The public functions: what they compute is what a plain loop computes, and what cannot be meant is refused."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

import asyncsgd
from asyncsgd import TensorData, UsageError
from asyncsgd.settings.task import task_flags

BATCH = 8


@dataclasses.dataclass(frozen=True)
class Plane(asyncsgd.Task):
    """A plane through noisy points, by a layer whose 16 weights fill a cache line."""

    name: ClassVar[str] = "plane"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"error": "lower"}
    batch_size: int = BATCH

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return nn.Linear(16, 1, bias=False)

    def data(self, seed):
        return TensorData(points(100, 1), points(30, 2), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

    def sums(self, outputs, batch):
        return {"absolute": (outputs - batch[1]).abs().sum(dtype=torch.float64)}

    def metrics(self, sums):
        return {"error": sums["absolute"] / sums["weight"]}


def points(number, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 16, generator=draw)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(number, 1, generator=draw)


def plain_loop(steps):
    model, data = Plane().model(0), Plane().data(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    for index in range(steps):
        x, y = data.batch(0, index)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return next(model.parameters()).detach()


STEPS = {"learning_rate": 0.01, "weight_decay": 0.1, "quiet": True, "evaluations": 2}


@pytest.mark.parametrize("runtime", [asyncsgd.InProcess(), asyncsgd.Virtual(1)], ids=["in process", "virtual"])
def test_one_worker_is_torch_s_own_optimizer_bit_for_bit(runtime):
    run = asyncsgd.train(Plane(), runtime=runtime, samples=20 * BATCH, **STEPS)
    assert torch.equal(next(run.model().parameters()), plain_loop(20))
    assert (run.status, run.folder, run.summary["num_updates"]) == ("DONE", None, 20)
    assert [evaluation.version for evaluation in run.evaluations] == [0, 10, 20]
    x, y = points(30, 2)
    error = (plain_loop(20) @ x.T - y.T).abs().mean()
    assert run.summary["metrics"]["error"] == pytest.approx(float(error), rel=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("via", ["shared_memory", "process_group"])
def test_one_worker_process_is_the_same_and_its_folder_tells_all(tmp_path, via):
    runtime = asyncsgd.Processes(1, via=via)
    run = asyncsgd.train(Plane(), runtime=runtime, samples=20 * BATCH, folder=tmp_path / "run", **STEPS)
    assert torch.equal(next(run.model().parameters()), plain_loop(20))
    replayed = asyncsgd.replay(tmp_path / "run", Plane())
    assert (replayed.identical, replayed.num_updates, replayed.num_checked) == (True, 20, 20)
    loaded = asyncsgd.load_run(tmp_path / "run", Plane())
    assert torch.equal(next(loaded.model().parameters()), plain_loop(20))
    assert loaded.evaluations == run.evaluations
    assert loaded.summary["metrics"] == run.summary["metrics"]


def test_a_virtual_run_replays_with_the_rule_it_had(tmp_path):
    rule = asyncsgd.Ringmaster(threshold=2)
    runtime = asyncsgd.Virtual(4, speeds=asyncsgd.Exponential(1.0))
    optimizer = asyncsgd.SGD(momentum=0.5)
    ours = STEPS | {"learning_rate": 1e-3}
    asyncsgd.train(Plane(), rule=rule, runtime=runtime, optimizer=optimizer, samples=200, folder=tmp_path / "a", **ours)
    assert asyncsgd.replay(tmp_path / "a").identical  # this file can be imported
    other = asyncsgd.replay(tmp_path / "a", rule=asyncsgd.Asynchronous())
    assert not other.identical
    assert other.difference


def test_an_optimizer_of_one_s_own_is_given_to_the_replay(tmp_path):
    asyncsgd.train(Plane(), samples=80, optimizer=torch.optim.RMSprop, folder=tmp_path / "a", **STEPS)
    with pytest.raises(UsageError, match=r"the run's optimizer is the user's own; give it"):
        asyncsgd.replay(tmp_path / "a")
    assert asyncsgd.replay(tmp_path / "a", optimizer=torch.optim.RMSprop).identical


class JustEnough:
    """The batches of a budget, and none after them."""

    evaluation: ClassVar = {"main": [points(30, 2)]}

    def __init__(self, number=10):
        self._number = number

    def batch(self, stream, index):
        if index >= self._number:
            raise IndexError(f"there are {self._number} batches, not {index}")
        return points(BATCH, index)


@dataclasses.dataclass(frozen=True)
class Short(Plane):
    def data(self, seed):  # type: ignore[override]
        return JustEnough()


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_worker_that_looks_ahead_of_the_last_batch_lives_on(prefetch):
    run = asyncsgd.train(Short(), runtime=asyncsgd.Processes(1), samples=10 * BATCH, prefetch=prefetch, **STEPS)
    in_process = asyncsgd.train(Short(), samples=10 * BATCH, **STEPS)
    assert (run.status, run.summary["num_updates"]) == ("DONE", 10)
    assert run.summary["parameters_sha256"] == in_process.summary["parameters_sha256"]


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_worker_that_is_given_a_batch_behind_the_budget_leaves_without_a_traceback(prefetch, capfd):
    records = []
    runtime = asyncsgd.Processes(2)
    run = asyncsgd.train(
        Short(), runtime=runtime, samples=10 * BATCH, prefetch=prefetch, report=records.append, **STEPS
    )
    assert (run.status, run.summary["num_samples"]) == ("DONE", 10 * BATCH)
    assert "Traceback" not in capfd.readouterr().err
    reasons = {record.reason for record in records if record.kind == "leave"}
    assert reasons <= {"", "the data end with the budget, and it was given a batch behind it"}


@dataclasses.dataclass(frozen=True)
class TooShort(Short):
    def data(self, seed):  # type: ignore[override]
        return JustEnough(6)


@pytest.mark.processes
def test_data_that_end_before_the_budget_end_the_run():
    with pytest.raises(asyncsgd.RunError, match="its process ended with exit code 1") as failed:
        asyncsgd.train(TooShort(), runtime=asyncsgd.Processes(2), samples=10 * BATCH, **STEPS)
    assert "behind" not in str(failed.value)


def test_records_go_to_whoever_asks_and_quiet_prints_nothing(capsys):
    kinds = []
    before = torch.get_num_threads()
    asyncsgd.train(
        Plane(),
        runtime=asyncsgd.InProcess(threads=2),
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
        ({"seconds": 1.0, "schedule": "linear"}, "schedule='linear' needs a number of samples to stretch over"),
        ({"samples": 8, "rule": asyncsgd.Ringmaster()}, "InProcess is synchronous by definition, and rule=ringmaster"),
        ({"samples": 8, "rule": asyncsgd.DANA(), "runtime": asyncsgd.Virtual(2)}, "rule 'dana' has a momentum or"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(UsageError) as error:
        asyncsgd.train(Plane(), **arguments)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something already; name a new folder"):
        asyncsgd.train(Plane(), samples=8, folder=tmp_path)
    with pytest.raises(UsageError, match="holds no finished run"):
        asyncsgd.load_run(tmp_path)


@dataclasses.dataclass(frozen=True)
class Broken(Plane):
    def loss(self, outputs, batch):
        raise ZeroDivisionError("mine")


def test_what_a_task_raises_comes_through_and_its_folder_may_be_used_again(tmp_path):
    with pytest.raises(ZeroDivisionError, match="mine"):
        asyncsgd.train(Broken(), samples=8, quiet=True, folder=tmp_path / "a")
    asyncsgd.train(Plane(), samples=8, quiet=True, folder=tmp_path / "a")
    with pytest.raises(UsageError, match="holds something already"):
        asyncsgd.train(Plane(), samples=8, quiet=True, folder=tmp_path / "a")


def test_every_public_name_is_there_both_ways_twice():
    for _ in range(2):
        for name in asyncsgd.__all__:
            found = getattr(asyncsgd, name)
            assert getattr(importlib.import_module("asyncsgd"), name) is found
            if name in ("train", "replay", "simulate", "check", "load_run"):
                assert callable(found)
        for module in ("training", "replaying", "simulation", "tasks.checking", "api"):
            importlib.import_module(f"asyncsgd.{module}")


def test_own_models_and_simulations_import_no_transformers():
    code = """
import sys, torch, asyncsgd
from asyncsgd.simulation.problems import Mode
from asyncsgd.runtime.base import Budget
sys.path.insert(0, sys.argv[1])
from test_api import Plane
asyncsgd.train(Plane(), runtime=asyncsgd.Virtual(2), samples=80, learning_rate=1e-3, quiet=True)
asyncsgd.simulate(asyncsgd.Asynchronous(), Mode().on(1, 0), asyncsgd.Constant().on(1, 0),
                  num_workers=1, learning_rate=0.5, budget=Budget(seconds=3.0))
print(sorted({"transformers", "datasets", "tokenizers"} & set(sys.modules)))
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_fields_of_a_task_become_flags_with_and_without_a_help_line():
    specs = task_flags(Plane).specs
    assert (specs["batch_size"].flag, specs["batch_size"].default, specs["batch_size"].group) == (
        "--batch-size",
        8,
        "task",
    )
    assert task_flags(Plane).make({"batch_size": "4", "nproc": 2}).task == Plane(batch_size=4)
