"""Ways to spread one training over processes: the tables of the bubble, the bytes sent and the scores of each way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from pandas import DataFrame

from analysis import gallery
from analysis.comparison_sections import TablePart, addition_of, is_known, styles_of
from analysis.comparison_sections import parts_of as parts_of_comparisons
from analysis.comparisons import Comparisons, of_arm, read
from analysis.curves import crossing_at, thinned_to_sparsest
from analysis.measure import Measure
from analysis.page import Addition, slug
from analysis.plots import DASHED
from analysis.stats import Interval, t_interval
from asyncsgd.records.events import EVENTS, read_events

if TYPE_CHECKING:
    from analysis.load import Study

ROUNDING = 1e-4
"""Nats by which a loss may miss another one: a pipeline has that of one process up to rounding."""
MIN_GAIN_F1 = 0.03
"""A model has learned something if its F1 is this much or more above that of one that never answers."""


class Way(NamedTuple):
    """A row of the table of ways: one way to spread the training of a model over processes."""

    model: str
    name: str
    """The name of the way, which is an arm of the config."""
    processes: int
    """The number of processes."""
    oversubscribed: bool
    """Whether there were more busy threads than cores, so that its seconds are no speed."""
    seconds: Interval
    """Seconds of training, to equal samples."""
    bubble: float
    """1 - (mean seconds that a stage computed) / (seconds of the first stage)."""
    formula: float
    """(p - 1) / (m + p - 1); nan for the schedule 2bw."""
    exchange: float
    """Share of the training clock in which gradients were exchanged; nan where backward passes exchange them."""
    bytes_per_sample: float
    """Bytes sent by all processes: counted in a pipeline, else 2 (N - 1) / N of the gradient by each of N ranks, or the
    parameters and the gradient for each gradient of a server."""
    samples_to_target: float
    """Samples until the highest loss at which a run of the reference ended, as a multiple of the reference's; geometric
    mean over the seeds whose run came down to that loss."""
    reached: float
    """How many seeds' runs came down to that loss."""
    silent: float
    """F1 of a model that never answers: the share of questions without an answer."""
    loss: Interval
    """The loss on the evaluation set, at the end."""
    answerable: Interval
    """F1 of the questions that have an answer."""
    best_f1: Interval
    """F1 at the threshold that suits the evaluation set best."""
    metrics: dict[str, Interval]
    """Name -> metric at the end."""
    curve: list[tuple[int, float]]
    """(samples, F1) of the evaluations, means over seeds."""


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
"""What a stage of a pipeline records: the seconds that it computed, the seconds from the first pass of each batch to
the last one (`passed`), the seconds in which it exchanged gradients, and the bytes that it sent."""
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
    """The table of ways: a row for every way of every model, unless all of its runs diverged."""
    rows = []
    measure = Measure(found.curves)
    for arm in found.arms.itertuples():
        own = finished(found, arm, arm.arm)
        if own.empty:
            continue
        reference = finished(found, arm, arm.reference)
        if is_known(arm.why):
            reference = reference.iloc[:0]
        curve = f1_curve(found.curves[found.curves["run"].isin(own["run"])])
        rows.append({"model": arm.model, "name": arm.arm, **_way(own, reference, measure), "curve": curve})
    return DataFrame(rows, columns=[*Way._fields])


def finished(found: Comparisons, arm: Any, name: str) -> DataFrame:
    """The runs of arm `name`, in the comparison and of the model of the row `arm`, that did not diverge."""
    runs = of_arm(found.runs, arm.comparison, arm.model, name)
    return runs[~runs["diverged"]]


def _way(runs: DataFrame, reference: DataFrame, measure: Measure) -> dict[str, Any]:
    rows = runs.to_dict("records")
    first = rows[0]
    logarithms = list(_samples_to_target(runs, reference, measure))
    samples_to_target = math.nan
    if logarithms:
        samples_to_target = math.exp(statistics.fmean(logarithms))
    num_reached = math.nan
    if len(reference):
        num_reached = len(logarithms)
    traffic = DataFrame([_traffic_of_run(row) for row in rows]).astype(float).mean()
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
        **traffic,
        "samples_to_target": samples_to_target,
        "reached": num_reached,
        "silent": _f1_without_answers(first["summary"]),
        "loss": t_interval(runs["loss"]),
        "answerable": _detail(rows, "has_answer", "f1"),
        "best_f1": _detail(rows, "best_f1", "score"),
        "metrics": scores,
    }


