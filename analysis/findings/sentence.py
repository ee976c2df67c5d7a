"""What the eye meets first: one sentence per primary comparison, and four numbers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy

from analysis.findings.comparisons import (
    FROM_SCRATCH,
    OVERSUBSCRIBED,
    UNEQUAL_BATCHES,
    Comparison,
    Group,
    reference_algorithm,
)
from analysis.findings.delays import DelayHistogram
from analysis.findings.judging import RESTS_ON_MARGIN, RestrictedTimes, TestRow
from analysis.statistics.intervals import Interval, short, t_interval
from analysis.statistics.paired import shift_interval, sign_flip
from analysis.statistics.verdict import nothing_to_find, verdict
from analysis.study.types import MEASURED, Study, StudyRun, summary_of
from asyncsgd.study.plan import BASELINE


@dataclasses.dataclass(frozen=True)
class Headline:
    """The sentence at the top for one primary comparison (or, without a pre-registration, for one comparison)."""

    text: str
    treatment: str
    reference: str
    group: str
    word: str
    """Verdict of the primary endpoint."""
    exploratory: bool


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number for the eye. There are always four, for the first comparison of the headline."""

    title: str
    """speed-up | final-loss gap | throughput ratio | delay p95"""
    text: str
    """The value as written, e.g. ``1.42x``; ``-`` where there is none."""
    interval: Interval | None
    interval_text: str
    """``95 % CI 1.21 to 1.66, n = 8``; empty where there is none."""
    unit: str
    word: str
    """better, worse, equivalent, undecided, too few seeds, not measured ..."""
    note: str


TIMES = "\N{MULTIPLICATION SIGN}"

_ENDPOINT_WORDS = {
    "time_to_target": "the time to the target",
    "target_reached": "whether the target is reached",
    "loss_at_equal_samples": "the final loss at equal samples",
    "loss_at_equal_seconds": "the loss at equal seconds",
    "macro_f1": "macro-F1 after fine-tuning",
}


_MARKS = (OVERSUBSCRIBED, UNEQUAL_BATCHES, FROM_SCRATCH, "some runs start")
"""How the notes begin without which a sentence would mislead."""


def _short_names(study: Study, groups: Sequence[Group]) -> dict[str, str]:
    """The algorithm of every arm, or its whole name where a group has two arms of one algorithm."""
    names = {arm.name: arm.algorithm for arm in study.arms}
    for group in groups:
        twice = Counter(study.arm(name).algorithm for name in group.arms)
        names |= {name: name for name in group.arms if twice[study.arm(name).algorithm] > 1}
    return names


# ---- the headline ------------------------------------------------------------------------------------------


def headlines_of(
    study: Study,
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    tests: Sequence[TestRow],
    *,
    exploratory: bool,
) -> tuple[Headline, ...]:
    """One sentence per primary comparison; without a registered one, per comparison; never none."""
    endpoint = None if study.registration is None else study.registration.endpoint
    primary = [row for row in tests if row.family == "primary"]
    if not primary and endpoint is not None:  # registered, but not confirmed
        primary = [row for row in tests if row.endpoint == endpoint and row.reference != BASELINE]
        named = {comparison.group.name for comparison in comparisons if comparison.group.primary}
        primary = [row for row in primary if row.group in named] or primary
    if not primary:
        compared = list(dict.fromkeys((row.treatment, row.reference) for row in tests if row.reference != BASELINE))
        for pair in compared:
            own = [row for row in tests if (row.treatment, row.reference) == pair]
            primary.append(own[0])
    if not primary or not any(run.usable for run in study.of("test")):
        return (_no_headline(study, comparisons),)
    lost = sum(1 for run in study.of("test") if not run.usable)
    unfinished = f" Preliminary: {lost} of {len(study.of('test'))} test runs have no result." if lost else ""
    found = []
    for row in primary:
        others = [other for other in tests if (other.treatment, other.reference) == (row.treatment, row.reference)]
        controls = {one.reference.name for one in comparisons if one.control and one.treatment.name == row.treatment}
        beside = [other for other in tests if other.treatment == row.treatment and other.reference in controls]
        text = _sentence(row, others, beside, _short_names(study, groups))
        if exploratory:
            text = f"Exploratory: {text}"
        marks = [note for note in row.notes if note.startswith(_MARKS)]
        text += "".join(f" [{mark}]" for mark in marks) + unfinished
        found.append(Headline(text, row.treatment, row.reference, row.group, row.word, row.family == "exploratory"))
    return tuple(found)


