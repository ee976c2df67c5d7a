"""When a run ends, when it evaluates, how it ends early, and the training clock: what every backend shares."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from asyncsgd.core.awake import awake
from asyncsgd.records.events import DIVERGED, DONE, Evaluation, Record
from asyncsgd.rules.contract import Rule

POLL_SECONDS = 0.5
"""How often a wait looks for Ctrl-C, and for workers that died before they connected, in seconds."""

Report = Callable[[Record], None]
"""Receives every record of a run, in order, in the process that owns the run folder."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a run ends: the first of these that is spent; shared by all workers, the same in every mode.

    `samples` counts samples that arrived, used or not, and is rounded up to whole arrivals. A run ends with the arrival
    that reaches it, and gradients in flight are then discarded. So, at the same learning rates, a run is exactly the
    beginning of a longer one, in which the other workers are still computing at that arrival. Only rules `in_rounds`
    and Hogwild's workers are given no more batches than the budget, and may differ from a longer run at the end.
    """

    samples: int | None = None
    """How many samples may arrive; None: no limit."""
    seconds: float | None = None
    """How long the run may train, in seconds of the training clock; None: no limit."""
    target_loss: float | None = None
    """The run ends at the first evaluation whose loss is at most this; None: no such end."""
    evaluate_every: int | None = None
    """How many samples arrive between two evaluations; None: they are spread evenly. See `EvaluationPoints`."""
    evaluate_at: int | None = None
    """The run evaluates once more when so many samples have arrived; None: it does not."""
    patience: int | None = None
    """The run ends after so many evaluations in a row without a new lowest loss. See `EarlyStop`."""
    keep_best: bool = False
    """Whether the parameters with the lowest evaluation loss are kept beside the last ones."""

    def spent_by(self, num_samples: int) -> bool:
        """Whether the budget in samples is spent when `num_samples` have arrived."""
        return self.samples is not None and num_samples >= self.samples

    def num_batches(self, batch_size: int) -> float:
        """How many batches make up the budget in samples; infinite if there is none."""
        return math.inf if self.samples is None else math.ceil(self.samples / batch_size)

    def to_hand_out(self, rule: Rule) -> int | None:
        """How many samples the server may hand out to workers under `rule`. None: as many as they ask for, until the
        run ends.
        """
        return self.samples if rule.in_rounds else None


class Interrupted(Exception):
    """The user asked the run to stop; raised between messages, never within a step."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The version with the lowest evaluation loss; of equal ones the first."""

    version: int
    num_samples: int
    eval_loss: float
    metrics: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended. `status` is DONE, FAILED, ... of `asyncsgd.records.events`; `message` is empty when it is DONE,
    unless the run stopped early.
    """

    status: str
    message: str = ""
    has_parameters: bool = True
    """Whether the leader knows the parameters of the last version. It does not if the process that had them was lost.
    """
    stopped_early: Mapping[str, Any] | None = None
    """Why the run ended before its budget was spent, as summary.json has it: too many evaluations in a row had no new
    lowest loss, or a callback asked for the end. None: neither of the two. So a run that reached its target loss has
    None too."""
    best: Best | None = None
    """The version with the lowest evaluation loss; None without ``Limits.keep_best``."""
    best_parameters: Tensor | None = None
    """`(P,)`, the parameters of `best`, on the CPU."""
    best_statistics: Tensor | None = None
    """`(S,)`, the running statistics of `best`; None if the model has none."""


class Points:
    """Increasing positions of which each is passed once.

    >>> points = Points([10.0, 20.0, 30.0])
    >>> points.next, points.take_up_to(25.0), points.next, points.take_up_to(26.0)
    (10.0, [10.0, 20.0], 30.0, [])
    """

    KEPT = ("_taken",)

    def __init__(self, positions: Iterable[float]) -> None:
        self._taken = -math.inf  # all points up to here are taken
        self._positions = iter(positions)
        self._next = next(self._positions, math.inf)

    @property
    def next(self) -> float:
        """The first point that is not taken; infinite if there is none."""
        return self._next

    def take_up_to(self, now: float) -> list[float]:
        """Take the points up to `now`, and return those that were not taken before."""
        taken = []
        while self._next <= now and self._next < math.inf:
            taken.append(self._next)
            self._next = next(self._positions, math.inf)
        self._taken = max(self._taken, now)
        return taken

    def restored(self) -> None:
        """Take the points up to where the state was. With a larger budget they lie elsewhere than they did then."""
        self.take_up_to(self._taken)


class EvaluationPoints:
    """The points at which a run evaluates: `count` of them, evenly over the budget, the last at its end.

    They are the same in every mode. The first update at or after a point in samples passes it. Without a budget in
    samples the points lie in training seconds. With ``limits.evaluate_every`` the points are its multiples in samples,
    and the end of a budget in samples; the end of a budget in seconds is then no point, and the loop evaluates there
    all the same. ``limits.evaluate_at`` is one more point in samples, whatever the others lie in.

    >>> points = EvaluationPoints(Limits(samples=100), count=4)
    >>> [points.in_samples.take_up_to(samples) for samples in (10, 30, 49, 80)]
    [[], [25.0], [], [50.0, 75.0]]
    >>> points = EvaluationPoints(Limits(seconds=60.0, evaluate_at=30), count=4)
    >>> points.in_samples.next, points.in_seconds.next
    (30, 15.0)
    """

    KEPT = ("in_samples", "in_seconds")

    def __init__(self, limits: Limits, count: int) -> None:
        every = limits.evaluate_every
        by_samples = limits.samples is not None or every is not None
        budget = limits.samples if by_samples else limits.seconds
        inner_points: Iterable[float]
        if every is not None and budget is None:
            inner_points = itertools.count(every, every)
        elif every is not None:
            inner_points = range(every, int(budget), every)  # type: ignore[arg-type]  # mypy forgets it is not None
        elif budget is not None:
            inner_points = (budget * k / count for k in range(1, count))
        else:
            inner_points = ()
        # The last point is the budget itself, since budget * count / count may differ from it in the last bit.
        last_point = () if budget is None else (budget,)
        points = itertools.chain(inner_points, last_point)
        extra_point = () if limits.evaluate_at is None else (limits.evaluate_at,)
        self.in_samples = Points(heapq.merge(points, extra_point) if by_samples else extra_point)
        self.in_seconds = Points(() if by_samples else points)


class TrainingClock:
    """Seconds of training. The clock starts with `resume` and stands still from `pause` to `resume`.

    It also stands still while the whole process does, after Ctrl-Z or in a laptop's sleep; see `asyncsgd.core.awake`.
    """

    KEPT = ("seconds",)

    def __init__(self) -> None:
        self._total = 0.0
        self._resumed_at: float | None = None  # on the clock of `awake`; None while the clock stands still

    @property
    def running(self) -> bool:
        return self._resumed_at is not None

    @property
    def seconds(self) -> float:
        return self._total + (0.0 if self._resumed_at is None else awake() - self._resumed_at)

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        """Stand still at `seconds`."""
        self._total = seconds
        self._resumed_at = None

    def pause(self) -> None:
        self._total = self.seconds
        self._resumed_at = None

    def resume(self) -> None:
        self._resumed_at = awake()


def diverged(what: str, why: str = "") -> Result:
    """The result of a run whose loss is not finite.

    Args:
        what: says which loss it is, and its value.
        why: what is wrong, where that is known; empty: advice stands in its place.
    """
    return Result(DIVERGED, f"{what}; {why or 'try a smaller --learning-rate, a longer --warmup or --clip-norm 1'}")


class EarlyStop:
    """What evaluations mean for a run: it is DIVERGED, has reached its target, has had no new lowest loss for too long,
    or goes on.

    With ``limits.patience`` the run ends after so many evaluations in a row without a new lowest loss. The evaluation
    at the end of the budget ends no run early.

    >>> early_stop = EarlyStop(Limits(patience=2))
    >>> losses = [2.0, 1.0, 1.5, 0.5, 0.5, 0.5]
    >>> looked_at = [Evaluation(k, 10 * k, 0.0, loss, None, {}, 0.0) for k, loss in enumerate(losses)]
    >>> [early_stop.observe(evaluation) is not None for evaluation in looked_at]
    [False, False, False, False, False, True]
    """

    KEPT = (
        "_best_loss",
        "_best_samples",
        "_since",
        "_newest",
        "_stopped_by",
        "best",
        "best_parameters",
        "best_statistics",
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._best_loss = math.inf
        self._best_samples = 0
        self._since = 0  # evaluations since the one with the lowest loss
        self._newest: tuple[float, int] | None = None  # loss and samples of the newest evaluation
        self._stopped_by: dict[str, str] | None = None
        self.best: Best | None = None
        self.best_parameters: Tensor | None = None
        self.best_statistics: Tensor | None = None

    def observe(
        self,
        evaluation: Evaluation,
        parameters: Callable[[], Tensor] | None = None,
        statistics: Tensor | None = None,
        *,
        last: bool = False,
    ) -> Result | None:
        """Take in an evaluation and return how the run ends with it; None: it goes on.

        The loop calls it once with every evaluation, in order.

        Args:
            parameters: returns those that were evaluated, `(P,)`; they are copied if they are the best.
                Synchronous ranks gather them together, so either all ranks call it or none does.
            statistics: the running statistics that were evaluated, `(S,)`; copied likewise.
            last: whether the budget is spent, so that the evaluation ends no run early. This object sees by itself that
                a budget in samples is spent, but not that one in seconds is.
        """
        loss = evaluation.loss
        if not math.isfinite(loss):
            return diverged(f"the evaluation loss at version {evaluation.version} is not finite")
        if loss < self._best_loss:
            self._best_loss = loss
            self._best_samples = evaluation.total_samples
            self._since = 0
            if self._limits.keep_best and parameters is not None:
                self.best = Best(evaluation.version, evaluation.total_samples, loss, evaluation.metrics)
                self.best_parameters = parameters().detach().to("cpu", copy=True)
                self.best_statistics = None if statistics is None else statistics.clone()
        else:
            self._since += 1
        self._newest = loss, evaluation.total_samples
        return self.verdict(last=last)

    def request_stop(self, stopped_by: Mapping[str, str] | None) -> None:
        """Let the run end with the next evaluation that is observed, because a callback asks for it; None: none asks.

        Args:
            stopped_by: see `asyncsgd.core.loop.CallbackAnswer`.
        """
        if stopped_by is not None:
            self._stopped_by = dict(stopped_by)

    def verdict(self, *, last: bool = False) -> Result | None:
        """How the run ends with the evaluations so far; None: it goes on.

        A resumed run asks this before it trains: one that patience, its target or a callback has ended stays ended,
        with a larger budget too.

        Args:
            last: see `observe`.
        """
        limits = self._limits
        if self._newest is None:
            return None
        loss, num_samples = self._newest
        if limits.target_loss is not None and loss <= limits.target_loss:
            return Result(DONE)
        if last or limits.spent_by(num_samples):
            return None
        if self._stopped_by is not None:
            reason = self._stopped_by["reason"]
            message = f"stopped early at {num_samples} samples by {self._stopped_by['by']}"
            return Result(DONE, f"{message}: {reason}" if reason else message, stopped_early=self._stopped_by)
        if limits.patience is None or self._since < limits.patience:
            return None
        message = (
            f"stopped early: {self._since} evaluation{'s' * (self._since > 1)} without a loss below "
            f"{self._best_loss:.4f}, that at {self._best_samples} samples"
        )
        stopped = {
            "evaluations_without_improvement": self._since,
            "best_loss": self._best_loss,
            "best_samples": self._best_samples,
        }
        return Result(DONE, message, stopped_early=stopped)

    def restored(self) -> None:
        """Bring the best version to the CPU, where it belongs: a state is loaded to the device of the parameters."""
        if self.best_parameters is not None:
            self.best_parameters = self.best_parameters.cpu()
        if self.best_statistics is not None:
            self.best_statistics = self.best_statistics.cpu()

    def with_best(self, result: Result) -> Result:
        """`result` with the version that had the lowest evaluation loss."""
        return dataclasses.replace(
            result, best=self.best, best_parameters=self.best_parameters, best_statistics=self.best_statistics
        )
