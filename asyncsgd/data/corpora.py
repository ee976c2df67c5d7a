"""Texts to train on and texts to evaluate on, from installed documentation, files, folders or the Hugging Face Hub.

A corpus is the same on every machine that has the same source: the order is fixed, the split is decided by each text
alone, and `Corpus.fingerprint` names the result. Nothing here needs a network unless the user names a Hub data set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.pydocs import load_pydocs, package_versions
from asyncsgd.data.tables import (
    existing_path,
    files_of,
    hub_name,
    hub_rows,
    hub_splits,
    joined_parts,
    read_texts,
    sides_of,
    text_of,
)
from asyncsgd.errors import UsageError


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation documents that share no text.

    Args:
        name: ``"pydocs"``, the file's or folder's own name without its directory, or ``"hub:NAME[:CONFIG]"``; the
            names of joined sources with plus signs between them.
        fingerprint: 16 hexadecimal digits that change whenever a text, its label, its order, its side of the split or,
            for ``pydocs``, a package version changes.
        split: what `eval` is, where documents have labels: ``"test"`` or ``"validation"``.
        labels: the names of all labels, in the order of their numbers.
        notes: what was left out and why, for the user.
    """

    name: str
    train: Documents
    eval: Documents
    fingerprint: str
    split: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        if not blocks:
            return self.fingerprint
        return hashlib.sha256(f"blocks {self.fingerprint}".encode()).hexdigest()[:16]


