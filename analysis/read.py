"""Run folders as two tables, of which docs/tables.md says what a column is; all that is shown is made from them.

A run that cannot be read (a text where a number belongs, a torn or an empty file) is UNREADABLE with one reason, and it
is in no number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from analysis.meanings import asked_of, spelled_alike
from analysis.places import (
    PLAN_WINS,
    UNREADABLE,
    as_misplaced,
    as_wrong_parent,
    columns_of_folder_name,
    columns_of_missing,
    columns_of_plan,
    with_arms,
    with_parents,
)
from analysis.questions import Plan, read_plan
from analysis.runs import NUMBERS, PERHAPS, RUNS, SURE, TEXTS
from asyncsgd.errors import UsageError
from asyncsgd.records.events import (
    DIVERGED,
    DONE,
    EVENTS,
    SCHEMA,
    STOPPED,
    lost_records,
    read_events,
    read_header,
    read_json,
)
from asyncsgd.settings.groups import FIRST
from asyncsgd.settings.yaml_reader import EXPERIMENT, FORMAT, TASK, check_format, read_yaml

SAME = {
    "status": "status",
    "mode": "mode",
    "workers": "num_workers",
    "clock": "clock",
    "speeds": "speeds",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "seed": "seed",
    "asked_task": "task",
    "data": "data_fingerprint",
    "train_data": "train_fingerprint",
    "candidates": "candidates_sha256",
    "evaluation": "eval_masking",
    "terms": "eval_weight",
    "from_scratch": "from_scratch",
    "start": "init_sha256",
    "initial_model": "initial_model_sha256",
    "parameters_sha256": "parameters_sha256",
    "loss": "final_eval_loss",
    "seconds": "train_seconds",
    "samples": "num_samples",
    "updates": "num_updates",
    "samples_per_second": "samples_per_second",
}
"""Columns that are keys of summary.json."""
CURVES = ["run", "updates", "samples", "seconds", "loss"]
"""And a column ``metric.NAME`` for every metric of the task."""
UNFINISHED = "UNFINISHED"
PLAIN_RULES = ("", "asynchronous")
PREDICTED = re.compile(r"(^|/)predicted-\d+$")
REPLACED = re.compile(r"\.before-\d+(/|$)")


def read(folder: Path) -> tuple[DataFrame, DataFrame, Plan]:
    """The runs and the evaluations of a folder: a study's, one with loose runs, or one run's.

    Raises:
        UsageError: if there is no run and no plan in it, or nothing but whole studies.
    """
    plan = read_plan(folder)
    recorded: dict[str, dict[str, Any]] = {}
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
    runs = with_parents(with_arms(_table(rows)))
    if not curves:
        return runs, DataFrame(columns=CURVES), plan
    return runs, pd.concat(curves, ignore_index=True), plan


def _place_as_planned(
    row: dict[str, Any], place: Mapping[str, Any], plan: Plan, recorded: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give a run its place in a plan, unless its folder holds another run than the plan says."""
    for key, value in place.items():
        if key in PLAN_WINS or row.get(key) in (None, ""):
            row[key] = value
    row |= as_misplaced(row, plan)
    row |= as_wrong_parent(row, recorded.get(row["parent"], {}))


def _folders(folder: Path, plan: Plan) -> dict[str, Path]:
    """Name -> path of every run folder at or below `folder`, but for those of studies further down."""
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
        is_of_a_run = PREDICTED.search(name) and path.parent in own
        if not (is_of_a_run or REPLACED.search(name)):
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
            summary = _summary(earlier / "summary.json")
        except (OSError, ValueError):
            statuses.append(UNREADABLE)
            continue
        statuses.append(str(summary.get("status") or UNFINISHED))
    return statuses


def read_run(path: Path) -> tuple[dict[str, Any], DataFrame]:
    """The row of one run folder, without its place in a study, and its curve."""
    row: dict[str, Any] = {"path": path, "asked": {}, "settings": {}, "details": {}}
    no_curve = DataFrame(columns=CURVES[1:], dtype=float)
    try:
        curve = _read_into(row, path, no_curve)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        why = " ".join(str(error).split())[:200]
        row |= {"status": UNREADABLE, "left_out": f"{UNREADABLE}: {why}"}
        return row, no_curve
    if row["status"] != UNFINISHED:
        _judge_end(row, curve)
    return row, curve


DETAILS = ("metrics", "labels", "hatecheck", "undefined_scores", "parent", "evaluation_sets")
"""Keys of summary.json that are kept in the details of a run."""


