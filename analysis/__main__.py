"""``python -m analysis``: the commands, each with what it shows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from asyncsgd.errors import nearest

COMMANDS = (
    *("compare", "report", "tasks", "language_model", "parallelism", "speed_ladder"),
    *("candidates", "lab_notes", "watch"),
)


def summary(command: str) -> str:
    """How it is typed and what it shows: the first line of its docstring. It is read and not imported, which would
    load pandas and matplotlib.
    """
    home = Path(__file__).parent
    file = home / command / "__main__.py" if (home / command).is_dir() else home / f"{command}.py"
    source = file.read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("``", "")


def main(argv: list[str]) -> int:
    if not argv:
        print("\n".join(map(summary, COMMANDS)))
        return 0
    name = argv[0].replace("-", "_")
    hint = f"; type python -m analysis.{name}" if name in COMMANDS else nearest(name, COMMANDS)
    print(f"error: python -m analysis takes no arguments, got {argv[0]!r}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
