"""Does BatchNorm pay more for staleness than GroupNorm?

    python experiments/norm_under_delay.py

ResNet-8 of ``own_resnet.py`` on the virtual clock, gradients exactly 0, 3, 7 and 15 updates old. The cost of a delay is

    cost(arm, d) = final loss at delay d - final loss at delay 0, of the same seed

and a difference of the config is cost(arm, d) - cost(reference, d) at each delay above 0. It is tested over seeds by
the exact sign-flip test, with Holm's correction within the difference. Learning rates are tuned for each arm and delay
on seeds of their own, and a best rate at an end of the grid widens the grid of all. ``registered.json`` has the config
and the rates before the first test run begins; a folder with another config is refused. The same command goes on where
it was stopped.

A config with other arms asks another question in the same way, e.g. about two optimizers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from asyncsgd.backends.launch import Launch
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import DONE, FINISHED, read_json
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.run.choose_folder import open_run_folder, read_summary
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.numbers import out_of_bounds
from asyncsgd.settings.shipped import CONFIGS
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.config import (
    FolderPart,
    Keys,
    PositiveFloat,
    Seeds,
    Settings,
    StudyName,
    check_seeds,
    read_config,
    typed,
)

CONFIG = CONFIGS / "norm_under_delay.yaml"
REGISTERED = "registered.json"
MOST_WIDENED = 6
"""With so many learning rates beside those of the config, tuning gives up."""
Delay = Annotated[int, Meta(ge=0)]


class Config(Keys, frozen=True, kw_only=True):
    """The file of a study of what delays cost."""

    name: StudyName
    arms: Annotated[dict[FolderPart, Settings], Meta(min_length=2)]
    delays: Annotated[tuple[Delay, ...], Meta(min_length=2)]
    rates: Annotated[tuple[PositiveFloat, ...], Meta(min_length=3)]
    tuning_seeds: Seeds
    seeds: Seeds
    differences: Annotated[dict[str, tuple[str, str]], Meta(min_length=1)]
    """Family -> the arm whose costs are compared, and the one that they are compared with."""
    base: Settings = msgspec.field(default_factory=dict)
    rates_of: dict[str, str] = msgspec.field(default_factory=dict)
    """Arm -> the arm whose learning rates it has."""

    def __post_init__(self) -> None:
        named = {*self.rates_of, *self.rates_of.values(), *itertools.chain.from_iterable(self.differences.values())}
        if unknown := sorted(named - self.arms.keys()):
            raise ValueError(f"{unknown[0]} is none of the arms {', '.join(self.arms)}")
        if self.delays[0] != 0 or list(self.delays) != sorted({*self.delays}):
            raise ValueError("delays must begin with 0 and rise: a cost is a difference from delay 0")
        check_seeds("seeds", self.seeds)
        check_seeds("tuning_seeds", self.tuning_seeds)
        why = ": a seed that chose a rate cannot test it"
        check_seeds("seeds and tuning_seeds", (*self.seeds, *self.tuning_seeds), why)
        for arm, other in self.rates_of.items():
            if other in self.rates_of:
                raise ValueError(f"rates_of gives {arm} the rates of {other}, which has none of its own")

    @property
    def tuned(self) -> list[str]:
        return [arm for arm in self.arms if arm not in self.rates_of]


class Trial(NamedTuple):
    """One run."""

    arm: str
    delay: int
    rate: float
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.arm}/d{self.delay}/lr{self.rate:g}/s{self.seed}"


def settings_of(config: Config, trial: Trial) -> dict[str, Any]:
    """What a run is, as settings of own_resnet.py."""
    delay = {"clock": "virtual", "nproc": trial.delay + 1, "rule": f"fixed_delay:delay={trial.delay}"}
    return {**config.base, **config.arms[trial.arm], **delay, "learning_rate": trial.rate, "seed": trial.seed}


def made(config: Config, out: Path, trial: Trial) -> dict[str, Any]:
    """The summary of a run, which is made where it is not there."""
    from asyncsgd.run.lifecycle import carry_out
    from asyncsgd.run.run import run_of
    from own_resnet import Images

    folder = out / trial.folder
    summary = read_summary(folder)
    if summary.get("status") not in FINISHED:
        folder.parent.mkdir(parents=True, exist_ok=True)
        settings = task_flags(Images).make({**settings_of(config, trial), "run_dir": str(folder)})
        run = dataclasses.replace(run_of("own_resnet", settings), saves_model=False)
        opened = open_run_folder(run, "python experiments/norm_under_delay.py")
        ended = carry_out(run, Launch(settings.job.nproc, None, False), opened, None, quiet=True)
        if ended.unexpected is not None:
            raise ended.unexpected
        summary = dict(ended.summary)
        if summary["status"] not in FINISHED:
            raise RunError(f"{folder} is {summary['status']}: {summary['message']}")
    return {key: summary.get(key) for key in ("status", "final_eval_loss", "parameters_sha256")}


def loss_of(summary: Mapping[str, Any]) -> float:
    """The final loss; infinite of a run that diverged."""
    return float(summary["final_eval_loss"]) if summary["status"] == DONE else math.inf


Summaries = dict[Trial, dict[str, Any]]
Make = Callable[[Iterable[Trial]], Summaries]
"""Makes runs that are not there, and gives the summary of each."""


def side_by_side(config: Config, out: Path, pool: ProcessPoolExecutor, stop: StopRequest) -> Make:
    """Make runs in the processes of a pool, in the folder `out`. What has begun is finished when asked to stop."""

    def make(trials: Iterable[Trial]) -> Summaries:
        several = list(trials)
        summaries: Summaries = {}
        try:
            for trial, summary in zip(several, pool.map(functools.partial(made, config, out), several), strict=True):
                stop.check()
                summaries[trial] = summary
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return summaries

    return make


def tuned(config: Config, make: Make) -> dict[str, dict[int, float]]:
    """The learning rate of each arm at each delay: the lowest mean of the final losses of the tuning seeds.

    Raises:
        UsageError: if one is at an end of a grid with `MOST_WIDENED` rates more, as where nothing is learned.
    """
    rates = sorted(config.rates)
    while True:
        places = itertools.product(config.tuned, config.delays, rates, config.tuning_seeds)
        summaries = make(itertools.starmap(Trial, places))
        losses = {trial: loss_of(summary) for trial, summary in summaries.items()}
        best = {arm: {delay: best_rate(losses, arm, delay) for delay in config.delays} for arm in config.tuned}
        chosen = {rate for of_arm in best.values() for rate in of_arm.values()}
        ends = {rates[0], rates[-1]} & chosen
        if not ends:
            return best | {arm: best[other] for arm, other in config.rates_of.items()}
        if len(rates) >= len(config.rates) + MOST_WIDENED:
            raise UsageError(f"a best rate is at an end of {rates[0]:g} to {rates[-1]:g}; give base more samples")
        rates = sorted({*rates, *(rate / 2 if rate == rates[0] else rate * 2 for rate in ends)})
        print(f"rates  a best one was at an end of the grid, now {rates[0]:g} to {rates[-1]:g}", flush=True)


def at_rates(config: Config, rates: Mapping[str, Mapping[int, float]], make: Make) -> Summaries:
    """The summaries of the test runs, at the tuned rates."""
    places = itertools.product(config.arms, config.delays, config.seeds)
    return make(Trial(arm, delay, rates[arm][delay], seed) for arm, delay, seed in places)


def best_rate(losses: Mapping[Trial, float], arm: str, delay: int) -> float:
    """The rate with the lowest sum of losses; of equal ones the smallest."""
    sums: dict[float, float] = {}
    for trial, loss in losses.items():
        if (trial.arm, trial.delay) == (arm, delay):
            sums[trial.rate] = sums.get(trial.rate, 0.0) + loss
    return min(sorted(sums), key=sums.__getitem__)


Costs = Mapping[str, Mapping[int, Sequence[float]]]
"""Arm -> delay -> the cost of each seed, in their order: infinite where the run with the delay diverged, and nan where
the run without one did, so that nothing is known of the cost."""


def costs_of(config: Config, losses: Mapping[tuple[str, int, int], float]) -> Costs:
    """The costs of delays, from the final losses by arm, delay and seed.

    >>> given = {"arms": {"a": {}, "b": {}}, "delays": (0, 3), "seeds": (1, 2), "differences": {"primary": ("a", "b")}}
    >>> config = Config(name="x", rates=(1, 2, 3), tuning_seeds=(0,), **given)
    >>> losses = {("a", 0, 1): 1.0, ("a", 0, 2): 2.0, ("a", 3, 1): 1.5, ("a", 3, 2): 2.25}
    >>> costs_of(config, losses | {("b", delay, seed): 1.0 * seed for delay in (0, 3) for seed in (1, 2)})
    {'a': {3: [0.5, 0.25]}, 'b': {3: [0.0, 0.0]}}
    """
    costs: dict[str, dict[int, list[float]]] = {}
    for arm in config.arms:
        costs[arm] = {delay: [] for delay in config.delays[1:]}
        for delay, seed in itertools.product(config.delays[1:], config.seeds):
            without_delay = losses[arm, 0, seed]
            if math.isinf(without_delay):
                cost = math.nan
            else:
                cost = losses[arm, delay, seed] - without_delay
            costs[arm][delay].append(cost)
    return costs


def answers(config: Config, costs: Costs) -> list[dict[str, Any]]:
    """A row for each difference and delay, tested within its family on the seeds whose costs are known."""
    from analysis import answers

    rows = []
    for family, (arm, reference) in config.differences.items():
        delays = config.delays[1:]
        questions = []
        for delay in delays:
            pairs = list(zip(costs[arm][delay], costs[reference][delay], strict=True))
            known = [pair for pair in pairs if not np.isnan(pair).any()]
            ours = [pair[0] for pair in known]
            theirs = [pair[1] for pair in known]
            questions.append(answers.question_of_numbers(ours, theirs))
        for delay, row in zip(delays, answers.answer_family(questions), strict=True):
            named = {"family": family, "arm": arm, "reference": reference, "delay": delay}
            shown = ("estimate", "low", "high", "p", "p_holm", "word", "n")
            rows.append(named | {key: getattr(row, key) for key in shown})
    return rows


def text(config: Config, rates: Mapping[str, Any], losses: Mapping[tuple[str, int, int], float], same: int) -> str:
    """The tables and the sentences, in Markdown.

    Args:
        rates: by arm and delay.
        losses: final ones, by arm, delay and seed.
        same: pairs of runs of arms with one training whose parameters are equal, bit for bit.
    """
    costs = costs_of(config, losses)
    lines = ["| arm | delay | rate | final loss | cost of the delay |", "|---|---:|---:|---|---|"]
    for arm, delay in itertools.product(config.arms, config.delays):
        shown = mean_of([losses[arm, delay, seed] for seed in config.seeds])
        cost = mean_of(costs[arm][delay]) if delay else ""
        lines.append(f"| {arm} | {delay} | {rates[arm][delay]:g} | {shown} | {cost} |")
    lines += ["", "| difference of costs | delay | seeds | nats | p, Holm | its cost is |"]
    lines.append("|---|---:|---:|---|---:|---|")
    rows = answers(config, costs)
    for row in rows:
        between = f"{row['estimate']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        names = f"{row['family']}: {row['arm']} - {row['reference']}"
        lines.append(f"| {names} | {row['delay']} | {row['n']} | {between} | {row['p_holm']:.3f} | {row['word']} |")
    lines.append("")
    for family in config.differences:
        lines.append(sentence([row for row in rows if row["family"] == family]))
    if config.rates_of:
        whole = len(config.rates_of) * len(config.delays) * len(config.seeds)
        lines.append(f"{same} of {whole} pairs of runs that differ in what is evaluated have the same parameters.")
    return "\n".join(lines)


def mean_of(values: Sequence[float]) -> str:
    """The mean with its 95 % interval, or how many of the runs diverged.

    >>> mean_of([1.0, 2.0, 3.0]), mean_of([1.0, math.inf])
    ('2.000 [-0.484, 4.484]', '1 of 2 diverged')
    """
    from analysis.stats import t_interval

    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"{lost} of {len(values)} diverged"
    interval = t_interval(values)
    return f"{interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a family says.

    >>> row = {"family": "primary", "arm": "batch", "reference": "group", "delay": 3, "estimate": 0.25, "p_holm": 0.01}
    >>> sentence([row | {"word": "worse"}, row | {"delay": 7, "word": "undecided"}])
    'Primary: batch pays more than group for a delay of 3 updates (by 0.250 nats, p 0.010); at 7 updates undecided.'
    """
    words = {"worse": "pays more than", "better": "pays less than"}
    parts = []
    for row in rows:
        if row["word"] in words:
            how = f"{row['arm']} {words[row['word']]} {row['reference']} for a delay of {row['delay']} updates"
            parts.append(f"{how} (by {abs(row['estimate']):.3f} nats, p {row['p_holm']:.3f})")
        else:
            parts.append(f"at {row['delay']} updates {row['word']}")
    return f"{rows[0]['family'].capitalize()}: {'; '.join(parts)}."


