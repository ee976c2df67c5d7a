"""What computes gradients under virtual time: a model with real batches, or a closed-form problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncsgd.core.batches import indices_of
from asyncsgd.core.flat import Layout
from asyncsgd.core.optimizers import Optimizer, OptimizerRecipe, PlainSGD
from asyncsgd.core.protocol import Measured
from asyncsgd.core.running_statistics import RunningStatistics
from asyncsgd.core.state import restore
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Ranges
from asyncsgd.simulation.instance import Instance
from asyncsgd.worker.evaluation import measured
from asyncsgd.worker.worker import Gradient, Worker, take_local_steps


class Computation(Protocol):
    """Computes the gradients of all workers, under virtual time or in a replay."""

    @property
    def gradient(self) -> Tensor:
        """`(P,)`, the last result."""

    @property
    def moved(self) -> Tensor | None:
        """`(3, S)`, what the last gradient has made of running statistics; see `asyncsgd.core.running_statistics`."""

    def compute(
        self,
        worker: int,
        batches: Ranges,
        start: Tensor,
        learning_rate: float | None,
        loss_scales: tuple[float, ...] = (),
        statistics: Tensor | None = None,
    ) -> Gradient:
        """Compute `worker`'s gradient at `start`, or its local steps from there at `learning_rate`.

        Args:
            loss_scales: the scale of each batch's loss, for a gradient that is computed again; see `Gradient`.
            statistics: the running statistics at `start`, `(S,)`, of a model that has some.
        """

    def cut_into(self, micro_batches: int) -> None:
        """Compute batches in so many parts from here on."""

    def forget(self, worker: int) -> None:
        """Forget the inner optimizer of `worker`, which has left."""


class _Gradients:
    """Computes one gradient after another, with an optimizer for the local steps of each worker."""

    KEPT: tuple[str, ...] = ("_optimizers",)

    def __init__(self, make: Callable[[], Optimizer | PlainSGD]) -> None:
        self._make = make
        self._optimizers: dict[int, Any] = {}

    def _optimizer(self, worker: int) -> Optimizer | PlainSGD:
        if worker not in self._optimizers:
            self._optimizers[worker] = self._make()
        return self._optimizers[worker]

    def restored(self) -> None:
        """Make the optimizers whose states are in their places."""
        states = self._optimizers
        self._optimizers = {}
        for worker, state in states.items():
            restore(self._optimizer(worker), state)

    def forget(self, worker: int) -> None:
        self._optimizers.pop(worker, None)


class ModelGradients(_Gradients):
    """Real gradients of a model; every virtual worker has an inner optimizer of its own where local steps need one.

    Args:
        worker: its flat parameters are not the server's.
        inner: the optimizer of local steps.
    """

    KEPT = ("_worker", "_optimizers")

    def __init__(self, worker: Worker, inner: OptimizerRecipe) -> None:
        super().__init__(lambda: inner.on(worker.flat.parameters, worker.flat.layout))
        self._worker = worker

    @property
    def gradient(self) -> Tensor:
        return self._worker.flat.gradients

    @property
    def moved(self) -> Tensor | None:
        statistics = self._worker.flat.statistics
        return None if statistics is None else statistics.moved

    def compute(
        self,
        worker: int,
        batches: Ranges,
        start: Tensor,
        learning_rate: float | None,
        loss_scales: tuple[float, ...] = (),
        statistics: Tensor | None = None,
    ) -> Gradient:
        flat = self._worker.flat
        with torch.no_grad():
            flat.parameters.copy_(start)
            if statistics is not None and flat.statistics is not None:
                flat.statistics.values.copy_(statistics)
        indices = indices_of(batches)
        if learning_rate is None:
            return self._worker.gradient(indices[0], loss_scale=loss_scales[0] if loss_scales else None)
        return self._worker.pseudo_gradient(indices, self._optimizer(worker), learning_rate, loss_scales)

    def cut_into(self, micro_batches: int) -> None:
        self._worker.cut_into(micro_batches)


def whole_evaluation(worker: Worker, statistics: RunningStatistics | None) -> Callable[[Tensor], Measured]:
    """A function from parameters to what an exact evaluation on the whole evaluation set says of them.

    Args:
        statistics: the server's, which are evaluated with its parameters.
    """
    flat = worker.flat

    def measure(parameters: Tensor) -> Measured:
        with torch.no_grad():
            flat.parameters.copy_(parameters)
            if statistics is not None and flat.statistics is not None:
                flat.statistics.values.copy_(statistics.values)
        sums = worker.evaluate(0, 1)
        if statistics is not None and flat.statistics is not None:
            statistics.reestimated = flat.statistics.reestimated
        return measured(worker.task, sums)

    return measure


class ProblemGradients(_Gradients):
    """Stochastic gradients of a closed-form problem in float64; a batch is one sample of its worker's own stream.

    Args:
        instance: the problem for a number of workers and a seed.
        inner: the optimizer of local steps; None: plain SGD.
    """

    def __init__(self, instance: Instance, inner: OptimizerRecipe | None = None) -> None:
        self._instance = instance
        self._out = np.zeros(instance.num_parameters)
        self.gradient = torch.from_numpy(self._out)
        self._scratch = scratch = torch.zeros_like(self.gradient)
        plain = PlainSGD(scratch)
        super().__init__(lambda: inner.on(scratch, Layout.of_vector(len(scratch))) if inner else plain)

    moved = None

    def initial(self) -> Tensor:
        """float64 `(P,)`, new."""
        return torch.from_numpy(self._instance.initial())

    def compute(
        self,
        worker: int,
        batches: Ranges,
        start: Tensor,
        learning_rate: float | None,
        loss_scales: tuple[float, ...] = (),
        statistics: Tensor | None = None,
    ) -> Gradient:
        if loss_scales:
            raise UsageError("a closed-form problem has no loss_scales; give the log as the run wrote it")
        if learning_rate is None:
            return self._one(start, worker, batches[0].first)
        self._scratch.copy_(start)
        return take_local_steps(
            indices_of(batches),
            lambda index: self._one(self._scratch, worker, index),
            self._scratch,
            self.gradient,
            start,
            self._optimizer(worker),
            learning_rate,
        )

    def cut_into(self, micro_batches: int) -> None:
        pass  # one sample is one part

    def _one(self, point: Tensor, worker: int, index: int) -> Gradient:
        return Gradient(self._instance.gradient(point.numpy(), worker, index, self._out), 1.0, 1)

    def measure(self, parameters: Tensor) -> Measured:
        """The excess f(x) - f*, and no metrics."""
        return Measured(self._instance.loss(parameters.numpy()))
