"""What the records of a run add up to."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncsgd.records.events import SCORE, Checkpointed, Evaluation, Event, Fault, Membership, MemoryUsed, Parts, Record

PARTS = ("compute", "wait", "communicate", "apply", "evaluate", "checkpoint")
"""What time goes to. The first three are added up over workers, so N workers have N seconds of them in a second; the
server's `apply`, and `evaluate` and `checkpoint`, in which nobody trains, are seconds of the run. In synchronous runs
the exchange of gradients is a part of `compute`, in whose backward pass it happens."""

COUNTED = ("delays", "samples_of", "peak_bytes", "seconds")
"""The dictionaries of `Totals`; most have numbers for keys, which JSON does not."""


class Delays(collections.Counter[int]):
    """The delays of all applied gradients, as counts per delay."""

    def summary(self) -> dict[str, float | None]:
        """Their mean and maximum, in updates, and the smallest delays that at least 50 and 95 % of the gradients do not
        exceed; None where nothing was applied.

        >>> Delays([0, 0, 1, 7]).summary()
        {'mean': 2.0, 'p50': 0, 'p95': 7, 'max': 7}
        """
        if not self:
            return dict.fromkeys(("mean", "p50", "p95", "max"))
        delays = sorted(self)
        up_to = list(itertools.accumulate(self[delay] for delay in delays))
        total = up_to[-1]
        p50 = delays[bisect.bisect_left(up_to, 0.5 * total)]
        p95 = delays[bisect.bisect_left(up_to, 0.95 * total)]
        mean = sum(delay * count for delay, count in self.items()) / total
        return {"mean": mean, "p50": p50, "p95": p95, "max": delays[-1]}


class Totals:
    """The totals of a run's records; call it with each record, in order."""

    def __init__(self) -> None:
        self.num_updates = self.num_samples = self.num_samples_applied = 0
        self.train_seconds = 0.0
        self.delays = Delays()
        self.first_eval_loss: float | None = None
        self.last: Evaluation | None = None
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.peak_bytes: dict[int, tuple[int, int]] = {}
        """Of each worker's process: its resident set, and torch's memory on its GPU."""
        self.micro_batches = 1
        """The parts that a batch is computed in."""
        self.score_error: str | None = None
        """What was wrong with the first scores that could not be computed."""
        self.samples_of: dict[int, int] = {}
        """Of each dispatch that has arrived and is not applied yet."""

    def advance(
        self, version: int, num_samples: int, train_seconds: float, uses: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Take in how far the run has come, and the (dispatch, delay) of the gradients in a record's steps: of a leave,
        too, for which a round may have waited."""
        self.num_updates = max(self.num_updates, version)
        self.num_samples = max(self.num_samples, num_samples)
        self.train_seconds = max(self.train_seconds, train_seconds)
        for dispatch, delay in uses:
            self.delays[delay] += 1
            self.num_samples_applied += self.samples_of.pop(dispatch, 0)  # a later use applies no new samples

    def __call__(self, record: Record) -> None:
        if isinstance(record, Event):
            self.samples_of[record.dispatch] = record.num_samples
        if isinstance(record, Event | Evaluation | Membership):
            uses = () if isinstance(record, Evaluation) else record.uses
            self.advance(record.version, record.total_samples, record.train_seconds, uses)
        seconds = self.seconds
        if isinstance(record, Event):
            seconds["compute"] += record.compute_seconds
            seconds["wait"] += record.wait_seconds
            seconds["communicate"] += record.pull_seconds + record.push_seconds
            seconds["apply"] += record.apply_seconds
            for dispatch in record.drops:
                self.samples_of.pop(dispatch, None)
        elif isinstance(record, Evaluation):
            seconds["evaluate"] += record.eval_seconds
            self.last = record
            if self.first_eval_loss is None:
                self.first_eval_loss = record.loss
        elif isinstance(record, Fault) and record.kind == SCORE:
            self.score_error = self.score_error or record.message
        elif isinstance(record, Checkpointed):
            seconds["checkpoint"] += record.copy_seconds
        elif isinstance(record, Parts):
            self.micro_batches = record.micro_batches
        elif isinstance(record, MemoryUsed):
            for worker, resident, cuda in record.workers:
                before = self.peak_bytes.get(worker, (0, 0))  # larger where a worker has another process since
                self.peak_bytes[worker] = (max(resident, before[0]), max(cuda, before[1]))

    def state(self) -> dict[str, Any]:
        last = None if self.last is None else msgspec.structs.asdict(self.last)
        return {**vars(self), "last": last, **{name: sorted(getattr(self, name).items()) for name in COUNTED}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, as it was or as JSON has brought it back."""
        vars(self).update(state, **{name: dict(state[name]) for name in COUNTED})
        self.delays, self.last = Delays(self.delays), self.last and Evaluation.of(state["last"])

    def as_summary(self) -> dict[str, Any]:
        """The summary's fields that come from records; None where nothing was measured."""
        last = self.last
        return {
            "num_samples": self.num_samples,
            "num_updates": self.num_updates,
            "train_seconds": self.train_seconds,
            "eval_seconds": self.seconds["evaluate"],
            "first_eval_loss": self.first_eval_loss,
            "final_eval_loss": None if last is None else last.loss,
            "metrics": None if last is None else dict(last.metrics),
            "details": None if last is None else dict(last.details),
            "score_error": self.score_error,
            "eval_weight": None if last is None else last.weight,
            "samples_per_second": self.num_samples / self.train_seconds if self.train_seconds > 0 else None,
            "num_samples_applied": self.num_samples_applied,
            "delay": self.delays.summary(),
            "seconds": dict(self.seconds),
        }
