"""Questions about paired values, and their answers: a test, an interval, and one word for what was shown.

A row of `tests` is a `QuestionRow`. Which questions a study asks is said in `analysis.judge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis import stats
from analysis.measure import values_of
from analysis.questions import BASELINE
from analysis.runs import Note

ON_MARGIN = ("equivalent", "different but negligible")
"""The words that rest on the margin."""
DECIDED = ("better", "worse", *ON_MARGIN)
"""The words of an answer that shows something."""
MAX_MARGIN_SHARE = 0.5
"""The widest margin that is judged, as a share of the reference's improvement."""
MAX_UNEXPLAINED_SHARE = 0.1
"""A margin above this share of the reference's improvement needs a reason."""
MAX_NEGLIGIBLE_SHARE = 0.1
"""A difference above this share of the reference's improvement is not called negligible, however wide the margin is."""
MIN_REASON_WORDS = 3
"""The number of words that the reason for a wide margin has at least."""
FOUND_AFTER_OTHERS = "the interval alone shows no {}: Holm's method found it after others of its family"


@dataclass(kw_only=True)
class NotShown:
    """The fields of a question that its later steps need and that no table shows."""

    control: bool = False
    """Whether the reference is the control arm."""
    order: int = 0
    """Position among the questions on its two arms."""
    why_no_test: str = ""
    """The reason why there is no test, a sentence; empty where there is a test."""
    is_not_comparable: bool = False
    """Whether there is no test because the runs are not comparable."""
    brackets: Any = None
    """For each pair and arm, the seconds of the two evaluations between which the run came to the target."""
    direction: float = math.nan
    """Above 0 if the values of the treatment are larger than those of the reference, below 0 if they are smaller."""


@dataclass(kw_only=True)
class QuestionRow(NotShown):
    """A question asked of pairs of runs, and its answer: a row of `tests`; docs/tables.md says what each column is.

    The defaults are those of `question_of_numbers`.
    """

    # the question: which arms, of which values, in which family of Holm's method
    treatment: str = "a"
    reference: str = "b"
    group: str = ""  # the conditions that both arms share
    endpoint: str = "numbers"
    family: str = "exploratory"  # primary, secondary or exploratory
    family_size: int = 1  # comparisons that Holm's method is over
    unit: str = ""  # of the values and of `estimate`
    lower: bool = True  # whether lower values are better
    alpha: float = 0.05  # level of the word, before Holm's correction
    # the values, one a pair; inf: of a run that diverged
    n: int = 0  # pairs
    seeds: Sequence[Any] = ()
    treatment_values: Any = ()
    reference_values: Any = ()
    treatment_ends: Any = ()  # n x 2: the lowest and the highest possible value, equal where it was seen
    reference_ends: Any = ()
    # the difference treatment - reference, in `unit`, with its interval of level 1 - alpha / family_size
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    # reference / treatment, of times: above 1 the treatment was sooner
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    ratio_ends: tuple[float, ...] = ()  # with the treatment late and the reference early, and the reverse
    # the test of a difference
    test: str = ""  # sign flip, signed rank or McNemar
    p: float = math.nan
    p_ends: tuple[float, ...] = ()  # of the same two extremes; empty where every value was seen
    p_holm: float = math.nan
    least_p: float = 1.0  # the smallest p_holm that so many pairs can give
    # the test of equivalence; margin, gained and both ends are in `unit`
    margin: float = math.nan
    margin_reason: str = ""
    refused: str = ""  # why the margin is not used
    gained: float = math.nan  # by how much the reference improved
    equal_low: float = math.nan  # ends of the interval of level 1 - 2 alpha / family_size
    equal_high: float = math.nan
    p_equal: float = math.nan
    # counts of pairs
    wins: int = 0  # the treatment is better for certain
    ties: int = 0  # neither is better for certain
    outside: float = math.nan  # the difference is not within the margin
    diverged: tuple[int, int] = (0, 0)  # the treatment's run alone diverged or had no score, the reference's alone did
    # of times to a target
    target: float = math.nan  # loss to reach
    budget: float = math.nan  # second up to which times are counted
    common: bool = False  # whether that is a budget which every run was given
    cut_short: bool = False  # whether that is where a run ended which had not reached the target
    longest: float = math.nan  # second at which the last run ended
    reached: tuple[int, int] = (0, 0)  # runs of treatment and reference at the target by the budget
    later: tuple[int, int] = (0, 0)  # runs that were there after it
    between: str = ""  # how far apart evaluations are, a sentence; empty where every value was seen
    # the answer in words
    word: str = ""  # one of `DECIDED`, undecided, too few seeds or not comparable
    reason: str = ""
    left_out: str = ""  # pairs that are left out, and why
    notes: tuple[Note, ...] = ()
    caveats: tuple[str, ...] = ()  # sentences that make the row exploratory

    @property
    def holm_family(self) -> str:
        """Questions with the same text are one family of Holm's method."""
        if self.family == "primary":
            return self.family
        group = self.group
        if self.reference == BASELINE:  # the baseline belongs to no group, so all groups are compared with it at once
            group = "baseline"
        return f"{self.family} {self.endpoint} {group} {self.control}"

    @property
    def level(self) -> float:
        """The level of the interval, which rises with the size of the family, as the level of its tests falls."""
        return 1 - self.alpha / self.family_size


