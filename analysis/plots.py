"""Pictures, each a function of the tables that draws into given axes and returns what it shows in a sentence.

An algorithm has one colour, one marker and one dash everywhere, which stay apart for the colour-blind and in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter
from numpy.typing import NDArray
from pandas import DataFrame
from scipy import stats as scipy_stats

from analysis.curves import Curve, band, curve
from analysis.measure import Measure
from analysis.stats import Interval, t_interval

FIXED = ("single", "sync", "async", "hogwild", "ringmaster", "m_sync", "rennala", "pipeline")
MARKERS = "osD^vP*X<>"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
TONES = {"better": "#0a7d57", "worse": "#c0400c", "equivalent": "#0b6cae", "different but negligible": "#0b6cae"}
MUTED = "#78828c"
"""Readable on white and on black."""
MOST_POINTS = 200
MOST_ROWS = 24
"""Of a line; of a forest plot."""
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


class Look(NamedTuple):
    """How an arm is drawn everywhere."""

    colour: Any
    marker: str
    dash: Any

    def line(self, axes: Axes, x: Any, y: Any, **options: Any) -> None:
        axes.plot(x, y, color=self.colour, linestyle=self.dash, marker=self.marker, markersize=4, **options)

    def steps(self, axes: Axes, x: Any, y: Any, label: str) -> None:
        axes.step(x, y, where="post", color=self.colour, linestyle=self.dash, label=label)

    def band(self, axes: Axes, x: Any, low: Any, high: Any, **options: Any) -> None:
        axes.fill_between(x, low, high, color=self.colour, alpha=0.16, linewidth=0, **options)


def looks(arms: DataFrame) -> dict[str, Look]:
    """Of every arm of `questions.groups`; well-known algorithms have theirs in every report. A group's second arm of an
    algorithm has a look of its own.
    """
    nth = arms.groupby(["group", "algorithm"]).cumcount()
    names = [f"{name} {n}" if n else str(name) for name, n in zip(arms["algorithm"], nth, strict=True)]
    order = [*FIXED, *sorted(set(names) - set(FIXED))]
    colours = [*sns.color_palette("colorblind", 10), *sns.color_palette("dark", len(order))]
    numbers = [order.index(name) for name in names]
    kinds = [Look(colours[n], MARKERS[n % len(MARKERS)], DASHES[n % len(DASHES)]) for n in numbers]
    return dict(zip(arms.index, kinds, strict=True))


class Literal(Figure):
    """A figure whose texts are texts and never formulas, however it is shown: a name may hold dollar signs."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        with matplotlib.rc_context({"text.parse_math": False}):  # of labels that are made as the picture is drawn
            super().draw(renderer)


def figure(width: float = 4.9, height: float = 3.1, columns: int = 1) -> tuple[Figure, NDArray[Any]]:
    """A figure in the style of all, with its axes beside each other."""
    with matplotlib.rc_context(STYLE):
        drawn = Literal(figsize=(width * columns, height))
        axes = drawn.subplots(1, columns, squeeze=False)[0]
        for one in axes:
            one.tick_params(color=MUTED)
        return drawn, axes


def forest(tests: DataFrame, labels: Mapping[str, str], axes: Iterable[Axes]) -> str:
    """Every comparison as a point with its interval, in the colour of its word: time ratio left, loss right."""
    left, right = axes
    pairs = tests[["treatment", "reference"]].drop_duplicates().head(MOST_ROWS)
    losses = tests[tests["endpoint"].str.startswith("loss")]
    named = [tuple(pair) for pair in pairs.to_numpy()]
    told = _forest(tests[tests["endpoint"] == "time_to_target"], named, labels, left, ratio=True)
    told += _forest(losses[losses["endpoint"].isin(losses["endpoint"].head(1))], named, labels, right, ratio=False)
    left.set_yticks(range(len(pairs)), [_versus(labels.get(a, a), labels.get(b, b)) for a, b in pairs.to_numpy()])
    right.set_yticks(range(len(pairs)), [""] * len(pairs))
    return "; ".join(told)


def _versus(ours: str, theirs: str) -> str:
    """
    >>> _versus("async, 4 workers, measured", "sync, 4 workers, measured")
    'async vs sync, 4 workers, measured'
    """
    (one, *where) = ours.split(", ")
    (other, *there) = theirs.split(", ")
    return ", ".join([f"{one} vs {other}", *where]) if where == there else f"{ours} vs {theirs}"


OPEN = 8
"""How many times a ratio an interval without an end is drawn to."""


