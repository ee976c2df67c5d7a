"""From a `Study` to everything a report shows, as plain values: frozen dataclasses of text, numbers and tuples.

None is what is not known. Pages, tables and pictures are made from these values and nothing else. Every text is plain
text (no HTML). Tuples are sorted, so that equal studies give equal values in any directory order. Losses are nats per
masked token (an excess on closed-form problems). Times are seconds of the training clock: virtual ones where `clock` is
``virtual``, which never share a `Group`, a panel or a comparison with measured ones.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy

from analysis.findings.arm_settings import ArmSettings, arm_settings
from analysis.findings.arms import ArmCounts, ArmInfo, ArmRow, arm_infos, arm_rows, counts_of
from analysis.findings.comparable_runs import scope_of
from analysis.findings.comparisons import FROM_SCRATCH, comparisons_of
from analysis.findings.costs import ArmCost, arm_costs
from analysis.findings.curves import CurvePanel, StepPanel, curve_panels, step_panels
from analysis.findings.delays import DelayGap, DelayHistogram, activity_of, delay_gaps, histograms
from analysis.findings.downstream import DownstreamArm, downstream_arms, downstream_questions, scores_of
from analysis.findings.endpoints import questions_of
from analysis.findings.groups import Group, LeftOut, groups_of, is_registered
from analysis.findings.judging import TestRow, judge, sort_rows
from analysis.findings.sentence import Headline, headlines_of
from analysis.findings.single_runs import HardwareRow, RunRow, hardware_rows, run_rows
from analysis.findings.timelines import Timeline, timelines
from analysis.findings.times import ReachedPanel, reached_panels, sensitivities
from analysis.findings.trust import TrustItem, trust_of
from analysis.findings.tuning import TuningResult, tuning_results
from analysis.findings.workers import Scaling, scalings
from analysis.study.types import VIRTUAL, Study, clocks_of, summary_of
from asyncsgd.study.plan import BASELINE


@dataclasses.dataclass(frozen=True)
class RegistrationInfo:
    """analysis.yaml as it was declared."""

    sha256: str
    reference: str
    endpoint: str
    num_workers: int | None
    clock: str | None
    alpha: float
    margins: tuple[tuple[str, float], ...]
    margin_reasons: tuple[tuple[str, str], ...]
    num_seeds: int | None
    target_from: str


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows, in the order of the eye."""

    title: str
    folder: str
    """Name of the study's folder, not its path on this machine."""
    exploratory: bool
    exploratory_reason: str
    """Why everything is exploratory; empty where a pre-registered family stands."""
    clocks: tuple[str, ...]
    """Clocks of the runs: both may be here, never in one panel."""
    from_scratch: bool
    """Whether any run of the study started from random weights."""
    registration: RegistrationInfo | None
    arms: tuple[ArmInfo, ...]
    """In the order of legends."""
    groups: tuple[Group, ...]
    """The primary group first."""
    headlines: tuple[Headline, ...]
    """Never empty: without a comparison it says why there is none."""
    tests: tuple[TestRow, ...]
    """Primary family first."""
    trust: tuple[TrustItem, ...]
    counts: tuple[ArmCounts, ...]
    curves: tuple[CurvePanel, ...]
    """Per group: seconds, then samples."""
    reached: tuple[ReachedPanel, ...]
    scaling: tuple[Scaling, ...]
    delays: tuple[DelayHistogram, ...]
    delay_gaps: tuple[DelayGap, ...]
    timelines: tuple[Timeline, ...]
    """One synchronous and one asynchronous run, where there are events."""
    tuning: tuple[TuningResult, ...]
    downstream: tuple[DownstreamArm, ...]
    """The baseline first."""
    table: tuple[ArmRow, ...]
    hardware: tuple[HardwareRow, ...]
    runs: tuple[RunRow, ...]
    left_out: tuple[LeftOut, ...]
    """Everything that is in no number, with its reason."""
    problems: tuple[str, ...]
    """What went wrong while reading, one line each."""
    command: str
    """What to type to make this report again."""
    settings: tuple[ArmSettings, ...] = ()
    """Empty where the arms of no group differ in more than their algorithm."""
    steps: tuple[StepPanel, ...] = ()
    """The learning rate and the gradient norm over the samples, per group."""
    costs: tuple[ArmCost, ...] = ()
    """Of the arms whose runs say anything of it."""

    @property
    def labels(self) -> dict[str, str]:
        """Name of an arm -> how it is called."""
        return {arm.name: arm.label for arm in self.arms}


