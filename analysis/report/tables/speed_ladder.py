"""The speed ladder in words and tables: the guide's block, checklist and prediction, the table for a publication."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.findings.speed_ladder import (
    EPOCH,
    MEMORY,
    UTILISATION,
    Ladder,
    Ladders,
    Rung,
    Stack,
    Training,
    typical,
)
from analysis.report.tables.number_formats import between, nats, number, percent, ratio
from analysis.report.tables.table import Cell, Headed, Table, tabled, value, words
from analysis.statistics.speed_up import SpeedUp
from analysis.stats import MINIMUM_PAIRS

GIB = 2.0**30
PREDICTED = "Prediction, not a measurement"
SEVERAL_DEVICES = ("All GPUs", "More workers")
"""Boxes of the rungs that train on all devices."""


def block(ladder: Ladder) -> str:
    """The guide's own block."""
    sides = (("Original", ladder.naive), ("Optimised", ladder.final.trainings))
    lines = [f"TRAINING SPEED COMPARISON: {ladder.task}, {ladder.data}", "=" * 60]
    for name, trainings in sides:
        rate = typical(trainings).samples_per_second
        lines.append(f"{name + ':':12}{number(ladder.epoch_seconds(trainings)):>9} s/epoch {number(rate):>9} samples/s")
    lines += [f"{'Speed-up:':12}{gain(ladder.final.total)}", f"{'Score:':12}{score(ladder, ladder.final)}"]
    fastest = ladder.stacks[-1]
    if fastest is not ladder.final:
        shown = f"{ladder.score} {nats(_mean(fastest.trainings))}; {fastest.verdict.word}"
        lines.append(f"{'All rungs:':12}{ratio(fastest.total.median)}, {shown}")
    return "\n".join(lines)


def gain(speed: SpeedUp) -> str:
    """A median with its interval and how many turns it is of."""
    ends = f", 95 % interval {speed.interval:.2f}" if speed.interval.low is not None else ""
    return f"{ratio(speed.median)} (median of {speed.n}{ends})"


def score(ladder: Ladder, stack: Stack) -> str:
    """Both scores, and what they show: no claim where there are too few seeds."""
    shown = f"{ladder.score} {nats(_mean(ladder.naive))} -> {nats(_mean(stack.trainings))}"
    word = stack.verdict.word
    if word == "too few seeds":
        return f"{shown}; no claim, {stack.paired.n} seeds are too few"
    if stack.keeps_the_score:
        return f"{shown}; {word} within ±{ladder.margin:g} ({stack.paired.n} seeds)"
    return f"{shown}; {word}: {stack.verdict.reason}"


def checklist(ladder: Ladder) -> list[str]:
    """The guide's checklist: a box is ticked by a measured gain and by nothing else."""
    boxes: dict[str, list[Rung]] = {}
    for rung in ladder.rungs:
        boxes.setdefault(rung.box, []).append(rung)
    return [
        f"[{'x' if any(rung.word == 'kept' for rung in rungs) else ' '}] {box}: {', '.join(map(_in_short, rungs))}"
        for box, rungs in boxes.items()
    ]


@dataclasses.dataclass(frozen=True)
class Box:
    """One box of the guide's validation checklist: what it asks for, and what was measured."""

    name: str
    wanted: str
    before: str
    """Of the naive loop; "-" where the box is about the ladder."""
    after: str
    """Of the final stack, or of the ladder."""
    passed: bool | None
    """None: not known."""


