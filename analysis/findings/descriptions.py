"""What a report draws without a test: curves, times to targets, throughput, trends, delays, timelines, fronts.

Every function takes the runs in scope (`Scope`), so that losses of different data and seconds of different clocks never
meet in one picture or mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy

from analysis.findings.comparisons import Comparison
from analysis.findings.values import (
    Band,
    Curve,
    CurvePanel,
    DelayGap,
    DelayHistogram,
    FitResult,
    Group,
    LeftOut,
    ParetoPanel,
    ParetoPoint,
    ReachedCurve,
    ReachedPanel,
    Scaling,
    ScalingPoint,
    SeedCurve,
    Sensitivity,
    SensitivityPoint,
    TestRow,
    Timeline,
    TimelineSpan,
    Trend,
)
from analysis.statistics.intervals import Interval, Refused, t_interval
from analysis.statistics.scaling import (
    Fit,
    aicc_difference,
    amdahl_interval,
    fit_amdahl,
    fit_usl,
    hypervolume,
    pareto,
    pareto_share,
    slopes,
    usl_interval,
)
from analysis.statistics.time_to_target import (
    kaplan_meier,
    log_rank,
    loss_at,
    restricted,
    restricted_times,
    speed_up,
    target_grid,
)
from analysis.study.curves import Column, budget_of, curve_of, end_of, improvement_of, time_to, worst_loss
from analysis.study.run import Run
from analysis.study.types import MEASURED, Arm, Study, StudyRun
from asyncsgd.records.events import read_events
from asyncsgd.records.totals import Delays

Model = Literal["amdahl", "usl"]
MODELS: tuple[Model, Model] = ("amdahl", "usl")
GRID_POINTS = 200
"""A mean curve has at most so many points: more are not seen."""
FIT_RESAMPLES = 199
TIMELINE_SECONDS = 2.0
TIMELINE_GRADIENTS = 6
"""A timeline of a virtual clock shows about so many gradients of a worker."""
TARGET_SHARES = (0.5, 0.8, 0.9, 0.95, 0.98)


@dataclasses.dataclass(frozen=True)
class Scope:
    """The test runs that may enter a picture or a mean, by arm, and the group of every arm."""

    groups: tuple[Group, ...]
    shown: Mapping[str, tuple[StudyRun, ...]]
    """All runs of an arm that have a folder, failed ones too; evaluated on the data of their group."""
    usable: Mapping[str, tuple[StudyRun, ...]]
    """Those with a result, first replicates only."""
    left_out: tuple[LeftOut, ...]

    def group_of(self, arm: str) -> Group | None:
        return next((group for group in self.groups if arm in group.arms), None)


def scope_of(study: Study, groups: Sequence[Group]) -> Scope:
    """Choose the runs that may be shown together: in every group those on the data of its reference."""
    shown, usable, left_out = {}, {}, []
    for group in groups:
        runs = {arm: [run for run in study.of("test", arm) if run.run is not None] for arm in group.arms}
        main = _main_evaluation_set(runs, group)
        for arm, of_arm in runs.items():
            kept = []
            for run in of_arm:
                assert run.run is not None
                told = run.run.evaluation_set
                if told is not None and told != main:
                    reason = (
                        f"evaluated on other data ({told}) than {group.name} ({main}): in no picture or mean with it"
                    )
                    left_out.append(LeftOut(run.name, reason))
                else:
                    kept.append(run)
            shown[arm] = tuple(kept)
            usable[arm] = tuple(run for run in kept if run.usable and run.replicate == 0)
    return Scope(tuple(groups), shown, usable, tuple(left_out))


def _main_evaluation_set(runs: Mapping[str, Sequence[StudyRun]], group: Group) -> str | None:
    first = runs.get(group.reference or "", ())
    for candidates in (first, [run for of_arm in runs.values() for run in of_arm]):
        told = Counter(run.run.evaluation_set for run in candidates if run.run and run.run.evaluation_set)
        if told:
            return sorted(told, key=lambda one: (-told[one], one))[0]
    return None


# ---- curves ------------------------------------------------------------------------------------------------


def curve_panels(scope: Scope) -> tuple[CurvePanel, ...]:
    """Loss versus seconds and versus samples, per group."""
    panels = []
    axes: tuple[tuple[Literal["seconds", "samples"], Column], ...] = (
        ("seconds", "train_seconds"),
        ("samples", "total_samples"),
    )
    for group in scope.groups:
        for axis, column in axes:
            curves = [_curve(scope, arm, column) for arm in group.arms]
            curves = [curve for curve in curves if curve.seeds]
            if not curves:
                continue
            runs = [run for arm in group.arms for run in scope.shown[arm]]
            notes = []
            if axis == "seconds" and any(run.run is not None and run.run.oversubscribed for run in runs):
                notes.append("timings from an oversubscribed machine: not a speed comparison")
            ended = sum(run.diverged for run in runs)
            notes += [f"the curves of runs that diverged ({ended}) end where they did"] * (ended > 0)
            panels.append(
                CurvePanel(
                    group=group.name,
                    axis=axis,
                    x_label=group.seconds_label if axis == "seconds" else "samples",
                    y_label=group.loss_label,
                    target=group.target,
                    curves=tuple(curves),
                    notes=tuple(notes),
                )
            )
    return tuple(panels)


def _curve(scope: Scope, arm: str, column: Column) -> Curve:
    seeds = []
    for run in scope.shown[arm]:
        assert run.run is not None
        x, y = curve_of(run.run, column)
        if len(x):
            seeds.append(SeedCurve(run.name, run.seed, run.replicate, run.status, _floats(x), _floats(y)))
    finished = [run.run for run in scope.usable[arm] if run.run is not None and not run.diverged]
    return Curve(arm, tuple(seeds), band_of([curve_of(run, column) for run in finished]))


def band_of(curves: Sequence[tuple[Any, Any]]) -> Band | None:
    """Mean and 95 % t interval of curves (x, y), over the part of x that all of them cover.

    >>> one, two = numpy.array([0.0, 2.0]), numpy.array([0.0, 4.0])
    >>> band = band_of([(one, numpy.array([4.0, 0.0])), (two, numpy.array([4.0, 0.0]))])
    >>> band.x, band.mean, band.n
    ((0.0, 2.0), (4.0, 1.0), 2)
    """
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:
        return None
    grid = numpy.unique(numpy.concatenate([x for x, _ in curves]))
    grid = grid[(first <= grid) & (grid <= last)]
    if len(grid) > GRID_POINTS:
        grid = numpy.linspace(first, last, GRID_POINTS)
    values = numpy.array([numpy.interp(grid, x, y) for x, y in curves])
    intervals = [t_interval(column) for column in values.T]
    enough = len(curves) > 1
    return Band(
        x=_floats(grid),
        mean=tuple(interval.estimate for interval in intervals),
        low=tuple(interval.low for interval in intervals if interval.low is not None) if enough else (),
        high=tuple(interval.high for interval in intervals if interval.high is not None) if enough else (),
        level=0.95,
        n=len(curves),
    )


# ---- time to target ----------------------------------------------------------------------------------------


def reached_panels(scope: Scope, generator: numpy.random.Generator) -> tuple[ReachedPanel, ...]:
    """Who reached the declared target when, per group."""
    panels = []
    for group in scope.groups:
        runs = [run for arm in group.arms for run in scope.usable[arm]]
        if group.target is None or not runs:
            continue
        budget, reason = budget_of(runs, group.target)
        curves, gaps = [], []
        for arm in group.arms:
            if scope.usable[arm]:
                curves.append(_reached_curve(arm, scope.usable[arm], group.target, budget))
                gaps += [time_to(run, group.target)[1] for run in scope.usable[arm]]
        spacings = [gap for gap in gaps if gap]
        notes = []
        if any(run.run is not None and run.run.oversubscribed for run in runs):
            notes.append("timings from an oversubscribed machine: not a speed comparison")
        panels.append(
            ReachedPanel(
                group=group.name,
                target=group.target,
                target_from=group.target_from,
                budget=budget,
                budget_reason=reason,
                spacing=statistics.median(spacings) if spacings else None,
                curves=tuple(curves),
                log_rank_p=tuple(_log_ranks(scope, group, generator)),
                notes=tuple(notes),
            )
        )
    return tuple(panels)


def _observed(runs: Iterable[StudyRun], target: float) -> tuple[list[float], list[bool]]:
    """Time of every run, and whether it is the target's: else it is its end, and inf for a run that diverged."""
    times, observed = [], []
    for run in runs:
        assert run.run is not None
        at = time_to(run, target)[0]
        observed.append(math.isfinite(at))
        times.append(at if math.isfinite(at) or run.diverged else end_of(run.run, "train_seconds"))
    return times, observed


