"""Does the simulation tell the truth? Predict a measured run on the virtual clock and lay the two side by side.

    python experiments/calibrate.py runs/stilt_mlm-async-w4-s0-3f9a1c

Takes the times of the run's gradients, or, with ``--times-from``, those of another run on the same machine. Simulates
the same settings with real gradients on the virtual clock. Reports predicted against measured values: updates per
second, delays, loss at equal samples, loss at equal seconds, and the seconds to the final loss. Runs of mode sync are
predicted with the rule synchronous. Exit code 0 whatever the agreement: the figures are the result."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.recorded_run import read_of_run
from asyncsgd.records.console import best_effort
from asyncsgd.records.events import read_events
from asyncsgd.settings.training import FLAGS, Settings, make_settings

Curve = list[tuple[float, float]]
"""(seconds or samples, loss), ascending."""


@best_effort()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predict a measured run on the virtual clock.", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="a finished run of mode async or sync")
    parser.add_argument("--times-from", type=Path, metavar="RUN", help="take the times of this run's gradients instead")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    arguments = parser.parse_args(argv)
    try:
        return calibrate(arguments.run_dir, arguments.times_from or arguments.run_dir, arguments.cache_dir)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def calibrate(measured: Path, times: Path, cache_dir: str | None) -> int:
    settings, summary = read_run(measured)
    predicted = free_folder(measured)
    code = simulate(virtual(settings, times, predicted, cache_dir), predicted)
    if code != 0:
        return code
    rows = compare(measured, summary, predicted, read_of_run(predicted, "summary.json"))
    text = table(rows)
    (predicted / "calibration.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {predicted / 'calibration.md'}")
    return 0


def read_run(folder: Path) -> tuple[Settings, dict[str, Any]]:
    """The run's settings and summary; refuse what has no measured clock to predict."""
    summary = read_of_run(folder, "summary.json")
    if summary.get("status") != "DONE" or summary.get("mode") not in ("async", "sync"):
        what = f"a {summary.get('status')} run of mode {summary.get('mode')}"
        raise UsageError(f"{folder} is {what}; give a DONE run of mode async or sync")
    if summary.get("clock") != "measured":
        raise UsageError(f"{folder} has a virtual clock already; give a run of real processes")
    return make_settings(FLAGS.load_yaml(folder / "settings.yaml")), summary


def virtual(settings: Settings, times: Path, folder: Path, cache_dir: str | None) -> Settings:
    """The run's settings on the virtual clock, its gradients as long as those of the run `times`."""
    rule = "synchronous" if settings.job.mode == "sync" else settings.job.rule
    speeds = f"trace:run={times},turnaround=true"
    job = dataclasses.replace(
        settings.job, mode="async", rule=rule, transport="auto", clock="virtual", speeds=speeds, network=None
    )
    output = dataclasses.replace(settings.output, run_dir=str(folder), runs_dir="runs", overwrite=False)
    data = dataclasses.replace(settings.data, cache_dir=cache_dir)
    return dataclasses.replace(settings, job=job, output=output, data=data)


def free_folder(measured: Path) -> Path:
    number = 1
    while (folder := measured / f"predicted-{number}").exists():
        number += 1
    return folder


def simulate(settings: Settings, folder: Path) -> int:
    from asyncsgd.runtime.ranks import Launch
    from asyncsgd.scripts.pretraining import pretraining
    from asyncsgd.scripts.run_folder import open_run_folder
    from asyncsgd.training import lead

    experiment = pretraining(settings)
    opened = open_run_folder("calibrate", settings, f"python experiments/calibrate.py {folder.parent}")
    return lead(experiment, Launch(settings.job.nproc, None, False), opened, None)


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
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def first_at_or_below(points: Curve, loss: float) -> float | None:
    """Where the curve first comes down to `loss`, on straight lines between evaluations."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 <= loss:
            return x1 if y0 == y1 else x0 + (x1 - x0) * max(0.0, (y0 - loss) / (y0 - y1))
    return None


def table(rows: list[tuple[str, float | None, float | None]]) -> str:
    show: Callable[[float | None], str] = lambda value: "-" if value is None else f"{value:.4g}"  # noqa: E731
    lines = ["| | measured | predicted | predicted / measured |", "|---|---|---|---|"]
    for name, measured, predicted in rows:
        ratio = predicted / measured if measured and predicted is not None else None
        lines.append(f"| {name} | {show(measured)} | {show(predicted)} | {show(ratio)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
