"""What the evaluations of runs say: the curve of a run, its end, its time to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy

from analysis.statistics.crossings import NEVER, Crossing, LossCurve, crossing, on_common_looks
from analysis.statistics.intervals import short
from analysis.study.run import Run
from analysis.study.types import StudyRun

Column = Literal["train_seconds", "total_samples"]


def curve_of(run: Run, column: Column) -> LossCurve:
    """The finite evaluations of a run, positions strictly increasing.

    Of several evaluations at one position (nothing arrived between them) the last is taken.
    """
    x = run.evaluations[column].to_numpy(dtype=float, na_value=numpy.nan)
    y = run.evaluations["loss"].to_numpy(dtype=float, na_value=numpy.nan)
    known = numpy.isfinite(x) & numpy.isfinite(y)
    x, first = numpy.unique(x[known][::-1], return_index=True)
    return x, y[known][::-1][first]


def end_of(run: Run, column: Column) -> float:
    """The position of a run's last finite evaluation; nan if it has none."""
    x, _ = curve_of(run, column)
    return float(x[-1]) if len(x) else math.nan


def _seconds_of(run: Run) -> float:
    """How long a run was watched: until its last evaluation, finite or not; nan if it has none."""
    seconds = run.evaluations["train_seconds"].to_numpy(dtype=float, na_value=numpy.nan)
    return float(numpy.nanmax(seconds)) if numpy.isfinite(seconds).any() else math.nan


def common_curves(runs: Sequence[StudyRun], column: Column) -> list[LossCurve | None]:
    """The curves of `runs`, which are compared with one another, `on_common_looks`; one run alone keeps its own looks.

    A run that diverged, or has no evaluation, has no curve here and takes no look from the others.
    """
    own = [None if run.run is None or run.diverged else curve_of(run.run, column) for run in runs]
    known = iter(on_common_looks([curve for curve in own if curve is not None and len(curve[0])]))
    return [None if curve is None or not len(curve[0]) else next(known) for curve in own]


def crossings_of(runs: Sequence[StudyRun], target: float, column: Column = "train_seconds") -> list[Crossing]:
    """When each of `runs` crosses the target, on their `common_curves`; never for a run without one."""
    return [NEVER if curve is None else crossing(*curve, target) for curve in common_curves(runs, column)]


def common_seconds(runs: Sequence[StudyRun], times: Sequence[float]) -> float | None:
    """The budget in seconds that all runs had, where all that missed the target lasted so long; else None."""
    there = [run.run for run in runs if run.run is not None]
    budgets = {run.settings.get("seconds") for run in there}
    budget = budgets.pop() if len(budgets) == 1 else None
    if not isinstance(budget, int | float):
        return None
    return float(budget) if all(_seconds_of(run) >= budget for run in missed(runs, times)) else None


def spacing_at(run: Run, column: Column, position: float) -> float:
    """The gap between the evaluations around `position`; 0 where one was made there."""
    x, _ = curve_of(run, column)
    right = int(numpy.searchsorted(x, position))
    return 0.0 if right in (0, len(x)) or x[right] == position else float(x[right] - x[right - 1])


def missed(runs: Sequence[StudyRun], times: Sequence[float]) -> list[Run]:
    """The runs that came to their end without reaching the target, so that their times are known up to that end only.

    Args:
        times: to the target, of every run; inf for never.
    """
    return [
        run.run
        for run, time in zip(runs, times, strict=True)
        if run.run is not None and not run.diverged and math.isinf(time)
    ]


def budget_of(runs: Sequence[StudyRun], times: Sequence[float]) -> tuple[float | None, str]:
    """The common budget of restricted times, and why it is that.

    It is the budget in seconds that all runs were given. Where they were budgeted otherwise, a run that came to its end
    without reaching the target is known to need longer than it lasted, and no more: beyond the shortest of these
    nothing can be compared. Without such a run, times are known up to the longest run.

    Args:
        times: to the target, of every run; inf for never.
    """
    unit = "virtual s" if any(run.run is not None and run.run.virtual for run in runs) else "s"
    if (common := common_seconds(runs, times)) is not None:
        return common, f"every run had {short(common)} {unit}"
    ends = [_seconds_of(run.run) for run in runs if run.run is not None]
    ends = [end for end in ends if end > 0]
    if not ends:
        return None, "no run has a time"
    stopped = [end for run in missed(runs, times) if (end := _seconds_of(run)) > 0]
    if stopped:
        shortest = min(stopped)
        return shortest, (
            f"restricted to {short(shortest)} {unit}, the shortest of {len(stopped)} "
            f"run{'s' * (len(stopped) != 1)} that ended without reaching the target"
        )
    longest = max(ends)
    return longest, f"restricted to {short(longest)} {unit}, the longest run; every run that did not diverge got there"


def improvement_of(runs: Sequence[StudyRun]) -> tuple[float, float] | None:
    """Mean first loss and mean best loss of the finished runs; None where there are none, or nothing improved."""
    finished = [run.run for run in runs if run.run is not None and run.usable and not run.diverged]
    curves = [curve_of(run, "total_samples")[1] for run in finished]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return None
    first = math.fsum(float(curve[0]) for curve in curves) / len(curves)
    best = math.fsum(float(curve.min()) for curve in curves) / len(curves)
    return (first, best) if best < first else None
