"""Texts to train on and texts to evaluate on: the same on every machine that has the same source.

The order is fixed, the split is decided by each text alone, and `Corpus.fingerprint` names the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncsgd.data.pydocs import package_versions
from asyncsgd.data.tables import TABLES, Documents, Source, joined_parts, text_of, without_surrogates
from asyncsgd.errors import UsageError, nearest


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


Names = Sequence[str] | None
"""The names that belong to numbers as labels; None where labels are their own names."""


class Kind(NamedTuple):
    """What rows hold, and what messages call it."""

    read: Callable[[str, Mapping[str, str], tuple[Any, ...], Names], tuple[str, str]]
    """From (where a row stands, columns, its values, names) to a text, empty where there is none, and its label."""
    labels_of: Callable[[str], list[str]] = lambda label: [label]
    """All labels in the label of a text."""
    text: str = "text"
    filling: str = "text"  # what a row must not be without
    unit: str = "text"  # what has a label
    label: str = "label"  # empty where texts have none
    takes: Sequence[str] = ("pydocs", "hub:NAME")
    has_classes: bool = True  # else a label is a number
    fewest: int = 2  # labels that there must be
    names: Names = None  # of the labels, where the columns are called so

    def sources(
        self, data: str, columns: Mapping[str, str], eval_data: str | None = None
    ) -> tuple[list[Source], Source | None]:
        """What `load_corpus` reads, which is not read yet: the parts of `data`, and `eval_data`."""
        scored = None if eval_data is None else Source(eval_data, "--eval-data", takes=())
        if not self.label:
            return [Source(part, takes=self.takes) for part in joined_parts(data)], scored
        if len(columns) < 2:
            name, flag = next(iter(columns.items()))
            raise UsageError(f"{self.text}s and {self.label}s are both {name!r}; name another with {flag}")
        return [Source(data, kinds=TABLES, needs="train", takes=self.takes)], scored

    def counts(self, documents: Documents) -> Counter[str]:
        return Counter(each for label in documents.labels for each in self.labels_of(label))


def _read_text(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    text = without_surrogates(text_of(where, next(iter(columns)), row[0])).strip()
    return text, label_name(where, columns, row[1], names) if text and len(columns) > 1 else ""


LABELLED, PLAIN = Kind(_read_text), Kind(_read_text, label="")


def load_corpus(
    data: str,
    columns: Mapping[str, str],
    kind: Kind = PLAIN,
    *,
    eval_data: str | None = None,
    split: str | None = None,
    limits: tuple[int, int] = (0, 0),
    cache_dir: Path | None = None,
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    Texts to evaluate on are those of `eval_data`, or of another split of a folder or Hub data set (of plain texts in a
    folder that is ``validation``), or else what `split_documents` sets aside, called ``test``. Rows without text are
    left out, and so are training texts that occur in the evaluation texts too; `notes` counts both where texts have
    labels. Labels that are numbers get their names from ``labels.json`` beside the files, or as the Hugging Face
    library has left them in a Parquet file; else a number is its own name.

    Args:
        data: ``"pydocs"`` (whose labels are the packages), a file, a folder (without its subfolders, in the order of
            the names; where it has ``train.*`` beside another split, that), or ``"hub:NAME[:CONFIG]"``. ``A+B`` joins
            plain texts, and the evaluation texts that each source sets aside for itself.
        columns: that of the texts and that of the labels, each with the flag that chooses it.
        split: ``"test"`` or ``"validation"``; None takes the first that is there.
        limits: at most so many texts of each side, taken evenly over the source's order; 0 for all.
        cache_dir: folder in which ``pydocs`` is kept between runs.

    Raises:
        UsageError: the source is missing or damaged, has no such column or split, a label is missing or only in the
            evaluation texts, there is one class only, or one side has no texts.
    """
    sources, scored = kind.sources(data, columns, eval_data)  # before the first one is read, which may take a while
    name, notes = "+".join(source.name for source in sources), list[str]()
    names = kind.names
    if names is None and kind.label and kind.has_classes:
        names = _names_of(sources[0], list(columns)[1])
    first_rows: dict[str, str] = {}

    def side(source: Source, of: str) -> Documents:
        rows = source.rows(of, columns, cache=cache_dir)
        read = [kind.read(place, columns, row, names) for place, row in rows]
        kept = [(text, label) for text, label in read if text]
        for (place, _), (text, label) in zip(rows, read, strict=True):
            if text:
                first_rows.setdefault(label, place)
        where = f"{source.name} ({of})"
        if not kept:
            raise UsageError(f"{where} holds no {kind.text}: all {len(rows)} rows are without {kind.filling}")
        if empty := len(rows) - len(kept):
            notes.append(f"{empty} rows of {where} without {kind.filling} are left out")
        return Documents(*zip(*kept, strict=True))

    chosen = ""
    if scored is not None:
        train = _joined([side(source, "train") for source in sources])
        evaluation = side(scored, "validation" if "validation" in scored.sides else "train")
    else:
        sides = []
        for source in sources:
            preferred = ("test", "validation") if kind.label else ("validation", "test")[: 1 + source.is_hub]
            splits = [of for of in preferred if of in source.sides]
            if split is not None and split not in splits and (splits or split == "validation"):
                raise UsageError(f"{name} has no {split} split to score on; drop --split")
            train, chosen = side(source, "train"), split or [*splits, "test"][0]
            sides.append((train, side(source, chosen)) if splits else split_documents(train))
        train, evaluation = map(_joined, zip(*sides, strict=True))
    scored_texts = set(evaluation.texts)
    kept = select(train, [text not in scored_texts for text in train.texts])
    if left_out := len(train.texts) - len(kept.texts):
        notes.append(f"{left_out} training {kind.text}s that are {chosen} {kind.text}s too are left out")
    for to, documents in (("evaluate", evaluation), ("train", kept)):
        if not documents.texts:
            raise UsageError(f"{name} has too few {kind.text}s to {to} on; name other data, or texts to evaluate on")
    labels: tuple[str, ...] = ()
    if kind.label and kind.has_classes:
        labels = _labels(name, names, kind, kept, evaluation, list(columns.values())[1], first_rows)
    kept, evaluation = (limited(documents, limit) for documents, limit in zip((kept, evaluation), limits, strict=True))
    if labels and (missing := set(labels) - set(kind.counts(kept))):
        notes.append(f"no training {kind.unit} has the {kind.label} {', '.join(sorted(missing))}")
    fingerprint = _fingerprint(sum(source.is_built_in for source in sources), kept, evaluation, labels)
    if not kind.label:
        return Corpus(name, kept, evaluation, fingerprint)
    return Corpus(name, kept, evaluation, fingerprint, chosen, labels, tuple(notes))


