"""Dose and response: what a delay of exactly tau updates costs, and up to which tau asynchrony still pays in seconds.

Read from the folder of a sweep in which an algorithm `delayed` (rule fixed_delay) and a reference `sync` run on the
same numbers of workers N = tau + 1, both on the virtual clock. Both are put on the clocks of declared speeds: update v
of `delayed` happens with arrival v of N asynchronous workers that never wait, round v of `sync` with arrival N v of
synchronous ones. Two responses, neither of them censored:

    log(T_delayed / T_sync),   T the seconds to the lowest loss that both runs of a seed reach
    L_delayed(t) - L_sync(t),  t the seconds at which the shorter of the two budgets ends

A target fixed beforehand would be out of reach for large delays, and a time that was cut off at the end of a shorter
budget would look like an advantage; how many runs reached the registered target is shown beside.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.delays import CrossingPoint, crossing_point
from analysis.intervals import Interval, t_interval
from analysis.load import load_runs
from analysis.scaling import Slope, slopes
from analysis.time_to_target import crossing, loss_at
from asyncsgd.errors import UsageError

DELAYED, REFERENCE = "delayed", "sync"
Arrivals = Callable[[str, str, int, int, int], list[float]]
"""(speeds, rule, num_workers, seed, number) -> seconds of the first `number` arrivals."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: updates done, and the loss."""

    versions: tuple[int, ...]
    losses: tuple[float, ...]
    num_gradients: int
    """That arrived in the whole run."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One delay on one clock: the ratio of times to the target, and how many runs reached it."""

    delay: int
    ratio: Interval
    """Geometric mean over seeds of T_delayed / T_sync, with its 95 % t interval on logs."""
    log_ratios: tuple[float, ...]
    gap: Interval
    """Mean over seeds of L_delayed - L_sync in nats, at equal seconds."""
    gaps: tuple[float, ...]
    delayed_reached: int
    """Of the target that was registered before the runs."""
    reference_reached: int


@dataclasses.dataclass(frozen=True)
class OnClock:
    """All delays under one declared distribution of times."""

    speeds: str
    responses: tuple[Response, ...]
    point: CrossingPoint
    """Where the ratio of times crosses 1."""
    gap_point: CrossingPoint
    """Where the difference of losses at equal seconds crosses 0."""


