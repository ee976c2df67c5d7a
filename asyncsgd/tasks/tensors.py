"""The data of tasks whose samples fit in memory as tensors."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncsgd.data.order import batches_of_epochs
from asyncsgd.data.random import Purpose, generator
from asyncsgd.errors import UsageError
from asyncsgd.tasks.base import Batch, Batches, Data, digest_tensors, map_tensors, row_counts, tensors_in
from asyncsgd.tasks.map_style import DatasetData

InMemory = Any
"""Tensors or numpy arrays of one length, one row a sample: one of them, or a tuple, list or mapping of them."""


class TensorData:
    """Samples in memory, as `asyncsgd.tasks.base.Data`.

    Each stream goes through shuffled epochs, one directly after the other: sample p of a stream, counted from 0, is

        order_e[p mod S],    e = p div S,    order_e a permutation that (seed, stream, e) names

    over the S training samples, and batch i has samples i B to i B + B - 1. So every epoch has every sample once,
    every batch has B samples, and a batch may end one epoch and begin the next.

    Args:
        train: the training samples.
        evaluation: the samples of the evaluation set ``main``. Its batches are views of B rows in their order; the last
            one may be shorter.
        batch_size: B, samples in a batch.
        seed: names the orders of training.

    Raises:
        UsageError: if there are no samples, or tensors of different lengths.

    >>> data = TensorData({"x": torch.arange(5)}, {"x": torch.arange(2)}, batch_size=4, seed=0)
    >>> sorted(torch.cat([data.batch(0, index)["x"] for index in range(5)]).tolist()) == sorted([*range(5)] * 4)
    True
    """

    def __init__(self, train: InMemory, evaluation: InMemory, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {batch_size}")
        self.train, self.num_train_samples = _tensors(train, "train")
        main, num_evaluation = _tensors(evaluation, "evaluation")
        batches = []
        for first in range(0, num_evaluation, batch_size):
            rows_of_batch = operator.itemgetter(slice(first, first + batch_size))
            batches.append(map_tensors(rows_of_batch, main))
        self.evaluation: Mapping[str, Batches] = {"main": batches}
        self._batch_size = batch_size
        self._seed = seed
        # Two, since a batch may lie in two epochs.
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def batch(self, stream: int, index: int) -> Batch:
        """Batch `index` of a stream: new tensors of `batch_size` rows."""
        order_of = functools.partial(self._order, stream)
        batches = batches_of_epochs(order_of, self.num_train_samples, self._batch_size)
        rows = torch.from_numpy(batches(index))
        return map_tensors(lambda tensor: tensor[rows], self.train)

    def _shuffle(self, stream: int, epoch: int) -> np.ndarray:
        """The order of the samples in an epoch of a stream, int64 `(S,)`."""
        draw = generator(self._seed, Purpose.ORDER, stream, epoch)
        return draw.permutation(self.num_train_samples)


FINGERPRINT_BATCHES = 64
"""At most so many batches are read for the fingerprint of training data that are made batch by batch."""


def train_fingerprint(data: Data, batch_size: int, samples: int | None) -> str | None:
    """16 hexadecimal digits that change with the training samples.

    - `TensorData`: with any of them.
    - `DatasetData`: with their number and with up to 64 of them.
    - Other data: with those of the first batches of stream 0, at most 64 and no more than a run of `samples` takes. A
      slash and the batch size follow, since only such fingerprints of one batch size can be compared. Where fewer than
      64 batches were read, an x and their number follow too.

    None where no batch has a tensor. Data that end early, by an exception, are read up to there.

    Args:
        samples: how many training samples the run takes; None if there is no limit.

    >>> rows = torch.arange(5)
    >>> train_fingerprint(TensorData(rows, rows, batch_size=4, seed=0), 4, None)
    '281b02b10f5f4997'
    """
    digest = hashlib.sha256()
    if isinstance(data, TensorData) and type(data).batch is TensorData.batch:
        digest_tensors(digest, data.train)
        return digest.hexdigest()[:16]
    if isinstance(data, DatasetData) and type(data).batch is DatasetData.batch:
        return data.fingerprint()
    number = FINGERPRINT_BATCHES
    if samples is not None:
        number = min(number, math.ceil(samples / batch_size))
    num_read = 0
    num_tensors = 0
    try:
        for index in range(number):
            num_tensors += digest_tensors(digest, data.batch(0, index))
            num_read += 1
    except Exception:  # a user's own data may raise any; training says what is wrong, if it comes so far
        digest.update(b"ended")
    if not num_tensors:
        return None
    counted = "" if num_read == FINGERPRINT_BATCHES else f"x{num_read}"
    return f"{digest.hexdigest()[:16]}/{batch_size}{counted}"


def _tensors(samples: InMemory, name: str) -> tuple[InMemory, int]:
    """The samples with tensors in place of arrays, and how many there are."""
    try:
        samples = map_tensors(torch.as_tensor, samples, kinds=(np.ndarray,))
    except TypeError as error:
        raise UsageError(f"an array of {name} cannot be a tensor: {error}") from error
    lengths = row_counts(samples)
    for column in tensors_in(samples, columns=True):
        is_cut = isinstance(column, torch.Tensor)
        if not is_cut and len(column) in (lengths or [len(column)]):
            raise UsageError(
                f"a {type(column).__name__} of {name} has {len(column)} entries, and only tensors and arrays are cut "
                f"into batches; make it one of these"
            )
    if len(set(lengths)) != 1:
        raise UsageError(f"the tensors of {name} have {lengths} rows; give tensors of one length")
    if lengths[0] == 0:
        raise UsageError(f"{name} has no samples; give tensors with at least one row")
    return samples, lengths[0]
