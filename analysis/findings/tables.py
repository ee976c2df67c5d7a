"""The tables of a report that hold no test: tuning, noise of the schedule, arms, environments, every single run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.findings.comparable_runs import Scope
from analysis.findings.comparisons import LeftOut, samples_per_update
from analysis.findings.delays import Activity, DelayHistogram
from analysis.findings.judging import TestRow
from analysis.findings.times import ReachedPanel
from analysis.findings.workers import loss_or_worst
from analysis.statistics.expected_best import expected_best
from analysis.statistics.intervals import Interval, interval_over
from analysis.statistics.noise import components
from analysis.study.curves import Column, end_of, worst_loss
from analysis.study.run import Run
from analysis.study.types import MEASURED, Arm, Study, StudyRun, Trial
from asyncsgd.study.finetuning import SCORES
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
class TrialPoint:
    """One tuning trial."""

    learning_rate: float | None
    settings: tuple[tuple[str, str], ...]
    losses: tuple[float | None, ...]
    """One per tuning seed; None: diverged or failed."""
    seeds: tuple[int, ...]
    score: float | None
    chosen: bool


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Table 3 and the sensitivity to the learning rate, of one arm."""

    arm: str
    trials: tuple[TrialPoint, ...]
    """Sorted by learning rate."""
    chosen: tuple[tuple[str, str], ...]
    at_edge: bool
    """Whether the chosen learning rate is the smallest or the largest that was tried: the best may lie beyond."""
    num_runs: int
    expected_best: tuple[tuple[int, float], ...]
    """(k, expected best loss of k random trials)."""


@dataclasses.dataclass(frozen=True)
class ScheduleShare:
    """S9: how much of the variance of the final loss is the schedule (replicates), not the seed; or why not known."""

    arm: str
    refused: str
    num_seeds: int
    num_replicates: int
    schedule_variance: Interval | None
    seed_variance: float | None
    share: Interval | None
    """schedule / (schedule + seed)."""
    p: float | None


@dataclasses.dataclass(frozen=True)
class ArmRow:
    """Table 1: one row per arm."""

    arm: str
    reached: int | None
    n: int
    median_seconds: float | None
    restricted_mean: Interval | None
    speed_up: Interval | None
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


@dataclasses.dataclass(frozen=True)
class HardwareRow:
    """Table 4: one row per distinct environment."""

    num_runs: int
    values: tuple[tuple[str, str], ...]
    """(what, value): cpu, cores, threads per worker, python, torch, ..., commit."""


@dataclasses.dataclass(frozen=True)
class RunRow:
    """One run folder (or planned run without one)."""

    name: str
    """Path relative to the study's folder: the link."""
    exists: bool
    arm: str
    stage: str
    seed: int | None
    replicate: int
    finetune_seed: int | None
    parent: str
    status: str
    """DONE, DIVERGED, FAILED, INTERRUPTED, UNFINISHED, UNREADABLE, MISSING."""
    loss: float | None
    score: float | None
    """Of `SCORES`, where it is a fine-tuning run."""
    train_seconds: float | None
    num_samples: int | None
    learning_rate: float | None
    clock: str
    from_scratch: bool | None
    oversubscribed: bool
    in_tests: bool
    remark: str
    """Why it is not in the tests, and what went wrong in it."""


def tuning_results(study: Study) -> tuple[TuningResult, ...]:
    """Table 3: what was tried for every arm, what was chosen, and what fewer trials would have found."""
    found = []
    for arm in study.arms:
        runs = study.of("tuning", arm.name)
        trials = arm.trials or _trials_of_runs(runs)
        if not trials:
            continue
        chosen = arm.chosen or (_chosen_by_tests(study, arm) if not arm.trials else None)
        points = [
            TrialPoint(
                learning_rate=_rate_of(trial.settings),
                settings=_texts(trial.settings),
                losses=trial.losses,
                seeds=trial.seeds,
                score=trial.score,
                chosen=chosen is not None and dict(trial.settings) == dict(chosen),
            )
            for trial in trials
        ]
        points = list(dict.fromkeys(points))  # two trials may happen to be the same settings
        points.sort(key=lambda point: (point.learning_rate is None, point.learning_rate or 0.0, point.settings))
        rates = sorted({point.learning_rate for point in points if point.learning_rate is not None})
        taken = {point.learning_rate for point in points if point.chosen}
        found.append(
            TuningResult(
                arm=arm.name,
                trials=tuple(points),
                chosen=() if chosen is None else _texts(chosen),
                at_edge=len(rates) > 1 and bool(taken & {rates[0], rates[-1]}),
                num_runs=len(runs) or sum(len(trial.seeds) for trial in trials),
                expected_best=_expected_best(trials),
            )
        )
    return tuple(found)


