"""Evaluation loss against training seconds and against samples: thin lines per run, a mean line per condition.

Colour is the mode, in every figure; the line style is the number of workers and a marker the rule or batch size where
these vary, the same in both figures of the same runs. Only runs with status DONE enter a mean; all others are drawn as
thin lines that end in a cross.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import seaborn
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from analysis.study.run import MODES, Condition, Run, labels, loss_label

OVERSUBSCRIBED = "timings from an oversubscribed machine: not a speed comparison"

# blue, orange and green stay apart under every common colour blindness; the fourth is the pink, not the near-orange red
_COLOURS = [seaborn.color_palette("colorblind")[index] for index in (7, 1, 0, 4)]
MODE_COLOURS: dict[str, tuple[float, float, float]] = dict(zip(MODES, _COLOURS, strict=True))
"""The colour of each mode, in every figure of the project."""
OTHER_MODE_COLOUR = (0.0, 0.0, 0.0)

_LINE_STYLES: tuple[Any, ...] = (
    "solid",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.4, 1.2, 1.4)),
    (0, (6, 1.4, 1.2, 1.4, 1.2, 1.4)),
    (0, (10, 3)),
)
LEGEND_WIDTH = 48
_MARKERS = ("", "o", "s", "^", "D", "v", "P", "*")


def draw_loss_versus_seconds(axes: Axes, runs: Iterable[Run]) -> list[str]:
    """Draw evaluation loss against seconds of the training clock, which stands still during evaluations.

    Args:
        axes: of any figure; the lines are labelled, the legend is left to the caller.
        runs: with one evaluation set; the order does not matter.

    Returns:
        Notes that belong in small print under the figure.

    Raises:
        ValueError: if `runs` were evaluated on different data, or have different clocks.
    """
    runs = list(runs)
    if len({run.virtual for run in runs}) > 1:
        raise ValueError("measured and virtual seconds do not share an axis")
    notes = _draw(axes, runs, "train_seconds", mark_oversubscribed=True)
    axes.set_xlabel("virtual seconds" if any(run.virtual for run in runs) else "training seconds")
    return notes + [f"* {OVERSUBSCRIBED}"] * any(run.oversubscribed for run in runs)


def draw_loss_versus_samples(axes: Axes, runs: Iterable[Run]) -> list[str]:
    """Draw evaluation loss against the samples that arrived, used or not; otherwise as `draw_loss_versus_seconds`."""
    notes = _draw(axes, list(runs), "total_samples", mark_oversubscribed=False)
    axes.set_xlabel("samples")
    return notes


def save_figures(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Save loss_vs_seconds.png and loss_vs_samples.png, one pair per evaluation set; loss_vs_virtual_seconds.png
    where runs had a virtual clock.

    Losses on different data never share axes; with several evaluation_sets the file names end in them. Runs without a
    one or without an evaluation that could be drawn are left out (see `undrawn`).

    Returns:
        The paths written, in order; empty if there is nothing to draw.
    """
    by_data: dict[str, list[Run]] = {}
    for run in runs:
        if run.evaluation_set is not None and _drawable(run):
            by_data.setdefault(run.evaluation_set, []).append(run)
    if by_data:
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for evaluation_set, suffix in _suffixes(by_data).items():
        title = f"data {evaluation_set}" if suffix else ""
        group = by_data[evaluation_set]
        virtual, measured = [run for run in group if run.virtual], [run for run in group if not run.virtual]
        for name, draw, drawn in (
            ("loss_vs_seconds", draw_loss_versus_seconds, measured),
            ("loss_vs_virtual_seconds", draw_loss_versus_seconds, virtual),
            ("loss_vs_samples", draw_loss_versus_samples, group),
        ):
            if not drawn:
                continue
            figure = Figure(figsize=(7.2, 3.9), layout="constrained")
            FigureCanvasAgg(figure)  # the file never depends on a display or on pyplot's state
            axes = figure.add_subplot()
            notes = draw(axes, drawn)
            if title:
                axes.set_title(title, fontsize=8, loc="left")
            figure.legend(loc="outside right upper", fontsize=8, frameon=False, handlelength=3.4)
            if notes:
                figure.supxlabel("\n".join(notes), fontsize=6.5, color="0.3", x=0.01, ha="left")
            path = folder / f"{name}{suffix}.png"
            figure.savefig(path, dpi=200)
            paths.append(path)
    return paths


def undrawn(runs: Iterable[Run]) -> list[Run]:
    """The runs that `save_figures` cannot draw: without a evaluation set, or with no loss at a known time."""
    return [run for run in runs if run.evaluation_set is None or not _drawable(run)]


