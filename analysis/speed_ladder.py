"""``python -m analysis speed_ladder OUT``: how many times as fast the rungs of a speed ladder make a training.

It shows a study of ``asyncsgd study speed_ladder``. What is printed is kept as ladder.md, and the page as report.html.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import special
from analysis.commands import run_command, write
from analysis.ladder import read
from analysis.ladder_sections import text
from analysis.load import load
from analysis.page import render


def report(folder: Path) -> None:
    """Print the report of the ladder in `folder`, and write ladder.md and report.html there.

    Raises:
        UsageError: if it holds no finished ladder, or nothing can be written there.
    """
    markdown = text(read(folder))
    file = folder / "report.html"
    write(folder / "ladder.md", markdown)
    write(file, render(special.page_of(load(folder), file, "speed_ladder")))
    print(markdown)
    print(f"page   {file}")


def main(arguments: Sequence[str] | None = None) -> int:
    folder = {"type": Path, "metavar": "OUT", "help": "folder of a study that is a speed ladder"}
    return run_command(report, __doc__, arguments, {"folder": folder})


if __name__ == "__main__":
    sys.exit(main())
