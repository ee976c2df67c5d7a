"""``--data A+B``: the training texts of both, the evaluation texts that each sets aside, and no text on both sides."""

from pathlib import Path

import pytest

from asyncsgd.data.corpora import joined_parts, load_corpus, split_documents
from asyncsgd.data.documents import Documents

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


def load(data, place, eval_data=None):
    return load_corpus(data, eval_data=eval_data, text_column="text", cache_dir=place / "cache")


def test_both_sides_of_both_are_joined_in_order_and_evaluation_texts_leave_training(place):
    a, b = load(str(place / "a.txt"), place), load(str(place / "b"), place)
    joined = load(f"{place / 'a.txt'}+{place / 'b'}", place)
    assert joined.name == "a.txt+b"
    assert joined.eval.texts == a.eval.texts + b.eval.texts == (*a.eval.texts, "b held out", LINES[0], "b two")
    assert a.eval.texts[0] in b.train.texts  # the file sets a text aside that the folder trains on
    assert LINES[0] in a.train.texts  # and the other way round
    expected = [t for t in (*a.train.texts, "b one", "b two", a.eval.texts[0], "b three") if t not in joined.eval.texts]
    assert list(joined.train.texts) == expected
    assert len(expected) == len(a.train.texts) - 1 + 2


def test_the_fingerprint_is_that_of_the_join(place):
    names = [
        str(place / "a.txt"),
        str(place / "b"),
        f"{place / 'a.txt'}+{place / 'b'}",
        f"{place / 'b'}+{place / 'a.txt'}",
    ]
    assert len({load(name, place).fingerprint for name in names}) == 4
    assert load(names[2], place).fingerprint == load(names[2], place).fingerprint


def test_given_evaluation_texts_replace_those_of_every_part(place):
    (place / "eval.txt").write_text("b one\nanother\n")
    joined = load(f"{place / 'a.txt'}+{place / 'b'}", place, eval_data=str(place / "eval.txt"))
    assert joined.eval.texts == ("b one", "another")
    assert len(joined.train.texts) == 200 + 3


def test_pydocs_joins_and_its_package_versions_stay_in_the_fingerprint(place, monkeypatch):
    from asyncsgd.data import corpora

    monkeypatch.setattr(corpora, "load_pydocs", lambda cache_dir: Documents(tuple(LINES), ("stdlib",) * 200))
    first = load(f"pydocs+{place / 'b'}", place)
    assert first.name == "pydocs+b"
    assert first.train.labels is None  # the folder has none
    monkeypatch.setattr(corpora, "package_versions", lambda: {"stdlib": "another"})
    assert load(f"pydocs+{place / 'b'}", place).fingerprint != first.fingerprint


def test_a_path_that_exists_with_its_plus_signs_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c++").mkdir()
    Path("c++/notes.txt").write_text("\n".join(LINES))
    Path("a.txt+b.txt").write_text("\n".join(LINES))
    Path("a.txt").write_text("\n".join(LINES))
    assert joined_parts("a.txt+b.txt") == ["a.txt+b.txt"]
    assert joined_parts("c++/notes.txt") == ["c++/notes.txt"]
    assert joined_parts("pydocs+c++/notes.txt+a.txt") == ["pydocs", "c++/notes.txt", "a.txt"]
    assert load("a.txt+b.txt", tmp_path).name == "a.txt+b.txt"
