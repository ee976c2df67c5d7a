"""The gate: may two runs be compared? Their settings and what they began from must have the same meaning. Only the
settings in which their arms are meant to differ may be unlike.

An absent setting has its default, so a run from before a setting equals one after it. Rules, speeds, networks and churn
are compared as objects, ``auto`` as what it became, data and models by fingerprint and not by path. What cannot be
known, e.g. a function in a field of a task, is told and not refused.

The arms of a plan may differ in the settings that the plan gives them and in what tuning chose. Loose runs may differ
in mode, rule, number of workers and the settings that the reader names. Both may differ in what follows from these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from pandas import DataFrame

from analysis.questions import Plan
from analysis.runs import RunRow, each
from asyncsgd.settings.flags import specs_of
from asyncsgd.settings.groups import ONLY, Budget, Defaults, Job, Machine, Output, Steps
from asyncsgd.settings.yaml_reader import ABOUT_THE_RUN, OPTIMIZER_OPTIONS
from asyncsgd.simulation.churn import parse_churn
from asyncsgd.simulation.speeds import parse_network, parse_speeds
from asyncsgd.tasks import TASKS, task_class

TOLD = (
    "device",
    "machine",
    "torch",
    "commit",
    "threads",
    "micro_batches",
    "auto_batch",
    "gradient_checkpointing",
    "compile",
    "prefetch",
    "transport",
    "deepspeed_config",
    "evaluations",
    "evaluate_every",
    "evaluate_at",
    "keep_best",
)
"""Settings that change a loss only by rounding or by other draws of dropout. A difference in one of them is told and
does not stop a comparison. Micro-batches are an exception where a layer normalises over the batch: they change more."""
TIMED = (
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
"""Those of them that also change the seconds of a training. Where one differs, measured seconds are not compared."""
MOST_LOAD = 0.1
"""Share of the cores that others may have had while seconds were measured."""
BEGAN = {
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
NOT_IN_EVERY_RUN = ("model", "evaluation", "terms", "from_scratch")
"""Columns of `BEGAN` that may be empty for a task. Two empty values count as equal."""
RECORDED_LATER = ("task_class", "train_data", "candidates", "initial_model")
"""Columns of `BEGAN` that older runs do not record. They are compared only where both runs have a value."""
OF_A_PARENT = ("model", "start", "initial_model", "from_scratch")
"""Columns of `BEGAN` in which fine-tunings may differ, because their pretrainings do."""
MACHINE = {
    "machine": "machine",
    "device": "device",
    "threads": "threads a worker",
    "torch": "torch",
    "commit": "commit",
}
"""Columns of where runs were made, in words."""
BY_FINGERPRINT = ("data", "data_name", "eval_data", "split", "model", "model_name", "candidates")
NOT_COMPARED = frozenset(
    (*specs_of(Output), *BY_FINGERPRINT, *MACHINE, *ABOUT_THE_RUN, "seed", "problem_seed", "predictions")
)
"""Settings that are compared as facts, and those that say where something lies."""
ALGORITHM = ("mode", "rule", "nproc")
"""Settings that tell arms wherever runs come from."""
BUDGET = ("samples", "epochs", "seconds")
NOT_KNOWN = "not known"
SAME_START = 1e-3
"""By which share of their mean size the losses at update 0 of one model on one evaluation set may differ."""
SMALLEST = 1e-6
"""By how many nats such losses may differ beside that share, for losses near 0."""
_WITHOUT_TEXT = re.compile(r"<.* at 0x[0-9a-f]+>|^<[\w ]+>$")
"""Matches the text of an object that does not say its value, such as ``<function f at 0x7f00>``."""
_READ: Mapping[str, Callable[[str], Any]] = {
    "speeds": parse_speeds,
    "network": parse_network,
    "churn": lambda text: sorted(map(str, parse_churn(text))),
}


RESOLVED = ("rule", "transport", "micro_batches", "batch_size", "sample_order", "normalises_over_batch")


def asked_of(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was asked for, by setting, from settings.yaml and what summary.json resolves.

    >>> asked_of({"width": 8, "optimizer": "Adagrad", "optimizer_options": {"eps": 1e-8}, "seed": 1}, {})
    {'width': 8, 'optimizer': 'Adagrad', 'eps': 1e-08}
    """
    asked = {**settings, **(settings.get(OPTIMIZER_OPTIONS) or {})}
    for key in RESOLVED:
        if summary.get(key) is not None:
            asked[key] = summary[key]
    return {key: value for key, value in asked.items() if key not in NOT_COMPARED}


