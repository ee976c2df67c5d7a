"""Normalization: NFKC with its exceptions, a line for a line, the same bytes from any number of processes."""

# ruff: noqa: RUF001 - the dashes and quotes of other scripts are the subject

import gzip
import json
import sys
import unicodedata

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from pyarrow import parquet

import normalize_corpus
from asyncsgd.core.signals import StopRequest
from asyncsgd.domain_masking import normalizing
from asyncsgd.domain_masking.normalizing import normalize, normalize_file
from asyncsgd.errors import UsageError


def one(line, lower=False):
    (changed,), _ = normalize([line], lower=lower)
    return changed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("10² Ω H₂O 10⁻³ ™", "10² Ω H₂O 10⁻³ ™"),
        ("a 1½ mm ㎡ ㎛ film", "a 1½ mm m² μm film"),
        ("25 ˚C, Poincar´e", "25 ˚C, Poincar´e"),
        ("5 µm, 3 Å, 2 Ω, ﬁlm, Ⅳ, ＡＢ, 𝛼", "5 μm, 3 Å, 2 Ω, film, IV, AB, α"),
        ("e\u0301", "é"),
        ("5–7 at −20, x‐ray, non‑ideal", "5-7 at -20, x-ray, non-ideal"),
        ("the film—a thin one", "the film - a thin one"),
        ("“so called” ‘thin’ «film»", '"so called" \'thin\' "film"'),
        ("12′ 3″", "12′ 3′′"),
        ("so\u00adlid\u200b oxide\x07\ufeff", "solid oxide"),
        ("a\tb\u00a0 \u2028c ", "a b c"),
        ("नि\u200dक", "नि\u200dक"),
    ],
)
def test_a_character_has_one_spelling_and_formulae_and_units_keep_theirs(line, expected):
    assert one(line) == expected
    assert one(line, lower=True) == expected.lower()


def test_all_characters_are_those_of_nfkc_but_for_the_exceptions():
    differ = set()
    kept = set()
    with_exponent = set()
    alone = set()
    for character in map(chr, range(sys.maxunicode + 1)):
        decomposition = unicodedata.decomposition(character)
        if not decomposition:
            continue
        ours = unicodedata.normalize("NFC", normalizing._expanded(character))
        if decomposition.startswith(("<super>", "<sub>", "<fraction>")):
            kept.add(character)
        if decomposition.endswith((" 00B2", " 00B3")):
            with_exponent.add(character)
        if ours != unicodedata.normalize("NFKC", character):
            differ.add(character)
            if unicodedata.normalize("NFKD", character)[0] == " ":
                alone.add(character)
    assert differ == kept | with_exponent | alone
    assert len(with_exponent) == 12
    assert len(alone) == 50
    assert len(kept) >= 271  # more in the Unicode of a newer Python


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["an electro-", "lyte film"], ["an electrolyte film"]),
        (["an electro\u00ad ", "  lyte"], ["an electrolyte"]),
        (["a-", "b-", "c"], ["abc"]),
        (["the solid-", "State"], ["the solid-", "State"]),
        (["short-", "and long-term"], ["short-", "and long-term"]),
        (["5-", "fold", "a dash -", "film"], ["5-", "fold", "a dash -", "film"]),
        (["one", "", " \t", "\u200b", "two\u2028three"], ["one", "", "", "two three"]),  # and no line becomes empty
    ],
)
def test_a_line_stays_a_line_but_for_words_hyphenated_at_its_end(lines, expected):
    normalized, changes = normalize(lines, lower=False)
    assert normalized == expected
    assert changes["lines_read"] == len(lines)
    assert changes["lines_written"] == len(expected)
    assert changes["lines_left_out"] + changes["hyphenations_joined"] == len(lines) - len(expected)


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), max_size=8),
    lower=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_what_is_normalized_stays_as_it_is(lines, lower):
    once, _ = normalize(lines, lower=lower)
    assert [one(line, lower) for line in once] == once


