"""Pictures, each a function of the tables that draws into given axes and returns what it shows in a sentence.

An algorithm has one colour, one marker and one dash everywhere, which stay apart for the colour-blind and in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from pandas import DataFrame
from scipy import stats as scipy_stats

from analysis.curves import Curve, band, curve
from analysis.measure import Measure
from analysis.stats import Interval, t_interval

FIXED = ("single", "sync", "async", "hogwild", "ringmaster", "m_sync", "rennala", "pipeline")
"""Algorithms that have the same style in every report: that of their place here. Others take the places after them."""
MARKERS = "osD^vP*X<>"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
MUTED = "#78828c"
"""Readable on white and on black."""
MAX_LINE_POINTS = 200
DASHED: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": "--"}
STYLE = {
    **sns.axes_style("ticks", {"grid.color": MUTED, "axes.grid": True, "axes.edgecolor": MUTED}),
    "grid.alpha": 0.25,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "font.family": ["DejaVu Sans"],
}


class ArmStyle(NamedTuple):
    """How an arm is drawn everywhere."""

    colour: Any
    marker: str
    dash: Any

    def line(self, axes: Axes, x: Any, y: Any, **options: Any) -> None:
        style = {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "markersize": 4}
        axes.plot(x, y, **style, **options)

    def steps(self, axes: Axes, x: Any, y: Any, label: str) -> None:
        style = {"color": self.colour, "linestyle": self.dash}
        axes.step(x, y, where="post", label=label, **style)

    def band(self, axes: Axes, x: Any, low: Any, high: Any, **options: Any) -> None:
        style = {"color": self.colour, "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x, low, high, **style, **options)


Styles: TypeAlias = Mapping[str, ArmStyle]
"""Arm or algorithm -> how it is drawn."""
Labels: TypeAlias = Mapping[str, str]
"""Arm -> what it is called in a picture."""


def arm_styles(arms: DataFrame) -> dict[str, ArmStyle]:
    """The style of every arm of `questions.groups`; well-known algorithms have theirs in every report. A group's second
    arm of an algorithm has a style of its own.
    """
    nth = arms.groupby(["group", "algorithm"]).cumcount()
    names = []
    for algorithm, n in zip(arms["algorithm"], nth, strict=True):
        names.append(f"{algorithm} {n}" if n else str(algorithm))
    others = sorted(set(names) - set(FIXED))
    order = [*FIXED, *others]
    colours = sns.color_palette("colorblind", 10)
    colours += sns.color_palette("dark", len(order))  # for more arms than there are colours for the colour-blind
    found = {}
    for arm, name in zip(arms.index, names, strict=True):
        number = order.index(name)
        marker = MARKERS[number % len(MARKERS)]
        dash = DASHES[number % len(DASHES)]
        found[arm] = ArmStyle(colours[number], marker, dash)
    return found


class FigureWithoutMath(Figure):
    """A figure whose texts are texts and never formulas, however it is shown: a name may hold dollar signs."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        with matplotlib.rc_context({"text.parse_math": False}):  # of labels that are made as the picture is drawn
            super().draw(renderer)


def figure(width: float = 4.9, height: float = 3.1, columns: int = 1) -> tuple[Figure, NDArray[Any]]:
    """A figure in the style of all, with its axes beside each other."""
    with matplotlib.rc_context(STYLE):
        drawn = FigureWithoutMath(figsize=(width * columns, height))
        axes = drawn.subplots(1, columns, squeeze=False)[0]
        for each_axes in axes:
            each_axes.tick_params(color=MUTED)
        return drawn, axes


