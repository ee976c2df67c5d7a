"""Ways to a gradient in less time or memory: each gives the gradient that there is without it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from marks import slow
from running import Train
from torch import Tensor

import asyncsgd
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.settings.training import Settings
from asyncsgd.tasks.base import Task
from asyncsgd.worker import Savings, Worker

INDEX = 5


def prepared(settings: Settings) -> Task:
    experiment = pretraining(settings)
    return experiment.task.prepare(0, experiment.cache)


def worker_of(task: Task, savings: Savings, **values: object) -> Worker:
    return Worker(FlatModel(task.model(0)), task, task.data(0), seed=0, savings=savings, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointed_activations_give_the_same_bits(
    dropout: float, micro_batches: int, precision: torch.dtype, train: Train
) -> None:
    task = prepared(train(mode="single", dropout=dropout, samples=0).settings)

    def gradient_of(savings: Savings) -> tuple[float, Tensor, int]:
        worker = worker_of(task, savings, micro_batches=micro_batches, precision=precision)
        calls: list[None] = []
        layer = worker.flat.model.base_model.encoder.layer[0]  # type: ignore[union-attr]
        layer.intermediate.register_forward_hook(lambda *_: calls.append(None))
        loss = worker.gradient(INDEX).loss
        return loss, worker.flat.gradients, len(calls) // micro_batches

    kept, again = gradient_of(Savings()), gradient_of(Savings(gradient_checkpointing=True))
    assert (kept[2], again[2]) == (1, 2)
    assert kept[0] == again[0]
    assert torch.equal(kept[1], again[1])


@dataclasses.dataclass(frozen=True)
class Plain(asyncsgd.Task):
    name = "plain"
    batch_size: int = 2

    def model(self, seed: int) -> torch.nn.Module:
        with asyncsgd.seeded(seed):
            return torch.nn.Linear(1, 1)

    def data(self, seed: int) -> asyncsgd.TensorData:
        x = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)
        return asyncsgd.TensorData((x, 3 * x), (x, 3 * x), self.batch_size, seed)

    def outputs(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (outputs - batch[1]).square().mean()


def test_a_model_that_cannot_compute_again_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="a Linear has no method gradient_checkpointing_enable, as transformers"):
        asyncsgd.train(Plain(), samples=8, gradient_checkpointing=True, quiet=True)


IN_EVERY_MODE = [
    {"mode": "single"},
    *slow(
        {"mode": "sync", "nproc": 2},
        {"mode": "async", "nproc": 1},
        {"mode": "hogwild", "nproc": 1},
        {"mode": "async", "nproc": 3, "clock": "virtual", "rule": "local_sgd:num_local_steps=2"},
    ),
]


@pytest.mark.parametrize("values", IN_EVERY_MODE, ids=str)
def test_a_run_with_checkpointed_activations_ends_at_the_same_bits(values: dict[str, object], train: Train) -> None:
    values = values | {"dropout": 0.1}
    kept, again = train(**values), train(**values, gradient_checkpointing=True)
    assert again.summary["parameters_sha256"] == kept.summary["parameters_sha256"]
