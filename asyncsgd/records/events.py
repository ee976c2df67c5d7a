"""The records of events.jsonl, one line each, and how they are read; docs/run_folder.md says what each key means, once.

Readers ignore keys and kinds they do not know, and drop a torn last line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import msgspec
from msgspec import Struct

SCHEMA = 2
EVENTS = "events.jsonl"
DONE = "DONE"
FAILED = "FAILED"
INTERRUPTED = "INTERRUPTED"
DIVERGED = "DIVERGED"
UNREADABLE = "UNREADABLE"
"""What readers call a run whose files are not what it has written."""
FINISHED = (DONE, DIVERGED)
"""How a run ends that would end so again; one that diverged is a result."""
APPLIED = "applied"
HELD = "held"
DROPPED = "dropped"


class Range(NamedTuple):
    """Batches of one stream, from the index `first` up to the index `end`, which is none of them."""

    stream: int
    first: int
    end: int


Ranges = tuple[Range, ...]
"""The batches of one gradient, in order."""
Uses = tuple[tuple[int, int], ...]
"""(dispatch, delay) of each gradient that a step has used."""
Started = tuple[int, int, Ranges, float | None]
"""(worker, dispatch, batches, learning rate of its local steps; None without them)."""


class Gradient(NamedTuple):
    """What a worker reports of a gradient; the gradient itself is a vector that travels beside it."""

    loss: float
    """Mean loss per loss term."""
    weight: float
    """Loss terms."""
    num_samples: int
    """Samples of its batches."""
    loss_scales: tuple[float, ...] = ()
    """In float16 the scale of the loss in each local step, which a replay needs; else empty."""
    frozen: tuple[str, ...] = ()
    """Parameters that were frozen in all its forward passes, by name: they have no gradient, and are not stepped."""


class Taken(NamedTuple):
    """How long the parts of an arrival took, in seconds."""

    pull: float = 0.0
    """Parameters came to the worker."""
    compute: float = 0.0
    """The gradient was computed."""
    push: float = 0.0
    """It came to the server."""
    wait: float = 0.0
    """The worker was idle between its previous gradient and the start of this one."""
    apply: float = 0.0
    """The server applied it, or a synchronous rank took its own step."""


class Event(Struct, frozen=True, gc=False):
    """What happened at one arrival at the server.

    A delay counts the updates between the read of a gradient and its application (a fresh gradient has 0);
    `arrival_delay` is the same count when it arrived. The training clock starts when all workers are ready, and stands
    still during evaluations. Times are in seconds."""

    dispatch: int
    """The number of the gradient, in the order of the starts."""
    worker: int
    """Who brought it."""
    batches: Ranges
    """What it was computed on."""
    read_version: int
    """The version at which it was computed."""
    version: int
    """Updates so far, with those of this arrival."""
    arrival_delay: int
    """Updates between its read and its arrival."""
    outcome: str
    """``applied``, ``held`` or ``dropped``."""
    uses: Uses
    """(dispatch, delay) of each gradient in the steps taken here."""
    drops: tuple[int, ...]
    """Dispatches, arriving or held, that will never be used."""
    abandoned: tuple[int, ...]
    """Dispatches in flight that were stopped; their batches are handed out again."""
    started: tuple[Started, ...]
    """Of what starts: worker, dispatch, batches, and the learning rate of local steps or None."""
    loss: float
    """Mean loss per loss term."""
    weight: float
    """Loss terms."""
    num_samples: int
    """Samples of its batches."""
    learning_rate: float
    """The schedule's, with its samples counted."""
    train_seconds: float
    """The training clock."""
    total_samples: int
    """Samples that have arrived so far, with these."""
    num_local_steps: int = 1
    """Steps of the worker's inner optimizer."""
    flight_seconds: float = 0.0
    """From dispatch to arrival."""
    pull_seconds: float = 0.0
    """Parameters came to the worker."""
    compute_seconds: float = 0.0
    """The gradient was computed."""
    push_seconds: float = 0.0
    """It came to the server."""
    wait_seconds: float = 0.0
    """The worker was idle before it began."""
    apply_seconds: float = 0.0
    """The server applied it."""
    loss_scales: tuple[float, ...] = ()
    """In float16 the scale of the loss in each local step; else empty."""
    gradient_norm: float | None = None
    """The Euclidean norm of the direction of the last step taken here, before clipping. None if no step was taken here,
    or if the optimizer that took it does not clip (``--clip-norm 0``)."""
    kind: str = "arrival"
    """``arrival``."""


