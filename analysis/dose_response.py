"""Dose and response: what a delay of exactly tau updates costs, and up to which tau asynchrony still pays in seconds.

Made from the folder of ``asyncsgd study dose_response``: an algorithm `delayed` (rule fixed_delay) and a reference
`sync` on the same numbers of workers N = tau + 1. Both are put on the clocks of declared speeds: update v of `delayed`
happens with arrival v of N asynchronous workers that never wait, round v of `sync` with arrival N v of synchronous
ones. Two responses of a pair, neither of them censored:

    log(T_delayed / T_sync),   T the seconds to a share of the improvement down to the lowest loss that both runs reach
    L_delayed(t) - L_sync(t),  t the seconds at which the shorter of the two budgets ends

A target fixed beforehand would be out of reach for large delays, and a time that was cut off at the end of a shorter
budget would look like an advantage; how many runs reached the registered target is shown beside. Which share of the
improvement is taken moves the ratio, so all of `SHARES` are shown, and the crossing at each of them.

The times of arrivals come from the library's virtual clock, so this report alone imports torch, when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame, Series

from analysis import gallery, plots
from analysis.crossing import Crossing, crossing_point
from analysis.curves import Curve, curve, loss_at, lowest_held, on_common_looks, reached, unit_of
from analysis.gate import Between, between, told_apart
from analysis.page import Addition, Section, drawing, table
from analysis.questions import Plan
from analysis.read import read
from analysis.stats import Interval, Numbers, t_interval
from analysis.trust import at_edge
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE

if TYPE_CHECKING:
    from analysis.load import Study

DELAYED = "delayed"
REFERENCE = "sync"
SPEEDS = ("constant:1", "log_normal:0.5", "exponential:1")
"""Declared speeds whose clocks a study is put on, unless others are asked for."""
SHARES = (0.5, 0.8, 0.9, 1.0)
"""Of the improvement from the first evaluation to the lowest loss that both runs of a seed reach."""
RATIOS = {f"log_ratio_at_{100 * share:g}_percent": f"to {100 * share:g} %" for share in SHARES}
"""Columns of the pairs, in words."""
WHOLE = [*RATIOS][-1]
"""The column of the times to the lowest loss that both reach."""
PAIRS = {
    "speeds": "declared; empty: seconds of real processes",
    "delay": "in updates",
    "seed": "of both runs",
    **dict.fromkeys(RATIOS, "log(T_delayed / T_sync)"),
    "gap": "loss at equal seconds, delayed - sync, in the unit of the loss",
    "target_loss": "registered before the runs",
    "delayed_loss": "at the end, after equal samples",
    "sync_loss": "at the end, after equal samples",
}
"""Columns of dose_response.csv, a row for each seed; beside them, whether the runs reached the target, and why measured
seconds are not compared."""
REACHED = ("delayed_reached", "sync_reached")
Arrivals = Callable[[str, str, int, int, int], list[float]]
"""(speeds, rule, num_workers, seed, number) -> seconds of the first `number` arrivals."""


class Dose(NamedTuple):
    """The test runs of a sweep."""

    runs: DataFrame
    """As `read` has them, with their `delay` and whether their learning rate is at an `edge` of its grid. One run may
    stand for both algorithms at delay 0."""
    curves: Mapping[str, DataFrame]
    """By run."""
    targets: Mapping[int, float]
    """The registered loss, by delay."""
    unit: str = "nats"
    """Of the loss."""
    untimed: Mapping[tuple[int, int], str] = {}
    """(delay, seed) -> why the measured seconds of a pair are not compared; empty where they are."""


def read_dose(folder: Path) -> Dose:
    """Read a finished sweep.

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
        if run.status != DONE or by_run[run.run]["loss"].isna().any():
            raise UsageError(
                f"{run.run} is {run.status} and has no loss at every evaluation; take its learning rates out of the "
                "config and choose another --out"
            )
    runs = runs.assign(delay=runs["workers"].astype(int) - 1, edge=[at_edge(plan.arms[arm]) for arm in runs["arm"]])
    if 0 not in set(runs.loc[runs["algorithm"] == REFERENCE, "delay"]):  # one process under either name
        runs = pd.concat([runs, runs[runs["delay"] == 0].assign(algorithm=REFERENCE)])
    first, *others = (own.drop_duplicates("seed") for _, own in runs.groupby("arm", sort=False))
    for own in others:  # pairs of a delay are set against each other, and delays by the slope over them
        if why := _between(own, first, plan).unlike:
            names = " and ".join(side["arm"].iloc[0] for side in (own, first))
            raise UsageError(f"the runs of {names} are not comparable: {why}")
    targets = {plan.arms[arm].num_workers - 1: loss for arm, loss in plan.targets.items()}
    return Dose(runs, by_run, targets, unit_of(runs["details"].iloc[0]), _untimed(runs, plan))