def mean_curve(curves: Sequence[tuple[numpy.ndarray, numpy.ndarray]]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The mean of curves (x, y) over the interval of x that all of them cover, straight lines between their points.

    Seeds are evaluated at equal samples but not at equal seconds, so there is no common x to average at. Beyond the end
    of the shortest curve there is no mean: one over the remaining seeds would jump.

    >>> one, two = numpy.array([0.0, 2.0]), numpy.array([0.0, 4.0])
    >>> mean_curve([(one, numpy.array([4.0, 0.0])), (two, numpy.array([4.0, 0.0]))])
    (array([0., 2.]), array([4., 1.]))
    """
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    grid = numpy.unique(numpy.concatenate([x for x, _ in curves]))
    grid = grid[(first <= grid) & (grid <= last)]
    return grid, numpy.mean([numpy.interp(grid, x, y) for x, y in curves], axis=0)


def _draw(axes: Axes, runs: list[Run], column: str, mark_oversubscribed: bool) -> list[str]:
    evaluation_sets = {run.evaluation_set for run in runs}
    if len(evaluation_sets) > 1:
        raise ValueError(f"losses on different data do not share axes, got {sorted(map(str, evaluation_sets))}")
    by_condition: dict[Condition, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        by_condition.setdefault(run.condition, []).append(run)
    names = labels(by_condition)
    counts = sorted({condition.num_workers or 0 for condition in by_condition})
    variants = sorted({_variant(condition, names) for condition in by_condition})
    ends: list[tuple[float, float, Any]] = []
    shown: list[numpy.ndarray] = []
    hidden: list[numpy.ndarray] = []
    for condition, name in names.items():
        group = by_condition[condition]
        colour = MODE_COLOURS.get(condition.mode or "", OTHER_MODE_COLOUR)
        style = _LINE_STYLES[counts.index(condition.num_workers or 0) % len(_LINE_STYLES)]
        marker = _MARKERS[variants.index(_variant(condition, names)) % len(_MARKERS)]
        curves = []
        for run in group:
            x, y = _curve(run, column)
            if len(x) == 0:
                continue
            axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.45, zorder=2)
            if run.done:
                curves.append((x, y))
                shown.append(y)
            else:
                hidden.append(y)
                ends += [(x[last], y[last], colour) for last in numpy.flatnonzero(numpy.isfinite(y))[-1:]]
        label = f"{name} (n = {len(curves)}{f' of {len(group)}' * (len(curves) < len(group))})"
        if mark_oversubscribed and any(run.oversubscribed for run in group):
            label += " *"
        x, y = mean_curve(curves) if curves else (numpy.array([]), numpy.array([]))
        axes.plot(
            x,
            y,
            color=colour,
            linestyle=style,
            linewidth=1.4,
            marker=marker,
            markersize=3.5,
            markevery=max(1, len(x) // 8),
            label=textwrap.fill(label, LEGEND_WIDTH),  # a rule with many parameters would leave no room for the axes
            zorder=3,
        )
    axes.add_line(Line2D([], [], color="0.3", linewidth=0.6, alpha=0.7, label="one run (thick: mean)"))
    notes = _limit_to(axes, shown or hidden, hidden)
    low, high = axes.get_ylim()
    for end, loss, colour in ends:
        # on the edge if it ended outside, so that a diverged run is seen to end
        at = min(max(loss, low), high)
        axes.plot([end], [at], marker="x", markersize=5, color=colour, linestyle="none", clip_on=False, zorder=4)
    if ends:
        axes.add_line(
            Line2D([], [], marker="x", markersize=5, color="0.3", linestyle="none", label="not finished: not in a mean")
        )
    axes.set_ylabel(loss_label(runs))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    seaborn.despine(ax=axes)
    return notes


def _limit_to(axes: Axes, shown: list[numpy.ndarray], hidden: list[numpy.ndarray]) -> list[str]:
    """Fit the y axis to the runs in the means: one diverged run must not flatten all others; say what that hides."""
    finite = numpy.concatenate([y[numpy.isfinite(y)] for y in shown]) if shown else numpy.array([])
    if len(finite) == 0:
        return []
    margin = 0.05 * (finite.max() - finite.min()) or 0.05
    low, high = finite.min() - margin, finite.max() + margin
    axes.set_ylim(low, high)
    outside = sum(int(numpy.sum((y < low) | (y > high))) for y in hidden)
    if outside == 0:
        return []
    counted = "1 evaluation" if outside == 1 else f"{outside} evaluations"
    return [f"outside the picture: {counted} of runs that did not finish"]


def _variant(condition: Condition, names: dict[Condition, str]) -> tuple[bool, str]:
    """What a marker stands for: the name without its number of workers; plain names sort first and get no marker."""
    name = re.sub(r", (\d+ workers?|unknown workers)", "", names[condition])
    name = name.removeprefix(condition.mode or "unknown mode")
    return (name != "", name)


def _curve(run: Run, column: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(x, loss) with x strictly increasing; a loss that is not finite stays as a gap."""
    x = run.evaluations[column].to_numpy(dtype=float, na_value=numpy.nan)
    y = run.evaluations["loss"].to_numpy(dtype=float, na_value=numpy.nan)
    x, y = x[numpy.isfinite(x)], y[numpy.isfinite(x)]
    # two evaluations may share an x (nothing arrived between them); numpy.interp needs one, and the later one counts
    x, last = numpy.unique(x[::-1], return_index=True)
    return x, y[::-1][last]


def _drawable(run: Run) -> bool:
    evaluations = run.evaluations
    return bool((evaluations["loss"].notna() & evaluations["train_seconds"].notna()).any())


def _suffixes(evaluation_sets: Iterable[str]) -> dict[str, str]:
    """Fingerprint -> end of the file name: nothing for a single one, else the shortest that keeps them apart."""
    ordered = sorted(evaluation_sets)
    if len(ordered) <= 1:
        return dict.fromkeys(ordered, "")
    safe = [re.sub(r"[^A-Za-z0-9]+", "-", evaluation_set) for evaluation_set in ordered]
    short = [name[:12] for name in safe]
    chosen = short if len(set(short)) == len(ordered) else safe
    if len(set(chosen)) < len(ordered):  # differ in punctuation only
        chosen = [f"{name}-{number}" for number, name in enumerate(safe)]
    return {evaluation_set: f"_{name}" for evaluation_set, name in zip(ordered, chosen, strict=True)}