class Dose:
    """The runs of a dose-response sweep, by algorithm, delay and seed.

    Args:
        curves: algorithm -> delay -> seed -> its curve; all delays have the same seeds.
        targets: delay -> the target loss, found before the runs.
        chosen: algorithm -> delay -> the tuned learning rate and whether it is at an edge of its grid.
    """

    def __init__(
        self,
        curves: Mapping[str, Mapping[int, Mapping[int, Curve]]],
        targets: Mapping[int, float],
        chosen: Mapping[str, Mapping[int, tuple[float, bool]]],
        target_from: str,
    ) -> None:
        self.curves, self.targets, self.chosen, self.target_from = curves, targets, chosen, target_from
        self.delays = sorted(curves[DELAYED])
        self.seeds = sorted(curves[DELAYED][self.delays[0]])
        self.clocks: list[OnClock] = []

    def put_on_clock(self, speeds: str, arrivals: Arrivals) -> None:
        """Add the responses under one declared distribution of speeds."""
        responses = []
        for delay in self.delays:
            if delay == 0:
                continue  # one worker is one process in both, and the ratio 1 by construction
            logs, gaps = [], []
            for seed in self.seeds:
                (ours, our_losses), (theirs, their_losses) = (
                    self._on_clock(algorithm, delay, seed, speeds, arrivals) for algorithm in (DELAYED, REFERENCE)
                )
                target = max(min(our_losses), min(their_losses))
                ratio = crossing(ours, our_losses, target).at / crossing(theirs, their_losses, target).at
                logs.append(math.log(ratio))
                end = min(ours[-1], theirs[-1])
                gaps.append(loss_at(ours, our_losses, end) - loss_at(theirs, their_losses, end))
            inner = t_interval(logs)
            ratio_interval = Interval(
                math.exp(inner.estimate),
                None if inner.low is None else math.exp(inner.low),
                None if inner.high is None else math.exp(inner.high),
                inner.level,
                inner.n,
            )
            reached = {
                algorithm: sum(
                    min(curve.losses) <= self.targets[delay] for curve in self.curves[algorithm][delay].values()
                )
                for algorithm in (DELAYED, REFERENCE)
            }
            responses.append(
                Response(
                    delay,
                    ratio_interval,
                    tuple(logs),
                    t_interval(gaps),
                    tuple(gaps),
                    reached[DELAYED],
                    reached[REFERENCE],
                )
            )
        delays = [response.delay for response in responses]
        point, gap_point = (
            crossing_point(delays, numpy.array(table).T)
            for table in ([response.log_ratios for response in responses], [response.gaps for response in responses])
        )
        self.clocks.append(OnClock(speeds, tuple(responses), point, gap_point))

    def _on_clock(
        self, algorithm: str, delay: int, seed: int, speeds: str, arrivals: Arrivals
    ) -> tuple[list[float], tuple[float, ...]]:
        """Seconds and losses of the evaluations of one run; the first one, before any update, is at 0 seconds."""
        rule, step = ("asynchronous", 1) if algorithm == DELAYED else ("synchronous", delay + 1)
        curve = self.curves[algorithm][delay][seed]
        # the last round of a budget that is no multiple of the workers has fewer gradients
        needed = [min(version * step, curve.num_gradients) for version in curve.versions]
        clock = [0.0, *arrivals(speeds, rule, delay + 1, seed, needed[-1])]
        return [clock[number] for number in needed], curve.losses

    def final_losses(self, algorithm: str) -> numpy.ndarray:
        """The last loss of every run, (seeds, delays), at equal samples."""
        return numpy.array(
            [[self.curves[algorithm][delay][seed].losses[-1] for delay in self.delays] for seed in self.seeds]
        )

    def trend(self) -> Slope:
        """How much the final loss rises per doubling of tau + 1, at equal samples; Page's test of its direction."""
        return slopes([math.log2(delay + 1) for delay in self.delays], self.final_losses(DELAYED))

    def lines(self) -> list[str]:
        """The table and the answer, as text."""
        seeds = f"{len(self.seeds)} seeds"
        lines = [
            f"final loss at equal samples, mean [95 % t interval], {seeds}; learning rate tuned per delay",
            f"{'tau':>4}  {'delayed':28} {'rate':>8}   {'sync, tau + 1 workers':28} {'rate':>8}   target",
        ]
        losses = {algorithm: self.final_losses(algorithm) for algorithm in (DELAYED, REFERENCE)}
        for k, delay in enumerate(self.delays):
            cells = []
            for algorithm in (DELAYED, REFERENCE):
                rate, edge = self.chosen[algorithm][delay]
                cells.append(f"{_shown(t_interval(losses[algorithm][:, k]), 4):28} {rate:>7g}{'*' if edge else ' '}")
            target = f"{self.targets[delay]:.4f}" if delay in self.targets else "-"
            lines.append(f"{delay:>4}  {cells[0]}   {cells[1]}   {target}")
        lines.append("* at the edge of its grid: a better one may lie outside")
        slope = self.trend()
        trend = "" if slope.page_p is None else f" (Page's trend test p {slope.page_p:.2g})"
        lines.append(f"each doubling of tau + 1 adds {_shown(slope.mean, 4)} nats at equal samples{trend}")
        for clock in self.clocks:
            lines.append("")
            lines.append(f"speeds {clock.speeds} (virtual clock), {seeds}; below 1, and below 0, asynchronous is ahead")
            lines.append(
                f"{'tau':>4}  {'seconds to the same loss, ratio':32} {'loss at equal seconds, nats':30} target reached"
            )
            for response in clock.responses:
                lines.append(
                    f"{response.delay:>4}  {_shown(response.ratio, 3):32} {_shown(response.gap, 4):30} "
                    f"{response.delayed_reached}/{len(self.seeds)} and {response.reference_reached}/{len(self.seeds)}"
                )
            lines.append(f"      seconds: {answer(clock.point)}{self._caveat()}")
            lines.append(f"      losses:  {answer(clock.gap_point)}{self._caveat()}")
        return lines

    def _caveat(self) -> str:
        """What belongs to every answer: how many learning rates were at the edge of what was tried."""
        edges = [edge for of_delay in self.chosen.values() for _, edge in of_delay.values()]
        return f"; {sum(edges)} of {len(edges)} learning rates lie at the edge of their grid" if any(edges) else ""


