"""Pictures of delays, and of what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from analysis.findings.delays import DelayGap, DelayHistogram
from analysis.report.figures.arm_names import Cast, draw_intervals, in_all, workers_beside
from analysis.report.figures.pictures import (
    DECLARED,
    MUTED,
    Entry,
    Picture,
    finish,
    panel,
)


def delay_histogram(cast: Cast, items: Sequence[DelayHistogram], group: str) -> Picture | None:
    """Figure 5a: how often a gradient was applied at each delay, for the arms of one group."""
    items = [item for item in items if sum(item.counts) > 0]
    if not items:
        return None
    figure, axes = panel()
    entries = cast.entries([item.arm for item in items])
    # the last thousandth would shrink the rest to a corner; what lies beyond is said
    ends = []
    for item in items:
        within = numpy.cumsum(item.counts) / sum(item.counts)
        ends.append(item.delays[int(numpy.argmax(within >= 0.999 - 1e-12))])
    end = max(*ends, 1)
    width = 0.8 / len(items)
    said = []
    beyond = False
    for number, item in enumerate(items):
        entry = entries[item.arm]
        total = sum(item.counts)
        x = numpy.array(item.delays) + (number - (len(items) - 1) / 2) * width
        share = numpy.array(item.counts) / total
        axes.bar(x, share, width * 0.96, color=entry.look.colour, linewidth=0, zorder=2)
        if item.p95 is not None:
            at = blended_transform_factory(axes.transData, axes.transAxes)
            axes.plot(
                item.p95,
                1.0,
                marker="v",
                markersize=5,
                color=entry.look.colour,
                transform=at,
                clip_on=False,
                linestyle="none",
                zorder=4,
            )
        beyond = beyond or item.delays[-1] > end
        text = f"{entry.text}: {total:,} gradients of {item.num_runs} runs"
        text += "" if item.p95 is None else f", p95 {item.p95:g}"
        said.append(text + ("" if item.max is None else f", at most {item.max}"))
    axes.set_xlim(-0.6, end + 0.6)
    finish(axes, "delay (updates between read and application)", "gradients applied")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return Picture(
        cast.name("delays", group),
        "Delay of the applied gradients",
        group,
        figure,
        f"Histogram of delays, {group}. " + "; ".join(said) + ".",
        "; ".join(said)
        + ". A triangle marks the 95th percentile."
        + (f" Delays above {end} (less than 0.1 %) lie outside." if beyond else ""),
        tuple(Entry(e.text, e.look, e.dash, line=False) for e in entries.values()),
    )


def delay_gaps(cast: Cast, items: Sequence[DelayGap], margin: float | None = None) -> Picture | None:
    """Figure 5b: what the loss at equal samples costs, against the delay that it was trained with."""
    items = [item for item in items if math.isfinite(item.gap.estimate)]
    if not items:
        return None
    figure, axes = panel()
    entries: list[Entry] = []
    said = []
    for item in sorted(items, key=lambda item: item.delay_p95):
        info = cast.arms.get(item.treatment)
        entry = Entry(info.algorithm if info else item.treatment, cast.look(item.treatment), line=False)
        entries.append(entry)
        draw_intervals(axes, [(item.delay_p95, item.gap)], entry, joined=False)
        said.append(f"{cast.label(item.treatment)}: {item.gap:.4f} at p95 {item.delay_p95:g}")
    axes.axhline(0.0, **DECLARED)
    if margin is not None:
        axes.axhspan(-margin, margin, color=MUTED, alpha=0.09, linewidth=0, zorder=0)
    finish(axes, "delay, 95th percentile (updates)", "loss gap at equal samples (nats)")
    axes.set_xlim(0, 1.15 * max([item.delay_p95 for item in items] + [1.0]))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    workers_beside(axes, [(item.delay_p95, item.gap.estimate, cast.arms.get(item.treatment)) for item in items])
    sizes = sorted({item.gap.n for item in items})
    caption = f"Above 0: worse than the reference of its group. Mean with the interval of its test, {in_all(sizes)}. "
    caption += "Numbers: workers."
    if margin is not None:
        caption += f" Shaded: the declared margin, {margin:g} nats."
    return Picture(
        cast.name("loss-gap-versus-delay", _clock(cast, [item.treatment for item in items])),
        "Loss gap versus delay",
        "",
        figure,
        "Loss at equal samples, treatment minus reference, against the delay. " + "; ".join(said) + ".",
        caption,
        tuple(dict.fromkeys(entries)),
    )


def _clock(cast: Cast, arms: Iterable[str]) -> str:
    return next((cast.arms[arm].clock for arm in arms if arm in cast.arms), "")
