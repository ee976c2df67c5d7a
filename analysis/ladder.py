"""What the measurements of ``experiments/speed_ladder.py`` show: which rungs pay, and what they come to together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from analysis.gate import Between, between, set_apart
from analysis.judge import ON_MARGIN, answer, of_numbers
from analysis.read import rows_of
from analysis.stats import Interval, Numbers, t_interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, EVENTS, read_events, read_json

LADDER = "ladder.json"
SETTINGS = "settings.json"
"""The measurements of a finished ladder, and what all trainings share."""
NO_MEMORY = "ran out of memory"
"""The reason of a rung whose training did."""
NOT_COMPARABLE = "not comparable"
NOT_KNOWN = "What trainings were given is not known: ladder.json does not name their runs, or they are not beside it."
UTILISATION = 0.9
MEMORY = 0.9
EPOCH = 1.2
"""Stated before the runs: the least share of the processors that is busy, the largest share of the memory that is used,
and how many times the predicted seconds an epoch may take."""
TRAINING = {
    "samples_per_second": "after the warm-up, as cores and GPU",
    "warmup_seconds": "until the rate was measured; a compiler works in it",
    "loss": "on the evaluation set, at the end",
    "score": "at the end",
    "memory_bytes": "the sum of the peaks of all processes",
    "gpu_bytes": "the same on GPUs",
    "busy_cores": "none where it is not known",
    "busy_gpu": "share of the looks at which something ran on it; none where it is not known",
}
"""Columns of a table of measured trainings, a row for each turn or seed."""
RUNGS = ("name", "box", "flags", "word", "in_stack", "reason", "speed", "cumulative", "loss_change")
"""Columns of the table of rungs, beside the medians of `TRAINING` with it. `box`: line of the checklist. `word`: kept,
does not pay, left out for the score, or for a `reason` not measured or not comparable. `in_stack`: of the final stack,
which the first rung always is, being the library itself. `speed`: against the rung before. `cumulative`: product of the
medians of the rungs in the final stack up to here. `loss_change`: of the evaluation loss after equal samples, with it -
before it."""


class Speed(NamedTuple):
    """Ratios of two rates that were measured in turns, one from each turn: machines drift."""

    median: float
    lowest: float
    highest: float
    interval: Interval
    """The geometric mean with its 95 % t interval on logs."""
    n: int

    @property
    def pays(self) -> bool:
        """Whether the whole interval lies above 1, so that the gain is more than the noise of these turns."""
        return self.interval.low > 1.0


class Sides(NamedTuple):
    """Two trainings in every turn or seed: before a change, and with it."""

    before: DataFrame
    after: DataFrame
    """With the columns of `TRAINING`, a row for each turn."""
    gated: Between | None
    """How their runs compare; None where it is not known which runs they are."""

    @property
    def unlike(self) -> str:
        """Why nothing of them is compared; empty where it is."""
        return "" if self.gated is None else self.gated.unlike

    @property
    def untimed(self) -> str:
        """Why seconds of some turns are not compared; empty where they are."""
        return "" if self.gated is None else self.gated.unlike or self.gated.untimed

    @property
    def speed(self) -> Speed:
        """Of the turns whose seconds are compared; a turn is a seed."""
        rates = [side["samples_per_second"] for side in (self.before, self.after)]
        if self.gated is not None:
            timed = [] if self.unlike else self.gated.timed
            rates = [side.loc[timed] for side in rates]
        return speed_up(*rates)

    def change(self, name: str, level: float = 0.95) -> Interval:
        """Of a number, with the change - before it; without ends where nothing varied but by rounding."""
        differences = np.round(self.after[name] - self.before[name], 12)
        return t_interval(differences[:0] if self.unlike else differences, level)

    def told(self, name: str) -> str:
        """What of them is not compared, and why; empty where all is."""
        if self.gated is None:
            return NOT_KNOWN
        if self.unlike:
            return f"{name} is not comparable with what it is set against: {self.unlike}."
        missing = len(self.after) - len(self.gated.timed)
        return f"{name}: seconds of {missing} turns are not compared: {self.untimed}." if missing else ""


class Stack(NamedTuple):
    """Several rungs together, beside the naive loop on the same seeds."""

    rungs: list[str]
    sides: Sides
    word: str
    reason: str

    @property
    def trainings(self) -> DataFrame:
        return self.sides.after

    @property
    def speed(self) -> Speed:
        return self.sides.speed

    @property
    def keeps_the_score(self) -> bool:
        return self.word in ON_MARGIN


class Ladder(NamedTuple):
    """One task: its rungs, and stacks of them beside the naive loop."""

    given: Mapping[str, Any]
    """As ladder.json has it."""
    rungs: DataFrame
    """With the columns of `RUNGS` and `TRAINING`."""
    naive: DataFrame
    stacks: list[Stack]
    """Of rungs that pay: the first leaves updates as they were, each further one has one rung more."""
    final: Stack
    """See `final_of`."""
    not_compared: list[str]
    """Sentences on trainings that are not compared, and why."""

    @property
    def factors(self) -> list[float]:
        """Of the rungs in the stack."""
        return [rung.speed.median for rung in self.rungs[self.rungs["in_stack"]].itertuples()]

    @property
    def predicted(self) -> float:
        """The product of the rungs in the stack: what they come to if none changes another."""
        return math.prod(self.factors)

    @property
    def num_done(self) -> int:
        """Trainings that came to their end; both sides of a turn count."""
        return 2 * sum(len(rung["after"]) for rung in self.given["rungs"]) + len(self.naive) * (1 + len(self.stacks))

    @property
    def num_planned(self) -> int:
        """Trainings without those of rungs that were left out."""
        return self.num_done + 2 * int(self.given["turns"]) * int((self.rungs["reason"] == NO_MEMORY).sum())

    def epoch_seconds(self, trainings: DataFrame) -> float:
        """The median seconds of an epoch at the measured rates."""
        return float((self.given["epoch"] / trainings["samples_per_second"]).median())


class Ladders(NamedTuple):
    """All that was measured."""

    quick: bool
    machine: Mapping[str, Any]
    ladders: list[Ladder]

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
        return Ladders(found["quick"], found["machine"], [ladder_of(each, folder) for each in found["ladders"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        make_one = "make one: python experiments/speed_ladder.py --quick"
        told = f"holds no ladder ({type(error).__name__}: {error}); {make_one}"
        if (folder / SETTINGS).is_file():
            told = "holds a ladder that is not finished; type the command again that began it"
        raise UsageError(f"{folder} {told}") from error


def ladder_of(given: Mapping[str, Any], folder: Path) -> Ladder:
    """What the measurements of one task show, as the ladder.json of a folder has them."""
    stacks = [
        _stack(stack["rungs"], sides_of(given["naive"], stack["trainings"], folder), given) for stack in given["stacks"]
    ]
    sides = {rung["name"]: sides_of(rung["before"], rung["after"], folder) for rung in given["rungs"]}
    final = final_of(stacks)
    told = [one.told(name) for name, one in sides.items()]
    told += [stack.sides.told(f"The stack up to {stack.rungs[-1]}") for stack in stacks]
    rungs = _rungs(given["rungs"], sides, final.rungs)
    return Ladder(given, rungs, stacks[0].sides.before, stacks, final, [*dict.fromkeys(filter(None, told))])


def sides_of(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], folder: Path) -> Sides:
    """Two sides of a ladder.json, with their runs beside it. A ladder of before 2026-11-27 does not name them, and a
    copied file has none.
    """
    runs = [rows_of({one["run"]: folder / one["run"] for one in side if "run" in one}) for side in (after, before)]
    gated = None
    if all((rows["status"] == DONE).sum() == len(before) for rows in runs):
        asked = [side[0]["asked"] if side else {} for side in (after, before)]
        # how many threads a worker has follows from the workers; the naive loop has as many as torch takes
        gated = between(runs[0], runs[1], {*set_apart(*asked), "threads"})
    tables = [DataFrame(side, columns=[*TRAINING]).astype(float) for side in (before, after)]
    return Sides(tables[0], tables[1], gated)


def final_of(stacks: Sequence[Stack]) -> Stack:
    """The fastest stack whose score is shown to be equivalent; where none is, the one that leaves updates as they were.

    Stacks are tested one after the other, in an order that was decided beforehand, each at the level of a single test,
    up to the first that fails. So a stack that is called equivalent needs no correction for having been chosen (serial
    gatekeeping; Goeman and Solari 2010, "The sequential rejection principle of familywise error control"). With too few
    seeds for a verdict it is the one of all rungs that pay.
    """
    if all(stack.word == "too few seeds" for stack in stacks):
        return stacks[-1]
    return [stacks[0], *itertools.takewhile(lambda stack: stack.keeps_the_score, stacks)][-1]


def speed_up(before: Numbers, after: Numbers) -> Speed:
    """The ratios ``after / before`` of rates, turn by turn, with their median.

    >>> found = speed_up([10.0, 20.0, 40.0], [20.0, 40.0, 160.0])
    >>> found.median, found.lowest, found.highest, f"{found.interval:.2f}"
    (2.0, 2.0, 4.0, '2.52 [0.93, 6.81]')
    """
    ratios = np.asarray(after, float) / np.asarray(before, float)
    if not len(ratios):
        return Speed(math.nan, math.nan, math.nan, t_interval(ratios), 0)
    interval = t_interval(np.log(ratios)).mapped(math.exp)
    if len(ratios) > 1 and np.ptp(ratios) == 0:
        interval = interval._replace(low=interval.estimate, high=interval.estimate)
    return Speed(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), interval, len(ratios))


def pays(rung: Mapping[str, Any], folder: Path) -> bool:
    """Whether a rung of a folder's ladder.json is kept: the interval of the ratios of its rates lies above 1."""
    return sides_of(rung["before"], rung["after"], folder).speed.pays


