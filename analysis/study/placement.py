"""Whether every run is what its place in the study says: misplaced runs, duplicates, copies, and equal arms.

What the runs say goes before what the plan says of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from analysis.study.plan import count_or_none
from analysis.study.run import Run
from analysis.study.types import MEASURED, VIRTUAL, Arm, Aside, StudyRun
from asyncsgd.study.arms import resolve

_ARM = re.compile(r"[^-]+-w(?P<workers>\d+)(?:-.*?)??(?P<virtual>-virtual)?")
_OF_THE_MACHINE = frozenset(("model", "cache_dir", "run_dir", "runs_dir", "overwrite"))
"""Settings that say where something lies: the base model that a sweep makes has another path in every copy of it."""
_IN_THE_SUMMARY = {
    "seed": "seed",
    "mode": "mode",
    "nproc": "num_workers",
    "clock": "clock",
    "speeds": "speeds",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "learning_rate": "learning_rate",
}
"""Settings that a summary records as they are, or fine-tuning of its parent, by its own name for them."""


def without_duplicates(
    runs: Sequence[StudyRun], aside: list[Aside], problems: list[str], *, replicates: bool
) -> list[StudyRun]:
    """One run for every place in the study. Without a plan a second run of a seed is a replicate of the first."""
    by_place: dict[tuple[Any, ...], list[StudyRun]] = defaultdict(list)
    for run in runs:
        by_place[run.stage, run.arm, run.seed, run.replicate, run.trial, run.finetune_seed].append(run)
    kept = []
    for group in by_place.values():
        group.sort(key=lambda run: run.name)
        if len(group) == 1:
            kept += group
            continue
        first = group[0]
        what = f"{len(group)} runs of {first.arm} have seed {first.seed}"
        if first.finetune_seed is not None:
            what += f" and fine-tuning seed {first.finetune_seed}"
        listed = ", ".join(run.name for run in group)
        if replicates and first.stage == "test" and first.seed is not None:
            problems.append(
                f"duplicate runs: {what} ({listed}): the first by name is in the tests, the others are replicates"
            )
            kept += [dataclasses.replace(run, replicate=number) for number, run in enumerate(group)]
            continue
        problems.append(f"duplicate runs: {what} ({listed}); the first by name is taken")
        kept.append(first)
        aside += [Aside(run.name, f"duplicate of {first.name}", run) for run in group[1:]]
    return kept


def in_their_place(
    arms: Sequence[Arm], runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]
) -> list[StudyRun]:
    """The runs that are what their place in the study says; of others the place stays, without a run."""
    by_name = {arm.name: arm for arm in arms}
    digests = {run.name: run.run.summary.get("parameters_sha256") for run in runs if run.run is not None}
    kept = []
    for run in runs:
        differing = [] if run.run is None else _differing(run, by_name.get(run.arm), digests.get(run.parent or ""))
        if differing:
            run = _set_aside(run, f"its folder holds another run: {', '.join(differing)}", aside, problems)
        kept.append(run)
    return kept


def _set_aside(run: StudyRun, reason: str, aside: list[Aside], problems: list[str]) -> StudyRun:
    """The place of `run`, without it."""
    problems.append(f"{run.name}: {reason}; it is set aside")
    aside.append(Aside(run.name, reason, run))
    return dataclasses.replace(run, run=None, misplaced=reason)


def _differing(run: StudyRun, arm: Arm | None, parent_sha256: object) -> list[str]:
    """What a run records of itself that its place in the study does not say; what it does not record is not held
    against it.
    """
    assert run.run is not None
    summary, settings = run.run.summary, run.run.settings
    expected = {"seed": run.seed} | ({} if arm is None else _expected(run, arm))
    if run.stage != "finetune":
        told = [(key, settings.get(key), value) for key, value in expected.items() if key not in _OF_THE_MACHINE]
        told += _recorded(summary, expected)
    else:
        told = [("seed", summary.get("seed"), run.finetune_seed)]
        parent = summary.get("parent")
        if isinstance(parent, Mapping) and run.parent is None:
            told.append(("start", f"run {parent.get('run')}", "the base model"))
        elif isinstance(parent, Mapping):
            told += [(f"{key} of its pretraining", here, there) for key, here, there in _recorded(parent, expected)]
            digests = (parent.get("parameters_sha256"), parent_sha256)
            here, there = (None if digest is None else str(digest)[:16] for digest in digests)
            told.append(("parameters_sha256 of its pretraining", here, there))
    differing = {what: f"{what} {here}, not {there}" for what, here, there in told if not _same(here, there)}
    return list(differing.values())


def _recorded(record: Mapping[str, Any], expected: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """(setting, what the summary of a pretraining run or of what came after it says, what is expected)."""
    told: list[tuple[str, object, object]] = [
        (key, record.get(name), expected[key]) for key, name in _IN_THE_SUMMARY.items() if key in expected
    ]
    if isinstance(rule := expected.get("rule"), str) and record.get("rule") is not None:
        # it has all parameters of the rule, a config those that are not its defaults
        here, there = (str(one).partition(":")[0].casefold() for one in (record["rule"], rule))
        told.append(("rule", here, there))
    return told


def _expected(run: StudyRun, arm: Arm) -> dict[str, Any]:
    """The settings that the plan gives a run, else those that the sweep's names of folders tell."""
    if not arm.settings:
        named = _ARM.fullmatch(arm.name)
        if named is None:
            return {}
        return {"nproc": int(named["workers"])} | ({"clock": VIRTUAL} if named["virtual"] else {})
    tuned: Mapping[str, Any] = {}
    if run.stage == "tuning":
        tuned = next((trial.settings for trial in arm.trials if trial.number == run.trial), {})
    elif arm.chosen is not None:
        tuned = arm.chosen
    return resolve({**arm.settings, **tuned})


