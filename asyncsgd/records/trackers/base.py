"""What a tracker is told of a run, and what it must be able to do. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PROJECT = "asyncsgd"
"""Where a tracker keeps runs together, unless the user has named another place in the tracker's own way."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which run it is."""

    folder: Path
    """The run's."""
    name: str
    shared: Path
    """The folder in which the runs stand that belong together."""
    group: str | None = None
    """The study that it belongs to."""
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Its arm and its stage, in a study."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By name; numbers, texts, truth values and None."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Values at one moment of a run."""

    num_samples: int
    """Samples that have arrived: the horizontal axis."""
    train_seconds: float
    """The training clock."""
    values: Mapping[str, float]
    """Finite, by name: ``train/loss``, ``eval/loss``, ``delay/p95``, ..."""


class Tracker(Protocol):
    """One run in one tracker. Made, used and closed by one thread; whatever it raises ends nothing but itself."""

    def send(self, points: Sequence[Point]) -> None:
        """Hand over points, in order."""

    def close(self, status: str) -> None:
        """Say how the run ended, and leave nothing unwritten."""
