"""Files as people have them: class names that are numbers, folders of the Hub, odd tables, encodings, packed files."""

import csv
import gzip
import io
import json
import random
import sys
import tracemalloc

import datasets
import pandas as pd
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsgd.data.corpora import load_corpus
from asyncsgd.data.files import KINDS, Reading, read_table
from asyncsgd.data.folders import splits_of
from asyncsgd.data.kinds import LABELLED, PLAIN
from asyncsgd.errors import UsageError

TEXT = {"text": "--text-column"}
LABELS = {"text": "--text-column", "label": "--label-column"}
CLASSES = ["one", "two", "three"]


def parquet(path, labels, names=None, word="train"):
    """A table as the Hugging Face library writes it, with a ClassLabel where there are names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if names is None:
        kind = datasets.Value("int64")
    else:
        kind = datasets.ClassLabel(names=names)
    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    texts = [f"the {word} text {number}" for number in range(len(labels))]
    datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features).to_parquet(path)
    return path.parent


def table(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row + "\n" for row in rows))
    return path.parent


def rows_of(path, columns, *reading):
    """The rows of a file, without their places."""
    return [row for _, row in read_table(path, columns, *reading)]


def labelled(folder, **more):
    return load_corpus(str(folder), LABELS, LABELLED, **more)


@given(
    names=st.permutations(["0", "1", "2", "3", "10", "-1"]).map(lambda names: names[:3]),
    labels=st.lists(st.integers(0, 2), min_size=6, max_size=12).filter(lambda labels: len(set(labels)) == 3),
)
@settings(deadline=None, max_examples=8)
def test_a_number_is_an_index_of_the_names_even_where_names_are_numbers(names, labels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    parquet(folder / "train.parquet", labels, names)
    parquet(folder / "test.parquet", labels[:3], names, "test")
    library = datasets.ClassLabel(names=names)
    corpus = labelled(folder)
    assert corpus.labels == tuple(names)
    assert corpus.train.labels == tuple(library.int2str(label) for label in labels)


def test_whole_numbers_beside_a_missing_label_are_whole_numbers(tmp_path):
    names = ["cold", "warm"]
    numbers = [0, 1, 1]
    texts = ["early morning", "midday sun", "late noon"]
    pd.DataFrame({"text": texts, "label": numbers}).to_parquet(tmp_path / "train.parquet")
    scored = pd.DataFrame({"text": ["one day", "another day", "some day"], "label": [1, None, 0]})
    assert scored["label"].dtype == float  # so pandas holds a missing number
    scored.to_parquet(tmp_path / "test.parquet")
    corpus = labelled(tmp_path)
    assert corpus.labels == ("0", "1")
    assert corpus.eval.texts == ("one day", "some day")
    assert corpus.eval.labels == ("1", "0")
    (tmp_path / "labels.json").write_text(json.dumps(names))
    assert labelled(tmp_path).eval.labels == ("warm", "cold")


@pytest.mark.parametrize(
    ("names", "values", "read"),
    [
        (["no", "yes"], ["0", "yes", "1", "no"], ("no", "yes", "yes", "no")),
        (["1", "2"], ["1", "2", "2", "1"], ("1", "2", "2", "1")),
        (None, ["1", "2", "3", "1"], ("1", "2", "3", "1")),
        (None, ["1", "--1", "--1", "1"], ("1", "--1", "--1", "1")),
        (None, ["1", "-1", "10", "1"], ("1", "-1", "10", "1")),
    ],
)
def test_a_text_is_a_name_and_an_index_only_where_no_name_is_a_number(tmp_path, names, values, read):
    table(tmp_path / "train.csv", "text,label", *(f"train {n},{value}" for n, value in enumerate(values)))
    table(tmp_path / "test.csv", "text,label", f"test,{values[0]}")
    if names:
        (tmp_path / "labels.json").write_text(json.dumps(names))
    corpus = labelled(tmp_path)
    assert corpus.train.labels == read
    numbers = all(name.removeprefix("-").isdigit() for name in read)
    assert corpus.labels == tuple(names or sorted(set(read), key=int if numbers else str))


def test_a_text_that_is_no_name_among_names_that_are_numbers_is_refused(tmp_path):
    table(tmp_path / "train.csv", "text,label", "a,1", "b,0")
    (tmp_path / "labels.json").write_text('["1", "2"]')
    with pytest.raises(UsageError, match=r"row 2: label '0' has no name.*; the labels are 1, 2"):
        labelled(tmp_path)


@pytest.mark.parametrize("unlabelled", ["marked", "missing", "no column"])
def test_a_split_without_labels_is_not_scored_on_and_validation_is(tmp_path, unlabelled):
    parquet(tmp_path / "train.parquet", [0, 1, -1, 2, 1], CLASSES)
    parquet(tmp_path / "validation.parquet", [1, -1, 2], CLASSES, "validation")
    values = {"marked": [-1, -1], "missing": [None, None], "no column": [0, 0]}[unlabelled]
    parquet(tmp_path / "test.parquet", values, CLASSES, "test")
    if unlabelled == "no column":
        frame = pd.read_parquet(tmp_path / "test.parquet")
        frame[["text"]].to_parquet(tmp_path / "test.parquet")
    corpus = labelled(tmp_path)
    assert corpus.split == "validation"
    assert corpus.eval.labels == ("two", "three")
    assert corpus.train.labels == ("one", "two", "three", "two")
    name = tmp_path.name
    assert corpus.notes[1:] == (
        f"1 rows of {name} (train) without a label are left out",
        f"the test split of {name} has no labels, so it is not scored on",
        f"1 rows of {name} (validation) without a label are left out",
    )
    with pytest.raises(UsageError, match=r"the test split of .* has no labels to score on; drop --split"):
        labelled(tmp_path, split="test")


def test_a_set_that_is_not_scored_on_may_have_any_labels(tmp_path):
    table(tmp_path / "train.csv", "text,label", "a,no", "b,yes", "c,no")
    table(tmp_path / "validation.csv", "text,label", "v,no")
    table(tmp_path / "test.csv", "text,label", "b,?", "t,perhaps")
    (tmp_path / "labels.json").write_text('["no", "yes"]')
    with pytest.raises(UsageError, match=r"test.csv, row 1: label '\?' has no name"):
        labelled(tmp_path)
    with pytest.raises(UsageError, match="2 labels are needed"):
        labelled(tmp_path, split="validation")  # since b is a text of the test
    table(tmp_path / "test.csv", "text,label", "c,?", "t,perhaps")
    corpus = labelled(tmp_path, split="validation")
    assert corpus.train.texts == ("a", "b")
    assert corpus.eval.texts == ("v",)


def test_minus_one_is_a_class_where_labels_have_no_names_and_training_has_it(tmp_path):
    parquet(tmp_path / "train.parquet", [-1, 0, 1, -1])
    parquet(tmp_path / "test.parquet", [-1, -1], word="test")
    corpus = labelled(tmp_path)
    assert corpus.labels == ("-1", "0", "1")
    assert corpus.split == "test"
    assert corpus.eval.labels == ("-1", "-1")


LAYOUTS = {
    "shards in data": ["data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"],
    "shards": ["train-00000-of-00001", "validation-00000-of-00001", "test-00000-of-00001"],
    "folders": ["train/a", "train/b", "test/a", "validation/c"],
    "plain names": ["train", "test", "valid"],
    "matched": [
        *("data/train-00000-of-00001", "data/validation_matched-00000-of-00001"),
        *("data/validation_mismatched-00000-of-00001", "data/test_matched-00000-of-00001"),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_laid_out_as_the_datasets_library_reads_it(tmp_path, layout):
    for number, name in enumerate(LAYOUTS[layout]):
        parquet(tmp_path / f"{name}.parquet", [0, 1, 2, 1], CLASSES, word=f"{name} {number}")
    (tmp_path / "dataset_infos.json").write_text("{}")
    table(tmp_path / "README.md", "a card")
    splits, left_out = splits_of(tmp_path, KINDS, {}, None)
    patterns = get_data_patterns(str(tmp_path))
    library = DataFilesDict.from_patterns(patterns, base_path=str(tmp_path))
    named = {str(split): sorted(files) for split, files in library.items()}
    assert {name: sorted(map(str, files)) for name, files in splits.items()} == named
    assert left_out == []


def test_no_text_of_an_evaluation_set_is_trained_on_whatever_the_layout(tmp_path):
    for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/validation-00000-of-00001"):
        parquet(tmp_path / f"{name}.parquet", [0, 1, 2], CLASSES, word=name)
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [0, 1], CLASSES, word="data/train-00001-of-00002")
    corpus = load_corpus(str(tmp_path), TEXT, PLAIN)
    assert [text.split()[1] for text in corpus.eval.texts] == ["data/validation-00000-of-00001"] * 3
    assert [text.rpartition(" ")[2] for text in corpus.train.texts] == ["0", "1", "2", "2"]
    assert corpus.notes == (
        f"{tmp_path.name} holds test: data/test-00000-of-00001.parquet; "
        "train: data/train-00000-of-00002.parquet, data/train-00001-of-00002.parquet; "
        "validation: data/validation-00000-of-00001.parquet",
        "2 training texts that are test texts too are left out",
    )
    assert labelled(tmp_path).split == "test"


def test_matched_and_mismatched_are_sets_of_their_own(tmp_path):
    for name in ("train", "validation_matched", "dev_mismatched"):
        parquet(tmp_path / f"{name}.parquet", [0, 1, 2], CLASSES, word=name)
    parquet(tmp_path / "test_matched.parquet", [-1, -1], CLASSES, word="test_matched")
    assert labelled(tmp_path).split == "dev_mismatched"
    corpus = labelled(tmp_path, split="validation_matched")
    assert {text.split()[1] for text in corpus.eval.texts} == {"validation_matched"}
    with pytest.raises(UsageError, match=r"has no validation_matche split .* did you mean 'validation_matched'"):
        labelled(tmp_path, split="validation_matche")


def test_a_number_makes_sets_of_their_own_and_behind_a_mark_shards_of_one(tmp_path):
    shards = ("test_a_1", "test_a_2", "test_part1", "test_shard-02", "test_b1-of-3")
    for name in ("train", "test_v1", "test_v2", *shards):
        table(tmp_path / f"{name}.csv", "text,label", "a,1")
    splits, _ = splits_of(tmp_path, KINDS, {}, None)
    assert splits.keys() == {"train", "test_v1", "test_v2", "test_a", "test", "test_b"}
    assert [path.stem for path in splits["test"]] == ["test_part1", "test_shard-02"]


@pytest.mark.parametrize("names", [["dev-blog", "rivers"], ["eval", "notes"], ["test", "validation_a"]])
def test_a_folder_in_which_nothing_is_called_train_is_read_whole(tmp_path, names):
    for name in names:
        table(tmp_path / f"{name}.txt", *(f"{name} line {number}" for number in range(200)))
    table(tmp_path / "README.txt", "about")
    corpus = load_corpus(str(tmp_path), TEXT, PLAIN)
    assert len(corpus.train.texts) + len(corpus.eval.texts) == 400
    assert corpus.notes[0] == f"{tmp_path.name} holds train: {names[0]}.txt, {names[1]}.txt"


def test_a_folder_is_read_without_the_datasets_library(tmp_path, monkeypatch):
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [0, 1, 2], CLASSES)
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [0, 1], CLASSES, "test")
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    corpus = labelled(tmp_path)
    assert corpus.train.labels == ("one", "two", "three")
    assert corpus.eval.labels == ("one", "two")


def test_several_configurations_in_subfolders_are_refused_by_name(tmp_path):
    for name in ("plain/train", "other/data/train-00000-of-00001"):
        parquet(tmp_path / f"{name}.parquet", [0, 1], CLASSES, word=name)
    for read in (labelled, lambda folder: load_corpus(str(folder), TEXT, PLAIN)):
        with pytest.raises(UsageError, match=r"in subfolders \(other, plain\); name one of them, e.g. .*other"):
            read(tmp_path)
    corpus = load_corpus(str(tmp_path / "plain"), TEXT, PLAIN, eval_data=str(tmp_path / "other"))
    assert {text.split()[1] for text in corpus.train.texts} == {"plain/train"}
    assert {text.split()[1] for text in corpus.eval.texts} == {"other/data/train-00000-of-00001"}


ODD = ['a "quoted" one', '"opens only', "tab\\t", "Grüße", "plain", "it's", '"', "a, b; c | d", "NA", "007"]


def test_tables_of_every_kind_are_what_pandas_reads(tmp_path):
    frame = pd.DataFrame({"text": ODD, "label": [str(number % 3) for number in range(len(ODD))]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.csv.gz", index=False)
    frame.to_csv(tmp_path / "semicolons.csv", index=False, sep=";")
    frame.to_csv(tmp_path / "latin.csv", index=False, encoding="latin-1")
    table(tmp_path / "a.tsv", "text\tlabel", *("\t".join(row) for row in frame.to_numpy()))
    frame.to_csv(tmp_path / "quoted.tsv", index=False, sep="\t", quoting=csv.QUOTE_ALL)
    frame.to_json(tmp_path / "a.jsonl.gz", orient="records", lines=True)
    frame.to_json(tmp_path / "a.json", orient="records")
    frame.to_json(tmp_path / "lines.json", orient="records", lines=True)
    rows = list(frame.itertuples(index=False, name=None))
    for name in ("a.csv", "a.csv.gz", "semicolons.csv", "a.tsv", "a.jsonl.gz", "a.json", "lines.json"):
        assert rows_of(tmp_path / name, LABELS) == rows, name
    assert rows_of(tmp_path / "quoted.tsv", LABELS, Reading(quoting="standard")) == rows
    assert rows_of(tmp_path / "latin.csv", LABELS, Reading(encoding="latin-1")) == rows
    told = []
    read_table(tmp_path / "semicolons.csv", LABELS, tell=told.append)
    assert told == ["the columns of semicolons.csv are separated by semicolons, as its header shows"]
    with pytest.raises(UsageError, match=r"latin.csv cannot be read .* --encoding latin-1"):
        read_table(tmp_path / "latin.csv", LABELS)
    with pytest.raises(UsageError, match="--encoding latine: there is no such encoding"):
        Reading(encoding="latine")


def test_a_table_may_have_carriage_returns_as_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text;label\rhello;1\r")
    assert rows_of(tmp_path / "a.csv", LABELS) == [("hello", "1")]


def test_a_header_that_is_none_is_refused_with_the_file(tmp_path):
    table(tmp_path / "a.csv", "x" * 200_000)
    with pytest.raises(UsageError, match=r"a.csv cannot be read"):
        read_table(tmp_path / "a.csv", LABELS)


@pytest.mark.parametrize("closed_by", [None, 70, 35])
def test_a_quotation_mark_that_nobody_closes_names_its_row_and_what_to_type(tmp_path, closed_by):
    texts = [f"the river runs past house {number}" for number in range(100)]
    for row in (20, closed_by):
        if row is not None:
            texts[row] = f'"{texts[row]}'
    expected = [(text, str(number % 2)) for number, text in enumerate(texts)]
    table(tmp_path / "q.csv", "text,label", *map(",".join, expected))
    with pytest.raises(UsageError, match=r"row 21.*--quoting none"):
        read_table(tmp_path / "q.csv", LABELS)
    assert rows_of(tmp_path / "q.csv", LABELS, Reading(quoting="none")) == expected


def test_a_quotation_mark_that_is_closed_a_few_rows_later_is_told(tmp_path):
    rows = [f"house {number},{number % 2}" for number in range(20)]
    for number in (4, 7):
        rows[number] = f'"{rows[number]}'
    table(tmp_path / "q.csv", "text,label", *rows)
    told = []
    assert len(read_table(tmp_path / "q.csv", LABELS, tell=told.append)) == 17
    assert told == ["1 fields of the column 'text' of q.csv go over several lines"]


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "utf-8-sig", "shift_jis"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.txt", "a.jsonl.gz"])
def test_text_files_of_every_kind_may_have_another_encoding(tmp_path, encoding, name):
    if encoding == "shift_jis":
        texts = ["日本語", "plain"]
    else:
        texts = ["ÄÖ plain", "Grüße"]
    lines = texts
    if "jsonl" in name:
        lines = [f'{{"text": "{text}"}}' for text in texts]
    elif "txt" not in name:
        lines = ["text", *texts]
    written = "\n".join([*lines, ""]).encode(encoding)
    if name.endswith(".gz"):
        written = gzip.compress(written)
    (tmp_path / name).write_bytes(written)
    found = rows_of(tmp_path / name, TEXT, Reading(encoding=encoding))
    assert found == [(text,) for text in texts]


def test_a_field_of_many_lines_is_read_where_standard_quoting_is_asked_for(tmp_path):
    long = "\n".join(f"verse {number}" for number in range(30))
    pd.DataFrame({"text": ["a", long, "b"], "label": [1, 2, 1]}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(UsageError, match=r"row 2: the column 'text' has 29 line ends.*--quoting standard"):
        read_table(tmp_path / "a.csv", TEXT)
    assert rows_of(tmp_path / "a.csv", TEXT, Reading(quoting="standard")) == [("a",), (long,), ("b",)]


def test_which_documents_a_text_file_has_is_told_and_may_be_said(tmp_path):
    lines = [f"document {number} speaks of the river" for number in range(300)]
    (tmp_path / "a.txt").write_text("\n".join([*lines[:150], "", *lines[150:]]))
    told = []
    assert len(read_table(tmp_path / "a.txt", TEXT, tell=told.append)) == 2
    rows = read_table(tmp_path / "a.txt", TEXT, Reading(documents="lines"), told.append)
    assert [text for _, (text,) in rows] == lines
    (tmp_path / "b.txt").write_text("\n".join(lines))
    assert len(read_table(tmp_path / "b.txt", TEXT, Reading(documents="paragraphs"), told.append)) == 1
    assert told == [
        "a.txt has 2 documents, which are its paragraphs, since it has blank lines; type --documents lines if each "
        "line is one",
        "a.txt has 300 documents, which are its lines",
        "b.txt has 1 documents, which are its paragraphs",
    ]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.csv.gz"])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused_while_it_is_read(tmp_path, name):
    size = 40 * 2**20
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        for _ in range(size // 2**20):
            file.write(b"a" * 2**20)
    (tmp_path / name).write_bytes(packed.getvalue())
    tracemalloc.start()
    with pytest.raises(UsageError, match="unpacks to more than 200 times its size"):
        read_table(tmp_path / name, TEXT)
    assert tracemalloc.get_traced_memory()[1] < size / 4
    tracemalloc.stop()


@pytest.mark.parametrize("number", [10, 2_000, 60_000])
def test_a_packed_text_is_read(tmp_path, number):
    draw = random.Random(0)
    lines = []
    for _ in range(number):
        lines.append(" ".join(draw.choices(["river", "stone", "cloud", "letter"], k=8)))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert rows_of(tmp_path / "a.txt.gz", TEXT) == [(line,) for line in lines]
