"""Learning rates as functions of the samples that have arrived."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

Schedule = Callable[[int], float]
"""From the number of samples that arrived, used or not, to the learning rate."""


@dataclasses.dataclass(frozen=True)
class WarmupSchedule:
    """Learning rate as a function of the samples that arrived.

    Linear from 0 to `peak` over `warmup` samples, then ``peak * shape(progress)`` with progress running from 0 to 1 at
    `samples`. `shape` is one of `constant`, `linear`, `cosine`.

    >>> schedule = WarmupSchedule(peak=1.0, warmup=10, samples=110, shape=linear)
    >>> [round(schedule(samples), 2) for samples in (5, 10, 60, 110, 500)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """

    peak: float
    warmup: int
    samples: int | None
    shape: Callable[[float], float]

    def __str__(self) -> str:
        return f"learning rate {self.peak:g} ({self.shape.__name__} after {self.warmup} samples of warmup)"

    def __call__(self, num_samples: int) -> float:
        if num_samples < self.warmup:
            return self.peak * num_samples / self.warmup
        if self.samples is None or self.samples <= self.warmup:
            return self.peak
        return self.peak * self.shape(min(1.0, (num_samples - self.warmup) / (self.samples - self.warmup)))


def constant(progress: float) -> float:
    """1 throughout."""
    return 1.0


def linear(progress: float) -> float:
    """From 1 down to a tenth in a straight line; not to 0, so that the last gradients of a run still count."""
    return 1.0 - 0.9 * progress


def cosine(progress: float) -> float:
    """From 1 down to a tenth along half a cosine."""
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
