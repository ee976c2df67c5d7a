"""Pairs: the runs of two arms on the same seeds, with everything that limits their comparison.

`analysis.gate` says which runs are comparable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import pandas as pd
from pandas import DataFrame

from analysis.gate import (
    BUDGET,
    START_COLUMNS,
    ArmsCompared,
    RunsCompared,
    compare_arms,
    differences_by_design,
    each_once,
)
from analysis.questions import Plan
from analysis.runs import FROM_SCRATCH, Note, RunPair, each, listed, rows_with
from asyncsgd.studies.arms import differing

SAME_BATCH = 0.01
"""Share by which the samples of an update may differ."""
EVENTS_IN_WORDS = {
    "lost_workers": "a worker was lost",
    "evaluations_not_finite": "an evaluation was not finite",
    "resumed_on": "another machine took over",
}
"""Keys of a run's details, in words."""
WITH_RESULT = ("DONE", "DIVERGED")


class TwoArms(NamedTuple):
    """Two arms that are compared, and the condition under which both ran."""

    treatment: str
    reference: str
    group: str
    clock: str


class Pairs(NamedTuple):
    """A treatment against its reference: the runs of both by seed, all with a result, and what limits an answer."""

    treatment: str
    reference: str
    group: str
    clock: str
    run_pairs: list[RunPair]
    """For each seed, the run of the treatment and the run of the reference."""
    left_out: str
    """Seeds that are not counted, and why."""
    notes: tuple[Note, ...]
    """Sentences that are shown next to every answer."""
    caveats: tuple[str, ...]
    """Sentences without which any word would mislead. An answer with one of them is exploratory."""
    timing_caveats: tuple[str, ...]
    """Caveats of the answers on measured seconds alone."""
    why_not_comparable: str
    """The reason why nothing of the two arms is compared; empty where they are compared."""
    why_untimed: Mapping[Any, str]
    """Seed -> why the seconds of its two runs are not compared."""
    control: bool = False
    """Whether the reference is the control arm, of which losses at equal samples are compared and nothing else."""


SAME_CONDITION = ("workers", "clock", "speeds")
"""Columns of arms in which a control arm is equal to the arms that are compared with it.

The batch is compared by the samples of an update. A control arm of another task is refused by `analysis.gate`.
"""


def pairs_of(runs: DataFrame, arms: DataFrame, plan: Plan) -> Iterator[Pairs]:
    """Every arm against the reference arm of its group, and against a control arm with as many samples an update."""
    tests, others = _tests_and_others(runs)
    controls = arms[arms["algorithm"] == plan.registered.control]
    for group, members in arms.groupby("group", sort=False):
        clock = str(members["clock"].iloc[0])
        for treatment, reference, variant in comparisons_of_group(members, plan):
            if treatment in controls.index:
                continue
            yield _pairs(tests, others, TwoArms(treatment, reference, f"{group}{variant}", clock), plan)
            size = samples_per_update(tests[tests["arm"] == treatment])
            for control in controls.index:
                is_alike = all(controls.loc[control, key] == members[key].iloc[0] for key in SAME_CONDITION)
                size_of_control = samples_per_update(tests[tests["arm"] == control])
                if control != treatment and is_alike and _is_same_batch(size, size_of_control):
                    yield _pairs(tests, others, TwoArms(treatment, control, str(group), clock), plan, control=True)


