"""How throughput grows with the number of workers: Amdahl's law, and the universal scalability law.

Tables are seeds x positions (S x K), every seed at every position. Intervals by resampling take whole seeds (all their
runs together). Those of the laws are BCa, which with few seeds are still too narrow
(`experiments/benchmarks/error_rates.py` says by how much): they describe, they decide nothing.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from analysis.statistics.intervals import Interval, Refused, finite_table, finite_values

AMDAHL_WORKERS = 4
"""Distinct numbers of workers below which Amdahl's law is not fitted."""
USL_WORKERS = 6
NO_COHERENCY = 1e-6
"""A coherency term below this share of the others at the largest P is 0: the search only comes near its bound."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """S10: a fitted law of throughput X over workers P, X(P) = gamma P / (1 + alpha (P - 1) + beta P (P - 1))."""

    gamma: float
    """Throughput of one worker, in the unit of the data."""
    alpha: float
    """Contention: the serial share, in [0, 1]."""
    beta: float
    """Coherency: the cost of agreement between pairs of workers; 0 in Amdahl's law."""
    peak: float | None
    """sqrt((1 - alpha) / beta), the workers with the largest throughput; None where it grows without end."""
    aicc: float | None
    """Akaike's criterion for small samples, smaller is better; None with too few points for its correction."""
    num_points: int

    def throughput(self, workers: ArrayLike) -> NDArray[numpy.float64]:
        """The law at `workers` (any shape, a new array)."""
        return _law(numpy.asarray(workers, dtype=numpy.float64), self.gamma, self.alpha, self.beta)


def _law(workers: NDArray[numpy.float64], gamma: float, alpha: float, beta: float = 0.0) -> NDArray[numpy.float64]:
    return gamma * workers / (1 + alpha * (workers - 1) + beta * workers * (workers - 1))


def fit_amdahl(workers: ArrayLike, throughput: ArrayLike) -> Fit | Refused:
    """S10: fit Amdahl's law X(P) = gamma P / (1 + alpha (P - 1)) by least squares, gamma >= 0 and 0 <= alpha <= 1.

    Args:
        workers: P of every measurement (M), 1 or more. Give all seeds and not their means: AICc counts the points.
        throughput: of every measurement (M), above 0.
    Returns:
        The fit; `Refused` with fewer than 4 different P.
    Raises:
        ValueError: for unequal lengths or values that cannot be.

    >>> fit = fit_amdahl([1, 2, 4, 8], [100.0, 100 * 2 / 1.1, 100 * 4 / 1.3, 100 * 8 / 1.7])
    >>> round(fit.gamma, 6), round(fit.alpha, 6), fit.peak
    (100.0, 0.1, None)
    """
    return _fit("amdahl", *_measurements(workers, throughput))


def fit_usl(workers: ArrayLike, throughput: ArrayLike) -> Fit | Refused:
    """S10: fit the universal scalability law, X(P) = gamma P / (1 + alpha (P - 1) + beta P (P - 1)), by least squares.

    Args and Raises as `fit_amdahl`; `Refused` with fewer than 6 different P. beta >= 0.

    >>> P = numpy.array([1, 2, 4, 8, 16, 32])
    >>> fit = fit_usl(P, 50 * P / (1 + 0.04 * (P - 1) + 0.01 * P * (P - 1)))
    >>> round(fit.alpha, 6), round(fit.beta, 6), round(fit.peak, 4)
    (0.04, 0.01, 9.798)

    References:
        Gunther, Guerrilla Capacity Planning, 2007, chapter 4.
    """
    return _fit("usl", *_measurements(workers, throughput))


def aicc_difference(amdahl: Fit, usl: Fit) -> float | None:
    """AICc of the universal scalability law minus that of Amdahl's law, fitted to the same points.

    Below 0 the former is preferred. It is no test. None where one of them has too few points for its correction.
    """
    if amdahl.num_points != usl.num_points:
        raise ValueError(f"the fits have {amdahl.num_points} and {usl.num_points} points; fit both to the same ones")
    return None if amdahl.aicc is None or usl.aicc is None else usl.aicc - amdahl.aicc


def _measurements(workers: ArrayLike, throughput: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    x, y = finite_values(workers, "workers"), finite_values(throughput, "throughput")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} numbers of workers and {len(y)} throughputs; give one of each per measurement")
    if (x < 1).any() or (y <= 0).any():
        raise ValueError("workers must be 1 or more and throughputs above 0")
    return x, y


def _refusal(model: str, workers: NDArray[numpy.float64]) -> Refused | None:
    needed = AMDAHL_WORKERS if model == "amdahl" else USL_WORKERS
    distinct = len(numpy.unique(workers))
    if distinct >= needed:
        return None
    name = "Amdahl's law" if model == "amdahl" else "the universal scalability law"
    return Refused(f"{distinct} different numbers of workers; {name} needs {needed}")


def _fit(model: str, x: NDArray[numpy.float64], y: NDArray[numpy.float64]) -> Fit | Refused:
    refused = _refusal(model, x)
    if refused is not None:
        return refused
    scale = float(y.max())
    num_parameters = 2 if model == "amdahl" else 3
    # P / X is linear in the unknowns, which gives a start near the optimum and keeps the search in its valley
    design = numpy.stack([numpy.ones_like(x), x - 1, x * (x - 1)][:num_parameters], axis=1)
    start, _ = optimize.nnls(design, x * scale / y)
    start[0] = max(start[0], 1e-9)
    first = [1 / start[0], min(start[1] / start[0], 1.0), *(value / start[0] for value in start[2:])]
    upper = [math.inf, 1.0, math.inf][:num_parameters]
    bounds = ([0.0] * num_parameters, upper)
    exact = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 10_000}
    found, _ = optimize.curve_fit(_law, x, y / scale, p0=first, bounds=bounds, method="trf", **exact)
    gamma, alpha, *rest = (float(value) for value in found)
    beta = rest[0] if rest else 0.0
    largest = float(x.max())
    if beta * largest * (largest - 1) < NO_COHERENCY * (1 + alpha * (largest - 1)):
        beta = 0.0
    residual = math.fsum((y / scale - _law(x, gamma, alpha, beta)) ** 2)
    peak = math.sqrt((1 - alpha) / beta) if beta > 0 else None
    return Fit(gamma * scale, alpha, beta, peak, _aicc(residual, len(x), num_parameters, scale), len(x))


def _aicc(residual: float, n: int, num_parameters: int, scale: float) -> float | None:
    """n ln(RSS / n) + 2 k + 2 k (k + 1) / (n - k - 1), the variance of the errors being one of the k parameters."""
    k = num_parameters + 1
    if n - k - 1 <= 0:
        return None
    # points on the law leave rounding: two fits of them must not differ by the logarithm of noise
    mean_square = max(residual / n, 1e-24) * scale**2
    return n * math.log(mean_square) + 2 * k + 2 * k * (k + 1) / (n - k - 1)


def amdahl_interval(
    workers: ArrayLike, table: ArrayLike, generator: numpy.random.Generator, resamples: int = 999, level: float = 0.95
) -> dict[str, Interval] | Refused:
    """As `usl_interval` for Amdahl's law: BCa intervals of ``gamma`` and ``alpha``."""
    return _interval("amdahl", workers, table, generator, resamples, level)


def usl_interval(
    workers: ArrayLike, table: ArrayLike, generator: numpy.random.Generator, resamples: int = 999, level: float = 0.95
) -> dict[str, Interval] | Refused:
    """S10: BCa intervals (bias-corrected, accelerated) of ``gamma``, ``alpha``, ``beta``, ``peak`` by resampling seeds.

    A resample takes S seeds with replacement, each with its whole row, and fits the law to their means. The order of
    the seeds in `table` does not matter.

    Args:
        workers: K different numbers of workers.
        table: throughputs (S x K).
        generator: draws the seeds.
        resamples: number of fits; 999 take one to two seconds.
    Returns:
        The estimates of the fit to the means with their ends, by name; ``peak`` is inf where the throughput grows
        without end. `Refused` with fewer than 6 different workers or fewer than 2 seeds.
    """
    return _interval("usl", workers, table, generator, resamples, level)


def _interval(
    model: str,
    workers: ArrayLike,
    table: ArrayLike,
    generator: numpy.random.Generator,
    resamples: int,
    level: float,
) -> dict[str, Interval] | Refused:
    x = finite_values(workers, "workers")
    y = finite_table(table, "table", "seeds", "workers")
    if y.shape[1] != len(x):
        raise ValueError(f"the table has {y.shape[1]} columns for {len(x)} numbers of workers")
    y = y[numpy.lexsort(y.T[::-1])]
    whole = _fit(model, *_measurements(x, y.mean(axis=0)))
    if isinstance(whole, Refused):
        return whole
    if len(y) < 2:
        return Refused("one seed; an interval by resampling seeds needs two")
    names = ("gamma", "alpha") if model == "amdahl" else ("gamma", "alpha", "beta", "peak")
    fitted: dict[tuple[int, ...], list[float]] = {}  # a few seeds have only so many different resamples

    def statistic(seeds: NDArray[numpy.int64], axis: int = -1) -> NDArray[numpy.float64]:
        rows = numpy.sort(seeds, axis=axis).reshape(-1, seeds.shape[-1])
        for chosen in map(tuple, rows.tolist()):
            if chosen not in fitted:
                fit = _fit(model, x, y[list(chosen)].mean(axis=0))
                assert isinstance(fit, Fit)  # the workers are the same
                fitted[chosen] = [_resampled(fit, name) for name in names]
        found = numpy.array([fitted[tuple(chosen)] for chosen in rows.tolist()])
        return found.T.reshape(len(names), *seeds.shape[:-1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where nothing varies there are no ends, which is said by None
        ends = stats.bootstrap(
            (numpy.arange(len(y)),),
            statistic,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=level,
            method="BCa",
            rng=generator,
        ).confidence_interval
    found = {}
    for place, name in enumerate(names):
        low, high = (None if math.isnan(end[place]) else float(end[place]) for end in ends)
        if name == "peak":
            low, high = _inverse(high), _inverse(low)
        found[name] = Interval(_parameter(whole, name), low, high, level, len(y))
    return found


def _resampled(fit: Fit, name: str) -> float:
    """The parameter; of the peak its inverse, which is 0 and not infinite where the throughput grows without end."""
    if name != "peak":
        return _parameter(fit, name)
    return 0.0 if fit.peak is None else 1 / max(fit.peak, 1e-9)


def _inverse(end: float | None) -> float | None:
    return None if end is None else math.inf if end <= 0 else 1 / end


def _parameter(fit: Fit, name: str) -> float:
    if name == "peak":
        return math.inf if fit.peak is None else fit.peak
    return float(getattr(fit, name))