def picture(config: Config, costs: Costs, path: Path) -> None:
    """Draw the mean cost of each delay with its 95 % interval, an arm a line. A delay at which a run of the arm has
    diverged has no point: the mean of the others would be that of those that bear the delay."""
    from analysis import plots
    from analysis.stats import t_interval

    drawn, (axes,) = plots.figure()
    for number, (arm, of_arm) in enumerate(costs.items()):
        shown = [t_interval(values if np.isfinite(values).all() else []) for values in of_arm.values()]
        places = [delay + 0.15 * (number - 1) for delay in of_arm]
        heights = [one.estimate for one in shown]
        ends = [[one.estimate - one.low for one in shown], [one.high - one.estimate for one in shown]]
        marker = plots.MARKERS[number % len(plots.MARKERS)]
        dash = plots.DASHES[number % len(plots.DASHES)]
        axes.errorbar(places, heights, ends, label=arm, marker=marker, ls=dash, capsize=3)
    axes.axhline(0.0, color=plots.MUTED, lw=0.8)
    axes.set(xlabel="delay (updates)", ylabel="cost (nats)", xticks=config.delays[1:])
    axes.legend(frameon=False)
    plots.save(drawn, path, ["png"])


def register(path: Path, content: Mapping[str, Any]) -> None:
    """Write what was fixed before the test runs, once.

    Raises:
        UsageError: if something else was.
    """
    if not path.exists():
        write_json(path, content)
    elif read_json(path) != json.loads(json.dumps(content)):
        raise UsageError(f"{path} registers another config or other rates; type another --out")


