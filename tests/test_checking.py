"""The dry run finds each mistake of a user's own task, names it, and passes what is right."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import asyncsgd
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks.base import Batch, Task
from asyncsgd.tasks.checking import Checked, check, check_main, refuse_in_worker
from asyncsgd.tasks.tensors import TensorData

X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5]) + 0.3


@dataclasses.dataclass(frozen=True)
class Regression(Task):
    """A right task, and small; the wrong ones below differ from it in one thing each."""

    name: ClassVar[str] = "regression"
    batch_size: int = 8

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def model(self, seed: int) -> nn.Module:
        with asyncsgd.seeded(seed):
            return self.layers()

    def data(self, seed: int) -> Any:
        return TensorData((X, Y), (X, Y), self.batch_size, seed)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])[:, 0]

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        return functional.mse_loss(outputs, batch[1])


class WithLayers(Regression):
    """Of other layers; `make` holds no part of a task that has to be pickled."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "layers", make)


def refused(task: Any, *words: str, processes: bool = False) -> None:
    """The check refuses `task`, and the message has all the words."""
    with pytest.raises(UsageError) as raised:
        check(task, processes=processes)
    for word in words:
        assert word in str(raised.value)


def test_a_right_task_passes_and_the_numbers_are_those_of_its_first_batch() -> None:
    task = Regression()
    x, y = task.data(3).batch(0, 0)
    loss = functional.mse_loss(task.model(3)(x)[:, 0], y)
    assert check(task, seed=3) == Checked(21, (), float(loss.detach()), 8.0, {"main": 7}, ())


def test_global_generators_are_afterwards_as_they_were_before() -> None:
    @dataclasses.dataclass(frozen=True)
    class Draws(Regression):
        def model(self, seed):
            torch.manual_seed(seed)  # and does not put it back
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    without = draws()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])
    check(Draws(), processes=False)
    assert draws() == without


def test_batch_norm_is_refused_by_name_and_passes_without_running_statistics() -> None:
    class Net(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(3, 4), nn.ModuleDict({"norm": norm})
            self.last = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body["norm"](self.first(x)))

    refused(
        WithLayers(lambda: Net(nn.BatchNorm1d(4))),
        *("'body.norm' (BatchNorm1d)", "buffer 'body.norm.running_mean'", "GroupNorm", "track_running_stats=False"),
    )
    checked = check(WithLayers(lambda: Net(nn.BatchNorm1d(4, track_running_stats=False))), processes=False)
    assert "'body.norm' normalises over the samples of a batch" in checked.notes[0]
    assert check(WithLayers(lambda: Net(nn.GroupNorm(2, 4))), processes=False).notes == ()
    assert check(WithLayers(lambda: Net(nn.BatchNorm1d(4).eval())), processes=False).notes == ()


