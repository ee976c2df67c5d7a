"""The four numbers for the eye: speed-up, gap of the final loss, ratio of throughputs, delay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy

from analysis.findings.comparisons import Comparison
from analysis.findings.delays import DelayHistogram
from analysis.findings.judging import NOT_COMPARABLE, TestRow
from analysis.findings.sentence import TIMES, level_text, no_ends, p_text, supported
from analysis.statistics.intervals import Interval, percent, short, t_interval
from analysis.statistics.paired import shift_interval, sign_flip
from analysis.statistics.verdict import verdict
from analysis.study.types import MEASURED, StudyRun, summary_of


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number for the eye. There are four for the first comparison of the headline, and none without one."""

    title: str
    """speed-up | final-loss gap | throughput ratio | delay p95, and the arms: ``speed-up, async vs sync``"""
    text: str
    """The value as written, e.g. ``1.42x``; ``-`` where there is none."""
    interval: Interval | None
    interval_text: str
    """``95 % CI 1.21 to 1.66, n = 8``; empty where there is none."""
    unit: str
    word: str
    """better, worse, equivalent, undecided, too few seeds, not measured ..."""
    note: str
    registered: bool = False
    """Whether `word` is a verdict of the primary family."""


def tiles_of(
    comparison: Comparison | None,
    tests: Sequence[TestRow],
    delays: Sequence[DelayHistogram],
    generator: numpy.random.Generator,
) -> tuple[Tile, ...]:
    """The four numbers of one comparison."""
    if comparison is None:
        return ()
    rows = {
        row.endpoint: row
        for row in reversed(tests)
        if (row.treatment, row.reference) == (comparison.treatment.name, comparison.reference.name)
    }
    speed, loss = rows.get("time_to_target"), rows.get("loss_at_equal_samples")
    tiles = (
        _of_family(_speed_tile(speed, comparison), speed),
        _of_family(_gap_tile(loss), loss),
        _throughput_tile(comparison, generator),
        _delay_tile(comparison, delays),
    )
    arms = comparison.name.partition(",")[0]  # as its first part names them: async vs sync
    return tuple(dataclasses.replace(tile, title=f"{tile.title}, {arms}") for tile in tiles)


def _of_family(tile: Tile, row: TestRow | None) -> Tile:
    if row is None or row.family == "primary":
        return dataclasses.replace(tile, registered=row is not None)
    return tile if tile.text == "-" else dataclasses.replace(tile, note=f"{tile.note}; {row.family}")


def _speed_tile(row: TestRow | None, comparison: Comparison) -> Tile:
    if row is None:
        return Tile("speed-up", "-", None, "", "", "not measured", "there is no target loss")
    if comparison.no_speed:
        return Tile("speed-up", "-", None, "", "", NOT_COMPARABLE, " ".join(comparison.no_speed))
    times = row.times
    if times is None or times.ratio is None:
        return Tile("speed-up", "-", None, "", TIMES, row.word, row.reason)
    ratio = times.ratio
    note = "mean time to the target, reference / treatment"
    if min(times.treatment_within, times.reference_within) < row.n:
        note += f", every time up to {short(times.budget)} {row.unit} ({times.treatment_within} and "
        note += f"{times.reference_within} of {row.n} runs of treatment and reference reached it by then)"
    note += p_text(row)
    text = f"{supported(ratio, null=1.0)(ratio.estimate)}{TIMES}"
    return Tile("speed-up", text, ratio, _interval_text(ratio, null=1.0), TIMES, row.word, note)


def _gap_tile(row: TestRow | None) -> Tile:
    if row is not None and row.by_divergence is not None:
        note = f"loss at equal samples, by ranks, as a run diverged: {row.reason}"
        return Tile("final-loss gap", "-", None, "", "nats", row.word, note)
    if row is None or row.estimate is None:
        why = "no pair has a loss at equal samples" if row is None else row.reason
        return Tile("final-loss gap", "-", None, "", "nats", "not measured", why)
    note = "loss at equal samples, treatment - reference"
    if row.relative is not None:
        note += f"; {100 * row.relative:+.1f} % of the reference's improvement"
    if row.margin_refused:
        note += f"; {row.margin_refused}"
    elif row.margin is not None:
        note += f"; margin ±{row.margin:g}"
        note += "" if row.margin_share is None else f", {percent(row.margin_share)} of that improvement"
    shown = row.deciding or row.estimate
    text = ("-" if shown.estimate < 0 else "+") + supported(shown)(abs(shown.estimate))
    return Tile("final-loss gap", text, shown, _interval_text(shown), "nats", row.word, note)


def _throughput_tile(comparison: Comparison, generator: numpy.random.Generator) -> Tile:
    logs = []
    if comparison.no_speed:
        return Tile("throughput ratio", "-", None, "", "", NOT_COMPARABLE, " ".join(comparison.no_speed))
    if comparison.pairs and not comparison.in_seconds.pairs:
        why = next(iter(comparison.other_machines.values()))
        return Tile("throughput ratio", "-", None, "", "", NOT_COMPARABLE, why)
    for pair in comparison.in_seconds.pairs:
        ours, theirs = (summary_of(run, "samples_per_second") for run in (pair.treatment, pair.reference))
        if isinstance(ours, float | int) and isinstance(theirs, float | int) and ours > 0 and theirs > 0:
            logs.append(math.log(ours / theirs))
    if not logs:
        return Tile("throughput ratio", "-", None, "", TIMES, "not measured", "no pair has a throughput")
    if comparison.group.clock != MEASURED and len(logs) > 1 and max(logs) - min(logs) < 1e-9:
        # drawn from speeds without chance: a declared number, with nothing to test
        note = "samples per virtual second, the same in every seed; in no family"
        text = f"{math.exp(logs[0]):.2f}{TIMES}"
        return Tile("throughput ratio", text, None, "", TIMES, "as declared", note)
    p = sign_flip(logs, generator)
    found = shift_interval(logs, [0.0] * len(logs), p, generator)
    ratio = found.mapped(math.exp)
    said = verdict(len(logs), found.estimate, p, None, lower_is_better=False)
    note = f"samples per {'' if comparison.group.clock == MEASURED else 'virtual '}second; in no family"
    text = f"{supported(ratio, null=1.0)(ratio.estimate)}{TIMES}"
    return Tile("throughput ratio", text, ratio, _interval_text(ratio, null=1.0), TIMES, said.word, note)


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


def _interval_text(interval: Interval, null: float = 0.0) -> str:
    if interval.low is None or interval.high is None:
        return no_ends(interval)
    form = supported(interval, null, further=1)
    return f"{level_text(interval)} {form(interval.low)} to {form(interval.high)}, n = {interval.n}"
