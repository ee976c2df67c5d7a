"""Classification of whole texts.

    loss = (1/B) sum_b w[y_b] (-log softmax(logits_b)[y_b]),    b over the B texts of the batch

with w = 1, or the inverse frequency of the class. The divisor is B and not the sum of the weights (torch's
``weight=`` divides by that sum): so the batches' gradients add up to the gradient of one loss over the whole training
set, whatever classes a batch happens to hold.

Shapes: B sequences, C classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncsgd.data.labelled import LabelledBatch


def inverse_frequency(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the weight of each class, w_c = N / (K n_c) with K the classes that occur; 0 for those that do not.

    The mean of the weights over the N samples is 1, so the loss keeps its scale and the learning rate its meaning.

    Args:
        counts: n_c, samples of each class.

    Returns:
        float64 `(C,)`, new.

    >>> inverse_frequency([1, 3]).tolist()
    [2.0, 0.6666666666666666]
    """
    counts = np.asarray(counts, dtype=np.float64)
    occurring = counts > 0
    return np.divide(counts.sum() / max(occurring.sum(), 1), counts, out=np.zeros_like(counts), where=occurring)


@dataclasses.dataclass(frozen=True)
class ClassSums:
    """Sums over samples, so that batches add up exactly; means are taken once, at the end."""

    loss: float
    """Sum of -log p(label) in nats, never weighted."""
    confusion: np.ndarray
    """int64 `(C, C)`, rows: true class, columns: predicted."""

    def __add__(self, other: ClassSums) -> ClassSums:
        return ClassSums(self.loss + other.loss, self.confusion + other.confusion)


class Classification:
    """The objective of a model with a classification head.

    Args:
        model: an `AutoModelForSequenceClassification`.
        weights: float `(C,)`, of each class in the training loss, see `inverse_frequency`; None: all 1.
    """

    def __init__(self, model: nn.Module, weights: np.ndarray | None = None) -> None:
        self.model = model
        device = next(model.parameters()).device
        self._weights = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=device)

    def logits(self, batch: LabelledBatch) -> Tensor:
        """Return the logits `(B, C)`."""
        return self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits

    def loss(self, batch: LabelledBatch) -> Tensor:
        """Return the mean loss per text, a scalar with its graph."""
        if self._weights is None:
            return functional.cross_entropy(self.logits(batch), batch.labels)
        losses = functional.cross_entropy(self.logits(batch), batch.labels, reduction="none")
        return (self._weights[batch.labels] * losses).mean()

    def sums(self, batch: LabelledBatch) -> ClassSums:
        """Return the batch's sums in evaluation mode: no dropout, no gradient, no class weights."""
        logits = self._evaluate(batch)
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        num_classes = logits.shape[1]
        cells = batch.labels * num_classes + logits.argmax(-1)
        counts = torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
        return ClassSums(float(losses.sum(dtype=torch.float64)), counts.cpu().numpy())

    def predictions(self, batch: LabelledBatch) -> np.ndarray:
        """Return the most probable class of each text in evaluation mode, int64 `(B,)`."""
        return self._evaluate(batch).argmax(-1).cpu().numpy()

    def _evaluate(self, batch: LabelledBatch) -> Tensor:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.logits(batch).float()
        finally:
            self.model.train(training)
