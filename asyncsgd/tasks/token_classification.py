"""Token classification: a tag on every word of a sentence, as in named-entity recognition.

    loss = -(1/K) sum_k log softmax(logits_k)[tag_k],    k over the K labelled words of the batch

The logits of a word are those at its first piece; its other pieces have no label. A sentence longer than `seq_len` is
cut. The words cut off have no loss, and count as predicted ``O`` in the evaluation. So do words for which the tokenizer
gives no piece. The scores are of whole sentences.

Shapes: B sentences, L tokens, W words of the longest sentence, C tags, T types of spans.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting` and `found`, which return dataclasses.field

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from asyncsgd.data import spans
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import SAMPLING, Sampling
from asyncsgd.tasks.base import Sums, found
from asyncsgd.tasks.encoder import START, VOCABULARY, EncoderTask

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.data.tagged import TaggedBatch, TaggedData, TaggedSentences, TaggedTokens
    from asyncsgd.models import Built

Split = Literal["test", "validation"]


@dataclasses.dataclass(frozen=True)
class TokenClassification(EncoderTask):
    """Tagging the words of sentences; see the module."""

    name: ClassVar[str] = "token_classification"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "span_f1": "higher",
        "span_precision": "higher",
        "span_recall": "higher",
        "accuracy": "higher",
    }
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.data.tagged", "asyncsgd.models")
    auto_class: ClassVar[str | None] = "AutoModelForTokenClassification"

    model_name: str = setting("tiny", START, name="model", aliases=("init_from",), run=True)
    data_name: str | None = setting(
        None,
        "a folder with train.*, a file (.parquet, .jsonl), or hub:NAME",
        unset="none: it has to be named",
        example="../shared/data/matsci_ner_sofc",
        name="data",
        aliases=("train_file",),
    )
    eval_split: Split | None = setting(None, "what to score on", unset="test where there is one", name="split")
    tokens_column: str = setting("tokens", "column that holds the words")
    tags_column: str = setting("ner_tags", "column that holds the tags, in the BIO scheme")
    train_samples: int = setting(0, "training sentences to use; 0: all", at_least=0)
    eval_samples: int = setting(0, "sentences to score on; 0: all", at_least=0)
    seq_len: int = setting(128, "tokens per sentence; what is longer is cut", at_least=8)
    batch_size: int = setting(16, "sentences in one gradient", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    dropout: float = setting(0.1, "of all dropout layers", at_least=0, below=1)
    vocab_size: int = setting(VOCABULARY, "entries of the tokenizer that tiny and small get", at_least=64)

    model_source: str | None = found()
    """What `asyncsgd.models.build_model` takes, without a network."""
    folder: str | None = found()
    """Of the tokenized sentences and the tokenizer."""
    labels: tuple[str, ...] = found()
    prefix: tuple[int, ...] = found()
    suffix: tuple[int, ...] = found()
    pad_id: int | None = found()
    corpus: str | None = found()
    data_fingerprint: str | None = found()
    chosen_split: str | None = found()
    num_train_samples: int | None = found()
    num_eval_samples: int | None = found()
    from_scratch: bool | None = found()
    parent: str | None = found()
    """As JSON."""
    init_sha256: str | None = found()
    majority_tag: str | None = found()
    majority_f1: float | None = found()
    majority_accuracy: float | None = found()
    notes: tuple[str, ...] = found()

    def check_names(self) -> None:
        from asyncsgd.data.tagged import check_tagged

        if self.data_name is None:
            raise UsageError("--data is missing: name a folder with train.*, a file, or hub:NAME")
        check_tagged(self.data_name, self.tokens_column, self.tags_column)
        self.check_encoder()

    def read(self, seed: int, cache: Path) -> Self:
        from asyncsgd import models
        from asyncsgd.data.corpora import Corpus
        from asyncsgd.data.tagged import TaggedTokens, load_tagged, tagged_folder
        from asyncsgd.data.tokenization import load_tokenizer
        from asyncsgd.origin import read_origin

        data = load_tagged(
            str(self.data_name),
            tokens_column=self.tokens_column,
            tags_column=self.tags_column,
            split=self.eval_split,
            train_samples=self.train_samples,
            eval_samples=self.eval_samples,
        )
        corpus = Corpus(data.name, data.train, data.eval, data.fingerprint)
        model = read_origin(self.model_name).model
        tokenizer = load_tokenizer(model, corpus, vocab_size=self.vocab_size, cache_dir=cache)
        folder = tagged_folder(data, tokenizer, seq_len=self.seq_len, cache_dir=cache)
        train, evaluation = (TaggedTokens.load(folder / side) for side in ("train", "eval"))
        frame = models.frame_of(tokenizer)
        tagger = dataclasses.replace(self, labels=data.labels)
        return dataclasses.replace(
            tagger,
            folder=str(folder.absolute()),
            prefix=frame.prefix,
            suffix=frame.suffix,
            pad_id=frame.pad_id,
            corpus=data.name,
            data_fingerprint=data.fingerprint,
            chosen_split=data.split,
            num_train_samples=train.tokens.num_samples,
            num_eval_samples=evaluation.tokens.num_samples,
            notes=(*data.notes, *_losses_noted(data, train, evaluation, self.seq_len)),
            **tagger.found_of_encoder(tokenizer, seed),
            **_majority(data.labels, train, evaluation),
        )

    def facts(self) -> Mapping[str, Any]:
        if self.folder is None:
            return {}
        return {
            **self.facts_of_encoder(),
            "split": self.chosen_split,
            "labels": list(self.labels),
            "num_train_samples": self.num_train_samples,
            "num_eval_samples": self.num_eval_samples,
        }

    def head(self, masked_lm: nn.Module, seed: int) -> Built:
        from asyncsgd import models

        return models.build_tagger(masked_lm, self.labels, dropout=self.dropout, seed=seed)

    def data(self, seed: int) -> TaggedSentences:
        from asyncsgd.data.batching import Frame, is_by_length
        from asyncsgd.data.tagged import TaggedSentences, TaggedTokens

        folder = Path(self.known("folder"))
        train, evaluation = (TaggedTokens.load(folder / side) for side in ("train", "eval"))
        frame = Frame(self.prefix, self.suffix, self.known("pad_id"))
        return TaggedSentences(train, evaluation, frame, self.batch_size, seed, is_by_length(self.sampling))

    def outputs(self, model: nn.Module, batch: TaggedBatch) -> Tensor:
        """The logits `(B, W, C)` at each word's first piece; those of a word without one mean nothing."""
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        places = batch.pieces.clamp(min=0).unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        return logits.gather(1, places)

    def loss(self, outputs: Tensor, batch: TaggedBatch) -> Tensor:
        from torch.nn import functional

        learned = _learned(batch).flatten()
        loss = functional.cross_entropy(outputs.flatten(0, 1), learned, ignore_index=IGNORED, reduction="sum")
        # A part of a batch may have no labelled word.
        return loss / (learned != IGNORED).sum().clamp(min=1)

    def weight(self, batch: TaggedBatch) -> float:
        """Labelled words."""
        return float((batch.pieces >= 0).sum())

    def count_tokens(self, batch: TaggedBatch) -> int:
        return int(batch.attention_mask.sum())

    def sums(self, outputs: Tensor, batch: TaggedBatch) -> Sums:
        """The loss, summed in float64 over float32 losses of words; words, and spans by type.

        ``words`` is int64 `(2,)`: words, and those with the right tag. ``spans`` is int64 `(T, 3)`, see
        `asyncsgd.data.spans.Tagging.counts`.
        """
        import torch
        from torch.nn import functional

        logits = outputs.float().flatten(0, 1)
        losses = functional.cross_entropy(logits, _learned(batch).flatten(), reduction="none", ignore_index=IGNORED)
        predicted = outputs.argmax(-1).where(batch.pieces >= 0, _outside(self.labels))
        true, predicted_tags = batch.tags.cpu().numpy(), predicted.where(batch.tags >= 0, spans.OUTSIDE).cpu().numpy()
        return {"loss": losses.sum(dtype=torch.float64)} | _counts(self.labels, true, predicted_tags)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Micro-averaged over all spans; 0 where there is nothing to divide by, as conlleval has it."""
        total = sums["spans"].sum(axis=0)
        num_words, right = (int(count) for count in sums["words"])
        return {
            "span_f1": spans.f1(total) or 0.0,
            "span_precision": spans.precision(total) or 0.0,
            "span_recall": spans.recall(total) or 0.0,
            "accuracy": right / num_words,
        }

    def details(self, sums: Sums) -> dict[str, Any]:
        """Precision, recall, F1 and number of true spans of each type, None where there is nothing to divide by; and
        the scores of tagging every word with the training split's commonest tag.
        """
        per_type = {
            kind: {
                "precision": spans.precision(counts),
                "recall": spans.recall(counts),
                "f1": spans.f1(counts),
                "support": int(counts[0]),
            }
            for kind, counts in zip(spans.Tagging.of(self.labels).types, sums["spans"], strict=True)
        }
        majority = {"tag": self.majority_tag, "span_f1": self.majority_f1, "accuracy": self.majority_accuracy}
        return {"per_type": per_type, "majority": majority}


IGNORED = -100
"""The label without a loss, as torch has it."""


def _learned(batch: TaggedBatch) -> Tensor:
    """The tags that have a loss term, `(B, W)`; `IGNORED` where there is none."""
    return batch.tags.where(batch.pieces >= 0, IGNORED)


def _outside(labels: tuple[str, ...]) -> int:
    return labels.index("O") if "O" in labels else spans.OUTSIDE


def _counts(labels: tuple[str, ...], true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    words = true != spans.OUTSIDE
    right = (true == predicted) & words
    return {
        "words": np.array([words.sum(), right.sum()], dtype=np.int64),
        "spans": spans.Tagging.of(labels).counts(true, predicted),
    }


def _majority(labels: tuple[str, ...], train: TaggedTokens, evaluation: TaggedTokens) -> dict[str, Any]:
    """The commonest tag of the training words, and the scores of saying nothing else."""
    commonest = int(np.bincount(train.tags, minlength=len(labels)).argmax())
    # All sentences in one row, with a word outside between them.
    true = np.insert(evaluation.tags.astype(np.int64), evaluation.starts[1:-1], spans.OUTSIDE)[None]
    total = _counts(labels, true, np.where(true >= 0, commonest, spans.OUTSIDE))
    return {
        "majority_tag": labels[commonest],
        "majority_f1": spans.f1(total["spans"].sum(axis=0)) or 0.0,
        "majority_accuracy": int(total["words"][1]) / int(total["words"][0]),
    }


def _losses_noted(data: TaggedData, train: TaggedTokens, evaluation: TaggedTokens, seq_len: int) -> list[str]:
    """What is said of words without a piece, and of sentences without one."""
    notes = []
    where = f"have no word piece within the {seq_len} tokens of a sentence"
    if train.num_lost:
        notes.append(f"{train.num_lost} of {len(train.tags)} training words {where} and are not learned")
    if evaluation.num_lost:
        of = f"{evaluation.num_lost} of {len(evaluation.tags)} {data.split} words"
        notes.append(f"{of} {where} and count as predicted O")
    if left_out := len(data.train.texts) - train.tokens.num_samples:
        notes.append(f"{left_out} training sentences of which the tokenizer makes nothing are left out")
    return notes
