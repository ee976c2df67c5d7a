"""Causal language modelling on whole documents that share rows and do not see one another.

    loss = -(1/M) sum_m log softmax(logits_(m-1))[id_m],    m over the M predicted tokens of the batch

Every token of a document is predicted from those before it in the same document, except the first. A document that is
longer than a row is cut into pieces, each of which counts as a document here. Only the last one ends with the
end-of-text token.

With ``--blocks`` all documents count as one, with the end-of-text token between them, and every row is a piece of it.

A row holds several documents (Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024: best-fit packing).
The positions start again at 0 in each document. From this transformers knows where attention must stop, as long as it
is given no mask and no cache. Models that build their own masks (OPT, Bloom), or have no attention (Mamba), do not take
part in it. `CausalLM.prepare` measures that, and gives such a model one document a row.

Shapes: B rows, L tokens a row, M predicted tokens, V vocabulary.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from asyncsgd.data.corpora import check_sources, load_corpus
from asyncsgd.data.tokenization import (
    Tokens,
    pretrained_tokenizer,
    tokenized_folder,
    train_byte_bpe,
    trained_tokenizer,
)
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import BLOCKS, OF_TRANSFORMERS, SAMPLING, Defaults, Sampling
from asyncsgd.tasks.base import Batches, Sums, Task, found

if TYPE_CHECKING:
    from torch import Tensor, nn

    from asyncsgd.models import Built, Family

SHAPES: dict[str, dict[str, int]] = {
    "tiny-gpt": {"n_embd": 128, "n_layer": 2, "n_head": 2},
    "small-gpt": {"n_embd": 256, "n_layer": 4, "n_head": 4},
}
"""GPT-2 shapes built here, with random weights: 1.5 and 5.4 million parameters at a vocabulary of 8192."""

IGNORED = -100
_EVALUATION_TOKENS = 2048
"""Of an evaluation batch: logits everywhere are V times as large as what they are computed from."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of documents. Owned by the caller."""

    input_ids: Tensor
    """int64 `(B, L)`; behind its last document a row is filled with the end-of-text token"""
    labels: Tensor
    """int64 `(B, L)`, at every position the id that comes next in its document; -100 where none does"""
    position_ids: Tensor | None
    """int64 `(B, L)`, from 0 in every document; None where a row has one document"""


