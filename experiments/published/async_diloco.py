"""Outer momentum under asynchrony: naive asynchronous DiLoCo, its repairs, and synchronous DiLoCo, on a toy.

    python experiments/published/async_diloco.py --quick

Source: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato: Asynchronous Local-SGD Training for Language
Modeling, 2024, and the notebook of google-deepmind/asyncdiloco. The notebook says of its toy: (i) With outer momentum
.9 the asynchronous method needs an outer learning rate about 10 times smaller (.07 for .7) and is worse per update.
(ii) With momentum 0 and .7 it is better than that. (iii) Pseudo-gradients become orthogonal. The paper adds: (iv)
Delayed Nesterov and DyLU repair it.

Set-up: a mixture of Gaussians in R^512, 4 classes of 1 cluster with centres of length 1, points at centre + .5 N(0, I).
MLP 512-64-4 with ReLU, cross-entropy, batch 32. 4 workers of .58, .75, 1.51 and 3.33 seconds per step. H = 20 inner
AdamW steps, weight decay .001, learning rate 2e-4 along a cosine to 1e-6. Every method gets 4,800 gradients in all,
which is 60 synchronous rounds. The loss is on 2,048 held-out points.

Deviations: 64 hidden units for 65,000 and 1 cluster per class for 8 (the notebook's own small data set has 1). Fresh
points for every batch instead of 128,000 fixed ones: as many gradients as here would be 1.2 passes, and where all see
the same distribution there are no shards to visit. The inner state stays with its worker instead of being reset every
round. The cosine runs over the gradients of all workers, not over a shard's own. No grace window. The notebook
multiplies a displacement by 1 / sqrt(4): its .7 and .07 are .35 and .035 here, which the sweep of outer learning rates
has too. FedBuff, the buffered arm, has no outer momentum.

``--quick``: R^128, 32 hidden units, inner learning rate 4e-4, 1,600 gradients, 2 seeds instead of 3, 2 learning rates
in the sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from typing import Any, ClassVar, NamedTuple

import numpy
import pandas
import torch
from torch import Tensor

from asyncsgd.optimizers import AdamW, OptimizerRecipe
from asyncsgd.rules import AsyncLocalSGD, DiLoCo, FedBuff, Rule
from asyncsgd.rules.base import Arrival, Reply, View
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.sampler import Sampler
from reproduction import COLOURS, Arm, curve, draw, each, fixed_times, interval, picture, run_script, write

SECONDS_PER_STEP = (0.58, 0.75, 1.51, 3.33)
LOCAL_STEPS = 20
NUM_CLASSES = 4
BATCH = 32
LAST_RATE, WEIGHT_DECAY = 1e-6, 1e-3


class Mixture(Instance):
    """An MLP with one hidden layer that classifies points of a mixture of mixtures of Gaussians.

        p = softmax(relu(a W_1 + b_1) W_2 + b_2),    f = mean of -log p[class of a]

    The centres are those of seed 0 for every seed; start, batches and held-out points are functions of `seed`. A batch
    is one of (seed, worker, index). Evaluations are on the held-out points.

    Args:
        dimension: of a point.
        clusters: per class.
        hidden: units.
        num_held_out: points.
    """

    def __init__(self, dimension: int, clusters: int, hidden: int, num_held_out: int, seed: int) -> None:
        self._shapes = ((dimension, hidden), (hidden,), (hidden, NUM_CLASSES), (NUM_CLASSES,))
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.num_parameters = sum(self._sizes)
        self._seed = seed
        centres = _generator(0, 0).standard_normal((NUM_CLASSES * clusters, dimension))
        self._centres = centres / numpy.linalg.norm(centres, axis=1, keepdims=True)
        self._held_out = self._points(_generator(seed, 1), num_held_out)

    def _points(self, generator: numpy.random.Generator, number: int) -> tuple[Tensor, Tensor]:
        cluster = generator.integers(0, len(self._centres), number)
        noise = generator.standard_normal((number, self._centres.shape[1]))
        return torch.from_numpy(self._centres[cluster] + 0.5 * noise), torch.from_numpy(cluster % NUM_CLASSES)

    def initial(self) -> Array:
        """torch's default for linear layers: uniform within 1 / sqrt(inputs)."""
        generator = _generator(self._seed, 2)
        dimension, hidden = self._shapes[0]
        bounds = [bound for inputs in (dimension, hidden) for bound in (inputs**-0.5, inputs**-0.5)]
        parts = [generator.uniform(-bound, bound, size) for bound, size in zip(bounds, self._sizes, strict=True)]
        return numpy.concatenate(parts)

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _loss(self, parameters: Tensor, points: Tensor, labels: Tensor) -> Tensor:
        first, first_bias, second, second_bias = self._split(parameters)
        scores = torch.relu(points @ first + first_bias) @ second + second_bias
        return torch.nn.functional.cross_entropy(scores, labels)

    def _differentiate(self, x: Array, points: Tensor, labels: Tensor, out: Array) -> float:
        """Write the gradient of the mean loss on `points` into `out`; return that loss."""
        parameters = torch.from_numpy(x).requires_grad_()
        loss = self._loss(parameters, points, labels)
        (gradient,) = torch.autograd.grad(loss, parameters)
        torch.from_numpy(out).copy_(gradient)
        return float(loss.detach())

    def gradient(self, x: Array, worker: int, index: int, out: Array) -> float:
        return self._differentiate(x, *self._points(_generator(self._seed, 3, worker, index), BATCH), out)

    def loss(self, x: Array) -> float:
        with torch.no_grad():
            return float(self._loss(torch.from_numpy(x), *self._held_out))


