"""What the runs of a speed ladder show: which rungs pay, and what they come to together.

The folder is one of ``asyncsgd study speed_ladder``; all is read from its run folders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from pandas import DataFrame

from analysis.answers import ON_MARGIN, answer_family, question_of_numbers
from analysis.gate import ArmsCompared, compare_arms, settings_that_differ
from analysis.read import rows_of
from analysis.run_files import read_run
from analysis.stats import Interval, Numbers, t_interval
from asyncsgd.errors import OUT_OF_MEMORY, UsageError
from asyncsgd.records.events import DONE, EVENTS, FAILED, FINISHED, read_events, read_json
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.studies.arms import Arm, filled, flags_of
from asyncsgd.studies.config import LadderConfig, typed
from asyncsgd.studies.ladder import (
    DIVERGED,
    DOES_NOT_PAY,
    FACTS,
    MEASURED,
    NO_MEMORY,
    NOT_COMPARABLE,
    PAYS,
    Climbed,
    Devices,
    Verdict,
    climb,
    devices_of,
)

NOT_MEASURED = "not measured"
MIN_BUSY = 0.9
"""The least share of the processors that has to be busy. It was stated before the runs, as the next two."""
MAX_MEMORY = 0.9
"""The largest share of the memory that may be used."""
MAX_EPOCH = 1.2
"""How many times the predicted seconds an epoch may take."""


class Training(NamedTuple):
    """A row of a table of measured trainings, one for each turn or seed. What is not known is nan."""

    samples_per_second: float
    """The rate after the warm-up."""
    warmup_seconds: float
    """The seconds of the warm-up, in which a compiler works."""
    loss: float
    """The loss at the end."""
    score: float
    """The score at the end."""
    memory_gib: float
    """The sum of the peaks of all processes."""
    gpu_gib: float
    """The same on GPUs."""
    busy_cores: float
    busy_gpu: float
    """The mean share of the GPUs that was busy when they were read."""


TRAINING = Training._fields


class RungRow(NamedTuple):
    """A row of the table of rungs, which also has the medians of `Training` with the rung."""

    name: str
    box: str
    """The line of the checklist that it belongs to."""
    flags: str
    word: str
    """`kept`, `does not pay`, `left out for the score`; or, for a `reason`, `not measured` or `not comparable`."""
    in_stack: bool
    """Whether it is in the final stack. The first rung, the library itself, always is."""
    reason: str
    speed: Speed
    """The rates against those of the rung before."""
    cumulative: float
    """The product of the medians of the rungs of the final stack up to here."""
    loss_change: Interval
    """The evaluation loss after equal samples, with the rung - before it."""


class Speed(NamedTuple):
    """The ratios of two rates. Both are measured in each turn, since a machine may become slower or faster."""

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
    """Rows of `Training`, by turn or seed."""
    gated: ArmsCompared
    """How their runs compare."""

    @property
    def unlike(self) -> str:
        """Why the trainings are not compared; empty where they are."""
        return self.gated.why_not_comparable

    @property
    def untimed(self) -> str:
        """Why the seconds of some turns are not compared; empty where all are."""
        return self.gated.why_not_comparable or self.gated.why_untimed

    @property
    def speed(self) -> Speed:
        """The speed-up over the turns whose seconds are compared; a turn is a seed."""
        timed = [] if self.unlike else self.gated.timed_seeds
        rates_before = self.before["samples_per_second"].loc[timed]
        return speed_up(rates_before, self.after["samples_per_second"].loc[timed])

    def change(self, name: str, level: float = 0.95) -> Interval:
        """The difference of a number, after - before; without ends where all differences are equal up to rounding."""
        differences = np.round(self.after[name] - self.before[name], 12)
        return t_interval(differences[:0] if self.unlike else differences, level)

    def about_not_compared(self, name: str) -> str:
        """What of the trainings is not compared, and why; empty where all is."""
        if self.unlike:
            return f"{name} is not comparable with what it is set against: {self.unlike}."
        missing = len(self.after) - len(self.gated.timed_seeds)
        if not missing:
            return ""
        turns = "1 turn" if missing == 1 else f"{missing} turns"
        return f"{name}: the seconds of {turns} are not compared: {self.untimed}."


NOTHING = DataFrame(columns=[*TRAINING], dtype=float)
UNMEASURED = Sides(NOTHING, NOTHING, ArmsCompared({}))
"""The sides of a rung that was left out."""


class Stack(NamedTuple):
    """Several rungs together, compared with the naive loop on the same seeds."""

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
    """One task: its rungs, and stacks of rungs compared with the naive loop."""

    given: Mapping[str, Any]
    """What was stated before the runs, and facts on the texts: `task`, `data`, `epoch`, `longest`, `operations`,
    `score`, `score_at_start`, `margin`, `loss_margin`, `turns`, `climb_samples`, and `samples` of the proof."""
    rungs: DataFrame
    """Its rows are `RungRow` and `Training`."""
    naive: DataFrame
    stacks: list[Stack]
    """Stacks of rungs that pay. The first one leaves updates as they were; each further one has one rung more."""
    final: Stack
    """The stack that `final_of` chooses."""
    not_compared: list[str]
    """Sentences on trainings that are not compared, and why."""

    @property
    def factors(self) -> list[float]:
        """The median ratio of each rung in the final stack."""
        return [rung.speed.median for rung in self.rungs[self.rungs["in_stack"]].itertuples()]

    @property
    def predicted(self) -> float:
        """The product of these factors: the speed-up of the final stack if no rung changes what another gains."""
        return math.prod(self.factors)

    @property
    def num_done(self) -> int:
        """The number of trainings that came to their end; a turn has two."""
        is_measured = ~self.rungs["word"].eq(NOT_MEASURED)
        turns = int(self.given["turns"])
        return 2 * turns * int(is_measured.sum()) + len(self.naive) * (1 + len(self.stacks))

    @property
    def num_planned(self) -> int:
        """The number of trainings that were meant to be made."""
        return self.num_done + 2 * int(self.given["turns"]) * int((self.rungs["reason"] == NO_MEMORY).sum())

    def epoch_seconds(self, trainings: DataFrame) -> float:
        """The median seconds of an epoch at the measured rates."""
        return float((self.given["epoch"] / trainings["samples_per_second"]).median())


class Ladders(NamedTuple):
    """The ladders of all tasks, which were measured on one machine."""

    machine: Mapping[str, Any]
    ladders: list[Ladder]

    @property
    def num_seeds(self) -> int:
        return min(len(ladder.naive) for ladder in self.ladders)


def read(folder: Path) -> Ladders:
    """Read the folder of a ladder and compute what it shows.

    Raises:
        UsageError: if it is no folder of a ladder, or one that was not finished.
    """
    try:
        given = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
        config: LadderConfig = typed(given, LadderConfig, "config.yaml")
        facts = read_json(folder / FACTS)
        machine = facts["machine"]
        devices = devices_of(machine)
        ladders = [_read_task(folder, config, task, facts["tasks"][task], devices) for task in config.ladder.tasks]
    except (OSError, ValueError, KeyError, TypeError) as error:
        make_one = "make one: asyncsgd study speed_ladder --quick"
        raise UsageError(f"{folder} holds no ladder ({type(error).__name__}: {error}); {make_one}") from error
    return Ladders(machine, ladders)


def _read_task(folder: Path, config: LadderConfig, task: str, facts: Mapping[str, Any], devices: Devices) -> Ladder:
    """The ladder of one task, from its run folders."""
    found = climb(config, task, devices, verdict_in(folder, config))
    proof_runs: dict[str, Path] = {}
    for _, arm in found.proof:
        proof_runs |= runs_of_arm(folder, arm, config.seeds)
    if {*rows_of(proof_runs)["status"]} != {DONE}:
        raise UsageError(
            f"{folder} holds a ladder that is not finished; type the command again that began it, with --retry where a "
            "run FAILED"
        )
    (_, naive), *stacks = found.proof
    rungs = []
    for climbed in found.rungs:
        sides = UNMEASURED
        if climbed.word in MEASURED:
            sides = sides_of(folder, config, climbed.before, climbed.after, range(config.ladder.turns))
        rungs.append((climbed, sides))
    proof = []
    for stack, arm in stacks:
        names = [rung.name for rung in stack]
        proof.append((names, sides_of(folder, config, naive, arm, config.seeds)))
    given = {
        **structs.asdict(config.ladder.tasks[task]),
        **facts,
        "task": task,
        "climb_samples": config.ladder.samples,
        "loss_margin": config.ladder.loss_margin,
        "turns": config.ladder.turns,
        "score_at_start": proof[0][1].after["score_at_start"].iloc[0],
    }
    return ladder_of(given, rungs, proof)


def ladder_of(
    given: Mapping[str, Any], rungs: Sequence[tuple[Climbed, Sides]], proof: Sequence[tuple[list[str], Sides]]
) -> Ladder:
    """The ladder of one task, from its measurements.

    Args:
        given: as `Ladder` has it.
        rungs: each rung with its measurements.
        proof: the names of the rungs of every stack, and its measurements with those of the naive loop.
    """
    stacks = [_stack(names, sides, given) for names, sides in proof]
    final = final_of(stacks)
    reasons = [sides.about_not_compared(climbed.rung.name) for climbed, sides in rungs]
    reasons += [stack.sides.about_not_compared(f"The stack up to {stack.rungs[-1]}") for stack in stacks]
    table = _rungs(rungs, final.rungs)
    return Ladder(given, table, stacks[0].sides.before, stacks, final, [*dict.fromkeys(filter(None, reasons))])


def runs_of_arm(folder: Path, arm: Arm, seeds: Sequence[int]) -> dict[str, Path]:
    """The folders of the runs of an arm, by the names that they have below the study's."""
    return {f"{arm.name}/s{seed}": folder / arm.name / f"s{seed}" for seed in seeds}


