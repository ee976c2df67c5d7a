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

The stages before the one with the arms are run once a block and shared by all arms. Those after it are run once an arm
and block. `none` is no arm: its chain leaves the stage out, and the next stage starts from the stage before.

Every stage may be tuned. On the tuning seeds the chain is run in order, each trial from the chosen trial of the stage
before on that seed. The stage with the arms is tuned for each arm. A later one is tuned once, on the models of the
reference, and all arms get what it chose; with ``tune: {each: ...}`` on the models of every arm, for that arm.

A study of two stages, pretraining and fine-tuning, is such a chain: `algorithms` and `base` are the stage with the
arms, and `finetune` is the last one. So a chain becomes the config of such a study with stages around its arms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncsgd.errors import UsageError
from asyncsgd.studies.arms import crossed, valid
from asyncsgd.studies.config import FINETUNE_SEEDS, Part, Settings, grid_of, settings_of, typed
from asyncsgd.tasks import task_class

NONE = "none"
"""The arm that leaves its stage out."""
OF_ARMS = ("arms", "conditions", "exclude")
"""Keys that only the stage with the arms may have."""
OF_LAST = ("repetitions",)
"""Keys that only the last stage may have."""
OF_TWO_STAGES = ("algorithms", "base", "task", "conditions", "exclude", "finetune")
"""Keys of a study of two stages, which a chain says in its stages."""

Tasks = Literal["masked_lm", "classification", "token_classification", "question_answering"]
CHOSEN = "?"
"""In the folder of a run: the number of the trial that tuning chooses."""
Stages = Annotated[list[Settings], Meta(min_length=2)]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What is tuned by itself: an arm, or a stage without arms."""

    name: str
    """What it is called by what tuning chooses: an arm, a stage, or ``stage/arm``."""
    task: str
    settings: Mapping[str, Any]
    """Those of all trials."""
    trials: tuple[Mapping[str, Any], ...]
    folder: str
    """Of all trials."""

    def folder_of(self, trial: int | str, seed: int) -> str:
        """
        >>> Tuned("sync", "masked_lm", {}, ({},), "tuning/sync").folder_of(0, 7)
        'tuning/sync/t0-s7'
        """
        return f"{self.folder}/t{trial}-s{seed}"


@dataclasses.dataclass(frozen=True)
class ChainStage:
    """A stage without arms of its own."""

    name: str
    task: str
    settings: Mapping[str, Any]
    number: int
    """Its place in the chain, from 0."""
    trials: tuple[Mapping[str, Any], ...] = ()
    """What tuning tries; empty where nothing is tuned."""
    each: bool = False
    """Whether every arm is tuned on models of its own."""

    def tuned(self, arm: str, folder: str) -> Tuned:
        """It as what is tuned, on the models of an arm."""
        return Tuned(f"{self.name}/{arm}" if self.each else self.name, self.task, self.settings, self.trials, folder)

    def seed(self, block: int) -> int:
        """The seed of its runs in a block: the same for all arms, another one in every stage and block."""
        return block * FINETUNE_SEEDS + FINETUNE_SEEDS - 1 - self.number


@dataclasses.dataclass(frozen=True)
class Chain:
    """The stages around the arms of a study; none of them for a study of two stages."""

    task: str = "masked_lm"
    """Of the stage with the arms."""
    before: tuple[ChainStage, ...] = ()
    after: tuple[ChainStage, ...] = ()
    """Those between the stage with the arms and the last one."""
    last: ChainStage | None = None
    """The last stage, where it is tuned."""

    @property
    def later(self) -> tuple[ChainStage, ...]:
        """The stages behind that of the arms that are run on tuning seeds: those up to the last one that is tuned."""
        stages = (*self.after, self.last) if self.last is not None else self.after
        numbers = [number for number, stage in enumerate(stages, start=1) if stage.trials]
        return stages[: max(numbers, default=0)]

    def length(self, stage: str) -> int:
        """How many times runs of a stage of the plan begin that wait for others of it, or for what these choose."""
        lengths = {"before": 2 * len(self.before), "trial": 2 * len(self.later), "after": len(self.after)}
        return max(1, lengths.get(stage, 1))

    def stage_of(self, folder: str) -> ChainStage | None:
        """That of a run of no arm's stage, by its folder; None for the last one where it is not tuned."""
        kind, name, *_ = folder.split("/")
        if kind == "finetune":
            return self.last
        named = [*self.before, *self.after, *([self.last] if self.last is not None else [])]
        return next(stage for stage in named if stage.name == name)


