"""Corpora: what becomes a document, which side it falls on, its label, and what is refused."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import datasets
import pandas as pd
import pytest
from huggingface_hub import constants
from refusals import refused

from asyncsgd.data import files as tables
from asyncsgd.data import pydocs
from asyncsgd.data.corpora import load_corpus
from asyncsgd.data.documents import Documents, split_documents
from asyncsgd.data.evaluation_sets import check_name
from asyncsgd.data.files import joined_parts, read_table
from asyncsgd.data.kinds import LABELLED, PLAIN
from asyncsgd.data.pydocs import collect_docstrings, load_pydocs
from asyncsgd.errors import UsageError
from asyncsgd.tasks.tagged_rows import TAGGED

LINES = [f"line number {number} of the first text" for number in range(200)]


def fraction(text):
    """The first 64 bits of its hash, as a number between 0 and 1."""
    digits = hashlib.sha256(text.encode()).hexdigest()[:16]
    return int(digits, 16) / 16**16


HELD_OUT = tuple(text for text in LINES if fraction(text) < 0.05)
TRAIN = [("good day", "yes"), ("bad day", "no"), ("fine day", "yes"), ("poor day", "no")]
TEST = [("good night", "yes"), ("bad night", "no")]
SENTENCES = [(["Li", "ran"], ["B-PER", "O"]), (["in", "New", "York"], ["O", "B-LOC", "I-LOC"])]
SCORED = [(["York", "ran"], ["B-LOC", "O"])]
TEXT = ("text",)
LABELS = ("text", "label")
TAGS = ("tokens", "ner_tags")
KINDS = {TEXT: PLAIN, LABELS: LABELLED, TAGS: TAGGED}
TYPES = [".csv", ".jsonl", ".parquet"]


def load(data, columns=TEXT, kind=None, **more):
    flags = {name: f"--{name}-column" for name in columns}
    return load_corpus(str(data), flags, kind or KINDS[columns], **more)


def lines(path, *texts):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(text + "\n" for text in texts))
    return path


def write(folder, name, rows, columns=LABELS):
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows, columns=list(columns))
    if name.endswith(".csv"):
        table.to_csv(folder / name, index=False)
    elif name.endswith(".jsonl"):
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        (folder / name).write_text("\n".join(map(json.dumps, records)))
    else:
        table.to_parquet(folder / name)
    return folder


def test_a_text_is_held_out_when_its_hash_read_as_a_fraction_is_below_the_share():
    train, held_out = split_documents(Documents(tuple(LINES), tuple(LINES)))
    assert held_out.texts == HELD_OUT
    assert held_out.labels == HELD_OUT
    assert train.texts == train.labels
    assert train.labels == tuple(text for text in LINES if text not in HELD_OUT)
    assert 0 < len(HELD_OUT) < 25


def digest_of(*sides):
    """Of texts without labels, as it was before there were labels."""
    digest = hashlib.sha256()
    for texts in sides:
        digest.update(f"side {len(texts)}\n".encode())
        for text in texts:
            content = text.encode()
            digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def test_the_fingerprint_of_texts_without_labels_is_that_of_their_lengths_and_bytes(tmp_path):
    sets = [str(lines(tmp_path / f"{name}.txt", f"{name} one", f"{name} two")) for name in ("a", "b")]
    corpus = load(lines(tmp_path / "train.txt", *LINES), eval_data=sets)
    assert corpus.fingerprint == digest_of(corpus.train.texts, corpus.eval.texts)
    assert corpus.sets[0].fingerprint == digest_of((), corpus.sets[0].documents.texts)


def test_the_fingerprint_changes_with_a_text_its_label_the_order_and_the_split_and_not_with_the_name(tmp_path):
    first = load(lines(tmp_path / "a.txt", *LINES))
    assert load(lines(tmp_path / "b.txt", *LINES)).fingerprint == first.fingerprint
    another_text = load(lines(tmp_path / "c.txt", *LINES[:-1], "another"))
    another_order = load(lines(tmp_path / "d.txt", *LINES[::-1]))
    corpora = [first, another_text, another_order]
    for number in (8, 9):
        train = lines(tmp_path / "e.txt", *LINES[number:])
        held_out = lines(tmp_path / "f.txt", *LINES[:number])
        corpora.append(load(train, eval_data=str(held_out)))
    write(tmp_path / "labels", "test.csv", TEST)
    another_label = [("good day", "no"), *TRAIN[1:]]
    for rows in (TRAIN, TRAIN[::-1], another_label):
        corpora.append(load(write(tmp_path / "labels", "train.csv", rows), LABELS))
    fingerprints = {corpus.fingerprint for corpus in corpora}
    assert len(fingerprints) == 8


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"\xef\xbb\xbfone two\r\n three\x0cfour \r\n\n", ["one two", "three\x0cfour"]),
        (b"\none\ntwo\n \t\n\n\n\nthree\n  four\n", ["one two", "three four"]),
    ],
)
def test_a_text_file_holds_a_document_a_line_or_where_it_has_blank_lines_a_paragraph(tmp_path, content, texts):
    (tmp_path / "a.txt").write_bytes(content)
    rows = read_table(tmp_path / "a.txt", {})
    assert [text.strip() for _, (text,) in rows] == texts


def test_every_file_format_gives_the_same_documents_and_drops_empty_ones(tmp_path):
    texts = ['a "quoted", text', "", "NA", " ", "007", "Grüße\u2028x"]
    table = pd.DataFrame({"id": range(6), "body": texts})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    table.assign(body=[text or None for text in texts]).to_parquet(tmp_path / "a.parquet")
    in_lines = "\n".join(text for text in texts if text.strip())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(in_lines.encode()))
    # No encoder accepts half a surrogate pair.
    lines(tmp_path / "b.jsonl", r'{"body": "a \ud800 b"}')
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.txt.gz"):
        corpus = load(tmp_path / "b.jsonl", ("body",), PLAIN, eval_data=str(tmp_path / name))
        assert corpus.eval.texts == ('a "quoted", text', "NA", "007", "Grüße\u2028x"), name
        assert corpus.train.texts == ("a ? b",)


def test_a_folder_is_its_files_in_order_without_subfolders_and_hidden_files_and_may_bring_its_split(tmp_path):
    for name in ("b/b.txt", "b/a.txt", "b/.hidden.txt", "b/README.md"):
        lines(tmp_path / name, name, "b1")
    (tmp_path / "b" / "sub").mkdir()
    held_out = lines(tmp_path / "held_out.txt", "x", "b1")
    corpus = load(tmp_path / "b", eval_data=str(held_out))
    assert corpus.name == "b"
    assert corpus.train.texts == ("b/a.txt", "b/b.txt")
    assert corpus.eval.texts == ("x", "b1")
    for name, texts in {"train": ["a", "b", "v"], "dev": ["v"], "test": ["t"], "extra": ["e"]}.items():
        lines(tmp_path / "split" / f"{name}.txt", *texts)
    corpus = load(tmp_path / "split")
    assert corpus.train.texts == ("a", "b")
    assert corpus.eval.texts == ("v",)
    own = load(tmp_path / "split" / "extra.txt", eval_data=str(tmp_path / "split"))
    assert own.train.texts == ("e",)
    assert own.eval.texts == ("v",)


def test_joined_sources_keep_their_order_and_no_text_of_either_evaluation_is_trained_on(tmp_path, monkeypatch):
    lines(tmp_path / "a.txt", *LINES)
    lines(tmp_path / "b" / "train.txt", "b one", "b two", HELD_OUT[0], "b three")
    lines(tmp_path / "b" / "validation.txt", "b held out", LINES[0], "b two")
    a = load(tmp_path / "a.txt")
    b = load(tmp_path / "b")
    both = load(f"{tmp_path / 'a.txt'}+{tmp_path / 'b'}")
    assert both.name == "a.txt+b"
    assert both.eval.texts == (*HELD_OUT, "b held out", LINES[0], "b two")
    assert both.eval.texts == a.eval.texts + b.eval.texts
    of_both = a.train.texts + b.train.texts
    assert both.train.texts == tuple(text for text in of_both if text not in both.eval.texts)
    monkeypatch.chdir(tmp_path)
    lines(Path("a.txt+b.txt"), *LINES)
    assert joined_parts("a.txt+b.txt") == ["a.txt+b.txt"]
    assert joined_parts("a.txt+b") == ["a.txt", "b"]


@pytest.mark.parametrize("kind", TYPES)
def test_labels_and_tags_are_read_the_same_from_every_kind_of_file(tmp_path, kind):
    for side, rows in (("train", TRAIN), ("test", TEST)):
        write(tmp_path / "d", f"{side}{kind}", rows)
    data = load(tmp_path / "d", LABELS)
    assert data.train == Documents(*zip(*TRAIN, strict=True))
    assert data.eval == Documents(*zip(*TEST, strict=True))
    assert data.name == "d"
    assert data.split == "test"
    assert data.labels == ("no", "yes")
    assert data.notes == (f"d holds test: test{kind}; train: train{kind}",)
    if kind == ".csv":
        return
    for side, of in (("train", SENTENCES), ("test", SCORED)):
        write(tmp_path / "s", f"{side}{kind}", of, TAGS)
    data = load(tmp_path / "s", TAGS)
    assert data.train.texts == ("Li ran", "in New York")
    assert data.eval.texts == ("York ran",)
    assert data.labels == ("B-LOC", "B-PER", "I-LOC", "O")
    assert len(data.notes) == 1
    assert data.train.labels == ('["B-PER", "O"]', '["O", "B-LOC", "I-LOC"]')


def test_test_is_scored_where_it_is_there_or_validation_or_a_part_of_the_texts(tmp_path):
    for side, rows in (("train", TRAIN), ("test", TEST), ("validation", [("so so day", "no")])):
        write(tmp_path, f"{side}.csv", rows)
    assert load(tmp_path, LABELS).split == "test"
    assert load(tmp_path, LABELS, split="validation").eval.texts == ("so so day",)
    (tmp_path / "test.csv").unlink()
    assert load(tmp_path, LABELS).split == "validation"
    rows = [(text, "odd" if number % 2 else "even") for number, text in enumerate(LINES)]
    one = load(write(tmp_path / "a", "posts.csv", rows) / "posts.csv", LABELS)
    assert one.split == "test"
    assert one.eval.texts == HELD_OUT
    for folder, split in ((tmp_path, "test"), (tmp_path / "a" / "posts.csv", "validation")):
        with pytest.raises(UsageError, match=f"has no {split} split to score on; drop --split"):
            load(folder, LABELS, split=split)


def test_plain_texts_are_scored_on_a_test_file_that_is_asked_for_and_on_texts_set_aside_without_one(tmp_path):
    lines(tmp_path / "train.txt", *LINES)
    assert load(tmp_path, split="test").eval.texts == HELD_OUT
    lines(tmp_path / "test.txt", "x", LINES[0])
    corpus = load(tmp_path, split="test")
    assert corpus.eval.texts == ("x", LINES[0])
    assert corpus.train.texts == tuple(LINES[1:])
    assert load(tmp_path).eval.texts == HELD_OUT


@pytest.mark.parametrize("content", [["cold", "warm", "hot"], {"0": "cold", "1": "warm", "2": "hot"}])
@pytest.mark.parametrize("kind", TYPES)
def test_labels_json_names_the_numbers(tmp_path, content, kind):
    for side, rows in (("train", [("a", 0), ("b", 2), ("c", 0)]), ("test", [("d", 2)])):
        write(tmp_path, f"{side}{kind}", rows)
    (tmp_path / "labels.json").write_text(json.dumps(content))
    data = load(tmp_path, LABELS)
    assert data.labels == ("cold", "warm", "hot")
    assert data.train.labels == ("cold", "hot", "cold")
    assert data.notes[1:] == ("no training text has the label warm",)


@pytest.mark.parametrize("content", ["[0, 1]", '"ny"'])
def test_labels_json_holds_texts(tmp_path, content):
    for side in ("train", "test"):
        write(tmp_path, f"{side}.csv", TRAIN)
    (tmp_path / "labels.json").write_text(content)
    with refused("labels.json must hold the names of the labels"):
        load(tmp_path, LABELS)


def test_the_names_that_the_datasets_library_left_are_found_in_parquet_files_and_on_the_hub(tmp_path, monkeypatch):
    names = ["O", "B-PER", "B-LOC", "I-LOC", "I-PER"]
    numbers = []
    for words, tags in SENTENCES:
        numbers.append((words, [names.index(tag) for tag in tags]))
    label = datasets.ClassLabel(names=names)
    text = datasets.Value("string")
    labelled = ([("a", 1), ("b", 2)], [("c", 1)], (text, label), "B-PER")
    tagged = (numbers, [(["ran", "Li"], [1, 0])], (datasets.List(text), datasets.List(label)), '["B-PER", "O"]')
    for columns, (train, test, kinds, first_label) in ((LABELS, labelled), (TAGS, tagged)):
        features = datasets.Features(dict(zip(columns, kinds, strict=True)))
        splits = {}
        for side, rows in (("train", train), ("test", test)):
            records = [dict(zip(columns, row, strict=True)) for row in rows]
            splits[side] = datasets.Dataset.from_list(records, features=features)
            splits[side].to_parquet(tmp_path / f"{side}.parquet")
        monkeypatch.setattr(tables, "hub_splits", lambda data, splits=splits: splits)
        for data in (load(tmp_path, columns), load("hub:named", columns)):
            assert data.labels == tuple(names)
            assert data.train.labels[0] == first_label
        with refused(f"hub:named 'lable' columns {columns[0]}, {columns[1]} --lable-column"):
            load("hub:named", (columns[0], "lable"), KINDS[columns])


def test_what_is_left_out_is_counted(tmp_path):
    write(tmp_path, "train.jsonl", [*SENTENCES, *SCORED, ([], []), ([" "], ["O"]), (["a b"], ["I-LOC"])], TAGS)
    write(tmp_path, "test.jsonl", SCORED, TAGS)
    data = load(tmp_path, TAGS)
    assert data.train.texts == ("Li ran", "in New York", "a\u00a0b")  # a space in a word does not part it
    assert data.notes[1:] == (
        f"2 rows of {tmp_path.name} (train) without words are left out",
        "1 training sentences that are test sentences too are left out",
    )
    less = load(tmp_path, TAGS, limits=(1, 0))
    assert less.train.texts == ("Li ran",)
    assert less.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("columns", "train", "test", "words"),
    [
        (LABELS, TRAIN, [*TEST, ("odd night", "perhaps")], "'perhaps' no training text"),
        (LABELS, [("a", "yes")], [("c", "yes")], "2 labels yes --label-column"),
        (LABELS, [*TRAIN, ("text", None)], TEST, "train.jsonl line 5 None learn from needs a label --label-column"),
        (LABELS, [*TRAIN, ("text", 0.5)], TEST, "line 5 'label' 0.5"),
        (LABELS, TRAIN, [(" ", "yes")], "(test) no text"),
        (TAGS, [*SENTENCES, (["a"], ["O", "O"])], SCORED, "line 3 1 words 2 tags"),
        (TAGS, [*SENTENCES, (["a"], None)], SCORED, "line 3 'ner_tags' None learn from needs a tag leave it out"),
        (TAGS, SENTENCES, [(["a"], ["B-ORG"])], "'B-ORG' no training word"),
        (TAGS, SENTENCES, [(["a"], None), (["b"], ["B-ORG"])], "'B-ORG' no training word test.jsonl, line 2"),
        (TAGS, SENTENCES, [(["a"], ["S-LOC"])], "line 1 'S-LOC' BIO"),
        (TAGS, [(["a"], [1])], SCORED, "line 1 '1' BIO labels.json"),
        (TAGS, [("Li ran", ["O"])], SCORED, "'tokens' list"),
        (TAGS, SCORED, SCORED, "too few to train on"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(tmp_path, columns, train, test, words):
    for name, rows in (("train.jsonl", train), ("test.jsonl", test)):
        write(tmp_path, name, rows, columns)
    with refused(words):
        load(tmp_path, columns)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("latin.txt", "abc Grüße".encode("latin-1"), "utf-8 6"),
        ("short.txt", b"a", "too few"),
        ("torn.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2 JSON"),
        ("column.csv", b"id,texts\n1,a\n", "columns id, texts --text-column"),
        ("long.csv", b"text\na,b\n", "long.csv"),
        ("number.jsonl", b'{"text": 3}\n', "line 1 'text' int --text-column"),
        ("cut.parquet", b"PAR1", "cut.parquet Parquet"),
        ("cut.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-9], "cut.txt.gz"),
        ("hub:a:b:c", None, "hub:NAME"),
        ("pydoc", None, "'pydoc' 'pydocs' hub:NAME"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with refused(words):
        load(name)


def test_a_cached_hub_data_set_is_read_without_network_with_its_test_split_for_evaluation(tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    for split, texts in {"train": ["a", " b ", ""], "test": ["b", "t"]}.items():
        pd.DataFrame({"body": texts}).to_parquet(files[split])
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache))
    (made,) = [path for path in cache.glob("parquet/*/*/*") if path.is_dir()]
    target = cache / "nobody___texts" / "default" / "0.0.0" / "hash"
    target.parent.mkdir(parents=True)
    made.rename(target)
    for path in target.glob("parquet-*.arrow"):
        path.rename(path.with_name(path.name.replace("parquet", "texts")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # where nobody answers
    corpus = load("hub:nobody/texts", ("body",), PLAIN)
    assert corpus.name == "hub:nobody/texts"
    assert corpus.train.texts == ("a",)
    assert corpus.eval.texts == ("b", "t")
    held_out = lines(tmp_path / "held_out.txt", "x")
    corpus = load("hub:nobody/texts", ("body",), PLAIN, eval_data=str(held_out))
    assert corpus.train.texts == ("a",)


def prose(subject):
    return f"A sentence of more than forty characters about {subject}."


def test_documents_are_the_prose_of_docstrings_in_the_order_of_files_without_repeats(tmp_path, monkeypatch):
    sources = {
        "one/b.py": f'"""{prose("modules")}"""\nclass A:\n    """{prose("classes")}"""\n'
        f'    def f(self):\n        """Short."""\n    async def g(self):\n        """{prose("functions")}"""\n',
        "one/a/z.py": f'"""{prose("sorting")}"""',
        "one/tests/test_x.py": f'"""{prose("tests")}"""',
        "one/torn.py": f'"""{prose("damage")}"""\ndef',
        "one/raises.py": f'"""{prose("imports")}"""\nraise SystemExit("imported")',
        "one/_add_newdocs.py": f'add_newdoc("m", "f", ("g", """{prose("built-ins")}"""))\nother("{prose("others")}")',
        "two/b.py": f'"""{prose("MODULES")}"""\ndef f():\n    """{prose("two")}"""\n',
        "two/latin.py": f"# coding: latin-1\n'''{prose('Größe')}'''",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.encode("latin-1"))
    folders = {name: tmp_path / name for name in ("one", "two")}
    documents = collect_docstrings(folders)
    subjects = ["built-ins", "sorting", "modules", "classes", "functions", "imports", "two", "Größe"]
    assert documents == Documents(tuple(map(prose, subjects)), ("one",) * 6 + ("two",) * 2)
    monkeypatch.setattr(pydocs, "package_folders", lambda: folders)
    assert load_pydocs(tmp_path / "new") == documents
    monkeypatch.setattr(pydocs, "package_folders", dict)
    assert load_pydocs(tmp_path / "new") == documents


def test_a_set_is_named_by_the_user_or_by_its_file_and_the_end_of_a_split_s_name_is_enough(tmp_path):
    for name in ("dev_matched", "dev_mismatched", "test_matched"):
        write(tmp_path / "mnli", f"{name}.csv", [(f"{name} night", "yes"), (f"{name} day", "no")])
    write(tmp_path / "mnli", "train.csv", TRAIN)
    corpus = load(tmp_path / "mnli", LABELS, split="matched, mismatched")
    assert [corpus.split, *(one.name for one in corpus.sets)] == ["dev_matched", "dev_mismatched"]
    assert corpus.eval.texts == ("dev_matched night", "dev_matched day")
    assert [one.eval.texts[0] for one in corpus.evaluations] == ["dev_matched night", "dev_mismatched night"]
    write(tmp_path / "mnli", "dev.csv", TEST)
    assert load(tmp_path / "mnli", LABELS, split="dev,matched").split == "validation"
    one = str(tmp_path / "mnli" / "dev_matched.csv")
    other = str(tmp_path / "mnli" / "test_matched.csv")
    corpus = load(tmp_path / "mnli" / "train.csv", LABELS, eval_data=(one, f"a b={other}"))
    assert [corpus.split, *(one.name for one in corpus.sets)] == ["dev_matched", "a b"]
    alone = load(tmp_path / "mnli" / "train.csv", LABELS, eval_data=one)
    assert alone.split == "evaluation"
    assert alone.sets == ()
    assert alone.fingerprint == corpus.fingerprint


@pytest.mark.parametrize("name", ["", " ", "main", "a/b", "a\nb", "x" * 101], ids=repr)
def test_a_name_of_a_set_that_no_file_can_bear_or_that_records_use_is_refused(name):
    with pytest.raises(UsageError, match=r"an evaluation set cannot be called .* up to 100 characters"):
        check_name(name)


@pytest.mark.parametrize("name", ["a b", "Main", "évaluation", "x" * 100], ids=repr)
def test_another_name_of_a_set_is_taken(name):
    check_name(name)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("{0}/a.csv", "{0}/b/a.csv"), "two evaluation sets are called 'a'"),
        (("{0}/a.csv", "main={0}/b/a.csv"), "cannot be called 'main'"),
        (("{0}/a.csv", "x/y={0}/b/a.csv"), "cannot be called 'x/y'"),
        (("{0}/none.csv", "{0}/a.csv"), "none.csv has no labels to score on; name a set with labels first"),
        (("{0}/a.csv", "other={0}/new.csv"), "no training text has the label 'maybe', which 1 texts to score on have"),
        (("{0}/a.csv", "other={0}/new.csv"), "new.csv, row 2"),
        (("{0}/a.csv", "other={0}/missing.csv"), "there is no file or folder"),
    ],
)
def test_what_is_wrong_with_a_set_is_said(sets, words, tmp_path):
    for folder in (tmp_path, tmp_path / "b"):
        write(folder, "a.csv", TEST)
    write(tmp_path, "train.csv", TRAIN)
    write(tmp_path, "none.csv", [("some day",)], TEXT)
    write(tmp_path, "new.csv", [("old day", "yes"), ("new day", "maybe")])
    eval_data = tuple(one.format(tmp_path) for one in sets)
    with pytest.raises(UsageError, match=re.escape(words)):
        load(tmp_path / "train.csv", LABELS, eval_data=eval_data)


def test_a_number_is_a_label_by_the_names_beside_its_own_file(tmp_path):
    rows = [("good night", 1), ("bad night", 0)]
    write(tmp_path / "train", "train.csv", [("good day", 0), ("bad day", 1)])
    (tmp_path / "train" / "labels.json").write_text('["yes", "no"]')
    for name in ("same", "other"):
        write(tmp_path / name, "dev.csv", rows)
    (tmp_path / "other" / "labels.json").write_text('["no", "yes"]')
    sets = tuple(f"{name}={tmp_path / name}/dev.csv" for name in ("same", "other"))
    corpus = load(tmp_path / "train" / "train.csv", LABELS, eval_data=sets)
    assert corpus.labels == ("yes", "no")
    assert corpus.eval.labels == ("no", "yes")
    assert corpus.sets[0].documents.labels == ("yes", "no")
