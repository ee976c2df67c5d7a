"""Dose and response: what a delay of exactly tau updates costs, and up to which tau asynchrony still pays in seconds.

Read from the folder of a sweep in which an algorithm `delayed` (rule fixed_delay) and a reference `sync` run on the
same numbers of workers N = tau + 1, both on the virtual clock. Both are put on the clocks of declared speeds: update v
of `delayed` happens with arrival v of N asynchronous workers that never wait, round v of `sync` with arrival N v of
synchronous ones. Two responses, neither of them censored:

    log(T_delayed / T_sync),   T the seconds to a share of the improvement down to the lowest loss that both runs reach
    L_delayed(t) - L_sync(t),  t the seconds at which the shorter of the two budgets ends

A target fixed beforehand would be out of reach for large delays, and a time that was cut off at the end of a shorter
budget would look like an advantage; how many runs reached the registered target is shown beside. Which share of the
improvement is taken moves the ratio, so all of `SHARES` are shown, and the crossing at each of them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pandas
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis import curves as loss_curves
from analysis.crossing import CrossingPoint, crossing_point
from analysis.curves import loss_at, lowest_held, on_common_looks, reached
from analysis.read import read
from analysis.stats import Interval, t_interval
from asyncsgd.errors import UsageError
from asyncsgd.settings.yaml_reader import read_yaml

DELAYED, REFERENCE = "delayed", "sync"
SHARES = (0.5, 0.8, 0.9, 1.0)
"""Of the improvement from the first evaluation to the lowest loss that both runs of a seed reach."""
Timed = tuple[Sequence[float], Sequence[float]]
"""Seconds and losses of the evaluations of one run."""
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
    """One delay on one clock: the ratios of times to the same losses, and how many runs reached the target."""

    delay: int
    ratios: tuple[Interval, ...]
    """For each of `SHARES`: geometric mean over seeds of T_delayed / T_sync, with its 95 % t interval on logs."""
    log_ratios: tuple[tuple[float, ...], ...]
    """For each of `SHARES`: one per seed."""
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
    points: tuple[CrossingPoint, ...]
    """For each of `SHARES`: where the ratio of times crosses 1."""
    gap_point: CrossingPoint
    """Where the difference of losses at equal seconds crosses 0."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Pairs of real processes: seconds of this machine, which share no row or picture with those of a virtual clock."""

    responses: tuple[Response, ...]
    num_oversubscribed: int
    """Runs with more threads than cores: their seconds are no comparison of speeds."""


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
        self.shared = {delay for delay in self.delays if curves[REFERENCE][delay] is curves[DELAYED][delay]}
        """Delays at which one run stands for both algorithms: 0, where both are one process."""
        self.seeds = sorted(curves[DELAYED][self.delays[0]])
        self.clocks: list[OnClock] = []
        self.measured: Measured | None = None

    def put_on_clock(self, speeds: str, arrivals: Arrivals) -> None:
        """Add the responses under one declared distribution of speeds."""
        responses = []
        for delay in self.delays:
            if delay == 0:
                continue  # one worker is one process in both, and the ratio 1 by construction
            pairs = {
                seed: (
                    self._on_clock(DELAYED, delay, seed, speeds, arrivals),
                    self._on_clock(REFERENCE, delay, seed, speeds, arrivals),
                )
                for seed in self.seeds
            }
            responses.append(_response(delay, pairs, self.targets[delay]))
        delays = [response.delay for response in responses]
        points = tuple(
            crossing_point(delays, numpy.array([response.log_ratios[k] for response in responses]).T)
            for k in range(len(SHARES))
        )
        gap_point = crossing_point(delays, numpy.array([response.gaps for response in responses]).T)
        self.clocks.append(OnClock(speeds, tuple(responses), points, gap_point))

    def _on_clock(self, algorithm: str, delay: int, seed: int, speeds: str, arrivals: Arrivals) -> Timed:
        """Seconds and losses of the evaluations of one run; the first one, before any update, is at 0 seconds."""
        rule, step = ("asynchronous", 1) if algorithm == DELAYED else ("synchronous", delay + 1)
        curve = self.curves[algorithm][delay][seed]
        # the last round of a budget that is no multiple of the workers has fewer gradients
        needed = [min(version * step, curve.num_gradients) for version in curve.versions]
        clock = [0.0, *arrivals(speeds, rule, delay + 1, seed, needed[-1])]
        return [clock[number] for number in needed], curve.losses

    def put_measured(self, folder: Path) -> None:
        """Add the pairs of real processes from the folder that ``experiments/dose_response.py --measured`` leaves.

        Raises:
            UsageError: if it is none, or a run of it has no finite loss.
        """
        timed: dict[tuple[str, int], dict[int, Timed]] = {}
        oversubscribed = 0
        for arm, seed, run, curve in _test_runs(folder, _read_json(folder / "plan.json")):
            if run.clock == "virtual":
                raise UsageError(f"{run.path} ran on the virtual clock; nothing was measured there")
            oversubscribed += run.oversubscribed is True
            seconds, losses = (tuple(curve[column]) for column in ("seconds", "loss"))
            timed.setdefault((arm["algorithm"], arm["num_workers"] - 1), {})[seed] = (seconds, losses)
        responses = []
        for delay in sorted({delay for _, delay in timed}):
            ours, theirs = (timed.get((algorithm, delay), {}) for algorithm in (DELAYED, REFERENCE))
            if set(ours) != set(theirs) or delay not in self.targets:
                raise UsageError(f"{folder}: delay {delay} does not have the same seeds in {DELAYED} and {REFERENCE}")
            pairs = {seed: (ours[seed], theirs[seed]) for seed in sorted(ours)}
            responses.append(_response(delay, pairs, self.targets[delay]))
        self.measured = Measured(tuple(responses), oversubscribed)

    def final_losses(self, algorithm: str) -> numpy.ndarray:
        """The last loss of every run, (seeds, delays), at equal samples."""
        return numpy.array(
            [[self.curves[algorithm][delay][seed].losses[-1] for delay in self.delays] for seed in self.seeds]
        )

    def slope(self) -> Interval:
        """How much the final loss rises per doubling of tau + 1, at equal samples: mean of the seeds' slopes."""
        doublings = [math.log2(delay + 1) for delay in self.delays]
        return t_interval(numpy.polyfit(doublings, self.final_losses(DELAYED).T, 1)[0])

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
                if algorithm == REFERENCE and delay in self.shared:
                    cells.append(f"{'the same run':28} {'':8}")
                    continue
                rate, edge = self.chosen[algorithm][delay]
                loss = format(t_interval(losses[algorithm][:, k]), ".4f")
                cells.append(f"{loss:28} {rate:>7g}{'*' if edge else ' '}")
            target = f"{self.targets[delay]:.4f}" if delay in self.targets else "-"
            lines.append(f"{delay:>4}  {cells[0]}   {cells[1]}   {target}")
        lines.append("* at the edge of its grid: a better one may lie outside")
        lines.append(f"each doubling of tau + 1 adds {self.slope():.4f} nats at equal samples")
        for clock in self.clocks:
            lines.append("")
            lines.append(f"speeds {clock.speeds} (virtual clock), {seeds}; below 1, and below 0, asynchronous is ahead")
            lines += _table(clock.responses, len(self.seeds))
            for share, point in zip(SHARES, clock.points, strict=True):
                lines.append(f"      seconds to {100 * share:3g} %: {answer(point)}")
            lines.append(f"      loss at equal seconds: {answer(clock.gap_point)}")
        lines += [] if self.measured is None else ["", *_measured_lines(self.measured)]
        lines += [caveat] if (caveat := self._caveat()) else []
        return lines

    def _caveat(self) -> str:
        """What belongs to every answer: how many learning rates were at the edge of what was tried."""
        edges = [
            edge
            for algorithm, of_delay in self.chosen.items()
            for delay, (_, edge) in of_delay.items()
            if not (algorithm == REFERENCE and delay in self.shared)
        ]
        if not any(edges):
            return ""
        return f"learning rates at the edge of their grid (a better one may lie outside): {sum(edges)} of {len(edges)}"


