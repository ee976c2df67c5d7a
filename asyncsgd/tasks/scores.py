"""Scores: of a classifier, functions of its confusion matrix; of a language model, of its loss. numpy only.

Shapes: C classes. ``confusion[i, j]`` counts the samples of class i that were predicted as class j.
"""

from __future__ import annotations

import math

import numpy as np


def accuracy(confusion: np.ndarray) -> float:
    """The share of the samples predicted right.

    >>> accuracy(np.array([[1, 1], [0, 2]]))
    0.75
    """
    return int(np.trace(confusion)) / int(confusion.sum())


def per_class_f1(confusion: np.ndarray) -> list[float | None]:
    """F1 = 2 TP / (2 TP + FP + FN) of each class; None for a class that is neither true nor predicted anywhere.

    A class that occurs and is never predicted right has 0.

    >>> per_class_f1(np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]]))
    [0.6666666666666666, 0.8, None]
    """
    right = np.diag(confusion)
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)  # 2 TP + FP + FN
    return [2 * int(tp) / int(both) if both else None for tp, both in zip(right, occurrences, strict=True)]


def macro_f1(confusion: np.ndarray) -> float:
    """The mean of `per_class_f1` over the classes that have one: every class counts alike, however rare it is.

    This is scikit-learn's ``f1_score(average="macro")`` without a list of labels.

    >>> macro_f1(np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]]))
    0.7333333333333334
    """
    scores = [score for score in per_class_f1(confusion) if score is not None]
    return sum(scores) / len(scores)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float.

    Args:
        loss: mean natural-log loss per predicted token.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf
