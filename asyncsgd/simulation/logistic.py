"""Softmax regression on rows that are dealt unevenly to the workers, and texts as rows.

Shapes: P parameters, N workers, F features, C classes, R rows of data. All arrays are float64.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncsgd.errors import RunError, UsageError
from asyncsgd.named_choices import parameter
from asyncsgd.simulation.instance import DATA, NOISE, PURPOSE, SHARES, Array, Indices, Instance, Problem
from asyncsgd.simulation.sampler import Streams


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
        counts = generator.multinomial(40, frequencies[labels]).astype(np.float64)
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

    >>> LogisticData(np.eye(2), [0, 1], [[0], [1]], batch=1, penalty=0.1, seed=0).num_parameters
    4
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
            np.add.at(self._row_weights, share, 1.0 / (len(shares) * len(share)))
        self._shape = (self._features.shape[1], int(self._labels.max()) + 1)
        self.num_parameters = self._shape[0] * self._shape[1]
        self._batch, self._penalty = batch, float(penalty)
        self._streams = Streams(seed, PURPOSE)

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
        share = self.shares[worker]
        rows = share[self._streams.at(worker, index, NOISE).integers(0, len(share), self._batch)]
        return self._differentiate(x, self._features[rows], self._labels[rows], 1.0 / self._batch, out)

    def _value_and_gradient(self, x: Array) -> tuple[float, Array]:
        out = np.empty(self.num_parameters)
        return self._differentiate(x, self._features, self._labels, self._row_weights, out), out

    def exact_gradient(self, x: Array) -> Array:
        """Return the gradient of the global objective f, `(P,)`, a new array."""
        return self._value_and_gradient(x)[1]

    @functools.cached_property
    def _solution(self) -> tuple[Array, float]:
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
        return x, value

    @property
    def minimum(self) -> float:  # type: ignore[override]
        return self._solution[1]

    def loss(self, x: Array) -> float:
        return self._value_and_gradient(x)[0] - self.minimum

    def optimum(self) -> Array:
        """Return the minimiser of f, `(P,)`, a new array."""
        return self._solution[0].copy()


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

    columns = [[column(word) for word in re.findall(r"\w+", text.lower())] for text in texts]
    bags = np.stack([np.bincount(places, minlength=num_features).astype(np.float64) for places in columns])
    for bag in bags:
        bag /= math.sqrt(float(bag @ bag)) or 1.0
    return bags


def dirichlet_shares(labels: npt.ArrayLike, num_workers: int, alpha: float, seed: int) -> list[Indices]:
    """Return each worker's rows, its mixture of classes being a Dirichlet draw: R // N rows each, none used twice.

    The draw has concentration alpha C p_c for a class that makes up p_c of the rows: Dirichlet(alpha, ..., alpha) for
    balanced classes, and for large alpha every share is a random sample of the whole. Workers are served in order; once
    a class has run out, its probability goes to the others. Rows within a share are sorted.

    >>> [len(share) for share in dirichlet_shares([0, 0, 0, 1, 1, 1, 1], num_workers=3, alpha=0.1, seed=0)]
    [2, 2, 2]

    Raises:
        UsageError: if there are more workers than rows.

    References:
        Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
        2019.
    """
    array = np.asarray(labels)
    if not 1 <= num_workers <= len(array):
        raise UsageError(f"{len(array)} rows cannot be shared by {num_workers} workers; give each one row at least")
    streams = Streams(seed, PURPOSE)
    classes, sizes = np.unique(array, return_counts=True)
    shuffle = streams.at(part=SHARES).permutation
    piles = [shuffle(np.flatnonzero(array == label)) for label in classes]
    left = sizes.copy()
    shares = []
    for worker in range(num_workers):
        generator = streams.at(worker, 1, SHARES)
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
