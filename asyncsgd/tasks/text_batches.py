"""Batches of rows: how many rows, and which of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncsgd.data.documents import evenly
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import Samples

Batch = dict[str, Any]
"""Padded rows: at least ``input_ids``, int64 `(B, L)`. Owned by the caller."""

Draw = Callable[[int], np.random.Generator]
"""The random numbers of a row of a batch, for what is drawn anew each time."""


def by_length(samples: Samples, batch_size: int, limit: int = 0) -> list[np.ndarray]:
    """The rows of evaluation batches, similar lengths together: at most `limit` rows, evenly over all; 0 for all."""
    chosen = evenly(len(samples), limit)
    shortest_first = np.argsort(samples.lengths[chosen], kind="stable")
    rows = chosen[shortest_first]
    return [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
    """Batches that are the same for every seed and in every mode."""

    collate: Callable[[Samples, np.ndarray, Draw], Batch]
    samples: Samples
    rows: Sequence[np.ndarray]
    """The numbers of the rows of each batch, int64."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        numbers = self.rows[index]

        def draw(row: int) -> np.random.Generator:
            return generator(0, Purpose.EVALUATION, 0, int(numbers[row]))

        return self.collate(self.samples, numbers, draw)
