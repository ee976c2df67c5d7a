"""Arms and runs of a folder without a plan that can be read: by a sweep's names of folders, else by the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.study.alike import by_kind, kind_labels, setting
from analysis.study.plan import first_part
from analysis.study.run import UNFINISHED, UNREADABLE, Run
from analysis.study.types import MEASURED, VIRTUAL, Arm, Aside, StudyRun
from asyncsgd.study.plan import BASE, BASELINE

LAYOUT = re.compile(r"(?:^|/)(tuning|pilot|test|finetune)/([^/]+)/([^/]+)$")
_LEAF = re.compile(r"(?:t(?P<trial>\d+)-)?s(?P<seed>\d+)(?:-r(?P<replicate>\d+))?(?:-f(?P<repetition>\d+))?$")

_NOT_OF_AN_ARM = frozenset(
    (
        *("seed", "samples", "epochs", "seconds", "budget_seconds", "target_loss", "patience"),
        *("evaluations", "evaluate_every", "eval_samples", "threads", "device"),
    )
)
"""Settings that may differ between runs of one arm: the seed, the budget and the machine."""


def by_layout(runs: Sequence[Run], aside: list[Aside]) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    """Place runs by the names of a sweep's folders, where the plan itself cannot be read."""
    placed = []
    for run in runs:
        if run.name == BASE:
            placed.append(StudyRun(BASE, BASE, "base", run.summary.get("seed"), run=run))
            continue
        place = LAYOUT.search(run.name)
        leaf = _LEAF.fullmatch(place[3]) if place else None
        if place is None or leaf is None:
            aside.append(Aside(run.name, "its folder is not named as a sweep names them (stage/arm/sSEED)", None))
            continue
        stage, arm, seed = place[1], place[2], int(leaf["seed"])
        finetuned = stage == "finetune"
        own_seed = run.summary.get("seed")
        finetune_seed = int(leaf["repetition"] or 0) if own_seed is None else own_seed
        placed.append(
            StudyRun(
                name=run.name,
                arm=arm,
                stage=stage,
                seed=seed,
                replicate=int(leaf["replicate"] or 0),
                trial=None if leaf["trial"] is None else int(leaf["trial"]),
                parent=f"{run.name[: place.start(1)]}test/{arm}/s{seed}" if finetuned and arm != BASELINE else None,
                finetune_seed=finetune_seed if finetuned else None,
                run=run,
            )
        )
    names = sorted({run.arm for run in placed if run.stage != "base"})
    arms = tuple(Arm(name, first_part(name), None, MEASURED, None, None, {}, None, ()) for name in names)
    return arms, placed


def by_settings(runs: Sequence[Run], aside: list[Aside], problems: list[str]) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    """Arms are what the runs' summaries and settings say: `Condition`, and every other setting in which they differ."""
    pretraining = []
    for run in runs:
        if run.finetuning:
            continue
        if run.status in (UNFINISHED, UNREADABLE):  # nothing says which arm it belongs to
            aside.append(Aside(run.name, f"{run.status}: {run.problems[0]}", None))
        else:
            pretraining.append(run)
    groups = by_kind(pretraining, _NOT_OF_AN_ARM)
    everywhere = sorted({key for kind in groups for key, _ in kind.settings})
    arms, placed = [], []
    for kind, name in kind_labels(groups).items():
        condition = kind.condition
        # what tells two arms of another condition apart says which of them this one is to be compared with
        told = {one: setting(groups[kind][0], one) for one in everywhere}
        settings = {one: value for one, value in told.items() if value is not None}
        arms.append(
            Arm(
                name=name,
                algorithm=condition.algorithm,
                num_workers=condition.num_workers,
                clock=VIRTUAL if condition.virtual else MEASURED,
                speeds=None,
                batch_size=condition.batch_size,
                settings=settings,
                chosen=None,
                trials=(),
            )
        )
        for run in groups[kind]:
            placed.append(StudyRun(run.name, name, "test", run.summary.get("seed"), run=run))
    placed += _finetuning_by_parents(runs, placed, aside)
    if any(run.arm == BASELINE for run in placed):
        arms.append(Arm(BASELINE, BASELINE, None, MEASURED, None, None, {}, None, ()))
    return tuple(arms), placed


def _finetuning_by_parents(runs: Sequence[Run], pretraining: Sequence[StudyRun], aside: list[Aside]) -> list[StudyRun]:
    placed = []
    for run in runs:
        if not run.finetuning:
            continue
        parent = run.summary.get("parent")
        seed = run.summary.get("seed")
        if parent is None:
            placed.append(StudyRun(run.name, BASELINE, "finetune", seed, finetune_seed=seed, run=run))
            continue
        told = parent.get("run") if isinstance(parent, Mapping) else None
        # the folder may have been moved since, so only the end of its path is looked at
        last = Path(str(told)).name
        origins = [one for one in pretraining if last == Path(one.name).name]
        digest = parent.get("parameters_sha256") if isinstance(parent, Mapping) else None
        if digest is not None and len(origins) > 1:
            origins = [one for one in origins if one.run and one.run.summary.get("parameters_sha256") == digest]
        if len(origins) != 1:
            found = "is not in this folder" if not origins else f"may be any of {', '.join(o.name for o in origins)}"
            aside.append(Aside(run.name, f"the run it was fine-tuned from ({told}) {found}", None))
            continue
        origin = origins[0]
        placed.append(
            StudyRun(run.name, origin.arm, "finetune", origin.seed, parent=origin.name, finetune_seed=seed, run=run)
        )
    return placed
