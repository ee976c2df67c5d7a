"""Spans in tagged sentences, and their counts. numpy only.

Tags are in the BIO scheme: ``B-TYPE`` begins a span, ``I-TYPE`` continues it, ``O`` is outside. A span is right if its
first word, its last word and its type are right. An ``I-`` that continues nothing begins a span, as conlleval and
seqeval's default mode have it. (seqeval's strict mode leaves such spans out, which can move a score by half a point.)

References:
    Tjong Kim Sang, Buchholz: Introduction to the CoNLL-2000 Shared Task: Chunking. CoNLL 2000. (conlleval)
    Nakayama: seqeval: A Python framework for sequence labeling evaluation. 2018, github.com/chakki-works/seqeval.
    Lignos, Kamyab: If You Build Your Own NER Scorer, Non-replicable Results Will Come. Insights 2020.

Shapes: C tags, T types, B sentences, W words of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OUTSIDE = -1
"""The number that is no tag: a word outside all spans, and the padding of a row."""


@dataclass(frozen=True)
class Tagging:
    """What the C tags of a data set mean."""

    types: tuple[str, ...]
    """The T types of spans, sorted."""
    type_of: np.ndarray
    """int64 `(C + 1,)`, the number of each tag's type; -1 for ``O`` and, at the end, for `OUTSIDE`."""
    begins: np.ndarray
    """bool `(C + 1,)`, whether it is a ``B-``."""

    @classmethod
    def of(cls, tags: Sequence[str]) -> Tagging:
        """Understand the names of tags.

        Raises:
            ValueError: if one is no BIO tag.

        >>> Tagging.of(["B-GENE", "I-GENE", "O"]).types
        ('GENE',)
        """
        parts = [split_tag(tag) for tag in tags]
        types = sorted({kind for prefix, kind in parts if prefix != "O"})
        type_of = []
        begins = []
        for prefix, kind in [*parts, ("O", "")]:  # `OUTSIDE` is the last one
            type_of.append(-1 if prefix == "O" else types.index(kind))
            begins.append(prefix == "B")
        return cls(tuple(types), np.array(type_of), np.array(begins))

    def spans(self, tags: np.ndarray) -> np.ndarray:
        """Find the spans of sentences.

        Args:
            tags: int64 `(B, W)`, numbers of tags; `OUTSIDE` after the end of a sentence.

        Returns:
            int64 `(N, 3)`, new: of each span the place of its first word, of its last word, and the number of its type.
            Word w of sentence b has the place b (W + 1) + w.

        >>> Tagging.of(["B-GENE", "I-GENE", "O"]).spans(np.array([[0, 1, 2], [1, 0, -1]])).tolist()
        [[0, 1, 0], [4, 4, 0], [5, 5, 0]]
        """
        # A word outside after every sentence, so that none goes on in the next.
        padded = np.pad(np.asarray(tags), ((0, 0), (0, 1)), constant_values=OUTSIDE)
        places = padded.ravel()
        kind = self.type_of[places]
        begins = self.begins[places]
        before = np.concatenate([[-1], kind[:-1]])
        starts = (kind >= 0) & (begins | (kind != before))
        next_goes_on = (kind[1:] == kind[:-1]) & ~starts[1:]
        goes_on = np.append(next_goes_on, False)
        first = np.flatnonzero(starts)
        last = np.flatnonzero((kind >= 0) & ~goes_on)
        return np.stack([first, last, kind[first]], axis=1)

    def counts(self, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Count spans by type, int64 `(T, 3)`: true spans, predicted spans, and those that are in both."""
        true_spans = self.spans(true)
        predicted_spans = self.spans(predicted)
        first_words = true_spans[:, 0]
        predicted_first_words = predicted_spans[:, 0]
        # At most one span of a sentence begins at a word, so a place finds its partner.
        _, here, there = np.intersect1d(first_words, predicted_first_words, return_indices=True)
        paired = true_spans[here]
        is_right = (paired == predicted_spans[there]).all(axis=1)
        counts = []
        for spans in (true_spans, predicted_spans, paired[is_right]):
            kinds = spans[:, 2]
            counts.append(np.bincount(kinds, minlength=len(self.types)))
        return np.stack(counts, axis=1)


def word_and_span_counts(labels: list[str], true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """What a tagger's scores are computed from.

    Args:
        labels: the names of the tags.
        true: int64 `(B, W)`, numbers of tags; `OUTSIDE` after the end of a sentence.
        predicted: the same.

    Returns:
        ``words``, int64 `(2,)`: words, and those with the right tag. ``spans``, int64 `(T, 3)`, see `Tagging.counts`.
    """
    is_word = true != OUTSIDE
    is_right = (true == predicted) & is_word
    words = np.array([is_word.sum(), is_right.sum()], dtype=np.int64)
    return {"words": words, "spans": Tagging.of(labels).counts(true, predicted)}


def split_tag(tag: str) -> tuple[str, str]:
    """The prefix and the type of a tag; a bare ``B`` or ``I`` has the type ``_``, as in conlleval.

    Raises:
        ValueError: if it is no BIO tag.

    >>> split_tag("I-GENE"), split_tag("O"), split_tag("B")
    (('I', 'GENE'), ('O', ''), ('B', '_'))
    """
    if tag == "O":
        return "O", ""
    prefix, _, kind = tag.partition("-")
    if prefix not in ("B", "I") or tag in ("B-", "I-"):
        raise ValueError(f"{tag!r} is no BIO tag, which is O, B-TYPE or I-TYPE")
    return prefix, kind or "_"


def scores(counts: np.ndarray) -> dict[str, float | None]:
    """Precision, recall and F1 = 2 right / (true + predicted) of spans; None where there is nothing to divide by.

    Args:
        counts: int64 `(3,)`, true spans, predicted spans, those in both; a row of `Tagging.counts` or their sum.

    >>> scores(np.array([4, 2, 1]))
    {'precision': 0.5, 'recall': 0.25, 'f1': 0.3333333333333333}
    """
    true, predicted, right = counts.tolist()

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    return {
        "precision": share(right, predicted),
        "recall": share(right, true),
        "f1": share(2 * right, true + predicted),
    }
