"""Heterogeneous data: who finds the optimum of everybody's data when fast workers answer more often?

    python experiments/published/ringleader.py --quick

Source: Maranjyan, Richtarik: Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
Heterogeneity, ICLR 2026, and its published scripts (MNIST over n = 100 workers, equal shares, Dirichlet alpha 0.1; base
times a permutation of 1..100 seconds, plus |N(0, .)|; 40,000 seconds; the squared gradient norm of the global loss).

Part 1, exact: three scalar quadratics A = (1, 2, 1/2), b = (1, -2, 3), workers of 1, 2.3 and 5.1 seconds, no noise, a
learning rate near 0. The optimum of the mean is 2 / 3.5 = .5714. Asynchronous SGD weighs each worker by its rate
p_i ~ 1 / tau_i and ends at sum p_i b_i / sum p_i A_i = .3653. Where each method ends, as the mean of x over the last
tenth of the run, beside the list of the project's design notes (numbers from a sketch, at another learning rate).

Part 2, real text: softmax regression on hashed words (256 columns), batch 8, penalty 0.001. n = 32 workers have equal
shares whose mixture of classes is Dirichlet(0.1). Worker times are a permutation of 1..32 plus |N(0, base)| seconds;
the permutation is fixed, the noise is the seed's. A run has 8,000 seconds. The texts are docstrings of Python, numpy,
scipy and pandas, and the label is the package (``--data pydocs``, kept in the user's cache folder). Or they come from a
.csv or .parquet file with columns text and label. Learning rates: for every method the one, of 8 a factor 2.5 apart,
with the smallest final squared gradient norm on a seed that is used for nothing else. Malenia is the synchronous method
of that theory (Tyurin, Richtarik 2023). It is here as in the published scripts: it waits until every worker has brought
one gradient at the current point, and the others are told to stop.

``--quick``: part 1 at learning rate .01 for 6,000 seconds; part 2 with 12 workers, 1,500 seconds, 2,000 texts, 2 seeds
instead of 5, 4 learning rates a factor 6.25 apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import pandas
from torch import Tensor

from asyncsgd.data.pydocs import load_pydocs
from asyncsgd.errors import UsageError
from asyncsgd.rules import (
    EASGD,
    IA2SGD,
    SSP,
    Asynchronous,
    DelayAdaptive,
    FedBuff,
    KAsync,
    KSync,
    Rennala,
    Rescaled,
    Ringleader,
    Ringmaster,
    Rule,
    Synchronous,
)
from asyncsgd.rules.base import Arrival, Reply, Start, View
from asyncsgd.runtime.base import Budget
from asyncsgd.settings.run import cache_folder
from asyncsgd.simulation.instance import Array, Indices
from asyncsgd.simulation.logistic import LogisticData, dirichlet_shares, hashed_bag_of_words
from asyncsgd.simulation.problems import Heterogeneous
from asyncsgd.simulation.sampler import BLOCK, Sampler, Streams
from asyncsgd.simulation.simulate import Simulation, simulate
from reproduction import COLOURS, each, interval, picture, progress, run_script, script_parser, write_table
from watched import Watched, fixed_times


@dataclasses.dataclass
class Collected:
    """Of the current point: each worker's sum of gradients and their dispatches; and where the mean is built."""

    totals: dict[int, Tensor]
    dispatches: dict[int, list[int]]
    direction: Tensor


@dataclasses.dataclass(frozen=True)
class Malenia(Rule):
    """x <- x - eta (1/n) sum_i (mean of worker i's gradients at x), once everybody has brought one; all restart."""

    name: ClassVar[str] = "malenia"
    summary: ClassVar[str] = "heterogeneous data, synchronous: wait for one gradient of everybody (Tyurin 2023)"

    def init(self, like: Tensor) -> Collected:
        return Collected({}, {}, like.new_zeros(like.shape))

    def arrive(self, state: Collected, arrival: Arrival, view: View) -> Reply:
        worker = arrival.worker
        if worker in state.totals:
            state.totals[worker].add_(arrival.gradient)
        else:
            state.totals[worker] = arrival.gradient.clone()
        state.dispatches.setdefault(worker, []).append(arrival.dispatch)
        if len(state.totals) < len(view.workers):
            return Reply(start=(Start(worker),))
        state.direction.zero_()
        for worker, total in sorted(state.totals.items()):
            state.direction.add_(total, alpha=1.0 / (len(state.dispatches[worker]) * len(state.totals)))
        uses = tuple([dispatch for _, dispatches in sorted(state.dispatches.items()) for dispatch in dispatches])
        state.totals.clear()
        state.dispatches.clear()
        abandon = tuple([flight.dispatch for flight in view.in_flight.values()])
        return Reply(state.direction, uses=uses, abandon=abandon, start=tuple(map(Start, view.workers)))


