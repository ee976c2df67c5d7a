"""The one loop: what comes next, what follows from it, the evaluations on the way, and the end.

A `Method` decides: a server with a rule, or peers. A `Backend` computes, and knows what time it is. `Loop` asks the
backend what happens next, tells the method, and lets the backend start and stop what follows. Budget, evaluation
points, records and checkpoints are kept here, once for all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from asyncsgd.core.checkpoints import Saver
from asyncsgd.core.limits import (
    EarlyStop,
    EvaluationPoints,
    Interrupted,
    Limits,
    Report,
    Result,
    diverged,
)
from asyncsgd.core.protocol import Arrived, Backend, Happened, Joined, Left, Method, NoWorkerLeft, Step, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.core.state import state_of
from asyncsgd.errors import UsageError
from asyncsgd.records.events import (
    DONE,
    FAILED,
    INTERRUPTED,
    SCORE,
    STOPPED,
    Evaluation,
    Fault,
    MemoryUsed,
    Record,
    StagesUsed,
)


@dataclasses.dataclass(frozen=True)
class CallbackAnswer:
    """What the user's callbacks answer after they were shown an evaluation."""

    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """The metrics that the callbacks computed, by name."""
    stopped_by: Mapping[str, str] | None = None
    """If a callback asks for the end of the run: its name under ``by``, and why under ``reason``. The summary has it
    so. None: no callback asks."""
    error: str | None = None
    """What went wrong in a callback, whose metrics are then missing; None: nothing."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Whom the loop tells of a run, and whom it asks whether to stop."""

    report: Report | None = None
    """Receives every record. None: no records are wanted; `Loop.evaluations` is kept all the same."""
    saver: Saver | None = None
    """Takes states for checkpoints, one when the run is asked to stop, and one at the end of a run that is done, if
    any are due; None: no state is taken."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the user has asked to stop. The loop calls it between two things that happen."""
    explain: Callable[[Work], str] = lambda work: ""
    """Says what is wrong with the batch of a work whose loss is not finite, e.g. that all its targets are ignored;
    empty if the batch is right."""
    look: Callable[[Evaluation, Tensor, Tensor | None], CallbackAnswer] | None = None
    """The user's callbacks: called with every evaluation and the parameters, `(P,)`, and running statistics, `(S,)`,
    that were evaluated. None: there are none."""


