"""The page of a study of comparisons: losses and costs of all arms, and a grid, in tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import seaborn as sns
from pandas import DataFrame

from analysis import gallery, plots, tables
from analysis.comparisons import COSTS, ArmOfComparison, Comparisons, read
from analysis.page import Addition, Section, slug, table
from analysis.stats import MINIMUM_PAIRS

if TYPE_CHECKING:
    from analysis.load import Study

ABOUT_COSTS = (
    "Computing, waiting, communicating: shares of the workers' time; in synchronous runs on processes gradients are "
    "exchanged while they are computed. Applying: share of the training clock. Memory: the sum of the peaks of a run's "
    "processes, shared pages counted in each. MFU: operations of the model over what a matrix product reached on as "
    "many devices. Means over runs."
)
PERPLEXITY = "Perplexity: e to the loss; over seeds e to the mean loss, the geometric mean of the perplexities."
CHOSEN = "The first rows were chosen by the numbers that they show, so they are a little too good."
NO_ORDER = "The rows are in no order, since they are not comparable."
SHOWN = ("model", "arm", "runs", "loss", "perplexity", "difference", "p_holm", "word", "speed")
"""Columns of the table of losses."""
WORDS = {
    "equivalent": "the loss is equivalent within ±{margin:g} {unit}",
    "different but negligible": "the loss differs, by less than ±{margin:g} {unit}",
    "better": "the loss is lower",
    "worse": "the loss is higher",
    "undecided": "the loss is not distinguishable",
}
"""Word of an answer -> what a sentence says of it."""


class TablePart(NamedTuple):
    """A table of the page, with its notes and the pictures above it."""

    key: str
    title: str
    frame: DataFrame
    notes: tuple[str, ...] = ()
    pictures: Iterable[gallery.Picture] = ()
    """They are drawn when somebody goes through them, which can be done once."""


def parts_of(found: Comparisons) -> list[TablePart]:
    """The losses and the costs of each comparison, and the grid."""
    parts = []
    for name, arms in found.arms.groupby("comparison", sort=False):
        parts.append(losses_of(found, str(name), arms))
        costs = tables.without_empty(arms[["model", "arm", "samples_per_second", *COSTS]])
        parts.append(TablePart(f"costs-{name}", f"{name}: rates and memory", costs, (ABOUT_COSTS,)))
    if len(found.grid):
        parts.append(grid_of(found.grid))
    return parts


def losses_of(found: Comparisons, name: str, arms: DataFrame) -> TablePart:
    """Every arm of a comparison against its reference."""
    first = arms.iloc[0]
    words = [shown_word(arm) for arm in arms.itertuples()]
    shown = arms.assign(word=words)[[*SHOWN]]
    notes = [
        f"Losses at the end, after equal samples, paired by seed. Equivalent: within ±{first['margin']:g} "
        f"{first['unit']} by the equivalence test. Both tests are corrected by Holm's method over the arms."
    ]
    if arms["perplexity"].notna().any():
        notes.append(PERPLEXITY)
    else:
        shown = shown.drop(columns="perplexity")
    notes += limits_of_arms(arms)
    shown = shown.rename(columns={"difference": "loss - reference", "speed": "samples/s, times the reference"})
    title = f"{name}: against {first['reference']}"
    return TablePart(f"comparison-{name}", title, shown, tuple(notes), loss_pictures(found, name))


def shown_word(arm: ArmOfComparison) -> str:
    """The word of an arm in the table."""
    if arm.diverged and arm.word != "not comparable":
        return f"{arm.diverged} diverged"
    if arm.arm == arm.reference:
        return "reference"
    return arm.word


def limits_of_arms(arms: DataFrame) -> Iterator[str]:
    """A sentence for each margin, each arm and each arm's seconds that cannot be compared as declared."""
    for arm in arms.itertuples():
        name = f"{arm.model}, {arm.arm}"
        if is_known(arm.about_margin):
            yield f"{name}: {arm.about_margin}."
        if arm.word == "not comparable":
            yield f"{name}: not comparable with {arm.reference}: {arm.why}."
        elif is_known(arm.no_speed):
            missing = arm.difference.n - arm.speed.n
            pairs = f"of {missing} of {arm.difference.n} pairs"
            yield f"{name}: the seconds {pairs} are not compared: {arm.no_speed}."


