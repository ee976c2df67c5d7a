"""Arms and runs as plan.json says they were meant; what of it is damaged is left out and told as a problem."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.study.run import Run
from analysis.study.types import MEASURED, VIRTUAL, Arm, Aside, StudyRun, Trial
from asyncsgd.records.events import read_json
from asyncsgd.study.plan import BASELINE, PLAN_SCHEMA, STAGES


@dataclasses.dataclass(frozen=True)
class Plan:
    """plan.json, as ``experiments/sweep.py`` wrote it."""

    study: str
    arms: tuple[Arm, ...]
    runs: tuple[StudyRun, ...]
    """Each as it was planned, without the run."""
    targets: Mapping[str, float]
    config_sha256: str | None
    analysis_sha256: str | None
    """Of analysis.yaml; None where nothing was registered."""


def read_plan(path: Path, problems: list[str]) -> Plan | None:
    """The plan; None (with a problem where there is a file) if there is none to go by."""
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if content["schema"] != PLAN_SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, this version reads {PLAN_SCHEMA}")
        return Plan(
            study=str(content["study"]),
            arms=tuple(map(_planned_arm, content["arms"])),
            runs=tuple(map(_planned_run, content["runs"])),
            targets={str(arm): float(loss) for arm, loss in (content.get("targets") or {}).items()},
            config_sha256=content.get("config_sha256"),
            analysis_sha256=content.get("analysis_sha256"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(
            f"plan.json cannot be read ({error!r}); arms and seeds are taken from the folders' names, and runs that "
            "are missing cannot be counted"
        )
    return None


def by_plan(
    plan: Plan, runs: Sequence[Run], aside: list[Aside], problems: list[str]
) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    arms = {arm.name: arm for arm in plan.arms}
    there = {run.name: run for run in runs}
    for planned in plan.runs:
        if planned.arm not in arms and planned.stage != "base":
            if planned.arm != BASELINE:
                problems.append(f"plan.json has no arm {planned.arm}, but runs of it; it has no settings of its own")
            arms[planned.arm] = Arm(planned.arm, first_part(planned.arm), None, MEASURED, None, None, {}, None, ())
    known = {planned.name for planned in plan.runs}
    aside += [Aside(run.name, "not in plan.json", None) for run in runs if run.name not in known]
    placed = [dataclasses.replace(planned, run=there.get(planned.name)) for planned in plan.runs]
    return tuple(arms.values()), placed


def _planned_arm(entry: Mapping[str, Any]) -> Arm:
    chosen = entry.get("chosen")
    return Arm(
        name=entry["name"],
        algorithm=entry["algorithm"],
        num_workers=entry.get("num_workers"),
        clock=VIRTUAL if entry.get("clock") == VIRTUAL else MEASURED,
        speeds=entry.get("speeds"),
        batch_size=None,
        settings=dict(entry["settings"]),
        chosen=None if chosen is None else dict(chosen),
        trials=tuple(_trial(trial, number) for number, trial in enumerate(entry.get("trials") or ())),
    )


def _trial(entry: Mapping[str, Any], number: int) -> Trial:
    losses = tuple(_number(loss) for loss in entry["losses"])
    return Trial(dict(entry["settings"]), tuple(entry["seeds"]), losses, _number(entry["score"]), number)


def _planned_run(entry: Mapping[str, Any]) -> StudyRun:
    if entry["stage"] not in STAGES:
        raise ValueError(f"there is no stage {entry['stage']!r}")
    return StudyRun(
        name=entry["folder"],
        arm=entry["arm"],
        stage=entry["stage"],
        seed=int(entry["seed"]),
        replicate=int(entry["replicate"]),
        trial=entry["trial"],
        parent=entry["parent"],
        finetune_seed=entry["finetune_seed"],
    )


def first_part(name: str) -> str:
    """The algorithm in an arm's name, as the sweep writes it.

    >>> first_part("ringmaster-w8-virtual")
    'ringmaster'
    """
    return re.sub(r"-w\d+(-.*)?$", "", name)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
