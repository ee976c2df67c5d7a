"""Pictures of single runs and of tuning: who did what when, and learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

from analysis.findings.timelines import Timeline
from analysis.findings.tuning import TuningResult
from analysis.report.figures.arm_names import Cast, draw_line, limits_of
from analysis.report.figures.pictures import (
    INK,
    MUTED,
    PAPER,
    RULE,
    THOUSANDS,
    Picture,
    finish,
    panel,
)
from analysis.report.tables.table import sentence


def timeline(cast: Cast, item: Timeline) -> Picture | None:
    """Figure 7: who did what in a window of one run: computing in the algorithm's colour, waiting left blank."""
    if not item.spans:
        return None
    rows = [*item.workers, *([-1] if any(span.worker == -1 for span in item.spans) else [])]
    figure, axes = panel(height=max(1.5, 0.8 + 0.24 * len(rows)), left=0.86)
    look = cast.look(item.arm)
    fills: dict[str, dict[str, Any]] = {
        "compute": {"facecolor": look.colour},
        "wait": {"facecolor": RULE},
        "pull": {"facecolor": PAPER, "hatch": "\\\\\\\\\\", "edgecolor": MUTED},
        "push": {"facecolor": PAPER, "hatch": "/////", "edgecolor": MUTED},
        "apply": {"facecolor": INK},
    }
    for kind, fill in fills.items():
        for place, worker in enumerate(rows):
            spans = [(s.start, s.seconds) for s in item.spans if s.kind == kind and s.worker == worker]
            if not spans:
                continue
            height = 0.22 if kind == "wait" else 0.7
            axes.broken_barh(spans, (place - height / 2, height), **{"edgecolor": PAPER, "linewidth": 0.3, **fill})
    axes.set_xlim(item.begin, item.begin + item.seconds)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    finish(axes, item.x_label, "", grid="x")
    axes.set_yticks(range(len(rows)), [f"worker {worker}" if worker >= 0 else "server" for worker in rows])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(THOUSANDS)
    busy = sum(_inside(span.start, span.seconds, item) for span in item.spans if span.kind == "compute")
    share = busy / (item.seconds * max(1, len(item.workers)))
    shown = [kind for kind in fills if any(span.kind == kind for span in item.spans)]
    words = {
        "compute": "Thick: computing",
        "wait": "thin and grey: waiting",
        "pull": "hatched \\: fetching parameters",
        "push": "hatched /: sending",
        "apply": "black: the server applies",
    }
    return Picture(
        cast.name("timeline", item.arm, item.clock),
        "Who did what when",
        cast.label(item.arm),
        figure,
        f"Timeline of {item.run}: workers compute {share:.0%} of {item.seconds:g} seconds.",
        f"Run {item.run}, {item.seconds:.3g} {item.x_label} from its middle: workers compute {share:.0%} of the time. "
        + sentence(", ".join(words[kind] for kind in shown)),
    )


def learning_rates(cast: Cast, items: Sequence[TuningResult], group: str) -> Picture | None:
    """Figure 9: the loss of the tuning runs over the learning rate, the chosen one ringed."""
    entries = cast.entries([item.arm for item in items])
    figure, axes = panel()
    losses = [
        loss
        for item in items
        for trial in item.trials
        if trial.learning_rate
        for loss in trial.losses
        if loss is not None
    ]
    if not losses:
        return None
    said = []
    failed: list[tuple[float, Any]] = []
    rates = sorted({trial.learning_rate for item in items for trial in item.trials if trial.learning_rate})
    for item in items:
        entry = entries[item.arm]
        colour = entry.look.colour
        trials = [trial for trial in item.trials if trial.learning_rate]
        for trial in trials:
            rate = trial.learning_rate or 0.0
            good = [loss for loss in trial.losses if loss is not None]
            axes.plot([rate] * len(good), good, ".", color=colour, markersize=3.5, alpha=0.55, zorder=2)
            failed += [(rate, colour)] * (len(good) < len(trial.losses))
        line = [(trial.learning_rate or 0.0, trial.score) for trial in trials if trial.score is not None]
        if line:
            draw_line(axes, line, entry)
        for trial in trials:
            if trial.chosen and trial.score is not None and trial.learning_rate is not None:
                axes.plot(
                    trial.learning_rate,
                    trial.score,
                    "o",
                    markersize=11,
                    color=colour,
                    markerfacecolor="none",
                    markeredgewidth=1.3,
                    zorder=4,
                )
                said.append(f"{entry.text}: {trial.learning_rate:g}" + " (edge of its grid)" * item.at_edge)
    scores = [trial.score for item in items for trial in item.trials if trial.score is not None]
    axes.set_ylim(*limits_of([*scores, *_inner(losses)]))
    at = blended_transform_factory(axes.transData, axes.transAxes)
    for rate, colour in failed:
        axes.plot(rate, 1.0, "x", color=colour, markersize=5, transform=at, clip_on=False, zorder=4)
    axes.set_xscale("log")
    loss_label = cast.groups[group].loss_label if group in cast.groups else "evaluation loss"
    finish(axes, "learning rate (log scale)", loss_label.removeprefix("evaluation "))
    axes.xaxis.set_major_locator(FixedLocator(_thinned(rates)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(FixedLocator(rates))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(rates) > 1:
        axes.set_xlim(rates[0] / (rates[-1] / rates[0]) ** 0.06, rates[-1] * (rates[-1] / rates[0]) ** 0.06)
    caption = f"Dots: one tuning run; line: the score. Ringed: chosen ({'; '.join(said) or 'none yet'})."
    if failed:
        caption += " A cross at the top: diverged or failed."
    return Picture(
        cast.name("learning-rate", group),
        "Loss over the learning rate",
        group,
        figure,
        f"Loss of the tuning runs against the learning rate, {group}; chosen: {'; '.join(said) or 'none yet'}.",
        caption,
        tuple(entries.values()),
    )


def _inside(start: float, seconds: float, item: Timeline) -> float:
    return max(0.0, min(start + seconds, item.begin + item.seconds) - max(start, item.begin))


def _thinned(values: Sequence[float], most: int = 8) -> list[float]:
    return list(values[:: max(1, math.ceil(len(values) / most))])


def _inner(values: Sequence[float]) -> list[float]:
    """Values that are no more than three interquartile ranges out: one bad trial must not flatten all others."""
    low, high = numpy.quantile(values, [0.25, 0.75])
    reach = 3 * (high - low)
    return [value for value in values if low - reach <= value <= high + reach]