def _read_into(row: dict[str, Any], path: Path, curve: DataFrame) -> DataFrame:
    """Fill the row of a run from its files; its curve.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, UsageError: if a file is damaged.
    """
    row |= _checked(_of_settings(path / "settings.yaml") | _of_environment(path / "environment.json"))
    row["asked"] = asked_of(row["settings"], {})
    summary = _summary(path / "summary.json")
    missing_records = lost_records(path / EVENTS, summary)
    if missing_records:
        raise ValueError(missing_records)
    better: dict[str, str] = {}
    has_events = (path / EVENTS).is_file()
    if has_events:
        header = read_header(path / EVENTS)
        better = header.get("better") or {}
        curve, of_events = _events(path / EVENTS)
        of_events["details"]["loss_unit"] = header.get("loss_unit", "nats")
        elsewhere = _resumed_on(path, row["machine"])
        if elsewhere:
            of_events["details"]["resumed_on"] = elsewhere
        row |= of_events | _checked({"task": header.get("task")})
    if not summary:
        row["status"] = UNFINISHED
        row["left_out"] = f"{UNFINISHED}: no summary.json: it was killed or is still running"
        return curve
    row |= _checked(_of_summary(summary, better))
    row["message"] = summary.get("message")
    row["asked"] = asked_of(row["settings"], summary)
    at_start = curve.loc[curve["updates"] == 0, "loss"]
    row["first_loss"] = float(at_start.iloc[0]) if len(at_start) else math.nan
    row["details"] = (summary.get("details") or {}) | row["details"]
    for key in DETAILS:
        if summary.get(key):
            row["details"][key] = summary[key]
    if better:
        row["details"]["better"] = better
    if row["status"] == DONE and row.get("task") != "finetuning" and has_events:
        _check_end(curve, row.get("samples"))
    return curve


def _judge_end(row: dict[str, Any], curve: DataFrame) -> None:
    """Whether a run diverged, and whether it is in any number."""
    is_done = row["status"] == DONE
    is_evaluated = len(curve) > 0
    is_finite = curve["loss"].map(math.isfinite)
    ends_lost = is_evaluated and not is_finite.iloc[-1]
    row["diverged"] = row["status"] == DIVERGED or (is_done and ends_lost)
    if is_evaluated and not row["diverged"] and not is_finite.all():
        row["details"]["evaluations_not_finite"] = int((~is_finite).sum())
    has_result = is_evaluated or row.get("task") == "finetuning"
    row["usable"] = row["diverged"] or (is_done and has_result)
    if not row["usable"]:
        row["left_out"] = f"{row['status']}: {row['message'] or 'it has no evaluation'}"


def rows_of(paths: Mapping[str, Path]) -> DataFrame:
    """Rows of `runs` by name, of run folders that lie in no study; the folder around a run is its arm."""
    rows = []
    for name, path in paths.items():
        row, _ = read_run(path)
        rows.append({"run": name, "arm": name.rpartition("/")[0]} | row)
    return _table(rows)


def _summary(path: Path) -> dict[str, Any]:
    """What summary.json holds; empty where there is none."""
    if not path.exists():
        return {}
    summary = read_json(path)
    has_status = isinstance(summary, dict) and isinstance(summary.get("status"), str)
    if not has_status or summary.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has no status of schema {SCHEMA}")
    return summary


def _events(path: Path) -> tuple[DataFrame, dict[str, Any]]:
    """The curve, and what else its records say of a run."""
    rows: list[dict[str, float]] = []
    faults: list[str] = []
    last: Mapping[str, Any] = {}
    resumes = 0
    lost_workers = 0
    for record in read_events(path):
        kind = record.get("kind")
        if kind == "evaluate":
            last = record
            rows.append(_evaluation(record))
        elif kind == "resume":
            resumes += 1
        elif kind == "fault":
            faults.append(f"fault at version {record.get('version')}: {record.get('message')}")
        elif kind == "leave" and record.get("reason") not in (None, "", STOPPED):
            lost_workers += 1
            faults.append(f"worker {record.get('worker')} left: {record['reason']}")
    notes = "".join(faults)
    if len(faults) > 1:
        notes = f"{len(faults)} faults, the last: {faults[-1]}"
    details: dict[str, Any] = {}
    if last.get("worker_losses"):
        details["worker_losses"] = last["worker_losses"]
    if lost_workers:
        details["lost_workers"] = lost_workers
    curve = DataFrame(rows) if rows else DataFrame(columns=CURVES[1:])
    return curve.astype(float), {"notes": notes, "resumes": resumes, "details": details}


