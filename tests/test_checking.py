"""The dry run finds each mistake of a user's own task, names it, and passes what is right."""

import dataclasses
import functools
import math
import random
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from doors import UsageError, check, cli
from refusals import refused
from tasks import Branches, Regression, Tokens, X, Y
from torch import nn
from torch.nn import functional


def but(*, batch_size=8, **methods):
    """The right task with other methods."""
    task = Regression(batch_size)
    for name, method in methods.items():
        object.__setattr__(task, name, method)
    return task


class Given:
    """Data of one function."""

    evaluation: ClassVar[Any] = {"main": [(X, Y)]}

    def __init__(self, batch):
        self.batch = batch


class Through(nn.Module):
    """A linear layer behind `layer`, and what a forward pass does besides."""

    def __init__(self, layer, *, buffer=None, also=lambda self: None):
        super().__init__()
        self.layer = layer
        self.linear = nn.LazyLinear(1)
        self.also = also
        if buffer is not None:
            self.register_buffer("calls", buffer)
        self(X)  # makes the lazy layer

    def forward(self, x):
        self.also(self)
        return self.linear(self.layer(x))


class Recurrent(nn.Module):
    """Drops in every way: as a module, as a function, between recurrent layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 16)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 1)
        self.recurrent = nn.LSTM(16, 16, num_layers=2, dropout=0.5)

    def forward(self, x):
        hidden = functional.dropout(self.drop(self.linear(x)), 0.3, self.training)
        outputs, _ = self.recurrent(hidden[None])
        return self.last(outputs[0])


@dataclasses.dataclass(frozen=True)
class Masked(Regression):
    """Its loss is a mean over some rows, another number in every half."""

    chosen: tuple[bool, ...] = (True, True, True, False, True, False, False, False)

    def data(self, seed):
        batch = (X[:8], Y[:8], torch.tensor(self.chosen))
        return Given(lambda stream, index: batch)

    def loss(self, outputs, batch):
        _, y, chosen = batch
        return functional.mse_loss(outputs[chosen], y[chosen])

    def weight(self, batch):
        return float(batch[2].sum())


class MaskedOfRows(Masked):
    def weight(self, batch):
        return len(batch[2])


@dataclasses.dataclass(frozen=True)
class Contrasts(Regression):
    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs[:, None] * batch[1], torch.arange(len(outputs)))


@dataclasses.dataclass(frozen=True)
class Counted(Regression):
    """What it adds up, of n outputs and n labels, is a sum; with labels of the shape (n, 1) it has n * n terms."""

    shape: tuple[int, ...] = (-1,)

    def sums(self, outputs, batch):
        is_above = outputs > batch[1].reshape(self.shape) - 100.0
        return {"above": is_above.sum(), "counts": torch.ones(2)}


class Unsplit(Contrasts):
    def split(self, batch, parts):
        raise UsageError("its samples are contrasted")


@dataclasses.dataclass(frozen=True)
class Keeps(Regression):
    """Its data stay in the task."""

    @functools.cached_property
    def samples(self):
        return np.zeros(300_000)

    def data(self, seed):
        _ = self.samples
        return super().data(seed)


class SumOfGradients(torch.autograd.Function):
    """A mean whose gradient is that of the sum."""

    @staticmethod
    def forward(ctx, x):
        ctx.num = len(x)
        return x.mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.num)


def counting(seed):
    """Data whose batches are those after the last one that was asked for."""
    asked = []

    def batch(stream, index):
        asked.append(index)
        first = len(asked)
        return (X[first : first + 8],)

    return Given(batch)


OWN = np.random.default_rng(0)


def grow(module):
    module.calls = torch.zeros(len(module.calls) + 1)


def test_a_right_task_passes_and_the_numbers_are_those_of_its_first_batch():
    task = Regression()
    x, y = task.data(3).batch(0, 0)
    outputs = task.model(3)(x)[:, 0]
    loss = float(functional.mse_loss(outputs, y))
    found = dataclasses.astuple(check(task, seed=3))
    assert found == (21, (), loss, 8.0, {"main": 7}, (), ())


def test_tied_weights_frozen_parameters_integer_inputs_and_a_single_tensor_pass():
    checked = check(Tokens())
    assert checked.num_parameters == 20
    assert checked.unused == ()
    assert checked.notes == ()


def test_unused_parameters_are_listed():
    assert check(but(layers=lambda: Branches(3)), processes=False).unused == ("second.weight", "second.bias")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            but(model=lambda seed: Through(nn.Identity())),
            "different initial values linear.weight asyncsgd.seeded(seed)",
        ),
        (but(data=counting), "two different batches TensorData"),
        (
            but(layers=lambda: Through(nn.Identity(), buffer=torch.zeros(1), also=grow)),
            "Through buffer 'calls' GroupNorm",
        ),
        (
            but(layers=lambda: Through(nn.Identity(), buffer=torch.tensor(7), also=lambda self: self.calls.sub_(1))),
            "counters that grow Through buffer 'calls'",
        ),
        (
            but(
                layers=lambda: Through(
                    nn.Identity(), buffer=torch.tensor(True), also=lambda self: self.calls.logical_not_()
                )
            ),
            "Through buffer 'calls'",
        ),
        (
            but(layers=lambda: Through(nn.Identity(), also=lambda self: self.linear.bias.data.add_(1))),
            "changes parameter 'linear.bias' Linear",
        ),
        (but(loss=lambda outputs, batch: (outputs * OWN.random() - batch[1]).square().mean()), "has loss and then"),
        (but(weight=lambda batch: 0.0), "above 0 0.0"),
        (but(weight=lambda batch: 1.0), "weight(batch) 1 halves"),
        (MaskedOfRows(), "halves weight() split(batch, parts)"),
        (Contrasts(), "compares the samples of a batch"),
        (
            but(loss=lambda outputs, batch: SumOfGradients.apply((outputs - batch[1]).square())),
            "the gradient of data.batch(0, 0) halves",
        ),
    ],
)
def test_a_mistake_is_refused_by_name(task, words):
    with refused(words):
        check(task, processes=False)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Regression(field=lambda x: x), "pickled asyncsgd.Virtual"),
        (Keeps(), "2.4 MB data()"),
    ],
)
def test_what_cannot_be_sent_to_processes_is_refused_and_passes_without_them(task, words):
    check(task, processes=False)
    with refused(words):
        check(task, processes=True)


@pytest.mark.parametrize(
    ("task", "note"),
    [
        (Masked(), None),
        (Masked(chosen=(True,) * 3 + (False,) * 5), None),  # a half without loss terms
        (but(layers=Recurrent), None),
        (but(layers=Recurrent, batch_size=3), None),
        (but(layers=lambda: Through(nn.BatchNorm1d(3).eval())), None),
        (but(layers=lambda: Through(nn.BatchNorm1d(3))), "'layer' normalises"),
        (but(layers=lambda: Through(nn.BatchNorm1d(3, track_running_stats=False))), "'layer' normalises"),
        (but(layers=lambda: nn.Linear(3, 1).eval()), "call .train()"),
        (but(loss=lambda outputs, batch: outputs.sum() * math.nan), "is nan at the initial parameters"),
        (Regression(batch_size=1), "1 rows cannot be split in 2"),
        (but(loss=lambda outputs, batch: (outputs.reshape(8) - batch[1]).square().mean()), "half a batch"),
        (Counted(), None),
        (Counted(shape=(-1, 1)), "sums() gives above 64 for a batch and 32 for its halves together"),
        (Unsplit(), "so weight() is not checked: its samples are contrasted"),
    ],
)
def test_what_is_right_passes_and_what_is_unusual_or_was_not_compared_is_noted(task, note):
    notes = check(task, processes=False).notes
    if note is None:
        assert notes == ()
    else:
        assert note in notes[0]


def test_global_generators_are_afterwards_as_they_were_before():
    def model(seed):
        torch.manual_seed(seed)  # and does not put it back
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    of_torch = torch.get_rng_state()
    of_numpy = repr(np.random.get_state())  # noqa: NPY002
    of_random = random.getstate()
    check(but(model=model), processes=False)
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert repr(np.random.get_state()) == of_numpy  # noqa: NPY002
    assert random.getstate() == of_random


TRAINS = """
from doors import Processes, train
from tasks import Plane
class Mine(Plane): func = len  # a functools.partial has one too
train(Mine(), runtime=Processes(1), samples=8, quiet=True)
"""


@pytest.mark.parametrize(
    ("is_file", "words"),
    [(False, "from my_task import Mine"), (True, "worker processes import this script, and would train in turn")],
)
def test_a_class_of_a_main_that_is_no_file_and_a_file_that_trains_when_it_is_imported_are_refused(
    is_file, words, tmp_path, monkeypatch
):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    if is_file:
        script = tmp_path / "script.py"
        script.write_text(TRAINS)
        main.__file__ = str(script)
    with pytest.raises(UsageError, match=words):
        exec(TRAINS, vars(main))


@dataclasses.dataclass(frozen=True)
class Threads(Regression):
    field: int = 0
    threads: int = 1


def test_a_field_with_the_name_of_a_setting_is_refused():
    ended = cli("train.py test_checking:Threads --samples 8")
    assert ended.code == 2
    assert "two settings are called 'threads'" in ended.err
