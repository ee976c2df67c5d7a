"""Texts to train on and texts to evaluate on, from installed documentation, files, folders or the Hugging Face Hub.

A corpus is the same on every machine that has the same source: the order is fixed, the split is decided by each text
alone, and `Corpus.fingerprint` names the result. Nothing here needs a network unless the user names a Hub data set.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncsgd.data.pydocs import load_pydocs, package_versions
from asyncsgd.data.tables import Documents, Source, documents_of, joined_parts
from asyncsgd.errors import UsageError


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation documents that share no text."""

    name: str
    """``pydocs``, the file's or folder's own name, or ``hub:NAME[:CONFIG]``; joined with plus signs."""
    train: Documents
    eval: Documents
    fingerprint: str
    """16 hexadecimal digits that change with a text, its label, order or side, and with a package of ``pydocs``."""
    split: str = ""
    """What `eval` is, where documents have labels: ``test`` or ``validation``."""
    labels: tuple[str, ...] = ()
    """The names of all labels, in the order of their numbers."""
    notes: tuple[str, ...] = ()
    """What was left out and why, for the user."""

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        return hashlib.sha256(f"blocks {self.fingerprint}".encode()).hexdigest()[:16] if blocks else self.fingerprint


def load_corpus(
    data: str, *, eval_data: str | None, text_column: str, cache_dir: Path, eval_fraction: float = 0.05
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    A text is set aside if the first 64 bits of its SHA-256, read as a number in [0, 1), lie below `eval_fraction`. So
    the split depends on neither the order nor the other texts. Nothing is split where evaluation texts are given: by
    `eval_data`, by ``validation.*`` (or ``valid``, ``dev``, ``eval``) beside ``train.*`` in a folder, or by the Hub
    data set's own validation or test split. Texts that occur on both sides are then taken out of training.

    Args:
        data: ``"pydocs"``, a file, a folder (without its subfolders, in the order of the names; where it has
            ``train.*`` beside another split, that and ``validation.*``), or ``"hub:NAME[:CONFIG]"``. ``A+B`` joins the
            training texts of sources, and the evaluation texts that each sets aside for itself.
        eval_data: a file or folder with the evaluation texts, or None.
        cache_dir: folder in which ``pydocs`` is kept between runs.

    Raises:
        UsageError: the source is missing, damaged or not text, has no such column, or leaves one side without texts.
    """
    sources, scored = named_sources(data, eval_data)  # before the first one is read, which may take a while
    sides = [_sides(source, text_column, cache_dir, scored is None) for source in sources]
    if scored is not None:
        train, held_out = _sides(scored, text_column, cache_dir, True)
        sides, evaluation = [(side, None) for side, _ in sides], held_out or train
    else:
        sides = [split_documents(train, eval_fraction) if held is None else (train, held) for train, held in sides]
        evaluation = _join([held for _, held in sides if held is not None])
    train = without(_join([side for side, _ in sides]), evaluation)
    name = "+".join("pydocs" if source is None else source.name for source in sources)
    for side, documents in (("evaluate", evaluation), ("train", train)):
        if not documents.texts:
            raise UsageError(f"{name} has too few documents to {side} on; give evaluation texts with --eval-data FILE")
    digest = hashlib.sha256()
    for _ in range(sources.count(None)):
        digest.update(json.dumps(package_versions(), sort_keys=True).encode())
    for documents in (train, evaluation):
        digest.update(f"side {len(documents.texts)}\n".encode())
        for encoded in map(str.encode, documents.texts):
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(f"{len(encoded)}\n".encode() + encoded)
    return Corpus(name, train, evaluation, digest.hexdigest()[:16])


def named_sources(data: str, eval_data: str | None) -> tuple[list[Source | None], Source | None]:
    """What `load_corpus` reads, which is not read yet: the parts of `data`, None for ``pydocs``, and `eval_data`."""
    parts = [None if part == "pydocs" else Source(part, takes=("pydocs", "hub:NAME")) for part in joined_parts(data)]
    return parts, None if eval_data is None else Source(eval_data, "--eval-data", takes=())


def _sides(source: Source | None, column: str, cache: Path, wants_eval: bool) -> tuple[Documents, Documents | None]:
    """(train, eval) of a source, None for ``pydocs``; eval is None where it does not set evaluation texts apart."""
    if source is None:
        return load_pydocs(cache), None
    scored = ("validation", "test") if source.path is None else ("validation",)
    sides = ["train", *[side for side in scored if wants_eval and side in source.sides][:1]]
    train, *others = (documents_of(source.data, source.rows(side, {column: "--text-column"}), column) for side in sides)
    return train, others[0] if others else None


def _join(sides: Sequence[Documents]) -> Documents:
    return Documents(tuple(text for side in sides for text in side.texts), None)


def split_documents(documents: Documents, eval_fraction: float) -> tuple[Documents, Documents]:
    """Split by a hash of each text into (train, eval); equal texts always land on the same side.

    >>> train, held_out = split_documents(Documents(("one", "two", "three", "four"), None), 0.25)
    >>> train.texts, held_out.texts
    (('one', 'three'), ('two', 'four'))
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in documents.texts)
    held_out = np.array([int.from_bytes(digest[:8], "big") / 2**64 < eval_fraction for digest in digests], dtype=bool)
    return select(documents, ~held_out), select(documents, held_out)


def select(documents: Documents, keep: Sequence[bool] | np.ndarray) -> Documents:
    texts = tuple(itertools.compress(documents.texts, keep))
    return Documents(texts, None if documents.labels is None else tuple(itertools.compress(documents.labels, keep)))


def without(documents: Documents, others: Documents) -> Documents:
    """The documents whose text is none of `others`."""
    excluded = set(others.texts)
    return select(documents, [text not in excluded for text in documents.texts])


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
    return select(documents, np.isin(np.arange(total), evenly(total, limit)))
