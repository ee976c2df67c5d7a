"""Arms against a reference on the same seeds, and seconds to a loss on a grid, as two tables.

They are of folders that ``experiments/language_model.py`` and ``experiments/parallelism.py`` fill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from analysis.curves import reached, unit_of
from analysis.gate import MOST_LOAD, between, set_apart
from analysis.judge import EXPLAINED, about_margin, answer, of_numbers
from analysis.measure import Measure
from analysis.read import read as read_study
from analysis.runs import where
from analysis.stats import t_interval
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FINISHED, read_json
from asyncsgd.settings.yaml_reader import read_yaml

CONFIG = "config.yaml"
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
    "about_margin": "why it is not used, or its share of what the reference improved by where that is above 10 %",
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
COSTS = (*list(ARMS)[list(ARMS).index("computing") :],)
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


def read(folder: Path) -> Comparisons:
    """Read the folder of all runs and compute what they show.

    Raises:
        UsageError: if it is no folder of ``experiments/language_model.py``, or holds no finished run.
    """
    try:
        config = read_yaml((folder / CONFIG).read_text(encoding="utf-8"), CONFIG)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is no folder of experiments/language_model.py or parallelism.py ({error}); make one: "
            f"asyncsgd study language_model --quick"
        ) from error
    every, curves, _ = read_study(folder)
    told = every["left_out"].where(every["left_out"] != "", every["notes"])
    left_out = [f"{run}: {why or every.loc[run, 'status']}" for run, why in told.items() if why]
    places = (
        every["run"]
        .str.extract(r"^([^/]+)/(?:([^/]+)/)?([^/]+)/s(\d+)$")
        .set_axis(["comparison", "model", "arm", "seed"], axis=1)
    )
    runs = every.assign(**places)[every["status"].isin(FINISHED) & places["seed"].notna()]
    if runs.empty:
        raise UsageError(f"{folder} holds no finished run; run the experiment again")
    runs = runs.assign(seed=runs["seed"].astype(int), summary=[read_json(p / "summary.json") for p in runs["path"]])
    models = list(config["models"])
    given = config.get("comparisons") or {}
    arms = [row for name, one in given.items() for row in _compared(runs, name, one, models)]
    grid = _grid(runs, Measure(curves), config["grid"], models) if config.get("grid") else []
    tables = DataFrame(arms, columns=[*ARMS]), DataFrame(grid, columns=[*GRID, "samples_per_second"])
    return Comparisons(str(config["name"]), runs, curves, *tables, left_out)


def of_arm(runs: DataFrame, comparison: str, model: str, arm: str) -> DataFrame:
    """The runs of one comparison, model and arm, in the order of their seeds."""
    own = where(runs, comparison=comparison, model=model, arm=arm)
    return own.set_index("seed", drop=False).sort_index()


def _compared(runs: DataFrame, name: str, given: Mapping[str, Any], models: list[str]) -> list[dict[str, Any]]:
    """The rows of one comparison, their p corrected for all of its arms whose differences vary."""
    rows = []
    for model, arm in itertools.product(models, given["arms"]):
        own = of_arm(runs, name, model, arm)
        theirs = of_arm(runs, name, model, given["reference"])
        alive = own[~own["diverged"]]
        if alive.empty:
            continue
        row = {
            "comparison": name,
            "model": model,
            "arm": arm,
            "reference": given["reference"],
            "word": "",
            "margin": float(given["margin"]),
            "runs": len(own),
            "diverged": len(own) - len(alive),
            "unit": unit_of(own["details"].iloc[0]),
        }
        row |= {key: t_interval(alive[key]) for key in ("loss", "samples_per_second")} | _costs(alive)
        if all("perplexity" in (one.get("metrics") or {}) for one in alive["summary"]):
            row["perplexity"] = row["loss"].mapped(math.exp)
        seeds = own.index.intersection(theirs.index)
        ours = own.loc[seeds]
        theirs = theirs.loc[seeds]
        if arm != given["reference"] and len(seeds):
            row |= _against(ours, theirs, _told_apart(given["arms"], arm, given["reference"]), given)
        rows.append(row)
    tested = [row for row in rows if "question" in row]
    for row, judged in zip(tested, answer([row["question"] for row in tested]) if tested else [], strict=True):
        row |= {"p_holm": judged.p_holm, "word": judged.word}
        if judged.margin > EXPLAINED * judged.gained:
            refused = judged.refused.replace("margin_reasons", "margin_reason")  # as its own config calls it
            row["about_margin"] = refused or about_margin(judged, row["reference"])
    return rows


def _told_apart(arms: Mapping[str, Mapping[str, Any]], ours: str, theirs: str) -> set[str]:
    """The settings that tell two arms of a config."""
    own, other = ({key.replace("-", "_"): value for key, value in arms[arm].items()} for arm in (ours, theirs))
    return set_apart(own, other)


def _against(ours: DataFrame, theirs: DataFrame, apart: set[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What sets an arm against its reference; nothing but the reason where their runs are not comparable."""
    gated = between(ours, theirs, apart)
    if gated.unlike:
        return {"word": "not comparable", "why": gated.unlike}
    if (ours["diverged"] | theirs["diverged"]).any():
        return {}
    difference = t_interval(np.round(ours["loss"] - theirs["loss"], 12))
    row: dict[str, Any] = {"word": "undecided", "difference": difference}
    known = {"margin": float(given["margin"]), "margin_reason": given.get("margin_reason", "")}
    known["gained"] = float((theirs["first_loss"] - theirs["loss"]).mean())
    if difference.n < 2 or difference.low == difference.low:  # it varied, so that it can be tested
        row["question"] = of_numbers(ours["loss"], theirs["loss"], **known)
    row["no_speed"] = gated.untimed
    ratios = (ours["samples_per_second"] / theirs["samples_per_second"]).loc[gated.timed]
    row["speed"] = t_interval(np.log(ratios)).mapped(math.exp)
    return row


