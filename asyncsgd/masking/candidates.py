"""Candidates for masking, found once and kept: which word pieces of which text a finder found.

A folder of candidates holds

    manifest.json             what it was made of, and statistics; written first and last
    chunk-00000-KEY.parquet   one row a text, in the order of the training texts and then the evaluation texts
    examples.json             some texts with their candidates and one drawing of masks
    terms.png                 the commonest candidates, and how many there are in a text

A row has ``spans``, the starts and ends of the finds in characters, one after another, and ``candidates``, for each
piece of the text whether it overlaps with a span. The key of a chunk is the hash of its texts, of the tokenizer and of
the finder, and its file has its name only when it is whole. So a chunk that is there need not be made again. Nothing in
a folder depends on the number of processes or on an interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.masking import ByCandidate, Sample
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import plain_backend
from asyncsgd.errors import UsageError
from asyncsgd.masking.finders import Find, Span, hashed

if TYPE_CHECKING:
    from pandas import DataFrame
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

CANDIDATES_FORMAT = 2
MANIFEST, EXAMPLES, PICTURE = "manifest.json", "examples.json", "terms.png"
NUM_EXAMPLES, NUM_TERMS, NUM_BINS = 100, 50, 20
AGAIN = "run mask_candidates.py again"
NAMES = ("data", "train_texts", "eval_texts", "model", "finder")
"""Of a manifest's identity, what may differ where a folder is filled again."""

Chunk = tuple[Path, Sequence[str]]
"""The file in which is kept what is found in some texts, and the texts."""

_process: tuple[Find, Tokenizer, str] | None = None
"""What this process makes chunks with: a finder, a tokenizer and a device."""


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
    _process = find, Tokenizer.from_str(tokenizer), devices[number] if devices else "cpu"


def make_chunk(chunk: Chunk) -> None:
    """Find in the texts of a chunk and write its file, whole or not at all.

    Raises:
        UsageError: if the finder's spans are no spans of the texts.
    """
    import pyarrow
    from pyarrow import parquet

    assert _process is not None, "begin comes first"
    path, texts = chunk
    spans, candidates = found_in(texts, *_process)
    numbers, flags = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.bool_())
    columns = {"spans": pyarrow.array(spans, numbers), "candidates": pyarrow.array(candidates, flags)}
    partial = path.with_suffix(".partial")
    parquet.write_table(pyarrow.table(columns), partial, compression="zstd", write_page_checksum=True)
    partial.rename(path)


def found_in(
    texts: Sequence[str], find: Find, tokenizer: Tokenizer, device: str = "cpu"
) -> tuple[list[list[int]], list[np.ndarray]]:
    """The two columns of a chunk, an entry a text; see the module."""
    all_spans = find.spans(texts, device)
    flat = [[place for span in spans for place in span] for spans in all_spans]
    for text, places, spans in zip(texts, flat, all_spans, strict=True):
        bounds = [0, *places, len(text)]
        if sorted(bounds) != bounds or any(start == end for start, end in spans):
            raise UsageError(f"the finder gave the spans {spans} in {text[:40]!r}... ({len(text)} characters); mend it")
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return flat, list(map(candidate_pieces, encodings, all_spans))


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


def read_chunks(folder: Path, files: Iterable[str]) -> DataFrame:
    """What some chunks of a folder hold, a row a text.

    Raises:
        UsageError: if one is not there or is damaged.
    """
    import pandas
    from pyarrow import ArrowException, parquet

    found = []
    for file in files:
        try:
            found.append(parquet.read_table(folder / file, page_checksum_verification=True).to_pandas())
        except (OSError, ArrowException) as error:
            why = str(error).partition("\n")[0]
            raise UsageError(f"{folder / file} cannot be read ({why}); remove it, and {AGAIN} as before") from error
    return pandas.concat(found, ignore_index=True)


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
        folder: new, empty, or one of the same texts, tokenizer, finder and `chunk_texts`.
        mapped: as `map`, in any number of processes that have called `begin`.
        finder, model: as the user names them, for the manifest.
        chunk_texts: texts of a chunk. If the finder has a model, last bits may depend on it.

    Returns:
        The manifest.

    Raises:
        UsageError: if the folder is of something else.
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
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        there = _read_manifest(folder)
        others = [name for name, value in identity.items() if name not in NAMES and there.get(name) != value]
        if others:
            raise UsageError(f"{folder} holds candidates of another {others[0]} ({MANIFEST}); type another --out")
    elif any(folder.iterdir()):
        raise UsageError(f"{folder} holds other files; type another --out")
    else:
        _write_json(folder / MANIFEST, {**identity, "complete": False})
    chunks = []
    for number, first in enumerate(range(0, len(texts), chunk_texts)):
        of_chunk = texts[first : first + chunk_texts]
        key = hashed(CANDIDATES_FORMAT, hash_of_texts(of_chunk), identity["tokenizer_sha256"], find.key)
        chunks.append((folder / f"chunk-{number:05d}-{key[:16]}.parquet", of_chunk))
    for _ in mapped(make_chunk, [chunk for chunk in chunks if not chunk[0].exists()]):
        pass
    names = [path.name for path, _ in chunks]
    found = read_chunks(folder, names)
    statistics = _statistics(corpus, found)
    manifest = identity | {
        "complete": True,
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "tokenizers", "torch", "transformers")},
        "chunks": names,
        "sha256": hashed([hashlib.sha256(path.read_bytes()).hexdigest() for path, _ in chunks]),
        "statistics": statistics,
    }
    _write_json(folder / EXAMPLES, {"examples": _examples(corpus.train.texts, found, tokenizer)})
    _draw(statistics, folder / PICTURE)
    _write_json(folder / MANIFEST, manifest)
    return manifest


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.rename(path)


