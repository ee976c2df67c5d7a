"""Simulate: a rule, a closed-form problem and speeds under virtual time, put together in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from asyncsgd.batches import OwnStreams
from asyncsgd.errors import UsageError
from asyncsgd.flat import Layout
from asyncsgd.methods import check_virtual, peers_of
from asyncsgd.methods.peers import Peers
from asyncsgd.optimizers import Optimizer, OptimizerRecipe, PlainSGD
from asyncsgd.records.events import Evaluation, Event, Record, RuleActed
from asyncsgd.rules import parse_rule
from asyncsgd.rules.base import PeerRule, Rule
from asyncsgd.runtime.base import Budget, Report, Result
from asyncsgd.runtime.computation import ProblemGradients
from asyncsgd.runtime.fit import Fit, Sink
from asyncsgd.runtime.replay import Log, Replay
from asyncsgd.runtime.virtual import Heap
from asyncsgd.schedules import Schedule
from asyncsgd.server import Server
from asyncsgd.simulation.asked import Asked
from asyncsgd.simulation.churn import Change, in_order, parse_churn
from asyncsgd.simulation.instance import Instance
from asyncsgd.simulation.problems import parse_problem
from asyncsgd.simulation.sampler import Sampler
from asyncsgd.simulation.speeds import Network, parse_network, parse_speeds


@dataclasses.dataclass(frozen=True)
class Simulation:
    """How a simulation ended."""

    result: Result
    evaluations: list[Evaluation]
    """The first at time 0, the last at the end; `loss` is the excess f(x) - f*."""
    parameters: Tensor
    """float64 `(P,)`, the last ones; owned by the caller."""
    version: int
    num_arrivals: int
    """Gradients that arrived, used or not."""
    virtual_seconds: float
    rule_acted: RuleActed | None
    """None for a rule without a server."""
    method: Server | Peers[Any]
    """What decided; of a rule without a server the workers' models, as `Peers.models`."""


@dataclasses.dataclass(frozen=True)
class SimulationSettings(Asked):
    """What ``experiments/simulate.py`` runs, as text and numbers; written to settings.yaml and read back by a replay.

    >>> SimulationSettings(rule="rennala:batch=2", workers=4, samples=100).check()
    """

    def check(self) -> None:
        """Look at everything that does not need a run and is no bound of one value.

        Raises:
            UsageError: with the value and what to type instead.
        """
        if self.samples is None and self.budget_seconds is None:
            raise UsageError("a simulation needs an end; type --samples 10000 or --seconds 1000")
        check_virtual(self.method(), network=self.network is not None, churn=self.churn is not None)
        self.instance(), self.sampler(), self.links(), self.changes()

    def method(self) -> Rule:
        return parse_rule(self.rule)

    def instance(self) -> Instance:
        return parse_problem(self.problem).on(self.workers, self.seed)

    def sampler(self) -> Sampler:
        return parse_speeds(self.speeds).on(self.workers, self.seed)

    def links(self) -> Network | None:
        return None if self.network is None else parse_network(self.network)

    def changes(self) -> tuple[Change, ...]:
        return () if self.churn is None else in_order(parse_churn(self.churn), self.workers)

    def run(self, report: Report, stop_requested: Callable[[], bool] = lambda: False) -> Simulation:
        """Run it."""
        return simulate(
            self.method(),
            self.instance(),
            self.sampler(),
            num_workers=self.workers,
            learning_rate=self.learning_rate,
            budget=Budget(self.samples, self.budget_seconds),
            evaluations=self.evaluations,
            seed=self.seed,
            report=report,
            network=self.links(),
            churn=self.changes(),
            stop_requested=stop_requested,
        )

    def replay(self, log: Log) -> tuple[Replay, Server | Peers[Any]]:
        """A replay of the run's log, and the method that it changes."""
        computation = ProblemGradients(self.instance())
        method = _method(
            self.method(),
            computation.initial(),
            lambda num_samples: self.learning_rate,
            OwnStreams(self.workers, None),
            None,
            num_workers=self.workers,
            seed=self.seed,
            starts=False,
        )
        return Replay(method, computation, log), method


def _method(
    rule: Rule,
    parameters: Tensor,
    schedule: Schedule,
    batches: OwnStreams,
    inner: OptimizerRecipe | None,
    *,
    num_workers: int,
    seed: int,
    **named: Any,
) -> Server | Peers[Any]:
    """The server, or the peers, which step by `inner`; None: plain SGD."""
    if not isinstance(rule, PeerRule):
        return Server(parameters, rule, PlainSGD(parameters), schedule, batches, num_workers=num_workers, **named)

    def optimizer_on(vector: Tensor) -> Optimizer | PlainSGD:
        return PlainSGD(vector) if inner is None else inner.on(vector, Layout.of_vector(len(vector)))

    return peers_of(rule, parameters, optimizer_on, schedule, batches, num_workers=num_workers, seed=seed, **named)


