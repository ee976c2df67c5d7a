"""Labelled texts: sides that share nothing, labels that have names, and every input that cannot be meant."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.data import tables
from asyncsgd.data.corpora import limited
from asyncsgd.data.labelled import load_labelled
from asyncsgd.data.tables import Documents
from asyncsgd.errors import UsageError
from asyncsgd.tasks.hatecheck import Case, load_hatecheck, scores
from asyncsgd.tasks.token_classification import TAGGED

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
    text, label = more.pop("text_column", "text"), more.pop("label_column", "label")
    return load_labelled(
        str(path), {text: "--text-column", label: "--label-column"}, cache_dir=tmp_path / "cache", **more
    )


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


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_limit_takes_so_many_texts_evenly_and_in_their_order(total, limit):
    documents = Documents(tuple(map(str, range(total))), ("x",) * total)
    kept = [int(text) for text in limited(documents, limit).texts]
    assert len(kept) == min(limit, total)
    assert kept == sorted(set(kept))
    gaps = np.diff([*kept, total])
    assert gaps.max(initial=0) - gaps.min(initial=total) <= 1


@pytest.mark.parametrize("content", [["cold", "warm", "hot"], {"0": "cold", "1": "warm", "2": "hot"}])
@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_labels_json_names_the_numbers(tmp_path, content, kind):
    write(tmp_path / "d", f"train{kind}", [("a", 0), ("b", 2), ("c", 0)])
    write(tmp_path / "d", f"test{kind}", [("d", 2)])
    (tmp_path / "d" / "labels.json").write_text(json.dumps(content))
    data = load(tmp_path / "d", tmp_path)
    assert (data.labels, data.train.labels) == (("cold", "warm", "hot"), ("cold", "hot", "cold"))
    assert data.notes == ("no training text has the label warm",)


def test_the_names_that_the_datasets_library_left_in_a_parquet_file_are_found(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["off", "on"])})
    (tmp_path / "d").mkdir()
    for name, texts in (("train", ["a", "b", "c"]), ("test", ["d", "e"])):
        split = datasets.Dataset.from_dict({"text": texts, "label": [0, 1, 0][: len(texts)]}, features=features)
        split.to_parquet(tmp_path / "d" / f"{name}.parquet")
    data = load(tmp_path / "d", tmp_path)
    assert (data.labels, data.train.labels) == (("off", "on"), ("off", "on", "off"))


def test_a_hub_data_set_brings_its_splits_and_the_names_of_its_features(tmp_path, monkeypatch):
    import datasets

    features = datasets.Features({"tweet": datasets.Value("string"), "hate": datasets.ClassLabel(names=["no", "yes"])})
    splits = {
        side: datasets.Dataset.from_dict({"tweet": texts, "hate": [1, 0][: len(texts)]}, features=features)
        for side, texts in (("train", ["a", "b"]), ("test", ["c"]))
    }
    monkeypatch.setattr(tables, "hub_splits", lambda data: splits)
    data = load("hub:tweets", tmp_path, text_column="tweet", label_column="hate")
    assert (data.name, data.labels, data.split) == ("hub:tweets", ("no", "yes"), "test")
    assert (data.train.texts, data.train.labels, data.eval.labels) == (("a", "b"), ("yes", "no"), ("yes",))
    with pytest.raises(UsageError, match=r"the data set tweets has no column 'tweets'.*did you mean 'tweet'"):
        load("hub:tweets", tmp_path, text_column="tweets", label_column="hate")


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


def test_hatecheck_scores_each_functionality_by_itself():
    names = ("slur_h", "slur_h", "slur_h", "negate_nh")
    cases = [Case(name, "a", not name.endswith("_nh")) for name in names]
    assert scores(cases, np.array([True, False, True, True])) == {
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
        assert load_hatecheck(str(place)) == [("x_h", "a", True), ("y_nh", "b", False)]


SENTENCES = [(["Li", "ran"], ["B-PER", "O"]), (["in", "New", "York"], ["O", "B-LOC", "I-LOC"])]
SCORED = [(["York", "ran"], ["B-LOC", "O"])]


def write_sentences(folder, name, rows, columns=("tokens", "ner_tags")):
    folder.mkdir(parents=True, exist_ok=True)
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    if name.endswith(".jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, values)))
    else:
        pytest.importorskip("pandas").DataFrame(values).to_parquet(folder / name)


def load_tagged(folder, tags_column="ner_tags", **more):
    return load_labelled(str(folder), {"tokens": "--tokens-column", tags_column: "--tags-column"}, TAGGED, **more)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_folder_of_sentences_is_read_the_same_from_every_kind_of_file(tmp_path, kind):
    write_sentences(tmp_path / "d", f"train{kind}", SENTENCES)
    write_sentences(tmp_path / "d", f"test{kind}", SCORED)
    data = load_tagged(tmp_path / "d")
    assert data.train.texts == ("Li ran", "in New York")
    assert data.eval.texts == ("York ran",)
    assert (data.name, data.split, data.labels, data.notes) == ("d", "test", ("B-LOC", "B-PER", "I-LOC", "O"), ())
    assert data.train.labels == ('["B-PER", "O"]', '["O", "B-LOC", "I-LOC"]')


def test_tags_that_are_numbers_get_their_names_from_labels_json_or_from_the_feature(tmp_path):
    names = ["O", "B-PER", "B-LOC", "I-LOC", "I-PER"]
    numbers = [(words, [names.index(tag) for tag in tags]) for words, tags in SENTENCES]  # type: ignore[attr-defined]
    test = [(["York", "ran"], [2, 0])]
    write_sentences(tmp_path / "json", "train.jsonl", numbers)
    write_sentences(tmp_path / "json", "test.jsonl", test)
    with pytest.raises(UsageError, match=r"line 1: '1' is no BIO tag.*numbers need names, in labels.json"):
        load_tagged(tmp_path / "json")
    (tmp_path / "json" / "labels.json").write_text(json.dumps(names))
    datasets = pytest.importorskip("datasets")
    (tmp_path / "feature").mkdir()
    for kind in (datasets.Sequence, datasets.List):
        features = datasets.Features(
            tokens=kind(datasets.Value("string")), ner_tags=kind(datasets.ClassLabel(names=names))
        )
        for side, rows in (("train", numbers), ("test", test)):
            columns = dict(zip(("tokens", "ner_tags"), map(list, zip(*rows, strict=True)), strict=True))
            datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "feature" / f"{side}.parquet")
        for folder in ("json", "feature"):
            data = load_tagged(tmp_path / folder)
            assert data.labels == tuple(names)
            assert data.train.labels == ('["B-PER", "O"]', '["O", "B-LOC", "I-LOC"]')
            assert data.notes == ("no training word has the tag I-PER",)


def test_sentences_that_are_left_out_are_counted(tmp_path):
    write_sentences(tmp_path, "train.jsonl", [*SENTENCES, *SCORED, ([], []), ([" "], ["O"])])
    write_sentences(tmp_path, "test.jsonl", SCORED)
    data = load_tagged(tmp_path)
    assert data.train.texts == ("Li ran", "in New York")
    assert data.notes == (
        f"2 rows of {tmp_path.name} (train) without words are left out",
        "1 training sentences that are test sentences too are left out",
    )
    assert load_tagged(tmp_path, limits=(1, 0)).train.texts == ("Li ran",)
    assert load_tagged(tmp_path, limits=(1, 0)).fingerprint != data.fingerprint


def test_an_i_without_a_b_is_read_and_a_space_in_a_word_does_not_part_it(tmp_path):
    write_sentences(tmp_path, "train.jsonl", [(["New York", "ran"], ["I-LOC", "O"]), (["a"], ["O"])])
    write_sentences(tmp_path, "test.jsonl", [(["Bern"], ["I-LOC"])])
    assert load_tagged(tmp_path).train.texts[0] == "New\u00a0York ran"


@pytest.mark.parametrize(
    ("train", "test", "more", "words"),
    [
        (SENTENCES, SCORED, {"tags_column": "tags"}, "'tags' --tags-column"),
        ([*SENTENCES, (["a"], ["O", "O"])], SCORED, {}, "line 3 1 words 2 tags"),
        (SENTENCES, [(["a"], ["B-ORG"])], {}, "'B-ORG' no training word"),
        (SENTENCES, [(["a"], ["S-LOC"])], {}, "line 1 'S-LOC' BIO"),
        ([("Li ran", ["O"])], SCORED, {}, "'tokens' list --tokens-column"),
        ([(["Li"], ["O"])], [(["a"], ["O"])], {}, "one tag 'O'"),
        (SCORED, SCORED, {}, "no training sentence"),
        ([([], [])], SCORED, {}, "(train) no sentence"),
        (SENTENCES, SCORED, {"split": "validation"}, "validation --split"),
    ],
)
def test_sentences_that_cannot_be_meant_are_refused(tmp_path, train, test, more, words):
    write_sentences(tmp_path, "train.jsonl", train)
    write_sentences(tmp_path, "test.jsonl", test)
    with pytest.raises(UsageError) as error:
        load_tagged(tmp_path, **more)
    assert all(word in str(error.value) for word in words.split())
