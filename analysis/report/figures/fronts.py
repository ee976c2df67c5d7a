"""The picture of final loss against seconds."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from analysis.findings.fronts import ParetoPanel
from analysis.report.figures.arm_names import Cast, in_all, limits_of, workers_beside
from analysis.report.figures.pictures import (
    MUTED,
    PAPER,
    THOUSANDS,
    Entry,
    Picture,
    finish,
    panel,
)


def pareto(cast: Cast, item: ParetoPanel) -> Picture | None:
    """Figure 6: final loss against seconds; whoever has nobody below and to the left is on the front."""
    points = [point for point in item.points if not point.num_diverged]
    if not points:
        return None
    figure, axes = panel()
    entries: list[Entry] = []
    tests = [point for point in points if not point.trial]
    trials = [point for point in points if point.trial]
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
    workers_beside(axes, [(point.seconds, point.loss, cast.arms.get(point.arm)) for point in tests])
    sizes = sorted({point.n for point in tests})
    caption = f"Means over seeds, {in_all(sizes)}. Filled: nobody is better in both. Numbers: workers."
    diverged = [point for point in item.points if point.num_diverged and not point.trial]
    if diverged:
        named = ", ".join(f"{cast.label(one.arm)} (diverged {one.num_diverged}/{one.n})" for one in diverged)
        caption += f" Without a point, and on no front: {named}."
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
