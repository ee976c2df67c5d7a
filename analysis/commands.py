"""How every command ends: with an exit code, and no traceback for what the user has to change."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from asyncsgd.errors import UsageError


def carried_out(command: Callable[[], None]) -> int:
    """Carry out a command that prints; the exit code is 0, or 2 for what the user has to change."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "±" on a console that has no such character is no reason to fail
    try:
        command()
        sys.stdout.flush()  # here, where a reader that has gone is no error
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # its reader has seen enough (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def write(path: Path, text: str, flag: str) -> None:
    """Write a file that a flag names.

    Raises:
        UsageError: if it cannot be written; it names the flag.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written ({error.strerror}); name another file") from error
