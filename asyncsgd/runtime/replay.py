"""Replay: re-execute the event log of a parameter-server run in one process, bit for bit.

The log says which worker joined and left when, which version each gradient was computed at, and in what order
gradients arrived.
Nothing else decided the run: batches, masks and dropout are functions of (seed, stream, index), and the rule is a
function of the arrivals. So the same server, fed the same arrivals, must reply the same and end at the same
parameters. Batches are handed out here as they were in the run, so the log has to name the same ones.

A log may have been edited, or have lost lines: whatever in it cannot follow from what came before is a `Difference`.

Every gradient's loss is compared with the one in the log, to the last bit: it depends on every parameter it was
computed at, so the first loss that differs names the version at or before which the two runs part. A version is
kept while a gradient of the log still has to be computed at it, which is one vector per worker at most."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asyncsgd.record import Range
from asyncsgd.rules.base import Start
from asyncsgd.runtime.computation import Computation
from asyncsgd.runtime.log import LoggedArrival, LoggedReply, LogRecord
from asyncsgd.server import Outcome, Server, Starting
from asyncsgd.streams import Source, count_batches
from asyncsgd.worker import Gradient

NOTHING = Outcome("", (), (), (), (), False)
"""What follows when somebody leaves who had never joined."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay parts from its log."""

    version: int
    """The version at or before which it does."""
    message: str


class _Flight(NamedTuple):
    """A gradient that the log has started and that has not arrived yet."""

    worker: int
    batches: tuple[Range, ...]
    learning_rate: float | None
    version: int
    """When it was started."""
    point: Tensor | None
    """Where it starts exactly; None where it reads the parameters of `version` or of a newer one."""