def _no_headline(study: Study, comparisons: Sequence[Comparison]) -> Headline:
    finished = [run for run in study.of("test") if run.usable]
    algorithm = reference_algorithm(study)
    if not finished:
        text = f"No verdict: none of {len(study.of('test'))} test runs has a result yet."
    elif algorithm is None or not any(arm.algorithm == algorithm for arm in study.arms):
        present = ", ".join(dict.fromkeys(arm.algorithm for arm in study.arms if arm.name != BASELINE))
        text = f"No verdict: there is no {algorithm or 'sync'} arm to compare {present} with."
    elif not comparisons:
        text = f"No verdict: no arm has a {algorithm} arm with the same workers, clock, speeds, batch size and data."
    else:
        text = "No verdict: no comparison has an endpoint with a value."
    return Headline(text, "", "", "", "too few seeds", True)


def _sentence(row: TestRow, others: Sequence[TestRow], controls: Sequence[TestRow], names: Mapping[str, str]) -> str:
    """What was shown on the endpoint of `row`, then on the other of speed and loss, then against control arms."""
    by_endpoint: dict[str, TestRow] = {}
    for other in others:
        by_endpoint.setdefault(other.endpoint, other)
    reached = by_endpoint.get("target_reached")
    clauses = [_clause(row, names, reached)]
    beside = "time_to_target" if row.endpoint == "loss_at_equal_samples" else "loss_at_equal_samples"
    if beside in by_endpoint:
        clauses.append(_clause(by_endpoint[beside], names, reached))
    clauses += [
        f"against {names[other.reference]}, with equal batches, {_clause(other, names, None)}" for other in controls
    ]
    return f"{names[row.treatment]}, {row.group}: {'; '.join(clauses)}."


def _clause(row: TestRow, names: Mapping[str, str], reached: TestRow | None) -> str:
    what, reference = _ENDPOINT_WORDS[row.endpoint], names[row.reference]
    if row.estimate is None:
        counted = "" if row.times is None else _reached_text(reached, reference)
        return f"{'nothing is shown about' if row.n else 'no verdict on'} {what}: {row.reason}{counted}"
    found = _difference_text(row, reference)
    if row.times is not None:
        found = _time_text(row, row.times, row.estimate, names) + _reached_text(reached, reference)
    found += _margin_text(row, reference)
    if row.word == "too few seeds":
        return f"{what}: too few seeds for a verdict ({row.reason}); so far {found}"
    if row.word == "undecided":
        hopeless = nothing_to_find(row.n, row.family_size, row.least_p_holm or 0.0, row.alpha)
        return f"{what}: {f'{hopeless}; so far' if hopeless else f'not distinguishable from {reference};'} {found}"
    return found if row.times is not None else f"{what}: {found}"


def _margin_text(row: TestRow, reference: str) -> str:
    """What the margin is beside all that the reference improved by, where a word rests on it or it is refused."""
    if row.margin is None:
        return ""
    share = "" if row.margin_share is None else f" ({100 * row.margin_share:.3g} % of {reference}'s improvement)"
    if row.equivalence is None:
        return f", with a margin of ±{row.margin:g}{share} that is too wide to mean anything"
    return f", {row.word} within ±{row.margin:g}{share}" if row.word in RESTS_ON_MARGIN else ""


def _difference_text(row: TestRow, reference: str) -> str:
    found = row.deciding
    assert found is not None
    unit = " nats" if row.unit == "nats" else ""
    ends = f"({_ends_in_words(found, 'lower', 'higher')}, n = {row.n}{_p_text(row)})"
    if found.estimate == 0:
        return f"the same mean as {reference} {ends}"
    return f"{short(abs(found.estimate))}{unit} {'higher' if found.estimate > 0 else 'lower'} than {reference} {ends}"