def is_known(text: Any) -> bool:
    """Whether a cell holds a text: a text that is not known is empty or nan."""
    return isinstance(text, str) and text != ""


def grid_of(grid: DataFrame) -> TablePart:
    """Seconds to a loss. The rows of a model are sorted by the share of runs that reached it, then by the seconds."""
    share_missed = 1 - grid["reached"] / grid["runs"]
    seconds = grid["seconds"].map(lambda interval: interval.estimate)
    rows = grid.assign(share_missed=share_missed, mean_seconds=seconds)
    not_comparable = grid[grid["why"] != ""]
    if not_comparable.empty:
        rows = rows.sort_values(["model", "share_missed", "mean_seconds"], kind="stable")
        notes = [CHOSEN]
    else:
        notes = [NO_ORDER]
    for row in not_comparable.itertuples():
        point = f"learning rate {row.learning_rate:g}, batch {row.batch}, length {row.length}"
        notes.append(f"{row.model}, {point}: {row.why}.")
    shown = rows.drop(columns=["share_missed", "mean_seconds", "unit", "why", "threshold", "runs"])
    shown["loss"] = [loss if loss.n else "diverged" for loss in shown["loss"]]
    shown["learning_rate"] = shown["learning_rate"].map("{:g}".format)
    shown["reached"] = [f"{row.reached} of {row.runs}" for row in rows.itertuples()]
    shown = shown.rename(columns={"seconds": "seconds to the loss", "reached": "reached it", "loss": "final loss"})
    losses = sorted({f"{row.model} {row.threshold:g} {row.unit}" for row in grid.itertuples()})
    lead = (
        f"One process; the loss to reach: {', '.join(losses)}. Means over the seeds that reached it, with t intervals."
    )
    return TablePart("grid", "Seconds to a loss", shown, (lead, *notes), grid_pictures(grid))


def sentences_of(folder: Path) -> list[str]:
    """The sentences on the study in a folder."""
    return sentences(read(folder))


def sentences(found: Comparisons) -> list[str]:
    """A sentence for each arm, then what limits them; before these, whether there are too few seeds."""
    lines = [*verdicts(found), *limits_of_arms(found.arms)]
    few = too_few_seeds(found)
    if few:
        return [few, *lines]
    return lines


def too_few_seeds(found: Comparisons) -> str:
    """Says that so few seeds bear no verdict; empty where there are enough."""
    number = found.num_seeds
    if number >= MINIMUM_PAIRS:
        return ""
    bear = "1 seed bears" if number == 1 else f"{number} seeds bear"
    return f"{bear} no verdict; this is what was measured."


def verdicts(found: Comparisons) -> list[str]:
    """What each arm shows against its reference, in a sentence."""
    lines = []
    for arm in found.arms.itertuples():
        name = f"{arm.model}, {arm.arm}"
        if arm.diverged:
            lines.append(f"{name}: {arm.diverged} of {arm.runs} runs diverged, so its loss is not judged.")
        if not arm.word or arm.word == "not comparable":
            continue
        loss = WORDS.get(arm.word, "no verdict on the loss").format(margin=arm.margin, unit=arm.unit)
        lines.append(f"{name}: {speed_of(arm)}; {loss} ({arm.difference.estimate:+.3f} {arm.unit}).")
    return lines or ["No verdict: no arm is compared with another one."]


