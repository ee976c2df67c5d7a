"""The page of a speed ladder: the block and the checklists of the guide, filled in with what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import seaborn as sns
from pandas import DataFrame

from analysis import gallery, plots, tables
from analysis import page as pages
from analysis.ladder import MAX_EPOCH, MAX_MEMORY, MIN_BUSY, Ladder, Ladders, Speed, Stack, read
from analysis.questions import TIMES
from analysis.stats import MINIMUM_PAIRS
from analysis.tables import written
from asyncsgd.studies.ladder import NO_MEMORY, NOT_COMPARABLE

if TYPE_CHECKING:
    from analysis.load import Study

SEVERAL_DEVICES = ("All GPUs", "More workers")
"""The lines of the checklist whose rungs train on all devices."""
TIMES_BEFORE = "times the rung before"
FOR_RUNGS = (
    "Each rung in turns with the rungs kept before it, {climb_samples} samples a training; the first one against the "
    "naive loop. Ratios are medians over turns, with their range. The 95 % interval is that of their geometric mean. "
    "Loss: evaluation loss after equal samples."
)
FOR_STACKS = (
    "Each stack and the naive loop on the same {seeds}, {samples} samples. Each row has one rung more than "
    "the one before. Stacks are tested in this order; the final one is the last before the first whose score is not "
    "shown to be equivalent. The margin is ±{margin:g}; the naive loop has {naive:.3f}. Ratios are medians, and the "
    "95 % interval is that of their geometric mean."
)
FOR_BOXES = (
    "Before: the naive loop; after: the final stack. Medians over the seeds; losses and scores are means. Every bound "
    f"was stated before. With fewer than {MINIMUM_PAIRS} seeds nothing is known of losses and scores."
)
FOR_PUBLICATION = "The naive loop and the final stack, on the same seeds; medians over seeds, scores are means."
COUNTED = "(counted operations, not measured)"


def ratio(value: float) -> str:
    """
    >>> ratio(1.4159), ratio(31.41)
    ('1.42×', '31.4×')
    """
    if math.isnan(value):
        return tables.EMPTY_CELL
    digits = 2 if value < 10 else 1
    return f"{value:.{digits}f}{TIMES}"


def percent(share: float) -> str:
    """
    >>> percent(0.00505), percent(0.833), percent(1.234), percent(math.nan)
    ('0.51 %', '83 %', '123 %', '-')
    """
    if math.isnan(share):
        return tables.EMPTY_CELL
    if share < 0.995:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.0f} %"


def seeds(number: int) -> str:
    """
    >>> seeds(1), seeds(6)
    ('1 seed', '6 seeds')
    """
    if number == 1:
        return "1 seed"
    return f"{number} seeds"


def block(ladder: Ladder) -> str:
    """The block of text that the guide asks for."""
    given = ladder.given
    final = ladder.final
    fastest = ladder.stacks[-1]
    lines = [f"TRAINING SPEED COMPARISON: {given['task']}, {given['data']}", "=" * 60]
    for name, side in (("Original", ladder.naive), ("Optimised", final.trainings)):
        seconds = ladder.epoch_seconds(side)
        rate = side["samples_per_second"].median()
        lines.append(f"{name + ':':12}{written(seconds):>9} s/epoch {written(float(rate)):>9} samples/s")
    lines += [f"{'Speed-up:':12}{gain(final.speed)}", f"{'Score:':12}{score(ladder, final)}"]
    if fastest is not final:
        mean = fastest.trainings["score"].mean()
        lines.append(f"{'All rungs:':12}{ratio(fastest.speed.median)}, {given['score']} {mean:.3f}; {fastest.word}")
    return "\n".join(lines)


def gain(speed: Speed) -> str:
    """A median, of how many ratios it is, and their geometric mean with its interval."""
    if not speed.n:
        return NOT_COMPARABLE
    mean = f"; geometric mean and its 95 % interval: {speed.interval:.2f}" if speed.n > 1 else ""
    return f"{ratio(speed.median)} (median of {speed.n}{mean})"


def score(ladder: Ladder, stack: Stack) -> str:
    """Both scores, and what they show: no claim where there are too few seeds."""
    means = f"{ladder.naive['score'].mean():.3f} -> {stack.trainings['score'].mean():.3f}"
    shown = f"{ladder.given['score']} {means}"
    n = len(stack.trainings)
    if stack.word == NOT_COMPARABLE:
        return f"{ladder.given['score']} {stack.word}: {stack.reason}"
    if stack.word == "too few seeds":
        too_few = "1 seed is" if n == 1 else f"{n} seeds are"
        return f"{shown}; no claim, {too_few} too few"
    if stack.keeps_the_score:
        return f"{shown}; {stack.word} within ±{ladder.given['margin']:g} ({n} seeds)"
    return f"{shown}; {stack.word}: {stack.reason}"


def checklist(ladder: Ladder) -> list[str]:
    """The guide's checklist: a box is ticked by a measured gain and by nothing else."""
    lines = []
    for box, rungs in ladder.rungs.groupby("box", sort=False):
        tick = "x" if (rungs["word"] == "kept").any() else " "
        lines.append(f"[{tick}] {box}: {', '.join(map(_in_short, rungs.itertuples()))}")
    return lines