class Loop:
    """Runs one training.

    Args:
        limits: when to stop; ``samples=0`` evaluates once and stops.
        num_evaluations: how many evaluations follow the first; see `EvaluationPoints`. If these lie in seconds, the
            virtual clock stops exactly at them, and a real one just past them.
        parameters: returns the parameters that are evaluated, `(P,)`, for callbacks and for the best version. None:
            those of the method. Synchronous ranks give a function that gathers them: the ranks hold the parameters,
            each a copy or a part. `Method.parameters` is then empty, and the backend evaluates what the ranks hold.
        statistics: the model's running statistics, which are evaluated with the parameters; None: it has none.
    """

    KEPT = ("method", "backend", "_points", "early_stop", "evaluations", "num_arrivals", "_evaluation_due", "_changed")

    def __init__(
        self,
        method: Method,
        backend: Backend,
        limits: Limits,
        num_evaluations: int,
        hooks: Hooks,
        parameters: Callable[[], Tensor] | None = None,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self.method = method
        self.backend = backend
        self._limits = limits
        self._hooks = hooks
        self._parameters = parameters or (lambda: method.parameters)
        self._statistics = statistics
        self._points = EvaluationPoints(limits, num_evaluations)
        """When an evaluation is due. These points lie in samples or seconds; `Work.point` is a vector of parameters."""
        self.early_stop = EarlyStop(limits)
        """Also keeps the parameters of the lowest loss, and finds divergence."""
        self.evaluations: list[Evaluation] = []
        self.num_arrivals = 0
        self._evaluation_due = False
        """Whether an evaluation is to be made or is being made. If Ctrl-C interrupts an evaluation, the state is saved
        with this flag set, and the resumed run evaluates first.
        """
        self._changed = False
        """Whether the parameters have changed since the last evaluation; see `Step.changed`."""

    def run(self) -> Result:
        """Train until the budget is spent; called once, on a new object or on one that has loaded a state.

        Returns:
            DONE; DIVERGED when a loss is not finite; FAILED when nothing can happen any more; INTERRUPTED.
        """
        try:
            result = self._run()
        except Interrupted:
            result = Result(INTERRUPTED, "interrupted by the user")
        except NoWorkerLeft as why:
            result = Result(FAILED, str(why))
        # Without a first evaluation there is nothing to go on from: such a run begins anew.
        if result.status == INTERRUPTED and self.evaluations:
            self._save()
        return self.early_stop.with_best(result)

    def _run(self) -> Result:
        resumed = bool(self.evaluations)
        result = self._resume() if resumed else self._evaluate()
        if result is None and self._limits.samples != 0:
            result = self._train(resumed)
        if result is None or result.status == DONE:
            self._freeze()  # tells the method of the last steps of Hogwild's workers
            if self._changed:  # else the last evaluation has seen these parameters
                result = self._evaluate(last=True)
        if result is None:
            result = Result(DONE)
        # A run that has only evaluated has nothing to go on from.
        if result.status == DONE and self.num_arrivals and self._is_checkpoint_due(at_end=True):
            self._save()
        return result

    def _train(self, resumed: bool) -> Result:
        """Handle what happens until the run is over."""
        with self.backend.running():
            # After a resume workers join only where `_resume` has let all of them leave. Elsewhere they are present,
            # with their gradients in flight.
            all_join = not resumed or self.backend.loses_flights
            if all_join:
                for worker in self.backend.present:
                    self._tell(Joined(worker))
            while True:
                result = self._advance()
                if result is not None:
                    return result
                if self.backend.may_stop and self._is_checkpoint_due():
                    self._save()

    def _is_checkpoint_due(self, *, at_end: bool = False) -> bool:
        saver = self._hooks.saver
        return saver is not None and saver.due(self.method.num_samples, at_end=at_end)

    def _freeze(self) -> None:
        """Let the backend keep the parameters fixed, and tell the method of the steps that Hogwild's workers have taken
        by then."""
        for arrived in self.backend.freeze():
            self._tell(arrived)

    def _save(self) -> None:
        if self._hooks.saver is None:
            return
        self._freeze()
        self._hooks.saver.save(
            state_of(self),
            version=self.method.version,
            num_samples=self.method.num_samples,
            train_seconds=self.backend.now,
            cut_short=self.method.cut_short,
        )

    def _resume(self) -> Result | None:
        """Go on from the state that was loaded: let all workers leave if gradients in flight are lost, otherwise start
        those that the smaller budget of that state kept waiting. Evaluate if the run was stopped during an evaluation.

        Returns:
            How the run ended, if it had ended before or ends with this evaluation; None: it goes on.
        """
        num_samples = self.method.num_samples
        is_spent = self._limits.spent_by(num_samples)
        if not self._evaluation_due:
            ended = self.early_stop.verdict()
            if ended is not None:
                return ended
            if is_spent:
                return Result(DONE)
        if self.backend.loses_flights:
            for worker in self.method.present:
                self._tell(Left(worker, STOPPED))
        else:
            step = self.method.extend()
            if step is not None:
                self._carry_out(step)
        if self._evaluation_due:
            return self._evaluate(last=is_spent)
        return None

    def _advance(self) -> Result | None:
        """Handle what comes next; return how the run ended, once it is over."""
        if self.backend.may_stop and self._hooks.stop_requested():
            raise Interrupted
        # The steps of Hogwild's workers that `_freeze` tells of may have spent the budget.
        if self._limits.spent_by(self.method.num_samples):
            return Result(DONE)
        end = math.inf if self._limits.seconds is None else self._limits.seconds
        # The backend stops at the next evaluation that is due at a time, so that it sees all that arrived up to then.
        happened = self.backend.next(min(end, self._points.in_seconds.next))
        if happened is None:
            return self._pass_time(self.backend.now, end)
        changed = self._tell(happened)
        if isinstance(happened, Arrived):
            gradient = happened.gradient
            if gradient.weight and not math.isfinite(gradient.loss):
                return self._diverged(happened)
        # The evaluation points that this update has reached are taken, even if the run ends now.
        reached = self._points.in_samples.take_up_to(self.method.num_samples) if changed else []
        if isinstance(happened, Arrived) and self._limits.spent_by(self.method.num_samples):
            # The last evaluation stands at the budget, so it is made even if this arrival was dropped.
            return self._evaluate(last=True) or Result(DONE)
        if reached:
            return self._evaluate()
        return None

    def _pass_time(self, now: float, end: float) -> Result | None:
        """Evaluate if an evaluation is due at the time `now` of the training clock, and end the run at the time
        `end`."""
        if self._points.in_seconds.take_up_to(now):
            result = self._evaluate(last=now >= end)
            if result is not None:
                return result
        return Result(DONE) if now >= end else None

    def _diverged(self, arrived: Arrived) -> Result:
        loss = arrived.gradient.loss
        worker = arrived.work.worker
        what = f"the loss of worker {worker} at version {arrived.read_version} is {loss}"
        self._report(Fault(what, worker, self.method.version, self.backend.now))
        return diverged(what, self._hooks.explain(arrived.work))

    def _tell(self, happened: Happened) -> bool:
        """Tell the method, carry out what follows, and return whether the parameters have changed."""
        step = self.method.react(happened)
        self._carry_out(step)
        if step.changed:
            self._changed = True
        if isinstance(happened, Arrived):
            self.num_arrivals += 1
        return step.changed

    def _carry_out(self, step: Step) -> None:
        """Stop and start gradients, and report what happened."""
        if step.stop:
            self.backend.stop(step.stop)
        if step.start:
            self.backend.start(step.start)
        if step.record is not None and self._hooks.report is not None:
            self._hooks.report(step.record)

    def _evaluate(self, *, last: bool = False) -> Result | None:
        """Evaluate the current parameters; return how the run ended, if the evaluation ends it.

        Args:
            last: whether the budget is spent, so that nothing can end the run early any more.
        """
        self._evaluation_due = True
        self._freeze()
        measured = self.backend.evaluate(self.method.parameters)
        version = self.method.version
        num_samples = self.method.num_samples
        seconds = self.backend.now
        # The running statistics that the evaluation used, which may be a new estimate and not the server's own.
        statistics = None if self._statistics is None else self._statistics.evaluated
        evaluation = measured.record(version=version, num_samples=num_samples, train_seconds=seconds)
        answer = CallbackAnswer()
        if self._hooks.look is not None:
            answer = self._hooks.look(evaluation, self._parameters(), statistics)
            evaluation = msgspec.structs.replace(evaluation, metrics={**evaluation.metrics, **answer.metrics})
            self.early_stop.request_stop(answer.stopped_by)
        error = answer.error if measured.score_error is None else measured.score_error
        if error is not None and not self.evaluations:
            raise UsageError(error)  # at the first evaluation nothing is lost yet; later ones go on without scores
        self.evaluations.append(evaluation)
        self._evaluation_due = False
        self._changed = False
        self._report(evaluation)
        if error is not None:
            self._report(Fault(error, None, version, seconds, SCORE))
        if measured.peak_bytes:
            self._report(MemoryUsed(version, num_samples, seconds, measured.peak_bytes))
        if measured.stages:
            self._report(StagesUsed(version, num_samples, seconds, measured.stages))
        return self.early_stop.observe(evaluation, self._parameters, statistics, last=last)

    def _report(self, record: Record) -> None:
        if self._hooks.report is not None:
            self._hooks.report(record)
