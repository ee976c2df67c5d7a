"""One run folder as a row of `runs` and a curve, from the files that the run wrote.

A run that cannot be read (a text where a number belongs, a torn or an empty file) is UNREADABLE with one reason, and it
enters no mean, test or count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pandas import DataFrame

from analysis.meanings import asked_of
from analysis.places import UNREADABLE
from analysis.runs import NUMBERS, TEXTS, Columns
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
from asyncsgd.settings.groups import FIRST as FIRST_SAMPLE_ORDER
from asyncsgd.settings.yaml_reader import EXPERIMENT, FORMAT, TASK, check_format, read_yaml

SUMMARY_KEYS = {
    "status": "status",
    "mode": "mode",
    "workers": "num_workers",
    "clock": "clock",
    "speeds": "speeds",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "seed": "seed",
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
"""Column of `runs` -> the key of summary.json that holds it."""
CURVES = ["run", "updates", "samples", "seconds", "loss"]
"""The columns of `curves`, which has a column ``metric.NAME`` besides for every metric of the task."""
PARTS_OF_TIME = {"computing": "compute", "waiting": "wait", "communicating": "communicate"}
"""Column of `runs` -> the part of `seconds` in summary.json that it is a share of."""
UNFINISHED = "UNFINISHED"
Summary: TypeAlias = dict[str, Any]
"""What summary.json holds."""


def read_run(path: Path) -> tuple[Columns, DataFrame]:
    """The row of one run folder, without its place in a study, and its curve."""
    row: Columns = {"path": path, "asked": {}, "settings": {}, "details": {}}
    no_curve = DataFrame(columns=CURVES[1:], dtype=float)
    try:
        curve = _fill(row, path, no_curve)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError) as error:
        why = " ".join(str(error).split())[:200]
        row |= {"status": UNREADABLE, "left_out": f"{UNREADABLE}: {why}"}
        return row, no_curve
    if row["status"] != UNFINISHED:
        _set_outcome(row, curve)
    return row, curve


DETAILS = ("metrics", "labels", "hatecheck", "undefined_scores", "parent", "evaluation_sets")
"""Keys of summary.json that are kept in the details of a run."""


def _fill(row: Columns, path: Path, no_curve: DataFrame) -> DataFrame:
    """Fill the row of a run from its files, and return its curve, or `no_curve` where it has no events.

    What was read before a damage stays in the row.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError: if a file is damaged.
    """
    row |= _checked(_columns_from_settings(path / "settings.yaml"))
    row |= _checked(_columns_from_environment(path / "environment.json"))
    row["asked"] = asked_of(row["settings"], {})  # of a run without a summary; below the summary resolves some
    summary = read_summary(path / "summary.json")
    missing_records = lost_records(path / EVENTS, summary)
    if missing_records:
        raise ValueError(missing_records)
    better: dict[str, str] = {}  # metric -> higher or lower; the first is the primary one
    curve = no_curve
    has_events = (path / EVENTS).is_file()
    if has_events:
        header = read_header(path / EVENTS)
        better = header.get("better") or {}
        curve, from_events = _events(path / EVENTS)
        from_events["details"]["loss_unit"] = header.get("loss_unit", "nats")
        elsewhere = _resumed_on(path, row["machine"])
        if elsewhere:
            from_events["details"]["resumed_on"] = elsewhere
        row |= from_events | _checked({"task": header.get("task")})
    if not summary:
        row["status"] = UNFINISHED
        row["left_out"] = f"{UNFINISHED}: no summary.json: it was killed or is still running"
        return curve
    row |= _checked(_columns_from_summary(summary, better))
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
    if row["status"] == DONE and has_events:
        _check_end(curve, row.get("samples"))
    return curve


def _set_outcome(row: Columns, curve: DataFrame) -> None:
    """Set whether a run diverged, whether it is usable, and if not, why it is left out."""
    is_done = row["status"] == DONE
    is_evaluated = len(curve) > 0
    is_finite = curve["loss"].map(math.isfinite)
    is_last_not_finite = is_evaluated and not is_finite.iloc[-1]
    row["diverged"] = row["status"] == DIVERGED or (is_done and is_last_not_finite)
    if is_evaluated and not row["diverged"] and not is_finite.all():
        row["details"]["evaluations_not_finite"] = int((~is_finite).sum())
    row["usable"] = row["diverged"] or (is_done and is_evaluated)
    if not row["usable"]:
        row["left_out"] = f"{row['status']}: {row['message'] or 'it has no evaluation'}"


def read_summary(path: Path) -> Summary:
    """What summary.json holds; empty where there is none."""
    if not path.exists():
        return {}
    summary = read_json(path)
    has_status = isinstance(summary, dict) and isinstance(summary.get("status"), str)
    if not has_status or summary.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has no status of schema {SCHEMA}")
    return summary


def _events(path: Path) -> tuple[DataFrame, Columns]:
    """The curve of a run, and the columns that its records give."""
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
    notes = faults[0] if faults else ""
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
        ValueError: for a text or a truth value.
        OverflowError: for a number that is too large.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"its {name} is {str(value)[:60]!r}, which is no number")
    return float(value)


def _checked(row: Columns) -> Columns:
    """A row without the values that are None, in which columns hold what they should: numbers or texts.

    Raises:
        ValueError: if a value is not of its column's kind.
    """
    checked = {name: value for name, value in row.items() if value is not None}
    for name, value in checked.items():
        if name in NUMBERS:
            checked[name] = _number(value, name)
        elif name in TEXTS and not isinstance(value, str):
            raise ValueError(f"its {name} is {str(value)[:60]!r}, which is no text")
    return checked


def _check_end(curve: DataFrame, samples: float | None) -> None:
    """Refuse a curve that ends before the run's last sample: its last loss would be that of fewer samples."""
    if not len(curve):
        raise ValueError("events.jsonl has no evaluation")
    last = curve["samples"].max()
    if samples is not None and last < samples:
        raise ValueError(f"its evaluations end at {last:g} of {samples:g} samples")


