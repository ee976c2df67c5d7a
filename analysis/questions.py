"""What was planned and registered before the runs, and which arms may be compared: the questions of a study."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from pandas import DataFrame, Series

from asyncsgd.records.events import read_json
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.studies.files import PlanFile, PlannedArm, RegisteredQuestion, Registration
from asyncsgd.studies.runs import PlannedRun

DEFAULT_REFERENCE = "sync"
GIVEN = "given in the config"
"""Where a target of no runs comes from, as analysis.yaml has it."""
BASELINE = "baseline"
"""The arm of the base model that was fine-tuned without intermediate training."""


UNREGISTERED = Registration(reference=DEFAULT_REFERENCE, primary=RegisteredQuestion(endpoint=""))
"""What holds where a folder has no registration that can be used."""


class Plan(NamedTuple):
    """What was planned and registered; empty where a folder holds loose runs."""

    name: str
    arms: Mapping[str, PlannedArm]
    """By name."""
    runs: list[PlannedRun]
    registered: Registration
    """As analysis.yaml has it, or `UNREGISTERED`."""
    targets: Mapping[str, float]
    """Declared target losses by reference arm: of the registration, else of the plan."""
    sha256: str
    """Of analysis.yaml."""
    exploratory: str
    """Why nothing can be confirmed; empty where the registration stands."""
    problems: tuple[str, ...] = ()
    """What could not be read."""
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Folder -> what was planned of the run there; empty of older plans."""
    apart: tuple[str, ...] = ()
    """Of loose runs: settings in which the reader says that arms are meant to differ."""

    @property
    def reference(self) -> str:
        """The algorithm that all others are compared with."""
        return self.registered.reference

    def names(self, arm: str) -> bool:
        """Whether the registered comparison is about an arm; without names it is about all."""
        return self.registered.family is None or arm in self.registered.family

    def settings_of(self, arm: str) -> Mapping[str, Any]:
        """The settings that tell an arm from others."""
        return self.arms[arm].settings if arm in self.arms else {}

    def tuned_settings_of(self, arm: str) -> Mapping[str, Any]:
        """With those that tuning chose."""
        return {**self.settings_of(arm), **((self.arms[arm].chosen if arm in self.arms else None) or {})}


NO_PLAN = Plan("", {}, [], UNREGISTERED, {}, "", "")


def read_plan(folder: Path) -> Plan:
    """plan.json and analysis.yaml; the latter counts only where its bytes are those that the plan recorded.

    What a verdict rests on and is missing, or not as it must be, makes a file one that cannot be used.
    """
    problems: list[str] = []
    plan = None
    registered = UNREGISTERED
    if (folder / "plan.json").is_file():
        try:
            plan = msgspec.convert(read_json(folder / "plan.json"), PlanFile)
        except (OSError, ValueError) as error:
            problems.append(f"plan.json cannot be read ({error}): runs that are missing cannot be counted")
    known = plan or PlanFile(study=folder.resolve().name, arms=[], runs=[])
    arms = {arm.name: arm for arm in known.arms}
    why = "there is no analysis.yaml: nothing was declared before the runs"
    sha256 = ""
    file = folder / "analysis.yaml"
    if file.is_file():
        try:
            content = file.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            registered = msgspec.convert(read_yaml(content.decode("utf-8"), "it"), Registration)
            why = _changed(plan, registered, sha256)
        except (OSError, ValueError) as error:
            why = f"analysis.yaml cannot be used: {error}"
        if why:
            problems.append(why)
        problems += [
            f"analysis.yaml registers {arm} in the primary family, and nothing of it is here: it counts as a "
            "comparison that shows nothing (p = 1)"
            for arm in registered.family or ()
            if arms and arm not in arms
        ]
    targets = known.targets if registered is UNREGISTERED else registered.targets
    return Plan(known.study, arms, known.runs, registered, targets, sha256, why, tuple(problems), known.settings)


