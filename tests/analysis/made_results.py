"""Results as a study of eight seeds would give them, drawn from a fixed seed: what the page's tests show and look at.

Nothing here is computed by the library, so that a page can be tested without the statistics; `small` is the least that
a page has to cope with, `full` has every part of a report, both clocks, and a run of every ending.
"""

from __future__ import annotations

import dataclasses
import math

import numpy

from analysis.findings.comparisons import FROM_SCRATCH, Group, LeftOut
from analysis.findings.curves import Band, Curve, CurvePanel, SeedCurve
from analysis.findings.delays import DelayGap, DelayHistogram
from analysis.findings.downstream import CheckScore, ClassScore, DownstreamArm
from analysis.findings.fronts import ParetoPanel, ParetoPoint
from analysis.findings.judging import EquivalenceResult, RestrictedTimes, SpeedUpResult, TestRow
from analysis.findings.results import RegistrationInfo, Results
from analysis.findings.sentence import Headline, Tile
from analysis.findings.tables import (
    ArmCounts,
    ArmInfo,
    ArmRow,
    HardwareRow,
    RunRow,
    ScheduleShare,
    TrialPoint,
    TuningResult,
)
from analysis.findings.timelines import Timeline, TimelineSpan
from analysis.findings.times import ReachedCurve, ReachedPanel, Sensitivity, SensitivityPoint
from analysis.findings.trust import TrustItem
from analysis.findings.workers import FitResult, Scaling, ScalingPoint, Trend
from analysis.statistics.intervals import Interval

SEEDS = range(100, 108)
ALGORITHMS = ("sync", "async", "ringmaster", "m_sync")
LABELS = {"measured": "training seconds", "virtual": "virtual seconds"}
LOSS = "evaluation loss (nats per masked token)"
FUNCTIONALITIES = (
    "derog_neg_emote_h",
    "derog_neg_attrib_h",
    "threat_dir_h",
    "threat_norm_h",
    "slur_h",
    "slur_homonym_nh",
    "profanity_nh",
    "negate_neg_nh",
    "counter_quote_nh",
    "target_group_nh",
    "spell_char_swap_h",
    "spell_leet_h",
)


def interval(values, spread=None, n=None):
    values = numpy.atleast_1d(numpy.asarray(values, dtype=float))
    centre = float(values.mean())
    half = spread if spread is not None else 2.36 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, 0.95, n or len(values))


def group_name(workers, clock):
    straggler = ", slow:worker=0,factor=3" * (clock == "virtual")
    return f"{workers} workers, {clock} clock{straggler}, batch 16"


def arm_name(algorithm, workers, clock):
    return f"{algorithm}-w{workers}" + "-virtual" * (clock == "virtual")


def arm_info(algorithm, workers, clock, *, from_scratch=False):
    label = f"{algorithm}, {workers} workers, {clock} clock" + f", {FROM_SCRATCH}" * from_scratch
    return ArmInfo(
        name=arm_name(algorithm, workers, clock),
        label=label,
        algorithm=algorithm,
        mode="sync" if algorithm == "sync" else "async",
        rule=algorithm,
        num_workers=workers,
        clock=clock,
        speeds="slow:worker=0,factor=3" if clock == "virtual" else None,
        batch_size=16,
        learning_rate=0.001,
        settings=(("learning_rate", "0.001"), ("rule", algorithm)),
        reference=algorithm == "sync",
        from_scratch=from_scratch,
        group=group_name(workers, clock),
        oversubscribed=False,
    )


def made_group(workers, clock, algorithms, primary=False):
    return Group(
        name=group_name(workers, clock),
        num_workers=workers,
        clock=clock,
        speeds="slow:worker=0,factor=3" if clock == "virtual" else None,
        batch_size=16,
        variant=(),
        reference=arm_name("sync", workers, clock),
        arms=tuple(arm_name(algorithm, workers, clock) for algorithm in algorithms),
        primary=primary,
        seconds_label=LABELS[clock],
        loss_label=LOSS,
        target=5.42,
        target_from="95 % of the improvement of 2 pilot runs",
        evaluation_sets=("f00dfeed",),
    )