def test_blocks_change_nothing_and_the_report_counts(tmp_path, monkeypatch):
    lines = []
    for number in range(500):
        line = f"sen\u00adtence {number} – H₂O"
        if number % 2:
            line = f"lyte and {line}"
        if number % 3:
            line += " electro-"
        lines.append(line)
    source = tmp_path / "in.txt"
    whole = tmp_path / "whole.txt"
    blocks = tmp_path / "new" / "blocks.txt.gz"
    source.write_text("\n".join(lines))
    report = normalize_file(source, whole, lower=False, text_column="text", mapped=map)
    monkeypatch.setattr(normalizing, "BLOCK_CHARACTERS", 100)
    assert normalize_file(source, blocks, lower=False, text_column="text", mapped=map) == report
    assert gzip.decompress(blocks.read_bytes()) == whole.read_bytes()
    assert json.loads((tmp_path / "whole.txt.report.json").read_text()) == report
    assert report["controls_removed"] == 500
    assert report["dashes"] == 500
    assert report["lines_read"] == 500


def test_blocks_of_several_processes_are_written_in_their_order(tmp_path):
    lines = [f"line {number} " + "x" * 100_000 for number in range(80)]  # 8 blocks, and 4 are read ahead
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    argv = ["--train-file", f"{tmp_path}/in.txt", "--op-train-file", f"{tmp_path}/out.txt", "--processes", "2"]
    with StopRequest() as stop:
        assert normalize_corpus.run(argv, stop) == 0
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "in.txt").read_text()


def test_a_table_and_a_zipped_text_give_the_lines_of_a_plain_one(tmp_path):
    (tmp_path / "in.txt").write_text("a – b\r\ntwo lines\r\nc", newline="")
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress("\ufeffa – b\ntwo lines\nc\n".encode()))
    parquet.write_table(pyarrow.table({"text": ["a – b", "two\nlines", "c", " "]}), tmp_path / "in.parquet")
    for name in ("in.txt", "in.txt.gz", "in.parquet"):
        normalize_file(tmp_path / name, tmp_path / "out.txt", lower=False, text_column="text", mapped=map)
        assert (tmp_path / "out.txt").read_text() == "a - b\ntwo lines\nc\n"


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("latin.txt", "out.txt", "cannot be read: .utf-8. codec"),
        ("in.parquet", "out.txt", "column 'text' holds int values, not text"),
        ("in.txt", "in.txt", "is the input itself"),
        ("in.txt", "in.txt/out.txt", "cannot be written"),
    ],
)
def test_files_that_cannot_be_meant_leave_nothing_behind(tmp_path, source, target, message):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "in.txt").write_text("text\n")
    parquet.write_table(pyarrow.table({"words": ["a"], "text": [1]}), tmp_path / "in.parquet")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=message):
        normalize_file(tmp_path / source, tmp_path / target, lower=False, text_column="text", mapped=map)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", [1, *slow(100_000)])
def test_the_script_takes_the_underscored_flags_and_two_processes_write_the_bytes_of_one(number, tmp_path, capsys):
    argv = []
    for file in ("train", "val"):
        (tmp_path / f"{file}.txt").write_text(f"{file} – H₂O electro-\nlyte\n" * number)
        argv += [f"--{file}_file={tmp_path}/{file}.txt", f"--op_{file}_file={tmp_path}/out_{file}.txt"]
    written = []
    with StopRequest() as stop:
        for processes in ("1", "2"):
            assert normalize_corpus.run([*argv, "--processes", processes], stop) == 0
            written.append([path.read_bytes() for path in sorted(tmp_path.glob("out_*"))])
        with pytest.raises(UsageError, match="--val-file and --op-val-file go together"):
            normalize_corpus.run(argv[:3], stop)
    assert (tmp_path / "out_val.txt").read_text() == "val - H₂O electrolyte\n" * number
    assert f"{number:,}  dashes" in capsys.readouterr().out
    assert written[0] == written[1]
