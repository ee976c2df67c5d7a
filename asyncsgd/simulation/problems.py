"""Optimisation problems with exact answers, on which a rule can be simulated under virtual time.

Shapes: P parameters, N workers. All arrays are float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, TypeVar

import numpy as np

from asyncsgd.named_choices import Kind, parameter
from asyncsgd.simulation.instance import NOISE, PURPOSE, Array, Instance, Problem
from asyncsgd.simulation.logistic import Logistic
from asyncsgd.simulation.sampler import Streams

_BLOCK = 64
"""Scalar variates that are drawn at once; part of the streams."""
P = TypeVar("P", bound="ClosedForm")


class ClosedForm(Problem, Instance):
    """Base of the problems that have formulas. `on` gives a copy that knows its workers and has its noise.

    Noise of one `noise_kind` is added to a gradient g, with s = `noise`:

        add    g + s z, z standard normal, the same in every coordinate (a rank-one covariance)
        full   g + s z, z standard normal in R^P: the same total variance
        last   g_j B/s for the coordinates j beyond the last non-zero one of x, B Bernoulli(s)
    """

    dimension: int = 1
    curvature: float
    condition: float = 1.0
    noise: float
    noise_kind: str = "add"
    _streams: Streams
    _num_workers: int
    _scalars: Callable[[int, int], list[float]]

    def on(self: P, num_workers: int, seed: int) -> P:
        bound, streams = dataclasses.replace(self), Streams(seed, PURPOSE)

        @functools.lru_cache(2 * num_workers)
        def scalars(worker: int, block: int) -> list[float]:
            generator = streams.at(worker, block, NOISE)
            draw = generator.random if self.noise_kind == "last" else generator.standard_normal
            values: list[float] = draw(_BLOCK).tolist()
            return values

        bound.__dict__.update(num_parameters=self.dimension, _num_workers=num_workers)
        bound.__dict__.update(_streams=streams, _scalars=scalars)
        return bound

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        value, noise = self._differentiate(x, worker, out), self.noise
        if noise == (1.0 if self.noise_kind == "last" else 0.0):
            return value
        if self.noise_kind == "full":
            out += noise * self._streams.at(worker, index, NOISE).standard_normal(len(out))
            return value
        scalar = self._scalars(worker, index // _BLOCK)[index % _BLOCK]
        if self.noise_kind == "add":
            out += noise * scalar
        else:
            nonzero = np.flatnonzero(x)
            progress = nonzero[-1] + 1 if len(nonzero) else 0
            out[progress:] *= 1.0 / noise if scalar < noise else 0.0
        return value

    @functools.cached_property
    def _spectrum(self) -> Array:
        return np.geomspace(self.curvature / self.condition, self.curvature, self.dimension)

    def _differentiate(self, x: Array, worker: int, out: Array) -> float:
        """Write the gradient of f_i at `x` into `out`; return f_i(x) - f*. By default f = sum_j lambda_j x_j^2 / 2."""
        np.multiply(self._spectrum, x, out=out)
        return 0.5 * float(x.dot(out))

    def exact_gradient(self, x: Array) -> Array:
        """Return the gradient of the global objective f, `(P,)`, a new array."""
        out = np.empty(self.dimension)
        self._differentiate(x, 0, out)
        return out

    def loss(self, x: Array) -> float:
        return self._differentiate(x, 0, np.empty(self.dimension))

    def initial(self) -> Array:
        return np.ones(self.dimension)

    def optimum(self) -> Array:
        """Return the minimiser of f, `(P,)`, a new array."""
        return np.zeros(self.dimension)


@dataclasses.dataclass(frozen=True)
class Tridiagonal(ClosedForm):
    """The worst-case quadratic of first-order methods, as in the experiments of the Ringmaster paper.

        f(x) = x^T A x / 2 - b^T x,   A = tridiag(-1, 2, -1) / 4,   b = -e_1 / 4,   x_0 = sqrt(P) e_1

    with f* = -(1/8) (1 - 1/(P+1)) and the optimum x_j = -(1 - j/(P+1)), j = 1..P. The same f with ``noise_kind=last``
    is the oracle of the Rennala paper's lower bound.

    Args:
        dimension: P.
        noise: standard deviation per coordinate (kinds add and full), or the probability in (0, 1] (kind last).
        noise_kind: add, full or last, as in `ClosedForm`.

    >>> instance = Tridiagonal().on(num_workers=1, seed=0)
    >>> round(instance.loss(instance.initial()), 1)
    442.8

    References:
        Maranjyan, Tyurin, Richtarik: Ringmaster ASGD, ICML 2025. Tyurin, Richtarik: Optimal Time Complexities of
        Parallel Stochastic Optimization Methods Under a Fixed Computation Model, NeurIPS 2023.
    """

    dimension: int = parameter(1729, at_least=1)
    noise: float = parameter(0.01, at_least=0)
    noise_kind: str = parameter("add")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_kind not in ("add", "full", "last"):
            raise ValueError(f"noise_kind must be add, full or last, got {self.noise_kind!r}")
        if self.noise_kind == "last" and not 0 < self.noise <= 1:
            raise ValueError(f"noise is a probability with noise_kind=last: above 0, at most 1, got {self.noise}")

    def initial(self) -> Array:
        x = np.zeros(self.dimension)
        x[0] = math.sqrt(self.dimension)
        return x

    def _differentiate(self, x: Array, worker: int, out: Array) -> float:
        np.multiply(x, 0.5, out=out)
        quarter = 0.25 * x
        out[:-1] -= quarter[1:]
        out[1:] -= quarter[:-1]
        out[0] += 0.25
        # f = x.(g - b)/2 with g = A x - b
        return 0.5 * (float(x.dot(out)) + 0.25 * float(x[0])) + (1.0 - 1.0 / (self.dimension + 1)) / 8.0

    def loss(self, x: Array) -> float:
        # (x - x*)^T A (x - x*)/2 as a sum of squares: never negative, no cancellation near the optimum
        steps = np.diff(x - self.optimum(), prepend=0.0, append=0.0)
        return float(steps @ steps) / 8.0

    def optimum(self) -> Array:
        return np.arange(1, self.dimension + 1) / (self.dimension + 1) - 1.0


@dataclasses.dataclass(frozen=True)
class Mode(ClosedForm):
    """One mode of a quadratic, f(x) = curvature x^2 / 2 in R, started at 1: the problem of the stability oracles.

    Args:
        curvature: lambda; only learning rate times lambda matters.
        noise: standard deviation of the gradient's normal noise.

    >>> instance = Mode(curvature=2).on(num_workers=1, seed=0)
    >>> out = np.empty(1)
    >>> instance.gradient(instance.initial(), 0, 0, out), float(out[0])
    (1.0, 2.0)
    """

    curvature: float = parameter(1.0, above=0)
    noise: float = parameter(0.0, at_least=0)


@dataclasses.dataclass(frozen=True)
class Quadratic(ClosedForm):
    """A diagonal quadratic, f(x) = sum_j lambda_j x_j^2 / 2, with eigenvalues spaced geometrically.

    lambda_1 = curvature/condition, ..., lambda_P = curvature; the optimum is 0, the start (1, ..., 1).

    Args:
        dimension: P.
        curvature: the largest eigenvalue.
        condition: the largest eigenvalue over the smallest.
        noise: standard deviation of independent normal noise in each coordinate.
    """

    noise_kind = "full"

    dimension: int = parameter(100, at_least=1)
    curvature: float = parameter(1.0, above=0)
    condition: float = parameter(10.0, at_least=1)
    noise: float = parameter(0.1, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimension == 1 and self.condition != 1:
            raise ValueError(f"one dimension has one eigenvalue; type condition=1, got condition={self.condition}")


@dataclasses.dataclass(frozen=True)
class Heterogeneous(ClosedForm):
    """Three scalar quadratics that disagree, dealt to the workers in turn.

        f_i(x) = A_i x^2 / 2 - b_i x,   A = (1, 2, 1/2),   b = (1, -2, 3),   worker i having f_{i mod 3}

    The optimum of the mean over three workers is 2/3.5 = .5714; a rule that lets fast workers count more often ends
    elsewhere. The start is 0.

    Args:
        noise: standard deviation of the gradient's normal noise.
    """

    noise: float = parameter(0.0, at_least=0)

    _CURVATURES: ClassVar[tuple[float, ...]] = (1.0, 2.0, 0.5)
    _SLOPES: ClassVar[tuple[float, ...]] = (1.0, -2.0, 3.0)

    @functools.cached_property
    def _whole(self) -> tuple[float, float, float]:
        """Of f: its curvature, its minimiser, and its least value."""
        curvature, slope = [
            sum(values[worker % 3] for worker in range(self._num_workers)) / self._num_workers
            for values in (self._CURVATURES, self._SLOPES)
        ]
        return curvature, slope / curvature, -0.5 * slope * (slope / curvature)

    def _differentiate(self, x: Array, worker: int, out: Array) -> float:
        point, curvature, slope = float(x[0]), self._CURVATURES[worker % 3], self._SLOPES[worker % 3]
        out[0] = curvature * point - slope
        return (0.5 * curvature * point - slope) * point - self._whole[2]

    def exact_gradient(self, x: Array) -> Array:
        curvature, optimum, _ = self._whole
        return np.array([curvature * (float(x[0]) - optimum)])

    def loss(self, x: Array) -> float:
        curvature, optimum, _ = self._whole
        return 0.5 * curvature * (float(x[0]) - optimum) ** 2

    def initial(self) -> Array:
        return np.zeros(1)

    def optimum(self) -> Array:
        return np.array([self._whole[1]])


ALL: tuple[Problem, ...] = (Tridiagonal(), Quadratic(), Mode(), Heterogeneous(), Logistic())
"""An example of each problem, for the contract tests and ``--problem help``."""

_KIND = Kind[Problem]("problem", "problems", "--problem", {problem.name: type(problem) for problem in ALL})
parse_problem, describe_problems = _KIND.read, _KIND.help
