"""What is compared with what, on which seeds, by which number: groups, complete pairs, endpoints and their test rows.

A pair is two runs of one seed, both with a result; a diverged run is one (its loss counts as the worst that was seen,
its time as infinite), a failed or missing run is not, and takes its whole block with it. Measured and virtual seconds
never meet here: the clock is part of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy
from numpy.typing import NDArray

from analysis.intervals import (
    MINIMUM_PAIRS,
    Interval,
    PairedResult,
    holm,
    least_p_holm,
    margin_too_wide,
    minimum_pairs,
    nothing_to_find,
    paired_difference,
    short,
    t_interval,
    tost_paired,
    verdict,
    win_share,
)
from analysis.load import Run
from analysis.result_types import (
    FROM_SCRATCH,
    Endpoint,
    EquivalenceResult,
    Family,
    Group,
    LeftOut,
    RestrictedTimes,
    SpeedUpResult,
    TestRow,
)
from analysis.study import MEASURED, Arm, Registration, Study, StudyRun
from analysis.time_to_target import crossing, loss_at, speed_up, target_grid
from asyncsgd.plan import BASELINE

DEFAULT_REFERENCE = "sync"
DEFAULT_ALPHA = 0.05
AFTER_THE_FACT_SHARE = 0.95
"""Where no target was declared: this share of the improvement of the reference's own runs, which is exploratory."""
WHOLE_BUDGET_SHARE = 0.95
"""Losses are compared at this share of the planned samples or more. Where only their number ends a run, what may be
missing is part of a round of all workers, about 5 % in the studies of this project (16 workers: 128 of 2400 samples).
What is missing beyond that was lost with some run, and would move the comparison of all others to where that one ended.
"""

Column = Literal["train_seconds", "total_samples"]

ENDPOINTS_OF_PRETRAINING: tuple[Endpoint, ...] = ("time_to_target", "loss_at_equal_samples", "loss_at_equal_seconds")
OVERSUBSCRIBED = "oversubscribed: more threads than cores, its seconds are no speed comparison"

_NOT_A_VARIANT = frozenset(("mode", "rule", "nproc", "clock", "speeds", "batch_size", "seed"))
"""Settings that are the algorithm's, or in the key of a group already."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two runs of one seed."""

    seed: int
    treatment: StudyRun
    reference: StudyRun


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A treatment arm against the reference arm of its group, with its complete pairs."""

    name: str
    group: Group
    treatment: Arm
    reference: Arm
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    declared: bool
    """Whether the group's target was declared before the runs."""

    @property
    def runs(self) -> list[StudyRun]:
        return [run for pair in self.pairs for run in (pair.treatment, pair.reference)]


@dataclasses.dataclass(frozen=True)
class Paired:
    """One value per pair for treatment and reference, with what has to be said about them."""

    treatment: tuple[float, ...]
    reference: tuple[float, ...]
    notes: tuple[str, ...] = ()
    nothing_because: str = ""
    """Why the values say nothing although there are some; empty where they do."""


# ---- curves ------------------------------------------------------------------------------------------------


def curve_of(run: Run, column: Column) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    """The finite evaluations of a run, positions strictly increasing.

    Of several evaluations at one position (nothing arrived between them) the last is taken.
    """
    x = run.evaluations[column].to_numpy(dtype=float, na_value=numpy.nan)
    y = run.evaluations["loss"].to_numpy(dtype=float, na_value=numpy.nan)
    known = numpy.isfinite(x) & numpy.isfinite(y)
    x, first = numpy.unique(x[known][::-1], return_index=True)
    return x, y[known][::-1][first]


def end_of(run: Run, column: Column) -> float:
    """The position of a run's last finite evaluation; nan if it has none."""
    x, _ = curve_of(run, column)
    return float(x[-1]) if len(x) else math.nan


def _seconds_of(run: Run) -> float:
    """How long a run was watched: until its last evaluation, finite or not; nan if it has none."""
    seconds = run.evaluations["train_seconds"].to_numpy(dtype=float, na_value=numpy.nan)
    return float(numpy.nanmax(seconds)) if numpy.isfinite(seconds).any() else math.nan


def worst_loss(runs: Iterable[StudyRun]) -> float:
    """The largest finite evaluation loss of all `runs`: what a diverged run is counted as; nan if there is none."""
    largest = math.nan
    for run in runs:
        if run.run is not None:
            _, y = curve_of(run.run, "total_samples")
            if len(y):
                largest = float(numpy.fmax(largest, y.max()))
    return largest


