"""How every script begins and ends: signals, one line per error, the exit code. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.console import best_effort
from asyncsgd.runtime.launch import another_speaks
from asyncsgd.signals import StopRequest


def run_script(
    run: Callable[[list[str], StopRequest], int],
    argv: Sequence[str] | None = None,
    *,
    ends_with_process: bool = False,
    goes_on: bool = False,
) -> int:
    """Call ``run(argv, stop)`` and return the exit code of the script.

    Args:
        run: raises `UsageError` or `RunError` with a message for the user. It raises KeyboardInterrupt if it is asked
            to stop before there is anything to save.
        argv: None: this process's own.
        ends_with_process: signals that come after the script's end do nothing.
        goes_on: the same command goes on where it was stopped, or where a disk was full.
    """
    with best_effort(), StopRequest(ends_with_process=ends_with_process) as stop:
        try:
            return run(list(sys.argv[1:] if argv is None else argv), stop)
        except (UsageError, RunError) as error:
            if isinstance(error, RunError) or not another_speaks(os.environ):  # all ranks have the same settings
                print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            if not goes_on:
                raise
            print(f"error: {error}; the same command goes on once that is mended", file=sys.stderr)
            return RunError.exit_code
        except KeyboardInterrupt:
            print("interrupted" + "; the same command goes on from here" * goes_on, file=sys.stderr)
            return 130
