"""Classification of whole texts.

    loss = (1/B) sum_b w[y_b] (-log softmax(logits_b)[y_b]),    b over the B texts of the batch

with w = 1, or the inverse frequency of the class. The divisor is B and not the sum of the weights. (torch's ``weight=``
divides by that sum.) So the batches' gradients add up to the gradient of one loss over the whole training set, whatever
classes a batch happens to hold. Evaluations never weigh.

Shapes: B sequences, L tokens, C classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from asyncsgd.data.corpora import LABELLED, Corpus, Kind
from asyncsgd.data.tokens import Samples, encodings_of
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import OF_TRANSFORMERS, Defaults
from asyncsgd.tasks import hatecheck, scores
from asyncsgd.tasks.base import Sums, to_device
from asyncsgd.tasks.text_task import Batch, Draw, EvaluationBatches, LabelledTask

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.models import Built


def inverse_frequency(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The weight of each class, w_c = N / (K n_c) with K the classes that occur, else 0; float64 `(C,)`.

    The mean of the weights over the N samples is 1, so the loss keeps its scale. `counts` are n_c, samples of a class.

    >>> inverse_frequency([1, 3]).tolist()
    [2.0, 0.6666666666666666]
    """
    counts = np.asarray(counts, dtype=np.float64)
    occurring = counts > 0
    return np.divide(counts.sum() / max(occurring.sum(), 1), counts, out=np.zeros_like(counts), where=occurring)


@dataclasses.dataclass(frozen=True)
class Classification(LabelledTask):
    """A text's class, from the encoder of a masked-language model and a new head.

    Batches have ``labels``, the number of each text's class, int64 `(B,)`.
    """

    name: ClassVar[str] = "classification"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"macro_f1": "higher", "accuracy": "higher"}
    defaults: ClassVar[Defaults] = dataclasses.replace(
        OF_TRANSFORMERS, warmup=0.1, samples=None, epochs=2.0, evaluations=4
    )
    """The learning rate suits the small models made here. It was tried with two epochs over 4,000 texts of
    hate_davidson from a pretrained `tiny`, two seeds each. The mean macro-F1 was 0.566 at 2e-4, 0.604 at 5e-4, 0.568 at
    1e-3 and 0.416 at 2e-3. Published models of BERT's size want about 5e-5."""
    auto_class: ClassVar[str | None] = "AutoModelForSequenceClassification"
    eval_batch_size: ClassVar[int] = 64
    kind: ClassVar[Kind] = LABELLED
    column_fields: ClassVar[tuple[str, ...]] = ("text_column", "label_column")

    data_name: str = setting(
        "pydocs",
        "pydocs (which package documents this?), a folder with train.*, a file, or hub:NAME",
        name="data",
        aliases=("train_file",),
    )
    text_column: str = setting("text", "column that holds the text")
    label_column: str = setting("label", "column that holds the label")
    seq_len: int = setting(128, "tokens per text; what is longer is cut", at_least=8)
    class_weights: bool = setting(False, "weigh each class by its inverse frequency in the training loss")
    hatecheck: str | None = setting(
        None, "folder or file of HateCheck's functional tests, run once at the end", unset="not tested"
    )
    hatecheck_positive: str | None = setting(None, "labels that count as hateful there, LABEL[,LABEL]", unset="hate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hatecheck_positive is not None and self.hatecheck is None:
            raise UsageError(
                "--hatecheck-positive does nothing without --hatecheck; add --hatecheck FOLDER, or drop it"
            )

    def check_names(self) -> None:
        super().check_names()
        if self.hatecheck is not None:
            hatecheck.load_hatecheck(self.hatecheck)

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        counts = np.bincount(_classes(corpus, "train"), minlength=len(corpus.labels))
        hateful = () if self.hatecheck is None else hatecheck.hateful_labels(self.hatecheck_positive, corpus)
        return {"labels": corpus.labels, "counts": counts.tolist(), "hateful": hateful}

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        texts = (corpus.train if side == "train" else corpus.eval).texts
        return Samples.of(ids=_beginnings(texts, tokenizer, self.seq_len), labels=_classes(corpus, side))

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        labels, counts = self.known["labels"], self.known["counts"]
        named = ", ".join(f"{label} {count}" for label, count in zip(labels, counts, strict=True))
        notes = [f"labels: {named}", *corpus.notes]
        if num_cut := sum(int((side.lengths >= self.seq_len).sum()) for side in (train, held_out)):
            notes.append(f"{num_cut} texts fill --seq-len {self.seq_len}; what is longer is cut")
        return {
            "class_weights": self.class_weights,
            "notes": notes,
            "data_notes": list(corpus.notes),
            "split": corpus.split,
            "labels": labels,
            "new_parameters": len(built.new_parameters),
        }

    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        import torch

        return {**self.padded(samples, numbers), "labels": torch.from_numpy(samples.values["labels"][numbers])}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, C)`."""
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch
        from torch.nn import functional

        if not self.class_weights:
            return super().loss(outputs, batch)
        losses = functional.cross_entropy(outputs, batch["labels"], reduction="none")
        weights = torch.tensor(inverse_frequency(self.known["counts"]), dtype=torch.float32, device=losses.device)
        return (weights[batch["labels"]] * losses).mean()

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss without class weights, and int64 `(C, C)`, rows: true class, columns: predicted."""
        number = outputs.shape[1]
        cells = batch["labels"] * number + outputs.float().argmax(-1)
        confusion = cells.bincount(minlength=number**2).reshape(number, number)
        return {"loss": self.summed_loss(outputs, batch), "confusion": confusion}

    def metrics(self, sums: Sums) -> dict[str, float]:
        confusion = sums["confusion"]
        return {"macro_f1": scores.macro_f1(confusion), "accuracy": scores.accuracy(confusion)}

    def details(self, sums: Sums) -> dict[str, Any]:
        each = scores.per_class_f1(sums["confusion"])
        return {
            "per_class_f1": dict(zip(self.known["labels"], each, strict=True)),
            "confusion": sums["confusion"].tolist(),
        }

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """HateCheck, where it is asked for."""
        if self.hatecheck is None:
            return {"hatecheck": None}
        from transformers import AutoTokenizer

        cases = hatecheck.load_hatecheck(self.hatecheck)
        tokenizer = AutoTokenizer.from_pretrained(self.known["tokenizer"], trust_remote_code=False)
        ids = _beginnings([case.text for case in cases], tokenizer, self.seq_len)
        samples, predicted = Samples.of(ids=ids, labels=np.zeros(len(ids), np.int64)), np.empty(len(ids), np.int64)
        batches = EvaluationBatches(self.collate, samples, self.test_rows(samples))
        for index, numbers in enumerate(batches.rows):
            batch = to_device(batches[index], next(model.parameters()).device)
            predicted[numbers] = self.outputs(model, batch).argmax(-1).cpu().numpy()
        return {"hatecheck": hatecheck.scores(cases, np.isin(predicted, self.known["hateful"]))}


def _classes(corpus: Corpus, side: str) -> np.ndarray:
    """The number of each text's class, int64."""
    numbers = {label: number for number, label in enumerate(corpus.labels)}
    labels = (corpus.train if side == "train" else corpus.eval).labels or ()
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _beginnings(texts: Sequence[str], tokenizer: Any, seq_len: int) -> list[np.ndarray]:
    return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings_of(texts, tokenizer, seq_len)]
