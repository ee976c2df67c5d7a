"""``python -m analysis``: the commands, each with what it shows; ``python -m analysis COMMAND ...`` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

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


def summary(command: str) -> str:
    """How it is typed and what it shows: the first line of its docstring. It is read and not imported, which would
    load pandas and matplotlib.
    """
    source = (Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("``", "")


def main(argv: list[str]) -> int:
    if argv[:1] in ([], ["-h"], ["--help"]):
        print("\n".join(map(summary, COMMANDS)))
        return 0
    name = argv[0].replace("-", "_")
    if name not in COMMANDS:
        print(f"error: {argv[0]!r} is no command of python -m analysis{nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"analysis.{name}", *argv[1:]]
    runpy.run_module(f"analysis.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
