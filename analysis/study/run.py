"""Run folders as values: one `Run` each, kept with whatever could be read, and a message for whatever could not."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import pandas

from asyncsgd.errors import UsageError
from asyncsgd.records.events import (
    DONE,
    EVENTS,
    SCHEMA,
    current_summary,
    parsed,
    read_better,
    read_events,
    read_json,
)
from asyncsgd.settings.yaml_reader import read_yaml

UNFINISHED = "UNFINISHED"
"""Status of a run without a summary: it crashed, was killed or is still running."""
UNREADABLE = "UNREADABLE"
"""Status of a run that has ended, and one of whose files is damaged or newer than this reader. It may well be DONE. It
is named and in no number: what can still be read of it may be as wrong as the rest.
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

MODES = ("single", "sync", "pipeline", "async", "hogwild")
"""The known modes, in the order of tables and legends."""

PLAIN_RULES = {
    "single": ("single", "synchronous", "asynchronous"),
    "sync": ("synchronous",),
    "pipeline": ("synchronous",),
    "async": ("asynchronous",),
    "hogwild": ("hogwild", "asynchronous"),
}
"""Rules that the name of the mode already says; every other rule is named beside it."""

_COUNTS = ("num_workers", "threads", "seed", "batch_size", "num_samples")
_NUMBERS = ("train_seconds", "final_eval_loss", "eval_weight", "samples_per_second", "oversubscription")
_NAMES = ("mode", "rule", "data_fingerprint", "clock")
_MEASURED = ("threads", "oversubscription", "eval_weight")
"""What a simulation need not have: it has no threads, and a closed-form problem has no loss terms."""
_NO_KEYS_AND_VALUES = (
    *("experiment", "task", "mode", "rule", "clock", "speeds", "network", "data", "data_fingerprint", "base_model"),
    *("model", "transport", "hogwild_state", "init_sha256", "parameters_sha256", "candidates_sha256", "num_updates"),
    *("accumulate", "micro_batches", "num_parameters", "num_samples_applied", "eval_seconds", "first_eval_loss"),
    *("new_parameters", "num_train_samples", "num_eval_samples", "message"),
)
"""What is one value wherever it is there, and may be compared with those of other runs."""
_DELAYS = ("mean", "p50", "p95", "max")

PREDICTION = re.compile(r"predicted-\d+")
"""Name of a folder inside a run's in which ``experiments/calibrate.py`` has predicted that run."""

USUAL_MASKING = "token:0.15"
"""``eval_masking`` of a run without ``--eval-mask``."""

FINETUNING = "stilt_finetune"
"""`Run.experiment` of a fine-tuning run, whose summary has scores of a labelled task and no mode or rule of its own."""

