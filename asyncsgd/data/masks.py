"""Which tokens of a sample are masked, and by what: BERT's 80/10/10 on the positions that a strategy chooses.

A chosen token becomes the mask token with probability 0.8, a random token with 0.1, and stays with 0.1 (Devlin,
Chang, Lee, Toutanova: BERT, NAACL 2019, section 3.1). Every sample gets at least one masked token, so no loss is a
division by zero.

A strategy is a class here and a line in `asyncsgd.data.mask_names`: a frozen dataclass whose fields bear the names of
settings. The fields of one that an installed package brings are parameters, as in ``--mask mine:longest=3``.

Shapes: L tokens of a sample, M masked tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from asyncsgd.settings.choices import Named


class Sample(NamedTuple):
    """A sample and what is known of its tokens. The arrays are views, not to be changed."""

    ids: ndarray
    """int32 `(L,)`, without special tokens and padding."""
    word_starts: ndarray
    """bool `(L,)`, True where a token begins a word. A sample may begin in the middle of a word."""
    candidates: ndarray | None = None
    """bool `(L,)`, the tokens that a finder found; None where nobody has looked."""

    def words(self) -> tuple[ndarray, ndarray]:
        """The number of each token's word, int64 `(L,)`, from 0, and the place of each word's first token.

        >>> [part.tolist() for part in Sample(np.array([7, 8, 9]), np.array([True, False, True])).words()]
        [[0, 0, 1], [0, 2]]
        """
        starts = self.word_starts.copy()
        starts[0] = True
        return np.cumsum(starts) - 1, np.flatnonzero(starts)


@dataclasses.dataclass(frozen=True)
class Strategy(Named):
    """How the tokens to predict are chosen."""

    def choose(self, sample: Sample, probability: float, generator: Generator) -> ndarray:
        """Choose about this share of a sample's tokens. The result must follow from the sample and what is drawn.

        Returns:
            bool `(L,)`, new, True at least once.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ByToken(Strategy):
    """Each token on its own: it is chosen if its draw is below the probability."""

    name: ClassVar[str] = "token"

    def choose(self, sample: Sample, probability: float, generator: Generator) -> ndarray:
        draws = generator.random(len(sample.ids))
        return _below(draws, probability)


@dataclasses.dataclass(frozen=True)
class ByWord(Strategy):
    """Whole words: the draw of a word's first token decides for all its tokens."""

    name: ClassVar[str] = "word"

    def choose(self, sample: Sample, probability: float, generator: Generator) -> ndarray:
        words, first = sample.words()
        draws = generator.random(len(words))
        is_chosen = _below(draws[first], probability)
        return is_chosen[words]


def _below(draws: ndarray, probability: float) -> ndarray:
    """Where `draws` are below `probability`; the smallest where none is."""
    chosen = draws < probability
    chosen[draws.argmin()] |= not chosen.any()
    return chosen


@dataclasses.dataclass(frozen=True)
class ByCandidate(Strategy):
    """Whole words, those with a candidate first, and exactly as many tokens as `ByToken` chooses with the same draws.

    Words are taken in random order as long as they fit what is left of the budget. If none fits, the beginning of one
    is taken, so that the number of tokens is exact. If a sample has fewer candidates than wanted, or none, other words
    fill the budget.
    """

    name: ClassVar[str] = "candidates"
    fills: ClassVar[bool] = True
    """Whether other words fill the budget where there are too few candidates."""
    candidate_share: float = 1.0
    """Share of the chosen tokens that come from words with a candidate, in [0, 1]; on average, since a number of tokens
    is whole. The rest comes from all words that are left."""

    def choose(self, sample: Sample, probability: float, generator: Generator) -> ndarray:
        words = _Words(sample)
        draws = generator.random(len(sample.ids))
        budget = int(_below(draws, probability).sum())
        from_candidates = budget
        share = budget * self.candidate_share
        if share < budget:
            from_candidates = int(share + generator.random())
        words.take(words.candidates, from_candidates, generator)
        if self.fills:
            words.take(words.whole, budget - words.num_chosen, generator)
            # Nothing but the rest of a cut word may be left.
            words.take(words.all, budget - words.num_chosen, generator)
        return words.chosen


class OnlyCandidates(ByCandidate):
    """As `ByCandidate`, but no other word is chosen, so there may be fewer tokens. Samples must have a candidate."""

    fills = False


class _Words:
    """The words of a sample, and the tokens chosen of them: of each word, those before its place in `_next`."""

    def __init__(self, sample: Sample) -> None:
        self._words, self._first = sample.words()
        self._next = self._first.copy()
        self._end = np.append(self._first[1:], len(self._words))
        self.all = np.arange(len(self._first))
        self.candidates = self.all[:0]
        if sample.candidates is not None:
            self.candidates = np.unique(self._words[sample.candidates])

    @property
    def chosen(self) -> ndarray:
        """The chosen tokens, bool `(L,)`, new."""
        places = np.arange(len(self._words))
        return places < self._next[self._words]

    @property
    def num_chosen(self) -> int:
        return int(self.chosen.sum())

    @property
    def whole(self) -> ndarray:
        """The words of which nothing is chosen."""
        return self.all[self._next == self._first]

    def take(self, words: ndarray, limit: int, generator: Generator) -> None:
        """Choose `limit` tokens of some words, or all they have."""
        rest = generator.permutation(words) if limit else words
        while limit and len(rest):
            left = self._end[rest] - self._next[rest]
            ends = np.cumsum(left)
            number = int(np.searchsorted(ends, limit, side="right"))
            if number:
                taken = rest[:number]
                self._next[taken] = self._end[taken]
                limit -= int(ends[number - 1])
                rest = rest[number:]
                continue
            fitting = np.flatnonzero(left <= limit)
            if len(fitting):
                first = fitting[0]
                rest = np.concatenate([rest[[first]], np.delete(rest, first)])
            else:  # no word fits: the beginning of one
                self._next[rest[0]] += limit
                limit = 0


@dataclasses.dataclass(frozen=True)
class Masking:
    """How samples are masked: random replacements are in [0, vocabulary_size) without the special ids."""

    strategy: Strategy
    probability: float
    """Share of the tokens (words) that is chosen, in (0, 1)."""
    mask_id: int
    vocabulary_size: int
    special_ids: tuple[int, ...]

    def __call__(self, sample: Sample, generator: Generator) -> tuple[ndarray, ndarray]:
        """Return (masked ids `(L,)`, positions `(M,)`, M >= 1) of one sample, both new."""
        chosen = self.strategy.choose(sample, self.probability, generator)
        positions = np.flatnonzero(chosen)
        draws = generator.random((2, len(sample.ids)))
        fate, replacement = draws[:, positions]
        masked = np.array(sample.ids)
        masked[positions[fate < 0.8]] = self.mask_id
        swapped = fate >= 0.9
        numbers = replacement[swapped] * len(self._ordinary_ids)
        masked[positions[swapped]] = self._ordinary_ids[numbers.astype(np.int64)]
        return masked, positions

    @functools.cached_property
    def _ordinary_ids(self) -> ndarray:
        """The ids that may replace a token."""
        return np.setdiff1d(np.arange(self.vocabulary_size), self.special_ids)
