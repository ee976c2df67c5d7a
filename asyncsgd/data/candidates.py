"""Candidates for masking, found once and kept: which word pieces of which text a finder found.

A folder of candidates holds

    manifest.json          what it was made of, what is in each file, and statistics; written first and last
    chunk-00000.parquet    one row a text, in the order of the training texts and then the evaluation texts
    examples.json          some texts with their candidates and one drawing of masks
    terms.png              the commonest candidates, and how many there are in a text

A chunk has a key: the hash of its texts, of the tokenizer and of the finder. So a chunk that is there need not be made
again, and one of other texts is never taken for it. A chunk has its file's name only when it is complete, and its pages
have checksums. Nothing in a folder depends on the number of processes or on an interruption.

The columns of a chunk:

    text         16 bytes of the text's SHA-256
    num_pieces   of the text, without special tokens
    spans        starts and ends of the finds, in characters, one after another
    pieces       starts and ends of the runs of pieces that overlap with a span
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.finders.base import Find, Span, hashed
from asyncsgd.data.masking import ByCandidate, Sample
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokenization import (
    TOKENS_FORMAT,
    Tokens,
    cache_key,
    capacity_of,
    kept_ids,
    plain_backend,
    publish,
)
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    import pyarrow
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

CANDIDATES_FORMAT = 1
MANIFEST, EXAMPLES, PICTURE = "manifest.json", "examples.json", "terms.png"
NUM_EXAMPLES = 100
NUM_TERMS = 50
NUM_BINS = 20

_AGAIN = "run mask_candidates.py again"


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


Map = Callable[[Callable[[Chunk], None], Iterable[Chunk]], Iterator[None]]
"""As `map`, in any number of processes that have called `begin`."""


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


def find_candidates(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    find: Find,
    folder: Path,
    mapped: Map,
    *,
    finder: str,
    model: str,
    chunk_texts: int = 1000,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Fill a folder with the candidates of a corpus, or go on where an earlier call ended.

    Args:
        folder: new, empty, or one of the same texts, tokenizer, finder and `chunk_texts`.
        mapped: applies a function to many chunks, in processes that have called `begin`.
        finder, model: as the user names them, for the manifest.
        chunk_texts: texts of a chunk. If the finder has a model, last bits may depend on it.
        told: called with the texts that are done and all texts, again and again.

    Returns:
        The manifest.

    Raises:
        UsageError: if the folder is of something else, or cannot be written.
    """
    texts = [*corpus.train.texts, *corpus.eval.texts]
    identity = {
        "format": CANDIDATES_FORMAT,
        "data": corpus.name,
        "train_texts": len(corpus.train.texts),
        "train_sha256": hash_of_texts(corpus.train.texts),
        "eval_texts": len(corpus.eval.texts),
        "eval_sha256": hash_of_texts(corpus.eval.texts),
        "model": model,
        "tokenizer_sha256": hash_of_tokenizer(tokenizer),
        "finder": finder,
        "finder_key": find.key,
        "chunk_texts": chunk_texts,
    }
    written = _open(folder, identity)
    chunks = [
        _chunk(folder, number, texts[first : first + chunk_texts], identity)
        for number, first in enumerate(range(0, len(texts), chunk_texts))
    ]
    missing = [chunk for chunk in chunks if not _is_there(chunk, written)]
    done = len(texts) - sum(len(chunk.texts) for chunk in missing)
    told(done, len(texts))
    for chunk, _ in zip(missing, mapped(make_chunk, missing), strict=True):
        done += len(chunk.texts)
        told(done, len(texts))
    for partial in folder.glob("*.partial"):  # of an earlier call that was killed
        partial.unlink()
    found = [read_chunk(chunk.path, chunk.key) for chunk in chunks]
    statistics = _statistics(corpus, found)
    _write_json(folder / EXAMPLES, {"examples": _examples(corpus, found, tokenizer)})
    _draw(statistics, folder / PICTURE)
    manifest = identity | {
        "complete": True,
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "tokenizers", "torch", "transformers")},
        "chunks": [
            {"file": chunk.path.name, "key": chunk.key, "sha256": _hash_of_file(chunk.path)} for chunk in chunks
        ],
        "statistics": statistics,
    }
    _write_json(folder / MANIFEST, manifest)
    return manifest


def _chunk(folder: Path, number: int, texts: Sequence[str], identity: Mapping[str, Any]) -> Chunk:
    key = hashed(CANDIDATES_FORMAT, hash_of_texts(texts), identity["tokenizer_sha256"], identity["finder_key"])
    return Chunk(folder / f"chunk-{number:05d}.parquet", key, texts)


def _is_there(chunk: Chunk, written: Mapping[str, str]) -> bool:
    try:
        read_chunk(chunk.path, chunk.key)
    except Damaged:
        return False
    return written.get(chunk.path.name) in (None, _hash_of_file(chunk.path))


