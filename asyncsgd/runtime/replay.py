"""Replay: the event log of a run as the backend of the one loop, and what happens then beside what the log says.

The log says which worker joined and left when, which version each gradient was computed at, and in what order
gradients arrived.
Nothing else decided the run: batches, masks and dropout are functions of (seed, stream, index), and the rule is a
function of the arrivals. So the same server, fed the same arrivals, must reply the same and end at the same
parameters. Batches are handed out here as they were in the run, so the log has to name the same ones.

Every gradient's loss is compared with the loss in the log, to the last bit. It depends on every parameter at which it
was computed. So the first loss that differs names a version: there, or before it, the two runs first differ. A version
is kept while a gradient of the log still has to be computed at it, which is one vector per worker at most."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from torch import Tensor

from asyncsgd.batches import count_batches
from asyncsgd.evaluation import Measured
from asyncsgd.flights import Arrived, Happened, Joined, Left, State, Work
from asyncsgd.records.events import Event, Membership, Record, Taken
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.computation import Computation
from asyncsgd.runtime.fit import Fit, Nobody, Sink
from asyncsgd.runtime.log import LogRecord
from asyncsgd.server import Server

COMPARED = ("batches", "weight", "num_samples", "outcome", "uses", "drops", "abandoned", "version", "total_samples")
"""Keys of a record that the replay's must have with the same value, where the log has them."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay first differs from its log."""

    version: int
    """They differ from this version on, or from an earlier one."""
    message: str


class Differs(Exception):
    """The log cannot follow from what came before: what, and from which version on."""

    def __init__(self, version: int, message: str) -> None:
        super().__init__(message)
        self.difference = Difference(version, message)


def follows(state: State, records: Sequence[LogRecord]) -> bool:
    """Whether the state of a checkpoint holds all points that the gradients in `records`, which come after it, were
    computed at.

    In one process and on the virtual clock it does. Workers that are processes read the parameters by themselves, so
    what they had in flight was computed at versions that no checkpoint has, unless it was lost: the run went on from
    there.
    """
    known = {work.dispatch for work in state["server"]["in_flight"].values() if work.point is not None}
    arrivals = [record for record in records if record["kind"] == "arrival"]
    return all(r["read_version"] >= state["server"]["version"] or r["dispatch"] in known for r in arrivals)


