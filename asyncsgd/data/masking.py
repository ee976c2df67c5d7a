"""Which tokens of a sample are masked, and by what: BERT's 80/10/10 on the positions that a strategy chooses.

A chosen token becomes the mask token with probability 0.8, a random token with 0.1, and stays with 0.1 (Devlin,
Chang, Lee, Toutanova: BERT, NAACL 2019, section 3.1). Every sample gets at least one masked token, so no loss is a
division by zero.

A strategy sees the sample and its side arrays. A new one is a class here and a line in `STRATEGIES`.

Shapes: L tokens of a sample, M masked tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A sample and what is known of its tokens. The arrays are views, not to be changed.

    Args:
        ids: int32 `(L,)`, without special tokens and padding.
        word_starts: bool `(L,)`, True where a token begins a word. A sample may begin in the middle of a word.
        candidates: bool `(L,)`, the tokens that a finder found; None where nobody has looked.
    """

    ids: np.ndarray
    word_starts: np.ndarray
    candidates: np.ndarray | None = None

    @property
    def words(self) -> np.ndarray:
        """int64 `(L,)`, the number of each token's word, from 0.

        >>> Sample(np.array([7, 8, 9]), np.array([True, False, True])).words.tolist()
        [0, 0, 1]
        """
        starts = self.word_starts.copy()
        starts[0] = True
        return np.cumsum(starts) - 1


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """How positions are chosen. Subclasses are frozen dataclasses; their fields bear the names of settings."""

    @abc.abstractmethod
    def choose(self, sample: Sample, probability: float, generator: np.random.Generator) -> np.ndarray:
        """Choose positions: a pure function of the sample and of what it draws from `generator`.

        Args:
            probability: share of the tokens that is to be chosen, in (0, 1).

        Returns:
            bool `(L,)`, new, True at least once.
        """


@dataclasses.dataclass(frozen=True)
class ByToken(Strategy):
    """Each token on its own: it is chosen if its draw is below the probability."""

    def choose(self, sample: Sample, probability: float, generator: np.random.Generator) -> np.ndarray:
        return _below(generator.random(len(sample.ids)), probability)


@dataclasses.dataclass(frozen=True)
class ByWord(Strategy):
    """Whole words: the draw of a word's first token decides for all its tokens."""

    def choose(self, sample: Sample, probability: float, generator: np.random.Generator) -> np.ndarray:
        words = sample.words
        first = np.flatnonzero(np.diff(words, prepend=-1))
        return _below(generator.random(len(words))[first], probability)[words]


def _below(draws: np.ndarray, probability: float) -> np.ndarray:
    """Where `draws` are below `probability`; the smallest where none is."""
    chosen = draws < probability
    if not chosen.any():
        chosen[draws.argmin()] = True
    return chosen


STRATEGIES: Mapping[str, type[Strategy]] = {"token": ByToken, "word": ByWord}
"""By the name that the user types."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """How samples are masked.

    Args:
        strategy: chooses the positions.
        probability: share of the tokens (words) that is chosen, in (0, 1).
        mask_id: the tokenizer's mask token.
        vocabulary_size: random replacements are drawn from [0, vocabulary_size) without the special tokens.
        special_ids: ids that never replace a token.
    """

    strategy: Strategy
    probability: float
    mask_id: int
    vocabulary_size: int
    special_ids: tuple[int, ...]

    def __call__(self, sample: Sample, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (masked ids `(L,)`, positions `(M,)`, M >= 1) of one sample, both new."""
        positions = np.flatnonzero(self.strategy.choose(sample, self.probability, generator))
        fate, replacement = generator.random((2, len(sample.ids)))[:, positions]
        masked = np.array(sample.ids)
        masked[positions[fate < 0.8]] = self.mask_id
        swapped = fate >= 0.9
        masked[positions[swapped]] = self._ordinary_ids[
            (replacement[swapped] * len(self._ordinary_ids)).astype(np.int64)
        ]
        return masked, positions

    def __post_init__(self) -> None:
        ordinary = np.setdiff1d(np.arange(self.vocabulary_size), self.special_ids)
        object.__setattr__(self, "_ordinary_ids", ordinary)

    _ordinary_ids: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
