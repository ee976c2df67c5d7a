"""Run folders as values: one `Run` each, kept with whatever could be read, and a message for whatever could not."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import pandas

from asyncsgd.errors import UsageError
from asyncsgd.records.events import (
    DONE,
    EVENTS,
    SCHEMA,
    read_events,
    read_header,
    read_json,
)
from asyncsgd.settings.yaml_reader import read_yaml

UNFINISHED = "UNFINISHED"
"""Status of a run without a summary: it crashed, was killed or is still running."""
UNREADABLE = "UNREADABLE"
"""Status of a run one of whose files is damaged or newer than this reader. It may well be DONE. It is named and in no
number: what can still be read of it may be as wrong as the rest.
"""

EVALUATION_COLUMNS = {
    "version": "Int64",
    "total_samples": "Int64",
    "train_seconds": "float64",
    "loss": "float64",
    "weight": "float64",
    "eval_seconds": "float64",
}
"""Columns of `Run.evaluations`, which has a column ``metrics.NAME`` too for every metric of the run, float64.

Int64 with a capital: the plain one has no missing value, a gap would be a number."""


_FIELDS: dict[type, tuple[str, ...]] = {
    int: ("seed", "num_workers", "batch_size", "accumulate", "num_samples", "num_updates", "num_samples_applied"),
    float: (
        *("train_seconds", "eval_seconds", "samples_per_second", "final_eval_loss", "eval_weight", "oversubscription"),
    ),
    str: (
        *("experiment", "task", "mode", "rule", "clock", "speeds", "data", "data_fingerprint", "eval_masking"),
        "parameters_sha256",
    ),
    bool: ("from_scratch",),
    dict: ("metrics", "details", "delay", "parent", "hatecheck"),
}
"""What each field of a summary that numbers are made of has to be, unless it is null or missing."""
_DELAYS = ("mean", "p50", "p95", "max")

PREDICTION = re.compile(r"predicted-\d+")
"""Name of a folder inside a run's in which ``python -m asyncsgd predict`` has predicted that run."""


