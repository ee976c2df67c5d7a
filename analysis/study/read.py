"""Load a folder of runs as a `Study`: which run belongs to which arm, stage, seed and replicate, what was registered.

Two kinds of folders are studies: what ``experiments/sweep.py`` leaves (plan.json, analysis.yaml, ``tuning/``, ``test/``
and ``finetune/``), and any folder with run folders at any depth, whose arms are then what the runs' settings say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.study.placement import copies, in_their_place, with_facts, with_replicates
from analysis.study.plan import by_plan, read_plan
from analysis.study.registration import declared_targets, read_registration, unchanged, unverified
from analysis.study.run import Run, load_runs
from analysis.study.types import Aside, Study, StudyRun
from analysis.study.unplanned import LAYOUT, by_layout, by_settings
from asyncsgd.errors import UsageError
from asyncsgd.study.plan import STAGES

_REPLACED = re.compile(r"\.before-\d+$")


def load_study(folder: Path | str) -> Study:
    """Load a study; damage is told in `Study.problems` and never hides the rest.

    Args:
        folder: what ``experiments/sweep.py --out`` wrote, or any folder with run folders.

    Returns:
        The study. It depends on what the files hold, not on the order in which the system lists them.

    Raises:
        UsageError: if there is no such folder, neither a run nor a plan in it, or nothing but whole sweeps.
    """
    folder = Path(folder)
    problems: list[str] = []
    plan = read_plan(folder / "plan.json", problems)
    try:
        loaded, _ = load_runs(folder)
    except UsageError:
        if plan is None or not plan.runs:
            raise
        loaded = []
    loaded = _without_inner_sweeps(folder, loaded, problems)
    replaced = [run for run in loaded if any(_REPLACED.search(part) for part in run.name.split("/"))]
    runs = sorted((run for run in loaded if run not in replaced), key=lambda run: run.name)
    for run in runs:
        problems += [f"{run.name}: {problem}" for problem in run.problems]
    registration, because = read_registration(folder / "analysis.yaml", problems)
    aside: list[Aside] = []
    if plan is not None:
        arms, placed = by_plan(plan, runs, aside, problems)
    elif any(LAYOUT.search(run.name) for run in runs):
        arms, placed = by_layout(runs, aside)
    else:
        arms, placed = by_settings(runs, aside, problems)
    if plan is not None or any(LAYOUT.search(run.name) for run in runs):
        placed = in_their_place(arms, placed, aside, problems)
    placed = with_replicates(placed, aside, problems)
    problems += copies(placed)
    arms = tuple(with_facts(arm, placed, problems, planned=plan is not None) for arm in arms)
    targets, target_from = declared_targets(plan, registration)
    return Study(
        folder=folder,
        name=plan.study if plan is not None else folder.resolve().name,
        planned=plan is not None,
        arms=arms,
        runs=tuple(sorted(placed, key=_place)),
        registration=registration,
        unregistered_because=because,
        unchanged=unchanged(plan, registration, problems),
        unverified_because=unverified(plan, registration, arms, problems),
        targets=targets,
        target_from=target_from,
        set_aside=tuple(sorted(aside, key=lambda item: (item.name, item.reason))),
        num_replaced=len(replaced),
        problems=tuple(problems),
    )


def _without_inner_sweeps(folder: Path, runs: Sequence[Run], problems: list[str]) -> list[Run]:
    """The runs that belong to no sweep further down: a sweep is a study of its own.

    Raises:
        UsageError: if nothing else is there.
    """
    inner = sorted({path.parent for path in folder.rglob("plan.json") if path.parent != folder})
    kept = [run for run in runs if not any(sweep in run.path.parents for sweep in inner)]
    if inner and not kept and not (folder / "plan.json").is_file():
        listed = ", ".join(map(str, inner))
        raise UsageError(f"{folder} holds no runs of its own, but sweeps; give one of them: {listed}")
    for sweep in inner:
        number = sum(sweep in run.path.parents for run in runs)
        name = sweep.relative_to(folder).as_posix()
        problems.append(
            f"{name}: a sweep of its own with {number} runs, which are not in this study; give {sweep} itself"
        )
    return kept


def _place(run: StudyRun) -> tuple[Any, ...]:
    seed = -1 if run.seed is None else run.seed
    finetune_seed = -1 if run.finetune_seed is None else run.finetune_seed
    trial = -1 if run.trial is None else run.trial
    return (STAGES.index(run.stage), run.arm, trial, seed, run.replicate, finetune_seed, run.name)
