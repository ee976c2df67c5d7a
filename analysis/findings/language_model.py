"""What the runs of comparisons show: arms against a reference, seconds to a loss on a grid.

They are those of ``experiments/language_model.py`` and ``experiments/parallelism.py``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.curves import reached
from analysis.findings.costs import Cost, cost_of
from analysis.judge import Verdict, answer, of_numbers
from analysis.statistics.intervals import Interval, difference_of, t_interval
from analysis.study.curves import curve_of
from analysis.study.run import Run, load_runs
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FINISHED
from asyncsgd.settings.yaml_reader import read_yaml

CONFIG = "config.yaml"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm of a comparison, of one model, against the reference on the same seeds."""

    comparison: str
    model: str
    name: str
    reference: str
    margin: float
    loss: Interval
    """At the end, after equal samples; mean and t interval over seeds."""
    perplexity: Interval | None
    """e to `loss`: the geometric mean over seeds; None where the task has none."""
    samples_per_second: Interval
    cost: Cost
    diverged: int = 0
    """Runs whose loss was no number in the end. They are in no other number, so an arm with any is not judged."""
    difference: Interval | None = None
    """Of the loss, arm - reference; None for the reference, as the next ones, and where a run of either diverged."""
    question: dict[str, Any] | None = None
    """Of the difference, before it is judged with those of the other arms."""
    p_holm: float | None = None
    """Adjusted for all arms of the comparison."""
    verdict: Verdict | None = None
    speed: Interval | None = None
    """Geometric mean of the ratios of samples a second, arm / reference."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the grid of a model."""

    model: str
    learning_rate: float
    batch_size: int
    seq_len: int
    threshold: float
    seconds: Interval | None
    """To the threshold, over the seeds that reached it; None where none did."""
    reached: int
    n: int
    """Runs, those that diverged among them; they reached nothing."""
    loss: Interval | None
    """Over the runs that did not diverge; None where all did, as the next one."""
    samples_per_second: Interval | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """All of it; `curves` has the runs of every arm, by comparison and model."""

    name: str
    arms: tuple[Arm, ...]
    grid: tuple[Point, ...]
    curves: Mapping[tuple[str, str], Mapping[str, Sequence[Run]]]
    references: Mapping[str, str]
    """By comparison, the name of the arm that the others are compared with."""
    left_out: tuple[str, ...]
    num_seeds: int


def read(folder: Path) -> Findings:
    """Read the folder of all runs and compute what they show.

    Raises:
        UsageError: if it is no folder of ``experiments/language_model.py``, or holds no finished run.
    """
    try:
        config = read_yaml((folder / CONFIG).read_text(encoding="utf-8"), CONFIG)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is no folder of experiments/language_model.py or parallelism.py ({error}); make one: python "
            f"experiments/language_model.py experiments/configs/language_model-quick.yaml"
        ) from error
    runs, problems = load_runs(folder)
    left_out = [f"{run.name}: {run.status}" for run in runs if not run.done] + problems
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        arm, _, seed = run.name.rpartition("/s")
        if run.status in FINISHED and seed.isdigit():
            found.setdefault(arm, {})[int(seed)] = run
    if not found:
        raise UsageError(f"{folder} holds no finished run; run the experiment again")
    models = list(config["models"])
    arms: list[Arm] = []
    curves = {}
    comparisons = config.get("comparisons") or {}
    for name, comparison in comparisons.items():
        of_models = [_compared(name, comparison, model, found) for model in models]
        arms += _judged([arm for arms_of_model in of_models for arm in arms_of_model])
        for model in models:
            given = {arm: _done(found.get(f"{name}/{model}/{arm}", {})) for arm in comparison["arms"]}
            curves[name, model] = {arm: of_arm for arm, of_arm in given.items() if of_arm}
    grid = config.get("grid")
    points = () if not grid else tuple(point for model in models for point in _grid(model, grid, found))
    return Findings(
        str(config["name"]),
        tuple(arms),
        points,
        curves,
        {name: str(comparison["reference"]) for name, comparison in comparisons.items()},
        tuple(left_out),
        max(len(seeds) for seeds in found.values()),
    )


def _compared(name: str, given: Mapping[str, Any], model: str, found: Mapping[str, Mapping[int, Run]]) -> list[Arm]:
    """The arms of one model, not yet judged."""
    reference = found.get(f"{name}/{model}/{given['reference']}", {})
    arms = []
    for arm in given["arms"]:
        runs = found.get(f"{name}/{model}/{arm}", {})
        done = _done(runs)
        if not done:
            continue
        described = Arm(
            comparison=name,
            model=model,
            name=arm,
            reference=given["reference"],
            margin=float(given["margin"]),
            loss=(loss := t_interval(list(_losses(done)))),
            perplexity=loss.mapped(math.exp) if all("perplexity" in run.metrics for run in done) else None,
            samples_per_second=t_interval([run.summary["samples_per_second"] for run in done]),
            cost=cost_of(done),
            diverged=len(runs) - len(done),
        )
        seeds = sorted(set(runs) & set(reference))
        whole = all(side[seed].done for side in (runs, reference) for seed in seeds)
        if arm != given["reference"] and seeds and whole:
            pairs = [(runs[seed], reference[seed]) for seed in seeds]
            described = _paired(described, pairs)
        arms.append(described)
    return arms


def _paired(arm: Arm, pairs: Sequence[tuple[Run, Run]]) -> Arm:
    ours, theirs = (list(_losses(side)) for side in zip(*pairs, strict=True))
    logs = [math.log(a.summary["samples_per_second"] / b.summary["samples_per_second"]) for a, b in pairs]
    return dataclasses.replace(
        arm,
        difference=difference_of(ours, theirs),
        question=of_numbers(ours, theirs, margin=arm.margin),
        speed=t_interval(logs).mapped(math.exp),
        verdict=Verdict("undecided", "nothing varied"),
    )


def _judged(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with p adjusted for all comparisons of one kind whose differences vary, and a word each."""
    tested = [arm for arm in arms if arm.difference is not None and _varies(arm.difference)]
    rows = answer([arm.question for arm in tested if arm.question is not None]) if tested else []
    judged = {
        id(arm): dataclasses.replace(arm, p_holm=row["p_holm"], verdict=Verdict(row["word"], row["reason"]))
        for arm, row in zip(tested, rows, strict=True)
    }
    return [judged.get(id(arm), arm) for arm in arms]


def _varies(difference: Interval) -> bool:
    return difference.n < 2 or difference.low is not None


def _grid(model: str, given: Mapping[str, Any], found: Mapping[str, Mapping[int, Run]]) -> Iterable[Point]:
    threshold = float(given["threshold"][model])
    for rate, batch, length in itertools.product(given["learning_rate"], given["batch_size"], given["seq_len"]):
        runs = found.get(f"grid/{model}/lr{float(rate):g}-b{batch}-l{length}", {})
        if not runs:
            continue
        done = _done(runs)
        times = [reached(curve_of(run, "train_seconds"), threshold) for run in done]
        there = [seconds for seconds in times if math.isfinite(seconds)]
        yield Point(
            model,
            float(rate),
            int(batch),
            int(length),
            threshold,
            t_interval(there) if there else None,
            len(there),
            len(runs),
            t_interval(list(_losses(done))) if done else None,
            t_interval([run.summary["samples_per_second"] for run in done]) if done else None,
        )


def _done(runs: Mapping[int, Run]) -> list[Run]:
    return [run for run in runs.values() if run.done]


def _losses(runs: Iterable[Run]) -> Iterable[float]:
    return (float(run.summary["final_eval_loss"]) for run in runs)
