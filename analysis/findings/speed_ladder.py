"""What the measurements of ``experiments/speed_ladder.py`` show: which rungs pay, and what they come to together."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from analysis.judge import ON_MARGIN, Verdict, answer, of_numbers
from analysis.statistics.intervals import Interval, difference_of, interval_over
from analysis.statistics.speed_up import SpeedUp, product, speed_up
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_json

LADDER, PARTS = "ladder.json", "parts.json"
"""The measurements of a finished ladder, and those of every turn so far."""
SCHEMA = 2

NO_MEMORY = "ran out of memory"
"""The reason of a rung whose training did."""
UTILISATION, MEMORY, EPOCH = 0.9, 0.9, 1.2
"""Stated before the runs: the least share of the processors that is busy, the largest share of the memory that is used,
and how many times the predicted seconds an epoch may take."""

Word = Literal["kept", "does not pay", "left out for the score", "not measured"]


@dataclasses.dataclass(frozen=True)
class Training:
    """One measured training. Rates, cores and GPU are those after the warm-up; None where they are not known."""

    samples_per_second: float
    warmup_seconds: float
    """Until the rate was measured; a compiler works in it."""
    loss: float
    """On the evaluation set, at the end."""
    score: float
    memory_bytes: int
    """The sum of the peaks of all processes."""
    gpu_bytes: int
    busy_cores: float | None
    busy_gpu: float | None
    """Share of the looks at which something ran on it, in [0, 1]."""


@dataclasses.dataclass(frozen=True)
class Rung:
    """One setting, measured in turns with the trainings of all rungs that were kept before it."""

    name: str
    box: str
    """The line of the checklist that it belongs to."""
    flags: str
    """What is typed for it."""
    word: Word
    in_stack: bool
    """Whether the final stack has it; the first rung is the library itself, which stays though it may not pay."""
    reason: str
    """Why it was not measured; empty where it was."""
    speed: SpeedUp | None
    """Against the rung before."""
    cumulative: float
    """The product of the medians up to here, of the rungs in the final stack."""
    training: Training | None
    """With it: medians over the turns."""
    loss_change: Interval | None
    """Of the evaluation loss after equal samples, with it - before it."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Several rungs together, beside the naive loop on the same seeds."""

    rungs: tuple[str, ...]
    trainings: tuple[Training, ...]
    """One for each seed."""
    total: SpeedUp
    paired: Interval
    """90 % interval of the score, with it - the naive loop's."""
    verdict: Verdict

    @property
    def keeps_the_score(self) -> bool:
        return self.verdict.word in ON_MARGIN


@dataclasses.dataclass(frozen=True)
class Expected:
    """Samples a second of several workers, each on a device of its own: predicted on the virtual clock."""

    num_workers: int
    synchronous: float
    asynchronous: float


@dataclasses.dataclass(frozen=True)
class Ladder:
    """One task: its rungs, and stacks of them beside the naive loop."""

    task: str
    data: str
    model: str
    epoch: int
    """Samples of the whole data set."""
    climb_samples: int
    proof_samples: int
    score: str
    lower_is_better: bool
    margin: float
    """Declared before the runs, in the unit of the score."""
    rungs: tuple[Rung, ...]
    naive: tuple[Training, ...]
    """One for each seed."""
    stacks: tuple[Stack, ...]
    """Of rungs that pay: the first leaves updates as they were, each further one has one rung more."""
    final: Stack
    """See `final_of`."""
    expected: tuple[Expected, ...]
    one_worker: float | None
    """Samples a second that one worker reached, whose times the prediction is made from."""
    operations: Mapping[str, float]
    """Of a forward and a backward pass on one sample, counted: by model and length."""
    longest: int
    """Tokens of the longest training text, special tokens included, cut at the limit."""
    loss: Interval
    """90 % interval of the evaluation loss, the final stack's - the naive loop's, on the same seeds."""
    loss_margin: float | None
    """Declared before the runs, in nats; None in files that did not name it."""
    turns: int | None
    """Of every rung; None in files that did not say so."""

    @property
    def num_done(self) -> int:
        """Trainings that came to their end; both sides of a turn count."""
        return sum(2 * rung.speed.n for rung in self.rungs if rung.speed) + len(self.naive) * (1 + len(self.stacks))

    @property
    def without_memory(self) -> list[str]:
        """The rungs that ran out of memory."""
        return [rung.name for rung in self.rungs if rung.reason == NO_MEMORY]

    @property
    def num_planned(self) -> int | None:
        """Trainings without those of rungs that were left out; None where the file does not say how many turns."""
        if self.turns is None:
            return None
        rungs = sum(rung.speed is not None or rung.reason == NO_MEMORY for rung in self.rungs)
        return 2 * self.turns * rungs + len(self.naive) * (1 + len(self.stacks))

    @property
    def predicted(self) -> float:
        """The product of the rungs in the stack."""
        return product(self.factors)

    @property
    def factors(self) -> tuple[SpeedUp, ...]:
        """Of the rungs in the stack."""
        return tuple(rung.speed for rung in self.rungs if rung.speed is not None and rung.in_stack)

    def epoch_seconds(self, trainings: Sequence[Training]) -> float:
        """The median seconds of an epoch at the measured rates."""
        return statistics.median(self.epoch / training.samples_per_second for training in trainings)


@dataclasses.dataclass(frozen=True)
class Ladders:
    """All that was measured."""

    quick: bool
    machine: Mapping[str, Any]
    ladders: tuple[Ladder, ...]

    @property
    def num_seeds(self) -> int:
        return min(len(ladder.naive) for ladder in self.ladders)


