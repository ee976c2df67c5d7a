"""A table of the report: text for a page, the values behind it, and how it is written as Markdown, LaTeX or CSV."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.findings.times import Sensitivity
from analysis.report.tables import text
from analysis.report.tables.text import MISSING
from analysis.statistics.intervals import Interval

TIMES = "\N{MULTIPLICATION SIGN}"


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


def nats(value: float | None, places: int = 3) -> str:
    """
    >>> nats(5.12345), nats(-0.00001, 4), nats(None)
    ('5.123', '0.0000', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else f"{value:g}"
    return f"{round(value, places) + 0.0:.{places}f}"


def p_value(value: float | None) -> str:
    """
    >>> p_value(0.0156), p_value(0.0004), p_value(1.0), p_value(None)
    ('0.016', '<0.001', '1.000', '-')
    """
    if value is None or math.isnan(value):
        return MISSING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """
    >>> ratio(1.4159), ratio(31.41), ratio(None)
    ('1.42×', '31.4×', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else f"{value:g}"
    return f"{value:.2f}{TIMES}" if abs(value) < 10 else f"{value:.1f}{TIMES}"


def number(value: float | None, largest: float | None = None) -> str:
    """Four significant digits (of `largest`, where values are to have equally many places), and no exponent.

    >>> number(12345.6), number(61.234), number(0.012345), number(0.0), number(None)
    ('12,346', '61.23', '0.01235', '0', '-')
    >>> number(-9.9, largest=-17.9)
    '-9.90'
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else f"{value:g}"
    scale = value if largest is None else largest
    if scale == 0:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(scale))))
    return f"{value:,.{places}f}" if places <= 8 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """
    >>> percent(0.8333), percent(None)
    ('83 %', '-')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def between(interval: Interval | None, form: Callable[[float | None], str]) -> Cell:
    """An estimate with the ends of its interval, and its n beside."""
    if interval is None:
        return Cell(MISSING)
    if form is number:
        ends = [
            end for end in (interval.estimate, interval.low, interval.high) if end is not None and math.isfinite(end)
        ]
        largest = max(ends, key=abs, default=0.0)

        def form(value: float | None) -> str:
            return number(value, largest)

    return Cell(interval.text(form), f"n = {interval.n}")


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
        TIMES: r"$\times$",
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


def whose_targets(items: Sequence[Sensitivity]) -> str:
    """A sentence about targets that nobody fixed before the test runs; empty where all were."""
    late = [item.comparison for item in items if item.after_the_fact]
    if not late:
        return ""
    which = "" if len(late) == len(items) else f" ({'; '.join(late)})"
    return f" Targets chosen after the fact, from the test runs{which}."


def sentence(text: str) -> str:
    """`text` with a full stop.

    >>> sentence("no fit"), sentence("p is 0.5."), sentence("")
    ('no fit.', 'p is 0.5.', '')
    """
    text = text.strip()
    return text if not text or text[-1] in ".!?" else f"{text}."
