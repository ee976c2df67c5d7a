"""Corpora: what becomes a document, which side it falls on, and what a user reads when the source is unusable."""

import gzip
import hashlib
import socket
from pathlib import Path

import pandas as pd
import pytest

from asyncsgd.data import pydocs
from asyncsgd.data.corpora import load_corpus, split_documents
from asyncsgd.data.pydocs import clean_docstring, collect_docstrings, load_pydocs
from asyncsgd.data.tables import Documents, documents_of, joined_parts, read_table
from asyncsgd.errors import UsageError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LINES = [f"line number {number} of the first text" for number in range(200)]


def load(data, tmp_path, **changed):
    arguments = {"eval_data": None, "text_column": "text", "cache_dir": tmp_path / "cache"} | changed
    return load_corpus(str(data), **arguments)


def read_texts(path, column="text"):
    return list(documents_of(str(path), read_table(path, {column: "--text-column"}), column).texts)


def lines(path, *texts):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_a_text_is_held_out_when_its_hash_read_as_a_fraction_is_below_the_eval_fraction():
    expected = tuple(t for t in LINES if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) / 16**16 < 0.05)
    train, held_out = split_documents(Documents(tuple(LINES), tuple(LINES)), 0.05)
    assert held_out.texts == held_out.labels == expected
    assert train.texts == train.labels == tuple(t for t in LINES if t not in expected)
    assert 0 < len(expected) < 25


def test_the_fingerprint_changes_with_a_text_the_order_and_the_split_and_not_with_the_name(tmp_path):
    first = load(lines(tmp_path / "a.txt", *LINES), tmp_path)
    assert load(lines(tmp_path / "b.txt", *LINES), tmp_path).fingerprint == first.fingerprint
    others = [
        load(lines(tmp_path / "c.txt", *LINES[:-1], "another"), tmp_path),
        load(lines(tmp_path / "d.txt", *LINES[::-1]), tmp_path),
        load(tmp_path / "a.txt", tmp_path, eval_fraction=0.5),
        load(lines(tmp_path / "e.txt", *LINES[9:]), tmp_path, eval_data=str(lines(tmp_path / "f.txt", *LINES[:9]))),
        load(lines(tmp_path / "e.txt", *LINES[8:]), tmp_path, eval_data=str(lines(tmp_path / "f.txt", *LINES[:8]))),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"\xef\xbb\xbfone two\r\n three\x0cfour \r\n\n", ["one two", "three\x0cfour"]),
        (b"\none\ntwo\n \t\n\nthree\n  four\n", ["one two", "three four"]),
    ],
)
def test_a_text_file_holds_a_document_a_line_or_where_it_has_blank_lines_a_paragraph(tmp_path, content, texts):
    (tmp_path / "a.txt").write_bytes(content)
    assert read_texts(tmp_path / "a.txt") == texts


def test_every_file_format_gives_the_same_documents_and_drops_empty_ones(tmp_path):
    texts = ['a "quoted", text', "", "NA", " ", "007", "Grüße\u2028x"]
    table = pd.DataFrame({"id": range(6), "body": texts})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    table.assign(body=[text or None for text in texts]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(t for t in texts if t.strip()).encode()))
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.txt.gz"):
        assert read_texts(tmp_path / name, "body") == ['a "quoted", text', "NA", "007", "Grüße\u2028x"], name
    # No encoder accepts half a surrogate pair.
    assert read_texts(lines(tmp_path / "b.jsonl", r'{"text": "a \ud800 b"}')) == ["a ? b"]


@pytest.mark.parametrize("path", sorted(SHARED.glob("*/small/*.parquet")), ids=lambda path: path.parts[-3] + path.stem)
def test_a_shared_table_is_read_as_pandas_reads_it(path):
    names = list(pd.read_parquet(path).columns)[:2]
    expected = pd.read_parquet(path, dtype_backend="pyarrow")[names].itertuples(index=False, name=None)
    plain = [tuple(value.tolist() if hasattr(value, "tolist") else value for value in row) for row in expected]
    assert [row for _, row in read_table(path, dict.fromkeys(names, ""))] == plain