def load_corpus(
    data: str, *, eval_data: str | None, text_column: str, cache_dir: Path, eval_fraction: float = 0.05
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    A text is set aside if the first 64 bits of its SHA-256, read as a number in [0, 1), lie below `eval_fraction`. So
    the split depends on neither the order nor the other texts. Nothing is split where evaluation texts are given: by
    `eval_data`, by ``validation.*`` (or ``valid``, ``dev``, ``eval``) beside ``train.*`` in a folder, or by the Hub
    data set's own validation or test split. Texts that occur on both sides are then taken out of training.

    Args:
        data: ``"pydocs"`` (docstrings of the standard library, numpy, scipy and pandas, read from their sources), a
            file (.txt, .txt.gz, .jsonl, .csv, .parquet), a folder of such files, or ``"hub:NAME[:CONFIG]"``. A folder
            is read without its subfolders, in the order of the names; where it has ``train.*`` beside
            ``validation.*`` or ``test.*``, only ``train.*`` and ``validation.*`` are used. ``A+B`` joins sources: their
            training texts, and the evaluation texts that each sets aside for itself.
        eval_data: a file or folder with the evaluation texts, or None. Of a folder that has ``train.*``, the
            ``validation.*`` files are read.
        cache_dir: folder in which ``pydocs`` is kept between runs.

    Raises:
        UsageError: the source is missing, empty, damaged or not text, has no column `text_column`, or leaves one side
            without documents. The message says what to type next.
    """
    check_sources(data, eval_data)  # before the first one is read, which may take a while
    parts = joined_parts(data)
    sources = [_load_source(part, text_column, cache_dir, eval_data is None) for part in parts]
    name = "+".join(part if _has_a_name(part) else existing_path(part, "--data").name for part in parts)
    if eval_data is not None:
        sides = [(train, Documents((), None)) for train, _ in sources]
        own_train, own_eval = _load_path(existing_path(eval_data, "--eval-data"), text_column)
        evaluation = own_eval or own_train
    else:
        sides = [split_documents(train, eval_fraction) if held is None else (train, held) for train, held in sources]
        evaluation = _join([side[1] for side in sides])
    train = without(_join([side[0] for side in sides]), evaluation)
    if not evaluation.texts:
        raise UsageError(
            f"{name} has too few documents ({len(train.texts)}) to set some aside for evaluation; "
            "give evaluation texts with --eval-data FILE"
        )
    if not train.texts:
        raise UsageError(f"{name} leaves no document to train on; give other evaluation texts with --eval-data FILE")
    origin = "".join(_origin(part) for part in parts)
    return Corpus(name, train, evaluation, _fingerprint(origin, train, evaluation))


def check_sources(data: str, eval_data: str | None) -> None:
    """Look at what `load_corpus` would read, and read nothing.

    Raises:
        UsageError: if a file or folder is missing or of an unknown kind, or a Hub data set has no name.
    """
    for part in joined_parts(data):
        if part.startswith("hub:"):
            hub_name(part)
        elif part != "pydocs":
            files_of(existing_path(part, "--data"))
    if eval_data is not None:
        files_of(existing_path(eval_data, "--eval-data"))


def _has_a_name(part: str) -> bool:
    return part == "pydocs" or part.startswith("hub:")


def _origin(part: str) -> str:
    """What the fingerprint covers beside the texts."""
    return json.dumps(package_versions(), sort_keys=True) if part == "pydocs" else ""


def _load_source(data: str, text_column: str, cache_dir: Path, wants_eval: bool) -> tuple[Documents, Documents | None]:
    """(train, eval) of one part of ``--data``; eval is None where it does not set evaluation texts apart."""
    if data == "pydocs":
        return load_pydocs(cache_dir), None
    if not data.startswith("hub:"):
        return _load_path(existing_path(data, "--data"), text_column)
    splits = hub_splits(data)
    scored = next((split for split in ("validation", "test") if wants_eval and split in splits), None)
    columns = {text_column: "--text-column"}
    train, *others = (
        _documents(text_of(where, text_column, row[0]) for where, row in hub_rows(data, splits[split], columns))
        for split in ("train", scored)
        if split is not None
    )
    return train, others[0] if others else None


def _load_path(path: Path, text_column: str) -> tuple[Documents, Documents | None]:
    def read(files: Sequence[Path]) -> Documents:
        return Documents(tuple(text for file in files for text in read_texts(file, text_column)), None)

    sides = sides_of(path)
    if "train" not in sides or len(sides) == 1:
        return read(files_of(path)), None
    return read(sides["train"]), read(sides["validation"]) if "validation" in sides else None


def _documents(texts: Iterable[str]) -> Documents:
    stripped = (without_surrogates(text).strip() for text in texts)
    return Documents(tuple(text for text in stripped if text), None)


def _join(sides: Sequence[Documents]) -> Documents:
    texts = tuple(text for side in sides for text in side.texts)
    labels = [label for side in sides for label in side.labels or ()]
    return Documents(texts, tuple(labels) if len(labels) == len(texts) else None)


def split_documents(documents: Documents, eval_fraction: float) -> tuple[Documents, Documents]:
    """Split by a hash of each text into (train, eval); equal texts always land on the same side.

    >>> train, held_out = split_documents(Documents(("one", "two", "three", "four"), None), 0.25)
    >>> train.texts, held_out.texts
    (('one', 'three'), ('two', 'four'))
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in documents.texts)
    held_out = [int.from_bytes(digest[:8], "big") / 2**64 < eval_fraction for digest in digests]
    return select(documents, [not flag for flag in held_out]), select(documents, held_out)


def select(documents: Documents, keep: Sequence[bool]) -> Documents:
    """Return the documents whose flag is set, with their labels."""
    texts, labels = (
        None if side is None else tuple(value for value, flag in zip(side, keep, strict=True) if flag)
        for side in (documents.texts, documents.labels)
    )
    return Documents(texts or (), labels)


def without(documents: Documents, others: Documents) -> Documents:
    """Return the documents whose text is none of `others`."""
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
    chosen = np.zeros(total, dtype=bool)
    chosen[evenly(total, limit)] = True
    return select(documents, chosen.tolist())


def _fingerprint(origin: str, train: Documents, evaluation: Documents) -> str:
    digest = hashlib.sha256(origin.encode())
    for documents in (train, evaluation):
        digest.update(f"side {len(documents.texts)}\n".encode())
        for text in documents.texts:
            encoded = text.encode()
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(f"{len(encoded)}\n".encode())
            digest.update(encoded)
    return digest.hexdigest()[:16]
