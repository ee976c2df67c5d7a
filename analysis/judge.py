"""From runs and curves to `tests`: a row is a question asked of pairs of runs, its answer, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import stats
from analysis.curves import unit_of
from analysis.measure import Measure, values_of
from analysis.pairs import Pairs, pairs_of
from analysis.questions import BASELINE, TIMES, Plan, exploratory, groups, is_primary
from analysis.scores import scores_of

TESTS = [
    "treatment", "reference", "group", "endpoint", "family", "family_size", "unit", "lower", "alpha", "n", "seeds",
    "treatment_values", "reference_values", "treatment_ends", "reference_ends", "estimate", "low", "high", "ratio",
    "ratio_low", "ratio_high", "ratio_ends", "test", "p", "p_ends", "p_holm", "least_p", "margin", "margin_reason",
    "refused", "gained", "equal_low", "equal_high", "p_equal", "wins", "ties", "outside", "diverged", "target",
    "budget", "common", "cut_short", "longest", "reached", "later", "between", "word", "reason", "left_out", "notes",
    "caveats",
]  # fmt: skip
"""The columns of `tests`; docs/tables.md says what each is."""
TO_THE_TARGET = ("time_to_target", "target_reached")
LOSSES = ("loss_at_equal_samples", "loss_at_equal_seconds")
IN_SECONDS = (*TO_THE_TARGET, "loss_at_equal_seconds")
ON_MARGIN = ("equivalent", "different but negligible")
"""The words that rest on the margin."""
DECIDED = ("better", "worse", *ON_MARGIN)
WIDEST, EXPLAINED, LEAST_WORDS = 0.5, 0.1, 3
"""Margins as shares of the reference's improvement: never above the first, above the second only with a reason of so
many words. A difference above the second is never called negligible."""
AFTERWARDS = 0.95
"""Where no target was declared: this share of the improvement of the reference's own runs, which is exploratory."""
AFTER_OTHERS = "the interval alone shows no difference: Holm's method found it after others of its family"
EQUAL_AFTER_OTHERS = "the interval alone shows no equivalence: Holm's method found it after others of its family"
FAMILIES = ("primary", "secondary", "exploratory")


