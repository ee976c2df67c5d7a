"""Optimisation problems with exact answers, on which a rule can be simulated under virtual time.

A `Problem` is a frozen dataclass of parameters; `Problem.on` turns it into an `Instance` for a number of workers and
a seed, and that is what is simulated: a stochastic gradient for (worker, index), the exact excess loss, the exact
gradient and the optimum. Noise is a pure function of (seed, worker, index), so two rules compared on one seed see the
same noise in the same sample, whatever the order of their calls.

Shapes: P parameters, N workers, F features, C classes, R rows of data. All arrays are float64.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from asyncsgd.errors import RunError, UsageError, nearest
from asyncsgd.named_choices import Kind, describe, spell

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_PURPOSE = 12
"""Second word of the Philox key: the streams of this module."""
_NOISE, _DATA, _SHARES = range(3)
"""Last word of the Philox counter: what a stream of this module is for."""
_BLOCK = 64
"""Scalar variates drawn at once and kept per worker."""


class _Streams:
    """A generator that can be placed at any (part, worker, position); up to 2^64 draws do not reach the next place.

    Setting the state is several times cheaper than making a Philox generator, which also asks the system for entropy.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed % 2**64, _PURPOSE], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state

    def at(self, part: int, worker: int = 0, position: int = 0) -> np.random.Generator:
        """Return the generator, valid until the next call."""
        self._state["state"]["counter"][:] = (0, position, worker, part)
        self._bits.state = self._state
        return self._generator


class _Scalars:
    """One scalar variate per (worker, index), kept in blocks so that a call in sequence costs a list access."""

    def __init__(self, streams: _Streams, num_workers: int, draw: Callable[[np.random.Generator], Array]) -> None:
        self._streams = streams
        self._draw = draw
        self._block = [-1] * num_workers
        self._values: list[list[float]] = [[] for _ in range(num_workers)]

    def at(self, worker: int, index: int) -> float:
        block = index // _BLOCK
        if self._block[worker] != block:
            self._values[worker] = self._draw(self._streams.at(_NOISE, worker, block)).tolist()
            self._block[worker] = block
        return self._values[worker][index % _BLOCK]