def _changed(plan: PlanFile | None, registered: Registration, sha256: str) -> str:
    """Why a registration is not known to be what was declared before the runs; empty where it is."""
    if plan is None:
        return "there is no plan.json that could be read: whether all that was registered is here cannot be checked"
    if plan.analysis_sha256 is None:
        return "plan.json has no hash of analysis.yaml: whether it is what was declared before the runs is not known"
    if plan.analysis_sha256 != sha256:
        return f"analysis.yaml was changed after it was written: plan.json recorded {plan.analysis_sha256[:16]}"
    if plan.targets and plan.targets != registered.targets:
        return "analysis.yaml is not what it was when the test runs began: plan.json has other targets"
    if registered.config_sha256 not in (None, plan.config_sha256):
        return "plan.json is of another config than the one that analysis.yaml registers"
    seeds = {stage: {run.seed for run in plan.runs if run.stage == stage} for stage in ("tuning", "pilot", "test")}
    if registered.seeds is not None and set(registered.seeds) != seeds["test"]:
        told = (", ".join(map(str, sorted(one))) for one in (set(registered.seeds), seeds["test"]))
        return "analysis.yaml registers test seeds {}, plan.json has {}".format(*told)
    if not registered.targets or registered.target_from == GIVEN:
        return ""
    shared = seeds["test"] & (seeds["pilot"] or seeds["tuning"])
    if shared:
        return f"the target is of runs on seeds that test it: {', '.join(map(str, sorted(shared)))}"
    return ""


def groups(runs: DataFrame, plan: Plan) -> DataFrame:
    """Arm -> algorithm, workers, clock, speeds, batch size, and the name of its group, of arms that share
    all but the first.

    Arms of one group may be compared. Measured and virtual seconds never meet: the clock is part of a group.
    """
    tests = runs[(runs["stage"] == "test") & (runs["arm"] != "")]
    facts = ["algorithm", "workers", "clock", "speeds", "batch_size", "task"]
    arms = DataFrame([_facts(own[facts]) for _, own in tests.groupby("arm", sort=False)], columns=facts)
    arms.index = pd.Index(list(dict.fromkeys(tests["arm"])), dtype=object)
    absent = {name: _meant(arm) for name, arm in plan.arms.items() if name not in arms.index and name != BASELINE}
    if absent and plan.runs:  # they were planned, and are a part of the family
        arms = pd.concat((arms, DataFrame.from_dict(absent, orient="index", columns=facts)))
    sizes = arms["batch_size"].dropna().unique()
    if len(sizes) == 1:  # an arm of which nothing has run yet has that of the others
        arms["batch_size"] = sizes[0]
    tasks = arms["task"][arms["task"] != ""].nunique() > 1
    names = [_name(arm, batch=len(sizes) > 1, task=tasks) for arm in arms.itertuples()]
    return arms.assign(group=Series(names, index=arms.index, dtype=object))


def _meant(arm: PlannedArm) -> list[Any]:
    """What the plan says of an arm without a run."""
    return [arm.algorithm, arm.num_workers, arm.clock, arm.speeds or "", None, ""]


def _facts(own: DataFrame) -> dict[str, Any]:
    """What most runs of an arm say."""
    known = {name: own[name][own[name].notna() & (own[name] != "")] for name in own}
    most = {name: values.mode().iloc[0] if len(values) else "" for name, values in known.items()}
    return most | {name: float(most[name] or "nan") for name in ("workers", "batch_size")}


def _name(arm: Any, *, batch: bool, task: bool) -> str:
    parts = [_num_workers(arm.workers), f"{arm.clock or 'measured'} clock"]
    if arm.speeds:
        parts.append(arm.speeds)
    if batch:
        parts.append(f"batch {arm.batch_size:g}")
    if task:
        parts.append(arm.task)
    return ", ".join(parts)


def _num_workers(number: float) -> str:
    if math.isnan(number):
        return "unknown workers"
    return "1 worker" if number == 1 else f"{number:g} workers"


