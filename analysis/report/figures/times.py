"""Pictures of the time to a target, and of the speed-up at other targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from analysis.findings.times import ReachedPanel, Sensitivity
from analysis.report.figures.arm_names import Cast, draw_intervals, in_all
from analysis.report.figures.pictures import (
    DECLARED,
    PAPER,
    THOUSANDS,
    Picture,
    finish,
    panel,
)
from analysis.report.tables.table import sentence, whose_targets
from analysis.statistics.intervals import Interval


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


def target_sensitivity(cast: Cast, items: Sequence[Sensitivity]) -> Picture | None:
    """Figure 3: the speed-up at every target of the grid, for the comparisons of one group."""
    ratios = [point.speed_up for item in items for point in item.points if point.speed_up is not None]
    if not ratios:
        return None
    figure, axes = panel()
    entries = cast.entries([item.treatment for item in items])
    said = []
    few = False
    shares = sorted({point.share for item in items for point in item.points})
    places = {share: place for place, share in enumerate(shares)}
    width = min(0.12, 0.6 / max(1, len(items)))
    for number, item in enumerate(items):
        entry = entries[item.treatment]
        shift = (number - (len(items) - 1) / 2) * width
        points = [(places[point.share] + shift, point.speed_up) for point in item.points if point.speed_up is not None]
        draw_intervals(axes, [(x, ratio) for x, ratio in points if ratio is not None], entry, joined=True)
        said += [
            f"{entry.text} at {point.share:.0%}: {point.speed_up:.3g}"
            for point in item.points
            if point.speed_up is not None
        ]
        for point in item.points:
            if point.speed_up is not None and min(point.reached_treatment, point.reached_reference) < point.n:
                few = True
                axes.plot(
                    places[point.share] + shift,
                    point.speed_up.estimate,
                    marker=entry.look.marker,
                    markersize=5.5,
                    color=entry.look.colour,
                    markerfacecolor=PAPER,
                    linestyle="none",
                    zorder=4,
                )
    axes.axhline(1.0, **DECLARED)
    finish(axes, "target, as a share of the reference's improvement", "speed-up (times sooner)")
    _ratio_axis(axes, ratios)
    axes.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
    axes.set_xlim(-0.5, len(shares) - 0.5)
    sizes = sorted({ratio.n for ratio in ratios})
    group = items[0].group
    return Picture(
        cast.name("target-sensitivity", group),
        "Speed-up at other targets",
        group,
        figure,
        f"Speed-up against the reference at targets from {shares[0]:.0%} to {shares[-1]:.0%}, {group}. "
        + "; ".join(said)
        + ".",
        f"Above 1: sooner than {cast.label(items[0].reference)}. Geometric mean of the seeds' ratios with its 95 % t "
        f"interval, {in_all(sizes)}." + (" Open: not every run got there." if few else "") + whose_targets(items),
        tuple(entries.values()),
    )


def _ratio_axis(axes: Axes, ratios: Sequence[Interval]) -> None:
    """A logarithmic axis for ratios with ticks that read as ratios."""
    ends = [end for ratio in ratios for end in (ratio.low, ratio.estimate, ratio.high) if end is not None and end > 0]
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    # an interval over hardly any pairs would squeeze all others; its bar leaves the picture
    estimates = [ratio.estimate for ratio in ratios]
    low, high = max(low, min(estimates) / 4), min(high, max(estimates) * 4)
    low, high = min(low, 1.0) / 1.12, max(high, 1.0) * 1.12
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    steps = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    fine = (0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
    ticks = [tick for tick in (steps if high / low > 20 else fine) if low <= tick <= high]
    if high / low < 1.6:
        ticks = [tick / 20 for tick in range(math.ceil(20 * low), math.floor(20 * high) + 1)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\N{MULTIPLICATION SIGN}"))
