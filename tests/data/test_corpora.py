"""Corpora: what becomes a document, which side it falls on, and what a user reads when the source is unusable."""

import gzip
import hashlib
import socket
from pathlib import Path

import pytest
from hypothesis import strategies as st

from asyncsgd.data import pydocs
from asyncsgd.data.corpora import load_corpus, split_documents
from asyncsgd.data.pydocs import clean_docstring, collect_docstrings, load_pydocs
from asyncsgd.data.tables import Documents, documents_of, joined_parts, read_table
from asyncsgd.errors import UsageError

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
WORDS = st.text(alphabet="abcdefgh ", min_size=1, max_size=20).filter(str.strip).map(str.strip)


def load(data, cache_dir, **changed):
    arguments = {"eval_data": None, "text_column": "text", "cache_dir": cache_dir, "eval_fraction": 0.25} | changed
    return load_corpus(str(data), **arguments)


def read_texts(path, column):
    return list(documents_of(str(path), read_table(path, {column: "--text-column"}), column).texts)


def lines(path, *texts):
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_a_text_is_held_out_when_its_hash_read_as_a_fraction_is_below_the_eval_fraction():
    texts = tuple(f"document {i}" for i in range(400))
    expected = tuple(t for t in texts if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) / 16**16 < 0.05)
    train, held_out = split_documents(Documents(texts, texts), 0.05)
    assert held_out.texts == held_out.labels == expected
    assert 0 < len(expected) < 50
    assert train.texts == train.labels == tuple(t for t in texts if t not in expected)


def test_the_fingerprint_changes_with_a_text_with_the_order_and_with_the_split_and_not_with_the_name(tmp_path):
    texts = [f"document {i}" for i in range(40)]
    first = load(lines(tmp_path / "a.txt", *texts), tmp_path)
    assert len(first.fingerprint) == 16
    assert int(first.fingerprint, 16) >= 0
    assert load(lines(tmp_path / "b.txt", *texts), tmp_path).fingerprint == first.fingerprint
    others = [
        load(lines(tmp_path / "c.txt", *texts[:-1], "another"), tmp_path),
        load(lines(tmp_path / "d.txt", *texts[::-1]), tmp_path),
        load(tmp_path / "a.txt", tmp_path, eval_fraction=0.5),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4
    boundaries = [
        load(lines(tmp_path / "e.txt", *texts[:k]), tmp_path, eval_data=str(lines(tmp_path / "f.txt", *texts[k:])))
        for k in (10, 11)
    ]
    assert boundaries[0].fingerprint != boundaries[1].fingerprint


def test_a_text_file_without_blank_lines_holds_one_document_a_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone two\r\n three\x0cfour \r\n\n")
    assert read_texts(tmp_path / "a.txt", "text") == ["one two", "three\x0cfour"]


def test_a_text_file_with_a_blank_line_holds_one_document_a_paragraph(tmp_path):
    (tmp_path / "a.txt").write_text("\none\ntwo\n \t\n\nthree\n  four\n")
    assert read_texts(tmp_path / "a.txt", "text") == ["one two", "three four"]


def test_every_file_format_gives_the_same_documents_and_drops_empty_ones(tmp_path):
    import pandas as pd

    texts = ['a "quoted", text', "", "NA", " ", "Grüße\u2028x"]
    expected = ['a "quoted", text', "NA", "Grüße\u2028x"]
    table = pd.DataFrame({"id": range(5), "body": texts})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    table.assign(body=[None if text == "" else text for text in texts]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(t for t in texts if t.strip()).encode()))
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.txt.gz"):
        assert read_texts(tmp_path / name, "body") == expected, name


def test_half_a_surrogate_pair_is_replaced_since_no_encoder_accepts_it(tmp_path):
    assert read_texts(lines(tmp_path / "a.jsonl", r'{"text": "a \ud800 b"}'), "text") == ["a ? b"]