def _in_short(rung: Any) -> str:
    if rung.reason:
        return f"{rung.name} {rung.word} ({rung.reason})"
    text = f"{rung.name} {ratio(rung.speed.median)}"
    if rung.word == "kept":
        return text
    if rung.word == "does not pay":
        return f"{text} does not pay here"
    return f"{text} {rung.word}"


def validation(ladder: Ladder, machine: Mapping[str, Any]) -> DataFrame:
    """The guide's validation checklist: what each box asks for was stated before the runs. `passed` is None where it is
    not known.
    """
    given = ladder.given
    final = ladder.final
    sides = (ladder.naive, final.trainings)
    medians = DataFrame([side.median() for side in sides])
    machine_gib = machine.get("memory_bytes", math.nan) / 2**30  # of one device: the host, or one GPU
    device = "cores"
    memory = "memory"
    busy = list(medians["busy_cores"] / machine["cores"])
    full = list(medians["memory_gib"] / machine_gib)
    if _has_gpus(medians):
        device = "GPU"
        memory = "GPU memory"
        busy = list(medians["busy_gpu"])
        full = list(medians["gpu_gib"] / machine_gib)
        if (ladder.rungs["in_stack"] & ladder.rungs["box"].isin(SEVERAL_DEVICES)).any():
            full[1] /= len(machine["gpus"])
    seconds = [ladder.epoch_seconds(side) for side in sides]
    predicted = seconds[0] / ladder.predicted
    asked = f"{written(MAX_EPOCH * predicted)} or less, {ratio(MAX_EPOCH)} the predicted {written(predicted)}"
    change = final.sides.change("loss", 0.9)
    judged = not final.sides.unlike and len(ladder.naive) >= MINIMUM_PAIRS
    furthest = np.nanmax(np.abs((change.estimate, change.low, change.high))) if judged else math.nan
    losses = [f"{side['loss'].mean():.3f}" for side in sides]
    scores = [f"{side['score'].mean():.3f}" for side in sides]
    loss_asked = f"within ±{given['loss_margin']:g}"
    score_asked = f"within ±{given['margin']:g}"
    lost = list(ladder.rungs.loc[ladder.rungs["reason"] == NO_MEMORY, "name"])
    done = ladder.num_done
    planned = ladder.num_planned
    rows = [
        (f"{device} busy", f"{percent(MIN_BUSY)} or more", *map(percent, busy),
         is_passed(busy[1], busy[1] >= MIN_BUSY)),
        (f"{memory} used", f"{percent(MAX_MEMORY)} or less", *map(percent, full),
         is_passed(full[1], full[1] <= MAX_MEMORY)),
        ("seconds an epoch as predicted, or fewer", asked, *map(written, seconds),
         is_passed(predicted, seconds[1] <= MAX_EPOCH * predicted)),
        ("loss as before", f"{loss_asked} nats, 90 % interval", losses[0], f"{losses[1]}, difference {change:z.3f}",
         is_passed(furthest, furthest < given["loss_margin"])),
        (f"score as before: {given['score']}", f"{score_asked}, 90 % interval", scores[0], f"{scores[1]}, {final.word}",
         final.keeps_the_score if judged else None),
        ("no training out of memory", "none", "-", ", ".join(lost) or "none", not lost),
        ("the run is complete", f"{planned} trainings", "-", f"{done} came to their end", done == planned),
    ]  # fmt: skip
    return DataFrame(rows, columns=["box", "stated", "before", "after", "passed"])