def results(study: Study, generator: numpy.random.Generator) -> Results:
    """Compute everything that a report of `study` shows.

    Nothing here reads a clock or the order of a directory: the same files and the same generator state give equal
    values.

    Args:
        study: of `analysis.study.read.load_study`.
        generator: for resampling, and for sign-flip tests of more than 30 pairs.

    Returns:
        The values of all tables, pictures and sentences. Whatever could not be computed is in `Results.left_out` with
        the reason, and the rest is there.
    """
    problems = list(study.problems)
    groups, ungrouped = groups_of(study)
    scope = scope_of(study, groups)
    labels = _labels(study, groups)
    why = exploratory_because(study, groups)
    comparisons, uncompared = comparisons_of(study, groups)
    scores = scores_of(study)
    questions = questions_of(study, comparisons, exploratory=bool(why))
    more, unscored = downstream_questions(study, groups, scores, exploratory=bool(why))
    registered = None if study.registration is None else study.registration.family
    tests = sort_rows(judge([*questions, *more], generator, len(registered or ())))
    activities = {
        arm: [activity_of(run.run) for run in scope.usable[arm] if run.run is not None]
        for group in groups
        for arm in group.arms
    }
    delays = histograms(activities)
    reached = reached_panels(scope)
    tuning = tuning_results(study)
    downstream = downstream_arms(study, scores, labels, problems)
    scaling = scalings(study, scope)
    hardware = hardware_rows(study)
    left_out = [
        *_lost_runs(study),
        *(LeftOut(item.name, item.reason) for item in study.set_aside),
        *scope.left_out,
        *ungrouped,
        *uncompared,
        *scores.left_out,
        *unscored,
    ]
    in_tests = {run.name for comparison in comparisons for run in comparison.runs}
    in_tests |= {run.name for arm in scores.runs.values() for own in arm.values() for run in own if run.run is not None}
    sensitivity = sensitivities(study, comparisons, generator)
    headlines = headlines_of(study, groups, comparisons, tests, tuning, sensitivity)
    left_out += _absent(study, tests, reached, tuning, downstream)
    return Results(
        title=study.name,
        folder=study.folder.resolve().name,
        exploratory=bool(why),
        exploratory_reason=why,
        clocks=clocks_of(study),
        from_scratch=any(summary_of(run, "from_scratch") is True for run in study.runs if run.stage != "base"),
        registration=_registration_info(study),
        arms=arm_infos(study, scope, labels),
        groups=groups,
        headlines=headlines,
        tests=tests,
        trust=trust_of(study, groups, comparisons, tests, tuning, hardware, scope, why),
        counts=counts_of(study),
        curves=curve_panels(scope),
        reached=reached,
        scaling=scaling,
        delays=delays,
        delay_gaps=delay_gaps(tests, delays, groups),
        timelines=timelines(study, scope),
        tuning=tuning,
        downstream=downstream,
        table=arm_rows(study, scope, reached, delays, activities),
        hardware=hardware,
        runs=run_rows(study, frozenset(in_tests), left_out),
        left_out=_unique(left_out),
        problems=tuple(dict.fromkeys(problems)),
        # as it was typed, but for an absolute path, which may hold the name of a user
        command=f"python -m analysis.report {shlex.quote(_typed(study.folder))} --out report.html",
        settings=arm_settings(scope),
        steps=step_panels(scope),
        costs=arm_costs(scope),
    )


def _typed(folder: Path) -> str:
    return folder.resolve().name if folder.is_absolute() else folder.as_posix()


