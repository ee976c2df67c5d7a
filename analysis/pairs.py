"""Pairs: the runs of a treatment and its reference on the same seeds, and what may be compared in them.

Whether two runs are comparable is decided in `analysis.gate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import pandas as pd
from pandas import DataFrame

from analysis.gate import BEGAN, BUDGET, Between, Compared, between, each_once, told_apart
from analysis.questions import Plan
from analysis.runs import FROM_SCRATCH, Note, RunRow, each, listed, where
from asyncsgd.studies.arms import differing

SAME_BATCH = 0.01
"""Share by which the samples of an update may differ."""
HAPPENED = {
    "lost_workers": "a worker was lost",
    "looks_not_finite": "an evaluation was not finite",
    "resumed_on": "another machine took over",
}
"""Keys of a run's details, in words."""
WITH_RESULT = ("DONE", "DIVERGED")


class Pairs(NamedTuple):
    """A treatment against its reference: the runs of both by seed, all with a result."""

    treatment: str
    reference: str
    group: str
    clock: str
    both: list[tuple[RunRow, RunRow]]
    left_out: str
    """Pairs that are in no number, and why."""
    notes: tuple[Note, ...]
    caveats: tuple[str, ...]
    """Sentences without which any word would mislead."""
    no_speed: tuple[str, ...]
    """Sentences without which a word on measured seconds would mislead."""
    unlike: str
    """The reason why nothing of the two arms is compared; empty where they are compared."""
    why_untimed: Mapping[Any, str]
    """Seed -> why the seconds of its two runs are not compared."""
    control: bool = False
    """Whether the reference is the control arm, of which losses at equal samples are compared and nothing else."""


SAME_CONDITION = ("workers", "clock", "speeds")
"""Columns of arms that a control arm shares."""


def pairs_of(runs: DataFrame, arms: DataFrame, plan: Plan) -> Iterator[Pairs]:
    """Every arm against the reference arm of its group, and against the control arm that makes updates as small."""
    tests, others = _counted(runs)
    controls = arms[arms["algorithm"] == plan.registered.control]
    for group, members in arms.groupby("group", sort=False):
        clock = str(members["clock"].iloc[0])
        for treatment, reference, variant in _compared(members, plan):
            yield _pairs(tests, others, (treatment, reference, f"{group}{variant}", clock), plan)
            size = _samples_per_update(tests[tests["arm"] == treatment])
            for control in controls.index:
                is_alike = all(controls.loc[control, key] == members[key].iloc[0] for key in SAME_CONDITION)
                size_of_control = _samples_per_update(tests[tests["arm"] == control])
                if control != treatment and is_alike and _is_same_batch(size, size_of_control):
                    yield _pairs(tests, others, (treatment, control, str(group), clock), plan, control=True)


