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
    words = [sentence.split() for sentence in sentences]
    longest = max(map(len, words), default=0)
    filled = np.full((len(sentences), longest), OUTSIDE, dtype=np.int64)
    for row, tags in zip(filled, words, strict=True):
        for place, tag in enumerate(tags):
            row[place] = TAGS.index(tag)
    return filled


def named(*sentences):
    spans = TAGGING.spans(rows(*sentences)).tolist()
    return [(first, last, TAGGING.types[kind]) for first, last, kind in spans]


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
    expected = np.zeros((2, 3), dtype=np.int64)
    true_sentences = []
    predicted_sentences = []
    for sentence in pairs:
        true = [tag for tag, _ in sentence]
        predicted = [tag for _, tag in sentence]
        true_sentences.append(" ".join(true))
        predicted_sentences.append(" ".join(predicted))
        true_spans = slow_spans(true)
        predicted_spans = slow_spans(predicted)
        for column, spans in enumerate((true_spans, predicted_spans, true_spans & predicted_spans)):
            for *_, kind in spans:
                expected[TAGGING.types.index(kind), column] += 1
    true_rows = rows(*true_sentences)
    predicted_rows = rows(*predicted_sentences)
    counts = TAGGING.counts(true_rows, predicted_rows)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()
    added_up = np.zeros((2, 3), dtype=np.int64)
    for k in range(len(pairs)):
        added_up += TAGGING.counts(true_rows[k : k + 1], predicted_rows[k : k + 1])
    assert counts.tolist() == added_up.tolist()


def test_scores_have_none_where_nothing_can_be_divided():
    nothing_predicted = scores(np.array([2, 0, 0]))
    nothing_true = scores(np.array([0, 3, 0]))
    nothing = scores(np.array([0, 0, 0]))
    assert tuple(nothing_predicted.values()) == (None, 0.0, 0.0)
    assert tuple(nothing_true.values()) == (0.0, None, 0.0)
    assert tuple(nothing.values()) == (None, None, None)


@pytest.mark.parametrize("tag", ["S-A", "A", "", "B-", "b-A", "NN"])
def test_other_schemes_are_refused(tag):
    with pytest.raises(ValueError, match="is no BIO tag, which is O, B-TYPE or I-TYPE"):
        split_tag(tag)