class Replay:
    """Feeds a log to a server. Called once, in one process, at the thread count of the log.

    Args:
        server: new, on the initial parameters; changed by `run`.
        computation: computes the gradients again.
        batches: hands out the run's batches, new and without a budget: the log says where the run ended.
        records: the log, in order; see `asyncsgd.runtime.log.read_log`.
        num_workers: N, workers 0 to N - 1.
        check_every: compare every `check_every`-th gradient's loss; every reply is compared.
    """

    def __init__(
        self,
        server: Server,
        computation: Computation,
        batches: Source,
        records: Sequence[LogRecord],
        *,
        num_workers: int,
        check_every: int = 1,
    ) -> None:
        self._server, self._computation, self._batches = server, computation, batches
        self._num_workers = num_workers
        self._waiting: dict[int, Starting | Start] = {}  # by worker
        self._flights: dict[int, _Flight] = {}  # by dispatch
        self._records = records
        self._check_every = check_every
        self._readers = collections.Counter(r.read_version for r in records if isinstance(r, LoggedArrival))
        self._kept: dict[int, Tensor] = {}
        self.num_checked = 0

    def run(self, until: int | None = None) -> Difference | None:
        """Replay the log, or its part up to version `until`; where it parts from the log, or None.

        A log that has lost its last records agrees as far as it goes: compare `num_samples` with the run's summary.

        Args:
            until: stop as soon as the server has this version.
        """
        self._keep()
        end = max((place for place, record in enumerate(self._records) if isinstance(record, LoggedArrival)), default=0)
        for place, record in enumerate(self._records):
            if until is not None and self._server.version >= until:
                return None
            if place > end and isinstance(record, LoggedReply) and record.kind == "leave" and not record.uses:
                continue  # lost in the last evaluation, after which the rule was not asked any more
            difference = self._take(record) or self._compare_counts(record)
            if difference is not None:
                return difference
            self._keep()
        return None

    def _take(self, record: LogRecord) -> Difference | None:
        if not isinstance(record, LoggedReply):
            return None  # an evaluation changes nothing
        if isinstance(record, LoggedArrival):
            reply = self._arrive(record)
        elif record.kind == "join":
            reply = self._join(record)
        else:
            reply = self._leave(record)
        if isinstance(reply, Difference):
            return reply
        for dispatch in reply.abandoned:
            self._land(dispatch)
        for starting in reply.start:
            self._waiting[starting.worker] = starting
        for started in record.started:
            difference = self._start(*started)
            if difference is not None:
                return difference
        return self._compare_reply(record, reply)

    def _join(self, record: LoggedReply) -> Outcome | Difference:
        worker = record.worker
        if worker >= self._num_workers:
            return self._parts(f"worker {worker} joins, the run had {self._num_workers}, from 0 on")
        if worker in self._server.workers:
            return self._parts(f"worker {worker} joins, which has joined already")
        return self._server.join(worker)

    def _leave(self, record: LoggedReply) -> Outcome:
        worker = record.worker
        if worker not in self._server.workers:
            return NOTHING  # lost before training began
        outcome, lost = self._server.leave(worker)
        self._waiting.pop(worker, None)
        self._computation.forget(worker)
        if lost is not None:
            self._land(lost)
        return outcome

    def _land(self, dispatch: int) -> None:
        """`dispatch` will not arrive: its batches are handed out again."""
        self._batches.give_back(self._flights.pop(dispatch).batches)

    def _start(
        self, worker: int, dispatch: int, batches: tuple[Range, ...], learning_rate: float | None
    ) -> Difference | None:
        """Start what the log started, if the rule asked for it here and these batches are the next."""
        starting = self._waiting.pop(worker, None)
        if starting is None:
            return self._parts(f"dispatch {dispatch} of worker {worker} was not started here")
        # A round that the budget cuts short has fewer; the loss of its gradient tells whether it was so.
        expected = self._batches.take(worker, min(starting.num_local_steps, count_batches(batches)))
        if not expected or expected != batches:
            return self._parts(f"dispatch {dispatch} of worker {worker} gets batches {expected}, the log has {batches}")
        here = self._server.start(starting, count_batches(batches))
        if here != dispatch:
            return self._parts(f"worker {worker} starts dispatch {here}, the log has {dispatch}")
        version = starting.version if isinstance(starting, Starting) else self._server.version
        self._flights[dispatch] = _Flight(worker, batches, learning_rate, version, starting.point)
        return None

    def _arrive(self, record: LoggedArrival) -> Outcome | Difference:
        worker, dispatch, version = record.worker, record.dispatch, record.read_version
        flight = self._flights.pop(dispatch, None)
        if flight is None or flight.worker != worker:
            return self._parts(f"dispatch {dispatch} of worker {worker} arrives, which is not in flight")
        if flight.batches != record.batches:
            return self._parts(f"dispatch {dispatch} has batches {flight.batches}, the log has {record.batches}")
        start = self._kept.get(version) if flight.point is None else flight.point
        newest = self._server.version if flight.point is None else flight.version
        if start is None or not flight.version <= version <= newest:
            return self._parts(
                f"dispatch {dispatch} was started at version {flight.version} and arrives now, the log says that it "
                f"has read version {version}"
            )
        self._readers[version] -= 1
        gradient = self._computation.compute(worker, flight.batches, start, flight.learning_rate, record.loss_scales)
        return self._compare_gradient(record, gradient) or self._server.arrive(
            worker,
            dispatch,
            version,
            self._computation.gradient,
            weight=gradient.weight,
            num_samples=gradient.num_samples,
            seconds=record.flight_seconds,
        )

    def _compare_gradient(self, record: LoggedArrival, gradient: Gradient) -> Difference | None:
        if record.dispatch % self._check_every:
            return None
        self.num_checked += 1
        pairs: list[tuple[str, float | None, float | None]] = [
            ("loss", gradient.loss if math.isfinite(gradient.loss) else None, record.loss)  # JSON has no nan
        ]
        counts = (("weight", gradient.weight, record.weight), ("num_samples", gradient.num_samples, record.num_samples))
        pairs += [pair for pair in counts if pair[2] is not None]
        for name, here, logged in pairs:
            if here != logged:
                version = record.read_version
                what = f"the {name} of dispatch {record.dispatch} at version {version} is {here!r}"
                return Difference(version, f"{what}, the log has {logged!r}")
        return None

    def _compare_reply(self, record: LoggedReply, outcome: Outcome) -> Difference | None:
        """The rule's reply beside the one in the log."""
        pairs: list[tuple[str, Any, Any]] = [
            ("uses", outcome.uses, record.uses),
            ("drops", outcome.drops, record.drops),
            ("abandoned", outcome.abandoned, record.abandoned),
        ]
        if isinstance(record, LoggedArrival):
            pairs.append(("outcome", outcome.outcome, record.outcome))
        for name, here, logged in pairs:
            if logged is not None and here != logged:
                return self._parts(
                    f"at {record.kind} of worker {record.worker}, {name} is {here}, the log has {logged}"
                )
        return None

    def _compare_counts(self, record: LogRecord) -> Difference | None:
        if self._server.version != record.version:
            return self._parts(f"after line {record.line} the log has version {record.version}")
        if record.total_samples is not None and self._server.num_samples != record.total_samples:
            return self._parts(
                f"after line {record.line} {self._server.num_samples} samples have arrived, the log has "
                f"{record.total_samples}"
            )
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
