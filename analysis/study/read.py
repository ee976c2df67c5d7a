"""Load a folder of runs as a `Study`: which run belongs to which arm, stage, seed and replicate, what was registered.

Two kinds of folders are studies: what ``experiments/sweep.py`` leaves (plan.json, analysis.yaml, ``tuning/``, ``test/``
and ``finetune/``), and any folder with run folders at any depth, whose arms are then what the runs' settings say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.study.placement import equal_arms, in_their_place, with_facts, without_copies, without_duplicates
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
        if plan is None or not plan.get("runs"):
            raise
        loaded = []
    loaded = _without_inner_sweeps(folder, loaded, problems)
    replaced = [run for run in loaded if any(_REPLACED.search(part) for part in run.name.split("/"))]
    runs = sorted((run for run in loaded if run not in replaced), key=lambda run: run.name)
    for run in runs:
        problems += [f"{run.name}: {problem}" for problem in run.problems]
    problems += _schemas_and_keys(runs)
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
    placed = without_duplicates(placed, aside, problems, replicates=plan is None)
    placed = without_copies(placed, aside, problems)
    arms = tuple(with_facts(arm, placed, problems, planned=plan is not None) for arm in arms)
    problems += equal_arms(arms, placed)
    targets, target_from = declared_targets(plan, registration, problems)
    return Study(
        folder=folder,
        name=str((plan or {}).get("study") or folder.resolve().name),
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


_SUMMARY_KEYS = frozenset(
    (
        "schema",
        "status",
        "message",
        "experiment",
        "mode",
        "rule",
        "from_scratch",
        "num_workers",
        "threads",
        "seed",
        "batch_size",
        "accumulate",
        "transport",
        "hogwild_state",
        "clock",
        "speeds",
        "oversubscription",
        "num_samples",
        "num_updates",
        "train_seconds",
        "eval_seconds",
        "samples_per_second",
        "first_eval_loss",
        "final_eval_loss",
        "metrics",
        "details",
        "eval_weight",
        "num_samples_applied",
        "delay",
        "rule_acted",
        "data",
        "data_fingerprint",
        "eval_masking",
        "num_parameters",
        "new_parameters",
        "base_model",
        "parameters_sha256",
        "task",
        "model",
        "parent",
        "split",
        "labels",
        "num_train_samples",
        "num_eval_samples",
        "class_weights",
        "hatecheck",
        "init_sha256",
        "data_notes",
        "notes",
        "candidates_sha256",
        "num_without_candidates",
        "num_train_questions",
        "num_eval_questions",
        "predictions",
        "stopped_early",
        "tracking",
        "seconds",
        "memory",
        "usage",
        "machine_load",
        "throughput",
        "micro_batches",
        "best",
    )
)


def _schemas_and_keys(runs: Sequence[Run]) -> list[str]:
    """Lines about mixed schema versions and about keys that no reader knows, for all runs together."""
    told = []
    schemas = Counter(run.summary["schema"] for run in runs if isinstance(run.summary.get("schema"), int))
    if len(schemas) > 1:
        listed = ", ".join(f"{schema} ({number} runs)" for schema, number in sorted(schemas.items()))
        told.append(
            f"mixed schema versions of summary.json: {listed}; keys that the older ones lack are missing values"
        )
    unknown: dict[str, int] = Counter(key for run in runs for key in run.summary if key not in _SUMMARY_KEYS)
    if unknown:
        listed = ", ".join(f"{key} ({number} runs)" for key, number in sorted(unknown.items()))
        told.append(f"unknown keys of summary.json, which are ignored: {listed}")
    return told
