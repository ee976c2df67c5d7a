"""Token classification: a tag on every word of a sentence, as in named-entity recognition.

    loss = -(1/K) sum_k log softmax(logits_k)[tag_k],    k over the K labelled words of the batch

The logits of a word are those at its first piece; its other pieces have no label. A sentence longer than `seq_len` is
cut. The words cut off have no loss, and count as predicted ``O`` in the evaluation. So do words for which the tokenizer
gives no piece. The scores are of whole sentences.

Shapes: B sentences, L tokens, W words of the longest sentence, C tags, T types of spans.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from asyncsgd.data.corpora import Corpus, Kind
from asyncsgd.data.documents import without_surrogates
from asyncsgd.data.labels import Names, label_name
from asyncsgd.data.tokens import Samples, encodings_of, first_pieces, pad
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.tasks import spans
from asyncsgd.tasks.base import Sums
from asyncsgd.tasks.labelled_task import LabelledTask
from asyncsgd.tasks.predictions import Said
from asyncsgd.tasks.text_batches import Batch, Draw
from asyncsgd.tasks.text_task import IGNORED, VOCABULARY

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.tasks.models import Built


def read_tagged(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    """A sentence as a text, its words with single spaces between them, and its tags as a JSON list.

    A space inside a word becomes a no-break space.
    """
    tokens, tags = row
    for (column, flag), value in zip(columns.items(), (tokens, tags or []), strict=True):
        if not isinstance(value, list) or (flag == "--tokens-column" and not all(isinstance(v, str) for v in value)):
            raise UsageError(f"{where} column {column!r} holds no list of words or of tags; choose another with {flag}")
    if tags is not None and len(tokens) != len(tags):
        raise UsageError(f"{where} {len(tokens)} words and {len(tags)} tags; every word needs one tag: mend the row")
    sentence = " ".join(without_surrogates(token).replace(" ", "\u00a0") for token in tokens)
    if not sentence.strip():
        return "", ""
    named = [label_name(where, columns, tag, names) for tag in tags or ()]
    if not any(named):
        return sentence, ""
    for tag in named:
        try:
            spans.split_tag(tag)
        except ValueError as error:
            hint = "; numbers need names, in labels.json beside the files" if tag.isdecimal() else ""
            raise UsageError(f"{where} {error}{hint}") from error
    return sentence, json.dumps(named)


TAGGED = Kind(read_tagged, json.loads, "sentence", "words", "word", "tag", takes=("hub:NAME",))


@dataclasses.dataclass(frozen=True)
class TokenClassification(LabelledTask):
    """Tagging the words of sentences; see the module.

    Batches have, int64 `(B, W)`, the ``tags`` of words, -1 behind the end of a sentence, and ``pieces``, the place of
    each word's first piece in its row, -1 where it has none.
    """

    name: ClassVar[str] = "token_classification"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "span_f1": "higher",
        "span_precision": "higher",
        "span_recall": "higher",
        "accuracy": "higher",
    }
    auto_class: ClassVar[str | None] = "AutoModelForTokenClassification"
    kind: ClassVar[Kind] = TAGGED
    column_fields: ClassVar[tuple[str, ...]] = ("tokens_column", "tags_column")

    tokens_column: str = setting("tokens", "column that holds the words")
    tags_column: str = setting("ner_tags", "column that holds the tags, in the BIO scheme")
    seq_len: int = setting(128, "tokens per sentence; what is longer is cut", at_least=8)
    vocab_size: int = setting(VOCABULARY, "entries of the tokenizer that tiny and small get", at_least=64)

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        """Sentences with the ``tags`` and ``pieces`` of their words; for training those with at least one piece."""
        documents = corpus.train if side == "train" else corpus.eval
        numbers = {label: number for number, label in enumerate(corpus.labels)}
        ids = []
        pieces = []
        tags = []
        encodings = encodings_of(documents.texts, tokenizer, self.seq_len)
        for text, of_words, encoding in zip(documents.texts, documents.labels, encodings, strict=True):
            # of a set without tags nothing but the number of its words is known
            known = [numbers[tag] for tag in json.loads(of_words)] if of_words else [0] * len(text.split(" "))
            tags.append(np.array(known, dtype=np.int32))
            lengths = np.array([len(word) for word in text.split(" ")])
            ends = np.cumsum(lengths + 1) - 1
            ids.append(np.array(encoding.ids, dtype=np.int32))
            pieces.append(first_pieces(zip(ends - lengths, ends, strict=True), encoding))
        samples = Samples.of(ids=ids, tags=tags, pieces=pieces)
        keep = np.array([bool((of >= 0).any()) for of in pieces])
        if not keep.any():
            what = "training" if side == "train" else corpus.split
            raise UsageError(
                f"the tokenizer makes nothing of the {what} sentences of {corpus.name}; choose a model whose tokenizer "
                f"knows their characters"
            )
        if side == "eval":
            return samples
        return samples.select(keep)

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        notes = list(corpus.notes)
        where = f"have no word piece within the {self.seq_len} tokens of a sentence"
        for samples, of, then in (
            (train, "training words", "are not learned"),
            (held_out, f"{corpus.split} words", "count as predicted O"),
        ):
            if lost := int((samples.values["pieces"] < 0).sum()):
                notes.append(f"{lost} of {len(samples.values['tags'])} {of} {where} and {then}")
        if left_out := len(corpus.train.texts) - len(train):
            notes.append(f"{left_out} training sentences of which the tokenizer makes nothing are left out")
        return {"split": corpus.split, "labels": self.known["labels"], "notes": notes}

    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        words = {name: pad(samples.rows(name, numbers), -1) for name in ("tags", "pieces")}
        return self.padded(samples, numbers) | words

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, W, C)` at each word's first piece; those of a word without one mean nothing."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        places = batch["pieces"].clamp(min=0).unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        return logits.gather(1, places)

    def targets(self, batch: Batch) -> Tensor:
        tags: Tensor = batch["tags"]
        return tags.where(batch["pieces"] >= 0, IGNORED).flatten()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        learned = self.targets(batch)
        loss = functional.cross_entropy(outputs.flatten(0, 1), learned, ignore_index=IGNORED, reduction="sum")
        # A part of a batch may have no labelled word.
        return loss / (learned != IGNORED).sum().clamp(min=1)

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss, summed in float64 over float32 losses of words; words, and spans by type.

        ``words`` is int64 `(2,)`: words, and those with the right tag. ``spans`` is int64 `(T, 3)`, see
        `asyncsgd.tasks.spans.Tagging.counts`.
        """
        labels = self.known["labels"]
        outside = labels.index("O") if "O" in labels else spans.OUTSIDE
        predicted = outputs.argmax(-1).where(batch["pieces"] >= 0, outside)
        true = batch["tags"].cpu().numpy()
        said = predicted.where(batch["tags"] >= 0, spans.OUTSIDE).cpu().numpy()
        return {"loss": self.summed_loss(outputs, batch)} | _counts(labels, true, said)

    def said(self, outputs: Tensor, batch: Batch) -> Sequence[Said]:
        """The tags of each sentence, with spaces between them; O for a word without a piece."""
        labels = self.known["labels"]
        words = zip(outputs.argmax(-1).tolist(), batch["pieces"].tolist(), batch["tags"].tolist(), strict=True)
        return [
            " ".join(
                labels[number] if piece >= 0 else "O"
                for number, piece, tag in zip(numbers, pieces, tags, strict=True)
                if tag >= 0
            )
            for numbers, pieces, tags in words
        ]

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Micro-averaged over all spans; 0 where there is nothing to divide by, as conlleval has it."""
        num_words, right = (int(count) for count in sums["words"])
        scores = {f"span_{name}": score or 0.0 for name, score in spans.scores(sums["spans"].sum(axis=0)).items()}
        return {name: (scores | {"accuracy": right / num_words})[name] for name in self.better}

    def details(self, sums: Sums) -> dict[str, Any]:
        """Precision, recall, F1 and number of true spans of each type, None where there is nothing to divide by; and
        the scores of tagging every word with the training split's commonest tag.
        """
        per_type = {
            kind: {**spans.scores(counts), "support": int(counts[0])}
            for kind, counts in zip(spans.Tagging.of(self.known["labels"]).types, sums["spans"], strict=True)
        }
        return {"per_type": per_type, "majority": self._majority()}

    def _majority(self) -> dict[str, Any]:
        """The commonest tag of the training words, and the scores of saying nothing else."""
        labels = self.known["labels"]
        held_out = self.samples("eval")
        commonest = int(np.bincount(self.samples("train").values["tags"], minlength=len(labels)).argmax())
        # All sentences in one row, with a word outside between them.
        between = held_out.starts["tags"][1:-1]
        true = np.insert(held_out.values["tags"].astype(np.int64), between, spans.OUTSIDE)[None]
        total = _counts(labels, true, np.where(true >= 0, commonest, spans.OUTSIDE))
        scores = self.metrics(total)
        return {"tag": labels[commonest], "span_f1": scores["span_f1"], "accuracy": scores["accuracy"]}


def _counts(labels: list[str], true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    words = true != spans.OUTSIDE
    right = (true == predicted) & words
    return {
        "words": np.array([words.sum(), right.sum()], dtype=np.int64),
        "spans": spans.Tagging.of(labels).counts(true, predicted),
    }
