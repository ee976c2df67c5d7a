"""The event log as a replay reads it: every record with its line.

`asyncsgd.records.events.read_events` gives what the lines hold, unchecked. Here a line that cannot be a record is
refused with its number; one that a run would not have written is a difference in the replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.events import Range, Started, read_numbered_events


@dataclasses.dataclass(frozen=True)
class LogRecord:
    """An arrival, evaluation, join, leave, extension or change of the parts. What is None is not in the log and is not
    compared.
    """

    line: int
    kind: str
    version: int
    total_samples: int | None


@dataclasses.dataclass(frozen=True)
class LoggedStarts(LogRecord):
    """A run whose budget has grown: what it started when it went on."""

    started: tuple[Started, ...]


@dataclasses.dataclass(frozen=True)
class LoggedReply(LoggedStarts):
    """A join or leave: what the server replied to it."""

    worker: int
    uses: tuple[tuple[int, int], ...] | None
    drops: tuple[int, ...] | None
    abandoned: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LoggedArrival(LoggedReply):
    """An arrival: the gradient, and what the server replied to it; see `asyncsgd.records.events.Event`."""

    dispatch: int
    batches: tuple[Range, ...]
    read_version: int
    outcome: str | None
    loss: float | None
    """None where it was not a finite number."""
    weight: float | None
    num_samples: int | None
    flight_seconds: float
    loss_scales: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LoggedParts(LogRecord):
    """From here on a batch is computed in another number of parts; see `asyncsgd.records.events.Parts`."""

    before: int
    micro_batches: int


def read_log(path: Path) -> list[LogRecord]:
    """Read the records that a replay needs; those of other kinds are left out.

    Raises:
        UsageError: if the file cannot be read, or a line is no record of a run; it names the line.
    """
    try:
        numbered = list(read_numbered_events(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"the event log cannot be read: {error}") from error
    records = []
    for line, fields in numbered:
        try:
            records.append(_typed(line, fields))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"events.jsonl, line {line} is no record of a run ({type(error).__name__}: {error}); give the log as "
                f"the run wrote it"
            ) from error
    return [record for record in records if record is not None]


def _typed(line: int, fields: Mapping[str, Any]) -> LogRecord | None:
    kind = fields["kind"]
    if kind not in ("arrival", "evaluate", "join", "leave", "extend", "parts"):
        return None
    known: dict[str, Any] = {"line": line, "kind": kind, "version": int(fields["version"])}
    known["total_samples"] = fields.get("total_samples")
    if kind == "evaluate":
        return LogRecord(**known)
    if kind == "parts":
        return LoggedParts(**known, before=int(fields["before"]), micro_batches=int(fields["micro_batches"]))
    known["started"] = tuple(
        (int(worker), int(dispatch), _ranges(batches), None if not rate or rate[0] is None else float(rate[0]))
        for worker, dispatch, batches, *rate in fields["started"]
    )
    if kind == "extend":
        return LoggedStarts(**known)
    known |= {"worker": int(fields["worker"])}
    known |= {name: _tuples(fields.get(name)) for name in ("uses", "drops", "abandoned")}
    if kind != "arrival":
        return LoggedReply(**known)
    known |= {name: fields.get(name) for name in ("outcome", "loss", "weight", "num_samples")}
    return LoggedArrival(
        **known,
        dispatch=int(fields["dispatch"]),
        batches=_ranges(fields["batches"]),
        read_version=int(fields["read_version"]),
        flight_seconds=float(fields["flight_seconds"]),
        loss_scales=tuple(map(float, fields.get("loss_scales") or ())),
    )


def _ranges(batches: list[list[int]]) -> tuple[Range, ...]:
    return tuple((int(stream), int(first), int(end)) for stream, first, end in batches)


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values
