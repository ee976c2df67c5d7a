"""Any torch optimizer is given a model's tensors in their shapes, and steps them as it does without this library."""

from __future__ import annotations

import dataclasses
import functools
import signal

import pytest
import torch
from torch import nn

import asyncsgd
from asyncsgd import TensorData
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import AdamW, OptimizerRecipe

BATCH = 8
STEPS = 12
RATE, DECAY = 0.05, 0.1


@dataclasses.dataclass(frozen=True)
class Classes(asyncsgd.Task):
    """Three classes of points; the model has matrices, and unless `only_matrices` biases and a norm."""

    name = "classes"
    batch_size: int = BATCH
    only_matrices: bool = False

    def model(self, seed):
        with asyncsgd.seeded(seed):
            if self.only_matrices:
                return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
            return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))

    def data(self, seed):
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
        samples = (x, x[:, :3].argmax(1))
        return TensorData(samples, samples, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


MATRICES = Classes(only_matrices=True)
NADAMW = functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)
OPTIMIZERS = {
    "adafactor": (Classes(), torch.optim.Adafactor),
    "nadamw": (Classes(), NADAMW),
    "adagrad": (Classes(), torch.optim.Adagrad),
    "muon": (MATRICES, torch.optim.Muon),
}
every_optimizer = pytest.mark.parametrize(("task", "build"), OPTIMIZERS.values(), ids=OPTIMIZERS)
GIVEN = {"learning_rate": RATE, "weight_decay": DECAY, "evaluations": 2, "quiet": True}


