"""The headline: what the first comparisons show, in sentences that a newspaper could print; numbers in small type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from analysis import stats
from analysis.answers import DECIDED, ON_MARGIN, is_undecided_by_gaps, margin_in_words, why_hopeless
from analysis.questions import BASELINE, TIMES, Plan, is_primary
from analysis.runs import rows_with
from asyncsgd.studies.config import words_of_score

NAMES = {"async": "asynchronous training", "sync": "synchronous training", "single": "training on one worker"}
"""Names of algorithms in words; any other is called what it is called."""
WHAT = {
    "time_to_target": "time to the target",
    "target_reached": "share of runs at the target",
    "loss_at_equal_samples": "loss at equal samples",
    "loss_at_equal_seconds": "loss at equal seconds",
    "numbers": "numbers",
}
"""Endpoints in words; any other is a score after fine-tuning."""
IN_SMALL_TYPE = ("below", "batches")
"""The kinds of the notes that stand below a sentence."""
ASSUMED = (
    "tested: whether a difference and its opposite are equally likely; if a few runs of one arm can go far wrong, a "
    "mean can be worse although most seeds are better"
)
HOLM = "a p_Holm is the p value of a test, raised by Holm's method for the number of comparisons in its family"
NORMAL = "tested: whether the mean difference lies within the margin, by t tests, which take differences as normal"


def endpoint_in_words(endpoint: str) -> str:
    """An endpoint in words."""
    return WHAT.get(endpoint) or f"{words_of_score(endpoint)} after fine-tuning"


class Headline(NamedTuple):
    """What is said at the top of one comparison."""

    text: str
    details: tuple[str, ...]
    """Short sentences for small type."""
    row: Any
    """Of `tests`; None where nothing could be compared."""

    def __str__(self) -> str:
        return "\n  ".join((self.text, *self.details))


def headlines(
    tests: DataFrame,
    arms: DataFrame,
    plan: Plan,
    remarks: Mapping[str, Sequence[str]],
    small: Sequence[str],
    warnings: Mapping[str, str],
) -> list[Headline]:
    """One for each comparison of the primary family; without one, for each comparison.

    Args:
        arms: of `questions.groups`.
        remarks: further sentences, by the treatment and reference that they are about, with a space between.
        small: further lines of small type.
        warnings: what is said before anything else, by the same key as `remarks`.
    """
    rows = tests[~tests["reference"].eq(BASELINE)]
    control = plan.registered.control
    controls = set(arms.index[arms["algorithm"] == control]) if control else set()
    own = rows[~rows["reference"].isin(controls)]
    registered = np.array([_registered(one, arms, plan) for one in own.itertuples()], bool)
    first = own[own["endpoint"].eq(plan.registered.primary.endpoint) & registered]
    first = (first if len(first) else own).drop_duplicates(["treatment", "reference"])
    return [_headline(row, rows, arms, controls, remarks, small, warnings) for row in first.itertuples()]


def _registered(row: Any, arms: DataFrame, plan: Plan) -> bool:
    arm = arms.loc[row.treatment]
    return is_primary(plan, arm["workers"], arm["clock"]) and plan.is_in_family(row.treatment)


def _headline(
    row: Any,
    rows: DataFrame,
    arms: DataFrame,
    controls: set[str],
    remarks: Mapping[str, Sequence[str]],
    small: Sequence[str],
    warnings: Mapping[str, str],
) -> Headline:
    about = f"{row.treatment} {row.reference}"
    own = rows_with(rows, treatment=row.treatment, reference=row.reference)
    named = _names(row, arms)
    told = [row, *own[own["endpoint"] == _beside(row, own)].itertuples()]
    sentences: list[str] = []
    for one in told:
        text = sentence(one, *named, named=named[0] in " ".join(sentences))
        if row.family != "exploratory" and one.family != "primary" and one.word in DECIDED:
            text = f"{text} ({one.family})"
        sentences.append(text)
    by_arm = dict(zip((row.treatment, row.reference), named, strict=True))
    # a diverged run counts as worse than any loss, and an infinite time: one of them can make the difference
    lost = [note.about for note in row.notes if note.kind == "diverged"]
    sentences += [f"{count} of {by_arm[arm]} diverged" for arm, count in lost]
    sentences += [note for one in told for note in one.notes if note.kind == "risen"]
    sentences += remarks.get(about, ())
    sentences += [caveat for one in told for caveat in one.caveats]
    text = " ".join(dict.fromkeys(f"{capital(one).rstrip('.')}." for one in sentences))
    if row.family == "exploratory":
        text = f"Exploratory: {text}"
    if about in warnings:
        text = f"{warnings[about]} {text}"
    lines = [line for one in told for line in details(one, named[1])]
    beside = rows[(rows["treatment"] == row.treatment) & rows["reference"].isin(controls)]
    for one in beside.itertuples():
        lines += [f"against {one.reference}, with equal batches: {numbers(one, one.reference)}"]
    reached = own[(own["endpoint"] == "target_reached") & own["word"].isin(DECIDED)]
    mcnemar = "exact McNemar test"
    lines += [f"runs that reached the target, {one.word}: {mcnemar}, {p_text(one)}" for one in reached.itertuples()]
    lines += [note for one in told for note in one.notes if note.kind in IN_SMALL_TYPE]
    if any("p_Holm" in line for line in lines):
        lines.append(HOLM)
    lines += [one.left_out for one in told if one.left_out] + list(small)
    return Headline(text, tuple(dict.fromkeys(f"{capital(line).rstrip('.')}." for line in lines)), row)


def _names(row: Any, arms: DataFrame) -> tuple[str, str]:
    """The algorithms of both arms in words, or the arms' names where their group has two arms of one algorithm."""
    group = arms[arms["group"] == arms.loc[row.treatment, "group"]]
    twice = group["algorithm"][group["algorithm"].duplicated()].unique()
    algorithms = {arm: str(arms.loc[arm, "algorithm"]) for arm in (row.treatment, row.reference)}
    ours, theirs = (arm if own in twice else NAMES.get(own, own) for arm, own in algorithms.items())
    return ours, theirs


