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
from typing import TYPE_CHECKING, Any, ClassVar

from asyncsgd.errors import UsageError
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Directions, Sums
from asyncsgd.tasks.labelled_task import LabelledTask
from asyncsgd.tasks.predictions import Said
from asyncsgd.tasks.text_task import IGNORED, VOCABULARY

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    import numpy as np
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.kinds import Kind
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw


@dataclasses.dataclass(frozen=True)
class TokenClassification(LabelledTask):
    """Tagging the words of sentences; see the module.

    A batch has ``tags``, int64 `(B, W)`, the number of each word's tag, which is -1 after the end of a sentence; and
    ``pieces``, int64 `(B, W)`, the position of each word's first piece in its row, which is -1 where it has none.
    """

    name: ClassVar[str] = "token_classification"
    better: ClassVar[Directions] = {
        "span_f1": "higher",
        "span_precision": "higher",
        "span_recall": "higher",
        "accuracy": "higher",
    }
    auto_class: ClassVar[str | None] = "AutoModelForTokenClassification"
    column_fields: ClassVar[tuple[str, ...]] = ("tokens_column", "tags_column")

    tokens_column: str = setting("tokens", "column that holds the words")
    tags_column: str = setting("ner_tags", "column that holds the tags, in the BIO scheme")
    seq_len: int = setting(128, "tokens per sentence; what is longer is cut", at_least=8)
    vocab_size: int = setting(VOCABULARY, "entries of the tokenizer that tiny and small get", at_least=64)

    def row_kind(self) -> Kind:
        from asyncsgd.tasks.tagged_rows import TAGGED

        return TAGGED

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        """Sentences with the ``tags`` and ``pieces`` of their words; for training those with at least one piece."""
        import numpy as np

        from asyncsgd.data.tokens import Samples, encodings_of, first_pieces

        documents = corpus.train if side == "train" else corpus.eval
        number_of = {label: number for number, label in enumerate(corpus.labels)}
        ids = []
        pieces = []
        tags = []
        encodings = encodings_of(documents.texts, tokenizer, self.seq_len)
        for text, sentence_tags, encoding in zip(documents.texts, documents.labels, encodings, strict=True):
            words = text.split(" ")
            numbers = [0] * len(words)  # stand in for tags in a set without tags
            if sentence_tags:
                numbers = [number_of[tag] for tag in json.loads(sentence_tags)]
            tags.append(np.array(numbers, dtype=np.int32))
            lengths = np.array([len(word) for word in words])
            ends = np.cumsum(lengths + 1) - 1
            starts = ends - lengths
            ids.append(np.array(encoding.ids, dtype=np.int32))
            pieces.append(first_pieces(zip(starts, ends, strict=True), encoding))
        samples = Samples.of(ids=ids, tags=tags, pieces=pieces)
        keep = np.array([bool((sentence >= 0).any()) for sentence in pieces])
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
        for samples, words, then in (
            (train, "training words", "are not learned"),
            (held_out, f"{corpus.split} words", "count as predicted O"),
        ):
            pieces = samples.values["pieces"]
            num_lost = int((pieces < 0).sum())
            if num_lost:
                notes.append(f"{num_lost} of {len(pieces)} {words} {where} and {then}")
        num_left_out = len(corpus.train.texts) - len(train)
        if num_left_out:
            notes.append(f"{num_left_out} training sentences of which the tokenizer makes nothing are left out")
        return {"split": corpus.split, "labels": self.known["labels"], "notes": notes}

    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        from asyncsgd.data.tokens import pad

        batch = self.padded(samples, numbers)
        for name in ("tags", "pieces"):
            batch[name] = pad(samples.rows(name, numbers), -1)
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, W, C)` at each word's first piece; those of a word without one mean nothing."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        positions = batch["pieces"].clamp(min=0).unsqueeze(-1)
        num_labels = logits.shape[-1]
        return logits.gather(1, positions.expand(-1, -1, num_labels))

    def targets(self, batch: Batch) -> Tensor:
        tags: Tensor = batch["tags"]
        return tags.where(batch["pieces"] >= 0, IGNORED).flatten()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        targets = self.targets(batch)
        loss = functional.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
        num_words = (targets != IGNORED).sum()
        # A part of a batch may have no labelled word.
        return loss / num_words.clamp(min=1)

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss, summed in float64 over float32 losses of words; words, and spans by type.

        ``words`` is int64 `(2,)`: words, and those with the right tag. ``spans`` is int64 `(T, 3)`, see
        `asyncsgd.tasks.spans.Tagging.counts`.
        """
        from asyncsgd.tasks import spans

        labels = self.known["labels"]
        outside = labels.index("O") if "O" in labels else spans.OUTSIDE
        predicted = outputs.argmax(-1).where(batch["pieces"] >= 0, outside)
        predicted = predicted.where(batch["tags"] >= 0, spans.OUTSIDE)
        true = batch["tags"].cpu().numpy()
        counts = spans.word_and_span_counts(labels, true, predicted.cpu().numpy())
        return {"loss": self.summed_loss(outputs, batch), **counts}

    def said(self, outputs: Tensor, batch: Batch) -> Sequence[Said]:
        """The tags of each sentence, with spaces between them; O for a word without a piece."""
        labels = self.known["labels"]
        sentences = []
        predicted = outputs.argmax(-1).tolist()
        pieces = batch["pieces"].tolist()
        num_words = (batch["tags"] >= 0).sum(1).tolist()
        for row, length in enumerate(num_words):
            words = []
            for word in range(length):
                label = labels[predicted[row][word]]
                words.append(label if pieces[row][word] >= 0 else "O")
            sentences.append(" ".join(words))
        return sentences

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Micro-averaged over all spans; 0 where there is nothing to divide by, as conlleval has it."""
        from asyncsgd.tasks import spans

        num_words, num_right = sums["words"].tolist()
        of_spans = spans.scores(sums["spans"].sum(axis=0))
        scores = {"accuracy": num_right / num_words}
        for name, score in of_spans.items():
            scores[f"span_{name}"] = score or 0.0
        return {name: scores[name] for name in self.better}

    def details(self, sums: Sums) -> dict[str, Any]:
        """Precision, recall, F1 and number of true spans of each type, None where there is nothing to divide by; and
        the scores of tagging every word with the training split's commonest tag.
        """
        from asyncsgd.tasks import spans

        types = spans.Tagging.of(self.known["labels"]).types
        per_type = {}
        for name, counts in zip(types, sums["spans"], strict=True):
            per_type[name] = {**spans.scores(counts), "support": int(counts[0])}
        return {"per_type": per_type, "majority": self._majority()}

    def _majority(self) -> dict[str, Any]:
        """The commonest tag of the training words, and the scores of saying nothing else."""
        import numpy as np

        from asyncsgd.tasks import spans

        labels = self.known["labels"]
        train_tags = self.samples("train").values["tags"]
        frequencies = np.bincount(train_tags, minlength=len(labels))
        commonest = int(frequencies.argmax())
        held_out = self.samples("eval")
        tags = held_out.values["tags"].astype(np.int64)
        # All sentences in one row, with a word outside between them.
        between = held_out.starts["tags"][1:-1]
        true = np.insert(tags, between, spans.OUTSIDE)[None]
        predicted = np.where(true >= 0, commonest, spans.OUTSIDE)
        counts = spans.word_and_span_counts(labels, true, predicted)
        scores = self.metrics(counts)
        return {"tag": labels[commonest], "span_f1": scores["span_f1"], "accuracy": scores["accuracy"]}
