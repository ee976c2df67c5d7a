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
import math
from typing import Any

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
from reproduction import Arm, Fixed, Flags, curve, each, interval, main, picture, tidy, write

SECONDS_PER_STEP = (0.58, 0.75, 1.51, 3.33)
LOCAL_STEPS = 20
NUM_CLASSES = 4
BATCH = 32
LAST_RATE = 1e-6
WEIGHT_DECAY = 1e-3
PURPOSE = 16 << 32
"""Of the streams."""


class Mixture(Instance):
    """An MLP with one hidden layer that classifies points of a mixture of mixtures of Gaussians.

        p = softmax(relu(a W_1 + b_1) W_2 + b_2),    f = mean of -log p[class of a]

    The centres, so many clusters per class, are those of seed 0 for every seed; start, held-out points, on which it is
    evaluated, and the batch of (worker, index) are functions of `seed`.
    """

    def __init__(self, sizes: tuple[int, int, int, int], workers: int, seed: int) -> None:
        dimension, clusters, hidden, num_held_out = sizes
        self._shapes = ((dimension, hidden), (hidden,), (hidden, NUM_CLASSES), (NUM_CLASSES,))
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.num_parameters = sum(self._sizes)
        self._streams = Streams(seed, PURPOSE)
        centres = Streams(0, PURPOSE).at().standard_normal((NUM_CLASSES * clusters, dimension))
        self._centres = centres / numpy.linalg.norm(centres, axis=1, keepdims=True)
        self._held_out = self._points(self._streams.at(part=1), num_held_out)

    def _points(self, generator: numpy.random.Generator, number: int) -> tuple[Tensor, Tensor]:
        cluster = generator.integers(0, len(self._centres), number)
        noise = generator.standard_normal((number, self._centres.shape[1]))
        return torch.from_numpy(self._centres[cluster] + 0.5 * noise), torch.from_numpy(cluster % NUM_CLASSES)

    def initial(self) -> Array:
        """torch's default for linear layers: uniform within 1 / sqrt(inputs)."""
        generator = self._streams.at(part=2)
        bounds = [width**-0.5 for width, *_ in self._shapes[::2] for _ in range(2)]
        parts = [generator.uniform(-bound, bound, size) for bound, size in zip(bounds, self._sizes, strict=True)]
        return numpy.concatenate(parts)

    def _loss(self, parameters: Tensor, points: Tensor, labels: Tensor) -> Tensor:
        parts = zip(parameters.split(self._sizes), self._shapes, strict=True)
        first, first_bias, second, second_bias = (part.view(shape) for part, shape in parts)
        scores = torch.relu(points @ first + first_bias) @ second + second_bias
        return torch.nn.functional.cross_entropy(scores, labels)

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        parameters = torch.from_numpy(x).requires_grad_()
        loss = self._loss(parameters, *self._points(self._streams.at(worker, index, 3), BATCH))
        (gradient,) = torch.autograd.grad(loss, parameters)
        torch.from_numpy(out).copy_(gradient)
        return float(loss.detach())

    def loss(self, x: Array) -> float:
        with torch.no_grad():
            return float(self._loss(torch.from_numpy(x), *self._held_out))


def watched(rule: Rule, cosines: list[float]) -> Rule:
    """`rule`, which adds to `cosines` that of each arriving pseudo-gradient to the last one of every other worker."""
    last: dict[int, Tensor] = {}

    class Watched(type(rule)):  # type: ignore[misc]
        def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
            unit = arrival.gradient / torch.linalg.vector_norm(arrival.gradient)
            others = [float(unit @ other) for worker, other in last.items() if worker != arrival.worker]
            if others:
                cosines.append(sum(others) / len(others))
            last[arrival.worker] = unit
            reply: Reply = super().arrive(state, arrival, view)
            return reply

    made: Rule = Watched(*dataclasses.astuple(rule))
    return made


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
    return LAST_RATE + (peak - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, num_gradients / total)))


Run = tuple[pandas.DataFrame, list[float]]
"""A row for each evaluation, and the cosine of each arrival."""


def run_one(arm: Arm, seed: int) -> Run:
    torch.set_num_threads(1)
    cosines = list[float]()
    return curve(dataclasses.replace(arm, rule=watched(arm.rule, cosines)), seed), cosines