def time_to(run: StudyRun, target: float, column: Column = "train_seconds") -> tuple[float, float | None]:
    """Seconds (or samples) until the target, and the gap between the evaluations around it.

    It is inf for a run that never got there, and for one that diverged.
    """
    if run.run is None or run.diverged:
        return math.inf, None
    x, y = curve_of(run.run, column)
    if not len(x):
        return math.inf, None
    found = crossing(x, y, target)
    return found.at, found.spacing


def budget_of(runs: Sequence[StudyRun], target: float) -> tuple[float | None, str]:
    """The common budget of restricted times, and why it is that.

    A run that came to its end without reaching the target is known to need longer than it lasted, and no more: beyond
    the shortest of these nothing can be compared. Without such a run, times are known up to the longest run.
    """
    ends = {run.name: _seconds_of(run.run) for run in runs if run.run is not None}
    ends = {name: end for name, end in ends.items() if math.isfinite(end) and end > 0}
    if not ends:
        return None, "no run has a time"
    stopped = [
        ends[run.name] for run in runs if run.name in ends and not run.diverged and math.isinf(time_to(run, target)[0])
    ]
    if stopped:
        shortest = min(stopped)
        return shortest, (
            f"restricted to {short(shortest)} s, the shortest of {len(stopped)} "
            f"run{'s' * (len(stopped) != 1)} that ended without reaching the target"
        )
    longest = max(ends.values())
    return longest, f"restricted to {short(longest)} s, the longest run; every run that did not diverge got there"


# ---- groups ------------------------------------------------------------------------------------------------


def reference_algorithm(study: Study) -> str | None:
    """The registered reference, else ``sync`` where there is such an arm."""
    if study.registration is not None:
        return study.registration.reference
    return DEFAULT_REFERENCE if any(arm.algorithm == DEFAULT_REFERENCE for arm in study.arms) else None


def is_primary(group_workers: int | None, clock: str, registration: Registration | None) -> bool:
    """Whether the registered primary comparison is made under these conditions."""
    if registration is None:
        return False
    workers_fit = registration.num_workers is None or registration.num_workers == group_workers
    return workers_fit and (registration.clock is None or registration.clock == clock)


