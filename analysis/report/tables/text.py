"""Rows of cells as Markdown and as CSV. It imports nothing heavy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

MISSING = "-"


def markdown(lines: Iterable[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """A table in Markdown, its first line the header. What Markdown would read as a sign must be escaped before."""
    header, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return [header, "|" + "".join("---:|" if to_the_right else "---|" for to_the_right in numeric), *rows]


def as_csv(lines: Iterable[Iterable[object]]) -> str:
    """Unrounded, a missing value empty. A text that a spreadsheet would compute has ``'`` before it; numbers have not.

    >>> as_csv([("name", "loss"), ("a, b", None), ("c", 0.1)])
    'name,loss\\n"a, b",\\nc,0.1\\n'
    >>> as_csv([("=1+2", "-1.5", "-inf", "-a", -0.5)])
    "'=1+2,-1.5,-inf,'-a,-0.5\\n"
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(_not_computed, line) for line in lines)
    return file.getvalue()


def _not_computed(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")) or cell == MISSING:
        return cell
    try:
        float(cell)
    except ValueError:
        return "'" + cell
    return cell
