"""From texts to rows of token ids that several processes can map into memory.

A row holds the special tokens that the tokenizer puts around a text. What is known of a row or of its tokens stands in
further columns. Importing this module costs numpy only.

Shapes: S rows, L tokens of the longest row of a batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.errors import UsageError, reason

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# Changes when the same texts get other rows: old caches are then left alone and new ones are made.
TOKENS_FORMAT = 3

# A shorter sample would hardly have context around a masked token.
MIN_SAMPLE_IDS = 4

_TEXTS_PER_CHUNK = 2048


@dataclass(frozen=True, eq=False)
class Samples:
    """S rows in columns, ``ids`` among them. A column has a value for each row, or an array for each.

    Args:
        values: the values of each column, those of a row behind those of the row before.
        starts: of each column of arrays, int64 `(S + 1,)`: row s has the values ``starts[s]`` to ``starts[s + 1] - 1``.

    >>> samples = Samples.of(ids=[np.arange(4), np.arange(2)], label=np.array([7, 8]))
    >>> len(samples), samples.lengths.tolist(), samples.row("ids", 1).tolist(), samples.row("label", 1).item()
    (2, [4, 2], [0, 1], 8)
    """

    values: Mapping[str, np.ndarray]
    starts: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, **columns: np.ndarray | Sequence[np.ndarray]) -> Samples:
        """Those with these columns: an array of S values, or a sequence of S arrays."""
        of_arrays = {name: column for name, column in columns.items() if not isinstance(column, np.ndarray)}
        starts = {name: np.cumsum([0, *map(len, column)], dtype=np.int64) for name, column in of_arrays.items()}
        joined = {name: np.concatenate(column) if len(column) else np.empty(0) for name, column in of_arrays.items()}
        return cls({**columns, **joined}, starts)  # type: ignore[dict-item]

    def __len__(self) -> int:
        return len(self.starts["ids"]) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 `(S,)`, the tokens of each row; new."""
        return np.diff(self.starts["ids"])

    def row(self, name: str, number: int) -> Any:
        """What a column has for a row; an array is a view."""
        if name not in self.starts:
            return self.values[name][number]
        return self.values[name][self.starts[name][number] : self.starts[name][number + 1]]

    def rows(self, name: str, numbers: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The arrays of some rows, as views."""
        return [self.row(name, number) for number in numbers]

    def select(self, keep: np.ndarray) -> Samples:
        """The rows where bool `keep` `(S,)` is set, in arrays of their own."""
        chosen = np.flatnonzero(keep)
        return Samples.of(
            **{
                name: self.rows(name, chosen) if name in self.starts else self.values[name][chosen]
                for name in self.values
            }
        )

    def save(self, folder: Path) -> None:
        """Write one .npy file per array into `folder`, which is made."""
        folder.mkdir(parents=True)
        for name, array in [*self.values.items(), *((f"{name}.starts", of) for name, of in self.starts.items())]:
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> Samples:
        """Map what `save` wrote into memory: read-only arrays, shared between the processes that map them."""
        arrays = {path.name.removesuffix(".npy"): np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
        starts = {name.removesuffix(".starts"): arrays.pop(name) for name in list(arrays) if name.endswith(".starts")}
        return cls(arrays, starts)


def pad(rows: Sequence[np.ndarray], fill: int) -> Tensor:
    """The rows with `fill` behind the shorter ones, int64 `(B, L)`.

    >>> pad([np.arange(3), np.arange(1)], 9).tolist()
    [[0, 1, 2], [0, 9, 9]]
    """
    import torch

    padded = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)


def encodings_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, seq_len: int | None = None
) -> Iterator[Encoding]:
    """Tokenize texts; a special token spelled out in a text, such as ``[MASK]``, becomes ordinary characters.

    Args:
        tokenizer: a fast tokenizer; neither used up nor changed.
        seq_len: None for all tokens of each text and no special ones; else a row with its special tokens, of which the
            text is cut to fit.
    """
    backend = plain_backend(tokenizer)
    if seq_len is not None:
        capacity_of(tokenizer, seq_len)
        backend.enable_truncation(seq_len)
    for first in range(0, len(texts), _TEXTS_PER_CHUNK):
        chunk = list(texts[first : first + _TEXTS_PER_CHUNK])
        yield from backend.encode_batch(chunk, add_special_tokens=seq_len is not None)


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of the Rust tokenizer that neither cuts, pads, nor finds special tokens in the text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Many published tokenizer files carry the truncation of their training, which would lose the rest of a document.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def capacity_of(tokenizer: PreTrainedTokenizerBase, seq_len: int) -> int:
    """How many ids of a text fit `seq_len`.

    Raises:
        UsageError: if these are fewer than 4.
    """
    num_special = tokenizer.num_special_tokens_to_add()
    capacity = seq_len - num_special
    if capacity < MIN_SAMPLE_IDS:
        raise UsageError(
            f"a sequence length of {seq_len} leaves {max(capacity, 0)} tokens beside {num_special} special ones; "
            f"use at least {MIN_SAMPLE_IDS + num_special}"
        )
    return capacity


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


def special_around(tokenizer: PreTrainedTokenizerBase, num_texts: int = 1) -> list[list[int]]:
    """The special tokens in front of the first of some texts, between them and behind the last, e.g. [CLS], [SEP]."""
    encoding = plain_backend(tokenizer).encode("a", "a" if num_texts == 2 else None)
    around: list[list[int]] = [[]]
    for token, text in zip(encoding.ids, encoding.sequence_ids, strict=True):
        if text is None:
            around[-1].append(token)
        elif text == len(around) - 1:
            around.append([])
    return around


def rows_of(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    end_id: int | None = None,
    blocks: bool = False,
    flags: Sequence[np.ndarray] | None = None,
) -> Samples:
    """Tokenize documents and cut each into consecutive rows that fit `seq_len` with their special tokens.

    A row holds at most C = seq_len - (special tokens that the tokenizer adds) ids of one document; only the last one of
    a document is shorter, and it is dropped below 4 ids.

    Args:
        end_id: a token to put behind every document, before it is cut; None: none.
        blocks: cut all documents together, as if they were one; so all rows but the last have C ids.
        flags: of each document, bool, one for each of its ids; they become the column ``candidates``.

    Returns:
        The rows in the order of the texts: ``ids`` int32, and bool ``word_starts``, True where a token begins a word
        (punctuation counts as a word) or a row, and where it is a special one.

    Raises:
        UsageError: `seq_len` leaves room for fewer than 4 ids, or `flags` are not of these ids.
    """
    capacity, end = capacity_of(tokenizer, seq_len), [] if end_id is None else [end_id]
    prefix, suffix = special_around(tokenizer)
    documents: list[dict[str, np.ndarray]] = []
    for number, encoding in enumerate(encodings_of(texts, tokenizer)):
        words = encoding.word_ids
        # A token outside all words has one of its own.
        starts = [word is None or word != before for before, word in zip((-1, *words), words, strict=False)]
        document = {
            "ids": np.array([*encoding.ids, *end], dtype=np.int32),
            "word_starts": np.array([*starts, *[True] * len(end)], dtype=bool),
        }
        if flags is not None:
            document["candidates"] = np.append(flags[number], [False] * len(end)).astype(bool)
            if len(document["candidates"]) != len(document["ids"]):
                raise UsageError("the candidates are not of the tokens of this run")
        documents.append(document)
    if blocks and documents:
        documents = [{name: np.concatenate([each[name] for each in documents]) for name in documents[0]}]
    around = {"ids": (prefix, suffix), "word_starts": ([True] * len(prefix), [True] * len(suffix))}
    around["candidates"] = [False] * len(prefix), [False] * len(suffix)
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in (documents[0] if documents else ("ids", "word_starts"))
    }
    for document in documents:
        length = len(document["ids"])
        for first in range(0, length, capacity):
            if min(length - first, capacity) < MIN_SAMPLE_IDS:
                continue
            for name, values in document.items():
                part = values[first : first + capacity].copy()
                part[0] |= name == "word_starts"
                columns[name].append(np.concatenate([around[name][0], part, around[name][1]]).astype(part.dtype))
    return Samples.of(**columns)


def cached(cache_dir: Path, kind: str, key: Sequence[object], make: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that `make` has filled for this kind and key, now or in an earlier run.

    `make` fills a temporary folder, which gets its name at once: a folder of that name is whole. Processes that start
    together may all make one; the first stays.

    Raises:
        UsageError: if the cache cannot be written.
    """
    folder = cache_dir / f"{kind}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        make(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another process was first, and what it wrote is the same
                raise
    except Exception as error:
        # The Rust library raises bare Exception for what the operating system refuses.
        if not isinstance(error, OSError):
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        raise UsageError(
            f"the cache folder {cache_dir} cannot be written ({reason(error)}); type --cache-dir FOLDER"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
