"""Scores after fine-tuning, paired by pretraining seed; the score of a seed is the mean over its fine-tunings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from analysis.gate import compare_arms, differences_by_design, settings_that_differ
from analysis.measure import BY_RANKS, values_of
from analysis.pairs import (
    caveats_on_lost,
    comparisons_of_group,
    copies_of_seeds,
    limits_of_unlike,
    note_on_diverged,
    notes_on_events,
    seeds_left_out,
)
from analysis.questions import BASELINE, Plan
from analysis.runs import FROM_SCRATCH, Columns, Note, RunRow, each, rows_with
from asyncsgd.studies.config import words_of_score
from asyncsgd.tasks.scores import accuracy, macro_f1, matthews

OF_CLASSES: Mapping[str, Callable[[NDArray[np.int64]], float]] = {
    "macro_f1": macro_f1,
    "accuracy": accuracy,
    "matthews": matthews,
}
"""Scores that a confusion matrix gives. A task that records none of them is judged by the first."""


def metric_of(runs: DataFrame) -> tuple[str, bool]:
    """The score that fine-tuned models are judged by, which is the first of their task, and whether lower is better."""
    for details in runs["details"]:
        better = details.get("better")
        if better:
            metric = next(iter(better))
            return metric, better[metric] == "lower"
    return "score", False


def mean_scores(runs: DataFrame) -> DataFrame:
    """The mean score over the fine-tunings of a seed (seeds x arms).

    A mean is nan where a run was lost, or where the evaluation set leaves the score undefined (`undefined_scores`). It
    is infinite, to the worse side, where a run diverged, could not begin because its pretraining diverged, or has no
    score because the model predicts one class.
    """
    tuned = rows_with(runs, stage="finetune").copy()
    metric, lower = metric_of(tuned)
    tuned["metric"] = tuned["metric"].where(tuned["usable"])
    could_not_begin = tuned["status"].eq("MISSING") & tuned["parent"].isin(_without_model(runs))
    is_undefined = tuned["details"].map(lambda details: metric in (details.get("undefined_scores") or {}))
    is_collapsed = tuned["usable"] & tuned["metric"].isna() & ~is_undefined
    is_worst = tuned["diverged"] | could_not_begin | is_collapsed
    tuned.loc[is_worst, "metric"] = math.inf if lower else -math.inf
    repetitions = tuned.groupby(["arm", "seed"], sort=False)["metric"]
    return repetitions.agg(lambda scores: scores.mean(skipna=False)).unstack(0)


def _without_model(runs: DataFrame) -> set[str]:
    """The runs that left no model: they diverged, or could not begin since a run that they descend from diverged."""
    without_model = set(runs.index[runs["diverged"]])
    missing = runs[runs["status"].eq("MISSING")]
    while True:
        children = set(missing.index[missing["parent"].isin(without_model)])
        if children <= without_model:
            return without_model
        without_model |= children


def scores_of(runs: DataFrame, arms: DataFrame, plan: Plan) -> Iterator[Columns]:
    """Columns of `tests`: the score of every arm against its reference, and of the reference against no intermediate
    training.
    """
    tuned = rows_with(runs, stage="finetune")
    if rows_with(tuned, usable=True, diverged=False).empty:
        return
    means = mean_scores(runs)
    metric, lower = metric_of(tuned)
    for group, members in arms.groupby("group", sort=False):
        scored = members[members.index.isin(means.columns)]
        for treatment, reference, variant in _asked(scored, BASELINE in means, plan):
            pair = (treatment, reference)
            why, notes = _unlike(runs, pair, plan)
            columns = _columns_of_scores(tuned, means, *pair)
            columns["notes"] += tuple(notes)
            columns |= {"endpoint": metric, "unit": words_of_score(metric), "lower": lower}
            columns |= {"group": f"{group}{variant}", "caveats": _lost(runs, pair)}
            if why:
                columns |= {"why_no_test": why, "is_not_comparable": True}
            yield columns


def _asked(members: DataFrame, has_baseline: bool, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The comparisons of a group, as `comparisons_of_group` gives them, and those with the base model.

    The references are compared with the base model. Without a reference all arms are.

    >>> from analysis.questions import NO_PLAN
    >>> from asyncsgd.studies.files import PlannedArm
    >>> settings = {"a": {"warmup": 0}, "b": {"warmup": 80}}
    >>> planned = [PlannedArm(f"{name}-{key}", name, settings[key]) for key in settings for name in ("sync", "async")]
    >>> plan = NO_PLAN._replace(arms={arm.name: arm for arm in planned})
    >>> members = DataFrame({"algorithm": {arm.name: arm.algorithm for arm in planned}})
    >>> for asked in _asked(members, True, plan):
    ...     print(asked)
    ('async-a', 'sync-a', ', warmup 0')
    ('async-b', 'sync-b', ', warmup 80')
    ('sync-a', 'baseline', '')
    ('sync-b', 'baseline', '')
    """
    yield from comparisons_of_group(members, plan)
    if has_baseline:
        references = members.index[members["algorithm"] == plan.reference]
        others = members.index[members["algorithm"] != plan.registered.control]
        for arm in references if len(references) else others:
            yield arm, BASELINE, ""