def _expected_best(trials: Sequence[Trial]) -> tuple[tuple[int, float], ...]:
    finite = [trial.score for trial in trials if trial.score is not None]
    finite += [loss for trial in trials for loss in trial.losses if trial.score is None and loss is not None]
    if not any(trial.score is not None for trial in trials):
        return ()
    worst = max(finite)
    scores = [worst if trial.score is None else trial.score for trial in trials]  # a diverged trial is the worst
    return tuple((k, expected_best(scores, k)) for k in range(1, len(scores) + 1))


def _trials_of_runs(runs: Sequence[StudyRun]) -> tuple[Trial, ...]:
    """The trials as the tuning runs tell them, where the plan does not."""
    by_trial: dict[int | None, list[StudyRun]] = defaultdict(list)
    for run in runs:
        if run.run is not None:
            by_trial[run.trial].append(run)
    trials = []
    for number in sorted(by_trial, key=lambda one: -1 if one is None else one):
        own = by_trial[number]
        losses = tuple(
            run.run.summary.get("final_eval_loss") if run.run is not None and run.run.done else None for run in own
        )
        finite = [loss for loss in losses if loss is not None]
        rate = own[0].run.learning_rate if own[0].run is not None else None
        score = statistics.fmean(finite) if finite and len(finite) == len(losses) else None
        settings = {} if rate is None else {"learning_rate": rate}
        trials.append(Trial(settings, tuple(run.seed for run in own if run.seed is not None), losses, score))
    return tuple(trials)


def _chosen_by_tests(study: Study, arm: Arm) -> dict[str, Any] | None:
    rates = {run.run.learning_rate for run in study.of("test", arm.name) if run.run is not None}
    return {"learning_rate": rates.pop()} if len(rates) == 1 else None


def schedule_shares(study: Study, scope: Scope) -> tuple[ScheduleShare, ...]:
    """S9: how much of the variance of the loss is the schedule, for arms with replicates."""
    found = []
    for arm in study.arms:
        runs = [run for run in scope.shown.get(arm.name, ()) if run.usable and run.seed is not None]
        by_seed: dict[int, list[StudyRun]] = defaultdict(list)
        for run in runs:
            if run.seed is not None:
                by_seed[run.seed].append(run)
        most = max((len(of_seed) for of_seed in by_seed.values()), default=0)
        if most < 2:
            continue
        balanced = {
            seed: of_seed
            for seed, of_seed in sorted(by_seed.items())
            if len(of_seed) == most and not any(run.diverged for run in of_seed)
        }
        found.append(_schedule_share(arm.name, balanced, most))
    return tuple(found)


def _schedule_share(arm: str, runs: Mapping[int, Sequence[StudyRun]], replicates: int) -> ScheduleShare:
    nothing = ScheduleShare(arm, "", len(runs), replicates, None, None, None, None)
    if len(runs) < 2:
        return dataclasses.replace(nothing, refused=f"{len(runs)} seeds with all {replicates} replicates; it needs 2")
    folders = [run.run for of_seed in runs.values() for run in of_seed if run.run is not None]
    common = min(end_of(run, "total_samples") for run in folders)
    table = [[loss_or_worst(run, "total_samples", common, math.nan) for run in of_seed] for of_seed in runs.values()]
    result = components(table)
    return dataclasses.replace(
        nothing,
        refused=result.too_few,
        schedule_variance=result.schedule_variance,
        seed_variance=result.seed_variance,
        share=result.schedule_share,
        p=result.p,
    )


