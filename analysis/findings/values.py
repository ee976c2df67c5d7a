"""What a report shows, as plain values: frozen dataclasses of text, numbers and tuples; None is what is not known.

`analysis.findings.results.results` fills them from a `Study`. Pages, tables and pictures are made from them and
nothing else.
Every text is plain text (no HTML). Tuples are sorted, so that equal studies give equal values in any directory order.
Losses are nats per masked token (an excess on closed-form problems), times are seconds of the training clock: virtual
ones where `clock` is ``virtual``, which never share a `Group`, a panel or a comparison with measured ones.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from analysis.statistics.intervals import Interval

Endpoint = Literal["time_to_target", "target_reached", "loss_at_equal_samples", "loss_at_equal_seconds", "macro_f1"]
Family = Literal["primary", "secondary", "exploratory"]
"""primary: what was registered; secondary: corrected within a family of its own, not registered; exploratory: there is
no registration that stands, or the target was chosen after the fact."""
Level = Literal["good", "warning", "bad", "unknown"]
"""How a line of the trust box is to be read: as it should be, to be careful with, wrong, or not known."""

RESTS_ON_MARGIN = ("equivalent", "different but negligible")
"""The verdicts that an equivalence test against a margin gives."""

FROM_SCRATCH = "from scratch: not STILT"
"""The mark that runs from random weights carry everywhere."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something that is not in a number, and why."""

    name: str
    """Of the run folder (relative to the study), the arm, the comparison, or the part of the report."""
    reason: str


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
class Group:
    """Arms that may be compared with each other: same workers, clock, speeds and batch size."""

    name: str
    """Unique and readable, e.g. ``4 workers, virtual clock, slow:worker=0,factor=3, batch 16``."""
    num_workers: int | None
    clock: str
    speeds: str | None
    batch_size: int | None
    variant: tuple[tuple[str, str], ...]
    """Other settings that all its arms share and other groups do not (key, value)."""
    reference: str | None
    """Name of the reference arm; None where the group has none."""
    arms: tuple[str, ...]
    """Arm names, the reference first."""
    primary: bool
    """Whether the pre-registered primary comparison is here."""
    seconds_label: str
    """Of every axis with seconds: ``training seconds`` or ``virtual seconds``."""
    loss_label: str
    """Of every axis with losses: ``evaluation loss (nats per masked token)``, or ``evaluation loss, excess``."""
    target: float | None
    """The declared target loss; None where there is none."""
    target_from: str
    """Where the target comes from, in words; empty without a target."""
    evaluation_sets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SpeedUpResult:
    """S4: how many times sooner the treatment reached the target; geometric mean of per-seed ratios."""

    ratio: Interval | None
    """T_reference / T_treatment; above 1: the treatment was sooner. `ratio.n`: pairs where both reached it; None where
    there is no such pair."""
    p: float | None
    num_pairs: int
    left_out: int
    """Pairs without a ratio, because one of the two did not reach the target."""


@dataclasses.dataclass(frozen=True)
class RestrictedTimes:
    """S3: what stands behind a difference of times that are counted up to a common budget."""

    budget: float
    """Seconds up to which times are compared."""
    cut_short: bool
    """Whether a run ended at `budget` without the target, so that nothing is known beyond it; else every run that did
    not diverge got there."""
    treatment_within: int
    """Runs that reached the target before the budget was over, or at its end."""
    reference_within: int
    treatment_later: int
    """Runs that reached it after that, which is in no number."""
    reference_later: int
    common: bool = False
    """Whether `budget` is what every run was given."""
    ratio: Interval | None = None
    """Mean of min(time, budget), reference / treatment; above 1: the treatment is sooner. Its interval is that of the
    test of the difference, so that it leaves out 1 exactly where the row's `estimate` leaves out 0. None where nothing
    is shown, or a run was there from the start."""


@dataclasses.dataclass(frozen=True)
class EquivalenceResult:
    """S2: two one-sided paired t tests against the margin declared in analysis.yaml."""

    margin: float
    interval90: Interval
    p: float | None
    equivalent: bool
    non_inferior: bool
    p_non_inferior: float | None


