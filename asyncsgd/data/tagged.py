"""Sentences with a tag on every word, and their batches: pure functions of (seed, stream, index).

A sentence is kept as a text: its words with single spaces between them. A space inside a word becomes a no-break space.
The tags are kept as a JSON list. So the functions that read, split and select labelled texts serve sentences too.

Shapes: B sentences, L tokens of the longest one (special tokens included), W words of the longest one, S sentences of a
set, T tokens and N words of all its sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncsgd.data.batching import Frame, Orders
from asyncsgd.data.corpora import existing_path, hub_name, without
from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.labelled import (
    Side,
    chosen_sides,
    files_of_sides,
    fingerprint_of,
    hub_sides,
    label_name,
    limited,
    padded,
    path_sides,
)
from asyncsgd.data.spans import OUTSIDE, split_tag
from asyncsgd.data.tokenization import Tokens, cache_key, capacity_of, plain_backend, publish
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

TAGGED_FORMAT = 1
"""Changes when the same sentences get other arrays: old caches are then left alone and new ones are made."""

_SENTENCES_PER_CHUNK = 2048


@dataclass(frozen=True)
class TaggedData:
    """Sentences to train on and sentences to score on; none is on both sides.

    Args:
        name: as `asyncsgd.data.corpora.Corpus.name`.
        train, eval: sentences and their tags, as the module's docstring says.
        split: what `eval` is, ``"test"`` or ``"validation"``.
        labels: the names of the C tags, in the order of their numbers.
        notes: what was left out and why, for the user.
        fingerprint: 16 hexadecimal digits that change whenever a word, a tag, their order or their side changes.
    """

    name: str
    train: Documents
    eval: Documents
    split: str
    labels: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str

    def tags(self, documents: Documents) -> list[np.ndarray]:
        """The numbers of each sentence's tags, int32; new."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        return [np.array([numbers[tag] for tag in tags], dtype=np.int32) for tags in _tags_of(documents)]


def load_tagged(
    data: str,
    *,
    tokens_column: str,
    tags_column: str,
    split: str | None = None,
    train_samples: int = 0,
    eval_samples: int = 0,
) -> TaggedData:
    """Load the tagged sentences that `data` names.

    Rows without words are left out, and so are training sentences that occur in the evaluation too; `notes` counts
    both. The tags are those of the training split, sorted. Tags that are numbers keep their order and get their names
    as labels do in `asyncsgd.data.labelled.load_labelled`.

    Args:
        data: a folder with ``train.*`` and ``test.*`` or ``validation.*`` (.parquet or .jsonl), a file of that kind, or
            ``"hub:NAME[:CONFIG]"``. Where no split is there to score on, a twentieth of the sentences is set aside.
        tokens_column, tags_column: of the table; each row of each holds a list.
        split: ``"test"`` or ``"validation"``; None takes test where there is one.
        train_samples, eval_samples: at most so many, taken evenly over the source's order; 0 for all.

    Raises:
        UsageError: the source or a column is missing or damaged, a sentence does not have as many tags as words, or no
            sentence is left. Also if a tag is no BIO tag, or only the evaluation has it.
    """
    check_tagged(data, tokens_column, tags_column)
    columns = {tokens_column: "--tokens-column", tags_column: "--tags-column"}
    if data.startswith("hub:"):
        name, read = data, hub_sides(data, columns)
    else:
        path = _existing(data)
        name, read = path.name, path_sides(path, columns)
    names = next((side.names for side in read.values() if side.names), None)
    notes: list[str] = []
    sides = {side: _sentences(f"{name} ({side})", read[side], names, columns, notes) for side in read}
    train, evaluation, split = chosen_sides(name, sides, split)
    kept = without(train, evaluation)
    if len(kept.texts) < len(train.texts):
        notes.append(
            f"{len(train.texts) - len(kept.texts)} training sentences that are {split} sentences too are left out"
        )
    labels = _labels(name, names, kept, evaluation, split)
    kept, evaluation = limited(kept, train_samples), limited(evaluation, eval_samples)
    if missing := set(labels) - set(_count(kept)):
        notes.append(f"no training word has the tag {', '.join(sorted(missing))}")
    return TaggedData(name, kept, evaluation, split, labels, tuple(notes), fingerprint_of("", labels, kept, evaluation))


