"""Every table of a report as a DataFrame with plain numbers; `written` is how its cells are shown."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from analysis.gate import between, told_apart
from analysis.questions import BASELINE, Plan, groups, labels
from analysis.runs import each, where
from analysis.stats import Interval, t_interval
from analysis.trust import at_edge

MISSING = "-"
PAPER = ["arm", "time (s)", "ratio", "loss", "verdict"]
"""Columns of the table for a paper; names and words may take two lines."""
UNKNOWN = Interval(math.nan, math.nan, math.nan, 0.95, 0)
MEANS = ("loss", "metric", "seconds", "samples_per_second", "updates", "samples_per_update", "delay_p95", "delay_max")
COSTS = ("computing", "waiting", "communicating", "memory_gib", "gpu_gib", "tokens_per_second", "mfu")


def tested(runs: DataFrame) -> DataFrame:
    """The runs that the numbers of a study are of."""
    return where(runs, stage="test", usable=True, replicate=0)


def arms(runs: DataFrame, tests: DataFrame, plan: Plan) -> DataFrame:
    """Table 1: what every arm reached and cost, means over seeds with 95 % t intervals."""
    used = tested(runs)
    rows = []
    for arm, own in used.groupby("arm", sort=False):
        alive = own[~own["diverged"]]
        first = own.iloc[0]
        row = {"arm": arm, "clock": first["clock"], "workers": first["workers"], "runs": len(own)}
        row |= {"diverged": int(own["diverged"].sum()), "learning_rate": first["learning_rate"]}
        timed = where(tests, endpoint="time_to_target")
        timed = timed[timed["treatment"].eq(arm) | timed["reference"].eq(arm)]
        row |= _to_the_target(timed, str(arm))
        row |= {name: t_interval(alive[name]) for name in MEANS}
        row |= _over_one_worker(used, own, plan)
        row |= {name: float(alive[name].mean()) for name in COSTS}
        rows.append(row)
    return without_empty(DataFrame(rows))


def _to_the_target(timed: DataFrame, arm: str) -> dict[str, Any]:
    """Runs at the target by the end of the budget, and the mean time there, counted up to the budget."""
    if timed.empty:
        return {"reached": "", "time": UNKNOWN}
    row = timed.iloc[0]
    side, name = (0, "treatment_values") if row["treatment"] == arm else (1, "reference_values")
    told = f"{row['reached'][side]} of {row['n']} by {row['budget']:.4g} {row['unit']}"
    return {"reached": told, "time": t_interval(row[name])}


def _over_one_worker(used: DataFrame, own: DataFrame, plan: Plan) -> dict[str, Any]:
    """Throughput as a multiple of one worker's and its share per worker, and why there is none."""
    first = own.iloc[0]
    alone = where(used, workers=1, clock=first["clock"], task=first["task"])
    reasons = []
    for arm, one in alone.groupby("arm", sort=False):
        gated = between(own, one, told_apart(first["arm"], str(arm), plan))
        reasons.append(gated.unlike or gated.untimed)
    why = next(filter(None, reasons), "")
    if why or not reasons:
        return {"speed_up": math.nan, "efficiency": math.nan, "no_speed_up": why}
    ratio = float(own["samples_per_second"].mean() / alone["samples_per_second"].mean())
    return {"speed_up": ratio, "efficiency": ratio / first["workers"], "no_speed_up": ""}


def settings(runs: DataFrame) -> DataFrame:
    """The settings in which arms differ, as their runs were started."""
    first = where(runs, stage="test", usable=True).groupby("arm", sort=False)["settings"].first()
    table = DataFrame(list(first), index=first.index).drop(columns=["seed", "mode", "rule"], errors="ignore")
    table = table.loc[:, table.astype(str).nunique(dropna=False) > 1]
    return table.reset_index() if len(table.columns) else DataFrame(columns=["arm"])


def comparisons(tests: DataFrame) -> DataFrame:
    """Table 2: every question with its answer."""
    level = 1 - tests["alpha"] / tests["family_size"]
    asked = ("treatment", "reference", "group", "endpoint", "family", "family_size", "n")
    parts = {name: tests[name] for name in asked}
    parts["better"] = [f"{row.wins} of {row.n}" if row.test else "" for row in tests.itertuples()]
    for name, columns in (("difference", ("estimate", "low", "high")), ("ratio", ("ratio", "ratio_low", "ratio_high"))):
        ends = zip(*(tests[column] for column in columns), level, tests["n"], strict=True)
        parts[name] = Series([Interval(*one) for one in ends], index=tests.index, dtype=object)
    kept = ("unit", "test", "p", "p_holm", "margin", "p_equal", "word", "reason", "left_out")
    return DataFrame(parts | {name: tests[name] for name in kept})


