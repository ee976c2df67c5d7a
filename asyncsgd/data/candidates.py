"""Candidates for masking, found once and kept: which word pieces of which text a finder found.

A folder of candidates holds

    manifest.json          what it was made of, what is in each file, and statistics; written first and last
    chunk-00000.parquet    one row a text, in the order of the training texts and then the evaluation texts
    examples.json          some texts with their candidates and one drawing of masks
    terms.png              the commonest candidates, and how many there are in a text

Nothing in a folder depends on the number of processes or on an interruption; see `asyncsgd.data.candidate_chunks`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.candidate_chunks import (
    Chunk,
    Damaged,
    Found,
    candidate_pieces,
    hash_of_texts,
    hash_of_tokenizer,
    make_chunk,
    read_chunk,
)
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.finders.base import Find, Span, hashed
from asyncsgd.data.masking import ByCandidate, Sample
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import plain_backend
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CANDIDATES_FORMAT = 1
MANIFEST, EXAMPLES, PICTURE = "manifest.json", "examples.json", "terms.png"
NUM_EXAMPLES = 100
NUM_TERMS = 50
NUM_BINS = 20

AGAIN = "run mask_candidates.py again"
"""For messages."""

Map = Callable[[Callable[[Chunk], None], Iterable[Chunk]], Iterator[None]]
"""As `map`, in any number of processes that have called `begin`."""


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
        "chunks": [{"file": chunk.path.name, "key": chunk.key, "sha256": hash_of_file(chunk.path)} for chunk in chunks],
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
    return written.get(chunk.path.name) in (None, hash_of_file(chunk.path))


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
            f"{folder} is no folder of candidates: it has no {MANIFEST}; {AGAIN} --out {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove {folder} and {AGAIN}") from error
    if not isinstance(manifest, dict):
        raise UsageError(f"{path} must hold a JSON object; remove {folder} and {AGAIN}")
    return manifest


def read_complete(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of candidates that a training can use.

    Raises:
        UsageError: if there is none, it cannot be read, is of another version, or is not complete.
    """
    manifest = read_manifest(folder)
    if manifest.get("format") != CANDIDATES_FORMAT:
        raise UsageError(f"{folder} was made by another version of asyncsgd; {AGAIN} with another --out")
    if not manifest.get("complete"):
        raise UsageError(f"{folder} is not complete; {AGAIN}, which goes on where it was interrupted")
    return manifest


def hash_of_file(path: Path) -> str:
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
