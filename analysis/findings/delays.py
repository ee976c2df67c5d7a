"""What the events of runs say: delays, and how often a rule acted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.groups import Group
from analysis.findings.judging import TestRow
from analysis.statistics.intervals import Interval
from analysis.study.run import Run
from asyncsgd.records.events import read_events
from asyncsgd.records.totals import Delays


@dataclasses.dataclass(frozen=True)
class DelayHistogram:
    """Delays (updates between read and application) of the applied gradients, over all test runs of an arm."""

    arm: str
    delays: tuple[int, ...]
    counts: tuple[int, ...]
    """Gradients with each delay of `delays`."""
    num_runs: int
    mean: float | None
    p50: float | None
    p95: float | None
    max: int | None


@dataclasses.dataclass(frozen=True)
class DelayGap:
    """Loss gap of a comparison against its treatment's delay: one point of the picture."""

    treatment: str
    reference: str
    group: str
    delay_p95: float
    gap: Interval
    """Loss at equal samples, treatment - reference."""


@dataclasses.dataclass(frozen=True)
class Activity:
    """What the events of one run add up to."""

    delays: Mapping[int, int]
    """Applied gradients by their delay."""
    compute: float
    wait: float
    communication: float
    """Seconds of pulling and pushing."""


def activity_of(run: Run) -> Activity:
    """Add up a run's events, as far as they can be read."""
    delays: Counter[int] = Counter()
    seconds = dict.fromkeys(("compute", "wait", "pull", "push"), 0.0)
    for record in events_of(run):
        for use in record.get("uses") or ():
            if isinstance(use, list) and len(use) == 2 and isinstance(use[1], int):
                delays[use[1]] += 1
        if record.get("kind") == "arrival":
            for key in seconds:
                value = record.get(f"{key}_seconds")
                if isinstance(value, int | float):
                    seconds[key] += value
    return Activity(delays, seconds["compute"], seconds["wait"], seconds["pull"] + seconds["push"])


def events_of(run: Run) -> Iterator[dict[str, Any]]:
    """The records of a run, up to the first damage, which loading has told of already."""
    try:
        yield from read_events(run.path / "events.jsonl")
    except (OSError, ValueError):
        return


def histograms(activities: Mapping[str, Sequence[Activity]]) -> tuple[DelayHistogram, ...]:
    """The delays of the gradients that were applied, over all runs of each arm."""
    found = []
    for arm, of_arm in activities.items():
        counts: Counter[int] = Counter()
        for activity in of_arm:
            counts.update(activity.delays)
        if not counts:
            continue
        delays = Delays()
        for delay, count in counts.items():
            for _ in range(count):
                delays.add(delay)
        summary = delays.summary()
        found.append(
            DelayHistogram(
                arm=arm,
                delays=tuple(sorted(counts)),
                counts=tuple(counts[delay] for delay in sorted(counts)),
                num_runs=sum(bool(activity.delays) for activity in of_arm),
                mean=summary["mean"],
                p50=summary["p50"],
                p95=summary["p95"],
                max=max(counts),
            )
        )
    return tuple(found)


def delay_gaps(
    rows: Sequence[TestRow], delays: Sequence[DelayHistogram], groups: Sequence[Group]
) -> tuple[DelayGap, ...]:
    """The loss gap at equal samples of every comparison, at the 95th percentile of its treatment's delays."""
    p95 = {histogram.arm: histogram.p95 for histogram in delays}
    references = {group.reference for group in groups}
    found = []
    for row in rows:
        delay = p95.get(row.treatment)
        asked = row.endpoint == "loss_at_equal_samples" and row.reference in references
        if asked and row.estimate is not None and delay is not None:
            found.append(DelayGap(row.treatment, row.reference, row.group, float(delay), row.estimate))
    return tuple(found)
