"""Texts to train on and texts to evaluate on: the same on every machine that has the same source.

The order is fixed, the split is decided by each text alone, and `Corpus.fingerprint` names the result.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.evaluation_sets import EvalData, EvaluationSet, named_places
from asyncsgd.data.files import (
    AS_IT_IS,
    KINDS,
    TABLES,
    Reading,
    Rows,
    Source,
    joined_parts,
    text_of,
)
from asyncsgd.data.folders import TRAIN, evaluation_sets, split_meant
from asyncsgd.data.labels import NO_LABEL, NUMBER, Names, is_marked, label_name, names_of, no_label
from asyncsgd.data.pydocs import package_versions
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
    sets: tuple[EvaluationSet, ...] = ()
    """Further sets to evaluate on or to predict; `eval` is the first one."""
    number: int = 0
    """Which set `eval` is: 0 for the first, n for the n-th of `sets`."""

    @property
    def evaluations(self) -> tuple[Self, ...]:
        """The same with each set in turn as the one to evaluate on."""
        others = (
            replace(self, eval=one.documents, split=one.name, number=number)
            for number, one in enumerate(self.sets, start=1)
        )
        return (self, *others)

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        return hashlib.sha256(f"blocks {self.fingerprint}".encode()).hexdigest()[:16] if blocks else self.fingerprint


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
        self, data: str, columns: Mapping[str, str], eval_data: EvalData | None = None, reading: Reading = AS_IT_IS
    ) -> tuple[list[Source], dict[str, Source]]:
        """What `load_corpus` reads, which is not read yet: the parts of `data`, and the sets of `eval_data` by name."""
        files = TABLES if self.label else KINDS
        scored = {
            name: Source(place, "--eval-data", kinds=files, takes=(), reading=reading)
            for name, place in named_places(eval_data).items()
        }
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


LABELLED = Kind(_read_text)
PLAIN = Kind(_read_text, label="")


def load_corpus(
    data: str,
    columns: Mapping[str, str],
    kind: Kind = PLAIN,
    *,
    eval_data: EvalData | None = None,
    split: str | None = None,
    limits: tuple[int, int] = (0, 0),
    cache_dir: Path | None = None,
    reading: Reading = AS_IT_IS,
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    Texts to evaluate on are those of `eval_data`, or of another split of a folder or Hub data set (of plain texts in a
    folder that is ``validation``), or else what `split_documents` sets aside, called ``test``. A split without labels
    is not scored on; the next one is. Of several sets that are named, the first has labels; one without any is there to
    be predicted. Rows without text are left out, and so are rows whose label is -1, with which GLUE marks those without
    one. A text of any evaluation set is never trained on. `notes` counts all of these. Labels that are numbers get
    their names from ``labels.json`` beside the files, or as the Hugging Face library has left them in a Parquet file;
    else a number is its own name.

    Args:
        data: ``"pydocs"`` (whose labels are the packages), a file, a folder (see `asyncsgd.data.folders`), or
            ``"hub:NAME[:CONFIG]"``. ``A+B`` joins plain texts, and the evaluation texts that each source sets aside for
            itself.
        columns: that of the texts and that of the labels, each with the flag that chooses it.
        eval_data: sets to evaluate on, see `asyncsgd.data.evaluation_sets.named_places`: tables or texts.
        split: ``"test"``, ``"validation"`` or another set of the source, or several with commas between them; None
            takes the first that has labels.
        limits: at most so many texts to train on, and of each set to evaluate on, taken evenly over the source's order;
            0 for all.
        cache_dir: folder in which ``pydocs`` is kept between runs.
        reading: how files are read.

    Raises:
        UsageError: the source is missing or damaged, has no such column or split, a label is missing or only in the
            evaluation texts, there is one class only, or one side has no texts.
    """
    # before the first one is read, which may take a while
    sources, named = kind.sources(data, columns, eval_data, reading)
    name = "+".join(source.name for source in sources)
    names = names_of(sources[0], list(columns)[1]) if _are_to_be_found(kind) else kind.names
    parts = [_Part(source, kind, columns, names, cache_dir) for source in sources]
    train, sets = _read_sources(parts, split, whole=bool(named))
    for set_name, source in named.items():
        own_names = names_of(source, list(columns)[1]) if _are_to_be_found(kind) else None
        part = _Part(source, kind, columns, own_names or names, cache_dir, learns=False)
        parts.append(part)
        sets.append(part.first_with_labels(train)._replace(name=set_name))
    main, *others = sets
    if not main.has_labels:
        where = named[main.name].name if named else f"the {main.name} split of {name}"
        first = "name a set with labels first" if named or others else "drop --split"
        raise UsageError(f"{where} has no {kind.label}s to score on; {first}")
    notes = [note for part in parts for note in (*part.source.notes, *part.notes)]
    notes += [f"{one.name} has no {kind.label}s, so it is not scored" for one in others if not one.has_labels]
    train = _without_texts_of(_held_out(parts, sets, list(named)), train, kind, notes)
    for to, documents in (*(("evaluate", one.documents) for one in sets), ("train", train)):
        if not documents.texts:
            told = "".join(f"; {note}" for part in parts for note in part.source.notes)
            raise UsageError(
                f"{name} has too few {kind.text}s to {to} on; name other data, or texts to evaluate on{told}"
            )
    labels: tuple[str, ...] = ()
    if kind.label and kind.has_classes:
        first_rows = {label: place for part in reversed(parts) for label, place in part.first_rows.items()}
        labelled = _joined([one.documents for one in sets if one.has_labels])
        labels = _labels(name, names, kind, train, labelled, list(columns.values())[1], first_rows)
    train = limited(train, limits[0])
    main, *others = [one._replace(documents=limited(one.documents, limits[1] * one.has_labels)) for one in sets]
    if labels and (missing := set(labels) - set(kind.counts(train))):
        notes.append(f"no training {kind.unit} has the {kind.label} {', '.join(sorted(missing))}")
    built_in = sum(source.is_built_in for source in sources)
    fingerprint = _fingerprint(built_in, train, main.documents, labels)
    others = [one._replace(fingerprint=_fingerprint(0, Documents(()), one.documents, labels)) for one in others]
    of_first = main.name if kind.label or others else ""
    return Corpus(name, train, main.documents, fingerprint, of_first, labels, tuple(notes), tuple(others))


