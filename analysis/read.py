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

from analysis.gate import asked_of, spelled_alike
from analysis.places import PLACED, UNREADABLE, misplaced, missing, of_another, placed, planned, with_arms, with_parents
from analysis.questions import Plan, read_plan
from analysis.runs import NUMBERS, PERHAPS, RUNS, SURE, TEXTS
from asyncsgd.data.order import FIRST
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
    """The runs and the evaluations of a folder: a sweep's, one with loose runs, or one run's.

    Raises:
        UsageError: if there is no run and no plan in it, or nothing but whole sweeps.
    """
    plan = read_plan(folder)
    there = _folders(folder, plan)
    read_ones = {name: read_run(path) for name, path in there.items()}
    for name, path in there.items():
        if found := _replaced(path):
            read_ones[name][0]["details"]["replaced"] = found
    in_plan = {entry.folder: planned(entry, plan) for entry in plan.runs}
    rows = []
    for name in sorted(in_plan | read_ones):
        row = {"run": name, **(read_ones[name][0] if name in read_ones else missing(folder / name))}
        if name in in_plan:
            row |= {key: value for key, value in in_plan[name].items() if key in PLACED or row.get(key) in (None, "")}
            row |= misplaced(row, plan)
            row |= of_another(row, read_ones.get(row["parent"], ({}, None))[0])
        else:
            row |= placed(name, row)
            if plan.runs:
                row |= {"left_out": "not in plan.json", "usable": False, "stage": ""}
        rows.append(row)
    runs = _table(rows)
    shown = [curve.assign(run=name) for name, (_, curve) in read_ones.items() if len(curve)]
    curves = pd.concat(shown, ignore_index=True) if shown else DataFrame(columns=CURVES)
    return with_parents(with_arms(runs)), curves, plan


def _folders(folder: Path, plan: Plan) -> dict[str, Path]:
    """Name -> path of every run folder at or below `folder`, but for those of sweeps further down."""
    make_one = "make one: asyncsgd train masked_lm --mode async --nproc 4"
    if not folder.is_dir():
        raise UsageError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; {make_one}")
    inner = sorted(file.parent for file in folder.rglob("plan.json") if file.parent != folder)
    found = {file.parent for name in ("summary.json", EVENTS) for file in folder.rglob(name)}
    own = {path for path in found if not any(sweep in path.parents for sweep in inner)}
    names = {path.resolve().name if path == folder else path.relative_to(folder).as_posix(): path for path in own}
    kept = {
        name: path
        for name, path in sorted(names.items())
        if path == folder or not ((PREDICTED.search(name) and path.parent in own) or REPLACED.search(name))
    }
    if not kept and not plan.runs:
        if inner:
            listed = ", ".join(map(str, inner))
            raise UsageError(f"{folder} holds no runs of its own, but sweeps; give one of them: {listed}")
        raise UsageError(f"{folder}: no run folder here (none has an events.jsonl or a summary.json); {make_one}")
    return kept


def _replaced(path: Path) -> list[str]:
    """The statuses of the runs that lay here before and were made again; UNFINISHED of killed ones."""
    statuses = []
    for earlier in sorted(path.parent.glob(f"{path.name}.before-*")):
        try:
            statuses.append(str(_summary(earlier / "summary.json").get("status") or UNFINISHED))
        except (OSError, ValueError):
            statuses.append(UNREADABLE)
    return statuses


