"""Reads run folders into two tables, `runs` and `curves`, of which every report is made.

docs/tables.md lists their columns. `analysis.run_files` reads one run folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from pandas import DataFrame

from analysis.meanings import spelled_alike
from analysis.places import (
    PLAN_WINS,
    UNREADABLE,
    as_misplaced,
    as_wrong_parent,
    columns_of_folder_name,
    columns_of_missing,
    columns_of_plan,
    place_loose_finetunings,
    with_arms,
    with_parents,
)
from analysis.questions import Plan, read_plan
from analysis.run_files import CURVES, UNFINISHED, read_run, read_summary
from analysis.runs import BOOLS, NUMBERS, OPTIONAL_BOOLS, RUNS, TEXTS, Columns
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS

PREDICTED = re.compile(r"(^|/)predicted-\d+$")
"""Matches the folder of a simulation of a measured run, which lies in that run's folder and is no run of the study."""
REPLACED = re.compile(r"\.before-\d+(/|$)")
"""Matches the folder of a run that was made again."""


def read(folder: Path) -> tuple[DataFrame, DataFrame, Plan]:
    """The runs, their evaluations and the plan of a folder: a study's, one with loose runs, or one run's.

    Raises:
        UsageError: if the folder holds no run and no plan, or only folders of other studies.
    """
    plan = read_plan(folder)
    recorded: dict[str, Columns] = {}
    curves = []
    for name, path in _folders(folder, plan).items():
        row, curve = read_run(path)
        replaced = _replaced(path)
        if replaced:
            row["details"]["replaced"] = replaced
        recorded[name] = row
        if len(curve):
            curves.append(curve.assign(run=name))
    in_plan = {entry.folder: columns_of_plan(entry, plan) for entry in plan.runs}
    rows = []
    for name in sorted(in_plan | recorded):
        row = {"run": name}
        row |= recorded[name] if name in recorded else columns_of_missing(folder / name)
        if name in in_plan:
            _place_as_planned(row, in_plan[name], plan, recorded)
        else:
            row |= columns_of_folder_name(name, row)
            if plan.runs:
                row |= {"left_out": "not in plan.json", "usable": False, "stage": ""}
        rows.append(row)
    place_loose_finetunings(rows)
    runs = with_parents(with_arms(_table(rows)))
    if not curves:
        return runs, DataFrame(columns=CURVES), plan
    return runs, pd.concat(curves, ignore_index=True), plan


def _place_as_planned(row: Columns, planned_columns: Columns, plan: Plan, recorded: Mapping[str, Columns]) -> None:
    """Give a run the columns of its plan; mark it if its folder holds another run than the planned one."""
    for key, value in planned_columns.items():
        if key in PLAN_WINS or row.get(key) in (None, ""):
            row[key] = value
    row |= as_misplaced(row, plan)
    row |= as_wrong_parent(row, recorded.get(row["parent"], {}))


def _folders(folder: Path, plan: Plan) -> dict[str, Path]:
    """Name -> path of every run folder at or below `folder`, without those of a study in a folder below it."""
    make_one = "make one: asyncsgd train masked_lm --mode async --nproc 4"
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise UsageError(f"{folder}: {what}; {make_one}")
    studies = sorted(file.parent for file in folder.rglob("plan.json") if file.parent != folder)
    own = set()
    for file in (*folder.rglob("summary.json"), *folder.rglob(EVENTS)):
        if not any(study in file.parent.parents for study in studies):
            own.add(file.parent)
    names = {}
    for path in own:
        if path == folder:
            names[path.resolve().name] = path
            continue
        name = path.relative_to(folder).as_posix()
        is_prediction = PREDICTED.search(name) and path.parent in own
        if not (is_prediction or REPLACED.search(name)):
            names[name] = path
    if not names and not plan.runs:
        if studies:
            listed = ", ".join(map(str, studies))
            raise UsageError(f"{folder} holds no runs of its own, but studies; give one of them: {listed}")
        raise UsageError(f"{folder}: no run folder here (none has an events.jsonl or a summary.json); {make_one}")
    return dict(sorted(names.items()))


def _replaced(path: Path) -> list[str]:
    """The statuses of the runs that lay here before and were made again; UNFINISHED of killed ones."""
    statuses = []
    for earlier in sorted(path.parent.glob(f"{path.name}.before-*")):
        try:
            summary = read_summary(earlier / "summary.json")
        except (OSError, ValueError):
            statuses.append(UNREADABLE)
            continue
        statuses.append(str(summary.get("status") or UNFINISHED))
    return statuses


def rows_of(paths: Mapping[str, Path]) -> DataFrame:
    """The table `runs` of run folders that lie in no study; the folder around a run is its arm.

    Args:
        paths: name -> path of each run folder.
    """
    rows = []
    for name, path in paths.items():
        row, _ = read_run(path)
        rows.append({"run": name, "arm": name.rpartition("/")[0]} | row)
    return _table(rows)


def _table(rows: Sequence[Columns]) -> DataFrame:
    runs = DataFrame(rows, columns=RUNS).set_index("run", drop=False)
    runs.index.name = None
    for name in NUMBERS:
        runs[name] = pd.to_numeric(runs[name]).astype(float)
    for name in BOOLS:
        runs[name] = [value is True for value in runs[name]]
    for name in OPTIONAL_BOOLS:
        runs[name] = runs[name].astype("boolean")
    for name in set(TEXTS) - {"run", "arm", "stage"}:  # a loose run has no arm yet
        runs[name] = runs[name].astype(object).where(runs[name].notna(), "")
    runs["speeds"] = spelled_alike("speeds", runs["speeds"])
    return runs
