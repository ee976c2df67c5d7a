"""A folder of runs as one value: which run belongs to which arm, stage, seed and replicate, and what was registered.

Two kinds of folders are studies: what ``experiments/sweep.py`` leaves (plan.json, analysis.yaml, ``tuning/``, ``test/``
and ``finetune/``), and any folder with run folders at any depth, whose arms are then what the runs' settings say.
Nothing is dropped silently: what is not in a number is in `Study.set_aside` or `Study.problems`, with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from analysis.load import UNFINISHED, UNREADABLE, Condition, Run, labels, load_runs
from asyncsgd.errors import UsageError, nearest
from asyncsgd.plan import BASE, BASELINE, ENDPOINTS, PLAN_SCHEMA, STAGES, resolve
from asyncsgd.record import DIVERGED

MISSING = "MISSING"
"""Status of a planned run that has no folder."""

REGISTRATION_SCHEMA = 1
MEASURED, VIRTUAL = "measured", "virtual"

_REGISTRATION_KEYS = (
    "schema",
    "study",
    "reference",
    "primary",
    "alpha",
    "margins",
    "num_seeds",
    "targets",
    "target_from",
    "family",
    "seeds",
    "config_sha256",
    "pilots",
)
_PLAN_KEYS = ("schema", "study", "config_sha256", "base_model", "arms", "runs", "targets", "analysis_sha256")
_REPLACED = re.compile(r"\.before-\d+$")
_LAYOUT = re.compile(r"(?:^|/)(tuning|pilot|test|finetune)/([^/]+)/([^/]+)$")
_ARM = re.compile(r"[^-]+-w(?P<workers>\d+)(?:-.*?)??(?P<virtual>-virtual)?")
_LEAF = re.compile(r"(?:t(?P<trial>\d+)-)?s(?P<seed>\d+)(?:-r(?P<replicate>\d+))?(?:-f(?P<repetition>\d+))?$")

_NOT_OF_AN_ARM = frozenset(
    ("seed", "samples", "seconds", "evaluations", "eval_samples", "target_loss", "threads", "device", "budget_seconds")
)
"""Settings that may differ between runs of one arm: the seed, the budget and the machine."""
_OF_THE_CONDITION = frozenset(("mode", "rule", "nproc", "workers", "batch_size", "clock"))
"""Settings that `Condition` already holds."""


_OF_THE_MACHINE = frozenset(("model", "cache_dir", "run_dir", "runs_dir", "overwrite"))
"""Settings that say where something lies: the base model that a sweep makes has another path in every copy of it."""
_IN_THE_SUMMARY = {
    "seed": "seed",
    "mode": "mode",
    "nproc": "num_workers",
    "clock": "clock",
    "speeds": "speeds",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "learning_rate": "learning_rate",
}
"""Settings that a summary records as they are, or fine-tuning of its parent, by its own name for them."""


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
    """Equivalence margins of ``loss`` (nats) and ``macro_f1``; a missing one: no equivalence test."""
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
    pilots: Mapping[str, Pilots] = dataclasses.field(default_factory=dict)
    """By reference arm; empty where the target was given, and in files that did not record them."""


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
        return self.diverged or (self.run.done and (self.stage == "finetune" or not self._cut_short))

    @functools.cached_property
    def _cut_short(self) -> str:
        """What is lost of the curve of a run that is DONE; empty where it has its end.

        Every run is evaluated where it ends. Without that evaluation its last loss is one of another number of samples,
        and all others would have to be compared there.
        """
        assert self.run is not None
        places = self.run.evaluations[["loss", "train_seconds", "total_samples"]]
        known = places[places.notna().all(axis=1)]
        if not len(known):
            return "it has no evaluation that can be used"
        last, end = int(known["total_samples"].max()), self.run.summary.get("num_samples")
        if end is not None and last < end:
            return f"its evaluations in events.jsonl end at {last} of {end} samples"
        return ""

    @property
    def unusable_because(self) -> str:
        """Why it is no result; empty where it is one."""
        if self.usable:
            return ""
        if self.run is None:
            return self.misplaced or "planned, and no folder there"
        if self.run.done:
            return f"DONE, but {self._cut_short}"
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
    """In the order of tables: as in the plan, or as `analysis.load.labels` orders conditions. The baseline is one where
    it was fine-tuned; the run that made the base model is of none."""
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
    plan = _read_plan(folder / "plan.json", problems)
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
    registration, because = _read_registration(folder / "analysis.yaml", problems)
    aside: list[Aside] = []
    if plan is not None:
        arms, placed = _by_plan(plan, runs, aside, problems)
    elif any(_LAYOUT.search(run.name) for run in runs):
        arms, placed = _by_layout(runs, aside)
    else:
        arms, placed = _by_settings(runs, aside, problems)
    if plan is not None or any(_LAYOUT.search(run.name) for run in runs):
        placed = _in_their_place(arms, placed, aside, problems)
    placed = _without_duplicates(placed, aside, problems, replicates=plan is None)
    placed = _without_copies(placed, aside, problems)
    arms = tuple(_with_facts(arm, placed, problems, planned=plan is not None) for arm in arms)
    problems += _equal_arms(arms, placed)
    targets, target_from = _targets(plan, registration, problems)
    return Study(
        folder=folder,
        name=str((plan or {}).get("study") or folder.resolve().name),
        planned=plan is not None,
        arms=arms,
        runs=tuple(sorted(placed, key=_place)),
        registration=registration,
        unregistered_because=because,
        unchanged=_unchanged(plan, registration, problems),
        unverified_because=_unverified(plan, registration, arms, problems),
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


# ---- plan.json ---------------------------------------------------------------------------------------------


def _read_plan(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The plan, as far as it is sound; None (with a problem where there is a file) if there is none to go by."""
    if not path.is_file():
        return None
    instead = "arms and seeds are taken from the folders' names, and runs that are missing cannot be counted"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
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


