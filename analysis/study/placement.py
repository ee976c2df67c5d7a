"""Whether every run is what its place in the study says. What the runs say goes before what the plan says of them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from analysis.study.run import Run
from analysis.study.types import MEASURED, Arm, Aside, StudyRun
from asyncsgd.study.arms import resolve

_OF_THE_MACHINE = frozenset(("model", "cache_dir", "run_dir", "runs_dir", "overwrite"))
"""Settings that say where something lies: the base model that a sweep makes has another path in every copy of it."""


def with_replicates(runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]) -> list[StudyRun]:
    """The runs, one for every place in the study: a second test run of a seed is a replicate of the first by name."""
    by_place: dict[tuple[Any, ...], list[StudyRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.name):
        by_place[run.stage, run.arm, run.seed, run.replicate, run.trial, run.finetune_seed].append(run)
    kept = []
    for first, *others in by_place.values():
        kept.append(first)
        if others and first.stage == "test" and first.seed is not None:
            listed = ", ".join(run.name for run in (first, *others))
            problems.append(
                f"duplicate runs: {len(others) + 1} runs of {first.arm} have seed {first.seed} ({listed}): the first "
                "by name is in the tests, the others are replicates"
            )
            kept += [dataclasses.replace(run, replicate=number) for number, run in enumerate(others, 1)]
        else:
            aside += [Aside(run.name, f"duplicate of {first.name}", run) for run in others]
    return kept


def in_their_place(
    arms: Sequence[Arm], runs: Sequence[StudyRun], aside: list[Aside], problems: list[str]
) -> list[StudyRun]:
    """The runs that are what their place in the study says; of others the place stays, without a run."""
    by_name = {arm.name: arm for arm in arms}
    digests = {run.name: run.run.summary.get("parameters_sha256") for run in runs if run.run is not None}
    kept = []
    for run in runs:
        differing = "" if run.run is None else _differing(run, by_name.get(run.arm), digests.get(run.parent or ""))
        if differing:
            reason = f"its folder holds another run: {differing}"
            problems.append(f"{run.name}: {reason}; it is set aside")
            aside.append(Aside(run.name, reason, run))
            run = dataclasses.replace(run, run=None, misplaced=reason)
        kept.append(run)
    return kept


def _differing(run: StudyRun, arm: Arm | None, parent_sha256: object) -> str:
    """The first setting in which a run is not what its place says; empty where it is. What it does not record is not
    held against it.
    """
    assert run.run is not None
    recorded, expected = run.run.settings, {"seed": run.seed} | ({} if arm is None else _expected(run, arm))
    if run.stage == "finetune":
        parent = run.run.summary.get("parent") or {}
        recorded = {
            "seed": run.run.summary.get("seed"),
            "parameters_sha256 of its start": parent.get("parameters_sha256"),
        }
        expected = {"seed": run.finetune_seed, "parameters_sha256 of its start": parent_sha256}
    for key, value in expected.items():
        if key not in _OF_THE_MACHINE and not _same(recorded.get(key), value):
            return f"{key} {recorded[key]}, not {value}"
    return ""


def _expected(run: StudyRun, arm: Arm) -> dict[str, Any]:
    """The settings that the plan gives a run."""
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


def copies(runs: Sequence[StudyRun]) -> list[str]:
    """A line for every test run that ended with the parameters of another seed of its arm: a seed decides which samples
    come in which order and what of them is masked, so one of the two is a copy.
    """
    first: dict[tuple[str, str], StudyRun] = {}
    told = []
    for run in sorted(runs, key=lambda run: run.name):
        if (digest := _trained_sha256(run)) is not None:
            other = first.setdefault((run.arm, digest), run)
            if other.seed != run.seed:
                told.append(f"{run.name}: a copy of {other.name}: it has another seed and the same parameters")
    return told


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
        batch_size=fact("batch_size", lambda run: run.summary.get("batch_size"), arm.settings.get("batch_size")),
    )
