"""How far to trust a study: one row a check, with how it is to be read. Each check is a function of the tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pandas import DataFrame, Series

from analysis import stats
from analysis.curves import lowest_held, reached, thinned_to_sparsest
from analysis.gate import BUDGET, MAX_OTHER_LOAD, compare_arms, differences_by_design
from analysis.measure import Measure
from analysis.questions import Plan, conditions
from analysis.runs import each, listed, rows_with
from analysis.scores import BASELINE, taggers_learned_nothing
from asyncsgd.studies.files import PlannedArm

LEVELS = ("bad", "warning", "unknown", "good")
"""How a line is to be read: wrong, to be careful with, not known, as it should be. Failures come first."""
GUARD_RUNS = 3
"""The fewest seeds that the sync guard is decided on."""
GUARD_LEVELS = {"failed": "bad", "not shown": "warning", "passed": "good"}
"""Word of the sync guard -> how it is to be read, the worst first."""


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
    rows = []
    for title, check in CHECKS.items():
        value, level, detail = check(seen)
        rows.append((title, value, level, detail))
    rows.sort(key=lambda row: LEVELS.index(row[2]))
    return DataFrame(rows, columns=["title", "value", "level", "detail"])


def graded(bad: list[str], of: int, what: str, good: str, why: str, level: str = "bad") -> Row:
    """Good where `bad` is empty, else its names and why."""
    if not bad:
        return good, "good", ""
    return f"not in {len(bad)} of {of} {what}", level, f"{', '.join(bad)}: {why}"


NOWHERE: Row = ("does not apply", "unknown", "")


def guard(seen: Seen) -> Row:
    """Synchronous training against one process that accumulates the same batches, by samples to one loss."""
    order = list(GUARD_LEVELS)
    found = sorted(_guards(seen), key=lambda one: order.index(one[0]))
    if not found:
        return "not run", "unknown", "no one-process arm has the global batch and the rate of a sync arm"
    worst = found[0][0]
    details = "; ".join(detail for _, detail in found)
    return worst, GUARD_LEVELS[worst], details


def _guards(seen: Seen) -> Iterator[tuple[str, str]]:
    """A word and a sentence for every synchronous arm and every arm of one process with its global batch and rate."""
    measure = Measure(seen.curves)
    used = rows_with(seen.used, usable=True, replicate=0)
    is_sync = (used["algorithm"] == "sync") & (used["workers"] > 1)
    for arm, own in used[is_sync].groupby("arm"):
        batch = float(_global_batch(own).max())
        has_its_batch = _global_batch(used) == batch
        has_its_rate = used["learning_rate"] == own["learning_rate"].iloc[0]
        others = used[(used["algorithm"] == "single") & has_its_batch & has_its_rate]
        for other, theirs in others.groupby("arm"):
            found = _guard(seen, measure, own, theirs)
            if found is not None:
                word, sentence = found
                yield word, f"{arm} against {other}: {sentence}"


def _guard(seen: Seen, measure: Measure, own: DataFrame, theirs: DataFrame) -> tuple[str, str] | None:
    """A word and a sentence on a synchronous arm and one of one process; None where they cannot be set against each
    other.
    """
    ours = own.drop_duplicates("seed").set_index("seed", drop=False)
    single = theirs.drop_duplicates("seed").set_index("seed", drop=False)
    seeds = sorted(set(ours.index) & set(single.index))
    both = [*each(ours.loc[seeds]), *each(single.loc[seeds])]
    curves = [measure.curve(run.run, "samples") for run in both]
    if len(seeds) < GUARD_RUNS:
        return None
    if any(run.diverged for run in both) or not all(len(x) for x, _ in curves):
        return None
    arm = both[0].arm
    may_differ = {*differences_by_design(arm, both[-1].arm, seen.plan), "batch_size", "accumulate"}
    if all(row.asked.get("schedule") == "constant" for row in both):
        may_differ |= {*BUDGET}  # when a run ends then changes no step before it
    unlike = compare_arms(ours, single, may_differ).why_not_comparable
    if unlike:
        return "not shown", f"not comparable: {unlike}"
    goal = max(lowest_held(curve) for curve in curves)
    goal = max(goal, seen.plan.targets.get(arm, -math.inf))
    if goal >= min(float(y[0]) for _, y in curves):
        return None
    samples = [reached(curve, goal) for curve in thinned_to_sparsest(curves)]
    batch = float(_global_batch(own).max())
    word, sentence = guarded(samples[: len(seeds)], samples[len(seeds) :], batch)
    return word, f"samples to {goal:.4g} {sentence}"


def _global_batch(runs: DataFrame) -> Series:
    return runs["batch_size"] * runs["accumulate"].fillna(1) * runs["workers"]


def guarded(ours: stats.Numbers, theirs: stats.Numbers, batch: float) -> tuple[str, str]:
    """Whether samples to one loss differ by less than an update; faster is as suspect as slower."""
    _, inside = stats.equivalence(ours, theirs, batch, 0.9)
    low = inside.low
    high = inside.high
    if math.isnan(low):
        low = inside.estimate
        high = inside.estimate
    word = "not shown"
    if -batch < low and high < batch:
        word = "passed"
    elif low > batch or high < -batch:
        word = "failed"
    return word, f"differ by [{low:.3g}, {high:.3g}], an update has {batch:g}"


def all_runs(seen: Seen) -> Row:
    used = seen.used
    num_diverged = int(used["diverged"].sum())
    num_finished = int((used["usable"] & ~used["diverged"]).sum())
    lost = Counter(used.loc[~used["usable"], "status"])
    counts = [f"{num_finished} finished"]
    if num_diverged:
        counts.append(f"{num_diverged} diverged")
    counts += [f"{number} {status}" for status, number in lost.items()]
    first = f"{len(used)} found (no plan says how many there should be)"
    if seen.plan.runs:
        first = f"{len(used)} planned"
    level = "good"
    if not num_finished:
        level = "bad"
    elif num_diverged or lost:
        level = "warning"
    stages = Counter(seen.runs["stage"])
    words = {"tuning": "tuning", "pilot": "pilot", "finetune": "fine-tuning"}
    others = ", ".join(f"{stages[stage]} {name}" for stage, name in words.items() if stages[stage])
    detail = f"beside the test runs: {others} runs" if others else ""
    return f"{first}, {', '.join(counts)}", level, detail


def seeds(seen: Seen) -> Row:
    if seen.tests.empty:
        return "no pairs", "bad", ""
    counts = seen.tests["n"][seen.tests["word"] != "not comparable"]
    if not len(counts):
        return "no pairs", "bad", "nothing is comparable"
    least = counts.min()
    most = counts.max()
    value = f"{least} complete pairs" if least == most else f"{least} to {most} complete pairs"
    number = seen.plan.registered.num_seeds
    details = [f"{number} registered"] if number else []
    level = "warning" if number and least < number else "good"
    if least < stats.MINIMUM_PAIRS:
        details.append(f"below {stats.MINIMUM_PAIRS} there is no verdict")
        level = "bad"
    return value, level, "; ".join(details)


def budget(seen: Seen) -> Row:
    timed = seen.tests[seen.tests["endpoint"] == "time_to_target"]
    if timed.empty:
        return NOWHERE
    has_common = timed["common"].astype(bool)
    cut = timed.loc[~has_common & (timed["n"] > 0), "group"]
    without = sorted({conditions(group) for group in cut})
    why = "the faster arm stopped first, and a target that it misses says nothing"
    return graded(without, timed["group"].nunique(), "groups", "in every group", why, "warning")


def batches(seen: Seen) -> Row:
    unequal = {note.about[0] for notes in seen.tests["notes"] for note in notes if note.kind == "batches"}
    if not unequal:
        return "yes", "good", ""
    return "no", "warning", "; ".join(sorted(unequal))


def oversubscribed(seen: Seen) -> Row:
    over = rows_with(seen.measured, oversubscribed=True)
    if not len(over):
        return "no", "good", ""
    why = f"more threads than cores in {', '.join(over['arm'].unique())}: their seconds are no speed comparison"
    return f"{len(over)} of {len(seen.measured)} measured runs", "bad", why


def others(seen: Seen) -> Row:
    measured = seen.measured
    load = measured["other_load"].dropna()
    if not len(measured):
        return NOWHERE
    if not len(load):
        return "not known", "unknown", "no run says what else used its machine"
    most = f"{100 * load.max():.0f} % of the cores"
    num_busy = (load > MAX_OTHER_LOAD).sum()
    if num_busy:
        return f"{num_busy} of {len(measured)} measured runs", "bad", f"up to {most}: no speed comparison"
    num_unknown = len(measured) - len(load)
    detail = f"{num_unknown} runs do not say" if num_unknown else ""
    return f"at most {most}", "good", detail


def comparable(seen: Seen) -> Row:
    apart = seen.tests[seen.tests["word"] == "not comparable"]
    if not len(apart):
        return "all", "good", ""
    reasons = dict.fromkeys(apart["reason"])
    return f"not in {len(apart)} of {len(seen.tests)} tests", "bad", "; ".join(reasons)


FIXED_DELAY = "fixed_delay"
"""A rule that has nothing to alter where every delay is by itself what it is to be, as on a clock without spread."""


def acted(seen: Seen) -> Row:
    used = seen.used[seen.used["usable"]]
    has_rule = (used["mode"] == "async") & ~used["algorithm"].isin(("async", "sync"))
    has_rule &= ~used["rule"].str.startswith(FIXED_DELAY)
    ruled = used[has_rule & (used["workers"] > 1)]
    if not len(ruled):
        return NOWHERE
    silent = []
    unknown = []
    for arm, counts in ruled.groupby("arm")["altered"]:
        if counts.isna().any():
            unknown.append(str(arm))
        elif not counts.any():
            silent.append(f"{arm} (0 gradients)")
    if unknown and not silent:
        return "not known", "unknown", f"runs without a count in {', '.join(unknown)}"
    why = "the rule altered nothing, so these are runs of asynchronous SGD"
    return graded(silent, ruled["arm"].nunique(), "arms", "all", why)


def tuned(seen: Seen) -> Row:
    tested = set(seen.used["seed"].dropna())
    for stage, use in (("tuning", "tuning"), ("pilot", "the target")):
        shared = tested & set(seen.runs.loc[seen.runs["stage"] == stage, "seed"])
        if shared:
            return "seeds shared", "bad", f"seed {listed(sorted(shared))} was used for {use} and for testing"
    budgets = {}
    for name, arm in seen.plan.arms.items():
        if name != BASELINE:
            budgets[name] = sum(len(trial.seeds) for trial in arm.trials)
    if not any(budgets.values()):
        return "not tuned", "warning", "no arm's learning rate was tuned in this folder"
    endpoint = seen.plan.registered.primary.endpoint
    by = ""
    if endpoint not in ("", "loss_at_equal_samples"):
        by = f"; chosen by the final loss at equal samples, not by the primary endpoint ({endpoint.replace('_', ' ')})"
    if len(set(budgets.values())) > 1:
        of_arms = ", ".join(f"{arm} {number}" for arm, number in budgets.items())
        return "UNEQUAL budgets", "bad", f"tuning runs per arm: {of_arms}{by}"
    number = next(iter(budgets.values()))
    detail = f"{number} tuning runs per arm, on other seeds than the tests{by}"
    repeated = [name for name, arm in seen.plan.arms.items() if _has_equal_trials(arm)]
    if not repeated:
        return "equal budgets", "good", detail
    return "equal budgets", "warning", f"{detail}; some trials are the same in {', '.join(repeated)}"


def _has_equal_trials(arm: PlannedArm) -> bool:
    different = {str(trial.settings) for trial in arm.trials}
    return len(different) < len(arm.trials)


def at_edge(arm: PlannedArm) -> bool:
    """Whether the chosen learning rate of an arm is the smallest or the largest that was tried."""
    rates: set[Any] = {trial.settings.get("learning_rate") for trial in arm.trials}
    rates.discard(None)
    if len(rates) < 2:
        return False
    chosen = (arm.chosen or {}).get("learning_rate")
    return chosen in (min(rates), max(rates))


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
    if seen.exploratory:
        return f"{digest}: exploratory", "bad", seen.exploratory
    return digest, "good", ""


def learned(seen: Seen) -> Row:
    tuned = rows_with(seen.runs, stage="finetune", usable=True, diverged=False)
    if not len(tuned):
        return NOWHERE
    constant = []
    ignorant = []
    for arm, own in tuned.groupby("arm"):
        if any(_one_class(details) for details in own["details"]):
            constant.append(str(arm))
        if taggers_learned_nothing(own):
            ignorant.append(str(arm))
    why = "some predict one class for every text" if constant else "no better than the commonest tag"
    num_arms = tuned["arm"].nunique()
    return graded(constant or ignorant, num_arms, "arms", "all", f"{why}, so their score says nothing")


def _one_class(details: dict[str, Any]) -> bool:
    """Whether one class was predicted for every text."""
    matrix = details.get("confusion")
    if not matrix:
        return False
    predicted = np.array(matrix).sum(axis=0)
    return int((predicted > 0).sum()) == 1


def copies(seen: Seen) -> Row:
    known = rows_with(seen.used, usable=True, diverged=False)
    known = known[(known["parameters_sha256"] != "") & (known["updates"] > 0)]
    known = known[known["terms"].notna()]  # a closed-form problem may have no chance in it for a seed to decide
    num_seeds = known.groupby(["arm", "parameters_sha256"])["seed"].nunique()
    same = sorted({arm for (arm, _), number in num_seeds.items() if number > 1})
    return graded(same, known["arm"].nunique(), "arms", "yes", "two seeds ended with the same parameters: a copy")


def code(seen: Seen) -> Row:
    made = seen.used[seen.used["status"] != "MISSING"]
    commits = Counter(commit or "unknown" for commit in made["commit"])
    if not set(commits) - {"unknown"}:
        return "not known", "unknown", "no run names its commit"
    details = []
    if len(commits) > 1:
        details.append("runs of different commits are compared")
    if any("modified" in commit for commit in commits):
        details.append("runs with a modified working tree")
    shown = []
    for commit, number in sorted(commits.items()):
        name = commit[:12]
        if commit.endswith(" modified"):
            name += " modified"
        shown.append(f"{name} ({number} runs)")
    return ", ".join(shown), "warning" if details else "good", "; ".join(details)


def reading(seen: Seen) -> Row:
    is_left_out = (seen.runs["left_out"] != "") & (seen.runs["status"] != "MISSING")
    left_out = seen.runs.loc[is_left_out, "run"]
    number = len(left_out) + len(seen.plan.problems)
    if not number:
        return "no problems", "good", ""
    value = "1 problem" if number == 1 else f"{number} problems"
    return value, "warning", "; ".join([*seen.plan.problems, *left_out[:3]])


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
