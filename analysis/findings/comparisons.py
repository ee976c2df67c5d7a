"""Comparisons: the complete pairs of a treatment and its reference, on the same seeds.

A pair is two runs of one seed, both with a result. A diverged run is a result. A failed or missing run is none, and its
pair is left out. The pairs of other arms stay, so that no arm touches the comparison of two others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from analysis.findings.groups import DEFAULT_REFERENCE, Group, LeftOut, reference_algorithm
from analysis.study.types import Arm, Study, StudyRun

FROM_SCRATCH = "from scratch: not STILT"
"""The mark that runs from random weights carry everywhere."""
UNEQUAL_BATCHES = "unequal batches"
"""How the note begins that says how many more updates one arm makes of the same samples."""
SAME_BATCH = 0.01
"""Samples per update that differ by at most this share are equal: a last update of a run may have had fewer."""
OVERSUBSCRIBED = "oversubscribed: more threads than cores, its seconds are no speed comparison"
RESUMED = "resumed: its seconds were measured in parts and are no speed comparison"


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two runs of one seed."""

    seed: int
    treatment: StudyRun
    reference: StudyRun


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A treatment arm against the reference arm of its group, with its complete pairs."""

    name: str
    group: Group
    treatment: Arm
    reference: Arm
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    declared: bool
    """Whether the group's target was declared before the runs."""
    control: bool = False
    """Whether `reference` is the registered control arm, whose updates are made of as many samples as the treatment's,
    and not the reference of the group. Losses at equal samples are compared with it, and nothing else."""

    @property
    def runs(self) -> list[StudyRun]:
        return [run for pair in self.pairs for run in (pair.treatment, pair.reference)]


def comparisons_of(study: Study, groups: Sequence[Group]) -> tuple[tuple[Comparison, ...], tuple[LeftOut, ...]]:
    """Every treatment arm against the reference of its group; what cannot be compared is listed with its reason."""
    comparisons, left_out = [], []
    for group in groups:
        if group.reference is None:
            alone = ", ".join(arm for arm in group.arms if not is_control(study, study.arm(arm)))
            if not alone:
                continue
            algorithm = reference_algorithm(study) or DEFAULT_REFERENCE
            left_out.append(LeftOut(alone, f"no comparison: there is no {algorithm} arm with {group.name}"))
            continue
        if len(group.arms) == 1:
            left_out.append(LeftOut(group.arms[0], f"no comparison: it is the only arm with {group.name}"))
            continue
        for name in group.arms[1:]:
            comparison = _comparison(study, group, name, group.reference, left_out)
            if comparison is not None:
                comparisons.append(comparison)
    return (*comparisons, *_control_comparisons(study, comparisons, left_out)), tuple(left_out)


def _control_comparisons(
    study: Study, comparisons: Sequence[Comparison], left_out: list[LeftOut]
) -> Iterator[Comparison]:
    """Every treatment that makes updates of as many samples as the control arm under its conditions, against that arm:
    a difference between the two is not one of the number of updates.
    """
    for comparison in comparisons:
        group, name = comparison.group, comparison.treatment.name
        for control in study.arms:
            same = (control.num_workers, control.clock, control.speeds or None) == (
                group.num_workers,
                group.clock,
                group.speeds,
            )
            if not is_control(study, control) or not same:
                continue
            sizes = [samples_per_update(study.of("test", arm)) for arm in (name, control.name)]
            if None not in sizes and _same_batch(*sizes):
                found = _comparison(study, group, name, control.name, left_out)
                if found is not None:
                    yield dataclasses.replace(found, control=True)


def is_control(study: Study, arm: Arm) -> bool:
    return study.registration is not None and arm.algorithm == study.registration.control


def samples_per_update(runs: Iterable[StudyRun]) -> float | None:
    """Of the samples that were applied; None where no run has an update, or says how many samples were applied."""
    counts = [
        (run.run.summary.get("num_samples_applied"), run.run.summary.get("num_updates"))
        for run in runs
        if run.run is not None and run.usable
    ]
    known = [(samples, updates) for samples, updates in counts if isinstance(samples, int) and isinstance(updates, int)]
    updates = sum(updates for _, updates in known)
    samples = sum(samples for samples, _ in known)
    return samples / updates if updates and samples else None


