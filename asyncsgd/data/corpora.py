"""Texts to train on and texts to evaluate on: the same on every machine that has the same source.

The order is fixed, the split is decided by each text alone, and `Corpus.fingerprint` names the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncsgd.data.folders import TRAIN, evaluation_sets
from asyncsgd.data.pydocs import package_versions
from asyncsgd.data.pydocs_pairs import LABELS as PAIR_LABELS
from asyncsgd.data.tables import (
    AS_IT_IS,
    PAIRS,
    TABLES,
    Documents,
    Reading,
    Rows,
    Source,
    joined_parts,
    text_of,
    without_surrogates,
)
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
    """What `eval` is, where documents have labels: ``test``, ``validation``, or a set of its own in the source."""
    labels: tuple[str, ...] = ()
    """The names of all labels, in the order of their numbers."""
    notes: tuple[str, ...] = ()
    """Which file is which split, how it was read, what was left out and why, for the user."""

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        return hashlib.sha256(f"blocks {self.fingerprint}".encode()).hexdigest()[:16] if blocks else self.fingerprint


Names = Sequence[str] | None
"""The names that belong to numbers as labels; None where labels are their own names."""


class Kind(NamedTuple):
    """What rows hold, and what messages call it."""

    read: Callable[[str, Mapping[str, str], tuple[Any, ...], Names], tuple[str, str]]
    """From (where a row stands, columns, its values, names) to a text, empty where there is none, and its label, empty
    where it is missing."""
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
        self, data: str, columns: Mapping[str, str], eval_data: str | None = None, reading: Reading = AS_IT_IS
    ) -> tuple[list[Source], Source | None]:
        """What `load_corpus` reads, which is not read yet: the parts of `data`, and `eval_data`."""
        scored = None if eval_data is None else Source(eval_data, "--eval-data", takes=(), reading=reading)
        if not self.label:
            return [Source(part, takes=self.takes, reading=reading) for part in joined_parts(data)], scored
        if len(columns) < 2:
            name, flag = next(iter(columns.items()))
            raise UsageError(f"{self.text}s and {self.label}s are both {name!r}; name another with {flag}")
        return [Source(data, kinds=TABLES, needs=TRAIN, takes=self.takes, reading=reading)], scored

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
    reading: Reading = AS_IT_IS,
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    Texts to evaluate on are those of `eval_data`, or of another split of a folder or Hub data set (of plain texts in a
    folder that is ``validation``), or else what `split_documents` sets aside, called ``test``. A split without labels
    is not scored on; the next one is. Rows without text are left out, and so are rows whose label is -1, with which
    GLUE marks those without one. A text of any evaluation set of the source is never trained on. `notes` counts all of
    these. Labels that are numbers get their names from ``labels.json`` beside the files, or as the Hugging Face library
    has left them in a Parquet file; else a number is its own name.

    Args:
        data: ``"pydocs"`` (whose labels are the packages), a file, a folder (see `asyncsgd.data.folders`), or
            ``"hub:NAME[:CONFIG]"``. ``A+B`` joins plain texts, and the evaluation texts that each source sets aside for
            itself.
        columns: that of the texts and that of the labels, each with the flag that chooses it.
        split: ``"test"``, ``"validation"`` or another set of the source; None takes the first that has labels.
        limits: at most so many texts of each side, taken evenly over the source's order; 0 for all.
        cache_dir: folder in which ``pydocs`` is kept between runs.
        reading: how files are read.

    Raises:
        UsageError: the source is missing or damaged, has no such column or split, a label is missing or only in the
            evaluation texts, there is one class only, or one side has no texts.
    """
    # before the first one is read, which may take a while
    sources, scored = kind.sources(data, columns, eval_data, reading)
    name = "+".join(source.name for source in sources)
    names = kind.names
    if names is None and kind.label and kind.has_classes:
        names = _names_of(sources[0], list(columns)[1])
    parts = [_Part(source, kind, columns, names, cache_dir) for source in sources]
    evaluations: list[Documents] = []
    learned: list[Documents] = []
    apart: dict[str, set[str]] = {}
    for part in parts:
        train = part.read(TRAIN)
        sets = evaluation_sets(part.source.sides, ("test", "validation"))
        for of in sets:
            apart.setdefault(of, set()).update(part.texts(of))
        if scored is None:
            chosen, evaluation = part.to_score_on(sets, split, train)
            if evaluation is None:
                train, evaluation = split_documents(train)
            evaluations.append(evaluation)
        learned.append(train)
    if scored is not None:
        chosen = "evaluation"
        parts.append(_Part(scored, kind, columns, names, cache_dir))
        evaluations.append(parts[-1].read([*evaluation_sets(scored.sides, ("validation", "test")), TRAIN][0]))
    kept = _joined(learned)
    evaluation = _joined(evaluations)
    notes = [note for part in parts for note in (*part.source.notes, *part.notes)]
    for of, texts in [(chosen, set(evaluation.texts)), *apart.items()]:
        before = len(kept.texts)
        kept = select(kept, [text not in texts for text in kept.texts])
        if left_out := before - len(kept.texts):
            notes.append(f"{left_out} training {kind.text}s that are {of} {kind.text}s too are left out")
    for to, documents in (("evaluate", evaluation), ("train", kept)):
        if not documents.texts:
            told = "".join(f"; {note}" for part in parts for note in part.source.notes)
            raise UsageError(
                f"{name} has too few {kind.text}s to {to} on; name other data, or texts to evaluate on{told}"
            )
    labels: tuple[str, ...] = ()
    if kind.label and kind.has_classes:
        first_rows = {label: place for part in reversed(parts) for label, place in part.first_rows.items()}
        labels = _labels(name, names, kind, kept, evaluation, list(columns.values())[1], first_rows)
    kept, evaluation = (limited(documents, limit) for documents, limit in zip((kept, evaluation), limits, strict=True))
    if labels and (missing := set(labels) - set(kind.counts(kept))):
        notes.append(f"no training {kind.unit} has the {kind.label} {', '.join(sorted(missing))}")
    fingerprint = _fingerprint(sum(source.is_built_in for source in sources), kept, evaluation, labels)
    return Corpus(name, kept, evaluation, fingerprint, chosen if kind.label else "", labels, tuple(notes))


