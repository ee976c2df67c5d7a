"""Streaming DiLoCo under virtual time: the outer step in fragments, each carried while the workers go on computing.

Fragment p holds parameters p, p + F, p + 2F, ... After the inner steps s = o_p, o_p + H, o_p + 2H, ... above 0, with
the offset o_p = floor(p H / F), every worker sends its displacement on the fragment; F = ``fragments``:

    D = (1/N) sum_i (x - y_i),    m <- beta m + D,    x <- x - eta_outer (D + beta m)        (on the fragment)
    `overlap` inner steps later:  y_i <- mix y_i + (1 - mix) x                               (on the fragment)

x being the outer parameters, their last outer value on each fragment, and y_i the model of worker i.

Clock. Sending never blocks. Once the slowest worker has sent its part, the result is there for everybody
`transfer_seconds` later. A worker takes it after `overlap` more inner steps of its own, and waits only if it is not
there by then. With overlap 0 that is a barrier at every synchronisation, as in DiLoCo. Which worker waits changes
nothing in what is computed, except where a budget ends in mid-round.

What is evaluated is the mean of the workers' models. In evaluations `version` counts outer steps, a fragment's as one.
In events `version` and `read_version` count the changes (inner steps and mixes) of the model of the event's worker.
Every gradient is fresh. The delay of this method is that of the outer result, `overlap` inner steps.

Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Rame, Szlam, Ranzato, Barham: Streaming
DiLoCo with overlapping communication: Towards a Distributed Free Lunch, 2025, algorithm 2. Deviations: a fragment is
every F-th parameter in place of every F-th block of layers, and outer gradients are not quantised.

Shapes: N workers, P parameters, F fragments. All arrays are float64.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch

from asyncsgd import named_choices
from asyncsgd.batches import OwnStreams
from asyncsgd.errors import UsageError
from asyncsgd.flat import Layout
from asyncsgd.optimizers import OptimizerRecipe, PlainSGD
from asyncsgd.records.events import DONE, Evaluation, Range, Started
from asyncsgd.runtime.base import Budget, Report, Result
from asyncsgd.schedules import Schedule
from asyncsgd.simulation.gossip import KIND, Method, Recorder, as_schedule, check_num_workers
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.sampler import Sampler


@dataclasses.dataclass(frozen=True)
class StreamingDiLoCo(Method):
    """DiLoCo whose parameters are synchronised in fragments, the outer results arriving `overlap` inner steps late.

    One fragment, no overlap and mix 0 is DiLoCo.

    Args:
        num_local_steps: H, inner steps between two synchronisations of the same fragment.
        fragments: at most H, so that each has an inner step of its own to be sent after.
        overlap: inner steps between sending and receiving, below H: a fragment is on its way once at a time.
        mix: share of the worker's own parameters that survives when a result arrives, in [0, 1).
        outer_learning_rate: eta_outer.
        outer_momentum: beta, in [0, 1).

    Raises:
        ValueError: for a value out of range.
    """

    name: ClassVar[str] = "streaming_diloco"
    summary: ClassVar[str] = "DiLoCo in fragments, results overlap steps late and mixed in (Douillard et al. 2025)"

    num_local_steps: int = 10
    fragments: int = 2
    overlap: int = 1
    mix: float = 0.5
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        steps = self.num_local_steps
        if steps < 1 or not 0 < self.outer_learning_rate < math.inf or not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"num_local_steps must be 1 or more, outer_learning_rate positive and outer_momentum in [0, 1), got "
                f"{steps}, {self.outer_learning_rate} and {self.outer_momentum}"
            )
        if not 1 <= self.fragments <= steps:
            raise ValueError(f"fragments must be 1 to num_local_steps={steps}, got {self.fragments}")
        if not 0 <= self.overlap < steps:
            raise ValueError(f"overlap must be 0 or more and below num_local_steps={steps}, got {self.overlap}")
        if not 0 <= self.mix < 1:
            raise ValueError(f"mix must be in [0, 1), got {self.mix}; with 1 nothing would be synchronised")

    def offset(self, fragment: int) -> int:
        """o_p, in inner steps.

        >>> [StreamingDiLoCo(num_local_steps=10, fragments=4).offset(fragment) for fragment in range(4)]
        [0, 2, 5, 7]
        """
        return fragment * self.num_local_steps // self.fragments


METHODS: Mapping[str, type[StreamingDiLoCo]] = {StreamingDiLoCo.name: StreamingDiLoCo}
"""By what the user types after ``--rule``."""


def parse(text: str) -> StreamingDiLoCo | None:
    """Return the method of this module that ``NAME[:key=value,...]`` means, None for names it does not know.

    >>> parse("streaming_diloco:fragments=4,overlap=2")
    StreamingDiLoCo(num_local_steps=10, fragments=4, overlap=2, mix=0.5, outer_learning_rate=0.7, outer_momentum=0.9)

    Raises:
        UsageError: for an unknown parameter (the nearest one is suggested) or a value out of range.
    """
    return KIND.read(text, METHODS) if text.partition(":")[0] in METHODS else None


def describe() -> list[str]:
    """The lines of this module's methods in ``--rule help``."""
    return named_choices.describe(METHODS)