def compare(ours: Timed, theirs: Timed) -> tuple[tuple[float, ...], float]:
    """log(our seconds / their seconds) to each of `SHARES`, and our loss less theirs when the shorter budget ends.

    Raises:
        ValueError: if one of them never gets below its first loss: there is nothing to reach.

    >>> ours, theirs = ([0.0, 4.0], [9.0, 7.0]), ([0.0, 2.0], [9.0, 7.0])
    >>> logs, gap = compare(ours, theirs)
    >>> [round(math.exp(log), 6) for log in logs], gap
    ([2.0, 2.0, 2.0, 2.0], 1.0)
    """
    (our_seconds, our_losses), (their_seconds, their_losses) = ours, theirs
    whole = [_curve(timed) for timed in (ours, theirs)]
    curves = on_common_looks(whole)
    # both start from the same model; on real processes the two first losses may differ by rounding
    first, lowest = min(our_losses[0], their_losses[0]), max(map(lowest_held, curves))
    if lowest >= first:
        raise ValueError("one of the two runs never gets below its first loss, so that there is no time to compare")
    logs = []
    for target in (first - share * (first - lowest) for share in SHARES):
        target = max(target, lowest)  # the last one may miss it by rounding
        times = [reached(curve, target) for curve in curves]
        logs.append(math.log(times[0] / times[1]))
    end = min(our_seconds[-1], their_seconds[-1])
    return tuple(logs), loss_at(whole[0], end) - loss_at(whole[1], end)