def _same_batch(ours: float | None, theirs: float | None) -> bool:
    return ours is None or theirs is None or abs(ours - theirs) <= SAME_BATCH * max(ours, theirs)


def _batch_note(treatment: Arm, reference: Arm, ours: float | None, theirs: float | None) -> list[str]:
    if ours is None or theirs is None or _same_batch(ours, theirs):
        return []
    return [
        f"{UNEQUAL_BATCHES}: {treatment.name} makes {theirs / ours:.3g} times as many updates of the same samples as "
        f"{reference.name} ({ours:.3g} and {theirs:.3g} samples an update)"
    ]


def _first_replicates(study: Study, arm: str) -> dict[int, StudyRun]:
    """The run of every seed that takes part in tests; further replicates are for the share of the schedule only."""
    return {run.seed: run for run in study.of("test", arm) if run.replicate == 0 and run.seed is not None}


def _comparison(
    study: Study,
    group: Group,
    name: str,
    against: str,
    left_out: list[LeftOut],
) -> Comparison | None:
    treatment, reference = study.arm(name), study.arm(against)
    ours, theirs = _first_replicates(study, name), _first_replicates(study, against)
    title = f"{treatment.algorithm} vs {reference.algorithm}, {group.name}"
    if treatment.algorithm == reference.algorithm or _shares_algorithm(study, group, treatment):
        title = f"{treatment.name} vs {reference.name}, {group.name}"
    both = sorted(set(ours) & set(theirs))
    lost = {seed: [run.name for run in (ours[seed], theirs[seed]) if not run.usable] for seed in both}
    lost = {seed: names for seed, names in lost.items() if names}
    pairs = tuple(Pair(seed, ours[seed], theirs[seed]) for seed in both if seed not in lost)
    notes = []
    if lost:
        notes.append(f"{len(lost)} pair{'s' * (len(lost) != 1)} left out (seed {', '.join(map(str, lost))})")
    for seed, names in lost.items():
        left_out.append(LeftOut(f"seed {seed}, {title}", f"no pair, because no result came of {', '.join(names)}"))
    unpaired = sorted(set(ours) ^ set(theirs))
    if unpaired:
        listed = ", ".join(map(str, unpaired))
        notes.append(f"seed {listed} only in one of the two arms")
        left_out.append(LeftOut(title, f"seed {listed} has a run of only one of the two arms and is in no pair"))
    counted = [run for pair in pairs for run in (pair.treatment, pair.reference)]
    told = {run.run.evaluation_set for run in counted if run.run is not None}
    if len(told) > 1:
        listed = ", ".join(sorted("unknown" if one is None else one for one in told))
        left_out.append(LeftOut(title, f"refused: its runs were evaluated on different data or masks ({listed})"))
        return None
    for arm, side in ((treatment, "treatment"), (reference, "reference")):
        diverged = sum(getattr(pair, side).diverged for pair in pairs)
        if diverged:
            notes.append(f"{arm.algorithm}: diverged {diverged}/{len(pairs)}")
    sizes = [samples_per_update(getattr(pair, side) for pair in pairs) for side in ("treatment", "reference")]
    notes += _batch_note(treatment, reference, *sizes)
    if any(run.run is not None and run.run.oversubscribed for run in counted):
        notes.append(OVERSUBSCRIBED)
    if any(run.run is not None and run.run.timed_in_parts for run in counted):
        notes.append(RESUMED)
    marks = {run.run.summary.get("from_scratch") for run in counted if run.run is not None}
    if True in marks:
        notes.append(FROM_SCRATCH)
        if False in marks:
            notes.append("some runs start from random weights and others do not")
    return Comparison(
        title, group, treatment, reference, pairs, tuple(notes), declared=group.reference in study.targets
    )


def _shares_algorithm(study: Study, group: Group, arm: Arm) -> bool:
    return sum(study.arm(name).algorithm == arm.algorithm for name in group.arms) > 1