def paper(runs: DataFrame, tests: DataFrame, plan: Plan) -> DataFrame:
    """For a column of a paper: arm, time to the target, ratio, loss, word of the registered endpoint."""
    named = labels(groups(runs, plan))
    table = arms(runs, tests, plan)
    rows = []
    for row in table.to_dict("records"):
        own = tests[(tests["treatment"] == row["arm"]) & (tests["reference"] != BASELINE)]
        timed = own[own["endpoint"] == "time_to_target"]
        first = own.head(1)
        known = timed[timed["ratio"].notna()]
        ratio = "{ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}]".format(**known.iloc[0]) if len(known) else MISSING
        ratio = ratio.removesuffix(" [nan, nan]")
        word = first.iloc[0]["word"] if len(first) else "reference"
        time, loss = (
            MISSING if math.isnan(value) else f"{value:#.3g}".rstrip(".")
            for value in (row.get(name, UNKNOWN)[0] for name in ("time", "loss"))
        )
        name = re.sub(" workers?", "", named.get(row["arm"], row["arm"]))
        name = name.replace(", simulated", " sim.").replace(", measured", " meas.")
        if row["clock"] == "virtual" and "sim." not in name:
            name = f"{name}, sim."
        rows.append((name, time, ratio, loss, word))
    return DataFrame(rows, columns=PAPER)


def tuning(runs: DataFrame, plan: Plan) -> DataFrame:
    """Table 3: what was tried, and what was chosen."""
    tried = runs[runs["stage"] == "tuning"]
    table = tried.groupby(["arm", "learning_rate"], sort=False).agg(loss=("loss", "mean"), runs=("run", "size"))
    table = table.reset_index()
    chosen = {name: (arm.chosen or {}).get("learning_rate") for name, arm in plan.arms.items()}
    edge = {name for name, arm in plan.arms.items() if at_edge(arm)}
    table["chosen"] = [rate == chosen.get(arm) for arm, rate in zip(table["arm"], table["learning_rate"], strict=True)]
    table["at_edge"] = table["chosen"] & table["arm"].isin(edge)
    return table


def downstream(runs: DataFrame) -> DataFrame:
    """Scores after fine-tuning: means over the repetitions of a pretraining seed, then over these seeds."""
    tuned = where(runs, stage="finetune", usable=True, diverged=False)
    rows = [{"arm": row.arm, "seed": row.seed, "score": row.metric, **_scores(row.details)} for row in each(tuned)]
    return _over_seeds(rows, ["arm"]) if rows else DataFrame(columns=["arm", "score"])


def _scores(details: dict[str, Any]) -> dict[str, float]:
    types = {kind: one.get("f1") for kind, one in (details.get("per_type") or {}).items()}
    check = details.get("hatecheck") or {}
    found = {"accuracy": (details.get("metrics") or {}).get("accuracy")}
    found |= {f"F1 {name}": value for name, value in (details.get("per_class_f1") or types).items()}
    found |= {"HateCheck": check.get("accuracy")} if check else {}
    found |= {f"HateCheck {name}": one["accuracy"] for name, one in (check.get("functionalities") or {}).items()}
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def evaluation_sets(runs: DataFrame) -> DataFrame:
    """What every arm reached on each of several evaluation sets; texts that are not the same are another set."""
    used = where(runs, usable=True, diverged=False, replicate=0)
    rows = []
    for run in each(used[used["stage"].isin(("test", "finetune"))]):
        others = run.details.get("evaluations") or {}
        known = run.details.get("evaluation_sets") or [{"name": "main"}]
        texts = {one["name"]: one.get("fingerprint", run.data) for one in known}
        first = {known[0]["name"]: {"loss": run.loss, "metrics": run.details.get("metrics") or {}}} if others else {}
        for name, found in (first | others).items():
            place = {"set": name, "stage": run.stage, "arm": run.arm, "texts": texts.get(name, run.data)}
            values = {key: math.nan if value is None else value for key, value in found["metrics"].items()}
            rows.append({**place, "seed": run.seed, "loss": found["loss"], **values})
    return _over_seeds(rows, ["set", "stage", "arm", "texts"]) if rows else DataFrame(columns=["set", "arm"])


def _over_seeds(rows: list[dict[str, Any]], by: list[str]) -> DataFrame:
    """Means over the rows of a seed, then over the seeds of what shares the columns `by`, with t intervals."""
    by_seed = DataFrame(rows).groupby([*by, "seed"], sort=False).mean()
    return by_seed.groupby(by, sort=False).agg(t_interval).reset_index()