def vector_sha256(parameters: Tensor) -> str:
    """The sha256 of a vector's bytes: equal exactly when all bits are equal."""
    return hashlib.sha256(parameters.contiguous().numpy().tobytes()).hexdigest()


def simulate(
    rule: Rule,
    instance: Instance,
    sampler: Sampler,
    *,
    num_workers: int,
    learning_rate: float | Schedule,
    budget: Budget,
    evaluations: int = 20,
    seed: int = 0,
    report: Report | None = None,
    network: Network | None = None,
    churn: Sequence[Change] = (),
    inner: OptimizerRecipe | None = None,
    each_version: Callable[[int, Tensor], None] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Simulation:
    """Run `rule` on `instance` with plain SGD at the server.

    Every worker draws its samples from a stream of its own, and its times from another. Both are functions of the seeds
    that `instance` and `sampler` were made with. So two rules on one seed meet identical speeds and samples.

    Args:
        instance: from ``problem.on(num_workers, seed)``; a sample is one stochastic gradient.
        sampler: from ``speeds.on(num_workers, seed)``.
        learning_rate: a number, or a function of the samples that arrived.
        seed: of what is random in a rule without a server.
        inner: the optimizer of local steps and of peers; None: plain SGD.
        each_version: told every version of a server from 1 on, and its parameters `(P,)`, borrowed for the call: a
            trajectory.

    >>> from asyncsgd.simulation.problems import Mode
    >>> from asyncsgd.rules import Asynchronous
    >>> from asyncsgd.simulation.speeds import Constant
    >>> done = simulate(
    ...     Asynchronous(), Mode().on(1, seed=0), Constant().on(1, seed=0),
    ...     num_workers=1, learning_rate=0.5, budget=Budget(seconds=3.0), evaluations=3,
    ... )
    >>> [(evaluation.train_seconds, evaluation.loss) for evaluation in done.evaluations]
    [(0.0, 0.5), (1.0, 0.125), (2.0, 0.03125), (3.0, 0.0078125)]
    """
    check_virtual(rule, network=network is not None, churn=bool(churn))
    computation = ProblemGradients(instance, inner)
    parameters = computation.initial()
    if callable(learning_rate):
        schedule = learning_rate
    else:
        constant = learning_rate

        def schedule(num_samples: int) -> float:
            return constant

    @contextlib.contextmanager
    def telling(version: int) -> Iterator[None]:
        yield
        if each_version is not None:
            each_version(version + 1, parameters)

    heap = Heap(
        parameters,
        computation,
        sampler,
        computation.measure,
        num_workers=num_workers,
        network=network,
        churn=in_order(churn, num_workers),
        in_step=isinstance(rule, PeerRule) and rule.together,
    )
    more: dict[str, Any] = {} if isinstance(rule, PeerRule) else {"records": report is not None}
    if each_version is not None:
        more["writing"] = telling
    method = _method(
        rule,
        parameters,
        schedule,
        OwnStreams(num_workers, budget.to_hand_out(rule)),
        inner,
        num_workers=num_workers,
        seed=seed,
        samples=budget.samples,
        clock=lambda: heap.now,
        **more,
    )
    runtime = Fit(method, heap, budget, evaluations, Sink(report, stop_requested=stop_requested))
    result = runtime.run()
    return Simulation(
        result,
        runtime.evaluations,
        method.parameters,
        method.version,
        runtime.num_arrivals,
        runtime.train_seconds,
        method.rule_acted,
        method,
    )


def arrival_seconds(speeds: str, rule: str, num_workers: int, seed: int, number: int) -> list[float]:
    """When the first `number` gradients arrive under `rule`, in virtual seconds.

    Times depend on speeds and on the rule's replies only, not on what is computed, so a problem of one dimension gives
    the times of any training run with as many gradients.

    >>> arrival_seconds("slow:worker=0,factor=3", "asynchronous", 2, 0, 4)
    [1.0, 2.0, 3.0, 3.0]
    >>> arrival_seconds("slow:worker=0,factor=3", "synchronous", 2, 0, 4)
    [1.0, 3.0, 4.0, 6.0]
    """
    times: list[float] = []

    def note(record: Record) -> None:
        if isinstance(record, Event):
            times.append(record.train_seconds)

    simulate(
        parse_rule(rule),
        parse_problem("mode").on(num_workers, seed),
        parse_speeds(speeds).on(num_workers, seed),
        num_workers=num_workers,
        learning_rate=0.1,
        budget=Budget(samples=number),
        evaluations=1,
        report=note,
    )
    return times
