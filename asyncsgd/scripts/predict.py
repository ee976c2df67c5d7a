"""Does the simulation tell the truth? Predict a measured run on the virtual clock and lay the two side by side.

    python -m asyncsgd predict runs/stilt_mlm-async-w4-s0-3f9a1c

Takes the times of the run's gradients, or, with ``--times-from``, those of another run on the same machine. Simulates
the same settings with real gradients on the virtual clock. Reports predicted against measured values: updates per
second, delays, loss at equal samples, loss at equal seconds, and the seconds to the final loss. Runs of mode sync are
predicted with the rule synchronous. Exit code 0 whatever the agreement: the figures are the result."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from asyncsgd.errors import UsageError
from asyncsgd.recorded_run import read_of_run
from asyncsgd.records.events import read_events
from asyncsgd.records.run_folder import find_run

Curve = list[tuple[float, float]]
"""(seconds or samples, loss), ascending."""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncsgd predict",
        description="Predict a measured run on the virtual clock.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", help="a finished run folder of mode async or sync, how its name begins, or last"
    )
    parser.add_argument("--times-from", metavar="RUN", help="take the times of this run's gradients instead")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    measured = find_run(given.run)
    times = measured if given.times_from is None else find_run(given.times_from)
    summary = summary_to_predict(measured)
    predicted = free_folder(measured)
    code = simulate(measured, summary, times, predicted, given.cache_dir)
    if code != 0:
        return code
    text = table(compare(measured, summary, predicted, read_of_run(predicted, "summary.json")))
    (predicted / "prediction.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {predicted / 'prediction.md'}")
    return 0


def summary_to_predict(folder: Path) -> dict[str, Any]:
    """The run's summary; refuse what has no measured clock to predict."""
    summary = read_of_run(folder, "summary.json")
    if summary.get("status") != "DONE" or summary.get("mode") not in ("async", "sync"):
        what = f"a {summary.get('status')} run of mode {summary.get('mode')}"
        raise UsageError(f"{folder} is {what}; give a DONE run of mode async or sync")
    if summary.get("clock") != "measured":
        raise UsageError(f"{folder} has a virtual clock already; give a run of real processes")
    return summary


def free_folder(measured: Path) -> Path:
    number = 1
    while (folder := measured / f"predicted-{number}").exists():
        number += 1
    return folder


def simulate(measured: Path, summary: dict[str, Any], times: Path, folder: Path, cache_dir: str | None) -> int:
    """Run the settings of a run on the virtual clock, its gradients as long as those of the run `times`."""
    from asyncsgd.replaying import settings_of_run
    from asyncsgd.runtime.launch import Launch
    from asyncsgd.scripts.run_folder import open_run_folder
    from asyncsgd.settings.run import run_of
    from asyncsgd.training import lead

    changes = {
        "mode": "async",
        "transport": "auto",
        "clock": "virtual",
        "speeds": f"trace:run={times},turnaround=true",
        "network": None,
        "run_dir": str(folder),
        "cache_dir": cache_dir,
    }
    if summary["mode"] == "sync":
        changes["rule"] = "synchronous"
    settings = settings_of_run(measured, changes)
    opened = open_run_folder("predict", settings, f"python -m asyncsgd predict {measured}")
    return lead(run_of(summary["experiment"], settings), Launch(settings.job.nproc, None, False), opened, None)


def compare(
    measured: Path, summary: dict[str, Any], predicted: Path, simulated: dict[str, Any]
) -> list[tuple[str, float | None, float | None]]:
    """Rows of (what, measured, predicted)."""
    rows: list[tuple[str, float | None, float | None]] = []

    def per_second(of: dict[str, Any]) -> float:
        return of["num_updates"] / of["train_seconds"]

    rows.append(("updates per second", per_second(summary), per_second(simulated)))
    rows.append(("seconds in all", summary["train_seconds"], simulated["train_seconds"]))
    for name in ("mean", "p50", "p95", "max"):
        rows.append((f"delay {name}", summary["delay"][name], simulated["delay"][name]))
    by_samples = [curve(folder, "total_samples") for folder in (measured, predicted)]
    by_seconds = [curve(folder, "train_seconds") for folder in (measured, predicted)]
    for samples, loss in by_samples[0][1:]:
        rows.append((f"loss at {samples:.0f} samples", loss, at(by_samples[1], samples)))
    for seconds, loss in by_seconds[0][1:]:
        rows.append((f"loss at {seconds:.1f} seconds", loss, at(by_seconds[1], seconds)))
    final = max(summary["final_eval_loss"], simulated["final_eval_loss"])
    measured_seconds, predicted_seconds = (first_at_or_below(each, final) for each in by_seconds)
    rows.append((f"seconds to loss {final:.4f}", measured_seconds, predicted_seconds))
    return rows


def curve(folder: Path, column: str) -> Curve:
    records = read_events(folder / "events.jsonl")
    return [(record[column], record["loss"]) for record in records if record["kind"] == "evaluate"]


def at(points: Curve, x: float) -> float | None:
    """The loss at `x`, on straight lines between evaluations; None outside of them."""
    xs, losses = zip(*points, strict=True)
    return float(np.interp(x, xs, losses)) if xs[0] <= x <= xs[-1] else None


def first_at_or_below(points: Curve, loss: float) -> float | None:
    """Where the curve first comes down to `loss`, on straight lines between evaluations."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 <= loss:
            return x1 if y0 == y1 else x0 + (x1 - x0) * max(0.0, (y0 - loss) / (y0 - y1))
    return None


def table(rows: list[tuple[str, float | None, float | None]]) -> str:
    lines = ["| | measured | predicted | predicted / measured |", "|---|---|---|---|"]
    for name, measured, predicted in rows:
        ratio = predicted / measured if measured and predicted is not None else None
        numbers = ("-" if value is None else f"{value:.4g}" for value in (measured, predicted, ratio))
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)
