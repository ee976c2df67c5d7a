"""Every rule as a plain loop in float64 on a closed-form problem: the oracle of the contract tests.

Nothing of asyncsgd is imported here, so a mistake in the library cannot hide in its own test. All N workers read the
initial point; a worker that arrives starts again at once (in `synchronous` when the round is over). Gradients are
numbered in the order in which they were started: ``gradient(point, dispatch)`` is one of its own for every dispatch.

Each function returns the points x_0, x_1, ..., one per version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Gradient = Callable[[np.ndarray, int], np.ndarray]


def asynchronous(
    gradient: Gradient, x: np.ndarray, learning_rate: float, num_workers: int, arrivals: Sequence[int]
) -> list[np.ndarray]:
    """x_{t+1} = x_t - eta grad(x_{t - tau}) for each of `arrivals`, the workers in the order in which they arrive."""
    points = [x]
    pending = {worker: (x, worker) for worker in range(num_workers)}
    for dispatch, worker in enumerate(arrivals, start=num_workers):
        x = x - learning_rate * gradient(*pending[worker])
        points.append(x)
        pending[worker] = (x, dispatch)
    return points


def staleness_aware(
    gradient: Gradient, x: np.ndarray, learning_rate: float, num_workers: int, arrivals: Sequence[int]
) -> list[np.ndarray]:
    """x_{t+1} = x_t - eta / max(1, tau) grad(x_{t - tau})."""
    points = [x]
    pending = {worker: (0, worker) for worker in range(num_workers)}
    for version, worker in enumerate(arrivals):
        read_version, dispatch = pending[worker]
        delay = version - read_version
        rate = learning_rate if delay < 2 else learning_rate / delay
        x = x - rate * gradient(points[read_version], dispatch)
        points.append(x)
        pending[worker] = (version + 1, num_workers + version)
    return points


def ringmaster(
    gradient: Gradient, x: np.ndarray, learning_rate: float, num_workers: int, arrivals: Sequence[int], threshold: int
) -> list[np.ndarray]:
    """As `asynchronous`, but a gradient with tau >= threshold changes nothing."""
    points = [x]
    pending = {worker: (0, worker) for worker in range(num_workers)}
    for dispatch, worker in enumerate(arrivals, start=num_workers):
        read_version, own = pending[worker]
        if len(points) - 1 - read_version < threshold:
            x = x - learning_rate * gradient(points[read_version], own)
            points.append(x)
        pending[worker] = (len(points) - 1, dispatch)
    return points


def synchronous(
    gradient: Gradient,
    weight: Callable[[int], float],
    x: np.ndarray,
    learning_rate: float,
    num_workers: int,
    num_rounds: int,
) -> list[np.ndarray]:
    """x_{t+1} = x_t - eta sum_i w_i grad_i(x_t) / sum_i w_i, in round t over dispatches t N to t N + N - 1."""
    points = [x]
    for first in range(0, num_rounds * num_workers, num_workers):
        dispatches = range(first, first + num_workers)
        total = sum(weight(dispatch) * gradient(x, dispatch) for dispatch in dispatches)
        x = x - learning_rate * total / sum(weight(dispatch) for dispatch in dispatches)
        points.append(x)
    return points