def training_of(folder: Path, warmup: int, score: str) -> dict[str, Any]:
    """A run as a row of `TRAINING`, with its score before it; the rate is that after `warmup` samples."""
    summary = read_json(folder / "summary.json")
    records = list(read_events(folder / EVENTS))
    arrivals = [record for record in records if record["kind"] == "arrival"]
    first = next(one for one in arrivals if one["total_samples"] >= warmup)
    last = arrivals[-1]
    seconds = last["train_seconds"] - first["train_seconds"]
    workers = summary["memory"]["workers"]
    peaks = [summary["memory"]["leader"], *(peak for _, peak in workers if summary["mode"] != "single")]
    evaluations = [record for record in records if record["kind"] == "evaluate"]
    start, end = ({"loss": one["loss"], **one["metrics"]}[score] for one in (evaluations[0], evaluations[-1]))
    load = summary["machine_load"] or {}
    gpus = (summary["usage"] or {}).get("gpus")
    return {
        "samples_per_second": (last["total_samples"] - first["total_samples"]) / seconds,
        "warmup_seconds": first["train_seconds"],
        "loss": evaluations[-1]["loss"],
        "score": end,
        "score_at_start": start,
        "memory_bytes": sum(memory for memory, _ in peaks),
        "gpu_bytes": sum(gpu for _, gpu in peaks),
        "busy_cores": load["cores"] * load["own_share"] if load else None,
        "busy_gpu": float(np.mean([one["utilisation"] for one in gpus])) if gpus else None,
    }