def seconds_of(algorithm, workers, clock):
    per_sample = {"sync": 0.030, "async": 0.017, "ringmaster": 0.018, "m_sync": 0.021}.get(algorithm, 0.025)
    return 3200 * per_sample / workers * (3.0 if clock == "virtual" else 1.7)


def seed_curves(generator, algorithm, workers, clock, axis, ending="DONE"):
    curves = []
    final = 5.30 + {"sync": 0.0, "async": 0.02 * workers / 4, "ringmaster": 0.008, "m_sync": 0.004}.get(algorithm, 0.0)
    total = seconds_of(algorithm, workers, clock)
    for seed in SEEDS:
        shift = generator.normal(0, 0.02)
        t = numpy.linspace(0, 1, 21)
        loss = final + shift + 1.9 * numpy.exp(-5.5 * t) + generator.normal(0, 0.006, 21)
        x = t * (total * (1 + generator.normal(0, 0.02)) if axis == "seconds" else 3200)
        status = ending if seed == SEEDS[-1] else "DONE"
        if status == "DIVERGED":
            x, loss = x[:8], loss[:8] + numpy.linspace(0, 9, 8)
        name = f"test/{arm_name(algorithm, workers, clock)}/s{seed}"
        curves.append(SeedCurve(name, seed, 0, status, tuple(map(float, x)), tuple(map(float, loss))))
    return tuple(curves)


def band(curves):
    done = [curve for curve in curves if curve.status == "DONE"]
    end = min(curve.x[-1] for curve in done)
    grid = numpy.linspace(0, end, 41)
    table = numpy.array([numpy.interp(grid, curve.x, curve.loss) for curve in done])
    half = 2.36 * table.std(axis=0, ddof=1) / math.sqrt(len(done))
    mean = table.mean(axis=0)
    return Band(*(tuple(map(float, line)) for line in (grid, mean, mean - half, mean + half)), 0.95, len(done))


def curve_panel(generator, workers, clock, axis, algorithms):
    curves = []
    for algorithm in algorithms:
        ending = "DIVERGED" if algorithm == "async" and workers == 8 else "DONE"
        seeds = seed_curves(generator, algorithm, workers, clock, axis, ending)
        curves.append(Curve(arm_name(algorithm, workers, clock), seeds, band(seeds)))
    label = LABELS[clock] if axis == "seconds" else "samples"
    return CurvePanel(group_name(workers, clock), axis, label, LOSS, 5.42, tuple(curves), ())


def reached_panel(generator, workers, clock, algorithms):
    budget = 1.1 * seconds_of("sync", workers, clock)
    curves = []
    for algorithm in algorithms:
        short = algorithm == "async" and workers == 8
        times = numpy.sort(seconds_of(algorithm, workers, clock) * generator.uniform(0.55, 0.9, 8))[: 6 if short else 8]
        curves.append(
            ReachedCurve(
                arm=arm_name(algorithm, workers, clock),
                n=8,
                reached=len(times),
                seconds=(0.0, *map(float, times)),
                share=(0.0, *(place / 8 for place in range(1, len(times) + 1))),
                at_risk=(8, *(9 - place for place in range(1, len(times) + 1))),
                censored=(float(times[-1] * 1.2),) if short else (),
                median=float(numpy.median(times)),
                restricted_mean=interval(times, n=8),
            )
        )
    return ReachedPanel(
        group=group_name(workers, clock),
        target=5.42,
        target_from="95 % of the improvement of 2 pilot runs",
        budget=budget,
        budget_reason="the shortest training time of a run of the group that came to its end",
        spacing=budget / 22,
        curves=tuple(curves),
        log_rank_p=((arm_name("async", workers, clock), 0.0078),),
        notes=("2 of 8 runs of async never reached it",) if workers == 8 else (),
    )