def arm_rows(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row for each method; the target of the times is the mean final loss of synchronous DiLoCo."""
    early = min(own[0][0].seconds.iloc[-1] for own in runs.values())
    target = numpy.mean([looks.loss.iloc[-1] for looks, _ in runs[SYNC]])
    few = runs[SYNC][0][0].updates.iloc[-1]
    rows = []
    for name, own in runs.items():
        curves = [looks for looks, _ in own]
        last = curves[0].iloc[-1]
        seconds = [min(looks.seconds[looks.loss <= target], default=math.inf) for looks in curves]
        at_few, at_early = (
            numpy.mean([numpy.interp(value, looks[column], looks.loss) for looks in curves])
            for column, value in (("updates", few), ("seconds", early))
        )
        row = {
            "method, outer learning rate": name,
            "updates": last.updates,
            "virtual s": f"{last.seconds:.0f}",
            "final loss, equal gradients [95 %]": interval([looks.loss.iloc[-1] for looks in curves]),
            f"loss after {few} updates": f"{at_few:.4g}",
            f"loss at {early:.0f} s": f"{at_early:.4g}",
            "median s to sync's final loss": f"{numpy.median(seconds):.0f}".replace("inf", "-"),
            "cosine": f"{numpy.mean([numpy.mean(cosines[len(cosines) // 2 :]) for _, cosines in own]):.3f}",
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
    best = {name: min((loss, rate) for rate, loss in losses.items()) for name, losses in swept.items()}
    tried = ", ".join(f"{rate:g}" for rate in next(iter(swept.values())))
    said = {
        "(i) momentum .9: async needs .07 for sync's .7": f"best of {tried}: "
        + "; ".join(f"{name} {rate:g} ({loss:.4g})" for name, (loss, rate) in best.items()),
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
    return [{"published": sentence, "here": measured} for sentence, measured in said.items()]


def make(flags: Flags) -> None:
    sizes, total, peak = ((128, 1, 32, 1024), 1600, 4e-4) if flags.quick else ((512, 1, 64, 2048), 4800, 2e-4)
    num_seeds = flags.seeds or (2 if flags.quick else 3)
    rates = (0.07, 0.7) if flags.quick else SWEEP
    schedule = functools.partial(cosine_schedule, total, peak)
    problem = functools.partial(Mixture, sizes)
    end = Limits(samples=total)
    inner = OptimizerRecipe(AdamW(), weight_decay=WEIGHT_DECAY)

    def arm(name: str, rule: Rule) -> Arm:
        return Arm(name, rule, schedule, problem, Fixed(SECONDS_PER_STEP).on, 4, end, 40, inner=inner)

    tasks = [(arm(*item), seed) for item in RULES.items() for seed in range(num_seeds)]
    tasks += [(arm(name, families(rate)[name]), SWEEP_SEED) for name in families(0.7) for rate in rates]
    done = each(run_one, tasks, flags.jobs)
    runs = {name: [next(done) for _ in range(num_seeds)] for name in RULES}
    swept = {name: {rate: next(done)[0].loss.iloc[-1] for rate in rates} for name in families(0.7)}
    dimension, clusters, hidden, held_out = sizes
    setting = (
        f"{NUM_CLASSES} classes of {clusters} cluster{'s' if clusters > 1 else ''} in R^{dimension}, MLP "
        f"{dimension}-{hidden}-{NUM_CLASSES}, {total:,} gradients of {BATCH} points, H = {LOCAL_STEPS}, 4 workers of "
        f"{', '.join(map(str, SECONDS_PER_STEP))} s per step; loss on {held_out:,} held-out points; {num_seeds} "
        f"seed{'s' if num_seeds > 1 else ''}"
    )
    note = (
        f"{setting}. Cosine: of an arriving pseudo-gradient to the last one of each other worker, mean over the second "
        "half of the run. - : not reached by half of the seeds or more."
    )
    rows = arm_rows(runs)
    write(flags.out, "async_diloco", rows, note)
    note = f"{setting}. Mean losses over seeds; the sweep is of one other seed."
    write(flags.out, "headlines", headline_rows(rows, swept), note)

    looks = pandas.concat([looks for own in runs.values() for looks, _ in own]).drop(columns="panel")
    looks = looks.rename(
        columns={"updates": "updates at the server", "samples": "gradients", "seconds": "virtual seconds"}
    )
    table = looks.melt(["arm", "seed", "look", "loss"], var_name="panel", value_name="x")
    limits = 0.9 * looks.loss.min(), 1.15 * looks.loss.iloc[0]
    axes = {"": {"xlabel": "", "ylabel": "held-out loss (nats)", "ylim": limits}}
    picture(flags.out / "losses.png", table, note, axes, x="x", y="loss", style="arm")

    drawn = [tidy("outer learning rate", name, "", [losses]) for name, losses in swept.items()]
    for name in (SYNC, PLAIN_SYNC, NAIVE, NAIVE_SMALL, NO_MOMENTUM, DELAYED):
        smooth = pandas.DataFrame([cosines for _, cosines in runs[name]]).T.rolling(40).mean()
        drawn.append(tidy("cosine", name, "", smooth.set_index((smooth.index + 1) * LOCAL_STEPS).T))
    axes = {
        "outer learning rate": {"xlabel": "", "ylabel": "final held-out loss (nats)"},
        "cosine": {"xlabel": "gradients", "ylabel": "cosine of two pseudo-gradients, running mean of 40"},
    }
    picture(flags.out / "outer.png", pandas.concat(drawn), note, axes, x="x", y="y", style="arm")


if __name__ == "__main__":
    main(make, "async_diloco", __doc__)
