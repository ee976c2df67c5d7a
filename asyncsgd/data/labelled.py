"""Labelled texts for fine-tuning, and their batches: pure functions of (seed, index).

Shapes: B sequences, L tokens per sequence (padded, special tokens included), C classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from asyncsgd.data.batching import Frame, Orders
from asyncsgd.data.corpora import (
    EVAL_NAMES,
    TEST_NAMES,
    TRAIN_NAMES,
    Rows,
    check_columns,
    existing_path,
    files_in,
    files_named,
    hub_name,
    load_hub_splits,
    needs,
    read_rows,
    select,
    split_documents,
    table_extension,
    text_of,
    without,
)
from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.pydocs import load_pydocs, package_versions
from asyncsgd.data.tokenization import Tokens, cache_key, publish, tokenize_beginnings
from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:
    import datasets

LABELLED_FORMAT = 1
"""Changes when the same texts get other arrays: old caches are then left alone and new ones are made."""

TABLES = (".parquet", ".csv", ".jsonl")
HELD_OUT = 0.05
"""Share of the texts that is set aside where a source has no test or validation split. The hash is that of
`asyncsgd.data.corpora.load_corpus`, and the share is not larger, so pretraining has seen none of these texts.
"""


@dataclass(frozen=True)
class LabelledData:
    """Texts to train on and texts to score on, each with the name of its class; no text is on both sides.

    Args:
        name: as `asyncsgd.data.corpora.Corpus.name`.
        train, eval: with labels.
        split: what `eval` is, ``"test"`` or ``"validation"``.
        labels: the names of the C classes, in the order of their numbers.
        notes: what was left out and why, for the user.
        fingerprint: 16 hexadecimal digits that change whenever a text, a label, their order or their side changes.
    """

    name: str
    train: Documents
    eval: Documents
    split: str
    labels: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str

    def classes(self, documents: Documents) -> np.ndarray:
        """The number of each document's class, int64; new."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        assert documents.labels is not None
        return np.array([numbers[label] for label in documents.labels], dtype=np.int64)


@dataclass(frozen=True)
class Side:
    """Rows as they were read, with the names that belong to numbers as labels (None where there are none)."""

    rows: Rows
    names: tuple[str, ...] | None


def load_labelled(
    data: str,
    *,
    text_column: str,
    label_column: str,
    cache_dir: Path,
    split: str | None = None,
    train_samples: int = 0,
    eval_samples: int = 0,
) -> LabelledData:
    """Load the labelled texts that `data` names.

    Rows without text are left out, and so are training texts that occur in the evaluation texts too; `notes` counts
    both. Labels that are numbers get their names from ``labels.json`` beside the files. Without that file, a Parquet
    file may hold the names, written there by the Hugging Face library. Otherwise a number is its own name.

    Args:
        data: ``"pydocs"`` (which installed package a docstring comes from), a folder with ``train.*`` and ``test.*``
            or ``validation.*`` (.parquet, .csv or .jsonl), a file of that kind, or ``"hub:NAME[:CONFIG]"``. Where no
            split is there to score on, a twentieth of the texts is set aside, by a hash of the text, and called test.
        text_column, label_column: of the table.
        cache_dir: folder in which ``pydocs`` is kept between runs.
        split: ``"test"`` or ``"validation"``; None takes test where there is one.
        train_samples, eval_samples: at most so many, taken evenly over the source's order; 0 for all.

    Raises:
        UsageError: the source or a column is missing or damaged, a label is missing or only in the evaluation texts,
            there is one class only, or no text is left.
    """
    check_labelled(data, text_column, label_column)
    columns = {text_column: "--text-column", label_column: "--label-column"}
    notes: list[str] = []
    origin, train, evaluation = "", None, None
    if data == "pydocs":
        name, origin = data, json.dumps(package_versions(), sort_keys=True)
        documents = load_pydocs(cache_dir)
        names: tuple[str, ...] | None = tuple(dict.fromkeys(documents.labels or ()))
        sides: dict[str, Documents] = {"train": documents}
    else:
        if data.startswith("hub:"):
            name, read = data, hub_sides(data, columns)
        else:
            path = existing_path(data, "--data", kinds=TABLES)
            name, read = path.name, path_sides(path, columns)
        names = next((side.names for side in read.values() if side.names), None)
        sides = {side: _documents(f"{name} ({side})", read[side], names, columns, notes) for side in read}
    train, evaluation, split = chosen_sides(name, sides, split)
    kept = without(train, evaluation)
    if len(kept.texts) < len(train.texts):
        notes.append(f"{len(train.texts) - len(kept.texts)} training texts that are {split} texts too are left out")
    labels = _classes(name, names, kept, evaluation, split)
    kept, evaluation = limited(kept, train_samples), limited(evaluation, eval_samples)
    missing = set(labels) - set(kept.labels or ())
    if missing:
        notes.append(f"no training text has the label {', '.join(sorted(missing))}")
    return LabelledData(
        name, kept, evaluation, split, labels, tuple(notes), fingerprint_of(origin, labels, kept, evaluation)
    )


