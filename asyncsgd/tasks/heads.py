"""What a labelled text may have: one label, several labels, or a number. Each kind has its loss and its scores.

    single    loss = (1/B) sum_b -log softmax(logits_b)[y_b]
    multi     loss = (1/BC) sum_bc -( y_bc log sigmoid(logits_bc) + (1 - y_bc) log(1 - sigmoid(logits_bc)) )
    number    loss = (1/B) sum_b (logits_b - y_b)^2

Scores are of a whole evaluation set. What they are computed from adds up over batches to the same bits in any order:
counts are whole numbers, and numbers stand in arrays with a place for each text, which other batches leave at 0.

Shapes: B texts of a batch, S texts of the evaluation set, C outputs.
"""

from __future__ import annotations

import abc
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncsgd.tasks import scores
from asyncsgd.tasks.base import Directions
from asyncsgd.tasks.predictions import Said

if TYPE_CHECKING:  # tasks name their kind of labels in a flag, and --help is not to wait for torch and numpy
    from numpy import ndarray
    from torch import Tensor

    from asyncsgd.tasks.base import Batch, Sums

Labels = Literal["single", "multi", "number"]
Metrics = dict[str, float | None]


class Head(abc.ABC):
    """A kind of label. `metrics` gives every score that the kind has; a task records some of them."""

    better: ClassVar[Directions]
    usual: ClassVar[tuple[str, ...]]
    """The scores that are recorded unless a user asks for others, the primary one first."""
    problem_type: ClassVar[str]
    """What transformers calls it in a model's configuration."""
    loss_unit: ClassVar[str] = "nats"

    @abc.abstractmethod
    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss terms, float32, one for each label of the batch."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean of the loss terms."""
        return self.losses(logits, labels).mean()

    @abc.abstractmethod
    def sums(self, logits: Tensor, batch: Batch) -> Sums:
        """What `metrics` and `details` are computed from."""

    @abc.abstractmethod
    def metrics(self, sums: Sums, positive: int | None) -> Metrics:
        """The scores by name; None where labels or predictions leave one undefined.

        Args:
            positive: the class whose F1 is `f1`; None: there is no such score.
        """

    @abc.abstractmethod
    def truth(self, sums: Sums) -> ndarray:
        """What `undefined` needs, from the sums of an evaluation."""

    @abc.abstractmethod
    def truth_of(self, labels: ndarray, num_labels: int) -> ndarray:
        """The same from the labels of the evaluation set, before anything is predicted."""

    @abc.abstractmethod
    def undefined(self, truth: ndarray, positive: int | None) -> Mapping[str, str]:
        """The scores that the labels of an evaluation set leave undefined, each with the reason."""

    @abc.abstractmethod
    def said(self, logits: Tensor, labels: Sequence[str]) -> Sequence[Said]:
        """What is predicted of each text of a batch."""

    def details(self, sums: Sums, labels: Sequence[str]) -> dict[str, Any]:
        return {}


class SingleLabel(Head):
    """One label a text. Sums are the confusion matrix, int64 `(C, C)`, rows: true class, columns: predicted."""

    better: ClassVar[Directions] = {"macro_f1": "higher", "accuracy": "higher", "f1": "higher", "matthews": "higher"}
    usual: ClassVar[tuple[str, ...]] = ("macro_f1", "accuracy")
    problem_type: ClassVar[str] = "single_label_classification"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(logits.float(), labels, reduction="none")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(logits, labels)

    def sums(self, logits: Tensor, batch: Batch) -> Sums:
        num_classes = logits.shape[1]
        predicted = logits.float().argmax(-1)
        cells = batch["labels"] * num_classes + predicted
        counts = cells.bincount(minlength=num_classes**2)
        return {"confusion": counts.reshape(num_classes, num_classes)}

    def said(self, logits: Tensor, labels: Sequence[str]) -> Sequence[Said]:
        predicted = logits.float().argmax(-1)
        return [labels[number] for number in predicted.tolist()]

    def metrics(self, sums: Sums, positive: int | None) -> Metrics:
        confusion = sums["confusion"]
        metrics: Metrics = {
            "macro_f1": scores.macro_f1(confusion),
            "accuracy": scores.accuracy(confusion),
            "matthews": scores.matthews(confusion),
        }
        if positive is not None:
            metrics["f1"] = scores.per_class_f1(confusion)[positive]
        return metrics | dict.fromkeys(self.undefined(self.truth(sums), positive))

    def truth(self, sums: Sums) -> ndarray:
        true: ndarray = sums["confusion"].sum(axis=1)
        return true

    def truth_of(self, labels: ndarray, num_labels: int) -> ndarray:
        import numpy as np

        return np.bincount(labels, minlength=num_labels)

    def undefined(self, truth: ndarray, positive: int | None) -> Mapping[str, str]:
        reasons = {}
        if (truth > 0).sum() < 2:
            reasons["matthews"] = "all texts to score on have one label"
        if positive is not None and truth[positive] == 0:
            reasons["f1"] = "no text to score on has the label of --positive"
        return reasons

    def details(self, sums: Sums, labels: Sequence[str]) -> dict[str, Any]:
        confusion = sums["confusion"]
        f1_of_classes = zip(labels, scores.per_class_f1(confusion), strict=True)
        return {"per_class_f1": dict(f1_of_classes), "confusion": confusion.tolist()}


