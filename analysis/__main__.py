"""``python -m analysis``: the commands, each with what it shows; ``python -m analysis COMMAND ...`` runs one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from asyncsgd.errors import nearest

COMMANDS = (
    "compare",
    "report",
    "tasks",
    "language_model",
    "parallelism",
    "speed_ladder",
    "candidates",
    "lab_notes",
    "timeline",
    "watch",
)
DOOR = "python -m analysis"


def summary(command: str, door: str = DOOR) -> str:
    """How it is typed and what it shows: the first line of its docstring. It is read and not imported, which would
    load pandas and matplotlib.
    """
    with open(Path(__file__).parent / f"{command}.py", encoding="utf-8") as source:
        line = source.readline()
    return line.strip().lstrip('r"').replace("``", "").replace(DOOR, door)


def is_command(name: str) -> bool:
    """Whether a command is called so; a dash is an underscore."""
    return name.replace("-", "_") in COMMANDS


def main(argv: list[str], door: str = DOOR) -> int:
    """Carry out a command, or list them; the exit code.

    Args:
        door: how the commands were reached, for their help.
    """
    if argv[:1] in ([], ["-h"], ["--help"]):
        print("\n".join(map(summary, COMMANDS)))
        return 0
    if not is_command(argv[0]):
        print(f"error: {argv[0]!r} is no command of {door}{nearest(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    name = argv[0].replace("-", "_")
    module: Any = importlib.import_module(f"analysis.{name}")
    sys.argv = [f"{door} {name}", *argv[1:]]
    return int(module.main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