def permuted_times(num_workers: int, seed: int) -> Sampler:
    """Worker i takes b_i + |N(0, b_i)| seconds, b a fixed permutation of 1..n, of (seed, worker, draw) alone."""
    purpose, length = 15 << 32, 2 * BLOCK
    base, streams = 1.0 + Streams(0, purpose).at().permutation(num_workers), Streams(seed, purpose)

    def block(worker: int, number: int) -> Array:
        noise = streams.at(worker, number // 2, part=1).standard_normal(length)[number % 2 * BLOCK :][:BLOCK]
        return base[worker] + math.sqrt(base[worker]) * numpy.abs(noise)

    return Sampler(num_workers, block)


TIMES = (1.0, 2.3, 5.1)
TRUTH = 2.0 / 3.5


def frequency_weighted(times: Sequence[float] = TIMES) -> float:
    """Where asynchronous SGD ends as the learning rate goes to 0: (sum A_i / tau_i)^-1 sum b_i / tau_i.

    >>> round(frequency_weighted(), 4)
    0.3653
    """
    curvatures, slopes = (1.0, 2.0, 0.5), (1.0, -2.0, 3.0)
    slope = sum(b / tau for b, tau in zip(slopes, times, strict=True))
    return slope / sum(a / tau for a, tau in zip(curvatures, times, strict=True))


class Position(Watched):
    """The three quadratics of `Heterogeneous`; an evaluation gives x itself instead of f(x) - f*."""

    def __init__(self) -> None:
        super().__init__(Heterogeneous().on(len(TIMES), seed=0))

    def loss(self, x: Array) -> float:
        return float(x[0])


class Ending(NamedTuple):
    """A rule of part 1, and where the project's sketch of it ended."""

    rule: Rule
    sketch: str


ENDINGS = (
    Ending(Asynchronous(), ".367 (formula .3653)"),
    Ending(Synchronous(), ".5714"),
    Ending(KSync(quorum=3), ".5714"),
    Ending(KAsync(quorum=3), ".5714"),
    Ending(Ringleader(), ".5714"),
    Ending(IA2SGD(), ".5714"),
    Ending(Malenia(), "-"),
    Ending(Rescaled(), ".5735"),
    Ending(SSP(slack=2), ".568"),
    Ending(EASGD(alpha=0.3, num_local_steps=1), ".419"),
    Ending(FedBuff(buffer=3, num_local_steps=1), ".377"),
    Ending(DelayAdaptive(concurrency=3), ".237"),
    Ending(Ringmaster(threshold=3), ".20-.24"),
    Ending(Ringmaster(threshold=3, stops=True), ".20-.24"),
    Ending(Rennala(batch=3), "0.0"),
)


def ending(rule: Rule, learning_rate: float, seconds: float) -> float:
    """The mean of x over the last tenth of `seconds`; a whole cycle of the three workers is 117.3 seconds."""
    done = simulate(
        rule,
        Position(),
        fixed_times(TIMES),
        num_workers=3,
        learning_rate=learning_rate,
        budget=Budget(seconds=seconds),
        evaluations=4000,
    )
    last = [point.loss for point in done.evaluations if point.train_seconds > 0.9 * seconds]
    return float(numpy.mean(last))


def small_table(out: Path, learning_rate: float, seconds: float, ends: list[float]) -> str:
    rows = [
        [str(rule), f"{end:.4f}", f"{end - TRUTH:+.4f}", sketch]
        for (rule, sketch), end in zip(ENDINGS, ends, strict=True)
    ]
    note = (
        f"Optimum {TRUTH:.4f}; frequency-weighted point of asynchronous SGD {frequency_weighted():.4f}. Worker times "
        f"{', '.join(map(str, TIMES))} s, no noise, learning rate {learning_rate:g}, {seconds:,.0f} virtual seconds, "
        "mean of x over the last tenth. The sketch's learning rate and parameters are not recorded."
    )
    return write_table(out, "three_quadratics", ("rule", "ends at", "minus optimum", "sketch"), rows, note)


class Texts(NamedTuple):
    features: Array
    labels: Indices
    source: str


@functools.cache
def load_texts(data: str, limit: int, num_features: int) -> Texts:
    """At most `limit` of the texts, drawn once and for all, as hashed words; labels become 0..C-1."""
    if data == "pydocs":
        documents = load_pydocs(cache_folder(None))
        assert documents.labels is not None
        texts, names, source = list(documents.texts), list(documents.labels), "pydocs"
    else:
        texts, names = read_labelled(Path(data))
        source = Path(data).parent.name + "/" + Path(data).name
    kept = numpy.random.Generator(numpy.random.Philox(key=0)).permutation(len(texts))[:limit]
    classes, labels = numpy.unique([names[row] for row in kept], return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{source} has one label only, {classes[0]!r}; give texts of two classes or more")
    return Texts(hashed_bag_of_words([texts[row] for row in kept], num_features), labels.astype(numpy.int64), source)


def read_labelled(path: Path) -> tuple[list[str], list[str]]:
    """The columns text and label of a .csv or .parquet file.

    Raises:
        UsageError: if there is no such file, it cannot be read or lacks a column.
    """
    readers = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}
    if path.suffix not in readers or not path.is_file():
        raise UsageError(f"--data {path}: there is no such .csv or .parquet file; type pydocs or the path of one")
    try:
        table = readers[path.suffix](path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {path} cannot be read; check that it is a whole {path.suffix} file") from error
    missing = [column for column in ("text", "label") if column not in table.columns]
    if missing:
        raise UsageError(f"--data {path} has no column {missing[0]!r}; it needs columns text and label")
    return table["text"].astype(str).tolist(), table["label"].astype(str).tolist()


class GradientNorm(LogisticData):
    """The regression of `LogisticData`; an evaluation gives ||grad f||^2 of the global objective, not f - f*."""

    def loss(self, x: Array) -> float:
        return self.squared_gradient_norm(x)


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Part 2 but for the method, the learning rate and the seed."""

    data: str
    num_texts: int
    num_workers: int
    seconds: float
    evaluations: int

    NUM_FEATURES: ClassVar[int] = 256
    BATCH: ClassVar[int] = 8
    PENALTY: ClassVar[float] = 1e-3
    ALPHA: ClassVar[float] = 0.1

    def simulate(self, rule: Rule, learning_rate: float, seed: int) -> Simulation:
        texts = load_texts(self.data, self.num_texts, self.NUM_FEATURES)
        # The shares are part of the problem: the same for all seeds, as the optimum must be.
        shares = dirichlet_shares(texts.labels, self.num_workers, self.ALPHA, seed=0)
        return simulate(
            rule,
            GradientNorm(texts.features, texts.labels, shares, self.BATCH, self.PENALTY, seed),
            permuted_times(self.num_workers, seed),
            num_workers=self.num_workers,
            learning_rate=learning_rate,
            budget=Budget(seconds=self.seconds),
            evaluations=self.evaluations,
        )


class Arm(NamedTuple):
    rule: Rule
    label: str
    published: str
    """The learning rate of the published scripts, on MNIST."""


ARMS = (
    Arm(Ringleader(), "Ringleader", ".05"),
    Arm(IA2SGD(), "IA2SGD", ".01"),
    Arm(Malenia(), "Malenia", ".7"),
    Arm(Rescaled(), "Rescaled ASGD", "-"),
    Arm(Synchronous(), "synchronous", "-"),
    Arm(Asynchronous(), "asynchronous", "-"),
)
TUNING_SEED, FIRST_SEED = 1000, 0
LEAST_RATE, RATE_FACTOR, NUM_RATES = 0.02, 2.5, 8
THRESHOLDS = (1e-3, 1e-4)


class Task(NamedTuple):
    set_up: SetUp
    arm: int
    learning_rate: float
    seed: int


class Curve(NamedTuple):
    seconds: list[float]
    squared_norms: list[float]
    num_updates: int

    @property
    def final(self) -> float:
        """The mean of the last fifth; infinite for a run that diverged."""
        last = self.squared_norms[len(self.squared_norms) * 4 // 5 :]
        return float(numpy.mean(last)) if numpy.isfinite(self.squared_norms[-1]) else math.inf

    def reached(self, threshold: float) -> float:
        """The first evaluation from which on the squared norm was below `threshold`; infinite if there is none."""
        above = [k for k, value in enumerate(self.squared_norms) if not value < threshold]
        first = above[-1] + 1 if above else 0
        return self.seconds[first] if first < len(self.seconds) else math.inf


def run_one(task: Task) -> Curve:
    done = task.set_up.simulate(ARMS[task.arm].rule, task.learning_rate, task.seed)
    points = done.evaluations
    norms = [point.loss for point in points]
    if done.result.status != "DONE":
        norms[-1] = math.inf
    return Curve([point.train_seconds for point in points], norms, done.version)


def run(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    num_seeds = arguments.seeds or (2 if quick else 5)
    set_up = SetUp(arguments.data, *((2000, 12, 1500.0, 30) if quick else (8000, 32, 8000.0, 80)))
    texts = load_texts(set_up.data, set_up.num_texts, set_up.NUM_FEATURES)  # before anything runs: it may be refused
    small = (1e-2, 6_000.0) if quick else (2e-3, 30_000.0)  # learning rate, seconds
    ends = []
    for rule, _ in ENDINGS:
        ends.append(ending(rule, *small))
        progress(f"three quadratics, {rule}: {ends[-1]:.4f}")
    print(small_table(arguments.out, *small, ends))

    rates = [LEAST_RATE * RATE_FACTOR**k for k in range(0, NUM_RATES, 2 if quick else 1)]
    tasks = [Task(set_up, arm, rate, TUNING_SEED) for arm in range(len(ARMS)) for rate in rates]
    trials: list[list[float]] = [[] for _ in ARMS]
    for task, curve in zip(tasks, each(run_one, tasks, arguments.jobs), strict=True):
        trials[task.arm].append(curve.final)
        if len(trials[task.arm]) == len(rates):
            best = rates[int(numpy.argmin(trials[task.arm]))]
            progress(f"tuned {ARMS[task.arm].label}: learning rate {best:.3g}")
    tuned = [rates[int(numpy.argmin(finals))] for finals in trials]
    tasks = [
        Task(set_up, arm, tuned[arm], seed)
        for arm in range(len(ARMS))
        for seed in range(FIRST_SEED, FIRST_SEED + num_seeds)
    ]
    curves: list[list[Curve]] = [[] for _ in ARMS]
    for task, curve in zip(tasks, each(run_one, tasks, arguments.jobs), strict=True):
        curves[task.arm].append(curve)
        if len(curves[task.arm]) == num_seeds:
            progress(f"{ARMS[task.arm].label}: squared norm {geometric(curves[task.arm])} over the last fifth")

    classes = numpy.bincount(texts.labels)
    setting = (
        f"{texts.source}: {len(texts.labels):,} texts, {len(classes)} classes ({'/'.join(map(str, classes))}), "
        f"{set_up.NUM_FEATURES} hashed columns; {set_up.num_workers} workers, Dirichlet({set_up.ALPHA:g}), batch "
        f"{set_up.BATCH}, penalty {set_up.PENALTY:g}; {num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    print(real_table(arguments.out, setting, rates, tuned, curves))
    draw(arguments.out, setting + (" (--quick)" if quick else ""), ends, rates, trials, tuned, curves)
    for name in ("three_quadratics.md", "three_quadratics.csv", "ringleader.md", "ringleader.csv", "ringleader.png"):
        print(arguments.out / name)


def geometric(curves: list[Curve]) -> str:
    """The geometric mean of the final squared norms with its 95 % interval."""
    finals = [curve.final for curve in curves]
    if not all(map(math.isfinite, finals)):
        return f"diverged in {sum(map(math.isinf, finals))} of {len(finals)}"
    return f"{interval([math.log(final) for final in finals]).mapped(math.exp):.3g}"


def median_seconds(curves: list[Curve], threshold: float) -> str:
    """The median over seeds, a run that did not get there counting as infinite."""
    median = float(numpy.median([curve.reached(threshold) for curve in curves]))
    return f"{median:.0f}" if math.isfinite(median) else "-"


def real_table(out: Path, setting: str, rates: list[float], tuned: list[float], curves: list[list[Curve]]) -> str:
    rows = []
    for arm, rate, runs in zip(ARMS, tuned, curves, strict=True):
        edge = "*" if rate in (rates[0], rates[-1]) else ""
        updates = f"{numpy.mean([curve.num_updates for curve in runs]):.0f}"
        reached = [median_seconds(runs, threshold) for threshold in THRESHOLDS]
        rows.append([arm.label, f"{rate:.3g}{edge}", arm.published, updates, geometric(runs), *reached])
    headings = ["method", "learning rate", "published, MNIST", "updates", "final squared gradient norm [95 %]"]
    headings += [f"s to below {threshold:g} for good" for threshold in THRESHOLDS]
    note = (
        f"{setting}. Squared norm of the gradient of the global loss, mean of the last fifth of "
        f"{curves[0][0].seconds[-1]:g} virtual seconds, geometric mean over seeds, 95 % interval by Student's t on its "
        "logarithm; median seconds, - where "
        f"half of the seeds or more did not get there. Learning rates tuned on another seed, {len(rates)} per method "
        f"({rates[0]:.3g} to {rates[-1]:.3g}); * at the edge. The paper gives curves, no numbers, to compare with."
    )
    return write_table(out, "ringleader", headings, rows, note)


def draw(
    out: Path,
    setting: str,
    ends: list[float],
    rates: list[float],
    trials: list[list[float]],
    tuned: list[float],
    curves: list[list[Curve]],
) -> None:
    small_print = "\n".join(
        [
            *textwrap.wrap(setting, 200),
            "Middle: geometric mean, band: 95 % interval over seeds by Student's t on the logarithm (from 3 seeds on), "
            "each method at its best learning rate (right: one tuning seed, mean of the last fifth; missing: inf).",
        ]
    )
    title = "Data of its own for every worker: who finds the optimum of all?"
    markers = ("o", "s", "^", "D", "v", "X")
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "fontsize": 8, "frameon": False}
    with picture(out / "ringleader.png", 3, title=title, small_print=small_print) as (exact, real, tuning):
        exact.scatter(ends, range(len(ends)), color=COLOURS[0], zorder=3)
        exact.set_yticks(
            range(len(ends)), [rule.name + " with stops" * getattr(rule, "stops", False) for rule, _ in ENDINGS]
        )
        exact.invert_yaxis()
        exact.axvline(TRUTH, color="black", label=f"optimum {TRUTH:.4f}")
        weighted = frequency_weighted()
        exact.axvline(weighted, color="0.4", linestyle="--", label=f"weighted by speed {weighted:.4f}")
        exact.set(title="three quadratics, no noise", xlabel="x at the end", xlim=(-0.05, 0.65))
        exact.legend(ncols=2, **below)
        for place, (arm, rate, runs) in enumerate(zip(ARMS, tuned, curves, strict=True)):
            colour, marker = COLOURS[place], markers[place]
            seconds = numpy.array(runs[0].seconds)
            columns = zip(*[numpy.log(curve.squared_norms) for curve in runs], strict=True)
            logs = [interval(values) for values in columns]
            middle = numpy.exp([each_of.estimate for each_of in logs])
            label = f"{arm.label} ({rate:.2g})"
            real.plot(seconds, middle, color=colour, marker=marker, markevery=(2 * place, 12), ms=5, label=label)
            if len(runs) > 2:  # the interval of two seeds is wider than the picture
                low, high = ([getattr(each_of, end) for each_of in logs] for end in ("low", "high"))
                real.fill_between(seconds, numpy.exp(low), numpy.exp(high), color=colour, alpha=0.15, linewidth=0)
            finite = [(x, y) for x, y in zip(rates, trials[place], strict=True) if math.isfinite(y)]
            tuning.plot(*zip(*finite, strict=True), color=colour, marker=marker, ms=5)
        real.set(title="real text", yscale="log", xlabel="virtual seconds", ylabel="squared norm, global gradient")
        real.legend(ncols=3, **below)
        tuning.set(title="tuning", xscale="log", yscale="log", xlabel="learning rate", ylabel="final squared norm")


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__, "ringleader")
    parser.add_argument("--data", default="pydocs", help="pydocs, or a .csv or .parquet with columns text and label")
    return run_script(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
