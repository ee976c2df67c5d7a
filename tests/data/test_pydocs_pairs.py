"""Pairs of docstrings: both kinds equally many, from modules that are on one side alone."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics.pairwise import paired_cosine_distances

from asyncsgd.data import pydocs_pairs
from asyncsgd.data.pydocs_pairs import LABELS, MOST_TIMES_AS_LONG, bag_of_words_accuracy, in_words, load_pairs, pairs_of
from asyncsgd.tasks.classification import Classification

SIZES = st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 4), st.integers(1, 9)), min_size=20, max_size=60)


def docstrings(sizes):
    """Texts that differ, each with its package and module."""
    return [(f"text {number} " + "x" * length, package, f"m{of}") for number, (package, of, length) in enumerate(sizes)]


@given(SIZES)
def test_every_text_stands_in_one_pair_of_each_kind_and_no_module_is_on_both_sides(sizes):
    texts = docstrings(sizes)
    home = {text: (package, module) for text, package, module in texts}
    modules = {}
    for side, rows in pairs_of(texts).items():
        assert side in ("train", "test")
        same, other = ([row for row in rows if row[1] == label] for label in LABELS[::-1])
        for place in (0, 2):
            assert Counter(row[place] for row in same) == Counter(row[place] for row in other)
            assert set(Counter(row[place] for row in same).values()) <= {1}
        assert all(home[first] == home[second] for first, _, second in same)
        assert all(home[first] != home[second] and home[first][0] == home[second][0] for first, _, second in other)
        partners = {first: second for first, _, second in same}
        for first, _, second in other:
            lengths = sorted(len(text) for text in (second, partners[first]))
            assert lengths[1] <= MOST_TIMES_AS_LONG * lengths[0]
        modules[side] = {home[text] for row in rows for text in (row[0], row[2])}
    assert not modules["train"] & modules["test"]


def test_the_bag_of_words_is_the_cosine_of_counts_at_the_threshold_that_is_best_in_training():
    draw = np.random.default_rng(0)

    def text():
        return " ".join(draw.choice(["ant", "bee", "cat", "dog"], size=draw.integers(1, 6)))

    train, scored = ([(text(), LABELS[int(draw.integers(2))], text()) for _ in range(40)] for _ in range(2))

    def similarities(rows):
        counts = CountVectorizer().fit(["ant bee cat dog"]).transform
        return 1 - paired_cosine_distances(counts([row[0] for row in rows]), counts([row[2] for row in rows]))

    truth = [np.array([row[1] == LABELS[1] for row in rows]) for rows in (train, scored)]
    of_train = similarities(train).round(9)
    best = max(sorted(set(of_train), reverse=True), key=lambda at: ((of_train >= at) == truth[0]).mean())
    expected = ((similarities(scored).round(9) >= best) == truth[1]).mean()
    assert bag_of_words_accuracy(train, scored) == expected
    assert "too easy" in in_words(0.91)
    assert "too easy" not in in_words(0.9)


def test_classification_learns_the_pairs_by_name_and_is_told_the_baseline(tmp_path, monkeypatch):
    texts = docstrings([("p", number // 4, 20 + number % 3) for number in range(200)])
    monkeypatch.setattr(pydocs_pairs, "docstrings_with_modules", lambda folders: texts)
    task = Classification(data_name="pydocs:pairs", model_name="tiny", seq_len=16).prepare(0, tmp_path)
    facts = task.facts()
    sides, accuracy = load_pairs(tmp_path)
    assert facts["labels"] == list(LABELS)
    assert facts["num_train_samples"] == len(sides["train"])
    assert in_words(accuracy) in facts["notes"]
    assert {len(task.samples(side)) for side in ("train", "eval")} == set(map(len, sides.values()))