TESTS = [*QuestionRow.__annotations__]
"""The columns of `tests`."""


def question_of_numbers(ours: stats.Numbers, theirs: stats.Numbers, **fields: Any) -> QuestionRow:
    """A question about paired numbers that belong to no study; `answer_family` takes it.

    Args:
        fields: other fields: margin, margin_reason, gained, lower, alpha.
    """
    return QuestionRow(**values_of(ours, theirs, list(range(len(ours)))), **fields)


def answer_family(family: Sequence[QuestionRow], num_declared: int = 0) -> list[QuestionRow]:
    """Test the questions of one family together.

    The p of a row stays as it is beside its adjusted `p_holm`. The adjusted `p_equal` and `least_p` replace the raw
    ones: `least_p` then is what Holm's method makes of the smallest p that the number of pairs allows each row.

    Args:
        num_declared: how many questions the family was declared to have. Those that are not here count as showing
            nothing.
    """
    missing = max(0, num_declared - len(family))
    rows = [answer_alone(row, len(family) + missing) for row in family]
    for name, source in (("p_holm", "p"), ("p_equal", "p_equal"), ("least_p", "least_p")):
        values = [getattr(row, source) for row in rows]
        adjusted = stats.holm([*values, *[1.0] * missing])  # it counts nan as 1
        for number, row in enumerate(rows):
            setattr(row, name, math.nan if math.isnan(values[number]) else adjusted[number])
    for row in rows:
        row.word, row.reason = word_of(row)
        if row.word in ("better", "worse") and row.low <= 0 <= row.high:
            row.notes += (Note(FOUND_AFTER_OTHERS.format("difference"), "corrected"),)
        if row.word in ON_MARGIN and not (-row.margin < row.equal_low and row.equal_high < row.margin):
            row.notes += (Note(FOUND_AFTER_OTHERS.format("equivalence"), "corrected"),)
    return rows


def answer_alone(question: QuestionRow, family_size: int) -> QuestionRow:
    """Test one question at the level of its family; `answer_family` corrects its p values.

    Where values are known only to lie between two evaluations it is tested twice: with all of the treatment at their
    upper ends and all of the reference at their lower ones, and the reverse. What both show is known, so the larger p
    counts, and 1 where the two differ in direction.
    """
    row = replace(question, family_size=family_size, least_p=stats.smallest_p(question.n))
    if not row.n or row.why_no_test:
        return row
    our_low, our_high = row.treatment_ends.T
    their_low, their_high = row.reference_ends.T
    # pairs in which the treatment's value, a loss, a time or a score, is surely lower or higher than the reference's;
    # the second condition leaves out values that are equal for certain
    is_lower = (our_high <= their_low) & (our_low < their_high)
    is_higher = (their_high <= our_low) & (their_low < our_high)
    is_better = is_lower if row.lower else is_higher
    row.wins = int(is_better.sum())
    row.ties = int((~is_lower & ~is_higher).sum())
    # times are capped at the budget, so a value is infinite where a run diverged or its score is not defined
    our_infinite = np.isinf(our_high)
    their_infinite = np.isinf(their_high)
    if our_infinite.any() or their_infinite.any():
        row.diverged = (int((our_infinite & ~their_infinite).sum()), int((their_infinite & ~our_infinite).sum()))
    elif not math.isnan(row.margin):
        row.refused = why_margin_refused(row.margin, row.gained, row.margin_reason)
    if (our_low == our_high).all() and (their_low == their_high).all():
        row = _test_known_values(row, our_high, their_high)
    else:
        late = _test_known_values(row, our_high, their_low)
        early = _test_known_values(row, our_low, their_high)
        row = _combine_ends(late, early)
    if row.endpoint == "time_to_target" and our_high.min() > 0 and not row.why_no_test:
        interval, row.ratio_ends = speedup(row.treatment_ends, row.reference_ends, row.level)
        row.ratio, row.ratio_low, row.ratio_high = interval[:3]
        # the time of a run that missed the target is only known to be above the budget, which leaves one end open;
        # so few pairs may have no interval at all
        if not math.isnan(row.ratio_low):
            if row.reached[0] < row.n:
                row.ratio_low = 0.0
            if row.reached[1] < row.n:
                row.ratio_high = math.inf
    return row


