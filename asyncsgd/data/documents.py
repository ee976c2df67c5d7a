"""Texts in a fixed order, with their labels: what tables are read into, and what the built-in documentation is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, none of them empty, each with its label where the source has some."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    rows: tuple[int, ...] = field(default=(), compare=False)
    """The place of each text among the rows of its source, from 0, where there is one source."""


def without_surrogates(text: str) -> str:
    """The text with a question mark in place of each half of a surrogate pair."""
    # JSON and Python sources can spell half a surrogate pair, which no encoder accepts later.
    return text.encode("utf-8", "replace").decode("utf-8")
