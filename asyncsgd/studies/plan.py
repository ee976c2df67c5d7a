"""From a study's config to the list of its runs: what is compared, under which conditions, with which seeds, tuned how.

Nothing is run here, no data are read, and nothing is drawn but the order of the runs, which is a function of the
config. A config looks like this (``asyncsgd/configs/`` has more):

    name: quick
    base_model: {model: tiny, samples: 1600}        # pretrained first, once: where every run starts
    base: {data: pydocs, samples: 1600, schedule: constant}   # any setting of experiments/stilt_mlm.py, for every run
    algorithms:                                     # what is compared
      sync: {mode: sync}
      ringmaster: {mode: async, rule: "ringmaster:threshold={nproc}"}   # also its own tune: and conditions:
    conditions:                                     # crossed with every algorithm; lists in a block are crossed too
      - {nproc: [2, 4], clock: virtual, speeds: "slow:worker=0,factor=3"}
    seeds: [100, 101, 102, 103, 104, 105]
    tuning: {grid: {learning_rate: [5.0e-4, 1.0e-3]}, seeds: [0]}
    pilots: [10, 11, 12, 13, 14]                    # seeds of runs of the tuned reference that fix target and seconds
    finetune: {data: pydocs, repetitions: 1}        # any setting of train.py classification; with a task:, those of
                                                    # token_classification or question_answering
    analysis: {reference: sync, primary: {endpoint: time_to_target, num_workers: 4, clock: virtual}}

Three more keys, each with its default:

    task: masked_lm      # what is learned: one of the library's tasks, or MODULE:CLASS of one's own, whose fields are
                         # settings; base_model and finetune are for masked_lm
    exclude: []          # no arms of these: {algorithm: sync, nproc: 2} takes out those that have all of its values
    replicates: 1        # test runs on each seed of an arm whose clock is real, to see how much equal runs differ; the
                         # statistical tests take the first

`analysis` may also name a `control`, an algorithm whose updates are as small as those of an asynchronous one, e.g.
`small: {mode: sync, batch_size: "{16//nproc}"}`: at equal samples it makes as many updates.

It may also name `differences` of differences, each of four algorithms: what a change does to one, with it and without
it, beside what it does to another. They are tested at equal samples, as one family beside the primary one:

    differences: {stale: {treatment: [sgd_stale, sgd_fresh], reference: [adamw_stale, adamw_fresh]}}

A config with `stages` in place of `algorithms` is a chain of several stages; see `asyncsgd.studies.chain`.

An *arm* is an algorithm under one condition. A *block* is a seed: all arms run on it, in an order of its own. A *group*
is the arms that have one condition and one batch size.

A config with `ladder` in place of `algorithms` is a speed ladder; see `asyncsgd.studies.ladder`.

A config with `models` in place of `algorithms` has comparisons of arms that differ in settings, and a grid; its runs,
of any task, are all test runs. docs/study.md has its keys.

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
from types import MappingProxyType

import msgspec

from asyncsgd.errors import UsageError
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.arms import (
    Arm,
    arms_of,
    arms_of_comparisons,
    arms_of_grid,
    converted,
    references_of,
    resolve,
    settings_of_arm,
)
from asyncsgd.studies.chain import UNKNOWN_TRIAL, Chain, ChainStage, TuningTarget, two_stages
from asyncsgd.studies.config import (
    ENDPOINTS,
    MASKED_LM,
    NOT_PLANNED,
    REFUSED_IN_BASE_MODEL,
    REFUSED_IN_FINETUNE,
    Analysis,
    ComparisonsConfig,
    Config,
    Finetune,
    GivenSettings,
    LadderConfig,
    Settings,
    settings_of,
    typed,
)
from asyncsgd.studies.runs import TIMED, PlannedRun, Stage, runs_of, shuffled
from asyncsgd.tasks import task_class


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Every run of a study, in the order in which they are run, stage by stage."""

    config: Config
    base: GivenSettings = dataclasses.field(default_factory=dict)
    """Settings that the runs of all arms have."""
    base_model: GivenSettings | None = None
    """Settings of the run that makes the base model; None: there is no such run, and settings name a model."""
    arms: tuple[Arm, ...] = ()
    runs: tuple[PlannedRun, ...] = ()
    finetune: Finetune | None = None
    analysis: Analysis | None = None
    """What is registered before the test runs; the condition of its primary comparison is filled in."""
    family: tuple[str, ...] = ()
    """The primary family, over which Holm adjusts: arms of the primary condition, without reference and control."""
    timed_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arm -> the reference arm whose seconds are the budget of its test runs; empty where the config's budgets stay."""
    config_sha256: str
    chain: Chain = dataclasses.field(default_factory=Chain)
    """The stages before and after that of the arms."""
    ladder: LadderConfig | None = None
    """The config of a plan that grows, whose arms and runs are those that are known by now; None: it does not grow."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_chain(self) -> bool:
        """Whether the plan is that of a chain. A chain of pretraining and fine-tuning alone, which is not tuned, counts
        as a study with two stages."""
        return self.chain != Chain()

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def task(self, run: PlannedRun) -> str:
        """What is learned in a run."""
        if run.stage == "base":
            return MASKED_LM
        stage = self.stage_without_arms_of(run)
        return self.arm(run.arm).task if stage is None else stage.task

    @property
    def stages_without_arms(self) -> dict[str, ChainStage | Finetune]:
        """Name -> stage, of those that have no arms. The last one is called finetune; `Chain.after` ends before it."""
        stages: dict[str, ChainStage | Finetune] = {}
        for stage in (*self.chain.before, *self.chain.after):
            stages[stage.name] = stage
        if self.finetune is not None:
            stages["finetune"] = self.finetune
        return stages

    def stage_without_arms_of(self, run: PlannedRun) -> Finetune | ChainStage | None:
        """The stage of a run if it has no arms, with its task and settings; else None."""
        if run.stage == "finetune":
            return self.finetune
        if run.stage in ("before", "trial", "after"):
            return self.chain.stage_of(run.folder)
        return None

    @functools.cached_property
    def tuning_targets(self) -> tuple[TuningTarget, ...]:
        """One target for each folder of trials, in the order of the chain."""
        # Stages before the arms belong to no arm, whose name is empty here.
        targets = [stage.tuning_target("", f"before/{stage.name}") for stage in self.chain.before if stage.trials]
        for arm in self.arms:
            if arm.trials:
                settings = resolve({**self.base, **arm.settings})
                targets.append(TuningTarget(arm.name, arm.task, settings, arm.trials, f"tuning/{arm.name}"))
        # The runs say on the models of which arms a later stage is tuned. Trials of the stages before the arms are no
        # runs of the stage "trial".
        trials = [run for run in self.runs if run.stage == "trial" and run.trial is not None]
        folders_and_arms = [(run.folder.rpartition("/")[0], run.arm) for run in trials]
        for folder, name in dict.fromkeys(folders_and_arms):
            stage = self.chain.stage_of(folder)
            assert stage is not None
            targets.append(stage.tuning_target(name, folder))
        return tuple(targets)

    def parent_of(self, run: PlannedRun, chosen: Mapping[str, GivenSettings]) -> str | None:
        """The folder of the run that a run starts from, with `UNKNOWN_TRIAL` in it while its trial is not chosen."""
        for target in self.tuning_targets:
            is_parent = run.parent == target.folder_of(UNKNOWN_TRIAL, run.seed)
            if is_parent and target.name in chosen:
                number = target.trials.index(chosen[target.name])
                return target.folder_of(number, run.seed)
        return run.parent

    @property
    def first_model(self) -> str:
        """What the first run starts from, where the study makes no base model."""
        first = self.chain.before[0].settings if self.chain.before else self.base
        return str(first.get("model", "tiny"))

    def models_and_data(self) -> list[tuple[str, str]]:
        """For every kind of run the model that it names, and a text in which its data and evaluation data are named. If
        one of these is on the Hub, `asyncsgd.scripts.base.go_offline` finds that in the texts.
        """
        settings: list[GivenSettings] = [{**self.base, **arm.settings} for arm in self.arms]
        settings.append(self.base_model or {})
        settings += [stage.settings for stage in self.stages_without_arms.values()]
        named = []
        for each in settings:
            model = each.get("model", "tiny")
            named.append((str(model), f"{each.get('data')} {each.get('eval_data')}"))
        return named

    def measures(self, run: PlannedRun) -> bool:
        """Whether the seconds of a run are a result."""
        return run.stage in TIMED and not self.arm(run.arm).virtual

    def of_stage(self, stage: Stage) -> list[PlannedRun]:
        return [run for run in self.runs if run.stage == stage]

    def run_settings(
        self,
        run: PlannedRun,
        chosen: Mapping[str, GivenSettings],
        budget_seconds: Mapping[str, float],
        evaluate_at: Mapping[str, int],
        model: GivenSettings = MappingProxyType({}),
    ) -> Settings | None:
        """The settings of a run by name; None while they are not known.

        Args:
            chosen: the trial that tuning has chosen, by the name of the tuning target.
            budget_seconds: reference arm -> seconds of the test runs that `timed_by` gives its seconds to.
            evaluate_at: reference arm -> samples after which these runs evaluate once more.
            model: the setting `model` of a run that starts from a model of the study.
        """
        if self.base_model is not None and run.stage == "base":
            return {**self.base_model, "mode": "single"}
        stage = self.stage_without_arms_of(run)
        if stage is not None:
            tuned: GivenSettings | None = {}
            # A last stage that is tuned is in the plan twice: `stage` is a Finetune, and the chain's has its trials.
            with_trials = self.chain.stage_of(run.folder)
            if with_trials is not None:
                chosen_trial = chosen.get(with_trials.tuning_name(run.arm))
                tuned = _trial_of(run, with_trials.trials, chosen_trial)
            if tuned is None:
                return None
            return {**stage.settings, **tuned, **model, "seed": run.finetune_seed}  # of any stage without arms
        arm = self.arm(run.arm)
        tuned = _trial_of(run, arm.trials, chosen.get(arm.name))
        budget: Settings = {}
        if run.stage == "test" and arm.name in self.timed_by:
            reference = self.timed_by[arm.name]
            if reference not in budget_seconds:
                return None
            budget = {"samples": None, "seconds": budget_seconds[reference]}
            if reference in evaluate_at and "evaluate_at" not in {**self.base, **arm.settings}:
                budget["evaluate_at"] = evaluate_at[reference]
        if tuned is None:
            return None
        settings = resolve({**self.base, **arm.settings, **tuned, "seed": run.seed, **budget})
        return {**settings, **model}


def _trial_of(run: PlannedRun, trials: Sequence[GivenSettings], chosen: GivenSettings | None) -> GivenSettings | None:
    """The settings of the trial of a run: of its own, else of the chosen one. They are empty if nothing is tuned, and
    None while no trial is chosen.
    """
    if run.trial is not None:
        return trials[run.trial]
    return chosen if trials else {}


def make_plan(given: GivenSettings, name: str = "the config") -> StudyPlan:
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
    if "models" in given:
        return _comparisons(typed(given, ComparisonsConfig, name), sha256)
    if "ladder" in given:
        ladder: LadderConfig = typed(given, LadderConfig, name)
        stand_in = Config(algorithms={"naive": {}}, name=ladder.name, seeds=ladder.seeds)  # for its name and seeds
        return StudyPlan(config=stand_in, config_sha256=sha256, ladder=ladder)  # `StudyFolder.grow` plans its runs
    chain = Chain()
    config_keys = given
    if "stages" in given:
        of_two_stages, chain = two_stages(given)
        config_keys = _with_score_as_endpoint(of_two_stages)
    config: Config = typed(config_keys, Config, name)
    task = chain.task if "stages" in given else config.task
    base = settings_of(config.base, "base", task)
    base_model = None
    if config.base_model is not None:
        of_base_model = settings_of(config.base_model, "base_model", MASKED_LM, REFUSED_IN_BASE_MODEL)
        base_model = converted("base_model", of_base_model, MASKED_LM, beside={"mode": "single"})
        if chain.before and "model" in chain.before[0].settings:
            raise UsageError("base_model makes the model that the first stage starts from; take model out of there")
    is_tuned_before = any(stage.trials for stage in chain.before)
    is_tuned_after = bool(chain.on_tuning_seeds)  # the last stage too, which is not in `chain.after`
    arms = arms_of(config, base, task, is_tuned_before=is_tuned_before, is_tuned_after=is_tuned_after)
    finetune = None if config.finetune is None else _finetune(config.finetune)
    analysis = None if config.analysis is None else _with_condition(config.analysis, arms, finetune)
    family: list[str] = []
    timed_by: dict[str, str] = {}
    if analysis is not None:
        condition = (analysis.primary.num_workers, analysis.primary.clock)
        not_in_family = (analysis.reference, analysis.control)
        of_condition = [arm for arm in arms if arm.workers_and_clock == condition]
        family = [arm.name for arm in of_condition if arm.algorithm not in not_in_family]
        timed_by = _timed_by(arms, base, analysis, config)
    runs = runs_of(config, arms, base_model, finetune, analysis, chain)
    plan = StudyPlan(
        config=config,
        base=base,
        base_model=base_model,
        arms=arms,
        runs=tuple(runs),
        finetune=finetune,
        analysis=analysis,
        family=tuple(family),
        timed_by=timed_by,
        config_sha256=sha256,
        chain=chain,
    )
    _check_models(plan)
    return plan


def _check_models(plan: StudyPlan) -> None:
    """Refuse a model of an arm from which its runs would not start, or the baseline would not."""
    for arm in plan.arms:
        model = {**plan.base, **arm.settings}.get("model")
        if model is None:
            continue
        if plan.base_model is not None or plan.chain.before:
            raise UsageError(
                f"arm {arm.name}: the study makes the model that its runs start from; take model: {model} out"
            )
        if plan.finetune is not None and plan.finetune.baseline and model != plan.first_model:
            raise UsageError(
                f"arm {arm.name} starts from {model}, and the baseline of finetune from {plan.first_model}; write "
                f"model: into base, for all arms, or baseline: false into finetune"
            )


def _comparisons(config: ComparisonsConfig, sha256: str) -> StudyPlan:
    """A plan of test runs only; comparisons and grid have seeds and orders of their own."""
    arms: list[Arm] = []
    runs: list[PlannedRun] = []
    grid_seeds = () if config.grid is None else config.grid.seeds
    # The words seed the order of the runs. "language_model" was the first such study, and its order stays.
    for word, seeds, of_part in (
        ("language_model", config.seeds, arms_of_comparisons(config)),
        ("grid", grid_seeds, arms_of_grid(config)),
    ):
        arms += of_part
        for seed in seeds:
            for arm in shuffled(of_part, word, seed):
                runs.append(PlannedRun(f"{arm.name}/s{seed}", "test", arm.name, seed))
    stand_in = Config(algorithms={arm.name: {} for arm in arms}, name=config.name, seeds=config.seeds)
    return StudyPlan(config=stand_in, arms=tuple(arms), runs=tuple(runs), config_sha256=sha256)


def sha256_of(config: GivenSettings) -> str:
    """A hash of what a config plans; comments, the order of its keys and keys that change no run do not change it.

    The order of the keys of a grid changes the numbers of the trials. So a study compares the settings of each trial
    with those that its run has recorded.
    """
    planned = {key: value for key, value in config.items() if key not in NOT_PLANNED}
    try:
        text = json.dumps(planned, sort_keys=True)
    except TypeError as error:
        raise UsageError(
            f"the config has a date, or a key such as off, that is no text: {error}; put it in quotes"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def _finetune(given: GivenSettings) -> Finetune:
    """The stage of fine-tuning that a config's `finetune` describes."""
    others = dict(given)
    keys = {key: others.pop(key) for key in ("task", "repetitions", "baseline") if key in others}
    finetune: Finetune = typed(keys, Finetune, "finetune")
    settings = settings_of(others, "finetune", finetune.task, REFUSED_IN_FINETUNE)
    settings = converted("finetune", settings, finetune.task)
    task = task_flags(task_class(finetune.task)).make(settings).task
    score = next(iter(task.scored_by()))
    return msgspec.structs.replace(finetune, settings=settings, score=score)


