"""What all pictures of the report share: the colour of an algorithm, the inks, how a figure enters a page or a file.

A figure is drawn once, with inks that are readable in light, in dark and in print.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from asyncsgd.errors import UsageError

INK = "#5f6973"
"""Text and whatever is neither data nor scaffolding."""
MUTED = "#78828c"
"""Tick labels, notes, declared values such as a target."""
DECLARED: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
"""A line at a value that was declared and not measured, such as a target."""
RULE = "#aab2ba"
"""Grid and axes."""

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

LABEL_WIDTH = 34
"""Characters of a y label in one line: as many as fit beside the axes of a panel on a phone."""

WIDTH, HEIGHT = 4.9, 3.1
"""Inches of one panel. Two of them stand side by side on a desktop and below one another on a phone."""


@dataclasses.dataclass(frozen=True)
class Look:
    """How one algorithm is drawn, everywhere: a colour, one for dark pages, and a marker for who tells none apart."""

    name: str
    colour: str
    on_dark: str
    marker: str
    slot: int


# the first four, the modes, are of seaborn's palette "colorblind": they stay apart under the common colour blindnesses
_FIXED = {
    "single": ("#949494", "#a5acb4", "o"),
    "sync": ("#de8f05", "#efa63a", "s"),
    "async": ("#0173b2", "#4ba6e3", "o"),
    "hogwild": ("#cc78bc", "#dd92cf", "D"),
    "ringmaster": ("#029e73", "#2fc79b", "^"),
    "m_sync": ("#8c4b13", "#c98a52", "v"),
    "rennala": ("#56b4e9", "#8fd0f7", "P"),
    "baseline": ("#3b3f46", "#dfe3e8", "*"),
}
# whatever else comes takes these in the order of the names; none is near one above in lightness and hue at once
_FREE = (
    ("#7a5ba8", "#ab8fd6", "X"),
    ("#8a8d00", "#c6c94a", "<"),
    ("#b3224c", "#ef6f92", ">"),
    ("#1f6f6b", "#63bdb8", "h"),
)


def looks(algorithms: Iterable[str]) -> dict[str, Look]:
    """The look of every algorithm by its name; the well-known ones are the same in every report.

    >>> looks(["async", "zeta"])["async"].colour
    '#0173b2'
    >>> looks(["m-sync"])["m-sync"].colour == looks(["m_sync"])["m_sync"].colour
    True
    """
    names = sorted(set(algorithms))
    taken: dict[str, tuple[str, str, str]] = {}
    for name in names:
        known = name.casefold().replace("-", "_")
        for plain, mode in (("asynchronous", "async"), ("synchronous", "sync")):
            known = mode if known == plain else known
        if known in _FIXED and _FIXED[known] not in taken.values():
            taken[name] = _FIXED[known]
    free = [name for name in names if name not in taken]
    left = [look for look in (*_FREE, *_FIXED.values()) if look not in taken.values()] or list(_FREE)
    taken |= {name: left[place % len(left)] for place, name in enumerate(free)}
    return {name: Look(name, *taken[name], slot) for slot, name in enumerate(names)}


DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.4, 1.2, 1.4)),
    (0, (6, 1.4, 1.2, 1.4, 1.2, 1.4)),
)
"""Of several arms of one algorithm in one picture."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a legend: what it says and how it is drawn."""

    text: str
    look: Look
    dash: Any = "solid"
    line: bool = True
    marker: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """A drawn figure with the words that belong to it."""

    name: str
    """Of the file, and the first word of its ids in a page: unique in a report."""
    what: str
    """What is drawn, for whoever sees the picture alone; a page says it in a heading."""
    title: str
    """Whose: a group or an arm."""
    figure: Figure
    description: str
    """For who cannot see it: what is drawn and what it shows."""
    caption: str = ""
    legend: tuple[Entry, ...] = ()


