"""Texts before they are tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, none of them empty, with an optional label each.

    Args:
        texts: the documents.
        labels: one label per text (for ``pydocs`` the package it comes from), or None where the source has none.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None


def without_surrogates(text: str) -> str:
    # JSON and Python sources can spell half a surrogate pair, which no encoder accepts later.
    return text.encode("utf-8", "replace").decode("utf-8")
