"""A dry run of a task. It finds mistakes in a user's own task before a run, and the message says what to change.

Most of these mistakes stop no run. Workers then train other models than the server, or losses are wrong by a few
percent, and no message says so."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.flat import Layout
from asyncsgd.tasks.base import Batch, Data, Task, tensors_in, to_device

LARGEST_PICKLE = 1_000_000
"""Bytes that a task may have when it is sent to a worker process."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What a dry run has seen of a task that passed it."""

    num_parameters: int
    """That are trained; tied ones count once."""
    unused: tuple[str, ...]
    """Parameters that are trained and had no gradient. Their gradient is taken for zero, so that weight decay acts on
    them."""
    loss: float
    """Of batch 0 of stream 0, at the initial parameters, in training mode."""
    weight: float
    """Of that batch."""
    num_evaluation_batches: Mapping[str, int]
    """By the name of the evaluation set."""
    notes: tuple[str, ...]
    """What could not be checked, and what is unusual: a sentence each."""


def check(task: Task, *, seed: int = 0, device: str = "cpu", processes: bool = True) -> Checked:
    """Compute a few gradients of `task` and look for mistakes; nothing is trained or written.

    It builds the model and the data twice each. The global generators of torch, numpy and Python are afterwards as they
    were before.

    Args:
        task: prepared.
        seed: of the model, the data and dropout.
        device: where the gradients are computed, as torch calls it.
        processes: whether the task has to work in worker processes, as all runtimes but `InProcess` and `Virtual` need.

    Raises:
        UsageError: for the first mistake. It names the parameter, module or method, and says what to change.
    """
    where = torch.device(device)
    sent = f"the task {type(task).__name__}", "keep the name of a file there, and load it in data() or model()"
    if processes:
        check_main(type(task))
        _check_can_be_sent(task, *sent)
    with _generators_restored(where):
        model = task.model(seed)
        num_parameters = Layout.of(model).num_parameters  # refuses other types than float32
        trial = _Trial(task, task.model(seed), where, seed)
        if (differs := _difference(model, trial.model)) is not None:
            raise UsageError(
                f"model({seed}) gave two models with different initial values ({differs[0]} {differs[1]}): write "
                f"`with asyncsgd.seeded(seed):` around what draws them in model()"
            )
        data, same_data = task.data(seed), task.data(seed)
        batch = _check_batches(data, same_data)
        weight = _check_weight(task, batch)
        trial.model.to(where)
        loss = trial.forward(batch)
        _check_unchanged(model, trial.model)
        gradients = trial.gradients(loss)
        trial.check_repeats(batch, loss)
        notes = _check_split(trial, batch, weight)
        if not any(module.training for module in model.modules()):
            notes.append("model() returned the model in evaluation mode, so dropout is off; call .train() to have it")
    if processes:
        _check_can_be_sent(task, *sent)  # it may keep what it has read
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = tuple(name for name in trained if name not in gradients)
    num_evaluation_batches = {name: len(batches) for name, batches in data.evaluation.items()}
    return Checked(num_parameters, unused, float(loss.detach()), weight, num_evaluation_batches, tuple(notes))


def check_optimizer_can_be_sent(build: Any, name: str) -> None:
    """Refuse what makes an optimizer called `name`, where worker processes cannot be given it.

    Raises:
        UsageError: if it cannot be pickled, carries data, or is of a ``__main__`` that they cannot import.
    """
    made_of = getattr(build, "func", build)  # of functools.partial
    check_main(made_of if hasattr(made_of, "__name__") else type(made_of))
    _check_can_be_sent(build, f"optimizer {name}", "let it make its tensors when it is called")


def _check_can_be_sent(value: object, what: str, load: str) -> None:
    """Refuse what is no pickle, or carries data: `load` says what to do then."""

    def size_of(part: object) -> float:
        try:
            return len(pickle.dumps(part))
        except Exception:  # TypeError, AttributeError, RecursionError, ...: pickle has none of its own
            return math.inf

    if (size := size_of(value)) <= LARGEST_PICKLE:
        return
    parts = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    largest = max(parts, key=lambda name: size_of(parts[name]), default=None)
    where = "" if largest is None else f", because of {largest!r}"
    if size < math.inf:
        raise UsageError(f"{what} has {size / 1e6:.1f} MB when it is sent to worker processes{where}; {load}")
    raise UsageError(
        f"{what} cannot be sent to worker processes, since it cannot be pickled{where}; keep numbers and text in it, "
        f"and functions, classes or functools.partial of them from the top level of a file, or use a runtime without "
        f"processes: asyncsgd.InProcess() or asyncsgd.Virtual(...)"
    )


