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
    """The SHA-256 of values that JSON can write, 64 hexadecimal digits."""
    content = json.dumps(parts)
    return hashlib.sha256(content.encode()).hexdigest()


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    line, _, _ = str(error).strip().partition("\n")
    return line


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
    """The hash of the folder's files."""

    @property
    def key(self) -> str:
        return hashed(NER_FORMAT, self.sha256, self.types)

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        loaded = load(self.folder, device)
        tagging = loaded.tagging
        all_spans = []
        encodings = loaded.backend.encode_batch(list(texts), add_special_tokens=False)
        all_labels = loaded.labels([encoding.ids for encoding in encodings])
        for text, encoding, labels in zip(texts, encodings, all_labels, strict=True):
            words = [word.span() for word in _TAGGED_WORD.finditer(text)]
            # A word without a piece is outside: its first piece is -1, the place of the appended label.
            with_outside = np.append(labels, OUTSIDE)
            word_labels = with_outside[None, first_pieces(words, encoding)]
            spans = []
            for first, last, kind in tagging.spans(word_labels):
                if not self.types or tagging.types[kind] in self.types:
                    start, _ = words[first]
                    _, end = words[last]
                    spans.append((start, end))
            all_spans.append(spans)
        return all_spans


def windows(length: int, size: int) -> list[tuple[int, int, int, int]]:
    """The windows of a text: (start, end, from, to) in pieces; a window decides on the pieces in [from, to).
    A text of up to `size` pieces has one window, an empty text none.

    >>> windows(10, 8), windows(3, 8), windows(0, 8)
    ([(0, 8, 0, 7), (6, 10, 7, 10)], [(0, 3, 0, 3)], [])
    """
    overlap = size // 4
    last_start = max(length - overlap, min(length, 1))
    starts = range(0, last_start, size - overlap)
    middles = [start + overlap // 2 for start in starts[1:]]
    pieces = []
    for start, first, stop in zip(starts, [0, *middles], [*middles, length], strict=False):
        pieces.append((start, min(start + size, length), first, stop))
    return pieces


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: Any
    backend: Tokenizer
    around: list[list[int]]
    """The special tokens before and after a text."""
    pad_id: int
    size: int
    """Pieces of the longest window."""
    tagging: Tagging
    """What its labels mean; one without a prefix continues a span of its name."""

    def labels(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The label of each piece of some texts, int64, an array a text."""
        import torch

        prefix, suffix = self.around
        rows = []
        for number, ids in enumerate(texts):
            for start, end, first, stop in windows(len(ids), self.size):
                row_ids = np.array([*prefix, *ids[start:end], *suffix])
                rows.append(_Row(row_ids, number, start, first, stop))
        rows.sort(key=lambda row: len(row.ids))
        labels = [np.zeros(len(ids), dtype=np.int64) for ids in texts]
        device = self.model.device
        while rows:
            # From the longest on, so that memory runs out at once if it does.
            batch_size = max(1, BATCH_PIECES // len(rows[-1].ids))
            batch = rows[-batch_size:]
            rows = rows[:-batch_size]
            input_ids = pad([row.ids for row in batch], self.pad_id)
            mask = pad([np.ones(len(row.ids)) for row in batch], 0)
            with torch.inference_mode():
                logits = self.model(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits
            best = logits.argmax(-1).cpu().numpy()
            for row, row_labels in zip(batch, best[:, len(prefix) :], strict=True):
                decided = slice(row.first - row.start, row.stop - row.start)
                labels[row.text][row.first : row.stop] = row_labels[decided]
        return labels


class _Row(NamedTuple):
    """A window of a text, with the special tokens around it."""

    ids: np.ndarray
    text: int
    """The number of the text."""
    start: int
    """The piece of the text at which the window begins."""
    first: int
    stop: int
    """The window decides on the pieces from `first` to ``stop - 1``."""


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
        missing = report["missing_keys"]
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except Exception as error:
        refuse_own_code(folder, error)
        raise UsageError(f"--finder ner: {folder} is no token-classification model ({first_line(error)})") from error
    names = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    tags = [_bio_tag(name) for name in names]
    if "O" not in tags:
        raise UsageError(f"--finder ner: {folder} has no label O, so every word would be found: {', '.join(names)}")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet, whose positions are relative, says -1
        positions = LONGEST_WINDOW
    embeddings = getattr(model.base_model, "embeddings", None)
    # RoBERTa's positions begin after that of the padding.
    positions -= 1 + getattr(embeddings, "padding_idx", -1)
    longest = min(LONGEST_WINDOW, positions, tokenizer.model_max_length)
    return Loaded(
        model.eval().to(device),
        plain_backend(tokenizer),
        special_around(tokenizer),
        tokenizer.pad_token_id or 0,
        longest - tokenizer.num_special_tokens_to_add(),
        Tagging.of(tags),
    )


def _bio_tag(label: str) -> str:
    """The tag in the BIO scheme that a model's label stands for."""
    if label.upper() in ("O", "OUTSIDE"):
        return "O"
    prefix, dash, kind = label.partition("-")
    if not dash or prefix not in _PREFIXES:
        return f"I-{label}"
    return f"B-{kind}" if prefix in _BEGINS else f"I-{kind}"
