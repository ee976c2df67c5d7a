"""Spans of tagged sentences: cases made by hand, and a slow reader of one word at a time that must agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.tasks.spans import OUTSIDE, Tagging, scores, split_tag

TAGS = ("B-A", "B-B", "I-A", "I-B", "O")
TAGGING = Tagging.of(TAGS)


def rows(*sentences):
    """Tags by name, separated by spaces, as numbers in rows of one length."""
    numbers = [[TAGS.index(tag) for tag in sentence.split()] for sentence in sentences]
    longest = max(map(len, numbers), default=0)
    filled = [row + [OUTSIDE] * (longest - len(row)) for row in numbers]
    return np.array(filled, dtype=np.int64).reshape(len(sentences), longest)


def named(*sentences):
    return [(first, last, TAGGING.types[kind]) for first, last, kind in TAGGING.spans(rows(*sentences)).tolist()]


@pytest.mark.parametrize(
    ("sentence", "spans"),
    [
        ("O O", []),
        ("B-A", [(0, 0, "A")]),
        ("O B-A I-A O", [(1, 2, "A")]),
        ("B-A B-A I-A", [(0, 0, "A"), (1, 2, "A")]),  # adjacent spans of one type
        ("B-A B-B", [(0, 0, "A"), (1, 1, "B")]),
        ("O I-A I-A", [(1, 2, "A")]),  # I- after O begins one
        ("I-B", [(0, 0, "B")]),  # I- first
        ("B-A I-B I-B", [(0, 0, "A"), (1, 2, "B")]),  # I- of another type
        ("I-A I-B I-A", [(0, 0, "A"), (1, 1, "B"), (2, 2, "A")]),
        ("O B-A I-A", [(1, 2, "A")]),  # at the end
        ("", []),
    ],
)
def test_spans_are_those_of_conlleval(sentence, spans):
    assert named(sentence) == spans


def test_no_span_goes_on_in_the_next_sentence():
    # Three words a row and one between the rows: the second sentence begins at place 4.
    assert named("O B-A I-A", "I-A", "") == [(1, 2, "A"), (4, 4, "A")]
    assert named("", "") == []


def slow_spans(tags):
    """One word at a time, as a reader does it; on names, without an array."""
    spans = set()
    first = 0
    kind = ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, this = tag.partition("-")
        if kind and (prefix != "I" or this != kind):
            spans.add((first, place - 1, kind))
            kind = ""
        if this and not kind:
            first = place
            kind = this
    return spans


sentences = st.lists(st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), max_size=7), max_size=4)


@given(sentences)
def test_counts_are_those_of_reading_one_word_at_a_time_and_add_up(pairs):
    sides = []
    for side in (0, 1):
        sides.append([[pair[side] for pair in sentence] for sentence in pairs])
    expected = np.zeros((2, 3), dtype=np.int64)
    for true, predicted in zip(*sides, strict=True):
        found = (slow_spans(true), slow_spans(predicted))
        for column, spans in enumerate((*found, found[0] & found[1])):
            for *_, kind in spans:
                expected[TAGGING.types.index(kind), column] += 1
    arrays = [rows(*(" ".join(sentence) for sentence in side)) for side in sides]
    counts = TAGGING.counts(*arrays)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()
    parts = []
    for k in range(len(pairs)):
        parts.append(TAGGING.counts(arrays[0][k : k + 1], arrays[1][k : k + 1]))
    assert counts.tolist() == sum(parts, np.zeros((2, 3), dtype=np.int64)).tolist()


def test_scores_have_none_where_nothing_can_be_divided():
    found = []
    for counts in ([2, 0, 0], [0, 3, 0], [0, 0, 0]):
        found.append(tuple(scores(np.array(counts)).values()))
    assert found == [(None, 0.0, 0.0), (0.0, None, 0.0), (None, None, None)]


@pytest.mark.parametrize("tag", ["S-A", "A", "", "B-", "b-A", "NN"])
def test_other_schemes_are_refused(tag):
    with pytest.raises(ValueError, match="is no BIO tag, which is O, B-TYPE or I-TYPE"):
        split_tag(tag)