def _by_plan(
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
        planned = _planned_run(entry)
        if planned is None:
            problems.append(f"plan.json: run {number} is damaged and was left out: {str(entry)[:80]}")
            continue
        known.add(planned.name)
        if planned.arm not in arms and planned.stage != "base":
            if planned.arm != BASELINE:
                problems.append(f"plan.json has no arm {planned.arm}, but runs of it; it has no settings of its own")
            arms[planned.arm] = Arm(planned.arm, _first_part(planned.arm), None, MEASURED, None, None, {}, None, ())
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
        algorithm=entry["algorithm"] if isinstance(entry.get("algorithm"), str) else _first_part(entry["name"]),
        num_workers=_count_or_none(entry.get("num_workers")),
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
        tuple(_number_or_none(loss) for loss in losses),
        _number_or_none(entry.get("score")),
        number,
    )


def _planned_run(entry: Any) -> StudyRun | None:
    if not isinstance(entry, Mapping):
        return None
    folder, arm, stage, seed = (entry.get(key) for key in ("folder", "arm", "stage", "seed"))
    sound = isinstance(folder, str) and isinstance(arm, str) and stage in STAGES and _count_or_none(seed) is not None
    if not sound:
        return None
    parent = entry.get("parent")
    return StudyRun(
        name=str(folder),
        arm=str(arm),
        stage=str(stage),
        seed=seed,
        replicate=_count_or_none(entry.get("replicate")) or 0,
        trial=_count_or_none(entry.get("trial")),
        parent=parent if isinstance(parent, str) else None,
        finetune_seed=_count_or_none(entry.get("finetune_seed")),
    )


# ---- folders without a plan --------------------------------------------------------------------------------


def _by_layout(runs: Sequence[Run], aside: list[Aside]) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    """Place runs by the names of a sweep's folders, where the plan itself cannot be read."""
    placed = []
    for run in runs:
        if run.name == BASE:
            placed.append(StudyRun(BASE, BASE, "base", run.summary.get("seed"), run=run))
            continue
        place = _LAYOUT.search(run.name)
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
    arms = tuple(Arm(name, _first_part(name), None, MEASURED, None, None, {}, None, ()) for name in names)
    return arms, placed