def _test_known_values(question: QuestionRow, ours: stats.Array, theirs: stats.Array) -> QuestionRow:
    """Test the question with one known value for each pair and arm."""
    row = replace(question)  # `question` stays as it is: without anything to measure it is returned with a reason
    if np.isinf([ours, theirs]).any():
        ranks = stats.signed_ranks(ours, theirs)
        row.test = "signed rank"
        row.direction = float(ranks.sum())
        if ranks.any():
            row.p, _ = stats.sign_flip(ranks, np.zeros_like(ranks))  # Wilcoxon's test flips the signs of the ranks
        else:
            row.why_no_test = "every pair is a tie"
        return row
    if row.endpoint == "target_reached":
        row.test = "McNemar"
        p, interval = stats.mcnemar(ours, theirs, row.level)
        if math.isnan(p):
            wanted = "one run that reached the target and one that did not"
            return replace(question, why_no_test=f"none of {row.n} pairs has {wanted}: there is nothing to test")
    else:
        row.test = "sign flip"
        p, interval = stats.sign_flip(ours, theirs, row.level)
        spread = np.ptp(ours - theirs)
        is_constant = row.n > 1 and spread <= stats.ROUNDING * np.abs([ours, theirs]).max()
        # `between` says that values lie between evaluations: runs that were evaluated at the same moments can have
        # equal ends although they differ between these
        if is_constant and not row.between:
            constant = f"all {row.n} differences are {interval.estimate:.3g}"
            return replace(question, why_no_test=f"{constant}; nothing varied: nothing was measured")
    row.p = p
    row.estimate, row.low, row.high = interval[:3]
    row.direction = row.estimate
    if not (math.isnan(row.margin) or row.refused):
        level = 1 - 2 * row.alpha / row.family_size
        row.p_equal, inside = stats.equivalence(ours, theirs, row.margin, level)
        row.equal_low = inside.low
        row.equal_high = inside.high
        row.outside = int((np.abs(ours - theirs) >= row.margin).sum())
    return row


def _combine_ends(late: QuestionRow, early: QuestionRow) -> QuestionRow:
    """What two answers to one question have in common: the larger p, and the hull of their intervals."""
    tested = [row for row in (late, early) if not row.why_no_test]
    if not tested:
        return late
    # an end without a test shows nothing: its p is 1 and its direction 0
    p_ends = tuple(1.0 if row.why_no_test else row.p for row in (late, early))
    directions = {0.0 if row.why_no_test else np.sign(row.direction) for row in (late, early)}
    combined = replace(tested[0], p_ends=p_ends, p=max(p_ends) if len(directions) == 1 else 1.0)
    combined.low = min(row.low for row in tested)
    combined.high = max(row.high for row in tested)
    combined.equal_low = min(row.equal_low for row in tested)
    combined.equal_high = max(row.equal_high for row in tested)
    combined.outside = max(row.outside for row in tested)
    combined.estimate = float(np.mean([row.estimate for row in tested]))
    combined.direction = float(np.mean([row.direction for row in tested]))
    combined.p_equal = float(np.max([row.p_equal for row in tested]))  # nan where either is
    return combined


def speedup(ours: stats.Array, theirs: stats.Array, level: float = 0.95) -> tuple[stats.Interval, tuple[float, float]]:
    """The reference's times over the treatment's, as an interval and as the estimates at its two ends.

    A time is known only to lie between two evaluations, so `ours` and `theirs` (n x 2) hold the earliest and the latest
    time of each pair. The interval covers both extremes: the treatment late and the reference early, and the other way
    round. Its estimate is the ratio of the sums. Where an earliest time of the treatment is 0 seconds, the ratio has no
    upper end.
    """
    late = stats.sign_flip(ours[:, 1], theirs[:, 0], level, ratio=True)[1]
    middle = float(theirs.sum() / ours.sum())
    if ours[:, 0].min() <= 0:
        return late._replace(estimate=middle, high=math.inf), (late.estimate, math.inf)
    early = stats.sign_flip(ours[:, 0], theirs[:, 1], level, ratio=True)[1]
    return late._replace(estimate=middle, high=early.high), (late.estimate, early.estimate)


def why_margin_refused(margin: float, gained: float, reason: str) -> str:
    """Why a margin says nothing next to what the reference improved by; empty where it may be used."""
    if math.isnan(gained):
        return ""
    if gained <= 0:
        return f"the reference did not improve, so a margin of ±{margin:.3g} cannot be judged"
    share = f"the margin of ±{margin:.3g} is {100 * margin / gained:.0f} % of the reference's improvement"
    if margin > MAX_MARGIN_SHARE * gained:
        return f"{share}, too wide to mean anything"
    if margin > MAX_UNEXPLAINED_SHARE * gained and len(reason.split()) < MIN_REASON_WORDS:
        return f"{share}, and the plan gives no reason for it (margin_reasons)"
    return ""


