"""Causal language modelling on whole documents that share rows and do not see one another.

    loss = -(1/M) sum_m log softmax(logits_(m-1))[id_m],    m over the M predicted tokens of the batch

Every token of a document is predicted from those before it in the same document, except the first. A document that is
longer than a row is cut into pieces, each of which counts as a document here. Only the last one ends with the
end-of-text token.

With ``--blocks`` all documents count as one, with the end-of-text token between them, and every row is a piece of it.

A row holds several documents (Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024: best-fit packing).
The positions start again at 0 in each document. From this transformers knows where attention must stop, as long as it
is given no mask and no cache. Models that build their own masks (OPT, Bloom), or have no attention (Mamba), do not take
part in it. `CausalLM.look` measures that, and gives such a model one document a row.

Shapes: B rows, L tokens a row, M predicted tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from asyncsgd.errors import UsageError
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Directions
from asyncsgd.tasks.language_model import LanguageModel
from asyncsgd.tasks.text_task import IGNORED, VOCABULARY

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    from numpy import ndarray
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw

SHAPES: dict[str, dict[str, int]] = {
    "tiny-gpt": {"n_embd": 128, "n_layer": 2, "n_head": 2},
    "small-gpt": {"n_embd": 256, "n_layer": 4, "n_head": 4},
}
"""GPT-2 shapes built here, with random weights: 1.5 and 5.4 million parameters at a vocabulary of 8192."""

_EVALUATION_TOKENS = 2048
"""Tokens of an evaluation batch. It has logits at every token, which need much memory: V numbers each."""


@dataclasses.dataclass(frozen=True)
class CausalLM(LanguageModel):
    """Causal language modelling with any `AutoModelForCausalLM`; documents in a row do not see one another.

    A batch has ``labels``, int64 `(B, L)`: at every position the id that comes next in its document, and -100 where
    none does. Where rows have several documents it also has ``position_ids``, which count from 0 in each document.
    """

    name: ClassVar[str] = "causal_lm"
    better: ClassVar[Directions] = {"perplexity": "lower", "accuracy": "higher"}
    preload: ClassVar[tuple[str, ...]] = ("transformers.models.gpt2.modeling_gpt2",)
    auto_class: ClassVar[str | None] = "AutoModelForCausalLM"
    shapes: ClassVar[tuple[str, ...]] = tuple(SHAPES)
    starts_as: ClassVar[str] = "AutoModelForCausalLM"
    start_from: ClassVar[tuple[str, ...]] = ("causal_lm",)
    packs: ClassVar[bool] = True
    """Whether a row may have several documents, where the model keeps them apart."""

    model_name: str = setting(
        "tiny-gpt",
        "tiny-gpt or small-gpt (new, no network), a run, a folder or a name on the Hub",
        name="model",
        run=True,
    )
    vocab_size: int = setting(VOCABULARY, "of the tokenizer trained for a model that is new", at_least=257)

    def make_tokenizer(self, model: str, corpus: Corpus, cache: Path) -> Any:
        from asyncsgd.data.tokenizer import pretrained_tokenizer, train_byte_bpe, trained_tokenizer

        if model in SHAPES:
            return trained_tokenizer(corpus, self.vocab_size, cache, train_byte_bpe)
        tokenizer = pretrained_tokenizer(model, self.shapes)
        if tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {model} has no end-of-text token (eos_token) to put between documents; choose a "
                f"causal language model or --model tiny-gpt"
            )
        return tokenizer

    def build(self, model: str, tokenizer: Any, seed: int) -> Built:
        from asyncsgd.tasks.models import Built, load_model, padded_size, seeded

        dropout = self.dropout
        if model not in SHAPES:
            built = load_model(model, len(tokenizer), self.starts_as, seq_len=self.seq_len, dropout=dropout, seed=seed)
            if _sees_later_tokens(built.model):
                raise UsageError(
                    f"{model} is no causal language model: what it says of a token depends on later ones; choose a "
                    f"model like GPT-2, or type --model tiny-gpt"
                )
            return built
        from transformers import GPT2Config, GPT2LMHeadModel

        end_id = tokenizer.eos_token_id
        config = GPT2Config(
            vocab_size=padded_size(len(tokenizer)),
            n_positions=max(512, self.seq_len),
            bos_token_id=end_id,
            eos_token_id=end_id,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **SHAPES[model],
        )
        with seeded(seed):
            new_model = GPT2LMHeadModel(config)
        return Built(new_model.float().train(), ())

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        end_id = tokenizer.eos_token_id
        packed = self.packs and (self.model_name in SHAPES or _keeps_documents_apart(initial.model))
        return {"end_id": end_id, "packed": packed, "pad_id": end_id}

    def rows_depend_on(self) -> Sequence[object]:
        return self.blocks, self.known["packed"], self.known["end_id"]

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        """Rows of documents; ``position_ids`` count from 0 in each document."""
        import numpy as np

        from asyncsgd.data.tokens import Samples, special_around

        pieces = self.rows(corpus, side, tokenizer, end_id=self.known["end_id"])
        _, suffix = special_around(tokenizer)
        documents = []
        positions = []
        for ids in pieces.rows("ids", range(len(pieces))):
            length = len(ids) - len(suffix)
            documents.append(ids[:length])
            positions.append(np.arange(length, dtype=np.int32))
        if not self.known["packed"]:
            return Samples.of(ids=documents, position_ids=positions)
        packed_ids = []
        packed_positions = []
        for row in pack([len(ids) for ids in documents], self.seq_len):
            packed_ids.append(np.concatenate([documents[number] for number in row]))
            packed_positions.append(np.concatenate([positions[number] for number in row]))
        return Samples.of(ids=packed_ids, position_ids=packed_positions)

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        notes = list(corpus.notes)
        if not self.known["packed"]:
            notes.append(
                f"{self.model_name} mixes the documents of a row, so each row has one document and the rest is padding"
            )
        if built.new_parameters:
            notes.append(f"{len(built.new_parameters)} tensors of the head of {self.model_name} are new")
        return {**super().more_facts(corpus, train, held_out, built), "notes": notes}

    def test_rows(self, held_out: Samples) -> list[ndarray]:
        from asyncsgd.tasks.text_batches import by_length

        batch_size = max(1, _EVALUATION_TOKENS // self.seq_len)
        return by_length(held_out, batch_size, self.eval_samples)

    def collate(self, samples: Samples, numbers: ndarray, draw: Draw) -> Batch:
        import torch

        from asyncsgd.data.tokens import pad

        input_ids = pad(samples.rows("ids", numbers), self.known["end_id"])
        positions = pad(samples.rows("position_ids", numbers), 0)
        labels = torch.full_like(input_ids, IGNORED)
        # The first token of a document follows nothing, and neither does padding.
        follows = positions[:, 1:] > 0
        labels[:, :-1] = input_ids[:, 1:].where(follows, IGNORED)
        batch = {"input_ids": input_ids, "labels": labels}
        if self.known["packed"]:
            # The padding is a document of its own.
            lengths = torch.from_numpy(samples.lengths[numbers])
            in_padding = torch.arange(input_ids.shape[1]) - lengths[:, None]
            batch["position_ids"] = positions.where(in_padding < 0, in_padding)
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, L, V)`: nearly all of them are at positions whose next token is predicted."""
        return _logits(model, batch["input_ids"], batch.get("position_ids"))

    def count_tokens(self, batch: Batch) -> int:
        """The tokens that are predicted."""
        return int(self.weight(batch))