def test_spectral_norm_and_a_counter_of_its_own_are_refused_and_constant_buffers_pass() -> None:
    class Counts(nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.linear, self.step = nn.Linear(3, 1), step
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.step
            return self.linear(x)

    normed = nn.utils.parametrizations.spectral_norm
    refused(WithLayers(lambda: normed(nn.Linear(3, 8))), "_SpectralNorm", "'parametrizations.weight.0._u'")
    refused(WithLayers(lambda: Counts(1)), "the model (Counts)", "buffer 'calls'")
    check(WithLayers(lambda: Counts(0)), processes=False)


def test_a_forward_pass_that_changes_a_parameter_is_refused() -> None:
    class Clips(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    refused(WithLayers(lambda: Clips(3, 1)), "the model (Clips) changes its parameter 'weight'")


@dataclasses.dataclass(frozen=True)
class WithField(Regression):
    field: Any = None


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_a_task_that_cannot_be_pickled_is_refused_by_field_and_passes_without_processes() -> None:
    for value, what in ((lambda x: x, "a lambda"), (Unpicklable(), "a value of type Unpicklable")):
        refused(WithField(field=value), f"its field 'field' holds {what}", "asyncsgd.Virtual", processes=True)
        check(WithField(field=value), processes=False)


def test_a_local_class_is_refused_by_name_and_passes_without_processes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(Regression):
        pass

    refused(Local(), "the class Local is defined inside a function", "top level", processes=True)
    check(Local(), processes=False)


@dataclasses.dataclass(frozen=True)
class Keeps(Regression):
    """Its data stay in the task."""

    @functools.cached_property
    def samples(self) -> np.ndarray:
        return np.zeros(300_000)

    def data(self, seed: int) -> Any:
        _ = self.samples
        return super().data(seed)


def test_a_task_that_carries_data_to_its_workers_is_refused() -> None:
    refused(WithField(field=np.zeros(300_000)), "has 2.4 MB", "'field'", "data()", processes=True)
    check(WithField(field=np.zeros(100_000)), processes=True)
    refused(Keeps(), "has 2.4 MB", "'samples'", "data()", processes=True)


MAIN = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from test_checking import Regression, check
@dataclasses.dataclass(frozen=True)
class Mine(Regression):
    x: int = 1

if __name__ == "__main__":
    try:
        check(Mine())
        print("passed")
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "from_input", "said"),
    [
        (["mine.py"], False, "passed"),
        (["-m", "mine"], False, "passed"),
        (["-m", "package"], False, "the __main__.py of a package"),
        (["-c", "{text}"], False, "the text after python -c"),
        (["-"], True, "a program that Python reads from standard input"),
        ([], True, "a program that Python reads from standard input"),
        (["-i"], True, "a notebook or an interactive session"),
    ],
    ids=["script", "module", "package", "command", "dash", "standard input", "interactive"],
)
def test_a_class_of_main_is_refused_where_workers_cannot_import_it(
    arguments: list[str], from_input: bool, said: str, tmp_path: Path
) -> None:
    text = MAIN.format(tests=str(Path(__file__).parent))
    (tmp_path / "package").mkdir()
    for name in ("mine.py", "package/__main__.py"):
        (tmp_path / name).write_text(text)
    command = [sys.executable, *(argument.replace("{text}", text) for argument in arguments)]
    result = subprocess.run(
        command, input=text if from_input else None, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert said in result.stdout, result.stderr
    if said != "passed":
        assert "class Mine" in result.stdout
        assert "from my_task import Mine" in result.stdout
        assert "asyncsgd.Virtual" in result.stdout


def test_a_class_of_a_module_passes_however_python_was_started() -> None:
    check_main(Regression)


WORKERS = """
import multiprocessing, sys
from asyncsgd.tasks.checking import refuse_in_worker
def nothing(): pass
def train():
    try:
        refuse_in_worker()
    except ValueError as error:
        print("refused:", error, flush=True)
        return
    print("trains", flush=True)
    process = multiprocessing.get_context("{method}").Process(target={target}, name="worker0")
    process.start()
    process.join()
{call}
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so_by_its_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    said = {}
    for call in ("train()", 'if __name__ == "__main__": train()'):
        script.write_text(WORKERS.format(method="forkserver", target="nothing", call=call))
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
        said[call] = result.stdout.splitlines()
    with_guard, without = said['if __name__ == "__main__": train()'], said["train()"]
    assert with_guard == ["trains"]
    assert without[0] == "trains"
    assert len(without) == 2
    assert without[1].startswith("refused: a worker process")
    assert str(script) in without[1]
    assert 'if __name__ == "__main__":' in without[1]


def test_a_function_that_a_process_runs_may_not_train_either(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS.format(method="fork", target="refuse_in_worker", call="train()"))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert result.stdout == "trains\n"
    assert "UsageError: a worker process" in result.stderr


def test_the_main_process_may_train() -> None:
    refuse_in_worker()


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "8"])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused(size: Any) -> None:
    refused(Regression(batch_size=size), "batch_size of Regression", repr(size), "batch_size: int = 32")


@dataclasses.dataclass
class Given:
    """Data of fixed parts."""

    made: Callable[[int, int], Batch]
    evaluation: Any = dataclasses.field(default_factory=lambda: {"main": [(X, Y)]})

    def batch(self, stream: int, index: int) -> Batch:
        return self.made(stream, index)


def first_rows(stream: int, index: int) -> Batch:
    return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


class WithData(Regression):
    """Of other data."""

    def __init__(self, data: Callable[[int], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "data", data)


@pytest.mark.parametrize("batch", [(X[:0], Y[:0]), (), {}, None])
def test_a_batch_of_no_samples_is_refused(batch: Any) -> None:
    refused(WithData(lambda seed: Given(lambda stream, index: batch)), "data.batch(0, 0)")


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({}, "no set 'main', only nothing"),
        ({"test": [(X, Y)]}, "no set 'main', only 'test'"),
        ({"main": []}, "the evaluation set 'main' is empty"),
        ({"main": [(X, Y)], "hard": []}, "the evaluation set 'hard' is empty"),
    ],
)
def test_a_missing_or_empty_evaluation_set_is_refused(evaluation: Any, said: str) -> None:
    refused(WithData(lambda seed: Given(first_rows, evaluation)), said)


def test_a_batch_of_another_size_is_noted() -> None:
    checked = check(WithData(lambda seed: Given(lambda stream, index: (X[:5], Y[:5]))), processes=False)
    assert checked.weight == 5.0
    assert checked.notes == ("data.batch(0, 0) has 5 rows, and batch_size is 8",)


def test_what_is_no_task_or_lacks_a_declaration_is_refused() -> None:
    class Plain(Task):
        name: ClassVar[str] = "plain"
        batch_size = 8
        model, data, outputs, loss = Regression.model, Regression.data, Regression.outputs, Regression.loss
        layers = Regression.layers

    class Nameless(Plain):
        name = None  # type: ignore[assignment]

    refused(nn.Linear(3, 1), "a task, an object of a class derived from Task, not a value of type Linear")
    refused(Regression, "not the class Regression itself; type Regression()")
    refused(Plain(), "Plain is no dataclass; write @dataclasses.dataclass(frozen=True)")
    refused(dataclasses.dataclass(frozen=True)(Nameless)(), "Nameless has no name", 'name: ClassVar[str] = "nameless"')


class WithLoss(Regression):
    """Of another loss."""

    def __init__(self, loss: Callable[[Tensor, Batch], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "loss", loss)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda outputs, batch: outputs - batch[1], "a tensor of shape (8,); return losses.mean()"),
        (lambda outputs, batch: (outputs - batch[1]).mean().reshape(1), "a tensor of shape (1,)"),
        (lambda outputs, batch: outputs.mean().item(), "a value of type float"),
        (lambda outputs, batch: None, "a value of type NoneType"),
        (lambda outputs, batch: outputs.detach().mean(), "the loss has no gradient"),
        (lambda outputs, batch: torch.zeros(()), "the loss has no gradient"),
        (lambda outputs, batch: (outputs * 0).log().mean(), "is -inf at the initial parameters"),
        (lambda outputs, batch: (outputs - outputs).mean() / 0, "is nan at the initial parameters"),
        (
            lambda outputs, batch: (outputs - outputs).sqrt().mean(),
            "the gradient of parameter '0.weight' is not finite",
        ),
        (lambda outputs, batch: torch.ones((), requires_grad=True) * 1, "depends on no parameter of the model"),
    ],
    ids=["rows", "one row", "float", "None", "detached", "constant", "infinite", "NaN", "NaN gradient", "foreign"],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, said: str) -> None:
    refused(WithLoss(loss), said)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 1, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table((x[:, 0] > 0).long())

    refused(WithLayers(Sparse), "the gradient of parameter 'table.weight' is sparse", "sparse=False")


class WithWeight(Regression):
    """Of another weight."""

    def __init__(self, weight: Callable[[Batch], Any], batch_size: int = 8) -> None:
        super().__init__(batch_size)
        object.__setattr__(self, "weight", weight)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (0.0, "must be above 0, got 0.0"),
        (-8, "must be above 0, got -8"),
        (float("nan"), "must be above 0, got nan"),
        ("8", "must be a number, got a value of type str"),
        (None, "must be a number, got a value of type NoneType"),
        (torch.tensor(8.0), "return int(...) or float(...) of it"),
        (1.0, "weight(batch) is 1, but its halves have 1 and 1"),
    ],
)
def test_a_weight_that_is_no_count_of_loss_terms_is_refused(weight: Any, said: str) -> None:
    refused(WithWeight(lambda batch: weight), said)


def test_numpy_numbers_are_weights() -> None:
    for kind in (int, np.int64, np.float32):
        checked = check(WithWeight(lambda batch, kind=kind: kind(len(batch[1]))), processes=False)  # type: ignore[misc]
        assert type(checked.weight) is float


@dataclasses.dataclass(frozen=True)
class Masked(Regression):
    """Its loss is a mean over some rows, another number in every half."""

    count: Literal["rows", "terms"] = "terms"

    def data(self, seed: int) -> Any:
        chosen = torch.tensor([True, True, True, False, True, False, False, False])
        return Given(lambda stream, index: (X[:8], Y[:8], chosen), {"main": [(X[:8], Y[:8], chosen)]})

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch[1])[batch[2]].square().mean()

    def weight(self, batch: Batch) -> float:
        return float(len(batch[2]) if self.count == "rows" else batch[2].sum())


def test_a_weight_of_rows_where_the_loss_is_a_mean_over_some_is_refused_with_both_losses() -> None:
    task = Masked(count="rows")
    batch = task.data(0).batch(0, 0)
    model = task.model(0)
    whole = float(task.loss(task.outputs(model, batch), batch).detach())
    halves = sum(float(task.loss(task.outputs(model, half), half).detach()) for half in task.split(batch, 2)) / 2
    refused(task, f"is {whole:.6g}", f"make {halves:.6g}", "weight()", "split(batch, parts)")
    assert check(Masked(), processes=False).notes == ()


def test_a_half_without_loss_terms_is_left_out() -> None:
    @dataclasses.dataclass(frozen=True)
    class OneHalf(Masked):
        def data(self, seed):
            batch = X[:8], Y[:8], torch.arange(8) < 3
            return Given(lambda stream, index: batch, {"main": [batch]})

    assert check(OneHalf(), processes=False).notes == ()


def test_a_gradient_is_compared_where_losses_agree() -> None:
    class ToMean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.num = len(x)
            return x.mean()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(ctx.num)  # of the sum

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return ToMean.apply((outputs - batch[1]).square())

    refused(WithLoss(loss), "the gradient of data.batch(0, 0) differs by", "though their losses agree")


@pytest.mark.parametrize("batch_size", [2, 3, 7, 8])
def test_halves_are_compared_without_dropout_wherever_it_is(batch_size: int) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop, self.last = nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)
            self.recurrent = nn.LSTM(16, 16, num_layers=2, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.dropout(self.drop(self.linear(x)), 0.3, self.training)
            return self.last(self.recurrent(x[None])[0][0])

    task = WithLayers(Drops)
    object.__setattr__(task, "batch_size", batch_size)
    assert check(task, processes=False).notes == ()


def test_what_cannot_be_compared_with_its_halves_is_noted() -> None:
    assert "1 rows cannot be split in 2" in check(Regression(batch_size=1)).notes[0]

    def whole_only(outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.reshape(8) - batch[1]).square().mean()

    assert "half a batch cannot be computed (shape" in check(WithLoss(whole_only), processes=False).notes[0]

    @dataclasses.dataclass(frozen=True)
    class Contrasts(Regression):
        def loss(self, outputs, batch):
            return functional.cross_entropy(outputs[:, None] * batch[1], torch.arange(len(outputs)))

    class Unsplit(Contrasts):
        def split(self, batch, parts):
            raise UsageError("its samples are contrasted")

    refused(Contrasts(), "compares the samples of a batch")
    assert "so weight() is not checked: its samples are contrasted" in check(Unsplit(), processes=False).notes[0]


OWN = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: np.random.rand(), "draws from numpy's global generator"),  # noqa: NPY002
        (lambda: random.random(), "draws from Python's random"),
        (lambda: OWN.random(), "draws from a generator of its own"),
    ],
    ids=["numpy", "random", "own"],
)
def test_randomness_that_the_seed_does_not_name_is_refused_with_both_losses(draw: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(WithLoss(lambda outputs, batch: (outputs * draw() - batch[1]).square().mean()), processes=False)
    assert said in str(raised.value)
    first, second = re.findall(r"loss (\S+) and then (\S+);", str(raised.value))[0]
    assert float(first) != float(second)


def test_torchs_default_generator_may_be_drawn_from_in_training_alone() -> None:
    class Noise(nn.Module):
        def __init__(self, always: bool) -> None:
            super().__init__()
            self.linear, self.always = nn.Linear(3, 1), always

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(functional.dropout(x, 0.5, self.training or self.always))

    assert check(WithLayers(lambda: Noise(False)), processes=False).notes == ()
    refused(WithLayers(lambda: Noise(True)), "draws random numbers in evaluation mode", "training=self.training")


def test_batches_that_depend_on_what_was_asked_before_are_refused() -> None:
    class Iterates:
        evaluation: ClassVar[Any] = {"main": [(X, Y)]}
        asked = 0

        def batch(self, stream, index):
            self.asked += 1
            return first_rows(0, self.asked)

    class Advances(Iterates):
        def batch(self, stream, index):
            self.asked = max(self.asked, index)
            return first_rows(0, self.asked)

    for kind in (Iterates, Advances):
        refused(WithData(lambda seed, kind=kind: kind()), "data.batch(0, 0) gave another batch", "TensorData")


def test_batches_that_depend_on_more_than_the_seed_are_refused() -> None:
    def shuffled(seed: int) -> Given:
        order = torch.randperm(len(X))
        return Given(lambda stream, index: (X[order[:8]], Y[order[:8]]))

    refused(WithData(shuffled), "two calls of data(seed) with one seed gave different batches 0")


def test_an_evaluation_set_that_depends_on_more_than_the_seed_is_refused() -> None:
    def chosen(seed: int) -> Given:
        order = torch.randperm(len(X))[:5]
        return Given(first_rows, {"main": [(X[order], Y[order])]})

    refused(WithData(chosen), "different evaluation sets 'main'")


class Branches(nn.Module):
    """Two heads, of which the second does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def test_unused_parameters_are_listed() -> None:
    assert check(WithLayers(Branches), processes=False).unused == ("second.weight", "second.bias")


def test_a_model_without_parameters_to_train_is_refused() -> None:
    for make in (lambda: nn.Linear(3, 1).requires_grad_(False), lambda: nn.Flatten()):
        refused(WithLayers(make), "no parameter of the model is trained")


def test_parameters_in_half_precision_are_refused_by_name() -> None:
    refused(WithLayers(lambda: nn.Linear(3, 1).bfloat16()), "parameter 'weight' is torch.bfloat16")


def test_initial_values_that_are_no_function_of_the_seed_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Unseeded(Regression):
        def model(self, seed):
            return self.layers()

    @dataclasses.dataclass(frozen=True)
    class Seeds(Regression):
        def model(self, seed):
            torch.manual_seed(seed)
            return self.layers()

    refused(Unseeded(), "different initial values (parameter '0.weight')", "asyncsgd.seeded(seed)")
    check(Seeds(), processes=False)


def test_frozen_values_and_buffers_that_are_no_function_of_the_seed_are_refused() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("projection", torch.from_numpy(OWN.normal(size=(3, 3)).astype(np.float32)))
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x @ self.projection)

    refused(WithLayers(Features), "different initial values (buffer 'projection')")