def check_tagged(data: str, tokens_column: str, tags_column: str) -> None:
    """Look at what `load_tagged` would read, and read nothing.

    Raises:
        UsageError: if a file or folder is missing or of an unknown kind, a Hub data set has no name, or the columns are
            one.
    """
    if tokens_column == tags_column:
        raise UsageError(f"--tokens-column and --tags-column are both {tokens_column!r}; name two columns")
    if data.startswith("hub:"):
        hub_name(data)
    else:
        files_of_sides(_existing(data))


def _existing(data: str) -> Path:
    return existing_path(data, "--data", pydocs=False, kinds=(".parquet", ".jsonl"))


def _sentences(
    where: str, side: Side, names: tuple[str, ...] | None, columns: Mapping[str, str], notes: list[str]
) -> Documents:
    texts, labels = [], []
    for prefix, row in side.rows:
        tokens, tags = (
            _list(prefix, column, flag, value) for (column, flag), value in zip(columns.items(), row, strict=True)
        )
        if len(tokens) != len(tags):
            raise UsageError(
                f"{prefix} {len(tokens)} words and {len(tags)} tags; every word needs one tag: mend the row"
            )
        sentence = " ".join(_word(prefix, columns, token) for token in tokens)
        if sentence.strip():
            texts.append(sentence)
            labels.append(json.dumps([_tag(prefix, columns, tag, names) for tag in tags]))
    empty = len(side.rows) - len(texts)
    if not texts:
        raise UsageError(f"{where} holds no sentence: all {empty} rows are without words")
    if empty:
        notes.append(f"{empty} rows of {where} without words are left out")
    return Documents(tuple(texts), tuple(labels))


def _list(where: str, column: str, flag: str, value: object) -> list[object]:
    if isinstance(value, list):
        return value
    raise UsageError(
        f"{where} column {column!r} holds {type(value).__name__} values, not a list in every row; choose another "
        f"column with {flag} NAME"
    )


def _word(where: str, columns: Mapping[str, str], token: object) -> str:
    if not isinstance(token, str):
        column, flag = next(iter(columns.items()))
        raise UsageError(
            f"{where} column {column!r} holds lists of {type(token).__name__} values, not of words; choose another "
            f"column with {flag} NAME"
        )
    return without_surrogates(token).replace(" ", "\u00a0")


def _tag(where: str, columns: Mapping[str, str], value: object, names: tuple[str, ...] | None) -> str:
    tag = label_name(where, columns, value, names)
    try:
        split_tag(tag)
    except ValueError as error:
        hint = "; numbers need names, in labels.json beside the files" if tag.isdecimal() else ""
        raise UsageError(f"{where} {error}{hint}") from error
    return tag


def _tags_of(documents: Documents) -> list[list[str]]:
    return [json.loads(tags) for tags in documents.labels or ()]


def _count(documents: Documents) -> Counter[str]:
    return Counter(tag for tags in _tags_of(documents) for tag in tags)


def _labels(
    name: str, names: tuple[str, ...] | None, train: Documents, evaluation: Documents, split: str
) -> tuple[str, ...]:
    known = _count(train)
    if not known:
        raise UsageError(f"{name} has no training sentence that is not a {split} sentence too; give other data")
    for tag, count in _count(evaluation).items():
        if tag not in known:
            raise UsageError(
                f"{name}: the tag {tag!r} is on {count} {split} words and on no training word, so no model can learn "
                f"it; training has {', '.join(sorted(known))}; mend the tag or leave these rows out"
            )
    if len(known) < 2:
        raise UsageError(
            f"{name} has one tag only ({next(iter(known))!r}); a tagger needs two: is --tags-column right?"
        )
    return names or tuple(sorted(known))


