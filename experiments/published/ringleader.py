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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import pandas
from torch import Tensor

from asyncsgd import rules
from asyncsgd.data.pydocs import load_pydocs
from asyncsgd.data.tables import TABLES, Source
from asyncsgd.errors import UsageError
from asyncsgd.rules.base import Arrival, Reply, Start, View
from asyncsgd.runtime.base import Budget
from asyncsgd.settings.run import cache_folder
from asyncsgd.simulation.instance import Array, Indices, Instance
from asyncsgd.simulation.logistic import LogisticData, dirichlet_shares, hashed_bag_of_words
from asyncsgd.simulation.problems import Heterogeneous
from asyncsgd.simulation.sampler import BLOCK, Sampler, Streams
from asyncsgd.simulation.simulate import simulate
from reproduction import COLOURS, Arm, draw, fixed_times, interval, picture, run, run_script, write


@dataclasses.dataclass
class Collected:
    """Of the current point: each worker's sum of gradients and their dispatches; and where the mean is built."""

    totals: dict[int, Tensor]
    dispatches: dict[int, list[int]]
    direction: Tensor


@dataclasses.dataclass(frozen=True)
class Malenia(rules.Rule):
    """x <- x - eta (1/n) sum_i (mean of worker i's gradients at x), once everybody has brought one; all restart."""

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


@dataclasses.dataclass(frozen=True)
class Position(Heterogeneous):
    """The three quadratics; an evaluation gives x itself instead of f(x) - f*."""

    def loss(self, x: Array) -> float:
        return float(x[0])


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
    done = simulate(
        rule,
        Position().on(3, seed=0),
        fixed_times(TIMES),
        num_workers=3,
        learning_rate=learning_rate,
        budget=Budget(seconds=seconds),
        evaluations=4000,
    )
    return float(numpy.mean([look.loss for look in done.evaluations if look.train_seconds > 0.9 * seconds]))


class Texts(NamedTuple):
    features: Array
    labels: Indices
    source: str


NUM_FEATURES, BATCH, PENALTY, ALPHA = 256, 8, 1e-3, 0.1


