"""The task contract: what a gradient is of. A task knows no rule, no server, no runtime.

A task is a frozen dataclass whose fields are its settings, so it can be pickled and written down. Every process builds
its own model and data from it. The library sets device, autocast, evaluation mode and `no_grad`; a task computes:

    outputs = task.outputs(model, batch)        one forward pass
    loss    = task.loss(outputs, batch)         a scalar, the mean over task.weight(batch) loss terms
    sums    = task.sums(outputs, batch)         numbers that add up over batches; task.metrics(sums) divides, once

so that batches of different weights make one gradient, and shards of an evaluation one number.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Batch = Any
"""A tensor, or a dict, list, tuple or dataclass of batches; anything else in it stays as it is."""

Sums = dict[str, Any]
"""By name, what adds up over batches: numbers, numpy arrays or tensors. Always there are ``loss``, summed over the loss
terms in float64, and ``weight``, how many there are."""


class Batches(Protocol):
    """Batches that are made when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class Data(Protocol):
    """A task's data in one process."""

    def batch(self, stream: int, index: int) -> Batch:
        """Training batch `index` of a stream, on the CPU; a pure function."""

    @property
    def evaluation(self) -> Mapping[str, Batches]:
        """The evaluation sets by name, ``main`` first: batches that are the same for every seed and in every mode."""


class Task(abc.ABC):
    """What is learned. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {}
    """Its metrics; the first is the primary one."""
    batch_size: int
    """Samples of every training batch."""

    @abc.abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model, on the CPU and in training mode."""

    @abc.abstractmethod
    def data(self, seed: int) -> Data:
        """The data, read by this process for itself."""

    @abc.abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """What `model` says of `batch`."""

    @abc.abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss, a scalar: the mean over ``weight(batch)`` loss terms."""

    def weight(self, batch: Batch) -> float:
        """Loss terms behind the batch's loss; more than 0 in training. Read from the batch on the CPU."""
        return float(self.batch_size)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """What `metrics` is made of, summed over the batch; ``loss`` only where it is not loss times weight."""
        return {}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The metrics of a whole evaluation: the only division."""
        return {}


class Loss(nn.Module):
    """A task's loss on one model as a module, so that DistributedDataParallel and compilers can wrap it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.task.outputs(self.model, batch), batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device`; the tensors themselves where they are there already."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(value, device) for value in batch])
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {field.name: to_device(getattr(batch, field.name), device) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **moved)
    return batch


def add_sums(many: Iterable[Sums]) -> Sums:
    """Add sums up, name by name, in order.

    >>> add_sums([{"loss": 1.5, "weight": 2.0}, {"loss": 0.5, "weight": 1.0}])
    {'loss': 2.0, 'weight': 3.0}
    """
    total: Sums = {}
    for sums in many:
        for name, value in sums.items():
            total[name] = total[name] + value if name in total else value
    return total


def plain_sums(sums: Sums) -> Sums:
    """The sums with tensors as numbers or numpy arrays: one transfer from the device for each."""
    return {
        name: (value.item() if value.ndim == 0 else value.cpu().numpy()) if isinstance(value, Tensor) else value
        for name, value in sums.items()
    }


def encode_sums(sums: Sums) -> str:
    """JSON of numbers and arrays, exact to the last bit; see `decode_sums`."""
    return json.dumps(
        {
            name: {"array": value.tolist(), "dtype": str(value.dtype)} if isinstance(value, np.ndarray) else value
            for name, value in sums.items()
        }
    )


def decode_sums(text: str) -> Sums:
    """The sums behind `encode_sums`.

    >>> sums = {"loss": 0.1, "weight": 2.0, "confusion": np.eye(2, dtype=np.int64)}
    >>> decode_sums(encode_sums(sums))["confusion"].tolist()
    [[1, 0], [0, 1]]

    Raises:
        ValueError: for text that is no such JSON.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("sums are nested too deeply") from error
    if not isinstance(values, dict) or not {"loss", "weight"} <= values.keys():
        raise ValueError("sums are no JSON object with a loss and a weight")
    sums: Sums = {}
    for name, value in values.items():
        if isinstance(value, dict) and value.get("dtype") in ("int64", "float64"):
            try:
                sums[name] = np.array(value["array"], dtype=value["dtype"])
            except (KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"the sum {name[:40]!r} is no array of numbers") from error
        elif type(value) in (int, float):
            sums[name] = value
        else:
            raise ValueError(f"the sum {name[:40]!r} is no number and no array of numbers")
    return sums