def test_a_folder_is_its_files_in_the_order_of_their_names_without_subfolders_and_hidden_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    lines(folder / "b.txt", "b1", "b2")
    lines(folder / "a.txt", "a1")
    lines(folder / "sub" / "c.txt", "c")
    lines(folder / ".hidden.txt", "hidden")
    lines(folder / "README.md", "about")
    held_out = lines(tmp_path / "held_out.txt", "x", "b1")
    corpus = load(folder, tmp_path, eval_data=str(held_out))
    assert corpus.name == "texts"
    assert corpus.train == Documents(("a1", "b2"), None)
    assert corpus.eval == Documents(("x", "b1"), None)


def test_a_folder_with_train_and_validation_files_is_not_split_and_its_test_file_is_not_read(tmp_path):
    for name, texts in {"train.txt": ["a", "b", "v"], "dev.txt": ["v"], "test.txt": ["t"], "extra.txt": ["e"]}.items():
        lines(tmp_path / name, *texts)
    corpus = load(tmp_path, tmp_path)
    assert (corpus.train.texts, corpus.eval.texts) == (("a", "b"), ("v",))
    own = load(tmp_path / "extra.txt", tmp_path, eval_data=str(tmp_path))
    assert (own.train.texts, own.eval.texts) == (("e",), ("v",))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "empty.txt"),
        ("latin.txt", "abc Grüße".encode("latin-1"), "UTF-8 6 iconv"),
        ("short.txt", b"a", "too few --eval-data"),
        ("torn.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2 JSON"),
        ("column.csv", b"id,texts\n1,a\n", "columns id, texts --text-column"),
        ("number.jsonl", b'{"text": 3}\n', "line 1 'text' int --text-column"),
        ("cut.parquet", b"PAR1", "cut.parquet Parquet"),
        ("cut.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-9], "cut.txt.gz"),
        ("pydoc", None, "'pydoc' 'pydocs' hub:NAME"),
        ("hub:a:b:c", None, "hub:NAME:CONFIG"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_do(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(name, tmp_path)
    assert all(word in str(caught.value) for word in words.split())


@pytest.fixture
def offline(monkeypatch):
    """A Hub at a port of this machine that refuses connections, so that the tests mean the same with a network."""
    import datasets
    from huggingface_hub import constants

    with socket.socket() as bound:  # bound and not listening: it refuses, and no other process gets the port
        bound.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield


@pytest.fixture
def cached_data_set(tmp_path, monkeypatch, offline):
    """A data set in the local cache as load_dataset leaves it there, with splits train and test."""
    import datasets
    import pandas as pd

    cache = tmp_path / "hub"
    files = {}
    for split, texts in {"train": ["a", " b ", ""], "test": ["b", "t"]}.items():
        files[split] = str(tmp_path / f"{split}.parquet")
        pd.DataFrame({"body": texts}).to_parquet(files[split])
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache))
    (made,) = (path for path in cache.glob("parquet/*/*/*") if path.is_dir())
    target = cache / "nobody___texts" / "default" / "0.0.0" / "hash"
    target.parent.mkdir(parents=True)
    made.rename(target)
    for path in target.glob("parquet-*.arrow"):
        path.rename(path.with_name(path.name.replace("parquet", "texts")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    return "hub:nobody/texts"


def test_a_cached_hub_data_set_is_read_without_network_with_its_test_split_for_evaluation(cached_data_set, tmp_path):
    corpus = load(cached_data_set, tmp_path, text_column="body")
    assert (corpus.name, corpus.train.texts, corpus.eval.texts) == ("hub:nobody/texts", ("a",), ("b", "t"))
    held_out = lines(tmp_path / "held_out.txt", "x")
    assert load(cached_data_set, tmp_path, text_column="body", eval_data=str(held_out)).train.texts == ("a", "b")


NUMPYDOC = """Compute twice the number.

    .. versionadded:: 1.2

    Parameters
    ----------
    x : float
        The number, for example ``2``.

    ====  ====
    1.00  2.00
    ====  ====

    Examples
    --------
    >>> twice(
    ...     2)
    the number four

    More prose.
    """


def test_a_docstring_becomes_its_prose_on_one_line():
    expected = "Compute twice the number. Parameters x : float The number, for example ``2``. Examples More prose."
    assert clean_docstring(NUMPYDOC) == expected


def prose(subject):
    return f"A sentence of more than forty characters about {subject}."


@pytest.fixture
def packages(tmp_path):
    sources = {
        "one/b.py": f'"""{prose("modules")}"""\nclass A:\n    """{prose("classes")}"""\n'
        f'    def f(self):\n        """Short."""\n    async def g(self):\n        """{prose("functions")}"""\n',
        "one/a/z.py": f'"""{prose("sorting")}"""',
        "one/tests/test_x.py": f'"""{prose("tests")}"""',
        "one/torn.py": f'"""{prose("damage")}"""\ndef',
        "one/raises.py": f'"""{prose("imports")}"""\nraise SystemExit("imported")',
        "one/_add_newdocs.py": f'add_newdoc("m", "f", ("g", """{prose("built-ins")}"""))\nother("{prose("others")}")',
        "two/b.py": f'"""{prose("MODULES")}"""\ndef f():\n    """{prose("two")}"""\n',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "two" / "latin.py").write_bytes(f"# coding: latin-1\n'''{prose('Größe')}'''".encode("latin-1"))
    return {"one": tmp_path / "one", "two": tmp_path / "two"}


def test_documents_are_the_docstrings_of_a_package_in_the_order_of_its_files_without_repeats(packages):
    documents = collect_docstrings(packages)
    subjects = ["built-ins", "sorting", "modules", "classes", "functions", "imports", "two", "Größe"]
    assert documents.texts == tuple(map(prose, subjects))
    assert documents.labels == ("one",) * 6 + ("two",) * 2


def test_the_pydocs_cache_is_read_back_as_written(packages, monkeypatch, tmp_path):
    monkeypatch.setattr(pydocs, "_package_folders", lambda: packages)
    documents = collect_docstrings(packages)
    assert load_pydocs(tmp_path / "new") == documents
    monkeypatch.setattr(pydocs, "_package_folders", dict)
    assert load_pydocs(tmp_path / "new") == documents


LINES = [f"line number {number} of the first text" for number in range(200)]


@pytest.fixture
def place(tmp_path):
    """A file that is split by its texts, and a folder that brings its own split and shares texts with the file."""
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "b").mkdir()
    held_out = split_documents(Documents(tuple(LINES), None), 0.05)[1].texts
    (tmp_path / "b" / "train.txt").write_text("\n".join(["b one", "b two", held_out[0], "b three"]))
    (tmp_path / "b" / "validation.txt").write_text("\n".join(["b held out", LINES[0], "b two"]))
    return tmp_path


def joined(data, place, eval_data=None):
    return load_corpus(data, eval_data=eval_data, text_column="text", cache_dir=place / "cache")


def test_both_sides_of_both_are_joined_in_order_and_evaluation_texts_leave_training(place):
    a, b = joined(str(place / "a.txt"), place), joined(str(place / "b"), place)
    both = joined(f"{place / 'a.txt'}+{place / 'b'}", place)
    assert both.name == "a.txt+b"
    assert both.eval.texts == a.eval.texts + b.eval.texts == (*a.eval.texts, "b held out", LINES[0], "b two")
    assert a.eval.texts[0] in b.train.texts  # the file sets a text aside that the folder trains on
    assert LINES[0] in a.train.texts  # and the other way round
    expected = [t for t in (*a.train.texts, "b one", "b two", a.eval.texts[0], "b three") if t not in both.eval.texts]
    assert list(both.train.texts) == expected
    assert len(expected) == len(a.train.texts) - 1 + 2


def test_a_path_that_exists_with_its_plus_signs_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c++").mkdir()
    Path("c++/notes.txt").write_text("\n".join(LINES))
    Path("a.txt+b.txt").write_text("\n".join(LINES))
    Path("a.txt").write_text("\n".join(LINES))
    assert joined_parts("a.txt+b.txt") == ["a.txt+b.txt"]
    assert joined_parts("c++/notes.txt") == ["c++/notes.txt"]
    assert joined_parts("pydocs+c++/notes.txt+a.txt") == ["pydocs", "c++/notes.txt", "a.txt"]
    assert joined("a.txt+b.txt", tmp_path).name == "a.txt+b.txt"