def validation(ladder: Ladder, machine: Mapping[str, Any]) -> list[Box]:
    """The guide's validation checklist; what each box asks for was stated before the runs."""
    before, after = typical(ladder.naive), typical(ladder.final.trainings)
    few = len(ladder.naive) < MINIMUM_PAIRS
    several = any(rung.in_stack and rung.box in SEVERAL_DEVICES for rung in ladder.rungs)
    busy = [_busy(side, machine) for side in (before, after)]
    used = [_used(before, machine, 1), _used(after, machine, machine.get("devices", 1) if several else 1)]
    predicted = ladder.epoch_seconds(ladder.naive) / ladder.predicted
    measured = ladder.epoch_seconds(ladder.final.trainings)
    boxes = [
        Box(
            f"{'GPU' if before.gpu_bytes else 'cores'} busy",
            f"{percent(UTILISATION)} or more",
            percent(busy[0]),
            percent(busy[1]),
            None if busy[1] is None else busy[1] >= UTILISATION,
        ),
        Box(
            f"{'GPU memory' if before.gpu_bytes else 'memory'} used",
            f"{percent(MEMORY)} or less",
            percent(used[0]),
            percent(used[1]),
            None if used[1] is None else used[1] <= MEMORY,
        ),
        Box(
            "seconds an epoch as predicted, or fewer",
            f"{number(EPOCH * predicted)} or less, {ratio(EPOCH)} the predicted {number(predicted)}",
            number(ladder.epoch_seconds(ladder.naive)),
            number(measured),
            measured <= EPOCH * predicted,
        ),
    ]
    if ladder.loss_margin is not None:
        margin, shown = ladder.loss_margin, ladder.loss
        boxes.append(
            Box(
                "loss as before",
                f"within ±{margin:g} nats, 90 % interval",
                nats(_mean_loss(ladder.naive)),
                f"{nats(_mean_loss(ladder.final.trainings))}, difference {shown.text(nats)}",
                None if few else max(map(abs, shown.ends)) < margin,
            )
        )
    missing = ladder.num_planned is None
    boxes += [
        Box(
            f"score as before: {ladder.score}",
            f"within ±{ladder.margin:g}, 90 % interval",
            nats(_mean(ladder.naive)),
            f"{nats(_mean(ladder.final.trainings))}, {ladder.final.verdict.word}",
            None if few else ladder.final.keeps_the_score,
        ),
        Box(
            "no training out of memory",
            "none",
            "-",
            ", ".join(ladder.without_memory) or "none",
            not ladder.without_memory,
        ),
        Box(
            "the run is complete",
            "every training came to its end" if missing else f"{ladder.num_planned} trainings",
            "-",
            f"{ladder.num_done} came to their end",
            None if missing else ladder.num_done == ladder.num_planned,
        ),
    ]
    return boxes


def _busy(training: Training, machine: Mapping[str, Any]) -> float | None:
    """The share of the GPU's looks at which something ran, or of all cores that were busy; None where not known."""
    if training.gpu_bytes:
        return training.busy_gpu
    return None if training.busy_cores is None else training.busy_cores / machine["cores"]


def _used(training: Training, machine: Mapping[str, Any], gpus: int) -> float | None:
    """The share of the memory of the machine, or of as many GPUs; None where that is not known."""
    whole = machine.get("memory_bytes")
    if whole is None:
        return None
    if training.gpu_bytes:
        return training.gpu_bytes / (whole * gpus)
    return training.memory_bytes / whole


def validation_table(ladder: Ladder, machine: Mapping[str, Any]) -> Table:
    """A row for each box of the validation checklist."""
    said = {True: Cell("passed", tone="good"), False: Cell("failed", tone="bad"), None: Cell("not known", tone="open")}
    rows = [
        [
            words("box", box.name),
            words("stated", box.wanted),
            value("before", box.before),
            value("after", box.after),
            words("in a word", said[box.passed]),
        ]
        for box in validation(ladder, machine)
    ]
    lead = (
        "Before: the naive loop; after: the final stack. Medians over the seeds; losses and scores are means. Every "
        f"bound was stated before. With fewer than {MINIMUM_PAIRS} seeds nothing is known of losses and scores."
    )
    return tabled(f"validation-{ladder.task}", f"{ladder.task}: the validation checklist", rows, (), lead=lead)


def _in_short(rung: Rung) -> str:
    if rung.speed is None:
        return f"{rung.name} not measured ({rung.reason})"
    word = {"kept": "", "does not pay": " does not pay here"}.get(rung.word, f" {rung.word}")
    return f"{rung.name} {ratio(rung.speed.median)}{word}"