def sides_of(folder: Path, config: LadderConfig, before: Arm, after: Arm, seeds: Sequence[int]) -> Sides:
    """The trainings of two arms, all of whose runs are DONE."""
    score = config.ladder.tasks[after.task].score
    tables = []
    rows = []
    for arm in (before, after):
        paths = runs_of_arm(folder, arm, seeds)
        rows.append(rows_of(paths))
        trainings = [training_of(path, config.ladder.warmup, score) for path in paths.values()]
        tables.append(DataFrame(trainings, index=[*seeds]).astype(float))
    # how many threads a worker has follows from the workers; the naive loop has as many as torch takes
    allowed_differences = settings_that_differ(after.settings, before.settings) | {"threads"}
    return Sides(tables[0], tables[1], compare_arms(rows[1], rows[0], allowed_differences))


def verdict_in(folder: Path, config: LadderConfig) -> Verdict:
    """A function that gives the verdict on a rung from the run folders of a study.

    A rung pays if the whole interval of the mean ratio of its rates lies above 1.
    """

    def verdict(before: Arm, after: Arm) -> str:
        turns = range(config.ladder.turns)
        rows = rows_of({**runs_of_arm(folder, before, turns), **runs_of_arm(folder, after, turns)})
        is_failed = rows["status"].eq(FAILED)
        if rows.loc[is_failed, "left_out"].str.contains(OUT_OF_MEMORY, regex=False).any():
            return NO_MEMORY
        statuses = {*rows["status"]}
        if not statuses <= {*FINISHED}:
            return ""
        if statuses != {DONE}:
            return DIVERGED
        speed = sides_of(folder, config, before, after, turns).speed
        if not speed.n:
            return NOT_COMPARABLE
        return PAYS if speed.pays else DOES_NOT_PAY

    return verdict


