"""From a sweep's config to the list of its runs: what is compared, under which conditions, with which seeds, tuned how.

Pure: nothing is run, read or drawn here but the order of the runs, which is a function of the config. A config looks
like this (``experiments/configs/`` has more):

    name: quick
    base_model: {model: tiny, samples: 1600}        # pretrained first, once: where every run starts
    base: {data: pydocs, samples: 1600, schedule: constant}   # any setting of experiments/stilt_mlm.py, for every run
    algorithms:                                     # what is compared
      sync: {mode: sync}
      ringmaster: {mode: async, rule: "ringmaster:threshold={nproc}"}   # also its own tune: and conditions:
    conditions:                                     # crossed with every algorithm; lists are crossed among themselves
      - {nproc: [2, 4], clock: virtual, speeds: "slow:worker=0,factor=3"}
    seeds: [100, 101, 102, 103, 104, 105]
    tuning: {grid: {learning_rate: [5.0e-4, 1.0e-3]}, seeds: [0]}
    pilots: [10, 11, 12, 13, 14]                    # seeds of runs of the tuned reference that fix target and seconds
    finetune: {data: pydocs, repetitions: 1}        # any setting of train.py classification; or, with
                                                    # task: token_classification, of train.py token_classification
    analysis: {reference: sync, primary: {endpoint: time_to_target, num_workers: 4, clock: virtual}}

Three more keys, each with its default:

    exclude: []          # no arms of these: {algorithm: sync, nproc: 2} takes out those that have all of its values
    replicates: 1        # runs of a measured arm on each seed, to see how much equal runs differ; tests take the first
    order_seed: 0        # of the order of the runs, drawn anew in every block

`analysis` may also name a `control`, an algorithm whose updates are as small as those of an asynchronous one, e.g.
`small: {mode: sync, batch_size: "{16//nproc}"}`: at equal samples it makes as many updates.

An *arm* is an algorithm under one condition; a *block* is a seed: all arms run on it, in an order of its own.

Where the primary endpoint is the time to a target, all test runs of a group have one budget in seconds. It is the
median of what the pilots of the group's reference took for their samples. With a budget in samples the faster arm would
be stopped first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from asyncsgd.errors import UsageError
from asyncsgd.study.arms import Arm, Tuning, arms_of, references_of, resolve, tuning_in, typed_settings
from asyncsgd.study.config import (
    CONFIG_KEYS,
    REFUSED,
    SEED_LIMIT,
    check_keys,
    mapping_in,
    seeds_in,
    settings_in,
    text_in,
    whole_in,
)
from asyncsgd.study.finetuning import finetuning_in
from asyncsgd.study.registration import Analysis, analysis_in

Stage = Literal["base", "tuning", "pilot", "test", "finetune"]
STAGES: tuple[Stage, ...] = ("base", "tuning", "pilot", "test", "finetune")
TIMED: tuple[Stage, ...] = ("tuning", "pilot", "test")
"""Stages in which a run's seconds are a result, unless its clock is virtual."""
PLAN_SCHEMA = 1
BASE = "base"
"""Folder, and arm, of the run that makes the base model."""
BASELINE = "baseline"
"""The arm of fine-tuning runs that start from the base model, without intermediate training."""

