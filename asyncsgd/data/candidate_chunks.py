"""A part of a folder of candidates: the texts of a chunk, what is found in them, and its file.

A chunk has a key: the hash of its texts, of the tokenizer and of the finder. So a chunk that is there need not be made
again, and one of other texts is never taken for it. A chunk has its file's name only when it is complete, and its pages
have checksums. Its columns, one row a text:

    text         16 bytes of the text's SHA-256
    num_pieces   of the text, without special tokens
    spans        starts and ends of the finds, in characters, one after another
    pieces       starts and ends of the runs of pieces that overlap with a span
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncsgd.data.finders.base import Find, Span
from asyncsgd.data.tokens import plain_backend
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    import pyarrow
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase


class Damaged(Exception):
    """A file that cannot be what was written."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some texts, and where what is found in them is kept."""

    path: Path
    key: str
    texts: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a chunk holds of its texts; one entry a text."""

    num_pieces: np.ndarray
    spans: list[list[int]]
    pieces: list[list[int]]


def hash_of_texts(texts: Iterable[str]) -> str:
    """64 hexadecimal digits that name texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(_hash_of_text(text))
    return digest.hexdigest()


def _hash_of_text(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """64 hexadecimal digits that name how texts become pieces."""
    return hashlib.sha256(plain_backend(tokenizer).to_str().encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Process:
    """What a process needs to make chunks."""

    find: Find
    tokenizer: Tokenizer
    device: str


_process: _Process | None = None


def begin(find: Find, tokenizer: str, devices: Sequence[str], number: int) -> None:
    """Make this process ready for `make_chunk`.

    Args:
        tokenizer: the Rust tokenizer as JSON.
        devices: of each process, for finders that compute with torch; none for others.
        number: of this process.
    """
    global _process
    from tokenizers import Tokenizer

    if devices:
        import torch

        torch.set_num_threads(1)  # bits depend on it, and processes share the cores
    _process = _Process(find, Tokenizer.from_str(tokenizer), devices[number] if devices else "cpu")


def make_chunk(chunk: Chunk) -> None:
    """Find in the texts of a chunk and write its file.

    Raises:
        UsageError: if the finder's spans are no spans of the texts, or the file cannot be written.
    """
    assert _process is not None, "begin comes first"
    write_chunk(chunk, found_in(chunk.texts, _process.find, _process.tokenizer, _process.device))


def found_in(texts: Sequence[str], find: Find, tokenizer: Tokenizer, device: str = "cpu") -> Found:
    """Find in some texts, and say which pieces overlap with what was found."""
    all_spans = find.spans(texts, device)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    spans, pieces = [], []
    for text, found, encoding in zip(texts, all_spans, encodings, strict=True):
        _check_spans(text, found)
        spans.append([place for span in found for place in span])
        pieces.append(_runs(candidate_pieces(encoding, found)))
    return Found(np.array([len(encoding) for encoding in encodings], dtype=np.int32), spans, pieces)


def _check_spans(text: str, spans: Sequence[Span]) -> None:
    before = 0
    for start, end in spans:
        if not before <= start < end <= len(text):
            raise UsageError(
                f"the finder gave the span {start} to {end} behind {before} in a text of {len(text)} characters "
                f"({text[:40]!r}...); mend the finder"
            )
        before = end


def candidate_pieces(encoding: Encoding, spans: Sequence[Span]) -> np.ndarray:
    """Which pieces have a character in a span, bool; `spans` are in order and without overlap."""
    if not spans:
        return np.zeros(len(encoding), dtype=bool)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    bounds = np.array(spans, dtype=np.int64)
    # The first span that ends behind the piece's beginning.
    at = np.searchsorted(bounds[:, 1], offsets[:, 0], side="right")
    inside = at < len(bounds)
    inside[inside] = bounds[at[inside], 0] < offsets[inside, 1]
    return inside & (offsets[:, 1] > offsets[:, 0])


def _runs(flags: np.ndarray) -> list[int]:
    """Where runs of True begin and have ended, one after another.

    >>> _runs(np.array([True, True, False, True]))
    [0, 2, 3, 4]
    """
    return np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))).tolist()


def write_chunk(chunk: Chunk, found: Found) -> None:
    """Write a chunk's file, whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "text": pyarrow.array([_hash_of_text(text) for text in chunk.texts], pyarrow.binary(16)),
        "num_pieces": pyarrow.array(found.num_pieces, pyarrow.int32()),
        "spans": pyarrow.array(found.spans, pyarrow.list_(pyarrow.int32())),
        "pieces": pyarrow.array(found.pieces, pyarrow.list_(pyarrow.int32())),
    }
    table = pyarrow.table(columns).replace_schema_metadata({"key": chunk.key})
    partial = chunk.path.with_name(chunk.path.name + ".partial")
    try:
        parquet.write_table(table, partial, compression="zstd", write_page_checksum=True)
        os.replace(partial, chunk.path)
    except OSError as error:
        raise UsageError(f"{chunk.path} cannot be written: {error.strerror or error}") from error


def read_chunk(path: Path, key: str) -> Found:
    """Read a chunk's file.

    Raises:
        Damaged: if it is not there, is damaged, or is that of another key.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        table: pyarrow.Table = parquet.read_table(path, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise Damaged(f"{path.name} cannot be read ({str(error).splitlines()[0]})") from error
    if (table.schema.metadata or {}).get(b"key", b"").decode() != key:
        raise Damaged(f"{path.name} is of another text, tokenizer or finder")
    try:
        num_pieces, spans, pieces = (table.column(name) for name in ("num_pieces", "spans", "pieces"))
    except KeyError as error:
        raise Damaged(f"{path.name} has no column {error}") from error
    found = Found(num_pieces.to_numpy(), spans.to_pylist(), pieces.to_pylist())
    for number, runs in zip(found.num_pieces, found.pieces, strict=True):
        if len(runs) % 2 or runs != sorted(runs) or (runs and not 0 <= runs[0] < runs[-1] <= number):
            raise Damaged(f"{path.name} has pieces {runs} of a text of {number} pieces")
    return found
