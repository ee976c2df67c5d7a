"""Outer momentum under asynchrony: naive asynchronous DiLoCo, its repairs, and synchronous DiLoCo, on a toy.

Source: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato: Asynchronous Local-SGD Training for Language
Modeling, 2024, and the notebook of google-deepmind/asyncdiloco, whose sentences stand in the second table.

A mixture of Gaussians in R^512, 4 classes of 1 cluster with centres of length 1, points at centre + .5 N(0, I). MLP
512-64-4 with ReLU, batch 32. 4 workers of .58, .75, 1.51 and 3.33 seconds per step. H = 20 inner AdamW steps, weight
decay .001, learning rate 2e-4 along a cosine to 1e-6. Every method gets 4,800 gradients, 60 synchronous rounds.

Deviations: 64 hidden units for 65,000 and 1 cluster per class for 8 (the notebook's own small data set has 1). Fresh
points for every batch instead of 128,000 fixed ones in shards. The inner state stays with its worker. The cosine runs
over the gradients of all workers. No grace window. The notebook multiplies a displacement by 1 / sqrt(4): its .7 and
.07 are .35 and .035 here, which the sweep of outer learning rates has too. FedBuff has no outer momentum.

``--quick``: R^128, 32 hidden units, inner learning rate 4e-4, 1,600 gradients, 2 seeds instead of 3, 2 learning rates
in the sweep.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy
import pandas
import torch
from torch import Tensor

from asyncsgd.core.limits import Limits
from asyncsgd.core.optimizers import AdamW, OptimizerRecipe
from asyncsgd.rules import AsyncLocalSGD, DiLoCo, FedBuff, Rule
from asyncsgd.rules.contract import Arrival, Reply, View
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.speeds import Streams
from reproduction import Arm, Fixed, Flags, curve, each, in_words, interval, main, picture, tidy, write

SECONDS_PER_STEP = (0.58, 0.75, 1.51, 3.33)
LOCAL_STEPS = 20
NUM_CLASSES = 4
BATCH = 32
LAST_RATE = 1e-6
WEIGHT_DECAY = 1e-3
PURPOSE = 16 << 32
"""Tells this problem's random streams from those of the others."""


class Sizes(NamedTuple):
    dimension: int
    clusters: int
    """Of each class."""
    hidden: int
    """Units of the hidden layer."""
    held_out: int
    """Points on which the loss is evaluated."""


class Mixture(Instance):
    """An MLP with one hidden layer that classifies points of a mixture of mixtures of Gaussians.

        p = softmax(relu(a W_1 + b_1) W_2 + b_2),    f = mean of -log p[class of a]

    The centres, so many clusters per class, are those of seed 0 for every seed; start, held-out points, on which it is
    evaluated, and the batch of (worker, index) are functions of `seed`.
    """

    def __init__(self, sizes: Sizes, workers: int, seed: int) -> None:
        dimension, clusters, hidden, num_held_out = sizes
        self._shapes = ((dimension, hidden), (hidden,), (hidden, NUM_CLASSES), (NUM_CLASSES,))
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.num_parameters = sum(self._sizes)
        self._streams = Streams(seed, PURPOSE)
        centres = Streams(0, PURPOSE).at().standard_normal((NUM_CLASSES * clusters, dimension))
        self._centres = centres / numpy.linalg.norm(centres, axis=1, keepdims=True)
        self._held_out = self._points(self._streams.at(part=1), num_held_out)

    def _points(self, generator: numpy.random.Generator, number: int) -> tuple[Tensor, Tensor]:
        num_clusters, dimension = self._centres.shape
        clusters = generator.integers(0, num_clusters, number)
        noise = generator.standard_normal((number, dimension))
        points = self._centres[clusters] + 0.5 * noise
        labels = clusters % NUM_CLASSES
        return torch.from_numpy(points), torch.from_numpy(labels)

    def initial(self) -> Array:
        """torch's default for linear layers: uniform within 1 / sqrt(inputs)."""
        generator = self._streams.at(part=2)
        parts = []
        for shape, size in zip(self._shapes, self._sizes, strict=True):
            if len(shape) == 2:  # the weights of a layer; its bias has the same bound
                bound = shape[0] ** -0.5
            parts.append(generator.uniform(-bound, bound, size))
        return numpy.concatenate(parts)

    def _loss(self, parameters: Tensor, points: Tensor, labels: Tensor) -> Tensor:
        parts = map(Tensor.view, parameters.split(self._sizes), self._shapes)
        first, first_bias, second, second_bias = parts
        hidden = torch.relu(points @ first + first_bias)
        scores = hidden @ second + second_bias
        return torch.nn.functional.cross_entropy(scores, labels)

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        parameters = torch.from_numpy(x).requires_grad_()
        generator = self._streams.at(worker, index, 3)
        points, labels = self._points(generator, BATCH)
        loss = self._loss(parameters, points, labels)
        (gradient,) = torch.autograd.grad(loss, parameters)
        torch.from_numpy(out).copy_(gradient)
        return float(loss.detach())

    def loss(self, x: Array) -> float:
        with torch.no_grad():
            return float(self._loss(torch.from_numpy(x), *self._held_out))