def default_of(key: str, asked: Mapping[str, Any], task: str) -> Any:
    """What the absence of a setting means beside the others of its run."""
    kind: Any = task_class(task) if task in TASKS else None
    defaults = Defaults() if kind is None else kind.defaults
    has_samples = asked.get("samples") is not None or asked.get("epochs") is not None
    if key == "learning_rate":
        return defaults.rate(str(asked.get("optimizer", "adamw")))
    if key == "schedule":
        return defaults.schedule_of(has_samples)
    if key == "warmup":
        return defaults.warmup_of(has_samples)
    if key == "speeds" and asked.get("clock") == "virtual":
        return "constant:1"
    if key in ("weight_decay", "clip_norm"):
        return getattr(defaults, key)
    for part in (Job, Budget, Steps, Machine, kind):
        if part is not None and key in specs_of(part):
            return specs_of(part)[key].default
    return NOT_KNOWN


def _asked_or_default(key: str, run: Any) -> Any:
    """The value of a setting of a run."""
    if key in run.asked:
        return run.asked[key]
    return default_of(key, run.asked, run.task)


def meanings(key: str, runs: Sequence[Any]) -> list[str]:
    """The value of a setting in each of `runs` as a text, which is equal where the value means the same."""
    texts = [_meaning(key, _asked_or_default(key, run)) for run in runs]
    if key == "rule" and len(set(texts)) > 1:
        from asyncsgd.rules import parse_rule  # torch takes a second to import

        texts = [_parsed(parse_rule, text) for text in texts]
    return texts


def _meaning(key: str, value: Any) -> str:
    if value is None:
        return ""
    text = str(value)
    if _WITHOUT_TEXT.search(text):
        return NOT_KNOWN
    if key in _READ:
        return _parsed(_READ[key], text)
    try:
        return repr(float(text))
    except ValueError:
        return text.casefold() if key == "optimizer" else text


def means_the_same(key: str, here: Any, there: Any) -> bool:
    """Whether two values of a setting mean the same.

    >>> means_the_same("samples", "1e3", 1000), means_the_same("speeds", "constant", "constant:1")
    (True, True)
    """
    return _meaning(key, here) == _meaning(key, there)


def _parsed(parse: Callable[[str], Any], text: str) -> str:
    try:
        return str(parse(text))
    except Exception:  # what somebody wrote into a file, or a rule of their own
        return text


def spelled_alike(key: str, texts: Iterable[str]) -> list[str]:
    """The texts of a setting, of which those that mean the same are the same, the shortest of them.

    >>> spelled_alike("speeds", ["slow:factor=3,worker=0", "slow:worker=0,factor=3,seconds=1.0"])
    ['slow:factor=3,worker=0', 'slow:factor=3,worker=0']
    """
    known = list(texts)
    spelled: dict[str, str] = {}
    for text in sorted(set(known), key=len):
        spelled.setdefault(_meaning(key, text), text)
    return [spelled[_meaning(key, text)] for text in known]


class Compared(NamedTuple):
    """What two runs do not have in common, each a key with what is said of it."""

    refused: Mapping[str, str]
    """Why nothing of the two runs is compared."""
    untimed: Mapping[str, str]
    """Why their measured seconds are not compared. It is empty for two runs on the virtual clock."""
    told: Mapping[str, tuple[str, str]]
    """In what they differ beside the algorithm, with both values."""


