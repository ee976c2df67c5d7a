"""Who is who in a report, and what its pictures have in common: names, intervals, limits of axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from analysis.findings.arms import ArmInfo
from analysis.findings.comparisons import FROM_SCRATCH
from analysis.findings.groups import Group
from analysis.findings.results import Results
from analysis.report.figures.pictures import (
    DASHES,
    INK,
    MUTED,
    Entry,
    Look,
    looks,
    slug,
)
from analysis.statistics.intervals import Interval


class Cast:
    """Who is who in a report: the look of every algorithm, and how an arm is called and drawn beside others."""

    def __init__(self, results: Results) -> None:
        self.arms: dict[str, ArmInfo] = {arm.name: arm for arm in results.arms}
        self.groups: dict[str, Group] = {group.name: group for group in results.groups}
        self.looks: dict[str, Look] = looks(
            [arm.algorithm for arm in results.arms]
            + [scaling.algorithm for scaling in results.scaling]
            + ["baseline"] * any(arm.baseline for arm in results.downstream)
        )
        self._names: set[str] = set()

    def look(self, arm: str) -> Look:
        return self.looks[self.arms[arm].algorithm] if arm in self.arms else self.looks.get(arm, UNKNOWN)

    def label(self, arm: str) -> str:
        return self.arms[arm].label if arm in self.arms else arm

    def entries(self, arms: Iterable[str], line: bool = True, marker: bool = True) -> dict[str, Entry]:
        """The legend of some arms of one picture: the algorithm where that tells them apart, else the full label."""
        known = list(dict.fromkeys(arms))
        count: dict[str, int] = {}
        entries = {}
        for arm in known:
            algorithm = self.arms[arm].algorithm if arm in self.arms else arm
            alone = sum(other in self.arms and self.arms[other].algorithm == algorithm for other in known) <= 1
            place = count.setdefault(algorithm, 0)
            count[algorithm] += 1
            text = algorithm if alone else self.label(arm).replace(f", {FROM_SCRATCH}", "")
            entries[arm] = Entry(text, self.look(arm), DASHES[place % len(DASHES)], line, marker)
        return entries

    def name(self, *words: str) -> str:
        """A file name that no other picture of the report has."""
        wanted = slug("-".join(words))
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}-{number}", number + 1
        self._names.add(name)
        return name

    def from_scratch(self, arms: Iterable[str]) -> bool:
        return any(arm in self.arms and self.arms[arm].from_scratch for arm in arms)


UNKNOWN = Look("unknown", INK, "#e7eaee", "o", -1)


def draw_intervals(axes: Axes, points: Sequence[tuple[float, Interval]], entry: Entry, joined: bool) -> None:
    """Estimates with their intervals as plain bars, in the look of `entry`."""
    for x, interval in points:
        axes.plot([x, x], interval.ends, color=entry.look.colour, linewidth=1.4, solid_capstyle="butt", zorder=2)
    draw_line(axes, [(x, interval.estimate) for x, interval in points], entry, joined)


def draw_line(axes: Axes, points: Iterable[tuple[float, float]], entry: Entry, joined: bool = True) -> None:
    """Points in the look of `entry`, and a line through them."""
    axes.plot(
        *zip(*points, strict=True),
        color=entry.look.colour,
        linestyle=entry.dash if joined else "none",
        linewidth=1.5,
        marker=entry.look.marker,
        markersize=5,
        zorder=3,
    )


def workers_beside(axes: Axes, points: Iterable[tuple[float, float, ArmInfo | None]]) -> None:
    """The number of workers beside each point (x, y) of an arm, where none lies on another; limits have to be set.

    A number for which there is no room at any corner of its point is left out: the table beside the picture has it.
    """
    size, on_a_phone, taken = 7.5, 12.0, list[Bbox]()
    for x, y, arm in points:
        workers = "" if arm is None or arm.num_workers is None else str(arm.num_workers)
        scale = axes.figure.dpi / 72
        wide, high = 0.65 * on_a_phone * len(workers), on_a_phone
        for right, up in ((6, 4), (6, -4 - high), (-6 - wide, 4), (-6 - wide, -4 - high)):
            at_x, at_y = axes.transData.transform((x, y)) + scale * numpy.array((right, up))
            box = Bbox.from_bounds(at_x, at_y, scale * wide, scale * high)
            if workers and not any(box.overlaps(other) for other in taken):
                axes.annotate(
                    workers, (x, y), xytext=(right, up), textcoords="offset points", fontsize=size, color=MUTED
                )
                taken.append(box)
                break


def in_all(sizes: Sequence[int]) -> str:
    if not sizes:
        return "n = 0"
    return f"n = {sizes[0]}" if len(sizes) == 1 else f"n = {sizes[0]} to {sizes[-1]}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def limits_of(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    margin = 0.05 * (max(finite) - min(finite)) or 0.05
    return min(finite) - margin, max(finite) + margin
