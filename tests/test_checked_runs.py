"""Runs of users' own tasks: a wrong one is refused before it starts; unused parameters train in every mode."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from doors import (
    SGD,
    AdamW,
    AllReduce,
    Finished,
    Hogwild,
    InProcess,
    Processes,
    RunError,
    UsageError,
    Virtual,
    asyncsgd,
    seeded,
)
from safetensors.torch import load_file
from tasks import Branches, Plane, Tokens
from torch import nn

NUM_STEPS = 6
STEP = {"learning_rate": 0.1, "evaluations": 1, "quiet": True}


@dataclasses.dataclass(frozen=True)
class TwoHeads(Plane):
    def model(self, seed):
        with seeded(seed):
            return Branches(16)


@dataclasses.dataclass(frozen=True)
class Counting(Plane):
    """Wrong: a counter that is no int64 changes in training."""

    def model(self, seed):
        with seeded(seed):
            model = nn.Linear(16, 1)
        model.register_buffer("count", torch.zeros((), dtype=torch.float16))
        model.register_forward_pre_hook(lambda module, inputs: module.count.add_(1) and None)
        return model


def plain_loop(optimizer, model, num_workers):
    """Steps along the mean gradient of `num_workers` batches; what has no gradient has zeros."""
    task = TwoHeads()
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


@pytest.mark.parametrize(
    ("runtime", "decay"),
    [*((runtime, 0.0) for runtime in (InProcess(), Processes(1), Hogwild(1), AllReduce(2))), (Virtual(1), 0.5)],
    ids=lambda value: type(value).__name__,
)
def test_unused_parameters_are_trained_as_by_a_plain_loop_whose_gradients_there_are_zero(runtime, decay):
    task = TwoHeads()
    model = TwoHeads().model(0)
    initial = TwoHeads().model(0).second.weight.detach()
    num_workers = runtime.num_workers
    if decay:
        parts = {2: decay, 1: 0.0}
        groups = []
        for n in parts:
            groups.append({"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": parts[n]})
        theirs = torch.optim.AdamW(groups, 0.1)
        ours = {"optimizer": AdamW(), "weight_decay": decay}
    else:
        theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        ours = {"optimizer": SGD(momentum=0.9)}
    samples = NUM_STEPS * num_workers * task.batch_size
    run = asyncsgd.train(task, runtime=runtime, samples=samples, **ours, **STEP).model()
    plain_loop(theirs, model, num_workers)
    for trained, expected in zip(run.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.second.weight.detach(), initial * (1 - 0.1 * decay) ** NUM_STEPS)


def test_a_trained_model_with_tied_and_frozen_parameters_is_saved_and_can_be_loaded(tmp_path):
    task = Tokens()
    asyncsgd.train(task, runtime=Virtual(2), samples=48, folder=tmp_path / "run", optimizer=SGD(), **STEP)
    model = task.model(1)
    frozen = model.frozen.weight.detach().clone()
    tied = model.table.weight.detach().clone()
    model.load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))
    assert model.out.weight is model.table.weight
    assert not torch.equal(model.table.weight, tied)
    assert torch.equal(model.frozen.weight, task.model(0).frozen.weight)
    assert not torch.equal(model.frozen.weight, frozen)


@pytest.mark.parametrize("runtime", [InProcess(), Processes(2)], ids=["InProcess", "Processes"])
def test_a_wrong_task_is_refused_before_its_run_and_the_summary_says_why(runtime, tmp_path):
    with pytest.raises(UsageError, match="changes the buffer 'count' of Linear"):
        asyncsgd.train(Counting(), runtime=runtime, samples=8, folder=tmp_path / "run", **STEP)
    summary = Finished(tmp_path / "run").summary
    assert summary["status"] == "FAILED"
    assert "Linear" in summary["message"]


def test_a_task_that_cannot_be_pickled_is_refused_for_processes_alone():
    @dataclasses.dataclass(frozen=True)
    class Local(Plane):
        pass

    asyncsgd.train(Local(), runtime=Virtual(2), samples=16, **STEP)
    with pytest.raises(UsageError, match="the task Local cannot be sent to worker processes"):
        asyncsgd.train(Local(), runtime=Processes(2), samples=16, **STEP)


class WrongOnRank1(Plane):
    def loss(self, outputs, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("a mistake")
        return super().loss(outputs, batch)


def test_a_rank_that_raises_is_not_said_to_be_lost_where_asynchronous_training_would_go_on():
    with pytest.raises(RunError) as lost:
        asyncsgd.train(WrongOnRank1(), runtime=AllReduce(2), samples=16, **STEP)
    assert str(lost.value).startswith("rank 1 is lost (it raised the error that stands above) and ")
    assert str(lost.value).endswith("; the other ranks were stopped")
