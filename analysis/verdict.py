"""The headline: what the primary comparisons show, in sentences that a newspaper could print; numbers in small type.

A `row` is a row of `tests` as `itertuples` gives it, and has the fields of `answers.QuestionRow`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pandas import DataFrame

from analysis import stats
from analysis.answers import DECIDED, ON_MARGIN, is_undecided_by_gaps, margin_in_words, why_hopeless
from analysis.questions import BASELINE, TIMES, Plan, conditions, is_primary
from analysis.runs import rows_with
from asyncsgd.studies.config import words_of_score

NAMES = {"async": "asynchronous training", "sync": "synchronous training", "single": "training on one worker"}
"""Names of algorithms in words; any other is called what it is called."""
ENDPOINT_WORDS = {
    "time_to_target": "time to the target",
    "target_reached": "share of runs at the target",
    "loss_at_equal_samples": "loss at equal samples",
    "loss_at_equal_seconds": "loss at equal seconds",
    "numbers": "numbers",  # paired numbers that belong to no study
}
"""Endpoints in words; any other is a score after fine-tuning."""
DETAIL_KINDS = ("below", "batches")
"""The kinds of the notes that are details of a headline whatever its word is; `details` adds two further kinds."""
SIGN_FLIP_ASSUMPTION = (
    "tested: whether a difference and its opposite are equally likely; if a few runs of one arm can go far wrong, a "
    "mean can be worse although most seeds are better"
)
HOLM = "a p_Holm is the p value of a test, raised by Holm's method for the number of comparisons in its family"
T_TEST_ASSUMPTION = (
    "tested: whether the mean difference lies within the margin, by t tests, which take differences as normal"
)


def endpoint_in_words(endpoint: str) -> str:
    """An endpoint in words."""
    return ENDPOINT_WORDS.get(endpoint) or f"{words_of_score(endpoint)} after fine-tuning"


class Headline(NamedTuple):
    """The sentences on one comparison."""

    text: str
    details: tuple[str, ...]
    """Short sentences that a page shows in small type."""
    row: Any
    """The row of `tests` that it is about; None where nothing could be compared."""

    def __str__(self) -> str:
        return "\n  ".join((self.text, *self.details))


class Extras(NamedTuple):
    """What headlines say that is in no row of `tests`. The keys are (treatment, reference)."""

    remarks: Mapping[tuple[str, str], Sequence[str]]
    """Further sentences of a headline."""
    warnings: Mapping[tuple[str, str], str]
    """The sentence before all others."""
    details: Sequence[str]
    """Further details of every headline."""


def headlines(tests: DataFrame, arms: DataFrame, plan: Plan, extras: Extras) -> list[Headline]:
    """A headline for each comparison of the primary family; without one, for each comparison. Where they are of several
    groups each begins with its conditions.

    A comparison with the baseline or with a control arm never gets a headline of its own. One with a control arm is a
    line among the details of its treatment's headline.

    Args:
        tests: rows with the fields of `answers.QuestionRow`; docs/tables.md explains them.
        arms: as `questions.groups` gives them.
    """
    rows = tests[tests["reference"] != BASELINE]
    controls = set(arms.index[arms["algorithm"] == plan.registered.control])
    without_control = rows[~rows["reference"].isin(controls)]
    primary_arms = []
    for arm in arms.itertuples():
        if is_primary(plan, arm.workers, arm.clock) and plan.is_in_family(arm.Index):
            primary_arms.append(arm.Index)
    has_primary_endpoint = without_control["endpoint"] == plan.registered.primary.endpoint
    primary_rows = without_control[has_primary_endpoint & without_control["treatment"].isin(primary_arms)]
    if primary_rows.empty:
        primary_rows = without_control
    primary_rows = primary_rows.drop_duplicates(["treatment", "reference"])
    found = [_headline(row, rows, arms, controls, extras) for row in primary_rows.itertuples()]
    if primary_rows["group"].nunique() > 1:
        found = [headline._replace(text=f"{conditions_of(headline)} {headline.text}") for headline in found]
    return found


def conditions_of(headline: Headline) -> str:
    """The conditions of the arms of a headline, as a sentence."""
    return capital(f"{conditions(headline.row.group)}.")


def _headline(row: Any, rows: DataFrame, arms: DataFrame, controls: set[str], extras: Extras) -> Headline:
    arms_of_row = (row.treatment, row.reference)
    names = _names(row, arms)
    of_arms = rows_with(rows, treatment=row.treatment, reference=row.reference)
    shown = [row, *rows_with(of_arms, endpoint=_second_endpoint(row, of_arms)).itertuples()]
    sentences: list[str] = []
    lines: list[str] = []
    for shown_row in shown:
        text = sentence(shown_row, *names.values(), already_named=bool(sentences))
        # a secondary finding beside the registered one must not be taken for it
        if row.family != "exploratory" and shown_row.family != "primary" and shown_row.word in DECIDED:
            text = f"{text} ({shown_row.family})"
        sentences.append(text)
        lines += details(shown_row, names[row.reference])
    # A diverged run counts as worse than any loss, and its time as infinite. A single one can decide.
    diverged_runs = [note.about for note in row.notes if note.kind == "diverged"]
    sentences += [f"{how_many_runs} of {names[arm]} diverged" for arm, how_many_runs in diverged_runs]
    # a note (`runs.Note`) is a sentence, a str that has a kind
    notes = [note for shown_row in shown for note in shown_row.notes]
    sentences += [note for note in notes if note.kind == "risen"]
    sentences += extras.remarks.get(arms_of_row, ())
    for shown_row in shown:
        sentences += shown_row.caveats
    text = " ".join(_as_sentences(sentences))
    if row.family == "exploratory":
        text = f"Exploratory: {text}"
    if arms_of_row in extras.warnings:
        text = f"{extras.warnings[arms_of_row]} {text}"
    for against in rows_with(rows, treatment=row.treatment).itertuples():
        if against.reference in controls:
            lines.append(f"against {against.reference}, with equal batches: {numbers(against, against.reference)}")
    for shares in rows_with(of_arms, endpoint="target_reached").itertuples():
        if shares.word in DECIDED:
            lines.append(f"runs that reached the target, {shares.word}: exact McNemar test, {p_text(shares)}")
    lines += [note for note in notes if note.kind in DETAIL_KINDS]
    if any("p_Holm" in line for line in lines):
        lines.append(HOLM)
    lines += [shown_row.left_out for shown_row in shown if shown_row.left_out]
    lines += extras.details
    return Headline(text, tuple(_as_sentences(lines)), row)


def _as_sentences(texts: Sequence[str]) -> list[str]:
    """Texts with a capital and a full stop, each once."""
    return list(dict.fromkeys(f"{capital(text).rstrip('.')}." for text in texts))


def _names(row: Any, arms: DataFrame) -> dict[str, str]:
    """Arm -> its algorithm in words, or its own name where its group has two arms of one algorithm.

    The treatment comes first, then the reference.
    """
    group = arms[arms["group"] == arms.loc[row.treatment, "group"]]
    algorithms = list(group["algorithm"])
    names = {}
    for arm in (row.treatment, row.reference):
        algorithm = str(arms.loc[arm, "algorithm"])
        names[arm] = NAMES.get(algorithm, algorithm)
        if algorithms.count(algorithm) > 1:
            names[arm] = arm
    return names


def _second_endpoint(row: Any, of_arms: DataFrame) -> str:
    """The endpoint that is shown after a row's own: speed after a loss, and a loss after speed.

    The loss is that at equal seconds where the runs had a budget of seconds in common, else that at equal samples.
    """
    if row.endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds"):
        return "time_to_target"
    if of_arms["common"].any():
        return "loss_at_equal_seconds"
    return "loss_at_equal_samples"


def sentence(row: Any, ours: str, theirs: str, *, already_named: bool) -> str:
    """The sentence on one row.

    A sentence on a loss or a score leaves out the names of the arms if an earlier sentence has them. One on times, or
    on too few seeds, names both in any case.
    """
    what = endpoint_in_words(row.endpoint)
    whose = f"its {what}" if already_named else f"the {what} of {ours}"
    if row.word == "not comparable":
        return f"{whose} is not comparable with that of {theirs}: {row.reason}"
    if row.word == "too few seeds":  # the first of its reasons is the number of pairs (`answers.word_of`)
        return f"there are too few seeds for a verdict on {ours} against {theirs}: {row.reason.partition(';')[0]}"
    if row.endpoint == "time_to_target":
        return _time(row, ours, theirs)
    than = "" if already_named else f" than that of {theirs}"
    to = "" if already_named else f" to that of {theirs}"
    unit = f" {row.unit}" if row.unit == "nats" else ""
    if math.isnan(row.p):
        return f"nothing is shown about {whose}: {row.reason}"
    if row.word == "undecided":
        tail = f": {row.between}" if is_undecided_by_gaps(row) else _interval_tail(row, unit)
        return f"whether {whose} is better or worse{than} is undecided{tail}"
    if row.word == "equivalent":
        return f"{whose} is equivalent{to} within ±{row.margin:g}{unit}"
    if math.isnan(row.estimate):
        return f"{whose} is {row.word}{than}: {_ranked(row)}"
    size = number_format(row.estimate, row.low, row.high)(abs(row.estimate))
    much = f"{size}{unit} {'higher' if row.estimate > 0 else 'lower'}"
    if row.word in ON_MARGIN:
        is_worse = (row.estimate > 0) == row.lower  # `lower`: lower values are better
        side = "worse" if is_worse else "better"
        return f"{whose} is {side}{than} by less than the margin of {row.margin:g}{unit}: {much}"
    return f"{whose} is {row.word}{than}: {much} ({_num_pairs_with_word(row)} of {row.n} seeds)"


def _time(row: Any, ours: str, theirs: str) -> str:
    """Who reached the target sooner; where not every run reached it, how many did while all were watched."""
    unit = "seconds" if row.unit == "s" else "simulated seconds"
    whether = f"whether {ours} reaches the target sooner or later than {theirs} is undecided"
    everybody = row.reached == (row.n, row.n)
    if row.cut_short and row.word == "undecided":
        advice = f"give every run the same seconds={_round_up(row.longest)}"
        return f"{whether}, as times are counted only to where the first run that missed it ended: {advice}"
    both = f"{_reached(ours, 'the target', row, 0)} and {_reached(theirs, 'it', row, 1)}"
    # three digits as `:g` writes them: 1000, which `:.3g` alone would write as 1e+03
    counts = f"within {float(f'{row.budget:.3g}'):g} {unit}, {both}"
    if math.isnan(row.p):
        nothing = f"nothing is shown about the time to the target of {ours} and {theirs}: {row.reason}"
        if row.reached[0] == row.reached[1]:
            return nothing
        return f"{counts}. {capital(nothing)}"  # unequal counts are said although no test used them
    if row.word == "undecided" and is_undecided_by_gaps(row):
        return f"{whether}: {row.between}"
    if row.word == "undecided":
        if everybody:
            return f"{whether}{_interval_tail(row, f' {row.unit}')}"
        return f"{whether}. {capital(counts)}"
    if everybody and not math.isnan(row.ratio):
        much = _speedup_words(row, number_format(*_ratio_above_one(row), 1.0))
        return f"{ours} reached the target {much} than {theirs} ({_num_pairs_with_word(row)} of {row.n} seeds)"
    only_one_arm_reached_it = {*row.reached} == {0, row.n}
    if only_one_arm_reached_it:  # the counts already say which arm was sooner
        return counts
    return f"{ours} was {'sooner' if row.word == 'better' else 'later'} at the target than {theirs}. {capital(counts)}"


def _reached(name: str, what: str, row: Any, side: int) -> str:
    """How many runs of an arm, the treatment (side 0) or the reference (1), reached the target within the budget.

    >>> from types import SimpleNamespace as Row
    >>> _reached("async", "the target", Row(reached=(0, 8), later=(0, 0), n=8), 0)
    'async never reached the target (0 of 8 runs)'
    >>> _reached("sync", "it", Row(reached=(0, 6), later=(0, 2), n=8), 1)
    'sync reached it in 6 of 8 runs, 2 later'
    """
    within = row.reached[side]
    later = row.later[side]
    counts = f"{within} of {row.n} runs"
    if later:
        counts += f", {later} later"
    if within in (0, row.n):
        return f"{name} {'always' if within else 'never'} reached {what} ({counts})"
    return f"{name} reached {what} in {counts}"


def _ratio_above_one(row: Any) -> tuple[float, float, float]:
    """The ratio of times with its interval, or the inverse of these where the ratio is below 1."""
    if row.ratio >= 1:
        return row.ratio, row.ratio_low, row.ratio_high
    high = 1 / row.ratio_low if row.ratio_low > 0 else math.inf
    return 1 / row.ratio, 1 / row.ratio_high, high


def _speedup_words(row: Any, form: Callable[[float], str]) -> str:
    """How many times sooner or later the treatment is: a range where the evaluations leave it open.

    `ratio_ends` are the ratios of the times where the treatment is as late, and where it is as early, as the
    evaluations allow; above 1 it is sooner.

    >>> from types import SimpleNamespace as Row
    >>> form = "{:.1f}".format
    >>> [_speedup_words(Row(ratio=2.0, ratio_ends=ends), form) for ends in ((1.5, 2.5), (0.5, 2.5), (1.5, math.inf))]
    ['1.5 to 2.5× sooner', '2.0× later to 2.5× sooner', 'more than 1.5× sooner']
    >>> [_speedup_words(Row(ratio=2.0, ratio_ends=ends), form) for ends in ((0.5, math.inf), (0.0, math.inf))]
    ['2.0× later to any number of times sooner', 'sooner or later']
    >>> _speedup_words(Row(ratio=0.5, ratio_ends=(0.4, 0.5)), form)
    '2.0 to 2.5× later'
    """
    least, most = row.ratio_ends
    side = "sooner"
    other = "later"
    if row.ratio < 1:
        # the treatment is later: state by how much, with the ends of the inverse ratio
        inverse_of_most = 1 / most
        most = 1 / least if least > 0 else math.inf
        least = inverse_of_most
        side = "later"
        other = "sooner"
    if math.isinf(most) and least < 1:  # no upper end, and the lower one is on the other side
        return f"{form(1 / least)}{TIMES} {other} to any number of times {side}" if least > 0 else f"{side} or {other}"
    if math.isinf(most):
        return f"more than {form(least)}{TIMES} {side}"
    if least < 1:
        return f"{form(1 / least)}{TIMES} {other} to {form(most)}{TIMES} {side}"
    numbers_once = dict.fromkeys((form(least), form(most)))  # one number where both are written alike
    return f"{' to '.join(numbers_once)}{TIMES} {side}"


def _interval_tail(row: Any, unit: str) -> str:
    """The end of a sentence on an undecided row: whether so few seeds can show anything, the estimate, its interval."""
    hopeless = ", and so few seeds cannot show it" if why_hopeless(row) else ""
    if math.isnan(row.estimate) or math.isnan(row.low):
        return hopeless
    form = number_format(row.estimate, row.low, row.high)
    middle, low, high = (form(value, sign=True) for value in (row.estimate, row.low, row.high))
    return f"{hopeless} ({middle}{unit}, {_ci_label(row)} {low} to {high})"


def _ranked(row: Any) -> str:
    """In how many pairs the loss or the score is higher or lower, and in how many of them a run had diverged.

    In the text "the run" is that of the treatment, whose loss the sentence is about, and "the other run" that of the
    reference. `row.diverged` has the pairs in which the treatment's run alone diverged, and those in which the
    reference's alone did.
    """
    num_worse = row.n - row.wins - row.ties
    is_worse = row.word == "worse" or (row.word != "better" and num_worse >= row.wins)
    number = row.wins
    num_diverged = row.diverged[1]
    whose = "the other run"
    if is_worse:
        number = num_worse
        num_diverged = row.diverged[0]
        whose = "the run"
    lower_is_better = row.lower
    side = "higher" if is_worse == lower_is_better else "lower"
    count = f"{side} in {number} of {row.n} seeds"
    if not num_diverged:
        return count
    share = "all" if 1 < num_diverged == number else f"{num_diverged}"
    happened = "had no score" if any(note.kind == "undefined" for note in row.notes) else "diverged"
    return f"{count}, {share} of them because {whose} {happened}"


def details(row: Any, reference: str) -> list[str]:
    """The numbers behind a sentence, what limits them, and the share of all seeds that may go the other way."""
    if math.isnan(row.p):
        return []
    lines = [numbers(row, reference)]
    if row.word == "too few seeds":
        return [f"so far, without a verdict ({row.reason}): {lines[0]}"]
    what = endpoint_in_words(row.endpoint)
    lines += [note for note in row.notes if note.kind == "corrected"]
    if row.endpoint == "time_to_target" and row.reached != (row.n, row.n):
        lines += [note for note in row.notes if note.kind == "budget"]
    if row.refused:
        lines.append(row.refused)
    level = 1 - row.alpha  # of the share of seeds: it describes this comparison and is no test of the family
    if row.word in ON_MARGIN:
        lines.append(margin_in_words(row, reference))
        lines += [f"{what}: {_seeds_against(int(row.outside), row.n, 'outside the margin', level)}", T_TEST_ASSUMPTION]
    elif row.word in ("better", "worse"):
        other = "worse" if row.word == "better" else "better"
        num_against = row.n - _num_pairs_with_word(row) - row.ties
        if row.p_ends and row.ties:  # where values lie between evaluations a tie may be a pair on the other side
            other = f"{other}, or may have been"
            num_against += row.ties
        lines += [f"{what}: {_seeds_against(num_against, row.n, other, level)}", SIGN_FLIP_ASSUMPTION]
    elif why_hopeless(row):
        lines.append(why_hopeless(row))
    return lines


def _seeds_against(count: int, n: int, what: str, level: float) -> str:
    """How many of n seeds were, for example, worse, and an upper confidence bound on that share of all seeds."""
    most = f"with {100 * level:g} % confidence at most {100 * stats.most_of(count, n, level):.0f} % of seeds are"
    return f"{count} of {n} seeds {'was' if count == 1 else 'were'} {what}, and {most}"


def numbers(row: Any, reference: str) -> str:
    """Estimate, interval and p value.

    >>> from types import SimpleNamespace as Row
    >>> tie = Row(endpoint="loss_at_equal_samples", p=math.nan, test="signed rank", reason="every pair is a tie")
    >>> numbers(tie, "sync")
    'loss at equal samples: every pair is a tie'

    The interval of an equivalent row is that of its equivalence test, also where the sign-flip test has none:

    >>> from analysis.answers import answer_family, question_of_numbers
    >>> ours = [0.012, -0.023, 0.031, -0.014, 0.025, -0.017]
    >>> rows = answer_family([question_of_numbers(ours, [0] * 6, margin=0.1) for _ in range(2)])
    >>> rows[0].word, rows[0].low
    ('equivalent', nan)
    >>> numbers(rows[0], "b")
    'numbers: 0.002 higher than b (95 % CI -0.022 to +0.027, better in 3 of 6 seeds, p_Holm 1)'
    """
    what = endpoint_in_words(row.endpoint)
    if math.isnan(row.p):
        return f"{what}: {row.reason}"
    if row.test == "signed rank":
        return f"{what}: {_ranked(row)} (signed-rank test, {p_text(row)})"
    won = f"better in {row.wins} of {row.n} seeds, {p_text(row)}"
    if row.endpoint == "time_to_target" and row.reached == (row.n, row.n) and not math.isnan(row.ratio):
        _, low, high = _ratio_above_one(row)
        interval = f"{_ci_label(row)} {low:.2f} to {high:.2f}"
        if math.isinf(high):
            interval = f"{_ci_label(row)} {low:.2f} or more"
        if math.isnan(low):
            interval = f"no {_ci_label(row)}"
        return f"{what}: {_speedup_words(row, '{:.2f}'.format)} than {reference} ({interval}, {won})"
    ends = (row.low, row.high)
    label = _ci_label(row)
    if row.word in ON_MARGIN:
        ends = (row.equal_low, row.equal_high)
        label = _ci_label(row, alphas_outside=2)
    form = number_format(row.estimate, *ends)
    interval = f"{label} {form(ends[0], sign=True)} to {form(ends[1], sign=True)}"
    if math.isnan(ends[0]):
        interval = f"no {label}"
    side = "higher" if row.estimate > 0 else "lower"
    unit = f" {row.unit}" if row.unit in ("nats", "s", "virtual s") else ""
    if row.endpoint == "time_to_target":
        what += f", counted up to {row.budget:.4g} {row.unit}"
    return f"{what}: {form(abs(row.estimate))}{unit} {side} than {reference} ({interval}, {won})"


def p_text(row: Any) -> str:
    """The adjusted p value."""
    return f"p_Holm {row.p_holm:.2g}"


def _ci_label(row: Any, alphas_outside: int = 1) -> str:
    """The level of a row's interval, corrected by Bonferroni's method: 1 - alpha / m in a family of m comparisons.

    The interval of the equivalence test, which is two one-sided tests, leaves out alpha / m on each side: 2 alphas.
    """
    return f"{100 * (1 - alphas_outside * row.alpha / row.family_size):.3g} % CI"


def _num_pairs_with_word(row: Any) -> int:
    """The pairs that are better where the row's word is better; with any other word, those that are worse."""
    return int(row.wins if row.word == "better" else row.n - row.wins - row.ties)


