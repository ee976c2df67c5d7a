"""The picture of all comparisons of a study, a row each: times to the target on the left, losses on the right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from pandas import DataFrame

from analysis.plots import DASHED, MUTED, Labels

COLOURS = {"better": "#0a7d57", "worse": "#c0400c", "equivalent": "#0b6cae", "different but negligible": "#0b6cae"}
"""Word of a registered test -> the colour of its square."""
MAX_ROWS = 24
OPEN_END_FACTOR = 8
"""How many times a ratio an interval without an end is drawn to."""


def draw_forest(tests: DataFrame, labels: Labels, axes: Iterable[Axes]) -> str:
    """Every comparison as a point with its interval, in the colour of its word: time ratio left, loss right."""
    left, right = axes
    arms = tests[["treatment", "reference"]].drop_duplicates()
    arms = arms.head(MAX_ROWS)
    pairs = list(arms.itertuples(index=False, name=None))
    times = tests[tests["endpoint"] == "time_to_target"]
    losses = tests[tests["endpoint"].str.startswith("loss")]
    first_endpoint = losses["endpoint"].head(1)
    losses = losses[losses["endpoint"].isin(first_endpoint)]
    sentences = _ratios(times, pairs, labels, left)
    sentences += _differences(losses, pairs, labels, right)
    names = []
    for treatment, reference in pairs:
        ours = labels.get(treatment, treatment)
        theirs = labels.get(reference, reference)
        names.append(_versus(ours, theirs))
    left.set_yticks(range(len(pairs)), names)
    right.set_yticks(range(len(pairs)), [""] * len(pairs))
    return "; ".join(sentences)


def _versus(ours: str, theirs: str) -> str:
    """
    >>> _versus("async, 4 workers, measured", "sync, 4 workers, measured")
    'async vs sync, 4 workers, measured'
    """
    name, _, where = ours.partition(", ")
    other, _, there = theirs.partition(", ")
    if where != there:
        return f"{ours} vs {theirs}"
    if not where:
        return f"{name} vs {other}"
    return f"{name} vs {other}, {where}"


def _ratios(tests: DataFrame, pairs: Sequence[Any], labels: Labels, axes: Axes) -> list[str]:
    """The left half of a forest: how many times sooner the treatment was at the target than the reference.

    The axis falls, so that the treatment is better on the left, as in the right half.
    """
    sentences = []
    for row in tests.itertuples():
        if (row.treatment, row.reference) not in pairs:
            continue
        row_number = pairs.index((row.treatment, row.reference))
        sentence = _annotate_word(row, row_number, labels, axes)
        if not math.isnan(row.ratio):
            # an open end lies so far that it is seen to be one
            low, high = np.clip(
                (row.ratio_low, row.ratio_high), row.ratio / OPEN_END_FACTOR, row.ratio * OPEN_END_FACTOR
            )
            _point(row, row_number, (row.ratio, low, high), axes)
            sentence += f", the reference's time is {row.ratio:.3g} times its own"
        sentences.append(sentence)
    _rows(axes, len(pairs), no_difference=1.0)
    axes.set_xscale("log")
    first, last = axes.get_xlim()
    if last < 5 * first:  # too near for two of 1, 2, 5
        axes.xaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())  # labels of more ticks would touch
    axes.invert_xaxis()
    axes.set_xlabel("times sooner at the target: the reference's time / its own")
    return sentences


def _differences(tests: DataFrame, pairs: Sequence[Any], labels: Labels, axes: Axes) -> list[str]:
    """The right half of a forest: the loss less the reference's, with the margin shaded."""
    sentences = []
    for row in tests.itertuples():
        if (row.treatment, row.reference) not in pairs:
            continue
        row_number = pairs.index((row.treatment, row.reference))
        sentence = _annotate_word(row, row_number, labels, axes)
        if not math.isnan(row.estimate):
            _point(row, row_number, (row.estimate, row.low, row.high), axes)
            sentence += f", {row.estimate:+.3g} {row.unit}"
        sentences.append(sentence)
    if tests["margin"].notna().any():
        margin = tests["margin"].max()
        axes.axvspan(-margin, margin, color="#0b6cae", alpha=0.12, linewidth=0)
    _rows(axes, len(pairs), no_difference=0.0)
    endpoint = next(iter(tests["endpoint"]), "loss")
    axes.set_xlabel(f"{endpoint.replace('_', ' ')} - the reference's")
    axes.locator_params(axis="x", nbins=5)
    return sentences


def _tone(row: Any) -> str:
    """The colour of a comparison: that of its word where it was registered."""
    if row.family != "primary":
        return MUTED
    return COLOURS.get(row.word, MUTED)


def _annotate_word(row: Any, row_number: int, labels: Labels, axes: Axes) -> str:
    """Write the word of a comparison next to its row of a forest.

    Returns:
        The beginning of the sentence on the comparison.
    """
    style: dict[str, Any] = {"fontsize": 8, "color": _tone(row), "va": "center"}
    at_the_edge: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    axes.annotate(f" {row.word}", (1.0, row_number), **style, **at_the_edge)
    name = labels.get(row.treatment, row.treatment)
    endpoint = row.endpoint.replace("_", " ")
    return f"{name}, {endpoint}: {row.word}"


def _point(row: Any, row_number: int, interval: tuple[float, float, float], axes: Axes) -> None:
    """Draw an estimate with its ends; what was registered is larger, and a square."""
    estimate, low, high = interval
    tone = _tone(row)
    marker = "o"
    size = 4.5
    width = 1.2
    if row.family == "primary":
        marker = "s"
        size = 5.5
        width = 2.4
    axes.plot([low, high], [row_number, row_number], color=tone, linewidth=width, solid_capstyle="butt")
    axes.plot(estimate, row_number, marker, color=tone, markersize=size)


def _rows(axes: Axes, number: int, no_difference: float) -> None:
    """The rows of a forest, from the top, and a dashed line where both arms are alike."""
    axes.axvline(no_difference, **DASHED)
    axes.set_ylim(number - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
