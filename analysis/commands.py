"""How every command ends: with an exit code, and no traceback for what the user has to change."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncsgd.errors import UsageError
from asyncsgd.records.plain_text import PlainStream, plain_lines, shown_through

if TYPE_CHECKING:
    from rich.console import Console


def carried_out(command: Callable[[], None]) -> int:
    """Carry out a command that prints; the exit code is 0, or 2 for what the user has to change.

    Nothing that it prints holds a control character: names, messages and texts come from files.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "±" on a console that has no such character is no reason to fail
    with shown_through(PlainStream):
        try:
            command()
            sys.stdout.flush()  # here, where a reader that has gone is no error
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # its reader has seen enough (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def rich_console() -> Console:
    """A console of rich in a command: its own escape sequences reach the terminal, and those of a text do not."""
    from rich.console import Console

    class Plain(Console):
        def render(self, *arguments: Any, **options: Any) -> Any:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=plain_lines(segment.text))

    stream = sys.stdout
    return Plain(file=stream.stream if isinstance(stream, PlainStream) else stream)
