"""The settings in which the arms of a group differ, as their runs were started."""

from __future__ import annotations

import dataclasses

from analysis.findings.comparable_runs import Scope

NAMED_BY_THE_ARM = {"mode", "rule", "seed"}
"""Settings that the name of an arm or of a run says already."""


@dataclasses.dataclass(frozen=True)
class ArmSettings:
    """One arm with its value of every setting in which arms that are compared with each other differ."""

    arm: str
    values: tuple[tuple[str, str], ...]
    """(key, value), the same keys in every arm; ``-`` where no run of the arm says it, or its runs differ."""


def arm_settings(scope: Scope) -> tuple[ArmSettings, ...]:
    """The settings that differ within a group or from its control arm; empty where none does."""
    by_arm: dict[str, dict[str, str]] = {}
    for arm, runs in scope.usable.items():
        told = [run.run.settings for run in runs if run.run is not None and run.run.settings]
        keys = {key for settings in told for key in settings} - NAMED_BY_THE_ARM
        values = {key: {str(settings.get(key)) for settings in told} for key in keys}
        by_arm[arm] = {key: of_runs.pop() for key, of_runs in values.items() if len(of_runs) == 1}
    differ = set()
    for group in scope.groups:
        alike = [by_arm[arm] for arm in (*group.arms, *scope.controls[group.name]) if by_arm[arm]]
        differ |= {key for own in alike for key in own if len({other.get(key) for other in alike}) > 1}
    if not differ:
        return ()
    return tuple(
        ArmSettings(arm, tuple((key, own.get(key, "-")) for key in sorted(differ)))
        for arm, own in by_arm.items()
        if own
    )
