"""``python -m analysis parallelism RUNS_DIR``: the report of ``experiments/parallelism.py``.

One page: losses and rates of all ways against one process, what pipelines wait for and what is sent, and scores. It is
laid out as the report of a study is."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from analysis import gallery
from analysis.comparisons import Comparisons, of_arm
from analysis.curves import on_common_looks, reached
from analysis.language_model import Tables, cast_of, reported
from analysis.measure import Measure
from analysis.page import Drawing, drawing, slug
from analysis.plots import DASHED
from analysis.stats import t_interval
from asyncsgd.records.events import EVENTS, read_events

ROUNDING = 1e-4
"""Nats by which a loss may miss another one: a pipeline has that of one process up to rounding."""
POINTS = 0.03
"""Of F1 above a model that never answers, from which on something was learned."""
WAYS = {
    "model": "name in the config",
    "name": "of the way to spread a training over processes",
    "processes": "number of them",
    "oversubscribed": "whether there were more busy threads than cores, so that its seconds are no speed",
    "seconds": "of training, to equal samples",
    "bubble": "1 - (mean seconds that a stage computed) / (seconds of the first stage)",
    "formula": "(p - 1) / (m + p - 1); none with two buffers of a group of batches",
    "exchange": "share of the training clock in which gradients were exchanged; none where backward passes do it",
    "bytes_per_sample": "sent by all processes: counted in a pipeline, else 2 (N - 1) / N of the gradient by each of N "
    "ranks, or the parameters and the gradient for each gradient of a server",
    "samples_to_target": "as a multiple of the reference's: samples until the highest loss at which one of its runs "
    "ended; geometric mean over the seeds whose run came there",
    "reached": "seeds whose run came there",
    "silent": "F1 of a model that never answers: the share of questions without an answer",
    "loss": "on the evaluation set, at the end",
    "answerable": "F1 of the questions that have an answer",
    "best_f1": "F1 at the threshold that suits the evaluation set best",
    "metrics": "at the end, by name",
    "curve": "(samples, F1) of the evaluations, means over seeds",
}
ABOUT_WAYS = (
    "Bubble: 1 - (mean seconds that a stage computed) / (seconds of the first stage). Beside the formula's wait it "
    "has transfers, unequal stages, and other processes on the same cores. Exchanging: share of the training "
    "clock; DistributedDataParallel exchanges within the backward pass, which nobody times. Bytes of pipelines are "
    "counted, the others follow from the number of parameters."
)
OVERSUBSCRIBED = "*: more busy threads than cores: its seconds are no speed."
BEST_F1 = (
    "Best f1: at the threshold for no answer that suits these questions best, as SQuAD's scorer reports it. It is "
    "never below a model that never answers, and a little too good, since it was chosen on the questions it scores."
)


def ways_of(found: Comparisons) -> DataFrame:
    """A row for every way of every model, with the columns of `WAYS`."""
    rows = []
    measure = Measure(found.curves)
    for arm in found.arms.itertuples():
        theirs, own = (
            (one := of_arm(found.runs, arm.comparison, arm.model, name))[~one["diverged"]]
            for name in (arm.reference, arm.arm)
        )
        if arm.why and arm.why == arm.why:
            theirs = theirs.iloc[:0]
        own_curves = found.curves[found.curves["run"].isin(own["run"])]
        rows.append({"model": arm.model, "name": arm.arm, **_way(own, theirs, measure), "curve": f1_curve(own_curves)})
    return DataFrame(rows, columns=[*WAYS])


def _way(runs: DataFrame, theirs: DataFrame, measure: Measure) -> dict[str, Any]:
    target = theirs["loss"].max() + ROUNDING
    ratios: list[float] = []
    for seed in runs.index.intersection(theirs.index):
        curves = [measure.curve(side.loc[seed, "run"], "samples") for side in (runs, theirs)]
        ours, other = (reached(curve, target) for curve in on_common_looks(curves))
        if math.isfinite(ours):
            ratios.append(math.log(ours / other))
    rows = runs.to_dict("records")
    first = runs.iloc[0]
    used = [_of_run(row) for row in rows]
    names = [name for name, value in (first["summary"].get("metrics") or {}).items() if isinstance(value, float)]
    settings = first["settings"]
    stages = settings.get("stages") or settings.get("nproc")
    parts = settings.get("micro_batches")
    formula = settings.get("mode") == "pipeline" and settings["pipeline_schedule"] != "2bw"
    return {
        "processes": int(first["workers"]),
        "oversubscribed": bool(first["oversubscribed"]),
        "seconds": t_interval(runs["seconds"]),
        "formula": (stages - 1) / (parts + stages - 1) if formula else math.nan,
        **{name: Series([one[name] for one in used], dtype=float).mean() for name in used[0]},
        "samples_to_target": math.exp(statistics.fmean(ratios)) if ratios else math.nan,
        "reached": len(ratios) if len(theirs) else math.nan,
        "silent": _silent(first["summary"]),
        "loss": t_interval(runs["loss"]),
        "answerable": _detail(rows, "has_answer", "f1"),
        "best_f1": _detail(rows, "best_f1", "score"),
        "metrics": {name: t_interval([row["summary"]["metrics"][name] for row in rows]) for name in names},
    }


def _detail(rows: Sequence[Mapping[str, Any]], group: str, name: str) -> Any:
    scores = [((row["summary"].get("details") or {}).get(group) or {}).get(name) for row in rows]
    known = [score for score in scores if score is not None]
    return t_interval(known) if known else math.nan


def _silent(summary: Mapping[str, Any]) -> float:
    details = summary.get("details") or {}
    sides = [details[side]["num_questions"] for side in ("no_answer", "has_answer") if details.get(side)]
    return sides[0] / max(1, sum(sides)) if len(sides) == 2 else math.nan


def _of_run(run: Mapping[str, Any]) -> dict[str, float | None]:
    """Bubble, exchange and bytes a sample of one run: a pipeline's as its stages counted them."""
    summary = run["summary"]
    workers = run["workers"]
    clock = run["seconds"]
    events = [one for one in read_events(run["path"] / EVENTS) if one["kind"] == "stages"]
    stages = DataFrame(
        [row for one in events for row in one["stages"]],
        columns=["replica", "stage", "computed", "passed", "exchanged", "sent"],
    )
    if len(stages):
        processes = len(stages[["replica", "stage"]].drop_duplicates())
        first = stages[stages["stage"] == 0]
        passed = first["passed"].sum() / first["replica"].nunique()
        computed = stages["computed"].astype(float).sum(skipna=False) / processes
        exchange = stages["exchanged"].sum() / processes / clock
        return {
            "bubble": 1 - computed / passed,
            "exchange": exchange,
            "bytes_per_sample": stages["sent"].sum() / run["samples"],
        }
    whole = 4.0 * summary["num_parameters"]
    batch = run["batch_size"]
    sent = {"sync": 2 * (workers - 1) * whole / (workers * batch), "async": 2 * whole / batch}.get(run["mode"], 0.0)
    exchange = None if workers > 1 else 0.0
    if run["mode"] == "async":
        seconds = [(summary.get("seconds") or {}).get(part, 0.0) for part in ("compute", "wait", "communicate")]
        exchange = seconds[2] / sum(seconds) if sum(seconds) else None
    return {"bubble": None, "exchange": exchange, "bytes_per_sample": sent}


