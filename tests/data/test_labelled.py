"""Labelled texts: sides that share nothing, labels that have names, and every input that cannot be meant."""

import json

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.data import tables
from asyncsgd.data.corpora import limited
from asyncsgd.data.labelled import LABELLED, load_labelled
from asyncsgd.data.tables import Documents
from asyncsgd.errors import UsageError
from asyncsgd.tasks.hatecheck import Case, load_hatecheck, scores
from asyncsgd.tasks.token_classification import TAGGED

TRAIN = [("good day", "yes"), ("bad day", "no"), ("fine day", "yes"), ("poor day", "no")]
TEST = [("good night", "yes"), ("bad night", "no")]
SENTENCES = [(["Li", "ran"], ["B-PER", "O"]), (["in", "New", "York"], ["O", "B-LOC", "I-LOC"])]
SCORED = [(["York", "ran"], ["B-LOC", "O"])]
LABELS, TAGS = ("text", "label"), ("tokens", "ner_tags")


def write(folder, name, rows, columns=LABELS):
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows, columns=list(columns))
    if name.endswith(".csv"):
        table.to_csv(folder / name, index=False)
    elif name.endswith(".jsonl"):
        (folder / name).write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    else:
        table.to_parquet(folder / name)
    return folder


def load(path, columns=LABELS, **more):
    flags = ("--text-column", "--label-column") if columns != TAGS else ("--tokens-column", "--tags-column")
    kind = TAGGED if columns[0] == "tokens" else LABELLED
    return load_labelled(str(path), dict(zip(columns, flags, strict=True)), kind, **more)


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_a_folder_is_read_the_same_from_every_kind_of_file(tmp_path, kind):
    for side, rows in (("train", TRAIN), ("test", TEST)):
        write(tmp_path / "d", f"{side}{kind}", rows)
    data = load(tmp_path / "d")
    assert data.train == Documents(*zip(*TRAIN, strict=True))
    assert data.eval == Documents(*zip(*TEST, strict=True))
    assert (data.name, data.split, data.labels, data.notes) == ("d", "test", ("no", "yes"), ())
    if kind == ".csv":
        return
    for side, of in (("train", SENTENCES), ("test", SCORED)):
        write(tmp_path / "s", f"{side}{kind}", of, TAGS)
    data = load(tmp_path / "s", TAGS)
    assert (data.train.texts, data.eval.texts) == (("Li ran", "in New York"), ("York ran",))
    assert (data.labels, data.notes) == (("B-LOC", "B-PER", "I-LOC", "O"), ())
    assert data.train.labels == ('["B-PER", "O"]', '["O", "B-LOC", "I-LOC"]')


def test_test_is_scored_where_it_is_there_and_validation_otherwise_or_when_asked_for(tmp_path):
    for side, rows in (("train", TRAIN), ("test", TEST), ("validation", [("so so day", "no")])):
        write(tmp_path, f"{side}.csv", rows)
    assert load(tmp_path).split == "test"
    assert load(tmp_path, split="validation").eval.texts == ("so so day",)
    (tmp_path / "test.csv").unlink()
    assert load(tmp_path).split == "validation"
    with pytest.raises(UsageError, match="has no test split to score on; drop --split"):
        load(tmp_path, split="test")


def test_of_one_file_a_twentieth_is_set_aside_by_the_texts_alone(tmp_path):
    rows = [(f"text number {number}", "odd" if number % 2 else "even") for number in range(400)]
    one = load(write(tmp_path / "a", "posts.csv", rows) / "posts.csv")
    other = load(write(tmp_path / "b", "posts.csv", rows[::-1]) / "posts.csv")
    assert set(one.eval.texts) == set(other.eval.texts)
    assert 8 <= len(one.eval.texts) <= 36
    assert {*one.train.texts, *one.eval.texts} == {text for text, _ in rows}
    assert len(one.train.texts) + len(one.eval.texts) == 400
    with pytest.raises(UsageError, match="no validation split to score on"):
        load(tmp_path / "a" / "posts.csv", split="validation")


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
    for side, rows in (("train", [("a", 0), ("b", 2), ("c", 0)]), ("test", [("d", 2)])):
        write(tmp_path, f"{side}{kind}", rows)
    (tmp_path / "labels.json").write_text(json.dumps(content))
    data = load(tmp_path)
    assert (data.labels, data.train.labels) == (("cold", "warm", "hot"), ("cold", "hot", "cold"))
    assert data.notes == ("no training text has the label warm",)