def _is_same_batch(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= SAME_BATCH * max(ours, theirs)


def pair_of(runs: DataFrame, arms: TwoArms, plan: Plan) -> Pairs:
    """The pairs of any two arms, whether or not the plan compares them."""
    return _pairs(*_tests_and_others(runs), arms, plan)


def _tests_and_others(runs: DataFrame) -> tuple[DataFrame, DataFrame]:
    """The test runs that are counted, by seed, and other runs with a result that may be of the same arms and seeds."""
    tests = rows_with(runs, stage="test", replicate=0).set_index("seed", drop=False)
    # A fine-tuning has the arm and the seed of its pretraining, and is no second result of it.
    others = runs[runs["status"].isin(WITH_RESULT) & runs["task"].isin(tests["task"])]
    is_unplanned = others["stage"] == ""  # a run that plan.json does not name
    is_replicate = others["stage"].eq("test") & (others["replicate"] > 0)
    return tests, others[is_unplanned | is_replicate]


def comparisons_of_group(members: DataFrame, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The comparisons of a group, each (treatment, reference, variant).

    A group may have several references that differ in some settings. A treatment is compared with the one that has the
    same values of these settings, and `variant` names the values. It is empty where there is one reference.
    """
    references = list(members.index[members["algorithm"] == plan.reference])
    keys = differing(map(plan.settings_of, references))
    variants = {arm: {key: plan.settings_of(arm).get(key) for key in keys} for arm in members.index}
    for treatment, variant in variants.items():
        if treatment in references:
            continue
        matching = [arm for arm in references if variants[arm] == variant]
        if len(matching) == 1:
            yield treatment, matching[0], "".join(f", {key} {value}" for key, value in variant.items())


def _pairs(tests: DataFrame, others: DataFrame, arms: TwoArms, plan: Plan, *, control: bool = False) -> Pairs:
    """The runs of two arms by seed, and what limits their comparison.

    Args:
        tests: the counted runs of all arms, by seed: one run for each arm and seed.
        others: other runs with a result, as `_tests_and_others` gives them.
        control: whether the reference is the control arm.
    """
    treatment, reference, _, clock = arms
    ours = tests[tests["arm"] == treatment]
    theirs = tests[tests["arm"] == reference]
    seeds = ours.index.intersection(theirs.index)
    usable = [seed for seed in seeds if ours["usable"][seed] and theirs["usable"][seed]]
    without_result = [seed for seed in seeds if seed not in usable]
    only_in_one_arm = sorted(set(ours.index) ^ set(theirs.index))
    copies = copies_of_seeds(_ends(ours.loc[usable]), _ends(theirs.loc[usable]))
    counted = [seed for seed in usable if seed not in copies]
    notes: list[Note] = []
    caveats: list[str] = []
    for side, arm in ((ours, treatment), (theirs, reference)):
        counted_runs = side.loc[counted]
        caveats += caveats_on_lost(side, f"runs of {arm}")
        caveats += caveats_on_repeated(counted_runs, arm)
        notes += notes_on_events(counted_runs, f"runs of {arm}")
        more_notes, more_caveats = limits_of_remade(counted_runs, others[others["arm"] == arm], bool(plan.runs))
        notes += more_notes
        caveats += more_caveats
        num_diverged = int(counted_runs["diverged"].sum())
        if num_diverged:
            notes.append(note_on_diverged(arm, num_diverged, len(counted)))
    ours = ours.loc[counted]
    theirs = theirs.loc[counted]
    notes += notes_on_batches(ours, theirs, treatment, reference)
    if ours["from_scratch"].any() or theirs["from_scratch"].any():
        notes.append(FROM_SCRATCH)
    allowed = differences_by_design(treatment, reference, plan)
    if control:  # losses are compared at equal samples, whatever budget the control arm was given
        allowed |= {*BUDGET, "batch_size"}
    compared = compare_arms(ours, theirs, allowed)
    why_not_comparable, more_notes = limits_of_unlike(compared.pairs.values(), (treatment, reference), plan)
    notes += more_notes
    why_untimed: dict[Any, str] = {}
    timing_caveats: list[str] = []
    if clock == "measured":
        why_untimed = _why_untimed(ours, theirs, compared)
        timing_caveats = caveats_on_timing(pd.concat((ours, theirs)))
        if why_untimed and len(why_untimed) < len(counted):
            why = next(iter(why_untimed.values()))
            timing_caveats.append(f"The seconds of the runs of seed {listed(why_untimed)} are not compared: {why}.")
    return Pairs(
        *arms,
        run_pairs=list(zip(each(ours), each(theirs), strict=True)),
        left_out=seeds_left_out(without_result, only_in_one_arm, copies),
        notes=tuple(notes),
        caveats=tuple(caveats),
        timing_caveats=tuple(timing_caveats),
        why_not_comparable=why_not_comparable,
        why_untimed=why_untimed,
        control=control,
    )


def _why_untimed(ours: DataFrame, theirs: DataFrame, gated: ArmsCompared) -> dict[Any, str]:
    """Seed -> why the measured seconds of its two runs are not compared."""
    reasons = [_why_mixed_machines(side) for side in (ours, theirs)]
    if any(reasons):
        return dict.fromkeys(ours.index, "; ".join(filter(None, reasons)))
    why_untimed = {}
    for (seed, _nth), pair in gated.pairs.items():
        if pair.timing_refusals:
            why_untimed[seed] = "; ".join(pair.timing_refusals.values())
    return why_untimed


def seeds_left_out(
    without_result: Sequence[float], only_in_one_arm: Sequence[float], copies: Mapping[float, float]
) -> str:
    """Seeds that are not counted, and why.

    Args:
        without_result: seeds of which a run has no result.
        copies: as `copies_of_seeds` gives them.
    """
    reasons = []
    if without_result:
        number = len(without_result)
        reasons.append(f"{number} pair{'s' if number > 1 else ''} left out (seed {listed(without_result)})")
    if only_in_one_arm:
        reasons.append(f"seed {listed(only_in_one_arm)} only in one of the two arms")
    for seed, first in copies.items():
        reasons.append(f"seed {seed:g} is a copy of seed {first:g} and counts once")
    return "; ".join(reasons)


def note_on_diverged(arm: str, number: int, of: int) -> Note:
    return Note(f"{arm}: diverged {number}/{of}", "diverged", (arm, f"{number} of {of} runs"))


def _ends(runs: DataFrame) -> dict[Any, str]:
    """Seed -> the hash of a run's last parameters, of runs that have trained, did not diverge, and have recorded it."""
    ended = runs[~runs["diverged"] & (runs["updates"] > 0)]
    return {seed: sha256 for seed, sha256 in ended["parameters_sha256"].items() if sha256}


def limits_of_remade(runs: DataFrame, others: DataFrame, is_planned: bool) -> tuple[list[Note], list[str]]:
    """Notes and caveats on runs of an arm that were made more than once.

    Of a planned run the last one counts that was made in its folder. Of loose runs of one arm and seed the first by
    name counts. Another run of that seed with a result is a caveat, since both may have been looked at before one was
    kept. Planned replicates, and killed runs that were made again, are mentioned in a note.

    Args:
        runs: those that are in pairs.
        others: runs of the same arm with a result that are in no pair.
        is_planned: whether the folder has a plan.
    """
    replaced_statuses = [status for details in runs["details"] for status in details.get("replaced", ())]
    num_replaced_results = sum(status in WITH_RESULT for status in replaced_statuses)
    num_killed = len(replaced_statuses) - num_replaced_results
    of_same_seeds = others[others["seed"].isin(runs["seed"])]
    num_replicates = 0
    if is_planned:
        num_replicates = int(of_same_seeds["stage"].eq("test").sum())
    num_second_results = len(of_same_seeds) - num_replicates + num_replaced_results
    arm = runs["arm"].iloc[0] if len(runs) else ""
    # the middle of each sentence: beside the runs of ARM that are counted there are ...
    counted = f"the runs of {arm} that are counted there are"
    notes = []
    caveats = []
    if num_replicates:
        notes.append(Note(f"beside {counted} planned replicates ({num_replicates})"))
    if num_killed:
        notes.append(Note(f"beside {counted} earlier ones without a result ({num_killed})"))
    if num_second_results:
        caveats.append(f"Beside {counted} others of their seeds with a result ({num_second_results}).")
    return notes, caveats


def copies_of_seeds(ours: Mapping[Any, str], theirs: Mapping[Any, str]) -> dict[Any, Any]:
    """Seed -> an earlier seed whose two runs end at the same parameters: copies, or a task that ignores its seed.

    Args:
        ours, theirs: seed -> the hash of the last parameters in each of two arms.
    """
    first: dict[tuple[str, str], Any] = {}
    copies = {}
    for seed in ours:
        if seed in theirs:
            earlier = first.setdefault((ours[seed], theirs[seed]), seed)
            if earlier != seed:
                copies[seed] = earlier
    return copies


def caveats_on_repeated(runs: DataFrame, arm: str) -> list[str]:
    """Why the runs of an arm are not independent of each other: some end at the same parameters."""
    ends = _ends(runs)
    num_different = len(set(ends.values()))
    if num_different == len(ends):
        return []
    which = "the same parameters" if num_different == 1 else f"{num_different} different sets of parameters"
    return [f"The {len(ends)} runs of {arm} end at {which}, so they are not independent."]


def limits_of_unlike(pairs: Collection[RunsCompared], arms: tuple[str, str], plan: Plan) -> tuple[str, list[Note]]:
    """Why the pairs of two arms are not comparable, and a note on other differences of the arms.

    A setting counts as tuned where tuning chose it in both arms:

    >>> from analysis.questions import NO_PLAN
    >>> from asyncsgd.studies.files import PlannedArm
    >>> planned = [PlannedArm(name, "async", {}, chosen={"learning_rate": 0.1}) for name in ("a", "b")]
    >>> plan = NO_PLAN._replace(arms={arm.name: arm for arm in planned})
    >>> compared = RunsCompared({}, {}, {"learning_rate": ("0.1", "0.2")})
    >>> [limits_of_unlike([compared], arms, plan)[1][0] for arms in (("a", "b"), ("a", "c"))]  # doctest: +ELLIPSIS
    ['the arms also differ in learning_rate (0.1, 0.2: tuned for each arm)', 'the ... learning_rate (0.1, 0.2)']
    """
    mentions: dict[str, list[str]] = {}
    for pair in pairs:
        for key, values in pair.mentions.items():
            mentions.setdefault(key, []).extend(values)
    refusals = [pair.refusals for pair in pairs]
    why = each_once(refusals)
    # --arms names settings. The refusals that are taken away here are about what runs began from, or about
    # micro-batches, which are refused where a layer of the model normalises over the batch.
    settings = sorted({*itertools.chain(*refusals)} - {*START_COLUMNS, "first_loss", "micro_batches"})
    if settings and not plan.runs:
        why += f" (if the arms are meant to differ in it: --arms {','.join((*plan.arms_differ_in, *settings))})"
    if not mentions:
        return why, []
    # of the two arms that are compared, not of others in the plan
    chosen = [plan.arms[arm].chosen or {} if arm in plan.arms else {} for arm in arms]
    tuned = {*chosen[0]} & {*chosen[1]}
    return why, [Note(also_differ(mentions, tuned))]


def also_differ(mentions: Mapping[str, Iterable[str]], tuned: Set[str]) -> str:
    """In what arms differ beside the algorithm, with the values of both, and what of it tuning chose.

    >>> also_differ({"learning_rate": ["0.001", "0.01"], "precision": ["bf16", "fp32"]}, {"learning_rate"})
    'the arms also differ in learning_rate (0.001, 0.01: tuned for each arm), precision (bf16, fp32)'
    """
    differ = []
    for key, values in mentions.items():
        shown = list(dict.fromkeys(values))
        comma = "; " if any("," in value for value in shown) else ", "
        choice = ": tuned for each arm" if key in tuned else ""
        differ.append(f"{key} ({comma.join(shown)}{choice})")
    return f"the arms also differ in {', '.join(differ)}"


def _why_mixed_machines(side: DataFrame) -> str:
    """Why the mean seconds of an arm mean nothing: its runs had unlike threads or devices; empty if all were alike."""
    machines = set()
    for run in each(side):
        if run.device:
            threads = "1 thread" if run.threads == 1 else f"{run.threads:g} threads"
            machines.add(f"{threads} a worker on {run.device}")
    if len(machines) < 2:
        return ""
    return f"runs of {side['arm'].iloc[0]} had {' and '.join(sorted(machines))}"


def caveats_on_lost(runs: DataFrame, whose: str) -> list[str]:
    """How many of `runs` have no result, each status a sentence.

    Args:
        whose: what the runs are called, such as "runs of async".
    """
    counts = runs.loc[~runs["usable"], "status"].value_counts().sort_index()
    sentences = []
    for status, number in counts.items():
        be = "is" if number == 1 else "are"
        how = "DONE without a curve" if status == "DONE" else status
        sentences.append(f"{number} of {len(runs)} {whose} {be} {how}, and left out.")
    return sentences


def notes_on_events(runs: DataFrame, whose: str) -> list[Note]:
    """What went wrong in runs that have a result, each of `EVENTS_IN_WORDS` a note."""
    notes = []
    for key, words in EVENTS_IN_WORDS.items():
        number = sum(key in details for details in runs["details"])
        if number:
            notes.append(Note(f"during {number} of {len(runs)} {whose} {words}"))
    return notes


def samples_per_update(runs: DataFrame) -> float:
    """The mean samples over all updates of the usable runs; nan where it is not known."""
    known = runs[runs["samples_per_update"].notna() & runs["usable"]]
    updates = known["updates"].sum()
    if not updates:
        return math.nan
    samples = (known["samples_per_update"] * known["updates"]).sum()
    return float(samples / updates)


def notes_on_batches(ours: DataFrame, theirs: DataFrame, treatment: str, reference: str) -> list[Note]:
    """At equal samples an arm with smaller updates makes more of them, which is a difference of its own."""
    size = samples_per_update(ours)
    other_size = samples_per_update(theirs)
    if not (math.isfinite(size) and math.isfinite(other_size)) or _is_same_batch(size, other_size):
        return []
    more = f"{treatment} makes {other_size / size:.3g} times as many updates of the same samples as {reference}"
    sentence = f"{more} ({size:.3g} and {other_size:.3g} samples an update)"
    return [Note(f"unequal batches: {sentence}", "batches", (sentence,))]


def caveats_on_timing(runs: DataFrame) -> list[str]:
    """Why the measured seconds of some of these runs are no speed comparison, each a sentence."""
    caveats = []
    if runs["oversubscribed"].any():
        caveats.append("The machine had more threads than cores, so its seconds are no speed comparison.")
    if (runs["resumes"] > 0).any():
        caveats.append("Some runs were stopped and resumed, so their seconds are no speed comparison.")
    return caveats