def test_a_field_with_the_name_of_a_setting_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Threads(Regression):
        batch_size: int = setting(8, "samples of a gradient")
        threads: int = setting(1, "threads of the task")

    with pytest.raises(UsageError, match="two settings are called 'threads'"):
        task_flags(Threads)


class Tied(nn.Module):
    """One matrix on the way in and out, integers in, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.table(x)))


@dataclasses.dataclass(frozen=True)
class Tokens(Regression):
    def layers(self) -> nn.Module:
        return Tied()

    def data(self, seed: int) -> Any:
        ids = torch.arange(20) % 5
        return TensorData(ids, ids, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, (batch + 1) % 5)


def test_tied_weights_frozen_parameters_integer_inputs_and_a_single_tensor_pass() -> None:
    checked = check(Tokens())
    assert (checked.num_parameters, checked.unused, checked.notes) == (20, (), ())


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    source: str = "made"


@pytest.mark.parametrize("kind", [tuple, list, dict, Named, Record])
def test_batches_of_every_kind_pass(kind: Any) -> None:
    def pack(x: Tensor, y: Tensor) -> Any:
        if kind in (tuple, list):
            return kind((x, y))
        return kind(x=x, y=y)

    def field(batch: Any, number: int) -> Tensor:
        if isinstance(batch, dict):
            return list(batch.values())[number]
        return (batch.x, batch.y)[number] if kind is Record else batch[number]

    @dataclasses.dataclass(frozen=True)
    class Packed(Regression):
        def data(self, seed):
            return Given(lambda stream, index: pack(*first_rows(stream, index)), {"main": [pack(X, Y)]})

        def outputs(self, model, batch):
            return model(field(batch, 0))[:, 0]

        def loss(self, outputs, batch):
            return functional.mse_loss(outputs, field(batch, 1))

    checked = check(Packed(), processes=False)
    assert (checked.weight, checked.notes) == (8.0, ())


def test_a_model_in_evaluation_mode_is_noted() -> None:
    assert "call .train()" in check(WithLayers(lambda: nn.Linear(3, 1).eval()), processes=False).notes[0]


def test_gradient_checkpointing_passes() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.body, self.first(x), use_reentrant=True))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(WithLayers(Recomputes), processes=False).unused == ()
