"""The data of tasks whose samples are the items of a map-style torch Dataset."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from asyncsgd.data.order import batches_of_epochs
from asyncsgd.data.random import Purpose, generator, item_seed
from asyncsgd.errors import RunError, UsageError
from asyncsgd.tasks.base import Batch, Batches, digest_tensors
from asyncsgd.tasks.models import generators_restored

FINGERPRINT_ITEMS = 64
"""At most so many items are read for the fingerprint of a dataset."""


class DatasetData:
    """The items of a torch Dataset as `asyncsgd.tasks.base.Data`; an item is read when its batch is asked for.

    The training samples come in shuffled epochs, as those of `asyncsgd.TensorData` do: sample p of a stream is

        order_e[p mod S],    e = p div S,    order_e a permutation that (seed, stream, e) names

    over the S samples of an epoch, which are all items unless drop_last is set, and batch i has samples i B to i B + B
    - 1. Of a DataLoader that does not shuffle, order_e is the order of the items. While an item is read, the default
    generators of torch, numpy and Python are seeded with a function of (seed, stream, p), so that random transforms
    are the same in every process and in a replay; in the evaluation set they are seeded with a function of the item's
    number alone. The generators are afterwards as they were before.

    A DataLoader in place of a Dataset is taken apart: dataset, collate_fn, batch_size, drop_last, and whether it
    shuffles. Its processes, its generator and its worker_init_fn are not used. An evaluation is never shuffled, and its
    DataLoader may have another batch_size.

    Args:
        train, evaluation: each a Dataset with ``__getitem__`` and ``__len__``, or a DataLoader of one. With drop_last
            an epoch over N items has S = N - (N mod B) samples, those first in a permutation of all items, and an
            evaluation leaves out its last, shorter batch.
        batch_size: B, of the task; a training DataLoader must have the same.
        seed: names the orders and the random numbers of training.
        collate_fn: makes a batch from the list of its items; None: that of the DataLoader, and
            ``torch.utils.data.default_collate`` for a Dataset.

    Raises:
        UsageError: for data whose batch is no function of its number, e.g. an IterableDataset, or a DataLoader with a
            sampler of its own; for an empty dataset.

    >>> items = [{"x": float(number)} for number in range(5)]
    >>> data = DatasetData(items, items, batch_size=4, seed=0)
    >>> sorted(x for index in range(5) for x in data.batch(0, index)["x"].tolist()) == sorted([0.0, 1, 2, 3, 4] * 4)
    True
    """

    def __init__(
        self,
        train: Any,
        evaluation: Any,
        batch_size: int,
        seed: int,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {batch_size}")
        self._train = _taken_apart(train, "train", batch_size, collate_fn)
        if self._train.batch_size != batch_size:
            raise UsageError(
                f"the DataLoader of train has batch_size={self._train.batch_size}, and the task has {batch_size}, "
                f"in which its samples are counted; give both the same"
            )
        self._seed = seed
        self._batch_size = batch_size
        self.num_train_samples = self._train.size  # in an epoch
        if self._train.drop_last:
            self.num_train_samples -= self._train.size % batch_size
        if self.num_train_samples == 0:
            raise UsageError(
                f"train has {self._train.size} items, fewer than a batch of {batch_size}, and drop_last leaves them "
                f"out; leave drop_last out"
            )
        self.evaluation: Mapping[str, Batches] = {
            "main": _InTheirOrder(_taken_apart(evaluation, "evaluation", batch_size, collate_fn))
        }
        self._rows_of = functools.cache(self._of_stream)

    def batch(self, stream: int, index: int) -> Batch:
        """Batch `index` of a stream: its items are read, and collated."""
        rows = self._rows_of(stream)(index)
        first = index * self._batch_size
        items = []
        with generators_restored():
            for place, row in enumerate(rows.tolist()):
                _seed_generators(item_seed(self._seed, stream, first + place))
                items.append(self._train.item(row))
            return self._train.collate(items)

    def fingerprint(self) -> str | None:
        """16 hexadecimal digits that change with some of the training items, and with their number; the same for every
        seed. None where no batch of an item has a tensor. Where collate_fn makes no batch of a single item, since it
        compares items with one another, the item itself is read.
        """
        size = self._train.size
        chosen = np.unique(np.linspace(0, size - 1, FINGERPRINT_ITEMS).astype(int))
        digest = hashlib.sha256(f"{size} items".encode())
        num_tensors = 0
        with generators_restored():
            for row in chosen.tolist():
                _seed_generators(row)
                item = self._train.item(row)
                try:
                    batch = self._train.collate([item])
                except Exception:  # a user's own function may raise any
                    batch = item
                num_tensors += digest_tensors(digest, batch)
        return digest.hexdigest()[:16] if num_tensors else None

    def _of_stream(self, stream: int) -> Callable[[int], np.ndarray]:
        """A function from the index of a batch to the numbers of its items."""
        size = self._train.size

        @functools.lru_cache(maxsize=2)  # a batch may lie in two epochs
        def order_of(epoch: int) -> np.ndarray:
            if not self._train.shuffles:
                return np.arange(size)
            return generator(self._seed, Purpose.ORDER, stream, epoch).permutation(size)

        return batches_of_epochs(order_of, self.num_train_samples, self._batch_size)


@dataclasses.dataclass(frozen=True)
class _Items:
    """A dataset, and how its batches are made."""

    dataset: Any
    name: str
    size: int
    collate: Callable[[list[Any]], Batch]
    batch_size: int
    drop_last: bool = False
    shuffles: bool = True

    def item(self, row: int) -> Any:
        """Read an item.

        Raises:
            RunError: naming the item that cannot be read.
        """
        try:
            return self.dataset[row]
        except Exception as error:
            raise RunError(f"item {row} of {self.name} cannot be read: {type(error).__name__}: {error}") from error


class _InTheirOrder:
    """The batches of an evaluation set: the items in their order, the last batch shorter or left out."""

    def __init__(self, items: _Items) -> None:
        self._items = items
        self._num_batches = items.size // items.batch_size
        if items.size % items.batch_size and not items.drop_last:
            self._num_batches += 1
        if self._num_batches == 0:
            raise UsageError(
                f"evaluation has {items.size} items, fewer than a batch of {items.batch_size}, and drop_last leaves "
                f"them out; leave drop_last out"
            )

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int, /) -> Batch:
        source = self._items
        first = index * source.batch_size
        end = min(first + source.batch_size, source.size)
        items = []
        with generators_restored():
            for row in range(first, end):
                _seed_generators(row)
                items.append(source.item(row))
            return source.collate(items)


def _taken_apart(source: Any, name: str, batch_size: int, collate_fn: Callable[[list[Any]], Batch] | None) -> _Items:
    """A dataset or a DataLoader as items.

    Raises:
        UsageError: where a batch would be no function of its number.
    """
    if not isinstance(source, DataLoader):
        size = _size_of(source, name)
        return _Items(source, name, size, collate_fn or default_collate, batch_size)
    size = _size_of(source.dataset, name)
    sampler = source.sampler
    has_own_sampler = type(sampler) not in (RandomSampler, SequentialSampler)
    shuffles = isinstance(sampler, RandomSampler)
    if isinstance(sampler, RandomSampler):
        has_own_sampler |= sampler.replacement or sampler.num_samples != size
    if has_own_sampler:
        raise UsageError(
            f"the DataLoader of {name} has a sampler of its own, {type(sampler).__name__}, and here the run's seed "
            f"names the order, so that every worker and a replay find the same batch under a number; give the dataset, "
            f"or a DataLoader with shuffle=True"
        )
    if type(source.batch_sampler) is not BatchSampler or source.batch_size is None:
        raise UsageError(
            f"the DataLoader of {name} has no batch_size of its own, and every gradient here is of as many samples; "
            f"give the dataset and a collate_fn, or a DataLoader with a batch_size"
        )
    return _Items(
        source.dataset,
        name,
        size,
        collate_fn or source.collate_fn,
        source.batch_size,
        source.drop_last,
        shuffles,
    )


def _size_of(dataset: Any, name: str) -> int:
    """How many items a map-style dataset has.

    Raises:
        UsageError: if it is none, or empty.
    """
    kind = type(dataset).__name__
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UsageError(
            f"{name} is of type {kind}, which gives no item by its number, and a batch must be a function of its "
            f"number, so that any worker can compute it, and a replay again; give a dataset with __getitem__ and "
            f"__len__"
        )
    size = len(dataset)
    if size == 0:
        raise UsageError(f"{name} has no items; give a dataset with at least one")
    return size


def _seed_generators(seed: int) -> None:
    """Seed the default generators of torch, numpy and Python."""
    torch.random.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that transforms of others draw from
    random.seed(seed)