def _between(ours: DataFrame, theirs: DataFrame, plan: Plan) -> Between:
    return between(ours, theirs, told_apart(ours["arm"].iloc[0], theirs["arm"].iloc[0], plan))


def _untimed(runs: DataFrame, plan: Plan) -> dict[tuple[int, int], str]:
    """By delay and seed, why the seconds of a pair of real processes are not compared."""
    reasons = {}
    for delay, own in runs[runs["delay"] > 0].groupby("delay"):
        ours, theirs = (own[own["algorithm"] == name] for name in (DELAYED, REFERENCE))
        for (seed, _), pair in _between(ours, theirs, plan).pairs.items():
            if pair.untimed:
                reasons[delay, seed] = "; ".join(pair.untimed.values())
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
    for (delay, seed), pair in dose.runs[dose.runs["delay"] > 0].groupby(["delay", "seed"]):
        runs = pair.set_index("algorithm")
        target = dose.targets[delay]
        timed = [_timed(runs.loc[name], dose.curves, speeds, arrivals) for name in (DELAYED, REFERENCE)]
        try:
            logs, gap = compare(*timed)
        except ValueError as error:
            raise UsageError(f"delay {delay}, seed {seed}: {error}") from error
        why = dose.untimed.get((delay, seed), "") if arrivals is None else ""
        if why:
            logs = [math.nan] * len(SHARES)
            gap = math.nan
        ends = [one[1][-1] for one in timed]
        there = [lowest_held(one) <= target for one in timed]
        rows.append((speeds, delay, int(seed), *logs, gap, target, *ends, *there, why))
    return DataFrame(rows, columns=[*PAIRS, *REACHED, "untimed"])


