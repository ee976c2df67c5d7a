"""Every run of a plan: its folder, its stage, its seeds, and the run that it starts from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from asyncsgd.studies.arms import Arm
from asyncsgd.studies.chain import UNKNOWN_TRIAL, Chain, ChainStage
from asyncsgd.studies.config import FINETUNE_SEEDS, Analysis, Config, Finetune, GivenSettings

Stage = Literal["base", "before", "tuning", "trial", "pilot", "test", "after", "finetune", "climb", "proof"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The stages of a plan, in their order. A stage of the plan may hold the runs of several stages of a chain:

- ``before``: runs and trials of the chain's stages before the one with the arms.
- ``tuning``: trials of the arms.
- ``trial``: trials of the chain's stages after the one with the arms.
- ``after``: runs of these stages for the test; those of the last one are ``finetune``.

A speed ladder has ``climb`` and ``proof`` and no others.
"""
TIMED: tuple[Stage, ...] = ("tuning", "pilot", "test", "climb", "proof")
"""Stages in which a run's seconds are a result, unless its clock is virtual."""
BASE = "base"
"""Folder, and arm, of the run that makes the base model."""
BASELINE = "baseline"
"""The arm of fine-tuning runs that start from the base model, without intermediate training."""


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of the plan; `folder` is its path below the study's folder."""

    folder: str
    stage: Stage
    arm: str
    seed: int
    replicate: int = 0
    trial: int | None = None
    parent: str | None = None
    """Folder of the run that it starts from, with `UNKNOWN_TRIAL` for the number of a trial; None: the base model."""
    finetune_seed: int | None = None
    """The run's own seed, where `seed` is that of its block; None: `seed` is its own."""


def shuffled(arms: Sequence[Arm], *key: object) -> list[Arm]:
    """The arms in an order that is a function of the key.

    The keys in `runs_of` begin with a 0 that has no meaning. Without it existing studies would have another order.
    """
    order = list(arms)
    random.Random(" ".join(map(str, key))).shuffle(order)
    return order


def runs_of(
    config: Config,
    arms: Sequence[Arm],
    base_model: GivenSettings | None,
    finetune: Finetune | None,
    analysis: Analysis | None,
    chain: Chain,
) -> Iterator[PlannedRun]:
    """Every run, one stage after the other in the order of `STAGES`. In every block the arms have an order of its own,
    which is a function of the config.
    """
    if base_model is not None:
        yield PlannedRun(BASE, "base", BASE, base_model.get("seed", 0))
    baseline = [BASELINE] if finetune is not None and finetune.baseline else []
    parents: dict[int, str | None] = {}  # seed -> the run from whose model the arms start
    for seed in (*config.tuning.seeds, *config.pilots, *config.seeds):
        parents[seed] = None
        for stage in chain.before:
            tries = seed in config.tuning.seeds
            of_stage = _of_stage(stage, "before", stage.name, f"before/{stage.name}", seed, parents[seed], tries)
            yield from of_stage
            parents[seed] = _parent_of_next_stage(of_stage)
    for seed in config.tuning.seeds:
        for number in range(len(arms[0].trials)):  # all arms have equally many
            for arm in shuffled(arms, 0, "tuning", seed, number):
                is_first = arm.trials.index(arm.trials[number]) == number
                if is_first:  # else the run is that of an equal trial that comes earlier
                    folder = f"tuning/{arm.name}/t{number}-s{seed}"
                    yield PlannedRun(folder, "tuning", arm.name, seed, trial=number, parent=parents[seed])
    if chain.on_tuning_seeds and analysis is not None:  # `two_stages` refuses such a chain without analysis
        yield from _trials(config.tuning.seeds, arms, baseline, analysis, chain, parents)
    for seed in config.pilots:
        for arm in shuffled(arms, 0, "pilot", seed):
            if analysis is not None and arm.algorithm == analysis.reference:
                yield PlannedRun(f"pilot/{arm.name}/s{seed}", "pilot", arm.name, seed, parent=parents[seed])
    for seed in config.seeds:
        for replicate in range(config.replicates):
            for arm in shuffled(arms, 0, "test", seed, replicate):
                if not replicate or not arm.virtual:  # else it would be the same run, bit for bit
                    folder = folder_of_test(arm.name, seed, replicate)
                    yield PlannedRun(folder, "test", arm.name, seed, replicate, parent=parents[seed])
    all_names = [*baseline, *[arm.name for arm in arms]]
    for seed in config.seeds:
        for name in all_names:
            parent = parents[seed] if name == BASELINE else folder_of_test(name, seed)
            for stage in chain.after:
                folder = f"after/{stage.name}/{name}/s{seed}"
                yield PlannedRun(folder, "after", name, seed, parent=parent, finetune_seed=stage.seed(seed))
                parent = folder
    repetitions = 0 if finetune is None else finetune.repetitions
    for seed in config.seeds:
        for repetition in range(repetitions):
            names = [arm.name for arm in shuffled(arms, 0, "finetune", seed, repetition)]
            for name in [*baseline, *names]:
                parent = parents[seed] if name == BASELINE else folder_of_test(name, seed)
                if chain.after:
                    parent = f"after/{chain.after[-1].name}/{name}/s{seed}"
                # One fine-tuning seed for all arms of a block, so that they are paired; another in every block.
                number = seed * FINETUNE_SEEDS + repetition
                folder = f"finetune/{name}/s{seed}-f{repetition}"
                yield PlannedRun(folder, "finetune", name, seed, parent=parent, finetune_seed=number)


