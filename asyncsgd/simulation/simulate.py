"""Simulate: a rule, a closed-form problem and speeds under virtual time, put together in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncsgd.backends.log import Log, Replay
from asyncsgd.backends.rounding import move_last_bits
from asyncsgd.backends.virtual import VirtualBackend
from asyncsgd.core.batches import OwnStreams
from asyncsgd.core.flat import Layout
from asyncsgd.core.limits import Limits, Report, Result
from asyncsgd.core.loop import Hooks, Loop
from asyncsgd.core.optimizers import Optimizer, OptimizerRecipe, PlainSGD
from asyncsgd.core.peers import check_virtual, peers_of
from asyncsgd.core.peers.models import Peers
from asyncsgd.core.schedules import Schedule
from asyncsgd.core.server import Server
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Evaluation, Event, Record, RuleActed
from asyncsgd.rules import parse_rule
from asyncsgd.rules.contract import PeerRule, Rule
from asyncsgd.simulation.churn import Change, in_order, parse_churn
from asyncsgd.simulation.instance import Instance
from asyncsgd.simulation.problems import parse_problem
from asyncsgd.simulation.settings import SimulationSettings
from asyncsgd.simulation.speeds import Network, Sampler, parse_network, parse_speeds
from asyncsgd.worker.computation import ProblemGradients


@dataclasses.dataclass(frozen=True)
class Simulation:
    """How a simulation ended."""

    result: Result
    """How it ended: its status, and the reason of an early stop."""
    evaluations: list[Evaluation]
    """The evaluations, the first at time 0, the last at the end; `loss` is the excess f(x) - f*."""
    parameters: Tensor
    """The last parameters, float64 `(P,)`; owned by the caller."""
    version: int
    """Updates that the parameters have taken."""
    num_arrivals: int
    """Gradients that arrived, used or not."""
    virtual_seconds: float
    """On the training clock."""
    rule_acted: RuleActed | None
    """What the rule counted; None for a rule without a server."""
    method: Server | Peers[Any]
    """The server, or for a rule without a server the `Peers`, which hold the workers' models."""


def asked_arguments(asked: SimulationSettings) -> dict[str, Any]:
    """The arguments of `simulate` that the flags of ``experiments/simulate.py`` mean.

    >>> asked_arguments(SimulationSettings(rule="rennala:batch=2", workers=4, samples=100))["rule"]
    Rennala(batch=2, interrupt=True)

    Raises:
        UsageError: with the value and what to type instead.
    """
    if asked.samples is None and asked.budget_seconds is None:
        raise UsageError("a simulation needs an end; type --samples 10000 or --seconds 1000")
    rule = parse_rule(asked.rule)
    check_virtual(rule, network=asked.network is not None, churn=asked.churn is not None)
    num_workers = asked.workers
    arguments: dict[str, Any] = {
        "rule": rule,
        "instance": parse_problem(asked.problem).on(num_workers, asked.seed),
        "sampler": parse_speeds(asked.speeds).on(num_workers, asked.seed),
        "num_workers": num_workers,
        "learning_rate": asked.learning_rate,
        "budget": Limits(asked.samples, asked.budget_seconds),
        "evaluations": asked.evaluations,
        "seed": asked.seed,
        "network": None,
        "churn": (),
    }
    if asked.network is not None:
        arguments["network"] = parse_network(asked.network)
    if asked.churn is not None:
        arguments["churn"] = in_order(parse_churn(asked.churn), num_workers)
    return arguments


def replay_of(asked: SimulationSettings, log: Log, *, draw: int | None, to_the_bit: bool) -> Replay:
    """A replay of the log of a simulation.

    Args:
        draw: the number of the draw that moves the last bits of the initial parameters, see
            `asyncsgd.backends.rounding`; None: they stay.
        to_the_bit: whether the replay must have the bits of the log.
    """
    arguments = asked_arguments(asked)
    batches = OwnStreams(asked.workers, None)
    computation = ProblemGradients(arguments["instance"])
    initial = computation.initial()
    if draw is not None:
        move_last_bits(initial, initial.dtype, draw)
    method = _method(
        arguments["rule"],
        initial,
        asked.learning_rate,
        batches,
        inner=None,
        seed=asked.seed,
        num_workers=asked.workers,
        starts_by_itself=False,
    )
    return Replay(method, computation, log, to_the_bit=to_the_bit)


