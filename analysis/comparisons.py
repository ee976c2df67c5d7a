"""Arms against a reference on the same seeds, and seconds to a loss on a grid, as two tables.

They are made for the two special reports, `language_model` and `parallelism`, whose runs lie in
COMPARISON/MODEL/ARM/sSEED, and whose arms are read from the config and not from a plan.json. Runs without MODEL in
their path are those of another study, and are in no arm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pandas import DataFrame

from analysis.answers import MAX_UNEXPLAINED_SHARE, QuestionRow, answer_family, margin_in_words, question_of_numbers
from analysis.curves import crossing_at, unit_of
from analysis.gate import MAX_OTHER_LOAD, compare_arms, settings_that_differ
from analysis.measure import Measure
from analysis.read import read as read_study
from analysis.runs import Columns, rows_with
from analysis.stats import Interval, t_interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FINISHED, read_json
from asyncsgd.settings.yaml_reader import read_yaml

CONFIG = "config.yaml"
REPORTS_THAT_JUDGE = ("language_model", "parallelism", "speed_ladder")
"""Special reports whose verdicts replace those of the page; `analysis.special` has all special reports."""
DEFAULT_REPORT = "language_model"
"""The special report of a study whose config has models and names no report."""
Declared: TypeAlias = Mapping[str, Any]
"""What the config says of a comparison, of one of its arms, or of the grid."""
COSTS = (
    "computing",
    "waiting",
    "communicating",
    "applying",
    "tokens_per_second",
    "mfu",
    "busy_cores",
    "memory_gib",
    "gpu_gib",
)
"""Columns of `ArmOfComparison` that are means over runs, shown in a table of their own."""


class ArmOfComparison(NamedTuple):
    """A row of `Comparisons.arms`: an arm of one comparison, for one model, and what it shows against its reference.

    A number that is not known is nan.
    """

    comparison: str
    model: str
    arm: str
    reference: str
    """The arm that it is compared with."""
    unit: str
    """The unit of the loss."""
    margin: float
    """The margin of equivalence, in that unit."""
    runs: int
    """The number of finished runs."""
    diverged: int
    """How many of them diverged. They enter no other number, so an arm with any is not judged."""
    loss: Interval
    """Mean and t interval over seeds of the loss at the end, after equal samples."""
    perplexity: Interval
    """e to the loss: the geometric mean over seeds."""
    difference: Interval
    """The loss of the arm - the loss of the reference; not known where a run of either diverged."""
    p_holm: float
    """The p value of the difference, corrected for all arms of the comparison."""
    word: str
    """What the difference shows."""
    why: str
    """Why the runs of the arm and of the reference are not comparable."""
    about_margin: str
    """Why the margin is not used, or its share of the reference's improvement where that is above 10 %."""
    speed: Interval
    """The geometric mean of the ratios of samples a second, arm / reference."""
    no_speed: str
    """Why their seconds are not comparable."""
    samples_per_second: Interval
    """Mean and t interval over seeds."""
    computing: float
    """Share of the workers' time."""
    waiting: float
    """Share of the workers' time."""
    communicating: float
    """Share of the workers' time."""
    applying: float
    """Share of the training clock in which the server stepped."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilisation, of runs that had the machine for themselves."""
    busy_cores: float
    """Busy cores of all processes, of runs that had the machine for themselves."""
    memory_gib: float
    """The sum of the peaks of a run's processes."""
    gpu_gib: float
    """The same on GPUs."""


class GridPoint(NamedTuple):
    """A row of `Comparisons.grid`: the runs of one learning rate, batch size and sequence length."""

    model: str
    unit: str
    learning_rate: float
    batch: int
    length: int
    threshold: float
    """The loss to reach."""
    seconds: Interval
    """Seconds until runs reached it."""
    reached: int
    """How many runs reached it."""
    runs: int
    why: str
    """Why the runs are not comparable with those of the first point of their length; empty where they are."""
    loss: Interval
    """Loss at the end."""
    samples_per_second: Interval


class Comparisons(NamedTuple):
    """What was measured, as tables."""

    name: str
    runs: DataFrame
    """The finished ones, with their `comparison`, `model`, `arm` and `summary`; index `run`."""
    curves: DataFrame
    arms: DataFrame
    """Its rows are `ArmOfComparison`."""
    grid: DataFrame
    """Its rows are `GridPoint`."""
    left_out: list[str]

    @property
    def num_seeds(self) -> int:
        """The seeds of an arm of a comparison, or of a point of the grid where there is no comparison: the most."""
        runs = self.runs
        if len(self.arms):
            runs = runs[runs["comparison"].isin(self.arms["comparison"])]
        return int(runs.groupby(["comparison", "model", "arm"], dropna=False).size().max())


