"""A chain of trainings as one study: each stage starts from the model of the stage before, and one has the arms.

    name: stilt
    stages:
      - {name: further, task: masked_lm, data: pydocs, samples: 3200}
      - name: intermediate
        task: classification
        data: pydocs:pairs
        samples: 6400
        arms: {sync: {mode: sync}, async: {mode: async}, none: {}}
        conditions: {nproc: 4, clock: virtual}
        tune: {learning_rate: [2.5e-4, 5.0e-4]}
      - name: target
        task: classification
        data: pydocs
        epochs: 1
        tune: {learning_rate: [5.0e-4, 1.0e-3]}
    seeds: [100, 101, 102, 103, 104, 105]
    tuning: {seeds: [0]}
    analysis: {reference: sync}

A seed of the test is a *block*: the runs of all stages and arms on it. The stages before the one with the arms are run
once a block and shared by all arms. Those after it are run once for each arm and block. `none` is no arm: its chain
leaves the stage out, and the next stage starts from the stage before.

Every stage may be tuned. On the tuning seeds the chain is run in order, each trial from the chosen trial of the stage
before on that seed. The stage with the arms is tuned for each arm. A later one is tuned once, on the models of the
reference, and all arms get what it chose; with ``tune: {each: ...}`` on the models of every arm, for that arm.

The config of a study with two stages, pretraining and fine-tuning, is `asyncsgd.studies.config.Config`: `algorithms`
and `base` are the stage with the arms, and `finetune` is the last stage. `two_stages` turns a chain into such a config
and a `Chain`, which holds all other stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from asyncsgd.errors import UsageError
from asyncsgd.studies.arms import converted, crossed
from asyncsgd.studies.config import (
    FINETUNE_SEEDS,
    FolderPart,
    GivenSettings,
    Settings,
    grid_of,
    settings_of,
    typed,
)
from asyncsgd.tasks import task_class

NONE = "none"
"""In the place of an arm: the chain that leaves the stage with the arms out."""
KEYS_OF_STAGE_WITH_ARMS = ("arms", "conditions", "exclude")
"""Keys that only the stage with the arms may have."""
KEYS_OF_LAST_STAGE = ("repetitions",)
"""Keys that only the last stage may have."""
KEYS_OF_TWO_STAGES = ("algorithms", "base", "task", "conditions", "exclude", "finetune")
"""Keys of a study of two stages, which a chain says in its stages."""

Tasks = Literal["masked_lm", "classification", "token_classification", "question_answering"]
UNKNOWN_TRIAL = "?"
"""Stands in the folder of a run for the number of the trial that tuning will choose."""
Stages = Annotated[list[Settings], Meta(min_length=2)]


@dataclasses.dataclass(frozen=True)
class TuningTarget:
    """What has trials of its own to choose from: an arm, or a stage without arms on the models of one arm."""

    name: str
    """The key of its chosen trial: an arm, a stage, or ``stage/arm``."""
    task: str
    settings: GivenSettings
    """The settings that all its trials share."""
    trials: tuple[GivenSettings, ...]
    folder: str
    """The folder above the folders of all its trials."""

    def folder_of(self, trial: int | str, seed: int) -> str:
        """The folder of the run of one trial on one seed.

        >>> TuningTarget("sync", "masked_lm", {}, ({},), "tuning/sync").folder_of(0, 7)
        'tuning/sync/t0-s7'
        """
        return f"{self.folder}/t{trial}-s{seed}"


@dataclasses.dataclass(frozen=True)
class ChainStage:
    """A stage of a chain that has no arms of its own."""

    name: str
    task: str
    settings: GivenSettings
    number: int
    """Its place in the chain, from 0."""
    trials: tuple[GivenSettings, ...] = ()
    """What tuning tries; empty where nothing is tuned."""
    each: bool = False
    """Whether the stage is tuned for every arm, on the models of that arm."""

    def tuning_name(self, arm: str) -> str:
        """The name under which this stage is tuned on the models of `arm`; all arms share it unless `each`."""
        return f"{self.name}/{arm}" if self.each else self.name

    def tuning_target(self, arm: str, folder: str) -> TuningTarget:
        """The tuning of this stage on the models of `arm`."""
        return TuningTarget(self.tuning_name(arm), self.task, self.settings, self.trials, folder)

    def seed(self, block: int) -> int:
        """The seed of this stage's runs in a block: the same for all arms, another one in every stage and block.

        It counts down from the top of the block's seeds, since repetitions of the last stage count up from their start.
        """
        return block * FINETUNE_SEEDS + FINETUNE_SEEDS - 1 - self.number


@dataclasses.dataclass(frozen=True)
class Chain:
    """The stages around the stage with the arms; a study of two stages has none of them."""

    task: str = "masked_lm"
    """The task of the stage with the arms."""
    before: tuple[ChainStage, ...] = ()
    """The stages before the one with the arms."""
    after: tuple[ChainStage, ...] = ()
    """The stages between the one with the arms and the last one."""
    tuned_last: ChainStage | None = None
    """The last stage if it is tuned, else None."""

    @property
    def on_tuning_seeds(self) -> tuple[ChainStage, ...]:
        """The stages after the one with the arms that are also run on the tuning seeds: up to the last tuned one."""
        stages = (*self.after, self.tuned_last) if self.tuned_last is not None else self.after
        numbers = [number for number, stage in enumerate(stages, start=1) if stage.trials]
        return stages[: max(numbers, default=0)]

    def rounds(self, stage_of_plan: str) -> int:
        """In how many rounds, at most, the runs of a stage of the plan are started; see `asyncsgd.studies.runs.STAGES`.

        A stage of the plan may hold several stages of the chain, and each of these waits for the runs of the one before
        it. One that is tuned takes two rounds: its trials, and then the runs that start from the chosen trial.
        """
        lengths = {"before": 2 * len(self.before), "trial": 2 * len(self.on_tuning_seeds), "after": len(self.after)}
        return max(1, lengths.get(stage_of_plan, 1))

    def stage_of(self, folder: str) -> ChainStage | None:
        """The stage of a run outside the stage with the arms, which the run's folder names.

        None: the run is of a last stage that is not tuned, which is no `ChainStage`.
        """
        kind, name, *_ = folder.split("/")
        if kind == "finetune":
            return self.tuned_last
        stages = (*self.before, *self.after, self.tuned_last)
        return next(stage for stage in stages if stage is not None and stage.name == name)


def two_stages(given: GivenSettings) -> tuple[Settings, Chain]:
    """Turn the config of a chain into the config of a study with two stages and the chain's other stages.

    Raises:
        UsageError: naming the stage and what to write instead.

    >>> stages = [{"name": "a", "task": "classification", "arms": {"sync": {}, "none": {}}},
    ...           {"name": "b", "task": "classification", "epochs": 1}]
    >>> config, chain = two_stages({"stages": stages, "seeds": [1]})
    >>> config["algorithms"], config["finetune"], chain.task
    ({'sync': {}}, {'epochs': 1, 'task': 'classification', 'baseline': True}, 'classification')
    """
    for key in KEYS_OF_TWO_STAGES:
        if key in given:
            raise UsageError(f"a config with stages has no {key} beside them; write it into a stage")
    parts = [dict(stage) for stage in typed(given["stages"], Stages, "stages")]
    names = [typed(part.pop("name", None), FolderPart, f"stages[{i}].name") for i, part in enumerate(parts)]
    if len(set(names)) < len(names):
        raise UsageError(f"every stage needs a name of its own, got {', '.join(names)}")
    with_arms = _stage_with_arms(parts, names)
    tasks, stages = _stages_without_arms(parts, names, with_arms)
    last = len(parts) - 1
    before = [stage for stage in stages if stage.number < with_arms]
    after = [stage for stage in stages if with_arms < stage.number < last]
    tuned_last = stages[-1] if stages and stages[-1].number == last else None
    chain = Chain(tasks[with_arms], tuple(before), tuple(after), tuned_last)
    if chain.on_tuning_seeds and given.get("analysis") is None:
        raise UsageError(
            f"stages.{chain.on_tuning_seeds[-1].name}: tune needs analysis: {{reference: ARM}}, whose models it tries"
        )
    for stage in chain.before:
        if stage.each:
            raise UsageError(f"stages.{stage.name}: tune: {{each: ...}} is for stages after {names[with_arms]}")
    config = {key: value for key, value in given.items() if key != "stages"}
    config |= _keys_of_arms(parts[with_arms], f"stages.{names[with_arms]}", given.get("tuning", {}))
    has_none = config["algorithms"].pop(NONE, None) is not None
    config["finetune"] = {**parts[last], "task": tasks[last], "baseline": has_none}
    repetitions = parts[last].get("repetitions", 1)
    if isinstance(repetitions, int) and repetitions > FINETUNE_SEEDS - len(parts):
        raise UsageError(f"stages.{names[last]}: repetitions must be at most {FINETUNE_SEEDS - len(parts)}")
    return config, chain


def _stages_without_arms(
    parts: Sequence[Settings], names: Sequence[str], with_arms: int
) -> tuple[list[str], list[ChainStage]]:
    """The task of every stage, and each stage that becomes a `ChainStage`: all but the one with the arms, and but the
    last one unless that is tuned.

    The keys `task` and `tune` are taken out of `parts`.
    """
    last = len(parts) - 1
    tasks: list[str] = []
    stages: list[ChainStage] = []
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        where = f"stages.{name}"
        task: str = typed(part.pop("task", None), Tasks, f"{where}.task")
        if number and tasks[-1] not in task_class(task).start_from:  # type: ignore[attr-defined]
            raise UsageError(f"{where}: {task} cannot start from {tasks[-1]}, the task of the stage before")
        tasks.append(task)
        for keys, owner in ((KEYS_OF_STAGE_WITH_ARMS, with_arms), (KEYS_OF_LAST_STAGE, last)):
            for key in keys:
                if key in part and number != owner:
                    raise UsageError(f"{where}: {key} is for the stage {names[owner]}; take it out")
        if number and "model" in part:
            raise UsageError(f"{where}: its model is that of the stage before; take model out")
        is_last_untuned = number == last and "tune" not in part
        if number != with_arms and not is_last_untuned:
            stages.append(_stage(name, task, part, number))
    return tasks, stages


def _keys_of_arms(part: Settings, where: str, tuning: Settings) -> Settings:
    """What the stage with the arms, `part`, is in the config of a study with two stages. Its `algorithms` still have
    `NONE`. The keys that are no settings are taken out of `part`.
    """
    arms = typed(part.pop("arms"), dict[FolderPart, Settings | None], f"{where}.arms")
    if arms.get(NONE):
        raise UsageError(f"{where}: the arm none leaves the stage out, so it has no settings")
    if not arms.keys() - {NONE}:
        raise UsageError(f"{where}: arms must name an algorithm, e.g. sync: {{mode: sync}}")
    config: Settings = {key: part.pop(key) for key in ("conditions", "exclude") if key in part}
    if "tune" in part:
        config["tuning"] = {"grid": part.pop("tune"), **tuning}
    config["algorithms"] = {name: settings or {} for name, settings in arms.items()}
    config["base"] = part
    return config


def _stage_with_arms(parts: Sequence[GivenSettings], names: Sequence[str]) -> int:
    """The number, from 0, of the one stage that has arms."""
    numbers = [number for number, part in enumerate(parts) if "arms" in part]
    if len(numbers) != 1 or numbers[0] == len(parts) - 1:
        having = ", ".join(names[number] for number in numbers) or "none"
        raise UsageError(
            f"exactly one stage must have arms, and not the last one, by whose score arms are compared; of the stages "
            f"{', '.join(names)} there are arms in {having}"
        )
    return numbers[0]


def _stage(name: str, task: str, part: Settings, number: int) -> ChainStage:
    """A stage without arms; its ``tune`` is taken out of `part`."""
    where = f"stages.{name}"
    tune = part.pop("tune", None)
    each = isinstance(tune, dict) and list(tune) == ["each"]
    given = {key: value for key, value in part.items() if key not in KEYS_OF_LAST_STAGE}
    settings = converted(where, settings_of(given, where, task, ("seed", "patience")), task)
    trials = []
    if tune is not None:
        grid = grid_of(tune["each"] if each else tune, f"{where}.tune", task)
        trials = [converted(where, trial, task, beside=settings) for trial in crossed(grid)]
    return ChainStage(name, task, settings, number, tuple(trials), each)
