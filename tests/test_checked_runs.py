"""Runs of users' own tasks: a wrong one is refused before it starts; unused parameters train in every mode."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, load_model
from test_checking import Branches, Regression
from test_checking import Tokens as TiedTokens
from torch import nn

from asyncsgd import modes
from asyncsgd.errors import UsageError
from asyncsgd.experiment import Course, Experiment, Setup
from asyncsgd.optimizers import SGD, AdamW, OptimizerRecipe
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.rules import Asynchronous, Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.schedules import WarmupSchedule, constant
from asyncsgd.training import lead

NUM_STEPS = 6
LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class TwoHeads(Regression):
    """The second head does nothing."""

    def layers(self):
        return Branches()


@dataclasses.dataclass(frozen=True)
class Normed(Regression):
    """Wrong: its statistics move in training."""

    def layers(self):
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(task, runtime, path, recipe, num_samples):
    rule = Asynchronous() if runtime.follows_rule or runtime.has_server else Synchronous()
    schedule = WarmupSchedule(LEARNING_RATE, 0, num_samples, constant)
    experiment = Experiment(
        "tests",
        task,
        Setup(runtime, rule, recipe),
        lambda task: Course(Budget(num_samples), 1, schedule),
        path.parent,
    )
    context = None if runtime.in_one_process else fork_server(None)
    launch, folder = Launch(runtime.num_workers, None, False), RunFolder(path)
    assert lead(experiment, launch, folder, context) == 0, (path / "summary.json").read_text()


def plain_loop(task, optimizer, model, num_workers):
    """Steps along the mean gradient of `num_workers` batches; what has no gradient has zeros."""
    data = task.data(0)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for worker in range(num_workers):
            batch = data.batch(0, step * num_workers + worker)
            (task.loss(task.outputs(model, batch), batch) / num_workers).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def trained(path):
    return load_file(path / "model" / "model.safetensors")


RUNTIMES = [modes.InProcess(), modes.Processes(1), modes.Virtual(1), modes.Hogwild(1), modes.AllReduce(2)]


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: type(runtime).__name__)
def test_unused_parameters_are_trained_as_by_a_plain_loop_whose_gradients_there_are_zero(runtime, tmp_path):
    task, model = TwoHeads(), TwoHeads().model(0)
    num_samples = NUM_STEPS * runtime.num_workers * task.batch_size
    train(task, runtime, tmp_path / "run", OptimizerRecipe(SGD(0.9)), num_samples)
    initial = TwoHeads().model(0).state_dict()
    plain_loop(task, torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9), model, runtime.num_workers)
    for name, tensor in trained(tmp_path / "run").items():
        assert name.startswith("second.") == torch.equal(tensor, initial[name]), name
        torch.testing.assert_close(
            tensor, model.state_dict()[name], rtol=0, atol=0 if runtime.num_workers == 1 else 1e-6
        )


def test_weight_decay_acts_on_unused_parameters_as_where_a_gradient_is_zero(tmp_path):
    task, model = TwoHeads(), TwoHeads().model(0)
    initial = TwoHeads().model(0).state_dict()
    recipe = OptimizerRecipe(AdamW((0.9, 0.999)), weight_decay=0.5)
    train(task, modes.Virtual(1), tmp_path / "run", recipe, NUM_STEPS * task.batch_size)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": d} for n, d in ((2, 0.5), (1, 0))
    ]
    plain_loop(task, torch.optim.AdamW(groups, LEARNING_RATE), model, 1)
    parameters = trained(tmp_path / "run")
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
    torch.testing.assert_close(
        parameters["second.weight"], initial["second.weight"] * (1 - LEARNING_RATE * 0.5) ** NUM_STEPS
    )


def test_a_trained_model_with_tied_and_frozen_parameters_is_saved_and_can_be_loaded(tmp_path):
    task = TiedTokens()
    train(task, modes.Virtual(2), tmp_path / "run", OptimizerRecipe(SGD()), 48)
    model = task.model(1)
    frozen, tied = model.frozen.weight.detach().clone(), model.table.weight.detach().clone()
    load_model(model, tmp_path / "run" / "model" / "model.safetensors")
    assert model.out.weight is model.table.weight
    assert not torch.equal(model.table.weight, tied)
    assert torch.equal(model.frozen.weight, task.model(0).frozen.weight)
    assert not torch.equal(model.frozen.weight, frozen)


@pytest.mark.parametrize("runtime", [modes.InProcess(), modes.Processes(2)], ids=["InProcess", "Processes"])
def test_a_wrong_task_is_refused_before_its_run_and_the_summary_says_why(runtime, tmp_path):
    with pytest.raises(UsageError, match="'0' \\(BatchNorm1d\\) changes its buffer"):
        train(Normed(), runtime, tmp_path / "run", OptimizerRecipe(SGD()), 8)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "FAILED"
    assert "BatchNorm1d" in summary["message"]


def test_a_task_that_cannot_be_pickled_is_refused_for_processes_alone(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Local(Regression):
        pass

    train(Local(), modes.Virtual(2), tmp_path / "virtual", OptimizerRecipe(SGD()), 16)
    with pytest.raises(UsageError, match="the task Local cannot be sent to worker processes"):
        train(Local(), modes.Processes(2), tmp_path / "async", OptimizerRecipe(SGD()), 16)
