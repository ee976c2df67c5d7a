"""Tables with a row an arm: what it reached, its settings, its delays."""

from __future__ import annotations

import dataclasses
import math

from analysis.findings.arms import ArmRow
from analysis.findings.results import Results
from analysis.report.tables.number_formats import between, nats, number, percent
from analysis.report.tables.table import Cell, Table, tabled, value, words
from analysis.report.tables.text import MISSING, or_missing
from analysis.statistics.intervals import Interval


def clocks_of(results: Results) -> tuple[str, ...]:
    """The clocks of the runs, that of the primary comparison first."""
    return tuple(dict.fromkeys([*(group.clock for group in results.groups), *results.clocks]))


def conditions(results: Results) -> list[Table]:
    """Table 1: one row per arm. Measured and virtual seconds are in two tables."""
    arms = {arm.name: arm for arm in results.arms}
    budgets = {curve.arm: panel.budget for panel in results.reached for curve in panel.curves}
    seconds = _common_seconds(results)
    tables: list[Table] = []
    for clock in clocks_of(results):
        rows = [row for row in results.table if row.arm in arms and arms[row.arm].clock == clock]
        unit = "virtual s" if clock == "virtual" else "s"
        metrics = list(dict.fromkeys(row.metric_name for row in rows if row.metric_name is not None))
        cells = [
            [
                words("arm", Cell(arms[row.arm].label, "reference" * arms[row.arm].reference)),
                value("reached the target", MISSING if row.reached is None else f"{row.reached}/{row.n}"),
                value(
                    f"median time ({unit})",
                    number(row.median_seconds) if row.median_seconds is not None or not row.reached else MISSING,
                ),
                value(f"restricted mean time ({unit})", _restricted(row.restricted_mean, budgets.get(row.arm), unit)),
                value("loss, equal samples (nats)", _of_the_rest(between(row.loss_at_equal_samples, nats), row)),
                value(
                    "loss, equal seconds (nats)",
                    _of_the_rest(
                        _beside(between(row.loss_at_equal_seconds, nats), "at", seconds.get(arms[row.arm].group), unit),
                        row,
                    ),
                ),
                *[value(name, between(row.metric if row.metric_name == name else None, nats)) for name in metrics],
                value(f"training time ({unit})", between(row.train_seconds, number)),
                value("updates", between(row.updates, number)),
                value(
                    "samples/update",
                    or_missing(None if row.samples_per_update is None else float(f"{row.samples_per_update:.4g}")),
                ),
                value(f"samples/{unit}", between(row.samples_per_second, number)),
                value(
                    "delay p50 / p95 / max",
                    " / ".join(map(or_missing, (row.delay_p50, row.delay_p95, row.delay_max))),
                ),
                value(
                    "computing / waiting / communicating",
                    " / ".join(map(percent, (row.compute_share, row.wait_share, row.communication_share)))
                    if row.compute_share is not None
                    else MISSING,
                ),
                value("learning rate", or_missing(row.learning_rate)),
                value("diverged", str(row.num_diverged)),
            ]
            for row in rows
        ]
        tables.append(
            tabled(
                f"arms-{clock}",
                f"Table 1{'ab'[len(tables)]}. Arms, {clock} clock" if len(results.clocks) > 1 else "Table 1. Arms",
                cells,
                rows,
                lead="Means over test seeds with 95 % t intervals. Restricted mean time: of min(time, the second "
                "beside it), up to which all runs of the group were watched. Loss at equal seconds: at the last second "
                "that all finished runs of the group reached; Table 2 takes the last of the two runs of each pair, and "
                "so has other means.",
                narrow=True,
            )
        )
    return tables


def _common_seconds(results: Results) -> dict[str, float]:
    """Group -> the last second that all finished runs of it have a loss at: where the mean curves of its arms end."""
    groups = {arm.name: arm.group for arm in results.arms}  # a control arm is drawn in the panel of another group
    ends: dict[str, list[float]] = {}
    for panel in results.curves:
        for curve in panel.curves if panel.axis == "seconds" else ():
            if curve.band is not None and curve.band.x and curve.arm in groups:
                ends.setdefault(groups[curve.arm], []).append(curve.band.x[-1])
    return {group: min(last) for group, last in ends.items()}


def _restricted(mean: Interval | None, budget: float | None, unit: str) -> Cell:
    """The mean of min(time, budget); none where it is the budget, because no run got there before it was over."""
    if mean is not None and budget is not None and math.isclose(mean.estimate, budget):
        return Cell(MISSING, f"none before {number(budget)} {unit}")
    return _beside(between(mean, number), "up to", budget, unit)


def _beside(cell: Cell, what: str, second: float | None, unit: str) -> Cell:
    """`cell` with the second that it holds for."""
    if cell.text == MISSING or second is None:
        return cell
    told = f"{what} {number(second)} {unit}"
    return dataclasses.replace(cell, small="; ".join(part for part in (cell.small, told) if part))


def _of_the_rest(cell: Cell, row: ArmRow) -> Cell:
    """A mean of the runs that did not diverge, with how many did."""
    told = (cell.small, _diverged(row.num_diverged, row.n))
    return dataclasses.replace(cell, small="; ".join(part for part in told if part))


def _diverged(number: int, n: int) -> str:
    return f"diverged {number}/{n}" if number else ""


def _setting(text: str) -> str:
    """
    >>> _setting("7.297834752999734"), _setting("ringmaster:threshold=8"), _setting("None")
    ('7.29783', 'ringmaster:threshold=8', '-')
    """
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return MISSING if text == "None" else text


def settings(results: Results) -> Table:
    """What else may explain a difference: the settings that are not the same in all arms of a group."""
    rows = [
        [
            words("arm", results.labels[row.arm]),
            *(value(key.replace("_", " "), _setting(setting)) for key, setting in row.values),
        ]
        for row in results.settings
    ]
    return tabled(
        "settings",
        "Settings that differ between arms",
        rows,
        results.settings,
        lead="As the runs were started. All other settings are the same in the arms of a group.",
        narrow=True,
    )


def delays(results: Results) -> Table:
    rows = [
        [
            words("arm", results.labels.get(item.arm, item.arm)),
            value("runs", str(item.num_runs)),
            value("gradients applied", or_missing(sum(item.counts), ",")),
            value("mean", nats(item.mean, 2)),
            value("p50", or_missing(item.p50)),
            value("p95", or_missing(item.p95)),
            value("max", or_missing(item.max, ",")),
        ]
        for item in results.delays
    ]
    return tabled("delays", "Delay of the applied gradients (updates)", rows, results.delays)
