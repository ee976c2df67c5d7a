"""Text as a terminal can show it: what comes from a file moves no cursor, and changes no colour and no title."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_IN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Control characters as Python spells them, those that end a line among them.

    >>> plain("\\x1b[31mred\\n")
    '\\\\x1b[31mred\\\\n'
    """
    return _CONTROL.sub(_spelled, text)


def plain_lines(text: str) -> str:
    """The same for text of several lines: newlines and tabs stay.

    >>> plain_lines("\\x1b[31mred\\n")
    '\\\\x1b[31mred\\n'
    """
    return _CONTROL_IN_LINES.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


class PlainStream:
    """A stream that shows what it is given as `plain_lines`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        """What it shows it on."""

    def write(self, text: str) -> int:
        # A bar of progress is drawn again from the beginning of its line, so it begins with a carriage return.
        beginning = "\r" if text.startswith("\r") else ""
        self.stream.write(beginning + plain_lines(text[len(beginning) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def shown_through(stream: Callable[[TextIO], PlainStream]) -> Iterator[None]:
    """Within it whatever this process prints goes through such a stream."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = stream(sys.stdout), stream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
