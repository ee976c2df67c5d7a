"""Which gradients a server starts: with which batches, and at which parameters. `Server` derives from this.

Shapes: P parameters (gaps of the flat vector included), S running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from asyncsgd.core.batches import BatchSource
from asyncsgd.core.protocol import Pinned, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.core.schedules import Schedule
from asyncsgd.rules.contract import Rule, Start, View


class Starter:
    """Starts workers on the gradients that a rule asks for.

    Args:
        parameters: float32 `(P,)`; borrowed, and changed in place, by this object alone except in Hogwild.
        rule: decides what becomes of each gradient.
        schedule: learning rate as a function of the samples that arrived; in a rule with `local_steps` it is the
            workers' learning rate, fixed when they start, and the server's own is 1.
        batches: hands out the run's batches.
        num_workers: N, workers 0 to N - 1.
        batch_size: samples of one batch.
        samples: no worker starts once so many samples have arrived. None: there is no such budget.
        clock: the training clock, in seconds.
        starts_by_itself: whether this object starts workers as soon as the rule and the batches allow. If not, a replay
            of a log starts them with `start`.
        statistics: the model's running statistics. With a step they follow the gradients that it uses, each of them
            once. None: the model has none.
    """

    def __init__(
        self,
        parameters: Tensor,
        rule: Rule,
        schedule: Schedule,
        batches: BatchSource,
        *,
        num_workers: int,
        batch_size: int,
        samples: float | None,
        clock: Callable[[], float],
        starts_by_itself: bool,
        statistics: RunningStatistics | None,
    ) -> None:
        self.parameters = parameters
        self.rule = rule
        self.num_samples = 0
        """The number of samples that have arrived, used or not. Budgets and the learning rate count these."""
        self.statistics = statistics
        self._schedule = schedule
        self._batches = batches
        self._batch_size = batch_size
        self._samples_budget = math.inf if samples is None else samples
        self._clock = clock
        self._starts_by_itself = starts_by_itself
        self._local_steps = rule.local_steps
        self._needs_points = rule.needs_points
        self._exact = rule.exact_start or rule.needs_points
        self.view = View(parameters=parameters if rule.needs_points else None)
        self.view.learning_rate = 1.0 if self._local_steps else schedule(0)
        self._present: set[int] = set()  # the view's workers, as a set, since each start looks for its worker
        self._snapshot: tuple[int, Tensor, Tensor | None] | None = None
        self._arriving_statistics: tuple[int, Tensor] | None = None
        """The worker whose gradient has just arrived, and the running statistics of its copy of the model, `(S,)`. None
        while no arrival is handled."""
        self._waiting: dict[int, Start | Pinned] = {}
        """Worker -> its start, of workers that the rule asked for and that have no batch yet. The budget is spent, or
        it has room for a part of the last round only. In a replay every start waits here until the log has it."""
        self._draws = [0] * num_workers  # how many computing times each worker has used; see `Work.draw`
        self._budget_cuts = False  # whether a worker got fewer batches than the rule asked for
        # One entry per dispatch, for good: a rule with a table of gradients uses a dispatch as often as it likes.
        self._read_versions = list[int]()
        self._worker_of = list[int]()

    @property
    def version(self) -> int:
        """The number of updates that the parameters have taken."""
        return self.view.version

    def snapshot(self) -> tuple[Tensor, Tensor | None]:
        """A copy of the parameters and the running statistics of the current version. All who ask for one version share
        it, so it is not to be changed.
        """
        if self._snapshot is None or self._snapshot[0] != self.version:
            statistics = None if self.statistics is None else self.statistics.values.clone()
            self._snapshot = (self.version, self.parameters.clone(), statistics)
        return self._snapshot[1:]

    def start(self, worker: int, max_batches: int) -> Work | None:
        """Start `worker` on at most `max_batches` batches if the rule has asked for it. None: the rule has not.

        A replay calls it, in an object with ``starts_by_itself=False``.
        """
        waiting = self._waiting.pop(worker, None)
        if waiting is None:
            return None
        count = min(max_batches, waiting.num_local_steps)
        started = self._dispatch([msgspec.structs.replace(waiting, num_local_steps=count)])
        return started[0] if started else None

    def _is_stuck(self) -> bool:
        """Whether workers are present and the budget is not spent, but nobody computes and nobody waits to."""
        if self.view.in_flight or self._waiting or not self._present:
            return False
        return self._starts_by_itself and self.num_samples < self._samples_budget

    def _started_again(self, work: Work) -> Start | Pinned:
        """The start with which the worker of `work` begins again, whose batch had no loss term.

        It starts at its old point if the rule has `exact_start`, since that rule chose the version. It also does in a
        rule with both local steps and points, since there each worker goes on from a model of its own (elastic
        averaging, Downpour). Otherwise it starts at the current parameters, also if it had an offset: a rule that
        only looks at points gains nothing from old ones, and one with offsets knows of `exact_start`.
        """
        keeps_own_parameters = self._local_steps and self._needs_points
        if work.point is not None and (self.rule.exact_start or keeps_own_parameters):
            return Pinned(work.worker, work.num_local_steps, work.version, work.point, work.statistics)
        return self._pinned(Start(work.worker, work.num_local_steps))

    def _pinned_if_exact(self, starts: Sequence[Start]) -> Sequence[Start | Pinned]:
        """The same starts, each with its parameters if it is to begin at exactly these; see `Pinned`."""
        if not self._exact and all(start.offset is None for start in starts):
            return starts
        return [self._pinned(start) for start in starts]

    def _pinned(self, start: Start) -> Start | Pinned:
        """One start; see `_pinned_if_exact`."""
        if start.offset is None and not self._exact:
            return start
        if start.offset is not None:
            point = self.parameters + start.offset
            statistics = self._statistics_of(start.worker)
        else:
            point, statistics = self.snapshot()
        return Pinned(start.worker, start.num_local_steps, self.version, point, statistics)

    def _statistics_of(self, worker: int) -> Tensor | None:
        """`(S,)`, the running statistics of a worker that starts at an offset from the server's parameters. After local
        steps it goes on from its own; otherwise it gets a copy of the server's.
        """
        arriving = self._arriving_statistics
        if self._local_steps and arriving is not None and arriving[0] == worker:
            return arriving[1]
        return None if self.statistics is None else self.statistics.values.clone()

    def _start_all_possible(self, starts: Sequence[Start | Pinned]) -> Sequence[Work]:
        """Start the workers that wait and those in `starts`, as far as there are batches. The others wait.

        Once the budget is spent nobody starts.
        """
        waiting = self._waiting
        may_start = self._starts_by_itself and self.num_samples < self._samples_budget
        if may_start and not waiting:
            return self._dispatch(starts)
        for start in starts:
            waiting.pop(start.worker, None)  # one that waits may be started again: the last counts, also for the order
            waiting[start.worker] = start
        if not may_start:
            return ()
        starts = list(waiting.values())
        waiting.clear()
        return self._dispatch(starts)

    def _dispatch(self, starts: Sequence[Start | Pinned]) -> list[Work]:
        """Dispatch a gradient to each worker in `starts`: give it batches, and put its work in flight. If no batch is
        left, the workers that have none wait.
        """
        view = self.view
        draws = self._draws
        now = self._clock()
        rate = None
        works: list[Work] = []
        for place, start in enumerate(starts):
            worker = start.worker
            num_asked = start.num_local_steps
            if worker in view.in_flight or worker not in self._present:
                state = "busy" if worker in view.in_flight else "not present"
                raise RuntimeError(f"rule {self.rule.name} started worker {worker}, which is {state}")
            batches, num_given = self._batches.take(worker, num_asked)
            if num_given < num_asked:
                self._budget_cuts = True
                if not num_given:  # nor will those after it get any
                    self._waiting.update([(waiting.worker, waiting) for waiting in starts[place:]])
                    break
            if self._local_steps:  # at the rate that holds when its samples have arrived, if no others arrive meanwhile
                rate = self._schedule(self.num_samples + num_given * self._batch_size)
            version = view.version
            point = None
            statistics = None
            if isinstance(start, Pinned):
                version = start.version
                point = start.point
                statistics = start.statistics
            dispatch = len(self._worker_of)
            work = Work(
                worker, dispatch, version, num_given, batches, point, rate, now, draws[worker], statistics=statistics
            )
            self._worker_of.append(worker)
            self._read_versions.append(-1)
            draws[worker] += num_given
            view.in_flight[worker] = work
            works.append(work)
        return works
