"""Questions become test rows: the paired test of each, Holm's correction of each family, and the verdict in a word."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy

from analysis.statistics.equivalence import Equivalence, tost_paired
from analysis.statistics.intervals import Interval, short
from analysis.statistics.paired import (
    EXACT_PAIRS,
    RANDOM_PATTERNS,
    PairedResult,
    paired_difference,
    ratio_interval,
    shift_interval,
    sign_flip,
    signed_ranks,
)
from analysis.statistics.power import holm, least_p_holm, minimum_pairs
from analysis.statistics.time_to_target import restricted
from analysis.statistics.verdict import MINIMUM_PAIRS, margin_too_wide, margin_unexplained, nothing_to_find, verdict
from analysis.statistics.wins import mcnemar, mcnemar_interval

Endpoint = Literal[
    "time_to_target", "target_reached", "loss_at_equal_samples", "loss_at_equal_seconds", "macro_f1", "span_f1"
]


Family = Literal["primary", "secondary", "exploratory"]
"""primary: what was registered; secondary: corrected within a family of its own, not registered; exploratory: there is
no registration that stands, or the target was chosen after the fact."""


FOUND_AFTER_OTHERS = "the interval alone shows no difference: Holm's method found it after others of its family"
NOT_COMPARABLE = "not comparable"
"""The verdict where the seconds of no pair were measured on the same hardware."""

SHOWN_AFTER_OTHERS = "the interval alone shows no equivalence: Holm's method found it after others of its family"

RESTS_ON_MARGIN = ("equivalent", "different but negligible")
"""The verdicts that an equivalence test against a margin gives."""

DECIDED = ("better", "worse", *RESTS_ON_MARGIN)
"""The verdicts that claim something."""


@dataclasses.dataclass(frozen=True)
class RestrictedTimes:
    """S3: what stands behind a difference of times that are counted up to a common budget."""

    budget: float
    """Seconds up to which times are compared."""
    cut_short: bool
    """Whether a run ended at `budget` without the target, so that nothing is known beyond it; else every run that did
    not diverge got there."""
    treatment_within: int
    """Runs that reached the target before the budget was over, or at its end."""
    reference_within: int
    treatment_later: int
    """Runs that reached it after that, which is in no number."""
    reference_later: int
    common: bool = False
    """Whether `budget` is what every run was given."""
    diverged_later: tuple[int, int] = (0, 0)
    """See `Paired.diverged_later`."""
    ratio: Interval | None = None
    """Mean of min(time, budget), reference / treatment; above 1: the treatment is sooner. Its interval is that of the
    test of the difference, so that it leaves out 1 exactly where the row's `estimate` leaves out 0. None where nothing
    is shown, or a run was there from the start."""


@dataclasses.dataclass(frozen=True)
class TestRow:
    """One line of the table of tests."""

    __test__ = False  # pytest would take it for a test by its name

    comparison: str
    """Readable, e.g. ``ringmaster vs sync, 4 workers, virtual clock``."""
    treatment: str
    """Arm name."""
    reference: str
    """Arm name (``baseline`` where a downstream score is compared with no intermediate training)."""
    group: str
    endpoint: Endpoint
    endpoint_label: str
    """In words, with the unit: ``time to the target, restricted to 61.2 s (s)``."""
    unit: str
    """Of `estimate`: ``s``, ``nats``, ``points`` ..."""
    family: Family
    family_size: int
    """Comparisons that Holm's correction is over."""
    alpha: float
    """Level of the verdict, before Holm's correction."""
    n: int
    """Complete pairs (seeds)."""
    estimate: Interval | None
    """Mean paired difference, treatment - reference, with the differences that its test does not reject at `alpha` /
    `family_size`. So all intervals of a family have one level, and hold together in 1 - `alpha` of studies. Where it
    leaves out 0, `p_holm` is below `alpha`; Holm's method may find more, and then a note says so. None without a pair,
    where nothing varied, and where all values are what runs without a result are counted as."""
    reference_mean: float | None
    treatment_mean: float | None
    relative: float | None
    """`estimate` over the reference's improvement (losses), or treatment mean / reference mean (times); else None."""
    effect: float | None
    """d_z: mean over standard deviation of the differences."""
    test: str
    """Name of the test, e.g. ``exact sign-flip``."""
    p: float | None
    p_holm: float | None
    least_p_holm: float | None
    """The smallest that so many pairs can give in this family: at `alpha` or above, nothing can be found."""
    margin: float | None
    margin_share: float | None
    """`margin` over the reference's improvement; None without one of them, or where it did not improve."""
    margin_reason: str
    """Why the margin is what it is, as the plan says; empty where it gives no reason."""
    margin_refused: str
    """Why the margin is not used, in a clause; empty where it is, or there is none."""
    equivalence: Equivalence | None
    """At `alpha` / `family_size`, as `estimate` is; None without a margin, and where it is refused."""
    p_equivalence: float | None
    """Of `equivalence`, by Holm's method over the family: below `alpha` the row is equivalent."""
    times: RestrictedTimes | None
    """For `time_to_target` only."""
    by_divergence: tuple[int, int] | None
    """Pairs that differ because only the treatment's run diverged, or only the reference's; None where none did. Then
    pairs are compared by ranks: there is no `estimate` and no mean, and `wins` says how often which was better."""
    wins: int
    """Pairs in which the treatment is better."""
    ties: int
    """Pairs in which neither is; of times, those in which neither got there within the budget."""
    outside: int | None
    """Pairs whose difference does not lie within ±`margin`; None without `equivalence`."""
    word: str
    """The verdict: too few seeds, equivalent, different but negligible, better, worse, undecided, not comparable."""
    reason: str
    notes: tuple[str, ...]
    """What limits this row: diverged k/n, pairs left out, from scratch, budget of the restriction."""
    caveats: tuple[str, ...] = ()
    """Sentences without which the verdict would mislead: they make the row exploratory and stand in the headline."""

    @property
    def deciding(self) -> Interval | None:
        """The interval that `word` rests on: the equivalence test's where it rests on the margin, else `estimate`'s."""
        if self.equivalence is not None and self.word in RESTS_ON_MARGIN:
            return self.equivalence.interval
        return self.estimate


