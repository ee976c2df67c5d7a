"""Small tasks that need no transformers, for tests whose subject is not a text."""

import ctypes
import dataclasses
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from doors import Task, TensorData, seeded
from torch import nn
from torch.nn import functional


def points(number, seed):
    """Noisy points of a plane: (`(number, 16)`, `(number, 1)`)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 16, generator=draw)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(number, 1, generator=draw)


@dataclasses.dataclass(frozen=True)
class Plane(Task):
    """A plane through noisy points, by a layer whose 16 weights fill a cache line."""

    name: ClassVar[str] = "plane"
    better: ClassVar[Mapping[str, Any]] = {"error": "lower"}
    batch_size: int = 8

    def model(self, seed):
        with seeded(seed):
            return nn.Linear(16, 1, bias=False)

    def data(self, seed):
        return TensorData(points(100, 1), points(30, 2), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

    def sums(self, outputs, batch):
        return {"absolute": (outputs - batch[1]).abs().sum(dtype=torch.float64)}

    def metrics(self, sums):
        return {"error": sums["absolute"] / sums["weight"]}


@dataclasses.dataclass(frozen=True)
class Stuck(Plane):
    """In its 40th gradient the process `stuck_on` waits in C, for a lock that nobody gives back."""

    name: ClassVar[str] = "stuck"
    stuck_on: str = "MainProcess"

    def outputs(self, model, batch):
        if model.training and multiprocessing.current_process().name == self.stuck_on:
            GRADIENTS.append(True)
            if len(GRADIENTS) == 40:
                Path("stuck").touch()
                lock = ctypes.create_string_buffer(64)
                libc = ctypes.CDLL(None)
                for _ in range(2):
                    libc.pthread_mutex_lock(lock)
        return super().outputs(model, batch)


GRADIENTS = []


@dataclasses.dataclass(frozen=True)
class Steep(Plane):
    """Its gradients overflow at the first scales of float16's loss, so that the scale changes."""

    def loss(self, outputs, batch):
        return 100 * super().loss(outputs, batch)


@dataclasses.dataclass(frozen=True)
class Classes(Plane):
    """Whether a point lies above the plane. Some have no label, so a batch has fewer loss terms than rows."""

    name: ClassVar[str] = "classes"
    better: ClassVar[Mapping[str, Any]] = {}

    def model(self, seed):
        with seeded(seed):
            return nn.Linear(16, 2)

    def data(self, seed):
        def labelled(number, of):
            x, y = points(number, of)
            labels = (y[:, 0] > 0).long()
            labels[x[:, 0] > 1] = -100
            labels[0] = 0
            return x, labels

        return TensorData(labelled(100, 1), labelled(30, 2), self.batch_size, seed)

    def weight(self, batch):
        return float((batch[1] >= 0).sum())

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def sums(self, outputs, batch):
        return {}

    def metrics(self, sums):
        return {}


X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5]) + 0.3


@dataclasses.dataclass(frozen=True)
class Regression(Task):
    """A right task, and small; the wrong ones below differ from it in one thing each."""

    name: ClassVar[str] = "regression"
    batch_size: int = 8
    field: Any = None

    def layers(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def model(self, seed):
        with seeded(seed):
            return self.layers()

    def data(self, seed):
        return TensorData((X, Y), (X, Y), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])[:, 0]

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch[1])


class Branches(nn.Module):
    """Two heads, of which the second does nothing."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 1)
        self.second = nn.Linear(width, 1)

    def forward(self, x):
        return self.first(x)


class Tied(nn.Module):
    """One matrix on the way in and out, integers in, a frozen part."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.frozen(self.table(x)))


@dataclasses.dataclass(frozen=True)
class Tokens(Regression):
    def layers(self):
        return Tied()

    def data(self, seed):
        ids = torch.arange(20) % 5
        return TensorData(ids, ids, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, (batch + 1) % 5)