def exploratory_because(study: Study, groups: Sequence[Group]) -> str:
    """Why nothing of the study can be called confirmed; empty where the pre-registration stands."""
    registration = study.registration
    if registration is None:
        return study.unregistered_because
    if study.unchanged is False:
        return "analysis.yaml is not what it was when the test runs began"
    if study.unverified_because:
        return study.unverified_because
    primary = [group for group in groups if group.primary]
    if not primary:
        shown = ", ".join(
            f"{what} {value}"
            for what, value in (("workers", registration.num_workers), ("clock", registration.clock))
            if value is not None
        )
        return f"the folder has no {registration.reference} arm under the registered conditions ({shown})"
    if registration.num_seeds is not None:
        arms = [arm for group in primary for arm in group.arms if is_registered(registration, arm, group)]
        numbers = {len({run.seed for run in study.of("test", arm)}) for arm in arms}
        if max(numbers) > registration.num_seeds:
            return (
                f"{max(numbers)} seeds were run and {registration.num_seeds} registered: "
                "seeds added after looking are no confirmation"
            )
        # a run that was begun and lost drops its block; one that was never begun may have been left out on purpose
        begun = min(len({run.seed for run in study.of("test", arm) if run.run is not None}) for arm in arms)
        if begun < registration.num_seeds:
            return (
                f"{registration.num_seeds} seeds were registered and an arm of the primary comparison has {begun} so "
                "far: stopping early is a choice made after looking"
            )
    return ""


def _registration_info(study: Study) -> RegistrationInfo | None:
    registration = study.registration
    if registration is None:
        return None
    return RegistrationInfo(
        sha256=registration.sha256,
        reference=registration.reference,
        endpoint=registration.endpoint,
        num_workers=registration.num_workers,
        clock=registration.clock,
        alpha=registration.alpha,
        margins=tuple(sorted(registration.margins.items())),
        margin_reasons=tuple(sorted(registration.margin_reasons.items())),
        num_seeds=registration.num_seeds,
        target_from=registration.target_from,
    )


def _labels(study: Study, groups: Sequence[Group]) -> dict[str, str]:
    """A readable name of every arm; what all arms share is not repeated but the workers and the clock."""
    clocks = clocks_of(study)
    labels = {}
    for arm in study.arms:
        if arm.name == BASELINE:
            labels[arm.name] = "baseline, no intermediate training"
            continue
        group = next((group for group in groups if arm.name in group.arms), None)
        count = (
            "unknown workers" if arm.num_workers is None else f"{arm.num_workers} worker{'s' * (arm.num_workers != 1)}"
        )
        parts = [arm.algorithm, count]
        if len(clocks) > 1 or arm.clock == VIRTUAL:
            parts.append(f"{arm.clock} clock")
        if group is not None:
            same = [other for other in groups if (other.num_workers, other.clock) == (group.num_workers, group.clock)]
            if len({other.speeds for other in same}) > 1:
                parts.append(group.speeds or "equal speeds")
            if len({other.batch_size for other in same}) > 1:
                parts.append(f"batch {group.batch_size}")
            parts += [f"{key} {value}" for key, value in group.variant]
        labels[arm.name] = ", ".join(parts)
    twice = Counter(labels.values())
    for arm in study.arms:
        label = labels[arm.name]
        if twice[label] > 1:  # settings differ that no part of the label names
            label = arm.name
        if any(summary_of(run, "from_scratch") is True for run in study.runs if run.arm == arm.name):
            label += f" ({FROM_SCRATCH})"
        labels[arm.name] = label
    return labels


def _lost_runs(study: Study) -> list[LeftOut]:
    return [
        LeftOut(run.name, run.unusable_because)
        for run in study.runs
        if run.stage != "finetune" and run.unusable_because
    ]


def _absent(
    study: Study,
    tests: Sequence[TestRow],
    reached: Sequence[object],
    tuning: Sequence[object],
    downstream: Sequence[object],
) -> list[LeftOut]:
    """Why whole parts of the report are empty, by the part's name."""
    absent = []
    if not tests:
        absent.append(LeftOut("tests", "there are no two arms to compare, or no seed that both have a result for"))
    if not reached:
        absent.append(LeftOut("time to target", "there is no target loss: no reference arm, or it did not improve"))
    if not tuning:
        absent.append(LeftOut("learning rate", "the folder holds no tuning trials"))
    if not downstream:
        planned = bool(study.of("finetune"))
        told = "no fine-tuning run has a result" if planned else "no run was fine-tuned on a labelled task"
        absent.append(LeftOut("downstream", told))
    return absent


def _unique(left_out: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    return tuple(dict.fromkeys(left_out))