def _unlike(runs: DataFrame, arms: tuple[str, str], plan: Plan) -> tuple[str, list[Note]]:
    """Why the fine-tunings of two arms, or their pretrainings, are not comparable, and notes on what they differ in."""
    treatment, reference = arms
    usable = rows_with(runs, usable=True, replicate=0)
    ours = rows_with(usable, arm=treatment)
    theirs = rows_with(usable, arm=reference)
    allowed = differences_by_design(treatment, reference, plan)
    tests = compare_arms(rows_with(ours, stage="test"), rows_with(theirs, stage="test"), allowed)
    allowed_in_tuned = _differences_of_fine_tunings(arms, plan)
    tuned = compare_arms(
        rows_with(ours, stage="finetune"), rows_with(theirs, stage="finetune"), allowed_in_tuned, fine_tuned=True
    )
    for pair in tuned.pairs.values():
        for key in allowed_in_tuned & {*pair.mentions}:
            pair.mentions[f"{key} of the fine-tuning"] = pair.mentions.pop(key)
    both = [*tests.pairs.values(), *tuned.pairs.values()]
    why, notes = limits_of_unlike(both, arms, plan)
    scored = {scored_by(run) for own in (ours, theirs) for run in each(rows_with(own, stage="finetune"))}
    if len(scored) > 1:
        kinds = " and ".join(sorted(scored))
        why = why or f"the fine-tunings are scored by {kinds}; put those of each into a folder of their own"
    return why, notes


def _differences_of_fine_tunings(arms: tuple[str, str], plan: Plan) -> set[str]:
    """The settings in which the fine-tunings of two arms may differ: the plan has another value, as tuning may choose
    for each arm, or the reader names them.
    """
    if not plan.settings:  # loose runs, or the plan of an older version
        return {*plan.arms_differ_in}
    settings = {run.arm: plan.settings.get(run.folder, {}) for run in plan.runs if run.stage == "finetune"}
    treatment, reference = arms
    return settings_that_differ(settings[treatment], settings[reference])


def scored_by(run: RunRow) -> str:
    """The score by which a fine-tuning is judged, and the hash of its data."""
    metric = next(iter(run.details.get("better") or {}), "score")
    return f"{metric} on data {run.data[:12]}"


def _columns_of_scores(tuned: DataFrame, means: DataFrame, treatment: str, reference: str) -> Columns:
    """Columns of `tests`: the scores of two arms, and what limits them."""
    arms = (treatment, reference)
    both = means[[*arms]].dropna()
    of_pairs = tuned[tuned["seed"].isin(both.index)]
    own = {arm: rows_with(of_pairs, arm=arm) for arm in arms}
    gained = _gained(tuned, means, both, reference)
    why_no_test = ""
    ignorant = [arm for arm in arms if taggers_learned_nothing(own[arm])]
    if ignorant:
        be = "is" if len(ignorant) == 1 else "are"
        why_no_test = f"{' and '.join(ignorant)} {be} no better than a tagger that gives every word the commonest tag"
    seeds = set(tuned.loc[tuned["arm"].isin(arms), "seed"])
    twins = copies_of_seeds(_ends_of_seeds(own[treatment]), _ends_of_seeds(own[reference]))
    left = seeds_left_out(sorted(seeds - set(both.index)), (), twins)
    both = both.drop(index=list(twins))
    notes: list[Note] = []
    for arm in arms:
        notes += notes_on_events(own[arm], f"fine-tunings of {arm}")
        number = int(np.isinf(both[arm]).sum())
        if number:
            notes.append(_note_on_worst(own[arm], arm, number, len(both)))
            notes.append(BY_RANKS)
    if any(runs["from_scratch"].any() for runs in own.values()):
        notes.append(FROM_SCRATCH)
    ours = both[treatment].to_numpy()
    theirs = both[reference].to_numpy()
    return {
        "treatment": treatment,
        "reference": reference,
        "left_out": left,
        "notes": tuple(dict.fromkeys(notes)),
        **values_of(ours, theirs, list(both.index), why_no_test=why_no_test, gained=gained),
    }


