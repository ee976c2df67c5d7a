"""``python -m analysis.tasks STUDY STUDY STUDY ...``: several tasks or workloads at once.

    python -m analysis.tasks runs/study_a runs/study_b runs/study_c

takes every folder of a sweep for a task and compares the algorithms of their registered primary conditions. A score is
the share of the reference's mean improvement that a run has made at equal samples: 1 is the reference, 0 no learning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy

from analysis.commands import carried_out
from analysis.findings.tasks import Task, read_task
from analysis.statistics.across_tasks import (
    MINIMUM_TASKS,
    iqm,
    mean_improvement,
    performance_score,
    score_distribution,
    stratified_bootstrap,
)
from analysis.statistics.intervals import Interval, Refused
from asyncsgd.errors import UsageError

THRESHOLDS = (0.5, 0.8, 0.9, 1.0, 1.1)
"""Scores above which the share of runs is printed."""


def lines(tasks: Sequence[Task], generator: numpy.random.Generator) -> list[str]:
    """S6 and S7 as text.

    Raises:
        UsageError: below 3 tasks, or where their clocks, references or algorithms do not go together.
    """
    if len(tasks) < MINIMUM_TASKS:
        raise UsageError(f"{len(tasks)} tasks; a statement over tasks needs {MINIMUM_TASKS} studies or more")
    if len({task.clock for task in tasks}) > 1 or len({task.reference for task in tasks}) > 1:
        got = ", ".join(f"{task.name} ({task.reference}, {task.clock} clock)" for task in tasks)
        raise UsageError(f"studies of one clock and one reference go together, got {got}")
    reference = tasks[0].reference
    modes = [mode for mode in tasks[0].scores if all(mode in task.scores for task in tasks)]
    num_seeds = min(len(task.scores[reference]) for task in tasks)
    tables = {mode: numpy.array([task.scores[mode][:num_seeds] for task in tasks]).T for mode in modes}
    told = [
        f"{len(tasks)} tasks ({', '.join(task.name for task in tasks)}), {num_seeds} seeds each, {tasks[0].clock} clock"
    ]
    if any(len(task.scores[reference]) > num_seeds for task in tasks):
        told.append(f"of tasks with more seeds the first {num_seeds} are taken")
    told.append(f"score: share of the improvement of {reference} at equal samples")
    above = " ".join(f"{f'> {threshold:g}':>6}" for threshold in THRESHOLDS)
    told.append(f"{'':14} {'interquartile mean':26} {f'P(better than {reference})':26} share of runs {above}")
    for mode, table in tables.items():
        middle = stratified_bootstrap([table], iqm, generator)
        better = stratified_bootstrap([table, tables[reference]], mean_improvement, generator)
        shares = " ".join(f"{100 * share:>4.0f} %" for share in score_distribution(table, THRESHOLDS))
        own = "-" if mode == reference else _text(better)
        told.append(f"{mode:14} {_text(middle):26} {own:26} {'':13} {shares}")
    refused = stratified_bootstrap([tables[reference]], iqm, generator)
    if isinstance(refused, Refused):
        told.append(f"no interval: {refused.reason}")
    if all(mode in task.median_times for task in tasks for mode in modes):
        scores = performance_score([[task.median_times[mode] for mode in modes] for task in tasks])
        if isinstance(scores, tuple):
            shown = ", ".join(f"{mode} {score:.3f}" for mode, score in zip(modes, scores, strict=True))
            told.append(f"AlgoPerf score of median times to the target (1: fastest everywhere): {shown}")
    else:
        told.append("no AlgoPerf score: not every study has a target")
    return told


def _text(found: Interval | Refused) -> str:
    if isinstance(found, Refused):
        return "-"
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _check_different(folders: Sequence[Path]) -> None:
    """Refuse a folder that is given twice, also by another path: one study would count as several tasks."""
    different: dict[Path, Path] = {}
    firsts = [different.setdefault(folder.resolve(), folder) for folder in folders]
    twice = [(folder, first) for folder, first in zip(folders, firsts, strict=True) if folder is not first]
    if twice:
        folder, first = twice[0]
        names = [*map(str, different.values()), *["ANOTHER_STUDY"] * (MINIMUM_TASKS - len(different))]
        raise UsageError(
            f"{folder} is the same study as {first} and counts once; type: python -m analysis.tasks {' '.join(names)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code (2 for what the user has to change)."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tasks",
        description="Compare algorithms over several studies, each taken for a task.",
        allow_abbrev=False,
    )
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="folders of sweeps, 3 or more")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    flags = parser.parse_args(arguments)

    def command() -> None:
        _check_different(flags.studies)
        for line in lines([read_task(folder) for folder in flags.studies], numpy.random.default_rng(flags.seed)):
            print(line)

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
