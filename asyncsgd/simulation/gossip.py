"""Gossip under virtual time: no server; every worker keeps a model of its own and averages it with neighbours.

AD-PSGD, pairs averaging at random while others compute:

    on completion of g_i, computed at the x_i of its start:  x_i, x_j <- (x_i + x_j) / 2,  then  x_i <- x_i - eta g_i

SGP, push-sum over a directed graph that changes from round to round:

    z_i = x_i / w_i,   x_i <- x_i - eta g_i(z_i),   half of (x_i, w_i) goes to worker i + 2^(k mod ceil(log2 N)),  mod N

What is evaluated is the mean model. Gossip leaves it where it is, so it moves by -eta/N times each gradient and by
nothing else. The consensus distance (1/N) sum_i ||x_i - mean||^2 (of z_i in SGP) is reported beside each evaluation.

In events, `version` and `read_version` count the changes of the model of the event's worker; in evaluations `version`
counts the gradients applied to all models.

Lian, Zhang, Zhang, Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018, algorithm 1.
Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, algorithm 1
(and overlap SGP).

Shapes: N workers, P parameters. All arrays are float64.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from asyncsgd import named_choices
from asyncsgd.batches import OwnStreams
from asyncsgd.errors import UsageError, nearest
from asyncsgd.evaluation import Measured
from asyncsgd.named_choices import Kind, spell
from asyncsgd.records.events import (
    APPLIED,
    DONE,
    FAILED,
    INTERRUPTED,
    Evaluation,
    Fault,
    Gradient,
    Membership,
    Range,
    Started,
    Taken,
    arrival,
)
from asyncsgd.runtime.base import Budget, EvaluationPoints, Judge, Report, Result, diverged
from asyncsgd.schedules import Schedule
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.sampler import Sampler

# Laid out as in asyncsgd.data.random, purpose << 32 | stream, and none of the purposes there or in simulation.speeds.
_PARTNERS = 13 << 32
# Partners drawn together; part of the streams, as in asyncsgd.simulation.speeds.
_BLOCK_BITS = 5
_BLOCK = 1 << _BLOCK_BITS

TOPOLOGIES = ("complete", "ring")


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of the methods that have a runtime of their own in place of a server and a rule: hyperparameters only.

    >>> str(ADPSGD(topology="ring"))
    'ad_psgd:topology=ring'
    """

    name: ClassVar[str]
    """What the user types after ``--rule``."""
    summary: ClassVar[str]
    """One line for ``--rule help``."""

    def __str__(self) -> str:
        return spell(self)


@dataclasses.dataclass(frozen=True)
class ADPSGD(Method):
    """AD-PSGD: a worker that has finished a gradient averages models with one random neighbour, then takes its step.

    With x_i the model of worker i, j a uniformly random neighbour of i, and g_i computed at the x_i of its start:

        x_i, x_j <- (x_i + x_j) / 2,    x_i <- x_i - eta g_i

    The delay of g_i is how often partners averaged x_i away from where g_i was computed; the average that i itself
    starts belongs to its step and is not counted. Every exchange adds one to the delay of one gradient in flight, so
    delays are 1 on average, whatever the speeds and the graph.

    With one worker there is nobody to average with: sequential SGD. Real processes need a bipartite graph, or two
    workers could wait for each other. Here an exchange takes no time and is atomic, so any graph will do.

    Args:
        topology: ``complete``, everybody is a neighbour of everybody; or ``ring``, workers i - 1 and i + 1.

    Raises:
        ValueError: for another topology.
    """

    name: ClassVar[str] = "ad_psgd"
    summary: ClassVar[str] = "gossip: average with a random neighbour (complete or ring), then step (Lian et al. 2018)"

    topology: str = "complete"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            hint = nearest(self.topology, TOPOLOGIES)
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {self.topology!r}{hint}")