def panel(width: float = WIDTH, height: float = HEIGHT, left: float = 0.86, bottom: float = 0.5) -> tuple[Figure, Axes]:
    """An empty figure with one axes in the report's style; it depends on no display and on no global state.

    Args:
        width, height: inches.
        left, bottom: inches outside the axes. Fixed margins put the axes of neighbours in line.
    """
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0.0)
    figure.subplots_adjust(left / width, bottom / height, 1 - 0.14 / width, 1 - 0.14 / height)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def finish(axes: Axes, x: str, y: str, grid: Literal["x", "y", "both"] = "y") -> None:
    """Name both axes with their units and take away what carries no information."""
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    lines = textwrap.wrap(y, LABEL_WIDTH) or [""]
    axes.set_ylabel("\n".join(lines), fontsize=9.5, color=INK)
    figure = axes.figure
    if y and isinstance(figure, Figure):  # at the edge, however wide the numbers beside it are
        place = blended_transform_factory(figure.transFigure, axes.transAxes)
        axes.yaxis.label.set_verticalalignment("center")
        axes.yaxis.set_label_coords((0.02 + 0.08 * len(lines)) / figure.get_figwidth(), 0.5, transform=place)
    axes.tick_params(labelsize=8.5, color=RULE, labelcolor=MUTED, which="both", length=3, width=0.7)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(RULE)
        spine.set_linewidth(0.9)
    axes.grid(axis=grid, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def slug(text: str) -> str:
    """A word for file names and ids.

    >>> slug("4 workers, virtual clock, slow:worker=0,factor=3")
    '4-workers-virtual-clock-slow-worker-0-factor-3'
    >>> slug("<script>")
    'script'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")[:80] or "x"


def written(text: str) -> str:
    """`text` as matplotlib has to be given it: a dollar sign is a dollar sign, not the beginning of a formula."""
    return text.replace("$", r"\$")


def handles(entries: Iterable[Entry]) -> list[Line2D]:
    """What a legend of matplotlib is made of."""
    return [
        Line2D(
            [],
            [],
            color=entry.look.colour,
            linestyle=entry.dash if entry.line else "none",
            marker=entry.look.marker if entry.marker else "",
            markersize=4.5,
            label=written(f" {entry.text}" if entry.text.startswith("_") else entry.text),  # "_x" would be hidden
        )
        for entry in entries
    ]


def save(picture: Picture, folder: Path, note: str = "") -> list[Path]:
    """Write NAME.png and NAME.svg, on white, with the legend below and the title above; the same bytes every time.

    Args:
        picture: its figure is changed (title and legend are added), so a page has to be made from it before.
        folder: must exist.
        note: second line of the title, e.g. that the runs were trained from scratch.

    Returns:
        Both paths.

    Raises:
        OSError: if they cannot be written there.
    """
    figure = picture.figure
    figure.patch.set_alpha(1.0)
    heading = f"{picture.what}: {picture.title}" if picture.title else picture.what
    heading += f"\n{note}" if note else ""
    figure.suptitle(written(heading), x=0.01, y=1.0, ha="left", va="bottom", fontsize=9.5, color=INK)
    if picture.legend:
        figure.legend(
            handles=handles(picture.legend),
            loc="upper left",
            bbox_to_anchor=(0.01, 0.0),
            ncols=min(4, len(picture.legend), max(1, 110 // (8 + max(len(entry.text) for entry in picture.legend)))),
            fontsize=8,
            handlelength=4.5,  # the marker stands in the middle, and the dashes have to be seen beside it
            frameon=False,
            labelcolor=INK,
        )
    figure.canvas.draw()
    # what sticks out (title, legend, note) is in the picture; measured once for both files
    common: dict[str, Any] = {"facecolor": "white", "bbox_inches": figure.get_tightbbox().padded(0.08)}
    paths = [folder / f"{picture.name}.png", folder / f"{picture.name}.svg"]
    figure.savefig(paths[0], dpi=200, metadata={"Software": None}, **common)
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": picture.name}):
        figure.savefig(paths[1], metadata=_NO_METADATA, **common)
    return paths


def save_all(pictures: Iterable[tuple[Picture, str]], folder: Path, flag: str = "--figures") -> list[Path]:
    """`save` pictures with their notes into `folder`, which is made if it is not there; the paths in order.

    Raises:
        UsageError: if they cannot be written there; it names the `flag` that chooses another folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [path for picture, note in pictures for path in save(picture, folder, note)]
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{folder}: the pictures cannot be written there ({reason}); choose {flag} DIR") from error