class Moment(Struct, frozen=True):
    """How far the run had come when something else happened."""

    version: int
    """Updates so far."""
    total_samples: int
    """Samples that have arrived so far."""
    train_seconds: float
    """The training clock."""


class Evaluation(Moment, frozen=True):
    """An exact evaluation of one frozen version on the full evaluation set. On a closed-form problem `loss` is the
    excess f(x) - f*, and `weight` is None. `version` and `total_samples` count the updates, and the samples that have
    arrived, until then; `train_seconds` is the training clock."""

    loss: float
    """Mean loss per loss term."""
    weight: float | None
    """Loss terms of the evaluation set."""
    metrics: Mapping[str, float | None]
    """By name, those of the task; None where one is undefined."""
    eval_seconds: float
    """That the evaluation took, while the training clock stood still."""
    kind: str = "evaluate"
    """``evaluate``."""
    worker_losses: tuple[float | None, ...] = ()
    """The loss of every worker's share of the evaluation set; empty where one process evaluates all of it."""
    details: Mapping[str, Any] = {}
    """What else the task says, as JSON."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Evaluation:
        """From a record as `read_events` gives it, or `msgspec.structs.asdict`."""
        known = {name: record[name] for name in cls.__struct_fields__ if name in record}
        known["worker_losses"] = tuple(record.get("worker_losses", ()))
        metrics = {}
        for name, value in record["metrics"].items():
            metrics[name] = math.nan if value is None else value
        known["metrics"] = metrics
        return cls(**known)


STOPPED = "the run was stopped, and goes on from a checkpoint"
"""Why workers leave where a run of real workers is resumed: the gradients that they had in flight are lost."""


class Membership(Moment, frozen=True, gc=False):
    """A worker joined or left. The first three fields are those of an `Evaluation`."""

    kind: str
    """``join`` or ``leave``."""
    worker: int
    """Who joined or left."""
    reason: str = ""
    """Empty for an orderly join or leave."""
    lost: tuple[int, ...] = ()
    """Dispatches that were in flight and are gone; their batches are handed out again."""
    uses: Uses = ()
    """As in `Event`."""
    started: tuple[Started, ...] = ()
    """As in `Event`."""
    drops: tuple[int, ...] = ()
    """As in `Event`."""
    abandoned: tuple[int, ...] = ()
    """As in `Event`."""


SCORE = "score"
"""The kind of a `Fault` of a task's code that computes scores."""


class Fault(Struct, frozen=True):
    """Something went wrong and was handled (a non-finite loss, a lost rank); `message` is what the user was told."""

    message: str
    worker: int | None
    version: int
    train_seconds: float
    kind: str = "fault"


class Checkpointed(Moment, frozen=True):
    """The state of this moment is being written, for which training stood still `copy_seconds`. For `cut_short` see
    `asyncsgd.core.protocol.Method`, for states `asyncsgd.core.checkpoints`."""

    name: str
    copy_seconds: float
    cut_short: str | None = None
    kind: str = "checkpoint"


class Parts(Moment, frozen=True):
    """From here on every batch is computed in another number of parts: in a run that goes on with more."""

    before: int
    micro_batches: int
    kind: str = "parts"


class Resumed(Moment, frozen=True):
    """The run goes on from the checkpoint `name`, in new processes. `discarded` arrivals after it are computed again,
    and lie in events.discarded.jsonl."""

    name: str
    discarded: int
    kind: str = "resume"


class Extended(Moment, frozen=True):
    """A run that was at the end of its budget goes on with a larger one. A run of that budget would have started these
    gradients at the last arrival."""

    started: tuple[Started, ...]
    kind: str = "extend"


class MemoryUsed(Moment, frozen=True):
    """The most memory that each worker's process has needed up to an evaluation."""

    workers: tuple[tuple[int, int, int], ...]
    """For each worker: its number, resident bytes, and bytes on a GPU."""
    kind: str = "memory"


StageUse = tuple[int, int, float | None, float, float, float]
"""What a stage of a pipeline has done: the number of its replica, its own number, the seconds of its passes (None if
they are unknown), the seconds from the first pass of each batch to the last one, the seconds in which it exchanged
gradients, and the bytes that it sent."""


class StagesUsed(Moment, frozen=True):
    """What the stages of a pipeline have done since the evaluation before."""

    stages: tuple[StageUse, ...]
    kind: str = "stages"


Record = Event | Evaluation | Membership | Fault | Checkpointed | Parts | Resumed | Extended | MemoryUsed | StagesUsed


