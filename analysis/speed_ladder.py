"""``python -m analysis speed_ladder OUT``: the report of ``experiments/speed_ladder.py``, printed and as two files.

``ladder.md`` has what is printed, and ``report.html`` is a page laid out as the report of a study is."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from analysis import gallery, tables
from analysis import page as pages
from analysis.commands import carried_out, write
from analysis.ladder import EPOCH, MEMORY, NO_MEMORY, UTILISATION, Ladder, Ladders, Speed, Stack, difference, read
from analysis.plots import MUTED
from analysis.questions import TIMES
from analysis.stats import MINIMUM_PAIRS
from analysis.tables import written

GIB = 2.0**30
PREDICTED = "Prediction, not a measurement"
SEVERAL_DEVICES = ("All GPUs", "More workers")
"""Boxes of the rungs that train on all devices."""
TIMES_BEFORE = "times the rung before"
FOR_RUNGS = (
    "Each rung in turns with the rungs kept before it, {climb_samples} samples a training; the first one against the "
    "naive loop. Ratios are medians over turns, with their range. Loss: evaluation loss after equal samples."
)
FOR_STACKS = (
    "Each stack and the naive loop on the same {seeds} seeds, {proof_samples} samples. Each row has one rung more than "
    "the one before. Stacks are tested in this order; the final one is the last before the first whose score is not "
    "shown to be equivalent. The margin is ±{margin:g}; the naive loop has {naive:.3f}."
)
FOR_BOXES = (
    "Before: the naive loop; after: the final stack. Medians over the seeds; losses and scores are means. Every bound "
    f"was stated before. With fewer than {MINIMUM_PAIRS} seeds nothing is known of losses and scores."
)
FOR_PUBLICATION = "The naive loop and the final stack, on the same seeds; medians over seeds, scores are means."
FOR_EXPECTED = (
    f"{PREDICTED}: one worker's measured times, given to 1, 2, 4 and 8 workers with a device like this one each, on "
    "the virtual clock. Nothing is charged for a link or a server that they share. Each worker has the batch of one, "
    "so more workers take larger or later steps: the score is not predicted."
)
COUNTED = "(counted operations, not measured)"


def ratio(value: float) -> str:
    """
    >>> ratio(1.4159), ratio(31.41)
    ('1.42×', '31.4×')
    """
    return f"{value:.{2 if value < 10 else 1}f}{TIMES}"


def percent(share: float) -> str:
    """
    >>> percent(0.00505), percent(0.833), percent(1.234), percent(math.nan)
    ('0.51 %', '83 %', '123 %', '-')
    """
    return "-" if math.isnan(share) else f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def block(ladder: Ladder) -> str:
    """The guide's own block."""
    given, final, fastest = ladder.given, ladder.final, ladder.stacks[-1]
    lines = [f"TRAINING SPEED COMPARISON: {given['task']}, {given['data']}", "=" * 60]
    for name, side in (("Original", ladder.naive), ("Optimised", final.trainings)):
        seconds, rate = ladder.epoch_seconds(side), side["samples_per_second"].median()
        lines.append(f"{name + ':':12}{written(seconds):>9} s/epoch {written(float(rate)):>9} samples/s")
    lines += [f"{'Speed-up:':12}{gain(final.speed)}", f"{'Score:':12}{score(ladder, final)}"]
    if fastest is not final:
        mean = fastest.trainings["score"].mean()
        lines.append(f"{'All rungs:':12}{ratio(fastest.speed.median)}, {given['score']} {mean:.3f}; {fastest.word}")
    return "\n".join(lines)


def gain(speed: Speed) -> str:
    """A median with its interval and how many turns it is of."""
    ends = f", 95 % interval {speed.interval:.2f}" if speed.n > 1 else ""
    return f"{ratio(speed.median)} (median of {speed.n}{ends})"


