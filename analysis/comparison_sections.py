"""What the page of a study of comparisons shows: losses and costs of all arms, and a grid, in tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import seaborn as sns
from pandas import DataFrame

from analysis import gallery, plots, tables
from analysis.comparisons import COSTS, Comparisons, read
from analysis.page import Addition, Drawing, Section, drawing, slug, table
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
"""Columns of the losses."""
WORDS = {
    "equivalent": "the loss is equivalent within ±{margin:g} {unit}",
    "different but negligible": "the loss differs, by less than ±{margin:g} {unit}",
    "better": "the loss is lower",
    "worse": "the loss is higher",
    "undecided": "the loss is not distinguishable",
}
"""What a word of the judge is in a sentence."""


class TablePart(NamedTuple):
    """A table of the page with what stands around it."""

    key: str
    title: str
    frame: DataFrame
    notes: tuple[str, ...] = ()
    pictures: tuple[Drawing, ...] = ()


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
    notes += about(arms)
    shown = shown.rename(columns={"difference": "loss - reference", "speed": "samples/s, times the reference"})
    title = f"{name}: against {first['reference']}"
    return TablePart(f"comparison-{name}", title, shown, tuple(notes), tuple(loss_pictures(found, name)))


def shown_word(arm: Any) -> str:
    """The word of an arm in the table."""
    if arm.diverged and arm.word != "not comparable":
        return f"{arm.diverged} diverged"
    return "reference" if arm.arm == arm.reference else str(arm.word)


def about(arms: DataFrame) -> Iterator[str]:
    """Why arms, or their seconds, are not compared, and what their margins are, a sentence for each."""
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
    """Whether a cell of a table holds a text; one that is not known is empty, or nan."""
    return isinstance(text, str) and text != ""


def grid_of(grid: DataFrame) -> TablePart:
    """Seconds to a loss: within a model those first that most seeds reached it with, and the fastest of them."""
    missed = -grid["reached"] / grid["runs"]
    seconds = grid["seconds"].map(lambda interval: interval.estimate)
    ordered = grid.assign(missed=missed, fastest=seconds)
    different = grid[grid["why"] != ""]
    if different.empty:
        ordered = ordered.sort_values(["model", "missed", "fastest"], kind="stable")
        notes = [CHOSEN]
    else:
        notes = [NO_ORDER]
    for row in different.itertuples():
        place = f"learning rate {row.learning_rate:g}, batch {row.batch}, length {row.length}"
        notes.append(f"{row.model}, {place}: {row.why}.")
    shown = ordered.drop(columns=["missed", "fastest", "unit", "why", "threshold", "runs"])
    shown["loss"] = [loss if loss.n else "diverged" for loss in shown["loss"]]
    shown["learning_rate"] = shown["learning_rate"].map("{:g}".format)
    shown["reached"] = [f"{row.reached} of {row.runs}" for row in ordered.itertuples()]
    shown = shown.rename(columns={"seconds": "seconds to the loss", "reached": "reached it", "loss": "final loss"})
    losses = sorted({f"{row.model} {row.threshold:g} {row.unit}" for row in grid.itertuples()})
    lead = (
        f"One process; the loss to reach: {', '.join(losses)}. Means over the seeds that reached it, with t intervals."
    )
    return TablePart("grid", "Seconds to a loss", shown, (lead, *notes), tuple(grid_pictures(grid)))


def told(folder: Path) -> list[str]:
    """The sentences of the study in a folder."""
    return sentences(read(folder))


def sentences(found: Comparisons) -> list[str]:
    """What every comparison shows, an arm in a sentence, and what limits that; first whether there are enough seeds."""
    few = too_few_seeds(found)
    told = [*verdicts(found), *about(found.arms)]
    return [few, *told] if few else told


def too_few_seeds(found: Comparisons) -> str:
    """That the seeds bear no verdict; empty where they can."""
    number = found.num_seeds
    if number >= MINIMUM_PAIRS:
        return ""
    bear = "1 seed bears" if number == 1 else f"{number} seeds bear"
    return f"{bear} no verdict; this is what was measured."


def verdicts(found: Comparisons) -> list[str]:
    """What every comparison shows, an arm in a sentence."""
    told = []
    for arm in found.arms.itertuples():
        name = f"{arm.model}, {arm.arm}"
        if arm.diverged:
            told.append(f"{name}: {arm.diverged} of {arm.runs} runs diverged, so its loss is not judged.")
        if not arm.word or arm.word == "not comparable":
            continue
        loss = WORDS.get(arm.word, "no verdict on the loss").format(margin=arm.margin, unit=arm.unit)
        told.append(f"{name}: {speed_of(arm)}; {loss} ({arm.difference.estimate:+.3f} {arm.unit}).")
    return told or ["No verdict: no arm is compared with another one."]


def speed_of(arm: Any) -> str:
    """How fast an arm is beside its reference."""
    speed = arm.speed
    if not speed.n:
        return "no speed is compared"
    text = f"{speed.estimate:.2f} times the samples a second of {arm.reference}"
    if speed.low == speed.low and speed.n > 2:  # of two seeds it would say nothing, at length
        text += f" (95 % CI {speed.low:.2f} to {speed.high:.2f})"
    return text


def styles_of(found: Comparisons) -> Mapping[str, Any]:
    """The style of every arm."""
    names = list(dict.fromkeys(found.arms["arm"]))
    return plots.arm_styles(DataFrame({"algorithm": names, "group": ""}, index=names))


def loss_pictures(found: Comparisons, comparison: str) -> Iterator[Drawing]:
    """Loss against seconds, a picture for each model."""
    arms = found.arms[found.arms["comparison"] == comparison]
    own = found.runs[(found.runs["comparison"] == comparison) & found.runs["arm"].isin(arms["arm"])]
    for model in arms["model"].unique():
        name = f"{slug(comparison)}-{slug(model)}"
        title = f"Loss against seconds: {model}"
        caption = f"{model}: a line for every seed."
        runs = own[own["model"] == model]
        yield drawing(gallery.drawn(name, title, caption, plots.loss, runs, found.curves, styles_of(found), {}))


def grid_pictures(grid: DataFrame) -> Iterator[Drawing]:
    """Seconds to the loss against the learning rate, a picture for each model."""
    for model, points in grid[grid["reached"] > 0].groupby("model", sort=False):
        loss = f"{points['threshold'].iloc[0]} {points['unit'].iloc[0]}"
        caption = f"{model}: mean over the seeds that reached {loss}; no point: none did."
        yield drawing(gallery.drawn(f"grid-{slug(str(model))}", f"Grid: {model}", caption, _draw_grid, points))


def _draw_grid(axes: Any, points: DataFrame) -> str:
    seconds = points["seconds"].map(lambda interval: interval.estimate)
    shown = points.assign(seconds=seconds, batch=points["batch"].astype(str))
    look = {"hue": "batch", "style": "length", "palette": "colorblind"}
    sns.lineplot(shown, x="learning_rate", y="seconds", markers=True, ax=axes, **look)
    plots.logarithmic(axes)
    axes.set(xlabel="learning rate", ylabel="seconds to the loss")
    axes.set_ylim(bottom=0)
    return "; ".join(f"{row.learning_rate:g}: {row.seconds:.3g} s" for row in shown.itertuples())


def addition(study: Study) -> Addition:
    """What a study of comparisons has on its page."""
    found = read(study.folder)
    return addition_of(found, parts_of(found))


def addition_of(found: Comparisons, parts: list[TablePart]) -> Addition:
    """The first part stands on top, with a sentence for each arm; the others are folded."""
    told = verdicts(found)
    few = too_few_seeds(found)
    warnings: tuple[str, ...] = ()
    headline = (" ".join(told[:2]), tuple(told[2:]))
    if few:
        number = found.num_seeds
        are = "1 seed is" if number == 1 else f"{number} seeds are"
        headline = (few, tuple(told))
        warnings = (f"{are} too few for a verdict on a loss; {MINIMUM_PAIRS} can bear one.",)
    first, *others = parts
    sections = [
        Section(slug(part.key), part.title, part.pictures, (table(part.frame, notes=part.notes),)) for part in others
    ]
    if found.left_out:
        sections.append(Section("left-out", "Runs in no number", lead=tuple(found.left_out)))
    return Addition(
        sections=tuple(sections),
        headlines=(headline,),
        warnings=warnings,
        first=first.pictures,
        tests=table(first.frame, first.title, first.notes),
    )