def check_labelled(data: str, text_column: str, label_column: str) -> None:
    """Look at what `load_labelled` would read, and read nothing.

    Raises:
        UsageError: if a file or folder is missing or of an unknown kind, a Hub data set has no name, or the columns are
            one.
    """
    if text_column == label_column:
        raise UsageError(f"--text-column and --label-column are both {text_column!r}; name two columns")
    if data.startswith("hub:"):
        hub_name(data)
    elif data != "pydocs":
        files_of_sides(existing_path(data, "--data", kinds=TABLES))


def chosen_sides(name: str, sides: dict[str, Documents], split: str | None) -> tuple[Documents, Documents, str]:
    """(train, evaluation, its split); a part of train is set aside where there is nothing to score on.

    Raises:
        UsageError: if the wanted `split` is not there, or there are too few texts to set some aside.
    """
    splits = [side for side in ("test", "validation") if side in sides]
    if not splits:
        if split == "validation":
            raise UsageError(
                f"{name} has no validation split: a twentieth of it is set aside and called test; drop --split"
            )
        train, held_out = split_documents(sides["train"], HELD_OUT)
        if not train.texts or not held_out.texts:
            raise UsageError(f"{name} has too few texts ({len(sides['train'].texts)}) to set some aside for the scores")
        return train, held_out, "test"
    if split is not None and split not in splits:
        raise UsageError(f"{name} has no {split} split; drop --split, or type --split {splits[0]}")
    chosen = split or splits[0]
    return sides["train"], sides[chosen], chosen


def _classes(
    name: str, names: tuple[str, ...] | None, train: Documents, evaluation: Documents, split: str
) -> tuple[str, ...]:
    known = Counter(train.labels)
    for label, count in Counter(evaluation.labels).items():
        if label not in known:
            raise UsageError(
                f"{name}: the label {label!r} is on {count} {split} texts and on no training text, so no model can "
                f"learn it; training has {', '.join(sorted(known)) or 'no text at all'}; "
                f"mend the label or leave these rows out"
            )
    if len(known) < 2:
        only = f"one label only ({next(iter(known))!r})" if known else "no training text"
        raise UsageError(f"{name} has {only}; a classifier needs two classes: is --label-column right?")
    if names is not None:
        return names
    number = all(label.lstrip("-").isdecimal() for label in known)
    return tuple(sorted(known, key=int)) if number else tuple(sorted(known))


