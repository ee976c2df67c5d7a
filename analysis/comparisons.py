"""Arms against a reference on the same seeds, and seconds to a loss on a grid, as two tables.

They are made for the two special reports, `language_model` and `parallelism`, whose runs lie in
COMPARISON/MODEL/ARM/sSEED, and whose arms are read from the config and not from a plan.json."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from analysis.answers import MAX_UNEXPLAINED_SHARE, QuestionRow, answer_family, margin_in_words, question_of_numbers
from analysis.curves import reached, unit_of
from analysis.gate import MAX_OTHER_LOAD, compare_arms, settings_that_differ
from analysis.measure import Measure
from analysis.read import read as read_study
from analysis.runs import rows_with
from analysis.stats import t_interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FINISHED, read_json
from asyncsgd.settings.yaml_reader import read_yaml

CONFIG = "config.yaml"
JUDGING = ("language_model", "parallelism", "speed_ladder")
"""Special reports that judge in the place of the page; `analysis.special` has all of them."""
OF_COMPARISONS = "language_model"
"""The report of a study whose config has models and names no report."""
ARMS = {
    "comparison": "name in the config",
    "model": "name in the config",
    "arm": "name in the config",
    "reference": "arm that it is compared with",
    "unit": "of the loss",
    "margin": "of equivalence, in this unit",
    "runs": "finished ones",
    "diverged": "of these; they are in no other number, so an arm with any is not judged",
    "loss": "at the end, after equal samples; mean and t interval over seeds",
    "perplexity": "e to the loss: the geometric mean over seeds",
    "difference": "of the loss, arm - reference; none where a run of either diverged",
    "p_holm": "of the difference, over all arms of the comparison",
    "word": "what the difference shows",
    "why": "what makes runs of the arm and of the reference not comparable",
    "about_margin": "why the margin is not used, or its share of the reference's improvement where that is above 10 %",
    "speed": "geometric mean of the ratios of samples a second, arm / reference",
    "no_speed": "what makes their seconds not comparable",
    "samples_per_second": "mean and t interval over seeds",
    "computing": "share of the workers' time",
    "waiting": "share of the workers' time",
    "communicating": "share of the workers' time",
    "applying": "share of the training clock in which the server stepped",
    "tokens_per_second": "mean over seeds",
    "mfu": "model FLOPs utilisation, of runs that had the machine for themselves",
    "busy_cores": "of all processes, of the same runs",
    "memory_gib": "sum of the peaks of a run's processes",
    "gpu_gib": "the same on GPUs",
}
COSTS = (
    *("computing", "waiting", "communicating", "applying"),
    *("tokens_per_second", "mfu", "busy_cores", "memory_gib", "gpu_gib"),
)
GRID = ("model", "unit", "learning_rate", "batch", "length", "threshold", "seconds", "reached", "runs", "why", "loss")


class Comparisons(NamedTuple):
    """What was measured, as tables; `arms` has the columns of `ARMS`."""

    name: str
    runs: DataFrame
    """The finished ones, with their `comparison`, `model`, `arm` and `summary`; index `run`."""
    curves: DataFrame
    arms: DataFrame
    grid: DataFrame
    left_out: list[str]

    @property
    def num_seeds(self) -> int:
        return int(self.runs.groupby(["comparison", "model", "arm"], dropna=False).size().max())


RUN_FOLDER = r"^(?P<comparison>[^/]+)/(?:(?P<model>[^/]+)/)?(?P<arm>[^/]+)/s(?P<seed>\d+)$"


def report_of(folder: Path) -> str | None:
    """The special report of the study in a folder; None where it has none."""
    try:
        config = read_yaml((folder / CONFIG).read_text(encoding="utf-8"), CONFIG)
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("report")
    if name is None and "models" in config:
        name = OF_COMPARISONS
    return None if name is None else str(name)


def _config(folder: Path) -> Any:
    """The config that the experiment wrote into its folder."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        return read_yaml(text, CONFIG)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is no folder of experiments/language_model.py or parallelism.py ({error}); make one: "
            f"asyncsgd study language_model --quick"
        ) from error


def read(folder: Path) -> Comparisons:
    """Read the folder of all runs and compute what they show.

    Raises:
        UsageError: if it is no folder of ``experiments/language_model.py``, or holds no finished run.
    """
    config = _config(folder)
    all_runs, curves, _ = read_study(folder)
    left_out = []
    for run in all_runs.itertuples():
        why = run.left_out or run.notes
        if why:
            left_out.append(f"{run.run}: {why}")
    places = all_runs["run"].str.extract(RUN_FOLDER)
    is_finished = all_runs["status"].isin(FINISHED) & places["seed"].notna()
    runs = all_runs.assign(**places)[is_finished]
    if runs.empty:
        raise UsageError(f"{folder} holds no finished run; run the experiment again")
    summaries = [read_json(path / "summary.json") for path in runs["path"]]
    runs = runs.assign(seed=runs["seed"].astype(int), summary=summaries)
    models = list(config["models"])
    arms = []
    for name, given in (config.get("comparisons") or {}).items():
        arms += _rows_of_comparison(runs, name, given, models)
    points = []
    if config.get("grid"):
        points = _grid(runs, Measure(curves), config["grid"], models)
    return Comparisons(
        name=str(config["name"]),
        runs=runs,
        curves=curves,
        arms=DataFrame(arms, columns=[*ARMS]),
        grid=DataFrame(points, columns=[*GRID, "samples_per_second"]),
        left_out=left_out,
    )


