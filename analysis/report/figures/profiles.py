"""Pictures over several tasks, as rliable draws them: performance profiles, and two estimates with their intervals.

References:
    Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS 2021, figures 4 to 7.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.findings.tasks import AcrossTasks
from analysis.report.figures.pictures import (
    DECLARED,
    INK,
    Entry,
    Picture,
    finish,
    looks,
    panel,
    save_all,
    slug,
    written,
)
from analysis.statistics.intervals import Interval


def save_profiles(found: AcrossTasks, folder: Path) -> list[Path]:
    """Save `pictures` as PNG and SVG; the paths written, in order.

    Raises:
        UsageError: if they cannot be written there.
    """
    return save_all([(picture, textwrap.fill(picture.caption, 80)) for picture in pictures(found)], folder)


def pictures(found: AcrossTasks) -> list[Picture]:
    """The performance profile, and interval bars of the interquartile mean and the probability of improvement.

    Where runs are too few for intervals there are no bars, and the profile has no band and says why.
    """
    middles = {row.algorithm: row.middle for row in found.algorithms if isinstance(row.middle, Interval)}
    better = {row.algorithm: row.better for row in found.algorithms if isinstance(row.better, Interval)}
    made = [_profile(found)]
    if middles:
        ends = [end for interval in middles.values() for end in interval.ends]
        limits = limits_of([*ends, 1.0])
        made.append(_bars(found, middles, "Interquartile mean", "score", limits, 1.0, _score(found)))
    if better:
        label = f"P(better than {found.reference})"
        made.append(_bars(found, better, "Probability of improvement", label, (-0.03, 1.03), 0.5, _UNPAIRED))
    return made


_UNPAIRED = (
    "All runs of one are compared with all of the other, unpaired; the interval is a paired bootstrap, of whole seeds."
)


def _profile(found: AcrossTasks) -> Picture:
    """The share of runs with a score above every threshold, one curve an algorithm."""
    figure, axes = panel()
    of = looks(row.algorithm for row in found.algorithms)
    scores = [score for row in found.algorithms for score, _ in row.profile]
    # below 0 is worse than before training, and how far below would only squeeze the rest
    left, right = limits_of([max(0.0, min(scores)), max(*scores, 1.0)])
    for row in found.algorithms:
        look = of[row.algorithm]
        at, above = zip(*row.profile, strict=True)
        x = [min(left, at[0]), *at, max(right, at[-1])]
        estimates = [1.0, *(interval.estimate for interval in above), 0.0]
        axes.step(x, estimates, where="post", color=look.colour, linewidth=1.8, zorder=3)
        if above[0].low is not None:
            low, high = zip((1.0, 1.0), *(interval.ends for interval in above), (0.0, 0.0), strict=True)
            axes.fill_between(x, low, high, step="post", color=look.colour, alpha=0.16, linewidth=0, zorder=1)
    axes.set_xlim(left, right)
    axes.set_ylim(-0.03, 1.03)
    finish(axes, "score \N{GREEK SMALL LETTER TAU}", "runs with a score above \N{GREEK SMALL LETTER TAU}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    band = f"No bands: {found.refused}." if found.refused else "Bands: 95 % at each score alone. " + _RESAMPLED
    below = " Below 0: worse than before training." if min(scores) < 0 else ""
    return Picture(
        "performance-profile",
        "Performance profile",
        _of(found),
        figure,
        f"Step curves of the share of runs that score more, over the score, {_of(found)}.",
        f"{_score(found)}{below} {band}",
        tuple(Entry(row.algorithm, of[row.algorithm], marker=False) for row in found.algorithms),
    )


_RESAMPLED = "Seeds were resampled within each task."


def _bars(
    found: AcrossTasks,
    intervals: Mapping[str, Interval],
    what: str,
    x_label: str,
    limits: tuple[float, float],
    even: float,
    lead: str,
) -> Picture:
    """One horizontal bar an algorithm from low to high, a line at the estimate, and a dashed one at `even`."""
    figure, axes = panel(height=0.7 + 0.34 * len(intervals), left=1.2)
    of = looks(row.algorithm for row in found.algorithms)
    for place, (algorithm, interval) in enumerate(intervals.items()):
        colour = of[algorithm].colour
        low, high = interval.ends
        axes.barh(place, high - low, 0.6, low, color=colour, alpha=0.4, linewidth=0, zorder=2)
        axes.vlines(interval.estimate, place - 0.3, place + 0.3, color=colour, linewidth=2.2, zorder=3)
    axes.axvline(even, **DECLARED)
    axes.set_xlim(limits)
    axes.set_ylim(len(intervals) - 0.4, -0.6)
    finish(axes, x_label, "", grid="x")
    axes.set_yticks(range(len(intervals)), [written(cut(algorithm, 18)) for algorithm in intervals])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    said = "; ".join(f"{algorithm}: {interval:.3f}" for algorithm, interval in intervals.items())
    return Picture(
        slug(what),
        what,
        _of(found),
        figure,
        f"Interval bars, {_of(found)}. {said}.",
        f"{lead} Line: estimate. Bar: its 95 % interval. Dashed: as good as {found.reference}. {_RESAMPLED}".strip(),
    )


def _score(found: AcrossTasks) -> str:
    return f"Score: share of the improvement of {found.reference} at equal samples."


def _of(found: AcrossTasks) -> str:
    return f"{len(found.tasks)} tasks, {found.num_seeds} seeds each, {found.clock} clock"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def limits_of(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    margin = 0.05 * (max(finite) - min(finite)) or 0.05
    return min(finite) - margin, max(finite) + margin
