"""A training's tokens with the candidates of a folder, checked to be of the same texts and tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.candidate_chunks import Damaged, Found, hash_of_texts, hash_of_tokenizer, read_chunk
from asyncsgd.data.candidates import AGAIN, CANDIDATES_FORMAT, hash_of_file, read_complete
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.finders.base import hashed
from asyncsgd.data.tokenization import TOKENS_FORMAT, Tokens, cache_key, capacity_of, kept_ids, publish, units_to_cut
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokens_with_candidates(
    tokens: Path,
    candidates: str,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    cache_dir: Path,
    drop: bool,
    blocks: bool = False,
) -> Path:
    """Return a folder like `tokens`, whose samples have their candidates.

    Args:
        tokens: of `asyncsgd.data.tokenization.tokenized_folder`, of the same corpus, tokenizer, `seq_len` and `blocks`.
        candidates: a folder that `find_candidates` filled.
        drop: whether training samples without a candidate are left out.

    Raises:
        UsageError: if the candidates are of other texts or of another tokenizer, are not complete, or are damaged; or
            if no training sample has one.
    """
    folder = Path(candidates).expanduser()
    manifest = read_complete(folder)
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
            flags = _flags(lengths[part], runs[part])[kept_ids(units_to_cut(lengths[part], blocks), capacity)]
            plain = Tokens.load(tokens / side)
            if len(flags) != len(plain.ids):
                raise UsageError(f"{folder} does not fit the tokens of this run; remove it and {AGAIN}")
            marked = dataclasses.replace(plain, candidates=flags)
            if side == "train":
                keep = with_candidates(marked)
                if not keep.any():
                    raise UsageError(f"{folder} has no candidate in any training sequence; use another --finder")
                marked = marked.select(keep) if drop else marked
            marked.save(temporary / side)

    publish(made, write)
    return made


def hash_of_candidates(candidates: str) -> str:
    """16 hexadecimal digits that change whenever a file of a complete folder of candidates does."""
    manifest = read_complete(Path(candidates).expanduser())
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


def _check_manifest(
    folder: Path, manifest: Mapping[str, Any], corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> None:
    if manifest["tokenizer_sha256"] != hash_of_tokenizer(tokenizer):
        raise UsageError(
            f"{folder} was made with another tokenizer (that of --model {manifest['model']}); {AGAIN} with the "
            f"--model, --vocab-size and --data of this run, and another --out"
        )
    for side, documents in (("train", corpus.train), ("eval", corpus.eval)):
        if manifest[f"{side}_sha256"] != hash_of_texts(documents.texts):
            raise UsageError(
                f"{folder} was made from other {'training' if side == 'train' else 'evaluation'} texts: "
                f"{manifest[f'{side}_texts']} of {manifest['data']}, and this run has {len(documents.texts)} of "
                f"{corpus.name}; {AGAIN} with the --data and --eval-data of this run, and another --out"
            )


def _checked_chunk(folder: Path, file: str, key: str, sha256: str) -> Found:
    try:
        path = folder / Path(file).name
        found = read_chunk(path, key)
        if hash_of_file(path) != sha256:
            raise Damaged(f"{file} has changed since it was made")
    except Damaged as error:
        raise UsageError(f"{folder}: {error}; {AGAIN} as before, which makes that file again") from error
    return found
