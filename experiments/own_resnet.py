"""A ResNet with BatchNorm in any mode that keeps running statistics: on made images, or on a folder of your own.

    python experiments/own_resnet.py --mode async --nproc 2 --batch-statistics reestimated
    python experiments/own_resnet.py --images photos --side 32

``photos/train`` and ``photos/test`` have a folder of images for each class. Reading them needs Pillow,
``pip install 'asyncsgd[images]'``. Without ``--images`` the file makes its images, and nothing is downloaded. To train
another network, such as one of torchvision's, copy the file and change `Images.model`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import asyncsgd
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import TaskScript
from asyncsgd.settings.flags import setting

DIRECTIONS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]])
"""Of the waves of each class of made images."""
Labelled = tuple[Tensor, Tensor]
"""Images, float32 `(B, 3, side, side)`, and the numbers of their classes, int64 `(B,)`."""


class Block(nn.Module):
    """Two convolutions and the way around them (He, Zhang, Ren, Sun: Deep Residual Learning, CVPR 2016)."""

    def __init__(self, before: int, width: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        first_norm = norm(width)
        second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        second_norm = norm(width)
        self.layers = nn.Sequential(first, first_norm, nn.ReLU(), second, second_norm)
        self.around: nn.Module = nn.Identity()
        if before != width or stride != 1:
            resized = nn.Conv2d(before, width, 1, stride, bias=False)
            self.around = nn.Sequential(resized, norm(width))

    def forward(self, images: Tensor) -> Tensor:
        change = self.layers(images)
        kept = self.around(images)
        return functional.relu(change + kept)


class GroupNorm(nn.GroupNorm):
    """Four groups of channels."""

    def __init__(self, width: int) -> None:
        super().__init__(4, width)


class ResNet8(nn.Sequential):
    """A convolution, three blocks of which the last two halve the image, and a linear layer."""

    def __init__(self, width: int, num_classes: int, norm: type[nn.Module]) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            Block(width, width, 1, norm),
            Block(width, 2 * width, 2, norm),
            Block(2 * width, 4 * width, 2, norm),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )


@dataclasses.dataclass(frozen=True)
class Images(asyncsgd.Task):
    """Which class an image is of."""

    name: ClassVar[str] = "images"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher"}

    batch_size: int = setting(32, "images in one gradient, per worker", at_least=2)
    width: int = setting(8, "channels of the first block", at_least=4)
    norm: Literal["batch", "group"] = setting("batch", "BatchNorm, or GroupNorm with four groups")
    images: str | None = setting(None, "folder with train/ and test/, each with a folder a class", unset="made images")
    side: int = setting(12, "pixels of an image's side", at_least=4)
    noise: float = setting(3.0, "standard deviation of every pixel of made images", at_least=0)
    train_images: int = setting(2000, "made images to train on", at_least=1)

    def __post_init__(self) -> None:
        if self.norm == "group" and self.width % 4:
            raise ValueError("width must be a multiple of 4 with norm: group, since there are four groups")

    def model(self, seed: int) -> nn.Module:
        norm = nn.BatchNorm2d if self.norm == "batch" else GroupNorm
        num_classes = len(self.classes())
        with asyncsgd.seeded(seed):
            return ResNet8(self.width, num_classes, norm)

    def classes(self) -> list[str]:
        """The names of the classes, in the order of their numbers."""
        if self.images is None:
            return ["right", "down", "down and right", "up and right"]
        train = Path(self.images) / "train"
        names = []
        if train.is_dir():
            names = sorted(path.name for path in train.iterdir() if path.is_dir())
        if not names:
            raise asyncsgd.UsageError(f"--images {self.images}: {train} must have a folder of images for each class")
        return names

    def data(self, seed: int) -> asyncsgd.TensorData:
        if self.images is None:
            train = made(self.train_images, self.side, self.noise, seed=1)
            evaluation = made(1000, self.side, self.noise, seed=2)
        else:
            folder = Path(self.images)
            train = of_folder(folder, "train", self.side)
            evaluation = of_folder(folder, "test", self.side)
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
        is_right = outputs.argmax(1) == labels
        num_images = torch.tensor(len(labels))
        return {"right": is_right.sum(), "images": num_images}

    def metrics(self, sums: asyncsgd.Sums) -> dict[str, float]:
        return {"accuracy": sums["right"] / sums["images"]}


def made(number: int, side: int, noise: float, seed: int) -> Labelled:
    """Noisy waves whose direction is the class. A wave and its opposite are equally likely, so that the mean image is
    the same in all classes, and no linear function of the pixels tells them apart.
    """
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(len(DIRECTIONS), (number,), generator=random)
    is_positive = torch.randint(2, (number, 1, 1), generator=random)
    sign = 2 * is_positive - 1
    share = torch.rand(number, 1, 1, generator=random)
    length = 0.6 + 0.4 * share
    axis = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    direction = DIRECTIONS[label].view(number, 2, 1, 1)
    to_right = direction[:, 0] * right
    to_below = direction[:, 1] * down
    distance = to_right + to_below
    wave = sign * torch.sin(length * distance)
    noises = noise * torch.randn(number, 3, side, side, generator=random)
    pixels = wave.unsqueeze(1) + noises
    return 2 * pixels + 3, label  # neither centred nor scaled, as photographs are not


def of_folder(folder: Path, split: str, side: int) -> Labelled:
    """The images of a folder, as `datasets` reads it, in colour and in squares of `side` pixels, from 0 to 1."""
    import numpy as np
    from datasets import load_dataset

    try:
        rows = load_dataset("imagefolder", data_dir=str(folder), split=split)
        images = []
        for row in rows:
            image = row["image"].convert("RGB")
            images.append(image.resize((side, side)))
    except (ImportError, OSError, ValueError) as error:
        raise asyncsgd.UsageError(f"--images {folder}: {split} cannot be read ({error})") from error
    pixels = torch.from_numpy(np.stack(images))
    channels_first = pixels.permute(0, 3, 1, 2)
    labels = torch.tensor(rows["label"])
    return channels_first.float() / 255, labels


if __name__ == "__main__":
    script = TaskScript(Images, "own_resnet")
    sys.exit(run_script(script.run, ends_with_process=True))