@dataclasses.dataclass(frozen=True)
class Paired:
    """One value per pair for treatment and reference, with what has to be said about them."""

    treatment: tuple[float, ...]
    reference: tuple[float, ...]
    notes: tuple[str, ...] = ()
    nothing_because: str = ""
    """Why the values say nothing although there are some; empty where they do."""
    word: str = "undecided"
    """The verdict where they say nothing."""
    diverged_later: tuple[int, int] = (0, 0)
    """Runs of treatment and reference that were at the target and diverged, whose times are infinite."""

    @property
    def ranked(self) -> bool:
        """Whether the pairs are compared by ranks, as a run diverged and has no value: inf, or -inf of a score."""
        return any(map(math.isinf, self.treatment + self.reference))


@dataclasses.dataclass(frozen=True)
class Question:
    """One comparison on one endpoint, before Holm's correction: what `judge` makes a `TestRow` of."""

    comparison: str
    treatment: str
    reference: str
    group: str
    endpoint: Endpoint
    label: str
    unit: str
    family: str
    """Key of the family that Holm's correction is over."""
    kind: Family
    values: Paired
    lower_is_better: bool
    margin: float | None
    alpha: float
    notes: tuple[str, ...]
    budget: float | None = None
    """Of restricted times; None for scores."""
    cut_short: bool = False
    """Whether the budget is the end of a run that had not reached the target."""
    common: bool = False
    """Whether the budget is what every run was given."""
    caveats: tuple[str, ...] = ()
    """See `TestRow.caveats`."""
    margin_reason: str = ""
    """Why `margin` is what it is, as the plan says."""
    improvement: float | None = None
    """By how much the reference became better in all (0 or below: not at all), which `TestRow.relative` is a share of;
    None where that is not known."""


def judge(
    questions: Sequence[Question], generator: numpy.random.Generator, num_registered: int = 0
) -> tuple[TestRow, ...]:
    """Test every question, correct each family with Holm's method, and say in one word what was shown.

    Args:
        questions: in the order of the table; families may be mixed.
        generator: for sign-flip tests of more than 30 pairs.
        num_registered: comparisons that were registered as the primary family; those that are not among `questions`
            count as ones that show nothing (p = 1), since leaving them out would make the others easier.
    """
    tested = [_tested(question, generator) for question in questions]
    judged: dict[int, _Judged] = {}
    for family in dict.fromkeys(question.family for question in questions):
        places = [place for place, question in enumerate(questions) if question.family == family]
        missing = max(0, num_registered - len(places)) if family == "primary" else 0
        size = len(places) + missing
        found = [tested[place] for place in places]
        equivalences = [_equivalence(questions[place], tested[place], size) for place in places]
        adjusted = _adjusted([None if result is None else result.p for result in found] + [None] * missing)
        equivalent = _adjusted([None if test is None else test.p for test in equivalences] + [None] * missing)
        least = least_p_holm([0 if result is None else result.n for result in found] + [0] * missing)
        for number, place in enumerate(places):
            judged[place] = _Judged(size, adjusted[number], equivalences[number], equivalent[number], least[number])
    return tuple(_row(question, tested[place], judged[place], generator) for place, question in enumerate(questions))


