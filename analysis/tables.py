"""Every table of a report as a DataFrame with plain numbers; `written` is how its cells are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from analysis.gate import compare_arms, differences_by_design
from analysis.questions import Plan, groups, labels
from analysis.runs import Columns, RunRow, each, rows_with, with_labels
from analysis.scores import scored_by
from analysis.stats import Interval, t_interval
from analysis.trust import at_edge
from asyncsgd.studies.files import Tried

EMPTY_CELL = "-"
"""A cell without a value."""
PAPER_COLUMNS = ["arm", "time (s)", "times sooner", "loss", "verdict"]
"""Columns of the table for a paper; names and words may take two lines."""
PAPER_LATEX_FORMAT = r"@{}p{0.25\columnwidth}rrrp{0.19\columnwidth}@{}"
UNKNOWN = Interval(math.nan, math.nan, math.nan, 0.95, 0)
"""The mean of values that are not there."""
MEANS = ("loss", "metric", "seconds", "samples_per_second", "updates", "samples_per_update", "delay_p95", "delay_max")
"""Columns of `runs` of which an arm's row has the mean with its interval."""
COSTS = ("computing", "waiting", "communicating", "memory_gib", "gpu_gib", "tokens_per_second", "mfu")
"""Columns of `runs` of which it has the mean alone."""


def tested(runs: DataFrame) -> DataFrame:
    """The runs from which the numbers of a study are computed."""
    return rows_with(runs, stage="test", usable=True, replicate=0)


def arms(runs: DataFrame, tests: DataFrame, plan: Plan) -> DataFrame:
    """Table 1: what every arm reached and cost, means over seeds with 95 % t intervals."""
    used = tested(runs)
    to_target = rows_with(tests, endpoint="time_to_target")
    rows = []
    for arm, own in used.groupby("arm", sort=False):
        first = own.iloc[0]
        alive = own[~own["diverged"]]
        row = {
            "arm": arm,
            "clock": first["clock"],
            "workers": first["workers"],
            "runs": len(own),
            "diverged": int(own["diverged"].sum()),
            "learning_rate": first["learning_rate"],
        }
        row |= _to_the_target(to_target, str(arm))
        for name in MEANS:
            row[name] = t_interval(alive[name])
        row |= _over_one_worker(used, own, plan)
        for name in COSTS:
            row[name] = float(alive[name].mean())
        rows.append(row)
    return without_empty(DataFrame(rows))


def _to_the_target(to_target: DataFrame, arm: str) -> Columns:
    """Runs at the target by the end of the budget, and the mean time there, counted up to the budget.

    Both are of the arm's first test, which is that of the registered comparison where it is in one. A reference arm so
    has the target and the budget of its first pair: each pair may have others.
    """
    is_treatment = to_target["treatment"] == arm
    is_reference = to_target["reference"] == arm
    of_arm = to_target[is_treatment | is_reference]
    if of_arm.empty or not of_arm["n"].iloc[0]:
        return {"reached": "", "time": UNKNOWN}
    row = of_arm.iloc[0]
    if row["treatment"] == arm:
        count = row["reached"][0]
        times = row["treatment_values"]
    else:
        count = row["reached"][1]
        times = row["reference_values"]
    reached = f"{count} of {row['n']} by {row['budget']:.4g} {row['unit']}"
    return {"reached": reached, "time": t_interval(times)}


def _over_one_worker(used: DataFrame, own: DataFrame, plan: Plan) -> Columns:
    """The throughput of an arm over one worker's, that ratio over the number of workers, and why both are nan.

    One worker's throughput is the mean over the runs of all arms with one worker; both are nan where one of these arms
    is not comparable. A run that diverged has a throughput like any other and is counted.
    """
    first = own.iloc[0]
    alone = rows_with(used, workers=1, clock=first["clock"], task=first["task"])
    reasons = []
    for arm, of_arm in alone.groupby("arm", sort=False):
        allowed_differences = differences_by_design(first["arm"], str(arm), plan)
        gated = compare_arms(own, of_arm, allowed_differences)
        reasons.append(gated.why_not_comparable or gated.why_untimed)
    why = next(filter(None, reasons), "")
    if why or not reasons:
        return {"speed_up": math.nan, "efficiency": math.nan, "no_speed_up": why}
    rate = own["samples_per_second"].mean()
    rate_alone = alone["samples_per_second"].mean()
    speed_up = float(rate / rate_alone)
    return {"speed_up": speed_up, "efficiency": speed_up / first["workers"], "no_speed_up": ""}