def prediction(ladder: Ladder) -> str:
    """The guide's prediction beside what came of it."""
    product = " x ".join(f"{factor.median:.2f}" for factor in ladder.factors)
    measured = ladder.final.total.median
    share = measured / ladder.predicted
    return (
        f"Theoretical speed-up: {product} = {ratio(ladder.predicted)}. Measured: {ratio(measured)}, "
        f"{percent(share)} of it."
    )


def gains(ladder: Ladder) -> list[str]:
    """What the time that was gained buys; what was counted and not measured is marked."""
    times, operations = ladder.final.total.median, ladder.operations
    lines = [
        f"More data: {ratio(times)} the texts in the same time, {number(times * ladder.epoch)} and not "
        f"{number(ladder.epoch)} in one epoch of the naive loop.",
        f"More epochs: {number(times)} in the time of one.",
    ]
    names = ("tiny at 256 tokens", "tiny at 512 tokens", "small at 256 tokens")
    if all(name in operations for name in names):
        plain, longer, larger = (operations[name] for name in names)
        more = longer / plain
        if ladder.longest < 256:
            lines.append(
                f"Sequence length 512: the longest text has {ladder.longest} tokens, and batches are padded to their "
                f"longest text, so the limit costs nothing. The naive loop would compute {ratio(more)} as much "
                f"(counted operations, not measured)."
            )
        else:
            lines.append(
                f"Sequence length 512: texts that fill it need {ratio(more)} the operations, which leaves "
                f"{ratio(times / more)} (counted operations, not measured)."
            )
        lines.append(
            f"A larger model: small needs {ratio(larger / plain)} the operations of tiny, so an epoch of it takes "
            f"{number(larger / plain / times)} of what tiny took in the naive loop (counted operations, not measured)."
        )
    return lines


def rungs_table(ladder: Ladder) -> Table:
    """A row for each rung, from the naive loop upwards."""

    def row(rung: Rung) -> list[Headed]:
        measured = rung.training
        return [
            words("rung", rung.name),
            words("flags", rung.flags),
            value("times the rung before", "-" if rung.speed is None else _turns(rung.speed)),
            value("95 % interval", "-" if rung.speed is None else f"{rung.speed.interval:.2f}".partition(" ")[2]),
            value("cumulative, product", ratio(rung.cumulative)),
            *_cells(measured, ladder),
            value("loss - before", "-" if rung.loss_change is None else between(rung.loss_change, nats)),
            words("in a word", _badge(rung)),
        ]

    lead = (
        f"Each rung in turns with the rungs kept before it, {ladder.climb_samples} samples a training; the first one "
        f"against the naive loop. Ratios are medians over turns, with their range. Loss: evaluation loss after equal "
        f"samples."
    )
    return tabled(
        f"rungs-{ladder.task}", f"{ladder.task}: the rungs", [row(rung) for rung in ladder.rungs], (), lead=lead
    )


def stacks_table(ladder: Ladder) -> Table:
    """A row for each stack of the proof, the safest first."""

    def row(number: int, stack: Stack) -> list[Headed]:
        name = f"and {stack.rungs[-1]}" if number else f"rungs that leave updates as they were ({len(stack.rungs)})"
        return [
            words("rungs", name),
            value("times the naive loop", _turns(stack.total)),
            value("95 % interval", f"{stack.total.interval:.2f}".partition(" ")[2] or "-"),
            value(ladder.score, nats(_mean(stack.trainings))),
            value("difference, 90 % interval", between(stack.paired, nats)),
            words("in a word", stack.verdict.word),
            words("final", "yes" if stack is ladder.final else ""),
        ]

    lead = (
        f"Each stack and the naive loop on the same {len(ladder.naive)} seeds, {ladder.proof_samples} samples. Each row"
        f" has one rung more than the one before. Stacks are tested in this order; the final one is the last before "
        f"the first whose score is not shown to be equivalent. The margin is ±{ladder.margin:g}; the naive loop has "
        f"{nats(_mean(ladder.naive))}."
    )
    rows = [row(number, stack) for number, stack in enumerate(ladder.stacks)]
    return tabled(f"stacks-{ladder.task}", f"{ladder.task}: speed and score", rows, (), lead=lead)


def _badge(rung: Rung) -> Cell:
    return Cell(rung.word, rung.reason, tone={"kept": "good", "does not pay": "bad"}.get(rung.word, "open"))