class Replay:
    """Feeds a log to a server. Called once, in one process, at the thread count of the log.

    Args:
        server: new, on the initial parameters, without a budget, since the log says where the run ended; it starts
            nobody by itself, since the log does. Changed by `run`.
        computation: computes the gradients again.
        records: the log, in order; see `asyncsgd.runtime.log.read_log`.
        check_every: compare every `check_every`-th gradient's loss; every reply is compared.
    """

    present: Sequence[int] = ()
    """Everybody joins by the log."""
    now, settled, anew = 0.0, True, False

    def __init__(
        self,
        server: Server,
        computation: Computation,
        records: Sequence[LogRecord],
        check_every: int = 1,
    ) -> None:
        self._server, self._computation = server, computation
        arrivals = [place for place, record in enumerate(records) if record["kind"] == "arrival"]
        last = max(arrivals, default=0)
        # Who was lost in the last evaluation, or joined in a run that went on from its end: nothing follows.
        self._records = collections.deque(
            record for place, record in enumerate(records) if place <= last or record.get("uses")
        )
        self._record: LogRecord = {}  # what happens now
        self._check_every = check_every
        self._readers = collections.Counter(records[place]["read_version"] for place in arrivals)
        self._kept: dict[int, Tensor] = {}
        self.num_checked = 0

    def go_on_from(self, state: State) -> None:
        """Begin at a checkpoint, where `follows` allows it; the records are those after it."""
        self._server.load_state_dict(state)
        if "computation" in state:
            self._computation.load_state_dict(state["computation"])

    def run(self, until: int | None = None) -> Difference | None:
        """Replay the log, or its part up to version `until`. Return the first difference from the log, or None.

        A log that has lost its last records agrees up to its end, so compare `num_samples` with the run's summary.

        Args:
            until: stop as soon as the server has this version.
        """
        server = self._server
        sink = Sink(self._compare, stop_requested=lambda: until is not None and server.version >= until)
        try:
            Fit(server, self, Budget(), 1, sink).run()
        except Differs as differs:
            return differs.difference
        return None

    def running(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> tuple[()]:
        return ()

    def evaluate(self, parameters: Tensor) -> Measured:
        """Evaluations change nothing, so they are left out."""
        return Measured(0.0)

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass

    def next(self, until: float) -> Happened | None:
        self._follow()
        self._keep()
        while self._records:
            self._record = record = self._records.popleft()
            kind = record["kind"]
            if kind == "arrival":
                return self._arrived(record)
            if kind == "join":
                return Joined(record["worker"])
            if kind == "leave":
                self._computation.forget(record["worker"])
                return Left(record["worker"], record.get("reason", ""))
            if kind == "parts":
                self._computation.cut_into(record["micro_batches"])
                continue
            if kind == "extend":  # what the rule had asked for before is started now
                self._follow()
            self._check(record, {"version": self._server.version, "total_samples": self._server.num_samples})
        raise Nobody("the log ends")

    def _arrived(self, record: LogRecord) -> Arrived:
        worker, dispatch, version = record["worker"], record["dispatch"], record["read_version"]
        work = self._server.in_flight.get(worker)
        if work is None or work.dispatch != dispatch:
            raise self._differs(f"dispatch {dispatch} of worker {worker} arrives, which is not in flight")
        point = self._kept.get(version) if work.point is None else work.point
        newest = self._server.version if work.point is None else work.version
        if point is None or not work.version <= version <= newest:
            raise self._differs(
                f"dispatch {dispatch} was started at version {work.version} and arrives now, but the log says that "
                f"it has read version {version}"
            )
        self._readers[version] -= 1
        gradient = self._computation.compute(worker, work.batches, point, work.rate, record["loss_scales"])
        if dispatch % self._check_every == 0:
            self.num_checked += 1
            here = gradient.loss if math.isfinite(gradient.loss) else None  # JSON has no nan
            if here != record.get("loss"):
                what = f"the loss of dispatch {dispatch} at version {version} is {here!r}"
                raise Differs(version, f"{what}, the log has {record.get('loss')!r}")
        return Arrived(work, version, self._computation.gradient, gradient, record["flight_seconds"], Taken())

    def stop(self, works: Sequence[Work]) -> None:
        """Nobody computes but when it arrives."""

    def start(self, works: Sequence[Work]) -> None:
        """The server starts nobody by itself."""

    def _follow(self) -> None:
        """Start what the log started, if the rule asked for it here and these batches are the next."""
        for worker, dispatch, batches, rate in self._record.get("started", ()):
            # A round that the budget cuts short has fewer; the loss of its gradient tells whether it was so.
            here = self._server.start(worker, count_batches(batches))
            if here is None:
                raise self._differs(f"dispatch {dispatch} of worker {worker} was not started here")
            if (here.dispatch, here.batches) != (dispatch, batches):
                raise self._differs(
                    f"worker {worker} starts dispatch {here.dispatch} with batches {here.batches}, the log has "
                    f"{dispatch}, {batches}"
                )
            here.rate = rate

    def _compare(self, record: Record) -> None:
        """The record of what happened here beside the one in the log."""
        if isinstance(record, Event | Membership):
            self._check(self._record, msgspec.structs.asdict(record))

    def _check(self, logged: LogRecord, here: dict[str, Any]) -> None:
        for name in COMPARED:
            if logged.get(name) is not None and name in here and json.dumps(here[name]) != json.dumps(logged[name]):
                raise self._differs(f"{name} of line {logged['line']} is {here[name]}, the log has {logged[name]}")

    def _differs(self, what: str) -> Differs:
        return Differs(self._server.version, f"at version {self._server.version}: {what}")

    def _keep(self) -> None:
        """Keep the current version while the log still reads it, and forget those it does not."""
        version = self._server.version
        if self._readers[version] > 0 and version not in self._kept:
            self._kept[version] = self._server.parameters.clone()
        for old in [old for old in self._kept if self._readers[old] <= 0]:
            del self._kept[old]
