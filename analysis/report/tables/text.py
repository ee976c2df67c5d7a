"""Rows of cells as aligned columns for a console, as Markdown, as CSV. It imports nothing heavy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

MISSING = "-"


def or_missing(value: float | None, form: str = "g") -> str:
    """
    >>> or_missing(12.0), or_missing(1234, ","), or_missing(None)
    ('12', '1,234', '-')
    """
    return MISSING if value is None else format(value, form)


def aligned(lines: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """Columns two spaces apart, a rule under the first line; `numeric` columns stand to the right.

    >>> print("\\n".join(aligned([["rule", "loss"], ["sync", "5.25"], ["async", "13.5"]], [False, True])))
    rule   loss
    -----------
    sync   5.25
    async  13.5
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = []
    for line in lines:
        columns = zip(line, widths, numeric, strict=True)
        cells = [cell.rjust(width) if to_the_right else cell.ljust(width) for cell, width, to_the_right in columns]
        drawn.append("  ".join(cells).rstrip())
    drawn.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return drawn


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
