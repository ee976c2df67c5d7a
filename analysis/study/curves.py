"""The loss curve of a run."""

from __future__ import annotations

from typing import Literal

import numpy

from analysis.curves import Curve
from analysis.study.run import Run

Column = Literal["train_seconds", "total_samples"]


def curve_of(run: Run, column: Column) -> Curve:
    """The finite evaluations of a run, positions strictly increasing.

    Of several evaluations at one position (nothing arrived between them) the last is taken.
    """
    x = run.evaluations[column].to_numpy(dtype=float, na_value=numpy.nan)
    y = run.evaluations["loss"].to_numpy(dtype=float, na_value=numpy.nan)
    known = numpy.isfinite(x) & numpy.isfinite(y)
    x, first = numpy.unique(x[known][::-1], return_index=True)
    return x, y[known][::-1][first]
