"""Arms and runs as plan.json says they were meant; what of it is damaged is left out and told as a problem."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.study.run import Run
from analysis.study.types import MEASURED, VIRTUAL, Arm, Aside, StudyRun, Trial
from asyncsgd.records.events import read_json
from asyncsgd.study.plan import BASELINE, PLAN_SCHEMA, STAGES

_PLAN_KEYS = (
    *("schema", "study", "config_sha256", "base_model", "arms", "runs"),
    *("targets", "budget_seconds", "analysis_sha256"),
)


def read_plan(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The plan, as far as it is sound; None (with a problem where there is a file) if there is none to go by."""
    if not path.is_file():
        return None
    instead = "arms and seeds are taken from the folders' names, and runs that are missing cannot be counted"
    try:
        plan = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"plan.json cannot be read ({error}); {instead}")
        return None
    if not isinstance(plan, dict) or not isinstance(plan.get("arms"), list) or not isinstance(plan.get("runs"), list):
        problems.append(f"plan.json is damaged: it has no lists of arms and runs; {instead}")
        return None
    schema = plan.get("schema")
    if not isinstance(schema, int) or schema > PLAN_SCHEMA:
        problems.append(f"plan.json has schema {schema!r}, this version reads up to {PLAN_SCHEMA}; {instead}")
        return None
    unknown = sorted(set(plan) - set(_PLAN_KEYS))
    if unknown:
        problems.append(f"plan.json has unknown keys, which are ignored: {', '.join(unknown)}")
    return plan


def by_plan(
    plan: Mapping[str, Any], runs: Sequence[Run], aside: list[Aside], problems: list[str]
) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    arms: dict[str, Arm] = {}
    for entry in plan["arms"]:
        arm = _planned_arm(entry, problems)
        if arm is not None and arm.name in arms:
            problems.append(f"plan.json names the arm {arm.name} twice; the first entry is taken")
        elif arm is not None:
            arms[arm.name] = arm
    there = {run.name: run for run in runs}
    placed = []
    known = set()
    for number, entry in enumerate(plan["runs"]):
        planned = planned_run(entry)
        if planned is None:
            problems.append(f"plan.json: run {number} is damaged and was left out: {str(entry)[:80]}")
            continue
        known.add(planned.name)
        if planned.arm not in arms and planned.stage != "base":
            if planned.arm != BASELINE:
                problems.append(f"plan.json has no arm {planned.arm}, but runs of it; it has no settings of its own")
            arms[planned.arm] = Arm(planned.arm, first_part(planned.arm), None, MEASURED, None, None, {}, None, ())
        placed.append(dataclasses.replace(planned, run=there.get(planned.name)))
    aside += [Aside(run.name, "not in plan.json", None) for run in runs if run.name not in known]
    return tuple(arms.values()), placed


def _planned_arm(entry: Any, problems: list[str]) -> Arm | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        problems.append(f"plan.json: an arm is damaged and was left out: {str(entry)[:80]}")
        return None
    settings = entry.get("settings")
    chosen = entry.get("chosen")
    trials = entry.get("trials")
    sound = [_trial(trial, number) for number, trial in enumerate(trials)] if isinstance(trials, list) else []
    if any(trial is None for trial in sound) or not isinstance(trials, list | None):
        problems.append(f"plan.json: arm {entry['name']} has damaged trials, which were left out")
    return Arm(
        name=entry["name"],
        algorithm=entry["algorithm"] if isinstance(entry.get("algorithm"), str) else first_part(entry["name"]),
        num_workers=count_or_none(entry.get("num_workers")),
        clock=VIRTUAL if entry.get("clock") == VIRTUAL else MEASURED,
        speeds=entry["speeds"] if isinstance(entry.get("speeds"), str) else None,
        batch_size=None,
        settings=dict(settings) if isinstance(settings, Mapping) else {},
        chosen=dict(chosen) if isinstance(chosen, Mapping) else None,
        trials=tuple(trial for trial in sound if trial is not None),
    )


def _trial(entry: Any, number: int) -> Trial | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("settings"), Mapping):
        return None
    seeds, losses = entry.get("seeds") or [], entry.get("losses") or []
    if not isinstance(seeds, list) or not isinstance(losses, list):
        return None
    return Trial(
        dict(entry["settings"]),
        tuple(seed for seed in seeds if isinstance(seed, int)),
        tuple(number_or_none(loss) for loss in losses),
        number_or_none(entry.get("score")),
        number,
    )


def planned_run(entry: Any) -> StudyRun | None:
    if not isinstance(entry, Mapping):
        return None
    folder, arm, stage, seed = (entry.get(key) for key in ("folder", "arm", "stage", "seed"))
    sound = isinstance(folder, str) and isinstance(arm, str) and stage in STAGES and count_or_none(seed) is not None
    if not sound:
        return None
    parent = entry.get("parent")
    return StudyRun(
        name=str(folder),
        arm=str(arm),
        stage=str(stage),
        seed=seed,
        replicate=count_or_none(entry.get("replicate")) or 0,
        trial=count_or_none(entry.get("trial")),
        parent=parent if isinstance(parent, str) else None,
        finetune_seed=count_or_none(entry.get("finetune_seed")),
    )


def first_part(name: str) -> str:
    """The algorithm in an arm's name, as the sweep writes it.

    >>> first_part("ringmaster-w8-virtual")
    'ringmaster'
    """
    return re.sub(r"-w\d+(-.*)?$", "", name)


def count_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def number_or_none(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
