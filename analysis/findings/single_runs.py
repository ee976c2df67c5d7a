"""Every single run of a study in a row, and the machines they ran on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.findings.groups import LeftOut
from analysis.study.types import Study, StudyRun
from asyncsgd.study.finetuning import SCORES


@dataclasses.dataclass(frozen=True)
class HardwareRow:
    """Table 4: one row per distinct environment."""

    num_runs: int
    arms: tuple[str, ...]
    """Whose runs were made there."""
    values: tuple[tuple[str, str], ...]
    """(what, value): cpu, cores, threads per worker, python, torch, ..., commit."""


@dataclasses.dataclass(frozen=True)
class RunRow:
    """One run folder (or planned run without one)."""

    name: str
    """Path relative to the study's folder: the link."""
    exists: bool
    arm: str
    stage: str
    seed: int | None
    replicate: int
    finetune_seed: int | None
    parent: str
    status: str
    """DONE, DIVERGED, FAILED, INTERRUPTED, UNFINISHED, UNREADABLE, MISSING."""
    loss: float | None
    score: float | None
    """Of `SCORES`, where it is a fine-tuning run."""
    train_seconds: float | None
    num_samples: int | None
    learning_rate: float | None
    clock: str
    from_scratch: bool | None
    oversubscribed: bool
    in_tests: bool
    remark: str
    """Why it is not in the tests, and what went wrong in it."""


def hardware_rows(study: Study) -> tuple[HardwareRow, ...]:
    """Table 4: the distinct environments of all runs; what differs by arm on purpose (workers) is not in them."""
    arms: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for run in study.runs:
        if run.run is not None and run.run.environment:
            arms[_environment(run.run.environment)].append(run.arm)
    ordered = sorted(arms, key=lambda values: (-len(arms[values]), values))
    return tuple(HardwareRow(len(arms[values]), tuple(sorted(set(arms[values]))), values) for values in ordered)


def _environment(content: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    names = {
        "cpu": "processor",
        "cores": "cores",
        "gpus": "GPUs",
        "torch_build": "torch build",
        "cpu_capability": "instructions used by torch",
        "threads_per_worker": "threads per worker",
        "device": "device",
        "platform": "platform",
        "python": "python",
        "commit": "commit",
    }
    values = [(label, _shown(content[key])) for key, label in names.items() if content.get(key) not in (None, [])]
    if content.get("modified"):
        values.append(("working tree", "modified"))
    versions = content.get("versions")
    if isinstance(versions, Mapping):
        values += [(str(name), str(version)) for name, version in sorted(versions.items())]
    return tuple(values)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def run_rows(study: Study, in_tests: frozenset[str], left_out: Sequence[LeftOut]) -> tuple[RunRow, ...]:
    """Every run, planned or found, with what became of it."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in left_out:
        reasons[item.name].append(item.reason)
    found = [_run_row(study, run, run.name in in_tests, reasons[run.name]) for run in study.runs]
    known = {row.name for row in found}
    for aside in study.set_aside:
        if aside.name not in known:
            run = aside.run or StudyRun(aside.name, "", "", None)
            found.append(_run_row(study, run, False, [*reasons[aside.name], aside.reason]))
    return tuple(found)


def _run_row(study: Study, run: StudyRun, in_tests: bool, reasons: Sequence[str]) -> RunRow:
    summary = {} if run.run is None else run.run.summary
    remarks = [*reasons, *[run.unusable_because] * bool(run.stage and run.unusable_because)]
    remarks += [] if run.run is None else run.run.problems
    arm = next((arm for arm in study.arms if arm.name == run.arm), None)
    exists = run.run is not None or not run.stage
    return RunRow(
        name=run.name,
        exists=exists,
        arm=run.arm,
        stage=run.stage,
        seed=run.seed,
        replicate=run.replicate,
        finetune_seed=run.finetune_seed,
        parent=run.parent or "",
        status=run.status if run.stage else "SET ASIDE",
        loss=summary.get("final_eval_loss"),
        score=next((run.run.metrics[name] for name in SCORES if name in run.run.metrics), None) if run.run else None,
        train_seconds=summary.get("train_seconds"),
        num_samples=summary.get("num_samples"),
        learning_rate=None if run.run is None else run.run.learning_rate,
        clock=str(summary.get("clock") or (arm.clock if arm is not None and run.stage != "finetune" else "")),
        from_scratch=summary.get("from_scratch"),
        oversubscribed=run.run is not None and run.run.oversubscribed,
        in_tests=in_tests,
        remark="; ".join(dict.fromkeys(remarks)),
    )
