"""The gate: may two runs be compared? Their settings and what they began from must have the same meaning. Only the
settings in which their arms are meant to differ may be unlike.

An absent setting has its default, so a run that was made before a setting existed equals a later one with its default.
Rules, speeds, networks and churn are compared as objects, ``auto`` as what it became, data and models by fingerprint
and not by path. What cannot be known, e.g. a function in a field of a task, is mentioned and not refused.

The arms of a plan may differ in the settings that the plan gives them and in what tuning chose. Loose runs may differ
in mode, rule, number of workers and the settings that the reader names. Both may differ in what follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from pandas import DataFrame

from analysis.meanings import (
    NOT_KNOWN,
    asked_of,
    asked_or_default,
    default_of,
    meaning,
    meanings_in_runs,
    means_the_same,
)
from analysis.questions import Plan
from analysis.runs import MACHINE, RunPair, RunRow, each
from asyncsgd.settings.groups import MEANINGFUL_FOR, Budget, Job, Machine, Steps
from asyncsgd.settings.specs import specs_of

CHANGES_SECONDS = (
    "device",
    "machine",
    "torch",
    "threads",
    "micro_batches",
    "gradient_checkpointing",
    "compile",
    "prefetch",
    "transport",
)
"""Those of `MENTIONED` that also change the seconds of a training. Where one differs, measured seconds are not
compared."""
MENTIONED = (
    *CHANGES_SECONDS,
    "commit",
    "auto_batch",
    "deepspeed_config",
    "evaluations",
    "evaluate_every",
    "evaluate_at",
    "keep_best",
)
"""Settings that are taken to change a loss only by rounding or by other draws of dropout. A difference in one of them
is mentioned and does not stop a comparison. Micro-batches change more where a layer normalises over the batch."""
MAX_OTHER_LOAD = 0.1
"""Share of the cores that others may have had while seconds were measured."""
START_COLUMNS = {
    "task": "task",
    "task_class": "class of the task",
    "model": "model",
    "data": "data",
    "train_data": "training data",
    "candidates": "candidates for masking",
    "evaluation": "evaluation masks",
    "terms": "evaluated terms",
    "from_scratch": "random start",
    "start": "initial parameters",
    "initial_model": "initial parameters with the head",
}
"""Columns that say what a run begins from, in words. Runs of two arms may not differ in them."""
MAY_BE_EMPTY = ("model", "evaluation", "terms", "from_scratch")
"""Columns of `START_COLUMNS` that may be empty for a task. Two empty values count as equal."""
RECORDED_LATER = ("task_class", "train_data", "candidates", "initial_model")
"""Columns of `START_COLUMNS` that older runs do not record. They are compared only where both runs have a value."""
SET_BY_PARENT = ("model", "start", "initial_model", "from_scratch")
"""Columns of `START_COLUMNS` in which fine-tunings may differ, because their pretrainings do."""
MAY_ALWAYS_DIFFER = ("mode", "rule", "nproc")
"""Settings in which any two arms may differ, with a plan or without."""
BUDGET = ("samples", "epochs", "seconds")
FIRST_LOSS_RTOL = 1e-3
"""By which share of their mean size the losses at update 0 of one model on one evaluation set may differ."""
FIRST_LOSS_ATOL = 1e-6
"""By how many nats such losses may differ in addition to that share, for losses near 0."""


class RunsCompared(NamedTuple):
    """In what two runs differ: a key for each difference, with what is said of it."""

    refusals: dict[str, str]
    """Why nothing of the two runs is compared."""
    timing_refusals: dict[str, str]
    """Why their measured seconds are not compared. It is empty for two runs on the virtual clock."""
    mentions: dict[str, tuple[str, str]]
    """Differences that are mentioned and do not stop a comparison, with both values."""


def compare_runs(ours: RunRow, theirs: RunRow, allowed: set[str], *, fine_tuned: bool = False) -> RunsCompared:
    """In what two runs of one seed differ.

    A difference is refused, or it is mentioned, or their seconds are not compared, for which most such differences are
    mentioned too. What follows from an allowed difference is none of these.

    Args:
        allowed: the settings in which the runs may differ, as `differences_by_design` gives them.
        fine_tuned: whether they are fine-tunings, which differ in what they start from.
    """
    both = (ours, theirs)
    found = RunsCompared({}, {}, {})
    for column, words in START_COLUMNS.items():
        if (fine_tuned and column in SET_BY_PARENT) or _began_alike(column, ours, theirs):
            continue
        here, there = (_shown(column, getattr(run, column)) for run in both)
        # a task makes other training data where the arms differ in a field of the task
        if column == "train_data" and _differ_in_the_task(both, allowed):
            found.mentions[words] = (here, there)
        else:
            found.refusals[column] = _values_of_both(words, both, (here, there))
    _compare_settings(both, allowed, found)
    _compare_machines(both, allowed, found)
    if ours.clock == theirs.clock == "virtual":
        found.timing_refusals.clear()
    if not (fine_tuned or found.refusals) and not _evaluated_alike(ours, theirs):
        values = [f"{run.first_loss:.6g}" for run in both]
        found.refusals["first_loss"] = f"evaluated unlike: {_values_of_both('the loss at update 0', both, values)}"
    return found


def _compare_settings(both: RunPair, allowed: set[str], found: RunsCompared) -> None:
    """Add to `found` the settings of two runs that differ, or are not known."""
    # no setting: it says whether a layer of the model does, and `_only_rounds` reads it
    settings = {*both[0].asked, *both[1].asked} - {"normalises_over_batch"}
    for key in sorted(settings, key=_budgets_first):
        texts = meanings_in_runs(key, both)
        is_known = NOT_KNOWN not in texts
        if (is_known and texts[0] == texts[1]) or _follows(key, both, allowed):
            continue
        shown = _shown_values(key, both, texts)
        # refused: both are known, may not differ, and change more than rounding. Otherwise the difference is mentioned,
        # and seconds are not compared where it may not be and changes them.
        if is_known and key not in allowed and not _only_rounds(key, both):
            found.refusals[key] = _values_of_both(key, both, shown)
            continue
        if key not in MAY_ALWAYS_DIFFER:
            found.mentions[key] = (shown[0], shown[1])
        if key in CHANGES_SECONDS and key not in allowed:
            found.timing_refusals[key] = _values_of_both(key, both, shown)


def _compare_machines(both: RunPair, allowed: set[str], found: RunsCompared) -> None:
    """Add to `found` in what two machines differ, the clocks, and what other programs used of the machines."""
    ours, theirs = both
    for column, words in MACHINE.items():
        here, there = (_machine_value(column, run, allowed) or NOT_KNOWN for run in both)
        # two machines that are not known may be different ones
        is_unknown_machine = column == "machine" and here == NOT_KNOWN
        if here == there and not is_unknown_machine:
            continue
        follows = column == "threads" and ours.workers != theirs.workers  # the workers of a run share the cores
        if column in CHANGES_SECONDS and column not in allowed and not follows:
            found.timing_refusals[column] = _values_of_both(words, both, (here, there))
        if here != there:
            found.mentions[column] = (here, there)
    if ours.clock != theirs.clock:
        found.timing_refusals["clock"] = _values_of_both("clock", both, (ours.clock, theirs.clock))
    for run in both:
        disturbance = disturbance_of(run)
        if disturbance:
            found.timing_refusals[f"load of {run.arm}"] = disturbance


def disturbance_of(run: RunRow) -> str:
    """What other programs used of the machine during a run; empty where it is at most `MAX_OTHER_LOAD` or not known."""
    if run.other_load > MAX_OTHER_LOAD:
        return f"other programs used {100 * run.other_load:.0f} % of the machine during {run.run}"
    return ""


class ArmsCompared(NamedTuple):
    """How the runs of two arms compare."""

    pairs: Mapping[tuple[Any, int], RunsCompared]
    """(seed, n) -> how the n-th runs of the seed in both arms compare."""

    @property
    def why_not_comparable(self) -> str:
        """Why nothing of the arms is compared; empty where it is."""
        return each_once(pair.refusals for pair in self.pairs.values())

    @property
    def why_untimed(self) -> str:
        """Why measured seconds of some pairs are not compared, each reason once; empty where all are.

        `Pairs.why_untimed` has the reason of each seed.
        """
        return each_once(pair.timing_refusals for pair in self.pairs.values())

    @property
    def timed_seeds(self) -> list[Any]:
        """The seeds whose seconds are compared."""
        return [seed for (seed, _), pair in self.pairs.items() if not pair.timing_refusals]


def compare_arms(ours: DataFrame, theirs: DataFrame, allowed: set[str], *, fine_tuned: bool = False) -> ArmsCompared:
    """How two arms compare, by the seeds that both have; the n-th run of a seed with the n-th of the other arm.

    Args:
        ours, theirs: rows of `runs`.
        allowed, fine_tuned: as `compare_runs` takes them.
    """
    our_runs = _by_seed(ours)
    their_runs = _by_seed(theirs)
    keys = our_runs.index.intersection(their_runs.index)
    pairs = {}
    for key, run, other in zip(keys, each(our_runs.loc[keys]), each(their_runs.loc[keys]), strict=True):
        pairs[key] = compare_runs(run, other, allowed, fine_tuned=fine_tuned)
    return ArmsCompared(pairs)


def _by_seed(runs: DataFrame) -> DataFrame:
    """The runs with the index (seed, n) of the n-th run of a seed."""
    seeds = runs["seed"].to_numpy()
    nth = runs.groupby(seeds, dropna=False).cumcount()
    return runs.set_index([seeds, nth.to_numpy()])


def each_once(reasons_of_pairs: Iterable[Mapping[str, str]]) -> str:
    """One reason for each key, that of the first pair that has it."""
    first: dict[str, str] = {}
    for reasons in reasons_of_pairs:
        first = {**reasons, **first}  # the later pair's keys come first, and what an earlier one says of them stays
    return "; ".join(first.values())


def differences_by_design(ours: str, theirs: str, plan: Plan) -> set[str]:
    """The settings in which the runs of two arms may differ."""
    if not plan.runs:
        return {*MAY_ALWAYS_DIFFER, *plan.arms_differ_in}
    return settings_that_differ(plan.tuned_settings_of(ours), plan.tuned_settings_of(theirs))


def settings_that_differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """The settings in which two arms with these settings may differ: those that are unlike, and `MAY_ALWAYS_DIFFER`."""
    our_values = asked_of(ours, {})
    their_values = asked_of(theirs, {})
    different = set(MAY_ALWAYS_DIFFER)
    for key in {*our_values, *their_values}:
        if not means_the_same(key, our_values.get(key), their_values.get(key)):
            different.add(key)
    return different


def _only_rounds(key: str, both: RunPair) -> bool:
    """Whether a setting is in `MENTIONED`; micro-batches count only where no layer normalises over the batch."""
    by_batch = any(run.asked.get("normalises_over_batch") for run in both)
    return key in MENTIONED and not (key == "micro_batches" and by_batch)


def _follows(key: str, both: RunPair, allowed: set[str]) -> bool:
    """Whether a setting differs only because others do in which the arms may differ.

    That is so for a setting that has a meaning for some modes or optimizers alone, where one of the runs has another
    mode or optimizer. It is also so where both runs have the default that follows from their optimizer or budget.
    """
    # the setting that gives `key` a meaning, and the values with which it has one
    other, values = MEANINGFUL_FOR.get(key, ("", ()))
    if key == "micro_batches":  # a pipeline always has micro-batches, in another mode they are a choice
        other = "mode"
        values = ("single", "sync", "async", "hogwild")
    if other in allowed and not all(run.asked.get(other) in values for run in both):
        return True
    if key not in ("learning_rate", "schedule", "warmup") or not allowed & {"optimizer", *BUDGET}:
        return False
    defaults = [meaning(key, default_of(key, run.asked, run.task)) for run in both]
    return meanings_in_runs(key, both) == defaults


def _differ_in_the_task(both: RunPair, allowed: set[str]) -> bool:
    """Whether two runs differ in a field of the task in which they may, such as one of augmentation."""
    of_the_task = allowed - {"batch_size"}  # a field of tasks that changes no training data
    for flag_group in (Job, Budget, Steps, Machine):
        of_the_task -= {*specs_of(flag_group)}
    return any(len(set(meanings_in_runs(key, both))) > 1 for key in of_the_task)


def _began_alike(column: str, ours: RunRow, theirs: RunRow) -> bool:
    """Whether two runs began from the same, as far as it is known."""
    here = getattr(ours, column)
    there = getattr(theirs, column)
    num_known = [_is_known(here), _is_known(there)].count(True)
    if column in RECORDED_LATER and num_known < 2:
        return True
    if column == "train_data" and here.partition("/")[2] != there.partition("/")[2]:
        # after "/" stands the batch size of the hash (`train_fingerprint`): hashes of unlike sizes cannot be compared
        return True
    if num_known == 0 and column in MAY_BE_EMPTY:
        return True
    if num_known == 2 and here == there:
        return True
    # the same weights, in another folder
    return bool(column == "model" and ours.start and ours.start == theirs.start)


def _evaluated_alike(ours: RunRow, theirs: RunRow) -> bool:
    """Whether the losses at update 0 are equal up to rounding, as those of one model on one set are.

    It is also true where one of them is not recorded.
    """
    here = ours.first_loss
    there = theirs.first_loss
    if not (math.isfinite(here) and math.isfinite(there)):
        return True
    mean_size = (abs(here) + abs(there)) / 2
    return bool(abs(here - there) <= FIRST_LOSS_RTOL * mean_size + FIRST_LOSS_ATOL)


def _machine_value(column: str, run: RunRow, allowed: set[str]) -> str:
    """The value of a column of `MACHINE` as it is shown; empty where it is not known."""
    value = getattr(run, column)
    if not _is_known(value):
        return ""
    if column == "device" and allowed & {"mode", "nproc"}:
        return str(value).partition(" x ")[2] or str(value)  # how many there are follows from the workers
    return _shown(column, value)


def _is_known(value: Any) -> bool:
    return not (value is None or pd.isna(value) or value == "")


def _shown_values(key: str, both: RunPair, texts: Sequence[str]) -> list[str]:
    """The value of a setting in each of two runs, as it is shown."""
    shown = []
    for run, text in zip(both, texts, strict=True):
        value = asked_or_default(key, run)
        shown.append(NOT_KNOWN if text == NOT_KNOWN else _shown(key, value))
    return shown


def _values_of_both(words: str, both: RunPair, shown: Sequence[str]) -> str:
    """The values that two runs have of something, which `words` name: part of a sentence."""
    return f"{words} of {both[0].arm}: {shown[0]}; of {both[1].arm}: {shown[1]}"


def _shown(key: str, value: Any) -> str:
    if key in START_COLUMNS and not _is_known(value):
        return NOT_KNOWN
    if key in ("start", "initial_model"):
        return str(value)[:12]
    if value is None or value == "":
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _budgets_first(key: str) -> tuple[int, str]:
    """Sorts settings by name, after those of the budget."""
    position = BUDGET.index(key) if key in BUDGET else len(BUDGET)
    return position, key


def setting_names(runs: DataFrame) -> set[str]:
    """The settings that runs have, which a reader may name."""
    return {key for asked in runs["asked"] for key in asked} | {*MACHINE}