def _beside(row: Any, own: DataFrame) -> str:
    """The endpoint that is shown beside a row's own: speed beside a loss, and a loss beside speed.

    The loss is that at equal seconds where the runs had a budget of seconds in common, else that at equal samples.
    """
    if row.endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds"):
        return "time_to_target"
    return "loss_at_equal_seconds" if own["common"].any() else "loss_at_equal_samples"


def sentence(row: Any, ours: str, theirs: str, *, named: bool = False) -> str:
    """What one row shows; without the names of the arms where a sentence before has `named` them."""
    what = endpoint_in_words(row.endpoint)
    whose = f"its {what}" if named else f"the {what} of {ours}"
    if row.word == "not comparable":
        return f"{whose} is not comparable with that of {theirs}: {row.reason}"
    if row.word == "too few seeds":
        return f"there are too few seeds for a verdict on {ours} against {theirs}: {row.reason.partition(';')[0]}"
    if row.endpoint == "time_to_target":
        return _time(row, ours, theirs)
    than, to = ("", "") if named else (f" than that of {theirs}", f" to that of {theirs}")
    unit = f" {row.unit}" if row.unit == "nats" else ""
    if row.p != row.p:
        return f"nothing is shown about {whose}: {row.reason}"
    if row.word == "undecided":
        told = f": {row.between}" if is_undecided_by_gaps(row) else _so_far(row, unit)
        return f"whether {whose} is better or worse{than} is undecided{told}"
    if row.word == "equivalent":
        return f"{whose} is equivalent{to} within ±{row.margin:g}{unit}"
    if row.estimate != row.estimate:
        return f"{whose} is {row.word}{than}: {_ranked(row)}"
    much = f"{supported(row.estimate, row.low, row.high)}{unit} {'higher' if row.estimate > 0 else 'lower'}"
    if row.word in ON_MARGIN:
        side = "worse" if (row.estimate > 0) == row.lower else "better"
        return f"{whose} is {side}{than} by less than the margin of {row.margin:g}{unit}: {much}"
    return f"{whose} is {row.word}{than}: {much} ({_alike(row)} of {row.n} seeds)"


def _time(row: Any, ours: str, theirs: str) -> str:
    """Who was sooner; where not every run got there, how many did while all were watched."""
    unit = "seconds" if row.unit == "s" else "simulated seconds"
    whether = f"whether {ours} reaches the target sooner or later than {theirs} is undecided"
    everybody = row.reached == (row.n, row.n)
    if row.cut_short and row.word == "undecided":
        advice = f"give every run the same seconds={_round_up(row.longest)}"
        return f"{whether}, as the faster arm's budget ended first: {advice}"
    both = f"{_reached(ours, 'the target', row, 0)} and {_reached(theirs, 'it', row, 1)}"
    counts = f"within {float(f'{row.budget:.3g}'):g} {unit}, {both}"
    if row.p != row.p:
        nothing = f"nothing is shown about the time to the target of {ours} and {theirs}: {row.reason}"
        return nothing if row.reached[0] == row.reached[1] else f"{counts}. {capital(nothing)}"
    if row.word == "undecided" and is_undecided_by_gaps(row):
        return f"{whether}: {row.between}"
    if row.word == "undecided":
        return f"{whether}{_so_far(row, f' {row.unit}')}" if everybody else f"{whether}. {capital(counts)}"
    sooner = row.word == "better"
    if everybody and row.ratio == row.ratio:
        much = _size(row, digits(*_sooner(row), 1.0))
        return f"{ours} reached the target {much} than {theirs} ({_alike(row)} of {row.n} seeds)"
    only_one_arm_reached_it = {*row.reached} == {0, row.n}
    if only_one_arm_reached_it:  # the counts already say which arm was sooner
        return counts
    return f"{ours} was {'sooner' if sooner else 'later'} at the target than {theirs}. {capital(counts)}"


