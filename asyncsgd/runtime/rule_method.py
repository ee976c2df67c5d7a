"""A server with a rule as the method of a run; see `asyncsgd.runtime.fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from asyncsgd.dispatcher import Dispatcher, Launched
from asyncsgd.packing import Plain
from asyncsgd.records.events import Record
from asyncsgd.runtime.base import STOPPED
from asyncsgd.runtime.fit import Arrived, Happened, Joined, Step


class RuleMethod:
    """Asks the server, and hands out batches.

    Args:
        dispatcher: of the server.
        clock: the training clock.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher, self._server, self._clock = dispatcher, dispatcher.server, clock

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def num_samples(self) -> int:
        return self._server.num_samples

    @property
    def parameters(self) -> Tensor:
        return self._server.parameters

    @property
    def cut_short(self) -> str | None:
        return self._dispatcher.cut_short

    def react(self, happened: Happened) -> Step:
        dispatcher = self._dispatcher
        if isinstance(happened, Arrived):
            worker, dispatch, version, vector, gradient, seconds, taken = happened
            began = self._clock()
            arrived = dispatcher.arrive(worker, dispatch, version, vector, gradient, seconds)
            now, outcome = self._clock(), arrived.outcome
            return Step(
                arrived.launched,
                outcome.abandoned,
                (),
                outcome.stepped,
                lambda: dispatcher.event(arrived, now, taken._replace(apply=taken.apply + now - began)),
            )
        if isinstance(happened, Joined):
            launched, record = dispatcher.join(happened.worker)
        else:
            if happened.reason == STOPPED and happened.worker in self._server.in_flight:
                dispatcher.draw_again(happened.worker)
            launched, record = dispatcher.leave(happened.worker, happened.reason)
        return Step(launched, record.abandoned, record.lost, bool(record.uses), lambda: record)

    @property
    def present(self) -> Sequence[int]:
        busy = self._server.in_flight
        return sorted(self._server.workers, key=lambda worker: (worker in busy, worker))

    def extend(self) -> tuple[Launched, Record | None]:
        return self._dispatcher.extend()

    def state_dict(self) -> Plain:
        return {"server": self._server.state_dict(), "dispatcher": self._dispatcher.state_dict()}

    def load_state_dict(self, state: Plain) -> None:
        self._server.load_state_dict(state["server"])
        self._dispatcher.load_state_dict(state["dispatcher"])
