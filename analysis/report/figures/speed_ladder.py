"""The speed ladder as a picture: each rung's ratio to the rung before, with its interval."""

from __future__ import annotations

from matplotlib.axes import Axes

from analysis.findings.speed_ladder import Ladder, Rung
from analysis.report.figures.pictures import DECLARED, INK, Entry, Look, Picture, finish, panel, slug
from analysis.report.tables.number_formats import ratio

KEPT, LEFT_OUT, FOR_THE_SCORE = "kept", "does not pay", "left out for the score"


def rungs_picture(ladder: Ladder, cast: dict[str, Look]) -> Picture:
    """Medians over the turns with 95 % intervals on a logarithmic axis; a line at 1, where a rung changes nothing.

    Args:
        cast: the looks of `KEPT`, `LEFT_OUT` and `FOR_THE_SCORE`.
    """
    rungs = [rung for rung in ladder.rungs if rung.speed is not None]
    figure, axes = panel(width=6.4, height=0.9 + 0.32 * len(rungs), left=3.3)
    axes.axvline(1.0, **DECLARED)
    for place, rung in enumerate(rungs):
        _draw(axes, place, rung, cast[rung.word])
    axes.set_yticks(range(len(rungs)), [rung.name for rung in rungs])
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.invert_yaxis()
    finish(axes, "times the rung before", "", grid="x")
    axes.tick_params(axis="y", labelcolor=INK)
    entries = tuple(Entry(word, cast[word], line=False) for word in dict.fromkeys(rung.word for rung in rungs))
    description = "; ".join(f"{rung.name} {ratio(rung.speed.median)}" for rung in rungs if rung.speed is not None)
    caption = f"{ladder.task}: medians over the turns, and 95 % intervals of the mean ratio."
    return Picture(f"ladder-{slug(ladder.task)}", "Rungs", ladder.task, figure, description, caption, entries)


def _draw(axes: Axes, place: int, rung: Rung, look: Look) -> None:
    assert rung.speed is not None
    low, high = rung.speed.interval.ends
    axes.plot([low, high], [place, place], color=look.colour, linewidth=1.4)
    axes.plot([rung.speed.median], [place], color=look.colour, marker=look.marker, markersize=5, linestyle="none")
