"""Named entities: the spans that a token-classification model tags.

The model may be a run of ``train.py token_classification``, any other folder with a model and a fast tokenizer, or a
name on the Hub. A word is what stands between spaces, without the signs at its ends; each of these signs is a word
too. A word has the tag of its first piece, as in training. Neighbours with tags of one type are one span, unless the
later one begins a span (``B-``, ``S-``, ``U-``). A label without such a prefix is a type, and ``O`` is none.

A text longer than the model is read in windows of P pieces that overlap by P // 4. A piece has the tag that the window
says in which it is farther from the edge.

Batches hold windows of similar length. They are a function of the texts of one call, so that the same call has the same
bits in every process of one kind of device.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from asyncsgd.data.finders.base import Find, Finder, Span, hashed
from asyncsgd.data.tables import hub_is_reachable
from asyncsgd.data.tokenizer import is_model_folder, pretrained_tokenizer, refuse_own_code
from asyncsgd.data.tokens import first_pieces, plain_backend
from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

NER_FORMAT = 1
LONGEST_WINDOW = 512
BATCH_PIECES = 4096
_WORD = re.compile(r"\w(?:\S*\w)?|\S")
_BEGINS, _PREFIXES = ("B", "S", "U"), ("B", "I", "E", "L", "S", "U")


@dataclass(frozen=True)
class Ner(Finder):
    """The entities that a model tags; see the module."""

    name: ClassVar[str] = "ner"
    summary: ClassVar[str] = "what a model tags: a run of token_classification, another folder, or a name on the Hub"
    modules: ClassVar[tuple[str, ...]] = ("asyncsgd.data.finders.ner", "transformers.models.auto.modeling_auto")
    has_model: ClassVar[bool] = True

    model: str
    types: str = ""
    """Only these types, with plus signs between them; empty: all."""

    @property
    def asks_hub(self) -> bool:
        return not Path(self.model).expanduser().is_dir()

    def prepare(self, texts: Sequence[str], cache: Path) -> Tagger:
        folder = _folder(self.model)
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model"):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        tagger = Tagger(str(folder), tuple(sorted(filter(None, self.types.split("+")))), digest.hexdigest())
        loaded = _load(str(folder), "cpu")
        for kind in tagger.types:
            if kind not in loaded.types:
                raise UsageError(
                    f"--finder ner: {self.model} has no type {kind!r}{nearest(kind, loaded.types)}; it has "
                    f"{', '.join(sorted(set(loaded.types) - {''}))}"
                )
        return tagger


def _folder(model: str) -> Path:
    """The local folder of a model."""
    try:
        if is_model_folder(model, ()):
            folder = Path(model).expanduser()
            return (folder / "model" if (folder / "model" / "config.json").is_file() else folder).absolute()
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.txt", "*.safetensors", "*.model", "pytorch_model*.bin"]
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=not hub_is_reachable()))
    except Exception as error:  # the Hub's library has many
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"--finder ner: {model!r} is no folder, and cannot be had from the Hub ({reason}); name a run folder of "
            f"train.py token_classification, a folder written by save_pretrained, or a model of the Hub"
        ) from error


@dataclass(frozen=True)
class Tagger(Find):
    """A model in a folder, which each process loads for itself when it is first needed."""

    folder: str
    types: tuple[str, ...]
    sha256: str
    """Of the folder's files."""

    @property
    def key(self) -> str:
        return hashed(NER_FORMAT, self.sha256, self.types)

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        loaded = _load(self.folder, device)
        encodings = loaded.backend.encode_batch(list(texts), add_special_tokens=False)
        labels = loaded.labels([encoding.ids for encoding in encodings])
        wanted = {kind for kind in loaded.types if kind and (not self.types or kind in self.types)}
        return [
            list(_spans_of(text, encoding, numbers, loaded, wanted))
            for text, encoding, numbers in zip(texts, encodings, labels, strict=True)
        ]


def _spans_of(text: str, encoding: Encoding, labels: np.ndarray, loaded: _Loaded, wanted: set[str]) -> Iterator[Span]:
    words = [word.span() for word in _WORD.finditer(text)]
    bounds = np.array(words, dtype=np.int64).reshape(-1, 2)
    begin, before, end = 0, "", 0
    for (start, stop), piece in zip(words, first_pieces(bounds[:, 0], bounds[:, 1], encoding), strict=True):
        label = labels[piece] if piece >= 0 else loaded.outside
        kind = loaded.types[label] if loaded.types[label] in wanted else ""
        if before and (kind != before or loaded.begins[label]):
            yield begin, end
            before = ""
        if kind and not before:
            begin = start
        before, end = kind, stop
    if before:
        yield begin, end


