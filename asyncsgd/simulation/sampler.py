"""Random numbers at any place of a stream, and the service times of workers that are drawn from them in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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

    `draw_one` and `draw` are the same function of (worker, draw), bit for bit. They may be asked in any order; asking
    each worker for its draws in increasing order is the fast case. The latest block of each worker is kept, 256 bytes.
    Not to be shared between threads.

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
        self.num_workers = num_workers
        self._block = block
        self._factors = factors
        self._held = np.full(num_workers, -1, dtype=np.int64)
        self._seconds = np.empty((num_workers, BLOCK), dtype=np.float64)

    def draw(self, workers: Ints, draws: Ints) -> Floats:
        """Return the seconds of gradient `draws[j]` on worker `workers[j]`.

        Args:
            workers: `(k,)`, int64.
            draws: `(k,)`, int64; how many gradients that worker had *started* before this one, from 0. Neither a
                version nor a dispatch number.

        Returns:
            `(k,)`, float64, a new array.

        Raises:
            IndexError: for a worker or a draw that does not exist.
        """
        if len(workers) and (workers.min() < 0 or draws.min() < 0):
            raise IndexError("workers and draws are counted from 0")
        blocks, places = np.divmod(draws, BLOCK)
        seconds: Floats = self._seconds[workers, places]
        # One call may ask for a worker's draws of two blocks, so draws outside the held block are read one by one.
        for at in np.flatnonzero(self._held[workers] != blocks).tolist():
            seconds[at] = self.draw_one(int(workers[at]), int(draws[at]))
        return seconds

    def draw_one(self, worker: int, draw: int) -> float:
        """Return `draw(...)[0]` of one worker, in about a microsecond.

        Raises:
            IndexError: for a worker or a draw that does not exist.
        """
        if worker < 0 or draw < 0:
            raise IndexError(f"draw {draw} of worker {worker}: both are counted from 0")
        block = draw // BLOCK
        if self._held.item(worker) != block:
            self._seconds[worker] = self._block(worker, block)
            self._held[worker] = block
        return self._seconds.item(worker, draw % BLOCK)

    def stretched(self, worker: int, draw: int, computed_seconds: float) -> float:
        """Return how long a *real* gradient is to take in all, when its computation took `computed_seconds`.

        A worker can be held back, not sped up, so the answer is max(computed_seconds, drawn seconds); the relative
        model `Slow` gives computed_seconds * factor instead. The caller waits for the difference; inf says that the
        worker never answers.
        """
        if self._factors is not None:
            return computed_seconds * self._factors[worker]
        return max(computed_seconds, self.draw_one(worker, draw))