def _are_to_be_found(kind: Kind) -> bool:
    """Whether the source says what its labels are called."""
    return bool(kind.label) and kind.has_classes and not kind.names


def _read_sources(parts: Sequence[_Part], split: str | None, whole: bool) -> tuple[Documents, list[EvaluationSet]]:
    """What is learned from, and the sets to score on that all sources have together; none where others are named.

    Args:
        split: those of each source that the user names.
        whole: whether others are named, so that a source without such a set is learned from as a whole.
    """
    learned = []
    of_sources: dict[int, list[EvaluationSet]] = {}
    for part in parts:
        train = part.read(TRAIN)
        if not whole:
            sets = part.to_score_on(split, train)
            if not sets:
                train, evaluation = split_documents(train)
                sets = [EvaluationSet("test", evaluation)]
            for number, one in enumerate(sets):
                of_sources.setdefault(number, []).append(one)
        learned.append(train)
    joined = []
    for ones in of_sources.values():
        documents = _joined([one.documents for one in ones])
        joined.append(EvaluationSet(ones[-1].name, documents, all(one.has_labels for one in ones)))
    return _joined(learned), joined


def _held_out(parts: Sequence[_Part], sets: Sequence[EvaluationSet], named: Sequence[str]) -> dict[str, set[str]]:
    """The texts of all evaluation sets, by the set: of those to score on, and of any other that a source has."""
    texts = {one.name: set(one.documents.texts) for one in sets}
    first_named = len(parts) - len(named)
    for number, part in enumerate(parts):
        for of in part.sets():
            called = of if number < first_named else f"{of} ({named[number - first_named]})"
            texts.setdefault(called, set()).update(part.texts(of))
    return texts


def _without_texts_of(held_out: Mapping[str, set[str]], train: Documents, kind: Kind, notes: list[str]) -> Documents:
    """The documents whose text is in no evaluation set; `notes` counts the others."""
    for of, texts in held_out.items():
        before = len(train.texts)
        train = select(train, [text not in texts for text in train.texts])
        if left_out := before - len(train.texts):
            notes.append(f"{left_out} training {kind.text}s that are {of} {kind.text}s too are left out")
    return train


