"""The rows of a report's arms, which hold no test."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from analysis.findings.comparable_runs import Scope
from analysis.findings.comparisons import samples_per_update
from analysis.findings.delays import Activity, DelayHistogram
from analysis.findings.times import ReachedPanel
from analysis.findings.tuning import rate_of, texts_of
from analysis.findings.workers import loss_of
from analysis.statistics.intervals import Interval, interval_over
from analysis.study.curves import Column, end_of
from analysis.study.run import Run
from analysis.study.types import MEASURED, Arm, Study, StudyRun
from asyncsgd.study.plan import BASE, BASELINE


@dataclasses.dataclass(frozen=True)
class ArmInfo:
    """One arm of the study: an algorithm on a number of workers under one clock, with its settings."""

    name: str
    """As in plan.json and in folder names, e.g. ``ringmaster-w8-virtual``; unique."""
    label: str
    """For legends and tables, e.g. ``ringmaster, 8 workers, virtual clock``; holds `FROM_SCRATCH` where it applies."""
    algorithm: str
    """What a colour stands for: ``sync``, ``async``, ``ringmaster``, ``single``, ``baseline``, ..."""
    mode: str | None
    rule: str | None
    num_workers: int | None
    clock: str
    """``measured`` or ``virtual``."""
    speeds: str | None
    batch_size: int | None
    learning_rate: float | None
    settings: tuple[tuple[str, str], ...]
    """(key, value) of the settings that make this arm, chosen ones included; sorted by key."""
    reference: bool
    """Whether it is the arm that the others of its group are compared with."""
    from_scratch: bool | None
    group: str
    """`Group.name` it belongs to."""
    oversubscribed: bool
    """Whether a measured run of it had more threads than cores: its seconds are no speed comparison."""


@dataclasses.dataclass(frozen=True)
class ArmCounts:
    """What became of the test runs of one arm."""

    arm: str
    stage: str
    planned: int
    finished: int
    diverged: int
    failed: int
    """FAILED, INTERRUPTED, UNFINISHED or unreadable."""
    missing: int
    """Planned, and no folder there."""
    set_aside: int


@dataclasses.dataclass(frozen=True)
class ArmRow:
    """Table 1: one row per arm."""

    arm: str
    reached: int | None
    n: int
    median_seconds: float | None
    restricted_mean: Interval | None
    loss_at_equal_samples: Interval | None
    loss_at_equal_seconds: Interval | None
    """At the largest time that all finished runs of the group reached."""
    metric_name: str | None
    """Of the task's primary metric; None where it has no metrics."""
    metric: Interval | None
    """Its primary metric, at the last evaluation."""
    train_seconds: Interval | None
    updates: Interval | None
    samples_per_update: float | None
    """Samples that were applied, over updates."""
    samples_per_second: Interval | None
    delay_mean: float | None
    delay_p50: float | None
    delay_p95: float | None
    delay_max: float | None
    compute_share: float | None
    """Of the workers' seconds, from the events; None where they hold none."""
    wait_share: float | None
    communication_share: float | None
    learning_rate: float | None
    from_scratch: bool | None
    num_diverged: int


def arm_rows(
    study: Study,
    scope: Scope,
    reached: Sequence[ReachedPanel],
    delays: Sequence[DelayHistogram],
    activities: Mapping[str, Sequence[Activity]],
) -> tuple[ArmRow, ...]:
    """Table 1: one row per arm with pretraining runs."""
    curves = {curve.arm: curve for panel in reached for curve in panel.curves}
    histograms = {histogram.arm: histogram for histogram in delays}
    found = []
    for arm in _in_order(study, scope):
        group = scope.group_of(arm.name)
        assert group is not None
        runs = scope.usable[arm.name]
        finished = [run.run for run in runs if run.run is not None and not run.diverged]
        everything = [run for name in group.arms for run in scope.usable[name]]
        curve = curves.get(arm.name)
        histogram = histograms.get(arm.name)
        metric = next((run.primary_metric for run in finished if run.primary_metric is not None), None)
        compute, wait, communication = _shares(study, arm, activities.get(arm.name, ()))
        found.append(
            ArmRow(
                arm=arm.name,
                reached=None if curve is None else curve.reached,
                n=len(runs),
                median_seconds=None if curve is None else curve.median,
                restricted_mean=None if curve is None else curve.restricted_mean,
                loss_at_equal_samples=_common_loss(runs, everything, "total_samples"),
                loss_at_equal_seconds=_common_loss(runs, everything, "train_seconds"),
                metric_name=metric,
                metric=None if metric is None else interval_over(run.metrics.get(metric) for run in finished),
                train_seconds=interval_over(_summary_number(run, "train_seconds") for run in finished),
                updates=interval_over(_summary_number(run, "num_updates") for run in finished),
                samples_per_update=samples_per_update(runs),
                samples_per_second=interval_over(_summary_number(run, "samples_per_second") for run in finished),
                delay_mean=None if histogram is None else histogram.mean,
                delay_p50=None if histogram is None else histogram.p50,
                delay_p95=None if histogram is None else histogram.p95,
                delay_max=None if histogram is None else histogram.max,
                compute_share=compute,
                wait_share=wait,
                communication_share=communication,
                learning_rate=learning_rate_of(study, arm),
                from_scratch=from_scratch_of(study, arm.name),
                num_diverged=sum(run.diverged for run in runs),
            )
        )
    return tuple(found)