@dataclasses.dataclass(frozen=True)
class StreamingSimulation:
    """How a run of `stream` ended. All arrays are owned by the caller."""

    result: Result
    evaluations: list[Evaluation]
    """Of the mean of the workers' models: the first at time 0, the last at the end; `loss` is the excess f(x) - f*."""
    consensus: list[float]
    """(1/N) sum_i ||y_i - mean||^2 at each evaluation."""
    parameters: Array
    """The mean of the workers' models, `(P,)`."""
    outer: Array
    """The outer parameters, `(P,)`."""
    models: Array
    """y_i, `(N, P)`."""
    version: int
    """Outer steps taken, a fragment's as one."""
    num_arrivals: int
    """Inner steps taken, by all workers."""
    virtual_seconds: float
    wait_seconds: Array
    """`(N,)`: how long each worker waited for outer results before a gradient."""


def stream(
    method: StreamingDiLoCo,
    instance: Instance,
    sampler: Sampler,
    *,
    num_workers: int,
    learning_rate: float | Schedule,
    budget: Budget,
    evaluations: int = 20,
    report: Report | None = None,
    inner: OptimizerRecipe | None = None,
    transfer_seconds: float = 0.0,
    stop_requested: Callable[[], bool] = lambda: False,
) -> StreamingSimulation:
    """Run `method` on `instance` under virtual time; the same samples and times as in `asyncsgd.simulation.simulate`.

    A budget in samples is handed out in the order in which gradients start; every gradient that was started arrives.
    A point in samples is evaluated once all that happens at the same instant has happened.

    Args:
        instance: from ``problem.on(num_workers, seed)``; a sample is one stochastic gradient.
        sampler: from ``speeds.on(num_workers, seed)``; a service time is that of one inner step.
        learning_rate: of the inner steps: a number, or a function of samples. A worker that has taken s inner steps
            asks for N s, as if all were as far as it is, so that the iterates do not depend on the speeds.
        report: receives an Event per inner step, and the evaluations. Its `started` names the gradients handed out at
            the event; those that wait for a transfer begin later, and `wait_seconds` says how much.
        inner: the optimizer of the inner steps, its state the worker's own; None: plain SGD.
        transfer_seconds: from the last worker's sending a fragment to the result's being there.
        stop_requested: looked at between events.

    >>> from asyncsgd.simulation.problems import Mode
    >>> from asyncsgd.simulation.speeds import Constant
    >>> done = stream(
    ...     StreamingDiLoCo(num_local_steps=2, fragments=1, overlap=1, outer_learning_rate=1.0, outer_momentum=0.0),
    ...     Mode().on(1, seed=0), Constant().on(1, seed=0),
    ...     num_workers=1, learning_rate=0.5, budget=Budget(seconds=3.0), transfer_seconds=0.5,
    ... )
    >>> done.version, done.outer.tolist(), done.models.tolist()  # sent after 2 steps; mixed with 0.5^3 after 3
    (1, [0.25], [[0.1875]])

    Raises:
        UsageError: for what cannot be run: a budget without an end, numbers of workers that differ, more fragments
            than parameters, a transfer that takes no finite time.
    """
    check_num_workers(num_workers, instance, sampler)
    if method.fragments > instance.num_parameters:
        raise UsageError(
            f"{method.fragments} fragments of {instance.num_parameters} parameters leave some empty; "
            f"type fragments={instance.num_parameters} or fewer"
        )
    if not 0 <= transfer_seconds < math.inf:
        raise UsageError(f"transfer_seconds must be 0 or more and finite, got {transfer_seconds}")
    run = _Run(method, instance, sampler, as_schedule(learning_rate), inner, transfer_seconds, budget.samples)
    recorder = run.recorder = Recorder(
        instance, run.look, budget=budget, evaluations=evaluations, report=report, stop_requested=stop_requested
    )
    result = recorder.evaluate()
    if result is None and budget.samples != 0:
        result = run.run()
    result = recorder.end(result or Result(DONE))
    return StreamingSimulation(
        result,
        recorder.evaluations,
        recorder.consensus,
        run.models.mean(axis=0),
        run.outer.numpy().copy(),
        run.models,
        recorder.version,
        recorder.num_samples,
        recorder.train_seconds,
        run.waited,
    )