def watched(rule: Rule, cosines: list[float]) -> Rule:
    """`rule`, which adds to `cosines` the mean cosine of each arriving pseudo-gradient to the others' last ones."""
    last_units: dict[int, Tensor] = {}

    class Watched(type(rule)):  # type: ignore[misc]
        def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
            norm = torch.linalg.vector_norm(arrival.gradient)
            unit = arrival.gradient / norm
            to_others = [float(unit @ other) for worker, other in last_units.items() if worker != arrival.worker]
            if to_others:
                cosines.append(sum(to_others) / len(to_others))
            last_units[arrival.worker] = unit
            reply: Reply = super().arrive(state, arrival, view)
            return reply

    options = dataclasses.astuple(rule)
    watched_rule: Rule = Watched(*options)
    return watched_rule


def naive(rate: float, momentum: float, dynamic: bool = False) -> Rule:
    """Nesterov on every arrival as it comes."""
    return AsyncLocalSGD(LOCAL_STEPS, rate, momentum, period=1, dynamic=dynamic)


SYNC = "sync, momentum .9, .7"
PLAIN_SYNC = "sync, no momentum, .7"
NAIVE = "async, momentum .9, .7"
NAIVE_SMALL = "async, momentum .9, .07"
NO_MOMENTUM = "async, no momentum, .7"
DELAYED = "async, Delayed Nesterov, .7"
DYLU = "async, DyLU, momentum .9, .07"
BOTH = "async, Delayed Nesterov + DyLU, .7"
BUFFERED = "buffered, FedBuff K = 4, .7"
RULES: dict[str, Rule] = {
    SYNC: DiLoCo(LOCAL_STEPS, 0.7, 0.9),
    PLAIN_SYNC: DiLoCo(LOCAL_STEPS, 0.7, 0.0),
    NAIVE: naive(0.7, 0.9),
    NAIVE_SMALL: naive(0.07, 0.9),
    NO_MOMENTUM: naive(0.7, 0.0),
    DELAYED: AsyncLocalSGD(LOCAL_STEPS, 0.7, 0.9, period=4),
    DYLU: naive(0.07, 0.9, dynamic=True),
    BOTH: AsyncLocalSGD(LOCAL_STEPS, 0.7, 0.9, period=4, dynamic=True),
    BUFFERED: FedBuff(4, LOCAL_STEPS, 0.7),
}

SWEEP = (0.035, 0.07, 0.14, 0.35, 0.7)
"""Outer learning rates of the sweep."""
SWEEP_SEED = 1000


def families(rate: float) -> dict[str, Rule]:
    """The rules of the sweep, at an outer learning rate."""
    return {
        "sync, momentum .9": DiLoCo(LOCAL_STEPS, rate, 0.9),
        "async, momentum .9": naive(rate, 0.9),
        "async, no momentum": naive(rate, 0.0),
    }


def cosine_schedule(total: int, peak: float, num_gradients: int) -> float:
    share = min(1.0, num_gradients / total)
    half_cosine = 0.5 * (1.0 + math.cos(math.pi * share))
    return LAST_RATE + (peak - LAST_RATE) * half_cosine


class Run(NamedTuple):
    looks: pandas.DataFrame
    """A row for each evaluation."""
    cosines: list[float]
    """One for each arrival."""


