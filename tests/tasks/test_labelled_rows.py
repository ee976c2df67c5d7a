"""What rows of labelled texts mean: pairs, several labels in three spellings, numbers, and what is refused."""

import json

import pytest
import torch
import transformers
from gallery import write_tables

from asyncsgd.errors import UsageError
from asyncsgd.tasks.classification import Classification

PAIRS = ["first,second,label", 'a,"say ""b"", c",x', "b,,y", 'c,"a\nb",x', "d, e ,y"]


def table(folder, **sides):
    """A folder with a CSV file, a list of lines, or a JSON Lines file, a list of objects, for each side."""
    folder.mkdir(exist_ok=True)
    for side, rows in sides.items():
        if isinstance(rows[0], str):
            (folder / f"{side}.csv").write_text("\n".join(rows))
        else:
            write_tables(folder, **{side: rows})
    return folder


def read(folder, **values):
    """The corpus of a task, and what the task says of it at the start."""
    task = Classification(data_name=str(folder), seq_len=16, **values)
    return task.read(folder), task


def texts(documents):
    return [tuple(json.loads(text)) for text in documents.texts]


def test_pairs_keep_odd_quoting_and_empty_texts_and_only_equal_pairs_are_the_same(tmp_path):
    test = ["first,second,label", "b,,y", "d,other,x", "a,new,x"]
    folder = table(tmp_path / "p", train=PAIRS, test=test)
    corpus, task = read(folder, text_column="first", text_pair_column="second")
    # ("b", "") stands on both sides and is scored; "a" and "d" stand on both sides in other pairs.
    assert texts(corpus.train) == [("a", 'say "b", c'), ("c", "a\nb"), ("d", "e")]
    assert corpus.train.labels == ("x", "x", "y")
    assert corpus.notes[-1:] == ("1 training pairs that are test pairs too are left out",)
    notes = task.prepare(0, tmp_path / "cache").facts()["notes"]
    assert "2 single texts stand in pairs of both sides; no pair does" in notes


def test_a_missing_text_of_a_pair_is_left_out_and_counted_and_an_empty_one_stays(tmp_path):
    rows = []
    for text, other, label in (("a", None, "x"), ("", "b", "x"), ("c", "", "y"), ("", "", "y")):
        rows.append({"text": text, "other": other, "label": label})
    test = [{"text": "t", "other": "u", "label": "x"}]
    folder = table(tmp_path / "p", train=rows, test=test)
    corpus, _ = read(folder, text_pair_column="other")
    assert texts(corpus.train) == [("", "b"), ("c", "")]
    assert corpus.notes[1:] == ("2 rows of p (train) without two texts are left out",)


ROWS = [
    {"text": "a", "list": ["x", "y"], "joined": "x; y", "x": 1, "y": 1},
    {"text": "b", "list": [], "joined": "", "x": 0, "y": 0},
    {"text": "c", "list": ["y", "y"], "joined": " y ", "x": False, "y": True},
]


@pytest.mark.parametrize(
    "values",
    [{"label_column": "list"}, {"label_column": "joined", "label_separator": ";"}, {"label_column": "x,y"}],
    ids=["list", "separator", "columns"],
)
def test_several_labels_are_a_list_a_text_or_columns_and_none_is_a_legal_row(values, tmp_path):
    test = [row | {"text": f"{row['text']} again"} for row in ROWS]
    folder = table(tmp_path / "p", train=ROWS, test=test)
    corpus, task = read(folder, labels="multi", **values)
    assert corpus.labels == ("x", "y")
    assert corpus.train.labels == ('["x", "y"]', "[]", '["y"]')
    prepared = task.prepare(0, tmp_path / "cache")
    batch = prepared.data(0).evaluation["main"][0]
    assert batch["labels"].tolist() == [[1, 1], [0, 0], [0, 1]]
    assert prepared.weight(batch) == 6.0


