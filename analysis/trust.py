"""How far to trust a study: a row for each check, with how it is to be read. A check is a function of the tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pandas import DataFrame, Series

from analysis import stats
from analysis.curves import crossing_at, lowest_held, thinned_to_sparsest
from analysis.gate import BUDGET, MAX_OTHER_LOAD, compare_arms, differences_by_design
from analysis.measure import Measure
from analysis.questions import Plan, conditions
from analysis.runs import each, listed, rows_with, with_labels
from analysis.scores import BASELINE, taggers_learned_nothing
from asyncsgd.studies.files import PlannedArm, end_of_grid

LEVELS = ("bad", "warning", "unknown", "good")
"""How a line is to be read: wrong, to be careful with, not known, as it should be. Failures come first."""
GUARD_SEEDS = 3
"""The fewest seeds that the sync guard is decided on."""
GUARD_LEVELS = {"failed": "bad", "not shown": "warning", "passed": "good"}
"""Word of the sync guard -> how it is to be read, the worst first."""


class StudyTables(NamedTuple):
    """The tables of a study, which every check gets."""

    runs: DataFrame
    curves: DataFrame
    tests: DataFrame
    plan: Plan
    exploratory: str
    """Why nothing of the study is confirmed; empty where the registration stands."""

    @property
    def test_runs(self) -> DataFrame:
        """All test runs: also replicates, runs without a result and runs that are missing."""
        return self.runs[self.runs["stage"] == "test"]

    @property
    def measured(self) -> DataFrame:
        """The test runs whose seconds were measured."""
        return self.test_runs[(self.test_runs["clock"] == "measured") & (self.test_runs["status"] != "MISSING")]


CheckResult: TypeAlias = tuple[str, str, str]
"""Value, level, and detail: a sentence more, or nothing."""


def trust(study: StudyTables) -> DataFrame:
    """Title, value, level and detail of every check, failures first."""
    rows = []
    for title, check in CHECKS.items():
        value, level, detail = check(study)
        rows.append((title, value, level, detail))
    rows.sort(key=lambda row: LEVELS.index(row[2]))
    return DataFrame(rows, columns=["title", "value", "level", "detail"])


def graded(failing: list[str], *, total: int, unit: str, if_none: str, why: str, level: str = "bad") -> CheckResult:
    """The result of a check of each of `total` arms or groups.

    Args:
        failing: the names of those that fail it.
        unit: what they are, in the plural.
        if_none: the value where none fails.
        why: what is wrong with those that fail.
        level: how a failure is to be read.
    """
    if not failing:
        return if_none, "good", ""
    return f"not in {len(failing)} of {total} {unit}", level, f"{', '.join(failing)}: {why}"


NOT_APPLICABLE: CheckResult = ("does not apply", "unknown", "")


def check_guard(study: StudyTables) -> CheckResult:
    """Synchronous training against one process that accumulates the same batches, by samples to one loss."""
    order = list(GUARD_LEVELS)
    results = sorted(_guard_results(study), key=lambda result: order.index(result[0]))
    if not results:
        return "not run", "unknown", "no one-process arm has the global batch and the rate of a sync arm"
    worst = results[0][0]
    details = "; ".join(detail for _, detail in results)
    return worst, GUARD_LEVELS[worst], details


def _guard_results(study: StudyTables) -> Iterator[tuple[str, str]]:
    """A word and a sentence for every synchronous arm and every arm of one process with its global batch and rate."""
    measure = Measure(study.curves)
    used = rows_with(study.test_runs, usable=True, replicate=0)
    is_sync = (used["algorithm"] == "sync") & (used["workers"] > 1)
    for arm, own in used[is_sync].groupby("arm"):
        # all runs of an arm have its batch and its rate; `max` passes over a run whose batch is not known
        has_its_batch = _global_batch(used) == _global_batch(own).max()
        has_its_rate = used["learning_rate"] == own["learning_rate"].iloc[0]
        is_single = used["algorithm"] == "single"
        for other, theirs in used[is_single & has_its_batch & has_its_rate].groupby("arm"):
            result = _guard_of_arms(study, measure, own, theirs)
            if result is not None:
                word, sentence = result
                yield word, f"{arm} against {other}: {sentence}"


def _guard_of_arms(study: StudyTables, measure: Measure, own: DataFrame, theirs: DataFrame) -> tuple[str, str] | None:
    """A word and a sentence on a synchronous arm and one of one process; None where nothing can be said of the two."""
    ours = own.drop_duplicates("seed").set_index("seed", drop=False)
    single = theirs.drop_duplicates("seed").set_index("seed", drop=False)
    seeds = sorted(set(ours.index) & set(single.index))
    if len(seeds) < GUARD_SEEDS:
        return None
    our_runs = each(ours.loc[seeds])
    single_runs = each(single.loc[seeds])
    both = [*our_runs, *single_runs]
    curves = [measure.curve(run.run, "samples") for run in both]
    if any(run.diverged for run in both) or not all(len(x) for x, _ in curves):
        return None
    arm = our_runs[0].arm
    may_differ = differences_by_design(arm, single_runs[0].arm, study.plan) | {"batch_size", "accumulate"}
    if all(row.asked.get("schedule") == "constant" for row in both):
        may_differ |= {*BUDGET}  # when a run ends then changes no step before it
    unlike = compare_arms(ours, single, may_differ).why_not_comparable
    if unlike:
        return "not shown", f"not comparable: {unlike}"
    # the lowest loss that every run holds, or the target if that is higher
    goal = max(lowest_held(curve) for curve in curves)
    goal = max(goal, study.plan.targets.get(arm, -math.inf))
    if goal >= min(float(losses[0]) for _, losses in curves):
        return None  # a run began at the goal or below it, so it says nothing of the speed of that run
    samples = [crossing_at(curve, goal) for curve in thinned_to_sparsest(curves)]
    batch = float(_global_batch(own).max())
    word, sentence = compare_samples(samples[: len(our_runs)], samples[len(our_runs) :], batch)
    return word, f"samples to {goal:.4g} {sentence}"


def _global_batch(runs: DataFrame) -> Series:
    return runs["batch_size"] * runs["accumulate"].fillna(1) * runs["workers"]


def compare_samples(ours: stats.Numbers, theirs: stats.Numbers, batch: float) -> tuple[str, str]:
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


def check_all_runs(study: StudyTables) -> CheckResult:
    used = study.test_runs
    num_diverged = int(used["diverged"].sum())
    num_finished = int((used["usable"] & ~used["diverged"]).sum())
    lost = Counter(used.loc[~used["usable"], "status"])
    counts = [f"{len(used)} found (no plan says how many there should be)"]
    if study.plan.runs:
        counts = [f"{len(used)} planned"]
    counts.append(f"{num_finished} finished")
    if num_diverged:
        counts.append(f"{num_diverged} diverged")
    counts += [f"{number} {status}" for status, number in lost.items()]
    level = "good"
    if not num_finished:
        level = "bad"
    elif num_diverged or lost:
        level = "warning"
    stages = Counter(study.runs["stage"])
    others = []
    for stage, name in {"tuning": "tuning", "pilot": "pilot", "finetune": "fine-tuning"}.items():
        if stages[stage]:
            others.append(f"{stages[stage]} {name}")
    detail = f"beside the test runs: {', '.join(others)} runs" if others else ""
    return ", ".join(counts), level, detail


def check_seeds(study: StudyTables) -> CheckResult:
    if study.tests.empty:
        return "no pairs", "bad", ""
    counts = study.tests["n"][study.tests["word"] != "not comparable"]
    if not len(counts):
        return "no pairs", "bad", "nothing is comparable"
    least = counts.min()
    most = counts.max()
    value = f"{least} complete pairs" if least == most else f"{least} to {most} complete pairs"
    number = study.plan.registered.num_seeds
    details = [f"{number} registered"] if number else []
    level = "warning" if number and least < number else "good"
    if least < stats.MINIMUM_PAIRS:
        details.append(f"below {stats.MINIMUM_PAIRS} there is no verdict")
        level = "bad"
    return value, level, "; ".join(details)


def check_budget(study: StudyTables) -> CheckResult:
    timed = study.tests[study.tests["endpoint"] == "time_to_target"]
    if timed.empty:
        return NOT_APPLICABLE
    without_common = rows_with(timed, common=False)
    groups = without_common["group"][without_common["n"] > 0]
    without = sorted({conditions(group) for group in groups})
    why = "a run that ended early may have missed the target for that alone"
    total = timed["group"].nunique()
    return graded(without, total=total, unit="groups", if_none="in every group", why=why, level="warning")


def check_batches(study: StudyTables) -> CheckResult:
    unequal = {note.about[0] for notes in study.tests["notes"] for note in notes if note.kind == "batches"}
    if not unequal:
        return "yes", "good", ""
    return "no", "warning", "; ".join(sorted(unequal))


def check_oversubscribed(study: StudyTables) -> CheckResult:
    over = rows_with(study.measured, oversubscribed=True)
    if not len(over):
        return "no", "good", ""
    why = f"more threads than cores in {', '.join(over['arm'].unique())}: their seconds are no speed comparison"
    return f"{len(over)} of {len(study.measured)} measured runs", "bad", why


def check_others(study: StudyTables) -> CheckResult:
    measured = study.measured
    load = measured["other_load"].dropna()
    if not len(measured):
        return NOT_APPLICABLE
    if not len(load):
        return "not known", "unknown", "no run says what else used its machine"
    most = f"{100 * load.max():.0f} % of the cores"
    num_busy = (load > MAX_OTHER_LOAD).sum()
    if num_busy:
        return f"{num_busy} of {len(measured)} measured runs", "bad", f"up to {most}: no speed comparison"
    num_unknown = len(measured) - len(load)
    detail = f"{num_unknown} runs do not say" if num_unknown else ""
    return f"at most {most}", "good", detail


def check_comparable(study: StudyTables) -> CheckResult:
    not_comparable = study.tests[study.tests["word"] == "not comparable"]
    if not_comparable.empty:
        return "all", "good", ""
    reasons = dict.fromkeys(not_comparable["reason"])
    return f"not in {len(not_comparable)} of {len(study.tests)} tests", "bad", "; ".join(reasons)


FIXED_DELAY = "fixed_delay"
"""This rule alters no gradient where every delay already is the fixed one, as with workers of equal speeds."""


def check_acted(study: StudyTables) -> CheckResult:
    used = study.test_runs[study.test_runs["usable"]]
    has_rule = (used["mode"] == "async") & ~used["algorithm"].isin(("async", "sync"))
    has_rule &= ~used["rule"].str.startswith(FIXED_DELAY)
    ruled = used[has_rule & (used["workers"] > 1)]
    if not len(ruled):
        return NOT_APPLICABLE
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
    return graded(silent, total=ruled["arm"].nunique(), unit="arms", if_none="all", why=why)


def check_tuned(study: StudyTables) -> CheckResult:
    tested = set(study.test_runs["seed"].dropna())
    for stage, use in (("tuning", "tuning"), ("pilot", "the target")):
        shared = tested & set(study.runs.loc[study.runs["stage"] == stage, "seed"])
        if shared:
            return "seeds shared", "bad", f"seed {listed(sorted(shared))} was used for {use} and for testing"
    budgets = {}
    for name, arm in study.plan.arms.items():
        if name != BASELINE:
            budgets[name] = sum(len(trial.seeds) for trial in arm.trials)
    if not any(budgets.values()):
        return "not tuned", "warning", "no arm's learning rate was tuned in this folder"
    endpoint = study.plan.registered.primary.endpoint
    by = ""
    if endpoint not in ("", "loss_at_equal_samples"):
        name = endpoint.replace("_", " ")
        by = f"; chosen by the final loss, in a labelled task by its score, not by the primary endpoint ({name})"
    if len(set(budgets.values())) > 1:
        of_arms = ", ".join(f"{arm} {number}" for arm, number in budgets.items())
        return "UNEQUAL budgets", "bad", f"tuning runs per arm: {of_arms}{by}"
    number = next(iter(budgets.values()))
    detail = f"{number} tuning runs per arm, on other seeds than the tests{by}"
    repeated = [name for name, arm in study.plan.arms.items() if _has_equal_trials(arm)]
    if not repeated:
        return "equal budgets", "good", detail
    return "equal budgets", "warning", f"{detail}; some trials are the same in {', '.join(repeated)}"


def _has_equal_trials(arm: PlannedArm) -> bool:
    different = {str(trial.settings) for trial in arm.trials}
    return len(different) < len(arm.trials)


def at_edge(arm: PlannedArm) -> bool:
    """Whether the chosen learning rate of an arm is the smallest or the largest that was tried."""
    return bool(end_of_grid(arm.trials, arm.chosen))


def check_edges(study: StudyTables) -> CheckResult:
    arms = {name: arm for name, arm in study.plan.arms.items() if arm.trials}
    if not arms:
        return "does not apply", "unknown", "nothing was tuned"
    beyond = [name for name, arm in arms.items() if at_edge(arm)]
    why = "the best rate may lie beyond the grid"
    return graded(beyond, total=len(arms), unit="arms", if_none="yes", why=why, level="warning")


def check_registration(study: StudyTables) -> CheckResult:
    if not study.plan.sha256:
        return "none: exploratory", "warning", study.exploratory
    digest = f"sha256 {study.plan.sha256[:16]}"
    if study.exploratory:
        return f"{digest}: exploratory", "bad", study.exploratory
    return digest, "good", ""


def check_learned(study: StudyTables) -> CheckResult:
    finetuned = with_labels(study.runs)
    if not len(finetuned):
        return NOT_APPLICABLE
    constant = []
    ignorant = []
    for arm, own in finetuned.groupby("arm"):
        if any(_one_class(details) for details in own["details"]):
            constant.append(str(arm))
        if taggers_learned_nothing(own):
            ignorant.append(str(arm))
    why = "some predict one class for every text" if constant else "no better than the commonest tag"
    why = f"{why}, so their score says nothing"
    return graded(constant or ignorant, total=finetuned["arm"].nunique(), unit="arms", if_none="all", why=why)


def _one_class(details: dict[str, Any]) -> bool:
    """Whether one class was predicted for every text."""
    matrix = details.get("confusion")
    if not matrix:
        return False
    predicted = np.array(matrix).sum(axis=0)
    return int((predicted > 0).sum()) == 1


def check_copies(study: StudyTables) -> CheckResult:
    known = rows_with(study.test_runs, usable=True, diverged=False)
    known = known[(known["parameters_sha256"] != "") & (known["updates"] > 0)]
    # a closed-form problem has no `terms`; it may draw nothing, and its seeds then end alike
    known = known[known["terms"].notna()]
    num_seeds = known.groupby(["arm", "parameters_sha256"])["seed"].nunique()
    same = sorted({arm for (arm, _), number in num_seeds.items() if number > 1})
    why = "two seeds ended with the same parameters: a copy"
    return graded(same, total=known["arm"].nunique(), unit="arms", if_none="yes", why=why)


def check_code(study: StudyTables) -> CheckResult:
    made = study.test_runs[study.test_runs["status"] != "MISSING"]
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


def check_reading(study: StudyTables) -> CheckResult:
    is_left_out = (study.runs["left_out"] != "") & (study.runs["status"] != "MISSING")
    left_out = study.runs.loc[is_left_out, "run"]
    number = len(left_out) + len(study.plan.problems)
    if not number:
        return "no problems", "good", ""
    value = "1 problem" if number == 1 else f"{number} problems"
    return value, "warning", "; ".join([*study.plan.problems, *left_out[:3]])


CHECKS: Mapping[str, Callable[[StudyTables], CheckResult]] = {
    "sync guard": check_guard,
    "test runs": check_all_runs,
    "seeds": check_seeds,
    "common budget in seconds": check_budget,
    "equal batches per update": check_batches,
    "oversubscribed": check_oversubscribed,
    "others on the machine": check_others,
    "comparable runs": check_comparable,
    "rules that acted": check_acted,
    "tuning": check_tuned,
    "tuned values inside their grids": check_edges,
    "analysis.yaml": check_registration,
    "fine-tuned models that learned": check_learned,
    "different seeds, different models": check_copies,
    "code": check_code,
    "reading": check_reading,
}