def _by_settings(
    runs: Sequence[Run], aside: list[Aside], problems: list[str]
) -> tuple[tuple[Arm, ...], list[StudyRun]]:
    """Arms are what the runs' summaries and settings say: `Condition`, and every other setting in which they differ."""
    pretraining = []
    for run in runs:
        if run.finetuning:
            continue
        if run.status in (UNFINISHED, UNREADABLE) and run.summary.get("mode") is None:
            aside.append(Aside(run.name, f"{run.status}: nothing says which arm it belongs to", None))
        else:
            pretraining.append(run)
    groups: dict[tuple[Condition, tuple[tuple[str, Any], ...]], list[Run]] = defaultdict(list)
    varying = _varying(pretraining)
    for run in pretraining:
        extra = tuple((key, _hashable(_setting(run, key))) for key in varying[run.condition])
        groups[run.condition, extra].append(run)
    names = _arm_names(groups)
    everywhere = sorted({key for keys in varying.values() for key in keys})
    arms, placed = [], []
    for key, name in names.items():
        condition, _ = key
        # what tells two arms of another condition apart says which of them this one is to be compared with
        told = {one: _setting(groups[key][0], one) for one in everywhere}
        settings = {one: value for one, value in told.items() if value is not None}
        arms.append(
            Arm(
                name=name,
                algorithm=_algorithm(condition),
                num_workers=condition.num_workers,
                clock=VIRTUAL if condition.virtual else MEASURED,
                speeds=None,
                batch_size=condition.batch_size,
                settings=settings,
                chosen=None,
                trials=(),
            )
        )
        for run in groups[key]:
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


def _varying(runs: Sequence[Run]) -> dict[Condition, list[str]]:
    """The settings in which the runs of each condition differ, beside what a condition holds and the seed."""
    by_condition: dict[Condition, list[Run]] = defaultdict(list)
    for run in runs:
        by_condition[run.condition].append(run)
    varying = {}
    for condition, group in by_condition.items():
        keys = sorted({key for run in group for key in run.settings} | {"speeds"})
        keys = [key for key in keys if key not in _NOT_OF_AN_ARM | _OF_THE_CONDITION]
        varying[condition] = [key for key in keys if len({_hashable(_setting(run, key)) for run in group}) > 1]
    return varying


def _setting(run: Run, key: str) -> Any:
    if key == "speeds" and run.summary.get("speeds") is not None:
        return run.summary["speeds"]
    return run.settings.get(key)


def _arm_names(
    groups: Iterable[tuple[Condition, tuple[tuple[str, Any], ...]]],
) -> dict[tuple[Condition, tuple[tuple[str, Any], ...]], str]:
    groups = list(groups)
    conditions = labels(condition for condition, _ in groups)
    order = list(conditions)
    names = {}
    for condition, extra in sorted(groups, key=lambda group: (order.index(group[0]), repr(group[1]))):
        shown = "".join(f", {key} {'not given' if value is None else value}" for key, value in extra)
        names[condition, extra] = conditions[condition] + shown
    return names


def _algorithm(condition: Condition) -> str:
    """What a colour and a comparison go by: the rule's name where there is one of its own, else the mode.

    >>> _algorithm(Condition("async", "ringmaster:threshold=2", 4, 16)), _algorithm(Condition("single", None, 1, 16))
    ('ringmaster', 'single')
    >>> _algorithm(Condition("async", "synchronous", 4, 16, True)), _algorithm(Condition("async", None, 4, 16))
    ('sync', 'async')
    """
    if condition.mode in ("single", "hogwild"):
        return condition.mode
    rule = (condition.rule or "").partition(":")[0].casefold()
    if condition.mode == "sync" or rule == "synchronous":
        return "sync"
    return "async" if rule in ("", "asynchronous") else rule


# ---- what the runs say -------------------------------------------------------------------------------------


def _without_duplicates(
    runs: Sequence[StudyRun], aside: list[Aside], problems: list[str], *, replicates: bool
) -> list[StudyRun]:
    """One run for every place in the study. Without a plan a second run of a seed is a replicate of the first."""
    by_place: dict[tuple[Any, ...], list[StudyRun]] = defaultdict(list)
    for run in runs:
        by_place[run.stage, run.arm, run.seed, run.replicate, run.trial, run.finetune_seed].append(run)
    kept = []
    for group in by_place.values():
        group.sort(key=lambda run: run.name)
        if len(group) == 1:
            kept += group
            continue
        first = group[0]
        what = f"{len(group)} runs of {first.arm} have seed {first.seed}"
        if first.finetune_seed is not None:
            what += f" and fine-tuning seed {first.finetune_seed}"
        listed = ", ".join(run.name for run in group)
        if replicates and first.stage == "test" and first.seed is not None:
            problems.append(
                f"duplicate runs: {what} ({listed}): the first by name is in the tests, the others are replicates"
            )
            kept += [dataclasses.replace(run, replicate=number) for number, run in enumerate(group)]
            continue
        problems.append(f"duplicate runs: {what} ({listed}); the first by name is taken")
        kept.append(first)
        aside += [Aside(run.name, f"duplicate of {first.name}", run) for run in group[1:]]
    return kept