def number_format(estimate: float, low: float, high: float, null: float = 0.0) -> Callable[..., str]:
    """A function that writes a number down to the second digit of the width of its interval, with at most three digits.

    Where the interval excludes `null` there are so many digits that no end is rounded to it.

    >>> number_format(2.36, 1.8, 3.1)(2.36), number_format(0.053, 0.002, 0.104)(0.053)
    ('2.4', '0.053')
    >>> number_format(-0.8, -0.82, -0.77)(0.8)
    '0.800'
    """
    width = high - low
    size = max(abs(end) for end in (low, estimate, high))
    if not 0 < width < math.inf or not size < math.inf:
        return lambda value, sign=False: f"{value:{'+' if sign else ''}.3g}"
    places = max(0, min(1 - math.floor(math.log10(width)), 2 - math.floor(math.log10(size))))
    if not low <= null <= high:
        while places < 12 and any(round(value, places) == null for value in (low, estimate, high)):
            places += 1
    return lambda value, sign=False: f"{value:{'+' if sign else ''}.{places}f}"


def _round_up(seconds: float) -> str:
    """Seconds, rounded up to two digits, of which the second is 0 or 5 from 40 on; N where they are not known.

    >>> _round_up(441.3), _round_up(0.537)
    ('450', '0.55')
    """
    if not 0 < seconds < math.inf:
        return "N"
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    step = 5 * unit if seconds / unit > 40 else unit
    return f"{math.ceil(seconds / step - 1e-9) * step:g}"  # 1e-9: seconds that are a multiple already stay so


def capital(text: str) -> str:
    """The text with a capital at its beginning.

    >>> capital("a word")
    'A word'
    """
    return text[:1].upper() + text[1:]
