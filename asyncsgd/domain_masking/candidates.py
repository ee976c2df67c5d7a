"""Candidates for masking, found once and kept: which word pieces of which text a finder found.

A folder of candidates holds

    manifest.json             what it was made of, with the packages of the last call that made a chunk, and statistics;
                              written first and last
    chunk-00000-KEY.parquet   one row a text, in the order of the training texts and then the evaluation texts
    examples.json             some texts with their candidates and one drawing of masks
    terms.png                 the commonest candidates, and how many there are in a text

A row has ``spans``, the starts and ends of the finds in characters, one after another, and ``candidates``, for each
piece of the text whether it overlaps with a span. The key of a chunk is the hash of its texts, of the tokenizer and of
the finder, and its file has its name only when it is whole. So a chunk that is there need not be made again, and the
names of all chunks say what a folder is of. Nothing in it depends on the number of processes or on an interruption.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import evenly
from asyncsgd.data.masks import ByCandidate, Sample
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import plain_backend
from asyncsgd.domain_masking.finders import Find, Span, hashed
from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import write_json

if TYPE_CHECKING:
    from pandas import DataFrame
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

CANDIDATES_FORMAT = 2
MANIFEST = "manifest.json"
EXAMPLES = "examples.json"
PICTURE = "terms.png"
NUM_EXAMPLES = 100
NUM_TERMS = 50
NUM_BINS = 20
AGAIN = "run mask_candidates.py again"

Chunk = tuple[Path, Sequence[str]]
"""Some texts, behind the file that keeps what is found in them."""

_process: tuple[Find, Tokenizer, str] | None = None
"""What this process makes chunks with: a finder, a tokenizer and a device."""


def begin(find: Find, tokenizer: str, devices: Sequence[str], number: int) -> None:
    """Make this process, the one of that number, ready for `make_chunk`.

    Args:
        tokenizer: the Rust tokenizer as JSON.
        devices: the device of each process, for finders that compute with torch; empty for other finders.
    """
    global _process
    from tokenizers import Tokenizer

    device = "cpu"
    if devices:
        import torch

        torch.set_num_threads(1)  # bits depend on it, and processes share the cores
        device = devices[number]
    _process = find, Tokenizer.from_str(tokenizer), device


def make_chunk(chunk: Chunk) -> None:
    """Find in the texts of a chunk and write its file, whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    assert _process is not None, "begin comes first"
    path, texts = chunk
    spans, candidates = found_in(texts, *_process)
    numbers = pyarrow.list_(pyarrow.int32())
    flags = pyarrow.list_(pyarrow.bool_())
    columns = {"spans": pyarrow.array(spans, numbers), "candidates": pyarrow.array(candidates, flags)}
    partial = path.with_suffix(".partial")
    parquet.write_table(pyarrow.table(columns), partial, compression="zstd", write_page_checksum=True)
    partial.rename(path)


def found_in(
    texts: Sequence[str], find: Find, tokenizer: Tokenizer, device: str = "cpu"
) -> tuple[list[list[int]], list[np.ndarray]]:
    """The two columns of a chunk, an entry a text; see the module."""
    spans = find.spans(texts, device)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    bounds = [list(itertools.chain(*text_spans)) for text_spans in spans]
    candidates = []
    for text, text_spans, encoding in zip(texts, spans, encodings, strict=True):
        candidates.append(candidate_pieces(encoding, text_spans, len(text)))
    return bounds, candidates


def candidate_pieces(encoding: Encoding, spans: Sequence[Span], length: int) -> np.ndarray:
    """Which pieces of a text of that length have a character in a span, bool."""
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, end in spans:
        inside[start + 1 : end + 1] = 1
    before = np.cumsum(inside)  # how many characters in front of a place are in spans
    offsets = np.array(encoding.offsets, dtype=np.int64)
    starts, ends = offsets.reshape(-1, 2).T
    return before[ends] > before[starts]


def read_chunks(folder: Path, files: Iterable[str]) -> DataFrame:
    """What some chunks of a folder hold, a row a text.

    Raises:
        UsageError: if one is not there or is damaged.
    """
    import pandas

    chunks = []
    for file in files:
        path = folder / file
        try:
            chunks.append(pandas.read_parquet(path, page_checksum_verification=True))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error}); remove it, and {AGAIN} as before") from error
    return pandas.concat(chunks, ignore_index=True)