def is_main_of_package() -> bool:
    """Whether ``__main__`` is the ``__main__.py`` of a package or a folder, which child processes leave alone."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.rpartition(".")[2] == "__main__"


def check_main(defined: Any) -> None:
    """Refuse a class or a function that worker processes cannot import.

    Raises:
        UsageError: if it is of ``__main__``, and that is no file that they import.
    """
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if defined.__module__ != "__main__" or (os.path.isfile(file) and not is_main_of_package()):
        return
    name = defined.__name__
    raise UsageError(
        f"{name} is not defined in a file that worker processes can import; put it into one, e.g. my_task.py, and type "
        f"from my_task import {name}; or train on the virtual clock: runtime=asyncsgd.Virtual(...)"
    )


def refuse_in_worker() -> None:
    """Refuse to start a run in a process that `multiprocessing` has started.

    A worker process imports the user's script. If its top-level code trains, the worker would train too, and start
    workers. To be called first by what starts a run.

    Raises:
        UsageError: in every process but the main one.
    """
    # While a child imports the script, it already has its name, but no parent yet.
    if multiprocessing.parent_process() is None and multiprocessing.current_process().name == "MainProcess":
        return
    script = getattr(sys.modules.get("__mp_main__", sys.modules["__main__"]), "__file__", None) or "the script"
    raise UsageError(
        f"a worker process has come to the code that starts training, since worker processes import {script} too; put "
        f'that code under `if __name__ == "__main__":`'
    )


def _check_batches(data: Data, same_data: Data) -> Batch:
    """Batch 0, which is always the same."""
    batch = data.batch(0, 0)
    tensors = [tensor.clone() for tensor in tensors_in(batch)]
    data.batch(0, 1)
    for other, what, fix in (
        (
            data,
            "data.batch(0, 0) gave another batch at its second call",
            "make it a function of stream and index alone",
        ),
        (same_data, "two calls of data(seed) with one seed gave different batches 0", "draw what is random from seed"),
    ):
        again = list(tensors_in(other.batch(0, 0)))
        if len(again) != len(tensors) or not all(map(_same_bits, tensors, again)):
            raise UsageError(
                f"{what}; {fix}, since every worker builds the data for itself, or use asyncsgd.TensorData"
            )
    return batch


def _check_weight(task: Task, batch: Batch) -> float:
    weight: Any = task.weight(batch)
    if not isinstance(weight, int | float | np.number) or not 0 < weight < math.inf:
        raise UsageError(
            f"weight(batch) must be a number above 0, got {weight!r}; return the number of terms that loss() is the "
            f"mean of"
        )
    return float(weight)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _difference(model: nn.Module, other: nn.Module) -> tuple[str, str] | None:
    """The kind and the name of the first parameter or buffer that differs; None if all bits are equal."""
    for kind in ("parameter", "buffer"):
        some, others = (dict(getattr(each, f"named_{kind}s")()) for each in (model, other))
        if some.keys() != others.keys():
            return kind, min(some.keys() ^ others.keys())
        if different := [name for name, tensor in some.items() if not _same_bits(tensor, others[name])]:
            return kind, different[0]
    return None


def _check_unchanged(initial: nn.Module, model: nn.Module) -> None:
    """Refuse modules whose parameters or buffers a forward pass in training mode has changed."""
    if (changed := _difference(initial, model)) is None:
        return
    kind, name = changed
    path = name.rpartition(".")[0]
    module = dict(model.named_modules()).get(path, model)
    where = f"the module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    instead = "Compute it from the parameters and the batch in every forward pass, or keep it constant"
    if getattr(module, "track_running_stats", False):
        instead = "Use GroupNorm or LayerNorm, or track_running_stats=False, or put the module in evaluation mode"
    raise UsageError(
        f"{where} changes its {kind} {name!r} in the forward pass. No other process sees this change, so every worker "
        f"would have another {kind}. {instead}"
    )


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A model of its own to compute gradients with."""

    task: Task
    model: nn.Module
    device: torch.device
    seed: int

    def forward(self, batch: Batch) -> Tensor:
        """The loss as the task gives it."""
        torch.manual_seed(dropout_seed(self.seed, 0, 0))
        moved = to_device(batch, self.device)
        return self.task.loss(self.task.outputs(self.model, moved), moved)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradients of parameters that have one."""
        loss.backward()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad, None
        return gradients

    def check_repeats(self, batch: Batch, loss: Tensor) -> None:
        """Refuse a task whose loss is another one at the same parameters, batch and dropout seed."""
        repeated = self.forward(batch)
        first, second = float(loss.detach()), float(repeated.detach())
        if _same_bits(repeated, loss) or (self.device.type != "cpu" and math.isclose(first, second, rel_tol=1e-4)):
            return  # some operations on a GPU add up in no fixed order
        raise UsageError(
            f"the same batch at the same parameters has loss {first:.9g} and then {second:.9g}; draw from torch's "
            f"default generator in outputs() and loss(), which is seeded for every batch, and leave the batch as it is"
        )


@contextlib.contextmanager
def _generators_restored(device: torch.device) -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _check_split(trial: _Trial, batch: Batch, weight: float) -> list[str]:
    """Refuse a weight that is not the number of terms that the loss is a mean over. Return a note if this cannot be
    checked.

    Without dropout, the loss and the gradient of a batch are the weighted means of those of its parts.
    """
    unchecked = "a batch was not compared with its halves, so weight() is not checked"
    for name, module in trial.model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return [f"{unchecked}: the module {name!r} normalises over the samples of a batch"]
    _turn_dropout_off(trial.model)
    loss = trial.forward(batch)
    gradients = trial.gradients(loss)
    try:
        parts = trial.task.split(batch, 2)
    except UsageError as error:
        return [f"{unchecked}: {error}"]
    weights = [float(trial.task.weight(part)) for part in parts]
    if not math.isclose(sum(weights), weight, rel_tol=1e-4):
        raise UsageError(
            f"weight(batch) is {weight:g}, but its halves have {' and '.join(f'{part:g}' for part in weights)}; return "
            f"the number of terms that loss() is the mean of, counted in the batch it is given"
        )
    shares = [part / weight for part in weights if part]
    try:
        losses = [trial.forward(part) for part, of_part in zip(parts, weights, strict=True) if of_part]
    except Exception as error:
        # Runs do not split batches unless they are told to, so a model may well be made for whole ones.
        return [f"{unchecked}: half a batch cannot be computed ({error})"]
    values = [float(part.detach()) for part in losses]
    whole, joined = float(loss.detach()), sum(share * value for share, value in zip(shares, values, strict=True))
    size = sum(share * abs(value) for share, value in zip(shares, values, strict=True))
    tolerance = 1e-4 if trial.device.type == "cpu" else 1e-2  # of TF32, which convolutions use
    advice = (
        "make weight() the number of terms that loss() is the mean of. If the loss compares the samples of a batch "
        "with one another, give the task a method split(batch, parts) that raises UsageError"
    )
    if abs(joined - whole) > tolerance * max(size, abs(whole)):
        raise UsageError(
            f"the loss of data.batch(0, 0) is {whole:.6g}, but its halves, weighted by weight(), make {joined:.6g}; "
            f"{advice}"
        )
    difference = _gradient_difference(gradients, [trial.gradients(part) for part in losses], shares)
    if difference > tolerance:
        raise UsageError(
            f"the gradient of data.batch(0, 0) differs by {difference:.2g} of its size from that of its halves, "
            f"weighted by weight(), though their losses agree; {advice}"
        )
    return []


def _turn_dropout_off(model: nn.Module) -> None:
    """By evaluation mode, which modules that call F.dropout themselves heed too."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0  # cuDNN computes no gradient of a recurrent network in evaluation mode
        else:
            module.training = False


def _gradient_difference(whole: dict[str, Tensor], parts: list[dict[str, Tensor]], shares: list[float]) -> float:
    """How far the gradient is from that of the parts, relative to their size before they cancel out."""
    size = sum(share * _norm(part.values()) for share, part in zip(shares, parts, strict=True))
    differences = []
    for name in set(whole).union(*parts):
        joined = sum(share * part[name].double() for share, part in zip(shares, parts, strict=True) if name in part)
        differences.append(torch.as_tensor(joined - whole[name].double() if name in whole else joined))
    difference = _norm(differences)
    return difference / size if size else float(difference > 0)


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