def _stack(rungs: list[str], sides: Sides, given: Mapping[str, Any]) -> Stack:
    """A margin that is half of what the naive loop gained in all bears no word on the score."""
    naive = sides.before["score"]
    lower = given["lower_is_better"]
    gained = naive.mean() - given["score_at_start"]
    stated = {"margin": given["margin"], "margin_reason": "stated before the measurements"}
    stated |= {"nothing": sides.unlike, "unlike": bool(sides.unlike)}
    question = of_numbers(sides.after["score"], naive, lower=lower, gained=-gained if lower else gained, **stated)
    (row,) = answer([question])
    return Stack(rungs, sides, row.word, row.reason)


def _rungs(given: Sequence[Mapping[str, Any]], sides: Mapping[str, Sides], final: Sequence[str]) -> DataFrame:
    rows = []
    product = 1.0
    for rung in given:
        own = sides[rung["name"]]
        speed = own.speed
        reason = rung["reason"]
        in_stack = not reason and rung["name"] in final
        product *= speed.median if in_stack else 1.0
        word = "kept" if in_stack else "left out for the score"
        if reason:
            word = "not measured"
        elif not speed.n:
            word = NOT_COMPARABLE
            reason = own.untimed
        elif not speed.pays:
            word = "does not pay"
        row = {name: rung[name] for name in ("name", "box", "flags")} | own.after.median().to_dict()
        row |= {"word": word, "reason": reason, "in_stack": in_stack, "speed": speed}
        row |= {"cumulative": product, "loss_change": own.change("loss")}
        rows.append(row)
    return DataFrame(rows, columns=[*RUNGS, *TRAINING])
