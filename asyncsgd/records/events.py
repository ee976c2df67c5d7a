"""The run folder: settings, environment, events and summary of one run. Standard library only.

::

    runs/<name>/
      settings.yaml      every setting, defaults resolved (written by asyncsgd.settings.training)
      environment.json   versions, commit, cores, threads; no host name, user or path
      events.jsonl       a header line that names the task and its metrics, then one record per line
      summary.json       status and results; written once, atomically, at the end
      model/             safetensors and tokenizer, loads with AutoModelForMaskedLM.from_pretrained

Analysis reads these files and nothing else. Readers ignore keys and kinds they do not know, and drop a torn last line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from asyncsgd.errors import UsageError
from asyncsgd.records.locks import lock

SCHEMA = 2

EVENTS = "events.jsonl"

FLUSH_SECONDS = 0.5
"""How long a record may wait to be written: less than the second that a killed run may lose, so that a busy machine
has the rest of it."""

DONE, FAILED, INTERRUPTED, DIVERGED = "DONE", "FAILED", "INTERRUPTED", "DIVERGED"

APPLIED, HELD, DROPPED = "applied", "held", "dropped"

Range = tuple[int, int, int]
"""A range of batches of a stream: (stream, first index, index after the last)."""

Started = tuple[int, int, tuple[Range, ...], float | None]
"""(worker, dispatch, batches, learning rate of its local steps; None without them)."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One line of events.jsonl: what happened at one arrival at the server.

    `delay` counts updates between the read of a gradient and its application (a fresh gradient has 0);
    `arrival_delay` is the same count when the gradient arrived. All ``..._seconds`` are seconds; `train_seconds` is
    the training clock, which starts when all workers are ready and stands still during evaluations."""

    dispatch: int
    """Number of the dispatch whose gradient arrived; dispatches are numbered from 0 in the order they were started."""
    worker: int
    batches: tuple[Range, ...]
    read_version: int
    """Version of the parameters the gradient was computed at."""
    version: int
    """Version of the parameters after this event."""
    arrival_delay: int
    outcome: str
    """``applied``, ``held`` or ``dropped``, at arrival."""
    uses: tuple[tuple[int, int], ...]
    """(dispatch, delay) of every gradient in the steps taken at this event."""
    drops: tuple[int, ...]
    """Dispatches, arriving or held, that will never be used."""
    abandoned: tuple[int, ...]
    """Dispatches in flight that were stopped; their batches are handed out again."""
    started: tuple[Started, ...]
    """Every gradient started at this event."""
    loss: float
    """Mean training loss of the arriving gradient, per loss term."""
    weight: float
    """Loss terms behind the gradient; in masked language modelling the masked tokens."""
    num_samples: int
    learning_rate: float
    """Of the server at this arrival, before any factor of the rule."""
    train_seconds: float
    total_samples: int
    """Samples that arrived so far, this event's included, used or not."""
    num_local_steps: int = 1
    flight_seconds: float = 0.0
    """From dispatch to arrival on the training clock: what the rule was told, so that a replay can tell it the same."""
    pull_seconds: float = 0.0
    compute_seconds: float = 0.0
    push_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Seconds the worker was idle between its previous gradient and the start of this one."""
    apply_seconds: float = 0.0
    loss_scales: tuple[float, ...] = ()
    """In float16 the scale of the loss in each local step; empty otherwise, and in logs from before it."""
    kind: str = "arrival"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An exact evaluation of one frozen version on the full evaluation set."""

    version: int
    total_samples: int
    train_seconds: float
    loss: float
    """Mean loss per loss term; on a closed-form problem the excess f(x) - f*."""
    weight: float | None
    """Loss terms in the set; None on a closed-form problem."""
    metrics: Mapping[str, float]
    """What the task's `metrics` gives; empty on a closed-form problem."""
    eval_seconds: float
    kind: str = "evaluate"
    worker_losses: tuple[float | None, ...] = ()
    """Mean loss of each worker's share of the set (None: no loss term in it); `loss` is their mean weighted by loss
    terms. Empty where one process evaluates the whole set.
    """
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the task's `details` gives, as JSON."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """A worker joined or left. `kind` is ``join`` or ``leave``; `reason` is empty for an orderly join or leave."""

    kind: str
    worker: int
    version: int
    total_samples: int
    train_seconds: float
    reason: str = ""
    lost: tuple[int, ...] = ()
    """Dispatches that were in flight and are gone; their batches are handed out again."""
    uses: tuple[tuple[int, int], ...] = ()
    started: tuple[Started, ...] = ()
    drops: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something went wrong and was handled (a non-finite loss, a lost rank); `message` is what the user was told."""

    message: str
    worker: int | None
    version: int
    train_seconds: float
    kind: str = "fault"


Record = Event | Evaluation | Membership | Fault


@dataclasses.dataclass
class RuleActed:
    """How often a rule did something else than asynchronous SGD does; a server counts it, the summary has it."""

    arrivals: int = 0
    altered: int = 0
    """Arrivals whose gradient was not simply applied at the full learning rate, their worker starting again."""

    def describe(self, rule: str, num_workers: int) -> str:
        """What the user is told at the end of a run; nothing where nobody expects another run than that of asynchronous
        SGD.

        >>> RuleActed(600, 0).describe("koloskova", num_workers=4)
        'rule   altered 0 of 600 arrivals: koloskova never acted, so this run is asynchronous SGD'
        >>> RuleActed(600, 0).describe("koloskova", num_workers=1)
        ''
        """
        if rule == "asynchronous" or num_workers == 1 or not self.arrivals:
            return ""
        said = f"rule   altered {self.altered} of {self.arrivals} arrivals"
        return said if self.altered else f"{said}: {rule} never acted, so this run is asynchronous SGD"


class RunFolder:
    """Writes one run folder; owned by the process that holds the server (rank 0 in synchronous runs).

    A killed run loses the records of its last second at most: they are written at every evaluation, fault and
    membership change, and by a thread every `FLUSH_SECONDS`. The summary is renamed into place.

    Args:
        path: of a folder that holds no records worth keeping; made if it is not there.
        events: what `own` has returned for `path`; None calls it here.
        task: name of what is learned; None for a closed-form problem.
        better: by the name of each of its metrics, whether ``higher`` or ``lower`` is better; the primary one first.
    """

    def __init__(
        self,
        path: Path,
        events: TextIO | None = None,
        *,
        task: str | None = None,
        better: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path = Path(path)
        self._events = own(self.path) if events is None else events
        self._events.truncate(0)
        header = {"kind": "header", "schema": SCHEMA, "task": task, "better": dict(better)}
        self._events.write(json.dumps(header) + "\n")
        self._events.flush()
        self._lock = threading.Lock()
        self._failure: OSError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._flush_regularly, name="records", daemon=True).start()

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        write_json(self.path / "environment.json", environment)

    def append(self, record: Record) -> None:
        """Append one record as one line. Non-finite numbers become null, never a number that looks measured.

        Raises:
            OSError: if this record, or one before it, cannot be written.
        """
        line = json.dumps(_finite(vars(record)), separators=(",", ":")) + "\n"
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._events.write(line)
            if record.kind != "arrival":
                self._events.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write all records, then the summary.

        Raises:
            OSError: if any of it cannot be written.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._events.flush()
        write_json(self.path / "summary.json", {"schema": SCHEMA, **summary})

    def close(self) -> None:
        """Give the folder up, to be called when all else is in it; a second call does nothing."""
        self._closed.set()
        with self._lock, contextlib.suppress(OSError):  # what cannot be written was said by `write_summary`
            self._events.close()

    def _flush_regularly(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            with self._lock:
                if self._closed.is_set():
                    return
                try:
                    self._events.flush()
                except OSError as error:
                    self._failure = error
                    return


def own(path: Path) -> TextIO:
    """Make `path` if it is not there, and own it until the returned file, its events.jsonl, is closed or this process
    ends. What the file holds stays as it is.

    Raises:
        UsageError: if a live run owns it.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        file = open(path / EVENTS, "a", encoding="utf-8")  # noqa: SIM115 - closed by the caller
        if not lock(file):
            file.close()
            raise UsageError(
                f"another run is at work in {path}; wait for it, or stop it, or name another folder for this one"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path / EVENTS)):
                return file
        file.close()  # its owner has set it aside after we had opened it: what is in its place now is another folder


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON so that `path` holds either the old content or all of the new one."""
    write_text(path, json.dumps(_finite(content), indent=2) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write `content` so that `path` holds either the old content or all of the new one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an events.jsonl after its header, as dicts; a torn last line is left out. Evaluations of
    schema 1 are given the fields of this one.

    Raises:
        ValueError: if a line other than the last is not JSON, or the schema is newer than this reader.
    """
    return (record for _, record in read_numbered_events(path))


