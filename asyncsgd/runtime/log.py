"""The event log as a replay reads it: a dictionary for every record that a replay needs, with its `line`.

A line that cannot be a record is refused with its number; one that a run would not have written is a difference in the
replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.events import Range, read_numbered_events

LogRecord = Mapping[str, Any]


def _ranges(batches: list[list[int]]) -> tuple[Range, ...]:
    return tuple((int(stream), int(first), int(end)) for stream, first, end in batches)


def _starts(started: list[list[Any]]) -> list[tuple[int, int, tuple[Range, ...], float | None]]:
    """Worker, dispatch, batches and the learning rate of local steps, which older logs do not have."""
    return [
        (int(worker), int(dispatch), _ranges(batches), None if not rate or rate[0] is None else float(rate[0]))
        for worker, dispatch, batches, *rate in started
    ]


_TYPES: dict[str, Callable[[Any], Any]] = {
    "batches": _ranges,
    "started": _starts,
    "flight_seconds": float,
    "loss_scales": lambda scales: tuple(map(float, scales)),
}
"""Of the keys that are no whole numbers."""

_NEEDED: dict[str, tuple[str, ...]] = {
    "arrival": ("worker", "started", "dispatch", "batches", "read_version", "flight_seconds"),
    "join": ("worker", "started"),
    "leave": ("worker", "started"),
    "extend": ("started",),
    "parts": ("before", "micro_batches"),
    "evaluate": (),
}


def read_log(path: Path) -> list[LogRecord]:
    """Read the records that a replay needs; those of other kinds are left out.

    Raises:
        UsageError: if the file cannot be read, or a line is no record of a run; it names the line.
    """
    try:
        numbered = list(read_numbered_events(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"the event log cannot be read: {error}") from error
    records: list[LogRecord] = []
    for line, fields in numbered:
        try:
            if (needed := _NEEDED.get(fields["kind"])) is not None:
                given = {"loss_scales": fields.get("loss_scales") or ()} | dict(fields)
                names = ("version", "loss_scales", *needed)
                typed = {name: _TYPES.get(name, int)(given[name]) for name in names}
                records.append({**fields, **typed, "line": line})
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"events.jsonl, line {line} is no record of a run ({type(error).__name__}: {error}); give the log as "
                f"the run wrote it"
            ) from error
    return records
