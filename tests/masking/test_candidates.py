"""Candidates: mapped to word pieces, kept in chunks that survive kills and damage, refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gallery import sentences
from hypothesis import given, settings
from hypothesis import strategies as st

import mask_candidates
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.tables import Documents
from asyncsgd.data.tokenizer import train_byte_bpe, train_wordpiece
from asyncsgd.data.tokens import plain_backend, rows_of
from asyncsgd.errors import UsageError
from asyncsgd.masking.candidates import (
    EXAMPLES,
    MANIFEST,
    begin,
    candidate_flags,
    candidate_pieces,
    find_candidates,
    found_in,
)
from asyncsgd.masking.finders import Find, Lexicon, Span
from asyncsgd.signals import StopRequest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [line for line in sentences(120, seed=3).split("\n") if line]
TERMS = tuple(sorted({word for text in TEXTS for word in text.rstrip(".").split() if word[0] in "bd"}))
LEXICON = Lexicon(TERMS)
CORPUS = Corpus("test", Documents(tuple(TEXTS[:100]), None), Documents(tuple(TEXTS[100:]), None), "")
TOKENIZER = train_wordpiece(TEXTS, 256)


def fill(folder, find=LEXICON, corpus=CORPUS, tokenizer=TOKENIZER, chunk_texts=16):
    begin(find, plain_backend(tokenizer).to_str(), [], 0)
    return find_candidates(
        corpus, tokenizer, find, folder, map, finder="terms:x", model="tiny", chunk_texts=chunk_texts
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@given(
    text=st.text("ab éß,-\U0001d6fc", max_size=30),
    bounds=st.lists(st.integers(0, 30), max_size=8, unique=True),
    kind=st.sampled_from([train_wordpiece(["ab ba é ß , -"] * 9, 64), train_byte_bpe(["ab ba"], 260)]),
)
@settings(deadline=None)
def test_a_piece_is_a_candidate_if_one_of_its_characters_is_in_a_span(text, bounds, kind):
    places = sorted(place for place in bounds if place <= len(text))
    spans = list(zip(places[::2], places[1::2], strict=False))
    encoding = plain_backend(kind).encode(text, add_special_tokens=False)
    inside = {place for start, end in spans for place in range(start, end)}
    wanted = [bool(inside & set(range(start, end))) for start, end in encoding.offsets]
    assert candidate_pieces(encoding, spans).tolist() == wanted


def marked(tmp_path, *, seq_len=16, side="train", corpus=CORPUS, tokenizer=TOKENIZER, blocks=False):
    """The rows of a run with the candidates of ``tmp_path/found``."""
    texts = (corpus.train if side == "train" else corpus.eval).texts
    flags = candidate_flags(str(tmp_path / "found"), corpus, tokenizer, side)
    return rows_of(texts, tokenizer, seq_len=seq_len, blocks=blocks, flags=flags)


def inner(rows, name="candidates"):
    """The rows without their special tokens."""
    return [row.tolist()[1:-1] for row in rows.rows(name, range(len(rows)))]


def test_in_blocks_every_token_keeps_its_mark(tmp_path):
    fill(tmp_path / "found")
    texts, blocks = (inner(marked(tmp_path, seq_len=128, blocks=each)) for each in (False, True))
    assert len(texts) == len(CORPUS.train.texts)  # no text was too short or too long for a row of its own
    in_blocks = [flag for row in blocks for flag in row]
    assert in_blocks == [flag for row in texts for flag in row][: len(in_blocks)]
    assert {len(row) for row in blocks[:-1]} == {126}


def test_rows_have_the_candidates_of_their_texts_however_they_are_cut(tmp_path):
    fill(tmp_path / "found")
    backend = plain_backend(TOKENIZER)
    for seq_len in (8, 16, 128):
        for side, documents in (("train", CORPUS.train), ("eval", CORPUS.eval)):
            rows = marked(tmp_path, seq_len=seq_len, side=side)
            assert inner(rows, "ids") == inner(rows_of(documents.texts, TOKENIZER, seq_len=seq_len), "ids")
            wanted = []
            for text in documents.texts:
                encoding = backend.encode(text, add_special_tokens=False)
                flags = [text[slice(*encoding.word_to_chars(word))] in TERMS for word in encoding.word_ids]
                cut = [flags[first : first + seq_len - 2] for first in range(0, len(flags), seq_len - 2)]
                wanted += [row for row in cut if len(row) >= 4]
            assert inner(rows) == wanted


def test_statistics_and_examples_say_what_was_found(tmp_path):
    manifest = fill(tmp_path / "found")
    found = found_in(CORPUS.train.texts, Lexicon(TERMS), plain_backend(TOKENIZER))
    train = manifest["statistics"]["train"]
    assert (train["texts"], train["pieces"]) == (100, sum(map(len, found.candidates)))
    assert train["candidate_pieces"] == sum(flags.sum() for flags in found.candidates)
    assert train["texts_without_candidates"] == sum(not flags.any() for flags in found.candidates)
    top = dict(manifest["statistics"]["top_terms"])
    term = max(top, key=lambda term: top[term])
    assert top[term] == sum(re.findall(r"\w+", text).count(term) for text in CORPUS.train.texts)
    for example in json.loads((tmp_path / "found" / EXAMPLES).read_text())["examples"]:
        words = {example["text"][start:end] for start, end in example["candidates"]}
        assert words
        assert words <= set(TERMS)
        assert example["masked"]


@dataclasses.dataclass(frozen=True)
class Wrong(Find):
    """Gives the same spans in every text."""

    wrong: tuple[Span, ...]
    key = "wrong"

    def spans(self, texts, device):
        return [list(self.wrong) for _ in texts]


@pytest.mark.parametrize("spans", [((0, 1000),), ((-1, 2),), ((3, 3),), ((2, 4), (3, 5))])
def test_spans_past_the_end_or_out_of_order_are_refused(spans):
    with pytest.raises(UsageError, match="the finder gave the span"):
        found_in(["a short text"], Wrong(spans), plain_backend(TOKENIZER))


def test_a_folder_of_something_else_is_not_written_into(tmp_path):
    fill(tmp_path / "found")
    others = {
        "finder": {"find": Lexicon(TERMS[1:])},
        "tokenizer": {"tokenizer": train_wordpiece(TEXTS, 200)},
        "train": {"corpus": dataclasses.replace(CORPUS, train=Documents(tuple(TEXTS[:99]), None))},
        "eval": {"corpus": dataclasses.replace(CORPUS, eval=Documents(tuple(TEXTS[101:]), None))},
        "chunk_texts": {"chunk_texts": 17},
    }
    before = contents(tmp_path / "found")
    for what, other in others.items():
        with pytest.raises(UsageError, match=rf"holds candidates of another {what}.* type another --out"):
            fill(tmp_path / "found", **other)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds other files; type another --out"):
        fill(tmp_path / "full")
    assert contents(tmp_path / "found") == before


def test_training_refuses_candidates_that_are_not_its_own_and_says_why(tmp_path):
    with pytest.raises(UsageError, match="is no folder of candidates"):
        marked(tmp_path)
    folder = tmp_path / "found"
    fill(folder)
    with pytest.raises(UsageError, match="was made with another tokenizer"):
        marked(tmp_path, tokenizer=train_wordpiece(TEXTS, 200))
    for side in ("train", "eval"):
        other = dataclasses.replace(CORPUS, **{side: Documents((*getattr(CORPUS, side).texts, "new"), None)})
        with pytest.raises(UsageError, match=f"was made from other {side} texts"):
            marked(tmp_path, corpus=other)
    manifest = json.loads((folder / MANIFEST).read_text())
    chunk = folder / manifest["chunks"][1]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:40] + b"damage" + whole[46:])
    with pytest.raises(UsageError, match=f"{chunk.name} cannot be read .* remove it, and run mask_candidates.py again"):
        marked(tmp_path)
    (folder / MANIFEST).write_text(json.dumps(manifest | {"complete": False}))
    with pytest.raises(UsageError, match="is not complete"):
        marked(tmp_path)
    shutil.rmtree(folder)
    assert fill(folder, Wrong(()))["statistics"]["train"]["candidate_share"] == 0
    with pytest.raises(UsageError, match="has no candidate in any training text"):
        marked(tmp_path)


def command(tmp_path, out, *more):
    (tmp_path / "terms.txt").write_text("\n".join(TERMS))
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    argv = ["--data", f"{tmp_path}/text.txt", "--vocab-size", "256", "--cache-dir", f"{tmp_path}/cache"]
    return [*argv, "--finder", f"terms:{tmp_path}/terms.txt", "--out", f"{tmp_path}/{out}", "--chunk-texts", "8", *more]


def run(argv):
    with StopRequest() as stop:
        return mask_candidates.run(argv, stop)


def test_the_script_fills_a_folder_and_goes_on(tmp_path, capsys):
    assert run(command(tmp_path, "found", "--processes", "1")) == 0
    told = capsys.readouterr().out
    assert "texts have none" in told
    assert "next   python -m analysis candidates" in told
    before = contents(tmp_path / "found")
    next((tmp_path / "found").glob("chunk-*")).unlink()
    assert run(command(tmp_path, "found", "--processes", "1")) == 0
    assert contents(tmp_path / "found") == before
    assert run(["--finder", "help"]) == 0
    assert "keyness" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--processes must be 1 or more"):
        run(command(tmp_path, "found", "--processes", "0"))


@pytest.mark.slow
def test_a_killed_command_resumes_and_two_processes_write_the_bytes_of_one(tmp_path):
    assert run(command(tmp_path, "one", "--processes", "1")) == 0
    whole = contents(tmp_path / "one")
    assert run(command(tmp_path, "two", "--processes", "2")) == 0
    assert contents(tmp_path / "two") == whole
    argv = [sys.executable, ROOT / "experiments" / "mask_candidates.py", *command(tmp_path, "killed")]
    child = subprocess.Popen([*argv, "--processes", "2"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("chunk-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert run(command(tmp_path, "killed", "--processes", "2")) == 0
    assert contents(tmp_path / "killed") == whole
