"""Builds the rows of `tests`: what is asked of the pairs of a study's arms, in which family and at which target loss.

`analysis.answers` has the row, `QuestionRow`, and answers it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pandas import DataFrame

from analysis import stats
from analysis.answers import TESTS, QuestionRow, answer_family, speedup
from analysis.curves import unit_of
from analysis.measure import Measure, unit_of_seconds, values_of
from analysis.pairs import Pairs
from analysis.questions import BASELINE, TIMES, Plan, is_primary
from analysis.runs import Columns, Note
from analysis.scores import scores_of

TO_THE_TARGET = ("time_to_target", "target_reached")
LOSSES = ("loss_at_equal_samples", "loss_at_equal_seconds")
IN_SECONDS = (*TO_THE_TARGET, "loss_at_equal_seconds")
TARGET_SHARE_IF_UNDECLARED = 0.95
"""Without a declared target, the target is at this share of the improvement of the reference's own runs. What is said
of such a target is exploratory."""
TARGET_SHARES = (0.25, 0.5, 0.8, 0.9, 0.95, 0.98)
"""Shares of the reference's improvement that are tried as other targets."""
LARGE_SPREAD = 1.25
"""The speed-up depends on the target where it is this many times as large at one target as at another."""
FAMILIES = ("primary", "secondary", "exploratory")


def judge(runs: DataFrame, arms: DataFrame, comparisons: Sequence[Pairs], measure: Measure, plan: Plan) -> DataFrame:
    """Ask every question, correct each family, and say in one word what was shown."""
    asked: list[QuestionRow] = []
    for pairs in comparisons:
        asked += _questions_of_pairs(pairs, measure, arms, plan)
    for columns in scores_of(runs, arms, plan):
        asked.append(_question(plan, arms, columns))
    families: dict[str, list[QuestionRow]] = {}
    for row in asked:
        families.setdefault(row.holm_family, []).append(row)
    # the registered family names arms, each of which is asked one primary question
    num_registered = len(set(plan.registered.family or ()))
    judged: list[QuestionRow] = []
    for family in families.values():
        num_declared = num_registered if family[0].family == "primary" else 0
        judged += answer_family(family, num_declared)
    endpoints = [*TO_THE_TARGET, *LOSSES, *dict.fromkeys(row.endpoint for row in asked)]
    judged.sort(key=lambda row: (FAMILIES.index(row.family), endpoints.index(row.endpoint), row.order))
    return DataFrame([vars(row) for row in judged], columns=TESTS)


def target_of(pairs: Pairs, measure: Measure, plan: Plan) -> tuple[float | None, bool]:
    """The target loss, and whether it was declared."""
    if pairs.reference in plan.targets:
        return plan.targets[pairs.reference], True
    first, best = _first_and_best_loss(pairs, measure)
    if not best < first:  # also nan, where all runs of the reference diverged
        return None, False
    return first - TARGET_SHARE_IF_UNDECLARED * (first - best), False


def _first_and_best_loss(pairs: Pairs, measure: Measure) -> tuple[float, float]:
    """The means of the first and of the lowest losses of the reference's runs; nan where all of them diverged."""
    first = []
    best = []
    for _, run in pairs.run_pairs:
        losses = measure.curve(run.run, "samples")[1]
        if len(losses) and not run.diverged:
            first.append(losses[0])
            best.append(losses.min())
    if not first:
        return math.nan, math.nan
    return float(np.mean(first)), float(np.mean(best))


def other_targets(pairs: Pairs, measure: Measure, plan: Plan) -> list[str]:
    """A sentence on the two targets at which the speed-up differs most, where every run reached the target.

    The targets are shares of the improvement of the reference's pilots (their median first and lowest losses), or
    without pilots of its runs (the means of these losses).

    There is none where the intervals of the two speed-ups overlap, or where they differ by less than `LARGE_SPREAD`.
    """
    first, best = _first_and_best_loss(pairs, measure)
    if len(pairs.run_pairs) < stats.MINIMUM_PAIRS or math.isnan(first):
        return []
    pilots = plan.registered.pilots.get(pairs.reference, {})
    first = pilots.get("first_loss", first)
    best = pilots.get("best_loss", best)
    speedups = []
    for share in TARGET_SHARES:
        values = measure.times(pairs, first - share * (first - best))
        ours = values["treatment_ends"]
        theirs = values["reference_ends"]
        if len(ours) and np.isfinite(values["brackets"]).all() and ours[:, 1].min() > 0:
            speedups.append((speedup(ours, theirs)[0], share))
    if not speedups:
        return []
    most, most_share = max(speedups)
    least, least_share = min(speedups)
    if not most.low > least.high or most.estimate < LARGE_SPREAD * least.estimate:
        return []
    at_most = f"{_speedup_in_words(most)} at {100 * most_share:g} % of the improvement"
    at_least = f"{_speedup_in_words(least)} at {100 * least_share:g} % of the improvement"
    return [f"This depends on the target: {at_most} and {at_least}."]


