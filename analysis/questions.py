"""What was planned and registered before the runs, and in which groups arms are compared."""

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
"""The value of `target_from` in analysis.yaml where the config itself names the target loss."""
BASELINE = "baseline"
"""The arm of the base model that was fine-tuned without intermediate training."""
GROUP_COLUMNS = ["algorithm", "workers", "clock", "speeds", "batch_size", "task"]
"""Columns of `groups`. Arms of one group are equal in all of them but the first."""
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
    """The hash of analysis.yaml."""
    why_exploratory: str
    """Why nothing can be confirmed; empty where the registration stands.

    `read_plan` knows the reasons that are in plan.json and analysis.yaml. Before questions are judged, `analysis.load`
    puts here what the function `why_exploratory` says, which adds those that are in the runs.
    """
    problems: tuple[str, ...] = ()
    """What could not be read."""
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Folder -> the planned settings of the run there. It is empty in a plan that an older version wrote."""
    arms_differ_in: tuple[str, ...] = ()
    """The settings in which arms of loose runs are meant to differ, as the reader names them."""

    @property
    def reference(self) -> str:
        """The algorithm that all others are compared with."""
        return self.registered.reference

    def is_in_family(self, arm: str) -> bool:
        """Whether the registered comparison is about an arm; a registration without names is about all arms."""
        return self.registered.family is None or arm in self.registered.family

    def settings_of(self, arm: str) -> Mapping[str, Any]:
        """The settings that tell an arm from others."""
        if arm in self.arms:
            return self.arms[arm].settings
        return {}

    def tuned_settings_of(self, arm: str) -> Mapping[str, Any]:
        """The settings that tell an arm from others, and over them those that tuning chose."""
        if arm not in self.arms:
            return {}
        return {**self.settings_of(arm), **(self.arms[arm].chosen or {})}


NO_PLAN = Plan("", {}, [], UNREGISTERED, {}, "", "")


def read_plan(folder: Path) -> Plan:
    """plan.json and analysis.yaml. Where the bytes of analysis.yaml are not those that the plan recorded, everything is
    exploratory; its targets and margins are used all the same.

    A file that lacks a required key, or holds a value of another type there, is not used, and `problems` says so.
    """
    problems: list[str] = []
    plan = None
    registered = UNREGISTERED
    if (folder / "plan.json").is_file():
        try:
            plan = msgspec.convert(read_json(folder / "plan.json"), PlanFile)
        except (OSError, ValueError) as error:
            problems.append(f"plan.json cannot be read ({error}): runs that are missing cannot be counted")
    plan_or_empty = plan or PlanFile(study=folder.resolve().name, arms=[], runs=[])
    arms = {arm.name: arm for arm in plan_or_empty.arms}
    why = "there is no analysis.yaml: nothing was declared before the runs"
    sha256 = ""
    file = folder / "analysis.yaml"
    if file.is_file():
        try:
            content = file.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            # an error of read_yaml begins with `name`; the whole is "analysis.yaml cannot be used: it ..."
            written = read_yaml(content.decode("utf-8"), name="it")
            registered = msgspec.convert(written, Registration)
            why = _why_not_registered(plan, registered, sha256)
        except (OSError, ValueError) as error:
            why = f"analysis.yaml cannot be used: {error}"
        if why:
            problems.append(why)
        for arm in registered.family or ():
            if arms and arm not in arms:
                problems.append(
                    f"analysis.yaml registers {arm} in the primary family, and nothing of it is here: it counts as a "
                    "comparison that shows nothing (p = 1)"
                )
    return Plan(
        name=plan_or_empty.study,
        arms=arms,
        runs=plan_or_empty.runs,
        registered=registered,
        targets=plan_or_empty.targets if registered is UNREGISTERED else registered.targets,
        sha256=sha256,
        why_exploratory=why,
        problems=tuple(problems),
        settings=plan_or_empty.settings,
    )


def _why_not_registered(plan: PlanFile | None, registered: Registration, sha256: str) -> str:
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
        registered_seeds = ", ".join(map(str, sorted(set(registered.seeds))))
        planned_seeds = ", ".join(map(str, sorted(seeds["test"])))
        return f"analysis.yaml registers test seeds {registered_seeds}, plan.json has {planned_seeds}"
    if not registered.targets or registered.target_from == GIVEN:
        return ""
    # the target is of the pilots, and where there are none, of the tuning runs
    shared = seeds["test"] & (seeds["pilot"] or seeds["tuning"])
    if shared:
        return f"the target is of runs on seeds that test it: {', '.join(map(str, sorted(shared)))}"
    return ""


def groups(runs: DataFrame, plan: Plan) -> DataFrame:
    """A row for each arm: the columns of `GROUP_COLUMNS` and `group`, the name of its group.

    The arms of one group are equal in all these columns but the algorithm, and may be compared. Measured and virtual
    seconds never meet: the clock is part of a group.
    """
    tests = runs[(runs["stage"] == "test") & (runs["arm"] != "")]
    rows = [_facts_of_runs(of_arm) for _, of_arm in tests.groupby("arm", sort=False)]
    arms = DataFrame(rows, columns=GROUP_COLUMNS)
    arms.index = pd.Index(list(dict.fromkeys(tests["arm"])), dtype=object)
    without_run = {}
    for name, arm in plan.arms.items():
        if name not in arms.index and name != BASELINE:
            without_run[name] = _facts_of_plan(arm)
    if without_run and plan.runs:  # they were planned, and are a part of the family
        arms = pd.concat((arms, DataFrame.from_dict(without_run, orient="index", columns=GROUP_COLUMNS)))
    sizes = arms["batch_size"].dropna().unique()
    if len(sizes) == 1:  # an arm of which nothing has run yet has that of the others
        arms["batch_size"] = sizes[0]
    has_tasks = arms["task"][arms["task"] != ""].nunique() > 1
    names = [_group_name(arm, with_batch=len(sizes) > 1, with_task=has_tasks) for arm in arms.itertuples()]
    return arms.assign(group=Series(names, index=arms.index, dtype=object))


def _facts_of_plan(arm: PlannedArm) -> list[Any]:
    """The values of `GROUP_COLUMNS` that the plan gives an arm without a run. Its batch size and its task are not
    known. Where arms differ in one of them, the arm is in a group of its own.

    >>> _facts_of_plan(PlannedArm(name="sync-w4", algorithm="sync", settings={}, num_workers=4))
    ['sync', 4, 'measured', '', nan, '']
    """
    return [arm.algorithm, arm.num_workers, arm.clock, arm.speeds or "", math.nan, ""]


def _facts_of_runs(of_arm: DataFrame) -> dict[str, Any]:
    """The values of `GROUP_COLUMNS` that are the commonest among the runs of an arm."""
    commonest: dict[str, Any] = {}
    for name in GROUP_COLUMNS:
        values = of_arm[name]
        known = values[values.notna() & (values != "")]
        commonest[name] = known.mode().iloc[0] if len(known) else ""
    for name in ("workers", "batch_size"):
        commonest[name] = float(commonest[name] or "nan")
    return commonest


def _group_name(arm: Any, *, with_batch: bool, with_task: bool) -> str:
    """The name of the group of an arm.

    >>> from types import SimpleNamespace as Row
    >>> arm = Row(workers=4, clock="virtual", speeds="", batch_size=math.nan, task="")
    >>> _group_name(arm, with_batch=True, with_task=True)
    '4 workers, virtual clock, unknown batch, unknown task'
    """
    parts = [_num_workers(arm.workers), f"{arm.clock or 'measured'} clock"]
    if arm.speeds:
        parts.append(arm.speeds)
    if with_batch:
        parts.append("unknown batch" if math.isnan(arm.batch_size) else f"batch {arm.batch_size:g}")
    if with_task:
        parts.append(arm.task or "unknown task")
    return ", ".join(parts)


def _num_workers(number: float) -> str:
    if math.isnan(number):
        return "unknown workers"
    if number == 1:
        return "1 worker"
    return f"{number:g} workers"


def is_primary(plan: Plan, workers: float, clock: str) -> bool:
    """Whether the registered comparison is made under these conditions."""
    wanted = plan.registered.primary
    return wanted.endpoint != "" and wanted.num_workers in (None, workers) and wanted.clock in (None, clock)


def why_exploratory(runs: DataFrame, arms: DataFrame, plan: Plan) -> str:
    """Why nothing of the study can be called confirmed; empty where the registration stands and its runs keep to it."""
    if plan.why_exploratory:
        return plan.why_exploratory
    primary_arms = arms[[is_primary(plan, arm.workers, arm.clock) for arm in arms.itertuples()]]
    is_reference = primary_arms["algorithm"] == plan.reference
    if not is_reference.any():
        primary = plan.registered.primary
        shown = ", ".join(f"{key} {getattr(primary, key)}" for key in ("num_workers", "clock") if getattr(primary, key))
        conditions_in_words = f" under the registered conditions ({shown})" if shown else ""
        return f"the folder has no {plan.reference} arm{conditions_in_words}"
    num_registered = plan.registered.num_seeds
    if num_registered is None:
        return "analysis.yaml registers no number of seeds: how many there are may have been chosen after looking"
    names = primary_arms.index[is_reference | primary_arms.index.map(plan.is_in_family)]
    tests = runs[(runs["stage"] == "test") & runs["arm"].isin(names)]
    num_planned = tests.groupby("arm")["seed"].nunique().max()
    if num_planned > num_registered:
        counts = f"{num_planned} seeds were planned and {num_registered} registered"
        return f"{counts}: seeds added after looking are no confirmation"
    # a run that was begun and lost drops its seed from both arms, whereas one that was never begun may have been left
    # out on purpose
    begun = tests[~tests["status"].isin(("MISSING", "MISPLACED"))]
    num_begun = begun.groupby("arm")["seed"].nunique().reindex(names).fillna(0).min()
    if num_begun < num_registered:
        return (
            f"{num_registered} seeds were registered and an arm of the primary comparison has {num_begun:g} so far: "
            "stopping early is a choice made after looking"
        )
    return ""


def labels(arms: DataFrame) -> dict[str, str]:
    """Every arm in the reader's words: its algorithm, and the columns in which the arms of `groups` differ."""
    differ_in = {name: arms[name].nunique() > 1 for name in ("workers", "clock", "task")}
    # arms of two algorithms are told apart by the names of these, whatever their batches are
    differ_in["batch_size"] = bool((arms.groupby("algorithm")["batch_size"].nunique() > 1).any())
    differ_in["speeds"] = arms.loc[arms["clock"] == "virtual", "speeds"].nunique() > 1
    label_of = {}
    for arm in arms.itertuples():
        parts = [arm.algorithm]
        if differ_in["workers"] and not math.isnan(arm.workers):
            parts.append(f"{arm.workers:g} worker{'s' if arm.workers != 1 else ''}")
        if differ_in["clock"]:
            parts.append("simulated" if arm.clock == "virtual" else "measured")
        if differ_in["speeds"] and arm.clock == "virtual":
            parts.append(arm.speeds or "equal speeds")
        if differ_in["batch_size"] and not math.isnan(arm.batch_size):
            parts.append(f"batch {arm.batch_size:g}")
        if differ_in["task"] and arm.task:
            parts.append(arm.task)
        label_of[str(arm.Index)] = ", ".join(map(str, parts))
    counts = Counter(label_of.values())
    return {name: label if counts[label] == 1 else name for name, label in label_of.items()}


