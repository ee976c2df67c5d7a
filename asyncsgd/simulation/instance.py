"""What a problem is: a `Problem`, a frozen dataclass of parameters, gives an `Instance`, and that is simulated.

An instance has a stochastic gradient for (worker, index), the exact excess loss, the exact gradient and the optimum.
Noise is a pure function of (seed, worker, index), so two rules compared on one seed see the same noise in the same
sample, whatever the order of their calls.

Shapes: P parameters, N workers. All arrays are float64.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import numpy.typing as npt

from asyncsgd.errors import UsageError
from asyncsgd.named_choices import Named

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

PURPOSE = 12
"""Second word of the Philox key: the streams of all problems."""
NOISE, DATA, SHARES = range(3)
"""Last word of the Philox counter: what a stream is for."""


class Instance(abc.ABC):
    """A problem for a number of workers and a seed: f(x) = (1/N) sum_i f_i(x), f_i being what worker i samples.

    Attributes:
        num_parameters: P.
        num_workers: N; `gradient` takes workers 0..N-1.
    """

    num_parameters: int
    num_workers: int

    @property
    def minimum(self) -> float:
        """f*. Zero for the closed-form problems, whose f is shifted so that it is."""
        return 0.0

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
class Problem(Named):
    """Base of all problems: parameters as fields with defaults, `on` for an instance."""

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