RUN_FOLDER = r"^(?P<comparison>[^/]+)/(?:(?P<model>[^/]+)/)?(?P<arm>[^/]+)/s(?P<seed>\d+)$"


def report_of(folder: Path) -> str | None:
    """The special report of the study in a folder; None where it has none."""
    try:
        config = _config(folder)
    except UsageError:
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("report")
    if name is None and "models" in config:
        name = DEFAULT_REPORT
    return None if name is None else str(name)


def _config(folder: Path) -> Any:
    """The config that the experiment wrote into its folder."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        return read_yaml(text, CONFIG)
    except (OSError, ValueError) as error:
        raise _no_comparisons(folder, str(error)) from error


def _no_comparisons(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"{folder} is no folder of experiments/language_model.py or parallelism.py ({why}); make one: "
        f"asyncsgd study language_model --quick"
    )


def read(folder: Path) -> Comparisons:
    """Read the folder of all runs and compute what they show.

    Raises:
        UsageError: if it is no folder of ``experiments/language_model.py``, or holds no finished run.
    """
    config = _config(folder)
    if not isinstance(config, dict) or "models" not in config:
        raise _no_comparisons(folder, f"its {CONFIG} has no models")
    all_runs, curves, _ = read_study(folder)
    left_out = []
    for run in all_runs.itertuples():
        why = run.left_out or run.notes
        if why:
            left_out.append(f"{run.run}: {why}")
    names = all_runs["run"].str.extract(RUN_FOLDER)
    is_finished = all_runs["status"].isin(FINISHED) & names["seed"].notna()
    runs = all_runs.assign(**names)[is_finished]
    if runs.empty:
        raise UsageError(f"{folder} holds no finished run; run the experiment again")
    summaries = [read_json(path / "summary.json") for path in runs["path"]]
    runs = runs.assign(seed=runs["seed"].astype(int), summary=summaries)
    models = list(config["models"])
    arms = []
    for name, declared in (config.get("comparisons") or {}).items():
        arms += _rows_of_comparison(runs, name, declared, models)
    points = []
    if config.get("grid"):
        points = _grid(runs, Measure(curves), config["grid"], models)
    return Comparisons(
        name=str(config["name"]),
        runs=runs,
        curves=curves,
        arms=DataFrame(arms, columns=[*ArmOfComparison._fields]),
        grid=DataFrame(points, columns=[*GridPoint._fields]),
        left_out=left_out,
    )


def of_arm(runs: DataFrame, comparison: str, model: str, arm: str) -> DataFrame:
    """The runs of one comparison, model and arm, in the order of their seeds."""
    own = rows_with(runs, comparison=comparison, model=model, arm=arm)
    return own.set_index("seed", drop=False).sort_index()


def _rows_of_comparison(runs: DataFrame, name: str, declared: Declared, models: list[str]) -> list[Columns]:
    """The rows of one comparison. Their p are corrected for all of its arms that have runs, of all models, but for
    those whose differences do not vary. An arm whose loss is not judged counts as showing nothing.
    """
    rows = []
    num_compared = 0
    judged_rows = []
    questions = []
    for model, arm in itertools.product(models, declared["arms"]):
        of_this_arm = of_arm(runs, name, model, arm)
        if of_this_arm.empty:
            continue
        row = {"comparison": name, "model": model, "arm": arm}
        row |= _without_reference(of_this_arm, declared)
        rows.append(row)
        if arm == declared["reference"]:
            continue
        of_reference = of_arm(runs, name, model, declared["reference"])
        seeds = of_this_arm.index.intersection(of_reference.index)
        if seeds.empty:
            continue
        allowed_differences = _allowed_differences(declared["arms"], arm, declared["reference"])
        cells, question = _beside_reference(
            of_this_arm.loc[seeds], of_reference.loc[seeds], allowed_differences, declared
        )
        row |= cells
        is_constant = question is None and "difference" in cells
        if not is_constant:
            num_compared += 1
        if question is not None:
            judged_rows.append(row)
            questions.append(question)
    _judge(judged_rows, questions, num_compared)
    return rows


def _without_reference(own: DataFrame, declared: Declared) -> Columns:
    """The cells of an arm that do not depend on the runs of its reference."""
    alive = own[~own["diverged"]]
    row: Columns = {}
    row["reference"] = declared["reference"]
    row["word"] = ""
    row["margin"] = float(declared["margin"])
    row["runs"] = len(own)
    row["diverged"] = len(own) - len(alive)
    row["unit"] = unit_of(own["details"].iloc[0])
    row["loss"] = t_interval(alive["loss"])
    row["samples_per_second"] = t_interval(alive["samples_per_second"])
    if len(alive) and all("perplexity" in (summary.get("metrics") or {}) for summary in alive["summary"]):
        row["perplexity"] = row["loss"].mapped(math.exp)
    return row | _costs(alive)


def _judge(rows: list[Columns], questions: list[QuestionRow], num_compared: int) -> None:
    """Answer the questions of the arms of one comparison, which are a family, in their rows."""
    if not rows:
        return
    for row, judged in zip(rows, answer_family(questions, num_compared), strict=True):
        row["p_holm"] = judged.p_holm
        row["word"] = judged.word
        if judged.margin > MAX_UNEXPLAINED_SHARE * judged.gained:
            refused = judged.refused.replace("margin_reasons", "margin_reason")  # as its own config calls it
            row["about_margin"] = refused or margin_in_words(judged, row["reference"])


def _allowed_differences(arms: Mapping[str, Declared], ours: str, theirs: str) -> set[str]:
    """The settings in which the config has two arms differ."""
    return settings_that_differ(_with_underscores(arms[ours]), _with_underscores(arms[theirs]))


def _with_underscores(settings: Declared) -> Columns:
    return {key.replace("-", "_"): value for key, value in settings.items()}


def _beside_reference(
    ours: DataFrame, theirs: DataFrame, allowed_differences: set[str], declared: Declared
) -> tuple[Columns, QuestionRow | None]:
    """The cells of an arm beside its reference, and what is asked of their losses, where anything is.

    Where their runs are not comparable, the reason is the only cell.
    """
    gated = compare_arms(ours, theirs, allowed_differences)
    if gated.why_not_comparable:
        return {"word": "not comparable", "why": gated.why_not_comparable}, None
    if (ours["diverged"] | theirs["diverged"]).any():
        return {}, None
    difference = t_interval(np.round(ours["loss"] - theirs["loss"], 12))  # without what only rounds
    ratios = ours["samples_per_second"] / theirs["samples_per_second"]
    speed = t_interval(np.log(ratios.loc[gated.timed_seeds])).mapped(math.exp)
    row = {"word": "undecided", "difference": difference, "no_speed": gated.why_untimed, "speed": speed}
    is_constant = difference.n >= 2 and math.isnan(difference.low)
    if is_constant:
        return row, None
    gained = float((theirs["first_loss"] - theirs["loss"]).mean())
    question = question_of_numbers(  # which says of one pair that there are too few seeds
        ours["loss"],
        theirs["loss"],
        margin=float(declared["margin"]),
        margin_reason=declared.get("margin_reason", ""),
        gained=gained,
    )
    return row, question


def _costs(runs: DataFrame) -> dict[str, float]:
    """The means of `COSTS` over runs; runs beside other programs say nothing of the use of the machine."""
    applying = []
    busy_cores = []
    for summary in runs["summary"]:
        seconds = summary.get("seconds") or {}
        applying.append(seconds.get("apply", math.nan))
        busy = math.nan
        usage = summary.get("usage")
        if usage:
            busy = sum(usage["cores"].values())
        busy_cores.append(busy)
    table = runs.assign(applying=np.array(applying) / runs["seconds"], busy_cores=busy_cores)
    is_shared = table["other_load"] > MAX_OTHER_LOAD
    table.loc[is_shared, ["mfu", "busy_cores"]] = math.nan
    return {name: float(table[name].mean()) for name in COSTS}


def _grid(runs: DataFrame, measure: Measure, declared: Declared, models: list[str]) -> list[Columns]:
    """A row for each point of the grid that has a run."""
    rows = []
    first_points: dict[tuple[str, int], DataFrame] = {}
    points = itertools.product(models, declared["learning_rate"], declared["batch_size"], declared["seq_len"])
    for model, declared_rate, declared_batch, declared_length in points:
        rate = float(declared_rate)
        batch = int(declared_batch)
        length = int(declared_length)
        own = of_arm(runs, "grid", model, f"lr{rate:g}-b{batch}-l{length}")
        if own.empty:
            continue
        gated = compare_arms(own, first_points.setdefault((model, length), own), {"learning_rate", "batch_size"})
        threshold = float(declared["threshold"][model])
        row = {"model": model, "learning_rate": rate, "batch": batch, "length": length, "threshold": threshold}
        row["why"] = gated.why_not_comparable or gated.why_untimed
        rows.append(row | _at_threshold(own, measure, threshold))
    return rows


def _at_threshold(own: DataFrame, measure: Measure, threshold: float) -> Columns:
    """What the runs of a point of the grid measured; those that diverged reached nothing."""
    alive = own[~own["diverged"]]
    times = []
    for run in alive["run"]:
        seconds = crossing_at(measure.curve(run, "seconds"), threshold)
        if math.isfinite(seconds):
            times.append(seconds)
    return {
        "unit": unit_of(own["details"].iloc[0]),
        "seconds": t_interval(times),
        "reached": len(times),
        "runs": len(own),
        "loss": t_interval(alive["loss"]),
        "samples_per_second": t_interval(alive["samples_per_second"]),
    }
