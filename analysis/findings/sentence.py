"""What the eye meets first: the verdict in words per primary comparison."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.findings.comparisons import FROM_SCRATCH, UNEQUAL_BATCHES, Comparison, Pair
from analysis.findings.groups import Group, is_registered, reference_algorithm
from analysis.findings.judging import (
    DECIDED,
    FOUND_AFTER_OTHERS,
    NOT_COMPARABLE,
    RESTS_ON_MARGIN,
    SHOWN_AFTER_OTHERS,
    RestrictedTimes,
    TestRow,
)
from analysis.findings.times import Sensitivity, SensitivityPoint
from analysis.findings.tuning import TuningResult
from analysis.statistics.intervals import Interval, percent, short
from analysis.statistics.verdict import nothing_to_find
from analysis.statistics.wins import most_of
from analysis.study.curves import curve_of
from analysis.study.run import Run, labels
from analysis.study.types import MEASURED, Study
from asyncsgd.study.finetuning import SCORES
from asyncsgd.study.plan import BASELINE


@dataclasses.dataclass(frozen=True)
class Headline:
    """What is said at the top of one primary comparison (or, without a pre-registration, of one comparison)."""

    text: str
    """The verdict in a few sentences that a newspaper could print."""
    treatment: str
    reference: str
    group: str
    word: str
    """Verdict of the primary endpoint."""
    exploratory: bool
    details: tuple[str, ...] = ()
    """Short sentences for small type: intervals, p values, margins, and what else limits the text."""


TIMES = "\N{MULTIPLICATION SIGN}"

LARGE_SPREAD = 1.25
"""Two targets disagree where the larger of their speed-ups is so many times the smaller."""
SMALL_RATIO = 0.05
"""A speed-up that is only known to be at least so much (its logarithm) is not told."""

_LOSS_WORDS = {
    "loss_at_equal_samples": "final loss",
    "loss_at_equal_seconds": "loss at equal seconds",
    **{metric: f"{words} after fine-tuning" for metric, words in SCORES.items()},
}

_SMALL_WORDS = _LOSS_WORDS | {"time_to_target": "time to the target", "loss_at_equal_samples": "loss at equal samples"}
"""What small type calls an endpoint."""

_COMPARED_AT = "compared at "
"""How the note begins that says that losses are not those at the end of every run."""

_MARKS = (UNEQUAL_BATCHES, FROM_SCRATCH, "some runs start", "target ", "a diverged run", _COMPARED_AT)
"""How the notes begin that stand in small type below a sentence."""

_ALGORITHMS = {"async": "asynchronous training", "sync": "synchronous training", "single": "training on one worker"}
"""Names of algorithms in words; any other is called what it is called."""


SLOW_WORKER = re.compile(r"slow:(?:worker=\d+,)?factor=(\d+(?:\.\d+)?)")
"""``--speeds`` that slow one worker down. Their own parser lives where torch is imported."""


def conditions(group: Group) -> str:
    """Under which conditions the arms of a group were run, in words.

    The batch size and other settings are named where the group's name has them, because other groups have others.
    """
    count = "unknown workers" if group.num_workers is None else f"{group.num_workers} workers"
    count = "1 worker" if group.num_workers == 1 else count
    slow = SLOW_WORKER.fullmatch(group.speeds or "") if (group.num_workers or 0) > 1 else None
    parts = [f"one of {count} {float(slow[1]):g}{TIMES} slower" if slow else count]
    parts.append("measured" if group.clock == MEASURED else "simulated")
    parts += [f"speeds {group.speeds}"] * (bool(group.speeds) and not slow)
    parts += [f"batches of {group.batch_size}"] * (f", batch {group.batch_size}" in group.name)
    return ", ".join([*parts, *(f"{key} {value}" for key, value in group.variant)])


def supported(interval: Interval, null: float = 0.0, further: int = 0) -> Callable[[float], str]:
    """How to write a number so that it has the digits that `interval` supports, and three of them at most.

    The last digit is the largest power of ten that is no wider than the interval. It is a smaller one where the
    estimate would be rounded out of the interval, or a number onto `null` that the interval leaves out.

    Args:
        further: more digits, for small type.

    >>> ratio = Interval(1.68, 1.56, 1.78, 0.95, 8)
    >>> supported(ratio, null=1.0)(1.68), supported(ratio, null=1.0, further=1)(1.784)
    ('1.7', '1.78')
    >>> supported(Interval(0.25, 0.00133, 0.992, 0.95, 8), further=1)(0.00133)
    '0.001'
    """
    low, high = interval.ends
    if not 0 < high - low < math.inf:
        return short
    size = max(abs(end) for end in (low, interval.estimate, high))
    most = 2 - math.floor(math.log10(size))
    places = min(-math.floor(math.log10(high - low)), most) + further
    ends = (low, interval.estimate, high) if further else (interval.estimate,)
    for finer in range(max(0, places), 12):
        kept = low <= null <= high or all(round(end, finer) != null for end in ends)
        if kept and (finer >= most or low <= round(interval.estimate, finer) <= high):
            return lambda value: f"{value:.{finer}f}"
    return short


def _short_names(study: Study, groups: Sequence[Group]) -> dict[str, str]:
    """The algorithm of every arm, or its whole name where a group has two arms of one algorithm."""
    names = {arm.name: arm.algorithm for arm in study.arms}
    for group in groups:
        twice = Counter(study.arm(name).algorithm for name in group.arms)
        names |= {name: name for name in group.arms if twice[study.arm(name).algorithm] > 1}
    return names


def headlines_of(
    study: Study,
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    tests: Sequence[TestRow],
    tuning: Sequence[TuningResult] = (),
    sensitivity: Sequence[Sensitivity] = (),
) -> tuple[Headline, ...]:
    """One per primary comparison; without a registered one, per comparison; never none.

    A registered comparison that is exploratory, because runs of it were lost, has its headline beside the others.
    """
    registration = study.registration
    primary = []
    if registration is not None:
        primary = [row for row in tests if row.endpoint == registration.endpoint and row.reference != BASELINE]
        named = {
            (one.treatment.name, one.reference.name)
            for one in comparisons
            if one.group.primary and not one.control and is_registered(registration, one.treatment.name, one.group)
        }
        primary = [row for row in primary if _arms(row) in named] or primary
    if not primary:
        compared = list(dict.fromkeys((row.treatment, row.reference) for row in tests if row.reference != BASELINE))
        for pair in compared:
            own = [row for row in tests if (row.treatment, row.reference) == pair]
            primary.append(own[0])
    if not primary or not any(run.usable for run in study.of("test")):
        return (_no_headline(study, comparisons),)
    names = _short_names(study, groups)
    found = []
    for row in primary:
        by_endpoint: dict[str, TestRow] = {row.endpoint: row}
        for other in tests:
            if _arms(other) == _arms(row):
                by_endpoint.setdefault(other.endpoint, other)
        controls = {one.reference.name for one in comparisons if one.control and one.treatment.name == row.treatment}
        beside = [other for other in tests if other.treatment == row.treatment and other.reference in controls]
        pairs = [one.pairs for one in comparisons if (one.treatment.name, one.reference.name) == _arms(row)]
        told = [*_sentences(row, by_endpoint, names), *_diverged(row, pairs[0] if pairs else (), names)]
        told += _other_targets(row, by_endpoint, sensitivity)
        told += [
            f"The learning rate of {result.arm} lies at the edge of its grid, so a better one may lie beyond."
            for result in tuning
            if result.at_edge and result.arm in _arms(row)
        ]
        told += [caveat for one in _told_of(row, by_endpoint) for caveat in one.caveats]
        text = " ".join(["Exploratory:"] * (row.family == "exploratory") + list(dict.fromkeys(told)))
        details = _details(row, by_endpoint, beside, names)
        found.append(
            Headline(text, row.treatment, row.reference, row.group, row.word, row.family == "exploratory", details)
        )
    return tuple(found)


def _other_targets(row: TestRow, own: Mapping[str, TestRow], sensitivity: Sequence[Sensitivity]) -> list[str]:
    """The two targets of the grid at which the speed-up differs most, where their intervals are apart."""
    arms = (*_arms(row), row.group)
    points = [point for one in sensitivity if (one.treatment, one.reference, one.group) == arms for point in one.points]
    shown = [(point, ratio) for point in points if (ratio := _ratio_at(point)) is not None]
    if not shown or all(one.times is None for one in _told_of(row, own)):
        return []
    most = max(shown, key=lambda pair: pair[1].estimate)
    least = min(shown, key=lambda pair: pair[1].estimate)
    if most[1].ends[0] <= least[1].ends[1] or most[1].estimate < LARGE_SPREAD * least[1].estimate:
        return []
    told = [f"{_ratio_in_words(ratio)} at {100 * point.share:g} % of the improvement" for point, ratio in (most, least)]
    return [f"This depends on the target: {' and '.join(told)}."]


def _ratio_at(point: SensitivityPoint) -> Interval | None:
    """The speed-up where every run reached a target; where one arm always did and the other never, what is known."""
    if point.reached_treatment == point.reached_reference == point.n:
        return point.speed_up
    ratio = 1 / point.restricted_ratio if point.restricted_ratio else 1.0
    if {point.reached_treatment, point.reached_reference} == {0, point.n} and abs(math.log(ratio)) > SMALL_RATIO:
        low, high = (ratio, math.inf) if ratio > 1 else (0.0, ratio)  # the other arm was watched no longer
        return Interval(ratio, low, high, 0.95, point.n)
    return None


def _ratio_in_words(ratio: Interval) -> str:
    shown, word = (ratio, "sooner") if ratio.estimate > 1 else (_inverse(ratio), "later")
    least = "at least " if ratio.ends[0] == 0 or math.isinf(ratio.ends[1]) else ""
    return f"{least}{supported(shown, null=1.0)(shown.estimate)}{TIMES} {word}"


def _no_headline(study: Study, comparisons: Sequence[Comparison]) -> Headline:
    finished = [run for run in study.of("test") if run.usable]
    algorithm = reference_algorithm(study)
    arms = dict.fromkeys(run.arm for run in finished if not run.diverged)
    if not finished:
        text = f"No verdict: none of {len(study.of('test'))} test runs has a result yet."
    elif len(arms) == 1 and not comparisons:
        text = _one_arm([run.run for run in finished if run.run is not None and not run.diverged])
    elif algorithm is None or not any(arm.algorithm == algorithm for arm in study.arms):
        present = ", ".join(dict.fromkeys(arm.algorithm for arm in study.arms if arm.name != BASELINE))
        text = f"No verdict: there is no {algorithm or 'sync'} arm to compare {present} with."
    elif not comparisons:
        text = f"No verdict: no arm has a {algorithm} arm with the same workers, clock, speeds, batch size and data."
    else:
        text = "No verdict: no comparison has an endpoint with a value."
    return Headline(text, "", "", "", "too few seeds", True)


def _one_arm(runs: Sequence[Run]) -> str:
    """What the runs of the only arm did, and what to add for a verdict."""
    curves = [curve_of(run, "train_seconds") for run in runs]
    first, last, seconds = (math.fsum(values) / len(curves) for values in zip(*_ends(curves), strict=True))
    clock = "simulated seconds" if runs[0].virtual else "seconds"
    number = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    name = next(iter(labels([runs[0].condition]).values()))
    return (
        f"{number} of {name}: evaluation loss {short(first)}, and {short(last)} after {short(seconds)} {clock}. "
        "Add a second arm for a comparison: the same command with another --mode or --rule."
    )


def _ends(curves: Iterable[Any]) -> list[tuple[float, float, float]]:
    """First loss, last loss and seconds of every curve."""
    return [(float(y[0]), float(y[-1]), float(x[-1])) for x, y in curves]


def _arms(row: TestRow) -> tuple[str, str]:
    return row.treatment, row.reference


def _beside(row: TestRow, own: Mapping[str, TestRow]) -> TestRow | None:
    """The other of speed and loss."""
    return own.get("time_to_target" if row.endpoint == "loss_at_equal_samples" else "loss_at_equal_samples")


def _told_of(row: TestRow, own: Mapping[str, TestRow]) -> list[TestRow]:
    """The rows that the headline of `row` speaks of."""
    return [one for one in (row, _beside(row, own)) if one is not None]


def _sentences(row: TestRow, own: Mapping[str, TestRow], names: Mapping[str, str]) -> list[str]:
    """The verdict on the endpoint of `row`, then on the other of speed and loss, which says that it is not primary."""
    told: list[str] = []
    ours, theirs = (_ALGORITHMS.get(names[arm], names[arm]) for arm in _arms(row))
    for one in _told_of(row, own):
        if one.word == "too few seeds":
            why = one.reason.split(";")[0]
            sentences = [f"There are too few seeds for a verdict on {ours} against {theirs}: {why}"]
        elif one.times is not None or one.endpoint == "time_to_target":
            sentences = _time_sentences(one, ours, theirs)
        else:
            sentences = [_loss_sentence(one, ours, theirs, named=ours in " ".join(told))]
        if one.word in DECIDED and row.family != "exploratory" and one.family != "primary":
            label = "not registered" if one.family == "secondary" else one.family
            sentences[0] = f"{label}: {sentences[0]}"
        told += sentences
    return [_capital(f"{text}.") for text in dict.fromkeys(told)]


def _diverged(row: TestRow, pairs: Sequence[Pair], names: Mapping[str, str]) -> list[str]:
    """A diverged run counts as worse than any loss, and an infinite time: one of them can make the difference."""
    told = []
    for arm, side in zip(_arms(row), ("treatment", "reference"), strict=True):
        number = sum(getattr(pair, side).diverged for pair in pairs)
        name = _ALGORITHMS.get(names[arm], names[arm])
        told += [f"{number} of {len(pairs)} runs of {name} diverged."] * (number > 0)
    return told


def _time_sentences(row: TestRow, ours: str, theirs: str) -> list[str]:
    """Who was sooner; where not every run got there, how many did while all were watched."""
    times = row.times
    if row.word == NOT_COMPARABLE:
        return [f"the times of {ours} and {theirs} are not comparable: {row.reason}"]
    if times is None:
        return [f"nothing is shown about the time to the target: {row.reason}"]
    whether = f"whether {ours} reaches the target sooner or later than {theirs} is undecided{_hopeless(row)}"
    if times.treatment_within == times.reference_within == row.n and row.estimate is not None:
        if row.word == "undecided" or times.ratio is None:
            return [whether]
        ratio = times.ratio
        sooner = ratio.estimate > 1
        shown = ratio if sooner else _inverse(ratio)
        number = row.wins if sooner else row.n - row.wins - row.ties
        much = f"{supported(shown, null=1.0)(shown.estimate)}{TIMES} {'sooner' if sooner else 'later'}"
        return [f"{ours} reached the target {much} than {theirs} ({number} of {row.n} seeds)"]
    lost = times.diverged_later
    counts = (
        f"within {float(short(times.budget)):g} {'seconds' if row.unit == 's' else 'simulated seconds'}, "
        f"{_reached(ours, 'the target', times.treatment_within, times.treatment_later, row.n, lost[0])} and "
        f"{_reached(theirs, 'it', times.reference_within, times.reference_later, row.n, lost[1])}"
    )
    if row.estimate is None:
        nothing = f"nothing is shown about the time to the target: {row.reason}"
        return [counts, nothing] if times.treatment_within != times.reference_within else [nothing]
    if row.word == "undecided":
        return [whether, counts]
    if {times.treatment_within, times.reference_within} == {0, row.n}:  # which says who was sooner
        return [counts]
    return [f"{ours} was {'sooner' if row.word == 'better' else 'later'} at the target than {theirs}", counts]


def _reached(name: str, what: str, within: int, later: int, n: int, lost: int = 0) -> str:
    """
    Args:
        lost: runs that were there and diverged.

    >>> _reached("async", "the target", 0, 0, 8, lost=8)
    'async never held the target (0 of 8 runs, 8 reached it and diverged)'
    >>> _reached("sync", "it", 0, 8, 8), _reached("async", "the target", 6, 0, 8)
    ('sync never reached it (0 of 8 runs, 8 later)', 'async reached the target in 6 of 8 runs')
    """
    told = f"{within} of {n} runs" + f", {later} later" * (later > 0) + f", {lost} reached it and diverged" * (lost > 0)
    verb = "held" if lost else "reached"
    if within in (0, n):
        return f"{name} {'always' if within else 'never'} {verb} {what} ({told})"
    return f"{name} {verb} {what} in {told}"


def _loss_sentence(row: TestRow, ours: str, theirs: str, *, named: bool) -> str:
    """On a loss or a score; with the names of both arms, unless a sentence before has `named` them."""
    what = _LOSS_WORDS[row.endpoint]
    if any(note.startswith(_COMPARED_AT) for note in row.notes) and row.endpoint == "loss_at_equal_samples":
        what = "loss at equal samples"  # which not all runs have at their end
    own = f"its {what}" if named else f"the {what} of {ours}"
    than, to, to_whom = ("",) * 3 if named else (f" {word} that of {theirs}" for word in ("than", "to", "with"))
    unit = " nats" if row.unit == "nats" else ""
    found = row.deciding
    if row.word == NOT_COMPARABLE:
        return f"{own} is not comparable{to_whom}: {row.reason}"
    if row.by_divergence is not None and row.word in ("better", "worse"):
        return f"{own} is {row.word}{than}: {_ranked_text(row)}"
    if found is None and row.by_divergence is None:
        return f"{'nothing is shown about' if row.n else 'there is no verdict on'} {own}: {row.reason}"
    if row.word == "undecided":
        return f"whether {own} is better or worse{than} is undecided{_hopeless(row)}"
    assert found is not None  # there is a difference where pairs are not compared by ranks
    much = f"{supported(found)(abs(found.estimate))}{unit} {'higher' if found.estimate > 0 else 'lower'}"
    if row.word == "equivalent":
        return f"{own} is equivalent{to} within ±{row.margin:g}{unit}"
    if row.word == "different but negligible":
        return f"{own} differs, but by less than the margin of {row.margin:g}{unit}: it is {much}{than}"
    return f"{own} is {row.word}{than}: {much} ({_alike(row)} of {row.n} seeds)"


def _alike(row: TestRow) -> int:
    """The pairs that are better where the row is better, or worse where it is worse."""
    return row.wins if row.word == "better" else row.n - row.wins - row.ties


def _ranked_text(row: TestRow) -> str:
    """In how many pairs the loss or the score is higher or lower, and in how many of them a run had diverged."""
    assert row.by_divergence is not None
    losses = row.n - row.wins - row.ties
    worse = losses >= row.wins if row.word not in ("better", "worse") else row.word == "worse"
    number, diverged = (losses, row.by_divergence[0]) if worse else (row.wins, row.by_divergence[1])
    side = "higher" if worse == (row.endpoint not in SCORES) else "lower"
    whose = "the run" if worse else "the other run"
    share = "all" if 1 < diverged == number else f"{diverged}"
    because = f", {share} of them because {whose} diverged" if diverged else ""
    return f"{side} in {number} of {row.n} seeds{because}"


def _hopeless(row: TestRow) -> str:
    return ", and so few seeds cannot show it" if _why_hopeless(row) else ""


def _why_hopeless(row: TestRow) -> str:
    return nothing_to_find(row.n, row.family_size, row.least_p_holm or 0.0, row.alpha)


def _inverse(ratio: Interval) -> Interval:
    low, high = ratio.low, ratio.high
    ends = (None if high is None else 1 / high, None if low is None else 1 / low if low > 0 else math.inf)
    return Interval(1 / ratio.estimate, *ends, ratio.level, ratio.n)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _details(
    row: TestRow, own: Mapping[str, TestRow], controls: Sequence[TestRow], names: Mapping[str, str]
) -> tuple[str, ...]:
    """The numbers behind the sentences, then what control arms say, then what limits them."""
    reached, rows = own.get("target_reached"), _told_of(row, own)
    # a row without an estimate is in the sentences, with its reason
    valued = [one for one in rows if one.estimate is not None or one.by_divergence is not None]
    shown = [one for one in rows if one in valued or one.word == "too few seeds"]
    told = [text for one in shown for text in (*_numbers(one, names, reached), *_unseen(one))]
    for control in controls:
        found, *margin = _numbers(control, names)
        told += [f"against {names[control.reference]}, with equal batches, {found}", *margin]
    if row.estimate is None:
        told += _reached_text(reached, names[row.reference])
    notes = [note for one in rows for note in one.notes if note.startswith(_MARKS)]
    notes += [note for one in controls for note in one.notes if "diverged" in note]
    return tuple(dict.fromkeys(_capital(f"{text.removesuffix('.')}.") for text in (*told, *notes)))


def _unseen(row: TestRow) -> list[str]:
    """In how many seeds it may be otherwise than the word says, and what was tested."""
    if row.word in RESTS_ON_MARGIN and row.outside is not None:
        count, what = row.outside, "outside the margin"
        tested = "whether the mean difference lies within the margin, by t tests, which take differences as normal"
    elif row.word in ("better", "worse"):
        count = row.n - row.ties - _alike(row)
        what = "worse" if row.word == "better" else "better"
        tested = "whether a difference and its opposite are equally likely"
    else:
        return []
    level = 1 - row.alpha
    most = f"with {100 * level:g} % confidence at most {100 * most_of(count, row.n, level):.0f} % of seeds are"
    were = "was" if count == 1 else "were"
    return [f"{_SMALL_WORDS[row.endpoint]}: {count} of {row.n} seeds {were} {what}, and {most}", f"tested: {tested}"]


def _numbers(row: TestRow, names: Mapping[str, str], reached: TestRow | None = None) -> list[str]:
    """Estimate, interval, p value and margin of a row in short sentences."""
    reference = names[row.reference]
    what = _SMALL_WORDS[row.endpoint]
    if row.by_divergence is not None:
        told = [f"{what}: {_ranked_text(row)} ({row.test}{_p_text(row)})"]
    elif row.estimate is None:
        told = [f"{what}: {row.reason}"]
    elif row.times is not None:
        told = _time_numbers(row, row.times, row.estimate, names)
    else:
        told = [f"{what}: {_difference_text(row, reference)}"]
    told += [note for note in row.notes if note in (FOUND_AFTER_OTHERS, SHOWN_AFTER_OTHERS)]
    if row.times is not None:
        told += _reached_text(reached, reference)
    if row.estimate is not None or row.by_divergence is not None:
        told += _margin_text(row, reference)
        if row.word == "too few seeds":
            told = [f"so far, without a verdict ({row.reason}): {told[0]}", *told[1:]]
        elif row.word == "undecided" and (hopeless := _why_hopeless(row)):
            told.append(hopeless)
        elif row.word == "undecided":
            told[0] = told[0].replace(": ", f": not distinguishable from {reference}; ", 1)
    return told


def _margin_text(row: TestRow, reference: str) -> list[str]:
    """What the margin is beside all that the reference improved by, where a word rests on it or it is refused."""
    if row.margin is None:
        return []
    if row.margin_refused:
        return [row.margin_refused]
    if row.margin_share is None or row.word not in RESTS_ON_MARGIN:
        return []
    reason = f": {row.margin_reason}" if row.margin_reason else ""
    return [f"the margin of ±{row.margin:g} is {percent(row.margin_share)} of {reference}'s improvement{reason}"]


def _difference_text(row: TestRow, reference: str) -> str:
    found = row.deciding
    assert found is not None
    unit = " nats" if row.unit == "nats" else ""
    form = supported(found, further=1)
    ends = f"({_ends_in_words(found, 'lower', 'higher', form)}, n = {row.n}{_p_text(row)})"
    if found.estimate == 0:
        return f"the same mean as {reference} {ends}"
    side = "higher" if found.estimate > 0 else "lower"
    return f"{form(abs(found.estimate))}{unit} {side} than {reference} {ends}"


def _time_numbers(row: TestRow, times: RestrictedTimes, difference: Interval, names: Mapping[str, str]) -> list[str]:
    """The ratio where every run got there; else the means up to where all were watched."""
    treatment, reference = names[row.treatment], names[row.reference]
    if times.ratio is not None and times.treatment_within == times.reference_within == row.n:
        logs = _logarithms(times.ratio)
        ends = _ends_in_words(logs, "later", "sooner", _times)
        side = "later" if logs.estimate < 0 else "sooner"
        won = f"sooner in {row.wins} of {row.n} seeds"
        return [
            f"time to the target: {_times(abs(logs.estimate))} {side} than {reference} ({ends}, {won}{_p_text(row)})"
        ]
    budget = f"{float(short(times.budget)):g}"
    ended = "where the first run that missed it ended" if times.cut_short else "how long the longest run took"
    side = "higher" if difference.estimate > 0 else "lower"
    form = supported(difference, further=1)
    means = f"{form(row.treatment_mean or 0.0)} with {treatment}, {form(row.reference_mean or 0.0)} with {reference}"
    ends = _ends_in_words(difference, "lower", "higher", form)
    return [
        f"mean time to the target, counted up to {budget} {row.unit}: {means}, {form(abs(difference.estimate))} {side} "
        f"({ends}{_p_text(row)})",
        f"{budget} {row.unit} is {'the budget of every run' if times.common else ended}",
    ]


def _reached_text(reached: TestRow | None, reference: str) -> list[str]:
    """How many reached the target at all, where that was tested and is not the same on both sides."""
    if reached is None or reached.estimate is None or reached.estimate.estimate == 0:
        return []
    word = {"better": f", more than with {reference}", "worse": f", fewer than with {reference}"}.get(reached.word, "")
    return [f"runs that reached it{word}: exact McNemar test{_p_text(reached)}"]


def _logarithms(ratio: Interval) -> Interval:
    """Of a ratio above 0; a low end of 0 is minus infinity."""
    return ratio.mapped(lambda value: math.log(value) if value > 0 else -math.inf)


def _times(logarithm: float) -> str:
    return f"{math.exp(logarithm):.2f}{TIMES}"


def _p_text(row: TestRow) -> str:
    return "" if row.p_holm is None else f", p_Holm {row.p_holm:.2g}"


def _ends_in_words(interval: Interval, below: str, above: str, form: Callable[[float], str] = short) -> str:
    """The ends without signs: as the word beside the estimate says, or each with its own where they differ.

    >>> _ends_in_words(Interval(-0.45, -0.5, -0.4, 0.95, 8), "lower", "higher")
    '95 % CI 0.400 to 0.500'
    >>> _ends_in_words(Interval(-0.45, -1.0, 0.1, 0.95, 8), "lower", "higher")
    '95 % CI 1.00 lower to 0.100 higher'
    """
    low, high = interval.low, interval.high
    if low is None or high is None:
        return _no_ends(interval)
    if (low >= 0 and interval.estimate > 0) or (high <= 0 and interval.estimate < 0):
        small, large = sorted((abs(low), abs(high)))
        return f"{_level_text(interval)} {form(small)} to {form(large)}"
    ends = [form(abs(end)) + (f" {below if end < 0 else above}" if end else "") for end in (low, high)]
    return f"{_level_text(interval)} {' to '.join(ends)}"


def _level_text(interval: Interval) -> str:
    return f"{100 * interval.level:.3g} % CI"


def _no_ends(interval: Interval) -> str:
    return f"no {_level_text(interval)} from {interval.n} pair{'s' * (interval.n != 1)}"
