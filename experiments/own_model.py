"""A model of your own in any mode and under any rule: a convolutional network that tells drawn shapes apart.

    python experiments/own_model.py --mode async --nproc 2
    python experiments/own_model.py --clock virtual --nproc 16 --times exponential:1 --rule ringmaster:threshold=8

The images are drawn by this file, so nothing is downloaded. To train something else, copy it and change the class: its
fields become flags, its methods say what is learned. ``--help`` lists the settings, docs/own_model.md explains them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import asyncsgd
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import TaskScript
from asyncsgd.settings.flags import setting

SIDE = 16
NAMES = ("disc", "square", "cross", "ring")
Labelled = tuple[Tensor, Tensor]
"""Images, float32 `(B, 1, 16, 16)`, and the numbers of their shapes, int64 `(B,)`."""


@dataclasses.dataclass(frozen=True)
class Shapes(asyncsgd.Task):
    """Which shape is on an image of 16 x 16 pixels."""

    name: ClassVar[str] = "shapes"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher"}

    batch_size: int = setting(32, "images in one gradient, per worker", at_least=1)
    width: int = setting(16, "channels of the first layer", at_least=4)
    noise: float = setting(0.7, "standard deviation of every pixel", at_least=0)
    train_images: int = setting(4000, "images to train on", at_least=1)

    def __post_init__(self) -> None:
        if self.width % 4:
            raise ValueError("width must be a multiple of 4, since GroupNorm has four groups")

    def model(self, seed: int) -> nn.Module:
        width = self.width
        with asyncsgd.seeded(seed):
            return nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.GroupNorm(4, width),  # not BatchNorm: Hogwild and pipelines keep no running statistics
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.GroupNorm(4, 2 * width),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(8 * width, len(NAMES)),
            )

    def data(self, seed: int) -> asyncsgd.TensorData:
        train = draw(self.train_images, self.noise, seed=1)
        evaluation = draw(1000, self.noise, seed=2)
        return asyncsgd.TensorData(train, evaluation, self.batch_size, seed)

    def outputs(self, model: nn.Module, batch: Labelled) -> Tensor:
        images, _ = batch
        return model(images)

    def loss_unit(self) -> str:
        return "nats"

    def loss(self, outputs: Tensor, batch: Labelled) -> Tensor:
        _, labels = batch
        return functional.cross_entropy(outputs, labels)

    def sums(self, outputs: Tensor, batch: Labelled) -> dict[str, Tensor]:
        _, labels = batch
        predictions = outputs.argmax(1)
        size = len(NAMES)
        cells = labels * size + predictions
        counts = torch.bincount(cells, minlength=size**2)
        return {"confusion": counts.reshape(size, size)}

    def metrics(self, sums: asyncsgd.Sums) -> dict[str, float]:
        confusion = sums["confusion"]
        num_right = confusion.trace()
        return {"accuracy": num_right / confusion.sum()}

    def details(self, sums: asyncsgd.Sums) -> dict[str, object]:
        confusion = sums["confusion"]
        return {"shapes": list(NAMES), "confusion": confusion.tolist()}


def draw(number: int, noise: float, seed: int) -> Labelled:
    """Shapes at random places and of random sizes, in noise."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(len(NAMES), (number,), generator=random)
    centre = 5.0 + 5.0 * torch.rand(number, 2, 1, 1, generator=random)
    radius = 3.0 + 2.0 * torch.rand(number, 1, 1, generator=random)
    axis = torch.arange(SIDE, dtype=torch.float32)
    down = axis[:, None] - centre[:, 0]
    right = axis[None, :] - centre[:, 1]
    distance = (down**2 + right**2).sqrt()
    from_row = down.abs()
    from_column = right.abs()
    larger = torch.maximum(from_row, from_column)
    smaller = torch.minimum(from_row, from_column)
    disc = distance < radius
    square = larger < 0.85 * radius
    is_thin = smaller < 1.2
    cross = is_thin & (larger < radius)
    from_ring = (distance - radius).abs()
    ring = from_ring < 1.2
    shapes = torch.stack([disc, square, cross, ring], dim=1)
    rows = torch.arange(number)
    image = shapes[rows, label].float()
    noises = noise * torch.randn(image.shape, generator=random)
    noisy = image + noises
    return noisy.unsqueeze(1), label


if __name__ == "__main__":
    script = TaskScript(Shapes, "own_model")
    sys.exit(run_script(script.run, ends_with_process=True))
