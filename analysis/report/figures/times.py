"""The picture of the time to a target."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.findings.times import ReachedPanel
from analysis.report.figures.arm_names import Cast
from analysis.report.figures.pictures import (
    DECLARED,
    THOUSANDS,
    Picture,
    finish,
    panel,
)
from analysis.report.tables.table import sentence


def time_to_target(cast: Cast, item: ReachedPanel) -> Picture | None:
    """Figure 2: the share of runs that have reached the target by a time."""
    if not item.curves:
        return None
    entries = cast.entries([curve.arm for curve in item.curves])
    figure, axes = panel()
    last = max([item.budget or 0.0, *(second for curve in item.curves for second in curve.seconds)]) or 1.0
    said = []
    for curve in item.curves:
        entry = entries[curve.arm]
        seconds = [0.0, *curve.seconds, 1.02 * last]
        share = [number / curve.n for number in (*range(curve.reached + 1), curve.reached)]
        axes.step(
            seconds,
            share,
            where="post",
            color=entry.look.colour,
            linestyle=entry.dash,
            linewidth=1.8,
            marker=entry.look.marker,
            markersize=4,
            markevery=slice(1, len(seconds) - 1),
            zorder=3,
        )
        median = "" if curve.median is None else f", median {curve.median:,.4g} s"
        said.append(f"{entry.text}: {curve.reached} of {curve.n} reached it{median}")
    if item.budget is not None:
        axes.axvline(item.budget, **DECLARED)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlim(0, last * 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    seconds_label = cast.groups[item.group].seconds_label if item.group in cast.groups else "seconds"
    finish(axes, seconds_label, f"runs at or below {item.target:.3f}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(THOUSANDS)
    caption = f"Target {item.target:.4f}: {item.target_from}. " if item.target_from else ""
    missed = [f"{c.reached} of {c.n} {entries[c.arm].text} runs" for c in item.curves if c.reached < c.n]
    others = "; by all runs of the others" if len(missed) < len(item.curves) else ""
    caption += f"Reached by {', '.join(missed)}{others}." if missed else "Reached by every run."
    caption += " A run that ended before it got there counts as not there." * bool(missed)
    if item.budget is not None:
        caption += f" Dashed: the common budget, {item.budget:,.4g} s ({item.budget_reason})."
    if item.spacing is not None:
        caption += f" Evaluations around a crossing lie {item.spacing:,.3g} s apart (median)."
    return Picture(
        cast.name("time-to-target", item.group),
        "Time to the target",
        item.group,
        figure,
        f"Step curves of the share of runs that reached {item.target:.4f} by a time, {item.group}. "
        + "; ".join(said)
        + ".",
        " ".join([caption, *map(sentence, item.notes)]),
        tuple(entries.values()),
    )