def test_an_empty_entry_of_a_list_is_no_label(tmp_path):
    rows = []
    for text, labels in (("a", ["x", ""]), ("b", [""]), ("c", ["y", None])):
        rows.append({"text": text, "label": labels})
    folder = table(tmp_path / "p", train=rows, test=[{"text": "d", "label": ["y"]}])
    corpus, _ = read(folder, labels="multi")
    assert corpus.labels == ("x", "y")
    assert corpus.train.labels == ('["x"]', "[]", '["y"]')


def test_a_set_whose_columns_of_labels_are_empty_is_predicted(tmp_path):
    header = "text,x,y"
    train = [header, "a,1,0", "b,0,1"]
    folder = table(tmp_path / "p", train=train, dev=[header, "c,1,1"], unlabelled=[header, "d,,", "e, ,"])
    sets = (f"{folder}/dev.csv", f"{folder}/unlabelled.csv")
    corpus, _ = read(f"{folder}/train.csv", labels="multi", label_column="x,y", eval_data=sets)
    assert corpus.eval.labels == ('["x", "y"]',)
    (unlabelled,) = corpus.sets
    assert unlabelled.documents.texts == ("d", "e")
    assert not unlabelled.has_labels


def test_a_list_of_named_labels_that_are_kept_back_is_predicted(tmp_path):
    rows = [{"text": "a", "label": [0]}, {"text": "b", "label": []}, {"text": "c", "label": [0, 1]}]
    folder = table(tmp_path / "p", train=rows, test=[{"text": "d", "label": [-1]}, {"text": "e", "label": [1]}])
    (folder / "labels.json").write_text('["x", "y"]')
    corpus, _ = read(folder, labels="multi")
    assert corpus.train.labels == ('["x"]', "[]", '["x", "y"]')
    assert corpus.eval.texts == ("e",)


def test_names_that_no_text_has_stay_and_a_class_that_only_the_evaluation_has_is_refused_with_its_row(tmp_path):
    folder = table(tmp_path / "p", train=PAIRS, test=["first,second,label", "s,t,x", "u,v,z"])
    columns = {"text_column": "first", "text_pair_column": "second"}
    with pytest.raises(UsageError, match=r"no training pair has the label 'z', .* \(first in .*test.csv, row 2\)"):
        read(folder, **columns)
    (folder / "labels.json").write_text('["x", "y", "nobody"]')
    (folder / "test.csv").write_text("first,second,label\ns,t,x")
    corpus, _ = read(folder, **columns)
    assert corpus.labels == ("x", "y", "nobody")
    assert "no training pair has the label nobody" in corpus.notes


def test_a_corrected_number_of_a_further_set_is_what_the_set_is_scored_on(tmp_path):
    folder = table(tmp_path / "p", train=[{"text": "a", "label": 1}], dev=[{"text": "b", "label": 2}])
    for number in (3.0, 4.0):
        table(folder, more=[{"text": "c", "label": number}])
        sets = (f"{folder}/dev.jsonl", f"{folder}/more.jsonl")
        _, task = read(f"{folder}/train.jsonl", labels="number", eval_data=sets)
        batch = task.prepare(0, tmp_path).data(0).evaluation["more"][0]
        assert batch["labels"].tolist() == [number]


def test_numbers_are_taken_as_they_are_and_missing_ones_are_left_out(tmp_path):
    rows = [{"text": "a", "label": -1}, {"text": "b", "label": "2.5"}, {"text": "c", "label": None}]
    folder = table(tmp_path / "p", train=rows, test=[{"text": "d", "label": 4}])
    corpus, task = read(folder, labels="number")
    assert corpus.train.labels == ("-1.0", "2.5")
    assert corpus.eval.labels == ("4.0",)
    assert corpus.labels == ()
    assert "1 rows of p (train) without text and a number are left out" in corpus.notes
    assert task.prepare(0, tmp_path / "cache").facts()["labels"] == ["label"]
    for odd in ("three", True, float("inf")):
        table(tmp_path / "p", test=[{"text": "d", "label": odd}])
        with pytest.raises(UsageError, match=r"line 1: column 'label' holds .* no finite number"):
            read(tmp_path / "p", labels="number")