def score(ladder: Ladder, stack: Stack) -> str:
    """Both scores, and what they show: no claim where there are too few seeds."""
    means = f"{ladder.naive['score'].mean():.3f} -> {stack.trainings['score'].mean():.3f}"
    shown, n = f"{ladder.given['score']} {means}", len(stack.trainings)
    if stack.word == "too few seeds":
        return f"{shown}; no claim, {n} seeds are too few"
    if stack.keeps_the_score:
        return f"{shown}; {stack.word} within ±{ladder.given['margin']:g} ({n} seeds)"
    return f"{shown}; {stack.word}: {stack.reason}"


def checklist(ladder: Ladder) -> list[str]:
    """The guide's checklist: a box is ticked by a measured gain and by nothing else."""
    return [
        f"[{'x' if (rungs['word'] == 'kept').any() else ' '}] {box}: {', '.join(map(_in_short, rungs.itertuples()))}"
        for box, rungs in ladder.rungs.groupby("box", sort=False)
    ]


def _in_short(rung: Any) -> str:
    if rung.reason:
        return f"{rung.name} not measured ({rung.reason})"
    word = {"kept": "", "does not pay": " does not pay here"}.get(rung.word, f" {rung.word}")
    return f"{rung.name} {ratio(rung.speed.median)}{word}"


def validation(ladder: Ladder, machine: dict[str, Any]) -> pd.DataFrame:
    """The guide's validation checklist: what each box asks for was stated before the runs. `passed` is None where it is
    not known.
    """
    given, final, sides = ladder.given, ladder.final, (ladder.naive, ladder.final.trainings)
    before, after = (side.median() for side in sides)
    few, gpu = len(ladder.naive) < MINIMUM_PAIRS, bool(before["gpu_bytes"])
    used = ladder.rungs["in_stack"] & ladder.rungs["box"].isin(SEVERAL_DEVICES)
    devices = 1, machine.get("devices", 1) if used.any() else 1
    memory = machine.get("memory_bytes") or math.nan
    busy = [one["busy_gpu"] if gpu else one["busy_cores"] / machine["cores"] for one in (before, after)]
    full = [
        one["gpu_bytes"] / (memory * number) if gpu else one["memory_bytes"] / memory
        for one, number in zip((before, after), devices, strict=True)
    ]
    predicted = ladder.epoch_seconds(ladder.naive) / ladder.predicted
    seconds = [ladder.epoch_seconds(side) for side in sides]
    asked = f"{written(EPOCH * predicted)} or less, {ratio(EPOCH)} the predicted {written(predicted)}"
    lost = ladder.rungs.loc[ladder.rungs["reason"] == NO_MEMORY, "name"]
    name, planned = "GPU" if gpu else "cores", ladder.num_planned
    rows: list[tuple[str, str, str, str, bool | None]] = [
        (
            f"{name} busy", f"{percent(UTILISATION)} or more", percent(busy[0]), percent(busy[1]),
            bool(busy[1] >= UTILISATION) if busy[1] == busy[1] else None,
        ),
        (
            f"{'GPU memory' if gpu else 'memory'} used", f"{percent(MEMORY)} or less", percent(full[0]),
            percent(full[1]), bool(full[1] <= MEMORY) if full[1] == full[1] else None,
        ),
        (
            "seconds an epoch as predicted, or fewer", asked, written(seconds[0]), written(seconds[1]),
            seconds[1] <= EPOCH * predicted,
        ),
    ]  # fmt: skip
    if (margin := given.get("loss_margin")) is not None:
        change, means = difference(sides[1]["loss"], sides[0]["loss"]), [f"{side['loss'].mean():.3f}" for side in sides]
        inside = max(abs(end) for end in change[:3] if end == end) < margin
        told = f"{means[1]}, difference {change:z.3f}"
        rows.append(
            ("loss as before", f"within ±{margin:g} nats, 90 % interval", means[0], told, None if few else inside)
        )
    means = [f"{side['score'].mean():.3f}" for side in sides]
    all_done = f"{planned} trainings" if planned else "every training came to its end"
    rows += [
        (
            f"score as before: {given['score']}", f"within ±{given['margin']:g}, 90 % interval", means[0],
            f"{means[1]}, {final.word}", None if few else final.keeps_the_score,
        ),
        ("no training out of memory", "none", "-", ", ".join(lost) or "none", not len(lost)),
        (
            "the run is complete", all_done, "-", f"{ladder.num_done} came to their end",
            None if planned is None else ladder.num_done == planned,
        ),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["box", "stated", "before", "after", "passed"])