_FINETUNE_SEEDS = 1000
"""Fine-tuning seeds of one block: seed 7 has 7000 to 7999."""


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of the plan; `folder` is its name below the sweep's folder."""

    folder: str
    stage: Stage
    arm: str
    seed: int
    replicate: int = 0
    trial: int | None = None
    parent: str | None = None
    """Folder of the pretraining run that a fine-tuning run starts from; None for the baseline."""
    finetune_seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every run of a sweep, in the order in which they are run, stage by stage."""

    name: str
    base: Mapping[str, Any]
    base_model: Mapping[str, Any] | None
    """Settings of the run that makes the base model; None where `base` names one."""
    arms: tuple[Arm, ...]
    runs: tuple[PlannedRun, ...]
    tuning_seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    """Of runs of the reference as it was tuned, which fix the target; without any, its tuning runs do."""
    seeds: tuple[int, ...]
    finetune: Mapping[str, Any] | None
    analysis: Analysis | None
    timed_by: Mapping[str, str]
    """Arm -> the reference arm whose seconds are the budget of its test runs; empty where the config's budgets stay."""
    config_sha256: str

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def of_stage(self, stage: Stage) -> list[PlannedRun]:
        return [run for run in self.runs if run.stage == stage]

    def values(
        self, run: PlannedRun, chosen: Mapping[str, Mapping[str, Any]], budgets: Mapping[str, float]
    ) -> dict[str, Any]:
        """The settings of a pretraining run by name, as `asyncsgd.study.arms.FLAGS` takes them.

        Args:
            chosen: arm -> the settings that its tuning has chosen; not looked at for tuning runs.
            budgets: reference arm -> the seconds of all test runs that it times (`timed_by`).

        Raises:
            KeyError: for a pilot or test run of an arm that is tuned and not in `chosen`, and for a test run whose
                budget is not in `budgets`.
        """
        if run.stage == "base":
            assert self.base_model is not None
            return {**self.base_model, "mode": "single"}
        arm = self.arm(run.arm)
        if run.trial is not None:
            tuned = arm.trials[run.trial]
        else:
            tuned = chosen[arm.name] if arm.trials else {}
        values = {**self.base, **arm.settings, **tuned, "seed": run.seed}
        if run.stage == "test" and arm.name in self.timed_by:
            values |= {"samples": None, "seconds": budgets[self.timed_by[arm.name]]}
        return resolve(values)

    def as_json(
        self,
        chosen: Mapping[str, Mapping[str, Any]],
        losses: Mapping[tuple[str, int], Sequence[float | None]],
        scores: Mapping[tuple[str, int], float | None],
        targets: Mapping[str, float],
        budgets: Mapping[str, float],
    ) -> dict[str, Any]:
        """What plan.json holds: arms with their trials and what became of them, and every run."""
        return {
            "schema": PLAN_SCHEMA,
            "study": self.name,
            "config_sha256": self.config_sha256,
            "base_model": self.base_model is not None,
            "arms": [
                {
                    "name": arm.name,
                    "algorithm": arm.algorithm,
                    "settings": dict(arm.settings),
                    "num_workers": arm.settings.get("nproc", 1),
                    "clock": arm.settings.get("clock", "measured"),
                    "speeds": arm.settings.get("speeds"),
                    "chosen": dict(chosen[arm.name]) if arm.name in chosen else None,
                    "trials": [
                        {
                            "settings": dict(trial),
                            "seeds": list(self.tuning_seeds),
                            "losses": list(losses.get((arm.name, number), ())),
                            "score": scores.get((arm.name, number)),
                        }
                        for number, trial in enumerate(arm.trials)
                    ],
                }
                for arm in self.arms
            ],
            "targets": dict(targets),
            "budget_seconds": dict(budgets),
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }


def make_plan(config: Mapping[str, Any]) -> Plan:
    """Turn a config into a plan, checking everything that can be checked without running anything.

    Raises:
        UsageError: naming the key, the value and what to write instead.

    >>> plan = make_plan({"name": "n", "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
    ...                   "conditions": [{"nproc": [2, 4]}], "seeds": [7]})
    >>> [arm.name for arm in plan.arms]
    ['sync-w2', 'async-w2', 'sync-w4', 'async-w4']
    >>> sorted(run.folder for run in plan.runs)
    ['test/async-w2/s7', 'test/async-w4/s7', 'test/sync-w2/s7', 'test/sync-w4/s7']
    """
    check_keys(config, CONFIG_KEYS, "the config")
    name = text_in(config.get("name", "sweep"), "name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z0-9]", name):
        raise UsageError(f"name has letters, digits, _ . and - only; it becomes the name of a folder; got {name!r}")
    base = settings_in(config.get("base", {}), "base")
    base_model = None
    if config.get("base_model") is not None:
        reserved = ("mode", "run_dir", "runs_dir", "overwrite", "track")
        base_model = settings_in(config["base_model"], "base_model", reserved)
        typed = typed_settings("base_model", {**base_model, "mode": "single"})
        base_model = {key: typed[key] for key in base_model}
        if "model" in base:
            raise UsageError("base_model makes the model that every run starts from; take model out of base")
    seeds = seeds_in(config.get("seeds", [0]), "seeds")
    replicates = whole_in(config.get("replicates", 1), "replicates", 1)
    tuning = tuning_in(config.get("tuning"))
    if tuning is not None and (shared := sorted(set(tuning.seeds) & set(seeds))):
        raise UsageError(
            f"tuning.seeds and seeds share {shared}; a seed that chose the learning rate cannot test it: use others"
        )
    pilots = () if config.get("pilots") is None else seeds_in(config["pilots"], "pilots")
    if shared := sorted(set(pilots) & {*seeds, *(() if tuning is None else tuning.seeds)}):
        raise UsageError(
            f"pilots share {shared} with seeds or tuning.seeds; a seed that fixes the target must neither test nor "
            f"choose the learning rate: use others"
        )
    arms = arms_of(config, base, tuning)
    order_seed = whole_in(config.get("order_seed", 0), "order_seed", 0)
    finetune = _finetune(config.get("finetune"), seeds)
    analysis = analysis_in(config.get("analysis"), arms, tuning, pilots, finetune)
    timed_by = _timed_by(arms, base, analysis, timing_runs=bool(pilots) or tuning is not None)
    runs = [
        *([PlannedRun(BASE, "base", BASE, base_model.get("seed", 0))] if base_model is not None else []),
        *_tuning_runs(arms, tuning, order_seed),
        *_pilot_runs(arms, pilots, analysis, order_seed),
        *_test_runs(arms, seeds, replicates, order_seed),
        *_finetune_runs(arms, seeds, finetune, order_seed),
    ]
    return Plan(
        name,
        base,
        base_model,
        arms,
        tuple(runs),
        () if tuning is None else tuning.seeds,
        pilots,
        seeds,
        finetune,
        analysis,
        timed_by,
        sha256_of(config),
    )