def _generator(seed: int, part: int, worker: int = 0, index: int = 0) -> numpy.random.Generator:
    key = numpy.array([seed, 16 << 32], dtype=numpy.uint64)
    counter = numpy.array([0, index, worker, part], dtype=numpy.uint64)
    return numpy.random.Generator(numpy.random.Philox(key=key, counter=counter))


@dataclasses.dataclass(frozen=True)
class Watched(Rule):
    """`rule`, and the cosine of each arriving pseudo-gradient to the last one of every other worker, averaged."""

    local_steps: ClassVar[bool] = True

    rule: Rule
    cosines: list[float]
    """Filled by `arrive`, one per arrival from the second worker's on."""

    def init(self, like: Tensor) -> Any:
        return self.rule.init(like), {}

    def join(self, state: Any, worker: int, view: View) -> Reply:
        return self.rule.join(state[0], worker, view)

    def leave(self, state: Any, worker: int, view: View) -> Reply:
        return self.rule.leave(state[0], worker, view)

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        last: dict[int, Tensor] = state[1]
        unit = arrival.gradient / torch.linalg.vector_norm(arrival.gradient)
        others = [float(unit @ other) for worker, other in last.items() if worker != arrival.worker]
        if others:
            self.cosines.append(sum(others) / len(others))
        last[arrival.worker] = unit
        return self.rule.arrive(state[0], arrival, view)


def naive(rate: float, momentum: float, dynamic: bool = False) -> Rule:
    """Nesterov on every arrival as it comes."""
    return AsyncLocalSGD(LOCAL_STEPS, rate, momentum, period=1, dynamic=dynamic)


SYNC, PLAIN_SYNC = "sync, momentum .9, .7", "sync, no momentum, .7"
NAIVE, NAIVE_SMALL, NO_MOMENTUM = "async, momentum .9, .7", "async, momentum .9, .07", "async, no momentum, .7"
DELAYED, DYLU = "async, Delayed Nesterov, .7", "async, DyLU, momentum .9, .07"
BOTH, BUFFERED = "async, Delayed Nesterov + DyLU, .7", "buffered, FedBuff K = 4, .7"
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


def mixture(sizes: tuple[int, int, int, int], workers: int, seed: int) -> Instance:
    return Mixture(*sizes, seed=seed)


def times(workers: int, seed: int) -> Sampler:
    return fixed_times(SECONDS_PER_STEP)