def sensitivity(workers, clock, algorithm):
    points = []
    for share, ratio in zip((0.5, 0.8, 0.9, 0.95, 0.98), (1.71, 1.6, 1.5, 1.42, 1.1), strict=True):
        few = share == 0.98
        points.append(
            SensitivityPoint(
                share,
                7.2 - 1.9 * share,
                interval(ratio, 0.12 + few * 0.2, 5 if few else 8),
                1 / ratio,
                5 if few else 8,
                8,
                8,
            )
        )
    name = f"{algorithm} vs sync, {workers} workers, {clock} clock"
    treatment, reference = arm_name(algorithm, workers, clock), arm_name("sync", workers, clock)
    return Sensitivity(
        name, treatment, reference, group_name(workers, clock), tuple(points), after_the_fact=clock == "measured"
    )


def test_row(workers, clock, algorithm, endpoint, family, word, p, estimate):
    time = endpoint == "time_to_target"
    unit = ("virtual s" if clock == "virtual" else "s") if time else "nats"
    label = {
        "time_to_target": f"time to the target, restricted to 66.0 s ({unit})",
        "loss_at_equal_samples": "loss at equal samples (nats)",
        "loss_at_equal_seconds": "loss at equal seconds (nats)",
    }[endpoint]
    scale = 10.0 if time else 0.02
    return TestRow(
        comparison=f"{algorithm} vs sync, {workers} workers, {clock} clock",
        treatment=arm_name(algorithm, workers, clock),
        reference=arm_name("sync", workers, clock),
        group=group_name(workers, clock),
        endpoint=endpoint,
        endpoint_label=label,
        unit=unit,
        family=family,
        family_size=3,
        alpha=0.05,
        n=8,
        estimate=interval(estimate, 0.4 * scale, 8),
        reference_mean=46.2 if time else 5.301,
        treatment_mean=(46.2 if time else 5.301) + estimate,
        relative=0.7,
        effect=estimate / scale,
        correlation=0.82,
        test="exact sign-flip",
        p=p,
        p_holm=min(1.0, 3 * p),
        least_p_holm=3 * 2 / 2**8,
        t_p=p * 0.8,
        margin=None if time else 0.02,
        margin_share=None if time else 0.011,
        equivalence=None
        if time
        else EquivalenceResult(0.02, interval(estimate, 0.3 * scale, 8), 0.031, True, True, 0.01),
        speed_up=SpeedUpResult(interval(1.42, 0.2, 8), p, 8, 0) if time else None,
        times=RestrictedTimes(66.0, False, 8, 8, 0, 0, ratio=interval(1.42, 0.2, 8)) if time else None,
        share=Interval(1.0, 0.6306, 1.0, 0.95, 8),
        wins=8,
        ties=0,
        convincing=True,
        word=word,
        reason=f"{word}: p after Holm's correction is {min(1.0, 3 * p):.3f}",
        notes=("1 of 8 treatment runs diverged and counts with the worst finite loss",) if word == "worse" else (),
    )


test_row.__test__ = False  # type: ignore[attr-defined]