def arm_rows(
    study: Study,
    scope: Scope,
    reached: Sequence[ReachedPanel],
    rows: Sequence[TestRow],
    delays: Sequence[DelayHistogram],
    activities: Mapping[str, Sequence[Activity]],
) -> tuple[ArmRow, ...]:
    """Table 1: one row per arm with pretraining runs."""
    curves = {curve.arm: curve for panel in reached for curve in panel.curves}
    speed_ups = {row.treatment: row.speed_up for row in rows if row.endpoint == "time_to_target"}
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
        speed = speed_ups.get(arm.name)
        metric = next((run.primary_metric for run in finished if run.primary_metric is not None), None)
        compute, wait, communication = _shares(study, arm, activities.get(arm.name, ()))
        found.append(
            ArmRow(
                arm=arm.name,
                reached=None if curve is None else curve.reached,
                n=len(runs),
                median_seconds=None if curve is None else curve.median,
                restricted_mean=None if curve is None else curve.restricted_mean,
                speed_up=None if speed is None else speed.ratio,
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
    """Mean loss of `runs` at the largest position that all finished runs of the group reached."""
    ends = [end_of(run.run, column) for run in everything if run.run is not None and not run.diverged]
    known = [end for end in ends if math.isfinite(end)]
    if not known or not runs:
        return None
    worst = worst_loss(everything)
    return interval_over(loss_or_worst(run, column, min(known), worst) for run in runs)


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
    return _rate_of({**arm.settings, **(arm.chosen or {})}) if not rates else None


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
                settings=_texts({**arm.settings, **(arm.chosen or {})}),
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


def hardware_rows(study: Study, problems: list[str]) -> tuple[HardwareRow, ...]:
    """Table 4: the distinct environments of all runs; what differs by arm on purpose (workers) is not in them."""
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()
    for run in study.runs:
        if run.run is None:
            continue
        path = run.run.path / "environment.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{run.name}: environment.json cannot be read: {error}")
            continue
        if isinstance(content, dict):
            counts[_environment(content)] += 1
        else:
            problems.append(f"{run.name}: environment.json is damaged: not an object")
    ordered = sorted(counts, key=lambda values: (-counts[values], values))
    return tuple(HardwareRow(counts[values], values) for values in ordered)


def _environment(content: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    names = {
        "cpu": "processor",
        "cores": "cores",
        "threads_per_worker": "threads per worker",
        "device": "device",
        "platform": "platform",
        "python": "python",
        "commit": "commit",
    }
    values = [(label, str(content[key])) for key, label in names.items() if content.get(key) is not None]
    if content.get("modified"):
        values.append(("working tree", "modified"))
    versions = content.get("versions")
    if isinstance(versions, Mapping):
        values += [(str(name), str(version)) for name, version in sorted(versions.items())]
    return tuple(values)


def run_rows(study: Study, in_tests: frozenset[str], left_out: Sequence[LeftOut]) -> tuple[RunRow, ...]:
    """Every run, planned or found, with what became of it."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in left_out:
        reasons[item.name].append(item.reason)
    found = [_run_row(study, run, run.name in in_tests, reasons[run.name]) for run in study.runs]
    known = {row.name for row in found}
    for aside in study.set_aside:
        if aside.name not in known:
            run = aside.run or StudyRun(aside.name, "", "", None)
            found.append(_run_row(study, run, False, [*reasons[aside.name], aside.reason]))
    return tuple(found)


def _run_row(study: Study, run: StudyRun, in_tests: bool, reasons: Sequence[str]) -> RunRow:
    summary = {} if run.run is None else run.run.summary
    remarks = [*reasons, *[run.unusable_because] * bool(run.stage and run.unusable_because)]
    remarks += [] if run.run is None else run.run.problems
    arm = next((arm for arm in study.arms if arm.name == run.arm), None)
    exists = run.run is not None or not run.stage
    return RunRow(
        name=run.name,
        exists=exists,
        arm=run.arm,
        stage=run.stage,
        seed=run.seed,
        replicate=run.replicate,
        finetune_seed=run.finetune_seed,
        parent=run.parent or "",
        status=run.status if run.stage else "SET ASIDE",
        loss=summary.get("final_eval_loss"),
        score=next((run.run.metrics[name] for name in SCORES if name in run.run.metrics), None) if run.run else None,
        train_seconds=summary.get("train_seconds"),
        num_samples=summary.get("num_samples"),
        learning_rate=None if run.run is None else run.run.learning_rate,
        clock=str(summary.get("clock") or (arm.clock if arm is not None and run.stage != "finetune" else "")),
        from_scratch=summary.get("from_scratch"),
        oversubscribed=run.run is not None and run.run.oversubscribed,
        in_tests=in_tests,
        remark="; ".join(dict.fromkeys(remarks)),
    )


def _texts(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(key), str(value)) for key, value in settings.items() if value is not None))


def _rate_of(settings: Mapping[str, Any]) -> float | None:
    rate = settings.get("learning_rate")
    return float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) else None