_FINETUNING_COUNTS = ("seed", "batch_size", "num_samples", "num_train_samples", "num_eval_samples")
_FINETUNING_NUMBERS = ("train_seconds", "final_eval_loss")
_FINETUNING_NAMES = ("data_fingerprint",)
_FINETUNING_METRICS = ("macro_f1", "accuracy")
"""What a finished run of schema 1 has to have, whose header names no metrics."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """What runs share that differ in their seed only; None where the summary does not say."""

    mode: str | None
    rule: str | None
    num_workers: int | None
    batch_size: int | None
    virtual: bool = False
    """Whether the seconds were drawn; such runs never share a mean with measured ones."""

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorting key: modes in the order of `MODES`, then rule, workers and batch size."""
        place = MODES.index(self.mode) if self.mode in MODES else len(MODES)
        return (place, self.mode or "", self.rule or "", self.num_workers or 0, self.batch_size or 0, self.virtual)

    @property
    def algorithm(self) -> str:
        """What a colour and a comparison go by: the rule's name where there is one of its own, else the mode.

        >>> Condition("async", "ringmaster:threshold=2", 4, 16).algorithm, Condition("single", None, 1, 16).algorithm
        ('ringmaster', 'single')
        >>> Condition("async", "synchronous", 4, 16, True).algorithm, Condition("async", None, 4, 16).algorithm
        ('sync', 'async')
        >>> Condition(None, "asynchronous", 4, 16).algorithm
        'unknown'
        """
        if self.mode is None:
            return "unknown"
        rule = (self.rule or "").partition(":")[0].casefold()
        if self.mode in ("single", "hogwild") or (self.mode == "pipeline" and rule == "synchronous"):
            return self.mode
        if self.mode == "sync" or rule == "synchronous":
            return "sync"
        return "async" if rule in ("", "asynchronous") else rule


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
    """The metrics that the header of its records names; see `asyncsgd.records.events.read_better`."""
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
    def finetuning(self) -> bool:
        """Whether it fine-tuned a model on a labelled task: its numbers never enter a mean with pretraining runs."""
        return self.summary.get("experiment") == FINETUNING

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Of its last evaluation, the primary one first; empty where it has none."""
        values = self.summary.get("metrics") or {}
        return {name: values[name] for name in dict.fromkeys((*self.better, *values)) if name in values}

    @property
    def primary_metric(self) -> str | None:
        """Its name; None where the run's task has no metrics."""
        return next(iter((*self.better, *self.metrics)), None)

    @property
    def details(self) -> Mapping[str, Any]:
        """What else its last evaluation says."""
        return self.summary.get("details") or {}

    @property
    def learning_rate(self) -> float | None:
        """Of settings.yaml; None where it does not say."""
        value = self.settings.get("learning_rate")
        return float(value) if _is_number(value) else None

    @property
    def condition(self) -> Condition:
        summary = self.summary
        return Condition(
            summary.get("mode"),
            summary.get("rule"),
            summary.get("num_workers"),
            summary.get("batch_size"),
            self.virtual,
        )

    @property
    def evaluation_set(self) -> str | None:
        """What a loss has to share with another one: the data's fingerprint, and the masks where they are not the usual
        ones. None where the summary does not say on which data.

        A run from before ``--eval-mask`` was evaluated with the masks that it trained with.
        """
        fingerprint, masking = self.summary.get("data_fingerprint"), self.summary.get("eval_masking")
        if masking is None and "mask" in self.settings:
            masking = f"{self.settings['mask']}:{self.settings.get('mask_prob')}"
        if fingerprint is None or masking in (None, USUAL_MASKING):
            return fingerprint
        return f"{fingerprint} masked {masking}"

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

    A run folder is one that holds an events.jsonl or a summary.json. A damaged or unfinished run is never skipped: it
    is kept with its evaluations, as far as they can be read. What ``experiments/calibrate.py`` has predicted of a run
    lies inside that run's folder and is no run of its own; it is loaded only where `folder` names it.

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


def labels(conditions: Iterable[Condition]) -> dict[Condition, str]:
    """A name for every condition, in order; the rule and the batch size are in it where they tell conditions apart.

    >>> plain, other = Condition("async", "asynchronous", 4, 8), Condition("async", "ringmaster", 1, 8)
    >>> list(labels([other, plain]).values())
    ['async, 4 workers', 'async (ringmaster), 1 worker']
    """
    ordered = sorted(set(conditions), key=lambda condition: condition.order)
    plain_rules: dict[str | None, set[str | None]] = {}
    for condition in ordered:
        if _is_plain(condition):
            plain_rules.setdefault(condition.mode, set()).add(condition.rule)
    batch_sizes = {condition.batch_size for condition in ordered}
    names = {}
    for condition in ordered:
        # on the virtual clock it is a rule, and the same thing
        synchronous = condition.virtual and condition.mode == "async" and condition.algorithm == "sync"
        name = "sync" if synchronous else condition.mode or "unknown mode"
        # single/synchronous and single/asynchronous are both plain, but must not get one name
        if not synchronous and (not _is_plain(condition) or len(plain_rules[condition.mode]) > 1):
            name += f" ({condition.rule or 'no rule'})"
        count = condition.num_workers
        name += ", unknown workers" if count is None else f", {count} worker{'s' * (count != 1)}"
        if len(batch_sizes) > 1:
            name += f", batch {'unknown' if condition.batch_size is None else condition.batch_size}"
        if condition.virtual:
            name += ", virtual clock"
        names[condition] = name
    return names


def _is_plain(condition: Condition) -> bool:
    return condition.rule is None or condition.rule.casefold() in PLAIN_RULES.get(condition.mode or "", ())