def _reached_curve(arm: str, runs: Sequence[StudyRun], target: float, budget: float | None) -> ReachedCurve:
    times, observed = _observed(runs, target)
    reached = sum(observed)
    curve = kaplan_meier(times, observed)
    to_target = [time if seen else math.inf for time, seen in zip(times, observed, strict=True)]
    median = float(numpy.median(to_target))
    return ReachedCurve(
        arm=arm,
        n=len(runs),
        reached=reached,
        seconds=(0.0, *curve.times),
        share=(0.0, *(1 - probability for probability in curve.probability)),
        at_risk=(len(runs), *curve.at_risk),
        censored=tuple(sorted(t for t, seen in zip(times, observed, strict=True) if not seen and math.isfinite(t))),
        median=median if math.isfinite(median) else None,
        restricted_mean=None if budget is None else t_interval(restricted(to_target, budget)),
    )


def _log_ranks(scope: Scope, group: Group, generator: numpy.random.Generator) -> Iterator[tuple[str, float]]:
    if group.reference is None or group.target is None:
        return
    theirs = {run.seed: run for run in scope.usable[group.reference]}
    for arm in group.arms[1:]:
        ours = {run.seed: run for run in scope.usable[arm]}
        seeds = sorted(seed for seed in set(ours) & set(theirs) if seed is not None)
        if not seeds:
            continue
        found = log_rank(
            *_observed([ours[seed] for seed in seeds], group.target),
            *_observed([theirs[seed] for seed in seeds], group.target),
            generator,
            paired=True,
        )
        yield arm, found.p