def _timed(run: Any, curves: Mapping[str, DataFrame], speeds: str, arrivals: Arrivals | None) -> Curve:
    """Losses against seconds; the first evaluation, before any update, is at 0 seconds."""
    frame = curves[run.run]
    if arrivals is not None:
        rule, step = ("asynchronous", 1) if run.name == DELAYED else ("synchronous", run.delay + 1)
        # the last round of a budget that is no multiple of the workers has fewer gradients
        needed = np.minimum(frame["updates"].astype(int) * step, int(frame["samples"].iloc[-1] // run.batch_size))
        clock = [0.0, *arrivals(speeds, rule, int(run.delay) + 1, int(run.seed), int(needed.iloc[-1]))]
        frame = frame.assign(seconds=[clock[number] for number in needed])
    return curve(frame, "seconds")


def compare(ours: Curve, theirs: Curve) -> tuple[list[float], float]:
    """log(our seconds / their seconds) to each of `SHARES`, and our loss less theirs when the shorter budget ends.

    Raises:
        ValueError: if one of them never gets below its first loss.

    >>> ours, theirs = ((np.array([0.0, end]), np.array([9.0, 7.0])) for end in (4.0, 2.0))
    >>> logs, gap = compare(ours, theirs)
    >>> [round(math.exp(log), 6) for log in logs], gap
    ([2.0, 2.0, 2.0, 2.0], 1.0)
    """
    both = on_common_looks([ours, theirs])
    # both start from the same model; on real processes the two first losses may differ by rounding
    first = min(ours[1][0], theirs[1][0])
    lowest = max(map(lowest_held, both))
    if lowest >= first:
        raise ValueError("one of the two runs never gets below its first loss, so that there is no time to compare")
    # the last target may miss the lowest loss by rounding
    targets = [max(first - share * (first - lowest), lowest) for share in SHARES]
    logs = [math.log(reached(both[0], target) / reached(both[1], target)) for target in targets]
    end = min(ours[0][-1], theirs[0][-1])
    return logs, loss_at(ours, end) - loss_at(theirs, end)


ABOUT_LOSSES = "final loss at equal samples, mean [95 % t interval]"
ABOUT_EDGES = "* at the edge of its grid: a better one may lie outside"
ABOUT_RESPONSES = "delayed / sync, seconds to a share of the improvement that both reach"
AHEAD = "below 1, and below 0, asynchronous is ahead"
MEASURED = "MEASURED: real processes on this machine, at the learning rates of the virtual clock"


def text(dose: Dose, pairs: DataFrame) -> str:
    """The tables and the answers; `pairs` of declared speeds, and of real processes."""
    parts = [
        f"{ABOUT_LOSSES}, {seeds_of(dose)}; learning rate tuned per delay",
        _aligned(_losses(dose)),
        ABOUT_EDGES,
        about_slope(dose),
    ]
    for speeds, own in pairs.groupby("speeds", sort=False):
        parts += ["", f"{clock_of(speeds)}, {seeds_of(dose)}; {AHEAD}", ABOUT_RESPONSES, _aligned(_responses(own))]
        parts += [f"      {line}" for line in answers(own)]
    return "\n".join([*parts, *about_edges(dose)])


def seeds_of(dose: Dose) -> str:
    return f"{dose.runs['seed'].nunique()} seeds"


def clock_of(speeds: str) -> str:
    return f"speeds {speeds} (virtual clock)" if speeds else MEASURED


def about_slope(dose: Dose) -> str:
    """What a doubling of the number of workers costs, which have one gradient in flight each."""
    delayed = dose.runs[dose.runs["algorithm"] == DELAYED].pivot(index="delay", columns="seed", values="loss")
    slopes, _ = np.polyfit(np.log2(delayed.index + 1), delayed, 1)
    return f"each doubling of tau + 1 adds {t_interval(slopes):.4f} {dose.unit} at equal samples"


def about_edges(dose: Dose) -> list[str]:
    """How many learning rates lie at an end of their grid; nothing where none does."""
    arms = dose.runs.drop_duplicates("arm")
    edges = int(arms["edge"].sum())
    if not edges:
        return []
    return [f"learning rates at the edge of their grid (a better one may lie outside): {edges} of {len(arms)}"]


def answers(pairs: DataFrame) -> list[str]:
    """Which seconds are not compared and, on a declared clock, at which delay the advantage is lost."""
    lines = []
    for row in pairs[pairs["untimed"] != ""].itertuples():
        lines.append(f"tau {row.delay}, seed {row.seed}: its seconds are not compared: {row.untimed}")
    if pairs["speeds"].iloc[0]:
        for column, name in RATIOS.items():
            lines.append(f"seconds {name}: {answer(crossing_point(*_by_delay(pairs, column)))}")
        lines.append(f"loss at equal seconds: {answer(crossing_point(*_by_delay(pairs, 'gap')))}")
    return lines


def _aligned(table: DataFrame) -> str:
    return table.to_string(index=False, justify="right")


def addition(study: Study) -> Addition:
    """What a dose-response study has on its page: the answers on top, with the picture, and the tables."""
    from asyncsgd.simulation.simulate import arrival_seconds

    dose = read_dose(study.folder)
    of_speeds = [pairs_of(dose, speeds, arrival_seconds) for speeds in SPEEDS]
    pairs = pd.concat(of_speeds)
    seeds = seeds_of(dose)
    first = table(_losses(dose), f"{ABOUT_LOSSES}, {seeds}", (ABOUT_EDGES, *about_edges(dose)))
    tables = [first]
    told = []
    for speeds, own in zip(SPEEDS, of_speeds, strict=True):
        notes = (f"{ABOUT_RESPONSES}; {AHEAD}", *answers(own))
        tables.append(table(_responses(own), f"{clock_of(speeds)}, {seeds}", notes))
        told.append(f"{speeds}, seconds to the same loss: {answer(crossing_point(*_by_delay(own, WHOLE)))}")
    slope = about_slope(dose)
    caption = (
        "How old a gradient may be: seconds and losses against the delay, on the clocks of three declared speeds. "
        f"Means over {dose.runs['seed'].nunique()} seeds with 95 % t intervals; learning rates are tuned per delay. "
        "At delay 0 both are one process. The same loss: the lowest that both reach, or a share of the way to it."
    )
    picture = gallery.Picture("dose-response", "Dose and response", draw(dose, pairs), caption, slope)
    return Addition(
        (Section("responses", "How old a gradient may be", tables=tuple(tables)),),
        headlines=((slope[0].upper() + slope[1:] + ".", tuple(told)),),
        first=(drawing(picture),),
    )


def _losses(dose: Dose) -> DataFrame:
    """Final losses and chosen rates, a row for each delay."""
    rows = []
    for delay, own in dose.runs.groupby("delay"):
        row = {"tau": delay}
        for algorithm, name in ((DELAYED, "delayed"), (REFERENCE, "sync, tau + 1 workers")):
            runs = own[own["algorithm"] == algorithm]
            row[name] = f"{t_interval(runs['loss'].to_numpy()):.4f}"
            row[f"rate, {algorithm}"] = f"{runs['learning_rate'].iloc[0]:g}{'*' if runs['edge'].any() else ' '}"
        if own["arm"].nunique() == 1:
            row["sync, tau + 1 workers"] = "the same run"
            row[f"rate, {REFERENCE}"] = ""
        rows.append(row | {"target": f"{dose.targets[delay]:.4f}" if delay in dose.targets else "-"})
    return DataFrame(rows)


def _responses(pairs: DataFrame) -> DataFrame:
    """Delayed / sync: seconds to a share of the improvement that both reach; a row for each delay."""
    rows = []
    for delay, own in pairs.groupby("delay"):
        row = {"tau": delay}
        for column, name in RATIOS.items():
            row[f"seconds {name}"] = _cell(_ratio(own[column]), ".3f")
        row["loss at equal seconds, - sync"] = _cell(t_interval(own["gap"]), ".4f")
        row["target reached"] = " and ".join(f"{own[name].sum()}/{len(own)}" for name in REACHED)
        rows.append(row)
    return DataFrame(rows)


def _cell(found: Interval, form: str) -> str:
    return f"{found:{form}}" if found.n else "-"


def _ratio(logs: Numbers) -> Interval:
    """The geometric mean of the ratios, with its t interval on logs."""
    return t_interval(logs).mapped(math.exp)


def _by_delay(pairs: DataFrame, column: str) -> tuple[Any, Any]:
    """The delays, and a row for each seed."""
    table = pairs.pivot(index="seed", columns="delay", values=column)
    return table.columns, table.to_numpy()


def answer(point: Crossing) -> str:
    """The crossing point in a sentence."""
    low = "below the first delay" if point.low == -math.inf else f"{point.low:.2g}"
    high = "beyond the last delay" if point.high == math.inf else f"{point.high:.2g}"
    ends = "" if math.isnan(point.low) else f"95 % interval {low} to {high}"
    if math.isnan(point.at):
        told = f"no crossing: {point.reason}"
        return f"{told}; not excluded: {ends}" if ends else told
    told = f"the advantage is lost at tau = {point.at:.2g}"
    if len(point.all) > 1:
        between = f"between tau = {min(point.all):.2g} and {max(point.all):.2g}"
        told = f"no single crossing (the mean crosses {len(point.all)} times, {between})"
    told = ", ".join(filter(None, (told, ends)))
    return f"{told} ({point.reason})" if point.reason and len(point.all) == 1 else told


def save(dose: Dose, pairs: DataFrame, folder: Path) -> list[Path]:
    """Write dose_response.csv, .png and .svg, and measured.csv where pairs were measured; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    virtual = pairs[pairs["speeds"] != ""]
    measured = pairs[pairs["speeds"] == ""]
    tables = {"dose_response.csv": virtual[[*PAIRS]]}
    if len(measured):  # its seconds are no virtual ones: a file of its own
        tables["measured.csv"] = measured[["delay", *RATIOS, "gap"]]
    for name, frame in tables.items():
        frame.to_csv(folder / name, index=False, lineterminator="\r\n")
    pictures = plots.save(draw(dose, virtual), folder / "dose_response", ("png", "svg"))
    return [*(folder / name for name in tables), *pictures]


def draw(dose: Dose, pairs: DataFrame) -> Figure:
    """Seconds to the same loss, loss at equal seconds, loss at equal samples, against the delay."""
    figure, (left, middle, right) = plots.figure(4.4, 4.0, columns=3)
    colours = sns.color_palette("colorblind")
    clocks = pairs["speeds"].unique()
    others = [column for column in RATIOS if column != WHOLE]
    lighter = dict(zip(others, [(1, 3), (1, 1.5), (3, 1)], strict=True))  # without intervals in the picture
    for number, (speeds, own) in enumerate(pairs.groupby("speeds", sort=False)):
        # a little apart, so that intervals do not hide one another
        look = {"color": colours[(number + 2) % len(colours)], "marker": "o^sDvP"[number % 6], "label": speeds}
        apart = 0.05 * (number - (len(clocks) - 1) / 2)
        for column, dashes in lighter.items():
            at = own.groupby("delay")[column].mean()
            left.plot(np.log2(at.index + 1) + apart, np.exp(at), color=look["color"], dashes=dashes, linewidth=1.0)
        _points(left, own.groupby("delay")[WHOLE].agg(_ratio), apart, look)
        _points(middle, own.groupby("delay")["gap"].agg(t_interval), apart, look)
    left.axhline(1.0, color=plots.MUTED, linewidth=1)
    left.set_yscale("log")
    for axis in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        axis(lambda value, place: f"{value:g}")
    left.set_ylim(top=left.get_ylim()[1] ** 2)  # room for the legend, the axis being one of logarithms
    handles = left.get_legend_handles_labels()[0]
    handles += [
        Line2D([], [], color=plots.MUTED, dashes=dashes, linewidth=1.0, label=f"{RATIOS[column]} of the way")
        for column, dashes in lighter.items()
    ]
    left.legend(handles=handles, title="speeds (virtual clock)", fontsize=7, title_fontsize=7, frameon=False, ncols=2)
    middle.axhline(0.0, color=plots.MUTED, linewidth=1)
    for algorithm, colour, label in (
        (DELAYED, colours[1], "delayed by exactly tau"),
        (REFERENCE, colours[0], "synchronous, tau + 1 workers"),
    ):
        losses = dose.runs[dose.runs["algorithm"] == algorithm].groupby("delay")["loss"].agg(t_interval)
        _points(right, losses, 0.0, {"color": colour, "marker": "o", "label": label})
    right.margins(y=0.25)  # room for the legend, which would lie on intervals
    right.legend(fontsize=8, frameon=False, loc="upper center")
    delays = sorted(dose.runs["delay"].unique())
    for axes, label in (
        (left, "seconds to the same loss, delayed / sync"),
        (middle, f"loss at equal seconds, delayed - sync ({dose.unit})"),
        (right, f"evaluation loss at equal samples ({dose.unit})"),
    ):
        axes.set_xticks(np.log2(np.array(delays) + 1), delays)
        axes.set(xlabel="delay tau (updates)", ylabel=label)
    return figure


def _points(axes: Axes, intervals: Series, apart: float, look: Mapping[str, Any]) -> None:
    """Means against the delay, with their intervals where there are any."""
    estimates, low, high = np.array([one[:3] for one in intervals]).T
    arms = np.nan_to_num([estimates - low, high - estimates])
    axes.errorbar(np.log2(intervals.index + 1) + apart, estimates, yerr=arms, capsize=3, **look)
