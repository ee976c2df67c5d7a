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
from asyncsgd.data.evaluation_sets import EvaluationSet, named_places
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
from asyncsgd.settings.groups import EvalData


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
        """The corpus with each set in turn as the one to evaluate on."""
        corpora = [self]
        for number, further in enumerate(self.sets, start=1):
            corpora.append(replace(self, eval=further.documents, split=further.name, number=number))
        return tuple(corpora)

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        if not blocks:
            return self.fingerprint
        digest = hashlib.sha256(f"blocks {self.fingerprint}".encode())
        return digest.hexdigest()[:16]


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
    fewest: int = 2  # the training texts must have so many labels
    names: Names = None  # the names of the labels, where the columns have these names

    def sources(
        self, data: str, columns: Mapping[str, str], eval_data: EvalData | None = None, reading: Reading = AS_IT_IS
    ) -> tuple[list[Source], dict[str, Source]]:
        """The sources that `load_corpus` reads, before any is read: the parts of `data`, and the sets of `eval_data` by
        name.
        """
        kinds = TABLES if self.label else KINDS
        scored = {}
        for name, place in named_places(eval_data).items():
            scored[name] = Source(place, "--eval-data", kinds=kinds, takes=(), reading=reading)
        if not self.label:
            parts = [Source(part, takes=self.takes, reading=reading) for part in joined_parts(data)]
            return parts, scored
        if len(columns) < 2:
            name, flag = next(iter(columns.items()))
            raise UsageError(f"{self.text}s and {self.label}s are both {name!r}; name another with {flag}")
        source = Source(data, kinds=TABLES, needs=TRAIN, takes=self.takes, reading=reading)
        return [source], scored

    def counts(self, documents: Documents) -> Counter[str]:
        """How many documents have each label."""
        counts: Counter[str] = Counter()
        for label in documents.labels:
            counts.update(self.labels_of(label))
        return counts