def _time_text(row: TestRow, times: RestrictedTimes, difference: Interval, names: Mapping[str, str]) -> str:
    """The ratio where every run got there; else who did while all were watched, and the means up to then."""
    treatment, reference = names[row.treatment], names[row.reference]
    if times.ratio is not None and times.treatment_within == times.reference_within == row.n:
        logs = _logarithms(times.ratio)
        told = f"{_ends_in_words(logs, 'later', 'sooner', _times)}, sooner in {row.wins} of {row.n} seeds{_p_text(row)}"
        side = "later" if logs.estimate < 0 else "sooner"
        return f"reached the target {_times(abs(logs.estimate))} {side} than {reference} ({told})"
    budget = short(times.budget)
    said = {"better": f"sooner at the target than {reference}: ", "worse": f"later at the target than {reference}: "}
    within = "where the first run that missed it ended" if times.cut_short else "the longest run"
    within = "the budget of every run" if times.common else within
    side = "higher" if difference.estimate > 0 else "lower"
    return (
        f"{said.get(row.word, '')}within the first {budget} {row.unit} ({within}) "
        f"{times.treatment_within} of {row.n} {treatment} runs reached it{_later_text(times.treatment_later)} and "
        f"{times.reference_within} of {row.n} {reference} runs{_later_text(times.reference_later)}; mean of min(time, "
        f"{budget}) {short(row.treatment_mean or 0.0)} against {short(row.reference_mean or 0.0)}, "
        f"{short(abs(difference.estimate))} {side} ({_ends_in_words(difference, 'lower', 'higher')}{_p_text(row)})"
    )


def _reached_text(reached: TestRow | None, reference: str) -> str:
    """How many reached the target at all, where that was tested and is not the same on both sides."""
    if reached is None or reached.estimate is None or reached.estimate.estimate == 0:
        return ""
    word = {"better": f", more than with {reference}", "worse": f", fewer than with {reference}"}.get(reached.word, "")
    return f"; runs that reached it{word}: exact McNemar test{_p_text(reached)}"


def _later_text(later: int) -> str:
    return f" ({later} later)" if later else ""


def _logarithms(ratio: Interval) -> Interval:
    """Of a ratio above 0; a low end of 0 is minus infinity."""

    def of(end: float | None) -> float | None:
        return None if end is None else math.log(end) if end > 0 else -math.inf

    return Interval(math.log(ratio.estimate), of(ratio.low), of(ratio.high), ratio.level, ratio.n)


def _times(logarithm: float) -> str:
    return f"{math.exp(logarithm):.2f}{TIMES}"


def _p_text(row: TestRow) -> str:
    return "" if row.p_holm is None else f", p_Holm {short(row.p_holm)}"


