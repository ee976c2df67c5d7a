"""Finders say which words of a text are worth masking; one a file, and a line in `ALL`."""

from __future__ import annotations

from collections.abc import Mapping

from asyncsgd.data.finders.base import Finder
from asyncsgd.data.finders.keyness import Keyness
from asyncsgd.data.finders.ner import Ner
from asyncsgd.data.finders.terms import Terms
from asyncsgd.named_choices import Kind, describe

ALL: Mapping[str, type[Finder]] = {finder.name: finder for finder in (Ner, Terms, Keyness)}

_KIND = Kind("finder", "finders", "--finder", first_is_positional=True)


def parse_finder(text: str) -> Finder:
    """Return the finder that `text` names.

    Raises:
        UsageError: for an unknown name or parameter, or a value out of range.

    >>> parse_finder("keyness:../wiki,threshold=10.83")
    Keyness(reference='../wiki', threshold=10.83, ratio=4.0, min_count=5)
    """
    return _KIND.read(text, ALL)


def describe_finders() -> str:
    """What ``--finder help`` prints."""
    return "\n".join(["finders, as NAME[:value,key=value,...]:", *describe(ALL)])
