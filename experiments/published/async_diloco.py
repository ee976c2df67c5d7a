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
import math
import sys
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor

from asyncsgd.optimizers import AdamW, OptimizerRecipe
from asyncsgd.rules import AsyncLocalSGD, DiLoCo, FedBuff, Rule
from asyncsgd.rules.base import Arrival, Reply, View
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.simulate import simulate
from reproduction import COLOURS, draw_curve, each, interval, picture, progress, run_script, script_parser, write_table
from watched import fixed_times

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
        self.num_workers = len(SECONDS_PER_STEP)
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
        self._check(worker, index)
        return self._differentiate(x, *self._points(_generator(self._seed, 3, worker, index), BATCH), out)

    def exact_gradient(self, x: Array) -> Array:
        out = numpy.empty(self.num_parameters)
        self._differentiate(x, *self._held_out, out)
        return out

    def loss(self, x: Array) -> float:
        with torch.no_grad():
            return float(self._loss(torch.from_numpy(x), *self._held_out))

    def optimum(self) -> Array | None:
        return None


def _generator(seed: int, part: int, worker: int = 0, index: int = 0) -> numpy.random.Generator:
    key = numpy.array([seed, 16 << 32], dtype=numpy.uint64)
    counter = numpy.array([0, index, worker, part], dtype=numpy.uint64)
    return numpy.random.Generator(numpy.random.Philox(key=key, counter=counter))


@dataclasses.dataclass(frozen=True)
class Watched(Rule):
    """`rule`, and the cosine of each arriving pseudo-gradient to the last one of every other worker, averaged."""

    name: ClassVar[str] = "watched"
    summary: ClassVar[str] = "another rule, with the cosines of its pseudo-gradients"
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


class Arm(NamedTuple):
    label: str
    rule: Rule
    style: str


def naive(rate: float, momentum: float, dynamic: bool = False) -> Rule:
    """Nesterov on every arrival as it comes."""
    return AsyncLocalSGD(LOCAL_STEPS, rate, momentum, period=1, dynamic=dynamic)


ARMS = (
    Arm("sync, momentum .9, .7", DiLoCo(LOCAL_STEPS, 0.7, 0.9), "-"),
    Arm("sync, no momentum, .7", DiLoCo(LOCAL_STEPS, 0.7, 0.0), "--"),
    Arm("async, momentum .9, .7", naive(0.7, 0.9), "-"),
    Arm("async, momentum .9, .07", naive(0.07, 0.9), "-"),
    Arm("async, no momentum, .7", naive(0.7, 0.0), "--"),
    Arm("async, Delayed Nesterov, .7", AsyncLocalSGD(LOCAL_STEPS, 0.7, 0.9, period=4), "-"),
    Arm("async, DyLU, momentum .9, .07", naive(0.07, 0.9, dynamic=True), ":"),
    Arm("async, Delayed Nesterov + DyLU, .7", AsyncLocalSGD(LOCAL_STEPS, 0.7, 0.9, period=4, dynamic=True), ":"),
    Arm("buffered, FedBuff K = 4, .7", FedBuff(4, LOCAL_STEPS, 0.7), "--"),
)
SYNC, PLAIN_SYNC, NAIVE, NAIVE_SMALL, NO_MOMENTUM, DELAYED, DYLU, BOTH, BUFFERED = range(len(ARMS))

SWEEP = (0.035, 0.07, 0.14, 0.35, 0.7)
"""Outer learning rates of the sweep."""
FAMILIES = ("sync, momentum .9", "async, momentum .9", "async, no momentum")
SWEEP_SEED, FIRST_SEED = 1000, 0


def family_rule(family: int, rate: float) -> Rule:
    return (DiLoCo(LOCAL_STEPS, rate, 0.9), naive(rate, 0.9), naive(rate, 0.0))[family]


class Task(NamedTuple):
    sizes: tuple[int, int, int, int]
    """Of `Mixture`."""
    num_gradients: int
    peak_rate: float
    """Inner learning rate at the start."""
    rule: Rule
    seed: int


class Curve(NamedTuple):
    losses: list[float]
    versions: list[int]
    gradients: list[int]
    seconds: list[float]
    cosines: list[float]

    @property
    def final(self) -> float:
        """The last loss; infinite for a run that diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    def at_second(self, seconds: float) -> float:
        """The loss at a point of virtual time, between evaluations along a straight line."""
        return float(numpy.interp(seconds, self.seconds, self.losses))

    def at_update(self, version: float) -> float:
        return float(numpy.interp(version, self.versions, self.losses))

    def seconds_to(self, loss: float) -> float:
        """When an evaluation first had `loss` or less; infinite if none had."""
        return next((at for at, value in zip(self.seconds, self.losses, strict=True) if value <= loss), math.inf)

    @property
    def late_cosine(self) -> float:
        """The mean over the second half."""
        return float(numpy.mean(self.cosines[len(self.cosines) // 2 :]))


def run_one(task: Task) -> Curve:
    torch.set_num_threads(1)
    cosines: list[float] = []
    total = task.num_gradients

    def schedule(num_gradients: int) -> float:
        share = min(1.0, num_gradients / total)
        return LAST_RATE + (task.peak_rate - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * share))

    done = simulate(
        Watched(task.rule, cosines),
        Mixture(*task.sizes, seed=task.seed),
        fixed_times(SECONDS_PER_STEP),
        num_workers=len(SECONDS_PER_STEP),
        learning_rate=schedule,
        budget=Budget(samples=total),
        evaluations=40,
        inner=OptimizerRecipe(AdamW(), weight_decay=WEIGHT_DECAY),
    )
    points = done.evaluations
    losses = [point.loss for point in points]
    if done.result.status != "DONE":
        losses[-1] = math.inf
    return Curve(
        losses,
        [point.version for point in points],
        [point.total_samples for point in points],
        [point.train_seconds for point in points],
        cosines,
    )


def run(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    num_seeds = arguments.seeds or (2 if quick else 3)
    sizes, total, peak = ((128, 1, 32, 1024), 1600, 4e-4) if quick else ((512, 1, 64, 2048), 4800, 2e-4)
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    tasks = [Task(sizes, total, peak, arm.rule, seed) for arm in ARMS for seed in seeds]
    curves: list[list[Curve]] = [[]]
    for curve in each(run_one, tasks, arguments.jobs):
        curves[-1].append(curve)
        if len(curves[-1]) == num_seeds:
            final = interval([each_of.final for each_of in curves[-1]])
            progress(f"{ARMS[len(curves) - 1].label}: final loss {final:.4g}")
            curves.append([])
    curves.pop()
    pairs = [(family, rate) for family in range(len(FAMILIES)) for rate in ((0.07, 0.7) if quick else SWEEP)]
    tasks = [Task(sizes, total, peak, family_rule(*pair), SWEEP_SEED) for pair in pairs]
    swept: dict[tuple[int, float], float] = {}
    for pair, curve in zip(pairs, each(run_one, tasks, arguments.jobs), strict=True):
        swept[pair] = curve.final
        progress(f"sweep, {FAMILIES[pair[0]]}, outer learning rate {pair[1]:g}: final loss {curve.final:.4g}")

    dimension, clusters, hidden, held_out = sizes
    setting = (
        f"{NUM_CLASSES} classes of {clusters} cluster{'s' if clusters > 1 else ''} in R^{dimension}, MLP "
        f"{dimension}-{hidden}-{NUM_CLASSES}, {total:,} gradients of {BATCH} points, H = {LOCAL_STEPS}, 4 workers of "
        f"{', '.join(map(str, SECONDS_PER_STEP))} s per step; loss on {held_out:,} held-out points; {num_seeds} "
        f"seed{'s' if num_seeds > 1 else ''}"
    )
    print(arm_table(arguments.out, setting, curves))
    print(headline_table(arguments.out, setting, curves, swept))
    setting += " (--quick)" if quick else ""
    draw_losses(arguments.out, setting, curves)
    draw_outer(arguments.out, setting, curves, swept)
    for name in ("async_diloco.md", "async_diloco.csv", "headlines.md", "headlines.csv", "losses.png", "outer.png"):
        print(arguments.out / name)


def arm_table(out: Any, setting: str, curves: list[list[Curve]]) -> str:
    early = min(runs[0].seconds[-1] for runs in curves)
    target = float(numpy.mean([curve.final for curve in curves[SYNC]]))
    few = curves[SYNC][0].versions[-1]
    rows = []
    for arm, runs in zip(ARMS, curves, strict=True):
        reached = float(numpy.median([curve.seconds_to(target) for curve in runs]))
        rows.append(
            [
                arm.label,
                str(runs[0].versions[-1]),
                f"{runs[0].seconds[-1]:.0f}",
                interval([curve.final for curve in runs]),
                f"{numpy.mean([curve.at_update(few) for curve in runs]):.4g}",
                f"{numpy.mean([curve.at_second(early) for curve in runs]):.4g}",
                f"{reached:.0f}" if math.isfinite(reached) else "-",
                f"{numpy.mean([curve.late_cosine for curve in runs]):.3f}",
            ]
        )
    headings = (
        "method, outer learning rate",
        "updates",
        "virtual s",
        "final loss, equal gradients [95 %]",
        f"loss after {few} updates",
        f"loss at {early:.0f} s",
        "median s to sync's final loss",
        "cosine",
    )
    note = (
        f"{setting}. Cosine: of an arriving pseudo-gradient to the last one of each other worker, mean over the second "
        "half of the run. - : not reached by half of the seeds or more."
    )
    return write_table(out, "async_diloco", headings, rows, note)


def headline_table(out: Any, setting: str, curves: list[list[Curve]], swept: dict[tuple[int, float], float]) -> str:
    """The paper's sentences beside what was measured."""

    def final(arm: int) -> str:
        return f"{numpy.mean([curve.final for curve in curves[arm]]):.4g}"

    def cosine(arm: int) -> str:
        return f"{numpy.mean([curve.late_cosine for curve in curves[arm]]):.3f}"

    rates = sorted({rate for _, rate in swept})
    best = [min((swept[family, rate], rate) for rate in rates)[1] for family in range(len(FAMILIES))]
    bests = "; ".join(
        f"{name} {rate:g} ({swept[k, rate]:.4g})" for k, (name, rate) in enumerate(zip(FAMILIES, best, strict=True))
    )
    few = curves[SYNC][0].versions[-1]

    def early(arm: int) -> str:
        return f"{numpy.mean([curve.at_update(few) for curve in curves[arm]]):.4g}"

    tried = ", ".join(f"{rate:g}" for rate in rates)
    rows = [
        ["(i) momentum .9: async needs .07 for sync's .7", f"best of {tried}: {bests}"],
        [
            "(i) and is worse per update",
            f"after {few} updates {early(NAIVE_SMALL)} at .07, {early(NAIVE)} at .7, sync {early(SYNC)}; at equal "
            f"gradients {final(NAIVE_SMALL)}, {final(NAIVE)}, {final(SYNC)}",
        ],
        [
            "(ii) async with momentum 0 and .7 is better",
            f"after {few} updates {early(NO_MOMENTUM)} for {early(NAIVE_SMALL)}; at equal gradients "
            f"{final(NO_MOMENTUM)} for {final(NAIVE_SMALL)}",
        ],
        [
            "(iii) pseudo-gradients become orthogonal",
            f"cosine {cosine(SYNC)} sync, {cosine(NO_MOMENTUM)} async without momentum",
        ],
        [
            "(iv) Delayed Nesterov repairs",
            f"after {few} updates {early(DELAYED)} for {early(NAIVE)}; at equal gradients {final(DELAYED)} for "
            f"{final(NAIVE)}, sync {final(SYNC)}",
        ],
        [
            "(iv) DyLU repairs",
            f"at equal gradients {final(DYLU)} with .9 and .07, for {final(NAIVE_SMALL)} without DyLU",
        ],
        ["(iv) both", f"at equal gradients {final(BOTH)}"],
    ]
    note = f"{setting}. Mean losses over seeds; the sweep is of one other seed."
    return write_table(out, "headlines", ("published", "here"), rows, note)