def judge(runs: pd.DataFrame, curves: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Ask every question, correct each family, and say in one word what was shown."""
    arms, measure = groups(runs, plan), Measure(curves)
    plan = plan._replace(exploratory=exploratory(runs, arms, plan))
    found = [row for pairs in pairs_of(runs, arms, plan) for row in _of_pairs(pairs, measure, arms, plan)]
    for score in scores_of(runs, arms, plan):
        row = _question(plan, arms, score, limited=bool(score["caveats"]))
        if row["reference"] == BASELINE:  # asked once, not in every group
            row["family"] = "exploratory" if row["family"] == "exploratory" else "secondary"
            row["family_key"] = f"{row['family']} {row['endpoint']} baseline"
        found.append(row)
    if not found:
        return pd.DataFrame(columns=TESTS)
    asked = pd.DataFrame(found)
    families = [family.to_dict("records") for _, family in asked.groupby("family_key", sort=False)]
    judged = [row for family in families for row in answer(family, len(plan.family or ()))]
    endpoints = [*TO_THE_TARGET, *LOSSES, *(score for score in asked["endpoint"].unique() if is_score(score))]
    judged.sort(key=lambda row: (FAMILIES.index(row["family"]), endpoints.index(row["endpoint"]), row["order"]))
    return pd.DataFrame(judged)[TESTS]


def target_of(pairs: Pairs, measure: Measure, plan: Plan) -> tuple[float | None, bool]:
    """The target loss, and whether it was declared."""
    if pairs.reference in plan.targets:
        return plan.targets[pairs.reference], True
    runs = pairs.theirs.loc[~pairs.theirs["diverged"], "run"]
    losses = [y for run in runs if len(y := measure.curve(run, "samples")[1])]
    if not losses:
        return None, False
    first, best = np.mean([y[0] for y in losses]), np.mean([y.min() for y in losses])
    return (float(first - AFTERWARDS * (first - best)), False) if best < first else (None, False)


SHARES, LARGE_SPREAD = (0.25, 0.5, 0.8, 0.9, 0.95, 0.98), 1.25
"""Shares of the reference's improvement whose targets are looked at; two of them disagree where one speed-up is so many
times the other."""


def other_targets(pairs: Pairs, measure: Measure, plan: Plan) -> list[str]:
    """The two targets at which the speed-up differs most, where all runs reached them and the intervals are apart."""
    alive = pairs.theirs[~pairs.theirs["diverged"]]
    losses = [y for run in alive["run"] if len(y := measure.curve(run, "samples")[1])]
    if len(pairs.ours) < stats.MINIMUM_PAIRS or not losses:
        return []
    pilots = (plan.registered.get("pilots") or {}).get(pairs.reference) or {}
    first = pilots.get("first_loss", np.mean([y[0] for y in losses]))
    best = pilots.get("best_loss", np.mean([y.min() for y in losses]))
    found = []
    for share in SHARES:
        values = measure.times(pairs, first - share * (first - best))
        ours, theirs = values["treatment_ends"], values["reference_ends"]
        if len(ours) and np.isfinite(values["crossed"]).all() and ours[:, 1].min() > 0:
            found.append((_ratio(ours, theirs)[0], share))
    if not found:
        return []
    most, least = max(found), min(found)
    if not most[0].low > least[0].high or most[0].estimate < LARGE_SPREAD * least[0].estimate:
        return []
    told = " and ".join(f"{sooner(one)} at {100 * share:g} % of the improvement" for one, share in (most, least))
    return [f"This depends on the target: {told}."]


def sooner(ratio: stats.Interval) -> str:
    """A ratio of times in words, above 1 either way."""
    return f"{max(ratio.estimate, 1 / ratio.estimate):.2f}{TIMES} {'sooner' if ratio.estimate >= 1 else 'later'}"


def _of_pairs(pairs: Pairs, measure: Measure, arms: pd.DataFrame, plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    target, declared = target_of(pairs, measure, plan)
    timed = measure.times(pairs, target) if target is not None and not pairs.control else None
    for endpoint in ("loss_at_equal_samples",) if pairs.control else (*TO_THE_TARGET, *LOSSES):
        after: tuple[str, ...] = ()
        if endpoint in TO_THE_TARGET:
            if timed is None or (endpoint == "target_reached" and not timed.get("common")):
                continue
            chosen = f"target {target:.3g}: chosen after the fact, 95 % of the improvement of {pairs.reference}"
            after, values = () if declared else (chosen,), timed | {"target": target}
            if endpoint == "target_reached":
                early, late = np.moveaxis(timed["crossed"], 2, 0)
                hits = np.stack((late <= timed["budget"], early < timed["budget"]), axis=2).astype(float)
                values |= values_of(hits[:, 0], hits[:, 1], timed["seeds"])
                values |= {"notes": (), "nothing": "", "between": "", "reached": (0, 0), "later": (0, 0)}
        else:
            values = measure.losses(pairs, "samples" if endpoint == "loss_at_equal_samples" else "seconds")
        seconds = endpoint in IN_SECONDS
        unlike = pairs.unlike
        if seconds and len(pairs.apart) == len(pairs.ours) > 0:
            unlike = unlike or next(iter(pairs.apart.values()))
        known = values | {"endpoint": endpoint, "order": len(rows)}
        known |= {name: getattr(pairs, name) for name in ("treatment", "reference", "group", "left_out")}
        if endpoint in LOSSES:
            known["unit"] = unit_of(pairs.ours) if len(pairs.ours) else ""
        notes = () if unlike else (*values.get("notes", ()), *after)  # of what is not compared nothing is said
        known |= {"notes": (*pairs.notes, *notes)}
        known |= {"caveats": pairs.caveats + pairs.no_speed * seconds + values.get("caveats", ())}
        known |= {"nothing": unlike, "unlike": True} if unlike else {}
        limited = bool(known["caveats"] or after)
        rows.append(_question(plan, arms, known, limited=limited, clock=pairs.clock, control=pairs.control))
    return rows


BLANK = dict.fromkeys(TESTS, "") | {
    **{"treatment": "a", "reference": "b", "endpoint": "numbers", "family": "exploratory", "alpha": 0.05},
    **dict.fromkeys(("margin", "gained", "target", "budget", "longest"), math.nan),
    **{"lower": True, "common": False, "cut_short": False, "reached": (0, 0), "later": (0, 0)},
    **{"nothing": "", "between": "", "unlike": False, "notes": (), "caveats": (), "order": 0},
}
"""A row of `tests` of which nothing is known; `answer` needs its values."""


def is_score(endpoint: str) -> bool:
    """Whether an endpoint is a score after fine-tuning, whose unit and direction come with its values."""
    return endpoint not in (*TO_THE_TARGET, *LOSSES)


def _question(
    plan: Plan, arms: pd.DataFrame, known: dict[str, Any], *, limited: bool, clock: str = "", control: bool = False
) -> dict[str, Any]:
    """A row of `tests` without its answer, from what is `known` of it."""
    registered, own, endpoint = plan.registered, arms.loc[known["treatment"]], known["endpoint"]
    primary = is_primary(plan, own["workers"], own["clock"])
    named = plan.family is None or known["treatment"] in plan.family or own["algorithm"] == plan.reference
    family = "secondary"
    if limited or plan.exploratory or (primary and not named):
        family = "exploratory"
    elif primary and endpoint == plan.primary.get("endpoint") and not control:
        family = "primary"
    score = endpoint if is_score(endpoint) else "loss"
    margin = math.nan if endpoint in TO_THE_TARGET else registered.get("margins", {}).get(score, math.nan)
    seconds = "s" if clock == "measured" else "virtual s"
    units = {"time_to_target": seconds, "target_reached": "of the runs"}
    of_the_family = f"{family} {endpoint} {known['group']}{' control' * control}"
    asked = {
        "family": family,
        "family_key": family if family == "primary" else of_the_family,
        "unit": units.get(endpoint, ""),
        "lower": endpoint != "target_reached",
        "alpha": registered.get("alpha", 0.05),
        "margin": margin,
        "margin_reason": registered.get("margin_reasons", {}).get(score, ""),
    }
    return BLANK | asked | known


def of_numbers(ours: stats.Numbers, theirs: stats.Numbers, **known: Any) -> dict[str, Any]:
    """A row of `tests` without its answer, of paired numbers that belong to no study; `answer` takes it.

    Args:
        known: other columns: margin, margin_reason, gained, lower, alpha.
    """
    return BLANK | values_of(np.asarray(ours, float), np.asarray(theirs, float), list(range(len(ours)))) | known


def answer(family: Sequence[dict[str, Any]], registered: int = 0) -> list[dict[str, Any]]:
    """Test the questions of one family together; `registered` ones that are not here count as showing nothing."""
    missing = max(0, registered - len(family)) if family[0]["family"] == "primary" else 0
    size = len(family) + missing
    rows = [tested(row, size) for row in family]
    for name, source, absent in (
        ("p_holm", "p", math.nan),
        ("p_equal", "p_equal", math.nan),
        ("least_p", "least_p", 1.0),
    ):
        values = stats.holm([row[source] for row in rows] + [absent] * missing)
        for row, value in zip(rows, values, strict=False):
            row[name] = value if row[source] == row[source] else math.nan
    for row in rows:
        row["word"], row["reason"] = word(row)
        if row["word"] in ("better", "worse") and row["low"] <= 0 <= row["high"]:
            row["notes"] += (AFTER_OTHERS,)
        if row["word"] in ON_MARGIN and not (-row["margin"] < row["equal_low"] and row["equal_high"] < row["margin"]):
            row["notes"] += (EQUAL_AFTER_OTHERS,)
    return rows


ANSWERS = ("estimate", "low", "high", "ratio", "ratio_low", "ratio_high", "p", "p_equal", "equal_low", "equal_high")


def tested(question: dict[str, Any], size: int) -> dict[str, Any]:
    """A question with the answer of its own pairs, in a family of `size`.

    Where values lie between two looks it is tested twice: with all of the treatment at their upper ends and all of the
    reference at their lower ones, and the reverse. What both show is known, so the larger p counts, and 1 where the two
    differ in direction.
    """
    row = question | dict.fromkeys((*ANSWERS, "outside", "direction"), math.nan)
    row |= {"test": "", "wins": 0, "ties": 0, "refused": "", "diverged": (0, 0), "family_size": size}
    row |= {"p_ends": (), "ratio_ends": (), "least_p": stats.smallest_p(row["n"]) if row["n"] else 1.0}
    if not row["n"] or row["nothing"]:
        return row
    (our_low, our_high), (their_low, their_high) = ours, theirs = row["treatment_ends"].T, row["reference_ends"].T
    sooner = (our_high <= their_low) & (our_low < their_high)
    later = (their_high <= our_low) & (their_low < our_high)
    wins, losses = (sooner, later) if row["lower"] else (later, sooner)
    row |= {"wins": int(wins.sum()), "ties": int((~wins & ~losses).sum())}
    lost = np.isinf([our_high, their_high])
    if lost.any():
        row["diverged"] = (int((lost[0] & ~lost[1]).sum()), int((lost[1] & ~lost[0]).sum()))
    if (margin := row["margin"]) == margin and not lost.any():
        row["refused"] = refused(margin, row["gained"], row["margin_reason"])
    if (ours[0] == ours[1]).all() and (theirs[0] == theirs[1]).all():
        answered = _answered(row, our_high, their_high)
    else:
        answered = _of_both(_answered(row, our_high, their_low), _answered(row, our_low, their_high))
    row |= answered
    if row["endpoint"] == "time_to_target" and our_high.min() > 0 and not row["nothing"]:
        interval, row["ratio_ends"] = _ratio(ours.T, theirs.T, 1 - row["alpha"] / size)
        missed = [reached < row["n"] for reached in row["reached"]]
        row |= {"ratio": interval.estimate, "ratio_low": interval.low, "ratio_high": interval.high}
        row |= {"ratio_low": 0.0} if missed[0] else {}
        row |= {"ratio_high": math.inf} if missed[1] else {}
    return row


def _answered(row: dict[str, Any], ours: stats.Numbers, theirs: stats.Numbers) -> dict[str, Any]:
    """The answer of pairs whose values are known."""
    size, level = row["family_size"], 1 - row["alpha"] / row["family_size"]
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if np.isinf([ours, theirs]).any():
        ranks = stats.signed_ranks(ours, theirs)
        found: dict[str, Any] = {"test": "signed rank", "direction": float(ranks.sum())}
        if not ranks.any():
            return found | {"nothing": "every pair is a tie"}
        return found | {"p": stats.sign_flip(ranks, 0 * ranks)[0]}
    if row["endpoint"] == "target_reached":
        p, interval = stats.mcnemar(ours, theirs, level)
        if p != p:
            told = "one run that reached the target and one that did not"
            return {"nothing": f"none of {row['n']} pairs has {told}: there is nothing to test"}
    else:
        p, interval = stats.sign_flip(ours, theirs, level)
        same = row["n"] > 1 and np.ptp(ours - theirs) <= stats.ROUNDING * np.abs([ours, theirs]).max()
        if same and not row["between"]:  # between looks that all runs share, it is no wonder
            told = f"all {row['n']} differences are {interval.estimate:.3g}"
            return {"nothing": f"{told}; nothing varied: nothing was measured"}
    found = {"p": p, "estimate": interval.estimate, "low": interval.low, "high": interval.high}
    found |= {"direction": interval.estimate, "test": "McNemar" if row["endpoint"] == "target_reached" else "sign flip"}
    if (margin := row["margin"]) == margin and not row["refused"]:
        p, inside = stats.equivalence(ours, theirs, margin, 1 - 2 * row["alpha"] / size)
        found |= {"p_equal": p, "equal_low": inside.low, "equal_high": inside.high}
        found["outside"] = int((np.abs(ours - theirs) >= margin).sum())
    return found


def _of_both(late: dict[str, Any], early: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one question have in common: the larger p, and the hull of their intervals."""
    both = [one for one in (late, early) if not one.get("nothing")]
    if not both:
        return late
    p_ends = tuple(one.get("p", 1.0) for one in (late, early))
    directions = {np.sign(one.get("direction", 0.0)) for one in (late, early)}
    found = both[0] | {"p_ends": p_ends, "p": max(p_ends) if len(directions) == 1 else 1.0}
    for name, ends in (("low", min), ("high", max), ("equal_low", min), ("equal_high", max), ("outside", max)):
        found[name] = ends(one.get(name, math.nan) for one in both)
    for name in ("estimate", "direction"):
        found[name] = float(np.mean([one.get(name, math.nan) for one in both]))
    found["p_equal"] = float(np.max([one.get("p_equal", math.nan) for one in both]))
    return found


def _ratio(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], level: float = 0.95
) -> tuple[stats.Interval, tuple[float, float]]:
    """Times of the reference over those of the treatment: the hull of the intervals at both ends (n x 2), that of the
    middle, and the estimates at both ends. An end at 0 seconds has no upper one.
    """
    late = stats.sign_flip(ours[:, 1], theirs[:, 0], level, ratio=True)[1]
    middle = float(theirs.sum() / ours.sum())
    if not ours[:, 0].min() > 0:
        return late._replace(estimate=middle, high=math.inf), (late.estimate, math.inf)
    early = stats.sign_flip(ours[:, 0], theirs[:, 1], level, ratio=True)[1]
    return late._replace(estimate=middle, high=early.high), (late.estimate, early.estimate)


