"""One source of a corpus, split by split: which rows are learned from, which sets it has, which labels are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from asyncsgd.data.documents import Documents, select
from asyncsgd.data.evaluation_sets import EvaluationSet
from asyncsgd.data.files import Rows, Source
from asyncsgd.data.folders import TRAIN, evaluation_sets, split_meant
from asyncsgd.data.kinds import Kind
from asyncsgd.data.labels import NO_LABEL, Names, is_marked
from asyncsgd.errors import UsageError, nearest


class CorpusPart:
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
        self._train_split = TRAIN if learns else ""
        """The split that is learned from; empty where ``--eval-data`` names the source."""
        num_label_columns = len(kind.names) if kind.names else 1
        self._labels = slice(1, 1 + num_label_columns)
        """Which columns are labels."""
        self._read: dict[str, Rows] = {}

    def _rows(self, split: str) -> Rows:
        """The rows of a split, which are read once."""
        if split not in self._read:
            may_lack: Sequence[str] = ()
            if split != self._train_split:
                may_lack = list(self._columns)[self._labels]
            self._read[split] = self.source.rows(split, self._columns, cache=self._cache_dir, may_lack=may_lack)
        return self._read[split]

    def _where(self, split: str) -> str:
        """What messages call a split of the source."""
        if split == TRAIN and not self._train_split:
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
        is_learned = split == self._train_split
        where = self._where(split)
        rows = self._rows(split)
        kept = []
        unlabelled = []
        for number, (place, row) in enumerate(rows):
            text, label = kind.read(place, self._columns, row, self._names)
            if not text:
                continue
            if label:
                self.first_rows.setdefault(label, place)
            # Without a number there is nothing to learn from; rows without a class are looked at below.
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
        # The first label column stands for all: a row is marked as without label where that says so, e.g. by -1.
        for place, row in unlabelled:
            if not is_marked(row[1]):
                column, flag = list(self._columns.items())[1]
                raise UsageError(
                    f"{place} column {column!r} holds {row[1]!r}, and a row to learn from needs a {kind.label}; mend "
                    f"the row or leave it out, or choose another column with {flag} NAME"
                )
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
        preferred_sets = evaluation_sets(sets, preferred)
        # Texts that are set aside are called test, so --split test asks for them where the source has no sets at all.
        if split is None or (split == "test" and not sets):
            for name in preferred_sets:
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
        """The first set of the source that has labels, or the first one where none has. The set of a single file is its
        only split, which is called train.
        """
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
        """The labels that stand for no label in a set to score on: the empty one, and -1 unless

        - labels are classes, and training texts have the class -1. Where classes have names, no label is -1 here: it
          was read as an empty one.
        - labels are numbers, and the set has other numbers too, or training texts have the number -1.
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