def prediction(ladder: Ladder) -> str:
    """The guide's prediction beside what came of it."""
    product, measured = " x ".join(f"{factor:.2f}" for factor in ladder.factors), ladder.final.speed.median
    return (
        f"Theoretical speed-up: {product} = {ratio(ladder.predicted)}. Measured: {ratio(measured)}, "
        f"{percent(measured / ladder.predicted)} of it."
    )


def gains(ladder: Ladder) -> list[str]:
    """What the time that was gained buys; what was counted and not measured is marked."""
    times, epoch, operations = ladder.final.speed.median, ladder.given["epoch"], ladder.given["operations"]
    lines = [
        f"More data: {ratio(times)} the texts in the same time, {written(times * epoch)} and not {epoch:,} in one "
        "epoch of the naive loop.",
        f"More epochs: {written(times)} in the time of one.",
    ]
    names = ("tiny at 256 tokens", "tiny at 512 tokens", "small at 256 tokens")
    if all(name in operations for name in names):
        plain, longer, larger = (operations[name] for name in names)
        lines += [
            f"Sequence length 512: the longest text has {ladder.given['longest']} tokens, and batches are padded to "
            f"their longest text, so the limit costs nothing. The naive loop would compute {ratio(longer / plain)} as "
            f"much {COUNTED}."
            if ladder.given["longest"] < 256
            else f"Sequence length 512: texts that fill it need {ratio(longer / plain)} the operations, which leaves "
            f"{ratio(times * plain / longer)} {COUNTED}.",
            f"A larger model: small needs {ratio(larger / plain)} the operations of tiny, so an epoch of it takes "
            f"{written(larger / plain / times)} of what tiny took in the naive loop {COUNTED}.",
        ]
    return lines


def rungs_table(ladder: Ladder) -> pd.DataFrame:
    """A row for each rung, from the naive loop upwards."""
    rungs = ladder.rungs
    shown = rungs[["name", "flags"]].rename(columns={"name": "rung"})
    shown[TIMES_BEFORE] = [_turns(speed) for speed in rungs["speed"]]
    shown["95 % interval"] = [f"{speed.interval:.2f}".partition(" ")[2] for speed in rungs["speed"]]
    shown["cumulative, product"] = rungs["cumulative"].map(ratio)
    shown["samples/s"], shown["s/epoch"] = (
        rungs["samples_per_second"],
        ladder.given["epoch"] / rungs["samples_per_second"],
    )
    shown["busy cores"], shown["GPU busy"] = rungs["busy_cores"], rungs["busy_gpu"].map(percent)
    shown["memory, GiB"], shown["GPU, GiB"] = rungs["memory_bytes"] / GIB, rungs["gpu_bytes"] / GIB
    shown["warm-up, s"], shown["loss"], shown["loss - before"] = (
        rungs["warmup_seconds"],
        rungs["loss"],
        rungs["loss_change"],
    )
    shown["word"] = [f"{row.word} ({row.reason})" if row.reason else row.word for row in rungs.itertuples()]
    return shown


def _turns(speed: Speed) -> str:
    return f"{ratio(speed.median)} ({speed.lowest:.2f} to {speed.highest:.2f}, n = {speed.n})" if speed.n else ""


def stacks_table(ladder: Ladder) -> pd.DataFrame:
    """A row for each stack of the proof, the safest first."""
    rows = [
        {
            "rungs": f"and {stack.rungs[-1]}"
            if place
            else f"rungs that leave updates as they were ({len(stack.rungs)})",
            "times the naive loop": _turns(stack.speed),
            "95 % interval": f"{stack.speed.interval:.2f}".partition(" ")[2],
            ladder.given["score"]: float(stack.trainings["score"].mean()),
            "difference, 90 % interval": stack.difference,
            "word": stack.word,
            "final": "yes" if stack is ladder.final else "",
        }
        for place, stack in enumerate(ladder.stacks)
    ]
    return pd.DataFrame(rows)


