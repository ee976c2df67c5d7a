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

import numpy
import pandas
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
from reproduction import Arm, Fixed, Flags, Position, interval, main, of, picture, run, tidy, write

Collected = dict[int, tuple[Tensor, list[int]]]
"""Of the current point: each worker's sum of gradients and their dispatches."""


@dataclasses.dataclass(frozen=True)
class Malenia(rules.Rule):
    """x <- x - eta (1/n) sum_i (mean of worker i's gradients at x), once everybody has brought one; all restart."""

    def init(self, like: Tensor) -> Collected:
        return {}

    def arrive(self, state: Collected, arrival: Arrival, view: View) -> Reply:
        total, dispatches = state.setdefault(arrival.worker, (arrival.gradient.new_zeros(arrival.gradient.shape), []))
        total.add_(arrival.gradient)
        dispatches.append(arrival.dispatch)
        if len(state) < len(view.workers):
            return Reply(start=(Start(arrival.worker),))
        direction = arrival.gradient.new_zeros(arrival.gradient.shape)
        uses = list[int]()
        for _, (total, dispatches) in sorted(state.items()):
            direction.add_(total, alpha=1.0 / (len(dispatches) * len(state)))
            uses += dispatches
        state.clear()
        abandon = tuple([flight.dispatch for flight in view.in_flight.values()])
        return Reply(direction, uses=tuple(uses), abandon=abandon, start=tuple(map(Start, view.workers)))


