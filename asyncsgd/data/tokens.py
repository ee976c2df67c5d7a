"""From texts to rows of token ids that several processes can map into memory.

A row holds the special tokens that the tokenizer puts around a text. What is known of a row or of its tokens stands in
further columns. Importing this module costs numpy only.

Shapes: S rows, L tokens of the longest row of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from asyncsgd.errors import UsageError, reason

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# Changes when the same texts get other rows: old caches are then left alone and new ones are made.
TOKENS_FORMAT = 4

# A shorter sample would hardly have context around a masked token.
MIN_SAMPLE_IDS = 4

_TEXTS_PER_CHUNK = 2048


@dataclass(frozen=True, eq=False)
class Samples:
    """S rows in columns, ``ids`` among them. A column has a value for each row, or an array for each.

    `values` are those of each column, row after row; a column of arrays has `starts`, int64 `(S + 1,)`: row s has the
    values from ``starts[s]`` to ``starts[s + 1] - 1``.

    >>> samples = Samples.of(ids=[np.arange(4), np.arange(2)], label=np.array([7, 8]))
    >>> len(samples), samples.lengths.tolist(), samples.row("ids", 1).tolist(), samples.row("label", 1).item()
    (2, [4, 2], [0, 1], 8)
    """

    values: Mapping[str, ndarray]
    starts: Mapping[str, ndarray]

    @classmethod
    def of(cls, **columns: ndarray | Sequence[ndarray]) -> Samples:
        """Rows with these columns: an array of S values, or a sequence of S arrays."""
        values = {}
        starts = {}
        for name, column in columns.items():
            if isinstance(column, ndarray):
                values[name] = column
                continue
            values[name] = np.concatenate(column) if len(column) else np.empty(0)
            starts[name] = np.cumsum([0, *map(len, column)], dtype=np.int64)
        return cls(values, starts)

    def __len__(self) -> int:
        return len(self.starts["ids"]) - 1

    @property
    def lengths(self) -> ndarray:
        """int64 `(S,)`, the tokens of each row; new."""
        return np.diff(self.starts["ids"])

    def row(self, name: str, number: int) -> Any:
        """What a column has for a row; an array is a view."""
        values = self.values[name]
        starts = self.starts.get(name)
        if starts is None:
            return values[number]
        return values[starts[number] : starts[number + 1]]

    def rows(self, name: str, numbers: Sequence[int] | ndarray) -> list[ndarray]:
        """What a column has for each of some rows."""
        return [self.row(name, number) for number in numbers]

    def select(self, keep: ndarray) -> Samples:
        """The rows where bool `keep` `(S,)` is set, in arrays of their own."""
        chosen = np.flatnonzero(keep)
        columns: dict[str, Any] = {}
        for name, values in self.values.items():
            columns[name] = self.rows(name, chosen) if name in self.starts else values[chosen]
        return Samples.of(**columns)

    def save(self, folder: Path) -> None:
        """Write one .npy file per array into `folder`, which is made."""
        folder.mkdir(parents=True)
        for name, values in self.values.items():
            np.save(folder / f"{name}.npy", values)
        for name, starts in self.starts.items():
            np.save(folder / f"{name}.starts.npy", starts)

    @classmethod
    def load(cls, folder: Path) -> Samples:
        """Map what `save` wrote into memory: read-only arrays, shared between the processes that map them."""
        values = {}
        starts = {}
        for path in folder.glob("*.npy"):
            mapped = np.load(path, mmap_mode="r")
            array = mapped.view(ndarray)  # slicing an np.memmap is slow
            name = path.name.removesuffix(".npy")
            if name.endswith(".starts"):
                starts[name.removesuffix(".starts")] = array
            else:
                values[name] = array
        return cls(values, starts)


def pad(rows: Sequence[ndarray], fill: int) -> Tensor:
    """The rows with `fill` after the shorter ones, int64 `(B, L)`.

    >>> pad([np.arange(3), np.arange(1)], 9).tolist()
    [[0, 1, 2], [0, 9, 9]]
    """
    import torch

    longest = max(map(len, rows))
    padded = np.full((len(rows), longest), fill, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)


def encodings_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, seq_len: int | None = None
) -> Iterator[Encoding]:
    """Tokenize texts; a special token spelled out in a text, such as ``[MASK]``, becomes ordinary characters.

    With a `seq_len`, each text is cut so that a row fits with its special tokens; else it is whole and without these.
    """
    backend = plain_backend(tokenizer)
    if seq_len is not None:
        backend.enable_truncation(seq_len)
    for first in range(0, len(texts), _TEXTS_PER_CHUNK):
        chunk = list(texts[first : first + _TEXTS_PER_CHUNK])
        yield from backend.encode_batch(chunk, add_special_tokens=seq_len is not None)


def pair_rows(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> Iterator[tuple[ndarray, ndarray]]:
    """The ids and the token types, int32, of each pair in the tokenizer's own form, cut to `seq_len` as it cuts pairs.

    The tokenizer is not asked to cut: it keeps all pieces that it cuts off, and those of the first text times those of
    the second. 13,556 pairs of docstrings cut to 32 tokens took 5.9 GB.
    """
    # The token types of a pair: by 0 and 1 those of its two texts, by None those of the special tokens around them.
    sample = plain_backend(tokenizer).encode("a", "a")
    around = special_around(tokenizer, 2)
    types_of_text: dict[int | None, list[int]] = {None: [], 0: [], 1: []}
    for type_id, text in zip(sample.type_ids, sample.sequence_ids, strict=True):
        types_of_text[text].append(type_id)
    types_of_special = iter(types_of_text[None])
    special_types = [list(itertools.islice(types_of_special, len(tokens))) for tokens in around]
    room = seq_len - sum(map(len, around))
    for start in range(0, len(pairs), _TEXTS_PER_CHUNK):
        chunk = pairs[start : start + _TEXTS_PER_CHUNK]
        firsts = encodings_of([first for first, _ in chunk], tokenizer)
        seconds = encodings_of([second for _, second in chunk], tokenizer)
        for encodings in zip(firsts, seconds, strict=True):
            first, second = encodings
            lengths = cut_lengths(len(first), len(second), room)
            ids = list(around[0])
            type_ids = list(special_types[0])
            for side in (0, 1):
                length = lengths[side]
                ids += encodings[side].ids[:length]
                ids += around[side + 1]
                type_ids += types_of_text[side][:1] * length
                type_ids += special_types[side + 1]
            yield np.array(ids, dtype=np.int32), np.array(type_ids, dtype=np.int32)


def cut_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text of a pair stay where there is room for so many: the longer one is cut first.

    As ``longest_first`` of the tokenizers library: where both are longer than half of the room, each gets half of it,
    and the longer one the odd token; of equally long ones that is the second.

    >>> cut_lengths(3, 9, 8), cut_lengths(9, 9, 7), cut_lengths(9, 8, 7), cut_lengths(2, 3, 8)
    ((3, 5), (3, 4), (4, 3), (2, 3))
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if 2 * shorter > room:
        shorter = room // 2
    longer = room - shorter
    return (longer, shorter) if first > second else (shorter, longer)


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the Rust tokenizer that neither cuts, pads, nor finds special tokens in the text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Many published tokenizer files carry the truncation of their training, which would lose the rest of a document.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def first_pieces(words: Iterable[tuple[int, int]], encoding: Encoding) -> ndarray:
    """The place of each word's first piece, int32 `(W,)`; -1 for a word without any.

    A word is the place of its first character and the place after its last one. A piece that ends after the word
    belongs to more than this word, and does not count.
    """

    offsets = encoding.offsets

    def first_piece(start: int, end: int) -> int:
        for character in range(start, end):
            piece = encoding.char_to_token(character)
            if piece is not None and offsets[piece][1] <= end:
                return piece
        return -1

    return np.array([first_piece(start, end) for start, end in words], dtype=np.int32)


def special_around(tokenizer: PreTrainedTokenizerBase, num_texts: int = 1) -> list[list[int]]:
    """The special tokens in front of the first of some texts, between them and after the last, e.g. [CLS], [SEP]."""
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
    flags: Sequence[ndarray] | None = None,
) -> Samples:
    """Tokenize documents and cut each into consecutive rows that fit `seq_len` with their special tokens.

    A row holds at most C = seq_len - (special tokens that the tokenizer adds) ids of one document; only the last one of
    a document is shorter, and it is dropped below 4 ids.

    Args:
        end_id: a token to put after every document, before it is cut; None: none.
        blocks: cut all documents together, as if they were one; so all rows but the last have C ids.
        flags: of each document, bool, one for each of its ids; they become the column ``candidates``.

    Returns:
        ``ids`` int32, and bool ``word_starts``, True where a token begins a word (punctuation counts as a word) or a
        row, and where it is a special one.
    """
    capacity = seq_len - tokenizer.num_special_tokens_to_add()
    types: dict[str, type] = {"ids": np.int32, "word_starts": bool}
    if flags is not None:
        types["candidates"] = bool

    def special(tokens: Sequence[int]) -> ndarray:
        """The columns of special tokens, int32 `(len(types), len(tokens))`: each begins a word, none is a candidate."""
        columns = np.zeros((len(types), len(tokens)), dtype=np.int32)
        columns[0] = tokens
        columns[1] = True
        return columns

    prefix, suffix = map(special, special_around(tokenizer))
    end = special([] if end_id is None else [end_id])
    documents = []
    for number, encoding in enumerate(encodings_of(texts, tokenizer)):
        starts = []
        before: int | None = None
        for word in encoding.word_ids:  # a token outside all words has one of its own
            starts.append(word is None or word != before)
            before = word
        columns = [encoding.ids, starts]
        if flags is not None:
            columns.append(flags[number])
        documents.append(np.hstack([np.array(columns, dtype=np.int32), end]))
    if blocks and documents:
        documents = [np.hstack(documents)]
    rows = []
    for document in documents:
        length = document.shape[1]
        for first in range(0, length - MIN_SAMPLE_IDS + 1, capacity):
            inside = document[:, first : first + capacity]
            row = np.hstack([prefix, inside, suffix])
            row[1, prefix.shape[1]] = True
            rows.append(row)
    arrays = {}
    for line, (name, kind) in enumerate(types.items()):
        arrays[name] = [row[line].astype(kind) for row in rows]
    return Samples.of(**arrays)


def cached(cache_dir: Path, kind: str, key: Sequence[object], make: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that `make` has filled for this kind and key, now or in an earlier run.

    `make` fills a temporary folder, which gets its name at once: a folder of that name is whole. Processes that start
    together may all make one; the first stays.
    """
    folder = folder_in_cache(cache_dir, kind, key)
    if not folder.is_dir():
        fill(folder, make)
    return folder


def folder_in_cache(cache_dir: Path, kind: str, key: Sequence[object]) -> Path:
    """Where `cached` keeps what it has made for this kind and key."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_dir / f"{kind}-{digest[:16]}"


def fill(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a temporary folder, and give it its name.

    Raises:
        UsageError: if the cache folder, in which `folder` lies, cannot be written. Any OSError of `make` is taken for
            that, since what `make` reads has been looked at before.
    """
    cache_dir = folder.parent
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{folder.name}.") as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, and what it wrote is the same
                    raise
    except OSError as error:
        raise UsageError(
            f"the cache folder {cache_dir} cannot be written ({reason(error)}); type --cache-dir FOLDER"
        ) from error