def _in_their_place(
    arms: Sequence[Arm], runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]
) -> list[StudyRun]:
    """The runs that are what their place in the study says; of others the place stays, without a run."""
    by_name = {arm.name: arm for arm in arms}
    digests = {run.name: run.run.summary.get("parameters_sha256") for run in runs if run.run is not None}
    kept = []
    for run in runs:
        differing = [] if run.run is None else _differing(run, by_name.get(run.arm), digests.get(run.parent or ""))
        if differing:
            run = _set_aside(run, f"its folder holds another run: {', '.join(differing)}", aside, problems)
        kept.append(run)
    return kept


def _set_aside(run: StudyRun, reason: str, aside: list[Aside], problems: list[str]) -> StudyRun:
    """The place of `run`, without it."""
    problems.append(f"{run.name}: {reason}; it is set aside")
    aside.append(Aside(run.name, reason, run))
    return dataclasses.replace(run, run=None, misplaced=reason)


def _differing(run: StudyRun, arm: Arm | None, parent_sha256: object) -> list[str]:
    """What a run records of itself that its place in the study does not say; what it does not record is not held
    against it.
    """
    assert run.run is not None
    summary, settings = run.run.summary, run.run.settings
    expected = {"seed": run.seed} | ({} if arm is None else _expected(run, arm))
    if run.stage != "finetune":
        told = [(key, settings.get(key), value) for key, value in expected.items() if key not in _OF_THE_MACHINE]
        told += _recorded(summary, expected)
    else:
        told = [("seed", summary.get("seed"), run.finetune_seed)]
        parent = summary.get("parent")
        if isinstance(parent, Mapping) and run.parent is None:
            told.append(("start", f"run {parent.get('run')}", "the base model"))
        elif isinstance(parent, Mapping):
            told += [(f"{key} of its pretraining", here, there) for key, here, there in _recorded(parent, expected)]
            digests = (parent.get("parameters_sha256"), parent_sha256)
            here, there = (None if digest is None else str(digest)[:16] for digest in digests)
            told.append(("parameters_sha256 of its pretraining", here, there))
    differing = {what: f"{what} {here}, not {there}" for what, here, there in told if not _same(here, there)}
    return list(differing.values())


def _recorded(record: Mapping[str, Any], expected: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """(setting, what the summary of a pretraining run or of what came after it says, what is expected)."""
    told: list[tuple[str, object, object]] = [
        (key, record.get(name), expected[key]) for key, name in _IN_THE_SUMMARY.items() if key in expected
    ]
    if isinstance(rule := expected.get("rule"), str) and record.get("rule") is not None:
        # it has all parameters of the rule, a config those that are not its defaults
        here, there = (str(one).partition(":")[0].casefold() for one in (record["rule"], rule))
        told.append(("rule", here, there))
    return told


def _expected(run: StudyRun, arm: Arm) -> dict[str, Any]:
    """The settings that the plan gives a run, else those that the sweep's names of folders tell."""
    if not arm.settings:
        named = _ARM.fullmatch(arm.name)
        if named is None:
            return {}
        return {"nproc": int(named["workers"])} | ({"clock": VIRTUAL} if named["virtual"] else {})
    tuned: Mapping[str, Any] = {}
    if run.stage == "tuning":
        tuned = next((trial.settings for trial in arm.trials if trial.number == run.trial), {})
    elif arm.chosen is not None:
        tuned = arm.chosen
    return resolve({**arm.settings, **tuned})


def _same(here: object, there: object) -> bool:
    """Whether a recorded value is the expected one; one that nobody recorded, or expects, is."""
    if here is None or there is None or here == there:
        return True
    try:
        return float(str(here)) == float(str(there))
    except ValueError:
        return str(here) == str(there)


def _without_copies(runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]) -> list[StudyRun]:
    """The runs without test runs that ended with the parameters of another seed of their arm: a seed decides which
    samples come in which order and what of them is masked, so one of the two is a copy.
    """
    first: dict[tuple[str, str], StudyRun] = {}
    kept = {id(run): run for run in runs}
    for run in sorted(runs, key=lambda run: run.name):
        digest = _trained_sha256(run)
        if digest is None:
            continue
        other = first.setdefault((run.arm, digest), run)
        if other.seed != run.seed and None not in (other.seed, run.seed):
            reason = (
                f"a copy of {other.name}: it has another seed, and ended with the same parameters "
                f"(parameters_sha256 {digest[:16]})"
            )
            kept[id(run)] = _set_aside(run, reason, aside, problems)
    return list(kept.values())