def limited(documents: Documents, limit: int) -> Documents:
    """At most `limit` documents, taken evenly over their order; 0 for all."""
    total = len(documents.texts)
    count = min(limit or total, total)
    chosen = set((np.arange(count) * total // max(count, 1)).tolist())
    return select(documents, [index in chosen for index in range(total)])


def fingerprint_of(origin: str, labels: Sequence[str], train: Documents, evaluation: Documents) -> str:
    """16 hexadecimal digits; see `LabelledData`."""
    digest = hashlib.sha256(json.dumps([origin, *labels]).encode())
    for documents in (train, evaluation):
        digest.update(json.dumps([documents.texts, documents.labels]).encode())
    return digest.hexdigest()[:16]


def path_sides(path: Path, columns: Mapping[str, str]) -> dict[str, Side]:
    """The splits of a file or folder, by name; ``train`` is always there."""
    return {side: _side(paths, columns) for side, paths in files_of_sides(path).items()}


def files_of_sides(path: Path) -> dict[str, list[Path]]:
    """The files of the splits of a file or folder, by name.

    Raises:
        UsageError: if there is no training file, or a file has no columns.
    """
    if not path.is_dir():
        table_extension(path)
        return {"train": [path]}
    files = files_in(path, TABLES)
    by_split = {
        side: files_named(files, names)
        for side, names in (("train", TRAIN_NAMES), ("test", TEST_NAMES), ("validation", EVAL_NAMES))
    }
    if not by_split["train"]:
        there = ", ".join(p.name for p in sorted(path.iterdir())[:8]) or "nothing"
        raise UsageError(
            f"the folder {path} has no train file ({', '.join('train' + kind for kind in TABLES)}); it holds {there}; "
            f"give the folder of the data set, or a file"
        )
    return {side: paths for side, paths in by_split.items() if paths}


def _side(paths: Sequence[Path], columns: Mapping[str, str]) -> Side:
    label_column = list(columns)[1]
    names = next(filter(None, (_names_beside(path) or _feature_names(path, label_column) for path in paths)), None)
    return Side([row for path in paths for row in read_rows(path, columns)], names)


def _names_beside(path: Path) -> tuple[str, ...] | None:
    """The names in ``labels.json``: a list, or an object from number to name."""
    file = path.with_name("labels.json")
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names = [content[str(number)] for number in range(len(content))] if isinstance(content, dict) else content
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    except (OSError, ValueError, KeyError):
        pass
    raise UsageError(f'{file} must hold the names of the labels, like ["no", "yes"] or {{"0": "no", "1": "yes"}}')


def _feature_names(path: Path, label_column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel, or of a list of them, that the Hugging Face library left in a Parquet file."""
    if not path.name.lower().endswith(".parquet"):
        return None
    with needs("pyarrow", str(path)):
        import pyarrow as pa
        import pyarrow.parquet as pq

    # A damaged file is reported where its rows are read.
    with contextlib.suppress(pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        metadata = pq.read_schema(path).metadata or {}
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label_column]
        while "names" not in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        return tuple(feature["names"])
    return None


def _documents(
    where: str, side: Side, names: tuple[str, ...] | None, columns: Mapping[str, str], notes: list[str]
) -> Documents:
    text_column = next(iter(columns))
    texts, labels = [], []
    for row, (value, label) in side.rows:
        text = without_surrogates(text_of(row, text_column, value)).strip()
        if text:
            texts.append(text)
            labels.append(label_name(row, columns, label, names))
    empty = len(side.rows) - len(texts)
    if not texts:
        raise UsageError(f"{where} holds no text: all {empty} rows are empty in the column {text_column!r}")
    if empty:
        notes.append(f"{empty} rows of {where} without text are left out")
    return Documents(tuple(texts), tuple(labels))


def label_name(where: str, columns: Mapping[str, str], value: object, names: tuple[str, ...] | None) -> str:
    """The name of a label.

    Args:
        where: words that say where the label stands, for messages.
        columns: as `read_rows` takes them; the second is the label's.
        value: as it was read.
        names: those that belong to numbers; None where labels are their own names.

    Raises:
        UsageError: if it is missing, neither text nor a whole number, or has no name.
    """
    column, flag = list(columns.items())[1]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with a missing label holds whole numbers as floats
    if value is None or (isinstance(value, float) and value != value) or str(value).strip() == "":
        raise UsageError(f"{where} no label in column {column!r}; fill it in or leave the row out")
    if not isinstance(value, str | int):
        raise UsageError(
            f"{where} column {column!r} holds {type(value).__name__} values, and a label is text or a whole number; "
            f"choose another column with {flag} NAME"
        )
    text = str(value).strip()
    if names is None or text in names:
        return text
    if text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    raise UsageError(f"{where} label {text!r} has no name{nearest(text, names)}; the labels are {', '.join(names)}")


def hub_sides(data: str, columns: Mapping[str, str]) -> dict[str, Side]:
    """The splits of a Hub data set, by name; ``train`` is always there."""
    name, config = hub_name(data)
    splits = load_hub_splits(name, config)
    if "train" not in splits:
        raise UsageError(f"the data set {name} has no split 'train'; it has {', '.join(splits)}")
    return {side: hub_side(name, splits[side], columns) for side in ("train", "test", "validation") if side in splits}


def hub_side(name: str, split: datasets.Dataset, columns: Mapping[str, str]) -> Side:
    """One split of a Hub data set."""
    check_columns(f"the data set {name}", columns, split.column_names)
    feature = split.features[list(columns)[1]]
    names = getattr(getattr(feature, "feature", feature), "names", None)
    values = zip(*(split[column] for column in columns), strict=True)
    return Side([(f"the data set {name}:", row) for row in values], tuple(names) if names else None)


@dataclass(frozen=True)
class HateCheck:
    """Functional tests of a hate-speech classifier: short texts, each made to test one thing it should get right.

    Röttger, Vidgen, Nguyen, Waseem, Margetts, Pierrehumbert: HateCheck: Functional Tests for Hate Speech Detection
    Models. ACL 2021. Never to be trained on.

    Args:
        texts: the cases.
        functionalities: what each tests, ``slur_h``; those that end in ``_nh`` hold texts that are not hateful.
        hateful: bool, whether each is hateful.
    """

    texts: tuple[str, ...]
    functionalities: tuple[str, ...]
    hateful: np.ndarray

    def scores(self, said_hateful: np.ndarray) -> dict[str, object]:
        """Accuracy over all cases and per functionality, with their numbers of cases.

        Args:
            said_hateful: bool, what the classifier said of each case.
        """
        right = said_hateful == self.hateful
        of = np.array(self.functionalities)
        return {
            "accuracy": float(right.mean()),
            "num_cases": len(right),
            "functionalities": {
                name: {"accuracy": float(right[of == name].mean()), "num_cases": int((of == name).sum())}
                for name in sorted(set(self.functionalities))
            },
        }


def hatecheck_files(path: str) -> list[Path]:
    """The files that hold the cases.

    Raises:
        UsageError: if there are none.
    """
    where = existing_path(path, "--hatecheck", kinds=TABLES)
    if not where.is_dir():
        return [where]
    files = files_named(files_in(where, TABLES), TEST_NAMES)
    if not files:
        raise UsageError(f"the folder {where} has no test.parquet, test.csv or test.jsonl; --hatecheck takes one")
    return files


def load_hatecheck(path: str) -> HateCheck:
    """Read the cases from a file, or from ``test.*`` in a folder: columns functionality, text and label.

    Raises:
        UsageError: if there are none, or a label is neither 0 (non-hateful) nor 1 (hateful).
    """
    rows = [
        row
        for file in hatecheck_files(path)
        for row in read_rows(file, dict.fromkeys(("functionality", "text", "label"), "a table with the column"))
    ]
    hateful = {"0": False, "1": True, "non-hateful": False, "hateful": True}
    texts, functionalities, labels = [], [], []
    for where, (functionality, text, label) in rows:
        if str(label) not in hateful:
            raise UsageError(f"{where} label {label!r} is neither 0 (non-hateful) nor 1 (hateful)")
        texts.append(text_of(where, "text", text))
        functionalities.append(str(functionality))
        labels.append(hateful[str(label)])
    if not texts:
        raise UsageError(f"{path} holds no cases")
    return HateCheck(tuple(texts), tuple(functionalities), np.array(labels))


@dataclass(frozen=True)
class LabelledBatch:
    """One padded batch. Owned by the caller."""

    input_ids: Tensor
    """int64 `(B, L)`"""
    attention_mask: Tensor
    """int64 `(B, L)`, 1 for tokens and 0 for padding"""
    labels: Tensor
    """int64 `(B,)`, in [0, C)"""

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> LabelledBatch:
        """The batch on `device`; itself where it is there already."""
        return LabelledBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def labelled_folder(data: LabelledData, tokenizer: Any, *, seq_len: int, cache_dir: Path) -> Path:
    """Tokenize once and return the folder with ``train`` and ``eval``, which `Tokens.load` reads, and
    ``train_classes.npy`` and ``eval_classes.npy``. Its name is decided by the texts, the labels and the tokenizer.

    Raises:
        UsageError: if `seq_len` is too small, or the cache cannot be written.
    """
    key = cache_key(LABELLED_FORMAT, data.fingerprint, tokenizer.backend_tokenizer.to_str(), seq_len)
    folder = cache_dir / f"labelled-{key}"

    def tokenize_and_save(temporary: Path) -> None:
        for side, documents in (("train", data.train), ("eval", data.eval)):
            tokenize_beginnings(documents.texts, tokenizer, seq_len=seq_len).save(temporary / side)
            np.save(temporary / f"{side}_classes.npy", data.classes(documents))

    publish(folder, tokenize_and_save)
    return folder


class LabelledBatches:
    """The training batches of any stream.

    Args:
        tokens: one sample per text.
        classes: int64, of each sample.
        frame: what the tokenizer puts around a sample.
        by_length: see `asyncsgd.data.batching.Order`.
    """

    def __init__(
        self,
        tokens: Tokens,
        classes: np.ndarray,
        frame: Frame,
        batch_size: int,
        seed: int,
        by_length: bool = True,
    ) -> None:
        self._tokens, self._classes, self._frame = tokens, classes, frame
        self._orders = Orders(tokens.lengths, batch_size, seed, by_length)

    def batch(self, stream: int, index: int) -> LabelledBatch:
        """Make batch `index` of a stream."""
        return _assemble(self._tokens, self._classes, self._orders.samples(stream, index), self._frame)


class LabelledEvaluation:
    """Every sample of a set once, in batches of similar length."""

    def __init__(self, tokens: Tokens, classes: np.ndarray, frame: Frame, batch_size: int = 64) -> None:
        self._tokens, self._classes, self._frame = tokens, classes, frame
        self.order = np.argsort(tokens.lengths, kind="stable")
        """The samples in the order of the batches."""
        self._batches = [self.order[first : first + batch_size] for first in range(0, len(self.order), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> LabelledBatch:
        """Make batch `index` in [0, len)."""
        return _assemble(self._tokens, self._classes, self._batches[index], self._frame)


def _assemble(tokens: Tokens, classes: np.ndarray, samples: np.ndarray, frame: Frame) -> LabelledBatch:
    return LabelledBatch(*padded(tokens, samples, frame), torch.from_numpy(classes[samples]))


def padded(tokens: Tokens, samples: np.ndarray, frame: Frame) -> tuple[Tensor, Tensor]:
    """The ids of some samples in their frames and their attention mask, both int64 `(B, L)`, new."""
    starts, ends = tokens.starts[samples], tokens.starts[samples + 1]
    length = len(frame.prefix) + int((ends - starts).max()) + len(frame.suffix)
    input_ids = np.full((len(samples), length), frame.pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids = [*frame.prefix, *tokens.ids[start:end], *frame.suffix]
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(attention_mask)
