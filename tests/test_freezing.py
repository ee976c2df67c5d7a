"""A layer that is frozen or thawed in the middle of a run trains as in plain torch, or ends the run and is named."""

import dataclasses
import json
from functools import partial
from typing import ClassVar

import pytest
import torch
from doors import (
    DANA,
    SGD,
    SGP,
    AdamW,
    AllReduce,
    Asynchronous,
    AsyncLocalSGD,
    FixedDelay,
    Hogwild,
    InProcess,
    Processes,
    Synchronous,
    Task,
    Virtual,
    asyncsgd,
    seeded,
)
from torch import nn
from torch_alone import groups_of

BATCHES = 12
ROWS = 4
RATE = 0.1
DECAY = 0.1
PLAN = {
    3: (("first.weight", False), ("middle.bias", False)),
    5: (("middle.weight", False),),
    7: (("first.weight", True),),
    10: (("middle.bias", True),),
}
"""What is frozen and thawed in a pass, by its number. One is frozen to the end."""
NONE = {}
IN_EVERY_PASS = {1: (("first.weight", False),), 2: (("last.bias", False),), 3: (("first.weight", True),)}
FROM_THE_FIRST = {1: (("first.weight", False), ("last.bias", False)), 6: (("first.weight", True), ("last.bias", True))}
"""What is thawed has no moment yet, and the others have."""


class Layers(nn.Module):
    """Freezes and thaws by a plan, in training, before what is frozen is used, or after it."""

    def __init__(self, plan, late):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)
        self.plan = plan
        self.late = late
        self.passes = 0

    def change(self):
        for name, trained in self.plan.get(self.passes, ()):
            self.get_parameter(name).requires_grad_(trained)

    def forward(self, x):
        if self.training:
            self.passes += 1
            if not self.late:
                self.change()
        out = self.last(self.middle(self.first(x).tanh()).tanh())
        if self.training and self.late:
            self.change()
        return out


class Rows:
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(BATCHES, ROWS, 3, generator=draw)
        self.y = torch.randn(BATCHES, ROWS, 1, generator=draw)

    def batch(self, stream, index):
        return {"x": self.x[index], "y": self.y[index], "index": torch.full((ROWS,), index)}

    @property
    def evaluation(self):
        return {"main": [self.batch(0, 0)]}


@dataclasses.dataclass(frozen=True)
class Freezes(Task):
    name: ClassVar[str] = "freezes"
    batch_size: int = ROWS
    plan: str = "PLAN"
    late: bool = False

    def model(self, seed):
        with seeded(seed):
            return Layers(globals()[self.plan], self.late)

    def data(self, seed):
        return Rows()

    def outputs(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["y"])