def _samples_to_target(runs: DataFrame, reference: DataFrame, measure: Measure) -> Iterator[float]:
    """For each seed whose run came down to the target: the logarithm of its samples over those of the reference.

    The reference `b` of seed 1 learns nothing, and ends highest, at 3; to that loss `a` of seed 0 needs twice as many:

    >>> losses = {"a0": (4, 3), "b0": (4, 2), "a1": (3.5, 2.5), "b1": (3, 3)}
    >>> ends = [{"run": run, "samples": 80 * n, "loss": of[n]} for run, of in losses.items() for n in (0, 1)]
    >>> ours, theirs = (DataFrame({"run": [f"{arm}0", f"{arm}1"], "loss": last}) for arm, last in
    ...                 (("a", [3, 2.5]), ("b", [2, 3])))
    >>> [round(math.exp(log), 3) for log in _samples_to_target(ours, theirs, Measure(DataFrame(ends)))]
    [2.0]
    """
    target = reference["loss"].max() + ROUNDING
    for seed in runs.index.intersection(reference.index):
        own = measure.curve(runs.loc[seed, "run"], "samples")
        other = measure.curve(reference.loc[seed, "run"], "samples")
        own, other = thinned_to_sparsest([own, other])
        if target >= min(own[1][0], other[1][0]):
            continue  # one of them began there, so that there are no samples to compare
        samples = crossing_at(own, target)
        if math.isfinite(samples):
            yield math.log(samples / crossing_at(other, target))


def _formula(settings: Mapping[str, Any]) -> float:
    """The share of the time that a pipeline loses if all passes cost the same; nan for others.

    >>> _formula({"mode": "pipeline", "pipeline_schedule": "1f1b", "stages": 2, "micro_batches": 4})
    0.2
    """
    if settings.get("mode") != "pipeline" or settings["pipeline_schedule"] == "2bw":
        return math.nan
    stages = settings.get("stages") or settings.get("nproc")
    assert stages is not None
    return (stages - 1) / (settings["micro_batches"] + stages - 1)


def _detail(rows: Sequence[Mapping[str, Any]], group: str, name: str) -> Any:
    """The mean of a score in the details of the runs; nan where none has it."""
    known = []
    for row in rows:
        details = row["summary"].get("details") or {}
        of_group = details.get(group) or {}
        score = of_group.get(name)
        if score is not None:
            known.append(score)
    return t_interval(known) if known else math.nan


def _f1_without_answers(summary: Mapping[str, Any]) -> float:
    """F1 of a model that never answers; nan for other tasks."""
    details = summary.get("details") or {}
    without = details.get("no_answer")
    answerable = details.get("has_answer")
    if not without or not answerable:
        return math.nan
    num_unanswerable = without["num_questions"]
    number = num_unanswerable + answerable["num_questions"]
    return float(num_unanswerable / max(1, number))


def _traffic_of_run(run: Mapping[str, Any]) -> dict[str, float | None]:
    """Bubble, exchange and bytes a sample of one run."""
    rows = []
    for event in read_events(run["path"] / EVENTS):
        if event["kind"] == "stages":
            rows += event["stages"]
    if rows:
        return _traffic_counted(run, DataFrame(rows, columns=[*STAGES]))
    return _traffic_estimated(run)


def _traffic_counted(run: Mapping[str, Any], stages: DataFrame) -> dict[str, float | None]:
    """As the stages of a pipeline counted them.

    Of 10 s a stage computes 6 in the mean, in two replicas of two stages:

    >>> rows = [(0, 0, 8.0, 10.0, 1.0, 600.0), (0, 1, 6.0, 10.0, 1.0, 200.0),
    ...         (1, 0, 6.0, 10.0, 0.5, 600.0), (1, 1, 4.0, 10.0, 0.5, 200.0)]
    >>> traffic = _traffic_counted({"seconds": 10.0, "samples": 80.0}, DataFrame(rows, columns=[*STAGES]))
    >>> {name: round(float(value), 6) for name, value in traffic.items()}
    {'bubble': 0.4, 'exchange': 0.075, 'bytes_per_sample': 20.0}
    """
    processes = len(stages[["replica", "stage"]].drop_duplicates())
    first = stages[stages["stage"] == 0]
    wall_seconds = first["passed"].sum() / first["replica"].nunique()
    computed = stages["computed"].astype(float).sum(skipna=False) / processes
    return {
        "bubble": 1 - computed / wall_seconds,
        "exchange": stages["exchanged"].sum() / processes / run["seconds"],
        "bytes_per_sample": stages["sent"].sum() / run["samples"],
    }


def _traffic_estimated(run: Mapping[str, Any]) -> dict[str, float | None]:
    """As they follow from the number of parameters, where no process has a part of the model."""
    summary = run["summary"]
    workers = run["workers"]
    size = 4.0 * summary["num_parameters"]
    sent = 0.0
    exchange = None
    if workers == 1:
        exchange = 0.0
    if run["mode"] == "sync":
        sent = 2 * (workers - 1) * size / (workers * run["batch_size"])
    elif run["mode"] == "async":
        sent = 2 * size / run["batch_size"]
        seconds = summary.get("seconds") or {}
        communicating = seconds.get("communicate", 0.0)
        total = seconds.get("compute", 0.0) + seconds.get("wait", 0.0) + communicating
        exchange = None
        if total:
            exchange = communicating / total
    return {"bubble": None, "exchange": exchange, "bytes_per_sample": sent}