def chunks_of(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, finder_key: str, chunk_texts: int
) -> dict[str, Sequence[str]]:
    """The texts of each chunk by its name."""
    texts = [*corpus.train.texts, *corpus.eval.texts]
    pieces = plain_backend(tokenizer).to_str()
    tokenizer_key = hashlib.sha256(pieces.encode()).hexdigest()
    chunks: dict[str, Sequence[str]] = {}
    for first in range(0, len(texts), chunk_texts):
        chunk = texts[first : first + chunk_texts]
        digest = hashlib.sha256()
        for text in chunk:
            text_digest = hashlib.sha256(text.encode()).digest()
            digest.update(text_digest[:16])
        key = hashed(CANDIDATES_FORMAT, digest.hexdigest(), tokenizer_key, finder_key)
        name = f"chunk-{first // chunk_texts:05d}-{key[:16]}.parquet"
        chunks[name] = chunk
    return chunks


def find_candidates(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    find: Find,
    folder: Path,
    mapped: Callable[[Callable[[Chunk], None], Sequence[Chunk]], Iterable[None]],
    *,
    finder: str,
    model: str,
    chunk_texts: int = 1000,
) -> dict[str, Any]:
    """Fill a folder with the candidates of a corpus, or go on where an earlier call ended.

    Args:
        folder: new, or one of the same texts, tokenizer, finder and `chunk_texts`.
        mapped: as `map`, in any number of processes that have called `begin`.
        finder, model: as the user names them, for the manifest.
        chunk_texts: texts of a chunk. If the finder has a model, last bits may depend on it.

    Returns:
        The manifest.

    Raises:
        UsageError: if the folder is of something else.
    """
    chunks = chunks_of(corpus, tokenizer, find.key, chunk_texts)
    packages = ("numpy", "pyarrow", "tokenizers", "torch", "transformers")
    manifest = {
        "format": CANDIDATES_FORMAT,
        "complete": False,
        "data": corpus.name,
        "model": model,
        "finder": finder,
        "finder_key": find.key,
        "chunk_texts": chunk_texts,
        "versions": {name: version(name) for name in packages},
        "chunks": list(chunks),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).exists():
        write_json(folder / MANIFEST, manifest)
    before = read_manifest(folder)
    if before["chunks"] != manifest["chunks"]:
        raise UsageError(f"{folder} holds candidates of other texts, another tokenizer or finder; type another --out")
    to_make: list[Chunk] = []
    for name, texts in chunks.items():
        path = folder / name
        if not path.exists():
            to_make.append((path, texts))
    for _ in mapped(make_chunk, to_make):
        pass
    if not to_make:
        manifest["versions"] = before["versions"]
    rows = read_chunks(folder, chunks)
    digests = []
    for name in chunks:
        content = (folder / name).read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    statistics = _statistics(corpus, rows)
    manifest["complete"] = True
    manifest["sha256"] = hashed(digests)
    manifest["statistics"] = statistics
    examples = _examples(corpus.train.texts, rows, tokenizer)
    write_json(folder / EXAMPLES, {"examples": examples})
    _draw(statistics, folder / PICTURE)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _statistics(corpus: Corpus, rows: DataFrame) -> dict[str, Any]:
    """How many candidates there are, and which."""
    num_train = len(corpus.train.texts)
    num_pieces = np.array([len(flags) for flags in rows["candidates"]])
    num_candidates = np.array([flags.sum() for flags in rows["candidates"]])
    statistics: dict[str, Any] = {}
    for side, texts in (("train", slice(None, num_train)), ("eval", slice(num_train, None))):
        pieces = num_pieces[texts]
        candidates = num_candidates[texts]
        statistics[side] = {
            "texts": len(pieces),
            "texts_without_candidates": int((candidates == 0).sum()),
            "pieces": int(pieces.sum()),
            "candidate_pieces": int(candidates.sum()),
            "candidate_share": float(candidates.sum() / max(pieces.sum(), 1)),
        }
    terms: Counter[str] = Counter()
    for text, spans in zip(corpus.train.texts, rows["spans"], strict=False):
        for start, end in spans.reshape(-1, 2):
            words = text[start:end].lower().split()
            terms[" ".join(words)] += 1
    commonest_first = sorted(terms.items(), key=lambda item: (-item[1], item[0]))
    shares = num_candidates[:num_train] / np.maximum(num_pieces[:num_train], 1)
    texts_by_share, _ = np.histogram(shares, NUM_BINS, (0.0, 1.0))
    statistics["distinct_terms"] = len(terms)
    statistics["top_terms"] = [[term, count] for term, count in commonest_first[:NUM_TERMS]]
    statistics["texts_by_share"] = texts_by_share.tolist()
    return statistics


