"""How the pictures and the tables of the reports on comparisons enter the page of a study."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from analysis import gallery, page
from analysis.report.figures.pictures import Picture, handles
from analysis.report.tables.table import Cell, Table


def drawings(pictures: Iterable[Picture]) -> tuple[page.Drawing, ...]:
    """Pictures with their legends inside."""
    return tuple(map(_drawing, pictures))


def _drawing(picture: Picture) -> page.Drawing:
    if picture.legend:
        picture.figure.axes[0].legend(handles=handles(picture.legend), frameon=False, fontsize=7.5, loc="best")
    title = f"{picture.what}: {picture.title}" if picture.title else picture.what
    return page.drawing(gallery.Picture(picture.name, title, picture.figure, picture.caption, picture.description))


def shown(table: Table) -> dict[str, Any]:
    """A table for the template."""
    rows = [{"cells": [_cell(cell) for cell in row], "tone": ""} for row in table.rows]
    numeric = {place for place, column in enumerate(table.columns) if column.numeric}
    notes = [*[table.lead] * bool(table.lead), *table.notes]
    columns = [column.title for column in table.columns]
    return {"title": table.title, "columns": columns, "rows": rows, "numeric": numeric, "notes": notes, "links": None}


def _cell(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


def laid_out(
    title: str,
    command: str,
    counts: str,
    told: tuple[tuple[str, tuple[str, ...]], ...],
    warnings: tuple[str, ...],
    first: tuple[page.Drawing, ...],
    table: Table,
    sections: tuple[page.Section, ...],
    footer: str,
) -> page.Page:
    """A page of measured runs: no registration, no trust box.

    Args:
        command: that makes the page again.
        told: sentences with their small type.
    """
    again = page.Section("reproduce", "How to make this again", commands=(command,))
    return page.Page(
        title=f"{title}: report",
        study=title,
        marks=("measured clock",),
        counts=counts,
        headlines=told,
        warnings=warnings,
        first=first,
        tests=shown(table),
        more="",
        checks=(),
        sections=(*sections, again),
        footer=footer,
    )
