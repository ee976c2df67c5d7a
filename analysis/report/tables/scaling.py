"""Tables over numbers of workers: throughput, the laws fitted to it, and the loss."""

from __future__ import annotations

from analysis.findings.results import Results
from analysis.findings.workers import FitResult, Scaling
from analysis.report.tables.number_formats import between, gap, number, p_value, where
from analysis.report.tables.table import Cell, Table, prose, tabled, value, words
from analysis.report.tables.text import or_missing


def scaling(results: Results) -> Table:
    workers = sorted({point.num_workers for item in results.scaling for point in item.points})
    rows = []
    for item in results.scaling:
        points = {point.num_workers: point for point in item.points}
        row = [words("algorithm", item.algorithm), words("clock", Cell(where(item.clock, item.speeds), item.unit))]
        for count in workers:
            point = points.get(count)
            cell = between(None if point is None else point.throughput, number)
            busy = point is not None and point.oversubscribed
            cell = Cell(cell.text, "; ".join([cell.small, *["oversubscribed"] * busy]) if cell.small else "")
            row.append(value(f"{count} worker{'s' * (count != 1)} [95 % CI]", cell))
        rows.append(row)
    records = [(item, point) for item in results.scaling for point in item.points]
    return tabled("scaling", "Throughput over workers", rows, records, narrow=True)


def fits(results: Results) -> Table:
    records = [(item, fit) for item in results.scaling for fit in item.fits]
    rows = [
        [
            words("algorithm", item.algorithm),
            words("clock", where(item.clock, item.speeds)),
            words("law", {"usl": "universal scalability", "amdahl": "Amdahl"}[fit.model]),
            prose("parameters [95 % BCa]", f"none: {fit.refused}" if fit.refused else _parameters(fit)),
            value("peak (workers)", or_missing(fit.peak, ".1f")),
            value("AICc (less that of Amdahl)", _aicc(item, fit)),
        ]
        for item, fit in records
    ]
    lead = "BCa: a bootstrap of whole seeds; with few seeds it is too narrow (experiments/benchmarks/error_rates.py)."
    return tabled("fits", "Laws fitted to the throughput", rows, records, lead=lead, narrow=True)


def _parameters(fit: FitResult) -> str:
    intervals = dict(fit.intervals)
    return ", ".join(
        f"{name} {between(intervals[name], number).text if name in intervals else number(estimate)}"
        for name, estimate in fit.parameters
    )


def _aicc(item: Scaling, fit: FitResult) -> str:
    """Below 0 in brackets the universal scalability law is preferred; it is no test."""
    if fit.model == "amdahl" or item.aicc_difference is None:
        return number(fit.aicc)
    return f"{number(fit.aicc)} ({item.aicc_difference:+.1f})"


def trends(results: Results) -> Table:
    rows = [
        [
            words("algorithm", item.algorithm),
            words("clock", where(item.clock, item.speeds)),
            words("workers", ", ".join(map(str, item.workers))),
            value("nats per doubling of the workers [95 % CI]", between(item.slope, gap)),
            value("Page's L", number(item.page_statistic)),
            value("p", p_value(item.page_p)),
            prose("why not", item.refused),
        ]
        for item in results.trends
    ]
    return tabled("trends", "Loss at equal samples over workers", rows, results.trends)