class _Part:
    """One source of a corpus, which is read split by split."""

    def __init__(
        self, source: Source, kind: Kind, columns: Mapping[str, str], names: Names, cache_dir: Path | None
    ) -> None:
        self.source = source
        self.notes: list[str] = []
        self.first_rows: dict[str, str] = {}
        """Of what a text may have as its label, the place of the first row that has it."""
        self._kind = kind
        self._columns = columns
        self._names = names
        self._cache_dir = cache_dir
        self._labels = slice(1, 1 + len(kind.names or "1"))
        """Which columns are labels."""
        self._read: dict[str, Rows] = {}

    def _rows(self, of: str) -> Rows:
        if of not in self._read:
            may_lack = () if of == TRAIN else [name for name, _ in list(self._columns.items())[self._labels]]
            self._read[of] = self.source.rows(of, self._columns, cache=self._cache_dir, may_lack=may_lack)
        return self._read[of]

    def texts(self, of: str) -> Iterator[str]:
        """The texts of a set, whatever its labels are."""
        for place, row in self._rows(of):
            unlabelled = list(row)
            unlabelled[self._labels] = [None] * len(unlabelled[self._labels])
            text, _ = self._kind.read(place, self._columns, tuple(unlabelled), self._names)
            if text:
                yield text

    def read(self, of: str) -> Documents:
        """The texts of a split; those to learn from have labels, of others a label that is missing is empty."""
        kind = self._kind
        where = f"{self.source.name} ({of})"
        rows = self._rows(of)
        read = [kind.read(place, self._columns, row, self._names) for place, row in rows]
        needs_number = of == TRAIN and not kind.has_classes
        kept = [(text, label) for text, label in read if text and (label or not needs_number)]
        for (place, _), (text, label) in zip(rows, read, strict=True):
            if text:
                self.first_rows.setdefault(label, place)
        if not kept:
            raise UsageError(f"{where} holds no {kind.text}: all {len(rows)} rows are without {kind.filling}")
        if empty := len(rows) - len(kept):
            self.notes.append(f"{empty} rows of {where} without {kind.filling} are left out")
        documents = Documents(*zip(*kept, strict=True))
        if not (kind.label and kind.has_classes) or of != TRAIN:
            return documents
        for (place, row), (text, label) in zip(rows, read, strict=True):
            if text and not label and not _is_marked(row[1]):
                raise _no_label(place, self._columns, row[1])
        return self._labelled(documents, of, {""})

    def to_score_on(self, sets: Sequence[str], split: str | None, train: Documents) -> tuple[str, Documents | None]:
        """The name and the texts of the first set that has labels; ``test`` and None where some are to be set aside.

        Args:
            sets: all evaluation sets of the source.
            split: the one that the user names.
        """
        preferred = ("test", "validation") if self._kind.label else ("validation", "test")[: 1 + self.source.is_hub]
        usual = evaluation_sets(sets, preferred)
        name = self.source.name
        if split not in (None, *sets) and (usual or split != "test"):
            raise UsageError(f"{name} has no {split} split to score on; drop --split{nearest(str(split), sets)}")
        named = [split] if split is not None and split in sets else []
        for of in named or usual:
            documents = self.read(of)
            documents = self._labelled(documents, of, self._missing(documents, train))
            if documents.texts:
                return of, documents
            self.notes.append(f"the {of} split of {name} has no {self._kind.label}s, so it is not scored on")
        if named:
            raise UsageError(f"the {split} split of {name} has no {self._kind.label}s to score on; drop --split")
        return "test", None

    def _missing(self, scored: Documents, train: Documents) -> set[str]:
        """What stands for no label in a set to score on. Without names -1 may be a class as any
        other, if it is learned. It may be a number as any other, if there are others.
        """
        if not self._kind.label:
            return set()
        if not self._kind.has_classes and not set(scored.labels) <= {*NO_LABEL, ""}:
            return {""}
        return {*NO_LABEL, ""} - set(train.labels)

    def _labelled(self, documents: Documents, of: str, missing: Collection[str]) -> Documents:
        """The documents whose label is not among `missing`; where some are left out, it is noted."""
        kept = select(documents, [label not in missing for label in documents.labels])
        left_out = len(documents.texts) - len(kept.texts)
        if left_out and kept.texts:
            self.notes.append(f"{left_out} rows of {self.source.name} ({of}) without a {self._kind.label} are left out")
        return kept


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
    numbers = all(_NUMBER.fullmatch(label) for label in train)
    return tuple(names or sorted(train, key=int if numbers else None))