def refused(margin: float, gained: float, reason: str) -> str:
    """Why a margin says nothing beside what the reference improved by; empty where it may be used."""
    if gained != gained:
        return ""
    if gained <= 0:
        return f"the reference did not improve, so a margin of ±{margin:.3g} cannot be judged"
    share = f"the margin of ±{margin:.3g} is {100 * margin / gained:.0f} % of the reference's improvement"
    if margin > WIDEST * gained:
        return f"{share}, too wide to mean anything"
    if margin > EXPLAINED * gained and len(reason.split()) < LEAST_WORDS:
        return f"{share}, and the plan gives no reason for it (margin_reasons)"
    return ""


def about_margin(row: Any, reference: str) -> str:
    """The share of a margin that a word rests on, and its reason; empty where no word does."""
    if row.word not in ON_MARGIN or row.gained != row.gained:
        return ""
    share = f"{100 * row.margin / row.gained:.2g} % of the improvement of {reference}"
    because = f": {row.margin_reason}" if row.margin_reason else ""
    return f"the margin of ±{row.margin:g} is {share}{because}"


def word(row: dict[str, Any]) -> tuple[str, str]:
    """What was shown, and why that can be said."""
    n, alpha = row["n"], row["alpha"]
    minimum = stats.minimum_pairs(1, alpha)
    if row["unlike"]:
        return "not comparable", row["nothing"]
    if row["nothing"] and (n >= minimum or not n):
        return "undecided", row["nothing"]
    if n < minimum:
        possible = f"; the smallest p of {n} pair{'s' * (n != 1)} is {stats.smallest_p(n):.3g}" if n else ""
        more = f"; {row['nothing']}" * bool(row["nothing"])
        return "too few seeds", f"{n} of the {minimum} pairs that a verdict needs{possible}{more}"
    differs, text = row["p_holm"] < alpha, f"p_Holm = {row['p_holm']:.3g}"
    more = f"; {row['refused']}" * bool(row["refused"])
    if row["p_equal"] < alpha:
        level = f"{100 * (1 - 2 * alpha / row['family_size']):.3g} % interval"
        inside = f"the {level} [{row['equal_low']:.3g}, {row['equal_high']:.3g}] lies inside ±{row['margin']:.3g}"
        if not differs or row["equal_low"] <= 0 <= row["equal_high"]:
            return "equivalent", f"{inside}; {text}"
        if not abs(row["estimate"]) > EXPLAINED * row["gained"]:
            return "different but negligible", f"{text}, but {inside}"
        share = f"{100 * abs(row['estimate']) / row['gained']:.0f} % of the reference's improvement"
        more = f"; within the margin of ±{row['margin']:.3g}, but {share}"
    if differs:
        found = "better" if (row["direction"] < 0) == row["lower"] else "worse"
        return found, f"{text} < {alpha:g}, {'lower' if row['lower'] else 'higher'} is better{more}"
    if row["p_ends"] and (row["p"] > max(row["p_ends"]) or min(row["p_ends"]) < alpha / row["family_size"]):
        return "undecided", f"{row['between']}; {text}{more}"
    if hopeless := hopeless_because(n, row["family_size"], row["least_p"], alpha):
        return "undecided", f"{text}; {hopeless}{more}"
    effect = stats.detectable_effect(n, alpha / row["family_size"])
    found = f"with {n} pairs this test finds a difference of {effect:.2f} SD of the differences in 80 % of studies"
    return "undecided", "; ".join([text, *[found] * (row["test"] == "sign flip")]) + more


def hopeless_because(n: int, family_size: int, least_p: float, alpha: float) -> str:
    """Why so few pairs can show nothing in a family so large; empty where they can."""
    if not least_p >= alpha:
        return ""
    family = f" and {family_size} comparisons" if family_size > 1 else ""
    return f"no difference of any size can be found with {n} pairs{family}"