def _reached(name: str, what: str, row: Any, side: int) -> str:
    """
    >>> from types import SimpleNamespace as Row
    >>> _reached("async", "the target", Row(reached=(0, 8), later=(0, 0), n=8), 0)
    'async never reached the target (0 of 8 runs)'
    >>> _reached("sync", "it", Row(reached=(0, 6), later=(0, 2), n=8), 1)
    'sync reached it in 6 of 8 runs, 2 later'
    """
    within = row.reached[side]
    later = row.later[side]
    told = f"{within} of {row.n} runs"
    if later:
        told += f", {later} later"
    if within in (0, row.n):
        return f"{name} {'always' if within else 'never'} reached {what} ({told})"
    return f"{name} reached {what} in {told}"


def _sooner(row: Any) -> tuple[float, float, float]:
    """`row.ratio` with its interval, above 1 either way."""
    if row.ratio >= 1:
        return row.ratio, row.ratio_low, row.ratio_high
    return 1 / row.ratio, 1 / row.ratio_high, 1 / row.ratio_low if row.ratio_low > 0 else math.inf


def _size(row: Any, form: Callable[[float], str]) -> str:
    """How many times sooner or later the treatment is: a range where the evaluations leave it open."""
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
    if math.isinf(most) and least < 1:
        return f"at most {form(1 / least)}{TIMES} {other}" if least > 0 else f"{side} or {other}"
    if math.isinf(most):
        return f"more than {form(least)}{TIMES} {side}"
    if least < 1:
        return f"{form(1 / least)}{TIMES} {other} to {form(most)}{TIMES} {side}"
    return f"{' to '.join(dict.fromkeys((form(least), form(most))))}{TIMES} {side}"


def _so_far(row: Any, unit: str) -> str:
    """The estimate of an undecided row with its interval, and whether so few seeds could have shown anything."""
    told = ", and so few seeds cannot show it" if why_hopeless(row) else ""
    if row.estimate != row.estimate or row.low != row.low:
        return told
    form = digits(row.estimate, row.low, row.high)
    middle, low, high = (form(value, sign=True) for value in (row.estimate, row.low, row.high))
    return f"{told} ({middle}{unit}, {_level(row)} {low} to {high})"


def _ranked(row: Any) -> str:
    """In how many pairs the loss or the score is higher or lower, and in how many of them a run had diverged."""
    num_worse = row.n - row.wins - row.ties
    worse = num_worse >= row.wins if row.word not in ("better", "worse") else row.word == "worse"
    number, diverged = (num_worse, row.diverged[0]) if worse else (row.wins, row.diverged[1])
    side = "higher" if worse == row.lower else "lower"
    share = "all" if 1 < diverged == number else f"{diverged}"
    whose = "the run" if worse else "the other run"
    happened = "had no score" if any(note.kind == "undefined" for note in row.notes) else "diverged"
    told = f"{side} in {number} of {row.n} seeds"
    return f"{told}, {share} of them because {whose} {happened}" if diverged else told


def details(row: Any, reference: str) -> list[str]:
    """The numbers behind a sentence, and how far they reach."""
    if row.p != row.p and row.word != "too few seeds":
        return []
    lines = [numbers(row, reference)]
    what = endpoint_in_words(row.endpoint)
    if row.word == "too few seeds":
        return [f"so far, without a verdict ({row.reason}): {lines[0]}"] if row.n and row.p == row.p else []
    lines += [note for note in row.notes if note.kind == "corrected"]
    if row.endpoint == "time_to_target" and row.reached != (row.n, row.n):
        ended = "the budget of every run" if row.common else "where the first run that missed it ended"
        lines.append(f"{row.budget:.4g} {row.unit} is {ended}")
    if row.refused:
        lines.append(row.refused)
    level = 1 - row.alpha
    if row.word in ON_MARGIN:
        lines += filter(None, [margin_in_words(row, reference)])
        lines += [f"{what}: {_others(int(row.outside), row.n, 'outside the margin', level)}", NORMAL]
    elif row.word in ("better", "worse"):
        other = "worse" if row.word == "better" else "better"
        # the pairs that are not on the side of the verdict; a tie may be one where the evaluations leave it open
        against = row.n - _alike(row)
        if row.p_ends and row.ties:
            other = f"{other}, or may have been"
        else:
            against -= row.ties
        lines += [f"{what}: {_others(against, row.n, other, level)}", ASSUMED]
    elif hopeless := why_hopeless(row):
        lines.append(hopeless)
    return lines


