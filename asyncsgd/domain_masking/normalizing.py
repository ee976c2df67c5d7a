"""One spelling for each character of a corpus, line by line.

A line goes through these steps, in this order:

1. A word that is hyphenated at the end of a line is joined with its rest: the next line is appended. The line must end
   in a letter and ``-``, U+2010 or a soft hyphen, and the next one must begin with a small letter, and not with *and*,
   *or* or *to* (``short- and long-term``). A true hyphen at the end of a line is lost (``solid-`` / ``state``), since
   only a dictionary could tell.
2. Control and formatting characters (Unicode Cc and Cf) go. Tabs and other separators become spaces first. The
   zero-width joiner and non-joiner stay, since scripts need them.
3. Characters get their compatibility decomposition, and the result is composed: NFKC, but for these exceptions.

   - Superscripts and subscripts stay: NFKC makes 102 of 10² and H2O of H₂O. So does TM, which is a superscript.
   - Vulgar fractions stay: NFKC makes 11⁄2 of 1½.
   - Accents that stand alone stay (´ ¨ ˚ and others): NFKC makes a space and a combining accent of them.
   - A square unit keeps its exponent: ㎡ becomes m² and not m2.

   Everything else is NFKC: the ohm, angstrom and micro signs become letters, ligatures become letters, and mathematical
   italics, Roman numerals and full-width letters become plain.
4. Hyphens, minus signs and en dashes become ``-``. A longer dash, which stands between words, becomes ``-`` with spaces
   around it.
5. Quotation marks become ``'`` and ``"``. Primes stay, since they are units.
6. Perhaps all becomes lower case. This makes Co (cobalt) and CO one word, so it is for models without capitals.
7. Each run of white space becomes one space; none is left at the ends.

A line that has gone through steps 2 to 7 does not change if it goes through them again; step 1 may find more to join
then, e.g. where step 4 has made a dash at the end of a line a hyphen. An empty line stays, since it separates
documents. A line with nothing but white space is one. A line of which nothing else is left goes, since it would
separate documents that were not apart.

References:
    Unicode Standard Annex #15: Unicode Normalization Forms.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import re
import sys
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncsgd.data.files import check_columns, text_of
from asyncsgd.errors import UsageError, reason

BLOCK_CHARACTERS = 1_000_000
INPUT_KINDS = (".txt", ".txt.gz", ".parquet")
OUTPUT_KINDS = (".txt", ".txt.gz")

_KEPT_FORMS = ("<super>", "<sub>", "<fraction>")
_JOINERS = "\u200c\u200d"
_SEPARATORS = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")
_SPACES = re.compile(r"\s{2,}|[^\S ]")
_SIGNS = (
    ("dashes", re.compile("[\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d]"), "-"),
    ("dashes", re.compile("[\u2014\u2015]"), " - "),
    ("quotes", re.compile("[\u2018\u2019\u201a\u201b\u2039\u203a]"), "'"),
    ("quotes", re.compile("[\u201c\u201d\u201e\u201f\u00ab\u00bb]"), '"'),
)
_HYPHENATED = re.compile(r"(.*[^\W\d_])[-\u2010\u00ad]\s*", re.DOTALL)
_REST_OF_WORD = re.compile(r"\s*(?!(?:and|or|to)\b)[^\W\d_]")


def normalize(lines: list[str], *, lower: bool) -> tuple[list[str], Counter[str]]:
    """Normalize lines that follow one another, see the module; the lines, and what was changed in them, by kind.

    >>> normalize(["The electro-", "lyte was 10\\u00a0µm thick, 5–7 % H₂O"], lower=False)[0]
    ['The electrolyte was 10 μm thick, 5-7 % H₂O']
    """
    changes: Counter[str] = Counter(lines_read=len(lines))
    joined: list[str] = []
    for line in lines:
        hyphenated = _HYPHENATED.fullmatch(joined[-1]) if joined else None
        rest = _REST_OF_WORD.match(line)
        if hyphenated and rest and rest[0][-1].islower():
            joined[-1] = hyphenated[1] + line.lstrip()
            changes["hyphenations_joined"] += 1
        else:
            joined.append(line)
    normalized = []
    for line in joined:
        new_line = _normalized(line, lower, changes)
        if new_line != line:
            changes["lines_changed"] += 1
        if new_line or not line.strip():
            normalized.append(new_line)
        else:
            changes["lines_left_out"] += 1
    changes["lines_written"] = len(normalized)
    return normalized, +changes


def _normalized(line: str, lower: bool, changes: Counter[str]) -> str:
    """The line after the steps 2 to 7; `changes` counts what was changed."""
    line = _SEPARATORS.sub(" ", line)
    replacements = _replacements()
    if line.isascii():
        replacements = replacements[:1]
    for kind, pattern, replacement in replacements:
        line, number = pattern.subn(replacement, line)
        changes[kind] += number
    if lower and line != line.lower():
        changes["lines_lowered"] += 1
        line = line.lower()
    if not unicodedata.is_normalized("NFC", line):
        changes["lines_composed"] += 1
        line = unicodedata.normalize("NFC", line)
    line, number = _SPACES.subn(" ", line)
    changes["spaces"] += number
    return line.strip()


@functools.cache
def _replacements() -> list[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]]]:
    """Kinds, patterns and what they are replaced by, in order. In ASCII only the first pattern finds anything."""

    def is_control(character: str) -> bool:
        return unicodedata.category(character) in ("Cc", "Cf") and character not in _JOINERS

    def is_decomposable(character: str) -> bool:
        return unicodedata.decomposition(character) != "" and _expanded(character) != character

    def decomposed(match: re.Match[str]) -> str:
        return _expanded(match[0])

    return [
        ("controls_removed", _one_of(is_control), ""),
        ("characters_decomposed", _one_of(is_decomposable), decomposed),
        *_SIGNS,
    ]


def _one_of(wanted: Callable[[str], bool]) -> re.Pattern[str]:
    """A pattern of one character that is wanted. Written in ranges, since `re` looks at each in turn."""
    all_characters = map(chr, range(sys.maxunicode + 1))
    ranges = []
    for is_wanted, group in itertools.groupby(all_characters, wanted):
        if is_wanted:
            first, *others = map(re.escape, group)
            last = others[-1] if others else first
            ranges.append(f"{first}-{last}")
    return re.compile(f"[{''.join(ranges)}]")


@functools.cache
def _expanded(character: str) -> str:
    """What stands for a character: its compatibility decomposition, with the exceptions of the module."""
    parts = unicodedata.decomposition(character).split()
    form = ""
    if parts and parts[0].startswith("<"):
        form = parts.pop(0)
    whole = "".join(chr(int(part, 16)) for part in parts)
    is_accent_alone = whole.startswith(" ") and len(whole) > 1
    if form in _KEPT_FORMS or (form and is_accent_alone):
        return character
    expanded = "".join(map(_expanded, whole))
    # A canonical decomposition is composed again later, so it matters only if a part of it is changed.
    if not form and expanded == whole:
        return character
    return expanded


def normalize_file(
    source: Path, target: Path, *, lower: bool, text_column: str, mapped: Callable[..., Any]
) -> dict[str, int]:
    """Normalize a file, block by block, so that memory does not grow with the file.

    Args:
        source: UTF-8 text with a document or a sentence a line, plain or in gzip, or a .parquet file, whose texts
            become a line each.
        target: .txt or .txt.gz; replaced when all is written. ``target``.report.json gets what is returned.
        text_column: of a .parquet file.
        mapped: as `map`, in any number of processes. Blocks do not depend on it, so nor does the result.

    Returns:
        What was changed: numbers by kind, sorted by name.

    Raises:
        UsageError: if the source cannot be read or is no text, or the target cannot be written.
    """
    for path, kinds in ((source, INPUT_KINDS), (target, OUTPUT_KINDS)):
        if not path.name.endswith(kinds):
            raise UsageError(f"{path} must end in {' or '.join(kinds)}")
    if target.exists() and source.samefile(target):
        raise UsageError(f"{target} is the input itself; name another file to write")
    changes: Counter[str] = Counter()
    partial = target.with_name(target.name + ".partial")
    blocks = _blocks(_lines(source, text_column))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as at_end:
            at_end.callback(partial.unlink, missing_ok=True)
            with open(partial, "wb") as file:
                out: Any = file
                if target.name.endswith(".gz"):
                    # Without a name and a time in it, so that equal texts are equal files.
                    out = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
                normalize_block = functools.partial(normalize, lower=lower)
                with out:
                    for lines, block_changes in mapped(normalize_block, blocks):
                        changes += block_changes
                        text = "".join(line + "\n" for line in lines)
                        out.write(text.encode())
            partial.rename(target)
        report = dict(sorted(changes.items()))
        content = json.dumps(report, indent=2) + "\n"
        target.with_name(target.name + ".report.json").write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {reason(error)}") from error
    return report


def _blocks(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lines in blocks of about `BLOCK_CHARACTERS`; a word hyphenated at the end of a line stays in one block."""
    block: list[str] = []
    size = 0
    for line in lines:
        if size >= BLOCK_CHARACTERS and not _HYPHENATED.fullmatch(block[-1]):
            yield block
            block = []
            size = 0
        block.append(line)
        size += len(line) + 1
    if block:
        yield block


def _lines(source: Path, text_column: str) -> Iterator[str]:
    """The lines of a text file, without their ends, or the texts of a table, each as a line."""
    try:
        if source.name.endswith(".parquet"):
            yield from _texts(source, text_column)
            return
        opened: Callable[..., Any] = gzip.open if source.name.endswith(".gz") else open
        with opened(source, "rt", encoding="utf-8-sig", newline="\n") as text:
            for line in text:
                yield line.removesuffix("\n").removesuffix("\r")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{source} cannot be read: {error}") from error


def _texts(source: Path, text_column: str) -> Iterator[str]:
    """The texts of a .parquet file, each as a line."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(source)
    check_columns(str(source), {text_column: "--text-column"}, file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=1000, columns=[text_column]):
        texts = [text_of(str(source), text_column, value) for value in batch.column(0).to_pylist()]
        for text in texts:
            if text.strip():  # an empty line would part documents
                yield text.replace("\n", " ")