@dataclasses.dataclass(frozen=True)
class CausalLM(Task):
    """Causal language modelling with any `AutoModelForCausalLM`; documents in a row do not see one another."""

    name: ClassVar[str] = "causal_lm"
    defaults: ClassVar[Defaults] = OF_TRANSFORMERS
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"perplexity": "lower", "accuracy": "higher"}
    preload: ClassVar[tuple[str, ...]] = ("transformers.models.gpt2.modeling_gpt2",)
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"

    model_name: str = setting(
        "tiny-gpt",
        "tiny-gpt or small-gpt (new, no network), a run, a folder or a name on the Hub",
        name="model",
        run=True,
    )
    data_name: str = setting(
        "pydocs",
        "pydocs (built in, no network), a file, a folder or hub:NAME; A+B joins two",
        name="data",
        aliases=("train_file",),
    )
    eval_data: str | None = setting(None, "text to evaluate on", unset="held out from the data", aliases=("val_file",))
    text_column: str = setting("text", "column of the data that holds the text")
    seq_len: int = setting(128, "tokens per row", at_least=8)
    blocks: bool = setting(False, BLOCKS)
    batch_size: int = setting(16, "rows in one gradient, per worker", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    vocab_size: int = setting(8192, "of the tokenizer trained for the models tiny-gpt and small-gpt", at_least=257)
    dropout: float = setting(0.0, "of all dropout layers", at_least=0, below=1)
    eval_samples: int = setting(500, "rows in one evaluation; 0: all", at_least=0)

    model_folder: str | None = found()
    """Of a pretrained model; None for one that is built here."""
    tokenizer_folder: str = found()
    tokens_folder: str = found()
    num_tokens: int = found()
    """Of the tokenizer."""
    prefix: tuple[int, ...] = found()
    """What the tokenizer puts in front of a text."""
    end_id: int = found()
    packed: bool = found()
    """Whether a row may have several documents."""
    corpus_name: str = found()
    corpus_fingerprint: str = found()
    num_train_rows: int = found()
    num_eval_rows: int = found()
    num_new_parameters: int = found()
    """How many tensors a pretrained model's checkpoint lacks."""

    def check_names(self) -> None:
        if self.model_name not in SHAPES and self.vocab_size != type(self).vocab_size:
            raise UsageError(
                f"--vocab-size is for --model {' and '.join(SHAPES)}; {self.model_name!r} has its own tokenizer; "
                f"drop it"
            )
        if self.data_name == "pydocs" and self.eval_data is None and self.text_column != type(self).text_column:
            raise UsageError("--text-column does nothing for pydocs, which has no columns; drop it, or name other data")
        check_sources(self.data_name, self.eval_data)
        from asyncsgd.models import check_model

        check_model(self._source(), self.seq_len, _family())

    def prepare(self, seed: int, cache: Path) -> Self:
        self.check_names()
        name = self._source()
        corpus = load_corpus(self.data_name, eval_data=self.eval_data, text_column=self.text_column, cache_dir=cache)
        if name in SHAPES:
            tokenizer = trained_tokenizer(corpus, self.vocab_size, cache, train_byte_bpe)
        else:
            tokenizer = pretrained_tokenizer(name, tuple(SHAPES))
        if tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {name} has no end-of-text token (eos_token) to put between documents; choose a "
                f"causal language model or --model tiny-gpt"
            )
        named = dataclasses.replace(
            self,
            num_tokens=len(tokenizer),
            prefix=_prefix(tokenizer),
            end_id=tokenizer.eos_token_id,
            packed=True,
            tokenizer_folder=tokenizer.name_or_path,
            corpus_name=corpus.name,
            corpus_fingerprint=corpus.fingerprint_of(self.blocks),
            num_new_parameters=0,
        )
        if name not in SHAPES:
            named = named._with_pretrained(name, seed)
        tokens = tokenized_folder(
            corpus,
            tokenizer,
            seq_len=self.seq_len,
            cache_dir=cache,
            end_id=tokenizer.eos_token_id,
            blocks=self.blocks,
        )
        named = dataclasses.replace(named, tokens_folder=str(tokens))
        return dataclasses.replace(
            named, num_train_rows=len(Rows(named, "train")), num_eval_rows=len(EvaluationRows(named).rows)
        )

    def _source(self) -> str:
        """A shape, a folder or a name on the Hub."""
        from asyncsgd.origin import read_origin

        return read_origin(self.model_name, self.name, tuple(SHAPES)).model

    def _with_pretrained(self, name: str, seed: int) -> Self:
        """With what is found out by loading the model.

        Raises:
            UsageError: if it is no causal language model, or does not fit.
        """
        built = self._load(name, seed)
        folder = _local_folder(name)
        try:
            _check_causal(name, built.model)
        except TypeError as error:
            raise UsageError(
                f"{name}: cannot be trained as a causal language model: {error}; type --model tiny-gpt"
            ) from error
        return dataclasses.replace(
            self,
            model_folder=folder,
            tokenizer_folder=folder,
            packed=_keeps_documents_apart(built.model),
            num_new_parameters=len(built.new_parameters),
        )

    def _load(self, model: str, seed: int) -> Built:
        from asyncsgd.models import load_model

        return load_model(model, self.num_tokens, _family(), seq_len=self.seq_len, dropout=self.dropout, seed=seed)

    def facts(self) -> Mapping[str, Any]:
        notes = []
        if not self.packed:
            notes.append(
                f"{self.model_name} mixes the documents of a row, so each row has one document and the rest is padding"
            )
        if self.num_new_parameters:
            notes.append(f"{self.num_new_parameters} tensors of the head of {self.model_name} are new")
        return {
            "data": self.corpus_name,
            "data_fingerprint": self.corpus_fingerprint,
            "base_model": None if self.model_folder is None else self.model_name,
            "num_train_samples": self.num_train_rows,
            "num_eval_samples": self.num_eval_rows,
            "from_scratch": self.model_folder is None,
            "notes": notes,
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write model and tokenizer, which `AutoModelForCausalLM` and `AutoTokenizer` read."""
        from asyncsgd.models import save_pretrained

        save_pretrained(model, self.tokenizer_folder, folder)

    def model(self, seed: int) -> nn.Module:
        if self.model_folder is not None:
            return self._load(self.model_folder, seed).model
        from transformers import GPT2Config, GPT2LMHeadModel

        from asyncsgd.models import padded_size, seeded

        config = GPT2Config(
            vocab_size=padded_size(self.num_tokens),
            n_positions=max(512, self.seq_len),
            bos_token_id=self.end_id,
            eos_token_id=self.end_id,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            **SHAPES[self.model_name],
        )
        with seeded(seed):
            return GPT2LMHeadModel(config).float().train()

    def data(self, seed: int) -> DocumentRows:
        return DocumentRows(self, seed)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, L, V)`: nearly all of them are at positions whose next token is predicted."""
        return _logits(model, batch.input_ids, batch.position_ids)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)

    def weight(self, batch: Batch) -> float:
        """Predicted tokens."""
        return float((batch.labels != IGNORED).sum())

    def count_tokens(self, batch: Batch) -> int:
        """Those that are predicted."""
        return int(self.weight(batch))

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss too, summed in float64 over float32 losses of tokens."""
        import torch
        from torch.nn import functional

        logits, labels = outputs.float().flatten(0, 1), batch.labels.flatten()
        losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return {"loss": losses.sum(dtype=torch.float64), "correct": (logits.argmax(-1) == labels).sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Perplexity is exp(loss), infinite where that is too large for a float."""
        try:
            perplexity = math.exp(sums["loss"] / sums["weight"])
        except OverflowError:
            perplexity = math.inf
        return {"perplexity": perplexity, "accuracy": sums["correct"] / sums["weight"]}