def settings(runs: DataFrame) -> DataFrame:
    """The settings in which arms differ, as their runs were started."""
    used = rows_with(runs, stage="test", usable=True)
    first = used.groupby("arm", sort=False)["settings"].first()
    every = DataFrame(list(first), index=first.index)
    every = every.drop(columns=["seed", "mode", "rule"], errors="ignore")
    differs = every.astype(str).nunique(dropna=False) > 1
    if not differs.any():
        return DataFrame(columns=["arm"])
    return every.loc[:, differs].reset_index()


QUESTION_COLUMNS = ("treatment", "reference", "group", "endpoint", "family", "family_size", "n")
ANSWER_COLUMNS = ("unit", "test", "p", "p_holm", "margin", "p_equal", "word", "reason", "left_out")


def comparisons(tests: DataFrame) -> DataFrame:
    """Table 2: every question with its answer.

    `difference` has the interval of the test of a difference, whatever the word is. The interval of the equivalence
    test is in the columns `equal_low` and `equal_high` of `tests`.
    """
    table = tests[[*QUESTION_COLUMNS]].copy()
    table["better"] = [f"{row.wins} of {row.n}" if row.test else "" for row in tests.itertuples()]
    table["difference"] = _intervals(tests, "estimate", "low", "high")
    table["times_sooner"] = _intervals(tests, "ratio", "ratio_low", "ratio_high")
    for name in ANSWER_COLUMNS:
        table[name] = tests[name]
    return table


def _intervals(tests: DataFrame, estimate: str, low: str, high: str) -> Series:
    """An interval for every row, of the columns of its estimate and its two ends."""
    level = 1 - tests["alpha"] / tests["family_size"]
    rows = zip(tests[estimate], tests[low], tests[high], level, tests["n"], strict=True)
    intervals = [Interval(*parts) for parts in rows]
    return Series(intervals, index=tests.index, dtype=object)


def paper(runs: DataFrame, tests: DataFrame, plan: Plan) -> DataFrame:
    """For a column of a paper: arm, time to the target, times sooner, loss, word of the registered endpoint.

    The word is that against the reference. Where no endpoint is registered, it is that of the first test.
    """
    arms_in_groups = groups(runs, plan)
    named = labels(arms_in_groups)
    references = arms_in_groups.index[arms_in_groups["algorithm"] == plan.reference]
    endpoint = plan.registered.primary.endpoint
    rows = []
    for row in arms(runs, tests, plan).to_dict("records"):
        own = rows_with(tests[tests["reference"].isin(references)], treatment=row["arm"])
        words = [test.word for test in own.itertuples() if endpoint in ("", test.endpoint)]
        word = next(iter(words), EMPTY_CELL)
        if row["arm"] in references:
            word = "reference"
        name = named.get(row["arm"], row["arm"])
        is_simulated = row["clock"] == "virtual"
        time = _three_digits(row.get("time", UNKNOWN))
        loss = _three_digits(row.get("loss", UNKNOWN))
        rows.append((_short(name, is_simulated), time, _ratio(own), loss, word))
    return DataFrame(rows, columns=PAPER_COLUMNS)


def _short(name: str, is_simulated: bool) -> str:
    """The label of an arm, for a narrow column.

    >>> _short("async, 4 workers, measured", False), _short("async, 4 workers", True)
    ('async, 4, meas.', 'async, 4, sim.')
    """
    name = re.sub(" workers?", "", name)
    name = name.replace("simulated", "sim.")
    name = name.replace("measured", "meas.")
    if is_simulated and "sim." not in name:
        return f"{name}, sim."
    return name


def _three_digits(interval: Interval) -> str:
    """The estimate with three significant digits."""
    if math.isnan(interval.estimate):
        return EMPTY_CELL
    return f"{interval.estimate:#.3g}".rstrip(".")