def _statistics(corpus: Corpus, found: DataFrame) -> dict[str, Any]:
    """How many candidates there are, and which."""
    counts = np.array([(len(flags), flags.sum()) for flags in found["candidates"]])
    train, sides = len(corpus.train.texts), {}
    for name, (pieces, candidates) in (("train", counts[:train].T), ("eval", counts[train:].T)):
        sides[name] = {
            "texts": len(pieces),
            "texts_without_candidates": int((candidates == 0).sum()),
            "pieces": int(pieces.sum()),
            "candidate_pieces": int(candidates.sum()),
            "candidate_share": float(candidates.sum() / max(pieces.sum(), 1)),
        }
    terms = Counter(
        " ".join(text[start:end].lower().split())
        for text, spans in zip(corpus.train.texts, found["spans"], strict=False)
        for start, end in spans.reshape(-1, 2)
    )
    shares = counts[:train, 1] / np.maximum(counts[:train, 0], 1)
    return {
        **sides,
        "distinct_terms": len(terms),
        "top_terms": [list(item) for item in sorted(terms.items(), key=lambda item: (-item[1], item[0]))[:NUM_TERMS]],
        "texts_by_share": np.histogram(shares, NUM_BINS, (0.0, 1.0))[0].tolist(),
    }


def _examples(texts: Sequence[str], found: DataFrame, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Training texts, evenly over those with candidates, with what is masked in one drawing; places in characters."""
    with_candidates = np.flatnonzero(found["spans"][: len(texts)].map(len))
    count = min(NUM_EXAMPLES, len(with_candidates))
    backend, examples = plain_backend(tokenizer), []
    for number in (int(with_candidates[n * len(with_candidates) // count]) for n in range(count)):
        encoding = backend.encode(texts[number], add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids])
        sample = Sample(np.array(encoding.ids), np.diff(words, prepend=-2) != 0, found["candidates"][number])
        chosen = ByCandidate().choose(sample, 0.15, generator(0, Purpose.MASK, 0, number))
        masked: list[list[int]] = []
        for start, end in (encoding.offsets[place] for place in np.flatnonzero(chosen)):
            if masked and masked[-1][1] >= start:  # they touch
                masked[-1][1] = end
            else:
                masked.append([start, end])
        spans = found["spans"][number].reshape(-1, 2).tolist()
        examples.append({"text": texts[number], "candidates": spans, "masked": masked})
    return examples


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
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})


def read_complete(candidates: str | Path) -> dict[str, Any]:
    """The manifest of a folder of candidates that a training can use; its ``sha256`` is of all that was found.

    Raises:
        UsageError: if there is none, it cannot be read, is of another version, or is not complete.
    """
    manifest = _read_manifest(Path(candidates).expanduser())
    if manifest.get("format") != CANDIDATES_FORMAT:
        raise UsageError(f"{candidates} was made by another version of asyncsgd; {AGAIN} with another --out")
    if not manifest.get("complete"):
        raise UsageError(f"{candidates} is not complete; {AGAIN}, which goes on where it was interrupted")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / MANIFEST).read_bytes()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is no folder of candidates, or is damaged ({error}); {AGAIN}") from error


def candidate_flags(candidates: str, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, side: str) -> list[np.ndarray]:
    """Which pieces of each text of ``train`` or ``eval`` are candidates, bool: a column beside the ids.

    Args:
        candidates: a folder that `find_candidates` filled.

    Raises:
        UsageError: if the candidates are of other texts or of another tokenizer, are not complete, are damaged, or
            none is in the training texts.
    """
    folder, manifest = Path(candidates).expanduser(), read_complete(candidates)
    here = {
        "another tokenizer": (manifest["tokenizer_sha256"], hash_of_tokenizer(tokenizer)),
        "other train texts": (manifest["train_sha256"], hash_of_texts(corpus.train.texts)),
        "other eval texts": (manifest["eval_sha256"], hash_of_texts(corpus.eval.texts)),
    }
    for what, (recorded, sha256) in here.items():
        if recorded != sha256:
            raise UsageError(f"{folder} was made with {what}; {AGAIN} with the flags of this run, and another --out")
    if not manifest["statistics"]["train"]["candidate_pieces"]:
        raise UsageError(f"{folder} has no candidate in any training text; use another --finder")
    marked, num_train = list(read_chunks(folder, manifest["chunks"])["candidates"]), len(corpus.train.texts)
    return marked[:num_train] if side == "train" else marked[num_train:]


def hash_of_texts(texts: Iterable[str]) -> str:
    """64 hexadecimal digits that name texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest()[:16])
    return digest.hexdigest()


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """64 hexadecimal digits that name how texts become pieces."""
    return hashlib.sha256(plain_backend(tokenizer).to_str().encode()).hexdigest()