def margin_in_words(row: Any, reference: str) -> str:
    """The margin as a share of the reference's improvement, and its reason; empty where no word rests on it.

    >>> losses = [0.1, -0.2, 0.3, -0.1, 0.2, -0.3, 0.1, -0.1]
    >>> question = question_of_numbers(losses, [0] * 8, margin=0.5, margin_reason="half a nat is little")
    >>> print(margin_in_words(*answer_family([question]), "sync"))
    the improvement of sync is not known, so the margin of ±0.5 is used as it stands: half a nat is little
    """
    if row.word not in ON_MARGIN:
        return ""
    because = f": {row.margin_reason}" if row.margin_reason else ""
    margin = f"the margin of ±{row.margin:g} is"
    if math.isnan(row.gained):
        return f"the improvement of {reference} is not known, so {margin} used as it stands{because}"
    return f"{margin} {100 * row.margin / row.gained:.2g} % of the improvement of {reference}{because}"


def word_of(row: QuestionRow) -> tuple[str, str]:
    """What was shown, and why that can be said.

    What the test finds in 80 % of studies is left out where no size of the row's own difference is enough:

    >>> both = [question_of_numbers([0.1, -0.2, 0.3, -0.1, 0.2, -0.3, *more], [0] * (6 + len(more)))
    ...         for more in ([0.1, -0.2], [])]
    >>> for row in answer_family(both):
    ...     print(row.word, row.reason)
    undecided p_Holm = 1; with 8 pairs this test finds a difference of 1.42 SD of the differences in 80 % of studies
    undecided p_Holm = 1
    """
    n = row.n
    alpha = row.alpha
    minimum = stats.minimum_pairs(1, alpha)
    has_enough_pairs = n >= minimum
    if row.is_not_comparable:
        return "not comparable", row.why_no_test
    if row.why_no_test and (has_enough_pairs or n == 0):  # without any pair the reason says more than their number
        return "undecided", row.why_no_test
    if not has_enough_pairs:
        reasons = [f"{n} of the {minimum} pairs that a verdict needs"]
        if n:
            reasons.append(f"the smallest p of {n} pair{'s' if n > 1 else ''} is {stats.smallest_p(n):.3g}")
        if row.why_no_test:
            reasons.append(row.why_no_test)
        return "too few seeds", "; ".join(reasons)
    differs = row.p_holm < alpha
    text = f"p_Holm = {row.p_holm:.3g}"
    more = f"; {row.refused}" if row.refused else ""
    if row.p_equal < alpha:
        inside = f"the difference is within ±{row.margin:.3g} (p_equal = {row.p_equal:.3g} < {alpha:g})"
        # where one test finds a difference and the interval of the other holds 0, the weaker claim is made
        if not differs or row.equal_low <= 0 <= row.equal_high:
            return "equivalent", f"{inside}; {text}"
        if not abs(row.estimate) > MAX_NEGLIGIBLE_SHARE * row.gained:  # true also where `gained` is not known, nan
            return "different but negligible", f"{text}, but {inside}"
        share = f"{100 * abs(row.estimate) / row.gained:.0f} % of the reference's improvement"
        more = f"; within the margin of ±{row.margin:.3g}, but {share}"
    if differs:
        is_lower = row.direction < 0
        found = "better" if is_lower == row.lower else "worse"
        return found, f"{text} < {alpha:g}, {'lower' if row.lower else 'higher'} is better{more}"
    if is_undecided_by_gaps(row):
        return "undecided", f"{row.between}; {text}{more}"
    hopeless = why_hopeless(row)
    if hopeless:
        return "undecided", f"{text}; {hopeless}{more}"
    if row.test == "sign flip":
        effect = stats.detectable_effect(n, alpha / row.family_size)
        # Holm's method may find what no difference of this row alone would be found by: then there is no such size
        if math.isfinite(effect):
            power = f"with {n} pairs this test finds a difference of {effect:.2f} SD of the differences"
            text = f"{text}; {power} in 80 % of studies"
    return "undecided", f"{text}{more}"


def is_undecided_by_gaps(row: Any) -> bool:
    """Of an undecided row: whether it is so because of what is not known between two evaluations."""
    if not row.p_ends:
        return False
    directions_differ = row.p > max(row.p_ends)  # then `_combine_ends` makes p 1
    one_end_differs = min(row.p_ends) < row.alpha / row.family_size
    return directions_differ or one_end_differs


def why_hopeless(row: Any) -> str:
    """Why so few pairs can show nothing in a family so large; empty where they can."""
    if row.least_p < row.alpha:
        return ""
    family = f" and {row.family_size} comparisons" if row.family_size > 1 else ""
    return f"no difference of any size can be found with {row.n} pairs{family}"
