"""The one loop: what comes next, what follows from it, the evaluations on the way, and the end.

A `Method` decides: a server with a rule. A `Backend` computes, and knows what time it is. `Fit` asks the backend what
happens next, tells the method, and lets the backend start and stop what follows. Budget, evaluation points, records and
checkpoints are kept here, once for all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

from asyncsgd.dispatcher import Launched
from asyncsgd.evaluation import Measured
from asyncsgd.packing import Plain, classes_in, pack, unpack
from asyncsgd.records.events import (
    DONE,
    FAILED,
    INTERRUPTED,
    Evaluation,
    Fault,
    Gradient,
    MemoryUsed,
    Record,
    StagesUsed,
    Taken,
)
from asyncsgd.runtime.base import Budget, EvaluationPoints, Judge, NeverSaves, Report, Result, Saver, diverged


class Joined(NamedTuple):
    """`worker` takes part from now on."""

    worker: int


class Left(NamedTuple):
    """`worker` is gone, and so is what it had in flight."""

    worker: int
    reason: str = ""


class Arrived(NamedTuple):
    """A gradient that was in flight is there."""

    worker: int
    dispatch: int
    read_version: int
    """The version at which it was computed."""
    vector: Tensor
    """`(P,)`, the backend's own; valid until it is asked for what happens next."""
    gradient: Gradient
    flight_seconds: float
    taken: Taken


Happened = Joined | Left | Arrived


class Step(NamedTuple):
    """What follows from something that happened."""

    launched: Launched
    """Gradients that start now."""
    abandoned: tuple[int, ...]
    """Dispatches in flight that nobody waits for any more; their workers live."""
    lost: tuple[int, ...]
    """Dispatches that were in flight with a worker that is gone."""
    changed: bool
    """Whether what is evaluated has changed."""
    record: Callable[[], Record]
    """Makes the record of what happened; to be called before anything else happens."""


class Nobody(Exception):
    """Nothing will ever happen again; the message says why, and what to type."""


class Method(Protocol):
    """What decides. It knows no time, no budget and no records' file."""

    @property
    def version(self) -> int:
        """Of what is evaluated."""

    @property
    def num_samples(self) -> int:
        """That have arrived, used or not."""

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, what is evaluated."""

    @property
    def cut_short(self) -> str | None:
        """Why a run with a larger budget would have gone on otherwise from here; None: it would not."""

    def react(self, happened: Happened) -> Step:
        """What follows."""

    def extend(self) -> tuple[Launched, Record | None]:
        """Start who was to start when the budget of the state that was loaded was spent, and the record of it."""

    def state_dict(self) -> Plain:
        """See `asyncsgd.packing`."""

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, which may hold more."""


