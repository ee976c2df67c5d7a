"""The order that all runs had before orders had numbers. It stays, so that these runs can be replayed and resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from asyncsgd.data.random import Purpose, generator

RUN = 8
"""Consecutive batches of about one length. It belongs to this order for good, whatever others take."""


def first_order(
    lengths: np.ndarray, batch_size: int, seed: int, stream: int, by_length: bool = True
) -> Callable[[int], np.ndarray]:
    """Order 1: epochs that are cut to whole runs of `RUN` batches. The samples left over, which differ from epoch to
    epoch, are not in it.

    If there are too few samples for a run, an epoch is whole batches; if there are too few for a batch, samples are
    repeated.

    Args and Returns: as of `asyncsgd.data.order.whole_epochs`; but the samples of a batch are a view.
    """
    batches = len(lengths) // batch_size
    per_epoch = max(1, batches // RUN * RUN or batches)

    @functools.lru_cache(maxsize=1)
    def batches_of(epoch: int) -> np.ndarray:
        """The samples of each batch of an epoch, `(per_epoch, B)`."""
        draw = generator(seed, Purpose.ORDER, stream, epoch)
        order = draw.permutation(len(lengths))
        order = np.resize(order, per_epoch * batch_size)
        if by_length:
            order = order[np.argsort(lengths[order], kind="stable")]
        samples_per_run = min(RUN, per_epoch) * batch_size
        runs = order.reshape(-1, samples_per_run)
        shuffled = runs[draw.permutation(len(runs))]
        permuted = draw.permuted(shuffled, axis=1)
        return permuted.reshape(per_epoch, batch_size)

    def samples(index: int) -> np.ndarray:
        epoch, place = divmod(index, per_epoch)
        samples_of_batch: np.ndarray = batches_of(epoch)[place]
        return samples_of_batch

    return samples
