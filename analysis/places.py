"""Which stage, arm and seed a run belongs to: by the plan, by the name of its folder, or by its own settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pandas import DataFrame, Series

from analysis.gate import MENTIONED
from analysis.meanings import asked_of, asked_or_default, meanings_in_runs, means_the_same
from analysis.questions import BASELINE, Plan
from analysis.runs import Columns, each
from asyncsgd.studies.arms import differing, resolve
from asyncsgd.studies.runs import PlannedRun
from asyncsgd.tasks import TASKS

UNREADABLE = "UNREADABLE"
MISSING = "MISSING"
MISPLACED = "MISPLACED"
STUDY_FOLDER = re.compile(r"(?:^|/)(tuning|pilot|test|finetune)/([^/]+)/(?:t(\d+)-)?s(\d+)(?:-r(\d+))?(?:-f(\d+))?$")
"""Matches the folder of a run of a study: stage, arm, trial, seed, replicate and fine-tuning seed."""
OF_THE_MACHINE = ("model", "cache_dir", "run_dir", "runs_dir", "overwrite")
"""Settings that say where something lies: the base model that a study makes has another path in every copy of it."""
NEVER_NAMED = (
    "mode",
    "rule",
    "nproc",
    "workers",
    "clock",
    "batch_size",
    "seed",
    "evaluations",
    "evaluate_every",
    "evaluate_at",
    "eval_samples",
    "run_dir",
    "cache_dir",
    "overwrite",
)
"""Settings that name neither a loose arm nor a row of `compare`: they have a column, belong to a single run, or say how
often it is evaluated."""
NOT_OF_AN_ARM = {
    *NEVER_NAMED,
    "speeds",
    "samples",
    "epochs",
    "seconds",
    "budget_seconds",
    "target_loss",
    "patience",
    "threads",
    "device",
}
"""Settings that do not tell arms of loose runs apart: the seed, the budget and the machine. What `LOOSE_ARM_COLUMNS`
compares is here too, as names have it in other words."""
WITHOUT_ARM = ("before", "trial", "after", "finetune")
"""Stages of a study, and of a chain of trainings, whose runs do not have the settings of an arm."""
PLAN_WINS = ("stage", "arm", "seed", "replicate", "trial", "parent", "finetune_seed", "algorithm")
"""Columns that say where a run belongs. Where plan and run disagree the plan's value is kept."""


def columns_of_missing(path: Path) -> Columns:
    """The columns of a run that is planned and has no folder."""
    return {"path": path, "status": MISSING, "settings": {}, "details": {}, "left_out": "planned, and no folder there"}


def columns_of_plan(entry: PlannedRun, plan: Plan) -> Columns:
    """The columns of a run that its plan gives. Workers, clock and speeds only fill what the run does not say."""
    columns = {key: getattr(entry, key) for key in PLAN_WINS if key != "algorithm"}
    arm = plan.arms.get(entry.arm)
    if arm is None:
        columns["algorithm"] = re.sub(r"-w\d+(-.*)?$", "", entry.arm)
        return columns
    columns["algorithm"] = arm.algorithm
    if entry.stage not in WITHOUT_ARM:
        columns["workers"] = arm.num_workers
        columns["clock"] = arm.clock
        columns["speeds"] = arm.speeds or ""
    return columns


def as_misplaced(row: Columns, plan: Plan) -> Columns:
    """The columns that mark a run as `MISPLACED` if its settings are not the planned ones; otherwise its notes.

    A setting that the run does not record has its default; beside a plan of an older version it is no difference. A
    difference that changes no loss becomes a note.
    """
    if row["status"] in (MISSING, UNREADABLE):
        return {}
    planned_settings = plan.settings.get(row["run"])
    recorded = row["settings"]
    if planned_settings is None:
        expected = _planned_settings(row, plan)
    else:
        expected = {"seed": planned_settings.get("seed")}
    refusals = []
    mentions = []
    for key, planned_value in expected.items():
        value = recorded.get(key)
        if key in OF_THE_MACHINE or value is None or planned_value is None:
            continue
        if not means_the_same(key, value, planned_value):
            refusals.append(f"{key} {value}, not {planned_value}")
    task = row.get("asked_task") or row.get("task")
    if planned_settings is not None and recorded and task in TASKS:
        for key, difference in _unlike_plan(recorded, planned_settings, task):
            if key in MENTIONED:
                mentions.append(difference)
            else:
                refusals.append(difference)
    if refusals:
        return _another_run("; ".join(refusals))
    notes = [row["notes"]] if row.get("notes") else []
    notes += [f"beside its plan: {difference}" for difference in mentions]
    return {"notes": "; ".join(notes)}