def test_a_number_of_minus_100_has_a_loss_as_any_other(tmp_path):
    rows = []
    for text, number in (("a", -100), ("b", 2), ("c", -100)):
        rows.append({"text": text, "label": number})
    folder = table(tmp_path / "p", train=[{"text": "d", "label": 1}], test=rows)
    _, task = read(folder, labels="number")
    task = task.prepare(0, tmp_path / "cache")
    batch = task.data(0).evaluation["main"][0]
    outputs = torch.tensor([[1.0], [2.0], [3.0]])
    loss = task.sums(outputs, batch)["loss"] / task.weight(batch)
    assert loss == (101**2 + 103**2) / 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"labels": "number", "class_weights": True}, "--class-weights is for --labels single, not for number"),
        ({"labels": "multi", "hatecheck": "cases"}, "--hatecheck is for --labels single, not for multi"),
        ({"labels": "multi", "positive": "x"}, "--positive is for --labels single"),
        ({"label_separator": ";"}, "--label-separator is for --labels multi"),
        ({"labels": "number", "score": "f1"}, "its scores are pearson, spearman, mse"),
        ({"score": "f1"}, "name it with --positive LABEL"),
        ({"text_pair_column": "b", "hatecheck": "cases"}, "--hatecheck holds single texts"),
        ({"labels": "multi", "data_name": "pydocs"}, "does nothing for --data pydocs"),
        ({"labels": "number", "data_name": "pydocs:pairs"}, "does nothing for --data pydocs:pairs"),
        ({"text_column": "b", "data_name": "pydocs:pairs"}, "--text-column does nothing for --data pydocs:pairs"),
        ({"hatecheck": "cases", "data_name": "pydocs:pairs"}, "and --data pydocs:pairs makes pairs"),
        ({"hatecheck": "cases", "encoding": "latin-1"}, "--encoding and --quoting are not for --hatecheck"),
    ],
)
def test_what_does_nothing_for_a_kind_of_labels_is_refused(values, said):
    with pytest.raises(UsageError, match=said):
        Classification(**{"data_name": "somewhere", **values})


def test_a_column_that_is_named_twice_or_no_label_is_refused(tmp_path):
    folder = table(tmp_path / "p", train=PAIRS, test=["first,second,label", "s,t,x"])
    with pytest.raises(UsageError, match="a column is named twice"):
        read(folder, text_column="first", text_pair_column="first")
    with pytest.raises(UsageError, match=r"holds 'x', and --labels multi takes a list, a text with --label-separator"):
        read(folder, text_column="first", labels="multi")
    with pytest.raises(UsageError, match=r"row 1: column 'second' holds .* a column of several labels holds 0 and 1"):
        read(folder, text_column="first", labels="multi", label_column="second,label")
    task = Classification(data_name=str(folder), text_column="first", positive="w")
    with pytest.raises(UsageError, match="--positive w is no label; the labels are x, y"):
        task.prepare(0, tmp_path)


@pytest.mark.parametrize("labels", ["single", "multi", "number"])
def test_pipeline_of_transformers_reads_the_saved_model(labels, tmp_path):
    rows = []
    for index, row in enumerate(ROWS):
        rows.append(row | {"number": index / 2, "one": "xy"[index % 2]})
    folder = table(tmp_path / "p", train=rows, test=[rows[0] | {"text": "z"}])
    column = {"single": "one", "multi": "list", "number": "number"}[labels]
    task = Classification(data_name=str(folder), labels=labels, label_column=column).prepare(0, tmp_path)
    task.save(task.model(0), tmp_path / labels)
    classify = transformers.pipeline("text-classification", str(tmp_path / labels), top_k=None, device="cpu")
    (said,) = classify(["a b"])
    scores = {one["label"]: one["score"] for one in said}
    if labels == "number":
        assert set(scores) == {"number"}
    else:
        assert set(scores) == {"x", "y"}
    is_distribution = sum(scores.values()) == pytest.approx(1.0)
    assert is_distribution == (labels == "single")
