"""What the runs of ``experiments/parallelism.py`` show beside their losses and rates: pipelines, scores, efficiency."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.curves import on_common_looks, reached
from analysis.statistics.intervals import Interval, t_interval
from analysis.study.curves import curve_of
from analysis.study.run import Run
from asyncsgd.records.events import EVENTS, read_events

BUBBLES = "bubbles.json"
USAGE = "usage.jsonl"
ROUNDING = 1e-4
"""Nats by which a loss may miss another one: a pipeline has that of one process up to rounding."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to spread a training over processes; means over seeds. None: nobody says, or there is none."""

    model: str
    name: str
    processes: int
    oversubscribed: bool
    """Whether there were more busy threads than cores, so that its seconds are no speed."""
    seconds: Interval
    """Of training, to equal samples."""
    bubble: float | None
    """Share of the pipeline's time in which a stage waits: 1 - (mean seconds computed) / (seconds of the first stage).
    """
    formula: float | None
    """(p - 1) / (m + p - 1), and with two buffers of a group of batches."""
    exchange: float | None
    """Share of the training clock in which gradients were exchanged or travelled; None where it is a part of the
    backward pass.
    """
    bytes_per_sample: float | None
    """Sent by all processes. Of a pipeline it was counted; otherwise it follows from the number of parameters: 2 (N -
    1) / N of the gradient by each of N ranks, or the parameters and the gradient for each gradient of a server."""
    samples_to_target: float | None
    """Against the reference: samples until the highest loss at which a run of the reference ended. Geometric mean of
    the ratios over the seeds whose run came there."""
    reached: int
    """Seeds whose run came there."""
    metrics: Mapping[str, Interval]
    """At the end, by name."""
    silent: float | None
    """The F1 of a model that never answers, in question answering: the share of questions without an answer."""
    samples: int
    """That it was trained on."""
    loss: Interval
    """On the evaluation set, at the end."""
    answerable: Interval | None = None
    """The F1 of the questions that have an answer (HasAns F1); None for other tasks."""
    best_f1: Interval | None = None
    """The F1 at the threshold that suits the evaluation set best, as SQuAD's scorer has it: at least that of a model
    that never answers. None for other tasks."""
    curve: tuple[tuple[int, float], ...] = ()
    """(samples, F1) of the evaluations, means over seeds; empty for other tasks."""


@dataclasses.dataclass(frozen=True)
class Bubble:
    """A bubble that was measured for itself."""

    stages: int
    schedule: str
    micro_batches: int
    sleeps: bool
    """Whether the stages slept for a declared time, and needed no core."""
    measured: float
    formula: float


def ways(arms: Mapping[str, Sequence[Run]], reference: str, model: str) -> list[Way]:
    """The ways of one model, in the order of `arms`.

    Args:
        arms: by name, finished runs.
        reference: the name of the one that samples are compared with.
    """
    theirs = {run.summary["seed"]: run for run in arms.get(reference, ())}
    target = max((float(run.summary["final_eval_loss"]) for run in theirs.values()), default=math.nan) + ROUNDING
    return [_way(name, runs, model, theirs, target) for name, runs in arms.items() if runs]


def _way(name: str, runs: Sequence[Run], model: str, theirs: Mapping[int, Run], target: float) -> Way:
    summary = runs[0].summary
    ratios = []
    for run in runs:
        other = theirs.get(run.summary["seed"])
        if other is None:
            continue
        curves = on_common_looks([curve_of(each, "total_samples") for each in (run, other)])
        own, their = (reached(curve, target) for curve in curves)
        if math.isfinite(own):
            ratios.append(math.log(own / their))
    names = [key for key, value in (summary.get("metrics") or {}).items() if isinstance(value, float)]
    used = [_stages_of(run) for run in runs]
    bubbles = [1.0 - computed / passed for computed, passed, *_ in filter(None, used) if computed is not None]
    return Way(
        model,
        name,
        processes=int(summary["num_workers"]),
        oversubscribed=(summary.get("oversubscription") or 0.0) > 1.0,
        seconds=t_interval([float(run.summary["train_seconds"]) for run in runs]),
        bubble=_mean(bubbles),
        formula=_formula(runs[0]),
        exchange=_mean([share for run in runs if (share := _exchange(run)) is not None]),
        bytes_per_sample=_mean([count for run in runs if (count := _bytes(run)) is not None]),
        samples_to_target=math.exp(sum(ratios) / len(ratios)) if ratios else None,
        reached=len(ratios),
        metrics={key: t_interval([float(run.summary["metrics"][key]) for run in runs]) for key in names},
        silent=_silent(summary),
        samples=int(summary["num_samples"]),
        loss=t_interval([float(run.summary["final_eval_loss"]) for run in runs]),
        answerable=_detail(runs, "has_answer", "f1"),
        best_f1=_detail(runs, "best_f1", "score"),
        curve=f1_curve(runs) if "f1" in names else (),
    )