def sha256_of(config: Mapping[str, Any]) -> str:
    """A hash of a config's content; comments and the order of its keys do not change it."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _timed_by(
    arms: Sequence[Arm], base: Mapping[str, Any], analysis: Analysis | None, *, timing_runs: bool
) -> dict[str, str]:
    """Arm -> the reference whose seconds its test runs get, where the time to a target is compared.

    Args:
        timing_runs: whether runs before the tests tell these seconds.
    """
    if analysis is None or analysis.endpoint != "time_to_target":
        return {}
    references = references_of(arms, base, analysis.reference)
    budgets = {}
    for arm in arms:
        if arm.name not in references:
            continue
        for trial in arm.trials or ({},):
            typed = typed_settings(f"arm {arm.name}", resolve({**base, **arm.settings, **trial}))
            if typed["schedule"] != "constant":
                raise UsageError(
                    f"arm {arm.name}: its test runs are budgeted in seconds, as the endpoint is time_to_target, and "
                    f"schedule {typed['schedule']} needs a number of samples; write schedule: constant in base"
                )
            if typed["target_loss"] is not None:
                raise UsageError(
                    f"arm {arm.name}: target_loss would end runs before their common budget in seconds; take it out"
                )
            if typed["samples"] == 0 or None not in (typed["samples"], typed["seconds"]):
                raise UsageError(
                    f"arm {arm.name}: time_to_target needs a budget in samples, whose seconds the pilots tell, or one "
                    f"in seconds; got samples {typed['samples']} and seconds {typed['seconds']}"
                )
            budgets[arm.name] = typed["seconds"]
    for name, reference in references.items():
        if budgets[name] != budgets[reference]:
            raise UsageError(
                f"arm {name}: it has {_budget_text(budgets[name])} and {reference} {_budget_text(budgets[reference])}; "
                f"time_to_target compares runs of one budget: write it in base"
            )
    timed_by = {name: reference for name, reference in references.items() if budgets[name] is None}
    if timed_by and not timing_runs:
        raise UsageError(
            "analysis: time_to_target needs a common budget in seconds; write pilots: [10, 11, 12], or a tuning, "
            "or base: {seconds: 60}"
        )
    return timed_by


def _budget_text(seconds: float | None) -> str:
    return "a budget in samples" if seconds is None else f"{seconds:g} seconds"


def _shuffled(arms: Sequence[Arm], *key: object) -> list[Arm]:
    """The arms in an order that is a function of `key`: random in a block, the same whenever it is planned."""
    order = list(arms)
    random.Random(" ".join(map(str, key))).shuffle(order)
    return order


def _tuning_runs(arms: Sequence[Arm], tuning: Tuning | None, order_seed: int) -> Iterable[PlannedRun]:
    if tuning is None:
        return
    for seed in tuning.seeds:
        for number in range(max(len(arm.trials) for arm in arms)):
            for arm in _shuffled(arms, order_seed, "tuning", seed, number):
                if arm.trials.index(arm.trials[number]) == number:  # an equal trial that comes earlier is the same run
                    yield PlannedRun(f"tuning/{arm.name}/t{number}-s{seed}", "tuning", arm.name, seed, trial=number)


def _pilot_runs(
    arms: Sequence[Arm], pilots: Sequence[int], analysis: Analysis | None, order_seed: int
) -> Iterable[PlannedRun]:
    for seed in pilots:
        for arm in _shuffled(arms, order_seed, "pilot", seed):
            if analysis is not None and arm.algorithm == analysis.reference:
                yield PlannedRun(f"pilot/{arm.name}/s{seed}", "pilot", arm.name, seed)


def _test_runs(arms: Sequence[Arm], seeds: Sequence[int], replicates: int, order_seed: int) -> Iterable[PlannedRun]:
    for seed in seeds:
        for replicate in range(replicates):
            for arm in _shuffled(arms, order_seed, "test", seed, replicate):
                if replicate and arm.virtual:
                    continue  # it would be the same run, bit for bit
                yield PlannedRun(folder_of_test(arm.name, seed, replicate), "test", arm.name, seed, replicate)


def folder_of_test(arm: str, seed: int, replicate: int = 0) -> str:
    """The folder of a test run.

    >>> folder_of_test("sync-w2", 100)
    'test/sync-w2/s100'
    """
    return f"test/{arm}/s{seed}" + (f"-r{replicate}" if replicate else "")


def _finetune_runs(
    arms: Sequence[Arm], seeds: Sequence[int], finetune: Mapping[str, Any] | None, order_seed: int
) -> Iterable[PlannedRun]:
    if finetune is None:
        return
    for seed in seeds:
        for repetition in range(finetune["repetitions"]):
            # One fine-tuning seed for all arms of a block, so that they are paired; another in every block.
            finetune_seed = seed * _FINETUNE_SEEDS + repetition
            names = [arm.name for arm in _shuffled(arms, order_seed, "finetune", seed, repetition)]
            for name in [BASELINE, *names] if finetune["baseline"] else names:
                parent = None if name == BASELINE else folder_of_test(name, seed)
                yield PlannedRun(
                    f"finetune/{name}/s{seed}-f{repetition}",
                    "finetune",
                    name,
                    seed,
                    parent=parent,
                    finetune_seed=finetune_seed,
                )


def _finetune(given: Any, seeds: Sequence[int]) -> dict[str, Any] | None:
    if given is None:
        return None
    hidden = ("seed", "model", "run_dir", "runs_dir", "overwrite", "track")
    values = {key.replace("-", "_"): value for key, value in mapping_in(given, "finetune").items()}
    values["repetitions"] = whole_in(values.get("repetitions", 1), "finetune.repetitions", 1)
    if values["repetitions"] > _FINETUNE_SEEDS:
        raise UsageError(f"finetune.repetitions must be at most {_FINETUNE_SEEDS}, got {values['repetitions']}")
    if max(seeds) >= (most := SEED_LIMIT // _FINETUNE_SEEDS):
        raise UsageError(f"seeds must be less than {most} where fine-tuning has seeds of its own, got {max(seeds)}")
    baseline = values.setdefault("baseline", True)
    if not isinstance(baseline, bool):
        raise UsageError(f"finetune.baseline must be true or false, got {baseline!r}")
    for key in hidden:
        if key in values:
            raise UsageError(f"finetune: {key} is decided by the sweep; for several seeds a run write repetitions: 3")
    if "patience" in values:
        raise UsageError(f"finetune: patience has no place in a study: {REFUSED['patience']}; take it out")
    settings_keys = [key for key in values if key not in ("repetitions", "baseline")]
    try:
        kind = finetuning_in(values)
        settings = kind.settings({key: values[key] for key in settings_keys})
    except UsageError as error:
        raise UsageError(f"finetune: {error}") from error
    typed = kind.flags.flatten(settings)
    return values | {key: typed[key] for key in settings_keys if key in typed}