def sensitivities(
    study: Study, comparisons: Sequence[Comparison], generator: numpy.random.Generator
) -> tuple[Sensitivity, ...]:
    """S13: the speed-up of every comparison at the whole grid of targets.

    They are shares of what the registered pilot runs improved; else of what the compared runs themselves did, which was
    not known before.
    """
    pilots_of = {} if study.registration is None else study.registration.pilots
    found = []
    for comparison in comparisons:
        if comparison.control:
            continue
        pilots = pilots_of.get(comparison.reference.name)
        improvement = improvement_of([pair.reference for pair in comparison.pairs])
        if pilots is not None:
            improvement = (pilots.first_loss, pilots.best_loss)
        if improvement is None:
            continue
        points = []
        for share, target in target_grid(*improvement, shares=TARGET_SHARES).items():
            ours = [time_to(pair.treatment, target)[0] for pair in comparison.pairs]
            theirs = [time_to(pair.reference, target)[0] for pair in comparison.pairs]
            budget, _ = budget_of(comparison.runs, target)
            ratio = None
            if budget is not None:
                ratio = restricted_times(ours, theirs, budget, generator).ratio
            points.append(
                SensitivityPoint(
                    share=share,
                    target=target,
                    speed_up=speed_up(ours, theirs, generator).ratio,
                    restricted_ratio=ratio,
                    reached_treatment=sum(map(math.isfinite, ours)),
                    reached_reference=sum(map(math.isfinite, theirs)),
                    n=len(ours),
                )
            )
        found.append(
            Sensitivity(
                comparison.name,
                comparison.treatment.name,
                comparison.reference.name,
                comparison.group.name,
                tuple(points),
                after_the_fact=pilots is None,
            )
        )
    return tuple(found)


# ---- workers -----------------------------------------------------------------------------------------------