def _gained(tuned: DataFrame, means: DataFrame, both: DataFrame, reference: str) -> float:
    """By how much the reference is better than the base model; nan where that is not known."""
    if BASELINE not in means or reference == BASELINE:
        return math.nan
    before = means.loc[both.index, BASELINE]
    if not (np.isfinite(both).all(axis=None) and np.isfinite(before).all()):
        return math.nan
    rise = float((both[reference] - before).mean())
    lower = metric_of(tuned)[1]
    return -rise if lower else rise


def _note_on_worst(tuned: DataFrame, arm: str, number: int, of: int) -> Note:
    """How many seeds of an arm are worse than any score, and why."""
    alive = rows_with(tuned, usable=True, diverged=False)
    if alive["metric"].isna().any():
        why = "without a score, since one thing is predicted of all texts, or diverged"
        return Note(f"{arm}: {why} {number}/{of}", "undefined")
    return note_on_diverged(arm, number, of)


def _ends_of_seeds(tuned: DataFrame) -> dict[Any, str]:
    """Seed -> the hashes of the last parameters of its fine-tunings, where all are recorded and none diverged."""
    found = {}
    for seed, own in tuned.groupby("seed"):
        hashes = own["parameters_sha256"].tolist()
        if all(hashes) and not own["diverged"].any():
            found[seed] = " ".join(sorted(hashes))
    return found


def _lost(runs: DataFrame, arms: tuple[str, str]) -> tuple[str, ...]:
    """Caveats on runs of every stage that a score needs and that have no result: leaving them out may favour an arm.

    A pretraining that diverged is a result, and so is a fine-tuning that could not begin because of it.
    """
    could_not_begin = (runs["status"] == "MISSING") & runs["parent"].isin(_without_model(runs))
    wanted = rows_with(runs[~could_not_begin], replicate=0)
    sentences = []
    for arm in arms:
        sentences += caveats_on_lost(rows_with(wanted, arm=arm, stage="finetune"), f"fine-tunings of {arm}")
        sentences += caveats_on_lost(rows_with(wanted, arm=arm, stage="test"), f"runs of {arm}")
    return tuple(sentences)


def why_nothing_learned(runs: DataFrame) -> str:
    """Why the models of an arm have learned nothing; empty where they have, and where it is not known.

    Their loss does not end below its start, or their classes are predicted no better, by their own score, than by one
    class for everything.
    """
    of_arm = rows_with(runs, usable=True, diverged=False, replicate=0)
    tests = rows_with(of_arm, stage="test")
    gained = (tests["first_loss"] - tests["loss"]).dropna()
    if len(gained) and gained.mean() <= 0:
        return "the loss does not end below its start"
    tuned = rows_with(of_arm, stage="finetune")
    for trained in (tuned, tests):
        gains = _gains_over_one_class(trained)
        if gains and np.mean(gains) <= 0:
            return "one class for everything is predicted as well"
        if taggers_learned_nothing(trained):
            return "the commonest tag for every word is predicted as well"
    return ""


def _gains_over_one_class(runs: DataFrame) -> list[float]:
    """By how much each classifier is better than one class for everything, by its own score."""
    score = OF_CLASSES.get(metric_of(runs)[0], macro_f1)
    gains = []
    for details in runs["details"]:
        if details.get("confusion"):
            matrix = np.array(details["confusion"])
            gains.append(score(matrix) - _of_one_class(matrix, score))
    return gains


def _of_one_class(confusion: NDArray[np.int64], score: Callable[[NDArray[np.int64]], float]) -> float:
    """The best score of a model that predicts one class for everything."""
    counts = confusion.sum(axis=1)
    scores = []
    for predicted in np.eye(len(counts), dtype=int):
        scores.append(score(np.outer(counts, predicted)))  # its confusion matrix
    return max(scores)


def taggers_learned_nothing(runs: DataFrame) -> bool:
    """Whether taggers are no better, in span F1 or accuracy, than one that gives every word the commonest tag."""
    alive = rows_with(runs, usable=True, diverged=False)
    for metric in ("span_f1", "accuracy"):
        gains = []
        for details in alive["details"]:
            score = (details.get("metrics") or {}).get(metric)
            of_commonest = (details.get("majority") or {}).get(metric)
            if score is not None and of_commonest is not None:
                gains.append(score - of_commonest)
        if gains and sum(gains) <= 0:
            return True
    return False
