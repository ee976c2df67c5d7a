"""Which samples a batch has, and the batch itself: pure functions of (seed, stream, index).

Unless samples are drawn at random, runs of `RUN` consecutive batches hold samples of about one length, so that padding
is small and synchronous workers, which take consecutive indices, wait for hardware and not for data.

Shapes: B sequences, L tokens per sequence (padded, special tokens included), M masked tokens of the batch.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from asyncsgd.data.masking import Masking
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokenization import Tokens
from asyncsgd.errors import UsageError

RUN = 8


@dataclasses.dataclass(frozen=True)
class Batch:
    """One padded, masked batch. Owned by the caller."""

    input_ids: Tensor
    """int64 `(B, L)`"""
    attention_mask: Tensor
    """int64 `(B, L)`, 1 for tokens and 0 for padding"""
    masked_positions: Tensor
    """int64 `(M,)`, ascending positions in the flattened `(B * L,)`; M >= B"""
    labels: Tensor
    """int64 `(M,)`, the true ids at `masked_positions`"""

    @property
    def num_samples(self) -> int:
        return len(self.input_ids)

    @property
    def num_masked(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a tokenizer puts around and behind a sample."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_id: int


def is_by_length(sampling: str) -> bool:
    """Whether the samples of a batch are of about one length.

    Raises:
        UsageError: for a name that is none.

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
        lengths: tokens of each sample, `(S,)`.
        batch_size: B.
        seed, stream: name the order.
        by_length: whether the samples of a batch are of about one length.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int, stream: int, by_length: bool = True) -> None:
        if len(lengths) == 0:
            raise ValueError("a stream needs at least one sample")
        self._lengths = np.asarray(lengths)
        self._batch_size = batch_size
        self._seed, self._stream, self._by_length = seed, stream, by_length
        batches = len(lengths) // batch_size
        self.batches_per_epoch = max(1, batches // RUN * RUN or batches)
        self._epoch = -1
        self._order = np.empty((0, 0), dtype=np.int64)

    def samples(self, index: int) -> np.ndarray:
        """Return the samples of batch `index`, int64 `(B,)`, a view valid until the next epoch is asked for."""
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
        run = min(RUN, self.batches_per_epoch) * self._batch_size
        runs = order[: wanted // run * run].reshape(-1, run)
        runs = draw.permuted(runs[draw.permutation(len(runs))], axis=1)
        # Fewer batches than a run, or a multiple of it: nothing is ever left behind the last run.
        return runs.reshape(self.batches_per_epoch, self._batch_size)


class Orders:
    """The samples of each batch of any stream; see `Order`."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int, by_length: bool) -> None:
        self._of = functools.cache(lambda stream: Order(lengths, batch_size, seed, stream, by_length))

    def samples(self, stream: int, index: int) -> np.ndarray:
        """Those of batch `index`, int64 `(B,)`, a view valid until the stream's next epoch is asked for."""
        return self._of(stream).samples(index)


class TrainingBatches:
    """The batches of a stream.

    A sample's mask is a function of (seed, stream, position), where position counts the samples drawn before it. So a
    sample has another mask in every epoch, and its mask does not depend on the batch size.
    """

    def __init__(
        self,
        tokens: Tokens,
        frame: Frame,
        masking: Masking,
        batch_size: int,
        seed: int,
        stream: int = 0,
        by_length: bool = True,
    ) -> None:
        self._tokens, self._frame, self._masking = tokens, frame, masking
        self._batch_size, self._seed, self._stream = batch_size, seed, stream
        self._order = Order(tokens.lengths, batch_size, seed, stream, by_length)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def batch(self, index: int) -> Batch:
        """Make batch `index`."""
        first = index * self._batch_size
        draws = [generator(self._seed, Purpose.MASK, self._stream, first + row) for row in range(self._batch_size)]
        return _assemble(self._tokens, self._order.samples(index), self._frame, self._masking, draws)


class EvaluationBatches:
    """The evaluation set in batches of similar length, with masks that are the same for every seed and mode.

    They are a function of `masking` and the sample alone; training batches have another masking.

    Args:
        num_samples: how many samples, evenly over the set; 0 for all.
    """

    def __init__(self, tokens: Tokens, frame: Frame, masking: Masking, num_samples: int, batch_size: int = 32) -> None:
        self._tokens, self._frame, self._masking = tokens, frame, masking
        total = len(tokens.lengths)
        count = min(num_samples or total, total)
        samples = np.arange(count) * total // count
        samples = samples[np.argsort(tokens.lengths[samples], kind="stable")]
        self._batches = [samples[first : first + batch_size] for first in range(0, count, batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        """Make batch `index` in [0, len)."""
        if not 0 <= index < len(self._batches):
            raise IndexError(f"there is no evaluation batch {index} of {len(self._batches)}")
        samples = self._batches[index]
        draws = [generator(0, Purpose.EVALUATION, 0, int(sample)) for sample in samples]
        return _assemble(self._tokens, samples, self._frame, self._masking, draws)


def _assemble(
    tokens: Tokens, samples: np.ndarray, frame: Frame, masking: Masking, draws: list[np.random.Generator]
) -> Batch:
    begin = len(frame.prefix)
    length = begin + int((tokens.starts[samples + 1] - tokens.starts[samples]).max()) + len(frame.suffix)
    input_ids = np.full((len(samples), length), frame.pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    positions, labels = [], []
    for row, (number, draw) in enumerate(zip(samples, draws, strict=True)):
        sample = tokens.sample(number)
        masked, chosen = masking(sample, draw)
        stop = begin + len(masked)
        input_ids[row, :begin] = frame.prefix
        input_ids[row, begin:stop] = masked
        input_ids[row, stop : stop + len(frame.suffix)] = frame.suffix
        attention_mask[row, : stop + len(frame.suffix)] = 1
        positions.append(row * length + begin + chosen)
        labels.append(sample.ids[chosen])
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(attention_mask),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
    )