def _ratio(tests: DataFrame) -> str:
    """The first ratio of the times to the target, with its interval where it has one."""
    timed = rows_with(tests, endpoint="time_to_target")
    known = timed[timed["ratio"].notna()]
    if known.empty:
        return EMPTY_CELL
    first = known.iloc[0]
    shown = f"{first['ratio']:.2f}"
    if math.isnan(first["ratio_low"]):
        return shown
    return f"{shown} [{first['ratio_low']:.2f}, {first['ratio_high']:.2f}]"


def tuning(runs: DataFrame, plan: Plan) -> DataFrame:
    """Table 3: the trials of every arm with the settings that they tried, and the one that was chosen.

    `runs` are those with a result, and `loss` is the mean of those that did not diverge. `score` is what trials of a
    labelled task are chosen by.

    >>> from analysis.questions import NO_PLAN
    >>> from asyncsgd.studies.files import PlannedArm, Tried
    >>> values = ((0.0, 0.7), (0.9, None))
    >>> tried = [Tried({"learning_rate": 0.1, "momentum": each}, [0, 1], [], score) for each, score in values]
    >>> arm = PlannedArm("sync", "sync", {}, chosen=tried[0].settings, trials=tried)
    >>> runs = DataFrame({"stage": "tuning", "arm": "sync", "trial": [0, 0, 1, 1], "loss": [5.0, 6.0, 7.0, 9.0]})
    >>> runs = runs.assign(usable=True, diverged=[False, False, False, True])
    >>> print(tuning(runs, NO_PLAN._replace(arms={"sync": arm})).to_string(index=False))
     arm  learning_rate  momentum  loss  score  runs  diverged  chosen  at_edge
    sync            0.1       0.0   5.5    0.7     2         0    True    False
    sync            0.1       0.9   7.0    NaN     2         1   False    False
    """
    tried = runs[runs["stage"] == "tuning"]
    edge = {name for name, arm in plan.arms.items() if at_edge(arm)}
    names = []
    settings = []
    results = []
    for (name, _), own in tried.groupby(["arm", "trial"], sort=False, dropna=False):
        usable = own[own["usable"]]
        alive = usable[~usable["diverged"]]
        trial = _trial_of(own.iloc[0], plan)
        is_chosen = name in plan.arms and plan.arms[name].chosen == trial.settings
        names.append(name)
        settings.append(trial.settings)
        results.append(
            {
                "loss": alive["loss"].mean(),
                "score": math.nan if trial.score is None else trial.score,
                "runs": len(usable),
                "diverged": len(usable) - len(alive),
                "chosen": is_chosen,
                "at_edge": is_chosen and name in edge,
            }
        )
    table = pd.concat((DataFrame({"arm": names}), DataFrame(settings), DataFrame(results)), axis=1)
    if results and np.allclose(table["score"].fillna(table["loss"]), table["loss"], equal_nan=True):
        return table.drop(columns="score")  # the loss is what they are chosen by, or no plan says it
    return table


def _trial_of(run: Any, plan: Plan) -> Tried:
    """The trial of a tuning run; without a plan its learning rate is what it tried."""
    arm = plan.arms.get(run.arm)
    if arm is None or not run.trial < len(arm.trials):
        return Tried({"learning_rate": run.learning_rate}, [], [])
    return arm.trials[int(run.trial)]


def downstream(runs: DataFrame) -> DataFrame:
    """Scores after fine-tuning: means over the repetitions of a pretraining seed, then over these seeds.

    Fine-tunings on several tasks or data have a row for each of these.
    """
    finetuned = with_labels(runs)
    if finetuned.empty:
        return DataFrame(columns=["arm", "score"])
    rows = []
    for run in each(finetuned):
        row = {"arm": run.arm, "scored_by": scored_by(run), "seed": run.seed, "score": run.metric}
        rows.append(row | _scores(run.details))
    table = _over_seeds(rows, ["arm", "scored_by"])
    return table if table["scored_by"].nunique() > 1 else table.drop(columns="scored_by")


