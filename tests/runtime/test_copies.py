"""Copies of prepared folders: equal to what rank 0 has, whole or not there, and nowhere else than in the cache."""

import hashlib
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.backends.copies import ListedFile, ListedFolder, found_here, listed, receive, send
from asyncsgd.errors import RunError

CONTENTS = st.dictionaries(st.sampled_from(["a", "b.txt", "in/a", "in/deep/c"]), st.binary(max_size=40), max_size=4)


def written(folder, contents):
    folder.mkdir()
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return listed(str(folder))


def contents_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def delivery_of(folder):
    """What receives the vectors that `send` sends, as a pair does."""
    sent = []
    send(folder, sent.append)
    coming = iter(sent)
    return lambda vector: vector.copy_(next(coming))


@given(contents=CONTENTS)
def test_a_copy_has_the_files_of_its_folder_and_is_found_again(contents, tmp_path_factory):
    place = tmp_path_factory.mktemp("hosts")
    folder = written(place / "there", contents)
    for name, content in contents.items():
        expected = ListedFile(name, len(content), hashlib.sha256(content).hexdigest())
        assert expected in folder.files
    elsewhere = msgspec.structs.replace(folder, path="/of/another/host")
    assert found_here(elsewhere, place / "cache") is None
    assert found_here(folder, place / "cache") == folder.path
    copy = receive(elsewhere, place / "cache", delivery_of(folder))
    assert contents_of(place / "cache" / copy.rpartition("/")[2]) == contents
    assert found_here(elsewhere, place / "cache") == copy
    assert receive(elsewhere, place / "cache", delivery_of(folder)) == copy  # two hosts with one cache folder


def test_a_file_that_comes_otherwise_leaves_no_copy(tmp_path):
    folder = written(tmp_path / "there", {"a": b"some rows", "b": b"others"})
    elsewhere = msgspec.structs.replace(folder, path="/of/another/host")
    with pytest.raises(RunError, match=r"a of /of/another/host was changed on its way from rank 0"):
        receive(elsewhere, tmp_path / "cache", lambda vector: vector.fill_(65))
    assert found_here(elsewhere, tmp_path / "cache") is None
    assert contents_of(tmp_path / "cache") == {}


def test_a_copy_that_somebody_has_changed_is_not_used(tmp_path):
    folder = written(tmp_path / "there", {"a": b"some rows"})
    elsewhere = msgspec.structs.replace(folder, path="/of/another/host")
    copy = receive(elsewhere, tmp_path / "cache", delivery_of(folder))
    with open(f"{copy}/a", "wb") as file:
        file.write(b"SOME ROWS")
    with pytest.raises(RunError, match="has been changed; delete it"):
        found_here(elsewhere, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../a", "/tmp/a", "in/../../a", "", "."])
def test_no_name_leads_out_of_the_cache_folder(name, tmp_path):
    file = ListedFile(name, 0, hashlib.sha256().hexdigest())
    with pytest.raises(RunError, match="which no folder can have"):
        receive(ListedFolder("/there", (file,)), tmp_path / "cache", pytest.fail)
    assert contents_of(tmp_path) == {}


def test_the_listing_does_not_depend_on_the_order_in_which_files_were_written(tmp_path):
    names = ["b", "a", "in/c"]
    listings = []
    for number, order in enumerate(itertools.permutations(names)):
        folder = written(tmp_path / str(number), {name: name.encode() for name in order})
        listings.append(folder.files)
    assert listings == [listings[0]] * 6