def f1_curve(curves: DataFrame) -> list[tuple[int, float]]:
    """(samples, mean F1) where all runs of `curves` were evaluated; empty for other tasks."""
    if "metric.f1" not in curves:
        return []
    scored = curves.dropna(subset="metric.f1")
    evaluations = scored.groupby("samples")["metric.f1"].agg(["size", "mean"])
    of_all_runs = evaluations[evaluations["size"] == curves["run"].nunique()]
    return [(int(samples), float(score)) for samples, score in of_all_runs["mean"].items()]


def above_never_answering(ways: DataFrame) -> list[str]:
    """What a model that never answers would score, and which models are above it; empty for other tasks."""
    sentences = []
    has_curve = ways["curve"].map(len) > 0
    answering = ways[ways["silent"].notna() & has_curve]
    for model, own in answering.groupby("model", sort=False):
        floor = own["silent"].iloc[0]
        above = []
        for way in own.to_dict("records"):
            _, last_f1 = way["curve"][-1]
            if last_f1 >= floor + MIN_GAIN_F1:
                above.append(way["name"])
        names = ", ".join(above) or "none"
        lead = f"{model}: a model that never answers has F1 {floor:.3f}"
        sentences.append(f"{lead}; {100 * MIN_GAIN_F1:.0f} points or more above it: {names}.")
    return sentences


def parts_of(found: Comparisons, ways: DataFrame) -> list[TablePart]:
    """The table of ways, and that of scores where the task has any."""
    parts = []
    if len(ways):
        parts.append(exchanges_of(ways))
    if any(ways["metrics"]):
        parts.append(scores_of(ways, f1_pictures(found, ways)))
    return parts


def exchanges_of(ways: DataFrame) -> TablePart:
    """The table of ways: what stages wait for and what is sent."""
    shown = ways.assign(bytes_per_sample=ways["bytes_per_sample"] / 1e3)
    notes = [ABOUT_WAYS]
    crowded = ways["oversubscribed"].astype(bool)
    if crowded.any():
        shown.loc[crowded, "name"] += " *"
        notes.append(OVERSUBSCRIBED)
    shown = shown[[*HEADINGS]].rename(columns=HEADINGS)
    return TablePart("ways", "What stages wait for and what is sent", shown, tuple(notes))


def scores_of(ways: DataFrame, pictures: Iterable[gallery.Picture] = ()) -> TablePart:
    """The table of scores, with the loss and the seconds."""
    names = ways[["model", "name"]]
    metrics = DataFrame([*ways["metrics"]])
    others = ways[["answerable", "best_f1", "loss", "seconds"]]
    scores = pd.concat([names, metrics, others], axis=1)
    scores = scores.dropna(axis=1, how="all")
    scores = scores.rename(columns={"name": "way", "answerable": "HasAns f1", "best_f1": "best f1"})
    notes = above_never_answering(ways)
    if "best f1" in scores:
        notes.append(BEST_F1)
    return TablePart("scores", "Scores after equal samples", scores, tuple(notes), pictures)


def f1_pictures(found: Comparisons, ways: DataFrame) -> Iterator[gallery.Picture]:
    """F1 against samples, with that of a model that never answers; a picture for each model, none for other tasks."""
    caption = "Means over seeds. Dashes: a model that never answers."
    styles = styles_of(found)
    has_curve = ways["curve"].map(len) > 0
    for model, own in ways[has_curve].groupby("model", sort=False):
        name = f"f1-{slug(str(model))}"
        title = f"F1 against samples: {model}"
        yield gallery.draw_picture(name, title, caption, _draw_f1, own, styles)


def _draw_f1(axes: Any, ways: DataFrame, styles: Mapping[str, Any]) -> str:
    ends = []
    for way in ways.to_dict("records"):
        samples, scores = zip(*way["curve"], strict=True)
        styles[way["name"]].line(axes, samples, scores, label=way["name"])
        ends.append(f"{way['name']} {scores[-1]:.3f}")
    floor = ways["silent"].iloc[0]
    if not math.isnan(floor):
        axes.axhline(floor, **DASHED)
    axes.set(xlabel="samples", ylabel="F1")
    return "; ".join(ends)


def addition(study: Study) -> Addition:
    """The part of a page on the ways to spread a training."""
    found = read(study.folder)
    ways = ways_of(found)
    return addition_of(found, [*parts_of_comparisons(found), *parts_of(found, ways)])