def groups_of(study: Study) -> tuple[tuple[Group, ...], tuple[LeftOut, ...]]:
    """Put every arm with pretraining runs into a group with at most one reference arm.

    Arms of one group have the same workers, clock, speeds and batch size. Where several reference arms fit, they differ
    in some other setting, and an arm goes to the one that has its value of it.
    """
    algorithm = reference_algorithm(study)
    batches = sorted({arm.batch_size for arm in study.arms if arm.batch_size is not None})
    by_key: dict[tuple[int | None, str, str, int | None], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        if arm.name == BASELINE:
            continue
        batch = arm.batch_size
        if batch is None and len(batches) == 1:  # nothing of it has run yet
            batch = batches[0]
        by_key[arm.num_workers, arm.clock, arm.speeds or "", batch].append(arm)
    groups, left_out = [], []
    for (workers, clock, speeds, batch), arms in by_key.items():
        references = [arm for arm in arms if arm.algorithm == algorithm]
        differing = _differing(references)
        members: dict[str | None, list[Arm]] = {arm.name: [] for arm in references}
        for arm in arms:
            if arm in references:
                continue
            fitting = [one for one in references if all(_value(one, key) == _value(arm, key) for key in differing)]
            if len(fitting) == 1:
                members[fitting[0].name].append(arm)
                continue
            members.setdefault(None, []).append(arm)
            if references:
                listed = ", ".join(one.name for one in references)
                keys = ", ".join(differing) or "nothing"
                left_out.append(
                    LeftOut(
                        arm.name, f"no comparison: which of {listed} it belongs to is not clear (they differ in {keys})"
                    )
                )
        for name, others in members.items():
            variant: tuple[tuple[str, str], ...] = ()
            if name is not None and len(references) > 1:
                own = next(arm for arm in references if arm.name == name)
                variant = tuple((key, str(_value(own, key))) for key in differing)
            label = _group_name(workers, clock, speeds, batch if len(batches) > 1 else None, variant)
            if name is None and references:
                label += ", no reference"
            all_arms = ([] if name is None else [name]) + [arm.name for arm in others]
            groups.append(_group(study, label, workers, clock, speeds, batch, variant, name, tuple(all_arms)))
    groups.sort(
        key=lambda group: (not group.primary, group.clock, group.speeds or "", group.num_workers or 0, group.name)
    )
    return tuple(groups), tuple(left_out)


def _differing(arms: Sequence[Arm]) -> list[str]:
    keys = sorted({key for arm in arms for key in arm.settings} - _NOT_A_VARIANT)
    return [key for key in keys if len({str(_value(arm, key)) for arm in arms}) > 1]


def _value(arm: Arm, key: str) -> object:
    return arm.settings.get(key)


def _group_name(
    workers: int | None, clock: str, speeds: str, batch: int | None, variant: Sequence[tuple[str, str]]
) -> str:
    count = "unknown workers" if workers is None else f"{workers} worker{'s' * (workers != 1)}"
    parts = [count, f"{clock} clock", *[speeds] * bool(speeds), *[f"batch {batch}"] * (batch is not None)]
    return ", ".join([*parts, *(f"{key} {value}" for key, value in variant)])


def _group(
    study: Study,
    label: str,
    workers: int | None,
    clock: str,
    speeds: str,
    batch: int | None,
    variant: tuple[tuple[str, str], ...],
    reference: str | None,
    arms: tuple[str, ...],
) -> Group:
    runs = [run.run for name in arms for run in study.of("test", name) if run.run is not None]
    tokens = any(run.summary.get("eval_masked_tokens") is not None for run in runs)
    target, origin = _target(study, reference)
    return Group(
        name=label,
        num_workers=workers,
        clock=clock,
        speeds=speeds or None,
        batch_size=batch,
        variant=variant,
        reference=reference,
        arms=arms,
        primary=reference is not None and is_primary(workers, clock, study.registration),
        seconds_label="training seconds" if clock == MEASURED else "virtual seconds",
        loss_label="evaluation loss (nats per masked token)" if tokens or not runs else "evaluation loss, excess",
        target=target,
        target_from=origin,
        data_fingerprints=tuple(sorted({run.data_fingerprint for run in runs if run.data_fingerprint is not None})),
    )


def _target(study: Study, reference: str | None) -> tuple[float | None, str]:
    if reference is None:
        return None, ""
    if reference in study.targets:
        return study.targets[reference], study.target_from or "declared before the test runs"
    improvement = improvement_of([run for run in study.of("test", reference) if run.replicate == 0])
    if improvement is None:
        return None, ""
    grid = target_grid(*improvement, shares=(AFTER_THE_FACT_SHARE,))
    return grid[AFTER_THE_FACT_SHARE], (
        f"{100 * AFTER_THE_FACT_SHARE:g} % of the improvement of {reference}'s own runs, chosen after the fact"
    )


def improvement_of(runs: Sequence[StudyRun]) -> tuple[float, float] | None:
    """Mean first loss and mean best loss of the finished runs; None where there are none, or nothing improved."""
    finished = [run.run for run in runs if run.run is not None and run.usable and not run.diverged]
    curves = [curve_of(run, "total_samples")[1] for run in finished]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return None
    first = math.fsum(float(curve[0]) for curve in curves) / len(curves)
    best = math.fsum(float(curve.min()) for curve in curves) / len(curves)
    return (first, best) if best < first else None


# ---- pairs -------------------------------------------------------------------------------------------------


def comparisons_of(study: Study, groups: Sequence[Group]) -> tuple[tuple[Comparison, ...], tuple[LeftOut, ...]]:
    """Every treatment arm against the reference of its group; what cannot be compared is listed with its reason."""
    comparisons, left_out = [], []
    for group in groups:
        if group.reference is None:
            alone = ", ".join(group.arms)
            algorithm = reference_algorithm(study) or DEFAULT_REFERENCE
            left_out.append(LeftOut(alone, f"no comparison: there is no {algorithm} arm with {group.name}"))
            continue
        if len(group.arms) == 1:
            left_out.append(LeftOut(group.arms[0], f"no comparison: it is the only arm with {group.name}"))
            continue
        runs = {name: _first_replicates(study, name) for name in group.arms}
        dropped = _dropped_blocks(runs, group, left_out)
        for name in group.arms[1:]:
            comparison = _comparison(study, group, name, runs, dropped, left_out)
            if comparison is not None:
                comparisons.append(comparison)
    return tuple(comparisons), tuple(left_out)


def _first_replicates(study: Study, arm: str) -> dict[int, StudyRun]:
    """The run of every seed that takes part in tests; further replicates are for the share of the schedule only."""
    return {run.seed: run for run in study.of("test", arm) if run.replicate == 0 and run.seed is not None}


def _dropped_blocks(
    runs: dict[str, dict[int, StudyRun]], group: Group, left_out: list[LeftOut]
) -> dict[int, list[StudyRun]]:
    """Seeds in which a run of the group was lost, with the runs that were."""
    lost: dict[int, list[StudyRun]] = defaultdict(list)
    for of_arm in runs.values():
        for seed, run in of_arm.items():
            if not run.usable:
                lost[seed].append(run)
    for seed in sorted(lost):
        names = ", ".join(sorted(run.name for run in lost[seed]))
        left_out.append(
            LeftOut(
                f"block of seed {seed}, {group.name}", f"the whole block is left out, because no result came of {names}"
            )
        )
    return lost


def _comparison(
    study: Study,
    group: Group,
    name: str,
    runs: dict[str, dict[int, StudyRun]],
    dropped: dict[int, list[StudyRun]],
    left_out: list[LeftOut],
) -> Comparison | None:
    assert group.reference is not None
    treatment, reference = study.arm(name), study.arm(group.reference)
    ours, theirs = runs[name], runs[group.reference]
    title = f"{treatment.algorithm} vs {reference.algorithm}, {group.name}"
    if treatment.algorithm == reference.algorithm or _shares_algorithm(study, group, treatment):
        title = f"{treatment.name} vs {reference.name}, {group.name}"
    pairs = tuple(
        Pair(seed, ours[seed], theirs[seed]) for seed in sorted(set(ours) & set(theirs)) if seed not in dropped
    )
    notes = []
    if dropped:
        notes.append(
            f"{len(dropped)} block{'s' * (len(dropped) != 1)} left out (seed {', '.join(map(str, sorted(dropped)))})"
        )
    unpaired = sorted((set(ours) ^ set(theirs)) - set(dropped))
    if unpaired:
        listed = ", ".join(map(str, unpaired))
        notes.append(f"seed {listed} only in one of the two arms")
        left_out.append(LeftOut(title, f"seed {listed} has a run of only one of the two arms and is in no pair"))
    counted = [run for pair in pairs for run in (pair.treatment, pair.reference)]
    told = {run.run.data_fingerprint for run in counted if run.run is not None}
    if len(told) > 1:
        listed = ", ".join(sorted("unknown" if one is None else one for one in told))
        left_out.append(
            LeftOut(title, f"refused: its runs were evaluated on different data (data_fingerprint {listed})")
        )
        return None
    for arm, side in ((treatment, "treatment"), (reference, "reference")):
        diverged = sum(getattr(pair, side).diverged for pair in pairs)
        if diverged:
            notes.append(f"{arm.algorithm}: diverged {diverged}/{len(pairs)}")
    if any(run.run is not None and run.run.oversubscribed for run in counted):
        notes.append(OVERSUBSCRIBED)
    marks = {run.run.summary.get("from_scratch") for run in counted if run.run is not None}
    if True in marks:
        notes.append(FROM_SCRATCH)
        if False in marks:
            notes.append("some runs start from random weights and others do not")
    return Comparison(
        title, group, treatment, reference, pairs, tuple(notes), declared=group.reference in study.targets
    )


def _shares_algorithm(study: Study, group: Group, arm: Arm) -> bool:
    return sum(study.arm(name).algorithm == arm.algorithm for name in group.arms) > 1


# ---- endpoints ---------------------------------------------------------------------------------------------


def losses_at_equal_samples(comparison: Comparison) -> Paired:
    """The evaluation loss of both runs of every pair at the number of samples that all finished runs reached."""
    finished = [run.run for run in comparison.runs if run.run is not None and not run.diverged]
    if not finished:
        return _nothing(comparison)
    if short_of_plan := _short_of_plan(comparison):
        return Paired((), (), nothing_because=short_of_plan)
    ends = [end_of(run, "total_samples") for run in finished]
    common = min(ends)
    notes = []
    step = (comparison.group.num_workers or 1) * (comparison.group.batch_size or 1)
    if max(ends) - common > min(step, (1 - WHOLE_BUDGET_SHARE) * max(ends)):
        notes.append(f"compared at {common:g} samples, the smallest budget; the largest is {max(ends):g}")
    worst = worst_loss(comparison.runs)

    def value(run: StudyRun) -> float:
        if run.diverged or run.run is None:
            return worst
        return loss_at(*curve_of(run.run, "total_samples"), common)

    values = [(pair.seed, value(pair.treatment), value(pair.reference)) for pair in comparison.pairs]
    return _paired(values, notes + _worst_note(comparison, worst))


def losses_at_equal_seconds(comparison: Comparison) -> Paired:
    """The evaluation loss of both runs of a pair at the largest time that both of them reached.

    A diverged run does not shorten its pair's time: the other one is taken at its end.
    """
    if all(run.diverged for run in comparison.runs):
        return _nothing(comparison)
    if short_of_plan := _short_of_plan(comparison):
        return Paired((), (), nothing_because=short_of_plan)
    worst = worst_loss(comparison.runs)
    values = []
    compared_at, longest = [], []
    for pair in comparison.pairs:
        both = (pair.treatment, pair.reference)
        ends = [end_of(run.run, "train_seconds") for run in both if run.run is not None and not run.diverged]
        compared_at += [min(ends)] * bool(ends)
        longest += [max(ends)] * bool(ends)
        ours, theirs = (
            worst if run.diverged or run.run is None else loss_at(*curve_of(run.run, "train_seconds"), min(ends))
            for run in both
        )
        values.append((pair.seed, ours, theirs))
    notes = []
    if any(at < WHOLE_BUDGET_SHARE * end for at, end in zip(compared_at, longest, strict=True)):
        span = " to ".join(dict.fromkeys((short(min(compared_at)), short(max(compared_at)))))
        notes.append(
            f"compared at {span} {seconds_unit(comparison.group)}, where the shorter run of each pair ended; the "
            f"longest is {short(max(longest))}"
        )
    return _paired(values, notes + _worst_note(comparison, worst))


def _short_of_plan(comparison: Comparison) -> str:
    """Why losses are not compared at all: a finished run ended before its arm's samples were used up, though nothing
    but their number was to end it. Empty where none did; arms whose budgets were meant to differ are compared.
    """
    for pair in comparison.pairs:
        for arm, run in ((comparison.treatment, pair.treatment), (comparison.reference, pair.reference)):
            if run.run is None or run.diverged:
                continue
            planned = max(_planned_samples(other) for other in comparison.runs if other.arm == arm.name)
            end = end_of(run.run, "total_samples")
            if end < WHOLE_BUDGET_SHARE * planned:
                return f"refused: {run.name} ended at {end:g} of the {planned:g} samples of its arm"
    return ""


def _planned_samples(run: StudyRun) -> float:
    """The samples that alone end a run; 0 where something else may, or nothing says how many there are."""
    settings = {} if run.run is None else run.run.settings
    samples = settings.get("samples")
    alone = settings.get("seconds") is None and settings.get("target_loss") is None
    return float(samples) if alone and isinstance(samples, int | float) else 0.0


def times_to_target(comparison: Comparison, target: float, budget: float, *, cut_short: bool) -> Paired:
    """Seconds until both runs of every pair reached `target`; inf for never.

    They say nothing where no run got there before the budget was over because another one had ended (`cut_short`).
    """
    times = [
        (pair.seed, time_to(pair.treatment, target)[0], time_to(pair.reference, target)[0]) for pair in comparison.pairs
    ]
    alone = [str(seed) for seed, ours, theirs in times if not (0 < ours < math.inf and 0 < theirs < math.inf)]
    told = f"seed{'s' * (len(alone) > 1)} {', '.join(alone)}: not in the speed-up, which needs both to reach the target"
    paired = _paired(times, [told] * bool(alone))
    earliest = min(paired.treatment + paired.reference, default=0.0)
    if earliest < budget or (math.isfinite(earliest) and not cut_short):
        return paired
    because = f"no run reached the target of {short(target)}"
    arms = ((comparison.treatment, paired.treatment), (comparison.reference, paired.reference))
    later = [(arm.algorithm, sum(map(math.isfinite, times)), len(times)) for arm, times in arms]
    if any(reached for _, reached, _ in later):
        told = ", ".join(f"{algorithm} {reached} of {number}" for algorithm, reached, number in later)
        unit = seconds_unit(comparison.group)
        because += f" before {short(budget)} {unit}, when the first run that missed it ended (later: {told})"
    return dataclasses.replace(paired, nothing_because=because)


def seconds_unit(group: Group) -> str:
    return "s" if group.clock == MEASURED else "virtual s"


def missed(runs: Iterable[StudyRun], target: float) -> bool:
    """Whether a run came to its end without reaching the target, so that times are known up to that end only."""
    return any(run.run is not None and not run.diverged and math.isinf(time_to(run, target)[0]) for run in runs)


def _paired(pairs: Sequence[tuple[int, float, float]], notes: Sequence[str] = ()) -> Paired:
    """Pairs of (seed, treatment, reference) without those that have no value, which are named in a note."""
    known = [pair for pair in pairs if not (math.isnan(pair[1]) or math.isnan(pair[2]))]
    lost = [str(pair[0]) for pair in pairs if pair not in known]
    told = [f"seed {', '.join(lost)}: the two curves have no common position"] if lost else []
    return Paired(tuple(pair[1] for pair in known), tuple(pair[2] for pair in known), (*notes, *told))


def _nothing(comparison: Comparison) -> Paired:
    """All runs diverged: every value is the same, which says nothing about the arms."""
    if not comparison.pairs:
        return Paired((), ())
    worst = worst_loss(comparison.runs)
    values = (worst,) * len(comparison.pairs) if math.isfinite(worst) else ()
    return Paired(values, values, nothing_because="every run of both arms diverged")


def _worst_note(comparison: Comparison, worst: float) -> list[str]:
    if not any(run.diverged for run in comparison.runs):
        return []
    return [f"a diverged run counts as the worst loss seen, {short(worst)}"]


# ---- test rows ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Question:
    """One comparison on one endpoint, before Holm's correction: what `judge` makes a `TestRow` of."""

    comparison: str
    treatment: str
    reference: str
    group: str
    endpoint: Endpoint
    label: str
    unit: str
    family: str
    """Key of the family that Holm's correction is over."""
    kind: Family
    values: Paired
    lower_is_better: bool
    margin: float | None
    alpha: float
    notes: tuple[str, ...]
    budget: float | None = None
    """Of restricted times; None for scores."""
    cut_short: bool = False
    """Whether the budget is the end of a run that had not reached the target."""
    improvement: float | None = None
    """By how much the reference became better in all (0 or below: not at all), which `TestRow.relative` is a share of;
    None where that is not known."""


def judge(
    questions: Sequence[Question], generator: numpy.random.Generator, num_registered: int = 0
) -> tuple[TestRow, ...]:
    """Test every question, correct each family with Holm's method, and say in one word what was shown.

    Args:
        questions: in the order of the table; families may be mixed.
        generator: for sign-flip tests of more than 30 pairs.
        num_registered: comparisons that were registered as the primary family; those that are not among `questions`
            count as ones that show nothing (p = 1), since leaving them out would make the others easier.
    """
    tested = [_tested(question, generator) for question in questions]
    adjusted: dict[int, float] = {}
    least: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for family in dict.fromkeys(question.family for question in questions):
        places = [place for place, question in enumerate(questions) if question.family == family]
        # a question without a p value still is one of the family: leaving it out would make the others easier
        found = [tested[place] for place in places]
        missing = max(0, num_registered - len(places)) if family == "primary" else 0
        corrected = holm([1.0 if result is None else result.p for result in found] + [1.0] * missing)
        adjusted |= dict(zip(places, corrected[: len(places)], strict=True))
        possible = least_p_holm([0 if result is None else result.n for result in found] + [0] * missing)
        least |= dict(zip(places, possible[: len(places)], strict=True))
        sizes |= dict.fromkeys(places, len(places) + missing)
    return tuple(
        _row(question, tested[place], adjusted[place], least[place], sizes[place], generator)
        for place, question in enumerate(questions)
    )


def _tested(question: Question, generator: numpy.random.Generator) -> PairedResult | None:
    values = question.values
    if not values.treatment:
        return None
    return paired_difference(*_compared(question), generator, question.alpha)


def _compared(question: Question) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values of both sides; times up to the budget, as nothing more is known of a run that ended there."""
    values, budget = question.values, question.budget
    if budget is None:
        return values.treatment, values.reference
    return tuple(min(time, budget) for time in values.treatment), tuple(min(time, budget) for time in values.reference)


def _row(
    question: Question,
    result: PairedResult | None,
    p_holm: float,
    least: float,
    size: int,
    generator: numpy.random.Generator,
) -> TestRow:
    values = question.values
    n = len(values.treatment)
    notes = list(question.notes + values.notes)
    equivalence = None
    speed = times = None
    share = convincing = None
    wins = ties = 0
    relative = None
    treatment_mean = reference_mean = None
    word, reason = "too few seeds", "there is no pair"
    if values.nothing_because:
        word, reason = "undecided", values.nothing_because
    gained = question.improvement if question.improvement is not None and question.improvement > 0 else None
    margin_share = None if question.margin is None or gained is None else question.margin / gained
    if result is not None:
        too_wide = "" if question.margin is None else margin_too_wide(question.margin, question.improvement)
        margin = None if too_wide else question.margin
        if question.budget is not None:
            times = _restricted_times(question, question.budget)
        if not values.nothing_because:  # else all values are what a run without a result counts as, on both sides
            ours, theirs = _compared(question)
            treatment_mean, reference_mean = math.fsum(ours) / n, math.fsum(theirs) / n
            relative = _relative(question, result, treatment_mean, reference_mean, gained)
            level = 1 - question.alpha
            counted = win_share(ours, theirs, lower_is_better=question.lower_is_better, level=level)
            share = Interval(counted.estimate, counted.low, counted.high, level, n)
            wins, ties, convincing = counted.wins, counted.ties, counted.convincing
            if margin is not None:
                found = tost_paired(ours, theirs, margin, question.alpha, lower_is_better=question.lower_is_better)
                equivalence = EquivalenceResult(
                    found.margin, found.interval90, found.p, found.equivalent, found.non_inferior, found.p_non_inferior
                )
        if question.endpoint == "time_to_target":
            speed = _speed_up(question, generator)
        if values.nothing_because and n >= minimum_pairs(1, question.alpha):
            word, reason = "undecided", values.nothing_because
        else:
            said = verdict(
                n,
                result.difference.estimate,
                p_holm,
                result.interval90,
                margin,
                question.lower_is_better,
                question.alpha,
                max(MINIMUM_PAIRS, minimum_pairs(1, question.alpha)),
                size,
                least,
            )
            word, reason = said.word, said.reason
            if values.nothing_because:
                reason = f"{reason}; {values.nothing_because}"
            elif too_wide:
                reason = f"{reason}; {too_wide}"
        hopeless = nothing_to_find(n, size, least, question.alpha) if n >= MINIMUM_PAIRS else ""
        if hopeless and hopeless not in reason:
            notes.append(hopeless)
    return TestRow(
        comparison=question.comparison,
        treatment=question.treatment,
        reference=question.reference,
        group=question.group,
        endpoint=question.endpoint,
        endpoint_label=question.label,
        unit=question.unit,
        family=question.kind,
        family_size=size,
        alpha=question.alpha,
        n=n,
        estimate=None if result is None or values.nothing_because else result.difference,
        reference_mean=reference_mean,
        treatment_mean=treatment_mean,
        relative=relative,
        effect=None if result is None else result.effect,
        correlation=None if result is None else result.correlation,
        test="exact sign-flip of paired differences" if n <= 30 else "sign-flip of paired differences, 9,999 draws",
        p=None if result is None else result.p,
        p_holm=None if result is None else p_holm,
        least_p_holm=None if result is None else least,
        t_p=None if result is None else result.t_p,
        margin=question.margin,
        margin_share=margin_share,
        equivalence=equivalence,
        speed_up=speed,
        times=times,
        share=share,
        wins=wins,
        ties=ties,
        convincing=convincing,
        word=word,
        reason=reason,
        notes=tuple(notes),
    )


def _restricted_times(question: Question, budget: float) -> RestrictedTimes:
    sides = (question.values.treatment, question.values.reference)
    ours, theirs = (sum(time <= budget for time in side) for side in sides)
    our_later, their_later = (sum(budget < time < math.inf for time in side) for side in sides)
    return RestrictedTimes(budget, question.cut_short, ours, theirs, our_later, their_later)


def _relative(
    question: Question, result: PairedResult, treatment: float, reference: float, gained: float | None
) -> float | None:
    if question.endpoint == "time_to_target":
        return treatment / reference if reference else None
    return result.difference.estimate / gained if gained else None


def _speed_up(question: Question, generator: numpy.random.Generator) -> SpeedUpResult:
    found = speed_up(question.values.treatment, question.values.reference, generator, 1 - question.alpha)
    return SpeedUpResult(found.ratio, found.p, found.n, len(found.left_out))


def questions_of(study: Study, comparisons: Sequence[Comparison], *, exploratory: bool) -> tuple[Question, ...]:
    """Every endpoint of the pretraining runs of every comparison; the primary family first."""
    registration = study.registration
    alpha = DEFAULT_ALPHA if registration is None else registration.alpha
    margin = None if registration is None else registration.margins.get("loss")
    questions = []
    for comparison in comparisons:
        group = comparison.group
        for endpoint in ENDPOINTS_OF_PRETRAINING:
            declared, budget, improvement, cut_short = True, None, None, False
            notes = list(comparison.notes)
            if endpoint == "time_to_target":
                if group.target is None:
                    continue
                declared = comparison.declared
                if not declared:
                    notes.append(f"target {short(group.target)}: {group.target_from}")
                budget, why = budget_of(comparison.runs, group.target)
                notes += [why] * (budget is not None)
                unit = seconds_unit(group)
                label = f"time to loss {group.target:g}" + (f", restricted to {short(budget)} {unit}" if budget else "")
                cut_short = missed(comparison.runs, group.target)
                values = Paired((), ())
                if budget is not None:
                    values = times_to_target(comparison, group.target, budget, cut_short=cut_short)
            else:
                unit = "nats"
                if endpoint == "loss_at_equal_samples":
                    notes = [note for note in notes if note != OVERSUBSCRIBED]  # there are no seconds in it
                    label, values = "evaluation loss at equal samples", losses_at_equal_samples(comparison)
                else:
                    label, values = "evaluation loss at equal seconds", losses_at_equal_seconds(comparison)
                improvement = _improvement(comparison, values)
            kind = family_of(
                registration, endpoint, group, comparison.treatment.name, exploratory=exploratory or not declared
            )
            questions.append(
                Question(
                    comparison=comparison.name,
                    treatment=comparison.treatment.name,
                    reference=comparison.reference.name,
                    group=group.name,
                    endpoint=endpoint,
                    label=label,
                    unit=unit,
                    # the modes at one number of workers; the registered family may span several speeds
                    family=kind if kind == "primary" else f"{kind} {endpoint} {group.name}",
                    kind=kind,
                    values=values,
                    lower_is_better=True,
                    margin=None if endpoint == "time_to_target" else margin,
                    alpha=alpha,
                    notes=tuple(notes),
                    budget=budget,
                    cut_short=cut_short,
                    improvement=improvement,
                )
            )
    return tuple(questions)


def family_of(
    registration: Registration | None, endpoint: str, group: Group, treatment: str, *, exploratory: bool
) -> Family:
    """primary: registered endpoint under the registered conditions; secondary: anything else of a registered study,
    which is corrected within a family of its own and was not registered."""
    if exploratory or registration is None:
        return "exploratory"
    if group.primary and registration.family is not None and treatment not in registration.family:
        return "exploratory"  # it came after the registration
    return "primary" if group.primary and endpoint == registration.endpoint else "secondary"


def _improvement(comparison: Comparison, values: Paired) -> float | None:
    """How much the reference improved: from its mean first loss to its mean loss here; 0 or below if it did not."""
    firsts = []
    for pair in comparison.pairs:
        if pair.reference.run is not None:
            _, y = curve_of(pair.reference.run, "total_samples")
            if len(y):
                firsts.append(float(y[0]))
    if not firsts or not values.reference:
        return None
    return math.fsum(firsts) / len(firsts) - math.fsum(values.reference) / len(values.reference)


def sort_rows(rows: Iterable[TestRow]) -> tuple[TestRow, ...]:
    """The primary family first, then endpoint by endpoint."""
    families = ("primary", "secondary", "exploratory")
    endpoints = ("time_to_target", "loss_at_equal_samples", "loss_at_equal_seconds", "macro_f1")
    return tuple(sorted(rows, key=lambda row: (families.index(row.family), endpoints.index(row.endpoint))))


def interval_over(values: Iterable[float | None]) -> Interval | None:
    """A t interval over the values there are; None where there is none."""
    present = [value for value in values if value is not None and math.isfinite(value)]
    return t_interval(present) if present else None


def restricted_interval(times: Sequence[float], budget: float) -> Interval | None:
    """Mean of min(T, budget) with its t interval."""
    return interval_over(min(time, budget) for time in times)