def publication_table(ladders: Ladders) -> pd.DataFrame:
    """Before and after, for a publication: the naive loop and the final stack, medians over the seeds."""
    rows = []
    for ladder in ladders.ladders:
        sides, times = (ladder.naive, ladder.final.trainings), ratio(ladder.final.speed.median)
        rates, cores = [side.median() for side in sides], ladders.machine["cores"]
        means = [f"{side['score'].mean():.3f}" for side in sides]
        measures = [
            ("time of an epoch, s", *map(ladder.epoch_seconds, sides), times),
            ("samples/s", *(one["samples_per_second"] for one in rates), times),
            (f"busy cores of {cores}", *(one["busy_cores"] for one in rates), ""),
            ("memory, GiB", *(one["memory_bytes"] / GIB for one in rates), ""),
            (ladder.given["score"], *means, ladder.final.word),
        ]
        if rates[0]["gpu_bytes"]:
            measures.append(("GPU busy", *(percent(one["busy_gpu"]) for one in rates), ""))
            measures.append(("GPU memory, GiB", *(one["gpu_bytes"] / GIB for one in rates), ""))
        rows += [(ladder.given["task"], *measure) for measure in measures]
    return pd.DataFrame(rows, columns=["task", "measure", "before", "after", "before against after"])


def expected_table(ladders: Ladders) -> pd.DataFrame:
    """What more devices would bring, from the virtual clock."""
    rows = []
    for given in (ladder.given for ladder in ladders.ladders):
        for each in given["expected"]:
            row = {"task": given["task"], "workers, a device each": each["num_workers"]}
            for name in ("synchronous", "asynchronous"):
                row |= {f"{name}, samples/s": each[name], f"{name}, s/epoch": given["epoch"] / each[name]}
            alone = each["num_workers"] == 1
            rows.append(row | {"measured, samples/s": given["one_worker"] if alone else "not measured"})
    return pd.DataFrame(rows)


def tables_of(ladder: Ladder, machine: Any) -> list[tuple[pd.DataFrame, str, str]]:
    """The tables of one task with their titles and notes."""
    given, boxes = ladder.given, validation(ladder, machine)
    boxes["in a word"] = ["not known" if one is None else "passed" if one else "failed" for one in boxes.pop("passed")]
    stacks = FOR_STACKS.format(**dict(given) | {"naive": ladder.naive["score"].mean(), "seeds": len(ladder.naive)})
    return [
        (rungs_table(ladder), f"{given['task']}: the rungs", FOR_RUNGS.format(**given)),
        (stacks_table(ladder), f"{given['task']}: speed and score", stacks),
        (boxes, f"{given['task']}: the validation checklist", FOR_BOXES),
    ]


def warnings(found: Ladders) -> list[str]:
    """What these measurements do not show."""
    few = found.num_seeds < MINIMUM_PAIRS
    return [f"{found.num_seeds} seeds bear no verdict on the score; {MINIMUM_PAIRS} can."] * few + [
        "A quick ladder: short trainings on few texts, so its ratios are rough."
    ] * found.quick


def machine_of(found: Ladders) -> str:
    one = found.machine
    return f"{one['cores']} cores, {one['cpu']}, device {one['device']}, torch {one['versions']['torch']}"


def text(found: Ladders) -> str:
    """All of it as Markdown."""
    parts = ["# The speed ladder", f"{machine_of(found)}.", *warnings(found)]
    for ladder in found.ladders:
        for frame, title, note in tables_of(ladder, found.machine):
            parts += [tables.markdown(frame, title).rstrip(), note]
        parts += [
            f"```\n{block(ladder)}\n```",
            "\n".join(f"- {line}" for line in checklist(ladder)),
            prediction(ladder),
        ]
        parts.append("\n".join(f"- {line}" for line in gains(ladder)))
    parts += [tables.markdown(publication_table(found), "Before and after").rstrip(), FOR_PUBLICATION]
    return "\n\n".join(
        [*parts, tables.markdown(expected_table(found), "1, 2, 4 and 8 devices").rstrip(), FOR_EXPECTED, ""]
    )


