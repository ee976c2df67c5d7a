"""A table of the report: text for a page, the values behind it, and how it is written as Markdown, LaTeX or CSV."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def broad(self) -> bool:
        """Whether it has too many columns for an upright sheet of paper."""
        return len(self.columns) > 9


Headed = tuple[Column, Cell]
"""A cell under its column's heading."""


def words(title: str, cell: Cell | str) -> Headed:
    """A cell of text."""
    return Column(title, numeric=False), _cell(cell)


def prose(title: str, cell: Cell | str) -> Headed:
    """A cell of text that may take several lines."""
    return Column(title, numeric=False, wide=True), _cell(cell)


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


def latex(tables: Iterable[Table]) -> str:
    """The tables for a paper, with booktabs; those longer than a page as longtable."""
    blocks = ["% needs \\usepackage{booktabs,longtable,graphicx}"]
    for table in tables:
        long = len(table.rows) > 40
        layout = "".join("r" if column.numeric else "l" for column in table.columns)
        if any(column.wide for column in table.columns):
            layout = "".join("p{5cm}" if column.wide else "r" if column.numeric else "l" for column in table.columns)
        head = " & ".join(_latex(column.title) for column in table.columns) + r" \\"
        body = [" & ".join(_latex(_whole(cell)) for cell in row) + r" \\" for row in table.rows]
        caption = rf"\caption{{{_latex(' '.join([sentence(table.title), table.lead, *table.notes]).strip())}}}"
        label = rf"\label{{tab:{table.key}}}"
        if long:
            lines = [rf"{{\scriptsize\begin{{longtable}}{{{layout}}}", caption + label + r"\\", r"\toprule", head]
            lines += [r"\midrule\endhead", *body, r"\bottomrule", r"\end{longtable}}"]
        else:
            narrow = len(table.columns) > 6
            lines = [r"\begin{table}[htbp]\centering\footnotesize", caption, label]
            lines += [r"\resizebox{\textwidth}{!}{%"] * narrow
            lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
            lines += [r"\end{tabular}" + "}" * narrow, r"\end{table}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def as_csv(table: Table) -> str:
    """The unrounded values behind one table; a missing value is empty, a list is JSON."""
    flat = [dict(_flat(record)) for record in table.records]
    names = list(dict.fromkeys(name for record in flat for name in record))
    # a part that is None here and a dataclass elsewhere has no column of its own
    names = [name for name in names if not any(other.startswith(f"{name}_") for other in names) or _filled(flat, name)]
    return text.as_csv([names, *([record.get(name) for name in names] for record in flat)])


def _filled(flat: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(record.get(name) is not None for record in flat)


def _flat(record: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(record, tuple):  # a whole and one of its parts: the other parts have rows of their own
        for whole_or_part in record:
            for name, value in _flat(whole_or_part):
                if whole_or_part is record[-1] or not str(value).startswith("[{"):
                    yield name, value
        return
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{name}_")
        elif isinstance(value, tuple):
            yield name, json.dumps(_plain(value))
        else:
            yield name, value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _whole(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


_MARKDOWN = str.maketrans({"|": r"\|", "\n": " ", "\r": " ", "<": "&lt;", ">": "&gt;", "`": r"\`", "*": r"\*"})

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "\N{MULTIPLICATION SIGN}": r"$\times$",
        "²": r"$^2$",
        "…": r"\ldots{}",
        "\n": " ",
        "\r": " ",
    }
)


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").translate(_MARKDOWN)


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def sentence(text: str) -> str:
    """`text` with a full stop.

    >>> sentence("no fit"), sentence("p is 0.5."), sentence("")
    ('no fit.', 'p is 0.5.', '')
    """
    text = text.strip()
    return text if not text or text[-1] in ".!?" else f"{text}."