def _of_stage(
    stage: ChainStage, kind: Stage, arm: str, folder: str, seed: int, parent: str | None, tries: bool
) -> list[PlannedRun]:
    """The runs of a stage of a chain that start from `parent`: one run, or one for each trial if it `tries` them.

    Args:
        kind: the stage of the plan.
        arm: whose models they start from. A stage before the arms has its own name there.
        folder: the folder above those of the runs.
    """
    if not (tries and stage.trials):
        return [PlannedRun(f"{folder}/s{seed}", kind, arm, seed, parent=parent, finetune_seed=stage.seed(seed))]
    runs = []
    for number in range(len(stage.trials)):
        of_trial = f"{folder}/t{number}-s{seed}"
        runs.append(PlannedRun(of_trial, kind, arm, seed, trial=number, parent=parent, finetune_seed=stage.seed(seed)))
    return runs


def _parent_of_next_stage(of_stage: Sequence[PlannedRun]) -> str:
    """The folder whose model the next stage starts from, where `of_stage` are all runs of a stage that start from one
    run: that of the only run, or that of the trial which tuning will choose.
    """
    first = of_stage[0]
    if first.trial is None:
        return first.folder
    above, _, _ = first.folder.rpartition("/")
    return f"{above}/t{UNKNOWN_TRIAL}-s{first.seed}"


def _trials(
    seeds: Sequence[int],
    arms: Sequence[Arm],
    baseline: Sequence[str],
    analysis: Analysis,
    chain: Chain,
    parents_of_arms: Mapping[int, str | None],
) -> Iterator[PlannedRun]:
    """The runs of the chain's stages after the one with the arms, on tuning seeds.

    The models of the reference go through all of them. Those of the other arms go through a stage if it, or a later
    one, is tuned for each arm (`ChainStage.each`).

    Args:
        parents_of_arms: seed -> the folder whose model all arms start from.
    """
    condition = (analysis.primary.num_workers, analysis.primary.clock)
    of_condition = [arm for arm in arms if arm.workers_and_clock == condition]
    reference = next(arm.name for arm in of_condition if arm.algorithm == analysis.reference)
    for seed in seeds:
        parents: dict[str, str | None] = {}
        for tuned in arms:
            parents[tuned.name] = f"tuning/{tuned.name}/t{UNKNOWN_TRIAL}-s{seed}"
        for name in baseline:
            parents[name] = parents_of_arms[seed]
        for number, stage in enumerate(chain.on_tuning_seeds):
            needs_all_arms = any(later.each for later in chain.on_tuning_seeds[number:])
            names = list(parents) if needs_all_arms else [reference]
            for arm in names:
                tries = stage.each or arm == reference
                of_stage = _of_stage(stage, "trial", arm, f"trial/{stage.name}/{arm}", seed, parents[arm], tries)
                yield from of_stage
                parents[arm] = _parent_of_next_stage(of_stage)


def folder_of_test(arm: str, seed: int, replicate: int = 0) -> str:
    """The folder of a test run.

    >>> folder_of_test("sync-w2", 100)
    'test/sync-w2/s100'
    """
    folder = f"test/{arm}/s{seed}"
    return f"{folder}-r{replicate}" if replicate else folder
