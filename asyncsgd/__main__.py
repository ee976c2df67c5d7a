"""The door to every command: ``asyncsgd COMMAND ...``, which is also ``python -m asyncsgd COMMAND ...``.

Without a command it says which there are. Nothing that a command needs is imported before it is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from asyncsgd import __version__
from asyncsgd.errors import UsageError, nearest, reason

SCRIPTS = {
    "train": ("TASK", "train a model: masked_lm, causal_lm, ..., or a task of your own"),
    "study": ("CONFIG", "make the runs of a study: tune, register, test, go on later"),
    "simulate": ("--rule RULE", "simulate a rule on a closed-form problem, with any number of workers"),
    "check": ("TASK", "look for mistakes in a task of your own before it is trained"),
}
"""Name -> its first argument, and what it does. Each is a module of `asyncsgd.scripts`, with a function
``run(argv, stop, typed)``."""

OF_RUNS = {
    "resume": ("RUN", "go on with it where it was stopped"),
    "replay": ("RUN", "run it again in one process, and compare it bit for bit"),
    "export": ("RUN", "write its model, or that of a checkpoint, for transformers"),
    "predict": ("RUN", "predict it on the virtual clock, and compare"),
}
"""The same, with a function ``run(argv, prog)``."""

OTHERS = {
    "completion": ("bash", "print what completes these words in bash, or in zsh"),
}
"""The same again, of no run."""
OWN = SCRIPTS | OF_RUNS | OTHERS

ANALYSIS = "analysis.__main__"
"""Its commands are commands of this door too. The library does not import the analysis: it is asked by name, here."""


def main(argv: list[str] | None = None) -> int:
    """Carry out a command and return its exit code.

    Args:
        argv: None: this process's own, which then ends with the command.
    """
    door = "python -m asyncsgd" if sys.argv[0] == __file__ else "asyncsgd"
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in OWN:
        return run_command(name, arguments, door, ends_with_process=argv is None)
    analysis: Any = importlib.import_module(ANALYSIS)
    if analysis.is_command(name):
        return int(analysis.main([name, *arguments], door))
    from asyncsgd.records.best_effort import best_effort

    with best_effort():
        if name in ("", "-h", "--help"):
            print(described(door, analysis))
            return 0
        if name == "--version":
            print(f"asyncsgd {__version__}")
            return 0
        print(f"error: {refusal(name, door, commands())}", file=sys.stderr)
        return UsageError.exit_code


def commands() -> list[str]:
    """The names of all commands."""
    return [*OWN, *importlib.import_module(ANALYSIS).COMMANDS]


def run_command(name: str, arguments: list[str], door: str, *, ends_with_process: bool) -> int:
    """Carry out a command of this library."""
    from asyncsgd.scripts.base import Typed, run_script

    typed = Typed.at_door(door, name)
    module: Any = importlib.import_module(f"asyncsgd.scripts.{name}")
    if name in SCRIPTS:
        return run_script(
            lambda given, stop: module.run(given, stop, typed),
            arguments,
            ends_with_process=ends_with_process,
            goes_on=name == "study",
        )
    try:
        return run_script(lambda given, stop: module.run(given, typed.prog), arguments)
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {reason(error)}", file=sys.stderr)
        return UsageError.exit_code


def described(door: str, analysis: Any) -> str:
    """The commands, each with what it does."""
    lines = [f"asyncsgd {__version__} in {Path(__file__).parent}"]
    for name, (argument, shows) in OWN.items():
        lines.append(f"  {f'{door} {name} {argument}':40} {shows}")
    lines.append("\ntables, pictures and verdicts from run folders:")
    for name in analysis.COMMANDS:
        typed, _, shows = analysis.summary(name, door).partition(": ")
        lines.append(f"  {typed:40} {shows}")
    lines.append(f"\nto begin: {door} train masked_lm --mode async --nproc 2; then {door} compare runs")
    lines.append(f"{door} COMMAND --help says more.")
    return "\n".join(lines)


def refusal(name: str, door: str, commands: list[str]) -> str:
    """Why `name` is no command, and what was meant."""
    from asyncsgd.tasks import NAMED

    if name in NAMED or ":" in name:
        return f"{name!r} is no command but a task; type {door} train {name}"
    hint = nearest(name, commands) or f"; {door} --help lists them"
    return f"{name!r} is no command of {door}{hint}"


if __name__ == "__main__":
    sys.exit(main())
