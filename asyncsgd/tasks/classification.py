"""Classification of whole texts, or of pairs of them; also several labels a text, or a number.

    loss = (1/B) sum_b w[y_b] (-log softmax(logits_b)[y_b]),    b over the B texts of the batch

with w = 1, or the inverse frequency of the class. The divisor is B and not the sum of the weights. (torch's ``weight=``
divides by that sum.) So the batches' gradients add up to the gradient of one loss over the whole training set, whatever
classes a batch happens to hold. Evaluations never weigh. The losses of several labels and of a number stand in
`asyncsgd.tasks.heads`.

A pair is one row, in the encoding that the tokenizer has for pairs: [CLS] first [SEP] second [SEP] with BERT. A pair
that is longer than `seq_len` loses the end of its longer text first. `Documents` have a pair as one text and several
labels as one label, each a list in JSON; `asyncsgd.tasks.labelled_rows` makes them.

Shapes: B sequences, L tokens, C classes.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import BUILT_IN, OF_TRANSFORMERS, PAIRS, Defaults
from asyncsgd.settings.specs import flag_of, setting
from asyncsgd.tasks.base import Directions, Sums, to_device
from asyncsgd.tasks.heads import Labels
from asyncsgd.tasks.labelled_task import LabelledTask

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    from numpy import ndarray
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.documents import Documents
    from asyncsgd.data.kinds import Kind
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw


def inverse_frequency(counts: Sequence[int] | ndarray) -> ndarray:
    """The weight of each class, float64 `(C,)`: w_c = N / (K n_c), and 0 where n_c is 0, for K classes that occur.

    The mean of the weights over the N samples is 1, so the loss keeps its scale. `counts` are n_c, samples of a class.

    >>> inverse_frequency([1, 3]).tolist()
    [2.0, 0.6666666666666666]
    """
    import numpy as np

    counts = np.asarray(counts, dtype=np.float64)
    occurring = counts > 0
    mean_count = counts.sum() / max(occurring.sum(), 1)
    weights = np.zeros_like(counts)
    return np.divide(mean_count, counts, out=weights, where=occurring)


Score = Literal["macro_f1", "accuracy", "f1", "matthews", "micro_f1", "exact_match", "pearson", "spearman", "mse"]


@dataclasses.dataclass(frozen=True)
class Classification(LabelledTask):
    """Predict the label of a text or a pair of texts, with the encoder of a masked-language model and a new head.

    Batches have ``labels``: the number of each text's class, int64 `(B,)`; or float32 `(B, C)`, 1 for each label that a
    text has; or float32 `(B,)`, numbers. Batches of pairs also have ``token_type_ids`` where the tokenizer makes them.
    """

    name: ClassVar[str] = "classification"
    defaults: ClassVar[Defaults] = dataclasses.replace(
        OF_TRANSFORMERS, warmup=0.1, samples=None, epochs=2.0, evaluations=4
    )
    """The learning rate of `OF_TRANSFORMERS`, 5e-4, suits the small models made here. It was tried with two epochs over
    4,000 texts of hate_davidson from a pretrained `tiny`, two seeds each. The mean macro-F1 was 0.566 at 2e-4, 0.604 at
    5e-4, 0.568 at 1e-3 and 0.416 at 2e-3. Published models of BERT's size want about 5e-5."""
    auto_class: ClassVar[str | None] = "AutoModelForSequenceClassification"
    eval_batch_size: ClassVar[int] = 64
    column_fields: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column", "label_column")

    data_name: str = setting(
        "pydocs",
        "pydocs (which package documents this?), pydocs:pairs (are both of one module?), a folder with train.*, a "
        "file, or hub:NAME",
        name="data",
        aliases=("train_file",),
    )
    text_column: str = setting("text", "column that holds the text")
    text_pair_column: str | None = setting(None, "column that holds a second text", unset="texts are single")
    label_column: str = setting("label", "column that holds the label; A,B,C with --labels multi: columns of 0 and 1")
    labels: Labels = setting(
        "single", "single: one label a text; multi: any number of labels; number: a number, with a squared error"
    )
    label_separator: str | None = setting(
        None, "what stands between several labels; --labels multi only", unset="the column holds lists"
    )
    positive: str | None = setting(
        None, "the label whose F1 is the score f1; --labels single only", unset="there is no such score"
    )
    score: Score | None = setting(
        None,
        "the score that studies compare; it is recorded first",
        unset="macro_f1; micro_f1 of several labels; pearson of numbers",
    )
    seq_len: int = setting(128, "tokens per text or pair; what is longer is cut", at_least=8)
    class_weights: bool = setting(False, "weigh each class by its inverse frequency in the training loss")
    hatecheck: str | None = setting(
        None, "folder or file of HateCheck's functional tests, run once at the end", unset="not tested"
    )
    hatecheck_positive: str | None = setting(None, "labels that count as hateful there, LABEL[,LABEL]", unset="hate")

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = self.labels
        if self.hatecheck_positive is not None and self.hatecheck is None:
            raise UsageError(
                "--hatecheck-positive does nothing without --hatecheck; add --hatecheck FOLDER, or drop it"
            )
        for name, needs in (
            ("class_weights", "single"),
            ("hatecheck", "single"),
            ("positive", "single"),
            ("label_separator", "multi"),
        ):
            if getattr(self, name) and labels != needs:
                raise UsageError(f"{flag_of(name)} is for --labels {needs}, not for {labels}; drop one of them")
        if self.hatecheck is not None and self.is_pair:
            pairs = "--text-pair-column" if self.data_name != PAIRS else f"--data {PAIRS}"
            raise UsageError(f"--hatecheck holds single texts, and {pairs} makes pairs; drop one of them")
        if self.hatecheck is not None and (self.encoding, self.quoting) != ("utf-8", None):
            raise UsageError(
                "--encoding and --quoting are not for --hatecheck, whose cases are read as published, in UTF-8; save "
                "the data as UTF-8 with quotation marks around texts, or drop --hatecheck"
            )
        if labels != "single" and self.data_name in BUILT_IN:
            raise UsageError(
                f"--labels {labels} does nothing for --data {self.data_name}, whose texts have one label each"
            )
        score = self.score
        scores = self.scored.better
        if score is not None and score not in scores:
            known = ", ".join(scores)
            raise UsageError(f"--score {score} is no score of --labels {labels}; its scores are {known}")
        if score == "f1" and self.positive is None:
            raise UsageError("--score f1 is the F1 of one label; name it with --positive LABEL")
        if self.label_separator is not None and "," in self.label_column:
            raise UsageError("--label-separator is for labels in one column, and --label-column names several")

    @property
    def is_pair(self) -> bool:
        return self.second_column is not None

    @property
    def is_plain(self) -> bool:
        """Whether a row is a single text with one label."""
        return self.labels == "single" and not self.is_pair

    @property
    def second_column(self) -> str | None:
        """The column of the second text; None where texts are single."""
        return "text_pair" if self.data_name == PAIRS else self.text_pair_column

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the labels: one, or several with ``--labels multi``."""
        if self.labels != "multi":
            return (self.label_column,)
        return tuple(name.strip() for name in self.label_column.split(","))

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns to read, each with the flag that chooses it: of the text, the labels and the second text."""
        columns = {self.text_column: "--text-column"}
        num_columns = 1 + len(self.label_columns)
        for column in self.label_columns:
            columns[column] = "--label-column"
        if self.second_column is not None:
            columns[self.second_column] = "--text-pair-column"
            num_columns += 1
        # Of plain rows `Kind.sources` says so.
        if len(columns) < num_columns and not self.is_plain:
            raise UsageError(f"a column is named twice; the columns of texts and labels are {', '.join(columns)}")
        return columns

    def row_kind(self) -> Kind:
        from asyncsgd.data.kinds import LABELLED
        from asyncsgd.tasks.labelled_rows import LabelledRows

        if self.is_plain:
            return LABELLED
        rows = LabelledRows(self.is_pair, self.labels, self.label_separator, self.label_columns)
        return rows.kind()

    def scored_by(self) -> Directions:
        names = list(self.scored.usual)
        if self.positive is not None:
            names.append("f1")
        if self.score is not None:
            names.insert(0, self.score)
        return {name: self.scored.better[name] for name in names}

    def check_names(self) -> None:
        super().check_names()
        if self.hatecheck is not None:
            from asyncsgd.tasks.hatecheck import load_hatecheck

            load_hatecheck(self.hatecheck)

    def make_tokenizer(self, model: str, corpus: Corpus, cache: Path) -> Any:
        if self.is_pair:
            from asyncsgd.data.documents import Documents
            from asyncsgd.tasks.labelled_rows import texts_of

            texts: list[str] = []
            for pair in corpus.train.texts:
                texts += texts_of(pair)
            corpus = dataclasses.replace(corpus, train=Documents(tuple(texts)))
        return super().make_tokenizer(model, corpus, cache)

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        hateful: Sequence[int] = ()
        if self.hatecheck is not None:
            from asyncsgd.tasks.hatecheck import hateful_labels

            hateful = hateful_labels(self.hatecheck_positive, corpus)
        if self.labels == "number":
            return {"labels": (self.label_column,), "counts": (), "hateful": hateful}
        labels = corpus.labels
        if self.positive is not None and self.positive not in labels:
            raise UsageError(f"--positive {self.positive} is no label; the labels are {', '.join(labels)}")
        count_of = self.row_kind().counts(corpus.train)
        counts = [count_of[label] for label in labels]
        return {"labels": labels, "counts": counts, "hateful": hateful}

    def rows_depend_on(self) -> Sequence[object]:
        if self.is_plain:
            return ()
        return (self.labels, self.is_pair)

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        from asyncsgd.data.tokens import Samples, pair_rows
        from asyncsgd.tasks.labelled_rows import texts_of

        documents = corpus.train if side == "train" else corpus.eval
        labels = self._label_values(corpus, documents)
        if not self.is_pair:
            ids = _beginnings(documents.texts, tokenizer, self.seq_len)
            return Samples.of(ids=ids, labels=labels)
        pairs = [texts_of(text) for text in documents.texts]
        ids = []
        types = []
        for row_ids, row_types in pair_rows(pairs, tokenizer, self.seq_len):
            ids.append(row_ids)
            types.append(row_types)
        if "token_type_ids" not in tokenizer.model_input_names:
            return Samples.of(ids=ids, labels=labels)
        return Samples.of(ids=ids, types=types, labels=labels)

    def _label_values(self, corpus: Corpus, documents: Documents) -> ndarray:
        """The labels of some documents as batches have them, int64 or float32; 0 where none is known."""
        import numpy as np

        if self.labels == "number":
            values = [float(label or 0) for label in documents.labels]
            return np.array(values, dtype=np.float32)
        number_of = {label: number for number, label in enumerate(corpus.labels)}
        if self.labels == "single":
            numbers = [number_of[label] if label else 0 for label in documents.labels]
            return np.array(numbers, dtype=np.int64)
        has_label = np.zeros((len(documents.labels), len(number_of)), dtype=np.float32)
        for row, text_labels in zip(has_label, documents.labels, strict=True):
            for label in json.loads(text_labels or "[]"):
                row[number_of[label]] = 1.0
        return has_label

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        import numpy as np

        labels = self.known["labels"]
        word = "pairs" if self.is_pair else "texts"
        notes = [self._labels_in_words(train), *corpus.notes]
        lengths = np.concatenate([train.lengths, held_out.lengths])
        num_cut = int((lengths >= self.seq_len).sum())
        if num_cut:
            longer = ", the longer text first" if self.is_pair else ""
            notes.append(f"{num_cut} {word} fill --seq-len {self.seq_len}; what is longer is cut{longer}")
        if self.is_pair:
            scored_texts: set[str] = set()
            for evaluation in corpus.evaluations:
                scored_texts |= _single_texts(evaluation.eval)
            shared = _single_texts(corpus.train) & scored_texts
            if shared:
                notes.append(f"{len(shared)} single texts stand in pairs of both sides; no pair does")
        undefined = self._undefined(held_out)
        if self.score is not None and self.score in undefined:
            others = [name for name in self.scored.better if name not in undefined and name != "f1"]
            raise UsageError(
                f"--score {self.score} is not defined: {undefined[self.score]}; choose of {', '.join(others)}"
            )
        notes += self.notes_on(held_out)
        facts: dict[str, Any] = {
            "class_weights": self.class_weights,
            "notes": notes,
            "data_notes": list(corpus.notes),
            "split": corpus.split,
            "labels": labels,
            "new_parameters": len(built.new_parameters),
        }
        if undefined:
            facts["undefined_scores"] = undefined
        return facts

    def _labels_in_words(self, train: Samples) -> str:
        if self.labels == "number":
            numbers = train.values["labels"]
            return f"labels: numbers from {numbers.min():g} to {numbers.max():g}, {numbers.mean():g} on average"
        counts = zip(self.known["labels"], self.known["counts"], strict=True)
        frequencies = [f"{label} {count}" for label, count in counts]
        return f"labels: {', '.join(frequencies)}"

    def undefined_scores(self, corpus: Corpus) -> Mapping[str, str]:
        """The scores that the labels to score on leave undefined, and why, before anything is prepared."""
        labels = self._label_values(corpus, corpus.eval)
        truth = self.scored.truth_of(labels, len(corpus.labels))
        positive = None
        if self.positive in corpus.labels:
            positive = corpus.labels.index(self.positive)
        return self.scored.undefined(truth, positive)

    def _undefined(self, held_out: Samples) -> Mapping[str, str]:
        """The scores that the labels to score on leave undefined, and why."""
        num_labels = len(self.known["labels"])
        truth = self.scored.truth_of(held_out.values["labels"], num_labels)
        return self.scored.undefined(truth, self._positive)

    def notes_on(self, held_out: Samples) -> Sequence[str]:
        undefined = self._undefined(held_out)
        return [f"{name} is not defined: {undefined[name]}" for name in self.scored_by() if name in undefined]

    @property
    def _positive(self) -> int | None:
        """The number of the class that `positive` names."""
        if self.positive is None:
            return None
        number: int = self.known["labels"].index(self.positive)
        return number

    def collate(self, samples: Samples, numbers: ndarray, draw: Draw) -> Batch:
        import torch

        from asyncsgd.data.tokens import pad

        batch = self.padded(samples, numbers)
        labels = samples.values["labels"][numbers]
        batch["labels"] = torch.from_numpy(labels)
        if "types" in samples.values:
            batch["token_type_ids"] = pad(samples.rows("types", numbers), 0)
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(B, C)`."""
        return model(**self.model_inputs(model, batch)).logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch
        from torch.nn import functional

        if not self.class_weights:
            return super().loss(outputs, batch)
        labels = batch["labels"]
        losses = functional.cross_entropy(outputs, labels, reduction="none")
        weights = inverse_frequency(self.known["counts"])
        weight_of_class = torch.tensor(weights, dtype=torch.float32, device=losses.device)
        return (weight_of_class[labels] * losses).mean()

    def metrics(self, sums: Sums) -> dict[str, Any]:
        metrics = self.scored.metrics(sums, self._positive)
        return {name: metrics[name] for name in self.scored_by()}

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """HateCheck, and what the model says of every set, where they are asked for."""
        written = super().final(model)
        if self.hatecheck is None:
            return {"hatecheck": None, **written}
        import numpy as np
        from transformers import AutoTokenizer

        from asyncsgd.data.tokens import Samples
        from asyncsgd.tasks import hatecheck
        from asyncsgd.tasks.text_batches import EvaluationBatches

        cases = hatecheck.load_hatecheck(self.hatecheck)
        tokenizer = AutoTokenizer.from_pretrained(self.known["tokenizer"], trust_remote_code=False)
        ids = _beginnings([case.text for case in cases], tokenizer, self.seq_len)
        samples = Samples.of(ids=ids, labels=np.zeros(len(ids), np.int64))
        predicted = np.empty(len(ids), np.int64)
        batches = EvaluationBatches(self.collate, samples, self.test_rows(samples))
        device = next(model.parameters()).device
        for index, numbers in enumerate(batches.rows):
            batch = to_device(batches[index], device)
            logits = self.outputs(model, batch)
            predicted[numbers] = logits.argmax(-1).cpu().numpy()
        said_hateful = np.isin(predicted, self.known["hateful"])
        return {"hatecheck": hatecheck.scores(cases, said_hateful), **written}


def _beginnings(texts: Sequence[str], tokenizer: Any, seq_len: int) -> list[ndarray]:
    """The ids of the first `seq_len` tokens of each text, int32."""
    import numpy as np

    from asyncsgd.data.tokens import encodings_of

    return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings_of(texts, tokenizer, seq_len)]


def _single_texts(pairs: Documents) -> set[str]:
    """The texts of pairs, without the empty text."""
    from asyncsgd.tasks.labelled_rows import texts_of

    texts: set[str] = set()
    for pair in pairs.texts:
        texts.update(texts_of(pair))
    return texts - {""}
