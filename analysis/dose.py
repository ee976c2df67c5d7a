"""The runs of a dose-response study, and the responses of each pair, as dose_response.py describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas import DataFrame

from analysis.curves import Curve, crossing_at, curve, loss_at, lowest_held, thinned_to_sparsest, unit_of
from analysis.gate import ArmsCompared, compare_arms, differences_by_design
from analysis.places import MISPLACED
from analysis.questions import Plan
from analysis.read import read
from analysis.trust import at_edge
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, FAILED, FINISHED

DELAYED = "delayed"
REFERENCE = "sync"
SHARES = (0.5, 0.8, 0.9, 1.0)
"""Shares of the improvement from the first evaluation to the lowest loss that both runs of a seed reach."""
RATIOS = {f"log_ratio_at_{100 * share:g}_percent": f"to {100 * share:g} %" for share in SHARES}
"""Column of the pairs -> the share of the improvement, in words."""
RATIO_TO_LOWEST = [*RATIOS][-1]
"""The column of the times to the lowest loss that both reach."""
PAIRS = ("speeds", "delay", "seed", *RATIOS, "gap", "target_loss", "delayed_loss", "sync_loss")
"""Columns of dose_response.csv, which has a row for each seed.

`speeds` are the declared ones, empty for the seconds of real processes; `delay` is in updates. `RATIOS` are
log(T_delayed / T_sync), `gap` is the loss of delayed - that of sync at equal seconds. `target_loss` was registered
before the runs. `delayed_loss` and `sync_loss` are at the end, after equal samples.
"""
REACHED = ("delayed_reached", "sync_reached")
"""Columns that say whether the runs reached the target."""
ADVICE = {
    FAILED: "type its command again with --retry",
    MISPLACED: "move its folder out of the study's, and type its command again",
}
"""Status of a run without a result -> what to do, where to type the study's command again does not make it."""
Arrivals = Callable[[str, str, int, int, int], list[float]]
"""(speeds, rule, num_workers, seed, number) -> seconds of the first `number` arrivals."""


class Dose(NamedTuple):
    """The test runs of a study."""

    runs: DataFrame
    """As `read` has them, with their `delay` and whether their learning rate is at an `edge` of its grid. One run may
    stand for both algorithms at delay 0."""
    curves: Mapping[str, DataFrame]
    """Run -> its curve."""
    targets: Mapping[int, float]
    """Delay -> the registered target loss."""
    unit: str = "nats"
    """The unit of the loss."""
    untimed: Mapping[tuple[int, int], str] = {}
    """(delay, seed) -> why the measured seconds of a pair are not compared; empty where they are."""


def read_dose(folder: Path) -> Dose:
    """Read a finished study.

    Raises:
        UsageError: if a run has no finite loss at every evaluation: it has no time, and its delay says nothing; or if
            runs are not comparable. Where measured seconds alone are not, `Dose.untimed` says so.
    """
    runs, curves, plan = read(folder)
    runs = runs[runs["stage"] == "test"]
    if not {DELAYED, REFERENCE} <= {arm.algorithm for arm in plan.arms.values()}:
        raise UsageError(
            f"{folder} has no arms {DELAYED} and {REFERENCE}, so it is no dose-response study; make one: "
            f"asyncsgd study dose_response --quick"
        )
    by_run = dict(iter(curves.groupby("run")))
    for run in runs.itertuples():
        if run.status not in FINISHED:
            advice = ADVICE.get(run.status, "type its command again")
            raise UsageError(f"the study is not finished: {run.run} is {run.status}; {advice}")
        if run.status != DONE or by_run[run.run]["loss"].isna().any():
            raise UsageError(
                f"{run.run} is {run.status} and has no loss at every evaluation; take its learning rates out of the "
                "config and choose another --out"
            )
    is_at_edge = [at_edge(plan.arms[arm]) for arm in runs["arm"]]
    runs = runs.assign(delay=runs["workers"].astype(int) - 1, edge=is_at_edge)
    of_reference = runs[runs["algorithm"] == REFERENCE]
    if 0 not in set(of_reference["delay"]):  # with one worker both algorithms are the same run
        of_one_worker = runs[runs["delay"] == 0]
        runs = pd.concat([runs, of_one_worker.assign(algorithm=REFERENCE)])
    _check_comparable(runs, plan)
    targets = {}
    for arm, loss in plan.targets.items():
        delay = plan.arms[arm].num_workers - 1
        targets[delay] = loss
    return Dose(runs, by_run, targets, unit_of(runs["details"].iloc[0]), _untimed(runs, plan))


def _check_comparable(runs: DataFrame, plan: Plan) -> None:
    """Refuse arms that are not comparable with the first one.

    The ratios compare the two arms of a delay, and the slope compares the delays.
    """
    first, *others = [own.drop_duplicates("seed") for _, own in runs.groupby("arm", sort=False)]
    for own in others:
        why = _between(own, first, plan).why_not_comparable
        if why:
            names = f"{own['arm'].iloc[0]} and {first['arm'].iloc[0]}"
            raise UsageError(f"the runs of {names} are not comparable: {why}")


