"""From the records of a run to the points of a curve. Standard library only."""

from __future__ import annotations

import math
import statistics

from asyncsgd.records.events import Evaluation, Event, Membership, MemoryUsed, Record
from asyncsgd.records.totals import Delays
from asyncsgd.records.trackers.base import Point

FEWEST_ARRIVALS = 10
"""In one point, so that its percentiles say something."""

POINTS_A_RUN = 200
"""A point holds this part of the arrivals so far, so a run of any length has about as many."""


class Points:
    """Call it with each record, in order; it returns the points that are complete.

    Arrivals are put together: a point of n arrivals holds their mean loss, weighted by loss terms, the percentiles of
    the delays of the gradients that were applied, the mean norm of the directions of the steps, and the samples per
    second between the first and the last. n is 10 at first, and one in 200 of all arrivals later. An evaluation is a
    point of its own, and so is the memory of the workers, in GiB.
    """

    def __init__(self) -> None:
        self._num_arrivals = 0
        self._seconds_before, self._samples_before = 0.0, 0
        self._begin()

    def _begin(self) -> None:
        self._last: Event | None = None
        self._arrivals, self._weight, self._loss = 0, 0.0, 0.0
        self._delays = Delays()
        self._norms: list[float] = []

    def __call__(self, record: Record) -> list[Point]:
        if isinstance(record, Event | Membership):
            for _, delay in record.uses:
                self._delays.add(delay)
        if isinstance(record, Event):
            self._last = record
            self._num_arrivals += 1
            self._arrivals += 1
            self._weight += record.weight
            self._loss += record.weight * record.loss
            if record.gradient_norm is not None:
                self._norms.append(record.gradient_norm)
            return self.rest() if self._arrivals >= max(FEWEST_ARRIVALS, self._num_arrivals // POINTS_A_RUN) else []
        if isinstance(record, Evaluation):
            values = {"eval/loss": record.loss} | {f"eval/{name}": value for name, value in record.metrics.items()}
            return [*self.rest(), _point(record.total_samples, record.train_seconds, values)]
        if isinstance(record, MemoryUsed):
            values = {}
            for worker, resident, cuda in record.workers:
                values[f"memory/worker{worker}_gib"] = resident / 2**30
                if cuda:
                    values[f"memory/worker{worker}_gpu_gib"] = cuda / 2**30
            return [_point(record.total_samples, record.train_seconds, values)] if values else []
        return []

    def rest(self) -> list[Point]:
        """The arrivals since the last point, as a point; nothing where there are none."""
        last = self._last
        if last is None:
            return []
        seconds = last.train_seconds - self._seconds_before
        values: dict[str, float | None] = {
            "train/loss": self._loss / self._weight if self._weight else None,
            "train/learning_rate": last.learning_rate,
            "train/gradient_norm": statistics.fmean(self._norms) if self._norms else None,
            "train/samples_per_second": (last.total_samples - self._samples_before) / seconds if seconds > 0 else None,
            **{f"delay/{name}": value for name, value in self._delays.summary().items() if name != "mean"},
        }
        self._seconds_before, self._samples_before = last.train_seconds, last.total_samples
        self._begin()
        return [_point(last.total_samples, last.train_seconds, values)]


def _point(num_samples: int, train_seconds: float, values: dict[str, float | None] | dict[str, float]) -> Point:
    finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return Point(num_samples, train_seconds, finite | {"train_seconds": train_seconds})
