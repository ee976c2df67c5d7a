"""Which samples a batch has: a pure function of (seed, stream, index).

An order is a rule for that, and has a number, which is `Task.sample_order` and stands in a run's settings, records and
checkpoints. Where it stands nowhere, the run is of the time when there was one order only, the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from asyncsgd.data.first_order import first_order
from asyncsgd.data.random import Purpose, generator
from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import FIRST, NEWEST

RUN = 8
"""Consecutive batches whose samples are of about one length, so that padding is small and synchronous workers, which
take consecutive indices, wait for hardware and not for data."""


def is_by_length(sampling: str) -> bool:
    """Whether the samples of a batch are of about one length.

    >>> is_by_length("group_by_length"), is_by_length("random")
    (True, False)
    """
    names = ("group_by_length", "random")
    if sampling not in names:
        raise UsageError(f"--sampling takes {' or '.join(names)}, got {sampling!r}")
    return sampling == names[0]


def whole_epochs(
    lengths: np.ndarray, batch_size: int, seed: int, stream: int, by_length: bool = True
) -> Callable[[int], np.ndarray]:
    """Order 2: epochs follow each other without a seam, and every epoch has every sample once. Over S samples,

        position p of the stream is sample p mod S of epoch p div S,

    and batch i has the positions i B to i B + B - 1, so a batch may end one epoch and begin the next.

    By length, the batches that lie within an epoch are made so: sort their samples by length, cut them in groups of
    `RUN` batches, of which the last one may be shorter, shuffle the groups, and shuffle the samples of each group. A
    batch that lies in two epochs has samples of any length.

    Args:
        lengths: tokens of each sample, `(S,)`, S >= 1.
        batch_size: B.
        seed, stream: name the order.
        by_length: whether the samples of a batch are of about one length.

    Returns:
        A function from the index of a batch to its samples, int64 `(B,)`, new.

    >>> samples = whole_epochs(np.array([3, 9, 4, 8, 5]), batch_size=2, seed=0, stream=0)
    >>> sorted(sample for index in range(5) for sample in samples(index).tolist())
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """
    size = len(lengths)

    @functools.lru_cache(maxsize=2)  # a batch may lie in two epochs
    def epoch_at(epoch: int) -> np.ndarray:
        draw = generator(seed, Purpose.ORDER, stream, epoch)
        order = draw.permutation(size)
        if not by_length:
            return order
        # The first samples, (-epoch S) mod B of them, belong to a batch that began in the epoch before.
        first = min(-epoch * size % batch_size, size)
        end = size - (size - first) % batch_size
        inside = order[first:end]
        by_size = inside[np.argsort(lengths[inside], kind="stable")]
        group_size = RUN * batch_size
        groups = [by_size[start : start + group_size] for start in range(0, len(by_size), group_size)]
        shuffled = [draw.permutation(groups[number]) for number in draw.permutation(len(groups))]
        return np.concatenate([order[:first], *shuffled, order[end:]])

    return batches_of_epochs(epoch_at, size, batch_size)


def batches_of_epochs(order_of: Callable[[int], np.ndarray], size: int, batch_size: int) -> Callable[[int], np.ndarray]:
    """Batches of B samples from epochs of S samples that follow each other without a seam.

    Args:
        order_of: gives the order of the samples in an epoch, by its number; at least S of them.
        size: S.
        batch_size: B.

    Returns:
        A function from the index of a batch to its samples, int64 `(B,)`, new: position p of the stream, of i B to
        i B + B - 1, is sample ``order_of(p div S)[p mod S]``.
    """

    def samples(index: int) -> np.ndarray:
        first = index * batch_size
        epochs, places = np.divmod(np.arange(first, first + batch_size), size)
        parts = []
        for epoch in np.unique(epochs):
            order = order_of(int(epoch))
            parts.append(order[places[epochs == epoch]])
        return np.concatenate(parts)

    return samples


ORDERS: Mapping[int, Callable[..., Callable[[int], np.ndarray]]] = {FIRST: first_order, NEWEST: whole_epochs}
"""The function that makes each order, by the order's number."""
