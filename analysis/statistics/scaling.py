"""How loss and throughput change with the number of workers, and what loss costs in seconds.

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

from analysis.statistics.intervals import Interval, Refused, finite_table, finite_values, t_interval, without_nan

MINIMUM_SEEDS = 6
MINIMUM_POSITIONS = 4
AMDAHL_WORKERS = 4
"""Distinct numbers of workers below which Amdahl's law is not fitted."""
USL_WORKERS = 6
NO_COHERENCY = 1e-6
"""A coherency term below this share of the others at the largest P is 0: the search only comes near its bound."""

# ---------------------------------------------------------------------------------------------------------------------
# S8: a trend over workers or delays


@dataclasses.dataclass(frozen=True)
class Slope:
    """S8: the change of a value per unit of position, over seeds, and Page's test for an increase."""

    mean: Interval
    """Mean of the slopes of the seeds with its 95 % t interval."""
    per_seed: tuple[float, ...]
    page_statistic: float | None
    """L; None with fewer than 3 positions or 2 seeds."""
    page_p: float | None
    """One-sided: of no trend against an increase with the position."""
    too_few: str
    """Why this supports no verdict; empty from 4 positions and 6 seeds on."""


def slopes(positions: ArrayLike, table: ArrayLike) -> Slope:
    """S8: the least-squares slope of every seed, their mean, and Page's trend test.

    With the same positions in every seed the mean of the slopes is the fixed effect of the model with random intercepts
    and slopes, and the t interval over seeds is its interval. Page's test asks whether values increase with position.

    Args:
        positions: K numbers, all different, e.g. log2 of the workers or the bound on the delay; in any order.
        table: values (S x K), e.g. final losses.
    Raises:
        ValueError: for values that are not finite, a table of another width, or fewer than two positions.

    >>> trend = slopes([0, 1, 2], [[1.0, 2.0, 3.0], [1.0, 3.0, 5.0]])
    >>> trend.per_seed, trend.mean.estimate, trend.page_statistic
    ((1.0, 2.0), 1.5, 28.0)

    References:
        E. B. Page, Ordered hypotheses for multiple treatments, JASA 1963.
    """
    x = finite_values(positions, "positions")
    y = finite_table(table, "table", "seeds", "positions")
    if y.shape[1] != len(x):
        raise ValueError(f"the table has {y.shape[1]} columns for {len(x)} positions")
    if len(x) < 2 or len(numpy.unique(x)) < len(x):
        raise ValueError(f"a slope needs two or more different positions, got {x.tolist()}")
    order = numpy.argsort(x)
    x, y = x[order], y[:, order]
    centred = x - math.fsum(x) / len(x)
    weights = centred / math.fsum(centred**2)
    per_seed = tuple(math.fsum(row * weights) for row in y)
    statistic = p = None
    if len(x) >= 3 and len(y) >= 2:
        page = stats.page_trend_test(y)
        statistic, p = float(page.statistic), float(page.pvalue)
    too_few = ""
    if len(x) < MINIMUM_POSITIONS or len(y) < MINIMUM_SEEDS:
        too_few = (
            f"{len(x)} positions and {len(y)} seeds; a verdict on a trend needs {MINIMUM_POSITIONS} and {MINIMUM_SEEDS}"
        )
    return Slope(t_interval(per_seed), per_seed, statistic, p, too_few)


# ---------------------------------------------------------------------------------------------------------------------
# S10: throughput over workers


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


# ---------------------------------------------------------------------------------------------------------------------
# S11: loss against seconds


def pareto(seconds: ArrayLike, losses: ArrayLike) -> NDArray[numpy.bool_]:
    """S11: which points no other point dominates; lower is better in both.

    A point dominates another that is at least as large in both and larger in one, so equal points stay together on the
    front. A point with an infinite coordinate (it never got there) is not on it.

    Args:
        seconds, losses: one of each per point (K).
    Returns:
        A new mask (K).

    >>> pareto([1.0, 2.0, 3.0], [5.0, 4.0, 4.5]).tolist()
    [True, True, False]
    """
    x, y = _points(seconds, losses)
    return _on_front(x[None], y[None])[0]


def _points(seconds: ArrayLike, losses: ArrayLike) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    x, y = without_nan(seconds, "seconds"), without_nan(losses, "losses")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} seconds and {len(y)} losses; give one of each per point")
    return x, y


def _on_front(x: NDArray[numpy.float64], y: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    """The front of each of R sets of K points (R x K)."""
    x_other, y_other = x[:, :, None], y[:, :, None]
    x_own, y_own = x[:, None, :], y[:, None, :]
    dominated = (x_other <= x_own) & (y_other <= y_own) & ((x_other < x_own) | (y_other < y_own))
    return ~dominated.any(axis=1) & numpy.isfinite(x) & numpy.isfinite(y)


def hypervolume(seconds: ArrayLike, losses: ArrayLike, reference_point: tuple[float, float]) -> float:
    """S11: the area (seconds x loss) that the points dominate, up to a declared reference point.

    Points beyond the reference point in either coordinate add nothing. Larger is better; two studies can be compared
    only at the same reference point.

    Raises:
        ValueError: for nan, or a reference point that is not finite.

    >>> hypervolume([1.0, 2.0], [2.0, 1.0], reference_point=(3.0, 3.0))
    3.0
    """
    x, y = _points(seconds, losses)
    if not (math.isfinite(reference_point[0]) and math.isfinite(reference_point[1])):
        raise ValueError(f"the reference point must be finite, got {reference_point}")
    front = sorted({(float(a), float(b)) for a, b, on in zip(x, y, _on_front(x[None], y[None])[0], strict=True) if on})
    area, height = 0.0, float(reference_point[1])
    for position, loss in front:
        if position < reference_point[0] and loss < height:
            area += (reference_point[0] - position) * (height - loss)
            height = loss
    return area


def pareto_share(
    seconds: ArrayLike, losses: ArrayLike, generator: numpy.random.Generator, resamples: int = 2_000
) -> NDArray[numpy.float64]:
    """S11: in what share of resamples of the seeds the mean of each condition is on the Pareto front.

    A resample takes the same seeds for every condition. The order of the seeds does not matter.

    Args:
        seconds, losses: one of each per seed and condition (S x K); inf is allowed, nan is not.
        generator: draws the seeds.
    Returns:
        A share per condition (K).

    >>> pareto_share([[1.0, 2.0], [1.1, 2.1]], [[5.0, 6.0], [5.1, 6.1]], numpy.random.default_rng(0)).tolist()
    [1.0, 0.0]
    """
    x, y = numpy.asarray(seconds, dtype=numpy.float64), numpy.asarray(losses, dtype=numpy.float64)
    if x.ndim != 2 or x.shape != y.shape or not x.size or numpy.isnan(x).any() or numpy.isnan(y).any():
        raise ValueError(
            f"seconds and losses must be tables of the same seeds x conditions without nan, got {x.shape}, {y.shape}"
        )
    order = numpy.lexsort(numpy.concatenate((x, y), axis=1).T[::-1])
    x, y = x[order], y[order]
    chosen = generator.integers(0, len(x), size=(resamples, len(x)))
    return _on_front(x[chosen].mean(axis=1), y[chosen].mean(axis=1)).mean(axis=0)