def read_numbered_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`read_events` with the number of each record's line, from 1."""
    torn: str | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                raise ValueError(f"{path.name}: line {number - 1} is damaged: {torn[:60]!r}")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # not JSON; a number or a nesting that Python refuses to read
                record = None
            if not isinstance(record, dict):
                torn = line
                continue
            if record.get("kind") == "header":
                schema = record.get("schema")
                if not isinstance(schema, int) or schema > SCHEMA:
                    raise ValueError(f"{path.name} has schema {schema}, this version reads up to {SCHEMA}")
                continue
            yield number, _current_record(record)


def read_header(path: Path) -> dict[str, Any]:
    """The first line of an events.jsonl; empty where it is damaged."""
    with open(path, encoding="utf-8", errors="replace") as file:
        try:
            header = json.loads(file.readline())
        except (ValueError, RecursionError):
            return {}
    return header if isinstance(header, dict) else {}


def read_better(path: Path) -> dict[str, str]:
    """The metrics that the header of an events.jsonl names, and which way each is better, the primary one first.

    Empty where it names none: on closed-form problems, in schema 1, and in a file that is damaged there.
    """
    better = read_header(path).get("better")
    return {name: str(way) for name, way in better.items()} if isinstance(better, dict) else {}


_OLD_METRICS = {"macro_f1": "macro_f1", "accuracy": "accuracy"}
"""By the key of an evaluation in schema 1, the metric that it is; the primary one first."""
_OLD_SUMMARY_METRICS = _OLD_METRICS | {"masked_token_accuracy": "accuracy", "perplexity": "perplexity"}
_OLD_SUMMARY_DETAILS = ("per_class_f1", "confusion")


