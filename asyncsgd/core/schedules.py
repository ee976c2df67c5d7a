"""Learning rates as functions of the samples that have arrived."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

from asyncsgd.errors import RunError, UsageError

Schedule = Callable[[int], float]
"""A function from the number of samples that arrived, used or not, to the learning rate."""
Shape = Callable[[float], float]
"""The shape of a schedule: a function from the progress of a run after the warm-up, 0 to 1, to a share of the peak
learning rate. The shape of a tensor is another thing."""


@dataclasses.dataclass(frozen=True)
class WarmupSchedule:
    """Learning rate as a function of the samples that arrived.

    Linear from 0 to `peak` over `warmup` samples, then ``peak * shape(progress)`` with progress running from 0 to 1 at
    `samples`. `shape` is one of `constant`, `linear`, `cosine`, or a function of the user's own.

    >>> schedule = WarmupSchedule(peak=1.0, warmup=10, samples=110, shape=linear)
    >>> [round(schedule(samples), 2) for samples in (5, 10, 60, 110, 500)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """

    peak: float
    warmup: int
    samples: int | None
    shape: Shape

    def __str__(self) -> str:
        return f"learning rate {self.peak:g} ({name_of_shape(self.shape)} after {self.warmup} samples of warmup)"

    def __call__(self, num_samples: int) -> float:
        warmup = self.warmup
        if num_samples < warmup:
            return self.peak * num_samples / warmup
        if self.samples is None or self.samples <= warmup:
            return self.peak
        progress = min(1.0, (num_samples - warmup) / (self.samples - warmup))
        share = self.shape(progress)
        if not 0 <= share < math.inf:
            raise RunError(
                f"the schedule {name_of_shape(self.shape)} gives {share} at {progress:.4g} of the run; it must give a "
                f"share of the peak learning rate, 0 or more"
            )
        return self.peak * share


def constant(progress: float) -> float:
    """The share is 1 throughout."""
    return 1.0


def linear(progress: float) -> float:
    """The share falls from 1 to a tenth in a straight line. It does not reach 0, so that the last gradients of a run
    still count."""
    return 1.0 - 0.9 * progress


def cosine(progress: float) -> float:
    """The share falls from 1 to a tenth along half a cosine."""
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


SHAPES: dict[str, Shape] = {"constant": constant, "linear": linear, "cosine": cosine}


def name_of_shape(shape: Shape) -> str:
    """What a record calls a shape: its name, and MODULE:NAME of one of the user's own.

    >>> name_of_shape(cosine), name_of_shape(math.sqrt)
    ('cosine', 'math:sqrt')
    """
    named: Any = shape
    return str(named.__name__) if shape in SHAPES.values() else f"{named.__module__}:{named.__qualname__}"


def check_shape(shape: Shape) -> None:
    """Refuse what is no function from progress to a share of the peak.

    Raises:
        UsageError: with what it gives.
    """
    if not inspect.isroutine(shape):
        raise UsageError(
            f"schedule must be constant, linear, cosine or a function such as def half(progress): return 1 - progress "
            f"/ 2, got {shape!r}"
        )
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        try:
            share = float(shape(progress))
        except Exception as error:
            raise UsageError(
                f"the schedule {name_of_shape(shape)} fails at {progress:g} of the run: {type(error).__name__}: {error}"
            ) from error
        if not 0 <= share < math.inf:
            raise UsageError(
                f"the schedule {name_of_shape(shape)} gives {share:g} at {progress:g} of the run; it must give a share "
                f"of the peak learning rate, 0 or more"
            )
