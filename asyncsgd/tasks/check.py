"""A dry run of a task. It finds mistakes in a user's own task before a run, and the message says what to change.

Most of these mistakes stop no run. Workers then train other models than the server, or losses are wrong by a few
percent, and no message says so."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asyncsgd.core.flat import Layout
from asyncsgd.core.running_statistics import is_statistic_or_counter
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.tasks.base import Batch, Task, tensors_in, to_device
from asyncsgd.tasks.models import generators_restored

LARGEST_PICKLE = 1_000_000
"""Bytes that a task may have when it is sent to a worker process."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What a dry run has seen of a task that passed it."""

    num_parameters: int
    """How many numbers are trained. A parameter that has two names, as tied weights do, counts once."""
    unused: tuple[str, ...]
    """Parameters that are trained and had no gradient. Their gradient is taken for zero, so that weight decay acts on
    them."""
    loss: float
    """The loss of batch 0 of stream 0, at the initial parameters, in training mode."""
    weight: float
    """The weight of that batch."""
    num_evaluation_batches: Mapping[str, int]
    """How many batches each evaluation set has, by its name."""
    statistics: tuple[str, ...]
    """Buffers that the forward pass changes in training mode: running statistics and counters."""
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
    with generators_restored(where):
        model = task.model(seed)
        _check_model(model)
        trial = task.model(seed)
        num_parameters = Layout.of(model).num_parameters  # refuses other types, and tensors that overlap
        if num_parameters == 0:
            raise UsageError(
                "model() has no parameter to train; give it one, or leave requires_grad at True for what is to learn"
            )
        difference = _difference(model, trial)
        if difference is not None:
            kind, name = difference
            raise UsageError(
                f"model({seed}) gave two models with different initial values ({kind} {name}): write "
                f"`with asyncsgd.seeded(seed):` around what draws them in model()"
            )
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise UsageError(
                    f"the module {name!r} has max_norm={module.max_norm:g}, so its forward pass changes its weight, "
                    f"which the server alone may change; leave max_norm out, and shorten the rows in your forward pass"
                )
        data = task.data(seed)
        again = task.data(seed)
        batch = data.batch(0, 0)
        first = [_bits(tensor) for tensor in tensors_in(batch)]
        data.batch(0, 1)  # that another batch was made in between must not change batch 0
        for other in (data, again):
            repeated_batch = other.batch(0, 0)
            if [_bits(tensor) for tensor in tensors_in(repeated_batch)] != first:
                raise UsageError(
                    f"data({seed}).batch(0, 0) gave two different batches; make it a function of seed, stream and "
                    f"index alone, since every worker builds the data for itself, or use asyncsgd.TensorData"
                )
        weight: Any = task.weight(batch)
        if not isinstance(weight, int | float | np.number) or not 0 < weight < math.inf:
            raise UsageError(
                f"weight(batch) must be a number above 0, got {weight!r}; return the number of terms that loss() is "
                f"the mean of"
            )
        trial.to(where)
        learned = [parameter for parameter in trial.parameters() if parameter.requires_grad]

        def gradients(batch: Batch, part: int = 0) -> tuple[float, Tensor]:
            """The loss as the task gives it, and the gradient in one float64 vector, zeros where there is none.

            Args:
                part: the number of a part of a batch, which only selects the seed of dropout.
            """
            torch.manual_seed(dropout_seed(seed, 0, 0, part))
            trial.zero_grad()
            moved = to_device(batch, where)
            loss = task.loss(task.outputs(trial, moved), moved)
            _check_loss(loss)
            loss.backward()
            vectors = []
            for parameter in learned:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                vectors.append(gradient.detach().cpu().double().flatten())
            return float(loss.detach()), torch.cat(vectors)

        loss, _ = gradients(batch)
        trained = [(name, parameter) for name, parameter in trial.named_parameters() if parameter.requires_grad]
        unused = tuple(name for name, parameter in trained if parameter.grad is None)
        is_announced = any(getattr(module, "sparse", False) for module in trial.modules())
        for name, parameter in trained:
            is_sparse = parameter.grad is not None and parameter.grad.is_sparse
            if is_sparse and processes and not is_announced:
                raise UsageError(
                    f"the gradient of {name!r} is sparse, and no layer says so, as processes that exchange gradients "
                    f"have to know; write sparse=False where it is looked up, or use nn.Embedding(..., sparse=True)"
                )
        statistics = _moving_buffers(model, trial)
        if len(statistics) < len(list(model.buffers())):
            statistics += _moving_with_parameters(model, trial, lambda: task.outputs(trial, to_device(batch, where)))
        repeated, _ = gradients(batch)
        if not _is_same(loss, repeated, where):
            raise UsageError(
                f"the same batch at the same parameters has loss {loss:.9g} and then {repeated:.9g}; draw from torch's "
                f"default generator in outputs() and loss(), and leave the batch as it is"
            )
        # TF32, which convolutions use, is less exact.
        unchecked = _check_halves(task, trial, batch, gradients, tolerance=1e-4 if where.type == "cpu" else 1e-2)
        notes = []
        if not math.isfinite(loss):
            notes.append(
                f"the loss of data.batch(0, 0) is {loss} at the initial parameters, so weight() is not "
                f"checked; look for a division by 0 or a logarithm of 0 in outputs() and loss()"
            )
        if unchecked:
            notes.append(f"a batch was not compared with its halves, so weight() is not checked: {unchecked}")
        if not any(module.training for module in model.modules()):
            notes.append("model() returned the model in evaluation mode, so dropout is off; call .train() to have it")
    # Last, since model() and data() may have kept in the task what they read, which would be sent with it.
    if processes:
        check_can_be_sent(task, f"the task {type(task).__name__}")
    num_evaluation_batches = {name: len(batches) for name, batches in data.evaluation.items()}
    return Checked(num_parameters, unused, loss, float(weight), num_evaluation_batches, statistics, tuple(notes))