class _Part:
    """One source of a corpus, which is read split by split."""

    def __init__(
        self,
        source: Source,
        kind: Kind,
        columns: Mapping[str, str],
        names: Names,
        cache_dir: Path | None,
        learns: bool = True,
    ) -> None:
        self.source = source
        self.notes: list[str] = []
        self.first_rows: dict[str, str] = {}
        """Of what a text may have as its label, the place of the first row that has it."""
        self._kind = kind
        self._columns = columns
        self._names = names
        self._cache_dir = cache_dir
        self._learned = TRAIN if learns else ""
        """The split that is learned from; of a set that ``--eval-data`` names there is none."""
        self._labels = slice(1, 1 + len(kind.names or "1"))
        """Which columns are labels."""
        self._read: dict[str, Rows] = {}

    def _rows(self, of: str) -> Rows:
        if of not in self._read:
            may_lack = () if of == self._learned else [name for name, _ in list(self._columns.items())[self._labels]]
            self._read[of] = self.source.rows(of, self._columns, cache=self._cache_dir, may_lack=may_lack)
        return self._read[of]

    def _where(self, of: str) -> str:
        return f"{self.source.name} ({of})" if self._learned or of != TRAIN else self.source.name

    def sets(self) -> list[str]:
        """All evaluation sets of the source."""
        return evaluation_sets(self.source.sides, ("test", "validation"))

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
        where = self._where(of)
        rows = self._rows(of)
        read = [kind.read(place, self._columns, row, self._names) for place, row in rows]
        needs_number = of == self._learned and not kind.has_classes
        numbered = [(text, label, number) for number, (text, label) in enumerate(read)]
        kept = [row for row in numbered if row[0] and (row[1] or not needs_number)]
        for (place, _), (text, label) in zip(rows, read, strict=True):
            if text:
                self.first_rows.setdefault(label, place)
        if not kept:
            raise UsageError(f"{where} holds no {kind.text}: all {len(rows)} rows are without {kind.filling}")
        if empty := len(rows) - len(kept):
            self.notes.append(f"{empty} rows of {where} without {kind.filling} are left out")
        documents = Documents(*zip(*kept, strict=True))
        if not (kind.label and kind.has_classes) or of != self._learned:
            return documents
        for (place, row), (text, label) in zip(rows, read, strict=True):
            if text and not label and not is_marked(row[1]):
                raise no_label(place, self._columns, row[1])
        return self._labelled(documents, of, {""})

    def to_score_on(self, split: str | None, train: Documents) -> list[EvaluationSet]:
        """The sets that the user names, or the first one that has labels; none where some texts are to be set aside.

        Args:
            split: those that the user names, with commas between them.
        """
        sets = self.sets()
        preferred = ("test", "validation") if self._kind.label else ("validation", "test")[: 1 + self.source.is_hub]
        usual = evaluation_sets(sets, preferred)
        if split is None or (split == "test" and not usual):
            for of in usual:
                if (found := self.evaluation(of, train)).has_labels:
                    return [found]
                self.notes.append(
                    f"the {of} split of {self.source.name} has no {self._kind.label}s, so it is not scored on"
                )
            return []
        return [self.evaluation(self._called(name.strip(), sets), train) for name in split.split(",")]

    def _called(self, name: str, sets: Sequence[str]) -> str:
        """The set of that name, or the one whose name ends so: ``matched`` of ``dev_matched``, before one of tests.
        ``dev`` and the like are ``validation``.
        """
        if name.isalpha() and split_meant(name) in sets:
            return split_meant(name)
        by_use = evaluation_sets(sets, ("validation", "test"))
        endings = [of for of in by_use if of.endswith((f"_{name}", f"-{name}"))]
        if name not in sets and not endings:
            raise UsageError(f"{self.source.name} has no {name} split to score on; drop --split{nearest(name, sets)}")
        return name if name in sets else endings[0]

    def first_with_labels(self, train: Documents) -> EvaluationSet:
        """The first set of the source that has labels, or the first one where none has; a file is a set."""
        preferred = ("test", "validation") if self._kind.label else ("validation", "test")
        sets = evaluation_sets(self.source.sides, preferred) or [TRAIN]
        read = [self.evaluation(of, train) for of in sets]
        return next((one for one in read if one.has_labels), read[0])

    def evaluation(self, of: str, train: Documents) -> EvaluationSet:
        """A set with the documents that have labels; where none has, all of them, with empty labels."""
        documents = self.read(of)
        labelled = self._labelled(documents, of, self._missing(documents, train))
        if labelled.texts:
            return EvaluationSet(of, labelled)
        return EvaluationSet(of, replace(documents, labels=("",) * len(documents.texts)), has_labels=False)

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
            self.notes.append(f"{left_out} rows of {self._where(of)} without a {self._kind.label} are left out")
        return kept


def _fingerprint(built_in: int, train: Documents, evaluation: Documents, labels: Sequence[str]) -> str:
    versions = json.dumps(package_versions(), sort_keys=True)
    digest = hashlib.sha256()
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


def _joined(sides: Sequence[Documents]) -> Documents:
    if len(sides) == 1:
        return sides[0]
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
    texts, labels = (tuple(itertools.compress(column, keep)) for column in (documents.texts, documents.labels))
    return Documents(texts, labels, tuple(itertools.compress(documents.rows, keep)))


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
    train = kind.counts(kept)
    scored = kind.counts(evaluation)
    has = f"training has {', '.join(sorted(train))}"
    for label in sorted(set(scored) - set(train))[:1]:
        place = next(place for of_text, place in first_rows.items() if label in kind.labels_of(of_text))
        raise UsageError(
            f"{name}: no training {kind.unit} has the {kind.label} {label!r}, which {scored[label]} {kind.unit}s to "
            f"score on have (first in {place.rstrip(':')}); {has}"
        )
    if len(train) < kind.fewest:
        raise UsageError(f"{name}: {kind.fewest} {kind.label}s are needed, and {has}: is {flag} right?")
    numbers = all(NUMBER.fullmatch(label) for label in train)
    return tuple(names or sorted(train, key=int if numbers else None))
