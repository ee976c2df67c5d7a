"""Labelled texts: sides that share nothing, labels that have names, and every input that cannot be meant."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.data import labelled
from asyncsgd.data.batching import Frame
from asyncsgd.data.corpora import load_corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.labelled import (
    HateCheck,
    LabelledBatches,
    LabelledEvaluation,
    hub_side,
    load_hatecheck,
    load_labelled,
)
from asyncsgd.data.tokenization import Tokens, tokenize_beginnings, train_wordpiece
from asyncsgd.errors import UsageError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TRAIN = [("good day", "yes"), ("bad day", "no"), ("fine day", "yes"), ("poor day", "no")]
TEST = [("good night", "yes"), ("bad night", "no")]


def write(folder, name, rows, columns=("text", "label")):
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows, columns=list(columns))
    if name.endswith(".csv"):
        table.to_csv(folder / name, index=False)
    elif name.endswith(".jsonl"):
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
        (folder / name).write_text("\n".join(lines))
    else:
        table.to_parquet(folder / name)


def load(path, tmp_path, **more):
    arguments = {"text_column": "text", "label_column": "label", "cache_dir": tmp_path / "cache"} | more
    return load_labelled(str(path), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def yes_no(tmp_path):
    write(tmp_path / "yes_no", "train.csv", TRAIN)
    write(tmp_path / "yes_no", "test.csv", TEST)
    return tmp_path / "yes_no"


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_a_folder_with_splits_is_read_the_same_from_every_kind_of_file(tmp_path, kind):
    write(tmp_path / "d", f"train{kind}", TRAIN)
    write(tmp_path / "d", f"test{kind}", TEST)
    data = load(tmp_path / "d", tmp_path)
    assert data.train == Documents(tuple(t for t, _ in TRAIN), tuple(label for _, label in TRAIN))
    assert data.eval == Documents(tuple(t for t, _ in TEST), tuple(label for _, label in TEST))
    assert (data.name, data.split, data.labels, data.notes) == ("d", "test", ("no", "yes"), ())
    assert data.classes(data.train).tolist() == [1, 0, 1, 0]


def test_test_is_scored_where_it_is_there_and_validation_otherwise_or_when_asked_for(yes_no, tmp_path):
    write(yes_no, "validation.csv", [("so so day", "no")])
    assert load(yes_no, tmp_path).split == "test"
    asked = load(yes_no, tmp_path, split="validation")
    assert (asked.split, asked.eval.texts) == ("validation", ("so so day",))
    (yes_no / "test.csv").unlink()
    assert load(yes_no, tmp_path).split == "validation"
    with pytest.raises(UsageError, match="yes_no has no test split; drop --split, or type --split validation"):
        load(yes_no, tmp_path, split="test")


def test_of_one_file_a_twentieth_is_set_aside_by_the_texts_alone(tmp_path):
    rows = [(f"text number {number}", "odd" if number % 2 else "even") for number in range(400)]
    write(tmp_path / "a", "posts.csv", rows)
    write(tmp_path / "b", "posts.csv", rows[::-1])
    one, other = load(tmp_path / "a" / "posts.csv", tmp_path), load(tmp_path / "b" / "posts.csv", tmp_path)
    assert set(one.eval.texts) == set(other.eval.texts)
    assert 8 <= len(one.eval.texts) <= 36
    assert set(one.train.texts).isdisjoint(one.eval.texts)
    assert len(one.train.texts) + len(one.eval.texts) == 400
    with pytest.raises(UsageError, match="no validation split: a twentieth of it is set aside and called test"):
        load(tmp_path / "a" / "posts.csv", tmp_path, split="validation")


def test_no_text_that_is_scored_was_training_text_of_pretraining(tmp_path):
    rows = [(f"text number {number}", "odd" if number % 2 else "even") for number in range(2000)]
    write(tmp_path, "posts.csv", rows)
    scored = load(tmp_path / "posts.csv", tmp_path).eval.texts
    pretrained_on = load_corpus(
        str(tmp_path / "posts.csv"), eval_data=None, text_column="text", cache_dir=tmp_path / "cache"
    ).train.texts
    assert scored
    assert not set(scored) & set(pretrained_on)


def test_pydocs_is_labelled_with_the_packages_in_the_order_they_are_read(tmp_path, monkeypatch):
    packages = ("stdlib", "numpy", "scipy", "pandas")
    labels = tuple(package for package in packages for _ in range(100))
    texts = tuple(f"docstring {number}" for number in range(400))
    monkeypatch.setattr(labelled, "load_pydocs", lambda cache_dir: Documents(texts, labels))
    data = load("pydocs", tmp_path, train_samples=200, eval_samples=10)
    assert (data.labels, data.split) == (packages, "test")
    assert (len(data.train.texts), len(data.eval.texts)) == (200, 10)
    assert set(data.train.labels or ()) == set(packages)
    before = data.fingerprint
    monkeypatch.setattr(labelled, "package_versions", lambda: {"stdlib": "another"})
    assert load("pydocs", tmp_path, train_samples=200, eval_samples=10).fingerprint != before


def test_a_training_text_that_is_scored_too_is_left_out_and_counted(yes_no, tmp_path):
    write(yes_no, "test.csv", [*TEST, ("good day", "no")])
    data = load(yes_no, tmp_path)
    assert data.train.texts == ("bad day", "fine day", "poor day")
    assert data.notes == ("1 training texts that are test texts too are left out",)


def test_rows_without_text_are_left_out_and_counted(yes_no, tmp_path):
    write(yes_no, "train.csv", [*TRAIN, ("  ", "yes"), ("", "no")])
    data = load(yes_no, tmp_path)
    assert data.train.texts == tuple(text for text, _ in TRAIN)
    assert data.notes == ("2 rows of yes_no (train) without text are left out",)


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_limit_takes_so_many_texts_evenly_and_in_their_order(total, limit):
    documents = Documents(tuple(map(str, range(total))), ("x",) * total)
    kept = [int(text) for text in labelled.limited(documents, limit).texts]
    assert len(kept) == min(limit, total)
    assert kept == sorted(set(kept))
    gaps = np.diff([*kept, total])
    assert gaps.max(initial=0) - gaps.min(initial=total) <= 1


def test_numbers_are_their_own_names_in_numeric_order(tmp_path):
    write(tmp_path / "d", "train.parquet", [("a", 10), ("b", 9), ("c", 10)])
    write(tmp_path / "d", "test.parquet", [("d", 9)])
    assert load(tmp_path / "d", tmp_path).labels == ("9", "10")


@pytest.mark.parametrize("content", [["cold", "warm", "hot"], {"0": "cold", "1": "warm", "2": "hot"}])
@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_labels_json_names_the_numbers(tmp_path, content, kind):
    write(tmp_path / "d", f"train{kind}", [("a", 0), ("b", 2), ("c", 0)])
    write(tmp_path / "d", f"test{kind}", [("d", 2)])
    (tmp_path / "d" / "labels.json").write_text(json.dumps(content))
    data = load(tmp_path / "d", tmp_path)
    assert (data.labels, data.train.labels) == (("cold", "warm", "hot"), ("cold", "hot", "cold"))
    assert data.notes == ("no training text has the label warm",)
    assert data.classes(data.eval).tolist() == [2]


def test_the_names_that_the_datasets_library_left_in_a_parquet_file_are_found(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["off", "on"])})
    (tmp_path / "d").mkdir()
    for name, texts in (("train", ["a", "b", "c"]), ("test", ["d", "e"])):
        split = datasets.Dataset.from_dict({"text": texts, "label": [0, 1, 0][: len(texts)]}, features=features)
        split.to_parquet(tmp_path / "d" / f"{name}.parquet")
    data = load(tmp_path / "d", tmp_path)
    assert (data.labels, data.train.labels) == (("off", "on"), ("off", "on", "off"))


def test_a_split_of_a_hub_data_set_brings_the_names_of_its_features():
    import datasets

    features = datasets.Features({"tweet": datasets.Value("string"), "hate": datasets.ClassLabel(names=["no", "yes"])})
    split = datasets.Dataset.from_dict({"tweet": ["a"], "hate": [1]}, features=features)
    side = hub_side("tweets", split, {"tweet": "--text-column", "hate": "--label-column"})
    assert (side.names, [row for _, row in side.rows]) == (("no", "yes"), [("a", 1)])
    with pytest.raises(UsageError, match=r"the data set tweets has no column 'tweets'.*did you mean 'tweet'"):
        hub_side("tweets", split, {"tweets": "--text-column", "hate": "--label-column"})


def test_the_fingerprint_names_texts_labels_and_sides(yes_no, tmp_path):
    first = load(yes_no, tmp_path).fingerprint
    assert load(yes_no, tmp_path).fingerprint == first
    assert load(yes_no, tmp_path, train_samples=3).fingerprint != first
    write(yes_no, "train.csv", [("good day", "no"), *TRAIN[1:]])
    assert load(yes_no, tmp_path).fingerprint != first


@pytest.mark.parametrize(
    ("train", "test", "more", "words"),
    [
        (TRAIN, TEST, {"text_column": "texts"}, "'texts' 'text' --text-column"),
        (TRAIN, TEST, {"label_column": "text"}, "both 'text'"),
        (TRAIN, [*TEST, ("odd night", "perhaps")], {}, "'perhaps' no training text"),
        ([("a", "yes")], [("c", "yes")], {}, "one label 'yes' two"),
        ([*TRAIN, ("text", None)], TEST, {}, "train.jsonl line 5 no label"),
        ([*TRAIN, ("text", 0.5)], TEST, {}, "line 5 'label' float"),
        (TRAIN, [(" ", "yes")], {}, "(test) no text"),
        ([], TEST, {}, "train"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, train, test, more, words):
    for name, rows in (("train.jsonl", train), ("test.jsonl", test)):
        write(tmp_path / "d", name, rows)
    with pytest.raises(UsageError) as error:
        load(tmp_path / "d", tmp_path, **more)
    assert all(word in str(error.value) for word in words.split())


FRAME = Frame(prefix=(2,), suffix=(3,), pad_id=0)


def tokens_of(lengths):
    """Samples that tell themselves apart: sample s holds the id 10 + s, as often as it is long, and is of class s."""
    ids = np.concatenate([np.full(length, 10 + sample, dtype=np.int32) for sample, length in enumerate(lengths)])
    starts = np.cumsum([0, *lengths])
    return Tokens(ids, starts, np.ones(len(ids), dtype=bool)), np.arange(len(lengths))


def test_a_batch_is_a_function_of_the_seed_and_its_index_alone():
    tokens, classes = tokens_of([3, 8, 1, 5, 4, 4, 9, 2, 7, 6])
    forward, backward = (LabelledBatches(tokens, classes, FRAME, 3, seed=1) for _ in range(2))
    some = [forward.batch(0, index) for index in range(7)]
    again = [backward.batch(0, index) for index in reversed(range(7))][::-1]
    for one, other in zip(some, again, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.labels, other.labels)
    for one in some:
        assert one.labels.tolist() == (one.input_ids[:, 1] - 10).tolist()
    other = LabelledBatches(tokens, classes, FRAME, 3, seed=2)
    assert any(not torch.equal(other.batch(0, index).input_ids, some[index].input_ids) for index in range(7))


def test_every_text_of_an_evaluation_is_there_once_with_its_own_label_and_mask():
    lengths = [3, 8, 0, 5, 4, 4, 9]
    tokens, classes = tokens_of(lengths)
    batches = LabelledEvaluation(tokens, classes, FRAME, batch_size=3)
    seen = []
    for number in range(len(batches)):
        batch = batches[number]
        for row in range(batch.num_samples):
            sample = int(batches.order[len(seen)])
            length = lengths[sample]
            ids = [2, *[10 + sample] * length, 3]
            assert batch.input_ids[row].tolist() == ids + [0] * (batch.input_ids.shape[1] - len(ids))
            assert batch.attention_mask[row].tolist() == [1] * len(ids) + [0] * (batch.input_ids.shape[1] - len(ids))
            assert int(batch.labels[row]) == sample
            seen.append(sample)
    assert sorted(seen) == list(range(7))


def test_a_long_text_is_cut_and_a_text_without_tokens_stays():
    texts = ["alpha beta gamma " * 20, "alpha", "\u200b"]
    tokenizer = train_wordpiece(texts, 64)
    tokens = tokenize_beginnings(texts, tokenizer, seq_len=10)
    assert tokens.lengths[0] == 8  # and [CLS] and [SEP]
    assert tokens.num_samples == 3
    whole = tokenizer(texts[0], truncation=True, max_length=10)["input_ids"]
    assert tokens.ids[:8].tolist() == whole[1:-1]


def test_hatecheck_scores_each_functionality_by_itself():
    cases = HateCheck(("a", "b", "c", "d"), ("slur_h", "slur_h", "slur_h", "negate_nh"), np.array([True] * 3 + [False]))
    assert cases.scores(np.array([True, False, True, True])) == {
        "accuracy": 0.5,
        "num_cases": 4,
        "functionalities": {
            "negate_nh": {"accuracy": 0.0, "num_cases": 1},
            "slur_h": {"accuracy": pytest.approx(2 / 3), "num_cases": 3},
        },
    }


def hatecheck_table(folder, rows):
    folder.mkdir()
    pd.DataFrame(rows).to_csv(folder / "test.csv", index=False)
    return folder


def test_hatecheck_is_read_from_a_folder_or_a_file(tmp_path):
    folder = hatecheck_table(tmp_path / "h", {"functionality": ["x_h", "y_nh"], "text": ["a", "b"], "label": [1, 0]})
    for place in (folder, folder / "test.csv"):
        cases = load_hatecheck(str(place))
        assert (cases.texts, cases.functionalities, cases.hateful.tolist()) == (
            ("a", "b"),
            ("x_h", "y_nh"),
            [True, False],
        )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not beside the repository (../shared/data)")
@pytest.mark.parametrize(
    ("name", "labels", "num_train", "num_test"),
    [
        ("hate_davidson/small", ("hate", "offensive", "neither"), 1000, 200),
        ("hate_hatexplain/small", ("normal", "offensive", "hate"), 700, 150),
        ("hate_tweeteval/small", ("not-hate", "hate"), 700, 150),
    ],
)
def test_the_shared_sets_have_their_names_and_sizes(tmp_path, name, labels, num_train, num_test):
    data = load(SHARED / name, tmp_path)
    assert (data.labels, data.split) == (labels, "test")
    left_out = sum(int(note.split()[0]) for note in data.notes)
    assert len(data.train.texts) + len(data.eval.texts) + left_out == num_train + num_test
    assert left_out <= 5


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not beside the repository (../shared/data)")
def test_the_shared_hatecheck_has_its_29_functionalities():
    cases = load_hatecheck(str(SHARED / "hatecheck"))
    assert (len(cases.texts), len(set(cases.functionalities)), int(cases.hateful.sum())) == (3728, 29, 2563)
    assert all(
        hateful != name.endswith("_nh") for name, hateful in zip(cases.functionalities, cases.hateful, strict=True)
    )
