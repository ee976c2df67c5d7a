"""The report's pictures, each from values of `analysis.findings`; whatever has no data gives no picture.

Colour and marker are the algorithm. Arms of one algorithm in one picture differ by their dashes. Measured and virtual
seconds never share a picture: every value comes with its group, and a group has one clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from analysis.findings.curves import Curve, CurvePanel, RatePanel
from analysis.findings.delays import DelayGap, DelayHistogram
from analysis.findings.fronts import ParetoPanel
from analysis.findings.tables import ArmInfo
from analysis.findings.times import ReachedPanel, Sensitivity
from analysis.findings.workers import Scaling
from analysis.report.figures.arm_names import UNKNOWN, Cast, cut, draw_intervals, in_all, limits_of
from analysis.report.figures.pictures import (
    DECLARED,
    INK,
    MUTED,
    PAPER,
    THOUSANDS,
    Entry,
    Picture,
    finish,
    panel,
    written,
)
from analysis.report.tables.table import p_value, sentence, whose_targets
from analysis.statistics.intervals import Interval


def loss_curves(item: CurvePanel, entries: dict[str, Entry], name: str) -> Picture | None:
    """Figure 1: one thin line per run, a thick mean with its t band, the target as a dashed line.

    Args:
        entries: arm -> how it is drawn and called.
        name: of the picture.
    """
    figure, axes = panel()
    shown: list[float] = [] if item.target is None else [item.target]
    unfinished = drawn = False
    said = []
    for curve in item.curves:
        entry = entries[curve.arm]
        colour = entry.look.colour
        for run in curve.seeds:
            if not run.x:
                continue
            drawn = True
            few = _thinned(len(run.x))
            axes.plot(
                numpy.array(run.x)[few], numpy.array(run.loss)[few], color=colour, linewidth=0.6, alpha=0.4, zorder=2
            )
            if run.status == "DONE":
                shown += run.loss
        band = curve.band
        if band is None or not band.x:
            said.append(f"{entry.text}: no finished run")
            continue
        few = _thinned(len(band.x))
        x, mean = numpy.array(band.x)[few], numpy.array(band.mean)[few]
        if band.low:
            low, high = numpy.array(band.low)[few], numpy.array(band.high)[few]
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=1)
        axes.plot(
            x,
            mean,
            color=colour,
            linestyle=entry.dash,
            linewidth=1.7,
            marker=entry.look.marker,
            markersize=4,
            markevery=_spread(len(x)),
            zorder=3,
        )
        said.append(f"{entry.text}: mean {band.mean[-1]:.3f} at {band.x[-1]:,.4g} (n = {band.n})")
    if not drawn:
        return None
    every = [loss for curve in item.curves for run in curve.seeds for loss in run.loss]
    low, high = limits_of(shown or every)
    start = _steep_start(item)
    if start is not None:
        low, high = limits_of([value for value in shown if value <= start] or shown)
    axes.set_ylim(low, high)
    last = max(run.x[-1] for curve in item.curves for run in curve.seeds if run.x)
    axes.set_xlim(-0.02 * last, 1.02 * last or 1.0)
    for curve in item.curves:
        for run in curve.seeds:
            if run.status != "DONE" and run.x:
                unfinished = True
                # on the edge if it ended outside, so that a diverged run is seen to end
                end = min(max(run.loss[-1], low), high)
                colour = entries[curve.arm].look.colour
                axes.plot(
                    run.x[-1],
                    end,
                    marker="x",
                    markersize=6.5,
                    markeredgewidth=1.6,
                    color=colour,
                    linestyle="none",
                    clip_on=False,
                    zorder=5,
                )
    if item.target is not None:
        axes.axhline(item.target, **DECLARED)
        _beside(axes, 1.0, item.target, f"target {item.target:.3f}")
    finish(axes, item.x_label, item.y_label.removeprefix("evaluation "))  # a phone has no room for more
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(THOUSANDS)
    caption = ["Thin: one run. Thick: the mean of n runs, with its 95 % t band."]
    if start is not None:
        begin = max(curve.band.mean[0] for curve in item.curves if curve.band is not None and curve.band.mean)
        caption.append(f"The start, at {begin:.2f}, lies above the picture.")
    if unfinished:
        caption.append("A cross ends a run that did not finish; it is in no mean.")
    caption += item.notes
    return Picture(
        name,
        f"Evaluation loss versus {item.axis}",
        item.group,
        figure,
        f"Line chart of {item.y_label} against {item.x_label}, {item.group}. " + "; ".join(said) + ".",
        " ".join(sentence(text) for text in caption),
        tuple(_with_size(entries[curve.arm], curve) for curve in item.curves),
    )


def rate_curves(cast: Cast, item: RatePanel) -> Picture:
    """The learning rate over the samples that arrived: one run of every arm."""
    figure, axes = panel(height=2.2)
    entries = cast.entries([curve.arm for curve in item.curves])
    said = []
    for curve in item.curves:
        entry = entries[curve.arm]
        few = _thinned(len(curve.samples))
        x, y = numpy.array(curve.samples)[few], numpy.array(curve.rate)[few]
        axes.plot(
            x,
            y,
            color=entry.look.colour,
            linestyle=entry.dash,
            linewidth=1.5,
            marker=entry.look.marker,
            markersize=4,
            markevery=_spread(len(x)),
            zorder=2,
        )
        said.append(f"{entry.text}: at most {max(curve.rate):g}, at the end {curve.rate[-1]:g}")
    finish(axes, "samples", "learning rate")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(THOUSANDS)
    return Picture(
        cast.name("learning-rate-over-samples", item.group),
        "Learning rate over the samples",
        item.group,
        figure,
        f"Line chart of the learning rate against samples, {item.group}. " + "; ".join(said) + ".",
        "Learning rate of the gradients as they arrived, in one run of every arm. " + "; ".join(said) + ".",
        tuple(entries.values()),
    )


def time_to_target(cast: Cast, item: ReachedPanel) -> Picture | None:
    """Figure 2: the share of runs that have reached the target by a time, with the runs still at risk below."""
    if not item.curves:
        return None
    entries = cast.entries([curve.arm for curve in item.curves])
    rows = len(item.curves)
    figure, axes = panel(height=3.0 + 0.17 * rows, bottom=0.62 + 0.17 * rows)
    last = max((second for curve in item.curves for second in (*curve.seconds, *curve.censored)), default=0.0)
    last = max(last, item.budget or 0.0) or 1.0
    said = []
    for curve in item.curves:
        entry = entries[curve.arm]
        # a curve ends with its last run at risk; one that diverged is at risk for ever, and 100 % stays
        watched = max([*curve.seconds, *curve.censored]) if curve.censored else last * 1.02
        if curve.reached + len(curve.censored) < curve.n:
            watched = last * 1.02
        seconds, share = [*curve.seconds, watched], [*curve.share, curve.share[-1] if curve.share else 0.0]
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
        if curve.censored:
            at = [
                share[max(0, int(numpy.searchsorted(curve.seconds, end, side="right")) - 1)] for end in curve.censored
            ]
            axes.plot(curve.censored, at, "|", markersize=9, markeredgewidth=1.3, color=entry.look.colour, zorder=4)
        median = "" if curve.median is None else f", median {curve.median:,.4g} s"
        said.append(f"{entry.text}: {curve.reached} of {curve.n} reached it{median}")
    if item.budget is not None:
        axes.axvline(item.budget, **DECLARED)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlim(0, last * 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    seconds_label = cast.groups[item.group].seconds_label if item.group in cast.groups else "seconds"
    # censoring before another run got there makes the curve an estimate that is no share of the runs
    estimated = any(curve.share and abs(curve.share[-1] - curve.reached / curve.n) > 1e-9 for curve in item.curves)
    finish(axes, seconds_label, f"{'Kaplan-Meier estimate of ' * estimated}runs at or below {item.target:.3f}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(THOUSANDS)
    _at_risk(axes, item, entries, last)
    caption = f"Target {item.target:.4f}: {item.target_from}. " if item.target_from else ""
    missed = [f"{c.reached} of {c.n} {entries[c.arm].text} runs" for c in item.curves if c.reached < c.n]
    others = "; by all runs of the others" if len(missed) < len(item.curves) else ""
    caption += f"Reached by {', '.join(missed)}{others}. " if missed else "Reached by every run. "
    caption += "Below: runs at risk, neither there nor stopped."
    if any(curve.censored for curve in item.curves):
        caption += " A bar marks a run that ended before it got there; a curve ends where no run is at risk."
    if estimated:
        caption += " Kaplan-Meier: where runs ended early, the estimate is not the share of runs that got there."
    if item.budget is not None:
        caption += f" Dashed: the common budget, {item.budget:,.4g} s ({item.budget_reason})."
    if item.spacing is not None:
        caption += f" Evaluations around a crossing lie {item.spacing:,.3g} s apart (median)."
    if item.log_rank_p:
        told = ", ".join(
            f"{entries[arm].text if arm in entries else arm} p = {p_value(p)}" for arm, p in item.log_rank_p
        )
        caption += f" Exploratory, not corrected, in no verdict: permutation log-rank against the reference, {told}."
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


def throughput(cast: Cast, items: Sequence[Scaling]) -> Picture | None:
    """Figure 4: samples per second over workers, the fitted law, and the line of a perfect division of labour."""
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
        fit = next((fit for model in ("usl", "amdahl") for fit in item.fits if fit.model == model and fit.x), None)
        draw_intervals(axes, points, entry, joined=fit is None)
        if fit is not None:
            axes.plot(fit.x, fit.y, color=entry.look.colour, linewidth=1.3, zorder=2)
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
    fitted = sorted({fit.model for item in items for fit in item.fits if fit.x})
    law = {"usl": "the universal scalability law", "amdahl": "Amdahl's law"}
    caption = f"Mean over seeds with its 95 % t interval, {in_all(sizes)}."
    caption += (
        f" Lines: {' or '.join(law[model] for model in fitted)}." if fitted else " Lines join the points: no fit."
    )
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
        _workers_beside(axes, item.delay_p95, item.gap.estimate, info)
        said.append(f"{cast.label(item.treatment)}: {item.gap:.4f} at p95 {item.delay_p95:g}")
    axes.axhline(0.0, **DECLARED)
    if margin is not None:
        axes.axhspan(-margin, margin, color=MUTED, alpha=0.09, linewidth=0, zorder=0)
    finish(axes, "delay, 95th percentile (updates)", "loss gap at equal samples (nats)")
    axes.set_xlim(0, 1.15 * max([item.delay_p95 for item in items] + [1.0]))
    axes.xaxis.set_major_locator(MaxNLocator(7))
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


def pareto(cast: Cast, item: ParetoPanel) -> Picture | None:
    """Figure 6: final loss against seconds; whoever has nobody below and to the left is on the front."""
    if not item.points:
        return None
    figure, axes = panel()
    entries: list[Entry] = []
    tests = [point for point in item.points if not point.trial]
    trials = [point for point in item.points if point.trial]
    front = [(point.seconds, point.loss) for point in tests if point.on_front]
    for point in trials:
        look = cast.look(point.arm)
        axes.plot(
            point.seconds,
            point.loss,
            marker=look.marker,
            markersize=3.5 if point.on_front else 2.5,
            color=look.colour,
            alpha=1.0 if point.on_front else 0.4,
            linestyle="none",
            zorder=2,
        )
    for point in tests:
        info = cast.arms.get(point.arm)
        entry = Entry(info.algorithm if info else point.arm, cast.look(point.arm), line=False)
        entries.append(entry)
        axes.plot(
            point.seconds,
            point.loss,
            marker=entry.look.marker,
            markersize=7,
            color=entry.look.colour,
            markerfacecolor=entry.look.colour if point.on_front else PAPER,
            markeredgewidth=1.4,
            linestyle="none",
            zorder=3,
        )
        _workers_beside(axes, point.seconds, point.loss, info)
    if len(front) > 1:
        x, y = zip(*sorted(front), strict=True)
        axes.step(x, y, where="post", color=MUTED, linewidth=1.0, zorder=2)
    finish(axes, item.x_label, item.y_label.removeprefix("evaluation "), grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.margins(0.12)
    better = sorted(point.loss for point in trials)[: (len(trials) + 1) // 2]
    if trials:  # bad learning rates must not flatten the rest
        axes.set_ylim(*limits_of([*(point.loss for point in tests), *better]))
    sizes = sorted({point.n for point in tests})
    caption = f"Means over seeds, {in_all(sizes)}. Filled: nobody is better in both. Numbers: workers."
    if trials:
        caption += (
            f" Small: the better half of {len(trials)} tuning trials, on other seeds and compared among themselves; "
            "pale: another one is better."
        )
    if item.hypervolume is not None and item.reference_point is not None and item.reference_arm is not None:
        seconds, loss = item.reference_point
        caption += (
            f" Area dominated by the test runs, up to the budget and the first loss of "
            f"{cast.label(item.reference_arm)} ({seconds:,.4g} s, {loss:.3f}): {item.hypervolume:,.4g}."
        )
    best = ", ".join(cast.label(point.arm) for point in tests if point.on_front)
    return Picture(
        cast.name("pareto", item.clock, item.speeds or "", item.evaluation_set[:8]),
        "Final loss versus seconds",
        item.speeds or "",
        figure,
        f"Scatter plot of {item.y_label} against {item.x_label}; on the front: {best or 'nobody'}.",
        caption,
        tuple(dict.fromkeys(entries)),
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


def _at_risk(axes: Axes, item: ReachedPanel, entries: dict[str, Entry], last: float) -> None:
    """Below the axes, under its ticks: how many runs are neither through nor stopped."""
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= last * 1.02]
    for row, curve in enumerate(item.curves):
        offset = -(38 + 12.2 * row)
        entry = entries[curve.arm]
        for x, text, colour in ((-50, "\N{BLACK SQUARE}", entry.look.colour), (-43, cut(entry.text, 11), INK)):
            axes.annotate(
                written(text),
                (0, 0),
                xytext=(x, offset),
                xycoords="axes fraction",
                textcoords="offset points",
                fontsize=7.5,
                color=colour,
                annotation_clip=False,
            )
        for tick in ticks:
            place = int(numpy.searchsorted(curve.seconds, tick, side="left"))
            if place < len(curve.at_risk):
                left = curve.at_risk[place] + sum(tick <= end < curve.seconds[place] for end in curve.censored)
            else:
                left = curve.n - curve.reached - sum(end < tick for end in curve.censored)
            axes.annotate(
                str(left),
                (tick, 0),
                xytext=(0, offset),
                xycoords=blended_transform_factory(axes.transData, axes.transAxes),
                textcoords="offset points",
                fontsize=7.5,
                color=MUTED,
                ha="center",
                annotation_clip=False,
            )


def _steep_start(item: CurvePanel) -> float | None:
    """The loss above which curves are cut off, where the first fifth of training takes most of the height; or None.

    What is compared is at the end; a whole picture of the first steps would leave it a few pixels.
    """
    bands = [curve.band for curve in item.curves if curve.band is not None and len(curve.band.x) > 2]
    if not bands:
        return None
    end = max(band.x[-1] for band in bands)
    cut = max(float(numpy.interp(0.2 * end, band.x, band.mean)) for band in bands)
    first, last = max(band.mean[0] for band in bands), min(min(band.mean) for band in bands)
    if item.target is not None:
        cut = max(cut, item.target + 0.15 * (item.target - last))
    return cut if first - last > 0 and (cut - last) / (first - last) < 0.5 else None


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(-2, 3),
        xycoords=blended_transform_factory(axes.transAxes, axes.transData),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
        color=MUTED,
    )


def _workers_beside(axes: Axes, x: float, y: float, arm: ArmInfo | None) -> None:
    workers = "" if arm is None or arm.num_workers is None else str(arm.num_workers)
    axes.annotate(workers, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=7.5, color=MUTED)


def _thinned(length: int, most: int = 240) -> numpy.ndarray:
    """Positions of so many points, the first and the last among them: a picture shows no more.

    >>> _thinned(5, most=3).tolist(), _thinned(2, most=3).tolist()
    ([0, 2, 4], [0, 1])
    """
    return numpy.unique(numpy.linspace(0, length - 1, min(length, most)).round().astype(int))


def _spread(length: int) -> int:
    return max(1, length // 7)


def _with_size(entry: Entry, curve: Curve) -> Entry:
    return dataclasses.replace(entry, text=f"{entry.text} (n = {0 if curve.band is None else curve.band.n})")


def _clock(cast: Cast, arms: Iterable[str]) -> str:
    return next((cast.arms[arm].clock for arm in arms if arm in cast.arms), "")
