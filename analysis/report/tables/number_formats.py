"""How the values of tables are written: numbers with their digits, intervals with their n; `MISSING` for none."""

from __future__ import annotations

import math
from collections.abc import Callable

from analysis.questions import TIMES
from analysis.report.tables.table import Cell
from analysis.report.tables.text import MISSING
from analysis.statistics import intervals
from analysis.statistics.intervals import Interval


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
    return MISSING if value is None or not math.isfinite(value) else intervals.percent(value)


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
