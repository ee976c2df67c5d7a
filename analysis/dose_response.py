"""Dose and response: what a delay of exactly tau updates costs, and up to which tau asynchrony still pays in seconds.

Read from the folder of a sweep in which an algorithm `delayed` (rule fixed_delay) and a reference `sync` run on the
same numbers of workers N = tau + 1, both on the virtual clock. The response is log(T_delayed / T_sync), T the seconds
to the target of the reference with as many workers, on the clocks of declared speeds: update v of `delayed` happens
with arrival v of N asynchronous workers that never wait, round v of `sync` with arrival N v of synchronous ones.
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

from analysis.delays import CrossingPoint, crossing_point
from analysis.intervals import Interval, t_interval
from analysis.load import load_runs
from analysis.scaling import Slope, slopes
from analysis.time_to_target import crossing
from asyncsgd.errors import UsageError

DELAYED, REFERENCE = "delayed", "sync"
Arrivals = Callable[[str, str, int, int, int], list[float]]
"""(speeds, rule, num_workers, seed, number) -> seconds of the first `number` arrivals."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: updates done, and the loss."""

    versions: tuple[int, ...]
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Response:
    """One delay on one clock: the ratio of times to the target, and how many runs reached it."""

    delay: int
    ratio: Interval
    """Geometric mean over seeds of T_delayed / T_sync, with its 95 % t interval on logs."""
    log_ratios: tuple[float, ...]
    delayed_reached: int
    reference_reached: int


@dataclasses.dataclass(frozen=True)
class OnClock:
    """All delays under one declared distribution of times."""

    speeds: str
    responses: tuple[Response, ...]
    point: CrossingPoint


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
        """Add the times of one declared distribution of speeds.

        A run that never reaches the target counts with the end of its budget, which is less than its time; the number
        that did is kept beside it.
        """
        responses = []
        for delay in self.delays:
            if delay == 0:
                continue  # one worker is one process in both, and the ratio 1 by construction
            logs, reached = [], {DELAYED: 0, REFERENCE: 0}
            for seed in self.seeds:
                times = {}
                for algorithm, rule, step in ((DELAYED, "asynchronous", 1), (REFERENCE, "synchronous", delay + 1)):
                    curve = self.curves[algorithm][delay][seed]
                    needed = [version * step for version in curve.versions]
                    clock = [0.0, *arrivals(speeds, rule, delay + 1, seed, needed[-1])]
                    seconds = [clock[number] for number in needed]
                    at = crossing(seconds, curve.losses, self.targets[delay]).at
                    reached[algorithm] += math.isfinite(at)
                    times[algorithm] = min(at, seconds[-1])
                logs.append(math.log(times[DELAYED] / times[REFERENCE]))
            inner = t_interval(logs)
            ratio = Interval(
                math.exp(inner.estimate),
                None if inner.low is None else math.exp(inner.low),
                None if inner.high is None else math.exp(inner.high),
                inner.level,
                inner.n,
            )
            responses.append(Response(delay, ratio, tuple(logs), reached[DELAYED], reached[REFERENCE]))
        table = numpy.array([response.log_ratios for response in responses]).T
        point = crossing_point([response.delay for response in responses], table)
        self.clocks.append(OnClock(speeds, tuple(responses), point))

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
        lines.append(
            f"each doubling of tau + 1 adds {_shown(slope.mean, 4)} nats at equal samples "
            f"(Page's trend test p {slope.page_p:.2g})"
        )
        for clock in self.clocks:
            lines.append("")
            lines.append(
                f"seconds to the target, delayed / sync, speeds {clock.speeds} (virtual clock), {seeds}; below 1: "
                f"asynchronous is sooner"
            )
            for response in clock.responses:
                lines.append(
                    f"{response.delay:>4}  {_shown(response.ratio, 3):28} reached {response.delayed_reached}/"
                    f"{len(self.seeds)} and {response.reference_reached}/{len(self.seeds)}"
                )
            lines.append(f"      {answer(clock)}")
        return lines


def answer(clock: OnClock) -> str:
    """The crossing point in a sentence."""
    point = clock.point
    if point.at is None:
        return f"no crossing: {point.reason}"
    low = "below the first delay" if point.low is None else f"{point.low:.2g}"
    high = "beyond the last delay" if point.high is None else f"{point.high:.2g}"
    note = f" ({point.reason})" if point.reason else ""
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
        curve = Curve(tuple(map(int, table["version"])), tuple(map(float, table["loss"])))
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
    rates = [trial["settings"]["learning_rate"] for trial in arm["trials"]]
    rate = arm["chosen"]["learning_rate"]
    return rate, rate in (min(rates), max(rates))


def save(dose: Dose, folder: Path) -> list[Path]:
    """Write dose_response.csv, .png and .svg into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "dose_response.csv"
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["speeds", "delay", "seed", "log_ratio", "target_loss", "delayed_loss", "sync_loss"])
        delayed, sync = dose.final_losses(DELAYED), dose.final_losses(REFERENCE)
        for clock in dose.clocks:
            for response in clock.responses:
                k = dose.delays.index(response.delay)
                for s, seed in enumerate(dose.seeds):
                    cells = [response.log_ratios[s], dose.targets[response.delay], delayed[s, k], sync[s, k]]
                    writer.writerow([clock.speeds, response.delay, seed, *cells])
    figure = _draw(dose)
    paths = [table]
    for extension in ("png", "svg"):
        paths.append(folder / f"dose_response.{extension}")
        figure.savefig(paths[-1], dpi=200)
    return paths


def _draw(dose: Dose) -> Figure:
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colours = seaborn.color_palette("colorblind")
    for number, clock in enumerate(dose.clocks):
        # a little apart, so that intervals do not hide one another
        x = [
            math.log2(response.delay + 1) + 0.05 * (number - (len(dose.clocks) - 1) / 2) for response in clock.responses
        ]
        ratios = [response.ratio for response in clock.responses]
        left.errorbar(
            x,
            [ratio.estimate for ratio in ratios],
            yerr=_arms(ratios),
            color=colours[number + 2],
            marker="o^sDvP"[number % 6],
            capsize=3,
            label=clock.speeds,
        )
    left.axhline(1.0, color="0.3", linewidth=1)
    left.set_yscale("log")
    left.set_ylabel("seconds to the target, delayed / sync")
    left.legend(title="speeds (virtual clock)", fontsize=8, title_fontsize=8, frameon=False)
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
    for axes in (left, right):
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
