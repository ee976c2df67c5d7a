"""The table of throughput over numbers of workers."""

from __future__ import annotations

from analysis.findings.results import Results
from analysis.report.tables.number_formats import between, number, where
from analysis.report.tables.table import Cell, Table, tabled, value, words


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