def _equal_arms(arms: Sequence[Arm], runs: Sequence[StudyRun]) -> list[str]:
    """A line for every two arms with test runs that ended with the same parameters, where nothing says they should.

    It may be right: a quorum of 1 is asynchronous, and so is a threshold that no delay reaches.
    """
    by_name = {arm.name: arm for arm in arms}
    by_digest: dict[str, list[StudyRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        if (digest := _trained_sha256(run)) is not None:
            by_digest[digest].append(run)
    equal: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for same in by_digest.values():
        for place, one in enumerate(same):
            for other in same[place + 1 :]:
                alike = one.seed == other.seed and _alike(by_name[one.arm], by_name[other.arm])
                if one.arm != other.arm and not alike:
                    equal[one.arm, other.arm].append((one.name, other.name))
    return [
        f"{pairs[0][0]} and {pairs[0][1]} ended with the same parameters"
        + f", like {len(pairs) - 1} more pairs of these arms" * (len(pairs) > 1)
        + ": either both arms do the same, or one holds copies of the other's runs"
        for pairs in equal.values()
    ]


def _alike(one: Arm, other: Arm) -> bool:
    """Whether two arms may well take the same steps: one worker waits for nobody, and the clock and the speeds of the
    workers change no step of a synchronous algorithm, nor of another one where the order stays.
    """
    if one.num_workers == 1 and other.num_workers == 1:
        return True
    free = ("mode", "rule", "clock", "speeds", "network")
    ours, theirs = (
        dataclasses.replace(
            arm,
            name="",
            clock="",
            speeds=None,
            settings={key: value for key, value in arm.settings.items() if key not in free},
            trials=(),
        )
        for arm in (one, other)
    )
    return ours == theirs


def _trained_sha256(run: StudyRun) -> str | None:
    """The hash of the parameters of a test run that has changed them; None of one that diverged, as all NaN are equal,
    and of a closed-form problem, which may have no chance in it for a seed to decide.
    """
    if run.stage != "test" or run.run is None or not run.run.done or run.diverged:
        return None
    if run.run.summary.get("experiment") == "simulate":
        return None
    digest = run.run.summary.get("parameters_sha256")
    return digest if isinstance(digest, str) and run.run.summary.get("num_updates") != 0 else None


_Fact = TypeVar("_Fact")


def _with_facts(arm: Arm, runs: Sequence[StudyRun], problems: list[str], *, planned: bool) -> Arm:
    """The arm with workers, clock, speeds and batch size as its runs say: a plan tells what was meant."""
    own = [run.run for run in runs if run.arm == arm.name and run.stage != "finetune" and run.run is not None]
    own = [run for run in own if run.summary.get("mode") is not None]

    def fact(what: str, of: Callable[[Run], _Fact | None], meant: _Fact | None) -> _Fact | None:
        told = Counter(value for value in map(of, own) if value is not None)
        if not told:
            return meant
        most = sorted(told, key=lambda value: (-told[value], str(value)))[0]
        if len(told) > 1:
            listed = ", ".join(f"{value} ({number} runs)" for value, number in sorted(told.items(), key=str))
            problems.append(f"{arm.name}: its runs differ in {what}: {listed}")
        elif planned and meant is not None and most != meant:
            problems.append(f"{arm.name}: plan.json says {what} {meant}, its runs say {most}; the runs are believed")
        return most

    clock = fact("clock", lambda run: run.summary.get("clock"), arm.clock if arm.settings or own else None)
    tested = [run.run for run in runs if run.arm == arm.name and run.stage == "test" and run.run is not None]
    for what, values in (
        ("mode", Counter(run.summary.get("mode") for run in tested)),
        ("rule", Counter(run.summary.get("rule") for run in tested if run.done)),
        ("learning_rate", Counter(run.learning_rate for run in tested)),
    ):
        values.pop(None, None)
        if len(values) > 1:
            listed = ", ".join(f"{value} ({number} runs)" for value, number in sorted(values.items(), key=str))
            problems.append(f"{arm.name}: its test runs differ in {what}: {listed}")
    return dataclasses.replace(
        arm,
        num_workers=fact("num_workers", lambda run: run.summary.get("num_workers"), arm.num_workers),
        clock=clock or MEASURED,
        speeds=fact("speeds", lambda run: run.summary.get("speeds") or run.settings.get("speeds"), arm.speeds),
        batch_size=fact(
            "batch_size", lambda run: run.summary.get("batch_size"), _count_or_none(arm.settings.get("batch_size"))
        ),
    )


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
        "perplexity",
        "masked_token_accuracy",
        "eval_masked_tokens",
        "num_samples_applied",
        "delay",
        "data",
        "data_fingerprint",
        "num_parameters",
        "parameters_sha256",
        "task",
        "model",
        "parent",
        "split",
        "labels",
        "num_train_samples",
        "num_eval_samples",
        "class_weights",
        "accuracy",
        "macro_f1",
        "per_class_f1",
        "confusion",
        "hatecheck",
        "init_sha256",
        "data_notes",
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


# ---- the registration --------------------------------------------------------------------------------------


def _read_registration(path: Path, problems: list[str]) -> tuple[Registration | None, str]:
    """What was registered, or None and why."""
    if not path.is_file():
        return None, "there is no analysis.yaml: nothing was declared before the runs"
    import yaml

    def refused(reason: str) -> tuple[None, str]:
        problems.append(f"analysis.yaml {reason}")
        return None, f"analysis.yaml {reason}"

    try:
        content = path.read_bytes()
        values = yaml.safe_load(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return refused(f"cannot be read: {' '.join(str(error).split())[:160]}")
    if not isinstance(values, Mapping):
        return refused("is damaged: it holds no keys and values")
    schema = values.get("schema", REGISTRATION_SCHEMA)
    if not isinstance(schema, int) or schema > REGISTRATION_SCHEMA:
        return refused(f"has schema {schema!r}, this version reads up to {REGISTRATION_SCHEMA}")
    for key in values:
        if key not in _REGISTRATION_KEYS:
            guess = nearest(str(key), _REGISTRATION_KEYS)
            problems.append(f"analysis.yaml has an unknown key {key!r}{guess}; it is ignored")
    primary = values.get("primary")
    if not isinstance(values.get("reference"), str):
        return refused("names no reference algorithm (reference: sync)")
    if not isinstance(primary, Mapping) or primary.get("endpoint") not in ENDPOINTS:
        return refused(f"names no primary endpoint (primary: {{endpoint: one of {', '.join(ENDPOINTS)}}})")
    alpha = _number_or_none(values.get("alpha", 0.05))
    if alpha is None or not 0 < alpha < 1:
        return refused(f"has no usable alpha, got {values.get('alpha')!r}; write alpha: 0.05")
    margins = _numbers(values.get("margins"), "margins", problems)
    targets = _numbers(values.get("targets"), "targets", problems)
    for key in sorted(margins):
        if margins[key] <= 0:
            problems.append(f"analysis.yaml: margins.{key} must be above 0, got {margins[key]:g}; it is ignored")
            del margins[key]
    return (
        Registration(
            reference=values["reference"],
            endpoint=primary["endpoint"],
            num_workers=_count_or_none(primary.get("num_workers")),
            clock=primary["clock"] if primary.get("clock") in (MEASURED, VIRTUAL) else None,
            alpha=alpha,
            margins=margins,
            num_seeds=_count_or_none(values.get("num_seeds")),
            targets=targets,
            target_from=str(values.get("target_from") or ""),
            sha256=hashlib.sha256(content).hexdigest(),
            family=_listed(values.get("family"), "family", str, problems),
            seeds=_listed(values.get("seeds"), "seeds", int, problems),
            config_sha256=values["config_sha256"] if isinstance(values.get("config_sha256"), str) else None,
            pilots=_pilots(values.get("pilots"), problems),
        ),
        "",
    )


_Item = TypeVar("_Item", str, int)


def _listed(given: Any, where: str, kind: type[_Item], problems: list[str]) -> tuple[_Item, ...] | None:
    """The items of a list, each once; None where there is no such list."""
    if given is None:
        return None
    if not isinstance(given, list) or any(type(item) is not kind for item in given):
        problems.append(f"analysis.yaml: {where} must be a list, got {str(given)[:80]!r}; it is ignored")
        return None
    return tuple(dict.fromkeys(given))


def _pilots(given: Any, problems: list[str]) -> dict[str, Pilots]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"analysis.yaml: pilots must hold arms, got {str(given)[:80]!r}; it is ignored")
        return {}
    found = {}
    for arm, values in given.items():
        values = values if isinstance(values, Mapping) else {}
        first, best = _number_or_none(values.get("first_loss")), _number_or_none(values.get("best_loss"))
        if first is None or best is None or not best < first:
            problems.append(f"analysis.yaml: pilots.{arm} has no first_loss above a best_loss; it is ignored")
        else:
            found[str(arm)] = Pilots(_count_or_none(values.get("runs")) or 0, first, best)
    return found


def _numbers(given: Any, where: str, problems: list[str]) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"analysis.yaml: {where} must hold keys and numbers, got {given!r}; it is ignored")
        return {}
    numbers = {}
    for key, value in given.items():
        number = _number_or_none(value)
        if number is None:
            problems.append(f"analysis.yaml: {where}.{key} is no number ({value!r}) and is ignored")
        else:
            numbers[str(key)] = number
    return numbers


def _targets(
    plan: Mapping[str, Any] | None, registration: Registration | None, problems: list[str]
) -> tuple[dict[str, float], str]:
    if registration is not None:
        return dict(registration.targets), registration.target_from
    planned = (plan or {}).get("targets")
    if isinstance(planned, Mapping) and planned:
        return _numbers(planned, "targets", problems), "plan.json, without a pre-registration"
    return {}, ""


def _unchanged(plan: Mapping[str, Any] | None, registration: Registration | None, problems: list[str]) -> bool | None:
    """Compare analysis.yaml with what the plan recorded when it was written."""
    if plan is None or registration is None:
        return None
    checks = []
    digest = plan.get("analysis_sha256")
    if isinstance(digest, str):
        checks.append(digest == registration.sha256)
        if not checks[-1]:
            problems.append(f"analysis.yaml was changed after it was written: plan.json recorded sha256 {digest[:16]}")
    planned = plan.get("targets")
    if isinstance(planned, Mapping) and planned:
        same = {str(key): _number_or_none(value) for key, value in planned.items()} == dict(registration.targets)
        checks.append(same)
        if not same:
            problems.append(f"analysis.yaml and plan.json name different targets: {registration.targets} and {planned}")
    return all(checks) if checks else None


def _unverified(
    plan: Mapping[str, Any] | None, registration: Registration | None, arms: Sequence[Arm], problems: list[str]
) -> str:
    """Why the plan is not known to be the one that was registered; arms that it no longer has are told as a problem,
    and still count in the family.
    """
    if registration is None:
        return ""
    for name in registration.family or ():
        if all(arm.name != name for arm in arms):
            problems.append(
                f"analysis.yaml registers {name} in the primary family, and nothing of it is here: it counts as a "
                f"comparison that shows nothing (p = 1)"
            )
    if plan is None:
        return "there is no plan.json that could be read: whether all that was registered is here cannot be checked"
    reasons = []
    if registration.config_sha256 is not None and plan.get("config_sha256") != registration.config_sha256:
        reasons.append("plan.json is of another config than the one that analysis.yaml registers")
    if registration.seeds is not None:
        planned = {run.seed for run in map(_planned_run, plan["runs"]) if run is not None and run.stage == "test"}
        if planned != set(registration.seeds):
            shown = (", ".join(map(str, sorted(seeds, key=str))) for seeds in (registration.seeds, planned))
            reasons.append("analysis.yaml registers test seeds {}, plan.json has {}".format(*shown))
    problems += reasons
    return "; ".join(reasons)


# ---- small things ------------------------------------------------------------------------------------------


def _first_part(name: str) -> str:
    """The algorithm in an arm's name, as the sweep writes it.

    >>> _first_part("ringmaster-w8-virtual")
    'ringmaster'
    """
    return re.sub(r"-w\d+(-.*)?$", "", name)


def _hashable(value: Any) -> Any:
    return (
        value if isinstance(value, str | int | float | bool | None) else json.dumps(value, sort_keys=True, default=str)
    )


def _count_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number_or_none(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