def _evaluation(record: Mapping[str, Any]) -> dict[str, float]:
    """A row of the curve."""
    values = {
        "updates": record["version"],
        "samples": record["total_samples"],
        "seconds": record["train_seconds"],
        "loss": record["loss"],
    }
    if values["samples"] is None or values["seconds"] is None:
        raise ValueError(f"the evaluation at version {values['updates']} says no seconds or samples")
    for name, value in (record.get("metrics") or {}).items():
        values[f"metric.{name}"] = value
    return {name: _number(value, name) for name, value in values.items()}


def _number(value: Any, name: str) -> float:
    """A number of a file; null is one that was not finite.

    Raises:
        ValueError: for a text, a truth value, or a number that is too large.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"its {name} is {str(value)[:60]!r}, which is no number")
    return float(value)


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a row; columns of numbers hold numbers.

    Raises:
        ValueError: if a value is not of its column's kind.
    """
    known = {name: value for name, value in row.items() if value is not None}
    for name, value in known.items():
        if name in NUMBERS:
            known[name] = _number(value, name)
        elif name in TEXTS and not isinstance(value, str):
            raise ValueError(f"its {name} is {str(value)[:60]!r}, which is no text")
    return known


def _check_end(curve: DataFrame, samples: float | None) -> None:
    """Every run is evaluated where it ends; without that evaluation its last loss is one of other samples."""
    if not len(curve):
        raise ValueError("events.jsonl has no evaluation")
    last = curve["samples"].max()
    if samples is not None and last < samples:
        raise ValueError(f"its evaluations end at {last:g} of {samples:g} samples")


def algorithm(mode: str, rule: str) -> str:
    """What a colour and a comparison go by.

    >>> algorithm("async", "ringmaster:threshold=2"), algorithm("async", "synchronous"), algorithm("single", "")
    ('ringmaster', 'sync', 'single')
    """
    name = rule.partition(":")[0].casefold()
    if mode in ("single", "hogwild"):
        return mode
    if mode == "pipeline" and name == "synchronous":
        return mode
    if mode == "sync" or name == "synchronous":
        return "sync"
    if name in PLAIN_RULES:
        return mode or "unknown"
    return name


def _of_summary(summary: dict[str, Any], better: Mapping[str, str]) -> dict[str, Any]:
    """The columns that summary.json has a say in."""
    row = {column: summary.get(key) for column, key in SAME.items()}
    mode = summary.get("mode") or ""
    rule = summary.get("rule") or ""
    row["rule"] = rule
    row["algorithm"] = algorithm(mode, rule)
    row["task"] = summary.get("task")
    if "parent" in summary:
        row["task"] = "finetuning"
        row["parent"] = _parent(summary["parent"])
        row["model"] = summary.get("model")
    row["sample_order"] = summary.get("sample_order", FIRST)
    metrics = summary.get("metrics") or {}
    first_metric = next(iter([*better, *metrics]), None)
    row["metric"] = metrics.get(first_metric)
    num_samples = summary.get("num_samples_applied") or 0
    num_updates = summary.get("num_updates") or math.inf
    row["samples_per_update"] = num_samples / num_updates or math.nan
    delay = summary.get("delay") or {}
    for key in ("mean", "p95", "max"):
        row[f"delay_{key}"] = delay.get(key)
    row |= _shares_of_time(summary)
    row |= _memory(summary)
    throughput = summary.get("throughput") or {}
    row["tokens_per_second"] = throughput.get("tokens_per_second")
    row["mfu"] = throughput.get("model_flops_utilisation")
    acted = summary.get("rule_acted") or {}
    row["altered"] = acted.get("altered")
    oversubscription = summary.get("oversubscription") or 0
    row["oversubscribed"] = oversubscription > 1
    row["other_load"] = _other_load(summary)
    return row


def _shares_of_time(summary: dict[str, Any]) -> dict[str, float]:
    """What the workers' time went to, as shares of all of it."""
    seconds = summary.get("seconds") or {}
    whole = (summary.get("train_seconds") or 0.0) * (summary.get("num_workers") or 1)
    known = sum(seconds.get(part, 0.0) for part in ("compute", "wait", "communicate"))
    total = max(whole, known) or math.nan
    return {
        "computing": seconds.get("compute", math.nan) / total,
        "waiting": seconds.get("wait", math.nan) / total,
        "communicating": seconds.get("communicate", math.nan) / total,
    }