class _Run:
    """A heap of (seconds, worker) says whose inner step is finished, or whose result has been carried, next."""

    recorder: Recorder

    def __init__(
        self,
        method: StreamingDiLoCo,
        instance: Instance,
        sampler: Sampler,
        rate: Schedule,
        inner: OptimizerRecipe | None,
        transfer_seconds: float,
        samples: int | None,
    ) -> None:
        num_workers = instance.num_workers
        self._method, self._instance, self._sampler, self._rate = method, instance, sampler, rate
        self._transfer_seconds = transfer_seconds
        self._streams, self._num_samples = OwnStreams(num_workers, samples), samples
        self._workers = range(num_workers)
        self.models = np.tile(instance.initial(), (num_workers, 1))
        # Arithmetic is torch's, on the same memory: the rule DiLoCo is then matched to the last bit.
        self._tensors = list(torch.from_numpy(self.models))
        self.outer = self._tensors[0].clone()
        self._momentum = torch.zeros_like(self.outer)
        self._sent = torch.zeros((num_workers, len(self.outer)), dtype=torch.float64)
        self._out = np.zeros(len(self.outer))
        self._gradient = torch.from_numpy(self._out)
        self._optimizers = [
            PlainSGD(tensor) if inner is None else inner.on(tensor, Layout.of_vector(len(tensor)))
            for tensor in self._tensors
        ]
        self._slices = [slice(fragment, None, method.fragments) for fragment in range(method.fragments)]
        # By inner step modulo H:
        period = method.num_local_steps
        self._sends = {method.offset(fragment): fragment for fragment in range(method.fragments)}
        self._receives = {(step + method.overlap) % period: fragment for step, fragment in self._sends.items()}
        # Of each fragment:
        self._num_sent = [0] * method.fragments  # workers, in the round that is being collected
        self._ready_at = [0.0] * method.fragments  # when the last round's result was, or will be, there
        self._rounds = [0] * method.fragments
        self._num_received = [[0] * num_workers for _ in range(method.fragments)]
        self._waiting: list[list[int]] = [[] for _ in range(method.fragments)]
        # Of each worker:
        self._heap: list[tuple[float, int]] = []
        self._carried: list[int | None] = [None] * num_workers  # the fragment whose transfer it waits for
        self._steps, self._versions, self._draws = [0] * num_workers, [0] * num_workers, [0] * num_workers
        # Its clock is exact from mix to mix, so that a round's seconds do not depend on how they are added up.
        self._since = [0.0] * num_workers
        self._taken: list[list[float]] = [[] for _ in range(num_workers)]
        self._batches: list[tuple[Range, ...]] = [()] * num_workers
        self._dispatch_of = [0] * num_workers
        self._last_seconds = [0.0] * num_workers
        self._idle_since = [0.0] * num_workers
        self._last_wait = [0.0] * num_workers
        self.waited = np.zeros(num_workers)

    def look(self) -> tuple[Array, Array]:
        return self.models.mean(axis=0), self.models

    def run(self) -> Result:
        recorder = self.recorder
        for worker in self._workers:
            recorder.joined(worker, self._hand_out(worker))
            self._begin(worker)
        while self._heap:
            now = self._heap[0][0]
            result = recorder.reach(now)
            if result is not None:
                return result
            worker = heapq.heappop(self._heap)[1]
            fragment = self._carried[worker]
            if fragment is None:
                result = self._finished(worker)
            else:
                self._carried[worker] = None
                self._receive(worker, fragment)
            if result is None and not (self._heap and self._heap[0][0] == now):
                result = recorder.evaluate_if_due()
            if result is not None:
                return result
        if recorder.num_samples != self._num_samples:
            raise RuntimeError(f"workers wait for one another after {recorder.num_samples} samples")
        return Result(DONE)

    def _hand_out(self, worker: int) -> tuple[Started, ...]:
        """Give `worker` its next batch, if there is one."""
        self._batches[worker] = batches = self._streams.take(worker, 1)[0]
        if not batches:
            return ()
        self._dispatch_of[worker] = self.recorder.dispatch()
        return ((worker, self._dispatch_of[worker], batches, self._rate_of(worker)),)

    def _rate_of(self, worker: int) -> float:
        return self._rate(len(self._workers) * self._steps[worker])

    def _begin(self, worker: int) -> None:
        """Start computing what `worker` was handed out."""
        if not self._batches[worker]:
            return
        seconds = self._sampler.draw_one(worker, self._draws[worker])
        self._draws[worker] += 1
        self._taken[worker].append(seconds)
        self._last_seconds[worker] = seconds
        self._last_wait[worker] = self.recorder.train_seconds - self._idle_since[worker]
        self.waited[worker] += self._last_wait[worker]
        heapq.heappush(self._heap, (self._since[worker] + math.fsum(self._taken[worker]), worker))

    def _finished(self, worker: int) -> Result | None:
        """An inner step is done: send what is to be sent, then receive what is due or wait for it, then go on."""
        recorder, method = self.recorder, self._method
        batches, dispatch, learning_rate = self._batches[worker], self._dispatch_of[worker], self._rate_of(worker)
        seconds, waited, read_version = self._last_seconds[worker], self._last_wait[worker], self._versions[worker]
        loss = self._instance.gradient(self.models[worker], worker, batches[0][1], self._out)
        self._optimizers[worker].step(self._gradient, learning_rate)
        recorder.num_samples += 1
        self._steps[worker] += 1
        self._versions[worker] += 1
        self._idle_since[worker] = recorder.train_seconds
        step = self._steps[worker]
        sending = self._sends.get(step % method.num_local_steps)
        # In the first steps nothing has been sent yet that could arrive.
        due = self._receives.get(step % method.num_local_steps) if step > method.overlap else None
        if due is not None:
            self._waiting[due].append(worker)
        if sending is not None:
            self._send(worker, sending)
        started: tuple[Started, ...] = ()
        if due is None:
            started += self._hand_out(worker)
            self._begin(worker)
        else:
            started += self._release(due)
        if sending is not None and sending != due:
            started += self._release(sending)
        return recorder.arrived(
            dispatch=dispatch,
            worker=worker,
            batches=batches,
            read_version=read_version,
            delay=0,
            started=started,
            loss=loss,
            learning_rate=learning_rate,
            compute_seconds=seconds,
            wait_seconds=waited,
        )

    def _send(self, worker: int, fragment: int) -> None:
        """Take `worker`'s displacement on `fragment`; with the last worker's, take the outer step."""
        part = self._slices[fragment]
        outer, momentum, sent = self.outer[part], self._momentum[part], self._sent[:, part]
        torch.sub(outer, self._tensors[worker][part], out=sent[worker])
        self._num_sent[fragment] += 1
        if self._num_sent[fragment] < len(self._workers):
            return
        self._num_sent[fragment] = 0
        self._rounds[fragment] += 1
        self._ready_at[fragment] = self.recorder.train_seconds + self._transfer_seconds
        self.recorder.version += 1
        mean = sent[0].clone()
        for other in self._workers[1:]:
            mean.add_(sent[other])
        mean.div_(len(self._workers))
        beta = self._method.outer_momentum
        momentum.mul_(beta).add_(mean)
        outer.sub_(mean.add_(momentum, alpha=beta).mul_(self._method.outer_learning_rate))

    def _release(self, fragment: int) -> tuple[Started, ...]:
        """Let those who wait for `fragment` go on if its round is complete: now, or when the result is there."""
        received, rounds = self._num_received[fragment], self._rounds[fragment]
        # A fast worker may wait for the next round already, which is complete only once the slower ones have this one.
        waiting = sorted(worker for worker in self._waiting[fragment] if received[worker] < rounds)
        self._waiting[fragment] = [worker for worker in self._waiting[fragment] if received[worker] == rounds]
        started: tuple[Started, ...] = ()
        for worker in waiting:
            started += self._hand_out(worker)
            if self._ready_at[fragment] > self.recorder.train_seconds:
                self._carried[worker] = fragment
                heapq.heappush(self._heap, (self._ready_at[fragment], worker))
            else:
                self._receive(worker, fragment)
        return started

    def _receive(self, worker: int, fragment: int) -> None:
        """Mix the outer result into `worker`'s model, and go on."""
        part, mix, now = self._slices[fragment], self._method.mix, self.recorder.train_seconds
        model = self._tensors[worker][part]
        model.mul_(mix).add_(self.outer[part], alpha=1.0 - mix)
        self._num_received[fragment][worker] += 1
        self._versions[worker] += 1
        self._since[worker], self._taken[worker] = now, []
        self._begin(worker)