def _speedup_in_words(ratio: stats.Interval) -> str:
    """How many times sooner a treatment is, or how many times later where the ratio is below 1."""
    if ratio.estimate >= 1:
        return f"{ratio.estimate:.2f}{TIMES} sooner"
    return f"{1 / ratio.estimate:.2f}{TIMES} later"


def _questions_of_pairs(pairs: Pairs, measure: Measure, arms: DataFrame, plan: Plan) -> list[QuestionRow]:
    """The questions that are asked of the pairs of two arms; of a control arm, on losses at equal samples alone."""
    values: dict[str, Columns] = {}
    notes_on_target: tuple[Note, ...] = ()  # empty where the target was declared
    target, is_declared = target_of(pairs, measure, plan)
    if target is not None and not pairs.control:
        values = _values_at_target(pairs, measure, target)
        if not is_declared:
            why = f"chosen after the fact, 95 % of the improvement of {pairs.reference}"
            notes_on_target = (Note(f"target {target:.3g}: {why}"),)
    unit = unit_of(pairs.run_pairs[0][0].details) if pairs.run_pairs else ""
    values["loss_at_equal_samples"] = measure.losses(pairs, "samples") | {"unit": unit}
    if not pairs.control:
        values["loss_at_equal_seconds"] = measure.losses(pairs, "seconds") | {"unit": unit}
    rows: list[QuestionRow] = []
    for endpoint, columns in values.items():
        caveats = pairs.caveats
        why_not_comparable = pairs.why_not_comparable
        if endpoint in IN_SECONDS:
            caveats += pairs.timing_caveats
            # if the seconds of none of the pairs can be compared, the reason of the first stands for all
            if len(pairs.why_untimed) == len(pairs.run_pairs) > 0:
                why_not_comparable = why_not_comparable or next(iter(pairs.why_untimed.values()))
        notes = pairs.notes
        notes_on_choice = notes_on_target if endpoint in TO_THE_TARGET else ()
        if why_not_comparable:
            columns |= {"why_no_test": why_not_comparable, "is_not_comparable": True}
        else:
            notes += (*columns.get("notes", ()), *notes_on_choice)
        columns["notes"] = notes
        columns["caveats"] = caveats + columns.get("caveats", ())
        columns |= {name: getattr(pairs, name) for name in ("treatment", "reference", "group", "left_out", "control")}
        columns |= {"endpoint": endpoint, "order": len(rows)}
        rows.append(_question(plan, arms, columns, is_chosen_after=bool(notes_on_choice)))
    return rows


def _values_at_target(pairs: Pairs, measure: Measure, target: float) -> dict[str, Columns]:
    """Endpoint -> its columns: the seconds to the target and, where all runs had one budget, whether it was reached."""
    times = measure.times(pairs, target) | {"target": target}
    if not times.get("common"):
        return {"time_to_target": times}
    surely_reached = times["brackets"][:, :, 1] <= times["budget"]
    perhaps_reached = times["brackets"][:, :, 0] < times["budget"]
    shares = np.stack((surely_reached, perhaps_reached), axis=2).astype(float)  # pairs x arms x 2
    reached = times | values_of(shares[:, 0], shares[:, 1], times["seeds"])
    # what was said of the times is not said again of the counts
    reached |= {"notes": (), "why_no_test": "", "between": "", "reached": (0, 0), "later": (0, 0)}
    return {"time_to_target": times, "target_reached": reached}


def _question(plan: Plan, arms: DataFrame, columns: Columns, *, is_chosen_after: bool = False) -> QuestionRow:
    """A question without its answer.

    Args:
        columns: its fields, but for what the registration says.
        is_chosen_after: whether its target was chosen after looking at the runs.
    """
    registered = plan.registered
    arm = arms.loc[columns["treatment"]]
    endpoint = columns["endpoint"]
    units = {"time_to_target": unit_of_seconds(arm["clock"]), "target_reached": "of the runs"}
    # a score after fine-tuning brings its own unit and direction among its columns
    defaults = {"unit": units.get(endpoint, ""), "lower": endpoint != "target_reached"}
    row = QuestionRow(**(defaults | columns), alpha=registered.alpha, family="secondary")
    if endpoint not in TO_THE_TARGET:  # a time has no margin
        score = "loss" if endpoint in LOSSES else endpoint
        row.margin = registered.margins.get(score, math.nan)
        row.margin_reason = registered.margin_reasons.get(score, "")
    has_primary_conditions = is_primary(plan, arm["workers"], arm["clock"])
    # the reference is a treatment where it is compared with the baseline
    is_registered = plan.is_in_family(row.treatment) or arm["algorithm"] == plan.reference
    # an arm that ran under the registered conditions without being registered may have been added after looking
    is_added = has_primary_conditions and not is_registered
    is_control = row.control or row.reference == BASELINE
    if row.caveats or is_chosen_after or plan.why_exploratory or is_added:
        row.family = "exploratory"
    elif has_primary_conditions and endpoint == registered.primary.endpoint and not is_control:
        row.family = "primary"
    return row
