"""Who did what when, in one run of the reference and one of another arm."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from analysis.findings.comparable_runs import Scope
from analysis.findings.delays import events_of
from analysis.findings.groups import Group
from analysis.study.run import Run
from analysis.study.types import MEASURED, Study, StudyRun

TIMELINE_SECONDS = 2.0


TIMELINE_GRADIENTS = 6
"""A timeline of a virtual clock shows about so many gradients of a worker."""


@dataclasses.dataclass(frozen=True)
class TimelineSpan:
    worker: int
    """-1: the server."""
    kind: Literal["compute", "wait", "pull", "push", "apply"]
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Who did what when in a window from the middle of one run."""

    arm: str
    run: str
    clock: str
    begin: float
    seconds: float
    x_label: str
    workers: tuple[int, ...]
    spans: tuple[TimelineSpan, ...]


def timelines(study: Study, scope: Scope) -> tuple[Timeline, ...]:
    """One run of the reference and one of a treatment, the same window length from the middle of each."""
    for group in scope.groups:
        if group.reference is None or len(group.arms) < 2:
            continue
        chosen = [_first_finished(scope, group.reference)]
        chosen += [run for arm in group.arms[1:] if (run := _first_finished(scope, arm)) is not None][:1]
        runs = [run for run in chosen if run is not None and run.run is not None]
        window = _window([run.run for run in runs if run.run is not None], group.clock)
        if window is None:
            continue
        made = [_timeline(run, group, window) for run in runs]
        found = tuple(timeline for timeline in made if timeline is not None)
        if found:
            return found
    return ()


def _first_finished(scope: Scope, arm: str) -> StudyRun | None:
    return next((run for run in scope.usable[arm] if not run.diverged), None)


def _window(runs: Sequence[Run], clock: str) -> float | None:
    """Two seconds; on the virtual clock, whose second is arbitrary, a few gradients of the slower run."""
    if clock == MEASURED:
        return TIMELINE_SECONDS
    cycles = []
    for run in runs:
        flights = [record.get("flight_seconds") for record in events_of(run) if record.get("kind") == "arrival"]
        known = [float(flight) for flight in flights if isinstance(flight, int | float) and flight > 0]
        if known:
            cycles.append(statistics.median(known))
    return TIMELINE_GRADIENTS * max(cycles) if cycles else None


def _timeline(run: StudyRun, group: Group, window: float) -> Timeline | None:
    assert run.run is not None
    spans = list(_spans(run.run))
    if not spans:
        return None
    last = max(span.start + span.seconds for span in spans)
    length = min(window, last)
    begin = max(0.0, (last - length) / 2)
    inside = [span for span in spans if span.start < begin + length and span.start + span.seconds > begin]
    cut = []
    for span in inside:
        start, end = max(span.start, begin), min(span.start + span.seconds, begin + length)
        cut.append(TimelineSpan(span.worker, span.kind, start, end - start))
    return Timeline(
        arm=run.arm,
        run=run.name,
        clock=group.clock,
        begin=begin,
        seconds=length,
        x_label=group.seconds_label,
        workers=tuple(sorted({span.worker for span in spans if span.worker >= 0})),
        spans=tuple(sorted(cut, key=lambda span: (span.worker, span.start, span.kind))),
    )


def _spans(run: Run) -> Iterator[TimelineSpan]:
    """What workers and server did, laid backwards from every arrival, as in `analysis.timeline`."""
    kinds: tuple[Literal["push", "compute", "pull", "wait"], ...] = ("push", "compute", "pull", "wait")
    for record in events_of(run):
        if record.get("kind") != "arrival":
            continue
        seconds = {kind: record.get(f"{kind}_seconds") or 0.0 for kind in (*kinds, "apply")}
        worker, at = record.get("worker"), record.get("train_seconds")
        if not isinstance(worker, int) or not isinstance(at, int | float):
            continue
        end = at - seconds["apply"]
        if seconds["apply"] > 0:
            yield TimelineSpan(-1, "apply", end, seconds["apply"])
        for kind in kinds:
            end -= seconds[kind]
            if seconds[kind] > 0:
                yield TimelineSpan(worker, kind, end, seconds[kind])
