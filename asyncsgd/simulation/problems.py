"""Optimisation problems with exact answers, on which a rule can be simulated under virtual time.

Shapes: P parameters, N workers, F features, C classes, R rows of data. All arrays are float64.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from asyncsgd.errors import RunError, UsageError
from asyncsgd.settings.choices import Choices, parameter
from asyncsgd.simulation.instance import DATA, NOISE, PURPOSE, SHARES, Array, Indices, Instance, Problem
from asyncsgd.simulation.speeds import Streams, in_blocks

P = TypeVar("P", bound="ClosedForm")

_BLOCK = 64
"""Random numbers of one worker that are drawn together. It is part of the streams: another number gives other noise."""


class ClosedForm(Problem, Instance):
    """Base of the problems that have formulas. `on` gives a copy that knows its workers and has its noise.

    Noise of one `noise_kind` is added to a gradient g, with s = `noise`: g + s z, where z is standard normal. For `add`
    one z is for all coordinates, so the covariance has rank one; for `full` each coordinate has its own. The total
    variance of both is P s^2.
    """

    dimension: int = 1
    curvature: float
    condition: float = 1.0
    noise: float
    noise_kind: str = "add"
    _streams: Streams
    _num_workers: int
    _scalar: Callable[[int, int], float]

    def on(self: P, num_workers: int, seed: int) -> P:
        bound = dataclasses.replace(self)
        streams = Streams(seed, PURPOSE)

        def draw(worker: int, block: int) -> Array:
            return streams.at(worker, block, NOISE).standard_normal(_BLOCK)

        # The problem is frozen, so its attributes cannot be set otherwise.
        bound.__dict__.update(
            num_parameters=self.dimension,
            _num_workers=num_workers,
            _streams=streams,
            _scalar=in_blocks(num_workers, _BLOCK, draw),
        )
        return bound

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        value = self._differentiate(x, worker, out)
        noise = self.noise
        if noise and self.noise_kind == "full":
            generator = self._streams.at(worker, index, NOISE)
            out += noise * generator.standard_normal(len(out))
        elif noise:
            out += noise * self._scalar(worker, index)
        return value

    @functools.cached_property
    def _spectrum(self) -> Array:
        """The eigenvalues lambda_j, `(P,)`, ascending."""
        smallest = self.curvature / self.condition
        return np.geomspace(smallest, self.curvature, self.dimension)

    def _differentiate(self, x: Array, worker: int, out: Array) -> float:
        """Write the gradient of f_i at `x` into `out`; return f_i(x) - f*. By default f = sum_j lambda_j x_j^2 / 2."""
        np.multiply(self._spectrum, x, out=out)
        return 0.5 * float(x.dot(out))

    def exact_gradient(self, x: Array) -> Array:
        """The gradient of the global objective f, `(P,)`, a new array."""
        out = np.empty(self.dimension)
        self._differentiate(x, 0, out)
        return out

    def loss(self, x: Array) -> float:
        return self._differentiate(x, 0, np.empty(self.dimension))

    def initial(self) -> Array:
        return np.ones(self.dimension)

    def optimum(self) -> Array:
        """The minimiser of f, `(P,)`, a new array."""
        return np.zeros(self.dimension)


@dataclasses.dataclass(frozen=True)
class Tridiagonal(ClosedForm):
    """The worst-case quadratic of first-order methods, as in the experiments of the Ringmaster paper.

        f(x) = x^T A x / 2 - b^T x,   A = tridiag(-1, 2, -1) / 4,   b = -e_1 / 4,   x_0 = sqrt(P) e_1

    with f* = -(1/8) (1 - 1/(P+1)) and the optimum x_j = -(1 - j/(P+1)), j = 1..P.

    Args:
        dimension: P, the number of parameters.
        noise: standard deviation per coordinate.
        noise_kind: add or full, as in `ClosedForm`.

    >>> instance = Tridiagonal().on(num_workers=1, seed=0)
    >>> round(instance.loss(instance.initial()), 1)
    442.8

    Maranjyan, Tyurin, Richtarik: Ringmaster ASGD, ICML 2025.
    """

    dimension: int = parameter(1729, at_least=1)
    noise: float = parameter(0.01, at_least=0)
    noise_kind: str = parameter("add")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_kind not in ("add", "full"):
            raise ValueError(f"noise_kind must be add or full, got {self.noise_kind!r}")

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
        value = 0.5 * (float(x.dot(out)) + 0.25 * float(x[0]))
        minus_minimum = (1.0 - 1.0 / (self.dimension + 1)) / 8.0
        return value + minus_minimum

    def loss(self, x: Array) -> float:
        # (x - x*)^T A (x - x*)/2 as a sum of squares: never negative, no cancellation near the optimum
        distance = x - self.optimum()
        steps = np.diff(distance, prepend=0.0, append=0.0)
        return float(steps @ steps) / 8.0

    def optimum(self) -> Array:
        return np.arange(1, self.dimension + 1) / (self.dimension + 1) - 1.0


@dataclasses.dataclass(frozen=True)
class Mode(ClosedForm):
    """One mode of a quadratic, f(x) = curvature x^2 / 2 in R, started at 1: the problem of the stability oracles.

    Args:
        curvature: lambda; only learning rate times lambda matters.
        noise: standard deviation of the gradient's normal noise.
    """

    curvature: float = parameter(1.0, above=0)
    noise: float = parameter(0.0, at_least=0)


@dataclasses.dataclass(frozen=True)
class Quadratic(ClosedForm):
    """A diagonal quadratic, f(x) = sum_j lambda_j x_j^2 / 2, with eigenvalues spaced geometrically.

    lambda_1 = curvature/condition, ..., lambda_P = curvature; the optimum is 0, the start (1, ..., 1).

    Args:
        dimension: P, the number of parameters.
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
    def _objective(self) -> tuple[float, float, float]:
        """The curvature of f, its minimiser, and its least value."""
        kinds = [worker % 3 for worker in range(self._num_workers)]
        curvature = sum(self._CURVATURES[kind] for kind in kinds) / self._num_workers
        slope = sum(self._SLOPES[kind] for kind in kinds) / self._num_workers
        optimum = slope / curvature
        return curvature, optimum, -0.5 * slope * optimum

    def _differentiate(self, x: Array, worker: int, out: Array) -> float:
        point = float(x[0])
        curvature = self._CURVATURES[worker % 3]
        slope = self._SLOPES[worker % 3]
        _, _, minimum = self._objective
        out[0] = curvature * point - slope
        return (0.5 * curvature * point - slope) * point - minimum

    def exact_gradient(self, x: Array) -> Array:
        curvature, optimum, _ = self._objective
        return np.array([curvature * (float(x[0]) - optimum)])

    def loss(self, x: Array) -> float:
        curvature, optimum, _ = self._objective
        return 0.5 * curvature * (float(x[0]) - optimum) ** 2

    def initial(self) -> Array:
        return np.zeros(1)

    def optimum(self) -> Array:
        _, optimum, _ = self._objective
        return np.array([optimum])


