"""Studies as tasks: what the algorithms of their registered primary conditions score."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path

from analysis.findings.comparable_runs import scope_of
from analysis.findings.comparisons import groups_of
from analysis.findings.workers import loss_or_worst
from analysis.study.curves import curve_of, end_of, time_to, worst_loss
from analysis.study.read import load_study
from asyncsgd.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Task:
    """The registered primary condition of one study."""

    name: str
    clock: str
    reference: str
    """Its algorithm."""
    scores: Mapping[str, tuple[float, ...]]
    """Algorithm -> share of the reference's mean improvement, one per seed; the same seeds for all."""
    median_times: Mapping[str, float]
    """Algorithm -> median over seeds of the seconds to the target, inf where most never reach it; empty without one."""


def read_task(folder: Path) -> Task:
    """Read one study.

    Raises:
        UsageError: if it registered no primary condition, its arms share no seed, or its reference learned nothing.
    """
    study = load_study(folder)
    groups, _ = groups_of(study)
    group = next((group for group in groups if group.primary and group.reference is not None), None)
    if group is None or group.reference is None:
        raise UsageError(f"{folder}: it registered no primary condition with a reference; its analysis.yaml says which")
    usable = scope_of(study, groups).usable
    runs = {arm: {run.seed: run for run in usable[arm]} for arm in group.arms if usable[arm]}
    everybody = [run for of_arm in runs.values() for run in of_arm.values()]
    finished = [run.run for run in everybody if run.run is not None and not run.diverged]
    seeds = sorted(seed for seed in set.intersection(*map(set, runs.values())) if seed is not None) if runs else []
    if group.reference not in runs or not finished or not seeds:
        raise UsageError(f"{folder}: there is no seed on which every algorithm has a result in {group.name}")
    common, worst = min(end_of(run, "total_samples") for run in finished), worst_loss(everybody)
    losses = {
        arm: [loss_or_worst(of_arm[seed], "total_samples", common, worst) for seed in seeds]
        for arm, of_arm in runs.items()
    }
    first = statistics.fmean(
        float(curve_of(run.run, "total_samples")[1][0])
        for seed in seeds
        if (run := runs[group.reference][seed]).run is not None
    )
    gained = first - statistics.fmean(losses[group.reference])
    if not gained > 0:
        raise UsageError(f"{folder}: the reference {group.reference} learned nothing, so that no score has a scale")
    algorithms = {arm: study.arm(arm).algorithm for arm in runs}
    times = {}
    if group.target is not None:
        for arm, of_arm in runs.items():
            times[algorithms[arm]] = statistics.median(time_to(of_arm[seed], group.target)[0] for seed in seeds)
    return Task(
        folder.name,
        group.clock,
        algorithms[group.reference],
        {algorithms[arm]: tuple((first - loss) / gained for loss in of_arm) for arm, of_arm in losses.items()},
        times,
    )