def _costs(runs: DataFrame) -> dict[str, float]:
    """Means over runs; nothing is said of the machine's use where others used it too."""
    seconds = [(one.get("seconds") or {}).get("apply", math.nan) for one in runs["summary"]]
    cores = [sum(one["usage"]["cores"].values()) if one.get("usage") else math.nan for one in runs["summary"]]
    table = runs.assign(applying=np.array(seconds) / runs["seconds"], busy_cores=cores)
    shared = table["other_load"] > MOST_LOAD
    table.loc[shared, ["mfu", "busy_cores"]] = math.nan
    return {name: float(table[name].mean()) for name in COSTS}


def _grid(runs: DataFrame, measure: Measure, given: Mapping[str, Any], models: list[str]) -> list[dict[str, Any]]:
    """A row for each point that has a run; those that diverged reached nothing."""
    rows: list[dict[str, Any]] = []
    first: dict[tuple[str, int], DataFrame] = {}
    for model, *at in itertools.product(models, given["learning_rate"], given["batch_size"], given["seq_len"]):
        rate = float(at[0])
        batch = int(at[1])
        length = int(at[2])
        own = of_arm(runs, "grid", model, f"lr{rate:g}-b{batch}-l{length}")
        if own.empty:
            continue
        other = first.setdefault((model, length), own)
        gated = between(own, other, {"learning_rate", "batch_size"})
        alive = own[~own["diverged"]]
        threshold = float(given["threshold"][model])
        times = [reached(measure.curve(run, "seconds"), threshold) for run in alive["run"]]
        there = [seconds for seconds in times if math.isfinite(seconds)]
        row = {
            "model": model,
            "unit": unit_of(own["details"].iloc[0]),
            "learning_rate": rate,
            "batch": batch,
            "length": length,
        }
        row |= {"threshold": threshold, "seconds": t_interval(there), "reached": len(there), "runs": len(own)}
        row["why"] = gated.unlike or gated.untimed
        row |= {name: t_interval(alive[name]) for name in ("loss", "samples_per_second")}
        rows.append(row)
    return rows