def _curve(timed: Timed) -> loss_curves.Curve:
    """The last loss at each position."""
    last = dict(zip(*timed, strict=True))
    return numpy.array(list(last)), numpy.array(list(last.values()))


def _measured_lines(measured: Measured) -> list[str]:
    """Table and sentences of the pairs of real processes."""
    seeds = measured.responses[0].gap.n
    lines = [
        f"MEASURED: real processes on this machine, no declared speeds, {seeds} seeds, learning rates tuned on the "
        "virtual clock",
        *_table(measured.responses, seeds),
    ]
    for response in measured.responses:
        ratio = response.ratios[-1]
        word = "no difference between the two can be told"
        if ratio.low > 1:
            word = "asynchronous training is slower"
        elif ratio.high < 1:
            word = "asynchronous training is sooner"
        lines.append(
            f"      tau = {response.delay}, {response.delay + 1} processes: {ratio:.2f} times the seconds of "
            f"synchronous training to the lowest loss that both reach: {word}"
        )
    if measured.num_oversubscribed:
        lines.append(
            f"      {measured.num_oversubscribed} of these runs had more threads than cores: no comparison of speeds"
        )
    return lines


def _response(delay: int, pairs: Mapping[int, tuple[Timed, Timed]], target: float) -> Response:
    """One delay from the runs of its seeds, (delayed, sync)."""
    logs, gaps = [], []
    for seed, (ours, theirs) in pairs.items():
        try:
            of_shares, gap = compare(ours, theirs)
        except ValueError as error:
            raise UsageError(f"delay {delay}, seed {seed}: {error}") from error
        logs.append(of_shares)
        gaps.append(gap)
    by_share = tuple(zip(*logs, strict=True))
    ours_reached, theirs_reached = (
        sum(lowest_held(_curve(pair[k])) <= target for pair in pairs.values()) for k in (0, 1)
    )
    ratios = tuple(t_interval(of_share).mapped(math.exp) for of_share in by_share)
    return Response(delay, ratios, by_share, t_interval(gaps), tuple(gaps), ours_reached, theirs_reached)


