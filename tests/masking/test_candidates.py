"""Candidates: mapped to word pieces, kept in chunks that survive kills and damage, refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gallery import sentences
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mask_candidates
from asyncsgd.core.signals import StopRequest
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenizer import train_byte_bpe, train_wordpiece
from asyncsgd.data.tokens import plain_backend, rows_of
from asyncsgd.domain_masking.candidates import (
    EXAMPLES,
    begin,
    candidate_flags,
    candidate_pieces,
    find_candidates,
    found_in,
)
from asyncsgd.domain_masking.finders import Lexicon
from asyncsgd.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [line for line in sentences(120, seed=3).split("\n") if line]
TERMS = tuple(sorted({word for text in TEXTS for word in text.rstrip(".").split() if word[0] in "bd"}))
LEXICON = Lexicon(TERMS)
CORPUS = Corpus("test", Documents(tuple(TEXTS[:100])), Documents(tuple(TEXTS[100:])), "")
TOKENIZER = train_wordpiece(TEXTS, 256)


def fill(folder, find=LEXICON, corpus=CORPUS, tokenizer=TOKENIZER, chunk_texts=16):
    begin(find, plain_backend(tokenizer).to_str(), [], 0)
    return find_candidates(
        corpus, tokenizer, find, folder, map, finder="terms:x", model="tiny", chunk_texts=chunk_texts
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


TOKENIZERS = [train_wordpiece(["ab ba é ß , -"] * 9, 64), train_byte_bpe(["ab ba"], 260)]


@given(
    text=st.text("ab éß,-\U0001d6fc", max_size=30),
    bounds=st.lists(st.integers(0, 30), max_size=8, unique=True),
    kind=st.sampled_from(TOKENIZERS),
)
@example(text="ab", bounds=[1, 2], kind=TOKENIZERS[0])  # one piece, of which the last character alone is in a span
@settings(deadline=None)
def test_a_piece_is_a_candidate_if_one_of_its_characters_is_in_a_span(text, bounds, kind):
    places = sorted(place for place in bounds if place <= len(text))
    spans = list(zip(places[::2], places[1::2], strict=False))
    encoding = plain_backend(kind).encode(text, add_special_tokens=False)
    inside = {place for start, end in spans for place in range(start, end)}
    wanted = []
    for start, end in encoding.offsets:
        wanted.append(bool(inside & set(range(start, end))))
    assert candidate_pieces(encoding, spans, len(text)).tolist() == wanted


def inner(rows, name="candidates"):
    """The rows without their special tokens."""
    return [row.tolist()[1:-1] for row in rows.rows(name, range(len(rows)))]


def test_rows_and_blocks_have_the_candidates_of_their_texts_however_they_are_cut(tmp_path):
    fill(tmp_path)
    backend = plain_backend(TOKENIZER)
    for side, documents in (("train", CORPUS.train), ("eval", CORPUS.eval)):
        encodings = [backend.encode(text, add_special_tokens=False) for text in documents.texts]
        flags = []
        for text, encoding in zip(documents.texts, encodings, strict=True):
            flags.append([text[slice(*encoding.word_to_chars(word))] in TERMS for word in encoding.word_ids])
        marked = candidate_flags(str(tmp_path), CORPUS, TOKENIZER, side)
        for seq_len in (8, 16, 128):
            rows = rows_of(documents.texts, TOKENIZER, seq_len=seq_len, flags=marked)
            assert inner(rows, "ids") == inner(rows_of(documents.texts, TOKENIZER, seq_len=seq_len), "ids")
            cut = [of[first : first + seq_len - 2] for of in flags for first in range(0, len(of), seq_len - 2)]
            assert inner(rows) == [row for row in cut if len(row) >= 4]
        blocks = rows_of(documents.texts, TOKENIZER, seq_len=128, blocks=True, flags=marked)
        in_blocks = [flag for row in inner(blocks) for flag in row]
        assert in_blocks == [flag for of in flags for flag in of][: len(in_blocks)]
        assert len(in_blocks) > 126


def test_statistics_and_examples_say_what_was_found(tmp_path):
    statistics = fill(tmp_path)["statistics"]
    _, found = found_in(CORPUS.train.texts, LEXICON, plain_backend(TOKENIZER))
    numbers = statistics["train"]
    assert numbers["texts"] == 100
    assert numbers["pieces"] == sum(map(len, found))
    assert numbers["candidate_pieces"] == sum(flags.sum() for flags in found)
    assert numbers["texts_without_candidates"] == sum(not flags.any() for flags in found)
    for term, count in statistics["top_terms"]:
        assert count == sum(re.findall(r"\w+", text).count(term) for text in CORPUS.train.texts)
    for shown in json.loads((tmp_path / EXAMPLES).read_text())["examples"]:
        assert set() < {shown["text"][start:end] for start, end in shown["candidates"]} <= set(TERMS)
        assert shown["masked"]


def test_a_folder_of_something_else_is_neither_written_into_nor_trained_with(tmp_path):
    fill(tmp_path)
    before = contents(tmp_path)
    tokenizer = train_wordpiece(TEXTS, 200)
    corpus = dataclasses.replace(CORPUS, eval=CORPUS.train)
    for other in ({"find": Lexicon(TERMS[1:])}, {"chunk_texts": 17}, {"tokenizer": tokenizer}, {"corpus": corpus}):
        with pytest.raises(UsageError, match=r"holds candidates of other texts, .* type another --out"):
            fill(tmp_path, **other)
    for of in ((corpus, TOKENIZER), (CORPUS, tokenizer)):
        with pytest.raises(UsageError, match=r"was made of other texts or .*; run mask_candidates.py again"):
            candidate_flags(str(tmp_path), *of, "train")
    assert contents(tmp_path) == before


def test_a_manifest_names_the_packages_of_the_last_call_that_made_a_chunk(tmp_path, monkeypatch):
    found = fill(tmp_path)
    monkeypatch.setattr("asyncsgd.domain_masking.candidates.version", lambda name: "newer")
    assert fill(tmp_path) == found
    (tmp_path / found["chunks"][0]).unlink()
    assert set(fill(tmp_path)["versions"].values()) == {"newer"}


def test_a_damaged_chunk_and_a_folder_without_candidates_are_refused(tmp_path):
    chunk = tmp_path / fill(tmp_path)["chunks"][1]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:40] + b"damage" + whole[46:])
    with pytest.raises(UsageError, match=rf"{chunk.name} cannot be read .* remove it, and run mask_candidates"):
        candidate_flags(str(tmp_path), CORPUS, TOKENIZER, "train")
    assert fill(tmp_path / "none", Lexicon(("nowhere",)))["statistics"]["train"]["candidate_share"] == 0
    with pytest.raises(UsageError, match="has no candidate in any training text"):
        candidate_flags(str(tmp_path / "none"), CORPUS, TOKENIZER, "train")


def run(tmp_path, out, processes):
    (tmp_path / "terms.txt").write_text("\n".join(TERMS))
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    argv = ["--data", f"{tmp_path}/text.txt", "--vocab-size", "256", "--cache-dir", f"{tmp_path}/cache"]
    argv += ["--finder", f"terms:{tmp_path}/terms.txt", "--out", f"{tmp_path}/{out}", "--chunk-texts", "8"]
    with StopRequest() as stop:
        assert mask_candidates.run([*argv, "--processes", processes], stop) == 0
    return argv


def test_the_script_fills_a_folder_and_goes_on(tmp_path, capsys):
    run(tmp_path, "found", "1")
    told = capsys.readouterr().out
    assert "texts have none" in told
    assert "next   python -m analysis candidates" in told
    before = contents(tmp_path / "found")
    next((tmp_path / "found").glob("chunk-*")).unlink()
    run(tmp_path, "found", "1")
    assert contents(tmp_path / "found") == before
    with pytest.raises(UsageError, match="--processes must be 1 or more"):
        run(tmp_path, "found", "0")


@pytest.mark.slow
def test_a_killed_command_resumes_and_two_processes_write_the_bytes_of_one(tmp_path):
    argv = run(tmp_path, "one", "1")
    script = [sys.executable, ROOT / "experiments" / "mask_candidates.py", *argv, "--processes", "2"]
    child = subprocess.Popen([*script, "--out", tmp_path / "two"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not list((tmp_path / "two").glob("chunk-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    run(tmp_path, "two", "2")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
