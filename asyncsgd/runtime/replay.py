"""Replay: re-execute the event log of a parameter-server run in one process, bit for bit.

The log says which worker joined and left when, which version each gradient was computed at, and in what order
gradients arrived.
Nothing else decided the run: batches, masks and dropout are functions of (seed, stream, index), and the rule is a
function of the arrivals. So the same server, fed the same arrivals, must reply the same and end at the same
parameters. Batches are handed out here as they were in the run, so the log has to name the same ones.

A log may have been edited, or may have lost lines. A line that cannot follow from those before it is a `Difference`.

Every gradient's loss is compared with the loss in the log, to the last bit. It depends on every parameter at which it
was computed. So the first loss that differs names a version: there, or before it, the two runs first differ. A version
is kept while a gradient of the log still has to be computed at it, which is one vector per worker at most."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asyncsgd.batches import Source, count_batches
from asyncsgd.dispatcher import Dispatcher
from asyncsgd.packing import Plain, classes_in, unpack
from asyncsgd.records.events import Membership, Range
from asyncsgd.runtime.computation import Computation
from asyncsgd.runtime.log import LoggedArrival, LoggedParts, LoggedReply, LoggedStarts, LogRecord
from asyncsgd.server import Outcome, Server
from asyncsgd.worker import Gradient


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay first differs from its log."""

    version: int
    """They differ from this version on, or from an earlier one."""
    message: str


def follows(state: Plain, records: Sequence[LogRecord]) -> bool:
    """Whether the state of a checkpoint holds all points that the gradients in `records`, which come after it, were
    computed at.

    In one process and on the virtual clock it does. Workers that are processes read the parameters by themselves, so
    what they had in flight was computed at versions that no checkpoint has, unless it was lost: the run went on from
    there.
    """
    launches = unpack(state["dispatcher"]["launches"], classes_in("asyncsgd.dispatcher"))
    flights = {dispatch: launches[worker] for worker, dispatch, *_ in state["server"]["in_flight"]}
    known = {dispatch for dispatch, launch in flights.items() if launch is not None and launch.point is not None}
    arrivals = [record for record in records if isinstance(record, LoggedArrival)]
    return all(r.read_version >= state["server"]["version"] or r.dispatch in known for r in arrivals)


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
        self._server, self._computation = server, computation
        self._dispatcher = Dispatcher(server, batches, num_workers=num_workers, batch_size=1, starts=False)
        self._num_workers = num_workers
        self._rates: dict[int, float | None] = {}  # by worker, of its local steps: the log's
        self._records = records
        self._check_every = check_every
        self._readers = collections.Counter(r.read_version for r in records if isinstance(r, LoggedArrival))
        self._kept: dict[int, Tensor] = {}
        self.num_checked = 0

    def go_on_from(self, state: Plain) -> None:
        """Begin at a checkpoint, where `follows` allows it; the records are those after it."""
        self._server.load_state_dict(state["server"])
        self._dispatcher.load_state_dict(state["dispatcher"])
        self._rates = {w: self._dispatcher.launch_of(w).learning_rate for w in self._server.in_flight}
        if "computation" in state:
            self._computation.load_state_dict(state["computation"])

    def run(self, until: int | None = None) -> Difference | None:
        """Replay the log, or its part up to version `until`. Return the first difference from the log, or None.

        A log that has lost its last records agrees up to its end, so compare `num_samples` with the run's summary.

        Args:
            until: stop as soon as the server has this version.
        """
        self._keep()
        end = max((place for place, record in enumerate(self._records) if isinstance(record, LoggedArrival)), default=0)
        for place, record in enumerate(self._records):
            if until is not None and self._server.version >= until:
                return None
            if place > end and isinstance(record, LoggedReply) and not record.uses:
                continue  # lost in the last evaluation, or joined in a run that went on from its end: nothing follows
            if isinstance(record, LoggedParts):
                self._computation.cut_into(record.micro_batches)
                continue
            difference = self._take(record) or self._compare_counts(record)
            if difference is not None:
                return difference
            self._keep()
        return None

    def _take(self, record: LogRecord) -> Difference | None:
        if not isinstance(record, LoggedStarts):
            return None  # an evaluation changes nothing
        followed: Outcome | Membership | Difference | None = None
        if not isinstance(record, LoggedReply):
            pass  # what the rule had asked for before is started now
        elif isinstance(record, LoggedArrival):
            followed = self._arrive(record)
        elif record.kind == "join":
            followed = self._join(record)
        else:
            _, followed = self._dispatcher.leave(record.worker)
            self._computation.forget(record.worker)
        if isinstance(followed, Difference):
            return followed
        for started in record.started:
            difference = self._start(*started)
            if difference is not None:
                return difference
        return self._compare_reply(record, followed) if isinstance(record, LoggedReply) and followed else None

    def _join(self, record: LoggedReply) -> Membership | Difference:
        worker = record.worker
        if worker >= self._num_workers:
            return self._parts(f"worker {worker} joins, the run had {self._num_workers}, from 0 on")
        if worker in self._server.workers:
            return self._parts(f"worker {worker} joins, which has joined already")
        return self._dispatcher.join(worker)[1]

    def _start(
        self, worker: int, dispatch: int, batches: tuple[Range, ...], learning_rate: float | None
    ) -> Difference | None:
        """Start what the log started, if the rule asked for it here and these batches are the next."""
        if not self._dispatcher.waits(worker):
            return self._parts(f"dispatch {dispatch} of worker {worker} was not started here")
        # A round that the budget cuts short has fewer; the loss of its gradient tells whether it was so.
        here = self._dispatcher.start(worker, count_batches(batches))
        expected = () if here is None else self._dispatcher.batches_of(worker)
        if here is None or expected != batches:
            return self._parts(f"dispatch {dispatch} of worker {worker} gets batches {expected}, the log has {batches}")
        if here != dispatch:
            return self._parts(f"worker {worker} starts dispatch {here}, the log has {dispatch}")
        self._rates[worker] = learning_rate
        return None

    def _arrive(self, record: LoggedArrival) -> Outcome | Difference:
        worker, dispatch, version = record.worker, record.dispatch, record.read_version
        if not self._server.is_in_flight(worker, dispatch):
            return self._parts(f"dispatch {dispatch} of worker {worker} arrives, which is not in flight")
        launch, batches = self._dispatcher.launch_of(worker), self._dispatcher.batches_of(worker)
        if batches != record.batches:
            return self._parts(f"dispatch {dispatch} has batches {batches}, the log has {record.batches}")
        start = self._kept.get(version) if launch.point is None else launch.point
        newest = self._server.version if launch.point is None else launch.version
        if start is None or not launch.version <= version <= newest:
            return self._parts(
                f"dispatch {dispatch} was started at version {launch.version} and arrives now, but the log says that "
                f"it has read version {version}"
            )
        self._readers[version] -= 1
        gradient = self._computation.compute(worker, batches, start, self._rates[worker], record.loss_scales)
        difference = self._compare_gradient(record, gradient)
        if difference is not None:
            return difference
        vector = self._computation.gradient
        return self._dispatcher.arrive(worker, dispatch, version, vector, gradient, record.flight_seconds).outcome

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

    def _compare_reply(self, record: LoggedReply, outcome: Outcome | Membership) -> Difference | None:
        """The rule's reply beside the one in the log."""
        pairs: list[tuple[str, Any, Any]] = [
            ("uses", outcome.uses, record.uses),
            ("drops", outcome.drops, record.drops),
            ("abandoned", outcome.abandoned, record.abandoned),
        ]
        if isinstance(record, LoggedArrival) and isinstance(outcome, Outcome):
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