def _unlike_plan(
    recorded: Mapping[str, Any], planned_settings: Mapping[str, Any], task: str
) -> Iterator[tuple[str, str]]:
    """Every setting that means another thing in a run than in its plan, with both values."""
    run_and_plan = []
    for settings in (recorded, planned_settings):
        asked = asked_of(settings, {})
        for key in ("threads", "device"):
            if key in settings:
                asked[key] = settings[key]
        run_and_plan.append(SimpleNamespace(asked=asked, task=task))
    run, planned = run_and_plan
    for key in sorted({*run.asked, *planned.asked}):
        meaning, planned_meaning = meanings_in_runs(key, run_and_plan)
        if meaning != planned_meaning:
            value, planned_value = (asked_or_default(key, side) for side in run_and_plan)
            yield key, f"{key} {value}, not {planned_value}"


def _planned_settings(row: Columns, plan: Plan) -> dict[str, Any]:
    """What the plan of an older version says of a run: its seed and its arm's settings, with those that were tuned."""
    name = row["arm"]
    if row["stage"] in WITHOUT_ARM:
        return {}
    settings = plan.tuned_settings_of(name)
    if row["stage"] == "tuning":
        settings = dict(plan.settings_of(name))
        trials = plan.arms[name].trials if name in plan.arms else []
        number = row["trial"]
        if number is not None and number < len(trials):
            settings |= trials[int(number)].settings
    return {"seed": row["seed"], **resolve(settings)}


def _another_run(why: str) -> Columns:
    left_out = f"its folder holds another run: {why}"
    return {"status": MISPLACED, "usable": False, "diverged": False, "left_out": left_out}


def as_wrong_parent(row: Columns, parent: Columns | None) -> Columns:
    """The columns that mark a fine-tuning as `MISPLACED` if it began from another run than the planned one.

    Args:
        parent: the row of the planned run; None or empty where there is none.
    """
    recorded = row["details"].get("parent") or {}
    if row["stage"] != "finetune" or not recorded:
        return {}
    name = Path(str(recorded.get("run") or "base")).name
    planned_name = Path(str(row["parent"] or "base")).name
    if name != planned_name:
        return _another_run(f"it was fine-tuned from {name}, not from {row['parent'] or 'the base model'}")
    recorded_hash = recorded.get("parameters_sha256")
    planned_hash = (parent or {}).get("parameters_sha256")
    if recorded_hash and planned_hash and recorded_hash != planned_hash:
        return _another_run(f"it was fine-tuned from other parameters than {row['parent']} ended with")
    return {}


def columns_of_folder_name(name: str, row: Columns) -> Columns:
    """The columns of a run without a plan, by the name of its folder; any other folder holds a loose test run."""
    found = STUDY_FOLDER.search(name)
    if not found:
        stage = "base" if name == "base" else "test"
        if row.get("task") == "finetuning":
            stage = "finetune"
        return {"stage": stage, "arm": None, "replicate": 0}
    stage, arm, trial, seed, replicate, repetition = found.groups()
    columns = {"stage": stage, "arm": arm, "seed": int(seed), "replicate": int(replicate or 0)}
    if trial:
        columns["trial"] = int(trial)
    if repetition:
        columns["finetune_seed"] = int(repetition)
    if stage == "finetune" and arm != "baseline":
        columns["parent"] = f"{name[: found.start(1)]}test/{arm}/s{seed}"
    return columns


LOOSE_ARM_COLUMNS = ["task", "algorithm", "workers", "batch_size", "clock", "speeds"]
"""Columns that tell loose arms apart before their settings do."""


