"""Heterogeneous data: who finds the optimum of everybody's data when fast workers answer more often?

Source: Maranjyan, Richtarik: Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
Heterogeneity, ICLR 2026, and its published scripts (MNIST over n = 100 workers, equal shares, Dirichlet alpha 0.1; base
times a permutation of 1..100 seconds, plus |N(0, .)|; 40,000 seconds; the squared gradient norm of the global loss).

Part 1, exact: three scalar quadratics A = (1, 2, 1/2), b = (1, -2, 3), workers of 1, 2.3 and 5.1 seconds, no noise, a
learning rate near 0. The optimum of the mean is 2 / 3.5 = .5714; asynchronous SGD weighs each worker by its rate and
ends at sum b_i / tau_i over sum A_i / tau_i = .3653. Beside: a sketch, at another learning rate.

Part 2, deviation: softmax regression on hashed words of labelled docstrings (or of a table with columns text and label)
in place of MNIST. n = 32, 8,000 seconds, one permutation of 1..32 for all seeds. Learning rates: for every method the
one of 8 with the smallest final squared norm on a seed that is used for nothing else. Malenia (Tyurin, Richtarik 2023)
as in the published scripts: once every worker has brought a gradient at the current point, the others are told to stop.

``--quick``: part 1 at learning rate .01 for 6,000 seconds; part 2 with 12 workers, 1,500 seconds, 2,000 texts, 2 seeds
instead of 5, 4 learning rates a factor 6.25 apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy
import pandas
import torch
from torch import Tensor

from asyncsgd import rules
from asyncsgd.core.limits import Limits
from asyncsgd.data.files import TABLES, Source
from asyncsgd.data.pydocs import load_pydocs
from asyncsgd.errors import UsageError
from asyncsgd.rules.contract import Arrival, Reply, Start, View
from asyncsgd.run.run import cache_folder
from asyncsgd.simulation.instance import Array, Indices, Instance
from asyncsgd.simulation.problems import Heterogeneous, LogisticData, dirichlet_shares, hashed_bag_of_words
from asyncsgd.simulation.speeds import BLOCK, Sampler, Streams
from reproduction import Arm, Fixed, Flags, Position, in_words, interval, main, of, picture, run, starred, tidy, write


class Brought(NamedTuple):
    """The gradients at the current point that one worker brought."""

    total: Tensor
    dispatches: list[int]


Collected = dict[int, Brought]
"""By worker."""


@dataclasses.dataclass(frozen=True)
class Malenia(rules.Rule):
    """x <- x - eta (1/n) sum_i (mean of worker i's gradients at x), once everybody has brought one; all restart."""

    def init(self, like: Tensor) -> Collected:
        return {}

    def arrive(self, state: Collected, arrival: Arrival, view: View) -> Reply:
        worker = arrival.worker
        if worker not in state:
            state[worker] = Brought(torch.zeros_like(arrival.gradient), [])
        state[worker].total.add_(arrival.gradient)
        state[worker].dispatches.append(arrival.dispatch)
        if len(state) < len(view.workers):
            return Reply(start=(Start(worker),))
        direction = torch.zeros_like(arrival.gradient)
        uses: tuple[int, ...] = ()
        for worker in sorted(state):
            total, dispatches = state[worker]
            direction.add_(total, alpha=1.0 / (len(dispatches) * len(state)))
            uses += tuple(dispatches)
        state.clear()
        abandon = tuple([flight.dispatch for flight in view.in_flight.values()])
        start = tuple(map(Start, view.workers))
        return Reply(direction, uses=uses, abandon=abandon, start=start)


def permuted_times(num_workers: int, seed: int) -> Sampler:
    """Worker i takes b_i + |N(0, b_i)| seconds, b a fixed permutation of 1..n, of (seed, worker, draw) alone."""
    purpose = 15 << 32
    length = 2 * BLOCK
    base = 1.0 + Streams(0, purpose).at().permutation(num_workers)
    streams = Streams(seed, purpose)

    def block(worker: int, number: int) -> Array:
        pair, half = divmod(number, 2)
        noise = streams.at(worker, pair, part=1).standard_normal(length)
        noise = noise[half * BLOCK :][:BLOCK]
        deviation = math.sqrt(base[worker])
        return base[worker] + deviation * numpy.abs(noise)

    return Sampler(num_workers, block)


TIMES = (1.0, 2.3, 5.1)
CURVATURES = (1.0, 2.0, 0.5)
SLOPES = (1.0, -2.0, 3.0)
TRUTH = sum(SLOPES) / sum(CURVATURES)
SLOPES_PER_SECOND = numpy.divide(SLOPES, TIMES)
CURVATURES_PER_SECOND = numpy.divide(CURVATURES, TIMES)
WEIGHTED = SLOPES_PER_SECOND.sum() / CURVATURES_PER_SECOND.sum()
"""Where asynchronous SGD ends as the learning rate goes to 0."""


class Point(Position, Heterogeneous):
    """The three quadratics."""


ENDINGS: dict[rules.Rule, str] = {  # of part 1, and where the project's sketch of it ended
    rules.Asynchronous(): ".367 (formula .3653)",
    rules.Synchronous(): ".5714",
    rules.KSync(quorum=3): ".5714",
    rules.KAsync(quorum=3): ".5714",
    rules.Ringleader(): ".5714",
    rules.IA2SGD(): ".5714",
    Malenia(): "-",
    rules.Rescaled(): ".5735",
    rules.SSP(slack=2): ".568",
    rules.EASGD(alpha=0.3, num_local_steps=1): ".419",
    rules.FedBuff(buffer=3, num_local_steps=1): ".377",
    rules.DelayAdaptive(concurrency=3): ".237",
    rules.Ringmaster(threshold=3): ".20-.24",
    rules.Ringmaster(threshold=3, stops=True): ".20-.24",
    rules.Rennala(batch=3): "0.0",
}


def ending(rule: rules.Rule, learning_rate: float, seconds: float) -> float:
    """The mean of x over the last tenth of `seconds`; a whole cycle of the three workers is 117.3 seconds."""
    budget = Limits(seconds=seconds)
    arm = Arm("", rule, learning_rate, Point().on, Fixed(TIMES).on, 3, budget, 4000)
    looks = arm.simulated(0).evaluations
    last_tenth = [look.loss for look in looks if look.train_seconds > 0.9 * seconds]
    return float(numpy.mean(last_tenth))


NUM_FEATURES = 256
BATCH = 8
PENALTY = 1e-3
ALPHA = 0.1


class Texts(NamedTuple):
    features: Array
    """Hashed words, a row for each text."""
    labels: Indices
    """0 to C-1."""
    source: str
    """The data's name."""


@functools.cache
def load_texts(data: str, limit: int) -> Texts:
    """At most `limit` of the texts, drawn once and for all."""
    if data == "pydocs":
        documents = load_pydocs(cache_folder(None))
        rows = list(zip(documents.texts, documents.labels or (), strict=True))
        source = "pydocs"
    else:
        file = Source(data, kinds=TABLES, takes=("pydocs",))
        columns = {"text": "--data", "label": "--data"}
        rows = [row for _, row in file.rows("train", columns)]
        source = file.name
    generator = numpy.random.Generator(numpy.random.Philox(key=0))
    order = generator.permutation(len(rows))
    drawn = [rows[row] for row in order[:limit]]
    texts = [str(text) for text, _ in drawn]
    names = [str(name) for _, name in drawn]
    classes, labels = numpy.unique(names, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{source} has one label only, {classes[0]!r}; give texts of two classes or more")
    features = hashed_bag_of_words(texts, NUM_FEATURES)
    return Texts(features, labels.astype(numpy.int64), source)


class GradientNorm(LogisticData):
    """The regression of `LogisticData`; an evaluation gives ||grad f||^2 of the global objective, not f - f*."""

    def loss(self, x: Array) -> float:
        gradient = self.exact_gradient(x)
        return float(gradient @ gradient)


def regression(data: str, limit: int, num_workers: int, seed: int) -> Instance:
    texts = load_texts(data, limit)
    # The shares are part of the problem: the same for all seeds, as the optimum must be.
    shares = dirichlet_shares(texts.labels, num_workers, ALPHA, seed=0)
    return GradientNorm(texts.features, texts.labels, shares, BATCH, PENALTY, seed)


METHODS: dict[str, tuple[rules.Rule, str]] = {  # and the learning rate of the published scripts, on MNIST
    "Ringleader": (rules.Ringleader(), ".05"),
    "IA2SGD": (rules.IA2SGD(), ".01"),
    "Malenia": (Malenia(), ".7"),
    "Rescaled ASGD": (rules.Rescaled(), "-"),
    "synchronous": (rules.Synchronous(), "-"),
    "asynchronous": (rules.Asynchronous(), "-"),
}
TUNING_SEED = 1000
RATES = [0.02 * 2.5**k for k in range(8)]
THRESHOLDS = (1e-3, 1e-4)


def final(looks: pandas.DataFrame) -> float:
    """The mean of the last fifth of a run's squared norms; infinite for a run that diverged."""
    losses = looks.loss.to_numpy()
    first = len(losses) * 4 // 5
    return float(numpy.mean(losses[first:]))


def reached(looks: pandas.DataFrame, threshold: float) -> float:
    """The first evaluation from which on the squared norm was below `threshold`; infinite if there is none."""
    below = looks.loss < threshold
    stays_below = below[::-1].cummin()[::-1]
    if not stays_below.any():
        return math.inf
    return float(looks.seconds[stays_below].min())


def row_of(name: str, curves: pandas.DataFrame, rate: float, rates: list[float]) -> dict[str, object]:
    """A method's row of the table, from the runs at its tuned learning rate."""
    runs = [looks for _, looks in curves[curves.arm == name].groupby("seed")]
    finals = [final(looks) for looks in runs]
    diverged = sum(map(math.isinf, finals))
    if diverged:
        final_norm = f"diverged in {diverged} of {len(runs)}"
    else:
        geometric = interval(numpy.log(finals)).mapped(math.exp)
        final_norm = f"{geometric:.3g}"
    _, published_rate = METHODS[name]
    updates = [looks.updates.max() for looks in runs]
    row: dict[str, object] = {
        "method": name,
        "learning rate": starred(rate, rates),
        "published, MNIST": published_rate,
        "updates": f"{numpy.mean(updates):.0f}",
        "final squared gradient norm [95 %]": final_norm,
    }
    for threshold in THRESHOLDS:
        seconds = [reached(looks, threshold) for looks in runs]
        median = float(numpy.median(seconds))
        row[f"s to below {threshold:g} for good"] = f"{median:.0f}" if math.isfinite(median) else "-"
    return row


def three_quadratics(folder: Path, learning_rate: float, seconds: float) -> None:
    """Part 1."""
    rows = []
    for rule, sketch in ENDINGS.items():
        x = ending(rule, learning_rate, seconds)
        row = {"rule": str(rule), "ends at": f"{x:.4f}", "minus optimum": f"{x - TRUTH:+.4f}", "sketch": sketch}
        rows.append(row)
    times = ", ".join(map(str, TIMES))
    note = (
        f"Optimum {TRUTH:.4f}; frequency-weighted point of asynchronous SGD {WEIGHTED:.4f}. Worker times "
        f"{times} s, no noise, learning rate {learning_rate:g}, {seconds:,.0f} virtual seconds, "
        "mean of x over the last tenth. The sketch's learning rate and parameters are not recorded."
    )
    write(folder, "three_quadratics", rows, note)


class Setup(NamedTuple):
    """Of part 2."""

    num_texts: int
    num_workers: int
    seconds: float
    evaluations: int
    num_seeds: int
    rates: list[float]


FULL = Setup(8000, 32, 8000.0, 80, 5, RATES)
QUICK = Setup(2000, 12, 1500.0, 30, 2, RATES[::2])


def make(flags: Flags) -> None:
    setup = QUICK if flags.quick else FULL
    limit = setup.num_texts
    texts = load_texts(flags.data, limit)  # before anything runs: it may be refused
    if flags.quick:
        three_quadratics(flags.out, 1e-2, 6_000.0)
    else:
        three_quadratics(flags.out, 2e-3, 30_000.0)

    workers = setup.num_workers
    rates = setup.rates
    num_seeds = flags.seeds or setup.num_seeds
    problem = functools.partial(regression, flags.data, limit)
    end = Limits(seconds=setup.seconds)
    looks = setup.evaluations
    arms = {}
    for name, (rule, _) in METHODS.items():
        for rate in rates:
            arms[name, rate] = Arm(name, rule, rate, problem, permuted_times, workers, end, looks, f"{rate}")
    trials = run([*arms.values()], [TUNING_SEED], flags.jobs)
    finals: dict[str, dict[float, float]] = {name: {} for name in METHODS}
    for (name, rate), arm in arms.items():
        finals[name][rate] = final(of(trials, arm))
    tuned = {name: min(losses, key=losses.__getitem__) for name, losses in finals.items()}
    tuned_arms = [arms[item] for item in tuned.items()]
    curves = run(tuned_arms, range(num_seeds), flags.jobs)
    classes = numpy.bincount(texts.labels)
    sizes = "/".join(map(str, classes))
    note = (
        f"{texts.source}: {len(texts.labels):,} texts, {len(classes)} classes ({sizes}), "
        f"{NUM_FEATURES} hashed columns; {workers} workers, Dirichlet({ALPHA:g}), batch {BATCH}, penalty {PENALTY:g}; "
        f"{in_words(num_seeds, 'seed')}. "
        f"Squared norm of the gradient of the global loss, mean of the last fifth of {setup.seconds:g} virtual "
        "seconds, geometric mean over seeds, 95 % interval by Student's t on its logarithm; median seconds, - where "
        f"half of the seeds or more did not get there. Learning rates tuned on another seed, {len(rates)} per method "
        f"({rates[0]:.3g} to {rates[-1]:.3g}); * at the edge. The paper gives curves, no numbers, to compare with."
    )
    rows = [row_of(name, curves, rate, rates) for name, rate in tuned.items()]
    write(flags.out, "ringleader", rows, note)

    logs = numpy.log10(curves.loss)
    drawn = [curves.assign(x=curves.seconds, y=logs, panel="at the best learning rate")]
    for name, losses in finals.items():
        log_losses = {math.log10(rate): math.log10(loss) for rate, loss in losses.items()}
        drawn.append(tidy("tuning", name, "", [log_losses]))
    axes = {
        "": {"xlabel": "virtual seconds", "ylabel": "log10 of the squared norm, global gradient"},
        "tuning": {"xlabel": "log10 of the learning rate"},
    }
    picture(flags.out / "ringleader.png", pandas.concat(drawn), note, axes, x="x", y="y", style="arm")


if __name__ == "__main__":
    data = {"default": "pydocs", "help": "pydocs, or a .csv or .parquet with columns text and label"}
    main(make, "ringleader", __doc__, flags={"--data": data})
