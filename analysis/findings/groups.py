"""Groups: the arms that are compared with each other, with the reference and the target of each.

Measured and virtual seconds never meet: the clock is part of a group.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from analysis.statistics.crossings import target_grid
from analysis.study.curves import improvement_of
from analysis.study.run import loss_label
from analysis.study.types import MEASURED, Arm, Registration, Study
from asyncsgd.study.arms import differing
from asyncsgd.study.plan import BASELINE

DEFAULT_REFERENCE = "sync"
AFTER_THE_FACT_SHARE = 0.95
"""Where no target was declared: this share of the improvement of the reference's own runs, which is exploratory."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something that is not in a number, and why."""

    name: str
    """Of the run folder (relative to the study), the arm, the comparison, or the part of the report."""
    reason: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms that may be compared with each other: same workers, clock, speeds and batch size."""

    name: str
    """Unique and readable, e.g. ``4 workers, virtual clock, slow:worker=0,factor=3, batch 16``."""
    num_workers: int | None
    clock: str
    speeds: str | None
    batch_size: int | None
    variant: tuple[tuple[str, str], ...]
    """Other settings that all its arms share and other groups do not (key, value)."""
    reference: str | None
    """Name of the reference arm; None where the group has none."""
    arms: tuple[str, ...]
    """Arm names, the reference first."""
    primary: bool
    """Whether the pre-registered primary comparison is here."""
    seconds_label: str
    """Of every axis with seconds: ``training seconds`` or ``virtual seconds``."""
    loss_label: str
    """Of every axis with losses: ``evaluation loss (nats per masked token)``, or ``evaluation loss, excess``."""
    target: float | None
    """The declared target loss; None where there is none."""
    target_from: str
    """Where the target comes from, in words; empty without a target."""
    evaluation_sets: tuple[str, ...]


def reference_algorithm(study: Study) -> str | None:
    """The registered reference, else ``sync`` where there is such an arm."""
    if study.registration is not None:
        return study.registration.reference
    return DEFAULT_REFERENCE if any(arm.algorithm == DEFAULT_REFERENCE for arm in study.arms) else None


def is_primary(group_workers: int | None, clock: str, registration: Registration | None) -> bool:
    """Whether the registered primary comparison is made under these conditions."""
    if registration is None:
        return False
    workers_fit = registration.num_workers is None or registration.num_workers == group_workers
    return workers_fit and (registration.clock is None or registration.clock == clock)


def is_registered(registration: Registration, arm: str, group: Group) -> bool:
    """Whether `arm` is the reference of `group` or was registered with it; old files name no arms, and mean all."""
    return registration.family is None or arm == group.reference or arm in registration.family


def groups_of(study: Study) -> tuple[tuple[Group, ...], tuple[LeftOut, ...]]:
    """Put every arm with pretraining runs into a group with at most one reference arm.

    Arms of one group have the same workers, clock, speeds and batch size. Where several reference arms fit, they differ
    in some other setting, and an arm goes to the one that has its value of it.
    """
    algorithm = reference_algorithm(study)
    batches = sorted({arm.batch_size for arm in study.arms if arm.batch_size is not None})
    by_key: dict[tuple[int | None, str, str, int | None], list[Arm]] = defaultdict(list)
    for arm in study.arms:
        if arm.name == BASELINE:
            continue
        batch = arm.batch_size
        if batch is None and len(batches) == 1:  # nothing of it has run yet
            batch = batches[0]
        by_key[arm.num_workers, arm.clock, arm.speeds or "", batch].append(arm)
    groups, left_out = [], []
    for (workers, clock, speeds, batch), arms in by_key.items():
        references = [arm for arm in arms if arm.algorithm == algorithm]
        keys = differing([arm.settings for arm in references])
        members: dict[str | None, list[Arm]] = {arm.name: [] for arm in references}
        for arm in arms:
            if arm in references:
                continue
            fitting = [one for one in references if all(_value(one, key) == _value(arm, key) for key in keys)]
            if len(fitting) == 1:
                members[fitting[0].name].append(arm)
                continue
            members.setdefault(None, []).append(arm)
            if references:
                listed = ", ".join(one.name for one in references)
                told = ", ".join(keys) or "nothing"
                left_out.append(
                    LeftOut(
                        arm.name, f"no comparison: which of {listed} it belongs to is not clear (they differ in {told})"
                    )
                )
        for name, others in members.items():
            variant: tuple[tuple[str, str], ...] = ()
            if name is not None and len(references) > 1:
                own = next(arm for arm in references if arm.name == name)
                variant = tuple((key, str(_value(own, key))) for key in keys)
            label = _group_name(workers, clock, speeds, batch if len(batches) > 1 else None, variant)
            if name is None and references:
                label += ", no reference"
            all_arms = ([] if name is None else [name]) + [arm.name for arm in others]
            groups.append(_group(study, label, workers, clock, speeds, batch, variant, name, tuple(all_arms)))
    groups.sort(
        key=lambda group: (not group.primary, group.clock, group.speeds or "", group.num_workers or 0, group.name)
    )
    return tuple(groups), tuple(left_out)


def _value(arm: Arm, key: str) -> object:
    return arm.settings.get(key)


def _group_name(
    workers: int | None, clock: str, speeds: str, batch: int | None, variant: Sequence[tuple[str, str]]
) -> str:
    count = "unknown workers" if workers is None else f"{workers} worker{'s' * (workers != 1)}"
    parts = [count, f"{clock} clock", *[speeds] * bool(speeds), *[f"batch {batch}"] * (batch is not None)]
    return ", ".join([*parts, *(f"{key} {value}" for key, value in variant)])


def _group(
    study: Study,
    label: str,
    workers: int | None,
    clock: str,
    speeds: str,
    batch: int | None,
    variant: tuple[tuple[str, str], ...],
    reference: str | None,
    arms: tuple[str, ...],
) -> Group:
    runs = [run.run for name in arms for run in study.of("test", name) if run.run is not None]
    target, origin = _target(study, reference)
    return Group(
        name=label,
        num_workers=workers,
        clock=clock,
        speeds=speeds or None,
        batch_size=batch,
        variant=variant,
        reference=reference,
        arms=arms,
        primary=reference is not None and is_primary(workers, clock, study.registration),
        seconds_label="training seconds" if clock == MEASURED else "virtual seconds",
        loss_label=loss_label(runs),
        target=target,
        target_from=origin,
        evaluation_sets=tuple(sorted({run.evaluation_set for run in runs if run.evaluation_set is not None})),
    )


def _target(study: Study, reference: str | None) -> tuple[float | None, str]:
    if reference is None:
        return None, ""
    if reference in study.targets:
        return study.targets[reference], study.target_from or "declared before the test runs"
    improvement = improvement_of([run for run in study.of("test", reference) if run.replicate == 0])
    if improvement is None:
        return None, ""
    grid = target_grid(*improvement, shares=(AFTER_THE_FACT_SHARE,))
    return grid[AFTER_THE_FACT_SHARE], (
        f"{100 * AFTER_THE_FACT_SHARE:g} % of the improvement of {reference}'s own runs, chosen after the fact"
    )
