"""From runs and curves to `tests`: a row is a question asked of pairs of runs, its answer, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pandas import DataFrame

from analysis import stats
from analysis.curves import unit_of
from analysis.measure import Measure, values_of
from analysis.pairs import Pairs
from analysis.questions import BASELINE, TIMES, Plan, is_primary
from analysis.runs import Note
from analysis.scores import scores_of

TO_THE_TARGET = ("time_to_target", "target_reached")
LOSSES = ("loss_at_equal_samples", "loss_at_equal_seconds")
IN_SECONDS = (*TO_THE_TARGET, "loss_at_equal_seconds")
ON_MARGIN = ("equivalent", "different but negligible")
"""The words that rest on the margin."""
DECIDED = ("better", "worse", *ON_MARGIN)
WIDEST = 0.5
"""The widest margin that is judged, as a share of the reference's improvement."""
EXPLAINED = 0.1
"""A margin above this share of the reference's improvement needs a reason. A difference above this share is never
called negligible."""
LEAST_WORDS = 3
"""The number of words that such a reason has at least."""
AFTERWARDS = 0.95
"""Where no target was declared: this share of the improvement of the reference's own runs, which is exploratory."""
AFTER_OTHERS = "the interval alone shows no {}: Holm's method found it after others of its family"
FAMILIES = ("primary", "secondary", "exploratory")


@dataclass(kw_only=True)
class NotShown:
    """The fields of a question that its later steps need and that no table shows."""

    control: bool = False
    """Whether the reference is the control arm."""
    order: int = 0
    """Place among the questions on its two arms."""
    nothing: str = ""
    """The reason why there is no test, a sentence; empty where there is a test."""
    unlike: bool = False
    """Whether there is no test because the runs are not comparable."""
    crossed: Any = None
    """For each pair and arm, the two evaluations between which the run came to the target."""
    direction: float = math.nan
    """The sign says on which side of the reference the treatment lies."""


