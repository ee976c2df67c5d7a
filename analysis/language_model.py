"""``python -m analysis language_model RUNS_DIR``: the report of ``experiments/language_model.py``.

One page: several workers against one, number formats, and a grid of learning rate, batch size and sequence length. It
is laid out as the report of a study is."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import seaborn as sns
from pandas import DataFrame

from analysis import gallery, plots, tables
from analysis import page as pages
from analysis.commands import begun, write
from analysis.comparisons import COSTS, Comparisons, read
from analysis.page import Drawing, Section, slug
from analysis.stats import MINIMUM_PAIRS

Tables: TypeAlias = dict[str, tuple[str, DataFrame, tuple[str, ...]]]
"""Key -> title, table and notes."""
More: TypeAlias = Callable[[Comparisons], tuple[DataFrame, Tables, dict[str, Iterable[Drawing]]]]
ABOUT_COSTS = (
    "Computing, waiting, communicating: shares of the workers' time; in synchronous runs on processes gradients are "
    "exchanged while they are computed. Applying: share of the training clock. Memory: the sum of the peaks of a run's "
    "processes, shared pages counted in each. MFU: operations of the model over what a matrix product reached on as "
    "many devices. Means over runs."
)
PERPLEXITY = "Perplexity: e to the loss; over seeds e to the mean loss, the geometric mean of the perplexities."
CHOSEN = "The first rows were chosen by the numbers that they show, so they are a little too good."


def tables_of(found: Comparisons) -> Tables:
    """A table of losses and one of costs for each comparison, and the grid."""
    made: Tables = {}
    for name, arms in found.arms.groupby("comparison", sort=False):
        first = arms.iloc[0]
        shown = arms[["model", "arm", "runs", "loss", "perplexity", "difference", "p_holm", "speed"]].copy()
        shown.insert(7, "word", [_word(row) for row in arms.itertuples()])
        if not (known := arms["perplexity"].notna().any()):
            shown = shown.drop(columns="perplexity")
        shown = shown.rename(columns={"difference": "loss - reference", "speed": "samples/s, times the reference"})
        lead = (
            f"Losses at the end, after equal samples, paired by seed. Equivalent: within ±{first['margin']:g} "
            f"{first['unit']} by the equivalence test. Both tests are corrected by Holm's method over the arms."
        )
        notes = (lead, PERPLEXITY, *_about(arms)) if known else (lead, *_about(arms))
        made[f"comparison-{name}"] = f"{name}: against {first['reference']}", shown, notes
        costs = tables.without_empty(arms[["model", "arm", "samples_per_second", *COSTS]])
        made[f"costs-{name}"] = f"{name}: rates and memory", costs, (ABOUT_COSTS,)
    if len(found.grid):
        made["grid"] = "Seconds to a loss", *_grid(found.grid)
    return made


def _about(arms: DataFrame) -> Iterator[str]:
    """Why arms, or their seconds, are not compared, and what their margins are, a sentence for each."""
    for arm in arms.itertuples():
        if arm.about_margin and arm.about_margin == arm.about_margin:
            yield f"{arm.model}, {arm.arm}: {arm.about_margin}."
        if arm.word == "not comparable":
            yield f"{arm.model}, {arm.arm}: not comparable with {arm.reference}: {arm.why}."
        elif arm.no_speed and arm.no_speed == arm.no_speed:
            pairs = f"of {arm.difference.n - arm.speed.n} of {arm.difference.n} pairs"
            yield f"{arm.model}, {arm.arm}: the seconds {pairs} are not compared: {arm.no_speed}."


def _word(arm: Any) -> str:
    if arm.diverged and arm.word != "not comparable":
        return f"{arm.diverged} diverged"
    return "reference" if arm.arm == arm.reference else arm.word


def _grid(grid: DataFrame) -> tuple[DataFrame, tuple[str, ...]]:
    """Within a model those first that most seeds reached it with, and the fastest of them."""
    seconds = grid["seconds"].map(lambda one: one.estimate)
    ordered = grid.assign(missed=-grid["reached"] / grid["runs"], fastest=seconds)
    different = [
        f"{row.model}, learning rate {row.learning_rate:g}, batch {row.batch}, length {row.length}: {row.why}."
        for row in grid.itertuples()
        if row.why
    ]
    if not different:
        ordered = ordered.sort_values(["model", "missed", "fastest"], kind="stable")
    shown = ordered.drop(columns=["missed", "fastest", "unit", "why"])
    shown["loss"] = [one if one.n else "diverged" for one in shown["loss"]]
    shown["learning_rate"] = shown["learning_rate"].map("{:g}".format)
    shown["reached"] = [f"{row.reached} of {row.runs}" for row in shown.itertuples()]
    losses = sorted({(row.model, row.threshold, row.unit) for row in grid.itertuples()})
    lead = f"One process; the loss to reach: {', '.join(f'{model} {loss:g} {unit}' for model, loss, unit in losses)}."
    names = {"seconds": "seconds to the loss", "reached": "reached it", "loss": "final loss"}
    return (
        shown.drop(columns=["threshold", "runs"]).rename(columns=names),
        (
            f"{lead} Means over the seeds that reached it, with t intervals.",
            *(["The rows are in no order, since they are not comparable.", *different] if different else [CHOSEN]),
        ),
    )


def sentences(found: Comparisons) -> list[str]:
    """What every comparison shows, an arm in a sentence."""
    told = []
    for arm in found.arms.itertuples():
        if arm.diverged:
            told.append(
                f"{arm.model}, {arm.arm}: {arm.diverged} of {arm.runs} runs diverged, so its loss is not judged."
            )
        if not arm.word or arm.word == "not comparable":
            continue
        speed = f"{arm.speed.estimate:.2f} times the samples a second of {arm.reference}"
        if arm.speed.low == arm.speed.low and arm.speed.n > 2:  # of two seeds it would say nothing, at length
            speed += f" (95 % CI {arm.speed.low:.2f} to {arm.speed.high:.2f})"
        if not arm.speed.n:
            speed = "no speed is compared"
        shown = {
            "equivalent": f"the loss is equivalent within ±{arm.margin:g} {arm.unit}",
            "different but negligible": f"the loss differs, by less than ±{arm.margin:g} {arm.unit}",
            "better": "the loss is lower",
            "worse": "the loss is higher",
            "undecided": "the loss is not distinguishable",
        }.get(arm.word, "no verdict on the loss")
        told.append(f"{arm.model}, {arm.arm}: {speed}; {shown} ({arm.difference.estimate:+.3f} {arm.unit}).")
    return [*told, *_about(found.arms)]


def cast_of(found: Comparisons) -> Mapping[str, Any]:
    """The looks of the arms."""
    names = list(dict.fromkeys(found.arms["arm"]))
    return plots.looks(DataFrame({"algorithm": names, "group": ""}, index=names))


def losses(found: Comparisons, comparison: str) -> Iterator[Drawing]:
    """Loss against seconds, a picture for each model."""
    arms = found.arms[found.arms["comparison"] == comparison]
    own = found.runs[(found.runs["comparison"] == comparison) & found.runs["arm"].isin(arms["arm"])]
    for model in arms["model"].unique():
        name = f"{slug(comparison)}-{slug(model)}"
        caption = f"{model}: a line for every seed."
        runs = own[own["model"] == model]
        title = f"Loss against seconds: {model}"
        picture = gallery.drawn(name, title, caption, plots.loss, runs, found.curves, cast_of(found), {})
        yield pages.drawing(picture)


def grids(grid: DataFrame) -> Iterator[Drawing]:
    """Seconds to the loss against the learning rate, a picture for each model."""
    for model, points in grid[grid["reached"] > 0].groupby("model", sort=False):
        loss = points["threshold"].iloc[0]
        caption = f"{model}: mean over the seeds that reached {loss:g} {points['unit'].iloc[0]}; no point: none did."
        yield pages.drawing(gallery.drawn(f"grid-{slug(str(model))}", f"Grid: {model}", caption, _draw_grid, points))


def _draw_grid(axes: Any, points: DataFrame) -> str:
    shown = points.assign(seconds=points["seconds"].map(lambda one: one.estimate), batch=points["batch"].astype(str))
    sns.lineplot(
        shown, x="learning_rate", y="seconds", hue="batch", style="length", markers=True,
        palette="colorblind", ax=axes,
    )  # fmt: skip
    plots.logarithmic(axes)
    axes.set(xlabel="learning rate", ylabel="seconds to the loss")
    axes.set_ylim(bottom=0)
    return "; ".join(f"{row.learning_rate:g}: {row.seconds:.3g} s" for row in shown.itertuples())


def page(found: Comparisons, command: str, by: str, made: Tables, pictures: Mapping[str, Iterable[Drawing]]) -> str:
    """The page of a study's report with these findings in it.

    Args:
        command: that makes the page again.
        by: the command's name.
        made: the tables, that of the first comparison first.
        pictures: by the key of the table that they stand beside.
    """
    told = sentences(found)
    few = found.num_seeds < MINIMUM_PAIRS
    number = found.num_seeds
    seeds, are, bear = ("1 seed", "is", "bears") if number == 1 else (f"{number} seeds", "are", "bear")
    headline = f"{seeds} {bear} no verdict; this is what was measured." if few else " ".join(told[:2])
    (first, *rest) = made
    drawn = {key: tuple(own) for key, own in pictures.items()}
    sections = [
        Section(slug(key), made[key][0], drawn.get(key, ()), (pages.table(made[key][1], notes=made[key][2]),))
        for key in rest
    ]
    if found.left_out:
        sections.append(Section("left-out", "Runs in no number", lead=tuple(found.left_out)))
    return pages.measured(
        found.name,
        command,
        seeds,
        [(headline, tuple(told if few else told[2:]))],
        [f"{seeds} {are} too few for a verdict on a loss; {MINIMUM_PAIRS} can bear one."] if few else [],
        drawn.get(first, ()),
        pages.table(made[first][1], made[first][0], made[first][2]),
        sections,
        f"Made by python -m analysis {by}. One file, no scripts, nothing is loaded.",
    )


def pictures_of(found: Comparisons) -> dict[str, Iterable[Drawing]]:
    """By the key of the table that they stand beside."""
    names = found.arms["comparison"].unique()
    return {**{f"comparison-{name}": losses(found, name) for name in names}, "grid": grids(found.grid)}


def printed(made: Tables, left_out: Sequence[str]) -> str:
    """What is printed without ``--out``: the tables, and each run that is in none of them."""
    blocks = ["\n\n".join((tables.markdown(frame, title).rstrip(), *notes)) for title, frame, notes in made.values()]
    lines = ["\n\n".join(blocks)]
    if left_out:
        lines += ["in no number:", *(f"  {line}" for line in left_out)]
    return "\n".join(lines)


def reported(command: str, about: str, arguments: Sequence[str] | None, more: More | None = None) -> int:
    """A report of comparisons as a command: the tables, the page and the numbers.

    Args:
        command, about: its name, and the docstring of its module.
        more: a table that other reports of comparisons do not have, and what is shown of it.
    """
    file = {"type": Path, "metavar": "FILE"}

    def run(runs: Path, out: Path | None, numbers: Path | None) -> None:
        found = read(runs)
        ways, further, drawn = (DataFrame(), {}, {}) if more is None else more(found)
        made = tables_of(found) | further
        print("\n".join(sentences(found)))
        if numbers is not None:
            write(numbers, as_json(found, ways))
            print(f"json   {numbers}")
        if out is None:
            print(printed(made, found.left_out))
            return
        again = f"python -m analysis {command} {shlex.quote(str(runs))} --out {shlex.quote(str(out))}"
        write(out, page(found, again, command, made, pictures_of(found) | drawn))
        print(f"page   {out}")

    return begun(
        run,
        about,
        arguments,
        {
            "runs": {"type": Path, "metavar": "RUNS_DIR", "help": f"folder of experiments/{command}.py"},
            "--out": {**file, "help": "write the page there; without it tables are printed"},
            "--json": {**file, "dest": "numbers", "help": "write all numbers there"},
        },
    )


def as_json(found: Comparisons, ways: DataFrame) -> str:
    """All numbers of the tables; an interval is three of them."""
    if "metrics" in ways:
        ways = pd.concat([ways.drop(columns="metrics"), DataFrame([*ways["metrics"]])], axis=1)
    frames = {"arms": found.arms, "grid": found.grid, "ways": ways}
    told = {name: json.loads(tables.numbers(frame).to_json(orient="records")) for name, frame in frames.items()}
    return json.dumps({"name": found.name, "num_seeds": found.num_seeds, **told, "left_out": found.left_out}, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    return reported("language_model", str(__doc__), arguments)


if __name__ == "__main__":
    sys.exit(main())