def picture(ladder: Ladder) -> pages.Drawing:
    """Each rung's ratio to the rung before on a logarithmic axis; a line at 1, where a rung changes nothing."""
    task, rungs = ladder.given["task"], ladder.rungs[ladder.rungs["reason"] == ""]
    caption = f"{task}: medians over the turns, and 95 % intervals of the mean ratio."
    size = 6.4, 0.9 + 0.32 * len(rungs)
    return pages.drawing(
        gallery.drawn(f"ladder-{pages.slug(task)}", f"Rungs: {task}", caption, _draw, rungs, size=size)
    )


def _draw(axes: Any, rungs: pd.DataFrame) -> str:
    colours = dict(
        zip(("kept", "does not pay", "left out for the score"), sns.color_palette("colorblind", 3), strict=True)
    )
    axes.axvline(1.0, color=MUTED, linewidth=0.9, linestyle="--")
    for word, own in rungs.reset_index(drop=True).groupby("word", sort=False):
        medians = own["speed"].map(lambda speed: speed.median)
        axes.plot(medians, own.index, "o", color=colours[word], markersize=5, label=word)
        ends = [(speed.interval.low, speed.interval.high) for speed in own["speed"]]
        axes.hlines(own.index, *zip(*ends, strict=True), color=colours[word], linewidth=1.4)
    axes.set(xscale="log", xlabel=TIMES_BEFORE, yticks=range(len(rungs)), yticklabels=rungs["name"])
    axes.set_xticks(
        [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.invert_yaxis()
    return "; ".join(f"{rung.name} {ratio(rung.speed.median)}" for rung in rungs.itertuples())


def page(found: Ladders, command: str) -> str:
    """The page of a study's report with these findings in it."""
    sections, headlines = [], []
    for number, ladder in enumerate(found.ladders):
        title, final = f"{ladder.given['task']} on {ladder.given['data']}", ladder.final
        headlines.append((f"{title}: {gain(final.speed)} the naive loop; {score(ladder, final)}.", ()))
        shown = tuple(pages.table(frame, name, (note,)) for frame, name, note in tables_of(ladder, found.machine))
        lead, drawn = (prediction(ladder), *checklist(ladder), *gains(ladder)), (picture(ladder),) if number else ()
        sections.append(pages.Section(ladder.given["task"], title, drawn, shown, lead, (block(ladder),)))
    expected = pages.table(expected_table(found), "1, 2, 4 and 8 devices", (FOR_EXPECTED,))
    return pages.measured(
        "The speed ladder",
        command,
        f"{found.num_seeds} seeds" + ", quick" * found.quick,
        headlines,
        warnings(found),
        (picture(found.ladders[0]),),
        pages.table(publication_table(found), "Before and after", (FOR_PUBLICATION,)),
        [*sections, pages.Section("expected", PREDICTED, tables=(expected,))],
        f"{machine_of(found)}. Made by python -m analysis speed_ladder. One file, nothing is loaded.",
    )


def report(folder: Path) -> None:
    """Print the report of the ladder in `folder`, and write ladder.md and report.html there.

    Raises:
        UsageError: if it holds no finished ladder, or nothing can be written there.
    """
    found = read(folder)
    told, again = text(found), f"python -m analysis speed_ladder {shlex.quote(str(folder))}"
    write(folder / "ladder.md", told, "OUT")
    write(folder / "report.html", page(found, again), "OUT")
    print(told)
    print(f"page   {folder / 'report.html'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis speed_ladder", description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder of experiments/speed_ladder.py")
    flags = parser.parse_args(arguments)
    return carried_out(lambda: report(flags.folder))


if __name__ == "__main__":
    sys.exit(main())
