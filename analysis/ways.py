"""Ways to spread one training over processes: what stages wait for, what is sent, and scores, beside the losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from pandas import DataFrame

from analysis import gallery
from analysis.comparison_sections import TablePart, addition_of, cast_of, is_known
from analysis.comparison_sections import parts_of as parts_of_comparisons
from analysis.comparisons import Comparisons, of_arm, read
from analysis.curves import on_common_looks, reached
from analysis.measure import Measure
from analysis.page import Addition, Drawing, drawing, slug
from analysis.plots import DASHED
from analysis.stats import t_interval
from asyncsgd.records.events import EVENTS, read_events

if TYPE_CHECKING:
    from analysis.load import Study

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
HEADINGS = {
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
"""Columns of the table of ways."""
STAGES = ("replica", "stage", "computed", "passed", "exchanged", "sent")
"""What a stage of a pipeline records."""
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
        own = finished(found, arm, arm.arm)
        reference = finished(found, arm, arm.reference)
        if is_known(arm.why):
            reference = reference.iloc[:0]
        curve = f1_curve(found.curves[found.curves["run"].isin(own["run"])])
        rows.append({"model": arm.model, "name": arm.arm, **_way(own, reference, measure), "curve": curve})
    return DataFrame(rows, columns=[*WAYS])


def finished(found: Comparisons, arm: Any, name: str) -> DataFrame:
    """The runs of an arm beside `arm` that did not diverge."""
    runs = of_arm(found.runs, arm.comparison, arm.model, name)
    return runs[~runs["diverged"]]


def _way(runs: DataFrame, reference: DataFrame, measure: Measure) -> dict[str, Any]:
    rows = runs.to_dict("records")
    first = rows[0]
    ratios = list(_samples_to_target(runs, reference, measure))
    counted = DataFrame([_of_run(row) for row in rows]).astype(float).mean()
    metrics = first["summary"].get("metrics") or {}
    scores = {}
    for name, value in metrics.items():
        if isinstance(value, float):
            scores[name] = t_interval([row["summary"]["metrics"][name] for row in rows])
    return {
        "processes": int(first["workers"]),
        "oversubscribed": bool(first["oversubscribed"]),
        "seconds": t_interval(runs["seconds"]),
        "formula": _formula(first["settings"]),
        **counted,
        "samples_to_target": math.exp(statistics.fmean(ratios)) if ratios else math.nan,
        "reached": len(ratios) if len(reference) else math.nan,
        "silent": _silent(first["summary"]),
        "loss": t_interval(runs["loss"]),
        "answerable": _detail(rows, "has_answer", "f1"),
        "best_f1": _detail(rows, "best_f1", "score"),
        "metrics": scores,
    }


def _samples_to_target(runs: DataFrame, reference: DataFrame, measure: Measure) -> Iterator[float]:
    """For each seed whose run came to the target: the logarithm of its samples over those of the reference."""
    target = reference["loss"].max() + ROUNDING
    for seed in runs.index.intersection(reference.index):
        own = measure.curve(runs.loc[seed, "run"], "samples")
        other = measure.curve(reference.loc[seed, "run"], "samples")
        own, other = on_common_looks([own, other])
        samples = reached(own, target)
        if math.isfinite(samples):
            yield math.log(samples / reached(other, target))


def _formula(settings: Mapping[str, Any]) -> float:
    """The share of the time that a pipeline loses if all passes cost the same; nan for others."""
    if settings.get("mode") != "pipeline" or settings["pipeline_schedule"] == "2bw":
        return math.nan
    stages = settings.get("stages") or settings.get("nproc")
    assert stages is not None
    return (stages - 1) / (settings["micro_batches"] + stages - 1)


def _detail(rows: Sequence[Mapping[str, Any]], group: str, name: str) -> Any:
    known = []
    for row in rows:
        details = row["summary"].get("details") or {}
        score = (details.get(group) or {}).get(name)
        if score is not None:
            known.append(score)
    return t_interval(known) if known else math.nan


def _silent(summary: Mapping[str, Any]) -> float:
    """F1 of a model that never answers; nan for other tasks."""
    details = summary.get("details") or {}
    without = details.get("no_answer")
    answerable = details.get("has_answer")
    if not without or not answerable:
        return math.nan
    number = without["num_questions"] + answerable["num_questions"]
    return float(without["num_questions"] / max(1, number))


def _of_run(run: Mapping[str, Any]) -> dict[str, float | None]:
    """Bubble, exchange and bytes a sample of one run."""
    stages = DataFrame(columns=[*STAGES])
    for event in read_events(run["path"] / EVENTS):
        if event["kind"] == "stages":
            stages = DataFrame([*stages.to_numpy(), *event["stages"]], columns=[*STAGES])
    return _of_stages(run, stages) if len(stages) else _of_whole_models(run)


def _of_stages(run: Mapping[str, Any], stages: DataFrame) -> dict[str, float | None]:
    """As the stages of a pipeline counted them."""
    processes = len(stages[["replica", "stage"]].drop_duplicates())
    first = stages[stages["stage"] == 0]
    passed = first["passed"].sum() / first["replica"].nunique()
    computed = stages["computed"].astype(float).sum(skipna=False) / processes
    return {
        "bubble": 1 - computed / passed,
        "exchange": stages["exchanged"].sum() / processes / run["seconds"],
        "bytes_per_sample": stages["sent"].sum() / run["samples"],
    }


def _of_whole_models(run: Mapping[str, Any]) -> dict[str, float | None]:
    """As they follow from the number of parameters, where no process has a part of the model."""
    summary = run["summary"]
    workers = run["workers"]
    size = 4.0 * summary["num_parameters"]
    exchange = 0.0 if workers == 1 else None
    sent = 0.0
    if run["mode"] == "sync":
        sent = 2 * (workers - 1) * size / (workers * run["batch_size"])
    elif run["mode"] == "async":
        sent = 2 * size / run["batch_size"]
        used = summary.get("seconds") or {}
        seconds = [used.get(part, 0.0) for part in ("compute", "wait", "communicate")]
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
    told = []
    answering = ways[ways["silent"].notna() & (ways["curve"].map(len) > 0)]
    for model, own in answering.groupby("model", sort=False):
        silent = own["silent"].iloc[0]
        above = [way["name"] for way in own.to_dict("records") if way["curve"][-1][1] >= silent + POINTS]
        names = ", ".join(above) or "none"
        lead = f"{model}: a model that never answers has F1 {silent:.3f}"
        told.append(f"{lead}; {100 * POINTS:.0f} points or more above it: {names}.")
    return told


def parts_of(found: Comparisons, ways: DataFrame) -> list[TablePart]:
    """What stages wait for, and scores where the task has any."""
    parts = []
    if len(ways):
        parts.append(exchanges_of(ways))
    if any(ways["metrics"]):
        parts.append(scores_of(ways, tuple(f1_pictures(found, ways))))
    return parts


def exchanges_of(ways: DataFrame) -> TablePart:
    """What stages wait for and what is sent."""
    shown = ways.assign(bytes_per_sample=ways["bytes_per_sample"] / 1e3)
    notes = [ABOUT_WAYS]
    crowded = ways["oversubscribed"].astype(bool)
    if crowded.any():
        shown.loc[crowded, "name"] += " *"
        notes.append(OVERSUBSCRIBED)
    shown = shown[[*HEADINGS]].rename(columns=HEADINGS)
    return TablePart("ways", "What stages wait for and what is sent", shown, tuple(notes))


def scores_of(ways: DataFrame, pictures: tuple[Drawing, ...] = ()) -> TablePart:
    """Scores beside the loss and the seconds."""
    metrics = DataFrame([*ways["metrics"]])
    beside = ways[["answerable", "best_f1", "loss", "seconds"]]
    scores = pd.concat([ways[["model", "name"]], metrics, beside], axis=1).dropna(axis=1, how="all")
    scores = scores.rename(columns={"name": "way", "answerable": "HasAns f1", "best_f1": "best f1"})
    notes = about_silence(ways)
    if "best f1" in scores:
        notes.append(BEST_F1)
    return TablePart("scores", "Scores after equal samples", scores, tuple(notes), pictures)


def f1_pictures(found: Comparisons, ways: DataFrame) -> Iterator[Drawing]:
    """F1 against samples beside that of a model that never answers, a picture for each model; none for other tasks."""
    caption = "Means over seeds. Dashes: a model that never answers."
    cast = cast_of(found)
    for model, own in ways[ways["curve"].map(len) > 0].groupby("model", sort=False):
        name = f"f1-{slug(str(model))}"
        yield drawing(gallery.drawn(name, f"F1 against samples: {model}", caption, _draw_f1, own, cast))


def _draw_f1(axes: Any, ways: DataFrame, cast: Mapping[str, Any]) -> str:
    ends = []
    for way in ways.to_dict("records"):
        samples, scores = zip(*way["curve"], strict=True)
        cast[way["name"]].line(axes, samples, scores, label=way["name"])
        ends.append(f"{way['name']} {scores[-1]:.3f}")
    silent = ways["silent"].iloc[0]
    if silent == silent:
        axes.axhline(silent, **DASHED)
    axes.set(xlabel="samples", ylabel="F1")
    return "; ".join(ends)


def addition(study: Study) -> Addition:
    """What a study of ways to spread a training has on its page."""
    found = read(study.folder)
    ways = ways_of(found)
    return addition_of(found, [*parts_of_comparisons(found), *parts_of(found, ways)])
