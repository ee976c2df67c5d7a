"""A token-classification model that finds named entities; `asyncsgd.domain_masking.finders.Ner` says which words."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsgd.data.tokenizer import pretrained_tokenizer, refuse_own_code
from asyncsgd.data.tokens import first_pieces, pad, plain_backend, special_around
from asyncsgd.errors import UsageError
from asyncsgd.tasks.spans import OUTSIDE, Tagging

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Span = tuple[int, int]
"""Where a find begins and where it has ended, in characters."""

NER_FORMAT = 1
LONGEST_WINDOW = 512
BATCH_PIECES = 4096
_TAGGED_WORD = re.compile(r"\w(?:\S*\w)?|\S")
_BEGINS = ("B", "S", "U")
_PREFIXES = ("B", "I", "E", "L", "S", "U")


def hashed(*parts: object) -> str:
    """64 hexadecimal digits of what JSON can write."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class Tagger:
    """A model in a folder, which each process loads for itself when it is first needed.

    A text longer than the model is read in windows of P pieces that overlap by P // 4. A piece has the tag that the
    window says in which it is farther from the edge. Batches are a function of the texts of one call, so that it has
    the same bits in every process of one kind of device.
    """

    folder: str
    types: tuple[str, ...]
    sha256: str
    """Of the folder's files."""

    @property
    def key(self) -> str:
        return hashed(NER_FORMAT, self.sha256, self.types)

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        loaded = load(self.folder, device)
        found = []
        encodings = loaded.backend.encode_batch(list(texts), add_special_tokens=False)
        all_labels = loaded.labels([encoding.ids for encoding in encodings])
        for text, encoding, labels in zip(texts, encodings, all_labels, strict=True):
            words = [word.span() for word in _TAGGED_WORD.finditer(text)]
            first = first_pieces(words, encoding)
            spans = loaded.tagging.spans(np.append(labels, OUTSIDE)[None, first])  # a word without a piece is outside
            wanted = [span for span in spans if not self.types or loaded.tagging.types[span[2]] in self.types]
            found.append([(words[begin][0], words[last][1]) for begin, last, _ in wanted])
        return found


def windows(length: int, size: int) -> list[tuple[int, int, int, int]]:
    """The windows of a text: (start, end, from, to) in pieces; a window decides on the pieces in [from, to).

    >>> windows(10, 8), windows(3, 8), windows(0, 8)
    ([(0, 8, 0, 7), (6, 10, 7, 10)], [(0, 3, 0, 3)], [])
    """
    overlap = size // 4
    starts = list(range(0, max(length - overlap, min(length, 1)), size - overlap))
    bounds = [0, *(start + overlap // 2 for start in starts[1:]), length]
    return [(start, min(start + size, length), bounds[n], bounds[n + 1]) for n, start in enumerate(starts)]


class Loaded(NamedTuple):
    model: Any
    backend: Tokenizer
    around: list[list[int]]
    """The special tokens before and behind a text."""
    pad_id: int
    size: int
    """Pieces of the longest window."""
    tagging: Tagging
    """What its labels mean; one without a prefix continues a span of its name."""

    def labels(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        import torch

        prefix, suffix = self.around
        places = [(number, *window) for number, ids in enumerate(texts) for window in windows(len(ids), self.size)]
        places.sort(key=lambda place: place[2] - place[1])
        labels = [np.zeros(len(ids), dtype=np.int64) for ids in texts]
        while places:
            # From the longest on, so that memory runs out at once if it does.
            longest = places[-1][2] - places[-1][1] + len(prefix) + len(suffix)
            number = max(1, BATCH_PIECES // longest)
            batch = places[-number:]
            places = places[:-number]
            rows = [np.array([*prefix, *texts[text][start:end], *suffix]) for text, start, end, _, _ in batch]
            ids = pad(rows, self.pad_id)
            mask = pad([np.ones(len(row)) for row in rows], 0)
            with torch.inference_mode():
                on = self.model.device
                best = self.model(input_ids=ids.to(on), attention_mask=mask.to(on)).logits.argmax(-1).cpu().numpy()
            for row, (text, start, _, first, last) in zip(best[:, len(prefix) :], batch, strict=True):
                labels[text][first:last] = row[first - start : last - start]
        return labels


@functools.lru_cache(maxsize=2)
def load(folder: str, device: str) -> Loaded:
    """Load a model and its tokenizer from a folder.

    Raises:
        UsageError: if there is no token-classification model with a label ``O`` and a fast tokenizer.
    """
    tokenizer = pretrained_tokenizer(folder)
    import torch
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what does not fit is said here, in one line
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"it has no {missing[0]}")
    except Exception as error:
        refuse_own_code(folder, error)
        raise UsageError(f"--finder ner: {folder} is no token-classification model ({first_line(error)})") from error
    names = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    outside = [name.upper() in ("O", "OUTSIDE") for name in names]
    if not any(outside):
        raise UsageError(f"--finder ner: {folder} has no label O, so every word would be found: {', '.join(names)}")
    parts = [(name[0], name[2:]) if name[1:2] == "-" and name[0] in _PREFIXES else ("I", name) for name in names]
    bio = [f"{'B' if prefix in _BEGINS else 'I'}-{kind}" for prefix, kind in parts]
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST_WINDOW
    # RoBERTa's positions begin behind that of the padding.
    positions -= 1 + getattr(getattr(model.base_model, "embeddings", None), "padding_idx", -1)
    longest = min(LONGEST_WINDOW, positions, tokenizer.model_max_length)
    return Loaded(
        model.eval().to(device),
        plain_backend(tokenizer),
        special_around(tokenizer),
        tokenizer.pad_token_id or 0,
        longest - tokenizer.num_special_tokens_to_add(),
        Tagging.of(["O" if is_none else tag for tag, is_none in zip(bio, outside, strict=True)]),
    )
