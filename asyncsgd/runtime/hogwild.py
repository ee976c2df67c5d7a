"""Hogwild-style training: workers read and step one shared vector, without locks and without a server in between.

    each worker, again and again:  x <- x - eta * grad f(x; batch),  x read and written in place while others do the
    same

Niu, Recht, Re, Wright: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, NeurIPS 2011.
Deviations: the gradients are dense, so updates may overwrite each other in part. (A torn read-modify-write loses one
worker's change of a few elements.) Each worker has an optimizer state of its own, or all share one, also without locks.

There is no server. One process hands out batches, counts the steps and keeps the record. So `version` is the number of
steps that it has heard of. The recorded delays are differences of these counts: they do not count steps that were being
taken at the time. Such a run cannot be replayed, because nothing records what a read saw."""

from __future__ import annotations

import time
from typing import ClassVar

from asyncsgd.packing import Plain
from asyncsgd.records.events import Event
from asyncsgd.runtime.base import POLL_SECONDS, Result
from asyncsgd.runtime.parameter_server import ParameterServer
from asyncsgd.runtime.transport.messages import Computed, Holding, Lost, Proceed
from asyncsgd.runtime.transport.shared_memory import FROZEN, SAMPLES, SharedMemoryServer
from asyncsgd.server import Outcome

STOP_SECONDS = 30.0
"""How long a worker may take over its last gradient when a run ends before its budget in samples is spent."""


class Hogwild(ParameterServer):
    """`ParameterServer` on a `SharedMemoryServer` without slots, whose `Server` has `StepTakenByWorker` for an
    optimizer.

    Before an evaluation the workers are frozen. A worker with a gradient ready holds it, and a worker that is stepping
    finishes its step. So nothing is applied while shards are evaluated. The training clock stops when all stand still.

    The workers are handed out the budget in samples and no more, since a step that was taken cannot be discarded."""

    _steps_at_workers: ClassVar[bool] = True
    _transport: SharedMemoryServer
    _stands_still = False

    def run(self) -> Result:
        """Train until the budget is spent and the last worker has stopped stepping; blocks."""
        result = super().run()
        self._present -= {worker for worker, message in self._inbox if isinstance(message, Lost)}
        deadline = time.monotonic() + STOP_SECONDS
        while self._present and time.monotonic() < deadline:
            gone = {worker for worker, message in self._transport.wait(POLL_SECONDS) if isinstance(message, Lost)}
            self._present -= gone
        return result

    def _apply(self, worker: int, message: Computed) -> tuple[Outcome, Event]:
        applied = super()._apply(worker, message)
        self._transport.segment.control[SAMPLES] = self._server.num_samples
        return applied

    def state_dict(self) -> Plain:
        """As of any `ParameterServer`, with the optimizer state that all workers share. Their own states are lost with
        them.
        """
        return super().state_dict() | {"shared": self._transport.extra}

    def load_state_dict(self, state: Plain) -> None:
        super().load_state_dict(state)
        self._transport.extra.copy_(state["shared"])
        self._transport.segment.control[SAMPLES] = self._server.num_samples

    @property
    def _cut_short(self) -> str | None:
        """Also without rounds: who finds no batch left stands still while the others finish theirs."""
        return "the workers of Hogwild are given no more than the budget" if self._dispatcher.round_is_cut else None

    def _save(self) -> None:
        """Workers write while a vector is copied, so they stand still meanwhile."""
        stood_still = self._stands_still
        self._quiesce()
        super()._save()
        if not stood_still and self._clock.running:
            self._resume()
            self._flush()

    def _quiesce(self) -> None:
        if self._stands_still:
            return
        if not self._transport.segment.control[FROZEN]:
            self._holding: list[int] = []
        self._transport.segment.control[FROZEN] = 1
        waiting_for = set(self._server.in_flight) - {worker for worker, _ in self._outbox} - set(self._holding)
        while waiting_for:
            for worker, message in self._wait():
                waiting_for.discard(worker)
                if isinstance(message, Holding):
                    self._holding.append(worker)
                elif isinstance(message, Computed):
                    # It stepped before it saw the flag; what it starts is sent after the evaluation.
                    self._report(self._apply(worker, message)[1])
                elif isinstance(message, Lost):
                    self._lose(worker, message.reason)
        self._stands_still = True

    def _resume(self) -> None:
        if self._server.in_flight:
            self._evaluated_version = None  # from here on workers may step before this process hears of it
        self._stands_still = False
        self._transport.segment.control[FROZEN] = 0
        for worker in self._holding:
            self._transport.send(worker, Proceed())
