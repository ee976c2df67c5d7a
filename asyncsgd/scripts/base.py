"""How every command begins and ends: signals, one line per error, the exit code. Standard library only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.best_effort import best_effort


class Typed(NamedTuple):
    """How a command was typed, for its help, for what it records and for what it says to type next.

    >>> Typed.of_script("train.py").with_word("masked_lm").line
    'python experiments/train.py masked_lm'
    >>> Typed.at_door("asyncsgd", "train").with_word("masked_lm").line
    'asyncsgd train masked_lm'
    """

    prog: str
    """In ``--help``."""
    line: str
    """How a line that starts it again begins."""
    analysis: str
    """How a command of the analysis begins."""
    door: str = ""
    """What stands in front of the command; empty: nothing, it is a script of experiments/."""

    @classmethod
    def of_script(cls, name: str) -> Typed:
        """A script under experiments/ was typed."""
        return cls(name, f"python experiments/{name}", "python -m analysis")

    @classmethod
    def at_door(cls, door: str, command: str) -> Typed:
        """A command was typed after ``asyncsgd`` or ``python -m asyncsgd``."""
        prog = f"{door} {command}"
        return cls(prog, prog, door, door)

    def config(self, name: str) -> str:
        """How a config of the package is named."""
        return name if self.door else f"experiments/configs/{name}.yaml"

    def resume(self, folder: str) -> str:
        """What goes on with a run.

        >>> Typed.at_door("asyncsgd", "train").with_word("masked_lm").resume("runs/a")
        'asyncsgd resume runs/a'
        >>> Typed.at_door("asyncsgd", "train").with_word("mine:Shapes").resume("runs/a")
        'asyncsgd train mine:Shapes --resume runs/a'
        """
        if self.door and ":" not in self.line:
            return f"{self.door} resume {folder}"
        return f"{self.line} --resume {folder}"  # a folder alone names no code of one's own

    def with_word(self, word: str) -> Typed:
        """The first argument was `word`, which belongs to the command."""
        return self._replace(prog=f"{self.prog} {word}", line=f"{self.line} {word}")


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
    os.environ["MPLBACKEND"] = "Agg"  # a notebook's is handed to its commands, and may be nothing to this environment
    with best_effort(), StopRequest(ends_with_process=ends_with_process) as stop:
        try:
            code = run(list(sys.argv[1:] if argv is None else argv), stop)
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
    if ends_with_process and os.environ.get("WORLD_SIZE", "1") != "1":
        import shutil
        from multiprocessing import util

        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # of the fork server's socket: exits would remove it
        os._exit(code)  # threads that wait for other ranks may abort the end of the interpreter
    return code


def another_speaks(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several ranks of its host and not the first, so that what all of them have to say is said
    already. On each of several hosts the first one speaks, since nobody there sees what rank 0 says.

    >>> another_speaks({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500"}), another_speaks({"RANK": "1"})
    (True, False)
    >>> two_hosts = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    >>> another_speaks(two_hosts | {"RANK": "2", "LOCAL_RANK": "0"})
    False
    """
    # A RANK that is left over from another program makes no rank.
    if "MASTER_PORT" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return False
    if environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]) == environment["WORLD_SIZE"]:
        return environment["RANK"] != "0"
    return environment.get("LOCAL_RANK", environment["RANK"]) != "0"


def add_task_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of every command that needs the task of a run; see `asyncsgd.run.recorded` for who is believed."""
    told = "class of the run's task, if it is none of the library's own: a folder alone never names code to run"
    parser.add_argument("--task", metavar="MODULE:CLASS", help=told)


def go_offline(*named: tuple[str, str]) -> None:
    """No network call where the user named neither a Hub model nor a Hub data set; to be called before transformers
    is imported.

    Args:
        named: models, each with the data of its runs.
    """
    if all(
        (model in ("tiny", "small", "tiny-gpt", "tiny-distilbert") or os.path.isdir(os.path.expanduser(model)))
        and "hub:" not in data
        for model, data in named
    ):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