def two_stages(given: Mapping[str, Any]) -> tuple[dict[str, Any], Chain]:
    """The config of the study of two stages that a chain is, and the stages around them.

    Raises:
        UsageError: naming the stage and what to write instead.

    >>> stages = [{"name": "a", "task": "classification", "arms": {"sync": {}, "none": {}}},
    ...           {"name": "b", "task": "classification", "epochs": 1}]
    >>> config, chain = two_stages({"stages": stages, "seeds": [1]})
    >>> config["algorithms"], config["finetune"], chain.task
    ({'sync': {}}, {'epochs': 1, 'task': 'classification', 'baseline': True}, 'classification')
    """
    if unwanted := [key for key in OF_TWO_STAGES if key in given]:
        raise UsageError(f"a config with stages has no {unwanted[0]} beside them; write it into a stage")
    parts = [dict(stage) for stage in typed(given["stages"], Stages, "stages")]
    names = [typed(part.pop("name", None), Part, f"stages[{number}].name") for number, part in enumerate(parts)]
    if len(set(names)) < len(names):
        raise UsageError(f"every stage needs a name of its own, got {', '.join(names)}")
    middle = _stage_with_arms(parts, names)
    last = len(parts) - 1
    tasks: list[str] = []
    stages: list[ChainStage] = []
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        where = f"stages.{name}"
        task: str = typed(part.pop("task", None), Tasks, f"{where}.task")
        if number and tasks[-1] not in task_class(task).start_from:  # type: ignore[attr-defined]
            raise UsageError(f"{where}: {task} cannot start from {tasks[-1]}, the task of the stage before")
        tasks.append(task)
        for keys, owner in ((OF_ARMS, middle), (OF_LAST, last)):
            if number != owner and (wrong := [key for key in keys if key in part]):
                raise UsageError(f"{where}: {wrong[0]} is for the stage {names[owner]}; take it out")
        if number and "model" in part:
            raise UsageError(f"{where}: its model is that of the stage before; take model out")
        if number != middle and (number != last or "tune" in part):
            stages.append(_stage(name, task, part, number))
    whole = {key: value for key, value in given.items() if key != "stages"}
    arms = parts[middle]
    for key in ("conditions", "exclude"):
        if key in arms:
            whole[key] = arms.pop(key)
    before = tuple(stage for stage in stages if stage.number < middle)
    after = tuple(stage for stage in stages if middle < stage.number < last)
    chain = Chain(tasks[middle], before, after, next((stage for stage in stages if stage.number == last), None))
    if "tune" in arms:
        whole["tuning"] = {"grid": arms.pop("tune"), **whole.get("tuning", {})}
    if chain.later and whole.get("analysis") is None:
        raise UsageError(
            f"stages.{chain.later[-1].name}: tune needs analysis: {{reference: ARM}}, whose models it tries"
        )
    if any(stage.each for stage in before):
        raise UsageError(f"stages.{before[0].name}: tune: {{each: ...}} is for stages behind {names[middle]}")
    algorithms = dict(typed(arms.pop("arms"), dict[Part, Settings | None], f"stages.{names[middle]}.arms"))
    has_none = NONE in algorithms
    if algorithms.pop(NONE, None):
        raise UsageError(f"stages.{names[middle]}: the arm none leaves the stage out, so it has no settings")
    if not algorithms:
        raise UsageError(f"stages.{names[middle]}: arms must name an algorithm, e.g. sync: {{mode: sync}}")
    whole["algorithms"] = {name: settings or {} for name, settings in algorithms.items()}
    whole["base"] = arms
    whole["finetune"] = {**parts[last], "task": tasks[last], "baseline": has_none}
    repetitions = parts[last].get("repetitions", 1)
    if isinstance(repetitions, int) and repetitions > FINETUNE_SEEDS - len(parts):
        raise UsageError(f"stages.{names[last]}: repetitions must be at most {FINETUNE_SEEDS - len(parts)}")
    return whole, chain


def _stage_with_arms(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    """The place of the stage in which the arms differ."""
    numbers = [number for number, part in enumerate(parts) if "arms" in part]
    if len(numbers) != 1 or numbers[0] == len(parts) - 1:
        having = ", ".join(names[number] for number in numbers) or "none"
        raise UsageError(
            f"one stage has arms, and the last one, which is another, is what they are compared by; of the stages "
            f"{', '.join(names)} there are arms in {having}"
        )
    return numbers[0]


def _stage(name: str, task: str, part: Settings, number: int) -> ChainStage:
    """A stage without arms; its ``tune`` is taken out of `part`."""
    where = f"stages.{name}"
    tune = part.pop("tune", None)
    each = isinstance(tune, dict) and list(tune) == ["each"]
    given = {key: value for key, value in part.items() if key not in OF_LAST}
    settings = settings_of(given, where, ("seed", "patience"))
    all_settings = valid(where, settings, task)
    known = {key: all_settings[key] for key in settings}
    trials = []
    for trial in [] if tune is None else crossed(grid_of(tune["each"] if each else tune, f"{where}.tune")):
        typed_trial = valid(where, {**settings, **trial}, task)
        trials.append({key: typed_trial[key] for key in trial})
    return ChainStage(name, task, known, number, tuple(trials), each)