def _others(count: int, n: int, what: str, level: float) -> str:
    most = f"with {100 * level:g} % confidence at most {100 * stats.most_of(count, n, level):.0f} % of seeds are"
    return f"{count} of {n} seeds {'was' if count == 1 else 'were'} {what}, and {most}"


def numbers(row: Any, reference: str) -> str:
    """Estimate, interval and p value."""
    what = endpoint_in_words(row.endpoint)
    if row.diverged != (0, 0) or row.test == "signed rank":
        return f"{what}: {_ranked(row)} (signed-rank test, {p_text(row)})"
    if row.p != row.p:
        return f"{what}: {row.reason}"
    won = f"better in {row.wins} of {row.n} seeds, {p_text(row)}"
    if row.endpoint == "time_to_target" and row.reached == (row.n, row.n) and row.ratio == row.ratio:
        _, low, high = _sooner(row)
        ends = f"{low:.2f} or more" if math.isinf(high) else f"{low:.2f} to {high:.2f}"
        there = f"{_level(row)} {ends}" if low == low else f"no {_level(row)}"
        return f"{what}: {_size(row, '{:.2f}'.format)} than {reference} ({there}, {won})"
    form = digits(row.estimate, row.low, row.high)
    ends_of = (row.equal_low, row.equal_high) if row.word in ON_MARGIN else (row.low, row.high)
    level = f"{100 * (1 - 2 * row.alpha / row.family_size):.3g} % CI" if row.word in ON_MARGIN else _level(row)
    side = "higher" if row.estimate > 0 else "lower"
    unit = f" {row.unit}" if row.unit in ("nats", "s", "virtual s") else ""
    ends = " to ".join(form(end, sign=True) for end in ends_of)
    there = f"{level} {ends}" if row.low == row.low else f"no {level}"
    if row.endpoint == "time_to_target":
        what += f", counted up to {row.budget:.4g} {row.unit}"
    return f"{what}: {form(abs(row.estimate))}{unit} {side} than {reference} ({there}, {won})"


def p_text(row: Any) -> str:
    """The adjusted p value."""
    return f"p_Holm {row.p_holm:.2g}"


def _level(row: Any) -> str:
    return f"{100 * (1 - row.alpha / row.family_size):.3g} % CI"


def _alike(row: Any) -> int:
    """The pairs that are better where the row is better, or worse where it is worse."""
    return int(row.wins if row.word == "better" else row.n - row.wins - row.ties)


def supported(estimate: float, low: float, high: float) -> str:
    """The size of a number with one digit more than its interval supports.

    >>> supported(2.36, 1.8, 3.1), supported(0.053, 0.002, 0.104), supported(-0.8, -0.82, -0.77)
    ('2.4', '0.053', '0.800')
    """
    return digits(estimate, low, high)(abs(estimate))


def digits(estimate: float, low: float, high: float, null: float = 0.0) -> Callable[..., str]:
    """How to write a number with the digits of its interval, never rounded onto the `null` that this leaves out."""
    width = high - low
    size = max(abs(end) for end in (low, estimate, high))
    if not 0 < width < math.inf or not size < math.inf:
        return lambda value, sign=False: f"{value:{'+' * sign}.3g}"
    places = max(0, min(1 - math.floor(math.log10(width)), 2 - math.floor(math.log10(size))))
    if not low <= null <= high:
        while places < 12 and any(round(value, places) == null for value in (low, estimate, high)):
            places += 1
    return lambda value, sign=False: f"{value:{'+' * sign}.{places}f}"


def _round_up(seconds: float) -> str:
    """
    >>> _round_up(441.3), _round_up(0.537)
    ('450', '0.55')
    """
    if not 0 < seconds < math.inf:
        return "N"
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    step = 5 * unit if seconds / unit > 40 else unit
    return f"{math.ceil(seconds / step - 1e-9) * step:g}"


def capital(text: str) -> str:
    """
    >>> capital("a word")
    'A word'
    """
    return text[:1].upper() + text[1:]
