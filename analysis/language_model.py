"""``python -m analysis language_model RUNS_DIR``: the report of ``experiments/language_model.py``.

One page: several workers against one, number formats, and a grid of learning rate, batch size and sequence length. It
is laid out as the report of a study is."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis.commands import carried_out
from analysis.findings.language_model import Arm, Findings, Point, read
from analysis.report.tables.costs import ABOUT_COSTS, cost_cells
from analysis.report.tables.number_formats import between, nats, number, p_value, ratio
from analysis.report.tables.table import Cell, Headed, Table, badge, markdown, tabled, value, words
from analysis.stats import MINIMUM_PAIRS
from analysis.study.curves import curve_of
from asyncsgd.errors import UsageError


def arms_table(name: str, arms: Sequence[Arm]) -> Table:
    """A row for each arm of a comparison, model by model."""

    def row(arm: Arm) -> list[Headed]:
        return [
            words("model", arm.model),
            words("arm", arm.name),
            value("loss", between(arm.loss, nats)),
            *([value("perplexity", between(arm.perplexity, number))] * with_perplexity),
            value("loss - reference", "-" if arm.difference is None else between(arm.difference, nats)),
            value("p_Holm", p_value(arm.p_holm)),
            words("loss, in a word", _word(arm)),
            value("samples/s, times the reference", "-" if arm.speed is None else between(arm.speed, ratio)),
        ]

    margin = arms[0].margin
    with_perplexity = any(arm.perplexity is not None for arm in arms)
    note = "Perplexity: e to the loss; over seeds e to the mean loss, the geometric mean of the perplexities."
    return tabled(
        f"comparison-{name}",
        f"{name}: against {arms[0].reference}",
        [row(arm) for arm in arms],
        arms,
        lead=f"Losses at the end, after equal samples, paired by seed. Equivalent: within ±{margin:g} nats by the "
        "equivalence test. Both tests are corrected by Holm's method over the arms.",
        notes=(note,) * with_perplexity,
    )


def _word(arm: Arm) -> Cell:
    if arm.diverged:
        return Cell(f"{arm.diverged} diverged")
    if arm.name == arm.reference:
        return Cell("reference")
    return Cell("-") if arm.verdict is None else badge(arm.verdict.word)


def costs_table(name: str, arms: Sequence[Arm]) -> Table:
    """What the arms of a comparison cost."""
    rows = [
        [
            words("model", arm.model),
            words("arm", arm.name),
            value("samples/s", between(arm.samples_per_second, number)),
            *cost_cells(arm.cost),
        ]
        for arm in arms
    ]
    return tabled(f"costs-{name}", f"{name}: rates and memory", rows, arms, notes=(ABOUT_COSTS,))


def grid_table(points: Sequence[Point]) -> Table:
    """Seconds to the threshold; within a model those first that most seeds reached it with, and the fastest of them."""

    def order(point: Point) -> tuple[Any, ...]:
        return point.model, -point.reached / point.n, point.seconds.estimate if point.seconds else 0.0

    def row(point: Point) -> list[Headed]:
        return [
            words("model", point.model),
            value("learning rate", f"{point.learning_rate:g}"),
            value("batch", str(point.batch_size)),
            value("length", str(point.seq_len)),
            value("seconds to the loss", between(point.seconds, number)),
            value("reached it", f"{point.reached} of {point.n}"),
            value("final loss", between(point.loss, nats) if point.loss else "diverged"),
            value("samples/s", between(point.samples_per_second, number)),
        ]

    thresholds = ", ".join(f"{model} {loss:g}" for model, loss in sorted({(p.model, p.threshold) for p in points}))
    return tabled(
        "grid",
        "Seconds to a loss",
        [row(point) for point in sorted(points, key=order)],
        points,
        lead=f"One process; the loss to reach, in nats: {thresholds}. Means over the seeds that reached it, with t "
        f"intervals.",
        notes=("The first rows were chosen by the numbers that they show, so they are a little too good.",),
    )


def tables_of(found: Findings) -> list[Table]:
    tables = []
    for name, given in itertools.groupby(found.arms, lambda arm: arm.comparison):
        arms = list(given)
        tables += [arms_table(name, arms), costs_table(name, arms)]
    return tables + ([grid_table(found.grid)] if found.grid else [])


def sentences(found: Findings) -> list[str]:
    """What every comparison shows, an arm in a sentence."""
    told = []
    for arm in found.arms:
        if arm.diverged:
            seeds = arm.diverged + arm.loss.n
            told.append(f"{arm.model}, {arm.name}: {arm.diverged} of {seeds} runs diverged, so its loss is not judged.")
        if arm.difference is None or arm.speed is None:
            continue
        speed = f"{arm.speed.estimate:.2f} times the samples a second of {arm.reference}"
        if arm.speed.low is not None and arm.speed.n > 2:  # of two seeds it would say nothing, at length
            speed += f" (95 % CI {arm.speed.low:.2f} to {arm.speed.high:.2f})"
        word = arm.verdict.word if arm.verdict is not None else "undecided"
        shown = {
            "equivalent": f"the loss is equivalent within ±{arm.margin:g} nats",
            "different but negligible": f"the loss differs, by less than ±{arm.margin:g} nats",
            "better": "the loss is lower",
            "worse": "the loss is higher",
            "undecided": "the loss is not distinguishable",
        }.get(word, "no verdict on the loss")
        told.append(f"{arm.model}, {arm.name}: {speed}; {shown} ({arm.difference.estimate:+.3f} nats).")
    return told


def page(
    found: Findings, command: str, more: Callable[[Any], Sequence[Any]] = lambda cast: (), by: str = "language_model"
) -> Any:
    """The page of a study's report with these findings in it.

    Args:
        command: that makes the page again.
        more: further sections, from the looks of the arms.
        by: the command's module.
    """
    from analysis import page as pages
    from analysis.report.figures.pictures import looks
    from analysis.report.parts import drawings, laid_out, shown

    names = sorted({arm.name for arm in found.arms} | {f"batch {point.batch_size}" for point in found.grid})
    cast = looks(names)
    drawn = pictures(found, cast)
    made = {table.key: table for table in tables_of(found)}
    told, few = sentences(found), found.num_seeds < MINIMUM_PAIRS
    seeds, are, bear = (
        ("1 seed", "is", "bears") if found.num_seeds == 1 else (f"{found.num_seeds} seeds", "are", "bear")
    )
    warning = f"{seeds} {are} too few for a verdict on a loss; {MINIMUM_PAIRS} can bear one."
    headline = f"{seeds} {bear} no verdict; this is what was measured." if few else " ".join(told[:2])
    comparisons = list(dict.fromkeys(arm.comparison for arm in found.arms))
    first = comparisons[0] if comparisons else "grid"

    def of(name: str) -> tuple[Any, ...]:
        return drawings(picture for part, picture in drawn if part == name)

    sections = []
    for name in comparisons:
        own = [made[f"costs-{name}"]] if name == first else [made[f"comparison-{name}"], made[f"costs-{name}"]]
        pictured = () if name == first else of(name)
        sections.append(pages.Section(name, name.capitalize(), pictured, tuple(map(shown, own))))
    sections += more(cast)
    if found.grid:
        title = "Learning rate, batch size, length"
        sections.append(pages.Section("grid", title, of("grid"), (shown(made["grid"]),)))
    if found.left_out:
        sections.append(pages.Section("left-out", "Runs in no number", lead=found.left_out))
    return laid_out(
        found.name,
        command,
        seeds,
        ((headline, tuple(told if few else told[2:])),),
        (warning,) * few,
        of(first),
        next(iter(made.values())),
        tuple(sections),
        f"Made by python -m analysis.{by}. One file, no scripts, nothing is loaded.",
    )


def pictures(found: Findings, cast: Any) -> list[tuple[str, Any]]:
    """Loss against seconds of every comparison and model, and seconds to the loss on the grid."""
    from analysis.report.figures.pictures import Entry, Picture, finish, panel, slug

    drawn = []
    for (name, model), arms in found.curves.items():
        figure, axes = panel()
        entries = [Entry(arm, cast[arm], marker=False) for arm in arms]
        for entry, runs in zip(entries, arms.values(), strict=True):
            for run in runs:
                axes.plot(*curve_of(run, "train_seconds"), color=entry.look.colour, linewidth=1.2, alpha=0.8)
        finish(axes, "seconds", "evaluation loss (nats)")
        caption = f"{model}: a line for every seed."
        description = f"Evaluation loss against seconds of {model}; arms: {', '.join(arms)}."
        picture = Picture(
            f"{slug(name)}-{slug(model)}", "Loss against seconds", model, figure, description, caption, tuple(entries)
        )
        drawn.append((name, picture))
    for model, at in itertools.groupby(found.grid, lambda point: point.model):
        points = list(at)
        figure, axes = panel()
        entries = []
        for batch in sorted({point.batch_size for point in points}):
            look = cast[f"batch {batch}"]
            for number_of_length, length in enumerate(sorted({point.seq_len for point in points})):
                dash = ("solid", (0, (5, 1.6)), (0, (1.2, 1.2)))[number_of_length % 3]
                line = [
                    (point.learning_rate, point.seconds.estimate)
                    for point in points
                    if (point.batch_size, point.seq_len) == (batch, length) and point.seconds is not None
                ]
                entry = Entry(f"batch {batch}, length {length}", look, dash)
                entries.append(entry)
                if line:
                    axes.plot(*zip(*sorted(line), strict=True), color=look.colour, linestyle=dash, marker=look.marker)
        axes.set_xscale("log")
        rates = sorted({point.learning_rate for point in points})
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        finish(axes, "learning rate", "seconds to the loss")
        caption = f"{model}: mean over the seeds that reached {points[0].threshold:g} nats; no point: none did."
        description = f"Seconds to a loss of {points[0].threshold:g} nats of {model} against the learning rate."
        drawn.append(
            ("grid", Picture(f"grid-{slug(model)}", "Grid", model, figure, description, caption, tuple(entries)))
        )
    return drawn


def printed(found: Findings, tables: Sequence[Table]) -> str:
    """What is printed without ``--out``: the tables, and each run that is in none of them."""
    left_out = ["in no number:", *(f"  {line}" for line in found.left_out)] if found.left_out else []
    return "\n".join([markdown(tables), *left_out])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis language_model", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, metavar="RUNS_DIR", help="folder of experiments/language_model.py")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there; without it tables are printed")
    flags = parser.parse_args(arguments)

    def command() -> None:
        found = read(flags.runs)
        print("\n".join(sentences(found)))
        if flags.out is None:
            print(printed(found, tables_of(found)))
            return
        from analysis.page import render

        again = f"python -m analysis language_model {shlex.quote(str(flags.runs))} --out {shlex.quote(str(flags.out))}"
        try:
            flags.out.write_text(render(page(found, again)), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {flags.out} cannot be written ({error.strerror}); name another file") from error
        print(f"page   {flags.out}")

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