@dataclasses.dataclass(frozen=True)
class SGP(Method):
    """Stochastic gradient push: synchronous rounds of push-sum averaging on the directed exponential graph.

    In round k worker i computes g_i at z_i = x_i / w_i and steps x_i <- x_i - eta g_i. It keeps half of (x_i, w_i) and
    sends the other half to worker i + 2^(k mod ceil(log2 N)) modulo N. Sum w_i = N and, but for the gradients, sum x_i
    are conserved, what is on its way included; so z_i tends to the mean although x_i need not. With 2 workers and no
    delay it is synchronous SGD; with one worker, sequential SGD.

    A round takes as long as the slowest worker's gradient. Messages take no time of their own, so `delay` (overlap
    SGP) changes the iterates and not the clock. Gradients are always applied to the model at which they were computed.
    Only the neighbours' halves are late.

    Args:
        delay: rounds by which messages are late; those sent in round k are added at the end of round k + delay.

    Raises:
        ValueError: for a negative delay.
    """

    name: ClassVar[str] = "sgp"
    summary: ClassVar[str] = (
        "gossip: push-sum on a directed exponential graph, rounds late by delay (Assran et al. 2019)"
    )

    delay: int = 0

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"delay must be 0 or more rounds, got {self.delay}")


METHODS: Mapping[str, type[Method]] = {ADPSGD.name: ADPSGD, SGP.name: SGP}
"""By what the user types after ``--rule``."""

KIND = Kind("rule", "rules", "--rule")


def parse(text: str) -> Method | None:
    """Return the method of this module that ``NAME[:key=value,...]`` means, None for names it does not know.

    >>> parse("ad_psgd:topology=ring"), parse("sgp:delay=1"), parse("ringmaster:threshold=4")
    (ADPSGD(topology='ring'), SGP(delay=1), None)

    Raises:
        UsageError: for an unknown parameter (the nearest one is suggested) or a value out of range.
    """
    return KIND.read(text, METHODS) if text.partition(":")[0] in METHODS else None


def describe() -> list[str]:
    """The lines of this module's methods in ``--rule help``."""
    return named_choices.describe(METHODS)


