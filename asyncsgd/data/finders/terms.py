"""Terms of a list, wherever they stand in a text.

A text is read word by word; a word is a run of letters and digits, and every other sign is a word of its own. A term is
found where its words stand one after another, with any white space between them. So a term begins and ends at the
border of a word: ``oxide`` is not found in ``dioxide``, but in ``oxide-based``. A text is searched from the left. Of
several terms that begin at one word, the longest is found, and the search goes on behind it.

A term in small letters is found in any case. A term with a capital letter is found as it is written, so that ``Co``
(cobalt) is not found in ``CO``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from asyncsgd.data.finders.base import Find, Finder, Span, hashed
from asyncsgd.data.tables import existing_path
from asyncsgd.errors import UsageError

TERMS_FORMAT = 1
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Terms(Finder):
    """The terms of a text file, one a line."""

    name: ClassVar[str] = "terms"
    summary: ClassVar[str] = "the terms of a file, one a line; small letters match any case"
    modules: ClassVar[tuple[str, ...]] = ("asyncsgd.data.finders.terms",)

    file: str

    def prepare(self, texts: Sequence[str], cache: Path) -> Lexicon:
        path = existing_path(self.file, "--finder terms:FILE", pydocs=False, kinds=(".txt",))
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise UsageError(f"the term list {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"the term list {path} is not UTF-8 (byte offset {error.start}); convert it") from error
        terms = sorted({line.strip() for line in lines if line.strip()})
        if not terms:
            raise UsageError(f"the term list {path} holds no term; write one a line")
        return Lexicon(tuple(terms))


@dataclass(frozen=True)
class Lexicon(Find):
    """Terms to be found; see the module.

    >>> Lexicon(("fuel cell", "solid oxide fuel cell", "Co")).spans(["A Solid Oxide  fuel cell with CO and Co."], "cpu")
    [[(2, 24), (37, 39)]]
    """

    terms: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashed(TERMS_FORMAT, self.terms)

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        by_first = _by_first_word(self.terms)
        return [list(_found(text, by_first)) for text in texts]


_Entry = tuple[tuple[str, ...], bool]
"""The words of a term, and whether their case matters."""


@functools.lru_cache(maxsize=4)
def _by_first_word(terms: tuple[str, ...]) -> dict[str, list[_Entry]]:
    """Terms by their first word in small letters, the longest first."""
    by_first: dict[str, list[_Entry]] = {}
    for term in terms:
        if words := tuple(WORD.findall(term)):
            by_first.setdefault(words[0].lower(), []).append((words, term != term.lower()))
    for entries in by_first.values():
        entries.sort(key=lambda entry: -len(entry[0]))
    return by_first


def _found(text: str, by_first: dict[str, list[_Entry]]) -> list[Span]:
    words = [(word[0], word.start(), word.end()) for word in WORD.finditer(text)]
    lower = [word.lower() for word, _, _ in words]
    exact = [word for word, _, _ in words]
    spans, at = [], 0
    while at < len(words):
        length = 1
        for term, has_capital in by_first.get(lower[at], ()):
            if tuple((exact if has_capital else lower)[at : at + len(term)]) == term:
                length = len(term)
                spans.append((words[at][1], words[at + length - 1][2]))
                break
        at += length
    return spans