def _between(ours: DataFrame, theirs: DataFrame, plan: Plan) -> ArmsCompared:
    allowed_differences = differences_by_design(ours["arm"].iloc[0], theirs["arm"].iloc[0], plan)
    return compare_arms(ours, theirs, allowed_differences)


def _untimed(runs: DataFrame, plan: Plan) -> dict[tuple[int, int], str]:
    """By delay and seed, why the seconds of a pair of real processes are not compared."""
    reasons = {}
    for delay, own in runs[runs["delay"] > 0].groupby("delay"):
        ours = own[own["algorithm"] == DELAYED]
        theirs = own[own["algorithm"] == REFERENCE]
        for (seed, _), pair in _between(ours, theirs, plan).pairs.items():
            if pair.timing_refusals:
                reasons[delay, seed] = "; ".join(pair.timing_refusals.values())
    return reasons


def pairs_of(dose: Dose, speeds: str = "", arrivals: Arrivals | None = None) -> DataFrame:
    """The responses of every delay above 0 and seed, with the columns of `PAIRS` and `REACHED`.

    Args:
        speeds: the declared clock that both are put on.
        arrivals: its times; None: the runs' own seconds.

    Raises:
        UsageError: if a run never gets below its first loss: there is nothing to reach.
    """
    rows = []
    of_delays = dose.runs[dose.runs["delay"] > 0]
    for (delay, seed), pair in of_delays.groupby(["delay", "seed"]):
        delayed = _timed(pair[pair["algorithm"] == DELAYED].iloc[0], dose.curves, speeds, arrivals)
        sync = _timed(pair[pair["algorithm"] == REFERENCE].iloc[0], dose.curves, speeds, arrivals)
        try:
            logs, gap = compare_curves(delayed, sync)
        except ValueError as error:
            raise UsageError(f"delay {delay}, seed {seed}: {error}") from error
        why_untimed = ""
        if arrivals is None:
            why_untimed = dose.untimed.get((delay, seed), "")
        if why_untimed:
            logs = [math.nan] * len(SHARES)
            gap = math.nan
        target = dose.targets.get(delay, math.nan)
        row = {"speeds": speeds, "delay": delay, "seed": int(seed), "gap": gap, "target_loss": target}
        row |= dict(zip(RATIOS, logs, strict=True))
        for name, (_, losses) in (("delayed", delayed), ("sync", sync)):
            row[f"{name}_loss"] = losses[-1]
        row["delayed_reached"] = lowest_held(delayed) <= target
        row["sync_reached"] = lowest_held(sync) <= target
        row["untimed"] = why_untimed
        rows.append(row)
    return DataFrame(rows, columns=[*PAIRS, *REACHED, "untimed"])


def _timed(run: Any, curves: Mapping[str, DataFrame], speeds: str, arrivals: Arrivals | None) -> Curve:
    """Losses against seconds; the first evaluation, before any update, is at 0 seconds."""
    frame = curves[run.run]
    if arrivals is None:
        return curve(frame, "seconds")
    num_workers = int(run.delay) + 1
    if run.algorithm == DELAYED:
        rule = "asynchronous"
        gradients_an_update = 1
    else:
        rule = "synchronous"
        gradients_an_update = num_workers
    # the last round of a budget that is no multiple of the workers has fewer gradients
    most_arrivals = int(frame["samples"].iloc[-1] // run.batch_size)
    num_arrivals = np.minimum(frame["updates"].astype(int) * gradients_an_update, most_arrivals)
    clock = [0.0, *arrivals(speeds, rule, num_workers, int(run.seed), int(num_arrivals.iloc[-1]))]
    seconds = [clock[number] for number in num_arrivals]
    return curve(frame.assign(seconds=seconds), "seconds")


def compare_curves(ours: Curve, theirs: Curve) -> tuple[list[float], float]:
    """log(our seconds / their seconds) to each of `SHARES`, and our loss less theirs when the shorter budget ends.

    Raises:
        ValueError: if one of them never gets below its first loss.

    >>> ours, theirs = ((np.array([0.0, end]), np.array([9.0, 7.0])) for end in (4.0, 2.0))
    >>> logs, gap = compare_curves(ours, theirs)
    >>> [round(math.exp(log), 6) for log in logs], gap
    ([2.0, 2.0, 2.0, 2.0], 1.0)
    """
    our_thinned, their_thinned = thinned_to_sparsest([ours, theirs])
    # both start from the same model; on real processes the two first losses may differ by rounding
    first = min(ours[1][0], theirs[1][0])
    lowest = max(lowest_held(our_thinned), lowest_held(their_thinned))
    if lowest >= first:
        raise ValueError("one of the two runs never gets below its first loss, so that there is no time to compare")
    logs = []
    for share in SHARES:
        # the last target may miss the lowest loss by rounding
        target = max(first - share * (first - lowest), lowest)
        ratio = crossing_at(our_thinned, target) / crossing_at(their_thinned, target)
        logs.append(math.log(ratio))
    end = min(ours[0][-1], theirs[0][-1])
    return logs, loss_at(ours, end) - loss_at(theirs, end)
