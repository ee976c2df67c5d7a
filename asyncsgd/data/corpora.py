"""Texts to train on and texts to evaluate on: the same on every machine that has the same source.

The order is fixed, the split is decided by each text alone, and `Corpus.fingerprint` names the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from asyncsgd.data.corpus_parts import CorpusPart
from asyncsgd.data.documents import Documents, joined, limited, select, split_documents
from asyncsgd.data.evaluation_sets import EvaluationSet
from asyncsgd.data.files import (
    AS_IT_IS,
    Reading,
    Source,
)
from asyncsgd.data.folders import TRAIN
from asyncsgd.data.kinds import PLAIN, Kind
from asyncsgd.data.labels import NUMBER, Names, names_of
from asyncsgd.data.pydocs import package_versions
from asyncsgd.errors import UsageError
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
    """What `eval` is, where documents have labels or there are several sets: ``test``, ``validation``, or the name of
    another set; else empty."""
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
        """The fingerprint, or another one where texts are cut in blocks, which are another test than texts one by
        one.
        """
        if not blocks:
            return self.fingerprint
        digest = hashlib.sha256(f"blocks {self.fingerprint}".encode())
        return digest.hexdigest()[:16]


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

    Texts to evaluate on are those of `eval_data`, or of another split of a folder or Hub data set, or else what
    `split_documents` sets aside, called ``test``. Of texts with labels that other split is ``test``, else
    ``validation``; of plain texts on the Hub it is ``validation``, else ``test``; of plain texts in a folder it is
    ``validation``. A split without labels is not scored on; the next one is. Of several sets that are named, the first
    must have labels; one without any is predicted and not scored. Rows without text are left out, and so are rows whose
    label is -1, with which GLUE marks those without one. A text of any evaluation set is never trained on. `notes`
    counts all of these. Labels that are numbers get their names from ``labels.json`` beside the files, or as the
    Hugging Face library has left them in a Parquet file; else a number is its own name.

    Args:
        data: ``"pydocs"`` (whose labels are the packages), a file, a folder (see `asyncsgd.data.folders`), or
            ``"hub:NAME[:CONFIG]"``. ``A+B`` joins plain texts, and the evaluation texts that each source sets aside for
            itself.
        columns: that of the texts and that of the labels, each with the flag that chooses it.
        eval_data: sets to evaluate on, see `asyncsgd.data.evaluation_sets.named_places`: tables or texts.
        split: ``"test"``, ``"validation"`` or another set of the source, or several with commas between them; None
            takes the first that has labels.
        limits: at most so many texts to train on, and of each set to score on, taken evenly over the source's order; 0
            for all.
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
    parts = [CorpusPart(source, kind, columns, names, cache_dir) for source in sources]
    train, sets = _read_sources(parts, split, sets_aside=not named)
    for set_name, source in named.items():
        own_names = _label_names(source, kind, columns)
        part = CorpusPart(source, kind, columns, own_names or names, cache_dir, learns=False)
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
        labelled = joined([evaluation.documents for evaluation in sets if evaluation.has_labels])
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


def _read_sources(
    parts: Sequence[CorpusPart], split: str | None, sets_aside: bool
) -> tuple[Documents, list[EvaluationSet]]:
    """The documents to learn from, and the evaluation sets of the sources. The first sets of all sources are joined
    into one set, and so are the second ones, and so on.

    Args:
        split: the sets of each source that the user names.
        sets_aside: whether sources are scored on, on sets of their own or on texts that are set aside; else sets of
            other sources are named.
    """
    learned = []
    sets_of_sources: dict[int, list[EvaluationSet]] = {}
    for part in parts:
        train = part.read(TRAIN)
        if sets_aside:
            sets = part.to_score_on(split, train)
            if not sets:
                train, evaluation = split_documents(train)
                sets = [EvaluationSet("test", evaluation)]
            for number, evaluation_set in enumerate(sets):
                sets_of_sources.setdefault(number, []).append(evaluation_set)
        learned.append(train)
    joined_sets = []
    for sets in sets_of_sources.values():
        documents = joined([evaluation_set.documents for evaluation_set in sets])
        have_labels = all(evaluation_set.has_labels for evaluation_set in sets)
        # Where the sources call their sets differently, the name of the last one stands for all.
        joined_sets.append(EvaluationSet(sets[-1].name, documents, have_labels))
    return joined(learned), joined_sets


def _held_out(parts: Sequence[CorpusPart], sets: Sequence[EvaluationSet], named: Sequence[str]) -> dict[str, set[str]]:
    """The texts of all evaluation sets, by the set: of those to score on, and of any other that a source has."""
    texts = {evaluation.name: set(evaluation.documents.texts) for evaluation in sets}
    # The sources of named sets are the last ones.
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


def _fingerprint(num_built_in: int, train: Documents, evaluation: Documents, labels: Sequence[str]) -> str:
    """`Corpus.fingerprint`; the versions of packages count once for each source that is built in."""
    # Repeated as text, as in all fingerprints before.
    versions = json.dumps(package_versions(), sort_keys=True) * num_built_in
    digest = hashlib.sha256()
    # Texts without labels keep the digest that they had before there were labels.
    if labels or any(train.labels) or any(evaluation.labels):
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


def _labels(
    name: str,
    names: Names,
    kind: Kind,
    train: Documents,
    evaluation: Documents,
    flag: str,
    first_rows: Mapping[str, str],
) -> tuple[str, ...]:
    """The names of all labels, in the order of their numbers.

    Args:
        first_rows: the place of the first row that has a label, by that label.
    """
    train_counts = kind.counts(train)
    scored_counts = kind.counts(evaluation)
    train_labels = f"training has {', '.join(sorted(train_counts))}"
    unknown = set(scored_counts) - set(train_counts)
    if unknown:
        label = min(unknown)
        place = next(place for text_label, place in first_rows.items() if label in kind.labels_of(text_label))
        raise UsageError(
            f"{name}: no training {kind.unit} has the {kind.label} {label!r}, which {scored_counts[label]} "
            f"{kind.unit}s to score on have (first in {place.rstrip(':')}); {train_labels}"
        )
    if len(train_counts) < kind.fewest:
        raise UsageError(f"{name}: {kind.fewest} {kind.label}s are needed, and {train_labels}: is {flag} right?")
    if names:
        return tuple(names)
    are_numbers = all(NUMBER.fullmatch(label) for label in train_counts)
    return tuple(sorted(train_counts, key=int if are_numbers else None))