def scaling(generator, clock, workers):
    made = []
    for algorithm in ("sync", "async", "ringmaster"):
        points = []
        for count in workers:
            rate = 31.0 * count / (1 + (0.18 if algorithm == "sync" else 0.04) * (count - 1))
            values = rate * (1 + generator.normal(0, 0.02, 8))
            pairs = tuple(zip(SEEDS, map(float, values), strict=True))
            points.append(
                ScalingPoint(
                    arm_name(algorithm, count, clock), count, interval(values), pairs, clock == "measured" and count > 2
                )
            )
        if len(workers) >= 6:
            grid = numpy.linspace(1, max(workers), 40)
            alpha = 0.18 if algorithm == "sync" else 0.04
            line = 31.0 * grid / (1 + alpha * (grid - 1))
            fits = (
                FitResult(
                    "amdahl",
                    "",
                    (("gamma", 31.0), ("sigma", alpha)),
                    (("sigma", interval(alpha, 0.02, 8)),),
                    None,
                    -12.3,
                    tuple(map(float, grid)),
                    tuple(map(float, line)),
                ),
                FitResult(
                    "usl",
                    "",
                    (("gamma", 31.0), ("alpha", alpha), ("beta", 0.001)),
                    (("alpha", interval(alpha, 0.02, 8)),),
                    28.6,
                    -14.1,
                    tuple(map(float, grid)),
                    tuple(map(float, line)),
                ),
            )
        else:
            fits = (
                FitResult(
                    "usl", f"{len(workers)} distinct numbers of workers, the law needs 6", (), (), None, None, (), ()
                ),
            )
        unit = "samples/virtual s" if clock == "virtual" else "samples/s"
        made.append(Scaling(algorithm, clock, None, 16, unit, tuple(points), fits, -1.8 if len(points) >= 6 else None))
    return tuple(made)


def histogram(generator, algorithm, workers, clock):
    if algorithm in ("sync", "m_sync"):
        delays = numpy.zeros(1600, dtype=int)
    else:
        cap = workers - 1 if algorithm == "ringmaster" else 10**6
        delays = numpy.minimum(generator.poisson(workers - 1, 1600), cap)
    values, counts = numpy.unique(delays, return_counts=True)
    return DelayHistogram(
        arm_name(algorithm, workers, clock),
        tuple(map(int, values)),
        tuple(map(int, counts)),
        8,
        float(delays.mean()),
        float(numpy.percentile(delays, 50)),
        float(numpy.percentile(delays, 95)),
        int(delays.max()),
    )


def timeline(generator, algorithm, workers, clock):
    spans = []
    begin, window = 20.0, 2.0
    for worker in range(workers):
        at = begin - generator.uniform(0, 0.3)
        while at < begin + window:
            compute = 0.9 if worker == 0 else float(generator.uniform(0.26, 0.34))
            spans.append(TimelineSpan(worker, "pull", at, 0.02))
            spans.append(TimelineSpan(worker, "compute", at + 0.02, compute))
            spans.append(TimelineSpan(worker, "push", at + 0.02 + compute, 0.03))
            spans.append(TimelineSpan(-1, "apply", at + 0.05 + compute, 0.015))
            end = at + 0.07 + compute
            wait = 0.95 - (end - at) if algorithm == "sync" else 0.0
            if wait > 0:
                spans.append(TimelineSpan(worker, "wait", end, wait))
            at = end + max(0.0, wait)
    name = arm_name(algorithm, workers, clock)
    return Timeline(name, f"test/{name}/s100", clock, begin, window, LABELS[clock], tuple(range(workers)), tuple(spans))


def tuned(generator, arm):
    rates = (0.0001, 0.0003, 0.001, 0.003, 0.01)
    trials = []
    for rate in rates:
        best = 5.31 + 0.11 * (math.log10(rate) + 2.9) ** 2
        losses = tuple(
            None if rate == 0.01 and seed == 1 and "async" in arm else float(best + generator.normal(0, 0.015))
            for seed in (0, 1)
        )
        score = None if None in losses else float(numpy.mean([loss for loss in losses if loss is not None]))
        trials.append(TrialPoint(rate, (("learning_rate", f"{rate:g}"),), losses, (0, 1), score, rate == 0.001))
    best_of = tuple((k, 5.32 + 0.2 / k) for k in range(1, 6))
    return TuningResult(arm, tuple(trials), (("learning_rate", "0.001"),), False, 10, best_of)