def answer(point: CrossingPoint) -> str:
    """The crossing point in a sentence."""
    if point.at is None:
        return f"no crossing: {point.reason}"
    note = f" ({point.reason})" if point.reason else ""
    if "one seed" in point.reason:
        return f"the advantage is lost at tau = {point.at:.2g}{note}"
    low = "below the first delay" if point.low is None else f"{point.low:.2g}"
    high = "beyond the last delay" if point.high is None else f"{point.high:.2g}"
    return f"the advantage is lost at tau = {point.at:.2g}, 95 % interval {low} to {high}{note}"


def _shown(interval: Interval, digits: int) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.estimate:.{digits}f}"
    return f"{interval.estimate:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def read_dose(folder: Path) -> Dose:
    """Read a finished dose-response sweep.

    Raises:
        UsageError: if it is none, or a run of it has no finite loss: a diverged run has no time, and the experiment
            says nothing at its delay.
    """
    import yaml

    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        registered = yaml.safe_load((folder / "analysis.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: not a finished sweep ({error}); run experiments/dose_response.py") from error
    arms = {arm["name"]: arm for arm in plan["arms"]}
    if {arm["algorithm"] for arm in arms.values()} != {DELAYED, REFERENCE}:
        raise UsageError(f"{folder}: the algorithms of a dose-response sweep are called {DELAYED} and {REFERENCE}")
    if len({arm["num_workers"] for arm in arms.values()} - {1}) < 2:
        raise UsageError(f"{folder}: a crossing needs two delays above 0; put more numbers of workers into the config")
    runs = {run.name: run for run in load_runs(folder / "test")[0] if ".before-" not in run.name}
    curves: dict[str, dict[int, dict[int, Curve]]] = {DELAYED: {}, REFERENCE: {}}
    for planned in plan["runs"]:
        if planned["stage"] != "test":
            continue
        arm, run = arms[planned["arm"]], runs[planned["folder"].removeprefix("test/")]
        table = run.evaluations
        if not run.done or table["loss"].isna().any():
            raise UsageError(
                f"{planned['folder']} is {run.status} and has no loss at every evaluation; take its learning rates out "
                f"of the config and choose another --out"
            )
        gradients = int(table["total_samples"].iloc[-1]) // run.summary["batch_size"]
        curve = Curve(tuple(map(int, table["version"])), tuple(map(float, table["loss"])), gradients)
        curves[arm["algorithm"]].setdefault(arm["num_workers"] - 1, {})[planned["seed"]] = curve
    chosen = {
        algorithm: {arm["num_workers"] - 1: _chosen(arm) for arm in arms.values() if arm["algorithm"] == algorithm}
        for algorithm in (DELAYED, REFERENCE)
    }
    # One worker is one process under either name, and is run once.
    if 0 in curves[DELAYED]:
        curves[REFERENCE].setdefault(0, curves[DELAYED][0])
        chosen[REFERENCE].setdefault(0, chosen[DELAYED][0])
    if set(curves[DELAYED]) != set(curves[REFERENCE]):
        raise UsageError(f"{folder}: {DELAYED} and {REFERENCE} must have the same numbers of workers")
    targets = {arms[name]["num_workers"] - 1: loss for name, loss in registered["targets"].items()}
    return Dose(curves, targets, chosen, registered["target_from"])


def _chosen(arm: Mapping[str, Any]) -> tuple[float, bool]:
    if not all("learning_rate" in trial["settings"] for trial in arm["trials"]) or arm["chosen"] is None:
        raise UsageError(
            f"{arm['name']}: a dose-response experiment tunes learning_rate at every delay; list its values"
        )
    rates = [trial["settings"]["learning_rate"] for trial in arm["trials"]]
    rate = arm["chosen"]["learning_rate"]
    return rate, rate in (min(rates), max(rates))


def save(dose: Dose, folder: Path) -> list[Path]:
    """Write dose_response.csv, .png and .svg into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "dose_response.csv"
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["speeds", "delay", "seed", "log_ratio", "gap", "target_loss", "delayed_loss", "sync_loss"])
        delayed, sync = dose.final_losses(DELAYED), dose.final_losses(REFERENCE)
        for clock in dose.clocks:
            for response in clock.responses:
                k = dose.delays.index(response.delay)
                for s, seed in enumerate(dose.seeds):
                    cells = [response.log_ratios[s], response.gaps[s], dose.targets[response.delay]]
                    cells += [delayed[s, k], sync[s, k]]
                    writer.writerow([clock.speeds, response.delay, seed, *cells])
    figure = _draw(dose)
    paths = [table]
    for extension in ("png", "svg"):
        paths.append(folder / f"dose_response.{extension}")
        figure.savefig(paths[-1], dpi=200)
    return paths


def _draw(dose: Dose) -> Figure:
    figure = Figure(figsize=(13.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    colours = seaborn.color_palette("colorblind")
    for number, clock in enumerate(dose.clocks):
        # a little apart, so that intervals do not hide one another
        x = [
            math.log2(response.delay + 1) + 0.05 * (number - (len(dose.clocks) - 1) / 2) for response in clock.responses
        ]
        for axes, intervals in (
            (left, [response.ratio for response in clock.responses]),
            (middle, [response.gap for response in clock.responses]),
        ):
            axes.errorbar(
                x,
                [interval.estimate for interval in intervals],
                yerr=_arms(intervals),
                color=colours[(number + 2) % len(colours)],
                marker="o^sDvP"[number % 6],
                capsize=3,
                label=clock.speeds,
            )
    left.axhline(1.0, color="0.3", linewidth=1)
    left.set_yscale("log")
    for axis_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        axis_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    left.set_ylabel("seconds to the same loss, delayed / sync")
    left.legend(title="speeds (virtual clock)", fontsize=8, title_fontsize=8, frameon=False)
    middle.axhline(0.0, color="0.3", linewidth=1)
    middle.set_ylabel("loss at equal seconds, delayed - sync (nats)")
    for algorithm, colour, label in (
        (DELAYED, colours[1], "delayed by exactly tau"),
        (REFERENCE, colours[0], "synchronous, tau + 1 workers"),
    ):
        intervals = [t_interval(column) for column in dose.final_losses(algorithm).T]
        right.errorbar(
            [math.log2(delay + 1) for delay in dose.delays],
            [interval.estimate for interval in intervals],
            yerr=_arms(intervals),
            color=colour,
            marker="o",
            capsize=3,
            label=label,
        )
    right.set_ylabel("evaluation loss at equal samples (nats)")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, middle, right):
        axes.set_xticks([math.log2(delay + 1) for delay in dose.delays], [str(delay) for delay in dose.delays])
        axes.set_xlabel("delay tau (updates)")
        axes.grid(alpha=0.25)
    figure.supxlabel(
        f"means over {len(dose.seeds)} seeds with 95 % t intervals; learning rate tuned per delay; at delay 0 both are "
        "one process",
        fontsize=7,
        color="0.3",
    )
    return figure


def _arms(intervals: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above the estimates, as matplotlib takes them; 0 where there is no interval."""
    return [
        [i.estimate - (i.estimate if i.low is None else i.low) for i in intervals],
        [(i.estimate if i.high is None else i.high) - i.estimate for i in intervals],
    ]