class Backend(Protocol):
    """What computes gradients, and what time it is."""

    @property
    def now(self) -> float:
        """The training clock, in seconds; it stands still during evaluations."""

    @property
    def present(self) -> Sequence[int]:
        """The workers that are there from the beginning, in the order in which they join."""

    @property
    def settled(self) -> bool:
        """Whether the method has heard of all that has changed what is evaluated; else no state can be taken."""

    def running(self) -> AbstractContextManager[None]:
        """A context around all that happens after the first evaluation."""

    def next(self, until: float) -> Happened | None:
        """What happens next, with the clock at its time; None, with the clock at `until` or just behind it, if that
        comes first.

        Raises:
            Nobody: if nothing is to come.
        """

    def follow(self, launched: Launched, abandoned: tuple[int, ...] = (), lost: tuple[int, ...] = ()) -> None:
        """Start what is launched, and stop the rest; see `Step`."""

    def evaluate(self, parameters: Tensor) -> Measured:
        """Evaluate `parameters` exactly."""

    def state_dict(self) -> Plain:
        """See `asyncsgd.packing`."""

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state`, which may hold more."""


@dataclasses.dataclass(frozen=True)
class Sink:
    """Who hears of a run, and who may stop it."""

    report: Report | None = None
    """Receives the records; None where nobody wants them, only `Fit.evaluations`."""
    saver: Saver = NeverSaves()  # noqa: RUF009 - it has no state
    """Takes states for checkpoints, and one when the run is asked to stop."""
    stop_requested: Callable[[], bool] = lambda: False
    """Looked at between events."""


class Fit:
    """Runs one training.

    Args:
        budget: when to stop; ``samples=0`` evaluates once and stops.
        evaluations: how many after the first; see `EvaluationPoints`. In seconds they are at exact points of time.
        parameters: gives what is evaluated, `(P,)`, where ranks hold it; None: the method does.
    """

    def __init__(
        self,
        method: Method,
        backend: Backend,
        budget: Budget,
        evaluations: int,
        sink: Sink,
        parameters: Callable[[], Tensor] | None = None,
    ) -> None:
        self._method, self._backend, self._budget, self._sink = method, backend, budget, sink
        self._parameters = parameters or (lambda: method.parameters)
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self.evaluations: list[Evaluation] = []
        self.num_arrivals = 0

    @property
    def train_seconds(self) -> float:
        """The training clock."""
        return self._backend.now

    def run(self) -> Result:
        """Train until the budget is spent; called once, on a new object or on one that has loaded a state.

        Returns:
            DONE; DIVERGED when a loss is not finite; FAILED when nothing can happen any more; INTERRUPTED.
        """
        goes_on, saver = bool(self.evaluations), self._sink.saver
        result = self._go_on() if goes_on else self._evaluate()
        if result is None and self._budget.samples != 0:
            with self._backend.running():
                for worker in () if goes_on else self._backend.present:
                    self._react(Joined(worker))
                while result is None:
                    result = self._advance()
                    if result is None and self._backend.settled and saver.due(self._method.num_samples):
                        self._save()
            if result.status == INTERRUPTED:
                self._save()
        if (result is None or result.status == DONE) and self.evaluations[-1].version != self._method.version:
            result = self._evaluate(last=True) or Result(DONE)
        result = result or Result(DONE)
        if result.status == DONE and self.num_arrivals and saver.due(self._method.num_samples, at_end=True):
            self._save()
        return self._judge.with_best(result)

    def state_dict(self) -> Plain:
        """All that decides the rest of a run that was stopped; see `asyncsgd.packing`.

        Of the method and the backend too. A run that has loaded it goes on as if it had never stopped.
        """
        return {
            **self._method.state_dict(),
            **self._backend.state_dict(),
            "points": self._points.state_dict(),
            "judge": self._judge.state_dict(),
            "evaluations": pack(self.evaluations),
            "num_arrivals": self.num_arrivals,
        }

    def load_state_dict(self, state: Plain) -> None:
        """Go on from `state` at the next `run`."""
        self._method.load_state_dict(state)
        self._backend.load_state_dict(state)
        self._points.load_state_dict(state["points"])
        self._judge.load_state_dict(state["judge"])
        self.evaluations = unpack(state["evaluations"], classes_in("asyncsgd.records.events"))
        self.num_arrivals = state["num_arrivals"]

    def _save(self) -> None:
        self._sink.saver.save(
            self.state_dict(),
            version=self._method.version,
            num_samples=self._method.num_samples,
            train_seconds=self.train_seconds,
            cut_short=self._method.cut_short,
        )

    def _go_on(self) -> Result | None:
        """Start what the smaller budget of the state had kept from starting; the result, if the run had ended."""
        result = self._judge.verdict()
        if result is None:
            launched, record = self._method.extend()
            self._backend.follow(launched)
            if record is not None:
                self._report(record)
        return result

    def _advance(self) -> Result | None:
        """Handle what comes next; the result, once the run is over."""
        if self._backend.settled and self._sink.stop_requested():
            return Result(INTERRUPTED, "interrupted by the user")
        if self._budget.spent_by(self._method.num_samples):
            return Result(DONE)
        limit = math.inf if self._budget.seconds is None else self._budget.seconds
        try:
            # At a point of time all that arrived up to then has been applied.
            happened = self._backend.next(limit if self._points.by_samples else min(limit, self._points.next))
        except Nobody as why:
            return Result(FAILED, str(why))
        if happened is not None:
            return self._react(happened)
        now = self._backend.now
        if not self._points.by_samples and self._points.passed(self._method.num_samples, now):
            result = self._evaluate(last=now >= limit)
            if result is not None:
                return result
        return Result(DONE) if now >= limit else None

    def _react(self, happened: Happened) -> Result | None:
        """Tell the method, carry out what follows, write it down, and evaluate if a point is passed."""
        method = self._method
        step = method.react(happened)
        self._backend.follow(step.launched, step.abandoned, step.lost)
        if self._sink.report is not None:
            self._sink.report(step.record())
        if isinstance(happened, Arrived):
            self.num_arrivals += 1
            if not math.isfinite(happened.gradient.loss):
                what = (
                    f"the loss of worker {happened.worker} at version {happened.read_version} is "
                    f"{happened.gradient.loss}"
                )
                self._report(Fault(what, happened.worker, method.version, self.train_seconds))
                return diverged(what)
        passed = (
            self._points.by_samples and step.changed and self._points.passed(method.num_samples, self.train_seconds)
        )
        if isinstance(happened, Arrived) and self._budget.spent_by(method.num_samples):
            return self._evaluate() or Result(DONE)
        return self._evaluate() if passed else None

    def _evaluate(self, *, last: bool = False) -> Result | None:
        method = self._method
        measured = self._backend.evaluate(method.parameters)
        version, num_samples, seconds = method.version, method.num_samples, self.train_seconds
        evaluation = measured.record(version=version, num_samples=num_samples, train_seconds=seconds)
        self.evaluations.append(evaluation)
        self._report(evaluation)
        if measured.peak_bytes:
            self._report(MemoryUsed(measured.peak_bytes, version, num_samples, seconds))
        if measured.stages:
            self._report(StagesUsed(measured.stages, version, num_samples, seconds))
        return self._judge.of(evaluation, self._parameters, last=last)

    def _report(self, record: Record) -> None:
        if self._sink.report is not None:
            self._sink.report(record)