def run_one(arm: Arm, seed: int) -> Run:
    torch.set_num_threads(1)
    cosines = list[float]()
    rule = watched(arm.rule, cosines)
    looks = curve(dataclasses.replace(arm, rule=rule), seed)
    return Run(looks, cosines)


def losses_at(curves: list[pandas.DataFrame], column: str, value: float) -> str:
    """The mean loss over `curves` where `column` is `value`."""
    losses = [numpy.interp(value, looks[column], looks.loss) for looks in curves]
    return f"{numpy.mean(losses):.4g}"


def median_seconds(curves: list[pandas.DataFrame], target: float) -> str:
    """The median time until the loss is at most `target`, "-" where half of the runs or more do not get there."""
    seconds = []
    for looks in curves:
        reached = looks.seconds[looks.loss <= target]
        seconds.append(min(reached, default=math.inf))
    median = numpy.median(seconds)
    return f"{median:.0f}" if math.isfinite(median) else "-"


def late_cosine(runs: list[Run]) -> str:
    """The mean cosine over the second half of each run."""
    means = []
    for run in runs:
        half = len(run.cosines) // 2
        means.append(numpy.mean(run.cosines[half:]))
    return f"{numpy.mean(means):.3f}"


def arm_rows(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row for each method; the target of the times is the mean final loss of synchronous DiLoCo."""
    early = min(method_runs[0].looks.seconds.iloc[-1] for method_runs in runs.values())
    target = float(numpy.mean([run.looks.loss.iloc[-1] for run in runs[SYNC]]))
    few = runs[SYNC][0].looks.updates.iloc[-1]
    rows = []
    for name, method_runs in runs.items():
        curves = [run.looks for run in method_runs]
        last = curves[0].iloc[-1]
        finals = [looks.loss.iloc[-1] for looks in curves]
        row = {
            "method, outer learning rate": name,
            "updates": last.updates,
            "virtual s": f"{last.seconds:.0f}",
            "final loss, equal gradients [95 %]": interval(finals),
            f"loss after {few} updates": losses_at(curves, "updates", few),
            f"loss at {early:.0f} s": losses_at(curves, "seconds", early),
            "median s to sync's final loss": median_seconds(curves, target),
            "cosine": late_cosine(method_runs),
        }
        rows.append(row)
    return rows


def headline_rows(rows: list[dict[str, Any]], swept: dict[str, dict[float, float]]) -> list[dict[str, object]]:
    """The notebook's sentences, (iv) the paper's, beside what was measured."""
    table = pandas.DataFrame(rows, index=[*RULES])
    after = table.columns[4].removeprefix("loss ")
    early = table.iloc[:, 4]
    cosine = table.cosine
    final = table.iloc[:, 3].map(lambda cell: f"{cell.estimate:.4g}")
    best_rates = []
    for name, losses in swept.items():
        rate = min(losses, key=losses.__getitem__)
        best_rates.append(f"{name} {rate:g} ({losses[rate]:.4g})")
        tried = ", ".join(f"{rate:g}" for rate in losses)
    measured = {
        "(i) momentum .9: async needs .07 for sync's .7": f"best of {tried}: {'; '.join(best_rates)}",
        "(i) and is worse per update": f"{after} {early[NAIVE_SMALL]} at .07, {early[NAIVE]} at .7, sync {early[SYNC]};"
        f" at equal gradients {final[NAIVE_SMALL]}, {final[NAIVE]}, {final[SYNC]}",
        "(ii) async with momentum 0 and .7 is better": f"{after} {early[NO_MOMENTUM]} for {early[NAIVE_SMALL]};"
        f" at equal gradients {final[NO_MOMENTUM]} for {final[NAIVE_SMALL]}",
        "(iii) pseudo-gradients become orthogonal": f"cosine {cosine[SYNC]} sync,"
        f" {cosine[NO_MOMENTUM]} async without momentum",
        "(iv) Delayed Nesterov repairs": f"{after} {early[DELAYED]} for {early[NAIVE]};"
        f" at equal gradients {final[DELAYED]} for {final[NAIVE]}, sync {final[SYNC]}",
        "(iv) DyLU repairs": f"at equal gradients {final[DYLU]} with .9 and .07, for {final[NAIVE_SMALL]} without DyLU",
        "(iv) both": f"at equal gradients {final[BOTH]}",
    }
    return [{"published": sentence, "here": numbers} for sentence, numbers in measured.items()]


class Setup(NamedTuple):
    sizes: Sizes
    num_gradients: int
    learning_rate: float
    """Of the inner steps, at the start."""
    num_seeds: int
    outer_rates: tuple[float, ...]


FULL = Setup(Sizes(512, 1, 64, 2048), 4800, 2e-4, 3, SWEEP)
QUICK = Setup(Sizes(128, 1, 32, 1024), 1600, 4e-4, 2, (0.07, 0.7))


def make(flags: Flags) -> None:
    setup = QUICK if flags.quick else FULL
    sizes = setup.sizes
    total = setup.num_gradients
    rates = setup.outer_rates
    num_seeds = flags.seeds or setup.num_seeds
    schedule = functools.partial(cosine_schedule, total, setup.learning_rate)
    problem = functools.partial(Mixture, sizes)
    end = Limits(samples=total)
    inner = OptimizerRecipe(AdamW(), weight_decay=WEIGHT_DECAY)

    def arm(name: str, rule: Rule) -> Arm:
        return Arm(name, rule, schedule, problem, Fixed(SECONDS_PER_STEP).on, 4, end, 40, inner=inner)

    tasks = []
    for name, rule in RULES.items():
        tasks += [(arm(name, rule), seed) for seed in range(num_seeds)]
    for name in families(0.7):
        tasks += [(arm(name, families(rate)[name]), SWEEP_SEED) for rate in rates]
    done = each(run_one, tasks, flags.jobs)
    runs = {name: list(itertools.islice(done, num_seeds)) for name in RULES}
    swept = {}
    for name in families(0.7):
        swept[name] = {rate: next(done).looks.loss.iloc[-1] for rate in rates}
    seconds = ", ".join(map(str, SECONDS_PER_STEP))
    setting = (
        f"{NUM_CLASSES} classes of {in_words(sizes.clusters, 'cluster')} in R^{sizes.dimension}, MLP "
        f"{sizes.dimension}-{sizes.hidden}-{NUM_CLASSES}, {total:,} gradients of {BATCH} points, H = {LOCAL_STEPS}, "
        f"4 workers of {seconds} s per step; loss on {sizes.held_out:,} held-out points; {in_words(num_seeds, 'seed')}"
    )
    note = (
        f"{setting}. Cosine: of an arriving pseudo-gradient to the last one of each other worker, mean over the second "
        "half of the run. - : not reached by half of the seeds or more."
    )
    rows = arm_rows(runs)
    write(flags.out, "async_diloco", rows, note)
    note = f"{setting}. Mean losses over seeds; the sweep is of one other seed."
    write(flags.out, "headlines", headline_rows(rows, swept), note)

    curves = [run.looks for run in itertools.chain(*runs.values())]
    looks = pandas.concat(curves).drop(columns="panel")
    titles = {"updates": "updates at the server", "samples": "gradients", "seconds": "virtual seconds"}
    looks = looks.rename(columns=titles)
    table = looks.melt(["arm", "seed", "look", "loss"], var_name="panel", value_name="x")
    limits = 0.9 * looks.loss.min(), 1.15 * looks.loss.iloc[0]
    axes = {"": {"xlabel": "", "ylabel": "held-out loss (nats)", "ylim": limits}}
    picture(flags.out / "losses.png", table, note, axes, x="x", y="loss", style="arm")

    drawn = [tidy("outer learning rate", name, "", [losses]) for name, losses in swept.items()]
    for name in (SYNC, PLAIN_SYNC, NAIVE, NAIVE_SMALL, NO_MOMENTUM, DELAYED):
        by_arrival = pandas.DataFrame([run.cosines for run in runs[name]]).T
        smooth = by_arrival.rolling(40).mean()
        gradients = (smooth.index + 1) * LOCAL_STEPS
        drawn.append(tidy("cosine", name, "", smooth.set_index(gradients).T))
    axes = {
        "outer learning rate": {"xlabel": "", "ylabel": "final held-out loss (nats)"},
        "cosine": {"xlabel": "gradients", "ylabel": "cosine of two pseudo-gradients, running mean of 40"},
    }
    picture(flags.out / "outer.png", pandas.concat(drawn), note, axes, x="x", y="y", style="arm")


if __name__ == "__main__":
    main(make, "async_diloco", __doc__)