def read_run(path: Path) -> tuple[dict[str, Any], DataFrame]:
    """The row of one run folder, without its place in a study, and its curve."""
    row: dict[str, Any] = {"path": path, "left_out": "", "notes": "", "usable": False}
    row |= {"asked": {}, "settings": {}, "details": {}}
    curve = DataFrame(columns=CURVES[1:], dtype=float)
    try:
        row |= _checked(_of_settings(path / "settings.yaml") | _of_environment(path / "environment.json"))
        row["asked"] = asked_of(row["settings"], {})
        summary = _summary(path / "summary.json")
        if missing_records := lost_records(path / EVENTS, summary):
            raise ValueError(missing_records)
        better: dict[str, str] = {}
        if (path / EVENTS).is_file():
            header = read_header(path / EVENTS)
            better = header.get("better") or {}
            curve, told = _events(path / EVENTS)
            told["details"]["loss_unit"] = header.get("loss_unit", "nats")
            if elsewhere := _resumed_on(path, row["machine"]):
                told["details"]["resumed_on"] = elsewhere
            row |= told | _checked({"task": header.get("task")})
        if not summary:
            why = "no summary.json: it was killed or is still running"
            return row | {"status": UNFINISHED, "left_out": f"{UNFINISHED}: {why}"}, curve
        row |= _checked(_of_summary(summary, better))
        row["asked"] = asked_of(row["settings"], summary)
        at_start = curve.loc[curve["updates"] == 0, "loss"]
        row["first_loss"] = float(at_start.iloc[0]) if len(at_start) else math.nan
        told = {
            key: summary[key]
            for key in ("metrics", "labels", "hatecheck", "undefined_scores", "parent", "evaluation_sets")
            if summary.get(key)
        }
        told |= {"better": better} if better else {}
        row["details"] = {**(summary.get("details") or {}), **row["details"], **told}
        if row["status"] == DONE and row.get("task") != "finetuning" and (path / EVENTS).is_file():
            _check_end(curve, row.get("samples"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        why = f"{UNREADABLE}: {' '.join(str(error).split())[:200]}"
        return {**row, "status": UNREADABLE, "left_out": why, "usable": False}, curve.iloc[:0]
    lost = len(curve) > 0 and not math.isfinite(curve["loss"].iloc[-1])
    row["diverged"] = row["status"] == DIVERGED or (row["status"] == DONE and lost)
    if len(curve) > 0 and not (row["diverged"] or curve["loss"].map(math.isfinite).all()):
        row["details"]["looks_not_finite"] = int((~curve["loss"].map(math.isfinite)).sum())
    row["usable"] = row["diverged"] or (row["status"] == DONE and (len(curve) > 0 or row.get("task") == "finetuning"))
    if not row["usable"]:
        row["left_out"] = f"{row['status']}: {summary.get('message') or 'it has no evaluation'}"
    return row, curve


def rows_of(paths: Mapping[str, Path]) -> DataFrame:
    """Rows of `runs` by name, of run folders that lie in no study; the folder around a run is its arm."""
    return _table([{"run": name, "arm": name.rpartition("/")[0]} | read_run(path)[0] for name, path in paths.items()])


def _summary(path: Path) -> dict[str, Any]:
    """What summary.json holds; empty where there is none."""
    if not path.exists():
        return {}
    summary = read_json(path)
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str) or summary.get("schema") != SCHEMA:
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
            metrics = {f"metric.{name}": value for name, value in (record.get("metrics") or {}).items()}
            at = {name: record[key] for name, key in (("updates", "version"), ("samples", "total_samples"))}
            at |= {"seconds": record["train_seconds"], "loss": record["loss"]}
            if None in (at["samples"], at["seconds"]):
                raise ValueError(f"the evaluation at version {at['updates']} says no seconds or samples")
            rows.append({name: _number(value, name) for name, value in (at | metrics).items()})
        elif kind == "resume":
            resumes += 1
        elif kind == "fault":
            faults.append(f"fault at version {record.get('version')}: {record.get('message')}")
        elif kind == "leave" and record.get("reason") not in (None, "", STOPPED):
            lost_workers += 1
            faults.append(f"worker {record.get('worker')} left: {record['reason']}")
    notes = faults if len(faults) < 2 else [f"{len(faults)} faults, the last: {faults[-1]}"]
    details: dict[str, Any] = {"worker_losses": last["worker_losses"]} if last.get("worker_losses") else {}
    if lost_workers:
        details["lost_workers"] = lost_workers
    curve = DataFrame(rows) if rows else DataFrame(columns=CURVES[1:])
    return curve.astype(float), {"notes": "".join(notes), "resumes": resumes, "details": details}


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
    if samples is not None and curve["samples"].max() < samples:
        raise ValueError(f"its evaluations end at {curve['samples'].max():g} of {samples:g} samples")


def algorithm(mode: str, rule: str) -> str:
    """What a colour and a comparison go by.

    >>> algorithm("async", "ringmaster:threshold=2"), algorithm("async", "synchronous"), algorithm("single", "")
    ('ringmaster', 'sync', 'single')
    """
    rule = rule.partition(":")[0].casefold()
    if mode in ("single", "hogwild") or (mode == "pipeline" and rule == "synchronous"):
        return mode
    if mode == "sync" or rule == "synchronous":
        return "sync"
    return (mode or "unknown") if rule in PLAIN_RULES else rule


def _of_summary(summary: dict[str, Any], better: Mapping[str, str]) -> dict[str, Any]:
    """The columns that summary.json has a say in."""
    get = summary.get
    delay = get("delay") or {}
    memory = get("memory") or {}
    work = get("seconds") or {}
    load = get("machine_load") or {}
    rates = get("throughput") or {}
    metrics = get("metrics") or {}
    workers = [] if get("mode") == "single" else [peak for _, peak in memory.get("workers") or ()]
    peaks = [memory["leader"], *workers] if memory else []  # alone one process is leader and worker at once
    whole = (get("train_seconds") or 0.0) * (get("num_workers") or 1)
    total = max(whole, sum(work.get(part, 0.0) for part in ("compute", "wait", "communicate"))) or math.nan
    finetuned = "parent" in summary
    named = [*better, *metrics]
    shares = [load.get(key) for key in ("others_share", "stolen_share")]
    return {
        **{column: get(key) for column, key in SAME.items()},
        "task": "finetuning" if finetuned else get("task"),
        "rule": get("rule") or "",
        "algorithm": algorithm(get("mode") or "", get("rule") or ""),
        "parent": _parent(get("parent")) if finetuned else None,
        "sample_order": get("sample_order", FIRST),
        "metric": metrics.get(named[0]) if named else None,
        "samples_per_update": (get("num_samples_applied") or 0) / (get("num_updates") or math.inf) or math.nan,
        **{f"delay_{key}": delay.get(key) for key in ("mean", "p95", "max")},
        "computing": work.get("compute", math.nan) / total,
        "waiting": work.get("wait", math.nan) / total,
        "communicating": work.get("communicate", math.nan) / total,
        "memory_gib": sum(peak[0] for peak in peaks) / 2**30 or math.nan,
        "gpu_gib": sum(peak[1] for peak in peaks) / 2**30 if peaks else math.nan,
        "tokens_per_second": rates.get("tokens_per_second"),
        "mfu": rates.get("model_flops_utilisation"),
        "altered": (get("rule_acted") or {}).get("altered"),
        "oversubscribed": (get("oversubscription") or 0) > 1,
        "other_load": sum(share for share in shares if share is not None) if load else math.nan,
        **({"model": get("model")} if finetuned else {}),
    }


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
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError("environment.json is damaged: it is no object")
    ranks = [one for one in found.get("hardware_of_ranks") or [found] if isinstance(one, dict)]
    device = found.get("device") or ""
    commit = found.get("commit") or ""
    number = found.get("num_devices")
    return {
        "machine": "; ".join(dict.fromkeys(map(_machine, ranks))),
        "device": f"{number} x {device}" if number and device not in ("", "cpu") else device,
        "num_devices": number,
        "threads": found.get("threads_per_worker"),
        "torch": found.get("torch_build") or (found.get("versions") or {}).get("torch"),
        "commit": f"{commit} modified" if found.get("modified") else commit,
    }


def _resumed_on(path: Path, machine: str) -> list[str]:
    """The machines on which a run went on, other than the one on which it began."""
    found = [_of_environment(file)["machine"] for file in sorted(path.glob("environment.resumed-*.json"))]
    return [name for name in dict.fromkeys(found) if name != machine]


def _machine(found: dict[str, Any]) -> str:
    """Processor, cores and GPUs; empty where neither a processor nor a GPU has a name."""
    cores = found.get("cores")
    gpus = found.get("gpus") or ()
    if not (found.get("cpu") or gpus):
        return ""
    parts = [found.get("cpu"), found.get("cpu_capability"), cores and f"{cores} core{'s' * (cores != 1)}"]
    return ", ".join(map(str, filter(None, (*parts, *gpus))))


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