def _open(folder: Path, identity: Mapping[str, Any]) -> dict[str, str]:
    """Make the folder, or see that it is of the same; return the hashes of its files, if it is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            there = read_manifest(folder)
            for name, what in _SUBJECTS.items():
                if there.get(name) != identity[name]:
                    raise UsageError(
                        f"{folder} holds candidates of {what} ({there.get(name)!r:.20}, and now "
                        f"{identity[name]!r:.20}); type another --out"
                    )
            return {chunk["file"]: chunk["sha256"] for chunk in there.get("chunks", ())}
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UsageError(f"{folder} holds other files; type another --out")
        _write_json(folder / MANIFEST, {**identity, "complete": False})
        return {}
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}; type another --out") from error


_SUBJECTS: Mapping[str, str] = {
    "format": "another version of asyncsgd",
    "tokenizer_sha256": "another tokenizer",
    "finder_key": "another finder",
    "train_sha256": "other training texts",
    "eval_sha256": "other evaluation texts",
    "chunk_texts": "another --chunk-texts",
}
"""What must be equal, and what is said if it is not."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of candidates.

    Raises:
        UsageError: if there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} is no folder of candidates: it has no {MANIFEST}; {_AGAIN} --out {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove {folder} and {_AGAIN}") from error
    if not isinstance(manifest, dict):
        raise UsageError(f"{path} must hold a JSON object; remove {folder} and {_AGAIN}")
    return manifest


def _hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _statistics(corpus: Corpus, found: Sequence[Found]) -> dict[str, Any]:
    """How many candidates there are, and which."""
    num_pieces = np.concatenate([chunk.num_pieces for chunk in found])
    runs = [runs for chunk in found for runs in chunk.pieces]
    spans = [spans for chunk in found for spans in chunk.spans]
    candidates = np.array([sum(run[1::2]) - sum(run[::2]) for run in runs])
    train = len(corpus.train.texts)
    sides = {}
    for name, part in (("train", slice(train)), ("eval", slice(train, None))):
        total, of = int(num_pieces[part].sum()), int(candidates[part].sum())
        sides[name] = {
            "texts": len(num_pieces[part]),
            "texts_without_candidates": int((candidates[part] == 0).sum()),
            "pieces": total,
            "candidate_pieces": of,
            "candidate_share": of / total if total else 0.0,
        }
    terms = Counter(
        " ".join(text[start:end].lower().split())
        for text, places in zip(corpus.train.texts, spans, strict=False)
        for start, end in zip(places[::2], places[1::2], strict=True)
    )
    shares = candidates[:train] / np.maximum(num_pieces[:train], 1)
    return {
        **sides,
        "distinct_terms": len(terms),
        "top_terms": [list(item) for item in sorted(terms.items(), key=lambda item: (-item[1], item[0]))[:NUM_TERMS]],
        "texts_by_share": np.histogram(shares, NUM_BINS, (0.0, 1.0))[0].tolist(),
    }


def _examples(
    corpus: Corpus, found: Sequence[Found], tokenizer: PreTrainedTokenizerBase, probability: float = 0.15
) -> list[dict[str, Any]]:
    """Training texts, evenly over those with candidates, with what is masked in one drawing; places in characters."""
    all_spans = [spans for chunk in found for spans in chunk.spans][: len(corpus.train.texts)]
    with_candidates = [number for number, spans in enumerate(all_spans) if spans]
    count = min(NUM_EXAMPLES, len(with_candidates))
    backend = plain_backend(tokenizer)
    examples = []
    for number in (with_candidates[n * len(with_candidates) // count] for n in range(count)):
        text, places = corpus.train.texts[number], all_spans[number]
        spans = list(zip(places[::2], places[1::2], strict=True))
        encoding = backend.encode(text, add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids])
        starts = np.diff(words, prepend=-2) != 0
        sample = Sample(np.array(encoding.ids), starts, candidate_pieces(encoding, spans))
        chosen = ByCandidate().choose(sample, probability, generator(0, Purpose.MASK, 0, number))
        masked = [encoding.offsets[place] for place in np.flatnonzero(chosen)]
        examples.append({"text": text, "candidates": [list(span) for span in spans], "masked": _merged(masked)})
    return examples


def _merged(spans: Iterable[Span]) -> list[list[int]]:
    """Spans in order, those that touch as one.

    >>> _merged([(0, 2), (2, 5), (6, 7)])
    [[0, 5], [6, 7]]
    """
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and merged[-1][1] >= start:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged


def _draw(statistics: Mapping[str, Any], path: Path) -> None:
    import matplotlib.figure
    import seaborn

    figure = matplotlib.figure.Figure(figsize=(10, 5), layout="constrained")
    terms, shares = figure.subplots(1, 2)
    top = statistics["top_terms"][:20]
    seaborn.barplot(x=[count for _, count in top], y=[term for term, _ in top], ax=terms, color="tab:blue")
    terms.set(xlabel="times in the training texts", ylabel="", title="commonest candidates")
    bins = statistics["texts_by_share"]
    shares.bar(np.arange(len(bins)) / len(bins), bins, width=1 / len(bins), align="edge", color="tab:blue")
    share = statistics["train"]["candidate_share"]
    shares.set(xlabel="share of candidate pieces", ylabel="training texts", title=f"{share:.1%} of all pieces")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=100, metadata={"Software": None})
    os.replace(partial, path)


def tokens_with_candidates(
    tokens: Path,
    candidates: str,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    cache_dir: Path,
    drop: bool,
) -> Path:
    """Return a folder like `tokens`, whose samples have their candidates.

    Args:
        tokens: of `asyncsgd.data.tokenization.tokenized_folder`, of the same corpus, tokenizer and `seq_len`.
        candidates: a folder that `find_candidates` filled.
        drop: whether training samples without a candidate are left out.

    Raises:
        UsageError: if the candidates are of other texts or of another tokenizer, are not complete, or are damaged; or
            if no training sample has one.
    """
    folder = Path(candidates).expanduser()
    manifest = read_manifest(folder)
    _check_manifest(folder, manifest, corpus, tokenizer)
    chunks = [(chunk["file"], chunk["key"], chunk["sha256"]) for chunk in manifest["chunks"]]
    key = cache_key(CANDIDATES_FORMAT, TOKENS_FORMAT, tokens.name, chunks, drop)
    made = cache_dir / f"candidates-{key}"

    def write(temporary: Path) -> None:
        found = [_checked_chunk(folder, *chunk) for chunk in chunks]
        lengths = np.concatenate([chunk.num_pieces for chunk in found]).astype(np.int64)
        runs = [run for chunk in found for run in chunk.pieces]
        num_train, capacity = len(corpus.train.texts), capacity_of(tokenizer, seq_len)
        for side, part in (("train", slice(num_train)), ("eval", slice(num_train, None))):
            flags = _flags(lengths[part], runs[part])[kept_ids(lengths[part], capacity)]
            plain = Tokens.load(tokens / side)
            if len(flags) != len(plain.ids):
                raise UsageError(f"{folder} does not fit the tokens of this run; remove it and {_AGAIN}")
            marked = dataclasses.replace(plain, candidates=flags)
            if side == "train":
                keep = with_candidates(marked)
                if not keep.any():
                    raise UsageError(f"{folder} has no candidate in any training sequence; use another --finder")
                marked = marked.select(keep) if drop else marked
            marked.save(temporary / side)

    if not _is_made(made):
        publish(made, write)
    return made


def hash_of_candidates(candidates: str) -> str:
    """16 hexadecimal digits that change whenever a file of a complete folder of candidates does."""
    manifest = read_manifest(Path(candidates).expanduser())
    return hashed([chunk["sha256"] for chunk in manifest["chunks"]])[:16]


def with_candidates(tokens: Tokens) -> np.ndarray:
    """Which samples have a candidate, bool (S,)."""
    assert tokens.candidates is not None
    total = np.concatenate([[0], np.cumsum(tokens.candidates)])
    return total[tokens.starts[1:]] > total[tokens.starts[:-1]]


def _flags(lengths: np.ndarray, runs: Sequence[Sequence[int]]) -> np.ndarray:
    """Which pieces of texts of these lengths are candidates, one text after another."""
    begins = lengths.cumsum() - lengths
    changes = np.zeros(int(lengths.sum()) + 1, dtype=np.int8)
    places = np.repeat(begins, [len(run) for run in runs]) + np.array([p for run in runs for p in run], dtype=np.int64)
    np.add.at(changes, places[::2], 1)
    np.add.at(changes, places[1::2], -1)
    return np.cumsum(changes[:-1], dtype=np.int8).astype(bool)


def _is_made(folder: Path) -> bool:
    try:
        return all(Tokens.load(folder / side).candidates is not None for side in ("train", "eval"))
    except (OSError, ValueError, EOFError):
        return False


def _check_manifest(
    folder: Path, manifest: Mapping[str, Any], corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> None:
    if manifest.get("format") != CANDIDATES_FORMAT:
        raise UsageError(f"{folder} was made by another version of asyncsgd; {_AGAIN} with another --out")
    if not manifest.get("complete"):
        raise UsageError(f"{folder} is not complete; {_AGAIN}, which goes on where it was interrupted")
    if manifest["tokenizer_sha256"] != hash_of_tokenizer(tokenizer):
        raise UsageError(
            f"{folder} was made with another tokenizer (that of --model {manifest['model']}); {_AGAIN} with the "
            f"--model, --vocab-size and --data of this run, and another --out"
        )
    for side, documents in (("train", corpus.train), ("eval", corpus.eval)):
        if manifest[f"{side}_sha256"] != hash_of_texts(documents.texts):
            raise UsageError(
                f"{folder} was made from other {'training' if side == 'train' else 'evaluation'} texts: "
                f"{manifest[f'{side}_texts']} of {manifest['data']}, and this run has {len(documents.texts)} of "
                f"{corpus.name}; {_AGAIN} with the --data and --eval-data of this run, and another --out"
            )


def _checked_chunk(folder: Path, file: str, key: str, sha256: str) -> Found:
    try:
        path = folder / Path(file).name
        found = read_chunk(path, key)
        if _hash_of_file(path) != sha256:
            raise Damaged(f"{file} has changed since it was made")
    except Damaged as error:
        raise UsageError(f"{folder}: {error}; {_AGAIN} as before, which makes that file again") from error
    return found
