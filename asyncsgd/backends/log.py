"""Replay: the event log takes the place of the workers behind `asyncsgd.core.loop.Loop`, and what happens is compared
with what the log says.

The log says which worker joined and left when, which version each gradient was computed at, and in what order gradients
arrived. Nothing else decided the run: batches, masks and dropout are functions of (seed, stream, index), and the rule
is a function of the arrivals. So the same server, given the same arrivals, must reply the same and end at the same
parameters. Batches are handed out here as they were in the run, so the log has to name the same ones.

Every gradient's loss is kept beside the loss in the log. A loss depends on all parameters at which it was computed. So
the two runs differ from the version of the first loss that differs, or from an earlier version.
`asyncsgd.backends.rounding` says what a difference in the last bits means on another processor. A version is kept while
a gradient of the log still has to be computed at it, which is one vector per worker at most."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from asyncsgd.backends.rounding import LossPair
from asyncsgd.core.batches import indices_of
from asyncsgd.core.limits import Limits
from asyncsgd.core.loop import Hooks, Loop
from asyncsgd.core.peers.models import Peers
from asyncsgd.core.protocol import Arrived, Happened, Joined, Left, Measured, NoWorkerLeft, Work
from asyncsgd.core.server import Server
from asyncsgd.errors import UsageError
from asyncsgd.records.events import (
    Evaluation,
    Event,
    Extended,
    Membership,
    Parts,
    Record,
    Started,
    Taken,
    read_events,
)
from asyncsgd.worker.computation import Computation

KINDS = {
    "arrival": Event,
    "join": Membership,
    "leave": Membership,
    "extend": Extended,
    "parts": Parts,
    "evaluate": Evaluation,
}
"""The kinds of the records that a replay needs, and the types of these records."""
COMPARED = ("batches", "weight", "num_samples", "outcome", "uses", "drops", "abandoned", "version", "total_samples")
"""The fields that a record of the replay and that of the log must have in common."""

Log = Sequence[tuple[int, Record]]
"""The records that a replay needs, each with the number of its line."""


def read_log(path: Path) -> Log:
    """Read the records of an event log that a replay needs.

    Raises:
        UsageError: if the file cannot be read, or a line is no record of a run. The message names the line.
    """
    log = []
    try:
        for line, fields in enumerate(read_events(path), 2):  # after the header
            kind = KINDS.get(fields["kind"])
            if kind is not None:
                # The log has null for a number that was not finite. No field that a replay needs is null otherwise.
                with_nan = {name: math.nan if value is None else value for name, value in fields.items()}
                log.append((line, msgspec.convert(with_nan, kind)))
    except msgspec.ValidationError as error:
        what = f"events.jsonl, line {line} is no record of a run ({error}); give the log as the run wrote it"
        raise UsageError(what) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"the event log cannot be read: {error}") from error
    return log


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first difference between a replay and its log."""

    version: int
    """They differ from this version on, or from an earlier one."""
    message: str


class Differs(Exception):
    """The log cannot follow from what came before. `difference` says why, and from which version on."""

    def __init__(self, version: int, message: str) -> None:
        super().__init__(message)
        self.difference = FirstDifference(version, message)