def _read_text(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    """The text and the label of a row whose columns are a text and, unless texts are plain, a label."""
    text_column = next(iter(columns))
    text = without_surrogates(text_of(where, text_column, row[0])).strip()
    if not text or len(columns) == 1:
        return text, ""
    return text, label_name(where, columns, row[1], names)


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
    # The names of all sources are checked before the first one is read, which may take a while.
    sources, named = kind.sources(data, columns, eval_data, reading)
    name = "+".join(source.name for source in sources)
    names = _label_names(sources[0], kind, columns)
    parts = [_Part(source, kind, columns, names, cache_dir) for source in sources]
    train, sets = _read_sources(parts, split, whole=bool(named))
    for set_name, source in named.items():
        own_names = _label_names(source, kind, columns)
        part = _Part(source, kind, columns, own_names or names, cache_dir, learns=False)
        parts.append(part)
        evaluation = part.first_with_labels(train)
        sets.append(evaluation._replace(name=set_name))
    main, *others = sets
    if not main.has_labels:
        where = named[main.name].name if named else f"the {main.name} split of {name}"
        advice = "name a set with labels first" if named or others else "drop --split"
        raise UsageError(f"{where} has no {kind.label}s to score on; {advice}")
    notes = []
    for part in parts:
        notes += part.source.notes
        notes += part.notes
    for further in others:
        if not further.has_labels:
            notes.append(f"{further.name} has no {kind.label}s, so it is not scored")
    held_out = _held_out(parts, sets, list(named))
    train = _without_texts_of(held_out, train, kind, notes)
    can_evaluate = all(evaluation.documents.texts for evaluation in sets)
    if not train.texts or not can_evaluate:
        use = "train" if can_evaluate else "evaluate"
        source_notes = "".join(f"; {note}" for part in parts for note in part.source.notes)
        raise UsageError(
            f"{name} has too few {kind.text}s to {use} on; name other data, or texts to evaluate on{source_notes}"
        )
    labels: tuple[str, ...] = ()
    if kind.label and kind.has_classes:
        first_rows: dict[str, str] = {}
        for part in reversed(parts):
            first_rows |= part.first_rows
        labelled = _joined([evaluation.documents for evaluation in sets if evaluation.has_labels])
        _, flag, *_ = columns.values()
        labels = _labels(name, names, kind, train, labelled, flag, first_rows)
    train = limited(train, limits[0])
    missing = set(labels) - set(kind.counts(train))
    if missing:
        notes.append(f"no training {kind.unit} has the {kind.label} {', '.join(sorted(missing))}")
    num_built_in = sum(source.is_built_in for source in sources)
    limited_sets = []
    for evaluation in sets:
        # A set without labels is predicted as a whole.
        documents = limited(evaluation.documents, limits[1]) if evaluation.has_labels else evaluation.documents
        fingerprint = _fingerprint(0, Documents(()), documents, labels)
        limited_sets.append(evaluation._replace(documents=documents, fingerprint=fingerprint))
    main, *others = limited_sets
    return Corpus(
        name,
        train,
        eval=main.documents,
        fingerprint=_fingerprint(num_built_in, train, main.documents, labels),
        split=main.name if kind.label or others else "",
        labels=labels,
        notes=tuple(notes),
        sets=tuple(others),
    )


def _label_names(source: Source, kind: Kind, columns: Mapping[str, str]) -> Names:
    """The names of the labels: the kind's, or what the source calls them."""
    if kind.names or not (kind.label and kind.has_classes):
        return kind.names
    _, label_column, *_ = columns
    return names_of(source, label_column)


def _read_sources(parts: Sequence[_Part], split: str | None, whole: bool) -> tuple[Documents, list[EvaluationSet]]:
    """The documents to learn from, and the evaluation sets of the sources. The first sets of all sources are joined
    into one set, and so are the second ones, and so on.

    Args:
        split: the sets of each source that the user names.
        whole: whether sets of other sources are named. Then there are no sets, and every source is learned from as a
            whole.
    """
    learned = []
    sets_of_sources: dict[int, list[EvaluationSet]] = {}
    for part in parts:
        train = part.read(TRAIN)
        if not whole:
            sets = part.to_score_on(split, train)
            if not sets:
                train, evaluation = split_documents(train)
                sets = [EvaluationSet("test", evaluation)]
            for number, evaluation_set in enumerate(sets):
                sets_of_sources.setdefault(number, []).append(evaluation_set)
        learned.append(train)
    joined = []
    for sets in sets_of_sources.values():
        documents = _joined([evaluation_set.documents for evaluation_set in sets])
        have_labels = all(evaluation_set.has_labels for evaluation_set in sets)
        joined.append(EvaluationSet(sets[-1].name, documents, have_labels))
    return _joined(learned), joined


def _held_out(parts: Sequence[_Part], sets: Sequence[EvaluationSet], named: Sequence[str]) -> dict[str, set[str]]:
    """The texts of all evaluation sets, by the set: of those to score on, and of any other that a source has."""
    texts = {evaluation.name: set(evaluation.documents.texts) for evaluation in sets}
    first_named = len(parts) - len(named)
    for number, part in enumerate(parts):
        for split in part.sets():
            called = split
            if number >= first_named:
                called = f"{split} ({named[number - first_named]})"
            texts.setdefault(called, set()).update(part.texts(split))
    return texts


def _without_texts_of(held_out: Mapping[str, set[str]], train: Documents, kind: Kind, notes: list[str]) -> Documents:
    """The documents whose text is in no evaluation set; `notes` counts the others."""
    for set_name, texts in held_out.items():
        before = len(train.texts)
        train = select(train, [text not in texts for text in train.texts])
        num_left_out = before - len(train.texts)
        if num_left_out:
            notes.append(f"{num_left_out} training {kind.text}s that are {set_name} {kind.text}s too are left out")
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
        """The place of the first row that has a label, by that label."""
        self._kind = kind
        self._columns = columns
        self._names = names
        self._cache_dir = cache_dir
        self._learned = TRAIN if learns else ""
        """The split that is learned from; empty where ``--eval-data`` names the source."""
        num_label_columns = len(kind.names) if kind.names else 1
        self._labels = slice(1, 1 + num_label_columns)
        """Which columns are labels."""
        self._read: dict[str, Rows] = {}

    def _rows(self, split: str) -> Rows:
        """The rows of a split, which are read once."""
        if split not in self._read:
            may_lack: Sequence[str] = ()
            if split != self._learned:
                may_lack = list(self._columns)[self._labels]
            self._read[split] = self.source.rows(split, self._columns, cache=self._cache_dir, may_lack=may_lack)
        return self._read[split]

    def _where(self, split: str) -> str:
        """What messages call a split of the source."""
        if split == TRAIN and not self._learned:
            return self.source.name
        return f"{self.source.name} ({split})"

    def sets(self) -> list[str]:
        """All evaluation sets of the source."""
        return evaluation_sets(self.source.sides, ("test", "validation"))

    def texts(self, split: str) -> Iterator[str]:
        """The texts of a set, whatever its labels are."""
        for place, row in self._rows(split):
            unlabelled = list(row)
            num_labels = len(row[self._labels])
            unlabelled[self._labels] = [None] * num_labels
            text, _ = self._kind.read(place, self._columns, tuple(unlabelled), self._names)
            if text:
                yield text

    def read(self, split: str) -> Documents:
        """The documents of a split. Those to learn from have labels; elsewhere a label that is missing is empty."""
        kind = self._kind
        is_learned = split == self._learned
        where = self._where(split)
        rows = self._rows(split)
        kept = []
        unlabelled = []
        for number, (place, row) in enumerate(rows):
            text, label = kind.read(place, self._columns, row, self._names)
            if not text:
                continue
            self.first_rows.setdefault(label, place)
            if label or kind.has_classes or not is_learned:
                kept.append((text, label, number))
            if not label:
                unlabelled.append((place, row))
        if not kept:
            raise UsageError(f"{where} holds no {kind.text}: all {len(rows)} rows are without {kind.filling}")
        num_empty = len(rows) - len(kept)
        if num_empty:
            self.notes.append(f"{num_empty} rows of {where} without {kind.filling} are left out")
        documents = Documents(*zip(*kept, strict=True))
        if not (kind.label and kind.has_classes and is_learned):
            return documents
        for place, row in unlabelled:
            if not is_marked(row[1]):
                raise no_label(place, self._columns, row[1])
        return self._labelled(documents, split, {""})

    def to_score_on(self, split: str | None, train: Documents) -> list[EvaluationSet]:
        """The sets that the user names, or the first one that has labels; none where some texts are to be set aside.

        Args:
            split: the names of sets that the user gives, with commas between them.
        """
        sets = self.sets()
        preferred = ["validation"]
        if self._kind.label:
            preferred = ["test", "validation"]
        elif self.source.is_hub:
            preferred = ["validation", "test"]
        usual = evaluation_sets(sets, preferred)
        if split is None or (split == "test" and not usual):
            for name in usual:
                evaluation = self.evaluation(name, train)
                if evaluation.has_labels:
                    return [evaluation]
                self.notes.append(
                    f"the {name} split of {self.source.name} has no {self._kind.label}s, so it is not scored on"
                )
            return []
        named = []
        for name in split.split(","):
            set_name = self._called(name.strip(), sets)
            named.append(self.evaluation(set_name, train))
        return named

    def _called(self, name: str, sets: Sequence[str]) -> str:
        """The set that the user means by a name.

        It is the set of that name, or else one whose name ends so: ``matched`` is ``dev_matched``, or ``test_matched``
        where there is no such validation set. ``dev`` and the like are ``validation``.
        """
        if name.isalpha() and split_meant(name) in sets:
            return split_meant(name)
        if name in sets:
            return name
        for set_name in evaluation_sets(sets, ("validation", "test")):
            if set_name.endswith((f"_{name}", f"-{name}")):
                return set_name
        raise UsageError(f"{self.source.name} has no {name} split to score on; drop --split{nearest(name, sets)}")

    def first_with_labels(self, train: Documents) -> EvaluationSet:
        """The first set of the source that has labels, or the first one where none has; a file is a set."""
        preferred = ("test", "validation") if self._kind.label else ("validation", "test")
        names = evaluation_sets(self.source.sides, preferred) or [TRAIN]
        sets = [self.evaluation(name, train) for name in names]
        for evaluation in sets:
            if evaluation.has_labels:
                return evaluation
        return sets[0]

    def evaluation(self, split: str, train: Documents) -> EvaluationSet:
        """A set with the documents that have labels; where none has, all of them, with empty labels."""
        documents = self.read(split)
        labelled = self._labelled(documents, split, self._missing(documents, train))
        if labelled.texts:
            return EvaluationSet(split, labelled)
        unlabelled = replace(documents, labels=("",) * len(documents.texts))
        return EvaluationSet(split, unlabelled, has_labels=False)

    def _missing(self, scored: Documents, train: Documents) -> set[str]:
        """The labels that stand for no label in a set to score on.

        -1 is a class as any other if the training texts have it and classes have no names. It is a number as any other
        if there are others.
        """
        if not self._kind.label:
            return set()
        no_labels = {*NO_LABEL, ""}
        if not self._kind.has_classes and not set(scored.labels) <= no_labels:
            return {""}
        return no_labels - set(train.labels)

    def _labelled(self, documents: Documents, split: str, missing: Collection[str]) -> Documents:
        """The documents whose label is not among `missing`; where some are left out, it is noted."""
        kept = select(documents, [label not in missing for label in documents.labels])
        left_out = len(documents.texts) - len(kept.texts)
        if left_out and kept.texts:
            self.notes.append(f"{left_out} rows of {self._where(split)} without a {self._kind.label} are left out")
        return kept


def _fingerprint(num_built_in: int, train: Documents, evaluation: Documents, labels: Sequence[str]) -> str:
    """`Corpus.fingerprint`; the versions of packages count once for each source that is built in."""
    versions = json.dumps(package_versions(), sort_keys=True) * num_built_in
    digest = hashlib.sha256()
    if labels or any(train.labels):
        digest.update(json.dumps([versions, *labels]).encode())
        for documents in (train, evaluation):
            digest.update(json.dumps([documents.texts, documents.labels]).encode())
        return digest.hexdigest()[:16]
    digest.update(versions.encode())
    for documents in (train, evaluation):
        digest.update(f"side {len(documents.texts)}\n".encode())
        for encoded in map(str.encode, documents.texts):
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(f"{len(encoded)}\n".encode())
            digest.update(encoded)
    return digest.hexdigest()[:16]


def _joined(parts: Sequence[Documents]) -> Documents:
    """The documents of several sources, one behind another."""
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
        first_rows: the place of the first row that has a label, by that label.
    """
    train = kind.counts(kept)
    scored = kind.counts(evaluation)
    train_labels = f"training has {', '.join(sorted(train))}"
    unknown = set(scored) - set(train)
    if unknown:
        label = min(unknown)
        place = next(place for text_label, place in first_rows.items() if label in kind.labels_of(text_label))
        raise UsageError(
            f"{name}: no training {kind.unit} has the {kind.label} {label!r}, which {scored[label]} {kind.unit}s to "
            f"score on have (first in {place.rstrip(':')}); {train_labels}"
        )
    if len(train) < kind.fewest:
        raise UsageError(f"{name}: {kind.fewest} {kind.label}s are needed, and {train_labels}: is {flag} right?")
    if names:
        return tuple(names)
    are_numbers = all(NUMBER.fullmatch(label) for label in train)
    return tuple(sorted(train, key=int if are_numbers else None))
