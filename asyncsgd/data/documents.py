"""Texts in a fixed order, with their labels: what tables are read into, and what the built-in documentation is."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, none of them empty, each with its label where the source has some."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    rows: tuple[int, ...] = field(default=(), compare=False)
    """The place of each text among the rows of its source, from 0, where there is one source."""


def without_surrogates(text: str) -> str:
    """The text with a question mark in place of each half of a surrogate pair."""
    # JSON and Python sources can spell half a surrogate pair, which no encoder accepts later.
    return text.encode("utf-8", "replace").decode("utf-8")


def joined(parts: Sequence[Documents]) -> Documents:
    """The documents of several sources, one after another."""
    if len(parts) == 1:
        return parts[0]
    texts: list[str] = []
    labels: list[str] = []
    for documents in parts:
        texts += documents.texts
        labels += documents.labels
    return Documents(tuple(texts), tuple(labels))


def split_documents(documents: Documents) -> tuple[Documents, Documents]:
    """Split by a hash of each text into (train, eval), whatever the order and the other texts.

    A twentieth is set aside: where the first 64 bits of the SHA-256, read as a number in [0, 1), lie below 0.05.
    """
    fractions = []
    for text in documents.texts:
        digest = hashlib.sha256(text.encode()).digest()
        fractions.append(int.from_bytes(digest[:8], "big") / 2**64)
    held_out = np.array(fractions) < 0.05
    return select(documents, ~held_out), select(documents, held_out)


def select(documents: Documents, keep: Sequence[bool] | np.ndarray) -> Documents:
    """The documents where `keep` is true."""
    texts = itertools.compress(documents.texts, keep)
    labels = itertools.compress(documents.labels, keep)
    rows = itertools.compress(documents.rows, keep)
    return Documents(tuple(texts), tuple(labels), tuple(rows))


def evenly(total: int, limit: int) -> np.ndarray:
    """At most `limit` numbers below `total`, evenly over them and ascending; 0 for all.

    >>> evenly(10, 4).tolist(), evenly(3, 0).tolist()
    ([0, 2, 5, 7], [0, 1, 2])
    """
    count = min(limit or total, total)
    return np.arange(count) * total // max(count, 1)


def limited(documents: Documents, limit: int) -> Documents:
    """At most `limit` documents, evenly over their order; 0 for all."""
    total = len(documents.texts)
    keep = np.zeros(total, dtype=bool)
    keep[evenly(total, limit)] = True
    return select(documents, keep)