def downstream_arm(generator, algorithm, workers, clock, *, baseline=False):
    mean = 0.561 if baseline else {"sync": 0.612, "async": 0.604, "ringmaster": 0.609, "m_sync": 0.611}[algorithm]
    seeds = tuple((seed, float(mean + generator.normal(0, 0.008))) for seed in (SEEDS[:1] if baseline else SEEDS))
    scores = [score for _, score in seeds]
    f1 = Interval(scores[0], None, None, 0.95, 1) if baseline else interval(scores)
    checks = tuple(
        CheckScore(
            name,
            Interval(0.4, None, None, 0.95, 1) if baseline else interval(min(0.95, generator.uniform(0.2, 1)), 0.06, 8),
            140,
        )
        for name in FUNCTIONALITIES
    )
    return DownstreamArm(
        arm="baseline" if baseline else arm_name(algorithm, workers, clock),
        label="no intermediate training" if baseline else f"{algorithm}, {workers} workers, {clock} clock",
        baseline=baseline,
        from_scratch=False,
        data="hate_davidson",
        num_finetuning_runs=3 if baseline else 24,
        macro_f1=f1,
        accuracy=dataclasses.replace(
            f1, estimate=f1.estimate + 0.25, low=f1.low and f1.low + 0.25, high=f1.high and f1.high + 0.25
        ),
        per_seed=seeds,
        classes=tuple(
            ClassScore(label, interval(value, 0.02, 8))
            for label, value in (("hate", 0.31), ("offensive", 0.9), ("neither", 0.72))
        ),
        labels=("hate", "offensive", "neither"),
        confusion=((920, 1790, 290), (700, 36800, 1200), (150, 1500, 6650)),
        hatecheck=None if baseline else interval(0.58, 0.02, 8),
        functionalities=checks,
    )


def arm_row(generator, info):
    total = seconds_of(info.algorithm, info.num_workers, info.clock)
    synchronous = info.algorithm == "sync"
    return ArmRow(
        arm=info.name,
        reached=8,
        n=8,
        median_seconds=total * 0.7,
        restricted_mean=interval(total * 0.71, total * 0.03, 8),
        speed_up=None if synchronous else interval(1.42, 0.21, 8),
        loss_at_equal_samples=interval(5.304 + generator.normal(0, 0.01), 0.012, 8),
        loss_at_equal_seconds=interval(5.31 + generator.normal(0, 0.01), 0.012, 8),
        metric_name="accuracy",
        metric=interval(0.243, 0.004, 8),
        train_seconds=interval(total, total * 0.02, 8),
        updates=interval(200 / info.num_workers if synchronous else 200, 0, 8),
        samples_per_update=16.0 * (info.num_workers if synchronous else 1),
        samples_per_second=interval(3200 / total, 0.9, 8),
        delay_mean=0.0 if synchronous else 2.9,
        delay_p50=0 if synchronous else 3,
        delay_p95=0 if synchronous else 6,
        delay_max=0 if synchronous else 9,
        compute_share=0.55 if synchronous else 0.93,
        wait_share=0.40 if synchronous else 0.01,
        communication_share=0.05,
        learning_rate=0.001,
        from_scratch=False,
        num_diverged=1 if info.algorithm == "async" and info.num_workers == 8 else 0,
    )


