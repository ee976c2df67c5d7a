"""A folder of runs as one value: arms, the runs with their places in the study, and what was registered.

Nothing is dropped silently: what is not in a number is in `Study.set_aside` or `Study.problems`, with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.study.run import Run
from asyncsgd.records.events import DIVERGED
from asyncsgd.study.plan import BASELINE

MISSING = "MISSING"
"""Status of a planned run that has no folder."""

MEASURED, VIRTUAL = "measured", "virtual"


@dataclasses.dataclass(frozen=True)
class Pilots:
    """Medians over the pilot runs of a reference arm, from which its target was taken."""

    runs: int
    first_loss: float
    best_loss: float


@dataclasses.dataclass(frozen=True)
class Registration:
    """The pre-registration: analysis.yaml, written before the first test run."""

    reference: str
    """The algorithm that every other one is compared with."""
    endpoint: str
    num_workers: int | None
    clock: str | None
    alpha: float
    margins: Mapping[str, float]
    """Equivalence margins of ``loss`` (nats) and of scores; a missing one: no equivalence test."""
    num_seeds: int | None
    targets: Mapping[str, float]
    """Target loss per reference arm."""
    target_from: str
    sha256: str
    """Of the file's bytes."""
    family: tuple[str, ...] | None = None
    """Arms that are compared with the reference under the primary conditions; None in files that did not name them."""
    seeds: tuple[int, ...] | None = None
    """Of the test runs; None in files that did not name them."""
    config_sha256: str | None = None
    """Of the sweep's config, as in plan.json; None in files that did not record it."""
    control: str | None = None
    """The algorithm of the arms that make updates as small as an asynchronous arm's; None where there is none."""
    pilots: Mapping[str, Pilots] = dataclasses.field(default_factory=dict)
    """By reference arm; empty where the target was given, and in files that did not record them."""
    margin_reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a margin is what it is, by the keys of `margins`; empty in files that give no reason."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One point of the tuning grid of an arm."""

    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    losses: tuple[float | None, ...]
    """One per seed; None: diverged, failed or not there yet."""
    score: float | None
    number: int | None = None
    """Its place in the plan's list, by which tuning runs name it."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """An algorithm under one condition; what the runs say goes before what the plan says."""

    name: str
    algorithm: str
    num_workers: int | None
    clock: str
    speeds: str | None
    batch_size: int | None
    settings: Mapping[str, Any]
    """What tells it from other arms, chosen settings not included."""
    chosen: Mapping[str, Any] | None
    trials: tuple[Trial, ...]

    @property
    def virtual(self) -> bool:
        return self.clock == VIRTUAL


@dataclasses.dataclass(frozen=True, eq=False)
class StudyRun:
    """A run with its place in the study; `run` is None where it was planned and has no folder."""

    name: str
    """Folder below the study's."""
    arm: str
    stage: str
    seed: int | None
    replicate: int = 0
    trial: int | None = None
    parent: str | None = None
    """Folder of the pretraining run that a fine-tuning run started from."""
    finetune_seed: int | None = None
    run: Run | None = None
    misplaced: str = ""
    """What its folder holds in its place, in words; such a run has no `run`."""

    @property
    def status(self) -> str:
        return MISSING if self.run is None else self.run.status

    @functools.cached_property
    def diverged(self) -> bool:
        """Whether training went to infinity: a result, never a missing value."""
        if self.run is None:
            return False
        losses = self.run.evaluations["loss"]
        # it may have come to its end with a loss that is no number, which JSON writes as null
        nowhere = self.run.done and len(losses) > 0 and not math.isfinite(float(losses.iloc[-1]))
        return self.status == DIVERGED or nowhere

    @property
    def usable(self) -> bool:
        """Whether it is a result: it came to its end, or diverged."""
        if self.run is None:
            return False
        return self.diverged or (self.run.done and (self.stage == "finetune" or len(self.run.evaluations) > 0))

    @property
    def unusable_because(self) -> str:
        """Why it is no result; empty where it is one."""
        if self.usable:
            return ""
        if self.run is None:
            return self.misplaced or "planned, and no folder there"
        if self.run.done:
            return "DONE, but it has no evaluation that can be used"
        told = self.run.summary.get("message") or (self.run.problems[0] if self.run.problems else "")
        return f"{self.status}{f': {told}' * bool(told)}"


@dataclasses.dataclass(frozen=True)
class Aside:
    """A folder or an entry that is in no number, and why."""

    name: str
    reason: str
    run: StudyRun | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """Everything that was found in a study's folder."""

    folder: Path
    name: str
    planned: bool
    """Whether plan.json says which runs there should be."""
    arms: tuple[Arm, ...]
    """In the order of tables: as in the plan, or as `analysis.study.run.labels` orders conditions. The baseline is one
    where it was fine-tuned; the run that made the base model is of none."""
    runs: tuple[StudyRun, ...]
    """Sorted by stage, arm, seed, replicate and fine-tuning seed; planned ones without a folder included."""
    registration: Registration | None
    unregistered_because: str
    """Why there is no pre-registration, in words; empty where there is one."""
    unchanged: bool | None
    """Whether analysis.yaml agrees with what plan.json recorded of it; None where nothing can be checked."""
    unverified_because: str
    """Why the plan is not known to be the one that was registered, in words; empty where it is, or nothing was."""
    targets: Mapping[str, float]
    """Declared target losses by reference arm: of the registration, else of the plan."""
    target_from: str
    set_aside: tuple[Aside, ...]
    num_replaced: int
    """Folders named ``.before-N``: earlier attempts, ignored."""
    problems: tuple[str, ...]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def of(self, stage: str, arm: str | None = None) -> list[StudyRun]:
        """The runs of a stage, of one arm if it is given, in order."""
        return [run for run in self.runs if run.stage == stage and arm in (None, run.arm)]


def clocks_of(study: Study) -> tuple[str, ...]:
    """The clocks of the test runs, measured first."""
    there = {arm.clock for arm in study.arms if arm.name != BASELINE and study.of("test", arm.name)}
    return tuple(clock for clock in (MEASURED, VIRTUAL) if clock in there)


def summary_of(run: StudyRun, key: str) -> object:
    """A value of a run's summary; None where there is none."""
    return None if run.run is None else run.run.summary.get(key)
