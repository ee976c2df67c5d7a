"""Does the simulation tell the truth? Predict a measured run on the virtual clock and lay the two side by side.

    python -m asyncsgd predict runs/stilt_mlm-async-w4-s0-3f9a1c

It takes the times of the run's gradients, or, with ``--times-from``, those of another run on the same machine. With
them it trains the same settings again on the virtual clock. It reports predicted against measured values: updates per
second, delays, loss at equal samples, loss at equal seconds, and the seconds to the final loss. Runs of mode sync are
predicted with the rule synchronous. Exit code 0 whatever the agreement: the figures are the result."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_events
from asyncsgd.records.run_folder import find_run
from asyncsgd.scripts.base import add_task_flag
from asyncsgd.settings.yaml_reader import read_of_run

Curve = list[tuple[float, float]]
"""(seconds or samples, loss), ascending."""


def run(argv: list[str], prog: str) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Predict a measured run on the virtual clock.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", help="a finished run folder of mode async or sync, how its name begins, or last"
    )
    parser.add_argument("--times-from", metavar="RUN", help="take the times of this run's gradients instead")
    add_task_flag(parser)
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    measured = find_run(given.run)
    summary = read_of_run(measured, "summary.json")
    if summary.get("status") != "DONE" or summary.get("mode") not in ("async", "sync"):
        what = f"a {summary.get('status')} run of mode {summary.get('mode')}"
        raise UsageError(f"{measured} is {what}; give a DONE run of mode async or sync")
    if summary.get("clock") != "measured":
        raise UsageError(f"{measured} has a virtual clock already; give a run of real processes")
    times = measured if given.times_from is None else find_run(given.times_from)
    number = 1
    while (measured / f"predicted-{number}").exists():
        number += 1
    predicted = measured / f"predicted-{number}"
    code = simulate(measured, summary, times, predicted, given)
    if code != 0:
        return code
    lines = ["| | measured | predicted | predicted / measured |", "|---|---|---|---|"]
    for name, *values in compare(measured, summary, predicted, read_of_run(predicted, "summary.json")):
        lines.append(_row(name, *values))
    text = "\n".join(lines)
    (predicted / "prediction.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {predicted / 'prediction.md'}")
    return 0


def _row(name: str, measured: float | None, predicted: float | None) -> str:
    """A line of the table; what is not known, or would be a share of nothing, is a dash.

    >>> _row("loss", 2.0, 3.0), _row("mean delay", 0.0, 1.0), _row("loss", 2.0, None), _row("mean delay", 2.0, 0.0)
    ('| loss | 2 | 3 | 1.5 |', '| mean delay | 0 | 1 | - |', '| loss | 2 | - | - |', '| mean delay | 2 | 0 | 0 |')
    """
    ratio = None
    if measured and predicted is not None:
        ratio = predicted / measured
    shown = ("-" if value is None else f"{value:.4g}" for value in (measured, predicted, ratio))
    return f"| {name} | {' | '.join(shown)} |"


def simulate(measured: Path, summary: dict[str, Any], times: Path, folder: Path, given: argparse.Namespace) -> int:
    """Run the settings of a run on the virtual clock, its gradients as long as those of the run `times`."""
    from asyncsgd.backends.launch import Launch
    from asyncsgd.run.choose_folder import open_named_folder
    from asyncsgd.run.lifecycle import lead
    from asyncsgd.run.written import TO_REPLAY, Given, run_beside
    from asyncsgd.scripts.task import class_given

    changes: dict[str, Any] = {**TO_REPLAY, "mode": "async", "clock": "virtual", "network": None}
    changes["speeds"] = f"trace:run={times},turnaround=true"
    if summary["mode"] == "sync":
        changes["rule"] = "synchronous"
    run = run_beside(measured, Given(class_given(given.task), cache=given.cache_dir), changes)
    opened = open_named_folder(folder, run, resume=False)
    return lead(run, Launch(run.runtime.num_workers, None, False), opened, None)


def compare(
    measured: Path, summary: dict[str, Any], predicted: Path, simulated: dict[str, Any]
) -> Iterator[tuple[str, float | None, float | None]]:
    """Rows of (what, measured, predicted)."""
    both = summary, simulated
    updates, simulated_updates = (one["num_updates"] / one["train_seconds"] for one in both)
    yield "updates per second", updates, simulated_updates
    yield "seconds in all", summary["train_seconds"], simulated["train_seconds"]
    for name in ("mean", "p50", "p95", "max"):
        yield f"delay {name}", summary["delay"][name], simulated["delay"][name]
    for column, told in (("total_samples", "{:.0f} samples"), ("train_seconds", "{:.1f} seconds")):
        own, other = (_curve(folder, column) for folder in (measured, predicted))
        for x, loss in own[1:]:
            yield f"loss at {told.format(x)}", loss, _at(other, x)
    final = max(one["final_eval_loss"] for one in both)
    yield f"seconds to loss {final:.4f}", _first(own, final), _first(other, final)


def _curve(folder: Path, column: str) -> Curve:
    curve = []
    for record in read_events(folder / EVENTS):
        if record["kind"] == "evaluate":
            curve.append((record[column], record["loss"]))
    return curve


def _at(points: Curve, x: float) -> float | None:
    """The loss at `x`, on straight lines between evaluations; None outside of them."""
    xs, losses = zip(*points, strict=True)
    if not xs[0] <= x <= xs[-1]:
        return None
    return float(np.interp(x, xs, losses))


def _first(points: Curve, loss: float) -> float | None:
    """Where the curve first comes down to `loss`, on straight lines between evaluations.

    >>> _first([(0, 4.0), (10, 2.0)], 3.0), _first([(0, 2.0), (10, 2.5), (20, 3.0)], 3.0)
    (5.0, 0)
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 <= loss:
            return x0
        if y1 <= loss:
            return x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)
    return None