def confusion(runs: DataFrame, arm: str) -> DataFrame | None:
    """Sum of the confusion matrices of an arm's fine-tunings, rows the true class; None where they do not fit."""
    own = where(runs, stage="finetune", arm=arm, usable=True)["details"]
    named = {tuple(map(str, one.get("labels") or ())) for one in own}
    matrices = [np.array(one["confusion"]) for one in own if one.get("confusion")]
    if len(named) != 1 or not matrices or any(one.shape != (len(min(named)),) * 2 for one in matrices):
        return None
    return DataFrame(sum(matrices), index=list(min(named)), columns=list(min(named)))


def every_run(runs: DataFrame) -> DataFrame:
    """All runs, with their results and why some are in no number."""
    kept = ["run", "stage", "arm", "seed", "replicate", "status", "loss", "metric", "seconds", "samples"]
    return runs[[*kept, "learning_rate", "left_out", "notes"]].reset_index(drop=True)


def environments(runs: DataFrame) -> DataFrame:
    """The machines and code that runs were made on."""
    known = runs[(runs["machine"] != "") | (runs["commit"] != "")]
    places = known.groupby(["machine", "device", "threads", "commit"], dropna=False)["arm"]
    return places.agg(runs="size", arms=lambda one: ", ".join(sorted(set(one)))).reset_index()


def left_out(runs: DataFrame, tests: DataFrame) -> list[str]:
    """What is in no number, and why."""
    lines = [f"{row.run}: {row.left_out}" for row in runs[runs["left_out"] != ""].itertuples()]
    lines += [f"{row.treatment} vs {row.reference}: {row.left_out}" for row in tests.itertuples() if row.left_out]
    return list(dict.fromkeys(lines))


def without_empty(table: DataFrame) -> DataFrame:
    """Without the columns in which nothing is known."""
    known = [name for name in table if not table[name].map(lambda one: written(one) == MISSING).all()]
    return table[known]


def written(value: Any) -> str:
    """A cell: four significant digits, an interval as an estimate with its ends.

    >>> written(0.123456), written(12345.6), written(Interval(1.4212, 1.209, 1.66, 0.95, 8)), written(None)
    ('0.1235', '12,346', '1.421 [1.209, 1.660]', '-')
    """
    if isinstance(value, Interval):
        if value.estimate != value.estimate:
            return MISSING
        places = _places(max(abs(end) for end in value[:3] if math.isfinite(end)))
        low, middle, high = (f"{end:,.{places}f}" for end in (value.low, value.estimate, value.high))
        return middle if value.low != value.low else f"{middle} [{low}, {high}]"
    if value is None or value is pd.NA or value != value or value == "":
        return MISSING
    if isinstance(value, bool | np.bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:,.{_places(value)}f}" if 1e-4 <= abs(value) < 1e9 else f"{value:.3g}"
    return str(value)


def _places(size: float) -> int:
    return min(6, max(0, 3 - math.floor(math.log10(abs(size))))) if size and math.isfinite(size) else 0


def text(table: DataFrame) -> DataFrame:
    """The cells as they are shown."""
    return table.map(written).rename(columns=lambda name: str(name).replace("_", " "))


def numbers(table: DataFrame) -> DataFrame:
    """For CSV, Parquet and JSON: an interval as three columns."""
    parts = []
    for name in table:
        if table[name].map(lambda one: isinstance(one, Interval)).any():
            ends = DataFrame([one[:3] if isinstance(one, Interval) else [math.nan] * 3 for one in table[name]])
            parts.append(ends.set_axis([name, f"{name}_low", f"{name}_high"], axis=1))
        else:
            parts.append(table[[name]].reset_index(drop=True))
    return pd.concat(parts, axis=1) if parts else table


def markdown(table: DataFrame, title: str = "") -> str:
    """A Markdown table; a bar within a cell is escaped."""
    shown = text(table)
    rows = [list(shown), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*([f"**{title}**", ""] if title else []), *lines, ""])


def latex(table: DataFrame, name: str, title: str = "") -> str:
    """A LaTeX table with booktabs' rules, small, so that `paper` fits a column of one; no cell can be a command."""
    style = text(table).style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
    caption = _escaped(title or name)
    columns = r"@{}p{0.25\columnwidth}rrrp{0.19\columnwidth}@{}" if list(table) == PAPER else None
    written = style.to_latex(
        hrules=True, column_format=columns, label=f"tab:{name}", caption=caption, position_float="centering"
    )
    written = written.replace(r"\_", r"\_\allowbreak ")
    return written.replace("\\centering", "\\centering\\footnotesize\\setlength{\\tabcolsep}{2pt}", 1)


def _escaped(words: str) -> str:
    return "".join({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#"}.get(one, one) for one in words)