@dataclasses.dataclass
class RuleActed:
    """How often a rule did something else than asynchronous SGD does; a server counts it, the summary has it."""

    KEPT: ClassVar = ("arrivals", "altered")

    arrivals: int = 0
    altered: int = 0
    """Arrivals whose gradient was not simply applied at the full learning rate, their worker starting again."""

    def describe(self, rule: str, num_workers: int) -> str:
        """Whether the rule acted, for the user. Empty for the rule `asynchronous` and for one worker.

        >>> RuleActed(600, 0).describe("koloskova", num_workers=4)
        'rule   altered 0 of 600 arrivals: koloskova never acted, so this run is asynchronous SGD'
        """
        if rule == "asynchronous" or num_workers == 1 or not self.arrivals:
            return ""
        counts = f"rule   altered {self.altered} of {self.arrivals} arrivals"
        return counts if self.altered else f"{counts}: {rule} never acted, so this run is asynchronous SGD"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value.item()  # a number of numpy's


_BLOCK = 1 << 20
_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODER = msgspec.json.Decoder(dict[str, Any])


def encoded(record: Record) -> bytes:
    """The record as a line. Non-finite numbers become null, never a number that looks measured.

    >>> encoded(Fault("the loss is not finite", 1, 7, float("inf")))
    b'{"message":"the loss is not finite","worker":1,"version":7,"train_seconds":null,"kind":"fault"}\\n'
    """
    return _ENCODER.encode(record) + b"\n"


def read_events(path: Path, num_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of an events.jsonl after its header, as dicts, without a torn last line and what comes after
    `num_bytes`.

    Raises:
        ValueError: if a whole line is not JSON, or the schema is another one than this reader's.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if num_bytes is not None and file.tell() > num_bytes:
                return
            if not line.endswith(b"\n") and not _decoded(line):
                return
            if (record := record_in(line, f"{path.name}: line {number}")) is not None:
                yield record


def record_in(line: bytes, where: str) -> dict[str, Any] | None:
    """The record in a line; None for the header.

    Raises:
        ValueError: as `read_events`; `where` is the line's place, for the message.
    """
    record = _decoded(line)
    if not record:
        raise ValueError(f"{where} is damaged: {line.decode(errors='replace').rstrip()[:60]!r}")
    if record.get("kind") != "header":
        return record
    if (schema := record.get("schema")) != SCHEMA:
        raise ValueError(f"{where} has schema {schema}, this version reads {SCHEMA}")
    return None


def _decoded(line: bytes) -> dict[str, Any]:
    """Empty where it holds no JSON object."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):
        return {}


def sha256_of_first(file: BinaryIO, num_bytes: int) -> Any:
    """Hash the first bytes of a file, which is then read up to there; a shorter one is hashed to its end.

    Returns:
        The hash as hashlib has it, so that later bytes can be added.
    """
    running = hashlib.sha256()
    while num_bytes > 0 and (block := file.read(min(num_bytes, _BLOCK))):
        running.update(block)
        num_bytes -= len(block)
    return running


def end_of(path: Path) -> dict[str, Any]:
    """What a summary keeps of the records: the length of events.jsonl and the hash of its last line."""
    with open(path, "rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        length = min(num_bytes, _BLOCK)
        while True:
            file.seek(num_bytes - length)
            last_bytes = file.read(length)
            begin = last_bytes.rfind(b"\n", 0, -1) + 1
            if begin > 0 or length == num_bytes:
                break
            length = min(num_bytes, 2 * length)
    return {"events_bytes": num_bytes, "last_record_sha256": hashlib.sha256(last_bytes[begin:]).hexdigest()}


def lost_records(path: Path, summary: Mapping[str, Any]) -> str:
    """How an events.jsonl is not what it was when the run's summary was written, as a power cut or a copy may leave it;
    empty where it is, and where the summary is of a version that did not say.
    """
    recorded = summary.get("events_bytes")
    if recorded is None:
        return ""
    try:
        end = end_of(path)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if end["events_bytes"] != recorded:
        return f"{path.name} has {end['events_bytes']} bytes, and had {recorded} when the run ended"
    if end["last_record_sha256"] != summary.get("last_record_sha256"):
        return f"the last line of {path.name} is not the one with which the run ended"
    return ""


def read_header(path: Path) -> dict[str, Any]:
    """The first line of an events.jsonl; empty where it is damaged."""
    with open(path, "rb") as file:
        return _decoded(file.readline())


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: if it is not JSON.
    """
    try:
        return msgspec.json.decode(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