@dataclass(kw_only=True)
class Tested(NotShown):
    """A question asked of pairs of runs, and its answer: a row of `tests`; docs/tables.md says what each column is."""

    treatment: str = "a"
    reference: str = "b"
    group: str = ""
    endpoint: str = "numbers"
    family: str = "exploratory"
    family_size: int = 1
    unit: str = ""
    lower: bool = True
    alpha: float = 0.05
    n: int = 0
    seeds: Sequence[Any] = ()
    treatment_values: Any = ()
    reference_values: Any = ()
    treatment_ends: Any = ()
    reference_ends: Any = ()
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    ratio_ends: tuple[float, ...] = ()
    test: str = ""
    p: float = math.nan
    p_ends: tuple[float, ...] = ()
    p_holm: float = math.nan
    least_p: float = 1.0
    margin: float = math.nan
    margin_reason: str = ""
    refused: str = ""
    gained: float = math.nan
    equal_low: float = math.nan
    equal_high: float = math.nan
    p_equal: float = math.nan
    wins: int = 0
    ties: int = 0
    outside: float = math.nan
    diverged: tuple[int, int] = (0, 0)
    target: float = math.nan
    budget: float = math.nan
    common: bool = False
    cut_short: bool = False
    longest: float = math.nan
    reached: tuple[int, int] = (0, 0)
    later: tuple[int, int] = (0, 0)
    between: str = ""
    word: str = ""
    reason: str = ""
    left_out: str = ""
    notes: tuple[Note, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def corrected_with(self) -> str:
        """Questions with the same text are one family of Holm's method."""
        if self.family == "primary":
            return self.family
        where = "baseline" if self.reference == BASELINE else self.group  # that is asked once, not in every group
        return f"{self.family} {self.endpoint} {where} {self.control}"

    @property
    def level(self) -> float:
        """Of the interval that the test of the whole family goes with."""
        return 1 - self.alpha / self.family_size


TESTS = [*Tested.__annotations__]
"""The columns of `tests`."""


def judge(runs: DataFrame, arms: DataFrame, compared: Sequence[Pairs], measure: Measure, plan: Plan) -> DataFrame:
    """Ask every question, correct each family, and say in one word what was shown."""
    asked = [row for pairs in compared for row in _of_pairs(pairs, measure, arms, plan)]
    asked += [_question(plan, arms, score) for score in scores_of(runs, arms, plan)]
    families: dict[str, list[Tested]] = {}
    for row in asked:
        families.setdefault(row.corrected_with, []).append(row)
    judged = [row for family in families.values() for row in answer(family, len(set(plan.registered.family or ())))]
    endpoints = [*TO_THE_TARGET, *LOSSES, *dict.fromkeys(row.endpoint for row in asked)]
    judged.sort(key=lambda row: (FAMILIES.index(row.family), endpoints.index(row.endpoint), row.order))
    return DataFrame([vars(row) for row in judged], columns=TESTS)


def target_of(pairs: Pairs, measure: Measure, plan: Plan) -> tuple[float | None, bool]:
    """The target loss, and whether it was declared."""
    if pairs.reference in plan.targets:
        return plan.targets[pairs.reference], True
    first, best = _improvement(pairs, measure)
    return (first - AFTERWARDS * (first - best) if best < first else None), False


def _improvement(pairs: Pairs, measure: Measure) -> tuple[float, float]:
    """The means of the first and of the lowest losses of the reference's runs; nan where all of them diverged."""
    curves = [measure.curve(run.run, "samples")[1] for _, run in pairs.both if not run.diverged]
    losses = [y for y in curves if len(y)]
    if not losses:
        return math.nan, math.nan
    return float(np.mean([y[0] for y in losses])), float(np.mean([y.min() for y in losses]))


SHARES = (0.25, 0.5, 0.8, 0.9, 0.95, 0.98)
LARGE_SPREAD = 1.25
"""Shares of the reference's improvement whose targets are looked at; two of them disagree where one speed-up is so many
times the other."""


def other_targets(pairs: Pairs, measure: Measure, plan: Plan) -> list[str]:
    """The two targets at which the speed-up differs most, where all runs reached them and the intervals are apart."""
    first, best = _improvement(pairs, measure)
    if len(pairs.both) < stats.MINIMUM_PAIRS or math.isnan(first):
        return []
    pilots = plan.registered.pilots.get(pairs.reference, {})
    first = pilots.get("first_loss", first)
    best = pilots.get("best_loss", best)
    found = []
    for share in SHARES:
        values = measure.times(pairs, first - share * (first - best))
        ours = values["treatment_ends"]
        theirs = values["reference_ends"]
        if len(ours) and np.isfinite(values["crossed"]).all() and ours[:, 1].min() > 0:
            found.append((_ratio(ours, theirs)[0], share))
    if not found:
        return []
    most = max(found)
    least = min(found)
    if not most[0].low > least[0].high or most[0].estimate < LARGE_SPREAD * least[0].estimate:
        return []
    told = " and ".join(f"{sooner(one)} at {100 * share:g} % of the improvement" for one, share in (most, least))
    return [f"This depends on the target: {told}."]


def sooner(ratio: stats.Interval) -> str:
    """A ratio of times in words, above 1 either way."""
    return f"{max(ratio.estimate, 1 / ratio.estimate):.2f}{TIMES} {'sooner' if ratio.estimate >= 1 else 'later'}"


def _of_pairs(pairs: Pairs, measure: Measure, arms: DataFrame, plan: Plan) -> list[Tested]:
    rows: list[Tested] = []
    target, declared = target_of(pairs, measure, plan)
    timed = measure.times(pairs, target) if target is not None and not pairs.control else None
    for endpoint in ("loss_at_equal_samples",) if pairs.control else (*TO_THE_TARGET, *LOSSES):
        after: tuple[Note, ...] = ()
        if endpoint in TO_THE_TARGET:
            if timed is None or (endpoint == "target_reached" and not timed.get("common")):
                continue
            if not declared:
                told = f"chosen after the fact, 95 % of the improvement of {pairs.reference}"
                after = (Note(f"target {target:.3g}: {told}"),)
            known = timed | {"target": target}
            if endpoint == "target_reached":
                crossed = timed["crossed"]
                surely = crossed[:, :, 1] <= timed["budget"]
                perhaps = crossed[:, :, 0] < timed["budget"]
                hits = np.stack((surely, perhaps), axis=2).astype(float)
                known |= values_of(hits[:, 0], hits[:, 1], timed["seeds"])
                known |= {"notes": (), "nothing": "", "between": "", "reached": (0, 0), "later": (0, 0)}
        else:
            known = measure.losses(pairs, "samples" if endpoint == "loss_at_equal_samples" else "seconds")
            known["unit"] = unit_of(pairs.both[0][0].details) if pairs.both else ""
        known |= {name: getattr(pairs, name) for name in ("treatment", "reference", "group", "left_out", "control")}
        known |= {"endpoint": endpoint, "order": len(rows)}
        caveats = pairs.caveats
        unlike = pairs.unlike
        if endpoint in IN_SECONDS:
            caveats += pairs.no_speed
            if len(pairs.why_untimed) == len(pairs.both) > 0:
                unlike = unlike or next(iter(pairs.why_untimed.values()))
        known["caveats"] = caveats + known.get("caveats", ())
        notes = () if unlike else (*known.get("notes", ()), *after)  # of what is not compared nothing is said
        known["notes"] = (*pairs.notes, *notes)
        if unlike:
            known |= {"nothing": unlike, "unlike": True}
        rows.append(_question(plan, arms, known, after=after))
    return rows


def is_score(endpoint: str) -> bool:
    """Whether an endpoint is a score after fine-tuning, whose unit and direction come with its values."""
    return endpoint not in (*TO_THE_TARGET, *LOSSES)


def _question(plan: Plan, arms: DataFrame, known: dict[str, Any], after: tuple[Note, ...] = ()) -> Tested:
    """A question without its answer.

    Args:
        known: its fields, by name, but for what the registration says.
        after: what was chosen after the fact.
    """
    registered = plan.registered
    own = arms.loc[known["treatment"]]
    endpoint = known["endpoint"]
    score = endpoint if is_score(endpoint) else "loss"
    units = {"time_to_target": "s" if own["clock"] == "measured" else "virtual s", "target_reached": "of the runs"}
    asked = {"unit": units.get(endpoint, ""), "lower": endpoint != "target_reached"} | known
    row = Tested(**asked, alpha=registered.alpha, family="secondary")
    if endpoint not in TO_THE_TARGET:
        row.margin = registered.margins.get(score, math.nan)
    row.margin_reason = registered.margin_reasons.get(score, "")
    primary = is_primary(plan, own["workers"], own["clock"])
    named = plan.names(row.treatment) or own["algorithm"] == plan.reference
    if row.caveats or after or plan.exploratory or (primary and not named):
        row.family = "exploratory"
    elif primary and endpoint == registered.primary.endpoint and not row.control and row.reference != BASELINE:
        row.family = "primary"
    return row


def of_numbers(ours: stats.Numbers, theirs: stats.Numbers, **known: Any) -> Tested:
    """A question about paired numbers that belong to no study; `answer` takes it.

    Args:
        known: other fields: margin, margin_reason, gained, lower, alpha.
    """
    return Tested(**values_of(np.asarray(ours, float), np.asarray(theirs, float), list(range(len(ours)))), **known)


def answer(family: Sequence[Tested], registered: int = 0) -> list[Tested]:
    """Test the questions of one family together; `registered` ones that are not here count as showing nothing."""
    missing = max(0, registered - len(family)) if family[0].family == "primary" else 0
    rows = [tested(row, len(family) + missing) for row in family]
    for name, source in (("p_holm", "p"), ("p_equal", "p_equal"), ("least_p", "least_p")):
        values = [getattr(row, source) for row in rows]
        for row, value, adjusted in zip(rows, values, stats.holm([*values, *[1.0] * missing]), strict=False):
            setattr(row, name, adjusted if value == value else math.nan)
    for row in rows:
        row.word, row.reason = word(row)
        if row.word in ("better", "worse") and row.low <= 0 <= row.high:
            row.notes += (Note(AFTER_OTHERS.format("difference"), "corrected"),)
        if row.word in ON_MARGIN and not (-row.margin < row.equal_low and row.equal_high < row.margin):
            row.notes += (Note(AFTER_OTHERS.format("equivalence"), "corrected"),)
    return rows


def tested(question: Tested, size: int) -> Tested:
    """A question with the answer of its own pairs, in a family of `size`.

    Where values lie between two looks it is tested twice: with all of the treatment at their upper ends and all of the
    reference at their lower ones, and the reverse. What both show is known, so the larger p counts, and 1 where the two
    differ in direction.
    """
    row = replace(question, family_size=size, least_p=stats.smallest_p(question.n))
    if not row.n or row.nothing:
        return row
    ours = row.treatment_ends.T
    theirs = row.reference_ends.T
    our_low, our_high = ours
    their_low, their_high = theirs
    # pairs in which the treatment's value, a loss, a time or a score, is surely lower or higher than the reference's
    lower = (our_high <= their_low) & (our_low < their_high)
    higher = (their_high <= our_low) & (their_low < our_high)
    row.wins = int((lower if row.lower else higher).sum())
    row.ties = int((~lower & ~higher).sum())
    our_infinite = np.isinf(our_high)
    their_infinite = np.isinf(their_high)
    if our_infinite.any() or their_infinite.any():
        row.diverged = (int((our_infinite & ~their_infinite).sum()), int((their_infinite & ~our_infinite).sum()))
    elif row.margin == row.margin:
        row.refused = refused(row.margin, row.gained, row.margin_reason)
    if (ours[0] == ours[1]).all() and (theirs[0] == theirs[1]).all():
        row = _answered(row, our_high, their_high)
    else:
        row = _of_both(_answered(row, our_high, their_low), _answered(row, our_low, their_high))
    if row.endpoint == "time_to_target" and our_high.min() > 0 and not row.nothing:
        interval, row.ratio_ends = _ratio(ours.T, theirs.T, row.level)
        row.ratio, row.ratio_low, row.ratio_high = interval[:3]
        if row.reached[0] < row.n:
            row.ratio_low = 0.0
        if row.reached[1] < row.n:
            row.ratio_high = math.inf
    return row


def _answered(question: Tested, ours: stats.Array, theirs: stats.Array) -> Tested:
    """With the answer of pairs whose values are known."""
    row = replace(question)
    if np.isinf([ours, theirs]).any():
        ranks = stats.signed_ranks(ours, theirs)
        row.test = "signed rank"
        row.direction = float(ranks.sum())
        if ranks.any():
            row.p = stats.sign_flip(ranks, 0 * ranks)[0]
        else:
            row.nothing = "every pair is a tie"
        return row
    if row.endpoint == "target_reached":
        row.test = "McNemar"
        p, interval = stats.mcnemar(ours, theirs, row.level)
        if p != p:
            told = "one run that reached the target and one that did not"
            return replace(question, nothing=f"none of {row.n} pairs has {told}: there is nothing to test")
    else:
        row.test = "sign flip"
        p, interval = stats.sign_flip(ours, theirs, row.level)
        same = row.n > 1 and np.ptp(ours - theirs) <= stats.ROUNDING * np.abs([ours, theirs]).max()
        if same and not row.between:  # between looks that all runs share, it is no wonder
            told = f"all {row.n} differences are {interval.estimate:.3g}"
            return replace(question, nothing=f"{told}; nothing varied: nothing was measured")
    row.p = p
    row.estimate, row.low, row.high = interval[:3]
    row.direction = row.estimate
    if row.margin == row.margin and not row.refused:
        level = 1 - 2 * row.alpha / row.family_size
        row.p_equal, inside = stats.equivalence(ours, theirs, row.margin, level)
        row.equal_low = inside.low
        row.equal_high = inside.high
        row.outside = int((np.abs(ours - theirs) >= row.margin).sum())
    return row


def _of_both(late: Tested, early: Tested) -> Tested:
    """What two answers to one question have in common: the larger p, and the hull of their intervals."""
    both = [row for row in (late, early) if not row.nothing]
    if not both:
        return late
    p_ends = tuple(1.0 if row.nothing else row.p for row in (late, early))
    directions = {0.0 if row.nothing else np.sign(row.direction) for row in (late, early)}
    found = replace(both[0], p_ends=p_ends, p=max(p_ends) if len(directions) == 1 else 1.0)
    for name, ends in (
        ("low", min),
        ("high", max),
        ("equal_low", min),
        ("equal_high", max),
        ("outside", max),
        ("estimate", np.mean),
        ("direction", np.mean),
        ("p_equal", np.max),
    ):
        setattr(found, name, ends([getattr(row, name) for row in both]))
    return found


def _ratio(ours: stats.Array, theirs: stats.Array, level: float = 0.95) -> tuple[stats.Interval, tuple[float, float]]:
    """The ratio of the reference's times to the treatment's, as an interval and as the estimates at its two ends.

    A time is known only to lie between two evaluations, so `ours` and `theirs` (n x 2) hold the earliest and the latest
    time of each pair. The interval covers both extremes: the treatment late and the reference early, and the other way
    round. Its estimate is the ratio of the sums. Where an earliest time of the treatment is 0 seconds, the ratio has no
    upper end.
    """
    late = stats.sign_flip(ours[:, 1], theirs[:, 0], level, ratio=True)[1]
    middle = float(theirs.sum() / ours.sum())
    if not ours[:, 0].min() > 0:
        return late._replace(estimate=middle, high=math.inf), (late.estimate, math.inf)
    early = stats.sign_flip(ours[:, 0], theirs[:, 1], level, ratio=True)[1]
    return late._replace(estimate=middle, high=early.high), (late.estimate, early.estimate)


def refused(margin: float, gained: float, reason: str) -> str:
    """Why a margin says nothing beside what the reference improved by; empty where it may be used."""
    if gained != gained:
        return ""
    if gained <= 0:
        return f"the reference did not improve, so a margin of ±{margin:.3g} cannot be judged"
    share = f"the margin of ±{margin:.3g} is {100 * margin / gained:.0f} % of the reference's improvement"
    if margin > WIDEST * gained:
        return f"{share}, too wide to mean anything"
    if margin > EXPLAINED * gained and len(reason.split()) < LEAST_WORDS:
        return f"{share}, and the plan gives no reason for it (margin_reasons)"
    return ""


def about_margin(row: Any, reference: str) -> str:
    """The share of a margin that a word rests on, and its reason; empty where no word does."""
    if row.word not in ON_MARGIN or row.gained != row.gained:
        return ""
    share = f"{100 * row.margin / row.gained:.2g} % of the improvement of {reference}"
    because = f": {row.margin_reason}" if row.margin_reason else ""
    return f"the margin of ±{row.margin:g} is {share}{because}"


def word(row: Tested) -> tuple[str, str]:
    """What was shown, and why that can be said."""
    n = row.n
    alpha = row.alpha
    minimum = stats.minimum_pairs(1, alpha)
    if row.unlike:
        return "not comparable", row.nothing
    if row.nothing and (n >= minimum or not n):
        return "undecided", row.nothing
    if n < minimum:
        told = [f"{n} of the {minimum} pairs that a verdict needs"]
        if n:
            told.append(f"the smallest p of {n} pair{'s' if n > 1 else ''} is {stats.smallest_p(n):.3g}")
        return "too few seeds", "; ".join(filter(None, (*told, row.nothing)))
    differs = row.p_holm < alpha
    text = f"p_Holm = {row.p_holm:.3g}"
    more = f"; {row.refused}" if row.refused else ""
    if row.p_equal < alpha:
        level = f"{100 * (1 - 2 * alpha / row.family_size):.3g} % interval"
        inside = f"the {level} [{row.equal_low:.3g}, {row.equal_high:.3g}] lies inside ±{row.margin:.3g}"
        if not differs or row.equal_low <= 0 <= row.equal_high:
            return "equivalent", f"{inside}; {text}"
        if not abs(row.estimate) > EXPLAINED * row.gained:
            return "different but negligible", f"{text}, but {inside}"
        share = f"{100 * abs(row.estimate) / row.gained:.0f} % of the reference's improvement"
        more = f"; within the margin of ±{row.margin:.3g}, but {share}"
    if differs:
        found = "better" if (row.direction < 0) == row.lower else "worse"
        return found, f"{text} < {alpha:g}, {'lower' if row.lower else 'higher'} is better{more}"
    if between_looks(row):
        return "undecided", f"{row.between}; {text}{more}"
    if hopeless := hopeless_because(row):
        return "undecided", f"{text}; {hopeless}{more}"
    if row.test == "sign flip":
        effect = stats.detectable_effect(n, alpha / row.family_size)
        found = f"with {n} pairs this test finds a difference of {effect:.2f} SD of the differences in 80 % of studies"
        text = f"{text}; {found}"
    return "undecided", f"{text}{more}"


def between_looks(row: Any) -> bool:
    """Whether an undecided row is so because of what is not known between two looks."""
    return len(row.p_ends) > 0 and (row.p > max(row.p_ends) or min(row.p_ends) < row.alpha / row.family_size)


def hopeless_because(row: Any) -> str:
    """Why so few pairs can show nothing in a family so large; empty where they can."""
    if not row.least_p >= row.alpha:
        return ""
    family = f" and {row.family_size} comparisons" if row.family_size > 1 else ""
    return f"no difference of any size can be found with {row.n} pairs{family}"
