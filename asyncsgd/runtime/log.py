"""The event log as a replay reads it: every record with its line, every field of its type and in its range.

`asyncsgd.records.events.read_events` gives what the lines hold, unchecked. Here a line that cannot be a record is
refused with its number, so that a replay has values to compare and never stumbles over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.events import Range, Started, read_numbered_events

LARGEST = 2**63 - 1
SHORTEST_SECONDS = 1e-300
"""Shorter flights are no measurements, and rules that take their reciprocals would not get finite numbers."""


@dataclasses.dataclass(frozen=True)
class LogRecord:
    """An arrival, evaluation, join, leave or extension. What is None is not in the log and is not compared."""

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
    micro_batches: tuple[int, ...]


def read_log(path: Path) -> list[LogRecord]:
    """Read the records that a replay needs; those of other kinds are left out.

    Raises:
        UsageError: if the file cannot be read, or a record is not what a run writes; it names the line and the field.
    """
    try:
        numbered = list(read_numbered_events(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"the event log cannot be read: {error}") from error
    records = [_typed(line, fields) for line, fields in numbered]
    return [record for record in records if record is not None]


class _Unfit(Exception):
    """A value is not of its type or range; the message says what it has to be."""


def _typed(line: int, fields: Mapping[str, Any]) -> LogRecord | None:
    def need(name: str, check: Callable[[Any], Any]) -> Any:
        try:
            return check(fields.get(name))
        except _Unfit as unfit:
            value = f"{name} is {_shown(fields[name])}" if name in fields else f"there is no {name}"
            raise UsageError(
                f"events.jsonl, line {line}: {value}, it must be {unfit}; give the log as the run wrote it"
            ) from unfit

    def may(name: str, check: Callable[[Any], Any]) -> Any:
        return None if fields.get(name) is None else need(name, check)

    kind = need("kind", _text)
    if kind not in ("arrival", "evaluate", "join", "leave", "extend"):
        return None
    state = (line, kind, need("version", _count), may("total_samples", _count))
    if kind == "evaluate":
        return LogRecord(*state)
    started = need("started", _list_of(_started))
    if kind == "extend":
        return LoggedStarts(*state, started)
    reply = (
        started,
        need("worker", _count),
        may("uses", _list_of(_use)),
        may("drops", _list_of(_count)),
        may("abandoned", _list_of(_count)),
    )
    if kind != "arrival":
        return LoggedReply(*state, *reply)
    return LoggedArrival(
        *state,
        *reply,
        dispatch=need("dispatch", _count),
        batches=need("batches", _list_of(_range)),
        read_version=need("read_version", _count),
        outcome=may("outcome", _text),
        loss=may("loss", _number),
        weight=may("weight", _number),
        num_samples=may("num_samples", _count),
        flight_seconds=need("flight_seconds", _seconds),
        loss_scales=may("loss_scales", _list_of(_scale)) or (),
        micro_batches=may("micro_batches", _list_of(_parts)) or (),
    )


def _shown(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unfit("a text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise _Unfit("a whole number from 0 up")
    return value


def _number(value: Any) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise _Unfit("a finite number")
    return value


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if seconds != 0 and seconds < SHORTEST_SECONDS:
        raise _Unfit(f"0 or a number from {SHORTEST_SECONDS:g} up")
    return seconds


def _scale(value: Any) -> float:
    scale = _number(value)
    if scale <= 0:
        raise _Unfit("a list of loss scales above 0")
    return scale


def _parts(value: Any) -> int:
    if _count(value) == 0:
        raise _Unfit("a list of whole numbers from 1 up")
    return int(value)


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    rate = _number(value)
    if rate < 0:
        raise _Unfit("a learning rate from 0 up, or null")
    return rate


def _list_of(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Unfit("a list")
        return tuple([check(item) for item in value])

    return check_all


def _use(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _Unfit("a list of pairs: dispatch, delay")
    return _count(value[0]), _count(value[1])


def _range(value: Any) -> Range:
    if not isinstance(value, list) or len(value) != 3:
        raise _Unfit("a list of ranges: stream, first, after last")
    return _count(value[0]), _count(value[1]), _count(value[2])


def _started(value: Any) -> Started:
    if not isinstance(value, list) or len(value) not in (3, 4):
        raise _Unfit("a list of starts: worker, dispatch, batches, learning rate")
    rate = _rate(value[3]) if len(value) == 4 else None
    return _count(value[0]), _count(value[1]), _list_of(_range)(value[2]), rate