def test_a_folder_is_its_files_in_order_without_subfolders_and_hidden_files_and_may_bring_its_split(tmp_path):
    for name in ("b/b.txt", "b/a.txt", "b/.hidden.txt", "b/README.md"):
        lines(tmp_path / name, name, "b1")
    (tmp_path / "b" / "sub").mkdir()
    corpus = load(tmp_path / "b", tmp_path, eval_data=str(lines(tmp_path / "held_out.txt", "x", "b1")))
    assert (corpus.name, corpus.train.texts, corpus.eval.texts) == ("b", ("b/a.txt", "b/b.txt"), ("x", "b1"))
    for name, texts in {"train": ["a", "b", "v"], "dev": ["v"], "test": ["t"], "extra": ["e"]}.items():
        lines(tmp_path / "split" / f"{name}.txt", *texts)
    corpus = load(tmp_path / "split", tmp_path)
    assert (corpus.train.texts, corpus.eval.texts) == (("a", "b"), ("v",))
    own = load(tmp_path / "split" / "extra.txt", tmp_path, eval_data=str(tmp_path / "split"))
    assert (own.train.texts, own.eval.texts) == (("e",), ("v",))


def test_joined_sources_keep_their_order_and_no_text_of_either_evaluation_is_trained_on(tmp_path):
    held_out = split_documents(Documents(tuple(LINES), None), 0.05)[1].texts
    lines(tmp_path / "a.txt", *LINES)
    lines(tmp_path / "b" / "train.txt", "b one", "b two", held_out[0], "b three")
    lines(tmp_path / "b" / "validation.txt", "b held out", LINES[0], "b two")
    a, b = load(tmp_path / "a.txt", tmp_path), load(tmp_path / "b", tmp_path)
    both = load(f"{tmp_path / 'a.txt'}+{tmp_path / 'b'}", tmp_path)
    assert both.name == "a.txt+b"
    assert both.eval.texts == a.eval.texts + b.eval.texts == (*held_out, "b held out", LINES[0], "b two")
    assert both.train.texts == tuple(t for t in (*a.train.texts, *b.train.texts) if t not in both.eval.texts)
    assert held_out[0] in b.train.texts
    assert LINES[0] in a.train.texts


def test_a_path_that_exists_with_its_plus_signs_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c++/notes.txt", "a.txt+b.txt", "a.txt"):
        lines(Path(name), *LINES)
    assert joined_parts("a.txt+b.txt") == ["a.txt+b.txt"]
    assert joined_parts("pydocs+c++/notes.txt+a.txt") == ["pydocs", "c++/notes.txt", "a.txt"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("latin.txt", "abc Grüße".encode("latin-1"), "UTF-8 6 iconv"),
        ("short.txt", b"a", "too few --eval-data"),
        ("torn.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2 JSON"),
        ("column.csv", b"id,texts\n1,a\n", "columns id, texts --text-column"),
        ("long.csv", b"text\na,b\n", "long.csv CSV"),
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
def cached_data_set(tmp_path, monkeypatch):
    """A data set in the local cache as load_dataset leaves it there, and a Hub that refuses connections."""
    import datasets
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    for split, texts in {"train": ["a", " b ", ""], "test": ["b", "t"]}.items():
        pd.DataFrame({"body": texts}).to_parquet(files[split])
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache))
    (made,) = (path for path in cache.glob("parquet/*/*/*") if path.is_dir())
    target = cache / "nobody___texts" / "default" / "0.0.0" / "hash"
    target.parent.mkdir(parents=True)
    made.rename(target)
    for path in target.glob("parquet-*.arrow"):
        path.rename(path.with_name(path.name.replace("parquet", "texts")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with socket.socket() as bound:  # bound and not listening: it refuses, and no other process gets the port
        bound.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        yield "hub:nobody/texts"


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

    >>> twice(
    ...     2)
    the number four

    More prose.
    """


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
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(source.encode("latin-1"))
    folders = {name: tmp_path / name for name in ("one", "two")}
    documents = collect_docstrings(folders)
    subjects = ["built-ins", "sorting", "modules", "classes", "functions", "imports", "two", "Größe"]
    assert documents == Documents(tuple(map(prose, subjects)), ("one",) * 6 + ("two",) * 2)
    monkeypatch.setattr(pydocs, "_package_folders", lambda: folders)
    assert load_pydocs(tmp_path / "new") == documents
    monkeypatch.setattr(pydocs, "_package_folders", dict)
    assert load_pydocs(tmp_path / "new") == documents
    expected = "Compute twice the number. Parameters x : float The number, for example ``2``. More prose."
    assert clean_docstring(NUMPYDOC) == expected