def _scores(details: dict[str, Any]) -> dict[str, float]:
    """The scores that a fine-tuning recorded beside the one that it is judged by, by the heading of their column."""
    metrics = details.get("metrics") or {}
    scores = {"accuracy": metrics.get("accuracy")}
    of_classes = details.get("per_class_f1")
    if not of_classes:
        of_types = details.get("per_type") or {}
        of_classes = {name: of_type.get("f1") for name, of_type in of_types.items()}
    for name, score in of_classes.items():
        scores[f"F1 {name}"] = score
    hatecheck = details.get("hatecheck") or {}
    if hatecheck:
        scores["HateCheck"] = hatecheck.get("accuracy")
    for name, functionality in (hatecheck.get("functionalities") or {}).items():
        scores[f"HateCheck {name}"] = functionality["accuracy"]
    return _with_nan(scores)


def _with_nan(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, of which those that are not known are nan."""
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def evaluation_sets(runs: DataFrame) -> DataFrame:
    """What every arm reached on each of several evaluation sets.

    Sets of one name whose texts differ between runs have rows of their own.
    """
    used = rows_with(runs, usable=True, diverged=False, replicate=0)
    rows = []
    for run in each(used[used["stage"].isin(("test", "finetune"))]):
        rows += _on_sets(run)
    if not rows:
        return DataFrame(columns=["set", "arm"])
    return _over_seeds(rows, ["set", "stage", "arm", "texts"])


def _on_sets(run: RunRow) -> list[Columns]:
    """A row for each evaluation set of a run; none where there is one set alone."""
    others = run.details.get("evaluations") or {}
    if not others:
        return []
    described = run.details.get("evaluation_sets") or [{"name": "main"}]
    texts = {}
    for described_set in described:
        texts[described_set["name"]] = described_set.get("fingerprint", run.data)
    main_name = described[0]["name"]  # the first set is the one that the run is judged by
    main = {"loss": run.loss, "metrics": run.details.get("metrics") or {}}
    evaluated = {main_name: main} | others
    rows = []
    for name, found in evaluated.items():
        row = {"set": name, "stage": run.stage, "arm": run.arm, "texts": texts.get(name, run.data)}
        row |= {"seed": run.seed, "loss": found["loss"]}
        rows.append(row | _with_nan(found["metrics"]))
    return rows


def _over_seeds(rows: list[Columns], by: list[str]) -> DataFrame:
    """Means over the rows of a seed, then over the seeds of what shares the columns `by`, with t intervals."""
    by_seed = DataFrame(rows).groupby([*by, "seed"], sort=False).mean()
    intervals = by_seed.groupby(by, sort=False).agg(t_interval)
    return intervals.reset_index()


def confusion(runs: DataFrame, arm: str) -> DataFrame | None:
    """Sum of the confusion matrices of an arm's fine-tunings, rows the true class; None where they do not fit."""
    finetuned = rows_with(with_labels(runs), arm=arm)
    known_labels = set()
    matrices = []
    for details in finetuned["details"]:
        known_labels.add(tuple(map(str, details.get("labels") or ())))
        if details.get("confusion"):
            matrices.append(np.array(details["confusion"]))
    if len(known_labels) != 1 or not matrices:
        return None
    classes = list(known_labels.pop())
    if any(matrix.shape != (len(classes), len(classes)) for matrix in matrices):
        return None
    return DataFrame(sum(matrices), index=classes, columns=classes)


def every_run(runs: DataFrame) -> DataFrame:
    """All runs, with their results and why some are left out."""
    kept = ["run", "stage", "arm", "seed", "replicate", "status", "loss", "metric", "seconds", "samples"]
    return runs[[*kept, "learning_rate", "left_out", "notes"]].reset_index(drop=True)


def environments(runs: DataFrame) -> DataFrame:
    """The machines and code that runs were made on."""
    is_known = (runs["machine"] != "") | (runs["commit"] != "")
    alike = runs[is_known].groupby(["machine", "device", "threads", "commit"], dropna=False)
    table = alike["arm"].agg(runs="size", arms=_joined)
    return table.reset_index()


def _joined(names: Iterable[str]) -> str:
    """The names, each once and sorted, as one cell."""
    return ", ".join(sorted(set(names)))


def left_out(runs: DataFrame, tests: DataFrame) -> list[str]:
    """Which runs and pairs are left out, and why."""
    lines = []
    for run in runs[runs["left_out"] != ""].itertuples():
        lines.append(f"{run.run}: {run.left_out}")
    for test in tests.itertuples():
        if test.left_out:
            lines.append(f"{test.treatment} vs {test.reference}: {test.left_out}")
    return list(dict.fromkeys(lines))


def without_empty(table: DataFrame) -> DataFrame:
    """Without the columns in which nothing is known."""
    is_empty = (table.map(written) == EMPTY_CELL).all()
    return table.loc[:, ~is_empty]


def written(value: Any) -> str:
    """A cell: four significant digits, an interval as an estimate with its ends.

    >>> written(0.123456), written(12345.6), written(Interval(1.4212, 1.209, 1.66, 0.95, 8)), written(None)
    ('0.1235', '12,346', '1.421 [1.209, 1.660]', '-')
    """
    if isinstance(value, Interval):
        return _written_interval(value)
    if value is None or value is pd.NA or value == "" or value != value:  # only nan is unlike itself
        return EMPTY_CELL
    if isinstance(value, bool | np.bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _written_number(value)
    return str(value)


def _written_interval(interval: Interval) -> str:
    """All of it with as many decimals as its largest number needs."""
    if math.isnan(interval.estimate):
        return EMPTY_CELL
    numbers = (interval.estimate, interval.low, interval.high)
    decimals = _places(max(abs(number) for number in numbers if math.isfinite(number)))
    estimate, low, high = (f"{number:,.{decimals}f}" for number in numbers)
    if math.isnan(interval.low):
        return estimate
    return f"{estimate} [{low}, {high}]"


def _written_number(number: float) -> str:
    if abs(number) >= 1e9:
        return f"{number:.3g}"
    if number.is_integer():
        return f"{number:,.0f}"
    if abs(number) < 1e-4:
        return f"{number:.3g}"
    return f"{number:,.{_places(number)}f}"


def _places(size: float) -> int:
    """The decimals of a number with four significant digits."""
    if size == 0 or not math.isfinite(size):
        return 0
    magnitude = math.floor(math.log10(abs(size)))
    return min(6, max(0, 3 - magnitude))


def with_shown_cells(table: DataFrame) -> DataFrame:
    """The table with its cells and headings as they are shown."""
    return table.map(written).rename(columns=lambda name: str(name).replace("_", " "))


def with_plain_numbers(table: DataFrame) -> DataFrame:
    """The table with each interval as three columns, for CSV, Parquet and JSON."""
    columns = {}
    for name in table:
        values = table[name].tolist()
        if not any(isinstance(value, Interval) for value in values):
            columns[name] = table[name].reset_index(drop=True)
            continue
        intervals = [value if isinstance(value, Interval) else UNKNOWN for value in values]
        columns[name] = [interval.estimate for interval in intervals]
        columns[f"{name}_low"] = [interval.low for interval in intervals]
        columns[f"{name}_high"] = [interval.high for interval in intervals]
    return DataFrame(columns) if columns else table


def markdown(table: DataFrame, title: str = "") -> str:
    """A Markdown table; a bar within a cell is escaped."""
    shown = with_shown_cells(table)
    lines = []
    if title:
        lines += [f"**{title}**", ""]
    lines.append(_markdown_row(shown.columns))
    lines.append(_markdown_row(["---"] * len(shown.columns)))
    for cells in shown.to_numpy().tolist():
        lines.append(_markdown_row(cells))
    lines.append("")
    return "\n".join(lines)


def _markdown_row(cells: Iterable[str]) -> str:
    escaped = [str(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def latex(table: DataFrame, name: str, title: str = "") -> str:
    """A LaTeX table with booktabs' rules. What LaTeX would read as a command is escaped.

    It is small, so that the table `paper` fits one of a page's two columns.
    """
    style = with_shown_cells(table).style.hide(axis="index")
    style = style.format(escape="latex")
    style = style.format_index(escape="latex", axis=1)
    column_format = PAPER_LATEX_FORMAT if list(table) == PAPER_COLUMNS else None
    document = style.to_latex(
        hrules=True,
        column_format=column_format,
        label=f"tab:{name}",
        caption=_escaped(title or name),
        position_float="centering",
    )
    # a long name may be broken after an underscore
    document = document.replace(r"\_", r"\_\allowbreak ")
    return document.replace(r"\centering", r"\centering\footnotesize\setlength{\tabcolsep}{2pt}", 1)


def _escaped(words: str) -> str:
    return re.sub("[_%&#]", r"\\\g<0>", words)
