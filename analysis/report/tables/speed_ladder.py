"""The speed ladder in words and tables: the guide's block, checklist and prediction, the table for a publication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from analysis.findings.speed_ladder import Ladder, Ladders, Rung, Stack, Training, typical
from analysis.report.tables.number_formats import between, nats, number, percent, ratio
from analysis.report.tables.table import Cell, Headed, Table, tabled, value, words
from analysis.statistics.speed_up import SpeedUp

GIB = 2.0**30
PREDICTED = "Prediction, not a measurement"


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
            value("difference, 90 % interval", between(stack.paired.interval90, nats)),
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
