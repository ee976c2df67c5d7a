"""Which tables a report has, in order; the other modules here say what is in their cells."""

from __future__ import annotations

from collections.abc import Callable

from analysis.findings.results import Results
from analysis.report.tables.arms import conditions, delays, settings
from analysis.report.tables.comparisons import comparisons
from analysis.report.tables.costs import costs
from analysis.report.tables.downstream import classes, downstream, hatecheck
from analysis.report.tables.runs import counts, environment, left_out, runs, tuning
from analysis.report.tables.scaling import scaling
from analysis.report.tables.table import Table


def all_tables(results: Results, link: Callable[[str], str]) -> list[Table]:
    """Every table of the report, those without rows left out, in order.

    Args:
        results: what is shown.
        link: name of a run folder -> its relative address; an empty one where there is none.
    """
    made = [
        *conditions(results),
        settings(results),
        comparisons(results),
        scaling(results),
        costs(results),
        delays(results),
        downstream(results),
        classes(results),
        hatecheck(results),
        tuning(results),
        counts(results),
        environment(results),
        runs(results, link),
        left_out(results),
    ]
    return [table for table in made if table.rows]
