"""Scores of a confusion matrix: a table worked out by hand, and the definitions on any pairs of classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.tasks.scores import accuracy, macro_f1, per_class_f1


def test_the_scores_of_a_table_worked_out_by_hand():
    # True 0: 5 right, 1 as class 1. True 1: 2 as class 0, 3 right, 1 as class 2. True 2: 4 as class 1. No class 3.
    table = np.array([[5, 1, 0, 0], [2, 3, 1, 0], [0, 4, 0, 0], [0, 0, 0, 0]])
    assert accuracy(table) == 8 / 16
    # precision 5/7, recall 5/6; precision 3/8, recall 3/6; class 2 never right
    assert per_class_f1(table) == [pytest.approx(10 / 13), pytest.approx(6 / 14), 0.0, None]
    assert macro_f1(table) == pytest.approx((10 / 13 + 6 / 14 + 0) / 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_f1_is_the_harmonic_mean_of_precision_and_recall_and_none_for_a_class_that_is_nowhere(pairs):
    table = np.zeros((4, 4), dtype=np.int64)
    np.add.at(table, tuple(np.array(pairs).T), 1)
    scores = per_class_f1(table)
    for label, score in enumerate(scores):
        right = sum(true == predicted == label for true, predicted in pairs)
        true_count = sum(true == label for true, _ in pairs)
        said_count = sum(predicted == label for _, predicted in pairs)
        if right:
            precision = right / said_count
            recall = right / true_count
            assert score == pytest.approx(2 * precision * recall / (precision + recall))
        else:
            assert score == (0.0 if true_count or said_count else None)
    assert macro_f1(table) == pytest.approx(np.mean([score for score in scores if score is not None]))
    assert accuracy(table) == sum(true == predicted for true, predicted in pairs) / len(pairs)