@dataclasses.dataclass(frozen=True)
class TestRow:
    """One line of the table of tests."""

    __test__ = False  # pytest would take it for a test by its name

    comparison: str
    """Readable, e.g. ``ringmaster vs sync, 4 workers, virtual clock``."""
    treatment: str
    """Arm name."""
    reference: str
    """Arm name (``baseline`` where a downstream score is compared with no intermediate training)."""
    group: str
    endpoint: Endpoint
    endpoint_label: str
    """In words, with the unit: ``time to the target, restricted to 61.2 s (s)``."""
    unit: str
    """Of `estimate`: ``s``, ``nats``, ``points`` ..."""
    family: Family
    family_size: int
    """Comparisons that Holm's correction is over."""
    alpha: float
    """Level of the verdict, before Holm's correction."""
    n: int
    """Complete pairs (seeds)."""
    estimate: Interval | None
    """Mean paired difference, treatment - reference, with the differences that its test does not reject at the
    level at which Holm's method judges this row: it leaves out 0 exactly where `p_holm` is below `alpha`. None without
    a pair, where nothing varied, and where all values are what runs without a result are counted as."""
    reference_mean: float | None
    treatment_mean: float | None
    relative: float | None
    """`estimate` over the reference's improvement (losses), or treatment mean / reference mean (times); else None."""
    effect: float | None
    """d_z: mean over standard deviation of the differences."""
    correlation: float | None
    """Of the pairs; what pairing is worth."""
    test: str
    """Name of the test, e.g. ``exact sign-flip``."""
    p: float | None
    p_holm: float | None
    least_p_holm: float | None
    """The smallest that so many pairs can give in this family: at `alpha` or above, nothing can be found."""
    t_p: float | None
    """Of the paired t test, shown beside the exact one."""
    margin: float | None
    margin_share: float | None
    """`margin` over the reference's improvement; None without one of them, or where it did not improve."""
    equivalence: EquivalenceResult | None
    """None without a margin, and where `intervals.margin_too_wide` refuses it."""
    speed_up: SpeedUpResult | None
    """For `time_to_target` only."""
    times: RestrictedTimes | None
    """For `time_to_target` only."""
    share: Interval | None
    """S5: share of pairs that the treatment won, ties one half, with Clopper-Pearson; of times up to the budget."""
    wins: int
    """Pairs in which the treatment is better."""
    ties: int
    """Pairs in which neither is; of times, those in which neither got there within the budget."""
    convincing: bool | None
    """S5: whether the interval of `share` lies above one half and the share above 0.75; None without a pair."""
    word: str
    """The verdict: too few seeds, equivalent, different but negligible, better, worse, undecided."""
    reason: str
    notes: tuple[str, ...]
    """What limits this row: diverged k/n, blocks dropped, oversubscription, from scratch, budget of the restriction."""

    @property
    def deciding(self) -> Interval | None:
        """The interval that `word` rests on: the equivalence test's where it rests on the margin, else `estimate`'s."""
        if self.equivalence is not None and self.word in RESTS_ON_MARGIN:
            return self.equivalence.interval90
        return self.estimate


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


@dataclasses.dataclass(frozen=True)
class TrustItem:
    """One line of the trust box."""

    title: str
    value: str
    level: Level
    detail: str
    """A sentence more; may be empty."""


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
class SeedCurve:
    """The evaluations of one run."""

    run: str
    seed: int | None
    replicate: int
    status: str
    x: tuple[float, ...]
    loss: tuple[float, ...]
    """Finite losses only."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Mean over seeds with its t interval, on a common grid over the part of x that all finished runs cover."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Empty (like `high`) below two runs."""
    high: tuple[float, ...]
    level: float
    n: int


@dataclasses.dataclass(frozen=True)
class Curve:
    arm: str
    seeds: tuple[SeedCurve, ...]
    band: Band | None
    """None without a finished run."""


