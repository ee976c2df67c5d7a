"""Random numbers at any place of a stream, and the service times of workers that are drawn from them in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BLOCK = 32
"""Draws of one worker that are made together. It is part of the streams: another number gives other seconds."""


class Streams:
    """A generator that can be placed at any (worker, position, part); up to 2^64 draws do not reach the next place.

    Setting the state is several times cheaper than making a Philox generator, which also asks the system for entropy.
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed % 2**64, purpose], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state

    def at(self, worker: int = 0, position: int = 0, part: int = 0) -> np.random.Generator:
        """Return the generator, valid until the next call."""
        self._state["state"]["counter"][:] = (0, position, worker, part)
        self._bits.state = self._state
        return self._generator


class Sampler:
    """The service times of workers 0 to N - 1, in blocks; what `Speeds.on` returns.

    >>> Sampler(2, lambda worker, block: 1.5 + worker).draw_one(worker=1, draw=70)
    2.5

    Args:
        num_workers: N.
        block: of (worker, k), the seconds of draws `BLOCK` k to `BLOCK` k + `BLOCK` - 1 or one number for all of them;
            inf where the worker never answers.
        factors: of each worker, where real gradients are slowed relative to what they have taken.
    """

    def __init__(
        self,
        num_workers: int,
        block: Callable[[int, int], float | Sequence[float] | Floats],
        factors: Sequence[float] | None = None,
    ) -> None:
        self.num_workers, self._factors = num_workers, factors

        @functools.lru_cache(2 * num_workers)
        def seconds(worker: int, number: int) -> list[float]:
            drawn = block(worker, number)
            values: list[float] = (drawn if isinstance(drawn, np.ndarray) else np.full(BLOCK, drawn, float)).tolist()
            return values

        self._seconds = seconds

    def draw_one(self, worker: int, draw: int) -> float:
        """Return the seconds of the gradient before which `worker` had *started* `draw` others.

        A pure function of (worker, draw), in any order. `draw` is neither a version nor a dispatch number.
        """
        return self._seconds(worker, draw // BLOCK)[draw % BLOCK]

    def stretched(self, worker: int, draw: int, computed_seconds: float) -> float:
        """Return how long a *real* gradient is to take in all, when its computation took `computed_seconds`.

        A worker can be held back, not sped up: max(computed_seconds, drawn seconds); the relative model `Slow` gives
        computed_seconds * factor instead. The caller waits for the difference; inf: the worker never answers.
        """
        if self._factors is not None:
            return computed_seconds * self._factors[worker]
        return max(computed_seconds, self.draw_one(worker, draw))
