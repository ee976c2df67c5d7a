"""Texts with labels: whole texts with one each, or sentences with a tag on every word."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncsgd.data.corpora import Corpus, limited, split_documents, without
from asyncsgd.data.pydocs import load_pydocs, package_versions
from asyncsgd.data.tables import TABLES, Documents, Rows, Source, text_of, without_surrogates
from asyncsgd.errors import UsageError, nearest

# Set aside where a source has no other split: by the hash and share of load_corpus, so pretraining saw none of them.
HELD_OUT = 0.05

Names = Sequence[str] | None
"""The names that belong to numbers as labels; None where labels are their own names."""


class Kind(NamedTuple):
    """What rows hold, and what messages call it."""

    read: Callable[[str, Mapping[str, str], tuple[Any, ...], Names], tuple[str, str]]
    """From (where a row stands, columns, its values, names) to a text, empty where there is none, and its label."""
    labels_of: Callable[[str], list[str]]
    """All labels in the label of a text."""
    text: str
    filling: str  # what a row must not be without
    unit: str  # what has a label
    label: str

    def counts(self, documents: Documents) -> Counter[str]:
        return Counter(each for label in documents.labels or () for each in self.labels_of(label))


def read_labelled(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    text = without_surrogates(text_of(where, next(iter(columns)), row[0])).strip()
    return text, label_name(where, columns, row[1], names) if text else ""


LABELLED = Kind(read_labelled, lambda label: [label], "text", "text", "text", "label")


def labelled_source(data: str, columns: Mapping[str, str], *, pydocs: bool = True) -> Source | None:
    """What `load_labelled` reads, which is not read yet; None for ``pydocs``, where that may be meant."""
    if len(columns) < 2:
        raise UsageError(
            f"texts and labels are both {next(iter(columns))!r}; name another with {next(iter(columns.values()))}"
        )
    takes = ("pydocs", "hub:NAME") if pydocs else ("hub:NAME",)
    return None if data == "pydocs" and pydocs else Source(data, kinds=TABLES, needs="train", takes=takes)


def load_labelled(
    data: str,
    columns: Mapping[str, str],
    kind: Kind = LABELLED,
    *,
    cache_dir: Path | None = None,
    split: str | None = None,
    limits: tuple[int, int] = (0, 0),
) -> Corpus:
    """Load the labelled texts that `data` names.

    Rows without text are left out, and so are training texts that occur in the evaluation texts too; `notes` counts
    both. Labels that are numbers get their names from ``labels.json`` beside the files. Without that file, a Parquet
    file may hold the names, written there by the Hugging Face library. Otherwise a number is its own name.

    Args:
        data: ``"pydocs"`` (which installed package a docstring comes from), a table, a folder with ``train.*``, or
            ``"hub:NAME[:CONFIG]"``. Where no split is there to score on, a twentieth of the texts is set aside, by a
            hash of the text, and called test.
        columns: that of the texts and that of the labels, each with the flag that chooses it.
        cache_dir: folder in which ``pydocs`` is kept between runs; None where pydocs is not meant.
        split: ``"test"`` or ``"validation"``; None takes test where there is one.
        limits: at most so many texts of each side, taken evenly over the source's order; 0 for all.

    Raises:
        UsageError: the source, a column or a label is missing, a label is only in the evaluation texts, there is one
            class only, or no text is left.
    """
    notes: list[str] = []
    names: Names
    source = labelled_source(data, columns, pydocs=cache_dir is not None)
    if source is None:
        assert cache_dir is not None
        name, origin = data, json.dumps(package_versions(), sort_keys=True)
        sides = {"train": load_pydocs(cache_dir)}
        names = tuple(dict.fromkeys(sides["train"].labels or ()))
    else:
        name, origin, names = source.name, "", _names_of(source, list(columns)[1])
        rows = {side: source.rows(side, columns) for side in ("train", "test", "validation") if side in source.sides}
        sides = {side: _documents(f"{name} ({side})", rows[side], names, columns, kind, notes) for side in rows}
    if len(sides) == 1 and split != "validation":
        sides = dict(zip(("train", "test"), split_documents(sides["train"], HELD_OUT), strict=True))
    split = split or list(sides)[1]
    if split not in sides:
        raise UsageError(f"{name} has no {split} split to score on; drop --split")
    train, evaluation = sides["train"], sides[split]
    kept = without(train, evaluation)
    if left_out := len(train.texts) - len(kept.texts):
        notes.append(f"{left_out} training {kind.text}s that are {split} {kind.text}s too are left out")
    labels = _labels(name, names, kind.counts(kept), kind.counts(evaluation), kind, list(columns.values())[1])
    kept, evaluation = (limited(side, limit) for side, limit in zip((kept, evaluation), limits, strict=True))
    if missing := set(labels) - set(kind.counts(kept)):
        notes.append(f"no training {kind.unit} has the {kind.label} {', '.join(sorted(missing))}")
    digest = hashlib.sha256(json.dumps([origin, *labels]).encode())
    for documents in (kept, evaluation):
        digest.update(json.dumps([documents.texts, documents.labels]).encode())
    return Corpus(name, kept, evaluation, digest.hexdigest()[:16], split, labels, tuple(notes))


def _labels(
    name: str, names: Names, train: Counter[str], scored: Counter[str], kind: Kind, flag: str
) -> tuple[str, ...]:
    """The names of all labels, in the order of their numbers."""
    if unknown := sorted(set(scored) - set(train)):
        raise UsageError(
            f"{name}: no training {kind.unit} has the {kind.label} {unknown[0]!r}, which {scored[unknown[0]]} "
            f"{kind.unit}s to score on have; training has {', '.join(sorted(train))}"
        )
    if len(train) < 2:
        raise UsageError(
            f"{name}: two {kind.label}s are needed, and training has {', '.join(map(repr, train)) or 'none'}: is "
            f"{flag} right?"
        )
    if names is not None:
        return tuple(names)
    return tuple(sorted(train, key=int if all(label.lstrip("-").isdecimal() for label in train) else None))


def _names_of(source: Source, column: str) -> Names:
    """The names in ``labels.json`` beside the files, those of a Hub data set, or those in a Parquet file."""
    if source.path is None:
        feature = source.sides["train"].features[column]
        return getattr(getattr(feature, "feature", feature), "names", None) or None
    files = [path for paths in source.sides.values() for path in paths]
    beside = files[0].with_name("labels.json")
    if not beside.is_file():
        return next(filter(None, (_feature_names(path, column) for path in files)), None)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names = json.loads(beside.read_text(encoding="utf-8"))
        names = [names[str(number)] for number in range(len(names))] if isinstance(names, dict) else names
        if names and all(isinstance(name, str) for name in names):
            return tuple(names)
    raise UsageError(f'{beside} must hold the names of the labels, like ["no", "yes"] or {{"0": "no", "1": "yes"}}')


def _feature_names(path: Path, column: str) -> Names:
    """The names of a ClassLabel, or of a list of them, that the Hugging Face library left in a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # What is no Parquet file has none, and a damaged one is reported where its rows are read.
    with contextlib.suppress(pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        feature = json.loads((pq.read_schema(path).metadata or {})[b"huggingface"])["info"]["features"][column]
        while "names" not in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        return tuple(feature["names"])
    return None


def _documents(
    where: str, rows: Rows, names: Names, columns: Mapping[str, str], kind: Kind, notes: list[str]
) -> Documents:
    read = [kind.read(place, columns, row, names) for place, row in rows]
    kept = [(text, label) for text, label in read if text]
    if not kept:
        raise UsageError(f"{where} holds no {kind.text}: all {len(rows)} rows are without {kind.filling}")
    if empty := len(rows) - len(kept):
        notes.append(f"{empty} rows of {where} without {kind.filling} are left out")
    texts, labels = zip(*kept, strict=True)
    return Documents(texts, labels)


def label_name(where: str, columns: Mapping[str, str], value: object, names: Names) -> str:
    """The name of a label that was read from the second of some columns.

    Raises:
        UsageError: if it is missing, neither text nor a whole number, or has no name.
    """
    column, flag = list(columns.items())[1]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with a missing label holds whole numbers as floats
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text:
        raise UsageError(
            f"{where} column {column!r} holds {value!r}, and a label is text or a whole number; mend the row or choose "
            f"another column with {flag} NAME"
        )
    if names is None or text in names:
        return text
    if text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    raise UsageError(f"{where} label {text!r} has no name{nearest(text, names)}; the labels are {', '.join(names)}")