@dataclasses.dataclass(frozen=True)
class CurvePanel:
    """Loss versus one axis for the arms of one group; one pair of axes."""

    group: str
    axis: Literal["seconds", "samples"]
    x_label: str
    y_label: str
    target: float | None
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReachedCurve:
    """Share of runs of one arm that have reached the target, as a step function of seconds."""

    arm: str
    n: int
    reached: int
    seconds: tuple[float, ...]
    """Where the steps are; starts at 0."""
    share: tuple[float, ...]
    """After each step; starts at 0."""
    at_risk: tuple[int, ...]
    """Runs neither through nor stopped just before each of `seconds`."""
    censored: tuple[float, ...]
    """Seconds at which runs that had not reached it ended; a diverged run never ends and is not here."""
    median: float | None
    """Seconds; None where fewer than half reached it."""
    restricted_mean: Interval | None
    """Of min(T, budget) over seeds."""


@dataclasses.dataclass(frozen=True)
class ReachedPanel:
    """Time to target of the arms of one group."""

    group: str
    target: float
    target_from: str
    budget: float | None
    budget_reason: str
    spacing: float | None
    """Median gap in seconds between the evaluations around a crossing: the resolution of the times."""
    curves: tuple[ReachedCurve, ...]
    log_rank_p: tuple[tuple[str, float], ...]
    """(treatment arm, permutation p against the reference): S3b."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SensitivityPoint:
    share: float
    """Of the reference's improvement over the first evaluation; 0.9 = 90 %."""
    target: float
    speed_up: Interval | None
    """None where no pair reached it."""
    restricted_ratio: float | None
    """RMST treatment / reference; below 1: the treatment is sooner."""
    reached_treatment: int
    reached_reference: int
    n: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """S13: the speed-up at every target of the grid, for one comparison."""

    comparison: str
    treatment: str
    reference: str
    group: str
    points: tuple[SensitivityPoint, ...]
    after_the_fact: bool
    """Whether the targets are shares of the test runs' own improvement, since no pilot runs were registered."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """S10: Amdahl's law or the universal scalability law, or why there is none."""

    model: Literal["amdahl", "usl"]
    refused: str
    """Why there is no fit; empty where there is one."""
    parameters: tuple[tuple[str, float], ...]
    intervals: tuple[tuple[str, Interval], ...]
    """By resampling seed blocks."""
    peak: float | None
    """Workers at which the throughput is largest; None where it has no peak."""
    aicc: float | None
    x: tuple[float, ...]
    y: tuple[float, ...]
    """The fitted line, for the picture."""


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    arm: str
    num_workers: int
    throughput: Interval
    """Samples per second, mean over seeds."""
    per_seed: tuple[tuple[int, float], ...]
    oversubscribed: bool


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Throughput over workers of one algorithm under one clock."""

    algorithm: str
    clock: str
    speeds: str | None
    batch_size: int | None
    unit: str
    """``samples/s`` or ``samples/virtual s``."""
    points: tuple[ScalingPoint, ...]
    fits: tuple[FitResult, ...]
    aicc_difference: float | None
    """AICc of the universal scalability law minus that of Amdahl's law; None without both. Below 0 the former."""


@dataclasses.dataclass(frozen=True)
class Trend:
    """S8: loss at equal samples over workers (on log2 P); or why there is none."""

    algorithm: str
    clock: str
    speeds: str | None
    refused: str
    workers: tuple[int, ...]
    slope: Interval | None
    """Nats per doubling of the workers."""
    page_statistic: float | None
    page_p: float | None


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
class ParetoPoint:
    """The test runs of one arm, or one of its tuning trials.

    Trials ran on the tuning seeds, so that they are compared with one another and not with the test runs: there is a
    front of either.
    """

    arm: str
    seconds: float
    loss: float
    on_front: bool
    share: float | None
    """Of the bootstrap samples of the seeds in which no other point of its front is better in both."""
    n: int
    trial: tuple[tuple[str, str], ...] = ()
    """(key, value) of the settings that the trial tried; empty for the test runs."""