class Multi(Head):
    """Any number of labels a text. A label is predicted where its logit is above 0.

    The sums are ``counts``, int64 `(C, 3)`, how often each label was right, predicted and true; ``exact``, how many
    texts had exactly the right labels; and ``texts``, how many there were.
    """

    better: ClassVar[Directions] = {"micro_f1": "higher", "macro_f1": "higher", "exact_match": "higher"}
    usual: ClassVar[tuple[str, ...]] = ("micro_f1", "macro_f1", "exact_match")
    problem_type: ClassVar[str] = "multi_label_classification"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")

    def sums(self, logits: Tensor, batch: Batch) -> Sums:
        import torch

        predicted = logits > 0
        true = batch["labels"] > 0
        right = predicted & true
        is_exact = (predicted == true).all(1)
        counts = torch.stack([right.sum(0), predicted.sum(0), true.sum(0)], dim=1)
        return {"counts": counts, "exact": is_exact.sum(), "texts": torch.tensor(len(predicted))}

    def said(self, logits: Tensor, labels: Sequence[str]) -> Sequence[Said]:
        labels_of_texts = []
        for has_label in (logits > 0).tolist():
            labels_of_texts.append(list(itertools.compress(labels, has_label)))
        return labels_of_texts

    def metrics(self, sums: Sums, positive: int | None) -> Metrics:
        counts = sums["counts"]
        f1_of_labels = [scores.f1(*label_counts) for label_counts in counts]
        metrics: Metrics = {
            "micro_f1": scores.f1(*counts.sum(axis=0)),
            "macro_f1": sum(f1_of_labels) / len(f1_of_labels),
            "exact_match": int(sums["exact"]) / int(sums["texts"]),
        }
        return metrics | dict.fromkeys(self.undefined(self.truth(sums), positive))

    def truth(self, sums: Sums) -> ndarray:
        true: ndarray = sums["counts"][:, 2]
        return true

    def truth_of(self, labels: ndarray, num_labels: int) -> ndarray:
        true: ndarray = (labels > 0).sum(axis=0)
        return true

    def undefined(self, truth: ndarray, positive: int | None) -> Mapping[str, str]:
        if truth.any():
            return {}
        return dict.fromkeys(("micro_f1", "macro_f1"), "no text to score on has a label")

    def details(self, sums: Sums, labels: Sequence[str]) -> dict[str, Any]:
        per_label = {}
        for label, (right, predicted, true) in zip(labels, sums["counts"].tolist(), strict=True):
            per_label[label] = {"f1": scores.f1(right, predicted, true), "predicted": predicted, "support": true}
        return {"per_label": per_label}


class Number(Head):
    """A number. The sums are ``predicted`` and ``true``, float64 `(S,)`, the number of each text."""

    better: ClassVar[Directions] = {"pearson": "higher", "spearman": "higher", "mse": "lower"}
    usual: ClassVar[tuple[str, ...]] = ("pearson", "spearman", "mse")
    problem_type: ClassVar[str] = "regression"
    loss_unit: ClassVar[str] = "squared error"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        errors = logits.float().squeeze(-1) - labels
        return errors.square()

    def sums(self, logits: Tensor, batch: Batch) -> Sums:
        import numpy as np

        num_rows = int(batch["num_rows"])
        rows = batch["rows"].cpu().numpy()
        numbers = logits.float().squeeze(-1)
        predicted = np.zeros(num_rows)
        predicted[rows] = numbers.cpu().numpy()
        true = np.zeros(num_rows)
        true[rows] = batch["labels"].cpu().numpy()
        return {"predicted": predicted, "true": true}

    def said(self, logits: Tensor, labels: Sequence[str]) -> Sequence[Said]:
        numbers: list[float] = logits.float().squeeze(-1).tolist()
        return numbers

    def metrics(self, sums: Sums, positive: int | None) -> Metrics:
        predicted = sums["predicted"]
        true = sums["true"]
        errors = predicted - true
        error = float((errors * errors).mean())
        metrics: Metrics = {
            "pearson": _correlation("pearsonr", predicted, true),
            "spearman": _correlation("spearmanr", predicted, true),
            "mse": error if math.isfinite(error) else math.inf,
        }
        return metrics | dict.fromkeys(self.undefined(true, positive))

    def truth(self, sums: Sums) -> ndarray:
        true: ndarray = sums["true"]
        return true

    def truth_of(self, labels: ndarray, num_labels: int) -> ndarray:
        return labels

    def undefined(self, truth: ndarray, positive: int | None) -> Mapping[str, str]:
        if truth.max() > truth.min():
            return {}
        return dict.fromkeys(("pearson", "spearman"), "all texts to score on have one number")


def _correlation(name: str, predicted: ndarray, true: ndarray) -> float | None:
    """Pearson's or Spearman's correlation, a function of `scipy.stats`.

    It is None where the predictions leave it undefined: they are one number for all, or some are not finite.
    """
    import numpy as np

    if not np.isfinite(predicted).all():
        return None
    is_constant = np.ptp(predicted) == 0 or np.ptp(true) == 0
    if is_constant:
        return None
    from scipy import stats

    correlation = getattr(stats, name)
    with warnings.catch_warnings():
        # scipy warns of numbers that are nearly equal, but what rounding makes of them is a result too.
        warnings.simplefilter("ignore")
        value = float(correlation(predicted, true).statistic)
    return value if math.isfinite(value) else None


HEADS: Mapping[Labels, Head] = {"single": SingleLabel(), "multi": Multi(), "number": Number()}
