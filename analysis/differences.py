"""Differences of differences: what a change does to one algorithm beside what it does to another.

    (loss of a - loss of a0) - (loss of b - loss of b0),    of the same seed and at equal samples

The config of a study names them before its runs, as ``differences`` of its analysis. All of them are one family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from pandas import DataFrame

from analysis.curves import unit_of
from analysis.judge import TESTS, Tested, answer
from analysis.measure import Measure, values_of
from analysis.pairs import Pairs, pair_of
from analysis.questions import Plan
from analysis.stats import Array
from asyncsgd.studies.config import Difference

ENDPOINT = "loss_at_equal_samples"
FAMILY = "differences"
"""Of those that were registered."""
NO_ARMS = "no condition has one arm of each of these algorithms"


def differences(runs: DataFrame, arms: DataFrame, measure: Measure, plan: Plan) -> DataFrame:
    """A row of `tests` for every registered difference of differences and every condition with its four arms."""
    asked = []
    for wanted in plan.registered.differences.values():
        places = list(_places(wanted, arms))
        asked += [_question(runs, measure, plan, names, where) for where, names in places]
        if not places:
            known = _named(*wanted.treatment, *wanted.reference)
            asked.append(Tested(**known, nothing=NO_ARMS, unlike=True))
    for row in asked:
        row.alpha = plan.registered.alpha
        row.family = "exploratory" if plan.exploratory or row.caveats else FAMILY
    judged = answer(asked) if asked else []
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
    """
    start = "Exploratory: " if row.family == "exploratory" else ""
    if row.word not in ("better", "worse"):
        return f"{start}whether {row.treatment} is above or below {row.reference} is {row.word}: {row.reason}."
    above = row.estimate > 0
    alike = row.n - row.wins - row.ties if above else row.wins
    much = f"{abs(row.estimate):.3g} {row.unit} {'above' if above else 'below'}"
    shown = f"{alike} of {row.n} seeds, p_Holm {row.p_holm:.3g}"
    return f"{start}{row.treatment} is {much} {row.reference} ({shown})."


def _places(wanted: Difference, arms: DataFrame) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Every group with one arm of each algorithm, with its clock, and these arms."""
    for group, members in arms.groupby("group", sort=False):
        named = {algorithm: list(own.index) for algorithm, own in members.groupby("algorithm")}
        found = [named.get(algorithm, []) for algorithm in (*wanted.treatment, *wanted.reference)]
        if all(len(names) == 1 for names in found):
            yield (str(group), str(members["clock"].iloc[0])), [name for (name,) in found]


def _question(runs: DataFrame, measure: Measure, plan: Plan, names: list[str], where: tuple[str, str]) -> Tested:
    """One question, of arms a, a0, b and b0; their losses are read at one place."""
    changed, unchanged, other, other_unchanged = names
    ours = pair_of(runs, (changed, unchanged, *where), plan)
    theirs = pair_of(runs, (other, other_unchanged, *where), plan)
    between = pair_of(runs, (unchanged, other_unchanged, *where), plan)
    sides = (ours, theirs)
    known: dict[str, Any] = _named(*names) | {"group": where[0]}
    known["unit"] = unit_of(ours.both[0][0].details) if ours.both else ""
    known["left_out"] = "; ".join(dict.fromkeys(side.left_out for side in sides if side.left_out))
    known["caveats"] = tuple(dict.fromkeys(caveat for side in sides for caveat in side.caveats))
    known["notes"] = tuple(dict.fromkeys(note for side in sides for note in side.notes))
    if unlike := ours.unlike or theirs.unlike or between.unlike:
        return Tested(**known, nothing=unlike, unlike=True)
    losses = measure.losses(ours._replace(both=[*ours.both, *theirs.both]), "samples")
    nothing = losses.get("nothing", "")
    if not nothing and not np.isfinite([losses["treatment_ends"], losses["reference_ends"]]).all():
        nothing = "a run diverged, so that it has no difference"
    if nothing:
        return Tested(**known, nothing=nothing)
    values = losses["treatment_ends"] - losses["reference_ends"][:, ::-1]
    split = len(ours.both)
    own = _by_seed(ours, values[:split])
    others = _by_seed(theirs, values[split:])
    seeds = [seed for seed in own if seed in others]
    columns = values_of(
        np.array([own[seed] for seed in seeds]).reshape(-1, 2),
        np.array([others[seed] for seed in seeds]).reshape(-1, 2),
        seeds,
    )
    known["notes"] += losses["notes"]
    return Tested(**known | columns, between=losses.get("between", ""))


def _by_seed(pairs: Pairs, values: Array) -> dict[float, Array]:
    """Seed -> the two ends between which its difference lies."""
    return {run.seed: ends for (run, _), ends in zip(pairs.both, values, strict=True)}


def _named(changed: str, unchanged: str, other: str, other_unchanged: str) -> dict[str, Any]:
    return {
        "treatment": f"{changed} - {unchanged}",
        "reference": f"{other} - {other_unchanged}",
        "endpoint": ENDPOINT,
    }
