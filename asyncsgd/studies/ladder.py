"""A speed ladder as a plan that grows: what comes next follows from what the runs that have ended show.

    name: speed_ladder
    base: {mode: single, batch_size: 16}
    seeds: [0, 1, 2, 3, 4, 5, 6, 7]            # of the proof
    ladder:
      tasks: {masked_lm: {data: [pydocs], score: loss, margin: 0.05, samples: 3072, settings: {learning_rate: 1.0e-3}}}
      rungs:                                  # in the order in which they are climbed; the first is always measured
        - {name: the library, box: Dynamic padding}
        - {name: batches of 32, box: Larger batch, change: {batch_size: 32}, same_updates: false}
      turns: 5                                # of the climb
      samples: 1024                           # and so on; `asyncsgd.studies.config.LadderKeys` has all keys

The climb: each rung is trained in turns with the rungs kept before it, or with the naive loop while none is kept.
Whether it pays is the verdict that `climb` is given; the first rung stays, paying or not. The proof: the naive loop
and stacks of the rungs that are kept are trained on `seeds`.

Pure: nothing is run, and nothing read but whether data are there. So a ladder that was killed has the same plan again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncsgd.errors import UsageError
from asyncsgd.studies.arms import Arm, Loop, converted, filled
from asyncsgd.studies.config import LadderConfig, Rung, settings_of, slug_of
from asyncsgd.studies.runs import PlannedRun, Stage, shuffled

PAYS = "pays"
DOES_NOT_PAY = "does not pay"
NOT_COMPARABLE = "not comparable"
NO_MEMORY = "ran out of memory"
DIVERGED = "a training diverged"
MEASURED = (PAYS, DOES_NOT_PAY, NOT_COMPARABLE)
VERDICTS = ("", *MEASURED, NO_MEMORY, DIVERGED)
"""If a rung has one of these words, its trainings are planned; empty: they have not all ended. Any other word is the
reason why the rung is left out."""
FACTS = "facts.json"
"""The file of a ladder with what is known of its texts and its machine."""

Verdict = Callable[[Arm, Arm], str]
"""From two arms, one with the rungs kept before a rung and one with that rung too, to what their trainings show: one of
`VERDICTS`."""


class Devices(NamedTuple):
    """What trainings compute on."""

    kind: str
    """``cpu`` or ``cuda``."""
    number: int
    """GPUs, or cores where there is none."""
    cores: int


def devices_of(machine: Mapping[str, Any]) -> Devices:
    """What trainings compute on, from the file `FACTS`."""
    gpus = len(machine["gpus"])
    return Devices("cuda" if gpus else "cpu", gpus or machine["cores"], machine["cores"])


class Climbed(NamedTuple):
    """A rung that is climbed, or left out."""

    rung: Rung
    before: Arm
    """The arm with the rungs kept before this one, or the naive loop."""
    after: Arm
    """The arm with this rung too."""
    word: str
    """The verdict, or why the rung is left out."""


class Climb(NamedTuple):
    """How far one task has climbed."""

    rungs: list[Climbed]
    """Its rungs up to the first whose trainings have not all ended."""
    proof: list[tuple[list[Rung], Arm]]
    """The arms of the proof with their rungs: the naive loop, and every stack, the safest first. It is empty while
    trainings of rungs have not ended."""


def reason_not_to(rung: Rung, config: LadderConfig, devices: Devices) -> str:
    """Why a rung is not measured here; empty where it is."""
    if rung.box in config.ladder.leave_out:
        return f"left out: {config.ladder.leave_out[rung.box]}"
    if rung.device not in (None, devices.kind):
        return f"it is for {rung.device}, and this is {devices.kind}"
    if devices.number < rung.devices:
        kind = "cores" if devices.kind == "cpu" else "GPUs"
        return f"it needs {rung.devices} {kind}, and here are {devices.number}"
    return ""


def arm_of(
    config: LadderConfig, devices: Devices, task: str, name: str, rungs: Sequence[Rung] | None, samples: int
) -> Arm:
    """The arm that trains with all these rungs.

    The learning rate grows with the square root of the batch, which keeps the noise of AdamW's steps (Malladi et al.
    2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").

    Args:
        name: of the arm, below the task.
        rungs: None: the naive loop trains.
        samples: how many it trains on.

    Raises:
        UsageError: for settings that cannot be, or are missing.
    """
    where = f"arm {task}/{name}"
    given = config.ladder.tasks[task]
    plain = settings_of({**config.base, **given.settings}, where, task)
    for key in ("mode", "batch_size", "learning_rate"):
        if key not in plain:
            raise UsageError(f"{where}: write {key} into base, or into the settings of {task}")
    data = next((path for path in given.data if Path(path).exists()), given.data[-1])
    settings = {**plain, "data": data, "samples": samples}
    num_processes = 2 if devices.kind == "cpu" else devices.number
    for rung in rungs or ():
        settings |= filled(settings_of(rung.change, where, task), num_processes, where)
    settings = {key: value for key, value in settings.items() if value is not None}
    settings = converted(where, settings, task)
    settings["learning_rate"] *= math.sqrt(settings["batch_size"] / plain["batch_size"])
    num_workers = settings.get("nproc", 1)
    settings["threads"] = max(1, devices.cores // num_workers)
    if settings["mode"] == "sync":  # a rung gives the global batch; this mode takes that of one worker
        settings["batch_size"] //= num_workers
    loop: Loop = "naive" if rungs is None else "library"
    _, _, algorithm = name.rpartition("/")
    return Arm(f"{task}/{name}", algorithm, settings, task=task, loop=loop)


def stacks_of(kept: Sequence[Rung]) -> list[list[Rung]]:
    """The stacks of the proof: first the rungs that leave updates as they were, then one more at a time.

    The order is that of the climb. It is decided before any score is known, because a fixed-sequence test, which goes
    through the stacks in this order, needs that.
    """
    same = [rung for rung in kept if rung.same_updates]
    others = [rung for rung in kept if not rung.same_updates]
    return [[*same, *others[:number]] for number in range(len(others) + 1)]


def climb(config: LadderConfig, task: str, devices: Devices, verdict: Verdict) -> Climb:
    """Return how far a task has climbed, by the verdicts that are known."""
    kept: list[Rung] = []
    rungs: list[Climbed] = []
    arm = functools.partial(arm_of, config, devices, task)
    samples = config.ladder.samples + config.ladder.warmup
    for rung in config.ladder.rungs:
        folder = slug_of(rung.name)
        before = arm(f"{folder}/before", kept or None, samples)
        after = arm(f"{folder}/after", [*kept, rung], samples)
        # The first rung is the library in the place of the naive loop, which is measured on any machine.
        reason = reason_not_to(rung, config, devices) if rungs else ""
        word = reason or verdict(before, after)
        rungs.append(Climbed(rung, before, after, word))
        if not word:
            return Climb(rungs, [])
        # If nothing is kept yet, the rung was measured beside the naive loop, and it stays, paying or not.
        if word == PAYS or (word in MEASURED and not kept):
            kept.append(rung)
    samples = config.ladder.tasks[task].samples
    proof: list[tuple[list[Rung], Arm]] = [([], arm("proof/naive", None, samples))]
    for number, stack in enumerate(stacks_of(kept)):
        proof.append((stack, arm(f"proof/stack-{number}", stack, samples)))
    return Climb(rungs, proof)


class Grown(NamedTuple):
    """A ladder's plan as far as it is known."""

    arms: tuple[Arm, ...]
    runs: tuple[PlannedRun, ...]
    given_up: frozenset[str]
    """Folders of the runs of rungs that ran out of memory, whatever became of the runs."""
    words: Mapping[str, str]
    """By task and rung, what each rung has shown, or why it is left out."""