def speed_of(arm: ArmOfComparison) -> str:
    """The samples a second of an arm as a multiple of its reference's, in words."""
    speed = arm.speed
    if not speed.n:
        return "no speed is compared"
    text = f"{speed.estimate:.2f} times the samples a second of {arm.reference}"
    if speed.n > 2 and not math.isnan(speed.low):  # the interval of two seeds would be wide and say nothing
        text += f" (95 % CI {speed.low:.2f} to {speed.high:.2f})"
    return text


def styles_of(found: Comparisons) -> Mapping[str, Any]:
    """The style of every arm."""
    names = list(dict.fromkeys(found.arms["arm"]))
    return plots.arm_styles(DataFrame({"algorithm": names, "group": ""}, index=names))


def loss_pictures(found: Comparisons, comparison: str) -> Iterator[gallery.Picture]:
    """Loss against seconds, a picture for each model."""
    arms = found.arms[found.arms["comparison"] == comparison]
    of_comparison = found.runs["comparison"] == comparison
    runs = found.runs[of_comparison & found.runs["arm"].isin(arms["arm"])]
    styles = styles_of(found)
    for model in arms["model"].unique():
        of_model = runs[runs["model"] == model]
        yield gallery.draw_picture(
            f"{slug(comparison)}-{slug(model)}",
            f"Loss against seconds: {model}",
            f"{model}: a line for every seed.",
            plots.loss,
            of_model,
            found.curves,
            styles,
            {},
        )


def grid_pictures(grid: DataFrame) -> Iterator[gallery.Picture]:
    """Seconds to the loss against the learning rate, a picture for each model."""
    for model, points in grid[grid["reached"] > 0].groupby("model", sort=False):
        loss = f"{points['threshold'].iloc[0]} {points['unit'].iloc[0]}"
        caption = f"{model}: mean over the seeds that reached {loss}; no point: none did."
        name = f"grid-{slug(str(model))}"
        yield gallery.draw_picture(name, f"Grid: {model}", caption, _draw_grid, points)


def _draw_grid(axes: Any, points: DataFrame) -> str:
    seconds = points["seconds"].map(lambda interval: interval.estimate)
    shown = points.assign(seconds=seconds, batch=points["batch"].astype(str))
    style = {"hue": "batch", "style": "length", "palette": "colorblind"}
    sns.lineplot(shown, x="learning_rate", y="seconds", markers=True, ax=axes, **style)
    plots.logarithmic(axes)
    axes.set(xlabel="learning rate", ylabel="seconds to the loss")
    axes.set_ylim(bottom=0)
    return "; ".join(f"{row.learning_rate:g}: {row.seconds:.3g} s" for row in shown.itertuples())


def addition(study: Study) -> Addition:
    """The part of a page on the comparisons of a study."""
    found = read(study.folder)
    return addition_of(found, parts_of(found))


def addition_of(found: Comparisons, parts: list[TablePart]) -> Addition:
    """The first part stands on top of the page, with a sentence for each arm; the others are folded."""
    lines = verdicts(found)
    headline = (" ".join(lines[:2]), tuple(lines[2:]))
    warnings: tuple[str, ...] = ()
    few = too_few_seeds(found)
    if few:
        headline = (few, tuple(lines))
        are = "1 seed is" if found.num_seeds == 1 else f"{found.num_seeds} seeds are"
        warnings = (f"{are} too few for a verdict on a loss; {MINIMUM_PAIRS} can bear one.",)
    first, *others = parts
    sections = []
    for part in others:
        shown = table(part.frame, notes=part.notes)
        sections.append(Section(slug(part.key), part.title, tuple(part.pictures), (shown,)))
    if found.left_out:
        sections.append(Section("left-out", "Runs that are left out", lead=tuple(found.left_out)))
    return Addition(
        sections=tuple(sections),
        headlines=(headline,),
        warnings=warnings,
        top_pictures=tuple(first.pictures),
        tests=table(first.frame, first.title, first.notes),
    )
