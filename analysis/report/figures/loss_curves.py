"""Pictures of loss curves, final losses, learning rates and gradient norms."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from analysis.findings.arms import ArmInfo
from analysis.findings.curves import Curve, CurvePanel, StepPanel
from analysis.report.figures.arm_names import Cast, in_all, limits_of, workers_beside
from analysis.report.figures.pictures import (
    DECLARED,
    MUTED,
    THOUSANDS,
    Entry,
    Picture,
    finish,
    panel,
)
from analysis.report.tables.table import sentence


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


def final_losses(cast: Cast, items: Sequence[CurvePanel], clock: str, speeds: str) -> Picture | None:
    """Final loss against the seconds that it took, of panels that share a clock, its speeds and the data.

    An arm of which a run diverged has no mean of either, and so no point.
    """
    figure, axes = panel()
    arms = {curve.arm: curve for item in items for curve in item.curves}  # a control arm is in two panels
    entries: dict[str, Entry] = {}
    means: list[tuple[float, float, ArmInfo | None]] = []
    sizes: set[int] = set()
    diverged = []
    for arm, curve in arms.items():
        runs = [run for run in curve.seeds if run.replicate == 0]
        ends = [(run.x[-1], run.loss[-1]) for run in runs if run.status == "DONE"]
        look = cast.look(arm)
        axes.plot(*zip(*ends, strict=True) if ends else ((), ()), ".", color=look.colour, markersize=3.5, alpha=0.55)
        if lost := sum(run.status == "DIVERGED" for run in runs):
            diverged.append(f"{cast.label(arm)} (diverged {lost}/{len(runs)})")
        elif ends:
            info = cast.arms.get(arm)
            entries[arm] = Entry(info.algorithm if info else arm, look, line=False)
            seconds, loss = map(statistics.fmean, zip(*ends, strict=True))
            means.append((seconds, loss, info))
            sizes.add(len(ends))
            axes.plot(seconds, loss, look.marker, color=look.colour, markersize=7, zorder=3)
    if not means:
        return None
    finish(axes, items[0].x_label, items[0].y_label.removeprefix("evaluation "), grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.margins(0.12)
    axes.autoscale_view()
    workers_beside(axes, means)
    caption = f"Large: means over seeds, {in_all(sorted(sizes))}; small: one run. Numbers: workers."
    caption += f" Without a mean: {', '.join(diverged)}." * bool(diverged)
    said = [
        f"{cast.label(arm)}: {loss:.3f} after {seconds:,.4g}"
        for arm, (seconds, loss, _) in zip(entries, means, strict=True)
    ]
    return Picture(
        cast.name("final-loss", clock, speeds),
        "Final loss against seconds",
        speeds,
        figure,
        f"Scatter plot of {items[0].y_label} against {items[0].x_label}. " + "; ".join(said) + ".",
        caption,
        tuple(dict.fromkeys(entries.values())),
    )


def step_curves(cast: Cast, item: StepPanel) -> Picture:
    """The learning rate or the gradient norm over the samples that arrived: one run of every arm."""
    about = {
        "learning rate": "Learning rate of the gradients as they arrived",
        "gradient norm": "Euclidean norm of the directions before they were clipped, means over parts of the run",
    }[item.quantity]
    figure, axes = panel(height=2.2)
    entries = cast.entries([curve.arm for curve in item.curves])
    said = []
    for curve in item.curves:
        entry = entries[curve.arm]
        few = _thinned(len(curve.samples))
        x, y = numpy.array(curve.samples)[few], numpy.array(curve.values)[few]
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
        said.append(f"{entry.text}: at most {max(curve.values):.4g}, at the end {curve.values[-1]:.4g}")
    finish(axes, "samples", item.quantity)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(THOUSANDS)
    return Picture(
        cast.name(f"{item.quantity.replace(' ', '-')}-over-samples", item.group),
        f"{item.quantity.capitalize()} over the samples",
        item.group,
        figure,
        f"Line chart of the {item.quantity} against samples, {item.group}. " + "; ".join(said) + ".",
        f"{about}, in one run of every arm. " + "; ".join(said) + ".",
        tuple(entries.values()),
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
