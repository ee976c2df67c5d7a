"""Times and a problem that several scripts under ``experiments/published/`` simulate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.sampler import Sampler


def fixed_times(seconds: Sequence[float]) -> Sampler:
    """The same seconds for every gradient of a worker."""
    return Sampler(len(seconds), lambda worker, block: seconds[worker])


class Watched(Instance):
    """A problem that remembers where its last gradient was computed: the iterates are nowhere else to be read."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.num_parameters, self.num_workers = instance.num_parameters, instance.num_workers
        self.point = math.nan
        """Its first coordinate."""

    def initial(self) -> Array:
        return self._instance.initial()

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        self.point = float(x[0])
        return self._instance.gradient(x, worker, index, out)

    def exact_gradient(self, x: Array) -> Array:
        return self._instance.exact_gradient(x)

    def loss(self, x: Array) -> float:
        return self._instance.loss(x)

    def optimum(self) -> Array | None:
        return self._instance.optimum()
