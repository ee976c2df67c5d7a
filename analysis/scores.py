"""Scores after fine-tuning as pairs: means over the repetitions of a pretraining seed, then pair by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame

from analysis.gate import between, told_apart
from analysis.measure import BY_RANKS, values_of
from analysis.pairs import copied, diverged, happened, left_out, lost_runs, united
from analysis.questions import BASELINE, Plan
from analysis.runs import FROM_SCRATCH, Note, where
from asyncsgd.studies.config import words_of_score
from asyncsgd.tasks.scores import accuracy, macro_f1, matthews

OF_CLASSES: Mapping[str, Callable[[NDArray[np.int64]], float]] = {
    "macro_f1": macro_f1,
    "accuracy": accuracy,
    "matthews": matthews,
}
"""Scores that a confusion matrix gives. A task that records none of them is judged by the first."""


def metric_of(runs: DataFrame) -> tuple[str, bool]:
    """What fine-tuned models of a study are judged by, the first score of their task, and whether lower is better."""
    better: dict[str, str] = next((known for details in runs["details"] if (known := details.get("better"))), {})
    metric = next(iter(better), "score")
    return metric, better.get(metric) == "lower"


def by_seed(runs: DataFrame) -> DataFrame:
    """Mean scores (seeds x arms); nan where a run of the seed was lost, and infinite, to the worse side, where one
    diverged, could not begin, or ended as a model whose predictions leave the score undefined.
    """
    tuned = runs[runs["stage"] == "finetune"].copy()
    metric, lower = metric_of(tuned)
    diverged = _without_model(runs)
    missing = tuned["status"].eq("MISSING")
    tuned["metric"] = tuned["metric"].where(tuned["usable"])
    undefined = tuned["details"].map(lambda details: metric in (details.get("undefined_scores") or {}))
    collapsed = tuned["usable"] & tuned["metric"].isna() & ~undefined
    nowhere = tuned["diverged"] | (missing & tuned["parent"].isin(diverged)) | collapsed
    tuned.loc[nowhere, "metric"] = math.inf if lower else -math.inf
    found = tuned.groupby(["arm", "seed"], sort=False)["metric"].agg(lambda one: one.mean(skipna=False))
    return found.unstack(0)


def _without_model(runs: DataFrame) -> set[str]:
    """The runs that diverged, and those that could not begin since a run that they descend from diverged."""
    without = set(runs.index[runs["diverged"]])
    missing = runs[runs["status"].eq("MISSING")]
    while more := set(missing.index[missing["parent"].isin(without)]) - without:
        without |= more
    return without


def scores_of(runs: DataFrame, arms: DataFrame, plan: Plan) -> Iterator[dict[str, Any]]:
    """Columns of `tests`: the score of every arm against its reference, and of the reference against no intermediate
    training.
    """
    tuned = runs[runs["stage"] == "finetune"]
    if where(tuned, usable=True, diverged=False).empty:
        return
    means = by_seed(runs)
    metric, lower = metric_of(tuned)
    for group, members in arms.groupby("group", sort=False):
        there = [name for name in members.index if name in means]
        reference = next((name for name in there if members.loc[name, "algorithm"] == plan.reference), None)
        asked = [(name, reference) for name in there if reference and name != reference]
        if BASELINE in means:
            control = plan.registered.control
            own = [name for name in there if members.loc[name, "algorithm"] != control]
            asked += [(name, BASELINE) for name in ([reference] if reference else own)]
        for treatment, other in asked:
            assert other is not None
            caveats = _lost(runs, (treatment, other))
            why, also = _unlike(runs, (treatment, other), plan)
            score = _score(tuned, means, treatment, other)
            score["notes"] += (*also,)
            yield {
                "group": str(group),
                "endpoint": metric,
                "unit": words_of_score(metric),
                "lower": lower,
                "caveats": caveats,
                **score,
                **({"nothing": why, "unlike": True} if why else {}),
            }


def _unlike(runs: DataFrame, arms: tuple[str, str], plan: Plan) -> tuple[str, list[Note]]:
    """As `united`, of the fine-tunings and of the pretrainings that these began from."""
    treatment, reference = arms
    usable = where(runs, usable=True, replicate=0)
    ours, theirs = (where(usable, arm=arm) for arm in arms)
    tests = between(where(ours, stage="test"), where(theirs, stage="test"), told_apart(treatment, reference, plan))
    tuned = between(where(ours, stage="finetune"), where(theirs, stage="finetune"), set(), tuned=True)
    both = [*tests.pairs.values(), *tuned.pairs.values()]
    return united(both, plan)


def _score(tuned: DataFrame, means: DataFrame, treatment: str, reference: str) -> dict[str, Any]:
    both = means[[treatment, reference]].dropna()
    own = {arm: tuned[(tuned["arm"] == arm) & tuned["seed"].isin(both.index)] for arm in (treatment, reference)}
    gained = math.nan
    if BASELINE in means and reference != BASELINE:
        before = means.loc[both.index, BASELINE]
        if np.isfinite(both).all(axis=None) and np.isfinite(before).all():
            gained = float((both[reference] - before).mean()) * (-1 if metric_of(tuned)[1] else 1)
    nothing = ""
    if ignorant := [arm for arm, runs in own.items() if not_learned(runs)]:
        be = "is" if len(ignorant) == 1 else "are"
        nothing = f"{' and '.join(ignorant)} {be} no better than a tagger that gives every word the commonest tag"
    seeds = set(tuned.loc[tuned["arm"].isin((treatment, reference)), "seed"])
    twins = copied(*[_ends_of_seeds(runs) for runs in own.values()])
    left = left_out(sorted(seeds - set(both.index)), (), twins)
    both = both.drop(index=list(twins))
    notes: list[Note] = []
    for arm in (treatment, reference):
        notes += happened(own[arm], f"fine-tunings of {arm}")
        if number := int(np.isinf(both[arm]).sum()):
            collapsed = where(own[arm], usable=True, diverged=False)["metric"].isna().any()
            note = diverged(arm, number, len(both))
            if collapsed:
                without = "without a score, since one thing is predicted of all texts, or diverged"
                note = Note(f"{arm}: {without} {number}/{len(both)}", "undefined")
            notes += [note, BY_RANKS]
    if pd.concat(own.values())["from_scratch"].any():
        notes.append(FROM_SCRATCH)
    ours, theirs = (both[arm].to_numpy() for arm in (treatment, reference))
    values = values_of(ours, theirs, list(both.index), nothing=nothing, gained=gained)
    marks = tuple(dict.fromkeys(notes))
    return {"treatment": treatment, "reference": reference, "left_out": left, "notes": marks, **values}


def _ends_of_seeds(tuned: DataFrame) -> dict[Any, str]:
    """Seed -> the hashes of the last parameters of its fine-tunings, where all are recorded and none diverged."""
    found = {}
    for seed, own in tuned.groupby("seed"):
        hashes = own["parameters_sha256"].tolist()
        if all(hashes) and not own["diverged"].any():
            found[seed] = " ".join(sorted(hashes))
    return found


def _lost(runs: DataFrame, arms: tuple[str, str]) -> tuple[str, ...]:
    """The runs of every stage that a score needed and that have no result: what is left was not chosen before looking.
    A model that diverged is a result, and so is that nothing could be made of it.
    """
    diverged = _without_model(runs)
    told = []
    for arm in arms:
        own = where(runs, arm=arm, replicate=0)
        own = own[~((own["status"] == "MISSING") & own["parent"].isin(diverged))]
        told += lost_runs(own[own["stage"] == "finetune"], f"fine-tunings of {arm}")
        told += lost_runs(own[own["stage"] == "test"], f"runs of {arm}")
    return tuple(told)


def nothing_learned(runs: DataFrame) -> str:
    """Why the models of an arm have learned nothing; empty where they have, and where it is not known.

    Their loss does not end below its start, or their classes are predicted no better, by their own score, than by one
    class for everything.
    """
    of_arm = where(runs, usable=True, diverged=False, replicate=0)
    tests = of_arm[of_arm["stage"] == "test"]
    gained = (tests["first_loss"] - tests["loss"]).dropna()
    if len(gained) and gained.mean() <= 0:
        return "the loss does not end below its start"
    tuned = of_arm[of_arm["stage"] == "finetune"]
    for one in (tuned, tests):
        known = [np.array(details["confusion"]) for details in one["details"] if details.get("confusion")]
        score = OF_CLASSES.get(metric_of(one)[0], macro_f1)
        if known and np.mean([score(matrix) - _of_one_class(matrix, score) for matrix in known]) <= 0:
            return "one class for everything is predicted as well"
        if not_learned(one):
            return "the commonest tag for every word is predicted as well"
    return ""


def _of_one_class(confusion: NDArray[np.int64], score: Callable[[NDArray[np.int64]], float]) -> float:
    """The score of one class for everything, the best one."""
    counts = confusion.sum(axis=1)
    one_class = np.eye(len(counts), dtype=int)
    return max(score(np.outer(counts, column)) for column in one_class)


def not_learned(runs: DataFrame) -> bool:
    """Whether taggers are no better, in span F1 or accuracy, than one that gives every word the commonest tag."""
    alive = where(runs, usable=True, diverged=False)["details"]
    told = [details for details in alive if details.get("majority")]
    for metric in ("span_f1", "accuracy"):
        pairs = [(_metric(one, metric), one["majority"].get(metric)) for one in told]
        known = [own - other for own, other in pairs if own is not None and other is not None]
        if known and sum(known) <= 0:
            return True
    return False


def _metric(details: dict[str, Any], name: str) -> float | None:
    return (details.get("metrics") or {}).get(name)