def compared(ours: RunRow, theirs: RunRow, apart: set[str], *, tuned: bool = False) -> Compared:
    """Two runs of a seed.

    Args:
        apart: of `told_apart`, the settings in which they may differ.
        tuned: whether they are fine-tunings, which differ in what they start from.
    """
    both = (ours, theirs)
    refused: dict[str, str] = {}
    untimed: dict[str, str] = {}
    told: dict[str, tuple[str, str]] = {}
    for column, words in BEGAN.items():
        if (tuned and column in OF_A_PARENT) or _began_alike(column, ours, theirs):
            continue
        here, there = (_shown(column, getattr(run, column)) for run in both)
        if column == "train_data" and _told_by_the_task(both, apart):
            told[words] = (here, there)
        else:
            refused[column] = _both(words, both, (here, there))
    settings = {*ours.asked, *theirs.asked} - {"normalises_over_batch"}
    for key in sorted(settings, key=_place):
        texts = meanings(key, both)
        if texts[0] == texts[1] != NOT_KNOWN:
            continue
        shown = _values(key, both, texts)
        follows = _follows(key, both, apart)
        may_differ = follows or key in apart or NOT_KNOWN in texts or _only_rounds(key, both)
        if not may_differ:
            refused[key] = _both(key, both, shown)
            continue
        if not follows and key not in ALGORITHM:
            told[key] = (shown[0], shown[1])
        if key in TIMED and key not in apart and not follows:
            untimed[key] = _both(key, both, shown)
    for column, words in MACHINE.items():
        here, there = (_where(column, run, apart) or NOT_KNOWN for run in both)
        # two machines that are not known may be different ones
        is_unknown_machine = column == "machine" and here == NOT_KNOWN
        if here == there and not is_unknown_machine:
            continue
        follows = column == "threads" and ours.workers != theirs.workers  # they share the cores
        if column in TIMED and column not in apart and not follows:
            untimed[column] = _both(words, both, (here, there))
        if here != there:
            told[column] = (here, there)
    if ours.clock != theirs.clock:
        untimed["clock"] = _both("clock", both, (ours.clock, theirs.clock))
    for run in both:
        if run.other_load > MOST_LOAD:
            used = f"{100 * run.other_load:.0f} % of the machine"
            untimed[f"load of {run.arm}"] = f"other programs used {used} during {run.run}"
    if ours.clock == theirs.clock == "virtual":
        untimed = {}
    if not (tuned or refused) and not _evaluated_alike(ours, theirs):
        values = [f"{run.first_loss:.6g}" for run in both]
        refused["first_loss"] = f"evaluated unlike: {_both('the loss at update 0', both, values)}"
    return Compared(refused, untimed, told)


class Between(NamedTuple):
    """How the runs of two arms compare."""

    pairs: Mapping[tuple[Any, int], Compared]
    """By seed, and its repetition."""

    @property
    def unlike(self) -> str:
        """Why nothing of the arms is compared; empty where it is."""
        return each_once(one.refused for one in self.pairs.values())

    @property
    def untimed(self) -> str:
        """Why measured seconds of some pairs are not compared; empty where they are."""
        return each_once(one.untimed for one in self.pairs.values())

    @property
    def timed(self) -> list[Any]:
        """The seeds whose seconds are compared."""
        return [seed for (seed, _), one in self.pairs.items() if not one.untimed]


def between(ours: DataFrame, theirs: DataFrame, apart: set[str], *, tuned: bool = False) -> Between:
    """How two arms compare, by the seeds that both have; the n-th run of a seed with the n-th of the other arm.

    Args:
        ours, theirs: rows of `runs`.
        apart, tuned: as `compared` takes them.
    """
    own = _by_seed(ours)
    others = _by_seed(theirs)
    seeds = own.index.intersection(others.index)
    pairs = {}
    for seed, run, other in zip(seeds, each(own.loc[seeds]), each(others.loc[seeds]), strict=True):
        pairs[seed] = compared(run, other, apart, tuned=tuned)
    return Between(pairs)


def _by_seed(runs: DataFrame) -> DataFrame:
    """The runs by seed and how many of the seed come before."""
    seeds = runs["seed"].to_numpy()
    nth = runs.groupby(seeds, dropna=False).cumcount()
    return runs.set_index([seeds, nth.to_numpy()])


def each_once(reasons: Iterable[Mapping[str, str]]) -> str:
    """One reason for each key, that of the first pair that has it."""
    known: dict[str, str] = {}
    for own in reasons:
        known = {**own, **known}
    return "; ".join(known.values())


def told_apart(ours: str, theirs: str, plan: Plan) -> set[str]:
    """The settings that tell two arms: in these their runs may differ."""
    if not plan.runs:
        return {*ALGORITHM, *plan.apart}
    return set_apart(plan.tuned_settings_of(ours), plan.tuned_settings_of(theirs))