def full(seed=0):
    """A study with everything: 4 and 8 workers on the virtual clock, 2 measured, tuning and fine-tuning."""
    generator = numpy.random.default_rng(seed)
    places = [(4, "virtual", ALGORITHMS), (8, "virtual", ALGORITHMS), (2, "measured", ALGORITHMS[:3])]
    arms = [arm_info(algorithm, workers, clock) for workers, clock, names in places for algorithm in names]
    rows = [
        test_row(4, "virtual", "async", "time_to_target", "primary", "better", 0.0078, -13.9),
        test_row(4, "virtual", "ringmaster", "time_to_target", "primary", "better", 0.0078, -12.1),
        test_row(4, "virtual", "m_sync", "time_to_target", "primary", "undecided", 0.11, -4.0),
        test_row(4, "virtual", "async", "loss_at_equal_samples", "secondary", "equivalent", 0.0313, 0.0124),
        test_row(8, "virtual", "async", "loss_at_equal_samples", "secondary", "worse", 0.0078, 0.0391),
        test_row(2, "measured", "async", "time_to_target", "secondary", "better", 0.0078, -10.2),
        test_row(2, "measured", "ringmaster", "time_to_target", "secondary", "undecided", 0.25, -2.2),
        test_row(
            8,
            "virtual",
            "ringmaster",
            "loss_at_equal_seconds",
            "exploratory",
            "different but negligible",
            0.0078,
            0.004,
        ),
    ]
    runs = []
    for info in arms:
        for place in SEEDS:
            diverged = (
                info.num_diverged
                if hasattr(info, "num_diverged")
                else info.algorithm == "async" and info.num_workers == 8 and place == 107
            )
            runs.append(
                RunRow(
                    f"test/{info.name}/s{place}",
                    True,
                    info.name,
                    "test",
                    place,
                    0,
                    None,
                    "",
                    "DIVERGED" if diverged else "DONE",
                    None if diverged else 5.31,
                    None,
                    seconds_of(info.algorithm, info.num_workers, info.clock),
                    3200,
                    0.001,
                    info.clock,
                    False,
                    False,
                    True,
                    "the loss is not finite: worker 3, version 112" if diverged else "",
                )
            )
    runs.append(
        RunRow(
            "test/sync-w4-virtual/s108",
            False,
            "sync-w4-virtual",
            "test",
            108,
            0,
            None,
            "",
            "MISSING",
            None,
            None,
            None,
            None,
            None,
            "virtual",
            None,
            False,
            False,
            "planned, and no folder there",
        )
    )
    reference = arm_name("sync", 4, "virtual")
    treatment = arm_name("async", 4, "virtual")
    return Results(
        title="hate",
        folder="study",
        exploratory=False,
        exploratory_reason="",
        clocks=("measured", "virtual"),
        from_scratch=False,
        registration=RegistrationInfo(
            "9c5f2a0d" * 8,
            "sync",
            "time_to_target",
            4,
            "virtual",
            0.05,
            (("loss", 0.02), ("macro_f1", 0.01)),
            8,
            "95 % of the improvement of 2 pilot runs",
        ),
        arms=tuple(arms),
        groups=tuple(
            made_group(workers, clock, names, primary=place == 0)
            for place, (workers, clock, names) in enumerate(places)
        ),
        headlines=(
            Headline(
                "async, 4 workers, virtual clock: reached the target 1.42x sooner than sync (95 % CI 1.21 to 1.66, "
                "8 of 8 seeds, p_Holm 0.016); final loss at equal samples 0.012 nats higher, equivalent within ±0.02.",
                treatment,
                reference,
                group_name(4, "virtual"),
                "better",
                False,
            ),
            Headline(
                "ringmaster, 4 workers, virtual clock: reached the target 1.38x sooner than sync (95 % CI 1.17 to "
                "1.62, 8 of 8 seeds, p_Holm 0.016).",
                arm_name("ringmaster", 4, "virtual"),
                reference,
                group_name(4, "virtual"),
                "better",
                False,
            ),
        ),
        tiles=(
            Tile(
                "speed-up",
                "1.42x",
                interval(1.42, 0.2, 8),
                "95 % CI 1.21 to 1.66, n = 8",
                "x",
                "better",
                "time to the target, async / sync, 4 workers; won 8 of 8",
            ),
            Tile(
                "final-loss gap",
                "+0.0124",
                interval(0.0124, 0.008, 8),
                "95 % CI 0.0044 to 0.0204, n = 8",
                "nats",
                "equivalent",
                "at equal samples, within ±0.02",
            ),
            Tile(
                "throughput ratio",
                "1.76x",
                interval(1.76, 0.05, 8),
                "95 % CI 1.71 to 1.81, n = 8",
                "x",
                "better",
                "samples per virtual second",
            ),
            Tile("delay p95", "6", None, "", "updates", "not tested", "sync has 0; 9 at most"),
        ),
        tests=tuple(rows),
        trust=(
            TrustItem(
                "Synchronous guard",
                "passed",
                "good",
                "sync with 4 workers and one process at the same global batch agree to 1e-6 after 20 steps",
            ),
            TrustItem(
                "Runs",
                "87 of 88 finished, 1 diverged, 1 missing",
                "warning",
                "the missing one is listed below; its block is in no test",
            ),
            TrustItem("Seeds", "8, as declared", "good", ""),
            TrustItem(
                "Smallest detectable difference",
                "1.18 SD of the differences, 0.00950 nats",
                "good",
                "with 8 pairs this test at 0.05 finds a difference of 1.18 SD of the differences in 80 % of studies",
            ),
            TrustItem(
                "Clock",
                "virtual and measured, never in one picture",
                "warning",
                "seconds of the virtual clock were drawn from declared speeds",
            ),
            TrustItem("Oversubscribed", "no", "good", "2 workers x 1 thread on 2 cores"),
            TrustItem("Tuning", "equal: 5 trials x 2 seeds for every arm", "good", ""),
            TrustItem(
                "analysis.yaml", "9c5f2a0d9c5f2a0d", "good", "written before the first test run, and unchanged since"
            ),
            TrustItem("Replayed", "not known", "unknown", ""),
        ),
        counts=tuple(ArmCounts(info.name, "test", 8, 8, 0, 0, 0, 0) for info in arms),
        curves=tuple(
            curve_panel(generator, workers, clock, axis, names)
            for workers, clock, names in places
            for axis in ("seconds", "samples")
        ),
        reached=tuple(reached_panel(generator, *place) for place in places),
        sensitivity=tuple(sensitivity(workers, clock, name) for workers, clock, names in places for name in names[1:]),
        scaling=(*scaling(generator, "virtual", (1, 2, 4, 8, 12, 16)), *scaling(generator, "measured", (1, 2, 4))),
        trends=(
            Trend("async", "virtual", None, "", (2, 4, 8, 16), interval(0.011, 0.004, 8), 214.0, 0.0004),
            Trend("sync", "measured", None, "2 distinct numbers of workers, 4 are needed", (1, 2), None, None, None),
        ),
        delays=tuple(
            histogram(generator, algorithm, workers, clock) for workers, clock, names in places for algorithm in names
        ),
        delay_gaps=tuple(
            DelayGap(
                arm_name(name, workers, clock),
                arm_name("sync", workers, clock),
                group_name(workers, clock),
                delay,
                interval(gap, 0.008, 8),
            )
            for name, workers, clock, delay, gap in (
                ("async", 4, "virtual", 6, 0.0124),
                ("async", 8, "virtual", 12, 0.0391),
                ("ringmaster", 4, "virtual", 3, 0.006),
                ("ringmaster", 8, "virtual", 7, 0.011),
                ("async", 2, "measured", 3, 0.004),
            )
        ),
        pareto=tuple(
            ParetoPanel(
                clock,
                None,
                "f00dfeed",
                LABELS[clock],
                LOSS,
                (
                    *(
                        ParetoPoint(
                            info.name,
                            seconds_of(info.algorithm, info.num_workers, info.clock),
                            5.3 + 0.01 * place,
                            place % 2 == 0,
                            0.9 if place % 2 == 0 else 0.1,
                            8,
                        )
                        for place, info in enumerate(
                            sorted(
                                (info for info in arms if info.clock == clock),
                                key=lambda info: seconds_of(info.algorithm, info.num_workers, info.clock),
                                reverse=True,
                            )
                        )
                    ),
                    ParetoPoint(arm_name("async", 4, clock), 50.0, 5.9, True, None, 1, (("learning_rate", "0.01"),)),
                    ParetoPoint(arm_name("async", 4, clock), 50.0, 6.9, False, None, 1, (("learning_rate", "0.1"),)),
                ),
                12.3,
                (70.0, 5.6),
                arm_name("sync", 4, clock),
            )
            for clock in ("measured", "virtual")
        ),
        timelines=(timeline(generator, "sync", 4, "virtual"), timeline(generator, "async", 4, "virtual")),
        tuning=tuple(tuned(generator, info.name) for info in arms),
        downstream=(
            downstream_arm(generator, "", 0, "", baseline=True),
            *(downstream_arm(generator, info.algorithm, info.num_workers, info.clock) for info in arms),
        ),
        schedule=(
            ScheduleShare(treatment, "", 8, 2, interval(0.00011, 0.00009, 8), 0.00042, interval(0.21, 0.15, 8), 0.03),
            ScheduleShare(reference, "every seed has one run: replicates are needed", 8, 1, None, None, None, None),
        ),
        table=tuple(arm_row(generator, info) for info in arms),
        hardware=(
            HardwareRow(
                88,
                (
                    ("cpu", "AMD EPYC 7763, 2 cores"),
                    ("threads per worker", "1"),
                    ("python", "3.11.7"),
                    ("torch", "2.11.0"),
                    ("commit", "38377c3"),
                ),
            ),
            HardwareRow(
                16,
                (
                    ("cpu", "AMD EPYC 7763, 4 cores"),
                    ("threads per worker", "2"),
                    ("python", "3.12.1"),
                    ("torch", "2.11.0"),
                    ("commit", "38377c3, with uncommitted changes"),
                ),
            ),
        ),
        runs=tuple(runs),
        left_out=(
            LeftOut(
                "test/async-w8-virtual/s107", "diverged: its loss counts as the worst finite one, its time as never"
            ),
            LeftOut("S6, several tasks", "1 task; at least 3 are needed"),
        ),
        problems=("test/sync-w4-virtual/s103: events.jsonl: the last line is torn and was left out",),
        command="python -m analysis.report study --out report.html",
    )