@dataclasses.dataclass(frozen=True)
class ParetoPanel:
    """S11: final loss against seconds, all arms under one clock on one data set."""

    clock: str
    speeds: str | None
    evaluation_set: str
    x_label: str
    y_label: str
    points: tuple[ParetoPoint, ...]
    """Sorted by seconds."""
    hypervolume: float | None
    """Area that the test runs dominate, in seconds x nats, against `reference_point`."""
    reference_point: tuple[float, float] | None
    """Mean seconds of the whole runs of one arm, and its mean loss at its first evaluation: other arms do not move it.
    None where no arm of the panel is a reference."""
    reference_arm: str | None = None


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
class ClassScore:
    label: str
    f1: Interval


@dataclasses.dataclass(frozen=True)
class CheckScore:
    """Accuracy on one functional test of HateCheck."""

    functionality: str
    accuracy: Interval
    num_cases: int


@dataclasses.dataclass(frozen=True)
class DownstreamArm:
    """Scores after fine-tuning: the mean over fine-tuning seeds per pretraining seed, then over pretraining seeds."""

    arm: str
    label: str
    baseline: bool
    """Whether it had no intermediate training."""
    from_scratch: bool | None
    data: str
    num_finetuning_runs: int
    macro_f1: Interval
    accuracy: Interval | None
    per_seed: tuple[tuple[int, float], ...]
    """(pretraining seed, mean macro-F1 of its fine-tuning runs)."""
    classes: tuple[ClassScore, ...]
    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Sum over runs; rows: true class, columns: predicted."""
    hatecheck: Interval | None
    functionalities: tuple[CheckScore, ...]


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
    macro_f1: float | None
    train_seconds: float | None
    num_samples: int | None
    learning_rate: float | None
    clock: str
    from_scratch: bool | None
    oversubscribed: bool
    in_tests: bool
    remark: str
    """Why it is not in the tests, and what went wrong in it."""


@dataclasses.dataclass(frozen=True)
class RegistrationInfo:
    """analysis.yaml as it was declared."""

    sha256: str
    reference: str
    endpoint: str
    num_workers: int | None
    clock: str | None
    alpha: float
    margins: tuple[tuple[str, float], ...]
    num_seeds: int | None
    target_from: str


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows, in the order of the eye."""

    title: str
    folder: str
    """Name of the study's folder, not its path on this machine."""
    exploratory: bool
    exploratory_reason: str
    """Why everything is exploratory; empty where a pre-registered family stands."""
    clocks: tuple[str, ...]
    """Clocks of the runs: both may be here, never in one panel."""
    from_scratch: bool
    """Whether any run of the study started from random weights."""
    registration: RegistrationInfo | None
    arms: tuple[ArmInfo, ...]
    """In the order of legends."""
    groups: tuple[Group, ...]
    """The primary group first."""
    headlines: tuple[Headline, ...]
    """Never empty: without a comparison it says why there is none."""
    tiles: tuple[Tile, ...]
    tests: tuple[TestRow, ...]
    """Primary family first."""
    trust: tuple[TrustItem, ...]
    counts: tuple[ArmCounts, ...]
    curves: tuple[CurvePanel, ...]
    """Per group: seconds, then samples."""
    reached: tuple[ReachedPanel, ...]
    sensitivity: tuple[Sensitivity, ...]
    scaling: tuple[Scaling, ...]
    trends: tuple[Trend, ...]
    delays: tuple[DelayHistogram, ...]
    delay_gaps: tuple[DelayGap, ...]
    pareto: tuple[ParetoPanel, ...]
    timelines: tuple[Timeline, ...]
    """One synchronous and one asynchronous run, where there are events."""
    tuning: tuple[TuningResult, ...]
    downstream: tuple[DownstreamArm, ...]
    """The baseline first."""
    schedule: tuple[ScheduleShare, ...]
    table: tuple[ArmRow, ...]
    hardware: tuple[HardwareRow, ...]
    runs: tuple[RunRow, ...]
    left_out: tuple[LeftOut, ...]
    """Everything that is in no number, with its reason."""
    problems: tuple[str, ...]
    """What went wrong while reading, one line each."""
    command: str
    """What to type to make this report again."""