def windows(length: int, size: int) -> list[tuple[int, int, int, int]]:
    """The windows of a text: (start, end, from, to) in pieces; a window decides on the pieces in [from, to).

    >>> windows(10, 8), windows(3, 8), windows(0, 8)
    ([(0, 8, 0, 7), (6, 10, 7, 10)], [(0, 3, 0, 3)], [])
    """
    overlap = size // 4
    starts = list(range(0, max(length - overlap, min(length, 1)), size - overlap))
    bounds = [0, *(start + overlap // 2 for start in starts[1:]), length]
    return [(start, min(start + size, length), bounds[n], bounds[n + 1]) for n, start in enumerate(starts)]


@dataclass(frozen=True)
class _Loaded:
    """A model in memory."""

    model: Any
    backend: Tokenizer
    prefix: list[int]
    suffix: list[int]
    pad_id: int
    size: int
    """Pieces of the longest window."""
    device: str
    types: list[str]
    """Of each label; empty for none."""
    begins: list[bool]
    outside: int

    def labels(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The label of each piece of each text."""
        import torch

        places = [(number, *window) for number, ids in enumerate(texts) for window in windows(len(ids), self.size)]
        places.sort(key=lambda place: place[2] - place[1])
        labels = [np.zeros(len(ids), dtype=np.int64) for ids in texts]
        while places:
            # From the longest on, so that memory runs out at once if it does.
            longest = places[-1][2] - places[-1][1] + len(self.prefix) + len(self.suffix)
            number = max(1, BATCH_PIECES // longest)
            batch, places = places[-number:], places[:-number]
            input_ids = torch.full((len(batch), longest), self.pad_id)
            attention_mask = torch.zeros_like(input_ids)
            for row, (text, start, end, _, _) in enumerate(batch):
                ids = [*self.prefix, *texts[text][start:end], *self.suffix]
                input_ids[row, : len(ids)] = torch.tensor(ids)
                attention_mask[row, : len(ids)] = 1
            with torch.inference_mode():
                logits = self.model(
                    input_ids=input_ids.to(self.device), attention_mask=attention_mask.to(self.device)
                ).logits
            best = logits.argmax(-1).cpu().numpy()[:, len(self.prefix) :]
            for row, (text, start, _, first, last) in enumerate(batch):
                labels[text][first:last] = best[row, first - start : last - start]
        return labels


@functools.lru_cache(maxsize=2)
def _load(folder: str, device: str) -> _Loaded:
    """Load a model and its tokenizer from a folder.

    Raises:
        UsageError: if there is no token-classification model with a label ``O`` and a fast tokenizer.
    """
    try:
        tokenizer = pretrained_tokenizer(folder)
    except UsageError as error:
        raise UsageError(f"--finder ner: {str(error).partition(';')[0]}") from error
    import torch
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what does not fit is said here, in one line
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        refuse_own_code(folder, error)
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"--finder ner: {folder} holds no token-classification model ({reason})") from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"--finder ner: {folder} is no token-classification model: it has no {missing[0]}; train one with "
            f"experiments/train.py token_classification"
        )
    names = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    outside = next((number for number, name in enumerate(names) if name.upper() in ("O", "OUTSIDE")), None)
    if outside is None:
        raise UsageError(f"--finder ner: {folder} has no label O, so every word would be found: {', '.join(names)}")
    prefixes = [name.partition("-")[0] if name[1:2] == "-" and name[0] in _PREFIXES else "" for name in names]
    types = [name[2:] if prefix else name for name, prefix in zip(names, prefixes, strict=True)]
    types[outside] = ""
    return _Loaded(
        model.eval().to(device),
        plain_backend(tokenizer),
        *_frame(tokenizer),
        tokenizer.pad_token_id or 0,
        _window_size(model, tokenizer),
        device,
        types,
        [prefix in _BEGINS for prefix in prefixes],
        outside,
    )


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    at = next(n for n in range(len(around)) if around[n : n + len(inside)] == inside)
    return around[:at], around[at + len(inside) :]


def _window_size(model: Any, tokenizer: Any) -> int:
    import torch

    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST_WINDOW
    for module in model.modules():
        # RoBERTa's positions begin behind that of the padding.
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == positions and module.padding_idx:
            positions -= module.padding_idx + 1
            break
    return min(LONGEST_WINDOW, positions, tokenizer.model_max_length) - tokenizer.num_special_tokens_to_add()