def is_passed(value: float, passed: bool) -> bool | None:
    """`passed`, or None where the value that it follows from is not known."""
    if math.isnan(value):
        return None
    return bool(passed)


def prediction(ladder: Ladder) -> str:
    """The guide's prediction, and the share of it that was measured."""
    product = " x ".join(f"{factor:.2f}" for factor in ladder.factors)
    measured = ladder.final.speed.median
    if math.isnan(measured * ladder.predicted):
        return f"Theoretical speed-up: {NOT_COMPARABLE}."
    return (
        f"Theoretical speed-up: {product} = {ratio(ladder.predicted)}. Measured: {ratio(measured)}, "
        f"{percent(measured / ladder.predicted)} of it."
    )


def gains(ladder: Ladder) -> list[str]:
    """What could be done in the time that was gained; what was counted and not measured is marked."""
    times = ladder.final.speed.median
    epoch = ladder.given["epoch"]
    operations = ladder.given["operations"]
    if math.isnan(times):
        return []
    plain, longer, larger = (
        operations[name] for name in ("tiny at 256 tokens", "tiny at 512 tokens", "small at 256 tokens")
    )
    length = (
        f"texts that fill it need {ratio(longer / plain)} the operations, which leaves {ratio(times * plain / longer)}"
    )
    if ladder.given["longest"] < 256:
        length = (
            f"the longest text has {ladder.given['longest']} tokens, and batches are padded to their longest text, so "
            f"the limit costs nothing. The naive loop would compute {ratio(longer / plain)} as much"
        )
    return [
        f"More data: {ratio(times)} the texts in the same time, {written(times * epoch)} and not {epoch:,} in one "
        "epoch of the naive loop.",
        f"More epochs: {written(times)} in the time of one.",
        f"Sequence length 512: {length} {COUNTED}.",
        f"A larger model: small needs {ratio(larger / plain)} the operations of tiny, so an epoch of it takes "
        f"{written(larger / plain / times)} of what tiny took in the naive loop {COUNTED}.",
    ]


def rungs_table(ladder: Ladder) -> DataFrame:
    """A row for each rung, from the naive loop upwards."""
    rungs = ladder.rungs
    shown = {
        "rung": rungs["name"],
        "flags": rungs["flags"],
        TIMES_BEFORE: rungs["speed"].map(_turns),
        "95 % interval": rungs["speed"].map(_ends),
        "cumulative, product": rungs["cumulative"].map(ratio),
        "samples/s": rungs["samples_per_second"],
        "s/epoch": ladder.given["epoch"] / rungs["samples_per_second"],
        "busy cores": rungs["busy_cores"],
        "GPU busy": rungs["busy_gpu"].map(percent),
        "memory, GiB": rungs["memory_gib"],
        "GPU, GiB": rungs["gpu_gib"],
        "warm-up, s": rungs["warmup_seconds"],
        "loss": rungs["loss"],
        "loss - before": rungs["loss_change"],
        "word": [f"{row.word} ({row.reason})" if row.reason else row.word for row in rungs.itertuples()],
    }
    return DataFrame(shown)


def _turns(speed: Speed) -> str:
    if speed.n:
        return f"{ratio(speed.median)} ({speed.lowest:.2f} to {speed.highest:.2f}, n = {speed.n})"
    return ""