def _memory(summary: dict[str, Any]) -> dict[str, float]:
    """The sum of the peaks of a run's processes."""
    memory = summary.get("memory") or {}
    if not memory:
        return {"memory_gib": math.nan, "gpu_gib": math.nan}
    peaks = [memory["leader"]]
    if summary.get("mode") != "single":  # alone one process is leader and worker at once
        peaks += [peak for _, peak in memory.get("workers") or ()]
    host = sum(peak[0] for peak in peaks)
    gpu = sum(peak[1] for peak in peaks)
    return {"memory_gib": host / 2**30 or math.nan, "gpu_gib": gpu / 2**30}


def _other_load(summary: dict[str, Any]) -> float:
    """The share of the machine that other programs used or its host took."""
    load = summary.get("machine_load")
    if not load:
        return math.nan
    others = load.get("others_share") or 0
    stolen = load.get("stolen_share") or 0
    return float(others + stolen)


def _parent(parent: Any) -> str:
    return str(parent.get("run") or "") if isinstance(parent, dict) else ""


def _of_settings(path: Path) -> dict[str, Any]:
    """What the settings say. A killed run has nothing else."""
    written: dict[str, Any] = {}
    if path.is_file():
        written = read_yaml(path.read_text(encoding="utf-8"), path.name) or {}
        check_format(written, path)
    settings = {key: value for key, value in written.items() if key not in (FORMAT, EXPERIMENT, TASK)}
    mode = settings.get("mode") or ""
    rule = settings.get("rule") or ""
    return {
        "settings": settings,
        "learning_rate": _number(settings.get("learning_rate"), "learning_rate"),
        "mode": mode,
        "rule": rule,
        "algorithm": algorithm(str(mode), str(rule)),
        "workers": settings.get("nproc"),
        "batch_size": settings.get("batch_size"),
        "clock": settings.get("clock") or "measured",
        "speeds": settings.get("speeds") or "",
        "seed": settings.get("seed"),
        "model": str(settings.get("model") or ""),
        "task_class": str(written.get(TASK) or "").rpartition(":")[2],
    }


def _of_environment(path: Path) -> dict[str, Any]:
    """What environment.json says of the machine and the code."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError("environment.json is damaged: it is no object")
    ranks = found.get("hardware_of_ranks") or [found]
    machines = [_machine(hardware) for hardware in ranks if isinstance(hardware, dict)]
    device = found.get("device") or ""
    number = found.get("num_devices")
    if number and device not in ("", "cpu"):
        device = f"{number} x {device}"
    commit = found.get("commit") or ""
    if found.get("modified"):
        commit = f"{commit} modified"
    versions = found.get("versions") or {}
    return {
        "machine": "; ".join(dict.fromkeys(machines)),
        "device": device,
        "num_devices": number,
        "threads": found.get("threads_per_worker"),
        "torch": found.get("torch_build") or versions.get("torch"),
        "commit": commit,
    }


def _resumed_on(path: Path, machine: str) -> list[str]:
    """The machines on which a run went on, other than the one on which it began."""
    machines = []
    for file in sorted(path.glob("environment.resumed-*.json")):
        name = _of_environment(file)["machine"]
        if name != machine and name not in machines:
            machines.append(name)
    return machines


def _machine(found: dict[str, Any]) -> str:
    """Processor, cores and GPUs; empty where neither a processor nor a GPU has a name."""
    cores = found.get("cores")
    gpus = found.get("gpus") or ()
    if not (found.get("cpu") or gpus):
        return ""
    num_cores = ""
    if cores:
        num_cores = "1 core" if cores == 1 else f"{cores} cores"
    parts = [found.get("cpu"), found.get("cpu_capability"), num_cores, *gpus]
    return ", ".join(str(part) for part in parts if part)


def _table(rows: Sequence[dict[str, Any]]) -> DataFrame:
    runs = DataFrame(rows, columns=RUNS).set_index("run", drop=False)
    runs.index.name = None
    for name in NUMBERS:
        runs[name] = pd.to_numeric(runs[name]).astype(float)
    for name in SURE:
        runs[name] = [value is True for value in runs[name]]
    for name in PERHAPS:
        runs[name] = runs[name].astype("boolean")
    for name in set(TEXTS) - {"run", "arm", "stage"}:
        runs[name] = runs[name].astype(object).where(runs[name].notna(), "")
    runs["speeds"] = spelled_alike("speeds", runs["speeds"])
    return runs