def final_of(stacks: Sequence[Stack]) -> Stack:
    """The last stack before the first whose score is not shown to be equivalent, or the first stack.

    Stacks are tested one after the other, in an order that was decided beforehand, each at the level of a single test,
    up to the first that fails. So a stack that is called equivalent needs no correction for having been chosen (serial
    gatekeeping; Goeman and Solari 2010, "The sequential rejection principle of familywise error control"). With too few
    seeds for a verdict it is the stack of all rungs that pay.
    """
    if all(stack.word == "too few seeds" for stack in stacks):
        return stacks[-1]
    final = stacks[0]
    for stack in stacks:
        if not stack.keeps_the_score:
            break
        final = stack
    return final


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


def training_of(folder: Path, warmup: int, score: str) -> dict[str, Any]:
    """A run as a row of `Training`, with its score before it; the rate is that after `warmup` samples."""
    row, curve = read_run(folder)
    scores = curve["loss" if score == "loss" else f"metric.{score}"]
    arrivals = [record for record in read_events(folder / EVENTS) if record["kind"] == "arrival"]
    first = next(arrival for arrival in arrivals if arrival["total_samples"] >= warmup)
    last = arrivals[-1]
    seconds = last["train_seconds"] - first["train_seconds"]
    summary = read_json(folder / "summary.json")
    load = summary["machine_load"] or {"cores": math.nan, "own_share": math.nan}
    gpus = (summary["usage"] or {}).get("gpus") or [{"utilisation": math.nan}]
    return {
        "samples_per_second": (last["total_samples"] - first["total_samples"]) / seconds,
        "warmup_seconds": first["train_seconds"],
        "loss": row["loss"],
        "score": scores.iloc[-1],
        "score_at_start": scores.iloc[0],
        "memory_gib": row["memory_gib"],
        "gpu_gib": row["gpu_gib"],
        "busy_cores": load["cores"] * load["own_share"],
        "busy_gpu": float(np.mean([gpu["utilisation"] for gpu in gpus])),
    }


