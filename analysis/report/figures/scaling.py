"""The picture of throughput over workers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import NullLocator

from analysis.findings.workers import Scaling
from analysis.report.figures.arm_names import UNKNOWN, Cast, draw_intervals, in_all
from analysis.report.figures.pictures import (
    THOUSANDS,
    Entry,
    Picture,
    finish,
    panel,
)


def throughput(cast: Cast, items: Sequence[Scaling]) -> Picture | None:
    """Figure 4: samples per second over workers, and the line of a perfect division of labour."""
    items = [item for item in items if item.points]
    if not items:
        return None
    figure, axes = panel()
    said, entries = [], []
    workers = sorted({point.num_workers for item in items for point in item.points})
    for item in items:
        entry = Entry(item.algorithm, cast.looks.get(item.algorithm, UNKNOWN))
        entries.append(entry)
        points = [(float(point.num_workers), point.throughput) for point in item.points]
        draw_intervals(axes, points, entry, joined=True)
        said.append(f"{item.algorithm}: " + ", ".join(f"{value:.3g} at {x:g}" for x, value in points))
    for item, entry in zip(items, entries, strict=True):
        first = min(item.points, key=lambda point: point.num_workers)
        if first.num_workers and len(workers) > 1:
            ideal = first.throughput.estimate / first.num_workers
            ends = [first.num_workers, workers[-1]]
            axes.plot(
                ends,
                [ideal * end for end in ends],
                color=entry.look.colour,
                linewidth=0.9,
                alpha=0.7,
                linestyle=(0, (4, 3)),
                zorder=1,
            )
    unit = items[0].unit
    finish(axes, "workers", f"throughput ({unit})", grid="both")
    axes.set_ylim(bottom=0)
    axes.set_xticks(workers)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(THOUSANDS)
    sizes = sorted({point.throughput.n for item in items for point in item.points})
    caption = f"Mean over seeds with its 95 % t interval, {in_all(sizes)}. Dashed: a perfect division of labour."
    if any(point.oversubscribed for item in items for point in item.points):
        caption += " Some runs had more threads than cores: no speed comparison."
    return Picture(
        cast.name("throughput", items[0].clock, items[0].speeds or ""),
        "Throughput",
        items[0].speeds or "",
        figure,
        f"Throughput in {unit} against the number of workers. " + "; ".join(said) + ".",
        caption,
        tuple(dict.fromkeys(entries)),
    )