def _table(responses: Sequence[Response], num_seeds: int) -> list[str]:
    """One line per delay."""
    shares = " ".join(f"{f'to {100 * share:g} %':20}" for share in SHARES)
    lines = [
        f"{'':4}  seconds to a share of the improvement that both reach, delayed / sync",
        f"{'tau':>4}  {shares} {'loss at equal seconds, nats':28} target reached",
    ]
    for response in responses:
        ratios = " ".join(f"{f'{ratio:.3f}':20}" for ratio in response.ratios)
        reached = f"{response.delayed_reached}/{num_seeds} and {response.reference_reached}/{num_seeds}"
        lines.append(f"{response.delay:>4}  {ratios} {f'{response.gap:.4f}':28} {reached}")
    return lines


def answer(point: CrossingPoint) -> str:
    """The crossing point in a sentence."""
    low = "below the first delay" if point.low is None else f"{point.low:.2g}"
    high = "beyond the last delay" if point.high is None else f"{point.high:.2g}"
    if point.at is None:
        known = point.low is not None or point.high is not None
        return f"no crossing: {point.reason}" + f"; not excluded by the 95 % interval: {low} to {high}" * known
    if len(point.crossings) > 1:
        ends = f"between tau = {min(point.crossings):.2g} and {max(point.crossings):.2g}"
        several = f"no single crossing (the mean crosses {len(point.crossings)} times, {ends})"
        return several if "one seed" in point.reason else f"{several}, 95 % interval {low} to {high}"
    note = f" ({point.reason})" if point.reason else ""
    if "one seed" in point.reason:
        return f"the advantage is lost at tau = {point.at:.2g}{note}"
    return f"the advantage is lost at tau = {point.at:.2g}, 95 % interval {low} to {high}{note}"


def read_dose(folder: Path) -> Dose:
    """Read a finished dose-response sweep.

    Raises:
        UsageError: if it is none, or a run of it has no finite loss: a diverged run has no time, and the experiment
            says nothing at its delay.
    """
    plan = _read_json(folder / "plan.json")
    try:
        registered = read_yaml((folder / "analysis.yaml").read_text(encoding="utf-8"), "analysis.yaml")
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: not a finished sweep ({error}); run experiments/dose_response.py") from error
    arms = {arm["name"]: arm for arm in plan["arms"]}
    if {arm["algorithm"] for arm in arms.values()} != {DELAYED, REFERENCE}:
        raise UsageError(f"{folder}: the algorithms of a dose-response sweep are called {DELAYED} and {REFERENCE}")
    if len({arm["num_workers"] for arm in arms.values()} - {1}) < 2:
        raise UsageError(f"{folder}: a crossing needs two delays above 0; put more numbers of workers into the config")
    curves: dict[str, dict[int, dict[int, Curve]]] = {DELAYED: {}, REFERENCE: {}}
    for arm, seed, run, table in _test_runs(folder, plan):
        gradients = int(table["samples"].iloc[-1] // run.batch_size)
        curve = Curve(tuple(map(int, table["updates"])), tuple(map(float, table["loss"])), gradients)
        curves[arm["algorithm"]].setdefault(arm["num_workers"] - 1, {})[seed] = curve
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.parent}: not a finished sweep ({error}); run experiments/dose_response.py") from error
    return content


def _test_runs(folder: Path, plan: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int, Any, pandas.DataFrame]]:
    """(arm, seed, run, curve) of every test run of the plan; all of them must have ended with a loss at every
    evaluation.
    """
    arms = {arm["name"]: arm for arm in plan["arms"]}
    runs, curves, _ = read(folder)
    for run in runs[runs["stage"] == "test"].itertuples():
        curve = curves[curves["run"] == run.run]
        if run.status != "DONE" or curve["loss"].isna().any():
            raise UsageError(
                f"{run.run} is {run.status} and has no loss at every evaluation; take its learning rates out "
                f"of the config and choose another --out"
            )
        yield arms[run.arm], int(run.seed), run, curve