@dataclasses.dataclass(frozen=True)
class Logistic(Problem):
    """Softmax regression on synthetic documents whose classes are spread unevenly over the workers.

    A document is 40 words from its class's word distribution (Zipf frequencies, each multiplied by a log-normal factor
    of the class), counted and scaled to length 1. Rows go to the workers by `dirichlet_shares`; see `LogisticData`.

    Args:
        features: F, the size of the vocabulary.
        rows: documents in all, the same number (up to one) of each class.
        classes: C; there are F times C parameters.
        alpha: of the Dirichlet distribution of classes within a worker; small, a worker sees one class; large, all.
        batch: rows in a stochastic gradient, drawn with replacement from the worker's share.
        penalty: of the squared length of the parameters, halved.
    """

    features: int = parameter(200, at_least=1)
    rows: int = parameter(2000)
    classes: int = parameter(2, at_least=2)
    alpha: float = parameter(0.1, above=0)
    batch: int = parameter(8, at_least=1)
    penalty: float = parameter(0.01, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < self.classes:
            raise ValueError(f"rows must be {self.classes} or more, one of each class, got {self.rows}")

    def on(self, num_workers: int, seed: int) -> LogisticData:
        generator = Streams(seed, PURPOSE).at(part=DATA)
        labels = np.arange(self.rows) % self.classes
        frequencies = np.exp(generator.standard_normal((self.classes, self.features)))
        frequencies /= np.arange(1, self.features + 1)
        frequencies /= frequencies.sum(axis=1, keepdims=True)
        counts = generator.multinomial(40, frequencies[labels])
        documents = counts.astype(np.float64)
        documents /= np.linalg.norm(documents, axis=1, keepdims=True)
        shares = dirichlet_shares(labels, num_workers, self.alpha, seed)
        return LogisticData(documents, labels, shares, self.batch, self.penalty, seed)


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
        self._labels: Indices = np.asarray(labels, dtype=np.int64)
        self.shares: tuple[Indices, ...] = tuple(np.array(share) for share in shares)
        self._row_weights = np.zeros(len(self._features))
        for share in self.shares:
            weight = 1.0 / (len(shares) * len(share))
            np.add.at(self._row_weights, share, weight)
        num_features = self._features.shape[1]
        num_classes = int(self._labels.max()) + 1
        self._shape = (num_features, num_classes)
        self.num_parameters = num_features * num_classes
        self._batch = batch
        self._penalty = float(penalty)
        self._streams = Streams(seed, PURPOSE)

    def initial(self) -> Array:
        return np.zeros(self.num_parameters)

    def _differentiate(self, x: Array, features: Array, labels: Indices, weights: Array | float, out: Array) -> float:
        """Write the gradient of sum_k weights_k loss_k + penalty term; return that sum."""
        parameters = x.reshape(self._shape)
        gradient = out.reshape(self._shape)
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
        squared_length = float(x @ x)
        return float(losses.sum()) + 0.5 * self._penalty * squared_length

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        share = self.shares[worker]
        generator = self._streams.at(worker, index, NOISE)
        rows = share[generator.integers(0, len(share), self._batch)]
        return self._differentiate(x, self._features[rows], self._labels[rows], 1.0 / self._batch, out)

    def _value_and_gradient(self, x: Array) -> tuple[float, Array]:
        """f(x) and the gradient of f at `x`, `(P,)`, a new array."""
        gradient = np.empty(self.num_parameters)
        value = self._differentiate(x, self._features, self._labels, self._row_weights, gradient)
        return value, gradient

    def exact_gradient(self, x: Array) -> Array:
        """The gradient of the global objective f, `(P,)`, a new array."""
        _, gradient = self._value_and_gradient(x)
        return gradient

    @functools.cached_property
    def _solution(self) -> tuple[Array, float]:
        """The minimiser of f, and its least value."""
        import scipy.optimize  # a tenth of a second that only a caller of `loss` should pay

        options = {"maxiter": 100_000, "maxfun": 100_000, "maxcor": 30, "ftol": 0.0, "gtol": 1e-10}
        start = self.initial()
        function = self._value_and_gradient
        solution = scipy.optimize.minimize(function, start, jac=True, method="L-BFGS-B", options=options)
        value, gradient = function(solution.x)
        # f is penalty-strongly convex, so f(x) - f* <= ||grad f(x)||^2 / (2 penalty): a proof, not a hope
        error = float(gradient @ gradient) / (2 * self._penalty)
        if not error <= 1e-10 * max(1.0, abs(value)):
            raise RunError(f"the optimum was found only to {error:.1e} in the loss; raise penalty={self._penalty}")
        return solution.x, value

    @property
    def minimum(self) -> float:  # type: ignore[override]
        _, minimum = self._solution
        return minimum

    def loss(self, x: Array) -> float:
        value, _ = self._value_and_gradient(x)
        return value - self.minimum

    def optimum(self) -> Array:
        """The minimiser of f, `(P,)`, a new array."""
        optimum, _ = self._solution
        return optimum.copy()


def hashed_bag_of_words(texts: Iterable[str], num_features: int) -> Array:
    """Return `(texts, num_features)`: counts of each text's lower-cased words by hashed column, rows of length 1.

    The column of a word is its BLAKE2b hash modulo `num_features`, the same on every machine and in every process
    (Python's own hash of a string is not). A text without words gives a row of zeros.

    >>> hashed_bag_of_words(["to be, or not to BE"], 8).round(3).tolist()
    [[0.0, 0.632, 0.0, 0.632, 0.0, 0.316, 0.0, 0.316]]
    """

    @functools.cache
    def column(word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % num_features

    bags = []
    for text in texts:
        columns = [column(word) for word in re.findall(r"\w+", text.lower())]
        counts = np.bincount(columns, minlength=num_features)
        bag = counts.astype(np.float64)
        length = math.sqrt(float(bag @ bag))
        bags.append(bag / (length or 1.0))
    return np.stack(bags)


def dirichlet_shares(labels: npt.ArrayLike, num_workers: int, alpha: float, seed: int) -> list[Indices]:
    """Return each worker's rows, its mixture of classes being a Dirichlet draw: R // N rows each, none used twice.

    The draw has concentration alpha C p_c for a class that makes up p_c of the rows: Dirichlet(alpha, ..., alpha) for
    balanced classes, and for large alpha every share is a random sample of the whole. Workers are served in order; once
    a class has run out, its probability goes to the others. Rows within a share are sorted.

    Args:
        labels: `(R,)`, the class of every row.
        num_workers: N, how many shares.
        alpha: above 0; small, a worker sees one class.
        seed: of the draws.

    >>> [len(share) for share in dirichlet_shares([0, 0, 0, 1, 1, 1, 1], num_workers=3, alpha=0.1, seed=0)]
    [2, 2, 2]

    Raises:
        UsageError: if there are more workers than rows.

    Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
    """
    array = np.asarray(labels)
    if not 1 <= num_workers <= len(array):
        raise UsageError(f"{len(array)} rows cannot be shared by {num_workers} workers; give each one row at least")
    streams = Streams(seed, PURPOSE)
    classes, sizes = np.unique(array, return_counts=True)
    shuffle = streams.at(part=SHARES).permutation
    rows_of_classes = [shuffle(np.flatnonzero(array == label)) for label in classes]
    num_left = sizes.copy()
    shares = []
    for worker in range(num_workers):
        generator = streams.at(worker, 1, SHARES)
        concentrations = alpha * len(classes) * sizes / len(array)
        probabilities = generator.dirichlet(concentrations)
        num_missing = len(array) // num_workers
        chosen: list[Indices] = []
        while num_missing:
            probabilities = np.where(num_left > 0, probabilities, 0.0)
            if not probabilities.sum() > 0.0:  # the worker's classes have run out: what is left, as it comes
                probabilities = num_left.astype(np.float64)
            wanted = generator.multinomial(num_missing, probabilities / probabilities.sum())
            taken = np.minimum(wanted, num_left)
            for rows, end, count in zip(rows_of_classes, num_left, taken, strict=True):
                chosen.append(rows[end - count : end])
            num_left -= taken
            num_missing -= int(taken.sum())
        shares.append(np.sort(np.concatenate(chosen)))
    return shares


ALL: tuple[Problem, ...] = (Tridiagonal(), Quadratic(), Mode(), Heterogeneous(), Logistic())
"""An example of each problem, for the contract tests and ``--problem help``."""

_BY_NAME = {problem.name: type(problem) for problem in ALL}
_CHOICES = Choices[Problem]("problem", "problems", "--problem", _BY_NAME)


def parse_problem(text: str) -> Problem:
    """Return the problem that ``NAME[:key=value,...]`` is, as ``--problem`` takes it.

    >>> parse_problem("mode:noise=0.1")
    Mode(curvature=1.0, noise=0.1)

    Args:
        text: such as ``tridiagonal:noise=0``; ``asyncsgd simulate --problem help`` lists what there is.

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested), or a value out of range.
    """
    return _CHOICES.read(text)


def describe_problems() -> str:
    """The text of ``--problem help``."""
    return _CHOICES.help()