def _forest(
    tests: DataFrame, pairs: list[tuple[str, ...]], labels: Mapping[str, str], axes: Axes, *, ratio: bool
) -> list[str]:
    columns = ("ratio", "ratio_low", "ratio_high") if ratio else ("estimate", "low", "high")
    told = []
    for row in tests.itertuples():
        if (row.treatment, row.reference) not in pairs:
            continue
        place = pairs.index((row.treatment, row.reference))
        registered = row.family == "primary"
        tone = TONES.get(row.word, MUTED) if registered else MUTED
        told.append(f"{labels.get(row.treatment, row.treatment)}, {row.endpoint.replace('_', ' ')}: {row.word}")
        beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        axes.annotate(f" {row.word}", (1.0, place), fontsize=8, color=tone, **beside)
        at, low, high = (getattr(row, name) for name in columns)
        if at != at:
            continue
        if ratio:  # an open end is drawn so far that it is seen to be one
            at, low, high = 1 / at, *np.clip((1 / low if low else math.inf, 1 / high), 1 / at / OPEN, OPEN / at)
        told[-1] += f", {at:.3g} of the time" if ratio else f", {at:+.3g} {row.unit}"
        axes.plot([low, high], [place, place], color=tone, linewidth=2.4 if registered else 1.2, solid_capstyle="butt")
        axes.plot(at, place, "s" if registered else "o", color=tone, markersize=5.5 if registered else 4.5)
    if not ratio and tests["margin"].notna().any():
        axes.axvspan(-tests["margin"].max(), tests["margin"].max(), color="#0b6cae", alpha=0.12, linewidth=0)
    axes.axvline(1.0 if ratio else 0.0, **DASHED)
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if ratio:
        axes.set_xscale("log")
        first, last = axes.get_xlim()
        few = last < 5 * first  # too near for two of 1, 2, 5
        axes.xaxis.set_major_locator(MaxNLocator(5) if few else LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())  # labels of more ticks would touch
        axes.set_xlabel("time to the target / the reference's")
    else:
        axes.set_xlabel(f"{next(iter(tests['endpoint']), 'loss').replace('_', ' ')} - the reference's")
        axes.locator_params(axis="x", nbins=5)
    return told