def grown(config: LadderConfig, devices: Devices, verdict: Verdict) -> Grown:
    """The plan that follows from the verdicts that are known."""
    arms: list[Arm] = []
    runs: list[PlannedRun] = []
    given_up: list[str] = []
    words = {}
    for task in config.ladder.tasks:
        climbed = climb(config, task, devices, verdict)
        for rung, before, after, word in climbed.rungs:
            if word:
                words[f"{task}, {rung.name}"] = word
            if word not in VERDICTS:
                continue
            sides = [before, after]
            of_rung = _in_turns(sides, f"{task}/{slug_of(rung.name)}", "climb", range(config.ladder.turns))
            arms += sides
            runs += of_rung
            if word == NO_MEMORY:
                given_up += [run.folder for run in of_rung]
        of_proof = [arm for _, arm in climbed.proof]
        arms += of_proof
        runs += _in_turns(of_proof, f"{task}/proof", "proof", config.seeds)
    return Grown(tuple(arms), tuple(runs), frozenset(given_up), words)


def _in_turns(arms: Sequence[Arm], name: str, stage: Stage, seeds: Iterable[int]) -> list[PlannedRun]:
    """The runs of arms, one of each in a turn, whose number is their seed. Every turn has an order of its own, since
    machines drift.
    """
    runs = []
    for seed in seeds:
        for arm in shuffled(arms, name, seed):
            runs.append(PlannedRun(f"{arm.name}/s{seed}", stage, arm.name, seed))
    return runs