def test_the_names_that_the_datasets_library_left_are_found_in_parquet_files_and_on_the_hub(tmp_path, monkeypatch):
    names = ["O", "B-PER", "B-LOC", "I-LOC", "I-PER"]
    numbers = [(words, [names.index(tag) for tag in tags]) for words, tags in SENTENCES]
    label, text = datasets.ClassLabel(names=names), datasets.Value("string")
    for columns, rows, kinds in (
        (LABELS, [("a", 1), ("b", 2)], (text, label)),
        (TAGS, numbers, (datasets.List(text), datasets.List(label))),
        (TAGS, numbers, (datasets.Sequence(text), datasets.Sequence(label))),
    ):
        features = datasets.Features(dict(zip(columns, kinds, strict=True)))
        splits = {}
        for side, of in (("train", rows), ("test", rows[:1])):
            values = dict(zip(columns, map(list, zip(*of, strict=True)), strict=True))
            if side == "test":
                values[columns[0]] = ["c" if columns == LABELS else ["ran", "Li"]]
            splits[side] = datasets.Dataset.from_dict(values, features=features)
            splits[side].to_parquet(tmp_path / f"{side}.parquet")
        monkeypatch.setattr(tables, "hub_splits", lambda data, splits=splits: splits)
        for data in (load(tmp_path, columns), load("hub:named", columns)):
            assert data.labels == tuple(names)
            assert data.train.labels[0] == ("B-PER" if columns == LABELS else '["B-PER", "O"]')


def test_what_is_left_out_is_counted(tmp_path):
    write(tmp_path, "train.jsonl", [*SENTENCES, *SCORED, ([], []), ([" "], ["O"]), (["a b"], ["I-LOC"])], TAGS)
    write(tmp_path, "test.jsonl", SCORED, TAGS)
    data = load(tmp_path, TAGS)
    assert data.train.texts == ("Li ran", "in New York", "a\u00a0b")  # a space in a word does not part it
    assert data.notes == (
        f"2 rows of {tmp_path.name} (train) without words are left out",
        "1 training sentences that are test sentences too are left out",
    )
    less = load(tmp_path, TAGS, limits=(1, 0))
    assert less.train.texts == ("Li ran",)
    assert less.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("columns", "train", "test", "asked", "words"),
    [
        (LABELS, TRAIN, TEST, ("texts", "label"), "'texts' 'text' --text-column"),
        (LABELS, TRAIN, [*TEST, ("odd night", "perhaps")], LABELS, "'perhaps' no training text"),
        (LABELS, [("a", "yes")], [("c", "yes")], LABELS, "two labels 'yes' --label-column"),
        (LABELS, [*TRAIN, ("text", None)], TEST, LABELS, "train.jsonl line 5 None --label-column"),
        (LABELS, [*TRAIN, ("text", 0.5)], TEST, LABELS, "line 5 'label' 0.5"),
        (LABELS, TRAIN, [(" ", "yes")], LABELS, "(test) no text"),
        (LABELS, [], TEST, LABELS, "train"),
        (TAGS, SENTENCES, SCORED, ("tokens", "tags"), "'tags'"),
        (TAGS, [*SENTENCES, (["a"], ["O", "O"])], SCORED, TAGS, "line 3 1 words 2 tags"),
        (TAGS, SENTENCES, [(["a"], ["B-ORG"])], TAGS, "'B-ORG' no training word"),
        (TAGS, SENTENCES, [(["a"], ["S-LOC"])], TAGS, "line 1 'S-LOC' BIO"),
        (TAGS, [(["a"], [1])], SCORED, TAGS, "line 1 '1' BIO labels.json"),
        (TAGS, [("Li ran", ["O"])], SCORED, TAGS, "'tokens' list --tokens-column"),
        (TAGS, SCORED, SCORED, TAGS, "no training word"),
        (TAGS, [([], [])], SCORED, TAGS, "(train) no sentence"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, columns, train, test, asked, words):
    for name, rows in (("train.jsonl", train), ("test.jsonl", test)):
        write(tmp_path, name, rows, columns)
    with pytest.raises(UsageError) as error:
        load(tmp_path, asked)
    assert all(word in str(error.value) for word in words.split())


def test_hatecheck_is_read_from_a_folder_or_a_file_and_scores_each_functionality_by_itself(tmp_path):
    names = ("slur_h", "slur_h", "slur_h", "negate_nh")
    cases = [Case(name, "a", not name.endswith("_nh")) for name in names]
    rows = [(name, "a", int(hateful)) for name, _, hateful in cases]
    write(tmp_path / "h", "test.csv", rows, ("functionality", "text", "label"))
    for place in (tmp_path / "h", tmp_path / "h" / "test.csv"):
        assert load_hatecheck(str(place)) == cases
    assert scores(cases, np.array([True, False, True, True])) == {
        "accuracy": 0.5,
        "num_cases": 4,
        "functionalities": {
            "negate_nh": {"accuracy": 0.0, "num_cases": 1},
            "slur_h": {"accuracy": pytest.approx(2 / 3), "num_cases": 3},
        },
    }
