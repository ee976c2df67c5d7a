"""Statistics of methods over several tasks: of scores on a common scale, seeds x tasks (S x T), and of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike
from pandas import DataFrame
from scipy import stats

from analysis.stats import Array, Interval

MINIMUM_TASKS = 3
"""The fewest tasks of an interval over tasks."""
MINIMUM_RUNS = 15
"""The fewest runs of a method, over all tasks, of such an interval."""
LEVEL = 0.95
"""The level of the intervals."""
ENDS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
WORST_RATIO = 4.0
"""AlgoPerf's: a method that takes four times as long as the fastest one scores nothing on a workload."""


def iqm(scores: ArrayLike) -> float:
    """The interquartile mean: the mean of the middle half of all scores of all tasks together.

    >>> iqm([[1, 2], [2, 2], [1, 1], [2, 1]]), iqm([[1, 1], [2, 2], [3, 3]])
    (1.5, 2.0)

    References:
        Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS 2021 (rliable).
    """
    rising = np.sort(np.asarray(scores, float), axis=None)
    return float(stats.trim_mean(rising, 0.25))


def mean_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """P(X > Y) of a run of each, averaged over tasks, ties one half; the numbers of runs may differ.

    All runs of x are compared with all of y, so it is an unpaired statistic. `stratified_bootstrap` of it is a paired
    bootstrap, which draws the same seeds of both: a dependence of the two over the seeds is in its width.

    >>> round(mean_improvement([[1, 2], [2, 2], [1, 1], [2, 1]], [[1, 1], [2, 2], [3, 3]]), 6)
    0.333333
    """
    differences = np.asarray(x, float)[:, None] - np.asarray(y, float)[None]
    is_better = differences > 0
    is_tie = differences == 0
    return float((is_better + 0.5 * is_tie).mean())


def share_above(scores: ArrayLike, thresholds: ArrayLike) -> Array:
    """The share of runs, of all tasks together, with a score above each threshold.

    >>> share_above([[0.2, 0.4], [0.6, 0.8]], [0.0, 0.4, 0.9]).tolist()
    [1.0, 0.5, 0.0]
    """
    is_above = np.ravel(scores)[:, None] > np.asarray(thresholds, float)
    return is_above.mean(axis=0)


def too_few(scores: Array) -> str:
    """Why there is no interval; empty where there are enough tasks and runs."""
    tasks = scores.shape[1]
    runs = scores.size
    if tasks >= MINIMUM_TASKS and runs >= MINIMUM_RUNS:
        return ""
    return f"{tasks} tasks and {runs} runs; an interval over tasks needs {MINIMUM_TASKS} and {MINIMUM_RUNS}"


def performance_profile(scores: ArrayLike, generator: np.random.Generator, resamples: int = 2_000) -> DataFrame:
    """`share_above` at every score that occurs, rising, each with its percentile interval; nan where `too_few`.

    Seeds are resampled within each task, as in `stratified_bootstrap`. Between two of the scores the share and its
    interval stay what they are at the lower one. The intervals hold threshold by threshold, not for the whole curve.
    """
    table = np.asarray(scores, float)
    thresholds = np.unique(table)
    share = share_above(table, thresholds)
    low = np.nan
    high = np.nan
    if not too_few(table):
        drawn = [share_above(resampled, thresholds) for resampled in _resampled(table[None], generator, resamples)]
        low, high = np.quantile(drawn, ENDS, axis=0)
    return DataFrame({"score": thresholds, "share": share, "low": low, "high": high})


def stratified_bootstrap(
    tables: Sequence[ArrayLike],
    statistic: Callable[..., float],
    generator: np.random.Generator,
    resamples: int = 2_000,
) -> Interval:
    """A percentile interval of ``statistic(*tables)``, by resampling seeds within each task; nan where `too_few`.

    The tables (one per method, S x T) are paired: a resample takes the same seeds from all of them, drawn for each task
    anew. The order of the seeds does not matter. Many runs are needed; with few, percentiles are too narrow.

    >>> scores = np.arange(15.0).reshape(5, 3)
    >>> stratified_bootstrap([scores], iqm, np.random.default_rng(0)).estimate
    7.0
    """
    scores = np.stack([np.asarray(table, float) for table in tables])
    estimate = float(statistic(*scores))
    low = np.nan
    high = np.nan
    if not too_few(scores[0]):
        draws = [float(statistic(*resampled)) for resampled in _resampled(scores, generator, resamples)]
        low, high = np.quantile(draws, ENDS).tolist()
    return Interval(estimate, low, high, LEVEL, scores[0].size)


def _resampled(scores: Array, generator: np.random.Generator, resamples: int) -> Iterator[Array]:
    """Tables of several methods (M x S x T) with seeds drawn within each task, the same for all methods."""
    _, num_seeds, num_tasks = scores.shape
    # seeds are sorted by their scores, so that what is drawn does not depend on the order in which they are given
    ordered = scores.copy()
    for task in range(num_tasks):
        order = np.lexsort(scores[::-1, :, task])
        ordered[:, :, task] = scores[:, order, task]
    columns = np.arange(num_tasks)
    for chosen in generator.integers(0, num_seeds, size=(resamples, num_seeds, num_tasks)):
        yield ordered[:, chosen, columns]


def performance_score(times: ArrayLike) -> list[float]:
    """AlgoPerf's score of each method: the mean over workloads of max(0, (4 - r) / 3), r its time / the fastest one's.

    It is the area under the performance profile, the share of workloads with r <= tau, for tau from 1 to 4, over 3.
    1: fastest on every workload. It depends on which methods are compared.

    Args:
        times: to the target (workloads x methods), above 0, inf where it was not reached.

    >>> [round(score, 6) for score in performance_score([[100, 200], [50, 40], [30, np.inf]])]
    [0.972222, 0.555556]

    A workload that nobody finished gives nobody anything:

    >>> [round(score, 6) for score in performance_score([[1, 1], [1, 5], [np.inf, np.inf]])]
    [0.666667, 0.333333]

    References:
        Dahl et al., Benchmarking Neural Network Training Algorithms, 2023, section 4.
    """
    table = np.asarray(times, float)
    fastest = table.min(axis=1, keepdims=True)
    # where no method reached the target, inf / inf is left out, and every ratio stays inf
    ratios = np.full_like(table, np.inf)
    np.divide(table, fastest, out=ratios, where=np.isfinite(fastest))
    scores = np.maximum(0.0, (WORST_RATIO - ratios) / (WORST_RATIO - 1))
    return list(map(float, scores.mean(axis=0)))