@dataclass(frozen=True, eq=False)
class TaggedTokens:
    """The word pieces and the tags of a set of sentences.

    Args:
        tokens: one sample a sentence, cut to fit; a word starts at its first piece.
        starts: int64 `(S + 1,)`; sentence s has the words ``starts[s]`` to ``starts[s + 1] - 1``.
        tags: int32 `(N,)`, the number of each word's tag.
        pieces: int32 `(N,)`, the place of each word's first piece in its sample; -1 for a word that is cut off, or that
            the tokenizer makes nothing of.
    """

    tokens: Tokens
    starts: np.ndarray
    tags: np.ndarray
    pieces: np.ndarray

    def __post_init__(self) -> None:
        if len(self.starts) != self.tokens.num_samples + 1 or self.starts[-1] != len(self.tags):
            raise ValueError(f"{len(self.tags)} tags do not fit {self.tokens.num_samples} sentences")
        if len(self.pieces) != len(self.tags):
            raise ValueError(f"{len(self.pieces)} pieces for {len(self.tags)} tags")

    @property
    def num_lost(self) -> int:
        """Words without a piece."""
        return int((self.pieces < 0).sum())

    def save(self, folder: Path) -> None:
        """Write one .npy file per array into `folder`."""
        self.tokens.save(folder)
        for name in ("starts", "tags", "pieces"):
            np.save(folder / f"words_{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> TaggedTokens:
        """Map what `save` wrote into memory, read-only.

        Raises:
            OSError: a file is missing or empty.
            ValueError: a file is cut short or the arrays do not fit together.
        """
        arrays = [np.load(folder / f"words_{name}.npy", mmap_mode="r") for name in ("starts", "tags", "pieces")]
        return cls(Tokens.load(folder), *arrays)


def tokenize_words(
    documents: Documents, tags: list[np.ndarray], tokenizer: PreTrainedTokenizerBase, *, seq_len: int
) -> TaggedTokens:
    """Tokenize sentences and find the first piece of each word.

    The sentence is tokenized as one text, with spaces between its words, so a word has the pieces that it had in
    pretraining. A piece belongs to the word that holds its last character.

    Args:
        tags: numbers, of each word of each sentence.
        tokenizer: a fast tokenizer; neither used up nor changed.
        seq_len: the length of a padded sentence, special tokens included; what is longer is cut.
    """
    capacity = capacity_of(tokenizer, seq_len)
    backend = plain_backend(tokenizer)
    ids, pieces, word_starts = [np.empty(0, np.int32)], [np.empty(0, np.int32)], [np.empty(0, bool)]
    for begin in range(0, len(documents.texts), _SENTENCES_PER_CHUNK):
        chunk = list(documents.texts[begin : begin + _SENTENCES_PER_CHUNK])
        for text, encoding in zip(chunk, backend.encode_batch(chunk, add_special_tokens=False), strict=True):
            kept = np.asarray(encoding.ids[:capacity], dtype=np.int32)
            lengths = np.array([len(word) for word in text.split(" ")])
            ends = np.cumsum(lengths + 1) - 1
            first = first_pieces(ends - lengths, ends, encoding)
            first[first >= len(kept)] = -1
            starts = np.zeros(len(kept), dtype=bool)
            starts[first[first >= 0]] = True
            ids.append(kept)
            pieces.append(first)
            word_starts.append(starts)
    bounds = np.cumsum([len(sample) for sample in ids], dtype=np.int64)
    words = np.cumsum([0, *(len(numbers) for numbers in tags)], dtype=np.int64)
    return TaggedTokens(
        Tokens(np.concatenate(ids), bounds, np.concatenate(word_starts)),
        words,
        np.concatenate([np.empty(0, np.int32), *tags]),
        np.concatenate(pieces),
    )


def first_pieces(starts: np.ndarray, ends: np.ndarray, encoding: Encoding) -> np.ndarray:
    """The place of each word's first piece, int32 `(W,)`; -1 for a word without any.

    Args:
        starts, ends: int64 `(W,)`, ascending, where each word begins and where it has ended, in characters.
    """
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    # A piece's offsets may begin with the space before its word, and may be empty.
    places = np.flatnonzero(spans[:, 1] > spans[:, 0])
    last = spans[places, 1] - 1
    of = np.searchsorted(starts, last, side="right") - 1
    inside = (of >= 0) & (last < ends[of])
    first = np.full(len(starts), -1, dtype=np.int32)
    # Backwards: of several pieces of a word the first one is written last.
    first[of[inside][::-1]] = places[inside][::-1]
    return first


def tagged_folder(data: TaggedData, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, cache_dir: Path) -> Path:
    """Tokenize once and return the folder with ``train`` and ``eval``, which `TaggedTokens.load` reads, and
    ``tokenizer``.

    Its name is decided by the sentences, the tags, the tokenizer and `seq_len`. Training sentences without a single
    piece are left out.

    Raises:
        UsageError: `seq_len` is too small, no training sentence has a piece, or the cache cannot be written.
    """
    key = cache_key(TAGGED_FORMAT, data.fingerprint, tokenizer.backend_tokenizer.to_str(), seq_len)
    folder = cache_dir / f"tagged-{key}"

    def tokenize_and_save(temporary: Path) -> None:
        for side, documents in (("train", data.train), ("eval", data.eval)):
            tokens = tokenize_words(documents, data.tags(documents), tokenizer, seq_len=seq_len)
            if side == "train":
                tokens = _with_pieces(tokens)
                if not tokens.tokens.num_samples:
                    raise UsageError(f"the tokenizer makes nothing of the training sentences of {data.name}")
            tokens.save(temporary / side)
        tokenizer.save_pretrained(temporary / "tokenizer")

    publish(folder, tokenize_and_save)
    return folder


def _with_pieces(tokens: TaggedTokens) -> TaggedTokens:
    """The sentences that have at least one word with a piece."""
    total = np.concatenate([[0], np.cumsum(tokens.pieces >= 0)])
    keep = np.diff(total[tokens.starts]) > 0
    of_words = np.repeat(keep, np.diff(tokens.starts))
    starts = np.concatenate([[0], np.cumsum(np.diff(tokens.starts)[keep])])
    return TaggedTokens(tokens.tokens.select(keep), starts, tokens.tags[of_words], tokens.pieces[of_words])


@dataclass(frozen=True)
class TaggedBatch:
    """One padded batch. Owned by the caller."""

    input_ids: Tensor
    """int64 `(B, L)`"""
    attention_mask: Tensor
    """int64 `(B, L)`, 1 for tokens and 0 for padding"""
    tags: Tensor
    """int64 `(B, W)`, in [0, C); `OUTSIDE`, -1, behind the end of a sentence"""
    pieces: Tensor
    """int64 `(B, W)`, the place of each word's first piece in its row of `input_ids`; -1 where it has none"""


class TaggedSentences:
    """The batches of a set for training, and of another for evaluation, in one process.

    Args:
        train, evaluation: each read once, in batches of sentences of similar length.
        frame: what the tokenizer puts around a sentence.
        batch_size: B of training.
        seed, by_length: of the order in training; the evaluation has none.
    """

    def __init__(
        self,
        train: TaggedTokens,
        evaluation: TaggedTokens,
        frame: Frame,
        batch_size: int,
        seed: int,
        by_length: bool,
    ) -> None:
        self._train, self._frame = train, frame
        self._orders = Orders(train.tokens.lengths, batch_size, seed, by_length)
        self.evaluation = {"main": TaggedEvaluation(evaluation, frame)}

    def batch(self, stream: int, index: int) -> TaggedBatch:
        """Make batch `index` of a stream."""
        return _assemble(self._train, self._orders.samples(stream, index), self._frame)


class TaggedEvaluation:
    """Every sentence of a set once, sorted by length."""

    def __init__(self, tokens: TaggedTokens, frame: Frame, batch_size: int = 32) -> None:
        self._tokens, self._frame = tokens, frame
        order = np.argsort(tokens.tokens.lengths, kind="stable")
        self._batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> TaggedBatch:
        """Make batch `index` in [0, len)."""
        if not 0 <= index < len(self._batches):
            raise IndexError(f"there is no evaluation batch {index} of {len(self._batches)}")
        return _assemble(self._tokens, self._batches[index], self._frame)


def _assemble(tokens: TaggedTokens, samples: np.ndarray, frame: Frame) -> TaggedBatch:
    starts, ends = tokens.starts[samples], tokens.starts[samples + 1]
    tags = np.full((len(samples), int((ends - starts).max())), OUTSIDE, dtype=np.int64)
    pieces = np.full_like(tags, -1)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        tags[row, : end - start] = tokens.tags[start:end]
        places = tokens.pieces[start:end]
        pieces[row, : end - start] = np.where(places < 0, -1, places + len(frame.prefix))
    input_ids, attention_mask = padded(tokens.tokens, samples, frame)
    return TaggedBatch(input_ids, attention_mask, torch.from_numpy(tags), torch.from_numpy(pieces))
