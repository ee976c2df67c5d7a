"""Comparisons: the complete pairs of a treatment and its reference, on the same seeds.

A pair is two runs of one seed, both with a result. A diverged run is a result. A failed or missing run is none, and its
pair is left out. The pairs of other arms stay, so that no arm touches the comparison of two others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from analysis.findings.groups import DEFAULT_REFERENCE, Group, LeftOut, reference_algorithm
from analysis.study.curves import crossings_of
from analysis.study.machines import hardware_of, placements_of, timing_notes
from analysis.study.types import MEASURED, Arm, Study, StudyRun
from asyncsgd.records.events import DONE

FROM_SCRATCH = "from scratch: not STILT"
"""The mark that runs from random weights carry everywhere."""
UNEQUAL_BATCHES = "unequal batches"
"""How the note begins that says how many more updates one arm makes of the same samples."""
SAME_BATCH = 0.01
"""Samples per update that differ by at most this share are equal: a last update of a run may have had fewer."""


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
    lost: tuple[str, ...] = ()
    """How many runs of either arm have no result, each a sentence: what is left was not chosen before looking."""
    no_speed: tuple[str, ...] = ()
    """Why measured seconds of its runs are no speed comparison, each a sentence; what rests on them is exploratory."""
    other_machines: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Seed -> the hardware of its two runs, where that is not the same: their seconds are not compared."""
    control: bool = False
    """Whether `reference` is the registered control arm, whose updates are made of as many samples as the treatment's,
    and not the reference of the group. Losses at equal samples are compared with it, and nothing else."""

    @property
    def runs(self) -> list[StudyRun]:
        return [run for pair in self.pairs for run in (pair.treatment, pair.reference)]

    @property
    def in_seconds(self) -> Comparison:
        """The same comparison with the pairs whose seconds may be compared."""
        return dataclasses.replace(
            self, pairs=tuple(pair for pair in self.pairs if pair.seed not in self.other_machines)
        )

    def times_to(self, target: float) -> list[float]:
        """Seconds until each of `runs` crosses the target, on looks that both runs of its pair had; inf for never."""
        return [found.at for pair in self.pairs for found in crossings_of((pair.treatment, pair.reference), target)]


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
    marks = {run.run.summary.get("from_scratch") for run in counted if run.run is not None}
    if True in marks:
        notes.append(FROM_SCRATCH)
        if False in marks:
            notes.append("some runs start from random weights and others do not")
    machines = _other_machines(treatment, reference, pairs) if group.clock == MEASURED else {}
    no_speed = timing_notes(run.run for run in counted if run.run is not None) if group.clock == MEASURED else []
    if machines and len(machines) < len(pairs):
        seeds = ", ".join(map(str, machines))
        no_speed.append(f"The runs of seed {seeds} were made on different hardware, so their seconds are not compared.")
    return Comparison(
        title,
        group,
        treatment,
        reference,
        pairs,
        tuple(notes),
        declared=group.reference in study.targets,
        lost=tuple(_lost_runs(treatment, ours)) + tuple(_lost_runs(reference, theirs)),
        no_speed=tuple(no_speed),
        other_machines=machines,
    )


def _lost_runs(arm: Arm, runs: Mapping[int, StudyRun]) -> Iterator[str]:
    """How many runs of an arm have no result, each status a sentence."""
    lost = Counter(run.status for run in runs.values() if not run.usable)
    for status, number in sorted(lost.items()):
        told = status if status != DONE else "DONE without a curve"
        yield f"{number} of {len(runs)} runs of {arm.name} {'is' if number == 1 else 'are'} {told}, and in no number."


def _other_machines(treatment: Arm, reference: Arm, pairs: Sequence[Pair]) -> dict[int, str]:
    """By seed, why the seconds of its two runs may not be compared.

    They may be on the same hardware with the same build of torch. Threads and devices are a part of an arm.
    """
    mixed = []
    for arm, side in ((treatment, "treatment"), (reference, "reference")):
        runs = [getattr(pair, side).run for pair in pairs]
        placements = placements_of(run for run in runs if run is not None)
        if len(placements) > 1:
            mixed.append(f"runs of {arm.name} had {' and '.join(sorted(placements))}")
    if mixed:
        return dict.fromkeys((pair.seed for pair in pairs), "; ".join(mixed))
    found = {}
    for pair in pairs:
        assert pair.treatment.run is not None
        assert pair.reference.run is not None
        ours, theirs = hardware_of(pair.treatment.run), hardware_of(pair.reference.run)
        if ours != theirs:
            shown = [
                f"{arm.name} ran on {'a machine that it does not name' if told is None else ', '.join(told)}"
                for arm, told in ((treatment, ours), (reference, theirs))
            ]
            found[pair.seed] = " and ".join(shown)
    return found


def _shares_algorithm(study: Study, group: Group, arm: Arm) -> bool:
    return sum(study.arm(name).algorithm == arm.algorithm for name in group.arms) > 1