def place_loose_finetunings(rows: Sequence[Columns]) -> None:
    """Make tests of the loose fine-tunings if they themselves are compared, and not the runs that they began from: if
    none began from a run, or all from one run and they were not trained in one way."""
    loose = [row for row in rows if row["stage"] == "finetune" and row["arm"] is None and "parent" in row]
    parents = set()
    ways = set()
    for row in loose:
        parent = row["details"].get("parent")
        began_from = row["parent"]
        if isinstance(parent, dict):
            began_from = parent.get("parameters_sha256") or began_from
        parents.add(began_from)
        ways.add(tuple(row.get(column) for column in ("rule", *LOOSE_ARM_COLUMNS[1:-1])))  # speeds have spellings
    is_one_way = len(ways) == 1 and not differing([row["settings"] for row in loose], NOT_OF_AN_ARM)
    if parents == {""} or (len(parents) == 1 and not is_one_way):
        for row in loose:
            row["stage"] = "test"
            row["task"] = row.get("asked_task")


def with_arms(runs: DataFrame) -> DataFrame:
    """Give loose runs an arm: those that differ in nothing but their seed, budget and machine share one."""
    is_loose = runs["arm"].isna() & (runs["stage"] == "test")
    if not is_loose.any():
        return runs
    loose = runs[is_loose]
    is_readable = loose["status"] != UNREADABLE
    has_tasks = loose.loc[is_readable, "task"].nunique() > 1
    has_batches = loose.loc[is_readable, "batch_size"].nunique() > 1
    has_speeds = loose.loc[is_readable & (loose["clock"] == "virtual"), "speeds"].nunique() > 1
    names = {}
    for _, alike in loose.groupby(LOOSE_ARM_COLUMNS, dropna=False):
        readable = alike[alike["status"] != UNREADABLE]
        has_rules = readable["rule"].nunique() > 1
        different_settings = differing(readable["settings"], NOT_OF_AN_ARM)
        for run in each(alike):
            parts = [run.rule if has_rules else run.algorithm]
            if has_tasks and run.task:
                parts.append(run.task)
            if not math.isnan(run.workers):
                parts.append(f"w{run.workers:g}")
            if has_batches and not math.isnan(run.batch_size):
                parts.append(f"b{run.batch_size:g}")
            if run.clock == "virtual":
                parts.append("virtual")
                if has_speeds:
                    parts.append(run.speeds or "equal speeds")
            parts += [f"{key} {run.settings.get(key)}" for key in different_settings]
            names[run.run] = "-".join(parts)
    runs.loc[is_loose, "arm"] = Series(names, dtype=object)
    # of several runs of a seed the first by name is in the tests
    runs.loc[is_loose, "replicate"] = runs[is_loose].groupby(["arm", "seed"], dropna=False).cumcount()
    return runs


def with_parents(runs: DataFrame) -> DataFrame:
    """Give loose fine-tuning runs the arm and the seed of the run that they started from."""
    tests = runs[runs["stage"] == "test"]
    loose = runs["arm"].isna() & (runs["stage"] == "finetune")
    runs.loc[loose, "finetune_seed"] = runs.loc[loose, "seed"]
    for name, parent in runs.loc[loose, "parent"].items():
        if not parent:
            runs.loc[name, "arm"] = BASELINE
            continue
        # the folder may have been moved since, so only the end of its path is looked at
        candidates = [test for test in tests.index if Path(test).name == Path(parent).name]
        if len(candidates) == 1:
            found = candidates[0]
            runs.loc[name, ["arm", "seed", "parent"]] = [*tests.loc[found, ["arm", "seed"]], found]
            continue
        what_is_known = "is no test run in this folder"
        if candidates:
            what_is_known = f"may be any of {', '.join(candidates)}"
        runs.loc[name, "left_out"] = f"the run it was fine-tuned from ({parent}) {what_is_known}"
        runs.loc[name, "usable"] = False
        runs.loc[name, "seed"] = math.nan
    runs["arm"] = runs["arm"].astype(object).where(runs["arm"].notna(), "")
    return runs