class Partners:
    """Whom a worker averages with: a pure function of (seed, worker, exchange), uniform over the worker's neighbours.

    >>> partners = Partners("ring", num_workers=5, seed=0)
    >>> sorted({partners.of(0, exchange) for exchange in range(20)})
    [1, 4]

    Args:
        topology: one of `TOPOLOGIES`.
        num_workers: N, 2 or more.
    """

    def __init__(self, topology: str, num_workers: int, seed: int) -> None:
        if num_workers < 2:
            raise ValueError(f"partners need 2 workers or more, got {num_workers}")
        self._ring = topology == "ring"
        self._num_workers = num_workers
        self._bits = np.random.Philox(key=np.array([seed % 2**64, _PARTNERS], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._held = [-1] * num_workers
        self._choices: list[list[int]] = [[] for _ in range(num_workers)]

    def of(self, worker: int, exchange: int) -> int:
        """Return the partner in the exchange that `worker` starts after `exchange` earlier ones of its own."""
        block = exchange >> _BLOCK_BITS
        if self._held[worker] != block:
            self._state["state"]["counter"][:] = (0, block, worker, 0)
            self._bits.state = self._state
            choices = 2 if self._ring else self._num_workers - 1
            self._choices[worker] = self._generator.integers(choices, size=_BLOCK).tolist()
            self._held[worker] = block
        choice = self._choices[worker][exchange & (_BLOCK - 1)]
        if self._ring:
            return (worker + 2 * choice - 1) % self._num_workers
        return choice + (choice >= worker)


def exponential_distance(round_number: int, num_workers: int) -> int:
    """How far a message goes in a round of the directed exponential graph: 2^(k mod ceil(log2 N)).

    >>> [exponential_distance(k, num_workers=6) for k in range(5)]
    [1, 2, 4, 1, 2]

    Args:
        round_number: k, from 0.
        num_workers: N, 2 or more.
    """
    return 1 << round_number % (num_workers - 1).bit_length()


class Recorder:
    """The clock, the counts, the evaluations of the mean model and the records of a run without a server.

    Args:
        instance: gives the exact loss.
        look: returns the mean model `(P,)` and the workers' models `(N, P)` as they are now.
        stop_requested: looked at whenever the clock is to move.

    Raises:
        UsageError: for a budget that never ends, or no evaluations.
    """

    def __init__(
        self,
        instance: Instance,
        look: Callable[[], tuple[Array, Array]],
        *,
        budget: Budget,
        evaluations: int,
        report: Report | None,
        stop_requested: Callable[[], bool],
    ) -> None:
        if budget.samples is None and budget.seconds is None:
            raise UsageError("the run would never end; give it a budget in samples or in seconds")
        if evaluations < 1:
            raise UsageError(f"evaluations must be 1 or more, got {evaluations}")
        self._instance, self._look = instance, look
        self._budget, self._report, self._stop_requested = budget, report, stop_requested
        self._points, self._judge = EvaluationPoints(budget, evaluations), Judge(budget)
        self._changed = False
        self.train_seconds = 0.0
        """The virtual clock."""
        self.num_samples = 0
        self.num_dispatches = 0
        self.version = 0
        """Of the evaluations; counted by the run."""
        self.evaluations: list[Evaluation] = []
        self.consensus: list[float] = []
        """(1/N) sum_i ||x_i - mean||^2 at each evaluation."""

    def evaluate(self) -> Result | None:
        """Evaluate the mean model now; return how the run ended, None to go on."""
        self._changed = False
        mean, models = self._look()
        evaluation = Measured(self._instance.loss(mean)).record(
            version=self.version, num_samples=self.num_samples, train_seconds=self.train_seconds
        )
        self.evaluations.append(evaluation)
        self.consensus.append(float(np.square(models - mean).sum()) / len(models))
        if self._report is not None:
            self._report(evaluation)
        return self._judge.of(evaluation)

    def evaluate_if_due(self) -> Result | None:
        """Evaluate where the samples that arrived have passed a point; points of time are `reach`'s."""
        if self._budget.samples is not None and self._points.passed(self.num_samples, self.train_seconds):
            return self.evaluate()
        return None

    def reach(self, seconds: float) -> Result | None:
        """Move the clock to the next event, evaluating on the way; return how the run ended, None to go on."""
        if self._stop_requested():
            return Result(INTERRUPTED, "interrupted by the user")
        limit = self._budget.seconds
        over = limit is not None and seconds > limit
        if seconds == math.inf and not over:
            return Result(FAILED, "every worker in flight takes for ever; give --seconds, or other --speeds")
        if self._budget.samples is None:
            # At a point of time all that happened up to then is in the models.
            for point in self._points.due(limit if over and limit is not None else math.nextafter(seconds, -math.inf)):
                self.train_seconds = point
                result = self.evaluate()
                if result is not None:
                    return result
        if over and limit is not None:
            self.train_seconds = limit
            return Result(DONE)
        self.train_seconds = seconds
        self._changed = True
        return None

    def end(self, result: Result) -> Result:
        """Evaluate what a run that is DONE has changed since its last evaluation."""
        if result.status == DONE and self._changed:
            return self.evaluate() or result
        return result

    def dispatch(self) -> int:
        """The number of the next gradient to be started."""
        self.num_dispatches += 1
        return self.num_dispatches - 1

    def joined(self, worker: int, started: tuple[Started, ...]) -> None:
        """Report that `worker` takes part from the beginning."""
        if self._report is not None:
            self._report(Membership("join", worker, 0, 0, 0.0, started=started))

    def arrived(
        self,
        *,
        dispatch: int,
        worker: int,
        batches: tuple[Range, ...],
        read_version: int,
        delay: int,
        started: tuple[Started, ...],
        loss: float,
        learning_rate: float,
        compute_seconds: float,
        wait_seconds: float,
    ) -> Result | None:
        """Report a gradient that has just been applied and counted; return DIVERGED if its loss is not finite."""
        version = read_version + delay
        if self._report is not None:
            self._report(
                arrival(
                    Gradient(loss, 1.0, 1),
                    Taken(compute=compute_seconds, wait=wait_seconds),
                    dispatch=dispatch,
                    worker=worker,
                    batches=batches,
                    read_version=read_version,
                    delay=delay,
                    version=version + 1,
                    outcome=APPLIED,
                    uses=((dispatch, delay),),
                    started=started,
                    learning_rate=learning_rate,
                    train_seconds=self.train_seconds,
                    total_samples=self.num_samples,
                    flight_seconds=compute_seconds,
                )
            )
        if math.isfinite(loss):
            return None
        what = f"the loss of worker {worker} at version {read_version} of its model is {loss}"
        if self._report is not None:
            self._report(Fault(what, worker, version + 1, self.train_seconds))
        return diverged(what)


def as_schedule(learning_rate: float | Schedule) -> Schedule:
    """A constant learning rate as a function of the samples that arrived.

    Raises:
        UsageError: for a number that is negative or not finite.
    """
    if callable(learning_rate):
        return learning_rate
    constant = learning_rate
    if not 0 <= constant < math.inf:
        raise UsageError(f"learning_rate must be 0 or more and finite, got {constant}")
    return lambda num_samples: constant


def check_num_workers(num_workers: int, instance: Instance, sampler: Sampler) -> None:
    """Raise UsageError unless problem and speeds were made for `num_workers` workers."""
    for what, made_for in (("the problem was", instance.num_workers), ("the speeds were", sampler.num_workers)):
        if made_for != num_workers:
            raise UsageError(
                f"{what} made for {made_for} workers, not {num_workers}; type .on({num_workers}, seed) for both"
            )


@dataclasses.dataclass(frozen=True)
class GossipSimulation:
    """How a run of `gossip` ended. All arrays are owned by the caller."""

    result: Result
    evaluations: list[Evaluation]
    """Of the mean model: the first at time 0, the last at the end; `loss` is the excess f(x) - f*."""
    consensus: list[float]
    """(1/N) sum_i ||x_i - mean||^2 at each evaluation; of z_i in SGP."""
    parameters: Array
    """The mean model, `(P,)`; in SGP, what is on its way included."""
    models: Array
    """`(N, P)`: x_i; in SGP z_i = x_i / w_i."""
    weights: Array
    """`(N,)`: w_i in SGP, ones in AD-PSGD."""
    weights_in_transit: Array
    """`(N,)`: the weight on its way to each worker; with `weights` it adds up to N."""
    versions: tuple[int, ...]
    """How often each worker's model has changed; an average together with the step after it counts once."""
    num_arrivals: int
    """Gradients that were applied."""
    virtual_seconds: float


def gossip(
    method: Method,
    instance: Instance,
    sampler: Sampler,
    *,
    num_workers: int,
    learning_rate: float | Schedule,
    budget: Budget,
    evaluations: int = 20,
    seed: int = 0,
    report: Report | None = None,
    start: Array | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> GossipSimulation:
    """Run `method` on `instance` under virtual time; the same samples and times as in `asyncsgd.simulation.simulate`.

    A budget in samples is rounded up to whole rounds in `SGP`; in `ADPSGD` what is in flight at its end is discarded.

    Args:
        instance: from ``problem.on(num_workers, seed)``; a sample is one stochastic gradient.
        sampler: from ``speeds.on(num_workers, seed)``.
        learning_rate: a number, or a function of the samples that arrived; 0 is gossip alone.
        seed: decides who averages with whom in `ADPSGD`; nothing in `SGP` is random.
        report: receives an Event per gradient, and the evaluations.
        start: `(N, P)`, where the workers start; None: all at ``instance.initial()``.
        stop_requested: looked at between events.

    >>> from asyncsgd.simulation.problems import Mode
    >>> from asyncsgd.simulation.speeds import Constant
    >>> done = gossip(
    ...     SGP(), Mode().on(2, seed=0), Constant().on(2, seed=0),
    ...     num_workers=2, learning_rate=0.5, budget=Budget(seconds=3.0), evaluations=3,
    ... )
    >>> [(evaluation.train_seconds, evaluation.loss) for evaluation in done.evaluations]
    [(0.0, 0.5), (1.0, 0.125), (2.0, 0.03125), (3.0, 0.0078125)]

    Raises:
        UsageError: for what cannot be run: a budget without an end, numbers of workers that differ.
        TypeError: for a method that is not gossip.
    """
    check_num_workers(num_workers, instance, sampler)
    rate = as_schedule(learning_rate)
    shape = (num_workers, instance.num_parameters)
    if start is None:
        models = np.tile(instance.initial(), (num_workers, 1))
    else:
        models = np.array(start, dtype=np.float64)
        if models.shape != shape:
            raise UsageError(f"start must have a row for each worker, shape {shape}, got {models.shape}")
    run: _ADPSGDRun | _SGPRun
    if isinstance(method, ADPSGD):
        partners = Partners(method.topology, num_workers, seed) if num_workers > 1 else None
        run = _ADPSGDRun(partners, models)
    elif isinstance(method, SGP):
        if num_workers == 1 and method.delay:
            raise UsageError(f"delay={method.delay} has no effect: one worker sends no messages; type sgp:delay=0")
        run = _SGPRun(method.delay, models)
    else:
        raise TypeError(f"{method!r} is not a method of gossip: {', '.join(METHODS)}")
    recorder = Recorder(
        instance, run.look, budget=budget, evaluations=evaluations, report=report, stop_requested=stop_requested
    )
    result = recorder.evaluate()
    if result is None and budget.samples != 0:
        result = run.run(instance, sampler, rate, budget.samples, recorder)
    result = recorder.end(result or Result(DONE))
    mean, models = run.look()
    return GossipSimulation(
        result,
        recorder.evaluations,
        recorder.consensus,
        mean,
        models.copy(),
        run.weights,
        run.weights_in_transit,
        tuple(run.versions),
        recorder.num_samples,
        recorder.train_seconds,
    )


class _ADPSGDRun:
    """AD-PSGD: a heap of (seconds, worker) says whose gradient is finished next; ties go to the lower worker."""

    def __init__(self, partners: Partners | None, models: Array) -> None:
        self._partners = partners
        self._models = models
        self.versions = [0] * len(models)
        self.weights = np.ones(len(models))
        self.weights_in_transit = np.zeros(len(models))

    def look(self) -> tuple[Array, Array]:
        return self._models.mean(axis=0), self._models

    def run(
        self, instance: Instance, sampler: Sampler, rate: Schedule, samples: int | None, recorder: Recorder
    ) -> Result:
        models, versions = self._models, self.versions
        num_workers = len(models)
        streams = OwnStreams(num_workers, None)
        points = models.copy()  # where the gradient in flight of each worker is computed
        gradient = np.empty(models.shape[1])
        heap: list[tuple[float, int]] = []
        # Of each worker's gradient in flight:
        batches_of: list[tuple[Range, ...]] = [()] * num_workers
        dispatch_of, read_version_of = [0] * num_workers, [0] * num_workers
        seconds_of = [0.0] * num_workers

        def spent() -> bool:
            return samples is not None and recorder.num_samples >= samples

        def start(worker: int) -> tuple[Started, ...]:
            if spent():
                return ()
            batches = streams.take(worker, 1)[0]
            # A worker computes without a break, so its draws, samples and exchanges have one number.
            taken = sampler.draw_one(worker, batches[0][1])
            points[worker] = models[worker]
            batches_of[worker], read_version_of[worker] = batches, versions[worker]
            dispatch_of[worker], seconds_of[worker] = recorder.dispatch(), taken
            heapq.heappush(heap, (recorder.train_seconds + taken, worker))
            return ((worker, dispatch_of[worker], batches, None),)

        for worker in range(num_workers):
            recorder.joined(worker, start(worker))
        while not spent():
            result = recorder.reach(heap[0][0])
            if result is not None:
                return result
            worker = heapq.heappop(heap)[1]
            batches, read_version, delay = (
                batches_of[worker],
                read_version_of[worker],
                versions[worker] - read_version_of[worker],
            )
            dispatch, taken, index = dispatch_of[worker], seconds_of[worker], batches[0][1]
            loss = instance.gradient(points[worker], worker, index, gradient)
            recorder.num_samples += 1
            recorder.version += 1
            learning_rate = rate(recorder.num_samples)
            self._exchange(worker, index)
            gradient *= learning_rate
            models[worker] -= gradient
            versions[worker] += 1
            started = start(worker)
            result = recorder.arrived(
                dispatch=dispatch,
                worker=worker,
                batches=batches,
                read_version=read_version,
                delay=delay,
                started=started,
                loss=loss,
                learning_rate=learning_rate,
                compute_seconds=taken,
                wait_seconds=0.0,
            )
            result = result or recorder.evaluate_if_due()
            if result is not None:
                return result
        return Result(DONE)

    def _exchange(self, worker: int, exchange: int) -> None:
        """Average the models of `worker` and its partner."""
        if self._partners is None:
            return
        partner = self._partners.of(worker, exchange)
        mean = self._models[worker] + self._models[partner]
        mean *= 0.5
        self._models[worker] = mean
        self._models[partner] = mean
        self.versions[partner] += 1


class _SGPRun:
    """SGP: rounds; the numerators x_i and the weights w_i are kept, their quotient z_i is looked at."""

    def __init__(self, delay: int, models: Array) -> None:
        self._delay = delay
        self._numerators = models
        self.weights = np.ones(len(models))
        self.versions = [0] * len(models)
        # Oldest first: what each worker will receive, (N, P) and (N,).
        self._in_transit: collections.deque[tuple[Array, Array]] = collections.deque()

    @property
    def weights_in_transit(self) -> Array:
        return sum((weights for _, weights in self._in_transit), np.zeros(len(self.weights)))

    def look(self) -> tuple[Array, Array]:
        total = self._numerators.sum(axis=0)
        for numerators, _ in self._in_transit:
            total += numerators.sum(axis=0)
        return total / len(self.weights), self._models()

    def _models(self) -> Array:
        return self._numerators / self.weights[:, None]

    def run(
        self, instance: Instance, sampler: Sampler, rate: Schedule, samples: int | None, recorder: Recorder
    ) -> Result:
        num_workers = len(self.weights)
        workers = np.arange(num_workers)
        gradient = np.empty(self._numerators.shape[1])
        waited = np.zeros(num_workers)

        def start(worker: int, index: int) -> Started:
            return (worker, recorder.dispatch(), ((worker, index, index + 1),), None)

        flights = [start(worker, 0) for worker in range(num_workers)]
        for worker in range(num_workers):
            recorder.joined(worker, (flights[worker],))
        round_number = 0
        while True:
            taken = sampler.draw(workers, np.full(num_workers, round_number))
            result = recorder.reach(recorder.train_seconds + float(taken.max()))
            if result is not None:
                return result
            models = self._models()
            # One learning rate per round: everybody's, with the round's samples counted.
            learning_rate = rate(recorder.num_samples + num_workers)
            losses = []
            for worker in range(num_workers):
                losses.append(instance.gradient(models[worker], worker, round_number, gradient))
                gradient *= learning_rate
                self._numerators[worker] -= gradient
            self._push(round_number)
            self.versions = [version + 1 for version in self.versions]
            goes_on = samples is None or recorder.num_samples + num_workers < samples
            for worker, (_, dispatch, batches, _) in enumerate(flights):
                recorder.num_samples += 1
                recorder.version += 1
                last = worker == num_workers - 1  # a round begins when everybody has finished the one before
                started = [start(other, round_number + 1) for other in range(num_workers)] if last and goes_on else []
                result = recorder.arrived(
                    dispatch=dispatch,
                    worker=worker,
                    batches=batches,
                    read_version=round_number,
                    delay=0,
                    started=tuple(started),
                    loss=losses[worker],
                    learning_rate=learning_rate,
                    compute_seconds=float(taken[worker]),
                    wait_seconds=float(waited[worker]),
                )
                if result is not None:
                    return result
            result = recorder.evaluate_if_due()
            if result is not None:
                return result
            if not goes_on:
                return Result(DONE)
            flights, waited = started, taken.max() - taken
            round_number += 1

    def _push(self, round_number: int) -> None:
        """Send half of everything and receive what is due."""
        num_workers = len(self.weights)
        if num_workers == 1:
            return
        self._numerators *= 0.5
        self.weights *= 0.5
        distance = exponential_distance(round_number, num_workers)
        self._in_transit.append((np.roll(self._numerators, distance, axis=0), np.roll(self.weights, distance)))
        if len(self._in_transit) > self._delay:
            numerators, weights = self._in_transit.popleft()
            self._numerators += numerators
            self.weights += weights
