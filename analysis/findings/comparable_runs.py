"""Which runs may be shown together.

Whatever draws or averages runs takes them from a `Scope`, so that losses of different data and seconds of different
clocks never meet in one picture or mean.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from analysis.findings.comparisons import is_control
from analysis.findings.groups import Group, LeftOut
from analysis.study.types import Study, StudyRun


@dataclasses.dataclass(frozen=True)
class Scope:
    """The test runs that may enter a picture or a mean, by arm, and the group of every arm."""

    groups: tuple[Group, ...]
    shown: Mapping[str, tuple[StudyRun, ...]]
    """All runs of an arm that have a folder, failed ones too; evaluated on the data of their group."""
    usable: Mapping[str, tuple[StudyRun, ...]]
    """Those with a result, first replicates only."""
    left_out: tuple[LeftOut, ...]
    controls: Mapping[str, tuple[str, ...]]
    """Group -> control arms that ran under its conditions with other batches, on the same evaluation data."""

    def group_of(self, arm: str) -> Group | None:
        return next((group for group in self.groups if arm in group.arms), None)


def scope_of(study: Study, groups: Sequence[Group]) -> Scope:
    """Choose the runs that may be shown together: in every group those on the data of its reference."""
    shown, usable, left_out, data = {}, {}, [], {}
    for group in groups:
        runs = {arm: [run for run in study.of("test", arm) if run.run is not None] for arm in group.arms}
        main = data[group.name] = _main_evaluation_set(runs, group)
        for arm, of_arm in runs.items():
            kept = []
            for run in of_arm:
                assert run.run is not None
                told = run.run.evaluation_set
                if told is not None and told != main:
                    reason = (
                        f"evaluated on other data ({told}) than {group.name} ({main}): in no picture or mean with it"
                    )
                    left_out.append(LeftOut(run.name, reason))
                else:
                    kept.append(run)
            shown[arm] = tuple(kept)
            usable[arm] = tuple(run for run in kept if run.usable and run.replicate == 0)
    controls = {group.name: _controls(study, group, groups, data) for group in groups}
    return Scope(tuple(groups), shown, usable, tuple(left_out), controls)


def _controls(study: Study, group: Group, groups: Sequence[Group], data: Mapping[str, str | None]) -> tuple[str, ...]:
    """The control arms that differ from the arms of `group` in their batches alone; none for their own group."""
    if group.reference is None:
        return ()
    alike = [
        other
        for other in groups
        if (other.num_workers, other.clock, other.speeds) == (group.num_workers, group.clock, group.speeds)
        and data[other.name] == data[group.name]
        and other is not group
    ]
    return tuple(name for other in alike for name in other.arms if is_control(study, study.arm(name)))


def _main_evaluation_set(runs: Mapping[str, Sequence[StudyRun]], group: Group) -> str | None:
    first = runs.get(group.reference or "", ())
    for candidates in (first, [run for of_arm in runs.values() for run in of_arm]):
        told = Counter(run.run.evaluation_set for run in candidates if run.run and run.run.evaluation_set)
        if told:
            return sorted(told, key=lambda one: (-told[one], one))[0]
    return None