def run(argv: list[str], stop: StopRequest) -> int:
    flags = argparse.ArgumentParser(
        prog="norm_under_delay.py",
        description="Does BatchNorm pay more for staleness than GroupNorm?",
        allow_abbrev=False,
    )
    flags.add_argument("--config", type=Path, default=CONFIG, help=f"of the study (default: {CONFIG.name})")
    flags.add_argument("--out", type=Path, help="folder of the runs and of the results (default: runs/NAME)")
    flags.add_argument("--jobs", type=int, default=available_cores(), help="runs side by side (default: the cores)")
    given = flags.parse_args(argv)
    if wanted := out_of_bounds(given.jobs, at_least=1):
        raise UsageError(f"--jobs must be {wanted}, got {given.jobs}")
    config: Config = typed(read_config(given.config), Config, str(given.config))
    out = given.out or Path("runs") / config.name
    out.mkdir(parents=True, exist_ok=True)
    asked = msgspec.to_builtins(config)
    register(out / "config.json", asked)
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        make = side_by_side(config, out, pool, stop)
        rates = tuned(config, make)
        register(out / REGISTERED, {"config": asked, "rates": rates})
        runs = at_rates(config, rates, make)
    losses = {(trial.arm, trial.delay, trial.seed): loss_of(summary) for trial, summary in runs.items()}
    ends = {(trial.arm, trial.delay, trial.seed): summary["parameters_sha256"] for trial, summary in runs.items()}
    places = list(itertools.product(config.delays, config.seeds))
    same = sum(ends[arm, *place] == ends[other, *place] for arm, other in config.rates_of.items() for place in places)
    said = text(config, rates, losses, same)
    write_text(out / "results.md", said + "\n")
    picture(config, costs_of(config, losses), out / config.name)
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run, goes_on=True))