def _ends(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return _no_ends(interval)
    return f"{_level(interval)} {short(interval.low)} to {short(interval.high)}"


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
        return f"{_level(interval)} {form(small)} to {form(large)}"
    ends = [form(abs(end)) + (f" {below if end < 0 else above}" if end else "") for end in (low, high)]
    return f"{_level(interval)} {' to '.join(ends)}"


def _level(interval: Interval) -> str:
    return f"{100 * interval.level:.3g} % CI"


def _no_ends(interval: Interval) -> str:
    return f"no {_level(interval)} from {interval.n} pair{'s' * (interval.n != 1)}"


# ---- the tiles ---------------------------------------------------------------------------------------------


def tiles_of(
    comparison: Comparison | None,
    tests: Sequence[TestRow],
    delays: Sequence[DelayHistogram],
    generator: numpy.random.Generator,
) -> tuple[Tile, ...]:
    """The four numbers of one comparison."""
    titles = ("speed-up", "final-loss gap", "throughput ratio", "delay p95")
    if comparison is None:
        return tuple(Tile(title, "-", None, "", "", "not measured", "there is no comparison") for title in titles)
    rows = {
        row.endpoint: row
        for row in reversed(tests)
        if (row.treatment, row.reference) == (comparison.treatment.name, comparison.reference.name)
    }
    return (
        _speed_tile(rows.get("time_to_target")),
        _gap_tile(rows.get("loss_at_equal_samples")),
        _throughput_tile(comparison, generator),
        _delay_tile(comparison, delays),
    )


def _speed_tile(row: TestRow | None) -> Tile:
    if row is None:
        return Tile("speed-up", "-", None, "", "", "not measured", "there is no target loss")
    times = row.times
    if times is None or times.ratio is None:
        return Tile("speed-up", "-", None, "", TIMES, row.word, row.reason)
    ratio = times.ratio
    note = f"{row.comparison}: mean time to the target, reference / treatment"
    if min(times.treatment_within, times.reference_within) < row.n:
        note += f", every time up to {short(times.budget)} {row.unit} ({times.treatment_within} and "
        note += f"{times.reference_within} of {row.n} runs of treatment and reference reached it by then)"
    note += _p_text(row)
    return Tile("speed-up", f"{ratio.estimate:.2f}{TIMES}", ratio, _interval_text(ratio), TIMES, row.word, note)


def _gap_tile(row: TestRow | None) -> Tile:
    if row is None or row.estimate is None:
        why = "no pair has a loss at equal samples" if row is None else row.reason
        return Tile("final-loss gap", "-", None, "", "nats", "not measured", why)
    note = f"{row.comparison}: loss at equal samples, treatment - reference"
    if row.relative is not None:
        note += f"; {100 * row.relative:+.1f} % of the reference's improvement"
    if row.margin is not None:
        note += f"; margin ±{row.margin:g}"
        note += "" if row.margin_share is None else f", {100 * row.margin_share:.3g} % of that improvement"
        note += ", too wide to mean anything" * (row.equivalence is None)
    shown = row.deciding or row.estimate
    text = f"{shown.estimate:+.3f}"
    return Tile("final-loss gap", text, shown, _interval_text(shown), "nats", row.word, note)


def _throughput_tile(comparison: Comparison, generator: numpy.random.Generator) -> Tile:
    logs = []
    for pair in comparison.pairs:
        ours, theirs = (summary_of(run, "samples_per_second") for run in (pair.treatment, pair.reference))
        if isinstance(ours, float | int) and isinstance(theirs, float | int) and ours > 0 and theirs > 0:
            logs.append(math.log(ours / theirs))
    if not logs:
        return Tile("throughput ratio", "-", None, "", TIMES, "not measured", "no pair has a throughput")
    if comparison.group.clock != MEASURED and len(logs) > 1 and max(logs) - min(logs) < 1e-9:
        # drawn from speeds without chance: a declared number, with nothing to test
        note = f"{comparison.name}: samples per virtual second, the same in every seed; in no family"
        text = f"{math.exp(logs[0]):.2f}{TIMES}"
        return Tile("throughput ratio", text, None, "", TIMES, "as declared", note)
    p = sign_flip(logs, generator)
    found = shift_interval(logs, [0.0] * len(logs), p, generator)
    ratio = Interval(
        math.exp(found.estimate),
        None if found.low is None else math.exp(found.low),
        None if found.high is None else math.exp(found.high),
        found.level,
        found.n,
    )
    said = verdict(len(logs), found.estimate, p, found, None, lower_is_better=False)
    note = (
        f"{comparison.name}: samples per {'' if comparison.group.clock == MEASURED else 'virtual '}second; in no family"
    )
    return Tile(
        "throughput ratio", f"{ratio.estimate:.2f}{TIMES}", ratio, _interval_text(ratio), TIMES, said.word, note
    )


def _delay_tile(comparison: Comparison, delays: Sequence[DelayHistogram]) -> Tile:
    known = [value for pair in comparison.pairs if (value := _delay_p95(pair.treatment)) is not None]
    their = [value for pair in comparison.pairs if (value := _delay_p95(pair.reference)) is not None]
    pooled = {histogram.arm: histogram.p95 for histogram in delays}
    found = _delay_interval(known, pooled.get(comparison.treatment.name))
    if found is None:
        return Tile("delay p95", "-", None, "", "updates", "not measured", "no run recorded a delay")
    against = _delay_interval(their, pooled.get(comparison.reference.name))
    p95 = found.estimate
    if against is None:
        word = "not compared"
    else:
        word = "same" if p95 == against.estimate else "higher" if p95 > against.estimate else "lower"
    beside = "-" if against is None else short(against.estimate)
    note = f"{comparison.treatment.algorithm}; {comparison.reference.algorithm}: {beside}"
    note += "; mean over the runs" if known else "; of all runs together"
    if found.low is None:
        note += f"; the same in all {len(known)}" if len(known) > 1 else ""
        return Tile("delay p95", short(p95), None, "", "updates", word, note)
    return Tile("delay p95", short(p95), found, _interval_text(found), "updates", word, note)


def _delay_interval(per_run: Sequence[float], pooled: float | None) -> Interval | None:
    """The mean of the runs' percentiles with its t interval; without ends where they do not vary.

    On a clock without chance every run has the same delays, and an interval without width would say that something had
    been measured. Where no summary has a percentile, that of all gradients of all runs, which has no interval.
    """
    if not per_run:
        return None if pooled is None else Interval(pooled, None, None, 0.95, 0)
    found = t_interval(per_run)
    return dataclasses.replace(found, low=None, high=None) if max(per_run) == min(per_run) else found


def _delay_p95(run: StudyRun) -> float | None:
    delay = summary_of(run, "delay")
    value = delay.get("p95") if isinstance(delay, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _interval_text(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return _no_ends(interval)
    return f"{_ends(interval)}, n = {interval.n}"
