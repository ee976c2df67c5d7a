"""The report of a dose-response study: what a delay of exactly tau updates costs, up to which tau asynchrony pays.

The study (``asyncsgd study dose_response``) has an algorithm `delayed` (rule fixed_delay) and a reference `sync` on the
same numbers of workers N = tau + 1. Its runs are made once. This report gives every update the second at which a
simulation with declared speeds would have made it: update v of `delayed` comes with arrival v of N asynchronous workers
that never wait, and round v of `sync` with arrival N v of N synchronous workers. Each pair has two responses, and
neither of them is censored:

    log(T_delayed / T_sync),   T the seconds to a share of the improvement down to the lowest loss that both runs reach
    L_delayed(t) - L_sync(t),  t the seconds at which the shorter of the two budgets ends

A target that is fixed beforehand would be out of reach for large delays, and a time that is cut off where a shorter
budget ends would look like an advantage. So the tables only count the runs that reached the registered target. The
ratio depends on the share of the improvement, so all of `SHARES` are shown, with the crossing at each of them.

The times of arrivals come from the library's virtual clock, so making this report imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame, Series

from analysis import gallery, plots
from analysis.crossing import Crossing, crossing_point
from analysis.dose import DELAYED, PAIRS, RATIO_TO_LOWEST, RATIOS, REACHED, REFERENCE, Dose, pairs_of, read_dose
from analysis.page import Addition, Section, table
from analysis.stats import Interval, Numbers, t_interval

if TYPE_CHECKING:
    from analysis.load import Study

SPEEDS = ("constant:1", "log_normal:0.5", "exponential:1")
"""Declared speeds whose clocks a study is put on, unless others are asked for."""
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
    """The slope of the final loss over log2(tau + 1): what a doubling of the number of workers costs."""
    delayed = dose.runs[dose.runs["algorithm"] == DELAYED]
    losses = delayed.pivot(index="delay", columns="seed", values="loss")
    slopes, _ = np.polyfit(np.log2(losses.index + 1), losses, 1)
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
            lines.append(f"seconds {name}: {_crossing_of(pairs, column)}")
        lines.append(f"loss at equal seconds: {_crossing_of(pairs, 'gap')}")
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
    details = []
    for speeds, own in zip(SPEEDS, of_speeds, strict=True):
        notes = (f"{ABOUT_RESPONSES}; {AHEAD}", *answers(own))
        tables.append(table(_responses(own), f"{clock_of(speeds)}, {seeds}", notes))
        details.append(f"{speeds}, seconds to the same loss: {_crossing_of(own, RATIO_TO_LOWEST)}")
    slope = about_slope(dose)
    caption = (
        "How old a gradient may be: seconds and losses against the delay, on the clocks of three declared speeds. "
        f"Means over {dose.runs['seed'].nunique()} seeds with 95 % t intervals; learning rates are tuned per delay. "
        "At delay 0 both are one process. The same loss: the lowest that both reach, or a share of the way to it."
    )
    picture = gallery.Picture("dose-response", "Dose and response", draw(dose, pairs), caption, slope)
    return Addition(
        (Section("responses", "How old a gradient may be", tables=tuple(tables)),),
        headlines=((slope[0].upper() + slope[1:] + ".", tuple(details)),),
        top_pictures=(picture,),
    )


def _losses(dose: Dose) -> DataFrame:
    """Final losses and chosen rates, a row for each delay."""
    rows = []
    for delay, own in dose.runs.groupby("delay"):
        row = {"tau": delay}
        for algorithm, name in ((DELAYED, "delayed"), (REFERENCE, "sync, tau + 1 workers")):
            runs = own[own["algorithm"] == algorithm]
            mark = "*" if runs["edge"].any() else " "
            row[name] = f"{t_interval(runs['loss'].to_numpy()):.4f}"
            row[f"rate, {algorithm}"] = f"{runs['learning_rate'].iloc[0]:g}{mark}"
        if own["arm"].nunique() == 1:
            row["sync, tau + 1 workers"] = "the same run"
            row[f"rate, {REFERENCE}"] = ""
        row["target"] = "-"
        if delay in dose.targets:
            row["target"] = f"{dose.targets[delay]:.4f}"
        rows.append(row)
    return DataFrame(rows)


def _responses(pairs: DataFrame) -> DataFrame:
    """Delayed / sync: seconds to a share of the improvement that both reach; a row for each delay."""
    rows = []
    for delay, own in pairs.groupby("delay"):
        row = {"tau": delay}
        for column, name in RATIOS.items():
            row[f"seconds {name}"] = _cell(_ratio(own[column]), ".3f")
        row["loss at equal seconds, - sync"] = _cell(t_interval(own["gap"]), ".4f")
        shares = [f"{own[name].sum()}/{len(own)}" for name in REACHED]
        row["target reached, delayed and sync"] = "-" if own["target_loss"].isna().any() else " and ".join(shares)
        rows.append(row)
    return DataFrame(rows)


def _cell(found: Interval, form: str) -> str:
    return f"{found:{form}}" if found.n else "-"


def _ratio(logs: Numbers) -> Interval:
    """The geometric mean of the ratios, with its t interval on logs."""
    return t_interval(logs).mapped(math.exp)


def _crossing_of(pairs: DataFrame, column: str) -> str:
    """The delay at which a column of the pairs crosses 0, in a sentence."""
    table = pairs.pivot(index="seed", columns="delay", values=column)
    point = crossing_point(table.columns, table.to_numpy())
    return crossing_in_words(point)


def crossing_in_words(point: Crossing) -> str:
    """The crossing point in a sentence."""
    interval = _interval_in_words(point)
    if math.isnan(point.at):
        sentence = f"no crossing: {point.reason}"
        if interval:
            sentence += f"; not excluded: {interval}"
        return sentence
    if len(point.crossings) == 1:
        sentence = f"the advantage is lost at tau = {point.at:.2g}"
    else:
        between = f"between tau = {min(point.crossings):.2g} and {max(point.crossings):.2g}"
        sentence = f"no single crossing (the mean crosses {len(point.crossings)} times, {between})"
    if interval:
        sentence += f", {interval}"
    if point.reason and len(point.crossings) == 1:
        sentence += f" ({point.reason})"
    return sentence


def _interval_in_words(point: Crossing) -> str:
    """The interval of a crossing point; empty where it has none."""
    if math.isnan(point.low):
        return ""
    low = "below the first delay" if point.low == -math.inf else f"{point.low:.2g}"
    high = "beyond the last delay" if point.high == math.inf else f"{point.high:.2g}"
    return f"95 % interval {low} to {high}"


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
    paths = [folder / name for name in tables]
    paths += plots.save(draw(dose, virtual), folder / "dose_response", ("png", "svg"))
    return paths


def draw(dose: Dose, pairs: DataFrame) -> Figure:
    """Seconds to the same loss, loss at equal seconds, loss at equal samples, against the delay."""
    figure, (left, middle, right) = plots.figure(4.4, 4.0, columns=3)
    _draw_clocks(left, middle, pairs)
    _draw_losses(right, dose)
    delays = np.array(sorted(dose.runs["delay"].unique()))
    for axes, label in (
        (left, "seconds to the same loss, delayed / sync"),
        (middle, f"loss at equal seconds, delayed - sync ({dose.unit})"),
        (right, f"evaluation loss at equal samples ({dose.unit})"),
    ):
        axes.set_xticks(np.log2(delays + 1), delays.tolist())
        axes.set(xlabel="delay tau (updates)", ylabel=label)
    return figure


def _draw_clocks(left: Axes, middle: Axes, pairs: DataFrame) -> None:
    """The ratios of seconds and the differences of losses at equal seconds, each on every declared clock."""
    colours = sns.color_palette("colorblind")
    num_clocks = pairs["speeds"].nunique()
    other_ratios = [column for column in RATIOS if column != RATIO_TO_LOWEST]
    dashes_of = dict(zip(other_ratios, [(1, 3), (1, 1.5), (3, 1)], strict=True))  # without intervals in the picture
    for number, (speeds, own) in enumerate(pairs.groupby("speeds", sort=False)):
        colour = colours[(number + 2) % len(colours)]
        style = {"color": colour, "marker": "o^sDvP"[number % 6], "label": speeds}
        offset = 0.05 * (number - (num_clocks - 1) / 2)  # so that intervals do not hide one another
        by_delay = own.groupby("delay")
        for column, dashes in dashes_of.items():
            mean = by_delay[column].mean()
            left.plot(np.log2(mean.index + 1) + offset, np.exp(mean), color=colour, dashes=dashes, linewidth=1.0)
        _points(left, by_delay[RATIO_TO_LOWEST].agg(_ratio), offset, style)
        _points(middle, by_delay["gap"].agg(t_interval), offset, style)
    left.axhline(1.0, color=plots.MUTED, linewidth=1)
    middle.axhline(0.0, color=plots.MUTED, linewidth=1)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    _, top = left.get_ylim()
    left.set_ylim(top=top**2)  # room for the legend, the axis being one of logarithms
    handles, _ = left.get_legend_handles_labels()
    for column, dashes in dashes_of.items():
        label = f"{RATIOS[column]} of the way"
        handles.append(Line2D([], [], color=plots.MUTED, dashes=dashes, linewidth=1.0, label=label))
    left.legend(handles=handles, title="speeds (virtual clock)", fontsize=7, title_fontsize=7, frameon=False, ncols=2)


def _draw_losses(axes: Axes, dose: Dose) -> None:
    """The final losses of both algorithms at equal samples."""
    synchronous, delayed, *_ = sns.color_palette("colorblind")
    for algorithm, colour, label in (
        (DELAYED, delayed, "delayed by exactly tau"),
        (REFERENCE, synchronous, "synchronous, tau + 1 workers"),
    ):
        runs = dose.runs[dose.runs["algorithm"] == algorithm]
        losses = runs.groupby("delay")["loss"].agg(t_interval)
        _points(axes, losses, 0.0, {"color": colour, "marker": "o", "label": label})
    axes.margins(y=0.25)  # room for the legend, which would lie on intervals
    axes.legend(fontsize=8, frameon=False, loc="upper center")


def _points(axes: Axes, intervals: Series, offset: float, style: Mapping[str, Any]) -> None:
    """Means against the delay, with their intervals where there are any."""
    estimates = np.array([interval.estimate for interval in intervals])
    low = np.array([interval.low for interval in intervals])
    high = np.array([interval.high for interval in intervals])
    bar_lengths = np.nan_to_num([estimates - low, high - estimates])
    axes.errorbar(np.log2(intervals.index + 1) + offset, estimates, yerr=bar_lengths, capsize=3, **style)