def _load_run(path: Path, name: str) -> Run:
    damage: list[str] = []
    problems: list[str] = []
    better = read_better(path / EVENTS) if (path / EVENTS).is_file() else {}
    summary = _read_summary(path / "summary.json", better, damage, problems)
    ended = summary["status"] != UNFINISHED
    evaluations, num_resumes = _read_records(path / EVENTS, better, damage, problems)
    has_end = summary["status"] == DONE and summary.get("experiment") != FINETUNING
    if (path / EVENTS).is_file() and (lost := _lost_end(evaluations, summary.get("num_samples") if has_end else None)):
        (damage if has_end else problems).append(lost)
    settings = _read_settings(path / "settings.yaml", damage)
    environment = _read_environment(path / "environment.json", problems)
    if damage and ended:
        summary, settings, environment = {"status": UNREADABLE}, {}, {}
    told = (*damage, *problems)
    run = Run(path, name, summary, evaluations, told, settings, better, num_resumes, environment)
    if run.timed_in_parts and run.status != UNREADABLE:
        problem = f"resumed: its seconds were measured in {num_resumes + 1} parts"
        run = dataclasses.replace(run, problems=(*told, problem))
    return run


def _lost_end(evaluations: pandas.DataFrame, num_samples: int | None) -> str:
    """What is lost of a curve; empty where it has its end, at `num_samples`.

    Every run is evaluated where it ends. Without that evaluation its last loss is one of another number of samples, and
    all others would have to be compared there.
    """
    if not len(evaluations):
        return "events.jsonl has no evaluation: it has no curve in the figures"
    last = evaluations["total_samples"].max()
    if num_samples is None or pandas.isna(last) or last >= num_samples:
        return ""
    return f"its evaluations in events.jsonl end at {last} of {num_samples} samples"


def loss_label(runs: Sequence[Run]) -> str:
    """What an axis with the losses of these runs says, which are of one task."""
    if runs and all(run.summary.get("eval_weight") is None for run in runs):
        return "evaluation loss, excess"
    # Runs from before the task was written down are of masked language models.
    masked = all(run.summary.get("task") in (None, "masked_lm") for run in runs)
    return "evaluation loss (nats per masked token)" if masked else "evaluation loss"


def _read_settings(path: Path, damage: list[str]) -> dict[str, Any]:
    """The flat settings of a run; those of experiments/simulate.py lie one level deeper and are taken from there."""
    if not path.is_file():
        return {}
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"), "it")
    except (OSError, ValueError) as error:
        damage.append(f"settings.yaml cannot be read: {' '.join(str(error).split())[:120]}")
        return {}
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        damage.append("settings.yaml is damaged: no keys and values")
        return {}
    simulated = settings.get("simulate")
    settings = {str(key): value for key, value in (simulated if isinstance(simulated, dict) else settings).items()}
    rate = settings.get("learning_rate")
    if rate is not None and not _is_number(rate):
        damage.append(f"settings.yaml has an unusable learning_rate{_shown(rate)}")
    return settings


