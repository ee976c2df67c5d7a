"""What the event logs of runs add to the tables: how late their gradients were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd

from asyncsgd.records.events import EVENTS, read_events


def delays(path: Path) -> Counter[int]:
    """Delay in updates -> how many gradients of a run were applied with it."""
    counts: Counter[int] = Counter()
    try:
        for record in read_events(path / EVENTS):
            counts.update(use[1] for use in record.get("uses") or ())
    except (OSError, ValueError):  # torn after what was read of it
        pass
    return counts


def delays_of(runs: pd.DataFrame) -> dict[str, Counter[int]]:
    """The same over all runs of each arm; without arms that have none above 0."""
    found: dict[str, Counter[int]] = {}
    for run in runs.itertuples():
        found.setdefault(run.arm, Counter()).update(delays(run.path))
    return {arm: counts for arm, counts in found.items() if any(counts)}