def _current_record(record: dict[str, Any]) -> dict[str, Any]:
    """`record` in the form of this schema, whatever the schema that it was written in."""
    if record.get("kind") != "evaluate" or "metrics" in record:
        return record
    kept = {key: value for key, value in record.items() if key not in (*_OLD_METRICS, "masked_tokens")}
    return kept | {"weight": record.get("masked_tokens"), "metrics": _renamed(record, _OLD_METRICS)}


def current_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary.json holds, in the form of this schema, whatever the schema that it was written in.

    >>> current_summary({"schema": 1, "status": "DONE", "masked_token_accuracy": 0.5, "eval_masked_tokens": 90})
    {'schema': 1, 'status': 'DONE', 'metrics': {'accuracy': 0.5}, 'details': {}, 'eval_weight': 90}
    """
    schema = summary.get("schema")
    if not isinstance(schema, int) or schema > 1 or "metrics" in summary:
        return dict(summary)
    old = (*_OLD_SUMMARY_METRICS, *_OLD_SUMMARY_DETAILS, "eval_masked_tokens")
    return {key: value for key, value in summary.items() if key not in old} | {
        "metrics": _renamed(summary, _OLD_SUMMARY_METRICS),
        "details": {key: summary[key] for key in _OLD_SUMMARY_DETAILS if summary.get(key) is not None},
        "eval_weight": summary.get("eval_masked_tokens"),
    }


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: values[key] for key, name in names.items() if values.get(key) is not None}


def describe_environment(threads: int, num_workers: int) -> dict[str, Any]:
    """Versions, commit, cores and threads of this run; no host name, user name or path."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "asyncsgd")
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "platform": sys.platform,
        "versions": versions,
        **_commit(),
        "cores": available_cores(),
        "threads_per_worker": threads,
        "num_workers": num_workers,
        "oversubscription": num_workers * threads / available_cores(),
        "cpu": _cpu_model(),
    }


def available_cores() -> int:
    """Cores this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "modified": None}  # installed without its repository, or git is not there


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return None  # not Linux
    return None


def _finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None, since JSON has no name for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
