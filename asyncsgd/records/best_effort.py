"""Printing that ends no run. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class BestEffort:
    """A stream that ends no run: not by a reader that has gone away (``| head``), a full disk or a closed terminal,
    after which nothing is shown any more, nor by a character that its encoding lacks."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or _nowhere()

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):
            self._give_up()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        # What the stream holds back would be refused again at the end of the process, with an exit code of its own.
        nowhere = _nowhere()
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream = nowhere


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Within it whatever this process prints is `BestEffort`."""
    out: Any = BestEffort(sys.stdout)
    err: Any = BestEffort(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()


def say(line: str) -> None:
    """Print a line at once, as well as can be; see `BestEffort`."""
    shown = BestEffort(sys.stdout)
    shown.write(line + "\n")
    shown.flush()