def vector_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def plain(task, make, *, models=1, accumulate=1, parts=1, clip=0.0):
    """Plain torch: each model computes on batches of its own, in parts, and all step along the mean gradient; what has
    no gradient in any of them is left out.
    """
    replicas = [task.model(0) for _ in range(models)]
    data = task.data(0)
    optimizers = []
    for model in replicas:
        optimizers.append(make(groups_of(model, DECAY), lr=RATE))
    indices = iter(range(BATCHES))
    for _ in range(BATCHES // models // accumulate):
        for model, optimizer in zip(replicas, optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(accumulate):
                batch = data.batch(0, next(indices))
                for x, y in zip(batch["x"].chunk(parts), batch["y"].chunk(parts), strict=True):
                    outputs = task.outputs(model, {"x": x})
                    loss = task.loss(outputs, {"y": y}) / models / accumulate / parts
                    loss.backward()
        for same in zip(*(model.parameters() for model in replicas), strict=True):
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            if gradients:
                for parameter in same:
                    parameter.grad = sum(gradients).clone()
        for model, optimizer in zip(replicas, optimizers, strict=True):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return vector_of(replicas[0])


def trained(task, runtime, **more):
    defaults = {"learning_rate": RATE, "weight_decay": DECAY, "evaluations": 1, "quiet": True}
    return asyncsgd.train(task, runtime=runtime, **(defaults | {"samples": BATCHES * ROWS} | more))


def assert_agrees(run, expected):
    torch.testing.assert_close(vector_of(run.model()), expected, rtol=1e-5, atol=1e-6)


SGD_WITH_MOMENTUM = (SGD(momentum=0.9), partial(torch.optim.SGD, momentum=0.9))
ADAMW = (AdamW(), torch.optim.AdamW)
ADAGRAD = (torch.optim.Adagrad, torch.optim.Adagrad)


@pytest.mark.parametrize("late", [False, True], ids=["before its use", "after its use"])
@pytest.mark.parametrize("plan", ["PLAN", "FROM_THE_FIRST"])
@pytest.mark.parametrize(("ours", "theirs"), [ADAMW, SGD_WITH_MOMENTUM, ADAGRAD], ids=["AdamW", "momentum", "Adagrad"])
def test_what_is_frozen_in_one_process_is_not_stepped_and_goes_on_after_a_thaw(ours, theirs, plan, late):
    task = Freezes(plan=plan, late=late)
    run = trained(task, InProcess(), optimizer=ours)
    expected = plain(task, theirs)
    assert_agrees(run, expected)


@pytest.mark.parametrize(("accumulate", "parts"), [(3, 1), (1, 2), (2, 2)])
def test_an_update_leaves_out_what_was_frozen_in_all_its_forward_passes(accumulate, parts, tmp_path):
    task = Freezes()
    folder = tmp_path / "run"
    run = trained(task, InProcess(accumulate=accumulate), micro_batches=parts, clip_norm=0.3, folder=folder)
    expected = plain(task, torch.optim.AdamW, accumulate=accumulate, parts=parts, clip=0.3)
    assert_agrees(run, expected)
    assert asyncsgd.replay(folder, task).identical


@pytest.mark.processes
@pytest.mark.parametrize("runtime", [Virtual(1), Processes(1)], ids=["virtual clock", "process"])
def test_one_asynchronous_worker_freezes_as_plain_torch_does(runtime):
    run = trained(Freezes(), runtime, rule=Asynchronous())
    expected = plain(Freezes(), torch.optim.AdamW)
    assert_agrees(run, expected)


@pytest.mark.processes
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_synchronous_ranks_freeze_as_a_model_each_and_the_mean_of_their_gradients_do(parts):
    run = trained(Freezes(), AllReduce(2), micro_batches=parts)
    expected = plain(Freezes(), torch.optim.AdamW, models=2, parts=parts)
    assert_agrees(run, expected)


@dataclasses.dataclass(frozen=True)
class ByTheBatch(Freezes):
    """The batch says what is frozen; `shared` batches freeze, the others do not."""

    every: int = 1

    def outputs(self, model, batch):
        index = int(batch["index"][0])
        model.first.weight.requires_grad_(index < 3 or index % self.every != 0)
        return model(batch["x"])


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_freeze_different_parameters_for_one_update_end_the_run_and_name_one():
    with pytest.raises(asyncsgd.RunError, match=r'in one update: \["first\.weight"\], \[\]; '):
        trained(ByTheBatch(plan="NONE", every=2), AllReduce(2))


@pytest.mark.parametrize(
    ("runtime", "rule", "more"),
    [
        (Virtual(2), Asynchronous(), {}),
        (Virtual(2), Synchronous(), {}),
        (Virtual(1), SGP(delay=0), {}),
        (Virtual(1), AsyncLocalSGD(num_local_steps=2), {}),
        (Virtual(1), DANA(), {"optimizer": SGD(), "weight_decay": 0.0}),
        pytest.param(Processes(2), Asynchronous(), {}, marks=[pytest.mark.slow, pytest.mark.processes]),
        pytest.param(Hogwild(1), None, {}, marks=[pytest.mark.slow, pytest.mark.processes]),
    ],
    ids=["asynchronous", "synchronous", "peers", "local steps", "a momentum of the rule", "processes", "Hogwild"],
)
def test_who_cannot_follow_a_freeze_ends_the_run_and_names_the_parameter(runtime, rule, more, tmp_path):
    words = r"the parameter 'first\.weight' was frozen \(requires_grad\) in the mid"
    with pytest.raises(asyncsgd.RunError, match=words):
        trained(Freezes(), runtime, rule=rule, folder=tmp_path / "run", checkpoint_every=ROWS, **more)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "FAILED"
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("runtime", [InProcess(), InProcess(accumulate=2), Virtual(1)], ids=str)
def test_a_run_that_goes_on_after_a_freeze_is_the_run_that_was_never_stopped(runtime, tmp_path):
    task = ByTheBatch(plan="NONE")
    rule = None
    if isinstance(runtime, Virtual):
        rule = FixedDelay(delay=2)
    whole = trained(task, runtime, rule=rule)
    folder = tmp_path / "run"
    every = 5 * ROWS  # where batches are accumulated, in the middle of an update
    trained(task, runtime, rule=rule, folder=folder, samples=8 * ROWS, checkpoint_every=every)
    for path in (folder / "checkpoints").glob("*"):
        if int(path.stem) != every:
            path.unlink()
    longer = trained(task, runtime, rule=rule, folder=folder, resume=True)
    assert torch.equal(vector_of(longer.model()), vector_of(whole.model()))


def test_the_check_before_a_run_lets_a_model_freeze_while_it_looks():
    checked = asyncsgd.check(Freezes(plan="IN_EVERY_PASS"))
    assert checked.num_parameters == 28
    assert checked.unused == ()