def is_primary(plan: Plan, workers: float, clock: str) -> bool:
    """Whether the registered comparison is made under these conditions."""
    wanted = plan.registered.primary
    return wanted.endpoint != "" and wanted.num_workers in (None, workers) and wanted.clock in (None, clock)


def exploratory(runs: DataFrame, arms: DataFrame, plan: Plan) -> str:
    """Why nothing of the study can be called confirmed; empty where the registration stands."""
    if plan.exploratory:
        return plan.exploratory
    here = arms[[is_primary(plan, arm.workers, arm.clock) for arm in arms.itertuples()]]
    if not (here["algorithm"] == plan.reference).any():
        primary = plan.registered.primary
        shown = ", ".join(f"{key} {getattr(primary, key)}" for key in ("num_workers", "clock") if getattr(primary, key))
        return f"the folder has no {plan.reference} arm under the registered conditions ({shown})"
    number = plan.registered.num_seeds
    if number is None:
        return "analysis.yaml registers no number of seeds: how many there are may have been chosen after looking"
    names = here.index[here["algorithm"].eq(plan.reference) | here.index.map(plan.names)]
    tests = runs[(runs["stage"] == "test") & runs["arm"].isin(names)]
    most = tests.groupby("arm")["seed"].nunique().max()
    if most > number:
        return f"{most} seeds were run and {number} registered: seeds added after looking are no confirmation"
    # a run that was begun and lost drops its block; one that was never begun may have been left out on purpose
    there = tests[~tests["status"].isin(("MISSING", "MISPLACED"))]
    begun = there.groupby("arm")["seed"].nunique().reindex(names).fillna(0).min()
    if begun < number:
        return (
            f"{number} seeds were registered and an arm of the primary comparison has {begun:g} so far: stopping early "
            "is a choice made after looking"
        )
    return ""


def labels(arms: DataFrame) -> dict[str, str]:
    """Every arm in the reader's words: its algorithm, and what not all arms of `groups` share."""
    several = {name: arms[name].nunique() > 1 for name in ("workers", "clock", "task")}
    several["batch_size"] = bool((arms.groupby("algorithm")["batch_size"].nunique() > 1).any())
    several["speeds"] = arms.loc[arms["clock"] == "virtual", "speeds"].nunique() > 1
    named = {}
    for arm in arms.itertuples():
        parts = [arm.algorithm]
        if several["workers"] and arm.workers == arm.workers:
            parts.append(f"{arm.workers:g} worker{'s' if arm.workers != 1 else ''}")
        if several["clock"]:
            parts.append("simulated" if arm.clock == "virtual" else "measured")
        if several["speeds"] and arm.clock == "virtual":
            parts.append(arm.speeds or "equal speeds")
        if several["batch_size"]:
            parts.append(f"batch {arm.batch_size:g}")
        if several["task"]:
            parts.append(arm.task)
        named[str(arm.Index)] = ", ".join(map(str, parts))
    counts = Counter(named.values())
    return {name: label if counts[label] == 1 else name for name, label in named.items()}


TIMES = "\N{MULTIPLICATION SIGN}"
SLOW_WORKER = re.compile(r"slow:(?:(?:worker|seconds)=[\d.]+,)*factor=(\d+(?:\.\d+)?)(?:,(?:worker|seconds)=[\d.]+)*")
"""`speeds` that slow one worker down."""


def conditions(group: str) -> str:
    """A group in words.

    >>> conditions("4 workers, virtual clock, slow:worker=0,factor=3")
    'one of 4 workers 3× slower, simulated'
    >>> conditions("4 workers, virtual clock, slow:factor=3.0,worker=0,seconds=1.0, batch 8")
    'one of 4 workers 3× slower, simulated, batch 8'
    """
    slow = SLOW_WORKER.search(group)
    told = SLOW_WORKER.sub("", group).replace("virtual clock", "simulated").replace("measured clock", "measured")
    told = ", ".join(part for part in told.split(", ") if part)
    return f"one of {told.replace(' workers', f' workers {float(slow[1]):g}{TIMES} slower', 1)}" if slow else told