def _ends(speed: Speed) -> str:
    return f"{speed.interval:.2f}".partition(" ")[2]


def stacks_table(ladder: Ladder) -> DataFrame:
    """A row for each stack of the proof, the safest first."""
    stacks = ladder.stacks
    first = f"rungs that leave updates as they were ({len(stacks[0].rungs)})"
    shown = {
        "rungs": [first, *(f"and {stack.rungs[-1]}" for stack in stacks[1:])],
        "times the naive loop": [_turns(stack.speed) for stack in stacks],
        "95 % interval": [_ends(stack.speed) for stack in stacks],
        ladder.given["score"]: [float(stack.trainings["score"].mean()) for stack in stacks],
        "difference, 90 % interval": [stack.sides.change("score", 0.9) for stack in stacks],
        "word": [stack.word for stack in stacks],
        "final": ["yes" if stack is ladder.final else "" for stack in stacks],
    }
    return DataFrame(shown)


def publication_table(ladders: Ladders) -> DataFrame:
    """Before and after, for a publication: the naive loop and the final stack, medians over the seeds."""
    rows = []
    cores = ladders.machine["cores"]
    for ladder in ladders.ladders:
        sides = (ladder.naive, ladder.final.trainings)
        times = ratio(ladder.final.speed.median)
        medians = DataFrame([side.median() for side in sides])
        scores = [f"{side['score'].mean():.3f}" for side in sides]
        measures = [
            ("time of an epoch, s", *map(ladder.epoch_seconds, sides), times),
            ("samples/s", *medians["samples_per_second"], times),
            (f"busy cores of {cores}", *medians["busy_cores"], ""),
            ("memory, GiB", *medians["memory_gib"], ""),
            (ladder.given["score"], *scores, ladder.final.word),
        ]
        if _has_gpus(medians):
            measures.append(("GPU busy", *map(percent, medians["busy_gpu"]), ""))
            measures.append(("GPU memory, GiB", *medians["gpu_gib"], ""))
        rows += [(ladder.given["task"], *measure) for measure in measures]
    return DataFrame(rows, columns=["task", "measure", "before", "after", "after against before"])


def _has_gpus(medians: DataFrame) -> bool:
    """Whether the naive loop, which is the first row, used GPUs."""
    return bool(medians["gpu_gib"].iloc[0])


def tables_of(ladder: Ladder, machine: Any) -> list[tuple[DataFrame, str, str]]:
    """The tables of one task with their titles and notes."""
    given = ladder.given
    boxes = validation(ladder, machine)
    words = []
    for passed in boxes.pop("passed"):
        word = "failed"
        if passed is None:
            word = "not known"
        elif passed:
            word = "passed"
        words.append(word)
    boxes["in a word"] = words
    naive = ladder.naive["score"].mean()
    about_stacks = FOR_STACKS.format_map({**given, "naive": naive, "seeds": seeds(len(ladder.naive))})
    return [
        (rungs_table(ladder), f"{given['task']}: the rungs", FOR_RUNGS.format(**given)),
        (stacks_table(ladder), f"{given['task']}: speed and score", about_stacks),
        (boxes, f"{given['task']}: the validation checklist", FOR_BOXES),
    ]


def warnings(found: Ladders) -> list[str]:
    """What the measurements cannot show, and which were not compared."""
    lines = []
    if found.num_seeds < MINIMUM_PAIRS:
        bear = "1 seed bears" if found.num_seeds == 1 else f"{found.num_seeds} seeds bear"
        lines.append(f"{bear} no verdict on the score; {MINIMUM_PAIRS} can.")
    for ladder in found.ladders:
        lines += ladder.not_compared
    return list(dict.fromkeys(lines))


def machine_of(found: Ladders) -> str:
    machine = found.machine
    device = ", ".join(machine["gpus"]) or "cpu"
    return f"{machine['cores']} cores, {machine['cpu']}, device {device}, torch {machine['versions']['torch']}"


