"""Scores: of a classifier, functions of its confusion matrix; of a language model, of its loss.

Shapes: C classes. ``confusion[i, j]`` counts the samples of class i that were predicted as class j.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the methods of arrays are enough
    from numpy import ndarray


def accuracy(confusion: ndarray) -> float:
    """The share of the samples predicted right.

    >>> import numpy as np
    >>> accuracy(np.array([[1, 1], [0, 2]]))
    0.75
    """
    return int(confusion.trace()) / int(confusion.sum())


def per_class_f1(confusion: ndarray) -> list[float | None]:
    """F1 = 2 TP / (2 TP + FP + FN) of each class; None for a class that is neither true nor predicted anywhere.

    A class that occurs and is never predicted right has 0.

    >>> import numpy as np
    >>> per_class_f1(np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]]))
    [0.6666666666666666, 0.8, None]
    """
    right = confusion.diagonal()
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)  # 2 TP + FP + FN
    scores: list[float | None] = []
    for num_right, num_occurrences in zip(right.tolist(), occurrences.tolist(), strict=True):
        scores.append(2 * num_right / num_occurrences if num_occurrences else None)
    return scores


def macro_f1(confusion: ndarray) -> float:
    """The mean of `per_class_f1` over the classes that have one: every class counts alike, however rare it is.

    This is scikit-learn's ``f1_score(average="macro")`` without a list of labels.

    >>> import numpy as np
    >>> macro_f1(np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]]))
    0.7333333333333334
    """
    scores = [score for score in per_class_f1(confusion) if score is not None]
    return sum(scores) / len(scores)


def f1(right: int, predicted: int, true: int) -> float:
    """F1 = 2 TP / (predicted + true); 0 where there is nothing to divide by, as scikit-learn's ``zero_division=0``.

    >>> f1(2, 3, 5), f1(0, 0, 0)
    (0.5, 0.0)
    """
    both = int(predicted) + int(true)
    return 2 * int(right) / both if both else 0.0


def matthews(confusion: ndarray) -> float:
    """Matthews' correlation of the true and the predicted class, for any number of classes (Gorodkin 2004).

    It is 0 where only one class is true or predicted, as scikit-learn's ``matthews_corrcoef`` has it.

    >>> import numpy as np
    >>> matthews(np.array([[2, 0], [0, 3]])), matthews(np.array([[2, 0], [3, 0]]))
    (1.0, 0.0)
    """
    # Python's whole numbers do not overflow.
    true = confusion.sum(axis=1).tolist()
    predicted = confusion.sum(axis=0).tolist()
    total = sum(true)
    by_chance = sum(count * other for count, other in zip(true, predicted, strict=True))
    together = int(confusion.trace()) * total - by_chance
    of_true = total**2 - sum(count**2 for count in true)
    of_predicted = total**2 - sum(count**2 for count in predicted)
    if of_true == 0 or of_predicted == 0:
        return 0.0
    correlation: float = together / math.sqrt(of_true * of_predicted)
    return correlation


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float.

    Args:
        loss: mean natural-log loss per predicted token.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf
