"""Several tasks at once: tables of runs x tasks (S x T), scores of each task on a common scale; and times of modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy
from numpy.typing import ArrayLike, NDArray

from analysis.statistics.intervals import Interval, Refused

MINIMUM_TASKS = 3
MINIMUM_RUNS = 15
"""Over all tasks, per method."""

WORST_RATIO = 4.0
"""Of AlgoPerf: a method that takes four times as long as the fastest one scores nothing on a workload."""


def iqm(scores: ArrayLike) -> float:
    """S6: the interquartile mean, the mean of the middle half of all scores of all tasks together.

    floor(n / 4) scores are left out at each end. More robust than the mean, and less wasteful than the median.

    Args:
        scores: any shape, e.g. runs x tasks (S x T).
    Raises:
        ValueError: if there are none, or one is not finite.

    >>> iqm([[1, 2], [2, 2], [1, 1], [2, 1]]), iqm([[1, 1], [2, 2], [3, 3]])
    (1.5, 2.0)

    References:
        Agarwal et al., NeurIPS 2021 (rliable).
    """
    values = numpy.sort(numpy.asarray(scores, dtype=numpy.float64), axis=None)
    if not values.size or not numpy.isfinite(values).all():
        raise ValueError("the interquartile mean needs scores, and all of them finite")
    cut = len(values) // 4
    kept = values[cut : len(values) - cut]
    return math.fsum(kept) / len(kept)


def score_distribution(scores: ArrayLike, thresholds: ArrayLike) -> NDArray[numpy.float64]:
    """S6: the share of runs, of all tasks together, with a score above each threshold; a performance profile.

    >>> score_distribution([[0.2, 0.4], [0.6, 0.8]], [0.0, 0.4, 0.9]).tolist()
    [1.0, 0.5, 0.0]
    """
    values = numpy.ravel(scores)
    return (values[:, None] > numpy.asarray(thresholds, dtype=numpy.float64)).mean(axis=0)


def performance_profile(
    scores: ArrayLike, generator: numpy.random.Generator, resamples: int = 2_000, level: float = 0.95
) -> tuple[tuple[float, Interval], ...]:
    """S6: `score_distribution` at every score that occurs, rising, each share with its percentile interval.

    Seeds are resampled within each task, as in `stratified_bootstrap`. Between two of the scores the share and its
    interval stay what they are at the lower one. The intervals hold threshold by threshold, not for the whole curve.

    Args:
        scores: of one method (S x T).
        generator: draws the seeds.
    Returns:
        Pairs of threshold and share, `n` being the number of runs; without ends below 3 tasks or 15 runs.
    >>> [(score, f"{share:.2f}") for score, share in performance_profile([[2, 1], [2, 4]], numpy.random.default_rng(0))]
    [(1.0, '0.75'), (2.0, '0.25'), (4.0, '0.00')]
    """
    table = numpy.asarray(scores, float)
    thresholds = numpy.unique(table)
    shares = score_distribution(table, thresholds).tolist()
    lows: Sequence[float | None] = [None] * len(shares)
    highs = lows
    if _too_few(table) is None:
        drawn = [
            score_distribution(resampled, thresholds) for (resampled,) in _resampled(table[None], generator, resamples)
        ]
        lows, highs = numpy.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0).tolist()
    intervals = [Interval(*ends, level, table.size) for ends in zip(shares, lows, highs, strict=True)]
    return tuple(zip(thresholds.tolist(), intervals, strict=True))


def mean_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """S6: P(X > Y) of a run of each, averaged over tasks, ties one half; the numbers of runs may differ.

    All runs of x are compared with all of y, so it is an unpaired statistic. `stratified_bootstrap` of it is a paired
    bootstrap, which draws the same seeds of both: a dependence of the two over the seeds is in its width.

    >>> round(mean_improvement([[1, 2], [2, 2], [1, 1], [2, 1]], [[1, 1], [2, 2], [3, 3]]), 6)
    0.333333
    """
    ours, theirs = numpy.asarray(x, float), numpy.asarray(y, float)
    shares = [probability_of_improvement(a, b) for a, b in zip(ours.T, theirs.T, strict=True)]
    return math.fsum(shares) / len(shares)


def stratified_bootstrap(
    tables: Sequence[ArrayLike],
    statistic: Callable[..., float],
    generator: numpy.random.Generator,
    resamples: int = 2_000,
    level: float = 0.95,
) -> Interval | Refused:
    """S6: a percentile interval of ``statistic(*tables)``, by resampling seeds within each task.

    The tables (one per method, S x T) are paired: a resample takes the same seeds from all of them, drawn for each task
    anew. The order of the seeds does not matter. Many runs are needed; with few, percentiles are too narrow.

    Args:
        tables: scores of one or more methods (S x T each), the same seeds and tasks in the same order.
        statistic: from as many tables to a number, e.g. ``iqm``, or ``lambda a, b: iqm(a) - iqm(b)``.
        generator: draws the seeds.
    Returns:
        The interval, `n` being the number of runs of one method; `Refused` below 3 tasks or 15 runs of each method.
    >>> scores = numpy.arange(15.0).reshape(5, 3)
    >>> stratified_bootstrap([scores], iqm, numpy.random.default_rng(0)).estimate
    7.0
    """
    scores = numpy.stack([numpy.asarray(table, float) for table in tables])
    refused = _too_few(scores[0])
    if refused is not None:
        return refused
    estimate = float(statistic(*scores))
    draws = [float(statistic(*resampled)) for resampled in _resampled(scores, generator, resamples)]
    low, high = numpy.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), level, scores[0].size)


def _too_few(table: NDArray[numpy.float64]) -> Refused | None:
    num_tasks, num_runs = table.shape[1], table.size
    if num_tasks >= MINIMUM_TASKS and num_runs >= MINIMUM_RUNS:
        return None
    return Refused(
        f"{num_tasks} tasks and {num_runs} runs; an interval over tasks needs {MINIMUM_TASKS} and {MINIMUM_RUNS}"
    )


def _resampled(
    scores: NDArray[numpy.float64], generator: numpy.random.Generator, resamples: int
) -> Iterator[NDArray[numpy.float64]]:
    """Tables of several methods (M x S x T) with seeds drawn within each task, the same for all methods."""
    _, num_seeds, num_tasks = scores.shape
    ordered = scores.copy()
    for task in range(num_tasks):
        ordered[:, :, task] = scores[:, numpy.lexsort(scores[::-1, :, task]), task]
    columns = numpy.arange(num_tasks)
    for chosen in generator.integers(0, num_seeds, size=(resamples, num_seeds, num_tasks)):
        yield ordered[:, chosen, columns]


def performance_score(times: ArrayLike) -> tuple[float, ...] | Refused:
    """S7: AlgoPerf's score of each mode over workloads, mean of max(0, (4 - r) / 3), r its time over the fastest one's.

    It is the area under the performance profile, the share of workloads with r <= tau, for tau from 1 to 4, over 3.
    1: fastest on every workload. It depends on which modes are compared.

    Args:
        times: to the target (workloads x modes), above 0, inf where it was not reached.
    Returns:
        One score per mode; `Refused` below 3 workloads.
    Raises:
        ValueError: for nan or a time that is not above 0.

    >>> [round(score, 6) for score in performance_score([[100, 200], [50, 40], [30, math.inf]])]
    [0.972222, 0.555556]

    References:
        Dahl et al., Benchmarking Neural Network Training Algorithms, 2023, section 4.
    """
    table = numpy.asarray(times, dtype=numpy.float64)
    if table.ndim != 2 or not table.size or not (table > 0).all():
        raise ValueError(f"times must be a table of workloads x modes, all above 0; got shape {table.shape}")
    if len(table) < MINIMUM_TASKS:
        return Refused(f"{len(table)} workloads; one number over workloads needs {MINIMUM_TASKS}")
    fastest = table.min(axis=1, keepdims=True)
    # a workload that nobody finished has ratio inf / inf and gives nobody anything
    ratios = numpy.divide(table, fastest, out=numpy.full_like(table, math.inf), where=numpy.isfinite(fastest))
    shares = numpy.maximum(0.0, (WORST_RATIO - ratios) / (WORST_RATIO - 1))
    return tuple(math.fsum(column) / len(column) for column in shares.T)


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """P(X > Y) for unpaired samples, U / (n m): the share of all pairs (x_i, y_j) with x_i > y_j, ties one half.

    Which of the two is better is the caller's: for losses, P(treatment better) is ``f(reference, treatment)``.

    >>> probability_of_improvement([1, 2, 3, 4], [2, 3, 5, 6])
    0.25

    References:
        Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS 2021.
    """
    one, other = numpy.asarray(x, float), numpy.asarray(y, float)
    halves = 2 * int((one[:, None] > other).sum()) + int((one[:, None] == other).sum())
    return halves / (2 * len(one) * len(other))
