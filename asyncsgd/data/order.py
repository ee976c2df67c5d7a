"""Which samples a batch has: a pure function of (seed, stream, index).

Unless samples are drawn at random, runs of `RUN` consecutive batches hold samples of about one length, so that padding
is small and synchronous workers, which take consecutive indices, wait for hardware and not for data.
"""

from __future__ import annotations

import numpy as np

from asyncsgd.data.random import Purpose, generator
from asyncsgd.errors import UsageError

RUN = 8


def is_by_length(sampling: str) -> bool:
    """Whether the samples of a batch are of about one length.

    >>> is_by_length("group_by_length"), is_by_length("random")
    (True, False)
    """
    names = ("group_by_length", "random")
    if sampling not in names:
        raise UsageError(f"--sampling takes {' or '.join(names)}, got {sampling!r}")
    return sampling == names[0]


class Order:
    """The samples of each batch of an endless stream: epoch after epoch of samples at random, or of runs of similar
    length.

    An epoch is as many whole runs of `RUN` batches as the samples fill. If there are too few samples for a run, it is
    whole batches; if there are too few for a batch, samples are repeated. The samples left over differ from epoch to
    epoch.

    Args:
        lengths: tokens of each sample, `(S,)`, S >= 1.
        batch_size: B.
        seed, stream: name the order.
        by_length: whether the samples of a batch are of about one length.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int, stream: int, by_length: bool = True) -> None:
        self._lengths, self._batch_size, self._by_length = lengths, batch_size, by_length
        self._seed, self._stream = seed, stream
        batches = len(lengths) // batch_size
        self.batches_per_epoch = max(1, batches // RUN * RUN or batches)
        self._epoch = -1
        self._order = np.empty((0, 0), dtype=np.int64)

    def samples(self, index: int) -> np.ndarray:
        """The samples of batch `index`, int64 `(B,)`, a view valid until the next epoch is asked for."""
        epoch, position = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffle(epoch), epoch
        return self._order[position]

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The samples of each batch of an epoch, `(batches_per_epoch, B)`."""
        draw = generator(self._seed, Purpose.ORDER, self._stream, epoch)
        order = draw.permutation(len(self._lengths))
        wanted = self.batches_per_epoch * self._batch_size
        order = np.resize(order, wanted)  # leaves out the rest; repeats samples where a batch is larger than the corpus
        if self._by_length:
            order = order[np.argsort(self._lengths[order], kind="stable")]
        # Fewer batches than a run, or a multiple of it: nothing is ever left behind the last run.
        runs = order.reshape(-1, min(RUN, self.batches_per_epoch) * self._batch_size)
        runs = draw.permuted(runs[draw.permutation(len(runs))], axis=1)
        return runs.reshape(self.batches_per_epoch, self._batch_size)