def pack(lengths: Sequence[int] | ndarray, capacity: int) -> list[list[int]]:
    """Put documents into rows: the longest first, each into the fullest row that has room for it.

    >>> pack([2, 6, 3, 5], capacity=8)
    [[1, 0], [3, 2]]

    Args:
        lengths: of the documents, each at most `capacity`.

    Returns:
        The documents of each row.
    """
    rows: list[list[int]] = []
    with_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # rows, by the room that they have
    longest_first = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    for document in longest_first:
        length = int(lengths[document])
        room = length
        while room < capacity and not with_room[room]:
            room += 1
        if room == capacity:
            rows.append([])
            with_room[room].append(rows[-1])
        row = with_room[room].pop()
        row.append(document)
        with_room[room - length].append(row)
    return rows


def _logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    inputs = {"input_ids": input_ids}
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    # With a cache, transformers would not look for documents in the positions.
    return model(use_cache=False, **inputs).logits


def _sees_later_tokens(model: nn.Module) -> bool:
    """Whether it sees the tokens that it is to predict, as an encoder does that is loaded with another head. The model
    is in evaluation mode afterwards.
    """
    ids = _some_ids(model)
    changed = _some_ids(model)
    changed[:, 8:] = ids[:, :1]
    logits = _logits(model.eval(), ids)
    logits_of_changed = _logits(model, changed)
    return not _agree(logits[:, :8], logits_of_changed[:, :8])


def _keeps_documents_apart(model: nn.Module) -> bool:
    """Whether the second of two documents in a row has the logits that it has alone. The model is in evaluation mode
    afterwards.
    """
    import torch

    ids = _some_ids(model)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    second = ids[:, 8:]
    try:
        logits = _logits(model.eval(), ids, positions)
    except TypeError:  # the model takes no positions
        return False
    return _agree(logits[:, 8:], _logits(model, second))


def _some_ids(model: Any) -> Tensor:
    """Int64 `(1, 20)`, different tokens."""
    import torch

    return torch.arange(20)[None] * 7 % model.config.vocab_size


def _agree(logits: Tensor, others: Tensor) -> bool:
    """Whether logits are equal but for rounding."""
    difference = (logits - others).abs().max()
    return bool(difference <= 1e-4 * others.abs().max())