def _is_same_batch(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= SAME_BATCH * max(ours, theirs)


def pair_of(runs: DataFrame, place: tuple[str, str, str, str], plan: Plan) -> Pairs:
    """Two arms, of which the plan need not compare the one with the other.

    Args:
        place: treatment, reference, group and clock.
    """
    return _pairs(*_counted(runs), place, plan)


def _counted(runs: DataFrame) -> tuple[DataFrame, DataFrame]:
    """The runs of the tests by seed, and others with a result that were made beside them."""
    tests = where(runs, stage="test", replicate=0).set_index("seed", drop=False)
    others = runs[runs["status"].isin(WITH_RESULT) & (runs["task"] != "finetuning")]
    return tests, others[others["stage"].eq("") | (others["stage"].eq("test") & (others["replicate"] > 0))]


def _compared(members: DataFrame, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The comparisons of a group, each (treatment, reference, variant).

    A group may have several references that differ in some settings. A treatment is compared with the one that has the
    same values of these settings, and `variant` names the values. It is empty where there is one reference.
    """
    references = list(members.index[members["algorithm"] == plan.reference])
    keys = differing(map(plan.settings_of, references))
    variants = {arm: {key: plan.settings_of(arm).get(key) for key in keys} for arm in members.index}
    for treatment, variant in variants.items():
        if treatment in references or members.loc[treatment, "algorithm"] == plan.registered.control:
            continue
        own = [arm for arm in references if variants[arm] == variant]
        if len(own) == 1:
            yield treatment, own[0], "".join(f", {key} {value}" for key, value in variant.items())


def _pairs(
    tests: DataFrame, others: DataFrame, place: tuple[str, str, str, str], plan: Plan, *, control: bool = False
) -> Pairs:
    treatment, reference, _, clock = place
    ours = tests[tests["arm"] == treatment]
    theirs = tests[tests["arm"] == reference]
    seeds = ours.index.intersection(theirs.index)
    usable = [seed for seed in seeds if ours["usable"][seed] and theirs["usable"][seed]]
    without_result = [seed for seed in seeds if seed not in usable]
    alone = sorted(set(ours.index) ^ set(theirs.index))
    twins = copied(_ends(ours.loc[usable]), _ends(theirs.loc[usable]))
    whole = [seed for seed in usable if seed not in twins]
    notes: list[Note] = []
    caveats: list[str] = []
    for side, arm in ((ours, treatment), (theirs, reference)):
        counted = side.loc[whole]
        caveats += lost_runs(side, f"runs of {arm}")
        caveats += repeated(counted, arm)
        notes += happened(counted, f"runs of {arm}")
        more_notes, more_caveats = made_twice(counted, others[others["arm"] == arm], bool(plan.runs))
        notes += more_notes
        caveats += more_caveats
        num_diverged = int(counted["diverged"].sum())
        if num_diverged:
            notes.append(diverged(arm, num_diverged, len(whole)))
    ours = ours.loc[whole]
    theirs = theirs.loc[whole]
    notes += _batches(ours, theirs, treatment, reference)
    if ours["from_scratch"].any() or theirs["from_scratch"].any():
        notes.append(FROM_SCRATCH)
    may_differ = told_apart(treatment, reference, plan)
    if control:
        may_differ |= {*BUDGET, "batch_size"}
    gated = between(ours, theirs, may_differ)
    unlike, also = united(gated.pairs.values(), plan)
    notes += also
    why_untimed: dict[Any, str] = {}
    no_speed: list[str] = []
    if clock == "measured":
        why_untimed = _untimed(ours, theirs, gated)
        no_speed = timing_caveats(pd.concat((ours, theirs)))
        if why_untimed and len(why_untimed) < len(whole):
            why = next(iter(why_untimed.values()))
            no_speed.append(f"The seconds of the runs of seed {listed(why_untimed)} are not compared: {why}.")
    return Pairs(
        *place,
        both=list(zip(each(ours), each(theirs), strict=True)),
        left_out=left_out(without_result, alone, twins),
        notes=tuple(notes),
        caveats=tuple(caveats),
        no_speed=tuple(no_speed),
        unlike=unlike,
        why_untimed=why_untimed,
        control=control,
    )


def _untimed(ours: DataFrame, theirs: DataFrame, gated: Between) -> dict[Any, str]:
    """Seed -> why the measured seconds of its two runs are not compared."""
    mixed = list(filter(None, (_mixed(ours), _mixed(theirs))))
    if mixed:
        return dict.fromkeys(ours.index, "; ".join(mixed))
    why_untimed = {}
    for (seed, _), pair in gated.pairs.items():
        if pair.untimed:
            why_untimed[seed] = "; ".join(pair.untimed.values())
    return why_untimed


def left_out(without_result: Sequence[float], alone: Sequence[float], twins: Mapping[float, float]) -> str:
    """Pairs that are in no number, and why.

    Args:
        without_result: seeds of which a run has no result.
        alone: seeds that one arm has.
        twins: of `copied`.
    """
    told = []
    if without_result:
        number = len(without_result)
        told.append(f"{number} pair{'s' if number > 1 else ''} left out (seed {listed(without_result)})")
    if alone:
        told.append(f"seed {listed(alone)} only in one of the two arms")
    told += [f"seed {seed:g} is a copy of seed {first:g} and counts once" for seed, first in twins.items()]
    return "; ".join(told)


def diverged(arm: str, number: int, of: int) -> Note:
    return Note(f"{arm}: diverged {number}/{of}", "diverged", (arm, f"{number} of {of} runs"))


def _ends(runs: DataFrame) -> dict[Any, str]:
    """Seed -> the hash of a run's last parameters, of runs that have trained, did not diverge, and have recorded it."""
    ended = runs[~runs["diverged"] & (runs["updates"] > 0)]
    return {seed: one for seed, one in ended["parameters_sha256"].items() if isinstance(one, str) and one}


def made_twice(runs: DataFrame, others: DataFrame, planned: bool) -> tuple[list[Note], list[str]]:
    """Notes and caveats on runs of an arm that were made more than once.

    The run in the planned folder counts, the last that was made there; of loose runs of one seed the first by name. A
    second result may have been looked at before one of them was kept, so it is a caveat. A replicate of a plan and a
    killed run that was made again are told.

    Args:
        runs: those that are in pairs.
        others: with a result, of the same arm and in no pair.
        planned: whether the folder has a plan.
    """
    statuses = [status for details in runs["details"] for status in details.get("replaced", ())]
    results = sum(status in WITH_RESULT for status in statuses)
    beside = others[others["seed"].isin(runs["seed"])]
    replicates = int(beside["stage"].eq("test").sum()) if planned else 0
    second = len(beside) - replicates + results
    killed = len(statuses) - results
    arm = runs["arm"].iloc[0] if len(runs) else ""
    beside_them = f"the runs of {arm} that are counted there are"
    notes = []
    caveats = []
    if replicates:
        notes.append(Note(f"beside {beside_them} planned replicates ({replicates})"))
    if killed:
        notes.append(Note(f"beside {beside_them} earlier ones without a result ({killed})"))
    if second:
        caveats.append(f"Beside {beside_them} others of their seeds with a result ({second}).")
    return notes, caveats


def copied(one: Mapping[Any, str], other: Mapping[Any, str]) -> dict[Any, Any]:
    """Seed -> an earlier seed whose two runs end at the same parameters: copies, or a task that ignores its seed.

    Args:
        one, other: of both arms seed -> the hash of last parameters.
    """
    first: dict[tuple[str, str], Any] = {}
    found = {}
    for seed in one:
        if seed in other:
            earlier = first.setdefault((one[seed], other[seed]), seed)
            if earlier != seed:
                found[seed] = earlier
    return found


def repeated(runs: DataFrame, arm: str) -> list[str]:
    """Why the runs of an arm are not independent of each other: some end at the same parameters."""
    ends = _ends(runs)
    different = len(set(ends.values()))
    if different == len(ends):
        return []
    where = "the same parameters" if different == 1 else f"{different} different sets of parameters"
    return [f"The {len(ends)} runs of {arm} end at {where}, so they are not independent."]


def united(pairs: Collection[Compared], plan: Plan) -> tuple[str, list[Note]]:
    """Why the pairs of two arms are not comparable, and a note on what the arms differ in beside that."""
    told: dict[str, list[str]] = {}
    for pair in pairs:
        for key, values in pair.told.items():
            told.setdefault(key, []).extend(values)
    refused = [pair.refused for pair in pairs]
    why = each_once(refused)
    settings = sorted({*itertools.chain(*refused)} - {*BEGAN, "first_loss", "micro_batches"})
    if settings and not plan.runs:
        why += f" (if the arms are meant to differ in it: --arms {','.join((*plan.apart, *settings))})"
    if not told:
        return why, []
    tuned = {key for arm in plan.arms.values() for key in arm.chosen or {}}
    return why, [Note(also_differ(told, tuned))]


def also_differ(told: Mapping[str, Iterable[str]], tuned: Set[str]) -> str:
    """In what arms differ beside the algorithm, with the values of both, and what of it tuning chose.

    >>> also_differ({"learning_rate": ["0.001", "0.01"], "precision": ["bf16", "fp32"]}, {"learning_rate"})
    'the arms also differ in learning_rate (0.001, 0.01: tuned for each arm), precision (bf16, fp32)'
    """
    differ = []
    for key, values in told.items():
        shown = list(dict.fromkeys(values))
        comma = "; " if any("," in value for value in shown) else ", "
        choice = ": tuned for each arm" if key in tuned else ""
        differ.append(f"{key} ({comma.join(shown)}{choice})")
    return f"the arms also differ in {', '.join(differ)}"


def _mixed(side: DataFrame) -> str:
    """Why the mean seconds of an arm mean nothing: its runs had unlike threads or devices; empty where they had not."""
    machines = set()
    for run in each(side):
        if run.device:
            threads = "1 thread" if run.threads == 1 else f"{run.threads:g} threads"
            machines.add(f"{threads} a worker on {run.device}")
    if len(machines) < 2:
        return ""
    return f"runs of {side['arm'].iloc[0]} had {' and '.join(sorted(machines))}"


def lost_runs(runs: DataFrame, what: str) -> list[str]:
    """How many of `runs` have no result, each status a sentence."""
    counts = runs.loc[~runs["usable"], "status"].value_counts().sort_index()
    sentences = []
    for status, number in counts.items():
        be = "is" if number == 1 else "are"
        how = "DONE without a curve" if status == "DONE" else status
        sentences.append(f"{number} of {len(runs)} {what} {be} {how}, and in no number.")
    return sentences


def happened(runs: DataFrame, what: str) -> list[Note]:
    """What went wrong in runs that have a result, each a note."""
    told = []
    for key, words in HAPPENED.items():
        number = sum(key in details for details in runs["details"])
        if number:
            told.append(Note(f"during {number} of {len(runs)} {what} {words}"))
    return told


def _samples_per_update(runs: DataFrame) -> float:
    known = runs[runs["samples_per_update"].notna() & runs["usable"]]
    updates = known["updates"].sum()
    if not updates:
        return math.nan
    samples = (known["samples_per_update"] * known["updates"]).sum()
    return float(samples / updates)


def _batches(ours: DataFrame, theirs: DataFrame, treatment: str, reference: str) -> list[Note]:
    """At equal samples an arm with smaller updates makes more of them, which is a difference of its own."""
    size = _samples_per_update(ours)
    other_size = _samples_per_update(theirs)
    if not (math.isfinite(size) and math.isfinite(other_size)) or _is_same_batch(size, other_size):
        return []
    more = f"{treatment} makes {other_size / size:.3g} times as many updates of the same samples as {reference}"
    sentence = f"{more} ({size:.3g} and {other_size:.3g} samples an update)"
    return [Note(f"unequal batches: {sentence}", "batches", (sentence,))]


def timing_caveats(runs: DataFrame) -> list[str]:
    """Why the measured seconds of some of these runs are no speed comparison, each a sentence."""
    told = []
    if runs["oversubscribed"].any():
        told.append("The machine had more threads than cores, so its seconds are no speed comparison.")
    if (runs["resumes"] > 0).any():
        told.append("Some runs were stopped and resumed, so their seconds are no speed comparison.")
    return told