class DocumentRows:
    """The batches of a `CausalLM` in one process."""

    def __init__(self, task: CausalLM, seed: int) -> None:
        from asyncsgd.data.batching import Orders, is_by_length

        self._rows = Rows(task, "train")
        self._orders = Orders(self._rows.lengths, task.batch_size, seed, is_by_length(task.sampling))
        self.evaluation: Mapping[str, Batches] = {"main": EvaluationRows(task)}

    def batch(self, stream: int, index: int) -> Batch:
        return self._rows.batch(self._orders.samples(stream, index))


class EvaluationRows:
    """Rows evenly over the evaluation documents, the same for every seed."""

    def __init__(self, task: CausalLM) -> None:
        self._rows = Rows(task, "eval")
        total = len(self._rows)
        count = min(task.eval_samples or total, total)
        rows = np.arange(count) * total // count
        self.rows = rows[np.argsort(self._rows.lengths[rows], kind="stable")]
        """int64, by length, so that those of a batch need little padding."""
        self._batch_size = max(1, _EVALUATION_TOKENS // task.seq_len)

    def __len__(self) -> int:
        return -(-len(self.rows) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        """Make batch `index` in [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no evaluation batch {index} of {len(self)}")
        return self._rows.batch(self.rows[index * self._batch_size : (index + 1) * self._batch_size])


class Rows:
    """The documents of one side of the corpus, in rows of at most `seq_len` tokens.

    Args:
        task: with its tokens on disk.
        side: ``train`` or ``eval``.
    """

    def __init__(self, task: CausalLM, side: str) -> None:
        self._tokens = Tokens.load(Path(task.tokens_folder) / side)
        self._prefix = np.array(task.prefix, dtype=np.int64)
        self._end_id, self._packed = task.end_id, task.packed
        lengths = self._tokens.lengths + len(task.prefix)
        self._documents = pack(lengths, task.seq_len) if task.packed else [[row] for row in range(len(lengths))]
        self.lengths = np.array([lengths[row].sum() for row in self._documents])
        """int64 `(R,)`, the tokens of each row."""

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, rows: np.ndarray) -> Batch:
        """The batch of some rows, as long as the longest of them."""
        import torch

        shape = (len(rows), int(self.lengths[rows].max()))
        input_ids = np.full(shape, self._end_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        starts = self._tokens.starts
        for place, row in enumerate(rows):
            begin = 0
            for document in self._documents[row]:
                ids = np.concatenate([self._prefix, self._tokens.ids[starts[document] : starts[document + 1]]])
                end = begin + len(ids)
                input_ids[place, begin:end] = ids
                labels[place, begin : end - 1] = ids[1:]
                position_ids[place, begin:end] = np.arange(len(ids))
                begin = end
            position_ids[place, begin:] = np.arange(shape[1] - begin)
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(position_ids) if self._packed else None,
        )


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put documents into rows: the longest first, each into the fullest row that has room for it.

    >>> pack([2, 6, 3, 5], capacity=8)
    [[1, 0], [3, 2]]

    Args:
        lengths: of the documents, each at most `capacity`.

    Returns:
        The documents of each row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows, by the room that they have
    rooms: list[int] = []  # the room that there is anywhere, ascending
    lengths = np.asarray(lengths)
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        position = bisect.bisect_left(rooms, length)
        if position == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[position]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[position]
        rows[row].append(document)
        room -= length
        if room:
            if not with_room[room]:
                bisect.insort(rooms, room)
            with_room[room].append(row)
    return rows


def _logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    # With a cache, transformers would not look for documents in the positions.
    positions = {} if position_ids is None else {"position_ids": position_ids}
    return model(input_ids=input_ids, use_cache=False, **positions).logits


def _family() -> Family:
    from asyncsgd.models import Family  # imports torch, and --help is not to wait for it

    return Family("AutoModelForCausalLM", "a causal language model", tuple(SHAPES))


def _check_causal(name: str, model: nn.Module) -> None:
    """Refuse a model that sees the tokens it is to predict, as an encoder does that is loaded with another head."""
    import torch

    ids = _some_ids(model)
    changed = ids.clone()
    changed[:, 8:] = ids[:, :1]
    model.eval()
    with torch.no_grad():
        if not _agree(_logits(model, ids)[:, :8], _logits(model, changed)[:, :8]):
            raise UsageError(
                f"{name} is no causal language model: what it says of a token depends on later ones; choose a model "
                f"like GPT-2, or type --model tiny-gpt"
            )


def _keeps_documents_apart(model: nn.Module) -> bool:
    """Whether the second of two documents in a row has the logits that it has alone."""
    import torch

    ids = _some_ids(model)
    model.eval()
    with torch.no_grad():
        alone = _logits(model, ids[:, 8:])
        try:
            packed = _logits(model, ids, torch.cat([torch.arange(8), torch.arange(12)])[None])
        except TypeError:  # no positions at all
            return False
    return _agree(packed[:, 8:], alone)


def _some_ids(model: Any) -> Tensor:
    """Int64 `(1, 20)`, different tokens."""
    import torch

    return torch.arange(20)[None] * 7 % model.config.vocab_size


def _agree(some: Tensor, others: Tensor) -> bool:
    return bool((some - others).abs().max() <= 1e-4 * others.abs().max())


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    encoded = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return tuple(token for token, _ in itertools.takewhile(lambda pair: pair[1], pairs))


def _local_folder(name: str) -> str:
    """The folder of a model that has been loaded: workers, whose network may be another, load it from there."""
    if os.path.isdir(name):
        return os.path.abspath(name)
    from transformers.utils import cached_file

    return os.path.dirname(cached_file(name, "config.json", local_files_only=True))
