"""Differences of differences: what a change does to one algorithm beside what it does to another.

    (loss of a - loss of a0) - (loss of b - loss of b0),    of the same seed and at equal samples

The config of a study names them before its runs, as ``differences`` of its analysis. All of them are one family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from analysis.answers import TESTS, QuestionRow, answer_family
from analysis.curves import unit_of
from analysis.measure import Measure, values_of
from analysis.pairs import Pairs, TwoArms, pair_of
from analysis.questions import Plan
from analysis.runs import Columns
from analysis.stats import Array
from asyncsgd.studies.config import Difference

ENDPOINT = "loss_at_equal_samples"
FAMILY = "differences"
"""The family of the registered differences of differences."""
NO_ARMS = "no condition has one arm of each of these algorithms"


class FourArms(NamedTuple):
    """The arms of (changed - unchanged) - (other - other_unchanged), by algorithm or by name, and their condition."""

    changed: str
    unchanged: str
    other: str
    other_unchanged: str
    group: str = ""
    clock: str = ""


def differences(runs: DataFrame, arms: DataFrame, measure: Measure, plan: Plan) -> DataFrame:
    """A row of `tests` for every registered difference of differences and every condition with its four arms."""
    asked = []
    for wanted in plan.registered.differences.values():
        found = list(_found(wanted, arms))
        for four in found:
            asked.append(_question(runs, measure, plan, four))
        if not found:
            algorithms = FourArms(*wanted.treatment, *wanted.reference)  # each names (changed, unchanged)
            asked.append(QuestionRow(**_names(algorithms), why_no_test=NO_ARMS, is_not_comparable=True))
    for row in asked:
        is_exploratory = plan.why_exploratory or row.caveats
        row.alpha = plan.registered.alpha
        row.family = "exploratory" if is_exploratory else FAMILY
    judged = answer_family(asked) if asked else []
    return DataFrame([vars(row) for row in judged], columns=TESTS)


def sentence(row: Any) -> str:
    """What a row shows.

    >>> from types import SimpleNamespace as Row
    >>> row = Row(treatment="a - a0", reference="b - b0", estimate=0.25, unit="nats", p_holm=0.0078)
    >>> row.wins, row.ties, row.n, row.word, row.reason, row.family = 0, 0, 8, "worse", "", "differences"
    >>> sentence(row)
    'a - a0 is 0.25 nats above b - b0 (8 of 8 seeds, p_Holm 0.0078).'
    >>> row.word, row.reason, row.family = "undecided", "p_Holm = 0.3", "exploratory"
    >>> sentence(row)
    'Exploratory: whether a - a0 is above or below b - b0 is undecided: p_Holm = 0.3.'
    >>> row.word, row.reason = "too few seeds", "5 of the 6 pairs that a verdict needs"
    >>> sentence(row)
    'Exploratory: a - a0 against b - b0: too few seeds: 5 of the 6 pairs that a verdict needs.'
    """
    start = "Exploratory: " if row.family == "exploratory" else ""
    if row.word in ("too few seeds", "not comparable"):
        return f"{start}{row.treatment} against {row.reference}: {row.word}: {row.reason}."
    if row.word not in ("better", "worse"):
        return f"{start}whether {row.treatment} is above or below {row.reference} is {row.word}: {row.reason}."
    if row.estimate > 0:
        side = "above"
        num_alike = row.n - row.wins - row.ties
    else:
        side = "below"
        num_alike = row.wins
    much = f"{abs(row.estimate):.3g} {row.unit} {side}"
    shown = f"{num_alike} of {row.n} seeds, p_Holm {row.p_holm:.3g}"
    return f"{start}{row.treatment} is {much} {row.reference} ({shown})."


def _found(wanted: Difference, arms: DataFrame) -> Iterator[FourArms]:
    """The arms of every group with one arm of each algorithm."""
    algorithms = (*wanted.treatment, *wanted.reference)
    for group, members in arms.groupby("group", sort=False):
        found = [list(members.index[members["algorithm"] == algorithm]) for algorithm in algorithms]
        if all(len(names) == 1 for names in found):
            clock = str(members["clock"].iloc[0])
            changed, unchanged, other, other_unchanged = (name for (name,) in found)
            yield FourArms(changed, unchanged, other, other_unchanged, str(group), clock)


def _question(runs: DataFrame, measure: Measure, plan: Plan, four: FourArms) -> QuestionRow:
    """One question; the losses of all four arms are read at one place."""
    condition = (four.group, four.clock)
    ours = pair_of(runs, TwoArms(four.changed, four.unchanged, *condition), plan)
    theirs = pair_of(runs, TwoArms(four.other, four.other_unchanged, *condition), plan)
    across = pair_of(runs, TwoArms(four.unchanged, four.other_unchanged, *condition), plan)
    columns = _names(four) | _limits(ours, theirs)
    why_not_comparable = ours.why_not_comparable or theirs.why_not_comparable or across.why_not_comparable
    if why_not_comparable:
        return QuestionRow(**columns, why_no_test=why_not_comparable, is_not_comparable=True)
    all_pairs = ours._replace(run_pairs=[*ours.run_pairs, *theirs.run_pairs])  # so that all are read at one position
    losses = measure.losses(all_pairs, "samples")
    why_no_test = losses.get("why_no_test", "")
    ends = [losses["treatment_ends"], losses["reference_ends"]]
    if not why_no_test and not np.isfinite(ends).all():
        why_no_test = "a run diverged, so that it has no difference"
    if why_no_test:
        return QuestionRow(**columns, why_no_test=why_no_test)
    # a difference of values in [low, high] lies between low - high and high - low
    values = losses["treatment_ends"] - losses["reference_ends"][:, ::-1]
    split = len(ours.run_pairs)
    our_differences = _by_seed(ours, values[:split])
    their_differences = _by_seed(theirs, values[split:])
    seeds = [seed for seed in our_differences if seed in their_differences]
    our_ends = np.array([our_differences[seed] for seed in seeds])
    their_ends = np.array([their_differences[seed] for seed in seeds])
    columns |= values_of(our_ends, their_ends, seeds)
    columns["notes"] += losses["notes"]
    return QuestionRow(**columns, between=losses.get("between", ""))


def _limits(ours: Pairs, theirs: Pairs) -> Columns:
    """The unit, and what limits either of two pairs, each once."""
    left_out = [side.left_out for side in (ours, theirs) if side.left_out]
    return {
        "unit": unit_of(ours.run_pairs[0][0].details) if ours.run_pairs else "",
        "left_out": "; ".join(dict.fromkeys(left_out)),
        "caveats": tuple(dict.fromkeys(ours.caveats + theirs.caveats)),
        "notes": tuple(dict.fromkeys(ours.notes + theirs.notes)),
    }


def _by_seed(pairs: Pairs, values: Array) -> dict[float, Array]:
    """Seed -> the two ends between which its difference lies."""
    seeds = [run.seed for run, _ in pairs.run_pairs]
    return dict(zip(seeds, values, strict=True))


def _names(arms: FourArms) -> Columns:
    return {
        "treatment": f"{arms.changed} - {arms.unchanged}",
        "reference": f"{arms.other} - {arms.other_unchanged}",
        "group": arms.group,
        "endpoint": ENDPOINT,
    }