def algorithm(mode: str, rule: str) -> str:
    """The name of an algorithm, by which arms are compared and coloured.

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
    if name in ("", "asynchronous"):
        return mode or "unknown"
    return name


def _columns_from_summary(summary: Summary, better: Mapping[str, str]) -> Columns:
    """The columns that summary.json gives."""
    row = {column: summary.get(key) for column, key in SUMMARY_KEYS.items()}
    mode = summary.get("mode") or ""
    rule = summary.get("rule") or ""
    row["rule"] = rule
    row["algorithm"] = algorithm(mode, rule)
    row["task"] = summary.get("task")
    row["asked_task"] = row["task"]  # no column; `places.as_misplaced` reads it
    if "parent" in summary:
        row["task"] = "finetuning"
        parent = summary["parent"]
        row["parent"] = ""
        if isinstance(parent, dict):
            row["parent"] = str(parent.get("run") or "")
        row["model"] = summary.get("model")  # its settings may name the folder of a run in its place
    row["sample_order"] = summary.get("sample_order", FIRST_SAMPLE_ORDER)
    metrics = summary.get("metrics") or {}
    primary_metric = next(iter([*better, *metrics]), None)  # a task names its primary metric first
    row["metric"] = metrics.get(primary_metric)
    num_samples = summary.get("num_samples_applied")  # without those of gradients that were dropped
    num_updates = summary.get("num_updates")
    if num_samples and num_updates:
        row["samples_per_update"] = num_samples / num_updates
    delay = summary.get("delay") or {}
    for key in ("mean", "p95", "max"):
        row[f"delay_{key}"] = delay.get(key)
    row |= _shares_of_time(summary)
    row |= _memory(summary)
    throughput = summary.get("throughput") or {}
    row["tokens_per_second"] = throughput.get("tokens_per_second")
    row["mfu"] = throughput.get("model_flops_utilisation")
    row["altered"] = (summary.get("rule_acted") or {}).get("altered")
    row["oversubscribed"] = (summary.get("oversubscription") or 0) > 1
    row["other_load"] = _other_load(summary)
    return row


def _shares_of_time(summary: Summary) -> dict[str, float]:
    """The shares of the workers' time in which they computed, waited and communicated."""
    seconds = summary.get("seconds") or {}
    workers_time = (summary.get("train_seconds") or 0.0) * (summary.get("num_workers") or 1)
    parts = sum(seconds.get(part, 0.0) for part in PARTS_OF_TIME.values())
    total = max(workers_time, parts) or math.nan  # parts that overlap may add up to more
    return {column: seconds.get(part, math.nan) / total for column, part in PARTS_OF_TIME.items()}


def _memory(summary: Summary) -> dict[str, float]:
    """The sum of the peaks of a run's processes; a peak is (bytes of the host, bytes of GPUs)."""
    memory = summary.get("memory") or {}
    if not memory:
        return {"memory_gib": math.nan, "gpu_gib": math.nan}
    peaks = [memory["leader"]]
    if summary.get("mode") != "single":  # alone one process is leader and worker at once
        peaks += [peak for _, peak in memory.get("workers") or ()]
    host_bytes = sum(host for host, _ in peaks)
    gpu_bytes = sum(gpu for _, gpu in peaks)
    memory_gib = host_bytes / 2**30 if host_bytes else math.nan
    return {"memory_gib": memory_gib, "gpu_gib": gpu_bytes / 2**30}


def _other_load(summary: Summary) -> float:
    """The share of the machine that other programs used or its host took."""
    load = summary.get("machine_load")
    if not load:
        return math.nan
    others = load.get("others_share") or 0
    stolen = load.get("stolen_share") or 0
    return float(others + stolen)


def _columns_from_settings(path: Path) -> Columns:
    """The columns that settings.yaml gives. The same columns of summary.json, where it is there, replace them."""
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


def _columns_from_environment(path: Path) -> Columns:
    """The columns that environment.json gives: the machine and the code."""
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
        name = _columns_from_environment(file)["machine"]
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