def _same(here: object, there: object) -> bool:
    """Whether a recorded value is the expected one; one that nobody recorded, or expects, is."""
    if here is None or there is None or here == there:
        return True
    try:
        return float(str(here)) == float(str(there))
    except ValueError:
        return str(here) == str(there)


def without_copies(runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]) -> list[StudyRun]:
    """The runs without test runs that ended with the parameters of another seed of their arm: a seed decides which
    samples come in which order and what of them is masked, so one of the two is a copy.
    """
    first: dict[tuple[str, str], StudyRun] = {}
    kept = {id(run): run for run in runs}
    for run in sorted(runs, key=lambda run: run.name):
        digest = _trained_sha256(run)
        if digest is None:
            continue
        other = first.setdefault((run.arm, digest), run)
        if other.seed != run.seed and None not in (other.seed, run.seed):
            reason = (
                f"a copy of {other.name}: it has another seed, and ended with the same parameters "
                f"(parameters_sha256 {digest[:16]})"
            )
            kept[id(run)] = _set_aside(run, reason, aside, problems)
    return list(kept.values())


def equal_arms(arms: Sequence[Arm], runs: Sequence[StudyRun]) -> list[str]:
    """A line for every two arms with test runs that ended with the same parameters, where nothing says they should.

    It may be right: a quorum of 1 is asynchronous, and so is a threshold that no delay reaches.
    """
    by_name = {arm.name: arm for arm in arms}
    by_digest: dict[str, list[StudyRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        if (digest := _trained_sha256(run)) is not None:
            by_digest[digest].append(run)
    equal: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for same in by_digest.values():
        for place, one in enumerate(same):
            for other in same[place + 1 :]:
                alike = one.seed == other.seed and _alike(by_name[one.arm], by_name[other.arm])
                if one.arm != other.arm and not alike:
                    equal[one.arm, other.arm].append((one.name, other.name))
    return [
        f"{pairs[0][0]} and {pairs[0][1]} ended with the same parameters"
        + f", like {len(pairs) - 1} more pairs of these arms" * (len(pairs) > 1)
        + ": either both arms do the same, or one holds copies of the other's runs"
        for pairs in equal.values()
    ]


def _alike(one: Arm, other: Arm) -> bool:
    """Whether two arms may well take the same steps: one worker waits for nobody, and the clock and the speeds of the
    workers change no step of a synchronous algorithm, nor of another one where the order stays.
    """
    if one.num_workers == 1 and other.num_workers == 1:
        return True
    free = ("mode", "rule", "clock", "speeds", "network")
    ours, theirs = (
        dataclasses.replace(
            arm,
            name="",
            clock="",
            speeds=None,
            settings={key: value for key, value in arm.settings.items() if key not in free},
            trials=(),
        )
        for arm in (one, other)
    )
    return ours == theirs


def _trained_sha256(run: StudyRun) -> str | None:
    """The hash of the parameters of a test run that has changed them; None of one that diverged, as all NaN are equal,
    and of a closed-form problem, which may have no chance in it for a seed to decide.
    """
    if run.stage != "test" or run.run is None or not run.run.done or run.diverged:
        return None
    if run.run.summary.get("experiment") == "simulate":
        return None
    digest = run.run.summary.get("parameters_sha256")
    return digest if isinstance(digest, str) and run.run.summary.get("num_updates") != 0 else None


_Fact = TypeVar("_Fact")


def with_facts(arm: Arm, runs: Sequence[StudyRun], problems: list[str], *, planned: bool) -> Arm:
    """The arm with workers, clock, speeds and batch size as its runs say: a plan tells what was meant."""
    own = [run.run for run in runs if run.arm == arm.name and run.stage != "finetune" and run.run is not None]
    own = [run for run in own if run.summary.get("mode") is not None]

    def fact(what: str, of: Callable[[Run], _Fact | None], meant: _Fact | None) -> _Fact | None:
        told = Counter(value for value in map(of, own) if value is not None)
        if not told:
            return meant
        most = sorted(told, key=lambda value: (-told[value], str(value)))[0]
        if len(told) > 1:
            listed = ", ".join(f"{value} ({number} runs)" for value, number in sorted(told.items(), key=str))
            problems.append(f"{arm.name}: its runs differ in {what}: {listed}")
        elif planned and meant is not None and most != meant:
            problems.append(f"{arm.name}: plan.json says {what} {meant}, its runs say {most}; the runs are believed")
        return most

    clock = fact("clock", lambda run: run.summary.get("clock"), arm.clock if arm.settings or own else None)
    tested = [run.run for run in runs if run.arm == arm.name and run.stage == "test" and run.run is not None]
    for what, values in (
        ("mode", Counter(run.summary.get("mode") for run in tested)),
        ("rule", Counter(run.summary.get("rule") for run in tested if run.done)),
        ("learning_rate", Counter(run.learning_rate for run in tested)),
    ):
        values.pop(None, None)
        if len(values) > 1:
            listed = ", ".join(f"{value} ({number} runs)" for value, number in sorted(values.items(), key=str))
            problems.append(f"{arm.name}: its test runs differ in {what}: {listed}")
    return dataclasses.replace(
        arm,
        num_workers=fact("num_workers", lambda run: run.summary.get("num_workers"), arm.num_workers),
        clock=clock or MEASURED,
        speeds=fact("speeds", lambda run: run.summary.get("speeds") or run.settings.get("speeds"), arm.speeds),
        batch_size=fact(
            "batch_size", lambda run: run.summary.get("batch_size"), count_or_none(arm.settings.get("batch_size"))
        ),
    )