TIMES = "\N{MULTIPLICATION SIGN}"
SLOW_WORKER = re.compile(r"slow:(?:(?:worker|seconds)=[\d.]+,)*factor=(\d+(?:\.\d+)?)(?:,(?:worker|seconds)=[\d.]+)*")
"""`speeds` that slow one worker down."""


def conditions(group: str) -> str:
    """A group in words.

    >>> conditions("4 workers, virtual clock, slow:worker=0,factor=3")
    'one of 4 workers 3× slower, simulated'
    >>> conditions("4 workers, virtual clock, slow:factor=3.0,worker=0,seconds=1.0, batch 8")
    'one of 4 workers 3× slower, simulated, batch 8'
    >>> conditions("1 worker, virtual clock, slow:worker=0,factor=3")
    '1 worker 3× slower, simulated'
    """
    slow = SLOW_WORKER.search(group)
    words = SLOW_WORKER.sub("", group).replace("virtual clock", "simulated").replace("measured clock", "measured")
    words = ", ".join(part for part in words.split(", ") if part)
    if slow is None:
        return words
    slower = f"{float(slow[1]):g}{TIMES} slower"
    if words.startswith("1 worker,"):
        return words.replace("1 worker", f"1 worker {slower}", 1)
    return f"one of {words.replace(' workers', f' workers {slower}', 1)}"