def _turns(speed: SpeedUp) -> Cell:
    return Cell(ratio(speed.median), f"{speed.lowest:.2f} to {speed.highest:.2f}, n = {speed.n}")


def _cells(training: Training | None, ladder: Ladder) -> list[Headed]:
    show: Callable[[float | None], str] = number
    rate = None if training is None else training.samples_per_second
    return [
        value("samples/s", show(rate)),
        value("s/epoch", show(None if rate is None else ladder.epoch / rate)),
        value("busy cores", show(None if training is None else training.busy_cores)),
        value("GPU busy", percent(None if training is None else training.busy_gpu)),
        value("memory, GiB", show(None if training is None else training.memory_bytes / GIB)),
        value("GPU, GiB", show(training.gpu_bytes / GIB) if training is not None and training.gpu_bytes else "-"),
        value("warm-up, s", show(None if training is None else training.warmup_seconds)),
        value("loss", nats(None if training is None else training.loss)),
    ]


def publication_table(ladders: Ladders) -> Table:
    """Before and after, for a publication: the naive loop and the final stack, medians over the seeds."""
    rows = []
    for ladder in ladders.ladders:
        before, after, speed = typical(ladder.naive), typical(ladder.final.trainings), ratio(ladder.final.total.median)
        cores = ladders.machine["cores"]
        measures: list[tuple[str, str, str, str]] = [
            (
                "time of an epoch, s",
                number(ladder.epoch_seconds(ladder.naive)),
                number(ladder.epoch_seconds(ladder.final.trainings)),
                speed,
            ),
            (
                "samples/s",
                number(before.samples_per_second),
                number(after.samples_per_second),
                speed,
            ),
            (f"busy cores of {cores}", number(before.busy_cores), number(after.busy_cores), ""),
            ("memory, GiB", number(before.memory_bytes / GIB), number(after.memory_bytes / GIB), ""),
            (ladder.score, nats(_mean(ladder.naive)), nats(_mean(ladder.final.trainings)), ladder.final.verdict.word),
        ]
        if before.gpu_bytes:
            measures.append(("GPU busy", percent(before.busy_gpu), percent(after.busy_gpu), ""))
            measures.append(("GPU memory, GiB", number(before.gpu_bytes / GIB), number(after.gpu_bytes / GIB), ""))
        rows += [
            [
                words("task", ladder.task),
                words("measure", name),
                value("before", first),
                value("after", last),
                value("before against after", change),
            ]
            for name, first, last, change in measures
        ]
    lead = "The naive loop and the final stack, on the same seeds; medians over seeds, scores are means."
    return tabled("publication", "Before and after", rows, (), lead=lead)


def _mean_loss(trainings: Sequence[Training]) -> float:
    return statistics.fmean(training.loss for training in trainings)


def _mean(trainings: Sequence[Training]) -> float:
    return statistics.fmean(training.score for training in trainings)


def expected_table(ladders: Ladders) -> Table:
    """What more devices would bring, from the virtual clock."""
    rows = []
    for ladder in ladders.ladders:
        for each in ladder.expected:
            rates = (("synchronous", each.synchronous), ("asynchronous", each.asynchronous))
            rows.append(
                [
                    words("task", ladder.task),
                    value("workers, a device each", str(each.num_workers)),
                    *(
                        cell
                        for name, rate in rates
                        for cell in (
                            value(f"{name}, samples/s", number(rate)),
                            value(f"{name}, s/epoch", number(ladder.epoch / rate)),
                        )
                    ),
                    value(
                        "measured, samples/s", number(ladder.one_worker) if each.num_workers == 1 else "not measured"
                    ),
                ]
            )
    lead = (
        f"{PREDICTED}: one worker's measured times, given to 1, 2, 4 and 8 workers with a device like this one each, "
        f"on the virtual clock. Nothing is charged for a link or a server that they share. Each worker has the batch "
        f"of one, so more workers take larger or later steps: the score is not predicted."
    )
    return tabled("expected", "1, 2, 4 and 8 devices", rows, (), lead=lead)
