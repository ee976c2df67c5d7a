"""Any torch optimizer is given a model's tensors in their shapes, and steps them as it does without this library."""

import functools
import signal

import pytest
import torch
from doors import (
    DANA,
    AdamW,
    AllReduce,
    Hogwild,
    InProcess,
    LocalSGD,
    Processes,
    RunError,
    UsageError,
    Virtual,
    replay,
    train,
)
from marks import slow
from refusals import refused
from tasks import Classes, Plane
from torch_alone import groups_of, train_alone

BATCH = 8
STEPS = 12
RATE = 0.05
DECAY = 0.1
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
    model = task.model(0)
    optimizer = build(groups_of(model, DECAY), lr=RATE)
    train_alone(task, model, optimizer, STEPS)
    return model


def assert_same(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def stop(record):
    """Press Ctrl-C after the seventh arrival."""
    if record.kind == "arrival" and record.total_samples == 7 * BATCH:
        signal.raise_signal(signal.SIGINT)


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
    with refused(words):
        train(Classes(), optimizer=optimizer, samples=80, report=seen.append, **GIVEN)
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


def slow_weight(groups):
    """A tenth of the rate for what is called weight, by torch's own names, in groups that are made anew."""
    new_groups = []
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            rate = group["lr"]
            if name == "weight":
                rate = rate / 10
            new_groups.append({"params": [parameter], "weight_decay": group["weight_decay"], "lr": rate})
    return torch.optim.SGD(new_groups, momentum=0.9)


def anchored(groups):
    """It pulls parameters back to where they were when it was made."""

    class Anchored(torch.optim.SGD):
        def __init__(self, groups):
            super().__init__(groups)
            self.anchors = [parameter.detach().clone() for group in groups for parameter in group["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for parameter, anchor in zip(parameters, self.anchors, strict=True):
                parameter.lerp_(anchor, 0.5)

    return Anchored(groups)


@pytest.mark.processes
def test_one_that_reads_its_parameters_when_it_is_made_reads_the_initial_ones():
    given = GIVEN | {"optimizer": anchored, "samples": STEPS * BATCH}
    here = train(Classes(), runtime=InProcess(), **given).model()
    for runtime in (Processes(1), Hogwild(1)):
        model = train(Classes(), runtime=runtime, **given).model()
        for ours, expected in zip(model.parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(ours, expected)


def still_bias(groups):
    """Rprop would move at learning rate 0, too."""
    weight, bias = groups
    moved = {"params": weight["params"], "lr": weight["lr"]}
    still = {"params": bias["params"], "lr": 0.0}
    return torch.optim.Rprop([moved, still])


def another_decay(groups):
    groups[1]["weight_decay"] = 0.3
    return torch.optim.AdamW(groups)


def without_rates(groups):
    """The class's own lr, 1e-3, stands in both groups."""
    return torch.optim.Adam([{"params": group["params"]} for group in groups])


def one_written(groups):
    """The rate of the class stands in no other group, so it was meant."""
    groups[0]["lr"] = 1e-3
    return torch.optim.Adam(groups)


def both_alike(groups):
    written = {"params": groups[0]["params"], "lr": 1e-3}
    open_rate = {"params": groups[1]["params"]}
    return torch.optim.Adam([written, open_rate])


def below_zero(groups):
    groups[0]["lr"] *= -1
    return torch.optim.SGD(groups)


def plain_slow_weight(weight, bias):
    slow = {"params": weight, "weight_decay": DECAY, "lr": RATE / 10}
    rest = {"params": bias, "weight_decay": 0.0, "lr": RATE}
    return torch.optim.SGD([slow, rest], momentum=0.9)


def plain_still_bias(weight, bias):
    return torch.optim.Rprop([weight], lr=RATE)


def plain_another_decay(weight, bias):
    decayed = {"params": weight, "weight_decay": DECAY}
    more_decayed = {"params": bias, "weight_decay": 0.3}
    return torch.optim.AdamW([decayed, more_decayed], lr=RATE)


def plain_without_rates(weight, bias):
    return torch.optim.Adam([weight, bias], lr=RATE)


def plain_one_written(weight, bias):
    written = {"params": weight, "weight_decay": DECAY, "lr": 1e-3}
    rest = {"params": bias, "lr": RATE}
    return torch.optim.Adam([written, rest])


PLAIN = {
    slow_weight: plain_slow_weight,
    still_bias: plain_still_bias,
    another_decay: plain_another_decay,
    without_rates: plain_without_rates,
    one_written: plain_one_written,
}
"""What makes groups, and the same optimizer in torch alone."""


def scheduled_loop(build):
    """Torch alone, where each group's rate falls in a straight line to a tenth of its own."""
    task = Classes()
    model = task.model(0)
    optimizer = PLAIN[build](model.weight, model.bias)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * (step + 1) / STEPS)
    train_alone(task, model, optimizer, STEPS, schedule)
    return model


def assert_close(model, expected):
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)


BY_GROUP = GIVEN | {"samples": STEPS * BATCH, "schedule": "linear"}


@pytest.mark.parametrize("build", PLAIN, ids=lambda build: build.__name__)
def test_each_group_steps_at_its_own_rate_as_in_torch_with_a_scheduler(build):
    trained = train(Classes(), optimizer=build, **BY_GROUP).model()
    expected = scheduled_loop(build)
    assert_close(trained, expected)
    assert build != still_bias or torch.equal(trained.bias, expected.bias)


@pytest.mark.processes
@pytest.mark.parametrize(
    "runtime", [Virtual(1), *slow(Processes(1), AllReduce(1), Hogwild(1), Processes(1, via="process_group"))], ids=str
)
def test_in_every_mode(runtime):
    run = train(Classes(), runtime=runtime, optimizer=slow_weight, **BY_GROUP)
    assert_close(run.model(), scheduled_loop(slow_weight))


def test_and_in_local_steps_after_a_resume_and_in_a_replay(tmp_path):
    """One worker that takes one local step and hands over all of it is that optimizer."""
    given = BY_GROUP | {"runtime": Virtual(1), "optimizer": slow_weight, "folder": tmp_path / "run"}
    given |= {"rule": LocalSGD(num_local_steps=1)}
    stopped = train(Classes(), report=stop, **given)
    assert stopped.status == "INTERRUPTED"
    resumed = train(Classes(), resume=True, **given)
    assert_close(resumed.model(), scheduled_loop(slow_weight))
    assert replay(tmp_path / "run", Classes(), optimizer=slow_weight).identical


@pytest.mark.parametrize(
    ("build", "given", "words"),
    [
        (both_alike, {}, r"lr=0\.001.*Adam has the same number.*0\.02 \* groups"),
        (below_zero, {}, "lr=-0.05"),
        (slow_weight, {"rule": DANA(), "runtime": Virtual(2)}, "plain SGD"),
    ],
    ids=["the class's own rate twice", "below zero", "a rule that needs plain SGD"],
)
def test_rates_that_cannot_be_followed_are_refused_in_a_sentence(build, given, words):
    with pytest.raises(UsageError, match=words):
        train(Classes(), optimizer=build, **BY_GROUP | given)


def without_memory(groups):
    number = 0
    for group in groups:
        for parameter in group["params"]:
            number += parameter.numel()
    if number > 16:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return torch.optim.SGD(groups)


def test_memory_that_is_refused_while_it_is_made_is_not_told_as_its_fault():
    with pytest.raises(RunError, match="there is not enough memory"):
        train(Classes(), optimizer=without_memory, samples=8, **GIVEN)