def text(found: Ladders) -> str:
    """All of it as Markdown."""
    parts = ["# The speed ladder", f"{machine_of(found)}.", *warnings(found)]
    for ladder in found.ladders:
        for frame, title, note in tables_of(ladder, found.machine):
            parts += [tables.markdown(frame, title).rstrip(), note]
        parts.append(f"```\n{block(ladder)}\n```")
        parts += [_items(checklist(ladder)), prediction(ladder), _items(gains(ladder))]
    parts.append(tables.markdown(publication_table(found), "Before and after").rstrip())
    parts += [FOR_PUBLICATION, ""]
    return "\n\n".join(parts)


def _items(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def picture(ladder: Ladder) -> gallery.Picture:
    """Each rung's ratio to the rung before on a logarithmic axis; a line at 1, where a rung changes nothing."""
    task = ladder.given["task"]
    rungs = ladder.rungs[ladder.rungs["reason"] == ""]
    name = f"ladder-{pages.slug(task)}"
    caption = f"{task}: the geometric mean of the ratios of the turns, with its 95 % interval."
    size = (6.4, 0.9 + 0.32 * len(rungs))
    return gallery.draw_picture(name, f"Rungs: {task}", caption, _draw, rungs, size=size)


def _draw(axes: Any, rungs: DataFrame) -> str:
    words = ("kept", "does not pay", "left out for the score")
    colours = dict(zip(words, sns.color_palette("colorblind"), strict=False))
    styles = {}
    intervals = {}
    for rung in rungs.itertuples():
        name = f"{rung.name}: {rung.word}"
        styles[name] = plots.ArmStyle(colours[rung.word], "", "")
        intervals[name] = rung.speed.interval
    about = plots.bars(axes, intervals, 1.0, TIMES_BEFORE, styles)
    plots.logarithmic(axes, base=2)
    axes.xaxis.set_major_formatter(lambda value, _: factor(value))
    return about


def factor(value: float) -> str:
    """A power of 2 in few characters, so that the numbers of an axis do not touch.

    >>> factor(8.0), factor(1.0), factor(0.015625)
    ('8', '1', '1/64')
    """
    if value >= 1:
        return f"{value:g}"
    return f"1/{1 / value:g}"


def sentences_of(folder: Path) -> list[str]:
    """The headlines of the study in a folder."""
    return headlines(read(folder))


def headlines(found: Ladders) -> list[str]:
    """The speed-up and the score of each task, in a sentence."""
    sentences = []
    for ladder in found.ladders:
        final = ladder.final
        times = gain(final.speed)
        if final.speed.n:
            times += " the naive loop"
        sentences.append(f"{title_of(ladder)}: {times}; {score(ladder, final)}.")
    return sentences


def title_of(ladder: Ladder) -> str:
    return f"{ladder.given['task']} on {ladder.given['data']}"


def addition(study: Study) -> pages.Addition:
    """What the page of a study that is a ladder has."""
    return addition_of(read(study.folder))


def addition_of(found: Ladders) -> pages.Addition:
    """The first picture and what is published stand on top; all else of a task is folded."""
    sections = []
    for number, ladder in enumerate(found.ladders):
        shown = tuple(pages.table(frame, name, (note,)) for frame, name, note in tables_of(ladder, found.machine))
        lead = (prediction(ladder), *checklist(ladder), *gains(ladder))
        drawn = (picture(ladder),) if number else ()
        sections.append(pages.Section(ladder.given["task"], title_of(ladder), drawn, shown, lead, (block(ladder),)))
    return pages.Addition(
        sections=tuple(sections),
        headlines=tuple((line, (f"{machine_of(found)}.",)) for line in headlines(found)),
        warnings=tuple(warnings(found)),
        top_pictures=(picture(found.ladders[0]),),
        tests=pages.table(publication_table(found), "Before and after", (FOR_PUBLICATION,)),
        counts=seeds(found.num_seeds),
    )