def of_arm(runs: DataFrame, comparison: str, model: str, arm: str) -> DataFrame:
    """The runs of one comparison, model and arm, in the order of their seeds."""
    own = rows_with(runs, comparison=comparison, model=model, arm=arm)
    return own.set_index("seed", drop=False).sort_index()


def _rows_of_comparison(
    runs: DataFrame, name: str, given: Mapping[str, Any], models: list[str]
) -> list[dict[str, Any]]:
    """The rows of one comparison, their p corrected for all of its arms whose differences vary."""
    rows = []
    judged_rows = []
    questions = []
    reference = given["reference"]
    for model, arm in itertools.product(models, given["arms"]):
        own = of_arm(runs, name, model, arm)
        if own["diverged"].all():
            continue
        row = {"comparison": name, "model": model, "arm": arm} | _row_alone(own, given)
        rows.append(row)
        if arm == reference:
            continue
        theirs = of_arm(runs, name, model, reference)
        seeds = own.index.intersection(theirs.index)
        if len(seeds):
            allowed_differences = _allowed_differences(given["arms"], arm, reference)
            cells, question = _beside_reference(own.loc[seeds], theirs.loc[seeds], allowed_differences, given)
            row |= cells
            if question is not None:
                judged_rows.append(row)
                questions.append(question)
    _judge(judged_rows, questions)
    return rows


def _row_alone(own: DataFrame, given: Mapping[str, Any]) -> dict[str, Any]:
    """What an arm is and what it reached and cost, whatever its reference did."""
    alive = own[~own["diverged"]]
    row: dict[str, Any] = {
        "reference": given["reference"],
        "word": "",
        "margin": float(given["margin"]),
        "runs": len(own),
        "diverged": len(own) - len(alive),
        "unit": unit_of(own["details"].iloc[0]),
        "loss": t_interval(alive["loss"]),
        "samples_per_second": t_interval(alive["samples_per_second"]),
    }
    row |= _costs(alive)
    if all("perplexity" in (summary.get("metrics") or {}) for summary in alive["summary"]):
        row["perplexity"] = row["loss"].mapped(math.exp)
    return row


def _judge(rows: list[dict[str, Any]], questions: list[QuestionRow]) -> None:
    """Answer the questions of the arms of one comparison, which are a family, in their rows."""
    if not rows:
        return
    for row, judged in zip(rows, answer_family(questions), strict=True):
        row["p_holm"] = judged.p_holm
        row["word"] = judged.word
        if judged.margin > MAX_UNEXPLAINED_SHARE * judged.gained:
            refused = judged.refused.replace("margin_reasons", "margin_reason")  # as its own config calls it
            row["about_margin"] = refused or margin_in_words(judged, row["reference"])


def _allowed_differences(arms: Mapping[str, Mapping[str, Any]], ours: str, theirs: str) -> set[str]:
    """The settings in which the config has two arms differ."""
    return settings_that_differ(_with_underscores(arms[ours]), _with_underscores(arms[theirs]))


def _with_underscores(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in settings.items()}


def _beside_reference(
    ours: DataFrame, theirs: DataFrame, allowed_differences: set[str], given: Mapping[str, Any]
) -> tuple[dict[str, Any], QuestionRow | None]:
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
        margin=float(given["margin"]),
        margin_reason=given.get("margin_reason", ""),
        gained=gained,
    )
    return row, question


def _costs(runs: DataFrame) -> dict[str, float]:
    """Means over runs; nothing is said of the machine's use where others used it too."""
    applying = []
    busy_cores = []
    for summary in runs["summary"]:
        seconds = summary.get("seconds") or {}
        applying.append(seconds.get("apply", math.nan))
        usage = summary.get("usage")
        if usage:
            busy_cores.append(sum(usage["cores"].values()))
        else:
            busy_cores.append(math.nan)
    table = runs.assign(applying=np.array(applying) / runs["seconds"], busy_cores=busy_cores)
    is_shared = table["other_load"] > MAX_OTHER_LOAD
    table.loc[is_shared, ["mfu", "busy_cores"]] = math.nan
    return {name: float(table[name].mean()) for name in COSTS}


def _grid(runs: DataFrame, measure: Measure, given: Mapping[str, Any], models: list[str]) -> list[dict[str, Any]]:
    """A row for each point that has a run; those that diverged reached nothing."""
    rows: list[dict[str, Any]] = []
    first: dict[tuple[str, int], DataFrame] = {}
    points = itertools.product(models, given["learning_rate"], given["batch_size"], given["seq_len"])
    for model, given_rate, given_batch, given_length in points:
        rate = float(given_rate)
        batch = int(given_batch)
        length = int(given_length)
        own = of_arm(runs, "grid", model, f"lr{rate:g}-b{batch}-l{length}")
        if own.empty:
            continue
        first_of_length = first.setdefault((model, length), own)
        gated = compare_arms(own, first_of_length, {"learning_rate", "batch_size"})
        threshold = float(given["threshold"][model])
        alive = own[~own["diverged"]]
        times = []
        for run in alive["run"]:
            curve = measure.curve(run, "seconds")
            seconds = reached(curve, threshold)
            if math.isfinite(seconds):
                times.append(seconds)
        row = {
            "model": model,
            "unit": unit_of(own["details"].iloc[0]),
            "learning_rate": rate,
            "batch": batch,
            "length": length,
            "threshold": threshold,
            "seconds": t_interval(times),
            "reached": len(times),
            "runs": len(own),
            "why": gated.why_not_comparable or gated.why_untimed,
            "loss": t_interval(alive["loss"]),
            "samples_per_second": t_interval(alive["samples_per_second"]),
        }
        rows.append(row)
    return rows