@functools.cache
def load_texts(data: str, limit: int) -> Texts:
    """At most `limit` of the texts, drawn once and for all, as hashed words; labels become 0..C-1."""
    if data == "pydocs":
        documents = load_pydocs(cache_folder(None))
        assert documents.labels is not None
        rows, source = list(zip(documents.texts, documents.labels, strict=True)), "pydocs"
    else:
        file = Source(data, kinds=TABLES, takes=("pydocs",))
        assert file.path is not None
        rows = [row for _, row in file.rows("train", {"text": "--data", "label": "--data"})]
        source = f"{file.path.parent.name}/{file.name}"
    order = numpy.random.Generator(numpy.random.Philox(key=0)).permutation(len(rows))[:limit]
    texts, names = zip(*[map(str, rows[row]) for row in order], strict=True)
    classes, labels = numpy.unique(names, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{source} has one label only, {classes[0]!r}; give texts of two classes or more")
    return Texts(hashed_bag_of_words(texts, NUM_FEATURES), labels.astype(numpy.int64), source)


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
LEAST_RATE, RATE_FACTOR, NUM_RATES = 0.02, 2.5, 8
THRESHOLDS = (1e-3, 1e-4)


def final(looks: pandas.DataFrame) -> float:
    """The mean of the last fifth of a run's squared norms; infinite for a run that diverged."""
    norms = looks.loss.to_numpy()
    return float(numpy.mean(norms[len(norms) * 4 // 5 :])) if numpy.isfinite(norms[-1]) else math.inf


def reached(looks: pandas.DataFrame, threshold: float) -> float:
    """The first evaluation from which on the squared norm was below `threshold`; infinite if there is none."""
    above = numpy.flatnonzero(~(looks.loss < threshold).to_numpy())
    first = above[-1] + 1 if len(above) else 0
    return float(looks.seconds.iloc[first]) if first < len(looks) else math.inf


def method_rows(curves: pandas.DataFrame, tuned: dict[str, float], rates: list[float]) -> list[dict[str, object]]:
    """A row for each method, from the runs at its tuned learning rate."""
    rows = []
    for name, (_, published) in METHODS.items():
        runs = [looks for _, looks in curves[curves.arm == name].groupby("seed")]
        finals = [final(looks) for looks in runs]
        diverged = sum(map(math.isinf, finals))
        row: dict[str, object] = {
            "method": name,
            "learning rate": f"{tuned[name]:.3g}" + "*" * (tuned[name] in (rates[0], rates[-1])),
            "published, MNIST": published,
            "updates": f"{numpy.mean([looks.updates.max() for looks in runs]):.0f}",
            "final squared gradient norm [95 %]": f"diverged in {diverged} of {len(finals)}"
            if diverged
            else f"{interval([math.log(one) for one in finals]).mapped(math.exp):.3g}",
        }
        for threshold in THRESHOLDS:
            median = float(numpy.median([reached(looks, threshold) for looks in runs]))
            row[f"s to below {threshold:g} for good"] = f"{median:.0f}" if math.isfinite(median) else "-"
        rows.append(row)
    return rows


def make(flags: argparse.Namespace) -> None:
    limit, workers, seconds, looks = (2000, 12, 1500.0, 30) if flags.quick else (8000, 32, 8000.0, 80)
    num_seeds = flags.seeds or (2 if flags.quick else 5)
    texts = load_texts(flags.data, limit)  # before anything runs: it may be refused
    rate, end = (1e-2, 6_000.0) if flags.quick else (2e-3, 30_000.0)
    ends = [ending(rule, rate, end) for rule in ENDINGS]
    rows: list[dict[str, object]] = [
        {"rule": str(rule), "ends at": f"{x:.4f}", "minus optimum": f"{x - TRUTH:+.4f}", "sketch": sketch}
        for (rule, sketch), x in zip(ENDINGS.items(), ends, strict=True)
    ]
    note = (
        f"Optimum {TRUTH:.4f}; frequency-weighted point of asynchronous SGD {frequency_weighted():.4f}. Worker times "
        f"{', '.join(map(str, TIMES))} s, no noise, learning rate {rate:g}, {end:,.0f} virtual seconds, "
        "mean of x over the last tenth. The sketch's learning rate and parameters are not recorded."
    )
    write(flags.out, "three_quadratics", rows, note)

    problem = functools.partial(regression, flags.data, limit)

    def arm(name: str, rate: float) -> Arm:
        return Arm(
            name, METHODS[name][0], rate, problem, permuted_times, workers, Budget(seconds=seconds), looks, f"{rate}"
        )

    rates = [LEAST_RATE * RATE_FACTOR**k for k in range(0, NUM_RATES, 2 if flags.quick else 1)]
    trials = run([arm(name, rate) for name in METHODS for rate in rates], [TUNING_SEED], flags.jobs)
    finals = {
        name: [final(trials[(trials.arm == name) & (trials.panel == f"{rate}")]) for rate in rates] for name in METHODS
    }
    tuned = {name: rates[int(numpy.argmin(finals[name]))] for name in METHODS}
    curves = run([arm(name, tuned[name]) for name in METHODS], range(num_seeds), flags.jobs)
    classes = numpy.bincount(texts.labels)
    setting = (
        f"{texts.source}: {len(texts.labels):,} texts, {len(classes)} classes ({'/'.join(map(str, classes))}), "
        f"{NUM_FEATURES} hashed columns; {workers} workers, Dirichlet({ALPHA:g}), batch {BATCH}, penalty {PENALTY:g}; "
        f"{num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    note = (
        f"{setting}. Squared norm of the gradient of the global loss, mean of the last fifth of {seconds:g} virtual "
        "seconds, geometric mean over seeds, 95 % interval by Student's t on its logarithm; median seconds, - where "
        f"half of the seeds or more did not get there. Learning rates tuned on another seed, {len(rates)} per method "
        f"({rates[0]:.3g} to {rates[-1]:.3g}); * at the edge. The paper gives curves, no numbers, to compare with."
    )
    write(flags.out, "ringleader", method_rows(curves, tuned, rates), note)

    small_print = setting + (
        ".\nMiddle: geometric mean, band: 95 % interval over seeds by Student's t on the logarithm (from 3 on), each "
        "method at its best learning rate (right: one tuning seed, mean of the last fifth; missing: inf)."
    )
    title = "Data of its own for every worker: who finds the optimum of all?"
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "fontsize": 8, "frameon": False}
    with picture(flags.out / "ringleader.png", 3, title, small_print) as (exact, real, tuning):
        exact.scatter(ends, range(len(ends)), color=COLOURS[0], zorder=3)
        names = [rule.name + " with stops" * getattr(rule, "stops", False) for rule in ENDINGS]
        exact.set_yticks(range(len(ends)), names)
        exact.invert_yaxis()
        exact.axvline(TRUTH, color="black", label=f"optimum {TRUTH:.4f}")
        weighted = frequency_weighted()
        exact.axvline(weighted, color="0.4", linestyle="--", label=f"weighted by speed {weighted:.4f}")
        exact.set(title="three quadratics, no noise", xlabel="x at the end", xlim=(-0.05, 0.65))
        logs = curves.assign(loss=numpy.log10(curves.loss), arm=[f"{name} ({tuned[name]:.2g})" for name in curves.arm])
        draw(real, logs, "seconds", title="real text", xlabel="virtual seconds")
        real.set_ylabel("log10 of the squared norm, global gradient")
        for colour, norms in zip(COLOURS, finals.values(), strict=False):
            tuning.plot(rates, [norm if math.isfinite(norm) else math.nan for norm in norms], "o-", color=colour, ms=5)
        tuning.set(title="tuning", xscale="log", yscale="log", xlabel="learning rate", ylabel="final squared norm")
        exact.legend(ncols=2, **below)
        real.legend(ncols=3, **below)


def main(argv: list[str] | None = None) -> int:
    data = {"default": "pydocs", "help": "pydocs, or a .csv or .parquet with columns text and label"}
    return run_script(make, "ringleader", __doc__, argv, {"--data": data})


if __name__ == "__main__":
    sys.exit(main())
