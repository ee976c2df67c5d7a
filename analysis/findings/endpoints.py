"""By which number pairs are compared: losses at equal samples and seconds, times to a target; the questions on them.

A diverged run has a result: its loss and its time are infinite, so that losses are compared by ranks where one is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from analysis.findings.comparisons import Comparison
from analysis.findings.groups import Group, is_registered
from analysis.findings.judging import NOT_COMPARABLE, Endpoint, Family, Paired, Question
from analysis.statistics.crossings import crossing, loss_at
from analysis.statistics.intervals import short
from analysis.study.curves import budget_of, common_seconds, curve_of, end_of, missed, spacing_at
from analysis.study.types import MEASURED, Registration, Study, StudyRun

DEFAULT_ALPHA = 0.05
TO_THE_TARGET = ("time_to_target", "target_reached")
IN_SECONDS = (*TO_THE_TARGET, "loss_at_equal_seconds")
COMPARED_BY_RANKS = "a diverged run is worse than any other, so the pairs are compared by ranks"
WHOLE_BUDGET_SHARE = 0.95
"""Losses are compared at this share of the planned samples or more. Where only their number ends a run, what may be
missing is part of a round of all workers, about 5 % in the studies of this project (16 workers: 128 of 2400 samples).
What is missing beyond that was lost with some run, and would move the comparison of all others to where that one ended.
"""

ENDPOINTS_OF_PRETRAINING: tuple[Endpoint, ...] = (
    "time_to_target",
    "target_reached",
    "loss_at_equal_samples",
    "loss_at_equal_seconds",
)


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
        notes.append(f"compared at {common:g} samples, where the first run ended; the last ended at {max(ends):g}")
    if gap := max(spacing_at(run, "total_samples", common) for run in finished):
        notes.append(f"read on straight lines between evaluations up to {gap:g} samples apart")

    def value(run: StudyRun) -> float:
        if run.diverged or run.run is None:
            return math.inf
        return loss_at(*curve_of(run.run, "total_samples"), common)

    values = [(pair.seed, value(pair.treatment), value(pair.reference)) for pair in comparison.pairs]
    return _paired(values, notes + _rank_note(comparison))


def losses_at_equal_seconds(comparison: Comparison) -> Paired:
    """The evaluation loss of both runs of a pair at the largest time that both of them reached.

    A diverged run does not shorten its pair's time: the other one is taken at its end.
    """
    if all(run.diverged for run in comparison.runs):
        return _nothing(comparison)
    if short_of_plan := _short_of_plan(comparison):
        return Paired((), (), nothing_because=short_of_plan)
    values = []
    compared_at, longest = [], []
    for pair in comparison.pairs:
        both = (pair.treatment, pair.reference)
        ends = [end_of(run.run, "train_seconds") for run in both if run.run is not None and not run.diverged]
        if ends:
            compared_at.append(min(ends))
            longest.append(max(ends))
        ours, theirs = (
            math.inf if run.diverged or run.run is None else loss_at(*curve_of(run.run, "train_seconds"), min(ends))
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
    return _paired(values, notes + _rank_note(comparison))


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
    alone = all(settings.get(name) is None for name in ("seconds", "target_loss", "patience"))
    return float(samples) if alone and isinstance(samples, int | float) else 0.0


def times_to_target(
    comparison: Comparison,
    target: float,
    seconds: Sequence[float],
    budget: float,
    *,
    common: bool = False,
    cut_short: bool = False,
) -> Paired:
    """Seconds until both runs of every pair reached `target`; inf for never.

    They say nothing where no run got there within the budget.

    Args:
        seconds: of `Comparison.times_to`.
        common: whether every run was given the budget.
        cut_short: whether the budget was over because a run that had not got there had ended.
    """
    seeds = [pair.seed for pair in comparison.pairs]
    times = list(zip(seeds, seconds[::2], seconds[1::2], strict=True))
    sides = zip(*((pair.treatment, pair.reference) for pair in comparison.pairs), strict=True)
    ours, theirs = (sum(_was_there(run, target) for run in side) for side in sides)
    paired = dataclasses.replace(_paired(times), diverged_later=(ours, theirs))
    earliest = min(paired.treatment + paired.reference, default=0.0)
    if earliest < budget or (earliest == budget and not cut_short):
        return paired
    unit = seconds_unit(comparison.group)
    because = f"no run reached the target of {short(target)}"
    if common:
        return dataclasses.replace(paired, nothing_because=f"{because} within the {short(budget)} {unit} of every run")
    arms = ((comparison.treatment, paired.treatment), (comparison.reference, paired.reference))
    later = [(arm.algorithm, sum(map(math.isfinite, times)), len(times)) for arm, times in arms]
    if any(reached for _, reached, _ in later):
        told = ", ".join(f"{algorithm} {reached} of {number}" for algorithm, reached, number in later)
        because += f" before {short(budget)} {unit}, when the first run that missed it ended (later: {told})"
    return dataclasses.replace(paired, nothing_because=because)


def _was_there(run: StudyRun, target: float) -> bool:
    """Whether a run that diverged was at the target before."""
    if run.run is None or not run.diverged:
        return False
    curve = curve_of(run.run, "train_seconds")
    return len(curve[0]) > 0 and math.isfinite(crossing(*curve, target).at)


def targets_reached(seconds: Sequence[float], budget: float) -> Paired:
    """1 for a run that reached its target within the budget that every run had, 0 for one that did not.

    Args:
        seconds: of `Comparison.times_to`.
    """
    reached = [float(time <= budget) for time in seconds]
    return Paired(tuple(reached[::2]), tuple(reached[1::2]))


def seconds_unit(group: Group) -> str:
    return "s" if group.clock == MEASURED else "virtual s"


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
    values = (math.inf,) * len(comparison.pairs)
    return Paired(values, values, nothing_because="every run of both arms diverged")


def _rank_note(comparison: Comparison) -> list[str]:
    return [COMPARED_BY_RANKS] * any(run.diverged for run in comparison.runs)


def questions_of(study: Study, comparisons: Sequence[Comparison], *, exploratory: bool) -> tuple[Question, ...]:
    """Every endpoint of the pretraining runs of every comparison; the primary family first."""
    registration = study.registration
    alpha = DEFAULT_ALPHA if registration is None else registration.alpha
    margin = None if registration is None else registration.margins.get("loss")
    questions = []
    for whole in comparisons:
        group = whole.group
        timed = whole.in_seconds
        seconds = [] if group.target is None else timed.times_to(group.target)
        common = None if group.target is None else common_seconds(timed.runs, seconds)
        for endpoint in ENDPOINTS_OF_PRETRAINING if not whole.control else ("loss_at_equal_samples",):
            comparison = timed if endpoint in IN_SECONDS else whole
            caveats = (*whole.lost, *(whole.no_speed if endpoint in IN_SECONDS else ()))
            declared, budget, improvement, cut_short = True, None, None, False
            notes = list(comparison.notes)
            if endpoint in TO_THE_TARGET:
                if group.target is None or (endpoint == "target_reached" and common is None):
                    continue
                declared = comparison.declared
                if not declared:
                    notes.append(f"target {short(group.target)}: {group.target_from}")
            if endpoint == "target_reached":
                assert group.target is not None
                assert common is not None
                unit = "of the runs"
                label = f"loss {group.target:g} reached within {short(common)} {seconds_unit(group)}"
                values = targets_reached(seconds, common)
            elif endpoint == "time_to_target":
                assert group.target is not None
                budget, why = budget_of(comparison.runs, seconds)
                notes += [why] * (budget is not None)
                unit = seconds_unit(group)
                label = f"time to loss {group.target:g}" + (f", restricted to {short(budget)} {unit}" if budget else "")
                cut_short = common is None and bool(missed(comparison.runs, seconds))
                values = Paired((), ())
                if budget is not None:
                    values = times_to_target(
                        comparison, group.target, seconds, budget, common=common is not None, cut_short=cut_short
                    )
            else:
                unit = "nats"
                if endpoint == "loss_at_equal_samples":
                    label, values = "evaluation loss at equal samples", losses_at_equal_samples(comparison)
                else:
                    label, values = "evaluation loss at equal seconds", losses_at_equal_seconds(comparison)
                improvement = _improvement(comparison, values)
            if whole.pairs and not comparison.pairs:
                values, budget = _not_comparable(whole), None
            kind = family_of(
                registration,
                endpoint,
                group,
                comparison.treatment.name,
                exploratory=exploratory or not declared or bool(caveats),
            )
            if comparison.control and kind == "primary":
                kind = "secondary"
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
                    family=kind
                    if kind == "primary"
                    else f"{kind} {endpoint} {group.name}{' control' * comparison.control}",
                    kind=kind,
                    values=values,
                    lower_is_better=endpoint != "target_reached",
                    margin=None if endpoint in TO_THE_TARGET else margin,
                    margin_reason="" if registration is None else registration.margin_reasons.get("loss", ""),
                    alpha=alpha,
                    notes=tuple(notes),
                    budget=budget,
                    cut_short=cut_short,
                    common=common is not None,
                    improvement=improvement,
                    caveats=caveats,
                )
            )
    return tuple(questions)


def _not_comparable(comparison: Comparison) -> Paired:
    """No pair has seconds that may be compared."""
    reasons = dict.fromkeys(comparison.other_machines.values())
    more = f" (and {len(reasons) - 1} other pairs of machines)" * (len(reasons) > 1)
    return Paired((), (), nothing_because=f"{next(iter(reasons))}{more}", word=NOT_COMPARABLE)


def family_of(
    registration: Registration | None, endpoint: str, group: Group, treatment: str, *, exploratory: bool
) -> Family:
    """primary: registered endpoint under the registered conditions; secondary: anything else of a registered study,
    which is corrected within a family of its own and was not registered."""
    if exploratory or registration is None:
        return "exploratory"
    if group.primary and not is_registered(registration, treatment, group):
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
    if not firsts or not values.reference or values.ranked:
        return None
    return math.fsum(firsts) / len(firsts) - math.fsum(values.reference) / len(values.reference)
