"""From a study's config to the list of its runs: what is compared, under which conditions, with which seeds, tuned how.

Pure: nothing is run, read or drawn here but the order of the runs, which is a function of the config. A config looks
like this (``asyncsgd/configs/`` has more):

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

    task: masked_lm      # what is learned: one of the library's tasks, or MODULE:CLASS of one's own, whose fields are
                         # settings; base_model and finetune are for masked_lm
    exclude: []          # no arms of these: {algorithm: sync, nproc: 2} takes out those that have all of its values
    replicates: 1        # runs of a measured arm on each seed, to see how much equal runs differ; tests take the first

`analysis` may also name a `control`, an algorithm whose updates are as small as those of an asynchronous one, e.g.
`small: {mode: sync, batch_size: "{16//nproc}"}`: at equal samples it makes as many updates.

It may also name `differences` of differences, each of four algorithms: what a change does to one, with it and without
it, beside what it does to another. They are tested at equal samples, as one family beside the primary one:

    differences: {stale: {treatment: [sgd_stale, sgd_fresh], reference: [adamw_stale, adamw_fresh]}}

A config with `stages` in place of `algorithms` is a chain of several stages; see `asyncsgd.studies.chain`.

An *arm* is an algorithm under one condition; a *block* is a seed: all arms run on it, in an order of its own.

A config with `ladder` in place of `algorithms` is a speed ladder; see `asyncsgd.studies.ladder`.

A config with `models` in place of `algorithms` has comparisons of arms that differ in settings, and a grid: test runs
alone, of any task. docs/study.md has its keys.

Where the primary endpoint is the time to a target, all test runs of a group have one budget in seconds. It is the
median of what the pilots of the group's reference took for their samples. With a budget in samples the faster arm would
be stopped first. All of them also evaluate once after as many samples as the slowest pilot is sure to make in that
time: losses at equal samples are compared there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncsgd.errors import UsageError
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.arms import Arm, arms_of, compared, of_grid, references_of, resolve, valid
from asyncsgd.studies.chain import CHOSEN, Chain, Tuned, two_stages
from asyncsgd.studies.config import (
    ENDPOINTS,
    MASKED_LM,
    NOT_PLANNED,
    OF_BASE_MODEL,
    OF_FINETUNE,
    Analysis,
    ComparisonsConfig,
    Config,
    Finetune,
    LadderConfig,
    Settings,
    settings_of,
    typed,
)
from asyncsgd.studies.runs import TIMED, PlannedRun, Stage, runs_of, shuffled
from asyncsgd.tasks import task_class


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """Every run of a study, in the order in which they are run, stage by stage."""

    name: str
    config: Config
    base: Mapping[str, Any]
    base_model: Mapping[str, Any] | None
    """Settings of the run that makes the base model; None where `base` names one."""
    arms: tuple[Arm, ...]
    runs: tuple[PlannedRun, ...]
    finetune: Finetune | None
    analysis: Analysis | None
    """With the condition of its primary comparison."""
    family: tuple[str, ...]
    """The arms that are compared with the reference there: the primary family, over which Holm adjusts."""
    timed_by: Mapping[str, str]
    """Arm -> the reference arm whose seconds are the budget of its test runs; empty where the config's budgets stay."""
    config_sha256: str
    chain: Chain = dataclasses.field(default_factory=Chain)
    """The stages before and after that of the arms."""
    ladder: LadderConfig | None = None
    """Of a plan that grows: its arms and runs are those that are known by now."""

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def task(self, run: PlannedRun) -> str:
        """What is learned in it."""
        if run.stage == "base":
            return MASKED_LM
        given = self.given(run)
        return self.arm(run.arm).task if given is None else given[0]

    def given(self, run: PlannedRun) -> tuple[str, Mapping[str, Any]] | None:
        """Task and settings of a run of a stage that has no arms; None for other runs."""
        if run.stage == "finetune" and self.finetune is not None:
            return self.finetune.task, self.finetune.settings
        if run.stage in ("before", "trial", "after"):
            stage = self.chain.stage_of(run.folder)
            assert stage is not None
            return stage.task, stage.settings
        return None

    @functools.cached_property
    def tuned(self) -> tuple[Tuned, ...]:
        """All that is tuned by itself, in the order of the chain."""
        of_arms = [
            Tuned(arm.name, arm.task, resolve({**self.base, **arm.settings}), arm.trials, f"tuning/{arm.name}")
            for arm in self.arms
            if arm.trials
        ]
        found = [stage.tuned("", f"before/{stage.name}") for stage in self.chain.before if stage.trials]
        found += of_arms
        tried = [run for run in self.runs if run.stage == "trial" and run.trial is not None]
        for folder, arm in dict.fromkeys((run.folder.rpartition("/")[0], run.arm) for run in tried):
            stage = self.chain.stage_of(folder)
            assert stage is not None
            found.append(stage.tuned(arm, folder))
        return tuple(found)

    def tuning_of(self, run: PlannedRun, chosen: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """What tuning adds to the settings of a run of a stage without arms; None while it is not known."""
        if run.stage not in ("before", "trial", "after", "finetune"):
            return {}
        stage = self.chain.stage_of(run.folder)
        if stage is None or not stage.trials:
            return {}
        return stage.trials[run.trial] if run.trial is not None else chosen.get(stage.tuned(run.arm, "").name)

    def parent_of(self, run: PlannedRun, chosen: Mapping[str, Mapping[str, Any]]) -> str | None:
        """The folder of the run that a run starts from; with `CHOSEN` in it while it is not known."""
        for tuned in self.tuned:
            if run.parent == tuned.folder_of(CHOSEN, run.seed) and tuned.name in chosen:
                return tuned.folder_of(tuned.trials.index(chosen[tuned.name]), run.seed)
        return run.parent

    @property
    def first_model(self) -> str:
        """What the first run starts from, where the study makes no base model."""
        first = self.chain.before[0].settings if self.chain.before else self.base
        return str(first.get("model", "tiny"))

    def models_and_data(self) -> list[tuple[str, str]]:
        """What its runs name."""
        given = [*({**self.base, **arm.settings} for arm in self.arms), self.base_model or {}]
        given += [stage.settings for stage in (*self.chain.before, *self.chain.after)]
        given += [self.finetune.settings] if self.finetune is not None else []
        return [(str(one.get("model", "tiny")), f"{one.get('data')} {one.get('eval_data')}") for one in given]

    def of_stage(self, stage: Stage) -> list[PlannedRun]:
        return [run for run in self.runs if run.stage == stage]

    def values(
        self,
        run: PlannedRun,
        chosen: Mapping[str, Mapping[str, Any]],
        budgets: Mapping[str, float],
        looks: Mapping[str, int],
    ) -> dict[str, Any] | None:
        """The settings of a pretraining run by name; None while they are not known.

        Args:
            chosen: what tuning has chosen for each arm.
            budgets: seconds of the test runs that each reference arm in `timed_by` times.
            looks: samples after which these evaluate once more, likewise.
        """
        if self.base_model is not None and run.stage == "base":
            return {**self.base_model, "mode": "single"}
        arm = self.arm(run.arm)
        tuned = arm.trials[run.trial] if run.trial is not None else chosen.get(arm.name) if arm.trials else {}
        budget: dict[str, Any] = {}
        if run.stage == "test" and arm.name in self.timed_by:
            reference = self.timed_by[arm.name]
            if reference not in budgets:
                return None
            budget = {"samples": None, "seconds": budgets[reference]}
            if reference in looks and "evaluate_at" not in {**self.base, **arm.settings}:
                budget["evaluate_at"] = looks[reference]
        if tuned is None:
            return None
        return resolve({**self.base, **arm.settings, **tuned, "seed": run.seed, **budget})


def make_plan(given: Mapping[str, Any], name: str = "the config") -> StudyPlan:
    """Turn a config into a plan, checking everything that can be checked without running anything.

    Args:
        given: what the file `name` holds.

    Raises:
        UsageError: naming the key, the value and what is expected.

    >>> plan = make_plan({"name": "n", "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
    ...                   "conditions": [{"nproc": [2, 4]}], "seeds": [7]})
    >>> sorted(run.folder for run in plan.runs)
    ['test/async-w2/s7', 'test/async-w4/s7', 'test/sync-w2/s7', 'test/sync-w4/s7']
    """
    sha256 = sha256_of(given)
    chain = Chain()
    task = None
    if "models" in given:
        return _comparisons(typed(given, ComparisonsConfig, name), sha256)
    if "ladder" in given:
        return _ladder(typed(given, LadderConfig, name), sha256)
    if "stages" in given:
        given, chain = two_stages(given)
        given = _by_its_last_stage(given)
        task = chain.task
    config: Config = typed(given, Config, name)
    base = settings_of(config.base, "base")
    base_model = None
    if config.base_model is not None:
        base_model = settings_of(config.base_model, "base_model", OF_BASE_MODEL)
        all_settings = valid("base_model", {**base_model, "mode": "single"})
        base_model = {key: all_settings[key] for key in base_model}
    if config.base_model is not None and chain.before and "model" in chain.before[0].settings:
        raise UsageError("base_model makes the model that the first stage starts from; take model out of that stage")
    arms = arms_of(config, base, task or config.task, (any(stage.trials for stage in chain.before), bool(chain.later)))
    finetune = None if config.finetune is None else _finetune(config.finetune)
    analysis = None if config.analysis is None else _with_condition(config.analysis, arms, finetune)
    family: list[str] = []
    if analysis is not None:
        place = (analysis.primary.num_workers, analysis.primary.clock)
        apart = (analysis.reference, analysis.control)
        family = [arm.name for arm in arms if arm.place == place and arm.algorithm not in apart]
    timed_by = {} if analysis is None else _timed_by(arms, base, analysis, config)
    runs = tuple(runs_of(config, arms, base_model, finetune, analysis, chain))
    primary = tuple(family)
    return StudyPlan(
        config.name, config, base, base_model, arms, runs, finetune, analysis, primary, timed_by, sha256, chain
    )


def _comparisons(config: ComparisonsConfig, sha256: str) -> StudyPlan:
    """Test runs alone; comparisons and grid have seeds and orders of their own."""
    arms: list[Arm] = []
    runs: list[PlannedRun] = []
    for word, seeds, own in (
        ("language_model", config.seeds, compared(config)),
        ("grid", () if config.grid is None else config.grid.seeds, of_grid(config)),
    ):
        arms += own
        runs += [PlannedRun(f"{arm.name}/s{n}", "test", arm.name, n) for n in seeds for arm in shuffled(own, word, n)]
    whole = Config(algorithms={arm.name: {} for arm in arms}, name=config.name, seeds=config.seeds)
    return StudyPlan(config.name, whole, {}, None, tuple(arms), tuple(runs), None, None, (), {}, sha256)


def _ladder(config: LadderConfig, sha256: str) -> StudyPlan:
    """No runs yet: `StudyFolder.grow` plans those that follow from what has ended."""
    whole = Config(algorithms={"naive": {}}, name=config.name, seeds=config.seeds)
    return StudyPlan(config.name, whole, {}, None, (), (), None, None, (), {}, sha256, ladder=config)


def sha256_of(config: Mapping[str, Any]) -> str:
    """A hash of what a config plans; comments, the order of its keys and keys that change no run do not change it."""
    planned = {key: value for key, value in config.items() if key not in NOT_PLANNED}
    return hashlib.sha256(json.dumps(planned, sort_keys=True).encode()).hexdigest()


def _finetune(given: Mapping[str, Any]) -> Finetune:
    settings = settings_of(given, "finetune", OF_FINETUNE)
    keys = {key: settings.pop(key) for key in ("task", "repetitions", "baseline") if key in settings}
    finetune: Finetune = typed(keys, Finetune, "finetune")
    all_settings = valid("finetune", settings, finetune.task)
    known = {key: all_settings.get(key, settings[key]) for key in settings}
    task = task_flags(task_class(finetune.task)).make(known).task
    return msgspec.structs.replace(finetune, settings=known, score=next(iter(task.scored_by())))


def _with_condition(analysis: Analysis, arms: Sequence[Arm], finetune: Finetune | None) -> Analysis:
    """`analysis` with the one condition of the reference that its primary comparison is made under."""
    primary = analysis.primary
    score = None if finetune is None else finetune.score
    scored = "there is no finetune" if score is None else f"finetune is scored by {score}"
    if primary.endpoint not in (*ENDPOINTS, score):
        raise UsageError(
            f"analysis.primary.endpoint is {primary.endpoint}, and {scored}; the other endpoints are "
            f"{', '.join(ENDPOINTS)}"
        )
    for name in (*analysis.margins, *analysis.margin_reasons):
        if name not in ("loss", score):
            raise UsageError(f"analysis has a margin of {name}, and {scored}; a margin may also be one of the loss")
    places = sorted({arm.place for arm in arms if arm.algorithm == analysis.reference})
    fitting = [
        (workers, clock)
        for workers, clock in places
        if primary.num_workers in (None, workers) and primary.clock in (None, clock)
    ]
    if len(fitting) != 1:
        shown = ", ".join(f"{{num_workers: {workers}, clock: {clock}}}" for workers, clock in places)
        raise UsageError(f"analysis.primary must name one of the conditions of {analysis.reference}: {shown or 'none'}")
    workers, clock = fitting[0]
    return msgspec.structs.replace(analysis, primary=msgspec.structs.replace(primary, num_workers=workers, clock=clock))


def _by_its_last_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a chain, which is compared by the score of its last stage and by nothing else."""
    score = _finetune(given["finetune"]).score
    if given.get("analysis") is None:
        return dict(given)
    analysis = typed(given["analysis"], Settings, "analysis")
    primary = typed(analysis.get("primary", {}), Settings, "analysis.primary")
    named = primary.get("endpoint", score)
    if named != score:
        raise UsageError(
            f"analysis.primary.endpoint is {named}, and a chain is compared by the score of its last stage, {score}; "
            f"take endpoint out, or write another score into that stage"
        )
    return {**given, "analysis": {**analysis, "primary": {**primary, "endpoint": score}}}


def _timed_by(arms: Sequence[Arm], base: Mapping[str, Any], analysis: Analysis, config: Config) -> dict[str, str]:
    """Arm -> the reference whose seconds its test runs get, where the time to a target is compared."""
    if analysis.primary.endpoint != "time_to_target":
        return {}
    references = references_of(arms, base, analysis.reference)
    seconds = {}
    for arm in arms:
        settings = valid(f"arm {arm.name}", resolve({**base, **arm.settings}), arm.task)
        seconds[arm.name] = settings["seconds"]
    is_timed = bool(config.pilots or config.tuning.seeds)
    for arm in arms:
        if arm.name not in references:
            continue
        has_budget_of_reference = seconds[arm.name] == seconds[references[arm.name]]
        for trial in arm.trials or ({},):
            settings = valid(f"arm {arm.name}", resolve({**base, **arm.settings, **trial}), arm.task)
            named = {key: settings[key] for key in ("schedule", "target_loss", "samples", "seconds")}
            is_constant = named["schedule"] == "constant" and named["target_loss"] is None
            samples_are_timed = is_timed and named["samples"] and named["seconds"] is None
            if not (is_constant and has_budget_of_reference and (samples_are_timed or not named["samples"])):
                raise UsageError(
                    f"arm {arm.name}: time_to_target compares runs of one budget in seconds; write schedule: constant, "
                    f"no target_loss, and in base either samples, whose seconds pilots or tuning tell, or seconds; got "
                    f"{named}"
                )
    return {name: reference for name, reference in references.items() if seconds[name] is None}


def share(plan: StudyPlan, stage: Stage, shard: tuple[int, int]) -> set[str]:
    """The folders of a stage that belong to shard i of n, counted from 1 as in ``--shard i/n``.

    Whole blocks where time is measured, so that what is compared was measured on one machine, and in a chain, whose
    runs start from one another; single runs elsewhere.
    A function of the plan alone: shards need not know what the others have done.
    """
    index, number = shard
    runs = plan.of_stage(stage)
    seeds = list(dict.fromkeys(run.seed for run in runs))
    in_shard = set()
    for position, run in enumerate(runs):
        by_block = stage != "base" and (plan.chain != Chain() or (stage in TIMED and not plan.arm(run.arm).virtual))
        if (seeds.index(run.seed) if by_block else position) % number == index - 1:
            in_shard.add(run.folder)
    return in_shard