def read(folder: Path) -> Ladders:
    """Read the folder of a ladder and compute what it shows.

    Raises:
        UsageError: if it is no folder of ``experiments/speed_ladder.py``, or one that was not finished.
    """
    try:
        found = read_json(folder / LADDER)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, this version reads {SCHEMA}")
        return Ladders(found["quick"], found["machine"], tuple(ladder_of(each) for each in found["ladders"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, FileNotFoundError) and (folder / PARTS).is_file():
            raise UsageError(
                f"the ladder in {folder} is not finished; type the command again that began it, which goes on where it "
                f"was interrupted"
            ) from error
        raise UsageError(
            f"{folder} holds no finished ladder ({type(error).__name__}: {error}); make one: "
            f"python experiments/speed_ladder.py --quick --out {folder}"
        ) from error


def pays(rung: Mapping[str, Any]) -> bool:
    """Whether a rung of ladder.json is kept: every rate is above 0, and the interval of their ratios lies above 1."""
    return _speed(rung["before"], rung["after"]).pays


def final_of(stacks: Sequence[Stack]) -> Stack:
    """The fastest stack whose score is shown to be equivalent; where none is, the one that leaves updates as they were.

    Stacks are tested one after the other, in an order that was decided beforehand, each at the level of a single test,
    up to the first that fails. So a stack that is called equivalent needs no correction for having been chosen (serial
    gatekeeping; Goeman and Solari 2010, "The sequential rejection principle of familywise error control"). With too few
    seeds for a verdict it is the one of all rungs that pay.
    """
    if all(stack.verdict.word == "too few seeds" for stack in stacks):
        return stacks[-1]
    return [stacks[0], *itertools.takewhile(lambda stack: stack.keeps_the_score, stacks)][-1]


def ladder_of(found: Mapping[str, Any]) -> Ladder:
    """What the measurements of one task show.

    Args:
        found: one of the ladders in ladder.json.
    """
    naive = _trainings(found["naive"])
    stacks = tuple(_stack(stack, naive, found) for stack in found["stacks"])
    final = final_of(stacks)
    losses, references = ([training.loss for training in side] for side in (final.trainings, naive))
    return Ladder(
        **{key: found[key] for key in ("task", "data", "model", "epoch", "climb_samples", "proof_samples", "score")},
        lower_is_better=found["lower_is_better"],
        margin=found["margin"],
        rungs=tuple(_rungs(found["rungs"], final.rungs)),
        naive=naive,
        stacks=stacks,
        final=final,
        expected=tuple(Expected(**each) for each in found["expected"]),
        one_worker=found["one_worker"],
        operations=found["operations"],
        longest=found["longest"],
        loss=difference_of(losses, references, 0.9),
        loss_margin=found.get("loss_margin"),
        turns=found.get("turns"),
    )


def _stack(stack: Mapping[str, Any], naive: Sequence[Training], found: Mapping[str, Any]) -> Stack:
    trainings = _trainings(stack["trainings"])
    scores, references = ([training.score for training in side] for side in (trainings, naive))
    judged = _judged(scores, references, found)
    return Stack(
        tuple(stack["rungs"]), trainings, _speed(naive, trainings), difference_of(scores, references, 0.9), judged
    )


def _rungs(found: Iterable[Mapping[str, Any]], final: Sequence[str]) -> Iterable[Rung]:
    kept: list[SpeedUp] = []
    for rung in found:
        names = rung["name"], rung["box"], rung["flags"]
        if rung["reason"]:
            yield Rung(*names, "not measured", False, rung["reason"], None, product(kept), None, None)
            continue
        before, after = _trainings(rung["before"]), _trainings(rung["after"])
        speed = _speed(before, after)
        in_stack = rung["name"] in final
        kept += [speed] * in_stack
        changes = [ours.loss - theirs.loss for ours, theirs in zip(after, before, strict=True)]
        word: Word = "does not pay" if not speed.pays else "kept" if in_stack else "left out for the score"
        yield Rung(*names, word, in_stack, "", speed, product(kept), typical(after), interval_over(changes))


def typical(trainings: Sequence[Training]) -> Training:
    """The median of every field over trainings of one kind."""
    columns = {field.name: [getattr(training, field.name) for training in trainings] for field in FIELDS}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    medians: dict[str, Any] = {name: statistics.median(values) if values else None for name, values in known.items()}
    return Training(**medians)


FIELDS = dataclasses.fields(Training)


def _trainings(found: Sequence[Any]) -> tuple[Training, ...]:
    return tuple(each if isinstance(each, Training) else Training(**each) for each in found)


def _speed(before: Sequence[Any], after: Sequence[Any]) -> SpeedUp:
    slow, fast = ([each.samples_per_second for each in _trainings(side)] for side in (before, after))
    return speed_up(slow, fast)


def _judged(scores: Sequence[float], references: Sequence[float], found: Mapping[str, Any]) -> Verdict:
    """The word on the score; a margin that is half of what the naive loop gained in all bears none."""
    improvement = statistics.fmean(references) - found["score_at_start"]
    lower = found["lower_is_better"]
    stated = {"margin": found["margin"], "margin_reason": "stated before the measurements"}
    row = of_numbers(scores, references, lower=lower, gained=-improvement if lower else improvement, **stated)
    (row,) = answer([row])
    return Verdict(row["word"], row["reason"])