def _fingerprint(built_in: int, train: Documents, evaluation: Documents, labels: Sequence[str]) -> str:
    versions, digest = json.dumps(package_versions(), sort_keys=True), hashlib.sha256()
    if labels or any(train.labels):
        digest.update(json.dumps([versions * built_in, *labels]).encode())
        for documents in (train, evaluation):
            digest.update(json.dumps([documents.texts, documents.labels]).encode())
        return digest.hexdigest()[:16]
    digest.update(versions.encode() * built_in)
    for documents in (train, evaluation):
        digest.update(f"side {len(documents.texts)}\n".encode())
        for encoded in map(str.encode, documents.texts):
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(f"{len(encoded)}\n".encode() + encoded)
    return digest.hexdigest()[:16]


def _joined(sides: Iterable[Documents]) -> Documents:
    texts, labels = zip(*((side.texts, side.labels) for side in sides), strict=True)
    return Documents(tuple(itertools.chain(*texts)), tuple(itertools.chain(*labels)))


def split_documents(documents: Documents) -> tuple[Documents, Documents]:
    """Split by a hash of each text into (train, eval), whatever the order and the other texts.

    A twentieth is set aside: where the first 64 bits of the SHA-256, read as a number in [0, 1), lie below 0.05.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in documents.texts)
    held_out = np.array([int.from_bytes(digest[:8], "big") / 2**64 < 0.05 for digest in digests], dtype=bool)
    return select(documents, ~held_out), select(documents, held_out)


def select(documents: Documents, keep: Sequence[bool] | np.ndarray) -> Documents:
    return Documents(*(tuple(itertools.compress(column, keep)) for column in (documents.texts, documents.labels)))


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


def _labels(
    name: str,
    names: Names,
    kind: Kind,
    kept: Documents,
    evaluation: Documents,
    flag: str,
    first_rows: Mapping[str, str],
) -> tuple[str, ...]:
    """The names of all labels, in the order of their numbers.

    Args:
        first_rows: of what a text may have as its label, the place of the first row that has it.
    """
    train, scored = kind.counts(kept), kind.counts(evaluation)
    has = f"training has {', '.join(sorted(train))}"
    for label in sorted(set(scored) - set(train))[:1]:
        place = next(place for of_text, place in first_rows.items() if label in kind.labels_of(of_text))
        raise UsageError(
            f"{name}: no training {kind.unit} has the {kind.label} {label!r}, which {scored[label]} {kind.unit}s to "
            f"score on have (first in {place.rstrip(':')}); {has}"
        )
    if len(train) < kind.fewest:
        raise UsageError(f"{name}: {kind.fewest} {kind.label}s are needed, and {has}: is {flag} right?")
    return tuple(names or sorted(train, key=int if all(label.lstrip("-").isdecimal() for label in train) else None))


def _names_of(source: Source, column: str) -> Names:
    """The names of ``pydocs``, in ``labels.json`` beside the files, or left by the Hugging Face library."""
    if source.is_built_in:
        return tuple(package_versions())
    if source.is_hub:
        return _names_in(source.sides["train"].features.to_dict()[column])
    files = [path for paths in source.sides.values() for path in paths]
    beside = files[0].with_name("labels.json")
    if not beside.is_file():
        return next(filter(None, (_names_in(_features(path).get(column, {})) for path in files)), None)
    try:
        names = json.loads(beside.read_text(encoding="utf-8"))
        return tuple(names[str(number)] for number in range(len(names))) if isinstance(names, dict) else tuple(names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'{beside} must hold the names of the labels, like ["no", "yes"] or {{"0": "no", "1": "yes"}} ({error!r})'
        ) from error


def _features(path: Path) -> dict[str, Any]:
    from pyarrow.parquet import read_schema

    with contextlib.suppress(OSError, ValueError, KeyError):  # what is damaged is reported where its rows are read
        features: dict[str, Any] = json.loads((read_schema(path).metadata or {})[b"huggingface"])["info"]["features"]
        return features
    return {}


def _names_in(feature: Any) -> Names:
    """The names of a ClassLabel, or of a list of them."""
    while inner := feature[0] if isinstance(feature, list) else feature.get("feature"):
        feature = inner
    return feature.get("names")


def label_name(where: str, columns: Mapping[str, str], value: object, names: Names) -> str:
    """The name of a label, text or a whole number, that was read from the second of some columns."""
    column, flag = list(columns.items())[1]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with a missing label holds whole numbers as floats
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text:
        raise UsageError(
            f"{where} column {column!r} holds {value!r}, and a label is text or a whole number; choose another column "
            f"with {flag} NAME"
        )
    if names is None or text in names:
        return text
    if text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    raise UsageError(f"{where} label {text!r} has no name{nearest(text, names)}; the labels are {', '.join(names)}")
