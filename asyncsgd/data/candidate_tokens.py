"""What a folder of candidates holds for the texts of a training, checked to be of the same texts and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsgd.data.candidate_chunks import Damaged, Found, hash_of_texts, hash_of_tokenizer, read_chunk
from asyncsgd.data.candidates import AGAIN, hash_of_file, read_complete
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.finders.base import hashed
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def candidate_flags(candidates: str, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, side: str) -> list[np.ndarray]:
    """Which pieces of each text of ``train`` or ``eval`` are candidates, bool.

    Args:
        candidates: a folder that `find_candidates` filled.

    Raises:
        UsageError: if the candidates are of other texts or of another tokenizer, are not complete, are damaged, or
            none is in the training texts.
    """
    folder = Path(candidates).expanduser()
    manifest = read_complete(folder)
    _check_manifest(folder, manifest, corpus, tokenizer)
    flags: list[np.ndarray] = []
    for chunk in manifest["chunks"]:
        found = _checked_chunk(folder, chunk["file"], chunk["key"], chunk["sha256"])
        for length, runs in zip(found.num_pieces.tolist(), found.pieces, strict=True):
            of_text = np.zeros(length, dtype=bool)
            for start, end in zip(runs[::2], runs[1::2], strict=True):
                of_text[start:end] = True
            flags.append(of_text)
    num_train = len(corpus.train.texts)
    if not any(of_text.any() for of_text in flags[:num_train]):
        raise UsageError(f"{folder} has no candidate in any training text; use another --finder")
    return flags[:num_train] if side == "train" else flags[num_train:]


def hash_of_candidates(candidates: str) -> str:
    """16 hexadecimal digits that change whenever a file of a complete folder of candidates does."""
    manifest = read_complete(Path(candidates).expanduser())
    return hashed([chunk["sha256"] for chunk in manifest["chunks"]])[:16]


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
