"""Scores on hand-computed tables, and what they must not depend on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.tasks.scores import accuracy, macro_f1, per_class_f1

# True 0: 5 right, 1 as class 1. True 1: 2 as class 0, 3 right, 1 as class 2. True 2: 4 as class 1.
TABLE = np.array([[5, 1, 0], [2, 3, 1], [0, 4, 0]])


def confusion_matrix(true, predicted, num):
    """Counts by true class (rows) and predicted class (columns)."""
    counts = np.zeros((num, num), dtype=np.int64)
    np.add.at(counts, (np.array(true, dtype=int), np.array(predicted, dtype=int)), 1)
    return counts


def test_the_scores_of_a_table_worked_out_by_hand():
    assert accuracy(TABLE) == 8 / 16
    # precision 5/7, recall 5/6; precision 3/8, recall 3/6; class 2 never right
    assert per_class_f1(TABLE) == [pytest.approx(10 / 13), pytest.approx(6 / 14), 0.0]
    assert macro_f1(TABLE) == pytest.approx((10 / 13 + 6 / 14 + 0) / 3)


def test_a_class_that_neither_occurs_nor_is_predicted_has_no_f1_and_does_not_count_as_0():
    table = confusion_matrix([0, 0, 1, 1], [0, 1, 1, 1], 3)
    assert per_class_f1(table) == [pytest.approx(2 / 3), pytest.approx(4 / 5), None]
    assert macro_f1(table) == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_a_class_that_is_predicted_but_never_true_has_0():
    table = confusion_matrix([0, 0], [0, 2], 3)
    assert per_class_f1(table) == [pytest.approx(2 / 3), None, 0.0]
    assert macro_f1(table) == pytest.approx(1 / 3)


def test_without_samples_nothing_has_been_measured():
    empty = confusion_matrix([], [], 2)
    assert (accuracy(empty), macro_f1(empty), per_class_f1(empty)) == (None, None, [None, None])


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1)


@given(PAIRS, st.permutations(range(4)))
def test_renaming_the_classes_changes_no_mean_and_moves_each_score_with_its_class(pairs, names):
    true, predicted = (np.array(side) for side in zip(*pairs, strict=True))
    before = confusion_matrix(true, predicted, 4)
    renamed = np.array(names)
    after = confusion_matrix(renamed[true], renamed[predicted], 4)
    assert accuracy(after) == accuracy(before)
    assert macro_f1(after) == pytest.approx(macro_f1(before))
    assert [per_class_f1(after)[names[c]] for c in range(4)] == per_class_f1(before)


@given(PAIRS)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(pairs):
    scores = per_class_f1(confusion_matrix(*zip(*pairs, strict=True), 4))
    for label, score in enumerate(scores):
        right = sum(true == predicted == label for true, predicted in pairs)
        true_count = sum(true == label for true, _ in pairs)
        said_count = sum(predicted == label for _, predicted in pairs)
        if right:
            precision, recall = right / said_count, right / true_count
            assert score == pytest.approx(2 * precision * recall / (precision + recall))
        else:
            assert score == (0.0 if true_count or said_count else None)
