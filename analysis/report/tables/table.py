"""A table of the report: text for a page, the values behind it, and how it is written as Markdown, LaTeX or CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from analysis.report.tables import text


@dataclasses.dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True
    wide: bool = False
    """Whether its text may take several lines."""


@dataclasses.dataclass(frozen=True)
class Cell:
    text: str
    small: str = ""
    """What qualifies the text: its n, mostly."""
    href: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    key: str
    """For ``--table`` and as its id in the page."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    records: tuple[Any, ...] = ()
    """The dataclasses behind the rows, for CSV."""
    lead: str = ""
    notes: tuple[str, ...] = ()
    narrow: bool = False
    """Whether its cells may break their lines, so that it fits where others have to scroll."""
    cards: bool = False
    """Whether every row becomes a card on a phone."""


Headed = tuple[Column, Cell]
"""A cell under its column's heading."""


def words(title: str, cell: Cell | str) -> Headed:
    """A cell of text."""
    return Column(title, numeric=False), _cell(cell)


def value(title: str, cell: Cell | str) -> Headed:
    """A cell of a number."""
    return Column(title), _cell(cell)


def _cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def tabled(
    key: str,
    title: str,
    rows: Iterable[Sequence[Headed]],
    records: Iterable[Any],
    *,
    lead: str = "",
    notes: tuple[str, ...] = (),
    narrow: bool = False,
    cards: bool = False,
) -> Table:
    """A table of `rows`, which all have the same headings; without rows it has no columns."""
    made = [tuple(zip(*row, strict=True)) for row in rows]
    headings = {columns for columns, _ in made}
    assert len(headings) <= 1, f"table {key} has rows under different headings"
    cells = tuple(cells for _, cells in made)
    return Table(key, title, next(iter(headings), ()), cells, tuple(records), lead, notes, narrow, cards)


TONES = {
    "better": "good",
    "worse": "bad",
    "equivalent": "same",
    "different but negligible": "same",
    "DONE": "",
    "DIVERGED": "bad",
    "FAILED": "bad",
    "UNREADABLE": "bad",
    "INTERRUPTED": "warn",
    "UNFINISHED": "warn",
    "MISSING": "warn",
}
"""Word -> tone of its badge; any other verdict is an open one."""


def badge(text: str) -> Cell:
    """A verdict or a status as a badge.

    >>> badge("better").tone, badge("undecided").tone
    ('good', 'open')
    """
    return Cell(text, tone=TONES.get(text, "open"))


def markdown(tables: Iterable[Table]) -> str:
    """The tables for a README or an issue.

    >>> table = Table("key", "T", (Column("a", numeric=False), Column("b")), ((Cell("x|y"), Cell("1", "n = 2")),))
    >>> print(markdown([table]), end="")
    ### T
    <BLANKLINE>
    | a | b |
    |---|---:|
    | x\\|y | 1 (n = 2) |
    """
    blocks = []
    for table in tables:
        lines = [f"### {_markdown(table.title)}", ""]
        lines += [_markdown(table.lead), ""] if table.lead else []
        cells = [[column.title for column in table.columns], *(map(_whole, row) for row in table.rows)]
        lines += text.markdown([list(map(_markdown, row)) for row in cells], [c.numeric for c in table.columns])
        lines += [line for note in table.notes for line in ("", _markdown(note))]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _whole(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


_MARKDOWN = str.maketrans({"|": r"\|", "\n": " ", "\r": " ", "<": "&lt;", ">": "&gt;", "`": r"\`", "*": r"\*"})


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").translate(_MARKDOWN)