def _read_environment(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"environment.json cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        problems.append("environment.json is damaged: not an object")
        return {}
    return content


def _read_summary(path: Path, better: Mapping[str, str], damage: list[str], problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append("no summary.json: the run crashed, was killed or is still running")
        return {"status": UNFINISHED}
    try:
        summary = read_json(path)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        damage.append(f"summary.json cannot be read: {error}")
        return {"status": UNREADABLE}
    if not isinstance(summary, dict):
        damage.append("summary.json is damaged: not an object")
        return {"status": UNREADABLE}
    schema = summary.get("schema")
    if not isinstance(schema, int):
        damage.append(f"summary.json is damaged: schema is {schema!r}")
        return {"status": UNREADABLE}
    if schema > SCHEMA:
        damage.append(f"summary.json has schema {schema}, this version reads up to {SCHEMA}")
        return {"status": UNREADABLE}
    if not isinstance(summary.get("status"), str):
        damage.append("summary.json has no status")
        return {"status": UNREADABLE}
    return _checked(current_summary(summary), better, damage, problems)


def _checked(
    summary: Mapping[str, Any], better: Mapping[str, str], damage: list[str], problems: list[str]
) -> dict[str, Any]:
    """`summary` with all metrics and delays. A field used by the analysis that is not of its type is damage; one that
    is missing where a finished run has it is a problem.
    """
    counts: tuple[str, ...] = _COUNTS
    numbers: tuple[str, ...] = _NUMBERS
    names: tuple[str, ...] = _NAMES
    if summary.get("experiment") == FINETUNING:
        counts, numbers, names = _FINETUNING_COUNTS, _FINETUNING_NUMBERS, _FINETUNING_NAMES
    usable: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(_NO_KEYS_AND_VALUES, lambda value: not isinstance(value, Mapping | list)),
        **dict.fromkeys(counts, _is_count),
        **dict.fromkeys(numbers, _is_number),
        **dict.fromkeys((*names, "eval_masking"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("metrics", "details", "delay"), lambda value: isinstance(value, Mapping)),
        "from_scratch": lambda value: isinstance(value, bool),
    }
    for key, is_usable in usable.items():
        value = summary.get(key)
        if value is not None and not is_usable(value):
            damage.append(f"summary.json has an unusable {key}{_shown(value)}")
    # A failed run may have no result, and hogwild no rule. A finished run has to have everything else.
    if summary["status"] == DONE:
        virtual = summary.get("clock") == "virtual"
        needed = (key for key in (*counts, *numbers, *names) if key != "rule" and not (virtual and key in _MEASURED))
        problems += [f"summary.json has no {key}" for key in needed if summary.get(key) is None]
    delay = summary.get("delay")
    delay = delay if isinstance(delay, Mapping) else {}
    # Each may be null: a run without updates has no delay.
    for key in _DELAYS:
        if delay.get(key) is not None and not _is_number(delay[key]):
            damage.append(f"summary.json has an unusable delay {key}{_shown(delay[key])}")
    metrics = _checked_metrics(summary, better, damage, problems)
    return {**summary, "metrics": metrics, "delay": {key: delay.get(key) for key in _DELAYS}}


def _checked_metrics(
    summary: Mapping[str, Any], better: Mapping[str, str], damage: list[str], problems: list[str]
) -> dict[str, float | None]:
    """The metrics; a finished run has to have all that its header names."""
    metrics = summary.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    needed = better or (_FINETUNING_METRICS if summary.get("experiment") == FINETUNING else ())
    names = dict.fromkeys((*needed, *metrics))
    for name in names:
        value = metrics.get(name)
        if value is not None and not _is_number(value):
            damage.append(f"summary.json has an unusable {name}{_shown(value)}")
        elif value is None and summary["status"] == DONE:
            problems.append(f"summary.json has no {name}")
    return {name: metrics.get(name) for name in names}


def _read_records(
    path: Path, better: Mapping[str, str], damage: list[str], problems: list[str]
) -> tuple[pandas.DataFrame, int]:
    """The evaluations, and how often the run went on."""
    rows: list[dict[str, Any]] = []
    num_resumes = 0
    faults: list[str] = []
    if not path.is_file():
        problems.append("no events.jsonl: it has no curve in the figures")
        return _frame(rows, better), 0
    records = read_events(path)
    while True:
        try:
            record = next(records, None)
        except (OSError, ValueError) as error:
            told = str(error)
            problems.append(f"{told}; read up to there: {len(rows)} evaluation{'s' * (len(rows) != 1)}")
            break
        if record is None:
            if _last_line_is_torn(path):
                problems.append("events.jsonl: the last line is torn and was left out")
            break
        kind = record.get("kind")
        if kind == "evaluate":
            rows.append(_evaluation(record, damage, problems))
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


def _evaluation(record: Mapping[str, Any], damage: list[str], problems: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    at = f"the evaluation at version {record.get('version')} has no finite"
    for key, dtype in EVALUATION_COLUMNS.items():
        value = record.get(key)
        usable = _is_number(value) if dtype == "float64" else _is_count(value)
        row[key] = value if usable else None
        # A null weight is legitimate (a closed-form problem has none), and so is a null loss (it was not finite).
        if not usable and (value is not None or key in ("train_seconds", "total_samples")):
            damage.append(f"{at} {key}{_shown(value)}")
        elif value is None and key == "loss":
            problems.append(f"{at} {key}")
    metrics = record.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        row[f"metrics.{name}"] = value if _is_number(value) else None
        if not _is_number(value) and value is not None:
            damage.append(f"{at} {name}{_shown(value)}")
    return row


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


def _last_line_is_torn(path: Path) -> bool:
    last = b"{}"
    with open(path, "rb") as file:
        for line in file:
            last = line
    try:
        parsed(last)
    except ValueError:
        return True
    return False


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number that a float can hold; not a bool, which Python counts among the integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _shown(value: Any) -> str:
    return "" if value is None else f": {str(value)[:60]!r}"
