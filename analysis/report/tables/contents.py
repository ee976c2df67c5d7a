"""Which tables a report has, and what is in their cells; `analysis.report.tables.table` says how they are written."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from collections.abc import Callable, Iterable
from urllib.parse import quote

from analysis.findings.comparisons import FROM_SCRATCH
from analysis.findings.judging import TestRow
from analysis.findings.results import Results
from analysis.findings.tables import ArmInfo
from analysis.findings.workers import FitResult, Scaling
from analysis.report.tables.table import (
    MISSING,
    Cell,
    Column,
    Table,
    between,
    nats,
    number,
    p_value,
    percent,
    ratio,
    sentence,
    whose_targets,
)
from analysis.statistics.intervals import Interval

TONES = {
    "better": "good",
    "worse": "bad",
    "equivalent": "same",
    "different but negligible": "same",
    "non-inferior": "same",
    "DONE": "",
    "DIVERGED": "bad",
    "FAILED": "bad",
    "UNREADABLE": "bad",
    "INTERRUPTED": "warn",
    "UNFINISHED": "warn",
    "MISSING": "warn",
}

"""Word -> tone of its badge; any other verdict is an open one."""


def _level(intervals: Iterable[Interval | None], otherwise: float = 0.95) -> str:
    """What a column of intervals is headed by.

    >>> _level([None, Interval(0.0, -1.0, 1.0, 0.99, 8)]), _level([])
    ('99 % CI', '95 % CI')
    """
    level = next((interval.level for interval in intervals if interval is not None), otherwise)
    return f"{100 * level:.3g} % CI"


def _won(row: TestRow) -> str:
    """
    Pairs that the treatment won; of times, those in which neither had got there by the end of the budget are neither.
    """
    return f"{row.wins} of {row.n}" + f", {row.ties} even" * (row.ties > 0)


def _margin(row: TestRow) -> str:
    """What the margin is beside all that the reference improved by."""
    if row.margin_share is None:
        return ""
    refused = ": too wide" if row.equivalence is None and row.estimate is not None else ""
    return f"{percent(row.margin_share)} of the reference's improvement{refused}"


def _gap(value: float | None) -> str:
    return nats(value, 4)


def _variance(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def _general(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}"


def _counted(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def difference(row: TestRow) -> Cell:
    """The estimate of a test in the unit of its endpoint with the interval that its word rests on, n and the level."""
    form: Callable[[float | None], str] = number
    if row.endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds", "macro_f1", "accuracy"):
        form = _gap
    cell = between(row.deciding, form)
    if row.deciding is None:
        return cell
    return Cell(f"{cell.text} {row.unit}".strip(), f"{cell.small}, {_level([row.deciding])}")


def word(text: str) -> Cell:
    """A verdict or a status as a badge.

    >>> word("better").tone, word("undecided").tone
    ('good', 'open')
    """
    return Cell(text, tone=TONES.get(text, "open"))


def all_tables(results: Results, link: Callable[[str], str]) -> list[Table]:
    """Every table of the report, those without rows left out, in order.

    Args:
        results: what is shown.
        link: name of a run folder -> its relative address; an empty one where there is none.
    """
    made = [
        *conditions(results),
        settings(results),
        comparisons(results),
        sensitivity(results),
        scaling(results),
        fits(results),
        trends(results),
        delays(results),
        pareto(results),
        schedule(results),
        downstream(results),
        classes(results),
        hatecheck(results),
        tuning(results),
        counts(results),
        environment(results),
        runs(results, link),
        left_out(results),
    ]
    return [table for table in made if table.rows]


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
        columns = [
            Column("arm", numeric=False),
            Column("reached the target"),
            Column(f"median time ({unit})"),
            Column(f"restricted mean time ({unit})"),
            Column("speed-up"),
            Column("loss, equal samples (nats)"),
            Column("loss, equal seconds (nats)"),
            *map(Column, metrics),
            Column(f"training time ({unit})"),
            Column("updates"),
            Column("samples/update"),
            Column(f"samples/{unit}"),
            Column("delay p50 / p95 / max"),
            Column("computing / waiting / communicating"),
            Column("learning rate"),
            Column("diverged"),
        ]
        cells = [
            (
                Cell(arms[row.arm].label, "reference" * arms[row.arm].reference),
                Cell(MISSING if row.reached is None else f"{row.reached}/{row.n}"),
                Cell(number(row.median_seconds) if row.median_seconds is not None or not row.reached else MISSING),
                _restricted(row.restricted_mean, budgets.get(row.arm), unit),
                between(row.speed_up, ratio),
                between(row.loss_at_equal_samples, nats),
                _beside(between(row.loss_at_equal_seconds, nats), "at", seconds.get(arms[row.arm].group), unit),
                *[between(row.metric if row.metric_name == name else None, nats) for name in metrics],
                between(row.train_seconds, number),
                between(row.updates, number),
                Cell(_general(None if row.samples_per_update is None else float(f"{row.samples_per_update:.4g}"))),
                between(row.samples_per_second, number),
                Cell(" / ".join(_general(value) for value in (row.delay_p50, row.delay_p95, row.delay_max))),
                Cell(
                    " / ".join(percent(v) for v in (row.compute_share, row.wait_share, row.communication_share))
                    if row.compute_share is not None
                    else MISSING
                ),
                Cell(_general(row.learning_rate)),
                Cell(str(row.num_diverged)),
            )
            for row in rows
        ]
        title = f"Table 1{'ab'[len(tables)]}. Arms, {clock} clock" if len(results.clocks) > 1 else "Table 1. Arms"
        tables.append(
            Table(
                f"arms-{clock}",
                title,
                tuple(columns),
                tuple(cells),
                tuple(rows),
                "Means over test seeds with 95 % t intervals; speed-up as a geometric mean of the seeds' ratios, with "
                f"its {_level([row.speed_up for row in rows])}. Restricted mean time: of min(time, the second beside "
                "it), up to which all runs of the group were watched. Loss at equal seconds: at the last second that "
                "all finished runs of the group reached; Table 2 takes the last of the two runs of each pair, and so "
                "has other means.",
                narrow=True,
            )
        )
    return tables


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
    keys = [key for key, _ in results.settings[0].values] if results.settings else []
    labels = {arm.name: arm.label for arm in results.arms}
    rows = [(Cell(labels[row.arm]), *(Cell(_setting(value)) for _, value in row.values)) for row in results.settings]
    return Table(
        "settings",
        "Settings that differ between arms",
        (Column("arm", numeric=False), *(Column(key.replace("_", " ")) for key in keys)),
        tuple(rows),
        results.settings,
        "As the runs were started. All other settings are the same in the arms of a group.",
        narrow=True,
    )


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


def comparisons(results: Results) -> Table:
    """Table 2: every comparison with its test, correction, margin and verdict."""
    columns = (
        Column("comparison", numeric=False),
        Column("endpoint", numeric=False),
        Column("family", numeric=False),
        Column("reference"),
        Column("treatment"),
        Column("difference [CI]"),
        Column("d_z"),
        Column("ratio of mean times [CI]"),
        Column(f"share won [{_level(row.share for row in results.tests)}]"),
        Column("p"),
        Column("p, Holm"),
        Column("p, t test"),
        Column("margin; p, equivalence; p, non-inferiority"),
        Column("verdict", numeric=False),
        Column("why, and what limits it", numeric=False, wide=True),
    )
    rows = []
    for row in results.tests:
        form = number if row.endpoint == "time_to_target" else nats
        equivalence = MISSING
        if row.margin is not None:
            found = row.equivalence
            tested = (None, None) if found is None else (found.p, found.p_non_inferior)
            equivalence = "; ".join([f"±{row.margin:g}", *map(p_value, tested)])
        share = between(row.share, percent)
        rows.append(
            (
                Cell(row.comparison),
                Cell(row.endpoint_label),
                Cell(f"{row.family} ({row.family_size})"),
                Cell(form(row.reference_mean)),
                Cell(form(row.treatment_mean)),
                difference(row),
                Cell(MISSING if row.effect is None else f"{row.effect:.2f}"),
                between(None if row.times is None else row.times.ratio, ratio),
                Cell(share.text, _won(row) + ", convincing" * bool(row.convincing) if row.share is not None else ""),
                Cell(p_value(row.p)),
                Cell(p_value(row.p_holm)),
                Cell(p_value(row.t_p)),
                Cell(equivalence, _margin(row)),
                word(row.word),
                Cell(" ".join(sentence(text) for text in (row.reason, *row.notes) if text)),
            )
        )
    names = ", ".join(dict.fromkeys(row.test for row in results.tests)) or "exact sign-flip"
    return Table(
        "tests",
        "Table 2. Tests",
        columns,
        tuple(rows),
        results.tests,
        f"Difference: treatment - reference over seeds; below 0 is better for losses and times. Test: {names}; its "
        "interval holds the differences that it does not reject at the level at which Holm's method judges the row. "
        "Where the verdict rests on the margin, the interval is that of the equivalence test. "
        "Holm's correction within a family, whose size is in brackets: one endpoint in one group, and all comparisons "
        "with the baseline. Secondary: corrected, but not registered. Times are compared up to the second in their "
        "row: a pair in which neither got there by then is even and counts one half. Their ratio is reference / "
        "treatment, at the level of the difference. A share won is convincing above 75 % with its interval above one "
        "half. Non-inferiority: the side of the equivalence test that says not worse by more than the margin.",
        narrow=True,
    )


def first_tests(results: Results, most: int = 6) -> Table:
    """The rows of Table 2 that the eye meets first: the primary family, then the rest of its group; fewer columns."""
    columns = (
        Column("comparison", numeric=False),
        Column("endpoint", numeric=False),
        Column("difference [CI]"),
        Column("p"),
        Column("p, Holm"),
        Column("margin"),
        Column("verdict", numeric=False),
    )
    first = {group.name for group in results.groups if group.primary}
    named = next((headline.group for headline in results.headlines), "")  # in words, above the table
    ordered = sorted(results.tests, key=lambda row: (row.family != "primary", row.group not in first))[:most]
    rows = []
    for row in ordered:
        small = row.family
        shown = difference(row) if row.estimate is not None else Cell(MISSING, row.reason)
        if row.times is not None and row.estimate is not None:
            won = f"won {_won(row)}"
            if row.times.ratio is not None:
                won = f"{between(row.times.ratio, ratio).text} in mean time, {won}"
            shown = Cell(shown.text, "; ".join(part for part in (shown.small, won) if part))
        rows.append(
            (
                Cell(row.comparison.removesuffix(f", {row.group}") if row.group == named else row.comparison, small),
                Cell(row.endpoint_label),
                shown,
                Cell(p_value(row.p)),
                Cell(p_value(row.p_holm)),
                Cell(MISSING if row.margin is None else f"±{row.margin:g}", _margin(row)),
                word(row.word),
            )
        )
    names = ", ".join(dict.fromkeys(row.test for row in ordered)) or "exact sign-flip"
    notes = [f"Treatment - reference, paired by seed: below 0 is better for losses and times. p: {names}."]
    if len(results.tests) > most:
        notes.append(f"{len(results.tests) - most} more comparisons are in Table 2 below.")
    return Table(
        "first-tests",
        "The tests",
        columns,
        tuple(rows),
        tuple(ordered),
        "",
        tuple(notes),
        narrow=True,
        cards=True,
    )


def sensitivity(results: Results) -> Table:
    shares = sorted({point.share for item in results.sensitivity for point in item.points})
    columns = (Column("comparison", numeric=False), *(Column(f"at {percent(share)} [95 % CI]") for share in shares))
    rows = []
    for item in results.sensitivity:
        points = {point.share: point for point in item.points}
        cells = [Cell(item.comparison)]
        for share in shares:
            point = points.get(share)
            if point is None:
                cells.append(Cell(MISSING))
                continue
            cell = between(point.speed_up, ratio)
            got = f"target {nats(point.target)}"
            if min(point.reached_treatment, point.reached_reference) < point.n:
                got += f", reached {point.reached_treatment} : {point.reached_reference} of {point.n}"
            cells.append(Cell(cell.text, "; ".join(part for part in (cell.small, got) if part)))
        rows.append(tuple(cells))
    return Table(
        "sensitivity",
        "Speed-up at every target",
        columns,
        tuple(rows),
        tuple((item, point) for item in results.sensitivity for point in item.points),
        "Target: that share of the reference's improvement. Speed-up: geometric mean over the pairs that got there."
        + whose_targets(results.sensitivity),
        narrow=True,
    )


def scaling(results: Results) -> Table:
    workers = sorted({point.num_workers for item in results.scaling for point in item.points})
    columns = (
        Column("algorithm", numeric=False),
        Column("clock", numeric=False),
        *(Column(f"{count} worker{'s' * (count != 1)} [95 % CI]") for count in workers),
    )
    rows = []
    for item in results.scaling:
        points = {point.num_workers: point for point in item.points}
        cells = [Cell(item.algorithm), Cell(_where(item.clock, item.speeds), item.unit)]
        for count in workers:
            point = points.get(count)
            cell = between(None if point is None else point.throughput, number)
            busy = point is not None and point.oversubscribed
            cells.append(Cell(cell.text, "; ".join([cell.small, *["oversubscribed"] * busy]) if cell.small else ""))
        rows.append(tuple(cells))
    return Table(
        "scaling",
        "Throughput over workers",
        columns,
        tuple(rows),
        tuple((item, point) for item in results.scaling for point in item.points),
        narrow=True,
    )


def fits(results: Results) -> Table:
    columns = (
        Column("algorithm", numeric=False),
        Column("clock", numeric=False),
        Column("law", numeric=False),
        Column("parameters [95 % BCa]", numeric=False, wide=True),
        Column("peak (workers)"),
        Column("AICc (less that of Amdahl)"),
    )
    rows = []
    for item in results.scaling:
        for fit in item.fits:
            intervals = dict(fit.intervals)
            told = [
                f"{name} {between(intervals[name], number).text if name in intervals else number(value)}"
                for name, value in fit.parameters
            ]
            rows.append(
                (
                    Cell(item.algorithm),
                    Cell(_where(item.clock, item.speeds)),
                    Cell({"usl": "universal scalability", "amdahl": "Amdahl"}[fit.model]),
                    Cell(", ".join(told) if not fit.refused else f"none: {fit.refused}"),
                    Cell(MISSING if fit.peak is None else f"{fit.peak:.1f}"),
                    _aicc(item, fit),
                )
            )
    records = tuple((item, fit) for item in results.scaling for fit in item.fits)
    lead = "BCa: a bootstrap of whole seeds; with few seeds it is too narrow (experiments/benchmarks/error_rates.py)."
    return Table("fits", "Laws fitted to the throughput", columns, tuple(rows), records, lead, narrow=True)


def _aicc(item: Scaling, fit: FitResult) -> Cell:
    """Below 0 in brackets the universal scalability law is preferred; it is no test."""
    if fit.model == "amdahl" or item.aicc_difference is None:
        return Cell(number(fit.aicc))
    return Cell(f"{number(fit.aicc)} ({item.aicc_difference:+.1f})")


def trends(results: Results) -> Table:
    columns = (
        Column("algorithm", numeric=False),
        Column("clock", numeric=False),
        Column("workers", numeric=False),
        Column("nats per doubling of the workers [95 % CI]"),
        Column("Page's L"),
        Column("p"),
        Column("why not", numeric=False, wide=True),
    )
    rows = [
        (
            Cell(item.algorithm),
            Cell(_where(item.clock, item.speeds)),
            Cell(", ".join(map(str, item.workers))),
            between(item.slope, _gap),
            Cell(number(item.page_statistic)),
            Cell(p_value(item.page_p)),
            Cell(item.refused),
        )
        for item in results.trends
    ]
    return Table("trends", "Loss at equal samples over workers", columns, tuple(rows), results.trends)


def delays(results: Results) -> Table:
    labels = _labels(results)
    columns = (
        Column("arm", numeric=False),
        Column("runs"),
        Column("gradients applied"),
        Column("mean"),
        Column("p50"),
        Column("p95"),
        Column("max"),
    )
    rows = [
        (
            Cell(labels.get(item.arm, item.arm)),
            Cell(str(item.num_runs)),
            Cell(_counted(sum(item.counts))),
            Cell(nats(item.mean, 2)),
            Cell(_general(item.p50)),
            Cell(_general(item.p95)),
            Cell(_counted(item.max)),
        )
        for item in results.delays
    ]
    return Table("delays", "Delay of the applied gradients (updates)", columns, tuple(rows), results.delays)


def pareto(results: Results) -> Table:
    labels = _labels(results)
    columns = (
        Column("arm", numeric=False),
        Column("runs", numeric=False),
        Column("clock", numeric=False),
        Column("seconds"),
        Column("loss (nats)"),
        Column("n"),
        Column("on the front", numeric=False),
        Column("share of bootstrap samples on it"),
    )
    rows = [
        (
            Cell(labels.get(point.arm, point.arm)),
            Cell(", ".join(f"{key} {value}" for key, value in point.trial) or "test", "tuning" * bool(point.trial)),
            Cell(_where(panel.clock, panel.speeds)),
            Cell(number(point.seconds)),
            Cell(nats(point.loss)),
            Cell(str(point.n)),
            Cell("yes" if point.on_front else "no"),
            Cell(percent(point.share)),
        )
        for panel in results.pareto
        for point in panel.points
        if point.on_front or not point.trial
    ]
    return Table(
        "pareto",
        "Final loss and seconds",
        columns,
        tuple(rows),
        tuple((panel, point) for panel in results.pareto for point in panel.points),
        "Test runs, and those tuning trials that are on the front of all trials, which ran on other seeds than the "
        "tests; the other trials are in the CSV.",
        tuple(
            f"{_where(panel.clock, panel.speeds)}: the area that the test runs dominate is "
            f"{number(panel.hypervolume)}, up to the budget of {labels.get(panel.reference_arm, panel.reference_arm)} "
            f"({number(panel.reference_point[0])} s) and its first loss ({nats(panel.reference_point[1])})."
            for panel in results.pareto
            if panel.reference_point is not None and panel.reference_arm is not None
        ),
    )


def schedule(results: Results) -> Table:
    labels = _labels(results)
    columns = (
        Column("arm", numeric=False),
        Column("seeds x replicates"),
        Column("variance, schedule (nats²) [95 % CI]"),
        Column("variance, seed (nats²)"),
        Column("share of the schedule [95 % CI]"),
        Column("p"),
        Column("why not", numeric=False, wide=True),
    )
    rows = [
        (
            Cell(labels.get(item.arm, item.arm)),
            Cell(f"{item.num_seeds} x {item.num_replicates}"),
            between(item.schedule_variance, _variance),
            Cell(MISSING if item.seed_variance is None else f"{item.seed_variance:.3g}"),
            between(item.share, percent),
            Cell(p_value(item.p)),
            Cell(item.refused),
        )
        for item in results.schedule
    ]
    return Table("schedule", "How much of the noise is the schedule", columns, tuple(rows), results.schedule)


def downstream(results: Results) -> Table:
    columns = (
        Column("arm", numeric=False),
        Column("data", numeric=False),
        Column("macro-F1 [95 % CI]"),
        Column("accuracy [95 % CI]"),
        Column("HateCheck accuracy [95 % CI]"),
        Column("fine-tuning runs"),
    )
    rows = [
        (
            Cell(item.label, "no intermediate training" * (item.baseline and "intermediate" not in item.label)),
            Cell(item.data),
            between(item.macro_f1, nats),
            between(item.accuracy, nats),
            between(item.hatecheck, nats),
            Cell(str(item.num_finetuning_runs)),
        )
        for item in results.downstream
    ]
    return Table(
        "downstream",
        "Scores after fine-tuning",
        columns,
        tuple(rows),
        results.downstream,
        "Mean over the fine-tuning runs of a pretraining seed, then over pretraining seeds, with 95 % t intervals.",
    )


def classes(results: Results) -> Table:
    names = list(dict.fromkeys(score.label for item in results.downstream for score in item.classes))
    columns = (Column("arm", numeric=False), *(Column(f"F1 of {name} [95 % CI]") for name in names))
    rows = []
    for item in results.downstream:
        scores = {score.label: score.f1 for score in item.classes}
        if scores:
            rows.append((Cell(item.label), *(between(scores.get(name), nats) for name in names)))
    records = tuple(item for item in results.downstream if item.classes)
    return Table("classes", "F1 per class", columns, tuple(rows), records)


def hatecheck(results: Results) -> Table:
    arms = [item for item in results.downstream if item.functionalities]
    names = list(dict.fromkeys(check.functionality for item in arms for check in item.functionalities))
    cases = {check.functionality: check.num_cases for item in arms for check in item.functionalities}
    columns = (
        Column("functional test", numeric=False),
        Column("cases"),
        *(Column(f"{item.label} [95 % CI]") for item in arms),
    )
    found = [{check.functionality: check.accuracy for check in item.functionalities} for item in arms]
    rows = tuple(
        (Cell(name), Cell(_counted(cases[name])), *(between(scores.get(name), nats) for scores in found))
        for name in names
    )
    return Table("hatecheck", "HateCheck: accuracy per functional test", columns, rows, tuple(arms))


def tuning(results: Results) -> Table:
    """Table 3: what was tried, with how many runs, and what was chosen."""
    labels = _labels(results)
    columns = (
        Column("arm", numeric=False),
        Column("trials"),
        Column("runs"),
        Column("seeds", numeric=False),
        Column("grid: score (nats)", numeric=False, wide=True),
        Column("chosen", numeric=False),
        Column("at the edge of the grid", numeric=False),
    )
    rows = []
    for item in results.tuning:
        grid = []
        for trial in item.trials:
            shown = dict(trial.settings)
            what = _general(trial.learning_rate) if trial.learning_rate is not None else ""
            rest = [f"{key} {value}" for key, value in shown.items() if key != "learning_rate"]
            name = ", ".join([what, *rest] if what else rest) or "as it is"
            lost = sum(loss is None for loss in trial.losses)
            failed = f", {lost} of {len(trial.losses)} diverged or failed" if lost else ""
            grid.append(f"{name}: {nats(trial.score)}{failed}")
        seeds = sorted({seed for trial in item.trials for seed in trial.seeds})
        rows.append(
            (
                Cell(labels.get(item.arm, item.arm)),
                Cell(str(len(item.trials))),
                Cell(str(item.num_runs)),
                Cell(", ".join(map(str, seeds))),
                Cell("; ".join(grid)),
                Cell(", ".join(f"{key} {value}" for key, value in item.chosen) or MISSING),
                Cell("yes" if item.at_edge else "no", tone="warn" if item.at_edge else ""),
            )
        )
    return Table(
        "tuning",
        "Table 3. Tuning",
        columns,
        tuple(rows),
        results.tuning,
        "On seeds that no test uses; a trial was chosen by its score, the mean final loss at equal samples, whatever "
        "the endpoint of the tests.",
    )


def counts(results: Results) -> Table:
    labels = _labels(results)
    columns = (
        Column("arm", numeric=False),
        Column("stage", numeric=False),
        *(Column(name) for name in ("planned", "finished", "diverged", "failed", "missing", "set aside")),
    )
    rows = [
        (
            Cell(labels.get(item.arm, item.arm)),
            Cell(item.stage),
            *(
                Cell(_counted(value))
                for value in (item.planned, item.finished, item.diverged, item.failed, item.missing, item.set_aside)
            ),
        )
        for item in results.counts
    ]
    return Table("counts", "Runs planned and finished", columns, tuple(rows), results.counts)


def environment(results: Results) -> Table:
    """Table 4: hardware and versions, one column per distinct environment."""
    what = list(dict.fromkeys(name for row in results.hardware for name, _ in row.values))
    columns = (
        Column("what", numeric=False),
        *(
            Column(f"environment {place} ({row.num_runs} runs)" if len(results.hardware) > 1 else "value", False, True)
            for place, row in enumerate(results.hardware, 1)
        ),
    )
    rows = tuple(
        (Cell(name), *(Cell(dict(row.values).get(name, MISSING)) for row in results.hardware)) for name in what
    )
    return Table("environment", "Table 4. Hardware and versions", columns, rows, results.hardware)


def runs(results: Results, link: Callable[[str], str]) -> Table:
    columns = (
        Column("run", numeric=False),
        Column("stage", numeric=False),
        Column("arm", numeric=False),
        Column("seed"),
        Column("status", numeric=False),
        Column("final loss (nats)"),
        Column("macro-F1"),
        Column("seconds"),
        Column("clock", numeric=False),
        Column("samples"),
        Column("learning rate"),
        Column("in the tests", numeric=False),
        Column("remark", numeric=False, wide=True),
    )
    rows = []
    for run in results.runs:
        seed = MISSING if run.seed is None else str(run.seed)
        seed += f", replicate {run.replicate}" * (run.replicate > 0)
        seed += "" if run.finetune_seed is None else f", fine-tuning {run.finetune_seed}"
        remarks = [
            run.remark,
            FROM_SCRATCH if run.from_scratch else "",
            "oversubscribed" if run.oversubscribed else "",
            f"from {run.parent}" if run.parent else "",
        ]
        rows.append(
            (
                Cell(run.name, href=link(run.name) if run.exists else ""),
                Cell(run.stage),
                Cell(run.arm),
                Cell(seed),
                Cell(run.status, tone=TONES.get(run.status, "open")),
                Cell(nats(run.loss)),
                Cell(nats(run.macro_f1)),
                Cell(number(run.train_seconds)),
                Cell(run.clock),
                Cell(_counted(run.num_samples)),
                Cell(_general(run.learning_rate)),
                Cell("yes" if run.in_tests else "no"),
                Cell("; ".join(text for text in remarks if text)),
            )
        )
    return Table("runs", "Every run", columns, tuple(rows), results.runs)


def left_out(results: Results) -> Table:
    columns = (Column("what", numeric=False), Column("why", numeric=False, wide=True))
    rows = [(Cell(item.name), Cell(item.reason)) for item in results.left_out]
    rows += [(Cell("read, with a problem"), Cell(problem)) for problem in results.problems]
    return Table("left-out", "Left out, and problems", columns, tuple(rows), results.left_out)


def relative_link(prefix: str, name: str) -> str:
    """The address of a run folder as seen from the page; never one that begins with a scheme.

    >>> relative_link("runs", "test/sync-w4/s100"), relative_link(".", "javascript:alert(1)")
    ('./runs/test/sync-w4/s100/', './javascript%3Aalert%281%29/')
    """
    path = quote(posixpath.normpath(posixpath.join(prefix, name)), safe="/.-_~")
    return f"{path}/" if path.startswith((".", "/")) else f"./{path}/"


def _labels(results: Results) -> dict[str, str]:
    arms: Iterable[ArmInfo] = results.arms
    return {arm.name: arm.label for arm in arms}


def _where(clock: str, speeds: str | None) -> str:
    return f"{clock}, {speeds}" if speeds else clock