def _detail(runs: Sequence[Run], group: str, name: str) -> Interval | None:
    scores = [(run.details.get(group) or {}).get(name) for run in runs]
    known = [float(score) for score in scores if score is not None]
    return t_interval(known) if known else None


def f1_curve(runs: Sequence[Run]) -> tuple[tuple[int, float], ...]:
    """(samples, mean F1 over `runs`) where all of them were evaluated."""
    looks: dict[int, list[float]] = {}
    for run in runs:
        rows = run.evaluations[["total_samples", "metrics.f1"]].dropna()
        for samples, score in rows.itertuples(index=False):
            looks.setdefault(int(samples), []).append(float(score))
    return tuple(
        (samples, _mean(scores) or 0.0) for samples, scores in sorted(looks.items()) if len(scores) == len(runs)
    )


def samples_wanted(curve: Sequence[tuple[int, float]], score: float) -> float | None:
    """How many samples a score would take: the line through the last half of a curve, against the logarithm of the
    samples (least squares), drawn on to `score`. None where the line does not rise, or has fewer than two points.

    An extrapolation: scores flatten at the end and may jump in the beginning, so it says an order of magnitude.

    >>> samples_wanted([(100, 0.3), (200, 0.4), (400, 0.5), (800, 0.6)], 0.8)
    3200.0
    >>> samples_wanted([(100, 0.3), (200, 0.5), (400, 0.5), (800, 0.4)], 0.8) is None
    True
    """
    points = [(math.log2(samples), value) for samples, value in curve if samples > 0]
    late = points[len(points) // 2 :]
    if len(late) < 2:
        return None
    slope, intercept = statistics.linear_regression(*zip(*late, strict=True))
    # 2 to the 60 samples are beyond every training; more would be no float.
    return round(2.0 ** min((score - intercept) / slope, 60.0), 6) if slope > 0 else None


def _silent(summary: Mapping[str, Any]) -> float | None:
    details = summary.get("details") or {}
    numbers = [(details.get(side) or {}).get("num_questions") for side in ("no_answer", "has_answer")]
    known = [number for number in numbers if isinstance(number, int)]
    return known[0] / max(1, sum(known)) if len(known) == 2 else None


def _stages_of(run: Run) -> tuple[float | None, float, float, float] | None:
    """Of a pipeline: mean seconds that a stage computed, seconds of the first stages, mean seconds of exchanges, bytes
    sent by all. None for other runs.
    """
    rows = [row for record in _records(run, "stages") for row in record["stages"]]
    if not rows:
        return None
    processes = len({(row[0], row[1]) for row in rows})
    first = [row for row in rows if row[1] == 0]
    replicas = len({row[0] for row in first})
    computed = None if any(row[2] is None for row in rows) else sum(row[2] for row in rows) / processes
    passed = sum(row[3] for row in first) / replicas
    return computed, passed, sum(row[4] for row in rows) / processes, sum(row[5] for row in rows)


def _records(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_events(run.path / EVENTS) if record["kind"] == kind]


def _formula(run: Run) -> float | None:
    settings = run.settings
    if settings.get("mode") != "pipeline":
        return None
    stages, parts = settings.get("stages") or settings["nproc"], settings["micro_batches"]
    if settings["pipeline_schedule"] == "2bw":
        return None
    return (stages - 1) / (parts + stages - 1)


def _exchange(run: Run) -> float | None:
    seconds, clock = run.summary.get("seconds") or {}, run.summary["train_seconds"]
    used = _stages_of(run)
    if used is not None:
        return used[2] / clock
    if run.summary["mode"] != "async":
        return 0.0 if run.summary["num_workers"] == 1 else None
    whole = sum(seconds.get(part, 0.0) for part in ("compute", "wait", "communicate"))
    return seconds["communicate"] / whole if whole else None


def _bytes(run: Run) -> float | None:
    used = _stages_of(run)
    samples, workers = run.summary["num_samples"], run.summary["num_workers"]
    if used is not None:
        return used[3] / samples
    whole = 4.0 * run.summary["num_parameters"]
    if run.summary["mode"] == "sync":
        return 2.0 * (workers - 1) * whole / (workers * run.summary["batch_size"])
    return 2.0 * whole / run.summary["batch_size"] if run.summary["mode"] == "async" else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def read_bubbles(folder: Path) -> list[Bubble]:
    """The bubbles that were measured for themselves; none where the file is not there."""
    try:
        rows = json.loads((folder / BUBBLES).read_text(encoding="utf-8"))["bubbles"]
    except OSError:
        return []
    return [Bubble(**row) for row in rows]


def utilisation(run: Run) -> list[tuple[float, float, float]]:
    """(seconds, busy cores of the run's processes, GiB of their resident sets), in order; empty if nobody looked."""
    try:
        lines = (run.path / USAGE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    looks = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one may be torn
            looks.append(json.loads(line))
    return [
        (
            look["seconds"],
            sum(cores for cores, _ in look["processes"].values()),
            sum(resident for _, resident in look["processes"].values()) / 2**30,
        )
        for look in looks
        if isinstance(look, dict) and "processes" in look
    ]