class Replay:
    """Feeds a log to a server. It is used once, in one process, with the number of threads of the log.

    Args:
        server: a new server at the initial parameters. It has no budget, since the log says where the run ended, and
            starts no worker by itself, since the log says who starts. `run` changes it.
        computation: computes the gradients again.
        log: the records, in order.
        to_the_bit: whether the replay ends at the first loss that has other bits than the log's.
    """

    # The next four are as in `asyncsgd.core.protocol.Backend`, and `KEPT` as in `asyncsgd.core.state`.
    present: Sequence[int] = ()
    """No worker is there at first: every worker joins by the log."""
    now = 0.0
    may_stop = True
    loses_flights = False
    KEPT = ()

    def __init__(
        self, server: Server | Peers[Any], computation: Computation, log: Log, *, to_the_bit: bool = True
    ) -> None:
        self.server = server
        self._computation = computation
        self._to_the_bit = to_the_bit
        arrivals = [number for number, (_, record) in enumerate(log) if isinstance(record, Event)]
        num_needed = max(arrivals, default=0) + 1
        # Who joined or was lost after the last arrival cannot change the result, unless the rule took a step because a
        # worker was lost.
        steps_behind = [entry for entry in log[num_needed:] if getattr(entry[1], "uses", ())]
        self._log = collections.deque([*log[:num_needed], *steps_behind])
        self._line = 0
        """The line of the record that is replayed now."""
        self._record = log[0][1] if log else None
        """The record that is replayed now."""
        self._started: Sequence[Started] = ()
        """The gradients that started with this record."""
        self._readers: collections.Counter[int] = collections.Counter()
        """Version -> how many gradients of the log still have to be computed at it."""
        if not isinstance(server, Peers):  # each peer has versions of its own model, and keeps them itself
            self._readers.update(record.read_version for _, record in log if isinstance(record, Event))
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Version -> its parameters and running statistics."""
        self.losses: list[LossPair] = []
        """The losses of all arrivals so far, beside those of the log."""

    def run(self, until: int | None = None) -> FirstDifference | None:
        """Replay the log, or its part up to version `until`. Return the first difference from the log, or None.

        A log that has lost its last records agrees up to its end. So the caller compares the server's `num_samples`
        with the run's summary.

        Args:
            until: stop as soon as the server has this version.
        """
        server = self.server
        hooks = Hooks(self._compare, stop_requested=lambda: until is not None and server.version >= until)
        try:
            Loop(server, self, Limits(), num_evaluations=1, hooks=hooks).run()
        except Differs as differs:
            return differs.difference
        return None

    def running(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def freeze(self) -> tuple[()]:
        return ()

    def evaluate(self, parameters: Tensor) -> Measured:
        """Evaluations change nothing, so they are left out."""
        return Measured(0.0)

    def next(self, until: float) -> Happened | None:
        self._start_what_the_log_started()
        self._keep_read_versions()
        while self._log:
            line, record = self._log.popleft()
            self._line = line
            self._record = record
            self._started = getattr(record, "started", ())
            if isinstance(record, Event):
                return self._arrived(record)
            if isinstance(record, Membership):
                if record.kind == "join":
                    return Joined(record.worker)
                self._computation.forget(record.worker)
                return Left(record.worker, record.reason)
            if isinstance(record, Parts):
                self._computation.cut_into(record.micro_batches)
                continue
            # The record is an evaluation or an extended budget. The latter starts the work that the old one refused.
            self._start_what_the_log_started()
            for name, here in (("version", self.server.version), ("total_samples", self.server.num_samples)):
                if getattr(record, name) != here:
                    raise self._differs(f"{name} of line {line} is {here}, the log has {getattr(record, name)}")
        raise NoWorkerLeft("the log ends")

    def _arrived(self, record: Event) -> Arrived:
        worker = record.worker
        dispatch = record.dispatch
        version = record.read_version
        work = self.server.in_flight.get(worker)
        if work is None or work.dispatch != dispatch:
            raise self._differs(f"dispatch {dispatch} of worker {worker} arrives, which is not in flight")
        point, statistics = self._kept.get(version, (None, None))
        if work.point is not None:
            point = work.point
            statistics = work.statistics
        # A worker that pulls by itself reads any version from its start on. A given point has exactly one.
        newest = self.server.version if work.point is None else work.version
        if point is None or not work.version <= version <= newest:
            raise self._differs(
                f"dispatch {dispatch} was started at version {work.version} and arrives now, but the log says that "
                f"it has read version {version}"
            )
        self._readers[version] -= 1
        computation = self._computation
        gradient = computation.compute(worker, work.batches, point, work.rate, record.loss_scales, statistics)
        pair = LossPair(self.server.version, dispatch, version, gradient.loss, record.loss)
        self.losses.append(pair)
        if self._to_the_bit and not pair.same_bits:
            raise Differs(version, pair.difference)
        seconds = record.flight_seconds
        return Arrived(work, version, computation.gradient, gradient, seconds, Taken(), computation.moved)

    def stop(self, works: Sequence[Work]) -> None:
        """Do nothing: a gradient is computed when it arrives, so one that is abandoned is never begun."""

    def start(self, works: Sequence[Work]) -> None:
        """Do nothing: gradients are started where the log has started them, see `_start_what_the_log_started`."""

    def _start_what_the_log_started(self) -> None:
        """Start the gradients that the log started, if the rule asked for them and their batches are the next.

        Raises:
            Differs: if that is not so.
        """
        started = self._started
        self._started = ()
        for worker, dispatch, batches, rate in started:
            # As many batches are given as in the log, since a replay has no budget, which may have cut the last round
            # short. If the log had a wrong number, the loss of the gradient would differ.
            here = self.server.start(worker, len(indices_of(batches)))
            if here is None:
                raise self._differs(f"dispatch {dispatch} of worker {worker} was not started here")
            if (here.dispatch, here.batches) != (dispatch, batches):
                raise self._differs(
                    f"worker {worker} starts dispatch {here.dispatch} with batches {here.batches}, the log has "
                    f"{dispatch}, {batches}"
                )
            if here.rate is not None:  # an extended run may take local steps at other learning rates
                here.rate = rate

    def _compare(self, record: Record) -> None:
        """Compare the record of what happened here with the one in the log. Raises `Differs`."""
        if not isinstance(record, Event | Membership):
            return
        for name in COMPARED:
            here = getattr(record, name, None)
            logged = getattr(self._record, name, None)
            if here != logged:
                raise self._differs(f"{name} of line {self._line} is {here}, the log has {logged}")

    def _differs(self, what: str) -> Differs:
        return Differs(self.server.version, f"at version {self.server.version}: {what}")

    def _keep_read_versions(self) -> None:
        """Keep the current version if a gradient still has to be computed at it, and forget other versions."""
        version = self.server.version
        if self._readers[version] > 0 and version not in self._kept:
            statistics = self.server.statistics
            values = None if statistics is None else statistics.values.clone()
            self._kept[version] = (self.server.parameters.clone(), values)
        for old in [old for old in self._kept if self._readers[old] <= 0]:
            del self._kept[old]
