"""A folder of runs as a study: three documented tables, and all that is made of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import judge
from analysis.questions import exploratory, groups
from analysis.read import read


class Study:
    """Runs, their curves, and the tests that were asked of them.

    `runs`, `curves` and `tests` are DataFrames; docs/tables.md says what every column is.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.runs, self.curves, self.plan = read(self.folder)

    @functools.cached_property
    def tests(self) -> pd.DataFrame:
        """A row for every question asked of pairs of runs, with its answer in a word."""
        return judge.judge(self.runs, self.curves, self.plan)

    @functools.cached_property
    def exploratory(self) -> str:
        """Why nothing of it can be called confirmed; empty where the registration stands."""
        return exploratory(self.runs, groups(self.runs, self.plan), self.plan)


def load(folder: Path | str) -> Study:
    """A sweep's folder, one with loose runs at any depth, or one run's.

    Raises:
        UsageError: if there is no run in it.
    """
    return Study(folder)


def compare(
    a: Sequence[float] | NDArray[np.float64],
    b: Sequence[float] | NDArray[np.float64],
    margin: float | None = None,
    *,
    lower_is_better: bool = True,
    alpha: float = 0.05,
) -> pd.Series:
    """The exact sign-flip test of paired numbers, and the equivalence test within ±`margin`: a row of `tests`.

    Args:
        a, b: one number a pair, in the same order; inf for a run that diverged (-inf of a score).
        margin: of equivalence, in their unit; None: it is not tested.
        lower_is_better: as of a loss.
        alpha: level of the word.

    Returns:
        A row with estimate (a - b), low, high, p, word, reason and the other columns of `Study.tests`.
    """
    ours, theirs = np.asarray(a, float), np.asarray(b, float)
    if ours.ndim != 1 or ours.shape != theirs.shape:
        raise ValueError(f"a and b need as many numbers as each other, got shapes {ours.shape} and {theirs.shape}")
    if np.isnan(ours).any() or np.isnan(theirs).any():
        raise ValueError("a and b must not hold nan; leave such a pair out of both")
    if margin is not None and not margin > 0:
        raise ValueError(f"margin must be above 0, got {margin}")
    row = dict.fromkeys(judge.TESTS, "") | {
        **{"treatment": "a", "reference": "b", "endpoint": "numbers", "family": "exploratory", "alpha": alpha},
        **{"n": len(ours), "seeds": list(range(len(ours))), "treatment_values": ours, "reference_values": theirs},
        **{"lower": lower_is_better, "margin": math.nan if margin is None else margin, "gained": math.nan},
        **{"target": math.nan, "budget": math.nan, "common": False, "reached": (0, 0), "later": (0, 0)},
        **{"nothing": "", "unlike": False, "notes": (), "caveats": ()},
    }
    return pd.Series(judge.answer([row])[0])[list(judge.TESTS)]