class Instance(abc.ABC):
    """A problem for a number of workers and a seed: f(x) = (1/N) sum_i f_i(x), f_i being what worker i samples.

    Attributes:
        num_parameters: P.
        num_workers: N; `gradient` takes workers 0..N-1.
    """

    num_parameters: int
    num_workers: int

    @abc.abstractmethod
    def initial(self) -> Array:
        """Return the published starting point, `(P,)`, a new array."""

    @abc.abstractmethod
    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        """Write the stochastic gradient of sample `index` of `worker` at `x` into `out`; return a loss value at `x`.

        The same (x, worker, index) gives the same bits in any order of calls. The mean of the returned values over
        indices and workers is `loss(x) + minimum`; a closed-form problem returns the exact value of f_i.

        Args:
            x: `(P,)`, only read.
            worker: 0..N-1.
            index: 0, 1, ...: the sample's position among those of this worker.
            out: `(P,)`, overwritten; must not overlap `x`.

        Raises:
            UsageError: if `worker` or `index` is out of range.
        """

    @abc.abstractmethod
    def exact_gradient(self, x: Array) -> Array:
        """Return the gradient of the global objective f, `(P,)`, a new array."""

    @abc.abstractmethod
    def loss(self, x: Array) -> float:
        """Return the exact global excess f(x) - f*, 0 or more up to rounding."""

    @abc.abstractmethod
    def optimum(self) -> Array | None:
        """Return a minimiser of f, `(P,)`, a new array; None where none is known."""

    @property
    def minimum(self) -> float:
        """f*. Zero for the closed-form problems, whose f is shifted so that it is."""
        return 0.0

    def squared_gradient_norm(self, x: Array) -> float:
        """Return ||grad f(x)||^2 of the global objective, without noise."""
        gradient = self.exact_gradient(x)
        return float(gradient @ gradient)

    def _check(self, worker: int, index: int) -> None:
        # A negative index would silently mean another worker, or another block of noise.
        if not 0 <= worker < self.num_workers:
            raise UsageError(f"worker must be 0..{self.num_workers - 1}, got {worker}")
        if index < 0:
            raise UsageError(f"index must be 0 or more, got {index}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Base of all problems: parameters as fields with defaults, `on` for an instance."""

    name: ClassVar[str]
    """What the user types after ``--problem``."""
    summary: ClassVar[str]
    """One line for ``--problem help``."""

    def on(self, num_workers: int, seed: int) -> Instance:
        """Return the instance for `num_workers` workers whose data and noise are functions of `seed`.

        Raises:
            UsageError: if the problem cannot be split over so many workers.
        """
        if num_workers < 1:
            raise UsageError(f"num_workers must be 1 or more, got {num_workers}")
        return self._on(num_workers, seed)

    def _on(self, num_workers: int, seed: int) -> Instance:
        raise TypeError(f"{type(self).__name__} does not define _on()")

    def __str__(self) -> str:
        return spell(self)

    def _at_least(self, bound: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not bound <= value < math.inf:
                raise ValueError(f"{name} must be {bound} or more and finite, got {value}")

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")


# ---------------------------------------------------------------------------------------------------------------------
# Noise on an exact gradient. Each takes (x, worker, index, out) and changes `out` in place.

_Noise = Callable[[Array, int, int, Array], None]


class _AddScalar:
    """out <- out + s z: one standard normal z per call, the same in every coordinate (a rank-one covariance)."""

    def __init__(self, size: int, num_workers: int, seed: int, noise: float) -> None:
        self._scalars = _Scalars(_Streams(seed), num_workers, lambda generator: generator.standard_normal(_BLOCK))
        self._noise = noise

    def __call__(self, x: Array, worker: int, index: int, out: Array) -> None:
        np.add(out, self._noise * self._scalars.at(worker, index), out=out)


class _AddFull:
    """out <- out + s z, z standard normal in R^P: the full-rank noise with the total variance of `_AddScalar`."""

    def __init__(self, size: int, num_workers: int, seed: int, noise: float) -> None:
        self._streams = _Streams(seed)
        self._noise = noise
        self._scratch = np.empty(size)

    def __call__(self, x: Array, worker: int, index: int, out: Array) -> None:
        self._streams.at(_NOISE, worker, index).standard_normal(out=self._scratch)
        np.multiply(self._scratch, self._noise, out=self._scratch)
        np.add(out, self._scratch, out=out)


class _ZeroLast:
    """out_j <- out_j B/p for j > prog(x), one Bernoulli(p) variate B per call: progress is made with probability p."""

    def __init__(self, size: int, num_workers: int, seed: int, probability: float) -> None:
        self._scalars = _Scalars(_Streams(seed), num_workers, lambda generator: generator.random(_BLOCK))
        self._probability = probability

    def __call__(self, x: Array, worker: int, index: int, out: Array) -> None:
        if x[-1] != 0.0:
            return  # prog(x) = P: nothing lies beyond
        nonzero = x[::-1] != 0.0
        back = int(nonzero.argmax())
        progress = len(x) - back if nonzero[back] else 0
        revealed = self._scalars.at(worker, index) < self._probability
        out[progress:] *= 1.0 / self._probability if revealed else 0.0


_NOISE_KINDS: dict[str, Callable[[int, int, int, float], _Noise]] = {
    "add": _AddScalar,
    "full": _AddFull,
    "last": _ZeroLast,
}
_NOISELESS = {"add": 0.0, "full": 0.0, "last": 1.0}
"""The value of `noise` at which a kind leaves the gradient exact, and nothing is drawn."""


def _noise(kind: str, size: int, num_workers: int, seed: int, noise: float) -> _Noise | None:
    return None if noise == _NOISELESS[kind] else _NOISE_KINDS[kind](size, num_workers, seed, noise)


# ---------------------------------------------------------------------------------------------------------------------
# Quadratics


@dataclasses.dataclass(frozen=True)
class Tridiagonal(Problem):
    """The worst-case quadratic of first-order methods, as in the experiments of the Ringmaster paper:

        f(x) = x^T A x / 2 - b^T x,   A = tridiag(-1, 2, -1) / 4,   b = -e_1 / 4,   x_0 = sqrt(P) e_1

    with f* = -(1/8) (1 - 1/(P+1)) and the optimum x_j = -(1 - j/(P+1)), j = 1..P. The same f with ``noise_kind=last``
    is the oracle of the Rennala paper's lower bound.

    Args:
        dimension: P.
        noise: standard deviation per coordinate (kinds add and full), or the probability p in (0, 1] (kind last).
        noise_kind: ``add``, one standard normal number per call, broadcast to all coordinates; ``full``, independent
            in each coordinate, of the same total variance; ``last``, coordinates beyond the last non-zero one of x
            are multiplied by Bernoulli(p)/p.

    >>> instance = Tridiagonal().on(num_workers=1, seed=0)
    >>> round(instance.loss(instance.initial()), 1)
    442.8

    References:
        Maranjyan, Tyurin, Richtarik: Ringmaster ASGD, ICML 2025. Tyurin, Richtarik: Optimal Time Complexities of
        Parallel Stochastic Optimization Methods Under a Fixed Computation Model, NeurIPS 2023.
    """

    name: ClassVar[str] = "tridiagonal"
    summary: ClassVar[str] = "worst-case quadratic of the Ringmaster and Rennala papers; noise_kind add, full or last"

    dimension: int = 1729
    noise: float = 0.01
    noise_kind: str = "add"

    def __post_init__(self) -> None:
        self._at_least(1, "dimension")
        if self.noise_kind not in _NOISE_KINDS:
            hint = nearest(self.noise_kind, _NOISE_KINDS)
            raise ValueError(f"noise_kind must be one of {', '.join(_NOISE_KINDS)}, got {self.noise_kind!r}{hint}")
        if self.noise_kind == "last" and not 0 < self.noise <= 1:
            raise ValueError(f"noise is a probability with noise_kind=last: above 0, at most 1, got {self.noise}")
        self._at_least(0, "noise")

    def _on(self, num_workers: int, seed: int) -> Instance:
        noise = _noise(self.noise_kind, self.dimension, num_workers, seed, self.noise)
        return _TridiagonalInstance(self.dimension, num_workers, noise)


class _TridiagonalInstance(Instance):
    def __init__(self, dimension: int, num_workers: int, noise: _Noise | None) -> None:
        self.num_parameters = dimension
        self.num_workers = num_workers
        self._noise = noise
        self._minimum = -(1.0 - 1.0 / (dimension + 1)) / 8.0
        self._scratch = np.empty(dimension)
        self._head, self._tail = self._scratch[:-1], self._scratch[1:]

    def initial(self) -> Array:
        x = np.zeros(self.num_parameters)
        x[0] = math.sqrt(self.num_parameters)
        return x

    def _exact(self, x: Array, out: Array) -> None:
        """Write A x - b."""
        np.multiply(x, 0.5, out=out)
        np.multiply(x, 0.25, out=self._scratch)
        part = out[:-1]
        np.subtract(part, self._tail, out=part)
        part = out[1:]
        np.subtract(part, self._head, out=part)
        out[0] += 0.25

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        self._check(worker, index)
        self._exact(x, out)
        # f = x.(g - b)/2 with g = A x - b, before the noise is added
        value = 0.5 * (float(x.dot(out)) + 0.25 * float(x[0])) - self._minimum
        if self._noise is not None:
            self._noise(x, worker, index, out)
        return value

    def exact_gradient(self, x: Array) -> Array:
        out = np.empty(self.num_parameters)
        self._exact(x, out)
        return out

    def loss(self, x: Array) -> float:
        # (x - x*)^T A (x - x*)/2 as a sum of squares: never negative, no cancellation near the optimum
        steps = np.diff(x - self.optimum(), prepend=0.0, append=0.0)
        return float(steps @ steps) / 8.0

    def optimum(self) -> Array:
        return np.arange(1, self.num_parameters + 1) / (self.num_parameters + 1) - 1.0


@dataclasses.dataclass(frozen=True)
class Quadratic(Problem):
    """A diagonal quadratic, f(x) = sum_j lambda_j x_j^2 / 2, with eigenvalues spaced geometrically.

    lambda_1 = curvature/condition, ..., lambda_P = curvature; the optimum is 0, the start (1, ..., 1).

    Args:
        dimension: P.
        curvature: the largest eigenvalue.
        condition: the largest eigenvalue over the smallest.
        noise: standard deviation of independent normal noise in each coordinate.
    """

    name: ClassVar[str] = "quadratic"
    summary: ClassVar[str] = "diagonal quadratic, geometric spectrum, independent noise in each coordinate"

    dimension: int = 100
    curvature: float = 1.0
    condition: float = 10.0
    noise: float = 0.1

    def __post_init__(self) -> None:
        self._at_least(1, "dimension", "condition")
        self._positive("curvature")
        self._at_least(0, "noise")
        if self.dimension == 1 and self.condition != 1:
            raise ValueError(f"one dimension has one eigenvalue; type condition=1, got condition={self.condition}")

    def _on(self, num_workers: int, seed: int) -> Instance:
        spectrum = np.geomspace(self.curvature / self.condition, self.curvature, self.dimension)
        return _DiagonalInstance(spectrum, num_workers, _noise("full", self.dimension, num_workers, seed, self.noise))


@dataclasses.dataclass(frozen=True)
class Mode(Problem):
    """One mode of a quadratic, f(x) = curvature x^2 / 2 in R, started at 1: the problem of the stability oracles.

    Args:
        curvature: lambda; only learning rate times lambda matters.
        noise: standard deviation of the gradient's normal noise.

    >>> instance = Mode(curvature=2).on(num_workers=1, seed=0)
    >>> out = np.empty(1)
    >>> instance.gradient(instance.initial(), 0, 0, out), float(out[0])
    (1.0, 2.0)
    """

    name: ClassVar[str] = "mode"
    summary: ClassVar[str] = "one scalar quadratic mode, for stability limits and stationary variances"

    curvature: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        self._positive("curvature")
        self._at_least(0, "noise")

    def _on(self, num_workers: int, seed: int) -> Instance:
        noise = _noise("add", 1, num_workers, seed, self.noise)
        return _DiagonalInstance(np.array([float(self.curvature)]), num_workers, noise)


class _DiagonalInstance(Instance):
    def __init__(self, spectrum: Array, num_workers: int, noise: _Noise | None) -> None:
        self.num_parameters = len(spectrum)
        self.num_workers = num_workers
        self._spectrum = spectrum
        self._noise = noise

    def initial(self) -> Array:
        return np.ones(self.num_parameters)

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        self._check(worker, index)
        np.multiply(self._spectrum, x, out=out)
        value = 0.5 * float(x.dot(out))
        if self._noise is not None:
            self._noise(x, worker, index, out)
        return value

    def exact_gradient(self, x: Array) -> Array:
        return self._spectrum * x

    def loss(self, x: Array) -> float:
        return 0.5 * float(x @ (self._spectrum * x))

    def optimum(self) -> Array:
        return np.zeros(self.num_parameters)


@dataclasses.dataclass(frozen=True)
class Heterogeneous(Problem):
    """Three scalar quadratics that disagree, dealt to the workers in turn:

        f_i(x) = A_i x^2 / 2 - b_i x,   A = (1, 2, 1/2),   b = (1, -2, 3),   worker i having f_{i mod 3}

    The optimum of the mean over three workers is 2/3.5 = .5714; a rule that lets fast workers count more often ends
    elsewhere. The start is 0.

    Args:
        noise: standard deviation of the gradient's normal noise.
    """

    name: ClassVar[str] = "heterogeneous"
    summary: ClassVar[str] = "three scalar quadratics, one per worker in turn: shows the bias towards fast workers"

    noise: float = 0.0

    def __post_init__(self) -> None:
        self._at_least(0, "noise")

    def _on(self, num_workers: int, seed: int) -> Instance:
        return _HeterogeneousInstance(num_workers, _noise("add", 1, num_workers, seed, self.noise))


class _HeterogeneousInstance(Instance):
    _CURVATURES = (1.0, 2.0, 0.5)
    _SLOPES = (1.0, -2.0, 3.0)

    def __init__(self, num_workers: int, noise: _Noise | None) -> None:
        self.num_parameters = 1
        self.num_workers = num_workers
        self._noise = noise
        self._curvature = sum(self._CURVATURES[worker % 3] for worker in range(num_workers)) / num_workers
        slope = sum(self._SLOPES[worker % 3] for worker in range(num_workers)) / num_workers
        self._optimum = slope / self._curvature
        self._minimum = -0.5 * slope * self._optimum

    def initial(self) -> Array:
        return np.zeros(1)

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        self._check(worker, index)
        point = float(x[0])
        curvature, slope = self._CURVATURES[worker % 3], self._SLOPES[worker % 3]
        out[0] = curvature * point - slope
        if self._noise is not None:
            self._noise(x, worker, index, out)
        return (0.5 * curvature * point - slope) * point - self._minimum

    def exact_gradient(self, x: Array) -> Array:
        return np.array([self._curvature * (float(x[0]) - self._optimum)])

    def loss(self, x: Array) -> float:
        return 0.5 * self._curvature * (float(x[0]) - self._optimum) ** 2

    def optimum(self) -> Array:
        return np.array([self._optimum])


# ---------------------------------------------------------------------------------------------------------------------
# Data


@dataclasses.dataclass(frozen=True)
class Logistic(Problem):
    """Softmax regression on synthetic documents whose classes are spread unevenly over the workers.

    A document is 40 words from its class's word distribution (Zipf frequencies, each multiplied by a log-normal
    factor of the class), counted and scaled to length 1. The rows go to the workers by `dirichlet_shares`, the
    objective is that of `LogisticData`.

    Args:
        features: F, the size of the vocabulary.
        rows: documents in all, the same number (up to one) of each class.
        classes: C; there are F times C parameters.
        alpha: of the Dirichlet distribution of classes within a worker; small, a worker sees one class; large, all.
        batch: rows in a stochastic gradient, drawn with replacement from the worker's share.
        penalty: of the squared length of the parameters, halved.
    """

    name: ClassVar[str] = "logistic"
    summary: ClassVar[str] = "softmax regression on synthetic documents, classes dealt to workers by Dirichlet(alpha)"

    features: int = 200
    rows: int = 2000
    classes: int = 2
    alpha: float = 0.1
    batch: int = 8
    penalty: float = 0.01

    _LENGTH: ClassVar[int] = 40

    def __post_init__(self) -> None:
        self._at_least(1, "features", "batch")
        self._at_least(2, "classes")
        self._at_least(self.classes, "rows")
        self._positive("alpha", "penalty")

    def _on(self, num_workers: int, seed: int) -> Instance:
        generator = _Streams(seed).at(_DATA)
        labels = np.arange(self.rows) % self.classes
        frequencies = np.exp(generator.standard_normal((self.classes, self.features)))
        frequencies /= np.arange(1, self.features + 1)
        frequencies /= frequencies.sum(axis=1, keepdims=True)
        counts = generator.multinomial(self._LENGTH, frequencies[labels]).astype(np.float64)
        counts /= np.linalg.norm(counts, axis=1, keepdims=True)
        shares = dirichlet_shares(labels, num_workers, self.alpha, seed)
        return LogisticData(counts, labels, shares, self.batch, self.penalty, seed)


class LogisticData(Instance):
    """L2-penalised softmax regression on given rows, each worker having its own share of them.

        f(W) = (1/N) sum_i mean over k in share i of -log softmax(a_k W)[label_k]   +   penalty ||W||^2 / 2

    so every worker has weight 1/N whatever its share's size. The parameters are W, `(F, C)`, row by row; the start is
    0. The optimum is computed when it is first needed (by `loss`, `minimum` or `optimum`), by L-BFGS-B, and kept.

    Args:
        features: `(R, F)`, finite; float64 is kept without a copy, so do not change it.
        labels: `(R,)`, integers 0..C-1; C is the largest plus one, 2 or more.
        shares: for each worker the indices of its rows, at least one.
        batch: rows in a stochastic gradient, drawn with replacement from the worker's share.
        penalty: above 0; without it separable rows have no optimum.
        seed: of the draws of rows.

    Raises:
        UsageError: if shapes, labels, shares or numbers do not fit.

    >>> instance = LogisticData(np.eye(2), np.array([0, 1]), [np.array([0]), np.array([1])], 1, 0.1, seed=0)
    >>> instance.num_workers, instance.num_parameters
    (2, 4)
    """

    def __init__(
        self,
        features: npt.ArrayLike,
        labels: npt.ArrayLike,
        shares: Sequence[npt.ArrayLike],
        batch: int,
        penalty: float,
        seed: int,
    ) -> None:
        self._features = np.asarray(features, dtype=np.float64)
        if self._features.ndim != 2 or not np.isfinite(self._features).all():
            raise UsageError(f"features must be a finite matrix (rows, features), got shape {self._features.shape}")
        num_rows = len(self._features)
        self._labels = _checked_labels(labels)
        if len(self._labels) != num_rows:
            raise UsageError(f"give one label per row: {num_rows} rows, {len(self._labels)} labels")
        num_classes = int(self._labels.max(initial=-1)) + 1
        if num_classes < 2:
            raise UsageError(f"labels must name 2 classes or more (0 and 1 at least), got {num_classes}")
        if batch < 1:
            raise UsageError(f"batch must be 1 or more, got {batch}")
        if not 0 < penalty < math.inf:
            raise UsageError(f"penalty must be above 0 and finite, got {penalty}")
        if not len(shares):
            raise UsageError("shares must hold one array of row indices per worker, got none")
        self.shares: tuple[Indices, ...] = tuple(np.array(share) for share in shares)
        self._row_weights = np.zeros(num_rows)
        for worker, share in enumerate(self.shares):
            if share.ndim != 1 or not len(share) or share.dtype.kind not in "iu":
                raise UsageError(f"share of worker {worker} must be row indices, one or more, got {share!r}")
            if share.min() < 0 or share.max() >= num_rows:
                raise UsageError(
                    f"share of worker {worker} has rows {share.min()}..{share.max()}; there are 0..{num_rows - 1}"
                )
            np.add.at(self._row_weights, share, 1.0 / (len(shares) * len(share)))
        self._shape = (self._features.shape[1], num_classes)
        self.num_parameters = self._shape[0] * self._shape[1]
        self.num_workers = len(shares)
        self._batch = batch
        self._penalty = float(penalty)
        self._streams = _Streams(seed)
        self._solution: tuple[Array, float] | None = None

    def initial(self) -> Array:
        return np.zeros(self.num_parameters)

    def _differentiate(self, x: Array, features: Array, labels: Indices, weights: Array | float, out: Array) -> float:
        """Write the gradient of sum_k weights_k loss_k + penalty term; return that sum."""
        parameters, gradient = x.reshape(self._shape), out.reshape(self._shape)
        every = np.arange(len(labels))
        scores = features @ parameters
        scores -= scores.max(axis=1, keepdims=True)
        picked = scores[every, labels]
        np.exp(scores, out=scores)
        totals = scores.sum(axis=1)
        losses = weights * (np.log(totals) - picked)
        scores /= totals[:, None]
        scores[every, labels] -= 1.0
        scores *= weights if isinstance(weights, float) else weights[:, None]
        np.matmul(features.T, scores, out=gradient)
        gradient += self._penalty * parameters
        return float(losses.sum()) + 0.5 * self._penalty * float(x @ x)

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        self._check(worker, index)
        share = self.shares[worker]
        rows = share[self._streams.at(_NOISE, worker, index).integers(0, len(share), self._batch)]
        return self._differentiate(x, self._features[rows], self._labels[rows], 1.0 / self._batch, out)

    def _value_and_gradient(self, x: Array) -> tuple[float, Array]:
        out = np.empty(self.num_parameters)
        return self._differentiate(x, self._features, self._labels, self._row_weights, out), out

    def exact_gradient(self, x: Array) -> Array:
        return self._value_and_gradient(x)[1]

    def _solve(self) -> tuple[Array, float]:
        if self._solution is None:
            import scipy.optimize  # a tenth of a second that only a caller of `loss` should pay

            options = {"maxiter": 100_000, "maxfun": 100_000, "maxcor": 30, "ftol": 0.0, "gtol": 1e-10}
            x = scipy.optimize.minimize(
                self._value_and_gradient, self.initial(), jac=True, method="L-BFGS-B", options=options
            ).x
            value, gradient = self._value_and_gradient(x)
            # f is penalty-strongly convex, so f(x) - f* <= ||grad f(x)||^2 / (2 penalty): a proof, not a hope
            error = float(gradient @ gradient) / (2 * self._penalty)
            if not error <= 1e-10 * max(1.0, abs(value)):
                raise RunError(f"the optimum was found only to {error:.1e} in the loss; raise penalty={self._penalty}")
            self._solution = x, value
        return self._solution

    @property
    def minimum(self) -> float:
        return self._solve()[1]

    def loss(self, x: Array) -> float:
        return self._value_and_gradient(x)[0] - self.minimum

    def optimum(self) -> Array:
        return self._solve()[0].copy()


def _checked_labels(labels: npt.ArrayLike) -> Indices:
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and array.min() < 0):
        raise UsageError(f"labels must be a list of integers 0, 1, ..., got {array!r}")
    return array.astype(np.int64)


def hashed_bag_of_words(texts: Iterable[str], num_features: int) -> Array:
    """Return `(texts, num_features)`: counts of each text's lower-cased words by hashed column, rows of length 1.

    The column of a word is its BLAKE2b hash modulo `num_features`, the same on every machine and in every process
    (Python's own hash of a string is not). A text without words gives a row of zeros.

    >>> hashed_bag_of_words(["to be, or not to BE"], 8).round(3).tolist()
    [[0.0, 0.632, 0.0, 0.632, 0.0, 0.316, 0.0, 0.316]]

    Raises:
        UsageError: for one bare string in place of a list, or fewer than one feature.
    """
    if isinstance(texts, str):
        raise UsageError(f"give a list of texts, not one text: [{texts[:20]!r}]")
    if num_features < 1:
        raise UsageError(f"num_features must be 1 or more, got {num_features}")
    columns: dict[str, int] = {}
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    bags = np.zeros((len(documents), num_features))
    for bag, words in zip(bags, documents, strict=True):
        for word in words:
            if word not in columns:
                digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                columns[word] = int.from_bytes(digest, "little") % num_features
            bag[columns[word]] += 1.0
        if words:
            bag /= math.sqrt(float(bag @ bag))
    return bags


def dirichlet_shares(labels: npt.ArrayLike, num_workers: int, alpha: float, seed: int) -> list[Indices]:
    """Return each worker's rows, its mixture of classes being a Dirichlet draw: R // N rows each, none used twice.

    The draw has concentration alpha C p_c for a class that makes up p_c of the rows: Dirichlet(alpha, ..., alpha) for
    balanced classes, and for large alpha every share is a random sample of the whole. Workers are served in order; once
    a class has run out, its probability goes to the others, so the last workers take what is left. Rows within a
    share are sorted.

    >>> [len(share) for share in dirichlet_shares([0, 0, 0, 1, 1, 1, 1], num_workers=3, alpha=0.1, seed=0)]
    [2, 2, 2]

    Raises:
        UsageError: if there are more workers than rows, or `alpha` is not above 0 and finite.

    References:
        Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
        2019.
    """
    array = _checked_labels(labels)
    if num_workers < 1:
        raise UsageError(f"num_workers must be 1 or more, got {num_workers}")
    if num_workers > len(array):
        raise UsageError(f"{len(array)} rows cannot be shared by {num_workers} workers; give each one row at least")
    if not 0 < alpha < math.inf:
        raise UsageError(f"alpha must be above 0 and finite, got {alpha}")
    streams = _Streams(seed)
    classes, sizes = np.unique(array, return_counts=True)
    shuffle = streams.at(_SHARES).permutation
    piles = [shuffle(np.flatnonzero(array == label)) for label in classes]
    left = sizes.copy()
    shares = []
    for worker in range(num_workers):
        generator = streams.at(_SHARES, worker, 1)
        probabilities = generator.dirichlet(alpha * len(classes) * sizes / len(array))
        missing = len(array) // num_workers
        chosen: list[Indices] = []
        while missing:
            probabilities = np.where(left > 0, probabilities, 0.0)
            if not probabilities.sum() > 0.0:  # the worker's classes have run out: what is left, as it comes
                probabilities = left.astype(np.float64)
            taken = np.minimum(generator.multinomial(missing, probabilities / probabilities.sum()), left)
            chosen += [pile[rest - count : rest] for pile, rest, count in zip(piles, left, taken, strict=True)]
            left -= taken
            missing -= int(taken.sum())
        shares.append(np.sort(np.concatenate(chosen)))
    return shares


# ---------------------------------------------------------------------------------------------------------------------
# Text form

ALL: tuple[Problem, ...] = (
    Tridiagonal(),
    Quadratic(),
    Mode(),
    Heterogeneous(),
    Logistic(),
)
"""An example of each problem, for the contract tests and ``--problem help``."""

_BY_NAME = {problem.name: type(problem) for problem in ALL}


KIND = Kind("problem", "problems", "--problem")


def parse_problem(text: str) -> Problem:
    """Return the problem that ``NAME[:key=value,...]`` means.

    >>> parse_problem("mode:curvature=2")
    Mode(curvature=2.0, noise=0.0)

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested) or a value out of range.
    """
    return KIND.read(text, _BY_NAME)


def describe_problems() -> str:
    """The text of ``--problem help``: every problem with its one line and its parameters."""
    return "\n".join(["problems (--problem NAME[:key=value,...]):", *describe(_BY_NAME)])