def draw_losses(out: Any, setting: str, curves: list[list[Curve]]) -> None:
    small_print = setting + ".\nLine: mean, band: 95 % interval over seeds by Student's t (from 3 seeds on)."
    with picture(out / "losses.png", 3, title="Asynchronous DiLoCo by three clocks", small_print=small_print) as axes:
        for arm, runs in enumerate(curves):
            losses, look = [curve.losses for curve in runs], (ARMS[arm].label, COLOURS[arm], ARMS[arm].style)
            draw_curve(axes[0], runs[0].versions, losses, *look)
            draw_curve(axes[1], runs[0].gradients, losses, *look)
            draw_curve(axes[2], runs[0].seconds, losses, *look)
        finals = [curve.final for runs in curves for curve in runs if math.isfinite(curve.final)]
        top = 1.15 * curves[SYNC][0].losses[0]
        for axis, label in zip(axes, ("updates at the server", "gradients", "virtual seconds"), strict=True):
            axis.set(xlabel=label, ylabel="held-out loss (nats)", ylim=(0.9 * min(finals), top))
        axes[0].set(xscale="symlog", xlim=(0, None))
        axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=8, frameon=False)


def draw_outer(out: Any, setting: str, curves: list[list[Curve]], swept: dict[tuple[int, float], float]) -> None:
    small_print = (
        setting + ".\nLeft: one seed, not used elsewhere; missing points diverged. "
        "Right: mean over seeds, running mean of 40 arrivals."
    )
    colours = (COLOURS[SYNC], COLOURS[NAIVE], COLOURS[NO_MOMENTUM])
    with picture(out / "outer.png", 2, title="The outer step", small_print=small_print) as (sweep, cosine):
        for family, (name, colour, marker) in enumerate(zip(FAMILIES, colours, "osD", strict=True)):
            points = [(rate, loss) for (which, rate), loss in swept.items() if which == family and math.isfinite(loss)]
            sweep.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=5, label=name)
        rates = sorted({rate for _, rate in swept})
        sweep.set(xscale="log", xlabel="outer learning rate", ylabel="final held-out loss (nats)")
        sweep.set_xticks(rates, [f"{rate:g}" for rate in rates])
        sweep.minorticks_off()
        for arm in (SYNC, PLAIN_SYNC, NAIVE, NAIVE_SMALL, NO_MOMENTUM, DELAYED):
            length = min(len(curve.cosines) for curve in curves[arm])
            mean = numpy.mean([curve.cosines[:length] for curve in curves[arm]], axis=0)
            smooth = numpy.convolve(mean, numpy.full(40, 1 / 40), mode="valid")
            x = (numpy.arange(len(smooth)) + 40) * LOCAL_STEPS
            cosine.plot(x, smooth, ARMS[arm].style, color=COLOURS[arm], label=ARMS[arm].label)
        cosine.axhline(0.0, color="0.5", linewidth=0.8)
        cosine.set(xlabel="gradients", ylabel="cosine of two pseudo-gradients")
        for axis in (sweep, cosine):
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)


def main(argv: list[str] | None = None) -> int:
    return run_script(run, script_parser(__doc__, "async_diloco"), argv)


if __name__ == "__main__":
    sys.exit(main())