def _in_order(study: Study, scope: Scope) -> list[Arm]:
    """Arms group by group, the reference of each first."""
    return [study.arm(name) for group in scope.groups for name in group.arms]


def _common_loss(runs: Sequence[StudyRun], everything: Sequence[StudyRun], column: Column) -> Interval | None:
    """Mean loss of those of `runs` that did not diverge, at the largest position that all finished ones of the group
    reached."""
    ends = [end_of(run.run, column) for run in everything if run.run is not None and not run.diverged]
    known = [end for end in ends if math.isfinite(end)]
    if not known or not runs:
        return None
    return interval_over(loss_of(run, column, min(known)) for run in runs)


def _summary_number(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shares(study: Study, arm: Arm, activities: Sequence[Activity]) -> tuple[float | None, float | None, float | None]:
    """Shares of the workers' seconds; in measured sync runs computing holds the waiting for the others' gradients."""
    modes = {run.run.summary.get("mode") for run in study.of("test", arm.name) if run.run is not None}
    parts = [
        math.fsum(getattr(activity, part) for activity in activities) for part in ("compute", "wait", "communication")
    ]
    total = math.fsum(parts)
    if total <= 0 or (arm.clock == MEASURED and modes == {"sync"}):
        return None, None, None
    return parts[0] / total, parts[1] / total, parts[2] / total


def learning_rate_of(study: Study, arm: Arm) -> float | None:
    """The learning rate that an arm's test runs had; None where they do not say, or differ."""
    rates = {run.run.learning_rate for run in study.of("test", arm.name) if run.run is not None}
    rates.discard(None)
    if len(rates) == 1:
        return rates.pop()
    return rate_of({**arm.settings, **(arm.chosen or {})}) if not rates else None


def from_scratch_of(study: Study, arm: str) -> bool | None:
    """Whether any run of an arm started from random weights; None where none says."""
    told = {run.run.summary.get("from_scratch") for run in study.runs if run.arm == arm and run.run is not None}
    return True if True in told else False if False in told else None


def arm_infos(study: Study, scope: Scope, labels: Mapping[str, str]) -> tuple[ArmInfo, ...]:
    """All arms in the order of legends; the baseline, which has no group, comes last."""
    arms = _in_order(study, scope) + [arm for arm in study.arms if arm.name == BASELINE]
    found = []
    for arm in arms:
        group = scope.group_of(arm.name)
        runs = [run.run for run in study.of("test", arm.name) if run.run is not None]
        modes = sorted({str(run.summary["mode"]) for run in runs if run.summary.get("mode")})
        rules = sorted({str(run.summary["rule"]) for run in runs if run.summary.get("rule")})
        found.append(
            ArmInfo(
                name=arm.name,
                label=labels[arm.name],
                algorithm=arm.algorithm,
                mode=modes[0] if modes else None,
                rule=rules[0] if rules else None,
                num_workers=arm.num_workers,
                clock=arm.clock,
                speeds=arm.speeds,
                batch_size=arm.batch_size,
                learning_rate=learning_rate_of(study, arm),
                settings=texts_of({**arm.settings, **(arm.chosen or {})}),
                reference=group is not None and group.reference == arm.name,
                from_scratch=from_scratch_of(study, arm.name),
                group="" if group is None else group.name,
                oversubscribed=any(run.oversubscribed for run in runs),
            )
        )
    return tuple(found)


def counts_of(study: Study) -> tuple[ArmCounts, ...]:
    """What became of the runs, by stage and arm."""
    found = []
    places = itertools.product(("test", "pilot", "tuning", "finetune"), (arm.name for arm in study.arms))
    for stage, arm in [*places, ("base", BASE)]:
        runs = study.of(stage, arm)
        aside = sum(
            1 for item in study.set_aside if item.run is not None and (item.run.stage, item.run.arm) == (stage, arm)
        )
        if not runs and not aside:
            continue
        found.append(
            ArmCounts(
                arm=arm,
                stage=stage,
                planned=len(runs),
                finished=sum(run.usable and not run.diverged for run in runs),
                diverged=sum(run.diverged for run in runs),
                failed=sum(run.run is not None and not run.usable for run in runs),
                missing=sum(run.run is None for run in runs),
                set_aside=aside,
            )
        )
    return tuple(found)
