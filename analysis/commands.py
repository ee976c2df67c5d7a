"""How every command begins and ends: with its flags, with an exit code, and no traceback for what a user can change."""

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


def begun(
    command: Callable[..., None],
    doc: str | None,
    arguments: Sequence[str] | None,
    flags: Mapping[str, Mapping[str, Any]],
    examples: str = "",
) -> int:
    """Parse the flags of a command, and carry it out with them; the exit code is 0, or 2 for what a user can change.

    Args:
        doc: of its module; the first line says how it is typed and what it shows. Where another door was typed,
            `sys.argv` begins with that.
        flags: name -> what `ArgumentParser.add_argument` takes.
    """
    first_line = str(doc).partition("\n")[0].replace("``", "")
    typed, _, shows = first_line.partition(": ")
    *door, name = typed.split()[:4]
    prog = " ".join([*door, name])
    if sys.argv[0].endswith(f" {name}"):
        prog = sys.argv[0]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=shows[:1].upper() + shows[1:],
        epilog=examples.replace(" ".join(door), prog.removesuffix(f" {name}")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, options in flags.items():
        parser.add_argument(name, **options)
    given = vars(parser.parse_args(arguments))
    os.environ["MPLBACKEND"] = "Agg"  # a notebook's is handed to its commands, and may be nothing to this environment
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "±" on a console that has no such character is no reason to fail
    try:
        command(**given)
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
