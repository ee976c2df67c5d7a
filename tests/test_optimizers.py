"""Any torch optimizer is given a model's tensors in their shapes, and steps them as it does without this library."""

import functools
import signal

import pytest
import torch
from doors import (
    AdamW,
    AllReduce,
    Hogwild,
    InProcess,
    Processes,
    UsageError,
    Virtual,
    train,
)
from marks import slow
from tasks import Classes, Plane

BATCH = 8
STEPS = 12
RATE, DECAY = 0.05, 0.1
NADAMW = functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)
OPTIMIZERS = {
    "adafactor": (Classes(), torch.optim.Adafactor),
    "nadamw": (Classes(), NADAMW),
    "adagrad": (Classes(), torch.optim.Adagrad),
    "muon": (Plane(), torch.optim.Muon),  # for matrices only
}
GIVEN = {"learning_rate": RATE, "weight_decay": DECAY, "evaluations": 2, "quiet": True}


def plain_loop(task, build):
    """The training in torch alone: matrices decay, the rest does not."""
    model, data = task.model(0), task.data(0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = build([group | {"lr": RATE} for group in groups if group["params"]])
    for index in range(STEPS):
        batch = data.batch(0, index)
        optimizer.zero_grad()
        task.loss(task.outputs(model, batch), batch).backward()
        optimizer.step()
    return model


def assert_same(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        *((name, InProcess()) for name in OPTIMIZERS),
        ("muon", Virtual(1)),
        ("adafactor", Processes(1)),
        *slow(*(("adafactor", runtime) for runtime in (AllReduce(1), Hogwild(1), Processes(1, via="process_group")))),
    ],
    ids=str,
)
def test_one_worker_is_plain_torch_bit_for_bit(name, runtime):
    task, build = OPTIMIZERS[name]
    run = train(task, runtime=runtime, optimizer=build, samples=STEPS * BATCH, **GIVEN)
    assert_same(run.model(), plain_loop(task, build))


@pytest.mark.parametrize(("task", "build"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_its_state_is_kept_tensor_by_tensor_and_a_resumed_run_is_the_whole_run(task, build, tmp_path):
    given = GIVEN | {"runtime": Virtual(2), "optimizer": build, "samples": STEPS * BATCH}
    whole = train(task, **given)

    def stop(record):
        if record.kind == "arrival" and record.total_samples == 7 * BATCH:
            signal.raise_signal(signal.SIGINT)

    stopped = train(task, folder=tmp_path / "run", report=stop, **given)
    assert stopped.status == "INTERRUPTED"
    resumed = train(task, folder=tmp_path / "run", resume=True, **given)
    assert_same(resumed.model(), whole.model())


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS closure"),
        (torch.optim.Muon, "Muon 2D"),
        (functools.partial(torch.optim.NAdam, weight_decay=0.3), "NAdam weight_decay=0.3 train"),
        (functools.partial(torch.optim.NAdam, lr=0.3), "NAdam lr=0.3 learning_rate=0.3"),
        ("adagrad", "'adagrad' 'Adagrad'"),
        ("shampoo", "'shampoo' asyncsgd.AdamW() asyncsgd.SGD()"),
        (torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), "SGD class torch.optim"),
        (AdamW, "AdamW parameter groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_optimizer_that_cannot_be_served_is_refused_by_name_before_anything_runs(optimizer, words):
    seen = []
    with pytest.raises(UsageError) as error:
        train(Classes(), optimizer=optimizer, samples=80, report=seen.append, **GIVEN)
    assert all(word in str(error.value) for word in words.split())
    assert not seen


def test_an_optimizer_that_cannot_be_sent_to_worker_processes_is_refused_before_any_is_started():
    own = {"optimizer": lambda groups: torch.optim.Adagrad(groups), "samples": 8, **GIVEN}
    with pytest.raises(UsageError, match=r"<lambda>.*pickled"):
        train(Classes(), runtime=Processes(1), **own)
    assert train(Classes(), **own).status == "DONE"


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path):
    given = GIVEN | {"folder": tmp_path / "run", "samples": 80, "checkpoint_every": 40}
    train(Classes(), optimizer=torch.optim.Adagrad, **given)
    with pytest.raises(UsageError, match="optimizer"):
        train(Classes(), optimizer=torch.optim.Adafactor, resume=True, **given)