def _stack(rungs: list[str], sides: Sides, given: Mapping[str, Any]) -> Stack:
    """A stack with what its score shows: nothing if the margin is half of all that the naive loop gained."""
    naive = sides.before["score"]
    lower = given["score"] == "loss"
    rise = naive.mean() - given["score_at_start"]
    question = question_of_numbers(
        sides.after["score"],
        naive,
        lower=lower,
        gained=-rise if lower else rise,
        margin=given["margin"],
        margin_reason="stated before the measurements",
        why_no_test=sides.unlike,
        is_not_comparable=bool(sides.unlike),
    )
    (row,) = answer_family([question])
    return Stack(rungs, sides, row.word, row.reason)


def _rungs(measured: Sequence[tuple[Climbed, Sides]], final: Sequence[str]) -> DataFrame:
    rows = []
    product = 1.0
    for climbed, sides in measured:
        rung = climbed.rung
        speed = sides.speed
        reason = "" if climbed.word in MEASURED else climbed.word
        in_stack = not reason and rung.name in final
        word = "left out for the score"
        if in_stack:
            word = "kept"
            product *= speed.median
        if reason:
            word = NOT_MEASURED
        elif not speed.n:
            word = NOT_COMPARABLE
            reason = sides.untimed
        elif not speed.pays:
            word = "does not pay"
        change = filled(rung.change, climbed.after.settings.get("nproc", 1), rung.name)
        flags = " ".join(flags_of(change)) or "always on"
        row = {"name": rung.name, "box": rung.box, "flags": flags} | sides.after.median().to_dict()
        row |= {"word": word, "reason": reason, "in_stack": in_stack, "speed": speed, "cumulative": product}
        row["loss_change"] = sides.change("loss")
        rows.append(row)
    return DataFrame(rows, columns=[*RungRow._fields, *TRAINING])
