"""How far to trust a study: one row a check, with how it is to be read. Each check is a function of the tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pandas import DataFrame, Series

from analysis import stats
from analysis.curves import lowest_held, on_common_looks, reached
from analysis.gate import BUDGET, MOST_LOAD, between, told_apart
from analysis.measure import Measure
from analysis.questions import Plan, conditions
from analysis.runs import each, listed, where
from analysis.scores import BASELINE, not_learned
from asyncsgd.studies.files import PlannedArm

LEVELS = ("bad", "warning", "unknown", "good")
"""How a line is to be read: wrong, to be careful with, not known, as it should be. Failures come first."""
GUARD_RUNS = 3
"""The fewest seeds that the sync guard is decided on."""


class Seen(NamedTuple):
    """What a check may look at."""

    runs: DataFrame
    curves: DataFrame
    tests: DataFrame
    plan: Plan
    exploratory: str

    @property
    def used(self) -> DataFrame:
        """The test runs."""
        return self.runs[self.runs["stage"] == "test"]

    @property
    def measured(self) -> DataFrame:
        """Those whose seconds were measured."""
        return self.used[(self.used["clock"] == "measured") & (self.used["status"] != "MISSING")]


Row: TypeAlias = tuple[str, str, str]
"""Value, level, and a sentence more."""


def trust(seen: Seen) -> DataFrame:
    """Title, value, level and detail of every check, failures first."""
    rows = [(title, *one(seen)) for title, one in CHECKS.items()]
    rows.sort(key=lambda row: LEVELS.index(row[2]))
    return DataFrame(rows, columns=["title", "value", "level", "detail"])


def graded(bad: list[str], of: int, what: str, good: str, why: str, level: str = "bad") -> Row:
    """Good where `bad` is empty, else its names and why."""
    return (f"not in {len(bad)} of {of} {what}", level, f"{', '.join(bad)}: {why}") if bad else (good, "good", "")


NOWHERE: Row = ("does not apply", "unknown", "")


def guard(seen: Seen) -> Row:
    """Synchronous training against one process that accumulates the same batches, by samples to one loss."""
    found = list(_guards(seen))
    if not found:
        return "not run", "unknown", "no one-process arm has the global batch and the rate of a sync arm"
    order = ("failed", "not shown", "passed")
    worst = min((word for word, _ in found), key=order.index)
    level = {"passed": "good", "not shown": "warning", "failed": "bad"}[worst]
    return worst, level, "; ".join(told for word, told in sorted(found, key=lambda one: order.index(one[0])))


def _guards(seen: Seen) -> Iterator[tuple[str, str]]:
    measure = Measure(seen.curves)
    used = where(seen.used, usable=True, replicate=0)
    for arm, own in used[(used["algorithm"] == "sync") & (used["workers"] > 1)].groupby("arm"):
        batch = float(_global_batch(own).max())
        others = used[(used["algorithm"] == "single") & (_global_batch(used) == batch)]
        for other, theirs in others[others["learning_rate"] == own["learning_rate"].iloc[0]].groupby("arm"):
            ours = own.drop_duplicates("seed").set_index("seed", drop=False)
            single = theirs.drop_duplicates("seed").set_index("seed", drop=False)
            seeds = sorted(set(ours.index) & set(single.index))
            both = [row for side in (ours, single) for row in each(side.loc[seeds])]
            curves = [measure.curve(row.run, "samples") for row in both]
            if len(seeds) < GUARD_RUNS or any(row.diverged for row in both) or not all(len(x) for x, _ in curves):
                continue
            may_differ = {*told_apart(str(arm), str(other), seen.plan), "batch_size", "accumulate"}
            if all(row.asked.get("schedule") == "constant" for row in both):
                may_differ |= {*BUDGET}  # when a run ends then changes no step before it
            if why := between(ours, single, may_differ).unlike:
                yield "not shown", f"{arm} against {other}: not comparable: {why}"
                continue
            goal = max([lowest_held(curve) for curve in curves] + [seen.plan.targets.get(str(arm), -math.inf)])
            if goal >= min(float(y[0]) for _, y in curves):
                continue
            at = [reached(one, goal) for one in on_common_looks(curves)]
            word, told = guarded(at[: len(seeds)], at[len(seeds) :], batch)
            yield word, f"{arm} against {other}: samples to {goal:.4g} {told}"


def _global_batch(runs: DataFrame) -> Series:
    return runs["batch_size"] * runs["accumulate"].fillna(1) * runs["workers"]


def guarded(ours: stats.Numbers, theirs: stats.Numbers, batch: float) -> tuple[str, str]:
    """Whether samples to one loss differ by less than an update; faster is as suspect as slower."""
    inside = stats.equivalence(ours, theirs, batch, 0.9)[1]
    low, high = (inside.low, inside.high) if inside.low == inside.low else (inside.estimate,) * 2
    word = "passed" if -batch < low and high < batch else "failed" if low > batch or high < -batch else "not shown"
    return word, f"differ by [{low:.3g}, {high:.3g}], an update has {batch:g}"


def all_runs(seen: Seen) -> Row:
    used = seen.used
    plan = seen.plan
    counts = {"finished": (used["usable"] & ~used["diverged"]).sum(), "diverged": used["diverged"].sum()}
    lost = Counter(used.loc[~used["usable"], "status"])
    told = ", ".join(f"{number} {name}" for name, number in {**counts, **lost}.items() if number or name == "finished")
    first = f"{len(used)} planned" if plan.runs else f"{len(used)} found (no plan says how many there should be)"
    level = "bad" if not counts["finished"] else "warning" if counts["diverged"] or lost else "good"
    stages = Counter(seen.runs["stage"])
    words = {"tuning": "tuning", "pilot": "pilot", "finetune": "fine-tuning"}
    others = ", ".join(f"{stages[stage]} {name}" for stage, name in words.items() if stages[stage])
    return f"{first}, {told}", level, f"beside the test runs: {others} runs" if others else ""


def seeds(seen: Seen) -> Row:
    if seen.tests.empty:
        return "no pairs", "bad", ""
    counts = seen.tests["n"][seen.tests["word"] != "not comparable"]
    number = seen.plan.registered.num_seeds
    if not len(counts):
        return "no pairs", "bad", "nothing is comparable"
    least = counts.min()
    most = counts.max()
    told = f"{number} registered; " if number else ""
    value = f"{least} complete pairs" if least == most else f"{least} to {most} complete pairs"
    if least < stats.MINIMUM_PAIRS:
        return value, "bad", f"{told}below {stats.MINIMUM_PAIRS} there is no verdict"
    return value, "warning" if number and least < number else "good", told.rstrip("; ")


def budget(seen: Seen) -> Row:
    timed = seen.tests[seen.tests["endpoint"] == "time_to_target"]
    if timed.empty:
        return NOWHERE
    cut = timed.loc[~timed["common"].astype(bool) & (timed["n"] > 0), "group"]
    without = sorted({conditions(group) for group in cut})
    why = "the faster arm stopped first, and a target that it misses says nothing"
    return graded(without, timed["group"].nunique(), "groups", "in every group", why, "warning")


def batches(seen: Seen) -> Row:
    told = {note.about[0] for notes in seen.tests["notes"] for note in notes if note.kind == "batches"}
    return ("no", "warning", "; ".join(sorted(told))) if told else ("yes", "good", "")


def oversubscribed(seen: Seen) -> Row:
    over = where(seen.measured, oversubscribed=True)
    if not len(over):
        return "no", "good", ""
    why = f"more threads than cores in {', '.join(over['arm'].unique())}: their seconds are no speed comparison"
    return f"{len(over)} of {len(seen.measured)} measured runs", "bad", why


def others(seen: Seen) -> Row:
    load = seen.measured["other_load"].dropna()
    if not len(load):
        return ("not known", "unknown", "no run says what else used its machine") if len(seen.measured) else NOWHERE
    most = f"{100 * load.max():.0f} % of the cores"
    busy = (load > MOST_LOAD).sum()
    if busy:
        return f"{busy} of {len(seen.measured)} measured runs", "bad", f"up to {most}: no speed comparison"
    unknown = len(seen.measured) - len(load)
    return f"at most {most}", "good", f"{unknown} runs do not say" if unknown else ""


def comparable(seen: Seen) -> Row:
    apart = seen.tests[seen.tests["word"] == "not comparable"]
    if not len(apart):
        return "all", "good", ""
    return f"not in {len(apart)} of {len(seen.tests)} tests", "bad", "; ".join(dict.fromkeys(apart["reason"]))


def acted(seen: Seen) -> Row:
    used = seen.used[seen.used["usable"]]
    ruled = used[(used["mode"] == "async") & ~used["algorithm"].isin(("async", "sync")) & (used["workers"] > 1)]
    if not len(ruled):
        return NOWHERE
    arms = dict(iter(ruled.groupby("arm")["altered"]))
    silent = [f"{arm} (0 gradients)" for arm, counts in arms.items() if counts.notna().all() and not counts.any()]
    unknown = [arm for arm, counts in arms.items() if counts.isna().any()]
    if unknown and not silent:
        return "not known", "unknown", f"runs without a count in {', '.join(unknown)}"
    why = "the rule altered nothing, so these are runs of asynchronous SGD"
    return graded(silent, len(arms), "arms", "all", why)


def tuned(seen: Seen) -> Row:
    for stage, use in (("tuning", "tuning"), ("pilot", "the target")):
        shared = sorted(set(seen.used["seed"].dropna()) & set(seen.runs.loc[seen.runs["stage"] == stage, "seed"]))
        if shared:
            return "seeds shared", "bad", f"seed {listed(shared)} was used for {use} and for testing"
    budgets = {
        name: sum(len(trial.seeds) for trial in arm.trials) for name, arm in seen.plan.arms.items() if name != BASELINE
    }
    if not any(budgets.values()):
        return "not tuned", "warning", "no arm's learning rate was tuned in this folder"
    endpoint = seen.plan.registered.primary.endpoint
    by = ""
    if endpoint not in ("", "loss_at_equal_samples"):
        by = f"; chosen by the final loss at equal samples, not by the primary endpoint ({endpoint.replace('_', ' ')})"
    if len(set(budgets.values())) > 1:
        told = ", ".join(f"{arm} {number}" for arm, number in budgets.items())
        return "UNEQUAL budgets", "bad", f"tuning runs per arm: {told}{by}"
    tried = {name: [str(one.settings) for one in arm.trials] for name, arm in seen.plan.arms.items()}
    fewer = [name for name, trials in tried.items() if len(set(trials)) < len(trials)]
    number = next(iter(budgets.values()))
    said = f"{number} tuning runs per arm, on other seeds than the tests{by}"
    if fewer:
        said += f"; some trials are the same in {', '.join(fewer)}"
    return "equal budgets", "warning" if fewer else "good", said


def at_edge(arm: PlannedArm) -> bool:
    """Whether the chosen learning rate of an arm is the smallest or the largest that was tried."""
    rates: set[Any] = {trial.settings.get("learning_rate") for trial in arm.trials} - {None}
    return len(rates) > 1 and (arm.chosen or {}).get("learning_rate") in (min(rates), max(rates))


def edges(seen: Seen) -> Row:
    arms = {name: arm for name, arm in seen.plan.arms.items() if arm.trials}
    if not arms:
        return "does not apply", "unknown", "nothing was tuned"
    beyond = [name for name, arm in arms.items() if at_edge(arm)]
    return graded(beyond, len(arms), "arms", "yes", "the best rate may lie beyond the grid", "warning")


def registration(seen: Seen) -> Row:
    if not seen.plan.sha256:
        return "none: exploratory", "warning", seen.exploratory
    digest = f"sha256 {seen.plan.sha256[:16]}"
    return (f"{digest}: exploratory", "bad", seen.exploratory) if seen.exploratory else (digest, "good", "")


def learned(seen: Seen) -> Row:
    tuned = where(seen.runs, stage="finetune", usable=True, diverged=False)
    if not len(tuned):
        return NOWHERE
    arms = dict(iter(tuned.groupby("arm")))
    constant = [arm for arm, own in arms.items() if any(_one_class(details) for details in own["details"])]
    ignorant = [arm for arm, own in arms.items() if not_learned(own)]
    why = "some predict one class for every text" if constant else "no better than the commonest tag"
    return graded(constant or ignorant, len(arms), "arms", "all", f"{why}, so their score says nothing")


def _one_class(details: dict[str, Any]) -> bool:
    matrix = details.get("confusion")
    return bool(matrix) and int((np.array(matrix).sum(axis=0) > 0).sum()) == 1


def copies(seen: Seen) -> Row:
    used = seen.used
    known = where(used, usable=True, diverged=False)
    known = known[(known["parameters_sha256"] != "") & (known["updates"] > 0)]
    known = known[known["terms"].notna()]  # a closed-form problem may have no chance in it for a seed to decide
    several = known.groupby(["arm", "parameters_sha256"])["seed"].nunique()
    same = sorted({arm for (arm, _), number in several.items() if number > 1})
    return graded(same, known["arm"].nunique(), "arms", "yes", "two seeds ended with the same parameters: a copy")


def code(seen: Seen) -> Row:
    commits = Counter(one or "unknown" for one in seen.used.loc[seen.used["status"] != "MISSING", "commit"])
    if not set(commits) - {"unknown"}:
        return "not known", "unknown", "no run names its commit"
    detail = []
    if len(commits) > 1:
        detail.append("runs of different commits are compared")
    if any("modified" in one for one in commits):
        detail.append("runs with a modified working tree")
    shown = {
        one: f"{one[:12]}{' modified' * one.endswith(' modified')} ({n} runs)" for one, n in sorted(commits.items())
    }
    return ", ".join(shown.values()), "warning" if detail else "good", "; ".join(detail)


def reading(seen: Seen) -> Row:
    left_out = seen.runs.loc[(seen.runs["left_out"] != "") & (seen.runs["status"] != "MISSING"), "run"]
    number = len(left_out) + len(seen.plan.problems)
    if not number:
        return "no problems", "good", ""
    return f"{number} problem{'s' * (number != 1)}", "warning", "; ".join([*seen.plan.problems, *left_out[:3]])


CHECKS: Mapping[str, Callable[[Seen], Row]] = {
    "sync guard": guard,
    "test runs": all_runs,
    "seeds": seeds,
    "common budget in seconds": budget,
    "equal batches per update": batches,
    "oversubscribed": oversubscribed,
    "others on the machine": others,
    "comparable runs": comparable,
    "rules that acted": acted,
    "tuning": tuned,
    "tuned values inside their grids": edges,
    "analysis.yaml": registration,
    "fine-tuned models that learned": learned,
    "different seeds, different models": copies,
    "code": code,
    "reading": reading,
}
