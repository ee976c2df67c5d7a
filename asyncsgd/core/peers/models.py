"""Workers that each keep a model and an optimizer of their own, in place of a server.

Every gradient is computed at the exact point at which it started. What is evaluated and saved is the mean of the
workers' models. In the records of an arrival `version` and `read_version` count the changes of the model of its worker;
in evaluations `version` counts what the docstring of the subclass says.

Shapes: N workers, P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from asyncsgd.core.batches import BatchSource
from asyncsgd.core.flat import cannot_freeze
from asyncsgd.core.optimizers import Optimizer, PlainSGD
from asyncsgd.core.protocol import Arrived, Happened, Joined, Step, Work
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.core.schedules import Schedule
from asyncsgd.records.events import APPLIED, DROPPED, Event, Extended, Membership, Started
from asyncsgd.rules.contract import PeerRule, View

R = TypeVar("R", bound=PeerRule)


class Peers(abc.ABC, Generic[R]):
    """The method of a run without a server. All workers take part from beginning to end.

    Args:
        rule: what is done with a gradient.
        parameters: `(P,)`, where all start; borrowed: the mean of the models is written there by `parameters`.
        optimizer_on: makes the optimizer of one worker's model, `(P,)`.
        schedule, batches, batch_size, clock, starts_by_itself: as of `asyncsgd.core.server.Server`.
        num_workers: N, workers 0 to N - 1.
        samples: no worker starts once so many samples have arrived.
        seed: the seed of what is random in the method.
        statistics: the running statistics of the mean model; None: the model has none. Every worker's model has its
            own, which follow its gradients and are averaged with its parameters.
    """

    rule_acted = None  # there is no server that could do something else than asynchronous SGD
    KEPT: ClassVar[tuple[str, ...]] = (
        "parameters",
        "view",
        "versions",
        "num_samples",
        "_vectors",
        "_optimizers",
        "_batches",
        "_num_arrived",
        "_num_dispatches",
        "_waiting",
        "_waited",
        "_draws",
        "_is_cut",
        "statistics",
        "_statistics",
    )

    def __init__(
        self,
        rule: R,
        parameters: Tensor,
        optimizer_on: Callable[[Tensor], Optimizer | PlainSGD],
        schedule: Schedule,
        batches: BatchSource,
        *,
        num_workers: int,
        batch_size: int = 1,
        samples: float | None = None,
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        starts_by_itself: bool = True,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self.statistics = statistics
        initial = torch.zeros(0) if statistics is None else statistics.values
        self._statistics = initial.repeat(num_workers, 1)  # (N, S)
        self.rule = rule
        self._mean = parameters
        self._vectors = parameters.detach().repeat(num_workers, 1)  # (N, P), what the optimizers step
        self._optimizers = {worker: optimizer_on(vector) for worker, vector in enumerate(self._vectors)}
        self._schedule = schedule
        self._batches = batches
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._samples = samples
        self._seed = seed
        self._clock = clock
        self._starts_by_itself = starts_by_itself
        self.present = range(num_workers)
        self.view = View(workers=range(num_workers))
        self.num_samples = 0
        self.versions = [0] * num_workers
        """How often each worker's model has changed."""
        self._num_arrived = 0  # samples that have arrived; `num_samples` takes over those of a round at its end
        self._num_dispatches = 0
        self._waiting: list[int] = []  # the workers that are to start and have no batch
        self._waited = [0.0] * num_workers  # seconds that each worker was idle before its gradient
        self._draws = [0] * num_workers  # how many computing times each worker has used
        self._is_cut = False  # whether the budget has kept a worker from going on; `Server` has it as `_budget_cuts`

    @abc.abstractmethod
    def _take(self, arrived: Arrived) -> tuple[float, list[int], bool]:
        """Step with a gradient, and exchange what is to be exchanged.

        Returns:
            The learning rate of the step, the workers that start a gradient now, and whether `num_samples` takes over
            the samples that have arrived. It does not in the middle of a round, in which the mean model does not
            change. It does after a batch without a loss term, which changes nothing either. `Step.changed` says the
            same to the loop.
        """

    def _step(self, worker: int, arrived: Arrived, learning_rate: float) -> None:
        """Step `worker`'s model along its gradient, one version more. For a batch without a loss term do nothing."""
        if arrived.gradient.weight:
            self._optimizers[worker].step(arrived.vector, learning_rate)
            self.versions[worker] += 1
            if self.statistics is not None and arrived.moved is not None:
                # The mean model keeps the counters, and the buffers that are the newest gradient's. Its averages are
                # those of the workers' models as soon as somebody reads `parameters`.
                self.statistics.move(arrived.moved)
                self._statistics[worker] = self.statistics.followed(self._statistics[worker], arrived.moved)

    def _point(self, worker: int) -> Tensor:
        """`(P,)`, the parameters at which `worker` starts; they do not change until the gradient arrives."""
        return self._vectors[worker]

    def _rate(self, worker: int) -> float | None:
        """The learning rate of `worker`'s next step if it is known at the start of the gradient; else None."""
        return None

    def _begin_timing(self, worker: int) -> tuple[int, float]:
        """Time the step that `worker` starts now. Some rules time several steps of a worker as a group, as one sum of
        the times drawn.

        Returns:
            How many steps of the group came before this one, and when the group began, in seconds. By default each step
            is a group. See `Work.num_local_steps`.
        """
        return 0, self._clock()

    def _sum(self) -> Tensor:
        """The sum of the models, `(P,)`, so N times the mean; new."""
        return sum_of(self._vectors)

    def _average_statistics(self) -> None:
        """Give the mean model the mean of the workers' running statistics."""
        if self.statistics is not None:
            self.statistics.become_mean(self._statistics, torch.ones(self._num_workers))

    @property
    def models(self) -> Tensor:
        """`(N, P)`, the parameters at which each worker's gradient would start now."""
        return self._vectors

    @property
    def version(self) -> int:
        return self.view.version

    @property
    def in_flight(self) -> dict[int, Work]:
        return self.view.in_flight

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, the mean model. Each look computes it and writes it into the vector that was given to this object,
        and its running statistics into `statistics`.
        """
        self._average_statistics()
        with torch.no_grad():
            return self._mean.copy_(self._sum().div_(self._num_workers))

    @property
    def cut_short(self) -> str | None:
        why = f"workers of rule {self.rule.name} wait for one another, and the budget keeps some of them from going on"
        return why if self._is_cut else None

    def react(self, happened: Happened) -> Step:
        if isinstance(happened, Joined):
            works = self._begin([happened.worker])
            record = Membership(0, 0, self._clock(), "join", happened.worker, started=self._started(works))
            if not self.rule.lock_step:
                return Step(works, record=record)
            # In lock-step nobody starts before the last worker has joined.
            if happened.worker < self._num_workers - 1:
                return Step(record=record)
            return Step(list(self.in_flight.values()), record=record)
        assert isinstance(happened, Arrived)  # nobody leaves
        work = happened.work
        gradient = happened.gradient
        if gradient.frozen:
            raise cannot_freeze(gradient.frozen[0])
        worker = work.worker
        version = self.versions[work.worker]
        delay = version - work.version
        has_terms = bool(gradient.weight)
        if has_terms:
            version += 1
        del self.in_flight[worker]
        if self._waiting:  # for batches, which the budget does not have any more, while this worker went on
            self._is_cut = True
        self._num_arrived += gradient.num_samples
        waited = self._waited[worker]
        if self.statistics is not None:
            self.statistics.reestimated = None
        with torch.no_grad():
            learning_rate, following, counts = self._take(happened)
            if counts:
                self.num_samples = self._num_arrived
            works = self._begin(following)
        event = Event(
            dispatch=work.dispatch,
            worker=worker,
            batches=work.batches,
            read_version=work.version,
            version=version,
            arrival_delay=delay,
            outcome=APPLIED if has_terms else DROPPED,
            uses=((work.dispatch, delay),) if has_terms else (),
            drops=() if has_terms else (work.dispatch,),
            abandoned=(),
            started=self._started(works),
            loss=gradient.loss,
            weight=gradient.weight,
            num_samples=gradient.num_samples,
            learning_rate=learning_rate,
            train_seconds=self._clock(),
            total_samples=self._num_arrived,
            flight_seconds=work.drawn,  # `Arrived.seconds` count from when the group of steps began
            compute_seconds=work.drawn,
            wait_seconds=waited,
            loss_scales=gradient.loss_scales,
            gradient_norm=self._optimizers[worker].norm,
        )
        return Step(works, changed=counts, record=event)

    def _begin(self, workers: list[int]) -> list[Work]:
        """Start the workers that wait and `workers`, as far as there are batches. Once the budget is spent nobody
        starts.
        """
        self._waiting += workers
        works: list[Work] = []
        if not self._starts_by_itself or (self._samples is not None and self.num_samples >= self._samples):
            return works
        while self._waiting and (work := self.start(self._waiting[0], 1)) is not None:
            works.append(work)
        return works

    def start(self, worker: int, max_batches: int) -> Work | None:
        """Start `worker` on its next batch. None: it is not to start, or no batch is left.

        A replay calls it as it calls `Server.start`. `max_batches` is for local steps, which peers do not have.
        """
        if worker not in self._waiting:
            return None
        batches, number = self._batches.take(worker, 1)
        if not number:
            return None
        self._waiting.remove(worker)
        num_before, began = self._begin_timing(worker)
        point = self._point(worker)
        statistics = None if self.statistics is None else self._statistics[worker].clone()
        work = Work(
            worker,
            self._num_dispatches,
            self.versions[worker],
            num_before + 1,  # the virtual clock adds up the times of the group so far, from when the group began
            batches,
            point,
            None,
            began,
            self._draws[worker] - num_before,
            statistics=statistics,
        )
        self.in_flight[worker] = work
        self._num_dispatches += 1
        self._draws[worker] += 1
        return work

    def _started(self, works: Sequence[Work]) -> tuple[Started, ...]:
        started = []
        for work in works:
            worker = work.worker
            started.append((worker, work.dispatch, work.batches, self._rate(worker)))
        return tuple(started)

    def extend(self) -> Step | None:
        works = self._begin([])
        if not works:
            return None
        return Step(works, record=Extended(self.version, self.num_samples, self._clock(), self._started(works)))


def sum_of(vectors: Tensor) -> Tensor:
    """`(P,)`, the sum of `vectors`, `(N, P)`, added one after the other; new."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total