def f1_curve(curves: DataFrame) -> list[tuple[int, float]]:
    """(samples, mean F1) where all runs of `curves` were evaluated; empty for other tasks."""
    if "metric.f1" not in curves:
        return []
    looks = curves.dropna(subset="metric.f1").groupby("samples")["metric.f1"].agg(["size", "mean"])
    whole = looks[looks["size"] == curves["run"].nunique()]
    return [(int(samples), float(score)) for samples, score in whole["mean"].items()]


def about_silence(ways: DataFrame) -> list[str]:
    """What a model that never answers would score, and which models are above it; empty for other tasks."""
    said = []
    answering = ways[ways["silent"].notna() & (ways["curve"].map(len) > 0)]
    for model, own in answering.groupby("model", sort=False):
        silent = own["silent"].iloc[0]
        above = [way.name for _, way in own.set_index("name").iterrows() if way["curve"][-1][1] >= silent + POINTS]
        told = f"{100 * POINTS:.0f} points or more above it: {', '.join(above) or 'none'}"
        said.append(f"{model}: a model that never answers has F1 {silent:.3f}; {told}.")
    return said


def more_tables(ways: DataFrame) -> Tables:
    """What stages wait for, and scores where the task has any."""
    made: Tables = {}
    if len(ways):
        shown = ways.assign(bytes_per_sample=ways["bytes_per_sample"] / 1e3)
        shown["name"] += [" *" if row else "" for row in ways["oversubscribed"]]
        headings = {
            "model": "model",
            "name": "way",
            "processes": "processes",
            "seconds": "seconds",
            "bubble": "bubble",
            "formula": "(p-1)/(m+p-1)",
            "exchange": "exchanging",
            "bytes_per_sample": "kB sent a sample",
            "samples_to_target": "samples to the loss of one process",
            "reached": "came there",
        }
        notes: tuple[str, ...] = (ABOUT_WAYS,)
        if ways["oversubscribed"].any():
            notes += (OVERSUBSCRIBED,)
        made["ways"] = "What stages wait for and what is sent", shown[[*headings]].rename(columns=headings), notes
    if any(ways["metrics"]):
        scores = pd.concat([ways[["model", "name"]], DataFrame([*ways["metrics"]])], axis=1)
        scores = scores.join(ways[["answerable", "best_f1", "loss", "seconds"]]).dropna(axis=1, how="all")
        scores = scores.rename(columns={"name": "way", "answerable": "HasAns f1", "best_f1": "best f1"})
        notes = (*about_silence(ways),)
        if "best f1" in scores:
            notes += (BEST_F1,)
        made["scores"] = "Scores after equal samples", scores, notes
    return made


