"""``python -m analysis parallelism RUNS_DIR``: the report of ``experiments/parallelism.py``.

One page: losses and rates of all ways against one process, what pipelines wait for and what is sent, scores, the
machine's use over time, and bubbles beside their formula. It is laid out as the report of a study is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.commands import carried_out
from analysis.findings.language_model import Findings, read
from analysis.findings.parallelism import Bubble, Way, read_bubbles, samples_wanted, utilisation, ways
from analysis.language_model import page, printed, sentences, tables_of
from analysis.report.tables.number_formats import between, nats, number, percent, ratio
from analysis.report.tables.table import Table, tabled, value, words
from asyncsgd.errors import UsageError

POINTS = 0.03
"""Of F1 above a model that never answers, from which on something was learned."""
MOST_TIMES = 1000
"""The samples of a run; what lies beyond is no statement about training."""
BEST_F1 = (
    "Best f1: at the threshold for no answer that suits these questions best, as SQuAD's scorer reports it. It is "
    "never below a model that never answers, and a little too good, since it was chosen on the questions it scores."
)
OVERSUBSCRIBED = "more busy threads than cores: its seconds are no speed"


def ways_of(found: Findings) -> list[Way]:
    """Every way of every model."""
    return [
        way
        for (comparison, model), arms in found.curves.items()
        for way in ways(arms, found.references[comparison], model)
    ]


def ways_table(found: Sequence[Way]) -> Table:
    def row(way: Way) -> list[Any]:
        marked = f"{way.name} *" if way.oversubscribed else way.name
        return [
            words("model", way.model),
            words("way", marked),
            value("processes", str(way.processes)),
            value("seconds", between(way.seconds, number)),
            value("bubble", percent(way.bubble)),
            value("(p-1)/(m+p-1)", percent(way.formula)),
            value("exchanging", percent(way.exchange)),
            value("kB sent a sample", number(None if way.bytes_per_sample is None else way.bytes_per_sample / 1e3)),
            value("samples to the loss of one process", ratio(way.samples_to_target)),
            value("came there", str(way.reached)),
        ]

    notes = (
        "Bubble: 1 - (mean seconds that a stage computed) / (seconds of the first stage). Beside the formula's wait it "
        "has transfers, unequal stages, and other processes on the same cores. Exchanging: share of the training "
        "clock; DistributedDataParallel exchanges within the backward pass, which nobody times. Bytes of pipelines are "
        "counted, the others follow from the number of parameters.",
        *([f"*: {OVERSUBSCRIBED}."] * any(way.oversubscribed for way in found)),
    )
    return tabled("ways", "What stages wait for and what is sent", [row(way) for way in found], found, notes=notes)


def scores_table(found: Sequence[Way]) -> Table | None:
    """None where the task has no metrics."""
    names = list(dict.fromkeys(name for way in found for name in way.metrics))
    if not names:
        return None
    with_answers = any(way.answerable is not None for way in found)
    with_threshold = any(way.best_f1 is not None for way in found)
    rows = [
        [
            words("model", way.model),
            words("way", way.name),
            *(value(name, between(way.metrics.get(name), number)) for name in names),
            *([value("HasAns f1", between(way.answerable, number))] * with_answers),
            *([value("best f1", between(way.best_f1, number))] * with_threshold),
            value("loss", between(way.loss, nats)),
            value("seconds", between(way.seconds, number)),
        ]
        for way in found
    ]
    notes = (*about_silence(found), *(BEST_F1,) * with_threshold)
    return tabled("scores", "Scores after equal samples", rows, found, notes=notes)


def about_silence(found: Sequence[Way]) -> tuple[str, ...]:
    """What a model that never answers would score, and which models are above it; empty for other tasks."""
    said = []
    for model in dict.fromkeys(way.model for way in found):
        mine = [way for way in found if way.model == model and way.silent is not None and "f1" in way.metrics]
        if not mine:
            continue
        above = [way.name for way in mine if way.metrics["f1"].estimate >= (way.silent or 0.0) + POINTS]
        told = f"{model}: a model that never answers has F1 {mine[0].silent:.3f}; "
        if above:
            said.append(f"{told}{100 * POINTS:.0f} points or more above it: {', '.join(above)}.")
        else:
            said.append(
                f"{told}no way is {100 * POINTS:.0f} points above it. After {mine[0].samples:,} samples none has "
                f"learned where answers begin. {' '.join(map(_missing, mine))}"
            )
    return tuple(said)


def _missing(way: Way) -> str:
    """How much training a way would need to be above a model that never answers, drawn on from its curve."""
    wanted = samples_wanted(way.curve, (way.silent or 0.0) + POINTS)
    if wanted is None:
        return f"{way.name}: its F1 does not rise over its last evaluations, so they do not say how much is missing."
    if wanted > MOST_TIMES * way.samples:
        return f"{way.name}: more than {MOST_TIMES} times as many samples, its F1 hardly rises."
    return (
        f"{way.name}: about {wanted:,.0f} samples, {wanted / way.samples:.1f} times as many, if F1 rises on as it does."
    )


def bubbles_table(found: Sequence[Bubble]) -> Table:
    rows = [
        [
            value("stages", str(bubble.stages)),
            words("schedule", bubble.schedule),
            words("stage", "sleeps" if bubble.sleeps else "computes"),
            value("micro-batches", str(bubble.micro_batches)),
            value("measured", f"{bubble.measured:.3f}"),
            value("(p-1)/(m+p-1)", f"{bubble.formula:.3f}"),
        ]
        for bubble in sorted(found, key=lambda b: (b.stages, b.schedule, b.sleeps, b.micro_batches))
    ]
    lead = "Equal stages. Those that sleep take a declared time and no core, so four of them need no four cores."
    return tabled("bubbles", "Bubbles beside the formula", rows, found, lead=lead)


def more_sections(found: Findings, found_ways: Sequence[Way], bubbles: Sequence[Bubble], cast: Any) -> list[Any]:
    """The sections of the page that other comparisons do not have."""
    from analysis import page as pages
    from analysis.report.parts import drawings, shown

    scores = scores_table(found_ways)
    drawn = drawings([*throughput_bars(found), *f1_pictures(found_ways, cast)])
    tables = [ways_table(found_ways), *((scores,) if scores is not None else ())]
    sections = [pages.Section("ways", "What stages wait for and what is sent", drawn, tuple(map(shown, tables)))]
    if drawn := drawings(usage_pictures(found, cast)):
        lead = ("Busy cores (line) and GiB of resident memory (dashes) of all processes of the first seed's run.",)
        sections.append(pages.Section("usage", "The machine over time", drawn, lead=lead))
    if bubbles:
        drawn = drawings([bubble_picture(bubbles, cast)])
        sections.append(pages.Section("bubbles", "Bubbles", drawn, (shown(bubbles_table(bubbles)),)))
    return sections


def throughput_bars(found: Findings) -> list[Any]:
    """Samples a second of every arm, a picture for each model."""
    from analysis.report.figures.pictures import INK, MUTED, Picture, finish, panel, slug

    drawn = []
    for model in dict.fromkeys(arm.model for arm in found.arms):
        arms = [arm for arm in found.arms if arm.model == model]
        figure, axes = panel(height=0.9 + 0.28 * len(arms), left=1.45)
        places = list(range(len(arms)))[::-1]
        rates = [arm.samples_per_second for arm in arms]
        axes.barh(places, [rate.estimate for rate in rates], color=MUTED, height=0.62)
        for place, rate in zip(places, rates, strict=True):
            if rate.low is not None and rate.high is not None and rate.n > 2:
                axes.plot([rate.low, rate.high], [place, place], color=INK, linewidth=1.4)
        axes.set_yticks(places, [arm.name for arm in arms])
        axes.set_xlim(left=0)
        finish(axes, "samples a second", "", grid="x")
        description = "; ".join(f"{arm.name} {arm.samples_per_second.estimate:.1f}" for arm in arms)
        drawn.append(
            Picture(
                f"throughput-{slug(model)}",
                "Samples a second",
                model,
                figure,
                f"Samples a second of {model}: {description}.",
                "Means over seeds; a line is a 95 % interval, where there are three seeds or more.",
            )
        )
    return drawn


def f1_pictures(found: Sequence[Way], cast: Any) -> list[Any]:
    """F1 against samples beside that of a model that never answers, a picture for each model; none for other tasks."""
    from analysis.report.figures.pictures import INK, MUTED, Picture, finish, panel, slug

    drawn = []
    for model in dict.fromkeys(way.model for way in found if way.curve):
        mine = [way for way in found if way.model == model and way.curve]
        figure, axes = panel()
        for way in mine:
            axes.plot(*zip(*way.curve, strict=True), color=cast[way.name].colour, linewidth=1.2)
            axes.annotate(way.name, way.curve[-1], textcoords="offset points", xytext=(3, 0), fontsize=7, color=INK)
        if mine[0].silent is not None:
            axes.axhline(mine[0].silent, color=MUTED, linewidth=1.1, linestyle=(0, (4, 2)))
        finish(axes, "samples", "F1")
        ends = "; ".join(f"{way.name} {way.curve[-1][1]:.3f}" for way in mine)
        drawn.append(
            Picture(
                f"f1-{slug(model)}",
                "F1 against samples",
                model,
                figure,
                f"F1 of {model} at the end: {ends}.",
                "Means over seeds. Dashes: a model that never answers.",
            )
        )
    return drawn


def usage_pictures(found: Findings, cast: Any) -> list[Any]:
    """Busy cores and memory over the seconds of one run of every arm; none where nothing looked at the machine."""
    from analysis.report.figures.pictures import INK, Picture, finish, panel, slug

    looks = [
        (model, name, rows)
        for (_, model), arms in found.curves.items()
        for name, runs in arms.items()
        if len(rows := utilisation(runs[0])) > 1
    ]
    if not looks:
        return []
    highest = max(max(cores, memory) for *_, rows in looks for _, cores, memory in rows)
    drawn = []
    for model, name, rows in looks:
        seconds, cores, memory = zip(*rows, strict=True)
        figure, axes = panel(width=2.9, height=1.9)
        axes.plot(seconds, cores, color=cast[name].colour, linewidth=1.4)
        axes.plot(seconds, memory, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set_ylim(0, 1.05 * highest)
        finish(axes, "seconds", "cores, GiB")
        drawn.append(
            Picture(
                f"usage-{slug(model)}-{slug(name)}",
                "The machine over time",
                f"{model}, {name}",
                figure,
                f"Busy cores and memory of {model}, {name}: at most {max(cores):.1f} cores and {max(memory):.1f} GiB.",
            )
        )
    return drawn


def bubble_picture(found: Sequence[Bubble], cast: Any) -> Any:
    """Measured points, and the formula as a line."""
    from analysis.report.figures.pictures import INK, MUTED, Picture, finish, panel

    figure, axes = panel()
    for stages, marker in ((2, "o"), (4, "s")):
        mine = [bubble for bubble in found if bubble.stages == stages]
        if not mine:
            continue
        line = sorted({(bubble.micro_batches, bubble.formula) for bubble in mine})
        axes.plot(*zip(*line, strict=True), color=MUTED, linewidth=1.1)
        axes.annotate(f"{stages} stages", line[0], textcoords="offset points", xytext=(6, 4), fontsize=8.5, color=INK)
        for sleeps in (True, False):
            points = [(bubble.micro_batches, bubble.measured) for bubble in mine if bubble.sleeps == sleeps]
            if points:
                face = INK if sleeps else "none"
                axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=5, color=INK, mfc=face)
    axes.set_xscale("log", base=2)
    counts = sorted({bubble.micro_batches for bubble in found})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    finish(axes, "micro-batches", "bubble, share of the time")
    return Picture(
        "bubbles",
        "Bubbles beside the formula",
        "",
        figure,
        "Measured bubble shares against the number of micro-batches, beside (p-1)/(m+p-1).",
        "Line: (p-1)/(m+p-1). Full marks: stages that sleep. Open marks: stages that compute. 1F1B and GPipe.",
    )


def as_json(found: Findings, found_ways: Sequence[Way], bubbles: Sequence[Bubble]) -> str:
    """All numbers of the tables."""
    whole = {
        "name": found.name,
        "num_seeds": found.num_seeds,
        "arms": [dataclasses.asdict(arm) for arm in found.arms],
        "ways": [dataclasses.asdict(way) for way in found_ways],
        "bubbles": [dataclasses.asdict(bubble) for bubble in bubbles],
        "left_out": found.left_out,
    }
    return json.dumps(whole, indent=1, default=lambda values: values.tolist())  # numpy's


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis parallelism", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, metavar="RUNS_DIR", help="folder of experiments/parallelism.py")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there; without it tables are printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    flags = parser.parse_args(arguments)

    def write(path: Path, text: str, flag: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{flag} {path} cannot be written ({error.strerror}); name another file") from error
        print(f"{flag[2:]:6} {path}")

    def command() -> None:
        found, bubbles = read(flags.runs), read_bubbles(flags.runs)
        found_ways = ways_of(found)
        print("\n".join(sentences(found)))
        if flags.json is not None:
            write(flags.json, as_json(found, found_ways, bubbles), "--json")
        if flags.out is None:
            scores = scores_table(found_ways)
            more = [
                ways_table(found_ways),
                *([scores] if scores else []),
                *([bubbles_table(bubbles)] if bubbles else []),
            ]
            print(printed(found, [*tables_of(found), *more]))
            return
        from analysis.page import render

        again = f"python -m analysis parallelism {shlex.quote(str(flags.runs))} --out {shlex.quote(str(flags.out))}"
        made = page(found, again, lambda cast: more_sections(found, found_ways, bubbles, cast), "parallelism")
        write(flags.out, render(made), "--out")

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
