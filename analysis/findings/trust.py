"""The trust box: what a reader has to know before believing the rest, one line each."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from analysis.findings.arms import learning_rate_of
from analysis.findings.comparable_runs import Scope
from analysis.findings.comparisons import FROM_SCRATCH, UNEQUAL_BATCHES, Comparison
from analysis.findings.downstream import metric_of, not_learned, num_predicted_classes
from analysis.findings.endpoints import seconds_unit
from analysis.findings.groups import Group
from analysis.findings.judging import TestRow
from analysis.findings.single_runs import HardwareRow
from analysis.findings.tuning import TuningResult
from analysis.statistics.convergence_guard import MINIMUM_RUNS, Guard, convergence
from analysis.statistics.crossings import lowest_held
from analysis.statistics.intervals import Refused, short
from analysis.statistics.power import detectable_effect
from analysis.statistics.verdict import MINIMUM_PAIRS, nothing_to_find, what_could_be_found
from analysis.study.curves import common_curves, common_seconds, crossings_of
from analysis.study.machines import disturbed, other_load
from analysis.study.types import MEASURED, VIRTUAL, Study, StudyRun, clocks_of, summary_of
from asyncsgd.study.plan import BASELINE

Level = Literal["good", "warning", "bad", "unknown"]
"""How a line of the trust box is to be read: as it should be, to be careful with, wrong, or not known."""


@dataclasses.dataclass(frozen=True)
class TrustItem:
    """One line of the trust box."""

    title: str
    value: str
    level: Level
    detail: str
    """A sentence more; may be empty."""


def trust_of(
    study: Study,
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    tests: Sequence[TestRow],
    tuning: Sequence[TuningResult],
    hardware: Sequence[HardwareRow],
    scope: Scope,
    exploratory: str,
) -> tuple[TrustItem, ...]:
    """Every line of the trust box, in its order."""
    return (
        _guard_item(study, scope),
        _runs_item(study),
        _seeds_item(study, comparisons),
        _budget_item(study, comparisons),
        _batch_item(comparisons),
        _detectable_item(tests),
        _clock_item(study),
        _oversubscription_item(study),
        _hardware_item(comparisons),
        _load_item(study),
        _rule_item(study),
        _tuning_item(study, tuning),
        _edge_item(tuning),
        _registration_item(study, exploratory),
        _constant_item(study),
        _scratch_item(study),
        _data_item(groups, study),
        _commit_item(hardware),
        _reading_item(study),
    )


def _guard_item(study: Study, scope: Scope) -> TrustItem:
    """S12: every synchronous arm against one process with the same global batch and rate, by samples to one loss."""
    title = "sync guard"
    told: dict[str, list[str]] = {"failed": [], "not shown": [], "passed": []}
    not_run: list[str] = []
    alone: list[str] = []
    for arm in study.arms:
        group = scope.group_of(arm.name)
        if arm.algorithm != "sync" or group is None or (arm.num_workers or 0) < 2:
            continue
        batch = (_samples_per_update(study, arm.name) or 0) * (arm.num_workers or 0)
        others = [one for one in study.arms if one.algorithm == "single" and scope.usable.get(one.name)]
        others = [one for one in others if batch and _samples_per_update(study, one.name) == batch]
        if not others:
            alone.append(f"{arm.name} ({batch or 'batch not known'})")
        rate = learning_rate_of(study, arm)
        rates = {one.name: learning_rate_of(study, one) for one in others}
        same = [one for one in others if rates[one.name] == rate]
        if others and not same:
            others_rates = ", ".join(f"{name} {'-' if one is None else f'{one:g}'}" for name, one in rates.items())
            shown = "-" if rate is None else f"{rate:g}"
            not_run.append(f"{arm.name}: the learning rates differ ({shown}; {others_rates})")
        for one in same:
            found = _guarded(scope.usable[arm.name], scope.usable[one.name], group.target, batch)
            into = not_run if isinstance(found, Refused) else told[found.word]
            into.append(f"{arm.name} against {one.name}, {batch} samples an update: {found.reason}")
    detail = [*(text for texts in told.values() for text in texts), *(f"not run: {reason}" for reason in not_run)]
    if alone:
        detail.append(f"no one-process arm has the global batch of {', '.join(alone)}")
    number = sum(map(len, told.values()))
    if not number:
        return TrustItem(title, "not run", "unknown", "; ".join(detail) or "there is no sync arm")
    value = next(word for word, texts in told.items() if texts)  # the worst of them
    level: Level = {"failed": "bad", "not shown": "warning", "passed": "good"}[value]  # type: ignore[assignment]
    if value != "passed" and number > 1:
        value = f"{value} for {len(told[value])} of {number} arms"
    return TrustItem(title, value, level, "; ".join(detail))


def _guarded(
    new: Sequence[StudyRun], reference: Sequence[StudyRun], target: float | None, batch: int
) -> Guard | Refused:
    """By the samples to the target; where a run misses it, to the lowest loss that all of them reach."""
    everybody = [*new, *reference]
    data = {run.run.evaluation_set for run in everybody if run.run is not None and run.run.evaluation_set}
    if len(data) > 1:
        return Refused("they were evaluated on different data")
    if diverged := [run.name for run in everybody if run.diverged]:
        return Refused(f"{', '.join(diverged)} diverged")
    curves = [curve[1] for curve in common_curves(everybody, "total_samples") if curve is not None]
    if len(curves) < len(everybody):
        return Refused("a run has no evaluation")
    lowest = max(map(lowest_held, curves))
    goal, told = (
        (lowest, "the lowest loss that all reach") if target is None or lowest > target else (target, "the target")
    )
    if goal >= min(float(losses[0]) for losses in curves):
        return Refused("a run never gets below its first loss")
    samples = [crossing.at for crossing in crossings_of(everybody, goal, "total_samples")]
    ours, theirs = (
        {run.seed: at for run, at in zip(side, times, strict=True)}
        for side, times in ((new, samples[: len(new)]), (reference, samples[len(new) :]))
    )
    common = [seed for seed in ours if seed in theirs]
    if len(common) >= MINIMUM_RUNS:
        found = convergence([ours[seed] for seed in common], [theirs[seed] for seed in common], batch, paired=True)
    else:
        others = [theirs[seed] for seed in theirs if seed not in ours]
        found = convergence(list(ours.values()), others, batch, paired=False) if others else Refused("no other seeds")
    return dataclasses.replace(found, reason=f"samples to {told}, {goal:.4g}: {found.reason}")


def _samples_per_update(study: Study, arm: str) -> int | None:
    """Of one worker: its batch times how many of them it accumulates."""
    for run in study.of("test", arm):
        batch, accumulate = summary_of(run, "batch_size"), summary_of(run, "accumulate")
        if isinstance(batch, int):
            return batch * (accumulate if isinstance(accumulate, int) else 1)
    return None


def _runs_item(study: Study) -> TrustItem:
    runs = study.of("test")
    finished = sum(run.usable and not run.diverged for run in runs)
    diverged = sum(run.diverged for run in runs)
    failed = sum(run.run is not None and not run.usable for run in runs)
    missing = sum(run.run is None for run in runs)
    first = f"{len(runs)} planned" if study.planned else f"{len(runs)} found (no plan says how many there should be)"
    parts = [first, f"{finished} finished", f"{diverged} diverged", f"{failed} failed", f"{missing} missing"]
    level: Level = "bad" if not finished else "warning" if diverged or failed or missing else "good"
    words = {"tuning": "tuning", "pilot": "pilot", "finetune": "fine-tuning"}
    others = [f"{number} {word}" for stage, word in words.items() if (number := len(study.of(stage)))]
    detail = f"beside the test runs: {', '.join(others)} runs" if others else "no others beside the test runs"
    if study.set_aside:
        detail += f"; {len(study.set_aside)} set aside"
    if study.num_replaced:
        detail += f"; {study.num_replaced} earlier attempts (.before-N) ignored"
    return TrustItem("test runs", ", ".join(parts), level, detail)


def _seeds_item(study: Study, comparisons: Sequence[Comparison]) -> TrustItem:
    pairs = [len(comparison.pairs) for comparison in comparisons]
    registered = None if study.registration is None else study.registration.num_seeds
    if not pairs:
        return TrustItem("seeds", "no pairs", "bad", "")
    least, most = min(pairs), max(pairs)
    value = f"{least} complete pairs" if least == most else f"{least} to {most} complete pairs"
    detail = "" if registered is None else f"{registered} seeds registered"
    if least < MINIMUM_PAIRS:
        return TrustItem(
            "seeds", value, "bad", f"{detail}{'; ' * bool(detail)}below {MINIMUM_PAIRS} there is no verdict"
        )
    level: Level = "good" if registered is None or least >= registered else "warning"
    return TrustItem("seeds", value, level, detail)


def _budget_item(study: Study, comparisons: Sequence[Comparison]) -> TrustItem:
    """Whether every run of a group was watched equally long, so that a target that one arm misses is a loss of time."""
    title = "common budget in seconds"
    compared = {comparison.group.name: comparison.group for comparison in comparisons}
    runs = {
        name: [run for arm in group.arms for run in study.of("test", arm) if run.usable]
        for name, group in compared.items()
        if group.target is not None
    }
    if not runs:
        return TrustItem(title, "does not apply", "good", "there is no target")
    known = {}
    for name, own in runs.items():
        times = [crossings_of([run], compared[name].target or 0.0)[0].at for run in own]
        known[name] = common_seconds(own, times)
    without = [name for name, seconds in known.items() if seconds is None]
    if without:
        detail = f"{'; '.join(without)}: the faster arm stopped first, and a target that it misses says nothing"
        return TrustItem(title, f"not in {len(without)} of {len(known)} groups", "warning", detail)
    told = "; ".join(
        f"{name}: {short(seconds)} {seconds_unit(compared[name])}" for name, seconds in known.items() if seconds
    )
    return TrustItem(title, "yes", "good", told)


def _batch_item(comparisons: Sequence[Comparison]) -> TrustItem:
    """At equal samples an arm with smaller updates makes more of them, which is a difference of its own."""
    title = "equal batches per update"
    main = [comparison for comparison in comparisons if not comparison.control]
    unequal = [note for comparison in main for note in comparison.notes if note.startswith(UNEQUAL_BATCHES)]
    controlled = {one.treatment.name: one.reference.name for one in comparisons if one.control}
    if not unequal:
        return TrustItem(title, "yes", "good", "") if main else TrustItem(title, "does not apply", "unknown", "")
    detail = "; ".join(note.removeprefix(f"{UNEQUAL_BATCHES}: ") for note in unequal)
    if controlled:
        told = ", ".join(f"{arm} against {control}" for arm, control in controlled.items())
        detail += f". With equal batches: {told}"
    return TrustItem(title, f"not in {len(unequal)} of {len(main)} comparisons", "warning", detail)


def _detectable_item(tests: Sequence[TestRow]) -> TrustItem:
    title = "smallest detectable difference"
    row = next((row for row in tests if row.n >= 2), None)
    if row is None:
        return TrustItem(title, "not known", "unknown", "no comparison has two pairs")
    hopeless = nothing_to_find(row.n, row.family_size, row.least_p_holm or 0.0, row.alpha)
    if hopeless:
        return TrustItem(title, "none of any size", "bad", f"{hopeless}, {row.endpoint_label}")
    # Holm's method has to reject the first of the family at alpha / m
    effect = detectable_effect(row.n, alpha=row.alpha / row.family_size)
    detail = f"{what_could_be_found(row.n, row.family_size, row.alpha)}, {row.endpoint_label}"
    if math.isinf(effect):
        return TrustItem(title, "none alone", "bad", detail)
    value = f"{effect:.2f} SD of the differences"
    if row.effect and row.estimate is not None:
        spread = abs(row.estimate.estimate / row.effect)
        value += f", {short(effect * spread)} {row.unit}"
    return TrustItem(title, value, "good", detail)


def _clock_item(study: Study) -> TrustItem:
    clocks = clocks_of(study)
    if clocks == (VIRTUAL,):
        return TrustItem("clock", "VIRTUAL", "warning", "simulated seconds under declared speeds: nothing was timed")
    if clocks == (MEASURED,):
        return TrustItem("clock", "measured", "good", "")
    if not clocks:
        return TrustItem("clock", "not known", "unknown", "no test run")
    return TrustItem(
        "clock", "measured and VIRTUAL", "warning", "both are here; they share no comparison, mean or pair of axes"
    )


def _oversubscription_item(study: Study) -> TrustItem:
    measured = [run for run in study.of("test") if run.run is not None and not run.run.virtual]
    if not measured:
        return TrustItem("oversubscribed", "does not apply", "good", "no measured run")
    over = [run for run in measured if run.run is not None and run.run.oversubscribed]
    if not over:
        return TrustItem("oversubscribed", "no", "good", "")
    arms = ", ".join(dict.fromkeys(run.arm for run in over))
    detail = f"more threads than cores in {arms}: their seconds are no speed comparison"
    return TrustItem("oversubscribed", f"{len(over)} of {len(measured)} measured runs", "bad", detail)


def _hardware_item(comparisons: Sequence[Comparison]) -> TrustItem:
    """Whether the two runs of a pair were on the same hardware, where their seconds were measured."""
    title = "hardware of a pair"
    measured = [comparison for comparison in comparisons if comparison.group.clock == MEASURED]
    if not measured:
        return TrustItem(title, "does not apply", "good", "no comparison of measured runs")
    apart = [comparison for comparison in measured if comparison.other_machines]
    if not apart:
        return TrustItem(title, "the same", "good", "")
    told = dict.fromkeys(why for comparison in apart for why in comparison.other_machines.values())
    return TrustItem(title, f"differs in {len(apart)} of {len(measured)} comparisons", "bad", "; ".join(told))


def _load_item(study: Study) -> TrustItem:
    """What other programs and other virtual machines had of the machine while runs were measured."""
    title = "others on the machine"
    measured = [run.run for run in study.of("test") if run.run is not None and not run.run.virtual]
    if not measured:
        return TrustItem(title, "does not apply", "good", "no measured run")
    loads = [load for run in measured if (load := other_load(run)) is not None]
    if not loads:
        return TrustItem(title, "not known", "unknown", "no run says what else used its machine")
    marked = sum(map(disturbed, measured))
    unknown = f"{len(measured) - len(loads)} runs do not say" if len(loads) < len(measured) else ""
    most = f"{100 * max(loads):.0f} % of the cores"
    if marked:
        detail = f"up to {most}: no speed comparison{'; ' * bool(unknown)}{unknown}"
        return TrustItem(title, f"{marked} of {len(measured)} measured runs", "bad", detail)
    return TrustItem(title, f"at most {most}", "good", unknown)


def _rule_item(study: Study) -> TrustItem:
    """Arms whose rule did nothing that asynchronous SGD does not do, in any of their runs."""
    title = "rules that acted"
    silent: list[str] = []
    unknown: list[str] = []
    number = 0
    for arm in study.arms:
        runs = [run for run in study.of("test", arm.name) if run.usable]
        rule = str(summary_of(runs[0], "rule")).partition(":")[0] if runs else "asynchronous"
        if rule == "asynchronous" or summary_of(runs[0], "mode") != "async" or (arm.num_workers or 0) < 2:
            continue
        counts = [_counts_of(run) for run in runs]
        known = [count for count in counts if count is not None]
        number += 1
        if len(known) < len(counts):
            unknown.append(arm.name)
        elif not any(altered for altered, _ in known):
            silent.append(f"{arm.name} (0 of {sum(arrivals for _, arrivals in known)} arrivals)")
    if silent:
        detail = f"{', '.join(silent)}: the rule altered nothing, so these are runs of asynchronous SGD"
        return TrustItem(title, f"not in {len(silent)} of {number} arms", "bad", detail)
    if unknown:
        return TrustItem(title, "not known", "unknown", f"runs without a count of rule_acted in {', '.join(unknown)}")
    if not number:
        return TrustItem(title, "does not apply", "good", "no arm has a rule that differs from asynchronous SGD")
    return TrustItem(title, "all", "good", "")


def _counts_of(run: StudyRun) -> tuple[int, int] | None:
    """(altered, arrivals); None where the summary has no such counts."""
    acted = summary_of(run, "rule_acted")
    if not isinstance(acted, dict):
        return None
    altered, arrivals = acted.get("altered"), acted.get("arrivals")
    if not isinstance(altered, int) or not isinstance(arrivals, int):
        return None
    return altered, arrivals


def _tuning_item(study: Study, tuning: Sequence[TuningResult]) -> TrustItem:
    arms = [arm for arm in study.arms if arm.name != BASELINE]
    tests = {run.seed for run in study.of("test")}
    for stage, use in (("tuning", "tuning"), ("pilot", "the target")):
        if shared := sorted({run.seed for run in study.of(stage)} & tests, key=str):
            listed = ", ".join(map(str, shared))
            return TrustItem("tuning", "seeds shared", "bad", f"seed {listed} was used for {use} and for testing")
    if not tuning:
        return TrustItem("tuning", "not tuned", "warning", "no arm's learning rate was tuned in this folder")
    tried = {result.arm: len(result.trials) * max(len(trial.seeds) for trial in result.trials) for result in tuning}
    # as the plan counts: two trials of one arm may happen to be the same settings, and are then run once
    budgets = {arm.name: sum(len(trial.seeds) for trial in arm.trials) or tried.get(arm.name, 0) for arm in arms}
    if len(set(budgets.values())) == 1:
        number = next(iter(budgets.values()))
        said = f"{number} tuning runs per arm, on other seeds than the tests{_tuned_for(study)}"
        different = {
            arm.name: len({tuple(sorted(map(str, trial.settings.items()))) for trial in arm.trials}) for arm in arms
        }
        fewer = [
            f"{arm.name} {different[arm.name]} of {len(arm.trials)}"
            for arm in arms
            if different[arm.name] < len(arm.trials)
        ]
        if fewer:
            said += f"; but trials that are all different: {', '.join(fewer)}"
        return TrustItem("tuning", "equal budgets", "warning" if fewer else "good", said)
    listed = ", ".join(f"{name} {number}" for name, number in budgets.items())
    return TrustItem("tuning", "UNEQUAL budgets", "bad", f"tuning runs per arm: {listed}{_tuned_for(study)}")


def _tuned_for(study: Study) -> str:
    """What the trials were chosen by, where it is not what the study asks for."""
    endpoint = None if study.registration is None else study.registration.endpoint
    if endpoint is None or endpoint == "loss_at_equal_samples":
        return ""
    return (
        "; chosen by the final loss at equal samples, not by the primary endpoint "
        f"({endpoint.replace('_', ' ')}), for which other values may be better"
    )


def _edge_item(tuning: Sequence[TuningResult]) -> TrustItem:
    title = "tuned values inside their grids"
    if not tuning:
        return TrustItem(title, "does not apply", "unknown", "nothing was tuned")
    edge = [result.arm for result in tuning if result.at_edge]
    if not edge:
        return TrustItem(title, "yes", "good", "")
    detail = f"the chosen learning rate is the smallest or largest tried in {', '.join(edge)}: the best may lie beyond"
    return TrustItem(title, f"not in {len(edge)} of {len(tuning)} arms", "warning", detail)


def _registration_item(study: Study, exploratory: str) -> TrustItem:
    registration = study.registration
    if registration is None:
        return TrustItem("analysis.yaml", "none: exploratory", "warning", exploratory)
    digest = f"sha256 {registration.sha256[:16]}"
    if exploratory:
        return TrustItem("analysis.yaml", f"{digest}: exploratory", "bad", exploratory)
    if study.unchanged:
        return TrustItem("analysis.yaml", digest, "good", "agrees with what plan.json recorded")
    return TrustItem("analysis.yaml", digest, "unknown", "plan.json recorded nothing to compare it with")


def _constant_item(study: Study) -> TrustItem:
    """Fine-tuned classifiers that give every text one label, whose score says how often that label occurs; or taggers
    that are no better than one that does.
    """
    title = "classifiers that tell classes apart"
    runs = [run for run in study.of("finetune") if run.usable and not run.diverged]
    if any(metric_of(run) == "span_f1" for run in runs):
        title = "taggers that beat the commonest tag"
        names = list(dict.fromkeys(run.arm for run in runs))
        ignorant = [name for name in names if not_learned(run for run in runs if run.arm == name)]
        if not ignorant:
            return TrustItem(title, "all", "good", "")
        detail = f"{', '.join(ignorant)}: no better in span F1 or accuracy, so there is no verdict on their scores"
        return TrustItem(title, f"not {len(ignorant)} of {len(names)} arms", "bad", detail)
    if not runs:
        return TrustItem(title, "does not apply", "good", "nothing was fine-tuned")
    predicted = {run.name: num_predicted_classes(run) for run in runs}
    arms = Counter(run.arm for run in runs if predicted[run.name] == 1)
    if not arms:
        unknown = list(predicted.values()).count(None)
        detail = f"{unknown} runs without a confusion matrix" if unknown else ""
        return TrustItem(title, "not known" if unknown else "all", "unknown" if unknown else "good", detail)
    listed = ", ".join(f"{arm} {number}" for arm, number in arms.items())
    detail = f"{listed}: they predict one class for every text, so their macro-F1 says nothing of what was learned"
    return TrustItem(title, f"not in {arms.total()} of {len(runs)} fine-tuning runs", "bad", detail)


def _scratch_item(study: Study) -> TrustItem:
    runs = [run for run in study.of("test") if run.run is not None]
    marks = Counter(summary_of(run, "from_scratch") for run in runs)
    if marks[True]:
        return TrustItem("initial weights", f"{marks[True]} of {len(runs)} runs {FROM_SCRATCH}", "warning", "")
    if marks[False]:
        unknown = f"{marks[None]} runs do not say" if marks[None] else ""
        return TrustItem("initial weights", "continued from a pretrained model", "good", unknown)
    return TrustItem("initial weights", "not known", "unknown", "no run says where its weights came from")


def _data_item(groups: Sequence[Group], study: Study) -> TrustItem:
    told = sorted({one for group in groups for one in group.evaluation_sets})
    mixed = [group.name for group in groups if len(group.evaluation_sets) > 1]
    names = sorted({str(summary_of(run, "data")) for run in study.of("test") if summary_of(run, "data")})
    value = ", ".join(" ".join([one[:12], *more]) for one, *more in (name.split() for name in told)) or "not known"
    if mixed:
        return TrustItem("data", value, "bad", f"runs on different data or masks in {'; '.join(mixed)}: not compared")
    if not told:
        return TrustItem("data", value, "unknown", "no run has a data_fingerprint")
    if len(told) > 1:
        return TrustItem(
            "data", value, "warning", "groups were evaluated on different data or masks; compare inside a group only"
        )
    return TrustItem("data", value, "good", ", ".join(names))


def _commit_item(hardware: Sequence[HardwareRow]) -> TrustItem:
    commits = Counter[str]()
    modified = 0
    for row in hardware:
        values = dict(row.values)
        commits[values.get("commit", "unknown")] += row.num_runs
        modified += row.num_runs * ("working tree" in values)
    if not commits:
        return TrustItem("code", "not known", "unknown", "no run has an environment.json")
    value = ", ".join(f"{commit[:12]} ({number} runs)" for commit, number in sorted(commits.items()))
    detail = [f"{modified} runs with a modified working tree"] * bool(modified)
    detail += ["runs of different commits are compared"] * (len(commits) > 1)
    detail += [f"{commits['unknown']} runs without a commit"] * (commits["unknown"] > 0)
    detail += [f"{len(hardware)} different environments, see the table"] * (len(hardware) > 1)
    return TrustItem("code", value, "warning" if detail else "good", "; ".join(detail))


def _reading_item(study: Study) -> TrustItem:
    if not study.problems:
        return TrustItem("reading", "no problems", "good", "")
    number = len(study.problems)
    return TrustItem("reading", f"{number} problem{'s' * (number != 1)}", "warning", "listed at the end")