def _with_condition(analysis: Analysis, arms: Sequence[Arm], finetune: Finetune | None) -> Analysis:
    """`analysis` with its primary condition filled in: the only one of the reference that fits what it names."""
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
    conditions = sorted({arm.workers_and_clock for arm in arms if arm.algorithm == analysis.reference})
    fitting = []
    for workers, clock in conditions:
        if primary.num_workers in (None, workers) and primary.clock in (None, clock):
            fitting.append((workers, clock))
    if len(fitting) != 1:
        shown = ", ".join(f"{{num_workers: {workers}, clock: {clock}}}" for workers, clock in conditions)
        raise UsageError(f"analysis.primary must name one of the conditions of {analysis.reference}: {shown or 'none'}")
    workers, clock = fitting[0]
    primary = msgspec.structs.replace(primary, num_workers=workers, clock=clock)
    return msgspec.structs.replace(analysis, primary=primary)


def _with_score_as_endpoint(given: GivenSettings) -> Settings:
    """The config of a chain with its endpoint filled in: the score of the last stage, by which alone it is compared."""
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
    completed = {**analysis, "primary": {**primary, "endpoint": score}}
    return {**given, "analysis": completed}


def _timed_by(arms: Sequence[Arm], base: GivenSettings, analysis: Analysis, config: Config) -> dict[str, str]:
    """Arm -> the reference whose seconds its test runs get, where the time to a target is compared."""
    if analysis.primary.endpoint != "time_to_target":
        return {}
    references = references_of(arms, base, analysis.reference)
    seconds = {arm.name: settings_of_arm(arm, base)["seconds"] for arm in arms}
    has_pilots = bool(config.pilots or config.tuning.seeds)
    for arm in arms:
        if arm.name not in references:
            continue
        has_budget_of_reference = seconds[arm.name] == seconds[references[arm.name]]
        for trial in arm.trials or ({},):
            settings = settings_of_arm(arm, base, trial)
            named = {key: settings[key] for key in ("schedule", "warmup", "target_loss", "samples", "seconds")}
            has_no_share = not 0 < named["warmup"] < 1  # a warm-up below 1 is a share of the samples
            is_same_at_any_budget = named["schedule"] == "constant" and named["target_loss"] is None and has_no_share
            pilots_tell_seconds = has_pilots and named["seconds"] is None
            has_seconds = pilots_tell_seconds or not named["samples"]  # every run has samples or seconds
            if not (is_same_at_any_budget and has_budget_of_reference and has_seconds):
                got = ", ".join(f"{key}: {value}" for key, value in named.items() if value is not None)
                raise UsageError(
                    f"arm {arm.name}: time_to_target compares runs of one budget in seconds; write schedule: constant, "
                    f"warmup: in samples and not as a share of them, no target_loss, and in base either samples, whose "
                    f"seconds pilots or tuning tell, or seconds, the same as those of {references[arm.name]}; got {got}"
                )
    return {name: reference for name, reference in references.items() if seconds[name] is None}


def share(plan: StudyPlan, stage: Stage, shard: tuple[int, int]) -> set[str]:
    """The folders of a stage that belong to shard i of n, counted from 1 as in ``--shard i/n``.

    A shard has whole blocks where time is measured, so that what is compared was measured on one machine. It has whole
    blocks in a chain too, whose runs start from one another. Elsewhere it has single runs.
    This is a function of the plan alone: shards need not know what the others have done.
    """
    index, number = shard
    runs = plan.of_stage(stage)
    seeds = list(dict.fromkeys(run.seed for run in runs))
    in_shard = set()
    for position, run in enumerate(runs):
        by_block = stage != "base" and (plan.is_chain or plan.measures(run))
        part = seeds.index(run.seed) if by_block else position
        if part % number == index - 1:
            in_shard.add(run.folder)
    return in_shard