def scores(found: Comparisons, ways: DataFrame) -> Iterator[Drawing]:
    """F1 against samples beside that of a model that never answers, a picture for each model; none for other tasks."""
    caption = "Means over seeds. Dashes: a model that never answers."
    cast = cast_of(found)
    for model, own in ways[ways["curve"].map(len) > 0].groupby("model", sort=False):
        name = f"f1-{slug(str(model))}"
        title = f"F1 against samples: {model}"
        yield drawing(gallery.drawn(name, title, caption, _draw_f1, own, cast))


def _draw_f1(axes: Any, ways: DataFrame, cast: Mapping[str, Any]) -> str:
    for way in ways.to_dict("records"):
        cast[way["name"]].line(axes, *zip(*way["curve"], strict=True), label=way["name"])
    if (silent := ways["silent"].iloc[0]) == silent:
        axes.axhline(silent, **DASHED)
    axes.set(xlabel="samples", ylabel="F1")
    return "; ".join(f"{way['name']} {way['curve'][-1][1]:.3f}" for way in ways.to_dict("records"))


def more(found: Comparisons) -> tuple[DataFrame, Tables, dict[str, Iterable[Drawing]]]:
    """What other comparisons do not have; see `analysis.language_model.reported`."""
    ways = ways_of(found)
    return ways, more_tables(ways), {"scores": scores(found, ways)}


def main(arguments: Sequence[str] | None = None) -> int:
    return reported("parallelism", str(__doc__), arguments, more)


if __name__ == "__main__":
    sys.exit(main())