def _method(
    rule: Rule,
    parameters: Tensor,
    learning_rate: float | Schedule,
    batches: OwnStreams,
    inner: OptimizerRecipe | None,
    seed: int,
    **named: Any,
) -> Server | Peers[Any]:
    """The server of a rule, or its peers, which step by `inner`; None: plain SGD."""
    schedule = learning_rate if callable(learning_rate) else lambda num_samples: learning_rate
    if not isinstance(rule, PeerRule):
        return Server(parameters, rule, PlainSGD(parameters), schedule, batches, **named)

    def optimizer_on(vector: Tensor) -> Optimizer | PlainSGD:
        if inner is None:
            return PlainSGD(vector)
        return inner.on(vector, Layout.of_vector(len(vector)))

    return peers_of(rule, parameters, optimizer_on, schedule, batches, seed=seed, **named)


def vector_sha256(vector: npt.ArrayLike) -> str:
    """The sha256 of a vector's bytes: equal exactly when all bits are equal."""
    contiguous = np.ascontiguousarray(vector)
    return hashlib.sha256(contiguous.tobytes()).hexdigest()


def simulate(
    rule: Rule,
    instance: Instance,
    sampler: Sampler,
    *,
    num_workers: int,
    learning_rate: float | Schedule,
    budget: Limits,
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

    Args:
        instance: from ``problem.on(num_workers, seed)``; a sample is one stochastic gradient.
        sampler: from ``speeds.on(num_workers, seed)``; two rules on one seed meet the same.
        num_workers: N, as of `instance` and `sampler`.
        learning_rate: a number, or a function of the samples that arrived.
        budget: when the run ends. Seconds are virtual.
        evaluations: how many, beside the one at the start.
        seed: of what a rule without a server draws at random.
        report: called with every record, in order.
        network: links on which parameters and gradients wait; None: they take no time.
        churn: workers that leave and join.
        inner: the optimizer of local steps and of peers; None: plain SGD.
        each_version: called with every version of a server from 1 on, and with its parameters `(P,)`, borrowed for the
            call.
        stop_requested: asked after every arrival; the run ends when it says so.

    >>> from asyncsgd.simulation.problems import Mode
    >>> from asyncsgd.rules import Asynchronous
    >>> from asyncsgd.simulation.speeds import Constant
    >>> done = simulate(
    ...     Asynchronous(), Mode().on(1, seed=0), Constant().on(1, seed=0),
    ...     num_workers=1, learning_rate=0.5, budget=Limits(seconds=3.0), evaluations=3,
    ... )
    >>> [(evaluation.train_seconds, evaluation.loss) for evaluation in done.evaluations]
    [(0.0, 0.5), (1.0, 0.125), (2.0, 0.03125), (3.0, 0.0078125)]
    """
    check_virtual(rule, network=network is not None, churn=bool(churn))
    computation = ProblemGradients(instance, inner)
    parameters = computation.initial()
    heap = VirtualBackend(
        parameters,
        computation,
        sampler,
        computation.measure,
        num_workers=num_workers,
        network=network,
        churn=in_order(churn, num_workers),
        lock_step=isinstance(rule, PeerRule) and rule.lock_step,
    )

    @contextlib.contextmanager
    def report_version(version: int) -> Iterator[None]:
        yield
        if each_version is not None:
            each_version(version + 1, parameters)

    batches = OwnStreams(num_workers, budget.to_hand_out(rule))
    named: dict[str, Any] = {"num_workers": num_workers, "samples": budget.samples, "clock": lambda: heap.now}
    if not isinstance(rule, PeerRule):
        named["records"] = report is not None
        named["writing"] = None if each_version is None else report_version
    method = _method(rule, parameters, learning_rate, batches, inner, seed, **named)
    hooks = Hooks(report, stop_requested=stop_requested)
    loop = Loop(method, heap, budget, evaluations, hooks)
    result = loop.run()
    return Simulation(
        result,
        loop.evaluations,
        method.parameters,
        method.version,
        loop.num_arrivals,
        loop.backend.now,
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
    records: list[Record] = []
    simulate(
        parse_rule(rule),
        parse_problem("mode").on(num_workers, seed),
        parse_speeds(speeds).on(num_workers, seed),
        num_workers=num_workers,
        learning_rate=0.1,
        budget=Limits(samples=number),
        evaluations=1,
        report=records.append,
    )
    return [record.train_seconds for record in records if isinstance(record, Event)]
