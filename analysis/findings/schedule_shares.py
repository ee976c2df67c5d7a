"""How much of the noise of an arm is the schedule: the order in which gradients happened to arrive."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from analysis.findings.comparable_runs import Scope
from analysis.findings.workers import loss_of
from analysis.statistics.intervals import Interval
from analysis.statistics.noise import components
from analysis.study.curves import end_of
from analysis.study.types import Study, StudyRun


@dataclasses.dataclass(frozen=True)
class ScheduleShare:
    """S9: how much of the variance of the final loss is the schedule (replicates), not the seed; or why not known."""

    arm: str
    refused: str
    num_seeds: int
    num_replicates: int
    schedule_variance: Interval | None
    seed_variance: float | None
    share: Interval | None
    """schedule / (schedule + seed)."""
    p: float | None


def schedule_shares(study: Study, scope: Scope) -> tuple[ScheduleShare, ...]:
    """S9: how much of the variance of the loss is the schedule, for arms with replicates."""
    found = []
    for arm in study.arms:
        runs = [run for run in scope.shown.get(arm.name, ()) if run.usable and run.seed is not None]
        by_seed: dict[int, list[StudyRun]] = defaultdict(list)
        for run in runs:
            if run.seed is not None:
                by_seed[run.seed].append(run)
        most = max((len(of_seed) for of_seed in by_seed.values()), default=0)
        if most < 2:
            continue
        balanced = {
            seed: of_seed
            for seed, of_seed in sorted(by_seed.items())
            if len(of_seed) == most and not any(run.diverged for run in of_seed)
        }
        found.append(_schedule_share(arm.name, balanced, most))
    return tuple(found)


def _schedule_share(arm: str, runs: Mapping[int, Sequence[StudyRun]], replicates: int) -> ScheduleShare:
    nothing = ScheduleShare(arm, "", len(runs), replicates, None, None, None, None)
    if len(runs) < 2:
        return dataclasses.replace(nothing, refused=f"{len(runs)} seeds with all {replicates} replicates; it needs 2")
    folders = [run.run for of_seed in runs.values() for run in of_seed if run.run is not None]
    common = min(end_of(run, "total_samples") for run in folders)
    table = [[loss_of(run, "total_samples", common) for run in of_seed] for of_seed in runs.values()]
    result = components(table)
    return dataclasses.replace(
        nothing,
        refused=result.too_few,
        schedule_variance=result.schedule_variance,
        seed_variance=result.seed_variance,
        share=result.schedule_share,
        p=result.p,
    )