FINETUNING = "classification"
"""The task of a fine-tuning run, whose summary has scores of a labelled task and no mode or rule of its own."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run folder. `name` is its path below the folder that was loaded; `problems` says what went wrong in it.

    `summary` always has a ``status``: the one written, or `UNFINISHED` or `UNREADABLE`, and then it has nothing else.
    `settings` is what settings.yaml holds, empty where there is none.
    """

    path: Path
    name: str
    summary: dict[str, Any]
    evaluations: pandas.DataFrame
    problems: tuple[str, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    better: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The metrics that the header of its records names."""
    num_resumes: int = 0
    """How often it went on from a checkpoint."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What environment.json holds, empty where there is none."""

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def done(self) -> bool:
        return self.status == DONE

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Of its last evaluation, the primary one first; empty where it has none."""
        values = self.summary.get("metrics") or {}
        return {name: values[name] for name in dict.fromkeys((*self.better, *values)) if name in values}

    @property
    def details(self) -> Mapping[str, Any]:
        """What else its last evaluation says."""
        return self.summary.get("details") or {}

    @property
    def virtual(self) -> bool:
        """Whether its seconds were drawn, not measured."""
        return self.summary.get("clock") == "virtual"

    @property
    def oversubscribed(self) -> bool:
        """Whether the run is known to have had more threads than cores."""
        return (self.summary.get("oversubscription") or 0.0) > 1.0

    @property
    def timed_in_parts(self) -> bool:
        """Whether its seconds were measured, and by the clocks of several processes one after another."""
        return self.num_resumes > 0 and not self.virtual


def load_runs(folder: Path | str) -> tuple[list[Run], list[str]]:
    """Load every run folder at or below `folder`.

    A run folder is one that holds an events.jsonl or a summary.json. A damaged or unfinished run is never skipped. What
    ``python -m asyncsgd predict`` has predicted of a run lies inside that run's folder and is no run of its own; it is
    loaded only where `folder` names it.

    Args:
        folder: a run folder, or a folder with run folders at any depth.

    Returns:
        The runs sorted by name, and the problems of all of them as ``"name: problem"``.

    Raises:
        UsageError: if `folder` is not a folder or holds no run; the message says how to make one.
    """
    folder = Path(folder)
    make_one = "make a run with: python experiments/stilt_mlm.py --mode async --nproc 4"
    if not folder.exists():
        raise UsageError(f"{folder}: no such folder; {make_one}")
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder; give the folder that holds the run folders, or {make_one}")
    files = [file for name in ("events.jsonl", "summary.json") for file in folder.rglob(name) if file.is_file()]
    if not files:
        raise UsageError(f"{folder}: no run folder here (none has an events.jsonl or a summary.json); {make_one}")
    paths = {file.parent for file in files}
    runs = [
        _load_run(path, path.resolve().name if path == folder else path.relative_to(folder).as_posix())
        for path in paths
        if not (path != folder and path.parent in paths and PREDICTION.fullmatch(path.name))
    ]
    runs.sort(key=lambda run: run.name)
    return runs, [f"{run.name}: {problem}" for run in runs for problem in run.problems]


def _load_run(path: Path, name: str) -> Run:
    better: dict[str, str] = {}
    problems: list[str] = []
    try:
        if (path / EVENTS).is_file():
            found = read_header(path / EVENTS).get("better")
            better = found if isinstance(found, dict) else {}
        summary = _read_summary(path / "summary.json", better, problems)
        evaluations, num_resumes = _read_records(path / EVENTS, better, problems)
        if summary["status"] == DONE and summary.get("task") != FINETUNING and (path / EVENTS).is_file():
            _check_end(evaluations, summary.get("num_samples"))
        settings = _read_settings(path / "settings.yaml")
        environment = _read_object(path / "environment.json")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        return Run(path, name, {"status": UNREADABLE}, _frame([], better), (reason,), better=better)
    run = Run(path, name, summary, evaluations, (), settings, better, num_resumes, environment)
    if run.timed_in_parts:
        problems.append(f"resumed: its seconds were measured in {num_resumes + 1} parts")
    return dataclasses.replace(run, problems=tuple(problems))


def _check_end(evaluations: pandas.DataFrame, num_samples: int | None) -> None:
    """Every run is evaluated where it ends. Without that evaluation its last loss is one of another number of samples,
    and all others would have to be compared there.

    Raises:
        ValueError: if the curve has lost its end, at `num_samples`.
    """
    if not len(evaluations):
        raise ValueError("events.jsonl has no evaluation")
    last = evaluations["total_samples"].max()
    if num_samples is not None and last < num_samples:
        raise ValueError(f"its evaluations in events.jsonl end at {last} of {num_samples} samples")


def _read_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; empty where there is none.

    Raises:
        ValueError: if it cannot be read, or is no object.
    """
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged: it is no object")
    return content


def _read_settings(path: Path) -> dict[str, Any]:
    """The flat settings of a run; those of experiments/simulate.py lie one level deeper and are taken from there."""
    settings = read_yaml(path.read_text(encoding="utf-8"), path.name) if path.is_file() else {}
    if not isinstance(settings, dict | None):
        raise ValueError(f"{path.name} is damaged: it holds no keys and values")
    settings = settings or {}
    simulated = settings.get("simulate")
    settings = {str(key): value for key, value in (simulated if isinstance(simulated, dict) else settings).items()}
    _check({"learning_rate": settings.get("learning_rate")}, float, path.name)
    return settings


def _read_summary(path: Path, better: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """The summary, with all metrics that the header names and all delays, which may be null."""
    if not path.exists():
        problems.append("no summary.json: the run crashed, was killed or is still running")
        return {"status": UNFINISHED}
    summary = _read_object(path)
    if not isinstance(summary.get("status"), str) or summary.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has no status of schema {SCHEMA}")
    for kind, keys in _FIELDS.items():
        _check({key: summary.get(key) for key in keys}, kind, path.name)
    metrics, delay = summary.get("metrics") or {}, summary.get("delay") or {}
    _check(metrics, float, path.name)
    _check(delay, float, path.name)
    metrics = {name: metrics.get(name) for name in dict.fromkeys((*better, *metrics))}
    return {**summary, "metrics": metrics, "delay": {key: delay.get(key) for key in _DELAYS}}


def _check(values: Mapping[str, Any], kind: type, where: str) -> None:
    """
    Raises:
        ValueError: if one of the values is neither null nor of this kind.
    """
    usable = {int: _is_count, float: _is_number}.get(kind, lambda value: isinstance(value, kind))
    for key, value in values.items():
        if value is not None and not usable(value):
            raise ValueError(f"{where} is damaged: its {key} is {str(value)[:60]!r}")


def _read_records(path: Path, better: Mapping[str, str], problems: list[str]) -> tuple[pandas.DataFrame, int]:
    """The evaluations, and how often the run went on."""
    rows: list[dict[str, Any]] = []
    num_resumes = 0
    faults: list[str] = []
    if not path.is_file():
        problems.append("no events.jsonl: it has no curve in the figures")
        return _frame(rows, better), 0
    for record in read_events(path):
        kind = record.get("kind")
        if kind == "evaluate":
            rows.append(_evaluation(record, problems))
        elif kind == "resume":
            num_resumes += 1
        elif kind == "fault":
            faults.append(f"fault at version {record.get('version')}: {record.get('message')}")
        elif kind == "leave" and record.get("reason"):
            faults.append(
                f"worker {record.get('worker')} left at version {record.get('version')}: {record.get('reason')}"
            )
    if faults:
        problems.append(faults[0] if len(faults) == 1 else f"{len(faults)} faults, the last: {faults[-1]}")
    return _frame(rows, better), num_resumes


def _evaluation(record: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    at = f"the evaluation at version {record.get('version')}"
    values, metrics = {key: record.get(key) for key in EVALUATION_COLUMNS}, record.get("metrics") or {}
    _check({"metrics": metrics}, dict, at)
    _check({key: values[key] for key, dtype in EVALUATION_COLUMNS.items() if dtype == "Int64"}, int, at)
    _check({key: values[key] for key, dtype in EVALUATION_COLUMNS.items() if dtype == "float64"} | metrics, float, at)
    # A null weight is legitimate (a closed-form problem has none), and so is a null loss (it was not finite).
    if values["train_seconds"] is None or values["total_samples"] is None:
        raise ValueError(f"{at} is damaged: it says no seconds or samples")
    if values["loss"] is None:
        problems.append(f"{at} has no finite loss")
    return values | {f"metrics.{name}": value for name, value in metrics.items()}


def _frame(rows: list[dict[str, Any]], better: Mapping[str, str]) -> pandas.DataFrame:
    named = [f"metrics.{name}" for name in better]
    metrics = dict.fromkeys([*named, *(key for row in rows for key in row if key not in EVALUATION_COLUMNS)], "float64")
    columns = {
        # from Python ints, not from floats with NaN: a count above 2**53 would be rounded
        column: pandas.array([row[column] for row in rows], dtype=dtype)
        if dtype == "Int64"
        else pandas.Series([row.get(column) for row in rows], dtype=dtype)
        for column, dtype in (EVALUATION_COLUMNS | metrics).items()
    }
    return pandas.DataFrame(columns)


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number that a float can hold; not a bool, which Python counts among the integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