def _is_same(loss: float, repeated: float, where: torch.device) -> bool:
    """Whether a loss that was computed twice is one loss: on the CPU to the last bit, NaN too; a GPU may add up in
    another order each time.
    """
    return repr(loss) == repr(repeated) or (where.type != "cpu" and math.isclose(loss, repeated, rel_tol=1e-4))


def _moving_buffers(model: nn.Module, trial: nn.Module) -> tuple[str, ...]:
    """The buffers that the forward pass of `trial` has changed since it was as `model`; they are put back.

    Raises:
        UsageError: if it has changed something that the library does not keep.
    """
    before = dict(model.named_buffers())
    after = dict(trial.named_buffers())
    moving: list[str] = []
    while (changed := _difference(model, trial)) is not None:
        kind, name = changed
        if kind == "buffer" and name in before and is_statistic_or_counter(before[name], after.get(name)):
            moving.append(name)
            with torch.no_grad():
                after[name].copy_(before[name])
            continue
        module = dict(model.named_modules()).get(name.rpartition(".")[0], model)
        raise UsageError(
            f"the forward pass changes the {kind} {name!r} of {type(module).__name__}, and no other process sees that; "
            f"kept are float32 buffers that model() makes, and int64 counters that grow. Compute it from the "
            f"parameters and the batch, or use GroupNorm, LayerNorm or track_running_stats=False"
        )
    return tuple(moving)


def _moving_with_parameters(model: nn.Module, trial: nn.Module, forward: Callable[[], Any]) -> tuple[str, ...]:
    """The buffers that a forward pass of `trial` changes only when its parameters have moved, such as those of
    `spectral_norm` where the layer has one output; parameters and buffers are put back.

    Raises:
        UsageError: as `_moving_buffers` does.
    """
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.add_(torch.linspace(-0.01, 0.01, parameter.numel(), device=parameter.device).view_as(parameter))
        forward()
        for parameter, initial in zip(trial.parameters(), model.parameters(), strict=True):
            parameter.copy_(initial)
    return _moving_buffers(model, trial)


def _check_model(model: Any) -> None:
    """Refuse what is no module with values of its own."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model() must return a torch.nn.Module, got a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("model() returned a scripted module, which cannot be taken apart; return the module itself")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(f"parameter {name!r} is on the meta device and has no values; build it on the CPU")


def _check_loss(loss: Any) -> None:
    """Refuse a loss that has no gradient."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"loss() must give a tensor with one number, got a {type(loss).__name__}; return the loss alone"
        )
    if loss.ndim:
        raise UsageError(
            f"loss() must give one number, got a tensor of shape {tuple(loss.shape)}; return the mean over the loss "
            f"terms, as .mean() or reduction='mean' does"
        )
    if not loss.requires_grad:
        raise UsageError(
            "loss() gave a tensor without a gradient; compute it with torch from what outputs() gives, without "
            "detach(), item() or no_grad()"
        )


def check_can_be_sent(value: Any, what: str) -> None:
    """Refuse what worker processes cannot be given.

    Raises:
        UsageError: if it is of a ``__main__`` that they cannot import, cannot be pickled, or carries data.
    """
    made_of = value.func if isinstance(value, functools.partial) else value
    kind = made_of if hasattr(made_of, "__name__") else type(made_of)
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_importable = os.path.isfile(file) and not is_main_of_package()
    if kind.__module__ == "__main__" and not is_importable:
        raise UsageError(
            f"{kind.__name__} is not defined in a file that worker processes can import; put it into one, e.g. "
            f"my_task.py, and type from my_task import {kind.__name__}; or train with runtime=asyncsgd.Virtual(...)"
        )
    try:
        size = len(pickle.dumps(value))
    except Exception as error:  # PicklingError, TypeError, AttributeError, RecursionError and others
        raise UsageError(
            f"{what} cannot be sent to worker processes, since it cannot be pickled ({error}); keep numbers, text and "
            f"functions from the top level of a file in it, or train with runtime=asyncsgd.Virtual(...)"
        ) from error
    if size > LARGEST_PICKLE:
        raise UsageError(
            f"{what} has {size / 1e6:.1f} MB when it is sent to worker processes; keep the name of a file in it, and "
            f"load that in data(), or where it is called"
        )