def set_apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """The settings that tell arms of which these are the settings, in any of their shapes."""
    own = asked_of(ours, {})
    others = asked_of(theirs, {})
    apart = {key for key in {*own, *others} if not means_the_same(key, own.get(key), others.get(key))}
    return {*ALGORITHM} | apart


def _only_rounds(key: str, both: Sequence[RunRow]) -> bool:
    """Whether a setting is of `TOLD`; micro-batches are not where a layer normalises over the batch."""
    by_batch = any(run.asked.get("normalises_over_batch") for run in both)
    return key in TOLD and not (key == "micro_batches" and by_batch)


def _follows(key: str, both: Sequence[RunRow], apart: set[str]) -> bool:
    """Whether a setting differs only because others do in which the arms may differ.

    That is so for a setting that has a meaning for some modes or optimizers alone, where one of the runs has another
    mode or optimizer. It is also so where both runs have the default that follows from their optimizer or budget.
    """
    other, allowed = ONLY.get(key, ("", ()))
    if key == "micro_batches":  # a pipeline cuts its batches
        other = "mode"
        allowed = ("single", "sync", "async", "hogwild")
    if other in apart and not all(run.asked.get(other) in allowed for run in both):
        return True
    if key not in ("learning_rate", "schedule", "warmup") or not apart & {"optimizer", *BUDGET}:
        return False
    defaults = [_meaning(key, default_of(key, run.asked, run.task)) for run in both]
    return meanings(key, both) == defaults


def _told_by_the_task(both: Sequence[RunRow], apart: set[str]) -> bool:
    """Whether a field of the task tells the arms, such as one of augmentation; training data may follow from it."""
    of_the_task = apart - {"batch_size"}
    for part in (Job, Budget, Steps, Machine):
        of_the_task -= {*specs_of(part)}
    return any(len(set(meanings(key, both))) > 1 for key in of_the_task)


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
    if num_known == 0 and column in NOT_IN_EVERY_RUN:
        return True
    if num_known == 2 and here == there:
        return True
    # the same weights, in another folder
    return bool(column == "model" and ours.start and ours.start == theirs.start)


def _evaluated_alike(ours: RunRow, theirs: RunRow) -> bool:
    """Whether the losses at update 0, of one model on one set, are the same up to rounding; not known without them."""
    here = ours.first_loss
    there = theirs.first_loss
    if not (math.isfinite(here) and math.isfinite(there)):
        return True
    mean_size = (abs(here) + abs(there)) / 2
    return bool(abs(here - there) <= SAME_START * mean_size + SMALLEST)


def _where(column: str, run: RunRow, apart: set[str]) -> str:
    value = getattr(run, column)
    if not _is_known(value):
        return ""
    if column == "device" and apart & {"mode", "nproc"}:
        return str(value).partition(" x ")[2] or str(value)  # how many there are follows from the workers
    return _shown(column, value)


def _is_known(value: Any) -> bool:
    return not (value is None or pd.isna(value) or value == "")


def _values(key: str, both: Sequence[RunRow], texts: Sequence[str]) -> list[str]:
    """The value of a setting in each of two runs, as it is shown."""
    shown = []
    for run, text in zip(both, texts, strict=True):
        value = _asked_or_default(key, run)
        shown.append(NOT_KNOWN if text == NOT_KNOWN else _shown(key, value))
    return shown


def _both(words: str, both: Sequence[RunRow], shown: Sequence[str]) -> str:
    return f"{words} of {both[0].arm}: {shown[0]}; of {both[1].arm}: {shown[1]}"


def _shown(key: str, value: Any) -> str:
    if key in BEGAN and not _is_known(value):
        return NOT_KNOWN
    if key in ("start", "initial_model"):
        return str(value)[:12]
    if value is None or value == "":
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _place(key: str) -> tuple[int, str]:
    """Budgets are named first."""
    place = BUDGET.index(key) if key in BUDGET else len(BUDGET)
    return place, key


def names_of(runs: DataFrame) -> set[str]:
    """The settings that runs have, which a reader may name."""
    return {key for asked in runs["asked"] for key in asked} | {*MACHINE}
