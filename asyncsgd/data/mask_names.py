"""The masks by name, for flags and ``--help``, which wait neither for numpy nor for the masks themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncsgd.errors import UsageError
from asyncsgd.extensions import MASKS, Registry
from asyncsgd.settings.choices import Choices

if TYPE_CHECKING:
    from asyncsgd.data.masks import Strategy

OWN = {
    "token": "asyncsgd.data.masks:ByToken",
    "word": "asyncsgd.data.masks:ByWord",
    "candidates": "asyncsgd.data.masks:ByCandidate",
}
"""The library's own."""

NAMED: Registry[type[Strategy]] = Registry("mask", MASKS, OWN, "asyncsgd.data.masks:Strategy")
"""Those of installed packages too."""
CHOICES: Choices[Any] = Choices("mask", "masks", "--mask", NAMED)


def check_mask(text: str) -> None:
    """Refuse what is no mask ``NAME[:key=value,...]``; the library's own have flags in place of parameters.

    Raises:
        UsageError: if there is none, or it does not take these parameters.
    """
    name, colon, _ = text.partition(":")
    if colon and name in OWN:
        raise UsageError(f"--mask {name} takes no parameters, got {text}; its settings are flags, which --help lists")
    CHOICES.read(text)