def _names_of(source: Source, column: str) -> Names:
    """The names of what is built in, in ``labels.json`` beside the files, or left by the Hugging Face library."""
    if source.is_built_in:
        return PAIR_LABELS if source.data == PAIRS else tuple(package_versions())
    if source.is_hub:
        return _names_in(source.sides["train"].features.to_dict()[column])
    files = [path for paths in source.sides.values() for path in paths]
    beside = files[0].with_name("labels.json")
    if not beside.is_file() and source.path is not None:
        beside = source.path / "labels.json"
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


_NUMBER = re.compile("-?[0-9]+")
NO_LABEL = ("-1", "-1.0")
"""How GLUE marks a row whose label is not published."""


def label_name(where: str, columns: Mapping[str, str], value: object, names: Names) -> str:
    """The name of a label, text or a whole number, that was read from the second of some columns; empty where it is
    missing.

    Where labels have names, a number is an index of these, and -1 is none. A text is a name; it is an index where no
    name is a number.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with a missing label holds whole numbers as floats
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return ""
    if not isinstance(value, str | int):
        raise _no_label(where, columns, value)
    text = str(value).strip()
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if names is None or (text in names and not is_number):
        return text
    if text in NO_LABEL:
        return ""
    is_index = is_number or not any(_NUMBER.fullmatch(name) for name in names)
    if is_index and text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    raise UsageError(f"{where} label {text!r} has no name{nearest(text, names)}; the labels are {', '.join(names)}")


def _is_marked(value: object) -> bool:
    """Whether a label, or all labels of a list, say that there is none."""
    return all(str(each) in NO_LABEL for each in (value if isinstance(value, list) else [value]))


def _no_label(where: str, columns: Mapping[str, str], value: object) -> UsageError:
    column, flag = list(columns.items())[1]
    return UsageError(
        f"{where} column {column!r} holds {value!r}, and a label is text or a whole number; choose another column "
        f"with {flag} NAME"
    )
