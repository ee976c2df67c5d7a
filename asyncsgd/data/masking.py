"""Which tokens of a sample are masked, and by what: BERT's 80/10/10 on single tokens or on whole words.

A chosen token becomes the mask token with probability 0.8, a random token with 0.1, and stays with 0.1 (Devlin,
Chang, Lee,
Toutanova: BERT, NAACL 2019, section 3.1). Every sample gets at least one masked token, so no loss is a division by
zero.

Shapes: L tokens of a sample, M masked tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Choose = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def by_token(draws: np.ndarray, word_starts: np.ndarray, probability: float) -> np.ndarray:
    """Choose each token on its own: bool `(L,)` from uniform `draws` `(L,)`."""
    chosen = draws < probability
    if not chosen.any():
        chosen[draws.argmin()] = True
    return chosen


def by_word(draws: np.ndarray, word_starts: np.ndarray, probability: float) -> np.ndarray:
    """Choose whole words: a word's first draw decides for all its tokens. `word_starts` is bool `(L,)`.

    >>> by_word(np.array([0.1, 0.9, 0.8]), np.array([True, False, True]), 0.15).tolist()
    [True, True, False]
    """
    starts = word_starts.copy()
    starts[0] = True  # a sample may begin in the middle of a word
    word = np.cumsum(starts) - 1
    return by_token(draws[starts], starts, probability)[word]


@dataclasses.dataclass(frozen=True)
class Masking:
    """How samples are masked.

    Args:
        choose: `by_token` or `by_word`.
        probability: share of the tokens (words) that is chosen, in (0, 1).
        mask_id: the tokenizer's mask token.
        vocabulary_size: random replacements are drawn from [0, vocabulary_size) without the special tokens.
        special_ids: ids that never replace a token.
    """

    choose: Choose
    probability: float
    mask_id: int
    vocabulary_size: int
    special_ids: tuple[int, ...]

    def __call__(
        self, ids: np.ndarray, word_starts: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (masked ids `(L,)`, positions `(M,)`, M >= 1) for one sample's ids `(L,)`; `ids` is not changed."""
        draws = generator.random((3, len(ids)))
        positions = np.flatnonzero(self.choose(draws[0], word_starts, self.probability))
        masked = np.array(ids)
        fate, replacement = draws[1, positions], draws[2, positions]
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
