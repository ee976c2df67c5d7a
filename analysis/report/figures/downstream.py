"""Pictures of the scores after fine-tuning: F1 and accuracy, HateCheck, confusion matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from analysis.findings.downstream import DownstreamArm
from analysis.report.figures.arm_names import Cast, cut, in_all
from analysis.report.figures.pictures import (
    DECLARED,
    INK,
    Entry,
    Look,
    Picture,
    finish,
    panel,
    written,
)


def downstream_scores(cast: Cast, items: Sequence[DownstreamArm], what: str) -> Picture | None:
    """Figure 10: a score after fine-tuning, one line per arm: seeds as dots, the mean with its t interval."""
    scores = [(item, item.accuracy if what == "accuracy" else item.score) for item in items]
    rows = [(item, score) for item, score in scores if score is not None]
    if not rows:
        return None
    labels = [_wrapped(item.label, 18) for item, _ in rows]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure, axes = panel(height=max(1.4, 0.66 + 0.125 * lines + 0.13 * len(rows)), left=1.85)
    said = []
    for place, (item, score) in enumerate(rows):
        look = _downstream_look(cast, item)
        if what != "accuracy":
            values = [value for _, value in item.per_seed]
            axes.plot(values, [place + 0.22] * len(values), ".", color=look.colour, markersize=3.5, alpha=0.55)
        axes.plot(score.ends, [place, place], color=look.colour, linewidth=1.8, solid_capstyle="butt")
        axes.plot(
            score.estimate, place, marker=look.marker, markersize=6.5, color=look.colour, linestyle="none", zorder=3
        )
        if item.baseline:
            axes.axvline(score.estimate, **DECLARED)
        said.append(f"{item.label}: {score:.3f} (n = {score.n})")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    finish(axes, f"{what} (0 to 1)", "", grid="x")
    axes.set_yticks(range(len(rows)), [written(label) for label in labels])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    low, high = axes.get_xlim()
    axes.set_xticks(
        [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= low + 0.95 * (high - low)]
    )
    sizes = sorted({score.n for _, score in rows})
    caption = f"Mean over pretraining seeds with its 95 % t interval, {in_all(sizes)}."
    if what != "accuracy":
        caption += " Dots: one pretraining seed, the mean of its fine-tuning runs."
    if any(item.baseline for item, _ in rows):
        caption += " Dashed: without intermediate training."
    return Picture(
        cast.name("downstream", what, items[0].data),
        f"{what[0].upper()}{what[1:]} after fine-tuning on {items[0].data}",
        "",
        figure,
        f"{what} after fine-tuning on {items[0].data}. " + "; ".join(said) + ".",
        caption,
    )


def hatecheck(cast: Cast, items: Sequence[DownstreamArm]) -> Picture | None:
    """Accuracy on every functional test of HateCheck, one line per functionality."""
    items = [item for item in items if item.functionalities]
    if not items:
        return None
    names = list(dict.fromkeys(check.functionality for item in items for check in item.functionalities))
    figure, axes = panel(height=0.75 + 0.26 * len(names), left=1.75)
    step = 0.64 / max(1, len(items))
    entries = []
    for number, item in enumerate(items):
        look = _downstream_look(cast, item)
        entries.append(Entry(item.label, look, line=False))
        shift = (number - (len(items) - 1) / 2) * step
        for check in item.functionalities:
            place = names.index(check.functionality) + shift
            interval = check.accuracy
            low, high = interval.ends
            axes.plot([max(0.0, low), min(1.0, high)], [place, place], color=look.colour, linewidth=1.1, alpha=0.75)
            axes.plot(interval.estimate, place, marker=look.marker, markersize=4, color=look.colour, linestyle="none")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(len(names) - 0.4, -0.6)
    finish(axes, "accuracy (0 to 1)", "", grid="x")
    axes.set_yticks(range(len(names)), [written(cut(name, 27)) for name in names])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    sizes = sorted({check.accuracy.n for item in items for check in item.functionalities})
    return Picture(
        cast.name("hatecheck", items[0].data),
        "HateCheck: accuracy per functional test",
        "",
        figure,
        f"Accuracy on {len(names)} functional tests of HateCheck for {', '.join(item.label for item in items)}; "
        "the numbers are in the table.",
        f"Mean over pretraining seeds with its 95 % t interval (cut at 0 and 1), {in_all(sizes)}.",
        tuple(entries),
    )


def confusion(cast: Cast, item: DownstreamArm) -> Picture | None:
    """Confusion matrix of one arm, rows in percent of the true class."""
    if not item.labels or not any(map(sum, item.confusion)):
        return None
    counts = numpy.array(item.confusion, dtype=float)
    share = counts / numpy.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    size = len(item.labels)
    tilted = max(map(len, item.labels)) * size > 36
    figure, axes = panel(width=3.4, height=0.85 + max(1.5, 0.42 * size), left=1.05, bottom=0.72 if tilted else 0.5)
    colour = to_rgba(_downstream_look(cast, item).colour)
    for row in range(size):
        for column in range(size):
            alpha = 0.08 + 0.62 * float(share[row, column])
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour[:3], alpha=alpha, linewidth=0))
            text = f"{share[row, column]:.0%}" + (f"\n{counts[row, column]:,.0f}" if size <= 6 else "")
            axes.text(column, row, text, ha="center", va="center", fontsize=8 if size <= 6 else 6.5, color=INK)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)
    finish(axes, "predicted", "true")
    axes.grid(visible=False)
    names = [written(cut(label, 12)) for label in item.labels]
    axes.set_xticks(range(size), names, rotation=30 if tilted else 0, ha="center")
    axes.set_yticks(range(size), names)
    axes.tick_params(length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    right = float(numpy.trace(counts) / counts.sum())
    return Picture(
        cast.name("confusion", item.arm, item.data),
        "Confusion matrix",
        item.label,
        figure,
        f"Confusion matrix of {item.label}: {right:.0%} of {counts.sum():,.0f} predictions are right; "
        + ", ".join(f"{label} {share[row, row]:.0%}" for row, label in enumerate(item.labels))
        + ".",
        f"{counts.sum():,.0f} predictions of {item.num_finetuning_runs} runs; percent of the true class, and counts.",
    )


def _downstream_look(cast: Cast, item: DownstreamArm) -> Look:
    return cast.looks["baseline"] if item.baseline else cast.look(item.arm)


def first_arms(cast: Cast, items: Sequence[DownstreamArm], groups: Sequence[str], most: int = 6) -> list[DownstreamArm]:
    """The arms that pictures with one part per arm show: the baseline and those of the first group that has any."""
    chosen = [item for item in items if item.baseline]
    for group in groups:
        own = [item for item in items if not item.baseline and item.arm in cast.groups[group].arms]
        if own:
            chosen += own
            break
    return (chosen or list(items))[:most]


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width, max_lines=3, placeholder=" …")) or text