def _examples(texts: Sequence[str], rows: DataFrame, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Training texts, evenly over those with candidates, with what is masked in one drawing; places in characters."""
    with_candidates = np.flatnonzero(rows["spans"][: len(texts)].map(len))
    chosen_texts = with_candidates[evenly(len(with_candidates), NUM_EXAMPLES)]
    backend = plain_backend(tokenizer)
    examples = []
    for number in chosen_texts.tolist():
        encoding = backend.encode(texts[number], add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids])
        begins_word = np.diff(words, prepend=-2) != 0
        sample = Sample(np.array(encoding.ids), begins_word, rows["candidates"][number])
        is_masked = ByCandidate().choose(sample, 0.15, generator(0, Purpose.MASK, 0, number))
        masked: list[list[int]] = []
        for piece in np.flatnonzero(is_masked):
            start, end = encoding.offsets[piece]
            if masked and masked[-1][1] >= start:  # they touch
                masked[-1][1] = end
            else:
                masked.append([start, end])
        spans = rows["spans"][number].reshape(-1, 2)
        examples.append({"text": texts[number], "candidates": spans.tolist(), "masked": masked})
    return examples


def _draw(statistics: Mapping[str, Any], path: Path) -> None:
    """Draw the commonest candidates, and how many there are in a text."""
    import matplotlib.figure
    import seaborn

    figure = matplotlib.figure.Figure(figsize=(10, 5), layout="constrained")
    terms, shares = figure.subplots(1, 2)
    top = statistics["top_terms"][:20]
    counts = [count for _, count in top]
    names = [term for term, _ in top]
    seaborn.barplot(x=counts, y=names, ax=terms, color="tab:blue")
    terms.set(xlabel="times in the training texts", ylabel="", title="commonest candidates")
    bins = statistics["texts_by_share"]
    num_bins = len(bins)
    shares.bar(np.arange(num_bins) / num_bins, bins, width=1 / num_bins, align="edge", color="tab:blue")
    share = statistics["train"]["candidate_share"]
    shares.set(xlabel="share of candidate pieces", ylabel="training texts", title=f"{share:.1%} of all pieces")
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})


def read_manifest(candidates: str | Path) -> dict[str, Any]:
    """The manifest of a folder of candidates: what it was made of. Where the folder is ``complete``, ``sha256`` is the
    hash of all that was found.

    Raises:
        UsageError: if there is none, it cannot be read, or it is of another version.
    """
    path = Path(candidates).expanduser() / MANIFEST
    try:
        manifest = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{candidates} is no folder of candidates, or is damaged ({error}); {AGAIN}") from error
    if manifest.get("format") != CANDIDATES_FORMAT:
        raise UsageError(f"{candidates} was made by another version of asyncsgd; {AGAIN} with another --out")
    return manifest


def read_complete(candidates: str | Path) -> dict[str, Any]:
    """The manifest of a folder that a training can use.

    Raises:
        UsageError: as `read_manifest`, and if the folder is not complete.
    """
    manifest = read_manifest(candidates)
    if not manifest["complete"]:
        raise UsageError(f"{candidates} is not complete; {AGAIN}, which goes on where it was interrupted")
    return manifest


def candidate_flags(candidates: str, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, side: str) -> list[np.ndarray]:
    """Which pieces of each text of ``train`` or ``eval`` are candidates, bool: a column beside the ids.

    Args:
        candidates: a folder that `find_candidates` filled.

    Raises:
        UsageError: if the candidates are of other texts or of another tokenizer, are not complete, are damaged, or
            none is in the training texts.
    """
    folder = Path(candidates).expanduser()
    manifest = read_complete(candidates)
    chunks = chunks_of(corpus, tokenizer, manifest["finder_key"], manifest["chunk_texts"])
    if list(chunks) != manifest["chunks"]:
        raise UsageError(
            f"{folder} was made of other texts or with another tokenizer; {AGAIN} with the flags of this run, and "
            f"another --out"
        )
    if not manifest["statistics"]["train"]["candidate_pieces"]:
        raise UsageError(f"{folder} has no candidate in any training text; use another --finder")
    rows = read_chunks(folder, manifest["chunks"])
    flags = list(rows["candidates"])
    num_train = len(corpus.train.texts)
    return flags[:num_train] if side == "train" else flags[num_train:]
