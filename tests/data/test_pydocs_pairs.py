"""Pairs of docstrings: both kinds equally many, from modules that are on one side alone."""

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
    texts = []
    for number, (package, module, length) in enumerate(sizes):
        text = f"text {number} " + "x" * length
        texts.append((text, package, f"m{module}"))
    return texts


@given(SIZES)
def test_every_text_stands_in_one_pair_of_each_kind_and_no_module_is_on_both_sides(sizes):
    texts = docstrings(sizes)
    home = {text: (package, module) for text, package, module in texts}
    modules = {}
    for side, rows in pairs_of(texts).items():
        assert side in ("train", "test")
        other_label, same_label = LABELS
        same = [(first, second) for first, label, second in rows if label == same_label]
        other = [(first, second) for first, label, second in rows if label == other_label]
        for place in (0, 1):
            texts_of_same = [pair[place] for pair in same]
            assert len(set(texts_of_same)) == len(texts_of_same)
            assert sorted(texts_of_same) == sorted(pair[place] for pair in other)
        partners = dict(same)
        modules[side] = set()
        for first, second in same:
            assert home[first] == home[second]
            modules[side].add(home[first])
        for first, second in other:
            assert home[first] != home[second]
            assert home[first][0] == home[second][0]
            shorter, longer = sorted([len(second), len(partners[first])])
            assert longer <= MOST_TIMES_AS_LONG * shorter
    assert not modules["train"] & modules["test"]


def test_the_bag_of_words_is_the_cosine_of_counts_at_the_threshold_that_is_best_in_training():
    draw = np.random.default_rng(0)

    def text():
        return " ".join(draw.choice(["ant", "bee", "cat", "dog"], size=draw.integers(1, 6)))

    def some_rows():
        return [(text(), LABELS[int(draw.integers(2))], text()) for _ in range(40)]

    count = CountVectorizer().fit(["ant bee cat dog"]).transform

    def looked_at(rows):
        """The similarity of each pair, and whether it is of one module."""
        firsts, labels, seconds = zip(*rows, strict=True)
        distances = paired_cosine_distances(count(firsts), count(seconds))
        return (1 - distances).round(9), np.array(labels) == LABELS[1]

    train = some_rows()
    scored = some_rows()
    similarities, is_same = looked_at(train)
    best_accuracy = 0.0
    for threshold in sorted(set(similarities), reverse=True):
        accuracy = ((similarities >= threshold) == is_same).mean()
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best = threshold
    similarities, is_same = looked_at(scored)
    expected = ((similarities >= best) == is_same).mean()
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
