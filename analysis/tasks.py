"""``python -m analysis tasks STUDY STUDY STUDY ...``: several tasks or workloads at once.

    python -m analysis tasks runs/study_a runs/study_b runs/study_c --figures pictures

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
from analysis.findings.tasks import AcrossTasks, across, read_task
from analysis.statistics.across_tasks import MINIMUM_TASKS, score_distribution
from analysis.statistics.intervals import Interval, Refused
from asyncsgd.errors import UsageError

THRESHOLDS = (0.5, 0.8, 0.9, 1.0, 1.1)
"""Scores above which the share of runs is printed."""


def lines(found: AcrossTasks) -> list[str]:
    """S6 and S7 as text."""
    told = [f"{len(found.tasks)} tasks ({', '.join(found.tasks)}), {found.num_seeds} seeds each, {found.clock} clock"]
    if found.some_have_more:
        told.append(f"of tasks with more seeds the first {found.num_seeds} are taken")
    told.append(f"score: share of the improvement of {found.reference} at equal samples")
    above = " ".join(f"{f'> {threshold:g}':>6}" for threshold in THRESHOLDS)
    told.append(f"{'':14} {'interquartile mean':26} {f'P(better than {found.reference})':26} share of runs {above}")
    for row in found.algorithms:
        shares = " ".join(f"{100 * share:>4.0f} %" for share in score_distribution(row.scores, THRESHOLDS))
        told.append(f"{row.algorithm:14} {_text(row.middle):26} {_text(row.better):26} {'':13} {shares}")
    if found.refused:
        told.append(f"no interval: {found.refused}")
    else:
        told.append("P: all runs of one against all of the other, unpaired; interval: paired bootstrap of whole seeds")
    if found.time_scores:
        shown = ", ".join(f"{algorithm} {score:.3f}" for algorithm, score in found.time_scores.items())
        told.append(f"AlgoPerf score of median times to the target (1: fastest everywhere): {shown}")
    else:
        told.append("no AlgoPerf score: not every study has a target")
    return told


def _text(found: Interval | Refused | None) -> str:
    return f"{found:.3f}" if isinstance(found, Interval) else "-"


def _check_different(folders: Sequence[Path]) -> None:
    """Refuse a folder that is given twice, also by another path: one study would count as several tasks."""
    different: dict[Path, Path] = {}
    firsts = [different.setdefault(folder.resolve(), folder) for folder in folders]
    twice = [(folder, first) for folder, first in zip(folders, firsts, strict=True) if folder is not first]
    if twice:
        folder, first = twice[0]
        names = [*map(str, different.values()), *["ANOTHER_STUDY"] * (MINIMUM_TASKS - len(different))]
        raise UsageError(
            f"{folder} is the same study as {first} and counts once; type: python -m analysis tasks {' '.join(names)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code (2 for what the user has to change)."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis tasks",
        description="Compare algorithms over several studies, each taken for a task.",
        allow_abbrev=False,
    )
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="folders of sweeps, 3 or more")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also write the pictures there as PNG and SVG")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    flags = parser.parse_args(arguments)

    def command() -> None:
        _check_different(flags.studies)
        found = across([read_task(folder) for folder in flags.studies], numpy.random.default_rng(flags.seed))
        print("\n".join(lines(found)), flush=True)
        if flags.figures is not None:
            from analysis.report.figures.profiles import save_profiles  # it imports matplotlib, which takes a second

            print(*save_profiles(found, flags.figures), sep="\n")

    return carried_out(command)


if __name__ == "__main__":
    sys.exit(main())
