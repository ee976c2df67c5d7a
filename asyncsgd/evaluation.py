"""Exact evaluation of one frozen version: the whole evaluation set, each batch once, sums before means.

The set's batches are fixed (`EvaluationBatches`), so a worker's shard is every N-th of them and any number of
workers computes the same numbers. Losses and hits are summed over masked tokens in float64 and divided once, so no
mean of means appears and no padding is counted."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncsgd.data.batching import EvaluationBatches
from asyncsgd.objectives.masked_lm import MaskedLM, Sums


def evaluate_shard(
    objective: MaskedLM, batches: EvaluationBatches, shard: int, num_shards: int, device: torch.device
) -> Sums:
    """Return the sums over batches `shard`, `shard` + `num_shards`, ...; no collective, so nobody waits for anybody."""
    return total(objective.sums(batches.batch(index).to(device)) for index in range(shard, len(batches), num_shards))


def total(sums: Iterable[Sums]) -> Sums:
    """Add sums up; an empty iterable gives zeros."""
    return sum(sums, start=Sums())