def loss(
    axes: Axes,
    runs: DataFrame,
    curves: DataFrame,
    cast: Mapping[str, Look],
    labels: Mapping[str, str],
    x: str = "seconds",
    y: str = "loss",
    target: float | None = None,
) -> str:
    """A thin line for every run, the mean of an arm with its t band, and the target. A run that diverged ends in a
    cross and is in no mean."""
    frames = dict(iter(curves.groupby("run")))
    told = []
    for arm, of_arm in runs[runs["run"].isin(frames)].groupby("arm", sort=False):
        look = cast[str(arm)]
        found = {row.run: curve(frames[row.run], x, y) for row in of_arm.itertuples()}
        for row in of_arm.itertuples():
            at, values = _thinned(found[row.run])
            axes.plot(at, values, color=look.colour, linewidth=0.6, alpha=0.4)
            if row.diverged and len(at):
                axes.plot(at[-1], values[-1], "x", color=look.colour)
        alive = [found[row.run] for row in of_arm.itertuples() if not row.diverged]
        grid, mean, low, high = band(alive)
        name = f"{labels.get(str(arm), arm)} (n = {len(alive)})"
        look.band(axes, grid, low, high)
        look.line(axes, grid, mean, linewidth=1.7, markevery=max(1, len(grid) // 5), label=name)
        if len(grid):
            told.append(f"{name}: {mean[0]:.3g} to {mean[-1]:.3g} at {grid[-1]:.4g} {x}")
    if target is not None and target == target:
        axes.axhline(target, **DASHED)
        told.append(f"target {target:.4g}")
    axes.set_xlabel(_seconds_of(runs) if x == "seconds" else x)
    axes.set_ylabel(y.removeprefix("metric.") if y != "loss" else "evaluation loss")
    return "; ".join(told)


def _seconds_of(runs: DataFrame) -> str:
    return "virtual seconds" if set(runs["clock"]) == {"virtual"} else "training seconds"


def _thinned(curve: Curve) -> Curve:
    step = max(1, len(curve[0]) // MOST_POINTS)
    return curve[0][::step], curve[1][::step]


def reached(
    axes: Axes,
    runs: DataFrame,
    curves: DataFrame,
    cast: Mapping[str, Look],
    labels: Mapping[str, str],
    target: float,
) -> str:
    """The share of runs that were seen at the target by a time; those that ended before it are censored there."""
    measure = Measure(curves)
    told = []
    for arm, of_arm in runs.groupby("arm", sort=False):
        rows = list(of_arm.itertuples())
        look = cast[str(arm)]
        at = np.array([measure.crossings([row], target)[0][1] for row in rows])
        ends = np.array([math.inf if row.diverged else measure.end(row.run, "seconds") for row in rows])
        there = np.isfinite(at)
        name = labels.get(str(arm), str(arm))
        told.append(f"{name}: {there.sum()} of {len(rows)}")
        if there.any():
            last = max([*at[there], *ends[np.isfinite(ends)]])
            sample = scipy_stats.CensoredData(uncensored=at[there], right=np.minimum(ends, last)[~there])
            share = scipy_stats.ecdf(sample).cdf
            look.steps(axes, [0, *share.quantiles], [0, *share.probabilities], name)
    axes.set(ylim=(-0.03, 1.05), xlabel=_seconds_of(runs))
    axes.set_ylabel(f"share of runs seen at or below {target:.3g}")
    return "; ".join(told)


def against(
    axes: Axes,
    runs: DataFrame,
    cast: Mapping[str, Look],
    x: str,
    y: str,
    *,
    log: bool = False,
) -> str:
    """`y` against `x`: means over seeds with t intervals, a line for each algorithm."""
    told = []
    for name, own in runs.dropna(subset=[x, y]).groupby("algorithm", sort=False):
        look = cast[own["arm"].iloc[0]]
        exact = own[x].nunique() <= own["arm"].nunique()  # workers, rates; else an arm is a point at its mean
        means = [(part[x].mean(), t_interval(part[y])) for _, part in own.groupby(x if exact else "arm")]
        means.sort(key=lambda one: one[0])
        at = [one for one, _ in means]
        look.line(axes, at, [one.estimate for _, one in means], label=str(name))
        axes.vlines(at, [one.low for _, one in means], [one.high for _, one in means], color=look.colour, linewidth=1.2)
        told.append(f"{name}: {', '.join(f'{one.estimate:.3g} at {place:.3g}' for place, one in means)}")
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    if log:
        logarithmic(axes, base=2 if x == "workers" else 10)
    return "; ".join(told)


def logarithmic(axes: Axes, base: float = 10) -> None:
    """Scale the x axis by logarithms, with its numbers written out: 0.001, and not a formula."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter(base))


def delays(axes: Axes, counts: Mapping[str, Mapping[int, int]], cast: Mapping[str, Look]) -> str:
    """How often a gradient was applied at each delay, in updates."""
    for arm, of_arm in counts.items():
        total = sum(of_arm.values())
        at = sorted(of_arm)
        cast[arm].line(axes, at, [of_arm[delay] / total for delay in at], label=arm)
    axes.set(xlabel="delay (updates)", ylabel="share of the gradients")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return "; ".join(f"{arm}: at most {max(of_arm)}" for arm, of_arm in counts.items())


def heat(axes: Axes, counts: DataFrame) -> str:
    """A confusion matrix, rows in percent of the true class."""
    shares = counts.div(counts.sum(axis=1), axis=0)
    sns.heatmap(shares, annot=True, fmt=".0%", cmap="Blues", cbar=False, square=True, ax=axes)
    axes.set(xlabel="predicted", ylabel="true")
    return "; ".join(f"{name} right in {shares.loc[name, name]:.0%}" for name in counts.index)


def profiles(axes: Axes, found: Mapping[str, DataFrame], cast: Mapping[str, Look]) -> str:
    """The share of runs with a score above every threshold, one curve an algorithm, with its band."""
    scores = np.concatenate([one["score"] for one in found.values()])
    # below 0 is worse than before training, and how far below would only squeeze the rest
    left = max(0.0, scores.min())
    right = max(scores.max(), 1.0)
    left, right = left - 0.05 * (right - left), right + 0.05 * (right - left)
    for name, steps in found.items():
        look = cast[name]
        x = [min(left, steps["score"].iloc[0]), *steps["score"], right]
        share, low, high = ([1.0, *steps[column], 0.0] for column in ("share", "low", "high"))
        look.steps(axes, x, share, name)
        if steps["low"].notna().any():
            look.band(axes, x, low, high, step="post")
    axes.set(xlim=(left, right), ylim=(-0.03, 1.03), xlabel="score τ", ylabel="runs with a score above τ")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=8)
    return "; ".join(found)


def bars(axes: Axes, intervals: Mapping[str, Interval], even: float, label: str, cast: Mapping[str, Look]) -> str:
    """One horizontal bar an algorithm from low to high, a line at the estimate, and a dashed one at `even`."""
    for place, (name, one) in enumerate(intervals.items()):
        colour = cast[name].colour
        axes.barh(place, one.high - one.low, 0.6, one.low, color=colour, alpha=0.4, linewidth=0)
        axes.vlines(one.estimate, place - 0.3, place + 0.3, color=colour, linewidth=2.2)
    axes.axvline(even, **DASHED)
    axes.set(xlabel=label, ylim=(len(intervals) - 0.4, -0.6), yticks=range(len(intervals)), yticklabels=[*intervals])
    return "; ".join(f"{name}: {one:.3f}" for name, one in intervals.items())


METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}


def save(figure: Figure, path: Path, ends: Sequence[str] = ("pdf", "svg")) -> list[Path]:
    """Write a picture with its fonts in it, by default as PDF and SVG; equal pictures give equal bytes."""
    paths = [path.with_name(f"{path.name}.{end}") for end in ends]
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "asyncsgd", "pdf.fonttype": 42}):
        for one in paths:
            figure.savefig(one, dpi=150, metadata=METADATA[one.suffix[1:]])
    return paths