def plain_loop(task, build, steps=STEPS):
    """The training in torch alone: matrices decay, the rest does not."""
    model, data = task.model(0), task.data(0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = build([group | {"lr": RATE} for group in groups if group["params"]])
    for index in range(steps):
        batch = data.batch(0, index)
        optimizer.zero_grad()
        task.loss(task.outputs(model, batch), batch).backward()
        optimizer.step()
    return model


def assert_same(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@every_optimizer
@pytest.mark.parametrize("runtime", [asyncsgd.InProcess(), asyncsgd.Virtual(1)], ids=["in process", "virtual"])
def test_one_worker_is_plain_torch_bit_for_bit(task, build, runtime):
    run = asyncsgd.train(task, runtime=runtime, optimizer=build, samples=STEPS * BATCH, **GIVEN)
    assert_same(run.model(), plain_loop(task, build))


@pytest.mark.processes
@every_optimizer
def test_one_asynchronous_worker_process_is_plain_torch_bit_for_bit(task, build):
    run = asyncsgd.train(task, runtime=asyncsgd.Processes(1), optimizer=build, samples=STEPS * BATCH, **GIVEN)
    assert_same(run.model(), plain_loop(task, build))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "runtime",
    [asyncsgd.AllReduce(1), asyncsgd.Hogwild(1), asyncsgd.Processes(1, via="process_group")],
    ids=["all-reduce", "hogwild", "process group"],
)
def test_ranks_and_hogwild_workers_step_the_shapes_too(runtime):
    build = torch.optim.Adafactor
    run = asyncsgd.train(Classes(), runtime=runtime, optimizer=build, samples=STEPS * BATCH, **GIVEN)
    assert_same(run.model(), plain_loop(Classes(), build))


def test_local_steps_are_taken_on_the_shapes_too():
    given = GIVEN | {"rule": asyncsgd.LocalSGD(num_local_steps=3), "optimizer": torch.optim.Adafactor}
    run = asyncsgd.train(Classes(), runtime=asyncsgd.Virtual(1), samples=STEPS * BATCH, **given)
    for name, parameter in plain_loop(Classes(), torch.optim.Adafactor).named_parameters():
        torch.testing.assert_close(run.model().get_parameter(name), parameter)  # start minus end rounds


@every_optimizer
def test_its_state_is_kept_tensor_by_tensor_and_a_resumed_run_is_the_whole_run(task, build, tmp_path):
    given = GIVEN | {"runtime": asyncsgd.Virtual(2), "optimizer": build, "samples": STEPS * BATCH}
    whole = asyncsgd.train(task, **given)

    def stop(record):
        if record.kind == "arrival" and record.total_samples == 7 * BATCH:
            signal.raise_signal(signal.SIGINT)

    stopped = asyncsgd.train(task, folder=tmp_path / "run", report=stop, **given)
    assert stopped.status == "INTERRUPTED"
    resumed = asyncsgd.train(task, folder=tmp_path / "run", resume=True, **given)
    assert_same(resumed.model(), whole.model())


def test_the_shapes_of_a_stage_can_be_moved_to_another_vector():
    """As an asynchronous pipeline does, which keeps two versions of its parameters."""
    flat, other = FlatModel(Classes().model(0)), FlatModel(Classes().model(0))
    optimizer = OptimizerRecipe(torch.optim.Adafactor).on(other.parameters, other.layout)
    optimizer.move(flat.parameters)
    before = other.parameters.clone()
    optimizer.step(torch.ones(flat.layout.size), RATE)
    assert torch.equal(other.parameters, before)
    expected = FlatModel(Classes().model(0))
    OptimizerRecipe(torch.optim.Adafactor).on(expected.parameters, expected.layout).step(
        torch.ones(expected.layout.size), RATE
    )
    assert torch.equal(flat.parameters, expected.parameters)


class Scaling(torch.optim.SGD):
    """Changes the gradients that it is given."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2.0)
        return super().step(closure)


def lbfgs(groups):
    return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "optimizer LBFGS cannot be used: LBFGS.step() missing 1 required positional argument"),
        (lbfgs, "optimizer lbfgs cannot be used: LBFGS.step() missing 1 required positional argument: 'closure'"),
        (torch.optim.SparseAdam, "optimizer SparseAdam cannot be used: SparseAdam does not support dense gradients"),
        (torch.optim.Muon, "optimizer Muon cannot be used: Muon only supports 2D parameters"),
        (torch.optim.Rprop, "optimizer Rprop has no weight decay, and weight_decay=0.1 would do nothing; give 0"),
        (Scaling, "optimizer Scaling changes the gradients that it is given; let it change a copy"),
        (
            functools.partial(torch.optim.NAdam, weight_decay=0.3),
            "weight_decay=0.3 of optimizer NAdam would do nothing; give weight_decay=0.3 to train",
        ),
        (
            functools.partial(torch.optim.NAdam, lr=0.3),
            "lr=0.3 of optimizer NAdam would do nothing; give learning_rate=0.3 to train",
        ),
        ("adagrad", "optimizer='adagrad' is no optimizer; give torch.optim.Adagrad"),
        ("adam", "optimizer='adam' is no optimizer; give torch.optim.Adam"),
        ("shampoo", "optimizer='shampoo' is no optimizer; give asyncsgd.AdamW(), asyncsgd.SGD() or one of torch"),
        (torch.optim.SGD(nn.Linear(1, 1).parameters()), "optimizer=SGD ( is made already, of parameters that are not"),
        (asyncsgd.AdamW, "optimizer AdamW cannot be used: it makes no torch optimizer from parameter groups"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_an_optimizer_that_cannot_be_served_is_refused_by_name_before_anything_runs(optimizer, message):
    seen = []
    with pytest.raises(UsageError) as error:
        asyncsgd.train(Classes(), optimizer=optimizer, samples=80, report=seen.append, **GIVEN)
    assert str(error.value).startswith(message)
    assert not seen


class Keeps:
    """Makes an Adagrad, and keeps something that it does not need."""

    def __init__(self, kept):
        self.kept = kept

    def __call__(self, groups):
        return torch.optim.Adagrad(groups)


class Unpicklable:
    def __reduce__(self):
        raise RecursionError("too deep")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda groups: torch.optim.Adagrad(groups),
            r"optimizer <lambda> cannot be sent to worker processes, since it cannot be pickled \(.*\); .* "
            r"functools\.partial\(torch\.optim\.NAdam, momentum_decay=0\.01\)",
        ),
        (Keeps(Unpicklable()), r"since it cannot be pickled \(for its field 'kept': too deep\)"),
        (Keeps(torch.zeros(300_000)), r"optimizer Keeps has 1\.2 MB when it is sent .*, most of it in 'kept'; let it"),
    ],
    ids=["lambda", "unpicklable", "large"],
)
def test_an_optimizer_that_cannot_be_sent_to_worker_processes_is_refused_before_any_is_started(build, message):
    with pytest.raises(UsageError, match=message):
        asyncsgd.train(Classes(), runtime=asyncsgd.Processes(1), optimizer=build, samples=80, **GIVEN)
    asyncsgd.train(Classes(), optimizer=build, samples=8, **GIVEN)


def test_hogwild_workers_share_the_state_of_the_library_s_optimizers_only():
    runtime = asyncsgd.Hogwild(2, share_state=True)
    with pytest.raises(UsageError, match=r"share_state=True is for asyncsgd\.SGD and asyncsgd\.AdamW"):
        asyncsgd.train(Classes(), runtime=runtime, optimizer=torch.optim.NAdam, samples=80, **GIVEN)


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path):
    given = GIVEN | {"folder": tmp_path / "run", "samples": 80, "checkpoint_every": 40}
    asyncsgd.train(Classes(), optimizer=torch.optim.Adagrad, **given)
    with pytest.raises(UsageError, match="optimizer"):
        asyncsgd.train(Classes(), optimizer=torch.optim.Adafactor, resume=True, **given)
    with pytest.raises(UsageError, match="optimizer"):
        asyncsgd.train(Classes(), optimizer=NADAMW, resume=True, **given)


def test_the_library_s_own_optimizers_take_one_call_for_all_tensors():
    flat = FlatModel(Classes().model(0))
    groups = OptimizerRecipe(AdamW()).on(flat.parameters, flat.layout)._optimizer.param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]
    groups = OptimizerRecipe(torch.optim.AdamW).on(flat.parameters, flat.layout)._optimizer.param_groups
    assert [[tuple(part.shape) for part in group["params"]] for group in groups] == [
        [(5, 6), (3, 5)],
        [(5,), (5,), (5,), (3,)],
    ]
