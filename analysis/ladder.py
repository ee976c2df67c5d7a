"""What the measurements of ``experiments/speed_ladder.py`` show: which rungs pay, and what they come to together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.judge import ON_MARGIN, answer, of_numbers
from analysis.stats import Interval, Numbers, t_interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_events, read_json

LADDER, SETTINGS = "ladder.json", "settings.json"
"""The measurements of a finished ladder, and what all trainings share."""
NO_MEMORY = "ran out of memory"
"""The reason of a rung whose training did."""
UTILISATION, MEMORY, EPOCH = 0.9, 0.9, 1.2
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
does not pay, left out for the score, or not measured for the `reason`. `in_stack`: of the final stack, which the first
rung always is, being the library itself. `speed`: against the rung before. `cumulative`: product of the medians of the
rungs in the final stack up to here. `loss_change`: of the evaluation loss after equal samples, with it - before it."""


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


class Stack(NamedTuple):
    """Several rungs together, beside the naive loop on the same seeds."""

    rungs: list[str]
    trainings: pd.DataFrame
    speed: Speed
    difference: Interval
    """90 % interval of the score, with it - the naive loop's."""
    word: str
    reason: str

    @property
    def keeps_the_score(self) -> bool:
        return self.word in ON_MARGIN


class Ladder(NamedTuple):
    """One task: its rungs, and stacks of them beside the naive loop."""

    given: Mapping[str, Any]
    """As ladder.json has it."""
    rungs: pd.DataFrame
    """With the columns of `RUNGS` and `TRAINING`."""
    naive: pd.DataFrame
    stacks: list[Stack]
    """Of rungs that pay: the first leaves updates as they were, each further one has one rung more."""
    final: Stack
    """See `final_of`."""

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
        return int(2 * self.rungs["speed"].map(lambda speed: speed.n).sum()) + len(self.naive) * (1 + len(self.stacks))

    @property
    def num_planned(self) -> int:
        """Trainings without those of rungs that were left out."""
        return self.num_done + 2 * int(self.given["turns"]) * int((self.rungs["reason"] == NO_MEMORY).sum())

    def epoch_seconds(self, trainings: pd.DataFrame) -> float:
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
        return Ladders(found["quick"], found["machine"], [ladder_of(each) for each in found["ladders"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        make_one = "make one: python experiments/speed_ladder.py --quick"
        told = f"holds no ladder ({type(error).__name__}: {error}); {make_one}"
        if (folder / SETTINGS).is_file():
            told = "holds a ladder that is not finished; type the command again that began it"
        raise UsageError(f"{folder} {told}") from error


def ladder_of(given: Mapping[str, Any]) -> Ladder:
    """What the measurements of one task show, as ladder.json has them."""
    naive = trainings(given["naive"])
    stacks = [_stack(stack["rungs"], trainings(stack["trainings"]), naive, given) for stack in given["stacks"]]
    final = final_of(stacks)
    return Ladder(given, _rungs(given["rungs"], final.rungs), naive, stacks, final)


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
        return Speed(1.0, math.nan, math.nan, t_interval(ratios), 0)
    interval = t_interval(np.log(ratios)).mapped(math.exp)
    if len(ratios) > 1 and np.ptp(ratios) == 0:
        interval = interval._replace(low=interval.estimate, high=interval.estimate)
    return Speed(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), interval, len(ratios))


def pays(rung: Mapping[str, Any]) -> bool:
    """Whether a rung of ladder.json is kept: the interval of the ratios of its rates lies above 1."""
    return _speed(trainings(rung["before"]), trainings(rung["after"])).pays


def training_of(folder: Path, warmup: int, score: str) -> dict[str, Any]:
    """A run as a row of `TRAINING`, with its score before it; the rate is that after `warmup` samples."""
    summary, records = read_json(folder / "summary.json"), list(read_events(folder / EVENTS))
    arrivals = [record for record in records if record["kind"] == "arrival"]
    first, last = next(one for one in arrivals if one["total_samples"] >= warmup), arrivals[-1]
    seconds, workers = last["train_seconds"] - first["train_seconds"], summary["memory"]["workers"]
    peaks = [summary["memory"]["leader"], *(peak for _, peak in workers if summary["mode"] != "single")]
    evaluations = [record for record in records if record["kind"] == "evaluate"]
    start, end = ({"loss": one["loss"], **one["metrics"]}[score] for one in (evaluations[0], evaluations[-1]))
    load, gpus = summary["machine_load"] or {}, (summary["usage"] or {}).get("gpus")
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


def trainings(given: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(given, columns=[*TRAINING]).astype(float)


def _speed(before: pd.DataFrame, after: pd.DataFrame) -> Speed:
    return speed_up(before["samples_per_second"].to_numpy(), after["samples_per_second"].to_numpy())


def difference(ours: pd.Series, theirs: pd.Series) -> Interval:
    """The 90 % interval of the paired difference; without ends where nothing varied but by rounding."""
    return t_interval(np.round(ours - theirs, 12), 0.9)


def _stack(rungs: list[str], own: pd.DataFrame, naive: pd.DataFrame, given: Mapping[str, Any]) -> Stack:
    """A margin that is half of what the naive loop gained in all bears no word on the score."""
    lower, gained = given["lower_is_better"], naive["score"].mean() - given["score_at_start"]
    stated = {"margin": given["margin"], "margin_reason": "stated before the measurements"}
    scores = own["score"].to_numpy(), naive["score"].to_numpy()
    (row,) = answer([of_numbers(*scores, lower=lower, gained=-gained if lower else gained, **stated)])
    compared = _speed(naive, own), difference(own["score"], naive["score"])
    return Stack(rungs, own, *compared, row["word"], row["reason"])


def _rungs(given: Sequence[Mapping[str, Any]], final: Sequence[str]) -> pd.DataFrame:
    rows, product = [], 1.0
    for rung in given:
        before, after = trainings(rung["before"]), trainings(rung["after"])
        speed, in_stack = _speed(before, after), not rung["reason"] and rung["name"] in final
        product *= speed.median if in_stack else 1.0
        word = "not measured" if rung["reason"] else "does not pay" if not speed.pays else "left out for the score"
        row = {name: rung[name] for name in ("name", "box", "flags", "reason")} | after.median().to_dict()
        row |= {"word": "kept" if in_stack and speed.pays else word, "in_stack": in_stack, "speed": speed}
        row |= {"cumulative": product, "loss_change": t_interval((after["loss"] - before["loss"]).to_numpy())}
        rows.append(row)
    return pd.DataFrame(rows, columns=[*RUNGS, *TRAINING])