def loss(
    axes: Axes,
    runs: DataFrame,
    curves: DataFrame,
    styles: Styles,
    labels: Labels,
    x: str = "seconds",
    y: str = "loss",
    target: float | None = None,
) -> str:
    """A thin line for every run, the mean of an arm with its t band, and the target. A run that diverged ends in a
    cross. It is in no mean, nor is a run that is not DONE."""
    frames = dict(iter(curves.groupby("run")))
    evaluated = runs[runs["run"].isin(frames)]
    sentences = []
    for arm, of_arm in evaluated.groupby("arm", sort=False):
        style = styles[str(arm)]
        alive = []
        for row in of_arm.itertuples():
            of_run = curve(frames[row.run], x, y)
            _thin_line(axes, of_run, style, row.diverged)
            if row.status == "DONE" and not row.diverged:
                alive.append(of_run)
        grid, mean, low, high = band(alive)
        name = f"{labels.get(str(arm), arm)} (n = {len(alive)})"
        step = max(1, len(grid) // 5)
        style.band(axes, grid, low, high)
        style.line(axes, grid, mean, linewidth=1.7, markevery=step, label=name)
        if len(grid):
            sentences.append(f"{name}: {mean[0]:.3g} to {mean[-1]:.3g} at {grid[-1]:.4g} {x}")
    if target is not None and not math.isnan(target):
        axes.axhline(target, **DASHED)
        sentences.append(f"target {target:.4g}")
    x_label = _seconds_of(runs) if x == "seconds" else x
    y_label = "evaluation loss" if y == "loss" else y.removeprefix("metric.")
    axes.set(xlabel=x_label, ylabel=y_label)
    return "; ".join(sentences)


def _thin_line(axes: Axes, of_run: Curve, style: ArmStyle, is_diverged: bool) -> None:
    """The line of one run, of at most `MAX_LINE_POINTS` points, the last one among them."""
    x, y = of_run
    step = -(-len(x) // MAX_LINE_POINTS) or 1
    x = x[::-step][::-1]
    y = y[::-step][::-1]
    axes.plot(x, y, color=style.colour, linewidth=0.6, alpha=0.4)
    if is_diverged and len(x):
        axes.plot(x[-1], y[-1], "x", color=style.colour)


def _seconds_of(runs: DataFrame) -> str:
    is_virtual = set(runs["clock"]) == {"virtual"}
    return "virtual seconds" if is_virtual else "training seconds"


def reached(
    axes: Axes,
    runs: DataFrame,
    curves: DataFrame,
    styles: Styles,
    labels: Labels,
    target: float,
) -> str:
    """The share of runs that were seen at the target by a time; those that ended before it are censored there."""
    measure = Measure(curves)
    sentences = []
    for arm, of_arm in runs.groupby("arm", sort=False):
        times = []
        ends = []
        for row in of_arm.itertuples():
            ((_, seen_at),) = measure.crossings([row], target)
            times.append(seen_at)
            if row.diverged:
                ends.append(math.inf)
            else:
                ends.append(measure.end(row.run, "seconds"))
        name = labels.get(str(arm), str(arm))
        is_reached = np.isfinite(times)
        sentences.append(f"{name}: {is_reached.sum()} of {len(times)}")
        if is_reached.any():
            seconds, share = _share_reached(np.array(times), np.array(ends))
            styles[str(arm)].steps(axes, seconds, share, name)
    axes.set(ylim=(-0.03, 1.05), xlabel=_seconds_of(runs))
    axes.set_ylabel(f"share of runs seen at or below {target:.3g}")
    return "; ".join(sentences)


def _share_reached(times: NDArray[Any], ends: NDArray[Any]) -> tuple[list[float], list[float]]:
    """The times at which a run came to the target, and the share of runs that had by then (Kaplan and Meier).

    Args:
        times: of each run, inf where it never came there.
        ends: until when it was watched.
    """
    is_reached = np.isfinite(times)
    finite_times = times[is_reached]
    finite_ends = ends[np.isfinite(ends)]
    last = max([*finite_times, *finite_ends])
    watched = np.minimum(ends, last)
    sample = scipy_stats.CensoredData(uncensored=finite_times, right=watched[~is_reached])
    share = scipy_stats.ecdf(sample).cdf
    return [0, *share.quantiles], [0, *share.probabilities]


def against(
    axes: Axes,
    runs: DataFrame,
    styles: Styles,
    x: str,
    y: str,
    *,
    log: bool = False,
) -> str:
    """`y` against `x`: means over seeds with t intervals, a line for each algorithm.

    A setting, of which an arm has one value, gives a point for each value. A measured `x` gives a point for each arm,
    at its mean.
    """
    sentences = []
    known = runs.dropna(subset=[x, y])
    for name, own in known.groupby("algorithm", sort=False):
        is_setting = own[x].nunique() <= own["arm"].nunique()
        points = []
        for _, alike in own.groupby(x if is_setting else "arm"):
            points.append((alike[x].mean(), t_interval(alike[y])))
        points.sort(key=lambda point: point[0])
        positions = [position for position, _ in points]
        estimates = [interval.estimate for _, interval in points]
        low = [interval.low for _, interval in points]
        high = [interval.high for _, interval in points]
        style = styles[own["arm"].iloc[0]]
        style.line(axes, positions, estimates, label=str(name))
        axes.vlines(positions, low, high, color=style.colour, linewidth=1.2)
        shown = [f"{interval.estimate:.3g} at {position:.3g}" for position, interval in points]
        sentences.append(f"{name}: {', '.join(shown)}")
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    if log:
        logarithmic(axes, base=2 if x == "workers" else 10)
    return "; ".join(sentences)


def logarithmic(axes: Axes, base: float = 10) -> None:
    """Scale the x axis by logarithms, with its numbers written out: 0.001, and not a formula."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter(base))


def delays(axes: Axes, counts: Mapping[str, Mapping[int, int]], styles: Styles) -> str:
    """How often a gradient was applied at each delay, in updates."""
    sentences = []
    for arm, of_arm in counts.items():
        total = sum(of_arm.values())
        delays_of_arm = sorted(of_arm)
        shares = [of_arm[delay] / total for delay in delays_of_arm]
        styles[arm].line(axes, delays_of_arm, shares, label=arm)
        sentences.append(f"{arm}: at most {max(of_arm)}")
    axes.set(xlabel="delay (updates)", ylabel="share of the gradients")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return "; ".join(sentences)


def heat(axes: Axes, counts: DataFrame) -> str:
    """A confusion matrix, rows in percent of the true class."""
    shares = counts.div(counts.sum(axis=1), axis=0)
    sns.heatmap(shares, annot=True, fmt=".0%", cmap="Blues", cbar=False, square=True, ax=axes)
    axes.set(xlabel="predicted", ylabel="true")
    known = shares.dropna().index  # a class without a text has no share
    sentences = [f"{name} right in {shares.loc[name, name]:.0%}" for name in known]
    return "; ".join(sentences)


def profiles(axes: Axes, found: Mapping[str, DataFrame], styles: Styles) -> str:
    """The share of runs with a score above every threshold, one curve an algorithm, with its band."""
    scores = np.concatenate([steps["score"] for steps in found.values()])
    # below 0 is worse than before training, and how far below would only squeeze the rest
    least = max(0.0, scores.min())
    most = max(scores.max(), 1.0)
    padding = 0.05 * (most - least)
    left = least - padding
    right = most + padding
    for name, steps in found.items():
        style = styles[name]
        first = min(left, steps["score"].iloc[0])
        x = [first, *steps["score"], right]
        style.steps(axes, x, [1.0, *steps["share"], 0.0], name)
        if steps["low"].notna().any():
            low = [1.0, *steps["low"], 0.0]
            high = [1.0, *steps["high"], 0.0]
            style.band(axes, x, low, high, step="post")
    axes.set(xlim=(left, right), ylim=(-0.03, 1.03))
    axes.set(xlabel="score τ", ylabel="runs with a score above τ")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=8)
    return "; ".join(found)


def bars(axes: Axes, intervals: Mapping[str, Interval], even: float, label: str, styles: Styles) -> str:
    """One horizontal bar an algorithm from low to high, a line at the estimate, and a dashed one at `even`."""
    sentences = []
    for row_number, (name, interval) in enumerate(intervals.items()):
        colour = styles[name].colour
        width = interval.high - interval.low
        bottom = row_number - 0.3
        top = row_number + 0.3
        axes.barh(row_number, width, 0.6, interval.low, color=colour, alpha=0.4, linewidth=0)
        axes.vlines(interval.estimate, bottom, top, color=colour, linewidth=2.2)
        sentences.append(f"{name}: {interval:.3f}")
    axes.axvline(even, **DASHED)
    axes.set(xlabel=label, ylim=(len(intervals) - 0.4, -0.6))
    axes.set_yticks(range(len(intervals)), list(intervals))
    return "; ".join(sentences)


METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}


def save(figure: Figure, path: Path, suffixes: Sequence[str] = ("pdf", "svg")) -> list[Path]:
    """Write a picture with its fonts in it, by default as PDF and SVG; equal pictures give equal bytes."""
    paths = []
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "asyncsgd", "pdf.fonttype": 42}):
        for suffix in suffixes:
            file = path.with_name(f"{path.name}.{suffix}")
            figure.savefig(file, dpi=150, metadata=METADATA[suffix])
            paths.append(file)
    return paths