def small():
    """The least there is: one run that never finished, nothing to compare, nothing to draw."""
    made = full()
    empty = {field.name: () for field in dataclasses.fields(Results) if isinstance(getattr(made, field.name), tuple)}
    return dataclasses.replace(
        made,
        **empty
        | {
            "title": "empty",
            "exploratory": True,
            "exploratory_reason": "there is no analysis.yaml: nothing was declared before the runs",
            "registration": None,
            "headlines": (
                Headline("There is nothing to compare: no run has finished.", "", "", "", "too few seeds", True),
            ),
            "tiles": tuple(
                Tile(name, "-", None, "", "", "not measured", "no finished run")
                for name in ("speed-up", "final-loss gap", "throughput ratio", "delay p95")
            ),
            "runs": (
                RunRow(
                    "one",
                    True,
                    "async",
                    "test",
                    0,
                    0,
                    None,
                    "",
                    "UNFINISHED",
                    None,
                    None,
                    None,
                    None,
                    None,
                    "measured",
                    None,
                    False,
                    False,
                    "no summary.json: the run crashed, was killed or is still running",
                ),
            ),
            "left_out": (LeftOut("one", "no summary.json: the run crashed, was killed or is still running"),),
            "problems": ("one: events.jsonl: the last line is torn and was left out",),
        },
    )


def lean():
    """One of everything in `full`: enough where many of a kind would show nothing more."""
    made = full()
    many = ("curves", "reached", "sensitivity", "scaling", "delay_gaps", "pareto", "timelines", "tuning", "downstream")
    fewer = {name: getattr(made, name)[:1] for name in many}
    return dataclasses.replace(made, **fewer | {"downstream": made.downstream[1:2], "delays": made.delays[:4]})