@dataclasses.dataclass(frozen=True)
class _Judged:
    """What its family makes of a question."""

    size: int
    p_holm: float
    equivalence: Equivalence | None
    p_equivalence: float
    least_p_holm: float


def _adjusted(p_values: Sequence[float | None]) -> list[float]:
    """By Holm's method. A question without a p is one of the family: leaving it out would make the others easier."""
    return holm([1.0 if p is None else p for p in p_values])


def _equivalence(question: Question, result: PairedResult | None, size: int) -> Equivalence | None:
    """The equivalence test at the level that holds for all `size` comparisons of a family together."""
    if result is None or result.p is None or question.margin is None or _ranked(question):
        return None
    if _margin_refused(question):
        return None
    level = question.alpha / size
    return tost_paired(*_compared(question), question.margin, level)


def _margin_refused(question: Question) -> str:
    if question.margin is None:
        return ""
    too_wide = margin_too_wide(question.margin, question.improvement)
    return too_wide or margin_unexplained(question.margin, question.improvement, question.margin_reason)


def _tested(question: Question, generator: numpy.random.Generator) -> PairedResult | None:
    values = question.values
    if not values.treatment:
        return None
    ours, theirs = _compared(question)
    if _ranked(question):
        found = _tested_by_ranks(ours, theirs, generator)
    else:
        found = paired_difference(ours, theirs, generator, question.alpha)
    if question.endpoint == "target_reached":
        found = dataclasses.replace(found, p=mcnemar(ours, theirs))
    return dataclasses.replace(found, p=None) if values.nothing_because else found


def _ranked(question: Question) -> bool:
    return question.budget is None and question.values.ranked


def _tested_by_ranks(ours: Sequence[float], theirs: Sequence[float], generator: numpy.random.Generator) -> PairedResult:
    """Wilcoxon's signed-rank test; the mean signed rank stands for the difference, which has no unit or interval."""
    ranks = signed_ranks(ours, theirs)
    mean = Interval(math.fsum(ranks) / len(ranks), None, None, 0.95, len(ranks))
    return PairedResult(len(ranks), mean, mean, None, sign_flip(ranks, generator), None)