def permuted_times(num_workers: int, seed: int) -> Sampler:
    """Worker i takes b_i + |N(0, b_i)| seconds, b a fixed permutation of 1..n, of (seed, worker, draw) alone."""
    purpose = 15 << 32
    length = 2 * BLOCK
    base = 1.0 + Streams(0, purpose).at().permutation(num_workers)
    streams = Streams(seed, purpose)

    def block(worker: int, number: int) -> Array:
        noise = streams.at(worker, number // 2, part=1).standard_normal(length)[number % 2 * BLOCK :][:BLOCK]
        return base[worker] + math.sqrt(base[worker]) * numpy.abs(noise)

    return Sampler(num_workers, block)


TIMES = (1.0, 2.3, 5.1)
CURVATURES = (1.0, 2.0, 0.5)
SLOPES = (1.0, -2.0, 3.0)
TRUTH = sum(SLOPES) / sum(CURVATURES)
WEIGHTED = numpy.divide(SLOPES, TIMES).sum() / numpy.divide(CURVATURES, TIMES).sum()
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
    arm = Arm("", rule, learning_rate, Point().on, Fixed(TIMES).on, 3, Limits(seconds=seconds), 4000)
    looks = arm.simulated(0).evaluations
    return float(numpy.mean([look.loss for look in looks if look.train_seconds > 0.9 * seconds]))


NUM_FEATURES = 256
BATCH = 8
PENALTY = 1e-3
ALPHA = 0.1


@functools.cache
def load_texts(data: str, limit: int) -> tuple[Array, Indices, str]:
    """At most `limit` of the texts, drawn once and for all, as hashed words; their labels, 0..C-1; the data's name."""
    if data == "pydocs":
        documents = load_pydocs(cache_folder(None))
        rows = list(zip(documents.texts, documents.labels or (), strict=True))
        source = "pydocs"
    else:
        file = Source(data, kinds=TABLES, takes=("pydocs",))
        rows = [row for _, row in file.rows("train", {"text": "--data", "label": "--data"})]
        source = file.name
    order = numpy.random.Generator(numpy.random.Philox(key=0)).permutation(len(rows))[:limit]
    texts, names = zip(*[map(str, rows[row]) for row in order], strict=True)
    classes, labels = numpy.unique(names, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{source} has one label only, {classes[0]!r}; give texts of two classes or more")
    return hashed_bag_of_words(texts, NUM_FEATURES), labels.astype(numpy.int64), source


class GradientNorm(LogisticData):
    """The regression of `LogisticData`; an evaluation gives ||grad f||^2 of the global objective, not f - f*."""

    def loss(self, x: Array) -> float:
        gradient = self.exact_gradient(x)
        return float(gradient @ gradient)


def regression(data: str, limit: int, num_workers: int, seed: int) -> Instance:
    features, labels, _ = load_texts(data, limit)
    # The shares are part of the problem: the same for all seeds, as the optimum must be.
    shares = dirichlet_shares(labels, num_workers, ALPHA, seed=0)
    return GradientNorm(features, labels, shares, BATCH, PENALTY, seed)


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
    return float(numpy.mean(looks.loss.to_numpy()[len(looks) * 4 // 5 :]))


def reached(looks: pandas.DataFrame, threshold: float) -> float:
    """The first evaluation from which on the squared norm was below `threshold`; infinite if there is none."""
    below = (looks.loss < threshold)[::-1].cummin()[::-1]
    return float(looks.seconds[below].min()) if below.any() else math.inf


def row_of(name: str, curves: pandas.DataFrame, rate: float, rates: list[float]) -> dict[str, object]:
    """Of a method, from the runs at its tuned learning rate."""
    runs = [looks for _, looks in curves[curves.arm == name].groupby("seed")]
    finals = [final(looks) for looks in runs]
    diverged = sum(map(math.isinf, finals))
    geometric = interval(numpy.log(finals)).mapped(math.exp)
    row: dict[str, object] = {
        "method": name,
        "learning rate": f"{rate:.3g}" + "*" * (rate in (rates[0], rates[-1])),
        "published, MNIST": METHODS[name][1],
        "updates": f"{numpy.mean([looks.updates.max() for looks in runs]):.0f}",
        "final squared gradient norm [95 %]": f"diverged in {diverged} of {len(runs)}"
        if diverged
        else f"{geometric:.3g}",
    }
    for threshold in THRESHOLDS:
        median = float(numpy.median([reached(looks, threshold) for looks in runs]))
        row[f"s to below {threshold:g} for good"] = f"{median:.0f}" if math.isfinite(median) else "-"
    return row


def make(flags: Flags) -> None:
    limit, workers, seconds, looks = (2000, 12, 1500.0, 30) if flags.quick else (8000, 32, 8000.0, 80)
    num_seeds = flags.seeds or (2 if flags.quick else 5)
    rates = RATES[::2] if flags.quick else RATES
    _, labels, source = load_texts(flags.data, limit)  # before anything runs: it may be refused
    rate, last = (1e-2, 6_000.0) if flags.quick else (2e-3, 30_000.0)
    rows: list[dict[str, object]] = []
    for rule, sketch in ENDINGS.items():
        x = ending(rule, rate, last)
        rows.append({"rule": str(rule), "ends at": f"{x:.4f}", "minus optimum": f"{x - TRUTH:+.4f}", "sketch": sketch})
    note = (
        f"Optimum {TRUTH:.4f}; frequency-weighted point of asynchronous SGD {WEIGHTED:.4f}. Worker times "
        f"{', '.join(map(str, TIMES))} s, no noise, learning rate {rate:g}, {last:,.0f} virtual seconds, "
        "mean of x over the last tenth. The sketch's learning rate and parameters are not recorded."
    )
    write(flags.out, "three_quadratics", rows, note)

    problem = functools.partial(regression, flags.data, limit)
    end = Limits(seconds=seconds)
    arms = {
        (name, rate): Arm(name, rule, rate, problem, permuted_times, workers, end, looks, f"{rate}")
        for name, (rule, _) in METHODS.items()
        for rate in rates
    }
    trials = run([*arms.values()], [TUNING_SEED], flags.jobs)
    finals = {key: final(of(trials, arm)) for key, arm in arms.items()}
    tuned = {name: min(rates, key=lambda rate: finals[name, rate]) for name in METHODS}
    curves = run([arms[item] for item in tuned.items()], range(num_seeds), flags.jobs)
    classes = numpy.bincount(labels)
    note = (
        f"{source}: {len(labels):,} texts, {len(classes)} classes ({'/'.join(map(str, classes))}), "
        f"{NUM_FEATURES} hashed columns; {workers} workers, Dirichlet({ALPHA:g}), batch {BATCH}, penalty {PENALTY:g}; "
        f"{num_seeds} seed{'s' if num_seeds > 1 else ''}. "
        f"Squared norm of the gradient of the global loss, mean of the last fifth of {seconds:g} virtual "
        "seconds, geometric mean over seeds, 95 % interval by Student's t on its logarithm; median seconds, - where "
        f"half of the seeds or more did not get there. Learning rates tuned on another seed, {len(rates)} per method "
        f"({rates[0]:.3g} to {rates[-1]:.3g}); * at the edge. The paper gives curves, no numbers, to compare with."
    )
    write(flags.out, "ringleader", [row_of(name, curves, rate, rates) for name, rate in tuned.items()], note)

    logs = {name: {math.log10(rate): math.log10(finals[name, rate]) for rate in rates} for name in METHODS}
    tuning = [tidy("tuning", name, "", [of_rates]) for name, of_rates in logs.items()]
    real = curves.assign(x=curves.seconds, y=numpy.log10(curves.loss), panel="at the best learning rate")
    axes = {"": {"xlabel": "virtual seconds", "ylabel": "log10 of the squared norm, global gradient"}}
    axes["tuning"] = {"xlabel": "log10 of the learning rate"}
    picture(flags.out / "ringleader.png", pandas.concat([real, *tuning]), note, axes, x="x", y="y", style="arm")


if __name__ == "__main__":
    data = {"default": "pydocs", "help": "pydocs, or a .csv or .parquet with columns text and label"}
    main(make, "ringleader", __doc__, flags={"--data": data})
