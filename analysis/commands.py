"""Runs a command of the analysis: parses its flags, and ends without a traceback for what a user can change."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import write_text


def run_command(
    command: Callable[..., None],
    doc: str | None,
    arguments: Sequence[str] | None,
    flags: Mapping[str, Mapping[str, Any]],
    examples: str = "",
) -> int:
    """Parse the flags of a command and carry it out; the exit code is 0, or 2 for what a user can change.

    Args:
        doc: the docstring of its module. Its first line says how the command is typed and, after a colon, what it does.
        flags: name -> what `ArgumentParser.add_argument` takes.
        examples: what ``--help`` ends with.
    """
    first_line = str(doc).partition("\n")[0].replace("``", "")
    usage, _, description = first_line.partition(": ")
    *prefix, name = usage.split()[:4]  # python -m analysis NAME
    prog = " ".join([*prefix, name])
    if sys.argv[0].endswith(f" {name}"):  # typed in another way, such as `asyncsgd NAME`
        prog = sys.argv[0]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description[:1].upper() + description[1:],
        epilog=examples.replace(" ".join(prefix), prog.removesuffix(f" {name}")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, options in flags.items():
        parser.add_argument(flag, **options)
    values = vars(parser.parse_args(arguments))
    os.environ["MPLBACKEND"] = "Agg"  # a notebook sets one for the commands that it starts, which may not exist here
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "±" on a console that has no such character is no reason to fail
    try:
        command(**values)
        sys.stdout.flush()  # here, where a reader that has gone is no error
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # its reader has seen enough (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def write(path: Path, text: str) -> None:
    """Write all of a file or nothing: whoever has a page open never reloads half of one."""
    shown = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        path.write_text(shown, encoding="utf-8")
    else:
        write_text(path, shown)
