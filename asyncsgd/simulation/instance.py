"""What a problem is: a `Problem`, a frozen dataclass of parameters, gives an `Instance`, and that is simulated.

Shapes: P parameters, N workers. All arrays are float64.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import numpy.typing as npt

from asyncsgd.settings.choices import Named

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

PURPOSE = 12
"""Second word of the Philox key: the streams of all problems. It is not shifted, as purposes of `asyncsgd.data.random`
are; as one of those it would be stream 12 of purpose 0, which nothing has. A shift would change the noise of runs."""
NOISE, DATA, SHARES = range(3)
"""Last word of the Philox counter: what a stream is for."""


class Instance(abc.ABC):
    """A problem for a number of workers and a seed: f(x) = (1/N) sum_i f_i(x), f_i being what worker i samples."""

    num_parameters: int
    """The number of parameters, P."""
    minimum: float = 0.0
    """The least value of f, f*. The closed-form problems shift f so that it is 0."""

    @abc.abstractmethod
    def initial(self) -> Array:
        """The published starting point, `(P,)`, a new array."""

    @abc.abstractmethod
    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        """Write the stochastic gradient of sample `index` of `worker` at `x` into `out`; return a loss value at `x`.

        A pure function of (x, worker, index) and the seed, so rules compared on one seed see the same noise. The mean
        of the returned values over indices and workers is `loss(x) + minimum`; a closed-form problem returns f_i.
        Samples are counted by worker. `x`, `(P,)`, is only read; `out`, `(P,)`, must not overlap it.
        """

    @abc.abstractmethod
    def loss(self, x: Array) -> float:
        """The exact global excess f(x) - f*, 0 or more up to rounding."""


@dataclasses.dataclass(frozen=True)
class Problem(Named):
    """Base of all problems: parameters as fields with defaults, `on` for an instance."""

    def on(self, num_workers: int, seed: int) -> Instance:
        """Return the instance for `num_workers` workers whose data and noise are functions of `seed`.

        Raises:
            UsageError: if the problem cannot be split over so many workers.
        """
        raise TypeError(f"{type(self).__name__} does not define on()")