def _chosen(arm: Mapping[str, Any]) -> tuple[float, bool]:
    if not all("learning_rate" in trial["settings"] for trial in arm["trials"]) or arm["chosen"] is None:
        raise UsageError(
            f"{arm['name']}: a dose-response experiment tunes learning_rate at every delay; list its values"
        )
    rates = [trial["settings"]["learning_rate"] for trial in arm["trials"]]
    rate = arm["chosen"]["learning_rate"]
    return rate, rate in (min(rates), max(rates))


def save(dose: Dose, folder: Path) -> list[Path]:
    """Write dose_response.csv, .png and .svg, and measured.csv where pairs were measured, into `folder`; return their
    paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "dose_response.csv"
    ratios = [f"log_ratio_at_{100 * share:g}_percent" for share in SHARES]
    lines: list[list[Any]] = [
        ["speeds", "delay", "seed", *ratios, "gap", "target_loss", "delayed_loss", "sync_loss"],
    ]
    delayed, sync = dose.final_losses(DELAYED), dose.final_losses(REFERENCE)
    for clock in dose.clocks:
        for response in clock.responses:
            k = dose.delays.index(response.delay)
            for s, seed in enumerate(dose.seeds):
                cells = [*(logs[s] for logs in response.log_ratios), response.gaps[s]]
                cells += [dose.targets[response.delay], delayed[s, k], sync[s, k]]
                lines.append([clock.speeds, response.delay, seed, *cells])
    _write(table, lines)
    paths = [table]
    if dose.measured is not None:  # its seconds are no virtual ones: a file of its own
        paths.append(folder / "measured.csv")
        of_pairs = [
            (response.delay, *of_seed)
            for response in dose.measured.responses
            for of_seed in zip(*response.log_ratios, response.gaps, strict=True)
        ]
        _write(paths[-1], [("delay", *ratios, "gap"), *of_pairs])
    figure = _draw(dose)
    for extension in ("png", "svg"):
        paths.append(folder / f"dose_response.{extension}")
        figure.savefig(paths[-1], dpi=200)
    return paths


def _draw(dose: Dose) -> Figure:
    figure = Figure(figsize=(13.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    colours = seaborn.color_palette("colorblind")
    lighter = [(1, 3), (1, 1.5), (3, 1)]  # of the shares below 1, which have no intervals in the picture
    for number, clock in enumerate(dose.clocks):
        # a little apart, so that intervals do not hide one another
        x = [
            math.log2(response.delay + 1) + 0.05 * (number - (len(dose.clocks) - 1) / 2) for response in clock.responses
        ]
        for k, dashes in enumerate(lighter):
            estimates = [response.ratios[k].estimate for response in clock.responses]
            left.plot(x, estimates, color=colours[(number + 2) % len(colours)], dashes=dashes, linewidth=1.0)
        for axes, intervals in (
            (left, [response.ratios[-1] for response in clock.responses]),
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
    left.set_ylim(top=left.get_ylim()[1] ** 2)  # room for the legend, the axis being one of logarithms
    handles = left.get_legend_handles_labels()[0]
    handles += [
        Line2D([], [], color="0.3", dashes=dashes, linewidth=1.0, label=f"to {100 * share:g} % of the way")
        for share, dashes in zip(SHARES[:-1], lighter, strict=True)
    ]
    left.legend(handles=handles, title="speeds (virtual clock)", fontsize=7, title_fontsize=7, frameon=False, ncols=2)
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
        "one process; the same loss: the lowest that both reach, or a share of the improvement on the way there",
        fontsize=7,
        color="0.3",
    )
    return figure


def _write(path: Path, lines: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)


def _arms(intervals: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above the estimates, as matplotlib takes them; 0 where there is no interval."""
    return [
        [numpy.nan_to_num(interval.estimate - interval.low) for interval in intervals],
        [numpy.nan_to_num(interval.high - interval.estimate) for interval in intervals],
    ]