class Run(NamedTuple):
    """One run: a row for each evaluation, and the cosine of each arrival."""

    looks: pandas.DataFrame
    cosines: list[float]

    @property
    def final(self) -> float:
        """The last loss; infinite for a run that diverged."""
        return float(self.looks.loss.iloc[-1])

    def at(self, column: str, value: float) -> float:
        """The loss at a point of "seconds" or "updates", between evaluations along a straight line."""
        return float(numpy.interp(value, self.looks[column], self.looks.loss))

    def seconds_to(self, loss: float) -> float:
        """When an evaluation first had `loss` or less; infinite if none had."""
        return float(self.looks.seconds[self.looks.loss <= loss].min()) if (self.looks.loss <= loss).any() else math.inf

    @property
    def late_cosine(self) -> float:
        """The mean over the second half."""
        return float(numpy.mean(self.cosines[len(self.cosines) // 2 :]))


def run_one(task: tuple[Arm, int]) -> Run:
    torch.set_num_threads(1)
    (arm, seed), cosines = task, list[float]()
    looks = curve(dataclasses.replace(arm, rule=Watched(arm.rule, cosines)), seed)
    return Run(looks, cosines)


def mean(values: list[float], form: str = ".4g") -> str:
    return format(float(numpy.mean(values)), form)


def arm_rows(runs: dict[str, list[Run]]) -> list[dict[str, object]]:
    early = min(own[0].looks.seconds.iloc[-1] for own in runs.values())
    target = float(numpy.mean([one.final for one in runs[SYNC]]))
    few = runs[SYNC][0].looks.updates.iloc[-1]
    rows: list[dict[str, object]] = []
    for name, own in runs.items():
        reached = float(numpy.median([one.seconds_to(target) for one in own]))
        last = own[0].looks.iloc[-1]
        row = {
            "method, outer learning rate": name,
            "updates": last.updates,
            "virtual s": f"{last.seconds:.0f}",
            "final loss, equal gradients [95 %]": interval([one.final for one in own]),
            f"loss after {few} updates": mean([one.at("updates", few) for one in own]),
            f"loss at {early:.0f} s": mean([one.at("seconds", early) for one in own]),
            "median s to sync's final loss": f"{reached:.0f}" if math.isfinite(reached) else "-",
            "cosine": mean([one.late_cosine for one in own], ".3f"),
        }
        rows.append(row)
    return rows


def headline_rows(runs: dict[str, list[Run]], swept: dict[str, dict[float, float]]) -> list[dict[str, object]]:
    """The paper's sentences beside what was measured."""
    few = runs[SYNC][0].looks.updates.iloc[-1]
    final = {name: mean([one.final for one in own]) for name, own in runs.items()}
    early = {name: mean([one.at("updates", few) for one in own]) for name, own in runs.items()}
    cosine = {name: mean([one.late_cosine for one in own], ".3f") for name, own in runs.items()}
    best = {name: min((loss, rate) for rate, loss in losses.items()) for name, losses in swept.items()}
    tried = ", ".join(f"{rate:g}" for rate in next(iter(swept.values())))
    said = {
        "(i) momentum .9: async needs .07 for sync's .7": (
            f"best of {tried}: " + "; ".join(f"{name} {rate:g} ({loss:.4g})" for name, (loss, rate) in best.items())
        ),
        "(i) and is worse per update": (
            f"after {few} updates {early[NAIVE_SMALL]} at .07, {early[NAIVE]} at .7, sync {early[SYNC]}; at equal "
            f"gradients {final[NAIVE_SMALL]}, {final[NAIVE]}, {final[SYNC]}"
        ),
        "(ii) async with momentum 0 and .7 is better": (
            f"after {few} updates {early[NO_MOMENTUM]} for {early[NAIVE_SMALL]}; at equal gradients "
            f"{final[NO_MOMENTUM]} for {final[NAIVE_SMALL]}"
        ),
        "(iii) pseudo-gradients become orthogonal": (
            f"cosine {cosine[SYNC]} sync, {cosine[NO_MOMENTUM]} async without momentum"
        ),
        "(iv) Delayed Nesterov repairs": (
            f"after {few} updates {early[DELAYED]} for {early[NAIVE]}; at equal gradients {final[DELAYED]} for "
            f"{final[NAIVE]}, sync {final[SYNC]}"
        ),
        "(iv) DyLU repairs": (
            f"at equal gradients {final[DYLU]} with .9 and .07, for {final[NAIVE_SMALL]} without DyLU"
        ),
        "(iv) both": f"at equal gradients {final[BOTH]}",
    }
    return [{"published": sentence, "here": measured} for sentence, measured in said.items()]


def make(flags: argparse.Namespace) -> None:
    sizes, total, peak = ((128, 1, 32, 1024), 1600, 4e-4) if flags.quick else ((512, 1, 64, 2048), 4800, 2e-4)
    num_seeds = flags.seeds or (2 if flags.quick else 3)
    schedule = functools.partial(cosine_schedule, total, peak)
    problem = functools.partial(mixture, sizes)
    more = {"inner": OptimizerRecipe(AdamW(), weight_decay=WEIGHT_DECAY)}

    def arm(name: str, rule: Rule) -> Arm:
        return Arm(name, rule, schedule, problem, times, len(SECONDS_PER_STEP), Budget(samples=total), 40, more=more)

    tasks = [(arm(name, rule), seed) for name, rule in RULES.items() for seed in range(num_seeds)]
    rates = (0.07, 0.7) if flags.quick else SWEEP
    tasks += [(arm(name, rule), SWEEP_SEED) for rate in rates for name, rule in families(rate).items()]
    done = each(run_one, tasks, flags.jobs)
    runs = {name: [next(done) for _ in range(num_seeds)] for name in RULES}
    swept: dict[str, dict[float, float]] = {name: {} for name in families(0.7)}
    for rate in rates:
        for losses in swept.values():
            losses[rate] = next(done).final

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
    write(flags.out, "async_diloco", arm_rows(runs), note)
    note = f"{setting}. Mean losses over seeds; the sweep is of one other seed."
    write(flags.out, "headlines", headline_rows(runs, swept), note)

    looks = pandas.concat([one.looks for own in runs.values() for one in own])
    small_print = setting + ".\nLine: mean, band: 95 % interval over seeds by Student's t (from 3 seeds on)."
    clocks = {"updates": "updates at the server", "samples": "gradients", "seconds": "virtual seconds"}
    limits = 0.9 * looks.loss.min(), 1.15 * looks.loss.iloc[0]
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "fontsize": 8, "frameon": False}
    with picture(flags.out / "losses.png", 3, "Asynchronous DiLoCo by three clocks", small_print) as axes:
        for axis, (clock, label) in zip(axes, clocks.items(), strict=True):
            draw(axis, looks, clock, xlabel=label, ylabel="held-out loss (nats)", ylim=limits)
            axis.legend().remove()
        axes[0].set(xscale="symlog", xlim=(0, None))
        axes[1].legend(ncols=3, **below)

    small_print = (
        setting + ".\nLeft: one seed, not used elsewhere; missing points diverged. "
        "Right: mean over seeds, running mean of 40 arrivals."
    )
    with picture(flags.out / "outer.png", 2, "The outer step", small_print) as (sweep, cosine):
        for (name, losses), colour, marker in zip(swept.items(), COLOURS, "osD", strict=False):
            sweep.plot(rates, [losses[rate] for rate in rates], color=colour, marker=marker, ms=5, label=name)
        sweep.set(xscale="log", xlabel="outer learning rate", ylabel="final held-out loss (nats)")
        sweep.set_xticks(rates, [f"{rate:g}" for rate in rates])
        sweep.minorticks_off()
        for place, name in enumerate((SYNC, PLAIN_SYNC, NAIVE, NAIVE_SMALL, NO_MOMENTUM, DELAYED)):
            length = min(len(one.cosines) for one in runs[name])
            over_seeds = numpy.mean([one.cosines[:length] for one in runs[name]], axis=0)
            smooth = numpy.convolve(over_seeds, numpy.full(40, 1 / 40), mode="valid")
            x = (numpy.arange(len(smooth)) + 40) * LOCAL_STEPS
            cosine.plot(x, smooth, color=COLOURS[place], label=name)
        cosine.axhline(0.0, color="0.5", linewidth=0.8)
        cosine.set(xlabel="gradients", ylabel="cosine of two pseudo-gradients")
        for axis in (sweep, cosine):
            axis.legend(ncols=2, **below)


def main(argv: list[str] | None = None) -> int:
    return run_script(make, "async_diloco", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
