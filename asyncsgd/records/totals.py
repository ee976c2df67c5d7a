"""What the records of a run add up to."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from asyncsgd.records.events import Checkpointed, Evaluation, Event, Membership, MemoryUsed, Parts, Record


class Delays:
    """The delays of all applied gradients, as counts per delay."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, delay: int) -> None:
        self._counts[delay] += 1

    def counts(self) -> dict[int, int]:
        """How many gradients had which delay; a copy."""
        return dict(self._counts)

    def load_counts(self, counts: Mapping[int, int]) -> None:
        """Go on from `counts`."""
        self._counts = collections.Counter(counts)

    @property
    def number(self) -> int:
        return self._counts.total()

    def quantile(self, share: float) -> int | None:
        """The smallest delay that at least `share` of the gradients do not exceed; None where there are none.

        >>> delays = Delays()
        >>> for delay in (0, 0, 1, 7):
        ...     delays.add(delay)
        >>> delays.quantile(0.5), delays.quantile(0.95)
        (0, 7)
        """
        seen = 0
        for delay in sorted(self._counts):
            seen += self._counts[delay]
            if seen >= share * self.number:
                return delay
        return None

    def summary(self) -> dict[str, float | None]:
        """mean, p50, p95 and max, in updates; None where nothing was applied."""
        mean = sum(delay * count for delay, count in self._counts.items()) / self.number if self._counts else None
        return {
            "mean": mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": max(self._counts, default=None),
        }


class Progress:
    """How far a run has come: what its arrivals, evaluations, joins and leaves add up to.

    A leave may cause a step too, where a round was waiting for that worker.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self.num_samples = 0
        self.train_seconds = 0.0
        self.delays = Delays()

    def advance(
        self, version: int, num_samples: int, train_seconds: float, uses: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Take in a record: what it says of the run, and the (dispatch, delay) of the gradients in its steps."""
        self.num_updates = max(self.num_updates, version)
        self.num_samples = max(self.num_samples, num_samples)
        self.train_seconds = max(self.train_seconds, train_seconds)
        for _, delay in uses:
            self.delays.add(delay)


PARTS = ("compute", "wait", "communicate", "apply", "evaluate", "checkpoint")
"""What time goes to. The first three are added up over workers, so N workers have N seconds of them in a second; the
server's `apply`, and `evaluate` and `checkpoint`, in which nobody trains, are seconds of the run. In synchronous runs
the exchange of gradients is a part of `compute`, in whose backward pass it happens."""

_NUMBERS = (*("num_updates", "num_samples", "num_samples_applied", "train_seconds", "eval_seconds", "first_eval_loss"),)


class Totals(Progress):
    """The totals of a run's records; call it with each record, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_samples_applied = 0
        self.eval_seconds = 0.0
        self.first_eval_loss: float | None = None
        self.last: Evaluation | None = None
        self.seconds = dict.fromkeys(PARTS, 0.0)
        """What the time went to; see `PARTS`."""
        self.peak_bytes: dict[int, tuple[int, int]] = {}
        """Of each worker's process: its resident set, and torch's memory on its GPU."""
        self.micro_batches = 1
        """The parts that a batch is computed in."""
        self._samples_of: dict[int, int] = {}

    def __call__(self, record: Record) -> None:
        if isinstance(record, Event | Evaluation | Membership):
            uses = () if isinstance(record, Evaluation) else record.uses
            self.advance(record.version, record.total_samples, record.train_seconds, uses)
        if isinstance(record, Event):
            self._samples_of[record.dispatch] = record.num_samples
            seconds = self.seconds
            seconds["compute"] += record.compute_seconds
            seconds["wait"] += record.wait_seconds
            seconds["communicate"] += record.pull_seconds + record.push_seconds
            seconds["apply"] += record.apply_seconds
            self._use(record.uses)
            for dispatch in record.drops:
                self._samples_of.pop(dispatch, None)
        elif isinstance(record, Evaluation):
            self.eval_seconds += record.eval_seconds
            self.seconds["evaluate"] += record.eval_seconds
            self.last = record
            if self.first_eval_loss is None:
                self.first_eval_loss = record.loss
        elif isinstance(record, Membership):
            self._use(record.uses)
        elif isinstance(record, Checkpointed):
            self.seconds["checkpoint"] += record.copy_seconds
        elif isinstance(record, Parts):
            self.micro_batches = record.micro_batches
        elif isinstance(record, MemoryUsed):
            for worker, resident, cuda in record.workers:
                before = self.peak_bytes.get(worker, (0, 0))  # larger where a worker has another process since
                self.peak_bytes[worker] = (max(resident, before[0]), max(cuda, before[1]))

    def state(self) -> dict[str, Any]:
        """All of it as JSON, for a checkpoint."""
        kept = {name: getattr(self, name) for name in _NUMBERS}
        return kept | {
            "last": None if self.last is None else vars(self.last) | {"metrics": dict(self.last.metrics)},
            "delays": sorted(self.delays.counts().items()),
            "samples_of": sorted(self._samples_of.items()),
            "seconds": dict(self.seconds),
            "peak_bytes": sorted(self.peak_bytes.items()),
            "micro_batches": self.micro_batches,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, as it was or as JSON has brought it back."""
        for name in _NUMBERS:
            setattr(self, name, state[name])
        last = state["last"]
        self.last = None if last is None else Evaluation(**last | {"worker_losses": tuple(last["worker_losses"])})
        self.delays.load_counts(dict(state["delays"]))
        self._samples_of = dict(state["samples_of"])
        self.seconds = dict.fromkeys(PARTS, 0.0) | dict(state.get("seconds", {}))  # a checkpoint may be older
        self.peak_bytes = {worker: (peak[0], peak[1]) for worker, peak in state.get("peak_bytes", ())}
        self.micro_batches = state.get("micro_batches", self.micro_batches)

    def _use(self, uses: tuple[tuple[int, int], ...]) -> None:
        for dispatch, _ in uses:
            self.num_samples_applied += self._samples_of.pop(dispatch, 0)  # a later use applies no new samples

    def as_summary(self) -> dict[str, Any]:
        """The summary's fields that come from records; None where nothing was measured."""
        last = self.last
        return {
            "num_samples": self.num_samples,
            "num_updates": self.num_updates,
            "train_seconds": self.train_seconds,
            "eval_seconds": self.eval_seconds,
            "first_eval_loss": self.first_eval_loss,
            "final_eval_loss": None if last is None else last.loss,
            "metrics": None if last is None else dict(last.metrics),
            "details": None if last is None else dict(last.details),
            "eval_weight": None if last is None else last.weight,
            "samples_per_second": self.num_samples / self.train_seconds if self.train_seconds > 0 else None,
            "num_samples_applied": self.num_samples_applied,
            "delay": self.delays.summary(),
            "seconds": dict(self.seconds),
        }
