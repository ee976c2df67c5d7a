"""Replay: re-execute the event log of a parameter-server run in one process, bit for bit.

The log says which worker joined and left when, which version each gradient was computed at, and in what order
gradients arrived.
Nothing else decided the run: batches, masks and dropout are functions of (seed, stream, index), and the rule is a
function of the arrivals. So the same server, fed the same arrivals, must reply the same and end at the same
parameters.

Every gradient's loss is compared with the one in the log, to the last bit: it depends on every parameter it was
computed at, so the first loss that differs names the version at or before which the two runs part. A version is
kept while a gradient of the log still has to be computed at it, which is one vector per worker at most."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from asyncsgd.rules.base import Start
from asyncsgd.runtime.base import count_batches
from asyncsgd.runtime.computation import Computation
from asyncsgd.server import Outcome, Server, Starting
from asyncsgd.worker import Gradient

LogRecord = Mapping[str, Any]
"""One record of events.jsonl, as `asyncsgd.record.read_events` yields it."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay parts from its log."""

    version: int
    """The version at or before which it does."""
    message: str


class Replay:
    """Feeds a log to a server. Called once, in one process, at the thread count of the log.

    Args:
        server: new, on the initial parameters; changed by `run`.
        computation: computes the gradients again.
        records: the log, in order.
        check_every: compare every `check_every`-th gradient's loss; every reply is compared.
    """

    def __init__(
        self,
        server: Server,
        computation: Computation,
        records: Iterable[LogRecord],
        *,
        check_every: int = 1,
    ) -> None:
        self._server, self._computation = server, computation
        self._waiting: dict[int, Starting | Start] = {}  # by worker
        self._points: dict[int, Tensor] = {}  # by dispatch
        self._rates: dict[int, float] = {}  # by dispatch
        self._records = [record for record in records if record["kind"] in ("arrival", "join", "leave")]
        self._check_every = check_every
        self._readers = collections.Counter(r["read_version"] for r in self._records if r["kind"] == "arrival")
        self._kept: dict[int, Tensor] = {}
        self.num_checked = 0

    def run(
        self, until: int | None = None, progress: Callable[[int], None] = lambda version: None
    ) -> Difference | None:
        """Replay the log, or its part up to version `until`; where it parts from the log, or None.

        Args:
            until: stop as soon as the server has this version.
            progress: called with the version after each arrival.
        """
        self._keep()
        for record in self._records:
            if until is not None and self._server.version >= until:
                return None
            difference = self._take(record)
            if difference is not None:
                return difference
            self._keep()
            progress(self._server.version)
        return None

    def _take(self, record: LogRecord) -> Difference | None:
        server, worker = self._server, record["worker"]
        difference = None
        if record["kind"] == "join":
            outcome = server.join(worker)
        elif record["kind"] == "leave":
            if worker not in server.workers:
                return None  # lost before training began
            outcome, lost = server.leave(worker)
            self._waiting.pop(worker, None)
            self._computation.forget(worker)
            if lost is not None:
                self._points.pop(lost, None)
        else:
            difference, outcome = self._arrive(record)
        for starting in outcome.start:
            self._waiting[starting.worker] = starting
        for dispatch in outcome.abandoned:
            self._points.pop(dispatch, None)
        for started_worker, dispatch, batches, *rate in record["started"]:
            if not self._start(started_worker, dispatch, count_batches(batches), *rate):
                return self._parts(f"dispatch {dispatch} of worker {started_worker} was not started here")
        return difference or self._compare(record, outcome)

    def _start(self, worker: int, dispatch: int, num_local_steps: int, rate: float | None = None) -> bool:
        """Start what the log started; False if the rule did not ask for it here."""
        starting = self._waiting.pop(worker, None)
        if starting is None:
            return False
        if starting.point is not None:
            self._points[dispatch] = starting.point
        if rate is not None:
            self._rates[dispatch] = rate
        return self._server.start(starting, num_local_steps) == dispatch

    def _compute(self, record: LogRecord) -> Gradient:
        """The gradient of the log's arrival once more, from the point it started from."""
        version, dispatch = record["read_version"], record["dispatch"]
        point = self._points.pop(dispatch, None)
        self._readers[version] -= 1
        batches = tuple([tuple(each) for each in record["batches"]])
        start = self._kept[version] if point is None else point
        return self._computation.compute(record["worker"], batches, start, self._rates.pop(dispatch, None))

    def _arrive(self, record: LogRecord) -> tuple[Difference | None, Outcome]:
        version, dispatch = record["read_version"], record["dispatch"]
        gradient = self._compute(record)
        difference = None
        if dispatch % self._check_every == 0:
            self.num_checked += 1
            if (gradient.loss if math.isfinite(gradient.loss) else None) != record["loss"]:  # JSON has no nan
                here, logged = gradient.loss, record["loss"]
                what = f"the loss of dispatch {dispatch} at version {version} is {here!r}, the log has {logged!r}"
                difference = Difference(version, what)
        outcome = self._server.arrive(
            record["worker"],
            dispatch,
            version,
            self._computation.gradient,
            weight=gradient.weight,
            num_samples=gradient.num_samples,
            seconds=record["flight_seconds"],
        )
        return difference, outcome

    def _compare(self, record: LogRecord, outcome: Outcome) -> Difference | None:
        """The rule's reply beside the one in the log."""
        for name in ("uses", "drops", "abandoned", "outcome"):
            logged = record.get(name)
            replayed = getattr(outcome, name)
            if (
                logged is not None
                and _listed(replayed) != logged
                and not (record["kind"] != "arrival" and name == "outcome")
            ):
                return self._parts(
                    f"at {record['kind']} of worker {record['worker']}, {name} is {replayed}, the log has {logged}"
                )
        if self._server.version != record["version"]:
            return self._parts(f"the log has version {record['version']}")
        return None

    def _parts(self, what: str) -> Difference:
        return Difference(self._server.version, f"at version {self._server.version}: {what}")

    def _keep(self) -> None:
        """Keep the current version while the log still reads it, and forget those it does not."""
        version = self._server.version
        if self._readers[version] > 0 and version not in self._kept:
            self._kept[version] = self._server.parameters.clone()
        for old in [old for old in self._kept if self._readers[old] <= 0]:
            del self._kept[old]


def _listed(value: Any) -> Any:
    """Tuples as JSON gives them back."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