def is_main_of_package() -> bool:
    """Whether ``__main__`` is the ``__main__.py`` of a package or a folder, which child processes leave alone."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.rpartition(".")[2] == "__main__"


def refuse_in_worker() -> None:
    """Refuse to start a run in a process that `multiprocessing` has started. A worker process imports the user's
    script. If its top-level code trains, the worker would train too, and start workers.

    Raises:
        UsageError: in every process but the main one.
    """
    # While a child imports the script, it already has its name, but no parent yet.
    if multiprocessing.parent_process() is None and multiprocessing.current_process().name == "MainProcess":
        return
    module = sys.modules.get("__mp_main__", sys.modules["__main__"])
    script = getattr(module, "__file__", None) or "the script"
    raise UsageError(
        f"a worker process has come to the code that starts training, since worker processes import {script} too; put "
        f'that code under `if __name__ == "__main__":`'
    )


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    """The shape, the dtype and the bytes of a tensor, which are equal for tensors with equal bits, NaN included."""
    values = tensor.detach().cpu().contiguous().flatten()
    return tensor.shape, tensor.dtype, values.view(torch.uint8).numpy().tobytes()


def _difference(model: nn.Module, other: nn.Module) -> tuple[str, str] | None:
    """The kind and the name of the first parameter or buffer that differs; None if all bits are equal."""
    bits = _bits_of_model(model)
    other_bits = _bits_of_model(other)
    for name in bits | other_bits:
        if bits.get(name) != other_bits.get(name):
            return name
    return None


def _bits_of_model(model: nn.Module) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The bits of each parameter and buffer, by its kind and its name."""
    bits = {}
    for name, parameter in model.named_parameters():
        bits["parameter", name] = _bits(parameter)
    for name, buffer in model.named_buffers():
        bits["buffer", name] = _bits(buffer)
    return bits


def normalising_over_batch(model: nn.Module) -> str | None:
    """The first module of `model`, as it is trained, whose output for a sample depends on the others of its batch."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            uses_batch = module.training or module.running_mean is None
            if uses_batch:
                return name
    return None


def _check_halves(
    task: Task, model: nn.Module, batch: Batch, gradients: Callable[..., tuple[float, Tensor]], tolerance: float
) -> str:
    """Refuse a weight that is not the number of terms that the loss is a mean over: without dropout, the loss and the
    gradient of a batch are the weighted means of those of its halves. Return why this cannot be checked, if so.
    """
    name = normalising_over_batch(model)
    if name is not None:
        return f"the module {name!r} normalises over the samples of a batch"
    for module in model.modules():  # no dropout; modules that call F.dropout themselves heed the mode too
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0  # cuDNN computes no gradient of a recurrent network in evaluation mode
        else:
            module.training = False
    loss, gradient = gradients(batch)
    with_other_seed, _ = gradients(batch, part=1)
    if not _is_same(loss, with_other_seed, next(model.parameters()).device):
        return (
            "outputs() or loss() draws random numbers in evaluation mode too, so each evaluation draws them from a "
            "seed of its own"
        )
    try:
        halves = task.split(batch, 2)
    except UsageError as error:
        return str(error)
    weight = float(task.weight(batch))
    weights = [float(task.weight(half)) for half in halves]
    if not math.isclose(sum(weights), weight, rel_tol=1e-4):
        raise UsageError(
            f"weight(batch) is {weight:g}, but its halves have {' and '.join(f'{half:g}' for half in weights)}; return "
            f"the number of terms that loss() is the mean of, counted in the batch it is given"
        )
    losses = []
    terms = []
    try:
        for half, half_weight in zip(halves, weights, strict=True):
            if half_weight:
                share = half_weight / weight
                half_loss, half_gradient = gradients(half)
                losses.append(share * half_loss)
                terms.append(share * half_gradient)
    except Exception as error:
        # Runs do not split batches unless they are told to, so a model may well be made for whole ones.
        return f"half a batch cannot be computed ({error})"
    joined = sum(losses)
    loss_size = max(abs(loss), sum(map(abs, losses)))
    stacked = torch.stack(terms)
    distance = float((stacked.sum(0) - gradient).norm())
    gradient_size = float(stacked.norm(dim=1).sum()) or 1.0
    relative = distance / gradient_size
    problem = ""
    if abs(joined - loss) > tolerance * loss_size:
        problem = f"loss of data.batch(0, 0) is {loss:.6g}, but {joined:.6g}"
    elif relative > tolerance:
        problem = f"gradient of data.batch(0, 0) differs by {relative:.2g} of its size from that"
    if problem:
        raise UsageError(
            f"the {problem} by its halves, weighted by weight(); make weight() the number of terms that loss() is the "
            f"mean of. If the loss compares the samples of a batch with one another, give the task a method "
            f"split(batch, parts) that raises UsageError"
        )
    return ""