def _lines(study: Study, scope: Scope) -> Iterator[tuple[tuple[str, str, str | None, int | None, Any], list[Arm]]]:
    """Arms that differ in their number of workers only, by what they share; sorted by workers."""
    lines: dict[tuple[str, str, str | None, int | None, Any], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        group = scope.group_of(arm.name)
        if group is not None and arm.num_workers is not None and scope.usable[arm.name]:
            lines[arm.algorithm, arm.clock, arm.speeds, arm.batch_size, group.variant].append(arm)
    for key, arms in lines.items():
        arms.sort(key=lambda arm: (arm.num_workers or 0, arm.name))
        for copies in itertools.zip_longest(*_by_workers(arms)):
            yield key, [arm for arm in copies if arm is not None]


def _by_workers(arms: Sequence[Arm]) -> list[list[Arm]]:
    """One list per number of workers; more than one arm in it means that settings differ that no key holds."""
    return [list(same) for _, same in itertools.groupby(arms, key=lambda arm: arm.num_workers)]


def scalings(study: Study, scope: Scope, generator: numpy.random.Generator) -> tuple[Scaling, ...]:
    """S10: throughput over workers, with the two laws where there are enough numbers of workers."""
    found = []
    for (algorithm, clock, speeds, batch, _), arms in _lines(study, scope):
        rates: dict[str, dict[int, float]] = {}
        for arm in arms:
            own = {run.seed: _rate(run) for run in scope.usable[arm.name] if not run.diverged}
            rates[arm.name] = {
                seed: rate for seed, rate in sorted(own.items(), key=str) if seed is not None and rate is not None
            }
        arms = [arm for arm in arms if rates[arm.name]]
        if not arms:
            continue
        points = tuple(
            ScalingPoint(
                arm=arm.name,
                num_workers=arm.num_workers or 0,
                throughput=t_interval(list(rates[arm.name].values())),
                per_seed=tuple(sorted(rates[arm.name].items())),
                oversubscribed=any(run.run is not None and run.run.oversubscribed for run in scope.usable[arm.name]),
            )
            for arm in arms
        )
        laws = tuple(_law(model, points) for model in MODELS)
        fits = tuple(_fit(model, law, points, generator) for model, law in zip(MODELS, laws, strict=True))
        amdahl, usl = laws
        difference = aicc_difference(amdahl, usl) if isinstance(amdahl, Fit) and isinstance(usl, Fit) else None
        unit = "samples/s" if clock == MEASURED else "samples/virtual s"
        found.append(Scaling(algorithm, clock, speeds, batch, unit, points, fits, difference))
    return tuple(found)


def _rate(run: StudyRun) -> float | None:
    rate = None if run.run is None else run.run.summary.get("samples_per_second")
    return rate if rate else None


def _law(model: Model, points: Sequence[ScalingPoint]) -> Fit | Refused:
    workers = [point.num_workers for point in points for _ in point.per_seed]
    rates = [rate for point in points for _, rate in point.per_seed]
    return (fit_amdahl if model == "amdahl" else fit_usl)(workers, rates)


def _fit(
    model: Model, fit: Fit | Refused, points: Sequence[ScalingPoint], generator: numpy.random.Generator
) -> FitResult:
    if isinstance(fit, Refused):
        return FitResult(model, fit.reason, (), (), None, None, (), ())
    common = sorted(set.intersection(*({seed for seed, _ in point.per_seed} for point in points)))
    intervals: tuple[tuple[str, Interval], ...] = ()
    if len(common) > 1:
        table = [[dict(point.per_seed)[seed] for point in points] for seed in common]
        distinct = [point.num_workers for point in points]
        of_model = amdahl_interval if model == "amdahl" else usl_interval
        resampled = of_model(distinct, table, generator, FIT_RESAMPLES)
        if not isinstance(resampled, Refused):
            intervals = tuple(resampled.items())
    parameters = [("gamma", fit.gamma), ("alpha", fit.alpha)]
    parameters += [("beta", fit.beta)] * (model == "usl")
    workers = [point.num_workers for point in points]
    grid = numpy.linspace(min(workers), max(workers), 60)
    return FitResult(
        model=model,
        refused="",
        parameters=tuple(parameters),
        intervals=intervals,
        peak=fit.peak,
        aicc=fit.aicc,
        x=_floats(grid),
        y=_floats(fit.throughput(grid)),
    )


def trends(study: Study, scope: Scope) -> tuple[Trend, ...]:
    """S8: does the loss at equal samples grow with the workers?"""
    found = []
    for (algorithm, clock, speeds, _, _), arms in _lines(study, scope):
        workers = tuple(arm.num_workers or 0 for arm in arms)
        if len(workers) < 2:
            continue
        refused, table = _trend_table(scope, arms)
        if not refused:
            slope = slopes([math.log2(count) for count in workers], table)
            refused = slope.too_few
        if refused:
            found.append(Trend(algorithm, clock, speeds, refused, workers, None, None, None))
        else:
            found.append(Trend(algorithm, clock, speeds, "", workers, slope.mean, slope.page_statistic, slope.page_p))
    return tuple(found)


def _trend_table(scope: Scope, arms: Sequence[Arm]) -> tuple[str, list[list[float]]]:
    """Losses at equal samples (seeds x workers), a diverged run being the worst of them; or why there are none."""
    runs = {arm.name: {run.seed: run for run in scope.usable[arm.name]} for arm in arms}
    everything = [run for of_arm in runs.values() for run in of_arm.values()]
    told = {run.run.evaluation_set for run in everything if run.run is not None}
    if len(told) > 1:
        return "its runs were evaluated on different data", []
    seeds = sorted(seed for seed in set.intersection(*(set(of_arm) for of_arm in runs.values())) if seed is not None)
    finished = [run.run for run in everything if run.run is not None and not run.diverged]
    if not seeds or not finished:
        return "no seed has a result at every number of workers", []
    common, worst = min(end_of(run, "total_samples") for run in finished), worst_loss(everything)
    table = [[loss_or_worst(runs[arm.name][seed], "total_samples", common, worst) for arm in arms] for seed in seeds]
    return "", [row for row in table if all(map(math.isfinite, row))]


def loss_or_worst(run: StudyRun, column: Column, position: float, worst: float) -> float:
    """The loss of a run at a position; `worst` for a run that diverged."""
    if run.diverged or run.run is None:
        return worst
    return loss_at(*curve_of(run.run, column), position)


# ---- events ------------------------------------------------------------------------------------------------


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
    for record in _events(run):
        for use in record.get("uses") or ():
            if isinstance(use, list) and len(use) == 2 and isinstance(use[1], int):
                delays[use[1]] += 1
        if record.get("kind") == "arrival":
            for key in seconds:
                value = record.get(f"{key}_seconds")
                if isinstance(value, int | float):
                    seconds[key] += value
    return Activity(delays, seconds["compute"], seconds["wait"], seconds["pull"] + seconds["push"])


def _events(run: Run) -> Iterator[dict[str, Any]]:
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
        flights = [record.get("flight_seconds") for record in _events(run) if record.get("kind") == "arrival"]
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
    """What workers and server did, laid backwards from every arrival as in experiments/timeline.py."""
    kinds: tuple[Literal["push", "compute", "pull", "wait"], ...] = ("push", "compute", "pull", "wait")
    for record in _events(run):
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


# ---- fronts ------------------------------------------------------------------------------------------------


def pareto_panels(study: Study, scope: Scope, generator: numpy.random.Generator) -> tuple[ParetoPanel, ...]:
    """S11: final loss against seconds of all arms and tuning trials under one clock, the same speeds, on the same data.

    The area (hypervolume) ends at the budget and the first loss of one reference arm, that of the first group that has
    one (the primary group comes first), so that another arm beside it changes nothing but what it adds.
    """
    panels: dict[tuple[str, str | None, str], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        group = scope.group_of(arm.name)
        if group is not None and scope.usable[arm.name]:
            told = [run.run.evaluation_set for run in scope.usable[arm.name] if run.run and run.run.evaluation_set]
            panels[arm.clock, arm.speeds, told[0] if told else ""].append(arm)
    found = []
    for (clock, speeds, evaluation_set), arms in panels.items():
        tests = _front({(arm.name, ()): scope.usable[arm.name] for arm in arms}, generator)
        if not tests:
            continue
        trials = _front(_trial_runs(study, arms, evaluation_set), generator)
        group = scope.group_of(arms[0].name)
        assert group is not None
        references = [other.reference for other in scope.groups if other.reference in {arm.name for arm in arms}]
        reference = references[0] if references else None
        corner = None if reference is None else _corner(scope.usable[reference])
        found.append(
            ParetoPanel(
                clock=clock,
                speeds=speeds,
                evaluation_set=evaluation_set,
                x_label=group.seconds_label,
                y_label=group.loss_label,
                points=(*tests, *trials),
                hypervolume=None
                if corner is None
                else hypervolume([point.seconds for point in tests], [point.loss for point in tests], corner),
                reference_point=corner,
                reference_arm=None if corner is None else reference,
            )
        )
    return tuple(found)


Tried = tuple[tuple[str, str], ...]
"""(key, value) of the settings of a tuning trial; empty for test runs."""


def _front(
    runs: Mapping[tuple[str, Tried], Sequence[StudyRun]], generator: numpy.random.Generator
) -> tuple[ParetoPoint, ...]:
    """One point for each (arm, trial), those that nobody is better than in both marked; sorted by seconds."""
    worst = worst_loss(run for of_point in runs.values() for run in of_point)
    places = {
        key: _places(of_point, worst)
        for key, of_point in runs.items()
        # what only diverged has no loss of its own, and must not stand on the front at 0 seconds
        if not all(run.diverged for run in of_point)
    }
    places = {key: of_point for key, of_point in places.items() if of_point}
    if not places:
        return ()
    seconds = [_mean(place[0] for place in of_point.values()) for of_point in places.values()]
    losses = [_mean(place[1] for place in of_point.values()) for of_point in places.values()]
    front = pareto(seconds, losses)
    shares = _front_shares(list(places.values()), generator)
    points = [
        ParetoPoint(
            arm=arm,
            seconds=seconds[place],
            loss=losses[place],
            on_front=bool(front[place]),
            share=None if shares is None else shares[place],
            n=len(places[arm, trial]),
            trial=trial,
        )
        for place, (arm, trial) in enumerate(places)
    ]
    return tuple(sorted(points, key=lambda point: (point.seconds, point.loss, point.arm, point.trial)))


def _trial_runs(study: Study, arms: Sequence[Arm], evaluation_set: str) -> dict[tuple[str, Tried], list[StudyRun]]:
    """The tuning runs on the same data, by arm and by what they tried."""
    found: dict[tuple[str, Tried], list[StudyRun]] = defaultdict(list)
    for arm in arms:
        for run in study.of("tuning", arm.name):
            if run.run is None or not run.usable or run.trial is None:
                continue
            if (run.run.evaluation_set or "") == evaluation_set and run.trial < len(arm.trials):
                tried = tuple(sorted((key, str(value)) for key, value in arm.trials[run.trial].settings.items()))
                found[arm.name, tried].append(run)
    return found


def _corner(runs: Sequence[StudyRun]) -> tuple[float, float] | None:
    """Where an area of hypervolume ends: mean seconds of the whole runs, and mean loss of their first evaluations."""
    curves = [curve_of(run.run, "train_seconds") for run in runs if run.run is not None and not run.diverged]
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    return _mean(float(x[-1]) for x, _ in curves), _mean(float(y[0]) for _, y in curves)


def _places(runs: Sequence[StudyRun], worst: float) -> dict[int, tuple[float, float]]:
    """(seconds, final loss) by seed; a diverged run has the worst loss."""
    places = {}
    for run in runs:
        if run.run is None or run.seed is None:
            continue
        x, y = curve_of(run.run, "train_seconds")
        loss = worst if run.diverged else float(y[-1]) if len(y) else math.nan
        if len(x) and math.isfinite(loss):
            places[run.seed] = (float(x[-1]), loss)
    return places


def _front_shares(
    places: Sequence[Mapping[int, tuple[float, float]]], generator: numpy.random.Generator
) -> list[float] | None:
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in places)))
    if len(seeds) < 2:
        return None
    seconds = [[of_arm[seed][0] for of_arm in places] for seed in seeds]
    losses = [[of_arm[seed][1] for of_arm in places] for seed in seeds]
    return [float(share) for share in pareto_share(seconds, losses, generator)]


# ---- small things ------------------------------------------------------------------------------------------


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
