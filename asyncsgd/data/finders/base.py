"""What every finder promises: where in a text the words are that are worth masking."""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

Span = tuple[int, int]
"""Where a find begins and where it has ended, in characters."""


@dataclass(frozen=True)
class Finder(abc.ABC):
    """A finder as the user names it. Subclasses are frozen dataclasses; their fields are its parameters.

    It becomes a `Find` in one process, which reads what is slow to read. Any process calls the `Find`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    """What its processes import; naming them lets processes start sooner."""
    has_model: ClassVar[bool] = False
    """Whether it computes with torch, so that it may have a GPU."""

    @property
    def asks_hub(self) -> bool:
        """Whether it may need the Hugging Face Hub."""
        return False

    @abc.abstractmethod
    def prepare(self, texts: Sequence[str], cache: Path) -> Find:
        """Read what the finder needs.

        Args:
            texts: the training texts, which some finders count the words of.
            cache: folder of prepared data.

        Raises:
            UsageError: if the user must change something; the message says what.
        """


@dataclass(frozen=True)
class Find(abc.ABC):
    """A finder that is ready. Pickled, so small."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Changes whenever the spans of some text may change."""

    @abc.abstractmethod
    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        """Find in each text: a pure function of the texts of this call.

        Args:
            texts: any; an empty one has no spans.
            device: ``cpu`` or ``cuda:N``; only for what computes with torch.

        Returns:
            The spans of each text, in order and without overlap: ``0 <= start < end <= len(text)``.
        """


def hashed(*parts: object) -> str:
    """64 hexadecimal digits of what JSON can write."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