def _compared(question: Question) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values of both sides; times up to the budget, as nothing more is known of a run that ended there."""
    values, budget = question.values, question.budget
    if budget is None:
        return values.treatment, values.reference
    return tuple(restricted(values.treatment, budget)), tuple(restricted(values.reference, budget))


def _row(
    question: Question,
    result: PairedResult | None,
    judged: _Judged,
    generator: numpy.random.Generator,
) -> TestRow:
    values, size = question.values, judged.size
    n = len(values.treatment)
    notes = list(question.notes + values.notes)
    estimate = None
    times = outside = None
    wins = ties = 0
    relative = by_divergence = None
    ranked = _ranked(question)
    treatment_mean = reference_mean = None
    word, reason = "too few seeds", "there is no pair"
    if values.nothing_because:
        word, reason = values.word, values.nothing_because
    gained = question.improvement if question.improvement is not None and question.improvement > 0 else None
    margin_share = None if question.margin is None or gained is None else question.margin / gained
    refused = _margin_refused(question)
    if result is not None:
        if question.budget is not None:
            times = _restricted_times(question, question.budget)
        if not values.nothing_because:  # else all values are what a run without a result counts as, on both sides
            ours, theirs = _compared(question)
            if not ranked:
                treatment_mean, reference_mean = math.fsum(ours) / n, math.fsum(theirs) / n
            if result.nothing_varied:
                values = dataclasses.replace(values, nothing_because=_nothing_varied(question, result))
        if not values.nothing_because and result.p is not None:
            if ranked:
                by_divergence = _by_divergence(ours, theirs)
            elif question.endpoint == "target_reached":  # a share is not moved by a constant
                estimate = mcnemar_interval(ours, theirs, question.alpha, size)
            else:
                estimate = shift_interval(ours, theirs, result.p, generator, question.alpha, size)
            if times is not None and min(ours) > 0:
                ratio = ratio_interval(ours, theirs, result.p, generator, question.alpha, size)
                times = dataclasses.replace(times, ratio=ratio)
            if treatment_mean is not None and reference_mean is not None:
                relative = _relative(question, result, treatment_mean, reference_mean, gained)
            better, worse = (ours, theirs) if question.lower_is_better else (theirs, ours)
            wins = int(numpy.less(better, worse).sum())
            ties = int(numpy.equal(better, worse).sum())
            if (margin := question.margin) is not None and judged.equivalence is not None:
                outside = sum(not -margin < one - other < margin for one, other in zip(ours, theirs, strict=True))
        if values.nothing_because and n >= minimum_pairs(1, question.alpha):
            word, reason = "undecided", values.nothing_because
        else:
            said = verdict(
                n,
                result.difference.estimate,
                judged.p_holm,
                judged.equivalence,
                judged.p_equivalence,
                question.lower_is_better,
                question.alpha,
                max(MINIMUM_PAIRS, minimum_pairs(1, question.alpha)),
                size,
                judged.least_p_holm,
                ranked,
            )
            word, reason = said.word, said.reason
            if values.nothing_because:
                reason = f"{reason}; {values.nothing_because}"
            elif refused:
                reason = f"{reason}; {refused}"
        if word in ("better", "worse") and estimate is not None and estimate.holds(0.0):
            notes.append(FOUND_AFTER_OTHERS)
        if word in RESTS_ON_MARGIN and judged.equivalence is not None and not judged.equivalence.equivalent:
            notes.append(SHOWN_AFTER_OTHERS)
        hopeless = nothing_to_find(n, size, judged.least_p_holm, question.alpha) if n >= MINIMUM_PAIRS else ""
        if hopeless and hopeless not in reason:
            notes.append(hopeless)
    return TestRow(
        comparison=question.comparison,
        treatment=question.treatment,
        reference=question.reference,
        group=question.group,
        endpoint=question.endpoint,
        endpoint_label=question.label,
        unit=question.unit,
        family=question.kind,
        family_size=size,
        alpha=question.alpha,
        n=n,
        estimate=estimate,
        reference_mean=reference_mean,
        treatment_mean=treatment_mean,
        relative=relative,
        effect=None if result is None else result.effect,
        test=_test_name(question.endpoint, n, ranked),
        p=None if result is None else result.p,
        p_holm=None if result is None or result.p is None else judged.p_holm,
        least_p_holm=None if result is None else judged.least_p_holm,
        margin=question.margin,
        margin_share=margin_share,
        margin_reason=question.margin_reason,
        margin_refused=refused,
        equivalence=judged.equivalence,
        p_equivalence=None if judged.equivalence is None else judged.p_equivalence,
        times=times,
        by_divergence=by_divergence,
        wins=wins,
        ties=ties,
        outside=outside,
        word=word,
        reason=reason,
        notes=tuple(notes),
        caveats=question.caveats,
    )


def _by_divergence(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int]:
    pairs = [(math.isinf(one), math.isinf(other)) for one, other in zip(ours, theirs, strict=True)]
    return pairs.count((True, False)), pairs.count((False, True))


def _test_name(endpoint: Endpoint, n: int, ranked: bool) -> str:
    if ranked:
        return "exact signed-rank test" if n <= EXACT_PAIRS else f"signed-rank test, {RANDOM_PATTERNS:,} draws"
    if endpoint == "target_reached":
        return "exact McNemar test of the runs that reached the target"
    if n > EXACT_PAIRS:
        return f"sign-flip of paired differences, {RANDOM_PATTERNS:,} draws"
    return "exact sign-flip of paired differences"


def _nothing_varied(question: Question, result: PairedResult) -> str:
    if question.endpoint == "target_reached":
        discordant = "one run that reached the target and one that did not"
        return f"none of {result.n} pairs has {discordant}: there is nothing to test"
    same = short(result.difference.estimate)
    return f"all {result.n} differences are {same}; nothing varied: nothing was measured"


def _restricted_times(question: Question, budget: float) -> RestrictedTimes:
    sides = (question.values.treatment, question.values.reference)
    ours, theirs = (sum(time <= budget for time in side) for side in sides)
    our_later, their_later = (sum(budget < time < math.inf for time in side) for side in sides)
    return RestrictedTimes(
        budget,
        question.cut_short,
        ours,
        theirs,
        our_later,
        their_later,
        question.common,
        question.values.diverged_later,
    )


def _relative(
    question: Question, result: PairedResult, treatment: float, reference: float, gained: float | None
) -> float | None:
    if question.endpoint == "time_to_target":
        return treatment / reference if reference else None
    return result.difference.estimate / gained if gained else None


def sort_rows(rows: Iterable[TestRow]) -> tuple[TestRow, ...]:
    """The primary family first, then endpoint by endpoint."""
    families = ("primary", "secondary", "exploratory")
    endpoints = get_args(Endpoint)
    return tuple(sorted(rows, key=lambda row: (families.index(row.family), endpoints.index(row.endpoint))))
